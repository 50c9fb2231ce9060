// Global memory. Kernels see copies of the tensors' storages between pages that may not be touched.

#include "fibers.h"

namespace cuda_emulator {

void guard_storages(const unsigned* pointers, size_t pointer_count) {
    for (size_t i = 0; i < machine.storage_count; ++i) {
        Storage& one = machine.storages[i];
        const size_t all = one.region_size();
        one.region = static_cast<unsigned char*>(
            mmap(nullptr, all, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        mprotect(one.region, PAGE, PROT_NONE);
        mprotect(one.region + all - PAGE, PAGE, PROT_NONE);
        one.copy = one.region + all - PAGE - (one.size + 15) / 16 * 16;  // tensors begin at multiples of 16 bytes
        memset(one.region + PAGE, POISON, all - 2 * PAGE);
        memcpy(one.copy, one.data, one.size);
    }
    for (size_t i = 0; i < pointer_count; ++i) {
        auto& pointer = *static_cast<unsigned char**>(machine.arguments[pointers[i]]);
        for (size_t j = 0; j < machine.storage_count; ++j) {
            const Storage& one = machine.storages[j];
            if (pointer >= one.data && pointer < one.data + std::max<size_t>(one.size, 1)) {
                pointer = one.copy + (pointer - one.data);
                break;
            }
        }
    }
}

void return_storages() {
    for (size_t i = 0; i < machine.storage_count; ++i) {
        Storage& one = machine.storages[i];
        const unsigned char *start = one.region + PAGE, *end = one.region + one.region_size() - PAGE;
        for (const unsigned char* byte = start; byte < end; ++byte) {
            if (byte == one.copy) byte += one.size;
            if (byte < end && *byte != POISON && !machine.failed) {
                snprintf(machine.message, sizeof machine.message, "wrote byte %td of a tensor's storage of %zu bytes",
                         byte - one.copy, one.size);
                machine.failed = true;
            }
        }
        memcpy(one.data, one.copy, one.size);
        munmap(one.region, one.region_size());
    }
}

// A thread touched memory that it may not: says which, and ends the launch.
void on_fault(int, siginfo_t* info, void*) {
    const auto* address = static_cast<unsigned char*>(info->si_addr);
    for (size_t i = 0; i < machine.storage_count; ++i) {
        const Storage& one = machine.storages[i];
        if (address >= one.region && address < one.region + one.region_size())
            fail("accesses byte %td of a tensor's storage of %zu bytes", address - one.copy, one.size);
    }
    if (address >= machine.region && address < machine.region + MAX_SHARED + 2 * PAGE)
        fail("accesses byte %td of shared memory, of which the block has %zu", address - machine.dynamic,
             machine.dynamic_size);
    if (address >= machine.stacks && address < machine.stacks + machine.stack_count * (STACK + PAGE))
        fail("overflows its stack of %zu bytes", STACK);
    fail("accesses memory at %p, which is no tensor's", static_cast<const void*>(address));
}

}  // namespace cuda_emulator
