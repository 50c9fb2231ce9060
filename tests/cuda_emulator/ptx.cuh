// The functions of flashkernel/blocks/cuda/ptx.cuh on a CPU: what the PTX manual says of each instruction, in C++.

#pragma once

#if __CUDA_ARCH__ >= 800
#define SM80 1
#else
#define SM80 0
#endif
#if __CUDA_ARCH__ >= 900
#define SM90 1
#else
#define SM90 0
#endif

inline unsigned shared_address(const void* pointer) { return cuda_emulator::shared_address_of(pointer); }

inline void ldmatrix(unsigned (&r)[4], unsigned address) {
    cuda_emulator::load_matrices<false>("ldmatrix", r, address);
}
inline void ldmatrix_transposed(unsigned (&r)[4], unsigned address) {
    cuda_emulator::load_matrices<true>("ldmatrix.trans", r, address);
}

inline void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __half) {
    cuda_emulator::multiply<__half>(c, a, b0, b1);
}
#if SM80
inline void mma_m16n8k16(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, __nv_bfloat16) {
    cuda_emulator::multiply<__nv_bfloat16>(c, a, b0, b1);
}

inline void cp_async_16(unsigned address, const void* source, bool inside) {
    cuda_emulator::copy_async(address, source, 16, inside);
}
inline void cp_async_4(unsigned address, const void* source, bool inside) {
    cuda_emulator::copy_async(address, source, 4, inside);
}
inline void cp_async_commit() { cuda_emulator::commit_copies(); }
template <int PENDING>
inline void cp_async_wait() {
    cuda_emulator::wait_copies(PENDING);
}
#endif

inline void store_shared(unsigned address, unsigned value) {
    memcpy(cuda_emulator::shared_bytes(address, 4, "st.shared.u32"), &value, 4);
}
inline void store_shared(unsigned address, uint4 value) {
    memcpy(cuda_emulator::shared_bytes(address, 16, "st.shared.v4"), &value, 16);
}
inline uint4 load_shared_16(unsigned address) {
    uint4 value;
    memcpy(&value, cuda_emulator::shared_bytes(address, 16, "ld.shared.v4"), 16);
    return value;
}
inline void store_global_16(void* target, uint4 value) {
    if (reinterpret_cast<uintptr_t>(target) % 16) cuda_emulator::fail("st.global.v4: %p is not aligned", target);
    memcpy(target, &value, 16);
}

#if SM90
inline void atomic_add_4(float* address, const float (&values)[4]) {
    if (reinterpret_cast<uintptr_t>(address) % 16) cuda_emulator::fail("red.global.v4: %p is not aligned", address);
    for (int i = 0; i < 4; ++i) address[i] += values[i];
}
#endif

inline float exp2_approx(float x) {
    const float result = exp2f(x);
    return fabsf(result) < 0x1p-126f ? 0.f : result;
}
inline float reciprocal_approx(float x) { return 1.f / x; }
inline float max_nan(float x, float y) { return x > y || x != x ? x : y; }

inline void opaque(uint4&) {}
inline int opaque(int value) { return value; }
inline int reread_thread_index() { return static_cast<int>(threadIdx.x); }
inline int reread_block_index() { return static_cast<int>(blockIdx.x); }

inline void griddepcontrol_wait() {}
inline void griddepcontrol_launch_dependents() {}
