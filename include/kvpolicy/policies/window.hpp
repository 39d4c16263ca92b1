// The protected window: a query always sees its most recent keys.
#pragma once

#include <kvpolicy/policies/concept.hpp>

namespace kvpolicy {

/// A query sees its w most recent keys, itself included: expiry >= t + w. A policy without a Window has w = 1.
/// Window<>{w} takes w at run time, by layer and head.
template <std::int32_t Width = dynamic>
struct Window {
    static_assert(Width >= 1, "kvpolicy: Window<w> needs w >= 1, since a query always sees itself");
    static constexpr part_kind kind = part_kind::window;

    KVPOLICY_HOST_DEVICE constexpr void write(HeadParams& head_params, std::int32_t, std::int32_t) const {
        head_params.window = Width;
    }
};

template <>
struct Window<dynamic> {
    static constexpr part_kind kind = part_kind::window;
    PerHead<std::int32_t> width{dynamic};

    constexpr Window() = default;
    constexpr explicit Window(PerHead<std::int32_t> window) : width(window) {}

    KVPOLICY_HOST_DEVICE constexpr void write(HeadParams& head_params, std::int32_t layer,
                                              std::int32_t head) const {
        head_params.window = width.at(layer, head);
    }
    void check_values(std::int32_t layers, std::int32_t heads) const {
        width.check_set("window", "a number or an array by layer and head: Window<>{w}");
        width.check("array of windows", layers, heads);
    }
};

static_assert(RulePart<Window<256>> && RulePart<Window<>>);

}  // namespace kvpolicy
