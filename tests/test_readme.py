"""The README matches the code: its two commands, the options, files and names it mentions, and its Python examples."""

import dataclasses
import functools
import json
import re
import shlex
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import experiments
import jaxlogp
from benchmarks.head_speed import __main__ as head_speed
from experiments import chat, command_line, evaluate, export, grpo, plot, sft
from experiments.config import Config, validate
from jaxlogp.head import registry
from jaxlogp.head.registry import ENGINES
from tests.experiments.tiny import tiny

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "CONTRIBUTING.md")} | {
    f"docs/{path.name}": path.read_text(encoding="utf-8") for path in sorted((ROOT / "docs").glob("*.md"))
}
USAGE = (
    "README.md",
    *(f"docs/{name}.md" for name in ("training", "sft", "models", "library", "losses", "benchmarks")),
    *(f"docs/{name}.md" for name in ("your_data", "long_context", "finding_drift", "gpu_install")),
)
PROGRAMS = {"grpo": grpo, "sft": sft, "evaluate": evaluate, "export": export, "chat": chat, "plot": plot}
PRINTING = "docs/truncated_sampling.md", "docs/finding_drift.md", "docs/gpu_install.md", "docs/losses.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VENV = "python3 -m venv .venv && . .venv/bin/activate && "
COMMANDS = {
    "main": VENV + 'python3 -m pip install -e ".[experiments]" && python3 -m experiments.grpo',
    "tests": VENV + 'python3 -m pip install -e ".[test]" && python3 -m pytest',
}


def marked_command(name: str) -> str:
    """The code block behind the marker ``name``, by which ``.ci/run`` finds it too."""
    blocks = re.findall(rf"<!-- command: {name} -->\n```bash\n(.*?)\n```\n", README, re.DOTALL)
    assert len(blocks) == 1, f"README.md has {len(blocks)} blocks marked {name}"
    return blocks[0]


def python_blocks(page: str) -> list[str]:
    return re.findall(r"```python\n(.*?)```", PAGES[page], re.DOTALL)


def commands(page: str) -> list[tuple[str, list[str]]]:
    """Returns the programs of `experiments` that the shell blocks of a page start, with their arguments."""
    shell = "\n".join(re.findall(r"```bash\n(.*?)```", PAGES[page], re.DOTALL)).replace("\\\n", " ").replace("$i", "0")
    found = re.findall(r"python3? -m experiments\.(\w+)(.*)", shell)
    return [(name, shlex.split(rest.partition(" &")[0].rstrip("…"), comments=True)) for name, rest in found]


def run(code: str) -> dict:
    """The names that the code leaves."""
    found: dict = {}
    exec(compile(code, "example.py", "exec"), found)
    return found


@pytest.mark.parametrize("name", COMMANDS)
def test_the_two_commands_are_the_ones_that_users_and_ci_rely_on(name):
    assert marked_command(name) == COMMANDS[name]
    assert README.index(f"<!-- command: {name} -->") < 6000


def test_it_is_short_and_begins_with_what_a_newcomer_needs():
    lines = README.splitlines()
    assert len(lines) <= 130
    assert any("pip install -e ." in line for line in lines[:25])
    assert any("from jaxlogp import" in line for line in lines[:50])
    assert README.index("git clone") < README.index("experiments.grpo")


def test_every_extra_that_is_mentioned_exists():
    mentioned = set(re.findall(r'-e "\.\[([\w,]+)\]"', "".join(PAGES.values())))
    assert mentioned and set(",".join(mentioned).split(",")) <= set(PROJECT["optional-dependencies"])


def test_every_option_that_is_mentioned_exists(capsys):
    text = ""
    for program in (*PROGRAMS.values(), head_speed):
        with pytest.raises(SystemExit) as stopped:
            program.run_cli(["--help"])
        assert stopped.value.code == 0
        text += capsys.readouterr().out
    offered = set(re.findall(r"--[a-z][a-z0-9.-]*", text))
    # XLA's own flag, spelled with underscores, and one of pip's.
    ours = "".join(PAGES[name] for name in USAGE).replace("--xla_force", "").replace("pip install --no-deps", "")
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9.-]*(?![\w])", ours))
    assert mentioned and mentioned <= offered | {"--help"}, mentioned - offered


@pytest.mark.parametrize("page", [page for page in PAGES if commands(page)])
def test_every_command_is_one_that_its_program_takes(page, monkeypatch):
    """Options, values and their ranges, without running anything."""

    def parse(options, main, **rest):
        return command_line.run_command(options, lambda parsed: parsed, **rest)

    monkeypatch.setattr(command_line, "use_compilation_cache", lambda *_, **__: None)
    for name, arguments in commands(page):
        monkeypatch.setattr(PROGRAMS[name], "run_command", parse)
        options = PROGRAMS[name].run_cli(arguments)
        if name == "grpo":
            validate(Config(**{field.name: getattr(options, field.name) for field in dataclasses.fields(Config)}))
        if name == "sft" and options.resume is None:
            validate(sft.config_of(options))


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_is_linked_exists(page):
    for link in re.findall(r"\]\((?!https?:)([^)#\s]+)", PAGES[page]):
        assert ((ROOT / page).parent / link).exists(), link


def test_the_site_has_every_page():
    """In its navigation, and each name of the API on the page for it."""
    site = tomllib.loads((ROOT / "docs" / "zensical.toml").read_text(encoding="utf-8"))["project"]
    named = re.findall(r"'([a-z_]+\.md)'", str(site["nav"]))
    assert sorted(named) == sorted(Path(page).name for page in PAGES if page.startswith("docs/"))
    for module in (jaxlogp, jaxlogp.head, jaxlogp.invariance, jaxlogp.losses):
        missing = [
            name
            for name in module.__all__
            if not re.search(rf"^::: jaxlogp\.[a-z.]*{name}$", PAGES["docs/api.md"], re.M)
        ]
        assert missing in ([], ["losses"])


def test_the_engines_of_the_table_are_the_engines():
    library = PAGES["docs/library.md"]
    table = library[library.index("| engine |") :].split("\n\n")[0]
    assert set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE)) == set(ENGINES)


@pytest.mark.slow
def test_the_python_examples_of_the_library_run(capsys):
    values, gradients, distillation, local = python_blocks("docs/library.md")
    distilled = [gradient.shape for gradient in run(values + distillation)["gradients"]]
    capsys.readouterr()
    found = run(values + gradients + local)
    assert float(capsys.readouterr().out) < 0.0
    assert [gradient.shape for gradient in found["gradients"]] == distilled == [(2, 8, 64), (1000, 64)]
    arrays = (found[name] for name in ("hidden", "weight", "targets", "old_log_probs", "advantages", "mask"))
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = (P("data"), P("tensor"), *[P("data")] * 4)
    loss = jax.jit(jax.shard_map(found["local"], mesh=mesh, in_specs=specs, out_specs=P()))(*arrays)
    np.testing.assert_allclose(loss, found["step_loss"](found["hidden"], found["weight"]), rtol=1e-5)


@pytest.mark.slow
def test_the_page_about_a_trainer_of_your_own_is_a_script(capsys):
    """Which compares its steps itself."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        run("".join(python_blocks("docs/own_trainer.md")))
    assert len(capsys.readouterr().out.split()) == 3


@pytest.mark.slow
@pytest.mark.parametrize("page", PRINTING)
def test_a_page_shows_what_its_code_prints(page, capsys):
    """Below the code, or beside it."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        run(python_blocks(page)[0])
    printed = capsys.readouterr().out.splitlines()
    assert printed
    for line in printed:
        assert f"    {line}\n" in PAGES[page] or f"  # {line}\n" in PAGES[page], line


@pytest.mark.slow
def test_the_page_about_your_own_data_shows_what_its_command_prints(monkeypatch, tmp_path, capsys):
    """With a shorter warm start."""
    page = "docs/your_data.md"
    block = re.findall(r"```bash\n(.*?)```", PAGES[page], re.DOTALL)[0]
    monkeypatch.chdir(tmp_path)
    Path("sums.jsonl").write_text(re.search(r"<<'END'\n(.*?)END\n", block, re.DOTALL)[1], encoding="utf-8")
    name, arguments = commands(page)[0]
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        PROGRAMS[name].run_cli([*arguments, "--cache", "none", "--warm-start.max-steps", "1"])
    printed = capsys.readouterr().out.replace(str(tmp_path), "/home/me").splitlines()
    shown = re.findall(
        r"^    (.*)", PAGES[page].partition("prints, among other lines,\n")[2].partition("\n- ")[0], re.M
    )
    assert len(shown) == 2 and set(shown) <= set(printed)


@pytest.mark.slow
def test_the_first_python_example_of_the_readme_runs():
    found = run(python_blocks("README.md")[0])
    assert [gradient.shape for gradient in found["gradients"]] == [(2, 8, 64), (1000, 64)]
    np.testing.assert_allclose(found["loss"], 0.0, atol=1e-6)  # advantages 1 and -1 at equal ratios
    assert found["values"].entropy.shape == (2, 8)


@pytest.mark.slow
def test_the_python_example_about_your_own_rewards_trains(monkeypatch, tmp_path, capsys):
    """With the options of a tiny run in addition to its own."""
    monkeypatch.setattr(registry, "ENGINES", dict(ENGINES))
    config = functools.partial(tiny, tmp_path, "own", schedule={"steps": 1}, warm_start={"max_steps": 0})
    monkeypatch.setattr(experiments, "Config", lambda **options: config(**options))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        run("".join(python_blocks("docs/your_data.md")))
    steps = [json.loads(line) for line in (tmp_path / "own" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    trained = next(each for each in steps if each["kind"] == "train")
    assert {"reward/close", "reward/lambda"} <= set(trained)


@pytest.mark.slow
def test_the_second_one_trains(monkeypatch, tmp_path, capsys):
    """With the options of a tiny run beside its own."""
    config = functools.partial(tiny, tmp_path, "own", schedule={"steps": 1}, warm_start={"max_steps": 0})
    monkeypatch.setattr(experiments, "Config", lambda **options: config(**options))
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        found = run(python_blocks("README.md")[1])
    assert any("reward/last_digit" in record for record in found["result"].metrics)
    assert capsys.readouterr().out.splitlines()[-1] == str(found["result"].after)


def test_the_python_about_several_processes_names_what_exists(monkeypatch):
    """In one process, whose start is not made."""
    calls = []
    monkeypatch.setattr("experiments.processes.start", lambda *given: calls.append(given))
    given = {"config": "config", "MyTask": lambda: "task", "my_function": "reward"}
    given["train"] = lambda config, **parts: calls.append((config, parts))
    begin, reduction = python_blocks("docs/scaling.md")
    exec(begin, given)
    assert calls == [(None, None, None), ("config", {"task": "task", "reward": "reward"})]
    exec(reduction, given)
    assert given["all_reduce"](np.array([3, 2**40])).tolist() == [3, 2**40]
