// A share of a number of things as a count. The one place where a ratio becomes a count, on both backends.
#pragma once

#include <kvpolicy/core/config.hpp>

#include <cstdint>
#include <limits>

namespace kvpolicy {

namespace detail {

/// The rounding of a number that Real stores, relative to it. A variable, since nvcc refuses the call in a
/// function for devices.
template <class Real>
inline constexpr double half_ulp = static_cast<double>(std::numeric_limits<Real>::epsilon()) / 2;

/// What a product of a share with a number may lack of a whole number and still be it: 1e-6, or the rounding
/// of the share where it was stored, half an ulp of Real. Below 1/2, since halves are not whole.
template <class Real>
KVPOLICY_HOST_DEVICE constexpr double share_slack(double product) {
    const double stored = product * half_ulp<Real>, slack = stored > 1e-6 ? stored : 1e-6;
    return slack < 0.25 ? slack : 0.25;
}

}  // namespace detail

/// floor(share * count), where a product that is a whole number but for rounding is that number: 7 for the
/// float 0.7 of 10, whose product is 6.99999988. So a share counts as the decimal number that its writer
/// meant. share is 0 to 1, count 0 or more; the result is 0 to count.
template <class Real>
KVPOLICY_HOST_DEVICE constexpr std::int64_t count_of_share(Real share, std::int64_t count) {
    const double product = static_cast<double>(share) * static_cast<double>(count);
    const auto whole = static_cast<std::int64_t>(product + detail::share_slack<Real>(product));
    return whole < count ? whole : count;
}

/// The whole number nearest to share * count, halves up. A half but for rounding is a half: 4 for the float
/// 0.35 of 10, whose product is 3.4999999.
template <class Real>
KVPOLICY_HOST_DEVICE constexpr std::int64_t nearest_count_of_share(Real share, std::int64_t count) {
    const double product = static_cast<double>(share) * static_cast<double>(count);
    const auto whole = static_cast<std::int64_t>(product + 0.5 + detail::share_slack<Real>(product));
    return whole < count ? whole : count;
}

}  // namespace kvpolicy
