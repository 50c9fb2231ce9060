// Device code that decoding and prefill share: a warp's query rows attend to tiles of cached keys.
//
// A tile is KEYS keys and as many values of one KV head, [KEYS][DIM] of STORED elements in shared memory. STORED is the
// queries' type T, or one byte: `signed char` is int8 and `unsigned char` float8_e4m3fn, with a float32 scale per key.
// The softmax is online, in powers of two: S = scale * log2(e) * Q K^T, P = exp2(S - m), l = sum P, O = P V.
//
// Rows are (query, head of the group) pairs: all query heads that share a KV head read it once. Tensor cores take 16
// rows at a time; those that a call does not have are padding.

#pragma once

#include "cache_tile.cuh"
#include "constants.cuh"
#include "mma.cuh"

// Programmatic dependent launch, from sm_90 on: a kernel's blocks may become resident while the kernels before it still
// run. It waits for those to complete before it accesses memory, and lets the next kernel start.
__device__ inline void pdl_enter() {
#if __CUDA_ARCH__ >= 900
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
#endif
}

__device__ inline float negative_infinity() { return __int_as_float(0xff800000); }

// Four stored bytes as two registers of two T each: `even` has bytes 0 and 2, `odd` has bytes 1 and 3. That is the order
// in which a 32-bit word splits with two masks; the columns of Q and O are permuted to match (`query_position`,
// `column_of`).
__device__ inline unsigned subtract_halves(unsigned a, unsigned b) {
    const __half2 c = __hsub2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
    return reinterpret_cast<const unsigned&>(c);
}
__device__ inline unsigned multiply_halves(unsigned a, unsigned b) {
    const __half2 c = __hmul2(reinterpret_cast<const __half2&>(a), reinterpret_cast<const __half2&>(b));
    return reinterpret_cast<const unsigned&>(c);
}

// int8: 0x6400 | u is the half 1024 + u, where u = value + 128.
__device__ inline void widen(unsigned bytes, unsigned& even, unsigned& odd, signed char, __half) {
    const unsigned u = bytes ^ 0x80808080u;
    even = subtract_halves((u & 0x00ff00ffu) | 0x64006400u, 0x64806480u);
    odd = subtract_halves(((u >> 8) & 0x00ff00ffu) | 0x64006400u, 0x64806480u);
}
// bfloat16 has too few bits for that; 0x4b000000 | u is the float 2^23 + u.
__device__ inline void widen(unsigned bytes, unsigned& even, unsigned& odd, signed char, __nv_bfloat16) {
    const unsigned u = bytes ^ 0x80808080u;
    float value[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) value[i] = __uint_as_float(0x4b000000u | ((u >> (8 * i)) & 0xffu)) - 8388736.f;
    even = pack<__nv_bfloat16>(value[0], value[2]);
    odd = pack<__nv_bfloat16>(value[1], value[3]);
}
// float8_e4m3fn: its exponent and mantissa, seven bits below those of a half, are the value times 2^-8, subnormal ones
// included. Seven ones are NaN: the carry of + 1 sets the exponent's highest bit.
__device__ inline unsigned halves_of_fp8(unsigned bytes) {
    const unsigned magnitude = bytes & 0x007f007fu;
    const unsigned nan = ((magnitude + 0x00010001u) & 0x00800080u) << 7;
    return multiply_halves(((bytes & 0x00800080u) << 8) | (magnitude << 7) | nan, 0x5c005c00u);
}
__device__ inline void widen(unsigned bytes, unsigned& even, unsigned& odd, unsigned char, __half) {
    even = halves_of_fp8(bytes & 0x00ff00ffu);
    odd = halves_of_fp8((bytes >> 8) & 0x00ff00ffu);
}
__device__ inline void widen(unsigned bytes, unsigned& even, unsigned& odd, unsigned char, __nv_bfloat16) {
    unsigned halves[2];
    widen(bytes, halves[0], halves[1], static_cast<unsigned char>(0), __half());
    const float2 low = __half22float2(reinterpret_cast<const __half2&>(halves[0]));
    const float2 high = __half22float2(reinterpret_cast<const __half2&>(halves[1]));
    even = pack<__nv_bfloat16>(low.x, low.y);
    odd = pack<__nv_bfloat16>(high.x, high.y);
}

// O is [16 rows][DIM] in tiles of 8 columns; this lane has two columns of each. Of a quantized cache two tiles interleave.
template <typename STORED>
__device__ inline int column_of(int tile, int i, int pair) {
    return QUANTIZED<STORED> ? tile / 2 * 16 + 4 * pair + 2 * i + tile % 2 : tile * 8 + 2 * pair + i;
}

// Rows of Q to a swizzled tile [ROWS][DIM] in shared memory, by THREADS threads; row r begins at source(r), or is zero
// where that is null. With a quantized cache the even columns of 16 come before the odd ones, as `widen` has them.
template <typename T, typename STORED, int ROWS, int DIM, int THREADS, typename SOURCE>
__device__ inline void load_queries(unsigned tile, int head_dim, SOURCE source) {
    constexpr int CHUNKS = DIM / CHUNK;
#pragma unroll
    for (int index = threadIdx.x; index < ROWS * CHUNKS; index += THREADS) {
        const int row = index / CHUNKS, chunk = index % CHUNKS;
        const T* from = source(row);
        const bool inside = from != nullptr && chunk * CHUNK < head_dim;
        const uint4 value = inside ? *reinterpret_cast<const uint4*>(from + chunk * CHUNK) : make_uint4(0, 0, 0, 0);
        if constexpr (!QUANTIZED<STORED>) {
            store_shared(tile + swizzled<DIM>(row, chunk), value);
        } else {
            const unsigned pairs[4] = {value.x, value.y, value.z, value.w};
            const unsigned half = chunk % 2 * 8;  // this chunk has the first or the last 8 of the 16 columns
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const unsigned a = pairs[2 * i], b = pairs[2 * i + 1];
                store_shared(tile + swizzled<DIM>(row, chunk & ~1) + half + 4 * i, (a & 0xffffu) | (b << 16));
                store_shared(tile + swizzled<DIM>(row, chunk | 1) + half + 4 * i, (a >> 16) | (b & 0xffff0000u));
            }
        }
    }
}

// What this lane's rows may see: row `half` of row tile m is 16 m + lane / 4 + 8 half.
template <int MT>
struct RowBounds {
    int end[MT][2];   // the first key that the row does not see
    int sink_tokens;
    int window;       // 0: none
    int min_end, max_begin;  // over the rows: keys between them are visible to all

    __device__ inline bool sees_all(int first_key, int keys) const {
        return first_key + keys <= min_end && (first_key >= max_begin || first_key + keys <= sink_tokens);
    }
    __device__ inline bool visible(int m, int half, int key) const {
        const bool in_window = window == 0 || key >= end[m][half] - window || key < sink_tokens;
        return key < end[m][half] && in_window;
    }
};

// O, unnormalized, with the row maxima m and the row sums l (of this lane's columns alone) after the tiles so far.
template <int DIM, int MT>
struct SoftmaxState {
    float o[MT][DIM / 8][4];
    float row_max[MT][2], row_sum[MT][2];

    __device__ inline void clear() {
#pragma unroll
        for (int m = 0; m < MT; ++m) {
            row_max[m][0] = row_max[m][1] = negative_infinity();
            row_sum[m][0] = row_sum[m][1] = 0.f;
#pragma unroll
            for (int d = 0; d < DIM / 8; ++d) o[m][d][0] = o[m][d][1] = o[m][d][2] = o[m][d][3] = 0.f;
        }
    }
};

// Lane addresses of ldmatrix into Q, K and V. A lane's row is a multiple of 8 plus lane % 8, and tiles begin at multiples
// of their row: to move by two chunks is an exclusive or with a constant.
template <typename STORED, int DIM>
struct LaneOffsets {
    static constexpr int ROW_BYTES = DIM * static_cast<int>(sizeof(STORED));
    unsigned q, k, v;

    __device__ inline LaneOffsets() {
        const int lane_row = static_cast<int>(threadIdx.x) % 8, matrix = static_cast<int>(threadIdx.x) % WARP / 8;
        const int low = matrix & 1, high = matrix >> 1;
        q = (low * 8 + lane_row) * DIM * 2 + ((high * 16) ^ swizzle<DIM * 2>(lane_row));
        v = (low * 8 + lane_row) * ROW_BYTES + ((high * 16) ^ swizzle<ROW_BYTES>(lane_row));
        // 16-bit keys: two chunks are the 16 columns of one step. Bytes: one chunk is.
        const int key_half = QUANTIZED<STORED> ? low : high, chunk = QUANTIZED<STORED> ? high : low;
        k = (key_half * 8 + lane_row) * ROW_BYTES + ((chunk * 16) ^ swizzle<ROW_BYTES>(lane_row));
    }
};

// S = Q K^T of MT x 16 rows and KEYS keys.
template <typename T, typename STORED, int DIM, int KEYS, int MT>
__device__ inline void multiply_qk(float (&s)[MT][KEYS / 8][4], unsigned q_address, unsigned k_address) {
    constexpr int ROW_BYTES = DIM * static_cast<int>(sizeof(STORED));
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int n = 0; n < KEYS / 8; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0.f;
    // A step is 16 columns. One ldmatrix of 16-bit keys has 16 keys of one step, one of bytes has those of two steps.
    constexpr int STEPS = QUANTIZED<STORED> ? 2 : 1;
    q_address = opaque(q_address);  // the addresses of all steps would live through the caller's loop
    k_address = opaque(k_address);
#pragma unroll 4
    for (int kk = 0; kk < DIM / 16; kk += STEPS) {
        unsigned qa[STEPS][MT][4];
#pragma unroll
        for (int step = 0; step < STEPS; ++step)
#pragma unroll
            for (int m = 0; m < MT; ++m) ldmatrix(qa[step][m], (q_address ^ ((kk + step) * 32)) + m * 16 * DIM * 2);
#pragma unroll
        for (int n = 0; n < KEYS / 8; n += 2) {
            unsigned kb[4];
            ldmatrix(kb, (k_address ^ (kk / STEPS * 32)) + n * 8 * ROW_BYTES);
            if constexpr (!QUANTIZED<STORED>) {
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    mma<T>(s[m][n], qa[0][m], kb[0], kb[1]);
                    mma<T>(s[m][n + 1], qa[0][m], kb[2], kb[3]);
                }
            } else {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    unsigned even, odd;
                    widen(kb[i], even, odd, STORED(), T());
#pragma unroll
                    for (int m = 0; m < MT; ++m) mma<T>(s[m][n + i % 2], qa[i / 2 % STEPS][m], even, odd);
                }
            }
        }
    }
}

// From products to scores in powers of two; keys that a row does not see get -inf. `scales` are the tile's.
template <typename STORED, int KEYS, int MT>
__device__ inline void scale_and_mask(float (&s)[MT][KEYS / 8][4], const RowBounds<MT>& rows, const float* scales,
                                      int first_key, float scale, float softcap) {
    const int pair = static_cast<int>(threadIdx.x) % 4;
    const bool masked = !rows.sees_all(first_key, KEYS);
    const float factor = softcap > 0.f ? scale / softcap : scale * LOG2E;
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
        float key_factor[2] = {factor, factor};
        if constexpr (QUANTIZED<STORED>) {
            key_factor[0] *= scales[n * 8 + 2 * pair];
            key_factor[1] *= scales[n * 8 + 2 * pair + 1];
        }
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int i = 0; i < 4; ++i) s[m][n][i] *= key_factor[i % 2];
    }
    if (softcap > 0.f) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i) s[m][n][i] = softcap * LOG2E * tanhf(s[m][n][i]);
    }
    if (masked) {
#pragma unroll
        for (int m = 0; m < MT; ++m)
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    if (!rows.visible(m, i / 2, first_key + n * 8 + 2 * pair + i % 2)) s[m][n][i] = negative_infinity();
    }
}

// Online softmax: S becomes P; m, l and O are rescaled to the new row maxima.
template <int DIM, int KEYS, int MT>
__device__ inline void update_softmax(SoftmaxState<DIM, MT>& state, float (&s)[MT][KEYS / 8][4]) {
#pragma unroll
    for (int m = 0; m < MT; ++m)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float row_max = state.row_max[m][half];
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n) row_max = fmaxf(row_max, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            row_max = row_max_of(row_max);
            const float base = row_max == negative_infinity() ? 0.f : row_max;
            const float rescale = exp2_approx(state.row_max[m][half] - base);
            state.row_max[m][half] = row_max;
            float row_sum = state.row_sum[m][half] * rescale;
#pragma unroll
            for (int n = 0; n < KEYS / 8; ++n)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; ++i) {
                    s[m][n][i] = exp2_approx(s[m][n][i] - base);
                    row_sum += s[m][n][i];
                }
            state.row_sum[m][half] = row_sum;
#pragma unroll
            for (int d = 0; d < DIM / 8; ++d) {
                state.o[m][d][2 * half] *= rescale;
                state.o[m][d][2 * half + 1] *= rescale;
            }
        }
}

// O += P V, 16 keys at a time: two accumulator tiles of P are one operand. A value's scale multiplies its column of P.
template <typename T, typename STORED, int DIM, int KEYS, int MT>
__device__ inline void multiply_pv(SoftmaxState<DIM, MT>& state, float (&s)[MT][KEYS / 8][4], const float* scales,
                                   unsigned v_address) {
    constexpr int ROW_BYTES = DIM * static_cast<int>(sizeof(STORED));
    const int pair = static_cast<int>(threadIdx.x) % 4;
    v_address = opaque(v_address);
#pragma unroll
    for (int kk = 0; kk < KEYS / 16; ++kk) {
        if constexpr (QUANTIZED<STORED>) {
#pragma unroll
            for (int n = 2 * kk; n < 2 * kk + 2; ++n) {
                const float scale[2] = {scales[KEYS + n * 8 + 2 * pair], scales[KEYS + n * 8 + 2 * pair + 1]};
#pragma unroll
                for (int m = 0; m < MT; ++m)
#pragma unroll
                    for (int i = 0; i < 4; ++i) s[m][n][i] *= scale[i % 2];
            }
        }
        unsigned p[MT][4];
        pack_operand<T>(p, s, kk);
#pragma unroll
        for (int pairs = 0; pairs < ROW_BYTES / 32; ++pairs) {  // two chunks of V at a time
            unsigned vb[4];
            ldmatrix_transposed(vb, (v_address ^ (pairs * 32)) + kk * 16 * ROW_BYTES);
            if constexpr (!QUANTIZED<STORED>) {
#pragma unroll
                for (int m = 0; m < MT; ++m) {
                    mma<T>(state.o[m][2 * pairs], p[m], vb[0], vb[1]);
                    mma<T>(state.o[m][2 * pairs + 1], p[m], vb[2], vb[3]);
                }
            } else {
#pragma unroll
                for (int chunk = 0; chunk < 2; ++chunk) {  // 16 columns: the even and the odd ones are a tile each
                    unsigned even[2], odd[2];
                    widen(vb[2 * chunk], even[0], odd[0], STORED(), T());
                    widen(vb[2 * chunk + 1], even[1], odd[1], STORED(), T());
#pragma unroll
                    for (int m = 0; m < MT; ++m) {
                        mma<T>(state.o[m][4 * pairs + 2 * chunk], p[m], even[0], even[1]);
                        mma<T>(state.o[m][4 * pairs + 2 * chunk + 1], p[m], odd[0], odd[1]);
                    }
                }
            }
        }
    }
}

// A learned sink per head, in one of the three types that a model may have: one more column of the softmax, in the
// denominator alone.
enum SinkType { NO_SINKS, FLOAT_SINKS, HALF_SINKS, BFLOAT16_SINKS };

__device__ inline float load_sink(const void* sinks, int type, int head) {
    if (type == FLOAT_SINKS) return static_cast<const float*>(sinks)[head] * LOG2E;
    if (type == HALF_SINKS) return __half2float(static_cast<const __half*>(sinks)[head]) * LOG2E;
    if (type == BFLOAT16_SINKS) return __bfloat162float(static_cast<const __nv_bfloat16*>(sinks)[head]) * LOG2E;
    return negative_infinity();
}

// From a row's max and sum (and sink) to what its O is multiplied by, and its LSE.
struct RowResult {
    float inverse, lse;
};
__device__ inline RowResult finish_row(float row_max, float row_sum, float sink) {
    const float higher = fmaxf(row_max, sink);
    const float base = higher == negative_infinity() ? 0.f : higher;
    const float rescale = exp2_approx(row_max - base);
    const float sum = row_sum * rescale + exp2_approx(sink - base);
    if (sum == 0.f) return {0.f, negative_infinity()};
    return {rescale / sum, (base + log2f(sum)) * LN2};
}

// Block-wide sums in the order of the threads.
struct BlockSum {
    int before, total;  // of the threads before this one, and of all
};
template <int THREADS>
__device__ inline BlockSum block_sum(int value, int* scratch) {  // scratch: [THREADS / WARP]
    const int lane = static_cast<int>(threadIdx.x) % WARP, warp = static_cast<int>(threadIdx.x) / WARP;
    int sum = value;
#pragma unroll
    for (int distance = 1; distance < WARP; distance *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, sum, distance);
        if (lane >= distance) sum += other;
    }
    if (lane == WARP - 1) scratch[warp] = sum;
    __syncthreads();
    BlockSum result{sum - value, 0};
#pragma unroll
    for (int w = 0; w < THREADS / WARP; ++w) {
        if (w < warp) result.before += scratch[w];
        result.total += scratch[w];
    }
    __syncthreads();
    return result;
}
