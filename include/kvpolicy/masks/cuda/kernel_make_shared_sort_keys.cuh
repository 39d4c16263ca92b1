#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/masks/cuda/priority_keys.cuh>
#include <kvpolicy/masks/cuda/shared_mask_params.cuh>
#include <kvpolicy/masks/cuda/sorted_keys.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The sort key (segment << bits | priority prefix) and the unit of every key of layers. The sort is stable,
/// so keys are written in the order of ties: by token, then by head.
///
/// Grid: batch * heads * S / device_threads. Block: device_threads, a key each. Shared memory: none. Reads
/// scores [B, Hkv, S], fp32. Overwrites out.keys (uint64) and out.tokens (int32) [B, S * Hkv]. Reports
/// status_bad_length and status_nan_score.
template <class Gate, class Keep>
__global__ void __launch_bounds__(device_threads)
    make_shared_sort_keys_kernel(const shared_mask_params<Gate, Keep> params, const sorted_keys out) {
    const auto blocks = static_cast<unsigned>((params.length + device_threads - 1) / device_threads);
    const auto b = static_cast<std::int32_t>(blockIdx.x / blocks);
    const auto at = static_cast<std::int32_t>(blockIdx.x % blocks) * device_threads +
                    static_cast<std::int32_t>(threadIdx.x);
    if (at == 0) {
        params.check_length(b);
    }
    if (at >= params.length) {
        return;
    }
    const auto token =
        static_cast<std::int32_t>(static_cast<std::uint32_t>(at) / static_cast<std::uint32_t>(params.heads));
    const std::int32_t head = at - token * params.heads;
    const std::int32_t index = params.segment_of_token(token);
    const std::int32_t begin = params.edges == nullptr ? 0 : params.by_head().edge(index);
    const std::int32_t n = params.by_head().segment(b, index).length();
    const std::int32_t t = token - begin;
    const HeadParams head_params = params.all_params.of(head);
    std::uint64_t key = out.idle();
    if (params.leaves(head_params, t, n)) {
        const float score = params.scores.head(b, head)[token];
        if (score != score) {
            params.report(b, status_nan_score);
        }
        if (params.gate.open(score, head_params)) {
            key =
                priority_prefix(score, params.is_exact,
                                params.is_exact ? 0.0 : params.priority_of(head_params, score, t), out.bits);
        }
    }
    const std::int64_t task = std::int64_t{b} * params.segments + index;
    const std::int64_t place = std::int64_t{b} * params.length + at;
    out.keys[place] = static_cast<std::uint64_t>(task) << out.bits | key;
    out.tokens[place] = begin * params.heads + params.unit_of({head, t}, head_params.window, n);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
