"""Documents as packed sequences: attention under `documents` masks by the kernels for cumulative lengths."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashkernel.blocks.mask import Mask
from flashkernel.ops.attention.varlen.api import attention_varlen


def attention_of_documents(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, mask: Mask, cu_seqlens: Tensor, **options: Any
) -> Tensor | tuple[Tensor, Tensor]:
    """`attention` under a mask of documents with these cumulative lengths."""
    form = mask.packed_form
    assert form is not None
    batch, seqlen, heads, _ = q.shape
    found = attention_varlen(
        q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), cu_seqlens, sinks=sinks, window=(form.left, form.right),
        **options,
    )  # fmt: skip
    if isinstance(found, Tensor):
        return found.unflatten(0, (batch, seqlen))
    return found[0].unflatten(0, (batch, seqlen)), found[1].view(heads, batch, seqlen).transpose(0, 1)
