"""The second kernel of split-K: adds the partial sums and applies the epilogue."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flashkernel.core import tune
from flashkernel.core.launch import launch
from flashkernel.ops.matmul.triton.dense import store_result

_TILE = (16, 128)  # rows and columns of C that a program adds


@triton.jit
def add_partial_sums(
    partials, c, bias, residual, preactivation, matrix_stride, row_stride, bias_stride, residual_batch_stride,
    residual_stride, batches, M, N,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """C [batches, M, N] of partials [SPLITS * batches, M, N]; split 0 first, so that results repeat."""
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(M, BLOCK_M) * tiles_n
    batch, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    first_m, first_n = tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N
    row, column = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    inside = (row < M)[:, None] & (column < N)[None, :]
    value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for split in tl.static_range(SPLITS):
        matrix = partials + (split * batches + batch).to(tl.int64) * matrix_stride
        value += tl.load(matrix + row.to(tl.int64)[:, None] * row_stride + column[None, :], mask=inside, other=0.0)
    store_result(
        value, c, c, preactivation, bias, bias_stride, residual, residual_batch_stride, residual_stride,
        batch, first_m, first_n, M, N, BEFORE, AFTER, False, BLOCK_M, BLOCK_N,
    )  # fmt: skip


def add_partials(
    partials: Tensor, c: Tensor, chains: tuple[str, str], bias: Tensor | None, residual: Tensor | None,
    preactivation: Tensor | None,
) -> None:  # fmt: skip
    """C = epilogue(sum over the splits of partials [splits * batch, M, N]), in float32 and in the order of the splits.

    Args:
        partials: float32 with unit stride along N; already multiplied by their scales.
        c: [batch, M, N], contiguous.
        chains: `Epilogue.around_activation`.
        bias: As in `MatmulKernels.forward`, with the rest; the residual has unit stride along N.
    """
    batch, m, n = c.shape
    rows, columns = _TILE
    launch(
        add_partial_sums, (batch * tune.ceil_div(m, rows) * tune.ceil_div(n, columns),),
        partials, c, bias, residual, preactivation, partials.stride(0), partials.stride(1),
        *extra_strides(bias, residual), batch, m, n,
        BEFORE=chains[0], AFTER=chains[1], SPLITS=partials.shape[0] // batch, BLOCK_M=rows, BLOCK_N=columns,
        num_warps=4,
    )  # fmt: skip


def extra_strides(bias: Tensor | None, residual: Tensor | None) -> tuple[int, int, int]:
    """Strides of the bias, and of the residual's batch and rows; 0 for what is the same for all."""
    return (
        0 if bias is None else bias.stride(0),
        0 if residual is None or residual.shape[0] == 1 else residual.stride(0),
        0 if residual is None else residual.stride(1),
    )
