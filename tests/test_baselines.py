"""Baselines of the benchmark: each computes what the operator does, with cuBLAS's settings that the kernels have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from flashkernel.blocks.fp8 import FP8, cublas_block_scales, expand_scales
from flashkernel.core.op import Case, Op, resolve
from flashkernel.ops import registry


def _scaled_mm(
    a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, out_dtype: Any, use_fast_accum: bool = False
) -> Tensor:
    """What cuBLAS computes on sm_90, with its rules for the layouts of scales."""
    (m, k), n = a.shape, b.shape[1]
    assert a.dtype == b.dtype == FP8
    assert a.stride(1) == b.stride(0) == 1
    blocks = a_scale.shape == (m, -(-k // 128)) and b_scale.shape == (-(-k // 128), -(-n // 128)) and k > 128
    if blocks:
        assert a_scale.stride() == (1, m), "scales of 1 x 128 lie along M"
        assert b_scale.stride(0) == 1, "scales of 128 x 128 lie along K"
        assert b_scale.stride(1) % 4 == 0, "rows of scales start at multiples of 16 bytes"
        assert not use_fast_accum
        a_scale, b_scale = expand_scales(a_scale, (1, 128), (m, k)), expand_scales(b_scale, (128, 128), (k, n))
    else:
        assert use_fast_accum, "the kernels keep their sums in the tensor cores"
        assert a_scale.is_contiguous()
        assert b_scale.is_contiguous()
        assert (a_scale.numel() == b_scale.numel() == 1) or (a_scale.shape, b_scale.shape) == ((m, 1), (1, n))
    return ((a.float() * a_scale) @ (b.float() * b_scale)).to(out_dtype)


def _cases() -> list[Any]:
    return [
        pytest.param(op, case, id=case.name)
        for op in (registry()["matmul"], registry()["linear"])
        for case in op.benches
        if case.name.startswith("fp8-") and ("8192" in case.name or "down-4096" in case.name)
    ]


@pytest.mark.parametrize(("op", "case"), _cases())
def test_cublas_in_fp8(op: Op, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "_scaled_mm", _scaled_mm)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    small = case.at(**case.check_axes)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    inputs = op.make_inputs(small, torch.bfloat16)
    found = resolve(op.baselines[0].target)(op, case)(**inputs, **case.options)
    monkeypatch.undo()
    expected = op.plain(**op.make_inputs(small, torch.bfloat16), **case.options)
    assert op.baselines[0].name == "eager"
    torch.testing.assert_close(found, expected, atol=0.03 * expected.abs().max().item(), rtol=0.05)


def test_block_scales_need_cublas_of_cuda_12_9(monkeypatch: pytest.MonkeyPatch) -> None:
    matmul = registry()["matmul"]
    case = next(case for case in matmul.benches if case.name.startswith("fp8-block"))
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with pytest.raises(ValueError, match=r"from CUDA 12.9 on; this torch has CUDA 12.8"):
        resolve(matmul.baselines[0].target)(matmul, case)


def test_block_scales_are_laid_out_as_cublas_reads_them() -> None:
    a_scale, b_scale = torch.rand(5, 6), torch.rand(6, 3)
    left, right = cublas_block_scales(a_scale, b_scale)
    assert torch.equal(left, a_scale)
    assert torch.equal(right, b_scale)
    assert left.stride() == (1, 5)
    assert right.stride() == (1, 8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["w4a16-4096x6144-16", "fp8-4096x6144-16", "mxfp4-4096x28672-16"])
def test_the_dequantized_weight_has_the_dtype_of_x(name: str, dtype: torch.dtype) -> None:
    quantized = registry()["quantized_linear"]
    case = next(case for case in quantized.benches if case.name == name)
    small = case.at(**case.check_axes)
    inputs = quantized.make_inputs(small, dtype)
    baseline = next(one for one in quantized.baselines if one.name == "cublas")
    found = resolve(baseline.target)(quantized, small)(**inputs, **small.options)
    expected = quantized.plain(**quantized.make_inputs(small, torch.float64), **small.options)
    assert found.dtype == dtype
    torch.testing.assert_close(found.double(), expected.double(), atol=0.05 * expected.abs().max().item(), rtol=0.05)
