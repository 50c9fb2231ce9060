"""Row-wise quantization of a product to fp8: a row's scale needs all of its columns, which no tile has."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernel.blocks.epilogue_triton import block_scale
from flashkernel.blocks.fp8 import FP8
from flashkernel.core import tune
from flashkernel.core.launch import launch
from flashkernel.ops.matmul.kernel_args import fp8_bytes
from flashkernel.ops.matmul.triton.store import as_stored

_MAX_COLUMNS = 4096  # of a step over a row


@triton.jit
def quantize_rows_kernel(x, y, scales, columns, BLOCK: tl.constexpr):
    """y = x / scale in fp8; a program has one row of the contiguous x and y, and reads it twice."""
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros([1, BLOCK], tl.float32)
    for first in tl.range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(value)[None, :])
    scale = block_scale(largest, tl.arange(0, BLOCK) < columns)  # [1]
    tl.store(scales + row + tl.arange(0, 1), scale)
    for first in tl.range(0, columns, BLOCK):
        column = first + tl.arange(0, BLOCK)
        value = tl.load(x + row * columns + column, mask=column < columns, other=0.0).to(tl.float32)
        value = as_stored(value[None, :] / scale[:, None], y)
        tl.store(y + row * columns + column[None, :], value, mask=(column < columns)[None, :])


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns x [batch, M, N], contiguous, in fp8, and the scales [batch, M, 1] of its rows."""
    batches, m, n = x.shape
    y = torch.empty(x.shape, dtype=FP8, device=x.device)
    if n == 0:
        return y, torch.ones((batches, m, 1), dtype=torch.float32, device=x.device)
    scales = torch.empty((batches, m, 1), dtype=torch.float32, device=x.device)
    if y.numel():
        block = min(_MAX_COLUMNS, tune.power_of_2(n))
        launch(
            quantize_rows_kernel, (batches * m,), x, fp8_bytes(y), scales, n, BLOCK=block,
            num_warps=8 if block > 1024 else 4,
        )  # fmt: skip
    return y, scales
