"""GGUF files as checkpoints: tensors and quantized weights under Transformers' names, configuration and tokenizer."""

from __future__ import annotations

import re
from collections.abc import Mapping, Set
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from torch import Tensor

from flashkernel import Weight
from flashkernel.blocks.weight_formats.gguf import KINDS, read_blocks
from flashkernel.engine.config import HFConfig, ModelError
from flashkernel.engine.gguf_reader import StoredTensor, read_gguf
from flashkernel.engine.tokenizer import Tokenizer

_MODEL = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "block_sparse_moe.gate",
}
_EXPERTS = {"ffn_gate_exps": "w1", "ffn_down_exps": "w2", "ffn_up_exps": "w3"}
_GPT2_MODEL = {
    "token_embd.weight": "transformer.wte.weight",
    "position_embd.weight": "transformer.wpe.weight",
    "output_norm.weight": "transformer.ln_f.weight",
    "output_norm.bias": "transformer.ln_f.bias",
    "output.weight": "lm_head.weight",
}
_GPT2_LAYER = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_ROPE_DIVISORS = "rope_freqs.weight"
_KNOWN = ("llama", "qwen2", "qwen3", "gpt2")
# Pre-tokenizers (how text is split before BPE merges), by the name that files give them.
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {
    "llama-bpe": _LLAMA3,
    "llama3": _LLAMA3,
    "llama-v3": _LLAMA3,
    "qwen2": _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),
    "smollm": "digits",
    "default": "",
    "gpt-2": "",
}
_CONTROL, _USER_DEFINED = 3, 4  # values of token_type


class GGUFCheckpoint:
    """A model in one GGUF file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._fields, self._tensors = read_gguf(path)
        kind = self._fields.get("general.architecture")
        if kind not in _KNOWN:
            raise ModelError(
                f"{path}: GGUF files of architecture {kind!r} are not known; there are {', '.join(_KNOWN)}"
            )
        self._kind: str = kind
        self._experts = int(self._field("expert_count", 0))
        self._sources = dict(self._name_all())
        self.config = HFConfig(self._translated(), str(path))

    @property
    def names(self) -> Set[str]:
        return self._sources.keys()

    def read(self, name: str) -> Tensor | Weight:
        """A tensor; a `Weight` (out, in) of a matrix in one of the formats that kernels read."""
        source, expert = self._sources[name]
        stored = self._tensors[source]
        if expert is None and len(stored.shape) == 2 and stored.kind.name in KINDS:
            return self._quantized(source, stored)
        values = self._dequantized(source, expert)
        if self._interleaved(source):
            return self._in_halves(source, values)
        if self._kind == "gpt2" and values.ndim == 2 and source.startswith("blk."):
            return values.T  # Transformers keeps GPT-2's weights (in, out)
        return values

    def _quantized(self, source: str, stored: StoredTensor) -> Weight:
        blocks = torch.from_numpy(np.array(stored.data))
        if self._interleaved(source):
            blocks = self._in_halves(source, blocks)
        return read_blocks(stored.kind.name, blocks)

    def _interleaved(self, source: str) -> bool:
        """Whether rows of a weight, or elements of a bias, are in the order of interleaved rotary pairs."""
        return self._kind == "llama" and source.split(".")[-2] in ("attn_q", "attn_k")

    def _in_halves(self, source: str, values: Tensor) -> Tensor:
        heads = self.config.size("num_attention_heads" if "attn_q" in source else "num_key_value_heads")
        if values.shape[0] % (2 * heads):
            raise ModelError(f"{self.path}: {source} has {values.shape[0]} rows, and the file says {heads} heads")
        return halves_from_interleaved(values, heads)

    def tokenizer(self) -> Tokenizer | None:
        if "tokenizer.ggml.tokens" not in self._fields:
            return None
        return _tokenizer(self._fields, str(self.path))

    def _dequantized(self, source: str, expert: int | None) -> Tensor:
        from gguf.quants import dequantize

        stored = self._tensors[source]
        data = stored.data if expert is None else stored.data[expert]
        try:
            values = dequantize(data, stored.kind)
        except (NotImplementedError, ValueError) as error:
            raise ModelError(f"{self.path}: {source} is stored as {stored.kind.name}: {error}") from error
        if not values.flags.writeable or not values.flags.c_contiguous:
            values = np.array(values)
        return torch.from_numpy(values)

    def _field(self, name: str, default: Any = None) -> Any:
        return self._fields.get(f"{self._kind}.{name}", default)

    def _name_all(self) -> dict[str, tuple[str, int | None]]:
        """Transformers' name of each tensor -> (its name in the file, index of the expert)."""
        model, layer = (_GPT2_MODEL, _GPT2_LAYER) if self._kind == "gpt2" else (_MODEL, _LAYER)
        prefix = "transformer.h" if self._kind == "gpt2" else "model.layers"
        found: dict[str, tuple[str, int | None]] = {}
        for name in self._tensors:
            parts = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
            if name in model:
                found[model[name]] = (name, None)
            elif parts and parts[2] in layer:
                found[f"{prefix}.{parts[1]}.{layer[parts[2]]}.{parts[3]}"] = (name, None)
            elif parts and parts[2] in _EXPERTS:
                for expert in range(self._experts):
                    which = f"block_sparse_moe.experts.{expert}.{_EXPERTS[parts[2]]}.weight"
                    found[f"{prefix}.{parts[1]}.{which}"] = (name, expert)
            elif name != _ROPE_DIVISORS:
                found[name] = (name, None)  # loading reports it as unknown
        return found

    def _translated(self) -> dict[str, Any]:
        """The configuration as config.json would have it."""
        heads, hidden = self._field("attention.head_count"), self._field("embedding_length")
        stops = [self._fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot")]
        common = {
            "model_type": "mixtral" if self._kind == "llama" and self._experts else self._kind,
            "vocab_size": self._vocabulary_size(),
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "eos_token_id": sorted({stop for stop in stops if stop is not None}) or None,
            "dtype": "bfloat16",
        }
        if self._kind == "gpt2":
            own = {"n_head": heads, "n_embd": hidden, "n_layer": self._field("block_count")}
            own |= {"n_positions": self._field("context_length")}
            own |= {"layer_norm_epsilon": self._field("attention.layer_norm_epsilon")}
            return common | own
        divisors = None
        if _ROPE_DIVISORS in self._tensors:
            divisors = self._dequantized(_ROPE_DIVISORS, None).flatten().tolist()
        return common | {
            "num_attention_heads": heads,
            "hidden_size": hidden,
            "num_hidden_layers": self._field("block_count"),
            "num_key_value_heads": self._field("attention.head_count_kv", heads),
            "head_dim": self._field("attention.key_length"),
            "max_position_embeddings": self._field("context_length"),
            "rms_norm_eps": self._field("attention.layer_norm_rms_epsilon"),
            "sliding_window": self._field("attention.sliding_window"),
            "num_local_experts": self._experts or None,
            "num_experts_per_tok": self._field("expert_used_count"),
            "rope_parameters": self._rope(),
            "rope_divisors": divisors,
        }

    def _vocabulary_size(self) -> int | None:
        embedding = self._tensors.get("token_embd.weight")
        return None if embedding is None else embedding.shape[0]

    def _rope(self) -> dict[str, Any]:
        rule: dict[str, Any] = {"rope_theta": self._field("rope.freq_base", 10000.0), "rope_type": "default"}
        kind = self._field("rope.scaling.type", "none")
        if kind != "none":
            rule |= {"rope_type": kind, "factor": self._field("rope.scaling.factor")}
            rule |= {"original_max_position_embeddings": self._field("rope.scaling.original_context_length")}
        return rule


def halves_from_interleaved(weight: Tensor, heads: int) -> Tensor:
    """Reorders the rows of a q or k weight or bias from interleaved rotary pairs (llama.cpp) to two halves (HF)."""
    return weight.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(weight.shape)


def _tokenizer(fields: Mapping[str, Any], source: str) -> Tokenizer:
    """The BPE tokenizer that a file describes."""
    kind = fields.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise ModelError(
            f"{source}: its vocabulary is of kind {kind!r}, and byte pairs ('gpt2') alone are read; use the model's "
            "safetensors folder, or give prompts as tokens"
        )
    tokens: list[str] = fields["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ", 1)) for pair in fields.get("tokenizer.ggml.merges", [])]
    vocabulary = {token: number for number, token in enumerate(tokens)}
    backend = Backend(models.BPE(vocab=vocabulary, merges=merges, ignore_merges="llama" in _pre_tokenizer_name(fields)))
    backend.pre_tokenizer = _pre_tokenizer(_pre_tokenizer_name(fields), source)
    backend.decoder = decoders.ByteLevel()
    kinds = fields.get("tokenizer.ggml.token_type", [])
    control = [token for token, kind in zip(tokens, kinds) if kind == _CONTROL]
    defined = [token for token, kind in zip(tokens, kinds) if kind == _USER_DEFINED]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    backend.add_tokens([AddedToken(token, normalized=False) for token in defined])
    names = {name: fields.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos")}
    first = names["bos"] if fields.get("tokenizer.ggml.add_bos_token") else None
    special = {f"{name}_token": tokens[number] for name, number in names.items() if number is not None}
    return Tokenizer(
        backend, chat_template=fields.get("tokenizer.chat_template"), special_tokens=special, bos_token_id=first
    )


def _pre_tokenizer_name(fields: Mapping[str, Any]) -> str:
    return fields.get("tokenizer.ggml.pre", "default")


def _pre_tokenizer(name: str, source: str) -> Any:
    if name not in _PRE_TOKENIZERS:
        raise ModelError(f"{source}: its pre-tokenizer is {name!r}; known are {', '.join(_PRE_TOKENIZERS)}")
    pattern = _PRE_TOKENIZERS[name]
    if not pattern:
        return pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pattern == "digits":
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    split = pre_tokenizers.Split(Regex(pattern), behavior="isolated")
    return pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
