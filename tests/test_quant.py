"""Quantization of activations: codes bit by bit, fused passes against unfused ones, products, errors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import flashkernel as fk
from flashkernel.core import device as devices

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_devices = pytest.mark.parametrize("device", DEVICES)


def _bits(x: Tensor) -> Tensor:
    return x if x.dtype == INT8 else x.view(torch.uint8)


@on_devices
@pytest.mark.parametrize("dtype", [E4M3, INT8])
@pytest.mark.parametrize("granularity", ["row", "group", "1x32", "tensor"])
def test_backends_give_the_same_codes(dtype: torch.dtype, granularity: str, device: str) -> None:
    """Of values from the largest to subnormal ones, of ties, and of a row of zeros."""
    x = torch.randn(33, 256, device=device) * torch.logspace(-42, 35, 33, device=device)[:, None]
    x[7] = 0.0
    x[8] = torch.arange(256, device=device) / 2  # ties, since the scale is a power of two
    x[8, 0] = 448.0 if dtype == E4M3 else 127.0
    expected = fk.quantize(x, dtype, granularity, backend="reference")
    found = fk.quantize(x, dtype, granularity, backend="triton")
    assert torch.equal(_bits(found[0]), _bits(expected[0]))
    assert torch.equal(found[1], expected[1])
    assert bool((found[1] > 0).all())


@on_devices
def test_zero_points_are_the_same(device: str) -> None:
    x = torch.rand(9, 300, device=device) * torch.logspace(-30, 30, 9, device=device)[:, None]
    x = torch.cat([x, x - x.mean(1, keepdim=True), -x])
    for granularity in ("row", "group"):
        expected = fk.quantize(x, INT8, granularity, symmetric=False, backend="reference")
        found = fk.quantize(x, INT8, granularity, symmetric=False, backend="triton")
        for mine, theirs in zip(found, expected):
            assert torch.equal(mine, theirs)
        y = fk.dequantize(*found, granularity=granularity, dtype=torch.float32, backend="triton")
        steps = found[1].repeat_interleave(300 if granularity == "row" else 128, -1)[:, :300]
        assert ((y - x).abs() <= 0.5001 * steps).all()


@on_devices
@pytest.mark.parametrize("dtype", [E4M3, INT8])
@pytest.mark.parametrize("granularity", ["row", "group"])
def test_fused_passes_round_once(dtype: torch.dtype, granularity: str, device: str) -> None:
    """Codes are those of the float32 result, but for the few that a rounding of float32 takes across a tie."""
    x, weight, residual = (torch.randn(*shape, device=device) for shape in ((64, 512), (512,), (64, 512)))
    total = (x + residual).double()
    y = total / (total.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (weight.double() + 1)
    gate, up = torch.randn(2, 64, 512, device=device)
    cases = {
        "norm": (y, fk.rms_norm_quantize(
            x, weight, residual, dtype=dtype, granularity=granularity, offset=1.0, backend="triton")),
        "glu": (torch.nn.functional.silu(gate.double()) * up.double(),
                fk.glu_quantize(gate, up, dtype=dtype, granularity=granularity, backend="triton")),
    }  # fmt: skip
    for exact, (data, scales, *rest) in cases.values():
        expected, expected_scales = fk.quantize(exact.float(), dtype, granularity)
        torch.testing.assert_close(scales, expected_scales, rtol=2e-6, atol=0)
        assert (_bits(data) != _bits(expected)).float().mean() < 2e-3
        assert (_bits(data).long() - _bits(expected).long()).abs().max() <= 1
        if rest:
            torch.testing.assert_close(rest[0], x + residual)


@on_devices
def test_static_scales_saturate(device: str) -> None:
    x = torch.tensor([[-1e9, -2.0, 0.3, 2.0, 1e9]], device=device)
    scale = torch.tensor(0.01, device=device)
    for backend in ("torch", "triton"):
        data, given = fk.quantize(x, INT8, "tensor", scale, backend=backend)
        assert data.tolist() == [[-127, -127, 30, 127, 127]]
        assert torch.equal(given, scale)
        assert fk.quantize(x, E4M3, "row", scale, backend=backend)[0].float().tolist()[0][0] == -448


@on_devices
def test_nan_stays_visible_in_floats(device: str) -> None:
    x = torch.randn(3, 128, device=device)
    x[1, 5] = float("nan")
    for backend in ("torch", "triton"):
        data, _ = fk.quantize(x, E4M3, "group", backend=backend)
        assert data.float().isnan().nonzero().tolist() == [[1, 5]]


def test_repeated_calls_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls with other values replay one recording, static and dynamic."""
    from flashkernel.core import replay

    monkeypatch.setattr(replay, "RECORD_AFTER", 2)
    for function in (fk.quantize, fk.rms_norm_quantize, fk.glu_quantize):
        monkeypatch.setattr(function.launch_cache, "entries", {})  # type: ignore[attr-defined]
    for _ in range(6):
        x, scale = torch.randn(3, 64), torch.rand(())
        for found, expected in (
            (fk.quantize(x, INT8, scale=scale, backend="triton"), fk.quantize(x, INT8, scale=scale, backend="torch")),
            (fk.quantize(x, E4M3, backend="triton"), fk.quantize(x, E4M3, backend="torch")),
        ):
            assert torch.equal(_bits(found[0]), _bits(expected[0]))
            assert torch.equal(found[1], expected[1])
        data, scales = fk.glu_quantize(x, dtype=INT8, backend="triton")
        y = fk.swiglu(x)
        assert ((data * scales - y).abs() <= 0.51 * scales).all()


def test_products_take_the_scales() -> None:
    """matmul of what quantize gives is about the product."""
    x, weight = torch.randn(16, 256), torch.randn(32, 256)
    expected = x @ weight.T
    for dtype, limit in ((INT8, 0.03), (E4M3, 0.12)):
        for granularity in ("row", "tensor"):
            a, a_scale = fk.quantize(x, dtype, granularity)
            b, b_scale = fk.quantize(weight, dtype, granularity)
            y = fk.matmul(
                a, b.T, a_scale=a_scale, b_scale=b_scale.T if b_scale.ndim else b_scale, out_dtype=torch.float32
            )
            assert (y - expected).abs().max() < limit * expected.abs().max()


def test_codes_have_no_gradient() -> None:
    """A call on a parameter works."""
    x = torch.randn(2, 64, requires_grad=True)
    for data, *_ in (fk.quantize(x, INT8), fk.quantize(x, INT8, backend="triton"), fk.rms_norm_quantize(x)):
        assert not data.requires_grad


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda x: fk.quantize(x, torch.float16), "dtype is torch.float16; it must be float8_e4m3fn"),
        (lambda x: fk.quantize(x.int()), "must be a float tensor"),
        (lambda x: fk.quantize(x, granularity="block"), "Weight.quantize has blocks"),
        (lambda x: fk.quantize(x, granularity="column"), "granularity is 'column'"),
        (lambda x: fk.quantize(x, symmetric=False), "dynamic quantization to int8"),
        (lambda x: fk.quantize(x, INT8, scale=torch.ones(3, 1)), r"takes a float tensor \(\) or \(2, 1\)"),
        (lambda x: fk.rms_norm_quantize(x, granularity="tensor"), "needs all of it before"),
        (lambda x: fk.rms_norm_quantize(x, torch.ones(3)), "weight is torch.float32"),
        (lambda x: fk.rms_norm_quantize(x, None, torch.ones(3)), "residual is"),
        (lambda x: fk.rms_norm_quantize(x, eps=-1.0), "eps is -1.0"),
        (lambda x: fk.glu_quantize(x, activation="silu"), "activation is 'silu'"),
        (lambda x: fk.glu_quantize(x, packed="thirds"), "packed is 'thirds'"),
        (lambda x: fk.glu_quantize(x[:, :7]), "even number of columns"),
        (lambda x: fk.glu_quantize(x, x[:1]), "must match gate"),
        (lambda x: fk.dequantize(x, torch.ones(2, 1)), "8-bit data"),
        (lambda x: fk.dequantize(x.to(INT8), torch.ones(2)), "scales are torch.float32"),
        (lambda x: fk.dequantize(x.to(INT8), torch.ones(2, 1), dtype=INT8), "dtype is torch.int8"),
    ],
)
def test_wrong_arguments(call: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call(torch.randn(2, 8))


def test_explain_names_what_a_kernel_lacks() -> None:
    def reason(name: str, gpu: str, *args: Any, **options: Any) -> str | None:
        with devices.pretend(devices.KNOWN[gpu]):
            found = fk.explain(getattr(fk, name), *args, **options)
        return next(one.reason for one in found.verdicts if one.backend == "triton")

    x = torch.empty(2, 256, dtype=torch.float16, device="meta")
    assert reason("quantize", "h200", x) is None
    assert "not of float8_e5m2" in str(reason("quantize", "h200", x, E5M2))
    assert "zero points for rows" in str(reason("quantize", "h200", x, INT8, "tensor", symmetric=False))
    assert "power of two" in str(reason("rms_norm_quantize", "h200", x, granularity="1x96"))
    codes, scales = x.to(E4M3), torch.empty(2, 1, device="meta")
    assert "sm_89" in str(reason("dequantize", "a100", codes, scales))
    assert reason("dequantize", "a100", x.to(INT8), scales) is None
    assert reason("quantize", "t4", x) is None


@pytest.mark.compile
@pytest.mark.parametrize("name", ["quantize", "rms_norm_quantize", "glu_quantize"])
def test_codes_are_converted_by_an_instruction(name: str) -> None:
    """On an NVIDIA H200 that need not be here: e4m3 by hardware, 16-byte loads, nothing spilled."""
    from compiled import compiled

    from flashkernel.core.launch import collect_launches
    from flashkernel.ops import registry

    op = registry()[name]
    for case in (case for case in op.benches if case.axes["rows"] == 16384):
        inputs = {
            key: torch.empty(spec.shape(case.axes), dtype=spec.dtype or torch.bfloat16, device="meta")
            for key, spec in op.inputs.items()
            if not spec.optional or key in case.present
        }
        with devices.pretend(devices.KNOWN["h200"]), collect_launches() as launches:
            op.call(**inputs, **case.options, backend="triton")
        (launch,) = launches
        machine = compiled(launch, 90)
        assert machine.stack == 0, case.name
        assert ("E4M3" in machine.sass) == (case.options.get("dtype") != INT8), case.name
        assert "LDG.E.128" in machine.sass, case.name
