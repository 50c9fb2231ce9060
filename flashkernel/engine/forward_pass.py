"""The operators of a decoder layer, as a forward pass calls them.

`ForwardPass` calls the public operators of this package, which check and dispatch every call. `TorchForwardPass` is for
a CPU, where that costs as much as the arithmetic of a decoding step: it asks once a step whether dispatch would take
the torch backend for every operator, or the cpp backend for products, and then calls torch for attention and norms, and
torch or the C++ kernels for products. The engine's README has the figures.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

import flashkernel as fk
from flashkernel import Frequencies, Weight
from flashkernel.blocks.decode_cpp import AppendCall, AttendCall
from flashkernel.blocks.linear_cpp import GEMM_ROWS, LinearCall
from flashkernel.blocks.rope import token_tables
from flashkernel.core.arguments import unit_stride
from flashkernel.core.dispatch import is_scoped
from flashkernel.engine.cpu_decode import MAX_BATCH, DecodeProgram, fits
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
_GLUS: dict[str, Callable[..., Tensor]] = {"swiglu": fk.swiglu, "geglu": fk.geglu}
_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "gelu": fk.gelu, "gelu_tanh": partial(fk.gelu, approximate="tanh"), "relu": fk.relu,
}  # fmt: skip
# A projection: of stored weights of several formats, as GGUF files have q, k and v, one after the other.
Projection = Tensor | Weight | tuple[Weight, ...]
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

    @cached_property
    def rope(self) -> dict[str, Any]:
        """Rotary arguments of `append_kv` in layers without a window, or in all layers."""
        return self._rope(self.config.frequencies)

    @cached_property
    def local_rope(self) -> dict[str, Any]:
        """Rotary arguments of `append_kv` in layers with a window."""
        local = self.config.local_frequencies
        return self.rope if local is None else self._rope(local)

    def _rope(self, frequencies: Frequencies | None) -> dict[str, Any]:
        """Rotary arguments; {} if positions are learned.

        GPU kernels compute the angles. On a CPU they are computed once a pass, and all layers read the tables.
        """
        positions = self.model_input.step.positions
        if frequencies is None:
            return {}
        if positions.device.type != "cpu":
            return {"frequencies": frequencies, "positions": positions}
        cos, sin = token_tables(
            positions[None], None, None, positions, frequencies, frequencies.rotary_dim, interleaved=False
        )  # [1, tokens, 1, rotary_dim / 2]
        return {"cos": cos[:, :, 0].float(), "sin": sin[:, :, 0].float(), "rotary_dim": frequencies.rotary_dim}

    def write_kv(self, qkv: Tensor, layer: LayerWeights, pages: LayerPages, window: int | None = None) -> Tensor:
        """Writes keys and values of qkv [tokens, q + k + v heads, head_dim] into pages; returns the rotated queries."""
        config, rope = self.config, self.rope if window is None else self.local_rope
        q, k, v = qkv.split_with_sizes((config.heads, config.kv_heads, config.kv_heads), 1)
        if layer.q_norm is not None:
            q = self.norm(q, layer.q_norm)
        if layer.k_norm is not None:
            k = self.norm(k, layer.k_norm)
        rotated = fk.append_kv(
            k, v, pages.k_pages, pages.v_pages, self.model_input.step.slots, k_scale=pages.k_scale,
            v_scale=pages.v_scale, q=q if rope else None, **rope,
        )  # fmt: skip
        return q if rotated is None else rotated

    def attention(self, q: Tensor, pages: LayerPages, window: int | None, sinks: Tensor | None) -> Tensor:
        """Attention over the pages, [tokens, heads * head_dim]: `decode_attention` for decoding sequences,
        `paged_attention` for prefill chunks."""
        k, v, k_scale, v_scale = pages
        scale = self.config.attention_scale
        options: dict[str, Any] = {
            "window": window, "sinks": sinks, "k_scale": k_scale, "v_scale": v_scale, "scale": scale,
        }  # fmt: skip
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
            h = self.norm(x, layer.mlp_norm)
            return x + moe(h, layer, config)
        normal: Tensor = x
        norm: dict[str, Any] = {
            "norm_weight": layer.mlp_norm, "norm_eps": config.eps, "norm_offset": config.norm_offset,
        }  # fmt: skip
        if config.norm == "layer":
            normal, norm = _layer_norm(x, layer.mlp_norm, layer.mlp_norm_bias, eps=config.eps), {}
        if layer.mlp_post_norm is not None:
            y = fk.mlp(
                normal, layer.gate_up_proj, layer.down_proj, layer.gate_up_proj_bias, layer.down_proj_bias,
                activation=config.activation, packed=config.packed, **norm,
            )  # fmt: skip
            return x + self.norm(y, layer.mlp_post_norm)
        return fk.mlp(
            normal, layer.gate_up_proj, layer.down_proj, layer.gate_up_proj_bias, layer.down_proj_bias, x,
            activation=config.activation, packed=config.packed, out=_in_place(x, layer.down_proj_bias), **norm,
        )  # fmt: skip

    def mlp_by_linear(self, x: Tensor, layer: LayerWeights) -> Tensor:
        """x + mlp(norm(x)) of a layer without experts, one projection after the other."""
        options: dict[str, Any] = {"activation": self.config.activation, "packed": self.config.packed}
        weights = (layer.mlp_norm, layer.mlp_norm_bias, layer.gate_up_proj, layer.gate_up_proj_bias)
        h = self.norm_linear(x, *weights, **options)
        if layer.mlp_post_norm is not None:
            return x + self.norm(self.linear(h, layer.down_proj, layer.down_proj_bias), layer.mlp_post_norm)
        return self.linear_residual(h, layer.down_proj, layer.down_proj_bias, x)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        """RMSNorm of the last dim."""
        return _rms_norm(x, weight, eps=self.config.eps, offset=self.config.norm_offset)

    def linear(self, x: Tensor, weight: Tensor | Weight, bias: Tensor | None) -> Tensor:
        """A product alone."""
        return _linear(x, weight, bias)

    def linear_residual(self, x: Tensor, weight: Tensor | Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
        """residual + linear(x), in the residual's memory if that saves a pass over it."""
        return _linear(x, weight, bias, residual, out=_in_place(residual, bias))

    def norm_linear(
        self,
        x: Tensor,
        norm: Tensor,
        norm_bias: Tensor | None,
        weight: Projection,
        bias: Tensor | None,
        **options: Any,
    ) -> Tensor:
        """linear(norm(x)), in one launch for RMSNorm and few rows; `options` are those of `linear`."""
        eps = self.config.eps
        if isinstance(weight, tuple):
            biases = [None] * len(weight) if bias is None else bias.split([one.shape[0] for one in weight])
            parts = [self.norm_linear(x, norm, norm_bias, *pair, **options) for pair in zip(weight, biases)]
            return torch.cat(parts, -1)
        if self.config.norm == "layer":
            return _linear(_layer_norm(x, norm, norm_bias, eps=eps), weight, bias, **options)
        offset = self.config.norm_offset
        return _linear(x, weight, bias, norm_weight=norm, norm_eps=eps, norm_offset=offset, **options)

    def decode_program(self, model: Transformer, pages: list[LayerPages]) -> Any:
        """A decoding step of `model` over `pages` as one call, from token ids to logits; None: layer by layer."""
        return None


def _in_place(residual: Tensor, bias: Tensor | None) -> Tensor | None:
    """The residual, where adding a product to it saves a pass over it."""
    return residual if bias is None and residual.shape[0] > FUSED_ROWS and residual.device.type != "cpu" else None


class TorchForwardPass(ForwardPass):
    """A pass that calls torch's operators and C++ kernels without dispatch. Rare cases (quantized pages, sinks,
    padding, weights that the kernels do not read) take the public operators.

    Args:
        model: The model, which keeps the prepared calls of the C++ kernels.
        model_input: Input of the pass.
        chosen: Backend of each operator, "torch" or "cpp".
    """

    def __init__(self, model: Transformer, model_input: ModelInput, chosen: dict[str, str]) -> None:
        super().__init__(model.config, model_input)
        self.calls, self.dtype = model.linear_calls, model.dtype
        self.direct, self.appends = chosen["linear"] == "cpp", chosen["append_kv"] == "cpp"
        self.attends = chosen.get("decode_attention") == "cpp" and model_input.num_decodes > 0
        self.locations: dict[int | None, list[tuple[int, int] | Tensor]] = {}  # by window

    @cached_property
    def append(self) -> AppendCall:
        """The C++ kernel that writes keys and values in layers without a window, or in all layers."""
        return self._append(self.rope)

    @cached_property
    def local_append(self) -> AppendCall:
        """The same in layers with a window."""
        return self.append if self.local_rope is self.rope else self._append(self.local_rope)

    def _append(self, rope: dict[str, Any]) -> AppendCall:
        cos, sin = (rope[name][0] if rope else None for name in ("cos", "sin"))
        return AppendCall(self.model_input.step.slots.long(), cos, sin, rope.get("rotary_dim", 0))

    @cached_property
    def attend(self) -> AttendCall:
        """The C++ kernel of decoding sequences."""
        lengths, page_table = self.decode_metadata
        scale = self.config.attention_scale
        scale = self.config.head_dim**-0.5 if scale is None else scale
        return AttendCall(lengths.contiguous(), unit_stride(page_table), scale)

    @cached_property
    def padded(self) -> bool:
        """Whether some tokens are padding."""
        return bool(self.model_input.step.slots.min() < 0)

    def write_kv(self, qkv: Tensor, layer: LayerWeights, pages: LayerPages, window: int | None = None) -> Tensor:
        if not self.appends or layer.q_norm is not None or layer.k_norm is not None:
            return super().write_kv(qkv, layer, pages, window)
        config, append = self.config, self.append if window is None else self.local_append
        q, k, v = qkv.split_with_sizes((config.heads, config.kv_heads, config.kv_heads), 1)
        rotated = append(k, v, q if self.rope else None, pages.k_pages, pages.v_pages)
        return q if rotated is None else rotated

    def attention(self, q: Tensor, pages: LayerPages, window: int | None, sinks: Tensor | None) -> Tensor:
        k, v, k_scale, _ = pages
        if self.attends and self.decode_only:
            sinks = None if sinks is None else sinks.float()
            return self.attend(q[:, None], k, v, window or 0, sinks, k_scale, pages.v_scale).view(q.shape[0], -1)
        plain = sinks is None and k_scale is None and k.is_contiguous()
        if not (plain and self.decode_only and not self.padded):
            return super().attention(q, pages, window, sinks)
        if window not in self.locations:
            self.locations[window] = self._locations(window, k.shape[1])
        scale = self.config.attention_scale
        rows = q.reshape(q.shape[0], 1, self.config.kv_heads, -1, q.shape[2])  # [batch, 1, kv_heads, group, head_dim]
        outputs = [
            F.scaled_dot_product_attention(rows[b], _gather(k, where), _gather(v, where), scale=scale).reshape(1, -1)
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
                slots = (
                    torch.tensor(pages, device="cpu")[:, None] * page_size + torch.arange(page_size, device="cpu")
                ).flatten()
                locations.append(slots[start % page_size :][: length - start])
        return locations

    def mlp(self, x: Tensor, layer: LayerWeights) -> Tensor:
        return super().mlp(x, layer) if layer.router is not None else self.mlp_by_linear(x, layer)

    def linear_residual(self, x: Tensor, weight: Tensor | Weight, bias: Tensor | None, residual: Tensor) -> Tensor:
        if isinstance(weight, Weight):
            call = self._call(weight, bias, x)
            return super().linear_residual(x, weight, bias, residual) if call is None else call(x, residual)
        if bias is None and x.dtype == torch.float32:
            return torch.addmm(residual, x, weight.T)
        return F.linear(x, weight, bias).add_(residual)

    def norm_linear(
        self,
        x: Tensor,
        norm: Tensor,
        norm_bias: Tensor | None,
        weight: Projection,
        bias: Tensor | None,
        **options: Any,
    ) -> Tensor:
        activation, packed = options.get("activation"), options.get("packed", "halves")
        known = activation is None or activation in _GLUS or activation in _ACTIVATIONS
        if not isinstance(weight, Tensor) or not known:
            call = None
            if self.config.norm == "rms" and isinstance(weight, Weight):
                call = self._call(weight, bias, x, norm, options)
            return super().norm_linear(x, norm, norm_bias, weight, bias, **options) if call is None else call(x)
        if self.config.norm == "layer":
            h = F.layer_norm(x, x.shape[-1:], norm, norm_bias, self.config.eps)
        else:
            offset = self.config.norm_offset
            h = F.rms_norm(x, x.shape[-1:], norm + offset if offset else norm, self.config.eps)
        y = F.linear(h, weight, bias)
        if activation is not None and activation in _GLUS:
            y = _GLUS[activation](y, packed=packed)
        elif activation is not None:
            y = _ACTIVATIONS[activation](y)
        return y.to(options.get("out_dtype") or y.dtype)

    def _call(
        self, weight: Weight, bias: Tensor | None, x: Tensor, norm: Tensor | None = None, options: Any = None
    ) -> LinearCall | None:
        """The prepared call of a quantized weight; None if dispatch takes another backend than the C++ kernels."""
        if not self.direct or (weight.activation_dtype is None and x.shape[0] >= GEMM_ROWS):
            return None
        key = (id(weight), id(norm))
        if key not in self.calls:  # with the weight itself, so that its id stays its own
            self.calls[key] = self._prepared(weight, bias, norm, options or {}), weight
        return self.calls[key][0]

    def _prepared(
        self, weight: Weight, bias: Tensor | None, norm: Tensor | None, options: dict[str, Any]
    ) -> LinearCall | None:
        activation, packed = options.get("activation"), options.get("packed", "halves")
        x = torch.empty((1, weight.shape[1]), dtype=self.dtype, device="cpu")
        if fk.explain(_linear, x, weight, **options).chosen != "cpp" or activation not in (None, "swiglu"):
            return None
        shared: dict[str, Any] = {
            "norm_weight": norm, "eps": self.config.eps, "offset": self.config.norm_offset,
            "out_dtype": options.get("out_dtype"),
        }  # fmt: skip
        if activation is None:
            return LinearCall(weight, bias=bias, **shared)
        half = weight.shape[0] // 2
        parts = (slice(0, half), slice(half, None)) if packed == "halves" else (slice(0, None, 2), slice(1, None, 2))
        gate_bias, up_bias = (None, None) if bias is None else (bias[part] for part in parts)
        gate, up = (weight.rows(part) for part in parts)
        return LinearCall(gate, up, gate_bias, up_bias, **shared)

    def decode_program(self, model: Transformer, pages: list[LayerPages]) -> DecodeProgram | None:
        """All layers of a decoding step as one call of the C++ kernels; None where a layer needs another operator."""
        batch = self.model_input.input_ids.shape[0]
        if not (self.direct and self.appends and self.attends and self.decode_only):
            return None
        memory = pages[0].k_pages
        key = ("program", batch, id(memory), torch.get_num_threads())
        if key not in self.calls:
            weakref.finalize(memory, self.calls.pop, key, None).atexit = False  # the model may outlive its engines
            config = model.config
            plain = config.norm == "rms" and config.activation == "swiglu" and config.local_frequencies is None
            fitting = plain and batch <= MAX_BATCH and all(fits(layer) and self._reads(layer) for layer in model.layers)
            with torch.inference_mode(False):
                self.calls[key] = DecodeProgram(self, model, pages) if fitting else None
        return self.calls[key]

    def head_call(self, model: Transformer) -> LinearCall | None:
        """A new call for the final norm and the LM head; None where the C++ kernels do not read its weight."""
        head, norm = model.weights.lm_head, model.weights.final_norm
        return self._prepared(head, None, norm, {"out_dtype": torch.float32}) if isinstance(head, Weight) else None

    def _reads(self, layer: LayerWeights) -> bool:
        """Whether the C++ kernels multiply by all projections of a layer."""
        x = layer.mlp_norm[None]
        weights = (layer.qkv_proj, layer.o_proj, layer.gate_up_proj, layer.down_proj)
        return all(
            isinstance(one, Weight) and fk.explain(_linear, x.new_empty(1, one.shape[1]), one).chosen == "cpp"
            for one in weights
        )

    def layer_calls(self, layer: LayerWeights) -> list[LinearCall]:
        """New calls for the four products of a layer that the C++ kernels read: qkv, o, gate and up, down."""
        gate_up: dict[str, Any] = {"activation": self.config.activation, "packed": self.config.packed}
        products: Any = (
            (layer.qkv_proj, layer.qkv_proj_bias, layer.attention_norm, {}),
            (layer.o_proj, layer.o_proj_bias, None, {}),
            (layer.gate_up_proj, layer.gate_up_proj_bias, layer.mlp_norm, gate_up),
            (layer.down_proj, layer.down_proj_bias, None, {}),
        )
        found = [self._prepared(weight, bias, norm, options) for weight, bias, norm, options in products]
        assert None not in found
        return found  # type: ignore[return-value]


def _gather(pages: Tensor, where: tuple[int, int] | Tensor) -> Tensor:
    """A sequence's keys or values, [1, kv_heads, count, head_dim]; a view if they are consecutive."""
    heads, dim = pages.shape[2:]
    if isinstance(where, tuple):
        first, count = where
        strides = (count * heads * dim, dim, heads * dim, 1)
        return pages.as_strided((1, heads, count, dim), strides, pages.storage_offset() + first * heads * dim)
    return pages.flatten(0, 1).index_select(0, where).transpose(0, 1)[None]


def select(model: Transformer, model_input: ModelInput, pages: list[LayerPages]) -> ForwardPass:
    """The pass for the model's device and for what dispatch chooses there now.

    Without a scope dispatch always chooses the same for a model on a CPU, so it is asked once.
    """
    if model.device.type == "cpu" and not model_input.eager:
        scoped, dtype = is_scoped(), pages[0].k_pages.dtype
        chosen = None if scoped else model.cpu_backends.get(dtype)
        if chosen is None:
            chosen = backends(model, pages)
        if not scoped:
            model.cpu_backends[dtype] = chosen
        if set(chosen.values()) <= {"torch", "cpp"}:
            return TorchForwardPass(model, model_input, chosen)
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
    qkv: Any = layer.qkv_proj[0] if isinstance(layer.qkv_proj, tuple) else layer.qkv_proj
    choices = [fk.explain(fk.linear, x, qkv), fk.explain(fk.append_kv, keys, keys, k, v, numbers, **scales)]
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
