// Scores by one block: of new tokens (on arrival), or of the keys that leave the window when new tokens come
// (on leaving).
#pragma once

#include <kvpolicy/caches/cuda/contiguous/contiguous_view.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/scorers/cuda/common/device_scorer.cuh>
#include <kvpolicy/scorers/cuda/common/warp_scorer.cuh>
#include <kvpolicy/scorers/mlstm.hpp>

#include <cmath>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int score_threads = 512;  // at most
inline constexpr int score_warps = score_threads / 32;
inline constexpr int score_batch = 8;  // tokens of a block whose warps score a token each
static_assert(block_scorer_max_threads <= score_threads);

/// A launch that scores the tokens of a chunk (a step: of one token).
template <class View, class Scorer>
struct score_params {
    using T = typename View::value_type;

    View cache;
    Batch batch{};
    prefill_tokens<T> tokens{};
    // [count, Hkv, most]: of token j, or of the key that leaves when token j comes (0 where none does).
    // Where blocks share a step's tokens, [shares, count, Hkv, most]: parts, to be added in their order.
    float* scores = nullptr;
    float* state = nullptr;  // [count, Hkv, state_size]: where the advanced states go; null: the cache itself
    Scorer scorer;
    // An mLSTM's sizes, whose functions are the host's.
    std::int32_t projection = 0;
    std::int32_t features = 0;
    std::int32_t width = 0;
    std::int32_t together = 1;  // sequences that blocks take at once
    std::int32_t stages = 0;    // for states in a block's memory: see agent_mlstm_batched.cuh
    bool beside = false;        // of a launch whose blocks run meanwhile
    // A step reads scores in parts, and its kernel comes next. A chunk has no parts, however short it is.
    bool step = false;
    std::int32_t shares = 1;  // blocks of a scorer by block that share the work of their tokens
    std::int32_t each = 1;    // tokens of such a block
};

__device__ inline float silu(float y) { return y / (1.0f + __expf(-y)); }

/// What a block is to score: entry, head, and where its chunk begins.
template <class View>
struct scored_token {
    std::int32_t pair, entry, head;
    active_entry active;
    typename View::head_type rows;
    position_t base;

    __device__ scored_token(const View& cache, const Batch& batch, std::int32_t number, std::int32_t most)
        : pair(number),
          entry(number / cache.kv_heads),
          head(number % cache.kv_heads),
          active(active_entry(cache, batch, entry, most).once(cache)),
          rows(cache, active.tokens != 0 ? active.seq : 0, head),
          base(active.tokens != 0 ? cache.length[active.seq] : 0) {}
};

template <class T>
__device__ void to_floats(const T* from, std::int32_t count, float* to) {
    for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < count; i += score_threads) {
        to[i] = static_cast<float>(from[i]);
    }
}

/// A scorer that one warp computes: a token per warp.
template <class View, class Scorer>
requires scores_by_warp<Scorer> __device__ void decode_scorer(const score_params<View, Scorer>& call,
                                                              float* /*shared*/) {
    const std::int32_t pieces = (call.tokens.most + score_batch - 1) / score_batch;
    const auto number = static_cast<std::int32_t>(blockIdx.x);
    const scored_token<View> at(call.cache, call.batch, number / pieces, call.tokens.most);
    const std::int32_t j = number % pieces * score_batch + warp_id();
    static_assert(score_batch <= score_warps);
    if (warp_id() < score_batch && j < at.active.tokens) {
        const float score = device_scorer<Scorer>::score(
            call.scorer, at.head, call.tokens.key(at.rows, at.entry, at.head, j),
            call.tokens.value(at.rows, at.entry, at.head, j), call.cache.head_dim_qk, call.cache.head_dim_vo);
        if (lane_id() == 0) {
            call.scores[std::int64_t{at.pair} * call.tokens.most + j] = score;
        }
    }
}

/// A block of a scorer by block: one of those that share `each` of the tokens of a head. Tokens of all
/// entries are numbered, `most` an entry.
template <class View, class Scorer>
struct tokens_of_block {
    using T = typename View::value_type;
    const score_params<View, Scorer>& call;
    block_share share;
    std::int32_t head, count;
    std::int64_t first;

    __device__ explicit tokens_of_block(const score_params<View, Scorer>& of)
        : call(of),
          share{static_cast<std::int32_t>(blockIdx.x) % of.shares, of.shares},
          head(static_cast<std::int32_t>(blockIdx.x) / of.shares % of.cache.kv_heads),
          first(std::int64_t{blockIdx.x} / of.shares / of.cache.kv_heads * of.each) {
        const std::int64_t left = std::int64_t{of.batch.count} * of.tokens.most - first;
        count = left < of.each ? static_cast<std::int32_t>(left) : of.each;
    }
    [[nodiscard]] __device__ block_token<T> token(std::int32_t t) const {
        const std::int32_t most = call.tokens.most;
        const auto entry = static_cast<std::int32_t>((first + t) / most),
                   j = static_cast<std::int32_t>((first + t) % most);
        const active_entry active = active_entry(call.cache, call.batch, entry, most).once(call.cache);
        if (j >= active.tokens) {
            return {};
        }
        const typename View::head_type rows(call.cache, active.seq, head);
        const std::int64_t pair = std::int64_t{entry} * call.cache.kv_heads + head,
                           pairs = std::int64_t{call.batch.count} * call.cache.kv_heads;
        return {call.tokens.key(rows, entry, head, j), call.tokens.value(rows, entry, head, j),
                call.cache.length[active.seq] + j, call.scores + (share.index * pairs + pair) * most + j};
    }
};

/// What the blocks of a scorer may do while the kernels before still run.
template <class View, class Scorer>
__device__ void prepare_scorer([[maybe_unused]] const score_params<View, Scorer>& call,
                               [[maybe_unused]] float* shared) {
    if constexpr (scores_by_block<Scorer>) {
        const tokens_of_block<View, Scorer> mine(call);
        device_scorer<Scorer>::prepare_block(call.scorer, mine.head, mine.share, call.cache.head_dim_qk,
                                             call.cache.head_dim_vo, shared);
    }
}

/// A scorer that one block computes, of a few tokens at once, or several blocks that share them.
template <class View, class Scorer>
requires scores_by_block<Scorer> __device__ void decode_scorer(const score_params<View, Scorer>& call,
                                                               float* shared) {
    using T = typename View::value_type;
    __shared__ block_token<T> tokens[block_scorer_tokens];
    const tokens_of_block<View, Scorer> mine(call);
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    bool there = false;
    if (thread < mine.count) {
        tokens[thread] = mine.token(thread);
        there = tokens[thread].key != nullptr;
    }
    if (__syncthreads_or(there ? 1 : 0) != 0) {
        device_scorer<Scorer>::score_by_block(call.scorer, mine.head, tokens, mine.count, mine.share,
                                              call.cache.head_dim_qk, call.cache.head_dim_vo, shared);
    }
}

/// Four weights; a user's need not be aligned.
__device__ inline float4 four_weights(const float* w, bool aligned) {
    return aligned ? *reinterpret_cast<const float4*>(w) : make_float4(w[0], w[1], w[2], w[3]);
}

/// out[i] = w_i . x for rows [0, count) of weights, one warp per row; warp `leader` has the first. `inputs`
/// is a multiple of 8, as head_dims are, and x is aligned to 16 bytes.
__device__ inline void project_rows(const float* w, std::int32_t count, const float* x, std::int32_t inputs,
                                    float* out, int leader = 0) {
    constexpr int rows = 4, turns = 2;  // at once, so that their loads overlap: the weights come from afar
    const bool aligned = reinterpret_cast<std::uintptr_t>(w) % sizeof(float4) == 0;
    const int warp = (warp_id() + score_warps - leader) % score_warps;
    for (std::int32_t first = warp * rows; first < count; first += score_warps * rows) {
        float sum[rows] = {};
        for (std::int32_t begin = 0; begin < inputs; begin += 128 * turns) {
            float4 weight[rows][turns];
#pragma unroll
            for (int r = 0; r < rows; ++r) {
#pragma unroll
                for (int t = 0; t < turns; ++t) {
                    const std::int32_t i = begin + 128 * t + 4 * lane_id();
                    weight[r][t] = first + r < count && i < inputs
                                       ? four_weights(w + std::int64_t{first + r} * inputs + i, aligned)
                                       : float4{};
                }
            }
#pragma unroll
            for (int t = 0; t < turns; ++t) {
                const std::int32_t i = begin + 128 * t + 4 * lane_id();
                const float4 number = i < inputs ? *reinterpret_cast<const float4*>(x + i) : float4{};
#pragma unroll
                for (int r = 0; r < rows; ++r) {
                    sum[r] += weight[r][t].x * number.x + weight[r][t].y * number.y +
                              weight[r][t].z * number.z + weight[r][t].w * number.w;
                }
            }
        }
#pragma unroll
        for (int r = 0; r < rows; ++r) {
            const float total = warp_total(sum[r]);
            if (lane_id() == 0 && first + r < count) {
                out[first + r] = total;
            }
        }
    }
}

/// softmax(sign y), by one warp.
__device__ inline void warp_softmax(const float* y, std::int32_t count, float sign, float* out) {
    float largest = -INFINITY;
    for (std::int32_t i = lane_id(); i < count; i += 32) {
        largest = fmaxf(largest, sign * y[i]);
    }
#pragma unroll
    for (int step = 16; step != 0; step /= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, step));
    }
    float sum = 0.0f;
    for (std::int32_t i = lane_id(); i < count; i += 32) {
        sum += expf(sign * y[i] - largest);
    }
    const float scale = 1.0f / warp_total(sum);
    for (std::int32_t i = lane_id(); i < count; i += 32) {
        out[i] = expf(sign * y[i] - largest) * scale;
    }
}
__device__ inline void warp_features(Softmax, const float* y, std::int32_t d_qk, float* out) {
    warp_softmax(y, d_qk, 1.0f, out);
}
__device__ inline void warp_features(Hedgehog, const float* y, std::int32_t d_qk, float* out) {
    warp_softmax(y, d_qk / 2, 1.0f, out);
    warp_softmax(y, d_qk / 2, -1.0f, out + d_qk / 2);
}

/// Shared memory of the mLSTM's block.
struct mlstm_memory {
    float *x, *of_leaving;  // [inputs]
    float *y_k, *y_q;       // [projection]
    float* v;               // [width]
    float *k, *q;           // [features]
    float* h;               // [width]
    float* partial;         // [score_warps, width]
    float* divisor;         // [score_warps]
    float* numbers;         // a_i, a_f, skip; forget, write

    __host__ __device__ static constexpr std::int64_t floats(std::int32_t inputs, std::int32_t projection,
                                                             std::int32_t features, std::int32_t width) {
        return 2 * (std::int64_t{inputs} + projection + features) + (2 + score_warps) * std::int64_t{width} +
               score_warps + 8;
    }
    __device__ mlstm_memory(float* at, std::int32_t inputs, std::int32_t projection, std::int32_t features,
                            std::int32_t width_)
        : x(at),
          of_leaving(x + inputs),
          y_k(of_leaving + inputs),
          y_q(y_k + projection),
          v(y_q + projection),
          k(v + width_),
          q(k + features),
          h(q + features),
          partial(h + width_),
          divisor(partial + score_warps * width_),
          numbers(divisor + score_warps) {}
};

/// log f and log i in double, since log f near 0 must survive the sum with a large stabilizer. Writes the
/// factors of the old state and of the token, and the new stabilizer. A token that is not finite makes gates
/// of NaN, or an input gate of inf: the state stays as it was (bad_token::drop). By one thread.
template <class Weights>
__device__ void mlstm_gate_factors(const Weights& weights, std::int64_t head, double cap, float* numbers,
                                   float* stabilizer) {
    double input = numbers[0], forget = numbers[1];
    input += weights.b_i != nullptr ? weights.b_i[head] : 0.0f;
    forget += weights.b_f != nullptr ? weights.b_f[head] : 0.0f;
    if (isnan(input) || isnan(forget) || input == static_cast<double>(INFINITY)) {
        numbers[3] = 1.0f;
        numbers[4] = 0.0f;
        return;
    }
    if (cap > 0.0) {
        input = cap * tanh(input / cap);
        forget = cap * tanh(forget / cap);
    }
    double log_forget = forget < 0.0 ? forget - log1p(exp(forget)) : -log1p(exp(-forget));
    if (log_forget < mLSTMScorer<>::least_log_forget) {
        log_forget = mLSTMScorer<>::least_log_forget;
    }
    const double kept =
        log_forget + (static_cast<double>(stabilizer[0]) + static_cast<double>(stabilizer[1]));
    const double m = kept > input ? kept : input;
    numbers[3] = static_cast<float>(exp(kept - m));
    numbers[4] = static_cast<float>(exp(input - m));
    stabilizer[0] = static_cast<float>(m);
    stabilizer[1] = isfinite(m) ? static_cast<float>(m - static_cast<double>(static_cast<float>(m))) : 0.0f;
}

/// C <- f C + i k~ v~^T and z <- f z + i k~, and each warp's part of q~ C and q~ z if a key `leaves`. By the
/// whole block.
__device__ inline void mlstm_absorb(const mlstm_memory& memory, float* state, std::int32_t features,
                                    std::int32_t width, bool leaves) {
    float* const z = state + std::int64_t{features} * width;
    const float forget = memory.numbers[3], write = memory.numbers[4];
    const bool writes = write != 0.0f;  // else neither k~ nor v~ need be numbers
    float of_z = 0.0f;
    for (auto d = static_cast<std::int32_t>(threadIdx.x); d < features; d += score_threads) {
        const float now = fmaf(forget, z[d], writes ? write * memory.k[d] : 0.0f);
        z[d] = now;
        of_z += leaves ? memory.q[d] * now : 0.0f;
    }
    of_z = warp_total(of_z);
    if (lane_id() == 0) {
        memory.divisor[warp_id()] = of_z;
    }
    for (std::int32_t e = lane_id(); e < width; e += 32) {
        float sum = 0.0f;
        const float v = memory.v[e];
#pragma unroll 4
        for (std::int32_t d = warp_id(); d < features; d += score_warps) {
            float* const c = state + std::int64_t{d} * width + e;
            const float now = fmaf(forget, *c, writes ? write * memory.k[d] * v : 0.0f);
            *c = now;
            sum += leaves ? memory.q[d] * now : 0.0f;
        }
        memory.partial[warp_id() * width + e] = sum;
    }
}

/// The score of the key that leaves, from the warps' parts. By one warp.
template <class Scorer>
__device__ float mlstm_read(const mlstm_memory& memory, const Scorer& scorer, std::int64_t head,
                            std::int32_t width) {
    const auto& weights = scorer.weights;
    float score = 0.0f, divisor = 0.0f, sum = 0.0f;
    for (int w = 0; w < score_warps; ++w) {
        divisor += memory.divisor[w];
    }
    constexpr auto least = static_cast<float>(Scorer::clamp);
    const float scale = 1.0f / (divisor < least ? least : divisor);
    float squares = 0.0f;
    for (std::int32_t e = lane_id(); e < width; e += 32) {
        float h = 0.0f;
        for (int w = 0; w < score_warps; ++w) {
            h += memory.partial[w * width + e];
        }
        h *= scale;
        memory.h[e] = h;
        sum += h;
    }
    const float mean = scorer.centered() ? warp_total(sum) / static_cast<float>(width) : 0.0f;
    for (std::int32_t e = lane_id(); e < width; e += 32) {
        memory.h[e] -= mean;
        squares += memory.h[e] * memory.h[e];
    }
    squares = warp_total(squares) / static_cast<float>(width);
    constexpr auto epsilon = static_cast<float>(Scorer::norm_epsilon);
    const float norm = weights.norm_gain != nullptr ? 1.0f / sqrtf(squares + epsilon) : 1.0f;
    for (std::int32_t e = lane_id(); e < width; e += 32) {
        const float gain = weights.norm_gain != nullptr ? weights.norm_gain[head * width + e] : 1.0f;
        score += weights.readout[head * width + e] * silu(memory.h[e] * norm * gain);
    }
    score = warp_total(score);
    score += weights.readout_bias != nullptr ? weights.readout_bias[head] : 0.0f;
    score += weights.skip != nullptr ? memory.numbers[2] : 0.0f;
    return score;
}

/// One head's tokens one after another, as a step absorbs them: the state is read and written once a token.
template <class View, std::int32_t D, class Feature, class Values>
__device__ void decode_scorer(const score_params<View, mLSTMScorer<D, Feature, Values>>& call,
                              float* const shared) {
    using T = typename View::value_type;
    const scored_token<View> at(call.cache, call.batch, static_cast<std::int32_t>(blockIdx.x),
                                call.tokens.most);
    if (at.active.tokens == 0) {
        return;
    }
    const std::int32_t head_dim_qk = call.cache.head_dim_qk, head_dim_vo = call.cache.head_dim_vo,
                       inputs = head_dim_qk + head_dim_vo;
    const std::int32_t features = call.features, width = call.width, projection = call.projection;
    const mlstm_memory memory(shared, inputs, projection, features, width);
    const auto& weights = call.scorer.weights;
    const std::int64_t head = at.head;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    float* state = call.cache.state + at.rows.index * call.cache.state_size;
    if (call.state != nullptr) {
        float* const copy = call.state + std::int64_t{at.pair} * call.cache.state_size;
        for (std::int64_t i = thread; i < call.cache.state_size; i += score_threads) {
            copy[i] = state[i];
        }
        state = copy;
        __syncthreads();
    }
    float* const stabilizer = state + std::int64_t{features} * (width + 1);
    for (std::int32_t j = 0; j < at.active.tokens; ++j) {
        const position_t u = at.base + j - at.rows.head_params.window;
        const bool leaves = u >= at.rows.head_params.sinks;
        const T* const value = call.tokens.value(at.rows, at.entry, at.head, j);
        to_floats(call.tokens.key(at.rows, at.entry, at.head, j), head_dim_qk, memory.x);
        to_floats(value, head_dim_vo, memory.x + head_dim_qk);
        if (leaves) {
            const bool stored = u < at.base;
            const std::int32_t row = stored ? at.rows.layout.recent(u) : 0;
            const auto of_chunk = static_cast<std::int32_t>(stored ? 0 : u - at.base);
            to_floats(stored ? at.rows.key(row) : call.tokens.key(at.rows, at.entry, at.head, of_chunk),
                      head_dim_qk, memory.of_leaving);
            to_floats(stored ? at.rows.value(row) : call.tokens.value(at.rows, at.entry, at.head, of_chunk),
                      head_dim_vo, memory.of_leaving + head_dim_qk);
        }
        __syncthreads();
        project_rows(weights.w_k + head * projection * inputs, projection, memory.x, inputs, memory.y_k);
        project_rows(weights.w_i + head * inputs, 1, memory.x, inputs, memory.numbers, 1);
        project_rows(weights.w_f + head * inputs, 1, memory.x, inputs, memory.numbers + 1, 2);
        if constexpr (Values::projected) {
            project_rows(weights.w_v + head * width * inputs, width, memory.x, inputs, memory.v);
        } else {
            to_floats(value, width, memory.v);
        }
        if (leaves) {
            project_rows(weights.w_q + head * projection * inputs, projection, memory.of_leaving, inputs,
                         memory.y_q);
            if (weights.skip != nullptr) {
                project_rows(weights.skip + head * inputs, 1, memory.of_leaving, inputs, memory.numbers + 2,
                             3);
            }
        }
        __syncthreads();
        if (warp_id() == 0) {
            warp_features(Feature{}, memory.y_k, features, memory.k);
        } else if (warp_id() == 1 && leaves) {
            warp_features(Feature{}, memory.y_q, features, memory.q);
        } else if (thread == 64) {
            mlstm_gate_factors(weights, head, call.scorer.gate_softcap, memory.numbers, stabilizer);
        }
        __syncthreads();
        mlstm_absorb(memory, state, features, width, leaves);
        __syncthreads();
        if (warp_id() == 0) {
            const float score = leaves ? mlstm_read(memory, call.scorer, head, width) : 0.0f;
            if (lane_id() == 0) {
                call.scores[std::int64_t{at.pair} * call.tokens.most + j] = score;
            }
        }
        __syncthreads();  // the shared memory is free again
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
