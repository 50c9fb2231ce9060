// Barriers, and instructions of the whole warp: shuffles, votes and reductions.

#pragma once

#include "fibers.h"

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
