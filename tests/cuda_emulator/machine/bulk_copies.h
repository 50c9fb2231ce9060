// mbarriers, and the copies of the copy engine (TMA) that count toward them.
//
// An mbarrier is 8 bytes of shared memory, here: arrivals of a phase, those still expected, bytes still expected, parity.
// Copies happen as late as they may, when no thread can go on; those of every second warp as early as they may.

#pragma once

#include "shared_memory.h"

namespace cuda_emulator {

void initialize_mbarrier(unsigned address, unsigned arrivals);
void arrive_at_mbarrier(unsigned address, int bytes, const char* what);
void wait_for_mbarrier(unsigned address, unsigned parity);

// Lets the threads go on whose phases have ended. Returns whether there was one.
bool release_mbarriers();

// The 128-byte swizzle: 16-byte chunk c of a 128-byte row r goes to chunk c ^ (r % 8), by the address's own bits.
inline unsigned swizzled_address(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

void start_bulk_copy(const BulkCopy& copy);

// Performs the copies under way. Returns whether there was one.
bool perform_bulk_copies();

}  // namespace cuda_emulator
