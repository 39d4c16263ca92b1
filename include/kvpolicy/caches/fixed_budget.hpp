// FixedBudgetCache: s + w + k rows for each (sequence, KV head), the window a ring, the worst long-range row replaced in
// place. Keys are stored as given (normally after RoPE, at their own positions), so the physical order means nothing.
#pragma once

#include <kvpolicy/caches/calls.hpp>
#include <kvpolicy/caches/owner.hpp>
#include <kvpolicy/caches/ref.hpp>
#include <kvpolicy/core/host_buffer.hpp>

#include <cstddef>
#include <cstdint>
#include <vector>

namespace kvpolicy {

/// One object a model. It owns bookkeeping only: bytes() says how much memory the keys, values, positions, scores and
/// scorer states need; the caller lends it with bind(). ref(layer) is what calls take (caches/calls.hpp).
///
///     kvpolicy::FixedBudgetCache<KVpop, kvpolicy::bf16> cache{shape, policy, scorers};
///     cache.bind(on, buffer, cache.bytes().total());
///     for (layer...) kvpolicy::step(on, cache.ref(layer), batch, q, k, v, out, workspace);
///     cache.advance(on, batch);                    // once a step, after the last layer
///
/// A sequence joins by clear(slot) (or a fresh bind) and a prefill or step that names its slot; it leaves by not being
/// named any more. One stream or thread at a time per cache object.
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
    using base = CacheOwner<FixedBudgetCache<P, T>, P, T>;

  public:
    using ref_type = FixedBudgetRef<P, T>;
    using scorer_type = typename P::scorer_type;

    /// `scorers` are one value per layer, or null: then the policy's own scorer serves every layer. Both, and the weights
    /// that they view, stay with the caller. Refuses: counts below 1, query heads that kv_heads does not divide, a
    /// head_dim that attention does not support, numbers that no policy can have, an unlimited budget, a scorer that does not
    /// fit the shape. bytes().keys_and_values is exact: rows(layer) summed over layers, times the row sizes and slots.
    explicit FixedBudgetCache(const CacheShape& shape, const P& policy = P{},
                              const scorer_type* scorers = nullptr, const Attention& attention = {});

    /// Rows of one sequence in one layer, over all heads (with spare rows and page rounding). Needs no bind().
    [[nodiscard]] std::int64_t rows(std::int32_t layer) const {
        this->check_layer(layer);
        return row_offset_[offset_index(layer, this->shape_.kv_heads)];
    }

    /// Takes `buffer`, at least bytes().total() long, and empties every slot. Any alignment will do: bytes() includes the
    /// room to align it. The bookkeeping and the scorer states are written, keys and values are not. The buffer stays the
    /// caller's and must outlive the cache's use.
    void bind(const host& on, void* buffer, std::size_t buffer_bytes);
    void bind(const host& on, HostBuffer& buffer) { bind(on, buffer.data(), buffer.size()); }

    /// The layer's view, for the calls of caches/calls.hpp. Valid until the next bind.
    [[nodiscard]] ref_type ref(std::int32_t layer) const;

    /// Empties one slot: its next token has position 0. O(heads) and O(scorer state).
    void clear(const host& on, std::int32_t slot);

  private:
    [[nodiscard]] std::size_t offset_index(std::int32_t layer, std::int32_t head) const {
        return static_cast<std::size_t>(layer) * static_cast<std::size_t>(this->shape_.kv_heads + 1) +
               static_cast<std::size_t>(head);
    }
    void plan();

    /// Byte offsets of one layer's arrays in the buffer.
    struct layer_plan {
        std::size_t k, v, position, score, bounds, arrivals, tile_victims;
        typename base::common_plan common;
    };

    std::vector<std::int64_t> row_offset_;  // [layers, kv_heads + 1]
    std::vector<layer_plan> plan_;
    std::size_t offsets_at_ = 0;
};

}  // namespace kvpolicy

#include <kvpolicy/host/fixed_budget.hpp>
