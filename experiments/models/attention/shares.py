"""Shares of the blocks that rows of uneven lengths read: dealt to programs evenly, and put together again.

A kernel in which every row has one program waits for that of the longest row. Here a long row has several, each with a
share of about the mean length, and what they have found is put together by the logarithms of their sums (Flash-Decoding,
Dao et al. 2023).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int


class Shares(NamedTuple):
    """Share i is of the blocks [begin[i], end[i]) of owner[i]; those that were not needed have no owner, and the number G.

    Shares [of_owner[g], of_owner[g + 1]) are those of owner g.
    """

    owner: Int[Array, " shares"]
    begin: Int[Array, " shares"]
    end: Int[Array, " shares"]
    of_owner: Int[Array, " G+1"]


def deal_blocks(blocks: Int[Array, " G"], shares: int, fewest: int) -> Shares:
    """Deals the blocks of G owners, a share to each at least; none but the last of an owner's has less than `fewest`.

    With s = max(fewest, ceil(sum of blocks / (shares - G))) blocks a share, owners need no more than `shares` of them:
    each has at most blocks / s + 1.
    """
    owners = len(blocks)
    size = jnp.maximum(fewest, pl.cdiv(jnp.sum(blocks, dtype=jnp.int32), shares - owners))
    needed = jnp.maximum(pl.cdiv(blocks, size), 1)
    of_owner = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(needed, dtype=jnp.int32)])
    number = jnp.arange(shares, dtype=jnp.int32)
    owner = jnp.searchsorted(of_owner[1:], number, side="right", method="compare_all").astype(jnp.int32)
    mine = jnp.minimum(owner, owners - 1)
    begin = (number - of_owner[mine]) * size
    return Shares(owner, begin, jnp.minimum(begin + size, blocks[mine]), of_owner)


def put_together(
    mixed: Float[Array, "shares R N D"],
    log_sums: Float[Array, "shares R N"],
    of_owner: Int[Array, " G+1"],
    dtype: jnp.dtype,
    interpret: bool = False,
) -> Float[Array, "G*R N D"]:
    """Returns what the R rows of each owner found in all of its shares: sum of 2^l m over that of 2^l.

    A share has the logarithm l to base 2 of its sum of exponentials, -inf where a row read nothing, and the mean m by them.
    """
    _, together, heads, size = mixed.shape
    rows = (len(of_owner) - 1) * together
    whole = lambda shape: pl.BlockSpec(shape, lambda *_: (0,) * len(shape))  # noqa: E731
    out = jax.ShapeDtypeStruct((rows, heads, size), dtype)
    return pl.pallas_call(
        functools.partial(_put_together, together=together),
        grid=(rows, heads),
        in_specs=[whole(x.shape) for x in (mixed, log_sums, of_owner)],
        out_specs=whole(out.shape),
        out_shape=out,
        compiler_params=plgpu.CompilerParams(num_warps=1),
        interpret=interpret,
        name="shares_put_together",
    )(mixed, log_sums, of_owner)


def _put_together(mixed_ref, log_sums_ref, of_owner_ref, out_ref, *, together: int) -> None:
    row, head = pl.program_id(0), pl.program_id(1)
    owner, mine = row // together, row % together

    def add(share, carry):
        largest, total, values = carry
        log_sum = log_sums_ref[share, mine, head]
        larger = jnp.maximum(largest, log_sum)
        kept, new = jnp.exp2(largest - larger), jnp.exp2(log_sum - larger)
        # A row that read nothing has no values.
        part = jnp.where(new > 0, mixed_ref[share, mine, head, :], 0.0)
        return larger, total * kept + new, values * kept + part * new

    first = of_owner_ref[owner]
    # The new token is in the first share, which is therefore never empty.
    carry = log_sums_ref[first, mine, head], 1.0, mixed_ref[first, mine, head, :]
    _, total, values = lax.fori_loop(first + 1, of_owner_ref[owner + 1], add, carry)
    out_ref[row, head, :] = (values / total).astype(out_ref.dtype)
