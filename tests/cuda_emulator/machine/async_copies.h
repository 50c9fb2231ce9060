// Asynchronous copies (cp.async) from global to shared memory.

#pragma once

#include "shared_memory.h"

namespace cuda_emulator {

void copy_async(unsigned address, const void* source, unsigned size, bool inside);
void commit_copies();
void wait_copies(size_t pending);

}  // namespace cuda_emulator
