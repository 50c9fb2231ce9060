// Instructions of a warpgroup: products, setmaxnreg; and stmatrix.

#pragma once

#include "fibers.h"

namespace cuda_emulator {

// c[4 j + 2 half + e] of a thread is column 8 j + 2 t + e of row 16 w + g + 8 half, for lane 4 g + t of warp w.
void start_product(const WarpgroupProduct& product);
void commit_products();

// Products happen as late as they may, at the wait.
void wait_products(size_t pending);

// A block starts with as many registers as its threads can all have; setmaxnreg moves them between warpgroups, and waits
// for ever where there are not enough.
void set_registers(unsigned count);

void store_matrices_transposed(unsigned address, const unsigned (&values)[4]);

}  // namespace cuda_emulator
