"""Which work tiles a program computes, in which order.

A program takes tiles program, program + num_programs, ... of all tiles, and with split-K a part of K of each.

Stream-K: where tiles do not divide evenly among the programs, the last `num_streamed` tiles are laid end to end along
K, as one row of num_streamed * k_blocks K blocks, and every program takes an equal share of that row, at least one
block (`configs.num_streamed`). A share may begin and end within a tile. The program whose share holds a tile's last K
block finishes the tile: it waits for the partial sums of the programs before it, adds them in their order, and applies
the epilogue. A program works on its share from the end to the beginning: what others wait for comes first, what it may
have to wait for last. In the other order each program would wait for all those before it. No program waits for one
with a higher index, so that this ends even if not all programs run at the same time.
"""

from typing import Any, NamedTuple

from flashkernel.core.gluon import gl, gluon
from flashkernel.ops.matmul.tiles_triton import tile_position


class Schedule(NamedTuple):
    """All work tiles. Splits are the outermost index, then batch entries."""

    m_tiles: Any
    n_tiles: Any
    k_blocks: Any
    batch: Any
    num_splits: Any
    num_streamed: Any  # tiles that are shared out along K (STREAM_K); the others are a multiple of the programs


class WorkTile(NamedTuple):
    """`entry` is split * batch + batch entry: which matrix of C (or of the partial sums) the tile is part of."""

    entry: Any
    batch: Any
    row: Any  # in units of BLOCK_M, as column of BLOCK_N
    column: Any
    k_begin: Any  # in units of BLOCK_K
    k_end: Any
    first_program: Any  # the first that has a share of this tile (STREAM_K)


@gluon.jit
def _num_tiles(schedule):
    return schedule.m_tiles * schedule.n_tiles * schedule.batch * schedule.num_splits


@gluon.jit
def _stream_share(schedule):
    """Returns the K blocks of all streamed tiles that are this program's: (first, end)."""
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    blocks = schedule.num_streamed * schedule.k_blocks
    return program * blocks // num_programs, (program + 1) * blocks // num_programs


@gluon.jit
def num_work_tiles(schedule, STREAM_K: gl.constexpr):
    """Returns how many work tiles this program has."""
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    whole = _num_tiles(schedule) - schedule.num_streamed
    count = (whole + num_programs - 1 - program) // num_programs
    if STREAM_K:
        first, end = _stream_share(schedule)
        parts = (end + schedule.k_blocks - 1) // schedule.k_blocks - first // schedule.k_blocks
        count += gl.where(end > first, parts, 0)
    return count


@gluon.jit
def work_tile(number, schedule, GROUP_M: gl.constexpr, STREAM_K: gl.constexpr):
    """Returns this program's work tile `number`."""
    program, num_programs = gl.program_id(0), gl.num_programs(0)
    tiles = schedule.m_tiles * schedule.n_tiles
    index = program + number * num_programs
    first_program = program
    if STREAM_K:
        whole = _num_tiles(schedule) - schedule.num_streamed
        first, end = _stream_share(schedule)
        is_streamed = number >= whole // num_programs
        # From the tile of the share's last K block down to that of its first.
        last = (end - 1) // schedule.k_blocks
        streamed = gl.minimum(gl.maximum(last - (number - whole // num_programs), 0), gl.maximum(last, 0))
        index = gl.where(is_streamed, whole + streamed, index)
        origin = streamed * schedule.k_blocks  # the tile's first K block
        k_begin = gl.where(is_streamed, gl.maximum(first - origin, 0), 0)
        k_end = gl.where(is_streamed, gl.minimum(end - origin, schedule.k_blocks), schedule.k_blocks)
        blocks = schedule.num_streamed * schedule.k_blocks
        first_program = gl.where(is_streamed, ((origin + 1) * num_programs - 1) // gl.maximum(blocks, 1), program)
        split = index * 0
        entry = index // tiles
        batch = entry
    else:
        entry = index // tiles
        split, batch = entry // schedule.batch, entry % schedule.batch
        k_begin = split * schedule.k_blocks // schedule.num_splits
        k_end = (split + 1) * schedule.k_blocks // schedule.num_splits
    row, column = tile_position(index % tiles, schedule.m_tiles, schedule.n_tiles, GROUP_M)
    return WorkTile(entry, batch, row, column, k_begin, k_end, first_program)
