// Device memory of small programs.
#pragma once

#include <kvpolicy/core/view.hpp>

#include <cuda_runtime.h>

#include <cstddef>
#include <stdexcept>
#include <string>
#include <utility>

namespace train {

inline void cuda_ok(cudaError_t error, const char* call) {
    if (error != cudaSuccess) {
        throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error));
    }
}

struct OutOfDeviceMemory : std::runtime_error {
    using std::runtime_error::runtime_error;
};

/// `count` elements of device memory, not filled. May be moved, not copied. Freeing it waits for what the
/// device has to do.
template <class T>
class DeviceArray {
  public:
    DeviceArray() = default;
    explicit DeviceArray(std::size_t count) : count_(count) {
        if (count > 0) {
            const cudaError_t error = cudaMalloc(&data_, count * sizeof(T));
            if (error == cudaErrorMemoryAllocation) {
                static_cast<void>(cudaGetLastError());
                throw OutOfDeviceMemory("the device has no memory left for " +
                                        std::to_string(count * sizeof(T)) + " bytes");
            }
            cuda_ok(error, "cudaMalloc");
        }
    }
    DeviceArray(DeviceArray&& other) noexcept
        : data_(std::exchange(other.data_, nullptr)), count_(std::exchange(other.count_, 0)) {}
    DeviceArray& operator=(DeviceArray&& other) noexcept {
        std::swap(data_, other.data_);
        std::swap(count_, other.count_);
        return *this;
    }
    ~DeviceArray() { static_cast<void>(cudaFree(data_)); }

    [[nodiscard]] T* data() const { return data_; }
    [[nodiscard]] std::size_t size() const { return count_; }
    operator kvpolicy::workspace_view() const { return {data_, count_ * sizeof(T)}; }

    /// From and to pageable host memory; `put` may return before the copy has run, `get` may not.
    void put(const T* from, std::size_t at, std::size_t count, cudaStream_t stream) const {
        cuda_ok(cudaMemcpyAsync(data_ + at, from, count * sizeof(T), cudaMemcpyHostToDevice, stream),
                "cudaMemcpyAsync");
    }
    void get(T* to, std::size_t at, std::size_t count, cudaStream_t stream) const {
        cuda_ok(cudaMemcpyAsync(to, data_ + at, count * sizeof(T), cudaMemcpyDeviceToHost, stream),
                "cudaMemcpyAsync");
        cuda_ok(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
    }
    void clear(cudaStream_t stream) const {
        cuda_ok(cudaMemsetAsync(data_, 0, count_ * sizeof(T), stream), "cudaMemsetAsync");
    }

  private:
    T* data_ = nullptr;
    std::size_t count_ = 0;
};

/// A stream of its own.
class DeviceStream {
  public:
    DeviceStream() {
        cuda_ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    }
    DeviceStream(const DeviceStream&) = delete;
    DeviceStream& operator=(const DeviceStream&) = delete;
    ~DeviceStream() { static_cast<void>(cudaStreamDestroy(stream_)); }

    [[nodiscard]] cudaStream_t get() const { return stream_; }
    void wait() const { cuda_ok(cudaStreamSynchronize(stream_), "cudaStreamSynchronize"); }

  private:
    cudaStream_t stream_ = nullptr;
};

}  // namespace train
