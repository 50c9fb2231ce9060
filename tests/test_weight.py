"""Weights in their formats: what they stand for, how linear takes them, and what may hold them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import flashkernel as fk
from flashkernel import Weight
from flashkernel.blocks.fp8 import FP8, expand_scales, quantize_fp8_groups
from flashkernel.blocks.weight import _FORMATS, GRANULARITIES, Layout, register_format
from flashkernel.blocks.weight_module import WeightBuffers
from flashkernel.core import device as devices

GRANULARITY = pytest.mark.parametrize("granularity", list(GRANULARITIES))


def _matrix(rows: int = 150, columns: int = 300) -> Tensor:
    return torch.randn(rows, columns) * torch.rand(rows, 1) * 0.1


@GRANULARITY
@pytest.mark.parametrize("shape", [(150, 300), (128, 128), (1, 1), (3, 129), (2, 5, 140)])
def test_quantization_by_its_definition(granularity: str, shape: tuple[int, ...]) -> None:
    """Element (i, j) is data[i, j] * scales[i // rows, j // columns], and the largest of a group is 448."""
    matrix = torch.randn(shape)
    weight = Weight.quantize(matrix, "fp8", granularity)
    rows, columns = [size if each == -1 else each for size, each in zip(shape[-2:], weight.group_shape)]
    exact = weight.dequantize(torch.float64)
    assert weight.scales is not None
    for i in range(0, shape[-2], 7):
        for j in range(0, shape[-1], 11):
            scale = weight.scales[..., i // rows, j // columns].double()
            torch.testing.assert_close(exact[..., i, j], weight.data[..., i, j].double() * scale, rtol=1e-15, atol=0)
    groups = weight.data.float().abs()
    assert groups.max() == 448
    # Three bits of fraction: an error of at most a sixteenth, or half a step of the smallest numbers.
    step = expand_scales(weight.scales, weight.group_shape, shape) * 2.0**-9
    assert ((exact - matrix).abs() <= torch.maximum(matrix.abs() / 16, step / 2) * 1.001).all()
    assert weight.shape == matrix.shape
    assert weight.nbytes == matrix.numel() + 4 * weight.scales.numel()


def test_zeros_and_empty_matrices() -> None:
    assert not Weight.quantize(torch.zeros(5, 7)).dequantize(torch.float32).any()
    for granularity in GRANULARITIES:
        for shape in ((0, 7), (5, 0), (0, 0)):
            assert Weight.quantize(torch.empty(shape), "fp8", granularity).dequantize(torch.float16).shape == shape


def test_what_it_prints() -> None:
    assert repr(Weight(torch.ones(4, 6))) == "Weight(float32, 4x6, 96 bytes)"
    assert repr(Weight.quantize(torch.ones(2, 4, 6), "fp8", "row")) == "Weight(fp8 row, 2x4x6, 80 bytes)"
    assert "1.6 MB" in repr(Weight.quantize(torch.ones(1000, 1600), "fp8", "tensor"))


@GRANULARITY
def test_layouts_and_tensors_make_the_weight(granularity: str) -> None:
    weight = Weight.quantize(_matrix(), "fp8", granularity, activation_dtype=FP8)
    assert Layout.parse(weight.layout) == Layout("fp8", weight.group_shape, False, FP8)
    again = Weight.from_tensors(weight.tensors, weight.layout)
    assert again.layout == weight.layout
    assert torch.equal(again.dequantize(torch.float32), weight.dequantize(torch.float32))
    assert Layout.parse("int4 1x32 zeros") == Layout("int4", (1, 32), True, None)


@GRANULARITY
def test_rows_and_concatenation(granularity: str) -> None:
    first, second = (Weight.quantize(_matrix(rows), "fp8", granularity) for rows in (256, 37))
    whole = torch.cat([first.dequantize(torch.float32), second.dequantize(torch.float32)])
    for parts in ([first, second], [second, first]):
        expected = torch.cat([part.dequantize(torch.float32) for part in parts])
        assert torch.equal(Weight.concatenate(parts).dequantize(torch.float32), expected)
    assert Weight.concatenate([first, second]).group_shape[0] == (128 if granularity == "block" else 1)
    together = Weight.concatenate([first, second])
    for rows in (slice(0, 20), slice(130, 290), slice(1, None, 2), slice(5, 5)):
        assert torch.equal(together.rows(rows).dequantize(torch.float32), whole[rows])
    stack = Weight.stack([first, first])
    assert stack.shape == (2, 256, 300)
    assert torch.equal(stack[1].dequantize(torch.float32), first.dequantize(torch.float32))
    with pytest.raises(ValueError, match="different layouts"):
        Weight.stack([first, second])
    with pytest.raises(ValueError, match="different formats"):
        Weight.concatenate([first, Weight(_matrix())])


def test_pack_takes_the_scales_of_checkpoints() -> None:
    data = _matrix(256, 384).to(FP8)
    stored = {(): "tensor", (1,): "tensor", (256,): "row", (256, 1): "row", (256, 3): "group", (2, 3): "block"}
    for shape, granularity in stored.items():
        weight = Weight.pack(data, torch.rand(shape, dtype=torch.bfloat16), format="fp8")
        assert weight.group_shape == GRANULARITIES[granularity]
        assert weight.scales is not None
        assert weight.scales.dtype == torch.float32
    experts = Weight.pack(data.expand(3, 256, 384), torch.rand(3), format="fp8")
    assert experts.group_shape == (-1, -1)
    with pytest.raises(ValueError, match=r"scales \(7, 3\) are none of these"):
        Weight.pack(data, torch.rand(7, 3), format="fp8")


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: Weight(torch.ones(2, 3, dtype=torch.int8)), "must be a float matrix"),
        (lambda: Weight(torch.ones(2, 3), torch.ones(1, 1)), "a plain weight has no scales"),
        (lambda: Weight(torch.ones(2, 3).to(FP8), format="fp8"), "the scales are missing"),
        (lambda: Weight(torch.ones(2, 3).to(FP8), torch.ones(3, 1), format="fp8"), r"float32 scales \(1, 1\)"),
        (lambda: Weight(torch.ones(2, 3), torch.ones(1, 1), format="fp8"), "must be a float8_e4m3fn matrix"),
        (lambda: Weight(torch.ones(2, 3), format="fp7"), "there is no format 'fp7'; there are .*fp8"),
        (lambda: Weight.quantize(torch.ones(2, 3), granularity="column"), "granularity is 'column'"),
        (lambda: Weight.quantize(torch.ones(3)), "must be a float matrix"),
        (lambda: Weight.quantize(torch.ones(2, 3), activation_dtype=torch.int8), "activation_dtype is torch.int8"),
        (lambda: fk.linear(torch.ones(2, 4), Weight.quantize(torch.ones(2, 3))), "a weight has shape"),
        (lambda: fk.linear(torch.ones(2, 3), Weight.quantize(torch.ones(2, 2, 3))), "a weight has shape"),
        (lambda: fk.linear(torch.ones(2, 3), torch.ones(2, 3).half()), "or give a flashkernel.Weight"),
        (lambda: Weight(torch.ones(2, 3))[0], "only a stack"),
    ],
)
def test_wrong_inputs(make: Any, message: str) -> None:
    with pytest.raises((ValueError, IndexError), match=message):
        make()


@pytest.mark.parametrize("backend", ["torch", "triton", "reference"])
def test_linear_of_a_plain_weight_is_that_of_its_tensor(backend: str) -> None:
    x, matrix, up = torch.randn(3, 20), torch.randn(8, 20, requires_grad=True), torch.randn(8, 20)
    y = fk.linear(x, Weight(matrix), backend=backend)
    assert torch.equal(y, fk.linear(x, matrix, backend=backend))
    (gradient,) = torch.autograd.grad(y.sum(), matrix)
    torch.testing.assert_close(gradient, x.sum(0).expand(8, 20))
    pair = fk.linear(x, [Weight(matrix), up], activation="swiglu", backend=backend)
    assert torch.equal(pair, fk.linear(x, [matrix, up], activation="swiglu", backend=backend))


@GRANULARITY
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_gradients_go_through_a_quantized_weight(granularity: str, dtype: torch.dtype) -> None:
    weight = Weight.quantize(_matrix(), "fp8", granularity)
    x = torch.randn(5, 300, dtype=dtype, requires_grad=True)
    residual = torch.randn(5, 150, dtype=dtype, requires_grad=True)
    upstream = torch.randn(5, 150, dtype=dtype)
    matrix = weight.dequantize(dtype)
    expected = torch.autograd.grad(x @ matrix.T + residual, (x, residual), upstream)
    for backend in ("torch", "triton") if weight.group_shape[1] == -1 else ("torch",):
        y = fk.linear(x, weight, residual=residual, backend=backend)
        for mine, theirs in zip(torch.autograd.grad(y, (x, residual), upstream), expected):
            torch.testing.assert_close(mine, theirs, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("granularity, columns", [("row", -1), ("tensor", -1), ("block", 128)])
def test_rounded_activations(granularity: str, columns: int) -> None:
    """x in fp8 with a scale for each row or its columns, and a gradient as if nothing was rounded."""
    weight = Weight.quantize(_matrix(32, 48), "fp8", granularity, activation_dtype=FP8)
    x = torch.randn(2, 3, 48, requires_grad=True)
    data, scales = quantize_fp8_groups(x.detach().view(6, 48), (1, columns))
    expected = (data.float() * scales) @ weight.dequantize(torch.float32).T
    y = fk.linear(x, weight)
    torch.testing.assert_close(y.view(6, 32), expected)
    (gradient,) = torch.autograd.grad(y.sum(), x)
    torch.testing.assert_close(gradient, weight.dequantize(torch.float32).sum(0).expand(2, 3, 48))
    assert not torch.equal(y, fk.linear(x, replace(weight, activation_dtype=None)))


def test_explain_says_which_backend_reads_a_format() -> None:
    x, matrix = torch.randn(2, 256).half(), _matrix(128, 256)
    h200, a100 = devices.KNOWN["h200"], devices.KNOWN["a100"]

    def verdicts(weight: Any, gpu: Any = h200) -> dict[str, str]:
        with devices.pretend(gpu):
            found = fk.explain(fk.linear, x, weight)
        return {one.backend: one.reason or "" for one in found.verdicts} | {"chosen": found.chosen or ""}

    row = Weight.quantize(matrix, "fp8", "row")
    assert verdicts(row)["chosen"] == "triton"
    assert "read float weights, not fp8" in verdicts(row)["cuda"]
    assert "8-bit floats from sm_89 on" in verdicts(row, a100)["triton"]
    assert verdicts(row, a100)["chosen"] == "torch"
    block = verdicts(Weight.quantize(matrix, "fp8", "block"))
    assert (block["chosen"], "not for blocks" in block["triton"]) == ("torch", True)
    pairs_of_rows = Weight(row.data, row.scales[::2], format="fp8", group_shape=(2, -1))  # type: ignore[index]
    assert "not for blocks" in verdicts(pairs_of_rows)["triton"]
    in_fp8 = replace(row, activation_dtype=FP8)
    assert verdicts(in_fp8)["chosen"] == "hopper"
    assert "multiplies 8-bit floats from sm_89 on" in verdicts(in_fp8, a100)["triton"]
    grouped = Weight.quantize(matrix, "fp8", "group", activation_dtype=FP8)
    assert (verdicts(grouped)["chosen"], "groups of 1x128" in verdicts(grouped)["hopper"]) == ("torch", True)
    assert "one packed weight" in verdicts([in_fp8, in_fp8])["hopper"]
    assert "weights of one format, not fp8 row and plain" in verdicts([row, matrix.half()])["triton"]
    assert verdicts([row, Weight.quantize(matrix, "fp8", "tensor")])["chosen"] == "triton"
    with devices.pretend(h200):
        assert "weight=fp8 row" in str(fk.explain(fk.linear, x, row))
        assert "weight" not in fk.explain(fk.linear, x, matrix.half()).call.facts


def test_plain_and_quantized_weights_in_one_call() -> None:
    x, first, second = torch.randn(3, 40), Weight.quantize(_matrix(8, 40)), torch.randn(5, 40)
    mine = fk.linear(x, [first, second])
    torch.testing.assert_close(mine[0], x @ first.dequantize(torch.float32).T)
    torch.testing.assert_close(mine[1], x @ second.T)


def test_out_is_written_and_may_be_the_residual() -> None:
    x, matrix, residual = torch.randn(3, 20), torch.randn(8, 20), torch.randn(3, 8)
    expected = x @ matrix.T + residual
    quantized = Weight.quantize(matrix)
    for backend in ("torch", "triton", "reference"):
        out = torch.empty(3, 8)
        assert fk.linear(x, matrix, None, residual, out=out, backend=backend) is out
        torch.testing.assert_close(out, expected)
        for weight, wanted in ((matrix, expected), (quantized, x @ quantized.dequantize(torch.float32).T + residual)):
            total = residual.clone()
            assert fk.linear(x, weight, None, total, out=total, backend=backend) is total
            torch.testing.assert_close(total, wanted)
    for change, message in (
        ({"out": torch.empty(3, 7)}, "out is torch.float32"), ({"splits": (4, 4)}, "out needs one output"),
        ({"x": x.clone().requires_grad_()}, "out takes no gradients"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            fk.linear(**{"x": x, "weight": matrix, "out": torch.empty(3, 8), **change})


@pytest.mark.parametrize("backend", ["torch", "triton"])
def test_torch_compile(backend: str) -> None:
    weight = Weight.quantize(_matrix(32, 48), "fp8", "row")
    x = torch.randn(3, 48, requires_grad=True)

    def function(x: Tensor, weight: Weight) -> Tensor:
        return fk.linear(x, weight, activation="silu", backend=backend)

    compiled = torch.compile(function, backend="aot_eager", fullgraph=True)
    expected = function(x, weight)
    found = compiled(x, weight)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(
        torch.autograd.grad(found.sum(), x)[0], torch.autograd.grad(expected.sum(), x)[0]
    )  # fmt: skip
    other = Weight.quantize(_matrix(32, 48), "fp8", "row")
    torch.testing.assert_close(compiled(x, other), function(x, other))


def test_opcheck() -> None:
    from flashkernel.blocks.epilogue import standard

    weight = Weight.quantize(_matrix(16, 32), "fp8", "row")
    chain = ";".join(piece.text for piece in standard(True, "silu", 1.0, False))
    arguments = (
        torch.randn(3, 32, requires_grad=True), list(weight.tensors), weight.layout,
        torch.randn(16, requires_grad=True), None, None, None, torch.rand(32), chain, "halves", 1e-6, 0.0,
        torch.float32, "flashkernel.ops.gemm.triton",
    )  # fmt: skip
    # test_schema computes with all inputs, which torch cannot do with 8-bit floats.
    torch.library.opcheck(
        torch.ops.flashkernel.linear_quantized.default,
        arguments,
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_repeated_calls_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with other weights of the same layout replay one recording; those of another layout do not."""
    from flashkernel.core import replay

    monkeypatch.setattr(replay, "RECORD_AFTER", 2)
    cache = fk.linear.launch_cache  # type: ignore[attr-defined]
    monkeypatch.setattr(cache, "entries", {})
    x = torch.randn(3, 48)
    for _ in range(6):
        for granularity in ("row", "tensor"):
            weight = Weight.quantize(_matrix(32, 48), "fp8", granularity)
            y = fk.linear(x, weight, backend="triton")
            torch.testing.assert_close(y, x @ weight.dequantize(torch.float32).T)
    kinds = [type(entry).__name__ for entry in cache.entries.values()]
    assert kinds == ["Recording", "Recording"]


def test_it_is_a_pytree() -> None:
    weight = Weight.quantize(_matrix(8, 16), "fp8", "row", activation_dtype=FP8)
    leaves, tree = pytree.tree_flatten({"w": weight})
    assert [leaf.dtype for leaf in leaves if leaf is not None] == [FP8, torch.float32]
    again = pytree.tree_unflatten(leaves, tree)["w"]
    assert (again.layout, again.data is weight.data) == (weight.layout, True)
    moved = pytree.tree_map(lambda leaf: leaf.to("meta"), weight)
    assert (moved.device.type, moved.layout, weight.to("meta").device.type) == ("meta", weight.layout, "meta")


def test_a_module_holds_it() -> None:
    weight = Weight.quantize(_matrix(8, 16), "fp8", "row")
    module, other = WeightBuffers(weight), WeightBuffers(Weight.quantize(_matrix(8, 16), "fp8", "row"))
    assert set(module.state_dict()) == {"data", "scales", "_extra_state"}
    other.load_state_dict(module.state_dict())
    assert torch.equal(other.weight.dequantize(torch.float32), weight.dequantize(torch.float32))
    assert "fp8 row" in repr(module)
    assert (module.half().weight.dtype, module.weight.scales.dtype) == (FP8, torch.float32)  # type: ignore[union-attr]
    assert module.to("meta").weight.device.type == "meta"
    tensor = WeightBuffers(Weight.quantize(_matrix(8, 16), "fp8", "tensor"))
    with pytest.raises((RuntimeError, ValueError)):
        tensor.load_state_dict(other.state_dict())
    plain = WeightBuffers(Weight(nn.Parameter(torch.ones(2, 3))))
    assert [name for name, _ in plain.named_parameters()] == ["data"]
    assert plain.half().weight.dtype == torch.float16


class _Ternary:
    """A format that is not the library's own: int8 in -1, 0, 1 with one scale; no kernel reads it."""

    name = "ternary"

    def shape(self, data: Tensor) -> torch.Size:
        return data.shape

    def error(self, weight: Weight) -> str | None:
        return None

    def dequantize(self, weight: Weight, dtype: torch.dtype) -> Tensor:
        return (weight.data.float() * weight.scales).to(dtype)

    def default_group(self, columns: int) -> tuple[int, int]:
        return -1, -1

    def quantize(self, tensor: Tensor, group_shape: tuple[int, int], symmetric: bool) -> Weight:
        scale = tensor.abs().mean().float()
        return Weight((tensor / scale).round().clamp(-1, 1).to(torch.int8), scale.view(1, 1), format="ternary")

    def pack(self, data: Tensor, scales: Tensor | None, zeros: Tensor | None) -> Weight:
        return Weight(data, scales, zeros, "ternary")

    def rows(self, weight: Weight, rows: slice) -> Weight:
        return replace(weight, data=weight.data[rows])

    def concatenate(self, weights: Any) -> Weight:
        raise NotImplementedError

    def declines(self, backend: str, layout: Layout) -> str | None:
        return "no kernel reads ternary weights"


def test_a_new_format_changes_no_caller() -> None:
    register_format(_Ternary())
    try:
        weight = Weight.quantize(_matrix(24, 40), "ternary", "tensor")
        x = torch.randn(3, 40)
        torch.testing.assert_close(fk.linear(x, weight), x @ weight.dequantize(torch.float32).T)
        with pytest.raises(fk.BackendError, match="no kernel reads ternary weights"):
            fk.linear(x, weight, backend="triton")
    finally:
        del _FORMATS["ternary"]


def test_fused_forwards_take_quantized_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """q, k and v of a decoding step are one call of `linear`; a hook on one of them ends that."""
    pytest.importorskip("transformers")
    from flashkernel.hf import forwards
    from flashkernel.hf.layer import Linear, _add_linear, _linear
    from flashkernel.hf.quantized import QuantizedLinear

    monkeypatch.setattr(forwards, "_can_fuse", lambda x, layers: all(forwards._is_fusable(y, x.dtype) for y in layers))
    layers = [QuantizedLinear(Weight.quantize(_matrix(rows, 40)), torch.randn(rows)) for rows in (8, 4, 4)]
    x = torch.randn(2, 1, 40)
    for mine, layer in zip(forwards._projections(x, *layers), layers):
        torch.testing.assert_close(mine, x @ layer.weight.dequantize(torch.float32).T + layer.bias)
    found = _linear(layers[0], torch.float16)
    assert found is not None
    assert found.weight.layout == "fp8 row"
    plain = Linear(found.weight, None)
    h, total = torch.randn(3, 40), torch.randn(3, 8)
    expected = total + h @ found.weight.dequantize(torch.float32).T
    torch.testing.assert_close(_add_linear(total, h, plain, torch.addmm), expected)
    layers[0].register_forward_hook(lambda *_: None)
    assert _linear(layers[0], torch.float16) is None
    assert not forwards._is_fusable(layers[0], torch.float16)


def test_a_quantized_layer_compiles() -> None:
    pytest.importorskip("transformers")
    from flashkernel.hf.quantized import QuantizedLinear

    layer, x = QuantizedLinear(Weight.quantize(_matrix(32, 48))), torch.randn(3, 48)
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))


def test_products_in_fp8_are_those_of_rounded_activations() -> None:
    """Scales, bias, gate and residual in the epilogue of an 8-bit product, for few rows and many."""
    weight = Weight.quantize(_matrix(64, 48), "fp8", "row", activation_dtype=FP8)
    for rows in (3, 70):
        x, bias, residual = torch.randn(rows, 48).half(), torch.randn(64).half(), torch.randn(rows, 32).half()
        with torch.no_grad():
            mine = fk.linear(x, weight, bias, residual, activation="swiglu", backend="triton")
            theirs = fk.linear(x, weight, bias, residual, activation="swiglu", backend="torch")
        torch.testing.assert_close(mine, theirs, rtol=4e-3, atol=4e-3)
