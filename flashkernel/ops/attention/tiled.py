"""Attention by torch operators, one tile of scores at a time: the algorithm of the kernels in a form to read.

A tile of queries iterates over the tiles of keys that it sees with a running row max and row sum (online softmax), so
no more than one tile of scores exists at a time; the backward pass computes the tiles again from the saved LSE.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flashkernel.blocks import expression as ex
from flashkernel.blocks.dropout import keep_pairs
from flashkernel.blocks.mask import EMPTY, FULL
from flashkernel.core.arguments import without_autocast
from flashkernel.core.library import differentiable_once
from flashkernel.ops.attention.params import AttentionParams

TILE = 128  # queries and keys of a tile


def wider(dtype: torch.dtype) -> torch.dtype:
    """float32, or what is wider."""
    return torch.promote_types(dtype, torch.float32)


@dataclass(frozen=True)
class Tile:
    """Queries [first, last) against keys [start, stop); `masked` where not all of its pairs are visible."""

    first: int
    last: int
    start: int
    stop: int
    masked: bool


@dataclass(frozen=True, eq=False)
class TiledAttention:
    """One call: its sizes, and what is done to a score."""

    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    params: AttentionParams

    @property
    def group_size(self) -> int:
        """Query heads that share a key/value head."""
        return self.heads // self.kv_heads

    def read_again(self) -> list[Tensor]:
        """The tensors beside the inputs that the backward pass reads: tables of the mask and of the score function, and
        the seed. Inference tensors, whose writes nobody counts, are left out."""
        mask, score, seed = self.params.mask, self.params.score, self.params.seed
        read = [] if mask is None else [*mask.tables]
        read += [] if score is None else ex.tables(score)
        read += [seed] if isinstance(seed, Tensor) else []
        return [x for x in read if not x.is_inference()]

    def visible_tiles(self, device: torch.device) -> list[list[Tile]]:
        """For each tile of queries the tiles of keys that some batch and head sees."""
        least = most = None
        if self.params.mask is not None:
            status = self.params.mask.tiles(self.batch, self.heads, self.seqlen_q, self.seqlen_k, TILE, TILE, device)
            if status.numel():
                least, most = status.amin((0, 1)).tolist(), status.amax((0, 1)).tolist()
        rows: list[list[Tile]] = []
        for row, first in enumerate(range(0, self.seqlen_q, TILE)):
            rows.append([])
            for column, start in enumerate(range(0, self.seqlen_k, TILE)):
                if most is not None and most[row][column] == EMPTY:
                    continue
                masked = least is not None and least[row][column] != FULL
                last, stop = min(first + TILE, self.seqlen_q), min(start + TILE, self.seqlen_k)
                rows[-1].append(Tile(first, last, start, stop, masked))
        return rows

    def indices(self, tile: Tile, device: torch.device) -> dict[str, Any]:
        """b, h, q and k of a tile's pairs, as tensors that broadcast to [B, Hq, BM, BN]."""
        return {
            "b": torch.arange(self.batch, device=device).view(-1, 1, 1, 1),
            "h": torch.arange(self.heads, device=device).view(1, -1, 1, 1),
            "q": torch.arange(tile.first, tile.last, device=device).view(1, 1, -1, 1),
            "k": torch.arange(tile.start, tile.stop, device=device).view(1, 1, 1, -1),
            "sq": self.seqlen_q,
            "sk": self.seqlen_k,
        }

    def transform(self, product: Tensor, bias: Tensor | None, slopes: Tensor | None, tile: Tile) -> Tensor:
        """Scores [B, Hq, BM, BN] from scale * q . k: softcap, ALiBi, bias, score function."""
        return self.score_function(self.before_score(product, bias, slopes, tile), tile)

    def before_score(self, product: Tensor, bias: Tensor | None, slopes: Tensor | None, tile: Tile) -> Tensor:
        """Scores as the score function is given them."""
        scores = product
        if self.params.softcap:
            scores = self.params.softcap * torch.tanh(scores / self.params.softcap)
        if slopes is not None:
            at = self.indices(tile, product.device)
            scores = scores - slopes * (at["q"] + (self.seqlen_k - self.seqlen_q) - at["k"]).abs()
        return scores if bias is None else scores + bias

    def score_function(self, scores: Tensor, tile: Tile, derivative: bool = False) -> Tensor:
        """What the score function makes of scores, or its derivative there."""
        if self.params.score is None:
            return scores
        function = ex.derivative(self.params.score, "score") if derivative else self.params.score
        changed = ex.evaluate(function, {**self.indices(tile, scores.device), "score": scores})
        return torch.as_tensor(changed, dtype=scores.dtype, device=scores.device).expand(scores.shape)

    def apply_mask(self, scores: Tensor, tile: Tile) -> Tensor:
        """-inf where the mask hides a pair; a tile that is visible throughout is left alone."""
        if self.params.mask is None or not tile.masked:
            return scores
        visible = ex.evaluate(self.params.mask.expression, self.indices(tile, scores.device))
        return scores.masked_fill(~torch.as_tensor(visible, device=scores.device), -math.inf)

    def dropout_factors(self, tile: Tile, device: torch.device, dtype: torch.dtype) -> Tensor:
        """1 / (1 - dropout) where a probability is kept, else 0: [B, Hq, BM, BN]."""
        at = self.indices(tile, device)
        probability, sizes = self.params.dropout, (self.heads, self.seqlen_q, self.seqlen_k)
        kept = keep_pairs(self.params.seed, at["b"], at["h"], at["q"], at["k"], *sizes, probability)
        return kept.to(dtype) / (1 - probability)

    def by_kv_head(self, x: Tensor) -> Tensor:
        """[B, Hq, BM, ...] -> [B, Hkv, group_size * BM, ...]: the query heads of a key/value head side by side."""
        return x.reshape(self.batch, self.kv_heads, self.group_size * x.shape[2], x.shape[3])

    def by_head(self, x: Tensor) -> Tensor:
        """[B, Hkv, group_size * BM, ...] -> [B, Hq, BM, ...]."""
        return x.reshape(self.batch, self.heads, x.shape[2] // self.group_size, x.shape[3])


def _part(x: Tensor, start: int, stop: int) -> Tensor:
    """Positions [start, stop) of a (B, S, H, D) tensor, as [B, H, stop - start, D] in float32 or wider."""
    return x[:, start:stop].transpose(1, 2).to(wider(x.dtype))


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


def tiled_forward(
    q: Tensor, k: Tensor, v: Tensor, extras: Extras, call: TiledAttention
) -> tuple[Tensor, Tensor, Tensor]:
    """(out [B, Sq, Hq, Dv], lse [B, Hq, Sq], what lse lost in rounding), one tile of scores at a time."""
    wide = wider(q.dtype)
    # Distances would multiply the error that a rounded output brings into delta.
    out = q.new_zeros((*q.shape[:3], v.shape[3]), dtype=q.dtype if extras.slopes is None else wide)
    lse = torch.full((call.batch, call.heads, call.seqlen_q), -math.inf, dtype=wide, device=q.device)
    lse_low = torch.zeros_like(lse)
    for first, tiles in zip(range(0, call.seqlen_q, TILE), call.visible_tiles(q.device)):
        last = min(first + TILE, call.seqlen_q)
        rows = call.by_kv_head(_part(q, first, last))  # [B, Hkv, group_size * BM, D]
        shape = (call.batch, call.heads, last - first, 1)
        # A sink is a column seen before all others: it sets the row max and counts exp(0) = 1.
        row_max = torch.full(shape, -math.inf, dtype=wide, device=q.device)  # [B, Hq, BM, 1]
        row_sum = torch.zeros(shape, dtype=wide, device=q.device)
        if extras.sinks is not None:
            row_max, row_sum = extras.sinks.expand(shape), row_sum + 1
        acc = torch.zeros((*shape[:3], v.shape[3]), dtype=wide, device=q.device)  # [B, Hq, BM, Dv]
        for tile in tiles:
            columns = _part(k, tile.start, tile.stop)  # [B, Hkv, BN, D]
            product = call.by_head(rows @ columns.transpose(2, 3)) * call.params.scale  # [B, Hq, BM, BN]
            s = call.transform(product, extras.bias_at(tile, wide), extras.slopes, tile)
            s = call.apply_mask(s, tile)
            new_max = torch.maximum(row_max, s.amax(-1, keepdim=True))
            finite = new_max.masked_fill(new_max == -math.inf, 0)  # a row that has seen nothing yet
            p = torch.exp(s - finite)  # [B, Hq, BM, BN]
            rescale = torch.exp(row_max - finite)  # acc and row_sum are relative to the old row max
            row_sum = row_sum * rescale + p.sum(-1, keepdim=True)
            if call.params.dropout:
                p = p * call.dropout_factors(tile, q.device, wide)
            values = _part(v, tile.start, tile.stop)  # [B, Hkv, BN, Dv]
            acc = acc * rescale + call.by_head(call.by_kv_head(p) @ values)
            row_max = new_max
        sees_nothing = row_sum == 0
        out[:, first:last] = (acc / row_sum.masked_fill(sees_nothing, 1)).transpose(1, 2)
        log_sum = torch.log(row_sum)
        rounded = (row_max + log_sum).masked_fill(sees_nothing, -math.inf)
        lse[:, :, first:last] = rounded.squeeze(-1)
        lse_low[:, :, first:last] = (row_max - rounded + log_sum).masked_fill(sees_nothing, 0).squeeze(-1)
    return out, lse, lse_low


def tiled_backward(
    dout: Tensor | None, dlse: Tensor | None, saved: Sequence[Tensor], extras: Extras, call: TiledAttention
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Gradients of q, k, v, bias, sinks and slopes, in float32 or wider; each tile is computed again.

    With P = exp(S - LSE), D the dropout's factors, dP = D * (dO VT) and delta = sum of P dP = dO . O:
    dS = P * (dP - delta + dLSE), for the derivative of LSE in S is P itself.
    """
    q, k, v, out, lse, lse_low = saved
    wide = lse.dtype
    dq, dk, dv = (torch.zeros(x.shape, dtype=wide, device=x.device) for x in (q, k, v))
    dbias = None if extras.bias is None else torch.zeros(extras.bias.shape, dtype=wide, device=q.device)
    slope_sums = None if extras.slopes is None else SlopeSums.zeros(lse)
    dout = torch.zeros_like(out) if dout is None else dout
    delta = (dout.to(wide) * out.to(wide)).sum(-1).transpose(1, 2)  # [B, Hq, Sq]
    if dlse is not None:
        delta = delta - dlse
    finite = lse.masked_fill(lse == -math.inf, 0)
    for tile in (tile for tiles in call.visible_tiles(q.device) for tile in tiles):
        queries, keys = slice(tile.first, tile.last), slice(tile.start, tile.stop)
        rows = call.by_kv_head(_part(q, tile.first, tile.last))  # [B, Hkv, group_size * BM, D]
        columns, values = _part(k, tile.start, tile.stop), _part(v, tile.start, tile.stop)  # [B, Hkv, BN, D]
        do_tile = call.by_kv_head(_part(dout, tile.first, tile.last))  # [B, Hkv, group_size * BM, Dv]
        product = call.by_head(rows @ columns.transpose(2, 3)) * call.params.scale  # [B, Hq, BM, BN]
        s, transform_backward = _differentiable(call, product, extras, tile)
        # Rows of P must add up to 1: distances multiply the error of a rounded LSE in the gradient of the slopes.
        p = torch.exp(call.apply_mask(s, tile) - finite[:, :, queries, None] - lse_low[:, :, queries, None])
        dp = call.by_head(do_tile @ values.transpose(2, 3))  # [B, Hq, BM, BN]
        dropped = p
        if call.params.dropout:
            factors = call.dropout_factors(tile, q.device, wide)
            dropped, dp = p * factors, dp * factors
        dv[:, keys] += (call.by_kv_head(dropped).transpose(2, 3) @ do_tile).transpose(1, 2)
        ds = p * (dp - delta[:, :, queries, None])
        dproduct, dbias_part, dslopes_part = transform_backward(ds)
        if dbias is not None and dbias_part is not None:
            _bias_part(dbias, tile).add_(dbias_part)
        if slope_sums is not None and dslopes_part is not None:
            slope_sums.add(queries, ds, dslopes_part, transform_backward(p)[2])
        dproduct = call.by_kv_head(dproduct * call.params.scale)  # [B, Hkv, group_size * BM, BN]
        dq[:, queries] += call.by_head(dproduct @ columns).transpose(1, 2)
        dk[:, keys] += (dproduct.transpose(2, 3) @ rows).transpose(1, 2)
    dsinks, ds_sink = None, torch.zeros_like(delta)
    if extras.sinks is not None:  # the sink is a column without a value: dP is 0 there
        p_sink = torch.exp(extras.sinks.squeeze(-1) - finite).masked_fill(lse == -math.inf, 0)  # [B, Hq, Sq]
        ds_sink = -p_sink * delta
        dsinks = ds_sink.sum((0, 2))
    dslopes = None
    if extras.slopes is not None and slope_sums is not None:
        dslopes = slope_sums.gradient(dlse, ds_sink).sum_to_size(extras.slopes.shape)
    return dq, dk, dv, dbias, dsinks, dslopes


@dataclass
class SlopeSums:
    """Sums over the keys of each row [B, Hq, Sq], from which the gradient of the slopes comes.

    delta = dO . O is rounded, and long distances would multiply its error. dS of a row, with that of its sink, adds up
    to dLSE: what it adds up to beside that is the error of delta, and is put right.
    """

    ds: Tensor
    slopes: Tensor  # gradients of the slopes, by row
    slopes_of_p: Tensor  # the same with P in the place of dS

    @staticmethod
    def zeros(lse: Tensor) -> SlopeSums:
        return SlopeSums(torch.zeros_like(lse), torch.zeros_like(lse), torch.zeros_like(lse))

    def add(self, queries: slice, ds: Tensor, slopes: Tensor, slopes_of_p: Tensor | None) -> None:
        """Adds a tile: dS [B, Hq, BM, BN] and gradients of the slopes [B, Hq, BM, 1]."""
        assert slopes_of_p is not None
        self.ds[:, :, queries] += ds.sum(-1)
        self.slopes[:, :, queries] += slopes.squeeze(-1)
        self.slopes_of_p[:, :, queries] += slopes_of_p.squeeze(-1)

    def gradient(self, dlse: Tensor | None, ds_sink: Tensor) -> Tensor:
        """The gradient of the slopes, [B, Hq, 1, 1]."""
        delta_error = (0 if dlse is None else dlse) - self.ds - ds_sink
        return (self.slopes + delta_error * self.slopes_of_p).sum(-1, keepdim=True).unsqueeze(-1)


TransformBackward = Callable[[Tensor], "tuple[Tensor, Tensor | None, Tensor | None]"]


def _differentiable(
    call: TiledAttention, product: Tensor, extras: Extras, tile: Tile
) -> tuple[Tensor, TransformBackward]:
    """(scores of a tile, function from their gradient to the gradients of (product, bias part, slopes by row)).

    Softcap, ALiBi and bias are left to autograd, on a graph that holds this tile alone. Pairs without a gradient have
    none before the score function either, whatever its derivative is there: it may be infinite.
    """
    bias, score = extras.bias_at(tile, product.dtype), call.params.score
    if bias is None and extras.slopes is None and score is None and not call.params.softcap:
        return product, lambda gradient: (gradient, None, None)
    product = product.detach().requires_grad_()
    rows = None if extras.slopes is None else extras.slopes.expand(*product.shape[:3], 1)
    bias, slopes = (None if x is None else x.detach().requires_grad_() for x in (bias, rows))
    with torch.enable_grad():
        before = call.before_score(product, bias, slopes, tile)
    given = before.detach()

    def transform_backward(gradient: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
        if score is not None:
            score_grad = call.score_function(given, tile, derivative=True)
            gradient = torch.where(gradient == 0, 0.0, gradient * score_grad)
        leaves = (product, bias, slopes)
        present = [leaf for leaf in leaves if leaf is not None]
        found = iter(torch.autograd.grad(before, present, gradient, retain_graph=True))
        dproduct, dbias, dslopes = (None if leaf is None else next(found) for leaf in leaves)
        assert dproduct is not None
        return dproduct, dbias, dslopes

    return call.score_function(given, tile), transform_backward


class Tiled(torch.autograd.Function):
    """(out, lse) with gradients; nothing of the size of the scores is kept."""

    @staticmethod
    def forward(ctx, q, k, v, bias, sinks, alibi_slopes, call):  # type: ignore[override]
        extras = Extras.of(bias, sinks, alibi_slopes, call.heads, wider(q.dtype))
        out, lse, lse_low = tiled_forward(q, k, v, extras, call)
        ctx.set_materialize_grads(False)
        # What is read again beside them is saved so that autograd notices when it is written to in the meantime.
        ctx.save_for_backward(q, k, v, out, lse, lse_low, bias, sinks, alibi_slopes, *call.read_again())
        ctx.call = call
        return out.to(q.dtype), lse

    @staticmethod
    @differentiable_once("attention")
    def backward(ctx, dout, dlse):  # type: ignore[override]
        kept = ctx.saved_tensors
        saved, (bias, sinks, alibi_slopes) = kept[:6], kept[6:9]
        inputs = (*saved[:3], bias, sinks, alibi_slopes)
        if dout is None and dlse is None:
            return (None,) * 7
        extras = Extras.of(bias, sinks, alibi_slopes, ctx.call.heads, saved[-1].dtype)
        with without_autocast(saved[0]):  # of a backward() that is called inside it
            found = tiled_backward(dout, dlse, saved, extras, ctx.call)
        return *(
            None if x is None or dx is None else dx.view(x.shape).to(x.dtype) for x, dx in zip(inputs, found)
        ), None
