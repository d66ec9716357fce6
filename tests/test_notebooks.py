"""The committed notebooks are those of their scripts, and every kind of staleness is found."""

import base64

import pytest

nbformat = pytest.importorskip("nbformat", reason="the extra notebooks is not installed")
pytest.importorskip("jupytext", reason="the extra notebooks is not installed")

from nbclient.exceptions import CellExecutionError  # noqa: E402

from notebooks import build  # noqa: E402


def committed(name):
    return nbformat.read(build.SCRIPTS[name].with_suffix(".ipynb"), as_version=4)


def problems_of(notebook, fresh):
    return build.find_stale(notebook, fresh) + build.find_bad_outputs(notebook)


def first(notebook, kind):
    """The first code cell with an output of a kind."""
    return next(cell for cell in build.code_cells(notebook) if kind in build.output_kinds(cell))


@pytest.mark.parametrize("name", build.SCRIPTS)
def test_the_committed_notebook_is_current(name):
    assert build.check(build.SCRIPTS[name], short_run=False) == []


def edit_code(notebook, fresh):
    build.code_cells(notebook)[-1].source += "\n"


def edit_text(notebook, fresh):
    notebook.cells[0].source += "!"


def edit_metadata(notebook, fresh):
    notebook.metadata["accelerator"] = "TPU"


def edit_script(notebook, fresh):
    build.code_cells(fresh)[-1].source += "\n"


def edit_both(notebook, fresh):
    edit_code(notebook, fresh)
    edit_script(notebook, fresh)


def forget_the_code(notebook, fresh):
    del notebook.metadata["jaxlogp"]


def drop_outputs(notebook, fresh):
    first(notebook, "stdout").outputs = []


def skip_a_cell(notebook, fresh):
    build.code_cells(notebook)[1].execution_count = None


def execute_twice(notebook, fresh):
    for cell in build.code_cells(notebook):
        cell.execution_count += 1


def leave_an_error(notebook, fresh):
    error = nbformat.v4.new_output("error", ename="ValueError", evalue="", traceback=[])
    build.code_cells(notebook)[0].outputs = [error]


def leave_a_warning(notebook, fresh):
    warning = nbformat.v4.new_output("stream", name="stderr", text="a warning")
    build.code_cells(notebook)[0].outputs = [warning]


def name_a_path(notebook, fresh):
    first(notebook, "stdout").outputs[0].text = "run folder: /home/someone/runs"


def enlarge_a_picture(notebook, fresh):
    for output in first(notebook, "image/png").outputs:
        if "data" in output:
            output.data["image/png"] = base64.b64encode(bytes(build.MAX_PICTURE_BYTES + 1)).decode()


def drop_pictures(notebook, fresh):
    for cell in build.code_cells(notebook):
        for output in cell.outputs:
            output.get("data", {}).pop("image/png", None)


def print_too_much(notebook, fresh):
    first(notebook, "stdout").outputs[0].text = "step\n" * build.MAX_NOTEBOOK_BYTES


@pytest.mark.parametrize(
    "change, expected",
    [
        (edit_code, "differs from its script"),
        (edit_text, "differs from its script"),
        (edit_metadata, "differs from its script"),
        (edit_script, "differs from its script"),
        (edit_both, "its outputs are those of different code"),
        (forget_the_code, "its outputs are those of different code"),
        (drop_outputs, "expected an output, got none"),
        (skip_a_cell, "not executed once each, in order"),
        (execute_twice, "not executed once each, in order"),
        (leave_an_error, "has an output of kind error"),
        (leave_a_warning, "has an output of kind stderr"),
        (name_a_path, "names a path of one machine"),
        (enlarge_a_picture, "expected a picture of at most 60000 bytes, got 60001"),
        (drop_pictures, "has no picture"),
        (print_too_much, "expected at most 200000 bytes"),
    ],
)
def test_what_is_stale_is_found(change, expected):
    notebook, fresh = (
        committed("log_probs_without_logits"),
        build.read_script(build.SCRIPTS["log_probs_without_logits"]),
    )
    assert problems_of(notebook, fresh) == []
    change(notebook, fresh)
    assert any(expected in problem for problem in problems_of(notebook, fresh))


def test_text_around_the_same_code_keeps_its_outputs(tmp_path):
    script = tmp_path / "copy.py"
    text = build.SCRIPTS["log_probs_without_logits"].read_text(encoding="utf-8")
    nbformat.write(committed("log_probs_without_logits"), script.with_suffix(".ipynb"))
    script.write_text(text.replace("# ## Memory", "# ## Bytes"), encoding="utf-8")
    assert "differs from its script" in build.check(script, short_run=False)
    assert build.write(script, keep_outputs=True) == []
    assert build.check(script, short_run=False) == []
    script.write_text(text.replace("HIDDEN = ", "HIDDEN = 2 * "), encoding="utf-8")
    assert build.write(script, keep_outputs=True) == ["its code has changed since it was executed"]


def notebook_of(*sources):
    return nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in sources])


def test_a_notebook_runs_in_a_folder_with_the_checkout(monkeypatch):
    monkeypatch.setenv("JAXLOGP_NOTEBOOK_STEPS", "3")
    source = "import os, pathlib; print(pathlib.Path.cwd(), os.environ.get('JAXLOGP_NOTEBOOK_STEPS'), os.listdir())"
    short, full = notebook_of(source), notebook_of(source)
    build.execute(short, steps=2)
    build.execute(full)
    assert short.cells[0].outputs[0].text == ". 2 ['checkout']\n"
    assert full.cells[0].outputs[0].text == ". None ['checkout']\n"
    assert short.metadata == short.cells[0].metadata == {}


def test_a_cell_that_fails_ends_the_execution():
    with pytest.raises(CellExecutionError, match="ZeroDivisionError"):
        build.execute(notebook_of("print('before')", "1 / 0"), steps=2)


def test_outputs_of_another_kind_are_found():
    notebook, executed = committed("log_probs_without_logits"), committed("log_probs_without_logits")
    leave_a_warning(executed, None)
    assert build.find_other_kinds(notebook, executed) == []
    cell = first(executed, "image/png")
    cell.outputs = [output for output in cell.outputs if output.output_type == "stream"]
    assert build.find_other_kinds(notebook, executed) == [
        f"{cell.id}: its outputs are ['image/png', 'stdout', 'text/plain'], but ['stdout'] when executed"
    ]
