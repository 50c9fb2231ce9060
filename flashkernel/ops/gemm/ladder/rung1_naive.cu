// Rung 1: one thread computes one element of C [M, N] = A [M, K] B [K, N], all row-major.
//
// Idea: the definition. c[row][column] = sum over i of a[row][i] * b[i][column].
// Arithmetic intensity: 2 FLOP for 2 elements loaded, 0.5 FLOP per byte in float16; the caches see every load.
// Bound by: loads. Threads of a warp differ in their row. Their 32 loads of A, and their 32 stores, touch 32 different
// cache lines, and each instruction takes as long as 32.

#include "elements.cuh"

template <typename T>
__global__ void gemm_naive(const T* a, const T* b, T* c, int m, int n, int k) {
    const int row = blockIdx.x * blockDim.x + threadIdx.x;
    const int column = blockIdx.y * blockDim.y + threadIdx.y;
    if (row >= m || column >= n) return;
    float sum = 0.f;
    for (int i = 0; i < k; ++i) sum += to_float(a[Index(row) * k + i]) * to_float(b[Index(i) * n + column]);
    assign(c[Index(row) * n + column], sum);
}
