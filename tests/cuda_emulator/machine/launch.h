// The entry point of a compiled kernel.

#pragma once

#include "fibers.h"

namespace cuda_emulator {

// Runs a grid. `pointers`: which of the arguments are pointers. Returns an error message, or null.
const char* launch(void (*kernel)(void**), void** arguments, const unsigned* pointers, size_t pointer_count,
                   Storage* storages, size_t storage_count, const unsigned* grid, const unsigned* block,
                   unsigned shared);

template <auto KERNEL>
struct Entry;
template <typename... Parameters, void (*KERNEL)(Parameters...)>
struct Entry<KERNEL> {
    template <size_t... I>
    static void call(void** arguments, std::index_sequence<I...>) {
        KERNEL(*static_cast<Parameters*>(arguments[I])...);
    }
    static void run(void** arguments) { call(arguments, std::index_sequence_for<Parameters...>()); }
    static unsigned sizes(unsigned* size) {
        ((*size++ = sizeof(Parameters)), ...);
        return sizeof...(Parameters);
    }
};

}  // namespace cuda_emulator
