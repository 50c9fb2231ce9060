// The linear layer of quantized weights on a CPU: y = epilogue(norm(x) W^T), W kept in its format.
//
// Weights are read row by row, as they are stored. Two products:
//   integer: x is rounded to int8 with a scale for each x_group columns; codes are multiplied as integers (VNNI), and
//            the sums of each chunk are scaled in float32.
//   float:   codes are converted in registers and multiplied in float32.
// In both, codes are taken as signed (code - SHIFT), and what a format adds to a group (zero points, minima) is an
// offset for each unit of columns: y += sum over units of offset * (sum of x in the unit).
//
// Vectors are GCC's and Clang's vector types of 64 bytes; one function, dot4, has intrinsics.

#include <type_traits>

#include "linear_inputs.h"

namespace {

constexpr int64_t PREFETCH_BYTES = 4096;  // how far ahead a weight is prefetched

// Products of R rows of the weight and C rows of x, [R][C].
template <typename Format, int R, int C>
void integer_tile(const Matrix& weight, int64_t row, const float* scales, const Inputs& inputs, int64_t x_row,
                  f32x16 (&sums)[R][C]) {
    constexpr int UNITS = Format::CHUNK / Format::UNIT;
    const int64_t chunks = inputs.chunks, full = weight.columns / Format::CHUNK;
    const uint8_t* data = weight.data + row * weight.data_stride;
    const int8_t* x = inputs.codes.data() + x_row * chunks * Format::VECTORS * 64;
    const float* x_scales = inputs.scales.data() + x_row * chunks * LANES;
    const int32_t* starts = inputs.starts.data() + x_row * chunks * LANES;
    auto step = [&](auto is_full, int64_t chunk) __attribute__((always_inline)) {
        UNROLLED for (int r = 0; r < R; r++) {
            u8x64 codes[Format::VECTORS];
            Format::template chunk<decltype(is_full)::value>(
                data + r * weight.data_stride, chunk, weight.columns, codes);
            // With one row of x the weight's bytes are the bound: the next rows are loaded while these are multiplied.
            if (C == 1) __builtin_prefetch(data + r * weight.data_stride + chunk * 64 + PREFETCH_BYTES);
            const f32x16 scale = expand<UNITS>(scales + r * inputs.units + chunk * UNITS);
            UNROLLED for (int c = 0; c < C; c++) {
                const int64_t at = c * chunks + chunk;
                i32x16 sum = load<i32x16>(starts + at * LANES);
                UNROLLED for (int part = 0; part < Format::VECTORS; part++)
                    sum = dot4<Format::WIDE>(sum, codes[part], load<i8x64>(x + (at * Format::VECTORS + part) * 64));
                const f32x16 both = scale * load<f32x16>(x_scales + at * LANES);
                sums[r][c] += __builtin_convertvector(sum, f32x16) * both;
            }
        }
    };
    for (int64_t chunk = 0; chunk < full; chunk++) step(std::true_type(), chunk);
    if (full < chunks) step(std::false_type(), full);
}

template <typename Format, int R, int C>
void float_tile(const Matrix& weight, int64_t row, const float* scales, const Inputs& inputs, int64_t x_row,
                f32x16 (&sums)[R][C]) {
    constexpr int UNITS = 32 / Format::UNIT;
    const int64_t blocks = weight.columns / 32;
    const uint8_t* data = weight.data + row * weight.data_stride;
    const float* x = inputs.values.data() + x_row * inputs.columns;
    for (int64_t block = 0; block < blocks; block++) {
        UNROLLED for (int r = 0; r < R; r++) {
            u8x16 codes[2];
            Format::block(data + r * weight.data_stride, block, codes);
            const f32x16 first = to_floats(codes[0]) - Format::SHIFT;
            const f32x16 second = to_floats(codes[1]) - Format::SHIFT;
            const f32x16 scale = expand<UNITS>(scales + r * inputs.units + block * UNITS);
            UNROLLED for (int c = 0; c < C; c++) {
                const float* from = x + c * inputs.columns + block * 32;
                sums[r][c] += (first * load<f32x16>(from) + second * load<f32x16>(from + 16)) * scale;
            }
        }
    }
}

// Results [R][C] of a tile: the products, and the offsets times the sums of x.
template <typename Format, int R, int C>
void tile(const Matrix& weight, int64_t row, const float* scales, const float* offsets, const Inputs& inputs,
          int64_t x_row, float* found) {
    f32x16 sums[R][C] = {};
    if (inputs.rounded) integer_tile<Format, R, C>(weight, row, scales, inputs, x_row, sums);
    else float_tile<Format, R, C>(weight, row, scales, inputs, x_row, sums);
    if (has_offsets(weight)) {  // a vector may reach into the next row's offsets: there the sums of x are 0
        const float* x = inputs.sums.data() + x_row * inputs.stride;
        for (int64_t unit = 0; unit < inputs.units; unit += LANES)
            UNROLLED for (int r = 0; r < R; r++)
                UNROLLED for (int c = 0; c < C; c++)
                    sums[r][c] += load<f32x16>(offsets + r * inputs.units + unit) *
                                  load<f32x16>(x + c * inputs.stride + unit);
    }
    UNROLLED for (int r = 0; r < R; r++)
        UNROLLED for (int c = 0; c < C; c++) found[r * C + c] = sum_lanes(sums[r][c]);
}

// Rows of the weight and of x in a tile; a single row of x has taller tiles.
constexpr int TILE_ROWS = 4, TILE_COLUMNS = 4, TALL_ROWS = 8;
constexpr int BLOCK_ROWS = 16;  // whose scales are converted together, and which share x in the L1 cache

// What a thread needs for a block.
struct Scratch {
    std::vector<float> scales, offsets, results, ups;
};

// Rows [row, row + count) of the weight, at most BLOCK_ROWS, times all rows of x: results[x row][r].
template <typename Format>
void product(const Matrix& weight, int64_t row, int count, const Inputs& inputs, const void* bias, int bias_dtype,
             Scratch& scratch, float* results) {
    const int64_t units = inputs.units;
    read_scales<Format>(weight, row, count, scratch.scales.data(), scratch.offsets.data());
    float found[TILE_ROWS * TILE_COLUMNS];
    for (int64_t x_row = 0; x_row < inputs.rows;) {
        const int wide = inputs.rows - x_row >= TILE_COLUMNS ? TILE_COLUMNS : 1;
        for (int first = 0; first < count;) {
            const int most = wide == 1 ? TALL_ROWS : TILE_ROWS, tall = count - first >= most ? most : 1;
            const float *s = scratch.scales.data() + first * units, *o = scratch.offsets.data() + first * units;
            if (tall > 1 && wide > 1)
                tile<Format, TILE_ROWS, TILE_COLUMNS>(weight, row + first, s, o, inputs, x_row, found);
            else if (tall > 1) tile<Format, TALL_ROWS, 1>(weight, row + first, s, o, inputs, x_row, found);
            else if (wide > 1)
                tile<Format, 1, TILE_COLUMNS>(weight, row + first, s, o, inputs, x_row, found);
            else tile<Format, 1, 1>(weight, row + first, s, o, inputs, x_row, found);
            for (int r = 0; r < tall; r++)
                for (int c = 0; c < wide; c++) results[(x_row + c) * BLOCK_ROWS + first + r] = found[r * wide + c];
            first += tall;
        }
        x_row += wide;
    }
    if (!bias) return;
    for (int r = 0; r < count; r++) {
        const float value = read(bias, row + r, bias_dtype);
        for (int64_t x_row = 0; x_row < inputs.rows; x_row++) results[x_row * BLOCK_ROWS + r] += value;
    }
}

// Outputs [first, first + count), at most BLOCK_ROWS.
template <typename Format>
void outputs(const Linear& call, int64_t first, int count, const Inputs& inputs, Scratch& scratch) {
    float* results = scratch.results.data();
    product<Format>(call.weight, first, count, inputs, call.bias, call.bias_dtype, scratch, results);
    if (call.up.rows) {
        float* ups = scratch.ups.data();
        product<Format>(call.up, first, count, inputs, call.up_bias, call.bias_dtype, scratch, ups);
        for (int64_t at = 0; at < inputs.rows * BLOCK_ROWS; at += LANES) {
            const f32x16 gate = load<f32x16>(results + at), up = load<f32x16>(ups + at);
            store(results + at, f32x16(gate / (1.0f + exp_lanes(-gate)) * up));
        }
    }
    for (int64_t row = 0; row < inputs.rows; row++) {
        const int64_t to = row * call.out_stride + first, residual = row * call.residual_stride + first;
        float* own = results + row * BLOCK_ROWS;
        for (int r = 0; r < count && call.residual; r++) own[r] += read(call.residual, residual + r, call.residual_dtype);
        for (int r = 0; r < count; r++) write(call.out, to + r, own[r], call.out_dtype);
    }
}

// By all threads of a team; the work is done when all have returned.
template <typename Format> void run(const Linear& call) {
    static thread_local Inputs own_inputs;
    static thread_local Scratch scratch;
    Inputs* inputs = &own_inputs;
    if (call.rows == 1) {  // each thread prepares it for itself: that takes less time than waiting for another
        size_inputs<Format>(call, *inputs);
        prepare_row<Format>(call, *inputs, 0);
    } else {
#pragma omp single copyprivate(inputs)
        {
            inputs = &own_inputs;
            size_inputs<Format>(call, *inputs);
        }
#pragma omp for
        for (int64_t row = 0; row < call.rows; row++) prepare_row<Format>(call, *inputs, row);
    }
    scratch.scales.resize(BLOCK_ROWS * inputs->units + LANES);
    scratch.offsets.resize(BLOCK_ROWS * inputs->units + LANES);
    scratch.results.resize(inputs->rows * BLOCK_ROWS);
    scratch.ups.resize(inputs->rows * BLOCK_ROWS);
    const int64_t count = call.weight.rows, blocks = (count + BLOCK_ROWS - 1) / BLOCK_ROWS;
    const int64_t share = std::max<int64_t>(1, blocks / (2 * call.threads));
#pragma omp for schedule(dynamic, share) nowait
    for (int64_t index = 0; index < blocks; index++) {
        const int64_t first = index * BLOCK_ROWS;
        outputs<Format>(call, first, int(std::min<int64_t>(BLOCK_ROWS, count - first)), *inputs, scratch);
    }
}

// Rows [first, first + count), or those that `rows` names.
template <typename Format>
void dequantize_rows(const Matrix& weight, const int64_t* rows, int64_t first, int64_t count, float* out, int threads) {
#pragma omp parallel num_threads(threads)
    {
        std::vector<float> scales(weight.columns / Format::UNIT + LANES), offsets(scales.size());
#pragma omp for
        for (int64_t row = 0; row < count; row++) {
            const int64_t from = rows ? rows[row] : first + row;
            read_scales<Format>(weight, from, 1, scales.data(), offsets.data());
            const uint8_t* data = weight.data + from * weight.data_stride;
            float* to = out + row * weight.columns;
            for (int64_t block = 0; block < weight.columns / 32; block++) {
                u8x16 codes[2];
                Format::block(data, block, codes);
                const f32x16 parts[2] = {
                    to_floats(codes[0]) - Format::SHIFT,
                    to_floats(codes[1]) - Format::SHIFT};
                for (int i = 0; i < 32; i++) {
                    const int64_t unit = (block * 32 + i) / Format::UNIT;
                    const float code = Format::PAIRS ? parts[i % 2][i / 2] : parts[i / 16][i % 16];
                    to[block * 32 + i] = code * scales[unit] + (has_offsets(weight) ? offsets[unit] : 0.0f);
                }
            }
        }
    }
}

}  // namespace

extern "C" {

void linear_team(const Linear* call) {
    switch (call->weight.codes) {
        case INT4: return run<Nibbles>(*call);
        case INT8: return run<Bytes>(*call);
        case MXFP4: return run<E2m1>(*call);
        default: return run<SixBits>(*call);
    }
}

void linear(const Linear* call) {
#pragma omp parallel num_threads(call->threads)
    linear_team(call);
}

void dequantize(const Matrix* weight, const int64_t* rows, int64_t first, int64_t count, float* out, int threads) {
    switch (weight->codes) {
        case INT4: return dequantize_rows<Nibbles>(*weight, rows, first, count, out, threads);
        case INT8: return dequantize_rows<Bytes>(*weight, rows, first, count, out, threads);
        case MXFP4: return dequantize_rows<E2m1>(*weight, rows, first, count, out, threads);
        default: return dequantize_rows<SixBits>(*weight, rows, first, count, out, threads);
    }
}
}
