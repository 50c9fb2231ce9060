"""Quantized checkpoints: what is saved is loaded again, in every layout; damaged ones and full disks are reported."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode

from flashkernel import Weight
from flashkernel.engine import LLM, ModelError, SamplingParams
from flashkernel.engine.checkpoint import open_checkpoint
from flashkernel.engine.model_loader import load_model
from flashkernel.engine.save_model import save_model
from flashkernel.engine.transformer import PROJECTIONS, Transformer

pytest.importorskip("transformers")
import tiny_models

PARAMS = SamplingParams(max_tokens=8, ignore_eos=True)


def _model(folder: Path, name: str = "llama") -> Transformer:
    tiny_models.save(name, folder)
    return load_model(open_checkpoint(folder), torch.device("cpu"), torch.float32)


def _quantized(model: Transformer, format: str, granularity: str | None, symmetric: bool = True, **more: Any) -> Any:
    """The model with quantized projections, whose scales are float16 numbers."""

    def quantize(matrix: Any) -> Weight:
        found = Weight.quantize(matrix, format, granularity, symmetric=symmetric, **more)
        assert found.scales is not None
        return found if format == "mxfp4" else replace(found, scales=found.scales.half().float())

    layers = [
        replace(layer, **{name: quantize(getattr(layer, name)) for name in PROJECTIONS}) for layer in model.layers
    ]
    return Transformer(model.config, model.weights, layers)


def _tokens(model: Any) -> list[tuple[int, ...]]:
    llm = LLM(model, device="cpu", dtype="float32", kv_cache_tokens=512)
    return [one.outputs[0].token_ids for one in llm.generate(tiny_models.prompts((5, 20)), PARAMS)]


@pytest.mark.parametrize("name", ["llama", "llama3", "qwen3", "mixtral"])
@pytest.mark.parametrize(
    "layout, format, granularity, symmetric",
    [
        ("compressed-tensors", "int4", "1x16", True), ("compressed-tensors", "int4", "row", False),
        ("compressed-tensors", "int8", "row", True), ("compressed-tensors", "fp8", "row", True),
        ("gptq", "int4", "1x16", True), ("gptq_v2", "int4", "1x16", False), ("gptq", "int8", "row", True),
        ("awq", "int4", "1x16", False), ("awq", "int4", "1x16", True),
    ],
)  # fmt: skip
def test_saved_and_loaded(
    name: str, layout: str, format: str, granularity: str, symmetric: bool, tmp_path: Path
) -> None:
    model = _model(tmp_path / "plain", name)
    quantized = _quantized(model, format, granularity, symmetric)
    save_model(quantized, open_checkpoint(tmp_path / "plain"), tmp_path / "small", layout)
    again = load_model(open_checkpoint(tmp_path / "small"), torch.device("cpu"), torch.float32)
    for mine, theirs in zip(again.layers, quantized.layers):
        for field, value in vars(theirs).items():
            found = getattr(mine, field)
            if isinstance(value, Weight):
                assert isinstance(found, Weight)
                assert torch.equal(found.dequantize(torch.float32), value.dequantize(torch.float32)), field
                assert found.format == format
            elif value is not None:
                assert torch.equal(found, value), field
    assert _tokens(tmp_path / "small") == _tokens(quantized)


def test_activations_in_int8_are_one_tensor(tmp_path: Path) -> None:
    """int-quantized: int8 weights as they are. x stays as it is when they are loaded."""
    model = _model(tmp_path / "plain")
    quantized = _quantized(model, "int8", "row", activation_dtype=torch.int8)
    save_model(quantized, open_checkpoint(tmp_path / "plain"), tmp_path / "small")
    config = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert config["format"] == "int-quantized"
    assert config["config_groups"]["group_0"]["input_activations"]["strategy"] == "token"
    again = load_model(open_checkpoint(tmp_path / "small"), torch.device("cpu"), torch.float32)
    assert repr(again.layers[0].o_proj).startswith("Weight(int8 row, 32x32")


def _projections_alone(model: Transformer, **changed: str) -> Transformer:
    """The model with int8 projections, and some in other formats."""
    layers = []
    for layer in model.layers:
        found = {name: Weight.quantize(getattr(layer, name), changed.get(name, "int8")) for name in PROJECTIONS}
        layers.append(replace(layer, **found))  # type: ignore[arg-type]
    return Transformer(model.config, model.weights, layers)


def test_one_scale_for_q_k_and_v(tmp_path: Path) -> None:
    """q, k and v share a scale in memory, and each has a tensor of its own in the file."""
    quantized = _quantized(_model(tmp_path / "plain"), "int8", "tensor", activation_dtype=torch.int8)
    save_model(quantized, open_checkpoint(tmp_path / "plain"), tmp_path / "small")
    again = load_model(open_checkpoint(tmp_path / "small"), torch.device("cpu"), torch.float32)
    mine: Any = again.layers[1].qkv_proj
    assert torch.equal(mine.dequantize(torch.float32), quantized.layers[1].qkv_proj.dequantize(torch.float32))


def test_scales_of_compressed_tensors_are_exact(tmp_path: Path) -> None:
    model = _model(tmp_path / "plain")
    quantized = _projections_alone(model)
    save_model(quantized, open_checkpoint(tmp_path / "plain"), tmp_path / "small")
    again = load_model(open_checkpoint(tmp_path / "small"), torch.device("cpu"), torch.float32)
    mine, theirs = again.layers[0].down_proj, quantized.layers[0].down_proj
    assert torch.equal(mine.scales, theirs.scales)  # type: ignore[union-attr]


def test_what_config_says_holds_for_all_projections(tmp_path: Path) -> None:
    model = _model(tmp_path / "plain")
    checkpoint = open_checkpoint(tmp_path / "plain")
    with pytest.raises(ModelError, match=r"down_proj.weight is Weight\(int4.*quantize all projections alike"):
        save_model(_projections_alone(model, down_proj="int4"), checkpoint, tmp_path / "small")
    for format, granularity in (("fp8_e5m2", None), ("fp8", "block"), ("fp8", "group")):
        with pytest.raises(ModelError, match=r"cannot be stored in the layout 'compressed-tensors': "):
            save_model(_quantized(model, format, granularity), checkpoint, tmp_path / "small")
    wide = _quantized(model, "int4", "row")
    layers = [replace(one, o_proj=replace(one.o_proj, scales=one.o_proj.scales * 1e8)) for one in wide.layers]
    wide = Transformer(model.config, model.weights, layers)
    for layout in ("gptq", "awq"):
        with pytest.raises(ModelError, match="are beyond the range of float16"):
            save_model(wide, checkpoint, tmp_path / "small", layout)
    save_model(wide, checkpoint, tmp_path / "small")
    again = load_model(open_checkpoint(tmp_path / "small"), torch.device("cpu"), torch.float32)
    assert torch.equal(again.layers[0].o_proj.scales, layers[0].o_proj.scales)  # type: ignore[union-attr]


@pytest.mark.parametrize("layout, listed", [("compressed-tensors", "ignore"), ("awq", "modules_to_not_convert")])
def test_routers_are_named_as_plain(layout: str, listed: str, tmp_path: Path) -> None:
    """Other tools take every linear layer for quantized that config.json does not name."""
    model = _model(tmp_path / "plain", "mixtral")
    save_model(_quantized(model, "int4", "1x16"), open_checkpoint(tmp_path / "plain"), tmp_path / "small", layout)
    config = json.loads((tmp_path / "small" / "config.json").read_text())["quantization_config"]
    assert config[listed] == ["lm_head", *[f"model.layers.{index}.block_sparse_moe.gate" for index in (0, 1)]]


def test_mxfp4_of_a_dense_model(tmp_path: Path) -> None:
    from flashkernel.core.shapes import Model
    from flashkernel.engine.dummy_weights import dummy_transformer

    plain = _model(tmp_path / "plain")
    torch.manual_seed(0)
    shape = Model(hidden=32, intermediate=64, heads=4, kv_heads=2, head_dim=8, layers=2, vocab=320)
    model = dummy_transformer(shape, "cpu", torch.float32, max_position_embeddings=256)
    quantized = Transformer(replace(plain.config), model.weights, _quantized(model, "mxfp4", None).layers)
    save_model(quantized, open_checkpoint(tmp_path / "plain"), tmp_path / "small")
    again = load_model(open_checkpoint(tmp_path / "small"), torch.device("cpu"), torch.float32)
    for name in PROJECTIONS:
        mine, theirs = getattr(again.layers[1], name), getattr(quantized.layers[1], name)
        assert torch.equal(mine.data, theirs.data)
        assert torch.equal(mine.scales, theirs.scales)


def _saves_as_released(folder: Path) -> None:
    """A checkpoint in gpt-oss's released layout is loaded and saved without a changed byte, by the command too."""
    from typer.testing import CliRunner

    from flashkernel.cli import app

    source = load_file(folder / "model.safetensors")
    checkpoint = open_checkpoint(folder)
    model = load_model(checkpoint, torch.device("cpu"), torch.float32)
    save_model(model, checkpoint, folder / "saved", "mxfp4")
    done = CliRunner().invoke(app, ["quantize", str(folder), "--out", str(folder / "again"), "--method", "mxfp4"])
    assert done.exit_code == 0, done.output
    for name in ("saved", "again"):
        found = load_file(folder / name / "model.safetensors")
        assert found.keys() == source.keys()
        for key, value in source.items():
            assert found[key].dtype == value.dtype, key
            assert torch.equal(found[key], value), key
        config = json.loads((folder / name / "config.json").read_text())
        assert config["quantization_config"]["quant_method"] == "mxfp4"
        assert isinstance(load_model(open_checkpoint(folder / name), torch.device("cpu"), torch.float32)
                          .layers[0].down_proj, Weight)  # fmt: skip
    with pytest.raises(ModelError, match="experts in MXFP4 alone"):
        save_model(model.quantized("int8"), checkpoint, folder / "other", "mxfp4")


def test_plain_experts_of_gpt_oss_become_mxfp4(tmp_path: Path) -> None:
    """`flashkernel quantize --method mxfp4` of a model in 16 bits: names and shapes of the released files."""
    import transformers
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors
    from typer.testing import CliRunner

    from flashkernel.cli import app

    sizes = {**tiny_models._SIZES, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    config = transformers.GptOssConfig(**sizes, head_dim=16, sliding_window=8, rope_parameters=tiny_models._YARN)
    model = transformers.AutoModelForCausalLM.from_config(config).float()
    model.save_pretrained(tmp_path / "plain")
    arguments = ["quantize", str(tmp_path / "plain"), "--out", str(tmp_path / "packed"), "--method", "mxfp4"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    found = load_file(tmp_path / "packed" / "model.safetensors")
    name = "model.layers.1.mlp.experts.gate_up_proj"
    blocks, scales = found[name + "_blocks"], found[name + "_scales"]
    assert (blocks.dtype, blocks.shape) == (torch.uint8, (4, 128, 1, 16))
    assert (scales.dtype, scales.shape) == (torch.uint8, (4, 128, 1))
    assert name not in found
    unpacked = convert_moe_packed_tensors(blocks.clone(), scales.clone(), dtype=torch.float32)
    expected = model.get_submodule("model.layers.1.mlp.experts").gate_up_proj.detach()
    assert (unpacked - expected).abs().max() < 0.26 * expected.abs().max()


class _FloatStacks(TorchDispatchMode):
    """Inside, collects the shapes of float tensors that hold a stack of four experts."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: list[tuple[int, ...]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        for one in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(one, torch.Tensor) and one.is_floating_point() and one.ndim > 2 and one.shape[0] == 4:
                self.shapes.append(tuple(one.shape))
        return made


def test_experts_of_gpt_oss_stay_in_mxfp4(tmp_path: Path) -> None:
    """`*_blocks` and `*_scales` are kept, or dequantized with quantization="plain": the tokens are the same."""
    import transformers

    sizes = {**tiny_models._SIZES, "intermediate_size": 64, "num_local_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    config = transformers.GptOssConfig(**sizes, head_dim=16, sliding_window=8, rope_parameters=tiny_models._YARN)
    transformers.AutoModelForCausalLM.from_config(config).float().save_pretrained(tmp_path)

    def pack(tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
            weight = Weight.quantize(tensors.pop(name).transpose(1, 2).contiguous() * 10, "mxfp4")
            tensors[f"{name}_blocks"] = weight.data.unflatten(-1, (-1, 16)).contiguous()
            tensors[f"{name}_scales"] = weight.scales
        for name in [name for name in tensors if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight",
                                                                "o_proj.weight"))]:  # fmt: skip
            tensors[name] = Weight.quantize(tensors[name] * 10, "mxfp4").dequantize(torch.float32)

    _change(tmp_path, pack)
    found = []
    for quantization in ("plain", None):
        with _FloatStacks() as stacks:
            llm = LLM(tmp_path, device="cpu", dtype="float32", kv_cache_tokens=512, quantization=quantization)
        assert any(math.prod(shape) >= 4 * 32 * 64 for shape in stacks.shapes) == (quantization == "plain")
        experts = llm.model.layers[0].gate_up_proj
        assert isinstance(experts, Weight) == (quantization is None)
        assert experts.shape == (4, 128, 32)
        found.append([one.outputs[0].token_ids for one in llm.generate(tiny_models.prompts((5, 20)), PARAMS)])
    assert found[0] == found[1]
    _saves_as_released(tmp_path)
    _change(tmp_path, lambda tensors: tensors.pop("model.layers.0.mlp.experts.down_proj_scales"))
    with pytest.raises(ModelError, match="down_proj_scales is missing"):
        LLM(tmp_path, device="cpu", dtype="float32", kv_cache_tokens=512)


def test_a_gguf_file_becomes_a_folder(tmp_path: Path) -> None:
    """Matrices that stay plain are in the source's bfloat16; norms and scales are as they were computed."""
    tiny_models.save_gguf(tiny_models.build("llama"), tmp_path / "model.gguf")
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    model = load_model(checkpoint, torch.device("cpu"), torch.float32)
    quantized = _quantized(model, "int4", "1x16")
    save_model(quantized, checkpoint, tmp_path / "small")
    stored = load_file(tmp_path / "small" / "model.safetensors")
    assert stored["model.embed_tokens.weight"].dtype == torch.bfloat16
    assert stored["model.norm.weight"].dtype == torch.float32
    embedding = model.weights.embedding.bfloat16().float()
    weights = replace(quantized.weights, embedding=embedding, lm_head=embedding)
    assert _tokens(tmp_path / "small") == _tokens(Transformer(quantized.config, weights, quantized.layers))


def test_the_older_file_of_autogptq(tmp_path: Path) -> None:
    model = _model(tmp_path / "plain")
    quantized = _quantized(model, "int4", "1x16")
    save_model(quantized, open_checkpoint(tmp_path / "plain"), tmp_path / "small", "gptq")
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    found = config.pop("quantization_config")
    (tmp_path / "small" / "config.json").write_text(json.dumps(config))
    settings = {"bits": found["bits"], "group_size": found["group_size"], "desc_act": False, "sym": True}
    (tmp_path / "small" / "quantize_config.json").write_text(json.dumps(settings))
    again = load_model(open_checkpoint(tmp_path / "small"), torch.device("cpu"), torch.float32)
    mine, theirs = again.layers[0].down_proj, quantized.layers[0].down_proj
    assert torch.equal(mine.dequantize(torch.float32), theirs.dequantize(torch.float32))  # type: ignore[union-attr]


def _change(folder: Path, change: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("change, message", [
    (lambda t: t.pop("model.layers.0.self_attn.q_proj.scales"), "q_proj.weight: scales are missing"),
    (lambda t: t.pop("model.layers.1.mlp.up_proj.qweight"), "up_proj.weight are missing"),
    (lambda t: t.update({"model.layers.0.mlp.down_proj.qzeros": torch.zeros(9, 4, dtype=torch.int32)}),
     "down_proj.weight: the shapes do not fit together"),
    (lambda t: t.update({"model.layers.0.mlp.down_proj.lora": torch.zeros(2)}), "have no place in a llama model"),
])  # fmt: skip
def test_damaged_checkpoints(change: Any, message: str, tmp_path: Path) -> None:
    model = _model(tmp_path / "plain")
    save_model(_quantized(model, "int4", "1x16"), open_checkpoint(tmp_path / "plain"), tmp_path / "small", "gptq")
    _change(tmp_path / "small", change)
    with pytest.raises(ModelError, match=message):
        load_model(open_checkpoint(tmp_path / "small"), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("change, message", [
    ({"quant_method": "bitsandbytes"}, "quantized by 'bitsandbytes' are not known"),
    ({"quant_method": "gptq", "bits": 3}, "weights of 3 bits are not known"),
    ({"quant_method": "awq", "version": "gemv"}, "AWQ's version 'gemv' is not known"),
    ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "format 'marlin-24'"),
    ({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"W4A16": ["Linear"]}},
     r"with \['None'\] bits"),
])  # fmt: skip
def test_unknown_quantization(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path)
    config = json.loads((tmp_path / "config.json").read_text()) | {"quantization_config": change}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match=message):
        load_model(open_checkpoint(tmp_path), torch.device("cpu"), torch.float32)


def _reload_with(folder: Path, **arguments: Any) -> Any:
    """The model of a folder whose config.json says something else of the groups."""
    file = folder / "config.json"
    values = json.loads(file.read_text())
    config = values["quantization_config"]
    config.update(arguments) if "group_size" in config else config["config_groups"]["group_0"]["weights"].update(
        arguments
    )
    file.write_text(json.dumps(values))
    return load_model(open_checkpoint(folder), torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("layout", ["gptq", "awq", "compressed-tensors"])
def test_another_group_size_in_config(layout: str, tmp_path: Path) -> None:
    model = _model(tmp_path / "plain")
    save_model(_quantized(model, "int4", "1x16"), open_checkpoint(tmp_path / "plain"), tmp_path / "small", layout)
    with pytest.raises(ModelError, match=r"q_proj.weight: its scales are for 1x16 .* config.json says 1x8;"):
        _reload_with(tmp_path / "small", group_size=8)
    if layout == "gptq":  # some layers have a size of their own
        _reload_with(tmp_path / "small", dynamic={"+:.*down_proj": {"group_size": 16}})


def test_another_block_size_in_config(tmp_path: Path) -> None:
    model = _model(tmp_path / "plain")
    save_model(_quantized(model, "fp8", "1x16"), open_checkpoint(tmp_path / "plain"), tmp_path / "small")
    with pytest.raises(ModelError, match=r"its scales are for 1x16 .* config.json says 2x16"):
        _reload_with(tmp_path / "small", strategy="block", block_structure=[2, 16])


def test_nothing_is_left_where_saving_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = _model(tmp_path / "plain")
    quantized, checkpoint = _quantized(model, "int4", "1x16"), open_checkpoint(tmp_path / "plain")
    target = tmp_path / "out" / "small"

    def full(*arguments: Any, **options: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_text", full)
        with pytest.raises(ModelError, match=r"No space left on device.*nothing was left there"):
            save_model(quantized, checkpoint, target)
    assert list((tmp_path / "out").iterdir()) == []
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: usage)
        with pytest.raises(ModelError, match=r"0\.00 GB are free there"):
            save_model(quantized, checkpoint, target)
    (target).mkdir()
    (target / "kept").write_text("mine")
    with pytest.raises(ModelError, match="exists and is not empty"):
        save_model(quantized, checkpoint, target)
    with pytest.raises(ValueError, match="layout is 'zip'"):
        save_model(quantized, checkpoint, tmp_path / "other", "zip")
    with pytest.raises(ModelError, match="quantize it to int4 or int8"):
        save_model(_quantized(model, "fp8", "row"), checkpoint, tmp_path / "other", "gptq")
    gpt2 = _model(tmp_path / "gpt2", "gpt2")
    with pytest.raises(ModelError, match=r"is stored \(in, out\)"):
        save_model(_quantized(gpt2, "int4", "1x16"), open_checkpoint(tmp_path / "gpt2"), tmp_path / "other")
    assert not (tmp_path / "other").exists()
