"""A Transformers model with the weights of the engine's: what the engine is measured and checked against.

On a GPU it shares the engine's memory wherever the stored tensors are whole rows of the engine's pieces, so that both
fit side by side; on a CPU, where the engine lays some weights out by columns, it has them as Transformers loads them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashkernel.engine.architectures import ARCHITECTURES, Piece
from flashkernel.engine.transformer import Transformer

TWINS = ("llama", "gpt2")  # "random" is one of them, by whether it learned its positions


def twin(model: Transformer, attention: str = "sdpa") -> Any:
    """A Transformers model in evaluation mode that computes what `model` does, with `attention` as its attention."""
    kind = model.config.architecture
    if kind == "random":
        kind = "llama" if model.outer.positions is None else "gpt2"
    if kind not in TWINS:
        raise ValueError(f"twin: {kind} models have none here; known are {', '.join(TWINS)}")
    with torch.device("meta"):
        made = _build(kind, model, attention)
    empty, architecture = made.state_dict(), ARCHITECTURES[kind]
    weights: dict[str, Tensor] = {}
    parts: list[tuple[Mapping[str, Piece], str, Any]] = [(architecture.outer, "", model.outer)]
    parts += [(architecture.layer, architecture.layer_prefix.format(i), layer) for i, layer in enumerate(model.layers)]
    for table, prefix, holder in parts:
        for name, piece in table.items():
            weights |= _stored(piece, prefix, getattr(holder, name), empty)
    made.load_state_dict(weights, strict=False, assign=True)
    made.tie_weights()
    _fill_buffers(made, model)
    left = [name for name, x in (*made.named_parameters(), *made.named_buffers()) if x.is_meta]
    if left:
        raise ValueError(f"twin: {', '.join(left[:4])} of the {kind} model got no values")
    return made.requires_grad_(False).eval()


def _build(kind: str, model: Transformer, attention: str) -> Any:
    import transformers

    config = model.config
    common: dict[str, Any] = {
        "vocab_size": config.vocab, "tie_word_embeddings": config.tied, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": None,
    }  # fmt: skip
    how: dict[str, Any] = {"attn_implementation": attention, "dtype": model.dtype}
    layer = model.layers[0]
    if kind == "gpt2":
        sizes: dict[str, Any] = {
            "n_embd": config.hidden, "n_layer": config.layers, "n_head": config.heads, "n_positions": config.context,
            "n_inner": layer.up.shape[0], "layer_norm_epsilon": config.eps,
        }  # fmt: skip
        return transformers.GPT2LMHeadModel._from_config(transformers.GPT2Config(**common, **sizes), **how)
    sizes = {
        "hidden_size": config.hidden, "intermediate_size": layer.down.shape[1], "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim,
        "max_position_embeddings": config.context, "rms_norm_eps": config.eps,
        "attention_bias": layer.qkv_bias is not None, "mlp_bias": layer.up_bias is not None,
    }  # fmt: skip
    return transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**common, **sizes), **how)


def _stored(piece: Piece, prefix: str, value: Tensor | None, empty: dict[str, Tensor]) -> dict[str, Tensor]:
    """A piece's stored tensors, by the names and shapes that Transformers has for them."""
    names = [name for name in (prefix + stored for stored in piece.stored) if name in empty]
    if value is None or not names:
        return {}
    rows = [empty[name].shape[1 if piece.turned else 0] for name in names]
    parts = [part.T if piece.turned and part.ndim == 2 else part for part in value.split(rows)]
    return {name: part.contiguous() for name, part in zip(names, parts)}


def _fill_buffers(made: Any, model: Transformer) -> None:
    """What a model computes for itself when it is not made of nothing."""
    frequencies = model.config.frequencies
    for module in made.modules():
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_meta:
                continue
            if name.endswith("inv_freq") and frequencies is not None:
                module._buffers[name] = frequencies.inverse(model.device).clone()
                module.attention_scaling = frequencies.scaling
            elif buffer.dtype == torch.bool and buffer.shape[-1] == buffer.shape[-2]:  # GPT-2's causal mask
                module._buffers[name] = torch.ones(buffer.shape, dtype=torch.bool, device=model.device).tril()
