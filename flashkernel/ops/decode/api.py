"""The public attention over a cache: argument checks and dispatch."""

import torch
from torch import Tensor

from flashkernel.blocks.mask import check_causal_window
from flashkernel.core.arguments import autocast_dtype, check_scores, is_float, needs_gradients, without_autocast
from flashkernel.core.dispatch import choose
from flashkernel.core.library import traced
from flashkernel.core.replay import replayed
from flashkernel.ops.decode import library, spec
from flashkernel.ops.decode.params import AttendOptions, CachedKV

QUANTIZED = (torch.float8_e4m3fn, torch.int8)


@replayed
def decode_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    page_table: Tensor | None = None,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    sink_tokens: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    prefix_length: int | Tensor = 0,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of a few new queries to each sequence's cached keys (decoding, or verification of a draft).

    The last query of sequence b is at position lengths[b] - 1 and sees every key up to itself. What lies behind a
    sequence's last key, in the cache and in the page table, is never read. A sequence of length 0 gives zeros.

    Under autocast q is cast to the cache's dtype, or to autocast's where the cache is quantized. The launch depends on
    shapes alone: a captured CUDA graph serves any lengths and page tables. There is no gradient.

    Args:
        q: (batch, seqlen_q, heads, head_dim), the new queries.
        k: (batch, capacity, kv_heads, head_dim), the cached keys; with `page_table` the pages,
            (pages, page_size, kv_heads, head_dim), page_size a power of two from 16 to 256. In q's dtype,
            float8_e4m3fn or int8.
        v: (batch, capacity, kv_heads, value_dim) or (pages, page_size, kv_heads, value_dim), in k's dtype.
        lengths: int32 (batch,), the keys of each sequence, the new ones included (flash-attn's `cache_seqlens`).
        page_table: int32 (batch, max_pages), the page numbers of each sequence (flash-attn's `block_table`).
        window: keys that a query sees, itself included; None is all.
        sinks: (heads,), a learned logit per head that joins the softmax's denominator (gpt-oss).
        sink_tokens: the first keys that stay visible beside a window.
        softcap: scores are softcap * tanh(score / softcap); 0 is none.
        scale: what Q K^T is multiplied by; None is 1 / sqrt(head_dim).
        k_scale: float32, k's shape without the last dim, for a quantized cache: key = stored * scale.
        v_scale: the same for values.
        prefix_length: a number, or an int32 tensor of one element. It promises that the first keys of all sequences
            are the same: they are read once, from the first sequence, for the whole batch.
        return_lse: also return the log-sum-exp of each row.
        backend: a backend's name; None chooses.

    Returns:
        o (batch, seqlen_q, heads, value_dim) in q's dtype; with `return_lse` also lse (batch, heads, seqlen_q) in
        float32.

    Example:
        >>> import torch, flashkernel as fk
        >>> q = torch.randn(2, 1, 8, 64)  # one new token for each of 2 sequences
        >>> k, v = torch.randn(2, 100, 2, 64), torch.randn(2, 100, 2, 64)
        >>> lengths = torch.tensor([100, 37], dtype=torch.int32)
        >>> fk.decode_attention(q, k, v, lengths).shape
        torch.Size([2, 1, 8, 64])
    """
    name = "decode_attention"
    if q.ndim != 4:
        raise ValueError(f"{name}: q has shape {tuple(q.shape)}; it must be (batch, new, heads, head_dim)")
    q = _cast_query(q, k)
    _check_cache(name, q, k, v, k_scale, v_scale, page_table, sinks)
    _check_lengths(name, q, lengths, page_table, q.shape[0])
    if page_table is None and k.shape[0] != q.shape[0]:
        raise ValueError(
            f"{name}: the cache holds {k.shape[0]} sequences but q {q.shape[0]}; pages are given with page_table"
        )
    window, sink_tokens = _checked_window(name, window, sink_tokens, softcap, scale)
    prefix_length = _checked_prefix(q, prefix_length)
    options = AttendOptions(window, sinks, sink_tokens, softcap, scale, k_scale, v_scale, return_lse, prefix_length)
    capacity = k.shape[1] if page_table is None else page_table.shape[1] * k.shape[1]
    chosen = choose(
        spec.DECODE_ATTENTION, backend, q.device, q.dtype,
        head_dim=q.shape[-1], value_dim=v.shape[-1], cache_dtype=k.dtype, batch=q.shape[0],
        rows=q.shape[1] * (q.shape[2] // k.shape[2]), has_prefix=isinstance(prefix_length, Tensor) or prefix_length > 0,
        short=bool(options.visible_keys(capacity, q.shape[1]) <= spec.SHORT),
        tma_aligned=bool(_tma_aligned(k) and _tma_aligned(v)), paged=page_table is not None,
    )  # fmt: skip
    if chosen.composite:
        with without_autocast(q):
            return chosen.run(q, k, v, lengths, page_table, **options.as_keywords())
    cache, params = CachedKV(k, v, lengths, page_table, k_scale, v_scale), options.params(q.shape[-1])
    out, lse = library.decode_attention(q, cache, sinks, params, chosen.target)
    return (out, lse) if return_lse else out


@replayed
def paged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
    sink_tokens: int = 0,
    softcap: float = 0.0,
    scale: float | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    return_lse: bool = False,
    backend: str | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of many packed new queries to cached pages: prefill, whole or in chunks.

    The keys of the new tokens are in the pages already. The last query of sequence b is at position lengths[b] - 1, and
    a query sees every key up to itself. Tokens behind the last sequence give zeros. There is no gradient.

    Args:
        q: (tokens, heads, head_dim), the new queries of all sequences, packed.
        k: (pages, page_size, kv_heads, head_dim), as in `decode_attention`.
        v: (pages, page_size, kv_heads, value_dim).
        cu_seqlens_q: int32 (batch + 1,); sequence b has the queries [cu_seqlens_q[b], cu_seqlens_q[b + 1]).
        lengths: int32 (batch,), the keys of each sequence, the new ones included.
        page_table: int32 (batch, max_pages), the page numbers of each sequence.
        window: keys that a query sees, itself included; None is all.
        sinks: (heads,), a learned logit per head that joins the softmax's denominator (gpt-oss).
        sink_tokens: the first keys that stay visible beside a window.
        softcap: scores are softcap * tanh(score / softcap); 0 is none.
        scale: what Q K^T is multiplied by; None is 1 / sqrt(head_dim).
        k_scale: float32 (pages, page_size, kv_heads), for quantized pages.
        v_scale: the same for values.
        return_lse: also return the log-sum-exp of each row.
        backend: a backend's name; None chooses.

    Returns:
        o (tokens, heads, value_dim) in q's dtype; with `return_lse` also lse (heads, tokens) in float32.

    Example:
        >>> import torch, flashkernel as fk
        >>> pages = torch.randn(2, 8, 16, 2, 64)  # keys and values of 8 pages of 16 tokens
        >>> q = torch.randn(25, 8, 64)  # 20 new tokens of one sequence, 5 of another
        >>> cu_seqlens_q = torch.tensor([0, 20, 25], dtype=torch.int32)
        >>> lengths = torch.tensor([20, 40], dtype=torch.int32)
        >>> page_table = torch.tensor([[3, 1, 0], [7, 2, 5]], dtype=torch.int32)
        >>> fk.paged_attention(q, pages[0], pages[1], cu_seqlens_q, lengths, page_table).shape
        torch.Size([25, 8, 64])
    """
    name = "paged_attention"
    if q.ndim != 3:
        raise ValueError(f"{name}: q has shape {tuple(q.shape)}; it must be (tokens, heads, head_dim)")
    q = _cast_query(q, k)
    _check_cache(name, q, k, v, k_scale, v_scale, page_table, sinks)
    _check_lengths(name, q, lengths, page_table, lengths.numel())
    if not _is_int32(cu_seqlens_q, q, 1) or cu_seqlens_q.shape[0] != lengths.shape[0] + 1:
        raise ValueError(
            f"{name}: cu_seqlens_q is {cu_seqlens_q.dtype} {tuple(cu_seqlens_q.shape)} on {cu_seqlens_q.device}; it "
            f"must be int32 ({lengths.shape[0] + 1},) on {q.device}: one more than there are sequences"
        )
    window, sink_tokens = _checked_window(name, window, sink_tokens, softcap, scale)
    options = AttendOptions(window, sinks, sink_tokens, softcap, scale, k_scale, v_scale, return_lse)
    chosen = choose(
        spec.PAGED_ATTENTION, backend, q.device, q.dtype,
        head_dim=q.shape[-1], value_dim=v.shape[-1], cache_dtype=k.dtype, batch=lengths.shape[0],
        group_size=q.shape[1] // k.shape[2], tma_aligned=bool(_tma_aligned(k) and _tma_aligned(v)),
    )  # fmt: skip
    if chosen.composite:
        with without_autocast(q):
            return chosen.run(q, k, v, cu_seqlens_q, lengths, page_table, **options.as_keywords())
    cache, params = CachedKV(k, v, lengths, page_table, k_scale, v_scale), options.params(q.shape[-1])
    out, lse = library.paged_attention(q, cu_seqlens_q, cache, sinks, params, chosen.target)
    return (out, lse) if return_lse else out


def _cast_query(q: Tensor, k: Tensor) -> Tensor:
    """Under autocast q takes the cache's dtype, or autocast's where the cache is quantized: a cache is not cast."""
    if k.dtype == q.dtype:
        return q
    lower = autocast_dtype(q)
    if lower is None or not is_float(q):
        return q
    return q.to(k.dtype if is_float(k) else lower)


def _check_cache(
    name: str,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    page_table: Tensor | None,
    sinks: Tensor | None,
) -> None:
    layout = "(batch, capacity, kv_heads, head_dim)" if page_table is None else "(pages, page_size, kv_heads, head_dim)"
    for label, x in (("k", k), ("v", v)):
        if x.ndim != 4:
            raise ValueError(f"{name}: {label} has shape {tuple(x.shape)}; it must be {layout}")
        if x.device != q.device:
            raise ValueError(f"{name}: {label} is on {x.device} but q is on {q.device}; move one of them")
    if k.shape[:3] != v.shape[:3] or k.dtype != v.dtype:
        raise ValueError(
            f"{name}: k is {k.dtype} {tuple(k.shape)} and v {v.dtype} {tuple(v.shape)}; every key needs its value"
        )
    heads, kv_heads = q.shape[-2], k.shape[2]
    if q.shape[-1] != k.shape[3] or q.shape[-1] == 0:
        raise ValueError(
            f"{name}: q has head_dim {q.shape[-1]} and k has {k.shape[3]}; they must be equal, and not zero"
        )
    if heads == 0 or kv_heads == 0 or heads % kv_heads:
        raise ValueError(
            f"{name}: {heads} query heads cannot share {kv_heads} key/value heads; Hq must be a multiple of Hkv"
        )
    quantized = k.dtype in QUANTIZED
    if not is_float(q) or (k.dtype != q.dtype and not quantized):
        raise ValueError(
            f"{name}: q is {q.dtype} and the cache {k.dtype}; the cache has q's float dtype, or float8_e4m3fn or int8"
        )
    for label, factor in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (factor is not None) != quantized:
            given = "is missing" if quantized else "is given"
            raise ValueError(
                f"{name}: {label} {given}, and the cache is {k.dtype}; a quantized cache comes with scales"
            )
        if factor is None:
            continue
        if factor.shape != k.shape[:3] or not is_float(factor) or factor.device != q.device:
            raise ValueError(
                f"{name}: {label} is {factor.dtype} {tuple(factor.shape)} on {factor.device}; it must be float32 "
                f"{tuple(k.shape[:3])} on {q.device}: one scale for each key and head"
            )
    if page_table is not None and (k.shape[1] not in (16, 32, 64, 128, 256)):
        raise ValueError(f"{name}: pages hold {k.shape[1]} keys; page_size must be a power of two from 16 to 256")
    if sinks is not None and (tuple(sinks.shape) != (heads,) or not is_float(sinks) or sinks.device != q.device):
        raise ValueError(
            f"{name}: sinks is {sinks.dtype} {tuple(sinks.shape)} on {sinks.device}; it must have one float logit a "
            f"head, ({heads},), on {q.device}"
        )
    if needs_gradients(q, k, v, sinks, k_scale, v_scale):
        raise ValueError(
            f"{name}: there is no gradient, and one is asked for; call it under torch.no_grad(), or train with "
            "flashkernel.attention"
        )


def _is_int32(x: Tensor, q: Tensor, ndim: int) -> bool:
    return x.dtype == torch.int32 and x.ndim == ndim and x.device == q.device


def _check_lengths(name: str, q: Tensor, lengths: Tensor, page_table: Tensor | None, batch: int) -> None:
    if not _is_int32(lengths, q, 1) or lengths.shape[0] != batch:
        raise ValueError(
            f"{name}: lengths is {lengths.dtype} {tuple(lengths.shape)} on {lengths.device}; it must be int32 "
            f"({batch},) on {q.device}"
        )
    if page_table is not None and (not _is_int32(page_table, q, 2) or page_table.shape[0] != batch):
        raise ValueError(
            f"{name}: page_table is {page_table.dtype} {tuple(page_table.shape)} on {page_table.device}; it must be "
            f"int32 ({batch}, max_pages) on {q.device}"
        )


def _checked_window(
    name: str, window: int | None, sink_tokens: int, softcap: float, scale: float | None
) -> tuple[int | None, int]:
    """(window, sink_tokens), the window as a Python integer, which kernels take."""
    window = check_causal_window(name, False, window)
    if sink_tokens < 0 or (sink_tokens and window is None):
        raise ValueError(
            f"{name}: sink_tokens is {sink_tokens} and window {window}; it counts the first keys that stay visible "
            "beside a window"
        )
    check_scores(name, scale, softcap)
    return window, sink_tokens


def _checked_prefix(q: Tensor, prefix_length: int | Tensor) -> int | Tensor:
    if isinstance(prefix_length, Tensor):
        if prefix_length.numel() != 1 or prefix_length.dtype != torch.int32 or prefix_length.device != q.device:
            raise ValueError(
                f"decode_attention: prefix_length is {prefix_length.dtype} {tuple(prefix_length.shape)} on "
                f"{prefix_length.device}; it must be a number, or an int32 tensor of one element on {q.device}"
            )
        return prefix_length
    if prefix_length < 0:
        raise ValueError(f"decode_attention: prefix_length is {prefix_length}; it counts keys")
    return prefix_length


def _tma_aligned(x: Tensor) -> bool:
    """Whether TMA and 16-byte copies can load from a cache: heads contiguous, its address and strides multiples of 16
    bytes. Tracers know no address: a cache that turns out to be unaligned then is copied."""
    if not traced(x) and x.data_ptr() % 16:
        return False
    elements = 16 // x.element_size()
    for size, stride in zip(x.shape[:3], x.stride()):
        if size > 1 and (stride == 0 or stride % elements):
            return False
    return x.stride(3) == 1
