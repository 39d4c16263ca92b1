// One token of an mLSTM, in pieces of one warp or thread, for agent_mlstm_cluster.cuh and
// agent_mlstm_batched.cuh: features, gates, a few rows of the state, the readout (projections:
// agent_mlstm_projections.cuh). Sums have one order, so scores are batch-invariant and equal in both kernels.
#pragma once

#include <kvpolicy/caches/cuda/scoring/agent_mlstm_projections.cuh>
#include <kvpolicy/caches/cuda/scoring/agent_score.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/scorers/mlstm.hpp>

#include <cmath>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr std::int32_t max_mlstm_inputs = 256, max_mlstm_features = 256, max_mlstm_width = 128;
/// Rows of a state that a thread takes in, one after the other; their sum is a number of its own until the
/// read-out.
inline constexpr std::int32_t fold_rows = 8;

__host__ __device__ constexpr std::int32_t folds_of(std::int32_t features) {
    return (features + fold_rows - 1) / fold_rows;
}

/// Feature maps are softmaxes: one of y, for Hedgehog one of y and one of -y. Eight lanes take one.
__host__ __device__ constexpr int feature_parts(Softmax) { return 1; }
__host__ __device__ constexpr int feature_parts(Hedgehog) { return 2; }

/// Features of `tokens` tokens, as many as there are warps at most: projections y, [tokens, rows.count()], to
/// k and q, [tokens, padded]. All lanes of a warp.
template <class Feature>
__device__ void make_features(const float* y, const mlstm_rows& rows, std::int32_t tokens,
                              std::int32_t features, std::int32_t padded, float* k, float* q, int warp) {
    constexpr int parts = feature_parts(Feature{}), lanes = 8,
                  each = 8;  // numbers that a lane looks at together
    const std::int32_t count = features / parts, job = warp * (32 / lanes) + lane_id() / lanes,
                       token = job / (2 * parts);
    const bool there = token < tokens, query = job / parts % 2 != 0, second = parts == 2 && job % 2 != 0;
    if (warp * (32 / lanes) / (2 * parts) >= tokens) {
        return;
    }
    const int lane = lane_id() % lanes;
    const float* const from = y + (there ? token : 0) * rows.count() + (query ? rows.queries() : 0) + lane;
    float* const to = (query ? q : k) + (there ? token : 0) * padded + (second ? count : 0) + lane;
    const std::int32_t mine = (count - lane + lanes - 1) / lanes;
    const float sign = second ? -1.0f : 1.0f;
    float largest = -INFINITY;
    if (count <= lanes * each) {  // all of it in registers
        float x[each], all = 0.0f;
#pragma unroll
        for (int i = 0; i < each; ++i) {
            x[i] = i < mine ? sign * from[i * lanes] : -INFINITY;
            largest = fmaxf(largest, x[i]);
        }
        largest = over_eight(largest, [](float a, float b) { return fmaxf(a, b); });
#pragma unroll
        for (int i = 0; i < each; ++i) {
            x[i] = expf(x[i] - largest);
            all += x[i];
        }
        const float factor = 1.0f / over_eight(all, [](float a, float b) { return a + b; });
#pragma unroll
        for (int i = 0; i < each; ++i) {
            if (there && i < mine) {
                to[i * lanes] = x[i] * factor;
            }
        }
        return;
    }
#pragma unroll 1
    for (std::int32_t first = 0; first < mine; first += each) {
#pragma unroll
        for (int i = 0; i < each; ++i) {
            if (first + i < mine) {
                largest = fmaxf(largest, sign * from[(first + i) * lanes]);
            }
        }
    }
    largest = over_eight(largest, [](float a, float b) { return fmaxf(a, b); });
    float sum = 0.0f;
#pragma unroll 1
    for (std::int32_t first = 0; first < mine; first += each) {
#pragma unroll
        for (int i = 0; i < each; ++i) {
            if (first + i < mine) {
                const float weight = expf(sign * from[(first + i) * lanes] - largest);
                sum += weight;
                if (there) {
                    to[(first + i) * lanes] = weight;
                }
            }
        }
    }
    sum = over_eight(sum, [](float a, float b) { return a + b; });
    const float scale = 1.0f / sum;
#pragma unroll 1
    for (std::int32_t first = 0; first < mine && there; first += each) {
#pragma unroll
        for (int i = 0; i < each; ++i) {
            if (first + i < mine) {
                to[(first + i) * lanes] *= scale;
            }
        }
    }
}

/// Gates of one token, by a pair of lanes, the first with the input gate: what it writes and what it leaves
/// of the state, and the stabilizer after it, two numbers. All lanes of a warp.
struct mlstm_gates {
    float first = 0.0f, second = 0.0f;  // the stabilizer

    /// `gate`: this lane's projection, its bias included. Returns the factor of what is written, or of the
    /// old state. A token that is not finite makes gates of NaN, or an input gate of inf: the state stays as
    /// it was (bad_token::drop).
    __device__ float take(float gate, float cap, bool counts) {
        const bool input = lane_id() % 2 == 0;
        int bad = isnan(gate) || (input && gate == INFINITY) ? 1 : 0;
        bad |= __shfl_xor_sync(all_lanes, bad, 1);
        if (cap > 0.0f) {
            gate = cap * tanhf(gate / cap);
        }
        // Sums with the stabilizer in double: log f near 0 must survive being added to a large one.
        double logarithm = gate;
        if (!input) {
            constexpr auto least = static_cast<float>(mLSTMScorer<>::least_log_forget);
            const float log_forget = gate < 0.0f ? gate - log1pf(expf(gate)) : -log1pf(expf(-gate)),
                        of_forget = log_forget < least ? least : log_forget;  // a NaN stays one
            logarithm =
                static_cast<double>(of_forget) + (static_cast<double>(first) + static_cast<double>(second));
        }
        const double other = __shfl_xor_sync(all_lanes, logarithm, 1);
        const double of_input = input ? logarithm : other, of_forget = input ? other : logarithm;
        const double m = of_forget > of_input ? of_forget : of_input;
        if (counts && bad == 0) {
            first = static_cast<float>(m);
            second = isfinite(m) ? static_cast<float>(m - static_cast<double>(first)) : 0.0f;
        }
        return bad != 0 ? (input ? 0.0f : 1.0f) : expf(static_cast<float>(logarithm - m));
    }
};

/// write * x, rounded; 0 where nothing is written, whatever x is.
__device__ inline float times_or_nothing(float write, float x) {
    return write == 0.0f ? 0.0f : __fmul_rn(write, x);
}

/// What fold_rows rows write, and how a query looks at them, from shared memory.
struct fold_factors {
    float at[fold_rows];
    __device__ explicit fold_factors(const float* from) {
        const float4 a = reinterpret_cast<const float4*>(from)[0],
                     b = reinterpret_cast<const float4*>(from)[1];
        at[0] = a.x, at[1] = a.y, at[2] = a.z, at[3] = a.w;
        at[4] = b.x, at[5] = b.y, at[6] = b.z, at[7] = b.w;
    }
};
/// Two columns of a fold of a state: what a thread holds.
struct state_piece {
    float2 c[fold_rows];

    /// `rows`: those that there are.
    __device__ void load(const float* from, std::int32_t width, std::int32_t rows) {
#pragma unroll
        for (int r = 0; r < fold_rows; ++r) {
            c[r] = r < rows ? *reinterpret_cast<const float2*>(from + r * width) : float2{};
        }
    }
    __device__ void store(float* to, std::int32_t width, std::int32_t rows) const {
#pragma unroll
        for (int r = 0; r < fold_rows; ++r) {
            if (r < rows) {
                *reinterpret_cast<float2*>(to + r * width) = c[r];
            }
        }
    }
    /// Takes in a token: its features k and value, and what the leaving key's features q find. Where nothing
    /// is written neither need be a number.
    __device__ float2 take(float write, float forget, const float* k, const float* q, float2 value) {
        const fold_factors of_k(k), of_q(q);
        value = write == 0.0f ? float2{} : value;
        float2 sum{};
#pragma unroll
        for (int r = 0; r < fold_rows; ++r) {
            const float written = times_or_nothing(write, of_k.at[r]);
            c[r].x = fmaf(forget, c[r].x, __fmul_rn(written, value.x));
            c[r].y = fmaf(forget, c[r].y, __fmul_rn(written, value.y));
            sum.x = fmaf(of_q.at[r], c[r].x, sum.x);
            sum.y = fmaf(of_q.at[r], c[r].y, sum.y);
        }
        return sum;
    }
};
/// A sum over the lanes of a fold.
__device__ inline float fold_total(float x) {
    static_assert(fold_rows == 8);
    return over_eight(x, [](float a, float b) { return a + b; });
}

/// The score of a token whose memory was read: h, [folds, width], and divisors, [folds], are sums over
/// fold_rows rows each. By a warp; `skip` counts in lane 0. readout and gain: [width].
template <class Scorer>
__device__ float read_out(const float* h, const float* divisors, std::int32_t folds, std::int32_t width,
                          const float* readout, const float* gain, const Scorer& scorer, std::int64_t head) {
    constexpr auto least = static_cast<float>(Scorer::clamp);
    constexpr auto epsilon = static_cast<float>(Scorer::norm_epsilon);
    const auto& weights = scorer.weights;
    float divisor = 0.0f;
#pragma unroll 4
    for (std::int32_t i = 0; i < folds; ++i) {
        divisor += divisors[i];
    }
    const float scale = 1.0f / (divisor < least ? least : divisor);
    constexpr int turns = max_mlstm_width / 32;
    float read[turns];
    float sum = 0.0f, squares = 0.0f;
#pragma unroll
    for (int t = 0; t < turns; ++t) {
        const std::int32_t e = 32 * t + lane_id();
        read[t] = 0.0f;
        if (e < width) {
#pragma unroll 4
            for (std::int32_t i = 0; i < folds; ++i) {
                read[t] += h[i * width + e];
            }
            read[t] *= scale;
        }
        sum += read[t];
    }
    const float mean = scorer.centered() ? warp_total(sum) / static_cast<float>(width) : 0.0f;
#pragma unroll
    for (int t = 0; t < turns; ++t) {
        read[t] -= 32 * t + lane_id() < width ? mean : 0.0f;
        squares = fmaf(read[t], read[t], squares);
    }
    squares = warp_total(squares) / static_cast<float>(width);
    const float norm = weights.norm_gain != nullptr ? 1.0f / sqrtf(squares + epsilon) : 1.0f;
    float score = 0.0f;
#pragma unroll
    for (int t = 0; t < turns; ++t) {
        const std::int32_t e = 32 * t + lane_id();
        if (e < width) {
            score = fmaf(readout[e], silu(read[t] * norm * gain[e]), score);
        }
    }
    score = warp_total(score);
    return score + (weights.readout_bias != nullptr ? weights.readout_bias[head] : 0.0f);
}

/// The numbers of an entry's token and of its leaving key, by the lanes of a warp.
template <class T>
struct token_rows {
    static constexpr int turns = max_mlstm_inputs / 128;
    four_elements<T> candidate[turns], leaving[turns];

    /// from[leaving][of value]
    __device__ void load(const T* const (&from)[2][2], std::int32_t head_dim_qk, std::int32_t inputs) {
#pragma unroll
        for (int t = 0; t < turns; ++t) {
            const std::int32_t column = 128 * t + 4 * lane_id();
            const int of_value = column >= head_dim_qk ? 1 : 0;
            const std::int32_t at = column - of_value * head_dim_qk;
            if (column < inputs && from[0][of_value] != nullptr) {
                candidate[t].load(from[0][of_value] + at);
            }
            if (column < inputs && from[1][of_value] != nullptr) {
                leaving[t].load(from[1][of_value] + at);
            }
        }
    }
    __device__ void store(float* to, float* to_leaving, std::int32_t inputs) const {
#pragma unroll
        for (int t = 0; t < turns; ++t) {
            const std::int32_t column = 128 * t + 4 * lane_id();
            if (column < inputs) {
                *reinterpret_cast<float4*>(to + column) = candidate[t].numbers();
                *reinterpret_cast<float4*>(to_leaving + column) = leaving[t].numbers();
            }
        }
    }
};

/// Asks the L2 cache for what token_entry reads of `count` entries, which need not be what it will be then.
/// By a warp.
template <class View>
__device__ void ask_for_entries(const View& cache, const Batch& batch, std::int32_t head, std::int32_t first,
                                std::int32_t count) {
    if (lane_id() == 0) {
        ask_for_line(cache.all_params + head);
        ask_for_line(cache.length + (batch.seq_ids == nullptr ? first : 0));
        if constexpr (requires { cache.row_offset; }) {
            ask_for_line(cache.row_offset + head);
        }
    } else if (batch.seq_ids == nullptr && lane_id() <= count && first + lane_id() <= batch.count) {
        ask_for_line(cache.appended + (first + lane_id() - 1) * std::int64_t{cache.kv_heads});
    }
}

/// Asks the L2 cache for the rows of `count` entries' tokens, and of the keys that leave, by what is known of
/// them now, which need not be so then: nothing but what the cache and the call have is asked for. A row is
/// two lanes'. By a warp.
template <class View, class Tokens>
__device__ void ask_for_rows(const View& cache, const Batch& batch, const Tokens& tokens, std::int32_t head,
                             std::int32_t first, std::int32_t count) {
    if constexpr (requires { cache.row_offset; }) {
        const std::int32_t entry = first + lane_id() / 2;
        if (batch.seq_ids != nullptr || lane_id() / 2 >= count || entry >= cache.max_sequences) {
            return;
        }
        const bool of_value = lane_id() % 2 != 0;
        const std::int32_t dim = of_value ? cache.head_dim_vo : cache.head_dim_qk;
        const auto ask = [&](const auto* row) {
            constexpr std::int32_t line = 128 / sizeof(*row);
            for (std::int32_t i = 0; i < dim; i += line) {
                ask_for_line(row + i);
            }
        };
        if (!tokens.spare) {
            ask(of_value ? tokens.v.row(entry, head, 0) : tokens.k.row(entry, head, 0));
        }
        // Not through the L1 cache, which would keep what it finds until after.
        const std::int32_t sinks = __ldcg(&cache.all_params[head].sinks),
                           window = __ldcg(&cache.all_params[head].window);
        const position_t u = __ldcg(cache.length + entry) - window;
        if (window > 0 && u >= sinks) {
            const std::int64_t row = __ldcg(cache.row_offset + head) + HeadRows{sinks, window}.recent(u);
            if (row >= 0 && row < cache.rows) {
                const std::int64_t at = entry * cache.rows + row;
                ask((of_value ? cache.v : cache.k) + at * dim);
            }
        }
    }
}

/// What there is to know of an entry, all of it asked for at once, since it comes from afar.
template <class View>
struct token_entry {
    active_entry active;
    position_t base;  // the sequence's length
    typename View::head_type rows;

    __device__ token_entry(const View& cache, const Batch& batch, std::int32_t entry, std::int32_t most,
                           std::int32_t head)
        : active(cache, batch, entry, most), base(cache.length[active.seq]), rows(cache, active.seq, head) {
        active = active.once(cache);
    }
};

/// Where token j of an entry is, or the key that leaves when it comes: the key's numbers, or the value's.
/// Null where there is none.
template <class Head, class Tokens>
__device__ auto token_source(const Head& rows, const Tokens& tokens, std::int32_t entry, std::int32_t head,
                             position_t base, std::int32_t j, bool leaving, bool of_value)
    -> decltype(tokens.key(rows, entry, head, j)) {
    std::int32_t of_chunk = j;
    if (leaving) {
        const position_t u = base + j - rows.head_params.window;
        if (u < rows.head_params.sinks) {
            return nullptr;
        }
        if (u < base) {
            const std::int32_t row = rows.layout.recent(u);
            return of_value ? rows.value(row) : rows.key(row);
        }
        of_chunk = static_cast<std::int32_t>(u - base);
    }
    return of_value ? tokens.value(rows, entry, head, of_chunk) : tokens.key(rows, entry, head, of_chunk);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
