"""The recipes of docs/recipes.md: their loops learn, and the page shows lines of the scripts."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "recipes.md").read_text(encoding="utf-8")
SCRIPT = re.compile(r"\]\(\.\./(examples/recipes/\w+\.py)\)")


def lines_of(code: str) -> str:
    """Returns the code without blank lines and indentation, with a line break on both sides of each line."""
    return "".join(f"\n{line.strip()}\n" for line in code.splitlines() if line.strip())


@pytest.mark.slow
@pytest.mark.parametrize("library", ["equinox", "nnx", "linen"])
def test_a_loop_has_the_loss_of_stored_logits_and_learns(library, cheap_processes):
    """In a process of its own, which asserts that the gradients are equal."""
    command = [sys.executable, "-m", f"examples.recipes.{library}_loop"]
    first, *steps = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True).stdout.splitlines()
    loss = re.fullmatch(r"loss (\S+), from stored logits (\S+); gradients equal", first)
    assert loss and 0.01 < float(loss[1]) == pytest.approx(float(loss[2]), abs=1e-5)
    rewards = [float(re.fullmatch(r"step \d+: reward (\S+)", step)[1]) for step in steps]
    assert len(rewards) == 8 and rewards[0] < 0.1 and rewards[-1] > 0.9


@pytest.mark.parametrize("section", [section for section in PAGE.split("\n## ") if "```python" in section])
def test_the_code_of_a_section_is_in_the_script_that_it_links(section):
    code = lines_of((ROOT / SCRIPT.findall(section)[-1]).read_text(encoding="utf-8"))
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        assert lines_of(block) in code


def test_the_page_links_every_script():
    scripts = {str(path.relative_to(ROOT)) for path in (ROOT / "examples" / "recipes").glob("*.py")}
    assert set(SCRIPT.findall(PAGE)) == scripts
