// Which scorers have CUDA kernels in a cache, and the score that one warp of a decode kernel computes.
#pragma once

#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/scorers/linear.hpp>
#include <kvpolicy/scorers/mlp.hpp>
#include <kvpolicy/scorers/mlstm.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A scorer so small that a warp scores a row beside other work.
template <class S>
inline constexpr bool scores_by_warp = false;
template <std::int32_t D>
inline constexpr bool scores_by_warp<LinearScorer<D>> = true;

/// A scorer that takes a launch of its own before a step.
template <class S>
inline constexpr bool scored_before = false;
template <class Act, std::int32_t D>
inline constexpr bool scored_before<BasicMlpScorer<KeyValueInput, Act, D>> = true;
template <std::int32_t D, class Feature, class Values>
inline constexpr bool scored_before<mLSTMScorer<D, Feature, Values>> = true;

template <class S>
inline constexpr bool has_device_scorer =
    S::when == score_time::given || scores_by_warp<S> || scored_before<S>;

/// The sum of a number of each lane, in all lanes.
__device__ inline float warp_total(float x) {
#pragma unroll
    for (int step = 16; step != 0; step /= 2) {
        x += __shfl_xor_sync(all_lanes, x, step);
    }
    return x;
}

/// a . [k; v] + b, by all lanes of a warp.
template <std::int32_t D, class T>
__device__ float warp_score(const LinearScorer<D>& scorer, std::int32_t head, const T* key, const T* value,
                            std::int32_t dim_k, std::int32_t dim_v) {
    const float* const a = scorer.weights.weight + std::int64_t{head} * (dim_k + dim_v);
    float sum = 0.0f;
    for (std::int32_t i = lane_id(); i < dim_k; i += 32) {
        sum += a[i] * static_cast<float>(key[i]);
    }
    for (std::int32_t i = lane_id(); i < dim_v; i += 32) {
        sum += a[dim_k + i] * static_cast<float>(value[i]);
    }
    sum = warp_total(sum);
    return scorer.weights.bias != nullptr ? sum + scorer.weights.bias[head] : sum;
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
