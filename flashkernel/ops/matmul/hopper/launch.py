"""Launches the Hopper matrix product."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashkernel.core import device, tune
from flashkernel.core.arguments import unit_stride
from flashkernel.core.launch import launch
from flashkernel.ops.matmul.hopper.configs import (
    CONSUMER_REGISTERS,
    HOPPER_MATMUL,
    PRODUCER_REGISTERS,
    STORE_STAGES,
    HopperMatmul,
    chunk_columns,
)
from flashkernel.ops.matmul.hopper.descriptors import load_operand, padded_empty, tile_descriptor, tma_compatible
from flashkernel.ops.matmul.hopper.kernel import MatmulTraits, matmul_kernel
from flashkernel.ops.matmul.params import MatmulParams, MatmulTensors
from flashkernel.ops.matmul.triton.split_k import add_partials, extra_strides

# A chunk of C whose elements have an address each: more would not fit into the registers.
_UNALIGNED_COLUMNS = 16  # if only the epilogue's tensors are unaligned
_UNALIGNED_ELEMENTS = 1024  # if C is, too


@dataclass(frozen=True)
class _EpilogueTensors:
    """What the epilogue reads and writes beside C, as kernel arguments."""

    chains: tuple[str, str]  # up to the activation, and from there on
    bias: Tensor | None
    residual: Tensor | None  # [batch or 1, M, N] with unit stride along N
    a_scale: Tensor | None  # [batch or 1, M or 1, 1], block scaling: [batch or 1, M, K blocks]
    b_scale: Tensor | None  # [batch or 1, 1, N or 1], block scaling: [batch or 1, K blocks, N / 128]
    preactivation: Tensor | None
    scaling: str  # that of MatmulParams

    def of_partials(self) -> _EpilogueTensors:
        """What applies to a part of the sum: the scales. The rest applies to the finished sum."""
        return replace(self, chains=("", ""), bias=None, residual=None, preactivation=None)

    @property
    def aligned(self) -> bool:
        """True if Triton knows rows to be aligned, so that neighbours are read and written together."""
        read = self.residual is None or self.residual.stride(1) % 16 == 0
        return read and (self.preactivation is None or self.preactivation.stride(1) % 16 == 0)

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.bias, self.residual, self.a_scale, self.b_scale, self.preactivation

    @property
    def strides(self) -> tuple[int, ...]:
        """bias; residual: batch and row; a_scale: batch, row and K block; b_scale: batch, column and K block."""
        return (
            *extra_strides(self.bias, self.residual),
            *_strides(self.a_scale, 0, 1, 2),
            *_strides(self.b_scale, 0, 2, 1),
        )


def _strides(x: Tensor | None, *dims: int) -> tuple[int, ...]:
    """Returns the strides of `dims`; 0 for one that is broadcast."""
    return tuple([0 if x is None or x.shape[dim] == 1 else x.stride(dim) for dim in dims])


def forward(a: Tensor, b: Tensor, params: MatmulParams, tensors: MatmulTensors) -> Tensor:
    """Returns C [batch, M, N] in params.out_dtype: epilogue(A B). a is [batch or 1, M, K], b [batch or 1, K, N].

    float32 operands are rounded to tf32.
    """
    _, bias, _, residual, a_scale, b_scale, _, preactivation, out = tensors
    if a.dtype == torch.float32 and not params.tf32:
        raise ValueError("matmul: the Hopper kernel multiplies float32 operands in tf32 only; allow tf32")
    batch = b.shape[0] if a.shape[0] == 1 else a.shape[0]
    m, k, n = a.shape[1], a.shape[2], b.shape[2]
    c = torch.empty((batch, m, n), dtype=params.out_dtype, device=a.device)
    if c.numel() == 0:
        return c
    residual = None if residual is None else unit_stride(residual)
    chains = params.epilogue.around_activation
    epilogue = _EpilogueTensors(chains, bias, residual, a_scale, b_scale, preactivation, params.scaling)
    if k == 0:
        nothing = torch.empty((0, m, n), dtype=torch.float32, device=a.device)
        add_partials(nothing, c, chains, bias, residual, preactivation)
        return c
    shape = {
        "batch": batch, "m": m, "n": n, "k": k, "bytes": a.element_size(),
        "block_scaled": int(params.scaling == "block"), "integer": int(a.dtype == torch.int8),
    }  # fmt: skip
    config: HopperMatmul = tune.pick(HOPPER_MATMUL, device.properties(a.device), shape)
    if config.num_splits == 1:
        _multiply(a, b, c, epilogue, config)
    else:
        partials = padded_empty((config.num_splits * batch, m, n), torch.float32, a.device)
        _multiply(a, b, partials, epilogue.of_partials(), config)
        add_partials(partials, c, chains, bias, residual, preactivation)
    return c if out is None else out.copy_(c)


def _multiply(a: Tensor, b: Tensor, c: Tensor, epilogue: _EpilogueTensors, config: HopperMatmul) -> None:
    """C [num_splits * batch, M, N] of the products, or of one partial product per split."""
    block_k = 128 // a.element_size()
    a_operand, a_k_major = load_operand(a, 1, a.element_size() != 2)
    b_operand, b_k_major = load_operand(b, 2, b.element_size() != 2)
    tma_store = tma_compatible(c)
    chunk_n = chunk_columns(config.rows, c.element_size())
    if not tma_store:
        chunk_n = _UNALIGNED_ELEMENTS // config.rows
    elif not epilogue.aligned:
        chunk_n = min(chunk_n, _UNALIGNED_COLUMNS)
    m, k, n = a.shape[1], a.shape[2], b.shape[2]
    residual = epilogue.residual
    traits = MatmulTraits(
        ROWS=config.rows,
        BLOCK_N=config.block_n,
        BLOCK_K=block_k,
        NUM_CONSUMERS=config.num_consumers,
        NUM_STAGES=config.num_stages,
        PINGPONG=config.pingpong,
        GROUP_M=config.group_m,
        CHUNK_N=chunk_n,
        STORE_STAGES=min(STORE_STAGES, config.block_n // chunk_n),
        A_K_MAJOR=a_k_major,
        B_K_MAJOR=b_k_major,
        A_BATCHED=a.shape[0] > 1,
        B_BATCHED=b.shape[0] > 1,
        RESIDUAL_BATCHED=residual is not None and residual.shape[0] > 1,
        CHAIN_BEFORE=epilogue.chains[0],
        CHAIN_AFTER=epilogue.chains[1],
        SCALED=epilogue.scaling == "row",
        BLOCK_SCALED=epilogue.scaling == "block",
        INTEGER=a.dtype == torch.int8,
        PREACTIVATION=epilogue.preactivation is not None,
        TMA_STORE=tma_store,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS[config.num_consumers],
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
    )
    m_tiles, n_tiles = tune.ceil_div(m, config.block_m), tune.ceil_div(n, config.block_n)
    num_programs = min(device.properties(a.device).sms, m_tiles * n_tiles * c.shape[0])
    target: Any = tile_descriptor(c, (config.rows, chunk_n)) if tma_store else c
    launch(
        matmul_kernel, (num_programs,),
        tile_descriptor(a_operand, (config.rows, block_k) if a_k_major else (block_k, config.rows)),
        tile_descriptor(b_operand, (config.block_n, block_k) if b_k_major else (block_k, config.block_n)),
        target, *epilogue.tensors, *epilogue.strides, m, n, m_tiles, n_tiles, tune.ceil_div(k, block_k),
        c.shape[0] // config.num_splits, config.num_splits, TRAITS=traits, num_warps=4,
    )  # fmt: skip
