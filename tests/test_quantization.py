"""Quantization of models: methods against rounding to nearest, folding, resuming, perplexity, and the commands."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flashkernel import Weight
from flashkernel.core.shapes import Model
from flashkernel.engine.config import ModelError
from flashkernel.engine.dummy_weights import dummy_transformer
from flashkernel.engine.transformer import PROJECTIONS, Transformer
from flashkernel.quantization import Method, Scheme, perplexity, quantize_model, shipped_text, windows
from flashkernel.quantization.calibration import _row_ratio
from flashkernel.quantization.folding import fold, folds
from flashkernel.quantization.gptq import gptq
from flashkernel.quantization.layer_pass import InputStatistics, SequenceRunner
from flashkernel.quantization.scheme import fit_grid, on_grid, round_to_nearest

SHAPE = Model(hidden=64, intermediate=96, heads=4, kv_heads=2, head_dim=16, layers=3, vocab=100)


def _model(**options: Any) -> Transformer:
    torch.manual_seed(0)
    return dummy_transformer(SHAPE, "cpu", torch.float32, max_position_embeddings=128, **options)


def _tokens(count: int = 6, length: int = 48) -> Tensor:
    return torch.randint(0, 100, (count, length), generator=torch.Generator().manual_seed(1))


def _inputs(rows: int = 400, columns: int = 64) -> Tensor:
    """Correlated inputs, some channels much larger than others."""
    generator = torch.Generator().manual_seed(2)
    mixed = torch.randn(rows, columns, generator=generator) @ torch.randn(columns, columns, generator=generator)
    return mixed * torch.logspace(-1, 1, columns)[torch.randperm(columns, generator=generator)]


def _output_error(matrix: Tensor, weight: Weight, inputs: Tensor) -> float:
    return float((inputs @ (weight.dequantize(torch.float32) - matrix).T).norm())


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("format, size", [("int4", 16), ("int4", 32), ("int4", -1), ("int8", -1)])
@pytest.mark.parametrize("act_order", [False, True])
def test_gptq_beats_rounding_to_nearest(format: str, size: int, symmetric: bool, act_order: bool) -> None:
    matrix, x, scheme = torch.randn(40, 64), _inputs(), Scheme(format, size, symmetric)
    found = gptq(matrix, x.T @ x, scheme, act_order=act_order)
    nearest = round_to_nearest(matrix, scheme)
    assert found.layout == nearest.layout
    assert _output_error(matrix, found, x) < (0.75 if act_order else 0.93) * _output_error(matrix, nearest, x)


def test_gptq_without_correlation_is_rounding() -> None:
    """Where H is diagonal, no column can correct another."""
    matrix, scheme = torch.randn(12, 32), Scheme("int4", 16)
    importance = torch.rand(32) + 0.1
    found = gptq(matrix, torch.diag(importance), scheme)
    expected = round_to_nearest(matrix, scheme, importance)
    assert torch.equal(found.dequantize(torch.float32), expected.dequantize(torch.float32))


def test_gptq_by_its_definition() -> None:
    """One column after another, each time with the inverse of the Hessian of those that are left."""
    torch.manual_seed(3)
    matrix, x, scheme = torch.randn(5, 16), _inputs(200, 16), Scheme("int8", -1)
    hessian = (x.T @ x).double()
    damped = hessian + torch.eye(16) * 0.01 * hessian.diagonal().mean()
    scales, _ = fit_grid(matrix, scheme, hessian.diagonal().float())
    left, expected = matrix.double().clone(), torch.empty(5, 16, dtype=torch.float64)
    for j in range(16):
        inverse = torch.linalg.inv(damped[j:, j:])
        expected[:, j] = on_grid(left[:, j : j + 1].float(), scales, None, Scheme("int8", -1))[:, 0]
        left[:, j:] -= ((left[:, j] - expected[:, j]) / inverse[0, 0])[:, None] * inverse[0]
    found = gptq(matrix, hessian.float(), scheme).dequantize(torch.float64)
    steps = ((found - expected) / scales.double()).abs()
    assert steps.max() <= 1.001  # a tie may fall to either side
    assert (steps > 0.5).double().mean() < 0.03


def test_gptq_with_dead_inputs_and_few_tokens() -> None:
    x = _inputs(10)  # fewer tokens than channels: H is singular without damping
    x[:, 5] = 0.0
    matrix = torch.randn(8, 64)
    found = gptq(matrix, x.T @ x, Scheme("int4", 32)).dequantize(torch.float32)
    assert torch.isfinite(found).all()
    assert not found[:, 5].any()
    with pytest.raises(ValueError, match="not positive definite"):
        gptq(matrix, torch.eye(64) - 100 * (1 - torch.eye(64)), Scheme("int4", 32))


def test_clipping_makes_the_weighted_error_smaller() -> None:
    matrix, importance, scheme = torch.randn(20, 64) ** 3, torch.rand(64), Scheme("int4", 32)
    errors = [
        ((round_to_nearest(matrix, scheme, given).dequantize(torch.float32) - matrix).square() * importance).sum()
        for given in (None, importance)
    ]
    assert errors[1] < errors[0]


@pytest.mark.parametrize("name", PROJECTIONS)
def test_folding_keeps_the_function(name: str) -> None:
    model, tokens = _model(), _tokens(2)
    layer = model.layers[1]
    assert folds(layer, model.config, name)
    factors = torch.rand(getattr(layer, name).shape[1]) + 0.5
    if name == "o_proj":  # query heads of a group read the same rows of v
        factors = factors.view(2, 2, 16)[:, :1].expand(2, 2, 16).reshape(-1)
    folded = fold(layer, model.config, name, factors)
    runner = SequenceRunner(model, tokens)
    hidden = torch.randn(2, 48, 64)
    torch.testing.assert_close(runner.layer(hidden, folded, 1), runner.layer(hidden, layer, 1), rtol=1e-4, atol=1e-4)
    ratio = _row_ratio(getattr(layer, name), getattr(folded, name), factors)
    torch.testing.assert_close(ratio, torch.ones_like(ratio))


def test_what_cannot_be_folded() -> None:
    model = _model(learned_positions=True)
    assert not folds(model.layers[0], model.config, "down_proj")
    assert folds(model.layers[0], model.config, "qkv_proj")
    runner, hidden, factors = SequenceRunner(model, _tokens(1)), torch.randn(1, 48, 64), torch.rand(64) + 0.5
    folded = fold(model.layers[0], model.config, "qkv_proj", factors)  # the norm's bias too
    expected = runner.layer(hidden, model.layers[0], 0)
    torch.testing.assert_close(runner.layer(hidden, folded, 0), expected, rtol=1e-4, atol=1e-4)


def test_the_runner_is_the_engine() -> None:
    """Logits of the layers one by one are those of the model's own forward pass."""
    import torch.nn.functional as F

    from flashkernel.engine import LLM, SamplingParams

    model, tokens = _model(), _tokens(1, 20)
    runner = SequenceRunner(model, tokens)
    hidden = runner.embeddings()
    for index, layer in enumerate(model.layers):
        hidden = runner.layer(hidden, layer, index)
    losses = runner.losses(hidden)
    llm = LLM(model, kv_cache_tokens=256)
    params = SamplingParams(max_tokens=1, logprobs=5, ignore_eos=True)
    found = llm.generate([tokens[0].tolist()], params)[0].outputs[0]
    run_logits = F.log_softmax(model.logits(_pass(model, runner), hidden[0]), -1)
    assert int(run_logits[-1].argmax()) == found.token_ids[0]
    expected = -run_logits[:-1].gather(1, tokens[0, 1:, None])[:, 0]
    torch.testing.assert_close(losses[0], expected)


def _pass(model: Transformer, runner: SequenceRunner) -> Any:
    from flashkernel.quantization.layer_pass import RecordingPass

    return RecordingPass(model.config, runner._input(1))


def test_statistics() -> None:
    found, x = InputStatistics(), _inputs()
    found.add(x[:150])
    found.add(x[150:])
    assert found.hessian is not None
    torch.testing.assert_close(found.hessian, x.T @ x, rtol=1e-4, atol=1.0)
    torch.testing.assert_close(found.mean_magnitudes, x.abs().mean(0))
    assert torch.equal(found.largest, x.abs().amax(0))  # type: ignore[arg-type]
    assert found.count == 400
    assert found.sample.shape[1] == 64


@pytest.mark.parametrize("method, scheme", [
    ("gptq", Scheme("int4", 32)), (Method("gptq", act_order=True), Scheme("int4", 16, symmetric=False)),
    ("awq", Scheme("int4", 32)), ("awq", Scheme("int4", 32, symmetric=False)),
])  # fmt: skip
def test_methods_lower_the_errors(method: Any, scheme: Scheme) -> None:
    model, errors = quantize_model(_model(), _tokens(), method, scheme)
    assert len(errors) == 3 * len(PROJECTIONS)
    assert all(error.after < 1.01 * error.before < 0.2 for error in errors)
    assert sum(error.after for error in errors) < 0.98 * sum(error.before for error in errors)
    assert all(isinstance(getattr(layer, name), Weight) for layer in model.layers for name in PROJECTIONS)


def test_smoothquant_lowers_the_error_of_outliers() -> None:
    model = _model()
    norm = model.layers[0].attention_norm.clone()
    norm[3], norm[40] = 60.0, 40.0  # channels that are far larger than the others
    layers = [replace(model.layers[0], attention_norm=norm), *model.layers[1:]]
    found, errors = quantize_model(Transformer(model.config, model.weights, layers), _tokens(), "smoothquant")
    first: Any = found.layers[0].qkv_proj
    assert first.activation_dtype == torch.int8
    assert errors[0].projection == "qkv_proj"
    assert errors[0].after < 0.6 * errors[0].before


def test_experts_are_rounded_to_nearest(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import tiny_models

    from flashkernel import hf
    from flashkernel.engine import ModelError
    from flashkernel.engine.checkpoint import open_checkpoint
    from flashkernel.engine.model_loader import load_model
    from flashkernel.engine.save_model import save_model

    tiny_models.save("mixtral", tmp_path)
    model = load_model(open_checkpoint(tmp_path), torch.device("cpu"), torch.float32)
    found, errors = quantize_model(model, torch.randint(0, 320, (2, 32)), "gptq", Scheme("int4", 16))
    assert {error.projection for error in errors} == {"qkv_proj", "o_proj"}
    experts: Any = found.layers[0].gate_up_proj
    assert experts.layout == "int4 1x16"
    assert experts.shape == model.layers[0].gate_up_proj.shape
    found, _ = quantize_model(model, torch.randint(0, 320, (2, 32)), "smoothquant")
    assert [getattr(found.layers[0], name).activation_dtype for name in ("o_proj", "down_proj")] == [torch.int8, None]
    save_model(found, open_checkpoint(tmp_path), tmp_path / "saved")  # one format for all
    again: Any = load_model(open_checkpoint(tmp_path / "saved"), torch.device("cpu"), torch.float32).layers[1].down_proj
    assert torch.equal(again.data, found.layers[1].down_proj.data)  # type: ignore[union-attr]
    with pytest.raises(
        ModelError, match=r"there is no tensor model\.layers\.0\.mlp\.gate\.weight; load_quantized reads"
    ):
        hf.load_quantized(tmp_path / "saved")


class _Stop(Exception):
    pass


def test_an_interrupted_run_goes_on(tmp_path: Path) -> None:
    """After an interruption at any layer the result is the same as without one."""
    model, tokens, scheme = _model(), _tokens(), Scheme("int4", 32)
    expected, expected_errors = quantize_model(model, tokens, "awq", scheme)
    done: list[int] = []

    def stop(layers: int, total: int, errors: Any) -> None:
        done.append(layers)
        raise _Stop

    for _ in range(2):
        with pytest.raises(_Stop):
            quantize_model(model, tokens, "awq", scheme, state=tmp_path / "state", progress=stop)
    assert done == [1, 2]
    (tmp_path / "state" / "layer-2.tmp").write_text("half of a layer")
    found, errors = quantize_model(model, tokens, "awq", scheme, state=tmp_path / "state")
    assert errors == expected_errors
    for mine, theirs in zip(found.layers, expected.layers):
        assert torch.equal(mine.attention_norm, theirs.attention_norm)
        for name in PROJECTIONS:
            a, b = getattr(mine, name), getattr(theirs, name)
            assert a.layout == b.layout
            assert all(torch.equal(one, other) for one, other in zip(a.tensors, b.tensors))


def test_states_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens, scheme, state = _model(), _tokens(), Scheme("int4", 32), tmp_path / "state"
    quantize_model(model, tokens, "rtn", scheme, state=state)
    with pytest.raises(ModelError, match="the state of another quantization"):
        quantize_model(model, tokens, "gptq", scheme, state=state)
    (state / "layer-1.safetensors").write_bytes(b"cut")
    with pytest.raises(ModelError, match=r"layer-1\.safetensors: it cannot be read"):
        quantize_model(model, tokens, "rtn", scheme, state=state)
    (state / "state.json").write_text("{")
    with pytest.raises(ModelError, match=r"delete .* and start again"):
        quantize_model(model, tokens, "rtn", scheme, state=state)

    def full(*arguments: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("flashkernel.quantization.state.write_whole", full)
    with pytest.raises(ModelError, match="free space and run the same command again"):
        quantize_model(model, tokens, "rtn", scheme, state=tmp_path / "other")


@pytest.mark.parametrize("call, message", [
    (lambda: quantize_model(_model(), _tokens(), "gguf"), "name is 'gguf'; it must be one of rtn"),
    (lambda: quantize_model(_model(), None, "gptq", Scheme("int4", 32)), "gptq calibrates; give token_ids"),
    (lambda: quantize_model(_model(), _tokens(), "gptq", Scheme("int4", 128)), "do not divide its 64 columns"),
    (lambda: quantize_model(_model(), _tokens(), "gptq", Scheme("fp8", -1)), "rounded to nearest alone"),
    (lambda: quantize_model(_model(), _tokens(), "smoothquant", Scheme("int8", -1)), "rounds activations too"),
    (lambda: quantize_model(_model().quantized("int8"), _tokens(), "rtn", Scheme("int4", 32)), "quantized already"),
    (lambda: quantize_model(_model(), _tokens(1, 200), "rtn", Scheme("int4", 32)), "the model's context"),
    (lambda: Method("gptq", damping=0.0), "damping is 0.0"),
    (lambda: Scheme("int4", 1), "group_size is 1"),
    (lambda: Scheme("int3"), "there is no format 'int3'"),
    (lambda: Scheme("fp8", symmetric=False), "fp8 has no zero points"),
    (lambda: Scheme("mxfp4").check("down_proj", 48), "down_proj: .* do not divide 48"),
    (lambda: Scheme("int4", -1).check("down_proj", 47), "down_proj: .* has 47"),
    (lambda: Scheme("fp8", activation_dtype=torch.int8).check("down_proj", 64), "down_proj: .*int8"),
    (lambda: windows([1, 2, 3], 8), "fewer than one window of 8"),
])  # fmt: skip
def test_wrong_arguments(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()


def test_perplexity_is_transformers_loss(tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import tiny_models

    from flashkernel.engine.checkpoint import open_checkpoint
    from flashkernel.engine.model_loader import load_model

    hf = tiny_models.save("llama", tmp_path)
    tokens = torch.randint(0, 320, (3, 40))
    model = load_model(open_checkpoint(tmp_path), torch.device("cpu"), torch.float32)
    found = perplexity(model, tokens)
    with torch.no_grad():
        expected = float(hf(tokens, labels=tokens).loss.exp())
    assert found.value == pytest.approx(expected, rel=1e-4)
    assert (found.tokens, found.length) == (3 * 39, 40)


def test_shipped_texts_differ() -> None:
    from flashkernel.quantization import CALIBRATION_TEXT, EVALUATION_TEXT

    texts = [shipped_text(name) for name in (CALIBRATION_TEXT, EVALUATION_TEXT)]
    assert all(len(text) > 20000 for text in texts)
    assert texts[0] != texts[1]


def test_the_commands(tmp_path: Path) -> None:
    """A model is quantized, loaded, measured; a folder in use, a bad group size and a missing text are reported."""
    pytest.importorskip("transformers")
    import tiny_models
    from typer.testing import CliRunner

    from flashkernel.cli import app

    tiny_models.save("llama", tmp_path / "plain")
    text, runner = tmp_path / "text.txt", CliRunner()
    text.write_text("the wind and the sea " * 200)
    shared = ["--text", str(text), "--length", "32", "--device", "cpu"]
    command = ["quantize", str(tmp_path / "plain"), "--group-size", "16", "--samples", "4", *shared, "--out"]
    done = runner.invoke(app, [*command, str(tmp_path / "small"), "--method", "awq"])
    assert done.exit_code == 0, done.output
    assert "qkv_proj" in done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["plain", "small", "text.txt"]
    config = json.loads((tmp_path / "small" / "config.json").read_text())
    assert config["quantization_config"]["format"] == "pack-quantized"
    for folder in ("plain", "small"):
        done = runner.invoke(app, ["perplexity", str(tmp_path / folder), "--windows", "4", *shared])
        assert done.exit_code == 0, done.output
        assert "of 124 tokens in windows of 32" in done.output
    for extra, message in (
        ([str(tmp_path / "small")], "exists and is not empty"),
        ([str(tmp_path / "other"), "--group-size", "128"], "do not divide its 32 columns"),
        ([str(tmp_path / "other"), "--bits", "3"], "bits is 3"),
        ([str(tmp_path / "other"), "--method", "smoothquant"], "give --bits 8"),
        ([str(tmp_path / "other"), "--text", str(tmp_path / "nothing")], "No such file"),
    ):
        done = runner.invoke(app, [*command, *extra])
        assert done.exit_code == 2, done.output
        assert message in " ".join(done.output.split()), done.output
    assert not (tmp_path / "other").exists()
    done = runner.invoke(app, ["perplexity", str(tmp_path / "plain"), "--save", str(tmp_path / "results"), *shared])
    assert done.exit_code == 2
    assert "add --compare" in done.output


def test_the_table_of_qualities(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from flashkernel.cli import app
    from flashkernel.lab import quality, tables

    model = dummy_transformer(replace(SHAPE, intermediate=128), "cpu", torch.float32, max_position_embeddings=128)
    names = ["bfloat16", "kv-int4", "kv-fp8", "int8", "int4-rtn", "int4-gptq", "mxfp4", "kv-int8"]
    for record in quality.measure("tiny", model, _tokens(2), _tokens(4), names):
        quality.save(tmp_path, [record])
    saved = quality.load(tmp_path / "quality.json")
    assert [record.configuration for record in saved["records"]] == [
        "bfloat16", "int8", "mxfp4", "int4-rtn", "int4-gptq", "kv-fp8", "kv-int8", "kv-int4",
    ]  # fmt: skip
    assert [round(record.bits, 2) for record in saved["records"]] == [16.0, 8.22, 4.25, 4.25, 4.25, 16.0, 16.0, 16.0]
    plain, *_, fp8, int8, int4 = [record.perplexity for record in saved["records"]]
    assert abs(int8 / plain - 1) < abs(int4 / plain - 1) < 0.1
    assert abs(fp8 / plain - 1) < 0.05
    text = tables.regenerate("<!-- results:quality -->\nold\n<!-- /results -->", tmp_path)
    assert "| tiny | int4, groups of 64 | GPTQ | 4.25 |" in text
    assert "| tiny | bfloat16 |  | 16.00 | int4, 4.75 bits |" in text
    pytest.importorskip("matplotlib")
    done = CliRunner().invoke(app, ["plot", str(tmp_path / "quality.json"), "--out", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "quality.png").stat().st_size > 10_000
    (tmp_path / "quality.json").write_text("[]")
    with pytest.raises(ValueError, match="is not a quality file"):
        quality.load(tmp_path / "quality.json")
    (tmp_path / "quality.json").unlink()
    assert "_Not measured yet._" in tables.regenerate(text, tmp_path)


@pytest.mark.parametrize("name", ["gpt2", "gpt_oss"])
def test_what_no_layout_stores_is_refused_before_the_calibration(name: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers")
    import tiny_models
    from typer.testing import CliRunner

    from flashkernel.cli import app

    tiny_models.save(name, tmp_path / "model")
    done = CliRunner().invoke(app, ["quantize", str(tmp_path / "model"), "--out", str(tmp_path / "out")])
    assert done.exit_code == 2
    assert "are stored (in, out), which quantized weights are not" in " ".join(done.output.split())
    assert [one.name for one in tmp_path.iterdir()] == ["model"]
