// The forward pass written plainly, for fp32 and double inputs and any head_dim: a check on the fast kernels,
// not one of them. One warp per query of one head; lanes share keys for the logits and columns for the sums.
// What a query does not see is not read, so that fast kernels fall back on it for rows that a hidden value
// has spoilt.
#pragma once

#include <kvpolicy/attention/cuda/forward/forward_params.cuh>
#include <kvpolicy/attention/cuda/key_frame.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/cuda/primitives/rounded.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr std::int32_t plain_max_dim = 1024;  // the host's limit
inline constexpr int plain_warps = 4;

template <class T>
__device__ inline T largest_of_warp(T x) {
    for (int step = 16; step > 0; step /= 2) {
        const T other = __shfl_xor_sync(all_lanes, x, step);
        x = other > x ? other : x;
    }
    return x;
}
template <class T>
__device__ inline T sum_over_warp(T x) {
    for (int step = 16; step > 0; step /= 2) {
        x += __shfl_xor_sync(all_lanes, x, step);
    }
    return x;
}

/// The logit of query row `q` and key row `row` of KV head h, without its bias.
template <class T, class S>
__device__ __forceinline__ T plain_logit(const attention_params<S>& params, const S* q, std::int32_t b,
                                         std::int32_t h, std::int32_t row, T scale, T logits_soft_cap) {
    const S* const k = params.rows.key(b, h, row);
    T logit = T(0);
    for (std::int32_t d = 0; d < params.q.dim; ++d) {
        logit += static_cast<T>(q[d]) * static_cast<T>(k[d]);
    }
    logit = rounded_product(logit, scale);
    if (logits_soft_cap > T(0)) {
        logit = logits_soft_cap * tanh(logit / logits_soft_cap);
    }
    return logit;
}

/// Query `query` of query head `of_q`; `scale` and `logits_soft_cap` as in AttentionParams, values up to
/// `Most` wide. All lanes of a warp.
template <int Most, class S>
__device__ inline void agent_forward_plain(const forward_params<S>& call, compute_t<S> scale,
                                           compute_t<S> logits_soft_cap, std::int32_t b, std::int32_t of_q,
                                           std::int32_t query) {
    using T = compute_t<S>;
    constexpr int most = Most / 32;
    const attention_params<S>& params = call.params;
    const T nothing = -static_cast<T>(INFINITY);
    const std::int32_t h = of_q / params.group;
    const head_frame head(call.frames, b, h);
    const std::int64_t base = head.start() + query;
    const std::int32_t count = head.count();
    const std::int32_t head_dim_vo = params.rows.v.dim;
    const std::int32_t at = params.query_row(b, query);
    const S* const q = params.q.row(b, of_q, at);
    T max = nothing;
    T sum = T(0);
    T o[most];
#pragma unroll
    for (int i = 0; i < most; ++i) {
        o[i] = T(0);
    }
    for (std::int32_t first = 0; first < count; first += 32) {
        const std::int32_t x = first + lane_id();
        const row_time time = x < count ? head.time_of(x, base, 1) : row_time{0, 0};
        const bool seen = time.begin < time.expiry;
        unsigned votes = __ballot_sync(all_lanes, seen);
        if (votes == 0) {
            continue;
        }
        T logit = nothing;
        if (seen) {
            logit = plain_logit<T>(params, q, b, h, head.row_of(x), scale, logits_soft_cap);
            std::int32_t from = 1;
            const float bias = head.bias_of(x, base, 1, from);
            logit += from == 0 ? static_cast<T>(bias) : T(0);
        }
        const T now = largest_of_warp(logit > max ? logit : max);
        if (now == nothing && !__any_sync(all_lanes, isnan(logit))) {
            continue;  // biases of -inf
        }
        const T decay = exp(max - now);
        max = now;
        const T weight = exp(logit - now);
        sum = sum * decay + weight;  // this lane's share
#pragma unroll
        for (int i = 0; i < most; ++i) {
            o[i] *= decay;
        }
        for (; votes != 0; votes &= votes - 1) {
            const int lane = __ffs(static_cast<int>(votes)) - 1;
            const T w = __shfl_sync(all_lanes, weight, lane);
            const S* const v = params.rows.value(b, h, head.row_of(first + lane));
#pragma unroll
            for (int i = 0; i < most; ++i) {
                const std::int32_t column = 32 * i + lane_id();
                if (column < head_dim_vo) {
                    o[i] += w * static_cast<T>(v[column]);
                }
            }
        }
    }
    sum = sum_over_warp(sum);
    S* const out = call.out.row(b, of_q, at);
#pragma unroll
    for (int i = 0; i < most; ++i) {
        const std::int32_t column = 32 * i + lane_id();
        if (column < head_dim_vo) {
            out[column] = static_cast<S>(sum == T(0) ? T(0) : o[i] / sum);
        }
    }
    if (call.lse && lane_id() == 0) {
        call.lse.head(b, of_q)[at] = static_cast<float>(sum == T(0) ? nothing : max + log(sum));
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
