// Rotary position embedding in CUDA C++: q and k in one launch; the gradient is the rotation by the opposite angle.
//
// The kernel moves bytes: every head is read once and written once, and the arithmetic is three operations an element.
// So what counts is how many bytes are under way. A block takes one token, or a few, with all heads of q and k:
//   1. every thread asks for its share of HEADS heads, 16 bytes at a time, and goes on without waiting;
//   2. meanwhile the block finds cos and sin of its tokens, one pair of dims a thread, and leaves them in shared memory,
//      so that they are loaded (or computed) once for all heads;
//   3. every thread rotates what has arrived and stores it.
//
// A block is (column of a head, head, token): threadIdx.x counts vectors of N pairs. In the half layout a vector is N
// elements at pair i and N more at i + rotary / 2; interleaved, it is 2 N elements in a row.

#include "elements.cuh"

constexpr int HEADS = 4;  // heads a thread has under way
constexpr int MAX_THREADS = 256;

// One member of a launch: q or k, where it comes from and where it goes; strides of batch, token and head, in elements.
template <typename T>
struct Heads {
    const T* source;
    T* target;
    Index batch, token, head, target_batch, target_token, target_head;
    int count;
};

// cos and sin of a phase in units of 2^-64 of a full rotation. The product of a position and a frequency in wrapping
// 64-bit integers is such a phase, exactly; in float32 it would be wrong by 0.004 radians at position 131072. The upper 32
// bits give the nearest quarter of a rotation, and what remains is within an eighth: short Taylor series do.
__device__ inline void cos_sin(long long phase, float& cosine, float& sine) {
    const int top = static_cast<int>(phase >> 32);  // in units of 2^-32 of a full rotation
    const int quarter = ((top >> 29) + 1) >> 1;
    const int rest = static_cast<int>(static_cast<unsigned>(top) - (static_cast<unsigned>(quarter) << 30));
    const float x = static_cast<float>(rest) * 1.4629180792671596e-09f;  // radians in [-pi / 4, pi / 4]
    const float y = x * x;
    const float s = x + x * y * (-1.f / 6 + y * (1.f / 120 + y * (-1.f / 5040 + y * (1.f / 362880))));
    const float c = 1.f + y * (-1.f / 2 + y * (1.f / 24 + y * (-1.f / 720 + y * (1.f / 40320))));
    const float real = quarter & 1 ? s : c;
    const float imaginary = quarter & 1 ? c : s;
    cosine = (quarter + 1) & 2 ? -real : real;
    sine = quarter & 2 ? -imaginary : imaginary;
}

// Where the angles come from: `rates` (frequencies in units of 2^-64 rotations a position), or tables of cos and sin.
template <typename C>
struct Angles {
    const C* cos;
    const C* sin;
    const long long* rates;
    const void* positions;  // int64 where `wide`, else int32; none: the token's own index
    Index table_batch, table_row, table_column, position_batch, position_token, table_rows;
    float scaling, sign;  // sign: -1 rotates back
    bool wide;

    __device__ inline Index position(Index batch, Index token) const {
        if (positions == nullptr) return token;
        const Index at = batch * position_batch + token * position_token;
        return wide ? static_cast<const long long*>(positions)[at] : static_cast<const int*>(positions)[at];
    }
    // cos and sin of one pair of a token; NaN where its position is outside the table.
    __device__ inline void find(Index batch, Index position, int pair, float& cosine, float& sine) const {
        if (rates != nullptr) {
            const unsigned long long phase =
                static_cast<unsigned long long>(position) * static_cast<unsigned long long>(rates[pair]);
            cos_sin(static_cast<long long>(phase), cosine, sine);
            cosine *= scaling, sine *= scaling;
        } else if (position >= 0 && position < table_rows) {
            const Index at = batch * table_batch + position * table_row + pair * table_column;
            cosine = to_float(cos[at]), sine = to_float(sin[at]);
        } else {
            cosine = sine = __int_as_float(0x7fc00000);
        }
        sine *= sign;
    }
};

// N pairs of one head. `first` and `second` hold the members of the pairs; interleaved, they lie one after the other.
template <typename T, int N, bool INTERLEAVED>
struct Pairs {
    static constexpr int WIDTH = N == 1 ? 1 : 16 / sizeof(T);  // elements of one access
    static constexpr bool TWO = 2 * N > WIDTH;                 // accesses
    Elements<T, WIDTH> first, second;

    // `half` is rotary / 2, the distance of a pair's members in the half layout.
    __device__ inline void load(const T* head, int pair, int half) {
        first.load(head + (INTERLEAVED ? 2 * pair : pair));
        if (TWO) second.load(head + (INTERLEAVED ? 2 * pair + 1 : half + pair));
    }
    __device__ inline void store(T* head, int pair, int half) const {
        first.store(head + (INTERLEAVED ? 2 * pair : pair));
        if (TWO) second.store(head + (INTERLEAVED ? 2 * pair + 1 : half + pair));
    }
    __device__ inline float get(int i) const { return i < WIDTH ? first.get(i) : second.get(i - WIDTH); }
    __device__ inline void set(int i, float value) {
        if (i < WIDTH) first.set(i, value);
        else second.set(i - WIDTH, value);
    }
    __device__ inline void rotate(const float* cosine, const float* sine) {
#pragma unroll
        for (int i = 0; i < N; ++i) {
            const int one = INTERLEAVED ? 2 * i : i, other = INTERLEAVED ? 2 * i + 1 : i + N;
            const float a = get(one), b = get(other);
            set(one, a * cosine[i] - b * sine[i]);
            set(other, b * cosine[i] + a * sine[i]);
        }
    }
};

// T: type of the heads; C: of the tables; N: pairs of a thread. The dims beyond `rotary` are copied, unless in place.
template <typename T, typename C, int N, bool INTERLEAVED>
__global__ void __launch_bounds__(MAX_THREADS)
rotate_heads(const T* q, const T* k, T* q_out, T* k_out, const C* cos, const C* sin, const long long* rates,
             const void* positions, Index q_batch, Index q_token, Index q_head, Index k_batch, Index k_token,
             Index k_head, Index q_out_batch, Index q_out_token, Index q_out_head, Index k_out_batch,
             Index k_out_token, Index k_out_head, Index table_batch, Index table_row, Index table_column,
             Index position_batch, Index position_token, Index table_rows, int batches, int tokens, int q_heads,
             int k_heads, int head_dim, int rotary, float scaling, float sign, bool wide, bool copy_rest) {
    extern __shared__ __align__(16) unsigned char shared[];
    const Heads<T> queries = {q, q_out, q_batch, q_token, q_head, q_out_batch, q_out_token, q_out_head, q_heads};
    const Heads<T> keys = {k, k_out, k_batch, k_token, k_head, k_out_batch, k_out_token, k_out_head, k_heads};
    const Angles<C> angles = {cos, sin, rates, positions, table_batch, table_row, table_column, position_batch,
                              position_token, table_rows, scaling, sign, wide};
    const int heads = q_heads + k_heads, half = rotary / 2;
    const int columns = blockDim.x * N;  // pairs that the block rotates at a time
    float* cosine = reinterpret_cast<float*>(shared) + threadIdx.z * 2 * columns;
    float* sine = cosine + columns;

    const Index batch = Index(blockIdx.z) * gridDim.y + blockIdx.y;
    const Index token = Index(blockIdx.x) * blockDim.z + threadIdx.z;
    const bool present = batch < batches && token < tokens;
    const Index position = present ? angles.position(batch, token) : 0;

    const auto source = [&](int head) {
        const Heads<T>& of = head < q_heads ? queries : keys;
        return of.source + batch * of.batch + token * of.token + (head < q_heads ? head : head - q_heads) * of.head;
    };
    const auto target = [&](int head) {
        const Heads<T>& of = head < q_heads ? queries : keys;
        return of.target + batch * of.target_batch + token * of.target_token +
               (head < q_heads ? head : head - q_heads) * of.target_head;
    };

    for (int first_pair = 0; first_pair < half; first_pair += columns) {
        const int pair = first_pair + threadIdx.x * N;
        // Every thread takes part in every round, as it must be there at the barrier.
        for (int first_head = 0; first_head < heads; first_head += HEADS * blockDim.y) {
            Pairs<T, N, INTERLEAVED> pairs[HEADS];
#pragma unroll
            for (int i = 0; i < HEADS; ++i) {
                const int head = first_head + i * blockDim.y + threadIdx.y;
                if (present && pair < half && head < heads) pairs[i].load(source(head), pair, half);
            }
            if (first_head == 0) {
                for (int i = threadIdx.y * blockDim.x + threadIdx.x; i < columns; i += blockDim.x * blockDim.y)
                    if (present && first_pair + i < half)
                        angles.find(batch, position, first_pair + i, cosine[i], sine[i]);
                __syncthreads();
            }
#pragma unroll
            for (int i = 0; i < HEADS; ++i) {
                const int head = first_head + i * blockDim.y + threadIdx.y;
                if (!present || pair >= half || head >= heads) continue;
                pairs[i].rotate(cosine + threadIdx.x * N, sine + threadIdx.x * N);
                pairs[i].store(target(head), pair, half);
            }
        }
        __syncthreads();  // all have read cos and sin before the next columns replace them
    }

    if (!copy_rest || !present) return;
    constexpr int WIDTH = Pairs<T, N, INTERLEAVED>::WIDTH;
    for (int head = threadIdx.y; head < heads; head += blockDim.y)
        for (int column = rotary + threadIdx.x * WIDTH; column < head_dim; column += blockDim.x * WIDTH) {
            Elements<T, WIDTH> kept;
            kept.load(source(head) + column);
            kept.store(target(head) + column);
        }
}
