"""Times variants of the forward kernel against one cuBLAS product, interleaved, with the error against float64.

python -m benchmarks.hopper.forward_variants [H,V ...]
"""

import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.beside_product import cases, compiled_or_said, print_times, say
from benchmarks.cases import Case, Outputs, errors, exact
from jaxlogp.head.hopper.forward import forward_statistics
from jaxlogp.head.hopper.operands import Launch, Operands
from jaxlogp.head.hopper.tiles import TileConfig

SHAPES = ("4096,151936", "2304,256000", "1024,151936")
SMS = 132
VARIANTS = {
    "shared": TileConfig(),
    "alternate": TileConfig(64, 256, 64, 5, 16, True),
    "cluster shared": TileConfig(cluster=2),
    "cluster alternate": TileConfig(64, 256, 64, 5, 16, True, 2),
    "cluster alternate group 32": TileConfig(64, 256, 64, 5, 32, True, 2),
}


def fold(stats: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Log-probs and entropies of tile statistics, in plain fp32."""
    maximum = stats[:, 0].max(0)
    factor = jnp.exp(stats[:, 0] - maximum)
    total = (factor * stats[:, 1]).sum(0)
    mean = (factor * (stats[:, 2] + (stats[:, 0] - maximum) * stats[:, 1])).sum(0) / total
    return stats[:, 3].sum(0) - maximum - jnp.log(total), jnp.log(total) - mean


def variant(case: Case, config: TileConfig) -> Callable:
    """The forward with these tiles."""
    width = jnp.int32(case.weight.shape[0])

    def run(hidden, weight, targets):
        operands = Operands(hidden, weight, None, width)
        return fold(forward_statistics(operands, targets, Launch(config, SMS), with_entropy=True))

    return run


def main() -> None:
    for case in cases([word for word in sys.argv[1:] if "," in word] or SHAPES):
        functions = {name: variant(case, config) for name, config in VARIANTS.items()}
        calls, wanted = compiled_or_said(functions, case.hidden, case.weight, case.targets), exact(case)
        for name, one in calls.items():
            first, second = one.call(), one.call()
            same = all(bool((a == b).all()) for a, b in zip(first, second, strict=True))
            found = errors(Outputs(*map(np.asarray, first), None, None, True), wanted)
            say(f"  {name}: error {found.log_prob:.2e} {found.entropy:.2e} bitwise {same}")
        print_times(case, calls, turns=8)


if __name__ == "__main__":
    main()
