#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/masks/cuda/agent_rank.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Ranks and cutoff_checkpoints of segments of up to Threads * Items tokens, sorted in shared memory.
///
/// Grid: planes * segments. Block: Threads. Shared memory: agent_rank::shared (dynamic). Reads scores [B,
/// Hkv, S], fp32. Overwrites out.rank and order [planes, S] (uint16), checkpoints [planes, chunks] and
/// competitors [planes, segments]. Reports status_bad_length and status_nan_score. Phases: agent_rank::run
/// (agent_rank.cuh).
template <int Threads, int Items, int Bits, class Gate, class Keep>
__global__ void __launch_bounds__(Threads)
    rank_kernel(const mask_params<Gate, Keep> params, const ranking<std::uint16_t> out,
                const bool wants_ranks) {
    using block = agent_rank<Threads, Items, Bits, Gate, Keep>;
    const std::int64_t plane = blockIdx.x / static_cast<unsigned>(params.segments);
    const auto index = static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(params.segments));
    const auto b = params.sequence_of(plane);
    const segment_range segment = params.segment(b, index);
    if (threadIdx.x == 0 && index == 0 && params.head_of(plane) == 0) {
        params.check_length(b);
    }
    const HeadParams head_params = params.all_params.of(params.head_of(plane));
    if (segment.length() == 0 || params.by_decayed_top_k(head_params)) {
        return;
    }
    block(params, out, plane, segment, *reinterpret_cast<typename block::shared*>(dynamic_shared()))
        .run(wants_ranks);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
