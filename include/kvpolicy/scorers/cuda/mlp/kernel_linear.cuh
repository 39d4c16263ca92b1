// LinearScorer on CUDA: one weighted sum per head, and its gradients.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/scorers/cuda/common/kernel_scorer_weights.cuh>
#include <kvpolicy/scorers/cuda/common/kernel_streams.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_params.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Scores of LinearScorer.
/// Grid: a block per chunk of 64 tokens. Block: 256 threads, a warp per token. Shared memory: none.
/// In: source (k, v) T, weight [heads, size] fp32, bias [heads] fp32 or null.
/// Out: scores [B, heads, S] fp32, overwritten.
template <class T>
__global__ void __launch_bounds__(256)
    linear_kernel(const scorer_streams streams, const scorer_source<T> source, const float* const weight,
                  const float* const bias, const plane_view<float> scores) {
    const scorer_span s = streams.span_of_block();
    const float* const w = weight + std::int64_t{s.h} * source.size;
    for (int r = warp_id(); r < s.count; r += 8) {
        const T* const key = source.k.row(s.b, s.h, s.first + r);
        const T* const value = source.v.row(s.b, s.h, s.first + r);
        float sum = 0.0f;
        for (int c = lane_id(); c < source.k.dim; c += 32) {
            sum += static_cast<float>(key[c]) * w[c];
        }
        for (int c = lane_id(); c < source.v.dim; c += 32) {
            sum += static_cast<float>(value[c]) * w[source.k.dim + c];
        }
        sum = warp_sum(sum);
        if (lane_id() == 0) {
            scores.head(s.b, s.h)[s.first + r] = sum + (bias != nullptr ? bias[s.h] : 0.0f);
        }
    }
}

/// Gradients of LinearScorer.
/// Grid: a block per chunk of 64 tokens. Block: 256 threads. Shared memory: the chunk's d scores.
/// In: source (k, v) T, d_scores [B, heads, S] fp32, weight [heads, size] fp32.
/// Out: d_k, d_v fp32, overwritten where wanted; partial [planes, chunks, size + 1] fp32 (weight, bias),
/// overwritten.
/// 1. d scores to shared memory.
/// 2. Per column: its sum over the tokens, and the gradients of the inputs.
template <class T>
__global__ void __launch_bounds__(256)
    linear_backward_kernel(const scorer_streams streams, const scorer_source<T> source,
                           const plane_view<const float> d_scores, const float* const weight,
                           const rows_view<float> d_k, const rows_view<float> d_v, float* const partial) {
    __shared__ float d[scorer_chunk];
    const scorer_span s = streams.span_of_block();
    const auto thread = static_cast<int>(threadIdx.x);
    if (thread < s.count) {
        d[thread] = gradient_of_score(streams, d_scores, s, s.first + thread);
    }
    __syncthreads();
    report_bad_rows(streams, source, s);
    const std::int32_t head_dim_qk = source.k.dim;
    float* const sums =
        partial + (std::int64_t{s.plane} * streams.chunks + s.chunk_index) * (source.size + 1);
    for (int c = thread; c <= source.size; c += 256) {
        const float w = c < source.size ? weight[std::int64_t{s.h} * source.size + c] : 0.0f;
        float sum = 0.0f;
        for (int r = 0; r < s.count; ++r) {
            const std::int32_t t = s.first + r;
            if (c == source.size) {
                sum += d[r];
                continue;
            }
            const bool of_key = c < head_dim_qk;
            sum += d[r] * static_cast<float>(of_key ? source.k.row(s.b, s.h, t)[c]
                                                    : source.v.row(s.b, s.h, t)[c - head_dim_qk]);
            if (d_k.data != nullptr) {
                (of_key ? d_k.row(s.b, s.h, t)[c] : d_v.row(s.b, s.h, t)[c - head_dim_qk]) = d[r] * w;
            }
        }
        sums[c] = sum;
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
