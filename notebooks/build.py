"""Generates the notebooks from their percent scripts, checks that they are up to date, and executes them.

python notebooks/build.py                       # write every .ipynb, without outputs
python notebooks/build.py --check --execute     # fail if one is stale or does not run (a short run)
"""

import argparse
import os
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient

FOLDER = Path(__file__).resolve().parent
SCRIPTS = sorted(path for path in FOLDER.glob("*.py") if path.name != "build.py")


def generate(script: Path) -> str:
    """The notebook of a script as text, reproducible: cell ids count from 0."""
    notebook = jupytext.read(script, fmt="py:percent")
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"
    notebook.metadata.pop("jupytext", None)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return nbformat.writes(notebook) + "\n"


def execute(text: str, steps: int) -> None:
    """Runs a notebook from top to bottom with ``steps`` optimizer steps; raises if a cell fails."""
    os.environ["JAXLOGP_NOTEBOOK_STEPS"] = str(steps)
    notebook = nbformat.reads(text, as_version=4)
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", resources={"metadata": {"path": FOLDER.parent}}
    )
    client.execute()
    outputs = sum(len(cell.get("outputs", [])) for cell in notebook.cells)
    assert outputs > 0, "a notebook that prints nothing has not run"


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="fail if a notebook differs from its script")
    parser.add_argument("--execute", action="store_true", help="run every notebook")
    parser.add_argument("--steps", type=int, default=4, help="optimizer steps of an executed notebook")
    options = parser.parse_args()
    stale = []
    for script in SCRIPTS:
        text, path = generate(script), script.with_suffix(".ipynb")
        if not options.check:
            path.write_text(text, encoding="utf-8")
        elif not path.is_file() or path.read_text(encoding="utf-8") != text:
            stale.append(path.name)
        if options.execute:
            execute(text, options.steps)
            print(f"{path.name}: ran from top to bottom")
    for name in stale:
        print(f"{name}: differs from its script; run `python notebooks/build.py`", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
