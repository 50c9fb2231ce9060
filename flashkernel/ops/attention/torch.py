"""Attention by torch: its own fused operator where that can serve the call, else online softmax over tiles.

The tiled version is the algorithm of the kernels in a form to read. A tile of queries walks over the tiles of keys with
a running maximum and a running sum, so that no more than one tile of scores exists at a time; the backward pass
computes the tiles again from the saved log of the sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashkernel.blocks import expression as ex
from flashkernel.blocks.dropout import keep_pairs
from flashkernel.blocks.mask import EMPTY, FULL, Mask, causal
from flashkernel.core.arguments import without_autocast
from flashkernel.ops.attention import reference

TILE = 128  # queries and keys of a tile
DENSE_LIMIT = 2**22  # pairs up to which a mask, or all scores, may lie in memory


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    sinks: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    *,
    mask: Mask | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    score: Callable[..., Any] | None = None,
    dropout: float = 0.0,
    seed: int | Tensor = 0,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    plain = sinks is None and alibi_slopes is None and score is None and not (softcap or dropout or return_lse)
    if plain and _fused_can(q, k, v, bias, mask):
        return _fused(q, k, v, bias, mask, scale)
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    if torch.compiler.is_compiling():  # a graph cannot hold the walk over tiles, whose steps depend on the mask
        return _in_one_piece(
            q, k, v, bias, sinks, alibi_slopes,
            mask=mask, scale=scale, softcap=softcap, score=score, dropout=dropout, seed=seed, return_lse=return_lse,
        )  # fmt: skip
    expression = None if score is None else ex.trace_score(score)
    problem = Problem(
        q.shape[0], q.shape[2], k.shape[2], q.shape[1], k.shape[1], scale, softcap, expression, mask, dropout, seed
    )
    out, lse = Tiled.apply(q, k, v, bias, sinks, alibi_slopes, problem)
    return (out, lse) if return_lse else out


def _in_one_piece(q: Tensor, k: Tensor, v: Tensor, *extras: Tensor | None, **options: Any) -> Any:
    """The definition itself, in float32."""
    wide = _wide(q.dtype)
    found: Any = reference.attention(q.to(wide), k.to(wide), v.to(wide), *extras, **options)
    return (found[0].to(q.dtype), found[1]) if options["return_lse"] else found.to(q.dtype)


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


def _fused_can(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Mask | None) -> bool:
    """Whether torch's operator takes the call without holding more than a small dense mask."""
    batch, queries, heads, head_dim = q.shape
    keys = k.shape[1]
    if 0 in (*q.shape, *k.shape, *v.shape) or (bias is not None and bias.dtype != q.dtype):
        return False
    unfused = bias is not None or v.shape[-1] != head_dim  # torch may then hold all scores
    if unfused and batch * heads * queries * keys > DENSE_LIMIT:
        return False
    if mask is None or _is_causal(mask, queries, keys):
        return True
    depends = mask.depends
    pairs = (batch if "b" in depends else 1) * (heads if "h" in depends else 1) * queries * keys
    return pairs <= DENSE_LIMIT


def _is_causal(mask: Mask, queries: int, keys: int) -> bool:
    """Whether it is the mask that torch calls causal, which is aligned with the first key."""
    if queries == keys:  # a branch: a symbol of the tracer is no bool
        return same(mask.expression, causal().expression)
    return False


def same(left: ex.Expression, right: ex.Expression) -> bool:
    """Whether two expressions are written alike; those that read tables never are."""
    if isinstance(left, ex.Variable) and isinstance(right, ex.Variable):
        return left.name == right.name
    if isinstance(left, ex.Constant) and isinstance(right, ex.Constant):
        return left.value == right.value
    if isinstance(left, ex.Operation) and isinstance(right, ex.Operation):
        alike = left.name == right.name and len(left.args) == len(right.args)
        return alike and all(same(one, other) for one, other in zip(left.args, right.args))
    return False


def _fused(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Mask | None, scale: float | None) -> Tensor:
    batch, queries, heads, _ = q.shape
    keys = k.shape[1]
    is_causal = mask is not None and bias is None and _is_causal(mask, queries, keys)
    allowed, blind = None, None
    if mask is not None and not is_causal:
        allowed = mask.visible(batch, heads, queries, keys, q.device)
    if bias is not None:
        added = bias.expand(torch.broadcast_shapes(bias.shape, (1, 1, queries, keys)))
        allowed = added if allowed is None else torch.where(allowed, added, -math.inf)
    if allowed is not None:  # torch leaves open what a row that sees nothing gives: let it see all, then clear it
        blind = (~allowed if allowed.dtype == torch.bool else allowed == -math.inf).all(-1, keepdim=True)
        allowed = allowed | blind if allowed.dtype == torch.bool else allowed.masked_fill(blind, 0)
    grouped = {"enable_gqa": True} if heads != k.shape[2] else {}  # a branch: a symbol of the tracer is no bool
    rows, columns, values = (_aligned(x).transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        rows, columns, values,
        attn_mask=allowed, is_causal=is_causal, scale=scale, **grouped,
    ).to(q.dtype)  # fmt: skip
    if blind is not None:
        out = out.masked_fill(blind, 0)
    return out.transpose(1, 2)


def _aligned(x: Tensor) -> Tensor:
    """cuDNN reads 16 bytes at a time, and gives wrong results, not an error, where rows do not begin at such places."""
    if x.device.type != "cuda" or not any(stride * x.element_size() % 16 for stride in x.stride()[:3]):
        return x
    return x.contiguous()


@dataclass(frozen=True)
class Tile:
    """Queries [first, last) against keys [start, stop); `masked` where not all of its pairs are visible."""

    first: int
    last: int
    start: int
    stop: int
    masked: bool


@dataclass(frozen=True, eq=False)
class Problem:
    """The sizes, and what is done to a score; everything but the tensors that have gradients."""

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    scale: float
    softcap: float
    score: ex.Expression | None
    mask: Mask | None
    dropout: float
    seed: int | Tensor

    @property
    def groups(self) -> int:
        """Query heads that share a key and value head."""
        return self.heads // self.kv_heads

    def walk(self, device: torch.device) -> list[list[Tile]]:
        """For each tile of queries the tiles of keys that some batch and head sees."""
        least = most = None
        if self.mask is not None:
            status = self.mask.tiles(self.batch, self.heads, self.queries, self.keys, TILE, TILE, device)
            if status.numel():
                least, most = status.amin((0, 1)).tolist(), status.amax((0, 1)).tolist()
        rows: list[list[Tile]] = []
        for row, first in enumerate(range(0, self.queries, TILE)):
            rows.append([])
            for column, start in enumerate(range(0, self.keys, TILE)):
                if most is not None and most[row][column] == EMPTY:
                    continue
                masked = least is not None and least[row][column] != FULL
                last, stop = min(first + TILE, self.queries), min(start + TILE, self.keys)
                rows[-1].append(Tile(first, last, start, stop, masked))
        return rows

    def indices(self, tile: Tile, device: torch.device) -> dict[str, Any]:
        """b, h, q and k of a tile's pairs, as tensors that broadcast to [B, Hq, BM, BN]."""
        return {
            "b": torch.arange(self.batch, device=device).view(-1, 1, 1, 1),
            "h": torch.arange(self.heads, device=device).view(1, -1, 1, 1),
            "q": torch.arange(tile.first, tile.last, device=device).view(1, 1, -1, 1),
            "k": torch.arange(tile.start, tile.stop, device=device).view(1, 1, 1, -1),
            "sq": self.queries,
            "sk": self.keys,
        }

    def change(self, raw: Tensor, bias: Tensor | None, slopes: Tensor | None, tile: Tile) -> Tensor:
        """Scores [B, Hq, BM, BN] from scale * q . k: softcap, ALiBi, bias, score function."""
        return self.scored(self.before(raw, bias, slopes, tile), tile)

    def before(self, raw: Tensor, bias: Tensor | None, slopes: Tensor | None, tile: Tile) -> Tensor:
        """Scores as the score function is given them."""
        scores = raw
        if self.softcap:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if slopes is not None:
            at = self.indices(tile, raw.device)
            scores = scores - slopes * (at["q"] + (self.keys - self.queries) - at["k"]).abs()
        return scores if bias is None else scores + bias

    def scored(self, scores: Tensor, tile: Tile, slope: bool = False) -> Tensor:
        """What the score function makes of scores, or its derivative there."""
        if self.score is None:
            return scores
        function = ex.derivative(self.score, "score") if slope else self.score
        changed = ex.evaluate(function, {**self.indices(tile, scores.device), "score": scores})
        return torch.as_tensor(changed, dtype=scores.dtype, device=scores.device).expand(scores.shape)

    def hide(self, scores: Tensor, tile: Tile) -> Tensor:
        """-inf where the mask hides a pair; a tile that is visible throughout is left alone."""
        if self.mask is None or not tile.masked:
            return scores
        visible = ex.evaluate(self.mask.expression, self.indices(tile, scores.device))
        return scores.masked_fill(~torch.as_tensor(visible, device=scores.device), -math.inf)

    def kept(self, tile: Tile, device: torch.device) -> Tensor:
        """1 / (1 - p) where dropout keeps a probability, else 0: [B, Hq, BM, BN]."""
        at = self.indices(tile, device)
        pairs = (at["b"], at["h"], at["q"], at["k"])
        kept = keep_pairs(self.seed, *pairs, self.heads, self.queries, self.keys, self.dropout)
        return kept / (1 - self.dropout)

    def by_kv_head(self, x: Tensor) -> Tensor:
        """[B, Hq, BM, ...] -> [B, Hkv, groups * BM, ...]: the query heads of a key and value head side by side."""
        return x.reshape(self.batch, self.kv_heads, self.groups * x.shape[2], x.shape[3])

    def by_head(self, x: Tensor) -> Tensor:
        """[B, Hkv, groups * BM, ...] -> [B, Hq, BM, ...]."""
        return x.reshape(self.batch, self.heads, x.shape[2] // self.groups, x.shape[3])


def _part(x: Tensor, start: int, stop: int) -> Tensor:
    """Positions [start, stop) of a (B, S, H, D) tensor, as [B, H, stop - start, D] in float32 or wider."""
    return x[:, start:stop].transpose(1, 2).to(_wide(x.dtype))


def _bias_part(bias: Tensor, tile: Tile) -> Tensor:
    """The part of a bias (four dims, some of size one) that a tile adds; a view."""
    rows = bias if bias.shape[2] == 1 else bias[:, :, tile.first : tile.last]
    return rows if bias.shape[3] == 1 else rows[..., tile.start : tile.stop]


@dataclass(frozen=True)
class Extras:
    """Bias [B|1, Hq|1, Sq|1, Sk|1], slopes [B|1, Hq, 1, 1] and sinks [1, Hq, 1, 1], where there are any."""

    bias: Tensor | None
    slopes: Tensor | None
    sinks: Tensor | None

    @staticmethod
    def of(bias: Tensor | None, sinks: Tensor | None, slopes: Tensor | None, heads: int, wide: torch.dtype) -> Extras:
        return Extras(
            None if bias is None else bias.view((1,) * (4 - bias.ndim) + bias.shape),
            None if slopes is None else slopes.view(-1, heads, 1, 1).to(wide),
            None if sinks is None else sinks.view(1, heads, 1, 1).to(wide),
        )

    def bias_at(self, tile: Tile, wide: torch.dtype) -> Tensor | None:
        return None if self.bias is None else _bias_part(self.bias, tile).to(wide)


def tiled_forward(q: Tensor, k: Tensor, v: Tensor, extras: Extras, problem: Problem) -> tuple[Tensor, Tensor]:
    """(out [B, Sq, Hq, Dv], lse [B, Hq, Sq]), one tile of scores at a time."""
    wide = _wide(q.dtype)
    # Distances would multiply the error that a rounded output brings into delta.
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=q.dtype if extras.slopes is None else wide)
    lse = torch.full((problem.batch, problem.heads, problem.queries), -math.inf, dtype=wide, device=q.device)
    for first, tiles in zip(range(0, problem.queries, TILE), problem.walk(q.device)):
        last = min(first + TILE, problem.queries)
        rows = problem.by_kv_head(_part(q, first, last))  # [B, Hkv, groups * BM, D]
        shape = (problem.batch, problem.heads, last - first, 1)
        # A sink is a column seen before all others: it sets the maximum and counts exp(0) = 1.
        highest = torch.full(shape, -math.inf, dtype=wide, device=q.device)  # [B, Hq, BM, 1]
        total = torch.zeros(shape, dtype=wide, device=q.device)
        if extras.sinks is not None:
            highest, total = extras.sinks.expand(shape), total + 1
        sums = torch.zeros((*shape[:3], v.shape[3]), dtype=wide, device=q.device)  # [B, Hq, BM, Dv]
        for tile in tiles:
            columns = _part(k, tile.start, tile.stop)  # [B, Hkv, BN, D]
            raw = problem.by_head(rows @ columns.transpose(2, 3)) * problem.scale  # [B, Hq, BM, BN]
            scores = problem.change(raw, extras.bias_at(tile, wide), extras.slopes, tile)
            scores = problem.hide(scores, tile)
            higher = torch.maximum(highest, scores.amax(-1, keepdim=True))
            finite = higher.masked_fill(higher == -math.inf, 0)  # a row that has seen nothing yet
            weights = torch.exp(scores - finite)  # [B, Hq, BM, BN]
            shrink = torch.exp(highest - finite)  # what was summed so far was relative to the old maximum
            total = total * shrink + weights.sum(-1, keepdim=True)
            if problem.dropout:
                weights = weights * problem.kept(tile, q.device)
            values = _part(v, tile.start, tile.stop)  # [B, Hkv, BN, Dv]
            sums = sums * shrink + problem.by_head(problem.by_kv_head(weights) @ values)
            highest = higher
        blind = total == 0
        out[:, first:last] = (sums / total.masked_fill(blind, 1)).transpose(1, 2)
        log = (highest + torch.log(total)).masked_fill(blind, -math.inf)
        lse[:, :, first:last] = log.squeeze(-1)
    return out, lse


def tiled_backward(
    dout: Tensor | None, dlse: Tensor | None, saved: Sequence[Tensor], extras: Extras, problem: Problem
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, bias, sinks and slopes, in float32 or wider; each tile is computed again.

    With P = exp(S - lse), D the dropout's factors, dP = D * (dout vT) and delta = sum of P dP = dout . out:
    dS = P * (dP - delta + dlse), for the derivative of the lse in S is P itself.
    """
    q, k, v, out, lse = saved
    wide = lse.dtype
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    dbias = None if extras.bias is None else torch.zeros(extras.bias.shape, dtype=wide, device=q.device)
    dslopes = None if extras.slopes is None else torch.zeros_like(extras.slopes)
    dout = torch.zeros_like(out) if dout is None else dout
    delta = (dout.to(wide) * out.to(wide)).sum(-1).transpose(1, 2)  # [B, Hq, Sq]
    row_term = delta if dlse is None else delta - dlse
    finite = lse.masked_fill(lse == -math.inf, 0)
    for tile in (tile for tiles in problem.walk(q.device) for tile in tiles):
        queries, keys = slice(tile.first, tile.last), slice(tile.start, tile.stop)
        rows = problem.by_kv_head(_part(q, tile.first, tile.last))  # [B, Hkv, groups * BM, D]
        columns, values = _part(k, tile.start, tile.stop), _part(v, tile.start, tile.stop)  # [B, Hkv, BN, D]
        upstream = problem.by_kv_head(_part(dout, tile.first, tile.last))  # [B, Hkv, groups * BM, Dv]
        raw = problem.by_head(rows @ columns.transpose(2, 3)) * problem.scale  # [B, Hq, BM, BN]
        scores, pull = _differentiable(problem, raw, extras, tile)
        weights = torch.exp(problem.hide(scores, tile) - finite[:, :, queries, None])  # P
        dweights = problem.by_head(upstream @ values.transpose(2, 3))  # [B, Hq, BM, BN]
        dropped = weights
        if problem.dropout:
            kept = problem.kept(tile, q.device)
            dropped, dweights = weights * kept, dweights * kept
        dv[:, keys] += (problem.by_kv_head(dropped).transpose(2, 3) @ upstream).transpose(1, 2)
        dscores = weights * (dweights - row_term[:, :, queries, None])
        draw, dbias_part, dslopes_part = pull(dscores)
        if dbias is not None and dbias_part is not None:
            _bias_part(dbias, tile).add_(dbias_part)
        if dslopes is not None and dslopes_part is not None:
            dslopes += dslopes_part
        draw = problem.by_kv_head(draw * problem.scale)  # [B, Hkv, groups * BM, BN]
        dq[:, queries] += problem.by_head(draw @ columns).transpose(1, 2)
        dk[:, keys] += (draw.transpose(2, 3) @ rows).transpose(1, 2)
    dsinks = None
    if extras.sinks is not None:  # the sink is a column without a value: dP is 0 there
        share = torch.exp(extras.sinks.squeeze(-1) - finite).masked_fill(lse == -math.inf, 0)  # [B, Hq, Sq]
        dsinks = -(share * row_term).sum((0, 2))
    return dq, dk, dv, dbias, dsinks, dslopes


Pull = Callable[[Tensor], "tuple[Tensor, Tensor | None, Tensor | None]"]


def _differentiable(problem: Problem, raw: Tensor, extras: Extras, tile: Tile) -> tuple[Tensor, Pull]:
    """The changed scores of a tile, and what takes their gradient back to (raw, bias part, slopes).

    Softcap, ALiBi and bias are left to autograd, on a graph that holds this tile alone. Pairs without a gradient have
    none before the score function either, whatever its derivative is there: it may be infinite.
    """
    bias = extras.bias_at(tile, raw.dtype)
    if bias is None and extras.slopes is None and problem.score is None and not problem.softcap:
        return raw, lambda gradient: (gradient, None, None)
    raw = raw.detach().requires_grad_()
    bias, slopes = (None if x is None else x.detach().requires_grad_() for x in (bias, extras.slopes))
    with torch.enable_grad():
        before = problem.before(raw, bias, slopes, tile)
    given = before.detach()

    def pull(gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if problem.score is not None:
            gradient = torch.where(gradient == 0, 0.0, gradient * problem.scored(given, tile, slope=True))
        leaves = (raw, bias, slopes)
        present = [leaf for leaf in leaves if leaf is not None]
        found = iter(torch.autograd.grad(before, present, gradient))
        draw, dbias, dslopes = (None if leaf is None else next(found) for leaf in leaves)
        assert draw is not None
        return draw, dbias, dslopes

    return problem.scored(given, tile), pull


class Tiled(torch.autograd.Function):
    """(out, lse) with gradients; nothing of the size of the scores is kept."""

    @staticmethod
    def forward(ctx, q, k, v, bias, sinks, alibi_slopes, problem):  # type: ignore[override]
        extras = Extras.of(bias, sinks, alibi_slopes, problem.heads, _wide(q.dtype))
        out, lse = tiled_forward(q, k, v, extras, problem)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(q, k, v, out, lse, bias, sinks, alibi_slopes)
        ctx.problem = problem
        return out.to(q.dtype), lse

    @staticmethod
    @once_differentiable
    def backward(ctx, dout, dlse):  # type: ignore[override]
        *saved, bias, sinks, alibi_slopes = ctx.saved_tensors
        inputs = (*saved[:3], bias, sinks, alibi_slopes)
        if dout is None and dlse is None:
            return (None,) * 7
        extras = Extras.of(bias, sinks, alibi_slopes, ctx.problem.heads, saved[-1].dtype)
        with without_autocast(saved[0]):  # of a backward() that is called inside it
            found = tiled_backward(dout, dlse, saved, extras, ctx.problem)
        return *(
            None if x is None or dx is None else dx.view(x.shape).to(x.dtype) for x, dx in zip(inputs, found)
        ), None
