// The body of a Buffer in device memory.
#pragma once

#include <kvpolicy/core/buffer.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/cuda/launch.cuh>

#include <cstddef>
#include <cstdint>

namespace kvpolicy {

inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline void* allocate_device(std::size_t bytes, std::int32_t number) {
    const device_scope device(cuda{nullptr, number});
    void* memory = nullptr;
    check(cudaMalloc(&memory, bytes), "cudaMalloc");
    return memory;
}
inline void release_device(void* memory, std::int32_t number) noexcept {
    int before = 0;
    const bool known = cudaGetDevice(&before) == cudaSuccess;
    static_cast<void>(cudaSetDevice(number));
    static_cast<void>(cudaFree(memory));
    if (known) {
        static_cast<void>(cudaSetDevice(before));
    }
}
inline constexpr detail::memory_kind device_memory{allocate_device, release_device};

/// The number of the context's device.
inline std::int32_t number_of(const cuda& ctx) { return device_scope(ctx).number(); }

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN

template <class Build>
Buffer::Buffer(const cuda& ctx, std::size_t bytes)
    : Buffer(cuda_backend::device_memory, cuda_backend::number_of(ctx), bytes) {}

}  // namespace kvpolicy
