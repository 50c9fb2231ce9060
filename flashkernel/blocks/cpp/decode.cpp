// Keys and values of new tokens into pages, rotated on the way, and attention of few queries to cached keys, on a CPU.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "vectors.h"

enum CacheDtype { CACHE_INT8 = 3, CACHE_FP8 = 4 };  // after Dtype

extern "C" {

// New tokens: k and q are rotated by the tables cos and sin [tokens, rotary_dim / 2]. Strides are in elements. A token
// whose slot lies outside the pages is not written.
struct Append {
    const void *k, *v, *q;
    void *k_pages, *v_pages, *q_out;
    const float *cos, *sin;
    const int64_t* slots;
    int64_t tokens, heads, kv_heads, head_dim, value_dim, rotary_dim, page_size, num_slots, table_stride;
    int64_t k_strides[2], v_strides[2], q_strides[2];  // token, head
    int64_t k_page_strides[3], v_page_strides[3];      // page, slot, head
    int32_t dtype, page_dtype, interleaved, padding;
};

// Attention of q [batch, seqlen_q, heads, head_dim] to cached keys. Query i of sequence b is at position lengths[b] -
// seqlen_q + i and sees `window` keys (0: all) up to itself, and the first sink_tokens.
struct Attend {
    const void *q, *k, *v;
    const float *k_scale, *v_scale, *sinks;
    const int32_t *lengths, *page_table;  // page_table: null for a contiguous cache
    void* out;
    float* lse;  // [batch, heads, seqlen_q], or null
    int64_t batch, seqlen_q, heads, kv_heads, head_dim, value_dim, page_size, capacity, table_stride;
    int64_t q_strides[3];                     // sequence, query, head
    int64_t k_strides[3], v_strides[3];       // page (or sequence), slot, head
    int64_t scale_strides[2];                 // page, slot
    int64_t window, sink_tokens;
    float scale, softcap;
    int32_t dtype, cache_dtype, threads, padding;
};
}

namespace {

inline int64_t width_of(int dtype) { return dtype == FLOAT32 ? 4 : dtype == FLOAT16 || dtype == BFLOAT16 ? 2 : 1; }

inline const char* address(const void* from, int64_t elements, int dtype) {
    return static_cast<const char*>(from) + elements * width_of(dtype);
}

// e4m3fn: sign, four bits of exponent biased by 7, three of fraction; 0x7f is NaN.
struct Fp8Values {
    float values[256];
    Fp8Values() {
        for (int code = 0; code < 256; code++) {
            const int exponent = code >> 3 & 15, fraction = code & 7;
            float value = exponent ? std::ldexp(1.0f + fraction / 8.0f, exponent - 7) : std::ldexp(fraction / 8.0f, -6);
            if ((code & 127) == 127) value = NAN;
            values[code] = code & 128 ? -value : value;
        }
    }
};
const Fp8Values FP8;

// A row of `count` elements as floats: itself, or converted into `scratch`.
inline const float* as_floats(const void* from, int64_t count, int dtype, float* scratch) {
    if (dtype == FLOAT32) return static_cast<const float*>(from);
    if (dtype == CACHE_INT8)
        for (int64_t i = 0; i < count; i++) scratch[i] = static_cast<const int8_t*>(from)[i];
    else if (dtype == CACHE_FP8)
        for (int64_t i = 0; i < count; i++) scratch[i] = FP8.values[static_cast<const uint8_t*>(from)[i]];
    else if (dtype == FLOAT16) halves_to_floats(static_cast<const uint16_t*>(from), scratch, count);
    else
        for (int64_t i = 0; i < count; i++) scratch[i] = bfloat_to_float(static_cast<const uint16_t*>(from)[i]);
    return scratch;
}

inline float dot(const float* a, const float* b, int64_t count) {
    f32x16 sums = {};
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES) sums += load<f32x16>(a + at) * load<f32x16>(b + at);
    float rest = 0;
    for (; at < count; at++) rest += a[at] * b[at];
    return sum_lanes(sums) + rest;
}

inline void add_scaled(float* to, const float* from, float factor, int64_t count) {
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES)
        store(to + at, f32x16(load<f32x16>(to + at) + load<f32x16>(from + at) * factor));
    for (; at < count; at++) to[at] += from[at] * factor;
}

void write_row(void* to, const float* from, int64_t count, int dtype) {
    for (int64_t i = 0; i < count; i++) write(to, i, from[i], dtype);
}

// Rotates the first rotary_dim columns of a row: pairs are (i, i + half), or (2i, 2i + 1) if interleaved.
void rotate(const Append& call, int64_t token, float* row) {
    const int64_t half = call.rotary_dim / 2;
    const float *cos = call.cos + token * call.table_stride, *sin = call.sin + token * call.table_stride;
    for (int64_t i = 0; i < half; i++) {
        float &a = row[call.interleaved ? 2 * i : i], &b = row[call.interleaved ? 2 * i + 1 : i + half];
        const float first = a * cos[i] - b * sin[i];
        b = b * cos[i] + a * sin[i];
        a = first;
    }
}

// One sequence and KV head: all its queries.
void attend_head(const Attend& call, int64_t sequence, int64_t kv_head, std::vector<float>& memory) {
    const int64_t group = call.heads / call.kv_heads, rows = group * call.seqlen_q;
    const int64_t length = std::min<int64_t>(call.lengths[sequence], call.capacity);
    const int64_t first_query = length - call.seqlen_q;
    const int64_t keys = std::max<int64_t>(0, length), width = std::max(call.head_dim, call.value_dim);
    const int64_t stride = (keys + LANES - 1) / LANES * LANES + LANES;
    memory.resize(rows * (stride + call.head_dim + call.value_dim) + width);
    float *scores = memory.data(), *queries = scores + rows * stride, *sums = queries + rows * call.head_dim;
    float* scratch = sums + rows * call.value_dim;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t query = row / group, head = kv_head * group + row % group;
        const int64_t at = sequence * call.q_strides[0] + query * call.q_strides[1] + head * call.q_strides[2];
        for (int64_t i = 0; i < call.head_dim; i++)
            queries[row * call.head_dim + i] = read(call.q, at + i, call.dtype) * call.scale;
    }
    auto sees = [&](int64_t row, int64_t key) {
        const int64_t position = first_query + row / group;
        return key <= position && (call.window == 0 || key > position - call.window || key < call.sink_tokens);
    };
    const int64_t start = call.window ? std::max<int64_t>(0, first_query + 1 - call.window) : 0;
    auto for_each_key = [&](auto&& body) {
        int64_t key = std::min(start, call.sink_tokens) > 0 ? 0 : start;
        while (key < keys) {
            const int64_t page = call.page_table ? key / call.page_size : 0;
            const int64_t from = call.page_table ? call.page_table[sequence * call.table_stride + page] : sequence;
            const int64_t end = call.page_table ? std::min(keys, (page + 1) * call.page_size) : keys;
            for (; key < end; key++) {
                if (key >= call.sink_tokens && key < start) continue;
                body(key, from, key - page * call.page_size);
            }
        }
    };
    std::fill(scores, scores + rows * stride, -INFINITY);
    for_each_key([&](int64_t key, int64_t page, int64_t slot) {
        const int64_t at = page * call.k_strides[0] + slot * call.k_strides[1] + kv_head * call.k_strides[2];
        const float* k = as_floats(address(call.k, at, call.cache_dtype), call.head_dim, call.cache_dtype, scratch);
        const float factor =
            call.k_scale ? call.k_scale[page * call.scale_strides[0] + slot * call.scale_strides[1] + kv_head] : 1.0f;
        for (int64_t row = 0; row < rows; row++) {
            if (!sees(row, key)) continue;
            float score = dot(queries + row * call.head_dim, k, call.head_dim) * factor;
            if (call.softcap) score = call.softcap * std::tanh(score / call.softcap);
            scores[row * stride + key] = score;
        }
    });
    for (int64_t row = 0; row < rows; row++) {
        const int64_t query = row / group, head = kv_head * group + row % group;
        float *own = scores + row * stride, most = call.sinks ? call.sinks[head] : -INFINITY, total = 0;
        for (int64_t key = 0; key < keys; key++) most = own[key] > most || own[key] != own[key] ? own[key] : most;
        const float shift = most == -INFINITY ? 0.0f : most;
        f32x16 totals = {};
        for (int64_t key = 0; key < keys; key += LANES) {
            const f32x16 p = exp_lanes(load<f32x16>(own + key) - shift);
            store(own + key, p);
            totals += p;
        }
        total = sum_lanes(totals) + (call.sinks ? std::exp(call.sinks[head] - shift) : 0.0f);
        if (call.lse)
            call.lse[(sequence * call.heads + head) * call.seqlen_q + query] =
                total > 0 ? shift + std::log(total) : most == most ? -INFINITY : most;
        const float inverse = total == 0 ? 0.0f : 1.0f / total;
        for (int64_t key = 0; key < keys; key++) own[key] *= inverse;
    }
    std::fill(sums, sums + rows * call.value_dim, 0.0f);
    for_each_key([&](int64_t key, int64_t page, int64_t slot) {
        const int64_t at = page * call.v_strides[0] + slot * call.v_strides[1] + kv_head * call.v_strides[2];
        const float* v = as_floats(address(call.v, at, call.cache_dtype), call.value_dim, call.cache_dtype, scratch);
        const float factor =
            call.v_scale ? call.v_scale[page * call.scale_strides[0] + slot * call.scale_strides[1] + kv_head] : 1.0f;
        for (int64_t row = 0; row < rows; row++)
            if (sees(row, key))
                add_scaled(sums + row * call.value_dim, v, scores[row * stride + key] * factor, call.value_dim);
    });
    for (int64_t row = 0; row < rows; row++) {
        const int64_t query = row / group, head = kv_head * group + row % group;
        const int64_t at = ((sequence * call.seqlen_q + query) * call.heads + head) * call.value_dim;
        write_row(const_cast<char*>(address(call.out, at, call.dtype)), sums + row * call.value_dim, call.value_dim,
                  call.dtype);
    }
}

}  // namespace

extern "C" {

void append_kv(const Append* given) {
    const Append& call = *given;
    static thread_local std::vector<float> memory;
    memory.resize(std::max(call.head_dim, call.value_dim));
    float* row = memory.data();
    for (int64_t token = 0; token < call.tokens; token++) {
        const int64_t slot = call.slots[token];
        const bool written = slot >= 0 && slot < call.num_slots;
        const int64_t page = written ? slot / call.page_size : 0, offset = written ? slot % call.page_size : 0;
        for (int64_t head = 0; head < call.heads && call.q; head++) {
            const int64_t at = token * call.q_strides[0] + head * call.q_strides[1];
            for (int64_t i = 0; i < call.head_dim; i++) row[i] = read(call.q, at + i, call.dtype);
            if (call.rotary_dim) rotate(call, token, row);
            const int64_t to = (token * call.heads + head) * call.head_dim;
            write_row(const_cast<char*>(address(call.q_out, to, call.dtype)), row, call.head_dim, call.dtype);
        }
        for (int64_t head = 0; head < call.kv_heads && written; head++) {
            const int64_t at = token * call.k_strides[0] + head * call.k_strides[1];
            for (int64_t i = 0; i < call.head_dim; i++) row[i] = read(call.k, at + i, call.dtype);
            if (call.rotary_dim) rotate(call, token, row);
            const int64_t* k = call.k_page_strides;
            const int64_t to = page * k[0] + offset * k[1] + head * k[2];
            write_row(const_cast<char*>(address(call.k_pages, to, call.page_dtype)), row, call.head_dim, call.page_dtype);
            const int64_t from = token * call.v_strides[0] + head * call.v_strides[1];
            for (int64_t i = 0; i < call.value_dim; i++) row[i] = read(call.v, from + i, call.dtype);
            const int64_t* v = call.v_page_strides;
            const int64_t target = page * v[0] + offset * v[1] + head * v[2];
            write_row(const_cast<char*>(address(call.v_pages, target, call.page_dtype)), row, call.value_dim,
                      call.page_dtype);
        }
    }
}

void attend(const Attend* given) {
    const Attend& call = *given;
    const int64_t tasks = call.batch * call.kv_heads;
    int64_t keys = 0;
    for (int64_t sequence = 0; sequence < call.batch; sequence++) keys += call.lengths[sequence];
    const bool small = keys * call.heads * call.seqlen_q * call.head_dim < (1 << 18);  // a second thread costs more
#pragma omp parallel for num_threads(small ? 1 : call.threads) schedule(dynamic)
    for (int64_t task = 0; task < tasks; task++) {
        static thread_local std::vector<float> memory;
        attend_head(call, task / call.kv_heads, task % call.kv_heads, memory);
    }
}
}
