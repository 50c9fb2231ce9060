"""Quantized formats of Weight: their layouts by definition, bounds on the error, round trips, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import flashkernel as fk
from flashkernel import Weight
from flashkernel.blocks import e2m1
from flashkernel.blocks.fp8 import expand_scales
from flashkernel.blocks.integers import pack_nibbles, unpack_nibbles
from flashkernel.core import device as devices

FORMATS = [
    ("int8", "tensor", True), ("int8", "row", True), ("int8", "row", False), ("int8", "1x32", False),
    ("int4", "1x32", True), ("int4", "1x64", False), ("int4", "group", True), ("int4", "row", True),
    ("int4", "row", False), ("mxfp4", "1x32", True), ("fp8_e5m2", "row", True), ("fp8_e5m2", "block", True),
]  # fmt: skip
EVERY = pytest.mark.parametrize("format, granularity, symmetric", FORMATS)
MATRICES = st.builds(
    lambda rows, groups, seed, scale, shift: (
        (torch.randn(rows, 128 * groups, generator=torch.Generator().manual_seed(seed)) + shift) * 10.0**scale
    ),
    st.integers(1, 5), st.integers(1, 2), st.integers(0, 2**20), st.floats(-30, 30), st.floats(-2, 2),
)  # fmt: skip


def _quantize(matrix: Tensor, format: str, granularity: str, symmetric: bool) -> Weight:
    return Weight.quantize(matrix, format, granularity, symmetric=symmetric)


def _steps(weight: Weight) -> Tensor:
    """The distance between neighboring integers, for each element."""
    assert weight.scales is not None
    return expand_scales(weight.scales.double(), weight.group_shape, weight.shape)


@EVERY
@settings(max_examples=25, deadline=None)
@given(matrix=MATRICES)
def test_errors_are_half_a_step(format: str, granularity: str, symmetric: bool, matrix: Tensor) -> None:
    weight = _quantize(matrix, format, granularity, symmetric)
    error = (weight.dequantize(torch.float64) - matrix.double()).abs()
    if format.startswith("int"):
        limit = _steps(weight) * 0.5
    elif format == "mxfp4":  # steps of 0.5, 1 and 2 below 2, 4 and 6
        assert weight.scales is not None
        scale = e2m1.scale_values(weight.scales, torch.float64).repeat_interleave(32, -1)
        size = matrix.double().abs() / scale
        assert size.max() <= 6
        limit = scale * torch.where(size <= 2, 0.25, torch.where(size <= 4, 0.5, 1.0))
    else:  # two bits of fraction, or half a step of the smallest numbers
        limit = torch.maximum(matrix.double().abs() / 8, _steps(weight) * 2.0**-17)
    assert (error <= limit * 1.0001).all()


@EVERY
@settings(max_examples=15, deadline=None)
@given(matrix=MATRICES)
def test_quantizing_again_changes_nothing(format: str, granularity: str, symmetric: bool, matrix: Tensor) -> None:
    once = _quantize(matrix, format, granularity, symmetric).dequantize(torch.float32)
    again = _quantize(once, format, granularity, symmetric).dequantize(torch.float32)
    torch.testing.assert_close(again, once, rtol=1e-6, atol=0)


@given(st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda values: len(values) % 2 == 0))
def test_nibbles(values: list[int]) -> None:
    codes = torch.tensor(values, dtype=torch.uint8)
    packed = pack_nibbles(codes)
    assert packed.tolist() == [low + 16 * high for low, high in zip(values[::2], values[1::2])]
    assert torch.equal(unpack_nibbles(packed), codes)
    if len(values) % 8 == 0:  # a 32-bit word has eight columns, the first in the lowest bits
        words = packed.view(torch.int32).tolist()
        assert [(word >> (4 * place)) & 15 for word in words for place in range(8)] == values


def test_e2m1_rounds_to_nearest_even() -> None:
    values = torch.arange(-112, 113, dtype=torch.float64) / 16
    table = torch.tensor(e2m1.MAGNITUDES, dtype=torch.float64)
    distances = (values.abs()[:, None] - table).abs()
    nearest = distances.min(1).values
    found = e2m1.decode(e2m1.encode(values), torch.float64)
    torch.testing.assert_close((found - values).abs(), nearest)
    codes = e2m1.encode(values)
    ties = (distances - nearest[:, None] < 1e-9).sum(1) > 1
    assert ties.sum() == 14
    assert (codes[ties] % 2 == 0).all()
    assert e2m1.decode(torch.arange(16, dtype=torch.uint8), torch.float32).tolist()[:8] == list(e2m1.MAGNITUDES)


def test_e8m0_scales() -> None:
    exponents = torch.tensor([0, 1, 127, 128, 254, 255], dtype=torch.uint8)
    expected = [2.0**-127, 2.0**-126, 1.0, 2.0, 2.0**127]
    assert e2m1.scale_values(exponents, torch.float64).tolist()[:5] == expected
    assert e2m1.scale_values(exponents, torch.float32).isnan().tolist() == [False] * 5 + [True]
    for largest, exponent in ((6.0, 127), (6.001, 128), (3.0, 126), (4.0, 127), (0.0, 127), (1e-45, 0)):
        assert e2m1.scale_exponents(torch.full((1, 32), largest)).item() == exponent


def test_int4_by_its_layout() -> None:
    """Element (i, j) is (nibble - zero) * scale: written out, from the bytes alone."""
    matrix = torch.randn(3, 64) + 0.3
    for symmetric in (True, False):
        weight = Weight.quantize(matrix, "int4", "1x32", symmetric=symmetric)
        assert weight.scales is not None
        exact = weight.dequantize(torch.float64)
        for i in range(3):
            for j in range(64):
                byte = int(weight.data[i, j // 2])
                code = byte >> 4 if j % 2 else byte & 15
                zero = 8 if weight.zeros is None else int(weight.zeros[i, j // 32])
                assert exact[i, j] == (code - zero) * weight.scales[i, j // 32].double()
        assert weight.nbytes == 3 * 32 + 3 * 2 * (4 if symmetric else 5)
    assert repr(Weight.quantize(matrix, "int4", "1x32", symmetric=False)) == "Weight(int4 1x32 zeros, 3x64, 126 bytes)"


def test_mxfp4_takes_gpt_oss_blocks() -> None:
    experts = torch.randn(2, 5, 64)
    weight = Weight.quantize(experts, "mxfp4")
    assert weight.scales is not None
    again = Weight.pack(weight.data.unflatten(-1, (2, 16)), weight.scales, format="mxfp4")
    assert torch.equal(again.dequantize(torch.bfloat16), weight.dequantize(torch.bfloat16))
    assert (again.shape, again[1].shape, len(again)) == ((2, 5, 64), (5, 64), 2)


@EVERY
def test_rows_concatenation_and_stacks(format: str, granularity: str, symmetric: bool) -> None:
    first, second = (_quantize(torch.randn(rows, 128) + 0.5, format, granularity, symmetric) for rows in (9, 4))
    whole = torch.cat([first.dequantize(torch.float32), second.dequantize(torch.float32)])
    together = Weight.concatenate([first, second])
    assert torch.equal(together.dequantize(torch.float32), whole)
    for rows in (slice(0, 3), slice(2, 11, 3), slice(12, None), slice(4, 4)):
        assert torch.equal(together.rows(rows).dequantize(torch.float32), whole[rows])
    stack = Weight.stack([first, first])
    assert torch.equal(stack[1].dequantize(torch.float32), first.dequantize(torch.float32))
    again = Weight.from_tensors(together.tensors, together.layout)
    assert torch.equal(again.dequantize(torch.float32), whole)
    packed = Weight.pack(first.data, first.scales, first.zeros, format)
    assert torch.equal(packed.dequantize(torch.float32), first.dequantize(torch.float32))
    empty = _quantize(torch.empty(0, 128), format, granularity, symmetric)
    assert empty.dequantize(torch.float16).shape == (0, 128)


@EVERY
@pytest.mark.parametrize("backend", ["triton", "torch", "reference"])
def test_linear_takes_it(format: str, granularity: str, symmetric: bool, backend: str) -> None:
    weight = _quantize(torch.randn(24, 128), format, granularity, symmetric)
    x = torch.randn(3, 128, requires_grad=True)
    dequantized = format != "fp8_e5m2"  # in Triton's kernel
    if backend == "triton" and not dequantized:
        with pytest.raises(fk.BackendError, match="not fp8_e5m2"):
            fk.linear(x, weight, backend=backend)
        return
    y = fk.linear(x, weight, activation="silu", backend=backend)
    expected = torch.nn.functional.silu(x @ weight.dequantize(torch.float32).T)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0])
    with devices.pretend(devices.KNOWN["h200"]):
        found = fk.explain(fk.linear, x.half(), weight)
        many = fk.explain(fk.linear, x.half().expand(70, 3, 128), weight)
    assert (found.chosen, many.chosen) == ("triton" if dequantized else "torch", "torch")
    assert "is dequantized, for cuBLAS" in str(many) or not dequantized


def test_activations_in_int8() -> None:
    """W8A8: x in int8 with a scale for each row; the gradient goes through as if nothing was rounded."""
    weight = Weight.quantize(torch.randn(8, 48), "int8", activation_dtype=torch.int8)
    x = torch.randn(2, 3, 48, requires_grad=True)
    scale = x.detach().abs().amax(-1, keepdim=True) / 127
    rounded = (x.detach() / scale).round() * scale
    y = fk.linear(x, weight)
    torch.testing.assert_close(y, rounded @ weight.dequantize(torch.float32).T)
    gradient = weight.dequantize(torch.float32).sum(0).expand(2, 3, 48)
    torch.testing.assert_close(torch.autograd.grad(y.sum(), x)[0], gradient)


def test_default_groups() -> None:
    for columns, text in ((256, "group"), (192, "1x64"), (96, "1x32"), (48, "row")):
        assert Weight.quantize(torch.ones(2, columns), "int4").layout == f"int4 {text}"
    assert Weight.quantize(torch.ones(2, 64), "mxfp4").layout == "mxfp4 1x32"


@pytest.mark.parametrize(
    "make, message",
    [
        (
            lambda: Weight.quantize(torch.ones(2, 100), "int4", "1x32"),
            "groups of 32 columns do not divide 100; take row",
        ),
        (lambda: Weight.quantize(torch.ones(2, 192), "int4", "group"), "do not divide 192; take 1x64, 1x32 or row"),
        (lambda: Weight.quantize(torch.ones(2, 33), "int4"), "two columns in a byte, and the matrix has 33"),
        (lambda: Weight.quantize(torch.ones(2, 128), "int4", "block"), "not for 128x128"),
        (lambda: Weight.quantize(torch.ones(2, 100), "mxfp4"), "do not divide 100"),
        (lambda: Weight.quantize(torch.ones(2, 64), "mxfp4", "row"), "granularity 1x32"),
        (lambda: Weight.quantize(torch.ones(2, 64), "mxfp4", symmetric=False), "no zero points"),
        (
            lambda: Weight.quantize(torch.ones(2, 300), "q4_k"),
            "q4_k has blocks of 256 columns, which do not divide 300; add columns of zeros, or use int8",
        ),
        (lambda: Weight.quantize(torch.ones(2, 256), "q6_k", "1x32"), "granularity 1x16"),
        (lambda: Weight.quantize(torch.ones(2, 64), "q4_1", symmetric=False), "no zero points"),
        (lambda: Weight.quantize(torch.ones(2, 64), "fp8", symmetric=False), "no zero points"),
        (lambda: Weight.quantize(torch.ones(2, 64), "int8", "1xmany"), "granularity is '1xmany'"),
        (
            lambda: Weight.quantize(torch.ones(2, 64), "int4", activation_dtype=torch.float8_e4m3fn),
            "activation_dtype is",
        ),
        (
            lambda: Weight.pack(torch.zeros(2, 32, dtype=torch.uint8), torch.ones(2, 3), format="int4"),
            r"scales \(2, 3\)",
        ),
        (lambda: Weight.pack(torch.zeros(2, 32, dtype=torch.uint8), torch.ones(2, 2), format="mxfp4"), "in uint8"),
        (lambda: Weight.pack(torch.zeros(2, 32, dtype=torch.int8), torch.ones(2, 1), format="int4"), "must be a uint8"),
        (
            lambda: Weight.pack(
                torch.zeros(2, 32, dtype=torch.int8), torch.ones(2, 1, dtype=torch.uint8), format="int8"
            ),
            "scales of int8 data are floats",
        ),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("format", ["int8", "int4"])
def test_symmetric_and_asymmetric_rows_in_one(format: str) -> None:
    """A part whose zero points are all the middle is stored without them."""
    parts = [Weight.quantize(torch.randn(4, 64) + 1, format, symmetric=flag) for flag in (True, False, True)]
    found = Weight.concatenate(parts)
    expected = torch.cat([part.dequantize(torch.float32) for part in parts])
    assert torch.equal(found.dequantize(torch.float32), expected)


@pytest.mark.parametrize("format", ["fp8", "fp8_e5m2", "int8", "int4", "mxfp4"])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_weights_are_refused(format: str, value: float) -> None:
    matrix = torch.randn(4, 64)
    matrix[2, 7] = value
    with pytest.raises(ValueError, match="1 of 256 elements are infinite or NaN"):
        Weight.quantize(matrix, format)


@pytest.mark.parametrize("format", ["int8", "int4", "mxfp4", "fp8_e5m2"])
def test_zeros_stay_zeros(format: str) -> None:
    assert not Weight.quantize(torch.zeros(3, 64), format).dequantize(torch.float32).any()


@pytest.mark.parametrize("format", ["int8", "int4", "mxfp4"])
def test_the_engine_takes_it(format: str) -> None:
    from dataclasses import replace

    from flashkernel.core.shapes import Model
    from flashkernel.engine import LLM, SamplingParams
    from flashkernel.engine.dummy_weights import dummy_transformer
    from flashkernel.engine.transformer import PROJECTIONS, Transformer

    torch.manual_seed(0)
    shape = Model(hidden=32, intermediate=64, heads=4, kv_heads=2, head_dim=8, layers=2, vocab=100)
    plain = dummy_transformer(shape, "cpu", torch.float32, max_position_embeddings=256)
    model = plain.quantized(format)
    layers = [
        replace(layer, **{name: getattr(layer, name).dequantize(torch.float32) for name in PROJECTIONS})
        for layer in model.layers
    ]
    prompts, params = [[1, 2, 3], list(range(4, 90))], SamplingParams(max_tokens=8, ignore_eos=True)

    def tokens(model: Transformer, **options: Any) -> list[tuple[int, ...]]:
        found = LLM(model, kv_cache_tokens=512, **options).generate(prompts, params)
        return [one.outputs[0].token_ids for one in found]

    assert tokens(plain, quantization=format) == tokens(Transformer(model.config, model.weights, layers))
