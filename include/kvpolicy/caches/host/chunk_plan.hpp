// What a chunk does to each head of a cache on the host, in the caller's workspace.
#pragma once

#include <kvpolicy/caches/host/entries.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/masks/top_k_set.hpp>
#include <kvpolicy/policies/parameters.hpp>
#include <kvpolicy/scorers/host/scorer_input.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvpolicy::host_backend {

/// What a chunk will leave in one head.
struct chunk_counts {
    position_t bad;               // a position whose score is NaN, one that is ranked if any is; or -1
    std::int32_t keepers;         // keys that compete and hold a slot
    std::int32_t promoted;        // keys that got a slot without a top-k update
    std::int32_t num_protected;   // of these, by a keep part
    std::int32_t num_long_range;  // top-k slots in use
    // plan.score has the scores of tokens from here on: the chunk's first token, or one in the window.
    position_t scored_from;
    position_t scored_end;  // and up to here
    bool gives_pages;       // of heads that share a budget: see write_shared_heads()
};

/// The key that leaves a head's window at a token of a chunk, where the heads share a budget.
struct leaving_key {
    enum : std::uint8_t { evicted, competes, is_protected } kind;
    float score;
};
/// A key in a top-k slot of a head.
struct shared_holder {
    position_t position;
    float score;
    std::int32_t key;  // its name, as in a chunk_plan
};

/// Arrays of one (entry, head) of a chunk of n tokens, in the caller's workspace. Only `expirable` rows of
/// the cache can expire while the chunk runs (in a head without a limit: sinks and ring). Keys have names:
/// such a row r is r, token j of the chunk is expirable + j. (A head may have all slots of a budget that
/// heads share, so there the plans are for the rows in use when the chunk comes.) Expiries and positions
/// are relative to the chunk's first token.
struct chunk_plan {
    std::int32_t expirable;
    std::int32_t* position;         // [expirable]
    expiry_t* expiry;               // [expirable + n]
    float* score;                   // [n], or [late + n]: scores of tokens from counts->scored_from on
    std::byte* keepers;             // of a top_k_set: keys held after the chunk's top-k updates
    detail::top_k_entry* promoted;  // [n], for heads without a limit and keep parts
    std::size_t top_k_slots;
    leaving_key* leaving;    // [n]; this and the next where the heads share a budget
    shared_holder* holders;  // [num_long_range]: after the chunk, in the order of the top-k slots
    std::int32_t* slot_of;   // [expirable + n]: of a key that has a top-k slot
    chunk_counts* counts;
    float* state;  // a copy of the scorer's state
    std::size_t bytes;
};

/// `used`: the head's rows in use, of a layer whose heads share a budget.
template <class Cache>
chunk_plan plan_of(const Cache& cache, std::int32_t head, std::int32_t tokens, std::byte* memory,
                   [[maybe_unused]] std::int64_t used = 0) {
    constexpr bool shared = Cache::policy_type::shares_budget;
    const HeadParams& head_params = cache.all_params[head];
    const auto most = static_cast<std::size_t>(shared ? cache.capacity(head) : cache.expirable_entries(head));
    const std::size_t expirable = shared ? static_cast<std::size_t>(used) : most;
    const auto recent = static_cast<std::size_t>(std::int64_t{head_params.sinks} + head_params.window);
    const std::size_t top_k_slots = most > recent ? most - recent : 0;
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
    plan.top_k_slots = shared ? 0 : top_k_slots;
    take(plan.keepers, detail::top_k_set::bytes(head_params, plan.top_k_slots));
    take(plan.promoted, Cache::pooled && !shared ? n : 0);
    take(plan.leaving, shared ? n : 0);
    take(plan.holders, shared ? std::min(expirable + n, top_k_slots) : 0);
    take(plan.slot_of, shared ? expirable + n : 0);
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
    if constexpr (Cache::policy_type::shares_budget) {
        // The rows of all heads, in arrays that are aligned for each.
        std::size_t rows = 0, recent = 0;
        for (std::int32_t h = 0; h < cache.kv_heads; ++h) {
            const auto most = static_cast<std::size_t>(cache.capacity(h));
            rows += most;
            recent += std::min(most, static_cast<std::size_t>(std::int64_t{cache.all_params[h].sinks} +
                                                              cache.all_params[h].window));
        }
        if (!Cache::policy_type::has_keep) {
            rows = std::min(rows, recent + static_cast<std::size_t>(cache.shared_slots));
        }
        bytes += rows * (2 * sizeof(std::int32_t) + sizeof(expiry_t) + sizeof(shared_holder)) +
                 static_cast<std::size_t>(cache.kv_heads) * 4 * detail::alignment;
        bytes = detail::aligned_size(bytes) +
                detail::aligned_size(static_cast<std::size_t>(cache.kv_heads) * sizeof(std::int64_t));
    }
    return bytes;
}

}  // namespace kvpolicy::host_backend
