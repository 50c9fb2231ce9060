// Quantized matrices as their formats store them: codes of a row, and the scales and offsets of its units of columns.

#pragma once

#include "vectors.h"

enum Codes { INT4, INT8, MXFP4, Q6_K };
enum Scales { SCALES_FLOAT32, SCALES_FLOAT16, SCALES_E8M0, SCALES_Q4_K, SCALES_Q6_K };
enum Offsets { OFFSETS_NONE, OFFSETS_ZEROS_UINT8, OFFSETS_ZEROS_INT8, OFFSETS_FLOAT16 };

extern "C" {

// A quantized matrix (rows, columns). Strides of data are in bytes, those of scales and offsets in elements.
struct Matrix {
    const uint8_t* data;
    const void* scales;
    const void* offsets;
    int64_t rows, columns, group;  // group: columns that share a scale
    int64_t data_stride, scale_stride, offset_stride;
    int32_t codes, scale_kind, offset_kind, padding;
};
}

// How codes of a format lie in a row, as chunks of CHUNK columns for the integer product and blocks of 32 for the float
// product. Nibble formats give even columns in the first vector and odd columns in the second.
struct Nibbles {
    static constexpr int CHUNK = 128, VECTORS = 2, UNIT = 32, SHIFT = 8;
    static constexpr bool WIDE = false, PAIRS = true;
    template <bool FULL> static INLINE void chunk(const uint8_t* row, int64_t index, int64_t columns, u8x64* found) {
        const uint8_t* from = row + index * 64;
        u8x64 bytes = FULL ? load<u8x64>(from) : load_bytes(from, columns / 2 - index * 64);
        found[0] = bytes & 15;
        found[1] = bytes >> 4;
    }
    static INLINE void block(const uint8_t* row, int64_t index, u8x16* found) {
        u8x16 bytes = load<u8x16>(row + index * 16);
        found[0] = bytes & 15;
        found[1] = bytes >> 4;
    }
};

struct Bytes {
    static constexpr int CHUNK = 64, VECTORS = 1, UNIT = 32, SHIFT = 128;
    static constexpr bool WIDE = true, PAIRS = false;
    template <bool FULL> static INLINE void chunk(const uint8_t* row, int64_t index, int64_t columns, u8x64* found) {
        const uint8_t* from = row + index * 64;
        found[0] = (FULL ? load<u8x64>(from) : load_bytes(from, columns - index * 64)) ^ 128;
    }
    static INLINE void block(const uint8_t* row, int64_t index, u8x16* found) {
        found[0] = load<u8x16>(row + index * 32) ^ 128;
        found[1] = load<u8x16>(row + index * 32 + 16) ^ 128;
    }
};

// e2m1 codes become twice their value plus SHIFT; the scales are halved.
struct E2m1 {
    static constexpr int CHUNK = 128, VECTORS = 2, UNIT = 32, SHIFT = 12;
    static constexpr bool WIDE = false, PAIRS = true;
    static constexpr uint8_t VALUES[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
    static INLINE u8x64 values(u8x64 codes) {
#if defined(__AVX512BW__)
        const __m512i table = _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(VALUES)));
        return (u8x64)_mm512_shuffle_epi8(table, (__m512i)codes);
#else
        for (int i = 0; i < 64; i++) codes[i] = VALUES[codes[i]];
        return codes;
#endif
    }
    static INLINE u8x16 values(u8x16 codes) {
#if defined(__SSSE3__)
        return (u8x16)_mm_shuffle_epi8(_mm_loadu_si128(reinterpret_cast<const __m128i*>(VALUES)), (__m128i)codes);
#else
        for (int i = 0; i < 16; i++) codes[i] = VALUES[codes[i]];
        return codes;
#endif
    }
    template <bool FULL> static INLINE void chunk(const uint8_t* row, int64_t index, int64_t columns, u8x64* found) {
        Nibbles::chunk<FULL>(row, index, columns, found);
        found[0] = values(found[0]);
        found[1] = values(found[1]);
    }
    static INLINE void block(const uint8_t* row, int64_t index, u8x16* found) {
        Nibbles::block(row, index, found);
        found[0] = values(found[0]);
        found[1] = values(found[1]);
    }
};
constexpr uint8_t E2m1::VALUES[16];

// 256 columns are 128 bytes of low nibbles, then 64 bytes of high bits: bits 0-1 of byte i belong to column 2i, 2-3 to
// column 2i + 1, 4-5 to column 2i + 128, 6-7 to column 2i + 129.
struct SixBits {
    static constexpr int CHUNK = 128, VECTORS = 2, UNIT = 16, SHIFT = 32;
    static constexpr bool WIDE = false, PAIRS = true;
    template <bool FULL> static INLINE void chunk(const uint8_t* row, int64_t index, int64_t, u8x64* found) {
        const uint8_t* block = row + index / 2 * 192;
        u8x64 low = load<u8x64>(block + index % 2 * 64), high = load<u8x64>(block + 128) >> (index % 2 * 4);
        found[0] = (low & 15) | (high & 3) << 4;
        found[1] = low >> 4 | (high & 12) << 2;
    }
    static INLINE void block(const uint8_t* row, int64_t index, u8x16* found) {
        const uint8_t* from = row + index / 8 * 192;
        int64_t byte = index % 8 * 16;
        u8x16 low = load<u8x16>(from + byte), high = load<u8x16>(from + 128 + byte % 64) >> (byte / 64 * 4);
        found[0] = (low & 15) | (high & 3) << 4;
        found[1] = low >> 4 | (high & 12) << 2;
    }
};

inline bool has_offsets(const Matrix& weight) {
    return weight.offset_kind != OFFSETS_NONE || weight.scale_kind == SCALES_Q4_K;
}

// Copies each of `from` to the `each` units of its group.
template <typename Value> inline void spread(int64_t units, int64_t each, float* to, Value value) {
    for (int64_t group = 0, unit = 0; unit < units; group++) {
        const float one = value(group);
        for (const int64_t end = std::min(units, unit + each); unit < end; unit++) to[unit] = one;
    }
}

// 256 columns: 8 scales, 8 minima, d and dmin in 20 bytes.
inline void read_q4_k(const uint8_t* from, int64_t units, int shift, float* scales, float* offsets) {
    for (int64_t unit = 0; unit < units; unit += 8, from += 20) {
        uint16_t bits[2];
        std::memcpy(bits, from + 16, 4);
        const float d = half_to_float(bits[0]), dmin = half_to_float(bits[1]);
        for (int i = 0; i < 8; i++) {
            scales[unit + i] = d * from[i];
            offsets[unit + i] = shift * scales[unit + i] - dmin * from[8 + i];
        }
    }
}

// 256 columns: 16 scales and d in 18 bytes.
inline void read_q6_k(const uint8_t* from, int64_t units, float* scales) {
    for (int64_t unit = 0; unit < units; unit += 16, from += 18) {
        uint16_t bits;
        std::memcpy(&bits, from + 16, 2);
        const float d = half_to_float(bits);
        for (int i = 0; i < 16; i++) scales[unit + i] = d * int8_t(from[i]);
    }
}

// Scales, and offsets of the signed codes, of each unit of a row in float32.
template <typename Format> void read_row_scales(const Matrix& weight, int64_t row, float* scales, float* offsets) {
    const int64_t units = weight.columns / Format::UNIT, first = row * weight.scale_stride;
    const int64_t each = weight.group > Format::UNIT ? weight.group / Format::UNIT : 1;  // units of a group
    const auto* bytes = static_cast<const uint8_t*>(weight.scales) + first;
    const auto* floats = static_cast<const float*>(weight.scales) + first;
    switch (weight.scale_kind) {
        case SCALES_Q4_K: return read_q4_k(bytes, units, Format::SHIFT, scales, offsets);
        case SCALES_Q6_K: return read_q6_k(bytes, units, scales);
        case SCALES_E8M0:
            spread(units, each, scales, [&](int64_t group) {
                return bytes[group] == 255 ? NAN : std::ldexp(0.5f, int(bytes[group]) - 127);
            });
            break;
        case SCALES_FLOAT16:  // groups are units
            halves_to_floats(static_cast<const uint16_t*>(weight.scales) + first, scales, units);
            break;
        default: spread(units, each, scales, [&](int64_t group) { return floats[group]; });
    }
    const int64_t start = row * weight.offset_stride;
    const auto* zeros = static_cast<const uint8_t*>(weight.offsets) + start;
    switch (weight.offset_kind) {
        case OFFSETS_NONE: return;
        case OFFSETS_ZEROS_UINT8:
            spread(units, each, offsets, [&](int64_t group) { return float(Format::SHIFT - int(zeros[group])); });
            break;
        case OFFSETS_ZEROS_INT8:
            spread(units, each, offsets, [&](int64_t group) { return float(-int(int8_t(zeros[group]))); });
            break;
        default:
            halves_to_floats(static_cast<const uint16_t*>(weight.offsets) + start, offsets, units);
            for (int64_t unit = 0; unit < units; unit++) offsets[unit] += Format::SHIFT * scales[unit];
            return;
    }
    for (int64_t unit = 0; unit < units; unit++) offsets[unit] *= scales[unit];
}

// The same of rows [row, row + count), one after the other.
template <typename Format>
void read_scales(const Matrix& weight, int64_t row, int64_t count, float* scales, float* offsets) {
    const int64_t units = weight.columns / Format::UNIT, all = count * units;
    std::memset(scales + all, 0, LANES * sizeof(float));  // a vector load may begin at the last unit
    std::memset(offsets + all, 0, LANES * sizeof(float));
    const bool adjacent = weight.group == Format::UNIT && weight.scale_stride == units;
    if (adjacent && weight.scale_kind == SCALES_FLOAT32 && weight.offset_kind == OFFSETS_NONE) {
        std::memcpy(scales, static_cast<const float*>(weight.scales) + row * units, all * sizeof(float));
    } else if (adjacent && weight.scale_kind == SCALES_FLOAT16 && weight.offset_stride == units) {
        halves_to_floats(static_cast<const uint16_t*>(weight.scales) + row * units, scales, all);
        halves_to_floats(static_cast<const uint16_t*>(weight.offsets) + row * units, offsets, all);
        for (int64_t unit = 0; unit < all; unit++) offsets[unit] += Format::SHIFT * scales[unit];
    } else {
        for (int64_t r = 0; r < count; r++)
            read_row_scales<Format>(weight, row + r, scales + r * units, offsets + r * units);
    }
}
