"""How the matrices of a model are quantized: format and groups, and the scales that fit a matrix best."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashkernel import Weight
from flashkernel.blocks.fp8 import expand_scales, in_groups
from flashkernel.blocks.integers import INT4, INT8, IntegerRange, integer_scales, pack_nibbles, round_to_integers
from flashkernel.blocks.weight import format_named

CLIPS = tuple(1.0 - 0.04 * step for step in range(13))  # of the largest magnitude, tried as the end of the range
_INTEGERS = {"int4": INT4, "int8": INT8}


@dataclass(frozen=True)
class Scheme:
    """What the projections of a model become.

    Args:
        format: "int4", "int8", "fp8" or "mxfp4", as in `flashkernel.Weight`.
        group_size: Columns of a row that share a scale; -1: the row. Of "int4" and "int8".
        symmetric: False gives "int4" and "int8" zero points.
        activation_dtype: What activations are rounded to, as in `flashkernel.Weight`; None keeps them.

    Returns:
        A scheme. Its `granularity` is what `Weight.quantize` takes.

    Example:
        >>> from flashkernel.quantization import Scheme
        >>> Scheme("int4", 128).granularity
        '1x128'
    """

    format: str = "int4"
    group_size: int = 128
    symmetric: bool = True
    activation_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        format_named(self.format)
        if not self.symmetric and self.format not in _INTEGERS:
            raise ValueError(f"Scheme: {self.format} has no zero points; leave symmetric=False away")
        if self.group_size != -1 and self.group_size < 2:
            raise ValueError(f"Scheme: group_size is {self.group_size}; it must be at least 2, or -1 for whole rows")

    @property
    def granularity(self) -> str | None:
        """The granularity by the name that `Weight.quantize` takes; None: the format's own."""
        if self.format not in _INTEGERS:
            return None
        return "row" if self.group_size == -1 else f"1x{self.group_size}"

    @property
    def group_shape(self) -> tuple[int, int]:
        """(rows, columns) that share a scale."""
        return 1, self.group_size

    @property
    def numbers(self) -> IntegerRange:
        """The integers of the format; ValueError if it has none."""
        if self.format not in _INTEGERS:
            raise ValueError(f"{self.format} is rounded to nearest alone; methods that calibrate make int4 and int8")
        return _INTEGERS[self.format]

    def check(self, name: str, columns: int) -> None:
        """ValueError if a matrix `name` of so many columns has no place in the format, or groups do not divide it.

        Args:
            name: Of the matrix, for the message.
            columns: Of the matrix: the inputs of its layer.
        """
        if self.format in _INTEGERS and self.group_size != -1 and columns % self.group_size:
            fitting = [str(size) for size in (128, 64, 32) if columns % size == 0]
            raise ValueError(
                f"{name}: groups of {self.group_size} do not divide its {columns} columns; choose a group size of "
                f"{', '.join(fitting) or 'whole rows (-1)'}"
            )
        try:
            matrix = torch.empty((64, columns), device="meta")
            Weight.quantize(matrix, self.format, self.granularity, self.activation_dtype, self.symmetric)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error


def round_to_nearest(matrix: Tensor, scheme: Scheme, importance: Tensor | None = None) -> Weight:
    """Returns a matrix (out, in) in the scheme's format, each element rounded to the nearest value (RTN).

    Args:
        matrix: Any float dtype.
        scheme: Format and groups.
        importance: Weights of the columns' squared errors (in,); the end of each group's range is then searched for.
            None: the largest magnitude.
    """
    if scheme.format not in _INTEGERS:
        return Weight.quantize(matrix, scheme.format, None, scheme.activation_dtype)
    scales, zeros = fit_grid(matrix, scheme, importance)
    codes = round_to_integers(matrix, scales, zeros, scheme.group_shape, scheme.numbers)
    return assemble(codes, scales, zeros, scheme)


def assemble(codes: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme) -> Weight:
    """Returns the Weight of integers (out, in) of a scheme."""
    data = pack_nibbles(codes) if scheme.format == "int4" else codes
    return Weight(data, scales, zeros, scheme.format, scheme.group_shape, scheme.activation_dtype)


def fit_grid(matrix: Tensor, scheme: Scheme, importance: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
    """Returns (scales, zeros or None) of a matrix's groups.

    Scales are float16 numbers, as checkpoints store them. With `importance` each group takes the share of its range
    (`CLIPS`) for which the weighted squared error is least: cutting off its largest elements makes all steps smaller.
    """
    group, numbers = scheme.group_shape, scheme.numbers
    full, zeros = integer_scales(matrix, group, numbers, scheme.symmetric)
    best = storable_scales(full)
    if importance is None or not matrix.numel():
        return best, zeros
    least = torch.full_like(full, torch.inf)
    for clip in CLIPS:
        scales = storable_scales(full * clip)
        error = (on_grid(matrix, scales, zeros, scheme) - matrix).square() * importance
        total = in_groups(error, group).sum((-3, -1))
        best, least = torch.where(total < least, scales, best), torch.minimum(total, least)
    return best, zeros


def on_grid(matrix: Tensor, scales: Tensor, zeros: Tensor | None, scheme: Scheme) -> Tensor:
    """Returns the matrix as it is after rounding, in float32."""
    group, numbers = scheme.group_shape, scheme.numbers
    codes = round_to_integers(matrix, scales, zeros, group, numbers).float()
    zero = numbers.middle if zeros is None else expand_scales(zeros.float(), group, matrix.shape)
    return (codes - zero) * expand_scales(scales, group, matrix.shape)


def storable_scales(scales: Tensor) -> Tensor:
    """Scales rounded to float16, from 2^-24, its least number, to 65504, its largest."""
    return scales.clamp(2.0**-24, 65504.0).half().float()
