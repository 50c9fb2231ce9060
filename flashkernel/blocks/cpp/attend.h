// Attention of few queries to cached keys on a CPU.
//
// A task is one sequence, one KV head and one of `splits` ranges of the keys. It leaves the row max m, the sum l and
// the unnormalised output of each query in `partials`; the task that finishes last merges them.

#pragma once

#include "vectors.h"

enum CacheDtype { CACHE_INT8 = 3, CACHE_FP8 = 4 };  // after Dtype

extern "C" {

// Attention of q [batch, seqlen_q, heads, head_dim] to cached keys. Query i of sequence b is at position lengths[b] -
// seqlen_q + i and sees `window` keys (0: all) up to itself, and the first sink_tokens.
struct Attend {
    const void *q, *k, *v;
    const float *k_scale, *v_scale, *sinks;
    const int32_t *lengths, *page_table;  // page_table: null for a contiguous cache
    void* out;
    float* lse;         // [batch, heads, seqlen_q], or null
    float* partials;    // [batch, kv_heads, splits, seqlen_q * heads / kv_heads, 2 + value_dim]: m, l, o
    int32_t* finished;  // [batch, kv_heads] zeros: how many splits are done
    int64_t batch, seqlen_q, heads, kv_heads, head_dim, value_dim, page_size, capacity, table_stride, splits;
    int64_t q_strides[3];                     // sequence, query, head
    int64_t k_strides[3], v_strides[3];       // page (or sequence), slot, head
    int64_t scale_strides[2];                 // page, slot
    int64_t window, sink_tokens;
    float scale, softcap;
    int32_t dtype, cache_dtype, threads, padding;
};
}

namespace {

constexpr int64_t RUN = 64;    // most keys that are converted to float32 at a time
constexpr int64_t AHEAD = 12;  // keys by which a cache is prefetched: the rows of a head do not lie side by side

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

// Copies `count` elements from element `at` on, as floats.
inline void read_values(const void* from, int64_t at, int64_t count, int dtype, float* to) {
    if (dtype == FLOAT32) std::memcpy(to, static_cast<const float*>(from) + at, count * sizeof(float));
    else if (dtype == CACHE_INT8)
        for (int64_t i = 0; i < count; i++) to[i] = static_cast<const int8_t*>(from)[at + i];
    else if (dtype == CACHE_FP8)
        for (int64_t i = 0; i < count; i++) to[i] = FP8.values[static_cast<const uint8_t*>(from)[at + i]];
    else if (dtype == FLOAT16) halves_to_floats(static_cast<const uint16_t*>(from) + at, to, count);
    else
        for (int64_t i = 0; i < count; i++) to[i] = bfloat_to_float(static_cast<const uint16_t*>(from)[at + i]);
}

inline void write_values(void* to, int64_t at, const float* from, int64_t count, int dtype) {
    if (dtype == FLOAT32) std::memcpy(static_cast<float*>(to) + at, from, count * sizeof(float));
    else
        for (int64_t i = 0; i < count; i++) write(to, at + i, from[i], dtype);
}

// Rows of a cache whose elements are floats: row i begins at i * stride.
struct Rows {
    const float* data;
    int64_t stride;
};

// `count` adjacent slots of a page, for one head: themselves, or converted into `scratch`.
inline Rows cache_rows(const void* cache, int64_t at, int64_t stride, int64_t count, int64_t dim, int dtype,
                       float* scratch) {
    if (dtype == FLOAT32) return {static_cast<const float*>(cache) + at, stride};
    for (int64_t i = 0; i < count; i++) read_values(cache, at + i * stride, dim, dtype, scratch + i * dim);
    return {scratch, dim};
}

// found[i] = q . k[i] for N keys. FIRST: they are not in the L1 cache yet, and later ones are prefetched.
template <int N, bool FIRST> inline void dots(const float* q, Rows k, int64_t dim, float* found) {
    f32x16 sums[N] = {};
    int64_t at = 0;
    for (; at + LANES <= dim; at += LANES) {
        const f32x16 part = load<f32x16>(q + at);
        UNROLLED for (int i = 0; i < N; i++) {
            if (FIRST) __builtin_prefetch(k.data + (AHEAD + i) * k.stride + at);
            sums[i] += part * load<f32x16>(k.data + i * k.stride + at);
        }
    }
    if (N == 4) sum_lanes_of_4(sums, found);
    else
        for (int i = 0; i < N; i++) found[i] = sum_lanes(sums[i]);
    for (; at < dim; at++)
        for (int i = 0; i < N; i++) found[i] += q[at] * k.data[i * k.stride + at];
}

// sums[r] += weights[r][i] * v[i] over `count` keys, in COLUMNS columns of ROWS rows.
template <int ROWS, int COLUMNS>
inline void add_columns(float* sums, int64_t width, const float* weights, int64_t stride, Rows v, int64_t count) {
    constexpr int VECTORS = COLUMNS / LANES;
    f32x16 found[ROWS][VECTORS];
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int c = 0; c < VECTORS; c++) found[r][c] = load<f32x16>(sums + r * width + c * LANES);
    for (int64_t i = 0; i < count; i++) {
        f32x16 values[VECTORS];
        UNROLLED for (int c = 0; c < VECTORS; c++) {
            __builtin_prefetch(v.data + (AHEAD + i) * v.stride + c * LANES);
            values[c] = load<f32x16>(v.data + i * v.stride + c * LANES);
        }
        UNROLLED for (int r = 0; r < ROWS; r++)
            UNROLLED for (int c = 0; c < VECTORS; c++) found[r][c] += values[c] * weights[r * stride + i];
    }
    UNROLLED for (int r = 0; r < ROWS; r++)
        UNROLLED for (int c = 0; c < VECTORS; c++) store(sums + r * width + c * LANES, found[r][c]);
}

template <int ROWS>
void add_values(float* sums, int64_t width, const float* weights, int64_t stride, Rows v, int64_t count) {
    constexpr int WIDE = 4 * LANES;
    int64_t at = 0;
    for (; at + WIDE <= width; at += WIDE)
        add_columns<ROWS, WIDE>(sums + at, width, weights, stride, {v.data + at, v.stride}, count);
    for (; at + LANES <= width; at += LANES)
        add_columns<ROWS, LANES>(sums + at, width, weights, stride, {v.data + at, v.stride}, count);
    for (; at < width; at++)
        for (int r = 0; r < ROWS; r++)
            for (int64_t i = 0; i < count; i++)
                sums[r * width + at] += weights[r * stride + i] * v.data[i * v.stride + at];
}

// The keys of a task, and who sees them. Its scores are a column for each key: [0, sinks), then [from, to).
struct Keys {
    int64_t first_query, first_visible;  // position of query 0, and the first key of its window
    int64_t sinks, from, to, columns;

    Keys(const Attend& call, int64_t sequence, int64_t split) {
        const int64_t length = std::min<int64_t>(call.lengths[sequence], call.capacity);
        first_query = length - call.seqlen_q;
        first_visible = call.window ? std::max<int64_t>(0, first_query + 1 - call.window) : 0;
        const int64_t end = std::max<int64_t>(0, length), count = std::max<int64_t>(0, end - first_visible);
        from = first_visible + count * split / call.splits;
        to = first_visible + count * (split + 1) / call.splits;
        sinks = split == 0 ? std::min({end, first_visible, call.sink_tokens}) : 0;
        columns = sinks + to - from;
    }

    bool visible(const Attend& call, int64_t query, int64_t key) const {
        const int64_t position = first_query + query;
        return key <= position && (call.window == 0 || key > position - call.window || key < call.sink_tokens);
    }

    // Whether all queries see keys [key, key + count).
    bool all_visible(const Attend& call, int64_t key, int64_t count) const {
        const int64_t last = first_query + call.seqlen_q - 1;
        const bool inside = call.window == 0 || key > last - call.window || key + count <= call.sink_tokens;
        return inside && key + count - 1 <= first_query;
    }
};

// Calls body(key, count, column, page, slot) for runs of keys in adjacent slots.
template <typename Body> void for_each_run(const Attend& call, const Keys& keys, int64_t sequence, Body&& body) {
    for (int part = 0; part < 2; part++) {
        const int64_t end = part ? keys.to : keys.sinks, column = part ? keys.sinks - keys.from : 0;
        for (int64_t key = part ? keys.from : 0; key < end;) {
            const int64_t page = call.page_table ? key / call.page_size : 0;
            const int64_t at = call.page_table ? call.page_table[sequence * call.table_stride + page] : sequence;
            const int64_t page_end = call.page_table ? (page + 1) * call.page_size : end;
            const int64_t count = std::min({end - key, page_end - key, RUN});
            body(key, count, key + column, at, key - page * call.page_size);
            key += count;
        }
    }
}

// Merges the splits of a sequence and KV head, and writes their outputs.
void merge_splits(const Attend& call, int64_t sequence, int64_t kv_head, const float* partials, float* merged) {
    const int64_t group = call.heads / call.kv_heads, rows = group * call.seqlen_q, each = 2 + call.value_dim;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t query = row / group, head = kv_head * group + row % group;
        const float* own = partials + row * each;
        float most = call.sinks ? call.sinks[head] : -INFINITY;
        for (int64_t split = 0; split < call.splits; split++) most = std::max(most, own[split * rows * each]);
        const float shift = most == -INFINITY ? 0.0f : most;
        float total = call.sinks ? std::exp(call.sinks[head] - shift) : 0.0f;
        std::fill(merged, merged + call.value_dim, 0.0f);
        for (int64_t split = 0; split < call.splits; split++) {
            const float* part = own + split * rows * each;
            const float factor = std::exp(part[0] - shift);
            total += part[1] * factor;
            for (int64_t i = 0; i < call.value_dim; i++) merged[i] += part[2 + i] * factor;
        }
        if (call.lse)
            call.lse[(sequence * call.heads + head) * call.seqlen_q + query] =
                total > 0 ? shift + std::log(total) : total == 0 ? -INFINITY : NAN;
        const float inverse = total == 0 ? 0.0f : 1.0f / total;
        for (int64_t i = 0; i < call.value_dim; i++) merged[i] *= inverse;
        const int64_t at = ((sequence * call.seqlen_q + query) * call.heads + head) * call.value_dim;
        write_values(call.out, at, merged, call.value_dim, call.dtype);
    }
}

void attend_part(const Attend& call, int64_t task) {
    static thread_local std::vector<float> memory;
    const int64_t split = task % call.splits, pair = task / call.splits;
    const int64_t sequence = pair / call.kv_heads, kv_head = pair % call.kv_heads;
    const int64_t group = call.heads / call.kv_heads, rows = group * call.seqlen_q, each = 2 + call.value_dim;
    const Keys keys(call, sequence, split);
    const int64_t stride = (keys.columns + LANES - 1) / LANES * LANES + LANES;
    const int64_t width = std::max(call.head_dim, call.value_dim);
    memory.resize(rows * (stride + call.head_dim + call.value_dim) + RUN * width);
    float *scores = memory.data(), *queries = scores + rows * stride, *sums = queries + rows * call.head_dim;
    float* scratch = sums + rows * call.value_dim;
    for (int64_t row = 0; row < rows; row++) {
        const int64_t query = row / group, head = kv_head * group + row % group;
        const int64_t at = sequence * call.q_strides[0] + query * call.q_strides[1] + head * call.q_strides[2];
        float* own = queries + row * call.head_dim;
        read_values(call.q, at, call.head_dim, call.dtype, own);
        for (int64_t i = 0; i < call.head_dim; i++) own[i] *= call.scale;
    }
    auto scale_of = [&](const float* scales, int64_t page, int64_t slot) {
        return scales[page * call.scale_strides[0] + slot * call.scale_strides[1] + kv_head];
    };
    std::fill(scores, scores + rows * stride, -INFINITY);
    for_each_run(call, keys, sequence, [&](int64_t key, int64_t count, int64_t column, int64_t page, int64_t slot) {
        const int64_t at = page * call.k_strides[0] + slot * call.k_strides[1] + kv_head * call.k_strides[2];
        const Rows k = cache_rows(call.k, at, call.k_strides[1], count, call.head_dim, call.cache_dtype, scratch);
        const bool all = keys.all_visible(call, key, count);
        for (int64_t row = 0; row < rows; row++) {
            const float* q = queries + row * call.head_dim;
            float* own = scores + row * stride + column;
            for (int64_t i = 0; i < count;) {
                const Rows from = {k.data + i * k.stride, k.stride};
                if (all && count - i >= 4) {
                    if (row == 0) dots<4, true>(q, from, call.head_dim, own + i);
                    else dots<4, false>(q, from, call.head_dim, own + i);
                    i += 4;
                } else {
                    if (all || keys.visible(call, row / group, key + i))
                        dots<1, false>(q, from, call.head_dim, own + i);
                    i++;
                }
            }
            for (int64_t i = 0; i < count && (call.k_scale || call.softcap); i++) {
                if (!all && !keys.visible(call, row / group, key + i)) continue;
                const float score = call.k_scale ? own[i] * scale_of(call.k_scale, page, slot + i) : own[i];
                own[i] = call.softcap ? call.softcap * std::tanh(score / call.softcap) : score;
            }
        }
    });
    float* partials = call.partials + (pair * call.splits + split) * rows * each;
    for (int64_t row = 0; row < rows; row++) {
        float* own = scores + row * stride;
        f32x16 largest = (f32x16){} - INFINITY, totals = {};
        for (int64_t at = 0; at < keys.columns; at += LANES) {
            const f32x16 part = load<f32x16>(own + at);
            largest = part > largest ? part : largest;  // not of a NaN, which the sum is then
        }
        const float most = max_lanes(largest), shift = most == -INFINITY ? 0.0f : most;
        for (int64_t at = 0; at < keys.columns; at += LANES) {
            const f32x16 p = exp_lanes(load<f32x16>(own + at) - shift);
            store(own + at, p);
            totals += p;
        }
        partials[row * each] = most;
        partials[row * each + 1] = sum_lanes(totals);
    }
    std::fill(sums, sums + rows * call.value_dim, 0.0f);
    for_each_run(call, keys, sequence, [&](int64_t key, int64_t count, int64_t column, int64_t page, int64_t slot) {
        const int64_t at = page * call.v_strides[0] + slot * call.v_strides[1] + kv_head * call.v_strides[2];
        const Rows v = cache_rows(call.v, at, call.v_strides[1], count, call.value_dim, call.cache_dtype, scratch);
        for (int64_t row = 0; row < rows && call.v_scale; row++)
            for (int64_t i = 0; i < count; i++)
                scores[row * stride + column + i] *= scale_of(call.v_scale, page, slot + i);
        const bool all = keys.all_visible(call, key, count);
        for (int64_t row = 0; row < rows;) {
            const float* weights = scores + row * stride + column;
            float* own = sums + row * call.value_dim;
            const int64_t left = all ? rows - row : 1;
            if (!all) {  // a value that a query does not see may be NaN
                for (int64_t i = 0; i < count; i++)
                    if (keys.visible(call, row / group, key + i))
                        add_values<1>(own, call.value_dim, weights + i, stride, {v.data + i * v.stride, v.stride}, 1);
            } else if (left >= 4) add_values<4>(own, call.value_dim, weights, stride, v, count);
            else if (left == 3) add_values<3>(own, call.value_dim, weights, stride, v, count);
            else if (left == 2) add_values<2>(own, call.value_dim, weights, stride, v, count);
            else add_values<1>(own, call.value_dim, weights, stride, v, count);
            row += std::min<int64_t>(4, left);
        }
    });
    for (int64_t row = 0; row < rows; row++)
        std::memcpy(partials + row * each + 2, sums + row * call.value_dim, call.value_dim * sizeof(float));
    int32_t* finished = call.finished + pair;
    if (__atomic_add_fetch(finished, 1, __ATOMIC_ACQ_REL) < call.splits) return;
    *finished = 0;
    merge_splits(call, sequence, kv_head, call.partials + pair * call.splits * rows * each, sums);
}

}  // namespace
