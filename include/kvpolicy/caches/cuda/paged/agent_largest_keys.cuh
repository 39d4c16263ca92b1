// The largest of many numbers, by one block, wherever they lie.
#pragma once

#include <kvpolicy/caches/cuda/paged/agent_admit.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/block_find_largest.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A number as an integer of the same order: -0 is 0, and a NaN comes before all others. No number becomes
/// ~0.
__device__ inline std::uint32_t key_of_rank(float x) {
    const std::uint32_t bits = __float_as_uint(x + 0.0f), sign = 0x80000000u;
    return x != x ? 0 : (bits & sign) != 0 ? ~bits : bits | sign;
}
__device__ inline std::uint64_t key_of_rank(double x) {
    const auto bits = static_cast<std::uint64_t>(__double_as_longlong(x + 0.0));
    constexpr std::uint64_t sign = std::uint64_t{1} << 63;
    return x != x ? 0 : (bits & sign) != 0 ? ~bits : bits | sign;
}

template <class Key>
struct largest_memory {
    std::int32_t counts[256];
    Key prefix;
    std::int32_t wanted;
};

/// Makes the `wanted` largest of `count` keys ~0, of equal ones the first; 1 <= wanted <= count. No other key
/// may be ~0 unless it is to be among them. By a block of admit_threads; the caller's keys are there for all
/// of it.
template <class Key>
__device__ void mark_largest(largest_memory<Key>& memory, admit_memory& sums, Key* keys, std::int32_t count,
                             std::int32_t wanted) {
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    static_assert(admit_threads == 256, "a thread a digit");
    Key prefix = 0, known = 0;  // digits found so far
    for (int shift = static_cast<int>(8 * sizeof(Key)) - 8; shift >= 0; shift -= 8) {
        memory.counts[thread] = 0;
        __syncthreads();
        for (std::int32_t i = thread; i < count; i += admit_threads) {
            const Key key = keys[i];
            if ((key & known) == prefix) {
                atomicAdd(memory.counts + static_cast<std::int32_t>(key >> shift & 255), 1);
            }
        }
        __syncthreads();
        if (warp_id() == 0) {
            choose_digit(memory, prefix, wanted, shift);
        }
        __syncthreads();
        prefix = memory.prefix;
        wanted = memory.wanted;
        known |= Key(255) << shift;
    }
    // Above the threshold all are taken, of those that equal it the first.
    running_sums(
        sums, count, [&](std::int32_t i) { return keys[i] == prefix ? 1 : 0; },
        [&](std::int32_t i, std::int32_t before) {
            if (keys[i] > prefix || (keys[i] == prefix && before < wanted)) {
                keys[i] = ~Key(0);
            }
        });
    __syncthreads();
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
