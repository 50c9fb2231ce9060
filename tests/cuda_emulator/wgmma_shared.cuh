// The functions of flashkernel/blocks/cuda/wgmma_shared.cuh on a CPU.

#pragma once

#include "hopper_ptx.cuh"

template <int COUNT>
inline void wgmma_shared(float (&c)[COUNT], unsigned long long a, unsigned long long b, int accumulate, __half) {
    cuda_emulator::start_product({c, {}, b, accumulate != 0, true, COUNT, true, false, a});
}
template <int COUNT>
inline void wgmma_shared(float (&c)[COUNT], unsigned long long a, unsigned long long b, int accumulate, __nv_bfloat16) {
    cuda_emulator::start_product({c, {}, b, accumulate != 0, false, COUNT, true, false, a});
}
template <int COUNT>
inline void wgmma_shared_n_major(float (&c)[COUNT], unsigned long long a, unsigned long long b, int accumulate, __half) {
    cuda_emulator::start_product({c, {}, b, accumulate != 0, true, COUNT, true, true, a});
}
template <int COUNT>
inline void wgmma_shared_n_major(
    float (&c)[COUNT], unsigned long long a, unsigned long long b, int accumulate, __nv_bfloat16) {
    cuda_emulator::start_product({c, {}, b, accumulate != 0, false, COUNT, true, true, a});
}
