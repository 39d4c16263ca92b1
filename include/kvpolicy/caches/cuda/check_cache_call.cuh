// What the dispatches of a cache's calls share: which policies there are kernels for, and checks.
#pragma once

#include <kvpolicy/attention/cuda/make_attention_params.cuh>
#include <kvpolicy/caches/check.hpp>
#include <kvpolicy/caches/cuda/contiguous/contiguous_view.cuh>
#include <kvpolicy/caches/cuda/decode/agent_decode_stream.cuh>
#include <kvpolicy/caches/cuda/scoring/dispatch_arriving_scores.cuh>
#include <kvpolicy/caches/cuda/scoring/dispatch_cache_conv.cuh>
#include <kvpolicy/caches/cuda_calls.cuh>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/head_tiles.cuh>
#include <kvpolicy/scorers/cuda/common/device_scorer.cuh>
#include <kvpolicy/scorers/cuda/common/observed_scorer.cuh>
#include <kvpolicy/scorers/cuda/common/warp_scorer.cuh>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <type_traits>
#include <vector>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The scorer that a policy asks in a call: none where nothing is ranked, where scores wait in rows
/// (scored_late), or where they come with the tokens (arriving_scores). All scorers whose scores come from
/// attention are asked alike.
template <class P>
using asked_scorer =
    std::conditional_t<P::observed, observed_scorer<!P::grows>,
                       std::conditional_t<P::ranked && !scored_late<P> && !scored_from_hidden<P>,
                                          typename P::scorer_type, GivenScores>>;

template <class P, class Asked = asked_scorer<P>>
Asked scorer_of(const typename P::scorer_type& scorer) {
    if constexpr (std::is_same_v<Asked, typename P::scorer_type>) {
        return scorer;
    } else {
        return {};
    }
}

/// Refuses a layer whose memory the device cannot read.
template <class Cache>
void check_on_device(const Cache& cache) {
    detail::require(cache.device >= 0, "cache", "bound to host memory",
                    "one bound with a cuda context, or a call with a host context");
}

/// Refuses a sequence some of whose layers have taken tokens that advance() has not counted. `appended`:
/// [layers, sequences, kv_heads] of device memory. Waits for the stream.
inline void check_between_tokens(const cuda& ctx, const CacheShape& shape, const std::int32_t* appended,
                                 std::int32_t seq) {
    const auto heads = static_cast<std::size_t>(shape.kv_heads);
    std::vector<std::int32_t> of_seq(static_cast<std::size_t>(shape.layers) * heads);
    const std::size_t row = heads * sizeof(std::int32_t);
    check(cudaMemcpy2DAsync(of_seq.data(), row, appended + std::int64_t{seq} * shape.kv_heads,
                            row * static_cast<std::size_t>(shape.max_sequences), row,
                            static_cast<std::size_t>(shape.layers), cudaMemcpyDeviceToHost, ctx.stream),
          "cudaMemcpy2DAsync");
    check(cudaStreamSynchronize(ctx.stream), "cudaStreamSynchronize");
    for (std::size_t x = 0; x < of_seq.size(); ++x) {
        detail::require(of_seq[x] <= 0, "seq", seq, [&] {
            return detail::text("a sequence between two tokens: layer ", x / heads,
                                " has taken some that advance() has not counted");
        });
    }
}

template <class P>
constexpr void require_device_policy() {
    static_assert(!P::shares_budget,
                  "kvpolicy: a cache on CUDA gives each head a budget of its own; heads share one in a "
                  "DualCache on the CPU");
    static_assert(
        has_device_scorer<asked_scorer<P>> &&
            (!scored_late<P> || device_scorer<typename P::scorer_type>::in_window) &&
            (!scored_from_hidden<P> || device_scorer<typename P::scorer_type>::from_hidden),
        "kvpolicy: on CUDA a cache takes given scores, a scorer that observes attention, or one whose "
        "device_scorer (scorers/cuda/common/device_scorer.cuh) takes part in a step: LinearScorer, "
        "MlpScorer, WriteGateScorer, UtilityPredictor, mLSTMScorer and ConvScorer do");
}
/// Refuses numbers of a layer's heads that its scorer cannot serve.
template <class P, class HeadParamsOf>
void check_observed_params([[maybe_unused]] const typename P::scorer_type& scorer,
                           [[maybe_unused]] std::int32_t heads,
                           [[maybe_unused]] const HeadParamsOf& head_params_of) {
    if constexpr (P::observed) {
        detail::check_same_params(scorer.observation(), heads, head_params_of);
    }
}

/// Refuses pages that kernels cannot read, of a pool of at most `pages` pages.
template <class P>
void check_selection([[maybe_unused]] const P& policy, [[maybe_unused]] std::int32_t page_size,
                     [[maybe_unused]] std::int64_t pages) {
    if constexpr (P::has_selection) {
        const std::int32_t rows = policy.selection().page_size();
        detail::require(rows % stream_tile == 0, "rows of a selection's page", rows,
                        [] { return detail::text("a multiple of ", stream_tile, " on CUDA"); });
        const std::int64_t all = pages * (page_size / rows);
        detail::require(all <= 0x7fffffff, "pages of the selection in a layer", all, "below 2^31");
    }
}

// What the host refuses, as far as no device memory must be read. `rows`: batch and length of the call's
// tensors, [count, most tokens of an entry], or [1, total] where entries are packed.

template <class Cache>
void check_cache_batch(const Cache& cache, const Batch& batch, const CallSize& rows) {
    check_on_device(cache);
    checks::check_count("batch.count", batch.count, cache.max_sequences);
    const std::int32_t length = batch.length_or_one();
    detail::require(batch.q_len != nullptr || (length >= 0 && length <= rows.tokens), "batch.length", length,
                    [&] { return detail::text("0 to ", rows.tokens); });
}

/// The keys and values of a chunk, and what comes with them.
template <class Cache, class T>
void check_chunk(const Cache& cache, const Batch& batch, const CallSize& rows, const rows_view<const T>& k,
                 const rows_view<const T>& v, const detail::step_extras& extras) {
    require_device_policy<typename Cache::policy_type>();
    checks::check_rows("k", k, rows.batch, cache.kv_heads, rows.tokens, cache.head_dim_qk);
    checks::check_rows("v", v, rows.batch, cache.kv_heads, rows.tokens, cache.head_dim_vo);
    check_aligned("k", k);
    check_aligned("v", v);
    check_arriving_scores(cache, batch, rows, extras);
}

template <class Cache, class T>
void check_cache_call(const Cache& cache, const Batch& batch, const CallSize& rows,
                      const rows_view<const T>& q, const rows_view<T>& out, const plane_view<float>& lse) {
    const std::int32_t query_heads = cache.kv_heads * cache.group;
    check_cache_batch(cache, batch, rows);
    checks::check_rows("q", q, rows.batch, query_heads, rows.tokens, cache.head_dim_qk);
    checks::check_rows("out", out, rows.batch, query_heads, rows.tokens, cache.head_dim_vo);
    checks::check_lse(lse, rows.batch, query_heads, rows.tokens);
    check_aligned("q", q);
    check_aligned("out", out);
}

/// The same for calls that bring keys.
template <class Cache, class T>
void check_cache_call(const Cache& cache, const Batch& batch, const CallSize& rows,
                      const rows_view<const T>& q, const rows_view<const T>& k, const rows_view<const T>& v,
                      const rows_view<T>& out, const detail::step_extras& extras) {
    check_cache_call(cache, batch, rows, q, out, extras.lse);
    check_chunk(cache, batch, rows, k, v, extras);
}

template <class Compute>
stream_logits<Compute> logits_of(const AttentionParams& attention, std::int32_t head_dim_qk) {
    constexpr double log2_e = 1.44269504088896340736;
    const double scale = attention.sm_scale != 0.0f ? static_cast<double>(attention.sm_scale)
                                                    : 1.0 / std::sqrt(static_cast<double>(head_dim_qk));
    const double logits_soft_cap = attention.logits_soft_cap;
    const bool capped = logits_soft_cap > 0.0;
    return {static_cast<Compute>(capped ? 2.0 * log2_e * scale / logits_soft_cap : scale * log2_e),
            static_cast<Compute>(capped ? logits_soft_cap * log2_e : 0.0)};
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
