// Lives of sequences in a DualCache with parts that tests of steps and chunks do without: keep parts,
// selections, evictions.
#pragma once

#include <kvpolicy/policies/eviction.hpp>
#include <kvpolicy/policies/selection.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/stride.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "paged_case.hpp"

namespace test {

/// By layer and head: two layers of three heads.
inline constexpr std::int32_t part_sinks[] = {0, 2, 1, 3, 0, 1}, part_windows[] = {1, 4, 17, 2, 40, 3},
                              part_budgets[] = {kvpolicy::unlimited, 0, 400, 130, kvpolicy::unlimited, 1},
                              part_pages[] = {1, 3, kvpolicy::unlimited, 2, 5, 4};
inline constexpr float part_gates[] = {-9.0f, 9.0f, 0.0f, -1.0f, 0.5f, 1.5f};

template <class T>
kvpolicy::PerHead<T> of_parts(const T (&values)[6]) {
    return kvpolicy::per_head(values, 2, 3);
}

/// Lives in a pool that grows, and in one that never suffices. Returns the rounds of evictions.
template <class T, class P>
std::int32_t check_parts(const P& policy, std::int32_t page_size = 16, std::int32_t turns = 100,
                         kvpolicy::position_t rebase_limit = kvpolicy::rebase_limit,
                         const kvpolicy::AttentionParams& attention = {}) {
    std::mt19937 generator(11);
    std::int32_t rounds = 0;
    for (const Scores kind : {Scores::random, Scores::few_values}) {
        CAPTURE(name(kind));
        kvpolicy::CacheShape shape{.layers = 2,
                                   .max_sequences = 4,
                                   .query_heads = 9,
                                   .kv_heads = 3,
                                   .head_dim_qk = 8,
                                   .head_dim_vo = 16,
                                   .page_size = page_size,
                                   .max_draft_tokens = 5};
        BothDuals<P, T, kvpolicy::all_head_dims, true> ample(
            shape, {.slab_pages = 7, .max_slabs = 400, .max_seq_len = 9000}, policy, nullptr, nullptr,
            attention, rebase_limit);
        random_life(ample, kind, turns, generator);
        shape.query_heads = 3;
        BothDuals<P, T, kvpolicy::all_head_dims, true> scarce(
            shape, {.slab_pages = 20, .max_slabs = 4, .max_seq_len = 9000}, policy, nullptr, nullptr,
            attention, rebase_limit);
        random_life(scarce, kind, turns, generator);
        rounds += ample.rounds + scarce.rounds;
    }
    return rounds;
}

}  // namespace test
