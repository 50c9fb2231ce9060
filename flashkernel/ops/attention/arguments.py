"""Argument checks that the attention operators share."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.core.arguments import is_float, needs_gradients


def check_tensors(q: Tensor, k: Tensor, v: Tensor, caller: str = "attention") -> None:
    """Raise a ValueError unless q, k and v are those of one attention call."""
    for label, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 4 or not is_float(x):
            raise ValueError(
                f"{caller}: {label} must be a float tensor (batch, sequence, heads, head_dim), "
                f"not {x.dtype} {tuple(x.shape)}"
            )
        if x.dtype != q.dtype or x.device != q.device:
            raise ValueError(
                f"{caller}: {label} is {x.dtype} on {x.device} but q is {q.dtype} on {q.device}; q, k and v must agree"
            )
        if x.shape[0] != q.shape[0]:
            raise ValueError(f"{caller}: {label} has a batch of {x.shape[0]} but q has one of {q.shape[0]}")
    check_heads(q, k, v, caller)


def checked_score(score: Callable[..., Any] | ex.Traced | None, caller: str) -> ex.Traced | None:
    """A score function, traced; TypeError for what is none, ValueError where one of its tables wants a gradient."""
    if score is None:
        return None
    if not callable(score) and not isinstance(score, ex.Traced):
        raise TypeError(
            f"{caller}: score is a {type(score).__name__}; it must be a function of (score, b, h, q, k) "
            "written with operators; a tensor to be added goes into bias="
        )
    traced = score if isinstance(score, ex.Traced) else ex.score_function(score)
    if traced.tables and needs_gradients(*traced.tables):
        raise ValueError(
            f"{caller}: a table of the score function requires a gradient, and tables have none; detach it, or use "
            "bias= or alibi_slopes=, which have one"
        )
    return traced


def check_heads(q: Tensor, k: Tensor, v: Tensor, caller: str) -> None:
    """Raise a ValueError unless keys have their values, q and k one head_dim, and query heads share those of keys."""
    if k.shape[1:3] != v.shape[1:3]:
        raise ValueError(
            f"{caller}: k has {k.shape[1]} positions of {k.shape[2]} heads but v has {v.shape[1]} of {v.shape[2]}; "
            "every key needs its value"
        )
    if q.shape[3] != k.shape[3] or q.shape[3] == 0:
        raise ValueError(
            f"{caller}: q has head_dim {q.shape[3]} and k has {k.shape[3]}; they must be equal, and not zero"
        )
    heads, kv_heads = q.shape[2], k.shape[2]
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{caller}: {heads} query heads cannot share {kv_heads} key/value heads; Hq must be a multiple of Hkv"
        )


def check_packed_tensors(q: Tensor, k: Tensor, v: Tensor, caller: str = "attention_varlen") -> None:
    """Raise a ValueError unless q, k and v are those of one attention call over packed sequences."""
    for label, x in (("q", q), ("k", k), ("v", v)):
        if x.ndim != 3:
            raise ValueError(f"{caller}: {label} has shape {tuple(x.shape)}; it must be (tokens, heads, head_dim)")
    (_, heads, head_dim), (keys, kv_heads, key_dim), (values, value_heads, _) = q.shape, k.shape, v.shape
    alike = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device and is_float(q)
    sizes = keys == values and kv_heads == value_heads and head_dim == key_dim > 0
    if not alike or not sizes or heads == 0 or kv_heads == 0 or heads % kv_heads:
        check_tensors(q[None], k[None], v[None], caller)  # which says what is wrong
