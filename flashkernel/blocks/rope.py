"""The rotary embedding in plain torch: what cos and sin tables mean, and the rotation itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flashkernel.blocks.frequencies import Frequencies


def rotary_width(
    caller: str, head_dim: int, cos: Tensor | None, rotary_dim: int | None, frequencies: Frequencies | None
) -> int:
    """How many leading dims of a head are rotated; checks that the table's width says the same."""
    if frequencies is not None:
        width = frequencies.rotary_dim
        if rotary_dim is not None and rotary_dim != width:
            raise ValueError(
                f"{caller}: rotary_dim is {rotary_dim} but the frequencies rotate {width} dims; leave it out"
            )
    else:
        assert cos is not None
        columns = cos.shape[-1]
        if rotary_dim is not None:
            width = rotary_dim
            if columns not in (width, width // 2):
                raise ValueError(
                    f"{caller}: cos has {columns} columns; rotary_dim={width} needs {width // 2}, one for each pair, "
                    f"or {width}, each twice"
                )
        elif cos.ndim == 2:
            width = 2 * columns
        elif columns == head_dim:
            width = columns
        else:
            raise ValueError(
                f"{caller}: cos of each token has {columns} columns for heads of {head_dim}: say rotary_dim={columns} "
                f"if each column comes twice and part of the head is rotated, rotary_dim={2 * columns} if each comes "
                "once"
            )
    if width < 2 or width % 2 or width > head_dim:
        raise ValueError(f"{caller}: cannot rotate {width} of {head_dim} dims; it takes an even number, at least 2")
    return width


def half_width(table: Tensor, width: int, interleaved: bool) -> Tensor:
    """One column for each pair, [..., width / 2], of a table that may say each twice: side by side where the pairs are
    neighbors, in two halves otherwise."""
    if table.shape[-1] == width // 2:
        return table
    return table[..., ::2] if interleaved else table[..., : width // 2]


def token_tables(
    q: Tensor,
    cos: Tensor | None,
    sin: Tensor | None,
    positions: Tensor | None,
    frequencies: Frequencies | None,
    width: int,
    interleaved: bool,
) -> tuple[Tensor, Tensor]:
    """(cos, sin) of each token, [batch or 1, seq, 1, width / 2]; NaN where a position is outside its table."""
    if frequencies is not None:
        cos, sin = frequencies.cos_sin(torch.arange(q.shape[1], device=q.device) if positions is None else positions)
        return _per_token(cos), _per_token(sin)
    assert cos is not None
    assert sin is not None
    cos, sin = half_width(cos.detach(), width, interleaved), half_width(sin.detach(), width, interleaved)
    if positions is None:
        return _per_token(cos[..., : q.shape[1], :]), _per_token(sin[..., : q.shape[1], :])
    inside = (positions >= 0) & (positions < cos.shape[0])
    row = positions.long().clamp(0, cos.shape[0] - 1)
    outside = ~inside[..., None]
    cos, sin = cos[row].masked_fill(outside, float("nan")), sin[row].masked_fill(outside, float("nan"))
    return _per_token(cos), _per_token(sin)


def _per_token(table: Tensor) -> Tensor:
    """[seq, pairs] or [batch, seq, pairs] as [batch or 1, seq, 1, pairs]."""
    return (table if table.ndim == 3 else table[None]).unsqueeze(2)


def rotate(x: Tensor, cos: Tensor, sin: Tensor, width: int, interleaved: bool) -> Tensor:
    """x [batch, seq, heads, head_dim], its first `width` dims rotated by cos, sin [batch or 1, seq, 1, width / 2]."""
    rotated_dims, rest = x[..., :width], x[..., width:]
    if interleaved:
        a, b = rotated_dims[..., ::2], rotated_dims[..., 1::2]
        rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten(-2)
    else:
        a, b = rotated_dims[..., : width // 2], rotated_dims[..., width // 2 :]
        rotated = torch.cat((a * cos - b * sin, b * cos + a * sin), -1)
    return rotated if width == x.shape[-1] else torch.cat((rotated, rest), -1)


class Rotation(NamedTuple):
    """How a kernel rotates.

    Attributes:
        cos: A table with a column for each pair, or None; [..., width] of a wider table in an operator's arguments.
        sin: A table like `cos`.
        rates: Frequencies in fixed point, instead of tables, or None.
        positions: Of each token, or None.
        scaling: A factor on cos and sin that come from rates.
        dim: Leading dims of a head that are rotated; 0: none.
        interleaved: Pairs are (2i, 2i + 1) instead of (i, i + dim / 2).
    """

    cos: Tensor | None
    sin: Tensor | None
    rates: Tensor | None
    positions: Tensor | None
    scaling: float
    dim: int
    interleaved: bool

    @property
    def by_pairs(self) -> Rotation:
        """The rotation with tables of one column for each pair."""
        cos, sin, rates, positions, scaling, dim, interleaved = self
        if cos is None or sin is None:
            return self
        cos, sin = half_width(cos, dim, interleaved), half_width(sin, dim, interleaved)
        return Rotation(cos, sin, rates, positions, scaling, dim, interleaved)


def make_rotation(
    cos: Tensor | None, sin: Tensor | None, positions: Tensor | None, frequencies: Frequencies | None, width: int,
    interleaved: bool, device: torch.device,
) -> Rotation:  # fmt: skip
    """The rotation of the first `width` dims of heads on `device`, by tables or frequencies."""
    rates, scaling = None, 1.0
    if frequencies is not None:
        rates, scaling = frequencies.rates(device), frequencies.scaling
    return Rotation(cos, sin, rates, positions, scaling, width, interleaved)


@dataclass(frozen=True)
class RotaryOptions:
    """How heads are rotated, as callers of `rope` and `append_kv` say it."""

    cos: Tensor | None = None
    sin: Tensor | None = None
    positions: Tensor | None = None
    frequencies: Frequencies | None = None
    rotary_dim: int | None = None
    interleaved: bool = False

    @property
    def rotates(self) -> bool:
        """Whether there is anything to rotate by."""
        return self.cos is not None or self.frequencies is not None

    def width(self, caller: str, head_dim: int) -> int:
        """Leading dims of a head that are rotated."""
        return rotary_width(caller, head_dim, self.cos, self.rotary_dim, self.frequencies)

    def token_tables(self, caller: str, x: Tensor) -> tuple[Tensor, Tensor, int]:
        """(cos, sin, width) for x (batch, seq, heads, head_dim); cos and sin are [batch or 1, seq, 1, width / 2]."""
        width = self.width(caller, x.shape[-1])
        cos, sin = token_tables(x, self.cos, self.sin, self.positions, self.frequencies, width, self.interleaved)
        return cos, sin, width
