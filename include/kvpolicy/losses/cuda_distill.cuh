// top_logits on CUDA: declarations. kvpolicy/cuda.cuh has the bodies; include it where they are instantiated.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/losses/distill.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

/// The most logits of a token that top_logits and TopDistillation take on a device.
inline constexpr std::int32_t max_top_logits = 4096;

/// Bytes of device workspace for top_logits: none.
inline std::size_t top_logits_workspace_bytes(const cuda& ctx, std::int32_t vocabulary);

/// The host's top_logits: the same logits and indices in the same order. K is 1 to V, and at
/// most max_top_logits.
template <Storage T>
void top_logits(const cuda& ctx, input_rows<T> logits, const Sequences& sequences, rows_view<T> values,
                rows_view<std::int32_t> indices, workspace_view workspace, const LossOptions& options = {});

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
