"""The forwards that `patch` puts on modules.

Each takes its module first and reads everything from it at the call, so that a module that was moved, copied, loaded
or wrapped by PEFT since then is computed as it is now. What a forward cannot compute goes to the module's own forward.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
import transformers.modeling_outputs
from torch import Tensor, nn
from transformers.cache_utils import EncoderDecoderCache
from transformers.pytorch_utils import Conv1D
from transformers.utils.generic import can_return_tuple

from flashkernel.core.arguments import autocast_dtype
from flashkernel.core.device import properties
from flashkernel.hf.attention import NAME, LayerMask, attention_forward, sees_all
from flashkernel.hf.experts import run_experts
from flashkernel.hf.families import Attention, Head, Norm
from flashkernel.hf.quantized import QuantizedLinear
from flashkernel.ops.activation import geglu, gelu, reglu, relu, silu, swiglu
from flashkernel.ops.decode import decode_attention
from flashkernel.ops.gemm import linear
from flashkernel.ops.loss import cross_entropy, linear_cross_entropy
from flashkernel.ops.mlp import mlp
from flashkernel.ops.norm import layer_norm, rms_norm
from flashkernel.ops.rope import rope

FUSED_LOSS = "_fkernel_fused_loss"  # the attribute of a model whose forward `patch` replaced
MAX_DECODE_TOKENS = 64  # largest batch of a decoding step
MAX_HOST_BOUND_TOKENS = 1024  # up to so many tokens an eager pass is bound by the host, not by the GPU
MIN_SPLIT_KEYS = 8192  # from so many keys on, the attention of one query is worth splitting over the GPU (split-K)
_ACTIVATIONS: dict[str, Callable[..., Tensor]] = {
    "silu": silu, "relu": relu, "gelu": gelu, "gelu_tanh": partial(gelu, approximate="tanh"),
}  # fmt: skip
_GLUS: dict[str, Callable[..., Tensor]] = {
    "swiglu": swiglu, "reglu": reglu, "geglu": geglu, "geglu_exact": partial(geglu, approximate="none"),
}  # fmt: skip


def norm(module: Any, kind: Norm, x: Tensor) -> Tensor:
    """RMSNorm or LayerNorm over the last dim of x."""
    weight, eps = module.weight, getattr(module, kind.eps)
    host_bound = _host_bound(x) and not _is_decode_step(x)
    if _keeps_own_code(x) or (host_bound and not kind.rms):
        return type(module).forward(module, x)
    if not kind.rms:
        return layer_norm(x, weight, module.bias, eps=eps)  # type: ignore[return-value]
    if host_bound and kind.offset == 0 and weight.dtype == x.dtype:
        return F.rms_norm(x, weight.shape, weight, eps)
    if kind.promotes and weight.dtype != x.dtype:
        x = x.to(torch.promote_types(x.dtype, weight.dtype))
    return rms_norm(x, weight, eps=eps, offset=kind.offset)  # type: ignore[return-value]


def attention(
    module: Any,
    kind: Attention,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    attention_mask: Any = None,
    past_key_values: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """An attention layer, [batch, tokens, hidden], with the rotary embedding of q and k in one launch."""
    if module.config._attn_implementation != NAME or position_embeddings is None:
        return type(module).forward(
            module, hidden_states, position_embeddings=position_embeddings, attention_mask=attention_mask,
            past_key_values=past_key_values, **kwargs,
        )  # fmt: skip
    tokens = hidden_states.shape[:-1]
    heads = (*tokens, -1, module.head_dim)
    q, k, v = [x.view(heads) for x in _projections(hidden_states, module.q_proj, module.k_proj, module.v_proj)]
    if kind.head_norms:
        q, k = module.q_norm(q), module.k_norm(k)
    cos, sin = position_embeddings
    host_bound = _host_bound(hidden_states)
    if host_bound and not _is_decode_step(hidden_states) and type(attention_mask) is LayerMask and cos.dtype == q.dtype:
        q, k = apply_rotary(q, k, *rotary_tables(attention_mask, position_embeddings, module.head_dim))
    elif _keeps_own_code(q):
        q, k = sys.modules[type(module).__module__].apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    else:
        q, k = rope(q, k, cos, sin, rotary_dim=module.head_dim)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)  # [batch, heads, tokens, head_dim]
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, module.layer_idx)
    options = {name: _attribute(module, path) for name, path in kind.options.items()}
    unpacked = kwargs.get("cu_seq_lens_q") is None
    if host_bound and unpacked and not module.training and sees_all(attention_mask, k.shape[2]):
        out, weights = _decode_attention(q, k, v, module.scaling, options.get("s_aux"), options.get("softcap")), None
    else:
        dropout = module.attention_dropout if module.training else 0.0
        out, weights = attention_forward(
            module, q, k, v, attention_mask, dropout=dropout, scaling=module.scaling, **options, **kwargs
        )
    return _projections(out.reshape(*tokens, -1), module.o_proj)[0], weights


def gpt2_attention(
    module: Any, hidden_states: Tensor, past_key_values: Any = None, attention_mask: Any = None, **kwargs: Any
) -> tuple[Tensor, Any]:
    """GPT-2's attention: its own forward, except for a host-bound decoding step."""
    sees_all_keys = isinstance(attention_mask, LayerMask) and sees_all(attention_mask, attention_mask.shape[3])
    plain = kwargs.get("encoder_hidden_states") is None and kwargs.get("cu_seq_lens_q") is None
    cached = past_key_values is None or not isinstance(past_key_values, EncoderDecoderCache)
    ours = module.config._attn_implementation == NAME and not module.training
    if not (_host_bound(hidden_states) and sees_all_keys and plain and cached and ours):
        return type(module).forward(
            module, hidden_states, past_key_values=past_key_values, attention_mask=attention_mask, **kwargs
        )
    tokens = hidden_states.shape[:-1]
    heads = (*tokens, -1, module.head_dim)
    q, k, v = [x.view(heads).transpose(1, 2) for x in module.c_attn(hidden_states).split(module.split_size, 2)]
    if past_key_values is not None:
        k, v = past_key_values.update(k, v, module.layer_idx)
    out = _decode_attention(q, k, v, module.scaling, None, None)
    return module.resid_dropout(module.c_proj(out.reshape(*tokens, -1))), None


def rotary_tables(mask: LayerMask, position_embeddings: tuple[Tensor, Tensor], head_dim: int) -> tuple[Tensor, Tensor]:
    """cos, and sin with the sign of each half of a head, both [batch or 1, tokens, 1, head_dim].

    They are computed once a pass and kept with the mask, which all layers share.
    """
    kept = mask.shared.get("rotary_tables")
    if kept is None or kept[0] is not position_embeddings[0]:
        cos, sin = position_embeddings  # [batch or 1, tokens, head_dim], the same twice, or half as wide
        half = head_dim // 2
        signed = torch.cat((-sin[..., :half], sin[..., -half:]), -1)
        whole = cos if cos.shape[-1] == head_dim else torch.cat((cos, cos), -1)
        kept = mask.shared["rotary_tables"] = (cos, whole.unsqueeze(2), signed.unsqueeze(2))
    return kept[1], kept[2]


def apply_rotary(q: Tensor, k: Tensor, cos: Tensor, signed_sin: Tensor) -> tuple[Tensor, Tensor]:
    """The rotary embedding of q and k [batch, tokens, heads, head_dim], together and in four operators.

    `blocks.rope.rotate` computes the same in ten, which a pass that waits for the host cannot afford.
    """
    x = torch.cat((q, k), 2)
    x = (x * cos).addcmul_(x.roll(x.shape[-1] // 2, -1), signed_sin)
    return x.split_with_sizes((q.shape[2], k.shape[2]), 2)  # type: ignore[return-value]


def _decode_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, sinks: Tensor | None, softcap: float | None
) -> Tensor:
    """Attention of one query that sees every key: q is [batch, heads, 1, dim], k [batch, kv_heads, keys, dim]."""
    if k.shape[2] < MIN_SPLIT_KEYS and sinks is None and not softcap:
        return F.scaled_dot_product_attention(q, k, v, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    lengths = torch.full((q.shape[0],), k.shape[2], dtype=torch.int32, device=q.device)
    out = decode_attention(
        q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), lengths, sinks=sinks, softcap=softcap or 0.0,
        scale=scale,
    )  # fmt: skip
    return out.transpose(1, 2)  # type: ignore[union-attr]


def gated_mlp(module: Any, glu: str, x: Tensor) -> Tensor:
    """down_proj(act(gate_proj(x)) * up_proj(x))"""
    if _keeps_own_code(x):
        return type(module).forward(module, x)
    weights = [module.gate_proj, module.up_proj]
    if _can_fuse(x, weights):
        biases = None if weights[0].bias is None else [layer.bias for layer in weights]
        hidden = linear(x, [layer.weight for layer in weights], biases, activation=glu)
        return _projections(hidden, module.down_proj)[0]  # type: ignore[arg-type]
    if _host_bound(x):
        return type(module).forward(module, x)
    if _can_fuse_mlp(x, [*weights, module.down_proj], nn.Linear):
        gate, up, down = *weights, module.down_proj
        pair = None if gate.bias is None else (gate.bias, up.bias)
        return mlp(x, (gate.weight, up.weight), down.weight, pair, down.bias, activation=glu)
    return module.down_proj(_GLUS[glu](module.gate_proj(x), module.up_proj(x)))


def plain_mlp(module: Any, name: str, x: Tensor) -> Tensor:
    """GPT-2's MLP, whose weights are stored (in, out): dropout(c_proj(act(c_fc(x))))"""
    c_fc, c_proj = module.c_fc, module.c_proj
    if _keeps_own_code(x) or _host_bound(x) or not _can_fuse_mlp(x, [c_fc, c_proj], Conv1D):
        return type(module).forward(module, x)
    return module.dropout(mlp(x, c_fc.weight.t(), c_proj.weight.t(), c_fc.bias, c_proj.bias, activation=name))


def activation(module: Any, name: str, x: Tensor) -> Tensor:
    """An activation without a gate."""
    if _keeps_own_code(x):
        return type(module).forward(module, x)
    return _ACTIVATIONS[name](x, backend="torch" if _host_bound(x) and not _is_decode_step(x) else None)


def experts(module: Any, name: str, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Experts [tokens, hidden]: products, activation and weighted sum. `name` is that of the activation."""
    if _keeps_own_code(hidden_states) or kwargs or len(args) != 2:
        return type(module).forward(module, hidden_states, *args, **kwargs)
    return run_experts(module, name, hidden_states, *args)


def causal_loss(
    logits: Tensor,
    labels: Tensor | None,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """Transformers' ForCausalLMLoss, from logits."""
    target = _shifted_labels(labels, shift_labels, ignore_index).reshape(-1).to(logits.device)
    reduction = "mean" if num_items_in_batch is None else "sum"
    loss = cross_entropy(logits.reshape(-1, vocab_size), target, ignore_index=ignore_index, reduction=reduction)
    return _per_item(loss, num_items_in_batch)


def causal_model(model: Any, kind: Head, names: tuple[str, ...], *args: Any, **kwargs: Any) -> Any:
    """A language model's forward. In training with labels the loss is fused and `outputs.logits` is None.

    A tuple has its logits: without them all that follows would stand one place ahead.
    `names` are those of the forward's positional arguments.
    """
    kwargs.update(zip(names, args))
    keep = kwargs.get("logits_to_keep")
    partly = isinstance(keep, Tensor) or bool(keep)
    as_dict = kwargs.get("return_dict")
    as_tuple = not (model.config.return_dict if as_dict is None else as_dict)
    if partly or as_tuple or kwargs.get("labels") is None or not model.training or not _is_plain_linear(model.lm_head):
        return type(model).forward(model, **kwargs)
    return _fused_loss(model, kind, **kwargs)


def bound_causal_model(kind: Head, names: tuple[str, ...], model: Any, *args: Any, **kwargs: Any) -> Any:
    """`causal_model` for a wrapper that binds it to a model, as accelerate's mixed precision does and keeps.

    In a model that was unpatched since, it is the model's own forward.
    """
    if not model.__dict__.get(FUSED_LOSS):
        return type(model).forward(model, *args, **kwargs)
    return causal_model(model, kind, names, *args, **kwargs)


@can_return_tuple
def _fused_loss(model: Any, kind: Head, labels: Tensor, logits_to_keep: int = 0, **kwargs: Any) -> Any:
    if kind.routed:
        given = kwargs.get("output_router_logits")
        kwargs["output_router_logits"] = model.config.output_router_logits if given is None else given
    outputs = model.base_model(**kwargs)
    hidden = outputs.last_hidden_state  # [batch, tokens, hidden]
    ignored, items = kwargs.get("ignore_index", -100), kwargs.get("num_items_in_batch")
    loss = linear_cross_entropy(
        hidden, model.lm_head.weight, _shifted_labels(labels, kwargs.get("shift_labels"), ignored).to(hidden.device),
        model.lm_head.bias, ignore_index=ignored, reduction="mean" if items is None else "sum",
        softcap=(model.config.final_logit_softcapping or 0.0) if kind.softcap else 0.0,
    )  # fmt: skip
    loss = _per_item(loss, items)
    extra = {name: outputs.get(name) for name in ("past_key_values", "hidden_states", "attentions")}
    if kind.output == "CausalLMOutputWithCrossAttentions":
        extra["cross_attentions"] = outputs.get("cross_attentions")
    if kind.routed:
        extra["router_logits"] = outputs.get("router_logits")
        if kwargs["output_router_logits"]:
            balance = sys.modules[type(model).__module__].load_balancing_loss_func
            extra["aux_loss"] = balance(
                outputs.router_logits, model.num_experts, model.num_experts_per_tok, kwargs.get("attention_mask")
            )
            loss = loss + model.router_aux_loss_coef * extra["aux_loss"].to(loss.device)
    return getattr(transformers.modeling_outputs, kind.output)(loss=loss, logits=None, **extra)


def _shifted_labels(labels: Tensor | None, shifted: Tensor | None, ignored: int) -> Tensor:
    """Labels shifted by one, [batch, tokens]: what each token predicts; the last one predicts nothing."""
    if shifted is not None:
        return shifted
    assert labels is not None
    return F.pad(labels, (0, 1), value=ignored)[..., 1:]


def _per_item(loss: Tensor, items: Tensor | int | None) -> Tensor:
    if items is None:
        return loss
    return loss / (items.to(loss.device) if isinstance(items, Tensor) else items)


def _keeps_own_code(x: Tensor) -> bool:
    """Whether Transformers' own code runs: on a CPU it is as fast."""
    return x.device.type == "cpu"


def _host_bound(x: Tensor) -> bool:
    """Whether x [batch, tokens, ...] is an eager decoding step or short prompt on a GPU, which is bound by the host.

    The first call of a shape costs the host more than torch's operator, and prompts have many shapes. In a graph, by
    torch.compile, launches cost nothing and the kernels win.
    """
    return (
        x.is_cuda
        and not torch.is_grad_enabled()
        and x.ndim > 2
        and x.shape[0] * x.shape[1] <= MAX_HOST_BOUND_TOKENS
        and x.dtype != torch.float32
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cuda")
    )


def _is_decode_step(x: Tensor) -> bool:
    """Whether x [batch, tokens, ...] has one token for each sequence.

    Its shapes are the same at every step, and calls of known shapes cost the host less than torch's (core/replay.py).
    """
    return x.shape[1] == 1 and x.shape[0] <= MAX_DECODE_TOKENS


def _can_fuse(x: Tensor, layers: list[Any]) -> bool:
    """Whether one launch can compute several linear layers: in a decoding step on a GPU, if they are plain."""
    if not x.is_cuda or torch.is_grad_enabled() or x.dtype == torch.float32 or torch.is_autocast_enabled("cuda"):
        return False
    few = x.shape[:-1].numel() <= MAX_DECODE_TOKENS
    if not (few if torch.compiler.is_compiling() else x.ndim > 2 and _is_decode_step(x)):
        return False
    return all([_is_fusable(layer, x.dtype) for layer in layers]) and (  # noqa: C419  dynamo
        len({layer.bias is None for layer in layers}) == 1
    )


def _can_fuse_mlp(x: Tensor, layers: list[Any], kind: type) -> bool:
    """Whether `mlp` computes these layers: plain ones, in half precision, on a GPU where their products are fused."""
    device = properties(x.device)
    if device.kind == "cuda" and device.arch < 80:
        return False
    plain = [_is_plain(layer, kind) for layer in layers]
    if not all(plain) or len({layer.bias is None for layer in layers[:-1]}) > 1:
        return False
    lower = autocast_dtype(x)
    if lower is not None:
        return lower != torch.float32
    return x.dtype != torch.float32 and all([layer.weight.dtype == x.dtype for layer in layers])  # noqa: C419


def _projections(x: Tensor, *layers: Any) -> list[Tensor]:
    """The output of each linear layer, in one launch if possible."""
    if _can_fuse(x, list(layers)):
        if len(layers) == 1:
            return [linear(x, layers[0].weight, layers[0].bias)]  # type: ignore[list-item]
        biases = None if layers[0].bias is None else [layer.bias for layer in layers]
        return list(linear(x, [layer.weight for layer in layers], biases))
    return [layer(x) for layer in layers]


def _is_fusable(layer: Any, dtype: torch.dtype) -> bool:
    """Whether `linear` may compute the layer: a plain one in this dtype, or one with a quantized weight."""
    if type(layer) is QuantizedLinear:
        return "forward" not in layer.__dict__ and not layer._forward_hooks and not layer._forward_pre_hooks
    return _is_plain_linear(layer) and layer.weight.dtype == dtype


def _is_plain_linear(layer: Any) -> bool:
    """Whether this is a linear layer without adapter, quantization, sharding or hook."""
    return _is_plain(layer, nn.Linear)


def _is_plain(layer: Any, kind: Any) -> bool:
    return (
        type(layer) is kind
        and type(layer.weight) in (nn.Parameter, Tensor)
        and "forward" not in layer.__dict__
        and not layer._forward_hooks
        and not layer._forward_pre_hooks
    )


def _attribute(module: Any, path: str) -> Any:
    for name in path.split("."):
        module = getattr(module, name, None)
    return module
