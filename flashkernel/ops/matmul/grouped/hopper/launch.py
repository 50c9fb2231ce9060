"""Launches the grouped products on Hopper."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.ragged_gluon import ragged_descriptor
from flashkernel.core import device, tune
from flashkernel.core.launch import launch
from flashkernel.ops.matmul.grouped.hopper.configs import HOPPER_GROUPED, HopperGrouped, tail_columns
from flashkernel.ops.matmul.grouped.hopper.kernel import GroupedEpilogue, GroupedTraits, grouped_matmul_kernel
from flashkernel.ops.matmul.grouped.hopper.weight_gradient import GradientTraits, grouped_weight_gradient_kernel
from flashkernel.ops.matmul.grouped.params import GroupedParams, GroupedTensors
from flashkernel.ops.matmul.hopper.configs import (
    CONSUMER_REGISTERS,
    GROUP_M,
    PRODUCER_REGISTERS,
    STORE_STAGES,
    chunk_columns,
)
from flashkernel.ops.matmul.hopper.descriptors import load_operand, padded_empty, tile_descriptor, tma_compatible

_CHUNK_ELEMENTS = 4096  # of a chunk of the epilogue: larger ones take more registers than it has
_UNALIGNED_ELEMENTS = 1024  # if elements of a row of y have an address each
_GATHER_REGISTERS = (200, 104)  # per thread of a consumer, and of the producer warpgroup that gathers rows
_MIN_GROUPS = 128  # of the vectors over groups: an element for each thread


def grouped_forward(
    x: Tensor, weights: Tensor, offsets: Tensor, params: GroupedParams, tensors: GroupedTensors
) -> Tensor:
    """y [out_rows, columns]; `GroupedMatmulKernels.grouped_forward` documents the arguments."""
    y, needed = params.new_output(x, weights, tensors)
    if not needed:
        return y
    (groups, k, n), rows = weights.shape, tensors.num_rows(x)
    if k == 0:  # sums of 16 bytes of zeros: TMA takes no empty tensors
        k = 16 // x.element_size()
        x, weights = x.new_zeros((x.shape[0], k)), weights.new_zeros((groups, k, n))
    gather, x_scale = tensors.gather, tensors.x_scale
    if gather is not None and x_scale is not None and x_scale.shape[0] > 1:
        tensors = tensors._replace(x_scale=x_scale.index_select(0, gather))
    if gather is not None and not _copies_rows(x):
        x, tensors = _gathered(x, gather), tensors._replace(gather=None)
    shape = {"rows": rows, "groups": groups, "n": n, "k": k, "bytes": x.element_size(), "weight_gradient": 0,
             "halves": int(params.gate == "halves")}  # fmt: skip
    config: HopperGrouped = tune.pick(HOPPER_GROUPED, device.properties(x.device), shape)
    _multiply(x, weights, offsets, y, params, tensors, rows, config)
    return y


def _multiply(
    x: Tensor, weights: Tensor, offsets: Tensor, y: Tensor, params: GroupedParams, tensors: GroupedTensors, rows: int,
    config: HopperGrouped,
) -> None:  # fmt: skip
    gather, x_scale, preactivation = tensors.gather, tensors.x_scale, tensors.preactivation
    groups, k, n = weights.shape
    block_k = 128 // x.element_size()
    only_k_major = x.element_size() != 2
    x_operand, a_k_major = (x[None], True) if gather is not None else load_operand(x[None], 1, only_k_major)
    parts = 2 if params.gate == "halves" else 1  # gate and up have an accumulator each, and a chunk
    # TMA begins at multiples of 16 bytes of the inner dim; up begins n / 2 columns behind gate.
    unaligned_up = parts == 2 and (n // 2) * weights.element_size() % 16 != 0
    weights_operand, b_k_major = load_operand(weights, 2, only_k_major or unaligned_up)
    box_n = config.block_n // parts
    aligned = n % 16 == 0 and y.shape[1] % 16 == 0
    chunk_elements = _CHUNK_ELEMENTS if aligned else _UNALIGNED_ELEMENTS
    if gather is not None and preactivation is not None and parts == 1:  # fewer registers, and more to store
        chunk_elements = chunk_elements // 2
    traits = GroupedTraits(
        ROWS=config.rows,
        BLOCK_N=config.block_n,
        TAIL_N=tail_columns(n, config.block_n) if aligned and params.gate != "halves" else 0,
        BLOCK_K=block_k,
        NUM_CONSUMERS=config.num_consumers,
        NUM_STAGES=config.num_stages,
        CHUNK_N=min(box_n, chunk_elements // config.rows // parts),
        GROUPS=max(_MIN_GROUPS, tune.power_of_2(groups + 1)),
        A_K_MAJOR=a_k_major,
        B_K_MAJOR=b_k_major,
        GATE=params.gate,
        ACTIVATION=params.activation,
        GATHERED=gather is not None,
        SCALED=x_scale is not None,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS[config.num_consumers] if gather is None else _GATHER_REGISTERS[0],
        PRODUCER_REGISTERS=PRODUCER_REGISTERS if gather is None else _GATHER_REGISTERS[1],
        DISTANCE=min(2, config.num_stages - 2),
    )
    strides = tensors.strides
    epilogue = GroupedEpilogue(
        y, preactivation, tensors.scatter, tensors.row_weights, tensors.bias, strides.bias_group, strides.bias_column,
        x_scale, strides.x_scale, tensors.weight_scale, strides.weight_scale_group, strides.weight_scale_column,
        n, y.shape[1],
    )  # fmt: skip
    box = (config.rows, block_k) if a_k_major else (block_k, config.rows)
    n_tiles = tune.ceil_div(y.shape[1] if params.gate == "halves" else n, box_n)
    max_tiles = (tune.ceil_div(rows, config.block_m) + groups) * n_tiles
    launch(
        grouped_matmul_kernel, (min(device.properties(x.device).sms, max_tiles),),
        x if gather is not None else tile_descriptor(x_operand, box),
        tile_descriptor(weights_operand, (box_n, block_k) if b_k_major else (block_k, box_n)),
        offsets, gather, x.stride(0), epilogue, rows, groups, n_tiles, tune.ceil_div(k, block_k),
        TRAITS=traits, num_warps=4,
    )  # fmt: skip


def grouped_weight_gradient(
    x: Tensor, dz: Tensor, offsets: Tensor, params: GroupedParams, gather: Tensor | None
) -> Tensor:
    """dW [groups, K, N]; `GroupedMatmulKernels.grouped_weight_gradient` documents the arguments."""
    groups, k, n = offsets.shape[0] - 1, x.shape[1], dz.shape[1]
    dw = padded_empty((groups, k, n), params.out_dtype, x.device)  # TMA stores rows of multiples of 16 bytes
    if dw.numel() == 0 or dz.shape[0] == 0:
        return torch.zeros((groups, k, n), dtype=params.out_dtype, device=x.device)
    x = x if gather is None else _gathered(x, gather)
    props = device.properties(x.device)
    shape = {"rows": dz.shape[0], "groups": groups, "n": n, "k": k, "bytes": x.element_size(), "weight_gradient": 1,
             "halves": 0}  # fmt: skip
    config: HopperGrouped = tune.pick(HOPPER_GROUPED, props, shape)
    chunk_n = chunk_columns(config.rows, dw.element_size())
    traits = GradientTraits(
        ROWS=config.rows,
        BLOCK_N=config.block_n,
        TAIL_N=tail_columns(n, config.block_n),
        BLOCK_K=128 // x.element_size(),
        NUM_CONSUMERS=config.num_consumers,
        NUM_STAGES=config.num_stages,
        GROUP_M=GROUP_M,
        CHUNK_N=chunk_n,
        STORE_STAGES=STORE_STAGES,
        CONSUMER_REGISTERS=CONSUMER_REGISTERS[config.num_consumers],
        PRODUCER_REGISTERS=PRODUCER_REGISTERS,
    )
    m_tiles, n_tiles = tune.ceil_div(k, config.block_m), tune.ceil_div(n, config.block_n)
    launch(
        grouped_weight_gradient_kernel, (min(props.sms, groups * m_tiles * n_tiles),),
        ragged_descriptor(_by_rows(x), (traits.BLOCK_K, config.rows)),
        ragged_descriptor(_by_rows(dz), (traits.BLOCK_K, config.block_n)),
        tile_descriptor(dw, (config.rows, chunk_n)), offsets, groups, k, m_tiles, n_tiles, TRAITS=traits, num_warps=4,
    )  # fmt: skip
    return dw.contiguous()


def _copies_rows(x: Tensor) -> bool:
    """Whether rows of x can be copied by cp.async, 16 bytes at a time and in whole K blocks."""
    return tma_compatible(x[None]) and x.shape[1] * x.element_size() % 128 == 0 and x.stride(0) % 16 == 0


def _gathered(x: Tensor, index: Tensor) -> Tensor:
    """x[index]; torch does not index fp8."""
    return x.view(torch.uint8).index_select(0, index).view(x.dtype) if x.element_size() == 1 else x[index]


def _by_rows(x: Tensor) -> Tensor:
    """Returns x [rows, columns], copied unless TMA can load it with its columns side by side."""
    if tma_compatible(x[None]):
        return x
    copy = padded_empty((1, *x.shape), x.dtype, x.device)[0]
    return copy.copy_(x)
