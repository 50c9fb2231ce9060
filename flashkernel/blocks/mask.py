"""Attention masks: which key positions a query position sees.

A mask answers two questions from one expression: is this pair visible, and is this tile of pairs empty, partial or
full. Masks compose with &, | and ~. Kernels walk over runs of neighbouring tiles, never load an empty one and never
mask a full one.

    causal() & window(128)                     what gpt-oss's sliding layers see
    (window(1024) | sink_tokens(4)) & causal() StreamingLLM
    causal() & documents(ids)                  sequences packed into one
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.blocks.expression import Constant, Expression, Gather, Operation, Table, Traced, Variable
from flashkernel.blocks.intervals import Interval, Truth, bounds
from flashkernel.core.arguments import static

EMPTY, PARTIAL, FULL = 0, 1, 2
_B, _H, _Q, _K, _SQ, _SK = (Variable(name) for name in ("b", "h", "q", "k", "sq", "sk"))


@dataclass(frozen=True, eq=False)
class Mask(Traced):
    """A truth value of (b, h, q, k): True where query q of head h in batch b sees key k."""

    name: str = "mask"

    def __and__(self, other: Mask) -> Mask:
        return Mask(self.expression & other.expression, f"({self.name} & {other.name})")

    def __or__(self, other: Mask) -> Mask:
        return Mask(self.expression | other.expression, f"({self.name} | {other.name})")

    def __invert__(self) -> Mask:
        return self.logical_not()

    def logical_not(self) -> Mask:
        """`~mask` by a name, for functions under torch.compile, which cannot trace the operator."""
        return Mask(self.expression.logical_not(), f"~{self.name}")

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

    def visible(self, batch: int, heads: int, queries: int, keys: int, device: torch.device | str = "cpu") -> Tensor:
        """The mask itself, [batch or 1, heads or 1, queries, keys]: the ground truth for every kernel."""
        b = torch.arange(batch if "b" in self.depends else 1, device=device).view(-1, 1, 1, 1)
        h = torch.arange(heads if "h" in self.depends else 1, device=device).view(1, -1, 1, 1)
        q = torch.arange(queries, device=device).view(1, 1, -1, 1)
        k = torch.arange(keys, device=device).view(1, 1, 1, -1)
        values = {"b": b, "h": h, "q": q, "k": k, "sq": queries, "sk": keys}
        found = torch.as_tensor(ex.evaluate(self.expression, values), device=device)
        return found.expand(torch.broadcast_shapes(found.shape, (b.shape[0], h.shape[1], queries, keys)))

    def tiles(
        self,
        batch: int,
        heads: int,
        queries: int,
        keys: int,
        rows: int,
        columns: int,
        device: torch.device | str = "cpu",
    ) -> Tensor:
        """EMPTY, PARTIAL or FULL for each tile of `rows` x `columns`: int8 [batch or 1, heads or 1, q tiles, k tiles].

        By interval arithmetic, so without looking at pairs: a tile is never called empty or full that is not, but a
        partial one may turn out to be either. A tile that sticks out beyond the last key is partial.
        """
        q = _tile_bounds(queries, rows, device, (1, 1, -1, 1))
        k = _tile_bounds(keys, columns, device, (1, 1, 1, -1))
        b = torch.arange(batch if "b" in self.depends else 1, device=device).view(-1, 1, 1, 1)
        h = torch.arange(heads if "h" in self.depends else 1, device=device).view(1, -1, 1, 1)
        known = {
            "b": Interval(b, b), "h": Interval(h, h), "q": q, "k": k,
            "sq": Interval(queries, queries), "sk": Interval(keys, keys),
        }  # fmt: skip
        sizes = {"q": (queries, rows), "k": (keys, columns)}
        truth: Truth = bounds(self.expression, known, lambda gather: _gather_bounds(gather, known, sizes))
        shape = (b.shape[0], h.shape[1], q.low.shape[2], k.low.shape[3])
        some = torch.as_tensor(truth.some, device=device).expand(shape)
        every = torch.as_tensor(truth.every, device=device).expand(shape)
        status = some.to(torch.int8) + (some & every).to(torch.int8)
        if keys % columns and status.numel():
            status[..., -1].clamp_(max=PARTIAL)
        return status

    def draw(self, queries: int = 32, keys: int | None = None, batch: int = 0, head: int = 0) -> str:
        """The mask as text, a character for each pair; two rows a line, so that it looks square."""
        keys = queries if keys is None else keys
        seen = self.visible(batch + 1, head + 1, queries, keys)[-1, -1]
        if queries % 2:
            seen = torch.cat([seen, seen.new_zeros(1, keys)])
        glyphs = " ▀▄█"  # neither row, the upper, the lower, both
        codes = (seen[0::2].int() + 2 * seen[1::2].int()).tolist()
        return "\n".join("".join(glyphs[code] for code in line) for line in codes)

    def image(self, path: Any, queries: int = 256, keys: int | None = None, tile: int = 32) -> None:
        """Write a picture of the mask, its tiles coloured by whether a kernel skips, masks or just computes them."""
        try:
            import matplotlib

            matplotlib.use("Agg")
            from matplotlib import pyplot
        except ImportError as error:
            raise ImportError("Mask.image needs matplotlib; pip install flashkernel[plot]") from error
        keys = queries if keys is None else keys
        seen = self.visible(1, 1, queries, keys)[0, 0].float().numpy()
        status = self.tiles(1, 1, queries, keys, tile, tile)[0, 0].float()
        shade = status.repeat_interleave(tile, 0).repeat_interleave(tile, 1)[:queries, :keys].numpy()
        figure, axes = pyplot.subplots(figsize=(6, 6))
        axes.imshow(shade, cmap="Blues", vmin=0, vmax=4, interpolation="nearest")
        axes.imshow(seen, cmap="Greys", alpha=0.55 * seen, vmin=0, vmax=1, interpolation="nearest")
        axes.set(title=self.name, xlabel="key", ylabel="query")
        figure.savefig(path, dpi=120)
        pyplot.close(figure)


def recalled(text: str, tables: Sequence[Tensor]) -> Mask:
    """The mask that a text names, over these tensors; without any it is made once."""
    return Mask(ex.recall(text, tables)) if tables else _recalled(text)


@functools.lru_cache(maxsize=1024)
def _recalled(text: str) -> Mask:
    return Mask(ex.recall(text, []))


def _tile_bounds(length: int, size: int, device: torch.device | str, view: tuple[int, ...]) -> Interval:
    low = torch.arange(0, length, size, device=device)
    return Interval(low.view(view), (low + size - 1).clamp(max=max(0, length - 1)).view(view))


def _gather_bounds(gather: Gather, known: dict[str, Interval], sizes: dict[str, tuple[int, int]]) -> Interval:
    """Least and most of a table over a tile.

    Exact where one index is q or k itself and the others are b, h or numbers, and where a tile's indices span at most
    two entries of each dim, as q // block does where the tile is at most twice the block.
    """
    table = gather.table if gather.table.dtype != torch.bool else gather.table.to(torch.int8)
    along = [place for place, index in enumerate(gather.indices) if ex.variables(index) & {"q", "k"}]
    if table.numel() == 0:
        return Interval(0, 0)
    if len(along) > 1 or (along and not isinstance(gather.indices[along[0]], Variable)):
        return _corner_bounds(gather, table, known, sizes)
    fixed = {name: interval.low for name, interval in known.items() if name not in ("q", "k")}
    if not along:
        value = ex.evaluate(gather, fixed)
        return Interval(value, value)
    name = gather.indices[along[0]].name  # type: ignore[attr-defined]
    length, size = sizes[name]
    low, high = _by_tile(table.movedim(along[0], -1), length, size)  # [..., tiles]
    others = [index for place, index in enumerate(gather.indices) if place not in along]
    tile = torch.arange(low.shape[-1], device=table.device).view((1, 1, -1, 1) if name == "q" else (1, 1, 1, -1))
    places = [torch.as_tensor(ex.evaluate(index, fixed), device=table.device) for index in others]
    chosen = tuple(torch.broadcast_tensors(*places, tile))
    return Interval(low[chosen], high[chosen])


def _corner_bounds(
    gather: Gather, table: Tensor, known: dict[str, Interval], sizes: dict[str, tuple[int, int]]
) -> Interval:
    """The values at the corners where a tile's indices span at most two entries of each dim, else the whole table's."""
    spans = [bounds(index, known, lambda inner: _gather_bounds(inner, known, sizes)) for index in gather.indices]
    ends = [(torch.as_tensor(span.low), torch.as_tensor(span.high)) for span in spans]
    near = torch.ones((), dtype=torch.bool)
    for low, high in ends:
        near = near.to(low.device) & (high - low <= 1)
    corners = [
        ex.evaluate(Gather(table, tuple(Variable(str(place)) for place in range(len(ends)))),
                    {str(place): ends[place][bit] for place, bit in enumerate(bits)})
        for bits in itertools.product((0, 1), repeat=len(ends))
    ]  # fmt: skip
    least, most = functools.reduce(torch.minimum, corners), functools.reduce(torch.maximum, corners)
    low, high = table.min().clamp(max=0), table.max().clamp(min=0)  # outside the table it is 0
    return Interval(torch.where(near, least, low), torch.where(near, most, high))


def _by_tile(table: Tensor, length: int, size: int) -> tuple[Tensor, Tensor]:
    """(least, most) of each run of `size` entries along the last dim; entries that are missing count as 0."""
    short = max(0, length - table.shape[-1])
    table = torch.nn.functional.pad(table[..., :length], (0, short)) if short else table[..., :length]
    rest = -length % size
    padded = torch.cat([table, table[..., -1:].expand(*table.shape[:-1], rest)], -1) if rest else table
    tiles = padded.unflatten(-1, (-1, size))
    return tiles.amin(-1), tiles.amax(-1)


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


def causal() -> Mask:
    """A query sees the keys up to its own position; the last query is aligned with the last key."""
    return Mask(_K <= _Q + (_SK - _SQ), "causal")


def window(left: int | None, right: int | None = None) -> Mask:
    """`window(w)`: a query sees w keys up to its own, and all later ones; with `right`, at most so many later ones.

    The first is what Transformers calls sliding_window, to be combined with causal().
    """
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


def sink_tokens(count: int) -> Mask:
    """Every query sees the first `count` keys (StreamingLLM); combine with | and then with causal()."""
    count = static(count)
    return Mask(count > _K, f"sink_tokens({count})")


def prefix(lengths: int | Tensor) -> Mask:
    """Every query sees the first `lengths` keys, one number or one a batch; prefix-LM is prefix(n) | causal()."""
    bound = Table(lengths)[_B] if isinstance(lengths, Tensor) else ex.lift(lengths)
    return Mask(bound > _K, "prefix")


def documents(query_ids: Tensor, key_ids: Tensor | None = None) -> Mask:
    """Queries and keys see each other within a document; ids are (seq,) or (batch, seq), documents contiguous."""
    key_ids = query_ids if key_ids is None else key_ids
    left = Table(query_ids)[_Q] if query_ids.ndim == 1 else Table(query_ids)[_B, _Q]
    right = Table(key_ids)[_K] if key_ids.ndim == 1 else Table(key_ids)[_B, _K]
    return Mask(left == right, "documents")


def block_sparse(layout: Tensor, block: int) -> Mask:
    """Pairs whose block is set in layout: bool (q blocks, k blocks), with heads before, or batch and heads."""
    block = static(block)
    indices: tuple[Expression, ...] = (_Q // block, _K // block)
    if layout.ndim == 3:
        indices = (_H, *indices)
    elif layout.ndim == 4:
        indices = (_B, _H, *indices)
    elif layout.ndim != 2:
        raise ValueError(f"block_sparse: layout has {layout.ndim} dims; it must be 2 (blocks), 3 (heads) or 4 (batch)")
    return Mask(Table(layout.to(torch.int8))[indices] == 1, f"block_sparse({block})")


def column_intervals(start: Tensor, end: Tensor) -> Mask:
    """FlashMask: key k is hidden from the queries in [start[k], end[k]); tables are (keys,) or (batch, keys)."""
    first = Table(start)[_K] if start.ndim == 1 else Table(start)[_B, _K]
    last = Table(end)[_K] if end.ndim == 1 else Table(end)[_B, _K]
    return Mask((first > _Q) | (last <= _Q), "column_intervals")


def custom(function: Callable[..., Any], name: str = "custom") -> Mask:
    """Any function of (b, h, q, k) written with operators; tensors are read through Table(tensor)[index]."""
    return Mask(ex.trace(function, "b", "h", "q", "k"), name)
