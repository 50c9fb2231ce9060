"""Writing keys and values into pages in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks.rope import rotate
from flashkernel.ops.append_kv.params import AppendOptions

CODE_MAX = {torch.float8_e4m3fn: 448.0, torch.int8: 127.0}  # the largest magnitude of a code


def append_kv(k: Tensor, v: Tensor, k_pages: Tensor, v_pages: Tensor, slots: Tensor, **options: Any) -> Tensor | None:
    """pages[slot // page_size, slot % page_size] = k, v for every token; k, and the q that is returned, are rotated.

    `options` are the fields of AppendOptions.
    """
    given = AppendOptions(**options)
    q = given.q
    if given.rotates:
        cos, sin, width = given.token_tables("append_kv", k[None])
        cos, sin = cos.to(k.dtype), sin.to(k.dtype)
        k = rotate(k[None], cos, sin, width, given.interleaved)[0]
        q = None if q is None else rotate(q[None], cos.to(q.dtype), sin.to(q.dtype), width, given.interleaved)[0]
    for values, pages, scale in ((k, k_pages, given.k_scale), (v, v_pages, given.v_scale)):
        size = pages.shape[1]
        written = (slots >= 0) & (slots < pages.shape[0] * size)
        page, offset = slots[written] // size, slots[written] % size
        codes, token_scale = (values, None) if scale is None else quantize(values, pages.dtype)
        as_bytes(pages)[page, offset] = as_bytes(codes.to(pages.dtype))[written]
        if scale is not None and token_scale is not None:
            scale[page, offset] = token_scale.to(scale.dtype)[written]
    return q


def quantize(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes, scale) with values = codes * scale, one scale for each head [..., heads]; codes have yet to be cast.

    A head of zeros has scale 0, one that holds NaN has scale NaN.
    """
    most = CODE_MAX.get(dtype, CODE_MAX[torch.float8_e4m3fn])  # checks keep FP8 pages in a wider float dtype
    scale = values.abs().amax(-1) / most
    codes = (values / torch.where(scale > 0, scale, 1)[..., None]).clamp(-most, most)
    return codes.round() if dtype == torch.int8 else codes, scale


def as_bytes(x: Tensor) -> Tensor:
    """8-bit floats as uint8, which torch indexes on every device."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
