// A warp as the groups of threads that caches/top_k_slots.hpp has its bodies for.
#pragma once

#include <kvpolicy/caches/top_k_slots.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A warp as a group of detail's bodies.
struct warp_group {
    __device__ static std::int32_t rank() { return lane_id(); }
    __device__ static std::int32_t size() { return 32; }
    /// Values as integers of the same order, NaN first; the last of equal ones by position. Mostly the upper
    /// half decides.
    __device__ static detail::ranked_slot worst(const detail::ranked_slot& mine) {
        const bool there = mine.slot >= 0;
        const auto bits = static_cast<std::uint64_t>(__double_as_longlong(mine.value + 0.0));  // -0 is 0
        constexpr std::uint64_t sign = std::uint64_t{1} << 63;
        const std::uint64_t ordered = mine.value != mine.value ? 0 : (bits & sign) != 0 ? ~bits : bits | sign;
        const std::uint64_t key = there ? ordered : ~std::uint64_t{0};
        bool least = only_least(static_cast<std::uint32_t>(key >> 32), true);
        unsigned votes = __ballot_sync(all_lanes, least);
        if ((votes & (votes - 1)) != 0) {
            const auto position = static_cast<std::uint64_t>(mine.position);
            least = only_least(static_cast<std::uint32_t>(key), least);
            least = only_least(~static_cast<std::uint32_t>(position >> 32), least);
            least = only_least(~static_cast<std::uint32_t>(position), least);
            votes = __ballot_sync(all_lanes, least);
        }
        const int lane = __ffs(static_cast<int>(votes)) - 1;
        return {__shfl_sync(all_lanes, mine.value, lane),
                static_cast<position_t>(__shfl_sync(all_lanes, static_cast<long long>(mine.position), lane)),
                __shfl_sync(all_lanes, mine.slot, lane)};
    }
    __device__ static void sync() { __syncwarp(); }

  private:
    /// Whether this lane is one of those that count and have the least number.
    __device__ static bool only_least(std::uint32_t number, bool counts) {
        return counts & (__reduce_min_sync(all_lanes, counts ? number : ~0u) == number);
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
