// Attention sinks: the first tokens of a sequence never leave the cache (Xiao et al., 2023).
#pragma once

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/policies/concept.hpp>

namespace kvpolicy {

/// The first `Count` keys never expire: expiry = never for t < s. Sink<>{s} takes s at run time, by layer and head.
template <std::int32_t Count = dynamic>
struct Sink {
    static_assert(Count >= 0, "kvpolicy: Sink<s> needs s >= 0");
    static constexpr part_kind kind = part_kind::sink;

    KVPOLICY_HOST_DEVICE constexpr void write(HeadParams& head_params, std::int32_t, std::int32_t) const {
        head_params.sinks = Count;
    }
};

template <>
struct Sink<dynamic> {
    static constexpr part_kind kind = part_kind::sink;
    PerHead<std::int32_t> count{dynamic};

    constexpr Sink() = default;
    constexpr explicit Sink(PerHead<std::int32_t> sinks) : count(sinks) {}

    KVPOLICY_HOST_DEVICE constexpr void write(HeadParams& head_params, std::int32_t layer,
                                              std::int32_t head) const {
        head_params.sinks = count.at(layer, head);
    }
    void check_values(std::int32_t layers, std::int32_t heads) const {
        count.check_set("sinks", "a number or an array by layer and head: Sink<>{s}");
        count.check("array of sinks", layers, heads);
    }
};

static_assert(RulePart<Sink<4>> && RulePart<Sink<>>);

}  // namespace kvpolicy
