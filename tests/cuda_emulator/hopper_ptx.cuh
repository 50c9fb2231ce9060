// The functions of flashkernel/blocks/cuda/hopper_ptx.cuh on a CPU, but for products of two matrices in shared memory.

#pragma once

#include "ptx.cuh"

// What the loader encodes for a two-dimensional tensor of 16-bit elements, innermost dim first.
struct TensorMap {
    const unsigned char* base;
    unsigned long long sizes[2], stride, box[2], swizzle, unused[9];
};

inline void mbarrier_init(unsigned barrier, unsigned arrivals) { cuda_emulator::initialize_mbarrier(barrier, arrivals); }
inline void fence_mbarrier_init() {}
inline void mbarrier_arrive(unsigned barrier) { cuda_emulator::arrive_at_mbarrier(barrier, 0, "mbarrier.arrive"); }
inline void mbarrier_arrive_expect_bytes(unsigned barrier, unsigned bytes) {
    cuda_emulator::arrive_at_mbarrier(barrier, static_cast<int>(bytes), "mbarrier.arrive.expect_tx");
}
inline void mbarrier_wait(unsigned barrier, unsigned parity) { cuda_emulator::wait_for_mbarrier(barrier, parity); }

inline void tma_load_2d(unsigned target, const TensorMap& map, int x, int y, unsigned barrier) {
    if (target % 1024) cuda_emulator::fail("cp.async.bulk.tensor: %u is not a multiple of the swizzle's 1024", target);
    const auto inside = [](unsigned long long size, int first, unsigned long long box) {
        const long long left = static_cast<long long>(size) - first;
        return static_cast<unsigned>(left < 0 ? 0 : left < static_cast<long long>(box) ? left : box);
    };
    cuda_emulator::start_bulk_copy({target, barrier, static_cast<unsigned>(map.box[1]), static_cast<unsigned>(2 * map.box[0]),
                               inside(map.sizes[1], y, map.box[1]), 2 * inside(map.sizes[0], x, map.box[0]),
                               map.base + y * map.stride + 2 * x, map.stride, map.swizzle == 3});
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

#define named_barrier_sync(number, threads) ((void)cuda_emulator::barrier(__FILE__, __LINE__, number, threads))

inline void stmatrix_transposed(unsigned address, const unsigned (&r)[4]) {
    cuda_emulator::store_matrices_transposed(address, r);
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
