// Addresses of shared memory.

#pragma once

#include "fibers.h"

namespace cuda_emulator {

inline unsigned char* dynamic_shared() { return machine.dynamic; }
unsigned shared_address_of(const void* pointer);

// The bytes at an address of shared memory; an error where they are outside or not aligned to their size.
unsigned char* shared_bytes(unsigned address, unsigned size, const char* what);

}  // namespace cuda_emulator
