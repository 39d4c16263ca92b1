// LTE (learned token eviction): sinks, a window, and the keys with r > 0.5, at most b of them for each head.
//
//     using LTE = kvpolicy::LTE<4, 768, 512, kvpolicy::ConvScorer<128>>;  // s, w, the cap b, which counts
//         the sinks, the scorer
//     // the same, spelled out:
//     using Same = kvpolicy::Policy<kvpolicy::Sink<4>, kvpolicy::Window<768>,
//         kvpolicy::ThresholdGate<kvpolicy::above>,
//                                   kvpolicy::TopKBudget<508>, kvpolicy::ConvScorer<128>>;
//     kvpolicy::ConvScorer<128> scorers[layers];                      // sizes, weights, and how keys are
//         rotated
//     kvpolicy::FixedBudgetCache<LTE, kvpolicy::bf16> all{shape, LTE{}, scorers};  // the capped layout, all
//         of it at once
//     kvpolicy::DualCache<LTE, kvpolicy::bf16> grown{shape, pool, LTE{}, scorers};
//
// visible(q, t) <=> t <= q and (t < s or q - t < w or r_t > 0.5 and t among the best) (LTE, eq. 5; the window
// is w keys here, as in the paper's cache, where eq. 5 shows w + 1). The number of keys out of the window,
// sinks included, is capped at b (3.1.3): when the cap is reached a candidate replaces the worst only if its
// score is strictly better, at every step, in prefill too. r = sigmoid(score), so the gate's 0.5 is a logit
// of 0, the default of ThresholdGate. Heads keep different numbers of keys (about half the cap on average). A
// DualCache stores only the keys that are kept.
//
// The scorer (scorers/conv.hpp) is a convolution over a key's 6 neighbors on either side, on [k before RoPE;
// v]: it reads the stored key and undoes the rotation, and runs over all keys that it can score at once, as
// late as the window allows (w >= 13). LTE<s, w, b, GivenScores> takes scores from the caller instead.
//
// Training: losses/gates.hpp. The cap of LambdaController is this b, since retention_counts counts the sinks.
#pragma once

#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/conv.hpp>

namespace kvpolicy {

namespace detail {
/// k of LTE's cap: the sinks are of the b keys. Run-time numbers stay run-time numbers.
constexpr std::int32_t lte_budget(std::int32_t sinks, std::int32_t cap) {
    return sinks == dynamic || cap == dynamic ? dynamic : cap - sinks;
}
}  // namespace detail

/// LTE's composition, with the cap b counting the sinks (b >= s). With `dynamic` numbers (the default)
/// the budget is given as k = b - s: LTE<>{Sink<>{s}, Window<>{w}, ThresholdGate<above>{},
/// TopKBudget<>{b - s}, scorer}.
template <std::int32_t Sinks = dynamic, std::int32_t Width = dynamic, std::int32_t Cap = dynamic,
          class ScorerType = ConvScorer<>>
using LTE = Policy<Sink<Sinks>, Window<Width>, ThresholdGate<above>,
                   TopKBudget<detail::lte_budget(Sinks, Cap)>, ScorerType>;

static_assert(LTE<4, 768, 512>::has_gate && LTE<4, 768, 512>::has_budget);

}  // namespace kvpolicy
