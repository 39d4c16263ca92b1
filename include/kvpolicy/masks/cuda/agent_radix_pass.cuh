// One pass of a radix sort of 8 bits per digit, by one block, on arrays in device memory.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/masks/cuda/sorted_keys.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// One block's memory for radix passes of 8 bits.
struct radix_shared {
    static constexpr int warps = device_threads / 32;

    std::int32_t count[256];
    std::int32_t offset[256];
    std::uint16_t of_warp[warps][256];
    std::uint64_t varies;

    /// How often every digit is among keys[0, length).
    __device__ void count_digits(const std::uint64_t* keys, std::int32_t length, int shift) {
        const int thread = static_cast<int>(threadIdx.x);
        count[thread] = 0;
        __syncthreads();
        for (std::int32_t i = thread; i < length; i += device_threads) {
            atomicAdd(&count[keys[i] >> shift & 0xffu], 1);
        }
        __syncthreads();
    }

    /// offset[digit] = how many of `count` are smaller.
    __device__ void sum_digits() {
        if (warp_id() == 0) {
            std::int32_t before = 0;
            for (int digit = lane_id(); digit < 256; digit += 32) {
                const int through = warp_inclusive_sum(count[digit]);
                offset[digit] = before + through - count[digit];
                before += __shfl_sync(all_lanes, through, 31);
            }
        }
        __syncthreads();
    }

    /// Moves keys[0, length) and their tokens to where `offset` says, equal digits in their order. Thread d
    /// counts digit d.
    __device__ void scatter(const std::uint64_t* keys, const std::int32_t* tokens, std::uint64_t* to_keys,
                            std::int32_t* to_tokens, std::int32_t length, int shift) {
        static_assert(device_threads == 256, "one thread a digit");
        const int thread = static_cast<int>(threadIdx.x);
        const int lane = lane_id();
        const int warp = warp_id();
        for (std::int32_t base = 0; base < length; base += device_threads) {
            for (int w = 0; w < warps; ++w) {
                of_warp[w][thread] = 0;
            }
            __syncthreads();
            const std::int32_t i = base + thread;
            const bool inside = i < length;
            const std::uint64_t code = inside ? keys[i] : 0;
            // Lanes beyond the run match nobody's digit.
            const int digit = inside ? static_cast<int>(code >> shift & 0xffu) : 256;
            const unsigned same = __match_any_sync(all_lanes, digit);
            const int in_warp = __popc(same & lanes_before(lane));
            if (inside && in_warp == 0) {
                of_warp[warp][digit] = static_cast<std::uint16_t>(__popc(same));
            }
            __syncthreads();
            std::int32_t next = offset[thread];
            for (int w = 0; w < warps; ++w) {
                const std::int32_t here = of_warp[w][thread];
                of_warp[w][thread] = static_cast<std::uint16_t>(next - offset[thread]);
                next += here;
            }
            __syncthreads();
            if (inside) {
                const std::int32_t to = offset[digit] + of_warp[warp][digit] + in_warp;
                to_keys[to] = code;
                to_tokens[to] = tokens[i];
            }
            __syncthreads();
            offset[thread] = next;
            __syncthreads();
        }
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
