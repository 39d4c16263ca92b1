#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/masks/cuda/agent_expire.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Expiries, ranks and cutoffs of a chunk of keys, from ranks and cutoff_checkpoints.
///
/// Grid: planes * chunks; early chunks first, since their rank windows are longest. Block: mask_chunk
/// threads, a key each. Shared memory: agent_expire::shared (dynamic). Reads ranks.rank and order [planes,
/// S], checkpoints [planes, chunks], competitors [planes, segments]. Overwrites expiry, rank and cutoff [B,
/// Hkv, S], int32, where they are given. Phases: agent_expire::run (agent_expire.cuh).
template <class Index, class Params>
__global__ void __launch_bounds__(mask_chunk, 3)
    expire_kernel(const Params params, const ranking<Index> ranks, const mask_output out) {
    const auto planes = static_cast<unsigned>(params.planes());
    const auto chunk_index = static_cast<std::int32_t>(blockIdx.x / planes);
    const std::int64_t plane = blockIdx.x % planes;
    const auto b = params.sequence_of(plane);
    const segment_range segment = params.segment(b, params.segment_of_chunk(chunk_index));
    const std::int32_t first = (chunk_index - params.first_chunk(segment.index)) * mask_chunk;
    if (first >= segment.length() || params.by_decayed_top_k(params.head_params_of(plane))) {
        return;
    }
    using block = agent_expire<Index, Params>;
    block(params, ranks, out, plane, segment, first,
          *reinterpret_cast<typename block::shared*>(dynamic_shared()))
        .run(plane);
}

/// Expiries of policies without a budget: no key competes with another, so a key's own score decides.
///
/// Grid: planes * chunks. Block: mask_chunk threads, a key each. Shared memory: none. Reads scores [B, Hkv,
/// S], fp32, where `Ranked` (a gate). Overwrites out [B, Hkv, S], int32.
template <bool Ranked, class Gate, class Keep>
__global__ void __launch_bounds__(mask_chunk)
    expire_alone_kernel(const mask_params<Gate, Keep> params, const plane_view<expiry_t> out) {
    const auto planes = static_cast<unsigned>(params.planes());
    const auto chunk_index = static_cast<std::int32_t>(blockIdx.x / planes);
    const std::int64_t plane = blockIdx.x % planes;
    const auto b = params.sequence_of(plane);
    const auto h = params.head_of(plane);
    if (threadIdx.x == 0 && chunk_index == 0 && h == 0) {
        params.check_length(b);
    }
    const segment_range segment = params.segment(b, params.segment_of_chunk(chunk_index));
    const std::int32_t n = segment.length();
    const std::int32_t t = (chunk_index - params.first_chunk(segment.index)) * mask_chunk +
                           static_cast<std::int32_t>(threadIdx.x);
    if (t >= n) {
        return;
    }
    const HeadParams head_params = params.all_params.of(h);
    bool forever = params.forever(head_params, t);
    if constexpr (Ranked) {
        if (params.leaves(head_params, t, n)) {
            const float score = params.scores.head(b, h)[segment.begin + t];
            if (score != score) {
                params.report(b, status_nan_score);
            }
            forever = params.gate.open(score, head_params);
        }
    }
    out.head(b, h)[segment.begin + t] =
        in_sequence(forever ? never : window_expiry(t, head_params.window), segment, params.edges != nullptr);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
