"""Checkpoints that the package `compressed-tensors` writes, and those of ours as it reads them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from flashkernel import Weight, hf
from flashkernel.engine import LLM, SamplingParams
from flashkernel.engine.checkpoint import open_checkpoint
from flashkernel.engine.model_loader import load_model
from flashkernel.engine.save_model import save_model
from flashkernel.engine.transformer import PROJECTIONS, LayerWeights, Transformer
from flashkernel.hf.quantized import QuantizedLinear

pytest.importorskip("compressed_tensors", reason="pip install flashkernel[test] brings compressed-tensors")
transformers = pytest.importorskip("transformers", minversion="5.17")

import tiny_models  # noqa: E402
from compressed_tensors.compressors import BaseCompressor, ModelCompressor  # noqa: E402
from compressed_tensors.quantization import (  # noqa: E402
    QuantizationConfig,
    QuantizationScheme,
    QuantizationStatus,
    apply_quantization_config,
)
from compressed_tensors.quantization.utils import calculate_qparams  # noqa: E402

CPU = torch.device("cpu")
INTEGERS: dict[str, Any] = {"type": "int", "dynamic": False}
FLOATS: dict[str, Any] = {"type": "float", "dynamic": False}
INT8_TOKENS = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
FP8_TOKENS = {**INT8_TOKENS, "type": "float"}
FP8_TENSOR = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
GROUPS = {"strategy": "group", "group_size": 16}
BLOCKS = {"strategy": "block", "block_structure": [128, 128]}

# The package's arguments of weights and of activations, the format it chooses, and the format of the Weight.
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, str, str]] = {
    "int4 groups": ({**INTEGERS, "num_bits": 4, **GROUPS}, None, "pack-quantized", "int4"),
    "int4 groups, zeros": (
        {**INTEGERS, "num_bits": 4, **GROUPS, "symmetric": False}, None, "pack-quantized", "int4"),
    "int4 groups, ordered calibration": (
        {**INTEGERS, "num_bits": 4, **GROUPS, "actorder": "weight"}, None, "pack-quantized", "int4"),
    "int4 channels": ({**INTEGERS, "num_bits": 4, "strategy": "channel"}, None, "pack-quantized", "int4"),
    "int4 channels, zeros": (
        {**INTEGERS, "num_bits": 4, "strategy": "channel", "symmetric": False}, None, "pack-quantized", "int4"),
    "int4 tensor": ({**INTEGERS, "num_bits": 4, "strategy": "tensor"}, None, "pack-quantized", "int4"),
    "int8 groups": ({**INTEGERS, "num_bits": 8, **GROUPS}, None, "pack-quantized", "int8"),
    "int8 channels, zeros": (
        {**INTEGERS, "num_bits": 8, "strategy": "channel", "symmetric": False}, None, "pack-quantized", "int8"),
    "w8a8 channels": ({**INTEGERS, "num_bits": 8, "strategy": "channel"}, INT8_TOKENS, "int-quantized", "int8"),
    "w8a8 channels, zeros": (
        {**INTEGERS, "num_bits": 8, "strategy": "channel", "symmetric": False}, INT8_TOKENS, "int-quantized", "int8"),
    "w8a8 tensor": ({**INTEGERS, "num_bits": 8, "strategy": "tensor"}, INT8_TOKENS, "int-quantized", "int8"),
    "w8a8 groups": ({**INTEGERS, "num_bits": 8, **GROUPS}, INT8_TOKENS, "int-quantized", "int8"),
    "w4a8 groups": ({**INTEGERS, "num_bits": 4, **GROUPS}, INT8_TOKENS, "int-quantized", "int8"),
    "fp8 tensor, static x": ({**FLOATS, "num_bits": 8, "strategy": "tensor"}, FP8_TENSOR, "float-quantized", "fp8"),
    "fp8 channels": ({**FLOATS, "num_bits": 8, "strategy": "channel"}, FP8_TOKENS, "float-quantized", "fp8"),
    "fp8 blocks": ({**FLOATS, "num_bits": 8, **BLOCKS}, FP8_TOKENS, "float-quantized", "fp8"),
    "fp8 groups": ({**FLOATS, "num_bits": 8, **GROUPS}, FP8_TOKENS, "float-quantized", "fp8"),
    "fp8 weights alone": ({**FLOATS, "num_bits": 8, "strategy": "channel"}, None, "naive-quantized", "fp8"),
    "mxfp4": (
        {**FLOATS, "num_bits": 4, "strategy": "group", "group_size": 32, "scale_dtype": "torch.uint8"}, None,
        "mxfp4-pack-quantized", "mxfp4"),
}  # fmt: skip


def _ranges(weight: Tensor, args: Any) -> tuple[Tensor, Tensor]:
    """Least and largest element of what shares a scale."""
    if args.strategy == "tensor":
        return weight.min().reshape(1), weight.max().reshape(1)
    if args.strategy == "channel":
        return weight.amin(1, keepdim=True), weight.amax(1, keepdim=True)
    if args.strategy == "group":
        groups = weight.unflatten(1, (-1, args.group_size))
        return groups.amin(2), groups.amax(2)
    rows, columns = args.block_structure
    blocks = nn.functional.pad(weight, (0, -weight.shape[1] % columns, 0, -weight.shape[0] % rows))
    blocks = blocks.unflatten(0, (-1, rows)).unflatten(2, (-1, columns))
    return blocks.amin((1, 3)), blocks.amax((1, 3))


def _write(model: Any, folder: Path, weights: dict[str, Any], activations: dict[str, Any] | None) -> dict[str, Tensor]:
    """Saves a model quantized by the package; returns its matrices as the package dequantizes them, in float32."""
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, input_activations=activations)  # type: ignore[arg-type]
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head", "re:.*mlp.gate$"])
    apply_quantization_config(model, config, show_progress=False)
    layers = {name: one for name, one in model.named_modules() if hasattr(one, "quantization_scheme")}
    for layer in layers.values():
        scales, zeros = calculate_qparams(*_ranges(layer.weight.detach(), scheme.weights), scheme.weights)
        layer.weight_scale.data, layer.weight_zero_point.data = scales, zeros
        layer.quantization_status = QuantizationStatus.FROZEN
        if "input_scale" in layer._parameters:
            layer.input_scale.data.fill_(0.5)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return {name: _decompressed(dict(layer.state_dict()), layer.quantization_scheme) for name, layer in layers.items()}


def _decompressed(tensors: dict[str, Any], scheme: Any) -> Tensor:
    """The matrix of a layer's tensors by the package, computed in float32."""
    if tensors["weight_scale"].is_floating_point():
        tensors["weight_scale"] = tensors["weight_scale"].float()
    found = BaseCompressor.get_value_from_registry(scheme.format).decompress(tensors, scheme)
    return found["weight"].float()


def _model(name: str, **changed: Any) -> Any:
    """A model whose sizes neither blocks of 128 nor whole words of outputs divide everywhere."""
    sizes = {"hidden_size": 160, "intermediate_size": 192, "head_dim": 40, "num_key_value_heads": 1}
    if name == "qwen3_moe":
        sizes["moe_intermediate_size"] = 96
    return tiny_models.build(name, **{**sizes, **changed})


def _projections(matrices: dict[str, Tensor], layer: int) -> dict[str, Tensor]:
    """The matrices of a layer by the engine's names."""
    prefix = f"model.layers.{layer}."

    def rows(*names: str) -> Tensor:
        return torch.cat([matrices[prefix + name] for name in names])

    return {
        "qkv_proj": rows("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "o_proj": rows("self_attn.o_proj"),
        "gate_up_proj": rows("mlp.gate_proj", "mlp.up_proj"),
        "down_proj": rows("mlp.down_proj"),
    }


def _save_tokenizer(folder: Path) -> None:
    tiny_models.tokenizer().save(str(folder / "tokenizer.json"))


def _engine_tokens(folder: Path, prompt: list[int]) -> list[int]:
    llm = LLM(folder, device="cpu", dtype="float32", kv_cache_tokens=256)
    return list(llm.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))[0].outputs[0].token_ids)


@pytest.mark.parametrize("case", SCHEMES)
def test_what_the_package_writes_is_loaded(case: str, tmp_path: Path) -> None:
    weights, activations, stored_as, format = SCHEMES[case]
    dtype = torch.bfloat16 if "zeros" in case else torch.float32  # scales are stored in the model's dtype
    expected = _write(_model("llama3").to(dtype), tmp_path, weights, activations)
    _save_tokenizer(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    assert config["format"] == stored_as
    model = load_model(open_checkpoint(tmp_path), CPU, torch.float32)
    for index, layer in enumerate(model.layers):
        for name, matrix in _projections(expected, index).items():
            found: Any = getattr(layer, name)
            assert found.format == format
            assert torch.equal(found.dequantize(torch.float32), matrix), name
    patched = hf.load_quantized(tmp_path, dtype=torch.float32)
    linears = {name: one for name, one in patched.named_modules() if isinstance(one, QuantizedLinear)}
    assert linears.keys() == expected.keys()
    for name, linear in linears.items():
        assert torch.equal(linear.weight.dequantize(torch.float32), expected[name]), name
    (prompt,) = tiny_models.prompts((9,))
    assert _engine_tokens(tmp_path, prompt) == tiny_models.hf_greedy(patched, prompt, 8)


def test_experts_are_loaded(tmp_path: Path) -> None:
    """Layers of a mixture that the package compresses one by one, as files have them: Transformers keeps stacks."""
    model = _model("mixtral")
    model.save_pretrained(tmp_path)
    weights, _, stored_as, _ = SCHEMES["int4 groups, zeros"]
    scheme = QuantizationScheme(targets=["Linear"], weights=weights, format=stored_as)  # type: ignore[arg-type]
    tensors, expected = load_file(tmp_path / "model.safetensors"), {}
    for name in [name for name in tensors if "_proj" in name or "experts" in name]:
        matrix = tensors.pop(name)
        scales, zeros = calculate_qparams(*_ranges(matrix, scheme.weights), scheme.weights)
        given = {"weight": matrix, "weight_scale": scales, "weight_zero_point": zeros}
        found = BaseCompressor.get_value_from_registry(stored_as).compress(given, scheme)
        tensors |= {name.removesuffix("weight") + part: value for part, value in found.items()}
        expected[name] = _decompressed(found, scheme)
    save_file(tensors, tmp_path / "model.safetensors")
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=stored_as, ignore=["lm_head"])
    values = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": config.model_dump()}
    (tmp_path / "config.json").write_text(json.dumps(values))
    layer = load_model(open_checkpoint(tmp_path), CPU, torch.float32).layers[1]
    for expert in range(4):
        prefix = f"model.layers.1.block_sparse_moe.experts.{expert}."
        both = torch.cat([expected[prefix + "w1.weight"], expected[prefix + "w3.weight"]])
        assert torch.equal(layer.gate_up_proj[expert].dequantize(torch.float32), both)  # type: ignore[union-attr]
        down: Any = layer.down_proj[expert]
        assert torch.equal(down.dequantize(torch.float32), expected[prefix + "w2.weight"])


# Ours: format, granularity, symmetric, dtype of x, and the format that the package finds in config.json.
SAVED = [
    ("int4", "1x16", True, None, "pack-quantized"), ("int4", "1x16", False, None, "pack-quantized"),
    ("int4", "row", True, None, "pack-quantized"), ("int4", "row", False, None, "pack-quantized"),
    ("int8", "row", True, None, "pack-quantized"), ("int8", "1x16", False, None, "pack-quantized"),
    ("int8", "row", True, torch.int8, "int-quantized"), ("int8", "row", False, torch.int8, "int-quantized"),
    ("int8", "tensor", True, torch.int8, "int-quantized"), ("int8", "1x32", True, torch.int8, "int-quantized"),
    ("fp8", "row", True, torch.float8_e4m3fn, "float-quantized"), ("fp8", "row", True, None, "float-quantized"),
    ("fp8", "tensor", True, None, "float-quantized"), ("fp8", "1x32", True, None, "float-quantized"),
    ("fp8", "1x32", True, torch.float8_e4m3fn, "float-quantized"),
    ("mxfp4", None, True, None, "mxfp4-pack-quantized"),
]  # fmt: skip


def _saved(name: str, folder: Path, *arguments: Any) -> list[LayerWeights]:
    """The layers of a model in folder/small, quantized to nearest with arguments of `Weight.quantize`."""
    _model(name).save_pretrained(folder / "plain")
    _save_tokenizer(folder / "plain")
    checkpoint = open_checkpoint(folder / "plain")
    plain, layers = load_model(checkpoint, CPU, torch.float32), []
    for layer in plain.layers:
        matrices = {name: getattr(layer, name) for name in PROJECTIONS}
        found = {name: Weight.quantize(matrix, *arguments) for name, matrix in matrices.items()}
        layers.append(replace(layer, **found))  # type: ignore[arg-type]
    save_model(Transformer(plain.config, plain.weights, layers), checkpoint, folder / "small")
    return layers


def _logits(model: Any) -> Tensor:
    (prompt,) = tiny_models.prompts((9,))
    with torch.no_grad():
        return model(torch.tensor([prompt])).logits


@pytest.mark.parametrize("format, granularity, symmetric, x_dtype, stored_as", SAVED)
def test_what_is_saved_is_read_by_the_package(
    format: str, granularity: str | None, symmetric: bool, x_dtype: Any, stored_as: str, tmp_path: Path
) -> None:
    """The package has the same elements, and Transformers computes with it what it does with our layers."""
    layers = _saved("llama3", tmp_path, format, granularity, x_dtype, symmetric)
    stored = load_file(tmp_path / "small" / "model.safetensors")
    values = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    config = QuantizationConfig.model_validate(values)
    (scheme,) = config.config_groups.values()
    assert isinstance(scheme, QuantizationScheme)
    scheme.format = config.format  # type: ignore[assignment]
    assert (config.format, config.ignore) == (stored_as, ["lm_head"])
    parts: dict[str, dict[str, Tensor]] = {}
    for key, value in stored.items():
        base, _, part = key.rpartition(".")
        if "_proj.weight" in key:
            parts.setdefault(base, {})[part] = value
    matrices = {base: _decompressed(tensors, scheme) for base, tensors in parts.items()}
    for index, layer in enumerate(layers):
        for name, matrix in _projections(matrices, index).items():
            found: Any = getattr(layer, name)
            assert torch.equal(found.dequantize(torch.float32), matrix), name
    dtype = torch.bfloat16 if format == "mxfp4" else torch.float32  # which the package has scales of powers of two in
    theirs = _logits(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=dtype)).float()
    model = hf.load_quantized(tmp_path / "small", dtype=dtype)
    for linear in [one for one in model.modules() if isinstance(one, QuantizedLinear)]:
        linear.hold(replace(linear.weight, activation_dtype=x_dtype))
    ours = _logits(model).float()
    # The package's int8 has steps of largest / 127.5, ours of largest / 127.
    tolerance = 0.1 if x_dtype == torch.int8 else 0.02 if x_dtype or format == "mxfp4" else 1e-4
    assert (theirs - ours).norm() < tolerance * ours.norm()


@pytest.mark.parametrize("name", ["qwen2", "phi3", "gemma3_text", "mixtral", "qwen3_moe"])
def test_models_that_transformers_reads_with_the_package(name: str, tmp_path: Path) -> None:
    _saved(name, tmp_path, "int4", "1x16")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "small", dtype=torch.float32)
    engine = LLM(tmp_path / "small", device="cpu", dtype="float32", kv_cache_tokens=256)
    (prompt,) = tiny_models.prompts((9,))
    found = engine.generate([prompt], SamplingParams(max_tokens=8, ignore_eos=True))[0].outputs[0].token_ids
    assert tiny_models.hf_greedy(theirs, prompt, 8) == list(found)
