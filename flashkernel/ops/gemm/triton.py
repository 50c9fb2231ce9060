"""Linear layers of few rows in Triton: the weight is streamed once, and everything around the product is fused.

Two kernels. `linear_vector`, for a handful of rows, is plain arithmetic: every thread multiplies 16-byte pieces of
weight rows with the same piece of x, and adds up across threads once, at the end. `linear_tensor` puts the weight's
rows on the tensor cores' long side and x's, padded to 16, on the short one; its programs take equal shares of the
whole work, and where a share ends within a tile the last program to arrive adds the parts, in a fixed order.

Weights in int4, int8 and MXFP4 go to `linear_tensor`, which dequantizes them in registers and takes any number of rows.

Both take several weights (q, k and v, say) whose outputs lie side by side, or a gate and an up weight whose columns a
program computes together. RMSNorm's 1 / rms is a factor of the finished row, so x is normalized as it streams by.
"""

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flashkernel.blocks.dequantize_triton import load_quantized
from flashkernel.blocks.epilogue import Epilogue
from flashkernel.blocks.epilogue_triton import apply_epilogue
from flashkernel.blocks.pdl_triton import pdl_enter
from flashkernel.blocks.weight import Weight
from flashkernel.blocks.weight_formats.grouped import scales_of
from flashkernel.core import device, tune
from flashkernel.core.arguments import near
from flashkernel.core.launch import launch, pdl_options
from flashkernel.ops.gemm.configs import DEQUANTIZED, LINEAR, LinearConfig, row_tile, tile_count
from flashkernel.ops.gemm.counters import counters
from flashkernel.ops.gemm.kernel_args import (
    LinearInput,
    LinearOutput,
    LinearTile,
    LinearTraits,
    NormScalars,
    OutputStrides,
    StreamKMemory,
    WeightLayout,
)
from flashkernel.ops.gemm.params import LinearExtras, in_one_layout


@triton.jit
def _weight_of_tile(tile, weights, strides, biases, sizes, BLOCK_N: tl.constexpr):
    """(weight, its stride, bias, size, first tile, first column) of the weight that a tile belongs to."""
    weight, stride, bias, size = weights[0], strides[0], biases[0], sizes[0]
    tiles, columns, first_tile, first_column = 0, 0, 0, 0
    for part in tl.static_range(1, len(sizes)):
        tiles += tl.cdiv(sizes[part - 1], BLOCK_N)
        columns += sizes[part - 1]
        here = tile >= tiles
        weight = tl.where(here, weights[part], weight)
        stride = tl.where(here, strides[part], stride)
        bias = tl.where(here, biases[part], bias)
        size = tl.where(here, sizes[part], size)
        first_tile = tl.where(here, tiles, first_tile)
        first_column = tl.where(here, columns, first_column)
    return weight, stride, bias, size, first_tile, first_column


@triton.jit
def _scales_of_tile(tile, out_column, scales, scale_strides, sizes, BLOCK_N: tl.constexpr):
    """Scales [BLOCK_N] of a tile's outputs, from those of the quantized weight that it belongs to."""
    scale, stride, size, tiles = scales[0], scale_strides[0], sizes[0], 0
    for part in tl.static_range(1, len(sizes)):
        tiles += tl.cdiv(sizes[part - 1], BLOCK_N)
        here = tile >= tiles
        scale = tl.where(here, scales[part], scale)
        stride = tl.where(here, scale_strides[part], stride)
        size = tl.where(here, sizes[part], size)
    return tl.load(scale + tl.minimum(out_column, size - 1) * stride)


@triton.jit
def _add_vectors(values, LENGTH: tl.constexpr, VECTOR: tl.constexpr):
    """[..., LENGTH] -> [..., LENGTH / VECTOR]: sums within a thread."""
    if len(values.shape) == 2:
        return tl.sum(tl.reshape(values, (values.shape[0], LENGTH // VECTOR, VECTOR)), 2)
    else:
        return tl.sum(tl.reshape(values, (LENGTH // VECTOR, VECTOR)), 1)


@triton.jit
def linear_vector(
    input, weights, scales, biases, output, x_stride, strides, scale_strides, output_strides, sizes, inner, norm,
    TRAITS: tl.constexpr, TILE: tl.constexpr, VECTOR: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows of y, BLOCK_N columns per program, in vectors of VECTOR elements.

    `input`, `output`, `output_strides` and `norm` are LinearInput, LinearOutput, OutputStrides and NormScalars; TRAITS
    and TILE are LinearTraits and LinearTile.
    """
    EPILOGUE: tl.constexpr = TRAITS.EPILOGUE
    GATED: tl.constexpr = TRAITS.GATED
    NORM: tl.constexpr = TRAITS.NORM
    SCALED: tl.constexpr = TRAITS.SCALED
    FULL_K: tl.constexpr = TILE.FULL_K
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    tile = tl.program_id(0)
    PRODUCTS: tl.constexpr = 2 if GATED else 1
    LAST: tl.constexpr = len(weights) - 1  # the up weight, where there is a gate
    weight, stride, bias, size, first_tile, first_column = _weight_of_tile(
        tile, weights, strides, biases, sizes, BLOCK_N
    )
    out_column = (tile - first_tile) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    step = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    near = tl.minimum(out_column, size - 1).to(tl.int64)[
        :, None
    ]  # columns beyond the last repeat it, and are not stored
    if PDL:
        pdl_enter()
    left = weight + near * stride + step[None, :]  # [BLOCK_N, BLOCK_K]
    right = weights[LAST] + near * strides[LAST] + step[None, :]
    sums = (tl.zeros([BLOCK_N, BLOCK_K // VECTOR], tl.float32),) * (BLOCK_M * PRODUCTS)
    squares = (tl.zeros([BLOCK_K // VECTOR], tl.float32),) * (BLOCK_M if NORM else 0)

    for first in tl.range(0, inner, BLOCK_K, num_stages=TILE.NUM_STAGES):
        inside = (first + step < inner) | FULL_K
        gate = tl.load(left + first, mask=inside[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
        if GATED:
            up = tl.load(right + first, mask=inside[None, :], other=0.0, eviction_policy="evict_first").to(tl.float32)
        if NORM:
            factor = tl.load(input.norm_weight + first + step, mask=inside, other=0.0).to(tl.float32) + norm.offset
        new_sums, new_squares = sums * 0, squares * 0
        for row in tl.static_range(BLOCK_M):
            x_row = input.x + tl.full([], row, tl.int64) * x_stride
            values = tl.load(x_row + first + step, mask=inside, other=0.0, eviction_policy="evict_last").to(tl.float32)
            if NORM:
                new_squares = new_squares + (squares[row] + _add_vectors(values * values, BLOCK_K, VECTOR),)
                values *= factor
            new_sums = new_sums + (sums[row * PRODUCTS] + _add_vectors(gate * values[None, :], BLOCK_K, VECTOR),)
            if GATED:
                new_sums = new_sums + (sums[row * PRODUCTS + 1] + _add_vectors(up * values[None, :], BLOCK_K, VECTOR),)
        sums, squares = new_sums, new_squares

    in_columns = out_column < size
    if SCALED:
        scale = _scales_of_tile(tile, out_column, scales, scale_strides, sizes, BLOCK_N)
        if GATED:
            up_scale = tl.load(scales[LAST] + tl.minimum(out_column, size - 1) * scale_strides[LAST])
    for row in tl.static_range(BLOCK_M):
        value = tl.sum(sums[row * PRODUCTS], 1)[None, :]  # [1, BLOCK_N]
        up_value = tl.sum(sums[row * PRODUCTS + PRODUCTS - 1], 1)[None, :]
        if SCALED:
            value *= scale[None, :]
            if GATED:
                up_value *= up_scale[None, :]
        if NORM:
            rstd = tl.rsqrt(tl.sum(squares[row], 0) / inner + norm.eps)
            value *= rstd
            up_value *= rstd
        here = tl.full([1], row, tl.int32)
        value = apply_epilogue(
            value, up_value, here, first_column + out_column, out_column, here == row, in_columns,
            bias, biases[LAST] if GATED else bias, output_strides.bias, output.residual, output_strides.residual,
            EPILOGUE,
        )  # fmt: skip
        target = output.y + row * output_strides.y + (first_column + out_column)[None, :]
        tl.store(target, value, mask=in_columns[None, :])


@triton.jit
def _store_partial(
    workspace, slot, value, up_value, squares, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """One program's part of a tile: the sums [BLOCK_M, BLOCK_N] of each product, then the squares [BLOCK_M]."""
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N * (2 if GATED else 1) + BLOCK_M
    base = workspace + slot.to(tl.int64) * SIZE
    flat = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    tl.store(base + flat, value)
    if GATED:
        tl.store(base + BLOCK_M * BLOCK_N + flat, up_value)
    tl.store(base + SIZE - BLOCK_M + tl.arange(0, BLOCK_M), squares)


@triton.jit
def _sum_partials(workspace, begin, end, GATED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """The whole of a tile from the parts of programs begin to end, in that order."""
    SIZE: tl.constexpr = BLOCK_M * BLOCK_N * (2 if GATED else 1) + BLOCK_M
    flat = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    up_value = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    squares = tl.zeros([BLOCK_M], tl.float32)
    for program in range(begin, end + 1):
        # Past the L1 cache, which other SMs do not write to.
        base = workspace + (2 * program + (program == begin).to(tl.int32)).to(tl.int64) * SIZE
        value += tl.load(base + flat, cache_modifier=".cg")
        if GATED:
            up_value += tl.load(base + BLOCK_M * BLOCK_N + flat, cache_modifier=".cg")
        squares += tl.load(base + SIZE - BLOCK_M + tl.arange(0, BLOCK_M), cache_modifier=".cg")
    return value, up_value, squares


@triton.jit
def _weight_pointers(weight, stride, out_column, size, step, TRANSPOSED: tl.constexpr):
    """(pointers [BLOCK_N, BLOCK_K] to a weight's rows, elements from one element of the sum to the next)."""
    if (
        TRANSPOSED
    ):  # stored (in, out): 16-byte loads go along the columns, so those beyond the last are masked by the caller
        return weight + out_column[:, None] + step.to(tl.int64)[None, :] * stride, stride.to(tl.int64)
    else:  # columns beyond the last repeat it, and are not stored
        return weight + tl.minimum(out_column, size - 1).to(tl.int64)[:, None] * stride + step[None, :], 1


@triton.jit
def linear_tensor(
    input, weights, scales, biases, output, stream_k, zeros,
    x_stride, strides, scale_strides, output_strides, sizes, inner, rows, tiles, share, norm,
    TRAITS: tl.constexpr, LAYOUT: tl.constexpr, TILE: tl.constexpr, STREAM_K: tl.constexpr, PRECISION: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Tiles of y; with STREAM_K the programs take equal shares of the K steps of all tiles.

    `input`, `output`, `stream_k`, `output_strides` and `norm` are LinearInput, LinearOutput, StreamKMemory,
    OutputStrides and NormScalars; TRAITS, LAYOUT and TILE are LinearTraits, WeightLayout and LinearTile.
    """
    EPILOGUE: tl.constexpr = TRAITS.EPILOGUE
    GATED: tl.constexpr = TRAITS.GATED
    NORM: tl.constexpr = TRAITS.NORM
    SCALED: tl.constexpr = TRAITS.SCALED
    TRANSPOSED: tl.constexpr = LAYOUT.TRANSPOSED
    FORMAT: tl.constexpr = LAYOUT.FORMAT
    ZEROS: tl.constexpr = LAYOUT.ZEROS
    GROUP: tl.constexpr = LAYOUT.GROUP
    FULL_K: tl.constexpr = TILE.FULL_K
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    LAST: tl.constexpr = len(weights) - 1  # the up weight, where there is a gate
    program = tl.program_id(0)
    steps = tl.cdiv(inner, BLOCK_K)
    if STREAM_K:  # the work is tiles x steps, in that order, cut into equal shares
        work_begin = program * share
        work_end = tl.minimum(work_begin + share, tiles * steps)
        first_of_mine, last_of_mine = work_begin // steps, (work_end - 1) // steps
    else:
        work_begin, work_end = program * steps, (program + 1) * steps
        first_of_mine, last_of_mine = program, program
    if PDL:
        pdl_enter()
    row = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    step = tl.arange(0, BLOCK_K)  # [BLOCK_K]
    near_row = tl.minimum(row, rows - 1).to(tl.int64)
    x_rows = input.x + near_row[None, :] * x_stride + step[:, None]  # [BLOCK_K, BLOCK_M]

    for tile in range(first_of_mine, last_of_mine + 1):
        weight, stride, bias, size, first_tile, first_column = _weight_of_tile(
            tile, weights, strides, biases, sizes, BLOCK_N
        )
        out_column = (tile - first_tile) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        if FORMAT != "":
            near = tl.minimum(out_column, size - 1).to(tl.int64)
            scale, scale_stride, zero, _, _, _ = _weight_of_tile(tile, scales, scale_strides, zeros, sizes, BLOCK_N)
        else:
            left, advance = _weight_pointers(weight, stride, out_column, size, step, TRANSPOSED)  # [BLOCK_N, BLOCK_K]
            right, right_advance = _weight_pointers(weights[LAST], strides[LAST], out_column, size, step, TRANSPOSED)
        product = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        other = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        squares = tl.zeros([BLOCK_K, BLOCK_M], tl.float32)
        begin = tl.maximum(work_begin - tile * steps, 0)
        end = tl.minimum(work_end - tile * steps, steps)
        for first in tl.range(begin * BLOCK_K, end * BLOCK_K, BLOCK_K, num_stages=TILE.NUM_STAGES):
            inside = (first + step < inner) | FULL_K
            there = inside[None, :]
            if TRANSPOSED:
                there &= (out_column < size)[:, None]
            values = tl.load(x_rows + first, mask=inside[:, None], other=0.0)
            if FORMAT != "":
                loaded = load_quantized(
                    weight, near * stride, scale, zero, near * scale_stride, first, step, inner,
                    FORMAT, ZEROS, GROUP, BLOCK_K,
                )  # fmt: skip
            else:
                loaded = tl.load(left + first * advance, mask=there, other=0.0, eviction_policy="evict_first")
            if NORM:
                wide = values.to(tl.float32)
                squares += wide * wide
                factor = tl.load(input.norm_weight + first + step, mask=inside, other=0.0).to(tl.float32) + norm.offset
                values = (wide * factor[:, None]).to(values.dtype)
            product = tl.dot(loaded.to(values.dtype), values, product, input_precision=PRECISION)
            if GATED:
                if FORMAT != "":
                    loaded = load_quantized(
                        weights[LAST], near * strides[LAST], scales[LAST], zeros[LAST], near * scale_strides[LAST],
                        first, step, inner, FORMAT, ZEROS, GROUP, BLOCK_K,
                    )  # fmt: skip
                else:
                    loaded = tl.load(
                        right + first * right_advance, mask=there, other=0.0, eviction_policy="evict_first"
                    )
                other = tl.dot(loaded.to(values.dtype), values, other, input_precision=PRECISION)

        value, up_value, square = (
            tl.trans(product),
            tl.trans(other),
            tl.sum(squares, 0),
        )  # [BLOCK_M, BLOCK_N], [BLOCK_M]
        complete = True
        if STREAM_K:
            complete = (begin == 0) & (end == steps)
            if not complete:
                # A program's first tile may lack its start, its last one its end: two slots each.
                _store_partial(
                    stream_k.workspace, 2 * program + (begin == 0).to(tl.int32), value, up_value, square,
                    GATED, BLOCK_M, BLOCK_N,
                )  # fmt: skip
                first_program, last_program = tile * steps // share, ((tile + 1) * steps - 1) // share
                tl.debug_barrier()  # every thread has stored before one of them says so
                before = tl.atomic_add(stream_k.counters + tile, 1, sem="acq_rel")
                if before == last_program - first_program:
                    tl.store(stream_k.counters + tile, 0)  # as the next launch wants to find it
                    value, up_value, square = _sum_partials(
                        stream_k.workspace, first_program, last_program, GATED, BLOCK_M, BLOCK_N
                    )
                    complete = True
        if complete:
            if SCALED:
                value *= _scales_of_tile(tile, out_column, scales, scale_strides, sizes, BLOCK_N)[None, :]
                if GATED:
                    near = tl.minimum(out_column, size - 1)
                    up_value *= tl.load(scales[LAST] + near * scale_strides[LAST])[None, :]
            if NORM:
                rstd = tl.rsqrt(square / inner + norm.eps)[:, None]
                value *= rstd
                up_value *= rstd
            in_rows, in_columns, column = row < rows, out_column < size, first_column + out_column
            value = apply_epilogue(
                value, up_value, row, column, out_column, in_rows, in_columns,
                bias, biases[LAST] if GATED else bias, output_strides.bias, output.residual, output_strides.residual,
                EPILOGUE,
            )  # fmt: skip
            target = output.y + row.to(tl.int64)[:, None] * output_strides.y + column[None, :]
            tl.store(target, value, mask=in_rows[:, None] & in_columns[None, :])


def forward(x: Tensor, weights: list[Any], biases: list[Tensor], extras: LinearExtras) -> Tensor:
    """y [rows, outputs] of x [rows, inner]; the weights are [n, inner] each, and a gated chain's are gate and up.

    x and the residual have unit stride along their rows; the biases are none, or one for each weight. Quantized weights
    are read as they are stored, and finished sums are multiplied by their scales.
    """
    residual, norm_weight, chain, _, eps, offset, dtype = extras
    rows, inner = x.shape
    gated = Epilogue.parse(chain).gated
    sizes = (weights[0].shape[0],) if gated else tuple([weight.shape[0] for weight in weights])
    y = torch.empty((rows, sum(sizes)), dtype=dtype, device=x.device)
    if y.numel() == 0:
        return y
    quantized = _Quantized() if isinstance(weights[0], Tensor) else _quantized(weights)
    matrices = [weight.data for weight in weights]
    weights, transposed = _one_layout([one.contiguous() for one in matrices] if quantized.format else matrices)
    biases = in_one_layout(biases)
    if norm_weight is not None:
        norm_weight = norm_weight.contiguous()
    shape = {
        "rows": rows, "columns": sum(sizes), "inner": inner, "bytes": weights[0].element_size(),
        "x_bytes": x.element_size(), "streams": 2 if gated else 1, "transposed": transposed,
        "norm": norm_weight is not None, "dequantized": bool(quantized.format),
    }  # fmt: skip
    props = device.properties(x.device)
    config = tune.pick(LINEAR, props, shape)
    tensors = (
        LinearInput(x, norm_weight), tuple(weights), quantized.scales,
        tuple(biases) if biases else (x,) * len(weights), LinearOutput(residual, y),
    )  # fmt: skip
    strides = (
        x.stride(0), tuple([weight.stride(1 if transposed else 0) for weight in weights]), quantized.scale_strides,
        OutputStrides(
            biases[0].stride(0) if biases else 0, 0 if residual is None else residual.stride(0), y.stride(0)
        ),
        sizes, inner,
    )  # fmt: skip
    norm = NormScalars(eps, offset)
    block_m = rows if config.kernel == "vector" else row_tile(rows)
    constants = {
        "TRAITS": LinearTraits(
            chain, gated, norm_weight is not None, quantized.scales is not None and not quantized.format
        ),
        "TILE": LinearTile(
            block_m, config.block_n, config.block_k, inner % config.block_k == 0, config.num_stages
        ),
        "num_warps": config.num_warps,
        **pdl_options(props),
    }  # fmt: skip
    if config.kernel == "vector":
        launch(
            linear_vector, (tile_count(config, sizes),),
            *tensors, *strides, norm, VECTOR=16 // weights[0].element_size(), **constants,
        )  # fmt: skip
        return y
    programs, share, tiles = _stream_k_shares(config, sizes, inner)
    shared, row_tiles = share > 0, tune.ceil_div(rows, block_m)
    parts = block_m * (config.block_n * (2 if gated else 1) + 1)
    workspace = torch.empty(2 * programs * parts, dtype=torch.float32, device=x.device) if shared else None
    stream_k = StreamKMemory(workspace, counters(x.device) if shared else None)
    launch(
        linear_tensor, (programs,) if row_tiles == 1 else (programs, row_tiles),
        *tensors, stream_k, quantized.zeros, *strides, rows, tiles, share, norm,
        LAYOUT=WeightLayout(transposed, quantized.format, quantized.has_zeros, quantized.group),
        STREAM_K=shared, PRECISION="tf32x3" if x.dtype == torch.float32 else "tf32", **constants,
    )  # fmt: skip
    return y


@dataclass(frozen=True)
class _Quantized:
    """What the kernels know of quantized weights besides their data. Without a `format`, scales multiply finished sums;
    with one, elements are dequantized before the product."""

    scales: tuple[Tensor, ...] | None = None
    scale_strides: tuple[int, ...] | None = None  # from one row's to the next
    zeros: tuple[Tensor, ...] | None = None
    has_zeros: bool = False
    format: str = ""
    group: int = 0  # columns that share a scale; 0: all


def _quantized(weights: list[Weight]) -> _Quantized:
    stored = [scales_of(weight) for weight in weights]
    if weights[0].format not in DEQUANTIZED:
        flat = tuple([near(scales.reshape(-1)) for scales in stored])  # one, or one for each output
        return _Quantized(flat, tuple([0 if scale.numel() == 1 else scale.stride(0) for scale in flat]))
    scales = tuple([scale.contiguous() for scale in stored])
    strides = tuple([0 if one.group_shape[0] == -1 else scale.shape[1] for one, scale in zip(weights, scales)])
    zeros = tuple([one.zeros.contiguous() for one in weights if one.zeros is not None])
    has_zeros = len(zeros) > 0
    return _Quantized(
        scales, strides, zeros if has_zeros else scales, has_zeros, weights[0].format,
        max(0, weights[0].group_shape[1]),
    )  # fmt: skip


def _one_layout(weights: list[Tensor]) -> tuple[list[Tensor], bool]:
    """The weights, and whether they are contiguous along their outputs; a mixture is copied into the usual layout."""
    if all(weight.stride(1) == 1 or weight.shape[1] <= 1 for weight in weights):
        return weights, False
    if all(weight.stride(0) == 1 for weight in weights):
        return weights, True
    return [weight.contiguous() for weight in weights], False


def _stream_k_shares(config: LinearConfig, sizes: tuple[int, ...], inner: int) -> tuple[int, int, int]:
    """(programs, steps in each one's share, tiles); a share of 0 stands for one whole tile."""
    tiles = tile_count(config, sizes)
    steps = tune.ceil_div(inner, config.block_k)
    if config.programs == 0 or steps == 0:
        return tiles, 0, tiles
    share = tune.ceil_div(tiles * steps, config.programs)
    return (tiles, 0, tiles) if share == steps else (tune.ceil_div(tiles * steps, share), share, tiles)
