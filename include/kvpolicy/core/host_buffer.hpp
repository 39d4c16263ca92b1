// HostBuffer: memory to lend to a cache or a call on the host, for programs that have no allocator of their own.
#pragma once

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/core/workspace.hpp>

#include <cstddef>
#include <memory>
#include <new>
#include <utility>

namespace kvpolicy {

/// Owns `size()` bytes, aligned to 64. The library never makes one by itself: a cache says bytes().total(), a call says
/// its ..._workspace_bytes(), and the caller lends a HostBuffer or memory of any other origin.
///
///     kvpolicy::HostBuffer memory{cache.bytes().total()};
///     cache.bind(on, memory);
///     kvpolicy::HostBuffer workspace{kvpolicy::cache_workspace_bytes(on, cache.ref(0), 1, 1)};
///     kvpolicy::step(on, cache.layer(layer), batch, q, k, v, out, workspace);
///
/// The bytes are not written, as a std::vector's would be: a cache's rows cost physical memory when they come into use, on
/// the memory node of the thread that writes them. Movable, and data() stays where it is; what it is attached to must not
/// outlive it.
class HostBuffer {
  public:
    static constexpr std::size_t alignment = 64;

    HostBuffer() = default;
    /// 0 bytes are allowed. Refuses more than the system gives.
    explicit HostBuffer(std::size_t bytes) : memory_(allocate(bytes)), size_(bytes) {}

    // A moved-from buffer is empty.
    HostBuffer(HostBuffer&& other) noexcept : memory_(std::move(other.memory_)), size_(other.size_) {
        other.size_ = 0;
    }
    HostBuffer& operator=(HostBuffer&& other) noexcept {
        memory_ = std::move(other.memory_);
        size_ = other.size_;
        other.size_ = 0;
        return *this;
    }

    /// Makes room for at least `bytes`: does nothing where there is, and gives up what the buffer holds otherwise. For a
    /// workspace whose chunks differ in length; not for memory that is attached at the moment. Refuses as the constructor, with
    /// the buffer as it was.
    void grow(std::size_t bytes) {
        if (bytes > size_) {
            *this = HostBuffer(bytes);
        }
    }

    [[nodiscard]] void* data() noexcept { return memory_.get(); }
    [[nodiscard]] std::size_t size() const noexcept { return size_; }

    /// What calls take. Not of a temporary, which would be gone before a view that is kept.
    operator workspace_view() & noexcept { return {data(), size_}; }

  private:
    struct release {
        void operator()(std::byte* memory) const noexcept {
            ::operator delete (memory, std::align_val_t{alignment});
        }
    };

    static std::byte* allocate(std::size_t bytes) {
        if (bytes == 0) {
            return nullptr;
        }
        // More than half the address space is not even asked for: sanitizers end the process over such a request.
        void* memory = bytes > static_cast<std::size_t>(-1) / 2
                           ? nullptr
                           : ::operator new (bytes, std::align_val_t{alignment}, std::nothrow);
        detail::require(memory != nullptr, "bytes of a HostBuffer", bytes, "what the system has free");
        return static_cast<std::byte*>(memory);
    }

    std::unique_ptr<std::byte, release> memory_;
    std::size_t size_ = 0;
};

}  // namespace kvpolicy
