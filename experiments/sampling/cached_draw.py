"""The sampler of a plain run: one compiled program with a key-value cache, rows split over the data ranks."""

from dataclasses import replace

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from experiments.models.mesh import split_rows
from experiments.models.placement import whole_on_host
from experiments.sampling.policy import Sampler
from experiments.sampling.sample_token import DrawOptions
from experiments.sampling.sampler import SamplerOptions, Samples, bytes_beside_parameters, make_sampler
from experiments.tasks.tokenizer import Tokenizer


class DecoderSampler(Sampler):
    """A `Sampler` with one static shape per shape of prompts and number of copies."""

    def __init__(
        self, graph: nnx.GraphDef, mesh: Mesh, tokenizer: Tokenizer, max_new_tokens: int, options: DrawOptions
    ) -> None:
        self._graph, self._mesh = graph, mesh
        self._options = SamplerOptions(max_new_tokens, tokenizer.eos_ids, tokenizer.pad_id, options)

    def __call__(
        self, params: nnx.State, prompts: np.ndarray, lengths: np.ndarray, copies: int, key: jax.Array
    ) -> Samples:
        draw = make_sampler(self._graph, replace(self._options, copies=copies))
        drawn = whole_on_host(draw(params, *split_rows((prompts, lengths), self._mesh), key))
        return Samples(*(x[: len(prompts) * copies] for x in drawn))

    def memory(self, params: nnx.State, prompts: int, tokens: int, copies: int) -> int | None:
        given = np.zeros((prompts, tokens), np.int32), np.ones(prompts, np.int32)
        options = replace(self._options, copies=copies)
        return bytes_beside_parameters(self._graph, options, params, *split_rows(given, self._mesh))
