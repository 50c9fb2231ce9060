// C [M, N] = epilogue(A [M, K] B [N, K]^T) in tiles of 128 x BLOCK_N, where BLOCK_N is 96, 160, 192 or 224. For sm_90a.
//
// Why: with few rows of A there are few tiles, and what counts is how they fill the SMs. 512 rows of 10,240 columns are
// 160 tiles of 128 x 256 on 132 SMs: two rounds, of which the second is a fifth full. As tiles of 128 x 160 they are 256,
// two rounds that are 97% full. Triton and Gluon have tensors of powers of two only.
//
// How, as in rung 7 of the ladder (ops/gemm/ladder): one thread block for each SM, which computes tile after tile. A
// producer warp loads blocks of 64 columns of A and B by TMA, STAGES ahead; full[stage] says that they arrived,
// empty[stage] that both consumers have read them. Two consumer warpgroups, 64 rows each, multiply by WGMMA, one block
// after the other under way. They store a tile from their registers while the producer loads the next one's blocks.

#include "epilogue.cuh"
#include "hopper_ptx.cuh"
#include "mma.cuh"
#include "tiles.cuh"
#include "wgmma_shared.cuh"

constexpr int BLOCK_M = 128, BLOCK_K = 64, CONSUMER_WARPS = 8, THREADS = WARP * (CONSUMER_WARPS + 1);
constexpr unsigned ROW = 128;             // bytes of a swizzled row: 64 elements
constexpr unsigned GROUP_ROWS = 8 * ROW;  // bytes from eight rows of a swizzled tile to the next

// The maps have boxes of 64 x 128 of A and 64 x BLOCK_N of B. N is a multiple of 8, c's rows begin at 16 bytes.
template <typename T, int BLOCK_N, int STAGES>
__global__ void __launch_bounds__(THREADS, 1)
    matmul_tile_width(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b,
                      const BIAS_TYPE* bias, const RESIDUAL_TYPE* residual, T* c, Index residual_stride, Index c_stride,
                      int m, int n, int k, int row_tiles, int column_tiles) {
    constexpr unsigned BYTES_A = BLOCK_M * ROW, BYTES = BYTES_A + BLOCK_N * ROW;
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned buffers = shared_address(shared), full = buffers + STAGES * BYTES, empty = full + STAGES * 8;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(full + stage * 8, 1);
            mbarrier_init(empty + stage * 8, CONSUMER_WARPS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();

    const int steps = (k + BLOCK_K - 1) / BLOCK_K;
    int stage = 0;
    unsigned parity = 0;  // of the current pass through the stages
    auto advance = [&] {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    };

    if (warp == CONSUMER_WARPS) {  // the producer
        if (lane != 0) return;
        prefetch_tensor_map(map_a);
        prefetch_tensor_map(map_b);
        for (int tile = blockIdx.x; tile < row_tiles * column_tiles; tile += gridDim.x) {
            const TilePosition at = tile_position(tile, row_tiles, column_tiles);
            for (int step = 0; step < steps; ++step, advance()) {
                const unsigned arrived = full + stage * 8, target = buffers + stage * BYTES;
                mbarrier_wait(empty + stage * 8, parity ^ 1);  // returns at once in the first pass
                mbarrier_arrive_expect_bytes(arrived, BYTES);
                tma_load_2d(target, map_a, step * BLOCK_K, at.row * BLOCK_M, arrived);
                tma_load_2d(target + BYTES_A, map_b, step * BLOCK_K, at.column * BLOCK_N, arrived);
            }
        }
        return;
    }

    for (int tile = blockIdx.x; tile < row_tiles * column_tiles; tile += gridDim.x) {
        float acc[BLOCK_N / 2];
        unsigned previous = empty;
        for (int step = 0; step < steps; ++step, advance()) {
            const unsigned buffer = buffers + stage * BYTES;
            const unsigned left = buffer + warp / 4 * 64 * ROW, right = buffer + BYTES_A;
            mbarrier_wait(full + stage * 8, parity);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < BLOCK_K / 16; ++i)  // 16 of K: 32 bytes further in each row
                wgmma_shared(acc, wgmma_descriptor(left + i * 32, ROW, GROUP_ROWS),
                             wgmma_descriptor(right + i * 32, ROW, GROUP_ROWS), step + i > 0, T());
            wgmma_commit();
            wgmma_wait<1>();  // the products of the step before are complete: its blocks may be overwritten
            if (step > 0 && lane == 0) mbarrier_arrive(previous);
            previous = empty + stage * 8;
        }
        wgmma_wait<0>();
        keep_in_registers(acc);
        if (lane == 0) mbarrier_arrive(previous);

        // acc[4 g + 2 half + e] is column 8 g + 2 (lane % 4) + e of row lane / 4 + 8 half of this warp's 16 rows.
        const TilePosition at = tile_position(tile, row_tiles, column_tiles);
        const int first_column = at.column * BLOCK_N, columns = n - first_column;
        const BIAS_TYPE* biases = bias + first_column + lane % 4 * 2;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = at.row * BLOCK_M + warp * 16 + half * 8 + lane / 4;
            // Lanes below C take part in the transposition; they read its last row.
            const RESIDUAL_TYPE* added = residual + (row < m ? row : m - 1) * residual_stride + first_column + lane % 4 * 2;
            T* target = c + row * c_stride + first_column + lane % 4 * 8;
#pragma unroll
            for (int group = 0; group < BLOCK_N / 8; group += 4) {
                unsigned words[4] = {};
#pragma unroll
                for (int g = group; g < group + 4; ++g)
                    if (g * 8 < columns) {  // N is a multiple of 8: all of a group or none
                        float both[2];
#pragma unroll
                        for (int e = 0; e < 2; ++e) {
                            Output output = {acc[4 * g + 2 * half + e], 0.f, biases + g * 8 + e, nullptr,
                                             added + g * 8 + e, false};
                            EPILOGUE
                            both[e] = output.value;
                        }
                        words[g - group] = pack<T>(both[0], both[1]);
                    }
                const uint4 result = transposed_in_quad(words);
                if (row < m && (group + lane % 4) * 8 < columns) *reinterpret_cast<uint4*>(target + group * 8) = result;
            }
        }
    }
}
