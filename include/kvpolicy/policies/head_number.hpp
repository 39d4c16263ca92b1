// What Sink, Window and TopKBudget share: a part of one number, which it writes to one member of HeadParams.
#pragma once

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/policies/concept.hpp>

#include <cstdint>

namespace kvpolicy::detail {

/// A part whose number is `Number` for all layers and heads.
template <part_kind Kind, std::int32_t HeadParams::*Member, std::int32_t Number>
struct head_number {
    static_assert(Kind != part_kind::sink || Number >= 0, "kvpolicy: Sink<s> needs s >= 0");
    static_assert(Kind != part_kind::window || Number >= 1,
                  "kvpolicy: Window<w> needs w >= 1, since a query always sees itself");
    static_assert(Kind != part_kind::budget || Number >= 0, "kvpolicy: TopKBudget<k> needs k >= 0");
    static constexpr part_kind kind = Kind;

    KVPOLICY_HOST_DEVICE constexpr void write(HeadParams& head_params, std::int32_t, std::int32_t) const {
        head_params.*Member = Number;
    }
};

/// What refusals say of a part with a run-time number.
struct number_texts {
    const char* name;
    const char* allowed;
    const char* array;
};
template <part_kind Kind>
inline constexpr number_texts texts_of{};
template <>
inline constexpr number_texts texts_of<part_kind::sink>{
    "sinks", "a number or an array by layer and head: Sink<>{s}", "array of sinks"};
template <>
inline constexpr number_texts texts_of<part_kind::window>{
    "window", "a number or an array by layer and head: Window<>{w}", "array of windows"};
template <>
inline constexpr number_texts texts_of<part_kind::budget>{
    "budget k", "a number or an array by layer and head: TopKBudget<>{k}", "array of budgets"};

/// A part whose number is given at run time, by layer and head.
template <part_kind Kind, std::int32_t HeadParams::*Member>
struct head_number<Kind, Member, dynamic> {
    static constexpr part_kind kind = Kind;
    PerHead<std::int32_t> number{dynamic};

    constexpr head_number() = default;
    constexpr explicit head_number(PerHead<std::int32_t> values) : number(values) {}

    KVPOLICY_HOST_DEVICE constexpr void write(HeadParams& head_params, std::int32_t layer,
                                              std::int32_t head) const {
        head_params.*Member = number.at(layer, head);
    }
    void check_values(std::int32_t layers, std::int32_t heads) const {
        number.check_set(texts_of<Kind>.name, texts_of<Kind>.allowed);
        number.check(texts_of<Kind>.array, layers, heads);
    }
};

}  // namespace kvpolicy::detail
