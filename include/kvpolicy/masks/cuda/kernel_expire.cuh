#pragma once

#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/masks/cuda/agent_expire.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Expiries, ranks and cutoffs of a chunk of keys, from ranks and cutoff_checkpoints.
///
/// Grid: planes * slots; early chunks first, since their rank windows are longest. Block: mask_chunk threads,
/// a key each. Shared memory: expire_block::shared (dynamic). Reads ranks.rank and order [planes, S], anchors
/// [planes, slots], competitors [planes, segments]. Overwrites expiry, rank and cutoff [B, Hkv, S], int32,
/// where they are given. Phases: expire_block::run (agent_expire.cuh).
template <class Index, class Gate, class Keep>
__global__ void __launch_bounds__(mask_chunk, 3)
    expire_kernel(const mask_problem<Gate, Keep> problem, const ranking<Index> ranks, const mask_output out) {
    const auto planes = static_cast<unsigned>(problem.planes());
    const auto slot = static_cast<std::int32_t>(blockIdx.x / planes);
    const std::int64_t plane = blockIdx.x % planes;
    const auto b = problem.sequence_of(plane);
    const segment_range segment = problem.segment(b, problem.segment_of_slot(slot));
    const std::int32_t first = (slot - problem.first_slot(segment.index)) * mask_chunk;
    const HeadRule rule = problem.rules.of(problem.head_of(plane));
    if (first >= segment.length() || problem.by_survivors(rule)) {
        return;
    }
    using block = expire_block<Index, Gate, Keep>;
    block(problem, ranks, out, plane, segment, first,
          *reinterpret_cast<typename block::shared*>(dynamic_shared()))
        .run(plane);
}

/// Expiries of policies without a budget: no key competes with another, so a key's own score decides.
///
/// Grid: planes * slots. Block: mask_chunk threads, a key each. Shared memory: none. Reads scores [B, Hkv,
/// S], fp32, where `Ranked` (a gate). Overwrites out [B, Hkv, S], int32.
template <bool Ranked, class Gate, class Keep>
__global__ void __launch_bounds__(mask_chunk)
    expire_alone_kernel(const mask_problem<Gate, Keep> problem, const plane_view<expiry_t> out) {
    const auto planes = static_cast<unsigned>(problem.planes());
    const auto slot = static_cast<std::int32_t>(blockIdx.x / planes);
    const std::int64_t plane = blockIdx.x % planes;
    const auto b = problem.sequence_of(plane);
    const auto h = problem.head_of(plane);
    if (threadIdx.x == 0 && slot == 0 && h == 0) {
        problem.check_length(b);
    }
    const segment_range segment = problem.segment(b, problem.segment_of_slot(slot));
    const std::int32_t n = segment.length();
    const std::int32_t t =
        (slot - problem.first_slot(segment.index)) * mask_chunk + static_cast<std::int32_t>(threadIdx.x);
    if (t >= n) {
        return;
    }
    const HeadRule rule = problem.rules.of(h);
    bool forever = problem.forever(rule, t);
    if constexpr (Ranked) {
        if (problem.leaves(rule, t, n)) {
            const float score = problem.scores.head(b, h)[segment.begin + t];
            if (score != score) {
                problem.report(b, status_nan_score);
            }
            forever = problem.gate.open(score, rule);
        }
    }
    out.head(b, h)[segment.begin + t] =
        in_sequence(forever ? never : window_expiry(t, rule.window), segment, problem.edges != nullptr);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
