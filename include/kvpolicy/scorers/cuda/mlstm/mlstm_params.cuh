// What the kernels of an mLSTM scorer know of a call, and the notation they share.
//
// Chunks of 64 tokens, as on the host (scorers/host/mlstm_chunkwise.hpp): with b_l the running sum of log f
// in the chunk,
//
//     s_j = log i_j - b_j,  top_l = max_{j <= l} s_j,  M_l = max(m, top_l)   m: stabilizer before the chunk
//     q~^T C_l = exp(m - M_l) q~^T C + sum_{j <= l} exp(s_j - M_l) (q~ . k~_j) v~_j
//
// Output l of a chunk is the query of token first + l - delay, right after token first + l. Gates and
// stabilizers are doubles. Query rows stand where they are read, so every kernel finds its chunk's rows
// together.
//
// States are stored in 16 bits, as deviations. Where one token has nearly all the weight, an output is that
// token's value, what the loss says of the token's weight is a difference d N . (v~ - h) of nearly equal
// numbers, and the rounding of C and A would be all that is left of it. So a chunk has a reference value
// ref_value, the value of the reference token before it (the one with the largest weight) times that token's
// share of all weights:
//
//     stored: C - z ref_value^T, rounded, and z; of the backward state A, rounded, and a + (A - A rounded)
//         ref_value
//
// whose errors go with v~ - ref_value, as the differences themselves do. Where no token has most of the
// weight, ref_value is near 0.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/scorers/cuda/common/device_scorer.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_params.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_tile.cuh>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// What features, values and states are stored in: bf16 for 16-bit rows of either kind, since a sum of many
/// tokens may be larger than fp16's numbers.
template <class T>
using mlstm_element = std::conditional_t<std::is_same_v<T, float>, float, bf16>;

/// A chunk's numbers. The scan over chunks: state <- keep * state + add * what the chunk adds.
struct mlstm_chunk_stats {
    double top;        // of its last token
    double forgotten;  // b of its last token
    double m;          // the stabilizer before it
    float keep, add;
    float weights;  // of its tokens, sum of exp(s_j - top)
    // ref_weight: of the reference token in the weights before it; 0 where there is none
    float ref_weight;
    std::int32_t ref_token;  // its token with the largest weight
    // the reference token (ref_token) before it, a row of the plane; -1 where there is none
    std::int32_t before;
    std::int32_t bad;           // its first token that is not finite; scorer_chunk where there is none
    std::int32_t first_output;  // the first l that reads a token; scorer_chunk where none does
    std::int32_t count;         // its tokens
    std::int32_t fresh;         // the state before it is empty
};

template <class T>
struct mlstm_params {
    using E = mlstm_element<T>;

    scorer_streams streams;
    scorer_source<T> source;
    std::int32_t features = 0, width = 0, projection = 0;  // d_qk, d_v, and rows of Wq
    bool hedgehog = false;
    float gate_softcap = 0.0f;
    // Weights: stacked in T, [q | skip] and [k | v | i | f], and the arrays that are read in fp32.
    const T* stack_q = nullptr;  // [heads, rows_q, source.padded]
    const T* stack_k = nullptr;  // [heads, rows_k, source.padded]
    std::int32_t rows_q = 0, rows_k = 0, at_skip = 0, at_v = 0, at_i = 0, at_f = 0;
    std::int32_t used_q = 0, used_k = 0;  // of these rows, multiples of 16
    const float *w_i = nullptr, *b_i = nullptr, *w_f = nullptr, *b_f = nullptr, *skip = nullptr;
    const float *norm_gain = nullptr, *readout = nullptr, *readout_bias = nullptr;
    bool centered = false;  // the norm is a LayerNorm: the mean of h is taken from it first
    std::int32_t ahead =
        0;  // blocks that run at once: what one of so many later loads is brought to the L2 cache
    float* states = nullptr;  // the caller's [B, Hkv, features (width + 1) + 2], or null
    plane_view<float> scores;
    // A cache's chunk (score_chunk_params): all its streams go on from states, and an output is the query of
    // the key that leaves the window with its token. Null for sequences.
    const leaving_key<T>* leaving = nullptr;      // [planes, streams.length]
    const std::int32_t* first_leaving = nullptr;  // [planes]
    const chunk_state* cached_states = nullptr;   // [planes]
    packed_rows packed{};                         // of the source's k and v

    // Workspace. Rows are [planes, chunks * 64], chunks [planes, chunks]; F and V are the compiled widths.
    E *q = nullptr, *k = nullptr, *v = nullptr;  // rows x F, F, V
    double *log_source = nullptr, *log_top = nullptr;
    float* weight = nullptr;   // exp(s_j - top of the last)
    float* skipped = nullptr;  // skip . x of the query
    /// chunks x F V: C before them, less z ref_value^T; [F][V], for Hopper's kernels as it
    /// stands in their tiles.
    E* memory = nullptr;
    float* sums = nullptr;  // chunks x F: z before them
    mlstm_chunk_stats* chunk_stats = nullptr;

    // Scans over the chunks go in segments, all of them at once. The states that segments begin with,
    // [planes, segments][F (V + 1)], the sums last; before they are added up, number i is what segment i - 1
    // adds, and number 0 the caller's. And what segments keep.
    std::int32_t segments = 1, segment_chunks = 0;
    std::int32_t cuts = 1;  // parts of a segment that are added up apart, and then count as segments here
    // What fused_states_outputs on Hopper makes: scores; states in `memory`.
    bool fused_writes_scores = true, fused_writes_states = false;
    float* partial_states = nullptr;
    float* partial_keeps = nullptr;  // [planes, segments]; below 0: a stream begins there, nothing

    // The backward pass.
    plane_view<const float> d_scores;
    float *slope_i = nullptr, *slope_f = nullptr;  // rows: d log i / d preactivation, d log f alike
    E* d_n = nullptr;                              // rows x V: d N_l
    float *state_decay = nullptr, *d_g = nullptr;  // rows: exp(m - M_l), d g_l
    float* cross_chunk = nullptr;                  // rows: pairs of an output with tokens before its chunk
    E* d_memory = nullptr;    // chunks x F V, as memory: what later outputs say of the state after them (A)
    float* d_sums = nullptr;  // chunks x sum_parts x F: parts of a + (A - A rounded) ref_value
    std::int32_t sum_parts = 1;  // whose sum it is
    float* d_across = nullptr;   // chunks x F V / 4096, on Hopper: parts of the sum of pairs across the chunk
    /// rows x rows_q, rows_k, of which used_q, used_k are written: gradients of the stacks' products
    T *d_rows_q = nullptr, *d_rows_k = nullptr;
    float* d_readout = nullptr;  // chunks x (2 width + 1): readout, norm_gain, readout_bias
    float* d_gates = nullptr;    // chunks x 2: b_i, b_f

    [[nodiscard]] __device__ std::int64_t chunk(const scorer_span& s) const {
        return std::int64_t{s.plane} * streams.chunks + s.chunk_index;
    }
    /// The first l of a chunk with an output; s.count or more: none has.
    [[nodiscard]] __device__ std::int32_t first_output(const scorer_span& s) const {
        return first_leaving == nullptr ? streams.first_read(s) : max(0, first_leaving[s.plane] - s.first);
    }
    /// Numbers of a state as the caller has it.
    [[nodiscard]] __device__ std::int64_t state_size() const {
        return std::int64_t{features} * (width + 1) + 2;
    }
    /// The caller's state that a plane's tokens go on from; null: they begin with none.
    [[nodiscard]] __device__ const float* state_before(std::int32_t plane) const {
        if (cached_states != nullptr) {
            return cached_states[plane].before;
        }
        return states != nullptr && streams.start_of(plane / streams.heads) > 0
                   ? states + plane * state_size()
                   : nullptr;
    }
    /// Where the state after a plane's tokens goes; null where the caller's stays as it is: without tokens,
    /// and where the call's lengths cannot be.
    [[nodiscard]] __device__ float* state_after(std::int32_t plane) const {
        const std::int32_t b = plane / streams.heads;
        if (cached_states != nullptr) {
            return streams.length_of(b) > 0 ? cached_states[plane].after : nullptr;
        }
        return states != nullptr && streams.sound(b) && (streams.length_of(b) > 0 || streams.start_of(b) == 0)
                   ? states + plane * state_size()
                   : nullptr;
    }
    /// Features are kept in F columns; Hedgehog's halves begin at 0 and F / 2. The number of column i, or -1.
    __device__ std::int32_t feature_of(std::int32_t i, std::int32_t tile) const {
        if (!hedgehog) {
            return i < features ? i : -1;
        }
        const std::int32_t half = tile / 2, inside = i % half;
        return inside < projection ? i / half * projection + inside : -1;
    }
};

/// Two neighboring elements of a row in global memory.
template <class E>
__device__ inline void store_pair(E* to, float first, float second) {
    if constexpr (std::is_same_v<E, float>) {
        to[0] = first;
        to[1] = second;
    } else {
        *reinterpret_cast<std::uint32_t*>(to) = pack<E>(first, second);
    }
}

/// Eight neighboring elements of a row in global memory.
template <class E>
__device__ inline void store_eight(E* to, const float (&x)[8]) {
    if constexpr (std::is_same_v<E, float>) {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            to[e] = x[e];
        }
    } else {
        *reinterpret_cast<uint4*>(to) =
            make_uint4(pack<E>(x[0], x[1]), pack<E>(x[2], x[3]), pack<E>(x[4], x[5]), pack<E>(x[6], x[7]));
    }
}

/// Eight neighboring elements of a row in global memory, as they are until they are wanted.
template <class E>
struct alignas(16) eight_of {
    E of[8];

    __device__ void load(const E* from) { *this = *reinterpret_cast<const eight_of*>(from); }
    __device__ void get(float (&x)[8]) const {
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            x[e] = static_cast<float>(of[e]);
        }
    }
};

/// Two numbers as E has them, in as few registers.
template <class E>
struct rounded_pair {
    static constexpr bool exact = std::is_same_v<E, float>;
    std::conditional_t<exact, float2, std::uint32_t> both;

    __device__ void set(float first, float second) {
        if constexpr (exact) {
            both = make_float2(first, second);
        } else {
            both = pack<E>(first, second);
        }
    }
    __device__ float first() const {
        if constexpr (exact) {
            return both.x;
        } else {
            return __uint_as_float(both << 16);
        }
    }
    __device__ float second() const {
        if constexpr (exact) {
            return both.y;
        } else {
            return __uint_as_float(both & 0xffff0000u);
        }
    }
};

template <class E>
__device__ inline void round_pair(float& first, float& second) {
    static_assert(std::is_same_v<E, bf16> || std::is_same_v<E, float>);
    rounded_pair<E> pair;
    pair.set(first, second);
    first = pair.first();
    second = pair.second();
}

/// Number i of a chunk's reference value ref_value: before it, or after it (before the next
/// chunk of its stream).
template <class T, class Stats = mlstm_chunk_stats>
__device__ inline float reference_before(const mlstm_params<T>& params, const Stats& stats,
                                         std::int64_t plane_row, int V, int i) {
    return stats.before >= 0
               ? stats.ref_weight * static_cast<float>(params.v[(plane_row + stats.before) * V + i])
               : 0.0f;
}

/// What stands there, or 0 without a look. Nobody waits for it before it is used: what a branch has loaded,
/// ptxas may copy at the branch's end.
template <class X>
__device__ inline X load_if(bool there, const X* from) {
    X x;
    if constexpr (std::is_same_v<X, double>) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.f64 %0, 0d0000000000000000;\n"
            "@p ld.global.f64 %0, [%1];\n}\n"
            : "=d"(x)
            : "l"(from), "r"(static_cast<int>(there)));
    } else if constexpr (std::is_same_v<X, float>) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.f32 %0, 0f00000000;\n"
            "@p ld.global.f32 %0, [%1];\n}\n"
            : "=f"(x)
            : "l"(from), "r"(static_cast<int>(there)));
    } else if constexpr (std::is_same_v<X, std::int32_t>) {
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b32 %0, 0;\n@p ld.global.b32 %0, [%1];\n}\n"
            : "=r"(x)
            : "l"(from), "r"(static_cast<int>(there)));
    } else {
        static_assert(sizeof(X) == 2);
        std::uint16_t bits;
        asm volatile(
            "{\n.reg .pred p;\nsetp.ne.b32 p, %2, 0;\nmov.b16 %0, 0;\n@p ld.global.b16 %0, [%1];\n}\n"
            : "=h"(bits)
            : "l"(from), "r"(static_cast<int>(there)));
        x = *reinterpret_cast<const X*>(&bits);
    }
    return x;
}

/// Brings to the L2 cache what the block `params.ahead` chunks later will load of some arrays [chunks,
/// count]; one lane an array.
template <class T>
struct mlstm_look_ahead {
    std::int64_t chunk;
    bool there;
    int lane = 0;

    __device__ explicit mlstm_look_ahead(const mlstm_params<T>& params)
        : chunk(std::int64_t{blockIdx.x} + params.ahead),
          there(params.ahead > 0 && chunk < std::int64_t{gridDim.x} && warp_id() == 0) {}
    /// For a block that knows its next chunk.
    __device__ mlstm_look_ahead(std::int64_t next, bool follows)
        : chunk(next), there(follows && warp_id() == 0) {}
    template <class E>
    __device__ void array(const E* of, int count) {
        if (there && lane_id() == lane) {
            prefetch_to_l2(of + chunk * count, static_cast<std::uint32_t>(count * sizeof(E)));
        }
        ++lane;
    }
    template <class E>
    __device__ void arrays(int count, const E* of, const E* and_of) {
        array(of, count);
        array(and_of, count);
    }
};

/// A chunk's exponents in shared memory: doubles for float rows; for others floats, in powers of 2 and from M
/// of the last token, whose rounding costs a weight less than 1e-4 of itself even where exponents differ by
/// hundreds.
template <class E>
struct mlstm_exponents {
    static constexpr bool exact = std::is_same_v<E, float>;
    using number = std::conditional_t<exact, double, float>;

    number* source;      // [64]: s_j
    number* most;        // [64]: M_l
    float* state_decay;  // [64]: exp(m - M_l)

    KVPOLICY_HOST_DEVICE void take(shared_parts& parts) {
        source = parts.take<number>(scorer_chunk);
        most = parts.take<number>(scorer_chunk);
        state_decay = parts.take<float>(scorer_chunk);
    }

    __device__ void load(const double* log_source, const double* log_top, double m) const {
        if (threadIdx.x < scorer_chunk) {
            set(log_source[threadIdx.x], log_top[threadIdx.x], log_top[scorer_chunk - 1], m);
        }
    }
    /// Number i of the chunk's 64.
    __device__ void set(double of_source, double of_top, double of_last, double m,
                        unsigned i = threadIdx.x) const {
        const double top = of_top > m ? of_top : m;
        const double last = of_last > m ? of_last : m;
        state_decay[i] = expf(static_cast<float>(m - top));
        if constexpr (exact) {
            source[i] = of_source;
            most[i] = top;
        } else {
            constexpr double log2e = 1.4426950408889634;
            source[i] = static_cast<float>((of_source - last) * log2e);
            most[i] = static_cast<float>((top - last) * log2e);
        }
    }
    /// exp(s_j - M_l), 0 for a token after the output.
    __device__ float weight(int l, int j) const {
        if constexpr (exact) {
            return j <= l ? expf(static_cast<float>(source[j] - most[l])) : 0.0f;
        } else {
            return j <= l ? fast_exp2(source[j] - most[l]) : 0.0f;
        }
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
