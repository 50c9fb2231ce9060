"""Models whose weights are quantized: the engine, experts, checkpoints, Transformers, kernels of their sizes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flashkernel as fk
from flashkernel import Weight
from flashkernel.blocks.fp8 import FP8
from flashkernel.core import device as devices


def test_the_engine_takes_quantized_weights() -> None:
    """A model in fp8 gives the tokens of the model with the dequantized matrices, by every way through a layer."""
    from flashkernel.engine import LLM, SamplingParams
    from flashkernel.engine.dummy_weights import tiny_transformer
    from flashkernel.engine.transformer import PROJECTIONS, Transformer

    model = tiny_transformer().quantized("fp8")
    layers = [
        replace(layer, **{name: getattr(layer, name).dequantize(torch.float32) for name in PROJECTIONS})
        for layer in model.layers
    ]
    assert isinstance(model.layers[0].qkv_proj, Weight)
    assert model.nbytes < tiny_transformer().nbytes
    same = Transformer(model.config, model.weights, layers)
    prompts, params = [[1, 2, 3], list(range(4, 90))], SamplingParams(max_tokens=12, ignore_eos=True)

    def tokens(model: Transformer, **options: Any) -> list[tuple[int, ...]]:
        found = LLM(model, kv_cache_tokens=512, **options).generate(prompts, params)
        return [one.outputs[0].token_ids for one in found]

    expected = tokens(same)
    assert tokens(model) == expected
    assert tokens(tiny_transformer(), quantization="fp8") == expected
    with fk.use_backend(linear="reference"):
        assert tokens(model) == expected


def test_experts_in_fp8() -> None:
    gate_up, down = torch.randn(4, 24, 16) / 4, torch.randn(4, 16, 12) / 4
    quantized = [Weight.quantize(one, "fp8", "row") for one in (gate_up, down)]
    x, routing = torch.randn(5, 16), fk.moe_route(torch.randn(5, 4))
    expected = fk.moe_experts(x, routing, *[weight.dequantize(torch.float32) for weight in quantized])
    for backend in ("torch", "triton", "reference"):
        found = fk.moe_experts(x, routing, *quantized, backend=backend)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "mixtral"])
@pytest.mark.parametrize("granularity", ["tensor", "row", "block"])
def test_checkpoints_in_fp8(name: str, granularity: str, tmp_path: Path) -> None:
    """The loader keeps float8_e4m3fn and its scales; the tokens are those of the dequantized checkpoint."""
    pytest.importorskip("transformers")
    import tiny_models
    from safetensors.torch import load_file, save_file

    from flashkernel.engine import LLM, ModelError, SamplingParams

    tiny_models.save(name, tmp_path)
    (tmp_path / "exact").mkdir()
    for file in tmp_path.glob("*.json"):
        (tmp_path / "exact" / file.name).write_text(file.read_text())
    stored, exact = load_file(tmp_path / "model.safetensors"), {}
    found = dict(stored)
    for key, tensor in stored.items():
        exact[key] = tensor
        if key.endswith(("_proj.weight", "w1.weight", "w2.weight", "w3.weight")):
            weight = Weight.quantize(tensor, "fp8", granularity)
            suffix = "_scale_inv" if granularity == "block" else "_scale"
            found |= {
                key: weight.data,
                key + suffix: weight.scales,
                key.removesuffix("weight") + "input_scale": torch.ones(1),
            }
            exact[key] = weight.dequantize(tensor.dtype)
    save_file(found, tmp_path / "model.safetensors", {"format": "pt"})
    save_file({key: value.contiguous() for key, value in exact.items()}, tmp_path / "exact" / "model.safetensors",
              {"format": "pt"})  # fmt: skip
    params = SamplingParams(max_tokens=8, ignore_eos=True)

    def tokens(folder: Path) -> Any:
        llm = LLM(folder, device="cpu", dtype="float32", kv_cache_tokens=512)
        assert isinstance(llm.model.layers[0].down_proj, Weight) == (folder == tmp_path)
        return [one.outputs[0].token_ids for one in llm.generate(tiny_models.prompts((5, 20)), params)]

    assert tokens(tmp_path) == tokens(tmp_path / "exact")
    save_file({key: value for key, value in found.items() if "_scale" not in key}, tmp_path / "model.safetensors")
    with pytest.raises(ModelError, match=r"is in float8_e4m3fn and has no scales"):
        LLM(tmp_path, device="cpu", kv_cache_tokens=512)


def test_transformers_models_in_fp8() -> None:
    """The quantized model is the model of the dequantized matrices, patched or not, and its state dict loads."""
    pytest.importorskip("transformers")
    import copy

    import tiny_models

    from flashkernel import hf
    from flashkernel.hf.quantized import QuantizedLinear

    model = hf.quantize(tiny_models.build("llama").eval())
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantizedLinear)}
    assert len(layers) == 7 * model.config.num_hidden_layers
    assert type(model.lm_head) is nn.Linear
    same = tiny_models.build("llama").eval()
    state = {key: value for key, value in model.state_dict().items() if key in same.state_dict()}
    for name, layer in layers.items():
        state[f"{name}.weight"] = layer.weight.dequantize(torch.float32)
    same.load_state_dict(state)
    ids = torch.randint(0, model.config.vocab_size, (2, 9))
    expected = same(ids).logits
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)
    again = hf.quantize(tiny_models.build("llama").eval())
    again.load_state_dict(copy.deepcopy(model.state_dict()))
    torch.testing.assert_close(again(ids).logits, expected, rtol=1e-4, atol=1e-4)
    hf.patch(model)
    torch.testing.assert_close(model(ids).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.compile
@pytest.mark.parametrize("rows", [1, 4, 16, 64])
@pytest.mark.parametrize("layer", ["qkv", "gate-up", "down"])
def test_fp8_kernels_compile_without_spills(layer: str, rows: int) -> None:
    """Triton's kernels on fp8 weights of Llama-3.1-8B, for an NVIDIA H200 that need not be here."""
    from compiled import compiled

    from flashkernel.core.launch import collect_launches

    def weight(out: int, inner: int) -> Weight:
        scales = torch.empty(out, 1, device="meta")
        return Weight(torch.empty(out, inner, dtype=FP8, device="meta"), scales, format="fp8", group_shape=(1, -1))

    def floats(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    calls: dict[str, tuple[Any, dict[str, Any]]] = {
        "qkv": ([weight(4096, 4096), weight(1024, 4096), weight(1024, 4096)], {"norm_weight": floats(4096)}),
        "gate-up": ([weight(14336, 4096), weight(14336, 4096)], {"activation": "swiglu", "norm_weight": floats(4096)}),
        "down": (weight(4096, 14336), {"residual": floats(rows, 4096)}),
    }
    weights, options = calls[layer]
    inner = 14336 if layer == "down" else 4096
    with devices.pretend(devices.KNOWN["h200"]), collect_launches() as launches:
        fk.linear(floats(rows, inner), weights, **options, backend="triton")
    assert launches
    for launch in launches:
        machine = compiled(launch, 90)
        assert machine.stack == 0, f"{launch.name} {launch.constants}: {machine.stack} bytes of stack"
        assert machine.shared <= devices.KNOWN["h200"].shared_per_block
