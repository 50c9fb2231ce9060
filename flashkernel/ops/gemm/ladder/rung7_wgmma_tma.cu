// Rung 7: warpgroup products (wgmma) on tiles that TMA brings. For sm_90a.
//
// Before: warps spent their issue slots on ldmatrix, mma.sync and copy addresses, and mma.sync does not reach the rate
// of Hopper's tensor cores.
// Ideas:
// - wgmma: four warps (a warpgroup) start a product of 64 x 256 x 16 whose operands stay in shared memory. One
//   instruction replaces 128 mma.sync and all ldmatrix, and it runs asynchronously.
// - TMA: one thread asks for a whole tile. The hardware computes addresses, swizzles, fills zeros outside the matrix
//   and reports the bytes to an mbarrier.
// - Warp specialization: a producer warp keeps STAGES tiles in flight; two consumer warpgroups, 64 rows each, multiply.
//   full[stage] says that a tile arrived, empty[stage] that all consumers have read it. No __syncthreads() in the loop.
// - Persistent blocks: one per SM, which computes tile after tile. The producer loads the next output tile's operands
//   while the consumers store the current one.
// Arithmetic intensity of a 128 x 256 tile: 85 FLOP per byte of L2; the tile order (tiles.cuh) keeps most reads there.
// Bound by: the tensor cores, and at this rate the power that the GPU may take.

#include "hopper_ptx.cuh"
#include "mma.cuh"
#include "tiles.cuh"

constexpr int BLOCK_M = 128, BLOCK_N = 256, BLOCK_K = 64, STAGES = 4, CONSUMER_WARPS = 8;
constexpr int THREADS = WARP * (CONSUMER_WARPS + 1);
constexpr unsigned ROW = 128;                  // bytes of a swizzled row: 64 elements
constexpr unsigned BOX_B = BLOCK_K * ROW;      // B comes in boxes of 64 columns
constexpr unsigned BYTES_A = BLOCK_M * ROW, BYTES_B = BLOCK_N / 64 * BOX_B, BYTES = BYTES_A + BYTES_B;

// The maps have boxes of 64 x 128 of A [M, K] and 64 x 64 of B [K, N]; K and N are multiples of 8 (TMA's 16 bytes).
template <typename T>
__global__ void __launch_bounds__(THREADS)
    gemm_wgmma_tma(const __grid_constant__ TensorMap map_a, const __grid_constant__ TensorMap map_b, T* c, int m, int n,
                   int k, int row_tiles, int column_tiles) {
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
#pragma unroll
                for (int box = 0; box < BLOCK_N / 64; ++box)
                    tma_load_2d(target + BYTES_A + box * BOX_B, map_b, at.column * BLOCK_N + box * 64, step * BLOCK_K,
                                arrived);
            }
        }
        return;
    }

    const int warp_row = warp * 16;  // warps 0 to 3 are the first warpgroup: rows 0 to 63
    for (int tile = blockIdx.x; tile < row_tiles * column_tiles; tile += gridDim.x) {
        float acc[128];
        unsigned previous = empty;
        for (int step = 0; step < steps; ++step, advance()) {
            const unsigned buffer = buffers + stage * BYTES;
            const unsigned left = buffer + warp / 4 * 64 * ROW, right = buffer + BYTES_A;
            mbarrier_wait(full + stage * 8, parity);
            wgmma_fence();
#pragma unroll
            for (int i = 0; i < BLOCK_K / 16; ++i)  // 16 of K: 32 bytes further in a row of A, 16 rows further in B
                wgmma_m64n256k16(acc, wgmma_descriptor(left + i * 32, ROW, 8 * ROW),
                                 wgmma_descriptor(right + i * 16 * ROW, BOX_B, 8 * ROW), step + i > 0, T());
            wgmma_commit();
            wgmma_wait<1>();  // the products of the step before are complete: its tile may be overwritten
            if (step > 0 && lane == 0) mbarrier_arrive(previous);
            previous = empty + stage * 8;
        }
        wgmma_wait<0>();
        keep_in_registers(acc);
        if (lane == 0) mbarrier_arrive(previous);

        // acc[4 g + 2 half + j] is column 8 g + 2 (lane % 4) + j of row lane / 4 + 8 half.
        const TilePosition at = tile_position(tile, row_tiles, column_tiles);
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = at.row * BLOCK_M + warp_row + half * 8 + lane / 4;
#pragma unroll
            for (int group = 0; group < BLOCK_N / 8; group += 4) {
                unsigned words[4];
#pragma unroll
                for (int g = 0; g < 4; ++g)
                    words[g] = pack<T>(acc[4 * (group + g) + 2 * half], acc[4 * (group + g) + 2 * half + 1]);
                const uint4 result = transposed_in_quad(words);
                const int column = at.column * BLOCK_N + (group + lane % 4) * 8;
                if (row < m && column < n) *reinterpret_cast<uint4*>(c + Index(row) * n + column) = result;
            }
        }
    }
}
