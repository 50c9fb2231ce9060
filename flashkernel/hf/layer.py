"""A whole decoder layer in few calls, for passes whose time goes to the host.

In eager mode a decoding step, or a short prompt, waits for Python and not for the GPU: a layer costs its calls. So the
layer's forward is one function, and no module in between is called. A step of a token for each sequence is five
launches beside the cache and attention: norm with q, k and v; the rotary embedding; the output with its residual; norm
with gate and up; down with its residual. Their shapes come again at every step, so each costs the host less than one of
torch's operators (core/replay.py). Prompts have many shapes, and are some fifteen of torch's operators.

It serves what it can serve exactly, and looks at every pass whether it can: layers as `patch` left them, with plain
weights and no hooks, without gradients, and tokens that see all before them. Everything else takes the layer's own
forward, and with it the forwards of the modules inside.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules import module as modules

from flashkernel.hf import forwards
from flashkernel.hf.attention import LayerMask, attention_forward, is_causal
from flashkernel.ops.gemm import linear
from flashkernel.ops.norm import rms_norm
from flashkernel.ops.rope import rope

_PLAIN = (nn.Parameter, Tensor)
_KNOWN = frozenset(("attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings"))
_GATES: dict[str, Callable[[Tensor], Tensor]] = {
    "swiglu": lambda x: F.silu(x, inplace=True), "reglu": torch.relu_, "geglu_exact": F.gelu,
    "geglu": lambda x: F.gelu(x, approximate="tanh"),
}  # fmt: skip


class Linear(NamedTuple):
    weight: Tensor
    bias: Tensor | None


class RmsNorm(NamedTuple):
    weight: Tensor
    eps: float


class Parts(NamedTuple):
    """What a layer is made of at this moment."""

    attention: Any
    gate: str
    linears: tuple[Linear, ...]  # q, k, v, o, gate, up, down
    norms: tuple[RmsNorm, ...]  # of the input, after attention, and of q and k where heads have norms


def decoder_layer(module: Any, hidden_states: Tensor, *args: Any, **given: Any) -> Tensor:
    """The forward of a layer: x + attention(norm(x)), and that plus mlp(norm of it); [batch, tokens, hidden]."""
    mask: Any = given.get("attention_mask")
    angles = given.get("position_embeddings")
    if not args and angles is not None and _serves(hidden_states, mask, angles[0]) and _ordinary(given):
        parts = _parts(module, hidden_states.dtype)
        if parts is not None:
            return _run(parts, hidden_states, mask, angles, given.get("past_key_values"))
    return type(module).forward(module, hidden_states, *args, **given)


def _serves(x: Tensor, mask: Any, cos: Tensor) -> bool:
    """Whether this pass is bound by the host and every token sees all before it: one token, or a whole prompt."""
    return (
        forwards._lean(x)
        and type(x) is Tensor
        and type(mask) is LayerMask
        and x.shape[1] == mask.shape[2]
        and mask.shape[2] in (1, mask.shape[3])
        and is_causal(mask)
        and cos.dtype == x.dtype
    )


def _ordinary(given: dict[str, Any]) -> bool:
    """Whether the layer was given no more than every layer is."""
    return given.keys() <= _KNOWN or all(given[name] in (None, False) for name in given.keys() - _KNOWN)


def _parts(layer: Any, dtype: torch.dtype) -> Parts | None:
    """The layer's weights, read past the modules' slow attributes; None where a module is more than itself."""
    if modules._global_forward_hooks or modules._global_forward_pre_hooks:
        return None
    inside = layer.__dict__["_modules"]
    attention, mlp = inside["self_attn"], inside["mlp"]
    kind, gate = _setting(attention, forwards.attention), _setting(mlp, forwards.gated_mlp)
    if kind is None or gate is None or attention.training or _hooked(mlp._modules["act_fn"]):
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
    return Parts(attention, gate, linears, norms)  # type: ignore[arg-type]


def _hooked(module: Any) -> bool:
    kept = module.__dict__
    return bool(kept["_forward_hooks"] or kept["_forward_pre_hooks"])


def _setting(module: Any, forward: Any) -> Any:
    """What `patch` bound to a module's forward; None where that is no longer the module's, or is hooked."""
    put = module.__dict__.get("forward")
    return None if getattr(put, "func", None) is not forward or _hooked(module) else put.args[1]


def _linear(layer: Any, dtype: torch.dtype) -> Linear | None:
    """As `forwards._plain` decides; on this path each attribute that torch looks up counts."""
    kept = layer.__dict__
    if type(layer) is not nn.Linear or "forward" in kept or kept["_forward_hooks"] or kept["_forward_pre_hooks"]:
        return None
    weight = kept["_parameters"]["weight"]
    plain = type(weight) in _PLAIN and weight.dtype == dtype
    return Linear(weight, kept["_parameters"]["bias"]) if plain else None


def _norm(layer: Any, dtype: torch.dtype) -> RmsNorm | None:
    kind = _setting(layer, forwards.norm)
    if kind is None or not kind.rms or kind.offset != 0:
        return None
    weight = layer.__dict__["_parameters"]["weight"]
    plain = type(weight) in _PLAIN and weight.dtype == dtype
    return RmsNorm(weight, layer.__dict__[kind.eps]) if plain else None


def _run(parts: Parts, hidden_states: Tensor, mask: LayerMask, angles: tuple[Tensor, Tensor], cache: Any) -> Tensor:
    if forwards._decoding(hidden_states):
        return _step(parts, hidden_states, mask, angles, cache)
    batch, tokens, width = hidden_states.shape
    o_proj, gate_proj, up_proj, down_proj = parts.linears[3:]
    x = hidden_states.reshape(-1, width)  # [batch * tokens, hidden]
    h = _normed(x, parts.norms[0])
    q, k, v = _heads(h, parts, mask, angles, (batch, tokens))
    if cache is not None:
        k, v = cache.update(k, v, parts.attention.layer_idx)
    x = _plus(x, _attend(parts.attention, q, k, v, mask), o_proj, torch.addmm)
    h = _normed(x, parts.norms[1])
    h = _GATES[parts.gate](F.linear(h, *gate_proj)).mul_(F.linear(h, *up_proj))
    return _plus(x, h, down_proj, Tensor.addmm_).view(batch, tokens, width)


def _step(parts: Parts, hidden_states: Tensor, mask: LayerMask, angles: tuple[Tensor, Tensor], cache: Any) -> Tensor:
    """A token for each sequence: hidden_states is [batch, 1, hidden]."""
    batch, _, width = hidden_states.shape
    dim = parts.attention.head_dim
    x: Any = hidden_states.reshape(batch, width)
    q, k, v = (y.view(batch, 1, -1, dim) for y in _products(x, parts.linears[:3], parts.norms[0]))
    if len(parts.norms) > 2:
        q, k = (rms_norm(y, norm.weight, eps=norm.eps) for y, norm in zip((q, k), parts.norms[2:]))  # type: ignore[misc]
    q, k = rope(q, k, *angles, rotary_dim=dim)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [batch, heads, 1, head_dim]
    if cache is not None:
        k, v = cache.update(k, v, parts.attention.layer_idx)
    o_proj, gate_proj, up_proj, down_proj = parts.linears[3:]
    x = linear(_attend(parts.attention, q, k, v, mask), *o_proj, residual=x)
    h = _products(x, (gate_proj, up_proj), parts.norms[1], parts.gate)
    x = linear(h, *down_proj, residual=x)
    return x.view(batch, 1, width)


def _products(x: Tensor, layers: tuple[Linear, ...], norm: RmsNorm, gate: str | None = None) -> Any:
    """The layers' outputs of the norm of x, [batch, outputs] each, or those of gate and up as one: one launch, if all
    have a bias or none has."""
    biases: Any = [layer.bias for layer in layers]
    if None not in biases or biases.count(None) == len(biases):
        given = None if None in biases else biases
        weights = [layer.weight for layer in layers]
        return linear(x, weights, given, norm_weight=norm.weight, norm_eps=norm.eps, activation=gate)
    h = _normed(x, norm)
    products = [F.linear(h, *layer) for layer in layers]
    return products if gate is None else _GATES[gate](products[0]).mul_(products[1])


def _heads(
    h: Tensor, parts: Parts, mask: LayerMask, angles: tuple[Tensor, Tensor], sizes: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """q and k, rotated, and v, each [batch, heads, tokens, head_dim]."""
    q_proj, k_proj, v_proj = parts.linears[:3]
    (batch, tokens), dim, norms = sizes, parts.attention.head_dim, parts.norms
    shape = (batch, tokens, -1, dim)
    q, k, v = F.linear(h, *q_proj).view(shape), F.linear(h, *k_proj).view(shape), F.linear(h, *v_proj).view(shape)
    if len(norms) > 2:
        q, k = _normed(q, norms[2]), _normed(k, norms[3])
    q, k = forwards.turned(q, k, *forwards.shared_angles(mask, angles, dim))
    return q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)


def _normed(x: Tensor, norm: RmsNorm) -> Tensor:
    weight, eps = norm
    return torch.rms_norm(x, weight.shape, weight, eps)


def _attend(attention: Any, q: Tensor, k: Tensor, v: Tensor, mask: LayerMask) -> Tensor:
    """[batch * tokens, heads * head_dim] of q, k and v [batch, heads, tokens, head_dim]."""
    batch, heads, tokens, dim = q.shape
    if k.shape[2] != mask.shape[3]:  # a cache other than the one the mask was made for: refused there
        return attention_forward(attention, q, k, v, mask, scaling=attention.scaling)[0].reshape(batch * tokens, -1)
    if tokens == 1:
        return forwards._step(q, k, v, attention.scaling, None, None).reshape(batch, heads * dim)
    shared = heads != k.shape[1]
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=attention.scaling, enable_gqa=shared)
    return out.transpose(1, 2).reshape(batch * tokens, heads * dim)


def _plus(x: Tensor, h: Tensor, layer: Linear, add_product: Callable[..., Tensor]) -> Tensor:
    """x + linear(h); the sum is made in the product, into x itself where that is this layer's own."""
    if layer.bias is None:
        return add_product(x, h, layer.weight.t())
    return x + F.linear(h, *layer)
