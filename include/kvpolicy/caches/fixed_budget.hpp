// FixedBudgetCache: s + w + k rows for each (sequence, KV head), the window a ring, the worst top-k entry
// replaced in place. Keys are stored as given (normally after RoPE, at their own positions), so the physical
// order has no meaning.
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

/// One object per model. It owns bookkeeping only: bytes() says how much memory the keys, values, positions,
/// scores and scorer states need; the caller provides it with bind(). The calls of caches/calls.hpp take
/// layer(layer).
///
///     kvpolicy::FixedBudgetCache<KVpop, kvpolicy::bf16> cache{shape, policy, scorers};
///     kvpolicy::Buffer memory{ctx, cache.bytes()}, workspace{ctx, cache.workspace_bytes(ctx, {.batch = 1,
///         .tokens = 1})};
///     cache.bind(ctx, memory);
///     for (layer...) kvpolicy::step(ctx, cache.layer(layer), cache.nhd(q, k, v, out), workspace);
///     cache.advance(ctx);                          // once per step, after the last layer
///
/// A sequence joins by clear(seq) (or a fresh bind) and a prefill or step that names its sequence; it leaves
/// when batches stop naming it. One stream or thread at a time per cache object.
template <AnyPolicy P, Storage T>
class FixedBudgetCache : public CacheOwner<FixedBudgetCache<P, T>, P, T> {
    static_assert(
        !P::has_gate || P::has_budget,
        "kvpolicy: a FixedBudgetCache needs a TopKBudget beside a gate, since an open gate alone bounds "
        "nothing");
    static_assert(!P::has_keep,
                  "kvpolicy: a FixedBudgetCache cannot hold a policy that keeps keys by position, since "
                  "nothing bounds them");
    static_assert(!P::has_eviction,
                  "kvpolicy: a FixedBudgetCache has a budget for every head; an eviction part, which counts "
                  "all heads together, "
                  "needs a DualCache");
    static_assert(!P::grows,
                  "kvpolicy: a FixedBudgetCache cannot hold a policy that keeps what is decoded (SnapKV), "
                  "since nothing "
                  "bounds it; a DualCache can");
    static_assert(!P::shares_budget,
                  "kvpolicy: a FixedBudgetCache gives each head entries of its own; the heads of this policy "
                  "share a budget, which a DualCache holds");
    using base = CacheOwner<FixedBudgetCache<P, T>, P, T>;

  public:
    using ref_type = FixedBudgetRef<P, T>;
    using scorer_type = typename P::scorer_type;

    /// `scorers` are one value per layer, or null: then the policy's own scorer serves every layer. Both, and
    /// the weights that they view, stay with the caller. Refuses: counts below 1, query heads that kv_heads
    /// does not divide, a head_dim that attention does not support, numbers that no policy can have, an
    /// unlimited budget, a scorer that does not fit the shape. bytes().keys_and_values is exact: rows(layer)
    /// summed over layers, times the row sizes and sequences.
    explicit FixedBudgetCache(const CacheShape& shape, const P& policy = P{},
                              const scorer_type* scorers = nullptr, const AttentionParams& attention = {});

    /// Rows of one sequence in one layer, over all heads (with spare rows and page rounding). Needs no
    /// bind().
    [[nodiscard]] std::int64_t rows(std::int32_t layer) const {
        this->check_layer(layer);
        return row_offset_[this->offset_index(layer, this->shape_.kv_heads)];
    }

    /// Takes `buffer`, at least bytes().total() long, and empties every sequence. Any alignment will do:
    /// bytes() includes the bytes to align it. The bookkeeping and the scorer states are written, keys and
    /// values are not. The buffer stays the caller's and must outlive the cache's use.
    void bind(const host& ctx, void* buffer, std::size_t buffer_bytes);
    void bind(const host& ctx, Buffer& buffer) { bind(ctx, buffer.data(), buffer.size()); }

    /// The layer's view, for the calls of caches/calls.hpp. Valid until the next bind.
    [[nodiscard]] ref_type layer(std::int32_t layer) const {
        this->require_layer(layer);
        return ref_of(layer);
    }

    /// Empties one sequence: its next token has position 0. O(heads) and O(scorer state).
    void clear(const host& ctx, std::int32_t seq);

#if defined(__CUDACC__)
    using base::bind;
    using base::clear;
#endif

  private:
#if defined(__CUDACC__)
    // What CacheOwner asks on a device: caches/cuda/dispatch_owner.cuh says of what.
    template <class Build>
    void check_device_pages() const;
    template <class Build>
    void lay_out_on_device(const cuda& ctx);
    [[nodiscard]] static constexpr position_t max_seq_len() { return std::numeric_limits<position_t>::max(); }
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
    template <class Build, class Copy>
    void for_each_slice(const FixedBudgetCache& other, std::int32_t seq, const Copy& copy) const;
#endif
    void plan();
    /// layer() of a cache that may be unbound.
    friend base;
    [[nodiscard]] ref_type ref_of(std::int32_t layer) const;

    /// Byte offsets of one layer's arrays in the buffer.
    struct layer_plan {
        std::size_t k, v, position, score, bounds, arrivals, tile_victims;
        std::size_t slab, table, held, free_count, table_offset, tile_offset;  // with a selection
        typename base::common_plan common;
    };

    std::vector<std::int64_t> row_offset_;  // [layers, kv_heads + 1]
    std::vector<layer_plan> plan_;
    std::size_t offsets_at_ = 0;
};

}  // namespace kvpolicy

#include <kvpolicy/caches/host/host_fixed_budget.hpp>
