"""Sampling in Triton: two launches, whatever the rows' parameters are.

`chunk_stats` has a program for each chunk of each row. It applies penalties, biases and the mask of allowed tokens, and
reduces the chunk to its maximum, its index, and the sum of its exponentials. `sample_rows` has a program for each
row. A greedy row takes the best chunk's maximum. A row without top-k, top-p and min-p draws a chunk by the chunks' sums
and reads that chunk alone. Other rows search for the threshold that the kept logits exceed (threshold_triton.py).
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashkernel.blocks.pdl_triton import pdl_enter
from flashkernel.core import device, tune
from flashkernel.core.launch import launch, pdl_options
from flashkernel.ops.sampling.configs import SAMPLE
from flashkernel.ops.sampling.params import SampleParams, States
from flashkernel.ops.sampling.threshold_triton import INFINITY, LOWEST, exp_scaled, load_row, threshold

GROUP = 4  # neighboring columns of a thread
CAPACITY = 8192  # logits that are bisected in registers
_IN_PROMPT = tl.constexpr(1 << 30)


class RowParams(NamedTuple):
    """SampleParams of each row, [rows] each; penalties [rows, 3]."""

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
    argmax: Any
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
def _penalized(x, column, inside, row, state, vocab, row_params, states):
    """Logits after the row's penalties."""
    repetition = tl.load(row_params.penalties + row * 3)
    presence = tl.load(row_params.penalties + row * 3 + 1)
    frequency = tl.load(row_params.penalties + row * 3 + 2)
    if (repetition != 1.0) | (presence != 0.0) | (frequency != 0.0):
        count = tl.load(states.token_counts + state * vocab + column, mask=inside, other=0)
        output = count & (_IN_PROMPT - 1)
        x = tl.where(count != 0, tl.where(x > 0, x / repetition, x * repetition), x)
        x -= frequency * output.to(tl.float32) + tl.where(output > 0, presence, 0.0)
    return x


@triton.jit
def _biased(x, column, row, state, entries, row_params, states):
    """Logits after the state's biases; entries end at the first id of -1."""
    position = tl.load(row_params.positions + row)
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
def _changes(row, state, entries, row_params, states):
    """Whether anything changes the row's logits."""
    found = False
    if states.allowed is not None:
        found = _restricted(state, states)
    if row_params.penalties is not None:
        found |= tl.load(row_params.penalties + row * 3) != 1.0
        found |= tl.load(row_params.penalties + row * 3 + 1) != 0.0
        found |= tl.load(row_params.penalties + row * 3 + 2) != 0.0
    if states.bias_ids is not None:
        found |= tl.load(states.bias_ids + state * entries, mask=entries > 0, other=-1) >= 0
    return found


@triton.jit
def chunk_stats(
    logits, changed, row_params, states, stats, row_stride, vocab, chunks, entries, words,
    KEEP: tl.constexpr, CHUNK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """KEEP stores the changed logits: of rows that change ("changed"), of all ("all"), or of none ("none")."""
    if PDL:
        pdl_enter()
    row, chunk = tl.program_id(0).to(tl.int64), tl.program_id(1)  # a grid's second axis ends at 65535
    state = tl.load(states.rows + row) if states.rows is not None else row
    column = chunk * CHUNK + tl.arange(0, CHUNK)  # [CHUNK]
    inside = column < vocab
    x = tl.load(logits + row * row_stride + column, mask=inside, other=-INFINITY).to(tl.float32)
    if row_params.penalties is not None:
        x = _penalized(x, column, inside, row, state, vocab, row_params, states)
    if states.bias_ids is not None:
        x = _biased(x, column, row, state, entries, row_params, states)
    if states.allowed is not None:  # noqa: SIM102
        if _restricted(state, states):
            word = tl.load(states.allowed + state * words + column // 32, mask=inside, other=0)
            x = tl.where(((word >> (column % 32)) & 1) != 0, x, -INFINITY)
    if KEEP != "none":
        kept = (KEEP == "all") | _changes(row, state, entries, row_params, states)
        tl.store(changed + row * vocab + column, x, mask=inside & kept)
    x = tl.where(inside & (x != x), INFINITY, x)  # NaN voids the row, as an infinity does
    x = tl.where(x > LOWEST, x, -INFINITY)
    largest, argmax = tl.max(x, 0, return_indices=True, return_indices_tie_break_left=True)
    temperature = _read(row_params.temperature, row, 1.0)
    scale = tl.where(temperature > 0, temperature, 1.0)
    # A chunk without logits has the sum 0; an infinite maximum voids the row before its sum is read.
    exponentials = tl.where(x > -INFINITY, exp_scaled(x, largest, scale), 0.0)
    where = row * chunks + chunk
    tl.store(stats.largest + where, largest)
    tl.store(stats.argmax + where, chunk * CHUNK + argmax)
    tl.store(stats.total + where, tl.sum(exponentials, 0))
    tl.store(stats.count + where, tl.sum((x > -INFINITY).to(tl.int32), 0))


@triton.jit
def _first_above(weights, index, target, END: tl.constexpr):
    """The first index whose cumulated weight exceeds the target, else the last with a weight; and the sum before it."""
    running = tl.cumsum(weights, 0)
    best = tl.min(tl.where((running > target) & (weights > 0), index, END), 0)
    last = tl.max(tl.where(weights > 0, index, -1), 0)
    best = tl.where(best == END, last, best)
    return best, tl.sum(tl.where(index < best, weights, 0.0), 0)


@triton.jit
def _draw(base, sums, low, least, largest, temperature, uniform, vocab, CHUNK: tl.constexpr, CHUNKS: tl.constexpr):
    """One token of the logits above `low` and at least `least`; `sums` are their probabilities by chunk, [CHUNKS]."""
    target = uniform * tl.sum(sums, 0)
    chunk, before = _first_above(sums, tl.arange(0, CHUNKS), target, CHUNKS)
    column = chunk * CHUNK + tl.arange(0, CHUNK)
    x = load_row(base, column, vocab)
    weight = tl.where((x > low) & (x >= least), exp_scaled(x, largest, temperature), 0.0)
    token, _ = _first_above(weight, column, target - before, 2147483647)
    return token


@triton.jit
def _chunk_sums(base, masses, low, least, largest, temperature, vocab, CHUNK: tl.constexpr, NUM_STAGES: tl.constexpr):
    """Stores the probabilities of the logits that are kept, by chunk."""
    lane = tl.arange(0, CHUNK)
    for start in tl.range(0, vocab, CHUNK, num_stages=NUM_STAGES):
        x = load_row(base, start + lane, vocab)
        weight = tl.where((x > low) & (x >= least), exp_scaled(x, largest, temperature), 0.0)
        tl.store(masses + start // CHUNK, tl.sum(weight, 0))


@triton.jit
def sample_rows(
    logits, changed, row_params, states, stats, collected, masses, tokens, row_stride, vocab, chunks, entries,
    KEEP: tl.constexpr, CHUNK: tl.constexpr, CHUNKS: tl.constexpr, GROUP: tl.constexpr, CAPACITY: tl.constexpr,
    NUM_STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_enter()
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.arange(0, CHUNKS)
    there = chunk < chunks
    maxima = tl.load(stats.largest + row * chunks + chunk, mask=there, other=-INFINITY)
    largest, best = tl.max(maxima, 0, return_indices=True, return_indices_tie_break_left=True)
    token = tl.load(stats.argmax + row * chunks + best)
    temperature = _read(row_params.temperature, row, 1.0)
    if tl.abs(largest) == INFINITY:
        token = -1
    elif temperature > 0:
        base = logits + row * row_stride
        if KEEP == "all":
            base = changed + row * vocab
        elif KEEP == "changed":
            state = tl.load(states.rows + row) if states.rows is not None else row
            takes = _changes(row, state, entries, row_params, states)
            base = tl.where(takes, changed + row * vocab, base)
        word, _, _, _ = tl.philox(
            tl.load(row_params.seeds + row), tl.load(row_params.positions + row).to(tl.uint32),
            (tl.load(row_params.positions + row) >> 32).to(tl.uint32), 0, 0,
        )  # fmt: skip
        uniform = (word >> 8).to(tl.float32) * 5.9604644775390625e-08  # 2^-24
        sums = tl.load(stats.total + row * chunks + chunk, mask=there, other=0.0)
        sums *= tl.where(maxima > -INFINITY, exp_scaled(maxima, largest, temperature), 0.0)
        count = tl.sum(tl.load(stats.count + row * chunks + chunk, mask=there, other=0), 0)
        top_k = _read(row_params.top_k, row, 0)
        top_p = _read(row_params.top_p, row, 1.0)
        min_p = _read(row_params.min_p, row, 0.0)
        zero = tl.full([], 0.0, tl.float32)
        low = zero + LOWEST
        least = zero - INFINITY
        space = collected + row * CAPACITY
        by_count = (top_k > 0) & (top_k < count.to(tl.float32))
        if by_count:
            low = threshold(
                base, space, vocab, largest, temperature, low, top_k, zero, True,
                CHUNK, GROUP, CAPACITY, NUM_STAGES,
            )  # fmt: skip
        if top_p < 1:
            low = threshold(
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


def forward(logits: torch.Tensor, params: SampleParams, states: States) -> torch.Tensor:
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
    given = RowParams(
        params.seeds, params.positions, params.temperature, params.top_k, params.top_p, params.min_p,
        params.penalties,
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
        chunk_stats, (rows, chunks), logits, changed, given, changes, stats, *sizes,
        KEEP=keep, CHUNK=config.chunk, num_warps=config.chunk_warps, **early,
    )  # fmt: skip
    searches = any(x is not None for x in (params.top_k, params.top_p, params.min_p))
    collected = torch.empty((rows, CAPACITY) if searches else 1, **new)  # type: ignore[call-overload]
    masses = torch.empty((rows, chunks), **new)  # type: ignore[call-overload]
    launch(
        sample_rows, (rows,), logits, changed, given, changes, stats, collected, masses, tokens, *sizes[:4],
        KEEP=keep, CHUNK=config.chunk, CHUNKS=tune.power_of_2(chunks), GROUP=GROUP, CAPACITY=CAPACITY,
        NUM_STAGES=config.num_stages if chunks > 1 else 1, num_warps=config.row_warps, maxnreg=config.max_registers,
        **early,
    )  # fmt: skip
    return tokens
