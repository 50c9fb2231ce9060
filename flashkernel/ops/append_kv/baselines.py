"""Baselines of append_kv."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashkernel.core.op import Case, Op
from flashkernel.ops.append_kv.reference import as_bytes, quantize


def eager(op: Op, case: Case) -> Callable[..., Any]:
    """Transformers' rotation in the input's dtype, then one indexed write for each of k and v.

    What is quantized is rotated in float32, and so are its codes and scales computed.
    """
    if "cos" not in case.present or 2 * case.axes["table"][-1] != case.axes["dim"] or case.options:
        raise ValueError("it is written here for half-split tables that rotate whole heads")

    def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        half = x.shape[-1] // 2
        return x * cos + torch.cat((-x[..., half:], x[..., :half]), -1) * sin

    def write(pages: Tensor, scale: Tensor | None, slots: Tensor, values: Tensor) -> None:
        if scale is not None:
            values, token_scale = quantize(values.float(), pages.dtype)
            scale.flatten(0, 1)[slots] = token_scale
        as_bytes(pages.flatten(0, 1))[slots] = as_bytes(values.to(pages.dtype))

    def append(
        k: Tensor, v: Tensor, slots: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, **given: Tensor
    ) -> Tensor | None:
        cos = torch.cat((cos[positions],) * 2, -1)[:, None]
        sin = torch.cat((sin[positions],) * 2, -1)[:, None]
        keys = k.float() if "k_scale" in given else k
        write(given["k_pages"], given.get("k_scale"), slots, rotate(keys, cos.to(keys.dtype), sin.to(keys.dtype)))
        write(given["v_pages"], given.get("v_scale"), slots, v)
        q = given.get("q")
        return None if q is None else rotate(q, cos.to(q.dtype), sin.to(q.dtype))

    return append


def compiled(op: Op, case: Case) -> Callable[..., Any]:
    return torch.compile(eager(op, case), dynamic=False)
