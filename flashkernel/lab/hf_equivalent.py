"""The HF equivalent of an engine model: a Transformers model with the same weights, the baseline and the reference.

On a GPU it shares the engine's memory wherever a stored tensor is a range of rows of an engine weight, so that both fit
side by side. On a CPU, where the engine stores some weights column-major, it has contiguous copies. Quantized weights
are dequantized.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flashkernel import Weight
from flashkernel.engine.architectures import ARCHITECTURES, StoredWeight
from flashkernel.engine.transformer import Transformer
from flashkernel.lab.packages import require

ARCHITECTURES_BUILT = ("llama", "gpt2")  # a "random" model is gpt2 if it has learned positions, else llama


def build_hf_equivalent(model: Transformer, attention: str = "sdpa") -> Any:
    """Returns a Transformers model in eval mode with the weights of `model`.

    Args:
        model: an engine model of the llama or gpt2 architecture.
        attention: Transformers' `attn_implementation`.

    Raises:
        MissingPackageError: Transformers is not installed.
        ValueError: the architecture is not supported here.
    """
    require("transformers", "a comparison with Transformers")
    kind = model.config.architecture
    if kind == "random":
        kind = "llama" if model.weights.position_embedding is None else "gpt2"
    if kind not in ARCHITECTURES_BUILT:
        raise ValueError(f"hf_equivalent: {kind} models are not supported; supported: {', '.join(ARCHITECTURES_BUILT)}")
    with torch.device("meta"):
        made = _build(kind, model, attention)
    empty, architecture = made.state_dict(), ARCHITECTURES[kind]
    weights: dict[str, Tensor] = {}
    parts: list[tuple[Mapping[str, StoredWeight], str, Any]] = [(architecture.model_weights, "", model.weights)]
    parts += [
        (architecture.layer_weights, architecture.layer_prefix.format(i), layer) for i, layer in enumerate(model.layers)
    ]
    for table, prefix, holder in parts:
        for name, piece in table.items():
            value = getattr(holder, name)
            plain = value.dequantize(model.dtype) if isinstance(value, Weight) else value
            weights |= _stored(piece, prefix, plain, empty)
    made.load_state_dict(weights, strict=False, assign=True)
    made.tie_weights()
    _fill_buffers(made, model)
    left = [name for name, x in (*made.named_parameters(), *made.named_buffers()) if x.is_meta]
    if left:
        raise ValueError(f"hf_equivalent: {', '.join(left[:4])} of the {kind} model got no values")
    return made.requires_grad_(False).eval()


def _build(kind: str, model: Transformer, attention: str) -> Any:
    import transformers

    config = model.config
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size, "tie_word_embeddings": config.tie_word_embeddings, "bos_token_id": None,
        "eos_token_id": None, "pad_token_id": None,
    }  # fmt: skip
    how: dict[str, Any] = {"attn_implementation": attention, "dtype": model.dtype}
    layer = model.layers[0]
    if kind == "gpt2":
        sizes: dict[str, Any] = {
            "n_embd": config.hidden_size, "n_layer": config.num_layers, "n_head": config.heads,
            "n_positions": config.max_position_embeddings, "n_inner": layer.gate_up_proj.shape[0],
            "layer_norm_epsilon": config.eps,
        }  # fmt: skip
        return transformers.GPT2LMHeadModel._from_config(transformers.GPT2Config(**common, **sizes), **how)
    sizes = {
        "hidden_size": config.hidden_size, "intermediate_size": layer.down_proj.shape[1],
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.heads, "num_key_value_heads": config.kv_heads, "head_dim": config.head_dim,
        "max_position_embeddings": config.max_position_embeddings, "rms_norm_eps": config.eps,
        "attention_bias": layer.qkv_proj_bias is not None, "mlp_bias": layer.gate_up_proj_bias is not None,
    }  # fmt: skip
    return transformers.LlamaForCausalLM._from_config(transformers.LlamaConfig(**common, **sizes), **how)


def _stored(piece: StoredWeight, prefix: str, value: Tensor | None, empty: dict[str, Tensor]) -> dict[str, Tensor]:
    """A weight's stored tensors, by the names and with the shapes that Transformers has for them."""
    names = [name for name in (prefix + stored for stored in piece.names) if name in empty]
    if value is None or not names:
        return {}
    rows = [empty[name].shape[1 if piece.transposed else 0] for name in names]
    parts = [part.T if piece.transposed and part.ndim == 2 else part for part in value.split(rows)]
    return {name: part.contiguous() for name, part in zip(names, parts)}


def _fill_buffers(made: Any, model: Transformer) -> None:
    """Fills the buffers that a model built on the meta device did not compute: RoPE frequencies, GPT-2's mask."""
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
