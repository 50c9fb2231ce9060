"""flash-attn 2's functions with its signatures: `from flashkernel.compat.flash_attn import flash_attn_func`.

Differences: any float dtype, any device; value heads may have another size; a row that sees no key has LSE -inf
(flash-attn: +inf); LSE is differentiable; the third result of return_attn_probs, flash-attn's testing aid, is None.
`max_seqlen_*` are accepted and not needed. Where dropout_p > 0 the seed comes from torch's generator of q's device,
which torch.manual_seed and activation checkpointing restore. Attention with a KV cache is in kvcache.py.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.blocks import mask as masks
from flashkernel.blocks.expression import Table
from flashkernel.blocks.mask import Mask
from flashkernel.blocks.packed import packed_mask
from flashkernel.compat.arguments import integer, number, optional_number, positive_softcap, window_sides
from flashkernel.compat.kvcache import flash_attn_with_kvcache
from flashkernel.ops.attention import attention, attention_varlen

__all__ = [
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
]

Result = Tensor | tuple[Tensor, Tensor, None]


class FlashAttnOptions(NamedTuple):
    """The parameters that all functions of flash-attn share, in its order and with its defaults.

    Args:
        dropout_p: probability of dropping an attention weight.
        softmax_scale: what Q K^T is multiplied by; None is 1 / sqrt(head_dim).
        causal: a query sees no key behind its own; the last query is aligned with the last key.
        window_size: (left, right), the keys a query sees before and behind its own; -1 is no limit.
        softcap: scores are softcap * tanh(score / softcap); 0 is none.
        alibi_slopes: (heads,) or (batch, heads), ALiBi's slopes.
        deterministic: a backward pass that is bit-equal on repeat.
        return_attn_probs: also return the LSE.
    """

    dropout_p: float = 0.0
    softmax_scale: float | None = None
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    softcap: float = 0.0
    alibi_slopes: Tensor | None = None
    deterministic: bool = False
    return_attn_probs: bool = False


def _flash_attn_signature(function: Callable[..., Result]) -> Callable[..., Result]:
    """Gives a function flash-attn's signature: the fields of FlashAttnOptions replace its parameter `options`, and
    their descriptions the line OPTIONS of its docstring."""
    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(function).parameters.values():
        shared = inspect.signature(FlashAttnOptions).parameters.values()
        parameters += shared if parameter.name == "options" else [parameter]
    names = [parameter.name for parameter in parameters]
    required = [parameter.name for parameter in parameters if parameter.default is parameter.empty]

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Result:
        given = dict(zip(names, args), **kwargs)
        missing = [name for name in required if name not in given]
        unknown = [name for name in given if name not in names]
        if len(args) > len(names) or len(given) < len(args) + len(kwargs) or missing or unknown:
            raise TypeError(
                f"{function.__name__}: cannot be called with {len(args)} positional arguments and "
                f"{', '.join(kwargs) or 'no keywords'}; its parameters are {', '.join(names)}"
            )
        options = FlashAttnOptions(**{name: given.pop(name) for name in FlashAttnOptions._fields if name in given})
        return function(**given, options=options)

    described = inspect.cleandoc(FlashAttnOptions.__doc__ or "").split("Args:\n")[1]
    entries = described.replace("    ", "        ", 1).replace("\n    ", "\n        ")
    call.__doc__ = (function.__doc__ or "").replace("        OPTIONS", entries)
    call.__signature__ = inspect.Signature(parameters, return_annotation=Result)  # type: ignore[attr-defined]
    return call


@_flash_attn_signature
def flash_attn_func(q: Tensor, k: Tensor, v: Tensor, options: FlashAttnOptions) -> Result:
    """flash_attn.flash_attn_func: attention of q to k and v.

    Query i sees key j where -left <= j - (i + seqlen_k - seqlen_q) <= right, (left, right) being window_size.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        k: (batch, seqlen_k, heads_k, head_dim).
        v: (batch, seqlen_k, heads_k, value_dim).
        OPTIONS

    Returns:
        out (batch, seqlen_q, heads, value_dim); with return_attn_probs (out, lse, None), lse float32
        (batch, heads, seqlen_q).

    Example:
        >>> import torch
        >>> from flashkernel.compat.flash_attn import flash_attn_func
        >>> q, k, v = torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 64), torch.randn(2, 16, 2, 64)
        >>> flash_attn_func(q, k, v, causal=True, window_size=(4, 0)).shape
        torch.Size([2, 16, 8, 64])
    """
    name = "flash_attn_func"
    mask = _window_mask(name, options)
    found = attention(q, k, v, alibi_slopes=options.alibi_slopes, mask=mask, **_attention_options(name, options))
    return found if isinstance(found, Tensor) else (*found, None)


@_flash_attn_signature
def flash_attn_kvpacked_func(q: Tensor, kv: Tensor, options: FlashAttnOptions) -> Result:
    """flash_attn.flash_attn_kvpacked_func: `flash_attn_func` with keys and values in one tensor.

    Args:
        q: (batch, seqlen_q, heads, head_dim).
        kv: (batch, seqlen_k, 2, heads_k, head_dim).
        OPTIONS

    Returns:
        As `flash_attn_func`.

    Example:
        >>> import torch
        >>> from flashkernel.compat.flash_attn import flash_attn_kvpacked_func
        >>> flash_attn_kvpacked_func(torch.randn(2, 16, 8, 64), torch.randn(2, 16, 2, 2, 64), causal=True).shape
        torch.Size([2, 16, 8, 64])
    """
    k, v = _unpack("flash_attn_kvpacked_func", "kv", kv, 2, 5)
    return flash_attn_func(q, k, v, *options)


@_flash_attn_signature
def flash_attn_qkvpacked_func(qkv: Tensor, options: FlashAttnOptions) -> Result:
    """flash_attn.flash_attn_qkvpacked_func: `flash_attn_func` with queries, keys and values in one tensor.

    Args:
        qkv: (batch, seqlen, 3, heads, head_dim).
        OPTIONS

    Returns:
        As `flash_attn_func`.

    Example:
        >>> import torch
        >>> from flashkernel.compat.flash_attn import flash_attn_qkvpacked_func
        >>> flash_attn_qkvpacked_func(torch.randn(2, 16, 3, 8, 64), causal=True).shape
        torch.Size([2, 16, 8, 64])
    """
    q, k, v = _unpack("flash_attn_qkvpacked_func", "qkv", qkv, 3, 5)
    return flash_attn_func(q, k, v, *options)


@_flash_attn_signature
def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    options: FlashAttnOptions,
    block_table: Tensor | None = None,
) -> Result:
    """flash_attn.flash_attn_varlen_func: attention within packed sequences.

    Sequence n is q[cu_seqlens_q[n]:cu_seqlens_q[n + 1]] and sees the keys of cu_seqlens_k likewise; windows, causality
    and ALiBi count within it as in `flash_attn_func`.

    Args:
        q: (total_q, heads, head_dim).
        k: (total_k, heads_k, head_dim).
        v: (total_k, heads_k, value_dim).
        cu_seqlens_q: int32 (batch + 1,), where each sequence's queries begin.
        cu_seqlens_k: int32 (batch + 1,), where each sequence's keys begin.
        max_seqlen_q: accepted, not needed.
        max_seqlen_k: accepted, and needed with block_table: the longest sequence's keys at most.
        block_table: int32 (batch, max_blocks), the pages of each sequence; k and v are then (num_blocks, page_size,
            heads_k, dim). They are gathered first into batch * max_seqlen_k packed keys and values, which costs that
            memory and reading and writing it once; for a few queries each, `flash_attn_with_kvcache` reads pages as
            they lie.
        OPTIONS

    Returns:
        out (total_q, heads, value_dim); with return_attn_probs (out, lse, None), lse float32 (heads, total_q).

    Example:
        >>> import torch
        >>> from flashkernel.compat.flash_attn import flash_attn_varlen_func
        >>> q, k, v = torch.randn(12, 8, 64), torch.randn(12, 2, 64), torch.randn(12, 2, 64)
        >>> cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32)
        >>> flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, 7, 7, causal=True).shape
        torch.Size([12, 8, 64])
    """
    name = "flash_attn_varlen_func"
    cu_seqlens = _checked_cu_seqlens(name, cu_seqlens_q, cu_seqlens_k, q)
    if block_table is not None:
        k, v = _gather_pages(name, k, v, block_table, cu_seqlens[1], integer(name, "max_seqlen_k", max_seqlen_k))
    for tensor, label in ((q, "q"), (k, "k"), (v, "v")):
        if tensor.ndim != 3:
            raise ValueError(f"{name}: {label} has shape {tuple(tensor.shape)}; it must be (total, heads, head_dim)")
    left, right = _sides(name, options)
    given = _attention_options(name, options)
    if options.alibi_slopes is not None:
        mask, diagonal = packed_mask(*cu_seqlens, q.shape[0], left, right)
        packed_alike = cu_seqlens[0] is cu_seqlens[1] and q.shape[0] == k.shape[0]
        given |= _packed_alibi(options.alibi_slopes, diagonal, cu_seqlens, q.shape[1], packed_alike)
        found = attention(q[None], k[None], v[None], mask=mask, **given)
        return (found[0][0], found[1][0], None) if options.return_attn_probs else found[0]
    found = attention_varlen(q, k, v, *cu_seqlens, window=(left, right), **given)
    return found if isinstance(found, Tensor) else (*found, None)


@_flash_attn_signature
def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    options: FlashAttnOptions,
) -> Result:
    """flash_attn.flash_attn_varlen_kvpacked_func: `flash_attn_varlen_func` with keys and values in one tensor.

    Args:
        q: (total_q, heads, head_dim).
        kv: (total_k, 2, heads_k, head_dim).
        cu_seqlens_q: int32 (batch + 1,), where each sequence's queries begin.
        cu_seqlens_k: int32 (batch + 1,), where each sequence's keys begin.
        max_seqlen_q: accepted, not needed.
        max_seqlen_k: accepted, not needed.
        OPTIONS

    Returns:
        As `flash_attn_varlen_func`.

    Example:
        >>> import torch
        >>> from flashkernel.compat.flash_attn import flash_attn_varlen_kvpacked_func
        >>> cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32)
        >>> q, kv = torch.randn(12, 8, 64), torch.randn(12, 2, 2, 64)
        >>> flash_attn_varlen_kvpacked_func(q, kv, cu_seqlens, cu_seqlens, 7, 7).shape
        torch.Size([12, 8, 64])
    """
    k, v = _unpack("flash_attn_varlen_kvpacked_func", "kv", kv, 2, 4)
    return flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, *options)


@_flash_attn_signature
def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor, cu_seqlens: Tensor, max_seqlen: int, options: FlashAttnOptions
) -> Result:
    """flash_attn.flash_attn_varlen_qkvpacked_func: `flash_attn_varlen_func` with q, k and v in one tensor.

    Args:
        qkv: (total, 3, heads, head_dim).
        cu_seqlens: int32 (batch + 1,), where each sequence begins.
        max_seqlen: accepted, not needed.
        OPTIONS

    Returns:
        As `flash_attn_varlen_func`.

    Example:
        >>> import torch
        >>> from flashkernel.compat.flash_attn import flash_attn_varlen_qkvpacked_func
        >>> cu_seqlens = torch.tensor([0, 5, 12], dtype=torch.int32)
        >>> flash_attn_varlen_qkvpacked_func(torch.randn(12, 3, 8, 64), cu_seqlens, 7, causal=True).shape
        torch.Size([12, 8, 64])
    """
    q, k, v = _unpack("flash_attn_varlen_qkvpacked_func", "qkv", qkv, 3, 4)
    return flash_attn_varlen_func(q, k, v, cu_seqlens, cu_seqlens, max_seqlen, max_seqlen, *options)


def _sides(name: str, options: FlashAttnOptions) -> tuple[int | None, int | None]:
    """How many keys a query sees before and behind the one it is aligned with; None for all."""
    left, right = (None if side < 0 else side for side in window_sides(name, options.window_size))
    return left, 0 if options.causal else right


def _window_mask(name: str, options: FlashAttnOptions) -> Mask | None:
    left, right = _sides(name, options)
    if left is None:
        return None if right is None else masks.causal() if right == 0 else masks.window(None, right)
    window = left + 1  # flash-attn does not count the key a query is aligned with
    return masks.causal() & masks.window(window) if right == 0 else masks.window(window, right)


def _attention_options(name: str, options: FlashAttnOptions) -> dict[str, Any]:
    """The options as `flashkernel.attention` takes them."""
    return {
        "scale": optional_number(name, "softmax_scale", options.softmax_scale),
        "softcap": positive_softcap(name, options.softcap),
        "dropout": number(name, "dropout_p", options.dropout_p),
        "deterministic": bool(options.deterministic),
        "return_lse": bool(options.return_attn_probs),
    }


def _unpack(name: str, label: str, packed: Tensor, parts: int, ndim: int) -> tuple[Tensor, ...]:
    if packed.ndim != ndim or packed.shape[-3] != parts:
        raise ValueError(
            f"{name}: {label} has shape {tuple(packed.shape)}; it must have {ndim} dims ending in "
            f"({parts}, heads, head_dim)"
        )
    return packed.unbind(-3)


def _checked_cu_seqlens(name: str, cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    for given, label in ((cu_seqlens_q, "cu_seqlens_q"), (cu_seqlens_k, "cu_seqlens_k")):
        if given.ndim != 1 or given.is_floating_point() or given.device != q.device:
            raise ValueError(
                f"{name}: {label} is {given.dtype} {tuple(given.shape)} on {given.device}; it must be int32 "
                f"(batch + 1,) on {q.device}"
            )
    if cu_seqlens_q.shape != cu_seqlens_k.shape or cu_seqlens_q.shape[0] < 2:
        raise ValueError(
            f"{name}: cu_seqlens_q has {cu_seqlens_q.shape[0]} entries and cu_seqlens_k {cu_seqlens_k.shape[0]}; both "
            f"must have one more than there are sequences, of which there must be one at least"
        )
    return cu_seqlens_q, cu_seqlens_k


def _gather_pages(
    name: str, k: Tensor, v: Tensor, block_table: Tensor, cu_seqlens_k: Tensor, max_seqlen_k: int
) -> tuple[Tensor, Tensor]:
    """Keys and values in pages as packed sequences. Positions behind the last sequence, of which the host does not know
    how many there are, hold zeros: what was never written to a page may be NaN, also where no query sees it."""
    batch = cu_seqlens_k.shape[0] - 1
    if k.ndim != 4 or v.ndim != 4 or k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"{name}: with block_table, k {tuple(k.shape)} and v {tuple(v.shape)} must be (num_blocks, page_size, "
            "heads_k, dim)"
        )
    if block_table.ndim != 2 or block_table.shape[0] != batch or block_table.is_floating_point():
        raise ValueError(
            f"{name}: block_table is {block_table.dtype} {tuple(block_table.shape)}; it must be int32 ({batch}, blocks)"
        )
    page_size = k.shape[1]
    if max_seqlen_k > block_table.shape[1] * page_size:
        raise ValueError(
            f"{name}: max_seqlen_k is {max_seqlen_k}, but block_table has {block_table.shape[1]} pages of {page_size} "
            "for a sequence"
        )
    token = torch.arange(batch * max_seqlen_k, dtype=torch.int64, device=k.device)
    lengths = cu_seqlens_k.long().contiguous()
    sequence = (torch.searchsorted(lengths, token, right=True) - 1).clamp(0, batch - 1)
    position = (token - lengths[sequence]).clamp(max=max(0, max_seqlen_k - 1))
    page = block_table[sequence, position // page_size].long()
    row = (page * page_size + position % page_size).clamp(0, k.shape[0] * page_size - 1)
    behind = (token >= lengths[-1])[:, None, None]
    gathered_k, gathered_v = (pages.flatten(0, 1)[row].masked_fill_(behind, 0) for pages in (k, v))
    return gathered_k, gathered_v


def _packed_alibi(
    slopes: Tensor, diagonal: Tensor, cu_seqlens: tuple[Tensor, Tensor], heads: int, packed_alike: bool
) -> dict[str, Any]:
    """ALiBi within packed sequences: `alibi_slopes` where q and k are packed alike, else a score function."""
    sequences = cu_seqlens[0].shape[0] - 1
    if tuple(slopes.shape) not in ((heads,), (sequences, heads)):
        raise ValueError(
            f"flash_attn_varlen_func: alibi_slopes has shape {tuple(slopes.shape)}; it must be ({heads},) or "
            f"({sequences}, {heads}): heads, or sequences and heads"
        )
    if slopes.ndim == 1 and packed_alike:
        return {"alibi_slopes": slopes}
    if slopes.requires_grad:
        raise NotImplementedError(
            "flash_attn_varlen_func: slopes have a gradient only where they are (heads,) and cu_seqlens_q is "
            "cu_seqlens_k; detach alibi_slopes"
        )
    aligned = Table(diagonal)
    if slopes.ndim == 1:
        of_head = Table(slopes.float())
        return {"score": ex.score_function(lambda s, b, h, q, k: s - of_head[h] * ex.absolute(aligned[q] - k))}
    token = torch.arange(diagonal.shape[0], dtype=torch.int32, device=diagonal.device)
    sequence = (torch.searchsorted(cu_seqlens[0].int().contiguous(), token, right=True) - 1).clamp(max=sequences - 1)
    of_token = Table(slopes.float()[sequence])  # [total_q, heads]
    return {"score": ex.score_function(lambda s, b, h, q, k: s - of_token[q, h] * ex.absolute(aligned[q] - k))}
