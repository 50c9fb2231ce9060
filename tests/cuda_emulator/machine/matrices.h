// Matrix instructions: ldmatrix and mma.

#pragma once

#include "fibers.h"

namespace cuda_emulator {

// Lane l passes the address of row l % 8 of matrix l / 8. Of matrix i it receives, in result[i], elements 2 (l % 4) and
// 2 (l % 4) + 1 of row l / 4; transposed, of column l / 4.
template <bool TRANSPOSED>
void load_matrices(const char* name, unsigned (&result)[4], unsigned address);

// Lane l = 4 g + p has of a: rows g and g + 8, columns 2 p, 2 p + 1 and the same + 8; of b: column g, rows 2 p, 2 p + 1
// and the same + 8; of c: rows g and g + 8, columns 2 p, 2 p + 1.
template <typename T>
void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1);

}  // namespace cuda_emulator
