// wgmma products of two matrices in shared memory, for sm_90a: tiles of any width that is a multiple of 32 columns.
//
// c [64 x N, float32] = a [64 x 16] b [16 x N] + (accumulate ? c : 0), started by the 128 threads of a warpgroup. a and b
// are descriptors (hopper_ptx.cuh) of matrices whose rows lie along K: a's 64 rows, and b's N columns as rows. Of
// wgmma_shared_n_major, b's rows lie along N. With g = lane / 4 and t = lane % 4, c[4 j + 2 half + e] of a thread of warp w
// is column 8 j + 2 t + e of row 16 w + g + 8 half.

#pragma once

#include "hopper_ptx.cuh"

#define FLOATS_16(c, i) \
    "+f"(c[i]), "+f"(c[i + 1]), "+f"(c[i + 2]), "+f"(c[i + 3]), "+f"(c[i + 4]), "+f"(c[i + 5]), "+f"(c[i + 6]), \
    "+f"(c[i + 7]), "+f"(c[i + 8]), "+f"(c[i + 9]), "+f"(c[i + 10]), "+f"(c[i + 11]), "+f"(c[i + 12]), \
    "+f"(c[i + 13]), "+f"(c[i + 14]), "+f"(c[i + 15])
#define FLOATS_32(c) FLOATS_16(c, 0), FLOATS_16(c, 16)
#define FLOATS_48(c) FLOATS_32(c), FLOATS_16(c, 32)
#define FLOATS_64(c) FLOATS_48(c), FLOATS_16(c, 48)
#define FLOATS_80(c) FLOATS_64(c), FLOATS_16(c, 64)
#define FLOATS_96(c) FLOATS_80(c), FLOATS_16(c, 80)
#define FLOATS_112(c) FLOATS_96(c), FLOATS_16(c, 96)
#define LIST_32 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define LIST_48 LIST_32 ", " \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47"
#define LIST_64 LIST_48 ", " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define LIST_80 LIST_64 ", " \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79"
#define LIST_96 LIST_80 ", " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define LIST_112 LIST_96 ", " \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111"

// SUMS: N / 2, a thread's sums. A, B, ACCUMULATE: the operands behind them.
#define WGMMA_SHARED(N, SUMS, TYPES, N_MAJOR, A, B, ACCUMULATE) \
    asm volatile( \
        "{\n\t.reg .pred p;\n\tsetp.ne.b32 p, " ACCUMULATE ", 0;\n\t" \
        "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPES " {" LIST_##SUMS "}, " A ", " B \
        ", p, 1, 1, 0, " #N_MAJOR ";\n\t}" \
        : FLOATS_##SUMS(c) \
        : "l"(a), "l"(b), "r"(accumulate))
#define WGMMA_SHARED_TYPES(NAME, N, SUMS, ...) \
    __device__ inline void NAME( \
        float (&c)[SUMS], unsigned long long a, unsigned long long b, int accumulate, __half) { \
        WGMMA_SHARED(N, SUMS, "f16.f16", __VA_ARGS__); \
    } \
    __device__ inline void NAME( \
        float (&c)[SUMS], unsigned long long a, unsigned long long b, int accumulate, __nv_bfloat16) { \
        WGMMA_SHARED(N, SUMS, "bf16.bf16", __VA_ARGS__); \
    }

WGMMA_SHARED_TYPES(wgmma_shared, 64, 32, 0, "%32", "%33", "%34")
WGMMA_SHARED_TYPES(wgmma_shared, 96, 48, 0, "%48", "%49", "%50")
WGMMA_SHARED_TYPES(wgmma_shared, 160, 80, 0, "%80", "%81", "%82")
WGMMA_SHARED_TYPES(wgmma_shared, 192, 96, 0, "%96", "%97", "%98")
WGMMA_SHARED_TYPES(wgmma_shared, 224, 112, 0, "%112", "%113", "%114")
WGMMA_SHARED_TYPES(wgmma_shared_n_major, 64, 32, 1, "%32", "%33", "%34")

#undef FLOATS_16
#undef FLOATS_32
#undef FLOATS_48
#undef FLOATS_64
#undef FLOATS_80
#undef FLOATS_96
#undef FLOATS_112
#undef LIST_32
#undef LIST_48
#undef LIST_64
#undef LIST_80
#undef LIST_96
#undef LIST_112
#undef WGMMA_SHARED
#undef WGMMA_SHARED_TYPES
