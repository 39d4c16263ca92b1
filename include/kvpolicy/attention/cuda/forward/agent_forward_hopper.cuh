// The forward pass on Hopper (compute capability 9.0a). A block stays and takes one tile after another: a
// producer warpgroup gathers keys and values into a ring of shared memory, two or three consumer warpgroups
// of 64 rows each multiply them by wgmma. The producer is ahead by the length of the ring, over the ends of
// tiles too.
#pragma once

#include <kvpolicy/attention/cuda/forward/agent_forward_consumer.cuh>
#include <kvpolicy/attention/cuda/forward/agent_forward_producer.cuh>
#include <kvpolicy/attention/cuda/forward/forward_params.cuh>
#include <kvpolicy/attention/cuda/forward/forward_pipeline.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Tiles are taken from `next`, which is 0 when the first block begins.
template <class S>
__device__ inline void agent_forward_hopper(const forward_params<typename S::T>& call,
                                            const forward_boxes& boxes, unsigned char* shared,
                                            std::uint32_t* next) {
    const forward_pipeline<S> ring(call, shared);
    // The same for all lanes of a warp, and the compiler should know it.
    const int group = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x) / 128, 0);
    if (threadIdx.x == 0) {
        ring.init_barriers();
    }
    __syncthreads();
    if (group == S::consumers) {
        give_registers<S::tuning.producer_registers>();
        agent_forward_producer<S>(ring, boxes, next).produce();
    } else {
        take_registers<S::tuning.consumer_registers>();
        agent_forward_consumer<S>(ring).consume(group);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
