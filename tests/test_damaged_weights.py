"""Checkpoints whose tensors fit neither the configuration nor each other are refused when they are loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from flashkernel import Weight
from flashkernel.engine import ModelError
from flashkernel.engine.checkpoint import open_checkpoint
from flashkernel.engine.model_loader import load_model
from flashkernel.engine.save_model import save_model
from flashkernel.engine.transformer import PROJECTIONS, Transformer

pytest.importorskip("transformers")
import tiny_models

LAYER = "model.layers.0."
ATTENTION, MLP = LAYER + "self_attn.", LAYER + "mlp."


def _load(folder: Path) -> Transformer:
    return load_model(open_checkpoint(folder), torch.device("cpu"), torch.float32)


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    tiny_models.save("llama3", folder)  # with biases
    return folder


def _fp8(*suffixes: str, dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    scales = torch.ones(32, 1, dtype=dtype)
    data = torch.ones(32, 48).to(torch.float8_e4m3fn)
    return {MLP + "down_proj.weight": data, **{f"{MLP}down_proj.weight{suffix}": scales.clone() for suffix in suffixes}}


@pytest.mark.parametrize("changed, message", [
    ({MLP + "gate_proj.weight": torch.ones(40, 32), MLP + "up_proj.weight": torch.ones(56, 32)},
     r"gate_proj.weight, .*up_proj.weight have \[40, 56\] rows, not \[40, 40\]"),
    ({ATTENTION + "q_proj.weight": torch.ones(40, 32), ATTENTION + "k_proj.weight": torch.ones(8, 32)},
     r"have \[40, 8, 16\] rows, not \[32, 16, 16\]"),
    ({ATTENTION + "q_proj.bias": torch.ones(40), ATTENTION + "k_proj.bias": torch.ones(8)},
     r"have \[40, 8, 16\] rows, not \[32, 16, 16\]"),
    ({ATTENTION + "o_proj.bias": torch.ones(1)}, r"o_proj_bias of layer 0 has shape \(1,\)"),
    ({LAYER + "input_layernorm.weight": torch.ones(1)}, r"attention_norm of layer 0 has shape \(1,\)"),
    ({"model.norm.weight": torch.ones(31)}, r"final_norm has shape \(31,\)"),
    ({MLP + "down_proj.weight": torch.ones(32, 40)}, r"down_proj of layer 0 has shape \(32, 40\)"),
    ({MLP + "down_proj.weight": torch.ones(32, 48, dtype=torch.int32)}, "down_proj.weight is in int32"),
    ({MLP + "down_proj.weight": torch.ones(32, 48, dtype=torch.uint8)}, "down_proj.weight is in uint8"),
    ({LAYER + "input_layernorm.weight": torch.ones(32, dtype=torch.bool)}, "input_layernorm.weight is in bool"),
    (_fp8("_scale", dtype=torch.uint8), "scales of fp8 data are floats; they are torch.uint8"),
    (_fp8("_scale", "_scale_inv"), "down_proj.weight has scales twice"),
])  # fmt: skip
def test_what_does_not_fit_is_refused(changed: dict[str, Any], message: str, stored: Path, tmp_path: Path) -> None:
    tensors = load_file(stored / "model.safetensors")
    save_file({**tensors, **changed}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((stored / "config.json").read_bytes())
    with pytest.raises(ModelError, match=message):
        _load(tmp_path)


@pytest.mark.parametrize("file", [3, None, "", "/etc/passwd", "../other/model.safetensors"])
def test_an_index_of_other_files_is_refused(file: Any, tmp_path: Path) -> None:
    tiny_models.save("llama", tmp_path, shards=True)
    index = tmp_path / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["model.norm.weight"] = file
    index.write_text(json.dumps(values))
    with pytest.raises(ModelError, match="where a file of the folder belongs"):
        _load(tmp_path)


def test_a_folder_that_cannot_be_made(stored: Path, tmp_path: Path) -> None:
    model, checkpoint = _load(stored), open_checkpoint(stored)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ModelError, match="the model cannot be written"):
        save_model(model.quantized("int8"), checkpoint, tmp_path / "file" / "small")
    assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("name", ["self_attn.k_proj.", "block_sparse_moe.experts.1.w2."])
def test_zero_points_that_are_all_the_middle(name: str, tmp_path: Path) -> None:
    """One of q, k and v, or of the experts, may be symmetric in a checkpoint with zero points."""
    tiny_models.save("mixtral", tmp_path / "plain")
    plain, layers = _load(tmp_path / "plain"), []
    for layer in plain.layers:
        found = {one: Weight.quantize(getattr(layer, one), "int4", "1x16", symmetric=False) for one in PROJECTIONS}
        layers.append(replace(layer, **found))  # type: ignore[arg-type]
    quantized = Transformer(plain.config, plain.weights, layers)
    save_model(quantized, open_checkpoint(tmp_path / "plain"), tmp_path / "small")
    file = tmp_path / "small" / "model.safetensors"
    tensors = load_file(file)
    key = LAYER + name + "weight_zero_point"
    save_file({**tensors, key: torch.full_like(tensors[key], 0x88888888 - 2**32)}, file)
    layer = _load(tmp_path / "small").layers[0]
    weight: Any = layer.qkv_proj if "k_proj" in name else layer.down_proj
    assert weight.zeros is not None
    middle = weight.zeros[32:48] if "k_proj" in name else weight.zeros[1]
    assert bool((middle == 8).all())
    assert not bool((weight.zeros == 8).all())
