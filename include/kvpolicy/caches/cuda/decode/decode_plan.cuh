// What the plans of both decode kernels have in common: the parameters of a step or of attention alone, and
// the order of their launches.
#pragma once

#include <kvpolicy/caches/cuda/check_cache_call.cuh>
#include <kvpolicy/caches/cuda/scoring/dispatch_arriving_scores.cuh>
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

/// A step, or attention alone, with kernels of these sizes. A plan of a kind of cache (`Plan`) has
///     lay_out(memory)         takes the parts of the workspace; with null it only measures
///     score(batch, tokens)    what scores the new tokens before the step
///     run()                   the launches
template <class Plan, class Cache, class Params>
class decode_plan {
  protected:
    using Rows = typename Params::Rows;
    using P = typename Cache::policy_type;
    using T = typename Cache::value_type;
    using Gate = gate_of<P>;
    using Scorer = typename Params::Scorer;
    static constexpr bool reads_layer = reads_hidden_layer<Scorer>;

  public:
    /// With the keys and values of `io`.
    void step(const Batch& batch, const StepIO<T>& io, workspace_view workspace, std::uint32_t* status) {
        begin(batch, io, workspace, status);
        call_.k = io.k;
        call_.v = io.v;
        if constexpr (reads_layer) {
            call_.computed = arriving_.layer_of(ctx_, ref_.scorer, batch, detail::extras_of(io));
        } else {
            call_.scores = arriving_.of(ctx_, ref_.scorer, batch, detail::extras_of(io));
        }
        plan().score(batch, {.k = io.k, .v = io.v});
        plan().run();
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
        call_.width = Rows::width(cache.head_dim_vo);
        call_.logits = logits_of<typename Rows::Compute>(cache.attention, cache.head_dim_qk);
        call_.parts = (cache.group + Rows::heads - 1) / Rows::heads;
        call_.score_parts = score_parts_of(call_.scorer);
        shared_ = static_cast<std::size_t>(Rows::warps) * Rows::shared_bytes(cache.head_dim_vo);
    }

    [[nodiscard]] std::int64_t heads() const {
        return std::int64_t{call_.batch.count} * call_.cache.kv_heads;
    }
    /// Scores, in parts, that a launch before the step computes.
    [[nodiscard]] std::int64_t computed_scores() const {
        return scored_before<Scorer> ? heads() * call_.score_parts : 0;
    }

    const cuda& ctx_;
    const device_scope& device_;
    const Cache& ref_;
    Params call_;
    arriving_scores<P, reads_layer> arriving_;
    float* computed_ = nullptr;
    std::size_t shared_ = 0;

  private:
    Plan& plan() { return static_cast<Plan&>(*this); }
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
