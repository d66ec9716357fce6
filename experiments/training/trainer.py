"""The trainer: set-up, supervised warm start, reinforcement learning, evaluation, checkpoints and resume."""

import time
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from experiments.config import Config, validate
from experiments.models.decoder import Decoder
from experiments.models.mesh import MeshSpec, make_mesh
from experiments.runs.checkpoint import Checkpoints, restore_template
from experiments.runs.console import RunConsole
from experiments.runs.folder import MetricsWriter
from experiments.sampling.invariant_sampler import InvariantSampler
from experiments.sampling.rollout import (
    PromptOrder,
    RolloutStreams,
    Sampler,
    Sizes,
    deal,
    documents_from,
    encode_prompt,
    held_out_examples,
    readable,
    sizes_for,
)
from experiments.tasks import Example, make_task
from experiments.tasks.tokenizer import tokenizer_for
from experiments.training.invariant_step import InvariantStep, LeafPrograms
from experiments.training.step import MicroSums, TrainState, TrainStep
from jaxlogp import (
    Document,
    DocumentSchedule,
    MicroBatch,
    ReductionOrder,
    pack_documents,
)
from jaxlogp.errors import require
from jaxlogp.head.projection import HeadOptions
from jaxlogp.head.registry import ENGINES

MAX_REFUSED_STEPS = 5
MAX_WARM_UP_STEPS = 50
CHECK_PROMPTS = 512
SHOWN_SAMPLES = 16


class Scores(NamedTuple):
    """Exact match on held-out prompts, in [0, 1]."""

    sampled: float
    greedy: float


@dataclass
class Progress:
    """Where a run stands; saved with every checkpoint as Python integers."""

    step: int = 0
    documents_seen: int = 0
    rollouts: int = 0
    refused: int = 0


class Trainer:
    """Everything a run needs, made from its options.

    Args:
      config: the options.

    Raises:
      ValueError: an option out of range, an unknown task, a mesh that does not fit.
    """

    def __init__(self, config: Config) -> None:
        spec = validate(config)
        self.config = config
        self.task = make_task(config.task, seed=config.seed)
        self.tokenizer = tokenizer_for(self.task)
        self.sizes: Sizes = sizes_for(self.task, config.rollout, config.schedule, share_rows=not config.invariant)
        self.mesh = make_mesh(spec)
        self._decoder = config.model.decoder(self.tokenizer.vocab_size)
        self._check_engine()
        # In the invariant mode the body is whole on every tensor rank, the embedding lookup included.
        model = Decoder(self._decoder, rngs=nnx.Rngs(config.seed), mesh=None if config.invariant else self.mesh)
        self.graph, params = nnx.split(model)
        self.key = jax.random.key(config.seed)
        self.order = self._reduction_order(spec) if config.invariant else None
        self._block = config.invariance.leaf_rows if config.invariant else 1
        self._programs: dict[float, LeafPrograms] = {}
        self.step_fn = self._make_step(_policy_optimizer(config))
        self.state = self.step_fn.init(params)
        self._sampler = self._make_sampler(config.rollout.temperature)
        self._judges = {"sampled": self._make_sampler(1.0), "greedy": self._make_sampler(1.0, greedy=True)}
        self._held_out = held_out_examples(self.task, config.evaluation.num_prompts)
        self.progress = Progress()
        self.prompts = PromptOrder(self.task, config.seed, config.schedule.epochs)
        schedule = config.schedule
        self.streams = RolloutStreams(
            self._rollout,
            spec.data,
            schedule.rows,
            self.sizes.row,
            self.tokenizer.pad_id,
            block=self._block,
            share_rows=not config.invariant,
        )
        self._schedule = DocumentSchedule(
            schedule.docs_per_step, schedule.micro_batches, schedule.max_empty_micro_batches
        )
        self._degenerate: list[float] = []

    def _check_engine(self) -> None:
        """Refuses an engine that was named and cannot run here, before anything is trained."""
        name, decoder = self.config.loss.engine, self._decoder
        why_not = getattr(ENGINES.get(name), "why_not", None)
        if why_not is not None:
            shapes = (8, decoder.hidden_size), (decoder.vocab_size, decoder.hidden_size)
            hidden, weight = (jax.ShapeDtypeStruct(shape, jnp.dtype(decoder.dtype)) for shape in shapes)
            options = HeadOptions(fp32_head=self.config.loss.fp32_head, vocab_size=decoder.vocab_size)
            reason = why_not(hidden, weight, None, options)
            require(reason is None, "--loss.engine", "an engine that can run here", f"{name}: {reason}")

    def _reduction_order(self, spec: MeshSpec) -> ReductionOrder:
        """The numeric identity of the head, the same on every process."""
        config = self.config
        dtype = "float32" if config.loss.fp32_head else config.model.resolved().dtype
        order = config.invariance.order(self.tokenizer.vocab_size, dtype)
        expected = f"tensor ranks that divide the {order.granules} granules of the vocabulary, with --invariant"
        require(order.granules % spec.tensor == 0, "--mesh", expected, spec.tensor)
        order.check_across_processes()
        return order

    def _leaf_programs(self, temperature: float) -> LeafPrograms:
        if temperature not in self._programs:
            options = {"temperature": temperature, "fp32_head": self.config.loss.fp32_head}
            self._programs[temperature] = LeafPrograms(self.graph, self._decoder, self.mesh, self.order, **options)
        return self._programs[temperature]

    def _make_step(self, optimizer: optax.GradientTransformation, *, supervised: bool = False) -> TrainStep:
        temperature = 1.0 if supervised else self.config.rollout.temperature
        loss = self.config.loss
        if self.order is None:
            return TrainStep(self.graph, self.mesh, loss, optimizer, temperature=temperature, supervised=supervised)
        programs = self._leaf_programs(temperature)
        return InvariantStep(programs, loss, optimizer, leaf_rows=self._block, supervised=supervised)

    def _make_sampler(self, temperature: float, *, greedy: bool = False) -> Sampler | InvariantSampler:
        text = (self.task, self.tokenizer, self.sizes)
        options = {"temperature": temperature, "greedy": greedy}
        if self.order is None:
            return Sampler(self.graph, *text, self.mesh, **options, fp32_head=self.config.loss.fp32_head)
        return InvariantSampler(self._leaf_programs(temperature), *text, leaf_rows=self._block, **options)

    # Warm start

    def warm_start(self, console: RunConsole, metrics: MetricsWriter) -> None:
        """Supervised learning of answers until sampled exact match reaches the target, or max_steps."""
        options = self.config.warm_start
        if options.max_steps == 0:
            return
        warm_up = max(1, min(MAX_WARM_UP_STEPS, options.max_steps // 4))
        schedule = optax.linear_schedule(0.0, options.learning_rate, warm_up)
        optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.99, weight_decay=0.0))
        step_fn = self._make_step(optimizer, supervised=True)
        state = step_fn.init(self.state.params)
        order = PromptOrder(self.task, self.config.seed + 1, None)
        checks = PromptOrder(self.task, self.config.seed + 2, None).take(CHECK_PROMPTS)
        with console.progress("warm start", options.max_steps) as advance:
            for step in range(1, options.max_steps + 1):
                total = self._supervised_sums(step_fn, state, order.take(options.batch_size))
                applied = step_fn.apply(state, total)
                state = applied.state
                values = {"loss": float(applied.loss), "grad_norm": float(applied.grad_norm)}
                if not bool(applied.finite):
                    raise RuntimeError(f"warm start step {step}: loss {values['loss']} is not finite")
                if step % options.check_every == 0:
                    values["exact_match_train"] = self._score("sampled", state.params, checks, step)
                metrics.write(step, "warm_start", values)
                advance(f"loss {values['loss']:.3f}")
                if values.get("exact_match_train", -1.0) >= options.target:
                    break
        console.say(f"warm start: {step} steps, loss {values['loss']:.3f}")
        self.state = self.step_fn.init(state.params)

    def _supervised_sums(self, step_fn: TrainStep, state: TrainState, examples: list[Example]) -> MicroSums:
        ranks = deal([self._supervised_document(example) for example in examples], self.mesh.shape["data"], self._block)
        rounds = []
        while any(ranks):
            packed = [self._pack(documents) for documents in ranks]
            ranks = [list(rest) for _, rest in packed]
            rounds.append(tuple(micro_batch for micro_batch, _ in packed))
        total = step_fn.sums_of(state.params, rounds, 0)
        assert total is not None, "a warm start step has at least one document"
        return total

    def _pack(self, documents: tuple[Document, ...]) -> tuple[MicroBatch, tuple[Document, ...]]:
        return pack_documents(
            documents,
            rows=self.config.schedule.rows,
            row_length=self.sizes.row,
            pad_id=self.tokenizer.pad_id,
            share_rows=not self.config.invariant,
        )

    def _supervised_document(self, example: Example) -> Document:
        prompt = encode_prompt(self.tokenizer, example, self.sizes)
        answer = [*self.tokenizer.encode(example.answer), self.tokenizer.eos_id]
        tokens = np.array(prompt + answer, np.int32)
        return Document(tokens, len(prompt), np.zeros(len(answer), np.float32), advantage=0.0)

    # Reinforcement learning

    def _rollout(self) -> list[Document]:
        options = self.config.rollout
        examples = self.prompts.take(options.prompts_per_rollout)
        if not examples:
            return []
        # The sampler's shape is static: a short last rollout is filled up and the filling thrown away.
        wanted = len(examples) * options.num_generations
        filled = [examples[i % len(examples)] for i in range(options.prompts_per_rollout)]
        repeated = [example for example in filled for _ in range(options.num_generations)]
        key = jax.random.fold_in(jax.random.fold_in(self.key, 1), self.progress.rollouts)
        self.progress.rollouts += 1
        drawn = self._sampler.complete(self.state.params, repeated, key)
        kept = type(drawn)(*(column[:wanted] for column in drawn))
        version = self.progress.documents_seen
        documents, degenerate = documents_from(kept, options.num_generations, self.config.loss.scale_rewards, version)
        self._degenerate.append(degenerate)
        return documents

    def train_step(self) -> tuple[dict[str, Any] | None, bool]:
        """One optimizer step.

        Returns:
          Its metrics (None when the data had ended before it), and whether the data has ended.

        Raises:
          RuntimeError: the fifth step in a row whose loss or gradient is not finite.
        """
        started = time.perf_counter()
        self.streams.seconds = 0.0
        self._degenerate = []
        collected = self._schedule.collect(self.streams.streams(), padding=self.streams.padding())
        if not collected.micro_batches:
            return None, True
        tokens = sum(int(np.sum(rank.segment_ids >= 0)) for ranks in collected.micro_batches for rank in ranks)
        total = self.step_fn.sums_of(self.state.params, collected.micro_batches, self.progress.documents_seen)
        applied = self.step_fn.apply(self.state, total)
        self.state = applied.state
        self.progress.step += 1
        self.progress.documents_seen += collected.num_documents
        values = {name: np.asarray(value).item() for name, value in applied.metrics.items()}
        values |= {
            "loss": float(applied.loss),
            "grad_norm": float(applied.grad_norm),
            "drift_max": float(applied.drift),
            "update_applied": int(applied.finite),
            "documents_seen": self.progress.documents_seen,
            "num_documents": collected.num_documents,
            "micro_batches": len(collected.micro_batches),
            "tokens": tokens,
            "data_wait_seconds": collected.data_wait_seconds,
            "rollout_seconds": self.streams.seconds,
            "step_seconds": time.perf_counter() - started,
            "learning_rate": float(_learning_rate(self.config)(self.progress.step - 1)),
        }
        if self._degenerate:
            values["degenerate_groups"] = float(np.mean(self._degenerate))
        values["tokens_per_second"] = tokens / values["step_seconds"]
        head_run = self.step_fn.head_run
        assert head_run is not None, "a micro-batch has been traced"
        values |= {"head_path": head_run.path, "head_engine": head_run.engine, "head_reason": head_run.reason}
        self._count_refused(bool(applied.finite))
        return values, collected.exhausted

    def _count_refused(self, finite: bool) -> None:
        self.progress.refused = 0 if finite else self.progress.refused + 1
        if self.progress.refused >= MAX_REFUSED_STEPS:
            raise RuntimeError(
                f"step {self.progress.step}: loss or gradient was not finite in {MAX_REFUSED_STEPS} steps in a row"
            )

    # Evaluation

    def _score(self, judge: str, params: nnx.State, examples: list[Example], salt: int) -> float:
        key = jax.random.fold_in(jax.random.fold_in(self.key, 2), salt)
        return float(self._judges[judge].complete(params, examples, key).rewards.mean())

    def evaluate(self, metrics: MetricsWriter | None = None) -> Scores:
        """Exact match on the held-out prompts with the current parameters; the same random numbers every time."""
        key = jax.random.fold_in(self.key, 3)
        drawn = {name: judge.complete(self.state.params, self._held_out, key) for name, judge in self._judges.items()}
        scores = Scores(*(float(drawn[name].rewards.mean()) for name in Scores._fields))
        if metrics is not None:
            values = {f"exact_match_{name}": score for name, score in scores._asdict().items()}
            metrics.write(self.progress.step, "eval", values)
            shown = readable(self._held_out, drawn["sampled"])[:SHOWN_SAMPLES]
            metrics.write_samples(self.progress.step, "held_out", shown)
        return scores

    # Checkpoints

    def _arrays(self) -> dict[str, Any]:
        return {"params": nnx.to_pure_dict(self.state.params), "opt_state": self._opt_leaves()}

    def _opt_leaves(self) -> dict[str, jax.Array]:
        return {f"{index:04d}": leaf for index, leaf in enumerate(jax.tree.leaves(self.state.opt_state))}

    def save(self, checkpoints: Checkpoints, before: Scores) -> None:
        """Saves parameters, optimizer state, counters, prompt order and queued documents."""
        extra = {
            "progress": dict(vars(self.progress)),
            "cursor": self.prompts.cursor,
            "queued": self.streams.queued(),
            "before": before._asdict(),
            "key": np.asarray(jax.random.key_data(self.key)).tolist(),
        }
        checkpoints.save(self.progress.step, self._arrays(), extra)

    def restore(self, checkpoints: Checkpoints, console: RunConsole) -> Scores:
        """Takes over the newest good checkpoint, on this mesh; returns the scores from before training."""
        restored = checkpoints.restore(restore_template(self._arrays(), self.mesh))
        for warning in restored.warnings:
            console.warn(warning)
        params = jax.tree.unflatten(jax.tree.structure(self.state.params), jax.tree.leaves(restored.arrays["params"]))
        leaves = restored.arrays["opt_state"]
        opt_state = jax.tree.unflatten(
            jax.tree.structure(self.state.opt_state), [leaves[name] for name in sorted(leaves)]
        )
        self.state = self.step_fn.place(TrainState(params, opt_state))
        extra = restored.extra
        self.progress = Progress(**extra["progress"])
        self.prompts.cursor = extra["cursor"]
        self.streams.restore(extra["queued"])
        self.key = jax.random.wrap_key_data(np.array(extra["key"], np.uint32))
        return Scores(**extra["before"])


def _learning_rate(config: Config) -> optax.Schedule:
    peak, steps = config.optimizer.learning_rate, max(config.optimizer.warmup_steps, 1)
    return optax.linear_schedule(peak / steps, peak, max(steps - 1, 1))


def _policy_optimizer(config: Config) -> optax.GradientTransformation:
    options = config.optimizer
    adamw = optax.adamw(_learning_rate(config), b1=options.b1, b2=options.b2, weight_decay=options.weight_decay)
    return optax.chain(optax.clip_by_global_norm(options.max_grad_norm), adamw)
