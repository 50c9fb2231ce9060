"""Matrix products in Triton, for all GPUs from sm_80 on: dense and batched (dense.py), grouped (grouped.py).

Tiles are loaded by TMA where the GPU has it and the strides allow (descriptors.py), else by pointers with bounds. All
four transpose combinations are strides of views. Split-K is deterministic: partial sums go to a workspace, and a second
kernel adds them in order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Activation, Epilogue
from flashkernel.core import device, tune
from flashkernel.core.arguments import unit_stride
from flashkernel.core.launch import launch
from flashkernel.ops.matmul.configs import MATMUL, MatmulConfig
from flashkernel.ops.matmul.params import MatmulParams, MatmulTensors
from flashkernel.ops.matmul.triton.dense import activation_gradient_kernel, matmul_kernel
from flashkernel.ops.matmul.triton.descriptors import (
    aligned,
    batch_strides,
    describable,
    describe,
    precision,
    transposed,
)
from flashkernel.ops.matmul.triton.grouped import grouped_forward, grouped_weight_gradient
from flashkernel.ops.matmul.triton.split_k import add_partials, extra_strides

__all__ = ["activation_gradient", "forward", "grouped_forward", "grouped_weight_gradient"]
_ELEMENTWISE = (16, 128)  # tile of the activation's gradient


def forward(a: Tensor, b: Tensor, params: MatmulParams, tensors: MatmulTensors) -> Tensor:
    """C [batch, M, N] = epilogue(A B); `MatmulKernels.forward` documents the arguments."""
    _, bias, _, residual, a_scale, b_scale, _, preactivation, out = tensors
    (batches, m, k), n = a.shape, b.shape[2]
    if batches == 1:
        batches = b.shape[0]
    c = torch.empty((batches, m, n), dtype=params.out_dtype, device=a.device)
    if c.numel() == 0:
        return c
    props = device.properties(a.device)
    shape = {
        "m": m, "n": n, "k": k, "batch": batches, "bytes": a.element_size(), "blocks": params.scaling == "block",
        "aligned": aligned(_matrix(a)) and aligned(_matrix(b)),
    }  # fmt: skip
    config = tune.pick(MATMUL, props, shape)
    splits = max(1, min(config.splits, tune.ceil_div(k, config.block_k)))
    workspace = torch.empty((splits * batches, m, n), dtype=torch.float32, device=a.device) if splits > 1 else None
    residual = None if residual is None else unit_stride(residual)
    a_scale, b_scale = _expanded(a_scale, b_scale, batches, m, n, params.scaling)
    before, after = params.epilogue.around_activation
    sources, layouts = _sources(a, b, c, config, workspace is None)
    tiles = tune.ceil_div(m, config.block_m) * tune.ceil_div(n, config.block_n) * splits * batches
    launch(
        matmul_kernel, (min(tiles, props.sms) if config.persistent else tiles,),
        *sources, a_scale, b_scale, bias, residual, preactivation, workspace,
        batch_strides(a), batch_strides(b), a_scale.stride() if a_scale is not None else (0, 0, 0),
        b_scale.stride() if b_scale is not None else (0, 0, 0), *extra_strides(bias, residual), batches, m, n, k,
        BEFORE=before, AFTER=after, SCALING=params.scaling, PRECISION=precision(a, params.tf32), **layouts,
        EVEN_K=k % config.block_k == 0, SPLITS=splits, PERSISTENT=config.persistent, GROUP_M=config.group_m,
        BLOCK_M=config.block_m, BLOCK_N=config.block_n, BLOCK_K=config.block_k, NUM_STAGES=config.num_stages,
        num_warps=config.num_warps,
    )  # fmt: skip
    if workspace is not None:
        add_partials(workspace, c, (before, after), bias, residual, preactivation)
    return c if out is None else out.copy_(c)


def activation_gradient(
    dy: Tensor, added: Tensor | None, preactivation: Tensor, epilogue: Epilogue, packed: str
) -> Tensor:
    """dz [batch, M, N] in z's dtype: the gradient of what goes into the epilogue's activation. z is contiguous."""
    batches, m, n = preactivation.shape
    dz = torch.empty((batches, m, n), dtype=preactivation.dtype, device=dy.device)
    if dz.numel() == 0:
        return dz
    dy = dy.contiguous()
    kind = next(piece.kind for piece in epilogue.pieces if isinstance(piece, Activation))
    rows, columns = _ELEMENTWISE
    launch(
        activation_gradient_kernel, (tune.ceil_div(batches * m, rows), tune.ceil_div(n, columns)),
        dy, preactivation, dz, batches * m, n, n,
        FACTOR=epilogue.factor, KIND=kind, BLOCK_M=rows, BLOCK_N=columns, num_warps=4,
    )  # fmt: skip
    return dz if added is None else dz + added


def _expanded(
    a_scale: Tensor | None, b_scale: Tensor | None, batches: int, m: int, n: int, scaling: str
) -> tuple[Tensor | None, Tensor | None]:
    """Scales with stride 0 along what they have one of."""
    if a_scale is None or b_scale is None:
        return None, None
    if scaling == "row":
        return a_scale.expand(batches, m, 1), b_scale.expand(batches, 1, n)
    return a_scale.expand(batches, -1, -1), b_scale.expand(batches, -1, -1)


def _sources(a: Tensor, b: Tensor, c: Tensor, config: MatmulConfig, stores: bool) -> tuple[tuple[Any, ...], Any]:
    """(a, b and c, each with its descriptor or itself), and what the kernel is compiled for."""
    tma = describable(_matrix(a)) and describable(_matrix(b))
    c_tma = stores and tma and describable(c) and c.shape[2] > 1
    described = (
        describe(_matrix(a), config.block_m, config.block_k) if tma else a,
        describe(_matrix(b), config.block_k, config.block_n) if tma else b,
        describe(c, config.block_m, config.block_n) if c_tma else c,
    )
    layouts = {
        "TMA": tma, "A_BATCHED": a.shape[0] > 1, "B_BATCHED": b.shape[0] > 1,
        "A_TRANSPOSED": tma and transposed(a), "B_TRANSPOSED": tma and transposed(b), "C_TMA": c_tma,
    }  # fmt: skip
    return (a, described[0], b, described[1], c, described[2]), layouts


def _matrix(x: Tensor) -> Tensor:
    """A batch of one as a matrix."""
    return x[0] if x.shape[0] == 1 else x
