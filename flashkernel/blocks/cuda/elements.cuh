// Elements are float, half or bfloat16 in memory and float in registers; here they change from one to the other, one at a
// time or 16 bytes at a time.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

using Index = long long;  // element offsets go beyond 2^31

__device__ inline float to_float(float value) { return value; }
__device__ inline float to_float(__half value) { return __half2float(value); }
__device__ inline float to_float(__nv_bfloat16 value) { return __bfloat162float(value); }
__device__ inline void assign(float& target, float value) { target = value; }
__device__ inline void assign(__half& target, float value) { target = __float2half_rn(value); }
__device__ inline void assign(__nv_bfloat16& target, float value) { target = __float2bfloat16_rn(value); }

// N elements as they lie in memory: the 16 bytes that one load instruction brings at most, or a single element.
template <typename T, int N>
struct Elements {
    static_assert(N * sizeof(T) == 16, "one element, or 16 bytes of them");
    uint4 bits;

    __device__ inline void load(const T* source) { bits = *reinterpret_cast<const uint4*>(source); }
    __device__ inline void store(T* target) const { *reinterpret_cast<uint4*>(target) = bits; }
    __device__ inline float get(int i) const { return to_float(reinterpret_cast<const T*>(&bits)[i]); }
    __device__ inline void set(int i, float value) { assign(reinterpret_cast<T*>(&bits)[i], value); }
};
template <typename T>
struct Elements<T, 1> {
    T bits;

    __device__ inline void load(const T* source) { bits = *source; }
    __device__ inline void store(T* target) const { *target = bits; }
    __device__ inline float get(int) const { return to_float(bits); }
    __device__ inline void set(int, float value) { assign(bits, value); }
};
