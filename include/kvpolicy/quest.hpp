// Quest (Tang et al., 2024): every key is kept, and a decoded token reads the pages that can matter to it.
//
//     using Quest = kvpolicy::Quest<16>;                              // pages of 16 keys
//     // the same, spelled out:
//     using Same = kvpolicy::Policy<kvpolicy::Window<16>, kvpolicy::KeepAll, kvpolicy::QuestPages<16>>;
//     const Quest policy{{}, {}, kvpolicy::QuestPages<16>{64}};       // 64 pages per KV head, the newest
//         token's included
//     kvpolicy::DualCache<Quest, kvpolicy::bf16> cache{{..., .page_size = 16}, pool, policy};
//
// Keys fill pages of the size of the window, in their order, so a page holds 16 neighbors, as in the paper;
// the newest 16 keys are the ring's page, which is read always. (A ring holds the newest keys at any time,
// where the paper's current page starts empty.) The paper reads its first two layers whole:
// QuestPages<16>{per_head(pages, layers, 1)} with `unlimited` there.
//
// Selection composes with Admission and Eviction (WG-KV's taxonomy) in one type; every part
// says its own piece:
//
//     kvpolicy::Policy<kvpolicy::Window<256>, kvpolicy::ThresholdGate<kvpolicy::at_least>,
//         kvpolicy::WriteGateScorer<128>,   // admit
//                      kvpolicy::SnapKVEviction,
//                          // evict
//                      kvpolicy::QuestPages<16>>
//                          // select
#pragma once

#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/eviction.hpp>
#include <kvpolicy/policies/keep_all.hpp>
#include <kvpolicy/policies/selection.hpp>
#include <kvpolicy/policies/window.hpp>

namespace kvpolicy {

/// Quest's composition, for pages of `Rows` keys. A full cache that is read in part.
template <std::int32_t Rows = 16>
using Quest = Policy<Window<Rows>, KeepAll, QuestPages<Rows>>;

static_assert(Quest<16>::has_selection && Quest<16>::has_keep && !Quest<16>::ranked);

}  // namespace kvpolicy
