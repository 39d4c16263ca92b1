// Products that are rounded before they are used.
//
// A softmax subtracts a reference from logits. Where the reference is one of them, the largest, both must be
// the same numbers, bit by bit: a compiler that fuses the product of a logit with the subtraction leaves the
// product unrounded there, while the reference is a rounded one. At logits of 1e13 the two differ by 1e5.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// a * b, rounded before anything is added to it.
__device__ inline float rounded_product(float a, float b) { return __fmul_rn(a, b); }
__device__ inline double rounded_product(double a, double b) { return __dmul_rn(a, b); }

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
