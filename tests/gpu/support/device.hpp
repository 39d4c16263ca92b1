// Device memory for tests: allocated, filled and read back with every call checked.
#pragma once

#include <kvpolicy/core/view.hpp>

#include <cuda_runtime.h>
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <vector>

namespace test {

inline void ok(cudaError_t error) {
    if (error != cudaSuccess) {
        FAIL(cudaGetErrorName(error), ": ", cudaGetErrorString(error));
    }
}

/// Device memory of `count` elements, poisoned with 0xa5 unless it is copied from the host.
/// KVPOLICY_TEST_NO_POISON in the environment leaves it as it is, for a tool that looks for reads of memory
/// that nobody wrote.
template <class T>
class Device {
  public:
    explicit Device(std::size_t count) : count_(count) {
        ok(cudaMalloc(&data_, bytes() == 0 ? 1 : bytes()));
        static const bool poison = std::getenv("KVPOLICY_TEST_NO_POISON") == nullptr;
        if (poison) {
            ok(cudaMemset(data_, 0xa5, bytes()));
        }
    }
    explicit Device(const std::vector<T>& values) : count_(values.size()) {
        ok(cudaMalloc(&data_, bytes() == 0 ? 1 : bytes()));
        ok(cudaMemcpy(data_, values.data(), bytes(), cudaMemcpyHostToDevice));
    }
    Device(const Device&) = delete;
    Device& operator=(const Device&) = delete;
    ~Device() { static_cast<void>(cudaFree(data_)); }

    [[nodiscard]] T* data() const { return data_; }
    [[nodiscard]] std::size_t size() const { return count_; }
    [[nodiscard]] std::size_t bytes() const { return count_ * sizeof(T); }
    [[nodiscard]] std::vector<T> read() const {
        std::vector<T> values(count_);
        ok(cudaDeviceSynchronize());
        ok(cudaMemcpy(values.data(), data_, bytes(), cudaMemcpyDeviceToHost));
        return values;
    }
    operator kvpolicy::workspace_view() const { return {data_, bytes()}; }

  private:
    T* data_ = nullptr;
    std::size_t count_;
};

}  // namespace test
