// Keys whose order depends on the query (decay steps n > 1), by class: two keys whose positions are equal mod
// n age at the same queries, so the real numbers score + age * log gamma keep their order within a class.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/masks/cuda/priority_keys.cuh>
#include <kvpolicy/policies/parameters.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Sizes of a block that ranks by class.
inline constexpr int decayed_round_threads = 512, decayed_round_items = 12;
inline constexpr std::int32_t decayed_round_keys = decayed_round_threads * decayed_round_items;

/// The largest decay step that is ranked by class.
inline constexpr std::int32_t max_decay_classes = 1024;
/// The largest distance of two keys, and the largest window, that are ranked by class: ages stay below
/// rebase_limit, so age * log gamma is exact.
inline constexpr std::int32_t max_decay_distance = 1 << 28;

/// What a key's value depends on besides its class.
struct decayed_key {
    float score;
    std::int32_t period;  // its position / n
};

/// Where a relative position is: class and period.
struct decay_point {
    std::int32_t period;
    std::int32_t phase;  // position % n
};

/// A score's priority without rounding, high + low, and its relative position.
struct exact_priority {
    std::uint64_t high;  // as a descending_code
    double low;
    std::int32_t token;

    /// Whether it ranks before another key of its class; of equal ones the older one does.
    __device__ bool before(const exact_priority& other) const {
        if (high != other.high) {
            return high < other.high;
        }
        return low != other.low ? low > other.low : token < other.token;
    }
};

/// The decay of a head. Positions are relative, from -max_decay_distance on.
struct decay_clock {
    std::uint32_t steps;
    std::uint32_t offset;  // a multiple of n
    double log_gamma;
    double max_age;  // no key gets older

    __device__ decay_clock(const HeadParams& head_params, std::int64_t longest)
        : steps(static_cast<std::uint32_t>(head_params.decay_step)),
          offset((max_decay_distance / steps + 1) * steps),
          log_gamma(static_cast<double>(head_params.log_gamma)),
          max_age(static_cast<double>(longest / head_params.decay_step)) {}

    __device__ decay_point at(std::int32_t token) const {
        const std::uint32_t from = static_cast<std::uint32_t>(token) + offset, period = from / steps;
        return {static_cast<std::int32_t>(period - offset / steps),
                static_cast<std::int32_t>(from - period * steps)};
    }
    /// effective_score() of a key of class `phase` as a descending_code. The product is exact.
    __device__ std::uint64_t code(const decayed_key& key, std::int32_t phase,
                                  const decay_point& query) const {
        const std::int32_t age = query.period - key.period - (phase > query.phase ? 1 : 0);
        return descending_code(__fma_rn(static_cast<double>(age), log_gamma, static_cast<double>(key.score)));
    }
    /// Whether no decay changes a score: infinity, NaN, and what is too large.
    __device__ bool absorbs(float score) const {
        const double r = score;
        return r != r || __fma_rn(max_age, log_gamma, r) == r;
    }
    /// Values of a class are ordered as score - period * log gamma: as a double, and what that rounds off
    /// (Knuth's two-sum). A score that absorbs its decay stays what it is.
    __device__ exact_priority priority(const decayed_key& key, std::int32_t token) const {
        const double r = key.score;
        if (absorbs(key.score)) {
            return {descending_code(r), 0.0, token};
        }
        const double decay = __dmul_rn(static_cast<double>(key.period), log_gamma);
        const double high = __dsub_rn(r, decay), taken = __dsub_rn(high, r);
        return {descending_code(high),
                __dsub_rn(__dsub_rn(r, __dsub_rn(high, taken)), __dadd_rn(decay, taken)), token};
    }
};

/// A class in a round: the key of its held ones that is evicted first.
struct decay_class {
    decayed_key worst;
    std::int32_t rank;   // of that key; -1: no key is held
    std::int32_t first;  // the first rank of the class
};

/// Whether a head's keys, at most `longest` positions apart, are ranked by class: a round has all top-k slots
/// and as many candidates as a block gathers in a turn.
KVPOLICY_HOST_DEVICE constexpr bool ranks_by_class(const HeadParams& head_params, std::int64_t longest) {
    return head_params.decay_step != 1 && head_params.decay_step <= max_decay_classes &&
           head_params.budget <= decayed_round_keys / 4 * 3 && longest <= max_decay_distance &&
           head_params.window <= max_decay_distance;
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
