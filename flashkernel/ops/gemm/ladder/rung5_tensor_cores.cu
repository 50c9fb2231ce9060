// Rung 5: tensor cores, through the wmma functions of CUDA C++.
//
// Before: the float32 units were busy. No arrangement of loads makes them faster.
// Idea: tensor cores multiply 16 x 16 x 16 tiles of 16-bit elements and add in float32. A warp holds a tile as a
// "fragment", spread over its lanes: load_matrix_sync reads one from shared memory, mma_sync multiplies. Here a block
// of eight warps computes 128 x 128 outputs, a warp 64 x 32: 4 x 2 fragments of sums.
// Arithmetic intensity: 64 FLOP per byte of global memory as before; from shared memory a warp loads 6 fragments for 8
// products: 21 FLOP per byte.
// Bound by: latency. The block loads, waits, multiplies, waits: while it loads, its tensor cores are idle.

#include <mma.h>

#include "elements.cuh"

using namespace nvcuda;

constexpr int BLOCK = 128, BLOCK_K = 32, WARPS = 8, THREADS = 32 * WARPS, FRAGMENT = 16;
constexpr int VECTOR = 8;  // 16-bit elements in 16 bytes
constexpr int PAD = 8;     // rows of a tile start at different banks, so that a fragment's rows can be read at once

// Needs K and N to be multiples of VECTOR: no vector is then partly outside.
template <typename T>
__global__ void __launch_bounds__(THREADS) gemm_tensor_cores(const T* a, const T* b, T* c, int m, int n, int k) {
    __shared__ __align__(128) T tile_a[BLOCK][BLOCK_K + PAD], tile_b[BLOCK_K][BLOCK + PAD];
    __shared__ __align__(128) float staged[WARPS][FRAGMENT][FRAGMENT];
    const int thread = threadIdx.x, warp = thread / 32, lane = thread % 32;
    const int warp_row = warp / 4 * 64, warp_column = warp % 4 * 32;
    const int first_row = blockIdx.x * BLOCK, first_column = blockIdx.y * BLOCK;

    wmma::fragment<wmma::accumulator, FRAGMENT, FRAGMENT, FRAGMENT, float> sum[4][2];
#pragma unroll
    for (int p = 0; p < 4; ++p)
#pragma unroll
        for (int q = 0; q < 2; ++q) wmma::fill_fragment(sum[p][q], 0.f);

    for (int start = 0; start < k; start += BLOCK_K) {
#pragma unroll
        for (int i = 0; i < BLOCK * BLOCK_K / VECTOR / THREADS; ++i) {
            const int index = (thread + i * THREADS) * VECTOR;
            const int row = index / BLOCK_K, inner = index % BLOCK_K;
            const int inner_b = index / BLOCK, column = index % BLOCK;
            Elements<T, VECTOR> from_a{}, from_b{};
            if (first_row + row < m && start + inner < k) from_a.load(a + Index(first_row + row) * k + start + inner);
            if (start + inner_b < k && first_column + column < n)
                from_b.load(b + Index(start + inner_b) * n + first_column + column);
            from_a.store(&tile_a[row][inner]);
            from_b.store(&tile_b[inner_b][column]);
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < BLOCK_K; i += FRAGMENT) {
            wmma::fragment<wmma::matrix_a, FRAGMENT, FRAGMENT, FRAGMENT, T, wmma::row_major> left[4];
            wmma::fragment<wmma::matrix_b, FRAGMENT, FRAGMENT, FRAGMENT, T, wmma::row_major> right[2];
#pragma unroll
            for (int p = 0; p < 4; ++p)
                wmma::load_matrix_sync(left[p], &tile_a[warp_row + p * FRAGMENT][i], BLOCK_K + PAD);
#pragma unroll
            for (int q = 0; q < 2; ++q)
                wmma::load_matrix_sync(right[q], &tile_b[i][warp_column + q * FRAGMENT], BLOCK + PAD);
#pragma unroll
            for (int p = 0; p < 4; ++p)
#pragma unroll
                for (int q = 0; q < 2; ++q) wmma::mma_sync(sum[p][q], left[p], right[q], sum[p][q]);
        }
        __syncthreads();
    }

    // Which lane holds which element of a fragment is not defined: the sums go through shared memory. Two lanes then
    // write a row of 16 elements, 8 each.
#pragma unroll
    for (int p = 0; p < 4; ++p)
#pragma unroll
        for (int q = 0; q < 2; ++q) {
            wmma::store_matrix_sync(&staged[warp][0][0], sum[p][q], FRAGMENT, wmma::mem_row_major);
            __syncwarp();
            const int row = first_row + warp_row + p * FRAGMENT + lane / 2;
            const int column = first_column + warp_column + q * FRAGMENT + lane % 2 * VECTOR;
            Elements<T, VECTOR> result{};
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) result.set(j, staged[warp][lane / 2][lane % 2 * VECTOR + j]);
            if (row < m && column < n) result.store(c + Index(row) * n + column);
            __syncwarp();
        }
}
