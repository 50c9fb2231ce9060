"""What writing into pages is timed against."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashkernel.core.op import Case, Op


def eager(op: Op, case: Case) -> Callable[..., Any]:
    """Transformers' rotation in the input's dtype, then one indexed write for each of k and v."""
    if "cos" not in case.present or 2 * case.axes["table"][-1] != case.axes["dim"] or case.options:
        raise ValueError("it is written here for half-split tables that rotate whole heads")

    def turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        other = torch.cat((-x[..., x.shape[-1] // 2 :], x[..., : x.shape[-1] // 2]), -1)
        return x * cos + other * sin

    def write(pages: Tensor, scale: Tensor | None, slots: Tensor, values: Tensor) -> None:
        flat = pages.flatten(0, 1)
        if scale is not None:
            most = 127.0 if pages.dtype == torch.int8 else 448.0
            unit = values.abs().amax(-1).float() / most
            values = (values / unit[..., None]).clamp(-most, most)
            values = values.round() if pages.dtype == torch.int8 else values
            scale.flatten(0, 1)[slots] = unit
        values = values.to(pages.dtype)
        if pages.dtype == torch.float8_e4m3fn:
            flat, values = flat.view(torch.uint8), values.view(torch.uint8)
        flat[slots] = values

    def append(
        k: Tensor,
        v: Tensor,
        k_pages: Tensor,
        v_pages: Tensor,
        slots: Tensor,
        cos: Tensor,
        sin: Tensor,
        positions: Tensor,
        q: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor | None:
        cos = torch.cat((cos[positions],) * 2, -1)[:, None].to(k.dtype)
        sin = torch.cat((sin[positions],) * 2, -1)[:, None].to(k.dtype)
        write(k_pages, k_scale, slots, turn(k, cos, sin))
        write(v_pages, v_scale, slots, v)
        return None if q is None else turn(q, cos, sin)

    return append


def compiled(op: Op, case: Case) -> Callable[..., Any]:
    return torch.compile(eager(op, case), dynamic=False)
