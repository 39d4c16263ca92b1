// A cache whose policy, storage type and kind are chosen at run time: one virtual call per call of the
// library.
//
//     kind  | class            | scorer    | policy
//     ------+------------------+-----------+-----------------------------------------------------------
//     fixed | FixedBudgetCache | given     | Policy<Sink<>, Window<>, AnyGate, TopKBudget<>, Decay<1>>
//     fixed | FixedBudgetCache | mlstm     | the same, mLSTMScorer<>
//     fixed | FixedBudgetCache | evicting  | Policy<Sink<>, Window<>, TopKBudget<>, AnyMass<true>>: H2O, TOVA
//     dual  | DualCache        | given     | as above
//     dual  | DualCache        | mlstm     | as above
//     dual  | DualCache        | conv      | as given, ConvScorer<>
//     dual  | DualCache        | keeping   | Policy<Sink<>, Window<>, TopKBudget<>, AnyMass<false>>: SnapKV
//     dual  | DualCache        | selecting | as given, QuestPages<>
//
// Scorers of a key and its value, of its position or of hidden states run before the call, as a caller's own
// do, and their scores are given. A policy without ranks is one with a budget of 0. That leaves eight
// instances per storage type. A policy with parts in C++
// is in a library of its own, which kvpolicy/first_use.py compiles.
#pragma once

#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/caches/page_pool.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/version.hpp>

#include "instances.hpp"

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvpolicy::python {

/// The numbers of QuestPages.
struct SelectionNumbers {
    std::vector<std::int32_t> pages;
    std::int32_t page_size = 16;
    bool mean = false;  // group_aggregate::mean
};

/// What a cache is made from. Numbers of the policy are one for all, or layer by layer one per KV head:
/// [layers * kv_heads].
struct CacheArgs {
    std::string kind, scorer;
    CacheShape shape;
    PoolShape pool;        // dual
    PolicyNumbers policy;  // `instance` names the gate
    AttentionParams params;
    Observation observation;                      // evicting, keeping
    SelectionNumbers selection;                   // selecting
    std::int32_t d_qk = 0, d_v = 0;               // mlstm
    float gate_softcap = 0.0f;                    // mlstm
    std::int32_t norm = 0;                        // mlstm: an mlstm_norm
    std::int32_t rope_layout = 0, rope_dims = 0;  // conv: of class Rope
    float rope_base = 0.0f;                       // conv
    Tensor frequencies;                           // conv: [rope_dims / 2] fp32; may be None
    std::vector<std::vector<Tensor>> parameters;  // mlstm, conv: by layer, as in ScoreArgs; the caller's
};

/// The entries of a call: sequences [count] and their tokens [count], int32; each may be None.
struct BatchArgs {
    std::int32_t count = Batch::not_set, length = Batch::not_set;
    Tensor seq_ids, q_len;
};

/// The tensors of a call on one layer (StepIO).
struct LayerArgs {
    std::int32_t layer = 0;
    Tensor q, k, v, out;  // [count, Hq, n, Dk], [count, Hkv, n, Dk], [count, Hkv, n, Dv], [count, Hq, n, Dv]
    BatchArgs batch;
    Tensor scores;      // [count, Hkv, n] fp32; may be None
    Tensor lse;         // [count, Hq, n] fp32, written; may be None
    Tensor cu_seqlens;  // [count + 1] int32; may be None
    Tensor status;      // [count] int32, OR-ed into; may be None
};

class AnyCache {
  public:
    AnyCache() = default;
    AnyCache(const AnyCache&) = delete;
    AnyCache& operator=(const AnyCache&) = delete;
    virtual ~AnyCache() = default;

    /// Bytes of keys and values (0 of a DualCache, whose slabs have them), of scorer states, and in all.
    struct Sizes {
        std::size_t keys_and_values, scorer_state, total, slab;
    };
    [[nodiscard]] virtual Sizes sizes() const = 0;
    [[nodiscard]] virtual std::size_t workspace_bytes(const Context& ctx, std::int32_t batch,
                                                      std::int32_t tokens) const = 0;
    virtual void bind(const Context& ctx, const Tensor& memory) = 0;
    virtual void add_slab(const Context& ctx, const Tensor& memory) = 0;
    virtual std::int64_t reserve(const Context& ctx, const BatchArgs& batch) = 0;

    /// step where `single`, else prefill.
    virtual void write(const Context& ctx, const LayerArgs& args, bool single, workspace_view workspace) = 0;
    virtual void append_draft(const Context& ctx, const LayerArgs& args, workspace_view workspace) = 0;
    /// Of args only layer, batch and status.
    virtual void accept(const Context& ctx, const LayerArgs& args, workspace_view workspace) = 0;
    virtual void attend(const Context& ctx, const LayerArgs& args, workspace_view workspace) = 0;
    virtual void advance(const Context& ctx, const BatchArgs& batch, const Tensor& status) = 0;

    virtual void clear(const Context& ctx, std::int32_t seq) = 0;
    virtual void fork(const Context& ctx, std::int32_t from, std::int32_t to, const Tensor& status) = 0;
    virtual void reorder(const Context& ctx, const Tensor& sources, const Tensor& status) = 0;
    [[nodiscard]] virtual std::size_t snapshot_bytes(const Context& ctx, std::int32_t seq) const = 0;
    virtual std::size_t snapshot(const Context& ctx, std::int32_t seq, void* blob,
                                 std::size_t bytes) const = 0;
    virtual void restore(const Context& ctx, std::int32_t seq, const void* blob, std::size_t bytes,
                         const Tensor& status) = 0;

    [[nodiscard]] virtual position_t length(const Context& ctx, std::int32_t seq) const = 0;
    /// [max_sequences] in the memory that the cache is bound to: what length() copies.
    [[nodiscard]] virtual const position_t* lengths() const = 0;
    /// Entries in use: sinks, window, long-range.
    struct Usage {
        std::int32_t sinks, window, long_range, capacity;
    };
    [[nodiscard]] virtual Usage usage(const Context& ctx, std::int32_t layer, std::int32_t seq,
                                      std::int32_t head) const = 0;
    /// Positions in the order of entries; of a cache on the CPU.
    [[nodiscard]] virtual std::vector<position_t> retained(std::int32_t layer, std::int32_t seq,
                                                           std::int32_t head) const = 0;
};

/// What makes the cache of a library that was compiled at the first use of its policy.
using CacheFactory = AnyCache* (*)(const CacheArgs& args);
/// Differs between binaries that cannot call each other's caches.
inline std::uint64_t cache_layout() {
    std::uint64_t layout = KVPOLICY_VERSION;
    for (const std::size_t size :
         {sizeof(CacheArgs), sizeof(LayerArgs), sizeof(Context), sizeof(AnyCache::Usage)}) {
        layout = layout * 65599 + size;
    }
    return layout;
}

/// One unit per storage type: caches.cpp.
template <class T>
std::unique_ptr<AnyCache> make_cache(const CacheArgs& args);

}  // namespace kvpolicy::python
