// Scores of a prefill by a scorer's own kernels for chunks (device_scorer::score_chunk): the cache says where
// the keys that leave the window and the states are.
#pragma once

#include <kvpolicy/caches/cuda/scoring/agent_mlstm_step.cuh>
#include <kvpolicy/caches/cuda/scoring/agent_score.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/common/device_scorer.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class View, class Scorer>
struct leaving_keys_params {
    score_params<View, Scorer> chunk;
    leaving_key<typename View::value_type>* leaving = nullptr;  // [count, Hkv, most]
    std::int32_t* first_leaving = nullptr;                      // [count, Hkv]
    chunk_state* states = nullptr;                              // [count, Hkv]
    std::int32_t pieces = 1;                                    // blocks that share a head
};

inline constexpr int leaving_keys_threads = 256;

/// Where a scorer finds the keys that leave the window with a chunk's tokens, in the window or in the chunk,
/// and the states of the sequences.
///
/// Grid: count * Hkv * pieces blocks. Block: leaving_keys_threads; a thread per token. Shared memory: none.
/// In: lengths and window entries' places; the tokens' places.
/// Out, overwritten: leaving [count, Hkv, most], first_leaving [count, Hkv], states [count, Hkv]; scores
/// [count, Hkv, most] fp32: 0 for tokens with which no key leaves.
///
/// Phases: 1. The head's numbers, by its first block. 2. Tokens.
template <class View, class Scorer>
__global__ void __launch_bounds__(leaving_keys_threads)
    leaving_keys_kernel(const __grid_constant__ leaving_keys_params<View, Scorer> call) {
    const score_params<View, Scorer>& chunk = call.chunk;
    const auto block = static_cast<std::int32_t>(blockIdx.x), piece = block % call.pieces;
    const scored_token<View> at(chunk.cache, chunk.batch, block / call.pieces, chunk.tokens.most);
    const std::int32_t tokens = at.active.tokens;
    const HeadParams& head_params = at.rows.head_params;
    const position_t leaves = position_t{head_params.sinks} + head_params.window - at.base;
    const std::int32_t first = leaves <= 0 ? 0 : leaves < tokens ? static_cast<std::int32_t>(leaves) : tokens;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    // 1. The head's numbers.
    if (piece == 0 && thread == 0) {
        float* const state = chunk.cache.state + at.rows.index * chunk.cache.state_size;
        float* const after =
            chunk.state == nullptr ? state : chunk.state + std::int64_t{at.pair} * chunk.cache.state_size;
        call.first_leaving[at.pair] = first;
        call.states[at.pair] = tokens != 0 ? chunk_state{state, after} : chunk_state{nullptr, nullptr};
    }
    // 2. Tokens.
    for (std::int32_t j = piece * leaving_keys_threads + thread; j < tokens;
         j += call.pieces * leaving_keys_threads) {
        const std::int64_t token = std::int64_t{at.pair} * chunk.tokens.most + j;
        if (j < first) {
            chunk.scores[token] = 0.0f;
        } else {
            const auto find = [&](bool of_value) {
                return token_source(at.rows, chunk.tokens, at.entry, at.head, at.base, j, true, of_value);
            };
            call.leaving[token] = {find(false), find(true)};
        }
    }
}

/// A chunk's scores by the scorer's kernels for chunks; with `measure` only sizes. False where it has none
/// for these.
template <class View, class Scorer>
bool score_chunk_in(const cuda& ctx, const score_params<View, Scorer>& call, workspace_parts& parts,
                    bool measure) {
    using T = typename View::value_type;
    const std::int32_t count = call.batch.count, most = call.tokens.most;
    const std::int64_t heads = std::int64_t{count} * call.cache.kv_heads;
    leaving_keys_params<View, Scorer> keys{call};
    keys.leaving = parts.take<leaving_key<T>>(heads * most);
    keys.first_leaving = parts.take<std::int32_t>(heads);
    keys.states = parts.take<chunk_state>(heads);
    const auto rows = [&](rows_view<const T> of, std::int32_t dim) {
        of.batch = count;
        of.heads = call.cache.kv_heads;
        of.length = most;
        of.dim = dim;
        return of;
    };
    const score_chunk_params<T> chunk{.k = rows(call.tokens.k, call.cache.head_dim_qk),
                                      .v = rows(call.tokens.v, call.cache.head_dim_vo),
                                      .packed = call.tokens.packed,
                                      .lengths = call.batch.q_len,
                                      .leaving = keys.leaving,
                                      .first_leaving = keys.first_leaving,
                                      .states = keys.states,
                                      .scores = call.scores};
    if (!measure) {
        constexpr std::int64_t blocks = 1024;
        keys.pieces = static_cast<std::int32_t>(
            std::clamp<std::int64_t>(blocks / std::max<std::int64_t>(heads, 1), 1,
                                     std::max(1, (most + leaving_keys_threads - 1) / leaving_keys_threads)));
        launch("leaving_keys_kernel", leaving_keys_kernel<View, Scorer>, heads * keys.pieces,
               leaving_keys_threads, 0, ctx, keys);
    }
    return device_scorer<Scorer>::score_chunk(ctx, call.scorer, chunk, parts, measure);
}

/// Bytes that launch_chunk_scores needs for a call of these sizes; 0 where launch_scores has to score it.
template <class View, class Scorer>
std::size_t chunk_score_bytes([[maybe_unused]] const cuda& ctx,
                              [[maybe_unused]] const score_params<View, Scorer>& call) {
    if constexpr (device_scorer<Scorer>::scores_chunks) {
        workspace_parts parts(nullptr);
        if (call.batch.count != 0 && call.tokens.most >= device_scorer<Scorer>::min_chunk &&
            score_chunk_in(ctx, call, parts, true)) {
            return parts.bytes();
        }
    }
    return 0;
}

/// Enqueues the scores of a prefill, whose lengths are in call.batch.q_len: as launch_scores, to rounding.
template <class View, class Scorer>
void launch_chunk_scores([[maybe_unused]] const cuda& ctx,
                         [[maybe_unused]] const score_params<View, Scorer>& call,
                         [[maybe_unused]] workspace_view workspace) {
    if constexpr (device_scorer<Scorer>::scores_chunks) {
        workspace_parts parts(workspace.data);
        score_chunk_in(ctx, call, parts, false);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
