// Rows of fp32 weights, read four numbers at a time.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Numbers i .. i + 3 of a row of `count`, 0 beyond its end. `in_fours`: rows are aligned to 16 bytes, and
/// `count` is a multiple of 4.
__device__ inline float4 four_of_row(const float* row, std::int32_t i, std::int32_t count, bool in_fours) {
    if (in_fours) {
        return i < count ? *reinterpret_cast<const float4*>(row + i) : float4{};
    }
    return {i < count ? row[i] : 0.0f, i + 1 < count ? row[i + 1] : 0.0f, i + 2 < count ? row[i + 2] : 0.0f,
            i + 3 < count ? row[i + 3] : 0.0f};
}
__device__ inline bool rows_in_fours(const float* rows, std::int32_t count) {
    return count % 4 == 0 && reinterpret_cast<std::uintptr_t>(rows) % sizeof(float4) == 0;
}

/// sum + a . b, in one order.
__device__ inline float add_four(float4 a, float4 b, float sum) {
    return fmaf(a.w, b.w, fmaf(a.z, b.z, fmaf(a.y, b.y, fmaf(a.x, b.x, sum))));
}

/// Has the L2 cache read `count` numbers, by thread `thread` of `threads`.
__device__ inline void prefetch_weights(const float* from, std::int64_t count, int thread, int threads) {
    constexpr int line = 32;  // numbers of 128 bytes
    for (std::int64_t i = std::int64_t{thread} * line; i < count; i += std::int64_t{threads} * line) {
        ask_for_line(from + i);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
