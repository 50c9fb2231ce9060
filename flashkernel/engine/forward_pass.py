"""The operators of a decoder layer, as a forward pass calls them.

`ForwardPass` calls the public operators of this package, which check and dispatch every call. `TorchForwardPass` is for
a CPU, where that costs as much as the arithmetic of a decoding step: it asks once a step whether dispatch would take
the torch backend for every operator, and then calls torch for attention, norms and products. The engine's README has
the figures.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashkernel as fk
from flashkernel import Weight
from flashkernel.blocks.rope import token_tables
from flashkernel.engine.moe import moe
from flashkernel.kvcache import LayerPages

if TYPE_CHECKING:
    from flashkernel.engine.config import ModelConfig
    from flashkernel.engine.transformer import LayerWeights, ModelInput, Transformer

# They return one tensor or several, depending on their arguments: more than a type checker can follow.
_linear: Any = fk.linear
_rms_norm: Any = fk.rms_norm
_layer_norm: Any = fk.layer_norm
_decode_attention: Any = fk.decode_attention
_paged_attention: Any = fk.paged_attention
_GLUS: dict[str, Callable[..., Tensor]] = {"swiglu": fk.swiglu}
_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "gelu": fk.gelu, "gelu_tanh": partial(fk.gelu, approximate="tanh"), "relu": fk.relu,
}  # fmt: skip
FUSED_ROWS = 64  # up to so many rows one launch of `linear` computes the norm too


class ForwardPass:
    """What all layers of a pass share: the input, the rotary tables, and which sequences decode."""

    def __init__(self, config: ModelConfig, model_input: ModelInput) -> None:
        self.config, self.model_input = config, model_input
        step, count = model_input.step, model_input.num_decodes
        self.decode_only = count == model_input.input_ids.shape[0]
        self.mixed = count > 0 and not self.decode_only
        self.decode_metadata = (step.lengths[:count], step.page_table[:count])
        if not self.decode_only:
            self.prefill_metadata = (step.cu_seqlens[count:] - count, step.lengths[count:], step.page_table[count:])
        self.rope = self._rope()

    def _rope(self) -> dict[str, Any]:
        """Rotary arguments of `append_kv`; {} if positions are learned.

        GPU kernels compute the angles. On a CPU they are computed once a pass, and all layers read the tables.
        """
        frequencies, positions = self.config.frequencies, self.model_input.step.positions
        if frequencies is None:
            return {}
        if positions.device.type != "cpu":
            return {"frequencies": frequencies, "positions": positions}
        cos, sin = token_tables(
            positions[None], None, None, positions, frequencies, frequencies.rotary_dim, interleaved=False
        )  # [1, tokens, 1, rotary_dim / 2]
        return {"cos": cos[:, :, 0].float(), "sin": sin[:, :, 0].float(), "rotary_dim": frequencies.rotary_dim}

    def write_kv(self, qkv: Tensor, layer: LayerWeights, pages: LayerPages) -> Tensor:
        """Writes keys and values of qkv [tokens, q + k + v heads, head_dim] into pages; returns the rotated queries."""
        config = self.config
        q, k, v = qkv.split_with_sizes((config.heads, config.kv_heads, config.kv_heads), 1)
        if layer.q_norm is not None:
            q = _rms_norm(q, layer.q_norm, eps=config.eps)
        if layer.k_norm is not None:
            k = _rms_norm(k, layer.k_norm, eps=config.eps)
        rotated = fk.append_kv(
            k, v, pages.k_pages, pages.v_pages, self.model_input.step.slots, k_scale=pages.k_scale,
            v_scale=pages.v_scale, q=q if self.rope else None, **self.rope,
        )  # fmt: skip
        return q if rotated is None else rotated

    def attention(self, q: Tensor, pages: LayerPages, window: int | None, sinks: Tensor | None) -> Tensor:
        """Attention over the pages, [tokens, heads * head_dim]: `decode_attention` for decoding sequences,
        `paged_attention` for prefill chunks."""
        k, v, k_scale, v_scale = pages
        options: dict[str, Any] = {"window": window, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale}
        if self.decode_only:
            return _decode_attention(q[:, None], k, v, *self.decode_metadata, **options).view(q.shape[0], -1)
        if not self.mixed:
            return _paged_attention(q, k, v, *self.prefill_metadata, **options).view(q.shape[0], -1)
        count = self.model_input.num_decodes
        decode = _decode_attention(q[:count, None], k, v, *self.decode_metadata, **options)
        prefill = _paged_attention(q[count:], k, v, *self.prefill_metadata, **options)
        return torch.cat((decode.flatten(1), prefill.flatten(1)))

    def mlp(self, x: Tensor, layer: LayerWeights) -> Tensor:
        """x + mlp(norm(x))"""
        config = self.config
        if layer.router is not None:
            h = _rms_norm(x, layer.mlp_norm, eps=config.eps)
            return x + moe(h, layer, config)
        normal: Tensor = x
        norm: dict[str, Any] = {"norm_weight": layer.mlp_norm, "norm_eps": config.eps}
        if config.norm == "layer":
            normal, norm = _layer_norm(x, layer.mlp_norm, layer.mlp_norm_bias, eps=config.eps), {}
        return fk.mlp(
            normal, layer.gate_up_proj, layer.down_proj, layer.gate_up_proj_bias, layer.down_proj_bias, x,
            activation=config.activation, packed=config.packed, out=_in_place(x, layer.down_proj_bias), **norm,
        )  # fmt: skip

    def mlp_by_linear(self, x: Tensor, layer: LayerWeights) -> Tensor:
        """x + mlp(norm(x)) of a layer without experts, one projection after the other."""
        options: dict[str, Any] = {"activation": self.config.activation, "packed": self.config.packed}
        weights = (layer.mlp_norm, layer.mlp_norm_bias, layer.gate_up_proj, layer.gate_up_proj_bias)
        return self.linear_residual(self.norm_linear(x, *weights, **options), layer.down_proj, layer.down_proj_bias, x)

    def linear_residual(self, x: Tensor, weight: Tensor | Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
        """residual + linear(x), in the residual's memory if that saves a pass over it."""
        return _linear(x, weight, bias, residual, out=_in_place(residual, bias))

    def norm_linear(
        self,
        x: Tensor,
        norm: Tensor,
        norm_bias: Tensor | None,
        weight: Tensor | Weight,
        bias: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """linear(norm(x)), in one launch for RMSNorm and few rows; `options` are those of `linear`."""
        eps = self.config.eps
        if self.config.norm == "layer":
            return _linear(_layer_norm(x, norm, norm_bias, eps=eps), weight, bias, **options)
        return _linear(x, weight, bias, norm_weight=norm, norm_eps=eps, **options)


def _in_place(residual: Tensor, bias: Tensor | None) -> Tensor | None:
    """The residual, where adding a product to it saves a pass over it."""
    return residual if bias is None and residual.shape[0] > FUSED_ROWS and residual.is_cuda else None


class TorchForwardPass(ForwardPass):
    """A pass that calls torch's operators without dispatch. Rare cases (quantized weights or pages, sinks, padding,
    interleaved gates) take the public operators."""

    def __init__(self, config: ModelConfig, model_input: ModelInput) -> None:
        super().__init__(config, model_input)
        self.padded = bool(model_input.step.slots.min() < 0)
        self.locations: dict[int | None, list[tuple[int, int] | Tensor]] = {}  # by window

    def attention(self, q: Tensor, pages: LayerPages, window: int | None, sinks: Tensor | None) -> Tensor:
        k, v, k_scale, _ = pages
        plain = sinks is None and k_scale is None and k.is_contiguous()
        if not (plain and self.decode_only and not self.padded):
            return super().attention(q, pages, window, sinks)
        if window not in self.locations:
            self.locations[window] = self._locations(window, k.shape[1])
        rows = q.reshape(q.shape[0], 1, self.config.kv_heads, -1, q.shape[2])  # [batch, 1, kv_heads, group, head_dim]
        outputs = [
            F.scaled_dot_product_attention(rows[b], _gather(k, where), _gather(v, where)).reshape(1, -1)
            for b, where in enumerate(self.locations[window])
        ]
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)

    def _locations(self, window: int | None, page_size: int) -> list[tuple[int, int] | Tensor]:
        """Where each sequence's visible keys are: (first slot, count) if its pages are consecutive, else all slots."""
        locations: list[tuple[int, int] | Tensor] = []
        for length, row in zip(*(x.tolist() for x in self.decode_metadata)):
            start = 0 if window is None else max(0, length - window)
            pages = row[start // page_size : -(-length // page_size)]
            if pages == list(range(pages[0], pages[0] + len(pages))):
                locations.append((pages[0] * page_size + start % page_size, length - start))
            else:
                slots = (torch.tensor(pages)[:, None] * page_size + torch.arange(page_size)).flatten()
                locations.append(slots[start % page_size :][: length - start])
        return locations

    def mlp(self, x: Tensor, layer: LayerWeights) -> Tensor:
        return super().mlp(x, layer) if layer.router is not None else self.mlp_by_linear(x, layer)

    def linear_residual(self, x: Tensor, weight: Tensor | Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
        if isinstance(weight, Weight):
            return super().linear_residual(x, weight, bias, residual)
        if bias is None and x.dtype == torch.float32:
            return torch.addmm(residual, x, weight.T)
        return F.linear(x, weight, bias).add_(residual)

    def norm_linear(
        self,
        x: Tensor,
        norm: Tensor,
        norm_bias: Tensor | None,
        weight: Tensor | Weight,
        bias: Tensor | None,
        **options: Any,
    ) -> Tensor:
        activation, packed = options.get("activation"), options.get("packed", "halves")
        known = activation is None or activation in _GLUS or activation in _ACTIVATIONS
        if isinstance(weight, Weight) or not known:
            return super().norm_linear(x, norm, norm_bias, weight, bias, **options)
        if self.config.norm == "layer":
            h = F.layer_norm(x, x.shape[-1:], norm, norm_bias, self.config.eps)
        else:
            h = F.rms_norm(x, x.shape[-1:], norm, self.config.eps)
        y = F.linear(h, weight, bias)
        if activation is not None and activation in _GLUS:
            y = _GLUS[activation](y, packed=packed)
        elif activation is not None:
            y = _ACTIVATIONS[activation](y)
        return y.to(options.get("out_dtype") or y.dtype)


def _gather(pages: Tensor, where: tuple[int, int] | Tensor) -> Tensor:
    """A sequence's keys or values, [1, kv_heads, count, head_dim]; a view if they are consecutive."""
    heads, dim = pages.shape[2:]
    if isinstance(where, tuple):
        first, count = where
        strides = (count * heads * dim, dim, heads * dim, 1)
        return pages.as_strided((1, heads, count, dim), strides, pages.storage_offset() + first * heads * dim)
    return pages.flatten(0, 1).index_select(0, where).transpose(0, 1)[None]


def select(model: Transformer, model_input: ModelInput, pages: list[LayerPages]) -> ForwardPass:
    """The pass for the model's device and for what dispatch chooses there now."""
    if model.device.type == "cpu" and set(backends(model, pages).values()) == {"torch"}:
        return TorchForwardPass(model.config, model_input)
    return ForwardPass(model.config, model_input)


def backends(model: Transformer, pages: list[LayerPages], rows: int = 1, prefill: bool = False) -> dict[str, str]:
    """The backend of each operator in a step, without computing anything.

    Args:
        model: The model.
        pages: KV pages of each layer.
        rows: Decoding sequences, or tokens of a prompt.
        prefill: The step computes a prompt.

    Returns:
        Backend name by operator name.
    """
    config, layer, (k, v, k_scale, v_scale) = model.config, model.layers[0], pages[0]
    x = model.weights.final_norm.expand(rows, -1)
    heads = x[:, :1, None].expand(rows, config.heads, config.head_dim)
    keys, numbers = heads[:, : config.kv_heads], torch.zeros(rows, dtype=torch.int32, device=x.device)
    table, scales = numbers[:, None], {"k_scale": k_scale, "v_scale": v_scale}
    choices = [fk.explain(fk.linear, x, layer.qkv_proj), fk.explain(fk.append_kv, keys, keys, k, v, numbers, **scales)]
    if prefill:
        choices.append(
            fk.explain(_paged_attention, heads, k, v, numbers.new_zeros(2), numbers[:1], table[:1], **scales)
        )
    else:
        choices.append(fk.explain(_decode_attention, heads[:, None], k, v, numbers, table, **scales))
    if layer.router is None:
        options: dict[str, Any] = {"activation": config.activation, "packed": config.packed}
        choices.append(fk.explain(fk.mlp, x, layer.gate_up_proj, layer.down_proj, **options))
    fused = x.device.type != "cpu" and rows <= FUSED_ROWS  # `linear` and `mlp` compute the norm too
    if not fused or config.norm == "layer":
        choices.append(fk.explain(fk.rms_norm if config.norm == "rms" else fk.layer_norm, x))
    return {choice.op: choice.chosen or "" for choice in choices}
