// Bodies of masks/cuda_build.cuh: arguments are checked here, and handed to the launches of
// dispatch_rank_and_expire.cuh.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/tuning.cuh>
#include <kvpolicy/masks/check_cutoffs.hpp>
#include <kvpolicy/masks/cuda/dispatch_rank_and_expire.cuh>
#include <kvpolicy/masks/cuda/dispatch_shared_mask.cuh>
#include <kvpolicy/masks/cuda/kernel_cutoffs.cuh>
#include <kvpolicy/masks/cuda/make_mask_params.cuh>
#include <kvpolicy/masks/cuda_build.cuh>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class P>
void check_mask_call(const P& policy, plane_view<const float> scores, const Sequences& sequences,
                     std::int32_t batch, std::int32_t heads, std::int32_t length, std::int32_t layer) {
    policy.check_layer(layer, heads);
    check_whole_sequences(sequences, batch, length);
    if constexpr (P::ranked) {
        check_plane("scores", scores, batch, heads, sequences.length);
    }
}

/// The tuning for a context's GPU.
inline mask_tuning mask_tuning_of(const cuda& ctx) {
    const device_scope device(ctx);
    return select_mask_tuning(device.capability());
}

// build_mask with a given tuning, so that tests can take every way on one GPU.

template <class P>
std::size_t mask_workspace_bytes(const cuda& ctx, const P& policy, const Sequences& sequences,
                                 std::int32_t heads, const MaskOptions& options, const mask_tuning& tuning) {
    check_shape(sequences, heads);
    policy.check_layer(options.layer, heads);
    workspace_parts parts(nullptr);
    static_cast<void>(small_numbers::take(parts, sequences, heads));
    if constexpr (P::shares_budget) {
        const device_scope device(ctx);
        const shared_mask_plan plan(policy, sequences, heads, options);
        static_cast<void>(shared_mask_memory::take(parts, plan, sequences, heads, ctx));
    } else if constexpr (P::has_budget) {
        const device_scope device(ctx);
        const mask_plan plan =
            plan_mask(policy, sequences, heads, options.layer, options.rebase_limit, tuning);
        if (plan.ranked) {
            static_cast<void>(
                ranking_memory::take(parts, plan.by_block, ranking_shape(sequences, heads), ctx));
        }
        if (plan.decayed_rounds) {
            static_cast<void>(take_decayed_lists(parts, sequences, heads));
        }
        if (plan.decayed_top_k) {
            const std::int64_t segments = sequences.cu_seqlens == nullptr ? 1 : sequences.segments;
            static_cast<void>(
                parts.take<top_k_entry>(std::int64_t{sequences.batch} * heads * segments * plan.max_entries));
        }
    }
    return parts.bytes();
}

template <class P>
void build_mask_tuned(const cuda& ctx, const P& policy, plane_view<const float> scores,
                      const Sequences& sequences, plane_view<expiry_t> expiry, workspace_view workspace,
                      const MaskOptions& options, std::uint32_t* status, const mask_tuning& tuning) {
    const std::int32_t heads = expiry.heads;
    check_mask_call(policy, scores, sequences, expiry.batch, heads, expiry.length, options.layer);
    check_plane("expiry", expiry, sequences.batch, heads, sequences.length);
    detail::require(options.rebase_limit >= 1 && options.rebase_limit <= rebase_limit, "rebase_limit",
                    options.rebase_limit, "1 to 2^29");
    check_workspace(workspace, mask_workspace_bytes(ctx, policy, sequences, heads, options, tuning));
    if (sequences.batch == 0 || heads == 0 || sequences.length == 0) {
        return;
    }

    const device_scope device(ctx);
    workspace_parts parts(workspace.data);
    const small_numbers small = small_numbers::take(parts, sequences, heads);
    auto params = make_params(ctx, policy, scores, sequences, heads, options.layer, small, status);
    params.limit = options.rebase_limit;
    using Gate = decltype(params.gate);
    using Keep = decltype(params.keep);
    const std::int64_t planes = std::int64_t{params.batch} * heads;
    if constexpr (P::shares_budget) {
        const shared_mask_plan plan(policy, sequences, heads, options);
        const auto memory = shared_mask_memory::take(parts, plan, sequences, heads, ctx);
        build_shared_mask(ctx, device, plan, params, memory, expiry, tuning);
    } else if constexpr (!P::has_budget) {
        launch("expire_alone_kernel", expire_alone_kernel<P::ranked, Gate, Keep>, planes * params.chunks,
               mask_chunk, 0, ctx, params, expiry);
    } else {
        const mask_plan plan =
            plan_mask(policy, sequences, heads, options.layer, options.rebase_limit, tuning);
        if (plan.ranked) {
            const ranking_memory memory =
                ranking_memory::take(parts, plan.by_block, ranking_shape(sequences, heads), ctx);
            rank_and_expire(ctx, device, plan, params, memory, {expiry, {}, {}}, false, tuning);
        }
        if (plan.decayed_rounds) {
            launch("decayed_rounds_kernel", decayed_rounds_kernel<Gate, Keep>, planes * params.segments,
                   decayed_round_threads, sizeof(typename decayed_rounds_block<Gate, Keep>::shared), ctx,
                   params, expiry, take_decayed_lists(parts, sequences, heads));
        }
        if (plan.decayed_top_k) {
            const std::int64_t tasks = planes * params.segments;
            launch_decayed_top_k(ctx, params, expiry, parts.take<top_k_entry>(tasks * plan.max_entries),
                                 plan.max_entries);
        }
    }
}

}  // namespace cuda_backend

template <AnyPolicy P>
std::size_t build_mask_workspace_bytes(const cuda& ctx, const P& policy, const Sequences& sequences,
                                       std::int32_t heads, const MaskOptions& options) {
    return cuda_backend::mask_workspace_bytes(ctx, policy, sequences, heads, options,
                                              cuda_backend::mask_tuning_of(ctx));
}

template <AnyPolicy P>
void build_mask(const cuda& ctx, const P& policy, plane_view<const float> scores, const Sequences& sequences,
                plane_view<expiry_t> expiry, workspace_view workspace, const MaskOptions& options) {
    cuda_backend::build_mask_tuned(ctx, policy, scores, sequences, expiry, workspace, options, options.status,
                                   cuda_backend::mask_tuning_of(ctx));
}

template <Cutoff C, AnyPolicy P>
std::size_t build_cutoffs_workspace_bytes(const cuda& ctx, const P&, const Sequences& sequences,
                                          std::int32_t heads, const MaskOptions&) {
    using namespace cuda_backend;
    static_assert(P::has_budget && !P::shares_budget,
                  "kvpolicy: build_cutoffs needs a policy with a TopKBudget");
    check_shape(sequences, heads);
    const device_scope device(ctx);
    workspace_parts parts(nullptr);
    static_cast<void>(small_numbers::take(parts, sequences, heads));
    mask_plan plan;  // the rules do not matter: no call here has an order that depends on the query
    plan.by_block = sequences.length <= select_mask_tuning(device.capability()).longest_block_sort;
    static_cast<void>(ranking_memory::take(parts, plan.by_block, ranking_shape(sequences, heads), ctx));
    if constexpr (!std::is_same_v<C, ParallelCutoff>) {
        constexpr std::size_t unit = workspace_parts::alignment;
        const std::size_t each = (C::scratch_bytes(sequences.length) + unit - 1) / unit * unit;
        static_cast<void>(parts.take<unsigned char>(std::int64_t{sequences.batch} * heads *
                                                    static_cast<std::int64_t>(each)));
    }
    return parts.bytes();
}

namespace cuda_backend {

/// build_cutoffs; with log_gamma [heads], in device memory, in place of the policy's. ParallelCutoff takes
/// packed segments, too: ranks and cutoffs are those of each.
template <Cutoff C, class P>
void cutoffs_of(const cuda& ctx, const P& policy, const float* log_gamma, plane_view<const float> scores,
                const Sequences& sequences, plane_view<std::int32_t> rank, plane_view<std::int32_t> cutoff,
                workspace_view workspace, std::int32_t layer, std::uint32_t* status) {
    static_assert(P::has_budget && !P::shares_budget,
                  "kvpolicy: build_cutoffs needs a policy with a TopKBudget");
    const std::int32_t heads = rank.heads;
    check_mask_call(policy, scores, sequences, rank.batch, heads, rank.length, layer);
    check_plane("rank", rank, sequences.batch, heads, sequences.length);
    check_plane("cutoff", cutoff, sequences.batch, heads, sequences.length);
    checks::check_static_ranks(policy, sequences, heads, layer);
    check_workspace(workspace, build_cutoffs_workspace_bytes<C>(ctx, policy, sequences, heads));
    if (sequences.batch == 0 || heads == 0 || sequences.length == 0) {
        return;
    }

    const device_scope device(ctx);
    const mask_tuning tuning = select_mask_tuning(device.capability());
    workspace_parts parts(workspace.data);
    const small_numbers small = small_numbers::take(parts, sequences, heads);
    auto params = make_params(ctx, policy, scores, sequences, heads, layer, small, status);
    params.all_params.log_gamma = log_gamma;
    mask_plan plan = plan_mask(policy, sequences, heads, layer, rebase_limit, tuning);
    plan.decayed = plan.decayed || log_gamma != nullptr;
    const ranking_memory memory =
        ranking_memory::take(parts, plan.by_block, ranking_shape(sequences, heads), ctx);
    constexpr bool parallel = std::is_same_v<C, ParallelCutoff>;
    rank_and_expire(ctx, device, plan, params, memory,
                    {{}, rank, parallel ? cutoff : plane_view<std::int32_t>{}}, true, tuning);
    if constexpr (!parallel) {
        using Gate = std::remove_cvref_t<decltype(params.gate)>;
        using Keep = std::remove_cvref_t<decltype(params.keep)>;
        constexpr std::size_t unit = workspace_parts::alignment;
        const std::size_t each = (C::scratch_bytes(sequences.length) + unit - 1) / unit * unit;
        const std::int64_t planes = std::int64_t{sequences.batch} * heads;
        auto* const scratch = parts.take<unsigned char>(planes * static_cast<std::int64_t>(each));
        launch("sequential_cutoffs_kernel", sequential_cutoffs_kernel<C, Gate, Keep>,
               (planes + plane_threads - 1) / plane_threads, plane_threads, 0, ctx, params,
               plane_view<const std::int32_t>(rank), cutoff, scratch, each);
    }
}

}  // namespace cuda_backend

template <Cutoff C, AnyPolicy P>
void build_cutoffs(const cuda& ctx, const P& policy, plane_view<const float> scores,
                   const Sequences& sequences, plane_view<std::int32_t> rank, plane_view<std::int32_t> cutoff,
                   workspace_view workspace, const MaskOptions& options) {
    checks::check_one_segment(sequences);
    cuda_backend::cutoffs_of<C>(ctx, policy, nullptr, scores, sequences, rank, cutoff, workspace,
                                options.layer, options.status);
}

template <AnyPolicy P>
std::size_t expiry_from_cutoffs_workspace_bytes(const cuda&, const P&, const Sequences& sequences,
                                                std::int32_t heads, const MaskOptions&) {
    using namespace cuda_backend;
    check_shape(sequences, heads);
    workspace_parts parts(nullptr);
    static_cast<void>(small_numbers::take(parts, sequences, heads));
    return parts.bytes();
}

template <AnyPolicy P>
void expiry_from_cutoffs(const cuda& ctx, const P& policy, plane_view<const std::int32_t> rank,
                         plane_view<const std::int32_t> cutoff, const Sequences& sequences,
                         plane_view<expiry_t> expiry, workspace_view workspace, const MaskOptions& options) {
    using namespace cuda_backend;
    static_assert(!P::shares_budget, "kvpolicy: expiry_from_cutoffs takes cutoffs of single heads");
    const std::int32_t layer = options.layer;
    const std::int32_t heads = expiry.heads;
    policy.check_layer(layer, heads);
    cuda_backend::check_whole_sequences(sequences, expiry.batch, expiry.length);
    check_plane("rank", rank, sequences.batch, heads, sequences.length);
    check_plane("cutoff", cutoff, sequences.batch, heads, sequences.length);
    check_plane("expiry", expiry, sequences.batch, heads, sequences.length);
    detail::require(sequences.cu_seqlens == nullptr, "sequences.cu_seqlens", "given",
                    "null (build_mask takes packed segments)");
    cuda_backend::check_workspace(workspace,
                                  expiry_from_cutoffs_workspace_bytes(ctx, policy, sequences, heads));
    if (sequences.batch == 0 || heads == 0 || sequences.length == 0) {
        return;
    }

    const device_scope device(ctx);
    workspace_parts parts(workspace.data);
    const small_numbers small = small_numbers::take(parts, sequences, heads);
    const auto params = make_params(ctx, policy, {}, sequences, heads, layer, small, options.status);
    using Gate = std::remove_cvref_t<decltype(params.gate)>;
    using Keep = std::remove_cvref_t<decltype(params.keep)>;
    launch("expiry_from_cutoffs_kernel", expiry_from_cutoffs_kernel<Gate, Keep>,
           std::int64_t{params.batch} * heads * params.chunks, mask_chunk, 0, ctx, params, rank, cutoff,
           expiry);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
