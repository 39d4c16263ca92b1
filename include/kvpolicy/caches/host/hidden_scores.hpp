// Scores of a cache's new tokens from their hidden states, for all heads at once, before anything else of a
// call.
#pragma once

#include <kvpolicy/caches/host/entries.hpp>
#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/scorers/host/host_hidden.hpp>

#include <algorithm>

namespace kvpolicy::host_backend {

/// Whether a policy's scores are computed from hidden states that come with the tokens.
template <class P>
inline constexpr bool reads_hidden = P::ranked&& P::scorer_type::when == score_time::from_hidden;

/// Workspace: scores [count, Hkv, tokens], then each thread's block.
template <class Cache>
std::size_t hidden_bytes([[maybe_unused]] const host& ctx, [[maybe_unused]] const Cache& cache,
                         [[maybe_unused]] std::int32_t count, [[maybe_unused]] std::int32_t tokens) {
    if constexpr (reads_hidden<typename Cache::policy_type>) {
        const std::size_t scores = static_cast<std::size_t>(count) *
                                   static_cast<std::size_t>(cache.kv_heads) *
                                   static_cast<std::size_t>(tokens) * sizeof(float);
        return detail::aligned_size(scores) +
               static_cast<std::size_t>(ctx.threads()) *
                   detail::aligned_size(hidden_block_reals(cache.scorer) * sizeof(float));
    }
    return 0;
}

/// The call's extras, with the scores of its tokens where they come from hidden states. A NaN among them is
/// left to what takes scores that come with their tokens.
template <class Cache>
detail::step_extras with_scores([[maybe_unused]] const host& ctx, [[maybe_unused]] const Cache& cache,
                                [[maybe_unused]] const Batch& batch, [[maybe_unused]] std::int32_t longest,
                                const detail::step_extras& extras, [[maybe_unused]] std::byte* memory) {
    if constexpr (!reads_hidden<typename Cache::policy_type>) {
        return extras;
    } else {
        auto* const scores = reinterpret_cast<float*>(memory);
        detail::step_extras scored = extras;
        const plane_view<float> plane = view_bhs(scores, batch.count, cache.kv_heads, longest);
        scored.scores = plane;
        // The states of a packed batch lie one after another; their scores do not.
        const std::int32_t* const edges = extras.cu_seqlens;
        std::byte* const scratch =
            memory + detail::aligned_size(static_cast<std::size_t>(batch.count) *
                                          static_cast<std::size_t>(cache.kv_heads) *
                                          static_cast<std::size_t>(longest) * sizeof(float));
        const std::size_t stride = detail::aligned_size(hidden_block_reals(cache.scorer) * sizeof(float));
        const std::int64_t blocks = (std::int64_t{longest} + scorer_block - 1) / scorer_block;
        ctx.parallel_for(blocks * batch.count, [&](std::int64_t task, int thread) {
            const std::int64_t i = task / blocks, first = task % blocks * scorer_block;
            const std::int64_t count = std::min<std::int64_t>(scorer_block, batch.tokens(i) - first);
            if (count > 0) {
                score_hidden_tokens(
                    ctx.instructions(), cache.scorer, extras.hidden, edges != nullptr ? 0 : i,
                    (edges != nullptr ? edges[i] : 0) + first, count, plane.head(i, 0) + first,
                    plane.head_stride,
                    reinterpret_cast<float*>(scratch + static_cast<std::size_t>(thread) * stride));
            }
        });
        return scored;
    }
}

}  // namespace kvpolicy::host_backend
