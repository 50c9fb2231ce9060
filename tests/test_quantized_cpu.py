"""Quantized weights on a CPU: GGUF's blocks, the C++ kernels of every instruction set, the engine, and no compiler."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch

import flashkernel as fk
from flashkernel import Weight
from flashkernel.blocks import linear_cpp
from flashkernel.blocks.weight import rounded_activations
from flashkernel.blocks.weight_formats.gguf import KINDS, read_blocks
from flashkernel.core import cpp, dispatch
from flashkernel.engine import LLM, SamplingParams
from flashkernel.lab import doctor

linear: Any = fk.linear
GREEDY = SamplingParams(max_tokens=12, ignore_eos=True)
needs_compiler = pytest.mark.skipif(cpp.can_compile() is not None, reason=str(cpp.can_compile()))


def _blocks(kind: str, rows: int, columns: int) -> torch.Tensor:
    """Random bytes of a GGUF matrix, whose float16 scales are numbers of order one."""
    import gguf

    count, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    generator = torch.Generator().manual_seed(len(kind) + rows)
    blocks = torch.randint(0, 256, (rows, columns // count, size), generator=generator, dtype=torch.uint8)
    scales = torch.randn(rows, columns // count, 2, generator=generator).half().view(torch.uint8)
    if kind == "Q6_K":
        blocks[..., -2:] = scales[..., :2]
    else:
        width = 4 if kind in ("Q4_1", "Q4_K") else 2
        blocks[..., :width] = scales[..., :width]
    return blocks.flatten(1)


@pytest.mark.parametrize("kind", KINDS)
def test_gguf_blocks_are_read_as_the_package_reads_them(kind: str) -> None:
    import gguf

    blocks = _blocks(kind, 5, 512)
    weight = read_blocks(kind, blocks)
    expected = torch.from_numpy(gguf.quants.dequantize(blocks.numpy(), gguf.GGMLQuantizationType[kind]))
    assert torch.equal(weight.dequantize(torch.float32), expected)
    assert weight.shape == (5, 512)
    assert weight.nbytes <= blocks.nbytes * 1.12  # int4 and int8 have float32 scales
    rows = torch.tensor([3, 0, 3])
    assert torch.equal(weight.take(rows).dequantize(torch.float32), expected[rows])
    assert torch.equal(weight.rows(slice(1, 4)).dequantize(torch.float32), expected[1:4])
    both = Weight.concatenate([weight, weight])
    assert torch.equal(both.dequantize(torch.float32), torch.cat([expected, expected]))


WEIGHTS = [
    *[(kind, lambda kind=kind: read_blocks(kind, _blocks(kind, 21, 256))) for kind in KINDS],
    ("int4 zeros", lambda: Weight.quantize(torch.randn(9, 192), "int4", "1x64", symmetric=False)),
    ("int4 row", lambda: Weight.quantize(torch.randn(9, 160), "int4", "row")),
    ("int8 tensor", lambda: Weight.quantize(torch.randn(9, 96), "int8", "tensor")),
    ("int8 zeros", lambda: Weight.quantize(torch.randn(9, 96), "int8", "row", symmetric=False)),
    ("mxfp4", lambda: Weight.quantize(torch.randn(9, 160), "mxfp4")),
]


def _check(weight: Weight, rows: int) -> None:
    """Both products of a weight against float64, relative to the largest output."""
    matrix, x = weight.dequantize(torch.float64), torch.randn(rows, weight.shape[1])
    assert torch.allclose(
        linear_cpp.dequantized(weight).double(), matrix, rtol=1e-6, atol=1e-6 * float(matrix.abs().max())
    )
    for dtype in (None, torch.int8):
        chosen = replace(weight, activation_dtype=dtype)
        expected = rounded_activations(x, chosen).double() @ matrix.T
        error = (linear_cpp.LinearCall(chosen)(x).double() - expected).abs().max()
        assert error <= 1e-6 * expected.abs().max() + 1e-6, f"{chosen!r}"


@needs_compiler
@pytest.mark.parametrize("make", [make for _, make in WEIGHTS], ids=[name for name, _ in WEIGHTS])
def test_products(make: Any) -> None:
    torch.manual_seed(0)
    for rows in (1, 3, 6):
        _check(make(), rows)


@needs_compiler
def test_other_instruction_sets(older_cpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_cpp, "_kernels", linear_cpp._kernels.__wrapped__)
    torch.manual_seed(0)
    compiled = linear_cpp._kernels()
    monkeypatch.setattr(linear_cpp, "_kernels", lambda: compiled)
    for _, make in WEIGHTS:
        _check(make(), 5)


@needs_compiler
def test_a_nan_stays_a_nan() -> None:
    weight = Weight.quantize(torch.randn(8, 64), "int4", activation_dtype=torch.int8)
    for bad in (float("nan"), float("inf")):
        x = torch.randn(2, 64)
        x[1, 40] = bad
        y = linear(x, weight)
        assert y[0].isfinite().all()
        assert y[1].isnan().all()


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpp, "compiler", lambda: None)
    monkeypatch.setattr(cpp, "can_compile", cpp.can_compile.__wrapped__)
    monkeypatch.setattr(dispatch, "_choices", {})


def test_without_a_compiler(no_compiler: None, tmp_path: Path) -> None:
    """torch serves, and explain, doctor and an explicit request say why."""
    weight = Weight.quantize(torch.randn(8, 64), "int4")
    x = torch.randn(2, 64)
    explanation = fk.explain(linear, x, weight)
    assert explanation.chosen == "torch"
    assert "there is no C++ compiler" in str(explanation)
    with pytest.raises(fk.BackendError, match="no C\\+\\+ compiler"):
        linear(x, weight, backend="cpp")
    found = next(one for one in doctor.diagnose() if one.name == "C++ compiler")
    assert found.status == "missing"
    assert "dequantized on the CPU" in found.detail
    tiny_models.save_gguf(tiny_models.build("llama"), tmp_path / "model.gguf", "Q4_1")
    llm = LLM(tmp_path / "model.gguf", device="cpu", kv_cache_tokens=256)
    assert isinstance(llm.model.layers[0].qkv_proj, torch.Tensor)


def test_a_compiler_that_fails_is_reported(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    broken = tmp_path / "cxx"
    broken.write_text("#!/bin/sh\necho this compiler is broken >&2\nexit 3\n")
    broken.chmod(0o755)
    monkeypatch.setenv("FLASHKERNEL_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cpp, "compiler", lambda: str(broken))
    assert "this compiler is broken" in str(cpp.can_compile.__wrapped__())
    assert not list((tmp_path / "cpp").iterdir())


@needs_compiler
@pytest.mark.parametrize("kind", ["Q8_0", "Q4_0", "Q4_1"])
def test_gguf_runs_quantized(kind: str, tmp_path: Path) -> None:
    """Weights stay quantized, the embedding too, and logits are those of the dequantized model within x's rounding."""
    tiny_models.save_gguf(tiny_models.build("llama"), tmp_path / "model.gguf", kind)
    options: dict[str, Any] = {"device": "cpu", "kv_cache_tokens": 256}
    llm = LLM(tmp_path / "model.gguf", **options)
    plain = LLM(tmp_path / "model.gguf", quantization="plain", **options)
    layer = llm.model.layers[0]
    assert all(isinstance(one, Weight) for one in (layer.qkv_proj, layer.o_proj, layer.gate_up_proj))
    assert isinstance(llm.model.weights.embedding, Weight)
    assert llm.model.weights.embedding is llm.model.weights.lm_head
    assert llm.model.nbytes < 0.5 * plain.model.nbytes
    (prompt,) = tiny_models.prompts((9,))
    params = SamplingParams(max_tokens=1, ignore_eos=True, logprobs=5)
    ours, theirs = (one.generate([prompt], params)[0].outputs[0].logprobs[0] for one in (llm, plain))
    assert abs(ours.logprob - theirs.logprob) < 0.3
    batch = [one.outputs[0].token_ids for one in llm.generate(tiny_models.prompts((5, 23)), GREEDY)]
    with fk.use_backend(linear="reference"):  # by the public operators
        again = [one.outputs[0].token_ids for one in llm.generate(tiny_models.prompts((5, 23)), GREEDY)]
    assert batch == again


@needs_compiler
def test_projections_of_several_formats(tmp_path: Path) -> None:
    """llama.cpp stores v with more bits than q and k in some layers."""
    tiny_models.save_gguf(tiny_models.build("llama"), tmp_path / "model.gguf", {"attn_v": "Q8_0", "": "Q4_1"})
    llm = LLM(tmp_path / "model.gguf", device="cpu", kv_cache_tokens=256)
    projection = llm.model.layers[0].qkv_proj
    assert isinstance(projection, tuple)
    assert [part.format for part in projection] == ["q4_1", "q4_1", "int8"]
    done = llm.generate(tiny_models.prompts((5,)), GREEDY)[0].outputs[0].token_ids
    with fk.use_backend(linear="reference"):
        again = llm.generate(tiny_models.prompts((5,)), GREEDY)[0].outputs[0].token_ids
    assert done == again


@pytest.mark.parametrize("format", ["q4_1", "q4_k", "q6_k"])
def test_scales_that_float16_does_not_have(format: str) -> None:
    """Larger ones are refused, which became infinite, and products NaN; for smaller ones its least is taken."""
    matrix = torch.randn(4, 512, generator=torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=f"Weight.quantize: {format} stores scales and minima in float16"):
        Weight.quantize(matrix * 1e10, format)
    for size, share in ((1e3, 0.06), (1e-6, 0.35)):
        error = (Weight.quantize(matrix * size, format).dequantize(torch.float32) - matrix * size).abs().amax()
        assert error <= share * matrix.abs().amax() * size


@pytest.mark.parametrize("shape", [(0, 256), (4, 0), (2, 0, 256)])
@pytest.mark.parametrize("format", ["q4_1", "q4_k", "q6_k"])
def test_a_matrix_without_elements(format: str, shape: tuple[int, ...]) -> None:
    weight = Weight.quantize(torch.zeros(shape), format)
    assert weight.shape == shape
    assert weight.dequantize(torch.float32).shape == shape
    assert Weight.quantize(torch.empty(shape, device="meta"), format).shape == shape
    assert Weight.quantize(torch.empty((3, 256), device="meta"), format).shape == (3, 256)


def test_a_weight_keeps_its_dtypes() -> None:
    """As float16 its codes would be numbers."""
    weight = Weight.quantize(torch.randn(8, 64), "int4", "1x32")
    with pytest.raises(TypeError, match=r"torch.float16 is no device; Weight.int4 1x32, .* dequantize"):
        weight.to(torch.float16)  # type: ignore[arg-type]
    assert weight.to("cpu").layout == weight.layout
    with pytest.raises(TypeError, match="granularity is 64; it must be a name"):
        Weight.quantize(torch.randn(8, 64), "int4", 64)  # type: ignore[arg-type]
