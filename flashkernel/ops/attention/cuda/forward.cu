// FlashAttention forward with mma.sync, from Turing up.
//
// A block of WARPS warps owns BLOCK_M queries of one head. It keeps O (the output), m (row max) and l (row sum) in
// registers and iterates over the K blocks that the mask leaves:
//
//     S = Q K^T                       ldmatrix + mma, both operands from shared memory
//     m' = max(m, rowmax(S))          two shuffles: four lanes hold a row
//     P = exp2(S - m'), l = l exp2(m - m') + rowsum(P)
//     O = O exp2(m - m') + P V        P goes from accumulator to operand registers without leaving the thread
//
// and ends with O / l and LSE = m + log l. S never leaves the registers: device memory sees Q, K, V, O and LSE alone.
//
// Copies and products overlap without a second buffer: V of a block is copied while S = Q K^T runs, and K of the next
// block while the softmax and P V run. Each buffer is free when its copy starts, because one of the two barriers of the
// loop lies between its last reader and the copy.

#include "rotary.cuh"
#include "scores.cuh"

// A tile of rows of one head; `head_chunk`: where the head begins, in chunks of 16 bytes, which fits 32 bits.
template <typename T>
__device__ inline const T* tile_at(const T* data, int head_chunk, int row, int stride) {
    return data + static_cast<long long>(opaque(head_chunk)) * CHUNK + static_cast<long long>(row) * stride;
}

// O and S of such tiles take 192 of a thread's 255 registers. The row sums, used once in a block, do not fit beside them.
__device__ constexpr bool keeps_sums_in_shared(int block_m, int block_n, int value_dim, int warps) {
    return block_m * (block_n + value_dim) / (warps * WARP) >= 192;
}

// A thread's part of the row sums, in registers or in shared memory. Only the thread itself reads and writes it.
template <int MT, int THREADS, bool IN_SHARED>
struct RowSums {
    float values[MT][2];
    __device__ inline explicit RowSums(unsigned char*) {}
    __device__ inline float& at(int m, int half) { return values[m][half]; }
};
template <int MT, int THREADS>
struct RowSums<MT, THREADS, true> {
    float* values;
    __device__ inline explicit RowSums(unsigned char* shared)
        : values(reinterpret_cast<float*>(shared) + threadIdx.x) {}
    __device__ inline float& at(int m, int half) { return values[(2 * m + half) * THREADS]; }
};

template <typename T, int HEAD_DIM, int VALUE_DIM, int BLOCK_M, int BLOCK_N, int WARPS>
__global__ void __launch_bounds__(WARPS * WARP)
attention_forward(
    const T* q_data, const T* k_data, const T* v_data, const SINK_TYPE* sinks, T* o_data, float* lse_data,
    long long q_batch, int q_row, long long q_head, long long k_batch, int k_row, long long k_head,
    long long v_batch, int v_row, long long v_head,
    const int* ranges, const int* range_counts, long long ranges_batch, long long ranges_head, int max_ranges, int tiles,
    int heads, int group_size, int seqlen_q, int seqlen_k, int head_dim, int value_dim,
    const BIAS_TYPE* bias, long long bias_batch, long long bias_head, long long bias_q, long long bias_k,
    const float* alibi_slopes, long long alibi_batch, float scale, float softcap,
    const long long* device_seed, unsigned seed_word, unsigned drop_threshold, float keep_scale,
    const float* rotary_cos, const float* rotary_sin, int rotary_dim TABLE_PARAMETERS) {
    constexpr int THREADS = WARPS * WARP;
    constexpr int ROWS_PER_WARP = BLOCK_M / WARPS;
    constexpr int MT = ROWS_PER_WARP / 16;  // 16-row tiles of a warp
    constexpr int NT = BLOCK_N / 8;         // 8-column tiles of S
    constexpr int DT = VALUE_DIM / 8;       // 8-column tiles of O
    constexpr bool SUMS_IN_SHARED = keeps_sums_in_shared(BLOCK_M, BLOCK_N, VALUE_DIM, WARPS);
    static_assert(BLOCK_M % (16 * WARPS) == 0 && BLOCK_N % 16 == 0, "tiles of whole mma instructions");

    extern __shared__ __align__(1024) unsigned char shared[];  // the swizzle below needs tiles at multiples of 256 bytes
    const unsigned q_tile = shared_address(shared);
    const unsigned k_tile = q_tile + BLOCK_M * HEAD_DIM * 2;
    const unsigned v_tile = k_tile + BLOCK_N * HEAD_DIM * 2;
    constexpr int LOADED = BLOCK_M * HEAD_DIM + BLOCK_N * (HEAD_DIM + VALUE_DIM), STORED = BLOCK_M * VALUE_DIM;
    constexpr int SUMS_OFFSET = 2 * (LOADED > STORED ? LOADED : STORED);  // as ForwardConfig.shared_bytes has it

    // Longest first: under a causal mask that is the last tile.
    const int tile = tiles - 1 - static_cast<int>(blockIdx.x) % tiles;
    const int bh = static_cast<int>(blockIdx.x) / tiles;
    const int h = bh % heads, b = bh / heads;
    const int first_row = tile * BLOCK_M;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;

    ScoreParams params{b, h, heads, seqlen_q, seqlen_k, scale, softcap, 0.f, bias, bias_q, bias_k, seed_word,
                       drop_threshold, Tables{TABLE_VALUES}};
#if HAS_BIAS
    params.bias += b * bias_batch + h * bias_head;
#endif
#if HAS_ALIBI
    params.alibi_slope = alibi_slopes[b * alibi_batch + h];
#endif
#if HAS_DROPOUT
    if (device_seed != nullptr) {
        const unsigned long long seed = *device_seed;
        params.seed_word = scramble(scramble(static_cast<unsigned>(seed) + 0x9e3779b9u) ^ static_cast<unsigned>(seed >> 32));
    }
#endif

    const T* q_rows = q_data + b * q_batch + h * q_head + static_cast<long long>(first_row) * q_row;
    const int k_chunk = static_cast<int>((b * k_batch + (h / group_size) * k_head) / CHUNK);  // K of this head begins
    const int v_chunk = static_cast<int>((b * v_batch + (h / group_size) * v_head) / CHUNK);

    float o[MT][DT][4] = {};
    float row_max[MT][2];
    RowSums<MT, THREADS, SUMS_IN_SHARED> row_sums(shared + SUMS_OFFSET);  // of this lane's columns; of the row at the end
#pragma unroll
    for (int m = 0; m < MT; ++m) {
        row_max[m][0] = row_max[m][1] = negative_infinity();
        row_sums.at(m, 0) = row_sums.at(m, 1) = 0.f;
    }

    // Q is on its way while the ranges are read; with asynchronous copies it arrives together with the first K.
    TileCopy<BLOCK_M, HEAD_DIM, THREADS> q_copy;
    q_copy.start(q_tile, q_rows, q_row, seqlen_q - first_row, head_dim);
    BlockIterator blocks(ranges, range_counts, static_cast<int>(b * ranges_batch + h * ranges_head) + tile, max_ranges);
    TileCopy<BLOCK_N, HEAD_DIM, THREADS> k_copy;
    TileCopy<BLOCK_N, VALUE_DIM, THREADS> v_copy;
#if !SM80 || HAS_ROTARY
    q_copy.template finish<0>(q_tile);
#endif
#if HAS_ROTARY
    __syncthreads();
    rotate_tile<T, BLOCK_M, HEAD_DIM, THREADS>(q_tile, rotary_cos, rotary_sin, rotary_dim,
                                               first_row + seqlen_k - seqlen_q, seqlen_k);
#endif
    if (blocks.valid())
        k_copy.start(k_tile, tile_at(k_data, k_chunk, blocks.block * BLOCK_N, k_row), k_row,
                     seqlen_k - blocks.block * BLOCK_N, head_dim);

    // Lane addresses of ldmatrix. A lane's row is a multiple of 8 plus lane % 8, and rows begin at multiples of 128
    // bytes: to move by an even number of chunks is an exclusive or with a constant.
    const int lane_row = lane % 8, matrix = lane / 8;
    const unsigned q_address = q_tile + (warp * ROWS_PER_WARP + (matrix & 1) * 8 + lane_row) * HEAD_DIM * 2 +
                               (((matrix >> 1) ^ lane_row) << 4);
    const unsigned k_address = k_tile + ((matrix >> 1) * 8 + lane_row) * HEAD_DIM * 2 + (((matrix & 1) ^ lane_row) << 4);
    const unsigned v_address = v_tile + ((matrix & 1) * 8 + lane_row) * VALUE_DIM * 2 + (((matrix >> 1) ^ lane_row) << 4);

    // To powers of two. A plain score is scaled in the exponent, by the multiply-add that subtracts the maximum.
    const float scale_log2 = PLAIN ? scale * LOG2E : LOG2E;

    while (blocks.valid()) {
        const int first_key = blocks.block * BLOCK_N;
        const bool masked = blocks.masked || first_key + BLOCK_N > seqlen_k;
        blocks.next();

        k_copy.template finish<0>(k_tile);
        __syncthreads();  // K is there, and every warp is done with V of the block before
#if HAS_ROTARY
        rotate_tile<T, BLOCK_N, HEAD_DIM, THREADS>(k_tile, rotary_cos, rotary_sin, rotary_dim, first_key, seqlen_k);
        __syncthreads();
#endif
        v_copy.start(v_tile, tile_at(v_data, v_chunk, first_key, v_row), v_row, seqlen_k - first_key, value_dim);

        const unsigned k_lane = opaque(k_address);  // or the addresses of all steps wait in registers
        float s[MT][NT][4] = {};
#pragma unroll
        for (int kk = 0; kk < HEAD_DIM / 16; ++kk) {
            unsigned qa[MT][4];
#pragma unroll
            for (int m = 0; m < MT; ++m) ldmatrix(qa[m], (q_address ^ (kk * 32)) + m * 16 * HEAD_DIM * 2);
#pragma unroll
            for (int n = 0; n < NT; n += 2) {
                unsigned kb[4];
                ldmatrix(kb, (k_lane ^ (kk * 32)) + n * 8 * HEAD_DIM * 2);
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    mma<T>(s[m][n], qa[m], kb[0], kb[1]);
                    mma<T>(s[m][n + 1], qa[m], kb[2], kb[3]);
                }
            }
        }

        if (!PLAIN || masked) {
            const int thread = reread_thread_index();
            // A lane holds rows lane / 4 and + 8, columns 2 (lane % 4) and + 1 of a 16 x 8 accumulator.
            const int row_0 = first_row + thread / WARP * ROWS_PER_WARP + thread % WARP / 4;
            const int key_0 = first_key + thread % 4 * 2;
#pragma unroll
            for (int n = 0; n < NT; ++n) {
                const int key_n = opaque(key_0) + n * 8;  // one column of accumulators after the other
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int row = row_0 + m * 16 + (i / 2) * 8, key = key_n + i % 2;
                        float& value = s[m][n][i];
                        if (!PLAIN) value = apply_score_function(params, biased_score(params, value, row, key), row, key);
                        if (masked && !visible(params, row, key)) value = negative_infinity();
                    }
            }
        }

        v_copy.template finish<0>(v_tile);
        __syncthreads();  // V is there, and every warp is done with K
        if (blocks.valid())
            k_copy.start(k_tile, tile_at(k_data, k_chunk, blocks.block * BLOCK_N, k_row), k_row,
                         seqlen_k - blocks.block * BLOCK_N, head_dim);

        // Online softmax.
#pragma unroll
        for (int m = 0; m < MT; ++m) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                float top = row_max[m][half];
#pragma unroll
                for (int n = 0; n < NT; ++n) top = fmaxf(top, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
                top = row_max_of(top);
                const float base = top == negative_infinity() ? 0.f : top * scale_log2;
                const float rescale = exp2_approx(row_max[m][half] * scale_log2 - base);
                row_max[m][half] = top;
                float sum = row_sums.at(m, half) * rescale;
#pragma unroll
                for (int n = 0; n < NT; ++n)
#pragma unroll
                    for (int i = 2 * half; i < 2 * half + 2; ++i) {
                        s[m][n][i] = exp2_approx(fmaf(s[m][n][i], scale_log2, -base));
                        sum += s[m][n][i];
                    }
                row_sums.at(m, half) = sum;
#pragma unroll
                for (int d = 0; d < DT; ++d) o[m][d][2 * half] *= rescale, o[m][d][2 * half + 1] *= rescale;
            }
        }
#if HAS_DROPOUT
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int row = first_row + warp * ROWS_PER_WARP + lane / 4 + m * 16 + (i / 2) * 8;
                    const int key = first_key + lane % 4 * 2 + n * 8 + i % 2;
                    s[m][n][i] = keep(params, row, key) ? s[m][n][i] * keep_scale : 0.f;
                }
#endif

        // O += P V, 16 keys at a time: two accumulator tiles of P are one operand.
#pragma unroll
        for (int kk = 0; kk < BLOCK_N / 16; ++kk) {
            unsigned p[MT][4];
            pack_operand<T>(p, s, kk);
#pragma unroll
            for (int d = 0; d < DT; d += 2) {
                unsigned vb[4];
                ldmatrix_transposed(vb, (v_address ^ (d * 16)) + kk * 16 * VALUE_DIM * 2);
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    mma<T>(o[m][d], p[m], vb[0], vb[1]);
                    mma<T>(o[m][d + 1], p[m], vb[2], vb[3]);
                }
            }
        }
    }

    // Epilogue: O / l and the LSE. A learned sink is one more term of the denominator.
    const int thread = reread_thread_index(), block = reread_block_index();
    const int row_0 = thread / WARP * ROWS_PER_WARP + thread % WARP / 4;  // in the tile
    const int tile_row = (tiles - 1 - block % tiles) * BLOCK_M, line = block / tiles;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = tile_row + row_0 + m * 16 + half * 8;
            float sum = row_sum_of(row_sums.at(m, half));
            float top = row_max[m][half] * scale_log2;  // in powers of two
            float rescale = 1.f;
#if HAS_SINKS
            const float sink = static_cast<float>(sinks[line % heads]) * LOG2E;
            const float higher = fmaxf(top, sink);
            const float base = higher == negative_infinity() ? 0.f : higher;
            rescale = exp2_approx(top - base);
            sum = sum * rescale + exp2_approx(sink - base);
            top = higher;
#endif
            const float inverse = sum == 0.f ? 0.f : rescale / sum;
            if (thread % 4 == 0 && row < seqlen_q)
                lse_data[static_cast<long long>(line) * seqlen_q + row] =
                    sum == 0.f ? negative_infinity() : (top + log2f(sum)) * LN2;
#pragma unroll
            for (int d = 0; d < DT; ++d) o[m][d][2 * half] *= inverse, o[m][d][2 * half + 1] *= inverse;
        }

    // Through shared memory, so that device memory sees 16-byte stores. Q is no longer read; O may be wider than Q, and
    // then reaches into K and V. A tile that sees no key has not waited for its Q yet.
#if SM80
    cp_async_wait<0>();
#endif
    __syncthreads();
    const unsigned o_tile = q_tile;
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int d = 0; d < DT; ++d)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = row_0 + m * 16 + half * 8;
                const unsigned value = pack<T>(o[m][d][2 * half], o[m][d][2 * half + 1]);
                store_shared(o_tile + swizzled<VALUE_DIM>(row, d) + thread % 4 * 4, value);
            }
    __syncthreads();
    constexpr int CHUNKS = VALUE_DIM / CHUNK;
#pragma unroll
    for (int index = thread; index < BLOCK_M * CHUNKS; index += THREADS) {
        const int row = index / CHUNKS, chunk = index % CHUNKS;
        if (tile_row + row >= seqlen_q || chunk * CHUNK >= value_dim) continue;
        const uint4 value = load_shared_16(o_tile + swizzled<VALUE_DIM>(row, chunk));
        T* target = o_data + ((static_cast<long long>(line / heads) * seqlen_q + tile_row + row) * heads + line % heads) * value_dim;
        *reinterpret_cast<uint4*>(target + chunk * CHUNK) = value;
    }
}
