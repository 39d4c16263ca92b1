// The classes of the library behind AnyCache. caches.cpp makes the instances of the package of it, and
// kvpolicy/first_use.py a policy with parts in C++; both include the bodies of CUDA calls before.
#pragma once

#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/policies/selection.hpp>
#include <kvpolicy/scorers/conv.hpp>
#include <kvpolicy/scorers/mlstm.hpp>
#include <kvpolicy/scorers/observed.hpp>

#include "caches.hpp"

#include <type_traits>

namespace kvpolicy::python {

// ---- policies ---------------------------------------------------------------------------------------------

/// The masses of scorers/observed.hpp, chosen at run time; whether decoded tokens evict is part of the type.
template <bool Evicts>
struct AnyMass {
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::observed;
    static constexpr bool evicts_at_steps = Evicts;
    Observation seen;

    [[nodiscard]] constexpr Observation observation() const { return seen; }
    void check(std::int32_t, std::int32_t, std::int32_t) const { kvpolicy::detail::check_observation(seen); }
};
static_assert(Scorer<AnyMass<true>> && Scorer<AnyMass<false>>);

using GivenPolicy = GatedPolicy;
using mLSTMPolicy = Policy<Sink<>, Window<>, AnyGate, TopKBudget<>, Decay<1>, mLSTMScorer<>>;
using ConvPolicy = Policy<Sink<>, Window<>, AnyGate, TopKBudget<>, Decay<1>, ConvScorer<>>;
template <bool Evicts>
using MassPolicy = Policy<Sink<>, Window<>, TopKBudget<>, AnyMass<Evicts>>;
using SelectingPolicy = Policy<Sink<>, Window<>, AnyGate, TopKBudget<>, Decay<1>, QuestPages<>>;

/// Numbers of all layers; `name` is the argument's.
template <class V>
PerHead<V> numbers_of(const char* name, const CacheShape& shape, const std::vector<V>& values) {
    if (values.size() == 1) {
        return values[0];
    }
    const auto all = static_cast<std::size_t>(shape.layers) * static_cast<std::size_t>(shape.kv_heads);
    kvpolicy::detail::require(values.size() == all, name, values.size(), [&] {
        return kvpolicy::detail::text("1 number, or layers x KV heads = ", all);
    });
    return per_head(values.data(), shape.layers, shape.kv_heads);
}

/// A part of the package with the numbers of `args`, whose arrays it points to.
template <class Part>
Part part_of(const CacheArgs& args) {
    const PolicyNumbers& numbers = args.policy;
    const auto of = [&](const char* name, const auto& values) {
        return numbers_of(name, args.shape, values);
    };
    if constexpr (Part::kind == part_kind::sink) {
        return Part{of("sinks", numbers.sinks)};
    } else if constexpr (Part::kind == part_kind::window) {
        return Part{of("windows", numbers.windows)};
    } else if constexpr (Part::kind == part_kind::budget) {
        return Part{of("budgets", numbers.budgets)};
    } else if constexpr (Part::kind == part_kind::decay) {
        return Part{of("log_gammas", numbers.log_gammas)};
    } else if constexpr (std::is_same_v<Part, AnyGate>) {
        return Part{of("thresholds", numbers.thresholds), rule_of(numbers.instance)};
    } else if constexpr (Part::kind == part_kind::gate) {
        return Part{of("thresholds", numbers.thresholds)};
    } else if constexpr (Part::kind == part_kind::selection) {
        const group_aggregate aggregate = args.selection.mean ? group_aggregate::mean : group_aggregate::max;
        return Part{args.selection.page_size, of("pages", args.selection.pages), aggregate};
    } else if constexpr (std::is_same_v<Part, mLSTMScorer<>> || std::is_same_v<Part, ConvScorer<>>) {
        return Part{};
    } else {
        return Part{args.observation};
    }
}

template <class P>
struct policy_parts;
template <class... Parts>
struct policy_parts<Policy<Parts...>> {
    static Policy<Parts...> make(const CacheArgs& args) { return Policy<Parts...>{part_of<Parts>(args)...}; }
};

inline void set_sizes(const CacheArgs& args, mLSTMScorer<>& scorer) {
    scorer.d_qk = args.d_qk, scorer.d_v = args.d_v, scorer.gate_softcap = args.gate_softcap;
    scorer.norm = static_cast<mlstm_norm>(args.norm);
}
inline void set_sizes(const CacheArgs& args, ConvScorer<>& scorer) {
    scorer.rope = {static_cast<rope_layout>(args.rope_layout), args.rope_base, args.rope_dims};
    scorer.rope.frequencies =
        array_of<const float>(args.frequencies, scorer.rope.rotated(args.shape.head_dim_qk) / 2);
}

/// The scorer of a layer, with its sizes and its weights.
template <class S>
S scorer_of(const CacheArgs& args, std::size_t layer) {
    S scorer{.heads = args.shape.kv_heads,
             .head_dim_qk = args.shape.head_dim_qk,
             .head_dim_vo = args.shape.head_dim_vo};
    set_sizes(args, scorer);
    std::size_t at = 0;
    const std::vector<Tensor>& tensors = args.parameters.at(layer);
    for_each_parameter(scorer, scorer.weights,
                       [&](const char* name, const float*& array, std::size_t count, bool optional) {
                           const Tensor tensor = at < tensors.size() ? tensors[at] : Tensor{};
                           ++at;
                           kvpolicy::detail::require(tensor.given || optional, name, "None", "a tensor");
                           array = array_of<const float>(tensor, static_cast<std::int64_t>(count));
                       });
    return scorer;
}

// ---- caches -----------------------------------------------------------------------------------------------

template <template <AnyPolicy, Storage> class Cache, class P, class T>
class TypedCache final : public AnyCache {
    using cache_type = Cache<P, T>;
    using scorer_type = typename P::scorer_type;
    static constexpr bool pooled = cache_type::ref_type::pooled;

  public:
    /// `make` makes the policy of the arguments that it is given, and keeps no others.
    TypedCache(const CacheArgs& args, P (*make)(const CacheArgs&))
        : args_(args), scorers_(scorers_of(args_)), cache_(cache_of(args_, make(args_), scorers_)) {}

    [[nodiscard]] Sizes sizes() const override {
        const CacheBytes& bytes = cache_.bytes();
        std::size_t slab = 0;
        if constexpr (pooled) {
            slab = cache_.slab_bytes();
        }
        return {bytes.keys_and_values, bytes.scorer_state, bytes.total(), slab};
    }
    [[nodiscard]] std::size_t workspace_bytes(const Context& ctx, std::int32_t batch,
                                              std::int32_t tokens) const override {
        return tokens == 1 ? cache_.step_workspace_bytes(ctx, batch)
                           : cache_.workspace_bytes(ctx, {.batch = batch, .tokens = tokens});
    }
    void bind(const Context& ctx, const Tensor& memory) override {
        cache_.bind(ctx, array_of<std::uint8_t>(memory, memory.count()), bytes_of(memory));
    }
    void add_slab(const Context& ctx, const Tensor& memory) override {
        if constexpr (pooled) {
            cache_.add_slab(ctx, array_of<std::uint8_t>(memory, memory.count()), bytes_of(memory));
        } else {
            kvpolicy::detail::refuse("slab", "given", "none: a cache of fixed budgets has no pool");
        }
    }
    std::int64_t reserve(const Context& ctx, const BatchArgs& batch) override {
        if constexpr (pooled) {
            return cache_.reserve(ctx, batch_of(batch));
        } else {
            return 0;
        }
    }

    void write(const Context& ctx, const LayerArgs& args, bool single, workspace_view workspace) override {
        const StepIO<T> io = io_of(args);
        if (single) {
            step(ctx, cache_.layer(args.layer), io, workspace, options_of(args.status, io.batch));
        } else {
            prefill(ctx, cache_.layer(args.layer), io, workspace, options_of(args.status, io.batch));
        }
    }
    void append_draft(const Context& ctx, const LayerArgs& args, workspace_view workspace) override {
        if constexpr (P::observed) {
            no_drafts();
        } else {
            const StepIO<T> io = io_of(args);
            kvpolicy::append_draft(ctx, cache_.layer(args.layer), io, workspace,
                                   options_of(args.status, io.batch));
        }
    }
    void accept(const Context& ctx, const LayerArgs& args, workspace_view workspace) override {
        if constexpr (P::observed) {
            no_drafts();
        } else {
            const Batch batch = batch_of(args.batch);
            kvpolicy::accept(ctx, cache_.layer(args.layer), batch, workspace, options_of(args.status, batch));
        }
    }
    void attend(const Context& ctx, const LayerArgs& args, workspace_view workspace) override {
        const StepIO<T> io = io_of(args);
        kvpolicy::attend(ctx, cache_.layer(args.layer), io, workspace, options_of(args.status, io.batch));
    }
    void advance(const Context& ctx, const BatchArgs& args, const Tensor& status) override {
        const Batch batch = batch_of(args);
        cache_.advance(ctx, batch, options_of(status, batch));
    }

    void clear(const Context& ctx, std::int32_t seq) override { cache_.clear(ctx, seq); }
    void fork(const Context& ctx, std::int32_t from, std::int32_t to, const Tensor& status) override {
        cache_.fork(ctx, from, to, {word_of(status, 1)});
    }
    void reorder(const Context& ctx, const Tensor& sources, const Tensor& status) override {
        cache_.reorder(ctx, array_of<const std::int32_t>(sources, sources.count()),
                       static_cast<std::int32_t>(sources.count()), {word_of(status, 1)});
    }
    [[nodiscard]] std::size_t snapshot_bytes(const Context& ctx, std::int32_t seq) const override {
        return cache_.snapshot_bytes(ctx, seq);
    }
    std::size_t snapshot(const Context& ctx, std::int32_t seq, void* blob, std::size_t bytes) const override {
        return cache_.snapshot(ctx, seq, blob, bytes);
    }
    void restore(const Context& ctx, std::int32_t seq, const void* blob, std::size_t bytes,
                 const Tensor& status) override {
        cache_.restore(ctx, seq, blob, bytes, {word_of(status, 1)});
    }

    [[nodiscard]] position_t length(const Context& ctx, std::int32_t seq) const override {
        return cache_.length(ctx, seq);
    }
    [[nodiscard]] const position_t* lengths() const override { return cache_.layer(0).length; }
    [[nodiscard]] Usage usage(const Context& ctx, std::int32_t layer, std::int32_t seq,
                              std::int32_t head) const override {
        const HeadUsage usage = cache_.usage(ctx, layer, seq, head);
        return {usage.sinks, usage.window, usage.long_range, usage.capacity};
    }
    [[nodiscard]] std::vector<position_t> retained(std::int32_t layer, std::int32_t seq,
                                                   std::int32_t head) const override {
        std::vector<position_t> positions(static_cast<std::size_t>(cache_.usage(layer, seq, head).size()));
        cache_.retained(layer, seq, head, positions.data());
        return positions;
    }

  private:
    static std::vector<scorer_type> scorers_of(const CacheArgs& args) {
        std::vector<scorer_type> scorers;
        if constexpr (std::is_same_v<scorer_type, mLSTMScorer<>> ||
                      std::is_same_v<scorer_type, ConvScorer<>>) {
            const auto layers = static_cast<std::size_t>(args.shape.layers);
            kvpolicy::detail::require(args.parameters.size() == layers, "number of scorers",
                                      args.parameters.size(),
                                      [&] { return kvpolicy::detail::text("one per layer, ", layers); });
            for (std::size_t layer = 0; layer < layers; ++layer) {
                scorers.push_back(scorer_of<scorer_type>(args, layer));
            }
        }
        return scorers;
    }
    static cache_type cache_of(const CacheArgs& args, const P& policy,
                               const std::vector<scorer_type>& scorers) {
        const scorer_type* const first = scorers.empty() ? nullptr : scorers.data();
        if constexpr (pooled) {
            return cache_type(args.shape, args.pool, policy, first, args.params);
        } else {
            return cache_type(args.shape, policy, first, args.params);
        }
    }
    [[noreturn]] static void no_drafts() {
        kvpolicy::detail::refuse("policy", "one that ranks keys by the attention they receive",
                                 "another for draft tokens, since each query changes its scores");
    }

    static std::size_t bytes_of(const Tensor& memory) { return static_cast<std::size_t>(memory.count()); }
    static std::uint32_t* word_of(const Tensor& status, std::int32_t count) {
        // The words of status_bits; torch's int32 has the same bits.
        return reinterpret_cast<std::uint32_t*>(array_of<std::int32_t>(status, count));
    }
    [[nodiscard]] StepOptions options_of(const Tensor& status, const Batch& batch) const {
        const std::int32_t count = batch.count == Batch::not_set ? cache_.shape().max_sequences : batch.count;
        return {word_of(status, count)};
    }
    static Batch batch_of(const BatchArgs& args) {
        Batch batch{.count = args.count, .length = args.length};
        batch.seq_ids = array_of<const std::int32_t>(args.seq_ids, args.count);
        batch.q_len = array_of<const std::int32_t>(args.q_len, args.count);
        return batch;
    }
    static StepIO<T> io_of(const LayerArgs& args) {
        StepIO<T> io;
        io.q = rows_of<const T>(args.q);
        io.out = rows_of<T>(args.out);
        if (args.k.given) {
            io.k = rows_of<const T>(args.k);
            io.v = rows_of<const T>(args.v);
        }
        io.batch = batch_of(args.batch);
        io.scores = plane_of<const float>(args.scores);
        io.lse = plane_of<float>(args.lse);
        io.cu_seqlens = array_of<const std::int32_t>(args.cu_seqlens, std::int64_t{args.batch.count} + 1);
        return io;
    }

    CacheArgs args_;  // the policy's numbers are in its arrays
    std::vector<scorer_type> scorers_;
    cache_type cache_;
};

}  // namespace kvpolicy::python
