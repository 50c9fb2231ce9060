"""Device functions of the Hopper forward kernels: which item comes when, which tiles it walks over or hands back.

With an order made on the host (order.py), items are numbers, line * tiles + tile; the tables are those of walks.py. A
walk's state is (item, tiles left in it, place of the run, tile, end of the run, whether it is masked).
"""

from flashkernel.core.gluon import gl, gluon, mbarrier


@gluon.jit
def skip(barriers, used, count, STAGES: gl.constexpr):
    """Hand back tiles that only the other warpgroups need."""
    k_full, k_empty, v_full, v_empty = barriers
    for _ in range(count):
        stage = used % STAGES
        phase = (used // STAGES) & 1
        mbarrier.wait(k_full.index(stage), phase)
        mbarrier.arrive(k_empty.index(stage), count=1)
        mbarrier.wait(v_full.index(stage), phase)
        mbarrier.arrive(v_empty.index(stage), count=1)
        used += 1
    return used


@gluon.jit
def item(number, tiles, heads, PACK: gl.constexpr):
    """(tile, batch, first head) of an item; of the first one where there is none."""
    number = gl.maximum(number, 0)
    line = number // tiles
    b = line // (heads // PACK)
    return number - line * tiles, b, (line - b * (heads // PACK)) * PACK


@gluon.jit
def place_of(number, shape, tables, w: gl.constexpr, GROUPS: gl.constexpr, PACK: gl.constexpr):
    """Where the tables have what they know of an item for warpgroup `w`."""
    _, tiles, heads, _, _ = shape
    _, _, _, by_batch, by_head = tables
    tile, b, h = item(number, tiles, heads, PACK)
    return (b.to(gl.int64) * by_batch + h * by_head + tile) * GROUPS + w


@gluon.jit
def plan(place, tables):
    """(tiles walked over, where the runs are, the first run, its end and whether it is masked)."""
    runs, plans, most_runs, _, _ = tables
    first = (place * most_runs * 3).to(gl.int32)
    return (gl.load(plans + place * 3 + 1), first, gl.load(runs + first), gl.load(runs + first + 1),
            gl.load(runs + first + 2))  # fmt: skip


@gluon.jit
def hop_to(number, number_next, shape, tables, w: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr,
         PACK: gl.constexpr):  # fmt: skip
    """How many tiles to hand back between the last tile of an item and the first of the next; STAGES - 1 where there
    is no next one.

    The values of the item's last tile are held meanwhile, while the next item's first tile and the keys after it are
    awaited. With so many tiles between them, those could never be loaded: STAGES - 1 stands for that as well.
    """
    _, plans, _, _, _ = tables
    place = place_of(number_next, shape, tables, w, GROUPS, PACK)
    lead = gl.load(plans + place * 3)
    own = gl.load(plans + place * 3 + 1)
    trail = gl.load(plans + place_of(number, shape, tables, w, GROUPS, PACK) * 3 + 2)
    return gl.where((number_next >= 0) & (own > 0), gl.minimum(trail + lead, STAGES - 1), STAGES - 1)


@gluon.jit
def ahead(step, state, shape, tables, w: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr, PACK: gl.constexpr,
           FLAT: gl.constexpr):  # fmt: skip
    """The state of a walk one tile further, and, when that begins an item, how many tiles to hand back before it;
    STAGES - 1 where the walk is over."""
    number, left, run, index, end, masked = state
    orders, _, _, _, _ = shape
    runs, _, _, _, _ = tables
    hop = gl.to_tensor(STAGES - 1)
    if left == 0:
        if FLAT:
            following = gl.load(orders + step + 1)
            hop = hop_to(number, following, shape, tables, w, GROUPS, STAGES, PACK)
            left, run, index, end, masked = plan(place_of(following, shape, tables, w, GROUPS, PACK), tables)
            number = following
    else:
        index += 1
        if index == end:  # the next run
            run += 3
            index = gl.load(runs + run)
            end = gl.load(runs + run + 1)
            masked = gl.load(runs + run + 2)
    return (number, left - 1, run, index, end, masked), hop
