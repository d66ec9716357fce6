"""The range of every option."""

import math

from experiments.config.run import Config
from experiments.models.attention import IMPLEMENTATIONS
from experiments.models.decoder_config import RESIDUAL_DTYPES
from experiments.models.lora import ADAPTABLE, LoraConfig
from experiments.models.mesh import MeshSpec, parse_mesh
from experiments.models.remat import POLICIES
from jaxlogp.errors import require


def validate(config: Config) -> MeshSpec:
    """Checks every option that has a range, and returns the mesh that ``config.mesh`` describes.

    Raises:
      ValueError: naming the option as written on the command line, what was expected and what was found.
    """
    mesh = parse_mesh(config.mesh)
    for option, lowest in _LOWEST.items():
        value = _get(config, option)
        if value is not None:
            require(value >= lowest, f"--{option}", f"at least {lowest}", value)
    for option in _POSITIVE:
        value = _get(config, option)
        require(value is None or 0.0 < value < math.inf, f"--{option}", "a finite number > 0", value)
    for option, choices in _CHOICES.items():
        require(_get(config, option) in choices, f"--{option}", f"one of {', '.join(choices)}", _get(config, option))
    require(
        0.0 <= config.warm_start.target <= 1.0, "--warm-start.target", "a share in [0, 1]", config.warm_start.target
    )
    config.loss.policy_loss(1)
    _validate_lora(config)
    require(all(config.rollout.stop), "--rollout.stop", "texts of at least one character", "an empty one")
    if config.rollout.draw_options().filters:
        expected = "the whole distribution (no top-k, top-p or min-p) with --invariant, whose sampler draws from it"
        require(not config.invariant, "--rollout", expected, "a part of it")
    config.optimizer.optimizer(config.schedule.steps)
    completions = config.rollout.prompts_per_rollout * config.rollout.num_generations
    if config.invariant:
        _validate_invariant(config, completions)
    else:
        expected = f"prompts-per-rollout times num-generations divisible by {mesh.data} data ranks"
        require(completions % mesh.data == 0, "--mesh", expected, completions)
    return mesh


def _validate_invariant(config: Config, completions: int) -> None:
    rows, leaf = config.schedule.rows, config.invariance.leaf_rows
    require((rows or leaf) % leaf == 0, "--schedule.rows", f"a multiple of --invariance.leaf-rows {leaf}", rows)
    # Any other number would end a step in the middle of a rollout, at a document that depends on the micro-batch.
    expected = f"{completions} with --invariant, the documents of a rollout"
    require(
        config.schedule.docs_per_step == completions,
        "--schedule.docs-per-step",
        expected,
        config.schedule.docs_per_step,
    )
    engine, attention = config.loss.engine, config.model.attention
    require(engine == "auto", "--loss.engine", "auto with --invariant, which brings its own", engine)
    require(attention in ("auto", "einsum"), "--model.attention", "auto or einsum with --invariant", attention)
    accumulate = config.schedule.accumulate
    require(accumulate == "float32", "--schedule.accumulate", "float32 with --invariant", accumulate)


def _validate_lora(config: Config) -> None:
    lora = config.lora
    if lora.rank == 0:
        same = lora == LoraConfig()
        require(same, "--lora", "no other options without --lora.rank, which is 0", "other options")
        return
    expected = "0 for a model that is not from disk (--model.path): there is no trained base to adapt"
    require(config.model.path is not None, "--lora.rank", expected, lora.rank)
    expected = "0 with --invariant, whose bits were shown for whole models alone"
    require(not config.invariant, "--lora.rank", expected, lora.rank)
    expected = f"different names among {', '.join(ADAPTABLE)} (the head is one matrix for every engine of the head)"
    known = lora.modules and len(set(lora.modules)) == len(lora.modules) and set(lora.modules) <= set(ADAPTABLE)
    require(bool(known), "--lora.modules", expected, " ".join(lora.modules) or "none")


def _get(config: Config, option: str) -> object:
    value: object = config
    for part in option.replace("-", "_").split("."):
        value = getattr(value, part)
    return value


_LOWEST = {
    "seed": 0,
    "lora.rank": 0,
    "warm-start.max-steps": 0,
    "warm-start.batch-size": 1,
    "warm-start.check-every": 1,
    "rollout.prompts-per-rollout": 1,
    "rollout.num-generations": 2,
    "rollout.max-prompt-tokens": 1,
    "rollout.max-new-tokens": 1,
    "rollout.max-resamples": 1,
    "invariance.leaf-rows": 1,
    "invariance.granules": 1,
    "schedule.steps": 0,
    "schedule.docs-per-step": 0,
    "schedule.micro-batches": 1,
    "schedule.rows": 1,
    "schedule.row-length": 2,
    "schedule.max-empty-micro-batches": 0,
    "schedule.epochs": 1,
    "optimizer.warmup-steps": 0,
    "optimizer.weight-decay": 0.0,
    "evaluation.every": 0,
    "evaluation.num-prompts": 1,
    "drift.every": 0,
    "checkpoint.every": 0,
    "checkpoint.every-minutes": 0.0,
    "checkpoint.keep": 1,
    "guards.max-refused-steps": 1,
    "guards.degenerate-steps": 0,
    "guards.spike-factor": 0.0,
    "guards.replica-every": 0,
}
_POSITIVE = (
    "warm-start.learning-rate",
    "rollout.temperature",
    "lora.alpha",
    "optimizer.learning-rate",
    "optimizer.max-grad-norm",
)
_CHOICES = {
    "loss.advantages": ("group", "centred", "leave_one_out"),
    "loss.metrics": ("none", "basic", "with_entropy"),
    "model.dtype": ("auto", "float32", "bfloat16"),
    "model.param-dtype": ("float32", "bfloat16"),
    "model.residual-dtype": RESIDUAL_DTYPES,
    "model.attention": ("auto", *IMPLEMENTATIONS),
    "model.remat": ("auto", *POLICIES),
    "schedule.accumulate": ("float32", "bfloat16"),
}
