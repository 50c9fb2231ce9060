// PTX instructions of Hopper (sm_90a), one function each: TMA copies, their barriers, asynchronous products of a
// warpgroup. They stand apart from ptx.cuh because other GPUs have none of them.
//
// Addresses of shared memory are 32-bit numbers (`shared_address` of ptx.cuh).

#pragma once

#include "ptx.cuh"

// A CUtensorMap: the host encodes it, the kernel takes it as a __grid_constant__ parameter.
struct alignas(64) TensorMap {
    unsigned char bytes[128];
};

// An mbarrier is 8 bytes of shared memory. Its phase ends when all expected arrivals came and all expected bytes were
// copied; then the next one starts. A wait names the parity of the phase whose end it waits for.
__device__ inline void mbarrier_init(unsigned barrier, unsigned arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialized barriers visible to TMA; a barrier of the block must follow.
__device__ inline void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void mbarrier_arrive(unsigned barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void mbarrier_arrive_expect_bytes(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
// BOUNDED_WAITS, for kernels not yet seen working on a GPU: a wait of seconds is a deadlock, which ends with a message.
__device__ inline void mbarrier_wait(unsigned barrier, unsigned parity) {
#ifdef BOUNDED_WAITS
    const long long begin = clock64();
    for (unsigned done = 0; !done;) {
        asm volatile(
            "{\n\t.reg .pred done;\n\t"
            "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n\t"
            "selp.u32 %0, 1, 0, done;\n\t}"
            : "=r"(done)
            : "r"(barrier), "r"(parity)
            : "memory");
        if (!done && clock64() - begin > 2000000000ll) {
            printf("block %d thread %d waits for phase %u of the mbarrier at %u\n", blockIdx.x, threadIdx.x, parity, barrier);
            __trap();
        }
    }
#else
    asm volatile(
        "{\n\t.reg .pred done;\n"
        "again:\n\t"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n\t"
        "@!done bra again;\n\t}" ::"r"(barrier), "r"(parity)
        : "memory");
#endif
}

// The box of a two-dimensional tensor that starts at column x and row y; its bytes count toward the barrier. Elements
// outside the tensor become zeros and count as well.
__device__ inline void tma_load_2d(unsigned target, const TensorMap& map, int x, int y, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
        ::"r"(target), "l"(&map), "r"(x), "r"(y), "r"(barrier)
        : "memory");
}
// The same of a four-dimensional tensor.
__device__ inline void tma_load_4d(unsigned target, const TensorMap& map, int x, int y, int z, int w, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3, %4, %5}], "
        "[%6];" ::"r"(target), "l"(&map), "r"(x), "r"(y), "r"(z), "r"(w), "r"(barrier)
        : "memory");
}
// `bytes` contiguous bytes of device memory; both addresses and the size are multiples of 16.
__device__ inline void bulk_load(unsigned target, const void* source, unsigned bytes, unsigned barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
        ::"r"(target), "l"(source), "r"(bytes), "r"(barrier)
        : "memory");
}
__device__ inline void prefetch_tensor_map(const TensorMap& map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(&map) : "memory");
}

// Registers of this warpgroup's threads: fewer for those that copy, more for those that multiply.
template <int COUNT>
__device__ inline void set_max_registers_down() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
}
template <int COUNT>
__device__ inline void set_max_registers_up() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
}

// Makes what this thread stored to shared memory visible to wgmma and TMA; a barrier must follow.
__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// A barrier of some of a block's threads; 0 is __syncthreads()'s own.
__device__ inline void named_barrier_sync(int barrier, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Four 8 x 8 matrices of 16-bit elements, transposed. A lane has of each, in r[i], elements 2 (lane % 4) and the next of
// row lane / 4, and passes the address of row lane % 8 of the transposed matrix lane / 8.
__device__ inline void stmatrix_transposed(unsigned address, const unsigned (&r)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(r[0]),
                 "r"(r[1]), "r"(r[2]), "r"(r[3])
                 : "memory");
}

__device__ inline float2 load_shared_2_floats(unsigned address) {
    float2 values;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];" : "=f"(values.x), "=f"(values.y) : "r"(address) : "memory");
    return values;
}
__device__ inline unsigned load_shared_4(unsigned address) {
    unsigned value;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
    return value;
}
__device__ inline unsigned load_shared_2(unsigned address) {
    unsigned short value;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(value) : "r"(address) : "memory");
    return value;
}

// (value & MASK) | bits, in one instruction: with two constants the compiler makes two.
template <unsigned MASK>
__device__ inline unsigned masked_or(unsigned value, unsigned bits) {
    unsigned result;
    asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(value), "n"(MASK), "r"(bits));
    return result;
}

// A matrix in shared memory in the 128-byte swizzle, as wgmma takes it: start address, and the strides in bytes between
// its 128-byte wide blocks (leading) and between groups of eight 128-byte rows within one.
__device__ inline unsigned long long wgmma_descriptor(unsigned address, unsigned leading, unsigned stride) {
    constexpr unsigned long long SWIZZLE_128B = 1ull << 62;
    return SWIZZLE_128B | static_cast<unsigned long long>(stride >> 4) << 32 |
           static_cast<unsigned long long>(leading >> 4) << 16 | (address & 0x3ffff) >> 4;
}

__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int PENDING>  // groups that may still be under way
__device__ inline void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(PENDING) : "memory");
}
// The compiler may use the accumulators from here on, not before: it does not know that products write them later.
template <int COUNT>
__device__ inline void keep_in_registers(float (&values)[COUNT]) {
#pragma unroll
    for (int i = 0; i < COUNT; ++i) asm volatile("" : "+f"(values[i])::"memory");
}

// c [64 x 256, float32] = a [64 x 16] b [16 x 256] + (accumulate ? c : 0), started by the 128 threads of a warpgroup.
// Both matrices are in shared memory; a's rows are along K, b's along N.
#define FLOATS_8(c, i) \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), \
    "+f"(c[i + 7])
#define FLOATS_32(c, i) FLOATS_8(c, i), FLOATS_8(c, i + 8), FLOATS_8(c, i + 16), FLOATS_8(c, i + 24)
#define WGMMA_M64N256K16(TYPES, c, a, b, accumulate) \
    asm volatile("{\n\t.reg .pred p;\n\tsetp.ne.b32 p, %130, 0;\n\t" \
        "wgmma.mma_async.sync.aligned.m64n256k16.f32." TYPES " {" \
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, " \
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63, " \
        "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
        "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
        "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
        "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127}, " \
        "%128, %129, p, 1, 1, 0, 1;\n\t}" \
        : FLOATS_32(c, 0), FLOATS_32(c, 32), FLOATS_32(c, 64), FLOATS_32(c, 96) \
        : "l"(a), "l"(b), "r"(accumulate))

__device__ inline void wgmma_m64n256k16(
    float (&c)[128], unsigned long long a, unsigned long long b, int accumulate, __half) {
    WGMMA_M64N256K16("f16.f16", c, a, b, accumulate);
}
__device__ inline void wgmma_m64n256k16(
    float (&c)[128], unsigned long long a, unsigned long long b, int accumulate, __nv_bfloat16) {
    WGMMA_M64N256K16("bf16.bf16", c, a, b, accumulate);
}
#undef FLOATS_8
#undef FLOATS_32
#undef WGMMA_M64N256K16
