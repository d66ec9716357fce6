"""The head's part of a train step, called as the trainer calls it, against one cuBLAS product of the same run.

    python -m benchmarks.hopper.train_head [H,V ...] [--engine=hopper] [--tokens=8192]

The loss runs in ``jax.shard_map`` over a 1 x 1 mesh ("data", "tensor"), is psum'ed over "data" there, and is
differentiated outside it with respect to hidden states and weight. Goal at Qwen3-0.6B's head (1024,151936): 3.4 x; in
two steps it is about 4.2 x.

"every slot" has a label on every token. "packed" has four rows of documents, a quarter of each a prompt without labels;
its product is still that of all tokens. "4 micro-batches" are four calls with a quarter of the tokens each, whose
gradients are added in fp32. A program's line says how often the compiled module multiplies the weight's gradient by the
cotangent of the loss, which is 1 (never, if the compiler removes it), and its collectives.
"""

import functools
import sys
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from jax.stages import Compiled

from benchmarks.beside_product import TOKENS, Timed, cases, compile_or_say, memory_note, print_times, say
from benchmarks.cases import ENTROPY_BONUS, Case
from benchmarks.module_text import collectives, multiplications
from jaxlogp import linear_log_probs, linear_policy_loss, policy_loss
from jaxlogp.head import record_head_runs
from jaxlogp.losses import grpo

ROWS, DOCUMENT, PROMPT = 4, 512, 128
QWEN3_0_6B = ("1024,151936",)


def in_two_steps(hidden, weight, targets, old, advantages, mask, *, loss, **head):
    """(WeightedSum, values), through log-probs that are differentiated themselves."""
    wants_entropy = loss.entropy_coefficient != 0.0
    values = linear_log_probs(hidden, weight, targets, mask=mask, with_entropy=wants_entropy, **head)
    return policy_loss(values.log_probs, old, advantages, mask, loss=loss, entropy=values.entropy), values


def head_loss(program: Callable, engine: str, bonus: float = 0.0, sizes: tuple[int, int] = (1, 1)) -> Callable:
    """(loss sum, log-probs) of global operands, over a mesh of these sizes."""
    devices = jax.devices()[: sizes[0] * sizes[1]]
    mesh = jax.make_mesh(sizes, ("data", "tensor"), axis_types=(AxisType.Auto,) * 2, devices=devices)
    options = {"loss": grpo(entropy_coefficient=bonus), "axis_name": "tensor", "engine": engine}

    def local(hidden, weight, *per_token):
        loss, values = program(hidden, weight, *per_token, **options)
        return loss.psum("data").sum, values.log_probs

    rows = P("data")
    return jax.shard_map(local, mesh=mesh, in_specs=(rows, P("tensor"), *[rows] * 4), out_specs=(P(), rows))


def head_step(loss: Callable) -> Callable:
    """((loss sum, log-probs), (dH, dW)) of the operands of a :func:`head_loss`."""

    def step(hidden, weight, *per_token):
        return jax.value_and_grad(lambda h, w: loss(h, w, *per_token), (0, 1), has_aux=True)(hidden, weight)

    return step


def in_micro_batches(step: Callable) -> Callable:
    """The same with ROWS successive calls, gradients of the weight added in fp32."""

    def run(hidden, weight, *per_token):
        def add(total, row):
            hidden, *per_token = (x[None] for x in row)
            (loss, log_probs), (d_hidden, d_weight) = step(hidden, weight, *per_token)
            return total + d_weight.astype(jnp.float32), (loss, log_probs, d_hidden)

        return jax.lax.scan(add, jnp.zeros(weight.shape, jnp.float32), (hidden, *per_token))

    return run


def operands(case: Case, packed: bool) -> tuple[jax.Array, ...]:
    """hidden, weight, targets, old log-probs, advantages and mask; tokens in one row, or in ROWS of packed documents."""
    tokens = case.hidden.shape[0]
    shape = (ROWS, tokens // ROWS) if packed else (1, tokens)
    noise = 0.1 * jax.random.normal(jax.random.key(1), (tokens,))
    old = linear_log_probs(case.hidden, case.weight, case.targets).log_probs + noise
    place = jnp.arange(tokens, dtype=jnp.int32)
    mask = place % DOCUMENT >= PROMPT if packed else place >= 0
    hidden = case.hidden.reshape(*shape, -1)
    return hidden, case.weight, *(x.reshape(shape) for x in (case.targets, old, case.g_log_probs, mask))


def said_of(program: Compiled, weight: jax.Array) -> str:
    """Memory, collectives, and multiplications by the cotangent."""
    text = program.as_text()
    return f"{memory_note(program)}; {multiplications(text, weight.shape)} multiplications of dW; {collectives(text)}"


def programs(case: Case, engine: str) -> dict[str, tuple[Callable, tuple[jax.Array, ...]]]:
    """(step, operands) by name."""
    every, packed = operands(case, packed=False), operands(case, packed=True)
    rows = every[0].reshape(ROWS, -1, every[0].shape[-1]), every[1], *(x.reshape(ROWS, -1) for x in every[2:])
    one, two = (head_step(head_loss(program, engine)) for program in (linear_policy_loss, in_two_steps))
    bonus = head_step(head_loss(linear_policy_loss, engine, ENTROPY_BONUS))
    return {
        "two steps, every slot": (two, every),
        "one pass, every slot": (one, every),
        "bonus, every slot": (bonus, every),
        "two steps, packed": (two, packed),
        "one pass, packed": (one, packed),
        "one pass, 4 micro-batches": (in_micro_batches(one), rows),
    }


def main() -> None:
    named = dict(word[2:].split("=") for word in sys.argv[1:] if word.startswith("--"))
    shapes = [word for word in sys.argv[1:] if "," in word] or QWEN3_0_6B
    for case in cases(shapes, int(named.get("tokens", TOKENS))):
        steps = programs(case, named.get("engine", "hopper"))
        with record_head_runs() as runs:
            found = compile_or_say(steps)
        say(f"  paths: {', '.join(sorted({f'{run.path} by {run.engine} {run.gradient}' for run in runs}))}")
        calls = {
            name: Timed(functools.partial(one, *steps[name][1]), said_of(one, case.weight))
            for name, one in found.items()
        }
        print_times(case, calls, turns=4)


if __name__ == "__main__":
    main()
