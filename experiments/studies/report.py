"""The file in which a study keeps its table, with the command that made it."""

import shlex
import sys
from pathlib import Path


def command_of(study: str) -> str:
    """This process' command line; of an absolute path only the last part, because its folders are private."""
    words = (Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:])
    return " ".join([f"python -m experiments.studies.{study}", *map(shlex.quote, words)])


def write_report(study: str, path: Path, title: str, body: str) -> Path:
    """Writes title, command and body as Markdown; returns the file.

    Args:
        study: its module in `experiments.studies`.
        path: the file; its folder is made.
        title: first line.
        body: tables.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"# {title}\n\nCommand: `{command_of(study)}`\n\n{body}\n", encoding="utf-8")
    return path
