// FixedBudgetCache: s + w + k rows for each (sequence, KV head), the window a ring, the worst long-range row replaced in
// place. Keys are stored as given (normally after RoPE, at their own positions), so the physical order means nothing.
#pragma once

#include <kvpolicy/caches/ref.hpp>
#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/policies/compose.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace kvpolicy {

/// Sizes in bytes of the parts of a cache.
struct CacheBytes {
    std::size_t keys_and_values = 0;  ///< layers * slots * rows * (dim_k + dim_v) * sizeof(T)
    std::size_t scorer_state = 0;
    std::size_t bookkeeping = 0;  ///< positions, scores, lengths, rules, alignment
    constexpr std::size_t total() const { return keys_and_values + scorer_state + bookkeeping; }
};

/// How full one head of one sequence is.
struct Occupancy {
    position_t length = 0;        ///< tokens seen: the next token's position, not the count of rows
    std::int32_t sinks = 0;       ///< rows in use
    std::int32_t window = 0;      ///< rows in use
    std::int32_t long_range = 0;  ///< rows in use
    std::int32_t capacity = 0;    ///< rows of the head, s + w + k
    constexpr std::int32_t rows() const { return sinks + window + long_range; }
};

/// One object a model. It owns bookkeeping only: bytes() says how much memory the keys, values, positions, scores and
/// scorer states need; the caller lends it with bind(). ref(layer) is what calls take.
///
///     kvpolicy::FixedBudgetCache<KVpop, kvpolicy::bf16> cache{shape, policy, scorers};
///     cache.bind(on, buffer, cache.bytes().total());
///     for (layer...) kvpolicy::step(on, cache.ref(layer), batch, q, k, v, out, workspace);
///     cache.advance(on, batch);                    // once a step, after the last layer
///
/// A sequence joins by clear(slot) (or a fresh bind) and a prefill or step that names its slot; it leaves by not being
/// named any more. One stream or thread at a time per cache object.
template <AnyPolicy P, Storage T>
class FixedBudgetCache {
    static_assert(
        !P::has_gate || P::has_budget,
        "kvpolicy: a FixedBudgetCache needs a TopKBudget beside a gate, since an open gate alone bounds "
        "nothing");
    static_assert(!P::has_keep,
                  "kvpolicy: a FixedBudgetCache cannot hold a policy that keeps keys by position, since "
                  "nothing bounds them");

  public:
    using ref_type = FixedBudgetRef<P, T>;
    using scorer_type = typename P::scorer_type;

    /// `scorers` are one value per layer, or null: then the policy's own scorer serves every layer. Both, and the weights
    /// that they view, stay with the caller. Refuses: counts below 1, query heads that kv_heads does not divide, a
    /// head_dim that attention does not support, numbers that no policy can have, an unlimited budget, a scorer that does not
    /// fit the shape.
    explicit FixedBudgetCache(const CacheShape& shape, const P& policy = P{},
                              const scorer_type* scorers = nullptr, const Attention& attention = {});

    /// Memory needed from the caller. keys_and_values is exact: rows(layer) summed over layers, times the row sizes.
    [[nodiscard]] const CacheBytes& bytes() const { return bytes_; }
    /// Rows of one sequence in one layer, over all heads (with page rounding).
    [[nodiscard]] std::int64_t rows(std::int32_t layer) const {
        return row_offset_[offset_index(layer, shape_.kv_heads)];
    }
    [[nodiscard]] const CacheShape& shape() const { return shape_; }
    [[nodiscard]] const P& policy() const { return policy_; }

    /// Takes `buffer`, at least bytes().total() long and aligned to 64 bytes, and empties every slot. Only the
    /// bookkeeping is written. The buffer stays the caller's and must outlive the cache's use.
    void bind(const host& on, void* buffer, std::size_t buffer_bytes);

    /// The layer's view, for step, prefill and attend. Valid until the next bind.
    [[nodiscard]] ref_type ref(std::int32_t layer) const;

    /// Empties one slot: its next token has position 0. O(heads) and O(scorer state).
    void clear(const host& on, std::int32_t slot);

    /// Moves the named slots on by their tokens: once a step or chunk, after the last layer. Refuses slots out of range or
    /// named twice, and negative counts.
    void advance(const host& on, const Batch& batch);

    /// Tokens seen by a slot; the position of its next token.
    [[nodiscard]] position_t length(std::int32_t slot) const;
    [[nodiscard]] Occupancy occupancy(std::int32_t layer, std::int32_t slot, std::int32_t head) const;
    /// The positions held by one head, in the order of its rows. `out` has room for occupancy(...).rows(); returns that.
    std::int32_t retained(std::int32_t layer, std::int32_t slot, std::int32_t head, position_t* out) const;

    /// Lowers the limit at which static priorities are rebased (tests; default 2^29, the largest). Same schedule as a
    /// mask's. Counts from the next ref() on; set it before the first token.
    void rebase_limit(position_t limit) {
        detail::require(limit >= 1 && limit <= kvpolicy::rebase_limit, "rebase_limit", limit, "1 to 2^29");
        rebase_limit_ = limit;
    }

  private:
    [[nodiscard]] std::size_t offset_index(std::int32_t layer, std::int32_t head) const {
        return static_cast<std::size_t>(layer) * static_cast<std::size_t>(shape_.kv_heads + 1) +
               static_cast<std::size_t>(head);
    }
    void require_bound() const;
    void require_slot(std::int32_t slot) const;
    void plan();

    /// Byte offsets of one layer's arrays in the buffer.
    struct layer_plan {
        std::size_t k, v, position, score, kept, victim, state;
    };

    CacheShape shape_;
    P policy_;
    const scorer_type* scorers_;
    Attention attention_;
    position_t rebase_limit_ = kvpolicy::rebase_limit;
    std::vector<HeadRule> rules_;           // [layers, kv_heads]
    std::vector<std::int64_t> row_offset_;  // [layers, kv_heads + 1]
    std::vector<layer_plan> plan_;
    std::size_t rules_at_ = 0;
    std::size_t offsets_at_ = 0;
    std::size_t length_at_ = 0;
    CacheBytes bytes_;
    std::byte* memory_ = nullptr;
};

/// What a call on a cache may take or give beside its tensors.
struct CacheExtras {
    /// Scores of the new tokens [count, Hkv, n], for a policy whose scores are given (GivenScores).
    plane_view<const float> scores{};
    /// Where to write the log-sum-exp of every query [count, Hq, n] (natural log), if wanted.
    plane_view<float> lse{};
};

/// Bytes of workspace for step and prefill with at most `count` entries of at most `tokens` tokens.
template <class P, Storage T>
std::size_t cache_workspace_bytes(const host& on, const FixedBudgetRef<P, T>& cache, std::int32_t count,
                                  std::int32_t tokens);

/// One decode step of one layer, for the batch's sequences (0 or 1 token each). q [count, Hq, 1, Dk], k and v
/// [count, Hkv, 1, D], out [count, Hq, 1, Dv]: overwritten for entries with a token, untouched for others. For each KV
/// head, at position q = the slot's length (design, section 2):
///   1. (k_q, v_q) is appended, 2. a stateful scorer absorbs [k_q; v_q], 3. the key u = q - w, if u >= s, leaves the window
///   and competes for the long-range places, 4. the query heads attend to sinks, window (q - w + 1 .. q) and long-range keys.
/// A key that loses at 3 is invisible to q already. Synchronous, no allocation. Refuses before anything is written: shapes
/// that disagree, more than one token, slots out of range or named twice, a NaN score (given or computed), too little
/// workspace. `status` is for devices; the host throws.
template <class P, Storage T>
void step(const host& on, const FixedBudgetRef<P, T>& cache, const Batch& batch, rows_view<const T> q,
          rows_view<const T> k, rows_view<const T> v, rows_view<T> out, workspace_view workspace,
          std::uint32_t* status = nullptr, const CacheExtras& extras = {});

/// A chunk of n tokens a sequence, at positions length .. length + n - 1: what n steps would do, at the cost of one pass.
/// q [count, Hq, n, Dk], k and v [count, Hkv, n, D], out [count, Hq, n, Dv]. Retained sets, rows and scores are identical to
/// stepping (given the same scores; the mLSTM runs recurrently, so its scores are the same bits too); outputs agree to
/// rounding. The chunk attends to two segments: the rows of the cache, and itself. Errors as for step.
template <class P, Storage T>
void prefill(const host& on, const FixedBudgetRef<P, T>& cache, const Batch& batch, rows_view<const T> q,
             rows_view<const T> k, rows_view<const T> v, rows_view<T> out, workspace_view workspace,
             std::uint32_t* status = nullptr, const CacheExtras& extras = {});

/// Attention of q [count, Hq, 1, Dk] over the rows that the named slots hold now; changes nothing. Entries with q_len 0 are
/// untouched; a slot without rows gives 0 and LSE = -inf.
template <class P, Storage T>
void attend(const host& on, const FixedBudgetRef<P, T>& cache, const Batch& batch, rows_view<const T> q,
            rows_view<T> out, plane_view<float> lse, workspace_view workspace);

/// A cache as "heads as sequences", for a paged attention kernel to read without a copy: pages of page_rows rows of one
/// head, the whole buffer of the layer one pool. Entry i of the batch, head h is sequence i * Hkv + h with one KV head.
/// indptr [count * Hkv + 1], indices [indptr's last], last_page_rows [count * Hkv] (0 for an empty head); page p starts
/// at k + p * page_rows * dim_k. Rows in use come first, so only the last page is partial.
struct HeadPages {
    std::int32_t* indptr = nullptr;
    std::int32_t* indices = nullptr;
    std::int32_t* last_page_rows = nullptr;
    std::int64_t indices_capacity = 0;
};

/// Fills `pages`; refuses a capacity below the pages in use, naming both.
template <class P, Storage T>
void export_heads(const host& on, const FixedBudgetRef<P, T>& cache, const Batch& batch,
                  const HeadPages& pages);

}  // namespace kvpolicy

#include <kvpolicy/host/fixed_budget.hpp>
#include <kvpolicy/host/fixed_budget_step.hpp>
