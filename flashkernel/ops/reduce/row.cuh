// What the row kernels share: 16-byte loads, pairs and how they merge, and what a row of the softmax sees.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using Index = long long;  // element offsets go beyond 2^31

constexpr int WARP = 32;
constexpr int MOST_WARPS = 32;
constexpr int MOST_THREADS = 512;  // in a block: leaves up to 128 registers to a thread
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int IN_FLIGHT = 4;  // loads a thread issues before it uses the first: latency is hidden by what is under way

// The order matters: up to WEIGHTED a reduction adds, starting from 0; from MAX on it starts from -inf; from LOGSUMEXP
// on it adds exponentials. kinds.py has the same numbers.
enum Kind { SUM, MEAN, WEIGHTED, MAX, LOGSUMEXP, SOFTMAX, SOFTMAX_BACKWARD };

// What is known of some columns:
//   sum, mean, weighted sum   a = sum of the values
//   max                       a = largest value, b = how often it was seen
//   logsumexp, softmax        a = largest value, b = sum of exp(value - a)
struct Pair {
    float a, b;
};

__device__ inline float infinity() { return __int_as_float(0x7f800000); }

// exp(x) = 2^(x log2 e): one multiply-add where a difference is taken, and one instruction. What is below 2^-126 becomes
// 0: beside the 1 that the largest value adds, no sum of exponentials can tell.
constexpr float LOG2E = 1.4426950408889634f;
__device__ inline float power_of_2(float x) {
    float result;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
__device__ inline float exponential(float x) { return power_of_2(x * LOG2E); }

// Elements are float, half or bfloat16 in memory and float in registers.

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline void assign(float& target, float value) { target = value; }
__device__ inline void assign(__half& target, float value) { target = __float2half_rn(value); }
__device__ inline void assign(__nv_bfloat16& target, float value) { target = __float2bfloat16_rn(value); }

// The elements in one 32-bit word, lowest address first.
__device__ inline void open(float* value, unsigned word, float) { value[0] = __uint_as_float(word); }
__device__ inline void open(float* value, unsigned word, __half) {
    const float2 both = __half22float2(reinterpret_cast<const __half2&>(word));
    value[0] = both.x, value[1] = both.y;
}
__device__ inline void open(float* value, unsigned word, __nv_bfloat16) {  // bfloat16 is the upper half of a float
    value[0] = __uint_as_float(word << 16), value[1] = __uint_as_float(word & 0xffff0000u);
}

template <typename T> constexpr int PER_LOAD = 16 / sizeof(T);  // elements in the widest load there is

// N elements as they lie in memory: the 16 bytes of one vector load, or a single element.
template <typename T, int N> struct Vector {
    static_assert(N * sizeof(T) == 16, "a vector is 16 bytes");
    uint4 bits;

    __device__ void load(const T* source) { bits = *reinterpret_cast<const uint4*>(source); }
    __device__ void unpack(float (&value)[N]) const {
        open(value, bits.x, T());
        open(value + N / 4, bits.y, T());
        open(value + N / 2, bits.z, T());
        open(value + 3 * N / 4, bits.w, T());
    }
    // From here on the compiler must unpack anew, and need not hold floats, which take twice the registers, meanwhile.
    __device__ void forget() { asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w)); }
};
template <typename T> struct Vector<T, 1> {
    T bits;

    __device__ void load(const T* source) { bits = *source; }
    __device__ void unpack(float (&value)[1]) const { value[0] = to_float(bits); }
    __device__ void forget() {}
};

template <typename T, int N> __device__ inline void store(T* target, const float (&value)[N]) {
    alignas(16) T packed[N];
#pragma unroll
    for (int i = 0; i < N; ++i) assign(packed[i], value[i]);
    if constexpr (N == 1) {
        *target = packed[0];
    } else {
        *reinterpret_cast<uint4*>(target) = reinterpret_cast<const uint4&>(packed);
    }
}

// N weights, beside N elements of x: of another type, they may be half a vector or two.
template <typename W, int N> __device__ inline void load_beside(float (&value)[N], const W* source, bool aligned) {
    if constexpr (N % PER_LOAD<W> == 0) {
        if (aligned) {
#pragma unroll
            for (int i = 0; i < N; i += PER_LOAD<W>) {
                Vector<W, PER_LOAD<W>> loaded;
                loaded.load(source + i);
                loaded.unpack(reinterpret_cast<float(&)[PER_LOAD<W>]>(value[i]));
            }
            return;
        }
    }
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = to_float(source[i]);
}

template <typename T> __device__ inline bool on_16_bytes(const T* address) {
    return reinterpret_cast<unsigned long long>(address) % 16 == 0;
}

template <int KIND> __device__ inline Pair nothing() { return {KIND >= MAX ? -infinity() : 0.f, 0.f}; }

// `top`, or 0 where subtracting it would give inf - inf: of nothing but -inf, and of +inf for logsumexp.
template <int KIND> __device__ inline float finite(float top) {
    return top == -infinity() || (KIND == LOGSUMEXP && top == infinity()) ? 0.f : top;
}

__device__ inline float larger(float x, float y) { return x > y || x != x ? x : y; }  // NaN wins; fmaxf drops it

template <int KIND> __device__ inline Pair merge(Pair x, Pair y) {
    if constexpr (KIND == MAX) {
        const float top = larger(x.a, y.a);
        return {top, (x.a == top ? x.b : 0.f) + (y.a == top ? y.b : 0.f)};
    } else if constexpr (KIND > MAX) {
        const float top = fmaxf(x.a, y.a), base = finite<KIND>(top);
        return {top, x.b * exponential(x.a - base) + y.b * exponential(y.a - base)};
    } else {
        return {x.a + y.a, 0.f};
    }
}

// Merge N values of one thread, as a group: that takes N + 1 exponentials instead of 2 N, and shortens the chain of
// operations that wait for one another.
template <int KIND, int N> __device__ inline void absorb(Pair& pair, const float (&value)[N]) {
    if constexpr (KIND >= MAX) {
        float top = pair.a;
#pragma unroll
        for (int i = 0; i < N; ++i) top = KIND == MAX ? larger(top, value[i]) : fmaxf(top, value[i]);
        const float base = finite<KIND>(top);
        float total = KIND == MAX ? (pair.a == top ? pair.b : 0.f) : pair.b * exponential(pair.a - base);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if constexpr (KIND == MAX) {
                total += value[i] == top ? 1.f : 0.f;
            } else if constexpr (KIND == LOGSUMEXP) {  // one multiply-add: rounding costs less than the result's own
                total += power_of_2(fmaf(value[i], LOG2E, -base * LOG2E));
            } else {
                total += exponential(value[i] - base);
            }
        }
        pair = {top, total};
    } else {
        float total = value[0];
#pragma unroll
        for (int i = 1; i < N; ++i) total += value[i];
        pair.a += total;
    }
}

// Merge the lanes of a warp: lane l takes from lane l + 16, then l + 8, ... ; after five rounds lane 0 has all 32.
// Exponentials first agree on the largest value, so that each lane rescales its sum once and not in every round.
template <int KIND> __device__ inline Pair warp_merge(Pair pair) {
    if constexpr (KIND > MAX) {
        float top = pair.a;
#pragma unroll
        for (int distance = WARP / 2; distance > 0; distance /= 2) {
            top = fmaxf(top, __shfl_xor_sync(ALL_LANES, top, distance));
        }
        float total = pair.b * exponential(pair.a - finite<KIND>(top));
#pragma unroll
        for (int distance = WARP / 2; distance > 0; distance /= 2) {
            total += __shfl_down_sync(ALL_LANES, total, distance);
        }
        return {top, total};
    }
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        const Pair other = {__shfl_down_sync(ALL_LANES, pair.a, distance),
                            KIND >= MAX ? __shfl_down_sync(ALL_LANES, pair.b, distance) : 0.f};
        pair = merge<KIND>(pair, other);
    }
    return pair;
}

// Merge the threads of a row, and give all of them the result.
template <int KIND> __device__ inline Pair row_merge(Pair pair) {
    __shared__ Pair partner[MOST_WARPS];
    pair = warp_merge<KIND>(pair);
    if (blockDim.x == WARP) {  // the row is this warp's own
        return {__shfl_sync(ALL_LANES, pair.a, 0), __shfl_sync(ALL_LANES, pair.b, 0)};
    }
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (lane == 0) partner[warp] = pair;
    __syncthreads();
    if (warp == 0) {  // at most 32 partners: one warp climbs the tree, so no block-wide barrier between rounds
        for (int half = blockDim.x / WARP / 2; half > 0; half /= 2) {
            if (lane < half) partner[lane] = merge<KIND>(partner[lane], partner[lane + half]);
            __syncwarp();
        }
    }
    __syncthreads();
    return partner[0];
}

// Where a row's mask begins; null: there is none. A row number is (outer, middle, inner) in mixed radix.
__device__ inline const unsigned char* mask_of(Index row, const unsigned char* bits, Index middle, Index inner,
                                               Index outer_stride, Index middle_stride, Index inner_stride) {
    if (bits == nullptr) return nullptr;
    return bits + row / (middle * inner) * outer_stride + row / inner % middle * middle_stride +
           row % inner * inner_stride;
}

// Columns a row sees: query q of Q sees the first q + 1 + (width - Q). Q = 0: not causal.
__device__ inline Index visible_columns(Index row, Index width, Index queries) {
    if (queries == 0) return width;
    return max(Index(0), min(width, row % queries + 1 + width - queries));
}

template <int N> __device__ inline void hide(float (&value)[N], Index column, const unsigned char* bits, Index stride) {
    if (bits == nullptr) return;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (!bits[(column + i) * stride]) value[i] = -infinity();
    }
}
