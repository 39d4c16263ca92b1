// The plan of a step over paged entries: sizes, workspace, launches.
#pragma once

#include <kvpolicy/caches/cuda/decode/decode_plan.cuh>
#include <kvpolicy/caches/cuda/paged/kernel_choose_pages.cuh>
#include <kvpolicy/caches/cuda/paged/kernel_paged_decode.cuh>
#include <kvpolicy/caches/cuda/scoring/kernel_cache_score.cuh>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Pages of a selection that `rows` rows take.
template <class Cache>
std::int64_t bound_pages_of(const Cache& cache, std::int64_t rows) {
    const std::int64_t size = cache.selection.page_size();
    return (rows + size - 1) / size;
}

/// How a query finds the entries that it reads: all, or those in chosen pages.
template <class P, class T>
using paged_decode_view = std::conditional_t<P::has_selection, chosen_view<T>, paged_view<T>>;
template <class Rows, class P>
using paged_params_of =
    paged_decode_params<Rows, gate_of<P>, asked_scorer<P>, paged_decode_view<P, typename Rows::T>>;

/// Of a FixedBudgetCache with a selection, too.
template <class Rows, class Cache>
class paged_decode_plan : public decode_plan<paged_decode_plan<Rows, Cache>, Cache,
                                             paged_params_of<Rows, typename Cache::policy_type>> {
    using T = typename Rows::T;
    using P = typename Cache::policy_type;
    using Gate = gate_of<P>;
    using Scorer = asked_scorer<P>;
    using View = paged_decode_view<P, T>;
    using base = decode_plan<paged_decode_plan, Cache, paged_params_of<Rows, P>>;
    friend base;
    static constexpr auto kernel = paged_decode_kernel<Rows, Gate, Scorer, View>;
    static constexpr bool on_leaving = Scorer::when == score_time::on_leaving;

  public:
    paged_decode_plan(const cuda& ctx, const device_scope& device, const Cache& cache, std::int32_t count)
        : base(ctx, device, cache, count), choose_{choice_in(cache)} {
        detail::require(heads() * call_.parts <= 0x7fffffff, "entries x heads", heads(), "below 2^31");
        allow_shared("paged_decode_kernel", reinterpret_cast<const void*>(kernel), shared_);
        int fit = 0;
        check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&fit, kernel, Rows::threads, shared_),
              "paged_decode_kernel");
        const std::int64_t resident =
            std::int64_t{std::max(fit, 1)} * device.attribute(cudaDevAttrMultiProcessorCount);
        // As many as the fullest cache has work for.
        const std::int64_t tiles = (max_rows_of(cache) + stream_tile) / stream_tile * heads() * call_.parts;
        detail::require(tiles <= 0x7fffffff, "rows of the batch's heads, in tiles of 16", tiles,
                        "below 2^31: split the batch");
        call_.work.blocks = static_cast<std::int32_t>(std::clamp<std::int64_t>(
            (tiles + paged_decode_work::least - 1) / paged_decode_work::least, 1, resident));
        if constexpr (P::has_selection) {
            choose_.max_pages = choose_.max_chosen = bound_pages_of(cache, max_rows_of(cache));
            // Queries of large groups leave less shared memory for pages, so fewer warps.
            const auto* const bounds = reinterpret_cast<const void*>(bound_pages_kernel<T>);
            while (bound_warps_ > 1 && !shared_fits(device, "bound_pages_kernel", bounds, bound_bytes())) {
                bound_warps_ /= 2;
            }
            allow_shared("bound_pages_kernel", bounds, bound_bytes());
            const float scale = cache.attention.sm_scale;
            choose_.scale = scale != 0.0f ? scale : 1.0f / std::sqrt(static_cast<float>(cache.head_dim_qk));
        }
    }

    /// Takes the parts of the workspace; with null only measures.
    std::size_t lay_out(void* memory) {
        workspace_parts parts(memory);
        call_.work.appended = parts.take<std::int32_t>(call_.batch.count);
        call_.work.missing = parts.take<std::int32_t>(heads());
        call_.work.first_tile = parts.take<std::int32_t>(heads() + 1);
        call_.work.first_pair = parts.take<std::int32_t>(call_.work.blocks);
        call_.work.share = parts.take<std::int32_t>(1);
        call_.notes = parts.take<decode_note>(heads());
        computed_ = parts.take<float>(this->computed_scores());
        advanced_ = parts.take<float>(on_leaving ? heads() * call_.cache.state_size : 0);
        call_.states = parts.take<typename Rows::Compute>((call_.work.blocks + heads() * call_.parts) *
                                                          stream_state<Rows::heads>::size(call_.width));
        if constexpr (P::has_selection) {
            choose_.keys = parts.take<typename choose_params<T>::Key>(heads() * choose_.max_pages);
            choose_.chosen = parts.take<std::int32_t>(heads() * choose_.max_chosen);
            choose_.chosen_rows = parts.take<std::int32_t>(heads());
            choose_.appended = call_.work.appended;
            call_.cache.chosen = choose_.chosen;
            call_.cache.chosen_rows = choose_.chosen_rows;
            call_.cache.most = choose_.max_chosen;
        }
        arriving_.lay_out(ctx_, ref_.scorer, call_.batch.count, call_.cache.kv_heads, 1, parts);
        if constexpr (scored_late<P>) {
            late_.emplace(device_, ref_.scorer, paged_view<T>(ref_), call_.gate, call_.batch.count, 1,
                          max_rows_of(ref_), parts);
        }
        return parts.bytes();
    }

  private:
    using base::arriving_, base::call_, base::computed_, base::ctx_, base::device_, base::heads, base::ref_,
        base::shared_;

    void score(const Batch& batch, const prefill_tokens<T>& tokens) {
        if constexpr (scored_before<Scorer>) {
            // A state is the cache's only once the step has its pages.
            call_.computed = computed_;
            call_.advanced = on_leaving ? advanced_ : nullptr;
            launch_scores(ctx_, score_params<paged_view<T>, Scorer>{
                                    .cache = call_.cache,
                                    .batch = batch,
                                    .tokens = tokens,
                                    .scores = computed_,
                                    .state = call_.advanced != nullptr ? advanced_ : nullptr,
                                    .scorer = call_.scorer});
        }
        if constexpr (scored_late<P>) {
            late_->begin(ctx_, device_, batch, tokens, call_.status);
        }
    }
    void run() {
        if (call_.batch.count == 0) {
            return;
        }
        if constexpr (P::has_selection) {
            launch("paged_admit_kernel", paged_admit_kernel<Rows, Gate, Scorer, View>, 1, admit_threads, 0,
                   ctx_, call_);
            score_late();
            if (call_.writes) {
                launch("paged_write_kernel", paged_write_kernel<Rows, Gate, Scorer, View>, heads(),
                       Rows::threads, 0, ctx_, call_);
            }
            choose();
            call_.writes = false;  // what is left to do is attention
            launch("paged_share_rows_kernel", paged_share_rows_kernel<Rows, Gate, Scorer, View>, 1,
                   admit_threads, 0, ctx_, call_);
        } else {
            launch("paged_plan_kernel", paged_plan_kernel<Rows, Gate, Scorer, View>, 1, admit_threads, 0,
                   ctx_, call_);
            score_late();
        }
        launch_early<kernel>("paged_decode_kernel", call_.work.blocks, Rows::threads, shared_, device_, ctx_,
                             1, call_);
    }
    /// Scores of keys in rows are written once it is certain which sequences take their token.
    void score_late() {
        if constexpr (scored_late<P>) {
            if (call_.writes) {
                Batch appended = call_.batch;
                appended.q_len = call_.work.appended;
                late_->in_rows(ctx_, device_, appended);
            }
        }
    }
    /// Enough blocks for the bounds of all pages to be read at the memory's rate.
    void choose() {
        choose_.batch = call_.batch;
        choose_.q = call_.q;
        const std::int64_t threads = 32 * bound_warps_, pages = (choose_.max_pages + threads - 1) / threads,
                           wanted = 8 * std::int64_t{device_.attribute(cudaDevAttrMultiProcessorCount)};
        const auto pieces =
            static_cast<std::int32_t>(std::clamp<std::int64_t>((wanted + heads() - 1) / heads(), 1, pages));
        launch("bound_pages_kernel", bound_pages_kernel<T>, heads() * pieces, static_cast<int>(threads),
               bound_bytes(), ctx_, choose_, pieces);
        launch("choose_pages_kernel", choose_pages_kernel<T>, heads(), choose_threads, 0, ctx_, choose_);
    }

    [[nodiscard]] std::size_t bound_bytes() const {
        return bound_shared_bytes<T>(bound_warps_, call_.cache.group, call_.cache.head_dim_qk);
    }

    struct nothing {};
    using Choose = std::conditional_t<P::has_selection, choose_params<T>, nothing>;
    static Choose choice_in([[maybe_unused]] const Cache& cache) {
        if constexpr (P::has_selection) {
            return {.cache = paged_view<T>(cache)};
        } else {
            return {};
        }
    }
    std::optional<late_scores<paged_view<T>, Gate>> late_;
    Choose choose_;
    int bound_warps_ = bound_threads / 32;
    float* advanced_ = nullptr;
};

/// Calls body(plan) with the paged_decode_plan that serves the cache.
template <class Dims, class Cache, class Body>
void with_paged_decode_plan(const cuda& ctx, const device_scope& device, const Cache& cache,
                            std::int32_t count, const Body& body) {
    with_decode_rows<Dims, paged_layout>(cache, [&](auto rows) {
        paged_decode_plan<decltype(rows), Cache> plan(ctx, device, cache, count);
        body(plan);
    });
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
