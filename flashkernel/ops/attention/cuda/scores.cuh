// From q . k to a masked score: softcap, ALiBi, bias, score function, mask, dropout. Forward and backward share this.
//
// The launcher defines, for the call at hand: HAS_BIAS, HAS_ALIBI, HAS_SOFTCAP, HAS_SCORE, HAS_DROPOUT (0 or 1), and
// SCALE_FIRST where the scale is not positive;
// MASK_EXPRESSION, SCORE_EXPRESSION and SCORE_GRAD_EXPRESSION, C++ over (score, b, h, q, k, sq, sk) and the tables;
// TABLE_PARAMETERS, the tables as kernel parameters, and TABLE_FIELDS and TABLE_VALUES, the same as a struct.

#pragma once

#include "constants.cuh"
#include "mma.cuh"

#ifndef TABLE_PARAMETERS
#define TABLE_PARAMETERS
#define TABLE_FIELDS
#define TABLE_VALUES
#endif
#ifndef MASK_EXPRESSION
#define MASK_EXPRESSION true
#endif
#ifndef SCALE_FIRST
#define SCALE_FIRST 0
#endif
#ifndef SCORE_EXPRESSION
#define SCORE_EXPRESSION score
#define SCORE_GRAD_EXPRESSION 1.f
#endif

// Scores are scale * q . k with a positive scale: their order is that of q . k, and the exponent can scale them.
constexpr bool PLAIN = !(HAS_BIAS || HAS_ALIBI || HAS_SOFTCAP || HAS_SCORE || SCALE_FIRST);

__device__ inline float negative_infinity() { return __int_as_float(0xff800000); }

// Floor division and modulo by a positive number, as Python has them.
__device__ inline int floor_div(int a, int b) { return a / b - (a % b < 0); }
__device__ inline int floor_mod(int a, int b) { return (a % b + b) % b; }
__device__ inline long long floor_div(long long a, int b) { return a / b - (a % b < 0); }
__device__ inline long long floor_mod(long long a, int b) { return (a % b + b) % b; }

// NaN wins, as in torch.
__device__ inline float min_float(float a, float b) { return a != a || a < b ? a : b; }
__device__ inline float max_float(float a, float b) { return a != a || a > b ? a : b; }
template <typename A, typename B>
__device__ inline auto min_int(A a, B b) { return a < b ? a : b; }
template <typename A, typename B>
__device__ inline auto max_int(A a, B b) { return a > b ? a : b; }

// One element of a table, 0 outside of it.
template <typename T>
__device__ inline T table_at(const T* data, long long offset, bool inside) {
    return inside ? data[offset] : T(0);
}

struct Tables {
    TABLE_FIELDS
};

// MurmurHash3's finalizer: blocks/dropout.py has the same in torch.
__device__ inline unsigned scramble(unsigned word) {
    word ^= word >> 16;
    word *= 0x85ebca6bu;
    word ^= word >> 13;
    word *= 0xc2b2ae35u;
    return word ^ (word >> 16);
}

// Everything about one (batch, head) that the score of a pair depends on.
struct ScoreParams {
    int b, h, heads, seqlen_q, seqlen_k;
    float scale, softcap, alibi_slope;
    const BIAS_TYPE* bias;  // of this batch and head
    long long bias_stride_q, bias_stride_k;
    unsigned seed_word, drop_threshold;
    Tables tables;
};

__device__ inline bool visible(const ScoreParams& p, int q, int k) {
    const int b = p.b, h = p.h, sq = p.seqlen_q, sk = p.seqlen_k;
    const Tables& tables = p.tables;
    (void)b, (void)h, (void)sq, (void)sk, (void)tables;
    return (q < sq) & (k < sk) & (MASK_EXPRESSION);
}

// The score before the score function: softcap, then ALiBi, then the bias.
__device__ inline float biased_score(const ScoreParams& p, float product, int q, int k) {
    float score = product * p.scale;
#if HAS_SOFTCAP
    score = p.softcap * tanhf(score / p.softcap);
#endif
#if HAS_ALIBI
    score -= p.alibi_slope * fabsf(static_cast<float>(q + (p.seqlen_k - p.seqlen_q) - k));
#endif
#if HAS_BIAS
    if (q < p.seqlen_q && k < p.seqlen_k)
        score += static_cast<float>(p.bias[q * p.bias_stride_q + k * p.bias_stride_k]);
#endif
    return score;
}

__device__ inline float apply_score_function(const ScoreParams& p, float score, int q, int k) {
    const int b = p.b, h = p.h, sq = p.seqlen_q, sk = p.seqlen_k;
    const Tables& tables = p.tables;
    (void)b, (void)h, (void)sq, (void)sk, (void)tables;
    return SCORE_EXPRESSION;
}

__device__ inline float score_function_grad(const ScoreParams& p, float score, int q, int k) {
    const int b = p.b, h = p.h, sq = p.seqlen_q, sk = p.seqlen_k;
    const Tables& tables = p.tables;
    (void)b, (void)h, (void)sq, (void)sk, (void)tables;
    return SCORE_GRAD_EXPRESSION;
}

// Whether dropout keeps a pair.
__device__ inline bool keep(const ScoreParams& p, int q, int k) {
    const long long index =
        ((static_cast<long long>(p.b) * p.heads + p.h) * p.seqlen_q + q) * p.seqlen_k + k;
    const unsigned outer = scramble(static_cast<unsigned>(index >> 32) ^ p.seed_word);
    return scramble(static_cast<unsigned>(index) ^ outer) >= p.drop_threshold;
}

// The K blocks that a tile of queries sees (or the Q blocks that a tile of keys is seen by): ranges of neighboring
// blocks, each with whether the mask must be applied. blocks/tile_ranges.py makes the table.
struct BlockIterator {
    const int* table;  // [tiles * max_ranges][3]: first block, end, masked
    int entry, last;   // of the table: the next range, and where this tile's ranges end
    int block, end;    // of the range at hand
    bool masked;

    __device__ inline BlockIterator(const int* table, const int* counts, int tile, int max_ranges)
        : table(table), entry(tile * max_ranges * 3), last(entry + counts[tile] * 3) {
        next_range();
    }
    __device__ inline bool valid() const { return block < end; }
    __device__ inline void next() {
        if (++block == end) next_range();
    }
    __device__ inline void next_range() {
        block = end = 0;
        if (entry >= last) return;
        const int* range = table + opaque(entry);
        block = range[0], end = range[1], masked = range[2] != 0;
        entry += 3;
    }
};
