"""Tables of the modules that `patch` knows, and what each is made of.

A key is "<family>.<class>" of a module in transformers.models, or "torch.<class>" of one in torch.nn. Only the class
itself matches: a subclass, or a class of the same name from elsewhere, may compute something else.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import nn

_LLAMAS = {
    "llama": "Llama", "mistral": "Mistral", "mixtral": "Mixtral", "qwen2": "Qwen2", "qwen3": "Qwen3",
    "gpt_oss": "GptOss",
}  # fmt: skip
_ROUTED = {"qwen3_moe": "Qwen3Moe", "deepseek_v2": "DeepseekV2", "deepseek_v3": "DeepseekV3"}
_GEMMAS = {"gemma": "Gemma", "gemma2": "Gemma2", "gemma3": "Gemma3"}


@dataclass(frozen=True)
class Norm:
    """An RMSNorm or a LayerNorm over the last dim; `eps` names its attribute."""

    eps: str
    offset: float = 0.0
    rms: bool = True
    promotes: bool = True  # the output has the wider dtype of input and weight; else the input's


@dataclass(frozen=True)
class Attention:
    """Projections, rotary embedding, cache and attention; `options` maps the interface's arguments to attributes."""

    options: dict[str, str] = field(default_factory=dict)
    head_norms: bool = False  # q_norm and k_norm over each head


@dataclass(frozen=True)
class Head:
    """A causal language model: its loss is computed from the hidden states and lm_head."""

    output: str = "CausalLMOutputWithPast"
    softcap: bool = False  # config.final_logit_softcapping bounds the logits
    routed: bool = False  # a router's loss may be added


_WINDOW = {"sliding_window": "sliding_window"}

NORMS: dict[str, Norm] = {
    **{f"{family}.{name}RMSNorm": Norm("variance_epsilon") for family, name in {**_LLAMAS, **_ROUTED}.items()},
    **{f"{family}.{name}RMSNorm": Norm("eps", offset=1.0, promotes=False) for family, name in _GEMMAS.items()},
    "gpt_oss.GptOssRMSNorm": Norm("variance_epsilon", promotes=False),
    "torch.LayerNorm": Norm("eps", rms=False),
}

ATTENTIONS: dict[str, Attention] = {
    "llama.LlamaAttention": Attention(),
    "mistral.MistralAttention": Attention({"sliding_window": "config.sliding_window"}),
    "mixtral.MixtralAttention": Attention({"sliding_window": "config.sliding_window"}),
    "qwen2.Qwen2Attention": Attention(_WINDOW),
    "qwen3.Qwen3Attention": Attention(_WINDOW, head_norms=True),
    "qwen3_moe.Qwen3MoeAttention": Attention(_WINDOW, head_norms=True),
    "gemma.GemmaAttention": Attention(),
    "gemma2.Gemma2Attention": Attention({**_WINDOW, "softcap": "attn_logit_softcapping"}),
    "gemma3.Gemma3Attention": Attention(_WINDOW, head_norms=True),
    "gpt_oss.GptOssAttention": Attention({**_WINDOW, "s_aux": "sinks"}),
}

# Attention without rotary embedding: the interface computes it, and only a decoding step has a forward of its own.
GPT2_ATTENTIONS = {"gpt2.GPT2Attention"}

# down_proj(act_fn(gate_proj(x)) * up_proj(x))
GATED_MLPS = {
    f"{family}.{name}MLP"
    for family, name in {**_LLAMAS, **_GEMMAS, **_ROUTED}.items()
    if family not in ("mixtral", "gpt_oss")  # those have experts
}

# MLPs of which only the activation is replaced, and the attribute that holds it.
PLAIN_MLPS = {"gpt2.GPT2MLP": "act"}

# Decoder layers: h = x + self_attn(input_layernorm(x)), then h + mlp(post_attention_layernorm(h)), of modules above.
LAYERS = {f"{family}.{name}DecoderLayer" for family, name in _LLAMAS.items() if family not in ("mixtral", "gpt_oss")}

# Experts stored as stacks, and their activation; None: what their act_fn says.
EXPERTS: dict[str, str | None] = {
    "gpt_oss.GptOssExperts": "gpt_oss_glu",
    "mixtral.MixtralExperts": None,
    **{f"{family}.{name}Experts": None for family, name in _ROUTED.items()},
}

HEADS: dict[str, Head] = {
    **{f"{family}.{name}ForCausalLM": Head() for family, name in _LLAMAS.items()},
    "gemma.GemmaForCausalLM": Head(),
    "gemma2.Gemma2ForCausalLM": Head(softcap=True),
    "gemma3.Gemma3ForCausalLM": Head(softcap=True),
    "mixtral.MixtralForCausalLM": Head("MoeCausalLMOutputWithPast", routed=True),
    "gpt_oss.GptOssForCausalLM": Head("MoeCausalLMOutputWithPast", routed=True),
    "qwen3_moe.Qwen3MoeForCausalLM": Head("MoeCausalLMOutputWithPast", routed=True),
    "deepseek_v2.DeepseekV2ForCausalLM": Head(),
    "deepseek_v3.DeepseekV3ForCausalLM": Head(),
    "gpt2.GPT2LMHeadModel": Head("CausalLMOutputWithCrossAttentions"),
}

# Configurations (model_type) whose attention extends the tensor of an additive mask by keys of its own.
ADDITIVE_MASKS = {"deepseek_v4"}

# Modules that only contain modules of these tables.
CONTAINERS = {
    "gpt_oss.GptOssMLP", "mixtral.MixtralSparseMoeBlock", "qwen3_moe.Qwen3MoeSparseMoeBlock",
    "deepseek_v2.DeepseekV2Moe", "deepseek_v3.DeepseekV3MoE",
}  # fmt: skip


def key_of(module: nn.Module) -> str:
    """The module's key in these tables; its whole path if it is from neither Transformers nor torch."""
    kind = type(module)
    if kind.__bases__[0].__name__ == "FSDPModule":  # fully_shard makes a subclass for each class
        kind = kind.__bases__[1]
    path = kind.__module__.split(".")
    if path[:2] == ["transformers", "models"] and len(path) == 4 and path[3] == f"modeling_{path[2]}":
        return f"{path[2]}.{kind.__name__}"
    if path[:2] == ["torch", "nn"]:
        return f"torch.{kind.__name__}"
    return f"{kind.__module__}.{kind.__name__}"
