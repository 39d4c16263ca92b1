// Sums over a block, in one order.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The sum over a block of `Threads`, in every thread. `shared` has a number for each warp; it may be the
/// last call's.
template <int Threads, class Number>
__device__ inline Number sum_over_block(Number x, Number* shared) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        x += __shfl_xor_sync(all_lanes, x, step);
    }
    __syncthreads();
    if (lane_id() == 0) {
        shared[warp_id()] = x;
    }
    __syncthreads();
    Number sum = 0;
    for (int w = 0; w < Threads / 32; ++w) {
        sum += shared[w];
    }
    return sum;
}

/// The largest number of a block, the same way.
template <int Threads, class Number>
__device__ inline Number max_over_block(Number x, Number* shared) {
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        const Number other = __shfl_xor_sync(all_lanes, x, step);
        x = other > x ? other : x;
    }
    __syncthreads();
    if (lane_id() == 0) {
        shared[warp_id()] = x;
    }
    __syncthreads();
    Number most = shared[0];
    for (int w = 1; w < Threads / 32; ++w) {
        most = shared[w] > most ? shared[w] : most;
    }
    return most;
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
