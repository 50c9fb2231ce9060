"""A CUDA C++ file with its header, in a folder and with a cache of the test's own."""

from __future__ import annotations

from pathlib import Path

import pytest

from flashkernel.core import nvrtc

needs_nvrtc = pytest.mark.skipif(nvrtc.can_compile() is not None, reason=str(nvrtc.can_compile()))

HEADER = """
#pragma once
template <typename T> __device__ float widen(T value) { return static_cast<float>(value); }
"""

SOURCE = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
#include "widen.cuh"

#ifndef FACTOR
#define FACTOR 1
#endif

// out[row] = FACTOR * sum of x[row, :]
template <typename T>
__global__ void row_sum(const T* x, float* out, int width) {
    __shared__ float partial[32];
    float sum = 0.f;
    for (int column = threadIdx.x; column < width; column += blockDim.x)
        sum += widen(x[static_cast<long long>(blockIdx.x) * width + column]);
    for (int offset = 16; offset > 0; offset /= 2) sum += __shfl_down_sync(~0u, sum, offset);
    if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        float total = 0.f;
        for (int warp = 0; warp < blockDim.x / 32; ++warp) total += partial[warp];
        out[blockIdx.x] = FACTOR * total;
    }
}

extern "C" __global__ void fill(float* out, float value, long long count, bool on) {
    long long index = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x;
    if (on && out != nullptr && index < count) out[index] = value;
}

// Reverses a block of values through dynamic shared memory.
extern "C" __global__ void reverse(float* values, int count) {
    extern __shared__ float stage[];
    for (int index = threadIdx.x; index < count; index += blockDim.x) stage[index] = values[index];
    __syncthreads();
    for (int index = threadIdx.x; index < count; index += blockDim.x) values[index] = stage[count - 1 - index];
}
"""
ROW_SUM = "pointer, pointer, int32"
FILL = "pointer, float32, int64, bool"


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHKERNEL_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(name="source")
def source_fixture(tmp_path: Path) -> Path:
    (tmp_path / "widen.cuh").write_text(HEADER)
    path = tmp_path / "kernel.cu"
    path.write_text(SOURCE)
    return path
