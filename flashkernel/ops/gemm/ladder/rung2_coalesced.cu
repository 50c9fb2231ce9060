// Rung 2: the threads of a warp take neighboring columns.
//
// Before: neighboring threads were neighboring rows, and each load of A touched 32 cache lines.
// Idea: threadIdx.x is the column. The warp reads 32 consecutive elements of B with one or two cache lines (a coalesced
// load), its element of A is the same for all lanes (a broadcast), and it writes 32 consecutive elements of C.
// Arithmetic intensity: still 0.5 FLOP per byte that a thread loads in float16, but the two loads of a warp now fetch 2
// cache lines instead of 33.
// Bound by: the rate at which the load units and the L1 cache serve two loads for each multiply-add.

#include "elements.cuh"

template <typename T>
__global__ void gemm_coalesced(const T* a, const T* b, T* c, int m, int n, int k) {
    const int row = blockIdx.x * blockDim.y + threadIdx.y;
    const int column = blockIdx.y * blockDim.x + threadIdx.x;
    if (row >= m || column >= n) return;
    float sum = 0.f;
    for (int i = 0; i < k; ++i) sum += to_float(a[Index(row) * k + i]) * to_float(b[Index(i) * n + column]);
    assign(c[Index(row) * n + column], sum);
}
