// Prefill through pages: many new queries of each sequence, packed one sequence behind the other.
//
// A block takes BLOCK_M = 16 WARPS (query, head) rows of one sequence and one KV head, 16 rows a warp, and iterates over
// the keys they see, KEYS at a time. Here arithmetic is the roof: all warps share a tile of keys. Copies and products
// overlap without a second buffer: V of a tile is copied while S = Q K^T runs, and K of the next tile while P V runs.
// Each buffer is free when its copy starts, since one of the two barriers of the loop lies between its last reader and
// the copy.

#include "attend.cuh"

template <typename T, typename STORED, int DIM, int WARPS, int KEYS>
__global__ void __launch_bounds__(WARPS * WARP, 2)
paged_prefill(
    const T* q_data, const unsigned char* k_data, const unsigned char* v_data, const float* k_scale,
    const float* v_scale, const int* cu_seqlens_q, const int* seqlens, const int* page_table, const void* sinks,
    T* o_data, float* lse_data, long long q_row, long long q_head, long long k_page, int k_row, long long k_head,
    long long v_page, int v_row, long long v_head, long long scale_page, int scale_row,
    long long page_table_row, int batch, int tokens, int heads, int group_size, int capacity, int head_dim,
    int value_dim, int page_shift, int window, int sink_tokens, int sink_type, float scale, float softcap) {
    constexpr int THREADS = WARPS * WARP, BLOCK_M = 16 * WARPS;
    constexpr int TILE_BYTES = KEYS * DIM * static_cast<int>(sizeof(STORED));

    // Q (and, after it, O), K, V, and the scales of two tiles: those of the next are copied while V's are still read.
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned q_tile = shared_address(shared);
    const unsigned k_tile = q_tile + BLOCK_M * DIM * 2, v_tile = k_tile + TILE_BYTES;
    const float* const scales = reinterpret_cast<const float*>(shared + BLOCK_M * DIM * 2 + 2 * TILE_BYTES);
    const unsigned scale_address = v_tile + TILE_BYTES;
    int* const scratch = reinterpret_cast<int*>(shared);  // before Q is loaded

    const int warp = static_cast<int>(threadIdx.x) / WARP, lane = static_cast<int>(threadIdx.x) % WARP;
    const int group = lane / 4, pair = lane % 4;
    const int kv_head = static_cast<int>(blockIdx.y);
    const int wanted = static_cast<int>(gridDim.x - 1 - blockIdx.x);  // a sequence's last tiles see most keys: longest first
    pdl_enter();

    // Which tile of which sequence. Tokens behind the last sequence count as one more sequence, which sees nothing. The
    // grid is an upper bound: blocks that are too many find no tile.
    const auto bounds_of = [&](int i) {
        return make_int2(__ldg(cu_seqlens_q + i), i == batch ? tokens : __ldg(cu_seqlens_q + i + 1));
    };
    const auto tiles_of = [&](int i) {
        const int2 token = bounds_of(i);
        return (max(token.y - token.x, 0) * group_size + BLOCK_M - 1) / BLOCK_M;
    };
    const int each = (batch + THREADS) / THREADS;  // sequences of a thread
    const int first = min(static_cast<int>(threadIdx.x) * each, batch + 1), last = min(first + each, batch + 1);
    int own_tiles = 0;
    for (int i = first; i < last; ++i) own_tiles += tiles_of(i);
    const BlockSum tiles = block_sum<THREADS>(own_tiles, scratch);
    if (wanted >= tiles.total) return;
    if (tiles.before <= wanted && wanted < tiles.before + own_tiles) {
        int index = wanted - tiles.before, i = first;
        while (index >= tiles_of(i)) index -= tiles_of(i++);
        scratch[0] = i;
        scratch[1] = index;
    }
    __syncthreads();
    const int b = scratch[0], first_row = scratch[1] * BLOCK_M;
    __syncthreads();  // before Q is written there
    const int2 token = bounds_of(b);
    const int seqlen = b == batch ? 0 : min(max(__ldg(seqlens + b), 0), capacity);
    const int rows = min((token.y - token.x) * group_size - first_row, BLOCK_M);
    const int first_end = b == batch ? -tokens : seqlen - (token.y - token.x) + 1;  // keys that query 0 sees
    const auto end_of = [&](int row) { return first_end + (first_row + row) / group_size; };

    const int max_end = max(end_of(rows - 1), 0);
    const KBlocks visible(max_end, max(max_end - end_of(0) + 1, 1), window, sink_tokens, KEYS);
    const Cache cache{{k_data, k_head, k_page, k_row, head_dim * static_cast<int>(sizeof(STORED))},
                      {v_data, v_head, v_page, v_row, value_dim * static_cast<int>(sizeof(STORED))},
                      k_scale, v_scale, scale_page, scale_row, page_table, page_table_row, page_shift, b, kv_head};
    const KeyBounds bounds{max_end, visible.key_min, sink_tokens};
    CacheCopy<STORED, KEYS, DIM, THREADS> copy;
    static_assert(!decltype(copy)::IN_PARTS, "page numbers are overwritten before V is stored");
    ScaleCopy<STORED, KEYS, THREADS> scale_copy;
    const auto start_k = [&](int n) {
        const int first_key = visible.block(n) * KEYS;
        copy.start(k_tile, cache, cache.k, first_key, bounds);
        scale_copy.start(scale_address + n % 2 * 2 * KEYS * 4, cache, first_key, bounds);
    };
    if (visible.count > 0) {
        copy.look_up(cache, visible.block(0) * KEYS, bounds);
        start_k(0);
    }
#if SM80
    cp_async_commit();
#endif
    load_queries<T, STORED, BLOCK_M, DIM, THREADS>(q_tile, head_dim, [&](int row) -> const T* {
        if (row >= rows) return nullptr;
        const int query = (first_row + row) / group_size, head = kv_head * group_size + (first_row + row) % group_size;
        return q_data + (token.x + query) * q_row + head * q_head;
    });

    // What this warp's rows see; a warp without rows masks nothing that anybody reads.
    RowBounds<1> row_bounds;
    row_bounds.sink_tokens = sink_tokens;
    row_bounds.window = window;
    row_bounds.min_end = end_of(warp * 16);
    row_bounds.max_begin = window == 0 ? 0 : end_of(min(warp * 16 + 15, rows - 1)) - window;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = warp * 16 + group + half * 8;
        row_bounds.end[0][half] = row < rows ? end_of(row) : 0;
    }
    const LaneOffsets<STORED, DIM> offsets;
    const unsigned own_queries = q_tile + warp * 16 * DIM * 2;
    SoftmaxState<DIM, 1> state;
    state.clear();

    for (int n = 0; n < visible.count; ++n) {
        const int first_key = visible.block(n) * KEYS;
        const float* tile_scales = scales + n % 2 * 2 * KEYS;
#if SM80
        cp_async_wait<0>();
#else
        copy.finish(k_tile, cache, cache.k, first_key, bounds);
        scale_copy.finish(scale_address + n % 2 * 2 * KEYS * 4);
#endif
        __syncthreads();  // K (and at first Q) is there, and every warp is done with V of the tile before
        copy.start(v_tile, cache, cache.v, first_key, bounds);
#if SM80
        cp_async_commit();
#endif
        if (n + 1 < visible.count) copy.look_up(cache, visible.block(n + 1) * KEYS, bounds);
        float s[1][KEYS / 8][4];
        multiply_qk<T, STORED, DIM, KEYS, 1>(s, own_queries + offsets.q, k_tile + offsets.k);
        scale_and_mask<STORED, KEYS, 1>(s, row_bounds, tile_scales, first_key, scale, softcap);
        update_softmax<DIM, KEYS, 1>(state, s);
#if SM80
        cp_async_wait<0>();
#else
        copy.finish(v_tile, cache, cache.v, first_key, bounds);
#endif
        __syncthreads();  // V is there, and every warp is done with K
        if (n + 1 < visible.count) start_k(n + 1);
#if SM80
        cp_async_commit();
#endif
        multiply_pv<T, STORED, DIM, KEYS, 1>(state, s, tile_scales, v_tile + offsets.v);
    }
    if (visible.count == 0) __syncthreads();  // other warps may still be writing the rows of Q that O goes to

    // Epilogue: O / l and the LSE. O goes through the warp's own rows of Q, so that device memory sees 16-byte stores.
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = warp * 16 + group + half * 8;
        const int query = (first_row + row) / group_size, head = kv_head * group_size + (first_row + row) % group_size;
        const float sink = row < rows ? load_sink(sinks, sink_type, head) : negative_infinity();
        const RowResult result = finish_row(state.row_max[0][half], row_sum_of(state.row_sum[0][half]), sink);
        if (pair == 0 && row < rows) lse_data[static_cast<long long>(head) * tokens + token.x + query] = result.lse;
#pragma unroll
        for (int d = 0; d < DIM / 8; ++d) {
            state.o[0][d][2 * half] *= result.inverse;
            state.o[0][d][2 * half + 1] *= result.inverse;
        }
    }
    __syncwarp();
#pragma unroll
    for (int d = 0; d < DIM / 8; d += 2)
#pragma unroll
        for (int half = 0; half < 2; ++half)
#pragma unroll
            for (int i = 0; i < 2; ++i) {  // two adjacent columns each
                const float(&left)[4] = state.o[0][QUANTIZED<STORED> ? d : d + i];
                const float(&right)[4] = state.o[0][QUANTIZED<STORED> ? d + 1 : d + i];
                const int at = 2 * half + (QUANTIZED<STORED> ? i : 0);
                const int column = QUANTIZED<STORED> ? d * 8 + 4 * pair + 2 * i : (d + i) * 8 + 2 * pair;
                store_shared(own_queries + swizzled<DIM>(group + half * 8, column / CHUNK) + column % CHUNK * 2,
                             pack<T>(left[at], right[QUANTIZED<STORED> ? at : at + 1]));
            }
    __syncwarp();
    constexpr int CHUNKS = DIM / CHUNK;
    for (int index = lane; index < 16 * CHUNKS; index += WARP) {
        const int row = index / CHUNKS, chunk = index % CHUNKS;
        if (warp * 16 + row >= rows || chunk * CHUNK >= value_dim) continue;
        const int at = first_row + warp * 16 + row;
        const int query = at / group_size, head = kv_head * group_size + at % group_size;
        T* target = o_data + ((static_cast<long long>(token.x) + query) * heads + head) * value_dim + chunk * CHUNK;
        *reinterpret_cast<uint4*>(target) = load_shared_16(own_queries + swizzled<DIM>(row, chunk));
    }
}
