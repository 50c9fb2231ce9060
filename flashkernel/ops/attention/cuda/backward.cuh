// What the three kernels of the backward pass agree on: who computes which part of dQ, and where its float32 sum lies.

#pragma once

#include "mma.cuh"

// dQ of a block of queries, [BLOCK_M][HEAD_DIM], over the warps of a block: ROWS queries and 8 NT columns each.
template <int HEAD_DIM, int BLOCK_M, int WARPS>
struct DqTiles {
    // 32 rows let two mma instructions share an operand of K; 16 where the warps would have no columns left.
    static constexpr int ROWS = (BLOCK_M / 32) * (HEAD_DIM / 16) >= WARPS ? 32 : 16;
    static constexpr int ROW_WARPS = BLOCK_M / ROWS;
    static constexpr int COLUMN_WARPS = WARPS / ROW_WARPS;
    static constexpr int MT = ROWS / 16;                    // 16-row tiles of a warp
    static constexpr int NT = HEAD_DIM / COLUMN_WARPS / 8;  // 8-column tiles of a warp
    static constexpr int SIZE = BLOCK_M * HEAD_DIM;         // elements of a block
    static_assert(BLOCK_M % ROWS == 0 && WARPS % ROW_WARPS == 0 && NT % 2 == 0, "pairs of whole mma tiles");

    __device__ static inline int first_row(int warp) { return warp % ROW_WARPS * ROWS; }
    __device__ static inline int first_chunk(int warp) { return warp / ROW_WARPS * NT; }

    // The sum is kept in the order of the accumulators: mma tile after mma tile, 128 elements each. Only the
    // postprocess kernel reads it, so that the lanes of a warp may add to neighboring addresses.
    __device__ static inline float* tile(float* block, int warp, int m, int n) {
        return block + ((warp * MT + m) * NT + n) * 4 * WARP;
    }
};

// Element i of lane `lane` in a 16 x 8 accumulator tile of the sum. From sm_90 on a lane adds 16 bytes at once.
__device__ inline int sum_index(int i, int lane) {
#if SM90
    return lane * 4 + i;
#else
    return i * WARP + lane;
#endif
}

__device__ inline void add_to_sum(float* tile, const float (&values)[4], int lane) {
#if SM90
    atomic_add_4(tile + sum_index(0, lane), values);
#else
#pragma unroll
    for (int i = 0; i < 4; ++i) atomicAdd(tile + sum_index(i, lane), values[i]);
#endif
}

// The address that lane l passes to ldmatrix for the 16 x 16 block at (row, 8 chunk) of a tile; `chunk` is even.
// Matrices 0 and 1 below one another, 2 and 3 to their right: operand A, or operand B from a tile [k][n], transposed.
template <int DIM>
__device__ inline unsigned down_then_right(unsigned tile, int row, int chunk, int lane) {
    return tile + swizzled<DIM>(row + (lane / 8 & 1) * 8 + lane % 8, chunk + lane / 16);
}
// Matrices 0 and 1 beside one another, 2 and 3 below them: operand B from a tile [n][k], or operand A from one [k][m],
// transposed.
template <int DIM>
__device__ inline unsigned right_then_down(unsigned tile, int row, int chunk, int lane) {
    return tile + swizzled<DIM>(row + lane / 16 * 8 + lane % 8, chunk + (lane / 8 & 1));
}

// A tile of accumulators, packed as 16-bit, to rows `row` on and chunks `chunk` on of a tile in shared memory: register
// i of a 16 x 16 block holds row (i % 2) * 8 + lane / 4 and columns (i / 2) * 8 + lane % 4 * 2, + 1. `chunk` is a
// multiple of 2 KT: to move by chunks is an exclusive or with a constant.
template <int DIM, int MT, int KT>
__device__ inline void store_blocks(unsigned tile, const unsigned (&packed)[MT][KT][4], int row, int chunk, int lane) {
    const unsigned first = tile + swizzled<DIM>(row + lane / 4, chunk) + lane % 4 * 4;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int k = 0; k < KT; ++k)
#pragma unroll
            for (int i = 0; i < 4; ++i)
                store_shared((first ^ ((k * 2 + i / 2) * 16)) + (m * 16 + i % 2 * 8) * DIM * 2, packed[m][k][i]);
}

__device__ inline void copy(unsigned (&to)[4], const unsigned (&from)[4]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) to[i] = from[i];
}

// Two neighboring 16 x 8 accumulators, times `scale`, as a 16 x 16 block of 16-bit elements.
template <typename T>
__device__ inline void pack_block(unsigned (&block)[4], const float (&left)[4], const float (&right)[4], float scale) {
    block[0] = pack<T>(left[0] * scale, left[1] * scale), block[1] = pack<T>(left[2] * scale, left[3] * scale);
    block[2] = pack<T>(right[0] * scale, right[1] * scale), block[3] = pack<T>(right[2] * scale, right[3] * scale);
}

// Accumulators of [16 MT][8 NT], times `scale`, to rows `row` on and chunks `chunk` on of a tile in shared memory.
template <typename T, int DIM, int MT, int NT>
__device__ inline void store_accumulators(
    unsigned tile, const float (&c)[MT][NT][4], int row, int chunk, float scale, int lane) {
    unsigned packed[MT][NT / 2][4];
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < NT; n += 2) pack_block<T>(packed[m][n / 2], c[m][n], c[m][n + 1], scale);
    store_blocks<DIM>(tile, packed, row, chunk, lane);
}

// A tile of shared memory to device memory by 16-byte stores: `rows` rows of `dim` elements, `stride` elements apart.
template <typename T, int ROWS, int DIM, int THREADS>
__device__ inline void store_tile(T* target, long long stride, unsigned tile, int rows, int dim) {
    constexpr int CHUNKS = DIM / CHUNK;
#pragma unroll
    for (int index = threadIdx.x; index < ROWS * CHUNKS; index += THREADS) {
        const int row = index / CHUNKS, chunk = index % CHUNKS;
        if (row < rows && chunk * CHUNK < dim)
            *reinterpret_cast<uint4*>(target + row * stride + chunk * CHUNK) =
                load_shared_16(tile + swizzled<DIM>(row, chunk));
    }
}
