// The KV cache as decoding and prefill read it: where a key lies, and copies of a tile of keys or values and of their
// scales from the cache to shared memory.

#pragma once

#include "mma.cuh"

constexpr int PAGE_UNIT = 16;  // every page has a multiple of so many keys

template <typename STORED>
constexpr bool QUANTIZED = sizeof(STORED) == 1;

// The keys or the values. Strides and `width`, what a row has, are in bytes.
struct CacheRows {
    const unsigned char* data;
    long long head_stride, page_stride;
    int row_stride, width;
};

// The cache as one KV head of one sequence sees it. A contiguous cache is one page: `page_table` is null, and every key
// has the page number `b` (the sequence) and the slot `key`. Pointers are formed where they are used: only the numbers b
// and kv_head live through a loop, the rest are kernel parameters.
struct Cache {
    CacheRows k, v;
    const float *k_scale, *v_scale;
    long long scale_page;  // strides of scales and of the page table are in elements
    int scale_row;
    const int* page_table;
    long long page_table_row;
    int page_shift, b, kv_head;

    __device__ inline int slot_of(int key) const { return key & static_cast<int>((1u << page_shift) - 1); }
    __device__ inline int page_of(int key) const {
        return page_table == nullptr ? b : __ldg(page_table + opaque(b) * page_table_row + (key >> page_shift));
    }
};

// Keys that may be read: below `end`, and from `begin` on or below `sink_tokens`. Others may be uninitialized memory, or
// lie in pages that were released.
struct KeyBounds {
    int end, begin, sink_tokens;

    __device__ inline bool contain(int key) const { return key < end && (key >= begin || key < sink_tokens); }
};

// The K blocks that `seqlen_q` queries see, the last of which sees `seqlen` keys: the i-th is K block i for
// i < sink_blocks, else K block i + skip.
struct KBlocks {
    int sink_blocks, skip, count;
    int key_min;  // the first visible key behind the sink tokens

    __device__ inline KBlocks(int seqlen, int seqlen_q, int window, int sink_tokens, int block_n) {
        key_min = window == 0 ? 0 : max(seqlen - seqlen_q + 1 - window, 0);
        sink_blocks = (min(key_min, sink_tokens) + block_n - 1) / block_n;
        skip = max(key_min / block_n, sink_blocks) - sink_blocks;
        count = (seqlen + block_n - 1) / block_n - skip;
    }
    __device__ inline int block(int i) const { return i < sink_blocks ? i : i + skip; }
};

// Copies of a tile of keys or values from the cache to shared memory, by THREADS threads (a warp or a block). `start`
// issues the loads; from sm_80 on they are asynchronous (cp.async). Before, they go to registers, and `finish` stores
// them: the loads are under way while the tensor cores work.
//
// Chunk c (16 bytes) of row r is stored at chunk c ^ (r % 8), so that the eight rows that ldmatrix reads at a time lie
// in different banks. Rows of 64 bytes share 128 bytes in pairs: there the pair's number is the pattern.
template <int ROW_BYTES>
__device__ inline unsigned swizzle(int row) {
    static_assert(ROW_BYTES >= 64, "a row has four chunks at least");
    return ROW_BYTES >= 128 ? (row & 7) << 4 : ((row >> 1) & 3) << 4;
}

template <typename STORED, int KEYS, int DIM, int THREADS>
struct CacheCopy {
    static constexpr int ROW_BYTES = DIM * static_cast<int>(sizeof(STORED));
    static constexpr int CHUNKS = ROW_BYTES / 16;
    static constexpr int STEP = THREADS / CHUNKS;  // rows that all threads copy at once
    static constexpr int COUNT = KEYS / STEP;      // chunks of a thread: one column of them, every STEP-th row
    static constexpr bool UNIT_HAS_STEPS = STEP <= PAGE_UNIT;
    static constexpr int PAGES = UNIT_HAS_STEPS ? KEYS / PAGE_UNIT : COUNT;  // units that a thread copies from
    static constexpr int STEPS_PER_UNIT = COUNT / PAGES;
    static_assert(THREADS % CHUNKS == 0 && KEYS % STEP == 0 && KEYS % PAGE_UNIT == 0, "all threads copy alike");

    // Before sm_80, where the registers hold no tile next to a wide O: `finish` loads all of it, HELD chunks at a time.
    static constexpr bool IN_PARTS = THREADS == WARP && DIM > 128;
    static constexpr int HELD = IN_PARTS && COUNT > 8 ? 8 : COUNT;

    int number[PAGES];  // page numbers, looked up before `start`
#if !SM80
    uint4 registers[HELD];
#endif

    // Rows of a unit begin where those of the unit before end.
    static constexpr int UNIT_ROWS = STEPS_PER_UNIT * STEP;

    __device__ static inline int thread() { return reread_thread_index() % THREADS; }

    __device__ inline void look_up(const Cache& cache, int first_key, const KeyBounds& bounds) {
        const int unit_begin = UNIT_HAS_STEPS ? 0 : thread() / CHUNKS / PAGE_UNIT * PAGE_UNIT;
#pragma unroll
        for (int unit = 0; unit < PAGES; ++unit) {
            const int key = first_key + unit_begin + unit * UNIT_ROWS;
            number[unit] = key < bounds.end ? cache.page_of(key) : 0;
        }
    }

    // Where the thread's first row is stored. Its others are multiples of STEP below: they share no bits with the first,
    // nor do their swizzles.
    __device__ static inline unsigned target(unsigned tile, int row, int chunk) {
        return tile + row * ROW_BYTES + ((chunk * 16) ^ swizzle<ROW_BYTES>(row));
    }

    // The thread's chunks [begin, end). Rows out of bounds and bytes from `width` on become zero.
    __device__ inline void load(int begin, int end, unsigned tile, const Cache& cache, const CacheRows& rows,
                                int first_key, const KeyBounds& bounds) {
        const int own = thread(), row = own / CHUNKS, chunk = own % CHUNKS;
        const bool in_columns = chunk * 16 < rows.width;
        const unsigned own_target = target(tile, row, chunk);
#pragma unroll
        for (int unit = 0; unit < PAGES; ++unit) {
            const int key = first_key + unit * UNIT_ROWS + row;
            const unsigned char* source = rows.data + opaque(cache.kv_head) * rows.head_stride +
                                          opaque(number[unit]) * rows.page_stride +
                                          static_cast<long long>(cache.slot_of(key)) * rows.row_stride + chunk * 16;
#pragma unroll
            for (int step = 0; step < STEPS_PER_UNIT; ++step, source += STEP * rows.row_stride) {
                const int i = unit * STEPS_PER_UNIT + step;
                if (i < begin || i >= end) continue;
                const bool inside = in_columns && bounds.contain(key + step * STEP);
#if SM80
                cp_async_16((own_target + i * STEP * ROW_BYTES) ^ swizzle<ROW_BYTES>(i * STEP), source, inside);
#else
                registers[i % HELD] = inside ? *reinterpret_cast<const uint4*>(source) : make_uint4(0, 0, 0, 0);
#endif
            }
        }
    }

#if SM80
    __device__ inline void start(unsigned tile, const Cache& cache, const CacheRows& rows, int first_key,
                                 const KeyBounds& bounds) {
        load(0, COUNT, tile, cache, rows, first_key, bounds);
    }
#else
    __device__ inline void start(unsigned tile, const Cache& cache, const CacheRows& rows, int first_key,
                                 const KeyBounds& bounds) {
        if (!IN_PARTS) load(0, COUNT, tile, cache, rows, first_key, bounds);
    }
    // Stores what `start` loaded; the arguments are the same.
    __device__ inline void finish(unsigned tile, const Cache& cache, const CacheRows& rows, int first_key,
                                  const KeyBounds& bounds) {
        if (!IN_PARTS) store(0, tile);
#pragma unroll
        for (int begin = 0; IN_PARTS && begin < COUNT; begin += HELD) {
            load(begin, begin + HELD, tile, cache, rows, first_key, bounds);
            store(begin, tile);
        }
    }
    __device__ inline void store(int begin, unsigned tile) {
        const int own = thread();
        const unsigned own_target = target(tile, own / CHUNKS, own % CHUNKS);
#pragma unroll
        for (int i = begin; i < begin + HELD; ++i)
            store_shared((own_target + i * STEP * ROW_BYTES) ^ swizzle<ROW_BYTES>(i * STEP), registers[i % HELD]);
    }
#endif
};

// The scales of a tile's keys, then of its values: float32 [2][KEYS] in shared memory. Nothing without scales.
template <typename STORED, int KEYS, int THREADS>
struct ScaleCopy {
    static constexpr int COUNT = QUANTIZED<STORED> ? (2 * KEYS + THREADS - 1) / THREADS : 0;
#if !SM80
    float registers[COUNT + 1];
#endif

    __device__ inline void start(unsigned scales, const Cache& cache, int first_key, const KeyBounds& bounds) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int index = static_cast<int>(threadIdx.x) % THREADS + i * THREADS;
            const int key = first_key + index % KEYS;
            const bool inside = index < 2 * KEYS && bounds.contain(key);
            const long long page = inside ? cache.page_of(key) : 0;
            const float* source = (index < KEYS ? cache.k_scale : cache.v_scale) + cache.kv_head +
                                  page * cache.scale_page + static_cast<long long>(cache.slot_of(key)) * cache.scale_row;
#if SM80
            if (index < 2 * KEYS) cp_async_4(scales + index * 4, source, inside);
#else
            registers[i] = inside ? *source : 0.f;
#endif
        }
    }

#if !SM80
    __device__ inline void finish(unsigned scales) {
#pragma unroll
        for (int i = 0; i < COUNT; ++i) {
            const int index = static_cast<int>(threadIdx.x) % THREADS + i * THREADS;
            if (index < 2 * KEYS) store_shared(scales + index * 4, __float_as_uint(registers[i]));
        }
    }
#endif
};
