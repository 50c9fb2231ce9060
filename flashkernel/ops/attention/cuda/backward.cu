// FlashAttention backward with mma.sync, from Turing up.
//
// The forward pass kept O and LSE = log sum exp S alone. From them the probabilities come back without a softmax,
// P = exp(S - LSE), and with delta = rowsum(dO * O) - dLSE (backward_process.cu) the gradients are five products:
//
//     S = Q K^T                P = exp2(S scale log2(e) - LSE log2(e))
//     dP = dO V^T              dS = P (dP - delta)
//     dV = P^T dO              dK = dS^T Q                  dQ = dS K
//
// A block owns BLOCK_N keys of one KV head. K and V stay in shared memory, dK and dV in registers, and the block
// iterates over the blocks of BLOCK_M queries that see its keys, for all query heads of the group: dK and dV are summed
// without atomics. A block of queries is seen by many blocks of keys: what each adds to dQ goes to a float32 sum in
// device memory, by atomics.
//
// Transposed scores. S and dP are computed as S^T = K Q^T and dP^T = V dO^T, [keys][queries]. The accumulators of an
// mma, packed to 16 bit, are operand A of the next one: so P^T and dS^T go into dV = P^T dO and dK = dS^T Q from
// registers. Only dQ = dS K needs dS the other way round: dS^T goes to shared memory, and ldmatrix.trans transposes it.
//
// Warps form a grid of KEY_WARPS x QUERY_WARPS over S^T. The larger the tile of a warp, the more mma instructions share
// an operand, and it is shared memory that limits this kernel: ldmatrix takes four cycles for a 16 x 16 operand, and
// the tensor cores four for the two products of one 16-row tile with it. With QUERY_WARPS = 2 a warp owns half the
// columns of dK and dV for its keys; it has P^T and dS^T of its own queries in registers, and reads the rest from
// shared memory.
//
// Two barriers per block of queries: the tiles have arrived; P and dS have arrived. From sm_80 on the next Q and dO are
// copied into a second buffer meanwhile; before, they wait in registers, and a third barrier frees the only buffer.
//
//                     queries x keys     accumulators of a thread   shared memory in KiB
//                                        S + dP + dK + dV           K + V + Q + dO + P + dS
//     sm_75   d  64   64 x 64, 8 warps   16 + 16 + 16 + 16          8 + 8 + 8 + 8 + 8 + 8         =  48
//     sm_75   d 128   32 x 64, 8 warps    8 +  8 + 32 + 32          16 + 16 + 8 + 8 + 4 + 4       =  56
//     sm_80   d  64   128 x 128, 8 warps 64 + 64 + 32 + 32          16 + 16 + 32 + 32 + 32 + 32   = 160
//     sm_80   d 128   64 x 128, 8 warps  32 + 32 + 64 + 64          32 + 32 + 32 + 32 + 16 + 16   = 160
//     sm_86   d  64   64 x 128, 8 warps  32 + 32 + 32 + 32          16 + 16 + 16 + 16 + 16 + 16   =  96
//     sm_86   d 128   64 x 64, 8 warps   16 + 16 + 32 + 32          16 + 16 + 32 + 16 + 8 + 8     =  96
//
// sm_86 stands for GPUs with 99 KiB of shared memory (sm_86, sm_89, sm_120); their tiles also serve a bias, a score
// function, ALiBi, a softcap or dropout everywhere, since the larger ones leave no registers for them.

#include "backward.cuh"
#include "score_gradients.cuh"

// c [16 MT x 8 NT] += A B^T of tiles [16 MT][DIM] and [8 NT][DIM]; `a` and `b` are this lane's addresses of ldmatrix.
// To move them by an even number of chunks is an exclusive or with a constant, since the swizzle is one too.
template <typename T, int DIM, int MT, int NT>
__device__ inline void multiply_transposed(float (&c)[MT][NT][4], unsigned a, unsigned b) {
#pragma unroll
    for (int k = 0; k < DIM / 16; ++k) {
        unsigned a_block[MT][4];
#pragma unroll
        for (int m = 0; m < MT; ++m) ldmatrix(a_block[m], (a ^ (k * 32)) + m * 16 * DIM * 2);
#pragma unroll
        for (int n = 0; n < NT; n += 2) {
            unsigned b_block[4];
            ldmatrix(b_block, (b ^ (k * 32)) + n * 8 * DIM * 2);
#pragma unroll
            for (int m = 0; m < MT; ++m) {
                mma<T>(c[m][n], a_block[m], b_block[0], b_block[1]);
                mma<T>(c[m][n + 1], a_block[m], b_block[2], b_block[3]);
            }
        }
    }
}

// c [16 MT x 8 NT] += A B for 16 rows of B, a tile [16][8 NT] which ldmatrix transposes.
template <typename T, int MT, int NT>
__device__ inline void multiply(float (&c)[MT][NT][4], const unsigned (&a_block)[MT][4], unsigned b) {
#pragma unroll
    for (int n = 0; n < NT; n += 2) {
        unsigned b_block[4];
        ldmatrix_transposed(b_block, b ^ (n * 16));
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            mma<T>(c[m][n], a_block[m], b_block[0], b_block[1]);
            mma<T>(c[m][n + 1], a_block[m], b_block[2], b_block[3]);
        }
    }
}

// Where a thread is in the grid of warps over S^T, and in an accumulator tile: rows `group` and `group` + 8, columns
// 2 `pair` and 2 `pair` + 1. It is computed again for each product, from a thread index that is read again: the addresses
// that follow from it then take no registers between products.
template <int QUERY_WARPS>
struct WarpPlace {
    int lane, key_warp, query_warp, group, pair;

    __device__ inline explicit WarpPlace(int thread)
        : lane(thread % WARP), key_warp(thread / WARP / QUERY_WARPS), query_warp(thread / WARP % QUERY_WARPS),
          group(lane / 4), pair(lane % 4) {}
};

// The keys that a block owns. Under a causal mask the first keys are seen by the most queries: longest first.
struct KeyTile {
    int tile, kv_head, b;

    __device__ inline KeyTile(int block, int k_tiles, int kv_heads)
        : tile(block % k_tiles), kv_head(block / k_tiles % kv_heads), b(block / k_tiles / kv_heads) {}
};

// The blocks of queries that see a tile of keys, for each query head of a group in turn.
struct QueryBlocks {
    const int *ranges, *counts;  // [batch, heads, k_tiles]; strides of 0 where batches or heads share them
    long long ranges_batch, ranges_head;
    int max_ranges, k_tiles, heads, group_size;
    int h;
    BlockIterator blocks;

    __device__ inline QueryBlocks(const int* ranges, const int* counts, long long ranges_batch, long long ranges_head,
                                  int max_ranges, int k_tiles, int heads, int group_size)
        : ranges(ranges), counts(counts), ranges_batch(ranges_batch), ranges_head(ranges_head), max_ranges(max_ranges),
          k_tiles(k_tiles), heads(heads), group_size(group_size),
          h(KeyTile(blockIdx.x, k_tiles, heads / group_size).kv_head * group_size), blocks(blocks_of_head()) {
        next_head();
    }
    __device__ inline bool valid() const { return blocks.valid(); }
    __device__ inline void next() {
        blocks.next();
        next_head();
    }
    __device__ inline void next_head() {
        while (!blocks.valid() && (h + 1) % group_size != 0) ++h, blocks = blocks_of_head();
    }
    __device__ inline BlockIterator blocks_of_head() const {
        const KeyTile keys(reread_block_index(), k_tiles, heads / group_size);
        const int row = static_cast<int>(keys.b * ranges_batch + h * ranges_head) + keys.tile;
        return BlockIterator(ranges, counts, row, max_ranges);
    }
};

// -LSE log2(e) and -delta of a block of queries, from global to shared memory: [2][BLOCK_M]. A TileCopy is started
// next, and closes the group of asynchronous copies.
template <int BLOCK_M>
struct StatsCopy {
#if !SM80
    float statistic;
#endif

    // `stats` and `delta_offset`: where the block's LSE begins, and delta behind it.
    __device__ inline void start(unsigned target, const float* stats, long long delta_offset) {
        const int thread = reread_thread_index();
#if SM80
        if (thread < BLOCK_M / 2) {
            const float* from = stats + (thread < BLOCK_M / 4 ? 0 : delta_offset) + thread % (BLOCK_M / 4) * 4;
            cp_async_16(target + thread * 16, from, true);
        }
#else
        if (thread < 2 * BLOCK_M) statistic = stats[(thread < BLOCK_M ? 0 : delta_offset) + thread % BLOCK_M];
#endif
    }
    __device__ inline void finish(unsigned target) {
#if !SM80
        const int thread = reread_thread_index();
        if (thread < 2 * BLOCK_M) store_shared(target + thread * 4, __float_as_uint(statistic));
#endif
    }
};

template <typename T, int HEAD_DIM, int VALUE_DIM, int BLOCK_M, int BLOCK_N, int KEY_WARPS, int QUERY_WARPS, int STAGES,
          int DO_STAGES, int MIN_BLOCKS, bool DBIAS>
__global__ void __launch_bounds__(KEY_WARPS * QUERY_WARPS * WARP, MIN_BLOCKS)
attention_backward(
    const T* q_data, const T* k_data, const T* v_data, const T* do_data, const float* stats, float* dq_sum, T* dk_data,
    T* dv_data, float* dbias, float* slope_sums,
    long long q_batch, int q_row, long long q_head, long long k_batch, int k_row, long long k_head,
    long long v_batch, int v_row, long long v_head, long long do_batch, int do_row, long long do_head,
    long long dbias_batch, long long dbias_head, long long dbias_q, long long dbias_k,
    const int* ranges, const int* range_counts, long long ranges_batch, long long ranges_head, int max_ranges,
    int batch, int q_tiles, int k_tiles,
    int heads, int group_size, int seqlen_q, int seqlen_k, int head_dim, int value_dim,
    const BIAS_TYPE* bias, long long bias_batch, long long bias_head, long long bias_q, long long bias_k,
    const float* alibi_slopes, long long alibi_batch, float scale, float softcap,
    const long long* device_seed, unsigned seed_word, unsigned drop_threshold, float keep_scale TABLE_PARAMETERS) {
    constexpr int WARPS = KEY_WARPS * QUERY_WARPS, THREADS = WARPS * WARP;
    constexpr int KEYS = BLOCK_N / KEY_WARPS, QUERIES = BLOCK_M / QUERY_WARPS;  // of S^T, for a warp
    constexpr int MT = KEYS / 16;                      // 16-row tiles of S^T, dK and dV
    constexpr int NT = QUERIES / 8;                    // 8-column tiles of S^T
    constexpr int DK_NT = HEAD_DIM / QUERY_WARPS / 8;  // 8-column tiles of dK
    constexpr int DV_NT = VALUE_DIM / QUERY_WARPS / 8;
    constexpr bool EXCHANGE = QUERY_WARPS > 1;  // warps read one another's P
    using Dq = DqTiles<HEAD_DIM, BLOCK_M, WARPS>;
    using Place = WarpPlace<QUERY_WARPS>;
    static_assert(KEYS % 16 == 0 && QUERIES % 16 == 0 && DK_NT % 2 == 0 && DV_NT % 2 == 0, "pairs of whole mma tiles");
    static_assert(2 * BLOCK_M <= THREADS, "a thread copies one number of LSE or delta at most");
#if SM80
    static_assert(STAGES == 2 && DO_STAGES <= 2, "asynchronous copies need a free buffer");
#else
    static_assert(STAGES == 1 && DO_STAGES == 1, "tiles wait in registers");
#endif

    // Tiles begin at multiples of 1024 bytes, as the swizzle needs them.
    constexpr int Q_BYTES = BLOCK_M * HEAD_DIM * 2, DO_BYTES = BLOCK_M * VALUE_DIM * 2, S_BYTES = BLOCK_N * BLOCK_M * 2;
    extern __shared__ __align__(1024) unsigned char shared[];
    constexpr int STATS_AT = BLOCK_N * (HEAD_DIM + VALUE_DIM) * 2 + STAGES * Q_BYTES + DO_STAGES * DO_BYTES +
                             (EXCHANGE ? 2 : 1) * S_BYTES;
    const unsigned k_tile = shared_address(shared);
    const unsigned v_tile = k_tile + BLOCK_N * HEAD_DIM * 2;
    const unsigned q_tile = v_tile + BLOCK_N * VALUE_DIM * 2;
    const unsigned do_tile = q_tile + STAGES * Q_BYTES;
    const unsigned ds_tile = do_tile + DO_STAGES * DO_BYTES;
    const unsigned p_tile = ds_tile + S_BYTES;
    const unsigned stats_tile = k_tile + STATS_AT;
    constexpr int STATS_BYTES = 2 * BLOCK_M * 4;

    const int kv_heads = heads / group_size;
    const int b = KeyTile(blockIdx.x, k_tiles, kv_heads).b;

#if HAS_DROPOUT
    if (device_seed != nullptr) {
        const unsigned long long seed = *device_seed;
        seed_word = scramble(scramble(static_cast<unsigned>(seed) + 0x9e3779b9u) ^ static_cast<unsigned>(seed >> 32));
    }
#endif

    // Q, dO and the statistics of a block of queries: `start` and `finish` as in TileCopy.
    TileCopy<BLOCK_M, HEAD_DIM, THREADS> q_copy;
    TileCopy<BLOCK_M, VALUE_DIM, THREADS> do_copy;
    StatsCopy<BLOCK_M> stats_copy;
    const auto start_q = [&](const QueryBlocks& next, int stage) {
        const int row = next.blocks.block * BLOCK_M;
        const long long line = static_cast<long long>(opaque(b)) * heads + next.h;
        stats_copy.start(stats_tile + stage * STATS_BYTES, stats + line * q_tiles * BLOCK_M + row,
                         static_cast<long long>(batch) * heads * q_tiles * BLOCK_M);
        q_copy.start(q_tile + stage * Q_BYTES,
                     q_data + opaque(b) * q_batch + next.h * q_head + static_cast<long long>(row) * q_row, q_row,
                     seqlen_q - row, head_dim);
    };
    const auto start_do = [&](const QueryBlocks& next, int stage) {
        const int row = next.blocks.block * BLOCK_M;
        do_copy.start(do_tile + stage % DO_STAGES * DO_BYTES,
                      do_data + opaque(b) * do_batch + next.h * do_head + static_cast<long long>(row) * do_row, do_row,
                      seqlen_q - row, value_dim);
    };

    const auto first_key = [&]() { return KeyTile(reread_block_index(), k_tiles, kv_heads).tile * BLOCK_N; };
    QueryBlocks queries(ranges, range_counts, ranges_batch, ranges_head, max_ranges, k_tiles, heads, group_size);
    int stage = 0;
    {
        const KeyTile keys(blockIdx.x, k_tiles, kv_heads);
        const int first_row = keys.tile * BLOCK_N;
        TileCopy<BLOCK_N, HEAD_DIM, THREADS> k_copy;
        TileCopy<BLOCK_N, VALUE_DIM, THREADS> v_copy;
        k_copy.start(k_tile,
                     k_data + b * k_batch + keys.kv_head * k_head + static_cast<long long>(first_row) * k_row,
                     k_row, seqlen_k - first_row, head_dim);
        v_copy.start(v_tile,
                     v_data + b * v_batch + keys.kv_head * v_head + static_cast<long long>(first_row) * v_row,
                     v_row, seqlen_k - first_row, value_dim);
        if (queries.valid()) start_q(queries, 0), start_do(queries, 0);
        k_copy.template finish<0>(k_tile);
        v_copy.template finish<0>(v_tile);
    }

    float dk[MT][DK_NT][4] = {}, dv[MT][DV_NT][4] = {};

    while (queries.valid()) {
        const int h = queries.h, block = queries.blocks.block;
        const bool masked = queries.blocks.masked;  // always, where keys reach beyond seqlen_k
        queries.next();

        const int do_stage = stage % DO_STAGES;
        q_copy.template finish<0>(q_tile + stage * Q_BYTES);
        do_copy.template finish<0>(do_tile + do_stage * DO_BYTES);
        stats_copy.finish(stats_tile + stage * STATS_BYTES);
        __syncthreads();  // the tiles are there, and every warp is done with the block before
        if (queries.valid()) {
            start_q(queries, (stage + 1) % STAGES);
            if (DO_STAGES == STAGES) start_do(queries, (stage + 1) % STAGES);
        }

        GradientParams params{{b, h, heads, seqlen_q, seqlen_k, scale, softcap, 0.f, bias, bias_q, bias_k, seed_word,
                               drop_threshold, Tables{TABLE_VALUES}},
                              keep_scale, dbias, dbias_q, dbias_k, slope_sums, 0};
#if HAS_BIAS
        params.scores.bias += b * bias_batch + h * bias_head;
        params.dbias += b * dbias_batch + h * dbias_head;
#endif
#if HAS_ALIBI
        params.scores.alibi_slope = alibi_slopes[b * alibi_batch + h];
        params.slope_sums += (static_cast<long long>(b) * heads + h) * q_tiles * BLOCK_M;
        params.slope_stride = static_cast<long long>(batch) * heads * q_tiles * BLOCK_M;
#endif
        // Mask and dropout do not depend on the scores: they are decided while registers are free, as a bit for a pair.
        PairBits<MT, NT> seen, kept;
        if (masked || HAS_DROPOUT) {
            const Place at(reread_thread_index());
            const int first_query = block * BLOCK_M + at.query_warp * QUERIES + at.pair * 2;
            const int lane_key = first_key() + at.key_warp * KEYS + at.group;
            if (masked) seen.fill(first_query, lane_key, [&](int q, int k) { return visible(params.scores, q, k); });
            if (HAS_DROPOUT) kept.fill(first_query, lane_key, [&](int q, int k) { return keep(params.scores, q, k); });
        }

        // S^T = K Q^T and dP^T = V dO^T. The accumulators of dP begin at -delta: the subtraction costs nothing.
        float s[MT][NT][4] = {}, dp[MT][NT][4];
        const Place at(reread_thread_index());
        multiply_transposed<T, HEAD_DIM>(
            s, down_then_right<HEAD_DIM>(k_tile, at.key_warp * KEYS, 0, at.lane),
            right_then_down<HEAD_DIM>(q_tile + stage * Q_BYTES, at.query_warp * QUERIES, 0, at.lane));
        const float* minus_lse = reinterpret_cast<const float*>(shared + STATS_AT + stage * STATS_BYTES) +
                                 at.query_warp * QUERIES + at.pair * 2;
        const float* minus_delta = minus_lse + BLOCK_M;
#pragma unroll
        for (int n = 0; n < NT; ++n) {
            const float2 first = HAS_DROPOUT ? make_float2(0.f, 0.f) : load_pair(minus_delta + n * 8);
#pragma unroll
            for (int m = 0; m < MT; ++m) dp[m][n][0] = dp[m][n][2] = first.x, dp[m][n][1] = dp[m][n][3] = first.y;
        }
        multiply_transposed<T, VALUE_DIM>(
            dp, down_then_right<VALUE_DIM>(v_tile, at.key_warp * KEYS, 0, at.lane),
            right_then_down<VALUE_DIM>(do_tile + do_stage * DO_BYTES, at.query_warp * QUERIES, 0, at.lane));

        // P^T and dS^T.
        unsigned p[MT][NT / 2][4], ds[MT][NT / 2][4];
        const int first_query = block * BLOCK_M + at.query_warp * QUERIES + at.pair * 2;
        const int lane_key = first_key() + at.key_warp * KEYS + at.group;
        if (masked)
            softmax_gradient<T, true, DBIAS>(
                p, ds, s, dp, minus_lse, minus_delta, seen, kept, params, first_query, lane_key);
        else
            softmax_gradient<T, false, DBIAS>(
                p, ds, s, dp, minus_lse, minus_delta, seen, kept, params, first_query, lane_key);
        store_blocks<BLOCK_M>(ds_tile, ds, at.key_warp * KEYS, at.query_warp * NT, at.lane);
        if (EXCHANGE) store_blocks<BLOCK_M>(p_tile, p, at.key_warp * KEYS, at.query_warp * NT, at.lane);
        __syncthreads();  // P and dS of all warps are there

        // dV += P^T dO: this warp's own queries first, from registers.
#pragma unroll
        for (int other = 0; other < QUERY_WARPS; ++other) {
            const Place at(reread_thread_index());
            const int from = at.query_warp ^ other;
            const unsigned p_rows = down_then_right<BLOCK_M>(p_tile, at.key_warp * KEYS, from * NT, at.lane);
            const unsigned do_columns = down_then_right<VALUE_DIM>(
                do_tile + do_stage * DO_BYTES, from * QUERIES, at.query_warp * DV_NT, at.lane);
#pragma unroll
            for (int j = 0; j < NT / 2; ++j) {
                unsigned a_block[MT][4];
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    if (other == 0)
                        copy(a_block[m], p[m][j]);
                    else
                        ldmatrix(a_block[m], (p_rows ^ (j * 32)) + m * 16 * BLOCK_M * 2);
                }
                multiply<T>(dv, a_block, do_columns + j * 16 * VALUE_DIM * 2);
            }
        }
        if (DO_STAGES < STAGES) {
            __syncthreads();  // every warp is done with dO
            if (queries.valid()) start_do(queries, 0);
        }

        // dK += dS^T Q, likewise.
#pragma unroll
        for (int other = 0; other < QUERY_WARPS; ++other) {
            const Place at(reread_thread_index());
            const int from = at.query_warp ^ other;
            const unsigned ds_rows = down_then_right<BLOCK_M>(ds_tile, at.key_warp * KEYS, from * NT, at.lane);
            const unsigned q_columns = down_then_right<HEAD_DIM>(
                q_tile + stage * Q_BYTES, from * QUERIES, at.query_warp * DK_NT, at.lane);
#pragma unroll
            for (int j = 0; j < NT / 2; ++j) {
                unsigned a_block[MT][4];
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    if (other == 0)
                        copy(a_block[m], ds[m][j]);
                    else
                        ldmatrix(a_block[m], (ds_rows ^ (j * 32)) + m * 16 * BLOCK_M * 2);
                }
                multiply<T>(dk, a_block, q_columns + j * 16 * HEAD_DIM * 2);
            }
        }

        // dQ += dS K: all keys of the block, for this warp's part of dQ.
        float dq[Dq::MT][Dq::NT][4] = {};
        const int thread = reread_thread_index(), warp = thread / WARP, lane = thread % WARP;
        const unsigned ds_transposed = right_then_down<BLOCK_M>(ds_tile, 0, Dq::first_row(warp) / 8, lane);
        const unsigned k_columns = down_then_right<HEAD_DIM>(k_tile, 0, Dq::first_chunk(warp), lane);
#pragma unroll
        for (int k = 0; k < BLOCK_N / 16; ++k) {
            unsigned a_block[Dq::MT][4];
#pragma unroll
            for (int m = 0; m < Dq::MT; ++m)
                ldmatrix_transposed(a_block[m], (ds_transposed ^ (m * 32)) + k * 16 * BLOCK_M * 2);
            multiply<T>(dq, a_block, k_columns + k * 16 * HEAD_DIM * 2);
        }
        float* sum = dq_sum + ((static_cast<long long>(opaque(b)) * heads + h) * q_tiles + block) * Dq::SIZE;
#pragma unroll
        for (int m = 0; m < Dq::MT; ++m)
#pragma unroll
            for (int n = 0; n < Dq::NT; ++n) add_to_sum(Dq::tile(sum, warp, m, n), dq[m][n], lane);

        if (STAGES == 1) __syncthreads();  // every warp is done with Q and dO
        stage = (stage + 1) % STAGES;
    }

    // dK and dV go through the shared memory of K and V, so that device memory sees 16-byte stores.
    __syncthreads();
    const Place at(reread_thread_index());
    store_accumulators<T, HEAD_DIM>(k_tile, dk, at.key_warp * KEYS, at.query_warp * DK_NT, scale, at.lane);
    store_accumulators<T, VALUE_DIM>(v_tile, dv, at.key_warp * KEYS, at.query_warp * DV_NT, 1.f, at.lane);
    __syncthreads();
    const KeyTile keys(reread_block_index(), k_tiles, kv_heads);
    const int first_row = keys.tile * BLOCK_N;
    const long long row = (static_cast<long long>(keys.b) * seqlen_k + first_row) * kv_heads + keys.kv_head;
    store_tile<T, BLOCK_N, HEAD_DIM, THREADS>(dk_data + row * head_dim, static_cast<long long>(kv_heads) * head_dim,
                                              k_tile, seqlen_k - first_row, head_dim);
    store_tile<T, BLOCK_N, VALUE_DIM, THREADS>(dv_data + row * value_dim, static_cast<long long>(kv_heads) * value_dim,
                                               v_tile, seqlen_k - first_row, value_dim);
}
