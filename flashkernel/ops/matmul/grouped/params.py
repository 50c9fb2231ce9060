"""The options of a grouped product, as every kernel module sees them."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class GroupedParams:
    """What a grouped product computes beyond its operands.

    Attributes:
        out_dtype: The output's dtype. Sums are in float32.
        out_rows: Rows of the output. Where there is a scatter index, rows that it does not name are zero.
        tf32: As in `MatmulParams`.
    """

    out_dtype: torch.dtype
    out_rows: int
    tf32: bool = False
