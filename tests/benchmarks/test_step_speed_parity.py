"""The step of transformers that step_speed measures, on a CPU at a tiny size; needs the extra parity.

python -m pytest -m parity tests/benchmarks/test_step_speed_parity.py
"""

import dataclasses
import importlib.util
import time

import numpy as np
import pytest

from benchmarks.step_speed.transformers_step import (
    Peer,
    TransformersConfig,
    TransformersStep,
    measured_elsewhere,
    timed,
)
from experiments.models.named_shapes import NAMED_SHAPES

pytestmark = [pytest.mark.parity, pytest.mark.filterwarnings("default")]
pytest.importorskip("transformers", reason="the extra parity is not installed")
torch = pytest.importorskip("torch", reason="the extra parity is not installed")

TINY = {"vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_heads": 4}


def tiny(name):
    return dataclasses.replace(NAMED_SHAPES[name], **TINY, num_kv_heads=2, head_dim=8)


# At these sizes the others are Qwen3-0.6B; the head of Qwen3-8B is a matrix of its own.
@pytest.mark.parametrize("name", ["qwen3-0.6b", "qwen3-8b", "llama-3.2-1b"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_a_step_trains_the_named_shape(name, checkpointing):
    step = TransformersStep(tiny(name), 4, 16, device="cpu", liger=False, checkpointing=checkpointing, micro_batches=2)
    assert all(each.dtype == torch.bfloat16 for each in step.model.parameters())
    assert step.model.config._attn_implementation == "sdpa" and step.model.is_gradient_checkpointing == checkpointing
    layer = 32 * (4 + 2 * 2 + 4) * 8 + 3 * 32 * 48 + 2 * 32 + (2 * 8 if name.startswith("qwen3") else 0)
    tables = 1 if NAMED_SHAPES[name].tie_embeddings else 2
    assert step.num_parameters == tables * 50 * 32 + 2 * layer + 32, "a tied head counts once"
    before = [each.detach().clone() for each in step.model.parameters()]
    for group in step._optimizer.param_groups:
        group["lr"] = 1e-2
    first = float(step())
    assert np.isfinite(first) and abs(first - np.log(50)) < 0.5, "random weights know nothing"
    assert all(not torch.equal(a, b) for a, b in zip(before, step.model.parameters(), strict=True))
    assert all(each.grad is None for each in step.model.parameters())
    for _ in range(5):
        last = float(step())
    assert last < first, "the same tokens every step"
    assert timed(step, 2, lambda: time.sleep(0)) > 0


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU would be measured")
def test_without_a_gpu_the_process_says_so():
    assert importlib.util.find_spec("torch") is not None
    assert measured_elsewhere(TransformersConfig()) == Peer(why_not="it needs an NVIDIA GPU")
    failed = measured_elsewhere(TransformersConfig(rows="16"))
    assert failed.why_not == "it needs an NVIDIA GPU", "nothing is made before the device is known"
