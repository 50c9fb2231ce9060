"""The index of each row's largest value, by many programs: torch gives a row to one, and a vocabulary is a long row."""

import torch
import triton
import triton.language as tl

from flashkernel.blocks.pdl_triton import pdl_enter
from flashkernel.core import device, tune
from flashkernel.core.launch import launch, pdl_options

PART = 2048  # columns of a program


@triton.jit
def _larger(value, index, other, other_index):
    """Of two values the larger, of equal ones the first; NaN is larger than all others, as in torch."""
    nan, other_nan = value != value, other != other
    larger = (value > other) | (nan & ~other_nan)
    equal = (value == other) | (nan & other_nan)
    keep = larger | (equal & (index < other_index))
    return tl.where(keep, value, other), tl.where(keep, index, other_index)


@triton.jit
def best_of_parts(x, values, indices, row_stride, width, parts, PART: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        pdl_enter()
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)  # a grid's second axis ends at 65535
    column = part * PART + tl.arange(0, PART)
    given = tl.load(x + row * row_stride + column, mask=column < width, other=float("-inf")).to(tl.float32)
    value, best = tl.reduce((given, column), 0, _larger)
    tl.store(values + row * parts + part, value)
    tl.store(indices + row * parts + part, best)


@triton.jit
def best_of_rows(
    values, indices, result, parts, invalid, PARTS: tl.constexpr, CHECKED: tl.constexpr, PDL: tl.constexpr
):
    if PDL:
        pdl_enter()
    row, part = tl.program_id(0).to(tl.int64), tl.arange(0, PARTS)
    value = tl.load(values + row * parts + part, mask=part < parts, other=float("-inf"))
    index = tl.load(indices + row * parts + part, mask=part < parts, other=2147483647)
    largest, best = tl.reduce((value, index), 0, _larger)
    if CHECKED:  # neither NaN nor an infinity
        best = tl.where(tl.abs(largest) < float("inf"), best, invalid)
    tl.store(result + row, best.to(tl.int64))


def argmax(x: torch.Tensor, invalid: int | None = None) -> torch.Tensor:
    """[rows], int64, of x [rows, width] with unit stride along the row; `invalid` where a maximum is not finite."""
    rows, width = x.shape
    parts = tune.ceil_div(width, PART)
    values = torch.empty((rows, parts), dtype=torch.float32, device=x.device)
    indices = torch.empty((rows, parts), dtype=torch.int32, device=x.device)
    result = torch.empty(rows, dtype=torch.int64, device=x.device)
    early = pdl_options(device.properties(x.device))
    launch(best_of_parts, (rows, parts), x, values, indices, x.stride(0), width, parts, PART=PART, num_warps=4, **early)
    launch(
        best_of_rows, (rows,), values, indices, result, parts, -1 if invalid is None else invalid,
        PARTS=tune.power_of_2(parts), CHECKED=invalid is not None, num_warps=1, **early,
    )  # fmt: skip
    return result
