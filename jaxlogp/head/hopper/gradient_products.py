"""The two products that follow dz: dH += dz · W_chunk, accumulated in fp32, and dW_chunk = dzᵀ · H, written in place.

Both change an array that lives across chunks, so they take it as a mutable reference: no copy of the weight's chunk, none of
its gradient's, and no autotuned library product whose bits depend on the machine's mood.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Int

from jaxlogp._mosaic_gpu import kernel
from jaxlogp.head.hopper.operands import EVERYTHING, Launch, Operands, Work
from jaxlogp.head.hopper.product import output_buffer, product, store_tile
from jaxlogp.head.hopper.tiles import TileConfig
from jaxlogp.head.hopper.work_lists import group_rows


def uninitialised(shape: tuple[int, ...], dtype: Any, interpret: Any = None) -> Array:
    """An array of arbitrary contents, for a reference of which every element will be written."""

    def body(out):
        del out

    options = {} if interpret is None else {"interpret": interpret}
    call = kernel(
        body,
        name="head_uninitialised",
        out_type=jax.ShapeDtypeStruct(shape, dtype),
        grid=(1,),
        grid_names=("block",),
        num_threads=1,
        thread_name="warpgroup",
        **options,
    )
    return call()


def _bounds(index: Array, live: Array | None, tokens: int) -> Int[Array, " two"]:
    return jnp.stack([index, jnp.int32(tokens) if live is None else live]).astype(jnp.int32)


def hidden_gradient_sums(
    tokens: int, hidden_size: int, config: TileConfig, parts: int = 1, interpret: Any = None, zeros: bool = True
) -> Any:
    """Reference to fp32 [parts * tokens, H rounded up to config.columns] that :func:`add_hidden_gradient` adds to.

    Zeros, or anything where a first call of it writes. Whole tiles of columns: in the interpreter they are read by plain
    loads, which must not run past the end of a row.
    """
    shape = parts * tokens, hidden_size + -hidden_size % config.columns
    return jax.new_ref(jnp.zeros(shape, jnp.float32) if zeros else uninitialised(shape, jnp.float32, interpret))


def finish_hidden_gradient(sums: Any, hidden_size: int, parts: int = 1) -> Float[Array, "tokens hidden"]:
    """dH of a reference to what :func:`add_hidden_gradient` has added to, which is not used afterwards."""
    return part_sums(jax.freeze(sums), hidden_size, parts)


def part_sums(sums: Float[Array, "rows columns"], hidden_size: int, parts: int = 1) -> Float[Array, "tokens hidden"]:
    """dH in fp32, its parts added in their order."""
    pieces = jnp.split(sums[:, :hidden_size], parts)
    return sum(pieces[1:], start=pieces[0])


def _sum_in(out: Any, interpret: Any) -> dict[str, Any]:
    """How :func:`store_tile` adds to what stands there: by the copy engine, which the interpreter cannot."""
    return {"add": True} if interpret is None else {"addend": out}


def add_hidden_gradient(
    d_hidden: Any,
    gradient: Float[Array, "tokens chunk"],
    operands: Operands,
    index: Int[Array, ""],
    launch: Launch,
    *,
    work: Work = EVERYTHING,
    window: int | None = None,
    parts: int = 1,
    first: bool = False,
) -> None:
    """d_hidden += gradient · weight[index * chunk :][: chunk], counted in vocabulary columns.

    Args:
        d_hidden: reference that :func:`hidden_gradient_sums` made, tokens a multiple of the tile's rows.
        gradient: bf16 [tokens, chunk], 0 in columns past the end of the weight; with ``window`` that of all columns, of
            which as many are taken.
        operands: the weight among them.
        index: which chunk; with ``window`` its first column, a multiple of the tile's depth.
        launch: how the kernel is launched.
        work: the tiles and steps that count (:func:`jaxlogp.head.hopper.work_lists.product_plan`); other tiles keep what
            they had.
        window: None, or how many columns, a multiple of the tile's depth.
        parts: how many parts of the columns are summed apart; each has whole steps. Not together with a plan.
        first: write to the tiles that count, whatever they hold, instead of adding.
    """
    (tokens, width), hidden_size, config = gradient.shape, operands.hidden.shape[1], launch.config
    live, plan, plan_steps = work
    chunk = width if window is None else window
    if chunk % (config.depth * parts) or (plan is not None and parts > 1):
        raise ValueError(
            f"parts: expected a number of parts of whole steps, 1 with a plan, got {parts} of {chunk} columns"
        )
    steps, column_tiles = chunk // (config.depth * parts), -(-hidden_size // config.columns)
    # A window's first column goes to the kernel in steps: the copies must see that it is a multiple of them.
    unit = chunk if window is None else config.depth

    def of_part(column):
        """(part, column tile) of the kernel's column tile: one part after the other."""
        if parts == 1:
            return jnp.int32(0), column
        part = lax.div(column, jnp.int32(column_tiles))
        return part, column - part * column_tiles

    def left_index(row, column, step, start):
        step = of_part(column)[0] * steps + step
        place = (0 if window is None else start) + step * config.depth
        return pl.ds(row * config.rows, config.rows), pl.ds(place, config.depth)

    def right_index(column, step, start):
        part, column = of_part(column)
        place = start + (part * steps + step) * config.depth
        # The hidden size is the columns of this product, the vocabulary its contracted dimension.
        return operands.weight_index(pl.ds(place, config.depth), pl.ds(column * config.columns, config.columns))

    def epilogue(products, first_row, column, warpgroup, _, early, others, scratch):
        part, column = of_part(column)
        buffer = scratch["piece"].at[warpgroup]
        rows, out = pl.ds(part * tokens + first_row, config.share), others[1]
        how = {} if first else _sum_in(out, launch.interpret)
        store_tile(products, buffer, out, rows, column * config.columns, **how)

    product(
        epilogue,
        name="head_hidden_gradient",
        config=config,
        row_tiles=tokens // config.rows,
        column_tiles=column_tiles * parts,
        steps=steps,
        left_minor=True,
        right_minor=operands.vocab_dim == 1,
        left_index=left_index,
        right_index=right_index,
        out_type=(),
        scratch={"piece": output_buffer(config, jnp.float32)},
        num_sms=launch.num_sms,
        interpret=launch.interpret,
        setup=lambda others: others[0][0] * unit,
        live=None if plan is not None else lambda others: others[0][1],
        plan=None if plan is None else lambda others: others[2],
        plan_steps=plan_steps,
    )(
        gradient,
        operands.weight,
        _bounds(index if window is None else index // config.depth, live, tokens),
        d_hidden,
        *(() if plan is None else (plan,)),
    )


def weight_gradient_sums(operands: Operands, config: TileConfig, columns: int, interpret: Any = None) -> Any:
    """Reference to anything, in fp32, of which :func:`write_weight_gradient` may take the parts of several calls.

    Like the weight, but with ``columns`` vocabulary columns, whole tiles of them, and whole tiles of the hidden size.
    """
    hidden_size = operands.hidden.shape[1]
    unit = config.columns if operands.vocab_dim == 0 else group_rows(config, interpret)
    shape = operands.weight_index(columns, -(-hidden_size // unit) * unit)
    return jax.new_ref(uninitialised(shape, jnp.float32, interpret))


def write_weight_gradient(
    d_weight: Any,
    gradient: Float[Array, "tokens chunk"],
    operands: Operands,
    index: Int[Array, ""],
    launch: Launch,
    *,
    work: Work = EVERYTHING,
    addend: Any = None,
) -> None:
    """d_weight[index * chunk :][: chunk] = gradientᵀ · hidden + addend, counted in vocabulary columns, rounded once.

    What lies past the end is not written. Of a weight [H, V] it is the product hiddenᵀ · gradient, whose tiles are written
    as they are: nobody transposes it.

    Args:
        d_weight: reference to bf16 like the weight, or to what :func:`weight_gradient_sums` made.
        gradient: bf16 [tokens, chunk], tokens a multiple of the tile's depth, columns of its rows and columns.
        operands: hidden among them, and which way the weight lies.
        index: which chunk.
        launch: how the kernel is launched.
        work: the tiles and steps over tokens that count (:func:`jaxlogp.head.hopper.work_lists.product_plan`). A plan is for
            a weight [V, H] alone: its rows are blocks of vocabulary columns.
        addend: None, or a reference that :func:`weight_gradient_sums` made, of which the same place is added; may be
            ``d_weight``.
    """
    (tokens, chunk), hidden, config, interpret = gradient.shape, operands.hidden, launch.config, launch.interpret
    as_rows, (live, plan, plan_steps) = operands.vocab_dim == 0, work
    left, right = (gradient, hidden) if as_rows else (hidden, gradient)
    group = group_rows(config, interpret)

    def left_index(row, _, step, __):
        return pl.ds(step * config.depth, config.depth), pl.ds(row * config.rows, config.rows)

    def right_index(column, step, _):
        return pl.ds(step * config.depth, config.depth), pl.ds(column * config.columns, config.columns)

    def epilogue(products, first_row, column, warpgroup, start, early, others, scratch):
        first_column = column * config.columns
        first_row, first_column = (start + first_row, first_column) if as_rows else (first_row, start + first_column)
        buffer, out = scratch["piece"].at[warpgroup], others[1]
        how = {} if addend is None else _sum_in(out, interpret) if addend is d_weight else {"addend": others[2]}
        store_tile(products, buffer, out, pl.ds(first_row, config.share), first_column, **how)

    others = () if addend is None or addend is d_weight else (addend,)
    product(
        epilogue,
        name="head_weight_gradient",
        config=config,
        row_tiles=-(-left.shape[1] // group) * group // config.rows,
        column_tiles=-(-right.shape[1] // config.columns),
        steps=tokens // config.depth,
        left_minor=False,
        right_minor=False,
        left_index=left_index,
        right_index=right_index,
        out_type=(),
        scratch={"piece": output_buffer(config, d_weight.dtype)},
        num_sms=launch.num_sms,
        interpret=interpret,
        setup=lambda others: others[0][0] * chunk,
        live=None if plan is not None else lambda others: others[0][1],
        live_steps=True,
        plan=None if plan is None else lambda others: others[-1],
        plan_steps=plan_steps,
    )(left, right, _bounds(index, live, tokens), d_weight, *others, *(() if plan is None else (plan,)))
