// What kernels and host code see of a cache: a trivially copyable set of pointers and sizes, for one layer.
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/policies/parameters.hpp>
#include <kvpolicy/policies/ranking.hpp>

#include <concepts>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {

/// The sizes of a model's cache.
struct CacheShape {
    std::int32_t layers = 1;
    std::int32_t max_sequences = 1;  ///< sequences that can be held at once
    std::int32_t query_heads = 0;
    std::int32_t kv_heads = 0;     ///< query_heads = G * kv_heads
    std::int32_t head_dim = 0;     ///< sets head_dim_qk and head_dim_vo
    std::int32_t head_dim_qk = 0;  ///< of queries and keys, where it differs from that of values and outputs
    std::int32_t head_dim_vo = 0;
    std::int32_t page_size =
        1;  ///< a head's rows are rounded up to this many, so that it can be exported in pages
    std::int32_t max_draft_tokens =
        0;  ///< n_max: the most draft tokens per sequence (spare rows of every head)
};

/// Where the rows of one KV head lie, counted from the head's first row: [sinks | ring | top-k]. Token t < s
/// has row t; token t >= s of the window has row s + (t - s) mod w; top-k slot p has row s + w + p. Sinks
/// fill before the ring and the ring before the top-k part, so the rows in use are always the first ones.
struct HeadRows {
    std::int32_t sinks = 0;
    std::int32_t window = 1;

    KVPOLICY_HOST_DEVICE constexpr std::int32_t recent(position_t t) const {
        return t < sinks ? static_cast<std::int32_t>(t)
                         : sinks + static_cast<std::int32_t>((t - sinks) % window);
    }
    KVPOLICY_HOST_DEVICE constexpr std::int32_t slot(std::int32_t p) const { return sinks + window + p; }
    /// Rows in use after `length` tokens, `num_long_range` of them in top-k slots.
    KVPOLICY_HOST_DEVICE constexpr std::int32_t used(position_t length, std::int32_t num_long_range) const {
        const position_t recent_rows = static_cast<position_t>(sinks) + window;
        return static_cast<std::int32_t>(length < recent_rows ? length : recent_rows) + num_long_range;
    }
};

namespace detail {

/// What LayerRef::appended says of tokens that have rows: nothing where a call found no pages.
KVPOLICY_HOST_DEVICE constexpr std::int32_t appended_tokens(std::int32_t appended) {
    return appended > 0 ? appended : 0;
}

/// Slots of a tile: a cache on a device records the worst of each tile.
inline constexpr std::int32_t slot_tile = 64;
KVPOLICY_HOST_DEVICE constexpr std::int32_t tiles_of_slots(std::int32_t slots) {
    return slots / slot_tile + (slots % slot_tile != 0 ? 1 : 0);
}

}  // namespace detail

/// Rows of one head that lie together.
template <Storage T>
struct PlainRows {
    T* k_data = nullptr;                  // [rows, head_dim_qk]
    T* v_data = nullptr;                  // [rows, head_dim_vo]
    position_t* position_data = nullptr;  // [rows]
    float* score_data = nullptr;          // [rows]
    std::int32_t head_dim_qk = 0;
    std::int32_t head_dim_vo = 0;
    T* bounds_data = nullptr;  // [rows / bound_rows, 2, head_dim_qk], for selection
    std::int32_t bound_rows = 1;

    /// The smallest and largest number of every dimension of the keys of the selection's page `page`.
    KVPOLICY_HOST_DEVICE constexpr T* bounds(std::int64_t page) const {
        return bounds_data + page * 2 * head_dim_qk;
    }
    KVPOLICY_HOST_DEVICE constexpr T* k(std::int64_t row) const { return k_data + row * head_dim_qk; }
    KVPOLICY_HOST_DEVICE constexpr T* v(std::int64_t row) const { return v_data + row * head_dim_vo; }
    KVPOLICY_HOST_DEVICE constexpr position_t& position(std::int64_t row) const { return position_data[row]; }
    KVPOLICY_HOST_DEVICE constexpr float& score(std::int64_t row) const { return score_data[row]; }
    /// The first row after `row` that does not follow on its predecessor in memory; at most `end`.
    KVPOLICY_HOST_DEVICE constexpr std::int32_t run_end(std::int32_t /*row*/, std::int32_t end) const {
        return end;
    }
};

/// What the layers of every kind of cache have in common.
template <class P, class T>
struct LayerRef {
    static_assert(Storage<T>, "kvpolicy: a cache stores bf16, fp16, float or double");
    using policy_type = P;
    using value_type = T;
    using scorer_type = typename P::scorer_type;

    std::int32_t layer = 0;
    std::int32_t max_sequences = 0;
    std::int32_t kv_heads = 0;
    std::int32_t group = 0;
    std::int32_t head_dim_qk = 0;
    std::int32_t head_dim_vo = 0;
    std::int32_t page_size = 1;
    std::int32_t max_draft_tokens = 0;
    std::int32_t device = -1;  // the GPU whose memory the pointers are; -1: the host's
    AttentionParams attention;
    position_t rebase_limit = kvpolicy::rebase_limit;

    const HeadParams* all_params = nullptr;  // [kv_heads]
    position_t* length = nullptr;            // [max_sequences], shared by all layers
    std::int32_t* num_long_range = nullptr;  // [max_sequences, kv_heads]: top-k slots in use
    std::int32_t* num_protected =
        nullptr;  // [max_sequences, kv_heads]: of these, keys that a keep part holds; null without one
    std::int32_t* victim = nullptr;     // [max_sequences, kv_heads]: the worst slot, or -1 where not known
    std::int32_t* num_draft = nullptr;  // [max_sequences]: tokens that wait in the spare rows
    // Tokens that advance() has not counted: [max_sequences] on the host; [max_sequences, kv_heads] on a
    // device, where the heads of a step do not wait for each other, and -1 says that a call found no pages.
    std::int32_t* appended = nullptr;
    float* state = nullptr;  // [max_sequences, kv_heads, state_size]
    std::int64_t state_size = 0;
    scorer_type scorer;
    typename P::gate_type gate;
    typename P::keep_type keep;
    typename P::selection_type selection;
    typename P::eviction_type eviction;
    const std::int32_t* read_pages =
        nullptr;  // [kv_heads], for selection: selection.pages where a device can read it
    // For an eviction part: the last queries of every head, that of position t in row t mod observing, and
    // those of draft tokens.
    T* queries = nullptr;        // [max_sequences, kv_heads, observing, group, head_dim_qk]
    T* spare_queries = nullptr;  // [max_sequences, kv_heads, max_draft_tokens, group, head_dim_qk]

    KVPOLICY_HOST_DEVICE constexpr T* query_row(std::int64_t seq, std::int32_t head, position_t t) const {
        return queries +
               (head_index(seq, head) * eviction.observing + t % eviction.observing) * group * head_dim_qk;
    }
    KVPOLICY_HOST_DEVICE constexpr T* spare_query_row(std::int64_t seq, std::int32_t head,
                                                      std::int64_t j) const {
        return spare_queries + (head_index(seq, head) * max_draft_tokens + j) * group * head_dim_qk;
    }
    KVPOLICY_HOST_DEVICE constexpr HeadRows layout(std::int32_t head) const {
        return {all_params[head].sinks, all_params[head].window};
    }
    KVPOLICY_HOST_DEVICE constexpr std::int64_t head_index(std::int64_t seq, std::int32_t head) const {
        return seq * kv_heads + head;
    }
    /// Tokens that the layer has taken and advance() has not counted: of a sequence in the middle of a token.
    KVPOLICY_HOST_DEVICE constexpr std::int32_t num_appended(std::int64_t seq, std::int32_t head) const {
        return detail::appended_tokens(appended[device >= 0 ? head_index(seq, head) : seq]);
    }
    /// Rows that head `head` of sequence `seq` has in use now, those of tokens that the layer has taken among
    /// them, whether advance() has counted these or not.
    KVPOLICY_HOST_DEVICE constexpr std::int32_t used(std::int64_t seq, std::int32_t head) const {
        return layout(head).used(length[seq] + num_appended(seq, head),
                                 num_long_range[head_index(seq, head)]);
    }
};

template <Storage T>
struct Slab;

/// The rows of a FixedBudgetCache as pages of one slab, each in its place, for calls on a device that read
/// chosen pages.
template <Storage T>
struct PlacedPages {
    Slab<T>* slab = nullptr;               // [1]
    std::int32_t* table = nullptr;         // [max_sequences, rows / page_size]
    std::int32_t* held = nullptr;          // [max_sequences, kv_heads]
    std::int32_t* free_count = nullptr;    // [1]: 0, nothing is ever taken
    std::int64_t* table_offset = nullptr;  // [kv_heads + 1]
    std::int64_t* tile_offset = nullptr;   // [kv_heads + 1]
};

/// One layer of a FixedBudgetCache. Rows are [max_sequences, row_offset[kv_heads], D]: head h of sequence b
/// has the rows b * rows + row_offset[h] ... row_offset[h + 1], [sinks | ring | top-k | spare]. Every row has
/// its logical position and its score; rows that are not in use may hold anything.
template <class P, class T>
struct FixedBudgetRef : LayerRef<P, T> {
    /// Whether rows come from a pool that may be exhausted.
    static constexpr bool pooled = false;

    const std::int64_t* row_offset = nullptr;  // [kv_heads + 1]
    std::int64_t rows = 0;                     // of one sequence
    T* k = nullptr;                            // [max_sequences, rows, head_dim_qk]
    T* v = nullptr;                            // [max_sequences, rows, head_dim_vo]
    position_t* position = nullptr;            // [max_sequences, rows]
    float* score = nullptr;                    // [max_sequences, rows]
    T* bounds =
        nullptr;  // [max_sequences, rows / selection.page_size(), 2, head_dim_qk]; null without selection
    std::int64_t max_capacity = 0;  // the largest capacity(head): a number that a device's host may read
    // State of calls on a device between launches: how many blocks of a head have arrived (0 outside of a
    // launch), and the worst slot of each tile of top-k slots, true where `victim` is known or, in a cache of
    // an observed policy, -2.
    std::uint32_t* arrivals = nullptr;     // [max_sequences, kv_heads]
    std::int32_t* tile_victims = nullptr;  // [max_sequences, tiles(rows, kv_heads)]
    PlacedPages<T> placed;                 // with a selection

    /// Tiles of one sequence, with one more for every head, since its rows begin anywhere in a tile.
    KVPOLICY_HOST_DEVICE static constexpr std::int64_t tiles(std::int64_t rows, std::int64_t heads) {
        return rows / detail::slot_tile + heads;
    }
    KVPOLICY_HOST_DEVICE constexpr std::int64_t first_tile(std::int64_t seq, std::int32_t head) const {
        return seq * tiles(rows, this->kv_heads) + row_offset[head] / detail::slot_tile + head;
    }
    KVPOLICY_HOST_DEVICE constexpr std::int64_t first_row(std::int64_t seq, std::int32_t head) const {
        return seq * rows + row_offset[head];
    }
    KVPOLICY_HOST_DEVICE constexpr PlainRows<T> head_rows(std::int64_t seq, std::int32_t head) const {
        return rows_from(first_row(seq, head));
    }
    /// The rows that draft tokens wait in.
    KVPOLICY_HOST_DEVICE constexpr PlainRows<T> spare_rows(std::int64_t seq, std::int32_t head) const {
        return rows_from(first_row(seq, head) + capacity(head));
    }
    /// The most rows that a head can have in use, s + w + k.
    KVPOLICY_HOST_DEVICE constexpr std::int64_t capacity(std::int32_t head) const {
        return std::int64_t{this->all_params[head].sinks} + this->all_params[head].window +
               this->all_params[head].budget;
    }
    /// The rows that may expire while a chunk runs: here, all of them.
    KVPOLICY_HOST_DEVICE constexpr std::int64_t expirable_entries(std::int32_t head) const {
        return capacity(head);
    }
    /// Where page `page` of a head lies in the pool that export_heads describes.
    KVPOLICY_HOST_DEVICE constexpr std::int64_t page_id(std::int64_t seq, std::int32_t head,
                                                        std::int64_t page) const {
        return first_row(seq, head) / this->page_size + page;
    }
    KVPOLICY_HOST_DEVICE constexpr std::int64_t page_count() const {
        return std::int64_t{this->max_sequences} * rows / this->page_size;
    }

  private:
    KVPOLICY_HOST_DEVICE constexpr PlainRows<T> rows_from(std::int64_t first) const {
        const std::int32_t page = this->selection.page_size();
        return {k + first * this->head_dim_qk,
                v + first * this->head_dim_vo,
                position + first,
                score + first,
                this->head_dim_qk,
                this->head_dim_vo,
                P::has_selection ? bounds + first / page * 2 * this->head_dim_qk : nullptr,
                page};
    }
};

/// One layer of a cache, as calls take it: what LayerRef has, and how the rows of a head are found.
template <class R>
concept CacheRef = requires(const R& ref, std::int64_t seq, std::int32_t head) {
    { R::pooled } -> std::convertible_to<bool>;
    { ref.head_rows(seq, head).k(0) } -> std::same_as<typename R::value_type*>;
    { ref.spare_rows(seq, head).k(0) } -> std::same_as<typename R::value_type*>;
    { ref.capacity(head) } -> std::same_as<std::int64_t>;
    { ref.expirable_entries(head) } -> std::same_as<std::int64_t>;
    { ref.page_id(seq, head, seq) } -> std::same_as<std::int64_t>;
    { ref.used(seq, head) } -> std::same_as<std::int32_t>;
};

namespace detail {

/// Whether so many keys of a head, those of keep parts not counted, may hold top-k slots.
template <class Ref>
KVPOLICY_HOST_DEVICE constexpr bool may_compete(const Ref& cache, std::int32_t head, std::int64_t keys) {
    using P = typename Ref::policy_type;
    if constexpr (P::grows) {
        return keys >= 0;
    } else if constexpr (P::shares_budget) {
        return keys >= 0 && keys <= cache.slots_of(head);
    } else {
        const std::int32_t budget = cache.all_params[head].budget;
        return keys >= 0 && (budget == unlimited || keys <= budget);
    }
}

}  // namespace detail

}  // namespace kvpolicy
