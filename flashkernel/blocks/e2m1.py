"""MXFP4 (OCP Microscaling): e2m1 values, 4 bits each, with a power-of-two scale (e8m0) for each 32 of a row."""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
MOST = 6.0  # the largest e2m1 value
BIAS = 127  # of the exponent in an e8m0 scale
MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # by the three low bits of a code; the fourth is the sign
_TIES_DOWN, _TIES_UP = (0.25, 1.25, 2.5, 5.0), (0.75, 1.75, 3.5)  # midpoints; a tie goes to the even code


def encode(values: Tensor) -> Tensor:
    """Returns the e2m1 codes (uint8, 0 to 15) nearest to `values`, ties to even; beyond 6 they saturate."""
    size = values.abs()
    code = torch.zeros_like(values, dtype=torch.uint8)
    for midpoint in _TIES_DOWN:
        code += size > midpoint
    for midpoint in _TIES_UP:
        code += size >= midpoint
    return code | (torch.signbit(values).to(torch.uint8) << 3)


def decode(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns the values of e2m1 codes, exactly. It is arithmetic: a table would be a copy from the host."""
    fraction, exponent = codes & 1, (codes >> 1) & 3
    quarters = torch.where(exponent == 0, 2 * fraction, (2 + fraction) << exponent)
    return quarters.to(dtype) * torch.where(codes >= 8, -0.25, 0.25)


def scale_exponents(x: Tensor) -> Tensor:
    """Returns e8m0 scales, uint8 (..., columns / 32), of x (..., columns): the least powers of two by which no value of
    a group exceeds 6. The scale of zeros is 1."""
    largest = x.float().unflatten(-1, (x.shape[-1] // GROUP, GROUP)).abs().amax(-1)
    fraction, exponent = torch.frexp(largest)  # largest = fraction * 2^exponent, fraction in [0.5, 1)
    # 6 = 0.75 * 2^3: the scale is 2^(exponent - 3), or twice that if the fraction is larger.
    needed = exponent - 3 + (fraction > 0.75).int()
    return torch.where(largest > 0, (needed + BIAS).clamp(0, 254), BIAS).to(torch.uint8)


def scale_values(exponents: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns 2^(exponent - 127) of e8m0 scales; 255 stands for NaN."""
    bits = torch.where(exponents == 0, 1 << 22, exponents.int() << 23)  # a float32's own exponent has this bias
    return torch.where(exponents == 255, torch.nan, bits.view(torch.float32)).to(dtype)
