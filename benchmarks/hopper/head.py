"""The hopper engine, forward and forward + backward, against one cuBLAS product in the same run, with errors and memory.

    python -m benchmarks.hopper.head [H,V ...]

Times are medians of interleaved turns, each at settled clocks; logits have standard deviation 2. Errors are against
float64 on the same bf16 inputs, for all values, and for the gradients of some tokens and some rows of the weight.
"""

import sys

from benchmarks.beside_product import cases
from benchmarks.engines import measure
from jaxlogp.head import HopperEngine

VARIANTS: dict[str, HopperEngine] = {"table": HopperEngine()}


def main() -> None:
    for case in cases(sys.argv[1:]):
        measure(case, VARIANTS)


if __name__ == "__main__":
    main()
