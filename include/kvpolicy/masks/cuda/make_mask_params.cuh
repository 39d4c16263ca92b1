// A call's policy and sequences as kernels of masks take them.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/kernel_check_edges.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/masks/cuda/kernel_write_head_params.cuh>
#include <kvpolicy/masks/cuda/mask_params.cuh>
#include <kvpolicy/policies/compose.hpp>

#include <algorithm>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Whether all heads of a layer have one rule.
template <class P>
bool uniform_params(const P& policy, std::int32_t layer, std::int32_t heads) {
    const HeadParams first = policy.params(layer, 0);
    for (std::int32_t h = 1; h < heads; ++h) {
        const HeadParams head_params = policy.params(layer, h);
        // Not ==: a NaN would make a rule differ from itself, but check() refuses those.
        if (head_params.sinks != first.sinks || head_params.window != first.window ||
            head_params.budget != first.budget || head_params.decay_step != first.decay_step ||
            head_params.log_gamma != first.log_gamma || head_params.threshold != first.threshold ||
            head_params.floor != first.floor || head_params.cap != first.cap ||
            head_params.score_offset != first.score_offset) {
            return false;
        }
    }
    return true;
}

/// Rules and edges in device memory: what a call's kernels read of the call's small numbers.
struct small_numbers {
    HeadParams* all_params;
    std::int32_t* edges;

    static small_numbers take(workspace_parts& parts, const Sequences& sequences, std::int32_t heads) {
        return {parts.take<HeadParams>(heads),
                parts.take<std::int32_t>(
                    sequences.cu_seqlens == nullptr ? 0 : std::int64_t{sequences.segments} + 1)};
    }
};

/// The params of a call, with whatever has to be in device memory first already enqueued.
template <class P>
auto make_params(const cuda& ctx, const P& policy, plane_view<const float> scores, const Sequences& sequences,
                 std::int32_t heads, std::int32_t layer, const small_numbers& memory, std::uint32_t* status) {
    using Gate = typename P::gate_type;
    using Keep = decltype(policy.keep());
    mask_params<Gate, Keep> params{};
    params.scores = scores;
    params.batch = sequences.batch;
    params.heads = heads;
    params.length = sequences.length;
    params.lengths = sequences.lengths;
    params.gate = policy.gate();
    params.keep = policy.keep();
    params.status = status;
    params.chunks = static_cast<std::int32_t>(chunks_of(sequences));
    if (sequences.cu_seqlens != nullptr) {
        params.segments = sequences.segments;
        params.edges = memory.edges;
        launch("check_edges_kernel", check_edges_kernel<std::int32_t>, 1, 256, 0, ctx, sequences.cu_seqlens,
               sequences.segments, sequences.length, memory.edges, status, sequences.batch);
    }
    params.all_params.common = policy.params(layer, 0);
    if (!uniform_params(policy, layer, heads)) {
        params.all_params.table = memory.all_params;
        for (std::int32_t first = 0; first < heads; first += head_params_batch::capacity) {
            head_params_batch batch;
            batch.first = first;
            batch.count = std::min(heads - first, head_params_batch::capacity);
            for (std::int32_t i = 0; i < batch.count; ++i) {
                batch.all_params[i] = policy.params(layer, first + i);
            }
            launch("write_head_params_kernel", write_head_params_kernel<HeadParams>, 1,
                   head_params_batch::capacity, 0, ctx, batch, memory.all_params);
        }
    }
    return params;
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
