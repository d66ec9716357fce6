"""Executes the notebooks and checks that the committed ones are current.

A notebook is generated from the percent script of its name, executed, and committed with its outputs.

python notebooks/build.py                       # execute every script in full and write its notebook
python notebooks/build.py grpo_from_scratch     # only this one
python notebooks/build.py --keep-outputs        # write text that has changed around the same code
python notebooks/build.py --check --execute     # fail if one is stale or does not run (a short run)
"""

import argparse
import ast
import base64
import hashlib
import json
import os
import re
import sys
import tempfile
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

FOLDER = Path(__file__).resolve().parent
SCRIPTS = {path.stem: path for path in sorted(FOLDER.glob("*.py")) if path.name != "build.py"}
MAX_PICTURE_BYTES = 60_000
MAX_NOTEBOOK_BYTES = 200_000
SHORT_STEPS = 4
"""Optimizer steps of a notebook that is executed only to see that it runs."""
WITH_OUTPUT = {"display", "print", "show", "train"}
"""Names of functions whose call leaves an output."""
LOCAL_PATH = re.compile(r"(?<![\w.])/(?:home|private|root|tmp|Users|var)/")


def read_script(script: Path) -> NotebookNode:
    """Returns the notebook of a script, without outputs. Cell ids count from 0."""
    notebook = jupytext.read(script, fmt="py:percent")
    for index, cell in enumerate(notebook.cells):
        cell["id"] = f"cell-{index}"
    del notebook.metadata["jupytext"]
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    return notebook


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def code_digest(notebook: NotebookNode) -> str:
    """Returns the sha256 of the sources of the code cells."""
    sources = [cell.source for cell in code_cells(notebook)]
    return hashlib.sha256(json.dumps(sources).encode()).hexdigest()


def execute(notebook: NotebookNode, steps: int | None = None) -> None:
    """Runs a notebook from top to bottom and fills in its outputs.

    The working folder is temporary. It has the repository as `checkout`, where the notebooks would clone it, and outputs
    show it as a dot.

    Args:
        notebook: the notebook of a script.
        steps: optimizer steps of the trainer. None: those of the notebook.

    Raises:
        CellExecutionError: if a cell fails.
    """
    environment = {name: value for name, value in os.environ.items() if name != "JAXLOGP_NOTEBOOK_STEPS"}
    if steps is not None:
        environment["JAXLOGP_NOTEBOOK_STEPS"] = str(steps)
    metadata = notebook.metadata.copy()
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary).resolve()
        (folder / "checkout").symlink_to(FOLDER.parent)
        client = NotebookClient(
            notebook,
            timeout=None if steps is None else 600,
            kernel_name="python3",
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": folder}},
        )
        client.execute(env=environment)
    notebook.metadata = metadata
    for cell in code_cells(notebook):
        for output in cell.outputs:
            if output.output_type == "stream":
                output.text = output.text.replace(str(folder), ".")


def output_kinds(cell: NotebookNode) -> set[str]:
    """Returns the kinds of the outputs of a code cell: names of streams, MIME types, or "error"."""
    kinds = set()
    for output in cell.outputs:
        if output.output_type == "stream":
            kinds.add(output.name)
        else:
            kinds.update(output.get("data", {"error": None}))
    return kinds


def leaves_output(source: str) -> bool:
    """Returns True if a cell calls one of `WITH_OUTPUT` outside of the functions that it defines.

    Example:
        >>> leaves_output("for step in steps:\\n    print(step)")
        True
        >>> leaves_output("def loss(step):\\n    print(step)")
        False
    """
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.FunctionDef):
            continue
        for node in ast.walk(statement):
            if isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] in WITH_OUTPUT:
                return True
    return False


def find_stale(notebook: NotebookNode, fresh: NotebookNode) -> list[str]:
    """Returns what shows that a notebook is not the one of its script, or that its outputs are of different code.

    Args:
        notebook: the committed notebook.
        fresh: the notebook of its script, without outputs.
    """
    bare = nbformat.from_dict(notebook)
    digest = bare.metadata.pop("jaxlogp", {}).get("code_sha256")
    for cell in code_cells(bare):
        cell.outputs, cell.execution_count = [], None
    problems = []
    if bare != fresh:
        problems.append("differs from its script")
    if digest != code_digest(notebook):
        problems.append("its outputs are those of different code")
    return problems


def find_bad_outputs(notebook: NotebookNode) -> list[str]:
    """Returns what is wrong with the outputs of a notebook; what they say is not compared, as machines differ."""
    problems, pictures = [], []
    cells = code_cells(notebook)
    if [cell.execution_count for cell in cells] != list(range(1, len(cells) + 1)):
        problems.append("its cells were not executed once each, in order")
    for cell in cells:
        kinds = output_kinds(cell)
        text = "".join(output.get("text", "") for output in cell.outputs)
        if leaves_output(cell.source) and not kinds:
            problems.append(f"{cell.id}: expected an output, got none")
        problems += [f"{cell.id}: has an output of kind {kind}" for kind in ("error", "stderr") if kind in kinds]
        if LOCAL_PATH.search(text):
            problems.append(f"{cell.id}: its output names a path of one machine")
        for output in cell.outputs:
            picture = output.get("data", {}).get("image/png")
            if picture is not None:
                pictures.append((cell.id, len(base64.b64decode(picture))))
    problems += [
        f"{name}: expected a picture of at most {MAX_PICTURE_BYTES} bytes, got {size}"
        for name, size in pictures
        if size > MAX_PICTURE_BYTES
    ]
    if not pictures:
        problems.append("has no picture")
    size = len(nbformat.writes(notebook))
    if size > MAX_NOTEBOOK_BYTES:
        problems.append(f"expected at most {MAX_NOTEBOOK_BYTES} bytes, got {size}")
    return problems


def find_other_kinds(notebook: NotebookNode, executed: NotebookNode) -> list[str]:
    """Returns the cells whose outputs are of different kinds after another execution."""
    problems = []
    for cell, other in zip(code_cells(notebook), code_cells(executed), strict=True):
        kept, seen = sorted(output_kinds(cell)), sorted(output_kinds(other) - {"stderr"})
        if kept != seen:
            problems.append(f"{cell.id}: its outputs are {kept}, but {seen} when executed")
    return problems


def check(script: Path, short_run: bool) -> list[str]:
    """Returns the problems of the notebook of a script, after a short run of it if asked for."""
    path = script.with_suffix(".ipynb")
    if not path.is_file():
        return ["does not exist"]
    notebook, fresh = nbformat.read(path, as_version=4), read_script(script)
    problems = find_stale(notebook, fresh) + find_bad_outputs(notebook)
    if short_run:
        execute(fresh, SHORT_STEPS)
        print(f"{path.name}: ran from top to bottom")
        if not problems:
            problems = find_other_kinds(notebook, fresh)
    return problems


def write(script: Path, keep_outputs: bool) -> list[str]:
    """Writes the notebook of a script; returns the problems for which it did not."""
    path, notebook = script.with_suffix(".ipynb"), read_script(script)
    if keep_outputs:
        old = nbformat.read(path, as_version=4)
        if old.metadata.get("jaxlogp", {}).get("code_sha256") != code_digest(notebook):
            return ["its code has changed since it was executed"]
        for cell, executed in zip(code_cells(notebook), code_cells(old), strict=True):
            cell.outputs, cell.execution_count = executed.outputs, executed.execution_count
    else:
        execute(notebook)
    notebook.metadata["jaxlogp"] = {"code_sha256": code_digest(notebook)}
    problems = find_bad_outputs(notebook)
    if not problems:
        path.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
    return problems


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"notebooks, of {', '.join(SCRIPTS)}; default: all")
    parser.add_argument("--keep-outputs", action="store_true", help="keep the outputs of code that has not changed")
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a notebook is not current")
    parser.add_argument("--execute", action="store_true", help="with --check: also run every notebook, shortened")
    options = parser.parse_args()
    if unknown := set(options.names) - set(SCRIPTS):
        parser.error(f"expected names of {', '.join(SCRIPTS)}, got {', '.join(sorted(unknown))}")
    if options.execute and not options.check or options.keep_outputs and options.check:
        parser.error("--execute belongs to --check, and --keep-outputs to writing")
    failed = False
    for name in options.names or SCRIPTS:
        if options.check:
            problems = check(SCRIPTS[name], options.execute)
        else:
            problems = write(SCRIPTS[name], options.keep_outputs)
        failed = failed or bool(problems)
        for problem in problems:
            print(f"notebooks/{name}.ipynb: {problem}", file=sys.stderr)
    if failed and options.check:
        print("to execute and write notebooks: python notebooks/build.py [NAME …]", file=sys.stderr)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
