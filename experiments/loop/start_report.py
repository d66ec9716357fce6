"""What is about to run, said before anything is compiled."""

from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from experiments.config import Config
from experiments.experience.prompts import LengthLimits, PromptStream, answer_length, held_out_examples
from experiments.learner.model_source import ModelSource, UserModel
from experiments.loop.memory import device_limit, require_room, training_bytes
from experiments.loop.supervised import SupervisedFile
from experiments.models.dtype_choice import DtypeChoice
from experiments.models.lora import trained_part
from experiments.models.mesh import MeshSpec, parse_mesh, require_devices
from experiments.models.parameters import abstract_decoder
from experiments.models.tokenizer import Tokenizer
from experiments.options import option_errors
from experiments.runs.console import RunConsole
from experiments.tasks import Completion, Example, Rewards, Task
from experiments.tasks.protocol import exact_answers, prompt_text
from experiments.tasks.rewards import CORRECT, RewardNotFinite
from jaxlogp.errors import require

FEW_PROMPTS = 20
"""Fewer different held-out prompts than this measure little."""
MANY = 2000
"""Training examples that are looked at, where they can be counted; of the others, those that are held out."""


def print_start_report(
    config: Config,
    task: Task | SupervisedFile,
    model: ModelSource,
    sizes: LengthLimits,
    folder: Path,
    dtype: DtypeChoice,
    rewards: Rewards | None = None,
) -> None:
    """Prints what is about to run, with warnings; ValueError if prompts, answers or memory do not fit."""
    console = RunConsole(config.quiet)
    mesh = parse_mesh(config.mesh)
    require_devices(mesh)
    if config.rollout.mesh is not None:
        with option_errors("rollout"):
            require_devices(parse_mesh(config.rollout.mesh))
    if isinstance(task, SupervisedFile):
        told = _document_facts(config, task, model.tokenizer)
    else:
        told = _rollout_facts(config, task, model.tokenizer, sizes, rewards, console)
    params = _parameters(model)
    devices = max(mesh.num_devices, parse_mesh(config.rollout.mesh or "").num_devices)
    require_room(_least_bytes(config, model, params, mesh, told.cache_slots), devices)
    console.begin(
        {
            told.kind: told.data,
            "model": f"{_described(config, model)}, {_count(params):,} parameters{_trained(params)}, {dtype}",
            "devices": f"{mesh.num_devices} of {jax.device_count()} {jax.devices()[0].device_kind}, mesh {mesh}"
            + (f", {jax.process_count()} processes" if jax.process_count() > 1 else ""),
            "steps": told.steps,
            "optimizer": f"{config.optimizer.name}, learning rate {config.optimizer.learning_rate:g}",
            **({} if told.rollout is None else {"rollout": told.rollout}),
            "run folder": str(folder),
        }
    )
    for warning in [*told.warnings, *_beyond_context(model, told.longest)]:
        console.warn(warning)


class _Facts(NamedTuple):
    """What is told of a run's data, and the tokens of its longest document and of its largest key-value cache."""

    kind: str
    data: str
    steps: str
    rollout: str | None
    warnings: list[str]
    longest: int
    cache_slots: int


def _document_facts(config: Config, task: SupervisedFile, tokenizer: Tokenizer) -> _Facts:
    found, schedule = task.load(tokenizer), config.schedule
    documents = found.documents
    labels = sum(document.num_labels for document in documents["train"])
    # Rows are as long as the longest, and the cost of attention is quadratic in it.
    data = (
        f"{task.path}, {len(documents['train'])} documents ({labels:,} labels), {len(documents['held_out'])} held out, "
        f"the longest of {found.longest:,} tokens"
    )
    passes = "" if schedule.epochs is None else f", at most {schedule.epochs} pass{'es' if schedule.epochs > 1 else ''}"
    return _Facts(
        "data", data, f"{schedule.steps} of {schedule.docs_per_step} documents each{passes}", None, [], found.longest, 0
    )


def _beyond_context(model: ModelSource, longest: int) -> list[str]:
    """A warning of documents that may be longer than those that the model is made for."""
    most = None if model.decoder is None else model.decoder.context_length
    if most is None or longest <= most:
        return []
    return [f"documents of up to {longest:,} tokens: the model's files say that it is made for at most {most:,}"]


def _rollout_facts(
    config: Config,
    task: Task,
    tokenizer: Tokenizer,
    sizes: LengthLimits,
    rewards: Rewards | None,
    console: RunConsole,
) -> _Facts:
    held_out = held_out_examples(task, config.evaluation.num_prompts)
    _try_rewards(config.reward.rewards(task) if rewards is None else rewards, held_out[:2], console)
    prompts = {prompt_text(each.prompt) for each in held_out}
    warnings = []
    if len(prompts) < min(FEW_PROMPTS, config.evaluation.num_prompts):
        warnings.append(f"task {task.name}: distinct held-out prompts: {len(prompts)}; a score on so few is noisy")
    long = check_answer_lengths(config, task, held_out, tokenizer, rewards)
    if config.source is None:
        # For its checks.
        PromptStream(task, config.seed, config.schedule.epochs)
    count, warm = task.num_examples("train"), config.warm_start.max_steps
    steps = f"{config.schedule.steps} of {_documents(config)} each, {_loss(config)}"
    examples = f"{'endless' if count is None else count} training examples"
    data = f"{task.name}, {examples}, {len(prompts)} distinct held-out prompts"
    return _Facts(
        "task",
        data,
        f"{steps}{f', warm start of at most {warm} steps' if warm else ''}",
        _rollout(config, sizes.completion),
        [*warnings, *([] if long is None else [long]), *_idle_ranks(config, sizes)],
        sizes.row if config.source is not None else sizes.prompt + sizes.completion,
        _cache_slots(config, sizes, len(held_out)),
    )


def _idle_ranks(config: Config, sizes: LengthLimits) -> list[str]:
    """Warnings of data ranks without a leaf, in a rollout of the built-in samplers and in a step."""
    completions = config.rollout.prompts_per_rollout * config.rollout.num_generations
    drawn = 0 if config.source is not None else completions
    work = [
        (drawn, "completions", config.rollout.mesh or config.mesh),
        (config.schedule.docs_per_step, "documents of a step", config.mesh),
    ]
    found = []
    for number, what, mesh in work if config.invariant else []:
        leaves, ranks = -(-number // sizes.rows), parse_mesh(mesh).ranks
        # 0: none are drawn here, or a step takes what is drawn.
        if 0 < leaves < ranks:
            option = f"--invariance.leaf-rows {sizes.rows}"
            found.append(f"{option}: {number} {what} are {leaves} leaves, for {ranks} data ranks")
    return found


def _cache_slots(config: Config, sizes: LengthLimits, held_out: int) -> int:
    """Tokens in the least cache of a rollout or of an evaluation of so many prompts.

    Where a device has a limit, and no option names a number, completions may be drawn one by one.
    """
    rollout = config.rollout
    completions = rollout.prompts_per_rollout * rollout.num_generations
    ranks = parse_mesh(rollout.mesh or config.mesh).of_rollouts(keep_tensor=True).ranks
    at_a_time = completions if device_limit(jax.local_devices()) is None else 1
    rows = min(completions, (rollout.rows or at_a_time) * ranks)
    return max(rollout.prompts_per_rollout, held_out) * sizes.prompt + rows * sizes.completion


def _try_rewards(rewards: Rewards, examples: list[Example], console: RunConsole) -> None:
    """Scores two completions, so that a broken reward function ends the run before anything is compiled."""
    texts = [(examples[0].answer, True), ("", False)]
    said = [Completion(text, num_tokens=len(text) + 1, ended=ended) for text, ended in texts]
    try:
        rewards.score([examples[0], examples[-1]], said)
    except RewardNotFinite as error:
        # Only the step of such a completion is refused.
        console.warn(str(error))


def _documents(config: Config) -> str:
    rollout, documents = config.rollout, config.schedule.docs_per_step
    if not documents and config.source is not None:
        return "a call of the source"
    return f"{documents or rollout.prompts_per_rollout * rollout.num_generations} documents"


def _rollout(config: Config, longest_completion: int) -> str:
    if config.source is not None:
        return f"source {config.source}"
    rollout = config.rollout
    at_once = "" if rollout.rows is None else f", {rollout.rows} at a time on each data rank"
    return (
        f"{rollout.prompts_per_rollout} prompts × {rollout.num_generations} completions of at most "
        f"{longest_completion} tokens{at_once}, advantages {config.loss.advantages}"
    )


def _loss(config: Config) -> str:
    """The loss, what it is taken over, and what its labels are weighted with or rejected by."""
    loss, correction = config.loss, config.correction
    parts = [f"loss {loss.name}" + (" on what the sampler drew from" if loss.on_support else "")]
    if loss.top_entropy is not None:
        parts.append(f"at the {loss.top_entropy:.0%} of labels with the highest entropy")
    if loss.entropy_target is not None:
        parts.append(f"entropy target {loss.entropy_target:g}")
    if loss.teacher is not None:
        parts.append(f"KL ({loss.kl_estimator}) to {loss.teacher}")
    if correction.level is not None:
        mean = ", normalized" if correction.normalize else ""
        parts.append(f"weights {correction.level} {correction.kind} ({correction.low:g} to {correction.high:g}{mean})")
    if config.rejection.rejection() is not None:
        parts.append("with rejection")
    return ", ".join(parts)


def _described(config: Config, model: ModelSource) -> str:
    if isinstance(model, UserModel):
        return type(model.model).__name__
    return config.model.path or config.model.name or "decoder"


def _parameters(model: ModelSource) -> nnx.State:
    if isinstance(model, UserModel):
        return nnx.state(model.model, nnx.Param)
    assert model.decoder is not None, "a decoder or a model of the caller's own"
    return abstract_decoder(model.decoder)[1]


def _count(tree: nnx.State) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(tree))


def _trained(params: nnx.State) -> str:
    trained = trained_part(params)
    return "" if trained is params else f" ({_count(trained):,} trained)"


def _least_bytes(config: Config, model: ModelSource, params: nnx.State, mesh: MeshSpec, cache_slots: int) -> int:
    """Bytes on all devices together of what a run cannot do without: its state, gradients, and a cache of so many tokens."""
    # With --invariant one device of each process has the state and updates it, and a leaf's rows are drawn at a time.
    copies = jax.process_count() if config.invariant else mesh.data
    state, decoder = copies * training_bytes(config, params), model.decoder
    if decoder is None or config.invariant:
        return state
    width = 2 * decoder.num_layers * decoder.num_kv_heads * decoder.head_dim
    return state + cache_slots * width * jnp.dtype(decoder.dtype).itemsize


def check_answer_lengths(
    config: Config, task: Task, held_out: list[Example], tokenizer: Tokenizer, rewards: Rewards | None
) -> str | None:
    """A warning of answers that are longer than completions may be, end token included; None where all fit.

    The bound that a task gives has room for its own answers. Examples without an answer's text say nothing. ValueError if no
    completion can be right, and nothing else is rewarded.
    """
    room = config.rollout.max_new_tokens
    if room is None:
        return None
    count = task.num_examples("train") or 0
    examples = [*held_out, *(task.example(index, "train") for index in range(min(count, MANY)))]
    found = [answer_length(tokenizer, each) for each in examples if each.answer.strip()]
    lengths = [length for length in found if length is not None]
    long = sum(length >= room for length in lengths)
    if not long:
        return None
    if exact_answers(task) and rewards is None and config.reward.functions == (CORRECT,):
        # A completion without an end token is right too, but for this option no token of it is trained on.
        least = min(lengths) + config.rollout.mask_truncated
        require(least <= room, "--rollout.max-new-tokens", f"at least {least}, for the shortest answer", room)
    return (
        f"--rollout.max-new-tokens {room}: too few for {long} of {len(lengths)} answers; the longest needs "
        f"{max(lengths) + 1}, end token included"
    )
