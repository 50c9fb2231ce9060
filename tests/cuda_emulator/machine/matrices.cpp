// Matrix instructions: each serves the whole warp at once.

#include "matrices.h"

#include "shared_memory.h"

namespace cuda_emulator {

constexpr unsigned WHOLE_WARP = 0xffffffffu;

// Table of the floats of all float16 numbers: the tensor cores' products are most of the work.
const float* half_table() {
    static std::vector<float> table;
    if (table.empty()) {
        table.resize(1 << 16);
        for (unsigned bits = 0; bits < 1 << 16; ++bits) table[bits] = __half2float(__half(__half_raw{(unsigned short)bits}));
    }
    return table.data();
}

struct LoadMatrix {
    unsigned address;
    unsigned* result;
};

template <bool TRANSPOSED>
void load_matrices(const char* name, unsigned (&result)[4], unsigned address) {
    LoadMatrix mine{address, result};
    collective(name, WHOLE_WARP, &mine, [name](Warp& warp, unsigned) {
        for (unsigned matrix = 0; matrix < 4; ++matrix) {
            uint16_t element[8][8];
            for (unsigned row = 0; row < 8; ++row)
                memcpy(element[row], shared_bytes(data_of<LoadMatrix>(warp, 8 * matrix + row).address, 16, name), 16);
            for (unsigned lane = 0; lane < LANES; ++lane) {
                const unsigned major = lane / 4, minor = lane % 4 * 2;
                const uint16_t low = TRANSPOSED ? element[minor][major] : element[major][minor];
                const uint16_t high = TRANSPOSED ? element[minor + 1][major] : element[major][minor + 1];
                data_of<LoadMatrix>(warp, lane).result[matrix] = low | static_cast<unsigned>(high) << 16;
            }
        }
    });
}

float element_of(unsigned short bits, __half) { return half_table()[bits]; }
float element_of(unsigned short bits, __nv_bfloat16) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }

struct MatrixProduct {
    float* c;
    unsigned a[4], b[2];
};

template <typename T>
void multiply(float (&c)[4], const unsigned (&a)[4], unsigned b0, unsigned b1) {
    MatrixProduct mine{c, {a[0], a[1], a[2], a[3]}, {b0, b1}};
    collective("mma", WHOLE_WARP, &mine, [](Warp& warp, unsigned lanes) {
        if (lanes != WHOLE_WARP) fail("mma: the warp is not whole");
        float left[16][16], right[16][8], sum[16][8];
        for (unsigned lane = 0; lane < LANES; ++lane) {
            const auto& one = data_of<MatrixProduct>(warp, lane);
            const unsigned group = lane / 4, pair = lane % 4 * 2;
            for (int i = 0; i < 4; ++i)
                for (int j = 0; j < 2; ++j)
                    left[group + i % 2 * 8][pair + i / 2 * 8 + j] =
                        element_of(static_cast<unsigned short>(one.a[i] >> 16 * j), T());
            for (int i = 0; i < 2; ++i)
                for (int j = 0; j < 2; ++j)
                    right[pair + i * 8 + j][group] = element_of(static_cast<unsigned short>(one.b[i] >> 16 * j), T());
            for (int i = 0; i < 4; ++i) sum[group + i / 2 * 8][pair + i % 2] = one.c[i];
        }
        for (int row = 0; row < 16; ++row)
            for (int k = 0; k < 16; ++k)
                for (int column = 0; column < 8; ++column) sum[row][column] += left[row][k] * right[k][column];
        for (unsigned lane = 0; lane < LANES; ++lane)
            for (int i = 0; i < 4; ++i)
                data_of<MatrixProduct>(warp, lane).c[i] = sum[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
    });
}

template void load_matrices<false>(const char*, unsigned (&)[4], unsigned);
template void load_matrices<true>(const char*, unsigned (&)[4], unsigned);
template void multiply<__half>(float (&)[4], const unsigned (&)[4], unsigned, unsigned);
template void multiply<__nv_bfloat16>(float (&)[4], const unsigned (&)[4], unsigned, unsigned);

}  // namespace cuda_emulator
