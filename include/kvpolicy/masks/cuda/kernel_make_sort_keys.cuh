#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/masks/cuda/mask_params.cuh>
#include <kvpolicy/masks/cuda/priority_keys.cuh>
#include <kvpolicy/masks/cuda/sorted_keys.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Tokens that a block of make_sort_keys_kernel takes.
inline constexpr int keys_of_block = 4 * device_threads;

/// The sort key (segment << bits | priority prefix) and the token of every key, for one sort over the whole
/// device.
///
/// Grid: planes * S / keys_of_block. Block: device_threads. Shared memory: none. Reads scores [B, Hkv, S],
/// fp32. Overwrites out.keys (uint64) and out.tokens (int32) [planes, S]. Reports status_bad_length and
/// status_nan_score.
template <class Gate, class Keep>
__global__ void __launch_bounds__(device_threads)
    make_sort_keys_kernel(const mask_params<Gate, Keep> params, const sorted_keys out) {
    const auto parts = static_cast<unsigned>((params.length + keys_of_block - 1) / keys_of_block);
    const std::int64_t plane = blockIdx.x / parts;
    const auto part = static_cast<std::int32_t>(blockIdx.x % parts);
    const auto b = params.sequence_of(plane);
    const auto h = params.head_of(plane);
    if (threadIdx.x == 0 && part == 0 && h == 0) {
        params.check_length(b);
    }
    const float* const scores = params.scores.head(b, h);
    bool nan = false;
#pragma unroll
    for (int i = 0; i < keys_of_block / device_threads; ++i) {
        const std::int32_t token =
            part * keys_of_block + i * device_threads + static_cast<std::int32_t>(threadIdx.x);
        if (token >= params.length) {
            break;
        }
        const std::int64_t task = plane * params.segments + params.segment_of_token(token);
        const sorted_segment segment = segment_of_task(params, task);
        const std::int32_t t = token - segment.begin;
        std::uint64_t key = out.idle();
        if (!params.by_decayed_top_k(segment.head_params) &&
            params.leaves(segment.head_params, t, segment.n)) {
            const float score = scores[token];
            nan = nan || score != score;
            if (params.gate.open(score, segment.head_params)) {
                const bool is_exact = params.has_exact_keys(segment.head_params);
                const double priority =
                    is_exact ? 0.0 : static_priority(score, segment.head_params.log_gamma, t);
                key = priority_prefix(score, is_exact, priority, out.bits);
            }
        }
        const std::int64_t at = plane * params.length + token;
        out.keys[at] = static_cast<std::uint64_t>(task) << out.bits | key;
        out.tokens[at] = token;
    }
    if (nan) {
        params.report(b, status_nan_score);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
