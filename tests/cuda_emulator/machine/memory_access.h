// Atomics, and loads and stores with hints.

#pragma once

#include "shared_memory.h"

// Atomics: one thread runs at a time.

// Stores what `change` makes of the value there, and returns that value.
template <typename T, typename F>
inline T read_modify_write(T* target, F change) {
    const T before = *target;
    *target = change(before);
    return before;
}

template <typename T, typename V>
inline T atomicAdd(T* target, V value) {
    return read_modify_write(target, [=](T before) -> T { return before + static_cast<T>(value); });
}
template <typename T, typename V>
inline T atomicSub(T* target, V value) {
    return read_modify_write(target, [=](T before) -> T { return before - static_cast<T>(value); });
}
template <typename T, typename V>
inline T atomicMax(T* target, V value) {
    return read_modify_write(
        target, [other = static_cast<T>(value)](T before) { return before > other ? before : other; });
}
template <typename T, typename V>
inline T atomicMin(T* target, V value) {
    return read_modify_write(
        target, [other = static_cast<T>(value)](T before) { return before < other ? before : other; });
}
template <typename T, typename V>
inline T atomicExch(T* target, V value) {
    return read_modify_write(target, [=](T) { return static_cast<T>(value); });
}
template <typename T, typename V, typename W>
inline T atomicCAS(T* target, V expected, W value) {
    return read_modify_write(
        target, [=](T before) { return before == static_cast<T>(expected) ? static_cast<T>(value) : before; });
}
template <typename T, typename V>
inline T atomicOr(T* target, V value) {
    return read_modify_write(target, [=](T before) -> T { return before | static_cast<T>(value); });
}
template <typename T, typename V>
inline T atomicAnd(T* target, V value) {
    return read_modify_write(target, [=](T before) -> T { return before & static_cast<T>(value); });
}
inline unsigned atomicInc(unsigned* target, unsigned limit) {
    return read_modify_write(target, [=](unsigned before) { return before >= limit ? 0 : before + 1; });
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
