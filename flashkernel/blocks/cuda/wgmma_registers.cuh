// wgmma products whose left matrix is in registers, for sm_90a: what dequantized weights are multiplied by.
//
// c [64 x N, float32] = a [64 x 16] b [16 x N] + (accumulate ? c : 0), started by the 128 threads of a warpgroup. b is in
// shared memory (a descriptor of hopper_ptx.cuh) with rows along K; of wgmma_registers_n_major along N. With g = lane / 4
// and t = lane % 4, a thread of warp w has in a[i], low half first, columns 2 t and 2 t + 1 (i = 0, 1) or 2 t + 8 and
// 2 t + 9 (i = 2, 3) of row 16 w + g (i = 0, 2) or 16 w + g + 8 (i = 1, 3). c[4 j + 2 half + e] is column 8 j + 2 t + e of
// row 16 w + g + 8 half.

#pragma once

#include "hopper_ptx.cuh"

#define FLOATS_4(c, i) "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3])
#define FLOATS_8(c, i) FLOATS_4(c, i), FLOATS_4(c, i + 4)
#define FLOATS_16(c, i) FLOATS_8(c, i), FLOATS_8(c, i + 8)
#define FLOATS_32(c, i) FLOATS_16(c, i), FLOATS_16(c, i + 16)
#define FLOATS_64(c, i) FLOATS_32(c, i), FLOATS_32(c, i + 32)
#define FLOATS_128(c, i) FLOATS_64(c, i), FLOATS_64(c, i + 64)
#define LIST_4 "%0, %1, %2, %3"
#define LIST_8 LIST_4 ", " "%4, %5, %6, %7"
#define LIST_16 LIST_8 ", " "%8, %9, %10, %11, %12, %13, %14, %15"
#define LIST_32 LIST_16 ", " "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST_64 LIST_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LIST_128 LIST_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95, " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"

#define WGMMA(N, LIST, FLOATS, TYPES, N_MAJOR, A0, A1, A2, A3, B, ACCUMULATE) \
    asm volatile( \
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " ACCUMULATE ", 0;\n\t" \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" LIST "}, {" A0 ", " A1 ", " A2 ", " A3 "}, " B \
        ", p, 1, 1, " #N_MAJOR ";\n\t}" \
        : FLOATS(c, 0) \
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate))
#define WGMMA_TYPES(NAME, N, COUNT, LIST, FLOATS, ...) \
    __device__ inline void NAME( \
        float (&c)[COUNT], const unsigned* a, unsigned long long b, int accumulate, __half) { \
        WGMMA(N, LIST, FLOATS, "f16.f16", __VA_ARGS__); \
    } \
    __device__ inline void NAME( \
        float (&c)[COUNT], const unsigned* a, unsigned long long b, int accumulate, __nv_bfloat16) { \
        WGMMA(N, LIST, FLOATS, "bf16.bf16", __VA_ARGS__); \
    }

WGMMA_TYPES(wgmma_registers, 8, 4, LIST_4, FLOATS_4, 0, "%4", "%5", "%6", "%7", "%8", "%9")
WGMMA_TYPES(wgmma_registers, 16, 8, LIST_8, FLOATS_8, 0, "%8", "%9", "%10", "%11", "%12", "%13")
WGMMA_TYPES(wgmma_registers, 32, 16, LIST_16, FLOATS_16, 0, "%16", "%17", "%18", "%19", "%20", "%21")
WGMMA_TYPES(wgmma_registers, 64, 32, LIST_32, FLOATS_32, 0, "%32", "%33", "%34", "%35", "%36", "%37")
WGMMA_TYPES(wgmma_registers, 128, 64, LIST_64, FLOATS_64, 0, "%64", "%65", "%66", "%67", "%68", "%69")
WGMMA_TYPES(wgmma_registers, 256, 128, LIST_128, FLOATS_128, 0, "%128", "%129", "%130", "%131", "%132", "%133")
WGMMA_TYPES(wgmma_registers_n_major, 64, 32, LIST_32, FLOATS_32, 1, "%32", "%33", "%34", "%35", "%36", "%37")

#undef FLOATS_4
#undef LIST_4
#undef FLOATS_8
#undef LIST_8
#undef FLOATS_16
#undef LIST_16
#undef FLOATS_32
#undef LIST_32
#undef FLOATS_64
#undef LIST_64
#undef FLOATS_128
#undef LIST_128
#undef WGMMA
#undef WGMMA_TYPES
