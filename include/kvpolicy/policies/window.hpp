// The protected window: a query always sees its most recent keys.
#pragma once

#include <kvpolicy/policies/head_number.hpp>

namespace kvpolicy {

/// A query sees its w most recent keys, itself included: expiry >= t + w. A policy without a Window has
/// w = 1. Window<>{w} takes w at run time, by layer and head.
template <std::int32_t Width = dynamic>
struct Window : detail::head_number<part_kind::window, &HeadParams::window, Width> {
    using Window::head_number::head_number;
};

}  // namespace kvpolicy
