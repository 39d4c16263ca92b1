// Two baselines that read no keys and no scores: keys at a uniform stride, and random keys. A learned policy
// should beat both.
//
//     using Uniform = kvpolicy::UniformStride<4, 64, 16>;             // 4 sinks, a window of 64, every 16th
//         key
//     using Chance = kvpolicy::RandomKeys<4, 64, 188>;                // 4 sinks, a window of 64, 188 others
//         at random: B = 256
//     // the same, spelled out:
//     using A = kvpolicy::Policy<kvpolicy::Sink<4>, kvpolicy::Window<64>, kvpolicy::Stride<16>>;
//     using B = kvpolicy::Policy<kvpolicy::Sink<4>, kvpolicy::Window<64>, kvpolicy::TopKBudget<188>,
//         kvpolicy::RandomScorer>;
//     kvpolicy::DualCache<Uniform, kvpolicy::bf16> some{shape, {.slab_pages = 4096, .max_slabs = 8,
//         .max_seq_len = 131072}};
//     const kvpolicy::RandomScorer by_layer[] = {{1, 0}, {1, 1}};     // seed and layer
//     kvpolicy::FixedBudgetCache<Chance, kvpolicy::bf16> any{shape, Chance{}, by_layer};
//
// A stride keeps n keys of every n * stride, without end, so a DualCache holds it; stride_for_total finds the
// stride with which a text of known length stays within B rows. Random keys are a uniform choice among those
// that left the window, at every query; the draws hang on seed, layer, head and position only, so runs,
// chunks and backends repeat them.
#pragma once

#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/stride.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/random.hpp>

namespace kvpolicy {

/// Sinks, a window, and every Step-th key. With `dynamic` numbers (the default):
/// UniformStride<>{Sink<>{s}, Window<>{w}, Stride<>{n}}.
template <std::int32_t Sinks = dynamic, std::int32_t Width = dynamic, std::int32_t Step = dynamic>
using UniformStride = Policy<Sink<Sinks>, Window<Width>, Stride<Step>>;

/// Sinks, a window, and Keys others at random. With `dynamic` numbers (the default):
/// RandomKeys<>{Sink<>{s}, Window<>{w}, TopKBudget<>{k}, RandomScorer{seed}}.
template <std::int32_t Sinks = dynamic, std::int32_t Width = dynamic, std::int32_t Keys = dynamic>
using RandomKeys = Policy<Sink<Sinks>, Window<Width>, TopKBudget<Keys>, RandomScorer>;

static_assert(UniformStride<4, 64, 16>::has_keep && RandomKeys<4, 64, 188>::has_budget);

}  // namespace kvpolicy
