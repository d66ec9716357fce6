"""A model that is little more than a head of many rows, and gradient sums for it on any mesh."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from experiments.learner.gradients import GspmdGradients
from experiments.learner.objectives import CrossEntropy
from experiments.learner.packing import Packing
from experiments.models.layers import named_axes
from experiments.models.mesh import make_mesh, parse_mesh
from experiments.models.sharding import place_parameters
from jaxlogp import Document
from jaxlogp.head import HeadSpec

# On four ranks a table of 480 rows each, where the head wants 512, 512, 512 and 384.
VOCAB, HIDDEN = 1920, 28


class Waves(nnx.Module):
    """Hidden states that are functions of the token alone, and a head."""

    def __init__(self) -> None:
        weight = jax.random.normal(jax.random.key(0), (VOCAB, HIDDEN))
        self.weight = nnx.Param(weight, **named_axes("vocab", "embed"))
        self.phase = nnx.Param(jnp.linspace(0.0, 3.0, HIDDEN))

    def hidden_states(self, tokens, positions, segment_ids):
        return jnp.sin(tokens[..., None].astype(jnp.float32) / 7.0 + self.phase[...])

    def head(self):
        return HeadSpec(), self.weight[...]


def batch(ranks):
    """Four rows, whatever the number of ranks; labels on both sides of every edge of either cut."""
    edges = [edge + side for edge in (480, 512, 960, 1024, 1440, 1536) for side in (-1, 0)]
    tokens = np.int32((np.array([[0, *edges, VOCAB - 1]] * 4) - np.arange(4)[:, None]) % VOCAB)
    zeros = np.zeros(tokens.shape[1] - 1, np.float32)
    documents = [Document.of_completion(row[:1], row[1:], zeros, advantages=1.0) for row in tokens]
    (made,) = Packing(ranks, 4 // ranks, tokens.shape[1], VOCAB, 0, share_rows=False).rounds(documents)
    return made


def sums_on(mesh):
    mesh = make_mesh(parse_mesh(mesh))
    graph, params = nnx.split(Waves())
    made = GspmdGradients(graph, mesh, CrossEntropy(), temperature=1.0, engine="chunked")
    return made, place_parameters(params, mesh)
