// KVpop (KV compression with Predictive Online Pruning): sinks, a protected window, and the k long-range keys
// with the best learned scores.
//
//     using KVpop = kvpolicy::KVpop<4, 256, 3836, kvpolicy::mLSTMScorer<128>>;
//     // the same, spelled out:
//     using Same = kvpolicy::Policy<kvpolicy::Sink<4>, kvpolicy::Window<256>, kvpolicy::TopKBudget<3836>,
//                                   kvpolicy::Decay<1>, kvpolicy::mLSTMScorer<128>>;
//
// B = s + w + k (eq. 1). At query q the key t = q - w leaves the window and competes with E(q) = {t : s <= t
// <= q - w} (eq. 4) by its effective score r_t + floor((q - t) / n) log(gamma_h) (eq. 5); the k best stay,
// ties to the older key. The score comes from a scorer on [k_t; v_t]: a small MLP (KVpop-mlp), or an mLSTM
// that scores the key when it leaves the window, so that it has seen the w tokens after it (eq. 10-11); or
// from the caller (GivenScores: an oracle, a predictor of one's own). An evicted key stays evicted, so the
// whole policy is one expiry per key: masks/build.hpp for training and prefill, caches/fixed_budget.hpp for
// decoding, and both hold the same keys.
#pragma once

#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/linear.hpp>
#include <kvpolicy/scorers/mlp.hpp>
#include <kvpolicy/scorers/mlstm.hpp>

namespace kvpolicy {

/// KVpop's composition with decay step 1. Parameters that are `dynamic` (the default) are run-time values, by
/// layer and head: KVpop<>{Sink<>{s}, Window<>{w}, TopKBudget<>{k}, Decay<1>{log_gamma}, scorer}.
template <std::int32_t Sinks = dynamic, std::int32_t Width = dynamic, std::int32_t Keys = dynamic,
          class ScorerType = GivenScores>
using KVpop = Policy<Sink<Sinks>, Window<Width>, TopKBudget<Keys>, Decay<1>, ScorerType>;

static_assert(KVpop<4, 256, 3836>::has_budget && !KVpop<4, 256, 3836>::has_gate);

}  // namespace kvpolicy
