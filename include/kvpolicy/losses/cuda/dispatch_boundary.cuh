// Dispatch of the boundary loss: ranks and cutoffs of the target, then the kernels of
// losses/cuda/kernel_boundary.cuh.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/share.hpp>
#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/losses/boundary.hpp>
#include <kvpolicy/losses/check.hpp>
#include <kvpolicy/losses/cuda/kernel_boundary.cuh>
#include <kvpolicy/masks/cuda/dispatch_build_mask.cuh>
#include <kvpolicy/masks/cuda/make_mask_params.cuh>

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The arrays of a call.
struct boundary_memory {
    std::int32_t *rank, *cutoff, *order, *drawn, *first, *last;
    double *prefix, *slope;
    boundary_plane* planes;
    std::int32_t* first_draw = nullptr;
    std::int64_t* valid = nullptr;
    std::int32_t tiles;
    boundary_tile* sums;
    small_numbers small;
    unsigned char* ranking;
    std::size_t ranking_bytes;

    template <class P>
    boundary_memory(const cuda& ctx, const P& policy, const Sequences& sequences, std::int32_t heads,
                    workspace_parts& parts) {
        const std::int64_t count = std::int64_t{sequences.batch} * heads * sequences.length;
        for (std::int32_t** row : {&rank, &cutoff, &order, &drawn, &first, &last}) {
            *row = parts.take<std::int32_t>(count);
        }
        prefix = parts.take<double>(count);
        slope = parts.take<double>(count);
        planes = parts.take<boundary_plane>(std::int64_t{sequences.batch} * heads);
        if (sequences.cu_seqlens != nullptr) {
            const std::int64_t segments = std::max(sequences.segments, 0);
            first_draw = parts.take<std::int32_t>(std::int64_t{sequences.batch} * heads * (segments + 1));
            valid = parts.take<std::int64_t>(std::int64_t{sequences.batch} * heads);
        }
        tiles = (sequences.length + boundary_threads - 1) / boundary_threads;
        sums = parts.take<boundary_tile>(std::int64_t{sequences.batch} * heads * tiles);
        small = small_numbers::take(parts, sequences, heads);
        ranking_bytes = build_cutoffs_workspace_bytes(ctx, policy, sequences, heads);
        ranking = parts.take<unsigned char>(static_cast<std::int64_t>(ranking_bytes));
    }

    template <class Gate, class Keep>
    void place(boundary_params<Gate, Keep>& params) const {
        params.rank = rank;
        params.cutoff = cutoff;
        params.order = order;
        params.drawn = drawn;
        params.first = first;
        params.last = last;
        params.prefix = prefix;
        params.slope = slope;
        params.planes = planes;
        params.first_draw = first_draw;
        params.valid = valid;
        params.tiles = tiles;
        params.sums = sums;
    }
};

/// The loss's numbers as its kernels take them.
inline boundary_numbers boundary_numbers_of(const BoundaryLoss& loss, std::int32_t heads_of_layer) {
    boundary_numbers numbers{};
    numbers.temperature = static_cast<double>(loss.temperature);
    numbers.omega_min = static_cast<double>(loss.margin.omega_min);
    numbers.margin_temperature = static_cast<double>(loss.margin.temperature);
    numbers.least = static_cast<double>(loss.balance.least);
    numbers.most = static_cast<double>(loss.balance.most);
    numbers.scale = static_cast<double>(loss.scale);
    numbers.balance = loss.balance.enabled;
    numbers.count = loss.sampler.count;
    numbers.late = nearest_count_of_share(loss.sampler.late, loss.sampler.count);
    numbers.late_share = loss.sampler.late;
    numbers.seed = loss.sampler.seed;
    numbers.layer = loss.layer;
    numbers.heads = heads_of_layer;
    return numbers;
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN

template <AnyPolicy P, class Build>
std::size_t BoundaryLoss::workspace_bytes(const cuda& ctx, const P& policy, const Sequences& sequences,
                                          std::int32_t heads) const {
    cuda_backend::check_shape(sequences, heads);
    cuda_backend::workspace_parts parts(nullptr);
    const cuda_backend::boundary_memory memory(ctx, policy, sequences, heads, parts);
    return parts.bytes();
}

template <AnyPolicy P, class Real, class Build>
void BoundaryLoss::operator()(const cuda& ctx, const P& policy, input_plane<Real> scores,
                              plane_view<const float> target, const Sequences& sequences,
                              plane_view<Real> d_scores, double* d_log_gamma, BoundaryValue* value,
                              workspace_view workspace, const BoundaryOptions& options) const {
    namespace cb = cuda_backend;
    static_assert(P::has_budget && !P::shares_budget && !P::has_gate,
                  "kvpolicy: BoundaryLoss needs a policy with a TopKBudget and without a gate");
    static_assert(std::is_same_v<Real, float>, "kvpolicy: scores on CUDA are fp32");
    const BoundaryLoss& loss = *this;
    std::uint32_t* const status = options.status;
    const std::int32_t heads = d_scores.heads;
    checks::check_boundary(loss);
    checks::check_value(value);
    policy.check_layer(loss.layer, heads);
    checks::check_boundary_layers(options.layers, heads);
    cb::check_whole_sequences(sequences, d_scores.batch, d_scores.length);
    cb::check_plane("d_scores", d_scores, sequences.batch, heads, sequences.length);
    cb::check_plane("scores", scores, sequences.batch, heads, sequences.length);
    cb::check_plane("target", target, sequences.batch, heads, sequences.length);
    cb::check_workspace(workspace, workspace_bytes<P, Build>(ctx, policy, sequences, heads));
    const cb::device_scope device(ctx);
    cb::workspace_parts parts(workspace.data);
    const cb::boundary_memory memory(ctx, policy, sequences, heads, parts);
    const auto plane = [&](std::int32_t* data) {
        return view_bhs(data, sequences.batch, heads, sequences.length);
    };
    // Refuses decay steps above 1.
    cb::cutoffs_of<ParallelCutoff>(ctx, policy, options.log_gamma, target, sequences, plane(memory.rank),
                                   plane(memory.cutoff), {memory.ranking, memory.ranking_bytes}, loss.layer,
                                   status);
    const auto wait_for_scores = [&] {
        if (options.scores_ready != nullptr) {
            cb::check(cudaStreamWaitEvent(ctx.stream, options.scores_ready, 0), "cudaStreamWaitEvent");
        }
    };
    const std::int64_t planes = std::int64_t{sequences.batch} * heads;
    if (planes > 0 && sequences.length > 0) {
        auto mask = cb::make_params(ctx, policy, target, sequences, heads, loss.layer, memory.small, status);
        mask.all_params.log_gamma = options.log_gamma;
        using Gate = std::remove_cvref_t<decltype(mask.gate)>;
        using Keep = std::remove_cvref_t<decltype(mask.keep)>;
        cb::boundary_params<Gate, Keep> params{mask, scores, d_scores, {}};
        params.numbers = cb::boundary_numbers_of(loss, heads / options.layers);
        memory.place(params);
        const std::int64_t blocks = planes * memory.tiles;
        const bool packed = sequences.cu_seqlens != nullptr;
        if (packed) {
            cb::launch("boundary_shares_kernel", cb::boundary_shares_kernel<Gate, Keep>, planes,
                       cb::boundary_threads, 0, ctx, params);
        }
        cb::launch("boundary_begin_kernel", cb::boundary_begin_kernel<Gate, Keep>, blocks,
                   cb::boundary_threads, 0, ctx, params);
        if (params.numbers.count < sequences.length) {  // else all are drawn
            // Shares of packed segments are rounded up.
            const std::int64_t draws = std::int64_t{params.numbers.count} + (packed ? sequences.segments : 0);
            const auto of_plane =
                static_cast<std::int32_t>((draws + cb::boundary_threads - 1) / cb::boundary_threads);
            cb::launch("boundary_draw_kernel", cb::boundary_draw_kernel<Gate, Keep>, planes * of_plane,
                       cb::boundary_threads, 0, ctx, params, of_plane);
        }
        cb::launch("boundary_examples_kernel", cb::boundary_examples_kernel<Gate, Keep>, blocks,
                   cb::boundary_threads, 0, ctx, params);
        wait_for_scores();  // before this nobody reads them
        cb::launch("boundary_gradient_kernel", cb::boundary_gradient_kernel<Gate, Keep>, blocks,
                   cb::boundary_threads, 0, ctx, params);
        cb::launch("boundary_scan_kernel", cb::boundary_scan_kernel<cb::boundary_tile>, planes, 32, 0, ctx,
                   memory.planes, memory.sums, memory.tiles);
        cb::launch("boundary_finish_kernel", cb::boundary_finish_kernel<Gate, Keep>, blocks,
                   cb::boundary_threads, 0, ctx, params);
    } else {
        wait_for_scores();
    }
    cb::launch("boundary_value_kernel", cb::boundary_value_kernel<BoundaryValue>, 1, cb::boundary_threads, 0,
               ctx, static_cast<const cb::boundary_plane*>(memory.planes), sequences.length > 0 ? planes : 0,
               heads, d_log_gamma, value);
}

}  // namespace kvpolicy
