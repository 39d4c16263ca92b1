// Matrix products of a model around its cache: each layer reads weights of its own, so that a step finds cold
// rows, and starts while other work drains.
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/scorers/cuda_predictor.cuh>

#include "cache_inputs.cuh"
#include "cold.cuh"
#include "lt_handle.cuh"

#include <cstdint>

namespace bench {

/// One product a layer, of [batch, width] by [width, width] in bf16.
class Products {
  public:
    static constexpr std::int64_t width = 4096;
    Products(std::int32_t layers, std::int32_t batch)
        : batch_(batch), weights_(layers * width * width, 5), x_(batch * width, 6), y_(batch * width, 7) {}
    /// Launches the product of `layer`.
    void operator()(const kvpolicy::cuda& ctx, std::int32_t layer) const {
        namespace cb = kvpolicy::cuda_backend;
        cb::multiply(ctx, lt_.handle, cb::matrix_of(x_.memory.data(), batch_, width, width), false,
                     cb::matrix_of(weights_.memory.data() + layer * width * width, width, width, width), true,
                     cb::matrix_of(y_.memory.data(), batch_, width, width), false, workspace_.data());
    }

  private:
    std::int32_t batch_;
    lt_handle lt_;
    Numbers weights_, x_, y_;
    buffer<unsigned char> workspace_{static_cast<std::int64_t>(kvpolicy::cuda_backend::cublaslt_bytes)};
};

}  // namespace bench
