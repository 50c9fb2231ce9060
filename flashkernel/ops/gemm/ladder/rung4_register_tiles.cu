// Rung 4: a tile in the registers of each thread, and vector loads.
//
// Before: two loads from shared memory for each multiply-add.
// Idea: a thread computes 8 x 8 outputs. For each i of K it loads 8 elements of A's column and 8 of B's row into
// registers and forms their outer product: 16 loads for 64 multiply-adds, and as vectors of four only 4 instructions.
// The block of 256 threads covers 128 x 128 outputs. Global memory is read 16 bytes per instruction as well.
// Arithmetic intensity: 2 * 128^2 * 16 FLOP for 2 * 128 * 16 elements, 64 FLOP per byte of global memory in float16.
// Bound by: the float32 multiply-add units (67 TFLOP/s on an H100 or H200), where it comes close to their rate.
//
// Tiles are float32 in shared memory, so that elements are converted once and not at each use. A is stored transposed:
// a thread reads 8 rows of one column, which then lie side by side.

#include "elements.cuh"

constexpr int BLOCK = 128, BLOCK_K = 16, THREADS = 256;
constexpr int PAD = 4;  // shifts the rows of the transposed tile to other banks, and keeps them 16-byte aligned

// Needs K and N to be multiples of VECTOR: no vector is then partly outside.
template <typename T>
__global__ void __launch_bounds__(THREADS) gemm_register_tiles(const T* a, const T* b, T* c, int m, int n, int k) {
    constexpr int VECTOR = 16 / sizeof(T), VECTORS = BLOCK * BLOCK_K / VECTOR / THREADS;
    __shared__ __align__(16) float tile_a[BLOCK_K][BLOCK + PAD], tile_b[BLOCK_K][BLOCK];
    const int thread = threadIdx.x, x = thread % 16, y = thread / 16;
    const int first_row = blockIdx.x * BLOCK, first_column = blockIdx.y * BLOCK;
    float sum[8][8] = {};

    for (int start = 0; start < k; start += BLOCK_K) {
#pragma unroll
        for (int i = 0; i < VECTORS; ++i) {
            const int index = (thread + i * THREADS) * VECTOR;
            const int row = index / BLOCK_K, inner = index % BLOCK_K;       // in the tile of A
            const int inner_b = index / BLOCK, column = index % BLOCK;      // in the tile of B
            Elements<T, VECTOR> from_a{}, from_b{};
            if (first_row + row < m && start + inner < k) from_a.load(a + Index(first_row + row) * k + start + inner);
            if (start + inner_b < k && first_column + column < n)
                from_b.load(b + Index(start + inner_b) * n + first_column + column);
#pragma unroll
            for (int j = 0; j < VECTOR; ++j) {
                tile_a[inner + j][row] = from_a.get(j);
                tile_b[inner_b][column + j] = from_b.get(j);
            }
        }
        __syncthreads();
#pragma unroll
        for (int i = 0; i < BLOCK_K; ++i) {
            // Rows 4 y to 4 y + 3 and the same + 64, so for columns: neighboring threads read neighboring vectors.
            __align__(16) float left[8], right[8];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                reinterpret_cast<float4*>(left)[half] = *reinterpret_cast<float4*>(&tile_a[i][half * 64 + 4 * y]);
                reinterpret_cast<float4*>(right)[half] = *reinterpret_cast<float4*>(&tile_b[i][half * 64 + 4 * x]);
            }
#pragma unroll
            for (int p = 0; p < 8; ++p)
#pragma unroll
                for (int q = 0; q < 8; ++q) sum[p][q] += left[p] * right[q];
        }
        __syncthreads();
    }
#pragma unroll
    for (int p = 0; p < 8; ++p) {
        const int row = first_row + p / 4 * 64 + 4 * y + p % 4;
#pragma unroll
        for (int q = 0; q < 8; ++q) {
            const int column = first_column + q / 4 * 64 + 4 * x + q % 4;
            if (row < m && column < n) assign(c[Index(row) * n + column], sum[p][q]);
        }
    }
}
