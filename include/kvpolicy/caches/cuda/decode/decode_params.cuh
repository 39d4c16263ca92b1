// What the kernels of a step are given, whichever cache it is of.
#pragma once

#include <kvpolicy/caches/cuda/decode/agent_decode_stream.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/scorers/cuda/common/device_scorer.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// What the leader block of a head, which decides, tells the block that writes.
struct decode_note {
    std::int32_t promoted;        // the row that u, the key that leaves the window, gets; or -1
    std::int32_t num_long_range;  // top-k slots in use after the step
    std::int32_t victim;          // the worst slot after the step
    float arriving;               // the new token's score
    float leaving;                // u's
};

/// Rows: sizes of the stream; Gate and Scorer: the policy's; View: the cache.
template <class Rows_, class Gate_, class Scorer_, class View_>
struct decode_params {
    using Rows = Rows_;
    using Gate = Gate_;
    using Scorer = Scorer_;
    using View = View_;
    using T = typename Rows::T;
    using Compute = typename Rows::Compute;

    View cache;
    Batch batch{};
    rows_view<const T> q{};  // [count, Hq, 1, Dk]
    rows_view<const T> k{};  // [count, Hkv, 1, Dk]
    rows_view<const T> v{};  // [count, Hkv, 1, Dv]
    rows_view<T> out{};      // [count, Hq, 1, Dv]
    plane_view<float> lse{};
    plane_view<const float> scores{};  // the new tokens', where they are given
    const float* computed = nullptr;   // [score_parts, count, Hkv]: see score_params; or a hidden layer
    Compute* states = nullptr;         // of blocks that share a head
    std::uint32_t* status = nullptr;   // [count]
    std::int32_t parts = 1;            // of a group of query heads, Rows::heads each
    std::int32_t width = 0;            // of a state
    stream_logits<Compute> logits{};
    bool writes = true;  // a step; else attention over the rows as they are
    std::int32_t score_parts = 1;
    Gate gate;
    Scorer scorer;
};

/// The score of an entry's new token for a KV head (`pair`: of both), 0 where it does not count. By one warp.
template <class Params>
__device__ inline float arriving_score_of(const Params& call, std::int32_t entry, std::int32_t head,
                                          std::int64_t pair, bool counts) {
    using Scorer = typename Params::Scorer;
    if constexpr (reads_hidden_layer<Scorer>) {
        const float score = device_scorer<Scorer>::read_score(call.scorer, call.computed, entry, head);
        return counts || score == score ? score : 0.0f;
    } else if constexpr (scores_come_along<Scorer>) {
        const float score = call.scores ? call.scores.head(entry, head)[0] : 0.0f;
        return counts || score == score ? score : 0.0f;
    } else if constexpr (Scorer::when == score_time::on_leaving) {
        return 0.0f;
    } else if constexpr (scores_by_warp<Scorer>) {
        return counts ? device_scorer<Scorer>::score(call.scorer, head, call.k.row(entry, head, 0),
                                                     call.v.row(entry, head, 0), call.cache.head_dim_qk,
                                                     call.cache.head_dim_vo)
                      : 0.0f;
    } else {
        const std::int64_t pairs = std::int64_t{call.batch.count} * call.cache.kv_heads;
        float score = 0.0f;
#pragma unroll 8
        for (std::int32_t part = 0; part < call.score_parts; ++part) {
            const float next = call.computed[part * pairs + pair];
            score = part == 0 ? next : score + next;
        }
        return counts ? score : 0.0f;
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
