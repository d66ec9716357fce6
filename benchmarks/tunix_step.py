"""Loss and gradient of Tunix's GRPO on its Qwen3, with its own log-probs and with those of jaxlogp: time and memory.

    python -m benchmarks.tunix_step                                   # Qwen3-0.6B, 8 rows of 256 + 768 tokens
    python -m benchmarks.tunix_step --model qwen3_1p7b --rows 4 --completion 2048

Weights are random, in the model's own dtype. Memory is what XLA says of the compiled program (temporaries, without
parameters). Times are medians of calls in turns. In "one call", which is `policy_loss_fn(losses.grpo_paper())`, head, loss
and gradient are one call of the library.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.clock import time_in_turns
from experiments.command_line import run_command
from jaxlogp import losses


@dataclasses.dataclass(frozen=True)
class TunixStepConfig:
    """Options of the benchmark."""

    model: str = "qwen3_0p6b"
    """Constructor of tunix.models.qwen3.model.ModelConfig."""
    layers: int | None = None
    """Layers instead of the model's."""
    vocab: int | None = None
    """Vocabulary instead of the model's."""
    dtype: str = "bfloat16"
    """Dtype of parameters and activations."""
    remat: str = "BLOCK"
    """Tunix's remat_config: NONE, BLOCK or DECODER."""
    rows: int = 8
    """Rows of a micro-batch."""
    prompt: int = 256
    """Tokens of a prompt."""
    completion: int = 768
    """Tokens of a completion."""
    engine: str = "auto"
    """Engine of jaxlogp's head."""
    turns: int = 5
    """Timed turns; the median counts."""


@dataclasses.dataclass
class Measured:
    """One program: mebibytes of temporaries, seconds of a call, loss, and engine of the head."""

    temporaries: float
    seconds: float
    loss: float
    engine: str


def make_model(config: TunixStepConfig) -> tuple[Any, int]:
    """Returns Tunix's Qwen3 with random weights, and the size of its vocabulary."""
    from flax import nnx
    from tunix.models.qwen3 import model

    sizes = getattr(model.ModelConfig, config.model)()
    changes = {"dtype": jnp.dtype(config.dtype), "param_dtype": jnp.dtype(config.dtype)}
    changes["remat_config"] = model.RematConfig[config.remat]
    changes |= {} if config.layers is None else {"num_layers": config.layers}
    changes |= {} if config.vocab is None else {"vocab_size": config.vocab}
    sizes = dataclasses.replace(sizes, **changes)
    return nnx.jit(lambda: model.Qwen3(sizes, rngs=nnx.Rngs(0)))(), sizes.vocab_size


def make_example(config: TunixStepConfig, vocab: int) -> Any:
    """Returns a `TrainExample` whose completions have between half and all of their tokens."""
    from tunix.rl import common

    rng = np.random.default_rng(0)
    shape = config.rows, config.completion
    mask = (
        np.arange(config.completion) < rng.integers(config.completion // 2, config.completion + 1, config.rows)[:, None]
    )
    prompt = rng.integers(3, vocab, (config.rows, config.prompt)).astype(np.int32)
    near = np.float32(-np.log(vocab))
    return common.TrainExample(
        prompt_ids=jnp.asarray(prompt),
        prompt_mask=jnp.asarray(prompt != 0),
        completion_ids=jnp.asarray(np.where(mask, rng.integers(3, vocab, shape), 0).astype(np.int32)),
        completion_mask=jnp.asarray(mask.astype(np.int32)),
        advantages=jnp.asarray(rng.normal(size=config.rows).astype(np.float32)),
        ref_per_token_logps=jnp.asarray(near + 0.1 * rng.normal(size=shape).astype(np.float32)),
        old_per_token_logps=jnp.asarray(near + 0.1 * rng.normal(size=shape).astype(np.float32)),
    )


def loss_program(loss: Callable[..., Any], model: Any, example: Any) -> Any:
    """Returns the compiled loss and gradient of parameters, as a function of (model, example)."""
    from flax import nnx
    from tunix.rl.grpo.grpo_learner import GRPOConfig

    algorithm = GRPOConfig(beta=0.04)
    algorithm.temperature = 1.0

    def scalar(model: Any, example: Any) -> tuple[jax.Array, Any]:
        out = loss(model, example, algo_config=algorithm, pad_id=0, eos_id=1)
        return (out.primary_loss.compute(), out.aux_metrics) if hasattr(out, "primary_loss") else out

    step = nnx.jit(lambda model, example: nnx.value_and_grad(scalar, has_aux=True)(model, example))
    return step.lower(model, example).compile()


def measure(config: TunixStepConfig) -> dict[str, Measured]:
    """Returns what each program takes, by name."""
    from tunix.rl import algo_core

    from jaxlogp.integrations import tunix as jaxlogp_tunix

    model, vocab = make_model(config)
    example = make_example(config, vocab)
    one_call = jaxlogp_tunix.policy_loss_fn(losses.grpo_paper(), engine=config.engine)
    programs = {
        "Tunix": (contextlib.nullcontext(), algo_core.grpo_loss_fn),
        "jaxlogp": (jaxlogp_tunix.installed(engine=config.engine), algo_core.grpo_loss_fn),
        "jaxlogp, one call": (jaxlogp_tunix.installed(engine=config.engine), one_call),
    }
    compiled, engines = {}, {}
    for name, (context, loss) in programs.items():
        with context:
            compiled[name] = loss_program(loss, model, example)
            engines[name] = ", ".join(sorted({call[1] for call in jaxlogp_tunix.report().calls})) or "stored logits"
    calls = {name: (lambda program=program: program(model, example), settled) for name, program in compiled.items()}
    timings, failed = time_in_turns(calls, config.turns)
    results = {}
    for name, program in compiled.items():
        memory = program.compiled.memory_analysis().temp_size_in_bytes / 2**20
        if name in failed:
            print(f"{name}: {failed[name]}")
            results[name] = Measured(memory, float("nan"), float("nan"), engines[name])
            continue
        (loss, _), _ = program(model, example)
        results[name] = Measured(memory, timings[name].seconds, float(loss), engines[name])
    return results


def settled(out: Any) -> None:
    """Waits for the gradient, which comes last."""
    jax.block_until_ready(jax.tree.leaves(out[1]))


def main(config: TunixStepConfig) -> None:
    """Measures and prints the table."""
    import importlib.metadata

    device = jax.devices()[0].device_kind
    print(f"google-tunix {importlib.metadata.version('google-tunix')}, JAX {jax.__version__}, {device}; {config}")
    results = measure(config)
    stock = results["Tunix"]
    for name, seen in results.items():
        print(
            f"{name:18s} {seen.temporaries:9.1f} MiB ({seen.temporaries / stock.temporaries:.3f} x) "
            f"{1e3 * seen.seconds:8.1f} ms ({seen.seconds / stock.seconds:.3f} x), loss {seen.loss:.6f}, {seen.engine}"
        )


if __name__ == "__main__":
    run_command(TunixStepConfig, main, program="benchmarks.tunix_step", description=__doc__)
