// The functions of flashkernel/blocks/cuda/wgmma_registers.cuh on a CPU.

#pragma once

#include "hopper_ptx.cuh"

template <int COUNT>
inline void wgmma_registers(float (&c)[COUNT], const unsigned* a, unsigned long long b, int accumulate, __half) {
    cuda_emulator::start_product({c, {a[0], a[1], a[2], a[3]}, b, accumulate != 0, true, COUNT});
}
template <int COUNT>
inline void wgmma_registers(float (&c)[COUNT], const unsigned* a, unsigned long long b, int accumulate, __nv_bfloat16) {
    cuda_emulator::start_product({c, {a[0], a[1], a[2], a[3]}, b, accumulate != 0, false, COUNT});
}
template <int COUNT>
inline void wgmma_registers_n_major(float (&c)[COUNT], const unsigned* a, unsigned long long b, int accumulate, __half) {
    cuda_emulator::start_product({c, {a[0], a[1], a[2], a[3]}, b, accumulate != 0, true, COUNT, false, true});
}
template <int COUNT>
inline void wgmma_registers_n_major(
    float (&c)[COUNT], const unsigned* a, unsigned long long b, int accumulate, __nv_bfloat16) {
    cuda_emulator::start_product({c, {a[0], a[1], a[2], a[3]}, b, accumulate != 0, false, COUNT, false, true});
}
