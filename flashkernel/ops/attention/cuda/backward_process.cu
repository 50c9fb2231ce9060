// Before and after the main kernel of FlashAttention's backward pass (backward.cu).
//
// Preprocess: delta = rowsum(dO * O) - dLSE of each query, LSE in powers of two, the gradient of the learned sinks, and
// zeros for the float32 sum of dQ. Postprocess: dQ from that sum.

#include "backward.cuh"
#include "constants.cuh"

// A block takes BLOCK_M queries of one head. `stats` is [2][batch, heads, padded]: -LSE log2(e), then -delta, where
// `padded` is seqlen_q up to a whole number of blocks. A query that does not exist, or sees nothing, gets -inf: its
// probabilities are then exp2(-inf) = 0.
template <typename T, int HEAD_DIM, int VALUE_DIM, int BLOCK_M, int WARPS>
__global__ void __launch_bounds__(WARPS * WARP)
attention_backward_preprocess(
    const T* o_data, const T* do_data, const float* lse, const float* dlse, const SINK_TYPE* sinks, float* stats,
    float* dq_sum, float* dsinks, long long do_batch, int do_row, long long do_head, int batch, int heads, int seqlen_q,
    int value_dim, int tiles) {
    constexpr int THREADS = WARPS * WARP;
    constexpr int LANES = VALUE_DIM / CHUNK;  // that share a row: 16 bytes each
    const float infinity = __int_as_float(0x7f800000);
    // Neighboring blocks take neighboring heads, which are neighbors in O and dO.
    const int h = static_cast<int>(blockIdx.x) % heads;
    const int tile = static_cast<int>(blockIdx.x) / heads % tiles;
    const int b = static_cast<int>(blockIdx.x) / heads / tiles;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const long long line = static_cast<long long>(b) * heads + h;
    const int padded = tiles * BLOCK_M;
    const int column = static_cast<int>(threadIdx.x) % LANES * CHUNK;
    float dsink = 0.f;

#pragma unroll 4
    for (int i = threadIdx.x / LANES; i < BLOCK_M; i += THREADS / LANES) {
        const int row = tile * BLOCK_M + i;
        float delta = 0.f;
        if (row < seqlen_q && column < value_dim) {
            const T* o_row = o_data + ((static_cast<long long>(b) * seqlen_q + row) * heads + h) * value_dim;
            const T* do_row_data = do_data + b * do_batch + static_cast<long long>(row) * do_row + h * do_head;
            const uint4 o_chunk = *reinterpret_cast<const uint4*>(o_row + column);
            const uint4 do_chunk = *reinterpret_cast<const uint4*>(do_row_data + column);
            const T* left = reinterpret_cast<const T*>(&o_chunk);
            const T* right = reinterpret_cast<const T*>(&do_chunk);
#pragma unroll
            for (int e = 0; e < CHUNK; ++e)
                delta = fmaf(static_cast<float>(left[e]), static_cast<float>(right[e]), delta);
        }
#pragma unroll
        for (int step = 1; step < LANES; step *= 2) delta += __shfl_xor_sync(ALL_LANES, delta, step);
        if (column == 0) {
            float row_lse = infinity;
            if (row < seqlen_q) {
                if (dlse != nullptr) delta -= dlse[line * seqlen_q + row];
                row_lse = lse[line * seqlen_q + row];
                if (row_lse == -infinity) row_lse = infinity;
            }
            stats[line * padded + row] = -row_lse * LOG2E;
            stats[(static_cast<long long>(batch) * heads + line) * padded + row] = -delta;
#if HAS_SINKS
            // A sink's P is exp(sink - LSE) and its dP is 0, since it has no value: dS = P (0 - delta).
            dsink -= exp2f((static_cast<float>(sinks[h]) - row_lse) * LOG2E) * delta;
#endif
        }
    }
#if HAS_SINKS
#pragma unroll
    for (int step = 1; step < WARP; step *= 2) dsink += __shfl_xor_sync(ALL_LANES, dsink, step);
    if (lane == 0) dsinks[(line * tiles + tile) * WARPS + warp] = dsink;
#endif

    float4* sum = reinterpret_cast<float4*>(dq_sum + (line * tiles + tile) * (BLOCK_M * HEAD_DIM));
#pragma unroll
    for (int i = threadIdx.x; i < BLOCK_M * HEAD_DIM / 4; i += THREADS) sum[i] = make_float4(0.f, 0.f, 0.f, 0.f);
}

// dQ = scale * sum of dS K, in the dtype of q. A warp reads what the same warp of the main kernel added to.
template <typename T, int HEAD_DIM, int BLOCK_M, int WARPS>
__global__ void __launch_bounds__(WARPS * WARP)
attention_backward_postprocess(
    float* dq_sum, T* dq_data, float scale, int heads, int seqlen_q, int head_dim, int tiles) {
    using Tiles = DqTiles<HEAD_DIM, BLOCK_M, WARPS>;
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned dq_tile = shared_address(shared);
    const int h = static_cast<int>(blockIdx.x) % heads;
    const int tile = static_cast<int>(blockIdx.x) / heads % tiles;
    const int b = static_cast<int>(blockIdx.x) / heads / tiles;
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    float* sum = dq_sum + ((static_cast<long long>(b) * heads + h) * tiles + tile) * Tiles::SIZE;

    float dq[Tiles::MT][Tiles::NT][4];
#pragma unroll
    for (int m = 0; m < Tiles::MT; ++m)
#pragma unroll
        for (int n = 0; n < Tiles::NT; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) dq[m][n][i] = Tiles::tile(sum, warp, m, n)[sum_index(i, lane)];
    store_accumulators<T, HEAD_DIM>(dq_tile, dq, Tiles::first_row(warp), Tiles::first_chunk(warp), scale, lane);
    __syncthreads();
    T* target = dq_data + ((static_cast<long long>(b) * seqlen_q + tile * BLOCK_M) * heads + h) * head_dim;
    store_tile<T, BLOCK_M, HEAD_DIM, WARPS * WARP>(
        target, static_cast<long long>(heads) * head_dim, dq_tile, seqlen_q - tile * BLOCK_M, head_dim);
}
