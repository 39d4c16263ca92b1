// The backend of the recipes that run on either: the host; or the GPU, where nvcc compiles them (nvcc
// -x cu recipe.cpp).
//
// Recipes look at what a call wrote, so on the GPU their memory is one that both can read. An engine has
// device memory and copies (engine_contiguous.cu), and looks into a cache by a snapshot.
#pragma once

#include <cstddef>
#include <new>
#include <vector>

#if defined(__CUDACC__)
#include <kvpolicy/cuda.cuh>  // the bodies of the calls, for the one file that instantiates them

#include <cstdio>
#include <cstdlib>
#endif
#include <kvpolicy/core/buffer.hpp>
#include <kvpolicy/core/context.hpp>

namespace backend {

#if defined(__CUDACC__)

using context = kvpolicy::cuda;
inline bool missing() {
    int devices = 0;
    const bool none = cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0;
    if (none) {
        std::printf("there is no device\n");
    }
    return none;
}
/// Calls return before their work is done. Before the program reads what they write, or
/// writes what they read:
inline void wait(const context& ctx) {
    if (const cudaError_t error = cudaStreamSynchronize(ctx.stream); error != cudaSuccess) {
        std::printf("%s\n", cudaGetErrorString(error));
        std::exit(1);
    }
}

template <class T>
struct allocator {
    using value_type = T;
    T* allocate(std::size_t count) {
        void* memory = nullptr;
        if (cudaMallocManaged(&memory, count * sizeof(T)) != cudaSuccess) {
            throw std::bad_alloc();
        }
        return static_cast<T*>(memory);
    }
    void deallocate(T* memory, std::size_t) noexcept { cudaFree(memory); }
    bool operator==(const allocator&) const = default;
};
template <class T>
using array = std::vector<T, allocator<T>>;

/// Memory for a cache or a call.
class memory {
  public:
    memory(const context& /*ctx*/, std::size_t bytes) : bytes_(bytes) {}
    void* data() { return bytes_.data(); }
    std::size_t size() const { return bytes_.size(); }
    operator kvpolicy::workspace_view() & { return {data(), size()}; }

  private:
    array<unsigned char> bytes_;
};

#else

using context = kvpolicy::host;
inline bool missing() { return false; }
inline void wait(const context&) {}  // calls are done when they return
template <class T>
using array = std::vector<T>;
using memory = kvpolicy::Buffer;

#endif

}  // namespace backend
