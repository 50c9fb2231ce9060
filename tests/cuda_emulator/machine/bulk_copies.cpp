// mbarriers and bulk copies: their states.

#include "bulk_copies.h"

namespace cuda_emulator {

struct Mbarrier {
    uint16_t arrivals, pending;
    int32_t bytes_and_parity;  // 2 * bytes + parity
};

void initialize_mbarrier(unsigned address, unsigned arrivals) {
    const Mbarrier made{static_cast<uint16_t>(arrivals), static_cast<uint16_t>(arrivals), 0};
    memcpy(shared_bytes(address, 8, "mbarrier.init"), &made, 8);
}

Mbarrier& mbarrier_at(unsigned address, const char* what) {
    auto& found = *reinterpret_cast<Mbarrier*>(shared_bytes(address, 8, what));
    if (found.arrivals == 0xffff) fail("%s: the mbarrier at byte %u is not initialized", what, address - SHARED_START);
    return found;
}

void end_phase_if_complete(Mbarrier& barrier) {
    if (barrier.pending || barrier.bytes_and_parity >> 1) return;
    barrier.pending = barrier.arrivals, barrier.bytes_and_parity ^= 1;
}

void arrive_at_mbarrier(unsigned address, int bytes, const char* what) {
    Mbarrier& barrier = mbarrier_at(address, what);
    if (barrier.pending == 0) fail("%s: more arrivals than the mbarrier at byte %u expects", what, address - SHARED_START);
    barrier.bytes_and_parity += 2 * bytes;
    --barrier.pending;
    end_phase_if_complete(barrier);
}

// A wait for the end of a phase returns when the current phase has the other parity.
void wait_for_mbarrier(unsigned address, unsigned parity) {
    Thread& me = *machine.current;
    if ((mbarrier_at(address, "mbarrier.try_wait").bytes_and_parity & 1) != static_cast<int>(parity)) return;
    me.state = AT_MBARRIER, me.mbarrier = address, me.parity = parity;
    to_scheduler();
}

bool release_mbarriers() {
    bool any = false;
    for (Thread& thread : machine.threads)
        if (thread.state == AT_MBARRIER) {
            machine.current = &thread;
            if ((mbarrier_at(thread.mbarrier, "wait").bytes_and_parity & 1) == static_cast<int>(thread.parity)) continue;
            thread.state = READY, any = true;
        }
    return any;
}

void perform_bulk(const BulkCopy& copy) {
    for (unsigned row = 0; row < copy.rows; ++row)
        for (unsigned byte = 0; byte < copy.bytes; ++byte) {
            const unsigned at = copy.target + row * copy.bytes + byte;
            const bool inside = row < copy.valid_rows && byte < copy.valid_bytes;
            *shared_bytes(copy.swizzled ? swizzled_address(at) : at, 1, "copy") =
                inside ? copy.source[row * copy.stride + byte] : 0;
        }
    Mbarrier& barrier = mbarrier_at(copy.mbarrier, "complete_tx");
    barrier.bytes_and_parity -= 2 * static_cast<int>(copy.rows * copy.bytes);
    end_phase_if_complete(barrier);
}

void start_bulk_copy(const BulkCopy& copy) {
    mbarrier_at(copy.mbarrier, "copy");
    if (machine.current->warp->eager)
        perform_bulk(copy);
    else
        machine.bulk_copies.push_back(copy);
}

bool perform_bulk_copies() {
    if (machine.bulk_copies.empty()) return false;
    std::vector<BulkCopy> copies;
    copies.swap(machine.bulk_copies);
    for (const BulkCopy& copy : copies) perform_bulk(copy);
    return true;
}

}  // namespace cuda_emulator
