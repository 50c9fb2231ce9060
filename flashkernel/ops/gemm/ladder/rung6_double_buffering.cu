// Rung 6: several tiles in flight, and shared memory without bank conflicts.
//
// Before: load a tile, wait, multiply, wait. Tensor cores were idle during loads, and padding cost shared memory.
// Ideas:
// - Multiple buffers. cp.async copies from global to shared memory without registers and without waiting; while tensor
//   cores work on one tile, the next STAGES - 1 are under way. Turing has no cp.async: there TileCopy loads the next
//   tile into registers and stores it after the products, with STAGES = 2. One barrier per tile is enough: it says that
//   the tile is complete and that all fragments of the tile before, whose buffer the next copy overwrites, are loaded.
// - Swizzle: chunk c of row r lies at c ^ (r % 8) (mma.cuh), so that ldmatrix reads eight rows from all 32 banks.
// - ldmatrix and mma.sync instead of wmma. Fragments are double-buffered in registers: those of the next 16 of K are
//   loaded before the products of the current 16, across the barrier too. A warp computes 64 x 64 outputs.
// Arithmetic intensity of a 128 x 256 tile: 85 FLOP per byte of global memory; 32 of shared memory.
// Bound by: the issue of ldmatrix and mma.sync by the warps. From Hopper on, mma.sync reaches less than two thirds of
// the tensor cores' rate.

#include "mma.cuh"
#include "tiles.cuh"

// Needs K and N to be multiples of 8 (16 bytes): no chunk is then partly outside.
template <typename T, int BLOCK_M, int BLOCK_N, int BLOCK_K, int WARPS_M, int WARPS_N, int STAGES>
__global__ void __launch_bounds__(WARP * WARPS_M * WARPS_N)
    gemm_double_buffering(const T* a, const T* b, T* c, int m, int n, int k, int row_tiles, int column_tiles) {
    constexpr int THREADS = WARP * WARPS_M * WARPS_N;
    constexpr int ROWS = BLOCK_M / WARPS_M / 16, COLUMNS = BLOCK_N / WARPS_N / 16;  // a warp's 16 x 16 tiles
    constexpr unsigned BYTES_A = BLOCK_M * BLOCK_K * 2, BYTES = BYTES_A + BLOCK_K * BLOCK_N * 2;
    static_assert(COLUMNS % 2 == 0, "the epilogue stores 32 columns at a time");
    extern __shared__ __align__(1024) unsigned char shared[];

    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const int warp_row = warp / WARPS_N * ROWS * 16, warp_column = warp % WARPS_N * COLUMNS * 16;
    const TilePosition tile = tile_position(blockIdx.x, row_tiles, column_tiles);
    const int first_row = tile.row * BLOCK_M, first_column = tile.column * BLOCK_N;
    const T* rows = a + Index(first_row) * k;
    const T* columns = b + first_column;
    const unsigned buffers = shared_address(shared);
    TileCopy<BLOCK_M, BLOCK_K, THREADS> copy_a;
    TileCopy<BLOCK_K, BLOCK_N, THREADS> copy_b;

    // Starts the copies of one step of K. Past the end of K they fill in zeros, which are not read.
    auto start = [&](int step) {
        const int inner = step * BLOCK_K;
        const unsigned buffer = buffers + step % STAGES * BYTES;
        copy_a.start(buffer, rows + inner, k, m - first_row, k - inner);
        copy_b.start(buffer + BYTES_A, columns + Index(inner) * n, n, k - inner, n - first_column);
    };
    float acc[ROWS][2 * COLUMNS][4] = {};
    unsigned left[2][ROWS][4], right[2][COLUMNS][4];
    // Fragments of A and B for 16 of K: lane l addresses row l % 16, chunk l / 16 of each 16 x 16 tile.
    auto load = [&](unsigned buffer, int i, unsigned(&frag_a)[ROWS][4], unsigned(&frag_b)[COLUMNS][4]) {
#pragma unroll
        for (int p = 0; p < ROWS; ++p)
            ldmatrix(frag_a[p], buffer + swizzled<BLOCK_K>(warp_row + p * 16 + lane % 16, 2 * i + lane / 16));
#pragma unroll
        for (int q = 0; q < COLUMNS; ++q)
            ldmatrix_transposed(frag_b[q], buffer + BYTES_A + swizzled<BLOCK_N>(
                i * 16 + lane % 16, warp_column / CHUNK + 2 * q + lane / 16));
    };

    // Waits for the copies of a step and returns its buffer. Each step started two groups of copies; those of the
    // STAGES - 2 steps after it may still be under way.
    auto finish = [&](int step) {
        const unsigned buffer = buffers + step % STAGES * BYTES;
        copy_a.template finish<2 * (STAGES - 2)>(buffer);
        copy_b.template finish<2 * (STAGES - 2)>(buffer + BYTES_A);
        __syncthreads();
        return buffer;
    };

    constexpr int PARTS = BLOCK_K / 16;
    static_assert(PARTS % 2 == 0, "each step starts with fragments 0 of the register double buffer");
    const int steps = (k + BLOCK_K - 1) / BLOCK_K;
#pragma unroll
    for (int step = 0; step < STAGES - 1; ++step) start(step);
    unsigned buffer = finish(0);
    load(buffer, 0, left[0], right[0]);
    for (int step = 0; step < steps; ++step) {
#pragma unroll
        for (int i = 0; i < PARTS; ++i) {
            if (i == PARTS - 1) buffer = finish(step + 1);
            load(buffer, (i + 1) % PARTS, left[(i + 1) % 2], right[(i + 1) % 2]);
            if (i == 0) start(step + STAGES - 1);
#pragma unroll
            for (int p = 0; p < ROWS; ++p)
#pragma unroll
                for (int q = 0; q < 2 * COLUMNS; ++q)
                    mma<T>(acc[p][q], left[i % 2][p], right[i % 2][q / 2][q % 2 * 2],
                           right[i % 2][q / 2][q % 2 * 2 + 1]);
        }
    }

#pragma unroll
    for (int p = 0; p < ROWS; ++p)
#pragma unroll
        for (int half = 0; half < 2; ++half) {  // rows lane / 4 and lane / 4 + 8 of a 16 x 16 tile
            const int row = first_row + warp_row + p * 16 + half * 8 + lane / 4;
#pragma unroll
            for (int q = 0; q < 2 * COLUMNS; q += 4) {
                unsigned words[4];
#pragma unroll
                for (int g = 0; g < 4; ++g) words[g] = pack<T>(acc[p][q + g][2 * half], acc[p][q + g][2 * half + 1]);
                const uint4 result = transposed_in_quad(words);
                const int column = first_column + warp_column + (q + lane % 4) * 8;
                if (row < m && column < n) *reinterpret_cast<uint4*>(c + Index(row) * n + column) = result;
            }
        }
}
