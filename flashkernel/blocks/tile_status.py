"""The kernel that finds which tiles of a mask with tables are empty, partial or full: `Mask.tiles` in one launch.

The bounds of the mask's condition over a tile (blocks/intervals.py) are worked out on expressions instead of tensors,
and printed as a Triton function. The bounds of a table over a tile are the least and the most of what the mask reads in
it: of the queries, the keys or the pairs of the tile, whichever the indices depend on.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.blocks.expression import Constant, Expression, Gather, Operation, Variable
from flashkernel.blocks.intervals import Interval, Truth, bounds
from flashkernel.blocks.mask_type import Mask
from flashkernel.blocks.nodes import FLOAT, INTEGER, Local, TooWide
from flashkernel.blocks.source import table_arguments, triton_source
from flashkernel.blocks.tile_ranges import SHORT_ROW
from flashkernel.blocks.tile_ranges_triton import TileMap, mask_block_ranges, mask_tile_ranges
from flashkernel.core import tune
from flashkernel.core.generate import jit_statements
from flashkernel.core.launch import launch

MAX_TILES = 64  # tiles of a row that a program looks at together
MAX_READS = 4096  # keys of these tiles, or entries of a table that stand for them, together
_PARAMETERS = "b, h, q_low, q_high, k_low, k_high, sq, sk, tables, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr"


@triton.jit
def _extremes(value, axis: tl.constexpr):
    """(least, most) along an axis; NaN may be anything."""
    if value.dtype.is_floating():
        unknown = value != value
        low = tl.min(tl.where(unknown, float("-inf"), value), axis)
        high = tl.max(tl.where(unknown, float("inf"), value), axis)
    else:
        wide = value.to(tl.int64)
        low, high = tl.min(wide, axis), tl.max(wide, axis)
    return low, high


@triton.jit
def _merged(low, high, other_low, other_high):
    return tl.minimum(low, other_low), tl.maximum(high, other_high)


@triton.jit
def _positions(low, high, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Positions of tiles that begin at `low` [tiles, 1], STEP apart, the last of each tile included."""
    COUNT: tl.constexpr = tl.constexpr((BLOCK + STEP - 1) // STEP + (STEP > 1))
    PADDED: tl.constexpr = triton.next_power_of_2(COUNT)
    return tl.minimum(low + tl.arange(0, PADDED)[None, :] * STEP, high)


@triton.jit
def _once(VALUE: tl.constexpr, b, h, sq, sk, tables):
    """Bounds of a table that is read by neither query nor key: [1]."""
    one = tl.zeros([1, 1], tl.int32)
    value = VALUE(b, h, one, one, sq, sk, tables)
    if value.dtype.is_floating():
        found = _extremes(value + one, 1)
    else:
        found = _extremes(value.to(tl.int64) + one, 1)
    return found


@triton.jit
def _of_queries(VALUE: tl.constexpr, b, h, q_low, q_high, sq, sk, tables, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Bounds of a table that is read by the query: [1]."""
    q = _positions(q_low + tl.zeros([1, 1], tl.int32), q_high, STEP, BLOCK)
    return _extremes(VALUE(b, h, q, q, sq, sk, tables), 1)


@triton.jit
def _of_keys(VALUE: tl.constexpr, b, h, k_low, k_high, sq, sk, tables, STEP: tl.constexpr, BLOCK: tl.constexpr):
    """Bounds of a table that is read by the key: [tiles]."""
    k = _positions(k_low[:, None], k_high[:, None], STEP, BLOCK)
    return _extremes(VALUE(b, h, k, k, sq, sk, tables), 1)


@triton.jit
def _of_pairs(
    VALUE: tl.constexpr, b, h, q_low, q_high, k_low, k_high, sq, sk, tables, STEP_Q: tl.constexpr,
    STEP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Bounds of a table that is read by both: [tiles]."""
    k = _positions(k_low[:, None], k_high[:, None], STEP_K, BLOCK_N)
    low, high = _extremes(VALUE(b, h, q_low, k, sq, sk, tables), 1)
    for row in range(1, (BLOCK_M + STEP_Q - 1) // STEP_Q + (STEP_Q > 1)):
        q = tl.minimum(q_low + row * STEP_Q, q_high)
        found_low, found_high = _extremes(VALUE(b, h, q, k, sq, sk, tables), 1)
        low, high = _merged(low, high, found_low, found_high)
    return low, high


@triton.jit(do_not_specialize=("heads", "seqlen_q", "seqlen_k", "num_m", "num_n"))
def mask_tile_status(
    status, tables, heads, seqlen_q, seqlen_k, num_m, num_n, BOUNDS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, TILES: tl.constexpr,
):  # fmt: skip
    """Status int8 [batch, heads, num_m, num_n] of TILES tiles of a row: EMPTY, PARTIAL or FULL."""
    chunks = tl.cdiv(num_n, TILES)
    program = tl.program_id(0)
    row = program // chunks
    m, n = row % num_m, program % chunks * TILES + tl.arange(0, TILES)  # [TILES]
    b, h = row // num_m // heads, row // num_m % heads
    q_low, k_low = m * BLOCK_M, n * BLOCK_N
    q_high, k_high = tl.minimum(q_low + BLOCK_M, seqlen_q) - 1, tl.minimum(k_low + BLOCK_N, seqlen_k) - 1
    some, every = BOUNDS(b, h, q_low, q_high, k_low, k_high, seqlen_q, seqlen_k, tables, BLOCK_M, BLOCK_N)
    inside = n < num_n
    some, every = inside & some, inside & every & (k_low + BLOCK_N <= seqlen_k)
    found = some.to(tl.int8) + (some & every).to(tl.int8)
    tl.store(status + row.to(tl.int64) * num_n + n, found, mask=inside)


def tile_status(mask: Mask, batch: int, heads: int, seqlen_q: int, seqlen_k: int, block_m: int, block_n: int) -> Tensor:
    """`Mask.tiles` of a mask with tables, on their device. Where a table is read by sums or products of indices, fewer
    tiles are called partial."""
    where, bounds_of = mask.tables[0].device, _bounds_function(mask)
    if bounds_of is None:
        return mask.tiles(batch, heads, seqlen_q, seqlen_k, block_m, block_n, where)
    batch, heads = batch if "b" in mask.depends else 1, heads if "h" in mask.depends else 1
    num_m, num_n = tune.ceil_div(seqlen_q, block_m), tune.ceil_div(seqlen_k, block_n)
    status = torch.empty((batch, heads, num_m, num_n), dtype=torch.int8, device=where)
    tiles = max(1, min(MAX_TILES, tune.power_of_2(num_n), MAX_READS // tune.power_of_2(block_n)))
    launch(
        mask_tile_status, (batch * heads * num_m * tune.ceil_div(num_n, tiles),),
        status, table_arguments(list(mask.tables)), heads, seqlen_q, seqlen_k, num_m, num_n,
        BOUNDS=bounds_of, BLOCK_M=block_m, BLOCK_N=block_n, TILES=tiles, num_warps=4,
    )  # fmt: skip
    return status


def make_tile_ranges(mask: Mask, sizes: tuple[int, ...], transposed: bool) -> tuple[Tensor, Tensor]:
    """The tensors of `TileRanges`, by two launches."""
    status = tile_status(mask, *sizes)
    tile_map, num_maps = _tile_map(status, transposed)
    max_ranges = max(1, tile_map.tiles)
    leading = (*status.shape[:2], tile_map.rows)
    table = torch.empty((*leading, max_ranges, 3), dtype=torch.int32, device=status.device)
    counts = torch.empty(leading, dtype=torch.int32, device=status.device)
    launch(
        mask_tile_ranges, (num_maps * tile_map.rows,), *tile_map, table, counts, max_ranges,
        SHORT_ROW=SHORT_ROW, TILES=tune.power_of_2(max_ranges), num_warps=4,
    )  # fmt: skip
    return table, counts


def make_block_ranges(
    mask: Mask, sizes: tuple[int, ...], num_consumers: int, transposed: bool, pad_front: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Ranges, counts, loads and load counts of work tiles of several consumers
    (ops/attention/hopper/block_ranges.py), by two launches."""
    status = tile_status(mask, *sizes)
    tile_map, num_maps = _tile_map(status, transposed)
    work_tiles, max_ranges = tune.ceil_div(tile_map.rows, num_consumers), max(1, tile_map.tiles)
    padding = work_tiles * num_consumers - tile_map.rows if pad_front else 0
    leading = (*status.shape[:2], work_tiles)

    def empty(*shape: int) -> Tensor:
        return torch.empty((*leading, *shape), dtype=torch.int32, device=status.device)

    tables = empty(num_consumers, max_ranges, 3), empty(num_consumers, 3), empty(max_ranges, 3), empty()
    launch(
        mask_block_ranges, (num_maps * work_tiles,), *tile_map, *tables, work_tiles, padding, max_ranges,
        NUM_CONSUMERS=num_consumers, TILES=tune.power_of_2(max_ranges), num_warps=4,
    )  # fmt: skip
    return tables


def _tile_map(status: Tensor, transposed: bool) -> tuple[TileMap, int]:
    """The status as the kernels take it, and its number of maps; with `transposed`, rows are tiles of keys."""
    batch, heads, rows, tiles = status.shape
    if transposed:
        return TileMap(status, tiles, rows, rows * tiles, 1, tiles), batch * heads
    return TileMap(status, rows, tiles, rows * tiles, tiles, 1), batch * heads


def _bounds_function(mask: Mask) -> Any:
    """The Triton function that gives (some, every) of a mask over tiles, the same for equal texts and dtypes; None if
    it would need constants that do not fit into 32 bits."""
    key = mask.text, *[table.dtype for table in mask.tables]
    if key not in _functions:
        try:
            _functions[key] = _Printer(list(mask.tables)).function(mask.expression)
        except TooWide:
            _functions[key] = None
    return _functions[key]


_functions: dict[tuple[Any, ...], Any] = {}


class _Printer:
    """Prints the bounds of a condition as the lines of a Triton function."""

    def __init__(self, tables: list[Tensor]) -> None:
        self.tables = tables
        self.lines: list[str] = []
        self.functions: dict[str, Any] = {}
        self.printed: dict[int, Expression] = {}  # by id of an expression: its name
        self.kept: list[Expression] = []  # so that no id is used twice
        self.gathers: dict[str, Interval] = {}

    def function(self, condition: Expression) -> Any:
        known = {name: Interval(Local(f"{name}64"), Local(f"{name}64")) for name in ("b", "h", "sq", "sk")}
        known |= {name: Interval(Local(f"{name}_low64"), Local(f"{name}_high64")) for name in ("q", "k")}
        # Of one element, not scalars: Triton's interpreter does not broadcast a scalar condition.
        self.lines += [f"{name}64 = tl.zeros([1], tl.int64) + {name}" for name in ("b", "h", "sq", "sk")]
        self.lines += [f"q_{end}64 = tl.zeros([1], tl.int64) + q_{end}" for end in ("low", "high")]
        self.lines += [f"k_{end}64 = tl.cast(k_{end}, tl.int64)" for end in ("low", "high")]
        truth: Truth = bounds(condition, known, self._gather)
        some, every = (self._named(ex.lift(value)) for value in (truth.some, truth.every))
        parts = ", ".join(f"(k_low == k_low) & ({triton_source(one, [])})" for one in (some, every))
        self.lines.append(f"return {parts}")
        return jit_statements("tile_bounds", _PARAMETERS, tuple(self.lines), tuple(self.functions.items()))

    def _named(self, expression: Expression) -> Expression:
        """The expression as a constant or a name; lines are printed once for what several others use."""
        if isinstance(expression, (Constant, Local)):
            return expression
        assert isinstance(expression, Operation)
        found = self.printed.get(id(expression))
        if found is None:
            operation = Operation(expression.name, tuple(self._named(arg) for arg in expression.args))
            found = Local(self._line(triton_source(operation, [])), expression.kind)
            self.printed[id(expression)] = found
            self.kept.append(expression)
        return found

    def _line(self, text: str) -> str:
        name = f"x{len(self.lines)}"
        self.lines.append(f"{name} = {text}")
        return name

    def _gather(self, gather: Gather) -> Interval:
        text = triton_source(gather, self.tables)
        if text in self.gathers:
            return self.gathers[text]
        read_by = ex.variables(gather) & {"q", "k"}
        value = f"value{len(self.functions)}"
        helper = {"": "", "q": "_of_queries", "k": "_of_keys", "kq": "_of_pairs"}["".join(sorted(read_by))]
        self.functions[value] = jit_statements(value, "b, h, q, k, sq, sk, tables", (f"return {text}",), ())
        low, high = (f"x{len(self.lines)}_{end}" for end in ("low", "high"))
        if not helper:
            self.lines.append(f"{low}, {high} = _once({value}, b, h, sq, sk, tables)")
            self.functions["_once"] = _once
        else:
            self.functions[helper] = globals()[helper]
            ranges = [f"{name}_{end}" for name in ("q", "k") if name in read_by for end in ("low", "high")]
            steps = [str(_step(gather, name)) for name in ("q", "k") if name in read_by]
            blocks = [block for name, block in (("q", "BLOCK_M"), ("k", "BLOCK_N")) if name in read_by]
            arguments = [value, "b", "h", *ranges, "sq", "sk", "tables", *steps, *blocks]
            self.lines.append(f"{low}, {high} = {helper}({', '.join(arguments)})")
        if gather.kind != FLOAT:
            self.lines += [f"{end} = tl.cast({end}, tl.int64)" for end in (low, high)]
        kind = FLOAT if gather.kind == FLOAT else INTEGER
        found = self.gathers[text] = Interval(Local(low, kind), Local(high, kind))
        return found


def _step(gather: Gather, name: str) -> int:
    """How far apart the positions are that the bounds of a table are read at: `block` where it is always read by
    position // block."""
    steps = {_block(index, name) for index in gather.indices if name in ex.variables(index)}
    return next(iter(steps)) if len(steps) == 1 else 1


def _block(index: Expression, name: str) -> int:
    if isinstance(index, Operation) and index.name == "floordiv":
        position, block = index.args
        if isinstance(position, Variable) and position.name == name and isinstance(block, Constant):
            return int(block.value)
    return 1
