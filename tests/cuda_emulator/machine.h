// A GPU's thread block on a CPU: the names that CUDA C++ has and C++ has not, for kernels compiled by g++.
//
// The blocks of a grid run one after the other. The threads of a block are fibers: each has a stack of its own and runs
// until it meets the others, at __syncthreads() or at an instruction of the whole warp (a shuffle, a matrix product).
// One fiber runs at a time. A warp runs as far as it can before the next one starts, and every barrier reverses the
// order of warps and lanes: what one warp writes and another reads without a barrier between is wrong in one of the two
// orders. Shared memory holds NaN when a block starts.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <link.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <vector_functions.h>

#include <algorithm>
#include <utility>
#include <vector>

#if !defined(__x86_64__)
#include <ucontext.h>
#endif

#undef __global__
#undef __device__
#undef __host__
#undef __shared__
#undef __constant__
#undef __launch_bounds__
#undef __grid_constant__
#define __global__
#define __device__
#define __host__
#define __constant__
#define __grid_constant__
#define __launch_bounds__(...)
// Inside a function, thread_local implies static. Nothing else in the library is thread-local, so that its block of
// thread-local storage is the block's static shared memory. Dynamic shared memory is declared by DYNAMIC_SHARED, which
// the loader writes in place of `extern __shared__`.
#define __shared__ thread_local
#define DYNAMIC_SHARED(type, name) type* const name = reinterpret_cast<type*>(cuda_emulator::dynamic_shared())

inline uint3 threadIdx, blockIdx;
inline dim3 blockDim, gridDim;
constexpr int warpSize = 32;

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

inline unsigned char* dynamic_shared() { return machine.dynamic; }

inline unsigned shared_address_of(const void* pointer) {
    const auto* byte = static_cast<const unsigned char*>(pointer);
    if (byte >= machine.dynamic && byte <= machine.dynamic + machine.dynamic_size)
        return SHARED_START + static_cast<unsigned>(byte - machine.dynamic);
    if (byte >= machine.fixed && byte < machine.fixed + machine.fixed_size)
        return SHARED_START + MOST_SHARED + static_cast<unsigned>(byte - machine.fixed);
    fail("%p is not an address of shared memory", pointer);
}

// The bytes at an address of shared memory; an error where they are outside or not aligned to their size.
inline unsigned char* shared_bytes(unsigned address, unsigned size, const char* what) {
    if (address % size) fail("%s: shared address %u is not a multiple of %u", what, address, size);
    const unsigned offset = address - SHARED_START, fixed = offset - static_cast<unsigned>(MOST_SHARED);
    if (offset + static_cast<size_t>(size) <= machine.dynamic_size) return machine.dynamic + offset;
    if (fixed + static_cast<size_t>(size) <= machine.fixed_size) return machine.fixed + fixed;
    fail("%s: byte %d of shared memory, of which the block has %zu", what, static_cast<int>(offset),
         machine.dynamic_size);
}

// Asynchronous copies happen as late as they may, at the wait; those of every second warp as early as they may.
inline void perform(const Copy& copy) {
    if (copy.source == nullptr)
        memset(copy.target, 0, copy.size);
    else
        memcpy(copy.target, copy.source, copy.size);
}

inline void copy_async(unsigned address, const void* source, unsigned size, bool inside) {
    Thread& me = *machine.current;
    if (inside && reinterpret_cast<uintptr_t>(source) % size)
        fail("cp.async: the global address %p is not a multiple of %u", source, size);
    const Copy copy{shared_bytes(address, size, "cp.async"), inside ? source : nullptr, size};
    if (me.warp->eager)
        perform(copy);
    else
        me.copies.push_back(copy);
}

inline void commit_copies() {
    Thread& me = *machine.current;
    me.group_ends.push_back(me.copies.size());
}

inline void wait_copies(size_t pending) {
    Thread& me = *machine.current;
    if (me.group_ends.size() <= pending) return;
    const size_t groups = me.group_ends.size() - pending, end = me.group_ends[groups - 1];
    for (size_t i = 0; i < end; ++i) perform(me.copies[i]);
    me.copies.erase(me.copies.begin(), me.copies.begin() + end);
    me.group_ends.erase(me.group_ends.begin(), me.group_ends.begin() + groups);
    for (size_t& rest : me.group_ends) rest -= end;
}

// Stacks last for one launch: every guard page divides a mapping, a process has 65,530 of them, and it may hold a
// hundred compiled kernels. Returns false if there is no room.
inline bool prepare_stacks(size_t count) {
    const size_t each = STACK + PAGE;
    void* found = mmap(nullptr, count * each, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return false;
    machine.stacks = static_cast<unsigned char*>(found), machine.stack_count = count;
    for (size_t i = 0; i < count; ++i)  // overflows are caught
        if (mprotect(machine.stacks + i * each, PAGE, PROT_NONE) != 0) return false;
    return true;
}

inline void return_stacks() {
    munmap(machine.stacks, machine.stack_count * (STACK + PAGE));
    machine.stacks = nullptr, machine.stack_count = 0;
}

// Dynamic shared memory ends at a page that may not be touched, as closely as its alignment allows.
inline void prepare_shared(size_t size) {
    if (machine.region == nullptr) {
        machine.region = static_cast<unsigned char*>(mmap(nullptr, MOST_SHARED + 2 * PAGE, PROT_READ | PROT_WRITE,
                                                          MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
        mprotect(machine.region, PAGE, PROT_NONE);
        mprotect(machine.region + PAGE + MOST_SHARED, PAGE, PROT_NONE);
    }
    machine.dynamic_size = size;
    machine.dynamic = machine.region + PAGE + (MOST_SHARED - size) / 1024 * 1024;
}

// Where this library's thread-local storage lies: its static shared memory.
inline void find_fixed_shared() {
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

inline void start_block(unsigned number) {
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    memset(machine.region + PAGE, POISON, MOST_SHARED);
    if (machine.fixed != nullptr) memset(machine.fixed, POISON, machine.fixed_size);
    machine.threads.resize(threads);
    machine.warps.resize((threads + LANES - 1) / LANES);
    for (unsigned i = 0; i < threads; ++i) {
        Thread& thread = machine.threads[i];
        Warp& warp = machine.warps[i / LANES];
        thread.state = READY;
        thread.lane = i % LANES;
        thread.index = make_uint3(i % blockDim.x, i / blockDim.x % blockDim.y, i / blockDim.x / blockDim.y);
        thread.warp = &warp;
        thread.copies.clear(), thread.group_ends.clear();
        if (thread.lane == 0) warp = {&thread, 0, 0, (number + i / LANES) % 2 == 1};
        warp.lanes |= 1u << thread.lane;
        unsigned char* bottom = machine.stacks + i * (STACK + PAGE) + PAGE;
#if defined(__x86_64__)
        auto* top = reinterpret_cast<void**>(bottom + STACK);
        memset(top - 8, 0, 8 * sizeof(void*));
        top[-2] = reinterpret_cast<void*>(&run_kernel);  // returned to by the first switch
        thread.stack_pointer = top - 8;
#else
        getcontext(&thread.context);
        thread.context.uc_stack.ss_sp = bottom;
        thread.context.uc_stack.ss_size = STACK;
        thread.context.uc_link = nullptr;
        makecontext(&thread.context, &run_kernel, 0);
#endif
    }
}

// Runs a warp until every lane has returned or waits.
inline void run_warp(Warp& warp) {
    for (bool ran = true; ran;) {
        ran = false;
        for (unsigned i = 0; i < LANES; ++i) {
            const unsigned lane = machine.reversed ? LANES - 1 - i : i;
            if (!(warp.lanes >> lane & 1) || warp.threads[lane].state != READY) continue;
            machine.current = &warp.threads[lane];
            threadIdx = machine.current->index;
            to_thread(*machine.current);
            if (machine.failed) return;
            ran = true;
        }
    }
}

// Lets the threads of complete barriers go on. Returns whether there was one.
inline bool release_barriers() {
    bool any = false;
    for (int number = 0; number < 16; ++number) {
        std::vector<Thread*> there;
        for (Thread& thread : machine.threads)
            if (thread.state == AT_BARRIER && thread.barrier == number) there.push_back(&thread);
        if (there.empty() || there.size() < static_cast<size_t>(there[0]->barrier_count)) continue;
        int count = 0;
        for (Thread* thread : there) {
            const Thread& first = *there[0];
            count += thread->vote_result != 0;
            if (number == 0 && (thread->line != first.line || strcmp(thread->file, first.file) != 0)) {
                machine.current = thread;
                snprintf(machine.message, sizeof machine.message,
                         "block (%u, %u, %u): thread (%u, %u, %u) is at the barrier of %s:%d and thread (%u, %u, %u) at "
                         "that of %s:%d",
                         blockIdx.x, blockIdx.y, blockIdx.z, first.index.x, first.index.y, first.index.z, first.file,
                         first.line, thread->index.x, thread->index.y, thread->index.z, thread->file, thread->line);
                machine.failed = true;
                return false;
            }
        }
        const int all = static_cast<int>(there.size());
        for (Thread* thread : there) {
            thread->state = READY;
            thread->vote_result = thread->vote == ANY_VOTE   ? count > 0
                                  : thread->vote == ALL_VOTE ? count == all
                                                             : count;
        }
        any = true;
    }
    return any;
}

// Says what the threads of a block that cannot go on wait for.
inline void report_deadlock() {
    size_t used = snprintf(machine.message, sizeof machine.message, "block (%u, %u, %u) cannot go on:", blockIdx.x,
                           blockIdx.y, blockIdx.z);
    for (size_t i = 0; i < machine.threads.size();) {
        const auto what = [](const Thread& thread, char* text, size_t size) {
            if (thread.state == DONE) snprintf(text, size, "returned");
            if (thread.state == AT_BARRIER)
                snprintf(text, size, "at barrier %d (%s:%d)", thread.barrier, thread.file, thread.line);
            if (thread.state == IN_WARP)
                snprintf(text, size, "in %s with mask %#x", thread.request.name, thread.request.mask);
        };
        char text[512] = "", next[512] = "";
        what(machine.threads[i], text, sizeof text);
        size_t end = i + 1;
        for (; end < machine.threads.size(); ++end) {
            what(machine.threads[end], next, sizeof next);
            if (strcmp(text, next) != 0) break;
        }
        if (used + 600 < sizeof machine.message)
            used += snprintf(machine.message + used, sizeof machine.message - used, "\n  threads %zu to %zu: %s", i,
                             end - 1, text);
        i = end;
    }
    machine.failed = true;
}

inline void run_block() {
    machine.reversed = false;
    for (;;) {
        const size_t count = machine.warps.size();
        for (size_t i = 0; i < count && !machine.failed; ++i)
            run_warp(machine.warps[machine.reversed ? count - 1 - i : i]);
        if (machine.failed) return;
        const bool done = std::all_of(machine.threads.begin(), machine.threads.end(),
                                      [](const Thread& thread) { return thread.state == DONE; });
        if (done) return;
        if (!release_barriers()) {
            if (!machine.failed) report_deadlock();
            return;
        }
        machine.reversed = !machine.reversed;
    }
}

// Whether the bytes of the shared region outside of what the block has are as they were.
inline void check_overrun() {
    const unsigned char* end = machine.dynamic + machine.dynamic_size;
    for (const unsigned char* byte = machine.region + PAGE; byte < machine.region + PAGE + MOST_SHARED; ++byte) {
        if (byte >= machine.dynamic && byte < end) byte = end;
        if (byte < machine.region + PAGE + MOST_SHARED && *byte != POISON) {
            snprintf(machine.message, sizeof machine.message,
                     "block (%u, %u, %u) wrote byte %td of shared memory, of which it has %zu", blockIdx.x, blockIdx.y,
                     blockIdx.z, byte - machine.dynamic, machine.dynamic_size);
            machine.failed = true;
            return;
        }
    }
}

// Global memory. Kernels see copies of the tensors' storages between pages that may not be touched.

inline void guard_storages(const unsigned* pointers, size_t pointer_count) {
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

inline void return_storages() {
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
inline void on_fault(int, siginfo_t* info, void*) {
    const auto* address = static_cast<unsigned char*>(info->si_addr);
    for (size_t i = 0; i < machine.storage_count; ++i) {
        const Storage& one = machine.storages[i];
        if (address >= one.region && address < one.region + one.region_size())
            fail("accesses byte %td of a tensor's storage of %zu bytes", address - one.copy, one.size);
    }
    if (address >= machine.region && address < machine.region + MOST_SHARED + 2 * PAGE)
        fail("accesses byte %td of shared memory, of which the block has %zu", address - machine.dynamic,
             machine.dynamic_size);
    if (address >= machine.stacks && address < machine.stacks + machine.stack_count * (STACK + PAGE))
        fail("overflows its stack of %zu bytes", STACK);
    fail("accesses memory at %p, which is no tensor's", static_cast<const void*>(address));
}

inline void run_grid() {
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

// Runs a grid. `pointers`: which of the arguments are pointers. Returns an error message, or null.
inline const char* launch(void (*kernel)(void**), void** arguments, const unsigned* pointers, size_t pointer_count,
                          Storage* storages, size_t storage_count, const unsigned* grid, const unsigned* block,
                          unsigned shared) {
    gridDim = dim3(grid[0], grid[1], grid[2]);
    blockDim = dim3(block[0], block[1], block[2]);
    machine.kernel = kernel, machine.arguments = arguments, machine.failed = false;
    machine.storages = storages, machine.storage_count = storage_count;
    if (shared > MOST_SHARED) return "more shared memory than any GPU has";
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

// Table of the floats of all float16 numbers: the tensor cores' products are most of the work.
inline const float* half_table() {
    static std::vector<float> table;
    if (table.empty()) {
        table.resize(1 << 16);
        for (unsigned bits = 0; bits < 1 << 16; ++bits) table[bits] = __half2float(__half(__half_raw{(unsigned short)bits}));
    }
    return table.data();
}

}  // namespace cuda_emulator

// Barriers.

#define __syncthreads() \
    ((void)cuda_emulator::barrier(__FILE__, __LINE__, 0, static_cast<int>(cuda_emulator::machine.threads.size())))
#define __syncthreads_vote(kind, value)                                                                          \
    cuda_emulator::barrier(__FILE__, __LINE__, 0, static_cast<int>(cuda_emulator::machine.threads.size()), kind, \
                           (value) != 0)
#define __syncthreads_or(value) __syncthreads_vote(cuda_emulator::ANY_VOTE, value)
#define __syncthreads_and(value) __syncthreads_vote(cuda_emulator::ALL_VOTE, value)
#define __syncthreads_count(value) __syncthreads_vote(cuda_emulator::COUNT_VOTE, value)

inline void __syncwarp(unsigned mask = 0xffffffffu) {
    cuda_emulator::collective("__syncwarp", mask, nullptr, [](cuda_emulator::Warp&, unsigned) {});
}
inline void __threadfence() {}
inline void __threadfence_block() {}
inline void __threadfence_system() {}
inline void __nanosleep(unsigned) {}

// Shuffles and votes.

namespace cuda_emulator {

template <typename T>
struct Shuffle {
    T value, result;
    int source;
};

// `source`: the lane to read from; lanes that do not exist or do not take part are an error.
template <typename T>
inline T shuffle(const char* name, unsigned mask, T value, int source) {
    Shuffle<T> mine{value, value, source};
    collective(name, mask, &mine, [name](Warp& warp, unsigned lanes) {
        for (unsigned lane = 0; lane < LANES; ++lane)
            if (lanes >> lane & 1) {
                auto& one = data_of<Shuffle<T>>(warp, lane);
                if (one.source < 0 || one.source >= LANES || !(lanes >> one.source & 1))
                    fail("%s: lane %u reads lane %d, which does not take part", name, lane, one.source);
                one.result = data_of<Shuffle<T>>(warp, one.source).value;
            }
    });
    return mine.result;
}

inline int this_lane() { return static_cast<int>(machine.current->lane); }

inline unsigned ballot(const char* name, unsigned mask, bool predicate) {
    struct Mine {
        bool predicate;
        unsigned result;
    } mine{predicate, 0};
    collective(name, mask, &mine, [](Warp& warp, unsigned lanes) {
        unsigned result = 0;
        for (unsigned lane = 0; lane < LANES; ++lane)
            if (lanes >> lane & 1 && data_of<Mine>(warp, lane).predicate) result |= 1u << lane;
        for (unsigned lane = 0; lane < LANES; ++lane)
            if (lanes >> lane & 1) data_of<Mine>(warp, lane).result = result;
    });
    return mine.result;
}

template <typename T, typename Join>
inline T reduce(const char* name, unsigned mask, T value, Join join) {
    struct Mine {
        T value, result;
    } mine{value, value};
    collective(name, mask, &mine, [join](Warp& warp, unsigned lanes) {
        T result{};
        bool first = true;
        for (unsigned lane = 0; lane < LANES; ++lane)
            if (lanes >> lane & 1) {
                const T one = data_of<Mine>(warp, lane).value;
                result = first ? one : join(result, one);
                first = false;
            }
        for (unsigned lane = 0; lane < LANES; ++lane)
            if (lanes >> lane & 1) data_of<Mine>(warp, lane).result = result;
    });
    return mine.result;
}

}  // namespace cuda_emulator

template <typename T>
inline T __shfl_sync(unsigned mask, T value, int source, int width = 32) {
    const int lane = cuda_emulator::this_lane();
    return cuda_emulator::shuffle("__shfl_sync", mask, value, lane / width * width + (source & (width - 1)));
}
template <typename T>
inline T __shfl_xor_sync(unsigned mask, T value, int distance, int width = 32) {
    const int lane = cuda_emulator::this_lane(), source = lane ^ distance;
    return cuda_emulator::shuffle("__shfl_xor_sync", mask, value, source / width > lane / width ? lane : source);
}
template <typename T>
inline T __shfl_up_sync(unsigned mask, T value, unsigned distance, int width = 32) {
    const int lane = cuda_emulator::this_lane(), source = lane - static_cast<int>(distance);
    return cuda_emulator::shuffle("__shfl_up_sync", mask, value, source < lane / width * width ? lane : source);
}
template <typename T>
inline T __shfl_down_sync(unsigned mask, T value, unsigned distance, int width = 32) {
    const int lane = cuda_emulator::this_lane(), source = lane + static_cast<int>(distance);
    return cuda_emulator::shuffle("__shfl_down_sync", mask, value, source >= (lane / width + 1) * width ? lane : source);
}
inline unsigned __ballot_sync(unsigned mask, int predicate) {
    return cuda_emulator::ballot("__ballot_sync", mask, predicate != 0);
}
inline int __any_sync(unsigned mask, int predicate) {
    return cuda_emulator::ballot("__any_sync", mask, predicate != 0) != 0;
}
inline int __all_sync(unsigned mask, int predicate) {
    return cuda_emulator::ballot("__all_sync", mask, predicate == 0) == 0;
}
inline unsigned __activemask() { return cuda_emulator::machine.current->warp->lanes; }
template <typename T>
inline T __reduce_add_sync(unsigned mask, T value) {
    return cuda_emulator::reduce("__reduce_add_sync", mask, value, [](T a, T b) { return a + b; });
}
template <typename T>
inline T __reduce_max_sync(unsigned mask, T value) {
    return cuda_emulator::reduce("__reduce_max_sync", mask, value, [](T a, T b) { return a > b ? a : b; });
}
template <typename T>
inline T __reduce_min_sync(unsigned mask, T value) {
    return cuda_emulator::reduce("__reduce_min_sync", mask, value, [](T a, T b) { return a < b ? a : b; });
}

// Atomics: one thread runs at a time.

template <typename T, typename V>
inline T atomicAdd(T* target, V value) {
    const T before = *target;
    *target = before + static_cast<T>(value);
    return before;
}
template <typename T, typename V>
inline T atomicSub(T* target, V value) {
    const T before = *target;
    *target = before - static_cast<T>(value);
    return before;
}
template <typename T, typename V>
inline T atomicMax(T* target, V value) {
    const T before = *target, other = static_cast<T>(value);
    *target = before > other ? before : other;
    return before;
}
template <typename T, typename V>
inline T atomicMin(T* target, V value) {
    const T before = *target, other = static_cast<T>(value);
    *target = before < other ? before : other;
    return before;
}
template <typename T, typename V>
inline T atomicExch(T* target, V value) {
    const T before = *target;
    *target = static_cast<T>(value);
    return before;
}
template <typename T, typename V, typename W>
inline T atomicCAS(T* target, V expected, W value) {
    const T before = *target;
    if (before == static_cast<T>(expected)) *target = static_cast<T>(value);
    return before;
}
template <typename T, typename V>
inline T atomicOr(T* target, V value) {
    const T before = *target;
    *target = before | static_cast<T>(value);
    return before;
}
template <typename T, typename V>
inline T atomicAnd(T* target, V value) {
    const T before = *target;
    *target = before & static_cast<T>(value);
    return before;
}
inline unsigned atomicInc(unsigned* target, unsigned limit) {
    const unsigned before = *target;
    *target = before >= limit ? 0 : before + 1;
    return before;
}

// Loads and stores with hints.

template <typename T>
inline T __ldg(const T* source) {
    return *source;
}
template <typename T>
inline T __ldcs(const T* source) {
    return *source;
}
template <typename T>
inline T __ldcg(const T* source) {
    return *source;
}
template <typename T>
inline T __ldca(const T* source) {
    return *source;
}
template <typename T>
inline void __stcs(T* target, T value) {
    *target = value;
}
template <typename T>
inline void __stcg(T* target, T value) {
    *target = value;
}
template <typename T>
inline void __stwt(T* target, T value) {
    *target = value;
}

inline size_t __cvta_generic_to_shared(const void* pointer) { return cuda_emulator::shared_address_of(pointer); }
inline size_t __cvta_generic_to_global(const void* pointer) { return reinterpret_cast<size_t>(pointer); }

// Bits and arithmetic.

namespace cuda_emulator {
template <typename To, typename From>
inline To same_bits(From value) {
    static_assert(sizeof(To) == sizeof(From), "a bit cast keeps the size");
    To result;
    memcpy(&result, &value, sizeof result);
    return result;
}
}  // namespace cuda_emulator

inline float __int_as_float(int bits) { return cuda_emulator::same_bits<float>(bits); }
inline float __uint_as_float(unsigned bits) { return cuda_emulator::same_bits<float>(bits); }
inline int __float_as_int(float value) { return cuda_emulator::same_bits<int>(value); }
inline unsigned __float_as_uint(float value) { return cuda_emulator::same_bits<unsigned>(value); }
inline int __popc(unsigned value) { return __builtin_popcount(value); }
inline int __popcll(unsigned long long value) { return __builtin_popcountll(value); }
inline int __clz(int value) { return value ? __builtin_clz(static_cast<unsigned>(value)) : 32; }
inline int __ffs(int value) { return __builtin_ffs(value); }
inline unsigned __brev(unsigned value) {
    unsigned result = 0;
    for (int i = 0; i < 32; ++i) result |= (value >> i & 1) << (31 - i);
    return result;
}
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>((1ull * a * b) >> 32); }
inline int __mulhi(int a, int b) { return static_cast<int>((1ll * a * b) >> 32); }
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    const unsigned long long both = a | static_cast<unsigned long long>(b) << 32;
    unsigned result = 0;
    for (int i = 0; i < 4; ++i) {
        const unsigned byte = static_cast<unsigned>(both >> 8 * (selector >> 4 * i & 7)) & 0xff;
        const unsigned sign = selector >> 4 * i & 8;
        result |= (sign ? (byte & 0x80 ? 0xff : 0u) : byte) << 8 * i;
    }
    return result;
}
inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned shift) {
    return static_cast<unsigned>((low | static_cast<unsigned long long>(high) << 32) >> (shift & 31));
}
inline int __dp4a(int a, int b, int c) {
    for (int i = 0; i < 4; ++i) c += static_cast<signed char>(a >> 8 * i) * static_cast<signed char>(b >> 8 * i);
    return c;
}
inline float __fdividef(float a, float b) { return a / b; }
inline float __frcp_rn(float x) { return 1.f / x; }
inline float __fsqrt_rn(float x) { return sqrtf(x); }
inline float __frsqrt_rn(float x) { return 1.f / sqrtf(x); }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fmaf_rn(float a, float b, float c) { return fmaf(a, b, c); }
inline float __fdiv_rn(float a, float b) { return a / b; }
inline float __saturatef(float x) { return x > 0.f ? (x < 1.f ? x : 1.f) : 0.f; }
inline float rsqrtf(float x) { return 1.f / sqrtf(x); }
inline int __float2int_rn(float x) { return static_cast<int>(rintf(x)); }
inline int __float2int_rz(float x) { return static_cast<int>(x); }
inline int __float2int_rd(float x) { return static_cast<int>(floorf(x)); }
inline int __float2int_ru(float x) { return static_cast<int>(ceilf(x)); }
inline float __int2float_rn(int x) { return static_cast<float>(x); }
inline float __uint2float_rn(unsigned x) { return static_cast<float>(x); }
// glibc declares these names, so that they can only be macros.
#define __expf(x) expf(x)
#define __exp10f(x) exp10f(x)
#define __logf(x) logf(x)
#define __log2f(x) log2f(x)
#define __log10f(x) log10f(x)
#define __sinf(x) sinf(x)
#define __cosf(x) cosf(x)
#define __tanf(x) tanf(x)
#define __powf(x, y) powf(x, y)
#define __sincosf(x, s, c) sincosf(x, s, c)

#define CUDA_EMULATOR_MIN_MAX(type, a_type, b_type)                                                    \
    inline type min(a_type a, b_type b) { return static_cast<type>(a) < static_cast<type>(b) ? a : b; } \
    inline type max(a_type a, b_type b) { return static_cast<type>(a) > static_cast<type>(b) ? a : b; }
CUDA_EMULATOR_MIN_MAX(int, int, int)
CUDA_EMULATOR_MIN_MAX(unsigned, unsigned, unsigned)
CUDA_EMULATOR_MIN_MAX(unsigned, int, unsigned)
CUDA_EMULATOR_MIN_MAX(unsigned, unsigned, int)
CUDA_EMULATOR_MIN_MAX(long, long, long)
CUDA_EMULATOR_MIN_MAX(unsigned long, unsigned long, unsigned long)
CUDA_EMULATOR_MIN_MAX(unsigned long, long, unsigned long)
CUDA_EMULATOR_MIN_MAX(unsigned long, unsigned long, long)
CUDA_EMULATOR_MIN_MAX(long long, long long, long long)
CUDA_EMULATOR_MIN_MAX(unsigned long long, unsigned long long, unsigned long long)
CUDA_EMULATOR_MIN_MAX(unsigned long long, long long, unsigned long long)
CUDA_EMULATOR_MIN_MAX(unsigned long long, unsigned long long, long long)
inline float min(float a, float b) { return fminf(a, b); }
inline float max(float a, float b) { return fmaxf(a, b); }
inline double min(double a, double b) { return fmin(a, b); }
inline double max(double a, double b) { return fmax(a, b); }
