// Buffer: memory for a cache or a call, for programs that have no allocator of their own.
#pragma once

#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/core/workspace.hpp>
#if defined(__CUDACC__)
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#endif

#include <cstddef>
#include <cstdint>
#include <new>
#include <utility>

namespace kvpolicy {

namespace detail {

/// Where the bytes of a Buffer come from. A table of functions, so that Buffer has one layout under every
/// compiler and a program compiled without CUDA can own, move and free device memory.
struct memory_kind {
    /// `bytes` > 0 of device `device`; refuses more than the system has.
    void* (*allocate)(std::size_t bytes, std::int32_t device);
    void (*release)(void* memory, std::int32_t device) noexcept;
};

inline void* allocate_host(std::size_t bytes, std::int32_t /*device*/) {
    // More than half the address space is not even asked for: sanitizers end the process over such a request.
    void* memory = bytes > static_cast<std::size_t>(-1) / 2
                       ? nullptr
                       : ::operator new (bytes, std::align_val_t{alignment}, std::nothrow);
    require(memory != nullptr, "bytes of a Buffer", bytes, "what the system has free");
    return memory;
}
inline void release_host(void* memory, std::int32_t /*device*/) noexcept {
    ::operator delete (memory, std::align_val_t{alignment});
}
inline constexpr memory_kind host_memory{allocate_host, release_host};

}  // namespace detail

/// Owns `size()` bytes of the context's memory: of the host, aligned to 64, or of the context's GPU
/// (cudaMalloc). The library never makes one by itself: a cache says bytes(), a call says its
/// ..._workspace_bytes(), and the caller gives a Buffer or memory of any other origin.
///
///     kvpolicy::Buffer memory{ctx, cache.bytes()};
///     kvpolicy::Buffer workspace{ctx, cache.workspace_bytes(ctx, {.batch = 1, .tokens = 1})};
///     cache.bind(ctx, memory);
///     kvpolicy::step(ctx, cache.layer(layer), cache.nhd(q, k, v, out), workspace);
///
/// The bytes are not written: a cache's rows on the host cost physical memory when they come into use, on the
/// memory node of the thread that writes them. Movable, and data() stays where it is. A cache that uses it
/// must not outlive it. The context may go before the buffer does. Freeing device memory waits for the GPU,
/// so a captured graph must not outlive its buffers.
class Buffer {
  public:
    static constexpr std::size_t alignment = 64;

    /// Without bytes; grow() takes host memory.
    Buffer() = default;
    /// 0 bytes are allowed. Refuses more than the system has free.
    Buffer(const host& /*ctx*/, std::size_t bytes) : Buffer(detail::host_memory, -1, bytes) {}
#if defined(__CUDACC__)
    /// The same in memory of the context's GPU (kvpolicy/cuda.cuh has the body). Failing CUDA calls throw
    /// kvpolicy::cuda_error.
    template <class Build = cuda_build>
    Buffer(const cuda& ctx, std::size_t bytes);
#endif

    Buffer(const Buffer&) = delete;
    Buffer& operator=(const Buffer&) = delete;
    // A moved-from buffer is empty.
    Buffer(Buffer&& other) noexcept
        : kind_(other.kind_),
          device_(other.device_),
          memory_(std::exchange(other.memory_, nullptr)),
          size_(std::exchange(other.size_, 0)) {}
    Buffer& operator=(Buffer&& other) noexcept {
        if (this != &other) {
            release();
            kind_ = other.kind_;
            device_ = other.device_;
            memory_ = std::exchange(other.memory_, nullptr);
            size_ = std::exchange(other.size_, 0);
        }
        return *this;
    }
    ~Buffer() { release(); }

    /// Grows the buffer to at least `bytes`, in the same kind of memory. A buffer that is large enough stays
    /// as it is; otherwise its contents are dropped. For a workspace whose chunks differ in length; not for
    /// memory that is bound at the moment. Refuses as the constructor, with the buffer as it was.
    void grow(std::size_t bytes) {
        if (bytes > size_) {
            *this = Buffer(*kind_, device_, bytes);
        }
    }

    [[nodiscard]] void* data() noexcept { return memory_; }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }

    /// The view that calls take. Not of a temporary, since the view would outlive it.
    operator workspace_view() & noexcept { return {data(), size_}; }

  private:
    Buffer(const detail::memory_kind& kind, std::int32_t device, std::size_t bytes)
        : kind_(&kind),
          device_(device),
          memory_(bytes == 0 ? nullptr : kind.allocate(bytes, device)),
          size_(bytes) {}
    void release() noexcept {
        if (memory_ != nullptr) {
            kind_->release(memory_, device_);
        }
    }

    const detail::memory_kind* kind_ = &detail::host_memory;
    std::int32_t device_ = -1;  // the GPU's number, for device memory
    void* memory_ = nullptr;
    std::size_t size_ = 0;
};

}  // namespace kvpolicy
