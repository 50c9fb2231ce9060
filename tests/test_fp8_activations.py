"""Weights in MXFP4 with x in fp8: the pass that makes them fp8, and what serves which call."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import flashkernel as fk
from flashkernel.blocks.mxfp4_triton import in_fp8
from flashkernel.core import device as devices
from flashkernel.core.launch import collect_launches
from flashkernel.ops.gemm import library

FP8 = torch.float8_e4m3fn
DEVICES = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])


def _weight(*shape: int, device: str | torch.device = "cpu") -> fk.Weight:
    return replace(fk.Weight.quantize(torch.randn(*shape, device=device), "mxfp4"), activation_dtype=FP8)


@DEVICES
@pytest.mark.parametrize("shape", [(5, 64), (2, 3, 1056), (9, 32), (0, 64)])
def test_a_weight_becomes_fp8_without_error(shape: tuple[int, ...], device: str) -> None:
    """Scales that are up to 2^14 apart in a row; rows are far apart."""
    weight = _weight(*shape, device=device)
    assert weight.scales is not None
    near = 120 + torch.randint(0, 15, weight.scales.shape, device=device)
    exponents = near + 10 * (torch.arange(shape[-2], device=device) % 10 - 5)[:, None]
    weight = replace(weight, scales=exponents.to(torch.uint8))
    found = in_fp8(weight)
    assert (found.format, found.group_shape, found.activation_dtype) == ("fp8", (1, -1), FP8)
    assert torch.equal(found.dequantize(torch.float64), weight.dequantize(torch.float64))


@DEVICES
def test_scales_at_the_ends(device: str) -> None:
    """The least and largest scales, and groups that are much smaller than others of their row."""
    codes = torch.full((4, 64), 0x57, dtype=torch.uint8, device=device)  # 6 and 3
    scales = torch.tensor([[0, 0, 3, 5], [254, 254, 240, 0], [127, 100, 127, 127], [127, 255, 127, 127]])
    weight = fk.Weight(codes, scales.to(torch.uint8).to(device), None, "mxfp4", (1, 32), FP8)
    found, exact = in_fp8(weight).dequantize(torch.float64), weight.dequantize(torch.float64)
    assert torch.equal(found[0], exact[0])
    step = 2.0 ** (scales.amax(1, keepdim=True).double() - 127 - 6 - 9).to(device)
    assert bool(((found - exact).abs() <= step / 2)[1:3].all())
    assert torch.equal(found[1, :96], exact[1, :96])
    assert bool(found[3].isnan().all())  # a product with a row that has a NaN is NaN


@DEVICES
def test_the_operator_is_as_torch_library_expects(device: str) -> None:
    if device == "cpu":
        torch.library.opcheck(library._in_fp8.registered, _weight(6, 64).tensors)
    weight = _weight(3, 4, 64, device=device)
    assert torch.equal(library.in_fp8(weight).data.view(torch.uint8), in_fp8(weight).data.view(torch.uint8))


def _chosen(gpu: str, rows: int, gradients: bool = False, **options: object) -> fk.Explanation:
    with devices.pretend(devices.KNOWN[gpu]):
        x = torch.empty(rows, 64, dtype=torch.bfloat16, requires_grad=gradients)
        return fk.explain(fk.linear, x, _weight(64, 64), **options)


def test_many_rows_are_products_in_fp8() -> None:
    """Few rows are bound by the weight's bytes, and read them as they are."""
    assert _chosen("h200", 4096).chosen == "hopper"
    assert _chosen("h200", 64).chosen == "triton"
    assert _chosen("l4", 4096).chosen == "triton"
    assert _chosen("a100", 4096).chosen == "torch"
    assert "from sm_89 on" in str(_chosen("a100", 4096))
    assert "forward only" in str(_chosen("h200", 4096, gradients=True))
    assert _chosen("h200", 16, gradients=True).chosen == "triton"


@pytest.mark.parametrize("rows", [3, 70])
def test_x_gets_its_gradient(rows: int) -> None:
    """As if nothing was rounded."""
    x, weight = torch.randn(rows, 64, requires_grad=True), _weight(16, 64)
    fk.linear(x, weight).sum().backward()
    expected = weight.dequantize(torch.float32).sum(0).expand(rows, 64)
    torch.testing.assert_close(x.grad, expected)


@DEVICES
def test_kernels_of_few_rows_have_gradients(device: str) -> None:
    x, weight = torch.randn(3, 64, device=device, requires_grad=True), _weight(16, 64, device=device)
    fk.linear(x, weight, backend="triton").sum().backward()
    torch.testing.assert_close(x.grad, weight.dequantize(torch.float32).sum(0).expand(3, 64), rtol=1e-2, atol=1e-2)


@DEVICES
def test_q_k_and_v_are_rounded_once(device: str) -> None:
    x, weights = torch.randn(3, 64, device=device), [_weight(8, 64, device=device) for _ in range(3)]
    found = fk.linear(x, weights, backend="triton")
    for one, weight in zip(found, weights):
        torch.testing.assert_close(one, fk.linear(x, weight, backend="reference"), rtol=2e-3, atol=2e-3)


def test_the_scale_of_x_is_that_of_a_row() -> None:
    assert _weight(4, 64).activation_group == (1, -1)
    assert fk.Weight.quantize(torch.randn(4, 256), "fp8", "group", FP8).activation_group == (1, 128)
    assert fk.Weight.quantize(torch.randn(4, 64), "mxfp4", activation_dtype=torch.int8).activation_group == (1, 32)


def test_tiles_take_x_as_it_is() -> None:
    with pytest.raises(ValueError, match="kernels of tiles take x as it is"):
        _weight(64, 64).tiled()


def _experts(gpu: str, x: Tensor, weights: list[fk.Weight]) -> fk.Explanation:
    with devices.pretend(devices.KNOWN[gpu]):
        return fk.explain(fk.moe_experts, x, fk.moe_route(torch.randn(x.shape[0], 2)), *weights)


def test_experts_in_fp8_are_served_from_ada_on_and_forward_only() -> None:
    weights = [_weight(2, 64, 64), _weight(2, 64, 32)]
    x = torch.empty(9, 64, dtype=torch.bfloat16)
    assert _experts("h200", x, weights).chosen == "hopper"
    assert _experts("l4", x, weights).chosen == "triton"
    assert "from sm_89 on" in str(_experts("a100", x, weights))
    assert "forward only" in str(_experts("h200", x.clone().requires_grad_(), weights))
    mixed = [weights[0], replace(weights[1], activation_dtype=None)]
    assert _experts("h200", x, mixed).chosen == "torch"


@DEVICES
@pytest.mark.parametrize("tokens", [5, 80])
def test_experts_round_x_and_what_lies_between(tokens: int, device: str) -> None:
    """Against products of the rounded values, one expert after the other."""
    x = torch.randn(tokens, 64, device=device)
    gate_up, down = _weight(3, 64, 64, device=device), _weight(3, 64, 32, device=device)
    routing = fk.moe_route(torch.randn(tokens, 3, device=device), fk.Router("softmax", 1))
    found = fk.moe_experts(x, routing, gate_up, down, backend="triton")
    for token in range(0, tokens, 4):
        expert = int(routing.experts[token, 0])
        hidden = fk.linear(x[token : token + 1], gate_up[expert], activation="swiglu", backend="reference")
        y = fk.linear(hidden, down[expert], backend="reference") * routing.weights[token, 0]
        # A rounding of the product takes single values between to the next code, 1/16 away.
        assert float((found[token] - y[0]).norm() / y.norm()) < 0.01
    unrounded = fk.moe_experts(x, routing, *[replace(one, activation_dtype=None) for one in (gate_up, down)])
    assert float((found - unrounded).norm() / unrounded.norm()) > 0.01


@pytest.mark.compile
@pytest.mark.parametrize("arch, gpu", [(89, "l4"), (90, "h200")])
def test_the_pass_compiles_without_spills(arch: int, gpu: str) -> None:
    from compiled import compiled

    with devices.pretend(devices.KNOWN[gpu]), collect_launches() as launches:
        data = torch.empty((32, 5760, 1440), dtype=torch.uint8, device="meta")
        in_fp8(fk.Weight(data, torch.empty_like(data[..., :90]), None, "mxfp4", (1, 32), FP8))
    (launch,) = launches
    assert compiled(launch, arch).stack == 0


def test_experts_in_int8_round_x_where_they_ask_for_it() -> None:
    weights = [
        fk.Weight.quantize(torch.randn(2, *size), "int8", activation_dtype=torch.int8) for size in ((8, 4), (4, 4))
    ]
    x, routing = torch.randn(3, 4), fk.moe_route(torch.randn(3, 2), fk.Router("softmax", 1))
    y = fk.moe_experts(x, routing, *weights)
    torch.testing.assert_close(y, fk.moe_experts(x, routing, *weights, backend="reference"))
    plain = [replace(one, activation_dtype=None) for one in weights]
    assert not torch.equal(y, fk.moe_experts(x, routing, *plain))
    with pytest.raises(fk.BackendError, match="round x to 8 bits for weights in MXFP4"):
        fk.moe_experts(x, routing, *weights, backend="triton")
