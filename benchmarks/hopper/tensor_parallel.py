"""linear_log_probs with the vocabulary over 1, 2 and 4 GPUs of one host: times, memory, collectives and whether bits agree.

    python benchmarks/hopper/tensor_parallel.py [H,V ...] [--sizes=1,2,4] [--no-checks]

One process; inside of shard_map, the weight sharded over "tensor", hidden states on every device; forward, and forward +
backward with random cotangents of log-probs and entropies, N = 8192. Times are medians of interleaved turns at settled
clocks, as in head.py. "Linear" is the time of one device over their number. --interpret runs tiny shapes on CPU devices.

Expected, forward + backward at (4096, 151936). The four products, 64 ms on one device, are divided evenly. The forward's
collectives are two of N-sized vectors. The backward's is the psum of dH: 128 MiB in fp32, 0.83 ms on 2 GPUs, more with more
of them, whatever the number of shards. With nothing overlapped that is 32 / (32 + 0.83) = 0.97 of linear on 2 GPUs, and
16 / (16 + 1.1) = 0.94 on 4; the goal is 0.92.

Checks. Shards that begin at multiples of 256 columns give the log-probs, entropies and weight gradient of one device
bitwise. All shards: values within 1e-4 of float64 (logits of standard deviation 2) and gradients within 5e-3, on every 128th
token and on the rows of the weight around the shards' edges.
"""

import concurrent.futures
import functools
import re
import statistics
import sys
import time
from typing import NamedTuple

import head
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxlogp import TokenLogProbs, VocabShards, linear_log_probs
from jaxlogp.head.hopper import HopperEngine

SHAPES = [(4096, 151936), (1024, 151936)]
# Columns of a tile of the forward: shards that begin at multiples of it cut no tile.
TILE = 256
VALUE_ERROR, GRADIENT_ERROR = 1e-4, 5e-3
COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|collective-broadcast"
BITS = {"pred": 8, "f16": 16, "bf16": 16, "f32": 32, "s32": 32, "u32": 32, "f64": 64, "s64": 64}
BEGUN = time.perf_counter()


def say(line):
    print(f"[{time.perf_counter() - BEGUN:5.1f} s] {line}", flush=True)


class Layout(NamedTuple):
    """How the vocabulary is cut over how many devices, and with which engine."""

    shards: VocabShards
    engine: HopperEngine
    name: str
    parts: tuple[str, ...] = ("fwd+bwd",)

    def mesh(self):
        size = self.shards.num_shards
        return jax.make_mesh((size,), ("tensor",), axis_types=(AxisType.Auto,), devices=jax.devices()[:size])

    def place(self, hidden, weight, *per_token):
        """The operands where the program wants them."""
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


def whole_tiles(vocab, size):
    """Shards that begin at multiples of a tile's columns."""
    tiles = -(-vocab // TILE)
    edges = [min(-(-tiles * rank // size) * TILE, vocab) for rank in range(size + 1)]
    return VocabShards.from_ranges(list(zip(edges[:-1], edges[1:], strict=True)), vocab)


def layouts(vocab, sizes, engine, checks):
    """What is measured: even shards; for the checks also whole tiles."""
    found = []
    for size in sizes:
        even = VocabShards.even(vocab, size)
        devices = f"{size} device{'s' * (size > 1)}"
        found.append(Layout(even, HopperEngine(**engine), devices, ("forward", "fwd+bwd")))
        if size == 1:
            continue
        if checks:
            found.append(Layout(whole_tiles(vocab, size), HopperEngine(**engine), f"{devices}, whole tiles"))
    return found


def collectives(text):
    """Name, number and bytes of every kind of collective in a compiled module."""
    found: dict[str, list[int]] = {}
    for result, name in re.findall(rf"= (\(?[^=()]*(?:\([^=()]*\)[^=()]*)*\)?) ({COLLECTIVES})(?:-start)?\(", text):
        shapes = re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", result)
        sizes = [BITS.get(kind, 32) // 8 * np.prod([int(n) for n in dims.split(",") if n]) for kind, dims in shapes]
        found.setdefault(name, []).append(int(sum(sizes)))
    listed = [f"{len(sizes)} {name} ({', '.join(f'{n:,}' for n in sizes)} bytes)" for name, sizes in found.items()]
    return "; ".join(listed) or "no collective"


class Case(NamedTuple):
    """A compiled layout and its operands."""

    layout: Layout
    operands: tuple
    compiled: dict

    def call(self, part):
        return functools.partial(self.compiled[part], *self.operands)


def compile_all(found, operands):
    """All layouts, compiled several at a time; one that fails is said and left out."""
    lowered = []
    for layout in found:
        placed = layout.place(*operands)
        try:
            lowered.append((layout, placed, {name: f.lower(*placed) for name, f in layout.programs().items()}))
        except Exception as error:  # One layout must not end the run.
            say(f"  {layout.name} not lowered: {str(error)[:400]}")
    say(f"  {len(lowered)} layouts lowered")

    def compiled(entry):
        layout, placed, programs = entry
        try:
            made = {name: p.compile() for name, p in programs.items()}
            return Case(layout, placed, made)
        except Exception as error:
            return f"  {layout.name} not compiled: {str(error)[:400]}"

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        results = list(pool.map(compiled, lowered))
    for result in results:
        if isinstance(result, str):
            say(result)
    cases = [result for result in results if isinstance(result, Case)]
    say(f"  {len(cases)} layouts compiled")
    for case in cases:
        for part, program in case.compiled.items():
            memory = program.memory_analysis()
            temp = "unknown" if memory is None else f"{memory.temp_size_in_bytes / 2**30:.3f} GiB a device"
            say(f"  {case.layout.name:24s} {part:8s} temp {temp}; {collectives(program.as_text())}")
    return cases


def check(cases, operands):
    """Bits and errors of every layout's forward + backward; whether all is as promised."""
    shards = {edge for case in cases for edge in case.layout.shards.starts if edge}
    vocab = operands[1].shape[0]
    around = [np.arange(edge - 8, edge + 8) for edge in sorted(shards)]
    rows, columns = np.arange(0, operands[0].shape[0], 128), np.r_[0:16, *around, vocab - 16 : vocab]
    wanted = head.oracle(*operands, rows, columns)
    fine, one = True, None
    for case in cases:
        home = functools.partial(jax.device_put, device=jax.devices()[0])
        out, (d_hidden, d_weight) = jax.tree.map(home, jax.block_until_ready(case.call("fwd+bwd")()))
        d_weight = jax.jit(case.layout.shards.unshard_rows)(d_weight)
        result = *out, d_weight
        errors = [abs(np.asarray(a, np.float64)[rows] - b).max() for a, b in zip(out, wanted, strict=False)]
        errors += [head.relative(d_hidden[rows], wanted[2]), head.relative(d_weight[columns], wanted[3])]
        small = max(errors[:2]) < VALUE_ERROR and max(errors[2:]) < GRADIENT_ERROR
        one = result if one is None else one
        same = [bool(jnp.array_equal(a, b)) for a, b in zip(result, one, strict=True)]
        programs = True
        if "forward" in case.compiled:
            alone = jax.tree.map(home, jax.block_until_ready(case.call("forward")()))
            programs = all(bool(jnp.array_equal(a, b)) for a, b in zip(out, alone, strict=True))
        promised = not any(start % TILE for start in case.layout.shards.starts)
        good = small and programs and (all(same) or not promised)
        fine = fine and good
        say(
            f"  {case.layout.name:24s} errors {' '.join(f'{float(e):.1e}' for e in errors)}; bitwise that of one device:"
            f" log-probs {same[0]}, entropy {same[1]}, dW {same[2]}; with forward alone {programs}"
            f"{'' if good else '  NOT AS PROMISED'}"
        )
    return fine


def measure(shape, cases, operands, turns):
    """Times in turns, beside the product of the whole shape on one device."""
    product = jax.jit(lambda h, w: jax.lax.dot_general(h, w, (((1,), (1,)), ((), ()))))
    calls = {("cuBLAS product", "one device"): (1, functools.partial(product, *operands[:2]))}
    for case in cases:
        size = case.layout.shards.num_shards
        calls |= {(case.layout.name, part): (size, case.call(part)) for part in case.compiled}
    times = {key: [] for key in calls}
    for _ in range(turns):
        for key, (_, call) in calls.items():
            times[key].append(head.seconds(call))
    took = {key: statistics.median(values) for key, values in times.items()}
    base = took["cuBLAS product", "one device"]
    for key, value in took.items():
        size, one = calls[key][0], took.get(("1 device", key[1]))
        gain = "" if one is None else f"  speed-up {one / value:.3f}  of linear {one / value / size:.3f}"
        say(
            f"H {shape[0]} V {shape[1]} {key[0]:24s} {key[1]:10s} {value * 1e3:7.2f} ms  {value / base:.3f} x"
            f"  best {min(times[key]) * 1e3:7.2f}{gain}"
        )


def run(shapes, sizes, engine, checks, turns=4):
    """Checks and measures every shape; whether all was as promised."""
    fine = True
    for shape in shapes:
        operands = head.inputs(*shape)
        cases = compile_all(layouts(shape[1], sizes, engine, checks), operands)
        if checks:
            try:
                fine = check(cases, operands) and fine
            except Exception as error:  # The times are worth having all the same.
                say(f"  checks failed: {str(error)[:600]}")
                fine = False
        measure(shape, cases, operands, turns)
    say("all as promised" if fine else "NOT ALL AS PROMISED")
    return fine


def main():
    named = dict(a[2:].split("=") for a in sys.argv[1:] if a.startswith("--") and "=" in a)
    shapes = [tuple(int(x) for x in a.split(",")) for a in sys.argv[1:] if "," in a and a[0] != "-"] or SHAPES
    there, sizes = len(jax.devices()), [int(x) for x in named.get("sizes", "1,2,4").split(",")]
    sizes = [size for size in sizes if size <= there]
    checks = "--no-checks" not in sys.argv
    say(f"{there} x {jax.devices()[0].device_kind}, JAX {jax.__version__}; sizes {sizes}")
    if "--interpret" not in sys.argv:
        return 0 if run(shapes, sizes, {}, checks) else 1

    from jaxlogp.head.hopper._pallas_compat import interpreter
    from tests.head.cases import interpreted_together

    head.TOKENS = 64
    engine = {"interpret": interpreter(), "num_sms": 2, "chunk": 256}
    with interpreted_together():
        return 0 if run([(64, 1568)], sizes, engine, checks, turns=1) else 1


if __name__ == "__main__":
    sys.exit(main())
