"""The dense matrix product: C = epilogue(A B), one tile of C per program, or several where programs are persistent."""

from typing import Any, NamedTuple

import triton
import triton.language as tl

from flashkernel.blocks.epilogue_triton import drop_elements, pull_back_activation
from flashkernel.ops.matmul.tiles_triton import Operand, TileAccess, load_tile, tile_position
from flashkernel.ops.matmul.triton.store import Output, Tile, load_preactivation, store_preactivation, store_result


class BatchedOperand(NamedTuple):
    """Matrices [batches, rows, columns] with their descriptor and the strides of their scales; inside the kernel."""

    data: Any
    descriptor: Any
    strides: Any
    scale: Any
    scale_strides: Any


class ProductTraits(NamedTuple):
    """What a product is compiled for, beside its epilogue."""

    SCALING: str
    PRECISION: str
    A: TileAccess
    B: TileAccess  # of up, too
    EVEN_K: bool  # K is a multiple of BLOCK_K
    SPLITS: int  # of K
    PERSISTENT: bool
    GROUP_M: int
    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    NUM_STAGES: int


@triton.jit
def _matrix(operand, batch):
    """The `Operand` of one matrix of a batch."""
    matrix = operand.data + batch.to(tl.int64) * operand.strides[0]
    return Operand(matrix, operand.descriptor, operand.strides[1], operand.strides[2])


@triton.jit
def _tile_product(a, b, up, tile, first_step, last_step, M, N, K, PRODUCT: tl.constexpr):
    """The sums over K steps [first_step, last_step) of one tile [BLOCK_M, BLOCK_N] of A B and of A up, in float32.

    They are scaled. Without an `up` the second is the first. PRODUCT is a `ProductTraits`.
    """
    A: tl.constexpr = PRODUCT.A
    B: tl.constexpr = PRODUCT.B
    SCALING: tl.constexpr = PRODUCT.SCALING
    PRECISION: tl.constexpr = PRODUCT.PRECISION
    MASK_K: tl.constexpr = not PRODUCT.EVEN_K
    BLOCK_M: tl.constexpr = PRODUCT.BLOCK_M
    BLOCK_N: tl.constexpr = PRODUCT.BLOCK_N
    BLOCK_K: tl.constexpr = PRODUCT.BLOCK_K
    INTEGER: tl.constexpr = a.data.dtype.element_ty == tl.int8
    SUMS: tl.constexpr = tl.int32 if INTEGER else tl.float32
    PAIR: tl.constexpr = up.data is not None
    batch, first_m, first_n = tile.batch, tile.first_m, tile.first_n
    a_operand = _matrix(a, batch)
    b_operand = _matrix(b, batch)
    up_operand = b_operand
    if PAIR:
        up_operand = _matrix(up, batch)
    row, column = first_m + tl.arange(0, BLOCK_M), first_n + tl.arange(0, BLOCK_N)
    if SCALING != "":
        a_scales = a.scale + batch.to(tl.int64) * a.scale_strides[0] + row.to(tl.int64) * a.scale_strides[1]
        scale_column = column // 128 if SCALING == "block" else column
        b_scales = batch.to(tl.int64) * b.scale_strides[0] + scale_column * b.scale_strides[2]  # and of up
    BLOCKS: tl.constexpr = SCALING == "block"
    value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32 if BLOCKS else SUMS)
    up_value = value
    for step in tl.range(first_step, last_step, num_stages=PRODUCT.NUM_STAGES):
        k = step * BLOCK_K
        a_tile = load_tile(a_operand, batch, first_m, k, M, K, A, BLOCK_M, BLOCK_K, True, MASK_K)
        b_tile = load_tile(b_operand, batch, k, first_n, K, N, B, BLOCK_K, BLOCK_N, MASK_K, True)
        if BLOCKS:  # the sum of one block of K, promoted to float32 with its scales
            block = k // 128
            left = tl.load(a_scales + block * a.scale_strides[2], mask=row < M, other=0.0)
            right = tl.load(b.scale + b_scales + block * b.scale_strides[1], mask=column < N, other=0.0)
            product = tl.dot(a_tile, b_tile, out_dtype=SUMS).to(tl.float32)
            value += product * left[:, None] * right[None, :]
        else:
            value = tl.dot(a_tile, b_tile, value, input_precision=PRECISION, out_dtype=SUMS)
        if PAIR:
            up_tile = load_tile(up_operand, batch, k, first_n, K, N, B, BLOCK_K, BLOCK_N, MASK_K, True)
            if BLOCKS:
                right = tl.load(up.scale + b_scales + block * b.scale_strides[1], mask=column < N, other=0.0)
                product = tl.dot(a_tile, up_tile, out_dtype=SUMS).to(tl.float32)
                up_value += product * left[:, None] * right[None, :]
            else:
                up_value = tl.dot(a_tile, up_tile, up_value, input_precision=PRECISION, out_dtype=SUMS)
    if SCALING == "row":
        left = tl.load(a_scales, mask=row < M, other=0.0)
        right = tl.load(b.scale + b_scales, mask=column < N, other=0.0)
        value = value.to(tl.float32) * left[:, None] * right[None, :]
        if PAIR:
            right = tl.load(up.scale + b_scales, mask=column < N, other=0.0)
            up_value = up_value.to(tl.float32) * left[:, None] * right[None, :]
    value = value.to(tl.float32)
    if not PAIR:
        up_value = value
    return value, up_value.to(tl.float32)


@triton.jit
def _store_partial(workspace, value, part, tile, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Stores a partial sum to matrix `part` of the workspace, for split_k.py."""
    row, column = tile.first_m + tl.arange(0, BLOCK_M), tile.first_n + tl.arange(0, BLOCK_N)
    start = part.to(tl.int64) * M + row.to(tl.int64)
    inside = (row < M)[:, None] & (column < N)[None, :]
    tl.store(workspace + start[:, None] * N + column[None, :], value, mask=inside)


@triton.jit
def matmul_kernel(
    a, a_descriptor, b, b_descriptor, up, up_descriptor, scales, workspace, c, c_descriptor, epilogue,
    a_strides, b_strides, up_strides, a_scale_strides, b_scale_strides, epilogue_strides, batches, M, N, K,
    PRODUCT: tl.constexpr, EPILOGUE: tl.constexpr,
):  # fmt: skip
    """C = epilogue(A B), or partial sums of it in the workspace.

    `scales`, `epilogue` and `epilogue_strides` are Scales, EpiloguePointers and EpilogueStrides; PRODUCT and EPILOGUE
    are ProductTraits and EpilogueTraits. Descriptors are arguments of their own: Triton takes none inside a tuple.
    """
    SPLITS: tl.constexpr = PRODUCT.SPLITS
    BLOCK_M: tl.constexpr = PRODUCT.BLOCK_M
    BLOCK_N: tl.constexpr = PRODUCT.BLOCK_N
    BLOCK_K: tl.constexpr = PRODUCT.BLOCK_K
    PERSISTENT: tl.constexpr = PRODUCT.PERSISTENT
    GROUP_M: tl.constexpr = PRODUCT.GROUP_M
    a_operand = BatchedOperand(a, a_descriptor, a_strides, scales.a, a_scale_strides)
    b_operand = BatchedOperand(b, b_descriptor, b_strides, scales.b, b_scale_strides)
    up_operand = BatchedOperand(up, up_descriptor, up_strides, scales.up, b_scale_strides)
    output = Output(c, c_descriptor, epilogue, epilogue_strides, M, N)
    tiles_m, tiles_n, steps = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), tl.cdiv(K, BLOCK_K)
    program, last = tl.program_id(0), tl.program_id(0) + 1
    if PERSISTENT:
        last = tiles_m * tiles_n * SPLITS * batches
    # A program per tile runs the body once: `last` is its own tile's end.
    for work in tl.range(program, last, tl.num_programs(0), flatten=PERSISTENT):
        split = work % SPLITS
        index = (work // SPLITS) % (tiles_m * tiles_n)
        batch = work // (SPLITS * tiles_m * tiles_n)
        tile_m, tile_n = tile_position(index, tiles_m, tiles_n, GROUP_M)
        tile = Tile(batch, tile_m * BLOCK_M, tile_n * BLOCK_N)
        first_step, last_step = split * steps // SPLITS, (split + 1) * steps // SPLITS
        value, up_value = _tile_product(a_operand, b_operand, up_operand, tile, first_step, last_step, M, N, K, PRODUCT)
        if SPLITS > 1:  # partial sums [SPLITS * batches, M, N]; of gate and up [SPLITS * batches, 2, M, N]
            part = split * batches + batch
            if up is not None:
                part *= 2
                _store_partial(workspace, up_value, part + 1, tile, M, N, BLOCK_M, BLOCK_N)
            _store_partial(workspace, value, part, tile, M, N, BLOCK_M, BLOCK_N)
        else:
            store_result(value, up_value, tile, output, EPILOGUE, BLOCK_M, BLOCK_N)


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
