// Scorers inside a FixedBudgetCache's calls on both backends: the scores that a device computes decide as the
// host's do, and agree to rounding; an mLSTM's, on both, with those in double.
#pragma once

#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "cache_case.hpp"
#include "near_scores.hpp"
#include "two_scorers.hpp"

namespace test {

template <class S>
using Scored = kvpolicy::Policy<kvpolicy::Sink<2>, kvpolicy::Window<7>, kvpolicy::TopKBudget<40>, S>;

template <class S>
kvpolicy::CacheShape scored_shape(const S& sizes, std::int32_t max_sequences, std::int32_t max_draft_tokens) {
    return {.layers = 1,
            .max_sequences = max_sequences,
            .query_heads = 4,
            .kv_heads = 2,
            .head_dim_qk = sizes.head_dim_qk,
            .head_dim_vo = sizes.head_dim_vo,
            .page_size = 1,
            .max_draft_tokens = max_draft_tokens};
}

/// Both caches with a scorer's weights at random. 16-bit rows are compiled for head_dims up to 64.
template <class T, class S>
struct BothScored {
    TwoScorers<S> scorers;
    BothCaches<Scored<S>, T, kvpolicy::head_dims<64>> both;

    BothScored(const S& sizes, bool optional, std::int32_t max_sequences, std::int32_t max_draft_tokens,
               std::mt19937& generator)
        : scorers(sizes, optional, generator),
          both(scored_shape(sizes, max_sequences, max_draft_tokens), Scored<S>{{}, {}, {}, scorers.of_host},
               &scorers.of_host, &scorers.of_device) {}
};

template <class T = float, class S>
void check_scorer(const S& sizes, bool optional, std::int32_t count = 3, std::int32_t turns = 60) {
    std::mt19937 generator(11);
    BothScored<T, S> scored(sizes, optional, count, 6, generator);
    auto& both = scored.both;
    const kvpolicy::CacheShape& shape = both.shape;
    NearScores<S> near(scored.scorers.of_host, shape);
    for (std::int32_t turn = 0; turn < turns; ++turn) {
        const Mode mode = turn % 3 == 0 ? Mode::step : turn % 3 == 1 ? Mode::prefill : Mode::append_draft;
        const std::int32_t most = mode == Mode::step ? 1 : mode == Mode::append_draft ? 6 : 25;
        const auto some = [&](std::int32_t limit) {
            return static_cast<std::int32_t>(generator() % static_cast<std::uint32_t>(limit + 1));
        };
        std::vector<std::int32_t> q_len, accepted;
        std::vector<std::int32_t> seq_ids;
        for (std::int32_t i = 0; i < count; ++i) {
            seq_ids.push_back((i + 1) % count);
            q_len.push_back(some(most));
            accepted.push_back(some(q_len.back()));
        }
        const CallTensors<T> in(shape, count, most, Scores::random, generator);
        both.call(mode, seq_ids, q_len, in, accepted);
        near.take(seq_ids, mode == Mode::append_draft ? accepted : q_len, in);
        CAPTURE(turn);
        both.near_rows(near);
    }
    near.check();
}

}  // namespace test
