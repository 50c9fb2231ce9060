"""Attention masks: which key positions a query position sees.

A mask answers two questions from one expression: is this pair visible, and is this tile of pairs empty, partial or
full. Masks compose with &, | and ~. Kernels iterate over ranges of neighbouring tiles (blocks/tile_ranges.py), never
load an empty tile and never mask a full one.

    causal() & window(128)                     what gpt-oss's sliding layers see
    (window(1024) | sink_tokens(4)) & causal() StreamingLLM
    causal() & documents(ids)                  sequences packed into one
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.blocks.expression import Constant, Expression, Operation, Table, Traced, Variable
from flashkernel.blocks.gather_bounds import gather_bounds
from flashkernel.blocks.intervals import Interval, Truth, bounds
from flashkernel.core.arguments import static

EMPTY, PARTIAL, FULL = 0, 1, 2
_AXES = ("batch", "heads", "queries", "keys")
_B, _H, _Q, _K, _SQ, _SK = (Variable(name) for name in ("b", "h", "q", "k", "sq", "sk"))


@dataclass(frozen=True)
class Requirement:
    """What a mask needs of a call: `axis` must have `size`, or at most that where the mask can serve fewer."""

    axis: str  # batch, heads, queries or keys
    size: int
    exact: bool
    given: str  # the argument that says so


@dataclass(frozen=True, eq=False)
class Mask(Traced):
    """A condition on (b, h, q, k): True where query q of head h in batch b sees key k.

    Masks are made by `causal`, `window`, `documents`, `prefix`, `sink_tokens`, `block_sparse`, `column_intervals`,
    `tensor_mask` and `custom`, and compose with &, | and ~. A boolean tensor may stand on either side of & and |.

    Attributes:
        expression: the condition, as an expression of b, h, q, k and the sequence lengths sq and sk.
        name: how the mask is written, for messages.
        requires: the sizes that a call must have to use this mask.

    Example:
        >>> import flashkernel as fk
        >>> mask = fk.causal() & fk.window(3)
        >>> mask
        Mask((causal & window(3, None)))
        >>> mask.visible(1, 1, 4, 4)[0, 0].int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1]]
    """

    name: str = "mask"
    requires: tuple[Requirement, ...] = ()

    def __post_init__(self) -> None:
        if self.expression.kind != ex.BOOLEAN:
            raise TypeError(
                f"a mask is a condition, but {self.name} is a number ({self.expression.kind}); write x != 0, or "
                "compare it with something"
            )
        if isinstance(self.expression, Constant):  # kernels take tensors
            object.__setattr__(self, "expression", _K >= 0 if self.expression.value else _K < 0)
        super().__post_init__()

    def __and__(self, other: Mask | Tensor) -> Mask:
        return _composed(self, "&", _as_mask(other, "&"))

    __rand__ = __and__

    def __or__(self, other: Mask | Tensor) -> Mask:
        return _composed(self, "|", _as_mask(other, "|"))

    __ror__ = __or__

    def __invert__(self) -> Mask:
        return self.logical_not()

    def logical_not(self) -> Mask:
        """`~mask` by a name, for functions under torch.compile, which cannot trace the operator."""
        return Mask(self.expression.logical_not(), f"~{self.name}", self.requires)

    def __bool__(self) -> bool:
        raise TypeError(
            "a mask is neither true nor false, so `and`, `or`, `not` and `if` cannot take one; write & for and, | for "
            "or, ~ for not: causal() & window(128); and `mask is None` to ask whether there is one"
        )

    def check(self, caller: str, batch: int, heads: int, queries: int, keys: int) -> None:
        """Raises ValueError, in the name of `caller`, if the mask was made for other sizes.

        Args:
            caller: the public function, for the message.
            batch: of the call.
            heads: query heads of the call.
            queries: seqlen_q of the call.
            keys: seqlen_k of the call.
        """
        for one in self.requires:
            size = (batch, heads, queries, keys)[_AXES.index(one.axis)]
            if size > one.size or (one.exact and size != one.size):
                raise ValueError(
                    f"{caller}: {one.given} is made for {'' if one.exact else 'at most '}{one.size} {one.axis}, but "
                    f"the call has {size}; it is part of the mask {self.name}"
                )

    def __repr__(self) -> str:
        return f"Mask({self.name})"

    @property
    def depends(self) -> set[str]:
        """Which of b, h, q and k the mask looks at."""
        return ex.variables(self.expression) & {"b", "h", "q", "k"}

    @functools.cached_property
    def relative(self) -> bool:
        """Whether positions matter by their differences alone: a tile may then count both from its own first key."""
        return _relative(self.expression)

    @functools.cached_property
    def bounded(self) -> bool:
        """Whether it keeps every query from seeing keys past the last, so that nobody else needs to."""
        return _bounded(self.expression)

    def visible(
        self, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device | str = "cpu"
    ) -> Tensor:
        """The mask as bool [batch or 1, heads or 1, seqlen_q, seqlen_k] on `device`: the ground truth for kernels."""
        b = torch.arange(batch if "b" in self.depends else 1, device=device).view(-1, 1, 1, 1)
        h = torch.arange(heads if "h" in self.depends else 1, device=device).view(1, -1, 1, 1)
        q = torch.arange(seqlen_q, device=device).view(1, 1, -1, 1)
        k = torch.arange(seqlen_k, device=device).view(1, 1, 1, -1)
        values = {"b": b, "h": h, "q": q, "k": k, "sq": seqlen_q, "sk": seqlen_k}
        found = torch.as_tensor(ex.evaluate(self.expression, values), device=device)
        return found.expand(torch.broadcast_shapes(found.shape, (b.shape[0], h.shape[1], seqlen_q, seqlen_k)))

    def tiles(
        self,
        batch: int,
        heads: int,
        seqlen_q: int,
        seqlen_k: int,
        block_m: int,
        block_n: int,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """EMPTY, PARTIAL or FULL for each tile of block_m queries by block_n keys.

        Returns int8 [batch or 1, heads or 1, seqlen_q / block_m, seqlen_k / block_n], rounded up, on `device`.

        By interval arithmetic, so without looking at pairs: a tile is never called empty or full that is not, but a
        partial one may turn out to be either. A tile that sticks out beyond the last key is partial.
        """
        q = _tile_bounds(seqlen_q, block_m, device, (1, 1, -1, 1))
        k = _tile_bounds(seqlen_k, block_n, device, (1, 1, 1, -1))
        b = torch.arange(batch if "b" in self.depends else 1, device=device).view(-1, 1, 1, 1)
        h = torch.arange(heads if "h" in self.depends else 1, device=device).view(1, -1, 1, 1)
        known = {
            "b": Interval(b, b), "h": Interval(h, h), "q": q, "k": k,
            "sq": Interval(seqlen_q, seqlen_q), "sk": Interval(seqlen_k, seqlen_k),
        }  # fmt: skip
        sizes = {"q": (seqlen_q, block_m), "k": (seqlen_k, block_n)}
        truth: Truth = bounds(self.expression, known, lambda gather: gather_bounds(gather, known, sizes))
        shape = (b.shape[0], h.shape[1], q.low.shape[2], k.low.shape[3])
        some = torch.as_tensor(truth.some, device=device).expand(shape)
        every = torch.as_tensor(truth.every, device=device).expand(shape)
        status = some.to(torch.int8) + (some & every).to(torch.int8)
        if seqlen_k % block_n and status.numel():
            status[..., -1].clamp_(max=PARTIAL)
        return status

    def draw(self, seqlen_q: int = 32, seqlen_k: int | None = None, batch: int = 0, head: int = 0) -> str:
        """The mask of one `batch` entry and `head` as text: seqlen_k columns, seqlen_q / 2 lines of two queries each.

        Example:
            >>> import flashkernel as fk
            >>> fk.causal().draw(4).splitlines()
            ['█▄  ', '███▄']
        """
        seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
        seen = self.visible(batch + 1, head + 1, seqlen_q, seqlen_k)[-1, -1]
        if seqlen_q % 2:
            seen = torch.cat([seen, seen.new_zeros(1, seqlen_k)])
        glyphs = " ▀▄█"  # neither row, the upper, the lower, both
        codes = (seen[0::2].int() + 2 * seen[1::2].int()).tolist()
        return "\n".join("".join(glyphs[code] for code in line) for line in codes)

    def image(self, path: Any, seqlen_q: int = 256, seqlen_k: int | None = None, tile: int = 32) -> None:
        """Writes a picture of the mask, seqlen_q by seqlen_k, to `path`. Tiles of `tile` by `tile` are coloured by
        whether a kernel skips, masks or just computes them."""
        try:
            import matplotlib

            matplotlib.use("Agg")
            from matplotlib import pyplot
        except ImportError as error:
            raise ImportError("Mask.image needs matplotlib; pip install flashkernel[plot]") from error
        seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
        seen = self.visible(1, 1, seqlen_q, seqlen_k)[0, 0].float().numpy()
        status = self.tiles(1, 1, seqlen_q, seqlen_k, tile, tile)[0, 0].float()
        shade = status.repeat_interleave(tile, 0).repeat_interleave(tile, 1)[:seqlen_q, :seqlen_k].numpy()
        figure, axes = pyplot.subplots(figsize=(6, 6))
        axes.imshow(shade, cmap="Blues", vmin=0, vmax=4, interpolation="nearest")
        axes.imshow(seen, cmap="Greys", alpha=0.55 * seen, vmin=0, vmax=1, interpolation="nearest")
        axes.set(title=self.name, xlabel="key", ylabel="query")
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def _as_mask(value: Any, sign: str) -> Mask:
    if isinstance(value, Mask):
        return value
    if isinstance(value, Tensor):
        return tensor_mask(value)
    given = type(value).__name__
    raise TypeError(f"{sign} joins a mask to a mask or a boolean tensor, not to a {given}{_advice(value)}")


def _advice(value: Any) -> str:
    return "; flashkernel.custom(function) makes a mask of a function of (b, h, q, k)" if callable(value) else ""


def _kept(make: Callable[..., Mask]) -> Callable[..., Mask]:
    """Give the same mask for the same plain numbers and masks without tables: people write `mask=causal()` at every
    call. Under torch.compile, and for tensors, it is made anew."""
    known = functools.lru_cache(maxsize=1024, typed=True)(make)

    @functools.wraps(make)
    def made(*args: Any, **named: Any) -> Mask:
        if torch.compiler.is_compiling() or named:
            return make(*args, **named)
        for value in args:
            if type(value) not in _PLAIN and not (type(value) is Mask and not value.tables):
                return make(*args)
        return known(*args)

    return made


_PLAIN = (int, str, type(None))


@_kept
def _composed(left: Mask, sign: str, right: Mask) -> Mask:
    joined = _joined(left.requires, right.requires)
    expression = left.expression & right.expression if sign == "&" else left.expression | right.expression
    return Mask(expression, f"({left.name} {sign} {right.name})", joined)


def _joined(left: tuple[Requirement, ...], right: tuple[Requirement, ...]) -> tuple[Requirement, ...]:
    return left + tuple([one for one in right if one not in left])


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
            f"tensor that broadcasts to (batch, heads, queries, keys){_advice(mask)}"
        )
    for table in mask.tables:
        if table.device != device:
            raise ValueError(f"{caller}: a table of {mask} is on {table.device} but q is on {device}; move one of them")
    mask.check(caller, *sizes)
    return mask


def check_causal_window(caller: str, causal: bool, window: int | None) -> int | None:
    """An operator's argument `window` as a Python integer; TypeError or ValueError where it or `causal` is wrong."""
    if type(causal) is not bool:
        advice = "; a mask goes into mask=" if isinstance(causal, Traced) or callable(causal) else ""
        raise TypeError(f"{caller}: causal is a {type(causal).__name__}; it must be True or False{advice}")
    if window is None:
        return None
    if isinstance(window, (bool, float, str, tuple, list, Tensor, Traced)) or callable(window):
        raise TypeError(
            f"{caller}: window is {window!r}; it must be a whole number, of the keys that a query sees up to its own, "
            "or None for no window; a window of two sides is mask=flashkernel.window(left, right)"
        )
    size = static(operator.index(window))
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


@_kept
def _sliding(size: int | None) -> Mask:
    return causal() if size is None else causal() & _window(size, None)


def recalled(text: str, tables: Sequence[Tensor]) -> Mask:
    """The mask that a text names, over these tensors; without any it is made once."""
    return Mask(ex.recall(text, tables)) if tables else _recalled(text)


@functools.lru_cache(maxsize=1024)
def _recalled(text: str) -> Mask:
    return Mask(ex.recall(text, []))


def _tile_bounds(length: int, size: int, device: torch.device | str, view: tuple[int, ...]) -> Interval:
    low = torch.arange(0, length, size, device=device)
    return Interval(low.view(view), (low + size - 1).clamp(max=max(0, length - 1)).view(view))


def _linear(node: Expression) -> dict[str, float] | None:
    """What each variable is multiplied by in a sum of variables and numbers (under ""); None for anything else."""
    if isinstance(node, Variable):
        return {node.name: 1}
    if isinstance(node, Constant):
        return {"": node.value}
    if not isinstance(node, Operation) or node.name not in ("add", "sub"):
        return None
    left, right = (_linear(arg) for arg in node.args)
    return None if left is None or right is None else _sum(left, right, 1 if node.name == "add" else -1)


def _sum(left: dict[str, float], right: dict[str, float], sign: int) -> dict[str, float]:
    return {name: left.get(name, 0) + sign * right.get(name, 0) for name in left | right}


def _difference(node: Expression) -> dict[str, float] | None:
    """left - right of a comparison, as in `_linear`."""
    if not isinstance(node, Operation) or node.name not in ("lt", "le", "eq"):
        return None
    left, right = (_linear(arg) for arg in node.args)
    return None if left is None or right is None else _sum(left, right, -1)


def _relative(node: Expression) -> bool:
    form = _difference(node) or _linear(node)
    if form is not None:
        return form.get("q", 0) + form.get("k", 0) == 0
    return all(_relative(child) for child in ex.children(node))


def _bounded(node: Expression) -> bool:
    if isinstance(node, Operation) and node.name in ("and", "or"):
        return (any if node.name == "and" else all)(_bounded(arg) for arg in node.args)
    form = _difference(node)
    if form is None or not isinstance(node, Operation) or node.name == "eq":
        return False
    spare = form.pop("", 0) + (1 if node.name == "lt" else 0)  # k <= q + sk - sq - spare, and q < sq
    return spare >= 0 and {name: by for name, by in form.items() if by} == {"k": 1, "q": -1, "sk": -1, "sq": 1}


@_kept
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
    return Mask(_K <= _Q + (_SK - _SQ), "causal")


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


@_kept
def _window(left: int | None, right: int | None) -> Mask:
    position = _Q + (_SK - _SQ)
    parts = []
    left, right = None if left is None else static(left), None if right is None else static(right)
    if left is not None:
        if left < 1:
            raise ValueError(f"window: a query must see at least itself; left is {left}")
        parts.append(position - left < _K)
    if right is not None:
        parts.append(position + right >= _K)
    if not parts:
        raise ValueError("window: give left, right or both; for no limit leave the mask out")
    return Mask(parts[0] if len(parts) == 1 else parts[0] & parts[1], f"window({left}, {right})")


@_kept
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
    count = static(count)
    return Mask(count > _K, f"sink_tokens({count})")


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
        return Mask(ex.lift(lengths) > _K, "prefix")
    if lengths.ndim != 1:
        raise ValueError(f"prefix: lengths has shape {tuple(lengths.shape)}; it must be (batch,), or a number")
    return Mask(Table(lengths)[_B] > _K, "prefix", _needs("prefix: lengths", batch=lengths.shape[0]))


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
    left, of_queries = _along("documents: query_ids", query_ids, _Q)
    right, of_keys = _along("documents: key_ids", key_ids, _K)
    return Mask(left == right, "documents", _joined(of_queries, of_keys))


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
    indices: tuple[Expression, ...] = (_Q // block, _K // block)
    sizes = {"queries": block * layout.shape[-2], "keys": block * layout.shape[-1]} if layout.ndim >= 2 else {}
    if layout.ndim == 3:
        indices = (_H, *indices)
        sizes |= {"heads": layout.shape[0]}
    elif layout.ndim == 4:
        indices = (_B, _H, *indices)
        sizes |= {"batch": layout.shape[0], "heads": layout.shape[1]}
    elif layout.ndim != 2:
        raise ValueError(f"block_sparse: layout has {layout.ndim} dims; it must be 2 (blocks), 3 (heads) or 4 (batch)")
    needs = _needs(f"block_sparse of blocks of {block}: layout", **sizes)
    return Mask(Table(layout.to(torch.int8))[indices] == 1, f"block_sparse({block})", needs)


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
    first, of_first = _along("column_intervals: start", start, _K)
    last, of_last = _along("column_intervals: end", end, _K)
    return Mask((first > _Q) | (last <= _Q), "column_intervals", _joined(of_first, of_last))


def tensor_mask(visible: Tensor) -> Mask:
    """A boolean tensor as a mask, as scaled_dot_product_attention takes it.

    Args:
        visible: bool, True where a pair is visible; it broadcasts to (batch, heads, seqlen_q, seqlen_k). It is not
            copied. Tiles in which nothing is visible are skipped.

    Returns:
        A `Mask`.

    Example:
        >>> import flashkernel as fk
        >>> padding = torch.tensor([True, True, False]).view(1, 1, 1, 3)  # of the keys
        >>> (fk.causal() & fk.tensor_mask(padding)).visible(1, 1, 3, 3)[0, 0].int().tolist()
        [[1, 0, 0], [1, 1, 0], [1, 1, 0]]
    """
    if visible.dtype != torch.bool or not 1 <= visible.ndim <= 4:
        added = visible.is_floating_point()
        raise TypeError(
            f"a mask may be a boolean tensor that broadcasts to (batch, heads, queries, keys), not {visible.dtype} "
            f"{tuple(visible.shape)}; "
            f"{'what is added to the scores goes into bias=' if added else 'write tensor != 0 for whole numbers'}"
        )
    first = 4 - visible.ndim
    kept: list[Expression] = []
    needs: list[Requirement] = []
    table = visible
    for dim, axis, index in zip(range(visible.ndim), _AXES[first:], (_B, _H, _Q, _K)[first:]):
        if visible.shape[dim] != 1:
            needs.append(Requirement(axis, visible.shape[dim], True, "the boolean tensor"))
        if visible.shape[dim] == 1 or visible.stride(dim) == 0:  # one entry serves all
            table = table.select(len(kept), 0)
        else:
            kept.append(index)
    if not kept:
        table, kept = table.unsqueeze(0), [Constant(0)]
    return Mask(Table(table)[tuple(kept)], "tensor", tuple(needs))


def _along(label: str, table: Tensor, position: Variable) -> tuple[Expression, tuple[Requirement, ...]]:
    """An entry of a table (positions,) or (batch, positions), and what that needs of a call."""
    if table.ndim not in (1, 2):
        raise ValueError(f"{label} has shape {tuple(table.shape)}; it must be (positions,) or (batch, positions)")
    sizes = {"queries" if position is _Q else "keys": table.shape[-1]}
    if table.ndim == 2:
        sizes["batch"] = table.shape[0]
    read = Table(table)[position] if table.ndim == 1 else Table(table)[_B, position]
    return read, _needs(label, **sizes)


def _needs(label: str, **sizes: int) -> tuple[Requirement, ...]:
    """Batches and heads must be as many as in a table; a sequence may be shorter."""
    return tuple([Requirement(axis, size, axis in ("batch", "heads"), label) for axis, size in sizes.items()])


def custom(function: Callable[..., Any], name: str = "custom") -> Mask:
    """The mask of any function of (b, h, q, k), written with Python's operators.

    The function is called once, with variables. Kernels run the expression it returns, on 32-bit integers.

    Args:
        function: of the indices of batch, head, query and key; it returns a condition. Tensors are read through
            `Table(tensor)[index]`, and reads outside a table give 0.
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
