// Runs the fibers of a block until all have returned, and says why they cannot go on.

#include "bulk_copies.h"

namespace cuda_emulator {

// Stacks last for one launch: every guard page divides a mapping, a process has 65,530 of them, and it may hold a
// hundred compiled kernels. Returns false if there is no room.
bool prepare_stacks(size_t count) {
    const size_t each = STACK + PAGE;
    void* found = mmap(nullptr, count * each, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (found == MAP_FAILED) return false;
    machine.stacks = static_cast<unsigned char*>(found), machine.stack_count = count;
    for (size_t i = 0; i < count; ++i)  // overflows are caught
        if (mprotect(machine.stacks + i * each, PAGE, PROT_NONE) != 0) return false;
    return true;
}

void return_stacks() {
    munmap(machine.stacks, machine.stack_count * (STACK + PAGE));
    machine.stacks = nullptr, machine.stack_count = 0;
}

void start_block(unsigned number) {
    const unsigned threads = blockDim.x * blockDim.y * blockDim.z;
    memset(machine.region + PAGE, POISON, MAX_SHARED);
    if (machine.fixed != nullptr) memset(machine.fixed, POISON, machine.fixed_size);
    machine.bulk_copies.clear(), machine.registers.assign(threads / 128, 0);
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
        thread.products.clear(), thread.product_ends.clear();
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
void run_warp(Warp& warp) {
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
bool release_barriers() {
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
void report_deadlock() {
    size_t used = snprintf(machine.message, sizeof machine.message, "block (%u, %u, %u) cannot go on:", blockIdx.x,
                           blockIdx.y, blockIdx.z);
    for (size_t i = 0; i < machine.threads.size();) {
        const auto what = [](const Thread& thread, char* text, size_t size) {
            if (thread.state == DONE) snprintf(text, size, "returned");
            if (thread.state == AT_BARRIER)
                snprintf(text, size, "at barrier %d (%s:%d)", thread.barrier, thread.file, thread.line);
            if (thread.state == AT_MBARRIER)
                snprintf(text, size, "waits for phase %u of the mbarrier at byte %u", thread.parity,
                         thread.mbarrier - SHARED_START);
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

void run_block() {
    machine.reversed = false;
    for (;;) {
        const size_t count = machine.warps.size();
        for (size_t i = 0; i < count && !machine.failed; ++i)
            run_warp(machine.warps[machine.reversed ? count - 1 - i : i]);
        if (machine.failed) return;
        const bool done = std::all_of(machine.threads.begin(), machine.threads.end(),
                                      [](const Thread& thread) { return thread.state == DONE; });
        if (done) return;
        const bool released = release_barriers(), completed = release_mbarriers();
        if (machine.failed) return;
        if (!released && !completed && !perform_bulk_copies()) {
            report_deadlock();
            return;
        }
        machine.reversed = !machine.reversed;
    }
}

}  // namespace cuda_emulator
