// DualCache: a local ring (sinks and window) and a global part that grows, in pages of one pool. For policies
// whose memory no number bounds: gates (SP-KV, WG-KV), heads with unlimited budgets (DuoAttention's retrieval
// heads), keep parts. A budget beside the gate caps it (LTE). And for heads that share a budget, on the host.
#pragma once

#include <kvpolicy/caches/cache.hpp>
#include <kvpolicy/caches/calls.hpp>
#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/caches/page_pool.hpp>
#include <kvpolicy/core/buffer.hpp>
#if defined(__CUDACC__)
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#endif

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

namespace kvpolicy {

namespace detail {

/// What a layer has beside its heads' numbers where the heads share a budget; else nothing. Pages that a
/// sequence of the layer has and none of its heads needs wait in its stash: a head that gives up entries
/// puts their pages there, and a head that grows takes pages from there first.
template <class P, bool Shared = P::shares_budget>
struct SharedSlots {};
template <class P>
struct SharedSlots<P, true> {
    std::int64_t shared_slots = 0;    // top-k slots of the layer
    bool is_static = true;            // Policy::has_static_shared_order
    std::int32_t* stash = nullptr;    // [max_sequences, stash_capacity]: page ids
    std::int32_t* stashed = nullptr;  // [max_sequences]: how many
    std::int64_t stash_capacity = 0;  // the most pages of a sequence
};

/// The most keys of a head that can hold top-k slots.
template <class P>
KVPOLICY_HOST_DEVICE constexpr std::int64_t slots_of_head(const HeadParams& head_params,
                                                          [[maybe_unused]] std::int64_t shared_slots) {
    if constexpr (P::shares_budget) {
        return head_params.cap < shared_slots ? head_params.cap : shared_slots;
    } else {
        return head_params.budget;
    }
}

/// The most pages of `page_size` entries that the heads of a layer need together for a sequence of `length`
/// tokens, however they divide the `shared_slots`: where they begin as many pages as they can.
template <class P>
constexpr std::int64_t shared_pages_at_most(const HeadParams* params, std::int32_t heads,
                                            std::int64_t shared_slots, std::int32_t page_size,
                                            position_t length) {
    const auto recent_of = [&](std::int32_t head) {
        const std::int64_t recent = std::int64_t{params[head].sinks} + params[head].window;
        return recent < length ? recent : length;
    };
    // Slots that fill the last page of sinks and window, and the first of the next page.
    const auto first_of = [&](std::int32_t head) {
        return (page_size - recent_of(head) % page_size) % page_size + 1;
    };
    const auto limit_of = [&](std::int32_t head) {
        const std::int64_t long_range = length - recent_of(head),
                           most = slots_of_head<P>(params[head], shared_slots);
        return long_range < most ? long_range : most;
    };
    std::int64_t pages = 0, left = shared_slots, more = 0;
    for (std::int32_t head = 0; head < heads; ++head) {
        pages += ((P::has_keep ? length : recent_of(head)) + page_size - 1) / page_size;
    }
    if (P::has_keep) {
        return pages;
    }
    // The heads' first further pages, the cheapest first: at most page_size slots each, as all later ones.
    for (std::int64_t cost = 1; cost <= page_size; ++cost) {
        for (std::int32_t head = 0; head < heads; ++head) {
            if (first_of(head) == cost && cost <= limit_of(head) && cost <= left) {
                left -= cost;
                ++pages;
                more += (limit_of(head) - cost) / page_size;
            }
        }
    }
    return pages + (more < left / page_size ? more : left / page_size);
}

}  // namespace detail

/// One layer of a DualCache. Every (sequence, head) has a page table; its rows are numbered as in a
/// FixedBudgetCache, [sinks | ring | top-k], and row r lies in page r / page_size of the table. Pages are
/// taken as rows come into use.
template <class P, class T>
struct DualRef : LayerRef<P, T>, detail::SharedSlots<P> {
    /// Whether rows come from a pool that may be exhausted.
    static constexpr bool pooled = true;

    PagePool<T> pool;
    std::int32_t* table = nullptr;               // [max_sequences, table_offset[kv_heads]]: page ids
    const std::int64_t* table_offset = nullptr;  // [kv_heads + 1]
    std::int32_t* held = nullptr;                // [max_sequences, kv_heads]: pages that the table names
    position_t* reserved =
        nullptr;         // [max_sequences], of all layers: the length up to which reserve() gave pages
    PlainRows<T> spare;  // [max_sequences, kv_heads, max_draft_tokens]
    std::int32_t max_slabs = 0;
    bool limited = false;  // whether some head's rows are bounded by `longest` only
    position_t max_seq_len = 0;
    std::int64_t max_rows = 0;           // the largest capacity(head): a number that a device's host may read
    std::int64_t max_budgeted_rows = 0;  // the same, of heads with a budget
    // State of calls on a device between launches, as in a FixedBudgetRef; records are of heads with a
    // budget.
    const std::int64_t* tile_offset = nullptr;  // [kv_heads + 1]
    std::uint32_t* arrivals = nullptr;          // [max_sequences, kv_heads]
    std::int32_t* tile_victims = nullptr;       // [max_sequences, tile_offset[kv_heads]]

    KVPOLICY_HOST_DEVICE constexpr std::int32_t* pages(std::int64_t seq, std::int32_t head) const {
        return table + seq * table_offset[this->kv_heads] + table_offset[head];
    }
    KVPOLICY_HOST_DEVICE constexpr PagedRows<T> head_rows(std::int64_t seq, std::int32_t head) const {
        return {pages(seq, head),
                pool.slabs,
                pool.slab_pages,
                pool.page_size,
                this->head_dim_qk,
                this->head_dim_vo,
                this->selection.page_size(),
                pool.strides};
    }
    /// The rows that draft tokens wait in; they are not of the pool.
    KVPOLICY_HOST_DEVICE constexpr PlainRows<T> spare_rows(std::int64_t seq, std::int32_t head) const {
        const std::int64_t first = this->head_index(seq, head) * this->max_draft_tokens;
        return {spare.k(first),           spare.v(first),    spare.position_data + first,
                spare.score_data + first, this->head_dim_qk, this->head_dim_vo};
    }
    /// The most rows that a head can have in use.
    KVPOLICY_HOST_DEVICE constexpr std::int64_t capacity(std::int32_t head) const {
        return capacity_of(this->all_params[head], max_seq_len, slots_of(head));
    }
    /// `top_k_slots`: slots_of_head().
    KVPOLICY_HOST_DEVICE static constexpr std::int64_t capacity_of(const HeadParams& head_params,
                                                                   position_t max_seq_len,
                                                                   std::int64_t top_k_slots) {
        if (P::has_keep || P::grows || top_k_slots == unlimited) {
            return max_seq_len;
        }
        const std::int64_t bound = std::int64_t{head_params.sinks} + head_params.window + top_k_slots;
        return bound < max_seq_len ? bound : max_seq_len;
    }
    /// The most keys of a head that can hold top-k slots.
    KVPOLICY_HOST_DEVICE constexpr std::int64_t slots_of(std::int32_t head) const {
        if constexpr (P::shares_budget) {
            return detail::slots_of_head<P>(this->all_params[head], this->shared_slots);
        } else {
            return detail::slots_of_head<P>(this->all_params[head], 0);
        }
    }
    /// The rows that may expire while a chunk of a policy that is not observed runs: sinks and ring, and the
    /// top-k entries of a head with a budget. Rows beyond are appended, and none of them is replaced.
    KVPOLICY_HOST_DEVICE constexpr std::int64_t expirable_entries(std::int32_t head) const {
        const HeadParams& head_params = this->all_params[head];
        const std::int64_t recent = std::int64_t{head_params.sinks} + head_params.window;
        const std::int64_t top_k_slots = slots_of(head);
        const std::int64_t expirable =
            top_k_slots == unlimited || top_k_slots == 0 || capacity(head) < recent ? recent : capacity(head);
        return expirable < max_seq_len ? expirable : max_seq_len;  // a window may be longer than any sequence
    }
    /// The first row that no call writes again once a token has it; at or beyond the last row where all are
    /// written again. Several sequences may name a full page of such rows (fork). By part:
    ///   - sinks and window: a row of the ring is written again after w tokens;
    ///   - a budget k > 0, beside keep parts or not: the row of an evicted key is written again;
    ///   - a budget of 0: without keep parts there are no top-k rows; kept keys are appended and stay;
    ///   - an unlimited budget: keys are appended and stay, and so do kept keys;
    ///   - an observed policy, of any budget: scores of rows change with a query, and a block of a prompt
    ///     prunes keys that steps appended;
    ///   - an eviction part: evict() closes gaps in place.
    /// A scorer writes scores of the ring alone; a selection's bounds of a page change only with its rows.
    KVPOLICY_HOST_DEVICE constexpr std::int64_t shareable_from(std::int32_t head) const {
        return P::observed || P::has_eviction ? max_seq_len : expirable_entries(head);
    }
    /// Whether another sequence may name a page of a head with `used` rows, too.
    KVPOLICY_HOST_DEVICE constexpr bool is_shareable(std::int32_t head, std::int64_t used,
                                                     std::int64_t page) const {
        const std::int64_t first = page * this->page_size;
        return first >= shareable_from(head) && first + this->page_size <= used;
    }
    KVPOLICY_HOST_DEVICE constexpr std::int64_t page_id(std::int64_t seq, std::int32_t head,
                                                        std::int64_t page) const {
        return pages(seq, head)[page];
    }
    KVPOLICY_HOST_DEVICE constexpr std::int64_t page_count() const {
        return std::int64_t{pool.slab_pages} * max_slabs;
    }

    /// Rows that a head may have in use once its sequence has the length `until`. Each token that the layer
    /// has not taken yet adds at most one: to the ring until it is full, to the global part from then on.
    KVPOLICY_HOST_DEVICE constexpr std::int64_t rows_until(std::int64_t seq, std::int32_t head,
                                                           position_t until) const {
        const position_t ahead = until - this->length[seq] - this->num_appended(seq, head);
        const std::int64_t rows = this->used(seq, head) + (ahead > 0 ? ahead : 0), most = capacity(head);
        return rows < most ? rows : most;
    }
    /// Pages of a head that hold entries, or that the rest of a reservation can need.
    KVPOLICY_HOST_DEVICE constexpr std::int64_t pages_wanted(std::int64_t seq, std::int32_t head) const {
        return (rows_until(seq, head, reserved[seq]) + this->page_size - 1) / this->page_size;
    }

    /// Pages that a head lacks for `rows` rows.
    [[nodiscard]] KVPOLICY_HOST_DEVICE constexpr std::int64_t pages_missing(std::int64_t seq,
                                                                            std::int32_t head,
                                                                            std::int64_t rows) const {
        const std::int64_t pages = (rows + pool.page_size - 1) / pool.page_size;
        const std::int64_t have = held[this->head_index(seq, head)];
        return pages > have ? pages - have : 0;
    }
    /// Takes them; the stash, where there is one, and the pool must have them.
    void take_pages(std::int64_t seq, std::int32_t head, std::int64_t rows) const {
        std::int32_t& have = held[this->head_index(seq, head)];
        for (std::int64_t missing = pages_missing(seq, head, rows); missing > 0; --missing) {
            pages(seq, head)[have++] = take_page(seq);
        }
    }

    /// Returns all pages of a sequence to the pool.
    void return_pages(std::int64_t seq) const {
        for (std::int32_t head = 0; head < this->kv_heads; ++head) {
            std::int32_t& have = held[this->head_index(seq, head)];
            while (have > 0) {
                pool.give(pages(seq, head)[--have]);
            }
        }
        if constexpr (P::shares_budget) {
            while (this->stashed[seq] > 0) {
                pool.give(stash_of(seq)[--this->stashed[seq]]);
            }
        }
    }

    // Where the heads share a budget.

    /// Page ids that wait for any head of a sequence.
    [[nodiscard]] std::int32_t* stash_of(std::int64_t seq) const requires P::shares_budget {
        return this->stash + seq * this->stash_capacity;
    }
    /// Pages that the heads of a sequence lack together for rows_of(head) rows each.
    template <class RowsOf>
    [[nodiscard]] std::int64_t shared_pages_missing(std::int64_t seq,
                                                    const RowsOf& rows_of) const requires P::shares_budget {
        std::int64_t missing = -std::int64_t{this->stashed[seq]};
        for (std::int32_t head = 0; head < this->kv_heads; ++head) {
            missing +=
                (rows_of(head) + pool.page_size - 1) / pool.page_size - held[this->head_index(seq, head)];
        }
        return missing > 0 ? missing : 0;
    }
    /// Pages that a sequence lacks so that it cannot run out of them before it has the length `until`.
    [[nodiscard]] std::int64_t shared_pages_ahead(std::int64_t seq,
                                                  position_t until) const requires P::shares_budget {
        const std::int64_t by_heads =
            shared_pages_missing(seq, [&](std::int32_t head) { return rows_until(seq, head, until); });
        std::int64_t by_slots =
            detail::shared_pages_at_most<P>(this->all_params, this->kv_heads, this->shared_slots,
                                            pool.page_size, until < max_seq_len ? until : max_seq_len) -
            this->stashed[seq];
        for (std::int32_t head = 0; head < this->kv_heads; ++head) {
            by_slots -= held[this->head_index(seq, head)];
        }
        by_slots = by_slots > 0 ? by_slots : 0;
        return by_heads < by_slots ? by_heads : by_slots;
    }
    /// Moves pages from the pool, which must have them, to the stash.
    void stash_pages(std::int64_t seq, std::int64_t count) const requires P::shares_budget {
        for (; count > 0; --count) {
            stash_of(seq)[this->stashed[seq]++] = pool.take();
        }
    }
    /// Moves the pages that a head does not need for `rows` rows to the stash.
    void release_pages(std::int64_t seq, std::int32_t head,
                       std::int64_t rows) const requires P::shares_budget {
        std::int32_t& have = held[this->head_index(seq, head)];
        while (have > (rows + pool.page_size - 1) / pool.page_size) {
            stash_of(seq)[this->stashed[seq]++] = pages(seq, head)[--have];
        }
    }

  private:
    [[nodiscard]] std::int32_t take_page(std::int64_t seq) const {
        if constexpr (P::shares_budget) {
            if (this->stashed[seq] > 0) {
                return stash_of(seq)[--this->stashed[seq]];
            }
        }
        return pool.take();
    }
};

/// Pages for an entry of reserve(), on a device.
struct PageClaim {
    position_t until;    // the length up to which the entry has its pages; 0: it gets none
    std::int64_t pages;  // how many it lacks; then where those that it gets begin in the pool's stack
};

/// The result of evict for one sequence.
struct EvictionReport {
    std::int32_t rounds = 0;   ///< in which every head dropped its lowest rows
    std::int64_t dropped = 0;  ///< rows, over all layers and heads
    std::int64_t rows = 0;     ///< that are held now; 0 for an entry without tokens, which is not looked at
};

/// Options of DualCache::evict.
struct EvictOptions {
    EvictionReport* reports = nullptr;  ///< [count]: the result of each entry, in the context's memory
    std::uint32_t* status = nullptr;    ///< as StepOptions::status
};

/// One object per model. It owns bookkeeping only. The caller provides two kinds of memory: bytes() for
/// tables and states, once, with bind(); and slabs of slab_bytes(), with add_slab(), whenever the pool needs
/// to grow. All layers, sequences and heads share the pool, so heads of different density share memory.
///
///     kvpolicy::DualCache<WGKV, kvpolicy::bf16> cache{shape, {.slab_pages = 4096, .max_slabs = 64,
///         .max_seq_len = 131072}, policy};
///     kvpolicy::Buffer tables{ctx, cache.bytes()};
///     cache.bind(ctx, tables);
///     std::vector<kvpolicy::Buffer> slabs;
///     while (cache.reserve(ctx, batch) > 0) {    // batch: the next tokens
///         slabs.emplace_back(ctx, cache.slab_bytes());
///         cache.add_slab(ctx, slabs.back());
///     }
///     for (layer...) kvpolicy::step(ctx, cache.layer(layer), cache.nhd(q, k, v, out), workspace);
///     cache.advance(ctx);
///
/// A key is promoted to the global part when it leaves the window and its gate is open (Policy: min(gate,
/// budget), keep parts). clear(seq) returns the sequence's pages. One stream or thread at a time per cache
/// object.
template <AnyPolicy P, Storage T>
class DualCache : public CacheOwner<DualCache<P, T>, P, T> {
    using base = CacheOwner<DualCache<P, T>, P, T>;

  public:
    using ref_type = DualRef<P, T>;
    using scorer_type = typename P::scorer_type;

    /// As a FixedBudgetCache, budgets may be unlimited. Refuses also: slabs without pages, no slab, longest
    /// below 1, more than 2^31 - 1 pages or rows of a head, a slab of spared pages, some strides without the
    /// others or shorter than a row, and strides beside a selection.
    DualCache(const CacheShape& shape, const PoolShape& pool, const P& policy = P{},
              const scorer_type* scorers = nullptr, const AttentionParams& attention = {});

    [[nodiscard]] const PoolShape& pool() const { return pool_; }
    /// Bytes that add_pages() needs beside keys and values, for positions, scores and a selection's bounds.
    [[nodiscard]] std::size_t notes_bytes() const { return notes_bytes_; }
    /// Bytes of one slab: slab_pages * page_size * (row of k, row of v, position, score), and alignment.
    [[nodiscard]] std::size_t slab_bytes() const { return slab_bytes_; }

    /// Takes `buffer`, at least bytes().total() long and of any alignment, for the bookkeeping, the scorer
    /// states and the spare rows; empties every sequence and the pool.
    void bind(const host& ctx, void* buffer, std::size_t buffer_bytes);
    void bind(const host& ctx, Buffer& buffer) { bind(ctx, buffer.data(), buffer.size()); }
    /// Attaches slab_bytes() more to the pool. Refs stay valid. The memory is not written, and must outlive
    /// the cache's use; it must not overlap a slab that was attached before.
    void add_slab(const host& ctx, void* buffer, std::size_t buffer_bytes);
    void add_slab(const host& ctx, Buffer& buffer) { add_slab(ctx, buffer.data(), buffer.size()); }
    /// Attaches pages that an engine owns, as one slab: row r of its page p is at k + p * k_page + r *
    /// k_row, and v likewise (PoolShape::strides). `notes`: notes_bytes() of memory for positions and
    /// scores. As a page here is one KV head's, an engine's pool of pages of several heads is a slab for
    /// each of them: of FlashInfer's pages [P, 2, page_size, H, D] (NHD) slab h begins at base + h * D,
    /// with strides 2 * page_size * H * D and H * D, of [P, 2, H, page_size, D] (HND) at base + h *
    /// page_size * D, with row stride D; values page_size * H * D further on. Slabs must not share rows;
    /// that is not checked. Pages that a call takes are written, no others.
    void add_pages(const host& ctx, T* k, T* v, void* notes, std::size_t notes_bytes);
    [[nodiscard]] std::int32_t slabs() const { return static_cast<std::int32_t>(attached_.size()); }
    /// Free pages, and pages that were added (without the spared ones).
    [[nodiscard]] std::int64_t free_pages() const;
    [[nodiscard]] std::int64_t free_pages(const host& /*ctx*/) const { return free_pages(); }
    [[nodiscard]] std::int64_t attached_pages() const {
        std::int64_t pages = 0;
        for (std::int32_t slab = 0; slab < slabs(); ++slab) {
            pages += pool_.slab_pages - spared_of(slab);
        }
        return pages;
    }

    /// Gives the named sequences the pages that batch.tokens(i) further tokens can need at most, in all
    /// layers, so that steps, chunks and calls of accept() of so many tokens cannot fail. Tokens that some
    /// layer has taken before advance() do not count as further ones, in any layer. Returns 0; or the
    /// number of slabs that are missing, and then reserves none. Pages stay with their sequence until it is
    /// cleared; evict() returns only pages that the rest of the reservation cannot need. A copy of the
    /// sequence (fork, reorder, restore) has no reservation. Refuses tokens beyond pool().max_seq_len.
    [[nodiscard]] std::int64_t reserve(const host& ctx, const Batch& batch);

    /// For a policy whose heads share a budget: the most pages that a sequence takes in a layer, however
    /// its heads divide the slots. A pool of max_sequences times the layers' sum is never exhausted, as
    /// reserve() of the longest sequences would make sure. Needs no bind().
    [[nodiscard]] std::int64_t pages_per_sequence(std::int32_t layer) const requires P::shares_budget;

    /// Bytes of workspace that evict needs. Depends on the threads of `on` and on the slabs
    /// that were attached.
    [[nodiscard]] std::size_t evict_workspace_bytes(const host& ctx) const requires P::has_eviction;
    /// For a policy with an eviction part: looks at the named sequences that have tokens in the batch, and
    /// evicts entries of all heads from those over the limit (policies/eviction.hpp says which entries),
    /// until they are below it or no entry may go. Remaining entries keep their order; free pages return to
    /// the pool, except those of a reservation. Call it once per step or chunk, after advance(batch):
    /// refuses a sequence some of whose layers have taken tokens that advance() has not counted.
    /// options.reports [count], where given, gets the results. With options.status such a sequence is left
    /// as it is instead, and sets status_layer_skipped. Synchronous; the bits do not depend on the number
    /// of threads.
    void evict(const host& ctx, const Batch& batch, workspace_view workspace,
               const EvictOptions& options = {}) requires P::has_eviction;

    /// The layer's view, for the calls of caches/calls.hpp. Valid until the next bind.
    [[nodiscard]] ref_type layer(std::int32_t layer) const {
        this->require_layer(layer);
        return ref_of(layer);
    }

    /// Empties one sequence and returns its pages.
    void clear(const host& ctx, std::int32_t seq);

#if defined(__CUDACC__)
    using base::bind;
    using base::clear;
    // The rest of the above on a device: see the comment in CacheOwner. Tables, states and slabs are device
    // memory.

    /// Attaches slab_bytes() of device memory. A graph captured before finds the new pages too. Waits for
    /// the stream; not to be captured.
    template <class Build = cuda_build>
    void add_slab(const cuda& ctx, void* buffer, std::size_t buffer_bytes);
    template <class Build = cuda_build>
    void add_slab(const cuda& ctx, Buffer& buffer) {
        this->template add_slab<Build>(ctx, buffer.data(), buffer.size());
    }
    /// As the host's, of device memory; 16-bit rows begin at multiples of 16 bytes, so strides
    /// are multiples of 8.
    template <class Build = cuda_build>
    void add_pages(const cuda& ctx, T* k, T* v, void* notes, std::size_t notes_bytes);
    /// Waits for the stream.
    template <class Build = cuda_build>
    [[nodiscard]] std::int64_t free_pages(const cuda& ctx) const;
    /// As the host's; `batch`'s arrays are device memory. Entries that the host would refuse (bad sequences
    /// and counts, tokens beyond pool().max_seq_len) get no pages. No two entries may name the same
    /// sequence; this is not checked. Waits for the stream; not to be captured: call it between steps, and
    /// the next ones cannot fail inside a graph.
    template <class Build = cuda_build>
    [[nodiscard]] std::int64_t reserve(const cuda& ctx, const Batch& batch);
    /// Bytes of workspace that evict needs. Depends on the slabs that were attached.
    template <class Build = cuda_build>
    [[nodiscard]] std::size_t evict_workspace_bytes(const cuda& ctx) const requires P::has_eviction;
    /// As the host's, to rounding of the masses; the batch's arrays, options.reports [count] and
    /// options.status [count] are device memory. A sequence in the middle of a token stays as it is, and
    /// sets status_layer_skipped. One launch without a wait, which may be captured; a graph that captured
    /// it knows the workspace of the slabs attached until then, so attach them before: a sequence with more
    /// rows is left alone, and sets status_small_workspace.
    template <class Build = cuda_build>
    void evict(const cuda& ctx, const Batch& batch, workspace_view workspace,
               const EvictOptions& options = {}) requires P::has_eviction;
#endif

  private:
#if defined(__CUDACC__)
    // What CacheOwner asks on a device: caches/cuda/dispatch_owner.cuh says of what.
    template <class Build>
    void check_device_pages() const;
    template <class Build>
    void lay_out_on_device(const cuda& ctx);
    template <class Build, class Moves>
    void move_sequences(const cuda& ctx, const Moves& moves, std::uint32_t* status) const;
    template <class Build>
    struct sequence_copy;
    template <class Build>
    auto sequence_of(const typename base::sequence_counts& counts) const;
    template <class Build>
    auto restored_sequence(const void* blob, std::size_t blob_bytes) const;
    template <class Build>
    void fetch_rows(const cuda& ctx, std::int32_t seq, const sequence_copy<Build>& copy) const;
    template <class Build>
    bool store_rows(const cuda& ctx, std::int32_t seq, const sequence_copy<Build>& copy,
                    const StepOptions& options) const;
    template <class Build>
    void attach(const cuda& ctx, const Slab<T>& slab);
    [[nodiscard]] PoolShape one_sequence_pool(std::int64_t rows) const {
        const std::int64_t heads = std::int64_t{this->shape_.layers} * this->shape_.kv_heads;
        return {static_cast<std::int32_t>(rows / this->shape_.page_size + heads + 1), 1, pool_.max_seq_len};
    }
    /// Calls visit(rows of a head, row, number of the row among all) for the rows of a sequence_copy.
    template <class Copy, class Visit>
    static void for_each_row(const Copy& copy, const Visit& visit) {
        for (std::size_t x = 0; x + 1 < copy.first.size(); ++x) {
            const auto heads = static_cast<std::size_t>(copy.cache.shape().kv_heads);
            const auto rows = copy.cache.layer(static_cast<std::int32_t>(x / heads))
                                  .head_rows(0, static_cast<std::int32_t>(x % heads));
            for (std::int64_t at = copy.first[x]; at < copy.first[x + 1]; ++at) {
                visit(rows, static_cast<std::int32_t>(at - copy.first[x]), at);
            }
        }
    }
#endif
    void plan();
    /// layer() of a cache that may be unbound.
    friend base;
    [[nodiscard]] ref_type ref_of(std::int32_t layer) const;
    /// The largest length of a sequence; unlimited where budgets bound all heads of all layers.
    [[nodiscard]] position_t max_seq_len() const {
        for (const char limited : limited_) {
            if (limited != 0) {
                return pool_.max_seq_len;
            }
        }
        return std::numeric_limits<position_t>::max();
    }
    /// The most entries that a head can hold: at most its tokens, and at most the entries of the pages that
    /// were added.
    [[nodiscard]] std::int64_t max_rows() const;
    /// Bytes of the selection's bounds of so many rows.
    [[nodiscard]] std::size_t bounds_bytes(std::size_t rows) const {
        return P::has_selection ? rows / static_cast<std::size_t>(this->policy_.selection().page_size()) * 2 *
                                      static_cast<std::size_t>(this->shape_.head_dim_qk) * sizeof(T)
                                : 0;
    }
    /// The slots that the heads of a layer share; 0 where they do not.
    [[nodiscard]] std::int64_t shared_slots_of([[maybe_unused]] std::int32_t layer) const {
        if constexpr (P::shares_budget) {
            return this->policy_.shared_slots(layer, this->shape_.kv_heads);
        } else {
            return 0;
        }
    }
    /// Slabs that so many more pages take.
    [[nodiscard]] std::int64_t slabs_of(std::int64_t pages) const {
        const std::int64_t first = pool_.slab_pages - spared_of(slabs()),
                           later = pool_.slab_pages - spared_of(slabs() + 1);
        return pages <= 0 ? 0 : 1 + (pages <= first ? 0 : (pages - first + later - 1) / later);
    }
    /// Pages of a slab that stay the caller's.
    [[nodiscard]] std::int32_t spared_of(std::int32_t slab) const {
        return slab == 0 || strides_given_ ? pool_.spared_pages : 0;
    }
    /// The arrays of a slab in memory that may be added.
    [[nodiscard]] Slab<T> slab_in(void* buffer, std::size_t buffer_bytes) const;
    [[nodiscard]] Slab<T> slab_of(T* k, T* v, void* notes, std::size_t notes_bytes) const;
    void require_free_slab() const;
    /// Positions, scores and bounds of a slab, from `memory` on.
    void place_notes(typename base::layout& layout, std::byte* memory, Slab<T>& slab) const;
    void attach(const Slab<T>& slab);
    /// Whether pages and rows follow one another.
    [[nodiscard]] bool own_layout() const {
        return pool_.strides.k_row == this->shape_.head_dim_qk &&
               pool_.strides.v_row == this->shape_.head_dim_vo &&
               pool_.strides.k_page == std::int64_t{this->shape_.page_size} * this->shape_.head_dim_qk &&
               pool_.strides.v_page == std::int64_t{this->shape_.page_size} * this->shape_.head_dim_vo;
    }
    /// No slab is there, and adding one will not allocate. Not before bind(): the owner's buffer grows with
    /// max_slabs, too.
    void forget_slabs() {
        attached_.clear();
        attached_.reserve(static_cast<std::size_t>(pool_.max_slabs));
    }

    /// Byte offsets of one layer's arrays in the buffer.
    struct layer_plan {
        std::size_t table, held, arrivals, tile_victims, spare_k, spare_v, spare_position, spare_score;
        // Where heads share a budget:
        std::size_t stash, stashed;
        std::int64_t stash_capacity, shared_slots;
        bool is_static;
        typename base::common_plan common;
    };

    PoolShape pool_;
    bool strides_given_ = false;              // also where they are those of rows that follow one another
    std::vector<std::int64_t> table_offset_;  // [layers, kv_heads + 1]
    std::vector<std::int64_t> tile_offset_;   // [layers, kv_heads + 1]
    std::vector<std::int64_t> max_rows_;      // [layers]
    std::vector<std::int64_t> max_budgeted_rows_;  // [layers]: of heads with a budget
    std::vector<Slab<T>> attached_;
    std::vector<layer_plan> plan_;
    std::vector<char> limited_;  // [layers]
    std::size_t slab_bytes_ = 0;
    std::size_t notes_bytes_ = 0;
    std::size_t offsets_at_ = 0;
    std::size_t tiles_at_ = 0;
    std::size_t answer_at_ = 0;  // [1]: the result of a call on a device
    std::size_t claims_at_ = 0;  // [max_sequences]: of reserve() on a device
    std::size_t slabs_at_ = 0;
    std::size_t free_at_ = 0;
    std::size_t count_at_ = 0;
    std::size_t names_at_ = 0;
    std::size_t reserved_at_ = 0;
};

}  // namespace kvpolicy

#include <kvpolicy/caches/host/evict.hpp>
#include <kvpolicy/caches/host/host_dual.hpp>
