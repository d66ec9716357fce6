"""Persistent, warp-specialized matrix product for Hopper, with the epilogue left to the caller.

Each block owns one SM and walks over output tiles. A memory warpgroup copies operand tiles into a ring of shared-memory
stages, and never stops between output tiles; two consumer warpgroups multiply them and run the epilogue on fp32
accumulators in registers. They either cooperate, with half of the tile's rows each, which reads least; or they alternate,
with a whole tile each in turn, and then the epilogue of one overlaps the products of the other.

The contracted dimension of either operand may be its minor one (rows of hidden, rows of the weight) or its major one.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxlogp._mosaic_gpu import kernel, plgpu
from jaxlogp.head.hopper.tiles import TileConfig

CONSUMERS = 2
MEMORY_REGISTERS = 40
CONSUMER_REGISTERS = 232
# Bytes of a row of an output tile that are written at a time: one swizzled line.
LINE = 128


def tile_transforms(minor: int, item_bytes: int = 2) -> tuple:
    """How a tile of that minor size lies in shared memory: as the matrix units and the copy engine like it."""
    swizzle = plgpu.find_swizzle(minor * item_bytes * 8)
    return plgpu.TilingTransform((8, swizzle // item_bytes)), plgpu.SwizzleTransform(swizzle)


def output_buffer(config: TileConfig, dtype: Any) -> Any:
    """Shared memory through which output tiles leave: for each warpgroup [share, columns of a line]."""
    item_bytes = jnp.dtype(dtype).itemsize
    columns = LINE // item_bytes
    return plgpu.SMEM((CONSUMERS, config.share, columns), dtype, transforms=tile_transforms(columns, item_bytes))


def store_tile(
    values: Any,
    buffer: Any,
    destination: Any,
    rows: Any,
    first_column: Any,
    addend: Any = None,
    finish: Callable[[Any, int], Any] = lambda part, offset: part,
    add: bool = False,
) -> None:
    """Writes a tile from registers to destination[rows, first_column:], through ``buffer`` [rows, piece].

    ``addend`` is an array to read the same place of, and to add; it may be the destination. ``add`` has the copy engine add
    to the destination instead, in fp32: nobody waits for a read. ``finish`` is applied to each piece and its first column
    within the tile: a piece at a time keeps few intermediate values in registers.
    """
    piece = buffer.shape[1]
    for index in range(values.shape[1] // piece):
        place = destination.at[rows, pl.ds(first_column + index * piece, piece)]
        part = finish(values[:, index * piece : (index + 1) * piece], index * piece)
        if addend is not None:
            source = addend.at[rows, pl.ds(first_column + index * piece, piece)]
            part = part + plgpu.load(source, layout=plgpu.Layout.WGMMA, optimized=False)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        buffer[...] = part.astype(buffer.dtype)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(buffer, place, reduction_op="add" if add else None)


def operand_tile(config: TileConfig, size: int, contract_minor: bool) -> tuple[int, int]:
    """Shape of one stage of an operand."""
    return (size, config.depth) if contract_minor else (config.depth, size)


def tile_order(index: Any, row_tiles: Any, column_tiles: int, group: int) -> tuple[Any, Any]:
    """(row tile, column tile) of the index-th output tile: down a group of row tiles, then to the next column.

    The number of row tiles may be a traced value.
    """
    group = jnp.minimum(jnp.int32(group), row_tiles)
    per_group = group * column_tiles
    panel = lax.div(index, per_group)
    within = index - panel * per_group
    # The last panel may have fewer row tiles.
    height = jnp.minimum(group, row_tiles - panel * group)
    column = lax.div(within, height)
    # Every other panel walks back, so that its first columns are still in the cache.
    column = jnp.where(lax.rem(panel, jnp.int32(2)) == 0, column, column_tiles - 1 - column)
    return panel * group + lax.rem(within, height), column


def product(
    epilogue: Callable[..., None],
    *,
    name: str,
    config: TileConfig,
    row_tiles: int,
    column_tiles: int,
    steps: int,
    left_minor: bool,
    right_minor: bool,
    left_index: Callable[..., tuple],
    right_index: Callable[..., tuple],
    out_type: Any,
    scratch: dict[str, Any],
    num_sms: int,
    interpret: Any = None,
    approx_math: bool = True,
    setup: Callable[..., Any] | None = None,
    live: Callable[..., Any] | None = None,
    live_steps: bool = False,
    prologue: Callable[..., Any] | None = None,
    plan: Callable[..., Any] | None = None,
    plan_steps: int | None = None,
):
    """Builds the kernel; it takes (left, right, *others) and returns arrays of ``out_type``.

    Args:
        epilogue: called in each consumer warpgroup as epilogue(accumulator [share, columns], first row, column tile,
            warpgroup, setup's result, prologue's result, others and outputs, scratch).
        name: what profilers call the kernel.
        config: tile shapes.
        row_tiles: number of tiles in the row dimension.
        column_tiles: number of tiles in the column dimension.
        steps: number of steps in the contracted dimension.
        left_minor: whether the left operand's contracted dimension is its last.
        right_minor: the same of the right operand.
        left_index: (row tile, column tile, step, setup's result) -> index of the left operand's block.
        right_index: (column tile, step, setup's result) -> index of the right operand's block.
        out_type: outputs.
        scratch: name -> scratch type, handed to the epilogue.
        num_sms: number of persistent blocks.
        interpret: None, or what runs the kernel on the CPU.
        approx_math: let exp2 be the hardware's (2 ulp).
        setup: called once as setup(others and outputs), for scalars that live in global memory.
        live: called once as live(others and outputs), how many rows of the row dimension, or of the contracted one with
            ``live_steps``, need work. Tiles or steps after them are skipped; with 0 nothing is written.
        live_steps: whether live rows are those of the contracted dimension.
        prologue: called before the products of a tile as prologue(first row, column tile, setup's result, others and
            outputs); its result, loaded while the products run, reaches the epilogue.
        plan: called once as plan(others and outputs), the work list of :mod:`jaxlogp.head.hopper.work_lists` in global
            memory: tiles that it does not name are not computed and not written. Not together with ``live``.
        plan_steps: how many steps make one of the plan's blocks of steps; None when it lists tiles alone.
    """
    share = config.share
    stages = min(config.stages, steps)
    # The interpreter runs one block at a time. The sums are the same.
    cluster = config.cluster if interpret is None else 1
    if row_tiles % cluster:
        raise ValueError(f"row_tiles: expected a multiple of the cluster size {cluster}, got {row_tiles}")
    blocks, shared_axes = num_sms // cluster, ("member",) if cluster > 1 else None
    left_tile = operand_tile(config, config.rows, left_minor)
    right_tile = operand_tile(config, config.columns, right_minor)
    names = tuple(scratch)
    row_groups = row_tiles // cluster
    num_tiles = row_groups * column_tiles
    num_blocks = 0 if plan_steps is None else steps // plan_steps

    def body(left, right, *rest):
        *others, left_ring, right_ring, full, empty = rest[: len(rest) - len(names)]
        extra = dict(zip(names, rest[len(rest) - len(names) :], strict=True))
        warpgroup = lax.axis_index("warpgroup")
        block = lax.axis_index("block")
        member = lax.axis_index("member") if cluster > 1 else jnp.int32(0)
        turns = CONSUMERS if config.alternate else 1
        # Read once here: the memory warpgroup would otherwise wait for them at every step.
        values = None if setup is None else setup(others)
        used_rows, used_steps = jnp.int32(row_tiles // cluster), jnp.int32(steps)
        if live is not None:
            grain = config.depth if live_steps else config.rows * cluster
            used = lax.div(live(others) + (grain - 1), jnp.int32(grain))
            if live_steps:
                used_rows, used_steps = jnp.where(used > 0, used_rows, 0), used
            else:
                used_rows = used
        work = None if plan is None else plan(others)
        used_tiles = used_rows * column_tiles if work is None else work[0]
        count = lax.div(used_tiles - block + (blocks - 1), jnp.int32(blocks))

        def position(item):
            if work is None:
                row, column = tile_order(item * blocks + block, used_rows, column_tiles, config.group // cluster)
            else:
                # Asked for one item more than there is, it names some tile, which nobody uses.
                tile = work[1 + jnp.minimum(item * blocks + block, num_tiles - 1)]
                row = lax.div(tile, jnp.int32(column_tiles))
                column = tile - row * column_tiles
            return row * cluster + member, column

        def steps_of(row):
            """Steps of a row tile."""
            if plan_steps is None:
                return used_steps
            return work[1 + num_tiles + lax.div(row, jnp.int32(cluster))] * plan_steps

        def each_step(row, function, carry):
            """Calls function(step, carry) for each step of a row tile."""
            if plan_steps is None:
                return lax.fori_loop(0, used_steps, function, carry)
            first = 1 + num_tiles + row_groups + lax.div(row, jnp.int32(cluster)) * num_blocks

            def block_step(index, carry):
                here, carry = carry
                # Read a block ahead, so that nobody waits for it.
                following = work[first + jnp.minimum(index + 1, num_blocks - 1)]
                start = here * plan_steps
                carry = lax.fori_loop(0, plan_steps, lambda step, carry: function(start + step, carry), carry)
                return following, carry

            listed = work[1 + num_tiles + lax.div(row, jnp.int32(cluster))]
            return lax.fori_loop(0, listed, block_step, (work[first], carry))[1]

        @pl.when(warpgroup == CONSUMERS)
        def _copy():
            plgpu.set_max_registers(MEMORY_REGISTERS, action="decrease")

            def tile_step(item, counter):
                row, column = position(item)
                owner = lax.rem(item, jnp.int32(turns))

                def depth_step(step, counter):
                    slot = lax.rem(counter, jnp.int32(stages))
                    arrived = full.at[owner * stages + slot]

                    @pl.when(counter >= stages)
                    def _():
                        plgpu.barrier_wait(empty.at[slot])

                    plgpu.copy_gmem_to_smem(left.at[left_index(row, column, step, values)], left_ring.at[slot], arrived)
                    plgpu.copy_gmem_to_smem(
                        right.at[right_index(column, step, values)],
                        right_ring.at[slot],
                        arrived,
                        collective_axes=shared_axes,
                    )
                    return counter + 1

                return each_step(row, depth_step, counter)

            total = lax.fori_loop(0, count, tile_step, jnp.int32(0))

            def drain(counter, _):
                @pl.when(counter >= stages)
                def _():
                    plgpu.barrier_wait(empty.at[lax.rem(counter, jnp.int32(stages))])

            # A barrier must not be given back while a phase of it is unobserved.
            lax.fori_loop(total, total + stages, drain, None)

        @pl.when(warpgroup < CONSUMERS)
        def _multiply():
            plgpu.set_max_registers(CONSUMER_REGISTERS, action="increase")
            # Cooperating warpgroups share every tile; alternating ones take every other tile, whole.
            turn = warpgroup if config.alternate else jnp.int32(0)
            mine = slice(None) if config.alternate else pl.ds(warpgroup * share, share)
            first_row = jnp.int32(0) if config.alternate else warpgroup * share

            def tile_step(index, before):
                item = index * turns + turn
                row, column = position(item)
                tile_steps = steps_of(row)
                rows = row * config.rows + first_row
                early = None if prologue is None else prologue(rows, column, values, others)

                def accumulate(accumulator):
                    def depth_step(step, slot):
                        plgpu.barrier_wait(full.at[turn * stages + slot])
                        a = left_ring.at[slot, mine] if left_minor else left_ring.at[slot, :, mine].transpose((1, 0))
                        b = right_ring.at[slot]
                        plgpu.wgmma(accumulator, a, b.transpose((1, 0)) if right_minor else b)
                        # The product before this one is done: its stage is free while this one runs.
                        plgpu.wgmma_wait(1)

                        @pl.when(step > 0)
                        def _():
                            plgpu.barrier_arrive(empty.at[jnp.where(slot == 0, stages - 1, slot - 1)])

                        return jnp.where(slot == stages - 1, 0, slot + 1)

                    # Steps of all tiles before this one, those of the other warpgroup among them.
                    first_step = item * used_steps if before is None else before
                    slot = lax.fori_loop(0, tile_steps, depth_step, lax.rem(first_step, jnp.int32(stages)))
                    plgpu.wgmma_wait(0)
                    plgpu.barrier_arrive(empty.at[jnp.where(slot == 0, stages - 1, slot - 1)])
                    return accumulator[...]

                accumulated = pl.run_scoped(accumulate, plgpu.ACC((share, config.columns), jnp.float32))
                epilogue(accumulated, rows, column, warpgroup, values, early, others, extra)
                if before is None:
                    return None
                between = steps_of(position(item + 1)[0]) if turns > 1 else 0
                return before + tile_steps + between

            before = None
            if plan_steps is not None:
                first = steps_of(position(jnp.int32(0))[0])
                before = jnp.where(turn > 0, first, 0)
            lax.fori_loop(0, lax.div(count - turn + (turns - 1), jnp.int32(turns)), tile_step, before)
            plgpu.wait_smem_to_gmem(0)

    dtype, users = jnp.bfloat16, 1 if config.alternate else CONSUMERS
    rings = [
        plgpu.SMEM((stages, *left_tile), dtype, transforms=tile_transforms(left_tile[1])),
        plgpu.SMEM((stages, *right_tile), dtype, transforms=tile_transforms(right_tile[1])),
        plgpu.Barrier(num_arrivals=2, num_barriers=stages * (CONSUMERS if config.alternate else 1)),
        plgpu.Barrier(num_arrivals=users, num_barriers=stages)
        if cluster == 1
        else plgpu.ClusterBarrier(collective_axes=shared_axes, num_arrivals=users, num_barriers=stages),
    ]
    return kernel(
        body,
        name=name,
        out_type=out_type,
        scratch_types=[*rings, *scratch.values()],
        grid=(blocks,),
        grid_names=("block",),
        **({} if cluster == 1 else {"cluster": (cluster,), "cluster_names": ("member",)}),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(approx_math=approx_math, unsafe_no_auto_barriers=False),
        **({} if interpret is None else {"interpret": interpret}),
    )
