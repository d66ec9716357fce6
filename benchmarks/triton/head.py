"""The triton engine, forward and forward + backward, beside one cuBLAS product in the same run, with errors and memory.

    python benchmarks/triton/head.py [H,V ...] [--sweep] [--windows] [--only-forward]

The protocol is that of benchmarks/hopper/head.py. Goals at (4096, 151936): forward 1.35 x, forward + backward 4.6 x,
0.6 GiB. The table's tiles come first: errors against float64, then times. --sweep then takes the first shape's kernels and
products apart (benchmarks/triton/tile_sweep.py) and measures the whole engine again with the tiles that were fastest;
--windows adds other widths of the backward's windows. What fails is printed and left out.
"""

import functools
import pathlib
import statistics
import sys
import time
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from tile_sweep import sweep

from jaxlogp.head.projection import HeadOptions
from jaxlogp.head.triton import TritonEngine
from jaxlogp.head.triton.availability import why_not_device, why_not_installed
from jaxlogp.targets import LocalTargets

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "hopper"))
from head import SHAPES, TOKENS, inputs, oracle, relative, seconds  # noqa: E402

WINDOWS = [7616, 30400]
BEGUN = time.perf_counter()


def say(line):
    """A line with the seconds since the start, at once: a run that is cut off has said what it knew."""
    print(f"[{time.perf_counter() - BEGUN:5.1f} s] {line}", flush=True)


class Problem(NamedTuple):
    """Operands of one shape, and some rows and columns of what float64 makes of them (None where that failed)."""

    hidden_size: int
    vocab: int
    operands: tuple
    rows: np.ndarray
    columns: np.ndarray
    wanted: tuple | None

    @classmethod
    def of(cls, hidden_size, vocab):
        operands = inputs(hidden_size, vocab)
        rows, columns = np.arange(0, TOKENS, 128), np.r_[0:32, vocab - 32 : vocab]
        try:
            wanted = oracle(*operands, rows, columns)
        except Exception as error:
            say(f"no float64 values: {str(error)[:300]}")
            wanted = None
        return cls(hidden_size, vocab, operands, rows, columns, wanted)

    def errors(self, log_probs, entropy, d_hidden=None, d_weight=None):
        if self.wanted is None:
            return "unknown"
        errors = [abs(log_probs[self.rows] - self.wanted[0]).max(), abs(entropy[self.rows] - self.wanted[1]).max()]
        if d_hidden is not None:
            errors += [relative(d_hidden[self.rows], self.wanted[2]), relative(d_weight[self.columns], self.wanted[3])]
        return " ".join(f"{float(error):.1e}" for error in errors)


def programs(engine, vocab, only_forward):
    """The jitted functions of hidden, weight, targets and cotangents."""
    options = HeadOptions(with_entropy=True, vocab_size=vocab, all_live=True)

    def forward(h, w, t, g, g_h):
        local = LocalTargets(t, jnp.ones(t.shape, bool), None, jnp.int32(vocab))
        return engine.log_probs(h, w, None, local, options)

    def both(h, w, t, g, g_h):
        out, pull = jax.vjp(lambda h, w: forward(h, w, t, g, g_h), h, w)
        return out, pull(type(out)(g, g_h))

    return {"forward": jax.jit(forward)} | ({} if only_forward else {"fwd+bwd": jax.jit(both)})


def prepare(name, engine, problem, only_forward):
    """Compiled calls by name, with their memory; says their errors and whether a second run gives the same bits."""
    calls = {}
    for part, function in programs(engine, problem.vocab, only_forward).items():
        try:
            compiled = function.lower(*problem.operands).compile()
            first, second = (jax.block_until_ready(compiled(*problem.operands)) for _ in range(2))
            same = all(
                bool((a == b).all()) for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
            )
            say(f"  {name} {part}: errors {problem.errors(*jax.tree.leaves(first))}, run to run bitwise {same}")
        except Exception as error:  # What does not compile must not end the run.
            say(f"  {name} {part} failed: {str(error)[:600]}")
            continue
        memory = compiled.memory_analysis().temp_size_in_bytes / 2**30
        calls[f"{name} {part}"] = functools.partial(compiled, *problem.operands), memory
    return calls


def measure(problem, calls, gemm):
    """Interleaved turns of all calls and the product."""
    times = {"cuBLAS product": []} | {name: [] for name in calls}
    for _ in range(4):
        times["cuBLAS product"].append(seconds(gemm))
        for name, (call, _) in calls.items():
            times[name].append(seconds(call))
    base = statistics.median(times["cuBLAS product"])
    for name, values in times.items():
        median, memory = statistics.median(values), calls[name][1] if name in calls else 0.0
        say(
            f"H {problem.hidden_size} V {problem.vocab} {name:28s} {median * 1e3:7.2f} ms  {median / base:.3f} x"
            f"  min {min(values) / base:.3f}  temp {memory:.3f} GiB"
        )


def main():
    reason = why_not_device() or why_not_installed()
    if reason is not None:
        print(f"not run: {reason}")
        return 1
    import triton

    say(f"{jax.devices()[0].device_kind} JAX {jax.__version__} Triton {triton.__version__}")
    arguments = sys.argv[1:]
    only_forward = "--only-forward" in arguments
    shapes = [tuple(int(x) for x in a.split(",")) for a in arguments if "," in a] or SHAPES
    engines = {"table": TritonEngine()}
    if "--windows" in arguments:
        engines |= {f"window {window}": TritonEngine(window=window) for window in WINDOWS}
    for index, shape in enumerate(shapes):
        problem = Problem.of(*shape)
        hidden, weight = problem.operands[:2]
        product = jax.jit(lambda h, w: jax.lax.dot_general(h, w, (((1,), (1,)), ((), ()))))
        gemm = functools.partial(product, hidden, weight)
        jax.block_until_ready(gemm())
        for name, engine in engines.items():
            measure(problem, prepare(name, engine, problem, only_forward), gemm)
        if index == 0 and "--sweep" in arguments:
            tiles = sweep(*problem.operands, engines["table"].head_tiles(), gemm, seconds, say, only_forward)
            measure(problem, prepare("fastest tiles", TritonEngine(tiles=tiles), problem, only_forward), gemm)
    return 0


if __name__ == "__main__":
    sys.exit(main())
