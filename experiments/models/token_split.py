"""Which ranks hold which tokens of the residual stream: sequence parallelism of the model body.

Between two products of a layer every feature of a token is needed, for a norm or a sum, and no other token: there, the
ranks along "tensor" hold different tokens (Korthikanti et al., Reducing Activation Recomputation in Large Transformer
Models, 2022). Before a product whose weight they split by heads or features the tokens are gathered; what it yields is a
partial sum on every rank, and is summed and split again in one step. An all-reduce does both at once and leaves the
tokens, and the work on them, on every rank.
"""

from dataclasses import dataclass

from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Array, Float, Int

from experiments.models.mesh import SEQUENCE_AXIS, TENSOR_AXIS, num_ranks, row_axes, size_of, token_axes
from experiments.models.sharding import resharded


@dataclass(frozen=True)
class TokenSplit:
    """How activations [B, T, features] lie on a mesh; on a single device, and by default, they stay as they are.

    Attributes:
        products: where products of the "tensor" ranks read them, or None.
        stream: where the residual stream is, or None.
    """

    products: NamedSharding | None = None
    stream: NamedSharding | None = None

    @classmethod
    def of(cls, rows: int, length: int, mesh: Mesh | None) -> "TokenSplit":
        """The split of B rows of T tokens: by ranks that divide them."""
        if mesh is None or size_of(mesh, TENSOR_AXIS) == 1 or length % size_of(mesh, SEQUENCE_AXIS, TENSOR_AXIS):
            return cls()
        _, sequence = token_axes(mesh)
        own_rows = row_axes(mesh) if rows % num_ranks(mesh) == 0 else None
        specs = P(own_rows, sequence), P(own_rows, (*sequence, TENSOR_AXIS))
        return cls(*(NamedSharding(mesh, spec) for spec in specs))

    def gather(self, x: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
        """For the products: all tokens of the "tensor" ranks on each of them. The gradient is summed and split."""
        if self.products is None or self.stream is None:
            return x
        # Without the constraint the compiler gathers what x was made of, before it is rounded to the products' dtype.
        return resharded(lax.with_sharding_constraint(x, self.stream), self.products, self.stream)

    def scatter(self, x: Float[Array, "B T F"]) -> Float[Array, "B T F"]:
        """Sums of products, added up over the "tensor" ranks and split. The gradient is gathered."""
        if self.products is None or self.stream is None:
            return x
        return lax.with_sharding_constraint(resharded(x, self.stream, self.products), self.stream)


UNSPLIT = TokenSplit()


def whole_rows(ids: Int[Array, "B T"], mesh: Mesh | None) -> Int[Array, "B T"]:
    """The ids of whole rows on all ranks that hold parts of them."""
    if mesh is None or size_of(mesh, SEQUENCE_AXIS) == 1:
        return ids
    return lax.with_sharding_constraint(ids, NamedSharding(mesh, P(row_axes(mesh))))
