// StreamingLLM (Xiao et al., 2023): attention sinks and a window.
//
//     using Streaming = kvpolicy::StreamingLLM<4, 1020>;             // 4 sinks, the 1020 most recent keys
//     kvpolicy::FixedBudgetCache<Streaming, kvpolicy::bf16> cache{shape};
//
// visible(q, t) <=> t <= q and (t < s or q - t < w). No scores, no learning; the baseline of every table.
// Keys keep the positions at which they were rotated (the paper re-rotates within the cache, which an engine
// may do before attention).
#pragma once

#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/window.hpp>

namespace kvpolicy {

/// Sinks and a window. StreamingLLM<> takes both at run time: StreamingLLM<>{Sink<>{s}, Window<>{w}}.
template <std::int32_t Sinks = dynamic, std::int32_t Width = dynamic>
using StreamingLLM = Policy<Sink<Sinks>, Window<Width>>;

static_assert(!StreamingLLM<4, 8>::ranked);

}  // namespace kvpolicy
