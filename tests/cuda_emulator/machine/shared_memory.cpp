// Shared memory: its addresses, where it lies, and whether a block wrote outside of it.

#include "shared_memory.h"

namespace cuda_emulator {

unsigned shared_address_of(const void* pointer) {
    const auto* byte = static_cast<const unsigned char*>(pointer);
    if (byte >= machine.dynamic && byte <= machine.dynamic + machine.dynamic_size)
        return SHARED_START + static_cast<unsigned>(byte - machine.dynamic);
    if (byte >= machine.fixed && byte < machine.fixed + machine.fixed_size)
        return SHARED_START + MAX_SHARED + static_cast<unsigned>(byte - machine.fixed);
    fail("%p is not an address of shared memory", pointer);
}

unsigned char* shared_bytes(unsigned address, unsigned size, const char* what) {
    if (address % size) fail("%s: shared address %u is not a multiple of %u", what, address, size);
    const unsigned offset = address - SHARED_START, fixed = offset - static_cast<unsigned>(MAX_SHARED);
    if (offset + static_cast<size_t>(size) <= machine.dynamic_size) return machine.dynamic + offset;
    if (fixed + static_cast<size_t>(size) <= machine.fixed_size) return machine.fixed + fixed;
    fail("%s: byte %d of shared memory, of which the block has %zu", what, static_cast<int>(offset),
         machine.dynamic_size);
}

// Dynamic shared memory ends at a page that may not be touched, as closely as its alignment allows.
void prepare_shared(size_t size) {
    if (machine.region == nullptr) {
        machine.region = static_cast<unsigned char*>(mmap(nullptr, MAX_SHARED + 2 * PAGE, PROT_READ | PROT_WRITE,
                                                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        mprotect(machine.region, PAGE, PROT_NONE);
        mprotect(machine.region + PAGE + MAX_SHARED, PAGE, PROT_NONE);
    }
    machine.dynamic_size = size;
    machine.dynamic = machine.region + PAGE + (MAX_SHARED - size) / 1024 * 1024;
}

// Where this library's thread-local storage lies: its static shared memory.
void find_fixed_shared() {
    static const char anchor = 0;
    machine.fixed = nullptr, machine.fixed_size = 0;
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void*) {
            bool mine = false;
            for (int i = 0; i < info->dlpi_phnum; ++i) {
                const auto& part = info->dlpi_phdr[i];
                const auto start = info->dlpi_addr + part.p_vaddr, here = reinterpret_cast<uintptr_t>(&anchor);
                mine = mine || (part.p_type == PT_LOAD && here >= start && here < start + part.p_memsz);
            }
            for (int i = 0; mine && i < info->dlpi_phnum; ++i)
                if (info->dlpi_phdr[i].p_type == PT_TLS) {
                    machine.fixed = static_cast<unsigned char*>(info->dlpi_tls_data);
                    machine.fixed_size = info->dlpi_phdr[i].p_memsz;
                }
            return static_cast<int>(mine);
        },
        nullptr);
}

// Whether the bytes of the shared region outside of what the block has are as they were.
void check_overrun() {
    const unsigned char* end = machine.dynamic + machine.dynamic_size;
    for (const unsigned char* byte = machine.region + PAGE; byte < machine.region + PAGE + MAX_SHARED; ++byte) {
        if (byte >= machine.dynamic && byte < end) byte = end;
        if (byte < machine.region + PAGE + MAX_SHARED && *byte != POISON) {
            snprintf(machine.message, sizeof machine.message,
                     "block (%u, %u, %u) wrote byte %td of shared memory, of which it has %zu", blockIdx.x, blockIdx.y,
                     blockIdx.z, byte - machine.dynamic, machine.dynamic_size);
            machine.failed = true;
            return;
        }
    }
}

}  // namespace cuda_emulator
