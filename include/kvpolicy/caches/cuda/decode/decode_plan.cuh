// What the plans of both decode kernels have in common: the parameters of a step or of attention alone, and
// the order of their launches.
#pragma once

#include <kvpolicy/caches/cuda/check_cache_call.cuh>
#include <kvpolicy/caches/cuda/contiguous/contiguous_view.cuh>
#include <kvpolicy/caches/cuda/observed/dispatch_step_mass.cuh>
#include <kvpolicy/caches/cuda/paged/paged_view.cuh>
#include <kvpolicy/caches/cuda/scoring/dispatch_arriving_scores.cuh>
#include <kvpolicy/caches/cuda/scoring/dispatch_cache_conv.cuh>
#include <kvpolicy/caches/cuda/scoring/kernel_cache_score.cuh>
#include <kvpolicy/caches/step_io.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/cuda/head_tiles.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A policy's gate as kernels take it: with its keep part, if it has one.
template <class P>
using gate_of =
    std::conditional_t<P::has_keep, detail::held_gate<typename P::gate_type, typename P::keep_type>,
                       typename P::gate_type>;
template <class P, class Cache>
gate_of<P> gate_in(const Cache& cache) {
    if constexpr (P::has_keep) {
        return {cache.gate, cache.keep};
    } else {
        return cache.gate;
    }
}

/// The most rows of a head.
template <class Cache>
std::int64_t max_rows_of(const Cache& cache) {
    if constexpr (Cache::pooled) {
        return cache.max_rows;
    } else {
        return cache.max_capacity;
    }
}

/// Whether sizes are those of attention: append_rows are not.
template <class Rows>
inline constexpr bool has_attention = requires {
    Rows::heads;
};

/// A step, or attention alone, with kernels of these sizes. A plan of a kind of cache (`Plan`) has
///     lay_out(memory)         takes the parts of the workspace; with null it only measures
///     run()                   the launches, after those of scores
template <class Plan, class Cache, class Params>
class decode_plan {
  protected:
    using Rows = typename Params::Rows;
    using P = typename Cache::policy_type;
    using T = typename Cache::value_type;
    using Gate = gate_of<P>;
    using Scorer = typename Params::Scorer;
    static constexpr bool paged = Params::View::paged, on_leaving = Scorer::when == score_time::on_leaving,
                          reads_layer = reads_hidden_layer<Scorer>;
    /// The cache as kernels of scorers see it.
    using ScoreView = std::conditional_t<paged, paged_view<T>, contiguous_view<T>>;

  public:
    /// With the keys and values of `io`.
    void step(const Batch& batch, const StepIO<T>& io, workspace_view workspace, std::uint32_t* status) {
        if constexpr (scored_by_steps<Scorer>) {
            check_step_observation(ref_.scorer.observation());
        }
        begin(batch, io, workspace, status);
        call_.k = io.k;
        call_.v = io.v;
        if constexpr (reads_layer) {
            call_.computed = arriving_.layer_of(ctx_, ref_.scorer, batch, detail::extras_of(io));
        } else {
            call_.scores = arriving_.of(ctx_, ref_.scorer, batch, detail::extras_of(io));
        }
        score(batch, {.k = io.k, .v = io.v});
        plan().run();
        if constexpr (Params::leaves_logits) {
            if (!call_.observed.in_step) {
                launch_step_mass(ctx_, device_, call_.cache, batch.count, call_.observed, call_.observed.rows,
                                 status);
            }
        }
    }

    void attend(const Batch& batch, const StepIO<T>& io, workspace_view workspace, std::uint32_t* status) {
        begin(batch, io, workspace, status);
        call_.writes = false;
        plan().run();
    }

  protected:
    decode_plan(const cuda& ctx, const device_scope& device, const Cache& cache, std::int32_t count)
        : ctx_(ctx),
          device_(device),
          ref_(cache),
          call_{{.cache = typename Params::View(cache),
                 .gate = gate_in<P>(cache),
                 .scorer = scorer_of<P, Scorer>(cache.scorer)}} {
        call_.batch.count = count;
        call_.score_parts = score_parts_of(call_.scorer);
        if constexpr (has_attention<Rows>) {
            call_.width = Rows::width(cache.head_dim_vo);
            call_.logits = logits_of<typename Rows::Compute>(cache.attention, cache.head_dim_qk);
            call_.parts = (cache.group + Rows::heads - 1) / Rows::heads;
            shared_ = static_cast<std::size_t>(Rows::warps) * Rows::shared_bytes(cache.head_dim_vo);
        }
        if constexpr (Params::leaves_logits) {
            observe_as(call_.observed, cache.scorer.observation());
        }
    }

    /// Takes the part of the workspace that a step's logits are left in, if they are.
    void lay_out_logits([[maybe_unused]] workspace_parts& parts) {
        if constexpr (scored_by_steps<Scorer>) {
            cuda_backend::lay_out_logits(call_.observed, parts, call_.batch.count, call_.cache.kv_heads,
                                         call_.cache.group, max_rows_of(ref_));
        }
    }
    [[nodiscard]] std::int64_t heads() const {
        return std::int64_t{call_.batch.count} * call_.cache.kv_heads;
    }
    /// Scores, in parts, that a launch before the step computes.
    [[nodiscard]] std::int64_t computed_scores() const {
        return scored_before<Scorer> ? heads() * call_.score_parts : 0;
    }

    /// The parts of the workspace that scores need.
    void lay_out_scores(workspace_parts& parts) {
        computed_ = parts.take<float>(computed_scores());
        advanced_ = parts.take<float>(paged && on_leaving ? heads() * call_.cache.state_size : 0);
        arriving_.lay_out(ctx_, ref_.scorer, call_.batch.count, call_.cache.kv_heads, 1, parts);
        if constexpr (scored_late<P>) {
            late_.emplace(device_, ref_.scorer, ScoreView(ref_), call_.gate, call_.batch.count, 1,
                          max_rows_of(ref_), parts);
        }
    }
    /// Scores of keys in rows are written once it is certain which sequences take their token: entry i
    /// `appended[i]`, or null where all of the batch do.
    void score_late(const std::int32_t* appended) {
        if constexpr (scored_late<P>) {
            if (call_.writes) {
                Batch taken = call_.batch;
                taken.q_len = appended != nullptr ? appended : taken.q_len;
                late_->in_rows(ctx_, device_, taken);
            }
        }
    }

    const cuda& ctx_;
    const device_scope& device_;
    const Cache& ref_;
    Params call_;
    arriving_scores<P, reads_layer> arriving_;
    std::size_t shared_ = 0;

  private:
    Plan& plan() { return static_cast<Plan&>(*this); }
    /// What scores the new tokens before the step, beside it where the cache has no pages to take.
    void score(const Batch& batch, const prefill_tokens<T>& tokens) {
        if constexpr (scored_before<Scorer>) {
            call_.computed = computed_;
            if constexpr (paged) {  // a state is the cache's only once the step has its pages
                call_.advanced = on_leaving ? advanced_ : nullptr;
            }
            launch_scores(ctx_,
                          score_params<ScoreView, Scorer>{.cache = call_.cache,
                                                          .batch = batch,
                                                          .tokens = tokens,
                                                          .scores = computed_,
                                                          .state = paged && on_leaving ? advanced_ : nullptr,
                                                          .scorer = call_.scorer,
                                                          .beside = !paged,
                                                          .step = true});
        }
        if constexpr (scored_late<P>) {
            late_->begin(ctx_, device_, batch, tokens, call_.status);
        }
    }

    float* computed_ = nullptr;  // [score_parts, count, Hkv]
    float* advanced_ = nullptr;  // [count, Hkv, state_size]
    std::optional<late_scores<ScoreView, Gate>> late_;
    void begin(const Batch& batch, const StepIO<T>& io, workspace_view workspace, std::uint32_t* status) {
        check_workspace(workspace, plan().lay_out(nullptr));
        plan().lay_out(workspace.data);
        call_.batch = batch;
        call_.q = io.q;
        call_.out = io.out;
        call_.lse = io.lse;
        call_.status = status;
    }
};

/// Calls body(sizes of the stream) with those that serve a cache.
template <class Dims, class Layout, class Cache, class Body>
void with_decode_rows(const Cache& cache, const Body& body) {
    using T = typename Cache::value_type;
    if constexpr (is_half<T>) {
        const std::int32_t dim = std::max(cache.head_dim_qk, cache.head_dim_vo);
        const int tile = fitting_tile(Dims{}, dim);
        detail::require(tile != 0, "head_dim", dim, "at most the largest of the call's head_dims, and 256");
        with_tile(Dims{}, tile, [&](auto of) { body(tensor_rows<T, decltype(of)::value, Layout>{}); });
    } else {
        body(plain_rows<T, Layout>{});
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
