// From q . k and dP to P and the gradient of q . k: dS = P (dP - delta), back through score function, bias, ALiBi and
// softcap (scores.cuh), whose own gradients are summed here too.

#pragma once

#include "scores.cuh"

__device__ inline float2 load_pair(const float* address) { return *reinterpret_cast<const float2*>(address); }

// Of dslope = -sum(dS distance): sums over keys, of each query. delta comes from an O that was rounded, and long
// distances would multiply its error; with these sums the launcher takes it back (backward_launch.py).
struct SlopeSums {
    float ds_distance, ds, p, p_distance;

    __device__ inline void add(const SlopeSums& other) {
        ds_distance += other.ds_distance, ds += other.ds, p += other.p, p_distance += other.p_distance;
    }
    // Sums over the eight lanes that have a query, and adds to `target`, four numbers `stride` apart.
    __device__ inline void add_to(float* target, long long stride) {
        float sums[4] = {ds_distance, ds, p, p_distance};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
#pragma unroll
            for (int step = 4; step < WARP; step *= 2) sums[i] += __shfl_xor_sync(ALL_LANES, sums[i], step);
            if (threadIdx.x % WARP < 4) atomicAdd(target + i * stride, sums[i]);
        }
    }
};

// Everything about one (batch, head) that the gradient of a pair depends on.
struct GradientParams {
    ScoreParams scores;
    float keep_scale;
    float* dbias;  // of this batch and head
    long long dbias_q, dbias_k;
    float* slope_sums;  // of this batch and head: a SlopeSums of each query, its four numbers `slope_stride` apart
    long long slope_stride;
};

// What a pair adds to the gradients.
struct PairGradient {
    float p;         // for dV: after dropout
    float dproduct;  // for dQ and dK: of q . k, without the scale
    SlopeSums slope;
};

// From q . k (`product`) and dP - delta; under dropout dP alone, from which delta is subtracted here.
template <bool DBIAS>
__device__ inline PairGradient pair_gradient(const GradientParams& params, float product, float dp, float minus_lse,
                                             float minus_delta, bool seen, bool kept, int q, int k) {
    const ScoreParams& scores = params.scores;
    PairGradient result;
    const float before = PLAIN ? product : biased_score(scores, product, q, k);
    const float score = PLAIN ? product : apply_score_function(scores, before, q, k);
    float p = exp2_approx(fmaf(score, PLAIN ? scores.scale * LOG2E : LOG2E, minus_lse));
    if (!seen) p = 0.f;
    result.p = p;
#if HAS_DROPOUT
    const float factor = kept ? params.keep_scale : 0.f;
    result.p = p * factor;
    dp = fmaf(dp, factor, minus_delta);
#endif
    float ds = p * dp;
    result.slope.ds = ds, result.slope.p = p;
#if HAS_SCORE
    // The derivative of a hidden pair may be infinite.
    const float derivative = p == 0.f ? 0.f : score_function_grad(scores, before, q, k);
    ds *= derivative, p *= derivative;
#endif
#if HAS_ALIBI
    const float distance = fabsf(static_cast<float>(q + (scores.seqlen_k - scores.seqlen_q) - k));
    result.slope.ds_distance = ds * distance, result.slope.p_distance = p * distance;
#endif
#if HAS_BIAS
    if (DBIAS && q < scores.seqlen_q && k < scores.seqlen_k && ds != 0.f)
        atomicAdd(params.dbias + q * params.dbias_q + k * params.dbias_k, ds);
#endif
    result.dproduct = ds;
#if HAS_SOFTCAP
    const float tanh = tanhf(product * scores.scale / scores.softcap);
    result.dproduct *= 1.f - tanh * tanh;
#endif
    return result;
}

// A bit for each pair of a lane, in the order of the accumulators [MT][NT][4].
template <int MT, int NT>
struct PairBits {
    unsigned words[(MT * NT * 4 + 31) / 32] = {};

    __device__ inline bool operator()(int m, int n, int i) const {
        const int index = (m * NT + n) * 4 + i;
        return words[index / 32] >> index % 32 & 1;
    }
    // Sets the bit of each pair (q, k) for which `test` is true; `first_query` and `first_key` are those of this lane.
    template <typename Test>
    __device__ inline void fill(int first_query, int first_key, const Test& test) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < NT; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const int index = (m * NT + n) * 4 + i;
                    const bool value = test(first_query + n * 8 + i % 2, first_key + m * 16 + i / 2 * 8);
                    words[index / 32] |= static_cast<unsigned>(value) << index % 32;
                }
    }
};

// P^T and dS^T of a warp's tile, packed to 16 bit as operand A, from S^T and dP^T. `minus_lse` and `minus_delta` begin
// at this lane's first query.
template <typename T, bool MASKED, bool DBIAS, int MT, int NT>
__device__ inline void softmax_gradient(unsigned (&p)[MT][NT / 2][4], unsigned (&ds)[MT][NT / 2][4],
                                        const float (&s)[MT][NT][4], const float (&dp)[MT][NT][4],
                                        const float* minus_lse, const float* minus_delta,
                                        const PairBits<MT, NT>& seen, const PairBits<MT, NT>& kept,
                                        const GradientParams& params, int first_query, int first_key) {
#pragma unroll
    for (int n = 0; n < NT; ++n) {
        const float2 lse = load_pair(minus_lse + n * 8);
        const float2 delta = HAS_DROPOUT ? load_pair(minus_delta + n * 8) : make_float2(0.f, 0.f);
        const int query = first_query + n * 8;
        SlopeSums left_sums = {}, right_sums = {};
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int key = first_key + m * 16 + half * 8, left = half * 2, right = half * 2 + 1;
                const PairGradient first = pair_gradient<DBIAS>(
                    params, s[m][n][left], dp[m][n][left], lse.x, delta.x, !MASKED || seen(m, n, left),
                    kept(m, n, left), query, key);
                const PairGradient second = pair_gradient<DBIAS>(
                    params, s[m][n][right], dp[m][n][right], lse.y, delta.y, !MASKED || seen(m, n, right),
                    kept(m, n, right), query + 1, key);
                p[m][n / 2][n % 2 * 2 + half] = pack<T>(first.p, second.p);
                ds[m][n / 2][n % 2 * 2 + half] = pack<T>(first.dproduct, second.dproduct);
                left_sums.add(first.slope), right_sums.add(second.slope);
            }
#if HAS_ALIBI
        left_sums.add_to(params.slope_sums + query, params.slope_stride);
        right_sums.add_to(params.slope_sums + query + 1, params.slope_stride);
#endif
    }
}
