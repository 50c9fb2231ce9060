"""What the rotary embedding is timed against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashkernel.core.op import Case, Op


def eager(op: Op, case: Case) -> Callable[..., Any]:
    """Transformers' formula, x cos + rotate(x) sin with full-width tables, in the input's dtype."""
    _check(case)

    def rotate(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        if interleaved:
            other = torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2)
        else:
            other = torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)
        return x * cos + other * sin

    def rope(
        q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None, *, interleaved: bool = False
    ) -> tuple[Tensor, Tensor]:
        cos = _of_tokens(cos, q, positions, interleaved)[:, :, None].to(q.dtype)
        sin = _of_tokens(sin, q, positions, interleaved)[:, :, None].to(q.dtype)
        return rotate(q, cos, sin, interleaved), rotate(k, cos, sin, interleaved)

    return rope


def compiled(op: Op, case: Case) -> Callable[..., Any]:
    return torch.compile(eager(op, case), dynamic=False)


def liger(op: Op, case: Case) -> Callable[..., Any]:
    from liger_kernel.transformers import functional as liger_functional

    _check(case)
    if case.options.get("interleaved"):
        raise ValueError("Liger rotates the half-split layout only")

    def rope(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, positions: Tensor | None = None) -> tuple[Tensor, Tensor]:
        cos, sin = _of_tokens(cos, q, positions, interleaved=False), _of_tokens(sin, q, positions, interleaved=False)
        # Its layout is (batch, heads, seq, head_dim), and it overwrites contiguous inputs.
        rotated_q, rotated_k = liger_functional.liger_rope(q.transpose(1, 2), k.transpose(1, 2), cos, sin)
        return rotated_q.transpose(1, 2), rotated_k.transpose(1, 2)

    return rope


def _check(case: Case) -> None:
    if "k" not in case.present or "cos" not in case.present or 2 * case.axes["table"][-1] != case.axes["dim"]:
        raise ValueError("the peers take q and k, and a table that rotates whole heads")


def _of_tokens(table: Tensor, q: Tensor, positions: Tensor | None, interleaved: bool) -> Tensor:
    """The table's rows for each token, each value twice, [batch or 1, seq, head_dim]: what the peers take."""
    rows = table[: q.shape[1]] if positions is None else table[positions]
    wide = rows.repeat_interleave(2, -1) if interleaved else torch.cat((rows, rows), -1)
    return wide if wide.ndim == 3 else wide[None]
