// Scores that attention itself gives: the mass that a key receives. The rules of H2O, TOVA and SnapKV are
// three ways to add it up; their pages (h2o.hpp, tova.hpp, snapkv.hpp) describe the papers' rules.
//
// With p_q(t) the softmax weight that query q pays to key t among the keys that it sees, and agg_g over the G
// query heads of the KV head:
//
//     mass_q(t) = agg_g p_q,g(t)
//
// An observed policy decides after attending: a key that it evicts at q is invisible from q + 1. Its scores
// change with every query, so chunks and steps do not give the same keys; how a prompt is cut into blocks is
// part of the policy, and each way is reproducible (ObservedPrefill).
#pragma once

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>

#include <cstdint>

namespace kvpolicy {

/// How an observed policy takes a prompt. Within a block every query sees all keys that were left before
/// it, and the block's own up to itself; then the policy evicts. A call of prefill() is cut into blocks
/// from its first token on.
struct ObservedPrefill {
    std::int32_t chunk = Observation::whole_call;

    /// All tokens of a call are one block: dense attention within the prompt, then one choice (the
    /// papers' own way).
    static constexpr ObservedPrefill dense_then_prune() { return {}; }
    /// Blocks of `tokens` tokens, so that a long prompt needs the budget and a block at most.
    static constexpr ObservedPrefill in_chunks(std::int32_t tokens) { return {tokens}; }
    /// Every token as if it were decoded.
    static constexpr ObservedPrefill stepwise() { return {1}; }
};

/// How SnapKV smooths masses over neighboring keys before it chooses. Keys are neighbors in logical order,
/// among those that the choice is about; beyond the ends there is 0.
struct MassPooling {
    std::int32_t width = 1;  ///< odd; 1: no pooling
    bool largest = false;    ///< the largest of `width` numbers instead of their mean

    static constexpr MassPooling none() { return {}; }
    static constexpr MassPooling mean(std::int32_t keys) { return {keys, false}; }
    static constexpr MassPooling max(std::int32_t keys) { return {keys, true}; }
};

namespace detail {
inline void check_observation(const Observation& seen) {
    require(seen.queries >= 0, "queries", seen.queries, "0 (the window) or more");
    require(seen.pool >= 1 && seen.pool % 2 == 1, "pooling width", seen.pool, "odd and 1 or more");
    require(seen.chunk >= 0, "prefill chunk", seen.chunk, "1 or more, or 0 for the whole call");
}

/// Refuses numbers that differ within a layer whose heads are to keep the same keys.
template <class HeadParamsOf>
void check_same_params(const Observation& seen, std::int32_t heads, HeadParamsOf&& head_params_of) {
    for (std::int32_t h = 1; seen.whole_layer && h < heads; ++h) {
        const HeadParams a = head_params_of(0), b = head_params_of(h);
        if (a.sinks == b.sinks && a.window == b.window && a.budget == b.budget) {
            continue;
        }
        refuse(text("sinks, window and budget of head ", h).c_str(),
               text(b.sinks, ", ", b.window, ", ", b.budget),
               text("those of head 0 (", a.sinks, ", ", a.window, ", ", a.budget,
                    "), since a policy that averages over a layer keeps the same keys in all its heads"));
    }
}
}  // namespace detail

/// H2O: score(t) = sum over all queries since t of mass_q(t).
struct AccumulatedMass {
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::observed;
    static constexpr bool evicts_at_steps = true;

    ObservedPrefill prefill{};
    group_aggregate aggregate = group_aggregate::mean;

    [[nodiscard]] constexpr Observation observation() const {
        return {.aggregate = aggregate, .chunk = prefill.chunk};
    }
    void check(std::int32_t, std::int32_t, std::int32_t) const { detail::check_observation(observation()); }
};

/// TOVA: score(t) = mass_q(t) of the last query alone, over all heads of the layer (or of the KV head).
struct LastMass {
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::observed;
    static constexpr bool evicts_at_steps = true;

    ObservedPrefill prefill{};
    bool whole_layer = true;
    group_aggregate aggregate = group_aggregate::mean;

    [[nodiscard]] constexpr Observation observation() const {
        return {.queries = 1,
                .accumulate = false,
                .aggregate = aggregate,
                .whole_layer = whole_layer,
                .chunk = prefill.chunk};
    }
    void check(std::int32_t, std::int32_t, std::int32_t) const { detail::check_observation(observation()); }
};

/// SnapKV: score(t) = pooled sum over the block's last w queries (the observation window) of mass_q(t).
struct WindowMass {
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::observed;
    static constexpr bool evicts_at_steps = false;

    ObservedPrefill prefill{};
    MassPooling pooling = MassPooling::mean(5);
    group_aggregate aggregate = group_aggregate::mean;

    [[nodiscard]] constexpr Observation observation() const {
        return {.queries = 0,
                .accumulate = false,
                .aggregate = aggregate,
                .pool = pooling.width,
                .pool_largest = pooling.largest,
                .chunk = prefill.chunk};
    }
    void check(std::int32_t, std::int32_t, std::int32_t) const { detail::check_observation(observation()); }
};

static_assert(Scorer<AccumulatedMass> && Scorer<LastMass> && Scorer<WindowMass>);
static_assert(CheckedScorer<AccumulatedMass> && CheckedScorer<LastMass> && CheckedScorer<WindowMass>);

}  // namespace kvpolicy
