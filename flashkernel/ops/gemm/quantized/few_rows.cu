// A linear layer whose weight is quantised, for few rows of x, plain or for the experts of a mixture: y^T = W x^T, and an
// epilogue. Bound by the bytes of the weight; no weight goes through shared memory that another thread reads.
//
// - x stays in registers: the warps of a block divide the columns of the sum among them, UNITS units of 64 each, and hold
//   x there as the right matrix of mma (m16n8k16) for the whole launch. Work items are tiles of 16 weight rows.
// - A thread copies the 16 bytes that it multiplies itself (blocks/weight_formats/tiles.py) by cp.async, DEPTH work items
//   ahead, and waits for its own copies alone: no barriers between copies and products, and up to 200 KB under way on an SM.
// - A pair of 4-bit weights takes a shift and a logic operation (Unscaled of dequantize.cuh). Scales multiply the sums
//   of a group, in float32; sums start at -OFFSET sum(x), which is computed once.
// - The partial sums of the warps are added through shared memory by 128 threads, another 128 for each work item, in the
//   order of the warps. Where the sum is split among `slices` blocks, the last of them to arrive adds their sums in order.
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
    static constexpr unsigned DATA = PARTS * UNITS * LOADS * THREADS * 16, SCALES = PARTS * SPANS * THREADS * 4;
    static constexpr unsigned SLOT = DATA + SCALES * (ZEROS ? 2 : 1);
    static constexpr int SUMS = PARTS * (TOKENS / 8) * 128;  // of a warp, floats
    static constexpr unsigned PARTIAL = DEPTH * SLOT, COUNTS = PARTIAL + 2 * WARPS * SUMS * 4;
};

template <typename T, int FORMAT, int GROUP, int TOKENS, int WARPS, int UNITS, int SPAN, int DEPTH, int GATE, bool GROUPED>
__global__ void __launch_bounds__(WARPS* WARP, 1) linear_quantized_few(
    const T* x, const int* gather, const int* offsets, const unsigned char* data, const unsigned char* scales,
    const unsigned char* zeros, const unsigned char* up_data, const unsigned char* up_scales,
    const unsigned char* up_zeros, const BIAS_TYPE* bias, const BIAS_TYPE* up_bias, const RESIDUAL_TYPE* residual,
    OUT_TYPE* y, float* workspace, int* counters, long long x_stride, long long bias_stride, long long residual_stride,
    long long y_stride, int bias_step, int rows, int outputs, int units, int scale_groups, int group_units, int slices,
    int slice_units, int experts) {
    using B = FewRowsBuffers<FORMAT, TOKENS, WARPS, UNITS, SPAN, DEPTH, GATE>;
    using W = Unscaled<T, FORMAT>;
    static_assert(WARPS >= 4 && (UNITS * 4) % SPAN == 0, "four warps reduce; spans are whole");
    static_assert(GROUP == 32 ? SPAN == 2 : SPAN == 4 || SPAN == 8 && GROUP == 128, "a span has one scale");
    constexpr int PARTS = B::PARTS, BLOCKS = TOKENS / 8, LOADS = B::LOADS;
    constexpr unsigned TILE = ROWS_OF_BLOCK * UNIT_COLUMNS / (B::EIGHT_BITS ? 1 : 2), SCALE = FORMAT == MXFP4 ? 1 : 2;
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

    // This warp's units of the sum, and where in a row of scales their spans have theirs.
    const int first_unit = slice * slice_units + warp * UNITS;
    const int end_unit = min(units, (slice + 1) * slice_units), mine = min(UNITS, end_unit - first_unit);  // may be < 0
    unsigned scale_at[B::SPANS];
#pragma unroll
    for (int span = 0; span < B::SPANS; ++span) {
        const int unit = first_unit + span * SPAN / 4;
        scale_at[span] = (GROUP == 32 ? unit * 2 + span % 2 : unit / group_units) * ROWS_OF_BLOCK * SCALE;
    }
    const int pair_of_bytes = 2 * (g & ~1);  // four bytes, of which this thread wants two
    const unsigned data_slot = ring + thread * 16, scale_slot = ring + B::DATA + thread * 4;

    struct Sources {
        const unsigned char *data, *scales, *zeros;
    };
    auto sources = [&](const WorkItem& item, int part) {
        const Index tile = Index(item.expert) * row_tiles + item.tile, block = tile / 4;
        const int within = static_cast<int>(tile % 4);
        const Index scale = block * scale_groups * ROWS_OF_BLOCK + within * TILE_ROWS;
        return Sources{(part ? up_data : data) + (block * units + first_unit) * TILE + within * 512 + lane * 16,
                       (part ? up_scales : scales) + (FORMAT == MXFP4 ? scale + pair_of_bytes : (scale + 2 * g) * 2),
                       B::ZEROS ? (part ? up_zeros : zeros) + scale + pair_of_bytes : nullptr};
    };
    auto copy_unit = [&](const Sources& from, unsigned slot, int part, int unit) {
#pragma unroll
        for (int load = 0; load < LOADS; ++load)
            cp_async_16(data_slot + slot + ((part * UNITS + unit) * LOADS + load) * B::THREADS * 16,
                        from.data + unit * TILE + load * 2048, unit < mine);
    };
    auto copy_scales = [&](const Sources& from, unsigned slot, int part, int span) {
        const unsigned target = scale_slot + slot + (part * B::SPANS + span) * B::THREADS * 4;
        const bool inside = span * SPAN / 4 < mine;
        cp_async_4(target, from.scales + scale_at[span], inside);
        if (B::ZEROS) cp_async_4(target + B::SCALES, from.zeros + scale_at[span] / SCALE, inside);
    };

    WorkItem item = ahead;
#pragma unroll
    for (int slot = 0; slot < DEPTH; ++slot) {
        if (first + slot < last) {
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
                const Sources from = sources(ahead, part);
#pragma unroll
                for (int unit = 0; unit < UNITS; ++unit) copy_unit(from, slot * B::SLOT, part, unit);
#pragma unroll
                for (int span = 0; span < B::SPANS; ++span) copy_scales(from, slot * B::SLOT, part, span);
            }
            advance(ahead);
        }
        cp_async_commit();
    }
    if (!GROUPED || gather == nullptr) griddepcontrol_wait();
    griddepcontrol_launch_dependents();

    unsigned right[UNITS * 4][BLOCKS][2];  // x
    float sums[B::SPANS][BLOCKS][2];       // of x, for tokens 2 t and 2 t + 1; times -OFFSET without stored zero points
    int expert = -1, chunk = -1, begin = 0, end = rows;
    unsigned slot = 0;
    for (int index = first; index < last; ++index, advance(item)) {
        if (item.expert != expert || item.chunk != chunk) {
            expert = item.expert, chunk = item.chunk;
            if (GROUPED) begin = offsets[expert], end = offsets[expert + 1];
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block) {
                const int row = begin + chunk * TOKENS + block * 8 + g;
                const Index from = row < end ? (gather != nullptr ? gather[row] : row) : 0;
                const T* source = x + from * x_stride + Index(first_unit) * UNIT_COLUMNS + 2 * t;
#pragma unroll
                for (int step = 0; step < UNITS * 4; ++step)
#pragma unroll
                    for (int half = 0; half < 2; ++half)
                        right[step][block][half] = row < end && step / 4 < mine
                            ? *reinterpret_cast<const unsigned*>(source + step * 16 + half * 8) : 0u;
            }
            if (W::ZEROS || W::OFFSET != 0.f) {
                const unsigned one = pack<T>(1.f, 1.f), ones[4] = {one, one, one, one};
#pragma unroll
                for (int span = 0; span < B::SPANS; ++span)
#pragma unroll
                    for (int block = 0; block < BLOCKS; ++block) {
                        float sum[4] = {};
#pragma unroll
                        for (int step = span * SPAN; step < (span + 1) * SPAN; ++step)
                            mma<T>(sum, ones, right[step][block][0], right[step][block][1]);
#pragma unroll
                        for (int i = 0; i < 2; ++i)
                            sums[span][block][i] = W::ZEROS ? sum[i] : sum[i] * (-W::OFFSET / W::FACTOR);
                    }
            }
        }
        cp_async_wait<DEPTH - 1>();
        const bool more = index + DEPTH < last;
        float* const mine_partial = partial + ((index - first) % 2 * WARPS + warp) * B::SUMS;
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const Sources from = sources(ahead, part);
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
                    const unsigned stored = scale_slot + slot + (part * B::SPANS + span) * B::THREADS * 4;
                    if (step % SPAN == 0) {
                        float zero[2] = {};
                        if (W::ZEROS) {
                            const unsigned both = load_shared_4(stored + B::SCALES) >> 16 * (g & 1);
#pragma unroll
                            for (int row = 0; row < 2; ++row) {
                                const unsigned byte = both >> 8 * row & 0xff;
                                const int value = W::EIGHT_BITS ? static_cast<signed char>(byte) : static_cast<int>(byte);
                                zero[row] = (static_cast<float>(value) + W::BASE) * (-1.f / W::FACTOR);
                            }
                        }
#pragma unroll
                        for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
                            for (int i = 0; i < 4; ++i)
                                acc[block][i] = W::ZEROS ? zero[i / 2] * sums[span][block][i % 2]
                                    : W::OFFSET != 0.f ? sums[span][block][i % 2] : 0.f;
                    }
                    unsigned a[4];
                    W::registers(a, words, j);
#pragma unroll
                    for (int block = 0; block < BLOCKS; ++block)
                        mma<T>(acc[block], a, right[step][block][0], right[step][block][1]);
                    if (step % SPAN == SPAN - 1) {
                        const unsigned word = load_shared_4(stored);
                        float scale[2];
                        if (FORMAT == MXFP4) {
                            const unsigned both = word >> 16 * (g & 1);
                            scale[0] = power_of_two(both & 0xff), scale[1] = power_of_two(both >> 8 & 0xff);
                        } else {
                            const float2 both = __half22float2(reinterpret_cast<const __half2&>(word));
                            scale[0] = both.x, scale[1] = both.y;
                        }
                        if (more) copy_scales(from, slot, part, span);
#pragma unroll
                        for (int block = 0; block < BLOCKS; ++block)
#pragma unroll
                            for (int i = 0; i < 4; ++i) result[block][i] += scale[i / 2] * acc[block][i];
                    }
                }
            }
#pragma unroll
            for (int block = 0; block < BLOCKS; ++block)
                reinterpret_cast<float4*>(mine_partial)[(part * BLOCKS + block) * WARP + lane] =
                    make_float4(result[block][0] * W::FACTOR, result[block][1] * W::FACTOR, result[block][2] * W::FACTOR,
                                result[block][3] * W::FACTOR);
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
        int count = WARPS, stride = B::SUMS;
        if (slices > 1) {
            float* place = workspace + Index(index) * slices * B::SUMS + e;
#pragma unroll
            for (int i = 0; i < PARTS * BLOCKS; ++i) {
                float sum = 0.f;
#pragma unroll
                for (int other = 0; other < WARPS; ++other) sum += found[other * B::SUMS + i * REDUCERS];
                __stcg(place + slice * B::SUMS + i * REDUCERS, sum);
            }
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
            found = place, count = slices;
        }
        auto summed = [&](int at) {
            float sum = 0.f;
            if (slices > 1)
                for (int other = 0; other < count; ++other) sum += __ldcg(found + other * stride + at);
            else
#pragma unroll
                for (int other = 0; other < WARPS; ++other) sum += found[other * B::SUMS + at];
            return sum;
        };
        const int row = e / 16 + (e >> 1 & 1) * 8;
        if (GATE == INTERLEAVED && row % 2) continue;
        const int place = item.tile * TILE_ROWS + row, output_at = GATE == INTERLEAVED ? place / 2 : place;
        const BIAS_TYPE* bias_at = bias + Index(expert) * bias_stride + output_at * bias_step;
        const BIAS_TYPE* up_bias_at = up_bias + Index(expert) * bias_stride + output_at * bias_step;
#pragma unroll
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
