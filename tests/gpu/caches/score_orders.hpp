// Orders of scores that are hard on top-k updates.
#pragma once

#include <kvpolicy/core/types.hpp>

#include <cmath>
#include <cstdint>
#include <limits>
#include <random>

namespace test {

/// Orders of scores.
enum class Order {
    random,
    rising,
    falling,
    equal,
    two_values,
    signed_zeros,
    infinities,
    best_first,     // one key ranks before all others, early
    best_late,      // and late
    sawtooth,       // rises for 97 tokens, again and again
    falling_teeth,  // rises for 512 tokens, and every tooth is below the one before
    uneven,         // one head rises beside others that fall
    level,          // priorities with decay step 1 that fp32 cannot tell apart, and many of them equal
    tiny,           // round to multiples of log gamma once keys have an age
    huge,           // some absorb every decay, some all but the largest
    special         // zeros, infinities, NaN and a number without an exponent
};
/// All without a NaN.
inline constexpr Order all_orders[] = {
    Order::random,        Order::rising,     Order::falling,    Order::equal,     Order::two_values,
    Order::signed_zeros,  Order::infinities, Order::best_first, Order::best_late, Order::sawtooth,
    Order::falling_teeth, Order::uneven,     Order::level,      Order::tiny,      Order::huge};

inline const char* name(Order order) {
    static const char* const names[] = {"random",     "rising",       "falling",       "equal",
                                        "two values", "signed zeros", "infinities",    "best first",
                                        "best late",  "sawtooth",     "falling teeth", "uneven",
                                        "level",      "tiny",         "huge",          "special"};
    return names[static_cast<int>(order)];
}

/// Token j of `length`, at a position.
struct ScoredToken {
    float log_gamma;
    std::int32_t head, length, j;
    kvpolicy::position_t position;
};

inline float score_of(Order order, const ScoredToken& of, std::normal_distribution<float>& normal,
                      std::mt19937& generator) {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const auto t = static_cast<float>(of.position);
    switch (order) {
        case Order::random:
            break;
        case Order::rising:
            return 0.25f * t;
        case Order::falling:
            return -0.25f * t;
        case Order::equal:
            return 1.5f;
        case Order::two_values:
            return static_cast<float>(generator() % 2);
        case Order::signed_zeros:
            return generator() % 2 == 0 ? 0.0f : -0.0f;
        case Order::infinities:
            return generator() % 3 == 0 ? infinity : generator() % 2 == 0 ? -infinity : normal(generator);
        case Order::best_first:
            return of.j == of.length / 7 ? 1e30f : normal(generator);
        case Order::best_late:
            return of.j == of.length - of.length / 7 ? 1e30f : -t;
        case Order::sawtooth:
            return static_cast<float>(of.position % 97);
        case Order::falling_teeth:
            return static_cast<float>(of.position % 512) - 700.0f * static_cast<float>(of.position / 512);
        case Order::uneven:
            return of.head == 0 ? t : -t;
        case Order::special: {
            const float some[] = {0.0f, -0.0f, infinity, -infinity, std::nanf(""), 1e-42f};
            return some[generator() % 6];
        }
        case Order::tiny:
            return static_cast<float>(generator() % 3) * 1e-30f;
        case Order::huge:
            return (generator() % 2 == 0 ? -1.0f : 1.0f) *
                   std::ldexp(1.0f, 30 + 6 * static_cast<int>(generator() % 8));
        case Order::level:
            return static_cast<float>(1000.0 +
                                      static_cast<double>(of.position) * static_cast<double>(of.log_gamma));
    }
    return normal(generator);
}

}  // namespace test
