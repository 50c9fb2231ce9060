"""Quantization to e4m3 for `attention_fp8`: scales, an optional rotation, and the memory layout of V."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.fp8 import SCALE_BLOCK, quantize_fp8_groups
from flashkernel.core.argument_types import type_checked
from flashkernel.core.arguments import static
from flashkernel.core.tables import for_any_call
from flashkernel.core.tracing import assume_constant_result

_ALIGNMENT = 16  # rows of a transposed tensor start at multiples of 16 bytes, as TMA requires


@type_checked
def quantize_fp8(
    x: Tensor, block: int | None = None, rotate: bool = False, transpose: bool = False
) -> tuple[Tensor, Tensor]:
    """Quantizes a tensor to float8_e4m3fn with one scale per head, or per head and 128 positions.

    A scale is the largest magnitude among its elements divided by 448.

    Args:
        x: (batch, seqlen, heads, head_dim), any floating-point dtype.
        block: None for one scale per head, 128 for one per head and 128 positions.
        rotate: Multiply every head by a fixed orthonormal matrix (a Hadamard matrix with random signs), which spreads
            outlier channels over all channels. Rotate both q and k, or neither: Q K^T stays the same.
        transpose: Store the result with contiguous positions, as `attention_fp8` needs v. The shape stays
            (batch, seqlen, heads, head_dim).

    Returns:
        (x / scale in float8_e4m3fn, scale): the scale is float32 (batch, heads), or (batch, heads, blocks).

    Example:
        >>> import torch
        >>> import flashkernel as fk
        >>> x8, scale = fk.quantize_fp8(torch.randn(1, 16, 2, 64), rotate=True)
        >>> x8.dtype, scale.shape
        (torch.float8_e4m3fn, torch.Size([1, 2]))
    """
    _check(x, block, rotate)
    wide = x.detach().float()
    if rotate:
        wide = wide @ rotation(static(x.shape[3]), x.device)
    values, scales = quantize_fp8_groups(wide.transpose(1, 2), (-1 if block is None else block, -1))
    values = values.transpose(1, 2)
    scale = scales[..., 0, 0] if block is None else scales[..., 0]  # [B, H], or [B, H, blocks]
    return (_transposed(values) if transpose else values.contiguous()), scale.contiguous()


@assume_constant_result
def rotation(width: int, device: torch.device) -> Tensor:
    """Returns the orthonormal [width, width] matrix that `quantize_fp8` rotates heads by; cached per device."""
    found = _rotations.get((width, device))
    if found is None:
        with for_any_call():
            found = _rotation(width).to(device)
        if type(found) is Tensor:  # a fake tensor must not outlive its trace
            _rotations[width, device] = found
    return found


_rotations: dict[tuple[int, torch.device], Tensor] = {}


def _rotation(width: int) -> Tensor:
    hadamard = torch.ones(1, 1, device="cpu")
    while hadamard.shape[0] < width:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    # Without the signs, the mean of all channels would end up in one channel.
    signs = torch.randint(0, 2, (width, 1), generator=torch.Generator().manual_seed(0), device="cpu") * 2.0 - 1
    return signs * hadamard / width**0.5


def _transposed(x: Tensor) -> Tensor:
    """Returns a copy with contiguous positions, whose rows are padded to multiples of 16 bytes."""
    batch, sequence, heads, width = x.shape
    padded = torch.zeros((batch, heads, width, sequence + -sequence % _ALIGNMENT), dtype=torch.uint8, device=x.device)
    padded[..., :sequence] = x.view(torch.uint8).permute(0, 2, 3, 1)
    return padded.view(x.dtype)[..., :sequence].permute(0, 3, 1, 2)


def _check(x: Tensor, block: int | None, rotate: bool) -> None:
    if x.ndim != 4 or not x.is_floating_point():
        raise ValueError(
            f"quantize_fp8: x must be a float tensor (batch, sequence, heads, head_dim), not {x.dtype} {tuple(x.shape)}"
        )
    if block is not None and block != SCALE_BLOCK:
        raise ValueError(
            f"quantize_fp8: block is {block}; attention_fp8 takes one scale a head (block=None) or one for "
            f"{SCALE_BLOCK} positions (block={SCALE_BLOCK})"
        )
    if rotate and (x.shape[3] == 0 or x.shape[3] & (x.shape[3] - 1)):
        raise ValueError(f"quantize_fp8: head_dim is {x.shape[3]}; only powers of two can be rotated")
