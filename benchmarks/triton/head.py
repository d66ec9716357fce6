"""The triton engine, forward and forward + backward, against one cuBLAS product in the same run, with errors and memory.

    python -m benchmarks.triton.head [H,V ...] [--windows] [--only-forward]

The protocol is that of benchmarks/hopper/head.py. Goals at (4096, 151936): forward 1.35 x, forward + backward 4.6 x,
0.6 GiB. Errors against float64 come first, then times. --windows adds other widths of the backward's windows. Failures
are printed and dropped.
"""

import sys

from benchmarks.beside_product import cases, say
from benchmarks.engines import measure
from jaxlogp.head import TritonEngine
from jaxlogp.head.triton.availability import why_not_device, why_not_installed

WINDOWS = [7616, 30400]


def main() -> int:
    reason = why_not_device() or why_not_installed()
    if reason is not None:
        print(f"not run: {reason}")
        return 1
    import triton

    say(f"Triton {triton.__version__}")
    arguments = sys.argv[1:]
    with_backward = "--only-forward" not in arguments
    engines = {"table": TritonEngine()}
    if "--windows" in arguments:
        engines |= {f"window {window}": TritonEngine(window=window) for window in WINDOWS}
    for case in cases(arguments):
        measure(case, engines, with_backward)
    return 0


if __name__ == "__main__":
    sys.exit(main())
