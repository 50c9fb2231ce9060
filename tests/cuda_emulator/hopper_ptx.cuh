// The functions of flashkernel/blocks/cuda/hopper_ptx.cuh on a CPU, but for rung 7's product.

#pragma once

#include "ptx.cuh"

// What the loader encodes for a tensor of 16-bit elements: its sizes, innermost dim first, the strides in bytes from the
// second dim on, the sizes of a box, and the swizzle.
struct TensorMap {
    const unsigned char* base;
    unsigned long long words[15];
};

inline void mbarrier_init(unsigned barrier, unsigned arrivals) { cuda_emulator::initialize_mbarrier(barrier, arrivals); }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(unsigned barrier) { cuda_emulator::arrive_at_mbarrier(barrier, 0, "mbarrier.arrive"); }
inline void mbarrier_arrive_expect_bytes(unsigned barrier, unsigned bytes) {
    cuda_emulator::arrive_at_mbarrier(barrier, static_cast<int>(bytes), "mbarrier.arrive.expect_tx");
}
inline void mbarrier_wait(unsigned barrier, unsigned parity) { cuda_emulator::wait_for_mbarrier(barrier, parity); }

// A box of a tensor of RANK dims; from the third dim on it has one element.
template <int RANK>
inline void load_box(unsigned target, const TensorMap& map, const int (&at)[RANK], unsigned barrier) {
    const unsigned long long *sizes = map.words, *strides = sizes + RANK, *box = strides + RANK - 1, swizzle = box[RANK];
    if (target % 1024) cuda_emulator::fail("cp.async.bulk.tensor: %u is not a multiple of the swizzle's 1024", target);
    const auto inside = [](unsigned long long size, int first, unsigned long long box) {
        const long long left = static_cast<long long>(size) - first;
        return static_cast<unsigned>(first < 0 || left < 0 ? 0 : left < static_cast<long long>(box) ? left : box);
    };
    unsigned rows = inside(sizes[1], at[1], box[1]);
    const unsigned char* from = map.base + 2 * at[0];
    for (int dim = 1; dim < RANK; ++dim) from += static_cast<long long>(at[dim]) * strides[dim - 1];
    for (int dim = 2; dim < RANK; ++dim) {
        if (box[dim] != 1) cuda_emulator::fail("cp.async.bulk.tensor: a box of %llu along dim %d", box[dim], dim);
        rows *= inside(sizes[dim], at[dim], 1);
    }
    cuda_emulator::start_bulk_copy({target, barrier, static_cast<unsigned>(box[1]), static_cast<unsigned>(2 * box[0]), rows,
                               2 * inside(sizes[0], at[0], box[0]), from, strides[0], swizzle == 3});
}
inline void tma_load_2d(unsigned target, const TensorMap& map, int x, int y, unsigned barrier) {
    load_box<2>(target, map, {x, y}, barrier);
}
inline void tma_load_4d(unsigned target, const TensorMap& map, int x, int y, int z, int w, unsigned barrier) {
    load_box<4>(target, map, {x, y, z, w}, barrier);
}
inline void bulk_load(unsigned target, const void* source, unsigned bytes, unsigned barrier) {
    if (target % 16 || reinterpret_cast<uintptr_t>(source) % 16 || bytes % 16 || bytes == 0)
        cuda_emulator::fail("cp.async.bulk: addresses and size must be multiples of 16, not %u, %p, %u", target, source,
                            bytes);
    cuda_emulator::start_bulk_copy({target, barrier, 1, bytes, 1, bytes, static_cast<const unsigned char*>(source), 0, false});
}
inline void prefetch_tensor_map(const TensorMap&) {}

template <int COUNT>
inline void set_max_registers_down() {
    cuda_emulator::set_registers(COUNT);
}
template <int COUNT>
inline void set_max_registers_up() {
    cuda_emulator::set_registers(COUNT);
}

inline void fence_async_proxy() {}

#define named_barrier_sync(number, threads) ((void)cuda_emulator::barrier(__FILE__, __LINE__, number, threads))

inline void stmatrix_transposed(unsigned address, const unsigned (&r)[4]) {
    cuda_emulator::store_matrices_transposed(address, r);
}

inline float2 load_shared_2_floats(unsigned address) {
    float2 values;
    memcpy(&values, cuda_emulator::shared_bytes(address, 8, "ld.shared.v2.f32"), 8);
    return values;
}
inline unsigned load_shared_4(unsigned address) {
    unsigned value;
    memcpy(&value, cuda_emulator::shared_bytes(address, 4, "ld.shared.u32"), 4);
    return value;
}
inline unsigned load_shared_2(unsigned address) {
    unsigned short value;
    memcpy(&value, cuda_emulator::shared_bytes(address, 2, "ld.shared.u16"), 2);
    return value;
}
template <unsigned MASK>
inline unsigned masked_or(unsigned value, unsigned bits) {
    return (value & MASK) | bits;
}

inline unsigned long long wgmma_descriptor(unsigned address, unsigned leading, unsigned stride) {
    return 1ull << 62 | static_cast<unsigned long long>(stride >> 4) << 32 |
           static_cast<unsigned long long>(leading >> 4) << 16 | (address & 0x3ffff) >> 4;
}
inline void wgmma_fence() {}
inline void wgmma_commit() { cuda_emulator::commit_products(); }
template <int PENDING>
inline void wgmma_wait() {
    cuda_emulator::wait_products(PENDING);
}
template <int COUNT>
inline void keep_in_registers(float (&)[COUNT]) {}
