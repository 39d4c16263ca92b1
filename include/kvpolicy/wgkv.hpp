// WG-KV (Write-Gated KV): admission before the write. A local ring, and a global cache of the keys that
// their gate admits.
//
//     using WGKV = kvpolicy::WGKV<256>;                               // the gates' logits come from the
//         caller
//     // the same, spelled out:
//     using Same = kvpolicy::Policy<kvpolicy::Sink<0>, kvpolicy::Window<256>,
//         kvpolicy::ThresholdGate<kvpolicy::at_least>,
//                                   kvpolicy::GivenScores>;
//     const auto gate = kvpolicy::ThresholdGate<kvpolicy::at_least>::probability(0.1);     // tau of WG-KV,
//         appendix F
//     const WGKV policy{kvpolicy::Sink<0>{}, kvpolicy::Window<256>{}, gate, kvpolicy::GivenScores{}};
//     kvpolicy::DualCache<WGKV, kvpolicy::bf16> cache{shape, {.slab_pages = 4096, .max_slabs = 64,
//         .max_seq_len = 524288}, policy};
//
// The vertical-slash mask of WG-KV, 4.2: visible(q, t) <=> t <= q and (q - t < W_local or g_t >= tau). The
// victim of the ring is inspected when the candidate replaces it, and promoted to the global part if its
// stored score passes (figure 6d); lengths are ragged, each (sequence, KV head) has a page table, and
// DualCache's rows [ring | global] are one row space over it. g = sigmoid(score): scores are raw logits, and
// tau is turned into one once. (The paper's own code compares with >.)
//
// The gate is an MLP on the key alone (3.2), so a cache computes it when the key comes. It needs the key
// before and after RoPE; the scorer undoes the rotation of the stored one:
//
//     using WGKV = kvpolicy::WGKV<256, kvpolicy::WriteGateScorer<128>>;
//     gate.input.rope = {kvpolicy::rope_layout::half_split, 500000.0f};
//
// The paper's taxonomy: this is Admission. Eviction after the write and Selection at the read compose with
// it; a cap on the global part is a TopKBudget beside the gate.
#pragma once

#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/mlp.hpp>

namespace kvpolicy {

/// WG-KV's composition. A width that is `dynamic` (the default) is a run-time value, as SPKV's.
template <std::int32_t Width = dynamic, class ScorerType = GivenScores, std::int32_t Sinks = 0>
using WGKV = Policy<Sink<Sinks>, Window<Width>, ThresholdGate<at_least>, ScorerType>;

static_assert(WGKV<256>::has_gate && !WGKV<256>::has_budget);

}  // namespace kvpolicy
