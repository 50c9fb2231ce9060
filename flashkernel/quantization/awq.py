"""AWQ (Lin et al. 2023) and SmoothQuant (Xiao et al. 2022): factors on input channels that make rounding cheaper."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.quantization.scheme import Scheme, round_to_nearest

GRID = 20  # exponents that AWQ tries
LEAST = 1e-4  # of a channel's magnitude, so that factors stay finite


def awq_factors(matrix: Tensor, inputs: Tensor, mean_magnitudes: Tensor, scheme: Scheme) -> Tensor:
    """Returns the factors s (in,) for which rounding W diag(s) changes the layer's outputs least.

    s = mean |x|^a, normalized, for exponents a from 0 to 1: channels with large inputs get more of the integers' range.
    a = 0 is rounding without factors, so the result is never worse than that on the sample.

    Args:
        matrix: (out, in).
        inputs: A sample of the layer's inputs, (rows, in), on which outputs are compared.
        mean_magnitudes: mean |x| of each channel, (in,).
        scheme: Format and groups.
    """
    weight = matrix.float()
    best, least = torch.ones_like(mean_magnitudes), torch.inf
    for step in range(GRID):
        factors = mean_magnitudes.clamp_min(LEAST) ** (step / GRID)
        factors = factors / (factors.max() * factors.min()).sqrt()
        rounded = round_to_nearest(weight * factors, scheme)
        difference = rounded.dequantize(torch.float32) / factors - weight
        error = float((inputs @ difference.T).square().sum())
        if error < least:
            best, least = factors, error
    return best


def smoothquant_factors(matrix: Tensor, largest: Tensor, strength: float = 0.5) -> Tensor:
    """Returns s = max |x|^strength / max |w|^(1 - strength) of each input channel, (in,).

    Outliers of activations move into the weight, which has room for them: both then round well to 8 bits.

    Args:
        matrix: (out, in).
        largest: max |x| of each channel, (in,).
        strength: 0 leaves the activations as they are, 1 makes all channels alike.
    """
    weight = matrix.float().abs().amax(0).clamp_min(LEAST)
    return (largest.clamp_min(LEAST) ** strength / weight ** (1 - strength)).clamp_min(LEAST)
