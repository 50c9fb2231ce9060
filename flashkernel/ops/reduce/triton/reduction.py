"""Rows to numbers and back: `reduce_rows` makes one or two numbers of each row, `spread_rows` makes rows of those.

The running state of the columns read so far is a pair (a, b) per lane:

    sum, mean, weighted sum   a = sum of the values
    max                       a = largest value, b = how often it was visible
    logsumexp, softmax        a = largest value, b = sum of exp(value - a)

Pairs merge in any order, so the same code serves the values of one load, the lanes of a tile, the tiles of a long row
and the programs that share a very long one.
"""

import torch
import triton
import triton.language as tl

from flashkernel.blocks.pdl_triton import pdl_enter
from flashkernel.blocks.softmax_triton import LOG2E
from flashkernel.core import device, tune
from flashkernel.core.launch import launch, pdl_options
from flashkernel.ops.reduce import kinds
from flashkernel.ops.reduce.configs import REDUCE, SPREAD, splits_of
from flashkernel.ops.reduce.masks import PLAIN, Pair, Scores

MEAN = tl.constexpr(kinds.MEAN)
WEIGHTED = tl.constexpr(kinds.WEIGHTED)
MAX = tl.constexpr(kinds.MAX)
LOGSUMEXP = tl.constexpr(kinds.LOGSUMEXP)
SOFTMAX = tl.constexpr(kinds.SOFTMAX)


@triton.jit
def finite(largest, KIND: tl.constexpr):
    """`largest`, or 0 where subtracting it would give inf - inf: of nothing but -inf, and of +inf for logsumexp."""
    if KIND == LOGSUMEXP:
        return tl.where(tl.abs(largest) == float("inf"), 0.0, largest)
    else:
        return tl.where(largest == float("-inf"), 0.0, largest)


@triton.jit
def inverse(total):
    """1 / total, or 0 where nothing was added: a row that sees nothing gives zeros."""
    return tl.where(total == 0.0, 0.0, 1.0 / total)


@triton.jit
def visible_columns(row, width, seqlen_q, CAUSAL: tl.constexpr):
    """How many columns each row sees: query q of Q sees the first q + 1 + (width - Q)."""
    if CAUSAL:
        return tl.minimum(width, row % seqlen_q + 1 + width - seqlen_q)  # [ROWS], below 1 for a row that sees nothing
    else:
        return tl.zeros_like(row) + width


@triton.jit
def loadable(visible, column, width, CAUSAL: tl.constexpr):
    """Which columns to load to have the first `visible`: if causal up to 15 more, so that loads stay 16 bytes wide."""
    if CAUSAL:
        return (column < (visible + 15) // 16 * 16) & (column < width)
    else:
        return column < width


@triton.jit
def mask_offsets(row, layout):
    """Where each row's mask begins (`MaskLayout`)."""
    outer = row // (layout.middle * layout.inner) * layout.outer_stride
    middle = row // layout.inner % layout.middle * layout.middle_stride
    return outer + middle + row % layout.inner * layout.inner_stride


@triton.jit
def _accumulate(a, b, value, KIND: tl.constexpr, AXIS: tl.constexpr):
    """Merge a tile, [ROWS, LANES, GROUP] with AXIS 2 or [ROWS, GROUP, LANES] with AXIS 1, into pairs [ROWS, LANES]."""
    if KIND == MAX:
        largest = tl.maximum(a, tl.max(value, AXIS), propagate_nan=tl.PropagateNan.ALL)
        ties = tl.sum(tl.where(value == tl.expand_dims(largest, AXIS), 1.0, 0.0), AXIS)
        b = tl.where(a == largest, b, 0.0) + ties
        a = largest + tl.sum(tl.where(value != value, value, 0.0), AXIS)  # tl.max passes over NaN; this does not
    elif KIND > MAX:
        largest = tl.maximum(a, tl.max(value, AXIS))
        base = finite(largest, KIND)
        if KIND == LOGSUMEXP:
            # One multiply-add: what rounding `low` costs is less than the result's own.
            low = base * LOG2E
            b = b * tl.exp2(a * LOG2E - low) + tl.sum(tl.exp2(value * LOG2E - tl.expand_dims(low, AXIS)), AXIS)
        else:
            exponentials = tl.exp2((value - tl.expand_dims(base, AXIS)) * LOG2E)
            b = b * tl.exp2((a - base) * LOG2E) + tl.sum(exponentials, AXIS)
        a = largest
    else:
        a += tl.sum(value, AXIS)
    return a, b


@triton.jit
def _reduce_lanes(a, b, KIND: tl.constexpr):
    """Merge the lanes' pairs [ROWS, LANES] into one pair per row [ROWS]."""
    if KIND == MAX:
        largest = tl.max(a, 1) + tl.sum(tl.where(a != a, a, 0.0), 1)
        b = tl.sum(tl.where(a == largest[:, None], b, 0.0), 1)
        a = largest
    elif KIND > MAX:
        largest = tl.max(a, 1)
        b = tl.sum(b * tl.exp2((a - finite(largest, KIND)[:, None]) * LOG2E), 1)
        a = largest
    else:
        a = tl.sum(a, 1)
        b = a
    return a, b


@triton.jit
def _store_results(first, second, row, rows, a, b, width, KIND: tl.constexpr):
    """Store the results of whole rows: `first` always, `second` where the backward pass needs it."""
    there = row < rows
    if KIND == MAX:
        tl.store(first + row, a, mask=there)
        tl.store(second + row, tl.where(a == float("-inf"), width, b), mask=there)  # padding was -inf, too
    elif KIND == LOGSUMEXP:
        total = finite(a, KIND) + tl.log(b)
        tl.store(first + row, total, mask=there)
        tl.store(second + row, total, mask=there)
    elif KIND == MEAN:
        tl.store(first + row, a / width, mask=there)
    else:
        tl.store(first + row, a, mask=there)


@triton.jit
def reduce_rows(
    x, weight, mask, first, second,
    x_stride, weight_stride, rows, width, columns_per_program, scale, seqlen_q, mask_layout,
    KIND: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr, POSITIVE_SCALE: tl.constexpr, ALIGNED: tl.constexpr,
    RAW: tl.constexpr, NUM_STAGES: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Program (t, s) reduces the s-th `columns_per_program` columns of the rows of tile t; BLOCK divides that number.

    With RAW it stores the state: first = a and second = b, both [rows, splits]. With POSITIVE_SCALE, -inf, which stands
    for columns beyond the row, survives the scaling.
    """
    if PDL:
        pdl_enter()
    BLOCK: tl.constexpr = LANES * GROUP
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    start = tl.program_id(1).to(tl.int64) * columns_per_program
    here = (row < rows)[:, None]  # [ROWS, 1]
    visible = visible_columns(row, width, seqlen_q, CAUSAL)[:, None]  # [ROWS, 1]
    source = x + row[:, None] * x_stride + column  # [ROWS, BLOCK]
    nothing = float("-inf") if KIND >= MAX else 0.0
    a = tl.full([ROWS, LANES], nothing, tl.float32)
    b = tl.zeros([ROWS, LANES], tl.float32)
    if MASKED:
        offset = mask_offsets(row, mask_layout)[:, None]
    for begin in tl.range(start, tl.minimum(start + columns_per_program, width), BLOCK, num_stages=NUM_STAGES):
        inside = here & loadable(visible - begin, column, width - begin, CAUSAL)  # [ROWS, BLOCK]
        value = tl.load(source + begin, mask=inside, other=nothing).to(tl.float32)
        if KIND == WEIGHTED:
            factor = tl.load(weight + row[:, None] * weight_stride + begin + column, mask=inside, other=0.0)
            value *= factor.to(tl.float32)
        if KIND == SOFTMAX:
            value *= scale
            if MASKED:
                mask_at = offset + (begin + column) * mask_layout.column_stride
                unmasked = tl.load(mask + mask_at, mask=inside, other=0) != 0
                value = tl.where(unmasked, value, float("-inf"))
            if CAUSAL or not POSITIVE_SCALE:
                value = tl.where(column < visible - begin, value, float("-inf"))
        # A thread holds GROUP neighbors of a row it could load 16 bytes at a time, else columns LANES apart: either
        # way its group is merged without a word to other threads.
        if ALIGNED:
            a, b = _accumulate(a, b, tl.reshape(value, [ROWS, LANES, GROUP]), KIND, 2)
        else:
            a, b = _accumulate(a, b, tl.reshape(value, [ROWS, GROUP, LANES]), KIND, 1)
    a, b = _reduce_lanes(a, b, KIND)  # [ROWS]
    if RAW:
        partial = row * tl.num_programs(1) + tl.program_id(1)
        tl.store(first + partial, a, mask=row < rows)
        tl.store(second + partial, b, mask=row < rows)
    else:
        _store_results(first, second, row, rows, a, b, width, KIND)


@triton.jit
def finish_rows(
    partial_a, partial_b, first, second, rows, width, splits,
    KIND: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Merge the pairs [rows, splits] that the programs of a split row left, always in the same order."""
    if PDL:
        pdl_enter()
    row = tl.program_id(0) + tl.arange(0, 1)  # [1]
    split = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    inside = split < splits
    partial = row[:, None] * splits + split
    nothing = float("-inf") if KIND >= MAX else 0.0
    a = tl.load(partial_a + partial, mask=inside, other=nothing)
    b = tl.load(partial_b + partial, mask=inside, other=0.0)
    a, b = _reduce_lanes(a, b, KIND)
    _store_results(first, second, row, rows, a, b, width, KIND)


@triton.jit
def spread_rows(
    x, dy, mask, first, second, result,
    x_stride, dy_stride, rows, width, blocks, splits, scale, seqlen_q, mask_layout,
    KIND: tl.constexpr, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, SPLITS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """result[r, c] from x[r, c] and what its row was reduced to.

    max               dx = (x == first) * dy / second         second: how often the maximum occurs
    logsumexp         dx = exp(x - second) * dy               second: the logsumexp in float32
    softmax           y = exp(scale * x - a) / b              (a, b) merged from the pairs [rows, splits]
    softmax backward  dx = x * (dy - a) * scale               x: the softmax itself; a: sum(x * dy), merged likewise
    """
    if PDL:
        pdl_enter()
    program = tl.program_id(0)
    row = (program // blocks).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    begin = (program % blocks).to(tl.int64) * BLOCK
    column = tl.arange(0, BLOCK)[None, :]  # [1, BLOCK]
    here = row < rows
    visible = visible_columns(row, width, seqlen_q, CAUSAL)[:, None] - begin  # [ROWS, 1]
    inside = here[:, None] & (column < width - begin)  # [ROWS, BLOCK]
    there = here[:, None] & loadable(visible, column, width - begin, CAUSAL)
    value = tl.load(x + begin + row[:, None] * x_stride + column, mask=there, other=0.0).to(tl.float32)
    if KIND == MAX:
        share = tl.load(dy + row, mask=here, other=0.0).to(tl.float32) / tl.load(second + row, mask=here, other=1.0)
        largest = tl.load(first + row, mask=here, other=0.0).to(tl.float32)
        answer = tl.where(value == largest[:, None], 1.0, 0.0) * share[:, None]
    elif KIND == LOGSUMEXP:
        total = finite(tl.load(second + row, mask=here, other=0.0), SOFTMAX)
        gradient = tl.load(dy + row, mask=here, other=0.0).to(tl.float32)
        answer = tl.exp2((value - total[:, None]) * LOG2E) * gradient[:, None]
    else:
        split = tl.arange(0, SPLITS)[None, :]  # [1, SPLITS]
        partial = row[:, None] * splits + split
        given = here[:, None] & (split < splits)
        if KIND == SOFTMAX:
            a = tl.load(first + partial, mask=given, other=float("-inf"))
            b = tl.load(second + partial, mask=given, other=0.0)
            a, b = _reduce_lanes(a, b, SOFTMAX)  # [ROWS]
            unmasked = inside & (column < visible)
            if MASKED:
                offset = mask_offsets(row, mask_layout)
                mask_at = offset[:, None] + (begin + column) * mask_layout.column_stride
                bits = tl.load(mask + mask_at, mask=inside, other=0)
                unmasked &= bits != 0
            exponentials = tl.exp2((value * scale - finite(a, SOFTMAX)[:, None]) * LOG2E)
            answer = tl.where(unmasked, exponentials * inverse(b)[:, None], 0.0)
        else:
            gradient = tl.load(dy + begin + row[:, None] * dy_stride + column, mask=there, other=0.0).to(tl.float32)
            dot = tl.sum(tl.load(first + partial, mask=given, other=0.0), 1)
            answer = value * (gradient - dot[:, None]) * scale
    tl.store(result + begin + row[:, None] * width + column, answer, mask=inside)


def aligned(x: torch.Tensor) -> bool:
    """Whether Triton loads the rows of x 16 bytes at a time; else it loads single values."""
    return x.shape[1] % 16 == 0 and x.stride(0) % 16 == 0


def shape_of(x: torch.Tensor, reads: int = 1) -> dict[str, int]:
    """What the choice of a launch depends on; `reads` counts the tensors read along a row."""
    rows, width = x.shape
    return {"rows": rows, "width": width, "bytes": x.element_size(), "aligned": int(aligned(x)), "reads": reads}


def reduce(x: torch.Tensor, weight: torch.Tensor | None, kind: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, saved) of x [rows, width]: y in x's dtype; saved is for the backward of max and logsumexp, else empty."""
    (rows, width), (y, saved) = x.shape, kinds.new_outputs(x, kind)
    a, b = reduce_partials(x, weight, kind, whole=(y, saved))
    if a is not y:
        splits = a.shape[1]
        launch(
            finish_rows, (rows,), a, b, y, saved, rows, width, splits,
            KIND=kind, BLOCK=tune.power_of_2(splits), num_warps=1, **pdl_options(device.properties(x.device)),
        )  # fmt: skip
    return y, saved


def reduce_partials(
    x: torch.Tensor, weight: torch.Tensor | None, kind: int, scores: Scores = PLAIN, whole: Pair | None = None
) -> Pair:
    """The pairs (a, b), each [rows, splits], of x [rows, width]; or `whole`, filled, where one program a row will do.

    `weight` is [width], or [rows, width] for one of its own per row.
    """
    (rows, width), (scale, seqlen_q, mask) = x.shape, scores
    props = device.properties(x.device)
    group = 16 // x.element_size()  # columns in a 16-byte load
    shape = {**shape_of(x, reads=1 if weight is None else 2), "powers": int(kind > kinds.MAX)}
    config = tune.pick(REDUCE, props, shape)
    block = max(group, config.block)
    tiles = tune.ceil_div(rows, config.rows)
    columns_per_program, splits = splits_of(config, props, tiles, width, block)
    pair = whole
    if pair is None or splits > 1:
        a, b = torch.empty((2, rows, splits), dtype=torch.float32, device=x.device).unbind(0)
        pair = a, b
    weight_stride = weight.stride(0) if weight is not None and weight.ndim == 2 else 0
    launch(
        reduce_rows, (tiles, splits),
        x, weight, mask.tensor, *pair,
        x.stride(0), weight_stride, rows, width, columns_per_program, scale, seqlen_q, mask.layout,
        KIND=kind, MASKED=mask.tensor is not None, CAUSAL=seqlen_q > 0, POSITIVE_SCALE=scale > 0,
        ALIGNED=aligned(x), RAW=pair is not whole, NUM_STAGES=config.num_stages if columns_per_program > block else 1,
        ROWS=config.rows, LANES=block // group, GROUP=group, num_warps=config.num_warps, **pdl_options(props, x.nbytes),
    )  # fmt: skip
    return pair


def reduce_backward(dy: torch.Tensor, x: torch.Tensor, y: torch.Tensor, saved: torch.Tensor, kind: int) -> torch.Tensor:
    """dx [rows, width] of max or logsumexp, from dy [rows], x [rows, width] and what the forward pass gave."""
    return spread(x, dy, (y, saved), kind)


def spread(
    x: torch.Tensor, dy: torch.Tensor | None, pair: Pair, kind: int, scores: Scores = PLAIN
) -> torch.Tensor:  # fmt: skip
    """A tensor like x [rows, width]; dy is [rows] or [rows, width], the pair's are [rows] or [rows, splits]."""
    (rows, width), (first, second), (scale, seqlen_q, mask) = x.shape, pair, scores
    result = torch.empty((rows, width), dtype=x.dtype, device=x.device)
    props = device.properties(x.device)
    config = tune.pick(SPREAD, props, shape_of(x))
    blocks = tune.ceil_div(width, config.block)
    splits = first.shape[1] if first.ndim == 2 else 1
    dy_stride = dy.stride(0) if dy is not None and dy.ndim == 2 else 0
    launch(
        spread_rows, (tune.ceil_div(rows, config.rows) * blocks,),
        x, dy, mask.tensor, first, second, result,
        x.stride(0), dy_stride, rows, width, blocks, splits, scale, seqlen_q, mask.layout,
        KIND=kind, MASKED=mask.tensor is not None, CAUSAL=seqlen_q > 0,
        ROWS=config.rows, BLOCK=config.block, SPLITS=tune.power_of_2(splits),
        num_warps=config.num_warps, **pdl_options(props, 2 * x.nbytes),
    )  # fmt: skip
    return result
