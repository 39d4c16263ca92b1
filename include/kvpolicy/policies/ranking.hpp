// The one order in which keys are ranked, for every backend, mask and cache (design: larger is better, ties
// to the older key, -0 and +0 equal, NaN last).
#pragma once

#include <kvpolicy/core/config.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/policies/parameters.hpp>

#include <cmath>
#include <cstdint>

namespace kvpolicy {

/// Below this distance double(t) * double(log_gamma) is exact (29 + 24 bits), so host, device and any
/// contraction agree.
inline constexpr position_t rebase_limit = position_t{1} << 29;

/// The base of static priorities at query q: a multiple of `limit`. Masks and caches change it at
/// the same queries.
KVPOLICY_HOST_DEVICE constexpr position_t priority_base(position_t q, position_t limit = rebase_limit) {
    return q / limit * limit;
}

/// Static priority for decay step 1 (KVpop, eq. 20): double(r) - double(t - base) * double(log_gamma). At one
/// query all keys are compared with the same base. A key further than rebase_limit from the base (it outlived
/// half a billion tokens) takes an explicit fma: one rounding, the same on every backend.
KVPOLICY_HOST_DEVICE inline double static_priority(double r, float log_gamma, position_t t,
                                                   position_t base = 0) {
    const position_t distance = t - base;
    if (distance < rebase_limit && distance > -rebase_limit) [[likely]] {
        return r - static_cast<double>(distance) * static_cast<double>(log_gamma);
    }
    return std::fma(-static_cast<double>(distance), static_cast<double>(log_gamma), r);
}

/// Effective score at query q for any decay step n (eq. 5): fl64(r + floor((q - t) / n) * log_gamma).
KVPOLICY_HOST_DEVICE inline double effective_score(double r, float log_gamma, std::int32_t step, position_t t,
                                                   position_t q) {
    const position_t age = (q - t) / step;
    if (age < rebase_limit) [[likely]] {
        return r + static_cast<double>(age) * static_cast<double>(log_gamma);
    }
    return std::fma(static_cast<double>(age), static_cast<double>(log_gamma), r);
}

/// What ranks a key at query q: its static priority for step 1, its effective score otherwise.
KVPOLICY_HOST_DEVICE inline double rank_value(const HeadParams& head_params, float score, position_t t,
                                              position_t q, position_t limit = rebase_limit) {
    return head_params.decay_step == 1
               ? static_priority(score, head_params.log_gamma, t, priority_base(q, limit))
               : effective_score(score, head_params.log_gamma, head_params.decay_step, t, q);
}

/// True where key a ranks strictly before key b: the larger value, then the older key; a NaN ranks
/// after every number.
KVPOLICY_HOST_DEVICE constexpr bool ranks_before(double value_a, position_t a, double value_b, position_t b) {
    if (value_a > value_b) {
        return true;
    }
    if (value_a == value_b) {
        return a < b;
    }
    const bool nan_a = value_a != value_a;
    const bool nan_b = value_b != value_b;
    return nan_b && (!nan_a || a < b);
}

/// What ranks a key among those of all heads of a layer at query q: the rank value of its score plus the
/// head's offset. `is_static`: the layer's heads have decay step 1 and one log gamma, or no decay
/// (Policy::has_static_shared_order); then it is the static priority. Otherwise it is the effective score,
/// for step 1 too.
KVPOLICY_HOST_DEVICE inline double shared_rank_value(const HeadParams& head_params, bool is_static,
                                                     float score, position_t t, position_t q,
                                                     position_t limit = rebase_limit) {
    const double r = static_cast<double>(score) + static_cast<double>(head_params.score_offset);
    return is_static ? static_priority(r, head_params.log_gamma, t, priority_base(q, limit))
                     : effective_score(r, head_params.log_gamma, head_params.decay_step, t, q);
}

/// The order of the keys of all heads of a layer: of equal values the older key ranks first, of equally old
/// keys that of the lower head; a NaN ranks after every number.
KVPOLICY_HOST_DEVICE constexpr bool ranks_before(double value_a, position_t a, std::int32_t head_a,
                                                 double value_b, position_t b, std::int32_t head_b) {
    if (a != b) {
        return ranks_before(value_a, a, value_b, b);
    }
    // Equally old: the head in the position's place.
    return ranks_before(value_a, head_a, value_b, head_b);
}

}  // namespace kvpolicy
