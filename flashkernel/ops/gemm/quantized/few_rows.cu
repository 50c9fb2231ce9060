// A linear layer whose weight is quantized, for few rows of x, plain or for the experts of a mixture: y^T = W x^T, and
// an epilogue. Bound by the bytes of the weight.
//
// - x stays in registers: the warps of a block divide the columns of the sum among them, UNITS units of 64 each, and
//   hold x there as the right matrix of mma (m16n8k16). Work items are tiles of 16 weight rows.
// - A thread copies the 16 bytes that it multiplies itself (blocks/weight_formats/tiles.py) by cp.async, DEPTH work
//   items ahead, and waits for its own copies alone: no barrier stands between a copy and its product.
// - A pair of 4-bit weights takes a shift and a logic operation (Unscaled of dequantize.cuh). Scales multiply the sums
//   of a group, in float32; sums start at -OFFSET sum(x), which is computed once.
// - Products are in float16. x in bfloat16 is multiplied by a power of two for each token and warp, so that its largest
//   element is near 2^15: elements down to 2^-32 of that are exact, and smaller ones off by less than 2^-40 of it.
// - The partial sums of the warps are added through shared memory by 128 threads, another 128 for each work item, in
//   the order of the warps. Where `slices` blocks share a sum, the last of them to arrive adds their parts in order.
// - Work items of a block follow one another in memory, so that a block sees one or two experts; x is loaded again when
//   expert or rows change. Experts without rows are no work. Offsets are read on the device.

#include "epilogue.cuh"
#include "mma.cuh"
#include "dequantize.cuh"

constexpr int TILE_ROWS = 16, ROWS_OF_BLOCK = 64, UNIT_COLUMNS = 64, REDUCERS = 128;

enum GateRows { NO_GATE, TWO_MATRICES, INTERLEAVED };

#ifndef OUT_TYPE
#define OUT_TYPE __nv_bfloat16
#endif

// A work item: 16 weight rows of an expert, and TOKENS of its rows of y.
struct WorkItem {
    int expert, chunk, tile;
};

template <int FORMAT, int TOKENS, int WARPS, int UNITS, int SPAN, int DEPTH, int GATE>
struct FewRowsBuffers {
    static constexpr bool EIGHT_BITS = FORMAT == INT8 || FORMAT == INT8_ZEROS;
    static constexpr bool ZEROS = FORMAT == INT4_ZEROS || FORMAT == INT8_ZEROS;
    static constexpr int THREADS = WARPS * WARP, PARTS = GATE == TWO_MATRICES ? 2 : 1, LOADS = EIGHT_BITS ? 2 : 1;
    static constexpr int SPANS = UNITS * 4 / SPAN;  // groups of SPAN products that share scales, of a warp
    static constexpr unsigned SCALE = FORMAT == MXFP4 ? 1 : 2;
    static constexpr unsigned SPAN_SCALES = TILE_ROWS * SCALE, SPAN_BYTES = SPAN_SCALES + (ZEROS ? TILE_ROWS : 0);
    static constexpr unsigned DATA = PARTS * UNITS * LOADS * THREADS * 16;
    static constexpr unsigned SLOT = DATA + WARPS * PARTS * SPANS * SPAN_BYTES;
    static constexpr int SUMS = PARTS * (TOKENS / 8) * 128;  // of a warp, floats
    static constexpr int FACTORS = (SPANS + 1) * (TOKENS / 8) * 4;  // of a warp, pairs of floats
    static constexpr unsigned PARTIAL = DEPTH * SLOT, FACTOR = PARTIAL + 2 * WARPS * SUMS * 4;
    static constexpr unsigned COUNTS = FACTOR + WARPS * FACTORS * 8;
};

template <typename T, int FORMAT, int GROUP, int TOKENS, int WARPS, int UNITS, int SPAN, int DEPTH, int GATE,
          bool GROUPED, bool SPLIT>
__global__ void __launch_bounds__(WARPS* WARP, 1) linear_quantized_few(
    const T* x, const int* gather, const int* offsets, const unsigned char* data, const unsigned char* scales,
    const unsigned char* zeros, const unsigned char* up_data, const unsigned char* up_scales,
    const unsigned char* up_zeros, const BIAS_TYPE* bias, const BIAS_TYPE* up_bias, const RESIDUAL_TYPE* residual,
    OUT_TYPE* y, float* workspace, int* counters, long long x_stride, long long bias_stride, long long residual_stride,
    long long y_stride, int bias_step, int rows, int outputs, int units, int scale_groups, int group_units, int slices,
    int slice_units, int experts, int expert_tiles) {
    using B = FewRowsBuffers<FORMAT, TOKENS, WARPS, UNITS, SPAN, DEPTH, GATE>;
    using W = Unscaled<FORMAT>;
    static_assert(WARPS >= 4 && (UNITS * 4) % SPAN == 0, "four warps reduce; spans are whole");
    static_assert(GROUP == 32 ? SPAN == 2 : SPAN == 4 || SPAN == 8 && GROUP == 128, "a span has one scale");
    static_assert(B::SPANS * B::SCALE <= WARP, "a lane copies the scales of eight or sixteen rows of a span");
    constexpr int PARTS = B::PARTS, BLOCKS = TOKENS / 8, LOADS = B::LOADS;
    constexpr unsigned TILE = ROWS_OF_BLOCK * UNIT_COLUMNS / (B::EIGHT_BITS ? 1 : 2);
    extern __shared__ __align__(16) unsigned char shared[];
    const int thread = threadIdx.x, warp = thread / WARP, lane = thread % WARP, g = lane / 4, t = lane % 4;
    const unsigned ring = shared_address(shared);
    float* partial = reinterpret_cast<float*>(shared + B::PARTIAL);
    int* const flag = reinterpret_cast<int*>(shared + B::COUNTS);  // of each 128 threads
    int* const chunks = flag + WARPS / 4;                          // by expert
    const int row_tiles = (GATE == INTERLEAVED ? 2 : 1) * outputs / TILE_ROWS;

    // The rows of y that an expert has, in chunks of TOKENS.
    int total = 0;
    if (GROUPED) {
        if (gather != nullptr) griddepcontrol_wait();  // the offsets are new; a product after it finds them complete
        for (int expert = thread; expert < experts; expert += B::THREADS)
            chunks[expert] = (offsets[expert + 1] - offsets[expert] + TOKENS - 1) / TOKENS;
        __syncthreads();
        for (int expert = 0; expert < experts; ++expert) total += chunks[expert];
    } else {
        total = (rows + TOKENS - 1) / TOKENS;
    }
    const int all_chunks = total;
    total *= row_tiles;
    if (!SPLIT) slices = 1;
    const int slice = blockIdx.x % slices, member = blockIdx.x / slices, members = gridDim.x / slices;
    const int first = static_cast<int>(static_cast<long long>(total) * member / members);
    const int last = static_cast<int>(static_cast<long long>(total) * (member + 1) / members);
    WorkItem ahead = {0, first / row_tiles, first % row_tiles};
    if (GROUPED)
        while (ahead.expert < experts && ahead.chunk >= chunks[ahead.expert]) ahead.chunk -= chunks[ahead.expert++];
    auto advance = [&](WorkItem& item) {
        if (++item.tile < row_tiles) return;
        item.tile = 0;
        if (++item.chunk < (GROUPED ? chunks[item.expert] : all_chunks)) return;
        item.chunk = 0;
        if (GROUPED)
            do ++item.expert;
            while (item.expert < experts && chunks[item.expert] == 0);
    };

    // This warp's units of the sum. A thread copies its own weights; lanes share the copies of the scales.
    const int first_unit = slice * slice_units + warp * UNITS;
    const int end_unit = min(units, (slice + 1) * slice_units), mine = min(UNITS, end_unit - first_unit);  // may be < 0
    const unsigned data_slot = ring + thread * 16;
    const unsigned scale_slot = ring + B::DATA + warp * PARTS * B::SPANS * B::SPAN_BYTES;
    auto group_of = [&](int span) {
        const int unit = first_unit + span * SPAN / 4;
        return GROUP == 32 ? unit * 2 + span % 2 : unit / group_units;
    };
    const int scale_span = lane / B::SCALE, zero_span = lane;
    const bool copies_scale = scale_span < B::SPANS, copies_zero = B::ZEROS && zero_span < B::SPANS;
    const unsigned scale_at = group_of(scale_span) * ROWS_OF_BLOCK * B::SCALE + lane % B::SCALE * 16;
    const unsigned zero_at = B::ZEROS ? group_of(zero_span) * ROWS_OF_BLOCK : 0;

    auto data_of = [&](const WorkItem& item, int part) {
        const unsigned tile = item.expert * expert_tiles + item.tile;
        return (part ? up_data : data) + Index(tile / 4 * units + first_unit) * TILE + (tile % 4 * 512 + lane * 16);
    };
    auto copy_unit = [&](const unsigned char* from, unsigned slot, int part, int unit) {
#pragma unroll
        for (int load = 0; load < LOADS; ++load)
            cp_async_16(data_slot + slot + ((part * UNITS + unit) * LOADS + load) * B::THREADS * 16,
                        from + unit * TILE + load * 2048, unit < mine);
    };
    auto copy_scales = [&](const WorkItem& item, unsigned slot, int part) {
        const unsigned tile = item.expert * expert_tiles + item.tile;  // expert_tiles: from one expert to the next
        const unsigned target = scale_slot + slot + part * B::SPANS * B::SPAN_BYTES;
        const Index at = Index(tile / 4 * scale_groups) * ROWS_OF_BLOCK + tile % 4 * TILE_ROWS;
        if (copies_scale)
            cp_async_16(target + lane * 16, (part ? up_scales : scales) + at * B::SCALE + scale_at,
                        scale_span * SPAN / 4 < mine);
        if (copies_zero)
            cp_async_16(target + B::SPANS * B::SPAN_SCALES + lane * 16, (part ? up_zeros : zeros) + at + zero_at,
                        zero_span * SPAN / 4 < mine);
    };

    WorkItem item = ahead;
#pragma unroll
    for (int slot = 0; slot < DEPTH; ++slot) {
        if (first + slot < last) {
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const unsigned char* from = data_of(ahead, part);
#pragma unroll
                for (int unit = 0; unit < UNITS; ++unit) copy_unit(from, slot * B::SLOT, part, unit);
                copy_scales(ahead, slot * B::SLOT, part);
            }
            advance(ahead);
        }
        cp_async_commit();
    }
    if (!GROUPED || gather == nullptr) griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    unsigned right[UNITS * 4][BLOCKS][2];  // x, in float16
    // For tokens 2 t and 2 t + 1, by span: sums of x, times -OFFSET without stored zero points. Behind the last span:
    // what x was divided by.
    float2* const factors = reinterpret_cast<float2*>(shared + B::FACTOR) + warp * B::FACTORS + t;
    int expert = -1, chunk = -1, begin = 0, end = rows;
    unsigned slot = 0;
    for (int index = first; index < last; ++index, advance(item)) {
        if (item.expert != expert || item.chunk != chunk) {
            expert = item.expert, chunk = item.chunk;
            if (GROUPED) begin = offsets[expert], end = offsets[expert + 1];
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                const int row = begin + chunk * TOKENS + block * 8 + g;
                const Index from = row < end ? (GROUPED && gather != nullptr ? gather[row] : row) : 0;
                const T* source = x + from * x_stride + Index(first_unit) * UNIT_COLUMNS + 2 * t;
#pragma unroll
                for (int step = 0; step < UNITS * 4; ++step)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        right[step][block][half] = row < end && step / 4 < mine
                            ? *reinterpret_cast<const unsigned*>(source + step * 16 + half * 8) : 0u;
            }
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                float undo[2] = {1.f, 1.f};
                if (sizeof(T) == 2 && Half<T>::FRACTION == 6) {  // bfloat16
                    unsigned largest = 0;                        // of the absolute values, as bits of float32
#pragma unroll
                    for (int i = 0; i < UNITS * 8; ++i) {
                        const unsigned pair = right[i / 2][block][i % 2];
                        largest = max(largest, max(pair << 16 & 0x7fffffffu, pair & 0x7fff0000u));
                    }
                    largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, 1));
                    largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, 2));
                    const int exponent = min(254, 268 - static_cast<int>(largest >> 23));  // biased by 127, as 14 - e
                    const float factor = __uint_as_float(exponent << 23);
#pragma unroll
                    for (int i = 0; i < UNITS * 8; ++i)
                        right[i / 2][block][i % 2] = to_half(right[i / 2][block][i % 2], factor, T());
#pragma unroll
                    for (int i = 0; i < 2; ++i)
                        undo[i] = __uint_as_float((254 - __shfl_sync(ALL_LANES, exponent, t * 8 + i * 4)) << 23);
                }
                if (g == 0) factors[(B::SPANS * BLOCKS + block) * 4] = make_float2(undo[0], undo[1]);
                const unsigned one = 0x3c003c00u, ones[4] = {one, one, one, one};
                if (W::ZEROS || W::OFFSET != 0.f)
#pragma unroll
                    for (int span = 0; span < B::SPANS; ++span) {
                        float sum[4] = {};
#pragma unroll
                        for (int step = span * SPAN; step < (span + 1) * SPAN; ++step)
                            mma<__half>(sum, ones, right[step][block][0], right[step][block][1]);
                        constexpr float BY = W::ZEROS ? -W::UNIT : -W::UNIT * W::OFFSET;
                        if (g == 0) factors[(span * BLOCKS + block) * 4] = make_float2(sum[0] * BY, sum[1] * BY);
                    }
            }
        }
        cp_async_wait<DEPTH - 1>();
        __syncwarp();  // other lanes copied this one's scales, and wrote its factors
        const bool more = index + DEPTH < last;
        float* const mine_partial = partial + ((index - first) % 2 * WARPS + warp) * B::SUMS;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const unsigned char* from = data_of(ahead, part);
            float result[BLOCKS][4] = {}, acc[BLOCKS][4];
#pragma unroll
            for (int unit = 0; unit < UNITS; ++unit) {
                unsigned words[4 * LOADS];
#pragma unroll
                for (int load = 0; load < LOADS; ++load) {
                    const uint4 loaded =
                        load_shared_16(data_slot + slot + ((part * UNITS + unit) * LOADS + load) * B::THREADS * 16);
                    words[4 * load] = loaded.x, words[4 * load + 1] = loaded.y;
                    words[4 * load + 2] = loaded.z, words[4 * load + 3] = loaded.w;
                }
                if (more) copy_unit(from, slot, part, unit);
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    const int step = unit * 4 + j, span = step / SPAN;
                    const unsigned stored = scale_slot + slot + part * B::SPANS * B::SPAN_BYTES;
                    if (step % SPAN == 0) {
                        float zero[2] = {};
                        if (W::ZEROS) {
                            const unsigned both =
                                load_shared_2(stored + B::SPANS * B::SPAN_SCALES + span * TILE_ROWS + 2 * g);
#pragma unroll
                            for (int row = 0; row < 2; ++row) {
                                const unsigned byte = both >> 8 * row & 0xff;
                                const int value = W::EIGHT_BITS ? static_cast<signed char>(byte) : int(byte);
                                zero[row] = static_cast<float>(value) + W::BASE;
                            }
                        }
#pragma unroll
                        for (int block = 0; block < BLOCKS; ++block) {
                            float2 sum = {0.f, 0.f};
                            if (W::ZEROS || W::OFFSET != 0.f) sum = factors[(span * BLOCKS + block) * 4];
#pragma unroll
                            for (int i = 0; i < 4; ++i)
                                acc[block][i] = (i % 2 ? sum.y : sum.x) * (W::ZEROS ? zero[i / 2] : 1.f);
                        }
                    }
                    unsigned a[4];
                    W::registers(a, words, j);
#pragma unroll
                    for (int block = 0; block < BLOCKS; ++block)
                        mma<__half>(acc[block], a, right[step][block][0], right[step][block][1]);
                    if (step % SPAN == SPAN - 1) {
                        float scale[2];
                        if (FORMAT == MXFP4) {
                            const unsigned both = load_shared_2(stored + span * B::SPAN_SCALES + 2 * g);
                            scale[0] = e8m0_and_a_half(both << 23), scale[1] = e8m0_and_a_half(both << 15);
                        } else {
                            const unsigned word = load_shared_4(stored + span * B::SPAN_SCALES + 4 * g);
                            const float2 both = __half22float2(reinterpret_cast<const __half2&>(word));
                            scale[0] = both.x, scale[1] = both.y;
                        }
#pragma unroll
                        for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
                            for (int i = 0; i < 4; ++i) result[block][i] += scale[i / 2] * acc[block][i];
                    }
                }
            }
            __syncwarp();  // all lanes have read their scales
            if (more) copy_scales(ahead, slot, part);
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
#pragma unroll
                for (int i = 0; i < 4; ++i) result[block][i] *= W::FACTOR;
                const float2 undo = factors[(B::SPANS * BLOCKS + block) * 4];
                reinterpret_cast<float4*>(mine_partial)[(part * BLOCKS + block) * WARP + lane] =
                    make_float4(result[block][0] * undo.x, result[block][1] * undo.y, result[block][2] * undo.x,
                                result[block][3] * undo.y);
            }
        }
        cp_async_commit();
        if (more) advance(ahead);
        slot = slot + B::SLOT == DEPTH * B::SLOT ? 0 : slot + B::SLOT;
        // The sums of the item before last are read no more: their readers came to this barrier's predecessor after it.
        __syncthreads();
        const int team = warp / 4;
        if (team != (index - first) % (WARPS / 4)) continue;

        // Element e of a block of 16 x 8 sums: row e / 16 + 8 (e / 2 % 2), token 2 (e / 4 % 4) + e % 2.
        const int e = thread % REDUCERS;
        const float* found = partial + (index - first) % 2 * WARPS * B::SUMS + e;
        auto sum_of_warps = [&](int at) {
            float sum = 0.f;
#pragma unroll 4
            for (int other = 0; other < WARPS; ++other) sum += found[other * B::SUMS + at];
            return sum;
        };
        float* place = workspace + Index(index) * slices * B::SUMS + e;
        if (SPLIT) {
#pragma unroll 1
            for (int i = 0; i < PARTS * BLOCKS; ++i)
                __stcg(place + slice * B::SUMS + i * REDUCERS, sum_of_warps(i * REDUCERS));
            __threadfence();
            named_barrier_sync(1 + team, REDUCERS);
            if (e == 0) {
                const bool complete = atomicAdd(counters + index, 1) == slices - 1;
                if (complete) counters[index] = 0;  // as the next launch wants to find it
                __threadfence();
                flag[team] = complete;
            }
            named_barrier_sync(1 + team, REDUCERS);
            if (!flag[team]) continue;
        }
        auto summed = [&](int at) {
            if (!SPLIT) return sum_of_warps(at);
            float sum = 0.f;
#pragma unroll 1
            for (int other = 0; other < slices; ++other) sum += __ldcg(place + other * B::SUMS + at);
            return sum;
        };
        const int row = e / 16 + (e >> 1 & 1) * 8;
        if (GATE == INTERLEAVED && row % 2) continue;
        const int weight_row = item.tile * TILE_ROWS + row;
        const int output_at = GATE == INTERLEAVED ? weight_row / 2 : weight_row;
        const BIAS_TYPE* bias_at = bias + Index(expert) * bias_stride + output_at * bias_step;
        const BIAS_TYPE* up_bias_at = up_bias + Index(expert) * bias_stride + output_at * bias_step;
#pragma unroll 1
        for (int block = 0; block < BLOCKS; ++block) {
            const int token = begin + chunk * TOKENS + block * 8 + (e >> 2 & 3) * 2 + (e & 1);
            if (token >= end) continue;
            const float value = summed(block * REDUCERS);
            const float up = GATE == TWO_MATRICES ? summed((BLOCKS + block) * REDUCERS)
                : GATE == INTERLEAVED ? summed(block * REDUCERS + 16) : 0.f;
            const RESIDUAL_TYPE* added = residual + Index(token) * residual_stride + output_at;
            Output output = {value, up, bias_at, up_bias_at, added, GATE != NO_GATE};
            EPILOGUE
            assign(y[Index(token) * y_stride + output_at], output.value);
        }
    }
}
