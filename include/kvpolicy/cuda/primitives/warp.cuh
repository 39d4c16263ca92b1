// Sums and scans over a warp and over the warps of a block, for the few places where CUB would be more than
// is needed.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr unsigned all_lanes = 0xffffffffu;

__device__ inline int lane_id() { return static_cast<int>(threadIdx.x) % 32; }
__device__ inline int warp_id() { return static_cast<int>(threadIdx.x) / 32; }

/// The lanes before `lane`, as a mask.
__device__ inline unsigned lanes_before(int lane) { return (1u << lane) - 1u; }

__device__ inline int warp_inclusive_sum(int value) {
    const int lane = lane_id();
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(all_lanes, value, static_cast<unsigned>(step));
        if (lane >= step) {
            value += other;
        }
    }
    return value;
}

/// Of Count numbers in each lane the sums over the lanes: lane l gets Count / 32 of them, from l Count / 32
/// on, or where there are fewer than 32 number l Count / 32. Count is a power of two. Every sum adds up the
/// lanes in one order, whatever Count is.
template <int Count>
__device__ void sum_over_lanes(float (&x)[Count]) {
    int left = Count;
#pragma unroll
    for (int step = 16; step != 0; step /= 2) {
        left /= 2;
#pragma unroll
        for (int i = 0; i < Count / 2; ++i) {
            if (i < left) {
                const bool upper = (lane_id() & step) != 0;
                const float given = upper ? x[i] : x[i + left];
                x[i] = (upper ? x[i + left] : x[i]) + __shfl_xor_sync(all_lanes, given, step);
            }
        }
        if (left == 0) {
            x[0] += __shfl_xor_sync(all_lanes, x[0], step);
        }
    }
}

/// Whether all numbers of a row are finite, the same answer for all lanes.
template <class T>
__device__ inline bool finite_row(const T* row, std::int32_t dim) {
    bool finite = true;
    for (std::int32_t column = lane_id(); column < dim; column += 32) {
        finite = finite && fabsf(static_cast<float>(row[column])) < __int_as_float(0x7f800000);
    }
    return __all_sync(all_lanes, finite) != 0;
}

struct block_sum {
    int before;  // sum over the warps before this one
    int total;   // sum over all warps
};

/// From one number a warp in shared memory (after a barrier): the sum before this warp, and the whole.
template <int Warps>
__device__ inline block_sum sum_of_warps(const int* totals) {
    static_assert(Warps >= 1 && Warps <= 32);
    const int lane = lane_id();
    const int mine = lane < Warps ? totals[lane] : 0;
    const int inclusive = warp_inclusive_sum(mine);
    const int before = __shfl_sync(all_lanes, inclusive - mine, warp_id());
    return {before, __shfl_sync(all_lanes, inclusive, 31)};
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
