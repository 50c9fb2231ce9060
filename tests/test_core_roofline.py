"""Measured ceilings and placement under them."""

from __future__ import annotations

import json
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from flashkernel.core import roofline
from flashkernel.core.roofline import Ceilings, ceilings, point
from flashkernel.core.timing import measure

ROOF = Ceilings("a machine", copy_tbs=4.0, matmul_tflops={"bfloat16": 800.0, "float32": 50.0})


def test_a_memory_bound_computation() -> None:
    found = point(flops=1e9, bytes=4e9, ms=2.0, dtype=torch.bfloat16, ceilings=ROOF)
    assert found.bound == "memory"
    assert found.roof == pytest.approx(0.5)  # 4 GB at 4 TB/s take 1 ms
    assert (found.tflops, found.tbs) == pytest.approx((0.5, 2.0))


def test_a_compute_bound_computation_depends_on_the_dtype() -> None:
    fast = point(flops=8e11, bytes=1e6, ms=2.0, dtype="bfloat16", ceilings=ROOF)
    slow = point(flops=8e11, bytes=1e6, ms=20.0, dtype=torch.float32, ceilings=ROOF)
    assert fast.bound == slow.bound == "compute"
    assert fast.roof == pytest.approx(0.5)
    assert slow.roof == pytest.approx(0.8)


def test_without_operations_no_matmul_ceiling_is_needed() -> None:
    found = point(flops=0, bytes=4e9, ms=1.0, dtype=torch.float16, ceilings=ROOF)
    assert (found.bound, found.tflops) == ("memory", 0.0)
    assert found.roof == pytest.approx(1.0)


def test_what_cannot_be_placed_is_refused() -> None:
    with pytest.raises(ValueError, match="no matmul ceiling was measured for float16"):
        point(1.0, 1.0, 1.0, torch.float16, ROOF)
    with pytest.raises(ValueError, match="ms is 0"):
        point(1.0, 1.0, 0.0, torch.float32, ROOF)
    with pytest.raises(ValueError, match="ms is nan"):
        point(1.0, 1.0, float("nan"), torch.float32, ROOF)
    with pytest.raises(ValueError, match="is no dtype"):
        point(1.0, 1.0, 1.0, "bf17", ROOF)


def test_ceilings_survive_json() -> None:
    assert Ceilings.from_dict(json.loads(json.dumps(ROOF.as_dict()))) == ROOF


def test_cpu_ceilings_are_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_copy_rates", {})
    monkeypatch.setattr(roofline, "_matmul_rates", {})
    monkeypatch.setattr(roofline, "BUDGET_S", 0.1)
    found = ceilings("cpu", ["float32"])
    assert 0 < found.copy_tbs < 10  # other processes make it slower, nothing makes it faster than that
    assert 0 < found.matmul_tflops["float32"] < 100
    assert list(found.matmul_tflops) == ["float32"]
    monkeypatch.setattr(roofline, "measure", None)  # a second measurement would fail
    assert ceilings("cpu", [torch.float32]) == found


def test_cpu_ceilings_are_bytes_and_operations_by_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_copy_rates", {})
    monkeypatch.setattr(roofline, "_matmul_rates", {})
    times = iter([8.0, 0.01, 10.0])  # ms: a copy of 64 MiB, products of 128 and of 1024

    def timed(call: Callable[[], object], **_: object) -> SimpleNamespace:
        call()
        return SimpleNamespace(p50=next(times))

    monkeypatch.setattr(roofline, "measure", timed)
    found = ceilings("cpu", ["float32"])
    assert found.copy_tbs == pytest.approx(2 * 64 * 2**20 / 8e-3 / 1e12)
    assert found.matmul_tflops["float32"] == pytest.approx(max(2 * 128**3 / 1e-5, 2 * 1024**3 / 1e-2) / 1e12)


def test_every_default_dtype_has_a_cpu_ceiling(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(roofline, "_copy_rates", {torch.device("cpu"): 0.02})
    monkeypatch.setattr(roofline, "_matmul_rates", {})
    monkeypatch.setattr(roofline, "BUDGET_S", 0.05)
    found = ceilings("cpu")
    assert set(found.matmul_tflops) == {"bfloat16", "float16", "float32"}
    assert all(rate > 0 for rate in found.matmul_tflops.values())


def test_tf32_is_switched_on_for_its_measurement_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str, torch.dtype]] = []

    def fake(size: int, dtype: torch.dtype, device: torch.device) -> float:
        seen.append((torch.get_float32_matmul_precision(), dtype))
        if len(seen) == 3:
            raise KeyboardInterrupt
        return 1.0

    monkeypatch.setattr(roofline, "_matmul_tflops", fake)
    before = torch.get_float32_matmul_precision()
    roofline._measure_matmul(torch.device("cuda", 0), "tf32")
    with pytest.raises(KeyboardInterrupt):
        roofline._measure_matmul(torch.device("cuda", 0), "float32")
    assert seen == [("high", torch.float32)] * 2 + [("highest", torch.float32)]
    assert torch.get_float32_matmul_precision() == before


@pytest.mark.gpu
@pytest.mark.alone
def test_gpu_ceilings_are_sane() -> None:
    found = ceilings("cuda")
    assert set(found.matmul_tflops) == set(roofline.GPU_DTYPES)
    assert 0.1 < found.copy_tbs < 20
    rates = found.matmul_tflops
    assert rates["bfloat16"] > 0 or torch.cuda.get_device_capability() < (8, 0)
    assert rates["float16"] > 2 * rates["float32"]  # tensor cores against the plain units
    if torch.cuda.get_device_capability() >= (8, 0):
        assert rates["tf32"] > 1.5 * rates["float32"]
        assert rates["bfloat16"] == pytest.approx(rates["float16"], rel=0.25)
    source = torch.randn(1 << 28, device="cuda")
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), device="cuda", mode="events")
    assert point(0, 2 * source.nbytes, copy.p50, torch.float32, found).roof == pytest.approx(1.0, rel=0.1)


@pytest.mark.gpu
@pytest.mark.alone
def test_h200_reaches_its_known_rates() -> None:
    if "H200" not in torch.cuda.get_device_name():
        pytest.skip("these bounds are the NVIDIA H200's")
    found = ceilings("cuda")
    assert 3.8 < found.copy_tbs < 4.8
    assert 550 < found.matmul_tflops["bfloat16"] < 990
