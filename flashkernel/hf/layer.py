"""A whole decoder layer as one function, for passes that are bound by the host.

In eager mode a decoding step, or a short prompt, waits for Python and not for the GPU: a layer costs its calls. So the
layer's forward is one function, and no module inside is called. A decoding step is five launches beside the cache and
attention: norm with q, k and v; the rotary embedding; the output projection with its residual; norm with gate and up;
down with its residual. Their shapes are the same at every step, so each costs the host less than one of torch's
operators (core/replay.py). Prompts have many shapes, and are some fifteen of torch's operators.

Why it is here: with it, `generate` of a patched Llama-3.2-1B on an NVIDIA H200 is more than twice as fast as with sdpa
(README.md has the table). Without it, a patched model was slower than with sdpa.

It computes what it can compute exactly, and checks at every pass whether it can: layers as `patch` left them, with
plain weights and no hooks, without gradients, and tokens that see all tokens before them. Everything else takes the
layer's own forward, and with it the forwards of the modules inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules

from flashkernel.blocks.weight import Weight
from flashkernel.hf import forwards
from flashkernel.hf.attention import LayerMask, attention_forward, is_causal
from flashkernel.hf.quantized import QuantizedLinear
from flashkernel.ops.gemm import linear
from flashkernel.ops.norm import rms_norm
from flashkernel.ops.rope import rope

_PLAIN = (nn.Parameter, Tensor)
_KNOWN = frozenset(("attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings"))


class Linear(NamedTuple):
    """Weights of a linear layer."""

    weight: Any  # Tensor or Weight
    bias: Tensor | None


class RmsNorm(NamedTuple):
    """Weight and epsilon of an RMSNorm."""

    weight: Tensor
    eps: float


class LayerParts(NamedTuple):
    """What a layer is made of at this call."""

    attention: Any  # the module
    glu: str  # the activation of gate and up, as `linear` names it
    act_fn: Any  # the same for the gate alone: Transformers' module
    linears: tuple[Linear, ...]  # q, k, v, o, gate, up, down
    norms: tuple[RmsNorm, ...]  # of the input, after attention, and of q and k if heads have norms


def decoder_layer(module: Any, hidden_states: Tensor, *args: Any, **given: Any) -> Tensor:
    """A decoder layer's forward: h = x + attention(norm(x)), then h + mlp(norm(h)); [batch, tokens, hidden]."""
    mask: Any = given.get("attention_mask")
    position_embeddings = given.get("position_embeddings")
    if (
        not args
        and position_embeddings is not None
        and _is_served(hidden_states, mask, position_embeddings[0])
        and _has_usual_arguments(given)
    ):
        parts = _parts(module, hidden_states.dtype)
        if parts is not None:
            return _forward(parts, hidden_states, mask, position_embeddings, given.get("past_key_values"))
    return type(module).forward(module, hidden_states, *args, **given)


def _is_served(x: Tensor, mask: Any, cos: Tensor) -> bool:
    """Whether the pass is bound by the host and every token sees all before it: one token, or a whole prompt."""
    return (
        forwards._host_bound(x)
        and type(x) is Tensor
        and type(mask) is LayerMask
        and x.shape[1] == mask.shape[2]
        and mask.shape[2] in (1, mask.shape[3])
        and is_causal(mask)
        and cos.dtype == x.dtype
    )


def _has_usual_arguments(given: dict[str, Any]) -> bool:
    """Whether the layer was given no arguments beside the usual ones."""
    return given.keys() <= _KNOWN or all(given[name] is None or given[name] is False for name in given.keys() - _KNOWN)


def _parts(layer: Any, dtype: torch.dtype) -> LayerParts | None:
    """The layer's parts, read past the modules' slow attribute lookup; None if a module is hooked or replaced."""
    if modules._global_forward_hooks or modules._global_forward_pre_hooks:
        return None
    inside = layer.__dict__["_modules"]
    attention, mlp = inside["self_attn"], inside["mlp"]
    kind, glu = _patched_with(attention, forwards.attention), _patched_with(mlp, forwards.gated_mlp)
    act_fn = mlp._modules["act_fn"]
    if kind is None or glu is None or attention.training or _hooked(act_fn) or "forward" in act_fn.__dict__:
        return None
    heads, wide = attention._modules, mlp._modules
    linears = (
        _linear(heads["q_proj"], dtype), _linear(heads["k_proj"], dtype), _linear(heads["v_proj"], dtype),
        _linear(heads["o_proj"], dtype), _linear(wide["gate_proj"], dtype), _linear(wide["up_proj"], dtype),
        _linear(wide["down_proj"], dtype),
    )  # fmt: skip
    norms: tuple[RmsNorm | None, ...] = (
        _norm(inside["input_layernorm"], dtype), _norm(inside["post_attention_layernorm"], dtype),
    )  # fmt: skip
    if kind.head_norms:
        norms += (_norm(heads["q_norm"], dtype), _norm(heads["k_norm"], dtype))
    if None in linears or None in norms:
        return None
    return LayerParts(attention, glu, act_fn, linears, norms)  # type: ignore[arg-type]


def _hooked(module: Any) -> bool:
    kept = module.__dict__
    return bool(kept["_forward_hooks"] or kept["_forward_pre_hooks"])


def _patched_with(module: Any, forward: Any) -> Any:
    """The argument that `patch` bound to a module's forward; None if that was replaced since, or is hooked."""
    bound = module.__dict__.get("forward")
    return None if getattr(bound, "func", None) is not forward or _hooked(module) else bound.args[1]


def _linear(layer: Any, dtype: torch.dtype) -> Linear | None:
    """As `forwards._is_fusable` decides; on this path each attribute that torch looks up counts."""
    kept = layer.__dict__
    if type(layer) is QuantizedLinear:
        return Linear(layer.weight, layer.bias) if forwards._is_fusable(layer, dtype) else None
    if type(layer) is not nn.Linear or "forward" in kept or kept["_forward_hooks"] or kept["_forward_pre_hooks"]:
        return None
    weight = kept["_parameters"]["weight"]
    plain = type(weight) in _PLAIN and weight.dtype == dtype
    return Linear(weight, kept["_parameters"]["bias"]) if plain else None


def _norm(layer: Any, dtype: torch.dtype) -> RmsNorm | None:
    kind = _patched_with(layer, forwards.norm)
    if kind is None or not kind.rms or kind.offset != 0:
        return None
    weight = layer.__dict__["_parameters"]["weight"]
    plain = type(weight) in _PLAIN and weight.dtype == dtype
    return RmsNorm(weight, layer.__dict__[kind.eps]) if plain else None


def _forward(
    parts: LayerParts, hidden_states: Tensor, mask: LayerMask, position_embeddings: tuple[Tensor, Tensor], cache: Any
) -> Tensor:
    """The layer; hidden_states is [batch, tokens, hidden]."""
    if forwards._is_decode_step(hidden_states):
        return _decode(parts, hidden_states, mask, position_embeddings, cache)
    batch, tokens, width = hidden_states.shape
    o_proj, gate_proj, up_proj, down_proj = parts.linears[3:]
    x = hidden_states.reshape(-1, width)  # [batch * tokens, hidden]
    h = _normed(x, parts.norms[0])
    q, k, v = _heads(h, parts, mask, position_embeddings, (batch, tokens))
    if cache is not None:
        k, v = cache.update(k, v, parts.attention.layer_idx)
    x = _add_linear(x, _attention(parts.attention, q, k, v, mask), o_proj, torch.addmm)
    h = _normed(x, parts.norms[1])
    h = parts.act_fn.forward(_project(h, gate_proj)).mul_(_project(h, up_proj))
    return _add_linear(x, h, down_proj, Tensor.addmm_).view(batch, tokens, width)


def _decode(
    parts: LayerParts, hidden_states: Tensor, mask: LayerMask, position_embeddings: tuple[Tensor, Tensor], cache: Any
) -> Tensor:
    """The layer in a decoding step; hidden_states is [batch, 1, hidden]."""
    batch, _, width = hidden_states.shape
    dim = parts.attention.head_dim
    x: Any = hidden_states.reshape(batch, width)
    q, k, v = (y.view(batch, 1, -1, dim) for y in _norm_linears(x, parts.linears[:3], parts.norms[0]))
    if len(parts.norms) > 2:
        q, k = (rms_norm(y, norm.weight, eps=norm.eps) for y, norm in zip((q, k), parts.norms[2:]))  # type: ignore[misc]
    q, k = rope(q, k, *position_embeddings, rotary_dim=dim)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [batch, heads, 1, head_dim]
    if cache is not None:
        k, v = cache.update(k, v, parts.attention.layer_idx)
    o_proj, gate_proj, up_proj, down_proj = parts.linears[3:]
    x = linear(_attention(parts.attention, q, k, v, mask), *o_proj, residual=x)
    h = _gate_up(x, gate_proj, up_proj, parts)
    x = linear(h, *down_proj, residual=x)
    return x.view(batch, 1, width)


def _norm_linears(x: Tensor, layers: tuple[Linear, ...], norm: RmsNorm, glu: str | None = None) -> Any:
    """The output of each layer on norm(x), [batch, outputs].

    If all layers have a bias or none has, they are one launch, and `glu` is applied. Otherwise it is not.
    """
    biases: Any = [layer.bias for layer in layers]
    if None not in biases or biases.count(None) == len(biases):
        weights = [layer.weight for layer in layers]
        given = None if None in biases else biases
        return linear(x, weights, given, norm_weight=norm.weight, norm_eps=norm.eps, activation=glu)
    h = _normed(x, norm)
    return [_project(h, layer) for layer in layers]


def _gate_up(x: Tensor, gate: Linear, up: Linear, parts: LayerParts) -> Any:
    """act(gate(norm(x))) * up(norm(x)), [batch, inner]."""
    found = _norm_linears(x, (gate, up), parts.norms[1], parts.glu)
    return found if isinstance(found, Tensor) else parts.act_fn.forward(found[0]).mul_(found[1])


def _heads(
    h: Tensor, parts: LayerParts, mask: LayerMask, position_embeddings: tuple[Tensor, Tensor], sizes: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, rotated, and v, each [batch, heads, tokens, head_dim]."""
    q_proj, k_proj, v_proj = parts.linears[:3]
    (batch, tokens), dim, norms = sizes, parts.attention.head_dim, parts.norms
    shape = (batch, tokens, -1, dim)
    q, k, v = _project(h, q_proj).view(shape), _project(h, k_proj).view(shape), _project(h, v_proj).view(shape)
    if len(norms) > 2:
        q, k = _normed(q, norms[2]), _normed(k, norms[3])
    q, k = forwards.apply_rotary(q, k, *forwards.rotary_tables(mask, position_embeddings, dim))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _normed(x: Tensor, norm: RmsNorm) -> Tensor:
    weight, eps = norm
    return torch.rms_norm(x, weight.shape, weight, eps)


def _attention(attention: Any, q: Tensor, k: Tensor, v: Tensor, mask: LayerMask) -> Tensor:
    """[batch * tokens, heads * head_dim] of q, k and v [batch, heads, tokens, head_dim]."""
    batch, heads, tokens, dim = q.shape
    if k.shape[2] != mask.shape[3]:  # the mask was made for another cache: attention_forward raises
        return attention_forward(attention, q, k, v, mask, scaling=attention.scaling)[0].reshape(batch * tokens, -1)
    if tokens == 1:
        return forwards._decode_attention(q, k, v, attention.scaling, None, None).reshape(batch, heads * dim)
    shared = heads != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=attention.scaling, enable_gqa=shared)
    return out.transpose(1, 2).reshape(batch * tokens, heads * dim)


def _add_linear(x: Tensor, h: Tensor, layer: Linear, add_product: Callable[..., Tensor]) -> Tensor:
    """x + linear(h), added in the product if there is no bias; `add_product` is addmm, or addmm_ to write into x."""
    if layer.bias is None and type(layer.weight) is not Weight:
        return add_product(x, h, layer.weight.t())
    return x + _project(h, layer)


def _project(h: Tensor, layer: Linear) -> Any:
    """linear(h). Plain weights take torch's operator: prompts have many shapes, and a new one costs dispatch more."""
    return linear(h, *layer) if type(layer.weight) is Weight else F.linear(h, *layer)
