"""Vocabulary orders in which frequent tokens are adjacent, so that a gradient filter finds tiles without any."""

import dataclasses

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, Integer, Shaped

from jaxlogp._arrays import AnyArray, as_int32
from jaxlogp._compat import automatic_axes, leading_spec
from jaxlogp.errors import (
    describe,
    is_concrete,
    require,
    require_floating,
    require_integer,
    require_mask,
    require_tokens,
)
from jaxlogp.head.projection import dot


def vocab_order_by_mean_logit(
    hidden: Float[Array, "*tokens hidden"],
    weight: Float[Array, "vocab hidden"],
    mask: Bool[Array, "*tokens"] | None = None,
    *,
    bias: Float[Array, " vocab"] | None = None,
) -> Int[Array, " vocab"]:
    """Tokens of the vocabulary by their mean logit over some hidden states, the largest first.

    order = argsort(-(weight · mean_t hidden_t + bias)), stable. The mean of a product is the product with the mean, so
    this costs one matrix-vector product and no logits. Temperature, a positive logit scale and a soft cap of the mean
    change no order.

    Args:
      hidden: [*tokens, H], hidden states of a typical batch.
      weight: [V, H].
      mask: [*tokens], True where a hidden state counts; None counts all.
      bias: [V] or None.

    Returns:
      int32 [V], a permutation: the token at each place. Pass it to :class:`VocabOrder`.

    Raises:
      ValueError: wrong shapes or dtypes.

    Example:
      >>> vocab_order_by_mean_logit(jnp.ones((2, 1)), jnp.array([[1.0], [3.0], [2.0]])).tolist()
      [1, 2, 0]

    References:
      Wijmans et al., Cut Your Losses in Large-Vocabulary Language Models, 2024.
    """
    require_floating(hidden, "hidden")
    require_floating(weight, "weight")
    require(weight.ndim == 2 and weight.size > 0, "weight", "shape [V, H] with V, H > 0", describe(weight))
    size = weight.shape[1]
    ok = hidden.ndim >= 1 and hidden.shape[-1] == size and hidden.size > 0
    require(ok, "hidden", f"shape [*tokens, {size}] with at least one token", describe(hidden))
    if mask is None:
        mask = jnp.ones(hidden.shape[:-1], bool)
    require_mask(mask, hidden.shape[:-1])
    rows = jnp.where(mask[..., None], hidden, jnp.zeros((), hidden.dtype)).reshape(-1, size).astype(jnp.float32)
    count = jnp.maximum(jnp.sum(mask, dtype=jnp.int32), 1).astype(jnp.float32)
    mean = jnp.sum(rows, axis=0) / count
    logits = dot(weight, mean.astype(weight.dtype)[:, None], contract=(1, 0))[:, 0]
    if bias is not None:
        require_floating(bias, "bias")
        require(bias.shape == weight.shape[:1], "bias", f"shape {weight.shape[:1]}", describe(bias))
        logits = logits + bias.astype(jnp.float32)
    return jnp.argsort(-logits, stable=True).astype(jnp.int32)


def vocab_order_by_count(counts: Shaped[AnyArray, " vocab"]) -> Int[Array, " vocab"]:
    """Tokens of the vocabulary by how often they occur in some text, the most frequent first; ties keep their order.

    Args:
      counts: integer [V], occurrences of each token.

    Returns:
      int32 [V], a permutation: the token at each place. Pass it to :class:`VocabOrder`.

    Raises:
      ValueError: counts that are not an integer vector.

    Example:
      >>> vocab_order_by_count(jnp.array([1, 5, 0, 5])).tolist()
      [1, 3, 0, 2]
    """
    require_integer(counts, "counts")
    require(counts.ndim == 1 and counts.size > 0, "counts", "shape [V] with V > 0", describe(counts))
    # ~x = -1 - x reverses the order without the overflow of -x at the smallest integer and for unsigned ones.
    if isinstance(counts, np.ndarray):
        # In NumPy: without x64 jnp.asarray would wrap counts of 64 bits.
        return jnp.asarray(np.argsort(~counts, kind="stable").astype(np.int32))
    return jnp.argsort(~counts, stable=True).astype(jnp.int32)


@dataclasses.dataclass(frozen=True, eq=False)
class VocabOrder:
    """A numbering of the vocabulary: the token ``order[i]`` is at place i.

    The cheap way to use one is to renumber once, before training: ``rows`` of the head (and of a tied embedding) become
    the parameters, ``places`` translates incoming token ids and ``tokens`` the ids that a sampler emits. A step then
    costs nothing extra, and the log-probs are those of the same tokens. Applied inside a step, ``rows`` gathers the
    whole weight and its gradient, a copy of [V, H] each way; that is also correct, and the gradient comes back in the
    parameters' own order, but the copies may cost as much as the filter saves.

    With vocabulary shards, renumber the whole weight before it is sharded.

    Attributes:
      order: int32 [V], a permutation with known values (not traced).
      place: int32 [V], the inverse: place[order[i]] = i.

    Raises:
      ValueError: an order that is traced, not an integer vector, or not a permutation.

    Example:
      >>> order = VocabOrder(jnp.array([2, 0, 1]))
      >>> order.rows(jnp.array([[0.0], [1.0], [2.0]]))[:, 0].tolist(), order.places(jnp.array([2, 1, -100])).tolist()
      ([2.0, 0.0, 1.0], [0, 2, -100])
    """

    order: Integer[AnyArray, " vocab"]
    place: Int[AnyArray, " vocab"] = dataclasses.field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Checks the permutation and inverts it."""
        require_integer(self.order, "order")
        require(self.order.ndim == 1 and self.order.size > 0, "order", "shape [V] with V > 0", describe(self.order))
        require(is_concrete(self.order), "order", "values that are known (outside of jax.jit)", describe(self.order))
        order = np.asarray(self.order).astype(np.int64)
        inside = (order >= 0) & (order < order.size)
        require(inside.all(), "order", f"ids in [0, {order.size})", order[~inside][:1].tolist())
        counts = np.bincount(order, minlength=order.size)
        expected = f"a permutation of {order.size} ids"
        require((counts == 1).all(), "order", expected, f"{int((counts == 0).sum())} ids missing, others repeated")
        place = np.empty(order.size, np.int32)
        place[order] = np.arange(order.size, dtype=np.int32)
        object.__setattr__(self, "order", order.astype(np.int32))
        object.__setattr__(self, "place", place)

    def rows(self, weight: Shaped[Array, "vocab ..."]) -> Shaped[Array, "vocab ..."]:
        """Rows of a weight, or entries of a bias, in this order; differentiable.

        Raises:
          ValueError: another number of rows than the order has.
        """
        return self._gathered(weight, self.order)

    def unordered_rows(self, weight: Shaped[Array, "vocab ..."]) -> Shaped[Array, "vocab ..."]:
        """Undoes :meth:`rows`, for checkpoints that other programs read; differentiable.

        Raises:
          ValueError: another number of rows than the order has.
        """
        return self._gathered(weight, self.place)

    def places(self, token_ids: Integer[Array, "*tokens"]) -> Int[Array, "*tokens"]:
        """Token ids in the new numbering, int32; ids outside [0, V), such as -100, stay as they are.

        An id that int32 cannot hold becomes -1, which is outside too.

        Raises:
          ValueError: ids without an integer dtype, or an empty array.
        """
        return self._translate(token_ids, self.place)

    def tokens(self, places: Integer[Array, "*tokens"]) -> Int[Array, "*tokens"]:
        """Undoes :meth:`places`: sampled ids as ids of the tokenizer."""
        return self._translate(places, self.order)

    def _translate(self, ids: Integer[Array, "*tokens"], table: np.ndarray) -> Int[Array, "*tokens"]:
        require_integer(ids, "token_ids")
        require_tokens(ids, "token_ids")

        def translate(ids: Array) -> Array:
            covered = (ids >= 0) & (ids < table.size)
            # Looked up at 0 where out of range: a negative index would wrap.
            return jnp.where(covered, jnp.asarray(table)[jnp.where(covered, ids, 0)], ids)

        return automatic_axes(translate, as_int32(ids), out_specs=leading_spec(ids, ids.ndim))

    def _gathered(self, weight: Shaped[Array, "rows ..."], rows: np.ndarray) -> Array:
        size = self.order.size
        ok = getattr(weight, "ndim", 0) >= 1 and weight.shape[0] == size
        require(ok, "weight", f"{size} rows, as the order has", describe(weight))

        def gather(weight: Array) -> Array:
            return weight.at[rows].get(unique_indices=True, mode="promise_in_bounds")

        return automatic_axes(gather, jnp.asarray(weight), out_specs=leading_spec(weight, weight.ndim))
