"""The type of attention masks: a condition on pairs of positions, and what kernels ask of it.

A mask answers two questions from one expression: is this pair visible, and is this tile of pairs empty, partial or
full. Masks compose with &, | and ~. The functions that make them are in mask.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.blocks.expression import Constant, Expression, Operation, Table, Traced, Variable
from flashkernel.blocks.gather_bounds import gather_bounds
from flashkernel.blocks.intervals import Interval, Truth, bounds
from flashkernel.blocks.linear import difference, linear
from flashkernel.blocks.packed_form import PackedForm, packed_form
from flashkernel.core.figure import new_figure

EMPTY, PARTIAL, FULL = 0, 1, 2
_AXES = ("batch", "heads", "queries", "keys")
B, H, Q, K, SQ, SK = (Variable(name) for name in ("b", "h", "q", "k", "sq", "sk"))
_PLAIN = (int, str, type(None))


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
            object.__setattr__(self, "expression", K >= 0 if self.expression.value else K < 0)
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
        """Whether it keeps every query from seeing keys past the last, so that kernels need not."""
        return _bounded(self.expression)

    @functools.cached_property
    def packed_form(self) -> PackedForm | None:
        """The mask as an interval around each query within its document; None if it has another form."""
        return packed_form(self.expression)

    @functools.cached_property
    def cache_parts(self) -> tuple[Any, ...] | None:
        """What distinguishes calls under a mask with tables (core/replay.py). None under documents: which kernels serve
        the call depends on what their ids are."""
        form = self.packed_form
        if not self.tables or (form is not None and form.ids is not None):
            return None
        needs = tuple([(one.axis, one.size, one.exact) for one in self.requires])
        return self.text, needs, *self.tables

    def visible(
        self, batch: int, heads: int, seqlen_q: int, seqlen_k: int, device: torch.device | str = "cpu"
    ) -> Tensor:
        """The mask as bool [batch or 1, heads or 1, seqlen_q, seqlen_k] on `device`: the ground truth for kernels.

        Args:
            batch: Entries of the batch.
            heads: Query heads.
            seqlen_q: Queries.
            seqlen_k: Keys.
            device: The device of the result.
        """
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

        Args:
            batch: Entries of the batch.
            heads: Query heads.
            seqlen_q: Queries.
            seqlen_k: Keys.
            block_m: Queries of a tile.
            block_n: Keys of a tile.
            device: The device of the result.
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

        Args:
            seqlen_q: Queries.
            seqlen_k: Keys; None: as many as queries.
            batch: Which entry of the batch.
            head: Which query head.

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
        """Writes a picture of the mask, seqlen_q by seqlen_k, to `path`. Tiles of `tile` by `tile` are colored by
        whether a kernel skips, masks or just computes them.

        Args:
            path: The picture's file; matplotlib takes the format from its name.
            seqlen_q: Queries.
            seqlen_k: Keys; None: as many as queries.
            tile: Queries, and keys, of a tile.
        """
        figure = new_figure("Mask.image", figsize=(6, 6))
        seqlen_k = seqlen_q if seqlen_k is None else seqlen_k
        seen = self.visible(1, 1, seqlen_q, seqlen_k)[0, 0].float().numpy()
        status = self.tiles(1, 1, seqlen_q, seqlen_k, tile, tile)[0, 0].float()
        shade = status.repeat_interleave(tile, 0).repeat_interleave(tile, 1)[:seqlen_q, :seqlen_k].numpy()
        axes = figure.subplots()
        axes.imshow(shade, cmap="Blues", vmin=0, vmax=4, interpolation="nearest")
        axes.imshow(seen, cmap="Greys", alpha=0.55 * seen, vmin=0, vmax=1, interpolation="nearest")
        axes.set(title=self.name, xlabel="key", ylabel="query")
        figure.savefig(path, dpi=120)


def _as_mask(value: Any, sign: str) -> Mask:
    if isinstance(value, Mask):
        return value
    if isinstance(value, Tensor):
        return tensor_mask(value)
    given = type(value).__name__
    raise TypeError(f"{sign} joins a mask to a mask or a boolean tensor, not to a {given}{custom_advice(value)}")


def custom_advice(value: Any) -> str:
    """The end of a message about a value that is no mask: what to do with a function."""
    return "; flashkernel.custom(function) makes a mask of a function of (b, h, q, k)" if callable(value) else ""


def kept(make: Callable[..., Mask]) -> Callable[..., Mask]:
    """Give the same mask for the same plain numbers and masks without tables: people write `mask=causal()` at every
    call. Under torch.compile, and for tensors, it is built again."""
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


@kept
def _composed(left: Mask, sign: str, right: Mask) -> Mask:
    joined = join_requirements(left.requires, right.requires)
    expression = left.expression & right.expression if sign == "&" else left.expression | right.expression
    return Mask(expression, f"({left.name} {sign} {right.name})", joined)


def join_requirements(left: tuple[Requirement, ...], right: tuple[Requirement, ...]) -> tuple[Requirement, ...]:
    """All that two masks need of a call, each once."""
    return left + tuple([one for one in right if one not in left])


class Source(NamedTuple):
    """A mask or a score function as an operator takes it: its text, "" for none, and the tensors it reads."""

    text: str
    tables: list[Tensor]

    @property
    def mask(self) -> Mask | None:
        """The mask that the text names."""
        return recalled(self.text, self.tables) if self.text else None


_NOTHING = Source("", [])


def source_of(given: Mask | ex.Traced | None) -> Source:
    """The source of a mask or of a score function; empty for None."""
    return _NOTHING if given is None else Source(given.text, list(given.tables))


def recalled(text: str, tables: Sequence[Tensor]) -> Mask:
    """The mask that a text names, over these tensors; without any it is made once."""
    return Mask(ex.recall(text, tables)) if tables else _recalled(text)


@functools.lru_cache(maxsize=1024)
def _recalled(text: str) -> Mask:
    return Mask(ex.recall(text, []))


def _tile_bounds(length: int, size: int, device: torch.device | str, view: tuple[int, ...]) -> Interval:
    low = torch.arange(0, length, size, device=device)
    return Interval(low.view(view), (low + size - 1).clamp(max=max(0, length - 1)).view(view))


def _relative(node: Expression) -> bool:
    form = difference(node) or linear(node)
    if form is not None:
        return form.get("q", 0) + form.get("k", 0) == 0
    return all(_relative(child) for child in ex.children(node))


def _bounded(node: Expression) -> bool:
    if isinstance(node, Operation) and node.name in ("and", "or"):
        return (any if node.name == "and" else all)(_bounded(arg) for arg in node.args)
    form = difference(node)
    if form is None or not isinstance(node, Operation) or node.name == "eq":
        return False
    spare = form.pop("", 0) + (1 if node.name == "lt" else 0)  # k <= q + sk - sq - spare, and q < sq
    return spare >= 0 and {name: by for name, by in form.items() if by} == {"k": 1, "q": -1, "sk": -1, "sq": 1}


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
    for dim, axis, index in zip(range(visible.ndim), _AXES[first:], (B, H, Q, K)[first:]):
        if visible.shape[dim] != 1:
            needs.append(Requirement(axis, visible.shape[dim], True, "the boolean tensor"))
        if visible.shape[dim] == 1 or visible.stride(dim) == 0:  # one entry serves all
            table = table.select(len(kept), 0)
        else:
            kept.append(index)
    if not kept:
        table, kept = table.unsqueeze(0), [Constant(0)]
    return Mask(Table(table)[tuple(kept)], "tensor", tuple(needs))


def requirements(label: str, **sizes: int) -> tuple[Requirement, ...]:
    """Batches and heads must be as many as in a table; a sequence may be shorter."""
    return tuple([Requirement(axis, size, axis in ("batch", "heads"), label) for axis, size in sizes.items()])
