"""Sampling in Triton: two launches, whatever the rows' settings are.

`chunk_stats` has a program for each chunk of each row. It applies penalties, biases and the mask of allowed tokens, and
reduces the chunk to its maximum, the place of it, and the sum of its exponentials. `sample_rows` has a program for each
row. A greedy row takes the best chunk's maximum. A row without top-k, top-p and min-p draws a chunk by the chunks' sums
and reads that chunk alone. Other rows search for the threshold that the kept logits exceed.

The search keeps an interval (low, high]: logits above `high` are kept, those up to `low` are not. A pass over the row
adds the weights (1 for top-k, probabilities for top-p) above seven pivots and so narrows the interval. It also collects
the logits of a range: in the first pass around an estimate from a sample of the row, then the interval itself. If the
threshold is in the range and its logits fit CAPACITY, they are bisected in registers, over the 32 bits of a float.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashkernel.blocks.pdl_triton import pdl_enter
from flashkernel.core import device, tune
from flashkernel.core.launch import launch, pdl_options
from flashkernel.ops.sampling.configs import SAMPLE
from flashkernel.ops.sampling.params import Settings, States

GROUP = 4  # neighbouring columns of a thread
CAPACITY = 8192  # logits that are bisected in registers
_LOWEST = tl.constexpr(-1e30)
_IN_PROMPT = tl.constexpr(1 << 30)
_INFINITY = tl.constexpr(float("inf"))
_LOG2E = tl.constexpr(1.4426950408889634)
_COARSE = tl.constexpr(1024)  # steps of 32-bit keys that an estimate may be off by
_NEAR = tl.constexpr(0.025)  # share of the row to either side of the estimate that the first pass collects: 5% of
_FAR = tl.constexpr(0.08)  # 128,256 fit CAPACITY, and so does what lies between _NEAR and _FAR


class RowSettings(NamedTuple):
    """Settings of each row, [rows] each; penalties [rows, 3]."""

    seeds: Any
    positions: Any
    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    penalties: Any


class StatePointers(NamedTuple):
    """What changes logits, by state."""

    rows: Any
    token_counts: Any
    bias_ids: Any
    bias_values: Any
    bias_until: Any
    allowed: Any
    restricted: Any


class ChunkStats(NamedTuple):
    """[rows, chunks] each: largest logit and its column, sum of exponentials below it, number of logits."""

    largest: Any
    place: Any
    total: Any
    count: Any


@triton.jit
def _read(values, row, DEFAULT: tl.constexpr):
    """The row's setting, or DEFAULT where it is left out."""
    if values is None:
        return tl.full([], DEFAULT, tl.float32)
    else:
        return tl.load(values + row).to(tl.float32)


@triton.jit
def _exp(x, largest, temperature):
    """exp((x - largest) / temperature)"""
    return tl.exp2((x - largest) * (_LOG2E / temperature))


@triton.jit
def _penalised(x, column, inside, row, state, vocab, settings, states):
    """Logits after the row's penalties."""
    repetition = tl.load(settings.penalties + row * 3)
    presence = tl.load(settings.penalties + row * 3 + 1)
    frequency = tl.load(settings.penalties + row * 3 + 2)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        count = tl.load(states.token_counts + state * vocab + column, mask=inside, other=0)
        output = count & (_IN_PROMPT - 1)
        x = tl.where(count != 0, tl.where(x > 0, x / repetition, x * repetition), x)
        x -= frequency * output.to(tl.float32) + tl.where(output > 0, presence, 0.0)
    return x


@triton.jit
def _biased(x, column, row, state, entries, settings, states):
    """Logits after the state's biases; entries end at the first id of -1."""
    position = tl.load(settings.positions + row)
    entry = 0
    more = entries > 0
    while more:
        token = tl.load(states.bias_ids + state * entries + entry)
        value = tl.load(states.bias_values + state * entries + entry)
        if states.bias_until is not None:
            until = tl.load(states.bias_until + state * entries + entry)
            value = tl.where(position < until, value, 0.0)
        x += tl.where(column == token, value, 0.0)
        entry += 1
        more = (token >= 0) & (entry < entries)
    return x


@triton.jit
def _restricted(state, states):
    """Whether the mask of allowed tokens applies."""
    if states.restricted is None:
        return state >= 0
    else:
        return tl.load(states.restricted + state) != 0


@triton.jit
def _changes(row, state, entries, settings, states):
    """Whether anything changes the row's logits."""
    found = False
    if states.allowed is not None:
        found = _restricted(state, states)
    if settings.penalties is not None:
        found |= tl.load(settings.penalties + row * 3) != 1.0
        found |= tl.load(settings.penalties + row * 3 + 1) != 0.0
        found |= tl.load(settings.penalties + row * 3 + 2) != 0.0
    if states.bias_ids is not None:
        found |= tl.load(states.bias_ids + state * entries, mask=entries > 0, other=-1) >= 0
    return found


@triton.jit
def chunk_stats(
    logits, changed, settings, states, stats, row_stride, vocab, chunks, entries, words,
    KEEP: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """KEEP stores the changed logits: of rows that change ("changed"), of all ("all"), or of none ("none")."""
    if PDL:
        pdl_enter()
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    state = tl.load(states.rows + row) if states.rows is not None else row
    column = chunk * CHUNK + tl.arange(0, CHUNK)  # [CHUNK]
    inside = column < vocab
    x = tl.load(logits + row * row_stride + column, mask=inside, other=-_INFINITY).to(tl.float32)
    if settings.penalties is not None:
        x = _penalised(x, column, inside, row, state, vocab, settings, states)
    if states.bias_ids is not None:
        x = _biased(x, column, row, state, entries, settings, states)
    if states.allowed is not None:  # noqa: SIM102
        if _restricted(state, states):
            word = tl.load(states.allowed + state * words + column // 32, mask=inside, other=0)
            x = tl.where(((word >> (column % 32)) & 1) != 0, x, -_INFINITY)
    if KEEP != "none":
        kept = (KEEP == "all") | _changes(row, state, entries, settings, states)
        tl.store(changed + row * vocab + column, x, mask=inside & kept)
    x = tl.where(inside & (x != x), _INFINITY, x)  # NaN voids the row, as an infinity does
    x = tl.where(x > _LOWEST, x, -_INFINITY)
    largest, place = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    temperature = _read(settings.temperature, row, 1.0)
    scale = tl.where(temperature > 0, temperature, 1.0)
    # A chunk without logits has the sum 0; an infinite maximum voids the row before its sum is read.
    exponentials = tl.where(x > -_INFINITY, _exp(x, largest, scale), 0.0)
    where = row * chunks + chunk
    tl.store(stats.largest + where, largest)
    tl.store(stats.place + where, chunk * CHUNK + place)
    tl.store(stats.total + where, tl.sum(exponentials, 0))
    tl.store(stats.count + where, tl.sum((x > -_INFINITY).to(tl.int32), 0))


@triton.jit
def _load(base, column, vocab):
    """Logits of these columns; -inf for those of probability 0. Adding 0 turns -0 into 0."""
    x = tl.load(base + column, mask=column < vocab, other=-_INFINITY).to(tl.float32)
    return tl.where(x > _LOWEST, x + 0.0, -_INFINITY)


@triton.jit
def _order(x):
    """int32 that sort as the floats x do."""
    bits = x.to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _value(key):
    """The float of a key; that of -1 is below 0, as -0 compares equal to 0."""
    bits = tl.where(key < 0, key ^ 0x7FFFFFFF, key)
    return tl.where(key == -1, -1.1754944e-38, bits.to(tl.float32, bitcast=True))


@triton.jit
def _weight(x, largest, temperature, COUNT: tl.constexpr):
    """1 for each logit (top-k), or its probability up to a factor (top-p); 0 for -inf."""
    if COUNT:
        return tl.where(x > -_INFINITY, 1.0, 0.0)
    else:
        return _exp(x, largest, temperature)


@triton.jit
def _pivot(low, high, spread, temperature, OFFSET: tl.constexpr, SHARE: tl.constexpr):
    """A pivot between low and high: at an offset below high if low is not known yet, else by its share of the way.

    After four passes it is the share of the floats between them: those near 0 would halve 150 times.
    """
    below, above = _order(low), _order(high)
    half = (((above >> 1) - (below >> 1)).to(tl.float32) * SHARE).to(tl.int32)  # the whole may exceed 31 bits
    by_order = _value(below + half + half)
    inside = tl.where(spread > 1e6, by_order, low + (high - low) * SHARE)
    return tl.where(low > _LOWEST, inside, high - OFFSET * spread * temperature)


@triton.jit
def _above(x, weight, pivot):
    """The weights above a pivot, [lanes] of [lanes, GROUP]."""
    return tl.sum(tl.where(x > pivot, weight, 0.0), 1)


@triton.jit
def _step(low, high, pivot, sums, target):
    """The interval after one more pivot."""
    weight = tl.sum(sums, 0)
    inside = (pivot > low) & (pivot < high)
    reaches = weight >= target
    return tl.where(inside & reaches, pivot, low), tl.where(inside & (not reaches), pivot, high)


@triton.jit
def _narrowed(key, weight, below, above, high_weight, target, EXACT: tl.constexpr):
    """The largest key whose weights above it, with `high_weight`, reach the target, by bisection of (below, above)."""
    more = above - 1 > below
    while more:
        middle = (below >> 1) + (above >> 1) + (below & above & 1)
        reaches = high_weight + tl.sum(tl.where(key > middle, weight, 0.0), 0) >= target
        below = tl.where(reaches, middle, below)
        above = tl.where(reaches, above, middle)
        if EXACT:
            more = above - 1 > below
        else:
            more = (above >> 1) - (below >> 1) > _COARSE
    return below


@triton.jit
def _bisect(collected, found, low, high, high_weight, target, largest, temperature, COUNT: tl.constexpr,
            CAPACITY: tl.constexpr):  # fmt: skip
    """The threshold among the collected logits."""
    index = tl.arange(0, CAPACITY)
    x = tl.load(collected + index, mask=index < found, other=-_INFINITY)
    weight = _weight(x, largest, temperature, COUNT)
    return _value(_narrowed(_order(x), weight, _order(low), _order(high), high_weight, target, True))


@triton.jit
def _ranked(key, exists, below, above, largest, rank):
    """The value above which so many of the sample's logits lie; `largest` for a rank that is not positive."""
    value = _value(_narrowed(key, exists, below, above, 0.0, rank, False))
    return tl.where(rank > 0, value, largest)


@triton.jit
def _estimate(base, vocab, largest, temperature, target, share, COUNT: tl.constexpr, SAMPLE: tl.constexpr,
              GROUP: tl.constexpr):  # fmt: skip
    """(far low, near low, near high, far high): values around the threshold of SAMPLE logits from all over the row."""
    index = tl.arange(0, SAMPLE)
    stride = vocab // (SAMPLE // GROUP) // GROUP * GROUP
    x = _load(base, index // GROUP * stride + index % GROUP, vocab)
    weight = _weight(x, largest, temperature, COUNT)
    if COUNT:
        wanted = target * SAMPLE / vocab
    else:
        wanted = share * tl.sum(weight, 0)
    key, below, above = _order(x), _order(largest * 0.0 + _LOWEST), _order(largest)
    exists = tl.where(x > -_INFINITY, 1.0, 0.0)
    estimate = _narrowed(key, weight, below, above, 0.0, wanted, False)
    rank = tl.sum(tl.where(key > estimate, exists, 0.0), 0)
    return (
        _ranked(key, exists, below, above, largest, rank + _FAR * SAMPLE),
        _ranked(key, exists, below, above, largest, rank + _NEAR * SAMPLE),
        _ranked(key, exists, below, above, largest, rank - _NEAR * SAMPLE),
        _ranked(key, exists, below, above, largest, rank - _FAR * SAMPLE),
    )


@triton.jit
def _threshold(base, collected, vocab, largest, temperature, low, target, share, COUNT: tl.constexpr,
               CHUNK: tl.constexpr, GROUP: tl.constexpr, CAPACITY: tl.constexpr, NUM_STAGES: tl.constexpr):  # fmt: skip
    """The value above which logits are kept: x is kept if the weights above it are less than the target.

    For probabilities (not COUNT) the target is `share` of all above `low`; `target` is then 0.
    """
    high = largest
    spread = target * 0.0 + 1.0
    from_low, to_high = low, high  # the range that a pass collects
    far_low, far_high = low, high
    estimated = (low <= _LOWEST) & (vocab > CAPACITY)
    if estimated:
        far_low, from_low, to_high, far_high = _estimate(
            base, vocab, largest, temperature, target, share, COUNT, 2 * CHUNK, GROUP
        )
    lane = tl.arange(0, CHUNK // GROUP)[:, None] * GROUP + tl.arange(0, GROUP)[None, :]  # [lanes, GROUP]
    searching = True
    while searching:
        p1 = tl.where(estimated, far_low, _pivot(low, high, spread, temperature, 14.0, 0.16))
        p2 = _pivot(low, high, spread, temperature, 8.0, 0.33)
        p3 = _pivot(low, high, spread, temperature, 4.5, 0.5)
        p4 = _pivot(low, high, spread, temperature, 2.0, 0.67)
        p5 = tl.where(estimated, far_high, _pivot(low, high, spread, temperature, 0.7, 0.84))
        zeros = tl.zeros([CHUNK // GROUP], tl.float32)
        s0, s1, s2, s3, s4, s5, s6, s7 = zeros, zeros, zeros, zeros, zeros, zeros, zeros, zeros
        found = 0
        for start in tl.range(0, vocab, CHUNK, num_stages=NUM_STAGES):
            x = _load(base, start + lane, vocab)
            weight = _weight(x, largest, temperature, COUNT)
            s0 += _above(x, weight, low)
            s1 += _above(x, weight, p1)
            s2 += _above(x, weight, p2)
            s3 += _above(x, weight, p3)
            s4 += _above(x, weight, p4)
            s5 += _above(x, weight, p5)
            s6 += _above(x, weight, from_low)
            s7 += _above(x, weight, to_high)
            taken = ((x > from_low) & (x <= to_high)).to(tl.int32)
            by_lane = tl.sum(taken, 1)
            before = tl.cumsum(by_lane, 0) - by_lane
            place = found + before[:, None] + tl.cumsum(taken, 1) - taken
            tl.store(collected + place, x, mask=(taken != 0) & (place < CAPACITY))
            found += tl.sum(by_lane, 0)
        if not COUNT:  # the share of what lies above the first `low`
            target = tl.where(target > 0, target, share * tl.sum(s0, 0))
        high_weight = tl.sum(s7, 0)
        holds = (tl.sum(s6, 0) >= target) & (high_weight < target)
        holds |= (from_low == low) & (to_high == high)
        if holds & (found <= CAPACITY):
            tl.debug_barrier()
            low = _bisect(
                collected, found, from_low, to_high, high_weight, target, largest, temperature, COUNT, CAPACITY
            )
            searching = False
        else:
            low_before, high_before = low, high
            low, high = _step(low, high, p1, s1, target)
            low, high = _step(low, high, p2, s2, target)
            low, high = _step(low, high, p3, s3, target)
            low, high = _step(low, high, p4, s4, target)
            low, high = _step(low, high, p5, s5, target)
            low, high = _step(low, high, from_low, s6, target)
            low, high = _step(low, high, to_high, s7, target)
            spread *= 32.0
            from_low, to_high, estimated = low, high, False
            # Neighbouring floats have no pivot between them: the logits left are equal, and are kept.
            searching = (low != low_before) | (high != high_before) | ((low <= _LOWEST) & (spread < 1e35))
    return low


@triton.jit
def _first_above(weights, place, target, END: tl.constexpr):
    """The first place whose cumulated weight exceeds the target, else the last with a weight; and the sum before it."""
    running = tl.cumsum(weights, 0)
    best = tl.min(tl.where((running > target) & (weights > 0), place, END), 0)
    last = tl.max(tl.where(weights > 0, place, -1), 0)
    best = tl.where(best == END, last, best)
    return best, tl.sum(tl.where(place < best, weights, 0.0), 0)


@triton.jit
def _draw(base, sums, low, least, largest, temperature, uniform, vocab, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """One token of the logits above `low` and at least `least`; `sums` are their probabilities by chunk, [CHUNKS]."""
    target = uniform * tl.sum(sums, 0)
    chunk, before = _first_above(sums, tl.arange(0, CHUNKS), target, CHUNKS)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = _load(base, column, vocab)
    weight = tl.where((x > low) & (x >= least), _exp(x, largest, temperature), 0.0)
    token, _ = _first_above(weight, column, target - before, 2147483647)
    return token


@triton.jit
def _chunk_sums(base, masses, low, least, largest, temperature, vocab, CHUNK: tl.constexpr, NUM_STAGES: tl.constexpr):
    """Stores the probabilities of the logits that are kept, by chunk."""
    lane = tl.arange(0, CHUNK)
    for start in tl.range(0, vocab, CHUNK, num_stages=NUM_STAGES):
        x = _load(base, start + lane, vocab)
        weight = tl.where((x > low) & (x >= least), _exp(x, largest, temperature), 0.0)
        tl.store(masses + start // CHUNK, tl.sum(weight, 0))


@triton.jit
def sample_rows(
    logits, changed, settings, states, stats, collected, masses, tokens, row_stride, vocab, chunks, entries,
    KEEP: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr, CAPACITY: tl.constexpr,
    NUM_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_enter()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    there = chunk < chunks
    maxima = tl.load(stats.largest + row * chunks + chunk, mask=there, other=-_INFINITY)
    largest, best = tl.max(maxima, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(stats.place + row * chunks + best)
    temperature = _read(settings.temperature, row, 1.0)
    if tl.abs(largest) == _INFINITY:
        token = -1
    elif temperature > 0:
        base = logits + row * row_stride
        if KEEP == "all":
            base = changed + row * vocab
        elif KEEP == "changed":
            state = tl.load(states.rows + row) if states.rows is not None else row
            takes = _changes(row, state, entries, settings, states)
            base = tl.where(takes, changed + row * vocab, base)
        word, _, _, _ = tl.philox(
            tl.load(settings.seeds + row), tl.load(settings.positions + row).to(tl.uint32),
            (tl.load(settings.positions + row) >> 32).to(tl.uint32), 0, 0,
        )  # fmt: skip
        uniform = (word >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
        sums = tl.load(stats.total + row * chunks + chunk, mask=there, other=0.0)
        sums *= tl.where(maxima > -_INFINITY, _exp(maxima, largest, temperature), 0.0)
        count = tl.sum(tl.load(stats.count + row * chunks + chunk, mask=there, other=0), 0)
        top_k = _read(settings.top_k, row, 0)
        top_p = _read(settings.top_p, row, 1.0)
        min_p = _read(settings.min_p, row, 0.0)
        zero = tl.full([], 0.0, tl.float32)
        low = zero + _LOWEST
        least = zero - _INFINITY
        space = collected + row * CAPACITY
        by_count = (top_k > 0) & (top_k < count.to(tl.float32))
        if by_count:
            low = _threshold(
                base, space, vocab, largest, temperature, low, top_k, zero, True,
                CHUNK, GROUP, CAPACITY, NUM_STAGES,
            )  # fmt: skip
        if top_p < 1:
            low = _threshold(
                base, space, vocab, largest, temperature, low, zero, top_p, False, CHUNK, GROUP, CAPACITY, NUM_STAGES
            )
        if min_p > 0:
            least = largest + tl.log(tl.minimum(min_p, 1.0)) * temperature
        if by_count | (top_p < 1) | (min_p > 0):
            _chunk_sums(base, masses + row * chunks, low, least, largest, temperature, vocab, CHUNK, NUM_STAGES)
            tl.debug_barrier()
            sums = tl.load(masses + row * chunks + chunk, mask=there, other=0.0)
        token = _draw(base, sums, low, least, largest, temperature, uniform, vocab, CHUNK, CHUNKS)
    tl.store(tokens + row, token.to(tl.int64))


def forward(logits: torch.Tensor, settings: Settings, states: States) -> torch.Tensor:
    """int64 [rows] of logits [rows, vocab] with unit stride along the row."""
    rows, vocab = logits.shape
    props = device.properties(logits.device)
    config = tune.pick(SAMPLE, props, {"vocab": vocab, "bytes": logits.element_size()})
    chunks = tune.ceil_div(vocab, config.chunk)
    new = {"device": logits.device, "dtype": torch.float32}
    keep = "none" if states.empty else "changed" if logits.dtype == torch.float32 else "all"
    changed = torch.empty((rows, vocab) if keep != "none" else 1, **new)  # type: ignore[call-overload]
    integers = {"device": logits.device, "dtype": torch.int32}
    stats = ChunkStats(
        torch.empty((rows, chunks), **new), torch.empty((rows, chunks), **integers),  # type: ignore[call-overload]
        torch.empty((rows, chunks), **new), torch.empty((rows, chunks), **integers),  # type: ignore[call-overload]
    )  # fmt: skip
    tokens = torch.empty(rows, dtype=torch.int64, device=logits.device)
    given = RowSettings(
        settings.seeds, settings.positions, settings.temperature, settings.top_k, settings.top_p, settings.min_p,
        settings.penalties,
    )  # fmt: skip
    changes = StatePointers(
        states.rows,
        states.token_counts,
        states.bias_ids,
        states.bias_values,
        states.bias_until,
        states.allowed,
        states.restricted,
    )
    entries = 0 if states.bias_ids is None else states.bias_ids.shape[1]
    sizes = (logits.stride(0), vocab, chunks, entries, 0 if states.allowed is None else states.allowed.shape[1])
    early = pdl_options(props)
    launch(
        chunk_stats, (chunks, rows), logits, changed, given, changes, stats, *sizes,
        KEEP=keep, CHUNK=config.chunk, num_warps=config.chunk_warps, **early,
    )  # fmt: skip
    searches = any(x is not None for x in (settings.top_k, settings.top_p, settings.min_p))
    collected = torch.empty((rows, CAPACITY) if searches else 1, **new)  # type: ignore[call-overload]
    masses = torch.empty((rows, chunks), **new)  # type: ignore[call-overload]
    launch(
        sample_rows, (rows,), logits, changed, given, changes, stats, collected, masses, tokens, *sizes[:4],
        KEEP=keep, CHUNK=config.chunk, CHUNKS=tune.power_of_2(chunks), GROUP=GROUP, CAPACITY=CAPACITY,
        NUM_STAGES=config.num_stages if chunks > 1 else 1, num_warps=config.row_warps, maxnreg=config.max_registers,
        **early,
    )  # fmt: skip
    return tokens
