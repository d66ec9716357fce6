"""The Hopper kernels of attention on the CPU, through JAX's Mosaic GPU interpreter, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments.models.attention import first_keys
from experiments.models.attention.hopper.attend import attend_hopper
from experiments.models.attention.hopper.bounds import TILE, Bounds
from experiments.models.attention.hopper.settings import Settings
from jaxlogp._mosaic_gpu import interpreter, why_not_available
from tests.experiments import test_attention as cases


def test_bounds_name_the_first_and_last_blocks_that_count():
    # 300 slots are three tiles: documents of 100, 150 and 50, and padding that reads itself.
    ids = jnp.repeat(jnp.arange(3), jnp.array([100, 150, 50]), total_repeat_length=300)[None]
    bounds = Bounds.of(first_keys(ids))
    assert bounds.first.shape == (1, 3 * TILE)
    assert bounds.first[0, 300:].tolist() == list(range(300, 3 * TILE))
    assert bounds.lowest.tolist() == [[0, 100, 250]]
    assert bounds.highest.tolist() == [[100, 250, 3 * TILE - 1]]
    assert bounds.last.tolist() == [[249, 299, 3 * TILE - 1]]


@pytest.fixture
def operands_in_registers(monkeypatch):
    """Lets the interpreter multiply a left operand that is in registers; it knows those in shared memory alone."""
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    plain = gpu_callbacks.wgmma

    def wgmma(**arguments):
        left = arguments["a_allocation_key_as_array"]
        if left.ndim != 2:
            return plain(**arguments)
        memory, thread = gpu_callbacks._get_shared_memory(), arguments["thread"]
        info = gpu_callbacks.memory.GPULoggingInfo(arguments["mesh_location"], thread, arguments["source_info"])

        def place(name):
            key = gpu_callbacks.HostAllocationKey.from_array(arguments[f"{name}_allocation_key_as_array"])
            transforms = gpu_callbacks._remove_noop_transforms(arguments[f"{name}_transforms"])
            return key, memory.access(key, jax.tree.map(int, transforms))

        right, accumulator = (
            memory.get_buffer_content(*place(name), thread, logging_info=info)[0] for name in ("b", "acc")
        )
        result = accumulator + np.asarray(left, np.float32) @ np.asarray(right, np.float32)
        memory.store_buffer_content(*place("acc"), result, thread, logging_info=info)
        return arguments["token"]

    monkeypatch.setattr(gpu_callbacks, "wgmma", wgmma)


@pytest.mark.skipif(why_not_available() is not None, reason=str(why_not_available()))
def test_values_and_gradients_equal_float64(operands_in_registers, monkeypatch):
    length, scale, window, softcap = 200, 0.2, 90, 3.0
    monkeypatch.setattr(cases, "SCALE", scale)
    q, k, v, d_out = cases.operands(length, heads=2, kv_heads=1, head_dim=64, rows=1, dtype=jnp.bfloat16)
    ids = cases.packed_ids(length)[:1]
    bounds = Bounds.of(first_keys(jnp.asarray(ids), window))
    settings = Settings(scale, softcap, interpret=interpreter())
    out, pull_back = jax.vjp(lambda *x: attend_hopper(*x, bounds, settings), q, k, v)
    wanted = cases.oracle(q, k, v, d_out, cases.visible_keys(ids, window), softcap)
    for name, got, exact in zip(("out", "dq", "dk", "dv"), (out, *pull_back(d_out)), wanted, strict=True):
        error = np.linalg.norm(np.asarray(got, np.float64) - exact) / np.linalg.norm(exact)
        # Results, probabilities and their gradients are rounded to bf16, up to 2^-9 = 2e-3 a number.
        assert error < 5e-3, (name, error)
