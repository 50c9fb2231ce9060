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

namespace cuda_emulator {

constexpr unsigned WHOLE_WARP = 0xffffffffu;

struct LoadMatrix {
    unsigned address;
    unsigned* result;
};

// Lane l passes the address of row l % 8 of matrix l / 8. Of matrix i it receives, in result[i], elements 2 (l % 4) and
// 2 (l % 4) + 1 of row l / 4; transposed, of column l / 4.
template <bool TRANSPOSED, int MATRICES>
inline void load_matrices(const char* name, unsigned (&result)[MATRICES], unsigned address) {
    LoadMatrix mine{address, result};
    collective(name, WHOLE_WARP, &mine, [name](Warp& warp, unsigned) {
        for (unsigned matrix = 0; matrix < MATRICES; ++matrix) {
            uint16_t element[8][8];
            for (unsigned row = 0; row < 8; ++row)
                memcpy(element[row], shared_bytes(data_of<LoadMatrix>(warp, 8 * matrix + row).address, 16, name), 16);
            for (unsigned lane = 0; lane < LANES; ++lane) {
                const unsigned major = lane / 4, minor = lane % 4 * 2;
                const uint16_t low = TRANSPOSED ? element[minor][major] : element[major][minor];
                const uint16_t high = TRANSPOSED ? element[minor + 1][major] : element[major][minor + 1];
                data_of<LoadMatrix>(warp, lane).result[matrix] = low | static_cast<unsigned>(high) << 16;
            }
        }
    });
}

inline float element_of(unsigned short bits, __half) { return half_table()[bits]; }
inline float element_of(unsigned short bits, __nv_bfloat16) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }

struct MatrixProduct {
    float* c;
    unsigned a[4], b[2];
};

// Lane l = 4 g + p has of a: rows g and g + 8, columns 2 p, 2 p + 1 and the same + 8; of b: column g, rows 2 p, 2 p + 1
// and the same + 8; of c: rows g and g + 8, columns 2 p, 2 p + 1.
template <typename T>
inline void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    MatrixProduct mine{c, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    collective("mma", WHOLE_WARP, &mine, [](Warp& warp, unsigned lanes) {
        if (lanes != WHOLE_WARP) fail("mma: the warp is not whole");
        float left[16][16], right[16][8], sum[16][8];
        for (unsigned lane = 0; lane < LANES; ++lane) {
            const auto& one = data_of<MatrixProduct>(warp, lane);
            const unsigned group = lane / 4, pair = lane % 4 * 2;
            for (int i = 0; i < 4; ++i)
                for (int j = 0; j < 2; ++j)
                    left[group + i % 2 * 8][pair + i / 2 * 8 + j] =
                        element_of(static_cast<unsigned short>(one.a[i] >> 16 * j), T());
            for (int i = 0; i < 2; ++i)
                for (int j = 0; j < 2; ++j)
                    right[pair + i * 8 + j][group] = element_of(static_cast<unsigned short>(one.b[i] >> 16 * j), T());
            for (int i = 0; i < 4; ++i) sum[group + i / 2 * 8][pair + i % 2] = one.c[i];
        }
        for (int row = 0; row < 16; ++row)
            for (int k = 0; k < 16; ++k)
                for (int column = 0; column < 8; ++column) sum[row][column] += left[row][k] * right[k][column];
        for (unsigned lane = 0; lane < LANES; ++lane)
            for (int i = 0; i < 4; ++i)
                data_of<MatrixProduct>(warp, lane).c[i] = sum[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    });
}

}  // namespace cuda_emulator

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
