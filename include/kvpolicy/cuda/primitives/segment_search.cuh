// Which packed segment something falls into.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The last of segments 0 .. count - 1 that begins(i) says has begun; 0 where none has. Segments begin in
/// order.
template <class Begins>
__device__ std::int32_t last_begun(std::int32_t count, const Begins& begins) {
    std::int32_t low = 0;
    std::int32_t high = count - 1;
    while (low < high) {
        const std::int32_t middle = (low + high + 1) / 2;
        if (begins(middle)) {
            low = middle;
        } else {
            high = middle - 1;
        }
    }
    return low;
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
