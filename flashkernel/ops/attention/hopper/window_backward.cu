// Gradients of causal attention under a window of at most 129 keys, heads of 64: dQ, dK and dV by one kernel. For sm_90a.
//
// Why: kernels that divide the keys among thread blocks add dQ to a float32 buffer in device memory, which is zeroed before
// and rounded after. Under a window these passes are most of the time. Here a thread block has `chunk` neighboring blocks
// of 64 positions of one kv head and iterates over them: a block of queries i sees keys of blocks i - 2, i - 1 and i alone, so
// that its dQ is complete when it leaves, and so are dK and dV of a block of keys two blocks later. What a thread block
// computes beyond its own positions, S and dP of two blocks at each end, is not stored.
//
// Of each block of queries, and each query head of the kv head:
// - Three consumer warpgroups have a block of keys each; warpgroup w has blocks w, w + 3, ... one after the other:
//       S^T = K Q^T, dP^T = V dO^T, P = exp2(scale log2(e) S - log2(e) LSE), dS = P (dP - delta), dV += P^T dO,
//       dK += dS^T Q
//   S and dP are transposed so that P and dS are left operands of the next products as they lie in registers.
// - dS goes through shared memory to the fourth warpgroup, which computes dQ = dS K over the three blocks of keys, stores
//   it, and has one thread that loads by TMA: Q, dO, -LSE and -delta three steps ahead, K and V one block ahead.
//
// Gradients are the same in every run: nothing is added by atomics.

#include "constants.cuh"
#include "hopper_ptx.cuh"
#include "mma.cuh"
#include "tiles.cuh"
#include "wgmma_registers.cuh"
#include "wgmma_shared.cuh"

constexpr int DIM = 64, BLOCK = 64, OWNERS = 3, THREADS = 128 * (OWNERS + 1);
constexpr int KV_STAGES = 4, STAGES = 4, DS_STAGES = 2, AHEAD = STAGES - 1;
constexpr int OWNER_REGISTERS = 144, DQ_REGISTERS = 80;
constexpr unsigned ROW = 128, TILE = BLOCK * ROW, GROUP_ROWS = 8 * ROW;  // bytes
constexpr unsigned VECTOR = BLOCK * 4;                                   // -LSE, or -delta, of a block

// Byte offsets in shared memory.
constexpr unsigned KV = 0, Q_DO = KV + KV_STAGES * 2 * TILE, DS = Q_DO + STAGES * 2 * TILE;
constexpr unsigned VECTORS = DS + DS_STAGES * OWNERS * TILE, BARRIERS = VECTORS + STAGES * 2 * VECTOR;
constexpr unsigned KV_FULL = BARRIERS, KV_EMPTY = KV_FULL + KV_STAGES * 8, FULL = KV_EMPTY + KV_STAGES * 8;
constexpr unsigned EMPTY = FULL + STAGES * 8, DS_FULL = EMPTY + STAGES * 8, DS_EMPTY = DS_FULL + DS_STAGES * 8;

// The positions of a thread block. Steps are pairs of a block of queries and a query head, in this order.
struct WorkTile {
    int first, end;             // its blocks
    int first_key, last_query;  // blocks of keys begin, blocks of queries end there
    int group;                  // query heads of the kv head

    // The block of keys of warpgroup `owner` beside block `i` of queries; it may be none, or one without keys.
    __device__ inline int key_block(int i, int owner) const { return i - (i + OWNERS - owner) % OWNERS; }
    __device__ inline bool visible(int key_block) const { return key_block >= first_key && key_block < end; }
};

template <typename T>
__device__ inline float2 unpack(unsigned both);
template <>
__device__ inline float2 unpack<__half>(unsigned both) {
    return __half22float2(reinterpret_cast<const __half2&>(both));
}
template <>
__device__ inline float2 unpack<__nv_bfloat16>(unsigned both) {
    return __bfloat1622float2(reinterpret_cast<const __nv_bfloat162&>(both));
}

// Waits for phase `use` of a ring's barrier.
__device__ inline void wait_full(unsigned barriers, int stages, int use) {
    mbarrier_wait(barriers + use % stages * 8, use / stages & 1);
}
__device__ inline void wait_empty(unsigned barriers, int stages, int use) {  // at once in the first pass
    mbarrier_wait(barriers + use % stages * 8, (use / stages & 1) ^ 1);
}

// Stores a tile of accumulators [64 positions, DIM], times `factor`: rows below `rows`, `stride` elements apart.
template <typename T>
__device__ inline void store_tile(const float (&acc)[32], float factor, T* target, Index stride, int rows) {
    const int lane = threadIdx.x % WARP, first_row = threadIdx.x % 128 / WARP * 16 + lane / 4;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = first_row + 8 * half;
#pragma unroll
        for (int group = 0; group < DIM / 8; group += 4) {
            unsigned words[4];
#pragma unroll
            for (int g = 0; g < 4; ++g)
                words[g] = pack<T>(acc[4 * (group + g) + 2 * half] * factor, acc[4 * (group + g) + 2 * half + 1] * factor);
            const uint4 result = transposed_in_quad(words);
            if (row < rows) *reinterpret_cast<uint4*>(target + row * stride + (group + lane % 4) * 8) = result;
        }
    }
}

// One of the three warpgroups that have blocks of keys.
template <typename T>
__device__ inline void compute_keys(const WorkTile& work, int owner, unsigned shared, int window, int length, T* dk, T* dv,
                                    Index stride, float scale) {
    const int warp = threadIdx.x % 128 / WARP, lane = threadIdx.x % WARP;
    float dk_sum[32], dv_sum[32];
    int key_block = -OWNERS, step = 0;  // no block of keys yet

    auto finish_block = [&] {
        if (!work.visible(key_block)) return;
        if (lane == 0) mbarrier_arrive(shared + KV_EMPTY + (key_block - work.first_key) % KV_STAGES * 8);
        if (key_block < work.first) return;
        const Index at = Index(key_block) * BLOCK * stride;
        store_tile(dk_sum, scale, dk + at, stride, length - key_block * BLOCK);
        store_tile(dv_sum, 1.f, dv + at, stride, length - key_block * BLOCK);
    };

    for (int i = work.first; i < work.last_query; ++i) {
        if (work.key_block(i, owner) != key_block) {
            finish_block();
            key_block = work.key_block(i, owner);
#pragma unroll
            for (int x = 0; x < 32; ++x) dk_sum[x] = dv_sum[x] = 0.f;
            if (work.visible(key_block)) wait_full(shared + KV_FULL, KV_STAGES, key_block - work.first_key);
        }
        const bool visible = work.visible(key_block), wants_dq = i < work.end;
        for (int head = 0; head < work.group; ++head, ++step) {
            wait_full(shared + FULL, STAGES, step);
            const unsigned ds_tile = shared + DS + (step % DS_STAGES * OWNERS + owner) * TILE;
            if (!visible) {
                if (lane == 0) mbarrier_arrive(shared + EMPTY + step % STAGES * 8);
                if (!wants_dq) continue;
                wait_empty(shared + DS_EMPTY, DS_STAGES, step);
#pragma unroll
                for (int part = 0; part < 4; ++part)
                    store_shared(ds_tile + part * TILE / 4 + threadIdx.x % 128 * 16, make_uint4(0, 0, 0, 0));
                fence_async_proxy();
                __syncwarp();
                if (lane == 0) mbarrier_arrive(shared + DS_FULL + step % DS_STAGES * 8);
                continue;
            }
            const unsigned k = shared + KV + (key_block - work.first_key) % KV_STAGES * 2 * TILE, v = k + TILE;
            const unsigned q = shared + Q_DO + step % STAGES * 2 * TILE, dout = q + TILE;
            float s[32];  // [64 keys, 64 queries]
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < DIM / 16; ++j)
                wgmma_shared(s, wgmma_descriptor(k + j * 32, ROW, GROUP_ROWS), wgmma_descriptor(q + j * 32, ROW, GROUP_ROWS),
                             j > 0, T());
            wgmma_commit();
            wgmma_wait<0>();
            keep_in_registers(s);

            // s[4 j + 2 half + e] is query 8 j + 2 (lane % 4) + e of key 16 warp + lane / 4 + 8 half.
            const unsigned vectors = shared + VECTORS + step % STAGES * 2 * VECTOR + lane % 4 * 8;
            const int block_distance = (i - key_block) * BLOCK;  // of the blocks
            const bool masked = block_distance == 0 || block_distance + BLOCK > window;
            const int first = block_distance + lane % 4 * 2 - warp * 16 - lane / 4;  // query minus key of s[0]
            unsigned p[16], ds[16];
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float2 lse = load_shared_2_floats(vectors + j * 32);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int x = 4 * j + 2 * half, distance = first + 8 * j - 8 * half;
                    float p0 = exp2_approx(s[x] * (scale * LOG2E) + lse.x);
                    float p1 = exp2_approx(s[x + 1] * (scale * LOG2E) + lse.y);
                    if (masked) {
                        p0 = static_cast<unsigned>(distance) < static_cast<unsigned>(window) ? p0 : 0.f;
                        p1 = static_cast<unsigned>(distance + 1) < static_cast<unsigned>(window) ? p1 : 0.f;
                    }
                    p[2 * j + half] = pack<T>(p0, p1);
                }
            }

            float dp[32];
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < DIM / 16; ++j)
                wgmma_shared(dp, wgmma_descriptor(v + j * 32, ROW, GROUP_ROWS),
                             wgmma_descriptor(dout + j * 32, ROW, GROUP_ROWS), j > 0, T());
            wgmma_commit();
#pragma unroll
            for (int j = 0; j < BLOCK / 16; ++j)  // 16 queries
                wgmma_registers_n_major(dv_sum, p + 4 * j, wgmma_descriptor(dout + j * 16 * ROW, ROW, GROUP_ROWS), 1, T());
            wgmma_commit();
            wgmma_wait<1>();  // dP is there; dV may be under way
            keep_in_registers(dp);
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float2 delta = load_shared_2_floats(vectors + VECTOR + j * 32);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const int x = 4 * j + 2 * half;
                    const float2 both = unpack<T>(p[2 * j + half]);
                    ds[2 * j + half] = pack<T>(both.x * (dp[x] + delta.x), both.y * (dp[x + 1] + delta.y));
                }
            }

            if (wants_dq) {  // dS, not transposed any more: rows of queries
                wait_empty(shared + DS_EMPTY, DS_STAGES, step);
#pragma unroll
                for (int j = 0; j < 8; j += 2) {
                    const int query = 8 * j + lane / 16 * 8 + lane % 8, chunk = warp * 2 + lane / 8 % 2;
                    const unsigned four[4] = {ds[2 * j], ds[2 * j + 1], ds[2 * j + 2], ds[2 * j + 3]};
                    stmatrix_transposed(ds_tile + query * ROW + ((chunk ^ query % 8) << 4), four);
                }
                fence_async_proxy();
                __syncwarp();
                if (lane == 0) mbarrier_arrive(shared + DS_FULL + step % DS_STAGES * 8);
            }

            wgmma_fence();
#pragma unroll
            for (int j = 0; j < BLOCK / 16; ++j)
                wgmma_registers_n_major(dk_sum, ds + 4 * j, wgmma_descriptor(q + j * 16 * ROW, ROW, GROUP_ROWS), 1, T());
            wgmma_commit();
            wgmma_wait<0>();
            keep_in_registers(dv_sum);
            keep_in_registers(dk_sum);
            if (lane == 0) mbarrier_arrive(shared + EMPTY + step % STAGES * 8);
        }
    }
    finish_block();
}

// What the loading thread loads.
struct Sources {
    const TensorMap &q, &dout, &k, &v;
    const float* lse_delta;
    int batches, batch, heads, kv_head, padded;
};

// The step that is loaded next.
struct LoadStep {
    int i, head, step;

    __device__ inline void advance(int group) {
        ++step;
        if (++head == group) head = 0, ++i;
    }
};

__device__ inline void load_keys(const WorkTile& work, const Sources& from, unsigned shared, int key_block) {
    const int use = key_block - work.first_key;
    const unsigned arrived = shared + KV_FULL + use % KV_STAGES * 8, target = shared + KV + use % KV_STAGES * 2 * TILE;
    wait_empty(shared + KV_EMPTY, KV_STAGES, use);
    mbarrier_arrive_expect_bytes(arrived, 2 * TILE);
    tma_load_4d(target, from.k, 0, key_block * BLOCK, from.kv_head, from.batch, arrived);
    tma_load_4d(target + TILE, from.v, 0, key_block * BLOCK, from.kv_head, from.batch, arrived);
}

__device__ inline void load_step(const WorkTile& work, const Sources& from, unsigned shared, LoadStep& next) {
    const unsigned stage = next.step % STAGES, arrived = shared + FULL + stage * 8;
    const unsigned target = shared + Q_DO + stage * 2 * TILE, vectors = shared + VECTORS + stage * 2 * VECTOR;
    const int head = from.kv_head * work.group + next.head, position = next.i * BLOCK;
    const float* lse = from.lse_delta + Index(from.batch * from.heads + head) * from.padded + position;
    wait_empty(shared + EMPTY, STAGES, next.step);
    mbarrier_arrive_expect_bytes(arrived, 2 * TILE + 2 * VECTOR);
    tma_load_4d(target, from.q, 0, position, head, from.batch, arrived);
    tma_load_4d(target + TILE, from.dout, 0, position, head, from.batch, arrived);
    bulk_load(vectors, lse, VECTOR, arrived);
    bulk_load(vectors + VECTOR, lse + Index(from.batches * from.heads) * from.padded, VECTOR, arrived);
    next.advance(work.group);
}

// The fourth warpgroup.
template <typename T>
__device__ inline void compute_dq(const WorkTile& work, const Sources& from, unsigned shared, int length, T* dq, Index stride,
                                  float scale) {
    const int lane = threadIdx.x % WARP;
    const bool loads = threadIdx.x == 128 * OWNERS;
    LoadStep next = {work.first, 0, 0};
    if (loads) {
        for (int key_block = work.first_key; key_block <= work.first; ++key_block) load_keys(work, from, shared, key_block);
        while (next.step < AHEAD && next.i < work.last_query) load_step(work, from, shared, next);
    }
    int step = 0;
    for (int block = work.first; block < work.last_query; ++block)
        for (int head = 0; head < work.group; ++head, ++step) {
            // Or the compiler forms all addresses ahead of the loop over heads, in more registers than there are.
            const int i = opaque(block);
            const bool wants_dq = i < work.end;
            if (wants_dq) wait_full(shared + DS_FULL, DS_STAGES, step);
            // The owners have come to this step: what they read before is free, or will be soon.
            if (loads && head == 0 && i + 1 < work.end) load_keys(work, from, shared, i + 1);
            if (loads && next.i < work.last_query) load_step(work, from, shared, next);
            if (!wants_dq) continue;
            __syncwarp();
            wait_full(shared + KV_FULL, KV_STAGES, max(i - 2, work.first_key) - work.first_key);
            wait_full(shared + KV_FULL, KV_STAGES, max(i - 1, work.first_key) - work.first_key);
            wait_full(shared + KV_FULL, KV_STAGES, i - work.first_key);
            float acc[32];
            wgmma_fence();
#pragma unroll
            for (int back = 0; back < OWNERS; ++back) {  // where there is no such block, dS is zero
                const int use = max(i - back, work.first_key) - work.first_key, owner = (i + OWNERS - back) % OWNERS;
                const unsigned left = shared + DS + (step % DS_STAGES * OWNERS + owner) * TILE;
                const unsigned right = shared + KV + use % KV_STAGES * 2 * TILE;
#pragma unroll
                for (int j = 0; j < BLOCK / 16; ++j)  // 16 keys
                    wgmma_shared_n_major(acc, wgmma_descriptor(left + j * 32, ROW, GROUP_ROWS),
                                         wgmma_descriptor(right + j * 16 * ROW, ROW, GROUP_ROWS), back + j > 0, T());
            }
            wgmma_commit();
            wgmma_wait<0>();
            keep_in_registers(acc);
            if (lane == 0) {
                mbarrier_arrive(shared + DS_EMPTY + step % DS_STAGES * 8);
                if (head == work.group - 1 && i - 2 >= work.first_key)  // no later block of queries sees it
                    mbarrier_arrive(shared + KV_EMPTY + (i - 2 - work.first_key) % KV_STAGES * 8);
            }
            store_tile(acc, scale, dq + Index(i) * BLOCK * stride + head * DIM, stride, length - i * BLOCK);
        }
}

// The maps have boxes of (64, 64 positions, 1 head, 1 batch entry). lse_delta is [2, batch, heads, padded]: -LSE log2(e)
// and -delta. dq is [batch, length, heads, 64], dk and dv have kv_heads. A grid of chunks x kv heads x batch entries.
template <typename T>
__global__ void __launch_bounds__(THREADS, 1)
    attention_window_backward(const __grid_constant__ TensorMap map_q, const __grid_constant__ TensorMap map_do,
                              const __grid_constant__ TensorMap map_k, const __grid_constant__ TensorMap map_v,
                              const float* lse_delta, T* dq, T* dk, T* dv, int batches, int kv_heads, int group, int length,
                              int padded, int window, int chunk, float scale) {
    extern __shared__ __align__(1024) unsigned char memory[];
    const unsigned shared = shared_address(memory);
    const int chunks = gridDim.x / (kv_heads * batches), kv_head = blockIdx.x / chunks % kv_heads;
    const int batch = blockIdx.x / (chunks * kv_heads), heads = kv_heads * group;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < KV_STAGES; ++stage) {
            mbarrier_init(shared + KV_FULL + stage * 8, 1);
            mbarrier_init(shared + KV_EMPTY + stage * 8, 8);  // the warps of its owner and those of dQ
        }
        for (int stage = 0; stage < STAGES; ++stage) {
            mbarrier_init(shared + FULL + stage * 8, 1);
            mbarrier_init(shared + EMPTY + stage * 8, 4 * OWNERS);
        }
        for (int stage = 0; stage < DS_STAGES; ++stage) {
            mbarrier_init(shared + DS_FULL + stage * 8, 4 * OWNERS);
            mbarrier_init(shared + DS_EMPTY + stage * 8, 4);
        }
        fence_mbarrier_init();
    }
    __syncthreads();
    griddepcontrol_wait();  // for lse_delta

    const int blocks = (length + BLOCK - 1) / BLOCK, first = blockIdx.x % chunks * chunk;
    const int end = min(first + chunk, blocks);
    const WorkTile work = {first, end, max(first - 2, 0), min(end + 2, blocks), group};
    const int warpgroup = __shfl_sync(ALL_LANES, threadIdx.x / 128, 0);  // the same for all lanes, as wgmma asks
    if (warpgroup == OWNERS) {
        set_max_registers_down<DQ_REGISTERS>();
        const Sources from = {map_q, map_do, map_k, map_v, lse_delta, batches, batch, heads, kv_head, padded};
        const Index stride = Index(heads) * DIM;
        compute_dq(work, from, shared, length, dq + batch * length * stride + kv_head * group * DIM, stride, scale);
    } else {
        set_max_registers_up<OWNER_REGISTERS>();
        const Index stride = Index(kv_heads) * DIM, at = batch * length * stride + kv_head * DIM;
        compute_keys(work, warpgroup, shared, window, length, dk + at, dv + at, stride, scale);
    }
}
