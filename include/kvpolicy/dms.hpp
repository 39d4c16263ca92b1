// DMS (Dynamic Memory Sparsification; Lancucki et al., 2025): a learned decision to evict, carried
// out after a delay.
//
//     using DMS = kvpolicy::DMS<256>;                                 // the decisions' logits come from the
//         caller
//     // the same, spelled out:
//     using Same = kvpolicy::Policy<kvpolicy::Sink<0>, kvpolicy::Window<256>, kvpolicy::EvictionGate,
//         kvpolicy::GivenScores>;
//     kvpolicy::DualCache<DMS, kvpolicy::bf16> cache{shape, {.slab_pages = 4096, .max_slabs = 64,
//         .max_seq_len = 131072}};
//     // training: the relaxed decision as a log-bias outside the window, and a loss that asks for enough of
//         them
//     const kvpolicy::DmsGate gate{.temperature = 0.1f, .seed = step};
//     kvpolicy::build_log_bias(ctx, DMS{}, gate, scores, sequences, expiry, log_bias);
//     auto loss = kvpolicy::CompressionLoss{.target = kvpolicy::eviction_target(step, 8.0), .gate = gate}(
//         ctx,
//         DMS{}, scores, sequences, d_scores);
//
// With alpha_t = sigmoid(z_t), visible(q, t) <=> t <= q and (q - t < w or alpha_t <= 0.5): a key whose
// decision was to evict stays for w queries, in which the tokens after it may still read it, and then goes;
// the others stay for good. It is WG-KV's rule with a gate of opposite sign. The decision is known when the
// key arrives. Heads keep different numbers of keys, so the cache is a DualCache.
//
// The window is w keys here and w + 1 in the authors' code, which also takes the decision about key t from
// token t + 1; here a decision comes with its own key.
//
// In training alpha = sigmoid((z + noise) / temperature) with logistic noise (a Gumbel-sigmoid), and log(1 -
// alpha) is added to the logits outside the window. Memory is asked for with max(0, target - mean alpha),
// whose target rises with the step.
#pragma once

#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/losses/dms.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/masks/dms_gate.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/eviction_gate.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/window.hpp>

namespace kvpolicy {

/// DMS's composition. A width that is `dynamic` (the default) is a run-time value:
/// DMS<>{Sink<0>{}, Window<>{w}, EvictionGate{}, GivenScores{}}.
template <std::int32_t Width = dynamic, class ScorerType = GivenScores, std::int32_t Sinks = 0>
using DMS = Policy<Sink<Sinks>, Window<Width>, EvictionGate, ScorerType>;

static_assert(DMS<256>::has_gate && !DMS<256>::has_budget);

}  // namespace kvpolicy
