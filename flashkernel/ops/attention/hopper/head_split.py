"""Head sizes between powers of two: 80 = 64 + 16, 96 = 64 + 32, 192 = 128 + 64 columns.

Triton's tensors have power-of-two shapes, so tiles of such heads are padded in shared memory: to 128 or 256 columns.
The products need not be. With TAIL > 0 (`shape_buckets.head_tail`) only the first half of the padded COLUMNS and the
next TAIL columns are multiplied, by two WGMMAs. A product over the columns (S, dP) sums both. An accumulator of COLUMNS
columns (O, dQ, dK, dV) becomes a `HeadPair`, whose right part takes fewer registers than padding would. With TAIL = 0
these functions are one WGMMA.

A wait counts products under way: `num_products(TAIL)` of each.
"""

from typing import Any, NamedTuple

from flashkernel.core.gluon import gl, gluon, warpgroup_mma, warpgroup_mma_wait


class HeadPair(NamedTuple):
    """An accumulator in two parts: the first COLUMNS / 2 columns, and the TAIL columns behind them."""

    left: Any
    right: Any


@gluon.constexpr_function
def num_products(TAIL):
    """Returns how many WGMMAs one of these functions issues."""
    return 2 if TAIL > 0 else 1


@gluon.constexpr_function
def left_columns(COLUMNS, TAIL):
    """Returns the columns of an accumulator, or of its left part."""
    return COLUMNS // 2 if TAIL > 0 else COLUMNS


@gluon.jit
def issue_over_columns(a, b, start, USE_START: gl.constexpr, COLUMNS: gl.constexpr, TAIL: gl.constexpr):
    """Issues a b^T, [64, rows of b], on top of `start` with USE_START. a is [64, COLUMNS], b [rows, COLUMNS], in shared
    memory."""
    if TAIL == 0:
        product = warpgroup_mma(a, b.permute((1, 0)), start, use_acc=USE_START, is_async=True)
    else:
        HALF: gl.constexpr = COLUMNS // 2
        left_b = b.slice(0, HALF, dim=1).permute((1, 0))
        left = warpgroup_mma(a.slice(0, HALF, dim=1), left_b, start, use_acc=USE_START, is_async=True)
        right_b = b.slice(HALF, TAIL, dim=1).permute((1, 0))
        product = warpgroup_mma(a.slice(HALF, TAIL, dim=1), right_b, left, is_async=True)
    return product


@gluon.jit
def zero_columns(COLUMNS: gl.constexpr, TAIL: gl.constexpr):
    """Returns an accumulator [64, COLUMNS] of zeros."""
    LEFT: gl.constexpr = left_columns(COLUMNS, TAIL)
    whole = gl.zeros([64, LEFT], gl.float32, gl.NVMMADistributedLayout([3, 0], [4, 1], [16, LEFT, 16]))
    if TAIL == 0:
        found = whole
    else:
        RIGHT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
        found = HeadPair(whole, gl.zeros([64, TAIL], gl.float32, RIGHT_LAYOUT))  # type: ignore[assignment]
    return found


@gluon.jit
def issue_columns(a, b, accumulator, COLUMNS: gl.constexpr, TAIL: gl.constexpr):
    """Issues accumulator += a b. a is an operand in registers for the (left) accumulator, b [rows, COLUMNS] in shared
    memory."""
    if TAIL == 0:
        issued = warpgroup_mma(a, b, accumulator, is_async=True)
    else:
        HALF: gl.constexpr = COLUMNS // 2
        RIGHT_LAYOUT: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, TAIL, 16])
        left = warpgroup_mma(a, b.slice(0, HALF, dim=1), accumulator.left, is_async=True)
        right_a = gl.convert_layout(a, gl.DotOperandLayout(0, RIGHT_LAYOUT, 2))  # the same registers
        right = warpgroup_mma(right_a, b.slice(HALF, TAIL, dim=1), accumulator.right, is_async=True)
        issued = HeadPair(left, right)
    return issued


@gluon.jit
def wait_columns(PENDING: gl.constexpr, issued, TAIL: gl.constexpr):
    """Waits for accumulator += a b until PENDING products are under way. Returns the accumulator."""
    if TAIL == 0:
        found = warpgroup_mma_wait(PENDING, deps=[issued])
    else:
        left, right = warpgroup_mma_wait(PENDING, deps=[issued.left, issued.right])
        found = HeadPair(left, right)
    return found


@gluon.jit
def wait_both(PENDING: gl.constexpr, first, second, FIRST_TAIL: gl.constexpr, SECOND_TAIL: gl.constexpr):
    """`wait_columns` of two accumulators, in the order of their issue."""
    if FIRST_TAIL == 0 and SECOND_TAIL == 0:
        found = warpgroup_mma_wait(PENDING, deps=[first, second])
    else:
        first_found = wait_columns(PENDING + num_products(SECOND_TAIL), first, FIRST_TAIL)
        found = first_found, wait_columns(PENDING, second, SECOND_TAIL)
    return found


@gluon.jit
def scale_rows(accumulator, scale, TAIL: gl.constexpr):
    """Returns the accumulator with its rows multiplied by scale [64]."""
    if TAIL == 0:
        found = accumulator * gl.convert_layout(scale, gl.SliceLayout(1, accumulator.type.layout))[:, None]
    else:
        left, right = accumulator
        found = HeadPair(
            left * gl.convert_layout(scale, gl.SliceLayout(1, left.type.layout))[:, None],
            right * gl.convert_layout(scale, gl.SliceLayout(1, right.type.layout))[:, None],
        )
    return found


@gluon.jit
def store_columns(tile, accumulator, COLUMNS: gl.constexpr, TAIL: gl.constexpr):
    """Stores an accumulator into a tile [64, COLUMNS] in shared memory. Columns behind a split head stay as they are:
    TMA does not store them."""
    if TAIL == 0:
        tile.store(accumulator.to(tile.dtype))
    else:
        tile.slice(0, COLUMNS // 2, dim=1).store(accumulator.left.to(tile.dtype))
        tile.slice(COLUMNS // 2, TAIL, dim=1).store(accumulator.right.to(tile.dtype))


@gluon.jit
def scale_accumulator(accumulator, factor, TAIL: gl.constexpr):
    """Returns accumulator * factor."""
    if TAIL == 0:
        found = accumulator * factor
    else:
        found = HeadPair(accumulator.left * factor, accumulator.right * factor)
    return found
