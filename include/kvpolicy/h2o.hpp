// H2O (Heavy-Hitter Oracle; Zhang et al., 2023): recent keys, and the keys that have received the most
// attention so far.
//
//     using H2O = kvpolicy::H2O<512, 512>;                            // 512 heavy hitters, 512 recent keys:
//         B = 1024
//     // the same, spelled out:
//     using Same = kvpolicy::Policy<kvpolicy::Window<513>, kvpolicy::TopKBudget<512>,
//         kvpolicy::AccumulatedMass>;
//     const auto policy = kvpolicy::h2o_for_total(1024);              // at run time: half of B recent
//     kvpolicy::FixedBudgetCache<kvpolicy::H2O<>, kvpolicy::bf16> cache{shape, policy};
//     kvpolicy::build_observed_mask(ctx, policy, attention, q, k, sequences, expiry, workspace);    // the
//         same as lifetimes
//
// After query q, of the keys up to q - r the B - r with the largest sum over queries of softmax weights stay,
// and the r most recent ones. So query q + 1 sees B keys and itself, which takes B + 1 rows: a window of w =
// r + 1, and k = B - r places. B counts heavy and recent keys, as the paper's budget does, whose default is
// half and half. Every KV head decides for itself. With G query heads per KV head, a key receives the mean of
// their weights (the paper has G = 1).
//
// Without recent keys (r = 0) a new key competes with the weight of one query against sums over many: once
// the budget is full, a head hardly takes a new key.
//
// The paper takes a prompt densely and prunes it then (ObservedPrefill::dense_then_prune, the default);
// it can also be taken in chunks of c, which bounds the memory to B + c rows, or stepwise. The three
// keep different keys.
#pragma once

#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/attention/observed_mask.hpp>
#include <kvpolicy/attention/received_mass.hpp>
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/observed.hpp>

namespace kvpolicy {

namespace detail {
/// A window that exempts `recent` keys when the next query has come.
constexpr std::int32_t window_after(std::int32_t recent) { return recent == dynamic ? dynamic : recent + 1; }
}  // namespace detail

/// H2O's composition. With `dynamic` numbers (the default): h2o_for_total, or H2O<>{Window<>{r + 1},
/// TopKBudget<>{heavy}, AccumulatedMass{}}, by layer and head.
template <std::int32_t Heavy = dynamic, std::int32_t Recent = dynamic>
using H2O = Policy<Window<detail::window_after(Recent)>, TopKBudget<Heavy>, AccumulatedMass>;

/// H2O with B rows for heavy and recent keys. With recent = 0 the kept keys hardly change once the budget is
/// full. Refuses recent < 0 and total < recent.
inline H2O<> h2o_for_total(std::int32_t total, std::int32_t recent, AccumulatedMass scorer = {}) {
    detail::require(recent >= 0 && recent < unlimited, "recent keys", recent,
                    "0 or more, and below 2^31 - 1");
    detail::require(total >= recent, "total budget", total,
                    [&] { return detail::text("at least the recent keys, ", recent); });
    return H2O<>{Window<>{recent + 1}, TopKBudget<>{total - recent}, scorer};
}
/// The paper's split: half of B recent. Refuses total < 0.
inline H2O<> h2o_for_total(std::int32_t total, AccumulatedMass scorer = {}) {
    detail::require(total >= 0, "total budget", total, "0 or more");
    return h2o_for_total(total, total / 2, scorer);
}

static_assert(H2O<512, 512>::observed && !H2O<512, 512>::grows);

}  // namespace kvpolicy
