// The lengths of a call's sequences, looked at on the device.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Sets status_bad_length in the word of every sequence whose length is below 0 or above `length`.
///
///     grid: one block; block: any number of threads; no shared memory
///     in:   lengths [batch]
///     out:  status [batch], OR-ed into
template <class Length>
__global__ void report_lengths_kernel(const Length* const lengths, const std::int32_t batch,
                                      const std::int32_t length, std::uint32_t* const status) {
    for (auto b = static_cast<std::int32_t>(threadIdx.x); b < batch;
         b += static_cast<std::int32_t>(blockDim.x)) {
        if (lengths[b] < 0 || lengths[b] > length) {
            atomicOr(status + b, static_cast<std::uint32_t>(status_bad_length));
        }
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
