// Runs a grid, block by block.

#include "launch.h"

namespace cuda_emulator {

void run_grid() {
    unsigned number = 0;
    for (unsigned z = 0; z < gridDim.z; ++z)
        for (unsigned y = 0; y < gridDim.y; ++y)
            for (unsigned x = 0; x < gridDim.x; ++x) {
                blockIdx = make_uint3(x, y, z);
                start_block(number++);
                run_block();
                if (!machine.failed) check_overrun();
                if (machine.failed) return;
            }
}

const char* launch(void (*kernel)(void**), void** arguments, const unsigned* pointers, size_t pointer_count,
                   Storage* storages, size_t storage_count, const unsigned* grid, const unsigned* block,
                   unsigned shared) {
    gridDim = dim3(grid[0], grid[1], grid[2]);
    blockDim = dim3(block[0], block[1], block[2]);
    machine.kernel = kernel, machine.arguments = arguments, machine.failed = false;
    machine.storages = storages, machine.storage_count = storage_count;
    if (shared > MAX_SHARED) return "more shared memory than any GPU has";
    if (blockDim.x * blockDim.y * blockDim.z > 1024) return "more than 1024 threads in a block";
    if (!prepare_stacks(blockDim.x * blockDim.y * blockDim.z)) {
        return_stacks();
        return "the system has no room for the threads' stacks";
    }
    prepare_shared(shared);
    find_fixed_shared();
    guard_storages(pointers, pointer_count);

    static unsigned char handler_stack[1 << 16];
    stack_t own{}, stack_before;
    own.ss_sp = handler_stack, own.ss_size = sizeof handler_stack;
    struct sigaction action {}, segv_before, bus_before;
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    sigaltstack(&own, &stack_before);
    sigaction(SIGSEGV, &action, &segv_before);
    sigaction(SIGBUS, &action, &bus_before);
    run_grid();
    sigaction(SIGSEGV, &segv_before, nullptr);
    sigaction(SIGBUS, &bus_before, nullptr);
    sigaltstack(&stack_before, nullptr);
    return_stacks();
    return_storages();
    return machine.failed ? machine.message : nullptr;
}

}  // namespace cuda_emulator
