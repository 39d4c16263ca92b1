// Ranks of long sequences: one sort over the whole device with (segment, priority) as its key.
// masks/cuda/kernel_make_sort_keys.cuh writes the keys, masks/cuda/kernel_fix_ties.cuh and
// kernel_sort_long_ties.cuh put runs of equal keys right whose priorities differ, and
// masks/cuda/kernel_cutoff_prefix.cuh turns the order into ranks and cutoffs. Here is what they share.
//
// All of them count tokens from their plane's begin ("absolute"); a plane's part of the sorted arrays is its
// own `length` entries, and in it a segment's part is its own tokens' range, since keys begin with the
// segment.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/masks/cuda/mask_params.cuh>
#include <kvpolicy/masks/cuda/priority_keys.cuh>
#include <kvpolicy/policies/parameters.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The sort's arrays, [planes * length] each; `tokens` are absolute.
struct sorted_keys {
    std::uint64_t* keys = nullptr;  // segment of the call << bits | priority_prefix
    std::int32_t* tokens = nullptr;
    int bits = 32;

    __device__ std::uint64_t idle() const { return (std::uint64_t{1} << bits) - 1; }
    __device__ std::uint64_t nan() const { return idle() - 1; }
    __device__ std::uint64_t prefix_of(std::uint64_t key) const { return key & idle(); }
    __device__ std::int64_t task_of(std::uint64_t key) const {
        return static_cast<std::int64_t>(key >> bits);
    }
};

inline constexpr int device_threads = 256;

/// Segment `task` = plane * segments + index: where it begins in the sorted arrays, and its plane's rule.
struct sorted_segment {
    std::int64_t plane;
    std::int32_t begin;
    std::int32_t n;  // tokens that count
    HeadParams head_params;
};

template <class Params>
__device__ inline sorted_segment segment_of_task(const Params& params, std::int64_t task) {
    const std::int64_t plane = params.plane_of(task);
    const auto index = params.segment_of_task(task);
    const auto b = params.sequence_of(plane);
    const segment_range range = params.segment(b, index);
    const std::int32_t begin = params.edges == nullptr ? 0 : params.edge(index);
    return {plane, begin, range.length(), params.head_params_of(plane)};
}

/// The 64-bit code of an absolute token; what does not compete is last.
template <class Gate, class Keep>
__device__ inline std::uint64_t code_of_token(const mask_params<Gate, Keep>& params,
                                              const sorted_segment& segment, std::int32_t token) {
    const std::int32_t t = token - segment.begin;
    if (!params.leaves(segment.head_params, t, segment.n)) {
        return idle_code;
    }
    const auto b = params.sequence_of(segment.plane);
    const auto h = params.head_of(segment.plane);
    const float score = params.scores.head(b, h)[token];
    return params.gate.open(score, segment.head_params) ? priority_code(segment.head_params, score, t)
                                                        : idle_code;
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
