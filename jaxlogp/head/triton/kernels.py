"""The two Triton kernels: tile statistics of the logits, and the gradient of a window of logits.

In both, a program computes one [ROWS, COLUMNS] tile of hidden · weightᵀ and finishes it in registers; neither writes
the logits. This is the only module that imports Triton, and it is imported when a kernel is launched.

Shapes: hidden [tokens, HIDDEN], weight [vocab, HIDDEN] where VOCAB_DIM is 0, [HIDDEN, vocab] where it is 1, bias fp32
[vocab], target int32 [tokens] (a column of the logits, or -1). ``bounds`` is int32 [3]: first column, number of columns
that are real ids, tokens that need work.

A weight is read 16 bytes at a time: eight hidden units of a column, or eight columns of a hidden unit. For the latter,
vocab and the first column are multiples of 8, and every eight columns stay together when they are moved.
"""

import triton
import triton.language as tl

LOG2_E = tl.constexpr(1.4426950408889634)
# A masked column's logit. Finite, so that p z is 0 there and not NaN; below every real logit.
MASKED = tl.constexpr(-1e30)


@triton.jit
def place(index, row_tiles, column_tiles, GROUP: tl.constexpr):
    """(row tile, column tile) of a program: GROUP row tiles are visited before the next column of tiles."""
    band = GROUP * column_tiles
    first = index // band * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    inside = index % band
    return first + inside % height, inside // height


@triton.jit
def inside_of(columns, vocab, VOCAB_DIM: tl.constexpr):
    """The columns, those beyond the end moved to the last one, or the last eight; they are read, and then masked."""
    if VOCAB_DIM == 0:
        return tl.minimum(columns, vocab - 1)
    else:
        moved = tl.minimum(columns, vocab - 8 + columns % 8)
        return tl.max_contiguous(tl.multiple_of(moved, 8), 8)


@triton.jit
def tile_products(
    hidden,
    weight,
    rows,
    columns,
    steps,
    vocab,
    HIDDEN: tl.constexpr,
    VOCAB_DIM: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
):
    """hidden[rows] · weight[columns]ᵀ in fp32, over the first ``steps`` steps of DEPTH."""
    depth = tl.arange(0, DEPTH)
    # Rows of a large head begin beyond 2^31 elements.
    left = hidden + (rows.to(tl.int64) * HIDDEN)[:, None] + depth[None, :]
    if VOCAB_DIM == 0:
        stride = 1
        right = weight + (columns.to(tl.int64) * HIDDEN)[None, :] + depth[:, None]
    else:
        # Rounded for the compiler, which is to see that every row begins at a multiple of 16 bytes.
        stride = vocab // 8 * 8
        right = weight + (depth * stride)[:, None] + columns[None, :]
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    for step in range(0, steps):
        if HIDDEN % DEPTH == 0:
            a = tl.load(left)
            b = tl.load(right)
        else:
            inside = depth < HIDDEN - step * DEPTH
            a = tl.load(left, mask=inside[None, :], other=0.0)
            b = tl.load(right, mask=inside[:, None], other=0.0)
        products = tl.dot(a, b, products)
        left += DEPTH
        right += DEPTH * stride
    return products


@triton.jit
def finish(
    products,
    bias,
    columns,
    HAS_BIAS: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEMPERATURE: tl.constexpr,
):
    """softcap(SCALE (products + bias)) / TEMPERATURE; SOFTCAP 0 means none."""
    logits = products
    if SOFTCAP > 0.0:
        # tanh would make an overflow, of either sign, a finite ±cap.
        logits = tl.where(tl.abs(logits) < float("inf"), logits, float("nan"))
    if HAS_BIAS:
        logits = logits + tl.load(bias + columns)[None, :]
    if SOFTCAP > 0.0:
        # tanh(x) = 1 - 2 / (1 + e^(2 x)); e^(2 x) = inf gives 1 and 0 gives -1. The hardware's tanh is accurate to only
        # 2^-11.
        doubled = tl.exp2(logits * (2.0 * LOG2_E * SCALE / SOFTCAP))
        logits = (1.0 - 2.0 / (1.0 + doubled)) * (SOFTCAP / TEMPERATURE)
    elif SCALE != TEMPERATURE:
        logits = logits * (SCALE / TEMPERATURE)
    if HAS_BIAS:
        # A bias of -inf gives a column probability 0. The comparison, unlike a maximum, lets NaN through.
        logits = tl.where(logits < MASKED, MASKED, logits)
    return logits


@triton.jit
def forward_kernel(
    hidden,
    weight,
    bias,
    target,
    bounds,
    tokens,
    vocab,
    out,
    HIDDEN: tl.constexpr,
    VOCAB_DIM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out[tile, :, rows]: max, Σ e^(z - max), Σ e^(z - max) (z - max), target logit or 0.

    Row tiles after the live rows are neither computed nor written.
    """
    width = tl.load(bounds + 1)
    row_tiles = tl.cdiv(tl.load(bounds + 2), ROWS)
    column_tiles = tl.cdiv(vocab, COLUMNS)
    index = tl.program_id(0)
    if index >= row_tiles * column_tiles:
        return
    row, tile = place(index, row_tiles, column_tiles, GROUP)
    rows = row * ROWS + tl.arange(0, ROWS)
    columns = tile * COLUMNS + tl.arange(0, COLUMNS)
    sources = inside_of(columns, vocab, VOCAB_DIM)
    steps: tl.constexpr = (HIDDEN + DEPTH - 1) // DEPTH
    products = tile_products(hidden, weight, rows, sources, steps, vocab, HIDDEN, VOCAB_DIM, ROWS, COLUMNS, DEPTH)
    logits = finish(products, bias, sources, HAS_BIAS, SCALE, SOFTCAP, TEMPERATURE)
    logits = tl.where((columns < width)[None, :], logits, MASKED)

    wanted = tl.load(target + rows)
    selected = tl.sum(tl.where(columns[None, :] == wanted[:, None], logits, 0.0), axis=1)
    maximum = tl.max(logits, axis=1)
    shift = logits - maximum[:, None]
    exp = tl.exp2(shift * LOG2_E)
    into = out + (tile * 4).to(tl.int64) * tokens + rows
    tl.store(into, maximum)
    tl.store(into + tokens, tl.sum(exp, axis=1))
    if WITH_ENTROPY:
        tl.store(into + 2 * tokens, tl.sum(exp * shift, axis=1))
    if HAS_BIAS:
        selected = tl.where(selected <= MASKED, float("-inf"), selected)
    tl.store(into + 3 * tokens, selected)


@triton.jit
def gradient_kernel(
    hidden,
    weight,
    bias,
    target,
    scalars,
    bounds,
    tokens,
    vocab,
    out,
    HIDDEN: tl.constexpr,
    VOCAB_DIM: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WITH_ENTROPY: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    TEMPERATURE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    GROUP: tl.constexpr,
):
    """out[rows, WINDOW columns] = gradient of hidden · weightᵀ + bias, rounded once.

    dz = p (A + B (z - max)) + g onehot, from scalars fp32 [5, tokens]: max, log2 Σ e^(z - max), A, B, g. Rows whose A, B and
    g are 0 get 0, whatever their logits; so do row tiles after the live rows, without a product.
    """
    start = tl.load(bounds)
    width = tl.load(bounds + 1)
    live = tl.load(bounds + 2)
    column_tiles: tl.constexpr = (WINDOW + COLUMNS - 1) // COLUMNS
    row, tile = place(tl.program_id(0), tokens // ROWS, column_tiles, GROUP)
    rows = row * ROWS + tl.arange(0, ROWS)
    local = tile * COLUMNS + tl.arange(0, COLUMNS)
    columns = start + local
    sources = inside_of(columns, vocab, VOCAB_DIM)
    steps = tl.where(row * ROWS < live, (HIDDEN + DEPTH - 1) // DEPTH, 0)
    products = tile_products(hidden, weight, rows, sources, steps, vocab, HIDDEN, VOCAB_DIM, ROWS, COLUMNS, DEPTH)
    logits = finish(products, bias, sources, HAS_BIAS, SCALE, SOFTCAP, TEMPERATURE)

    wanted = tl.load(target + rows)
    maximum = tl.load(scalars + rows)
    log2_sum = tl.load(scalars + tokens + rows)
    constant = tl.load(scalars + 2 * tokens + rows)
    slope = tl.load(scalars + 3 * tokens + rows)
    onehot = tl.load(scalars + 4 * tokens + rows)
    shift = logits - maximum[:, None]
    probs = tl.exp2(shift * LOG2_E - log2_sum[:, None])
    if WITH_ENTROPY:
        gradient = probs * (constant[:, None] + slope[:, None] * shift)
    else:
        gradient = probs * constant[:, None]
    # Before the rounding: a confident target (p near 1) keeps its small gradient.
    gradient = tl.where(columns[None, :] == wanted[:, None], gradient + onehot[:, None], gradient)
    if SOFTCAP > 0.0:
        capped = logits * (TEMPERATURE / SOFTCAP)
        gradient = gradient * (1.0 - capped * capped)
    alive = (constant != 0.0) | (slope != 0.0) | (onehot != 0.0)
    gradient = tl.where(alive[:, None] & (columns < width)[None, :], gradient, 0.0)
    into = out + (rows.to(tl.int64) * WINDOW)[:, None] + local[None, :]
    if WINDOW % COLUMNS == 0:
        tl.store(into, gradient.to(out.dtype.element_ty))
    else:
        tl.store(into, gradient.to(out.dtype.element_ty), mask=(local < WINDOW)[None, :])
