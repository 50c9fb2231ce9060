// What rungs 6 and 7 share: the order of output tiles, and the store of mma accumulators.

#pragma once

#include "elements.cuh"

struct TilePosition {
    int row, column;  // in tiles
};

// Tiles that run at the same time share rows of A and columns of B in the L2 cache. Row by row, 132 of them would read
// a strip of A and all of B; in groups of GROUP rows, column by column within a group, they cover a near-square, whose
// rows and columns are fewest for its area.
constexpr int GROUP = 16;

__device__ inline TilePosition tile_position(int tile, int row_tiles, int column_tiles) {
    const int per_group = GROUP * column_tiles, first = tile / per_group * GROUP;
    const int rows = row_tiles - first < GROUP ? row_tiles - first : GROUP;  // the last group may be lower
    return {first + tile % per_group % rows, tile % per_group / rows};
}

// An accumulator of tensor cores has groups of 8 columns; lane q of the four lanes of a row has columns 2 q and 2 q + 1
// of each group, 4 bytes as two 16-bit elements. This transposes the 4 x 4 words of four groups and four lanes, so that
// lane q gets the whole group q: 16 bytes, one store. values[g] is this lane's word of group g.
__device__ inline uint4 transposed_in_quad(unsigned (&values)[4]) {
    const bool odd = threadIdx.x & 1, upper = threadIdx.x & 2;
    unsigned first = __shfl_xor_sync(0xffffffffu, odd ? values[0] : values[1], 1);
    unsigned second = __shfl_xor_sync(0xffffffffu, odd ? values[2] : values[3], 1);
    (odd ? values[0] : values[1]) = first, (odd ? values[2] : values[3]) = second;
    first = __shfl_xor_sync(0xffffffffu, upper ? values[0] : values[2], 2);
    second = __shfl_xor_sync(0xffffffffu, upper ? values[1] : values[3], 2);
    (upper ? values[0] : values[2]) = first, (upper ? values[1] : values[3]) = second;
    return make_uint4(values[0], values[1], values[2], values[3]);
}
