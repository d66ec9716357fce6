"""One head call for all engines: operands, the program that runs it, the float64 result, and what each engine supports.

Only public functions are called. A program is compiled once for its engine, options, shapes and dtypes; cases that
differ only in their numbers share it.
"""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh

from jaxlogp import TokenLogProbs, VocabShards, linear_log_probs, sharded_linear_log_probs
from jaxlogp._mosaic_gpu import interpreter, why_not_available
from jaxlogp.head import ChunkedEngine, FixedOrderEngine, HopperEngine, ReferenceEngine, TritonEngine
from jaxlogp.head.triton import launch
from jaxlogp.head.triton.tiles import HeadTiles, TileConfig
from jaxlogp.invariance import ReductionOrder
from tests import oracle
from tests.head import triton_plain

# Contract bounds, against float64 on the same inputs. Products of 16-bit operands are exact in fp32, so values of every
# dtype differ by a few roundings of sums of H and V terms.
VALUE_ERROR = 1e-5
# fp32 operands: as the values. 16-bit operands: dz is rounded to 2^-9 (bf16) before the products, and the results once more.
FP32_GRADIENT_ERROR = 2e-5
GRADIENT_ERROR = 5e-3

# Tails everywhere: 20 tokens are no multiple of 7, and 264 columns none of 64, 128 or 256. The Hopper kernels need hidden
# sizes that are multiples of 64 and numbers of rows that are multiples of 8.
TOKENS, HIDDEN, VOCAB = (2, 10), 64, 264
ALL_OPTIONS = {"temperature": 0.7, "logit_scale": 1.3, "softcap": 5.0}
# A tile of triton's is small here, so that each kernel has several and a tail in every dimension.
TRITON_TILES = HeadTiles(
    TileConfig(rows=16, columns=64, depth=32, group=3), TileConfig(rows=32, columns=64, depth=16, group=2)
)
TRITON_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def case(tokens=TOKENS, hidden_size=HIDDEN, vocab=VOCAB, *, dtypes=None, bias=None, spread=2.0, seed=0):
    """Operands of logits of standard deviation ``spread``, targets on both edges, and cotangents.

    Args:
        dtypes: of hidden and weight, one for both or a pair; bf16 unless given.
        bias: its dtype, or None for no bias.
    """
    hidden_dtype, weight_dtype = dtypes if isinstance(dtypes, tuple) else (dtypes or jnp.bfloat16,) * 2
    rng = np.random.default_rng(seed)
    targets = rng.integers(0, vocab, tokens).astype(np.int32)
    targets.flat[:2] = 0, vocab - 1
    return {
        "hidden": jnp.asarray(rng.normal(size=(*np.atleast_1d(tokens), hidden_size)), hidden_dtype),
        "weight": jnp.asarray(rng.normal(0.0, spread / hidden_size**0.5, (vocab, hidden_size)), weight_dtype),
        "bias": None if bias is None else jnp.asarray(rng.normal(size=vocab), bias),
        "targets": jnp.asarray(targets),
        "mask": jnp.ones(tokens, bool),
        "g_lp": jnp.asarray(rng.normal(size=tokens), jnp.float32),
        "g_entropy": jnp.asarray(rng.normal(size=tokens), jnp.float32),
    }


def call(data, engine, **options) -> TokenLogProbs:
    """linear_log_probs on a case."""
    options = {"with_entropy": True, **options}
    operands = data["hidden"], data["weight"], data["targets"]
    return linear_log_probs(*operands, mask=data["mask"], bias=data["bias"], engine=engine, **options)


def _total(result: TokenLogProbs, data):
    total = jnp.sum(result.log_probs * data["g_lp"])
    return total if result.entropy is None else total + jnp.sum(result.entropy * data["g_entropy"])


def _gradients(data, forward):
    """(result, gradients) of Σ g log_prob + Σ g_H entropy, where forward takes a case."""

    def objective(hidden, weight, bias):
        result = forward({**data, "hidden": hidden, "weight": weight, "bias": bias})
        return _total(result, data), result

    operands = data["hidden"], data["weight"], data["bias"]
    gradients, result = jax.grad(objective, argnums=(0, 1, 2), has_aux=True)(*operands)
    return result, oracle.HeadGradients(*gradients)


@functools.partial(jax.jit, static_argnames=("engine", "options"))
def _program(data, *, engine, options):
    return _gradients(data, lambda case: call(case, engine, **dict(options)))


def run(data, engine, **options) -> tuple[TokenLogProbs, oracle.HeadGradients]:
    """Values, entropies unless ``with_entropy=False``, and gradients, compiled."""
    return _program(data, engine=engine, options=tuple(options.items()))


def lowered_for_cuda(data, engine, **options) -> str:
    """The program of :func:`run` as it is lowered for an NVIDIA GPU."""
    traced = _program.trace(data, engine=engine, options=tuple(options.items()))
    return traced.lower(lowering_platforms=("cuda",)).as_text()


@functools.partial(jax.jit, static_argnames=("engine", "mesh", "shards"))
def run_sharded(data, *, engine, mesh: Mesh, shards: VocabShards):
    """As :func:`run`, through sharded_linear_log_probs: tokens over axis "data", vocabulary over axis "tensor"."""

    def forward(case):
        operands = case["hidden"], case["weight"], case["targets"]
        options = {"mask": case["mask"], "bias": case["bias"], "vocab": shards, "with_entropy": True, "engine": engine}
        return sharded_linear_log_probs(*operands, mesh=mesh, **options)

    return _gradients(data, forward)


def expected(data, **options):
    """((log_probs, entropy), gradients) in float64; options that are not arithmetic are left out."""
    head = oracle.Head(**{name: options[name] for name in oracle.Head._fields if name in options})
    mask = np.ones(data["targets"].shape, bool) if data["mask"] is None else data["mask"]
    operands = data["hidden"], data["weight"], data["targets"]
    g_entropy = data["g_entropy"] if options.get("with_entropy", True) else None
    values = oracle.head_log_probs(*operands, mask, data["bias"], head)
    return values, oracle.head_gradients(*operands, data["g_lp"], g_entropy, mask, data["bias"], head)


def gradient_error(data, **options) -> float:
    """The bound for gradients of these operands."""
    narrow = data["hidden"].dtype != jnp.float32 or data["weight"].dtype != jnp.float32
    return GRADIENT_ERROR if narrow and not options.get("fp32_head") else FP32_GRADIENT_ERROR


def check_values(result, wanted, value_error=VALUE_ERROR):
    """Both values are fp32 and within the bound."""
    for name, value in zip(("log_probs", "entropy"), wanted, strict=True):
        actual = getattr(result, name)
        if actual is not None:
            assert actual.dtype == jnp.float32
            error = oracle.scaled_error(actual, value)
            assert error < value_error, f"{name}: {error}"


def check(result, gradients, wanted, value_error=VALUE_ERROR, gradient_error=GRADIENT_ERROR):
    """Values and gradients are within the bounds of what :func:`expected` gave."""
    check_values(result, wanted[0], value_error)
    for name, gradient in zip(("hidden", "weight", "bias"), gradients, strict=True):
        if gradient is not None:
            error = oracle.relative_error(gradient, getattr(wanted[1], name))
            assert error < gradient_error, f"{name}: {error}"


def same_bits(left, right):
    """Every array of both trees has the same bits."""
    for one, other in zip(jax.tree.leaves(left), jax.tree.leaves(right), strict=True):
        assert one.dtype == other.dtype and np.asarray(one).tobytes() == np.asarray(other).tobytes()


# --- the engines --------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Entry:
    """An engine of the suite, and what it can do.

    Attributes:
        name: of the engine.
        engine: the object; None where it is missing.
        weights: dtypes of a weight that it multiplies.
        fp32_products: it can multiply fp32 operands, as ``fp32_head`` asks for.
        mesh: sizes of the data and the tensor axis over which it runs on simulated devices.
        shards: its vocabulary shards, from V and their number.
        missing: why it cannot run here, or None.
    """

    name: str
    engine: object
    weights: tuple = (jnp.float32, jnp.bfloat16, jnp.float16)
    fp32_products: bool = True
    mesh: tuple[int, int] = (2, 3)
    shards: Callable[[int, int], VocabShards] = VocabShards.even
    missing: str | None = None

    @property
    def dtype(self):
        """The widest operands that it takes."""
        return self.weights[0]

    def takes(self, hidden_dtype, weight_dtype, fp32_head=False) -> bool:
        """Whether it multiplies such operands; fp32_head asks for no fp32 product where both dtypes are one of 16 bits."""
        exact = not fp32_head or self.fp32_products or hidden_dtype == weight_dtype
        return weight_dtype in self.weights and exact

    def case(self, tokens=TOKENS, *, bias=True, **changes):
        """A case of its widest operands."""
        return case(tokens, dtypes=self.dtype, bias=jnp.float32 if bias else None, **changes)

    def make_mesh(self, axis_type: AxisType) -> Mesh:
        """Simulated devices over which it runs."""
        count = self.mesh[0] * self.mesh[1]
        return jax.make_mesh(self.mesh, ("data", "tensor"), axis_types=(axis_type,) * 2, devices=jax.devices()[:count])


def hopper(**changes):
    """The Hopper kernels in the interpreter; None where this JAX cannot trace them."""
    if why_not_available() is not None:
        return None
    return HopperEngine(**{"interpret": interpreter(), "num_sms": 2, "chunk": 256, **changes})


def triton(**changes):
    """The Triton engine, with the kernels' plain stand-in or, under TRITON_INTERPRET=1, with their own source."""
    functions = launch if TRITON_INTERPRETED else triton_plain
    return TritonEngine(**{"tiles": TRITON_TILES, "window": 128, "functions": functions, **changes})


def _uneven(vocab: int, count: int) -> VocabShards:
    """The first shard is half as wide as the others, up to a multiple of eight rows."""
    width = -(-2 * vocab // (2 * count - 1) // 8) * 8
    edges = [0, *(vocab - width * left for left in range(count - 1, -1, -1))]
    return VocabShards.from_ranges(list(zip(edges[:-1], edges[1:], strict=True)), vocab)


ORDER = ReductionOrder(granules=24, vocab_tile=64, row_block=64)
ENGINES = [
    Entry("reference", ReferenceEngine(), shards=_uneven),
    Entry("chunked", ChunkedEngine(token_chunk=7, vocab_tile=64), shards=_uneven),
    Entry("fixed_order", FixedOrderEngine(ORDER), shards=ORDER.shards),
    Entry("hopper", hopper(), (jnp.bfloat16,), False, (1, 2), _uneven, missing=why_not_available()),
    Entry("triton", triton(), (jnp.bfloat16, jnp.float16), False, shards=_uneven),
]


@contextlib.contextmanager
def interpreted_together():
    """Lets JAX's Mosaic GPU interpreter run the Hopper kernels of several devices at once.

    As a kernel ends it asserts that no barrier is left in its memory, which all devices share: one that is still inside of
    its kernel has some.
    """
    from jax._src.pallas.mosaic_gpu.interpret import shared_memory

    name = "assert_no_barriers_allocated"
    memories = [x for x in vars(shared_memory).values() if isinstance(x, type) and name in vars(x)]
    kept = [getattr(memory, name) for memory in memories]
    for memory in memories:
        setattr(memory, name, lambda self: None)
    try:
        yield
    finally:
        for memory, method in zip(memories, kept, strict=True):
            setattr(memory, name, method)
