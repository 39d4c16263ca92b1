// Where a thread is in a ring of stages in shared memory.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A stage of the pipeline, and the parity of how often it came round.
template <int Stages>
struct pipeline_state {
    int stage = 0;
    std::uint32_t parity = 0;

    __device__ void advance() {
        if (++stage == Stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
