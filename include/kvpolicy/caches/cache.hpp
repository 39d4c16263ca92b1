// The common part of the cache owners. An owner keeps its bookkeeping on the host and gives out one ref per
// layer.
#pragma once

#include <kvpolicy/caches/calls.hpp>
#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/caches/step_io.hpp>
#include <kvpolicy/core/buffer.hpp>
#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/owned_pointer.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/policies/compose.hpp>
#if defined(__CUDACC__)
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <string>
#include <type_traits>
#include <vector>

namespace kvpolicy {

/// Sizes in bytes of the parts of a cache.
struct CacheBytes {
    std::size_t keys_and_values = 0;  ///< rows * (head_dim_qk + head_dim_vo) * sizeof(T)
    std::size_t scorer_state = 0;
    std::size_t bookkeeping = 0;  ///< positions, scores, lengths, rules, page tables, alignment
    constexpr std::size_t total() const { return keys_and_values + scorer_state + bookkeeping; }
    constexpr operator std::size_t() const { return total(); }
};

/// How full one head of one sequence is: with the rows of tokens that its layer has taken, whether advance()
/// has counted them or not.
struct HeadUsage {
    position_t length = 0;        ///< tokens seen: the next token's position, not the count of rows
    std::int32_t sinks = 0;       ///< rows in use
    std::int32_t window = 0;      ///< rows in use
    std::int32_t long_range = 0;  ///< rows in use
    std::int32_t capacity = 0;  ///< the most entries of the head: s + w + k, or the entries of its page table
    constexpr std::int32_t size() const { return sinks + window + long_range; }
};

namespace detail {

// Functions, since a class's own workspace_bytes hides the calls of this name.
template <class Dims, class Context, class Ref>
std::size_t workspace_of(const Context& ctx, const Ref& cache, const CallSize& size) {
    return workspace_bytes<Dims>(ctx, cache, size);
}
template <class Dims, class Context, class Ref>
std::size_t step_workspace_of(const Context& ctx, const Ref& cache, std::int32_t batch) {
    return step_workspace_bytes<Dims>(ctx, cache, batch);
}
template <class Dims, class Context, class Ref>
std::size_t append_workspace_of(const Context& ctx, const Ref& cache, const CallSize& size) {
    return append_workspace_bytes<Dims>(ctx, cache, size);
}
template <class Ref>
void measure_on(const host& /*ctx*/, Ref& /*cache*/) {}

}  // namespace detail

/// The members that FixedBudgetCache and DualCache have in common. `Derived` has layer(layer).
template <class Derived, AnyPolicy P, Storage T>
class CacheOwner {
  public:
    using scorer_type = typename P::scorer_type;

    [[nodiscard]] const CacheShape& shape() const { return shape_; }
    [[nodiscard]] const P& policy() const { return policy_; }
    /// Memory that bind() takes from the caller.
    [[nodiscard]] const CacheBytes& bytes() const { return bytes_; }

    /// Bytes of workspace for the calls of caches/calls.hpp on any of the layers, in the context's
    /// memory: for at most size.batch entries of at most size.tokens tokens each. Needs no bind().
    /// Refuses sizes below 0.
    template <class Dims = all_head_dims, class Context>
    [[nodiscard]] std::size_t workspace_bytes(const Context& ctx, const CallSize& size) const {
        return max_of_layers(ctx,
                             [&](const auto& cache) { return detail::workspace_of<Dims>(ctx, cache, size); });
    }
    /// The same for step and attend alone, of at most `batch` entries: on CUDA much less, and a program that
    /// only decodes then compiles no kernel of prefill.
    template <class Dims = all_head_dims, class Context>
    [[nodiscard]] std::size_t step_workspace_bytes(const Context& ctx, std::int32_t batch) const {
        return max_of_layers(
            ctx, [&](const auto& cache) { return detail::step_workspace_of<Dims>(ctx, cache, batch); });
    }

    /// The same for append, and where size.tokens is above 1 for append_chunk and chunk_expiry: calls without
    /// attention.
    template <class Dims = all_head_dims, class Context>
    [[nodiscard]] std::size_t append_workspace_bytes(const Context& ctx, const CallSize& size) const {
        return max_of_layers(
            ctx, [&](const auto& cache) { return detail::append_workspace_of<Dims>(ctx, cache, size); });
    }

    /// The tensors of step and prefill: contiguous [batch, tokens, heads, head_dim], as projections write
    /// them. Set other members before a call: io.scores, io.lse, io.batch. For attend k and v may be null.
    [[nodiscard]] StepIO<T> nhd(const T* q, const T* k, const T* v, T* out, const CallSize& size = {}) const {
        checks::check_call_size(size);
        const auto rows = [&](auto* data, std::int32_t heads, std::int32_t dim) {
            return view_bshd(data, size.batch, size.tokens, heads, dim);
        };
        return {.q = rows(q, shape_.query_heads, shape_.head_dim_qk),
                .k = rows(k, shape_.kv_heads, shape_.head_dim_qk),
                .v = rows(v, shape_.kv_heads, shape_.head_dim_vo),
                .out = rows(out, shape_.query_heads, shape_.head_dim_vo)};
    }
    /// The same of contiguous tensors [batch, heads, tokens, head_dim].
    [[nodiscard]] StepIO<T> hnd(const T* q, const T* k, const T* v, T* out, const CallSize& size = {}) const {
        checks::check_call_size(size);
        const auto rows = [&](auto* data, std::int32_t heads, std::int32_t dim) {
            return view_bhsd(data, size.batch, heads, size.tokens, dim);
        };
        return {.q = rows(q, shape_.query_heads, shape_.head_dim_qk),
                .k = rows(k, shape_.kv_heads, shape_.head_dim_qk),
                .v = rows(v, shape_.kv_heads, shape_.head_dim_vo),
                .out = rows(out, shape_.query_heads, shape_.head_dim_vo)};
    }

    /// Advances sequences by their tokens. Call it once per step or chunk, after the last layer. Without a
    /// batch all sequences, each by the tokens that its layers have appended (0 for a sequence that no call
    /// named). A batch names sequences, and may say their tokens; where it does not, each advances by the
    /// tokens that its layers have appended, at least one. Refuses sequences out of range or named twice, and
    /// tokens that some layer has not appended (its call was not made, or found no page) or has appended more
    /// of. With options.status [entries] the host does not refuse these, but leaves the sequence where it is
    /// and sets status_layer_skipped, or status_pool_exhausted where a layer found no page: call that layer,
    /// then advance again.
    void advance(const host& ctx, const Batch& batch = {}, const StepOptions& options = {});

    /// Tokens seen by a sequence; the position of its next token.
    [[nodiscard]] position_t length(std::int32_t seq) const;
    [[nodiscard]] position_t length(const host& /*ctx*/, std::int32_t seq) const { return length(seq); }
    [[nodiscard]] HeadUsage usage(std::int32_t layer, std::int32_t seq, std::int32_t head) const;
    [[nodiscard]] HeadUsage usage(const host& /*ctx*/, std::int32_t layer, std::int32_t seq,
                                  std::int32_t head) const {
        return usage(layer, seq, head);
    }
    /// The positions held by one head, in the order of its rows. `out` has space for usage(...).size();
    /// returns that. Host memory only: on a device use export_heads().
    std::int32_t retained(std::int32_t layer, std::int32_t seq, std::int32_t head, position_t* out) const;
    /// Makes sequence `to` a copy of sequence `from`, in all layers, for a beam that splits in two. A
    /// DualCache shares the pages that do not change any more (full ones of the global part, in heads without
    /// a budget), and copies the others. The entries of sequence `to` are dropped, draft tokens are not
    /// copied. Tokens that some layers have taken before advance() are copied as well: both sequences then go
    /// on with the other layers. Exhaustion is as for step: refused, or status_pool_exhausted in
    /// *options.status; the cache is unchanged.
    void fork(const host& ctx, std::int32_t from, std::int32_t to, const StepOptions& options = {});

    /// Sequence i becomes a copy of sequence sources[i], for all i < count at once; several may have the same
    /// source (beam search). A sequence that is no target's source is dropped; sequences from `count` on may
    /// be sources and do not change. Forgets draft tokens; tokens that layers have taken before advance() go
    /// along, as in fork. Exhaustion as for fork.
    void reorder(const host& ctx, const std::int32_t* sources, std::int32_t count,
                 const StepOptions& options = {});

    /// Bytes of the snapshot of a sequence as it is now. Refuses, as snapshot does, a sequence in the middle
    /// of a token: one that layers have taken before advance().
    [[nodiscard]] std::size_t snapshot_bytes(std::int32_t seq) const;
    [[nodiscard]] std::size_t snapshot_bytes(const host& /*ctx*/, std::int32_t seq) const {
        return snapshot_bytes(seq);
    }
    /// Writes a sequence to `buffer`: rows, positions, scores, scorer states, of all layers. The blob says
    /// which policy, shape and version it is of, and carries a checksum. Scorer weights are not in it.
    /// Returns snapshot_bytes(seq).
    std::size_t snapshot(const host& ctx, std::int32_t seq, void* buffer, std::size_t buffer_bytes) const;
    /// Restores sequence `seq` from the blob, on a cache of any kind, page size and number of sequences.
    /// Refuses, before anything is written: a blob that is no snapshot, another version, another policy,
    /// shape or storage type, damage, a sequence longer than the cache takes. Exhaustion as for fork.
    void restore(const host& ctx, std::int32_t seq, const void* blob, std::size_t blob_bytes,
                 const StepOptions& options = {});
    /// A hash of this cache's policy and shape, which snapshots carry: the numbers of all heads, the answers
    /// of gates and keep parts, the scorer's timing and state (and its fingerprint(), where it has one).
    [[nodiscard]] std::uint64_t fingerprint() const;

#if defined(__CUDACC__)
    // The same on a device (kvpolicy/cuda.cuh has the bodies). A cache belongs to the context that bound it
    // last: calls with the other one are refused. Callers leave `Build` out. Unless its comment says
    // otherwise, a call enqueues work on the stream and can be captured. Arguments in device memory that
    // would be refused leave the sequence as it is and set status_bad_length.

    /// Takes device memory, at least bytes().total() long, and empties every sequence, and a DualCache's
    /// pool. Waits for the stream; not to be captured. Refuses a selection whose pages are no multiple of 16
    /// rows, and a DualCache with such a page_size.
    template <class Build = cuda_build>
    void bind(const cuda& ctx, void* buffer, std::size_t buffer_bytes);
    template <class Build = cuda_build>
    void bind(const cuda& ctx, Buffer& buffer) {
        this->template bind<Build>(ctx, buffer.data(), buffer.size());
    }
    template <class Build = cuda_build>
    void clear(const cuda& ctx, std::int32_t seq);
    /// The batch's arrays are device memory, as in calls. options.status [entries] is OR-ed into. A sequence
    /// one of whose layers has not appended the tokens, or has appended others, stays where it is, and sets
    /// status_pool_exhausted where the layer found no page (add a slab), else status_layer_skipped: call that
    /// layer, then advance again.
    template <class Build = cuda_build>
    void advance(const cuda& ctx, const Batch& batch = {}, const StepOptions& options = {});
    /// A copy or two, for which these two wait; not to be captured. A call that must not wait reads
    /// layer(layer).length [max_sequences] and .num_long_range [max_sequences, kv_heads].
    template <class Build = cuda_build>
    [[nodiscard]] position_t length(const cuda& ctx, std::int32_t seq) const;
    template <class Build = cuda_build>
    [[nodiscard]] HeadUsage usage(const cuda& ctx, std::int32_t layer, std::int32_t seq,
                                  std::int32_t head) const;
    /// options.status: one word of device memory.
    template <class Build = cuda_build>
    void fork(const cuda& ctx, std::int32_t from, std::int32_t to, const StepOptions& options = {});
    /// `sources` [count] is device memory; count is at most 512. options.status: one word.
    template <class Build = cuda_build>
    void reorder(const cuda& ctx, const std::int32_t* sources, std::int32_t count,
                 const StepOptions& options = {});
    // Snapshots allocate host memory of one sequence, a DualCache's also device memory for its rows, and wait
    // for the stream; of the rows only those in use are copied. Blobs are the host's, and those of any kind
    // of cache: a snapshot of a cache on a device can be restored in one on the host, and the other way
    // round. As on the host a sequence in the middle of a token is refused.
    template <class Build = cuda_build>
    [[nodiscard]] std::size_t snapshot_bytes(const cuda& ctx, std::int32_t seq) const;
    /// `buffer` is host memory.
    template <class Build = cuda_build>
    std::size_t snapshot(const cuda& ctx, std::int32_t seq, void* buffer, std::size_t buffer_bytes) const;
    /// `blob` is host memory; options.status is one word of device memory, or of host memory.
    template <class Build = cuda_build>
    void restore(const cuda& ctx, std::int32_t seq, const void* blob, std::size_t blob_bytes,
                 const StepOptions& options = {});
#endif

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
    /// Of a head in an array of heads' offsets, [layers, kv_heads + 1].
    [[nodiscard]] std::size_t offset_index(std::int32_t layer, std::int32_t head) const {
        return static_cast<std::size_t>(layer) * static_cast<std::size_t>(shape_.kv_heads + 1) +
               static_cast<std::size_t>(head);
    }
    /// The most that measure(ref) says of any layer, where budgets differ by layer.
    template <class Context, class Measure>
    [[nodiscard]] std::size_t max_of_layers(const Context& ctx, const Measure& measure) const {
        std::size_t most = 0;
        for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
            most = std::max(most, measure(measured_layer(ctx, layer)));
        }
        return most;
    }
    /// A layer to take sizes of, of a cache that may be unbound: its numbers and the host's copies of heads'
    /// parameters are valid, other pointers need not be.
    template <class Context>
    [[nodiscard]] auto measured_layer(const Context& ctx, std::int32_t layer) const {
        check_layer(layer);
        if (memory_ != nullptr) {
            require_memory(!std::is_same_v<Context, host>);
        }
        auto cache = self().ref_of(layer);
        cache.all_params = &head_params_of(layer, 0);
        cache.read_pages =
            P::has_selection ? read_pages_.data() + std::int64_t{layer} * shape_.kv_heads : nullptr;
        if (memory_ == nullptr) {
            using detail::measure_on;
            measure_on(ctx, cache);
        }
        return cache;
    }
    void require_bound() const;
    void require_memory(bool on_device) const;
    void require_seq(std::int32_t seq, const char* name = "seq") const;
    void require_seq_number(std::int32_t seq, const char* name) const;
    [[nodiscard]] bool between_tokens(std::int32_t seq) const;
    void require_layer(std::int32_t layer) const;
    /// Of a head of a sequence of `length` tokens, and `pending` that its layer has taken since, that keeps
    /// `num_long_range` rows in top-k slots.
    [[nodiscard]] HeadUsage usage_of(std::int32_t layer, std::int32_t head, position_t length,
                                     std::int32_t num_appended, std::int32_t num_long_range) const;
    void check_layer(std::int32_t layer) const;
    /// Refuses a sequence some of whose layers have taken tokens that advance() has not counted: it is no
    /// state that a sequence can be in.
    template <class Name>
    void require_between_tokens(std::int32_t seq, const Name& name) const;
    void require_head(std::int32_t head) const;
    /// Tokens of every sequence that a layer has appended and advance() has not counted, of a cache in host
    /// memory: [max_sequences].
    [[nodiscard]] std::int32_t* appended_by(std::int32_t layer) const {
        return at<std::int32_t>(appended_at_) + std::int64_t{layer} * shape_.max_sequences * shape_.kv_heads;
    }
    /// Why a sequence cannot move on by so many tokens: 0 where all layers have appended them.
    [[nodiscard]] std::uint32_t advance_status(std::int32_t seq, std::int32_t tokens) const;
    void require_appended(const Batch& batch, const std::int32_t* tokens_of) const;  // [count]
#if defined(__CUDACC__)
    /// What says which rows a sequence has.
    struct sequence_counts {
        position_t length = 0;
        std::vector<std::int32_t> num_long_range;  // [layers, kv_heads]
    };
    template <class Build>
    void require_device_seq(std::int32_t seq, const char* name) const;
    /// The refs of all layers in device memory, for kernels that serve all layers.
    [[nodiscard]] auto* device_refs() const { return at<const typename Derived::ref_type>(refs_at_); }
    template <class Build, class Element>
    void put_on_device(const cuda& ctx, std::size_t to, const std::vector<Element>& from) const;
    template <class Build>
    [[nodiscard]] auto counted_sequence(const cuda& ctx, std::int32_t seq) const;
    template <class Build, class Copy>
    void for_each_counter(const Derived& other, std::int32_t seq, const Copy& copy) const;
#endif
    template <class PagesNeeded>
    bool drop(const std::int32_t* seq_ids, std::int32_t count, PagesNeeded&& needed,
              std::uint32_t* status) const;

    /// Byte offsets of the arrays of one layer that both kinds have.
    struct common_plan {
        std::size_t num_long_range, num_protected, victim, num_draft, state, queries, spare_queries;
    };
    /// Hands out parts of the buffer: an offset for so many bytes. Refuses more bytes than an address space
    /// has.
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
        // Of an unbound cache, in a ref of which only sizes are taken.
        // NOLINTNEXTLINE(performance-no-int-to-ptr)
        std::byte* const base =
            memory_ != nullptr ? memory_ : reinterpret_cast<std::byte*>(detail::alignment);
        return reinterpret_cast<V*>(base + offset);
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
    std::size_t refs_at_ = 0;      // [layers]: see device_refs()
    CacheBytes bytes_;
    detail::owned_pointer<std::byte> memory_;
    std::vector<std::int32_t>
        scratch_;  // [3, max_sequences] once bound: scratch of reorder, so that it does not allocate
};

}  // namespace kvpolicy

#include <kvpolicy/caches/host/host_cache.hpp>
