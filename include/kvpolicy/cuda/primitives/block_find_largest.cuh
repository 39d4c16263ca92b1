// The largest of many keys in the order of their places, by one block: a look at all keys for every digit,
// and one to name them.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class Key, int Threads>
struct find_memory {
    static constexpr int digit_bits = 8, digits = 1 << digit_bits;
    std::int32_t counts[digits];
    int larger[2][Threads / 32], equal[2][Threads / 32];
    Key prefix;
    std::int32_t wanted;
};

/// Counts a digit of every lane that `has` one: one addition for those of a warp that have the same, as most
/// have at first.
__device__ inline void count_digit(std::int32_t* counts, int digit, bool has) {
    const unsigned lanes = __ballot_sync(all_lanes, has);
    if (has) {
        const unsigned same = __match_any_sync(lanes, digit);
        if ((same & lanes_before(lane_id())) == 0) {
            atomicAdd(counts + digit, __popc(same));
        }
    }
}

/// By one warp, from how often keys that begin with `prefix` have each digit at `shift`: memory.prefix
/// becomes how the `wanted`-th largest of them begins, memory.wanted which one of those with that digit it
/// is.
template <class Memory, class Key>
__device__ inline void choose_digit(Memory& memory, Key prefix, std::int32_t wanted, int shift) {
    // A lane has eight digits, the first lane the largest.
    std::int32_t mine = 0;
    for (int i = 0; i < 8; ++i) {
        mine += memory.counts[255 - 8 * lane_id() - i];
    }
    std::int32_t before = warp_inclusive_sum(mine) - mine;
    if (before < wanted && wanted <= before + mine) {
        int digit = 255 - 8 * lane_id();
        for (; before + memory.counts[digit] < wanted; --digit) {
            before += memory.counts[digit];
        }
        memory.prefix = prefix | static_cast<Key>(digit) << shift;
        memory.wanted = wanted - before;
    }
}

/// visit(place, rank among the chosen by place) for the `wanted` largest of `count` keys, of equal ones the
/// first; 1 <= wanted <= count. By a block of `Threads`; the keys are not changed.
template <int Threads, class Key, class Visit>
__device__ void find_largest(find_memory<Key, Threads>& memory, const Key* keys, std::int32_t count,
                             std::int32_t wanted, const Visit& visit) {
    using Memory = find_memory<Key, Threads>;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    constexpr int each = 8;     // keys of a thread and turn, asked for at once
    Key prefix = 0, known = 0;  // digits found so far, the first ones
    for (int shift = static_cast<int>(8 * sizeof(Key)) - Memory::digit_bits; shift >= 0;
         shift -= Memory::digit_bits) {
        for (std::int32_t i = thread; i < Memory::digits; i += Threads) {
            memory.counts[i] = 0;
        }
        __syncthreads();
        for (std::int32_t first = 0; first < count; first += each * Threads) {
            Key some[each];
#pragma unroll
            for (int i = 0; i < each; ++i) {
                const std::int32_t x = first + i * Threads + thread;
                some[i] = x < count ? keys[x] : Key(0);
            }
#pragma unroll
            for (int i = 0; i < each; ++i) {
                count_digit(memory.counts, static_cast<int>(some[i] >> shift & (Memory::digits - 1)),
                            first + i * Threads + thread < count && (some[i] & known) == prefix);
            }
        }
        __syncthreads();
        if (warp_id() == 0) {
            choose_digit(memory, prefix, wanted, shift);
        }
        __syncthreads();
        prefix = memory.prefix;
        wanted = memory.wanted;  // of those that begin so
        known |= static_cast<Key>(Memory::digits - 1) << shift;
    }
    // Above the threshold all are taken, of those that equal it the first. A thread has `each` neighbors.
    int larger = 0, equal = 0;  // before this turn
    for (std::int32_t first = 0, turn = 0; first < count; first += each * Threads, turn ^= 1) {
        const std::int32_t place = first + each * thread;
        Key mine[each];
        int of_larger = 0, of_equal = 0;
#pragma unroll
        for (int i = 0; i < each; ++i) {
            mine[i] = place + i < count ? keys[place + i] : Key(0);
            of_larger += place + i < count && mine[i] > prefix ? 1 : 0;
            of_equal += place + i < count && mine[i] == prefix ? 1 : 0;
        }
        const int larger_through = warp_inclusive_sum(of_larger),
                  equal_through = warp_inclusive_sum(of_equal);
        if (lane_id() == 31) {
            memory.larger[turn][warp_id()] = larger_through;
            memory.equal[turn][warp_id()] = equal_through;
        }
        __syncthreads();  // two arrays in turn: nobody writes one that others still read
        const block_sum all_larger = sum_of_warps<Threads / 32>(memory.larger[turn]),
                        all_equal = sum_of_warps<Threads / 32>(memory.equal[turn]);
        int larger_before = larger + all_larger.before + larger_through - of_larger,
            equal_before = equal + all_equal.before + equal_through - of_equal;
#pragma unroll
        for (int i = 0; i < each; ++i) {
            if (place + i < count && mine[i] >= prefix) {
                const bool is_larger = mine[i] > prefix;
                if (is_larger || equal_before < wanted) {
                    visit(place + i, larger_before + (equal_before < wanted ? equal_before : wanted));
                }
                larger_before += is_larger ? 1 : 0;
                equal_before += is_larger ? 0 : 1;
            }
        }
        larger += all_larger.total;
        equal += all_equal.total;
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
