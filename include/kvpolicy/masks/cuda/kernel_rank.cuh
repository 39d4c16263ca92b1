#pragma once

#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/masks/cuda/agent_rank.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// One block for every segment of every plane.
template <int Threads, int Items, int Bits, class Gate, class Keep>
__global__ void __launch_bounds__(Threads)
    rank_kernel(const mask_params<Gate, Keep> params, const ranking<std::uint16_t> out,
                const bool wants_ranks) {
    using block = agent_rank<Threads, Items, Bits>;
    const std::int64_t plane = blockIdx.x / static_cast<unsigned>(params.segments);
    const auto index = static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(params.segments));
    const auto b = params.sequence_of(plane);
    const segment_range segment = params.segment(b, index);
    if (threadIdx.x == 0 && index == 0 && params.head_of(plane) == 0) {
        params.check_length(b);
    }
    const HeadParams head_params = params.all_params.of(params.head_of(plane));
    if (segment.length() == 0 || params.by_decayed_top_k(head_params)) {
        return;
    }
    block::run(params, out, plane, segment, wants_ranks,
               *reinterpret_cast<typename block::shared*>(dynamic_shared()));
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
