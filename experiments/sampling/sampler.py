"""Samplers: weights and prompts in, completions and their log-probs out.

A sampler is made once and called with new parameters every step; nothing is traced again as long as shapes stay the same:

    model = SampledModel(graph, mesh)
    sampler = DecoderSampler(model, CompletionRule(SamplingOptions(8, temperature=1.0), eos_ids=(1,), pad_id=0))
    for step in range(steps):
        samples = sampler(params, prompts, lengths, copies, jax.random.fold_in(key, step))
        params = train(params, samples)

Shapes: B rows, P slots of a prompt, N new tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from experiments.models.placement import bytes_a_device, placed
from experiments.sampling.support import RecordedSupport


class Samples(NamedTuple):
    """Completions, right-padded.

    Attributes:
        tokens: int32; `pad_id` after the end of a completion.
        log_probs: fp32, nats, each token given the prompt and the tokens before it under softmax(logits / temperature) over
            the whole vocabulary, or over `support`, which a trainer recomputes; 0.0 after the end.
        lengths: int32, in [1, N], tokens of each completion, including its end token.
        support: what each token was drawn from, where that is recorded.
    """

    tokens: Int[Array | np.ndarray, "B N"]
    log_probs: Float[Array | np.ndarray, "B N"]
    lengths: Int[Array | np.ndarray, " B"]
    support: RecordedSupport | None = None


class Sampler(Protocol):
    """Draws completions; for `--invariant`, `experiments.invariant.leaf_sampler` has one of its own."""

    def __call__(
        self, params: nnx.State, prompts: np.ndarray, lengths: np.ndarray, copies: int, key: jax.Array
    ) -> Samples:
        """Draws `copies` completions of every prompt, in adjacent rows, as NumPy arrays.

        A row's draws depend only on the key, its number and its own prompt, up to the rounding of products, which may
        depend on the batch size. Prompts are int32 [B, P], right-padded with any id, and `lengths` int32 [B], in [1, P].
        `params` are the trained parameters.
        """

    def lower(self, params: nnx.State, prompts: int, tokens: int, copies: int) -> Callable[[], int | None]:
        """Lowers the first of its programs for [`prompts`, `tokens`]; of `params` shapes, dtypes and places are enough.

        What is returned compiles these programs before their first call, and returns the most bytes that they take per
        device beside the parameters; None if the compiler does not say.
        """


@dataclass(frozen=True)
class SampledModel:
    """A model on the mesh where completions are drawn, over whose data ranks rows are split.

    `frozen` is what is not trained. Trained parameters are copied to `places` for every draw; None if they are there.
    """

    graph: nnx.GraphDef
    mesh: Mesh
    frozen: nnx.State = field(default_factory=lambda: nnx.State({}))
    places: nnx.State | None = None

    def state(self, params: nnx.State) -> nnx.State:
        return nnx.merge_state(params if self.places is None else placed(params, self.places), self.frozen)

    def shapes(self, params: nnx.State) -> tuple[nnx.State, int]:
        """Returns shapes, dtypes and places of `state`, and the bytes per device that its copies take."""
        if self.places is None:
            return nnx.merge_state(params, self.frozen), 0

        def copy(leaf: jax.Array, place: jax.sharding.Sharding) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)

        copies = jax.tree.map(copy, params, self.places)
        return nnx.merge_state(copies, self.frozen), bytes_a_device(copies)
