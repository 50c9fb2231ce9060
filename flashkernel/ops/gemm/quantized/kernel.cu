// A linear layer whose weight is quantized, for sm_90a: y^T = W x^T, and an epilogue.
//
// W is the left matrix of wgmma and comes from registers: a thread loads 16 bytes, which are its own elements of a tile of
// 64 outputs x 64 columns (blocks/weight_formats/tiles.py), and dequantizes them (dequantize.cuh). x is the right matrix, in
// shared memory: TOKENS rows of x are columns of the product, 8 to 256. One kernel so serves a single row, bound by the
// weight's bytes, and thousands of rows, bound by the tensor cores.
//
// - Two producer warps fill a ring of STAGES buffers: x by TMA, tiles and scales by bulk copies, contiguous in memory.
//   The weight is constant, so with programmatic dependent launch its first tiles are loaded while the kernel before still
//   runs; x waits for that one.
// - WARPGROUPS consumer warpgroups have HEIGHT times 64 outputs each and share x. A step of BLOCKS x 64 columns is four
//   products of 16 each; while two of them run, the registers of the next two are dequantized. Of a gated layer, two
//   warpgroups have the gate's and up's rows of the same outputs.
// - Stream-K: blocks take whole tiles while there is one for each, and equal shares of the remaining tiles' steps. A
//   block whose share ends within a tile stores partial sums; the last to arrive adds them in the order of the blocks.

#include "epilogue.cuh"
#include "mma.cuh"
#include "dequantize.cuh"
#include "wgmma_registers.cuh"

constexpr int OUTPUTS = 64, COLUMNS = 64, GROUP_THREADS = 128;  // of a tile, and a warpgroup
constexpr int PITCH = OUTPUTS + 4;                              // floats between tokens in the transposing buffer

#ifndef OUT_TYPE
#define OUT_TYPE __nv_bfloat16
#endif
#ifndef ELEMENTWISE_EPILOGUE  // 1: the epilogue has no residual and no gate, and outputs have 16 bits
#define ELEMENTWISE_EPILOGUE 0
#endif

struct Segment {
    int tile, begin, end;  // steps [begin, end) of a tile
};

// The work of a block. quantized/schedule.py has the same in Python, where it is tested.
struct Schedule {
    int whole, steps, units, tile, unit, last;

    __device__ inline Schedule(int whole, int tiles, int steps)
        : whole(whole), steps(steps), units((tiles - whole) * steps), tile(blockIdx.x), unit(first_unit(blockIdx.x)),
          last(first_unit(blockIdx.x + 1)) {}

    __device__ inline int first_unit(int block) const {
        return static_cast<int>(static_cast<long long>(units) * block / gridDim.x);
    }
    // The block whose share has a unit.
    __device__ inline int block_of(int of) const {
        return static_cast<int>(((of + 1ll) * gridDim.x - 1) / units);
    }
    __device__ inline bool next(Segment& segment) {
        if (tile < whole) {
            segment = {tile, 0, steps};
            tile += gridDim.x;
            return true;
        }
        if (unit >= last) return false;
        const int begin = unit % steps;
        segment = {whole + unit / steps, begin, min(steps, begin + last - unit)};
        unit += segment.end - begin;
        return true;
    }
};

struct TilePosition {
    int row, column;  // in tiles of tokens and of outputs
};

// Tiles that run at the same time cover a near-square of tokens and outputs, whose operands stay in the L2 cache.
__device__ inline TilePosition tile_position(int tile, int row_tiles, int column_tiles) {
    constexpr int HEIGHT = 16;
    const int per_group = HEIGHT * column_tiles, first = tile / per_group * HEIGHT;
    const int rows = min(row_tiles - first, HEIGHT);
    return {first + tile % per_group % rows, tile % per_group / rows};
}

template <int FORMAT, int GROUP, int TOKENS, int WARPGROUPS, int BLOCKS, int STAGES, int HEIGHT>
struct Buffers {
    static constexpr int TALL = WARPGROUPS * HEIGHT;  // tiles of 64 outputs
    static constexpr bool EIGHT_BITS = FORMAT == INT8 || FORMAT == INT8_ZEROS;
    static constexpr bool ZEROS = FORMAT == INT4_ZEROS || FORMAT == INT8_ZEROS;
    static constexpr unsigned TILE = OUTPUTS * COLUMNS / (EIGHT_BITS ? 1 : 2);
    static constexpr int SCALES = BLOCKS * COLUMNS > GROUP ? BLOCKS * COLUMNS / GROUP : 1;  // of an output, in a step
    static constexpr unsigned SCALE = FORMAT == MXFP4 ? 1 : 2;                              // bytes
    static constexpr unsigned X_BLOCK = TOKENS * COLUMNS * 2, X = BLOCKS * X_BLOCK;
    static constexpr unsigned W_GROUP = BLOCKS * TILE, S_GROUP = SCALES * OUTPUTS * SCALE;
    static constexpr unsigned Z_GROUP = ZEROS ? SCALES * OUTPUTS : 0;
    static constexpr unsigned W = X, S = W + TALL * W_GROUP, Z = S + TALL * S_GROUP;  // offsets in a stage
    static constexpr unsigned BYTES = Z + TALL * Z_GROUP, STAGE = (BYTES + 1023) / 1024 * 1024;
    static constexpr int CHUNK = TOKENS < 32 ? TOKENS : 32;  // tokens that are transposed at a time
    static constexpr unsigned TRANSPOSE = CHUNK * PITCH * 4;  // as many bytes as 64 tokens of 16-bit outputs, and more
    static constexpr unsigned FULL = STAGES * STAGE, EMPTY = FULL + STAGES * 8, FLAGS = EMPTY + STAGES * 8;
    static constexpr unsigned OUT = (FLAGS + WARPGROUPS * 4 + 15) / 16 * 16, TOTAL = OUT + WARPGROUPS * TRANSPOSE;
};

// The scales and zero points of a thread's two rows, for one group of columns.
template <typename T, int FORMAT>
__device__ inline void load_scales(unsigned scales, unsigned zeros, unsigned (&scale)[2], unsigned (&zero)[2]) {
    if (FORMAT == MXFP4) {
        const unsigned both = load_shared_2(scales);
        scale[0] = power_of_two<T>(both & 0xff), scale[1] = power_of_two<T>(both >> 8);
        return;
    }
    const unsigned both = load_shared_4(scales);
    spread_scales<T>(scale, reinterpret_cast<const __half2&>(both));
    if (FORMAT == INT4_ZEROS || FORMAT == INT8_ZEROS) {
        constexpr unsigned MAGIC = Half<T>::MAGIC;
        const unsigned stored = load_shared_2(zeros);
#pragma unroll
        for (int row = 0; row < 2; ++row) {
            const unsigned twice = (stored >> 8 * row & 0xff) * 0x10001u;
            zero[row] = FORMAT == INT4_ZEROS ? twice | MAGIC
                                             : subtract<T>((twice & 0x007f007f) | MAGIC, (twice & 0x00800080) | MAGIC);
        }
    }
}

#if ELEMENTWISE_EPILOGUE
// Stores a warpgroup's tile, 64 tokens at a time, where the epilogue needs nothing but an output and its bias: it runs on
// the accumulators, and 16-bit results are transposed by stmatrix. `buffer` has rows of 64 outputs for 64 tokens; chunk c
// of row r is at c ^ (r % 8).
template <int TOKENS>
__device__ inline void store_elementwise(float (&acc)[TOKENS / 2], unsigned char* buffer, int barrier, OUT_TYPE* y,
                                         Index y_stride, const BIAS_TYPE* bias, int first_token, int rows) {
    constexpr int CHUNK_TOKENS = TOKENS < 64 ? TOKENS : 64, ROW = OUTPUTS * 2;
    const int thread = threadIdx.x % GROUP_THREADS, warp = thread / WARP, lane = thread % WARP;
    const int output_row = warp * 16 + lane / 4;
#pragma unroll
    for (int chunk = 0; chunk < TOKENS; chunk += CHUNK_TOKENS) {
        if (first_token + chunk >= rows) return;
        named_barrier_sync(barrier, GROUP_THREADS);
#pragma unroll
        for (int pair = 0; pair < CHUNK_TOKENS / 16; ++pair) {  // 16 tokens: four 8 x 8 matrices
            unsigned words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float both[2];
#pragma unroll
                for (int e = 0; e < 2; ++e) {
                    const float value = acc[chunk / 2 + 8 * pair + 2 * i + e];
                    Output output = {value, 0.f, bias + output_row + i % 2 * 8, nullptr, nullptr, false};
                    EPILOGUE
                    both[e] = output.value;
                }
                words[i] = pack<OUT_TYPE>(both[0], both[1]);
            }
            const int token = 16 * pair + lane / 16 * 8 + lane % 8, column = warp * 2 + lane / 8 % 2;
            stmatrix_transposed(shared_address(buffer) + token * ROW + ((column ^ token % 8) << 4), words);
        }
        named_barrier_sync(barrier, GROUP_THREADS);
#pragma unroll
        for (int token = thread / 8; token < CHUNK_TOKENS; token += GROUP_THREADS / 8)
            if (first_token + chunk + token < rows) {
                const uint4 found = load_shared_16(shared_address(buffer) + token * ROW + ((thread % 8 ^ token % 8) << 4));
                store_global_16(y + Index(first_token + chunk + token) * y_stride + thread % 8 * 8, found);
            }
    }
}
#endif

// scale_groups: how many share scales along a row of the weight, each of group_blocks tiles (0: less than one step).
// outputs: of y; a gated layer has as many rows in both matrices.
template <typename T, int FORMAT, int GROUP, int TOKENS, int WARPGROUPS, int BLOCKS, int STAGES, bool GATED,
          int HEIGHT = 1>
__global__ void __launch_bounds__(GROUP_THREADS * (WARPGROUPS + 1), 1) linear_quantized(
    const __grid_constant__ TensorMap map_x, const unsigned char* data, const unsigned char* scales,
    const unsigned char* zeros, const unsigned char* up_data, const unsigned char* up_scales,
    const unsigned char* up_zeros, const BIAS_TYPE* bias, const BIAS_TYPE* up_bias, const RESIDUAL_TYPE* residual,
    OUT_TYPE* y, float* workspace, int* counters, long long residual_stride, long long y_stride, int rows, int outputs,
    int blocks_k, int scale_groups, int group_blocks, int whole, int row_tiles, int column_tiles) {
    using B = Buffers<FORMAT, GROUP, TOKENS, WARPGROUPS, BLOCKS, STAGES, HEIGHT>;
    static_assert(HEIGHT == 1 || HEIGHT == 2 && !GATED, "gate and up are two warpgroups of 64 outputs");
    extern __shared__ __align__(1024) unsigned char shared[];
    const unsigned buffers = shared_address(shared), full = buffers + B::FULL, empty = buffers + B::EMPTY;
    const int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(full + stage * 8, 2);
            mbarrier_init(empty + stage * 8, 4 * WARPGROUPS);
        }
        fence_mbarrier_init();
    }
    __syncthreads();

    // A block starts with the same number for all threads. The warpgroups' numbers must add up to no more: asking for
    // more than are left waits for ever.
    constexpr int START_REGISTERS = 65536 / (GROUP_THREADS * (WARPGROUPS + 1)) / 8 * 8;
    constexpr int PRODUCER_REGISTERS = WARPGROUPS == 2 ? 40 : 64, CONSUMER_REGISTERS = WARPGROUPS == 2 ? 232 : 104;
    static_assert(PRODUCER_REGISTERS + WARPGROUPS * CONSUMER_REGISTERS <= (WARPGROUPS + 1) * START_REGISTERS,
                  "the registers of a block");
    constexpr int PARTS = GATED ? 2 : 1, TEAMS = B::TALL / PARTS;  // warpgroups of a team have the same outputs
    const int steps = blocks_k / BLOCKS, row_blocks = outputs / OUTPUTS;
    Segment segment;
    int stage = 0;
    unsigned parity = 0;  // of the current pass through the stages
    auto advance = [&] {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    };

    if (warp >= 4 * WARPGROUPS) {  // producers: one warp for x, one for the weight, a lane for each 64 rows of it
        set_max_registers_down<PRODUCER_REGISTERS>();
        const bool of_x = warp == 4 * WARPGROUPS;
        if (warp > 4 * WARPGROUPS + 1 || lane >= (of_x ? 1 : B::TALL)) return;
        if (of_x) {
            prefetch_tensor_map(map_x);
            griddepcontrol_wait();
            griddepcontrol_launch_dependents();
        }
        if (GATED && lane % 2) data = up_data, scales = up_scales, zeros = up_zeros;
        Schedule schedule(whole, row_tiles * column_tiles, steps);
        while (schedule.next(segment)) {
            const TilePosition at = tile_position(segment.tile, row_tiles, column_tiles);
            const int row_block = at.column * TEAMS + lane / PARTS;
            const unsigned groups = PARTS * min(TEAMS, row_blocks - at.column * TEAMS);  // the last tile may be lower
            const unsigned char* tile = data + (Index(row_block) * blocks_k + segment.begin * BLOCKS) * B::TILE;
            for (int step = segment.begin; step < segment.end; ++step, advance()) {
                const unsigned arrived = full + stage * 8, target = buffers + stage * B::STAGE;
                mbarrier_wait(empty + stage * 8, parity ^ 1);  // returns at once in the first pass
                if (of_x) {
                    mbarrier_arrive_expect_bytes(arrived, B::X);
#pragma unroll
                    for (int block = 0; block < BLOCKS; ++block)
                        tma_load_2d(target + block * B::X_BLOCK, map_x, (step * BLOCKS + block) * COLUMNS,
                                    at.row * TOKENS, arrived);
                    continue;
                }
                if (lane == 0) mbarrier_arrive_expect_bytes(arrived, groups * (B::W_GROUP + B::S_GROUP + B::Z_GROUP));
                if (row_block >= row_blocks) continue;
                const int scale_group = group_blocks ? step * BLOCKS / group_blocks : step * B::SCALES;
                const Index at_scales = (Index(row_block) * scale_groups + scale_group) * OUTPUTS;
                bulk_load(target + B::W + lane * B::W_GROUP, tile, B::W_GROUP, arrived);
                bulk_load(target + B::S + lane * B::S_GROUP, scales + at_scales * B::SCALE, B::S_GROUP, arrived);
                if (B::ZEROS) bulk_load(target + B::Z + lane * B::Z_GROUP, zeros + at_scales, B::Z_GROUP, arrived);
                tile += B::W_GROUP;
            }
        }
        return;
    }

    set_max_registers_up<CONSUMER_REGISTERS>();
    const int group = warp / 4, thread = threadIdx.x % GROUP_THREADS;
    const unsigned long long x_descriptor = wgmma_descriptor(buffers, 128, 1024);
    const int pair = warp % 4 * 16 + lane / 4 * 2;  // where the scales of rows lane / 4 and lane / 4 + 8 are
    Schedule schedule(whole, row_tiles * column_tiles, steps);
    while (schedule.next(segment)) {
        const TilePosition at = tile_position(segment.tile, row_tiles, column_tiles);
        float sums[HEIGHT][TOKENS / 2];
        unsigned previous = empty;
        for (int step = segment.begin; step < segment.end; ++step, advance()) {
            const unsigned buffer = buffers + stage * B::STAGE;
            mbarrier_wait(full + stage * 8, parity);
#pragma unroll
            for (int part_of_step = 0; part_of_step < BLOCKS * HEIGHT; ++part_of_step) {
                const int block = part_of_step / HEIGHT, height = part_of_step % HEIGHT;
                const int of = group * HEIGHT + height;
                float(&acc)[TOKENS / 2] = sums[height];
                unsigned words[B::TILE / GROUP_THREADS / 4], a[2][8], scale[2], zero[2];
#pragma unroll
                for (int part = 0; part < B::TILE / GROUP_THREADS / 16; ++part) {
                    const uint4 loaded = load_shared_16(buffer + B::W + of * B::W_GROUP + block * B::TILE +
                                                        part * 16 * GROUP_THREADS + thread * 16);
                    words[4 * part] = loaded.x, words[4 * part + 1] = loaded.y;
                    words[4 * part + 2] = loaded.z, words[4 * part + 3] = loaded.w;
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int scale_group = (block * COLUMNS + half * 32) / GROUP;  // within the step
                    if (half == 0 || GROUP == 32) {
                        const unsigned from = (of * B::SCALES + scale_group) * OUTPUTS + pair;
                        load_scales<T, FORMAT>(buffer + B::S + from * B::SCALE, buffer + B::Z + from, scale, zero);
                    }
                    wgmma_wait<1>();  // the products that read a[half] before are complete
                    if (part_of_step == 0 && half == 1 && step > segment.begin && lane == 0) mbarrier_arrive(previous);
                    dequantize<T, FORMAT>(a[half], words + half * (B::TILE / GROUP_THREADS / 8), scale, zero);
                    wgmma_fence();
#pragma unroll
                    for (int i = 0; i < 2; ++i) {
                        const unsigned x = stage * B::STAGE + block * B::X_BLOCK + (2 * half + i) * 32;
                        wgmma_registers(acc, a[half] + 4 * i, x_descriptor + (x >> 4),
                                        step > segment.begin || block + half + i > 0, T());
                    }
                    wgmma_commit();
                }
            }
            previous = empty + stage * 8;
        }
        wgmma_wait<0>();
        keep_in_registers(sums[0]);
        if constexpr (HEIGHT == 2) keep_in_registers(sums[1]);
        if (lane == 0) mbarrier_arrive(previous);

        auto finish = [&](float(&acc)[TOKENS / 2], int height) {
            const int of = group * HEIGHT + height;  // 64 outputs
            const int team = group / PARTS, row_block = at.column * TEAMS + of / PARTS;
            if (row_block >= row_blocks) return;  // nothing was loaded for this warpgroup
            if (segment.begin != 0 || segment.end != steps) {
                constexpr int PART = OUTPUTS * TOKENS / 4;  // in units of 16 bytes
                float4* parts = reinterpret_cast<float4*>(workspace) + thread;
                float4* mine = parts + Index((2 * blockIdx.x + (segment.begin == 0)) * B::TALL + of) * PART;
#pragma unroll
                for (int i = 0; i < TOKENS / 8; ++i)
                    __stcg(mine + i * GROUP_THREADS,
                           make_float4(acc[4 * i], acc[4 * i + 1], acc[4 * i + 2], acc[4 * i + 3]));
                __threadfence();
                named_barrier_sync(1 + team, PARTS * GROUP_THREADS);
                const int unit = (segment.tile - whole) * steps;
                const int first = schedule.block_of(unit), last = schedule.block_of(unit + steps - 1);
                int* flag = reinterpret_cast<int*>(shared + B::FLAGS) + team;
                if (thread == 0 && group % PARTS == 0) {
                    int* counter = counters + (segment.tile - whole) * TEAMS + of / PARTS;
                    const bool complete = atomicAdd(counter, 1) == last - first;
                    if (complete) *counter = 0;  // as the next launch wants to find it
                    __threadfence();
                    *flag = complete;
                }
                named_barrier_sync(1 + team, PARTS * GROUP_THREADS);
                if (!*flag) return;
#pragma unroll
                for (int i = 0; i < TOKENS / 2; ++i) acc[i] = 0.f;
                for (int block = first; block <= last; ++block) {
                    const float4* part = parts + Index((2 * block + (block == first)) * B::TALL + of) * PART;
#pragma unroll
                    for (int i = 0; i < TOKENS / 8; ++i) {
                        const float4 found = __ldcg(part + i * GROUP_THREADS);
                        acc[4 * i] += found.x, acc[4 * i + 1] += found.y;
                        acc[4 * i + 2] += found.z, acc[4 * i + 3] += found.w;
                    }
                }
            }

            // The outputs of a token are contiguous in y: they are transposed through shared memory.
            const Index first_output = Index(row_block) * OUTPUTS;
#if ELEMENTWISE_EPILOGUE
            if constexpr (TOKENS >= 16) {
                store_elementwise<TOKENS>(acc, shared + B::OUT + group * B::TRANSPOSE, 1 + group, y + first_output, y_stride,
                                          bias + first_output, at.row * TOKENS, rows);
                return;
            }
#endif
            constexpr int VECTOR = 16 / sizeof(OUT_TYPE);
            float* mine = reinterpret_cast<float*>(shared + B::OUT + group * B::TRANSPOSE);
            const float* gate = reinterpret_cast<float*>(shared + B::OUT + team * PARTS * B::TRANSPOSE);
#pragma unroll
            for (int chunk = 0; chunk < TOKENS; chunk += B::CHUNK) {  // CHUNK tokens at a time
                const int token = at.row * TOKENS + chunk;
                if (token >= rows) break;
                named_barrier_sync(1 + team, PARTS * GROUP_THREADS);
#pragma unroll
                for (int i = 0; i < B::CHUNK / 2; ++i)  // acc[4 j + 2 half + e]
                    mine[(i / 4 * 8 + lane % 4 * 2 + i % 2) * PITCH + warp % 4 * 16 + lane / 4 + i % 4 / 2 * 8] =
                        acc[chunk / 2 + i];
                named_barrier_sync(1 + team, PARTS * GROUP_THREADS);
                const int worker = group % PARTS * GROUP_THREADS + thread, column = worker % 8 * 8;
                const Index output_at = first_output + column;
                for (int of = worker / 8; of < B::CHUNK && token + of < rows; of += PARTS * GROUP_THREADS / 8) {
                    const float* values = gate + of * PITCH + column;
                    const RESIDUAL_TYPE* added = residual + Index(token + of) * residual_stride + output_at;
#pragma unroll
                    for (int first = 0; first < 8; first += VECTOR) {
                        Elements<OUT_TYPE, VECTOR> stored;
#pragma unroll
                        for (int i = first; i < first + VECTOR; ++i) {
                            const float up = GATED ? values[B::TRANSPOSE / 4 + i] : 0.f;
                            Output output = {values[i], up, bias + output_at + i, up_bias + output_at + i, added + i, GATED};
                            EPILOGUE
                            stored.set(i - first, output.value);
                        }
                        stored.store(y + Index(token + of) * y_stride + output_at + first);
                    }
                }
            }
        };
        finish(sums[0], 0);
        if constexpr (HEIGHT == 2) finish(sums[1], 1);
    }
}
