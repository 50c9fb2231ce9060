// Quantized weights as the registers of wgmma's left matrix (wgmma_registers.cuh), by integer and half-precision
// arithmetic: no conversions, no shuffles. blocks/weight_formats/tiles.py has the layout of the tiles.
//
// An integer q with the bits of a half-precision number of a large exponent is that number plus q: 128 + q in bfloat16
// (seven fraction bits), 1024 + q in float16. Subtracting 128 + zero is then exact, and the scale rounds once.

#pragma once

#include "hopper_ptx.cuh"
#include "mma.cuh"

enum WeightFormat { INT4, INT4_ZEROS, INT8, INT8_ZEROS, MXFP4 };

template <typename T>
struct Half;
template <>
struct Half<__nv_bfloat16> {
    using Pair = __nv_bfloat162;
    static constexpr unsigned MAGIC = 0x43004300;           // 128
    static constexpr int FRACTION = 6;                      // where e2m1's fraction goes
    static constexpr unsigned E2M1 = 0x01c001c0, REBIAS = 0x7e807e80;  // 2^126
};
template <>
struct Half<__half> {
    using Pair = __half2;
    static constexpr unsigned MAGIC = 0x64006400;  // 1024
    static constexpr int FRACTION = 9;
    static constexpr unsigned E2M1 = 0x0e000e00, REBIAS = 0x74007400;  // 2^14
};

template <typename T>
__device__ inline unsigned subtract(unsigned left, unsigned right) {
    using Pair = typename Half<T>::Pair;
    const Pair found = __hsub2(reinterpret_cast<const Pair&>(left), reinterpret_cast<const Pair&>(right));
    return reinterpret_cast<const unsigned&>(found);
}
template <typename T>
__device__ inline unsigned multiply(unsigned left, unsigned right) {
    using Pair = typename Half<T>::Pair;
    const Pair found = __hmul2(reinterpret_cast<const Pair&>(left), reinterpret_cast<const Pair&>(right));
    return reinterpret_cast<const unsigned&>(found);
}

// The scales of a thread's two rows (g and g + 8), each twice in a register, from two stored ones side by side.
template <typename T>
__device__ inline void spread_scales(unsigned (&scale)[2], __half2 stored) {
    const float2 both = __half22float2(stored);
    scale[0] = pack<T>(both.x, both.x), scale[1] = pack<T>(both.y, both.y);
}
template <>
__device__ inline void spread_scales<__half>(unsigned (&scale)[2], __half2 stored) {
    const __half2 low = __low2half2(stored), high = __high2half2(stored);
    scale[0] = reinterpret_cast<const unsigned&>(low), scale[1] = reinterpret_cast<const unsigned&>(high);
}
// A power of two from its exponent biased by 127; 255 is NaN. float16 holds 2^-24 to 2^15.
template <typename T>
__device__ inline unsigned power_of_two(unsigned exponent) {
    const unsigned bits = exponent == 255 ? 0x7fc0 : exponent == 0 ? 0x0040 : exponent << 7;
    return bits * 0x10001u;
}
template <>
__device__ inline unsigned power_of_two<__half>(unsigned exponent) {
    const int power = static_cast<int>(exponent) - 127;
    const float value = exponent == 255 ? __int_as_float(0x7fc00000) : exp2f(static_cast<float>(min(power, 15)));
    return pack<__half>(value, value);
}

// a[0..7]: the registers of two products (32 columns of the sum) from the words of this thread: two for four bits, four
// for eight. `scale` and `zero` have an entry for each of its two rows.
template <typename T, int FORMAT>
__device__ inline void dequantize(
    unsigned (&a)[8], const unsigned* words, const unsigned (&scale)[2], const unsigned (&zero)[2]) {
    constexpr unsigned MAGIC = Half<T>::MAGIC;
#pragma unroll
    for (int product = 0; product < 2; ++product) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int row = i & 1;
            unsigned value;
            if (FORMAT == INT4 || FORMAT == INT4_ZEROS) {
                value = masked_or<0x000f000f>(words[product] >> 4 * i, MAGIC);
                value = subtract<T>(value, FORMAT == INT4 ? MAGIC + 0x00080008 : zero[row]);
            } else if (FORMAT == INT8 || FORMAT == INT8_ZEROS) {
                // Two's complement: the low seven bits, less 128 for the sign bit.
                const unsigned bits = words[2 * product + i / 2] >> 8 * row;
                value = subtract<T>(masked_or<0x007f007f>(bits, MAGIC), masked_or<0x00800080>(bits, MAGIC));
                if (FORMAT == INT8_ZEROS) value = subtract<T>(value, zero[row]);
            } else {  // the exponent and fraction of e2m1 in those of a smaller number, 2^126 or 2^14 times too small
                constexpr int AT = Half<T>::FRACTION;
                const unsigned word = words[product], moved = 4 * i < AT ? word << (AT - 4 * i) : word >> (4 * i - AT);
                value = masked_or<Half<T>::E2M1>(moved, word << (12 - 4 * i) & 0x80008000);
                value = multiply<T>(value, Half<T>::REBIAS);
            }
            a[4 * product + i] = multiply<T>(value, scale[row]);
        }
    }
}

// Weights before scale and zero point, in float16, as the left matrix of mma (m16n8k16), with as few instructions as
// there are. An integer is a subnormal number by itself, 2^24 times too small; e2m1 is a number 2^14 times too small.
// What is not subtracted from each integer (OFFSET) is subtracted from sums: sum((OFFSET + q) x) - OFFSET sum(x).
template <int FORMAT>
struct Unscaled {
    static constexpr bool EIGHT_BITS = FORMAT == INT8 || FORMAT == INT8_ZEROS;
    static constexpr bool ZEROS = FORMAT == INT4_ZEROS || FORMAT == INT8_ZEROS;
    // How much larger than the integer a value is, and than the weight where that has no stored zero point.
    static constexpr float BASE = EIGHT_BITS ? 128.f : 0.f, OFFSET = BASE + (FORMAT == INT4 ? 8.f : 0.f);
    // What sums of values times `scales` are multiplied by: see e8m0_and_a_half.
    static constexpr float FACTOR = FORMAT == MXFP4 ? 0x1p14f / 1.5f : 0x1p24f, UNIT = 0x1p-24f;

    // a: the registers of product j of four (64 columns), from the words of this thread.
    __device__ static inline void registers(unsigned (&a)[4], const unsigned* words, int j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (FORMAT == INT4 || FORMAT == INT4_ZEROS) {
                a[i] = words[j] >> 4 * i & 0x000f000f;
            } else if (EIGHT_BITS) {  // two's complement plus 128
                a[i] = (words[2 * j + i / 2] ^ 0x80808080u) >> 8 * (i & 1) & 0x00ff00ff;
            } else {
                constexpr int AT = Half<__half>::FRACTION;
                const unsigned word = words[j], moved = 4 * i < AT ? word << (AT - 4 * i) : word >> (4 * i - AT);
                a[i] = masked_or<Half<__half>::E2M1>(moved, word << (12 - 4 * i) & 0x80008000);
            }
        }
    }
};

// 1.5 * 2^(exponent - 127) in float32, of the exponent in bits 23 to 30 of a number. One instruction: the bit of the
// fraction makes NaN of 255. (Exponent 0 is 2^-127 here, a subnormal number: off by a third of next to nothing.)
__device__ inline float e8m0_and_a_half(unsigned bits) {
    return __uint_as_float(masked_or<0x7f800000>(bits, 0x00400000));
}

// Two elements as float16, times a power of two for bfloat16.
__device__ inline unsigned to_half(unsigned pair, float, __half) { return pair; }
__device__ inline unsigned to_half(unsigned pair, float factor, __nv_bfloat16) {
    return pack<__half>(__uint_as_float(pair << 16) * factor, __uint_as_float(pair & 0xffff0000u) * factor);
}
