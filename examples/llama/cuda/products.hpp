// Products with the model's matrices, by cuBLASLt.
#pragma once

#include "../safetensors.hpp"
#include "device.hpp"

#include <cublasLt.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <tuple>

namespace llama {

/// A weight [rows, cols] = [out, in] in device memory; several may lie together as one.
struct DeviceMatrix {
    int rows = 0;
    int cols = 0;
    DType type = DType::f32;
    DeviceArray<std::byte> values;
};

/// y [count, w.rows] = x [count, w.cols] w^T, or y += that. x is of the weight's type, y and sums are fp32,
/// and fp32 products are those of fp32 (no TF32). For one stream at a time: all products share a workspace.
class Products {
  public:
    Products();
    Products(const Products&) = delete;
    Products& operator=(const Products&) = delete;
    ~Products();

    /// Enqueues; may be captured. A shape that comes for the first time is looked up on the host first.
    void multiply(cudaStream_t stream, const void* x, int count, const DeviceMatrix& w, float* y,
                  bool add = false);

  private:
    struct Plan;
    using Key = std::tuple<int, int, int, DType, bool>;

    const Plan& plan(const Key& key);

    static constexpr std::size_t workspace_bytes = std::size_t{32} << 20;  // what Hopper's kernels want

    cublasLtHandle_t handle_ = nullptr;
    DeviceArray<std::byte> workspace_;
    std::map<Key, Plan> plans_;
};

}  // namespace llama
