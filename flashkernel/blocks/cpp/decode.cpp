// Keys and values of new tokens into pages, rotated on the way, attention of few queries to cached keys, and the most
// likely token, on a CPU.

#include "attend.h"

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
    int32_t dtype, page_dtype, interleaved, threads;
};

}

namespace {

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

void append_query(const Append& call, int64_t token, int64_t head, float* row) {
    read_values(call.q, token * call.q_strides[0] + head * call.q_strides[1], call.head_dim, call.dtype, row);
    if (call.rotary_dim) rotate(call, token, row);
    write_values(call.q_out, (token * call.heads + head) * call.head_dim, row, call.head_dim, call.dtype);
}

void append_key_and_value(const Append& call, int64_t token, int64_t head, float* row) {
    const int64_t slot = call.slots[token];
    if (slot < 0 || slot >= call.num_slots) return;
    const int64_t page = slot / call.page_size, offset = slot % call.page_size;
    const int64_t *k = call.k_page_strides, *v = call.v_page_strides;
    read_values(call.k, token * call.k_strides[0] + head * call.k_strides[1], call.head_dim, call.dtype, row);
    if (call.rotary_dim) rotate(call, token, row);
    write_values(call.k_pages, page * k[0] + offset * k[1] + head * k[2], row, call.head_dim, call.page_dtype);
    read_values(call.v, token * call.v_strides[0] + head * call.v_strides[1], call.value_dim, call.dtype, row);
    write_values(call.v_pages, page * v[0] + offset * v[1] + head * v[2], row, call.value_dim, call.page_dtype);
}

// Index of the largest of `count` values, the first of several; -1 if one is NaN, or if the largest is infinite or at
// most `lowest`.
int64_t argmax(const float* values, int64_t count, float lowest) {
    f32x16 largest = (f32x16){} - INFINITY, wrong = {};
    i32x16 where = {};
    int64_t at = 0;
    for (; at + LANES <= count; at += LANES) {
        const f32x16 part = load<f32x16>(values + at);
        const auto more = part > largest;
        largest = more ? part : largest;
        where = more ? (i32x16){} + int32_t(at) : where;
        wrong = part == part ? wrong : part;
    }
    float most = -INFINITY;
    int64_t found = 0;
    for (int lane = 0; lane < LANES; lane++) {
        const int64_t index = where[lane] + lane;
        if (largest[lane] > most || (largest[lane] == most && index < found)) most = largest[lane], found = index;
    }
    bool nan = sum_lanes(wrong) != 0;
    for (; at < count; at++) {
        nan = nan || values[at] != values[at];
        if (values[at] > most) most = values[at], found = at;
    }
    return nan || !(most > lowest && most < INFINITY) ? -1 : found;
}

}  // namespace

extern "C" {

void greedy(const float* logits, int64_t rows, int64_t vocab, int64_t stride, float lowest, int64_t* found) {
    for (int64_t row = 0; row < rows; row++) found[row] = argmax(logits + row * stride, vocab, lowest);
}

// All threads of a team call these; the work is done when all have returned.
void append_kv_team(const Append* call) {
    static thread_local std::vector<float> memory;
    memory.resize(std::max(call->head_dim, call->value_dim));
    const int64_t heads = call->q ? call->heads : 0, each = heads + call->kv_heads;
#pragma omp for schedule(static) nowait
    for (int64_t index = 0; index < call->tokens * each; index++) {
        const int64_t token = index / each, head = index % each;
        if (head < heads) append_query(*call, token, head, memory.data());
        else append_key_and_value(*call, token, head - heads, memory.data());
    }
}

void attend_team(const Attend* call) {
    const int64_t tasks = call->batch * call->kv_heads * call->splits;
#pragma omp for schedule(dynamic) nowait
    for (int64_t task = 0; task < tasks; task++) attend_part(*call, task);
}

void append_kv(const Append* call) {
    const bool small = call->tokens * (call->heads + call->kv_heads) * call->head_dim < (1 << 15);
#pragma omp parallel num_threads(small ? 1 : call->threads)
    append_kv_team(call);
}

void attend(const Attend* call) {
    int64_t keys = 0;
    for (int64_t sequence = 0; sequence < call->batch; sequence++) keys += call->lengths[sequence];
    const bool small = keys * call->heads * call->seqlen_q * call->head_dim < (1 << 18);  // a second thread costs more
#pragma omp parallel num_threads(small ? 1 : call->threads)
    attend_team(call);
}
}
