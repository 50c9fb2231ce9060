"""The likeliest token of each row, by many programs: torch gives a row to one, and a vocabulary is a long row."""

import torch
import triton
import triton.language as tl

from flashkernel.blocks.chain_triton import join_chain
from flashkernel.core import device, tune
from flashkernel.core.launch import chained, launch

PART = 2048  # logits of a program


@triton.jit
def _larger(value, index, other, other_index):
    """Of two logits the larger, of equal ones the first."""
    keep = (value > other) | ((value == other) & (index < other_index))
    return tl.where(keep, value, other), tl.where(keep, index, other_index)


@triton.jit
def best_of_parts(logits, values, tokens, row_stride, vocab, parts, PART: tl.constexpr, CHAINED: tl.constexpr):
    if CHAINED:
        join_chain()
    part, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    token = part * PART + tl.arange(0, PART)
    logit = tl.load(logits + row * row_stride + token, mask=token < vocab, other=float("-inf")).to(tl.float32)
    value, best = tl.reduce((logit, token), 0, _larger)
    tl.store(values + row * parts + part, value)
    tl.store(tokens + row * parts + part, best)


@triton.jit
def best_of_rows(values, tokens, result, parts, PARTS: tl.constexpr, CHAINED: tl.constexpr):
    if CHAINED:
        join_chain()
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    value = tl.load(values + row * parts + part, mask=part < parts, other=float("-inf"))
    token = tl.load(tokens + row * parts + part, mask=part < parts, other=2147483647)
    _, best = tl.reduce((value, token), 0, _larger)
    tl.store(result + row, best.to(tl.int64))


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    """argmax of logits [rows, vocab] along the last dim, int64; of equal ones the first."""
    rows, vocab = logits.shape
    parts = tune.ceil_div(vocab, PART)
    values = torch.empty((rows, parts), dtype=torch.float32, device=logits.device)
    tokens = torch.empty((rows, parts), dtype=torch.int32, device=logits.device)
    result = torch.empty(rows, dtype=torch.int64, device=logits.device)
    early = chained(device.facts(logits.device))
    launch(
        best_of_parts, (parts, rows), logits, values, tokens, logits.stride(0), vocab, parts,
        PART=PART, num_warps=4, **early,
    )  # fmt: skip
    launch(best_of_rows, (rows,), values, tokens, result, parts, PARTS=tune.power_of_2(parts), num_warps=1, **early)
    return result
