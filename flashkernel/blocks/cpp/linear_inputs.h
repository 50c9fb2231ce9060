// The rows of x of a linear layer, normalized, rounded and ordered as its products read them.

#pragma once

#include "weight_formats.h"

extern "C" {

// One linear layer: out = product + bias + residual. With up.rows > 0 it is gated: silu(product + bias) * (product with
// up + up_bias) + residual. Strides are in elements.
struct Linear {
    Matrix weight, up;
    const void* bias;
    const void* up_bias;
    const void* norm_weight;
    const void* x;
    const void* residual;
    void* out;
    int64_t rows, x_stride, residual_stride, out_stride;
    int64_t x_group;  // columns that share a scale of x in the integer product; 0: the float product
    float norm_eps, norm_offset;
    int32_t x_dtype, out_dtype, residual_dtype, bias_dtype, norm_dtype, threads;
};
}

// Rows of x as the products read them. Integer: for each chunk the codes in the order of the weight's vectors, the
// scales of the lanes, and what the integer sums start with (-SHIFT times the lanes' sums of codes). Float: blocks of
// 32 columns in the order of the weight's two vectors. Both: the sum of x in each unit.
struct Inputs {
    bool rounded = false;  // to int8
    int64_t rows = 0, chunks = 0, units = 0, columns = 0;
    int64_t stride = 0;  // of a row of units: padded with zeros to whole vectors
    std::vector<int8_t> codes;
    std::vector<float> scales, values, sums;
    std::vector<int32_t> starts;
};

template <typename Format> void size_inputs(const Linear& call, Inputs& inputs) {
    const int64_t columns = call.weight.columns;
    inputs.rounded = call.x_group > 0;
    inputs.rows = call.rows;
    inputs.columns = columns;
    inputs.chunks = (columns + Format::CHUNK - 1) / Format::CHUNK;
    inputs.units = columns / Format::UNIT;
    if (call.x_group) {
        inputs.codes.resize(call.rows * inputs.chunks * Format::VECTORS * 64);
        inputs.scales.resize(call.rows * inputs.chunks * LANES);
        inputs.starts.resize(call.rows * inputs.chunks * LANES);
    } else {
        inputs.values.resize(call.rows * columns);
    }
    inputs.stride = (inputs.units + LANES - 1) / LANES * LANES;
    inputs.sums.assign(call.rows * inputs.stride, 0.0f);
}

inline void normalize(const Linear& call, float* row) {
    const int64_t columns = call.weight.columns;
    f32x16 squares = {};
    for (int64_t at = 0; at < columns; at += LANES) {
        f32x16 part = load<f32x16>(row + at);
        squares += part * part;
    }
    const float factor = 1.0f / std::sqrt(sum_lanes(squares) / float(columns) + call.norm_eps);
    if (call.norm_dtype == FLOAT32 && call.x_dtype == FLOAT32) {
        const float* gains = static_cast<const float*>(call.norm_weight);
        for (int64_t at = 0; at < columns; at++) row[at] = row[at] * factor * (gains[at] + call.norm_offset);
        return;
    }
    for (int64_t at = 0; at < columns; at++) {
        const float gain = read(call.norm_weight, at, call.norm_dtype) + call.norm_offset;
        row[at] = rounded(row[at] * factor * gain, call.x_dtype);
    }
}

template <typename Format> void quantize_row(const Linear& call, Inputs& inputs, int64_t row, const float* values) {
    const int64_t columns = inputs.columns, group = call.x_group;
    int8_t* codes = inputs.codes.data() + row * inputs.chunks * Format::VECTORS * 64;
    float* scales = inputs.scales.data() + row * inputs.chunks * LANES;
    float* sums = inputs.sums.data() + row * inputs.stride;
    const int64_t stored = inputs.chunks * Format::VECTORS * 64;
    if (columns < stored) std::memset(codes + stored - Format::VECTORS * 64, 0, Format::VECTORS * 64);
    if (columns < stored) std::memset(scales + (inputs.chunks - 1) * LANES, 0, LANES * sizeof(float));
    const f32x16 magic = (f32x16){} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    alignas(64) int32_t steps[32];
    alignas(64) int8_t bytes[32];
    float scale = 1, inverse = 1;
    for (int64_t first = 0; first < columns; first += 32) {
        if (first % group == 0) {
            f32x16 largest = {}, none = {};
            for (int64_t at = first; at < first + group; at += LANES) {
                const f32x16 part = load<f32x16>(values + at), size = part < 0 ? -part : part;
                largest = size > largest ? size : largest;
                none += part - part;  // a NaN for what is not finite
            }
            const float most = max_lanes(largest);
            const bool finite = sum_lanes(none) == 0;
            scale = !finite ? NAN : most > 0 ? std::max(most * (1.0f / 127.0f), FLT_MIN) : 1.0f;
            inverse = finite ? 1.0f / scale : 0.0f;
        }
        for (int half = 0; half < 32; half += LANES) {
            f32x16 step = (load<f32x16>(values + first + half) * inverse + magic) - magic;
            const f32x16 most = (f32x16){} + 127.0f;
            step = step > most ? most : (step < -most ? -most : step);
            store(steps + half, __builtin_convertvector(step, i32x16));
        }
        for (int i = 0; i < 32; i++) bytes[i] = int8_t(steps[i]);
        for (int part = 0; part < 32; part += Format::UNIT) {
            int32_t total = 0;
            for (int i = 0; i < Format::UNIT; i++) total += steps[part + i];
            sums[(first + part) / Format::UNIT] = scale * float(total);
        }
        const int64_t chunk = first / Format::CHUNK, inside = first % Format::CHUNK;
        int8_t* to = codes + chunk * Format::VECTORS * 64;
        if (Format::PAIRS) {
            for (int i = 0; i < 16; i++) {
                to[inside / 2 + i] = bytes[2 * i];
                to[64 + inside / 2 + i] = bytes[2 * i + 1];
            }
        } else {
            std::memcpy(to + inside, bytes, 32);
        }
        const int64_t lanes = 32 * LANES / Format::CHUNK, lane = inside * LANES / Format::CHUNK;
        for (int64_t i = 0; i < lanes; i++) scales[chunk * LANES + lane + i] = scale;
    }
    const u8x64 shift = (u8x64){} + Format::SHIFT;
    for (int64_t chunk = 0; chunk < inputs.chunks; chunk++) {
        i32x16 sum = {};
        for (int part = 0; part < Format::VECTORS; part++)
            sum = dot4<Format::WIDE>(sum, shift, load<i8x64>(codes + (chunk * Format::VECTORS + part) * 64));
        store(inputs.starts.data() + (row * inputs.chunks + chunk) * LANES, -sum);
    }
}

template <typename Format> void order_row(Inputs& inputs, int64_t row, const float* values) {
    float* to = inputs.values.data() + row * inputs.columns;
    float* sums = inputs.sums.data() + row * inputs.stride;
    for (int64_t first = 0; first < inputs.columns; first += 32) {
        for (int i = 0; i < 16; i++) {
            to[first + i] = values[first + (Format::PAIRS ? 2 * i : i)];
            to[first + 16 + i] = values[first + (Format::PAIRS ? 2 * i + 1 : 16 + i)];
        }
        for (int part = 0; part < 32; part += Format::UNIT) {
            float total = 0;
            for (int i = 0; i < Format::UNIT; i++) total += values[first + part + i];
            sums[(first + part) / Format::UNIT] = total;
        }
    }
}

template <typename Format> void prepare_row(const Linear& call, Inputs& inputs, int64_t row) {
    static thread_local std::vector<float> values;
    const int64_t columns = call.weight.columns;
    values.resize(columns);
    const char* from = static_cast<const char*>(call.x) + row * call.x_stride * (call.x_dtype == FLOAT32 ? 4 : 2);
    if (call.x_dtype == FLOAT32) std::memcpy(values.data(), from, columns * 4);
    else
        for (int64_t at = 0; at < columns; at++) values[at] = read(from, at, call.x_dtype);
    if (call.norm_weight) normalize(call, values.data());
    if (call.x_group) quantize_row<Format>(call, inputs, row, values.data());
    else order_row<Format>(inputs, row, values.data());
}
