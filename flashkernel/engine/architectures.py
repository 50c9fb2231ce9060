"""Table of architectures: how to read each config.json, and which stored tensors each weight is made of.

One transformer serves them all (`transformer.py`). GGUF files are translated to the same names (`gguf.py`). A new
architecture that is built from the same parts is an entry here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from flashkernel import Frequencies
from flashkernel.engine.config import HFConfig, ModelConfig, ModelError


@dataclass(frozen=True)
class StoredWeight:
    """Where a weight of the transformer is stored: tensors whose rows are concatenated.

    `transposed` tensors are stored (in, out). A name with {expert} is one tensor for each expert; they are stacked.
    """

    names: tuple[str, ...]
    transposed: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Architecture:
    """How one family of models is stored, and how its config.json is read."""

    configure: Callable[[HFConfig], ModelConfig]
    model_weights: Mapping[str, StoredWeight]  # by the fields of ModelWeights
    layer_weights: Mapping[str, StoredWeight]  # by the fields of LayerWeights
    layer_prefix: str = "model.layers.{}."
    ignored: tuple[str, ...] = field(default=("rotary_emb.inv_freq",))  # suffixes of tensors that are no weights


def _stored(name: str, **options: bool) -> StoredWeight:
    return StoredWeight((name,), **options)


def _llama_config(config: HFConfig) -> ModelConfig:
    heads, hidden = config.size("num_attention_heads"), config.size("hidden_size")
    head_dim = config.get("head_dim", hidden // heads if heads else 0)
    layers = config.size("num_hidden_layers")
    activation = config.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{config.source}: hidden_act is {activation!r}; this architecture is run with silu alone")
    return ModelConfig(
        architecture=config.need("model_type"),
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        heads=heads,
        kv_heads=config.get("num_key_value_heads", heads),
        head_dim=head_dim,
        max_position_embeddings=config.size("max_position_embeddings"),
        norm="rms",
        eps=config.get("rms_norm_eps", 1e-6),
        activation="swiglu",
        packed="halves",
        frequencies=_frequencies({**config.values, "head_dim": head_dim}),
        sliding_windows=config.sliding_windows(layers),
        tie_word_embeddings=config.get("tie_word_embeddings", False),
        eos_token_ids=config.eos_token_ids(),
        dtype=config.get("dtype", config.get("torch_dtype", "float32")),
    )


def _frequencies(values: Mapping[str, object]) -> Frequencies:
    found = Frequencies.from_hf(values)
    divisors = values.get("rope_divisors")  # GGUF files state Llama 3's rule as a divisor for each pair
    if isinstance(divisors, (list, tuple)):
        found = Frequencies(tuple(value / by for value, by in zip(found.values, divisors)), found.scaling)
    return found


def _moe_config(config: HFConfig) -> ModelConfig:
    experts, each = config.size("num_local_experts"), config.size("num_experts_per_tok")
    if not 1 <= each <= experts:
        raise ModelError(f"{config.source}: {each} of {experts} experts cannot serve a token")
    return replace(_llama_config(config), num_experts=experts, num_experts_per_token=each)


def _qwen3_moe_config(config: HFConfig) -> ModelConfig:
    # Released files have num_experts; Transformers 5 saves num_local_experts.
    name = "num_experts" if config.get("num_experts", None) is not None else "num_local_experts"
    experts, each = config.size(name), config.size("num_experts_per_tok")
    if not 1 <= each <= experts:
        raise ModelError(f"{config.source}: {each} of {experts} experts cannot serve a token")
    if config.get("decoder_sparse_step", 1) != 1 or config.get("mlp_only_layers", []):
        raise ModelError(f"{config.source}: some of its layers have no experts, which is not supported")
    return replace(
        _llama_config(config), num_experts=experts, num_experts_per_token=each,
        normalize_router=config.get("norm_topk_prob", False),
    )  # fmt: skip


def _gemma3_config(config: HFConfig) -> ModelConfig:
    """Gemma 3's text model: norms with an offset and after each block, two rotary embeddings, scaled embeddings."""
    for name in ("final_logit_softcapping", "attn_logit_softcapping"):
        if config.values.get(name) is not None:
            raise ModelError(f"{config.source}: {name} is {config.values[name]}; soft caps are not supported")
    if config.get("hidden_activation", "gelu_pytorch_tanh") != "gelu_pytorch_tanh":
        raise ModelError(
            f"{config.source}: hidden_activation is {config.values['hidden_activation']!r}, not GeGLU's tanh"
        )
    head_dim = config.get("head_dim", 256)
    values = {**config.values, "head_dim": head_dim}
    plain = {name: value for name, value in values.items() if name not in ("rope_parameters", "rope_scaling")}
    local: dict[str, object] = {**plain, "rope_theta": config.get("rope_local_base_freq", 10000.0)}
    nested = isinstance(config.get("rope_parameters", {}).get("full_attention"), Mapping)
    known = _llama_config(HFConfig({**plain, "hidden_act": "silu", "tie_word_embeddings": True}, config.source))
    return replace(
        known,
        activation="geglu",
        frequencies=Frequencies.from_hf(values, "full_attention" if nested else None),
        local_frequencies=Frequencies.from_hf(*((values, "sliding_attention") if nested else (local, None))),
        norm_offset=1.0,
        embedding_scale=known.hidden_size**0.5,
        attention_scale=config.get("query_pre_attn_scalar", head_dim) ** -0.5,
        tie_word_embeddings=config.get("tie_word_embeddings", True),
    )


def _gpt_oss_config(config: HFConfig) -> ModelConfig:
    if config.get("swiglu_limit", 7.0) != 7.0:
        raise ModelError(f"{config.source}: swiglu_limit is {config.need('swiglu_limit')}; 7.0 alone is known")
    return replace(_moe_config(config), activation="gpt_oss_glu", packed="interleaved")


def _gpt2_config(config: HFConfig) -> ModelConfig:
    heads, hidden, layers = config.size("n_head"), config.size("n_embd"), config.size("n_layer")
    activations = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
    activation = config.get("activation_function", "gelu_new")
    if activation not in activations:
        raise ModelError(f"{config.source}: activation_function is {activation!r}; known are {', '.join(activations)}")
    if config.get("scale_attn_by_inverse_layer_idx", False) or not config.get("scale_attn_weights", True):
        raise ModelError(f"{config.source}: GPT-2 with unusual scaling of attention is not supported")
    return ModelConfig(
        architecture="gpt2",
        vocab_size=config.size("vocab_size"),
        hidden_size=hidden,
        num_layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        max_position_embeddings=config.size("n_positions"),
        norm="layer",
        eps=config.get("layer_norm_epsilon", 1e-5),
        activation=activations[activation],
        packed="halves",
        frequencies=None,
        sliding_windows=(None,) * layers,
        tie_word_embeddings=config.get("tie_word_embeddings", True),
        eos_token_ids=config.eos_token_ids(),
        dtype=config.get("dtype", config.get("torch_dtype", "float32")),
    )


_MODEL = {
    "embedding": _stored("model.embed_tokens.weight"),
    "final_norm": _stored("model.norm.weight"),
    "lm_head": _stored("lm_head.weight", optional=True),
}
_ATTENTION = {
    "attention_norm": _stored("input_layernorm.weight"),
    "qkv_proj": StoredWeight(("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")),
    "qkv_proj_bias": StoredWeight(
        ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"), optional=True
    ),
    "o_proj": _stored("self_attn.o_proj.weight"),
    "o_proj_bias": _stored("self_attn.o_proj.bias", optional=True),
    "mlp_norm": _stored("post_attention_layernorm.weight"),
}
_GATED = {
    "gate_up_proj": StoredWeight(("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "gate_up_proj_bias": StoredWeight(("mlp.gate_proj.bias", "mlp.up_proj.bias"), optional=True),
    "down_proj": _stored("mlp.down_proj.weight"),
    "down_proj_bias": _stored("mlp.down_proj.bias", optional=True),
}
_QK_NORM = {"q_norm": _stored("self_attn.q_norm.weight"), "k_norm": _stored("self_attn.k_norm.weight")}
_MIXTRAL_EXPERTS = {
    "router": _stored("block_sparse_moe.gate.weight"),
    "gate_up_proj": StoredWeight(
        ("block_sparse_moe.experts.{expert}.w1.weight", "block_sparse_moe.experts.{expert}.w3.weight")
    ),
    "down_proj": _stored("block_sparse_moe.experts.{expert}.w2.weight"),
}
_QWEN3_EXPERTS = {
    "router": _stored("mlp.gate.weight"),
    "gate_up_proj": StoredWeight(("mlp.experts.{expert}.gate_proj.weight", "mlp.experts.{expert}.up_proj.weight")),
    "down_proj": _stored("mlp.experts.{expert}.down_proj.weight"),
}
_PHI3 = {
    "attention_norm": _stored("input_layernorm.weight"),
    "qkv_proj": _stored("self_attn.qkv_proj.weight"),
    "o_proj": _stored("self_attn.o_proj.weight"),
    "mlp_norm": _stored("post_attention_layernorm.weight"),
    "gate_up_proj": _stored("mlp.gate_up_proj.weight"),
    "down_proj": _stored("mlp.down_proj.weight"),
}
_GEMMA3_NORMS = {
    "attention_post_norm": _stored("post_attention_layernorm.weight"),
    "mlp_norm": _stored("pre_feedforward_layernorm.weight"),
    "mlp_post_norm": _stored("post_feedforward_layernorm.weight"),
}
_GPT_OSS_EXPERTS = {
    "sinks": _stored("self_attn.sinks"),
    "router": _stored("mlp.router.weight"),
    "router_bias": _stored("mlp.router.bias"),
    "gate_up_proj": _stored("mlp.experts.gate_up_proj", transposed=True),
    "gate_up_proj_bias": _stored("mlp.experts.gate_up_proj_bias"),
    "down_proj": _stored("mlp.experts.down_proj", transposed=True),
    "down_proj_bias": _stored("mlp.experts.down_proj_bias"),
}
_LLAMA = Architecture(_llama_config, _MODEL, {**_ATTENTION, **_GATED})
_GPT2 = Architecture(
    _gpt2_config,
    {
        "embedding": _stored("transformer.wte.weight"),
        "position_embedding": _stored("transformer.wpe.weight"),
        "final_norm": _stored("transformer.ln_f.weight"),
        "final_norm_bias": _stored("transformer.ln_f.bias"),
        "lm_head": _stored("lm_head.weight", optional=True),
    },
    {
        "attention_norm": _stored("ln_1.weight"),
        "attention_norm_bias": _stored("ln_1.bias"),
        "qkv_proj": _stored("attn.c_attn.weight", transposed=True),
        "qkv_proj_bias": _stored("attn.c_attn.bias"),
        "o_proj": _stored("attn.c_proj.weight", transposed=True),
        "o_proj_bias": _stored("attn.c_proj.bias"),
        "mlp_norm": _stored("ln_2.weight"),
        "mlp_norm_bias": _stored("ln_2.bias"),
        "gate_up_proj": _stored("mlp.c_fc.weight", transposed=True),
        "gate_up_proj_bias": _stored("mlp.c_fc.bias"),
        "down_proj": _stored("mlp.c_proj.weight", transposed=True),
        "down_proj_bias": _stored("mlp.c_proj.bias"),
    },
    layer_prefix="transformer.h.{}.",
    ignored=("attn.bias", "attn.masked_bias"),
)

# Transformers' model_type -> architecture
ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": Architecture(_llama_config, _MODEL, {**_ATTENTION, **_QK_NORM, **_GATED}),
    "mixtral": Architecture(_moe_config, _MODEL, {**_ATTENTION, **_MIXTRAL_EXPERTS}),
    "qwen3_moe": Architecture(_qwen3_moe_config, _MODEL, {**_ATTENTION, **_QK_NORM, **_QWEN3_EXPERTS}),
    "gpt_oss": Architecture(_gpt_oss_config, _MODEL, {**_ATTENTION, **_GPT_OSS_EXPERTS}),
    "gpt2": _GPT2,
    "phi3": Architecture(_llama_config, _MODEL, _PHI3),
    "gemma3_text": Architecture(_gemma3_config, _MODEL, {**_ATTENTION, **_QK_NORM, **_GATED, **_GEMMA3_NORMS}),
}


def architecture_of(config: HFConfig) -> Architecture:
    """The architecture that a config.json names; ModelError if it is unknown."""
    kind = config.need("model_type")
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"{config.source}: models of type {kind!r} are not known; there are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[kind]
