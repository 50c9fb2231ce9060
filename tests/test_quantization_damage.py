"""Quantization of models and texts that are damaged: an error says so, and no method takes NaN for a result."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashkernel import Weight
from flashkernel.core.shapes import Model
from flashkernel.engine.config import ModelError
from flashkernel.engine.dummy_weights import dummy_transformer
from flashkernel.engine.transformer import Transformer
from flashkernel.quantization import Method, Scheme, perplexity, quantize_model
from flashkernel.quantization.layer_pass import round_to_int4

METHODS = ["rtn", "gptq", "awq", "smoothquant"]


def _model(dtype: torch.dtype = torch.float32) -> Transformer:
    torch.manual_seed(0)
    shape = Model(hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, layers=2, vocab=200)
    return dummy_transformer(shape, "cpu", dtype, max_position_embeddings=128)


def _tokens(sequences: int = 4, length: int = 32) -> torch.Tensor:
    return torch.randint(0, 200, (sequences, length), generator=torch.Generator().manual_seed(1))


def _scheme(method: str) -> Scheme:
    return Scheme("int8", -1, True, torch.int8) if method == "smoothquant" else Scheme("int4", 32)


def _changed(model: Transformer, field: str, value: float) -> Transformer:
    """The model with one element of the second layer replaced."""
    tensor: Any = getattr(model.layers[1], field).clone()
    tensor.view(-1)[5] = value
    return Transformer(model.config, model.weights, [model.layers[0], replace(model.layers[1], **{field: tensor})])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_damaged_weights(method: str, value: float) -> None:
    damaged = _changed(_model(), "down_proj", value)
    for tokens in (_tokens(), None) if method == "rtn" else (_tokens(),):
        with pytest.raises(ValueError, match="1 of 6144 elements of down_proj in layer 1 are infinite or NaN"):
            quantize_model(damaged, tokens, method, _scheme(method))


def test_weights_without_values() -> None:
    model = _model()
    layers = [replace(layer, o_proj=layer.o_proj.to("meta")) for layer in model.layers]
    with pytest.raises(ValueError, match="o_proj in layer 0 is on the meta device"):
        quantize_model(Transformer(model.config, model.weights, layers), None, "rtn", Scheme("int4", 32))


@pytest.mark.parametrize("method", METHODS)
def test_damaged_inputs(method: str) -> None:
    """A norm with NaN: GPTQ would ask for more text, and AWQ and SmoothQuant find that no factor helps."""
    damaged = _changed(_model(), "attention_norm", math.nan)
    with pytest.raises(ValueError, match="inputs of qkv_proj in layer 1 are infinite or NaN"):
        quantize_model(damaged, _tokens(), method, _scheme(method))


@pytest.mark.parametrize("tokens", [
    torch.full((2, 8), 200), torch.full((2, 8), -1), torch.zeros(0, 8, dtype=torch.int64), torch.zeros(2, 8),
])  # fmt: skip
def test_tokens_that_the_model_does_not_have(tokens: torch.Tensor) -> None:
    for call in (
        lambda: quantize_model(_model(), tokens, "rtn", Scheme("int4", 32)),
        lambda: perplexity(_model(), tokens),
    ):
        with pytest.raises(
            ValueError, match="must be int64, at least one sequence, and tokens of the model's vocabulary"
        ):
            call()


def test_perplexity_is_a_number() -> None:
    model = _model()
    with pytest.raises(ValueError, match="windows have one token each"):
        perplexity(model, _tokens(4, 1))
    with pytest.raises(ValueError, match="124 of 124 tokens no probability"):
        perplexity(_changed(model, "attention_norm", math.nan), _tokens())
    sharp = replace(model.weights, lm_head=model.weights.lm_head * 1e5)  # type: ignore[operator]
    assert perplexity(Transformer(model.config, sharp, model.layers), _tokens()).value == math.inf


@pytest.mark.parametrize("factor", [0.0, 1e-12, 1e-9, 1.0, 1e4, 1e30])
def test_keys_in_int4_are_finite(factor: float) -> None:
    """Scales that float16 does not have are its least or largest."""
    values = torch.linspace(-1, 1, 128).view(1, 2, 64) * factor
    found = round_to_int4(values)
    assert found.isfinite().all()
    assert factor not in (1.0, 1e4) or (found - values).abs().max() <= 0.05 * factor
    assert found.abs().max() <= 1.1 * values.abs().max() + 2**-20


@pytest.mark.parametrize("field", ["o_proj", "down_proj", "mlp_norm"])
def test_a_state_of_another_model_is_refused(field: str, tmp_path: Path) -> None:
    """Fine-tuned weights of the last layer alone make it another model."""
    model, scheme = _model(), Scheme("int4", 32)
    quantize_model(model, _tokens(), "rtn", scheme, state=tmp_path / "state")
    with pytest.raises(ModelError, match="the state of another quantization"):
        quantize_model(_changed(model, field, 0.125), _tokens(), "rtn", scheme, state=tmp_path / "state")
    found, _ = quantize_model(_model(), _tokens(), "rtn", scheme, state=tmp_path / "state")
    assert all(isinstance(layer.down_proj, Weight) for layer in found.layers)
    with pytest.raises(ModelError, match="the state of another quantization"):
        quantize_model(model, _tokens(), Method("rtn", strength=0.6), scheme, state=tmp_path / "state")


@pytest.mark.parametrize("options, message", [
    (["--layout", "awq", "--bits", "8"], "the layout awq has 4 bits, not 8"),
    (["--layout", "mxfp4"], "the layout mxfp4 is that of --method mxfp4, not of gptq"),
    (["--method", "mxfp4", "--layout", "gptq"], "MXFP4 is not stored in the layout gptq"),
    (["--method", "smoothquant", "--bits", "8", "--layout", "gptq_v2"], "no place for activations in 8 bits"),
    (["--method", "awq", "--act-order"], "--act-order is an order of GPTQ"),
    (["--group-size", "16", "--text", "binary"], "binary: it is no text in UTF-8"),
])  # fmt: skip
def test_options_are_refused_before_the_calibration(
    options: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from typer.testing import CliRunner

    from flashkernel.cli import app

    tiny_models = pytest.importorskip("tiny_models")
    tiny_models.save("llama", tmp_path / "plain")
    monkeypatch.chdir(tmp_path)
    Path("binary").write_bytes(b"\xff\xfe\x00")
    done = CliRunner().invoke(
        app, ["quantize", "plain", "--out", "small", "--length", "16", "--samples", "1", *options]
    )
    assert done.exit_code == 2
    assert message in " ".join(done.output.split())
    assert not Path("small").exists()
    assert not Path("small.calibration").exists()


def test_rounding_needs_no_tokenizer(tmp_path: Path) -> None:
    """What it rounds to does not depend on the tokens; methods that learn from a text say what is missing."""
    from typer.testing import CliRunner

    from flashkernel.cli import app
    from flashkernel.engine.checkpoint import open_checkpoint
    from flashkernel.engine.model_loader import load_model

    tiny_models = pytest.importorskip("tiny_models")
    tiny_models.save("llama", tmp_path / "plain")
    command = ["quantize", str(tmp_path / "plain"), "--length", "16", "--samples", "2", "--group-size", "16"]
    outputs = []
    for folder, method, code in (("with", "rtn", 0), ("without", "rtn", 0), ("other", "awq", 2)):
        done = CliRunner().invoke(app, [*command, "--out", str(tmp_path / folder), "--method", method])
        assert done.exit_code == code, done.output
        outputs.append(" ".join(done.output.split()))
        (tmp_path / "plain" / "tokenizer.json").unlink(missing_ok=True)
    assert "it has no tokenizer; the errors shown are those of random tokens" in outputs[1]
    assert "the model has no tokenizer, which text needs" in outputs[2]
    first, second = (
        load_model(open_checkpoint(tmp_path / name), torch.device("cpu"), torch.float32) for name in ("with", "without")
    )
    assert all(torch.equal(one.down_proj.data, two.down_proj.data) for one, two in zip(first.layers, second.layers))


def test_a_gguf_file_becomes_mxfp4(tmp_path: Path) -> None:
    """Its own formats are dequantized first."""
    from typer.testing import CliRunner

    from flashkernel.cli import app
    from flashkernel.engine.checkpoint import open_checkpoint
    from flashkernel.engine.model_loader import load_model

    tiny_models = pytest.importorskip("tiny_models")
    model = tiny_models.build("llama", intermediate_size=64)
    tiny_models.save_gguf(model, tmp_path / "model.gguf", "Q4_1")
    arguments = ["quantize", str(tmp_path / "model.gguf"), "--out", str(tmp_path / "small"), "--method", "mxfp4"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    plain = load_model(open_checkpoint(tmp_path / "model.gguf"), torch.device("cpu"), torch.float32, None, "plain")
    found = load_model(open_checkpoint(tmp_path / "small"), torch.device("cpu"), torch.float32)
    for mine, theirs in zip(found.layers, plain.layers):
        weight: Any = mine.down_proj
        expected = Weight.quantize(theirs.down_proj, "mxfp4")  # type: ignore[arg-type]
        assert torch.equal(weight.dequantize(torch.float32), expected.dequantize(torch.float32))
