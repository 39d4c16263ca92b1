// What the kernels of a step are given, whichever cache it is of.
#pragma once

#include <kvpolicy/caches/cuda/decode/agent_decode_stream.cuh>
#include <kvpolicy/caches/cuda/observed/step_logits.cuh>
#include <kvpolicy/caches/top_k_slots.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/scorers/cuda/common/device_scorer.cuh>
#include <kvpolicy/scorers/cuda/common/observed_scorer.cuh>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// What the leader block of a head, which decides, tells the block that writes.
struct decode_note {
    std::int32_t promoted;        // the row that u, the key that leaves the window, gets; or -1
    std::int32_t num_long_range;  // top-k slots in use after the step
    std::int32_t victim;          // the worst slot after the step, or which is to be found how
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
    /// Whether a step leaves its logits for scores. append has no attention: observe() is given the masses.
    static constexpr bool leaves_logits = scored_by_steps<Scorer> && requires { Rows::heads; };

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
    // What a step leaves for step_mass_kernel, where that makes the scores.
    std::conditional_t<leaves_logits, step_logits<Compute>, no_logits> observed{};
    bool writes = true;  // a step; else attention over the rows as they are
    std::int32_t score_parts = 1;
    Gate gate;
    Scorer scorer;

    /// Where the logits of `heads` query heads go, from head `first` of the group of `pair` on.
    [[nodiscard]] __device__ auto logits_of(std::int64_t pair, std::int32_t first, std::int32_t heads) const {
        if constexpr (leaves_logits) {
            return writes ? observed.of(pair, first, heads) : logit_rows<Compute>{};
        } else {
            return no_logits{};
        }
    }
    /// Says that an entry takes no token. By one thread for each of its KV heads.
    __device__ void leave_logits([[maybe_unused]] std::int64_t pair) const {
        if constexpr (leaves_logits) {
            if (writes) {
                observed.after[pair] = {};
            }
        }
    }
    /// The head's slots whose keys do not compete.
    [[nodiscard]] __device__ std::int32_t num_protected(std::int64_t index) const {
        if constexpr (detail::holds_keys<Gate>) {
            return cache.num_protected[index];
        } else {
            return 0;
        }
    }
    /// The head's numbers for a step: without its bound where steps do not evict.
    template <class Head>
    [[nodiscard]] __device__ HeadParams params_at_step(const Head& head) const {
        HeadParams head_params = head.head_params;
        if constexpr (keeps_all_at_steps<Scorer>) {
            head_params.budget = unlimited;
        }
        return head_params;
    }
    /// The score of key u, which leaves the window.
    template <class Head>
    __device__ float leaving_score(const Head& head, std::int32_t pair, position_t u) const {
        if constexpr (Scorer::when == score_time::on_leaving) {
            return detail::holds(gate, u) ? 0.0f : computed[pair];
        } else {
            return head.score_of(head.layout.recent(u));
        }
    }
};

/// The score of an entry's new token for a KV head (`pair`: of both), 0 where it does not count. By one warp.
template <class Params>
__device__ inline float arriving_score_of(const Params& call, std::int32_t entry, std::int32_t head,
                                          std::int64_t pair, bool counts) {
    using Scorer = typename Params::Scorer;
    if constexpr (Scorer::when == score_time::observed) {
        return 0.0f;  // it has received no attention yet
    } else if constexpr (reads_hidden_layer<Scorer>) {
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
