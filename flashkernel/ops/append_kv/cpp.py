"""Writing keys and values into pages on a CPU, by the C++ kernels of blocks/cpp."""

from __future__ import annotations

import torch
from torch import Tensor

from flashkernel.blocks.decode_cpp import AppendCall
from flashkernel.blocks.rope import Rotation, token_tables
from flashkernel.core.arguments import unit_stride
from flashkernel.ops.append_kv.params import NewTokens, Pages


def forward(new: NewTokens, pages: Pages, slots: Tensor, rotation: Rotation) -> Tensor:
    k, cos, sin = new.k, None, None
    if k.is_meta:  # no memory to read or write
        return k.new_empty(0 if new.q is None else new.q.shape)
    if rotation.dim:
        tables = token_tables(
            k[None], rotation.cos, rotation.sin, rotation.positions, None, rotation.dim, rotation.interleaved
        )  # [1, tokens, 1, rotary_dim / 2]
        cos, sin = (table[0, :, 0].float().contiguous() for table in tables)
    call = AppendCall(slots.to(torch.int64).contiguous(), cos, sin, rotation.dim, rotation.interleaved)
    rotated = call(unit_stride(k), unit_stride(new.v), None if new.q is None else unit_stride(new.q), pages.k, pages.v)
    return k.new_empty(0) if rotated is None else rotated
