// Switching between fibers, and what they do when they wait or fail.

#include "fibers.h"

namespace cuda_emulator {

Machine machine;

#if defined(__x86_64__)
extern "C" void cuda_emulator_switch(void** save, void* load);
asm(R"(
    .text
    .hidden cuda_emulator_switch
    .globl cuda_emulator_switch
    .type cuda_emulator_switch, @function
cuda_emulator_switch:
    pushq %rbp
    pushq %rbx
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbx
    popq %rbp
    ret
    .size cuda_emulator_switch, .-cuda_emulator_switch
)");
void to_thread(Thread& thread) { cuda_emulator_switch(&machine.scheduler, thread.stack_pointer); }
void to_scheduler() { cuda_emulator_switch(&machine.current->stack_pointer, machine.scheduler); }
#else
void to_thread(Thread& thread) { swapcontext(&machine.scheduler, &thread.context); }
void to_scheduler() { swapcontext(&machine.current->context, &machine.scheduler); }
#endif

void fail(const char* format, ...) {
    const Thread& me = *machine.current;
    int used = snprintf(machine.message, sizeof machine.message, "block (%u, %u, %u), thread (%u, %u, %u): ", blockIdx.x,
                        blockIdx.y, blockIdx.z, me.index.x, me.index.y, me.index.z);
    va_list values;
    va_start(values, format);
    vsnprintf(machine.message + used, sizeof machine.message - used, format, values);
    va_end(values);
    machine.failed = true;
    to_scheduler();
    __builtin_unreachable();
}

// What a GPU refuses and x86 does not: a load or store at an address that is not a multiple of its size. g++ calls this
// with -fsanitize=alignment; the layout of `Site` is part of that interface.
struct Site {
    const char* file;
    unsigned line, column;
    const void* type;
    unsigned char log_alignment, kind;
};

extern "C" void __ubsan_handle_type_mismatch_v1(const Site* site, size_t address) {
    fail("%s:%u: address %#zx is not a multiple of %u bytes", site->file, site->line, address, 1u << site->log_alignment);
}

void run_kernel() {
    machine.kernel(machine.arguments);
    machine.current->state = DONE;
    to_scheduler();
    __builtin_unreachable();
}

int barrier(const char* file, int line, int number, int count, Vote vote, int value) {
    Thread& me = *machine.current;
    me.state = AT_BARRIER;
    me.file = file, me.line = line, me.barrier = number, me.barrier_count = count;
    me.vote = vote, me.vote_result = value;
    to_scheduler();
    return me.vote_result;
}

unsigned arrive(const char* name, unsigned mask, void* data) {
    Thread& me = *machine.current;
    Warp& warp = *me.warp;
    if (!(mask >> me.lane & 1)) fail("%s: lane %u is not in its own mask %#x", name, me.lane, mask);
    me.request = {name, mask, data};
    warp.waiting |= 1u << me.lane;
    const unsigned needed = mask & warp.lanes;
    bool complete = (warp.waiting & needed) == needed;
    for (unsigned lane = 0; complete && lane < LANES; ++lane)
        if (needed >> lane & 1) {
            const Request& other = warp.threads[lane].request;
            complete = other.mask == mask && strcmp(other.name, name) == 0;
        }
    if (complete) return needed;
    me.state = IN_WARP;
    to_scheduler();
    return 0;
}

void release(Warp& warp, unsigned lanes) {
    warp.waiting &= ~lanes;
    for (unsigned lane = 0; lane < LANES; ++lane)
        if (lanes >> lane & 1) warp.threads[lane].state = READY;
}

}  // namespace cuda_emulator
