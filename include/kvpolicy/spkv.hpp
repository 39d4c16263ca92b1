// SP-KV (Self-Pruned Key-Value Attention): a window, and the keys whose predicted utility passes a
// threshold, for good.
//
//     using SPKV = kvpolicy::SPKV<128>;                               // the scores (utility logits) come
//         from the caller
//     // the same, spelled out:
//     using Same = kvpolicy::Policy<kvpolicy::Sink<0>, kvpolicy::Window<128>,
//         kvpolicy::ThresholdGate<kvpolicy::at_least>,
//                                   kvpolicy::GivenScores>;
//     const SPKV policy;                                              // tau = 0.5, the paper's: logit 0
//     kvpolicy::DualCache<SPKV, kvpolicy::bf16> cache{shape, {.slab_pages = 4096, .max_slabs = 64,
//         .max_seq_len = 131072}, policy};
//
// visible(q, t) <=> t <= q and (q - t < w or u_t >= tau) (SP-KV, section 2): a key whose gate is closed
// when it leaves the window is not written to the long-term part. u = sigmoid(score), so tau is turned into
// a logit once: a gate for another threshold is ThresholdGate<at_least>::probability(0.1), by layer and
// head ThresholdGate<at_least>{per_head(logits, layers, heads)}. Heads that stay global or local (the
// paper's hybrid layouts, section 4) are thresholds of -infinity and +infinity. Sinks are optional
// (appendix A.2 adds 4).
//
// The utility is predicted from the hidden state, by a SiLU layer that all heads of a layer
// share (listing 1):
//
//     using SPKV = kvpolicy::SPKV<128, kvpolicy::UtilityPredictor>;
//     auto io = cache.nhd(q, k, v, out);
//     io.hidden = states;                                             // [count, 1, n, d_model]
//     kvpolicy::step(ctx, cache.layer(layer), io, workspace);
//
// and score_hidden (scorers/hidden.hpp) gives the scores of sequences for build_mask. Whoever has the
// utilities already takes GivenScores, the default, and brings them as StepIO::scores.
//
// Memory grows with the density of each head, so the cache is a DualCache (caches/dual.hpp); with a
// TopKBudget beside the gate a FixedBudgetCache holds it too.
#pragma once

#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/hidden.hpp>
#include <kvpolicy/scorers/mlp.hpp>

namespace kvpolicy {

/// SP-KV's composition. A width that is `dynamic` (the default) is a run-time value:
/// SPKV<>{Sink<0>{}, Window<>{w}, ThresholdGate<at_least>::probability(tau), GivenScores{}}.
template <std::int32_t Width = dynamic, class ScorerType = GivenScores, std::int32_t Sinks = 0>
using SPKV = Policy<Sink<Sinks>, Window<Width>, ThresholdGate<at_least>, ScorerType>;

static_assert(SPKV<128>::has_gate && !SPKV<128>::has_budget);

}  // namespace kvpolicy
