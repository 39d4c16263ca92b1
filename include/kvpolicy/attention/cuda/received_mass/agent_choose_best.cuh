// The keys of one head that keep their places when an observed policy chooses, by one block: the k with the
// largest values, ties to the older key. A radix selection, first of values, then, where equal values must
// part, of positions.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/cuda/primitives/block_find_largest.cuh>
#include <kvpolicy/cuda/primitives/running_sums.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/masks/cuda/priority_keys.cuh>
#include <kvpolicy/policies/parameters.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int choice_threads = 1024;

/// Numbers that the block shares.
struct choice_memory {
    find_memory<std::uint64_t, choice_threads> digits;
    sums_memory<choice_threads> sums;
};

/// running_sums, after which all threads may read what the visits wrote.
template <class Number, class Visit>
__device__ int choice_sums(choice_memory& memory, std::int32_t count, const Number& number,
                           const Visit& visit) {
    const int total = running_sums(memory.sums, count, number, visit);
    __syncthreads();
    return total;
}
template <class Number>
__device__ int choice_total(choice_memory& memory, std::int32_t count, const Number& number) {
    int mine = 0;
    for (auto x = static_cast<std::int32_t>(threadIdx.x); x < count; x += choice_threads) {
        mine += number(x);
    }
    return choice_sums(
        memory, choice_threads, [&](std::int32_t) { return mine; }, [](std::int32_t, int) {});
}

/// What a choice came to: a key stays where its value is above the threshold, or equals it and the key is
/// old enough.
struct chosen_keys {
    std::uint32_t number = 0;  // of the threshold
    position_t last = -1;      // the youngest key that stays of those with this value
    bool all = true;

    __device__ bool keeps(std::uint32_t of, position_t position) const {
        return all || of > number || (of == number && position <= last);
    }
};

/// A value as a number of the same order: larger is better, a NaN the worst.
__device__ inline std::uint32_t choice_number(float value) { return ~descending_key(value); }

/// Chooses `budget` of the keys x = 0 .. count - 1 for which keys.competes(x); keys.value(x) and
/// keys.position(x) rank them. All threads get the answer.
template <class Keys>
__device__ chosen_keys choose_best(choice_memory& memory, std::int32_t count, std::int32_t budget,
                                   const Keys& keys) {
    const int competing =
        choice_total(memory, count, [&](std::int32_t x) { return keys.competes(x) ? 1 : 0; });
    if (competing <= budget) {
        return {};
    }
    if (budget == 0) {
        return {0xffffffffu, -1, false};
    }
    chosen_keys chosen{0, 0x7fffffffffffffff, false};
    std::uint64_t prefix = 0, known = 0;
    std::int32_t wanted = budget;
    constexpr int value_digits = 4, position_digits = 8;
    for (int digit = 0; digit < value_digits + position_digits; ++digit) {
        const bool of_value = digit < value_digits;
        const int shift = of_value ? 24 - 8 * digit : 56 - 8 * (digit - value_digits);
        if (digit == value_digits) {
            chosen.number = static_cast<std::uint32_t>(prefix);
            prefix = known = 0;
        }
        for (int i = static_cast<int>(threadIdx.x); i < 256; i += choice_threads) {
            memory.digits.counts[i] = 0;
        }
        __syncthreads();
        for (std::int32_t first = 0; first < count; first += choice_threads) {
            const std::int32_t x = first + static_cast<std::int32_t>(threadIdx.x);
            bool counts = x < count && keys.competes(x);
            std::uint64_t number = 0;
            if (counts) {
                const std::uint32_t value = choice_number(keys.value(x));
                // Of equal values the oldest: the largest complement of the position.
                number = of_value ? value : ~static_cast<std::uint64_t>(keys.position(x));
                counts = (number & known) == prefix && (of_value || value == chosen.number);
            }
            count_digit(memory.digits.counts, static_cast<int>(number >> shift & 255), counts);
        }
        __syncthreads();
        if (warp_id() == 0) {
            choose_digit(memory.digits, prefix, wanted, shift);
        }
        __syncthreads();
        prefix = memory.digits.prefix;
        wanted = memory.digits.wanted;
        known |= std::uint64_t{255} << shift;
        const bool all = memory.digits.counts[prefix >> shift & 255] == wanted;
        __syncthreads();
        if (all && of_value && digit == value_digits - 1) {
            chosen.number = static_cast<std::uint32_t>(prefix);
            return chosen;
        }
    }
    chosen.last = static_cast<position_t>(~prefix);
    return chosen;
}

/// The value by which key x of [first, end) is ranked, keys being neighbors in this order: its score, or the
/// mean or the largest of `pool` scores around it, with 0 beyond the ends.
template <class Score>
__device__ float pooled_score(const Observation& seen, std::int32_t first, std::int32_t end, std::int32_t x,
                              const Score& score) {
    if (seen.pool == 1) {
        return score(x);
    }
    const std::int32_t reach = seen.pool / 2;
    const std::int32_t from = x - first < reach ? first : x - reach;
    const std::int32_t to = end - x <= reach ? end : x + reach + 1;
    double sum = 0.0, largest = 0.0;
    for (std::int32_t y = from; y < to; ++y) {
        const auto one = static_cast<double>(score(y));
        sum += one;
        largest = one > largest ? one : largest;
    }
    return static_cast<float>(seen.pool_largest ? largest : sum / seen.pool);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
