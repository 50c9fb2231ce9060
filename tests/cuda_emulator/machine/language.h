// The words of CUDA C++ that C++ has not: what kernels are declared with, and the indices of a thread.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <link.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <vector_functions.h>

#include <algorithm>
#include <utility>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
// Inside a function, thread_local implies static. Nothing else in the library is thread-local, so that its block of
// thread-local storage is the block's static shared memory. Dynamic shared memory is declared by DYNAMIC_SHARED, which
// the loader writes in place of `extern __shared__`.
#define __shared__ thread_local
#define DYNAMIC_SHARED(type, name) type* const name = reinterpret_cast<type*>(cuda_emulator::dynamic_shared())

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
constexpr int warpSize = 32;
