"""How the tiles of a product are divided among thread blocks (Stream-K), as kernel.cu does it.

A tile is a number of steps along the sum. The first `whole` tiles go to blocks as they are, one for each block and
wave. The steps of the remaining tiles are one list, of which every block takes an equal share, so that all finish
together; a tile may be cut. Of a tile that is cut, the last block to arrive adds the parts in the order of the blocks.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


class Segment(NamedTuple):
    """Steps `begin` to `end` of a tile."""

    tile: int
    begin: int
    end: int


@dataclass(frozen=True)
class Schedule:
    """`blocks` thread blocks share `tiles` tiles of `steps` steps."""

    blocks: int
    tiles: int
    whole: int
    steps: int

    @property
    def units(self) -> int:
        """Steps of the tiles that are shared."""
        return (self.tiles - self.whole) * self.steps

    def first_unit(self, block: int) -> int:
        """Where the share of a block begins."""
        return self.units * block // self.blocks

    def block_of(self, unit: int) -> int:
        """The block whose share has a unit."""
        return ((unit + 1) * self.blocks - 1) // self.units

    def segments(self, block: int) -> Iterator[Segment]:
        """The work of a block, in order."""
        for tile in range(block, self.whole, self.blocks):
            yield Segment(tile, 0, self.steps)
        unit, last = self.first_unit(block), self.first_unit(block + 1)
        while unit < last:
            begin = unit % self.steps
            end = min(self.steps, begin + last - unit)
            yield Segment(self.whole + unit // self.steps, begin, end)
            unit += end - begin


def whole_tiles(blocks: int, tiles: int) -> int:
    """Tiles that are not cut: full waves, but for the last one, whose steps fill up the remaining tiles' shares."""
    waves, left = divmod(tiles, blocks)
    return tiles if left == 0 else max(0, waves - 1) * blocks
