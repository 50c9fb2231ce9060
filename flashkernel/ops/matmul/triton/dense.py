"""The dense matrix product: C = epilogue(A B), one tile of C per program, or several where programs are persistent."""

import triton
import triton.language as tl

from flashkernel.blocks.activation_triton import activate
from flashkernel.blocks.epilogue_triton import apply_epilogue
from flashkernel.ops.matmul.triton.tiles import load_tile, tile_position


@triton.jit
def store_result(
    value, c, c_descriptor, preactivation, bias, bias_stride, residual, residual_batch_stride, residual_stride,
    batch, first_m, first_n, M, N, BEFORE: tl.constexpr, AFTER: tl.constexpr, C_TMA: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Applies the epilogue to value [BLOCK_M, BLOCK_N] in float32 and stores it at (batch, first_m, first_n) of C.

    BEFORE is the part of the chain ahead of the activation; AFTER is the activation and what follows it.
    """
    row, column = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    in_rows, in_columns = row < M, column < N
    residual_matrix = residual
    if residual is not None:
        residual_matrix = residual + batch.to(tl.int64) * residual_batch_stride
    offset = (batch.to(tl.int64) * M + row.to(tl.int64))[:, None] * N + column[None, :]
    value = apply_epilogue(
        value, value, row, column, column, in_rows, in_columns,
        bias, bias, bias_stride, residual_matrix, residual_stride, BEFORE,
    )  # fmt: skip
    inside = in_rows[:, None] & in_columns[None, :]
    if preactivation is not None:
        tl.store(preactivation + offset, value.to(preactivation.dtype.element_ty), mask=inside)
    value = apply_epilogue(
        value, value, row, column, column, in_rows, in_columns,
        bias, bias, bias_stride, residual_matrix, residual_stride, AFTER,
    )  # fmt: skip
    if C_TMA:
        c_descriptor.store(
            [batch, first_m, first_n], value.to(c.dtype.element_ty).reshape([1, BLOCK_M, BLOCK_N])
        )  # fmt: skip
    else:
        tl.store(c + offset, value.to(c.dtype.element_ty), mask=inside)


@triton.jit
def _tile_product(
    a, a_descriptor, b, b_descriptor, a_scale, b_scale, a_strides, b_strides, a_scale_strides, b_scale_strides,
    batch, first_m, first_n, first_step, last_step, M, N, K,
    SCALING: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, A_BATCHED: tl.constexpr,
    B_BATCHED: tl.constexpr, A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The sum over K steps [first_step, last_step) of one tile [BLOCK_M, BLOCK_N], scaled, in float32."""
    INTEGER: tl.constexpr = a.dtype.element_ty == tl.int8
    SUMS: tl.constexpr = tl.int32 if INTEGER else tl.float32
    a_matrix = a + batch.to(tl.int64) * a_strides[0]
    b_matrix = b + batch.to(tl.int64) * b_strides[0]
    row, column = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    if SCALING != "":
        a_scales = a_scale + batch.to(tl.int64) * a_scale_strides[0] + row.to(tl.int64) * a_scale_strides[1]
        if SCALING == "block":
            b_scales = b_scale + batch.to(tl.int64) * b_scale_strides[0] + (column // 128) * b_scale_strides[2]
        else:
            b_scales = b_scale + batch.to(tl.int64) * b_scale_strides[0] + column * b_scale_strides[2]
    BLOCKS: tl.constexpr = SCALING == "block"
    value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32 if BLOCKS else SUMS)
    for step in tl.range(first_step, last_step, num_stages=NUM_STAGES):
        k = step * BLOCK_K
        a_tile = load_tile(
            a_matrix, a_descriptor, batch, first_m, k, M, K, a_strides[1], a_strides[2],
            BLOCK_M, BLOCK_K, True, not EVEN_K, TMA, A_BATCHED, A_TRANSPOSED,
        )  # fmt: skip
        b_tile = load_tile(
            b_matrix, b_descriptor, batch, k, first_n, K, N, b_strides[1], b_strides[2],
            BLOCK_K, BLOCK_N, not EVEN_K, True, TMA, B_BATCHED, B_TRANSPOSED,
        )  # fmt: skip
        if BLOCKS:  # the sum of one block of K, promoted to float32 with its scales
            block = k // 128
            left = tl.load(a_scales + block * a_scale_strides[2], mask=row < M, other=0.0)
            right = tl.load(b_scales + block * b_scale_strides[1], mask=column < N, other=0.0)
            product = tl.dot(a_tile, b_tile, out_dtype=SUMS).to(tl.float32)
            value += product * left[:, None] * right[None, :]
        else:
            value = tl.dot(a_tile, b_tile, value, input_precision=PRECISION, out_dtype=SUMS)
    if SCALING == "row":
        left = tl.load(a_scales, mask=row < M, other=0.0)
        right = tl.load(b_scales, mask=column < N, other=0.0)
        value = value.to(tl.float32) * left[:, None] * right[None, :]
    return value.to(tl.float32)


@triton.jit
def matmul_kernel(
    a, a_descriptor, b, b_descriptor, c, c_descriptor, a_scale, b_scale, bias, residual, preactivation, workspace,
    a_strides, b_strides, a_scale_strides, b_scale_strides, bias_stride, residual_batch_stride, residual_stride,
    batches, M, N, K,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, SCALING: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr,
    A_BATCHED: tl.constexpr, B_BATCHED: tl.constexpr, A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr,
    C_TMA: tl.constexpr, EVEN_K: tl.constexpr, SPLITS: tl.constexpr, PERSISTENT: tl.constexpr, GROUP_M: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    tiles_m, tiles_n, steps = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    program, last = tl.program_id(0), tl.program_id(0) + 1
    if PERSISTENT:
        last = tiles_m * tiles_n * SPLITS * batches
    # A program per tile runs the body once: `last` is its own tile's end.
    for work in tl.range(program, last, tl.num_programs(0), flatten=PERSISTENT):
        split = work % SPLITS
        tile = (work // SPLITS) % (tiles_m * tiles_n)
        batch = work // (SPLITS * tiles_m * tiles_n)
        tile_m, tile_n = tile_position(tile, tiles_m, tiles_n, GROUP_M)
        first_m, first_n = tile_m * BLOCK_M, tile_n * BLOCK_N
        value = _tile_product(
            a, a_descriptor, b, b_descriptor, a_scale, b_scale, a_strides, b_strides, a_scale_strides, b_scale_strides,
            batch, first_m, first_n, split * steps // SPLITS, (split + 1) * steps // SPLITS, M, N, K,
            SCALING, PRECISION, TMA, A_BATCHED, B_BATCHED, A_TRANSPOSED, B_TRANSPOSED, EVEN_K,
            BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
        )  # fmt: skip
        if SPLITS > 1:  # partial sums [SPLITS * batches, M, N], for split_k.py
            row, column = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
            part = (split * batches + batch).to(tl.int64) * M + row.to(tl.int64)
            inside = (row < M)[:, None] & (column < N)[None, :]
            tl.store(workspace + part[:, None] * N + column[None, :], value, mask=inside)
        else:
            store_result(
                value, c, c_descriptor, preactivation, bias, bias_stride, residual, residual_batch_stride,
                residual_stride, batch, first_m, first_n, M, N, BEFORE, AFTER, C_TMA, BLOCK_M, BLOCK_N,
            )  # fmt: skip


@triton.jit
def activation_gradient_kernel(
    dy, preactivation, dz, rows, columns, dy_stride, FACTOR: tl.constexpr, KIND: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dz = FACTOR * dy * activation'(z); z and dz are contiguous [rows, columns]."""
    row = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    offset = row[:, None] * columns + column[None, :]
    z = tl.load(preactivation + offset, mask=inside, other=0.0).to(tl.float32)
    gradient = tl.load(dy + row[:, None] * dy_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    _, derivative = activate(z, KIND, 0.0)
    tl.store(dz + offset, (gradient * derivative * FACTOR).to(dz.dtype.element_ty), mask=inside)
