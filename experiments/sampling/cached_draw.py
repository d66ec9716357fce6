"""The draw of a plain run: one compiled program with a key-value cache, rows split over the data ranks."""

import functools

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from experiments.models.mesh import DATA_AXIS
from experiments.sampling.prompts import Sizes
from experiments.sampling.sampler import Samples, make_sampler
from experiments.tasks.tokenizer import Tokenizer


class CachedDraw:
    """A `Draw` with one static shape per number of prompts and copies.

    Args:
      graph: graph definition of the decoder.
      mesh: prompts are split over its data axis where it divides them.
      tokenizer: end and padding token.
      sizes: bound of completions.
      temperature: divisor of the logits.
      greedy: take the most likely token instead of drawing.
    """

    def __init__(
        self,
        graph: nnx.GraphDef,
        mesh: Mesh,
        tokenizer: Tokenizer,
        sizes: Sizes,
        *,
        temperature: float,
        greedy: bool,
    ) -> None:
        self._mesh = mesh
        self._sampler = functools.partial(
            make_sampler,
            graph,
            max_new_tokens=sizes.completion,
            temperature=temperature,
            greedy=greedy,
            eos_ids=tokenizer.eos_ids,
            pad_id=tokenizer.pad_id,
        )

    def __call__(
        self, params: nnx.State, prompts: np.ndarray, lengths: np.ndarray, copies: int, key: jax.Array
    ) -> Samples:
        """See `Draw`."""
        spec = P(DATA_AXIS) if len(prompts) % self._mesh.shape[DATA_AXIS] == 0 else P()
        placed = jax.device_put((prompts, lengths), NamedSharding(self._mesh, spec))
        return jax.device_get(self._sampler(copies=copies)(params, *placed, key))
