// Tensor-core tiles from Turing up: swizzled shared memory, 16-byte copies into it, accumulators.
//
// A tile is [rows][DIM] of 16-bit elements in shared memory. ldmatrix reads eight rows of 16 bytes at a time; in a plain
// row-major tile those eight chunks would lie in the same four banks. Chunk c of row r is therefore stored at chunk
// c ^ (r % 8): any eight consecutive rows then cover all 32 banks. Rows of 32 elements have four chunks, and two of them
// share the 128 bytes of the banks: there it is c ^ (r / 2 % 4).

#pragma once

#include "ptx.cuh"

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int CHUNK = 8;  // 16-bit elements in 16 bytes: one lane's share of an ldmatrix row, one vector load

// Byte offset of chunk `chunk` of row `row` in a swizzled tile.
template <int DIM>
__device__ inline unsigned swizzled(int row, int chunk) {
    static_assert(DIM == 32 || DIM % 64 == 0, "a row has four chunks, or a multiple of eight");
    return static_cast<unsigned>(row * DIM * 2 + ((chunk ^ (DIM == 32 ? (row >> 1) & 3 : row & 7)) << 4));
}

// c [16 x 8, float32] += a [16 x 16] b [16 x 8], of elements T.
template <typename T>
__device__ inline void mma(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    mma_m16n8k16(c, a, b0, b1, T());
}

// Two float32 as one register of two T.
template <typename T>
__device__ inline unsigned pack(float low, float high);
template <>
__device__ inline unsigned pack<__half>(float low, float high) {
    const __half2 both = __floats2half2_rn(low, high);
    return reinterpret_cast<const unsigned&>(both);
}
template <>
__device__ inline unsigned pack<__nv_bfloat16>(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return reinterpret_cast<const unsigned&>(both);
}

// Operand A of 16 columns of accumulators, `step` * 16 on: two 8-column tiles of float32 are one operand of T.
template <typename T, int MT, int NT>
__device__ inline void pack_operand(unsigned (&a)[MT][4], const float (&c)[MT][NT][4], int step) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float* tile = c[m][2 * step + i / 2];
            a[m][i] = pack<T>(tile[2 * (i % 2)], tile[2 * (i % 2) + 1]);
        }
}

// One tile of ROWS x DIM elements from global to shared memory, by THREADS threads, in two halves: `start` issues the
// loads and `finish` makes them visible to this thread; __syncthreads() then makes them visible to all. From sm_80 on the
// copies bypass the registers (cp.async); before, `start` loads into registers and `finish` stores them, so that the
// loads are under way while the tensor cores work on the tile before.
template <int ROWS, int DIM, int THREADS>
struct TileCopy {
    static constexpr int CHUNKS_PER_ROW = DIM / CHUNK;
    static constexpr int COUNT = ROWS * CHUNKS_PER_ROW / THREADS;
    static_assert(ROWS * CHUNKS_PER_ROW % THREADS == 0, "every thread copies the same number of chunks");
#if !SM80
    uint4 held[COUNT];
#endif

    // This thread's chunks: one column of chunks, every STEP-th row of it.
    static constexpr int STEP = THREADS / CHUNKS_PER_ROW;
    static_assert(THREADS % CHUNKS_PER_ROW == 0, "a thread stays in its column of chunks");

    __device__ static inline unsigned target(unsigned tile, int thread, int i) {
        const int row = thread / CHUNKS_PER_ROW, chunk = thread % CHUNKS_PER_ROW;
        if (STEP % 8 == 0)  // the swizzle does not depend on i
            return tile + swizzled<DIM>(row, chunk) + i * STEP * DIM * 2;
        return tile + swizzled<DIM>(row + i * STEP, chunk);
    }

    // Rows from `rows` on and columns from `dim` on become zero. `stride` is in elements.
    template <typename T>
    __device__ inline void start(unsigned tile, const T* source, int stride, int rows, int dim) {
        const int thread = reread_thread_index();
        const int row = thread / CHUNKS_PER_ROW, column = thread % CHUNKS_PER_ROW * CHUNK;
        const T* from = source + row * stride + column;
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const bool inside = column < dim && row + i * STEP < rows;
#if SM80
            cp_async_16(target(tile, thread, i), from, inside);
#else
            held[i] = inside ? *reinterpret_cast<const uint4*>(from) : make_uint4(0, 0, 0, 0);
#endif
            from += STEP * stride;
        }
#if SM80
        cp_async_commit();
#endif
    }

    // `PENDING`: how many tiles started later may still be under way.
    template <int PENDING = 0>
    __device__ inline void finish(unsigned tile) {
#if SM80
        cp_async_wait<PENDING>();
#else
        const int thread = reread_thread_index();
#pragma unroll
        for (int i = 0; i < COUNT; ++i) store_shared(target(tile, thread, i), held[i]);
#endif
    }
};

// Over the four lanes that hold a row of an mma accumulator.
__device__ inline float row_max_of(float value) {
    value = fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 1));
    return fmaxf(value, __shfl_xor_sync(ALL_LANES, value, 2));
}
__device__ inline float row_sum_of(float value) {
    value += __shfl_xor_sync(ALL_LANES, value, 1);
    return value + __shfl_xor_sync(ALL_LANES, value, 2);
}
