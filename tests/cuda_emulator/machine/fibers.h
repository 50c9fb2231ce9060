// The threads of a block as fibers: their state, switching between them, and what they wait for.

#pragma once

#include "language.h"

namespace cuda_emulator {

constexpr int LANES = 32;
constexpr size_t STACK = 256 << 10, PAGE = 4096, MAX_SHARED = 256 << 10;
constexpr unsigned SHARED_START = 1024;  // address of the first byte of shared memory, as on recent GPUs
constexpr unsigned char POISON = 0xff;   // NaN in float16, bfloat16 and float32

enum State { READY, AT_BARRIER, AT_MBARRIER, IN_WARP, DONE };
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

struct WarpgroupProduct {  // a started wgmma, as one thread knows it
    float* sums;
    unsigned left[4];
    unsigned long long right;
    bool accumulate, is_half;  // half or bfloat16
    int count;                 // of sums
    bool left_in_shared = false, right_n_major = false;
    unsigned long long left_descriptor = 0;
};

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
    unsigned mbarrier, parity;       // what it waits for
    std::vector<WarpgroupProduct> products;  // started, not yet waited for
    std::vector<size_t> product_ends;        // of committed groups: ends in `products`
};

// A copy by the copy engine (TMA), which counts toward an mbarrier when it is done: rows of `bytes` at a distance.
struct BulkCopy {
    unsigned target, mbarrier, rows, bytes, valid_rows, valid_bytes;
    const unsigned char* source;
    size_t stride;
    bool swizzled;
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
    std::vector<BulkCopy> bulk_copies;      // issued, not yet performed
    std::vector<unsigned> registers;        // of each warpgroup's threads, after setmaxnreg
    char message[4096];
};

extern Machine machine;

// Ends the launch with an error: the scheduler takes over, and the fibers are never resumed.
[[noreturn]] __attribute__((format(printf, 1, 2))) void fail(const char* format, ...);

// Blocks until all threads of the barrier are there.
int barrier(const char* file, int line, int number, int count, Vote vote = NO_VOTE, int value = 0);

// Blocks until all lanes of `mask` are here with a request of the same name. Returns to the last one the lanes of the
// request, which it serves and releases, and zero to the others.
unsigned arrive(const char* name, unsigned mask, void* data);
void release(Warp& warp, unsigned lanes);

// An instruction of the warp: serve(warp, lanes) reads and writes what the requests of its lanes point at.
template <typename Serve>
inline void collective(const char* name, unsigned mask, void* data, Serve serve) {
    Warp& warp = *machine.current->warp;
    if (const unsigned lanes = arrive(name, mask, data)) {
        serve(warp, lanes);
        release(warp, lanes);
    }
}

template <typename T>
inline T& data_of(Warp& warp, unsigned lane) {
    return *static_cast<T*>(warp.threads[lane].request.data);
}

}  // namespace cuda_emulator
