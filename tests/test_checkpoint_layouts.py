"""Layouts of other tools' checkpoints: against packers written element by element from their specifications."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flashkernel import Weight
from flashkernel.blocks import checkpoint_layouts as layouts

SIZES = st.tuples(st.sampled_from([8, 16, 24]), st.sampled_from([32, 64, 96]), st.booleans(), st.integers(0, 10**6))


def _weight(sizes: tuple[int, int, bool, int], format: str = "int4") -> Weight:
    out, inner, symmetric, seed = sizes
    matrix = torch.randn(out, inner, generator=torch.Generator().manual_seed(seed)) + 0.3
    weight = Weight.quantize(matrix, format, "1x32", symmetric=symmetric)
    assert weight.scales is not None
    return Weight(weight.data, weight.scales.half().float(), weight.zeros, format, (1, 32))


def _same(a: Weight, b: Weight) -> None:
    assert (a.format, a.shape) == (b.format, b.shape)  # a group may be the whole row
    for mine, theirs in zip(a.tensors, b.tensors):
        assert torch.equal(mine, theirs)


def _word(values: list[int], bits: int) -> int:
    word = sum(value << (bits * place) for place, value in enumerate(values))
    return word - 2**32 if word >= 2**31 else word


@settings(max_examples=10, deadline=None)
@given(SIZES, st.sampled_from(["int4", "int8"]), st.sampled_from([1, 2]))
def test_gptq(sizes: Any, format: str, version: int) -> None:
    weight = _weight(sizes, format)
    bits = 4 if format == "int4" else 8
    codes, zeros = layouts.codes_of(weight)
    if version == 1 and zeros is not None and (zeros == 0).any():
        with pytest.raises(ValueError, match="has no 0"):
            layouts.write_gptq(weight, 1)
        return
    found = layouts.write_gptq(weight, version)
    out, inner = codes.shape
    each = 32 // bits
    for row in range(0, inner // each, 3):
        for n in range(out):
            expected = _word([int(codes[n, row * each + i]) for i in range(each)], bits)
            assert int(found["qweight"][row, n]) == expected
    middle = 2 ** (bits - 1)
    for group in range(inner // 32):
        for c in range(out // each):
            stored = [middle if zeros is None else int(zeros[c * each + i, group]) for i in range(each)]
            assert int(found["qzeros"][group, c]) == _word([value - (version == 1) for value in stored], bits)
    assert found["g_idx"].tolist() == [column // 32 for column in range(inner)]
    assert found["scales"].shape == (inner // 32, out)
    _same(layouts.read_gptq(found, bits, version), weight)


def test_gptq_with_an_order_of_its_own_is_dequantized() -> None:
    weight = _weight((8, 64, True, 0))
    parts = layouts.write_gptq(weight)
    order = torch.randperm(64)
    shuffled = dict(parts, g_idx=parts["g_idx"][order])
    codes, _ = layouts.codes_of(weight)
    shuffled["qweight"] = layouts.pack_words(codes[:, order], 4).T.contiguous()
    found = layouts.read_gptq(shuffled, 4, 1)
    assert found.format == "plain"
    torch.testing.assert_close(found.data.float(), weight.dequantize(torch.float32)[:, order], rtol=1e-3, atol=1e-4)


def test_gptq_with_a_smaller_last_group() -> None:
    """A group size that does not divide a row: groups follow g_idx, or the group size where that is missing."""
    codes, scales = torch.randint(0, 16, (8, 96)), torch.rand(8, 2) + 0.5
    zeros = torch.randint(1, 16, (8, 2))
    parts = {
        "qweight": layouts.pack_words(codes, 4).T.contiguous(),
        "qzeros": layouts.pack_words((zeros - 1).T, 4),
        "scales": scales.T.contiguous(),
    }
    group = torch.arange(96) // 64
    expected = (codes - zeros[:, group]) * scales[:, group]
    for found in (
        layouts.read_gptq(dict(parts, g_idx=group.int()), 4, 1), layouts.read_gptq(parts, 4, 1, group_size=64),
    ):  # fmt: skip
        torch.testing.assert_close(found.dequantize(torch.float32), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_zero_points_of_gptq_wrap_around(bits: int) -> None:
    """Version 1 stores zero points less one: all ones stand for 0, as AutoGPTQ's kernels read them."""
    codes = torch.randint(0, 2**bits, (8, 32))
    parts = {
        "qweight": layouts.pack_words(codes, bits).T.contiguous(),
        "qzeros": torch.full((1, 8 * bits // 32), -1, dtype=torch.int32),
        "scales": torch.ones(1, 8),
    }
    assert torch.equal(layouts.read_gptq(parts, bits, 1).dequantize(torch.float32), codes.float())


@settings(max_examples=10, deadline=None)
@given(SIZES)
def test_awq(sizes: Any) -> None:
    weight = _weight(sizes)
    codes, _ = layouts.codes_of(weight)
    found = layouts.write_awq(weight)
    out, inner = codes.shape
    for k in range(0, inner, 7):
        for c in range(out // 8):
            expected = _word([int(codes[c * 8 + place, k]) for place in (0, 2, 4, 6, 1, 3, 5, 7)], 4)
            assert int(found["qweight"][k, c]) == expected
    _same(layouts.read_awq(found), weight)


@settings(max_examples=10, deadline=None)
@given(SIZES, st.sampled_from(["int4", "int8"]))
def test_compressed_tensors(sizes: Any, format: str) -> None:
    """A word has consecutive inputs, value plus 2^(bits - 1); zero points are packed along the outputs."""
    weight = _weight(sizes, format)
    bits = 4 if format == "int4" else 8
    each = 32 // bits
    codes, zeros = layouts.codes_of(weight)
    found = layouts.write_pack_quantized(weight)
    out, inner = codes.shape
    for n in range(out):
        for c in range(inner // each):
            assert int(found["weight_packed"][n, c]) == _word(codes[n, c * each : (c + 1) * each].tolist(), bits)
    if zeros is not None:
        for c in range(out // each):
            for group in range(inner // 32):
                expected = _word(zeros[c * each : (c + 1) * each, group].tolist(), bits)
                assert int(found["weight_zero_point"][c, group]) == expected
    assert found["weight_shape"].tolist() == [out, inner]
    _same(layouts.read_pack_quantized(found, bits), weight)
    if zeros is not None:  # older files have int8 zero points
        older = dict(found, weight_zero_point=(zeros.int() - 2 ** (bits - 1)).to(torch.int8))
        _same(layouts.read_pack_quantized(older, bits), weight)


@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_with_groups_by_index(symmetric: bool) -> None:
    """weight_g_idx of older files: in order, all -1, or an order of its own, which is dequantized."""
    weight = _weight((8, 64, symmetric, 0))
    parts = layouts.write_pack_quantized(weight)
    codes, zeros = layouts.codes_of(weight)
    assert weight.scales is not None
    groups = weight.scales.shape[1]
    in_order = torch.arange(64) // (64 // groups)
    for index in (in_order, torch.full((64,), -1)):
        _same(layouts.read_pack_quantized(dict(parts, weight_g_idx=index.int()), 4), weight)
    for order in (in_order[torch.randperm(64)], torch.zeros(64)):
        found = layouts.read_pack_quantized(dict(parts, weight_g_idx=order.int()), 4)
        assert found.format == "plain"
        zero = 8 if zeros is None else zeros.int()[:, order.long()]
        scales = parts["weight_scale"].float()[:, order.long()]
        assert torch.equal(found.data, (codes.int() - zero) * scales)
    for wrong, message in ((torch.full((64,), groups), "names group"), (torch.zeros(63), "do not fit together")):
        with pytest.raises(ValueError, match=message):
            layouts.read_pack_quantized(dict(parts, weight_g_idx=wrong.int()), 4)


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("zero", [None, 3])
def test_one_scale_for_a_matrix(bits: int, zero: int | None) -> None:
    """compressed-tensors' strategy "tensor"."""
    codes = torch.randint(0, 2**bits, (8, 32))
    parts = {"weight_packed": layouts.pack_words(codes, bits), "weight_scale": torch.tensor([0.25])}
    if zero is not None:
        parts["weight_zero_point"] = torch.tensor([zero - 2 ** (bits - 1)], dtype=torch.int8)
    expected = (codes - (2 ** (bits - 1) if zero is None else zero)) * 0.25
    assert torch.equal(layouts.read_pack_quantized(parts, bits).dequantize(torch.float32), expected)


def test_whole_rows() -> None:
    weight = Weight.quantize(torch.randn(8, 48), "int4", "row")
    rounded = Weight(weight.data, weight.scales.half().float(), None, "int4", (1, -1))  # type: ignore[union-attr]
    _same(layouts.read_gptq(layouts.write_gptq(rounded), 4, 1), rounded)
    _same(layouts.read_awq(layouts.write_awq(rounded)), rounded)
    _same(layouts.read_pack_quantized(layouts.write_pack_quantized(rounded), 4), rounded)


@pytest.mark.parametrize("change, message", [
    ({"scales": torch.ones(3, 8).half()}, "do not fit together"),
    ({"qzeros": torch.zeros(5, 1, dtype=torch.int32)}, "do not fit together"),
    ({"g_idx": torch.zeros(7, dtype=torch.int32)}, "do not fit together"),
    ({"g_idx": torch.full((64,), 9, dtype=torch.int32)}, "g_idx names group 9"),
    ({"scales": None}, "scales are missing"),
])  # fmt: skip
def test_damaged_gptq(change: dict[str, Any], message: str) -> None:
    parts: dict[str, Any] = {**layouts.write_gptq(_weight((8, 64, True, 0))), **change}
    with pytest.raises(ValueError, match=message):
        layouts.read_gptq({name: value for name, value in parts.items() if value is not None}, 4, 1)


def test_what_cannot_be_stored() -> None:
    with pytest.raises(ValueError, match="quantize it to int4 or int8"):
        layouts.write_gptq(Weight.quantize(torch.ones(8, 32), "fp8"))
    with pytest.raises(ValueError, match="AWQ has 4 bits"):
        layouts.write_awq(Weight.quantize(torch.ones(8, 32), "int8"))
    with pytest.raises(ValueError, match=r"a matrix \(7, 32\) does not fill them"):
        layouts.write_gptq(Weight.quantize(torch.randn(7, 32), "int4"))
    packed = layouts.write_pack_quantized(_weight((8, 64, True, 0)))
    with pytest.raises(ValueError, match="do not fit together"):
        layouts.read_pack_quantized(dict(packed, weight_shape=torch.tensor([9, 64])), 4)
