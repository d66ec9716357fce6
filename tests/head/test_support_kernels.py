"""The kernels of a support in Pallas' interpreter, where what nothing has written is NaN, and the choice of their engine."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxlogp import Support, VocabShards, linear_log_probs
from jaxlogp._stats import TokenLogProbs
from jaxlogp._targets import mask_cotangents
from jaxlogp.head import HeadSpec, SupportEngine, SupportKernelEngine, record_head_runs, registry
from jaxlogp.head.call import head_call
from jaxlogp.head.support.kernels import GROUP
from tests.head import support_case
from tests.head.support_case import ALL_OPTIONS, case, check, expected, gradients
from tests.head.support_rows import EDGES, Rows, float64_sums, kernel_sums, make_rows

BF16_ERROR = 2.0**-9
WIDTH = 8


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """The interpreted kernels and nothing else, so that a refusal is an error."""
    monkeypatch.setattr(registry, "AUTOMATIC_ON_SUPPORT", (SupportKernelEngine(interpret=True),))


# --- sums of rows ----------------------------------------------------------------------------------------------------


@pytest.mark.costly
def test_rows_at_the_edges_of_groups_are_summed_in_a_tree():
    """One after the other, the places of the longest row would have an error bound of 2047 roundings."""
    rows, number = make_rows(EDGES, WIDTH), len(EDGES)
    sums, magnitudes = float64_sums(rows, number)
    seen = kernel_sums(rows, number, interpret=True)
    # A product, and at most GROUP sums in the group, of groups, of what is left of each, and of groups of groups.
    roundings = 1 + 4 * GROUP + 2
    assert (np.abs(seen - sums) <= roundings * 2.0**-24 * magnitudes).all()
    assert not seen[np.array(EDGES) == 0].any()


@pytest.mark.costly
def test_bits_of_a_row_do_not_depend_on_other_rows():
    """Its groups are counted from its own first place, wherever that is."""
    rows = make_rows(EDGES, WIDTH)
    alone = kernel_sums(rows, len(EDGES), interpret=True)
    others = make_rows([5, 40], WIDTH, spare=0, seed=1)
    tokens = others.source.shape[0]
    both = Rows(
        np.concatenate([others.source, rows.source]),
        np.concatenate([others.token, rows.token + tokens]),
        np.concatenate([others.dz, rows.dz]),
        np.concatenate([others.row, rows.row + 2]),
    )
    np.testing.assert_array_equal(kernel_sums(both, len(EDGES) + 2, interpret=True)[2:], alone)


@pytest.mark.costly
def test_a_row_is_summed_in_the_order_of_its_tokens():
    """1 + 2^-24 + … is 1 in this order, and more in another."""
    tiny = np.full(GROUP + 1, 2.0**-24, np.float32)
    for places, wanted in (([1.0, *tiny], 1.0), ([*tiny, 1.0], 1.0 + 2.0**-19)):
        size = len(places)
        source = np.array(places, np.float32)[:, None] * np.ones(WIDTH, np.float32)
        rows = Rows(source, np.arange(size, dtype=np.int32), np.ones(size, np.float32), np.zeros(size, np.int32))
        np.testing.assert_array_equal(kernel_sums(rows, 1, interpret=True), wanted)


# --- the engine ------------------------------------------------------------------------------------------------------


def test_values_and_gradients_match_the_oracle_and_the_xla_form(monkeypatch):
    data = case()
    wanted, seen = expected(data, **ALL_OPTIONS), gradients(data, **ALL_OPTIONS)
    check(seen, wanted)
    monkeypatch.setattr(registry, "AUTOMATIC_ON_SUPPORT", (SupportEngine(),))
    xla = gradients(data, **ALL_OPTIONS)
    # Each is within the contract's bound of float64.
    check(seen, support_case.Values(*(np.asarray(x, np.float64) for x in xla)), 2 * support_case.GRADIENT_ERROR)


@pytest.mark.costly
def test_narrow_gradients_are_rounded_once():
    data = case(width=16, dtype=jnp.bfloat16)
    seen = gradients(data)
    assert (seen.hidden.dtype, seen.weight.dtype) == ("bfloat16", "bfloat16")
    check(seen, expected(data), BF16_ERROR)


@pytest.mark.costly
def test_what_must_be_exactly_zero_is():
    """One id, tokens without ids, masked tokens, unnamed rows, whatever their operands hold."""
    data = case()
    dead = (data["support"].counts == 0) | ~data["mask"]
    alive = zip(data["lists"], ~dead.reshape(-1), strict=True)
    named = np.isin(np.arange(60), np.concatenate([ids for ids, live in alive if live]).astype(int))
    hostile = {
        **data,
        "hidden": jnp.where(dead[..., None], jnp.nan, data["hidden"]),
        "weight": jnp.where(named[:, None], data["weight"], jnp.nan),
        "bias": jnp.where(named, data["bias"], jnp.nan),
        "g_lp": jnp.where(dead, 0.0, data["g_lp"]),
    }
    seen, clean = gradients(hostile), gradients(data)
    assert not np.asarray(seen.weight)[~named].any() and not np.asarray(seen.bias)[~named].any()
    assert not np.asarray(seen.hidden)[dead].any() and not np.asarray(seen.log_probs)[dead].any()
    for name in ("log_probs", "entropy", "lse", "hidden"):
        np.testing.assert_array_equal(getattr(seen, name)[~dead], getattr(clean, name)[~dead], err_msg=name)
    for name in ("weight", "bias"):
        np.testing.assert_array_equal(getattr(seen, name)[named], getattr(clean, name)[named], err_msg=name)
    single = Support.from_lists([[int(target)] for target in data["targets"].flat], capacity=data["support"].ids.size)
    seen = gradients({**data, "support": Support(single.ids, single.counts.reshape(3, 8))})
    assert not any(np.asarray(values).any() for values in seen._replace(lse=0.0))


@pytest.mark.costly
def test_broken_supports_give_nan_for_their_tokens_alone():
    """Of token 4 no id is left: nothing is summed."""
    data, tokens = case(), [4, 7]
    counts, ids = data["support"].counts.reshape(-1), data["support"].ids.copy()
    assert counts[4] == 1
    ids[(np.cumsum(counts) - counts)[tokens]] = 60
    clean, seen = gradients(data), gradients({**data, "support": Support(ids, data["support"].counts)})
    others = ~np.isin(np.arange(24), tokens)
    for name in ("log_probs", "entropy", "hidden"):
        values, wanted = (np.asarray(getattr(x, name)).reshape(24, -1) for x in (seen, clean))
        assert np.isnan(values[tokens]).all(), name
        np.testing.assert_array_equal(values[others], wanted[others], err_msg=name)
    broken = np.isin(np.arange(60), data["lists"][7])
    assert np.isfinite(np.asarray(seen.weight)[~broken]).all()


def test_a_frozen_head_has_the_gradient_of_hidden_alone():
    data = case()
    seen = gradients(data, frozen_head=True)
    check(seen, expected(data)._replace(weight=np.zeros((60, 24)), bias=np.zeros(60)))


@pytest.mark.costly
def test_shards_give_the_unsharded_numbers():
    """One of four ranks owns no id. By the engine's own methods: the interpreter knows no types of varying arrays."""
    data, token_shape, unused = case(), (3, 8), (20, 21)
    lists = [[id for id in ids if id not in unused] for ids in data["lists"]]
    lists = [
        ids if target in ids or not ids else [target, *ids]
        for ids, target in zip(lists, data["targets"].reshape(-1).tolist(), strict=True)
    ]
    assert not np.isin(data["targets"], unused).any()
    data |= {"lists": lists, "support": Support.from_lists(lists, capacity=data["support"].ids.size, shape=token_shape)}
    shards = VocabShards.from_ranges([(0, 3), (3, 20), (20, 22), (22, 60)], 60)
    engine = SupportKernelEngine(interpret=True)
    layout = {"axis_name": "tensor", "vocab": shards, "out_of_vocab": "error", "with_entropy": True}
    layout |= {"weight_layout": "vh", "sequence_dim": None}

    def local(given):
        operands = (given[name] for name in ("hidden", "weight", "bias", "targets", "mask"))
        call = head_call(*operands, HeadSpec(), support=given["support"], **layout)
        values, kept = engine.forward(call)
        g = TokenLogProbs(given["g_lp"].reshape(-1), given["g_entropy"].reshape(-1))
        grads = engine.backward(call, kept, TokenLogProbs(*mask_cotangents(g, call.targets)))
        d_hidden = jax.lax.psum(grads.hidden, "tensor").reshape(given["hidden"].shape)
        reshaped = (x.reshape(token_shape) for x in values)
        return support_case.Values(*reshaped, d_hidden, grads.weight, grads.bias)

    names = ("hidden", "weight", "bias", "targets", "mask", "support", "g_lp", "g_entropy")
    given = {name: data[name] for name in names}
    given |= {name: shards.shard_rows(data[name]) for name in ("weight", "bias")}
    specs = {name: P("tensor") if name in ("weight", "bias") else P() for name in names}
    out = support_case.Values(*(P(),) * 4, P("tensor"), P("tensor"))
    axes = jax.make_mesh((4,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:4])
    mapped = jax.shard_map(local, mesh=axes, in_specs=(specs,), out_specs=out, check_vma=False)
    seen = jax.jit(mapped)(given)
    weight, bias = shards.unshard_rows(seen.weight), shards.unshard_rows(seen.bias)
    check(seen._replace(weight=weight, bias=bias), expected(data))


def test_gradients_inside_a_shard_map_have_types():
    """Traced alone: the interpreter cannot run such a program, and a GPU can."""
    data, shards = case(), VocabShards.even(60, 2)

    def local(hidden, weight, bias):
        def total(*operands):
            options = {"bias": operands[2], "support": data["support"], "axis_name": "tensor", "vocab": shards}
            return linear_log_probs(*operands[:2], data["targets"], data["mask"], **options).log_probs.sum()

        return jax.grad(total, (0, 1, 2))(hidden, weight, bias)

    axes = jax.make_mesh((2,), ("tensor",), (AxisType.Auto,), devices=jax.devices()[:2])
    specs = P(), P("tensor"), P("tensor")
    mapped = jax.shard_map(local, mesh=axes, in_specs=specs, out_specs=specs)
    shapes = jax.jit(mapped).trace(data["hidden"], data["weight"], data["bias"]).out_info
    assert [each.shape for each in shapes] == [(3, 8, 24), (60, 24), (60,)]


@pytest.mark.bad_input
def test_calls_that_the_kernels_do_not_take_are_refused():
    def refusal(engine, width=24, **options):
        data = case(width=width)
        weight = data["weight"].T if options else data["weight"]
        given = {"support": data["support"], "engine": engine, **options}
        with pytest.raises(ValueError) as refused:
            linear_log_probs(data["hidden"], weight, data["targets"], data["mask"], **given)
        return str(refused.value).split(", got ", 1)[1]

    interpreted = SupportKernelEngine(interpret=True)
    assert refusal(interpreted, weight_layout="hv") == "it needs a weight [V, H], not [H, V]"
    assert refusal(interpreted, width=20) == "it needs a hidden size that is a multiple of 8, got 20"
    needed = "it needs an NVIDIA GPU of compute capability 8.0 or more, the default device is cpu (cpu)"
    assert refusal("support_kernels") == needed


def test_the_record_names_the_engine_and_why_the_other_is_not_used(monkeypatch):
    data = case()

    def record(**options):
        with record_head_runs() as runs:
            given = {"support": data["support"], **options}
            linear_log_probs(
                data["hidden"], data["weight"].T, data["targets"], data["mask"], weight_layout="hv", **given
            )
        return [(run.engine, run.reason) for run in runs]

    engines = (SupportKernelEngine(interpret=True), "support")
    not_used = "support_kernels not used: it needs a weight [V, H], not [H, V]"
    monkeypatch.setattr(registry, "AUTOMATIC_ON_SUPPORT", engines)
    assert record() == [("support", f"auto; {not_used}")]
    assert record(engine=engines) == [("support", f"first of the sequence that can; {not_used}")]
    assert record(engine="support") == [("support", "named by the caller")]
