"""Quantized checkpoints in Transformers models, and adapters that are trained over their frozen weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

import flashkernel as fk
from flashkernel import Weight, hf
from flashkernel.engine import LLM, ModelError, SamplingParams
from flashkernel.engine.checkpoint import open_checkpoint
from flashkernel.engine.model_loader import load_model
from flashkernel.engine.save_model import save_model
from flashkernel.engine.transformer import PROJECTIONS, Transformer
from flashkernel.hf.quantized import QuantizedLinear

linear: Any = fk.linear


def _save(folder: Path, name: str, layout: str, format: str, granularity: str | None, symmetric: bool = True) -> Path:
    """A tiny model quantized to nearest, in the layout of another tool."""
    tiny_models.save(name, folder / "plain")
    checkpoint = open_checkpoint(folder / "plain")
    model = load_model(checkpoint, torch.device("cpu"), torch.float32)
    layers = []
    for layer in model.layers:
        found = {one: Weight.quantize(getattr(layer, one), format, granularity, symmetric=symmetric)
                 for one in PROJECTIONS}  # fmt: skip
        layers.append(replace(layer, **found))
    save_model(Transformer(model.config, model.weights, layers), checkpoint, folder / "small", layout)
    return folder / "small"


LAYOUTS = [
    ("llama", "gptq", "int4", "1x16", True), ("llama3", "gptq_v2", "int4", "1x16", False),
    ("qwen2", "awq", "int4", "1x16", False), ("llama", "compressed-tensors", "int4", "1x16", True),
    ("qwen3", "compressed-tensors", "int8", "row", True), ("mistral", "compressed-tensors", "fp8", "row", True),
]  # fmt: skip


@pytest.mark.parametrize("name, layout, format, granularity, symmetric", LAYOUTS)
def test_checkpoints_are_loaded(
    name: str, layout: str, format: str, granularity: str, symmetric: bool, tmp_path: Path
) -> None:
    """Transformers with these layers writes what the engine writes with the same checkpoint."""
    folder = _save(tmp_path, name, layout, format, granularity, symmetric)
    model = hf.load_quantized(folder, dtype=torch.float32)
    layers = [module for module in model.modules() if isinstance(module, QuantizedLinear)]
    assert len(layers) == 14
    assert {layer.weight.format for layer in layers} == {format}
    assert not any(parameter.is_meta for parameter in model.parameters())
    (prompt,) = tiny_models.prompts((9,))
    engine = LLM(folder, device="cpu", dtype="float32", kv_cache_tokens=256)
    expected = list(engine.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))[0].outputs[0].token_ids)
    assert tiny_models.hf_greedy(model, prompt, 8) == expected
    hf.patch(model)
    assert tiny_models.hf_greedy(model, prompt, 8) == expected


def test_damaged_checkpoints_are_refused(tmp_path: Path) -> None:
    import safetensors.torch

    folder = _save(tmp_path, "llama", "awq", "int4", "1x16")
    file = folder / "model.safetensors"
    tensors = safetensors.torch.load_file(file)
    name = "model.layers.0.self_attn.q_proj."
    safetensors.torch.save_file({one: x for one, x in tensors.items() if one != name + "scales"}, file)
    with pytest.raises(ModelError, match=r"q_proj.weight: scales are missing"):
        hf.load_quantized(folder)
    wrong = {**tensors, name + "qweight": tensors[name + "qweight"][:16]}
    safetensors.torch.save_file(wrong, file)
    with pytest.raises(ModelError, match=r"q_proj has shape \(32, 16\); the model has \(32, 32\)"):
        hf.load_quantized(folder)


@pytest.mark.parametrize("format", ["int4", "int8", "mxfp4", "fp8", "q4_1"])
def test_gradients_go_through_frozen_weights(format: str) -> None:
    """dx is dy times the matrix that the weight stands for, and the graph keeps no dequantized matrix."""
    torch.manual_seed(0)
    weight, x = Weight.quantize(torch.randn(48, 64), format), torch.randn(5, 64, requires_grad=True)
    bias = torch.randn(48, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda one: one):
        y = linear(x, weight, bias)
    assert not any(one.dtype == torch.float32 and one.shape == (48, 64) for one in kept)
    dy = torch.randn_like(y)
    y.backward(dy)
    assert x.grad is not None
    torch.testing.assert_close(x.grad, dy @ weight.dequantize(torch.float32), atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(bias.grad, dy.sum(0))
    matrix = weight.dequantize(torch.float32)
    torch.testing.assert_close(y, x @ matrix.T + bias, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("format", ["int4", "int8"])
@pytest.mark.parametrize("patched", [False, True])
def test_lora_trains_over_quantized_weights(format: str, patched: bool) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    base = hf.quantize(tiny_models.build("llama"), format, "1x16" if format == "int4" else None)
    if patched:
        hf.patch(base)
    options = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj", "down_proj"], task_type="CAUSAL_LM")
    model = peft.get_peft_model(base, options).train()
    frozen = {name: value.clone() for name, value in model.state_dict().items()
              if isinstance(value, torch.Tensor) and "lora" not in name}  # fmt: skip
    optimizer = torch.optim.AdamW([one for one in model.parameters() if one.requires_grad], lr=0.03)
    tokens = torch.tensor(tiny_models.prompts((24, 24)))
    losses = []
    for _ in range(5):
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0] - 0.1
    for name, value in frozen.items():
        assert torch.equal(model.state_dict()[name], value), name
