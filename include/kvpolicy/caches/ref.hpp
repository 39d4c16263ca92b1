// What kernels and host code see of a FixedBudgetCache: a trivially copyable set of pointers and sizes, for one layer.
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/policies/parameters.hpp>
#include <kvpolicy/policies/ranking.hpp>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {

/// The sizes of a model's cache.
struct CacheShape {
    std::int32_t layers = 1;
    std::int32_t slots = 1;  ///< sequences that can be held at once
    std::int32_t query_heads = 0;
    std::int32_t kv_heads = 0;  ///< query_heads = G * kv_heads
    std::int32_t dim_k = 0;
    std::int32_t dim_v = 0;
    std::int32_t page_rows =
        1;  ///< a head's rows are rounded up to this many, so that it can be exported in pages
};

/// Where the rows of one KV head lie, counted from the head's first row: [sinks | ring | long-range]. Token t < s has
/// row t; token t >= s of the window has row s + (t - s) mod w; long-range place p has row s + w + p. Sinks fill before
/// the ring and the ring before the long-range part, so the rows in use are always the first ones.
struct HeadRows {
    std::int32_t sinks = 0;
    std::int32_t window = 1;

    KVPOLICY_HOST_DEVICE constexpr std::int32_t recent(position_t t) const {
        return t < sinks ? static_cast<std::int32_t>(t)
                         : sinks + static_cast<std::int32_t>((t - sinks) % window);
    }
    KVPOLICY_HOST_DEVICE constexpr std::int32_t place(std::int32_t p) const { return sinks + window + p; }
    /// Rows in use after `length` tokens, `kept` of them in long-range places.
    KVPOLICY_HOST_DEVICE constexpr std::int32_t used(position_t length, std::int32_t kept) const {
        const position_t recent_rows = static_cast<position_t>(sinks) + window;
        return static_cast<std::int32_t>(length < recent_rows ? length : recent_rows) + kept;
    }
};

/// One layer of a FixedBudgetCache. Rows are [slots, row_offset[kv_heads], D]: head h of slot b has the rows
/// b * rows + row_offset[h] ... row_offset[h + 1]. Every row has its logical position and its score; rows that are not in
/// use may hold anything.
template <class P, Storage T>
struct FixedBudgetRef {
    using policy_type = P;
    using value_type = T;
    using scorer_type = typename P::scorer_type;

    std::int32_t layer = 0;
    std::int32_t slots = 0;
    std::int32_t kv_heads = 0;
    std::int32_t group = 0;
    std::int32_t dim_k = 0;
    std::int32_t dim_v = 0;
    std::int32_t page_rows = 1;
    Attention attention;
    position_t rebase_limit = kvpolicy::rebase_limit;

    const HeadRule* rules = nullptr;           // [kv_heads]
    const std::int64_t* row_offset = nullptr;  // [kv_heads + 1]
    std::int64_t rows = 0;                     // of one slot
    T* k = nullptr;                            // [slots, rows, dim_k]
    T* v = nullptr;                            // [slots, rows, dim_v]
    position_t* position = nullptr;            // [slots, rows]
    float* score = nullptr;                    // [slots, rows]
    position_t* length = nullptr;              // [slots], shared by all layers
    std::int32_t* kept = nullptr;              // [slots, kv_heads]: long-range places in use
    std::int32_t* victim = nullptr;            // [slots, kv_heads]: the worst place, or -1 where not known
    float* state = nullptr;                    // [slots, kv_heads, state_size]
    std::int64_t state_size = 0;
    scorer_type scorer;
    typename P::gate_type gate;

    KVPOLICY_HOST_DEVICE constexpr std::int64_t first_row(std::int64_t slot, std::int32_t head) const {
        return slot * rows + row_offset[head];
    }
    KVPOLICY_HOST_DEVICE constexpr HeadRows layout(std::int32_t head) const {
        return {rules[head].sinks, rules[head].window};
    }
    /// Rows that head `head` of slot `slot` has in use.
    KVPOLICY_HOST_DEVICE constexpr std::int32_t used(std::int64_t slot, std::int32_t head) const {
        return layout(head).used(length[slot], kept[slot * kv_heads + head]);
    }
};

}  // namespace kvpolicy
