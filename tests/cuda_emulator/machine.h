// A GPU's thread block on a CPU: the names that CUDA C++ has and C++ has not, for kernels compiled by g++.
//
// The blocks of a grid run one after the other. The threads of a block are fibers: each has a stack of its own and runs
// until it meets the others, at __syncthreads() or at an instruction of the whole warp (a shuffle, a matrix product).
// One fiber runs at a time. A warp runs as far as it can before the next one starts, and every barrier reverses the
// order of warps and lanes: what one warp writes and another reads without a barrier between is wrong in one of the two
// orders. Shared memory holds NaN when a block starts.
//
// The headers have what is compiled into a kernel. machine.cpp has the rest, compiled once and linked to every kernel.

#pragma once

#include "machine/arithmetic.h"
#include "machine/async_copies.h"
#include "machine/bulk_copies.h"
#include "machine/launch.h"
#include "machine/matrices.h"
#include "machine/memory_access.h"
#include "machine/warp.h"
#include "machine/warpgroup.h"
