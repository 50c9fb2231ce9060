"""The second kernel of split-K: adds the partial sums and applies the epilogue."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from flashkernel.core import tune
from flashkernel.core.launch import launch
from flashkernel.ops.matmul.kernel_args import EpilogueTensors, fp8_bytes
from flashkernel.ops.matmul.triton.store import Output, Tile, store_result

_TILE = (16, 128)  # rows and columns of C that a program adds


@triton.jit
def add_partial_sums(
    partials, c, pointers, matrix_stride, row_stride, strides, batches, M, N,
    EPILOGUE: tl.constexpr, PAIR: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """C [batches, M, N] of partials [SPLITS * batches, M, N], of gate and up (PAIR) [SPLITS * batches, 2, M, N].

    Split 0 comes first, so that results repeat.
    """
    tiles_n = tl.cdiv(N, BLOCK_N)
    tiles = tl.cdiv(M, BLOCK_M) * tiles_n
    batch, tile = tl.program_id(0) // tiles, tl.program_id(0) % tiles
    first_m, first_n = tile // tiles_n * BLOCK_M, tile % tiles_n * BLOCK_N
    row, column = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    inside = (row < M)[:, None] & (column < N)[None, :]
    start = partials + row.to(tl.int64)[:, None] * row_stride + column[None, :]
    value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up = value
    for split in tl.static_range(SPLITS):
        part = (split * batches + batch).to(tl.int64)
        if PAIR:
            up += tl.load(start + (2 * part + 1) * matrix_stride, mask=inside, other=0.0)
            part *= 2
        value += tl.load(start + part * matrix_stride, mask=inside, other=0.0)
    output = Output(c, c, pointers, strides, M, N)
    store_result(value, up, Tile(batch, first_m, first_n), output, EPILOGUE, BLOCK_M, BLOCK_N)


def add_partials(partials: Tensor, tensors: EpilogueTensors) -> None:
    """C = epilogue(sum over the splits of partials), in float32 and in the order of the splits.

    Args:
        partials: float32 [splits * batch, M, N] with unit stride along N, already multiplied by their scales. Those of
            gate and up lie behind each other: [splits * batch * 2, M, N].
        tensors: The epilogue, with C.
    """
    batch, m, n = tensors.c.shape
    rows, columns = _TILE
    pair = tensors.gated
    launch(
        add_partial_sums, (batch * tune.ceil_div(m, rows) * tune.ceil_div(n, columns),),
        partials, fp8_bytes(tensors.c), tensors.pointers, partials.stride(0), partials.stride(1),
        tensors.strides, batch, m, n,
        EPILOGUE=tensors.traits(c_tma=False, part_n=columns), PAIR=pair,
        SPLITS=partials.shape[0] // (batch * (2 if pair else 1)),
        BLOCK_M=rows, BLOCK_N=columns, num_warps=4,
    )  # fmt: skip
