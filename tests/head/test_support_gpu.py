"""The kernels of a support on a GPU: `pytest -m gpu tests/head/test_support_gpu.py`. Skipped where there is none.

JAXLOGP_TEST_GPU=1 must be set, otherwise tests/conftest.py hides the GPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxlogp import Support, linear_log_probs
from jaxlogp.head import SupportEngine, SupportKernelEngine, record_head_runs, registry
from jaxlogp.head.triton.availability import device_capability
from tests import oracle
from tests.head import cases, support_case
from tests.head.support_case import ALL_OPTIONS, case, check, expected, gradients
from tests.head.support_rows import EDGES, float64_sums, kernel_sums, make_rows

here = (device_capability() or 0) >= 80
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not here, reason="it needs an NVIDIA GPU of compute capability 8.0 or more"),
    pytest.mark.filterwarnings("ignore:The Pallas Triton backend is deprecated:DeprecationWarning"),
]
BF16_ERROR = 2.0**-9


@pytest.fixture
def by_kernels(monkeypatch):
    """Without the XLA form, so that a refusal is an error."""
    monkeypatch.setattr(registry, "AUTOMATIC_ON_SUPPORT", (SupportKernelEngine(),))


@pytest.fixture(scope="module")
def large():
    """4096 tokens of 1 to 600 ids, one of which all tokens share, in random order."""
    rng = np.random.default_rng(3)
    tokens, width, vocab = 4096, 1024, 20000
    sizes = np.where(np.arange(tokens) % 512 == 5, 600, rng.integers(1, 12, tokens))
    # Ids from 1 on are distinct in a token: successive ones from a random place.
    begins = rng.integers(0, vocab - 1, tokens)
    lists = [[0, *(1 + (begin + np.arange(size - 1)) % (vocab - 1))] for begin, size in zip(begins, sizes, strict=True)]
    lists = [rng.permutation(ids).tolist() for ids in lists]
    support = Support.from_lists(lists, capacity=int(1.25 * sizes.sum()))
    keys = jax.random.split(jax.random.key(0), 2)
    return {
        "hidden": jax.random.normal(keys[0], (tokens, width), jnp.bfloat16),
        "weight": (jax.random.normal(keys[1], (vocab, width)) * 2.0 / width**0.5).astype(jnp.bfloat16),
        "bias": jnp.asarray(rng.normal(size=vocab), jnp.float32),
        "targets": np.array([ids[0] for ids in lists], np.int32),
        "mask": np.arange(tokens) % 7 != 3,
        "lists": lists,
        "support": jax.tree.map(jnp.asarray, support),
        "g_lp": jnp.asarray(rng.normal(size=tokens), jnp.float32),
        "g_entropy": jnp.asarray(rng.normal(size=tokens), jnp.float32),
    }


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all options"])
@pytest.mark.parametrize("dtype, width", [("float32", 24), ("float32", 1152), ("bfloat16", 896), ("bfloat16", 4096)])
def test_values_and_gradients_match_the_oracle(by_kernels, dtype, width, options):
    data = case(width=width, dtype=jnp.dtype(dtype))
    error = support_case.GRADIENT_ERROR if dtype == "float32" else BF16_ERROR
    check(gradients(data, **options), expected(data, **options), error)


def test_many_ids_match_the_oracle_and_the_xla_form(by_kernels, monkeypatch, large):
    seen = gradients(large, **ALL_OPTIONS)
    check(seen, expected(large, **ALL_OPTIONS), BF16_ERROR)
    monkeypatch.setattr(registry, "AUTOMATIC_ON_SUPPORT", (SupportEngine(),))
    check(seen, support_case.Values(*map(oracle.f64, gradients(large, **ALL_OPTIONS))), 2 * BF16_ERROR)


@pytest.mark.parametrize("options", [{}, ALL_OPTIONS], ids=["plain", "all options"])
def test_bits_repeat_with_an_id_that_all_tokens_share(by_kernels, large, options):
    first = jax.device_get(gradients(large, **options))
    for _ in range(5):
        cases.same_bits(first, gradients(large, **options))


def test_bits_do_not_depend_on_the_memory_before(by_kernels, large):
    first = jax.device_get(gradients(large))
    named = np.isin(np.arange(large["weight"].shape[0]), np.concatenate(large["lists"]))
    assert 0 < (~named).sum()
    for _ in range(3):
        garbage = [jnp.full(large["weight"].shape, jnp.nan, jnp.float32) for _ in range(40)]
        jax.block_until_ready(garbage)
        del garbage
        seen = gradients(large)
        cases.same_bits(first, seen)
        assert not np.asarray(seen.weight)[~named].any()


def test_rows_at_the_edges_of_groups_are_summed_in_a_tree():
    rows, number = make_rows(EDGES, 512), len(EDGES)
    sums, magnitudes = float64_sums(rows, number)
    seen = kernel_sums(rows, number)
    assert (np.abs(seen - sums) <= 100 * 2.0**-24 * magnitudes).all()
    assert not seen[np.array(EDGES) == 0].any()
    np.testing.assert_array_equal(seen, kernel_sums(rows, number))


def test_bits_of_a_row_do_not_depend_on_other_rows():
    rows = make_rows(EDGES, 256)
    alone = kernel_sums(rows, len(EDGES))
    others = make_rows([5, 40], 256, spare=0, seed=1)
    tokens = others.source.shape[0]
    both = [
        np.concatenate([others.source, rows.source]),
        np.concatenate([others.token, rows.token + tokens]),
        np.concatenate([others.dz, rows.dz]),
        np.concatenate([others.row, rows.row + 2]),
    ]
    np.testing.assert_array_equal(kernel_sums(type(rows)(*both), len(EDGES) + 2)[2:], alone)


def test_inside_a_shard_map_of_one_rank(by_kernels, large):
    axes = jax.make_mesh((1,), ("tensor",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:1])

    def values(hidden, weight, bias, axis_name=None):
        options = {"bias": bias, "support": large["support"], "axis_name": axis_name}
        return linear_log_probs(hidden, weight, large["targets"], large["mask"], **options).log_probs

    def local(*operands):
        log_probs, pull_back = jax.vjp(lambda *x: values(*x, axis_name="tensor"), *operands)
        return log_probs, *pull_back(large["g_lp"])

    p = jax.P
    specs, out_specs = (p(), p("tensor"), p("tensor")), (p(), p(), p("tensor"), p("tensor"))
    operands = large["hidden"], large["weight"], large["bias"]
    seen = jax.jit(jax.shard_map(local, mesh=axes, in_specs=specs, out_specs=out_specs))(*operands)

    @jax.jit
    def alone(*operands):
        log_probs, pull_back = jax.vjp(values, *operands)
        return log_probs, *pull_back(large["g_lp"])

    cases.same_bits(seen, alone(*operands))


def test_auto_takes_the_kernels(large):
    with record_head_runs() as runs:
        linear_log_probs(large["hidden"], large["weight"], large["targets"], large["mask"], support=large["support"])
    assert [(run.engine, run.reason) for run in runs] == [("support_kernels", "auto")]
