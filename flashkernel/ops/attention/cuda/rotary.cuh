// The rotary embedding, applied to a tile of Q or K where it lies in shared memory: between its copy and the first
// product, so that rotated queries and keys never exist in device memory.
//
// Of a pair (a, b) of a token at position p, with the angle p * frequency of the pair:
//     a' = a cos - b sin,   b' = b cos + a sin
// A pair is (i, i + rotary_dim / 2), or (2 i, 2 i + 1) with ROTARY_INTERLEAVED. K is rotated again by every tile of
// queries that reads it: arithmetic instead of a pass over memory.

#pragma once

#include "mma.cuh"

__device__ inline float2 unpack(unsigned both, __half) { return __half22float2(reinterpret_cast<const __half2&>(both)); }
#if SM80
__device__ inline float2 unpack(unsigned both, __nv_bfloat16) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(both));
}
#endif

// Two pairs: (a.x, b.x) and (a.y, b.y).
__device__ inline void rotate_pairs(float2& a, float2& b, float2 cos, float2 sin) {
    const float2 first = a;
    a.x = first.x * cos.x - b.x * sin.x, a.y = first.y * cos.y - b.y * sin.y;
    b.x = b.x * cos.x + first.x * sin.x, b.y = b.y * cos.y + first.y * sin.y;
}

// Row r of the tile is at position `position` + r; rows outside [0, positions) are left alone. cos and sin are float32
// [positions][rotary_dim / 2]; rotary_dim is a multiple of 16. All threads of the block take part, and a barrier must
// follow.
template <typename T, int ROWS, int DIM, int THREADS>
__device__ inline void rotate_tile(unsigned tile, const float* cos, const float* sin, int rotary_dim, int position,
                                   int positions) {
    const int half = rotary_dim / 2, chunks = half / CHUNK;  // chunks of first elements, or pairs of neighboring chunks
    for (int index = threadIdx.x; index < ROWS * chunks; index += THREADS) {
        const int row = index / chunks, chunk = index % chunks;
        if (position + row < 0 || position + row >= positions) continue;
        const long long angle = static_cast<long long>(position + row) * half + chunk * CHUNK;
#if ROTARY_INTERLEAVED
        const unsigned a_at = tile + swizzled<DIM>(row, 2 * chunk), b_at = tile + swizzled<DIM>(row, 2 * chunk + 1);
#else
        const unsigned a_at = tile + swizzled<DIM>(row, chunk), b_at = tile + swizzled<DIM>(row, chunk + chunks);
#endif
        uint4 loaded[2] = {load_shared_16(a_at), load_shared_16(b_at)};
        unsigned(&words)[8] = reinterpret_cast<unsigned(&)[8]>(loaded);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const float2 c = reinterpret_cast<const float2*>(cos + angle)[i];
            const float2 s = reinterpret_cast<const float2*>(sin + angle)[i];
#if ROTARY_INTERLEAVED  // a word is one pair; pairs 2 i and 2 i + 1 of this chunk of angles
            const float2 p = unpack(words[2 * i], T()), q = unpack(words[2 * i + 1], T());
            float2 a = make_float2(p.x, q.x), b = make_float2(p.y, q.y);
            rotate_pairs(a, b, c, s);
            words[2 * i] = pack<T>(a.x, b.x), words[2 * i + 1] = pack<T>(a.y, b.y);
#else
            float2 a = unpack(words[i], T()), b = unpack(words[i + 4], T());
            rotate_pairs(a, b, c, s);
            words[i] = pack<T>(a.x, a.y), words[i + 4] = pack<T>(b.x, b.y);
#endif
        }
        store_shared(a_at, loaded[0]);
        store_shared(b_at, loaded[1]);
    }
}
