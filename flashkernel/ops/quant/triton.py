"""Quantization in Triton: every element is read once and its code written once.

A tile holds whole groups: rows, or parts of rows that share a scale. So the largest magnitude of a group, its scale and
its codes are computed from registers. One kernel serves plain inputs and gated activations; the norm needs whole rows
and has its own.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from flashkernel.blocks.activation_triton import activate, clamp_gate, clamp_up
from flashkernel.blocks.codec_triton import encode_e4m3, encode_int8, largest_bits
from flashkernel.blocks.pdl_triton import pdl_enter
from flashkernel.core import device, env, tune
from flashkernel.core.launch import launch, pdl_options
from flashkernel.ops.quant.configs import DEQUANTIZE, NORM, QUANTIZE

TINY = tl.constexpr(1.1754943508222875e-38)  # the least normal float32; a scale that rounds to 0 would divide by it
ROUND = tl.constexpr(12582912.0)  # 1.5 * 2^23: a sum with it has no fraction bits
_STORED = {"e4m3": torch.uint8, "int8": torch.int8}


@triton.jit
def _group_scale(values, CODE: tl.constexpr):
    """Scales [GROUPS] of values [GROUPS, BLOCK]: the largest magnitude becomes 448 or 127."""
    largest = largest_bits(values).to(tl.float32, bitcast=True)
    if CODE == "e4m3":
        scale = largest * (1.0 / 448.0)
    else:
        scale = largest * (1.0 / 127.0)
    return tl.where(largest > 0, tl.maximum(scale, TINY), 1.0)


@triton.jit
def _inverse(scale):
    """1 / scale, rounded to nearest."""
    return tl.div_rn(tl.full(scale.shape, 1.0, tl.float32), scale)


@triton.jit
def _encode(values, CODE: tl.constexpr, HARDWARE: tl.constexpr):
    """Codes of values that were divided by their scale: uint8 or int8."""
    if CODE == "int8":
        return encode_int8(values)
    elif HARDWARE:  # sm_89 and newer convert, round to nearest even and saturate in one instruction
        return values.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        return encode_e4m3(values)


class Groups(NamedTuple):
    """The groups of a program, [GROUPS] each, and their elements, [GROUPS, BLOCK] each."""

    index: Any
    exists: Any
    row: Any
    first: Any  # column of each group
    column: Any  # of each element
    inside: Any  # whether there is an element


@triton.jit
def _groups_of_program(groups, groups_per_row, columns, width, GROUPS: tl.constexpr, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)  # [GROUPS]
    row, first = group // groups_per_row, (group % groups_per_row) * columns
    exists, column = group < groups, tl.arange(0, BLOCK)
    at = first[:, None] + column[None, :]  # [GROUPS, BLOCK]
    inside = exists[:, None] & (column < columns)[None, :] & (at < width)
    return Groups(group, exists, row, first, at, inside)


@triton.jit
def quantize_groups(
    gate, up, scale_given, data, scales, zeros,
    gate_stride, up_stride, up_start, groups, groups_per_row, columns, width, alpha, limit,
    LAYOUT: tl.constexpr, KIND: tl.constexpr, CODE: tl.constexpr, STATIC: tl.constexpr, SYMMETRIC: tl.constexpr,
    HARDWARE: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """LAYOUT "plain": codes of `gate` alone. STATIC: "tensor" or "group" reads scales, "" computes them."""
    if PDL:
        pdl_enter()
    own = _groups_of_program(groups, groups_per_row, columns, width, GROUPS, BLOCK)
    group, exists, row, first, at, inside = own.index, own.exists, own.row, own.first, own.column, own.inside
    if LAYOUT == "interleaved":
        both = tl.arange(0, 2 * BLOCK)
        there = 2 * first[:, None] + both[None, :]
        read = exists[:, None] & (both < 2 * columns)[None, :] & (there < 2 * width)
        pair = tl.load(gate + row[:, None] * gate_stride + there, mask=read, other=0.0)
        gate_value, up_value = tl.split(tl.reshape(pair, (GROUPS, BLOCK, 2)))
    else:
        gate_value = tl.load(gate + row[:, None] * gate_stride + at, mask=inside, other=0.0)
        up_value = gate_value
        if LAYOUT != "plain":
            up_value = tl.load(up + row[:, None] * up_stride + up_start + at, mask=inside, other=0.0)
    values = gate_value.to(tl.float32)
    if LAYOUT != "plain":
        values, _ = activate(clamp_gate(values, limit, KIND), KIND, alpha)
        values *= clamp_up(up_value.to(tl.float32), limit, KIND)

    if STATIC == "tensor":
        scale = tl.load(scale_given) + tl.zeros([GROUPS], tl.float32)
    elif STATIC == "group":
        scale = tl.load(scale_given + group, mask=exists, other=1.0)
    elif SYMMETRIC:
        scale = _group_scale(values, CODE)
    else:  # half of both: their difference may overflow
        low, high = tl.minimum(tl.min(values, 1), 0.0) * 0.5, tl.maximum(tl.max(values, 1), 0.0) * 0.5
        scale = tl.where(high > low, tl.maximum((high - low) * (2.0 / 255.0), TINY), 1.0)
    inverse = _inverse(scale)
    if STATIC == "":
        tl.store(scales + group, scale, mask=exists)
    if SYMMETRIC:
        code = _encode(values * inverse[:, None], CODE, HARDWARE)
    else:
        zero = -128.0 - ((2.0 * low * inverse + ROUND) - ROUND)
        zero = tl.minimum(tl.maximum(zero, -128.0), 127.0)
        tl.store(zeros + group, zero.to(tl.int8), mask=exists)
        steps = ((values * inverse[:, None] + ROUND) - ROUND) + zero[:, None]
        code = tl.minimum(tl.maximum(steps, -128.0), 127.0).to(tl.int8)
    tl.store(data + row[:, None] * width + at, code, mask=inside)


@triton.jit
def dequantize_groups(
    codes, scales, zeros, y, codes_stride, groups, groups_per_row, columns, width,
    ONE_SCALE: tl.constexpr, HAS_ZEROS: tl.constexpr, GROUPS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        pdl_enter()
    own = _groups_of_program(groups, groups_per_row, columns, width, GROUPS, BLOCK)
    group, exists, row, at, inside = own.index, own.exists, own.row, own.column, own.inside
    index = tl.zeros_like(group) if ONE_SCALE else group
    values = tl.load(codes + row[:, None] * codes_stride + at, mask=inside).to(tl.float32)
    if HAS_ZEROS:
        values -= tl.load(zeros + index, mask=exists, other=0).to(tl.float32)[:, None]
    values *= tl.load(scales + index, mask=exists, other=0.0)[:, None]
    tl.store(y + row[:, None] * width + at, values, mask=inside)


@triton.jit
def rms_norm_quantize_rows(
    x, residual, weight, data, scales, total,
    x_stride, residual_stride, rows, width, groups_per_row, eps, offset,
    HAS_RESIDUAL: tl.constexpr, HAS_WEIGHT: tl.constexpr, CODE: tl.constexpr, HARDWARE: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """COLUMNS of the BLOCK of a row share a scale."""
    if PDL:
        pdl_enter()
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)  # [ROWS]
    column = tl.arange(0, BLOCK)
    inside = (row < rows)[:, None] & (column < width)[None, :]  # [ROWS, BLOCK]
    values = tl.load(x + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if HAS_RESIDUAL:
        values += tl.load(residual + row[:, None] * residual_stride + column[None, :], mask=inside, other=0.0)
        tl.store(total + row[:, None] * width + column[None, :], values, mask=inside)
    values *= tl.rsqrt(tl.sum(values * values, 1) / width + eps)[:, None]
    if HAS_WEIGHT:
        gain = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32) + offset  # [BLOCK]
        values *= gain[None, :]
    grouped = tl.reshape(values, (ROWS * BLOCK // COLUMNS, COLUMNS))
    scale = _group_scale(grouped, CODE)  # [ROWS * BLOCK / COLUMNS]
    code = tl.reshape(_encode(grouped * _inverse(scale)[:, None], CODE, HARDWARE), (ROWS, BLOCK))
    tl.store(data + row[:, None] * width + column[None, :], code, mask=inside)
    group = tl.arange(0, BLOCK // COLUMNS)
    there = (row < rows)[:, None] & (group < groups_per_row)[None, :]
    stored = tl.reshape(scale, (ROWS, BLOCK // COLUMNS))
    tl.store(scales + row[:, None] * groups_per_row + group[None, :], stored, mask=there)


def quantize(
    x: torch.Tensor, scale: torch.Tensor | None, code: str, columns: int, symmetric: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scales, zeros) of x [rows, width]; scales are empty if one is given, zeros if symmetric."""
    codes, scales = _outputs(x, x.shape[1], code, columns)
    zeros = torch.empty(0 if symmetric else scales.shape, dtype=torch.int8, device=x.device)
    static = "" if scale is None else "tensor" if scale.numel() == 1 else "group"
    _launch_groups(x, x, scale, codes, scales, zeros, "plain", "relu", code, static, symmetric, columns)
    return codes, scales if scale is None else scales.new_empty(0), zeros


def glu_quantize(
    gate: torch.Tensor, up: torch.Tensor | None, kind: str, layout: str, code: str, columns: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes, scales) of activation(gate) * up, of [rows, width] tensors or of one that holds both."""
    width = gate.shape[1] if up is not None else gate.shape[1] // 2
    codes, scales = _outputs(gate, width, code, columns)
    _launch_groups(gate, gate if up is None else up, None, codes, scales, scales, layout, kind, code, "", True, columns)
    return codes, scales


def dequantize(
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor | None,
    code: str,
    columns: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """(codes - zeros) * scales in `dtype`."""
    rows, width = codes.shape
    y = torch.empty((rows, width), dtype=dtype, device=codes.device)
    if not y.numel():
        return y
    values = codes.view(torch.float8_e4m3fn) if code == "e4m3" else codes
    props = device.properties(codes.device)
    groups_per_row = tune.ceil_div(width, columns)
    shape = {"groups": rows * groups_per_row, "columns": columns, "bytes": 1, "loads": 1}
    config = tune.pick(DEQUANTIZE, props, shape)
    launch(
        dequantize_groups, (tune.ceil_div(shape["groups"], config.groups),),
        values, scales, zeros, y, values.stride(0), shape["groups"], groups_per_row, columns, width,
        ONE_SCALE=scales.numel() == 1, HAS_ZEROS=zeros is not None, GROUPS=config.groups,
        BLOCK=tune.power_of_2(columns), num_warps=config.num_warps, **pdl_options(props, y.nbytes),
    )  # fmt: skip
    return y


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    residual: torch.Tensor | None,
    code: str,
    columns: int,
    eps: float,
    offset: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(codes, scales, x + residual or an empty tensor) of x [rows, width]."""
    rows, width = x.shape
    codes, scales = _outputs(x, width, code, columns)
    total = torch.empty(0 if residual is None else (rows, width), dtype=x.dtype, device=x.device)
    if not x.numel():
        return codes, scales, total
    block = tune.power_of_2(width)
    props = device.properties(x.device)
    shape = {"groups": rows, "columns": width, "bytes": x.element_size(), "loads": 1 if residual is None else 2}
    config = tune.pick(NORM, props, shape)
    launch(
        rms_norm_quantize_rows, (tune.ceil_div(rows, config.groups),),
        x, residual, weight, codes, scales, total,
        x.stride(0), 0 if residual is None else residual.stride(0), rows, width, scales.shape[1], eps, offset,
        HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, CODE=code, HARDWARE=_hardware(props),
        ROWS=config.groups, BLOCK=block, COLUMNS=block if scales.shape[1] == 1 else columns,
        num_warps=config.num_warps, **pdl_options(props, 2 * x.nbytes),
    )  # fmt: skip
    return codes, scales, total


def _outputs(x: torch.Tensor, width: int, code: str, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = torch.empty((x.shape[0], width), dtype=_STORED[code], device=x.device)
    if not width:  # nothing is launched
        return codes, torch.ones((x.shape[0], 1), dtype=torch.float32, device=x.device)
    groups = tune.ceil_div(width, columns)
    return codes, torch.empty((x.shape[0], groups), dtype=torch.float32, device=x.device)


def _hardware(props: device.Device) -> bool:
    """Whether Triton converts float32 to e4m3 by an instruction."""
    return props.arch >= 89 and not env.interpreting()


def _launch_groups(
    gate: torch.Tensor,
    up: torch.Tensor,
    scale: torch.Tensor | None,
    codes: torch.Tensor,
    scales: torch.Tensor,
    zeros: torch.Tensor,
    layout: str,
    kind: str,
    code: str,
    static: str,
    symmetric: bool,
    columns: int,
) -> None:
    """Launches `quantize_groups`. Products and sums are not contracted (fma): codes are those of float32 arithmetic."""
    rows, width = codes.shape
    if not codes.numel():
        return
    props = device.properties(gate.device)
    groups_per_row = tune.ceil_div(width, columns)
    shape = {
        "groups": rows * groups_per_row, "columns": columns, "bytes": gate.element_size(),
        "loads": 1 if layout == "plain" else 2,
    }  # fmt: skip
    config = tune.pick(QUANTIZE, props, shape)
    launch(
        quantize_groups, (tune.ceil_div(shape["groups"], config.groups),),
        gate, up, scale, codes, scales, zeros,
        gate.stride(0), up.stride(0), width if layout == "halves" else 0, shape["groups"], groups_per_row, columns,
        width, 1.702, 7.0,
        LAYOUT=layout, KIND=kind, CODE=code, STATIC=static, SYMMETRIC=symmetric, HARDWARE=_hardware(props),
        GROUPS=config.groups, BLOCK=tune.power_of_2(columns), num_warps=config.num_warps, enable_fp_fusion=False,
        **pdl_options(props, gate.nbytes),
    )  # fmt: skip
