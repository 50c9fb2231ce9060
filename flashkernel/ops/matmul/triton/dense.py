"""The dense matrix product: C = epilogue(A B), one tile of C per program, or several where programs are persistent."""

import triton
import triton.language as tl

from flashkernel.blocks.epilogue_triton import drop_elements, pull_back_activation
from flashkernel.ops.matmul.tiles_triton import load_tile, tile_position
from flashkernel.ops.matmul.triton.store import load_preactivation, store_preactivation, store_result


@triton.jit
def _tile_product(
    a, a_descriptor, b, b_descriptor, up, up_descriptor, a_scale, b_scale, up_scale,
    a_strides, b_strides, up_strides, a_scale_strides, b_scale_strides,
    batch, first_m, first_n, first_step, last_step, M, N, K,
    SCALING: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, A_BATCHED: tl.constexpr,
    B_BATCHED: tl.constexpr, A_TRANSPOSED: tl.constexpr, B_TRANSPOSED: tl.constexpr, EVEN_K: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    """The sums over K steps [first_step, last_step) of one tile [BLOCK_M, BLOCK_N] of A B and of A up, in float32.

    They are scaled. Without an `up` the second is the first.
    """
    INTEGER: tl.constexpr = a.dtype.element_ty == tl.int8
    SUMS: tl.constexpr = tl.int32 if INTEGER else tl.float32
    a_matrix = a + batch.to(tl.int64) * a_strides[0]
    b_matrix = b + batch.to(tl.int64) * b_strides[0]
    up_matrix = up
    if up is not None:
        up_matrix = up + batch.to(tl.int64) * up_strides[0]
    row, column = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    if SCALING != "":
        a_scales = a_scale + batch.to(tl.int64) * a_scale_strides[0] + row.to(tl.int64) * a_scale_strides[1]
        scale_column = column // 128 if SCALING == "block" else column
        b_scales = batch.to(tl.int64) * b_scale_strides[0] + scale_column * b_scale_strides[2]  # and of up
    BLOCKS: tl.constexpr = SCALING == "block"
    value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32 if BLOCKS else SUMS)
    up_value = value
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
            right = tl.load(b_scale + b_scales + block * b_scale_strides[1], mask=column < N, other=0.0)
            product = tl.dot(a_tile, b_tile, out_dtype=SUMS).to(tl.float32)
            value += product * left[:, None] * right[None, :]
        else:
            value = tl.dot(a_tile, b_tile, value, input_precision=PRECISION, out_dtype=SUMS)
        if up is not None:
            up_tile = load_tile(
                up_matrix, up_descriptor, batch, k, first_n, K, N, up_strides[1], up_strides[2],
                BLOCK_K, BLOCK_N, not EVEN_K, True, TMA, B_BATCHED, B_TRANSPOSED,
            )  # fmt: skip
            if BLOCKS:
                right = tl.load(up_scale + b_scales + block * b_scale_strides[1], mask=column < N, other=0.0)
                product = tl.dot(a_tile, up_tile, out_dtype=SUMS).to(tl.float32)
                up_value += product * left[:, None] * right[None, :]
            else:
                up_value = tl.dot(a_tile, up_tile, up_value, input_precision=PRECISION, out_dtype=SUMS)
    if SCALING == "row":
        left = tl.load(a_scales, mask=row < M, other=0.0)
        right = tl.load(b_scale + b_scales, mask=column < N, other=0.0)
        value = value.to(tl.float32) * left[:, None] * right[None, :]
        if up is not None:
            right = tl.load(up_scale + b_scales, mask=column < N, other=0.0)
            up_value = up_value.to(tl.float32) * left[:, None] * right[None, :]
    value = value.to(tl.float32)
    if up is None:
        up_value = value
    return value, up_value.to(tl.float32)


@triton.jit
def _store_partial(workspace, value, part, first_m, first_n, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Stores a partial sum to matrix `part` of the workspace, for split_k.py."""
    row, column = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    start = part.to(tl.int64) * M + row.to(tl.int64)
    inside = (row < M)[:, None] & (column < N)[None, :]
    tl.store(workspace + start[:, None] * N + column[None, :], value, mask=inside)


@triton.jit
def matmul_kernel(
    a, a_descriptor, b, b_descriptor, up, up_descriptor, a_scale, b_scale, up_scale, workspace,
    c, c_descriptor, z, dz, bias, up_bias, residual, seed, device_seed, out_scale, block_scales,
    a_strides, b_strides, up_strides, a_scale_strides, b_scale_strides,
    c_strides, z_strides, dz_strides, bias_stride, residual_strides, out_scale_strides, block_scales_strides,
    batches, M, N, K,
    BEFORE: tl.constexpr, AFTER: tl.constexpr, PACKED: tl.constexpr, SCALING: tl.constexpr, PRECISION: tl.constexpr,
    TMA: tl.constexpr, A_BATCHED: tl.constexpr, B_BATCHED: tl.constexpr, A_TRANSPOSED: tl.constexpr,
    B_TRANSPOSED: tl.constexpr, C_TMA: tl.constexpr, EVEN_K: tl.constexpr, SPLITS: tl.constexpr,
    PERSISTENT: tl.constexpr, GROUP_M: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr, PART_N: tl.constexpr, NUM_STAGES: tl.constexpr,
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
        value, up_value = _tile_product(
            a, a_descriptor, b, b_descriptor, up, up_descriptor, a_scale, b_scale, up_scale,
            a_strides, b_strides, up_strides, a_scale_strides, b_scale_strides,
            batch, first_m, first_n, split * steps // SPLITS, (split + 1) * steps // SPLITS, M, N, K,
            SCALING, PRECISION, TMA, A_BATCHED, B_BATCHED, A_TRANSPOSED, B_TRANSPOSED, EVEN_K,
            BLOCK_M, BLOCK_N, BLOCK_K, NUM_STAGES,
        )  # fmt: skip
        if SPLITS > 1:  # partial sums [SPLITS * batches, M, N]; of gate and up [SPLITS * batches, 2, M, N]
            part = split * batches + batch
            if up is not None:
                part *= 2
                _store_partial(workspace, up_value, part + 1, first_m, first_n, M, N, BLOCK_M, BLOCK_N)
            _store_partial(workspace, value, part, first_m, first_n, M, N, BLOCK_M, BLOCK_N)
        else:
            store_result(
                value, up_value, batch, first_m, first_n, M, N, c, c_descriptor, z, dz, bias, up_bias, residual,
                seed, device_seed, out_scale, block_scales, c_strides, z_strides, dz_strides, bias_stride,
                residual_strides, out_scale_strides, block_scales_strides,
                BEFORE, AFTER, PACKED, C_TMA, BLOCK_M, BLOCK_N, PART_N,
            )  # fmt: skip


@triton.jit
def activation_gradient_kernel(
    dy, added, z, dz, seed, device_seed, rows, columns, dy_stride, z_stride,
    FACTOR: tl.constexpr, DROPOUT: tl.constexpr, CHAIN: tl.constexpr, PACKED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dz = FACTOR * dropout(dy) * activation'(z) + added; z, dz and added have the same strides.

    DROPOUT is the text of the dropout, and CHAIN that of the activation or gate, or "". Without a CHAIN there is no z.
    """
    row, first = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M), tl.program_id(1) * BLOCK_N
    column = first + tl.arange(0, BLOCK_N)
    in_rows = row < rows
    inside = in_rows[:, None] & (column < columns)[None, :]
    start = dy + row.to(tl.int64)[:, None] * dy_stride
    gradient = tl.load(start + column[None, :], mask=inside, other=0.0).to(tl.float32) * FACTOR
    if DROPOUT != "":
        gradient = drop_elements(gradient, seed, device_seed, row, column, columns, DROPOUT, 0)
    up_gradient = gradient
    if CHAIN != "":
        value, up = load_preactivation(z, z_stride, row, first, in_rows, columns, PACKED, BLOCK_N)
        _, gradient, up_gradient = pull_back_activation(gradient, value, up, CHAIN)
    if added is not None:
        more, more_up = load_preactivation(added, z_stride, row, first, in_rows, columns, PACKED, BLOCK_N)
        gradient += more
        up_gradient += more_up
    store_preactivation(dz, z_stride, gradient, up_gradient, row, first, in_rows, columns, PACKED, BLOCK_N)
