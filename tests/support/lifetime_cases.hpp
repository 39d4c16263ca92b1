// The cases of tests/vectors/lifetimes.kvpv and cutoff.kvpv (tests/reference/make_vectors.py says what is in
// them), and the policy that each stands for.
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "vectors.hpp"

#include <cstdint>
#include <type_traits>

namespace kvpolicy_test {

/// A keep part: keys t with t % every == 0 never leave.
struct KeepEvery {
    static constexpr kvpolicy::part_kind kind = kvpolicy::part_kind::keep;
    std::int32_t every = 1;

    KVPOLICY_HOST_DEVICE constexpr bool keeps(kvpolicy::position_t t) const { return t % every == 0; }
};

enum class gate_kind : std::int32_t { none = 0, at_least = 1, above = 2 };

/// One row of `cases` and `levels`.
struct LifetimeCase {
    std::int32_t pattern;
    std::int32_t length;
    std::int32_t sinks;
    std::int32_t window;
    gate_kind gate;
    bool has_budget;
    std::int32_t budget;
    std::int32_t decay_step;
    std::int32_t keep_every;
    kvpolicy::position_t rebase_limit;
    float threshold;
    float log_gamma;

    static constexpr std::int64_t columns = 11;

    static LifetimeCase from(const std::int32_t* row, const float* levels) {
        return {row[0],      row[1],   row[2], row[3], static_cast<gate_kind>(row[4]),
                row[5] != 0, row[6],   row[7], row[8], row[9],
                levels[0],   levels[1]};
    }
};

/// Calls body(case, index) for the cases of a file, in order.
template <class Body>
void for_each_case(const vectors& file, Body&& body) {
    const auto& rows = file.get<std::int32_t>("cases");
    const auto& levels = file.get<float>("levels");
    for (std::int64_t i = 0; i < rows.shape[0]; ++i) {
        body(LifetimeCase::from(rows.row(i), levels.row(i)), i);
    }
}

/// Calls body(policy) with the policy of a case; the numbers are run-time values.
template <class Body>
void with_policy(const LifetimeCase& numbers, Body&& body) {
    using namespace kvpolicy;
    const Sink<> sink{numbers.sinks};
    const Window<> window{numbers.window};
    const auto keep = [&](const auto&... parts) {
        if (numbers.keep_every > 0) {
            body(
                Policy<std::decay_t<decltype(parts)>..., KeepEvery>(parts..., KeepEvery{numbers.keep_every}));
        } else {
            body(Policy<std::decay_t<decltype(parts)>...>(parts...));
        }
    };
    const auto budget = [&](const auto&... parts) {
        if (numbers.has_budget) {
            keep(parts..., TopKBudget<>{numbers.budget},
                 Decay<dynamic>{numbers.log_gamma, numbers.decay_step});
        } else {
            keep(parts...);
        }
    };
    switch (numbers.gate) {
        case gate_kind::none:
            budget(sink, window);
            break;
        case gate_kind::at_least:
            budget(sink, window, ThresholdGate<at_least>(numbers.threshold));
            break;
        case gate_kind::above:
            budget(sink, window, ThresholdGate<above>(numbers.threshold));
            break;
    }
}

/// Whether the score of key t must not be read: the key never leaves the window before position `end` (of
/// its sequence or segment), or never leaves at all, or nothing is ranked. t and end count from the
/// segment's first token.
inline bool score_is_unread(const LifetimeCase& numbers, std::int32_t t, std::int32_t end) {
    if (!numbers.has_budget && numbers.gate == gate_kind::none) {
        return true;
    }
    return t < numbers.sinks || (numbers.keep_every > 0 && t % numbers.keep_every == 0) ||
           std::int64_t{t} + numbers.window >= end;
}

}  // namespace kvpolicy_test
