"""Configurations of one architecture that differ in what a kernel or a loader reads: windows, head sizes, tied weights,
rotary embeddings, routers; against Transformers, with prompts of many chunks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
import transformers

from flashkernel.engine import LLM, ModelError, SamplingParams

_ROTARY: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
_LOCAL_AND_GLOBAL = {
    "sliding_attention": _ROTARY,
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000.0},
}
_THREE_LAYERS = {
    "num_hidden_layers": 3, "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}  # fmt: skip
VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("gemma3_text", {"tie_word_embeddings": False}),
    ("gemma3_text", {"head_dim": 24}),
    ("gemma3_text", {**_THREE_LAYERS, "sliding_window": 40}),
    ("gemma3_text", {"num_key_value_heads": 1, "head_dim": 80}),
    ("gemma3_text", {"rope_parameters": _LOCAL_AND_GLOBAL}),
    ("phi3", {"sliding_window": 20}),
    ("phi3", {"tie_word_embeddings": True}),
    ("phi3", {"hidden_size": 48, "rope_parameters": _ROTARY}),
    ("phi3", {"hidden_size": 96, "rope_parameters": {**_ROTARY, "partial_rotary_factor": 0.5}}),
    ("qwen3_moe", {"norm_topk_prob": True}),
    ("qwen3_moe", {"tie_word_embeddings": True, "attention_bias": True}),
    ("qwen3_moe", {"head_dim": 24, "num_experts": 7, "num_experts_per_tok": 3}),
]


def _save(name: str, change: dict[str, Any], folder: Path) -> transformers.PreTrainedModel:
    known = tiny_models.configs()[name]
    config = type(known)(**{**known.to_dict(), **change})
    model = tiny_models.build(name, config)
    model.save_pretrained(folder)
    return model


@pytest.mark.parametrize(
    ("name", "change"), VARIANTS, ids=lambda value: value if isinstance(value, str) else "-".join(value)
)
def test_long_prompts_are_transformers(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    """Prompts of up to 200 tokens in chunks of 48, beside others that decode."""
    model = _save(name, change, tmp_path)
    llm = LLM(tmp_path, device="cpu", kv_cache_tokens=1024, max_num_batched_tokens=48, block_size=16, max_num_seqs=4)
    prompts = tiny_models.prompts((200, 33, 5, 90, 63))
    done = llm.generate(prompts, SamplingParams(max_tokens=12, ignore_eos=True, logprobs=0))
    for prompt, one in zip(prompts, done):
        tokens = list(one.outputs[0].token_ids)
        with torch.no_grad():
            found = model(torch.tensor([[*prompt, *tokens]])).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
        assert found.argmax(-1).tolist() == tokens
        assert one.outputs[0].logprobs is not None
        ours = [logprob.logprob for logprob in one.outputs[0].logprobs]
        assert ours == pytest.approx(found.gather(1, torch.tensor(tokens)[:, None])[:, 0].tolist(), abs=2e-4)


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3_moe", {"mlp_only_layers": [0]}, "some of its layers have no experts"),
        ("qwen3_moe", {"num_hidden_layers": 4, "decoder_sparse_step": 2}, "some of its layers have no experts"),
    ],
)
def test_what_is_not_supported_is_told(name: str, change: dict[str, Any], message: str, tmp_path: Path) -> None:
    _save(name, change, tmp_path)
    with pytest.raises(ModelError, match=message):
        LLM(tmp_path, device="cpu")
