"""Writing keys and values into pages by torch's own operators: the CPU default. The host never waits for a device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.rope import rotate
from flashkernel.core.library import traced
from flashkernel.ops.append_kv.params import AppendOptions
from flashkernel.ops.append_kv.reference import as_bytes, quantize


def append_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, **options: Any) -> Tensor | None:
    """`options` are the fields of AppendOptions."""
    given = AppendOptions(**options)
    q, k_scale, v_scale = given.q, given.k_scale, given.v_scale
    wide = torch.promote_types(k.dtype, torch.float32)
    if given.rotates:
        cos, sin, width = given.token_tables("append_kv", k[None])
        heads = k if q is None else torch.cat((q, k), 1)  # rotated together: half the operators
        heads = rotate(heads[None].to(wide), cos.to(wide), sin.to(wide), width, given.interleaved)[0]
        k = heads[:, heads.shape[1] - k.shape[1] :]
        q = None if q is None else heads[:, : q.shape[1]].to(q.dtype)
    if slots.shape[0] == 0 or k_pages.shape[0] * k_pages.shape[1] == 0:
        return q
    if k_scale is None and v_pages.is_contiguous() and _all_written(slots, k_pages):
        slots = slots.long()
        k_pages.flatten(0, 1).index_copy_(0, slots, k.to(k_pages.dtype))
        v_pages.flatten(0, 1).index_copy_(0, slots, v.to(v_pages.dtype))
        return q
    token, slot, any_written = _writes(slots, k_pages.shape[0] * k_pages.shape[1])
    page, offset = slot // k_pages.shape[1], slot % k_pages.shape[1]
    for values, pages, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        if scale is None:
            codes = values.to(pages.dtype)
        else:
            codes, token_scale = quantize(values.to(wide), pages.dtype)
            codes = codes.to(pages.dtype)
            scale[page, offset] = torch.where(any_written, token_scale.to(scale.dtype)[token], scale[page, offset])
        target = as_bytes(pages)
        target[page, offset] = torch.where(any_written, as_bytes(codes)[token], target[page, offset])
    return q


def _all_written(slots: Tensor, pages: Tensor) -> bool:
    """Whether every token is written. Only a CPU looks: elsewhere the host would wait for the answer."""
    if slots.device.type != "cpu" or traced(slots) or not pages.is_contiguous():
        return False
    numbers = slots.tolist()
    return min(numbers) >= 0 and max(numbers) < pages.shape[0] * pages.shape[1]


def _writes(slots: Tensor, num_slots: int) -> tuple[Tensor, Tensor, Tensor]:
    """(token, slot, whether any token is written), token and slot with one entry for each token.

    A token that is skipped repeats the write of the first that is not: the same value to the same slot. So no shape
    depends on the slots' values.
    """
    written = (slots >= 0) & (slots < num_slots)
    first = written.to(torch.int32).argmax()
    token = torch.where(written, torch.arange(slots.shape[0], device=slots.device), first)
    return token, slots[token].clamp(0, num_slots - 1), written.any()
