// TOVA (Token Omission Via Attention; Oren et al., 2024): after every query the key that it attends
// to least leaves.
//
//     using TOVA = kvpolicy::TOVA<1024>;                              // B = 1024 keys
//     // the same, spelled out:
//     using Same = kvpolicy::Policy<kvpolicy::Window<1>, kvpolicy::TopKBudget<1024>, kvpolicy::LastMass>;
//     const auto policy = kvpolicy::tova_for_total(1024);             // at run time
//     kvpolicy::FixedBudgetCache<kvpolicy::TOVA<>, kvpolicy::bf16> cache{shape, policy};
//     kvpolicy::build_observed_mask(ctx, policy, attention, q, k, sequences, expiry, workspace);    // the
//         same as lifetimes
//
// After query q the B keys with the largest softmax weights of q stay, averaged over all query heads of the
// layer, as the paper does: all KV heads of a layer keep the same keys, so their numbers must be the same.
// LastMass{.whole_layer = false} averages over the G query heads of each KV head instead, which then decides
// for itself. No key is exempt, not even the newest, and there are no sinks: the paper found that they stay
// of themselves. Query q + 1 sees B keys and itself, which takes B + 1 rows.
//
// A prompt in one block (the default) is pruned to the B keys that its last query likes best; in chunks of c
// to those of each chunk's last query; stepwise one key a query leaves. The three keep different keys.
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

/// TOVA's composition. With a `dynamic` budget (the default): tova_for_total.
template <std::int32_t Keys = dynamic>
using TOVA = Policy<Window<1>, TopKBudget<Keys>, LastMass>;

/// TOVA with B keys. Refuses total < 0.
inline TOVA<> tova_for_total(std::int32_t total, LastMass scorer = {}) {
    detail::require(total >= 0 && total < unlimited, "total budget", total, "0 or more, and below 2^31 - 1");
    return TOVA<>{Window<1>{}, TopKBudget<>{total}, scorer};
}

static_assert(TOVA<1024>::observed && !TOVA<1024>::grows);

}  // namespace kvpolicy
