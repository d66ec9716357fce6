"""What the guard measures, by the functions of the programs that measured README's numbers."""

import tempfile
from collections.abc import Callable
from dataclasses import dataclass

from benchmarks import sampler_speed, support_speed
from benchmarks.clock import copy_bandwidth
from benchmarks.head_speed.shapes import Plan, measure_shapes
from benchmarks.regression.figures import Figure
from benchmarks.regression.start import run_timed, start_command
from benchmarks.step_speed import __main__ as step_speed
from experiments.config import Config, ModelConfig, ScheduleConfig
from experiments.experience.prompts import LengthLimits
from experiments.loop.find_model import find_model
from experiments.loop.plan import plans_of
from experiments.loop.supervised import find_task
from jaxlogp.errors import require

START_SPREAD = 0.4
"""Of a start, most of which is work of the host: one commit took 84 s with one H100, and 118 s with another."""
START = (
    "--model.name qwen3-0.6b --task word_problems:2 --schedule.docs-per-step 128 --rollout.prompts-per-rollout 16 "
    "--rollout.num-generations 8 --warm-start.max-steps 0 --schedule.steps 2"
)


@dataclass(frozen=True)
class Sizes:
    """Sizes of what is measured, by default README's.

    Attributes:
        tokens: N of the head.
        heads: (H, V); the support is measured on the last one.
        engine: engine of the head.
        dtype: dtype of hidden states and weight.
        model: shape of the step and of the sampler.
        rows: rows of the step by tokens of a row.
        sampler_rows: completions that are drawn at a time.
        prompt: tokens of a prompt.
        new_tokens: tokens of a completion.
        turns: timed repeats of the head and of the step.
        settle: seconds that a program of the head runs untimed, and then again timed, in each turn.
        start: options of the run that is started.
    """

    tokens: int = 8192
    heads: tuple[tuple[int, int], ...] = ((4096, 151936), (1024, 151936))
    engine: str = "hopper"
    dtype: str = "bfloat16"
    model: str = "qwen3-0.6b"
    rows: str = "16x2048"
    sampler_rows: tuple[int, ...] = (64, 256)
    prompt: int = 128
    new_tokens: int = 512
    turns: int = 9
    settle: float = 0.25
    start: str = START


def measure_start(sizes: Sizes) -> list[Figure]:
    """Starts a run with an empty cache of compiled programs, and again with a full one."""
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("empty cache", "full cache"):
            start = run_timed(start_command(sizes.start, folder))
            print(f"  {cache}: longest silence after {start.silent_after!r}", flush=True)
            figures += [Figure("start", f"{cache}: {name}", x, "s", START_SPREAD) for name, x in start.seconds.items()]
    return figures


def measure_head(sizes: Sizes) -> list[Figure]:
    """Times a loss in one pass, and log-probs with their gradients, in products; then those on a support."""
    names = {"one pass": "one pass", sizes.engine: "forward + backward"}
    shapes = {f"({sizes.tokens}, {h}, {v})": (h, v) for h, v in sizes.heads}
    rows, _ = measure_shapes(Plan(shapes, (sizes.tokens,), sizes.dtype, sizes.turns, tuple(names), sizes.settle))
    require(len(rows) == len(names) * len(shapes), "head", f"{sizes.engine} to run here", f"{len(rows)} rows")
    figures = []
    for row in rows:
        name = f"{names[row.program]}, {row.shape.partition(', N=')[0]}"
        figures.append(Figure("head", name, row.forward_backward_ratio, "products", row.spread))
    hidden_size, vocab_size = sizes.heads[-1]
    options = {"engine": sizes.engine, "support_engines": ("auto",), "dtype": sizes.dtype, "repeats": sizes.turns}
    config = support_speed.SupportSpeedConfig(vocab_size=vocab_size, **options)
    found, note = support_speed.measure(config, (sizes.tokens, hidden_size), "zipf", copy_bandwidth())
    print(f"  {note}", flush=True)
    row = next(row for row in found if (row.program, row.part) == ("auto", "forward+backward"))
    name = f"support / full head, forward + backward, ({sizes.tokens}, {hidden_size})"
    return [*figures, Figure("head", name, row.ratio, "", row.spread)]


def default_remat(sizes: Sizes) -> str:
    """Returns what `--model.remat auto` chooses for a step of these rows."""
    rows, length = map(int, sizes.rows.split("x"))
    schedule = ScheduleConfig(rows=rows, row_length=length)
    config = Config(task="word_problems:2", model=ModelConfig(name=sizes.model), schedule=schedule).resolved()
    model = find_model(config, find_task(config), None, restored=False)
    # Of the sizes a plan depends on rows alone.
    of_rows = LengthLimits(prompt=0, completion=0, row=length, rows=rows)
    plan = next(plans_of(config, of_rows, model, chooses_remat=True), None)
    print(f"  {plan or f'recomputation in the backward pass: {config.model.remat}'}", flush=True)
    return config.model.remat if plan is None or plan.remat is None else plan.remat


def measure_step(sizes: Sizes) -> list[Figure]:
    """Times a training step with the default recomputation."""
    options = {"model": (sizes.model,), "rows": (sizes.rows,), "repeats": sizes.turns, "transformers": False}
    found = step_speed.main(step_speed.StepSpeedConfig(remat=(default_remat(sizes),), **options))
    require(len(found) == 1, "step", "one line", len(found))
    speed, name = found[0], f"{sizes.model}, {sizes.rows}"
    return [
        Figure("step", f"{name}: speed", speed.tokens_per_second, "tokens/s", speed.spread, more_is_better=True),
        Figure("step", f"{name}: share of the peak", speed.mfu, "", speed.spread, more_is_better=True),
    ]


def measure_sampler(sizes: Sizes) -> list[Figure]:
    """Times a decoding step of all rows."""
    shape = {"model": (sizes.model,), "rows": sizes.sampler_rows}
    config = sampler_speed.SamplerSpeedConfig(**shape, prompt=sizes.prompt, new_tokens=sizes.new_tokens)
    figures = []
    for row in sampler_speed.main(config):
        name = f"{row.model}, {row.rows} rows: "
        figures.append(Figure("sampler", name + "step", row.milliseconds, "ms", row.spread))
        share = name + "share of the memory bound"
        figures.append(Figure("sampler", share, row.share_of_bound, "", row.spread, more_is_better=True))
    return figures


PARTS: dict[str, Callable[[Sizes], list[Figure]]] = {
    # First, before this process opens the device and takes its memory.
    "start": measure_start,
    "head": measure_head,
    "step": measure_step,
    "sampler": measure_sampler,
}
