// Reductions over rows in CUDA C++: the kernels of triton/, spelled out thread by thread.
//
// A row is reduced in three steps, each among those who share something (row.cuh has them):
//   1. a thread merges the columns it loads, 16 bytes at a time, in registers;
//   2. a warp merges its 32 threads by shuffles, which pass registers from lane to lane without touching memory;
//   3. a block merges its warps through shared memory, in a tree that halves the number of partners every round.
// Where several blocks share a row, a second kernel merges what they left. The order, and so every bit, is fixed.
//
// A block is (threads per row, rows): one row for wide rows, several rows of a warp each for narrow ones. Threads per
// row are a power of two, and a warp at least.

#include "row.cuh"

template <typename T, int KIND>
__device__ inline void finish(T* first, float* second, Index row, Pair pair, Index width) {
    float result = pair.a;
    if constexpr (KIND == MEAN) result = pair.a / width;
    if constexpr (KIND == LOGSUMEXP) result = finite<KIND>(pair.a) + logf(pair.b);
    assign(first[row], result);
    if constexpr (KIND == MAX) second[row] = pair.b;
    if constexpr (KIND == LOGSUMEXP) second[row] = result;
}

// What N columns of x become before they are merged: times their weights, or the softmax's scores.
template <int KIND, typename W, int N>
__device__ inline void prepare(float (&value)[N], Index column, const W* weight, bool wide, float scale,
                               const unsigned char* bits, Index column_stride) {
    if constexpr (KIND == WEIGHTED) {
        float factor[N];
        load_beside(factor, weight + column, wide);
#pragma unroll
        for (int i = 0; i < N; ++i) value[i] *= factor[i];
    }
    if constexpr (KIND == SOFTMAX) {
#pragma unroll
        for (int i = 0; i < N; ++i) value[i] *= scale;
        hide(value, column, bits, column_stride);
    }
}

// Block (i, s) reduces columns [s * span, (s + 1) * span) of its rows: to results (first is T*), or, RAW, to the pairs
// first = a and second = b, both float [rows, splits].
template <typename T, typename W, int KIND, bool RAW>
__global__ void __launch_bounds__(MOST_THREADS)
row_reduce(const T* x, const W* weight, const unsigned char* bits, void* first, float* second, Index x_stride,
           Index weight_stride, Index rows, Index width, Index span, float scale, Index queries, Index middle,
           Index inner, Index outer_stride, Index middle_stride, Index inner_stride, Index column_stride) {
    constexpr int N = PER_LOAD<T>;
    const Index row = Index(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;  // a whole warp, alone with its row: nobody waits for it
    const Index seen = visible_columns(row, width, queries);
    const Index start = min(seen, blockIdx.y * span), stop = min(seen, start + span);
    bits = mask_of(row, bits, middle, inner, outer_stride, middle_stride, inner_stride);
    x += row * x_stride;
    weight += row * weight_stride;

    // A row begins where it likes. Before the first 16-byte boundary (head) and after the last (tail) there are fewer
    // than N columns each: one for each of the first threads. The body between is loaded in vectors.
    const int misplaced = reinterpret_cast<unsigned long long>(x + start) % 16 / sizeof(T);
    const int head = min(stop - start, Index(misplaced ? N - misplaced : 0));
    const Index body = start + head;
    const int vectors = (stop - body) / N, thread = threadIdx.x, threads = blockDim.x;
    const Index tail = body + Index(vectors) * N;

    Pair pair = nothing<KIND>();
    if (thread < head) {
        float value[1] = {to_float(x[start + thread])};
        prepare<KIND>(value, start + thread, weight, false, scale, bits, column_stride);
        absorb<KIND>(pair, value);
    }
    if (tail + thread < stop) {
        float value[1] = {to_float(x[tail + thread])};
        prepare<KIND>(value, tail + thread, weight, false, scale, bits, column_stride);
        absorb<KIND>(pair, value);
    }
    const bool wide = KIND == WEIGHTED && on_16_bytes(weight + body);
    for (int vector = thread; vector < vectors; vector += IN_FLIGHT * threads) {
        Vector<T, N> loaded[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {  // all loads first: they wait for the memory together
            const int mine = vector + i * threads;
            if (mine < vectors) loaded[i].load(x + body + Index(mine) * N);
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const int mine = vector + i * threads;
            if (mine >= vectors) break;
            float value[N];
            loaded[i].unpack(value);
            prepare<KIND>(value, body + Index(mine) * N, weight, wide, scale, bits, column_stride);
            absorb<KIND>(pair, value);
        }
    }

    pair = row_merge<KIND>(pair);
    if (thread != 0) return;
    if constexpr (RAW) {
        static_cast<float*>(first)[row * gridDim.y + blockIdx.y] = pair.a;
        second[row * gridDim.y + blockIdx.y] = pair.b;
    } else {
        finish<T, KIND>(static_cast<T*>(first), second, row, pair, width);
    }
}

// Merge the pairs [rows, splits] of rows that several blocks shared; a warp for each row.
template <typename T, int KIND>
__global__ void finish_rows(const float* a, const float* b, T* first, float* second, Index rows, Index width,
                            int splits) {
    const Index row = Index(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    Pair pair = nothing<KIND>();
    for (Index place = row * splits + threadIdx.x; place < (row + 1) * splits; place += WARP) {
        pair = merge<KIND>(pair, {a[place], b[place]});
    }
    pair = warp_merge<KIND>(pair);
    if (threadIdx.x == 0) finish<T, KIND>(first, second, row, pair, width);
}

// The softmax of rows that fit the registers of a block: one read, one write. N is PER_LOAD<T> where rows are made of
// whole vectors, else 1; thread t holds the N columns from t * N on, from (t + threads) * N on, ... PLAIN: no mask, not
// causal. The row is held as it was loaded, and unpacked for each of the three passes: largest value, sum, result.
template <typename T, int N, int ITEMS, bool PLAIN>
__global__ void __launch_bounds__(MOST_THREADS)
row_softmax(const T* x, const unsigned char* bits, T* y, Index x_stride, Index rows, int width, float scale,
            Index queries, Index middle, Index inner, Index outer_stride, Index middle_stride, Index inner_stride,
            Index column_stride) {
    static_assert(N * ITEMS <= 32, "which columns are seen is one word a thread");
    const Index row = Index(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const int seen = PLAIN ? width : visible_columns(row, width, queries);
    bits = PLAIN ? nullptr : mask_of(row, bits, middle, inner, outer_stride, middle_stride, inner_stride);
    x += row * x_stride;
    y += row * width;

    Vector<T, N> loaded[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = (threadIdx.x + i * blockDim.x) * N;
        if (column < seen) loaded[i].load(x + column);
    }
    unsigned shown = 0;  // a bit for each column
    float top = -infinity();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = (threadIdx.x + i * blockDim.x) * N;
        if (column >= seen) break;
        float value[N];
        loaded[i].unpack(value);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            if (!PLAIN && (column + j >= seen || (bits && !bits[(column + j) * column_stride]))) continue;
            shown |= 1u << (i * N + j);
            top = fmaxf(top, value[j] * scale);
        }
    }
    const float base = finite<SOFTMAX>(top);
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = (threadIdx.x + i * blockDim.x) * N;
        if (column >= seen) break;
        float value[N];
        loaded[i].forget();
        loaded[i].unpack(value);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float power = exponential(value[j] * scale - base);
            total += PLAIN || shown >> (i * N + j) & 1u ? power : 0.f;
        }
    }
    const Pair pair = row_merge<SOFTMAX>({top, total});
    const float highest = finite<SOFTMAX>(pair.a), factor = pair.b == 0.f ? 0.f : 1.f / pair.b;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = (threadIdx.x + i * blockDim.x) * N;
        if (column >= width) break;
        float value[N];
        loaded[i].forget();
        loaded[i].unpack(value);
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const float power = exponential(value[j] * scale - highest) * factor;
            value[j] = PLAIN || shown >> (i * N + j) & 1u ? power : 0.f;
        }
        store(y + column, value);
    }
}

// dx = y * (dy - sum(y * dy)) * scale. What the mask hides has y = 0, so the mask is not read again.
template <typename T, int N, int ITEMS>
__global__ void __launch_bounds__(MOST_THREADS)
row_softmax_backward(const T* dy, const T* y, T* dx, Index dy_stride, Index y_stride, Index rows, int width,
                     float scale, Index queries) {
    const Index row = Index(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const int seen = visible_columns(row, width, queries);
    y += row * y_stride;
    dy += row * dy_stride;
    dx += row * width;

    Vector<T, N> weight[ITEMS], gradient[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = (threadIdx.x + i * blockDim.x) * N;
        if (column < seen) weight[i].load(y + column), gradient[i].load(dy + column);
    }
    float p[N], g[N], along = 0.f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if ((threadIdx.x + i * blockDim.x) * N >= seen) break;
        weight[i].unpack(p), gradient[i].unpack(g);
#pragma unroll
        for (int j = 0; j < N; ++j) along += p[j] * g[j];
    }
    along = row_merge<SUM>({along, 0.f}).a;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int column = (threadIdx.x + i * blockDim.x) * N;
        if (column >= width) break;
        weight[i].forget(), gradient[i].forget();
        weight[i].unpack(p), gradient[i].unpack(g);
#pragma unroll
        for (int j = 0; j < N; ++j) p[j] = column >= seen ? 0.f : p[j] * (g[j] - along) * scale;
        store(dx + column, p);
    }
}

// Back from a row's numbers to the row, ITEMS times N columns a thread:
//   max               dx = (x == first) * dy / second      first: the maximum (T), second: how often it occurs
//   logsumexp         dx = exp(x - second) * dy            second: the logsumexp in float
//   softmax           y = exp(scale * x - a) / b           (a, b) merged from the pairs [rows, splits]
//   softmax backward  dx = x * (dy - a) * scale            x: the softmax itself, a: sum(x * dy), merged likewise
template <typename T, int N, int KIND, int ITEMS>
__global__ void __launch_bounds__(MOST_THREADS)
spread_rows(const T* x, const T* dy, const unsigned char* bits, const void* first, const float* second, T* result,
            Index x_stride, Index dy_stride, Index width, Index blocks, int splits, float scale, Index queries,
            Index middle, Index inner, Index outer_stride, Index middle_stride, Index inner_stride,
            Index column_stride) {
    const Index row = blockIdx.x / blocks;
    const Index start = (blockIdx.x % blocks * ITEMS * blockDim.x + threadIdx.x) * N, step = Index(blockDim.x) * N;
    const Index seen = visible_columns(row, width, queries);
    x += row * x_stride;
    Vector<T, N> loaded[ITEMS], gradient[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const Index column = start + i * step;
        if (column < seen) loaded[i].load(x + column);
        if (KIND == SOFTMAX_BACKWARD && column < seen) gradient[i].load(dy + row * dy_stride + column);
    }

    // Every block of a row merges its pairs anew: they are few, and in the cache.
    constexpr int MERGED = KIND == SOFTMAX_BACKWARD ? SUM : SOFTMAX;
    Pair pair = nothing<MERGED>();
    if constexpr (KIND >= SOFTMAX) {
        for (int split = threadIdx.x; split < splits; split += blockDim.x) {
            const Index place = row * splits + split;
            pair = merge<MERGED>(pair, {static_cast<const float*>(first)[place], second[place]});
        }
        pair = row_merge<MERGED>(pair);
    }
    const float top = KIND == MAX ? to_float(static_cast<const T*>(first)[row]) : finite<SOFTMAX>(pair.a);
    const float inverse = pair.b == 0.f ? 0.f : 1.f / pair.b;
    const float share = KIND == MAX ? to_float(dy[row]) / second[row] : KIND == LOGSUMEXP ? to_float(dy[row]) : 0.f;
    const float total = KIND == LOGSUMEXP ? finite<SOFTMAX>(second[row]) : 0.f;
    if constexpr (KIND == SOFTMAX) bits = mask_of(row, bits, middle, inner, outer_stride, middle_stride, inner_stride);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const Index column = start + i * step;
        if (column >= width) return;
        float value[N], answer[N], g[N];
        if (column < seen) {
            loaded[i].unpack(value);
            if constexpr (KIND == SOFTMAX_BACKWARD) gradient[i].unpack(g);
        }
#pragma unroll
        for (int j = 0; j < N; ++j) {
            const bool hidden = column + j >= seen || (KIND == SOFTMAX && bits && !bits[(column + j) * column_stride]);
            if (KIND == MAX) answer[j] = (value[j] == top ? 1.f : 0.f) * share;
            if (KIND == LOGSUMEXP) answer[j] = exponential(value[j] - total) * share;
            if (KIND == SOFTMAX) answer[j] = hidden ? 0.f : exponential(value[j] * scale - top) * inverse;
            if (KIND == SOFTMAX_BACKWARD) answer[j] = hidden ? 0.f : value[j] * (g[j] - pair.a) * scale;
        }
        store(result + row * width + column, answer);
    }
}

// The way back of the weighted sum: dx[r, c] = dy[r] * weight[c], dweight[c] = sum over r of dy[r] * x[r, c]. Block
// (i, w) owns N columns a thread and walks over its share of the rows, adding dweight in registers; partial, [walkers,
// width], takes the sums (OUT is W where one walker's share is everything). A null dx or partial is not wanted.
template <typename T, typename W, typename OUT, int N>
__global__ void __launch_bounds__(MOST_THREADS)
weighted_backward(const T* dy, const T* x, const W* weight, T* dx, OUT* partial, Index x_stride, Index rows,
                  Index width) {
    const Index column = (Index(blockIdx.x) * blockDim.x + threadIdx.x) * N;
    if (column >= width) return;
    float total[N] = {}, factor[N];
    load_beside(factor, weight + column, N > 1 && on_16_bytes(weight));
    x += column;
    for (Index begin = Index(blockIdx.y) * IN_FLIGHT; begin < rows; begin += Index(gridDim.y) * IN_FLIGHT) {
        Vector<T, N> loaded[IN_FLIGHT];
        float gradient[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const Index row = begin + i;
            gradient[i] = row < rows ? to_float(dy[row]) : 0.f;
            if (partial != nullptr && row < rows) loaded[i].load(x + row * x_stride);
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const Index row = begin + i;
            if (row >= rows) break;
            float value[N];
            if (partial != nullptr) {
                loaded[i].unpack(value);
#pragma unroll
                for (int j = 0; j < N; ++j) total[j] += value[j] * gradient[i];
            }
            if (dx != nullptr) {
#pragma unroll
                for (int j = 0; j < N; ++j) value[j] = factor[j] * gradient[i];
                store(dx + row * width + column, value);
            }
        }
    }
    if (partial == nullptr) return;
#pragma unroll
    for (int j = 0; j < N; ++j) assign(partial[blockIdx.y * width + column + j], total[j]);
}

// result[c] = sum over r of partial[r, c]. A block is 32 columns by 8 shares of the rows: loads stay coalesced, and a
// tree in shared memory adds the shares.
template <typename W>
__global__ void column_sum(const float* partial, W* result, Index rows, Index width) {
    __shared__ float share[8][WARP];
    const Index column = Index(blockIdx.x) * WARP + threadIdx.x;
    float total = 0.f;
    if (column < width) {
        for (Index row = threadIdx.y; row < rows; row += 8) total += partial[row * width + column];
    }
    share[threadIdx.y][threadIdx.x] = total;
    for (int half = 4; half > 0; half /= 2) {
        __syncthreads();
        if (threadIdx.y < half) share[threadIdx.y][threadIdx.x] += share[threadIdx.y + half][threadIdx.x];
    }
    if (threadIdx.y == 0 && column < width) assign(result[column], share[0][threadIdx.x]);
}
