"""Queries, keys and values in e4m3: scales, an optional rotation, and the layout that values need."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.core.arguments import static
from flashkernel.ops.attention.fp8.reference import SCALE_BLOCK

LARGEST = 448.0  # of float8_e4m3fn
_ROOM = 16  # positions: rows of a transposed tensor begin 16 bytes apart


def quantize_fp8(
    x: Tensor, block: int | None = None, rotate: bool = False, transpose: bool = False
) -> tuple[Tensor, Tensor]:
    """(x / scale in float8_e4m3fn, scale): what `attention_fp8` takes.

    x is (batch, sequence, heads, head_dim). A scale is the largest magnitude of its numbers over 448: one for each
    head, float32 (batch, heads), or with `block=128` one for each head and 128 positions, (batch, heads, blocks).

    `rotate` multiplies every head by one fixed orthonormal matrix (a Hadamard matrix with random signs), which spreads
    what is large in a few channels over all of them. Rotate both q and k, or neither: their products stay the same.
    `transpose` lays the result out with its positions side by side, as the values of `attention_fp8` should be; it is
    still (batch, sequence, heads, head_dim).
    """
    _check(x, block, rotate)
    wide = x.detach().float()
    if rotate:
        wide = wide @ rotation(static(x.shape[3]), x.device)
    batch, sequence, heads, _ = x.shape
    if block is None:
        largest = wide.abs().amax((1, 3)) if sequence else wide.new_zeros((batch, heads))
        scale = _scale(largest)  # [B, H]
        factor = scale[:, None, :, None]
    else:
        spare = -sequence % block
        padded = torch.nn.functional.pad(wide, (0, 0, 0, 0, 0, spare)).unflatten(1, (-1, block))
        scale = _scale(padded.abs().amax((2, 4))).transpose(1, 2).contiguous()  # [B, H, blocks]
        factor = scale.repeat_interleave(block, 2)[:, :, :sequence].transpose(1, 2)[..., None]  # [B, S, H, 1]
    values = (wide / factor).clamp(-LARGEST, LARGEST).to(torch.float8_e4m3fn)
    return (_transposed(values) if transpose else values.contiguous()), scale


@torch.compiler.assume_constant_result
def rotation(width: int, device: torch.device) -> Tensor:
    """The orthonormal [width, width] matrix that `quantize_fp8` rotates heads by, kept per device."""
    found = _rotations.get((width, device))
    if found is None:
        found = _rotation(width).to(device)
        if type(found) is Tensor:  # a tracer's stand-in must not outlive its trace
            _rotations[width, device] = found
    return found


_rotations: dict[tuple[int, torch.device], Tensor] = {}


def _rotation(width: int) -> Tensor:
    hadamard = torch.ones(1, 1)
    while hadamard.shape[0] < width:
        hadamard = torch.cat([torch.cat([hadamard, hadamard], 1), torch.cat([hadamard, -hadamard], 1)])
    # Without the signs, what all channels have in common would end in one of them.
    signs = torch.randint(0, 2, (width, 1), generator=torch.Generator().manual_seed(0)) * 2.0 - 1
    return signs * hadamard / width**0.5


def _scale(largest: Tensor) -> Tensor:
    """What is zero throughout has the scale one."""
    return torch.where(largest > 0, largest / LARGEST, 1.0)


def _transposed(x: Tensor) -> Tensor:
    """The same tensor with its positions side by side, and room behind each row for the tile loads."""
    batch, sequence, heads, width = x.shape
    room = torch.zeros((batch, heads, width, sequence + -sequence % _ROOM), dtype=torch.uint8, device=x.device)
    room[..., :sequence] = x.view(torch.uint8).permute(0, 2, 3, 1)
    return room.view(x.dtype)[..., :sequence].permute(0, 3, 1, 2)


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
