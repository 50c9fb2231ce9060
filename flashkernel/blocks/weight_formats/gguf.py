"""GGUF's formats with minima or scales of scales: "q4_1", "q4_k" and "q6_k". Its Q4_0 is "int4", its Q8_0 is "int8".

A file interleaves codes and scales in blocks of 18 to 210 bytes. Here codes are one tensor and scales another, so that
kernels load 16 bytes at a time; values and sizes are the file's (q4_k and q6_k: 4 and no bytes more for 256 columns).
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor

from flashkernel.blocks.integers import pack_nibbles, unpack_nibbles
from flashkernel.blocks.values import has_values
from flashkernel.blocks.weight import Layout, Weight, register_format
from flashkernel.blocks.weight_formats.grouped import FixedGroupsFormat, scales_of

_LEAST_HALF = 2.0**-24
SUPER_BLOCK = 256  # columns of q4_k and q6_k that share float16 scales of scales


class _GGUFFormat(FixedGroupsFormat):
    """What the three share."""

    data_dtype = torch.uint8
    activation_dtypes = (torch.int8,)

    def quantize(self, tensor: Tensor, group_shape: tuple[int, int], symmetric: bool) -> Weight:
        self.check_symmetric(symmetric)
        self.check_group(group_shape, tensor.shape[-1])
        return self.rounded(tensor.float().unflatten(-1, (-1, self.multiple // self.columns, self.columns)))

    @abstractmethod
    def rounded(self, groups: Tensor) -> Weight:
        """The Weight of a matrix (..., blocks, groups of a block, columns of a group), rounded to nearest."""

    def in_half(self, values: Tensor) -> Tensor:
        """Scales or minima in float16; those between 0 and its least number become that. ValueError if one is larger
        than float16 has."""
        half = values.half()
        if has_values(half) and bool(half.isinf().any()):
            raise ValueError(
                f"Weight.quantize: {self.name} stores scales and minima in float16, and this matrix needs "
                f"{values.abs().amax().item():.3g}; divide it by a power of two, or choose int4 or int8"
            )
        return torch.where((values > 0) & (half == 0), _LEAST_HALF, half)

    def pack(self, data: Tensor, scales: Tensor | None, zeros: Tensor | None) -> Weight:
        return Weight(data, scales, zeros, self.name, (1, self.columns))

    def declines(self, backend: str, layout: Layout) -> str | None:
        return f"its kernels do not read {self.name}"


class Q4_1(_GGUFFormat):
    """4-bit codes with a float16 scale and minimum for each 32 columns.

    data is uint8 (out, in / 2), two codes to a byte as in "int4". scales and zeros are float16 (out, in / 32), and
    element (i, j) = q * scales[i, j // 32] + zeros[i, j // 32]: zeros are minima here, not zero points.
    """

    name = "q4_1"
    scale_dtype = torch.float16
    has_zeros = True
    zero_dtype = torch.float16
    packing = 2
    columns = multiple = 32

    def dequantize(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        assert weight.zeros is not None
        codes = unpack_nibbles(weight.data).to(wide).unflatten(-1, (-1, 32))
        values = codes * scales_of(weight).to(wide)[..., None] + weight.zeros.to(wide)[..., None]
        return values.flatten(-2).to(dtype)

    def rounded(self, groups: Tensor) -> Weight:
        low, high = groups.aminmax(dim=-1)
        scales, minima = self.in_half((high - low) / 15), self.in_half(low)
        codes = _steps(groups - minima.float()[..., None], scales.float()).clamp(0, 15)
        return self.pack(pack_nibbles(codes.flatten(-3)), scales.flatten(-2), minima.flatten(-2))

    def error(self, weight: Weight) -> str | None:
        return super().error(weight) or ("the minima (zeros) are missing" if weight.zeros is None else None)


class _SuperBlockFormat(_GGUFFormat):
    """What q4_k and q6_k share: scales are 16 bytes of a super-block's, and float16 numbers that multiply them."""

    scale_dtype = torch.uint8
    multiple = SUPER_BLOCK
    scale_bytes: int  # of a super-block

    def scale_shape(self, shape: Sequence[int], group: tuple[int, int]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // SUPER_BLOCK * self.scale_bytes)

    def scales_and_factors(self, weight: Weight, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """The 16 bytes (..., super-blocks, 16), and the float16 numbers (..., super-blocks, 1 or 2) in `dtype`."""
        parts = scales_of(weight).unflatten(-1, (-1, self.scale_bytes))
        return parts[..., :16], parts[..., 16:].contiguous().view(torch.float16).to(dtype)


class Q4_K(_SuperBlockFormat):
    """4-bit codes with 6-bit scales and minima for each 32 columns, in super-blocks of 256.

    data is uint8 (out, in / 2), two codes to a byte as in "int4". scales are uint8 (out, in / 256 * 20): of each
    super-block 8 scales, 8 minima, and two float16 numbers d and m by which they are multiplied. Element (i, j) =
    q * d * scale - m * minimum.
    """

    name = "q4_k"
    packing = 2
    columns = 32
    scale_bytes = 20

    def dequantize(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        parts, factors = self.scales_and_factors(weight, wide)
        scales, minima = (parts[..., at : at + 8].to(wide) * factors[..., at // 8, None] for at in (0, 8))
        codes = unpack_nibbles(weight.data).to(wide).unflatten(-1, (-1, 8, 32))
        return (codes * scales[..., None] - minima[..., None]).flatten(-3).to(dtype)

    def rounded(self, groups: Tensor) -> Weight:
        low, high = groups.amin(-1).clamp_max(0), groups.amax(-1).clamp_min(0)
        parts, values = [], []
        for wanted in ((high - low) / 15, -low):
            factor = self.in_half(wanted.amax(-1, keepdim=True) / 63)
            steps = _steps(wanted, factor[..., 0].float()).clamp(0, 63)
            parts.append((steps.to(torch.uint8), _bytes(factor)))
            values.append(steps * factor.float())
        codes = _steps(groups + values[1][..., None], values[0]).clamp(0, 15)
        scales = torch.cat((parts[0][0], parts[1][0], parts[0][1], parts[1][1]), -1)
        return self.pack(pack_nibbles(codes.flatten(-3)), scales.flatten(-2), None)


class Q6_K(_SuperBlockFormat):
    """6-bit codes with 8-bit scales for each 16 columns, in super-blocks of 256.

    data is uint8 (out, in / 256 * 192): of each super-block 128 bytes with the low four bits of two columns each, as in
    "int4", then 64 bytes of high bits. Bits 0-1 of byte i belong to column 2i, 2-3 to column 2i + 1, 4-5 to column 2i +
    128 and 6-7 to column 2i + 129. scales are uint8 (out, in / 256 * 18): 16 signed scales, and a float16 number d.
    Element (i, j) = (q - 32) * d * scale.
    """

    name = "q6_k"
    columns = 16
    scale_bytes = 18

    def shape(self, data: Tensor) -> torch.Size:
        return torch.Size((*data.shape[:-1], data.shape[-1] * 4 // 3))

    def dequantize(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        wide = torch.promote_types(dtype, torch.float32)
        parts, factor = self.scales_and_factors(weight, wide)
        scales = parts.contiguous().view(torch.int8).to(wide) * factor
        data = weight.data.unflatten(-1, (-1, 192))
        low, high = unpack_nibbles(data[..., :128]), data[..., 128:]
        halves = [torch.stack((high >> at & 3, high >> (at + 2) & 3), -1).flatten(-2) for at in (0, 4)]
        codes = (low | torch.cat(halves, -1) << 4).to(wide) - 32
        return (codes.unflatten(-1, (16, 16)) * scales[..., None]).flatten(-3).to(dtype)

    def rounded(self, groups: Tensor) -> Weight:
        wanted = groups.abs().amax(-1) / 31
        factor = self.in_half(wanted.amax(-1, keepdim=True) / 127)
        steps = _steps(wanted, factor[..., 0].float()).clamp(0, 127)
        codes = (_steps(groups, steps * factor.float()).clamp(-32, 31) + 32).to(torch.uint8).flatten(-2)
        scales = torch.cat((steps.to(torch.uint8), _bytes(factor)), -1)
        return self.pack(_join_bits(codes), scales.flatten(-2), None)


def _steps(values: Tensor, scales: Tensor) -> Tensor:
    """values / scales of each group, rounded to nearest; 0 where a scale is 0."""
    return (values * torch.where(scales > 0, 1 / scales, 0.0)[..., None]).round()


def _bytes(factor: Tensor) -> Tensor:
    """Float16 numbers (..., 1) as uint8 (..., 2)."""
    return (
        factor.contiguous().view(torch.uint8)
        if factor.numel()
        else factor.new_zeros((*factor.shape[:-1], 2), dtype=torch.uint8)
    )


def _join_bits(codes: Tensor) -> Tensor:
    """Codes of 6 bits (..., blocks, 256) as Q6_K's data."""
    pairs = (codes >> 4).unflatten(-1, (2, 64, 2))  # [half, byte, column of the pair]
    high = pairs[..., 0, :, 0] | pairs[..., 0, :, 1] << 2 | pairs[..., 1, :, 0] << 4 | pairs[..., 1, :, 1] << 6
    return torch.cat((pack_nibbles(codes & 15), high), -1).flatten(-2)


for _format in (Q4_1(), Q4_K(), Q6_K()):
    register_format(_format)


def read_blocks(kind: str, blocks: Tensor) -> Weight:
    """Returns the Weight of a matrix as a GGUF file stores it.

    Args:
        kind: GGUF's name of the format, one of `KINDS`.
        blocks: uint8 (out, bytes of a row).
    """
    return _READERS[kind](blocks)


def _half(data: Tensor) -> Tensor:
    return data.contiguous().view(torch.float16)


def _nibbles(halves: Tensor) -> Tensor:
    """Bytes (..., 16) with columns i and i + 16 of 32 in byte i, as bytes with columns 2i and 2i + 1."""
    return pack_nibbles(torch.cat((halves & 15, halves >> 4), -1))


def _read_q4_0(blocks: Tensor) -> Weight:
    parts = blocks.unflatten(-1, (-1, 18))
    return Weight(_nibbles(parts[..., 2:]).flatten(-2), _half(parts[..., :2])[..., 0].float(), None, "int4", (1, 32))


def _read_q4_1(blocks: Tensor) -> Weight:
    parts = blocks.unflatten(-1, (-1, 20))
    halves = _half(parts[..., :4])
    scales, minima = (halves[..., index].contiguous() for index in (0, 1))
    return Weight(_nibbles(parts[..., 4:]).flatten(-2), scales, minima, "q4_1", (1, 32))


def _read_q8_0(blocks: Tensor) -> Weight:
    parts = blocks.unflatten(-1, (-1, 34))
    codes = parts[..., 2:].flatten(-2).view(torch.int8)
    return Weight(codes, _half(parts[..., :2])[..., 0].float(), None, "int8", (1, 32))


def _read_q4_k(blocks: Tensor) -> Weight:
    parts = blocks.unflatten(-1, (-1, 144))
    factors, packed, codes = parts[..., :4], parts[..., 4:16], parts[..., 16:]
    # Six bits each: the first four scales and minima are the low bits of bytes 0-3 and 4-7; the others have their low
    # four bits in bytes 8-11 and their high two in the high bits of bytes 0-3 and 4-7.
    low, middle, rest = (packed[..., at : at + 4] for at in (0, 4, 8))
    scales = torch.cat((low & 63, (rest & 15) | (low >> 6 << 4)), -1)
    minima = torch.cat((middle & 63, (rest >> 4) | (middle >> 6 << 4)), -1)
    pairs = codes.unflatten(-1, (4, 32))  # low bits: columns 0-31 of each 64, high bits: columns 32-63
    columns = torch.cat((pairs & 15, pairs >> 4), -1).flatten(-2)
    data = pack_nibbles(columns).flatten(-2)
    return Weight(data, torch.cat((scales, minima, factors), -1).flatten(-2), None, "q4_k", (1, 32))


def _read_q6_k(blocks: Tensor) -> Weight:
    parts = blocks.unflatten(-1, (-1, 210))
    low, high = parts[..., :128].unflatten(-1, (2, 64)), parts[..., 128:192].unflatten(-1, (2, 32))
    # Each 128 columns: low bits of columns 0-63 and 64-127 in 64 bytes; high bits of columns i, i + 32, ... in byte i.
    nibbles = torch.cat((low & 15, low >> 4), -1)
    bits = torch.cat([high >> at & 3 for at in (0, 2, 4, 6)], -1)
    data = _join_bits((nibbles | bits << 4).flatten(-2))
    return Weight(data, parts[..., 192:].flatten(-2), None, "q6_k", (1, 16))


_READERS = {"Q4_0": _read_q4_0, "Q4_1": _read_q4_1, "Q8_0": _read_q8_0, "Q4_K": _read_q4_k, "Q6_K": _read_q6_k}
KINDS = tuple(_READERS)
