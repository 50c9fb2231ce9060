"""The operators that a layer is made of, as one forward pass calls them.

`Pass` calls the public operators, which decide at every call. `HostPass` is for a CPU, where checking and dispatching a
call takes as long as the arithmetic of a decoding step: it asks once a step whether dispatch would take torch for all
of them, and then calls torch itself, with as few operators as it takes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashkernel as fk
from flashkernel.engine.experts import mixture
from flashkernel.kvcache import LayerPages

if TYPE_CHECKING:
    from flashkernel.engine.config import ModelConfig
    from flashkernel.engine.transformer import Layer, Tokens, Transformer

# Their results are one tensor or several, as the arguments say: more than a type checker can follow.
_linear: Any = fk.linear
_rms_norm: Any = fk.rms_norm
_layer_norm: Any = fk.layer_norm
_decode_attention: Any = fk.decode_attention
_paged_attention: Any = fk.paged_attention
_GATES: dict[str, Callable[..., Tensor]] = {"swiglu": fk.swiglu}
FUSED_ROWS = 64  # up to so many rows one launch of `linear` takes norm and gate along


class Pass:
    """What all layers of a pass share: its tokens, their angles, and which of them decode."""

    def __init__(self, config: ModelConfig, tokens: Tokens) -> None:
        self.config, self.tokens = config, tokens
        step, count = tokens.step, tokens.decoding
        self.decoding = count == tokens.ids.shape[0]
        self.mixed = count > 0 and not self.decoding
        self.few = (step.lengths[:count], step.page_table[:count])
        if not self.decoding:
            self.many = (step.cu_seqlens[count:] - count, step.lengths[count:], step.page_table[count:])
        self.angles = self._angles()

    def _angles(self) -> dict[str, Any]:
        """What `append_kv` rotates by. Its kernels compute angles; on a CPU all layers share what is computed once."""
        frequencies, positions = self.config.frequencies, self.tokens.step.positions
        if frequencies is None:
            return {}
        if positions.device.type != "cpu":
            return {"frequencies": frequencies, "positions": positions}
        angles = positions.double()[:, None] * frequencies.inverse().double()
        cos, sin = (angles.cos() * frequencies.scaling).float(), (angles.sin() * frequencies.scaling).float()
        return {"cos": cos[None], "sin": sin[None], "rotary_dim": frequencies.rotary_dim}

    def remember(self, heads: Tensor, layer: Layer, stored: LayerPages) -> Tensor:
        """Keys and values of heads [tokens, q + k + v, head_dim] into pages; the queries, rotated, come back."""
        config = self.config
        q, k, v = heads.split_with_sizes((config.heads, config.kv_heads, config.kv_heads), 1)
        if layer.q_norm is not None:
            q = _rms_norm(q, layer.q_norm, eps=config.eps)
        if layer.k_norm is not None:
            k = _rms_norm(k, layer.k_norm, eps=config.eps)
        turned = fk.append_kv(
            k, v, stored.k_pages, stored.v_pages, self.tokens.step.slots, k_scale=stored.k_scale,
            v_scale=stored.v_scale, q=q if self.angles else None, **self.angles,
        )  # fmt: skip
        return q if turned is None else turned

    def attend(self, q: Tensor, stored: LayerPages, window: int | None, sinks: Tensor | None) -> Tensor:
        """[tokens, heads * head_dim]: decoding sequences by the kernel for few queries, chunks by that for many."""
        k, v, k_scale, v_scale = stored
        how: dict[str, Any] = {"window": window, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale}
        if self.decoding:
            return _decode_attention(q[:, None], k, v, *self.few, **how).view(q.shape[0], -1)
        if not self.mixed:
            return _paged_attention(q, k, v, *self.many, **how).view(q.shape[0], -1)
        count = self.tokens.decoding
        few = _decode_attention(q[:count, None], k, v, *self.few, **how)
        many = _paged_attention(q[count:], k, v, *self.many, **how)
        return torch.cat((few.flatten(1), many.flatten(1)))

    def mlp(self, x: Tensor, layer: Layer) -> Tensor:
        """x + mlp(norm(x))"""
        config = self.config
        if layer.router is not None:
            h = _rms_norm(x, layer.mlp_norm, eps=config.eps)
            return x + mixture(h, layer, config)
        gate = _GATES.get(config.activation)
        if gate is not None and x.shape[0] > FUSED_ROWS:
            both = self.normed_linear(x, layer.mlp_norm, layer.mlp_norm_bias, layer.up, layer.up_bias)
            h = gate(both, packed=config.packed)
        else:
            h = self.normed_linear(
                x, layer.mlp_norm, layer.mlp_norm_bias, layer.up, layer.up_bias,
                activation=config.activation, packed=config.packed,
            )  # fmt: skip
        return self.linear(h, layer.down, layer.down_bias, x)

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        """residual + linear(x), in the residual's memory where that spares a pass over it."""
        if bias is None and x.shape[0] > FUSED_ROWS and x.is_cuda:
            return residual.addmm_(x, weight.T)
        return _linear(x, weight, bias, residual)

    def normed_linear(
        self, x: Tensor, norm: Tensor, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None, **how: Any
    ) -> Tensor:
        """linear(norm(x)), in one launch where the norm is RMSNorm and rows are few."""
        eps = self.config.eps
        if self.config.norm == "layer":
            return _linear(_layer_norm(x, norm, norm_bias, eps=eps), weight, bias, **how)
        if x.shape[0] > FUSED_ROWS:
            return _linear(_rms_norm(x, norm, eps=eps), weight, bias, **how)
        return _linear(x, weight, bias, norm_weight=norm, norm_eps=eps, **how)


def _swiglu(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return F.silu(gate).mul_(up)


# (activation, packed) -> the same in torch; others go through the public operator
_FINISH: dict[tuple[str | None, str], Callable[[Tensor], Tensor]] = {
    (None, "halves"): lambda y: y,
    ("swiglu", "halves"): _swiglu,
    ("gelu_tanh", "halves"): lambda y: F.gelu(y, approximate="tanh"),
    ("gelu", "halves"): F.gelu,
    ("relu", "halves"): F.relu,
}


class HostPass(Pass):
    """A pass in torch's own operators. What is rare (quantised pages, sinks, partial rotation, norms of q and k)
    goes the long way."""

    def __init__(self, config: ModelConfig, tokens: Tokens) -> None:
        super().__init__(config, tokens)
        self.all_kept = bool(tokens.step.slots.min() >= 0)  # no padding
        self.whole_heads = not self.angles or self.angles["rotary_dim"] == config.head_dim
        if self.angles:
            cos, sin = self.angles["cos"][0], self.angles["sin"][0]  # [tokens, head_dim / 2]
            self.cos = cos[:, None, None]  # [tokens, 1, 1, head_dim / 2], for both halves
            self.sin = torch.stack((-sin, sin), 1)[:, None]  # [tokens, 1, 2, head_dim / 2]
        self.eps = torch.full((1, 1), config.eps)
        self.places: dict[int | None, list[tuple[int, int] | Tensor]] = {}

    def remember(self, heads: Tensor, layer: Layer, stored: LayerPages) -> Tensor:
        plain = layer.q_norm is None and layer.k_norm is None and stored.k_scale is None
        if not (plain and self.whole_heads and self.all_kept and stored.k_pages.dtype == heads.dtype):
            return super().remember(heads, layer, stored)
        config, slots = self.config, self.tokens.step.slots
        count = config.heads + config.kv_heads
        turned, v = heads.narrow(1, 0, count), heads.narrow(1, count, config.kv_heads)
        if self.angles:
            halves = turned.unflatten(2, (2, -1)).float()  # x cos + (its halves swapped) (-sin, sin)
            turned = torch.addcmul(halves * self.cos, halves.flip(2), self.sin).flatten(2).to(heads.dtype)
        k = turned.narrow(1, config.heads, config.kv_heads)
        stored.k_pages.flatten(0, 1).index_copy_(0, slots, k)
        stored.v_pages.flatten(0, 1).index_copy_(0, slots, v)
        return turned.narrow(1, 0, config.heads)

    def attend(self, q: Tensor, stored: LayerPages, window: int | None, sinks: Tensor | None) -> Tensor:
        k, v, k_scale, _ = stored
        plain = sinks is None and k_scale is None and k.is_contiguous()
        if not (plain and self.decoding and self.all_kept):
            return super().attend(q, stored, window, sinks)
        if window not in self.places:
            self.places[window] = self._places(window, k.shape[1])
        rows = q.reshape(q.shape[0], 1, self.config.kv_heads, -1, q.shape[2])  # [batch, 1, Hkv, G, D]
        found = [
            F.scaled_dot_product_attention(rows[b], _keys(k, place), _keys(v, place)).reshape(1, -1)
            for b, place in enumerate(self.places[window])
        ]
        return found[0] if len(found) == 1 else torch.cat(found)

    def _places(self, window: int | None, size: int) -> list[tuple[int, int] | Tensor]:
        """Where each sequence's visible keys are: (first slot, count) where pages are neighbours, else all slots."""
        places: list[tuple[int, int] | Tensor] = []
        for length, row in zip(*(x.tolist() for x in self.few)):
            start = 0 if window is None else max(0, length - window)
            pages = row[start // size : -(-length // size)]
            if pages == list(range(pages[0], pages[0] + len(pages))):
                places.append((pages[0] * size + start % size, length - start))
            else:
                slots = (torch.tensor(pages)[:, None] * size + torch.arange(size)).flatten()
                places.append(slots[start % size :][: length - start])
        return places

    def linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
        if bias is None and x.dtype == torch.float32:
            return torch.addmm(residual, x, weight.T)
        return F.linear(x, weight, bias).add_(residual)

    def normed_linear(
        self, x: Tensor, norm: Tensor, norm_bias: Tensor | None, weight: Tensor, bias: Tensor | None, **how: Any
    ) -> Tensor:
        finish = _FINISH.get((how.get("activation"), how.get("packed", "halves")))
        if finish is None:
            return super().normed_linear(x, norm, norm_bias, weight, bias, **how)
        y = finish(F.linear(self._normed(x, norm, norm_bias), weight, bias))
        return y.to(how.get("out_dtype") or y.dtype)

    def _normed(self, x: Tensor, norm: Tensor, norm_bias: Tensor | None) -> Tensor:
        if self.config.norm == "layer":
            return F.layer_norm(x, x.shape[-1:], norm, norm_bias, self.config.eps)
        if x.shape[0] != 1 or x.dtype != torch.float32:
            return F.rms_norm(x, x.shape[-1:], norm, self.config.eps)
        # Of one row the mean square is a product; F.rms_norm takes twice as long.
        scale = torch.addmm(self.eps, x, x.T, alpha=1 / x.shape[1]).rsqrt_()
        return x.mul(scale).mul_(norm)


def _keys(pages: Tensor, place: tuple[int, int] | Tensor) -> Tensor:
    """A sequence's keys or values, [1, Hkv, count, D]; a view where they lie side by side."""
    heads, dim = pages.shape[2:]
    if isinstance(place, tuple):
        first, count = place
        strides = (count * heads * dim, dim, heads * dim, 1)
        return pages.as_strided((1, heads, count, dim), strides, pages.storage_offset() + first * heads * dim)
    return pages.flatten(0, 1).index_select(0, place).transpose(0, 1)[None]


def begin(model: Transformer, tokens: Tokens, pages: list[LayerPages]) -> Pass:
    """The pass that suits the model's device, and what dispatch would choose there now."""
    if model.device.type == "cpu" and set(backends(model, pages).values()) == {"torch"}:
        return HostPass(model.config, tokens)
    return Pass(model.config, tokens)


def backends(model: Transformer, pages: list[LayerPages], rows: int = 1, prompt: bool = False) -> dict[str, str]:
    """Which backend serves each operator of a step: `rows` sequences decode, or there are so many tokens of a prompt.
    Nothing is computed."""
    config, layer, (k, v, k_scale, v_scale) = model.config, model.layers[0], pages[0]
    x = model.outer.final_norm.expand(rows, -1)
    heads = x[:, :1, None].expand(rows, config.heads, config.head_dim)
    keys, numbers = heads[:, : config.kv_heads], torch.zeros(rows, dtype=torch.int32, device=x.device)
    table, scales = numbers[:, None], {"k_scale": k_scale, "v_scale": v_scale}
    answers = [fk.explain(fk.linear, x, layer.qkv), fk.explain(fk.append_kv, keys, keys, k, v, numbers, **scales)]
    if prompt:
        answers.append(
            fk.explain(_paged_attention, heads, k, v, numbers.new_zeros(2), numbers[:1], table[:1], **scales)
        )
    else:
        answers.append(fk.explain(_decode_attention, heads[:, None], k, v, numbers, table, **scales))
    fused = x.device.type != "cpu" and rows <= FUSED_ROWS  # norm and gate ride on the product
    if not fused or config.norm == "layer":
        answers.append(fk.explain(fk.rms_norm if config.norm == "rms" else fk.layer_norm, x))
    if not fused and config.activation in _GATES:
        answers.append(fk.explain(_GATES[config.activation], x[:, : x.shape[1] // 2 * 2]))
    return {answer.op: answer.chosen or "" for answer in answers}
