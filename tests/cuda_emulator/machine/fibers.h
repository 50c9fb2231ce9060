// The threads of a block as fibers: their state, switching between them, and what they wait for.

#pragma once

#include "language.h"

namespace cuda_emulator {

constexpr int LANES = 32;
constexpr size_t STACK = 256 << 10, PAGE = 4096, MOST_SHARED = 256 << 10;
constexpr unsigned SHARED_START = 1024;  // address of the first byte of shared memory, as on recent GPUs
constexpr unsigned char POISON = 0xff;   // NaN in float16, bfloat16 and float32

enum State { READY, AT_BARRIER, IN_WARP, DONE };
enum Vote { NO_VOTE, ANY_VOTE, ALL_VOTE, COUNT_VOTE };

// What a lane brings to an instruction of the whole warp.
struct Request {
    const char* name;
    unsigned mask;
    void* data;
};

struct Copy {  // a 16-byte (or shorter) asynchronous copy; `source` null: zeros
    unsigned char* target;
    const void* source;
    unsigned size;
};

struct Warp;

struct Thread {
#if defined(__x86_64__)
    void* stack_pointer;
#else
    ucontext_t context;
#endif
    State state;
    unsigned lane;
    uint3 index;
    Warp* warp;
    Request request;
    const char* file;  // where it waits at a barrier
    int line, barrier, barrier_count;
    int vote, vote_result;
    std::vector<Copy> copies;       // issued, not yet performed
    std::vector<size_t> group_ends;  // of committed groups: ends in `copies`
};

struct Warp {
    Thread* threads;
    unsigned lanes, waiting;  // masks: those that exist, those that wait for the others
    bool eager;               // its asynchronous copies happen when they are issued, not when they are waited for
};

// A tensor's storage, and the copy of it that the kernel sees: it ends at a page that may not be touched.
struct Storage {
    unsigned char* data;
    size_t size;
    unsigned char *region, *copy;
    size_t region_size() const { return (size + 15) / PAGE * PAGE + 3 * PAGE; }
};

struct Machine {
    std::vector<Thread> threads;
    std::vector<Warp> warps;
    unsigned char* stacks = nullptr;
    size_t stack_count = 0;
    unsigned char *region = nullptr, *dynamic = nullptr;  // dynamic shared memory, between pages that may not be touched
    unsigned char* fixed = nullptr;                       // static shared memory
    size_t dynamic_size = 0, fixed_size = 0;
    Thread* current = nullptr;
#if defined(__x86_64__)
    void* scheduler = nullptr;
#else
    ucontext_t scheduler;
#endif
    void (*kernel)(void**) = nullptr;
    void** arguments = nullptr;
    Storage* storages = nullptr;
    size_t storage_count = 0;
    bool failed = false, reversed = false;
    char message[4096];
};

inline Machine machine;

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
inline void to_thread(Thread& thread) { cuda_emulator_switch(&machine.scheduler, thread.stack_pointer); }
inline void to_scheduler() { cuda_emulator_switch(&machine.current->stack_pointer, machine.scheduler); }
#else
inline void to_thread(Thread& thread) { swapcontext(&machine.scheduler, &thread.context); }
inline void to_scheduler() { swapcontext(&machine.current->context, &machine.scheduler); }
#endif

// Ends the launch with an error: the scheduler takes over, and the fibers are never resumed.
[[noreturn]] __attribute__((format(printf, 1, 2))) inline void fail(const char* format, ...) {
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

extern "C" __attribute__((used)) inline void __ubsan_handle_type_mismatch_v1(const Site* site, size_t address) {
    fail("%s:%u: address %#zx is not a multiple of %u bytes", site->file, site->line, address, 1u << site->log_alignment);
}

inline void run_kernel() {
    machine.kernel(machine.arguments);
    machine.current->state = DONE;
    to_scheduler();
    __builtin_unreachable();
}

// Blocks until all threads of the barrier are there.
inline int barrier(const char* file, int line, int number, int count, Vote vote = NO_VOTE, int value = 0) {
    Thread& me = *machine.current;
    me.state = AT_BARRIER;
    me.file = file, me.line = line, me.barrier = number, me.barrier_count = count;
    me.vote = vote, me.vote_result = value;
    to_scheduler();
    return me.vote_result;
}

// Blocks until all lanes of `mask` are here with a request of the same name; the last one serves them all:
// serve(warp, mask) reads and writes what their requests point at.
template <typename Serve>
inline void collective(const char* name, unsigned mask, void* data, Serve serve) {
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
    if (!complete) {
        me.state = IN_WARP;
        to_scheduler();
        return;
    }
    serve(warp, needed);
    warp.waiting &= ~needed;
    for (unsigned lane = 0; lane < LANES; ++lane)
        if (needed >> lane & 1) warp.threads[lane].state = READY;
}

template <typename T>
inline T& data_of(Warp& warp, unsigned lane) {
    return *static_cast<T*>(warp.threads[lane].request.data);
}

}  // namespace cuda_emulator
