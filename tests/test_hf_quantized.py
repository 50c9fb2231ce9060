"""Quantized checkpoints in Transformers models, and adapters that are trained over their frozen weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch import nn

import flashkernel as fk
from flashkernel import Weight, hf
from flashkernel.blocks import checkpoint_layouts
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


def test_columns_with_an_order_of_their_own(tmp_path: Path) -> None:
    """GPTQ's act-order: such layers are dequantized, in the model's dtype."""
    import json

    from safetensors.torch import load_file, save_file

    folder = _save(tmp_path, "llama3", "gptq", "int4", "1x16")
    tensors = load_file(folder / "model.safetensors")
    expected = {}
    for name in [name for name in tensors if name.endswith("g_idx")]:
        parts = {part: tensors[name.replace("g_idx", part)] for part in ("qweight", "qzeros", "scales", "g_idx")}
        parts["g_idx"] = tensors[name] = parts["g_idx"].flip(0).contiguous()
        expected[name.removesuffix(".g_idx")] = checkpoint_layouts.read_gptq(parts, 4, 1).dequantize(torch.bfloat16)
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (folder / "config.json").write_text(json.dumps(config))
    model = hf.load_quantized(folder, dtype=torch.bfloat16)
    for name, matrix in expected.items():
        assert torch.equal(model.get_submodule(name).weight, matrix)
    assert model(torch.tensor([[1, 2, 3]])).logits.isfinite().all()
    save_file({name: x for name, x in tensors.items() if "g_idx" not in name}, folder / "model.safetensors")
    for load in (hf.load_quantized, lambda path: LLM(path, device="cpu", dtype="float32")):
        with pytest.raises(ModelError, match="g_idx, which has it, is missing"):
            load(folder)


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
    with pytest.raises(ModelError, match=r"scales are for 1x8 elements each, and config.json says 1x16"):
        hf.load_quantized(folder)
    wrong |= {name + part: tensors[name + part][:1] for part in ("scales", "qzeros")}
    safetensors.torch.save_file(wrong, file)
    with pytest.raises(ModelError, match=r"q_proj has shape \(32, 16\); the model has \(32, 32\)"):
        hf.load_quantized(folder)


def test_tensors_without_a_place_are_refused(tmp_path: Path) -> None:
    """A bias that the configuration does not have would be left out. Scales of x, keys and values are not needed."""
    from safetensors.torch import load_file, save_file

    folder = _save(tmp_path, "llama", "compressed-tensors", "int4", "1x16")
    tensors, file = load_file(folder / "model.safetensors"), folder / "model.safetensors"
    attention = "model.layers.0.self_attn."
    scales = {attention + name: torch.ones(1) for name in ("k_scale", "v_scale", "o_proj.input_scale")}
    save_file({**tensors, **scales, "model.rotary_emb.inv_freq": torch.ones(4)}, file)
    for load in (hf.load_quantized, lambda path: LLM(path, device="cpu", dtype="float32")):
        load(folder)
    save_file({**tensors, attention + "q_proj.bias": torch.ones(32)}, file)
    with pytest.raises(ModelError, match=r"self_attn.q_proj.bias have no place in the model"):
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


def _gpt_oss(folder: Path) -> Any:
    """A gpt-oss whose experts' sizes MXFP4 has, saved in 32 bits."""
    import transformers

    sizes = {**tiny_models._SIZES, **tiny_models._MOE, "intermediate_size": 64}
    torch.manual_seed(0)
    model = transformers.GptOssForCausalLM(transformers.GptOssConfig(**sizes, head_dim=16, sliding_window=8)).float()
    model.save_pretrained(folder)
    return model


def test_experts_of_gpt_oss_stay_in_mxfp4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No loader dequantizes a stack of experts, nor holds those of more than one layer in 16 bits."""
    from flashkernel.blocks.weight_formats.mxfp4 import Mxfp4

    plain = _gpt_oss(tmp_path / "plain")
    checkpoint = open_checkpoint(tmp_path / "plain")
    model = load_model(checkpoint, torch.device("cpu"), torch.float32).with_mxfp4_experts()
    save_model(model, checkpoint, tmp_path / "small", "mxfp4")
    whole: list[Weight] = []
    dequantize = Mxfp4.dequantize
    monkeypatch.setattr(
        Mxfp4, "dequantize", lambda *args: (whole.append(args[1]) if args[1].ndim == 3 else None) or dequantize(*args)
    )
    models = [hf.load_quantized(tmp_path / "small"), hf.load_gpt_oss(tmp_path / "small", "cpu", torch.float32)]
    models.append(hf.load_gpt_oss(tmp_path / "plain", "cpu", torch.float32))  # quantized as it is read
    assert not whole
    for layer in plain.model.layers:
        for name in ("gate_up_proj", "down_proj"):
            stack = getattr(layer.mlp.experts, name).detach().transpose(1, 2).contiguous()
            rounded = Weight.quantize(stack, "mxfp4").dequantize(torch.float32).transpose(1, 2)
            getattr(layer.mlp.experts, name).data.copy_(rounded)
    tokens = torch.randint(1, 300, (2, 11), generator=torch.Generator().manual_seed(1))
    expected = plain(tokens).logits
    for found in models:
        assert {type(layer.mlp.experts).__name__ for layer in found.model.layers} == {"FrozenExperts"}
        torch.testing.assert_close(found(tokens).logits, expected, rtol=1e-4, atol=1e-5)
        hf.patch(found)
        torch.testing.assert_close(found(tokens).logits, expected, rtol=1e-4, atol=1e-5)


def test_damaged_gpt_oss_is_refused(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    _gpt_oss(tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    whole = file.read_bytes()
    for change, message in (
        (lambda tensors: tensors.pop("model.layers.0.self_attn.sinks"), "sinks is missing"),
        (lambda tensors: tensors.update({"model.norm.weight": torch.ones(3)}), r"model.norm.weight has shape \(3,\)"),
        (lambda tensors: tensors.update(extra=torch.ones(3)), "extra have no place in the model"),
    ):
        changed = dict(stored)
        change(changed)
        save_file(changed, file)
        with pytest.raises(ModelError, match=message):
            hf.load_gpt_oss(tmp_path, "cpu", torch.float32)
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ModelError, match="damaged or was cut short"):
        hf.load_gpt_oss(tmp_path, "cpu", torch.float32)


def test_dtypes_by_name_and_lists_of_what_is_skipped(tmp_path: Path) -> None:
    """As Transformers takes them."""
    tiny_models.build("llama").save_pretrained(tmp_path)
    assert hf.load_quantized(tmp_path, dtype="float16").dtype == torch.float16
    assert hf.load_quantized(tmp_path, dtype="auto").dtype == torch.float32
    with pytest.raises(ValueError, match="load_quantized: dtype is 'half16'; it must be a torch dtype or its name"):
        hf.load_quantized(tmp_path, dtype="half16")
    with pytest.raises(ValueError, match="load_gpt_oss: dtype is 16"):
        hf.load_gpt_oss(tmp_path, "cpu", 16)  # type: ignore[arg-type]
    model = nn.ModuleDict({name: nn.Linear(64, 64) for name in ("one", "two", "three")})
    hf.quantize(model, "int8", skip=["one", "two"])
    assert [type(layer) is nn.Linear for layer in model.values()] == [True, True, False]


def test_a_model_that_cannot_be_quantized_stays_as_it_was() -> None:
    def model() -> nn.Sequential:
        return nn.Sequential(nn.Linear(64, 48), nn.ReLU(), nn.Linear(48, 64))

    damaged = model()
    damaged[2].weight.data[1, 1] = torch.nan
    for one, options, message in (
        (damaged, ("int8",), "2 has infinite or NaN elements"),
        (model(), ("int4", "1x64"), "2: .* groups of 64 columns do not divide 48"),
        (model(), ("int3",), "0: Weight: there is no format 'int3'"),
    ):
        with pytest.raises(ValueError, match=f"hf.quantize: {message}"):
            hf.quantize(one, *options)
        assert [type(layer) for layer in one] == [nn.Linear, nn.ReLU, nn.Linear]
    again = hf.quantize(model(), "int8")
    with pytest.raises(ValueError, match=r"no torch.nn.Linear to quantize; 2 layers are quantized already"):
        hf.quantize(again, "int4")
    with pytest.raises(TypeError, match="the model is a Tensor"):
        hf.quantize(torch.zeros(2))  # type: ignore[type-var]
