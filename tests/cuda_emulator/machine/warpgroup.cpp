// Instructions of a warpgroup.

#include "warpgroup.h"

#include "bulk_copies.h"

namespace cuda_emulator {

void start_product(const WarpgroupProduct& product) { machine.current->products.push_back(product); }

void commit_products() {
    Thread& me = *machine.current;
    me.product_ends.push_back(me.products.size());
}

// An element of a matrix that a descriptor describes, in the 128-byte swizzle: column `column` of row `row` as they lie in
// memory. Rows of more than 64 elements go on in the next block, `leading` bytes further.
template <typename T>
float element_in_shared(unsigned long long descriptor, unsigned row, unsigned column) {
    const unsigned start = static_cast<unsigned>(descriptor & 0x3fff) << 4;
    const unsigned leading = static_cast<unsigned>(descriptor >> 16 & 0x3fff) << 4;
    const unsigned stride = static_cast<unsigned>(descriptor >> 32 & 0x3fff) << 4;
    const unsigned at = start + column / 64 * leading + row / 8 * stride + row % 8 * 128 + column % 64 * 2;
    unsigned short bits;
    memcpy(&bits, shared_bytes(swizzled_address(at), 2, "wgmma"), 2);
    return element_of(bits, T());
}

template <typename T>
void multiply_warpgroup(size_t which) {
    Thread& me = *machine.current;
    const WarpgroupProduct& mine = me.products[which];
    const unsigned quad = me.lane / 4 * 4, pair = me.lane % 4 * 2, row = threadIdx.x % 128 / 32 * 16 + me.lane / 4;
    float left[2][16];  // of this thread's rows; from registers: of the four lanes that share them
    if (mine.left_in_shared)
        for (unsigned half = 0; half < 2; ++half)
            for (unsigned k = 0; k < 16; ++k)
                left[half][k] = element_in_shared<T>(mine.left_descriptor, row + 8 * half, k);
    else
        for (unsigned other = 0; other < 4; ++other)
            for (int i = 0; i < 4; ++i)
                for (int j = 0; j < 2; ++j)
                    left[i % 2][2 * other + i / 2 * 8 + j] = element_of(
                        static_cast<unsigned short>(me.warp->threads[quad + other].products[which].left[i] >> 16 * j),
                        T());
    for (int i = 0; i < mine.count; ++i) {
        const unsigned column = i / 4 * 8 + pair + i % 2;
        float sum = mine.accumulate ? mine.sums[i] : 0.f;
        for (unsigned k = 0; k < 16; ++k)
            sum += left[i % 4 / 2][k] * (mine.right_n_major ? element_in_shared<T>(mine.right, k, column)
                                                            : element_in_shared<T>(mine.right, column, k));
        mine.sums[i] = sum;
    }
}

void wait_products(size_t pending) {
    Thread& me = *machine.current;
    if (me.product_ends.size() <= pending) return;
    const int number = 8 + static_cast<int>(threadIdx.x / 128);  // kernels use the lower ones
    barrier("wgmma.wait_group", 0, number, 128);
    const size_t groups = me.product_ends.size() - pending, end = me.product_ends[groups - 1];
    for (size_t i = 0; i < end; ++i)
        me.products[i].is_half ? multiply_warpgroup<__half>(i) : multiply_warpgroup<__nv_bfloat16>(i);
    barrier("wgmma.wait_group", 0, number, 128);
    me.products.erase(me.products.begin(), me.products.begin() + end);
    me.product_ends.erase(me.product_ends.begin(), me.product_ends.begin() + groups);
    for (size_t& rest : me.product_ends) rest -= end;
}

void set_registers(unsigned count) {
    const unsigned threads = static_cast<unsigned>(machine.threads.size());
    const unsigned each = std::min(255u, 65536 / threads) / 8 * 8;
    machine.registers[threadIdx.x / 128] = count;
    unsigned total = 0;
    for (unsigned one : machine.registers) total += one;
    if (count % 8 || total > each * (threads / 128))
        fail("setmaxnreg %u: the warpgroups' threads want %u registers together; the block has %u", count, total,
             each * (threads / 128));
}

struct StoreMatrix {
    unsigned address;
    const unsigned* values;
};

void store_matrices_transposed(unsigned address, const unsigned (&values)[4]) {
    StoreMatrix mine{address, values};
    collective("stmatrix.trans", WHOLE_WARP, &mine, [](Warp& warp, unsigned) {
        for (unsigned matrix = 0; matrix < 4; ++matrix) {
            uint16_t element[8][8];
            for (unsigned lane = 0; lane < LANES; ++lane)
                for (unsigned j = 0; j < 2; ++j)
                    element[lane % 4 * 2 + j][lane / 4] =
                        static_cast<uint16_t>(data_of<StoreMatrix>(warp, lane).values[matrix] >> 16 * j);
            for (unsigned row = 0; row < 8; ++row)
                memcpy(shared_bytes(data_of<StoreMatrix>(warp, 8 * matrix + row).address, 16, "stmatrix"), element[row], 16);
        }
    });
}

}  // namespace cuda_emulator
