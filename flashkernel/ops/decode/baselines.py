"""What decoding is timed against. Each gives a function of the operator's inputs, what it was made for bound."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashkernel.core.op import Case, Op
from flashkernel.ops.decode import reference

Function = Callable[..., Any]


def eager(op: Op, case: Case) -> Function:
    """As a model without a fused kernel has it: pages gathered, heads repeated, every score in memory."""
    return reference.decode_attention


def eager_packed(op: Op, case: Case) -> Function:
    """Every token gathers its sequence's keys, which only small cases have the memory for."""
    if case.axes["tokens"] * case.axes["max_pages"] * case.axes["cache"][1] > 2**20:
        raise ValueError("it would hold all keys once for every token")
    return reference.paged_attention


def _scaled_dot_product(op: Op, case: Case, name: str, kind: SDPBackend | None) -> Function:
    """torch's operator, which knows one length for all: the capacity."""
    if set(case.present) or set(case.options):
        raise ValueError(f"{name} is called here without {', '.join((*case.present, *case.options))}")
    if case.axes.get("least", case.axes["cache"][1]) != case.axes["cache"][1] or "lengths" in case.axes:
        raise ValueError(f"{name} knows one length for all sequences")
    if case.axes["new"] != 1:
        raise ValueError(f"{name} aligns a causal mask with the first key")

    def decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        rows, columns, values = (x.transpose(1, 2) for x in (q, k, v))
        grouped = q.shape[2] != k.shape[2]
        return F.scaled_dot_product_attention(rows, columns, values, enable_gqa=grouped).transpose(1, 2)

    if kind is None:
        return decode

    def restricted(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor) -> Tensor:
        with sdpa_kernel(kind):
            return decode(q, k, v, lengths)

    return restricted


sdpa = partial(_scaled_dot_product, name="sdpa", kind=None)  # by torch's own choice of kernel
cudnn = partial(_scaled_dot_product, name="cudnn", kind=SDPBackend.CUDNN_ATTENTION)
fa2 = partial(_scaled_dot_product, name="fa2", kind=SDPBackend.FLASH_ATTENTION)  # FlashAttention-2, as torch ships it


def _simple(case: Case) -> tuple[int, int]:
    """The window as flash-attn counts it, where the case asks for no more than that."""
    beyond = set(case.options) - {"window", "prefix_length"} | set(case.present) - {"page_table"}
    if beyond:
        raise ValueError(f"fa3 is called here without {', '.join(sorted(beyond))}")
    window = case.options.get("window")
    return (-1, -1) if window is None else (window - 1, 0)


def fa3(op: Op, case: Case) -> Function:
    """FlashAttention-3 over its cache, whose layout is ours."""
    from fa3_fwd_interface import flash_attn_with_kvcache

    window = _simple(case)

    def decode(q: Tensor, k: Tensor, v: Tensor, lengths: Tensor, page_table: Tensor | None = None) -> Tensor:
        found = flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, page_table=page_table, causal=True, window_size=window
        )
        return found[0] if isinstance(found, tuple) else found

    return decode


def fa3_packed(op: Op, case: Case) -> Function:
    from fa3_fwd_interface import flash_attn_with_kvcache

    window = _simple(case)
    longest = case.axes["tokens"]

    def prefill(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, lengths: Tensor, page_table: Tensor) -> Tensor:
        found = flash_attn_with_kvcache(
            q, k, v, cache_seqlens=lengths, page_table=page_table, cu_seqlens_q=cu_seqlens_q, max_seqlen_q=longest,
            causal=True, window_size=window,
        )  # fmt: skip
        return found[0] if isinstance(found, tuple) else found

    return prefill
