// Bodies of attention/cuda_observed_mask.cuh: checks, workspace, and the launches of each block.
#pragma once

#include <kvpolicy/attention/cuda/dispatch_received_mass.cuh>
#include <kvpolicy/attention/cuda/received_mass/kernel_observed_list.cuh>
#include <kvpolicy/attention/cuda/received_mass/launch_received_mass.cuh>
#include <kvpolicy/attention/cuda_observed_mask.cuh>
#include <kvpolicy/attention/observed_mask.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/masks/cuda/kernel_write_head_params.cuh>
#include <kvpolicy/scorers/observed.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A call of build_observed_mask, and the kernels that it takes.
template <class P, class T>
struct observed_mask_params {
    const cuda& ctx;
    const P& policy;
    AttentionParams attention;
    rows_view<const T> q, k;
    Sequences sequences;
    ObservedMaskOptions options;
    qk_reduce_path path = qk_reduce_path::hopper;
};

/// An observed mask on its way: the lists of all heads, and blocks one after the other.
template <class P, class T, class Dims>
class observed_mask_plan {
    static_assert(P::observed,
                  "kvpolicy: build_observed_mask takes a policy whose scorer is an ObservedScorer; "
                  "build_mask takes the others");

  public:
    explicit observed_mask_plan(const observed_mask_params<P, T>& call)
        : call_(call), seen_(call.policy.scorer().observation()) {}

    /// Takes the parts of the workspace; with null only measures.
    std::size_t lay_out(void* memory) {
        workspace_parts parts(memory);
        const std::int64_t pairs = std::int64_t{call_.q.batch} * call_.k.heads, keys = pairs * call_.q.length;
        lse_ = take_lse(parts, call_.q, call_.k);
        all_params_ = parts.take<HeadParams>(call_.k.heads);
        list_.tokens = parts.take<std::int32_t>(call_.q.batch);
        list_.count = parts.take<std::int32_t>(pairs);
        list_.list = parts.take<std::int32_t>(keys);
        list_.score = parts.take<float>(keys);
        list_.mass = parts.take<float>(keys);
        return parts.bytes();
    }

    void run(plane_view<expiry_t> expiry, workspace_view workspace) {
        workspace_ = workspace;
        lay_out(workspace.data);
        const std::int32_t length = call_.sequences.length;
        if (call_.q.batch == 0 || length == 0) {
            return;
        }
        const device_scope device(call_.ctx);
        list_.all_params = all_params_;
        list_.seen = seen_;
        list_.lengths = call_.sequences.lengths;
        list_.length = length;
        list_.batch = call_.q.batch;
        list_.kv_heads = call_.k.heads;
        list_.evicts_at_steps = P::scorer_type::evicts_at_steps;
        list_.stride = call_.q.length;
        list_.expiry = expiry;
        write_head_params();
        const std::int32_t prompt = std::min(call_.options.prompt, length);
        const std::int32_t chunk = seen_.chunk == Observation::whole_call ? prompt : seen_.chunk;
        if (prompt == 0) {  // the expiries of policies whose decoded tokens stay
            run_block(0, 1, false);
        }
        for (std::int32_t first = 0; first < prompt; first += std::min(chunk, prompt - first)) {
            run_block(first, std::min(chunk, prompt - first), true);
        }
        for (std::int32_t t = std::max(prompt, 1); t < length && P::scorer_type::evicts_at_steps; ++t) {
            run_block(t, 1, false);
        }
    }

  private:
    [[nodiscard]] std::int64_t pairs() const { return std::int64_t{call_.q.batch} * call_.k.heads; }

    void write_head_params() {
        for (std::int32_t first = 0; first < call_.k.heads; first += head_params_batch::capacity) {
            head_params_batch batch;
            batch.first = first;
            batch.count = std::min(call_.k.heads - first, head_params_batch::capacity);
            for (std::int32_t i = 0; i < batch.count; ++i) {
                batch.all_params[i] = call_.policy.params(call_.options.layer, first + i);
                const HeadParams& one = batch.all_params[i];
                const std::int64_t held = std::int64_t{one.sinks} + one.window + one.budget;
                held_ =
                    static_cast<std::int32_t>(std::clamp<std::int64_t>(held, held_, call_.sequences.length));
                window_ = std::max(window_, one.window);
            }
            launch("write_head_params_kernel", write_head_params_kernel<HeadParams>, 1,
                   head_params_batch::capacity, 0, call_.ctx, batch, all_params_);
        }
    }

    /// Tokens [first, first + tokens) of all sequences.
    void run_block(std::int32_t first, std::int32_t tokens, bool prompt) {
        list_.first = first;
        list_.block = tokens;
        list_.prompt = prompt;
        launch("observed_begin_kernel", observed_begin_kernel<observed_list_params>, pairs(), choice_threads,
               0, call_.ctx, list_);
        observe(first, tokens);
        if (seen_.whole_layer && call_.k.heads > 1) {
            const std::int32_t tiles = (max_keys(first, tokens) + choice_threads - 1) / choice_threads;
            launch("layer_mass_kernel", layer_mass_kernel<float>, std::int64_t{call_.q.batch} * tiles,
                   choice_threads, 0, call_.ctx, list_.mass, list_.stride, call_.k.heads, tiles, list_.count,
                   list_.tokens);
        }
        launch("observed_end_kernel", observed_end_kernel<observed_list_params>, pairs(), choice_threads, 0,
               call_.ctx, list_);
    }

    /// Of a head's list with the block's tokens, at most.
    [[nodiscard]] std::int32_t max_keys(std::int32_t first, std::int32_t tokens) const {
        return std::min(first, held_) + tokens;
    }

    /// The masses of the lists' keys from the block's queries.
    void observe(std::int32_t first, std::int32_t tokens) {
        rows_view<const T> q = call_.q, k = call_.k;
        q.data += first * q.row_stride;
        q.length = tokens;
        const Sequences block{.batch = call_.q.batch, .length = tokens, .lengths = list_.tokens};
        const plane_view<float> lse = view_bhs(lse_.data, q.batch, q.heads, tokens);
        plane_view<float> mass =
            view_bhs(list_.mass, call_.q.batch, call_.k.heads, static_cast<std::int32_t>(list_.stride));
        // Queries that see all earlier keys, all of which count.
        const bool dense = first == 0 && seen_.queries == unlimited;
        if (dense && (seen_.aggregate == group_aggregate::mean || q.heads == k.heads)) {
            k.length = tokens;
            dense_mass_by<T, Dims>(call_.ctx, call_.path, call_.attention, q, k, block, lse, false, mass,
                                   workspace_);
            return;
        }
        auto params = received_mass_params_of<T>(call_.attention, q, k, block, lse, mass);
        params.list = list_.list;
        params.list_stride = list_.stride;
        params.before = list_.count;
        params.max_keys = max_keys(first, tokens);
        params.all_params = all_params_;
        params.counted = seen_.queries == 0 ? -1 : seen_.queries;
        const bool halves = takes_tiles<Dims>(call_.path, q, k);
        if (dense) {
            k.length = tokens;
            causal_lse_by<T, Dims>(call_.ctx, call_.path, call_.attention, q, k, block, lse, workspace_);
        } else {
            launch_counted_lse<Dims>(call_.ctx, params, halves, seen_.queries == 0 ? window_ : seen_.queries);
        }
        launch_received_mass<Dims>(call_.ctx, params, halves, seen_.aggregate);
    }

    observed_mask_params<P, T> call_;
    Observation seen_;
    workspace_view workspace_{};
    plane_view<float> lse_{};
    HeadParams* all_params_ = nullptr;
    observed_list_params list_{};
    std::int32_t held_ = 0;  // keys of a head between blocks, at most
    std::int32_t window_ = 1;
};

}  // namespace cuda_backend

template <Storage T, AnyPolicy P>
std::size_t build_observed_mask_workspace_bytes(const cuda& ctx, const P& policy, rows_view<const T> q,
                                                input_rows<T> k) {
    checks::check_mass_heads(q, k);
    return cuda_backend::observed_mask_plan<P, T, all_head_dims>({ctx, policy, {}, q, k, {}, {}})
        .lay_out(nullptr);
}

template <AnyPolicy P, Storage T, class Dims>
void build_observed_mask(const cuda& ctx, const P& policy, const AttentionParams& attention,
                         rows_view<const T> q, input_rows<T> k, const Sequences& sequences,
                         plane_view<expiry_t> expiry, workspace_view workspace,
                         const ObservedMaskOptions& options) {
    namespace cb = cuda_backend;
    cb::check_mass_rows(attention, q, k, sequences);
    policy.check_layer(options.layer, k.heads);
    policy.scorer().check(k.heads, k.dim, k.dim);
    detail::check_same_params(policy.scorer().observation(), k.heads,
                              [&](std::int32_t h) { return policy.params(options.layer, h); });
    detail::require(options.prompt >= 0, "prompt", options.prompt, "0 or more, or kvpolicy::unlimited");
    cb::check_plane("expiry", expiry, q.batch, k.heads, sequences.length);
    cb::check_workspace(workspace, build_observed_mask_workspace_bytes<T>(ctx, policy, q, k));
    cb::report_lengths(ctx, sequences, options.status);
    cb::observed_mask_plan<P, T, Dims>({ctx, policy, attention, q, k, sequences, options})
        .run(expiry, workspace);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
