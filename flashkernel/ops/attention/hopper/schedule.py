"""Device functions of the Hopper kernels: which item comes when, which tiles it walks over or hands back.

An item is (tile of queries, batch, first head), of the backward kernel (tile of keys, batch, key head), with a tile of
-1 after the last, in a table made on the host (order.py). The other tables are those of walks.py. A walk's state is
(tiles left after this one, place of the run, tile, end of the run, whether it is masked).

Consumers release tiles of keys and values through named barriers (`named_barrier_arrive`), on which the loading warp
waits before it loads the next tile there.
"""

from flashkernel.core.gluon import gl, gluon, mbarrier, named_barrier_arrive, named_barrier_sync


@gluon.jit
def after(place, STAGES: gl.constexpr):
    """The place in the pipeline behind another, (stage, phase): counted, since dividing takes more instructions."""
    stage, phase = place
    following = stage + 1
    return gl.where(following == STAGES, 0, following), gl.where(following == STAGES, phase ^ 1, phase)


@gluon.jit
def return_keys(stage, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """A warpgroup has read the keys of a stage. With more stages than there are named barriers for keys and values, it
    says so with the values: so many tiles ahead, that is soon enough."""
    if STAGES <= 4:
        named_barrier_arrive(stage, GROUPS)


@gluon.jit
def return_values(stage, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """A warpgroup has read the values of a stage, its keys before."""
    if STAGES <= 4:
        named_barrier_arrive(STAGES + stage, GROUPS)
    else:
        named_barrier_arrive(stage, GROUPS)


@gluon.jit
def claim_keys(loaded, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """The loading warp waits for room for the keys of a tile, after so many others."""
    if loaded >= STAGES:
        named_barrier_sync(loaded % STAGES, GROUPS)


@gluon.jit
def claim_values(loaded, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """The loading warp waits for room for the values of a tile whose keys have theirs."""
    APART: gl.constexpr = STAGES <= 4
    if APART and loaded >= STAGES:
        named_barrier_sync(STAGES + loaded % STAGES, GROUPS)


@gluon.jit
def claim_all(loaded, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """The loading warp waits until all tiles have been handed back."""
    for more in gl.static_range(STAGES):
        claim_keys(loaded + more, GROUPS, STAGES)
        claim_values(loaded + more, GROUPS, STAGES)


@gluon.jit
def skip(barriers, place, count, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """Hand back tiles that only the other warpgroups need."""
    k_full, v_full = barriers
    while count > 0:
        stage, phase = place
        mbarrier.wait(k_full.index(stage), phase)
        return_keys(stage, GROUPS, STAGES)
        mbarrier.wait(v_full.index(stage), phase)
        return_values(stage, GROUPS, STAGES)
        place = after(place, STAGES)
        count -= 1
    return place


@gluon.jit
def item_at(orders, step):
    """A program's item, from the table: nothing is divided."""
    place = orders + step * 3
    return gl.load(place), gl.load(place + 1), gl.load(place + 2)


@gluon.jit
def place_of(item, tables, w: gl.constexpr, GROUPS: gl.constexpr):
    """Where the tables have what they know of an item, or of any where there is none, for warpgroup `w`."""
    _, _, _, by_batch, by_head = tables
    tile, b, h = item
    return (b.to(gl.int64) * by_batch + h * by_head + gl.maximum(tile, 0)) * GROUPS + w


@gluon.jit
def first_query(tile, w, queries, GROUPS: gl.constexpr, PART: gl.constexpr):
    """The first of the PART queries of warpgroup `w`. With three warpgroups they seldom come out even; those that have
    none are then the first of the first tile (`spare_first`), whose walk is the shortest under a causal mask, and begin
    behind the last query."""
    first = (tile * GROUPS + w) * PART
    if GROUPS == 3:
        parts = (queries + PART - 1) // PART
        first -= (3 - parts % 3) % 3 * PART
        first = gl.where(first < 0, queries, first)
    return first


@gluon.jit
def plan(place, tables):
    """(tiles handed back at first, the state of a walk at its first tile; -1 tiles left where there is none)."""
    runs, plans, most_runs, _, _ = tables
    first = (place * most_runs * 3).to(gl.int32)
    state = (gl.load(plans + place * 3 + 1) - 1, first, gl.load(runs + first), gl.load(runs + first + 1),
             gl.load(runs + first + 2))  # fmt: skip
    return gl.load(plans + place * 3), state


@gluon.jit
def further(run, index, end, masked, runs):
    """One tile further: (place of the run, tile, end of the run, whether it is masked)."""
    index += 1
    if index == end:  # the next run
        run += 3
        index = gl.load(runs + run)
        end = gl.load(runs + run + 1)
        masked = gl.load(runs + run + 2)
    return run, index, end, masked


@gluon.jit
def ahead(state, tables):
    """The state of a walk one tile further."""
    left, run, index, end, masked = state
    runs, _, _, _, _ = tables
    if left > 0:
        run, index, end, masked = further(run, index, end, masked, runs)
    return left - 1, run, index, end, masked


@gluon.jit
def hop_to(item, item_next, tables, w: gl.constexpr, GROUPS: gl.constexpr, STAGES: gl.constexpr):
    """How many tiles to hand back between the last tile of an item and the first of the next; STAGES - 1 where the
    next one must not begin before this one has ended.

    The values of the item's last tile are held meanwhile, while the next item's first tile and the keys after it are
    awaited: with STAGES - 1 tiles between them, those could never be loaded, and with one less neither where keys are
    handed back with the values.
    """
    _, plans, _, _, _ = tables
    place = place_of(item, tables, w, GROUPS)
    place_next = place_of(item_next, tables, w, GROUPS)
    own = gl.load(plans + place * 3 + 1)
    trail = gl.load(plans + place * 3 + 2)
    lead = gl.load(plans + place_next * 3)
    own_next = gl.load(plans + place_next * 3 + 1)
    both = (own > 0) & (own_next > 0) & (item_next[0] >= 0)
    FARTHEST: gl.constexpr = STAGES - 2 if STAGES <= 4 else STAGES - 3
    return gl.where(both & (trail + lead <= FARTHEST), trail + lead, STAGES - 1)
