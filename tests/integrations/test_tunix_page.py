"""The Python of docs/tunix.md runs, and what it says of Tunix is so."""

import contextlib
import importlib.util
import inspect
import io
import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parent.parent.parent / "docs/tunix.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("tunix") is None, reason="NOT RUN: needs the extra tunix"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.mark.parametrize("block", BLOCKS, ids=range(len(BLOCKS)))
def test_a_block_runs_and_prints_what_the_page_shows(block):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(block, "docs/tunix.md", "exec"), {})
    if shown := re.search(r"^print\(.*#\s*(True|False)$", block, re.M):
        assert printed.getvalue().split() == [shown.group(1)]


def test_the_rollout_drops_the_temperature():
    from tunix.rl.rollout import vanilla_rollout

    source = inspect.getsource(vanilla_rollout.VanillaRollout.get_per_token_logps)
    assert "compute_per_token_logps" in source and "temperature" not in source
