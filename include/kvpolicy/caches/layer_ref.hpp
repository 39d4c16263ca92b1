// What kernels and host code see of a cache: a trivially copyable set of pointers and sizes, for one layer.
#pragma once

#include <kvpolicy/core/hidden_rows.hpp>
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
    std::int32_t slots = 1;  ///< sequences that can be held at once
    std::int32_t query_heads = 0;
    std::int32_t kv_heads = 0;  ///< query_heads = G * kv_heads
    std::int32_t dim_k = 0;
    std::int32_t dim_v = 0;
    std::int32_t page_rows =
        1;  ///< a head's rows are rounded up to this many, so that it can be exported in pages
    std::int32_t proposals = 0;  ///< n_max: the most draft tokens per sequence (spare rows of every head)
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
    KVPOLICY_HOST_DEVICE constexpr std::int32_t place(std::int32_t p) const { return sinks + window + p; }
    /// Rows in use after `length` tokens, `kept` of them in top-k slots.
    KVPOLICY_HOST_DEVICE constexpr std::int32_t used(position_t length, std::int32_t kept) const {
        const position_t recent_rows = static_cast<position_t>(sinks) + window;
        return static_cast<std::int32_t>(length < recent_rows ? length : recent_rows) + kept;
    }
};

namespace detail {

/// What LayerRef::taken says of tokens that have rows: nothing where a call found no pages.
KVPOLICY_HOST_DEVICE constexpr std::int32_t pending_tokens(std::int32_t taken) {
    return taken > 0 ? taken : 0;
}

/// Long-range places of which a cache on a device remembers the worst.
inline constexpr std::int32_t place_tile = 64;
KVPOLICY_HOST_DEVICE constexpr std::int32_t tiles_of_places(std::int32_t places) {
    return places / place_tile + (places % place_tile != 0 ? 1 : 0);
}

}  // namespace detail

/// Rows of one head that lie together.
template <Storage T>
struct PlainRows {
    T* k_data = nullptr;                  // [rows, dim_k]
    T* v_data = nullptr;                  // [rows, dim_v]
    position_t* position_data = nullptr;  // [rows]
    float* score_data = nullptr;          // [rows]
    std::int32_t dim_k = 0;
    std::int32_t dim_v = 0;
    T* bounds_data = nullptr;  // [rows / bound_rows, 2, dim_k], for selection
    std::int32_t bound_rows = 1;

    /// The smallest and largest number of every dimension of the keys of the selection's page `page`.
    KVPOLICY_HOST_DEVICE constexpr T* bounds(std::int64_t page) const {
        return bounds_data + page * 2 * dim_k;
    }
    KVPOLICY_HOST_DEVICE constexpr T* k(std::int64_t row) const { return k_data + row * dim_k; }
    KVPOLICY_HOST_DEVICE constexpr T* v(std::int64_t row) const { return v_data + row * dim_v; }
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
    std::int32_t slots = 0;
    std::int32_t kv_heads = 0;
    std::int32_t group = 0;
    std::int32_t dim_k = 0;
    std::int32_t dim_v = 0;
    std::int32_t page_rows = 1;
    std::int32_t proposals = 0;
    std::int32_t device = -1;  // the GPU whose memory the pointers are; -1: the host's
    Attention attention;
    position_t rebase_limit = kvpolicy::rebase_limit;

    const HeadRule* rules = nullptr;  // [kv_heads]
    position_t* length = nullptr;     // [slots], shared by all layers
    std::int32_t* kept = nullptr;     // [slots, kv_heads]: top-k slots in use
    std::int32_t* pinned =
        nullptr;  // [slots, kv_heads]: of these, keys that a keep part holds; null without one
    std::int32_t* victim = nullptr;    // [slots, kv_heads]: the worst slot, or -1 where not known
    std::int32_t* proposed = nullptr;  // [slots]: tokens that wait in the spare rows
    // Tokens that advance() has not counted: [slots] on the host; [slots, kv_heads] on a device, where the
    // heads of a step do not wait for each other, and -1 says that a call found no pages.
    std::int32_t* taken = nullptr;
    float* state = nullptr;  // [slots, kv_heads, state_size]
    std::int64_t state_size = 0;
    scorer_type scorer;
    typename P::gate_type gate;
    typename P::keep_type keep;
    typename P::selection_type selection;
    typename P::eviction_type eviction;
    const std::int32_t* read_pages =
        nullptr;  // [kv_heads], for selection: selection.pages where a device can read it
    // For an eviction part: the last queries of every head, that of position t in row t mod observing, and
    // those of proposed tokens.
    T* queries = nullptr;        // [slots, kv_heads, observing, group, dim_k]
    T* spare_queries = nullptr;  // [slots, kv_heads, proposals, group, dim_k]

    KVPOLICY_HOST_DEVICE constexpr T* query_row(std::int64_t slot, std::int32_t head, position_t t) const {
        return queries +
               (head_index(slot, head) * eviction.observing + t % eviction.observing) * group * dim_k;
    }
    KVPOLICY_HOST_DEVICE constexpr T* spare_query_row(std::int64_t slot, std::int32_t head,
                                                      std::int64_t j) const {
        return spare_queries + (head_index(slot, head) * proposals + j) * group * dim_k;
    }
    KVPOLICY_HOST_DEVICE constexpr HeadRows layout(std::int32_t head) const {
        return {rules[head].sinks, rules[head].window};
    }
    KVPOLICY_HOST_DEVICE constexpr std::int64_t head_index(std::int64_t slot, std::int32_t head) const {
        return slot * kv_heads + head;
    }
    /// Tokens that the layer has taken and advance() has not counted: of a slot in the middle of a token.
    KVPOLICY_HOST_DEVICE constexpr std::int32_t pending(std::int64_t slot, std::int32_t head) const {
        return detail::pending_tokens(taken[device >= 0 ? head_index(slot, head) : slot]);
    }
    /// Rows that head `head` of slot `slot` has in use now, those of tokens that the layer has taken among
    /// them, whether advance() has counted these or not.
    KVPOLICY_HOST_DEVICE constexpr std::int32_t used(std::int64_t slot, std::int32_t head) const {
        return layout(head).used(length[slot] + pending(slot, head), kept[head_index(slot, head)]);
    }
};

template <Storage T>
struct Slab;

/// The rows of a FixedBudgetCache as pages of one slab, each in its place, for calls on a device that read
/// chosen pages.
template <Storage T>
struct PlacedPages {
    Slab<T>* slab = nullptr;               // [1]
    std::int32_t* table = nullptr;         // [slots, rows / page_rows]
    std::int32_t* held = nullptr;          // [slots, kv_heads]
    std::int32_t* free_count = nullptr;    // [1]: 0, nothing is ever taken
    std::int64_t* table_offset = nullptr;  // [kv_heads + 1]
    std::int64_t* tile_offset = nullptr;   // [kv_heads + 1]
};

/// One layer of a FixedBudgetCache. Rows are [slots, row_offset[kv_heads], D]: head h of slot b has the rows
/// b * rows + row_offset[h] ... row_offset[h + 1], [sinks | ring | top-k | spare]. Every row has its logical
/// position and its score; rows that are not in use may hold anything.
template <class P, class T>
struct FixedBudgetRef : LayerRef<P, T> {
    /// Whether rows come from a pool that may be exhausted.
    static constexpr bool pooled = false;

    const std::int64_t* row_offset = nullptr;  // [kv_heads + 1]
    std::int64_t rows = 0;                     // of one slot
    T* k = nullptr;                            // [slots, rows, dim_k]
    T* v = nullptr;                            // [slots, rows, dim_v]
    position_t* position = nullptr;            // [slots, rows]
    float* score = nullptr;                    // [slots, rows]
    T* bounds = nullptr;       // [slots, rows / selection.page_rows(), 2, dim_k]; null without selection
    std::int64_t longest = 0;  // the largest capacity(head): a number that a device's host may read
    // What calls on a device keep between launches: how many blocks of a head are done (0 outside of a
    // launch), and the worst slot of each tile of places, true where `victim` is known.
    std::uint32_t* arrivals = nullptr;     // [slots, kv_heads]
    std::int32_t* tile_victims = nullptr;  // [slots, tiles(rows, kv_heads)]
    PlacedPages<T> placed;                 // with a selection

    /// Tiles of one slot, with one more for every head, since its rows begin anywhere in a tile.
    KVPOLICY_HOST_DEVICE static constexpr std::int64_t tiles(std::int64_t rows, std::int64_t heads) {
        return rows / detail::place_tile + heads;
    }
    KVPOLICY_HOST_DEVICE constexpr std::int64_t first_tile(std::int64_t slot, std::int32_t head) const {
        return slot * tiles(rows, this->kv_heads) + row_offset[head] / detail::place_tile + head;
    }
    KVPOLICY_HOST_DEVICE constexpr std::int64_t first_row(std::int64_t slot, std::int32_t head) const {
        return slot * rows + row_offset[head];
    }
    KVPOLICY_HOST_DEVICE constexpr PlainRows<T> head_rows(std::int64_t slot, std::int32_t head) const {
        return rows_from(first_row(slot, head));
    }
    /// The rows that proposed tokens wait in.
    KVPOLICY_HOST_DEVICE constexpr PlainRows<T> spare_rows(std::int64_t slot, std::int32_t head) const {
        return rows_from(first_row(slot, head) + capacity(head));
    }
    /// The most rows that a head can have in use, s + w + k.
    KVPOLICY_HOST_DEVICE constexpr std::int64_t capacity(std::int32_t head) const {
        return std::int64_t{this->rules[head].sinks} + this->rules[head].window + this->rules[head].budget;
    }
    /// The rows that may expire while a chunk runs: here, all of them.
    KVPOLICY_HOST_DEVICE constexpr std::int64_t mortal_rows(std::int32_t head) const {
        return capacity(head);
    }
    /// Where page `page` of a head lies in the pool that export_heads describes.
    KVPOLICY_HOST_DEVICE constexpr std::int64_t page_id(std::int64_t slot, std::int32_t head,
                                                        std::int64_t page) const {
        return first_row(slot, head) / this->page_rows + page;
    }
    KVPOLICY_HOST_DEVICE constexpr std::int64_t page_count() const {
        return std::int64_t{this->slots} * rows / this->page_rows;
    }

  private:
    KVPOLICY_HOST_DEVICE constexpr PlainRows<T> rows_from(std::int64_t first) const {
        const std::int32_t page = this->selection.page_rows();
        return {k + first * this->dim_k,
                v + first * this->dim_v,
                position + first,
                score + first,
                this->dim_k,
                this->dim_v,
                P::has_selection ? bounds + first / page * 2 * this->dim_k : nullptr,
                page};
    }
};

/// One layer of a cache, as calls take it: what LayerRef has, and how the rows of a head are found.
template <class R>
concept CacheRef = requires(const R& ref, std::int64_t slot, std::int32_t head) {
    { R::pooled } -> std::convertible_to<bool>;
    { ref.head_rows(slot, head).k(0) } -> std::same_as<typename R::value_type*>;
    { ref.spare_rows(slot, head).k(0) } -> std::same_as<typename R::value_type*>;
    { ref.capacity(head) } -> std::same_as<std::int64_t>;
    { ref.mortal_rows(head) } -> std::same_as<std::int64_t>;
    { ref.page_id(slot, head, slot) } -> std::same_as<std::int64_t>;
    { ref.used(slot, head) } -> std::same_as<std::int32_t>;
};

/// What a call on a cache may take or give beside its tensors.
struct CacheExtras {
    /// Scores of the new tokens [count, Hkv, n], for a policy whose scores are given (GivenScores).
    plane_view<const float> scores{};
    /// Where to write the log-sum-exp of every query [count, Hq, n] (natural log), if wanted.
    plane_view<float> lse{};
    /// Hidden states of the new tokens [count, n, width], of any storage type, for a policy whose scorer
    /// reads them (SP-KV's UtilityPredictor).
    HiddenRows hidden{};
    /// For prefill and propose of a packed batch: the edges [count + 1], rising from 0, of the entries'
    /// tokens in tensors of one sequence. q is then [1, Hq, total, Dk], and likewise k, v, out, scores, lse
    /// and hidden; entry i is the tokens cu_seqlens[i] .. cu_seqlens[i + 1] - 1, as many as batch.tokens(i).
    /// Whether samples of a pack see each other is a question of slots: one entry keeps attention across
    /// them, an entry and a slot for each resets it.
    const std::int32_t* cu_seqlens = nullptr;
};

}  // namespace kvpolicy
