"""Tiny random models of every architecture the engine knows, saved as Transformers saves them, and as GGUF."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCAB, CONTEXT = 320, 256
END = "<|end|>"
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": None,
    "eos_token_id": 0,
}
_YARN = {
    "rope_type": "yarn", "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 64, "rope_theta": 10000.0,
}  # fmt: skip
_LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32, "rope_theta": 500000.0,
}  # fmt: skip
_PARTIAL = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75}
_MOE = {"num_local_experts": 4, "num_experts_per_tok": 2}


def configs() -> dict[str, transformers.PretrainedConfig]:
    gpt2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
    ends = {"vocab_size": VOCAB, "bos_token_id": 0, "eos_token_id": 0}
    return {
        "llama": transformers.LlamaConfig(**_SIZES, tie_word_embeddings=True),
        "llama3": transformers.LlamaConfig(**_SIZES, rope_parameters=_LLAMA3, attention_bias=True, mlp_bias=True),
        "mistral": transformers.MistralConfig(**_SIZES, sliding_window=8, head_dim=16),
        "qwen2": transformers.Qwen2Config(**_SIZES),
        "qwen3": transformers.Qwen3Config(**_SIZES, head_dim=16),
        "gpt2": transformers.GPT2Config(**gpt2, **ends),
        "gpt_oss": transformers.GptOssConfig(**_SIZES, **_MOE, head_dim=16, sliding_window=8, rope_parameters=_YARN),
        "mixtral": transformers.MixtralConfig(**_SIZES, **_MOE),
        "qwen3_moe": transformers.Qwen3MoeConfig(
            **_SIZES, head_dim=16, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=False
        ),
        "phi3": transformers.Phi3Config(**_SIZES, pad_token_id=0, rope_parameters=_PARTIAL),
        "gemma3_text": transformers.Gemma3TextConfig(
            **_SIZES,
            head_dim=16,
            sliding_window=8,
            query_pre_attn_scalar=20,
            layer_types=["sliding_attention", "full_attention"],
        ),
    }


NAMES = tuple(configs())


def build(
    name: str, config: transformers.PretrainedConfig | None = None, **changed: Any
) -> transformers.PreTrainedModel:
    """A model whose logits are far apart, so that a rounding error changes no greedy token; `changed`: its config."""
    torch.manual_seed(sum(map(ord, name)))
    config = config or configs()[name]
    config.update(changed)
    model = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            spread, center = (0.3, 0.0) if parameter.ndim > 1 else (0.2, float(parameter.mean()))
            parameter.normal_(center, spread)
    return model


def save(name: str, folder: Path, shards: bool = False) -> transformers.PreTrainedModel:
    """A model in a folder, with a tokenizer; `shards` spreads its weights over several files."""
    model = build(name)
    model.save_pretrained(folder, max_shard_size="20KB" if shards else "5GB")
    tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"eos_token": END, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return model


TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}{{ eos_token }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


def tokenizer() -> Tokenizer:
    """Byte pairs over all bytes, with a few merges."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=[END], initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )  # fmt: skip
    made.train_from_iterator(["the sea and the wind and the sand on the shore of the island"] * 4, trainer)
    return made


def hf_greedy(model: transformers.PreTrainedModel, prompt: list[int], count: int) -> list[int]:
    """What Transformers generates."""
    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    return found[0, len(prompt) :].tolist()


def prompts(lengths: tuple[int, ...], seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(1, VOCAB, (length,), generator=generator).tolist() for length in lengths]


def save_gguf(model: transformers.PreTrainedModel, path: Path, quantized: str | dict[str, str] | None = None) -> None:
    """A Llama as llama.cpp stores it: rows of q and k in the order of interleaved pairs.

    `quantized` is the kind of all matrices, or kinds by parts of their names; the first that fits is taken.
    """
    import gguf

    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    _add_vocabulary(writer)
    names = {
        "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    outer = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
    for name, value in model.state_dict().items():
        data = value.numpy()
        if name == "lm_head.weight":  # tied
            continue
        if name in outer:
            target = outer[name]
        else:
            number, rest = name.removeprefix("model.layers.").split(".", 1)
            module, _, last = rest.rpartition(".")
            part = names[module]
            target = f"blk.{number}.{part}.{last}"
            if part in heads:
                shape = (heads[part], 2, -1, *data.shape[1:])
                data = data.reshape(shape).swapaxes(1, 2).reshape(data.shape)
        if quantized and data.ndim == 2 and data.shape[1] % 32 == 0:
            kinds = {"": quantized} if isinstance(quantized, str) else quantized
            kind = gguf.GGMLQuantizationType[next(one for part, one in kinds.items() if part in target)]
            writer.add_tensor(target, gguf.quants.quantize(data.copy(), kind), raw_dtype=kind)
        else:
            writer.add_tensor(target, data.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_vocabulary(writer: Any) -> None:
    stored = json.loads(tokenizer().to_str())["model"]
    tokens = sorted(stored["vocab"], key=stored["vocab"].get)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3 if token == END else 1 for token in tokens])
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in stored["merges"]]
    writer.add_token_merges(merges)
    writer.add_eos_token_id(0)
    writer.add_chat_template(TEMPLATE)
