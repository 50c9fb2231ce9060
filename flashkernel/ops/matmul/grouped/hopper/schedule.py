"""Which work tile belongs to which group of rows, found on the device from the group offsets.

Group g has cdiv(rows of g, BLOCK_M) row tiles; row tiles are numbered through all groups, so that none straddles two
groups and an empty group has none. The rows behind the last group are one more group, number `groups`.

A program takes work tiles in ascending order. It finds the group of its first one with vectors over all groups
(`start_schedule`, before the warps divide), and steps from group to group after that (`advance`).
"""

from typing import Any, NamedTuple

from flashkernel.core.gluon import gl, gluon, load_tile


class GroupCursor(NamedTuple):
    """A group: its number, its rows [begin, end), and the row tiles of all groups before it."""

    group: Any
    begin: Any
    end: Any
    tiles_before: Any


class GroupSchedule(NamedTuple):
    """All work tiles of a launch. Row tiles are the outer index, columns the inner one."""

    offsets: Any  # address of int32 [groups + 1]
    groups: Any
    rows: Any  # of all groups, and behind them
    n_tiles: Any  # tiles of columns
    num_work_tiles: Any
    first_work_tile: Any  # of this program
    first: Any  # GroupCursor of the program's first work tile


@gluon.jit
def _add(a, b):
    return a + b


@gluon.jit
def start_schedule(offsets, groups, rows, n_tiles, BLOCK_M: gl.constexpr, GROUPS: gl.constexpr):
    """Returns the GroupSchedule of this program, whose four warps all take part. GROUPS > groups is a power of two."""
    LAYOUT: gl.constexpr = gl.BlockedLayout([GROUPS // 128 if GROUPS > 128 else 1], [32], [4], [0])
    group = gl.arange(0, GROUPS, LAYOUT)
    begins = gl.load(offsets + group, mask=group <= groups, other=0)
    ends = gl.load(offsets + group + 1, mask=group < groups, other=0)
    ends = gl.where(group == groups, rows, ends)
    tiles = gl.where(ends > begins, (ends - begins + BLOCK_M - 1) // BLOCK_M, 0)
    tiles_until = gl.associative_scan(tiles, 0, _add)
    # A sum, which comes to the warps through shared memory: the compiler would read the program's id ahead of all of
    # them, and has no register for it there.
    first_work_tile = gl.sum(gl.where(group == 0, gl.program_id(0), 0), 0)
    row_tile = first_work_tile // n_tiles
    found = gl.sum((tiles_until <= row_tile).to(gl.int32), 0)
    mine = group == found
    first = GroupCursor(
        found,
        gl.sum(gl.where(mine, begins, 0), 0),
        gl.sum(gl.where(mine, ends, 0), 0),
        gl.sum(gl.where(mine, tiles_until - tiles, 0), 0),
    )
    return GroupSchedule(offsets, groups, rows, n_tiles, gl.sum(tiles, 0) * n_tiles, first_work_tile, first)


@gluon.jit
def _row_tiles(begin, end, BLOCK_M: gl.constexpr):
    return (gl.maximum(end - begin, 0) + BLOCK_M - 1) // BLOCK_M


@gluon.jit
def advance(cursor, row_tile, schedule, BLOCK_M: gl.constexpr):
    """Returns the GroupCursor of a row tile that lies in the cursor's group or behind it."""
    group, begin, end, tiles_before = cursor
    tiles = _row_tiles(begin, end, BLOCK_M)
    while row_tile >= tiles_before + tiles:
        tiles_before += tiles
        group += 1
        begin = end
        behind = gl.load(schedule.offsets + gl.minimum(group + 1, schedule.groups))
        end = gl.where(group < schedule.groups, behind, schedule.rows)
        tiles = _row_tiles(begin, end, BLOCK_M)
    return GroupCursor(group, begin, end, tiles_before)


@gluon.jit
def column_tile(index, row_tile, n_tiles):
    """Returns the tile of columns of a work tile.

    Each row tile begins one column later than the one before it. Without that, a program whose stride is a multiple of
    n_tiles would have the same column in all its work tiles, for example always the last one, which is cheaper.
    """
    return (index + row_tile) % n_tiles


class WorkTile(NamedTuple):
    """Where a work tile lies."""

    cursor: Any  # GroupCursor
    first_row: Any
    column: Any  # of W; with GATE "halves", of each half


@gluon.jit
def work_tile(index, cursor, schedule, TRAITS: gl.constexpr):
    """Returns the WorkTile of an index; `cursor` is that of an earlier one."""
    BLOCK_M: gl.constexpr = TRAITS.ROWS * TRAITS.NUM_CONSUMERS
    COLUMNS: gl.constexpr = TRAITS.BLOCK_N // 2 if TRAITS.GATE == "halves" else TRAITS.BLOCK_N
    row_tile = index // schedule.n_tiles
    cursor = advance(cursor, row_tile, schedule, BLOCK_M)
    first_row = cursor.begin + (row_tile - cursor.tiles_before) * BLOCK_M
    return WorkTile(cursor, first_row, column_tile(index, row_tile, schedule.n_tiles) * COLUMNS)


@gluon.jit
def load_weights(args, group, column, block, stage, full, TRAITS: gl.constexpr):
    """Issues the TMA loads of a stage's tile of W, which signal `full`: columns `column` on; with GATE "halves" of up
    as well."""
    BLOCK_K: gl.constexpr = TRAITS.BLOCK_K
    HALVES: gl.constexpr = 2 if TRAITS.GATE == "halves" else 1
    for half in gl.static_range(HALVES):
        first = column + half * args.columns
        coords = [group, first, block * BLOCK_K] if TRAITS.B_K_MAJOR else [group, block * BLOCK_K, first]
        load_tile(args.weights, coords, full, args.buffers.b.index(stage * HALVES + half))
