"""A guard for the speed that README claims: what is worse on this device than the figures that are kept of its kind.

    python -m benchmarks.regression                      # all parts, at most 8 minutes on one GPU
    python -m benchmarks.regression --parts head step
    python -m benchmarks.regression --keep               # all parts; writes what is compared with from then on

The head's loss in one pass, and its log-probs with gradients, in products, and log-probs on a support against it; the
trainer's step; the sampler; the start of a run, from the command to its first optimizer step. A figure is worse if it is
outside both spreads, that of its own turns and that of the kept ones, and by more than 2 %. Starts of one commit differ by
40 % between hosts, which is their spread; a smaller change is seen only with both commits on one machine. The exit code is 1
if a figure is worse, or one that is kept could not be measured.
"""

import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import jax

from benchmarks.regression.figures import Figure, compare, kept_path, read_figures, write_figures
from benchmarks.regression.parts import PARTS, Sizes
from experiments.command_line import run_command
from experiments.runs.environment import describe_environment
from jaxlogp.errors import require


@dataclass(frozen=True)
class RegressionConfig:
    """Options of the guard."""

    parts: tuple[str, ...] = tuple(PARTS)
    """What to measure: start, head, step, sampler."""
    keep: bool = False
    """Write the figures of all parts to --folder, in the place of those that are kept."""
    commit: str | None = None
    """Commit of the code, for the file. None: the checkout's."""
    folder: str = "benchmarks/results"
    """Where regression_DEVICE.json is kept."""


def measure(parts: Sequence[str], sizes: Sizes) -> tuple[list[Figure], list[str]]:
    """Measures parts; returns the figures and the names of the parts that failed, which are printed and passed over."""
    figures, failed = [], []
    for part in (part for part in PARTS if part in parts):
        started = time.perf_counter()
        print(f"{part}:", flush=True)
        try:
            figures += PARTS[part](sizes)
        except Exception as error:  # One part must not end the others.
            failed.append(part)
            print(f"  {part} failed: {type(error).__name__}: {str(error)[:600]}", flush=True)
        # Programs and their arrays are in cycles.
        gc.collect()
        jax.clear_caches()
        print(f"  {part}: {time.perf_counter() - started:.0f} s", flush=True)
    return figures, failed


def main(config: RegressionConfig, sizes: Sizes) -> bool:
    """Measures, compares and prints; returns True if nothing is worse."""
    for part in config.parts:
        require(part in PARTS, "--parts", f"one of {', '.join(PARTS)}", part)
    require(not config.keep or set(config.parts) == set(PARTS), "--keep", "all parts", " ".join(config.parts))
    started = time.perf_counter()
    figures, failed = measure(config.parts, sizes)
    facts = describe_environment()
    if config.commit is not None:
        facts["git"] = {"revision": config.commit, "dirty": False, "reason": None}
    facts |= {"device": jax.devices()[0].device_kind, "seconds": round(time.perf_counter() - started)}
    path = kept_path(Path(config.folder), facts["device"])
    kept, before = read_figures(path) if path.exists() else ([], None)
    comparisons = compare(figures, kept, config.parts)
    print("\n| part | figure | measured | kept | measured / kept | verdict |\n|---|---|---|---|---|---|")
    for comparison in comparisons:
        print(comparison)
    print(f"\nmeasured: {facts['device']}, JAX {jax.__version__}, {facts['seconds']} s")
    if before is None:
        print(f"kept: nothing of this device ({path})")
    else:
        print(f"kept: {before['device']}, {before['started']}, commit {before['git']['revision']} ({path})")
    if failed:
        print(f"failed: {', '.join(failed)}")
    elif config.keep:
        write_figures(path, figures, facts)
        print(f"written: {path}")
    return not failed and not any(comparison.failed for comparison in comparisons)


def run_cli(arguments: list[str] | None = None) -> bool:
    """The command line; see `experiments.command_line` for how it ends."""
    settings = {"program": "benchmarks.regression", "description": __doc__, "arguments": arguments}
    return run_command(RegressionConfig, lambda config: main(config, Sizes()), **settings)


if __name__ == "__main__":
    raise SystemExit(0 if run_cli() else 1)
