// y = epilogue(x W^T): a linear layer on the tensor cores of every GPU from Turing (sm_75) up.
//
// x is [rows, inner] and W [outputs, inner], both 16-bit; sums are in float32. The product is tiled three times over:
//   1. a block computes BLOCK_M x BLOCK_N outputs. It steps along the sum, BLOCK_K elements at a time: a tile of x and a
//      tile of W come to shared memory, where each element is used BLOCK_N or BLOCK_M times;
//   2. a warp computes its part of them, WARP_M x WARP_N, in registers. ldmatrix brings 16 x 16 pieces of both tiles into
//      the layout that the tensor cores want (mma.cuh has the swizzle that keeps it free of bank conflicts);
//   3. mma.sync multiplies 16 x 16 by 16 x 8; on Turing, two instructions of half the depth.
//
// Loads must be under way while the tensor cores work. From sm_80 on a ring of STAGES tiles is filled by asynchronous
// copies (cp.async), STAGES - 1 tiles ahead. Turing has none: the next tile waits in registers while this one is
// multiplied, and goes to the other of two buffers afterwards. Both need one barrier a step.
//
// Few rows: the weight's bytes are the time, so what counts is how many of them are under way. BLOCK_M shrinks to 16, and
// where the tiles of the outputs are too few for the GPU, `splits` blocks share each one's sum: they store partial sums,
// which linear_combine adds in a fixed order, so that the result is the same at every run.
//
// Variants: GATED multiplies two weights (gate and up) by the same x; a block's columns are then half gate, half up, and
// a thread ends with both products of its outputs. Up to three weights (q, k, v) lie side by side; a tile belongs to one
// of them. TRANSPOSED weights are stored [inner, outputs] (GPT-2), and ldmatrix transposes. Without VECTOR, rows are not
// made of 16-byte vectors, and elements are loaded one by one.

#include "epilogue.cuh"
#include "mma.cuh"

#ifndef OUT_TYPE
#define OUT_TYPE float
#endif
#ifndef NORM_TYPE
#define NORM_TYPE float
#endif

constexpr int GROUP = 8;  // row tiles that blocks with neighboring numbers share: their tiles of x and W stay in L2
constexpr int NORM_THREADS = 256;

// Up to three weights lie side by side. The one that a tile of `width` outputs belongs to, the tile's first output in it,
// and the outputs before it. Sizes from the second on may be 0: there is no such weight.
struct Place {
    int weight, first, before;
};

__device__ inline Place place_of(int tile, int width, int size0, int size1, int size2) {
    const int tiles0 = (size0 + width - 1) / width, tiles1 = (size1 + width - 1) / width;
    if (tile < tiles0) return {0, tile * width, 0};
    if (tile < tiles0 + tiles1) return {1, (tile - tiles0) * width, size0};
    return {2, (tile - tiles0 - tiles1) * width, size0 + size1};
}

// One of three, by comparisons: a table with an index that is known at run time would lie in local memory.
template <typename V>
__device__ inline V pick(int which, V first, V second, V third) {
    return which == 0 ? first : which == 1 ? second : third;
}

// A tile whose rows are not made of 16-byte vectors: elements are loaded one by one into registers, then stored as
// TileCopy (mma.cuh) does.
template <int ROWS, int DIM, int THREADS>
struct ElementCopy {
    static constexpr int CHUNKS_PER_ROW = DIM / CHUNK, COUNT = ROWS * CHUNKS_PER_ROW / THREADS;
    uint4 loaded[COUNT];

    template <typename T>
    __device__ inline void start(unsigned, const T* source, int stride, int rows, int dim) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int number = threadIdx.x + i * THREADS, row = number / CHUNKS_PER_ROW;
            const int column = number % CHUNKS_PER_ROW * CHUNK;
            const unsigned short* from = reinterpret_cast<const unsigned short*>(source) + Index(row) * stride + column;
            unsigned word[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const unsigned low = row < rows && column + 2 * j < dim ? from[2 * j] : 0;
                const unsigned high = row < rows && column + 2 * j + 1 < dim ? from[2 * j + 1] : 0;
                word[j] = low | high << 16;
            }
            loaded[i] = make_uint4(word[0], word[1], word[2], word[3]);
        }
    }
    __device__ inline void finish(unsigned tile) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int number = threadIdx.x + i * THREADS;
            store_shared(tile + swizzled<DIM>(number / CHUNKS_PER_ROW, number % CHUNKS_PER_ROW), loaded[i]);
        }
    }
};

template <bool VECTOR, int ROWS, int DIM, int THREADS>
struct ChosenCopy {
    using Type = TileCopy<ROWS, DIM, THREADS>;
};
template <int ROWS, int DIM, int THREADS>
struct ChosenCopy<false, ROWS, DIM, THREADS> {
    using Type = ElementCopy<ROWS, DIM, THREADS>;
};

// The epilogue of one output, from its products to what is stored.
__device__ inline float finish_output(float value, float up, bool gated, const BIAS_TYPE* bias,
                                      const BIAS_TYPE* up_bias, Index bias_at, const RESIDUAL_TYPE* residual,
                                      Index residual_at) {
    Output output = {value, up, bias + bias_at, up_bias + bias_at, residual + residual_at, gated};
    EPILOGUE
    return output.value;
}

template <typename T, int BLOCK_M, int BLOCK_N, int BLOCK_K, int WARPS_M, int WARPS_N, int STAGES, bool GATED,
          bool TRANSPOSED, bool VECTOR>
struct LinearTile {
    static constexpr int THREADS = WARPS_M * WARPS_N * WARP;
    static constexpr int PARTS = GATED ? 2 : 1;          // products of an output
    static constexpr int WIDTH = BLOCK_N / PARTS;        // outputs of a tile
    static constexpr int WARP_M = BLOCK_M / WARPS_M;     // rows of a warp
    static constexpr int WARP_WIDTH = WIDTH / WARPS_N;   // outputs of a warp
    static constexpr int ROW_PIECES = WARP_M / 16;       // mma tiles of a warp along the rows
    static constexpr int PART_PIECES = WARP_WIDTH / 8;   // and along the outputs, of each product
    static constexpr int PIECES = PART_PIECES * PARTS;
    static_assert(WARP_M % 16 == 0 && WARP_WIDTH % 8 == 0 && PIECES % 2 == 0, "ldmatrix loads 16 rows at a time");

    static constexpr int X_BYTES = BLOCK_M * BLOCK_K * 2, PART_BYTES = WIDTH * BLOCK_K * 2;
    static constexpr int STAGE_BYTES = X_BYTES + PARTS * PART_BYTES;
    static constexpr int W_ROWS = TRANSPOSED ? BLOCK_K : WIDTH, W_DIM = TRANSPOSED ? WIDTH : BLOCK_K;
    static constexpr bool ASYNC = SM80 && VECTOR;

    typename ChosenCopy<VECTOR, BLOCK_M, BLOCK_K, THREADS>::Type x_copy;
    typename ChosenCopy<VECTOR, W_ROWS, W_DIM, THREADS>::Type w_copy[PARTS];
    float acc[ROW_PIECES][PIECES][4];  // [16 rows x 8 outputs] each; of gated ones, the pieces of up come last
    const T* x;                        // the block's first row
    const T* weight[PARTS];            // the block's first output
    int x_stride, w_stride[PARTS];
    int rows, width, inner;  // inside the matrix, from the block's first row, output and element of the sum
    unsigned buffers;        // in shared memory
    int warp_m, warp_n, lane;

    // Step `step` of the sum: its tiles of x and W are asked for.
    __device__ inline void start(int step, int stage) {
        const unsigned tile = buffers + stage * STAGE_BYTES;
        const int first = step * BLOCK_K, left = inner - first;
        x_copy.start(tile, x + first, x_stride, rows, left);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) {
            const unsigned to = tile + X_BYTES + part * PART_BYTES;
            const int stride = w_stride[part];
            if (TRANSPOSED) w_copy[part].start(to, weight[part] + Index(first) * stride, stride, left, width);
            else w_copy[part].start(to, weight[part] + first, stride, width, left);
        }
    }
    // Only without ASYNC: the tiles go from registers to shared memory.
    __device__ inline void finish(int stage) {
        const unsigned tile = buffers + stage * STAGE_BYTES;
        x_copy.finish(tile);
#pragma unroll
        for (int part = 0; part < PARTS; ++part) w_copy[part].finish(tile + X_BYTES + part * PART_BYTES);
    }

    // Two pieces [8 outputs x 16 of the sum] of W, from piece `piece` on. ldmatrix reads four 8 x 8 matrices; lane l
    // passes the address of row l % 8 of matrix l / 8: the first piece's two halves of the sum, then the second's.
    __device__ inline void load_weight(unsigned (&b)[4], unsigned tile, int piece, int k) {
        const int matrix = lane / 8, mine = piece + matrix / 2, part = mine / PART_PIECES;
        const int output = warp_n * WARP_WIDTH + mine % PART_PIECES * 8;
        const unsigned from = tile + X_BYTES + part * PART_BYTES;
        if (TRANSPOSED) {
            const int row = k * 16 + matrix % 2 * 8 + lane % 8;
            ldmatrix_transposed(b, from + swizzled<W_DIM>(row, output / CHUNK));
        } else {
            ldmatrix(b, from + swizzled<W_DIM>(output + lane % 8, 2 * k + matrix % 2));
        }
    }

    __device__ inline void multiply(int stage) {
        const unsigned tile = buffers + stage * STAGE_BYTES;
#pragma unroll
        for (int k = 0; k < BLOCK_K / 16; ++k) {
            unsigned a[ROW_PIECES][4];
#pragma unroll
            for (int i = 0; i < ROW_PIECES; ++i)
                ldmatrix(a[i], tile + swizzled<BLOCK_K>(warp_m * WARP_M + i * 16 + lane % 16, 2 * k + lane / 16));
#pragma unroll
            for (int j = 0; j < PIECES; j += 2) {
                unsigned b[4];
                load_weight(b, tile, j, k);
#pragma unroll
                for (int i = 0; i < ROW_PIECES; ++i) {
                    mma<T>(acc[i][j], a[i], b[0], b[1]);
                    mma<T>(acc[i][j + 1], a[i], b[2], b[3]);
                }
            }
        }
    }

    // Steps [begin, end) of the sum.
    __device__ inline void run(int begin, int end) {
#pragma unroll
        for (int i = 0; i < ROW_PIECES; ++i)
#pragma unroll
            for (int j = 0; j < PIECES; ++j)
#pragma unroll
                for (int e = 0; e < 4; ++e) acc[i][j][e] = 0.f;
        if (begin >= end) return;
        if constexpr (ASYNC) {
#if SM80
#pragma unroll
            for (int ahead = 0; ahead < STAGES - 1; ++ahead) fill(begin + ahead, end, ahead);
            int stage = 0;
            for (int step = begin; step < end; ++step) {
                cp_async_wait<(STAGES - 2) * (1 + PARTS)>();  // this step's tiles have arrived,
                __syncthreads();                              // those of all threads, and all are done with the last step
                fill(step + STAGES - 1, end, stage == 0 ? STAGES - 1 : stage - 1);
                multiply(stage);
                stage = stage == STAGES - 1 ? 0 : stage + 1;
            }
#endif
        } else {
            start(begin, 0);
            finish(0);
            __syncthreads();
            for (int step = begin; step < end; ++step) {
                const int stage = (step - begin) & 1;
                const bool more = step + 1 < end;
                if (more) start(step + 1, stage ^ 1);
                multiply(stage);
                if (more) finish(stage ^ 1);
                __syncthreads();
            }
        }
    }
#if SM80
    // A stage of the ring. Past the end nothing is copied, but the groups of copies are counted all the same.
    __device__ inline void fill(int step, int end, int stage) {
        if (step < end) {
            start(step, stage);
        } else {
#pragma unroll
            for (int i = 0; i < 1 + PARTS; ++i) cp_async_commit();
        }
    }
#endif
};

// Two neighboring outputs of a row; `pair`: both are inside, and lie on their common boundary.
__device__ inline void store_outputs(float* y, float low, float high, bool pair, bool second) {
    if (pair) {
        *reinterpret_cast<float2*>(y) = make_float2(low, high);
    } else {
        y[0] = low;
        if (second) y[1] = high;
    }
}
template <typename T>
__device__ inline void store_outputs(T* y, float low, float high, bool pair, bool second) {
    if (pair) {
        *reinterpret_cast<unsigned*>(y) = pack<T>(low, high);
    } else {
        assign(y[0], low);
        if (second) assign(y[1], high);
    }
}

// From sm_80 on, two blocks of the largest tile fit an SM with 128 registers a thread. Turing, whose next tile waits in
// registers, would spill.
template <int BLOCK_M, bool VECTOR>
constexpr int BLOCKS_PER_SM = SM80 && VECTOR && BLOCK_M == 128 ? 2 : 1;

// Grid: (tiles, splits). `partial` is [splits, rows, products, outputs] where the sums are shared, else null. Gated, the
// weights are gate and up, of size0 outputs each, and size1 is 0.
template <typename T, int BLOCK_M, int BLOCK_N, int BLOCK_K, int WARPS_M, int WARPS_N, int STAGES, bool GATED,
          bool TRANSPOSED, bool VECTOR>
__global__ void __launch_bounds__(WARPS_M* WARPS_N* WARP, (BLOCKS_PER_SM<BLOCK_M, VECTOR>))
linear_tile(const T* x, const T* w0, const T* w1, const T* w2, const BIAS_TYPE* bias0, const BIAS_TYPE* bias1,
            const BIAS_TYPE* bias2, const RESIDUAL_TYPE* residual, OUT_TYPE* y, float* partial, int x_stride,
            int stride0, int stride1, int stride2, Index bias_stride, Index residual_stride, int size0, int size1,
            int size2, int rows, int inner, int outputs, int row_tiles, int column_tiles, int steps_per_split) {
    using Tile = LinearTile<T, BLOCK_M, BLOCK_N, BLOCK_K, WARPS_M, WARPS_N, STAGES, GATED, TRANSPOSED, VECTOR>;
    extern __shared__ __align__(128) unsigned char shared[];

    // GROUP row tiles at a time, column by column.
    const int number = blockIdx.x, group = number / (GROUP * column_tiles), rest = number % (GROUP * column_tiles);
    const int in_group = min(GROUP, row_tiles - group * GROUP);
    const int first_row = (group * GROUP + rest % in_group) * BLOCK_M;
    const Place place = place_of(rest / in_group, Tile::WIDTH, size0, size1, size2);

    Tile tile;
    tile.x = x + Index(first_row) * x_stride;
    tile.x_stride = x_stride;
#pragma unroll
    for (int part = 0; part < Tile::PARTS; ++part) {
        const int which = GATED ? part : place.weight;
        const int stride = pick(which, stride0, stride1, stride2);
        tile.w_stride[part] = stride;
        tile.weight[part] = pick(which, w0, w1, w2) + Index(place.first) * (TRANSPOSED ? 1 : stride);
    }
    const BIAS_TYPE* bias = pick(place.weight, bias0, bias1, bias2);
    tile.rows = rows - first_row;
    tile.width = pick(place.weight, size0, size1, size2) - place.first;
    tile.inner = inner;
    tile.buffers = shared_address(shared);
    tile.lane = threadIdx.x % WARP;
    tile.warp_m = threadIdx.x / WARP / WARPS_N;
    tile.warp_n = threadIdx.x / WARP % WARPS_N;

    const int steps = (inner + BLOCK_K - 1) / BLOCK_K, begin = blockIdx.y * steps_per_split;
    tile.run(begin, min(steps, begin + steps_per_split));

    // A lane holds outputs 2 (lane % 4) and the next, of rows lane / 4 and 8 further, of every piece.
    const bool even = (outputs | place.before) % 2 == 0;
#pragma unroll
    for (int i = 0; i < Tile::ROW_PIECES; ++i)
#pragma unroll
        for (int j = 0; j < Tile::PART_PIECES; ++j)
#pragma unroll
            for (int below = 0; below < 2; ++below) {
                const int row = tile.warp_m * Tile::WARP_M + i * 16 + tile.lane / 4 + 8 * below;
                const int column = tile.warp_n * Tile::WARP_WIDTH + j * 8 + tile.lane % 4 * 2;
                if (row >= tile.rows || column >= tile.width) continue;
                const Index here = first_row + row;
                const int output = place.first + column, at = place.before + output;
                const bool second = column + 1 < tile.width, pair = even && second;
                const float(&value)[4] = tile.acc[i][j];
                const float(&up)[4] = tile.acc[i][j + (GATED ? Tile::PART_PIECES : 0)];
                if (partial != nullptr) {
                    float* to = partial + ((blockIdx.y * Index(rows) + here) * Tile::PARTS) * outputs + at;
                    store_outputs(to, value[2 * below], value[2 * below + 1], pair, second);
                    if (GATED) store_outputs(to + outputs, up[2 * below], up[2 * below + 1], pair, second);
                    continue;
                }
                float result[2] = {0.f, 0.f};
#pragma unroll
                for (int e = 0; e < 2; ++e)
                    if (e == 0 || second)
                        result[e] = finish_output(value[2 * below + e], up[2 * below + e], GATED, bias, bias1,
                                                  (output + e) * bias_stride, residual, here * residual_stride + at + e);
                store_outputs(y + here * outputs + at, result[0], result[1], pair, second);
            }
}

// The second launch where sums are shared: adds the parts of each output, in order, and ends as linear_tile does.
template <bool GATED>
__global__ void __launch_bounds__(256)
linear_combine(const float* partial, const BIAS_TYPE* bias0, const BIAS_TYPE* bias1, const BIAS_TYPE* bias2,
               const RESIDUAL_TYPE* residual, OUT_TYPE* y, Index bias_stride, Index residual_stride, int size0,
               int size1, int rows, int outputs, int splits) {
    constexpr int PARTS = GATED ? 2 : 1;
    const int at = blockIdx.x * blockDim.x + threadIdx.x;
    const Index row = Index(blockIdx.z) * gridDim.y + blockIdx.y;
    if (at >= outputs || row >= rows) return;
    float sum[2] = {0.f, 0.f};
    for (int split = 0; split < splits; ++split) {
        const float* from = partial + ((Index(split) * rows + row) * PARTS) * outputs + at;
        sum[0] += from[0];
        if (GATED) sum[1] += from[outputs];
    }
    const int which = at < size0 ? 0 : at < size0 + size1 ? 1 : 2;
    const int output = at - pick(which, 0, size0, size0 + size1);
    assign(y[row * outputs + at],
           finish_output(sum[0], sum[1], GATED, pick(which, bias0, bias1, bias2), bias1, output * bias_stride, residual,
                         row * residual_stride + at));
}

// x / rms(x) * (weight + offset), a row for each block; rounded to x's type, as a norm of its own would round it.
template <typename T>
__global__ void __launch_bounds__(NORM_THREADS)
normalize_rows(const T* x, const NORM_TYPE* weight, T* y, Index x_stride, int inner, float eps, float offset) {
    __shared__ float squares[NORM_THREADS / WARP];
    x += blockIdx.x * x_stride;
    y += blockIdx.x * Index(inner);
    float sum = 0.f;
    for (int i = threadIdx.x; i < inner; i += NORM_THREADS) {
        const float value = to_float(x[i]);
        sum += value * value;
    }
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) sum += __shfl_xor_sync(ALL_LANES, sum, distance);
    if (threadIdx.x % WARP == 0) squares[threadIdx.x / WARP] = sum;
    __syncthreads();
    sum = 0.f;
#pragma unroll
    for (int i = 0; i < NORM_THREADS / WARP; ++i) sum += squares[i];
    const float inverse_rms = rsqrtf(sum / inner + eps);
    for (int i = threadIdx.x; i < inner; i += NORM_THREADS)
        assign(y[i], to_float(x[i]) * inverse_rms * (to_float(weight[i]) + offset));
}
