// How LinearScorer runs on CUDA.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/cuda/common/device_scorer.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_plan.cuh>
#include <kvpolicy/scorers/cuda/common/warp_scorer.cuh>
#include <kvpolicy/scorers/cuda/mlp/kernel_linear.cuh>
#include <kvpolicy/scorers/linear.hpp>

#include <algorithm>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// LinearScorer, or with no memory only its workspace.
template <class T, class S>
void linear_backward(const cuda& ctx, const S& scorer, const ScoreBackward<T>& call,
                     LinearParameters<float> gradients, workspace_parts& parts, bool measure,
                     std::uint32_t* status) {
    scorer_plan<T> all(call.k, call.v, call.sequences, 0, parts);
    const std::int32_t width = all.source.size + 1;
    auto* const sums = parts.take<float>(all.chunks() * width);
    if (measure) {
        return;
    }
    all.streams.rows = std::min(all.streams.rows, call.d_scores.length);
    all.begin(ctx, status);
    if (all.chunks() == 0) {
        return;
    }
    launch("linear_backward_kernel", linear_backward_kernel<T>, all.chunks(), 256, 0, ctx, all.streams,
           all.source, call.d_scores, scorer.weights.weight, call.d_k, call.d_v, sums);
    chunk_sums all_sums;
    all_sums.add(sums, width, 0, all.source.size, gradients.weight);
    all_sums.add(sums, width, all.source.size, 1, gradients.bias);
    add_sums(ctx, all.streams, all_sums);
}

/// a . [k; v] + b, by all lanes of a warp.
template <std::int32_t D, class T>
__device__ float warp_score(const LinearScorer<D>& scorer, std::int32_t head, const T* key, const T* value,
                            std::int32_t head_dim_qk, std::int32_t head_dim_vo) {
    const float* const a = scorer.weights.weight + std::int64_t{head} * (head_dim_qk + head_dim_vo);
    float sum = 0.0f;
    for (std::int32_t i = lane_id(); i < head_dim_qk; i += 32) {
        sum += a[i] * static_cast<float>(key[i]);
    }
    for (std::int32_t i = lane_id(); i < head_dim_vo; i += 32) {
        sum += a[head_dim_qk + i] * static_cast<float>(value[i]);
    }
    sum = warp_total(sum);
    return scorer.weights.bias != nullptr ? sum + scorer.weights.bias[head] : sum;
}

}  // namespace cuda_backend

template <std::int32_t D>
struct device_scorer<LinearScorer<D>> : warp_device_scorer<LinearScorer<D>> {
    static constexpr bool has_gradients = true;

    template <class Widths, class T>
    static void forward(const cuda& ctx, const LinearScorer<D>& scorer, const score_sequence_params<T>& call,
                        cuda_backend::workspace_parts& parts, bool measure, std::uint32_t* status) {
        namespace cb = cuda_backend;
        cb::score_chunks(ctx, call, parts, measure, status, [&](const cb::scorer_plan<T>& all) {
            cb::launch("linear_kernel", cb::linear_kernel<T>, all.chunks(), 256, 0, ctx, all.streams,
                       all.source, scorer.weights.weight, scorer.weights.bias, call.scores);
        });
    }
    template <class Widths, class T>
    static void backward(const cuda& ctx, const LinearScorer<D>& scorer, const ScoreBackward<T>& call,
                         const LinearParameters<float>& gradients, cuda_backend::workspace_parts& parts,
                         bool measure, std::uint32_t* status) {
        cuda_backend::linear_backward<T>(ctx, scorer, call, gradients, parts, measure, status);
    }
    template <class T>
    __device__ static float score(const LinearScorer<D>& scorer, std::int32_t head, const T* key,
                                  const T* value, std::int32_t head_dim_qk, std::int32_t head_dim_vo) {
        return cuda_backend::warp_score(scorer, head, key, value, head_dim_qk, head_dim_vo);
    }
};

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
