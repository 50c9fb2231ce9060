"""Which keys a sequence reads, and which share of all of them a program takes: computed on the device, from `lengths`.

The keys of a sequence are cut into tiles. A unit is what one output needs: a sequence, some key/value heads, a tile of
query rows. All tiles of all units stand in one line, and every program takes an equal share of it (Stream-K): the end
of one unit, whole units, the beginning of another. Where units are as long as such shares, each program takes one.
"""

import triton
import triton.language as tl


@triton.jit
def span(length, queries, start, window, sink_tokens, WINDOWED: tl.constexpr, KEYS: tl.constexpr):
    """(front, skip, tiles, low): tile t of a sequence is tile t of its keys for t < front, else tile t + skip.

    Without a window the keys are [start, length). With one they are the first `sink_tokens`, in `front` tiles, and
    those from `low` on, the first key that the first query's window holds.
    """
    last = (length + KEYS - 1) // KEYS
    if WINDOWED:
        low = tl.maximum(length - queries + 1 - window, 0)
        front = (tl.minimum(low, sink_tokens) + KEYS - 1) // KEYS
        skip = tl.maximum(low // KEYS, front) - front
        return front, skip, last - skip, low
    else:
        low = length * 0 + start
        skip = low // KEYS
        return low * 0, skip, tl.maximum(last - skip, 0), low


@triton.jit
def counts_of(
    sequence, lengths, batch, capacity, queries, start, window, sink_tokens, units,
    WINDOWED: tl.constexpr, KEYS: tl.constexpr,
):  # fmt: skip
    """Tiles in the line for each sequence, [BATCH]; a unit without keys keeps one: somebody must write its zeros."""
    length = tl.load(lengths + sequence, mask=sequence < batch, other=0)
    length = tl.minimum(tl.maximum(length, 0), capacity).to(tl.int32)
    _, _, tiles, _ = span(length, queries, start, window, sink_tokens, WINDOWED, KEYS)
    return tl.where(sequence < batch, tl.maximum(tiles, 1) * units, 0)


@triton.jit
def first_of(program, total, programs):
    """Where a program's share of the line begins; shares differ by one tile at most."""
    return program * (total // programs) + tl.minimum(program, total % programs)


@triton.jit
def owner_of(place, total, programs):
    """The program whose share holds this place of the line."""
    each, longer = total // programs, total % programs
    split = longer * (each + 1)  # the first `longer` programs have one tile more
    return tl.where(place < split, place // (each + 1), longer + (place - split) // tl.maximum(each, 1))


@triton.jit
def whole_units(counts, line, units, batch, programs, SHARED: tl.constexpr):
    """Whether each program takes one unit instead of a share: where that takes hardly longer, there are no parts."""
    sequences = 1 if SHARED else batch
    longest = tl.max(counts, 0) // units
    return (sequences * units <= programs) & (longest * programs * 15 <= line * 16)
