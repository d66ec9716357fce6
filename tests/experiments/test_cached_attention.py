"""Attention over the sampler's cache against a float64 softmax of a row's tokens, written here from the definition."""

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from experiments.models import decoder_layer
from experiments.models.attention import AttentionRun, triton_cached
from experiments.models.attention.cached import attend_cached, choose_cached, continued, empty_cache, first_readable
from experiments.models.attention.triton_cached import BLOCK, NormAndRotation, attend_triton, rows_of_program
from experiments.models.decoder import Decoder
from experiments.models.decoder_config import DecoderConfig, SlidingLayers
from experiments.models.decoder_layer import DecoderLayer
from experiments.models.mesh import MeshSpec, make_mesh
from experiments.models.sharding import parameter_shardings
from tests.oracle import fp32_bound

pytestmark = pytest.mark.costly

HEADS, KV_HEADS, HEAD_DIM, LAYERS = 4, 2, 64, 2
SCALE, SOFTCAP = 0.2, 2.0
# One prompt shorter than a block, one longer; two rows continue each.
PROMPT_LENGTHS, WIDTH, OF_ROW = (5, BLOCK + 3), BLOCK + 6, (0, 0, 1, 1)
NEW = BLOCK + 2


def numbers(rng, *shape):
    # bf16 exactly, so that no rounding of operands counts.
    return rng.normal(size=shape).astype(jnp.bfloat16).astype(np.float32)


@functools.cache
def case(dtype="float32"):
    rng = np.random.default_rng(0)
    prompts = [numbers(rng, LAYERS, 2, WIDTH, KV_HEADS, HEAD_DIM) for _ in range(2)]
    queries, *news = (numbers(rng, NEW, len(OF_ROW), n, HEAD_DIM) for n in (HEADS, KV_HEADS, KV_HEADS))
    return tuple(x.astype(dtype) for x in (*prompts, queries, *news))


def wanted(step, window, softcap, with_bound=False):
    """[rows, heads, head_dim] of the last layer, after `step` generated tokens before this one; and what fp32 may add.

    A weight is off by as much relative as two scores absolute, and by the sum of all weights. Against exact sums, half of
    what two in fp32 may differ by.
    """
    prompt_keys, prompt_values, queries, keys, values = (np.asarray(x, np.float64) for x in case())
    out = np.zeros((len(OF_ROW), HEADS, HEAD_DIM))
    bound = np.zeros_like(out)
    for row, prompt in enumerate(OF_ROW):
        for head in range(HEADS):
            mine = head // (HEADS // KV_HEADS)
            length = PROMPT_LENGTHS[prompt]
            both = (prompt_keys, keys), (prompt_values, values)
            k, v = (np.concatenate([old[-1, prompt, :length, mine], new[: step + 1, row, mine]]) for old, new in both)
            k, v = (x[max(len(x) - window, 0) if window else 0 :] for x in (k, v))
            scores = k @ queries[step, row, head] * SCALE
            score = fp32_bound(np.max(np.abs(k) @ np.abs(queries[step, row, head])) * SCALE, HEAD_DIM)
            scores = softcap * np.tanh(scores / softcap) if softcap else scores
            weights = np.exp(scores - scores.max())
            out[row, head] = weights @ v / weights.sum()
            bound[row, head] = (score + fp32_bound(0.5, 2 * len(k))) * (weights @ np.abs(v)) / weights.sum()
    return (out, bound) if with_bound else out


def generated(implementation, attend, steps, dtype):
    """What the last layer attends to in the last step, every step before it having been cached."""
    prompt_keys, prompt_values, queries, keys, values = map(jnp.asarray, case(dtype))
    cache = empty_cache(prompt_keys, prompt_values, jnp.asarray(PROMPT_LENGTHS), NEW, implementation)
    cache = cache.repeat_rows(2)
    assert (cache.prompt_of_row is not None) == (implementation == "triton")
    # All tokens but the last in one go: what single steps would have stored.
    stored = [x[: steps - 1].transpose(1, 2, 0, 3) for x in (keys, values)]
    last, before = cache.layers[-1], np.s_[:, :, : steps - 1]
    last = last._replace(keys=last.keys.at[before].set(stored[0]), values=last.values.at[before].set(stored[1]))
    cache = replace(cache, layers=(last,), filled=jnp.asarray(steps - 1, jnp.int32))
    out, held = attend(queries[steps - 1], keys[steps - 1], values[steps - 1], cache)
    np.testing.assert_array_equal(held.keys[:, :, steps - 1], keys[steps - 1])
    np.testing.assert_array_equal(held.values[:, :, : steps - 1], stored[1])
    return np.asarray(out, np.float64)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, SOFTCAP), (BLOCK + 1, None)])
@pytest.mark.parametrize("steps", [1, 3, NEW])
def test_every_row_reads_its_prompt_and_what_it_has_generated(steps, window, softcap):
    attend = functools.partial(attend_cached, window=window, scale=SCALE, softcap=softcap)
    out = generated("einsum", attend, steps, "float32")
    exact, bound = wanted(steps - 1, window, softcap, with_bound=True)
    assert (np.abs(out - exact) <= bound).all()


def by_kernel(queries, keys, values, cache, *, window, softcap, interpret=True):
    """With queries and keys that are to stay as they are: an angle of 0, and no norm."""
    first = first_readable(cache, window)
    ones = jnp.ones((len(OF_ROW), HEAD_DIM // 2))
    projections = jnp.concatenate([queries, keys, values], axis=1)[:, None]
    options = {"scale": SCALE, "softcap": softcap, "interpret": interpret}
    return attend_triton(projections, NormAndRotation(ones, 0 * ones), cache, first, **options)


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (7, SOFTCAP), (BLOCK + 1, None)])
@pytest.mark.parametrize("steps", [1, 3, NEW])
def test_the_kernel_reads_the_same_from_shared_prompts(steps, window, softcap, rows, monkeypatch):
    monkeypatch.setattr(triton_cached, "FEWEST_PROGRAMS", len(OF_ROW) * KV_HEADS // rows)
    attend = functools.partial(by_kernel, window=window, softcap=softcap)
    out = generated("triton", attend, steps, "bfloat16")
    # The probabilities and the result are rounded to bf16, 2^-9 each; values are below 4.
    np.testing.assert_allclose(out, wanted(steps - 1, window, softcap), atol=2**-9 * 4 * 2, rtol=0)


def share_blocks(monkeypatch, fewest=1):
    """Gives every row's blocks to several programs, `fewest` to each."""
    monkeypatch.setattr(triton_cached, "LONG", 1)
    monkeypatch.setattr(triton_cached, "MORE_PROGRAMS", 64)
    monkeypatch.setattr(triton_cached, "FEWEST_BLOCKS", fewest)


@pytest.mark.parametrize("fewest", [1, 2, 3])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize(("window", "softcap"), [(None, SOFTCAP), (7, None), (BLOCK + 1, None)])
def test_several_programs_share_the_blocks_of_a_row(window, softcap, rows, fewest, monkeypatch):
    # Two blocks of a prompt and two of each row, one or two rows a program: shares end within rows and between them.
    monkeypatch.setattr(triton_cached, "FEWEST_PROGRAMS", len(OF_ROW) * KV_HEADS // rows)
    share_blocks(monkeypatch, fewest)
    attend = functools.partial(by_kernel, window=window, softcap=softcap)
    out = generated("triton", attend, NEW, "bfloat16")
    np.testing.assert_allclose(out, wanted(NEW - 1, window, softcap), atol=2**-9 * 4 * 2, rtol=0)


@pytest.mark.parametrize("shared", [False, True])
def test_what_is_not_finite_in_a_row_stays_there(shared, monkeypatch):
    monkeypatch.setattr(triton_cached, "FEWEST_PROGRAMS", 1)
    if shared:
        share_blocks(monkeypatch)

    def attend(queries, keys, values, cache):
        (held,) = cache.layers
        spoiled = held._replace(values=held.values.at[1, :, 0].set(jnp.nan), keys=held.keys.at[1, :, 1].set(jnp.inf))
        spoiled = replace(cache, layers=(spoiled,))
        out, _ = by_kernel(queries, keys, values, spoiled, window=None, softcap=None)
        return out, held._replace(keys=held.keys.at[:, :, 2].set(keys))

    out = generated("triton", attend, 3, "bfloat16")
    assert np.isfinite(out[[0, 2, 3]]).all() and not np.isfinite(out[1]).any()


def test_rows_that_were_taken_apart_read_their_own_prompts(monkeypatch):
    monkeypatch.setattr(triton_cached, "FEWEST_PROGRAMS", 1)
    # Neighbours have different prompts; the order is its own inverse.
    order = jnp.asarray([0, 2, 1, 3])

    def attend(queries, keys, values, cache):
        moved = (x[order] for x in (queries, keys, values))
        out, held = by_kernel(*moved, cache.take_rows(order[None]), window=None, softcap=None)
        return out[order], held._replace(keys=held.keys[order], values=held.values[order])

    seen = generated("triton", attend, 3, "bfloat16")
    np.testing.assert_allclose(seen, wanted(2, None, None), atol=2**-9 * 4 * 2, rtol=0)


def at_steps(attend, steps, implementation, dtype):
    """What every row attends to after so many generated tokens of its own."""
    prompt_keys, prompt_values, queries, keys, values = map(jnp.asarray, case(dtype))
    cache = empty_cache(prompt_keys, prompt_values, jnp.asarray(PROMPT_LENGTHS), 0, implementation)
    cache = continued(cache, jnp.asarray(OF_ROW)[None], NEW)
    assert cache.layers[0].prompt_keys.shape[0] == 2
    # Beyond a row's own tokens there is something else.
    stored = (np.where(np.arange(NEW)[:, None] < steps, 1.0, 50.0)[..., None, None] * x for x in (keys, values))
    own = [x.transpose(1, 2, 0, 3).astype(dtype) for x in stored]
    held = cache.layers[-1]
    held = held._replace(keys=held.keys.at[:, :, :NEW].set(own[0]), values=held.values.at[:, :, :NEW].set(own[1]))
    newest = (x[steps, np.arange(len(OF_ROW))] for x in (queries, keys, values))
    out, after = attend(*newest, replace(cache, layers=(held,), filled=jnp.asarray(steps)))
    for row, step in enumerate(steps):
        np.testing.assert_array_equal(after.keys[row, :, step], keys[step, row])
        np.testing.assert_array_equal(after.values[row, :, :step], own[1][row, :, :step])
    return np.asarray(out, np.float64)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("window", [None, 7])
def test_rows_have_generated_different_numbers_of_tokens(window, shared, monkeypatch):
    if shared:
        share_blocks(monkeypatch)
    steps = np.int32([0, NEW - 1, 3, BLOCK])
    einsum = functools.partial(attend_cached, window=window, scale=SCALE, softcap=None)
    by_einsum = at_steps(einsum, steps, "einsum", "float32")
    kernel = functools.partial(by_kernel, window=window, softcap=None)
    by_triton = at_steps(kernel, steps, "triton", "bfloat16")
    for row, step in enumerate(steps):
        exact, bound = (x[row] for x in wanted(step, window, None, with_bound=True))
        assert (np.abs(by_einsum[row] - exact) <= bound).all()
        np.testing.assert_allclose(by_triton[row], exact, atol=2**-9 * 4 * 2, rtol=0)


def test_rows_share_a_program_where_they_share_a_prompt_and_leave_enough_programs():
    many = 16 * triton_cached.FEWEST_PROGRAMS
    assert rows_of_program(copies=8, group=2, pairs=many) == 8
    assert rows_of_program(copies=8, group=2, pairs=many // 8) == 2
    # No more queries than the smallest matrix has rows.
    assert rows_of_program(copies=8, group=3, pairs=many) == 4
    assert rows_of_program(copies=6, group=1, pairs=many) == 2
    assert rows_of_program(copies=1, group=1, pairs=many) == 1


@pytest.mark.parametrize("spec", [None, MeshSpec(data=2, tensor=2), MeshSpec(fsdp=4)])
def test_the_kernel_norms_and_rotates_as_the_model_does(spec, monkeypatch):
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_layers": 1, "num_heads": 4, "num_kv_heads": 2}
    options = {"qk_norm": True, "norm_plus_one": True, "attention_bias": True, "dtype": "bfloat16"}
    sliding = SlidingLayers(window=4, layers=(True,), rope_theta=10.0)
    config = DecoderConfig(vocab_size=32, head_dim=64, sliding=sliding, **sizes, **options)
    mesh = None if spec is None else make_mesh(spec)
    graph, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0), mesh=mesh))
    # As initialised, norms multiply by 1 and biases are 0.
    leaves, tree = jax.tree.flatten(state)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    noise = (0.3 * jax.random.normal(key, leaf.shape) for key, leaf in zip(keys, leaves, strict=True))
    state = jax.tree.unflatten(tree, [leaf + more for leaf, more in zip(leaves, noise, strict=True)])
    if mesh is not None:
        state = jax.device_put(state, parameter_shardings(state, mesh))
    ids = np.random.default_rng(0).integers(0, 32, (4, 6), np.int32)

    def read(join):
        model = nnx.merge(graph, state)
        layers = model.layers_apart()
        if join:
            layers[0].join_projections(1 if spec is None else spec.tensor)
        _, cache = model.prefill(ids, jnp.asarray([3, 6, 4, 5]), slots=2)
        cache = cache.repeat_rows(2)
        _, cache = model.decode_step(jnp.arange(8), cache, layers)
        hidden, cache = model.decode_step(jnp.arange(8, 16), cache, layers)
        return hidden, cache.layers[0].keys

    wanted = jax.jit(lambda: read(join=False))()
    monkeypatch.setattr(DecoderConfig, "cached_attention_run", lambda *_: AttentionRun("triton", "interpreted"))
    monkeypatch.setattr(triton_cached, "FEWEST_PROGRAMS", 1)
    monkeypatch.setattr(decoder_layer, "attend_triton", functools.partial(attend_triton, interpret=True))
    seen = jax.jit(lambda: read(join=True))()
    if mesh is not None:
        assert seen[1].addressable_shards[0].data.size == seen[1].size // mesh.size
    for got, exact in zip(seen, wanted, strict=True):
        got, exact = (np.asarray(x, np.float32) for x in (got, exact))
        got = got if got.ndim == 2 else got[:, :, : exact.shape[2]]
        # Compilers may leave out roundings between the product and the result: three of 2^-9, of numbers whose pairs
        # are as large as the largest.
        np.testing.assert_allclose(got, exact, atol=3 * 2**-9 * 2**0.5 * np.abs(exact).max(), rtol=0)


@pytest.mark.parametrize(("sliding", "kinds"), [(None, 1), ((True, False, True, False), 2)])
def test_a_step_is_traced_once_for_all_layers_that_are_alike(sliding, kinds, monkeypatch):
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_layers": 4, "num_heads": 2, "num_kv_heads": 1}
    layers = None if sliding is None else SlidingLayers(window=4, layers=sliding, rope_theta=10.0)
    config = DecoderConfig(vocab_size=8, head_dim=16, sliding=layers, **sizes)
    graph, state = nnx.split(Decoder(config, rngs=nnx.Rngs(0)))

    def step(state):
        model = nnx.merge(graph, state)
        _, cache = model.prefill(jnp.zeros((2, 3), jnp.int32), jnp.asarray([2, 3]), slots=2)
        return model.decode_step(jnp.arange(2), cache)[0]

    traced, attend_new = [], DecoderLayer.attend_new
    monkeypatch.setattr(DecoderLayer, "attend_new", lambda *given: traced.append(given) or attend_new(*given))
    jax.eval_shape(step, state)
    assert len(traced) == kinds


def test_the_choice_says_why():
    assert "float32" in choose_cached("auto", 2, 64, "float32").reason
    assert "asked for" in choose_cached("einsum", 2, 64, "bfloat16").reason
    assert "96" in choose_cached("auto", 2, 96, "bfloat16").reason
    assert "tensor ranks" in choose_cached("auto", 3, 64, "bfloat16", make_mesh(MeshSpec(tensor=2))).reason
