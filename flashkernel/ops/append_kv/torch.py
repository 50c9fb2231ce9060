"""Writing keys and values into pages by torch's own operators: the CPU default. No device waits for the host."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.frequencies import Frequencies
from flashkernel.blocks.rope import rotary_width, rotate, token_tables
from flashkernel.ops.append_kv.reference import bytewise, quantise


def append_kv(
    k: Tensor,
    v: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    slots: Tensor,
    *,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    q: Tensor | None = None,
    cos: Tensor | None = None,
    sin: Tensor | None = None,
    positions: Tensor | None = None,
    frequencies: Frequencies | None = None,
    rotary_dim: int | None = None,
    interleaved: bool = False,
) -> Tensor | None:
    wide = torch.promote_types(k.dtype, torch.float32)
    if cos is not None or frequencies is not None:
        width = rotary_width("append_kv", k.shape[-1], cos, rotary_dim, frequencies)
        cos, sin = token_tables(k[None], cos, sin, positions, frequencies, width, interleaved)
        heads = k if q is None else torch.cat((q, k), 1)  # turned together: half the operators
        heads = rotate(heads[None].to(wide), cos.to(wide), sin.to(wide), width, interleaved)[0]
        k = heads[:, heads.shape[1] - k.shape[1] :]
        q = None if q is None else heads[:, : q.shape[1]].to(q.dtype)
    if slots.shape[0] == 0 or k_pages.shape[0] * k_pages.shape[1] == 0:
        return q
    if k_scale is None and v_pages.is_contiguous() and _all_kept(slots, k_pages):
        slots = slots.long()
        k_pages.flatten(0, 1).index_copy_(0, slots, k.to(k_pages.dtype))
        v_pages.flatten(0, 1).index_copy_(0, slots, v.to(v_pages.dtype))
        return q
    token, slot, any_kept = _writers(slots, k_pages.shape[0] * k_pages.shape[1])
    page, offset = slot // k_pages.shape[1], slot % k_pages.shape[1]
    for values, pages, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        if scale is None:
            codes = values.to(pages.dtype)
        else:
            codes, unit = quantise(values.to(wide), pages.dtype)
            codes = codes.to(pages.dtype)
            scale[page, offset] = torch.where(any_kept, unit.to(scale.dtype)[token], scale[page, offset])
        target = bytewise(pages)
        target[page, offset] = torch.where(any_kept, bytewise(codes)[token], target[page, offset])
    return q


def _all_kept(slots: Tensor, pages: Tensor) -> bool:
    """Whether every token is written, which a CPU can look up at once; elsewhere nobody waits for the answer."""
    if slots.device.type != "cpu" or torch.compiler.is_compiling() or not pages.is_contiguous():
        return False
    numbers = slots.tolist()
    return min(numbers) >= 0 and max(numbers) < pages.shape[0] * pages.shape[1]


def _writers(slots: Tensor, count: int) -> tuple[Tensor, Tensor, Tensor]:
    """(which token, to which slot, whether any token is kept at all), with one entry for each token.

    A token that is not kept repeats the first one that is: the same value to the same place, no shape that depends on
    the slots' values.
    """
    kept = (slots >= 0) & (slots < count)
    first = kept.to(torch.int32).argmax()
    token = torch.where(kept, torch.arange(slots.shape[0], device=slots.device), first)
    return token, slots[token].clamp(0, count - 1), kept.any()
