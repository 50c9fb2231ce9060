// What the row kernels share: 16-byte loads, pairs and how they merge, and what a row of the softmax sees.

#pragma once

#include "constants.cuh"
#include "elements.cuh"
#include "ptx.cuh"

constexpr int WARP = 32;
constexpr int MAX_THREADS = 512;  // in a block: leaves up to 128 registers to a thread
constexpr int MAX_WARPS = MAX_THREADS / WARP;
constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int IN_FLIGHT = 4;  // loads a thread issues before it uses the first: latency is hidden by what is under way

// The order matters: up to WEIGHTED a reduction adds, starting from 0; from MAX on it starts from -inf; from LOGSUMEXP
// on it adds exponentials. kinds.py has the same numbers.
enum Kind { SUM, MEAN, WEIGHTED, MAX, LOGSUMEXP, SOFTMAX, SOFTMAX_BACKWARD };

// Programmatic dependent launch, from sm_90 on: a kernel may be launched before the one before it has ended (cuda.py
// says when). It must call this first: it waits until all earlier kernels have completed and their writes are visible,
// then lets the next kernel launch. Launched without PDL, it waits for nothing.
__device__ inline void pdl_enter() {
#if __CUDA_ARCH__ >= 900
    griddepcontrol_wait();
    griddepcontrol_launch_dependents();
#endif
}

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
__device__ inline float exponential(float x) { return exp2_approx(x * LOG2E); }

// 1 / total of a sum of exponentials, which is 1 at least, or 0 where there was nothing to add.
__device__ inline float inverse(float total) {
    return total == 0.f ? 0.f : reciprocal_approx(total);
}

// Elements are float, half or bfloat16 in memory and float in registers (elements.cuh).

// The elements in one 32-bit word, lowest address first.
__device__ inline void open(float* value, unsigned word, float) { value[0] = __uint_as_float(word); }
__device__ inline void open(float* value, unsigned word, __half) {
    const float2 both = __half22float2(reinterpret_cast<const __half2&>(word));
    value[0] = both.x, value[1] = both.y;
}
__device__ inline void open(float* value, unsigned word, __nv_bfloat16) {  // bfloat16 is the upper half of a float
    value[0] = __uint_as_float(word << 16), value[1] = __uint_as_float(word & 0xffff0000u);
}

// And back: one 32-bit word of elements.
__device__ inline unsigned close(const float* value, float) { return __float_as_uint(value[0]); }
__device__ inline unsigned close(const float* value, __half) {
    const __half2 both = __floats2half2_rn(value[0], value[1]);
    return reinterpret_cast<const unsigned&>(both);
}
__device__ inline unsigned close(const float* value, __nv_bfloat16) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(value[0], value[1]);
    return reinterpret_cast<const unsigned&>(both);
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
    __device__ void forget() { opaque(bits); }
};
template <typename T> struct Vector<T, 1> {
    T bits;

    __device__ void load(const T* source) { bits = *source; }
    __device__ void unpack(float (&value)[1]) const { value[0] = to_float(bits); }
    __device__ void forget() {}
};

// A vector goes out in one store, in PTX: of an assignment the compiler may make four.
template <typename T, int N> __device__ inline void store(T* target, const float (&value)[N]) {
    if constexpr (N == 1) {
        assign(*target, value[0]);
    } else {
        store_global_16(target, make_uint4(close(value, T()), close(value + N / 4, T()), close(value + N / 2, T()),
                                           close(value + 3 * N / 4, T())));
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

__device__ inline float larger(float x, float y) {  // NaN wins; fmaxf drops it
#if SM80
    return max_nan(x, y);
#else
    return x > y || x != x ? x : y;
#endif
}

struct Plus {
    __device__ float operator()(float x, float y) const { return x + y; }
};
template <int KIND> struct Larger {
    __device__ float operator()(float x, float y) const { return KIND == MAX ? larger(x, y) : fmaxf(x, y); }
};

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
        float top = value[0];
#pragma unroll
        for (int i = 1; i < N; ++i) top = Larger<KIND>()(top, value[i]);
        top = Larger<KIND>()(top, pair.a);  // last: the largest of the next load need not wait for it
        const float base = finite<KIND>(top);
        float total = KIND == MAX ? (pair.a == top ? pair.b : 0.f) : pair.b * exponential(pair.a - base);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            if constexpr (KIND == MAX) {
                total += value[i] == top ? 1.f : 0.f;
            } else if constexpr (KIND == LOGSUMEXP) {  // one multiply-add: rounding costs less than the result's own
                total += exp2_approx(fmaf(value[i], LOG2E, -base * LOG2E));
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

// Join the values of a warp: lane l exchanges with lane l ^ 16, then l ^ 8, ... ; after five rounds each of the 32
// lanes has all of them. Shuffles pass registers from lane to lane without touching memory.
template <typename Join> __device__ inline float warp_join(float value) {
#pragma unroll
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        value = Join()(value, __shfl_xor_sync(ALL_LANES, value, distance));
    }
    return value;
}

// Join the values of all threads of a row, once in a kernel for each way to join. Every warp leaves its value in shared
// memory; after the one barrier every warp climbs the same tree over them, which halves the number of partners every
// round, so that nobody has to hand the result back.
template <typename Join> __device__ inline float row_join(float value) {
    __shared__ float partner[MAX_WARPS];
    value = warp_join<Join>(value);
    const int warps = blockDim.x / WARP;
    if (warps == 1) return value;  // the row is this warp's own
    if (threadIdx.x % WARP == 0) partner[threadIdx.x / WARP] = value;
    __syncthreads();
    value = partner[threadIdx.x & (warps - 1)];
#pragma unroll
    for (int distance = MAX_WARPS / 2; distance > 0; distance /= 2) {
        if (distance < warps) value = Join()(value, __shfl_xor_sync(ALL_LANES, value, distance));
    }
    return value;
}

// Merge the pairs of the threads of a row, or of a warp, and give all of them the result: first they agree on the
// largest value, so that each rescales its sum once and not in every round.
template <int KIND, bool WHOLE_ROW> __device__ inline Pair merge_threads(Pair pair) {
    const auto sum = [](float value) { return WHOLE_ROW ? row_join<Plus>(value) : warp_join<Plus>(value); };
    if constexpr (KIND < MAX) {
        return {sum(pair.a), 0.f};
    } else {
        const float top = WHOLE_ROW ? row_join<Larger<KIND>>(pair.a) : warp_join<Larger<KIND>>(pair.a);
        if constexpr (KIND == MAX) return {top, sum(pair.a == top ? pair.b : 0.f)};
        return {top, sum(pair.b * exponential(pair.a - finite<KIND>(top)))};
    }
}

// Where a row's mask begins. A row number is (outer, middle, inner) in mixed radix.
__device__ inline const unsigned char* mask_of(Index row, const unsigned char* bits, Index middle, Index inner,
                                               Index outer_stride, Index middle_stride, Index inner_stride) {
    const Index beyond = row / inner, outer = beyond / middle;
    bits += outer * outer_stride + (beyond - outer * middle) * middle_stride;
    return bits + (row - beyond * inner) * inner_stride;
}

// Columns a row sees: query q of Q sees the first q + 1 + (width - Q). Q = 0: not causal.
__device__ inline Index visible_columns(Index row, Index width, Index queries) {
    if (queries == 0) return width;
    return max(Index(0), min(width, row % queries + 1 + width - queries));
}

// The mask of N columns: its bytes as they lie in memory, four to a word.
template <int N> struct Shown {
    unsigned word[(N + 3) / 4];

    // Neighbors that begin on a boundary (`wide`) come in one load beside the one of x, others one by one.
    __device__ void load(const unsigned char* source, Index stride, bool wide) {
        if (N == 8 && wide) {
            const uint2 both = *reinterpret_cast<const uint2*>(source);
            word[0] = both.x, word[N / 8] = both.y;
        } else if (N == 4 && wide) {
            word[0] = *reinterpret_cast<const unsigned*>(source);
        } else {
#pragma unroll
            for (int i = 0; i < N; ++i) {
                const unsigned byte = unsigned(source[i * stride]) << 8 * (i % 4);
                word[i / 4] = i % 4 ? word[i / 4] | byte : byte;
            }
        }
    }
    __device__ bool operator[](int i) const { return word[i / 4] & 0xffu << 8 * (i % 4); }
};

template <int N> __device__ inline bool loads_wide(const unsigned char* source, Index stride) {
    return stride == 1 && reinterpret_cast<unsigned long long>(source) % N == 0;
}

template <int N> __device__ inline void hide(float (&value)[N], const Shown<N>& shown) {
#pragma unroll
    for (int i = 0; i < N; ++i) value[i] = shown[i] ? value[i] : -infinity();
}
