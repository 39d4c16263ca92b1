// The library's calls that do not depend on the scorer: compiled once, in device_calls.cu. And the small
// kernels between them.
#pragma once

#include <kvpolicy/attention/future_mass.hpp>
#include <kvpolicy/losses/boundary.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/metrics/recall.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/decay.hpp>

#include <cuda_runtime.h>

#include <cstdint>

namespace train {

using DevicePolicy =
    kvpolicy::Policy<kvpolicy::Sink<>, kvpolicy::Window<>, kvpolicy::TopKBudget<>, kvpolicy::Decay<1>>;
/// Targets of larger heads take the library's plain kernel.
using TargetDims = kvpolicy::head_dims<64, 128>;

/// LossSums in device memory, and the decisions of the present step.
struct DeviceSums {
    double loss;
    std::int64_t count, kept, agreed, steps, first_empty, step_count;
};

/// Logarithms of the least and the largest gamma.
struct DecayRange {
    double low, high;
};

/// After the backward pass of a sequence: its value is added to the sums, and d_log_gamma [heads], through
/// alpha's sigmoid, to alpha's gradient; d_log_gamma is 0 again.
void enqueue_visit(cudaStream_t stream, DeviceSums* sums, const kvpolicy::BoundaryValue* value,
                   std::int32_t heads, DecayRange range, const float* alpha, double* d_log_gamma,
                   float* alpha_gradient);
/// Counts a step.
void enqueue_step_end(cudaStream_t stream, DeviceSums* sums, std::int64_t number);
/// log_gamma[h] of alpha[h], eq. 21.
void enqueue_log_gamma(cudaStream_t stream, DecayRange range, const float* alpha, std::int32_t heads,
                       float* log_gamma);

/// Throws std::runtime_error where no device can be used.
void check_device();

}  // namespace train
