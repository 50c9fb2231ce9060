"""Launches the Hopper matrix product."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.fp8 import FP8, SCALE_BLOCK
from flashkernel.blocks.gate_up import split_gate_up
from flashkernel.core import device, tune
from flashkernel.core.launch import launch
from flashkernel.ops.matmul.hopper import tile_width
from flashkernel.ops.matmul.hopper.configs import (
    CONSUMER_REGISTERS,
    HOPPER_MATMUL,
    PRODUCER_REGISTERS,
    HopperMatmul,
    chunk_columns,
    num_streamed,
    second_columns,
    store_stages,
)
from flashkernel.ops.matmul.hopper.descriptors import load_operand, padded_empty, tile_descriptor, tma_compatible
from flashkernel.ops.matmul.hopper.epilogue import PartialSums, ScaleStrides
from flashkernel.ops.matmul.hopper.kernel import MatmulTraits, matmul_kernel
from flashkernel.ops.matmul.hopper.schedule import Schedule
from flashkernel.ops.matmul.kernel_args import EpilogueTensors, Scales
from flashkernel.ops.matmul.params import MatmulParams, MatmulTensors
from flashkernel.ops.matmul.triton.split_k import add_partials

# A chunk of C whose elements have an address each: more would not fit into the registers.
_UNALIGNED_COLUMNS = 16  # if only the epilogue's tensors are unaligned
_UNALIGNED_ELEMENTS = 1024  # if C is, too
_GRADIENT_ELEMENTS = 2048  # of an activation's gradient: z, dz and their pairs are in registers at once


@dataclass(frozen=True)
class _Scaling:
    """The scales of 8-bit operands, as kernel arguments."""

    kind: str = ""  # `MatmulParams.scaling`
    a_scale: Tensor | None = None  # [batch or 1, M or 1, 1], block scaling: [batch or 1, M, K blocks]
    b_scale: Tensor | None = None  # [batch or 1, 1, N or 1], block scaling: [batch or 1, K blocks, N / 128]
    up_scale: Tensor | None = None  # as b_scale

    @property
    def scales(self) -> Scales:
        return Scales(self.a_scale, self.b_scale, self.up_scale)

    @property
    def strides(self) -> ScaleStrides:
        return ScaleStrides(*_strides(self.a_scale, 0, 1, 2), *_strides(self.b_scale, 0, 2, 1))


def _strides(x: Tensor | None, *dims: int) -> tuple[int, ...]:
    return tuple([0 if x is None or x.shape[dim] == 1 else x.stride(dim) for dim in dims])


def _stored_by_tma(epilogue: EpilogueTensors) -> tuple[Tensor, ...]:
    """What is written of z and dz, as matrices of C's shape, if TMA can store them as it stores C; else nothing."""
    written = epilogue.z if epilogue.dz is None else epilogue.dz
    if written is None or written.dtype != epilogue.c.dtype or epilogue.packed == "interleaved":
        return ()
    parts = split_gate_up(written, epilogue.packed) if epilogue.packed else (written,)
    return parts if all(tma_compatible(part) for part in parts) else ()


def _known_aligned(epilogue: EpilogueTensors, z_by_tma: bool) -> bool:
    """True if Triton knows rows to be aligned, so that neighbors are read and written together."""
    z = None if z_by_tma and epilogue.dz is None else epilogue.z
    if z is not None and epilogue.packed and (epilogue.packed == "interleaved" or epilogue.c.shape[2] % 16):
        return False  # neighbors in a thread are two elements apart, or up's rows begin anywhere
    by_address = (epilogue.residual, z, None if z_by_tma else epilogue.dz)
    return all(x is None or x.stride(1) % 16 == 0 for x in by_address)


def forward(a: Tensor, b: Tensor, params: MatmulParams, tensors: MatmulTensors) -> Tensor:
    """Returns C [batch, M, N] in params.out_dtype: epilogue(A B). a is [batch or 1, M, K], b [batch or 1, K, N].

    float32 operands are rounded to tf32.
    """
    if a.dtype == torch.float32 and not params.tf32:
        raise ValueError("matmul: the Hopper kernel multiplies float32 operands in tf32 only; allow tf32")
    size = (b.shape[0] if a.shape[0] == 1 else a.shape[0], a.shape[1], b.shape[2])
    c = torch.empty(size, dtype=params.out_dtype, device=a.device) if tensors.out is None else tensors.out
    if c.numel() and tensors.block_scales is not None and not tma_compatible(c):
        # Blocks of 128 columns go through shared memory, from where TMA stores them.
        padded = padded_empty(size, params.out_dtype, a.device)
        return c.copy_(forward(a, b, params, tensors._replace(out=padded)))
    if c.numel():
        a_scale = tensors.a_scale
        if params.scaling == "block" and a_scale is not None and a_scale.stride(1) != 1:
            # A warp reads the scales of 16 rows at a time: side by side they are two sectors, not sixteen.
            a_scale = a_scale.transpose(1, 2).contiguous().transpose(1, 2)
        scaling = _Scaling(params.scaling, a_scale, tensors.b_scale, tensors.up_scale)
        _run(a, b, tensors.up, scaling, EpilogueTensors.of(c, params, tensors))
    return c


def dact(a: Tensor, b: Tensor, z: Tensor, dz: Tensor, activated: Tensor, params: MatmulParams) -> None:
    """Writes dz and activated; `MatmulDactKernels.dact` documents the arguments."""
    if activated.numel():
        _run(a, b, None, _Scaling(), EpilogueTensors.of_gradient(activated, z, dz, params))


def _run(a: Tensor, b: Tensor, up: Tensor | None, scaling: _Scaling, epilogue: EpilogueTensors) -> None:
    """One launch for a product; with split-K two."""
    (batch, m, n), k = epilogue.c.shape, a.shape[2]
    matrices = 1 if up is None else 2
    if k == 0:
        add_partials(torch.empty((0, m, n), dtype=torch.float32, device=a.device), epilogue)
        return
    shape = {
        "batch": batch, "m": m, "n": n * matrices, "k": k, "bytes": a.element_size(),
        "block_scaled": int(scaling.kind == "block"), "integer": int(a.dtype == torch.int8),
        "gated": int(up is not None), "quantized": int(epilogue.block_scales is not None),
        "tile_width": int(scaling.kind == "" and tile_width.serves(a, b, epilogue)),
    }  # fmt: skip
    config: HopperMatmul = tune.pick(HOPPER_MATMUL, device.properties(a.device), shape)
    if config.tile_width:
        tile_width.multiply(a, b, epilogue, config)
    elif config.num_splits == 1:
        _multiply(a, b, up, scaling, epilogue, config)
    else:
        partials = padded_empty((config.num_splits * batch * matrices, m, n), torch.float32, a.device)
        _multiply(a, b, up, scaling, EpilogueTensors(partials, ("", ""), gated=up is not None), config, partial=True)
        add_partials(partials, epilogue)


def _multiply(
    a: Tensor, b: Tensor, up: Tensor | None, scaling: _Scaling, epilogue: EpilogueTensors, config: HopperMatmul,
    partial: bool = False,
) -> None:  # fmt: skip
    """C [batch, M, N], or with `partial` one matrix for each split and batch entry, and for gate and up."""
    c, block_k = epilogue.c, 128 // a.element_size()
    matrices = 1 if up is None else 2
    tile_n = config.block_n // matrices  # columns of C
    a_operand, a_k_major = load_operand(a, 1, a.element_size() != 2)
    b_operand, b_k_major, up_operand = _right_operands(b, up)
    tma_store = tma_compatible(c)
    written = _stored_by_tma(epilogue) if tma_store else ()
    second_n = second_columns(config.block_n)
    chunk_n = min(second_n or tile_n, chunk_columns(config.rows, c.element_size()))
    if epilogue.dz is not None:
        elements = _GRADIENT_ELEMENTS // 2 if config.stream_k else _GRADIENT_ELEMENTS
        chunk_n = min(chunk_n, max(16, elements // config.rows))
    if not tma_store:
        chunk_n = _UNALIGNED_ELEMENTS // config.rows
    elif not _known_aligned(epilogue, len(written) > 0):
        chunk_n = min(chunk_n, _UNALIGNED_COLUMNS)
    quantize = "" if c.dtype != FP8 or partial else "scale" if epilogue.out_scale is not None else "saturate"
    if epilogue.block_scales is not None:
        quantize, chunk_n = "block", SCALE_BLOCK
    m, k, n = a.shape[1], a.shape[2], b.shape[2]
    m_tiles, n_tiles = tune.ceil_div(m, config.block_m), tune.ceil_div(n, tile_n)
    entries = c.shape[0] // (matrices if partial else 1)
    tiles, sms = m_tiles * n_tiles * entries, device.properties(a.device).sms
    k_blocks = tune.ceil_div(k, block_k)
    streamed = num_streamed(tiles, sms, k_blocks) if config.stream_k else 0
    num_programs = sms if streamed else min(sms, tiles)
    residual = epilogue.residual
    traits = MatmulTraits(
        ROWS=config.rows,
        BLOCK_N=config.block_n,
        SECOND_N=second_n,
        BLOCK_K=block_k,
        NUM_CONSUMERS=config.num_consumers,
        NUM_STAGES=config.num_stages,
        PINGPONG=config.pingpong,
        STREAM_K=streamed > 0,
        GROUP_M=config.group_m,
        CHUNK_N=chunk_n,
        STORE_STAGES=store_stages(tile_n // chunk_n),
        A_K_MAJOR=a_k_major,
        B_K_MAJOR=b_k_major,
        A_BATCHED=a.shape[0] > 1,
        B_BATCHED=b.shape[0] > 1,
        RESIDUAL_BATCHED=residual is not None and residual.shape[0] > 1,
        CHAIN_BEFORE=epilogue.chains[0],
        CHAIN_AFTER=epilogue.chains[1],
        SCALED=scaling.kind == "row",
        BLOCK_SCALED=scaling.kind == "block",
        INTEGER=a.dtype == torch.int8,
        PREACTIVATION=epilogue.z is not None,
        TMA_STORE=tma_store,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS[config.num_consumers],
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
        GATED=up is not None,
        PARTIALS=partial,
        DACT=epilogue.dz is not None,
        PACKED=epilogue.packed,
        Z_TMA=len(written) > 0,
        QUANTIZE=quantize,
    )
    partials = PartialSums(None, None)
    if streamed:
        size = (num_programs, config.block_m, config.block_n)
        partials = PartialSums(
            torch.empty(size, dtype=torch.float32, device=a.device),
            torch.zeros((num_programs, config.num_consumers), dtype=torch.int32, device=a.device),
        )
    schedule = Schedule(m_tiles, n_tiles, k_blocks, entries // config.num_splits, config.num_splits, streamed)
    target: Any = tile_descriptor(c, (config.rows, chunk_n)) if tma_store else c
    z_targets = [tile_descriptor(x, (config.rows, chunk_n)) for x in written]
    second = (b_operand, second_n) if up_operand is None else (up_operand, tile_n)
    launch(
        matmul_kernel, (num_programs,),
        tile_descriptor(a_operand, (config.rows, block_k) if a_k_major else (block_k, config.rows)),
        _right_tile(b_operand, tile_n - second_n, b_k_major), _right_tile(*second, b_k_major), target,
        *z_targets, *[None] * (2 - len(z_targets)), epilogue.pointers, scaling.scales, partials,
        epilogue.strides, scaling.strides, m, n, *schedule, TRAITS=traits, num_warps=4,
    )  # fmt: skip


def _right_tile(operand: Tensor, columns: int, k_major: bool) -> Any:
    """The TMA descriptor of a tile of B with so many columns; None if it has none."""
    block_k = 128 // operand.element_size()
    return tile_descriptor(operand, (columns, block_k) if k_major else (block_k, columns)) if columns else None


def _right_operands(b: Tensor, up: Tensor | None) -> tuple[Tensor, bool, Tensor | None]:
    """(B, True if K is its inner index, up), in an order that TMA can load; gate and up come in the same order."""
    b_operand, k_major = load_operand(b, 2, b.element_size() != 2)
    if up is None:
        return b_operand, k_major, None
    up_operand, up_k_major = load_operand(up, 2, b.element_size() != 2)
    if up_k_major != k_major:
        b_operand, k_major = load_operand(b, 2, True)
        up_operand, _ = load_operand(up, 2, True)
    return b_operand, k_major, up_operand
