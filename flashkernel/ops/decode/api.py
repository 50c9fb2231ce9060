"""The public attention over a cache: argument checks and dispatch."""

import torch
from torch import Tensor

from flashkernel.core.dispatch import choose
from flashkernel.core.library import KernelOp
from flashkernel.core.op import resolve
from flashkernel.ops.decode import spec

QUANTISED = (torch.float8_e4m3fn, torch.int8)


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
    """Attention of a few new queries to each sequence's cached keys.

    q is (batch, new, heads, head_dim): one query for decoding, several to verify a speculation. k and v are the cache:
    (batch, capacity, kv_heads, head_dim), or with `page_table`, int32 (batch, most_pages), the pages that it numbers:
    (pages, page_size, kv_heads, head_dim). `lengths`, int32 (batch,), counts each sequence's keys, the new ones
    included: the last query sits at position lengths[b] - 1 and sees everything up to itself. What lies behind a
    sequence's last key, in the cache and in the table, is never read. A sequence of length 0 gives zeros.

    With `window` a query sees so many keys, itself included, and the first `sink_tokens`. `sinks` (heads,) are learned
    logits in the denominator (gpt-oss). A cache in float8_e4m3fn or int8 comes with `k_scale` and `v_scale`, float32
    and of its shape without the last dim: a value is what is stored times its scale.

    `prefix_length`, a number or an int32 tensor of one element, promises that the first so many keys are the same for
    all sequences: those that the first sequence has are then read once, from there, for the whole batch.

    `return_lse` adds the log of each row's sum, (batch, heads, new) in float32. The launch follows from the tensors'
    shapes alone: a captured CUDA graph serves any lengths and tables. There is no gradient.
    """
    name = "decode_attention"
    if q.ndim != 4:
        raise ValueError(f"{name}: q has shape {tuple(q.shape)}; it must be (batch, new, heads, head_dim)")
    _check_cache(name, q, k, v, k_scale, v_scale, page_table, sinks)
    _check_lengths(name, q, lengths, page_table, q.shape[0])
    if page_table is None and k.shape[0] != q.shape[0]:
        raise ValueError(
            f"{name}: the cache holds {k.shape[0]} sequences but q {q.shape[0]}; pages are given with page_table"
        )
    _check_settings(name, window, sink_tokens, softcap)
    _check_prefix(q, prefix_length)
    chosen = choose(
        spec.DECODE_ATTENTION, backend, q.device, q.dtype,
        head_dim=q.shape[-1], value_dim=v.shape[-1], stored=k.dtype, batch=q.shape[0],
        rows=q.shape[1] * (q.shape[2] // k.shape[2]), has_prefix=isinstance(prefix_length, Tensor) or prefix_length > 0,
        short=bool(_span(q, k, page_table, window, sink_tokens) <= spec.SHORT), even=bool(_even(k) and _even(v)),
        paged=page_table is not None,
    )  # fmt: skip
    if chosen.composite:
        return chosen.run(
            q, k, v, lengths, page_table, window=window, sinks=sinks, sink_tokens=sink_tokens, softcap=softcap,
            scale=scale, k_scale=k_scale, v_scale=v_scale, prefix_length=prefix_length, return_lse=return_lse,
        )  # fmt: skip
    dynamic = prefix_length if isinstance(prefix_length, Tensor) else None
    out, lse = _decode(
        q, k, v, lengths, page_table, sinks, k_scale, v_scale, dynamic,
        0 if dynamic is not None else prefix_length, 0 if window is None else window, sink_tokens,
        q.shape[-1] ** -0.5 if scale is None else float(scale), float(softcap), chosen.target,
    )  # fmt: skip
    return (out, lse) if return_lse else out


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
    """Attention of many new queries to cached pages: prefill, in chunks or whole, of sequences of any lengths.

    q is (tokens, heads, head_dim), the new queries of all sequences one behind the other; sequence b has those of
    [cu_seqlens_q[b], cu_seqlens_q[b + 1]), int32 (batch + 1,). Their keys are in the pages already: `lengths` counts
    them in, the last query sits at position lengths[b] - 1, and a query sees everything up to itself. The rest is as in
    `decode_attention`; lse is (heads, tokens). Tokens behind the last sequence give zeros.
    """
    name = "paged_attention"
    if q.ndim != 3:
        raise ValueError(f"{name}: q has shape {tuple(q.shape)}; it must be (tokens, heads, head_dim)")
    _check_cache(name, q, k, v, k_scale, v_scale, page_table, sinks)
    _check_lengths(name, q, lengths, page_table, lengths.shape[0])
    if not _is_int32(cu_seqlens_q, q, 1) or cu_seqlens_q.shape[0] != lengths.shape[0] + 1:
        raise ValueError(
            f"{name}: cu_seqlens_q is {cu_seqlens_q.dtype} {tuple(cu_seqlens_q.shape)} on {cu_seqlens_q.device}; it "
            f"must be int32 ({lengths.shape[0] + 1},) on {q.device}: one more than there are sequences"
        )
    _check_settings(name, window, sink_tokens, softcap)
    chosen = choose(
        spec.PAGED_ATTENTION, backend, q.device, q.dtype,
        head_dim=q.shape[-1], value_dim=v.shape[-1], stored=k.dtype, batch=lengths.shape[0],
    )  # fmt: skip
    if chosen.composite:
        return chosen.run(
            q, k, v, cu_seqlens_q, lengths, page_table, window=window, sinks=sinks, sink_tokens=sink_tokens,
            softcap=softcap, scale=scale, k_scale=k_scale, v_scale=v_scale, return_lse=return_lse,
        )  # fmt: skip
    out, lse = _packed(
        q, k, v, cu_seqlens_q, lengths, page_table, sinks, k_scale, v_scale, 0 if window is None else window,
        sink_tokens, q.shape[-1] ** -0.5 if scale is None else float(scale), float(softcap), chosen.target,
    )  # fmt: skip
    return (out, lse) if return_lse else out


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
    quantised = k.dtype in QUANTISED
    if not q.is_floating_point() or q.dtype in QUANTISED or (k.dtype != q.dtype and not quantised):
        raise ValueError(
            f"{name}: q is {q.dtype} and the cache {k.dtype}; the cache has q's float dtype, or float8_e4m3fn or int8"
        )
    for label, factor in (("k_scale", k_scale), ("v_scale", v_scale)):
        if (factor is not None) != quantised:
            given = "is missing" if quantised else "is given"
            raise ValueError(
                f"{name}: {label} {given}, and the cache is {k.dtype}; a quantised cache comes with scales"
            )
        if factor is None:
            continue
        if factor.shape != k.shape[:3] or not factor.is_floating_point() or factor.device != q.device:
            raise ValueError(
                f"{name}: {label} is {factor.dtype} {tuple(factor.shape)} on {factor.device}; it must be float32 "
                f"{tuple(k.shape[:3])} on {q.device}: one scale for each key and head"
            )
    if page_table is not None and (k.shape[1] not in (16, 32, 64, 128, 256)):
        raise ValueError(f"{name}: pages hold {k.shape[1]} keys; page_size must be a power of two from 16 to 256")
    if sinks is not None and (tuple(sinks.shape) != (heads,) or not sinks.is_floating_point()):
        raise ValueError(
            f"{name}: sinks is {sinks.dtype} {tuple(sinks.shape)}; it must have one float logit a head, ({heads},)"
        )
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
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
            f"int32 ({batch}, most_pages) on {q.device}"
        )


def _check_settings(name: str, window: int | None, sink_tokens: int, softcap: float) -> None:
    if window is not None and window < 1:
        raise ValueError(f"{name}: window is {window}; a query must see itself at least, and None is no window")
    if sink_tokens < 0 or (sink_tokens and window is None):
        raise ValueError(
            f"{name}: sink_tokens is {sink_tokens} and window {window}; it counts the first keys that stay visible "
            "beside a window"
        )
    if softcap < 0:
        raise ValueError(f"{name}: softcap is {softcap}; it must be positive, or 0 for none")


def _check_prefix(q: Tensor, prefix_length: int | Tensor) -> None:
    if isinstance(prefix_length, Tensor):
        if prefix_length.numel() != 1 or prefix_length.dtype != torch.int32 or prefix_length.device != q.device:
            raise ValueError(
                f"decode_attention: prefix_length is {prefix_length.dtype} {tuple(prefix_length.shape)} on "
                f"{prefix_length.device}; it must be a number, or an int32 tensor of one element on {q.device}"
            )
    elif prefix_length < 0:
        raise ValueError(f"decode_attention: prefix_length is {prefix_length}; it counts keys")


def _span(q: Tensor, k: Tensor, page_table: Tensor | None, window: int | None, sink_tokens: int) -> int:
    """Keys that a sequence's queries see at most."""
    capacity = k.shape[1] if page_table is None else page_table.shape[1] * k.shape[1]
    return capacity if window is None else min(capacity, window + q.shape[1] - 1 + sink_tokens)


def _even(x: Tensor) -> bool:
    """Whether a tensor descriptor can step through a cache: rows side by side, strides of 16 bytes or a multiple."""
    unit = 16 // x.element_size()
    for size, stride in zip(x.shape[:3], x.stride()):
        if size > 1 and (stride == 0 or stride % unit):
            return False
    return x.stride(3) == 1


def _unit(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _cache(kernels: str, k, v, lengths, table, k_scale, v_scale):
    scales = [None if x is None else x.float().contiguous() for x in (k_scale, v_scale)]
    table = None if table is None else _unit(table)
    return resolve(kernels).Cache(_unit(k), _unit(v), lengths.contiguous(), table, *scales)


def _decode_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Tensor,
    page_table: Tensor | None,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    prefix: Tensor | None,
    prefix_length: int,
    window: int,
    sink_tokens: int,
    scale: float,
    softcap: float,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    module = resolve(kernels)
    capacity = k.shape[1] if page_table is None else page_table.shape[1] * k.shape[1]
    shared = min(prefix_length, capacity) if prefix is None else prefix
    settings = module.Settings(window, sink_tokens, scale, softcap, 0 if window else shared)
    cache = _cache(kernels, k, v, lengths, page_table, k_scale, v_scale)
    return module.forward(_unit(q), cache, None if sinks is None else sinks.contiguous(), settings)


def _fake_decode(q, k, v, *_):
    batch, queries, heads, _ = q.shape
    return q.new_empty((batch, queries, heads, v.shape[3])), q.new_empty((batch, heads, queries), dtype=torch.float32)


def _packed_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    lengths: Tensor,
    page_table: Tensor,
    sinks: Tensor | None,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    window: int,
    sink_tokens: int,
    scale: float,
    softcap: float,
    kernels: str,
) -> tuple[Tensor, Tensor]:
    module = resolve(kernels)
    cache = _cache(kernels, k, v, lengths, page_table, k_scale, v_scale)
    settings = module.Settings(window, sink_tokens, scale, softcap)
    sinks = None if sinks is None else sinks.contiguous()
    return module.forward_packed(_unit(q), cu_seqlens_q.contiguous(), cache, sinks, settings)


def _fake_packed(q, k, v, *_):
    tokens, heads, _ = q.shape
    return q.new_empty((tokens, heads, v.shape[3])), q.new_empty((heads, tokens), dtype=torch.float32)


_decode = KernelOp("decode_attention", _decode_forward, _fake_decode)
_packed = KernelOp("paged_attention", _packed_forward, _fake_packed)
