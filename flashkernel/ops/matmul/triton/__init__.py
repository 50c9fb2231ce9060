"""Matrix products in Triton, for all GPUs from sm_80 on: dense and batched (dense.py).

Tiles are loaded by TMA where the GPU has it and the strides allow (descriptors.py), else by pointers with bounds. All
four transpose combinations are strides of views. Split-K is deterministic: partial sums go to a workspace, and a second
kernel adds them in order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.epilogue import Epilogue
from flashkernel.blocks.fp8 import SCALE_BLOCK
from flashkernel.core import device, tune
from flashkernel.core.launch import launch
from flashkernel.ops.matmul.configs import MATMUL
from flashkernel.ops.matmul.kernel_args import EpilogueTensors, Scales, fp8_bytes, seed_arguments
from flashkernel.ops.matmul.params import MatmulParams, MatmulTensors
from flashkernel.ops.matmul.tiles_triton import TileAccess
from flashkernel.ops.matmul.triton.dense import ProductTraits, activation_gradient_kernel, matmul_kernel
from flashkernel.ops.matmul.triton.descriptors import (
    aligned,
    batch_strides,
    describable,
    describe,
    precision,
    transposed,
)
from flashkernel.ops.matmul.triton.quantize import quantize_rows
from flashkernel.ops.matmul.triton.split_k import add_partials

__all__ = ["activation_gradient", "dact", "forward", "quantize_rows"]
_ELEMENTWISE = (16, 128)  # tile of the activation's gradient


def forward(a: Tensor, b: Tensor, params: MatmulParams, tensors: MatmulTensors) -> Tensor:
    """C [batch, M, N] = epilogue(A B); `MatmulKernels.forward` documents the arguments."""
    batches = b.shape[0] if a.shape[0] == 1 else a.shape[0]
    size = (batches, a.shape[1], b.shape[2])
    c = torch.empty(size, dtype=params.out_dtype, device=a.device) if tensors.out is None else tensors.out
    if c.numel():
        scales = _expanded(tensors, *size, params.scaling)
        _run(a, b, tensors.up, scales, params, EpilogueTensors.of(c, params, tensors))
    return c


def dact(a: Tensor, b: Tensor, z: Tensor, dz: Tensor, activated: Tensor, params: MatmulParams) -> None:
    """Writes dz and activated; `MatmulDactKernels.dact` documents the arguments."""
    if activated.numel():
        _run(a, b, None, Scales(None, None, None), params, EpilogueTensors.of_gradient(activated, z, dz, params))


def _run(
    a: Tensor, b: Tensor, up: Tensor | None, scales: Scales, params: MatmulParams, epilogue: EpilogueTensors
) -> None:
    """One launch for a product; with split-K two."""
    c, (m, k), n = fp8_bytes(epilogue.c), a.shape[1:], b.shape[2]
    batches, props = c.shape[0], device.properties(a.device)
    pair = up is not None
    up_like_b = up is None or (_matrix(up).stride() == _matrix(b).stride() and aligned(_matrix(up)))
    shape = {
        "m": m, "n": n * (2 if pair else 1), "k": k, "batch": batches, "bytes": a.element_size(),
        "blocks": params.scaling == "block", "aligned": aligned(_matrix(a)) and aligned(_matrix(b)) and up_like_b,
        "gated": pair, "dact": epilogue.dz is not None,
    }  # fmt: skip
    config = tune.pick(MATMUL, props, shape)
    block_m = config.block_m
    block_n = config.block_n // 2 if pair else config.block_n  # gate and up share the accumulators' registers
    if epilogue.block_scales is not None and block_n < SCALE_BLOCK:
        block_m, block_n = min(block_m, 64), SCALE_BLOCK
    part_n = _part_columns(epilogue, block_n)
    splits = max(1, min(config.splits, tune.ceil_div(k, config.block_k)))
    parts = splits * batches * (2 if pair else 1)
    workspace = torch.empty((parts, m, n), dtype=torch.float32, device=a.device) if splits > 1 else None
    tma = (
        describable(_matrix(a)) and describable(_matrix(b)) and (up is None or (up_like_b and describable(_matrix(up))))
    )
    c_tma = workspace is None and tma and describable(c) and n > 1 and not transposed(c)
    tiles = tune.ceil_div(m, block_m) * tune.ceil_div(n, block_n) * splits * batches
    a_scale, b_scale, _ = scales
    nothing = (0, 0, 0)
    launch(
        matmul_kernel, (min(tiles, props.sms) if config.persistent else tiles,),
        a, describe(_matrix(a), block_m, config.block_k) if tma else a,
        b, describe(_matrix(b), config.block_k, block_n) if tma else b,
        up, describe(_matrix(up), config.block_k, block_n) if tma and up is not None else up, scales, workspace,
        c, describe(c, block_m, part_n) if c_tma else c, epilogue.pointers,
        batch_strides(a), batch_strides(b), nothing if up is None else batch_strides(up),
        a_scale.stride() if a_scale is not None else nothing, b_scale.stride() if b_scale is not None else nothing,
        epilogue.strides, batches, m, n, k,
        PRODUCT=ProductTraits(
            params.scaling, precision(a, params.tf32),
            TileAccess(tma, a.shape[0] > 1, tma and transposed(a)),
            TileAccess(tma, b.shape[0] > 1, tma and transposed(b)),
            k % config.block_k == 0, splits, config.persistent, config.group_m,
            block_m, block_n, config.block_k, config.num_stages,
        ),
        EPILOGUE=epilogue.traits(c_tma, part_n), num_warps=config.num_warps,
    )  # fmt: skip
    if workspace is not None:
        add_partials(workspace, epilogue)


def _part_columns(epilogue: EpilogueTensors, block_n: int) -> int:
    """How many columns of a tile are worked on at a time: all, unless that would take too many registers."""
    if epilogue.block_scales is not None:
        return SCALE_BLOCK
    if epilogue.z is not None:
        return min(block_n, 32 if epilogue.z.stride(1) % 16 == 0 else 16)
    return min(block_n, 64) if epilogue.seed != (None, None) else block_n


def activation_gradient(
    dy: Tensor, added: Tensor | None, preactivation: Tensor, epilogue: Epilogue, packed: str, seed: int | Tensor
) -> Tensor:
    """dz in z's dtype: the gradient of what goes into the epilogue's activation.

    Args:
        dy: [batch, M, N], the gradient of the epilogue's result.
        added: None, or what is added to dz, of its shape.
        preactivation: z [batch, M, N], or of a gate [batch, M, 2 N]; contiguous. Without an activation, any tensor of
            z's dtype.
        epilogue: It has an activation, a gate or dropout.
        packed: How z and dz hold gate and up.
        seed: What its dropout followed from.
    """
    batches, m, n = dy.shape
    piece = epilogue.activation
    shape = dy.shape if piece is None else preactivation.shape
    dz = torch.empty(shape, dtype=preactivation.dtype, device=dy.device)
    if dz.numel() == 0:
        return dz
    dy = dy.contiguous()
    rows, columns = _ELEMENTWISE
    launch(
        activation_gradient_kernel, (tune.ceil_div(batches * m, rows), tune.ceil_div(n, columns)),
        dy, None if added is None else added.contiguous(), preactivation, dz,
        *seed_arguments(epilogue, seed), batches * m, n, n, dz.shape[2],
        FACTOR=epilogue.factor, DROPOUT="" if epilogue.dropout is None else epilogue.dropout.text,
        CHAIN="" if piece is None else piece.text, PACKED=packed if epilogue.gated else "",
        BLOCK_M=rows, BLOCK_N=columns, num_warps=4,
    )  # fmt: skip
    return dz


def _expanded(tensors: MatmulTensors, batches: int, m: int, n: int, scaling: str) -> Scales:
    """Scales of A, B and up, with stride 0 along what they have one of."""
    a_scale, b_scale, up_scale = tensors.a_scale, tensors.b_scale, tensors.up_scale
    if a_scale is None or b_scale is None:
        return Scales(None, None, None)
    rows, columns = (m, n) if scaling == "row" else (-1, -1)
    a_scale = a_scale.expand(batches, rows, -1)
    b_scale, up_scale = (None if x is None else x.expand(batches, -1, columns) for x in (b_scale, up_scale))
    return Scales(a_scale, b_scale, up_scale)


def _matrix(x: Tensor) -> Tensor:
    """A batch of one as a matrix."""
    return x[0] if x.shape[0] == 1 else x
