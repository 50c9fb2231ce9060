// Rung 3: tiles in shared memory.
//
// Before: every thread loaded its whole row of A and column of B, which its neighbors loaded as well: 32 x 32 outputs
// ask the caches for each element 32 times.
// Idea: the block copies a 32 x 32 tile of A and one of B into shared memory, each thread one element of each, and all
// threads read them there. Then comes the next 32 of K. Two barriers per tile: one before it is read, one after.
// Arithmetic intensity: 2 * 32^3 FLOP for 2 * 32^2 elements, 16 FLOP per byte of global memory in float16.
// Bound by: shared memory. A multiply-add still needs two loads from it, of A (a broadcast) and of B.

#include "elements.cuh"

constexpr int TILE = 32;

template <typename T>
__global__ void gemm_shared_tiles(const T* a, const T* b, T* c, int m, int n, int k) {
    __shared__ T tile_a[TILE][TILE], tile_b[TILE][TILE];
    const int x = threadIdx.x, y = threadIdx.y;
    const int row = blockIdx.x * TILE + y, column = blockIdx.y * TILE + x;
    float sum = 0.f;
    for (int start = 0; start < k; start += TILE) {
        // Elements outside become zeros, which add nothing to the sum.
        const bool inside_a = row < m && start + x < k, inside_b = start + y < k && column < n;
        if (inside_a) tile_a[y][x] = a[Index(row) * k + start + x];
        else assign(tile_a[y][x], 0.f);
        if (inside_b) tile_b[y][x] = b[Index(start + y) * n + column];
        else assign(tile_b[y][x], 0.f);
        __syncthreads();  // the tile is complete
#pragma unroll
        for (int i = 0; i < TILE; ++i) sum += to_float(tile_a[y][i]) * to_float(tile_b[i][x]);
        __syncthreads();  // all threads have read it; the next one may overwrite it
    }
    if (row < m && column < n) assign(c[Index(row) * n + column], sum);
}
