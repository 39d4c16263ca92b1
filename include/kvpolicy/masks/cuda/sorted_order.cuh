// What is asked of keys that have been sorted: the order of equal sort keys, and the k-th best of a prefix.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/policies/cutoff.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Sorts order[0, length), stable; after(a, b): b must come first. For short runs.
template <class Index, class After>
__device__ inline void insertion_sort(Index* order, int length, const After& after) {
    for (int i = 1; i < length; ++i) {
        const Index moving = order[i];
        int j = i - 1;
        while (j >= 0 && after(order[j], moving)) {
            order[j + 1] = order[j];
            --j;
        }
        order[j + 1] = moving;
    }
}

/// Runs of equal sort keys up to this length are put right by one thread.
inline constexpr int short_tie = 32;

/// Puts runs of equal keys[0, count) right: order[] so that after(a, b) holds of no neighbors. By a block of
/// Threads; both arrays are shared memory. False where a run that is not in order is too long for that.
template <int Threads, class Index, class After>
__device__ __forceinline__ bool fix_short_ties(const std::uint32_t* keys, Index* order, int count,
                                               const After& after) {
    bool turned = false;
    bool too_long = false;
    for (int r = static_cast<int>(threadIdx.x); r + 1 < count; r += Threads) {
        const std::uint32_t key = keys[r];
        if (key != keys[r + 1] || !after(order[r], order[r + 1])) {
            continue;
        }
        int first = r;
        int last = r + 1;
        while (first > 0 && r - first < short_tie && keys[first - 1] == key) {
            --first;
        }
        while (last + 1 < count && last - r < short_tie && keys[last + 1] == key) {
            ++last;
        }
        turned = true;
        too_long = too_long || last - first + 1 > short_tie;
    }
    if (__syncthreads_or(too_long ? 1 : 0) != 0) {
        return false;
    }
    if (__syncthreads_or(turned ? 1 : 0) == 0) {
        return true;
    }
    for (int r = static_cast<int>(threadIdx.x); r + 1 < count; r += Threads) {
        const std::uint32_t key = keys[r];
        if (key != keys[r + 1] || (r > 0 && keys[r - 1] == key)) {
            continue;
        }
        int last = r + 1;
        while (last + 1 < count && last - r < short_tie && keys[last + 1] == key) {
            ++last;
        }
        // A longer run is in order, or this would have been given up.
        if (last - r + 1 <= short_tie) {
            insertion_sort(order + r, last - r + 1, after);
        }
    }
    __syncthreads();
    return true;
}

/// The rank of the k-th best key that is before `edge`, by one warp; there are k of them. order[0, Padded) is
/// shared memory, in ranks' order, 16-byte aligned, and what lies behind the last rank is not before `edge`.
template <int Padded>
__device__ inline std::int32_t kth_before(const std::uint16_t* order, std::uint16_t edge, std::int32_t k) {
    static_assert(Padded % 256 == 0);
    std::int32_t missing = k;
    for (int base = 0; base < Padded; base += 256) {
        const uint4 eight = reinterpret_cast<const uint4*>(order + base)[lane_id()];
        const std::uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
        unsigned found = 0;  // bit i: rank base + 8 * lane + i came before the edge
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            found |= static_cast<unsigned>((words[i] & 0xffffu) < edge) << (2 * i);
            found |= static_cast<unsigned>((words[i] >> 16) < edge) << (2 * i + 1);
        }
        const int mine = __popc(found);
        const int group = __reduce_add_sync(all_lanes, mine);
        if (group < missing) {
            missing -= group;
            continue;
        }
        const int through = warp_inclusive_sum(mine);
        const unsigned reached = __ballot_sync(all_lanes, through >= missing);
        const int lane = __ffs(static_cast<int>(reached)) - 1;
        int nth = missing - (through - mine);  // in the lane that has it
        int bit = 0;
        for (int i = 0; i < 8; ++i) {
            if ((found >> i & 1u) != 0u && --nth == 0) {
                bit = i;
            }
        }
        return base + 8 * lane + __shfl_sync(all_lanes, bit, lane);
    }
    return open_cutoff;  // not reached
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
