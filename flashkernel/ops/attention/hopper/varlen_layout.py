"""Where the tile schedule of packed sequences (varlen_schedule.py) has its tables.

All sizes follow from the shapes of a call: the lengths of its sequences are on the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from flashkernel.core import tune
from flashkernel.ops.attention.hopper.pipeline import CONSUMER, RECORD, TileTables

MAX_HEAD_GROUP = 8  # heads that are worked on at the same time


class TileShape(NamedTuple):
    """How work tiles are cut: NUM_CONSUMERS blocks of BLOCK rows each, which visit blocks of VISITED."""

    BLOCK: int  # queries of a consumer; with TRANSPOSED keys
    VISITED: int  # keys of a visited block; with TRANSPOSED queries
    NUM_CONSUMERS: int = 1
    PAD_FRONT: bool = False  # consumers without rows are the first of a sequence (`block_ranges`)
    TRANSPOSED: bool = False  # work tiles are tiles of keys, as in the backward kernels

    @property
    def rows(self) -> int:
        return self.BLOCK * self.NUM_CONSUMERS

    def max_tiles(self, tokens: int, num_sequences: int) -> int:
        """Work tiles of a head at most, rounded up so that the tables are aligned."""
        return tune.ceil_div(tokens // self.rows + num_sequences + 1, 16) * 16


class Grid(NamedTuple):
    """How work tiles go to the persistent programs of a kernel.

    Attributes:
        num_programs: persistent programs.
        max_work_tiles: entries of a program's list, the end included.
        head_group: heads that are worked on at the same time; packed heads count once, and kv heads backward.
        num_groups: groups of them.
        pack_gqa: query heads that share a work tile.
        records: where the records begin in the table, behind the lists.
    """

    num_programs: int
    max_work_tiles: int
    head_group: int
    num_groups: int
    pack_gqa: int
    records: int

    @staticmethod
    def of(tiles: int, heads: int, pack_gqa: int, sms: int) -> Grid:
        """The grid of at most `tiles` work tiles for each of `heads` heads."""
        head_group = next(size for size in range(min(heads, MAX_HEAD_GROUP), 0, -1) if heads % size == 0)
        num_programs = min(sms, tiles * heads)
        most = (tiles * head_group // num_programs + 1) * (heads // head_group) + 2
        records = tune.ceil_div(2 * num_programs * most, 16) * 16
        return Grid(num_programs, most, head_group, heads // head_group, pack_gqa, records)


class VarlenShape(NamedTuple):
    """Sizes of a call: sequences, and tokens in all."""

    num_sequences: int
    tokens_q: int
    tokens_k: int


@dataclass(frozen=True)
class VarlenLayout:
    """Where the tables of both directions lie in the schedule, one int32 tensor: first those of the forward pass."""

    shape: VarlenShape
    forward: TileShape
    backward: TileShape
    heads: int
    kv_heads: int
    pack_gqa: int  # heads that share a work tile of the forward pass
    sms: int

    @property
    def forward_tiles(self) -> int:
        """Work tiles of a head at most."""
        return self.forward.max_tiles(self.shape.tokens_q, self.shape.num_sequences)

    @property
    def backward_tiles(self) -> int:
        return self.backward.max_tiles(self.shape.tokens_k, self.shape.num_sequences)

    @property
    def forward_grid(self) -> Grid:
        return Grid.of(self.forward_tiles, self.heads // self.pack_gqa, self.pack_gqa, self.sms)

    @property
    def backward_grid(self) -> Grid:
        return Grid.of(self.backward_tiles, self.kv_heads, 1, self.sms)

    @property
    def query_blocks(self) -> int:
        """Blocks of queries of a head: every sequence begins with a new one (`_make_query_blocks`)."""
        return self.shape.tokens_q // self.backward.VISITED + self.shape.num_sequences + 2

    @property
    def forward_size(self) -> int:
        """Elements of the table of the forward pass."""
        return _size(self.forward, self.forward_tiles, self.forward_grid)

    @property
    def backward_size(self) -> int:
        return _size(self.backward, self.backward_tiles, self.backward_grid)

    @property
    def size(self) -> int:
        """Elements of the schedule."""
        return self.forward_size + self.backward_size + 2 * self.query_blocks

    def forward_table(self, schedule: Tensor) -> Tensor:
        return schedule[: self.forward_size]

    def backward_table(self, schedule: Tensor) -> Tensor:
        return schedule[self.forward_size : self.forward_size + self.backward_size]

    def query_blocks_table(self, schedule: Tensor) -> Tensor:
        """[blocks, 2]: the first row of each block of queries in the packed tensor, and its rows."""
        start = self.forward_size + self.backward_size
        return schedule[start : start + 2 * self.query_blocks]


def _size(tile: TileShape, tiles: int, grid: Grid) -> int:
    records = tiles * (RECORD.value + tile.NUM_CONSUMERS * CONSUMER.value)
    return grid.records + tune.ceil_div(records, 16) * 16


def kernel_arguments(table: Tensor, grid: Grid) -> tuple[Any, ...]:
    """Kernel arguments: tables, of which packed sequences have one, sizes of the others, and max_work_tiles."""
    return TileTables(None, None, None, None, table), None, None, None, None, grid.max_work_tiles
