// The gate of a file, and the policy of a cache that trained gates decide for: one type per kind of scorer.
#pragma once

#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "scorers.hpp"

#include <cstdint>
#include <utility>
#include <vector>

namespace examples {

/// SP-KV's and WG-KV's, LTE's or DMS's, chosen at run time.
struct FileGate {
    enum class rule : std::uint8_t { at_least, above, evict };
    static constexpr kvpolicy::part_kind kind = kvpolicy::part_kind::gate;
    float threshold = 0.0f;  ///< a logit
    rule comparison = rule::at_least;

    KVPOLICY_HOST_DEVICE constexpr void write(kvpolicy::HeadParams& head_params, std::int32_t,
                                              std::int32_t) const {
        head_params.threshold = threshold;
    }
    void check_values(std::int32_t, std::int32_t) const {}
    KVPOLICY_HOST_DEVICE constexpr bool open(float score, const kvpolicy::HeadParams& head_params) const {
        return comparison == rule::evict   ? score <= head_params.threshold
               : comparison == rule::above ? score > head_params.threshold
                                           : score >= head_params.threshold;
    }
};
static_assert(kvpolicy::Gate<FileGate>);

template <class S>
using GatesPolicy =
    kvpolicy::Policy<kvpolicy::Sink<>, kvpolicy::Window<>, FileGate, kvpolicy::TopKBudget<>, S>;

/// The policy of a file of gates; `scorer` is a layer's.
template <class S>
GatesPolicy<S> gates_policy(const ScorerSpec& spec, const S& scorer) {
    using rule = FileGate::rule;
    const rule comparison = spec.policy == "lte"   ? rule::above
                            : spec.policy == "dms" ? rule::evict
                                                   : rule::at_least;
    const std::int32_t cap = spec.budget < 0 ? kvpolicy::unlimited : spec.budget;
    return GatesPolicy<S>{kvpolicy::Sink<>{spec.sinks}, kvpolicy::Window<>{spec.window},
                          FileGate{kvpolicy::logit_of(spec.threshold), comparison},
                          kvpolicy::TopKBudget<>{cap}, scorer};
}

/// Calls visit(stack) with the stack of a file of gates.
template <class Visit>
auto with_gates(const TrainedScorers& trained, Visit&& visit) {
    if (const auto* write_gates = std::get_if<ScorerStack<WriteGate>>(&trained.stack)) {
        return visit(*write_gates);
    }
    if (const auto* convolutions = std::get_if<ScorerStack<Conv>>(&trained.stack)) {
        return visit(*convolutions);
    }
    if (const auto* predictors = std::get_if<ScorerStack<Predictor>>(&trained.stack)) {
        return visit(*predictors);
    }
    return visit(std::get<ScorerStack<Mlp>>(trained.stack));
}

}  // namespace examples
