"""The triton engine, forward and forward + backward, beside one cuBLAS product in the same run, with errors and memory.

    python benchmarks/triton/head.py [H,V ...] [--tiles] [--windows] [--only-forward]

The protocol is that of benchmarks/hopper/head.py. --tiles adds other tile shapes than the table's, --windows other widths of
the backward's windows. Goals at (4096, 151936): forward 1.35 x, forward + backward 4.6 x, 0.6 GiB.
"""

import functools
import pathlib
import statistics
import sys

import jax
import jax.numpy as jnp
import numpy as np

from jaxlogp.head.projection import HeadOptions
from jaxlogp.head.triton import TritonEngine
from jaxlogp.head.triton.availability import why_not_device, why_not_installed
from jaxlogp.head.triton.tiles import HeadTiles, TileConfig
from jaxlogp.logits import LocalTargets

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "hopper"))
from head import SHAPES, TOKENS, inputs, oracle, relative, seconds  # noqa: E402

TILES = {
    "128x256 3 stages": TileConfig(stages=3),
    "128x256 4 stages": TileConfig(stages=4),
    "128x256 4 stages group 8": TileConfig(stages=4, group=8),
    "128x256 4 stages group 32": TileConfig(stages=4, group=32),
    "128x128 4 warps 3 stages": TileConfig(columns=128, warps=4, stages=3),
    "128x128 8 warps 4 stages": TileConfig(columns=128, warps=8, stages=4),
    "64x256 4 warps 4 stages": TileConfig(rows=64, warps=4, stages=4),
    "256x128 8 warps 4 stages": TileConfig(rows=256, columns=128, stages=4),
}
WINDOWS = [7616, 15232, 30400]


def variants(arguments):
    engines = {"table": TritonEngine()}
    if "--tiles" in arguments:
        engines |= {name: TritonEngine(tiles=HeadTiles(config, config)) for name, config in TILES.items()}
    if "--windows" in arguments:
        engines |= {f"window {window}": TritonEngine(window=window) for window in WINDOWS}
    return engines


def main():
    reason = why_not_device() or why_not_installed()
    if reason is not None:
        print(f"not run: {reason}")
        return 1
    import triton

    versions = f"JAX {jax.__version__} Triton {triton.__version__}"
    print(jax.devices()[0].device_kind, versions, flush=True)
    arguments = sys.argv[1:]
    shapes = [tuple(int(x) for x in a.split(",")) for a in arguments if "," in a] or SHAPES
    for hidden_size, vocab in shapes:
        hidden, weight, targets, g_lp, g_entropy = inputs(hidden_size, vocab)
        options = HeadOptions(with_entropy=True, vocab_size=vocab)
        local = LocalTargets(targets, jnp.ones(TOKENS, bool), None, jnp.int32(vocab))
        rows, columns = np.arange(0, TOKENS, 128), np.r_[0:32, vocab - 32 : vocab]
        wanted = oracle(hidden, weight, targets, g_lp, g_entropy, rows, columns)
        gemm = jax.jit(lambda h, w: jax.lax.dot_general(h, w, (((1,), (1,)), ((), ()))))
        jax.block_until_ready(gemm(hidden, weight))
        calls, memory = {"cuBLAS product": functools.partial(gemm, hidden, weight)}, {"cuBLAS product": 0.0}
        for name, engine in variants(arguments).items():

            def forward(h, w, t, engine=engine, options=options, local=local):
                return engine.log_probs(h, w, None, local._replace(column=t), options)

            def both(h, w, t, g, g_h, forward=forward):
                out, pull = jax.vjp(lambda h, w: forward(h, w, t), h, w)
                return out, pull(type(out)(g, g_h))

            try:
                compiled = jax.jit(forward).lower(hidden, weight, targets).compile()
                result = compiled(hidden, weight, targets)
                errors = [abs(result.log_probs[rows] - wanted[0]).max(), abs(result.entropy[rows] - wanted[1]).max()]
                again = compiled(hidden, weight, targets)
                same = bool((result.log_probs == again.log_probs).all() & (result.entropy == again.entropy).all())
                calls[f"{name} forward"] = functools.partial(compiled, hidden, weight, targets)
                memory[f"{name} forward"] = compiled.memory_analysis().temp_size_in_bytes / 2**30
                if "--only-forward" not in arguments:
                    operands = hidden, weight, targets, g_lp, g_entropy
                    compiled = jax.jit(both).lower(*operands).compile()
                    _, (d_hidden, d_weight) = compiled(*operands)
                    _, (again_h, again_w) = compiled(*operands)
                    errors += [relative(d_hidden[rows], wanted[2]), relative(d_weight[columns], wanted[3])]
                    same = same and bool((d_hidden == again_h).all()) and bool((d_weight == again_w).all())
                    del d_hidden, d_weight, again_h, again_w
                    calls[f"{name} fwd+bwd"] = functools.partial(compiled, *operands)
                    memory[f"{name} fwd+bwd"] = compiled.memory_analysis().temp_size_in_bytes / 2**30
            except Exception as error:  # A variant that does not compile must not end the run.
                print(f"  {name} failed: {str(error)[:600]}", flush=True)
                continue
            shown = " ".join(f"{float(e):.1e}" for e in errors)
            print(f"  {name}: errors {shown}, run to run bitwise {same}", flush=True)
        times = {name: [] for name in calls}
        for _ in range(4):
            for name, call in calls.items():
                times[name].append(seconds(call))
        base = statistics.median(times["cuBLAS product"])
        for name, values in times.items():
            median = statistics.median(values)
            print(
                f"H {hidden_size} V {vocab} {name:36s} {median * 1e3:7.2f} ms  {median / base:.3f} x"
                f"  min {min(values) / base:.3f}  temp {memory[name]:.3f} GiB",
                flush=True,
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
