// What a chunk does to each head of a cache on the host, in the caller's workspace.
#pragma once

#include <kvpolicy/caches/host/entries.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/masks/top_k_set.hpp>
#include <kvpolicy/policies/parameters.hpp>
#include <kvpolicy/scorers/host/scorer_input.hpp>

#include <cstddef>
#include <cstdint>

namespace kvpolicy::host_backend {

/// What a chunk will leave in one head.
struct chunk_counts {
    position_t bad;               // a position whose score is NaN, one that is ranked if any is; or -1
    std::int32_t keepers;         // keys that compete and hold a place
    std::int32_t promoted;        // keys that got a place without a top-k update
    std::int32_t num_protected;   // of these, by a keep part
    std::int32_t num_long_range;  // top-k slots in use
    // plan.score has the scores of tokens from here on: the chunk's first token, or one in the window.
    position_t scored_from;
    position_t scored_end;  // and up to here
};

/// Arrays of one (entry, head) of a chunk of n tokens, in the caller's workspace. Only `expirable` rows of
/// the cache can expire while the chunk runs (in a head without a limit: sinks and ring). Keys have names:
/// such a row r is r, token j of the chunk is expirable + j. Expiries and positions are relative to the
/// chunk's first token.
struct chunk_plan {
    std::int32_t expirable;
    std::int32_t* position;         // [expirable]
    expiry_t* expiry;               // [expirable + n]
    float* score;                   // [n], or [late + n]: scores of tokens from counts->scored_from on
    std::byte* keepers;             // of a top_k_set: keys held after the chunk's top-k updates
    detail::top_k_entry* promoted;  // [n], for heads without a limit and keep parts
    std::size_t top_k_slots;
    chunk_counts* counts;
    float* state;  // a copy of the scorer's state
    std::size_t bytes;
};

template <class Cache>
chunk_plan plan_of(const Cache& cache, std::int32_t head, std::int32_t tokens, std::byte* memory) {
    const HeadParams& head_params = cache.all_params[head];
    const auto expirable = static_cast<std::size_t>(cache.expirable_entries(head));
    const auto recent = static_cast<std::size_t>(std::int64_t{head_params.sinks} + head_params.window);
    const std::size_t top_k_slots = expirable > recent ? expirable - recent : 0;
    const auto n = static_cast<std::size_t>(tokens);
    chunk_plan plan{};
    std::size_t at = 0;
    const auto take = [&]<class Element>(Element*& array, std::size_t count) {
        array = memory == nullptr ? nullptr : reinterpret_cast<Element*>(memory + at);
        at += detail::aligned_size(count * sizeof(Element));
    };
    plan.expirable = static_cast<std::int32_t>(expirable);
    take(plan.position, expirable);
    take(plan.expiry, expirable + n);
    take(plan.score, n + static_cast<std::size_t>(late_scores(cache, head)));
    take(plan.keepers, detail::top_k_set::bytes(head_params, top_k_slots));
    take(plan.promoted, Cache::pooled ? n : 0);
    plan.top_k_slots = top_k_slots;
    take(plan.counts, 1);
    take(plan.state, static_cast<std::size_t>(cache.state_size));
    plan.bytes = at;
    return plan;
}

/// Bytes of the plans of one entry, all heads.
template <class Cache>
std::size_t chunk_bytes(const Cache& cache, std::int32_t tokens) {
    std::size_t bytes = 0;
    for (std::int32_t h = 0; h < cache.kv_heads; ++h) {
        bytes += plan_of(cache, h, tokens, nullptr).bytes;
    }
    return bytes;
}

}  // namespace kvpolicy::host_backend
