"""The README matches the code: its two commands, the options, files and names it mentions, and its Python examples."""

import re
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxlogp
from benchmarks.head_speed import __main__ as head_speed
from experiments import chat, evaluate, export, grpo, plot
from jaxlogp.head.registry import ENGINES

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
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


@pytest.mark.parametrize("name", COMMANDS)
def test_the_two_commands_are_the_ones_that_users_and_ci_rely_on(name):
    assert marked_command(name) == COMMANDS[name]
    assert README.index(f"<!-- command: {name} -->") < 1500, "near the top"


def test_every_extra_that_is_mentioned_exists():
    mentioned = set(re.findall(r'-e "\.\[(\w+)\]"', README))
    assert mentioned and mentioned <= set(PROJECT["optional-dependencies"])


def test_every_option_that_is_mentioned_exists(capsys):
    text = ""
    for program in (grpo, evaluate, export, chat, plot, head_speed):
        with pytest.raises(SystemExit) as stopped:
            program.run_cli(["--help"])
        assert stopped.value.code == 0
        text += capsys.readouterr().out
    offered = set(re.findall(r"--[a-z][a-z.-]*", text))
    # XLA's own flag, spelled with underscores, and one of pip's.
    text_of_ours = README.replace("--xla_force", "").replace("pip install --no-deps", "")
    mentioned = set(re.findall(r"(?<![\w-])--[a-z][a-z.-]*(?![\w])", text_of_ours))
    assert mentioned and mentioned <= offered | {"--help"}, mentioned - offered


def test_every_file_that_is_linked_exists():
    links = re.findall(r"\]\((?!https?:)([^)#]+)", README)
    assert links
    for link in links:
        assert (ROOT / link).exists(), link


def test_the_engines_of_the_table_are_the_engines():
    table = README[README.index("| engine |") :].split("\n\n")[0]
    named = set(re.findall(r"^\| `(\w+)`", table, re.MULTILINE))
    assert named == set(ENGINES)


@pytest.mark.slow
def test_the_python_examples_run(capsys):
    values, gradients, local = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    names = re.findall(r"from jaxlogp import (.*)", values)[0].split(", ")
    assert all(hasattr(jaxlogp, name) for name in names)
    found = {}
    exec(compile(values + gradients + local, "README.md", "exec"), found)
    assert float(capsys.readouterr().out) < 0.0
    assert [gradient.shape for gradient in found["gradients"]] == [(2, 8, 64), (1000, 64)]
    arrays = (found[name] for name in ("hidden", "weight", "targets", "old_log_probs", "advantages", "mask"))
    mesh = jax.make_mesh((2, 4), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    specs = (P("data"), P("tensor"), *[P("data")] * 4)
    loss = jax.jit(jax.shard_map(found["local"], mesh=mesh, in_specs=specs, out_specs=P()))(*arrays)
    np.testing.assert_allclose(loss, found["step_loss"](found["hidden"], found["weight"]), rtol=1e-5)
