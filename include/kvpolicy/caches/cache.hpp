// What the owners of all kinds of caches share: they hold bookkeeping on the host, and look at one layer's
// ref at a time.
#pragma once

#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/owned_pointer.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/policies/compose.hpp>
#if defined(__CUDACC__)
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/cuda/config.cuh>
#endif

#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace kvpolicy {

/// Sizes in bytes of the parts of a cache.
struct CacheBytes {
    std::size_t keys_and_values = 0;  ///< rows * (head_dim_qk + head_dim_vo) * sizeof(T)
    std::size_t scorer_state = 0;
    std::size_t bookkeeping = 0;  ///< positions, scores, lengths, rules, page tables, alignment
    constexpr std::size_t total() const { return keys_and_values + scorer_state + bookkeeping; }
};

/// How full one head of one sequence is: with the rows of tokens that its layer has taken, whether advance()
/// has counted them or not.
struct HeadUsage {
    position_t length = 0;        ///< tokens seen: the next token's position, not the count of rows
    std::int32_t sinks = 0;       ///< rows in use
    std::int32_t window = 0;      ///< rows in use
    std::int32_t long_range = 0;  ///< rows in use
    std::int32_t capacity = 0;    ///< the most rows of the head: s + w + k, or what its page table can name
    constexpr std::int32_t size() const { return sinks + window + long_range; }
};

/// The members that FixedBudgetCache and DualCache have in common. `Derived` has layer(layer).
template <class Derived, AnyPolicy P, Storage T>
class CacheOwner {
  public:
    using scorer_type = typename P::scorer_type;

    [[nodiscard]] const CacheShape& shape() const { return shape_; }
    [[nodiscard]] const P& policy() const { return policy_; }
    /// Memory that bind() takes from the caller.
    [[nodiscard]] const CacheBytes& bytes() const { return bytes_; }

    /// Moves the named sequences on by their tokens: once a step or chunk, after the last layer. Refuses sequences
    /// out of range or named twice, tokens that a layer has not taken (its call was not made, or found no
    /// page) or has taken more of.
    void advance(const host& on, const Batch& batch);

    /// Tokens seen by a sequence; the position of its next token.
    [[nodiscard]] position_t length(std::int32_t seq) const;
    [[nodiscard]] HeadUsage usage(std::int32_t layer, std::int32_t seq, std::int32_t head) const;
    /// The positions held by one head, in the order of its rows. `out` has room for usage(...).size();
    /// returns that. Host memory alone: on a device export_heads() says what a head's rows are.
    std::int32_t retained(std::int32_t layer, std::int32_t seq, std::int32_t head, position_t* out) const;
#if defined(__CUDACC__)
    /// The same of a cache in device memory (kvpolicy/cuda.cuh has the bodies): a copy or two, for which they
    /// wait; not to be captured. A call that must not wait reads layer(layer).length [max_sequences] and .num_long_range [max_sequences,
    /// kv_heads].
    template <class Build = cuda_build>
    [[nodiscard]] position_t length(const cuda& on, std::int32_t seq) const;
    template <class Build = cuda_build>
    [[nodiscard]] HeadUsage usage(const cuda& on, std::int32_t layer, std::int32_t seq,
                                  std::int32_t head) const;
#endif

    /// Makes sequence `to` a copy of sequence `from`, in all layers: a beam that goes on in two ways. A DualCache
    /// shares the pages that never change again (full ones of the global part, in heads without a budget),
    /// and copies the others. What sequence `to` held is dropped, draft tokens are not copied. Tokens that some
    /// layers have taken before advance() are copied as well: both sequences then go on with the other layers.
    /// Exhaustion is as for step: refused, or status_pool_exhausted in *status, and nothing has changed.
    void fork(const host& on, std::int32_t from, std::int32_t to, std::uint32_t* status = nullptr);

    /// Sequence i becomes what sequence sources[i] was, for all i < count at once; several may have the same source
    /// (beam search). A sequence that is no target's source is dropped; sequences from `count` on may be sources and
    /// do not change. Forgets draft tokens; tokens that layers have taken before advance() go along, as in fork.
    /// Exhaustion as for fork.
    void reorder(const host& on, const std::int32_t* sources, std::int32_t count,
                 std::uint32_t* status = nullptr);

    /// Bytes of the snapshot of a sequence as it is now. Refuses, as snapshot does, a sequence in the middle of a
    /// token: one that layers have taken before advance().
    [[nodiscard]] std::size_t snapshot_bytes(std::int32_t seq) const;
    [[nodiscard]] std::size_t snapshot_bytes(const host& /*on*/, std::int32_t seq) const {
        return snapshot_bytes(seq);
    }
    /// Writes a sequence to `buffer`: rows, positions, scores, scorer states, of all layers. The blob says which
    /// policy, shape and version it is of, and carries a checksum. Scorer weights are not in it. Returns
    /// snapshot_bytes(seq).
    std::size_t snapshot(const host& on, std::int32_t seq, void* buffer, std::size_t buffer_bytes) const;
    /// Makes sequence `seq` what the blob holds; on a cache of any kind, page size and number of sequences. Refuses,
    /// before anything is written: what is no snapshot, another version, another policy, shape or storage
    /// type, damage, a sequence longer than the cache takes. Exhaustion as for fork.
    void restore(const host& on, std::int32_t seq, const void* blob, std::size_t blob_bytes,
                 std::uint32_t* status = nullptr);
    /// What tells this cache's policy and shape from others in a snapshot: the numbers of all heads, what
    /// gates and keep parts answer, the scorer's timing and state (and its fingerprint(), where it has one).
    [[nodiscard]] std::uint64_t fingerprint() const;

    /// Lowers the limit at which static priorities are rebased (tests; default 2^29, the largest). Same
    /// schedule as a mask's. Counts from the next layer() on; set it before the first token.
    void rebase_limit(position_t limit) {
        detail::require(limit >= 1 && limit <= kvpolicy::rebase_limit, "rebase_limit", limit, "1 to 2^29");
        rebase_limit_ = limit;
    }

    /// One owner a buffer: a cache may be moved, not copied. One that was moved from is unbound, and stays
    /// so.
    CacheOwner(const CacheOwner&) = delete;
    CacheOwner& operator=(const CacheOwner&) = delete;
    CacheOwner(CacheOwner&&) noexcept = default;
    CacheOwner& operator=(CacheOwner&&) noexcept = default;

  protected:
    ~CacheOwner() = default;
    CacheOwner(const CacheShape& shape, const P& policy, const scorer_type* scorers,
               const AttentionParams& attention);

    [[nodiscard]] const Derived& self() const { return static_cast<const Derived&>(*this); }
    [[nodiscard]] scorer_type scorer_of(std::int32_t layer) const {
        return scorers_ != nullptr ? scorers_[layer] : policy_.scorer();
    }
    [[nodiscard]] const HeadParams& head_params_of(std::int32_t layer, std::int32_t head) const {
        return all_params_[static_cast<std::size_t>(layer) * static_cast<std::size_t>(shape_.kv_heads) +
                           static_cast<std::size_t>(head)];
    }
    void require_bound() const;
    void require_memory(bool on_device) const;
    void require_seq(std::int32_t seq, const char* name = "seq") const;
    void require_seq_number(std::int32_t seq, const char* name) const;
    void require_layer(std::int32_t layer) const;
    /// Of a head of a sequence of `length` tokens, and `pending` that its layer has taken since, that keeps
    /// `kept` rows in top-k sequences.
    [[nodiscard]] HeadUsage usage_of(std::int32_t layer, std::int32_t head, position_t length,
                                     std::int32_t num_appended, std::int32_t num_long_range) const;
    void check_layer(std::int32_t layer) const;
    /// Refuses a sequence some of whose layers have taken tokens that advance() has not counted: it is no state
    /// that a sequence can be in.
    template <class Name>
    void require_between_tokens(std::int32_t seq, const Name& name) const;
    void require_head(std::int32_t head) const;
    template <class PagesNeeded>
    bool drop(const std::int32_t* seq_ids, std::int32_t count, PagesNeeded&& needed,
              std::uint32_t* status) const;

    /// Byte offsets of the arrays of one layer that both kinds have.
    struct common_plan {
        std::size_t num_long_range, num_protected, victim, num_draft, state, queries, spare_queries;
    };
    /// Hands out parts of the buffer: an offset for so many bytes. Refuses what no address space holds.
    struct layout {
        const char* name = "bytes of the cache";
        std::size_t at = 0;
        std::size_t take(std::size_t bytes);
    };
    void plan_common(layout& memory);
    common_plan plan_layer(layout& memory, std::int32_t layer);
    void fill(LayerRef<P, T>& ref, std::int32_t layer, const common_plan& plan) const;
    void bind_common(void* buffer, std::size_t buffer_bytes);
    /// Counters and scorer states of one sequence of one layer, as before the first token.
    static void reset(const LayerRef<P, T>& ref, std::int32_t seq);
    template <class V>
    [[nodiscard]] V* at(std::size_t offset) const {
        return reinterpret_cast<V*>(memory_ + offset);
    }

    /// That of a cache of one of these sequences.
    [[nodiscard]] CacheShape one_sequence_shape() const {
        CacheShape shape = shape_;
        shape.max_sequences = 1;
        return shape;
    }

    CacheShape shape_;
    P policy_;
    const scorer_type* scorers_;
    AttentionParams attention_;
    position_t rebase_limit_ = kvpolicy::rebase_limit;
    std::int32_t device_ = -1;              // the GPU whose memory_ it is; -1: the host's
    std::vector<HeadParams> all_params_;    // [layers, kv_heads]
    std::vector<std::int32_t> read_pages_;  // [layers, kv_heads], with a selection
    std::size_t all_params_at_ = 0;
    std::size_t read_pages_at_ = 0;
    std::size_t length_at_ = 0;
    std::size_t appended_at_ = 0;  // [layers, max_sequences, kv_heads]
    CacheBytes bytes_;
    detail::owned_pointer<std::byte> memory_;
    std::vector<std::int32_t>
        scratch_;  // [3, max_sequences] once bound: what reorder needs, so that it does not allocate
};

}  // namespace kvpolicy

#include <kvpolicy/caches/host/host_cache.hpp>
