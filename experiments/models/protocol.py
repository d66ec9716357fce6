"""What trainer and sampler ask of a model. Any `nnx.Module` that has it can be trained: `train(config, model=...)`.

    hidden = model.hidden_states(tokens, positions, segment_ids)
    spec, weight = model.head()

A `Decoder` can decode with a cache as well. Other models are sampled by computing whole rows again for every token.
"""

from typing import Any, Protocol

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from jaxlogp.errors import require
from jaxlogp.head import HeadSpec


class Model(Protocol):
    """An `nnx.Module` between token ids and the head.

    Its parameters are what is of type `nnx.Param`; all else (constants, random states) stays as it is. Parameters that
    name their axes (`experiments.models.sharding.RULES`) are split over a mesh, others are on every device.
    """

    def hidden_states(
        self, tokens: Int[Array, "B T"], positions: Int[Array, "B T"], segment_ids: Int[Array, "B T"]
    ) -> Float[Array, "B T H"]:
        """Computes what the head reads. A token depends on its own document alone, up to itself.

        Args:
            tokens: int32, all in [0, V), padding too.
            positions: int32, counted from the start of each document.
            segment_ids: int32; a run of equal ids is one document.
        """

    def head(self) -> tuple[HeadSpec, Float[Array, "V H"]]:
        """Returns the head's arithmetic at temperature 1, and its weight; V is the size of the vocabulary."""


def check_model(model: Any, vocab_size: int, argument: str = "model") -> None:
    """Traces both methods on a row of two tokens; ValueError, which calls the model `argument`, if it is no `Model`."""
    expected = "an nnx.Module with hidden_states(tokens, positions, segment_ids) and head()"
    has_both = all(callable(getattr(model, name, None)) for name in ("hidden_states", "head"))
    require(isinstance(model, nnx.Module) and has_both, argument, expected, f"a {type(model).__name__}")
    graph, state = nnx.split(model)
    require(bool(jax.tree.leaves(nnx.state(model, nnx.Param))), argument, "parameters of type nnx.Param", "none")
    row = jax.ShapeDtypeStruct((1, 2), jnp.int32)

    specs = []

    def outputs(state, row):
        traced: Any = nnx.merge(graph, state)
        head = traced.head()
        spec, weight = head if isinstance(head, tuple) and len(head) == 2 else (head, None)
        specs.append(spec)
        return traced.hidden_states(row, row, row), weight

    try:
        hidden, weight = jax.eval_shape(outputs, state, row)
    except Exception as error:
        seen = f"{type(error).__name__}: {error}"
        raise ValueError(f"{argument}: expected head and hidden_states to be traced, got {seen}") from error
    seen = type(specs[0]).__name__
    require(isinstance(specs[0], HeadSpec), f"{argument}, head", "a HeadSpec and a weight", seen)
    require(
        hasattr(weight, "shape"),
        f"{argument}, head",
        "a HeadSpec and a weight",
        f"{type(weight).__name__} for the weight",
    )
    rows = f"a weight [{vocab_size}, H], one row for each id of the tokenizer"
    require(weight.ndim == 2 and weight.shape[0] == vocab_size, f"{argument}, head", rows, list(weight.shape))
    wanted = [1, 2, weight.shape[1]]
    of_row = f"{argument}, hidden_states of 1 row of 2 tokens"
    require(hasattr(hidden, "shape"), of_row, wanted, type(hidden).__name__)
    require(list(hidden.shape) == wanted, of_row, wanted, list(hidden.shape))
