#pragma once

#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/masks/cuda/agent_rank.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Ranks and cutoff_checkpoints of segments of up to Threads * Items tokens, sorted in shared memory.
///
/// Grid: planes * segments. Block: Threads. Shared memory: rank_block::shared (dynamic). Reads scores [B,
/// Hkv, S], fp32. Overwrites out.rank and order [planes, S] (uint16), anchors [planes, slots] and competitors
/// [planes, segments]. Reports status_bad_length and status_nan_score. Phases: rank_block::run
/// (agent_rank.cuh).
template <int Threads, int Items, int Bits, class Gate, class Keep>
__global__ void __launch_bounds__(Threads)
    rank_block_kernel(const mask_problem<Gate, Keep> problem, const ranking<std::uint16_t> out,
                      const bool wants_ranks) {
    using block = rank_block<Threads, Items, Bits, Gate, Keep>;
    const std::int64_t plane = blockIdx.x / static_cast<unsigned>(problem.segments);
    const auto index = static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(problem.segments));
    const auto b = problem.sequence_of(plane);
    const segment_range segment = problem.segment(b, index);
    if (threadIdx.x == 0 && index == 0 && problem.head_of(plane) == 0) {
        problem.check_length(b);
    }
    const HeadRule rule = problem.rules.of(problem.head_of(plane));
    if (segment.length() == 0 || problem.by_survivors(rule)) {
        return;
    }
    block(problem, out, plane, segment, *reinterpret_cast<typename block::shared*>(dynamic_shared()))
        .run(wants_ranks);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
