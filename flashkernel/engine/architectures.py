"""The architectures: for each, where its numbers and its weights stand in what Transformers saves.

One transformer serves them all (`transformer.py`); this table says which stored tensors its pieces are made of. GGUF
files are translated to the same names (`gguf.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from flashkernel import Frequencies
from flashkernel.engine.config import ModelConfig, ModelError, Settings


@dataclass(frozen=True)
class Piece:
    """A tensor of the transformer: stored tensors, their rows one behind the other.

    `turned` are stored (in, out). A name with {expert} stands for one tensor of each expert, which are stacked.
    """

    stored: tuple[str, ...]
    turned: bool = False
    optional: bool = False


@dataclass(frozen=True)
class Architecture:
    """How one family of models is stored, and how its configuration reads."""

    configure: Callable[[Settings], ModelConfig]
    outer: Mapping[str, Piece]
    layer: Mapping[str, Piece]
    layer_prefix: str = "model.layers.{}."
    ignored: tuple[str, ...] = field(default=("rotary_emb.inv_freq",))  # endings of names that hold no weights


def _one(name: str, **how: bool) -> Piece:
    return Piece((name,), **how)


def _llama_config(settings: Settings) -> ModelConfig:
    heads, hidden = settings.size("num_attention_heads"), settings.size("hidden_size")
    head_dim = settings.get("head_dim", hidden // heads if heads else 0)
    layers = settings.size("num_hidden_layers")
    activation = settings.get("hidden_act", "silu")
    if activation not in ("silu", "swish"):
        raise ModelError(f"{settings.place}: hidden_act is {activation!r}; this architecture is run with silu alone")
    return ModelConfig(
        architecture=settings.need("model_type"),
        vocab=settings.size("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=settings.get("num_key_value_heads", heads),
        head_dim=head_dim,
        context=settings.size("max_position_embeddings"),
        norm="rms",
        eps=settings.get("rms_norm_eps", 1e-6),
        activation="swiglu",
        packed="halves",
        frequencies=_frequencies({**settings.values, "head_dim": head_dim}),
        windows=settings.windows(layers),
        tied=settings.get("tie_word_embeddings", False),
        stop_tokens=settings.stop_tokens(),
        dtype=settings.get("dtype", settings.get("torch_dtype", "float32")),
    )


def _frequencies(values: Mapping[str, object]) -> Frequencies:
    found = Frequencies.from_hf(values)
    divisors = values.get("rope_divisors")  # GGUF files state Llama 3's rule as a divisor for each pair
    if isinstance(divisors, (list, tuple)):
        found = Frequencies(tuple(value / by for value, by in zip(found.values, divisors)), found.scaling)
    return found


def _moe_config(settings: Settings) -> ModelConfig:
    experts, each = settings.size("num_local_experts"), settings.size("num_experts_per_tok")
    if not 1 <= each <= experts:
        raise ModelError(f"{settings.place}: {each} of {experts} experts cannot serve a token")
    return replace(_llama_config(settings), experts=experts, experts_per_token=each)


def _gpt_oss_config(settings: Settings) -> ModelConfig:
    if settings.get("swiglu_limit", 7.0) != 7.0:
        raise ModelError(f"{settings.place}: swiglu_limit is {settings.need('swiglu_limit')}; 7.0 alone is known")
    return replace(_moe_config(settings), activation="gpt_oss_glu", packed="interleaved")


def _gpt2_config(settings: Settings) -> ModelConfig:
    heads, hidden, layers = settings.size("n_head"), settings.size("n_embd"), settings.size("n_layer")
    activations = {"gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh", "gelu": "gelu", "relu": "relu"}
    activation = settings.get("activation_function", "gelu_new")
    if activation not in activations:
        raise ModelError(f"{settings.place}: activation_function is {activation!r}; known are {', '.join(activations)}")
    if settings.get("scale_attn_by_inverse_layer_idx", False) or not settings.get("scale_attn_weights", True):
        raise ModelError(f"{settings.place}: GPT-2 with unusual scaling of attention is not supported")
    return ModelConfig(
        architecture="gpt2",
        vocab=settings.size("vocab_size"),
        hidden=hidden,
        layers=layers,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        context=settings.size("n_positions"),
        norm="layer",
        eps=settings.get("layer_norm_epsilon", 1e-5),
        activation=activations[activation],
        packed="halves",
        frequencies=None,
        windows=(None,) * layers,
        tied=settings.get("tie_word_embeddings", True),
        stop_tokens=settings.stop_tokens(),
        dtype=settings.get("dtype", settings.get("torch_dtype", "float32")),
    )


_OUTER = {
    "embedding": _one("model.embed_tokens.weight"),
    "final_norm": _one("model.norm.weight"),
    "head": _one("lm_head.weight", optional=True),
}
_ATTENTION = {
    "attention_norm": _one("input_layernorm.weight"),
    "qkv": Piece(("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")),
    "qkv_bias": Piece(("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias"), optional=True),
    "out": _one("self_attn.o_proj.weight"),
    "out_bias": _one("self_attn.o_proj.bias", optional=True),
    "mlp_norm": _one("post_attention_layernorm.weight"),
}
_GATED = {
    "up": Piece(("mlp.gate_proj.weight", "mlp.up_proj.weight")),
    "up_bias": Piece(("mlp.gate_proj.bias", "mlp.up_proj.bias"), optional=True),
    "down": _one("mlp.down_proj.weight"),
    "down_bias": _one("mlp.down_proj.bias", optional=True),
}
_QK_NORM = {"q_norm": _one("self_attn.q_norm.weight"), "k_norm": _one("self_attn.k_norm.weight")}
_MIXTRAL_EXPERTS = {
    "router": _one("block_sparse_moe.gate.weight"),
    "up": Piece(("block_sparse_moe.experts.{expert}.w1.weight", "block_sparse_moe.experts.{expert}.w3.weight")),
    "down": _one("block_sparse_moe.experts.{expert}.w2.weight"),
}
_GPT_OSS_EXPERTS = {
    "sinks": _one("self_attn.sinks"),
    "router": _one("mlp.router.weight"),
    "router_bias": _one("mlp.router.bias"),
    "up": _one("mlp.experts.gate_up_proj", turned=True),
    "up_bias": _one("mlp.experts.gate_up_proj_bias"),
    "down": _one("mlp.experts.down_proj", turned=True),
    "down_bias": _one("mlp.experts.down_proj_bias"),
}
_LLAMA = Architecture(_llama_config, _OUTER, {**_ATTENTION, **_GATED})
_GPT2 = Architecture(
    _gpt2_config,
    {
        "embedding": _one("transformer.wte.weight"),
        "positions": _one("transformer.wpe.weight"),
        "final_norm": _one("transformer.ln_f.weight"),
        "final_norm_bias": _one("transformer.ln_f.bias"),
        "head": _one("lm_head.weight", optional=True),
    },
    {
        "attention_norm": _one("ln_1.weight"),
        "attention_norm_bias": _one("ln_1.bias"),
        "qkv": _one("attn.c_attn.weight", turned=True),
        "qkv_bias": _one("attn.c_attn.bias"),
        "out": _one("attn.c_proj.weight", turned=True),
        "out_bias": _one("attn.c_proj.bias"),
        "mlp_norm": _one("ln_2.weight"),
        "mlp_norm_bias": _one("ln_2.bias"),
        "up": _one("mlp.c_fc.weight", turned=True),
        "up_bias": _one("mlp.c_fc.bias"),
        "down": _one("mlp.c_proj.weight", turned=True),
        "down_bias": _one("mlp.c_proj.bias"),
    },
    layer_prefix="transformer.h.{}.",
    ignored=("attn.bias", "attn.masked_bias"),
)

# Transformers' model_type -> how it is stored
ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": Architecture(_llama_config, _OUTER, {**_ATTENTION, **_QK_NORM, **_GATED}),
    "mixtral": Architecture(_moe_config, _OUTER, {**_ATTENTION, **_MIXTRAL_EXPERTS}),
    "gpt_oss": Architecture(_gpt_oss_config, _OUTER, {**_ATTENTION, **_GPT_OSS_EXPERTS}),
    "gpt2": _GPT2,
}


def architecture_of(settings: Settings) -> Architecture:
    kind = settings.need("model_type")
    if kind not in ARCHITECTURES:
        raise ModelError(
            f"{settings.place}: models of type {kind!r} are not known; there are {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[kind]
