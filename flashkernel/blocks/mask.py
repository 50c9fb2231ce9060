"""Attention masks: which key positions a query position sees.

A mask answers two questions from one expression: is this pair visible, and is this tile of pairs empty, partial or
full. Masks compose with &, | and ~. Kernels iterate over ranges of neighboring tiles (blocks/tile_ranges.py), never
load an empty tile and never mask a full one.

    causal() & window(128)                     what gpt-oss's sliding layers see
    (window(1024) | sink_tokens(4)) & causal() StreamingLLM
    causal() & documents(ids)                  sequences packed into one
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.blocks.expression import Expression, Table, Traced, Variable
from flashkernel.blocks.mask_type import (
    EMPTY,
    FULL,
    PARTIAL,
    SK,
    SQ,
    B,
    H,
    K,
    Mask,
    Q,
    Requirement,
    Source,
    custom_advice,
    join_requirements,
    kept,
    recalled,
    requirements,
    source_of,
    tensor_mask,
)
from flashkernel.blocks.nodes import INTEGERS
from flashkernel.core.argument_types import plain_number, type_checked
from flashkernel.core.arguments import static

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "Mask",
    "Requirement",
    "Source",
    "block_sparse",
    "causal",
    "check_causal_window",
    "checked",
    "column_intervals",
    "custom",
    "documents",
    "narrowed",
    "prefix",
    "recalled",
    "sink_tokens",
    "source_of",
    "tensor_mask",
    "window",
]

MAX_KEYS = 1 << 29  # more than there are; positions beside it stay in 32 bits


@kept
def causal() -> Mask:
    """The mask in which a query sees the keys up to its own position.

    The last query is aligned with the last key: query q has position q + seqlen_k - seqlen_q.

    Returns:
        A `Mask`. `attention(q, k, v, causal=True)` means the same.

    Example:
        >>> import flashkernel as fk
        >>> fk.causal().visible(1, 1, 2, 3)[0, 0].int().tolist()
        [[1, 1, 0], [1, 1, 1]]
    """
    return Mask(K <= Q + (SK - SQ), "causal")


@type_checked
def window(left: int | None, right: int | None = None) -> Mask:
    """The mask in which a query sees the keys around its own position.

    Args:
        left: how many keys a query sees up to its own, itself included (Transformers' sliding_window); None is no
            limit.
        right: how many later keys it sees; None is no limit, so a sliding window is `causal() & window(left)`.

    Returns:
        A `Mask`.

    Example:
        >>> import flashkernel as fk
        >>> fk.window(2, 1).visible(1, 1, 4, 4)[0, 0].int().tolist()
        [[1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 1]]
    """
    return _window(left, right)


def _limited(keys: int) -> int:
    """A side of a window, at most as many keys as there can be."""
    return min(keys, MAX_KEYS)


@kept
def _window(left: int | None, right: int | None) -> Mask:
    position = Q + (SK - SQ)
    parts = []
    left, right = None if left is None else _limited(static(left)), None if right is None else _limited(static(right))
    if left is not None:
        if left < 1:
            raise ValueError(f"window: a query must see at least itself; left is {left}")
        parts.append(position - left < K)
    if right is not None:
        parts.append(position + right >= K)
    if not parts:
        raise ValueError("window: give left, right or both; for no limit leave the mask out")
    return Mask(parts[0] if len(parts) == 1 else parts[0] & parts[1], f"window({left}, {right})")


@type_checked
@kept
def sink_tokens(count: int) -> Mask:
    """The mask in which every query sees the first `count` keys (StreamingLLM's attention sinks).

    Args:
        count: how many keys.

    Returns:
        A `Mask`, to be joined to a window with | and then to `causal()` with &.

    Example:
        >>> import flashkernel as fk
        >>> streaming = (fk.window(2) | fk.sink_tokens(1)) & fk.causal()
        >>> streaming.visible(1, 1, 4, 4)[0, 0].int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 0, 1, 1]]
    """
    count = _limited(static(count))
    if count < 0:
        raise ValueError(f"sink_tokens: count is {count}; it must be 0 or more")
    return Mask(count > K, f"sink_tokens({count})")


@type_checked
def prefix(lengths: int | Tensor) -> Mask:
    """The mask in which every query sees the first `lengths` keys; a prefix LM has `prefix(n) | causal()`.

    Args:
        lengths: a number, or an integer tensor (batch,).

    Returns:
        A `Mask`.

    Example:
        >>> import flashkernel as fk
        >>> (fk.prefix(2) | fk.causal()).visible(1, 1, 3, 3)[0, 0].int().tolist()
        [[1, 1, 0], [1, 1, 0], [1, 1, 1]]
    """
    if not isinstance(lengths, Tensor):
        return Mask(ex.lift(lengths) > K, "prefix")
    _check_integers("prefix: lengths", lengths)
    if lengths.ndim != 1:
        raise ValueError(f"prefix: lengths has shape {tuple(lengths.shape)}; it must be (batch,), or a number")
    return Mask(Table(lengths)[B] > K, "prefix", requirements("prefix: lengths", batch=lengths.shape[0]))


@type_checked
def documents(query_ids: Tensor, key_ids: Tensor | None = None) -> Mask:
    """The mask in which queries and keys see each other within a document, for sequences packed into one.

    Args:
        query_ids: integers (seqlen_q,) or (batch, seqlen_q), the document of each query. The tokens of a document lie
            side by side.
        key_ids: the same of the keys, (seqlen_k,) or (batch, seqlen_k); None for those of the queries.

    Returns:
        A `Mask`, usually joined to `causal()` with &. `attention_varlen` takes cumulative lengths instead.

    Example:
        >>> import flashkernel as fk
        >>> ids = torch.tensor([0, 0, 1])
        >>> (fk.causal() & fk.documents(ids)).visible(1, 1, 3, 3)[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [0, 0, 1]]
    """
    key_ids = query_ids if key_ids is None else key_ids
    left, of_queries = _along("documents: query_ids", query_ids, Q)
    right, of_keys = _along("documents: key_ids", key_ids, K)
    return Mask(left == right, "documents", join_requirements(of_queries, of_keys))


@type_checked
def block_sparse(layout: Tensor, block: int) -> Mask:
    """The mask of the pairs whose block is set in a layout.

    Args:
        layout: bool (q blocks, k blocks), (heads, q blocks, k blocks) or (batch, heads, q blocks, k blocks).
        block: queries and keys of a block.

    Returns:
        A `Mask`.

    Example:
        >>> import flashkernel as fk
        >>> layout = torch.tensor([[True, False], [True, True]])
        >>> fk.block_sparse(layout, 2).visible(1, 1, 4, 4)[0, 0].int().tolist()
        [[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]
    """
    block = static(block)
    if block < 1 or layout.is_floating_point() or layout.is_complex():
        raise ValueError(
            f"block_sparse: layout is {layout.dtype} and block {block}; they must be torch.bool and at least 1"
        )
    indices: tuple[Expression, ...] = (Q // block, K // block)
    sizes = {"queries": block * layout.shape[-2], "keys": block * layout.shape[-1]} if layout.ndim >= 2 else {}
    if layout.ndim == 3:
        indices = (H, *indices)
        sizes |= {"heads": layout.shape[0]}
    elif layout.ndim == 4:
        indices = (B, H, *indices)
        sizes |= {"batch": layout.shape[0], "heads": layout.shape[1]}
    elif layout.ndim != 2:
        raise ValueError(f"block_sparse: layout has {layout.ndim} dims; it must be 2 (blocks), 3 (heads) or 4 (batch)")
    needs = requirements(f"block_sparse of blocks of {block}: layout", **sizes)
    return Mask(Table((layout != 0).to(torch.int8))[indices] == 1, f"block_sparse({block})", needs)


@type_checked
def column_intervals(start: Tensor, end: Tensor) -> Mask:
    """The mask in which key k is hidden from the queries in [start[k], end[k]) (FlashMask).

    Args:
        start: integers (seqlen_k,) or (batch, seqlen_k), the first query that does not see each key.
        end: the same, the first query that sees it again.

    Returns:
        A `Mask`.

    Example:
        >>> import flashkernel as fk
        >>> start, end = torch.tensor([1, 3, 3]), torch.tensor([2, 3, 3])
        >>> fk.column_intervals(start, end).visible(1, 1, 3, 3)[0, 0].int().tolist()
        [[1, 1, 1], [0, 1, 1], [1, 1, 1]]
    """
    first, of_first = _along("column_intervals: start", start, K)
    last, of_last = _along("column_intervals: end", end, K)
    return Mask((first > Q) | (last <= Q), "column_intervals", join_requirements(of_first, of_last))


def _check_integers(label: str, table: Tensor) -> None:
    if table.dtype != torch.bool and table.dtype not in INTEGERS:
        raise ValueError(f"{label} is {table.dtype}; it must hold integers, uint8 or int8 to int64")


def _along(label: str, table: Tensor, position: Variable) -> tuple[Expression, tuple[Requirement, ...]]:
    """An entry of a table (positions,) or (batch, positions), and what that needs of a call."""
    _check_integers(label, table)
    if table.ndim not in (1, 2):
        raise ValueError(f"{label} has shape {tuple(table.shape)}; it must be (positions,) or (batch, positions)")
    sizes = {"queries" if position is Q else "keys": table.shape[-1]}
    if table.ndim == 2:
        sizes["batch"] = table.shape[0]
    read = Table(table)[position] if table.ndim == 1 else Table(table)[B, position]
    return read, requirements(label, **sizes)


def custom(function: Callable[..., Any], name: str = "custom") -> Mask:
    """The mask of any function of (b, h, q, k), written with Python's operators.

    The function is called once, with variables. Kernels run the expression it returns, on 32-bit integers.

    Args:
        function: of the indices of batch, head, query and key; it returns a condition. Tensors are read by
            `tensor[index]`, and reads outside of them give 0. torch.where, minimum, maximum, abs, tanh, exp, exp2 and
            logical_and, or, not are taken as well.
        name: how the mask is written in messages.

    Returns:
        A `Mask`.

    Example:
        >>> import flashkernel as fk
        >>> stripes = fk.custom(lambda b, h, q, k: (q - k) % 2 == 0, "stripes")
        >>> (fk.causal() & stripes).visible(1, 1, 4, 4)[0, 0].int().tolist()
        [[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [0, 1, 0, 1]]
    """
    if isinstance(function, Tensor) or not callable(function):
        raise TypeError(
            f"custom takes a function of (b, h, q, k), not a {type(function).__name__}; a boolean tensor becomes a "
            "mask by flashkernel.tensor_mask(tensor)"
        )
    return Mask(ex.trace(function, "b", "h", "q", "k"), name)


def checked(
    mask: Mask | Tensor | None, caller: str, sizes: tuple[int, int, int, int], device: torch.device
) -> Mask | None:
    """What an operator was given as its mask, fit for a call of these (batch, heads, queries, keys) on this device."""
    if mask is None:
        return None
    if isinstance(mask, Tensor):
        mask = tensor_mask(mask)
    if not isinstance(mask, Mask):
        raise TypeError(
            f"{caller}: mask is a {type(mask).__name__}; it must be a Mask such as flashkernel.causal(), or a boolean "
            f"tensor that broadcasts to (batch, heads, queries, keys){custom_advice(mask)}"
        )
    for table in mask.tables:
        if table.device != device:
            raise ValueError(f"{caller}: a table of {mask} is on {table.device} but q is on {device}; move one of them")
    mask.check(caller, *sizes)
    return mask


def check_causal_window(caller: str, causal: bool, window: int | None) -> int | None:
    """An operator's argument `window` as a Python integer; TypeError or ValueError where it or `causal` is wrong."""
    if type(plain_number(causal)) is not bool:
        advice = "; a mask goes into mask=" if isinstance(causal, Traced) or callable(causal) else ""
        raise TypeError(f"{caller}: causal is a {type(causal).__name__}; it must be True or False{advice}")
    if window is None:
        return None
    try:
        whole = None if isinstance(window, (bool, Tensor, Traced)) else operator.index(window)
    except TypeError:
        whole = None
    if whole is None:
        raise TypeError(
            f"{caller}: window is {window!r}; it must be a whole number, of the keys that a query sees up to its own, "
            "or None for no window; a window of two sides is mask=flashkernel.window(left, right)"
        )
    size = _limited(static(whole))
    if size < 1:
        raise ValueError(f"{caller}: window is {size}; a query sees itself at least, so 1 or more; None is no window")
    return size


def narrowed(mask: Mask | None, causal: bool, window: int | None, caller: str) -> Mask | None:
    """The mask of an operator that was also given `causal` and `window`: all of them together.

    Under a window a query sees so many keys up to its own and no later ones, whether `causal` is set or not.
    """
    size = check_causal_window(caller, causal, window)
    if size is None and not causal:
        return mask
    own = _sliding(size)
    return own if mask is None else mask & own


@kept
def _sliding(size: int | None) -> Mask:
    return causal() if size is None else causal() & _window(size, None)
