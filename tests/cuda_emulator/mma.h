// CUDA's mma.h on a CPU: 16-bit wmma products of 16 x 16 x 16 with float32 sums. Lane 0 of a warp holds whole matrices:
// which lane holds which element is not defined by CUDA, so no kernel may depend on it.

#pragma once

#include <type_traits>

namespace nvcuda {
namespace wmma {

struct matrix_a {};
struct matrix_b {};
struct accumulator {};
struct row_major {};
struct col_major {};
enum layout_t { mem_row_major, mem_col_major };

template <typename Use, int M, int N, int K, typename T, typename Layout = void>
struct fragment {
    static_assert(M == 16 && N == 16 && K == 16, "the model has fragments of 16 x 16 x 16");
    float element[16][16];
};

// Waits for the whole warp, runs `work` once with lane 0's data, and lets the warp go on.
template <typename Data, typename Work>
inline void once(const char* name, Data& data, Work work) {
    cuda_emulator::collective(name, 0xffffffffu, &data, [name, work](cuda_emulator::Warp& warp, unsigned lanes) {
        if (lanes != 0xffffffffu) cuda_emulator::fail("%s: the warp is not whole", name);
        work(cuda_emulator::data_of<Data>(warp, 0));
    });
}

template <typename Use, typename T, typename Layout>
inline void fill_fragment(fragment<Use, 16, 16, 16, T, Layout>& target, float value) {
    for (auto& row : target.element)
        for (float& element : row) element = value;
}

template <typename T>
inline void check_alignment(const char* name, const T* pointer, unsigned pitch) {
    if (reinterpret_cast<uintptr_t>(pointer) % 32 || pitch * sizeof(T) % 16)
        cuda_emulator::fail("%s: a matrix starts at a multiple of 32 bytes, and its rows of 16", name);
}

template <typename Use, typename T, typename Layout>
inline void load_matrix_sync(fragment<Use, 16, 16, 16, T, Layout>& target, const T* source, unsigned pitch) {
    check_alignment("wmma.load", source, pitch);
    once("wmma.load", target, [source, pitch](auto& mine) {
        for (int row = 0; row < 16; ++row)
            for (int column = 0; column < 16; ++column) {
                const unsigned at = std::is_same<Layout, row_major>::value ? row * pitch + column : column * pitch + row;
                mine.element[row][column] = static_cast<float>(source[at]);
            }
    });
}

template <typename A, typename B, typename C>
struct Product {
    C* target;
    const A* left;
    const B* right;
    const C* sum;
};

using Sums = fragment<accumulator, 16, 16, 16, float>;

template <typename T, typename LayoutA, typename LayoutB>
inline void mma_sync(Sums& target, const fragment<matrix_a, 16, 16, 16, T, LayoutA>& a,
                     const fragment<matrix_b, 16, 16, 16, T, LayoutB>& b, const Sums& c) {
    Product<std::decay_t<decltype(a)>, std::decay_t<decltype(b)>, Sums> operands{&target, &a, &b, &c};
    once("wmma.mma", operands, [](auto& mine) {
        auto result = *mine.sum;
        for (int row = 0; row < 16; ++row)
            for (int k = 0; k < 16; ++k)
                for (int column = 0; column < 16; ++column)
                    result.element[row][column] += mine.left->element[row][k] * mine.right->element[k][column];
        *mine.target = result;
    });
}

inline void store_matrix_sync(float* target, const Sums& source, unsigned pitch, layout_t layout) {
    check_alignment("wmma.store", target, pitch);
    Sums copy = source;
    once("wmma.store", copy, [target, pitch, layout](const auto& mine) {
        for (int row = 0; row < 16; ++row)
            for (int column = 0; column < 16; ++column)
                target[layout == mem_row_major ? row * pitch + column : column * pitch + row] = mine.element[row][column];
    });
}

}  // namespace wmma
}  // namespace nvcuda
