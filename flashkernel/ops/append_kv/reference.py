"""Writing keys and values into pages in plain torch: the ground truth, in whatever precision it is given."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.frequencies import Frequencies
from flashkernel.blocks.rope import rotary_width, rotate, token_tables

E4M3_MOST, INT8_MOST = 448.0, 127.0  # the largest magnitudes of the codes


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
    """pages[slot // page_size, slot % page_size] = k, v for every token; k, and the q that is returned, are rotated."""
    if cos is not None or frequencies is not None:
        width = rotary_width("append_kv", k.shape[-1], cos, rotary_dim, frequencies)
        cos, sin = token_tables(k[None], cos, sin, positions, frequencies, width, interleaved)
        turned = [
            None if x is None else rotate(x[None], cos.to(x.dtype), sin.to(x.dtype), width, interleaved)[0]
            for x in (q, k)
        ]
        q, k = turned[0], k if turned[1] is None else turned[1]
    for values, pages, scale in ((k, k_pages, k_scale), (v, v_pages, v_scale)):
        size = pages.shape[1]
        kept = (slots >= 0) & (slots < pages.shape[0] * size)
        page, offset = slots[kept] // size, slots[kept] % size
        codes, unit = (values, None) if scale is None else quantise(values, pages.dtype)
        bytewise(pages)[page, offset] = bytewise(codes.to(pages.dtype))[kept]
        if scale is not None and unit is not None:
            scale[page, offset] = unit.to(scale.dtype)[kept]
    return q


def quantise(values: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes, scale) with values = codes * scale, one scale for each head [..., heads]; codes have yet to be cast.

    A head of zeros has scale 0, one that holds NaN has scale NaN.
    """
    most = INT8_MOST if dtype == torch.int8 else E4M3_MOST
    scale = values.abs().amax(-1) / most
    codes = (values / torch.where(scale > 0, scale, 1)[..., None]).clamp(-most, most)
    return codes.round() if dtype == torch.int8 else codes, scale


def bytewise(x: Tensor) -> Tensor:
    """8-bit floats as plain bytes: torch moves those wherever it runs."""
    return x.view(torch.uint8) if x.dtype == torch.float8_e4m3fn else x
