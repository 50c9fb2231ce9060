"""Quantized weights are put into tiles where a Hopper GPU's kernel reads them, and saved in rows."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import flashkernel as fk
from flashkernel import Weight, hf
from flashkernel.core.device import KNOWN, pretend
from flashkernel.core.shapes import Model
from flashkernel.engine.checkpoint import open_checkpoint
from flashkernel.engine.dummy_weights import dummy_transformer
from flashkernel.engine.model_loader import load_model
from flashkernel.engine.save_model import save_model
from flashkernel.engine.transformer import PROJECTIONS
from flashkernel.engine.weight_order import experts_order, kernel_order, row_order
from flashkernel.hf.quantized import QuantizedLinear

H200 = KNOWN["h200"]
SHAPE = Model(hidden=128, intermediate=256, heads=4, kv_heads=2, head_dim=32, layers=2, vocab=100)


def _weight(format: str, rows: int = 128, columns: int = 128) -> Weight:
    generator = torch.Generator().manual_seed(0)
    return Weight.quantize(torch.randn(rows, columns, generator=generator), format)


def _same_rows(found: Weight, expected: Weight) -> bool:
    """The same values; scales in tiles are float16."""
    assert found.scales is not None
    assert expected.scales is not None
    scales = expected.scales if expected.scales.dtype == torch.uint8 else expected.scales.half().float()
    return found.layout == expected.layout and torch.equal(found.data, expected.data) and torch.equal(
        found.scales, scales
    )  # fmt: skip


@pytest.mark.parametrize("format", ["int4", "int8", "mxfp4"])
def test_tiles_on_hopper_and_rows_elsewhere(format: str) -> None:
    weight, x = _weight(format), torch.randn(3, 128, dtype=torch.bfloat16)
    for name in ("a100", "b200", "t4"):
        with pretend(KNOWN[name]):
            assert kernel_order(weight, torch.bfloat16) is weight
    assert kernel_order(weight, torch.bfloat16) is weight
    with pretend(H200):
        tiled = kernel_order(weight, torch.bfloat16)
        assert tiled.format == f"{format}_tiles"
        assert fk.explain(fk.linear, x, tiled).chosen == "hopper"
        assert kernel_order(tiled, torch.bfloat16) is tiled
        assert kernel_order(weight, torch.float32) is weight
        assert [one.format for one in kernel_order((weight, weight), torch.float16)] == [f"{format}_tiles"] * 2
    assert tiled.nbytes <= weight.nbytes
    assert _same_rows(row_order(tiled), weight)
    assert row_order(weight) is weight


def test_what_has_no_tiles_stays_in_rows() -> None:
    plain = torch.randn(128, 128)
    stack = Weight.stack([_weight("int4")] * 2)
    with pretend(H200):
        for weight in (plain, stack, _weight("fp8"), _weight("int8", 100), _weight("int4", 128, 96)):
            assert kernel_order(weight, torch.bfloat16) is weight


@pytest.mark.parametrize("format", ["int4", "mxfp4"])
def test_a_model_in_tiles_is_saved_in_rows(format: str, tmp_path: Path) -> None:
    """What a Hopper GPU saves is what a CPU saves but for scales in float16, and loads into tiles again."""
    tiny_models = pytest.importorskip("tiny_models")
    transformers = pytest.importorskip("transformers")
    sizes = {**tiny_models._SIZES, "hidden_size": 128, "intermediate_size": 256}
    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=True)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(tmp_path / "plain")
    checkpoint = open_checkpoint(tmp_path / "plain")
    cpu = torch.device("cpu")
    with pretend(H200):
        tiled = load_model(checkpoint, cpu, torch.bfloat16, quantization=format)
        save_model(tiled, checkpoint, tmp_path / "tiles")
        again = load_model(open_checkpoint(tmp_path / "tiles"), cpu, torch.bfloat16)
    rows = load_model(checkpoint, cpu, torch.bfloat16, quantization=format)
    save_model(rows, checkpoint, tmp_path / "rows")
    mine, expected = (load_file(tmp_path / name / "model.safetensors") for name in ("tiles", "rows"))
    assert mine.keys() == expected.keys()
    for name, value in expected.items():
        scales = name.endswith("weight_scale") and value.is_floating_point()
        assert mine[name].dtype == (torch.float16 if scales else value.dtype)  # as tiles have them
        assert torch.equal(mine[name].half() if value.is_floating_point() else mine[name],
                           value.half() if value.is_floating_point() else value), name  # fmt: skip
    for name in PROJECTIONS:
        first, second = getattr(tiled.layers[1], name), getattr(again.layers[1], name)
        assert first.format == second.format == f"{format}_tiles"
        assert torch.equal(first.data, second.data)
        assert torch.equal(first.scales, second.scales)


def test_a_transformer_that_is_quantized_there() -> None:
    with pretend(H200):
        model = dummy_transformer(SHAPE, "cpu", torch.bfloat16).quantized("int8")
    assert {getattr(model.layers[0], name).format for name in PROJECTIONS} == {"int8_tiles"}


def test_linear_layers_in_tiles_have_state_dicts_in_rows() -> None:
    torch.manual_seed(0)
    plain = torch.nn.Sequential(torch.nn.Linear(128, 64), torch.nn.Linear(64, 128)).to(torch.bfloat16)
    with pretend(H200):
        tiled = hf.quantize(torch.nn.Sequential(*plain), "int4")
    rows = hf.quantize(torch.nn.Sequential(*plain), "int4")
    first = tiled[0]
    assert isinstance(first, QuantizedLinear)
    assert first.weight.format == "int4_tiles"
    assert rows[0].weight.format == "int4"
    state = tiled.state_dict()
    for name, value in rows.state_dict().items():
        same = value.half().float() if name.endswith("scales") else value
        assert state[name] == same if isinstance(value, str) else torch.equal(state[name], same), name
    rows.load_state_dict(state)
    assert _same_rows(rows[0].weight, row_order(first.weight))
    before = first.weight
    first.data.zero_()
    tiled.load_state_dict(state)
    assert torch.equal(first.weight.scales, before.scales)
    assert _same_rows(row_order(first.weight), rows[0].weight)
    x = torch.randn(3, 128, dtype=torch.bfloat16, requires_grad=True)
    y = tiled(x)
    torch.testing.assert_close(y, rows(x))
    y.sum().backward()
    assert x.grad is not None


def _gpt_oss(folder: Path, intermediate: int = 64) -> object:
    """A tiny gpt-oss in its released layout, experts in MXFP4, of sizes that tiles have."""
    transformers = pytest.importorskip("transformers")
    tiny_models = pytest.importorskip("tiny_models")
    sizes = {**tiny_models._SIZES, "hidden_size": 64, "intermediate_size": intermediate}
    config = transformers.GptOssConfig(**sizes, **tiny_models._MOE, head_dim=16, sliding_window=8)
    torch.manual_seed(3)
    transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder / "plain")
    checkpoint = open_checkpoint(folder / "plain")
    model = load_model(checkpoint, torch.device("cpu"), torch.bfloat16, quantization="plain").with_mxfp4_experts()
    save_model(model, checkpoint, folder / "mxfp4", layout="mxfp4")
    return config


def test_experts_of_a_checkpoint_are_in_tiles_on_hopper(tmp_path: Path) -> None:
    """Both stacks of a layer; they are saved without a changed byte."""
    _gpt_oss(tmp_path)
    folder, cpu = tmp_path / "mxfp4", torch.device("cpu")
    checkpoint = open_checkpoint(folder)
    rows = load_model(checkpoint, cpu, torch.bfloat16)
    with pretend(H200):
        tiled = load_model(checkpoint, cpu, torch.bfloat16)
        exact = load_model(checkpoint, cpu, torch.float32)  # no kernel of tiles computes in float32
        save_model(tiled, checkpoint, tmp_path / "again", layout="mxfp4")
        made = load_model(open_checkpoint(tmp_path / "plain"), cpu, torch.bfloat16).with_mxfp4_experts()
    for name in ("gate_up_proj", "down_proj"):
        stack, expected = getattr(tiled.layers[1], name), getattr(rows.layers[1], name)
        assert (stack.format, expected.format) == ("mxfp4_tiles", "mxfp4")
        assert getattr(exact.layers[1], name).format == "mxfp4"
        assert getattr(made.layers[1], name).format == "mxfp4_tiles"
        assert _same_rows(row_order(stack), expected)
        assert stack.nbytes == expected.nbytes
    before, after = (load_file(one / "model.safetensors") for one in (folder, tmp_path / "again"))
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_experts_are_in_tiles_together_or_not_at_all() -> None:
    stack = {size: Weight.quantize(torch.randn(2, 128, size), "mxfp4") for size in (64, 96, 128)}
    with pretend(H200):
        given = stack[128], stack[96]  # 96 columns are no tiles
        assert experts_order(*given, torch.bfloat16) == given
        assert experts_order(stack[128], stack[64], torch.float32) == (stack[128], stack[64])
        plain = torch.randn(2, 128, 64)
        assert experts_order(stack[128], plain, torch.bfloat16) == (stack[128], plain)
        for format in ("int4", "int8"):
            pair = (Weight.quantize(torch.randn(2, 128, 128), format), stack[64])
            assert [one.format for one in experts_order(*pair, torch.float16)] == [f"{format}_tiles", "mxfp4_tiles"]
    with pretend(KNOWN["b200"]):
        assert experts_order(stack[128], stack[64], torch.bfloat16) == (stack[128], stack[64])


def test_frozen_experts_of_transformers_are_in_tiles_on_hopper(tmp_path: Path) -> None:
    """Their state dict is that of experts in rows, and so is what they compute and send back."""
    _gpt_oss(tmp_path)
    rows = hf.load_gpt_oss(tmp_path / "mxfp4", "cpu", torch.bfloat16)
    with pretend(H200):
        tiled = hf.load_gpt_oss(tmp_path / "mxfp4", "cpu", torch.bfloat16)
    mine, other = (model.model.layers[0].mlp.experts for model in (tiled, rows))
    assert mine.gate_up_proj.weight.format == mine.down_proj.weight.format == "mxfp4_tiles"
    assert other.gate_up_proj.weight.format == "mxfp4"
    expected = rows.state_dict()
    for name, value in tiled.state_dict().items():
        assert value == expected[name] if isinstance(value, str) else torch.equal(value, expected[name]), name
    mine.gate_up_proj.data.zero_()
    tiled.load_state_dict(expected)
    tokens = torch.arange(1, 9)[None]
    torch.testing.assert_close(tiled(tokens).logits, rows(tokens).logits)
    grads = []
    for experts in (mine, other):
        x = torch.linspace(-1, 1, 3 * 64).view(3, 64).bfloat16().requires_grad_()
        experts(x, torch.tensor([[0, 1], [2, 1], [3, 0]]), torch.full((3, 2), 0.5)).float().square().sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(*grads)
