// Vectors of 64 bytes (GCC's and Clang's vector types), the products of bytes, and conversions of 16-bit floats.

#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

#if defined(__x86_64__) || defined(__i386__)
#include <immintrin.h>
#endif

typedef uint8_t u8x64 __attribute__((vector_size(64)));
typedef int8_t i8x64 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef float f32x16 __attribute__((vector_size(64)));
typedef uint8_t u8x16 __attribute__((vector_size(16)));

constexpr int LANES = 16;

#define INLINE inline __attribute__((always_inline))
#define UNROLLED _Pragma("GCC unroll 8")

template <typename V> inline V load(const void* from) {
    V found;
    std::memcpy(&found, from, sizeof(V));
    return found;
}

template <typename V> inline void store(void* to, const V& value) { std::memcpy(to, &value, sizeof(V)); }

// The first `count` bytes, at most 64, and zeros.
inline u8x64 load_bytes(const uint8_t* from, int64_t count) {
    if (count >= 64) return load<u8x64>(from);
#if defined(__AVX512BW__)
    return (u8x64)_mm512_maskz_loadu_epi8((1ull << count) - 1, from);
#else
    u8x64 found = {};
    std::memcpy(&found, from, count);
    return found;
#endif
}

// sum[i] + w[4i] x[4i] + ... + w[4i+3] x[4i+3]. WIDE: w may be so large that two products do not fit 16 bits.
template <bool WIDE> inline i32x16 dot4(i32x16 sum, u8x64 w, i8x64 x) {
#if defined(__AVX512VNNI__)
    return (i32x16)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)w, (__m512i)x);
#elif defined(__AVX2__)
    __m256i sums[2], ws[2], xs[2];
    std::memcpy(sums, &sum, 64);
    std::memcpy(ws, &w, 64);
    std::memcpy(xs, &x, 64);
    for (int half = 0; half < 2; half++) {
        __m256i found;
        if (WIDE) {
            __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(ws[half], 8), _mm256_srai_epi16(xs[half], 8));
            __m256i even = _mm256_madd_epi16(
                _mm256_and_si256(ws[half], _mm256_set1_epi16(255)),
                _mm256_srai_epi16(_mm256_slli_epi16(xs[half], 8), 8));
            found = _mm256_add_epi32(odd, even);
        } else {
            found = _mm256_madd_epi16(_mm256_maddubs_epi16(ws[half], xs[half]), _mm256_set1_epi16(1));
        }
        sums[half] = _mm256_add_epi32(sums[half], found);
    }
    std::memcpy(&sum, sums, 64);
    return sum;
#else
    for (int i = 0; i < 64; i++) sum[i / 4] += int32_t(w[i]) * int32_t(x[i]);
    return sum;
#endif
}

// UNITS floats over the lanes of a vector, each 16 / UNITS times.
template <int UNITS> inline f32x16 expand(const float* from) {
    static_assert(LANES % UNITS == 0);
#if defined(__AVX512F__)
    constexpr int each = LANES / UNITS;
    const __m512i index = _mm512_setr_epi32(
        0, 1 / each, 2 / each, 3 / each, 4 / each, 5 / each, 6 / each, 7 / each, 8 / each, 9 / each, 10 / each,
        11 / each, 12 / each, 13 / each, 14 / each, 15 / each);
    return (f32x16)_mm512_permutexvar_ps(index, _mm512_loadu_ps(from));
#else
    f32x16 found;
    for (int lane = 0; lane < LANES; lane++) found[lane] = from[lane * UNITS / LANES];
    return found;
#endif
}

inline f32x16 to_floats(u8x16 values) {
#if defined(__AVX512F__)
    return (f32x16)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)values));
#elif defined(__AVX2__)
    const __m128i bytes = (__m128i)values;
    __m256 halves[2] = {_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(bytes)),
                        _mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_srli_si128(bytes, 8)))};
    return load<f32x16>(halves);
#else
    f32x16 found;
    for (int lane = 0; lane < LANES; lane++) found[lane] = float(values[lane]);
    return found;
#endif
}

inline float max_lanes(f32x16 values) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)values);
#else
    float most = values[0];
    for (int lane = 1; lane < LANES; lane++) most = values[lane] > most ? values[lane] : most;
    return most;
#endif
}

inline float sum_lanes(f32x16 values) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)values);
#else
    float sum = 0;
    for (int width = 8; width; width /= 2)
        for (int lane = 0; lane < width; lane++) values[lane] += values[lane + width];
    return sum + values[0];
#endif
}

// found[i] = the sum of the lanes of values[i].
inline void sum_lanes_of_4(const f32x16* values, float* found) {
#if defined(__AVX2__)
    __m256 halves[4];
    for (int i = 0; i < 4; i++) {
        __m256 parts[2];
        std::memcpy(parts, values + i, 64);
        halves[i] = _mm256_add_ps(parts[0], parts[1]);
    }
    const __m256 first = _mm256_hadd_ps(halves[0], halves[1]), second = _mm256_hadd_ps(halves[2], halves[3]);
    const __m256 sums = _mm256_hadd_ps(first, second);
    _mm_storeu_ps(found, _mm_add_ps(_mm256_castps256_ps128(sums), _mm256_extractf128_ps(sums, 1)));
#else
    for (int i = 0; i < 4; i++) found[i] = sum_lanes(values[i]);
#endif
}

// exp of each lane, to about one rounding; 0 below -87, infinity above 88.
inline f32x16 exp_lanes(f32x16 x) {
    const f32x16 magic = (f32x16){} + 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
    const f32x16 low = (f32x16){} - 87.3f, high = (f32x16){} + 88.7f;
    const f32x16 clamped = x < low ? low : (x > high ? high : x);  // a NaN stays one
    const f32x16 n = (clamped * 1.44269504f + magic) - magic;
    f32x16 r = clamped - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    f32x16 p = (f32x16){} + 1.98756915e-4f;
    p = p * r + 1.39819995e-3f;
    p = p * r + 8.33345190e-3f;
    p = p * r + 4.16657962e-2f;
    p = p * r + 1.66666657e-1f;
    p = p * r + 0.5f;
    p = p * r * r + r + 1.0f;
    const i32x16 bits = (__builtin_convertvector(n, i32x16) + 127) << 23;
    const f32x16 found = p * (f32x16)bits;
    const f32x16 zero = {}, infinite = zero + INFINITY;
    return x < low ? zero : (x > high ? infinite : (x == x ? found : x));
}

inline float half_to_float(uint16_t bits) {
#if defined(__FLT16_MANT_DIG__)
    _Float16 value;
    std::memcpy(&value, &bits, 2);
    return float(value);
#else
    uint32_t sign = uint32_t(bits >> 15) << 31, exponent = (bits >> 10) & 31, fraction = bits & 1023, word;
    if (exponent == 0) {
        float small = std::ldexp(float(fraction), -24);
        return sign ? -small : small;
    }
    word = sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) | fraction << 13;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
#endif
}

inline uint16_t float_to_half(float value) {
#if defined(__FLT16_MANT_DIG__)
    _Float16 narrow = _Float16(value);
    uint16_t bits;
    std::memcpy(&bits, &narrow, 2);
    return bits;
#else
    uint16_t sign = std::signbit(value) ? 0x8000 : 0;
    float size = std::fabs(value);
    if (std::isnan(value)) return sign | 0x7e00;
    if (size >= 65520.0f) return sign | 0x7c00;
    if (size < 6.103515625e-05f) return sign | uint16_t(std::nearbyint(std::ldexp(size, 24)));
    int exponent;
    float fraction = std::frexp(size, &exponent);  // in [0.5, 1)
    uint32_t rounded = uint32_t(std::nearbyint(std::ldexp(fraction, 11)));
    return sign | uint16_t(((exponent + 13) << 10) + rounded);
#endif
}

inline void halves_to_floats(const uint16_t* from, float* to, int64_t count) {
    int64_t at = 0;
#if defined(__AVX512F__) && defined(__AVX512BW__) && defined(__AVX512VL__)
    for (; at + LANES <= count; at += LANES)
        _mm512_storeu_ps(to + at, _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + at))));
    if (at < count) {
        const __mmask16 some = __mmask16((1u << (count - at)) - 1);
        _mm512_mask_storeu_ps(to + at, some, _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(some, from + at)));
        at = count;
    }
#elif defined(__F16C__)
    for (; at + 8 <= count; at += 8)
        _mm256_storeu_ps(to + at, _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + at))));
#endif
    for (; at < count; at++) to[at] = half_to_float(from[at]);
}

inline float bfloat_to_float(uint16_t bits) {
    uint32_t word = uint32_t(bits) << 16;
    float value;
    std::memcpy(&value, &word, 4);
    return value;
}

inline uint16_t float_to_bfloat(float value) {
    uint32_t word;
    std::memcpy(&word, &value, 4);
    if (std::isnan(value)) return uint16_t(word >> 16 | 0x40);
    return uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

enum Dtype { FLOAT32, FLOAT16, BFLOAT16 };

inline float read(const void* from, int64_t index, int dtype) {
    if (dtype == FLOAT32) return static_cast<const float*>(from)[index];
    uint16_t bits = static_cast<const uint16_t*>(from)[index];
    return dtype == FLOAT16 ? half_to_float(bits) : bfloat_to_float(bits);
}

inline void write(void* to, int64_t index, float value, int dtype) {
    if (dtype == FLOAT32) static_cast<float*>(to)[index] = value;
    else static_cast<uint16_t*>(to)[index] = dtype == FLOAT16 ? float_to_half(value) : float_to_bfloat(value);
}

inline float rounded(float value, int dtype) {
    if (dtype == FLOAT32) return value;
    return dtype == FLOAT16 ? half_to_float(float_to_half(value)) : bfloat_to_float(float_to_bfloat(value));
}
