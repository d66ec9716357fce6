"""Every option of a run as nested frozen dataclasses; ``python -m experiments.grpo --help`` prints these lines."""

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import jax

from experiments.models.attention import IMPLEMENTATIONS
from experiments.models.decoder_config import RESIDUAL_DTYPES, DecoderConfig
from experiments.models.dtype_choice import dtype_here
from experiments.models.lora import ADAPTABLE, LoraConfig
from experiments.models.mesh import MeshSpec, parse_mesh
from experiments.models.named_shapes import NAMED_SHAPES
from experiments.models.remat import POLICIES
from experiments.sampling.pick import DrawOptions
from experiments.tasks.jsonl import JsonlOptions
from experiments.training.optimizers import OPTIMIZERS, SCHEDULES, Optimizer, learning_rate
from jaxlogp import ReductionOrder
from jaxlogp.errors import require
from jaxlogp.losses import PRESETS, PolicyLoss


@dataclass(frozen=True)
class ModelConfig:
    """The decoder; see experiments/models/decoder_config.py."""

    path: str | None = None
    """Model to begin with: a Hugging Face directory, a GGUF file, or package:NAME for the GGUF file in an installed Python
    package. It brings its tokenizer and all sizes and options of the model but the dtypes and fp32_head, and has no warm
    start unless warm-start.max-steps says so."""
    own: str | None = None
    """Class of a model given to train(), which writes its name here."""
    chat_template: bool = True
    """Put prompts through the chat template of the model at path; otherwise they are plain text after its start token."""
    name: str | None = None
    """A published model's sizes and options with random weights: qwen3-0.6b, qwen3-1.7b or llama-3.2-1b. Its vocabulary is
    its own; the task's tokens are the first of it."""
    hidden_size: int = 64
    """Features of the residual stream."""
    intermediate_size: int = 128
    """Hidden features of the SwiGLU."""
    num_layers: int = 3
    """Number of layers."""
    num_heads: int = 4
    """Query heads."""
    num_kv_heads: int = 4
    """Key-value heads, a divisor of num_heads."""
    head_dim: int = 16
    """Features per head, an even number."""
    qk_norm: bool = True
    """RMSNorm over queries and keys (Qwen3)."""
    attention_bias: bool = False
    """Biases on queries, keys and values (Qwen2)."""
    tie_embeddings: bool = True
    """Use the embedding table as head."""
    logit_scale: float = 1.0
    """Multiplier of the logits (MuP output scale)."""
    logit_softcap: float | None = None
    """Soft cap of the logits, cap tanh(logits / cap); None applies no cap."""
    fp32_head: bool = False
    """Multiply hidden states and head in fp32 whatever their dtypes, in the trainer and in the sampler. Both have been
    rounded to dtype before that, and products of bf16 numbers are exact in fp32 accumulators anyway: with bf16 only the
    order of sums changes. What sampler and trainer disagree by in bf16 comes from the layers below the head, and stays."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    dtype: str = "auto"
    """Dtype of activations and head: float32, bfloat16, or auto: bfloat16 on GPUs that multiply it (NVIDIA's from compute
    capability 8 on) unless --invariant, else float32."""
    param_dtype: str = "float32"
    """Dtype of the parameters that the model reads: float32, or bfloat16, for which the optimizer holds an fp32 copy that it
    adds its updates to."""
    residual_dtype: str = "auto"
    """Dtype of the residual stream between the products, in trainer and sampler: float32, or auto: that of dtype."""
    attention: str = "auto"
    """Attention over packed rows: auto, einsum, chunked, hopper, tokamax or cudnn. With --invariant it is the einsum."""
    remat: str = "auto"
    """What layers keep for the backward pass: none (what the compiler wants), products, attention (the results of attention
    and the layers' inputs), full (the inputs alone), or auto, none on a CPU, else attention."""

    def decoder(self, vocab_size: int, invariant: bool = False) -> DecoderConfig:
        """The configuration of a model from nothing for a vocabulary of at least ``vocab_size`` tokens.

        Raises:
          ValueError: a named shape that is unknown, or has a smaller vocabulary, or an option that it has decided.
        """
        options = vars(self.resolved(invariant))
        if self.name is None:
            own = {name: options[name] for name in options if name not in _NOT_OF_THE_DECODER}
            return DecoderConfig(vocab_size=vocab_size, **own)
        require(self.name in NAMED_SHAPES, "--model.name", f"one of {', '.join(NAMED_SHAPES)}", self.name)
        self._leave_to("name")
        shape = NAMED_SHAPES[self.name]
        expected = f"a shape for at least {vocab_size} tokens"
        require(shape.vocab_size >= vocab_size, "--model.name", expected, f"{self.name}, {shape.vocab_size}")
        return dataclasses.replace(shape, **{name: options[name] for name in _OF_ANY_MODEL})

    def of_pretrained(self, config: DecoderConfig, invariant: bool = False) -> DecoderConfig:
        """The configuration of a model from disk, computed as is said here.

        Raises:
          ValueError: an option that the model on disk has decided.
        """
        self._leave_to("path")
        options = vars(self.resolved(invariant))
        return dataclasses.replace(config, **{name: options[name] for name in _OF_ANY_MODEL})

    def _leave_to(self, option: str) -> None:
        """Raises ValueError where another option than `option` says what that one decides."""
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            mine = each.name in (option, "chat_template", *_OF_ANY_MODEL) or value == each.default
            expected = f"no value together with --model.{option}, which decides it"
            require(mine, f"--model.{_dashed(each.name)}", expected, value)

    def resolved(self, invariant: bool = False) -> "ModelConfig":
        """The same with "auto" replaced by what it means here; for the dtype see `experiments.models.dtype_choice`.

        Invariant runs have their own kernels, were tested in fp32, and use einsum attention, whose order is known.
        """
        dtype = dtype_here(self.dtype, invariant=invariant).dtype
        attention = "einsum" if invariant and self.attention == "auto" else self.attention
        spacious = jax.default_backend() == "cpu" or invariant
        remat = ("none" if spacious else "attention") if self.remat == "auto" else self.remat
        return dataclasses.replace(self, dtype=dtype, attention=attention, remat=remat)


_NOT_OF_THE_DECODER = ("path", "own", "chat_template", "name")
_OF_ANY_MODEL = ("fp32_head", "dtype", "param_dtype", "residual_dtype", "attention", "remat")


@dataclass(frozen=True)
class DataConfig(JsonlOptions):
    """How examples are put to the model. Keys, patterns and verifier belong to task jsonl:PATH alone."""

    system: str | None = None
    """System message before every prompt; needs a chat template."""
    instruction: str | None = None
    """Text appended to every prompt, after an empty line."""
    extract: tuple[str, ...] = ()
    """Where the answer is in a completion: whole, tag (<answer>…</answer>), boxed (\\boxed{…}), answer_is, last_number. The
    first that finds something decides; none leaves it to the task."""


@dataclass(frozen=True)
class RewardConfig:
    """The reward of a completion: a weighted sum. Held-out scores are exact match whatever it is."""

    functions: tuple[str, ...] = ("correct",)
    """correct (the task's verdict), tags (all of it is <think>…</think><answer>…</answer>), pattern (all of it matches),
    ended (by an end token), short (1 - tokens / length beyond length, else 0), or a name of one's own."""
    weights: tuple[float, ...] | None = None
    """One for each function; None for 1.0 each."""
    pattern: str | None = None
    """Regular expression of the function pattern; a dot matches line breaks too."""
    length: int | None = None
    """Tokens of the function short."""


WARM_START_STEPS = 400
"""Of a model from nothing."""


@dataclass(frozen=True)
class WarmStartConfig:
    """The short supervised phase on worked examples. It ends at the target, or after max_steps."""

    max_steps: int | None = None
    """Maximum number of optimizer steps; 0 skips the phase. None is 400 for a model from nothing, 0 for one from disk."""
    batch_size: int = 256
    """Documents (prompt and answer) per optimizer step."""
    learning_rate: float = 2e-3
    """Peak learning rate of AdamW, reached after 50 steps, or a quarter of max_steps if that is less."""
    target: float = 0.36
    """Stop when this share of sampled answers (temperature 1, training prompts) is right."""
    check_every: int = 5
    """Optimizer steps between two such checks."""


@dataclass(frozen=True)
class RolloutConfig:
    """How completions are sampled."""

    prompts_per_rollout: int = 64
    """Prompts per rollout, all completed with the same parameters."""
    num_generations: int = 8
    """Completions per prompt: the size of an advantage group."""
    temperature: float = 1.0
    """Divisor of the logits, in the sampler as in the trainer."""
    top_k: int | None = None
    """Draw among this many likeliest tokens only; None for all. The loss takes log-probs of the whole distribution."""
    top_p: float = 1.0
    """Draw among the fewest likeliest tokens whose probabilities sum to this; 1 for all."""
    min_p: float = 0.0
    """Draw among tokens at least this many times as likely as the likeliest; 0 for all."""
    stop: tuple[str, ...] = ()
    """Texts each of which ends a completion; its last token is the one that completes the text, and it counts as ended."""
    max_prompt_tokens: int | None = None
    """Longest prompt in tokens, special tokens included; None takes the task's own bound."""
    max_new_tokens: int | None = None
    """Longest completion in tokens, end token included; None takes the task's own bound."""
    mask_truncated: bool = False
    """Take completions without an end token out of the loss: no token of theirs is a label, while their rewards stay in the
    mean and deviation of their group. A divisor that counts labels loses theirs; one that counts documents keeps them."""
    rescore: bool | None = None
    """Take old log-probs from the trainer's own forward pass instead of the sampler's, with the parameters that sampled: a
    ratio is then that of two policies, without the difference between sampler and trainer, which stays the metric drift_max.
    Its log-sum-exp saves a strictly on-policy step the forward pass of the head. None: where a rollout feeds more than one
    optimizer step, that is, where its completions do not divide schedule.docs-per-step."""

    def draw_options(self) -> DrawOptions:
        """How tokens are drawn.

        Raises:
          ValueError: an option out of range.
        """
        with _refused_as("rollout"):
            return DrawOptions(self.temperature, top_k=self.top_k, top_p=self.top_p, min_p=self.min_p)


@dataclass(frozen=True)
class ScheduleConfig:
    """The size of an optimizer step, and the number of steps."""

    steps: int = 1000
    """Optimizer steps of reinforcement learning."""
    docs_per_step: int = 512
    """Documents, over all data ranks, that complete a step; 0 takes micro_batches micro-batches instead."""
    micro_batches: int = 4
    """Micro-batches per step and data rank where docs_per_step is 0."""
    rows: int | None = None
    """Packed rows of one micro-batch on one data rank. None splits a step into equal micro-batches of at most about 1024
    tokens on a CPU, 16384 elsewhere."""
    row_length: int | None = None
    """Tokens of one packed row; no document may be longer. None takes the task's longest document."""
    max_empty_micro_batches: int = 16
    """Consecutive micro-batches without a document on any rank before the run gives up."""
    accumulate: str = "float32"
    """Dtype of the gradient's sums over micro-batches: float32, or bfloat16, which rounds at every addition. Loss, counts
    and metrics do not depend on it."""
    epochs: int | None = None
    """Passes over the training prompts, after which the data ends. None repeats them forever."""


@dataclass(frozen=True)
class LossConfig:
    """The policy loss: a preset of jaxlogp.losses, and changes to it. None keeps the preset's own value."""

    name: str = "grpo"
    """bnpo, cispo, dapo, dr_grpo, grpo, grpo_paper, gspo, reinforce, rloo, sapo, or a name given to register_loss."""
    epsilon: float | None = None
    """Lower clip range: ratios below 1 - epsilon are clipped."""
    epsilon_high: float | None = None
    """Upper clip range: ratios above 1 + epsilon_high are clipped."""
    delta: float | None = None
    """Largest ratio where the advantage is negative (dual clip)."""
    max_weight: float | None = None
    """cispo: largest importance weight."""
    weighting: str | None = None
    """gspo: document (equal weights) or length (documents weighted by their number of labels)."""
    length: int | None = None
    """dr_grpo, and reduction constant_length: the divisor in tokens; None takes the longest completion."""
    reduction: str | None = None
    """labels, documents, document_mean or constant_length: the weight of each label, and the divisor of the sum."""
    kl_coefficient: float | None = None
    """Weight of the KL to a frozen reference, the policy after the warm start."""
    kl_estimator: str | None = None
    """k1, k2 or k3."""
    entropy_coefficient: float | None = None
    """Weight of an entropy bonus."""
    grad_divisor: float | None = None
    """Divisor of the gradient where it differs from that of the reported loss."""
    advantages: str = "group"
    """group (minus the group's mean, divided by its standard deviation), centred (not divided), or leave_one_out."""
    metrics: str = "with_entropy"
    """Metrics of a step: none, basic or with_entropy."""
    engine: str = "auto"
    """Engine of the head: auto, chunked, hopper, reference, triton, or a name given to register_engine."""

    def policy_loss(self, longest_completion: int) -> PolicyLoss:
        """The loss object.

        Args:
          longest_completion: tokens, the default of `length`.

        Raises:
          ValueError: an unknown preset, an option that it does not have, or a value out of range.
        """
        require(self.name in PRESETS, "--loss.name", f"one of {', '.join(sorted(PRESETS))}", self.name)
        preset = PRESETS[self.name]
        parameters = inspect.signature(preset).parameters
        shared = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
        known = {*parameters, *(_SHARED_LOSS_OPTIONS if shared else ())}
        given = {name: getattr(self, name) for name in _LOSS_OPTIONS if getattr(self, name) is not None}
        length = given.pop("length", longest_completion)
        for name, value in given.items():
            require(
                name in known,
                f"--loss.{_dashed(name)}",
                f"None for loss {self.name!r}, which has no such option",
                value,
            )
        if "length" in parameters:
            given["length"] = length
        with _refused_as("loss"):
            loss = preset(**given)
            if self.reduction is not None:
                length = length if self.reduction == "constant_length" else None
                loss = dataclasses.replace(loss, reduction=self.reduction, length=length)
            return loss


_SHARED_LOSS_OPTIONS = ("kl_coefficient", "kl_estimator", "entropy_coefficient", "grad_divisor")
_LOSS_OPTIONS = ("epsilon", "epsilon_high", "delta", "max_weight", "weighting", "length", *_SHARED_LOSS_OPTIONS)


def _dashed(name: str) -> str:
    return name.replace("_", "-")


@contextlib.contextmanager
def _refused_as(section: str) -> Iterator[None]:
    """Names the option of this section where an object that is made of its options refuses an argument."""
    try:
        yield
    except ValueError as error:
        argument, _, rest = str(error).partition(":")
        raise ValueError(f"--{section}.{_dashed(argument)}:{rest}") from None


@dataclass(frozen=True)
class OptimizerConfig:
    """The optimizer of the reinforcement learning phase. None keeps the optimizer's own value."""

    name: str = "adamw"
    """adamw, adafactor, or muon (the layers' matrices by Muon, embeddings, head, norms and biases by AdamW). One learning
    rate means about the same for all three."""
    learning_rate: float = 5e-4
    """Peak learning rate."""
    schedule: str = "constant"
    """constant, cosine or linear: the learning rate from the end of warm-up to --schedule.steps. The rate of an update
    depends on its number and on --schedule.steps alone, also after a resume with other steps."""
    warmup_steps: int = 5
    """Updates of linear warm-up; the last of them has the peak learning rate."""
    final_rate: float | None = None
    """cosine, linear: share of the peak that the last update has; None takes 0.1."""
    b1: float | None = None
    """adamw, muon: decay of AdamW's first moment; None takes 0.9."""
    b2: float | None = None
    """adamw, muon: decay of AdamW's second moment; None takes 0.99."""
    momentum: float | None = None
    """muon: decay of its momentum, None takes 0.95; adafactor: None keeps no momentum."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Global gradient norm above which the gradient is scaled down."""

    def optimizer(self, steps: int) -> Optimizer:
        """The optimizer object.

        Args:
          steps: optimizer steps of the whole run, where a schedule ends.

        Raises:
          ValueError: an unknown name, an option that the optimizer or schedule does not have, or a value out of range.
        """
        for option, choices in (("name", tuple(OPTIMIZERS)), ("schedule", SCHEDULES)):
            value = getattr(self, option)
            require(value in choices, f"--optimizer.{option}", f"one of {', '.join(choices)}", value)
        known = inspect.signature(OPTIMIZERS[self.name]).parameters
        given = {name: getattr(self, name) for name in ("b1", "b2", "momentum") if getattr(self, name) is not None}
        for name, value in given.items():
            expected = f"None for optimizer {self.name!r}, which has no such option"
            require(name in known, f"--optimizer.{name}", expected, value)
            require(0.0 <= value < 1.0, f"--optimizer.{name}", "a decay in [0, 1)", value)
        final = {} if self.final_rate is None else {"final_rate": self.final_rate}
        if final:
            expected = "None for schedule 'constant', which has no such option"
            require(self.schedule != "constant", "--optimizer.final-rate", expected, self.final_rate)
            require(0.0 <= self.final_rate <= 1.0, "--optimizer.final-rate", "a share in [0, 1]", self.final_rate)
        rate = learning_rate(self.schedule, self.learning_rate, warmup_steps=self.warmup_steps, steps=steps, **final)
        transformation = OPTIMIZERS[self.name](weight_decay=self.weight_decay, **given)
        return Optimizer(transformation, rate, self.max_grad_norm)


@dataclass(frozen=True)
class InvarianceConfig:
    """What determines the bits of a run with --invariant: leaves of rows and granules of the vocabulary, not the mesh."""

    leaf_rows: int = 8
    """Rows (documents) that are computed together; schedule.rows is a multiple."""
    granules: int | None = None
    """Parts of the vocabulary that no rank splits; a multiple of the tensor ranks. None takes 24, or 8 below 24 tokens."""
    vocab_tile: int = 512
    """Upper bound of the vocabulary columns of one product, a multiple of 64."""
    row_block: int = 128
    """Tokens of one product of the head, a multiple of 64."""

    def order(self, vocab_size: int, dtype: str) -> ReductionOrder:
        """The numeric identity of the head for a vocabulary of at least 8 tokens."""
        granules = self.granules or (24 if vocab_size >= 24 else 8)
        return ReductionOrder(granules, self.vocab_tile, self.row_block, dtype)


@dataclass(frozen=True)
class EvaluationConfig:
    """Exact match on held-out prompts, sampled at temperature 1 and decoded greedily."""

    every: int = 100
    """Optimizer steps between two evaluations; 0 evaluates only before and after."""
    num_prompts: int = 512
    """Held-out prompts."""
    kl: bool = False
    """Also the KL of the policy to the one that training began with, on the sampled completions: keeps a copy of the first
    parameters, as loss.kl-coefficient does."""


@dataclass(frozen=True)
class DriftConfig:
    """The report on how far apart sampler and trainer are, on the tokens that were sampled with the trainer's parameters."""

    every: int = 50
    """Optimizer steps between two reports, the first at step 1; 0 makes none. One costs a forward pass over the documents of
    a step, or nothing where rollout.rescore has made it. It waits for a step with such tokens."""


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved."""

    every: int = 200
    """Optimizer steps between two checkpoints; 0 saves only at the end."""
    keep: int = 2
    """Number of checkpoints kept on disk."""


@dataclass(frozen=True)
class Config:
    """A policy loss on a verifiable task, from a warm-started small decoder or from a model on disk."""

    preset: str | None = None
    """Defaults by name, instead of those shown here; every other option still counts. smollm2: SmolLM2-135M-Instruct (extra
    smollm2) on word problems. With --help its values are shown."""
    task: str = "addition"
    """addition, comparison, letter_counting, reversal, sorting or word_problems (with :SIZE), reasoning_gym:NAME, or
    jsonl:PATH."""
    seed: int = 0
    """Seed of parameters, data order and sampling."""
    out: str = "runs"
    """Folder that run folders are made in."""
    name: str | None = None
    """Name of the run folder; None composes one from task, loss, seed and time."""
    resume: str | None = None
    """Run folder to continue. Its own options apply; only --schedule.steps and --quiet may be given with it."""
    mesh: str = "data=1,tensor=1"
    """Device mesh: data ranks split the documents, tensor ranks the vocabulary."""
    invariant: bool = False
    """Bitwise equal on every mesh and for every micro-batch size, sampler and trainer included; several times slower."""
    quiet: bool = False
    """Print only warnings and the final scores."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    data: DataConfig = field(default_factory=DataConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    warm_start: WarmStartConfig = field(default_factory=WarmStartConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    loss: LossConfig = field(default_factory=LossConfig)
    invariance: InvarianceConfig = field(default_factory=InvarianceConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    drift: DriftConfig = field(default_factory=DriftConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)

    def resolved(self) -> "Config":
        """The same with every option that follows from others, or from the device, replaced by what it is."""
        rollout, completions = self.rollout, self.rollout.prompts_per_rollout * self.rollout.num_generations
        if rollout.rescore is None:
            docs = self.schedule.docs_per_step
            # The size of a step that counts micro-batches is not known, so that it may end within a rollout.
            rollout = dataclasses.replace(rollout, rescore=docs == 0 or docs % completions != 0)
        warm_start = self.warm_start
        if warm_start.max_steps is None:
            steps = WARM_START_STEPS if self.model.path is None else 0
            warm_start = dataclasses.replace(warm_start, max_steps=steps)
        model = self.model.resolved(self.invariant)
        return dataclasses.replace(self, model=model, rollout=rollout, warm_start=warm_start)


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
    "checkpoint.keep": 1,
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
