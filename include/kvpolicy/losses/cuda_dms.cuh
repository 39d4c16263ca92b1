// DMS's compression loss on CUDA: declarations. kvpolicy/cuda.cuh has the bodies; include it where they are instantiated.
#pragma once

#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/losses/cuda_gates.cuh>
#include <kvpolicy/losses/dms.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {

// Memory, status and workspace (gate_loss_workspace_bytes) as in losses/cuda_gates.cuh.

/// CompressionLoss::sums: adds this call's to *sums, so that the layers of a model add up on the device. The same
/// decisions as the host's: draws, and what `straight_through` counts but for alphas within rounding of 0.5.
template <AnyPolicy P>
void compression_sums(const cuda& on, const CompressionLoss& loss, const P& policy,
                      plane_view<const float> scores, const Sequences& sequences, EvictionSums* sums,
                      workspace_view workspace, std::uint32_t* status = nullptr);

/// CompressionLoss: overwrites d_scores for the sequences' lengths, and *value. The sums over the model are `total`,
/// in device memory, where that is given; else loss.total, or where that is empty this call's own. A total of fewer
/// keys than the call's is taken as it is.
template <AnyPolicy P>
void compression_loss(const cuda& on, const CompressionLoss& loss, const P& policy,
                      plane_view<const float> scores, const Sequences& sequences, plane_view<float> d_scores,
                      LossValue* value, workspace_view workspace, const EvictionSums* total = nullptr,
                      std::uint32_t* status = nullptr);

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
