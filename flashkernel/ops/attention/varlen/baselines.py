"""What attention over packed sequences is timed against. Each gives a function of (q, k, v, cu_seqlens_q, sinks)."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from flashkernel.core.op import Case, Op

Function = Callable[..., Tensor]


def _check(case: Case, name: str, windows: bool = False, sinks: bool = False) -> None:
    """ValueError for a case that a peer cannot do."""
    beyond = set(case.options) - {"causal", "window"} | set(case.present) - {"sinks"}
    if beyond:
        raise ValueError(f"{name} is called here with causal, window and sinks only, not {', '.join(sorted(beyond))}")
    if case.options.get("window") is not None and not windows:
        raise ValueError(f"{name} has no window")
    if "sinks" in case.present and not sinks:
        raise ValueError(f"{name} has no learned sinks")


class _Lengths:
    """Lengths on the host, read once for each shape: peers take the longest as a number."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], list[int]] = {}

    def of(self, q: Tensor, cu_seqlens: Tensor) -> list[int]:
        key = q.shape[0], cu_seqlens.shape[0]
        if key not in self._known:
            self._known[key] = cu_seqlens.diff().tolist()
        return self._known[key]

    def most(self, q: Tensor, cu_seqlens: Tensor) -> int:
        return max(self.of(q, cu_seqlens))


def sdpa(op: Op, case: Case) -> Function:
    """torch's scaled_dot_product_attention, one call for each sequence."""
    _check(case, "sdpa")
    causal, lengths = case.options.get("causal", False), _Lengths()

    def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor) -> Tensor:
        each = lengths.of(q, cu_seqlens_q)
        parts = zip(*(x.transpose(0, 1).split(each, 1) for x in (q, k, v)))
        grouped = q.shape[1] != k.shape[1]
        outs = [
            F.scaled_dot_product_attention(a[None], b[None], c[None], is_causal=causal, enable_gqa=grouped)[0]
            for a, b, c in parts
        ]
        return torch.cat(outs, 1).transpose(0, 1)

    return attention


def cudnn(op: Op, case: Case) -> Function:
    """cuDNN through torch's nested tensors."""
    _check(case, "cudnn")
    if case.axes["heads"] != case.axes["kv_heads"]:
        raise ValueError("torch's nested tensors have no grouped heads")
    causal, lengths = case.options.get("causal", False), _Lengths()

    def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor) -> Tensor:
        each = lengths.of(q, cu_seqlens_q)
        sizes: dict[str, Any] = {"min_seqlen": min(each), "max_seqlen": max(each)}
        rows, columns, values = (
            torch.nested.nested_tensor_from_jagged(x, cu_seqlens_q, **sizes).transpose(1, 2) for x in (q, k, v)
        )
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION):
            out = F.scaled_dot_product_attention(rows, columns, values, is_causal=causal)
        return out.transpose(1, 2).values()

    return attention


def fa2(op: Op, case: Case) -> Function:
    """FlashAttention-2 as torch ships it for packed sequences."""
    from torch.nn.attention.varlen import varlen_attn

    _check(case, "fa2")
    causal, lengths = case.options.get("causal", False), _Lengths()
    if case.axes["heads"] != case.axes["kv_heads"]:
        raise ValueError("torch's varlen_attn has no grouped heads")
    parameters = inspect.signature(varlen_attn).parameters
    settings = {"is_causal": causal} if "is_causal" in parameters else {"window_size": (-1, 0 if causal else -1)}

    def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor) -> Tensor:
        most = lengths.most(q, cu_seqlens_q)
        return _first(varlen_attn(q, k, v, cu_seqlens_q, cu_seqlens_q, most, most, **settings))

    return attention


def fa3(op: Op, case: Case) -> Function:
    """FlashAttention-3; what can be installed has the forward pass only."""
    from fa3_fwd_interface import flash_attn_varlen_func

    _check(case, "fa3", windows=True)
    window, lengths = case.options.get("window"), _Lengths()
    causal = bool(case.options.get("causal")) or window is not None
    settings = {"causal": causal, "window_size": (-1, -1) if window is None else (window - 1, 0)}

    def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor) -> Tensor:
        most = lengths.most(q, cu_seqlens_q)
        return _first(flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_q, most, most, **settings))

    return attention


def fa4(op: Op, case: Case) -> Function:
    """FlashAttention-4, with windows and learned sinks."""
    from flash_attn.cute import flash_attn_varlen_func

    _check(case, "fa4", windows=True, sinks=True)
    window, lengths = case.options.get("window"), _Lengths()
    causal = bool(case.options.get("causal")) or window is not None
    settings: dict[str, Any] = {
        "causal": causal, "window_size": (None, None) if window is None else (window - 1, 0)
    }  # fmt: skip
    takes_most = "max_seqlen_q" in inspect.signature(flash_attn_varlen_func).parameters

    def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens_q: Tensor, sinks: Tensor | None = None) -> Tensor:
        most = lengths.most(q, cu_seqlens_q)
        longest = {"max_seqlen_q": most, "max_seqlen_k": most} if takes_most else {}
        lengths_of = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_q}
        return _first(flash_attn_varlen_func(q, k, v, learnable_sink=sinks, **lengths_of, **longest, **settings))

    return attention


def _first(outputs: Any) -> Tensor:
    return outputs[0] if isinstance(outputs, tuple) else outputs
