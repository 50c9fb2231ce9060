// Asynchronous copies (cp.async): performed as late, or as early, as a GPU may.

#include "async_copies.h"

namespace cuda_emulator {

// Asynchronous copies happen as late as they may, at the wait; those of every second warp as early as they may.
void perform(const Copy& copy) {
    if (copy.source == nullptr)
        memset(copy.target, 0, copy.size);
    else
        memcpy(copy.target, copy.source, copy.size);
}

void copy_async(unsigned address, const void* source, unsigned size, bool inside) {
    Thread& me = *machine.current;
    if (inside && reinterpret_cast<uintptr_t>(source) % size)
        fail("cp.async: the global address %p is not a multiple of %u", source, size);
    const Copy copy{shared_bytes(address, size, "cp.async"), inside ? source : nullptr, size};
    if (me.warp->eager)
        perform(copy);
    else
        me.copies.push_back(copy);
}

void commit_copies() {
    Thread& me = *machine.current;
    me.group_ends.push_back(me.copies.size());
}

void wait_copies(size_t pending) {
    Thread& me = *machine.current;
    if (me.group_ends.size() <= pending) return;
    const size_t groups = me.group_ends.size() - pending, end = me.group_ends[groups - 1];
    for (size_t i = 0; i < end; ++i) perform(me.copies[i]);
    me.copies.erase(me.copies.begin(), me.copies.begin() + end);
    me.group_ends.erase(me.group_ends.begin(), me.group_ends.begin() + groups);
    for (size_t& rest : me.group_ends) rest -= end;
}

}  // namespace cuda_emulator
