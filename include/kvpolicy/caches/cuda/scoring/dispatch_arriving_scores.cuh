// Host side of scores that come with a call's tokens: given ones, and those of hidden states, which kernels
// of the scorer compute before anything else of the call.
#pragma once

#include <kvpolicy/caches/check.hpp>
#include <kvpolicy/caches/step_io.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/scorers/check_hidden.hpp>
#include <kvpolicy/scorers/cuda/common/device_scorer.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class P>
inline constexpr bool scores_given = P::ranked&& P::scorer_type::when == score_time::given;
template <class P>
inline constexpr bool scored_from_hidden = P::ranked&& P::scorer_type::when == score_time::from_hidden;

/// Refuses a call without the scores or hidden states that its policy reads. `rows`: batch and length of the
/// call's tensors.
template <class Cache>
void check_arriving_scores([[maybe_unused]] const Cache& cache, const Batch& batch, const CallSize& rows,
                           [[maybe_unused]] const detail::step_extras& extras) {
    using P = typename Cache::policy_type;
    checks::check_scores_wanted<P>(extras);
    if (batch.count == 0 || rows.tokens == 0) {
        return;
    }
    if constexpr (scores_given<P>) {
        detail::require(static_cast<bool>(extras.scores), "io.scores", "null",
                        "fp32 scores, since this policy's scores are given");
        checks::check_plane("io.scores", extras.scores, rows.batch, cache.kv_heads, rows.tokens);
    }
    if constexpr (scored_from_hidden<P>) {
        checks::check_hidden("io.hidden", extras.hidden, rows.batch, rows.tokens,
                             cache.scorer.hidden_width());
    }
}

/// The scores of the tokens of a call on a cache with policy P; with `Layer` only the hidden layer that a
/// step reads them from (device_scorer::reads_hidden_layer).
template <class P, bool Layer = false>
class arriving_scores {
    using Scorer = typename P::scorer_type;

  public:
    /// Takes its parts of the workspace, for `batch` entries of at most `tokens` tokens.
    void lay_out([[maybe_unused]] const cuda& ctx, [[maybe_unused]] const Scorer& scorer,
                 [[maybe_unused]] std::int32_t batch, [[maybe_unused]] std::int32_t heads,
                 [[maybe_unused]] std::int32_t tokens, [[maybe_unused]] workspace_parts& parts) {
        if constexpr (scored_from_hidden<P>) {
            call_.scores = view_bhs(parts.take<float>(Layer ? 0 : std::int64_t{batch} * heads * tokens),
                                    batch, heads, tokens);
            workspace_parts own(nullptr);
            static_cast<void>(enqueue(ctx, scorer, own, true));
            memory_ = parts.take<unsigned char>(static_cast<std::int64_t>(own.bytes()));
        }
    }
    /// Enqueues what computes them. No scores where the cache has them of keys and values.
    [[nodiscard]] plane_view<const float> of([[maybe_unused]] const cuda& ctx,
                                             [[maybe_unused]] const Scorer& scorer,
                                             [[maybe_unused]] const Batch& batch,
                                             [[maybe_unused]] const detail::step_extras& extras) {
        if constexpr (scored_from_hidden<P>) {
            static_cast<void>(run(ctx, scorer, batch, extras));
            return call_.scores;
        } else if constexpr (scores_given<P>) {
            return extras.scores;
        } else {
            return {};
        }
    }
    /// Enqueues what computes the hidden layer.
    [[nodiscard]] const float* layer_of(const cuda& ctx, const Scorer& scorer, const Batch& batch,
                                        const detail::step_extras& extras) requires Layer {
        return run(ctx, scorer, batch, extras);
    }

  private:
    const float* run(const cuda& ctx, const Scorer& scorer, const Batch& batch,
                     const detail::step_extras& extras) {
        call_.hidden = extras.hidden;
        call_.packed = {extras.cu_seqlens};
        call_.seq_ids = batch.seq_ids;
        call_.lengths = batch.q_len;
        call_.length = batch.length_or_one();
        workspace_parts own(memory_);
        return enqueue(ctx, scorer, own, false);
    }
    const float* enqueue(const cuda& ctx, const Scorer& scorer, workspace_parts& own, bool measure) {
        if constexpr (Layer) {
            return device_scorer<Scorer>::hidden_layer(ctx, scorer, call_, own, measure);
        } else {
            device_scorer<Scorer>::score_hidden(ctx, scorer, call_, own, measure);
            return nullptr;
        }
    }

    score_hidden_params call_{};
    unsigned char* memory_ = nullptr;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
