"""Builds the documentation site:  python docs/build.py [FOLDER]   (pip install -e ".[docs]"; default folder: build/docs)

Links to files of the repository that are not pages (results, tests, examples) become links to GitHub. A link to nothing, to
a missing heading or to an unknown name of the API ends the build.
"""

import re
import shutil
import subprocess
import sys
from pathlib import Path

DOCS = Path(__file__).resolve().parent
REPOSITORY = DOCS.parent
GITHUB = "https://github.com/jaxlogp/jaxlogp/blob/main/"
LINK = re.compile(r"\]\((?!https?:|#)([^)\s]+)\)")


def to_site(page: Path) -> str:
    """Returns the text of a page, with links out of docs/ as links to GitHub.

    Raises:
      SystemExit: if a link names nothing.
    """

    def link(match: re.Match[str]) -> str:
        target, _, heading = match[1].partition("#")
        path = (page.parent / target).resolve()
        if not path.exists():
            raise SystemExit(f"{page.relative_to(REPOSITORY)}: expected a link to a file, got {match[1]}")
        if path.is_relative_to(DOCS):
            return match[0]
        return f"]({GITHUB}{path.relative_to(REPOSITORY)}{'#' + heading if heading else ''})"

    return LINK.sub(link, page.read_text(encoding="utf-8"))


def to_source(module: Path) -> str:
    """Returns the text of a module with the headings and cross-references that mkdocstrings reads."""
    text = module.read_text(encoding="utf-8")
    text = re.sub(r"^( +)Example:$", r"\1Examples:", text, flags=re.MULTILINE)
    return re.sub(r":(?:func|class|meth|data|mod):`~?(?:\w+\.)*(\w+)`", r"`\1`", text)


def main() -> None:
    """Copies the pages to the folder and has zensical build them there."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else REPOSITORY / "build" / "docs").resolve()
    shutil.rmtree(folder, ignore_errors=True)
    pages = folder / "pages"
    pages.mkdir(parents=True)
    for page in sorted(DOCS.glob("*.md")):
        (pages / page.name).write_text(to_site(page), encoding="utf-8")
    shutil.copytree(DOCS / "pictures", pages / "pictures", ignore=shutil.ignore_patterns("*.py"))
    for module in REPOSITORY.glob("jaxlogp/**/*.py"):
        copy = folder / "source" / module.relative_to(REPOSITORY)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(to_source(module), encoding="utf-8")
    shutil.copy(DOCS / "zensical.toml", folder)
    zensical = Path(sys.executable).with_name("zensical")
    sys.exit(subprocess.run([zensical, "build", "--strict", "--clean"], cwd=folder, check=False).returncode)


if __name__ == "__main__":
    main()
