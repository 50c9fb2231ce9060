// Bits and arithmetic.

#pragma once

#include "language.h"

namespace cuda_emulator {
template <typename To, typename From>
inline To same_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}
}  // namespace cuda_emulator

inline float __int_as_float(int bits) { return cuda_emulator::same_bits<float>(bits); }
inline float __uint_as_float(unsigned bits) { return cuda_emulator::same_bits<float>(bits); }
inline int __float_as_int(float value) { return cuda_emulator::same_bits<int>(value); }
inline unsigned __float_as_uint(float value) { return cuda_emulator::same_bits<unsigned>(value); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __clz(int value) { return value ? __builtin_clz(static_cast<unsigned>(value)) : 32; }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline unsigned __brev(unsigned value) {
    unsigned result = 0;
    for (int i = 0; i < 32; ++i) result |= (value >> i & 1) << (31 - i);
    return result;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((1ull * a * b) >> 32); }
inline int __mulhi(int a, int b) { return static_cast<int>((1ll * a * b) >> 32); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long both = a | static_cast<unsigned long long>(b) << 32;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned byte = static_cast<unsigned>(both >> 8 * (selector >> 4 * i & 7)) & 0xff;
        const unsigned sign = selector >> 4 * i & 8;
        result |= (sign ? (byte & 0x80 ? 0xff : 0u) : byte) << 8 * i;
    }
    return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((low | static_cast<unsigned long long>(high) << 32) >> (shift & 31));
}
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) c += static_cast<signed char>(a >> 8 * i) * static_cast<signed char>(b >> 8 * i);
    return c;
}
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.f / sqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0.f ? (x < 1.f ? x : 1.f) : 0.f; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline int __float2int_rn(float x) { return static_cast<int>(rintf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __float2int_rd(float x) { return static_cast<int>(floorf(x)); }
inline int __float2int_ru(float x) { return static_cast<int>(ceilf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
// glibc declares these names, so that they can only be macros.
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __powf(x, y) powf(x, y)
#define __sincosf(x, s, c) sincosf(x, s, c)

#define CUDA_EMULATOR_MIN_MAX(type, a_type, b_type)                                                    \
    inline type min(a_type a, b_type b) { return static_cast<type>(a) < static_cast<type>(b) ? a : b; } \
    inline type max(a_type a, b_type b) { return static_cast<type>(a) > static_cast<type>(b) ? a : b; }
CUDA_EMULATOR_MIN_MAX(int, int, int)
CUDA_EMULATOR_MIN_MAX(unsigned, unsigned, unsigned)
CUDA_EMULATOR_MIN_MAX(unsigned, int, unsigned)
CUDA_EMULATOR_MIN_MAX(unsigned, unsigned, int)
CUDA_EMULATOR_MIN_MAX(long, long, long)
CUDA_EMULATOR_MIN_MAX(unsigned long, unsigned long, unsigned long)
CUDA_EMULATOR_MIN_MAX(unsigned long, long, unsigned long)
CUDA_EMULATOR_MIN_MAX(unsigned long, unsigned long, long)
CUDA_EMULATOR_MIN_MAX(long long, long long, long long)
CUDA_EMULATOR_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
CUDA_EMULATOR_MIN_MAX(unsigned long long, long long, unsigned long long)
CUDA_EMULATOR_MIN_MAX(unsigned long long, unsigned long long, long long)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
