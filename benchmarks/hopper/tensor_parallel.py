"""linear_log_probs with the vocabulary over 1, 2 and 4 GPUs of one host: times, memory, collectives and bitwise equality.

    python -m benchmarks.hopper.tensor_parallel [H,V ...] [--sizes=1,2,4] [--no-checks]

One process; inside shard_map, with the weight sharded over "tensor" and hidden states on every device; forward, and
forward + backward with random cotangents of log-probs and entropies, N = 8192. Times are medians of interleaved turns
at settled clocks. "Linear" is the time of one device divided by the number of devices. --interpret runs tiny shapes on
CPU devices.

Expected, forward + backward at (4096, 151936). The four products, 64 ms on one device, are divided evenly. The forward
has two collectives of N-sized vectors. The backward has the psum of dH: 128 MiB in fp32 whatever the number of shards,
0.83 ms on 2 GPUs, more on more. Without overlap that is 32 / (32 + 0.83) = 0.97 of linear on 2 GPUs, and 16 / (16 +
1.1) = 0.94 on 4; the goal is 0.92.

Checks. Shards that begin at multiples of 256 columns, as the default ones do, give the log-probs, entropies and weight
gradient of one device bitwise; even shards are measured beside them. All shards: values within 1e-4 of float64 (logits of
standard deviation 2) and gradients within 5e-3, on every 128th token and on the rows of the weight around shard boundaries.
"""

import concurrent.futures
import functools
import sys
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.beside_product import TOKENS, Timed, cases, print_times, say
from benchmarks.cases import Outputs, errors, exact
from benchmarks.engines import operands
from benchmarks.module_text import collectives
from jaxlogp import TokenLogProbs, VocabShards, linear_log_probs
from jaxlogp._vocab import TILE
from jaxlogp.head import HopperEngine

SHAPES = ("4096,151936", "1024,151936")
VALUE_ERROR, GRADIENT_ERROR = 1e-4, 5e-3


class Layout(NamedTuple):
    """The shards of the vocabulary, the number of devices and the engine."""

    shards: VocabShards
    engine: HopperEngine
    name: str
    parts: tuple[str, ...]

    def mesh(self):
        size = self.shards.num_shards
        return jax.make_mesh((size,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])

    def place(self, hidden, weight, *per_token):
        """The operands where the program needs them."""
        mesh, blocks = self.mesh(), jax.jit(self.shards.shard_rows)(weight)
        everywhere, split = NamedSharding(mesh, P()), NamedSharding(mesh, P("tensor"))
        placed = [jax.device_put(x, everywhere) for x in (hidden, *per_token)]
        return placed[0], jax.device_put(blocks, split), *placed[1:]

    def programs(self):
        """Jitted functions of the placed operands, by part."""
        forward = functools.partial(
            linear_log_probs, with_entropy=True, axis_name="tensor", vocab=self.shards, engine=self.engine
        )

        def both(hidden, weight, targets, g, g_entropy):
            out, pull = jax.vjp(lambda h, w: forward(h, w, targets), hidden, weight)
            return out, pull(TokenLogProbs(g, g_entropy))

        def values(hidden, weight, targets, g, g_entropy):
            return forward(hidden, weight, targets)

        specs = P(), P("tensor"), P(), P(), P()
        outs = {"forward": P(), "fwd+bwd": (P(), (P(), P("tensor")))}
        functions = {"forward": values, "fwd+bwd": both}
        mapped = {
            part: jax.shard_map(functions[part], mesh=self.mesh(), in_specs=specs, out_specs=outs[part])
            for part in self.parts
        }
        return {part: jax.jit(function) for part, function in mapped.items()}


def layouts(vocab, sizes, engine):
    """The layouts to measure: the default shards, and even ones."""
    found, parts = [], ("forward", "fwd+bwd")
    for size in sizes:
        devices = f"{size} device{'s' * (size > 1)}"
        found.append(Layout(VocabShards.aligned(vocab, size), HopperEngine(**engine), devices, parts))
        if size > 1:
            found.append(Layout(VocabShards.even(vocab, size), HopperEngine(**engine), f"{devices}, even", parts))
    return found


class Compiled(NamedTuple):
    """A compiled layout and its operands."""

    layout: Layout
    operands: tuple
    compiled: dict

    def call(self, part):
        return functools.partial(self.compiled[part], *self.operands)


def compile_all(found, arguments):
    """All layouts, compiled several at a time; failures are printed and dropped."""
    lowered = []
    for layout in found:
        placed = layout.place(*arguments)
        try:
            lowered.append((layout, placed, {name: f.lower(*placed) for name, f in layout.programs().items()}))
        except Exception as error:  # One layout must not end the run.
            say(f"  {layout.name} not lowered: {str(error)[:400]}")
    say(f"  {len(lowered)} layouts lowered")

    def compiled(entry):
        layout, placed, programs = entry
        try:
            made = {name: p.compile() for name, p in programs.items()}
            return Compiled(layout, placed, made)
        except Exception as error:
            return f"  {layout.name} not compiled: {str(error)[:400]}"

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(compiled, lowered))
    for result in results:
        if isinstance(result, str):
            say(result)
    found = [result for result in results if isinstance(result, Compiled)]
    say(f"  {len(found)} layouts compiled")
    for one in found:
        for part, program in one.compiled.items():
            memory = program.memory_analysis()
            temp = "unknown" if memory is None else f"{memory.temp_size_in_bytes / 2**30:.3f} GiB a device"
            say(f"  {one.layout.name:24s} {part:8s} temp {temp}; {collectives(program.as_text())}")
    return found


def check(found, case):
    """Bits and errors of every layout's forward + backward; returns whether all is as promised."""
    wanted, fine, first = exact(case), True, None
    for one in found:
        home = functools.partial(jax.device_put, device=jax.devices()[0])
        out, (d_hidden, d_weight) = jax.tree.map(home, jax.block_until_ready(one.call("fwd+bwd")()))
        d_weight = jax.jit(one.layout.shards.unshard_rows)(d_weight)
        result = out.log_probs, out.entropy, d_weight
        some = (np.asarray(x.astype(jnp.float32)) for x in (d_hidden[case.rows], d_weight[case.columns]))
        error = errors(Outputs(np.asarray(out.log_probs), np.asarray(out.entropy), *some, True), wanted)
        small = (
            max(error.log_prob, error.entropy) < VALUE_ERROR and max(error.d_hidden, error.d_weight) < GRADIENT_ERROR
        )
        first = result if first is None else first
        same = [bool(jnp.array_equal(a, b)) for a, b in zip(result, first, strict=True)]
        programs = True
        if "forward" in one.compiled:
            alone = jax.tree.map(home, jax.block_until_ready(one.call("forward")()))
            programs = all(bool(jnp.array_equal(a, b)) for a, b in zip(out[:2], alone[:2], strict=True))
        promised = not any(start % TILE for start in one.layout.shards.starts)
        good = small and programs and (all(same) or not promised)
        fine = fine and good
        listed = error.log_prob, error.entropy, error.d_hidden, error.d_weight
        say(
            f"  {one.layout.name:24s} errors {' '.join(f'{x:.1e}' for x in listed)}; bitwise that of one device:"
            f" log-probs {same[0]}, entropy {same[1]}, dW {same[2]}; with forward alone {programs}"
            f"{'' if good else '  NOT AS PROMISED'}"
        )
    return fine


def measure(case, found, turns):
    """Times, interleaved with the product of the whole shape on one device."""
    calls = {f"{one.layout.name}, {part}": Timed(one.call(part)) for one in found for part in one.compiled}
    ratios = print_times(case, calls, turns)
    for one in found:
        for part, size in ((part, one.layout.shards.num_shards) for part in one.compiled):
            alone, here = ratios.get(f"1 device, {part}"), ratios.get(f"{one.layout.name}, {part}")
            if size > 1 and alone is not None and here is not None:
                gain = alone / here
                say(f"  {one.layout.name}, {part}: speed-up {gain:.3f}, of linear {gain / size:.3f}")


def run(shapes, sizes, engine, checks, turns=4, tokens=TOKENS):
    """Checks and measures every shape; returns whether all was as promised."""
    fine = True
    for case in cases(shapes, tokens):
        found = compile_all(layouts(case.weight.shape[0], sizes, engine), operands(case))
        if checks:
            try:
                fine = check(found, case) and fine
            except Exception as error:  # The times are still worth having.
                say(f"  checks failed: {str(error)[:600]}")
                fine = False
        measure(case, found, turns)
    say("all as promised" if fine else "NOT ALL AS PROMISED")
    return fine


def main():
    named = dict(a[2:].split("=") for a in sys.argv[1:] if a.startswith("--") and "=" in a)
    shapes = [word for word in sys.argv[1:] if "," in word and word[0] != "-"] or SHAPES
    there, sizes = len(jax.devices()), [int(x) for x in named.get("sizes", "1,2,4").split(",")]
    sizes = [size for size in sizes if size <= there]
    checks = "--no-checks" not in sys.argv
    say(f"{there} devices; sizes {sizes}")
    if "--interpret" not in sys.argv:
        return 0 if run(shapes, sizes, {}, checks) else 1

    from jaxlogp._mosaic_gpu import interpreter
    from tests.head.cases import interpreted_together

    engine = {"interpret": interpreter(), "num_sms": 2, "chunk": 256}
    with interpreted_together():
        return 0 if run(["64,1568"], sizes, engine, checks, turns=1, tokens=64) else 1


if __name__ == "__main__":
    sys.exit(main())
