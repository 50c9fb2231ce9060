"""Eager calls stay cheap: what the public function costs the host beyond the launcher it must call."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
import torch

import flashkernel as fk
from flashkernel.ops.norm import triton as norm_kernels

WRAPPER_SHARE = 0.3  # of the bare launcher's time: hosts differ in speed


def _host_us(call: Callable[[], object], count: int = 300) -> float:
    """Least host time of a call over several rounds, in microseconds; the device is drained between rounds."""
    rounds = []
    for _ in range(7):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        rounds.append((time.perf_counter() - start) / count * 1e6)
    return min(rounds)


@pytest.mark.gpu
@pytest.mark.alone
def test_the_wrapper_costs_little() -> None:
    x, weight = torch.randn(16, 1024, device="cuda"), torch.randn(1024, device="cuda")
    with torch.no_grad():
        bare = _host_us(lambda: norm_kernels.forward(x, weight, None, None, 1e-6, 0.0, True, x.shape))
        whole = _host_us(lambda: fk.rms_norm(x, weight))
    print(f"launcher {bare:.1f} us, public function {whole:.1f} us")
    assert whole - bare < WRAPPER_SHARE * bare, f"the wrapper adds {whole - bare:.1f} us to a launch of {bare:.1f} us"
