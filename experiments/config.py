"""Every option of a run as nested frozen dataclasses; ``python -m experiments.grpo --help`` prints these lines."""

import dataclasses
import inspect
import math
from dataclasses import dataclass, field

import jax

from experiments.models.attention import IMPLEMENTATIONS
from experiments.models.decoder_config import DecoderConfig
from experiments.models.lora import ADAPTABLE, LoraConfig
from experiments.models.mesh import MeshSpec, parse_mesh
from experiments.models.remat import POLICIES
from jaxlogp import ReductionOrder
from jaxlogp.errors import require
from jaxlogp.losses import PRESETS, PolicyLoss


@dataclass(frozen=True)
class ModelConfig:
    """The decoder; see experiments/models/decoder_config.py."""

    path: str | None = None
    """Model to begin with: a Hugging Face directory or a GGUF file. It brings its tokenizer and all sizes and options of
    the model but the dtypes and fp32_head, and there is no warm start."""
    own: str | None = None
    """Class of a model given to train(), which writes its name here."""
    chat_template: bool = True
    """Put prompts through the chat template of the model at path; otherwise they are plain text after its start token."""
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
    """Multiply hidden states and head in fp32 whatever their dtypes, in the trainer and in the sampler."""
    rope_theta: float = 10_000.0
    """Base of the rotary frequencies."""
    dtype: str = "auto"
    """Dtype of activations and head: float32, bfloat16, or auto: bfloat16 on a GPU unless --invariant, else float32."""
    param_dtype: str = "float32"
    """Dtype of the stored parameters: float32 or bfloat16."""
    attention: str = "auto"
    """Attention over packed rows: auto, einsum, chunked, hopper, tokamax or cudnn. With --invariant it is the einsum."""
    remat: str = "auto"
    """What layers keep for the backward pass: none (what the compiler wants), products, attention (the results of attention
    and the layers' inputs), full (the inputs alone), or auto, none on a CPU, else attention."""

    def decoder(self, vocab_size: int, invariant: bool = False) -> DecoderConfig:
        """The configuration of a model from nothing for a vocabulary of ``vocab_size`` tokens."""
        options = vars(self.resolved(invariant))
        return DecoderConfig(vocab_size=vocab_size, **{name: options[name] for name in options if name not in _ON_DISK})

    def of_pretrained(self, config: DecoderConfig, invariant: bool = False) -> DecoderConfig:
        """The configuration of a model from disk, computed as is said here.

        Raises:
          ValueError: an option that the model on disk has decided.
        """
        for each in dataclasses.fields(self):
            value = getattr(self, each.name)
            mine = each.name in (*_ON_DISK, *_OF_ANY_MODEL) or value == each.default
            require(
                mine, f"--model.{_dashed(each.name)}", "no value together with --model.path, which decides it", value
            )
        options = vars(self.resolved(invariant))
        return dataclasses.replace(config, **{name: options[name] for name in _OF_ANY_MODEL})

    def resolved(self, invariant: bool = False) -> "ModelConfig":
        """The same with "auto" replaced by what it means here: on a GPU the dtype that the kernels of the head multiply.

        Invariant runs have their own kernels, were tested in fp32, and use einsum attention, whose order is known.
        """
        narrow = jax.default_backend() == "gpu" and not invariant
        dtype = ("bfloat16" if narrow else "float32") if self.dtype == "auto" else self.dtype
        attention = "einsum" if invariant and self.attention == "auto" else self.attention
        spacious = jax.default_backend() == "cpu" or invariant
        remat = ("none" if spacious else "attention") if self.remat == "auto" else self.remat
        return dataclasses.replace(self, dtype=dtype, attention=attention, remat=remat)


_ON_DISK = ("path", "own", "chat_template")
_OF_ANY_MODEL = ("fp32_head", "dtype", "param_dtype", "attention", "remat")


@dataclass(frozen=True)
class DataConfig:
    """How examples are put to the model. Keys, patterns and verifier belong to task jsonl:PATH alone."""

    prompt_key: str | None = None
    """Key of the prompt, a text or a list of messages with role and content; None takes prompt, question or messages."""
    answer_key: str = "answer"
    """Key of the answer."""
    answer_pattern: str | None = None
    """Regular expression with one group, found once in every answer: the group is what counts. For GSM8K '#### (.+)'."""
    other_keys: bool = False
    """Lines may have further keys, which become the example's source; else they are refused."""
    verifier: str = "exact"
    """exact (equal up to white space), or numeric (the only number of both, as exact rationals)."""
    tolerance: float = 0.0
    """Largest difference of numbers that the numeric verifier takes for equal."""
    percent: str = "unit"
    """Numeric verifier, what 50% is: unit (50) or fraction (1/2)."""
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


@dataclass(frozen=True)
class WarmStartConfig:
    """The short supervised phase of a model from nothing. It ends at the target, or after max_steps."""

    max_steps: int = 400
    """Maximum number of optimizer steps; 0 skips the phase."""
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
    max_prompt_tokens: int | None = None
    """Longest prompt in tokens, special tokens included; None takes the task's own bound."""
    max_new_tokens: int | None = None
    """Longest completion in tokens, end token included; None takes the task's own bound."""
    mask_truncated: bool = False
    """Take completions without an end token out of the loss: no token of theirs is a label, while their rewards stay in the
    mean and deviation of their group. A divisor that counts labels loses theirs; one that counts documents keeps them."""
    rescore: bool = False
    """Take old log-probs from the trainer's own forward pass instead of the sampler's. Its log-sum-exp then saves
    a strictly on-policy step the forward pass of the head."""


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
        try:
            loss = preset(**given)
            if self.reduction is not None:
                length = length if self.reduction == "constant_length" else None
                loss = dataclasses.replace(loss, reduction=self.reduction, length=length)
        except ValueError as error:
            argument, _, rest = str(error).partition(":")
            raise ValueError(f"--loss.{_dashed(argument)}:{rest}") from None
        return loss


_SHARED_LOSS_OPTIONS = ("kl_coefficient", "kl_estimator", "entropy_coefficient", "grad_divisor")
_LOSS_OPTIONS = ("epsilon", "epsilon_high", "delta", "max_weight", "weighting", "length", *_SHARED_LOSS_OPTIONS)


def _dashed(name: str) -> str:
    return name.replace("_", "-")


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW for the reinforcement learning phase."""

    learning_rate: float = 5e-4
    """Peak learning rate."""
    warmup_steps: int = 5
    """Optimizer steps of linear warm-up."""
    b1: float = 0.9
    """Decay of the first moment."""
    b2: float = 0.99
    """Decay of the second moment."""
    weight_decay: float = 0.0
    """Decoupled weight decay."""
    max_grad_norm: float = 1.0
    """Global gradient norm above which the gradient is scaled down."""


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


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved."""

    every: int = 200
    """Optimizer steps between two checkpoints; 0 saves only at the end."""
    keep: int = 2
    """Number of checkpoints kept on disk."""


@dataclass(frozen=True)
class Config:
    """A policy loss on a verifiable task, from a warm-started small decoder."""

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
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)


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
    "model.attention": ("auto", *IMPLEMENTATIONS),
    "model.remat": ("auto", *POLICIES),
}
