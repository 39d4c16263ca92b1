// The launches of build_mask for a budget that the heads of a layer share: a sort where the order is static
// and no head has limits, one top-k update after another elsewhere.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/masks/cuda/dispatch_rank_and_expire.cuh>
#include <kvpolicy/masks/cuda/kernel_make_shared_sort_keys.cuh>
#include <kvpolicy/masks/cuda/kernel_shared_top_k.cuh>
#include <kvpolicy/masks/cuda/shared_mask_params.cuh>

#include <algorithm>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// How a call is done. Decided on the host from the heads' numbers and shapes.
struct shared_mask_plan {
    bool is_static = true;
    bool is_exact = true;  // priorities are the scores
    bool by_sort = true;
    std::int64_t top_k_slots = 0;
    std::int64_t entries = 0;  // of a segment's top-k updates
    float log_gamma = 0.0f;    // of all heads, where the order is static

    template <class P>
    shared_mask_plan(const P& policy, const Sequences& sequences, std::int32_t heads,
                     const MaskOptions& options) {
        if (heads == 0) {
            return;
        }
        top_k_slots = policy.shared_slots(options.layer, heads);
        is_static = policy.has_static_shared_order(options.layer, heads);
        log_gamma = policy.params(options.layer, 0).log_gamma;
        const bool base_moves = log_gamma != 0.0f && sequences.length > options.rebase_limit;
        by_sort = is_static && !base_moves;
        is_exact = is_static && log_gamma == 0.0f;
        for (std::int32_t h = 0; h < heads; ++h) {
            const HeadParams head_params = policy.params(options.layer, h);
            const std::int64_t leaving = std::max<std::int64_t>(
                0, std::int64_t{sequences.length} - head_params.sinks - head_params.window);
            by_sort = by_sort && head_params.floor == 0 && head_params.cap >= std::min(top_k_slots, leaving);
            is_exact = is_exact && head_params.score_offset == 0.0f;
            entries += leaving;
        }
        entries = std::min(entries, top_k_slots) + 1;
    }
};

/// Device memory of a call.
struct shared_mask_memory {
    ranking_memory ranks;            // by_sort
    layer_entry* entries = nullptr;  // otherwise

    static shared_mask_memory take(workspace_parts& parts, const shared_mask_plan& plan,
                                   const Sequences& sequences, std::int32_t heads, const cuda& ctx) {
        const ranking_shape shape = ranking_shape::of_layers(sequences, heads);
        detail::require(shape.length <= longest_sequence, "heads * length", shape.length,
                        "at most 2^31 - 2^24, where heads share a budget");
        shared_mask_memory memory;
        if (plan.by_sort) {
            memory.ranks = ranking_memory::take(parts, false, shape, ctx);
        } else {
            memory.entries = parts.take<layer_entry>(shape.tasks() * plan.entries);
        }
        return memory;
    }
};

/// build_mask, whose arguments have been checked.
template <class Gate, class Keep>
void build_shared_mask(const cuda& ctx, const device_scope& device, const shared_mask_plan& plan,
                       const mask_params<Gate, Keep>& call, const shared_mask_memory& memory,
                       plane_view<expiry_t> expiry, const mask_tuning& tuning) {
    shared_mask_params<Gate, Keep> params{call};
    Sequences sequences{.batch = call.batch, .length = call.length};
    sequences.segments = call.segments;
    sequences.cu_seqlens = call.edges;
    const ranking_shape shape = ranking_shape::of_layers(sequences, call.heads);
    params.length = static_cast<std::int32_t>(shape.length);
    params.chunks = static_cast<std::int32_t>(shape.chunks);
    params.layer_params.window = 0;
    params.layer_params.budget = static_cast<std::int32_t>(plan.top_k_slots);
    params.layer_params.log_gamma = plan.log_gamma;
    params.is_exact = plan.is_exact;
    params.is_static = plan.is_static;
    if (!plan.by_sort) {
        launch("shared_top_k_kernel", shared_top_k_kernel<Gate, Keep>, shape.tasks(), shared_top_k_threads,
               sizeof(typename shared_top_k_block<Gate, Keep>::shared) +
                   static_cast<std::size_t>(call.heads) * sizeof(std::int32_t),
               ctx, params, expiry, memory.entries, plan.entries);
        return;
    }
    sort_and_expire(ctx, device, !plan.is_exact, params, memory.ranks, {expiry, {}, {}}, tuning,
                    [&](const sorted_keys& unsorted) {
                        const std::int64_t blocks = (shape.length + device_threads - 1) / device_threads;
                        launch("make_shared_sort_keys_kernel", make_shared_sort_keys_kernel<Gate, Keep>,
                               shape.planes * blocks, device_threads, 0, ctx, params, unsorted);
                    });
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
