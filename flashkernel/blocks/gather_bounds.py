"""Bounds of what a mask reads from a table, over tiles of pairs."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.blocks.expression import Expression, Gather, Operation, Variable
from flashkernel.blocks.intervals import Interval, bounds


def gather_bounds(gather: Gather, known: dict[str, Interval], sizes: dict[str, tuple[int, int]]) -> Interval:
    """Least and most of a table over a tile.

    Exact where an index along q or k is the position itself or position // block (of a size that goes with the tile's)
    and no two of them follow the same position, and where a tile's indices cover at most two entries of each dim.
    """
    table = gather.table
    if table.numel() == 0:
        return Interval(0, 0)
    fixed = {name: interval.low for name, interval in known.items() if name not in ("q", "k")}
    followed = [_direct_index(index, sizes) for index in gather.indices]
    names = [one.name for one in followed if one is not None]
    if len(set(names)) < len(names) or any(
        one is None and ex.variables(index) & {"q", "k"} for one, index in zip(followed, gather.indices)
    ):
        return _corner_bounds(gather, known, sizes)
    low = high = table.view(torch.uint8) if table.dtype == torch.bool else table
    for dim, one in enumerate(followed):
        if one is not None:
            low, high = one.reduce(low, dim, torch.amin), one.reduce(high, dim, torch.amax)
    tile = {
        name: torch.arange(-(-sizes[name][0] // sizes[name][1]), device=table.device).view(view)
        for name, view in (("q", (1, 1, -1, 1)), ("k", (1, 1, 1, -1)))
    }
    indices = tuple(Variable(one.name) if one is not None else index for one, index in zip(followed, gather.indices))
    least, most = (ex.evaluate(Gather(reduced, indices), {**fixed, **tile}) for reduced in (low, high))
    return _as_bounds(least, most)


def _as_bounds(low: Tensor, high: Tensor) -> Interval:
    """Bounds in int64, which the arithmetic on them does not outgrow; NaN may be anything."""
    if not low.is_floating_point():
        return Interval(low.to(torch.int64), high.to(torch.int64))
    return Interval(low.nan_to_num(-math.inf, math.inf, -math.inf), high.nan_to_num(math.inf, math.inf, -math.inf))


@dataclass(frozen=True)
class _DirectIndex:
    """An index that is q or k, or that over `block`, where tiles are of `size` positions out of `length`."""

    name: str
    block: int
    length: int
    size: int

    def reduce(self, table: Tensor, dim: int, extreme: Callable[..., Tensor]) -> Tensor:
        """Entries along a dim by tiles; entries that are missing count as 0."""
        entries, tiles = -(-self.length // self.block), -(-self.length // self.size)
        if table.shape[dim] < entries:
            missing = list(table.shape)
            missing[dim] = entries - table.shape[dim]
            table = torch.cat([table, table.new_zeros(missing)], dim)
        table = table.narrow(dim, 0, entries)
        if self.block > self.size:  # each entry serves several tiles
            return table.repeat_interleave(self.block // self.size, dim).narrow(dim, 0, tiles)
        group = self.size // self.block
        whole = entries // group
        parts = [extreme(table.narrow(dim, 0, whole * group).unflatten(dim, (whole, group)), dim + 1)] if whole else []
        if whole < tiles:
            parts.append(extreme(table.narrow(dim, whole * group, entries - whole * group), dim, keepdim=True))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim) if parts else table


def _direct_index(index: Expression, sizes: dict[str, tuple[int, int]]) -> _DirectIndex | None:
    block = 1
    if isinstance(index, Operation) and index.name == "floordiv":
        index, divisor = index.args
        block = int(divisor.value)  # type: ignore[attr-defined]
    if not isinstance(index, Variable) or index.name not in sizes:
        return None
    length, size = sizes[index.name]
    return _DirectIndex(index.name, block, length, size) if size % block == 0 or block % size == 0 else None


def _corner_bounds(gather: Gather, known: dict[str, Interval], sizes: dict[str, tuple[int, int]]) -> Interval:
    """The values at the corners where a tile's indices cover at most two entries of a dim, else the whole table's."""
    table = gather.table.view(torch.uint8) if gather.table.dtype == torch.bool else gather.table
    intervals = [bounds(index, known, lambda inner: gather_bounds(inner, known, sizes)) for index in gather.indices]
    ends = [(ex.as_tensor(interval.low), ex.as_tensor(interval.high)) for interval in intervals]
    near = torch.ones((), dtype=torch.bool, device=table.device)
    for low, high in ends:
        near = near & (high - low <= 1).to(table.device)
    corners = [
        ex.evaluate(Gather(table, tuple(Variable(str(dim)) for dim in range(len(ends)))),
                    {str(dim): ends[dim][bit] for dim, bit in enumerate(bits)})
        for bits in itertools.product((0, 1), repeat=len(ends))
    ]  # fmt: skip
    near_bounds = _as_bounds(functools.reduce(torch.minimum, corners), functools.reduce(torch.maximum, corners))
    whole = table.to(ex.read_dtype(table))
    far_bounds = _as_bounds(whole.min(), whole.max())
    low, high = far_bounds.low.clamp(max=0), far_bounds.high.clamp(min=0)  # outside the table it is 0
    return Interval(torch.where(near, near_bounds.low, low), torch.where(near, near_bounds.high, high))
