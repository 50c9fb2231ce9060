// Split-KV decoding (flash-decoding): a few queries of every sequence against its cached keys.
//
// Decoding reads every cached key once for a handful of queries: memory bandwidth is the roof, and the kernel is about
// keeping enough copies in flight on all SMs. Its story in order:
//
// 1. Schedule. A work tile is one output tile: a sequence, a KV head, BLOCK_M (query, head) rows. The keys of a sequence
//    are cut into K blocks of WARPS x KEYS keys; the K blocks of all work tiles are numbered one after another, and
//    every block of threads (a program) takes an equal range of them. Lengths are in device memory alone, so each
//    program sums them itself: one captured CUDA graph serves any lengths.
// 2. Copies. Of a K block, each warp owns KEYS keys with a pipeline of its own: it copies STAGES - 1 tiles ahead
//    (cp.async) and waits for its own copies only: the loop has no __syncthreads. The page table is read one tile before
//    the copy that needs it. Before sm_80 there is no cp.async: K and V of the next tile wait in registers instead, and
//    share one buffer in shared memory.
// 3. Products. S = Q K^T and O += P V by mma.sync; each warp has an m, l and O of its own keys.
// 4. Merge. At the end of a work tile the warps' O are rescaled to a common row max and added in shared memory. A work
//    tile that lies in one range is finished there; of the others each program leaves a partial O with m and l, and
//    decode_combine merges them.

#include "attend.cuh"

// Equal ranges of the K blocks: they differ by one at most.
struct Ranges {
    int total, programs;

    __device__ inline int begin(int program) const {
        return program * (total / programs) + min(program, total % programs);
    }
    __device__ inline int program_of(int block) const {
        const int quotient = total / programs, remainder = total % programs;
        const int longer_end = remainder * (quotient + 1);  // the first `remainder` programs have one block more
        return block < longer_end ? block / (quotient + 1) : remainder + (block - longer_end) / max(quotient, 1);
    }
};

// What programs leave for the combine kernel, in one allocation: two slots per program, each a part of one work tile
// (O unnormalized, row max, row sum), and for each work tile which slots are its own.
template <int BLOCK_M, int DIM>
struct Workspace {
    float* o;      // [slots][BLOCK_M][DIM]
    float* stats;  // [slots][BLOCK_M][2]
    int* tiles;    // [work tiles][2]: the first slot, and the last program; -1: nothing to combine

    __device__ inline Workspace(float* memory, int programs) {
        o = memory;
        stats = o + 2ll * programs * BLOCK_M * DIM;
        tiles = reinterpret_cast<int*>(stats + 2ll * programs * BLOCK_M * 2);
    }
};

// The rows of O and LSE: q is [batch, seqlen_q, heads, head_dim].
struct OutputRow {
    long long o, lse;
    int head;
};
__device__ inline OutputRow output_row(int row, int b, int kv_head, int seqlen_q, int heads, int group_size) {
    const int query = row / group_size, head = kv_head * group_size + row % group_size;
    return {(static_cast<long long>(b) * seqlen_q + query) * heads + head,
            (static_cast<long long>(b) * heads + head) * seqlen_q + query, head};
}

// Four adjacent values as T.
template <typename T>
__device__ inline void store_four(T* target, const float4& value) {
    uint2 packed;
    packed.x = pack<T>(value.x, value.y);
    packed.y = pack<T>(value.z, value.w);
    *reinterpret_cast<uint2*>(target) = packed;
}

template <typename T, typename STORED, int DIM, int MT, int WARPS, int KEYS, int STAGES>
__global__ void __launch_bounds__(WARPS * WARP, 2)
decode_split_kv(
    const T* q_data, const unsigned char* k_data, const unsigned char* v_data, const float* k_scale,
    const float* v_scale, const int* seqlens, const int* page_table, const void* sinks, T* o_data, float* lse_data,
    float* workspace, long long q_batch, long long q_row, long long q_head, long long k_page, int k_row,
    long long k_head, long long v_page, int v_row, long long v_head, long long scale_page, int scale_row,
    long long page_table_row, int batch, int seqlen_q, int heads, int group_size, int kv_heads, int row_tiles,
    int capacity, int head_dim, int value_dim, int page_shift, int window, int sink_tokens, int sink_type, float scale,
    float softcap, int split) {
    constexpr int THREADS = WARPS * WARP, BLOCK_M = 16 * MT, BLOCK_N = WARPS * KEYS;
    constexpr int ROW_BYTES = DIM * static_cast<int>(sizeof(STORED));
    constexpr int TILE_BYTES = KEYS * ROW_BYTES;
    constexpr int BUFFERS = SM80 ? 2 * STAGES : 1;  // of a warp: K and V of each stage, or one for both in turn
    constexpr int SCALE_STAGES = SM80 ? STAGES : 1;
    constexpr int MERGE_ROW = 64 + 8;  // floats; the padding spreads rows over the banks
    constexpr int PIPELINE_BYTES = WARPS * BUFFERS * TILE_BYTES, MERGE_BYTES = WARPS * BLOCK_M * MERGE_ROW * 4;

    // Q, then the pipelines (and, after them, the merge), the scales, the row statistics of each warp, the schedule.
    extern __shared__ __align__(1024) unsigned char shared[];
    unsigned char* const pipeline = shared + BLOCK_M * DIM * 2;
    float* const scales = reinterpret_cast<float*>(pipeline + max(PIPELINE_BYTES, MERGE_BYTES));
    float* const row_stats = scales + (QUANTIZED<STORED> ? WARPS * SCALE_STAGES * 2 * KEYS : 0);  // [WARPS][BLOCK_M][2]
    int* const scratch = reinterpret_cast<int*>(row_stats + WARPS * BLOCK_M * 2);                 // [2 WARPS + 2]
    float* const merge = reinterpret_cast<float*>(pipeline);                                     // [WARPS][BLOCK_M][MERGE_ROW]

    const int warp = static_cast<int>(threadIdx.x) / WARP, lane = static_cast<int>(threadIdx.x) % WARP;
    const int group = lane / 4, pair = lane % 4;  // of an accumulator: rows `group` and `group` + 8, columns by `pair`
    const int work_tiles = kv_heads * row_tiles;  // of a sequence
    const int program = static_cast<int>(blockIdx.x), programs = static_cast<int>(gridDim.x);
    Workspace<BLOCK_M, DIM> partials(workspace, programs);
    pdl_enter();  // the combine kernel may become resident; it waits for our results

    const auto length_of = [&](int b) { return min(max(__ldg(seqlens + b), 0), capacity); };
    const auto tile_blocks_of = [&](int b) {  // a work tile without keys counts one: its zeros must be written
        return max(KBlocks(length_of(b), seqlen_q, window, sink_tokens, BLOCK_N).count, 1);
    };

    // The program's range of K blocks: [begin, end), which starts `into` blocks behind the begin of sequence b.
    Ranges ranges{0, programs};
    int b = program / work_tiles, work_tile = program % work_tiles, n_begin = 0, begin = 0, end = 1;
    if (split) {
        const int each = (batch + THREADS - 1) / THREADS;  // sequences of a thread
        const int first = min(static_cast<int>(threadIdx.x) * each, batch), last = min(first + each, batch);
        int own_blocks = 0, longest = 0;
        for (int i = first; i < last; ++i) {
            const int blocks = tile_blocks_of(i);
            own_blocks += blocks * work_tiles;
            longest = max(longest, blocks);
        }
#pragma unroll
        for (int distance = 1; distance < WARP; distance *= 2)
            longest = max(longest, __shfl_xor_sync(ALL_LANES, longest, distance));
        if (lane == 0) scratch[WARPS + warp] = longest;
        const BlockSum blocks = block_sum<THREADS>(own_blocks, scratch);
#pragma unroll
        for (int w = 0; w < WARPS; ++w) longest = max(longest, scratch[WARPS + w]);
        ranges.total = blocks.total;
        // Where whole work tiles take hardly longer than equal ranges, each program takes one, and nothing is left to
        // combine.
        const bool whole_tiles = batch * work_tiles <= programs &&
                                 static_cast<long long>(longest) * programs * 15 <= 16ll * blocks.total;
        if (whole_tiles) {
            if (program >= batch * work_tiles) return;
            end = tile_blocks_of(b);
        } else {
            begin = ranges.begin(program);
            end = ranges.begin(program + 1);
            if (begin == end) return;
            if (blocks.before <= begin && begin < blocks.before + own_blocks) {  // it is one of this thread's sequences
                int into = begin - blocks.before, i = first;
                while (into >= tile_blocks_of(i) * work_tiles) into -= tile_blocks_of(i++) * work_tiles;
                scratch[2 * WARPS] = i;
                scratch[2 * WARPS + 1] = into;
            }
            __syncthreads();
            b = scratch[2 * WARPS];
            const int into = scratch[2 * WARPS + 1], tile_blocks = tile_blocks_of(b);
            work_tile = into / tile_blocks;
            n_begin = into % tile_blocks;
        }
    }

    const LaneOffsets<STORED, DIM> offsets;
    const unsigned q_tile = shared_address(shared);
    const unsigned own_tiles = shared_address(pipeline) + warp * BUFFERS * TILE_BYTES;
    float* const own_scales = scales + (QUANTIZED<STORED> ? warp * SCALE_STAGES * 2 * KEYS : 0);
    const unsigned own_scale_address = shared_address(scales) + warp * SCALE_STAGES * 2 * KEYS * 4;

    for (int block = begin; block < end;) {
        const int seqlen = length_of(b);
        const KBlocks visible(seqlen, seqlen_q, window, sink_tokens, BLOCK_N);
        const int tile_blocks = max(visible.count, 1);
        const int n_end = split ? min(tile_blocks, n_begin + end - block) : tile_blocks;
        const int kv_head = work_tile / row_tiles, first_row = work_tile % row_tiles * BLOCK_M;
        const int rows = min(seqlen_q * group_size - first_row, BLOCK_M);
        const Cache cache{{k_data, k_head, k_page, k_row, head_dim * static_cast<int>(sizeof(STORED))},
                          {v_data, v_head, v_page, v_row, value_dim * static_cast<int>(sizeof(STORED))},
                          k_scale, v_scale, scale_page, scale_row, page_table, page_table_row, page_shift, b, kv_head};
        const KeyBounds bounds{seqlen, visible.key_min, sink_tokens};
        const auto key_of = [&](int n) { return visible.block(n) * BLOCK_N + warp * KEYS; };

        CacheCopy<STORED, KEYS, DIM, WARP> copy;
        ScaleCopy<STORED, KEYS, WARP> scale_copy;
        const int last = min(n_end, visible.count);  // a tile without keys has no block to read
#if SM80
        const auto start_copies = [&](int n) {
            const int stage = (n - n_begin) % STAGES;
            if (n < last) {
                const unsigned tile = own_tiles + stage * 2 * TILE_BYTES;
                copy.start(tile, cache, cache.k, key_of(n), bounds);
                copy.start(tile + TILE_BYTES, cache, cache.v, key_of(n), bounds);
                scale_copy.start(own_scale_address + stage * 2 * KEYS * 4, cache, key_of(n), bounds);
            }
            cp_async_commit();
            if (n + 1 < last) copy.look_up(cache, key_of(n + 1), bounds);
        };
        if (n_begin < last) copy.look_up(cache, key_of(n_begin), bounds);
#pragma unroll
        for (int stage = 0; stage < STAGES - 1; ++stage) start_copies(n_begin + stage);
#else
        constexpr bool IN_PARTS = decltype(copy)::IN_PARTS;  // nothing is in flight while the tensor cores work
        CacheCopy<STORED, KEYS, DIM, WARP> v_copy;
        const auto start_v = [&](int n) {  // after K of the same tile: the page numbers are the same
#pragma unroll
            for (int unit = 0; unit < decltype(copy)::PAGES; ++unit) v_copy.number[unit] = copy.number[unit];
            v_copy.start(own_tiles, cache, cache.v, key_of(n), bounds);
        };
        const auto start_k = [&](int n) {
            if (n >= last) return;
            copy.start(own_tiles, cache, cache.k, key_of(n), bounds);
            scale_copy.start(own_scale_address, cache, key_of(n), bounds);
        };
        if (n_begin < last) {
            copy.look_up(cache, key_of(n_begin), bounds);
            start_k(n_begin);
            start_v(n_begin);
            if (!IN_PARTS && n_begin + 1 < last) copy.look_up(cache, key_of(n_begin + 1), bounds);
        }
#endif

        load_queries<T, STORED, BLOCK_M, DIM, THREADS>(q_tile, head_dim, [&](int row) -> const T* {
            if (row >= rows) return nullptr;
            const int query = (first_row + row) / group_size, head = kv_head * group_size + (first_row + row) % group_size;
            return q_data + b * q_batch + query * q_row + head * q_head;
        });
        RowBounds<MT> row_bounds;
        const int first_end = seqlen - seqlen_q + 1;  // of query 0
        row_bounds.sink_tokens = sink_tokens;
        row_bounds.window = window;
        row_bounds.min_end = first_end + first_row / group_size;
        row_bounds.max_begin = window == 0 ? 0 : first_end + (first_row + rows - 1) / group_size - window;
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = m * 16 + group + half * 8;
                row_bounds.end[m][half] = row < rows ? first_end + (first_row + row) / group_size : 0;
            }
        SoftmaxState<DIM, MT> state;
        state.clear();
        __syncthreads();  // Q is there

        for (int n = n_begin; n < last; ++n) {
            float s[MT][KEYS / 8][4];
#if SM80
            const int stage = (n - n_begin) % STAGES;
            const unsigned k_tile = own_tiles + stage * 2 * TILE_BYTES, v_tile = k_tile + TILE_BYTES;
            const float* tile_scales = own_scales + stage * 2 * KEYS;
            cp_async_wait<STAGES - 2>();
            __syncwarp();  // the tile is there for all lanes, and all are done with the one before
            start_copies(n + STAGES - 1);
            multiply_qk<T, STORED, DIM, KEYS, MT>(s, q_tile + offsets.q, k_tile + offsets.k);
            scale_and_mask<STORED, KEYS, MT>(s, row_bounds, tile_scales, key_of(n), scale, softcap);
            update_softmax<DIM, KEYS, MT>(state, s);
            multiply_pv<T, STORED, DIM, KEYS, MT>(state, s, tile_scales, v_tile + offsets.v);
#else
            const int next = n + 1;
            copy.finish(own_tiles, cache, cache.k, key_of(n), bounds);
            scale_copy.finish(own_scale_address);
            __syncwarp();
            if (!IN_PARTS) start_k(next);
            multiply_qk<T, STORED, DIM, KEYS, MT>(s, q_tile + offsets.q, own_tiles + offsets.k);
            scale_and_mask<STORED, KEYS, MT>(s, row_bounds, own_scales, key_of(n), scale, softcap);
            update_softmax<DIM, KEYS, MT>(state, s);
            __syncwarp();  // all lanes are done with K
            v_copy.finish(own_tiles, cache, cache.v, key_of(n), bounds);
            __syncwarp();
            if (!IN_PARTS && next < last) start_v(next);
            if (!IN_PARTS && next + 1 < last) copy.look_up(cache, key_of(next + 1), bounds);
            multiply_pv<T, STORED, DIM, KEYS, MT>(state, s, own_scales, own_tiles + offsets.v);
            if (IN_PARTS && next < last) {
                copy.look_up(cache, key_of(next), bounds);
                start_k(next);
                start_v(next);
            }
            __syncwarp();  // all lanes are done with V and the scales
#endif
        }

        // Merge the warps: each scales its O to the common row max, and all add up 64 columns at a time.
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                state.row_sum[m][half] = row_sum_of(state.row_sum[m][half]);
                const int row = m * 16 + group + half * 8;
                if (pair == 0) {
                    row_stats[(warp * BLOCK_M + row) * 2] = state.row_max[m][half];
                    row_stats[(warp * BLOCK_M + row) * 2 + 1] = state.row_sum[m][half];
                }
            }
        const auto row_max_over_warps = [&](int row) {
            float row_max = negative_infinity();
#pragma unroll
            for (int w = 0; w < WARPS; ++w) row_max = fmaxf(row_max, row_stats[(w * BLOCK_M + row) * 2]);
            return row_max;
        };
        const auto row_sum_over_warps = [&](int row, float base) {
            float row_sum = 0.f;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                const float* stats = row_stats + (w * BLOCK_M + row) * 2;
                row_sum += stats[1] * exp2_approx(stats[0] - base);
            }
            return row_sum;
        };
        __syncthreads();  // the statistics are there, and all warps are done with their pipelines
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float row_max = row_max_over_warps(m * 16 + group + half * 8);
                const float factor = exp2_approx(state.row_max[m][half] - (row_max == negative_infinity() ? 0.f : row_max));
#pragma unroll
                for (int d = 0; d < DIM / 8; ++d) {
                    state.o[m][d][2 * half] *= factor;
                    state.o[m][d][2 * half + 1] *= factor;
                }
            }
        const bool whole = n_begin == 0 && n_end == tile_blocks;
        const long long slot = 2ll * program + (block != begin);
        if (split && threadIdx.x == 0 && n_begin == 0) {
            int* tile = partials.tiles + 2ll * (b * work_tiles + work_tile);
            tile[0] = static_cast<int>(slot);
            tile[1] = whole ? -1 : ranges.program_of(block + tile_blocks - 1);
        }
#pragma unroll
        for (int columns = 0; columns < DIM; columns += 64) {
#pragma unroll
            for (int m = 0; m < MT; ++m)
#pragma unroll
                for (int d = columns / 8; d < columns / 8 + 8; ++d)
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const int row = m * 16 + group + i / 2 * 8;
                        merge[(warp * BLOCK_M + row) * MERGE_ROW + column_of<STORED>(d, i % 2, pair) - columns] =
                            state.o[m][d][i];
                    }
            __syncthreads();
            for (int index = threadIdx.x; index < rows * 16; index += THREADS) {
                const int row = index / 16, column = index % 16 * 4;
                float4 sum = make_float4(0.f, 0.f, 0.f, 0.f);
#pragma unroll
                for (int w = 0; w < WARPS; ++w) {
                    const float4 part =
                        *reinterpret_cast<const float4*>(merge + (w * BLOCK_M + row) * MERGE_ROW + column);
                    sum.x += part.x, sum.y += part.y, sum.z += part.z, sum.w += part.w;
                }
                const float row_max = row_max_over_warps(row);
                const float row_sum = row_sum_over_warps(row, row_max == negative_infinity() ? 0.f : row_max);
                const bool first_column = columns == 0 && column == 0;
                if (whole) {
                    const OutputRow at = output_row(first_row + row, b, kv_head, seqlen_q, heads, group_size);
                    const RowResult result = finish_row(row_max, row_sum, load_sink(sinks, sink_type, at.head));
                    sum.x *= result.inverse, sum.y *= result.inverse, sum.z *= result.inverse, sum.w *= result.inverse;
                    if (columns + column < value_dim) store_four(o_data + at.o * value_dim + columns + column, sum);
                    if (first_column) lse_data[at.lse] = result.lse;
                } else {
                    *reinterpret_cast<float4*>(partials.o + (slot * BLOCK_M + row) * DIM + columns + column) = sum;
                    if (first_column)
                        *reinterpret_cast<float2*>(partials.stats + (slot * BLOCK_M + row) * 2) =
                            make_float2(row_max, row_sum);
                }
            }
            __syncthreads();  // before the next columns, or the next work tile's copies
        }

        block += n_end - n_begin;
        n_begin = 0;
        if (++work_tile == work_tiles) work_tile = 0, ++b;
    }
}

// Merges the partials of a work tile, in the order of the programs: m = max m_i, l = sum 2^(m_i - m) l_i,
// O = sum 2^(m_i - m) O_i / l. A row at a time: DIM / 4 threads take four columns each, of every LANES-th partial.
template <typename T, int DIM, int BLOCK_M>
__global__ void __launch_bounds__(128)
decode_combine(
    float* workspace, const void* sinks, T* o_data, float* lse_data, int programs, int seqlen_q, int heads,
    int group_size, int kv_heads, int row_tiles, int value_dim, int sink_type, int rows_per_block) {
    constexpr int COLUMN_THREADS = DIM / 4, LANES = 128 / COLUMN_THREADS;
    __shared__ float4 lane_o[128];
    __shared__ float2 lane_stats[128];
    const int work_tiles = kv_heads * row_tiles;
    const int b = static_cast<int>(blockIdx.x) / work_tiles, work_tile = static_cast<int>(blockIdx.x) % work_tiles;
    const int kv_head = work_tile / row_tiles, first_row = work_tile % row_tiles * BLOCK_M;
    const int rows = min(seqlen_q * group_size - first_row, BLOCK_M);
    const Workspace<BLOCK_M, DIM> partials(workspace, programs);
    pdl_enter();  // all blocks wait, or the next kernel could begin before the first has ended
    const int first_slot = partials.tiles[2 * blockIdx.x], last = partials.tiles[2 * blockIdx.x + 1];
    if (last < 0) return;
    const int first = first_slot / 2, column = static_cast<int>(threadIdx.x) % COLUMN_THREADS * 4;
    const int own_lane = static_cast<int>(threadIdx.x) / COLUMN_THREADS;
    const int row_end = min(rows, (static_cast<int>(blockIdx.y) + 1) * rows_per_block);
    for (int row = static_cast<int>(blockIdx.y) * rows_per_block; row < row_end; ++row) {
        float row_max = negative_infinity(), row_sum = 0.f;
        float4 o = make_float4(0.f, 0.f, 0.f, 0.f);
        const auto add = [&](const float2& stats, const float4& part) {
            const float higher = fmaxf(row_max, stats.x), base = higher == negative_infinity() ? 0.f : higher;
            const float rescale = exp2_approx(row_max - base), factor = exp2_approx(stats.x - base);
            row_max = higher;
            row_sum = row_sum * rescale + stats.y * factor;
            o.x = o.x * rescale + part.x * factor, o.y = o.y * rescale + part.y * factor;
            o.z = o.z * rescale + part.z * factor, o.w = o.w * rescale + part.w * factor;
        };
#pragma unroll 4
        for (int split = first + own_lane; split <= last; split += LANES) {
            const long long slot = split == first ? first_slot : 2ll * split;
            add(*reinterpret_cast<const float2*>(partials.stats + (slot * BLOCK_M + row) * 2),
                *reinterpret_cast<const float4*>(partials.o + (slot * BLOCK_M + row) * DIM + column));
        }
        lane_o[threadIdx.x] = o;
        lane_stats[threadIdx.x] = make_float2(row_max, row_sum);
        __syncthreads();
        if (own_lane == 0) {
#pragma unroll
            for (int other = 1; other < LANES; ++other)
                add(lane_stats[other * COLUMN_THREADS + threadIdx.x], lane_o[other * COLUMN_THREADS + threadIdx.x]);
            const OutputRow at = output_row(first_row + row, b, kv_head, seqlen_q, heads, group_size);
            const RowResult result = finish_row(row_max, row_sum, load_sink(sinks, sink_type, at.head));
            o.x *= result.inverse, o.y *= result.inverse, o.z *= result.inverse, o.w *= result.inverse;
            if (column < value_dim) store_four(o_data + at.o * value_dim + column, o);
            if (column == 0) lse_data[at.lse] = result.lse;
        }
        __syncthreads();
    }
}
