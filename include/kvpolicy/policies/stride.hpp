// Keys at a uniform stride: the plainest way to keep something of everything (the Unif. baseline of
// LTE, section 4).
#pragma once

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/policies/concept.hpp>

namespace kvpolicy {

/// A keep part: every `Step`-th key never leaves, t = 0, n, 2n ... Stride<>{n} takes n at run time.
template <std::int32_t Step = dynamic>
struct Stride {
    static_assert(Step >= 1, "kvpolicy: Stride<n> needs n >= 1");
    static constexpr part_kind kind = part_kind::keep;

    KVPOLICY_HOST_DEVICE constexpr bool keeps(position_t t) const { return t % Step == 0; }
};

template <>
struct Stride<dynamic> {
    static constexpr part_kind kind = part_kind::keep;
    std::int32_t step = dynamic;

    constexpr Stride() = default;
    /// Refuses n < 1.
    explicit Stride(std::int32_t n) : step(n) { detail::require(n >= 1, "stride n", n, "1 or more"); }

    void check_values(std::int32_t, std::int32_t) const {
        detail::require(step != dynamic, "stride n", "not set", "a number: Stride<>{n}");
    }

    KVPOLICY_HOST_DEVICE constexpr bool keeps(position_t t) const { return t % step == 0; }
};

/// The smallest stride with which sinks, window and kept keys of a sequence of `length` tokens are at most
/// `total` rows. Refuses total <= sinks + window where the sequence is longer than that: no stride would do.
inline std::int32_t stride_for_total(std::int64_t total, std::int32_t sinks, std::int32_t window,
                                     std::int32_t length) {
    detail::require(sinks >= 0, "sinks", sinks, "0 or more");
    detail::require(window >= 1, "window", window, "1 or more, since a query sees itself");
    detail::require(length >= 0, "length", length, "0 or more");
    const std::int64_t recent = std::int64_t{sinks} + window;
    if (length <= recent) {
        return 1;
    }
    detail::require(total > recent, "total budget", total,
                    [&] { return detail::text("above sinks + window = ", recent); });
    // Kept keys that are neither sinks nor in the last window: multiples of n in [sinks, length - window).
    const std::int64_t end = length - window;
    const auto kept = [&](std::int64_t n) {
        return (end - 1) / n - (sinks == 0 ? -1 : (std::int64_t{sinks} - 1) / n);
    };
    // Not monotone in n where there are sinks: from the least n that can do, upwards.
    std::int64_t n = (end - sinks) / (total - recent + 1) + 1;
    while (kept(n) > total - recent) {
        ++n;
    }
    return static_cast<std::int32_t>(n);
}

static_assert(KeepPart<Stride<16>> && KeepPart<Stride<>>);

}  // namespace kvpolicy
