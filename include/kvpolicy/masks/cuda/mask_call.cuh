// A call's policy and sequences as kernels of masks take them.
#pragma once

#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/kernel_check_edges.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/masks/cuda/kernel_write_rules.cuh>
#include <kvpolicy/masks/cuda/mask_params.cuh>
#include <kvpolicy/policies/compose.hpp>

#include <algorithm>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Whether all heads of a layer have one rule.
template <class P>
bool uniform_rules(const P& policy, std::int32_t layer, std::int32_t heads) {
    const HeadRule first = policy.rule(layer, 0);
    for (std::int32_t h = 1; h < heads; ++h) {
        const HeadRule rule = policy.rule(layer, h);
        // Not ==: a NaN would make a rule differ from itself, but check() refuses those.
        if (rule.sinks != first.sinks || rule.window != first.window || rule.budget != first.budget ||
            rule.decay_step != first.decay_step || rule.log_gamma != first.log_gamma ||
            rule.threshold != first.threshold) {
            return false;
        }
    }
    return true;
}

/// Rules and edges in device memory: what a problem's kernels read of the call's small numbers.
struct small_numbers {
    HeadRule* rules;
    std::int32_t* edges;

    static small_numbers take(workspace_parts& parts, const Sequences& sequences, std::int32_t heads) {
        return {parts.take<HeadRule>(heads),
                parts.take<std::int32_t>(
                    sequences.cu_seqlens == nullptr ? 0 : std::int64_t{sequences.segments} + 1)};
    }
};

/// The problem of a call, with whatever has to be in device memory first already enqueued.
template <class P>
auto make_problem(const cuda& on, const P& policy, plane_view<const float> scores, const Sequences& sequences,
                  std::int32_t heads, std::int32_t layer, const small_numbers& memory,
                  std::uint32_t* status) {
    using Gate = typename P::gate_type;
    using Keep = decltype(policy.keep());
    mask_problem<Gate, Keep> problem{};
    problem.scores = scores;
    problem.batch = sequences.batch;
    problem.heads = heads;
    problem.length = sequences.length;
    problem.lengths = sequences.lengths;
    problem.gate = policy.gate();
    problem.keep = policy.keep();
    problem.status = status;
    problem.slots = static_cast<std::int32_t>(slots_of(sequences));
    if (sequences.cu_seqlens != nullptr) {
        problem.segments = sequences.segments;
        problem.edges = memory.edges;
        launch("check_edges_kernel", check_edges_kernel<std::int32_t>, 1, 256, 0, on, sequences.cu_seqlens,
               sequences.segments, sequences.length, memory.edges, status, sequences.batch);
    }
    problem.rules.common = policy.rule(layer, 0);
    if (!uniform_rules(policy, layer, heads)) {
        problem.rules.table = memory.rules;
        for (std::int32_t first = 0; first < heads; first += rule_batch::capacity) {
            rule_batch batch;
            batch.first = first;
            batch.count = std::min(heads - first, rule_batch::capacity);
            for (std::int32_t i = 0; i < batch.count; ++i) {
                batch.rules[i] = policy.rule(layer, first + i);
            }
            launch("write_rules_kernel", write_rules_kernel<HeadRule>, 1, rule_batch::capacity, 0, on, batch,
                   memory.rules);
        }
    }
    return problem;
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
