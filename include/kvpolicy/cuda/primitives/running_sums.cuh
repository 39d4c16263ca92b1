// Running sums over a block's threads, of any count of numbers.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Shared memory of a block of `Threads`.
template <int Threads>
struct sums_memory {
    int totals[2][Threads / 32];
};

/// Running sums of numbers x = 0 .. count - 1: visit(x, sum before x) for all, by the threads of the block.
/// Returns the sum of all. Numbers of a turn of `Threads` are taken before its first visit.
template <int Threads, class Number, class Visit>
__device__ int running_sums(sums_memory<Threads>& memory, std::int32_t count, const Number& number,
                            const Visit& visit) {
    int before = 0;
    __syncthreads();
    for (std::int32_t first = 0, turn = 0; first < count; first += Threads, turn ^= 1) {
        const std::int32_t x = first + static_cast<std::int32_t>(threadIdx.x);
        const int mine = x < count ? number(x) : 0, through = warp_inclusive_sum(mine);
        if (lane_id() == 31) {
            memory.totals[turn][warp_id()] = through;
        }
        __syncthreads();  // two arrays in turn: no warp writes the one that others still read
        const block_sum of_block = sum_of_warps<Threads / 32>(memory.totals[turn]);
        if (x < count) {
            visit(x, before + of_block.before + through - mine);
        }
        before += of_block.total;
    }
    return before;
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
