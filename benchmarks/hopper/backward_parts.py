"""Times the three products of the backward for one chunk, each against cuBLAS on the same shapes, interleaved.

python -m benchmarks.hopper.backward_parts [H,V ...]
"""

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from benchmarks.beside_product import Timed, cases, compiled_or_said, print_times
from benchmarks.cases import Case
from jaxlogp.head.hopper.gradient_products import add_hidden_gradient, uninitialised, write_weight_gradient
from jaxlogp.head.hopper.logit_gradient import chunk_gradient
from jaxlogp.head.hopper.operands import Launch, Operands
from jaxlogp.head.hopper.tiles import TileConfig
from jaxlogp.head.row_scalars import RowScalars

CHUNK, SMS, CHUNKS = 25344, 132, 4
SHAPES = ("4096,151936", "2304,256000", "1024,151936")
A, S = TileConfig(64, 256, 64, 5, 16, True), TileConfig()
X = TileConfig(256, 128, 64, 4, 8)
C = TileConfig(cluster=2)
CA = TileConfig(64, 256, 64, 5, 16, True, 2)
CX = TileConfig(256, 128, 64, 4, 8, False, 2)
SOME = {"alternate": A, "shared": S, "256x128": X, "cluster shared": C, "cluster alternate": CA, "cluster 256x128": CX}
CONFIGS = {"dz": {k: v for k, v in SOME.items() if "x128" not in k}, "dH": SOME, "dW": SOME}


def cublas(contract: tuple[int, int], dtype: jnp.dtype = jnp.bfloat16) -> Callable:
    """A product over dimensions of (left, right)."""
    dims = (((contract[0],), (contract[1],)), ((), ()))
    return lambda left, right: lax.dot_general(left, right, dims, preferred_element_type=dtype)


def dz(case: Case, config: TileConfig) -> Callable:
    """The logits of a chunk, recomputed and turned into their gradient."""
    tokens, width = case.hidden.shape[0], jnp.int32(case.weight.shape[0])
    ones = jnp.ones(tokens, jnp.float32)
    rows = RowScalars(5 * ones, 12 * ones, ones, ones, ones, jnp.arange(tokens, dtype=jnp.int32) * 16)

    def run(hidden, weight):
        operands = Operands(hidden, weight, None, width)
        return chunk_gradient(operands, rows, jnp.int32(3), CHUNK, Launch(config, SMS), with_slope=True)

    return run


def d_hidden(case: Case, config: TileConfig) -> Callable:
    """dH += dz · W of CHUNKS chunks."""
    tokens, hidden_size = case.hidden.shape

    def run(gradient, weight):
        ref = jax.new_ref(jnp.zeros((tokens, hidden_size + -hidden_size % 256), jnp.float32))
        for step in range(CHUNKS):
            operands = Operands(case.hidden, weight, None, jnp.int32(weight.shape[0]))
            add_hidden_gradient(ref, gradient, operands, jnp.int32(step), Launch(config, SMS))
        return jax.freeze(ref)

    return run


def d_weight(case: Case, config: TileConfig) -> Callable:
    """dW = dzᵀ · H of CHUNKS chunks."""

    def run(gradient, hidden):
        ref = jax.new_ref(uninitialised(case.weight.shape, jnp.bfloat16))
        for step in range(CHUNKS):
            operands = Operands(hidden, case.weight, None, jnp.int32(case.weight.shape[0]))
            write_weight_gradient(ref, gradient, operands, jnp.int32(step), Launch(config, SMS))
        return jax.freeze(ref)

    return run


def main() -> None:
    for case in cases([word for word in sys.argv[1:] if "," in word] or SHAPES):
        hidden, weight = case.hidden, case.weight
        gradient = (jax.random.normal(jax.random.key(2), (hidden.shape[0], CHUNK)) * 1e-3).astype(jnp.bfloat16)
        part = weight[3 * CHUNK : 4 * CHUNK]

        def named(kind, build, case=case):
            return {f"{kind} {name}": build(case, config) for name, config in CONFIGS[kind].items()}

        def of_chunks(found):
            return {name: one._replace(repeats=CHUNKS) for name, one in found.items()}

        calls: dict[str, Timed] = compiled_or_said({"dz cuBLAS": cublas((1, 1))}, hidden, part)
        calls |= compiled_or_said({"dH cuBLAS": cublas((1, 0), jnp.float32)}, gradient, part)
        calls |= compiled_or_said({"dW cuBLAS": cublas((0, 0))}, gradient, hidden)
        calls |= compiled_or_said(named("dz", dz), hidden, weight)
        calls |= of_chunks(compiled_or_said(named("dH", d_hidden), gradient, weight))
        calls |= of_chunks(compiled_or_said(named("dW", d_weight), gradient, hidden))
        print_times(case, calls, turns=6)


if __name__ == "__main__":
    main()
