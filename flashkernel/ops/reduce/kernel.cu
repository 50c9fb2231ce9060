// Reductions over rows in CUDA C++: the kernels of triton/, spelled out thread by thread.
//
// A row is reduced in three steps, each among those who share something (row.cuh has them):
//   1. a thread merges the columns it loads, 16 bytes at a time, in registers;
//   2. a warp merges its 32 threads by shuffles, which pass registers from lane to lane without touching memory;
//   3. a block merges its warps, which meet in shared memory, in a tree that halves the number of partners every round.
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
template <int KIND, bool MASKED, typename W, int N>
__device__ inline void prepare(float (&value)[N], const W* weight, bool wide, float scale, const Shown<N>& shown) {
    if constexpr (KIND == WEIGHTED) {
        float factor[N];
        load_beside(factor, weight, wide);
#pragma unroll
        for (int i = 0; i < N; ++i) value[i] *= factor[i];
    }
    if constexpr (KIND == SOFTMAX) {
#pragma unroll
        for (int i = 0; i < N; ++i) value[i] *= scale;
        if constexpr (MASKED) hide(value, shown);
    }
}

// Block (i, s) reduces columns [s * split_columns, (s + 1) * split_columns) of its rows: to results (first is T*), or, RAW, to the pairs
// first = a and second = b, both float [rows, splits].
template <typename T, typename W, int KIND, bool RAW, bool MASKED>
__global__ void __launch_bounds__(MAX_THREADS)
row_reduce(const T* x, const W* weight, const unsigned char* bits, void* first, float* second, Index x_stride,
           Index weight_stride, Index rows, Index width, Index split_columns, float scale, Index queries, Index middle,
           Index inner, Index outer_stride, Index middle_stride, Index inner_stride, Index column_stride) {
    constexpr int N = PER_LOAD<T>;
    pdl_enter();
    const Index row = Index(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;  // a whole warp, alone with its row: nobody waits for it
    const Index seen = KIND == SOFTMAX || KIND == WEIGHTED ? visible_columns(row, width, queries) : width;
    const Index start = min(seen, blockIdx.y * split_columns), stop = min(seen, start + split_columns);
    if constexpr (MASKED) bits = mask_of(row, bits, middle, inner, outer_stride, middle_stride, inner_stride);
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
    const auto absorb_one = [&](Index column) {
        float value[1] = {to_float(x[column])};
        Shown<1> shown;
        if constexpr (MASKED) shown.load(bits + column * column_stride, column_stride, false);
        prepare<KIND, MASKED>(value, weight + column, false, scale, shown);
        absorb<KIND>(pair, value);
    };
    if (thread < head) absorb_one(start + thread);
    if (tail + thread < stop) absorb_one(tail + thread);
    const bool wide = MASKED ? loads_wide<N>(bits + body, column_stride)
                             : KIND == WEIGHTED && on_16_bytes(weight + body);
    for (int vector = thread; vector < vectors; vector += IN_FLIGHT * threads) {
        Vector<T, N> loaded[IN_FLIGHT];
        Shown<N> shown[IN_FLIGHT];
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {  // all loads first: they wait for the memory together
            const int mine = vector + i * threads;
            const Index column = body + Index(mine) * N;
            if (mine < vectors) loaded[i].load(x + column);
            if (MASKED && mine < vectors) shown[i].load(bits + column * column_stride, column_stride, wide);
        }
#pragma unroll
        for (int i = 0; i < IN_FLIGHT; ++i) {
            const int mine = vector + i * threads;
            if (mine >= vectors) break;
            float value[N];
            loaded[i].unpack(value);
            prepare<KIND, MASKED>(value, weight + body + Index(mine) * N, wide, scale, shown[i]);
            absorb<KIND>(pair, value);
        }
    }

    pair = merge_threads<KIND, true>(pair);
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
    pdl_enter();
    const Index row = Index(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    Pair pair = nothing<KIND>();
    for (Index place = row * splits + threadIdx.x; place < (row + 1) * splits; place += WARP) {
        pair = merge<KIND>(pair, {a[place], b[place]});
    }
    pair = merge_threads<KIND, false>(pair);
    if (threadIdx.x == 0) finish<T, KIND>(first, second, row, pair, width);
}

// What a row of the softmax sees: all of it, the columns up to its own, or (of those, if causal) what a mask shows.
enum Masking { ALL, CAUSAL, MASKED };

// The softmax of rows that fit the registers of a block: one read, one exponential a column, one write. N is
// PER_LOAD<T> where rows are made of whole vectors, else 1; thread t holds the N columns from t * N on, from
// (t + threads) * N on, ...
template <typename T, int N, int ITEMS, int MASKING>
__global__ void __launch_bounds__(MAX_THREADS)
row_softmax(const T* x, const unsigned char* bits, T* y, Index x_stride, Index rows, int width, float scale,
            Index queries, Index middle, Index inner, Index outer_stride, Index middle_stride, Index inner_stride,
            Index column_stride) {
    pdl_enter();
    const Index row = Index(blockIdx.x) * blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const int seen = MASKING == ALL ? width : visible_columns(row, width, queries);
    const int first = threadIdx.x * N, step = blockDim.x * N;
    x += row * x_stride;
    y += row * width;

    Vector<T, N> loaded[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (first + i * step < seen) loaded[i].load(x + first + i * step);
    }
    Shown<N> shown[ITEMS];
    if constexpr (MASKING == MASKED) {  // where the mask begins is worked out while x is under way
        bits = mask_of(row, bits, middle, inner, outer_stride, middle_stride, inner_stride);
        const bool wide = loads_wide<N>(bits, column_stride);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const int column = first + i * step;
            if (column < seen) shown[i].load(bits + column * column_stride, column_stride, wide);
        }
    }
    if constexpr (MASKING != ALL) {  // what is not seen is known already
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            const float zeros[N] = {};
            if (first + i * step >= seen && first + i * step < width) store(y + first + i * step, zeros);
        }
    }

    // A positive scale can wait until the largest value is subtracted, which is exact: no large number is ever rounded.
    const bool rising = scale > 0.f;
    const float unit = rising ? scale * LOG2E : LOG2E;
    float value[ITEMS][N], top = -infinity();
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int left = seen - (first + i * step);  // columns seen from here on
        if (left <= 0) break;
        loaded[i].unpack(value[i]);
        if (!rising) {
#pragma unroll
            for (int j = 0; j < N; ++j) value[i][j] *= scale;
        }
        if constexpr (MASKING == MASKED) hide(value[i], shown[i]);
        if (MASKING != ALL && left < N) {  // the diagonal passes through this vector
#pragma unroll
            for (int j = 1; j < N; ++j) value[i][j] = j < left ? value[i][j] : -infinity();
        }
        float highest = value[i][0];
#pragma unroll
        for (int j = 1; j < N; ++j) highest = fmaxf(highest, value[i][j]);
        top = fmaxf(top, highest);
    }
    const float base = finite<SOFTMAX>(row_join<Larger<SOFTMAX>>(top));
    float total = 0.f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (first + i * step >= seen) break;
#pragma unroll
        for (int j = 0; j < N; ++j) {
            value[i][j] = exp2_approx((value[i][j] - base) * unit);
            total += value[i][j];
        }
    }
    total = row_join<Plus>(total);
    const float factor = inverse(total);
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (first + i * step >= seen) break;
#pragma unroll
        for (int j = 0; j < N; ++j) value[i][j] *= factor;
        store(y + first + i * step, value[i]);
    }
}

// dx = y * (dy - sum(y * dy)) * scale. What the mask hides has y = 0, so the mask is not read again.
template <typename T, int N, int ITEMS>
__global__ void __launch_bounds__(MAX_THREADS)
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
    along = row_join<Plus>(along);
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
// Block (b, i, j) has some of the columns of row j * gridDim.y + i: a grid of rows is two-dimensional because neither
// dimension but the first may exceed 65535.
template <typename T, int N, int KIND, int ITEMS, bool MASKED>
__global__ void __launch_bounds__(MAX_THREADS)
spread_rows(const T* x, const T* dy, const unsigned char* bits, const void* first, const float* second, T* result,
            Index x_stride, Index dy_stride, Index rows, Index width, int splits, float scale, Index queries,
            Index middle, Index inner, Index outer_stride, Index middle_stride, Index inner_stride,
            Index column_stride) {
    pdl_enter();
    const Index row = Index(blockIdx.z) * gridDim.y + blockIdx.y;
    if (row >= rows) return;
    const int step = blockDim.x * N;
    const Index start = Index(blockIdx.x) * ITEMS * step + threadIdx.x * N;  // this thread's first column
    const Index seen = KIND >= SOFTMAX ? visible_columns(row, width, queries) : width;
    const Index most = Index(ITEMS) * step;
    const int inside = min(width - start, most), visible = max(-most, min(seen - start, most));  // from there on
    x += row * x_stride + start;
    dy += row * dy_stride;
    result += row * width + start;
    Vector<T, N> loaded[ITEMS], gradient[ITEMS];
    Shown<N> shown[ITEMS];
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (i * step >= visible) break;
        loaded[i].load(x + i * step);
        if constexpr (KIND == SOFTMAX_BACKWARD) gradient[i].load(dy + start + i * step);
    }
    if constexpr (MASKED) {
        bits = mask_of(row, bits, middle, inner, outer_stride, middle_stride, inner_stride) + start * column_stride;
        const bool wide = loads_wide<N>(bits, column_stride);
#pragma unroll
        for (int i = 0; i < ITEMS; ++i) {
            if (i * step < visible) shown[i].load(bits + i * step * column_stride, column_stride, wide);
        }
    }

    // Every warp merges the pairs of its row anew: they are few, and in the cache.
    constexpr int MERGED = KIND == SOFTMAX_BACKWARD ? SUM : SOFTMAX;
    Pair pair = nothing<MERGED>();
    if constexpr (KIND >= SOFTMAX) {
        const float* a = static_cast<const float*>(first) + row * splits;
        const float* b = second + row * splits;
        if (splits == 1) {
            pair = {a[0], b[0]};
        } else {
            for (int split = threadIdx.x % WARP; split < splits; split += WARP) {
                pair = merge<MERGED>(pair, {a[split], b[split]});
            }
            pair = merge_threads<MERGED, false>(pair);
        }
    }
    const float top = KIND == MAX ? to_float(static_cast<const T*>(first)[row]) : finite<SOFTMAX>(pair.a);
    const float factor = inverse(pair.b);
    const float share = KIND == MAX ? to_float(dy[row]) / second[row] : KIND == LOGSUMEXP ? to_float(dy[row]) : 0.f;
    const float total = KIND == LOGSUMEXP ? finite<SOFTMAX>(second[row]) : 0.f;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        if (i * step >= inside) return;
        const int left = visible - i * step;  // columns seen from here on
        float value[N], answer[N] = {}, g[N];
        if (left > 0) {
            loaded[i].unpack(value);
            if constexpr (KIND == SOFTMAX_BACKWARD) gradient[i].unpack(g);
#pragma unroll
            for (int j = 0; j < N; ++j) {
                if (KIND == MAX) answer[j] = (value[j] == top ? 1.f : 0.f) * share;
                if (KIND == LOGSUMEXP) answer[j] = exponential(value[j] - total) * share;
                if (KIND == SOFTMAX) answer[j] = exponential(value[j] * scale - top) * factor;
                if (KIND == SOFTMAX_BACKWARD) answer[j] = value[j] * (g[j] - pair.a) * scale;
                if (MASKED && !shown[i][j]) answer[j] = 0.f;
            }
            if (KIND >= SOFTMAX && left < N) {  // the diagonal passes through this vector
#pragma unroll
                for (int j = 1; j < N; ++j) answer[j] = j < left ? answer[j] : 0.f;
            }
        }
        store(result + i * step, answer);
    }
}

// The way back of the weighted sum: dx[r, c] = dy[r] * weight[c], dweight[c] = sum over r of dy[r] * x[r, c]. Block
// (i, w) owns N columns a thread and loops over its part of the rows, adding dweight in registers; partial, [row_programs,
// width], takes the sums (OUT is W where one row_program's share is everything). A null dx or partial is not wanted.
template <typename T, typename W, typename OUT, int N>
__global__ void __launch_bounds__(MAX_THREADS)
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
