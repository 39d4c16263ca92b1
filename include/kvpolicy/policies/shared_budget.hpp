// A long-range budget that the KV heads of a layer share: the best of all their keys stay
// (docs/shared-budget.md).
#pragma once

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/policies/concept.hpp>

#include <cmath>
#include <cstdint>
#include <string>

namespace kvpolicy {

/// Limits of single heads under a SharedBudget, by layer and head or one for all. Constants: a limit that
/// changed with the length could bring evicted keys back.
struct SharedLimits {
    PerHead<std::int32_t> floor{0};        ///< the head's best keys that stay, whatever the others' are
    PerHead<std::int32_t> cap{unlimited};  ///< how many of the head's keys may hold slots
    PerHead<float> score_offset{0.0f};     ///< added to the head's scores where heads are compared
};

/// The KV heads of a layer share k * heads top-k slots. At query q the eligible keys of all heads
/// compete, E(q) = {(h, t) : s_h <= t <= q - w_h}, by effective score (eq. 5) plus the head's offset; ties go
/// to the older key, then to the lower head. The best `floor` keys of a head stay, only its best `cap`
/// compete, and slots of a floor that the head does not fill are free for all heads. Under a gate only open
/// keys count. expiry = the first q >= t + w at which (h, t) holds no slot.
///
/// SharedBudget<>{k} takes k at run time, by layer; given by layer and head, the slots of a layer are the
/// heads' sum. SharedBudget<512>{{.floor = 16, .cap = 2048}} has limits.
template <std::int32_t Keys = dynamic>
struct SharedBudget {
    static_assert(Keys == dynamic || (Keys >= 0 && Keys < unlimited),
                  "kvpolicy: SharedBudget<k> needs k >= 0, and below kvpolicy::unlimited");
    static constexpr part_kind kind = part_kind::budget;
    static constexpr bool shared_by_heads = true;
    PerHead<std::int32_t> number{Keys};
    SharedLimits limits{};

    constexpr SharedBudget() = default;
    constexpr explicit SharedBudget(SharedLimits of_heads) requires(Keys != dynamic) : limits(of_heads) {}
    constexpr explicit SharedBudget(PerHead<std::int32_t> values,
                                    SharedLimits of_heads = {}) requires(Keys == dynamic)
        : number(values), limits(of_heads) {}

    KVPOLICY_HOST_DEVICE constexpr void write(HeadParams& head_params, std::int32_t layer,
                                              std::int32_t head) const {
        head_params.budget = number.at(layer, head);
        head_params.floor = limits.floor.at(layer, head);
        head_params.cap = limits.cap.at(layer, head);
        head_params.score_offset = limits.score_offset.at(layer, head);
    }
    void check_values(std::int32_t layers, std::int32_t heads) const {
        number.check_set("budget k", "a number or an array by layer and head: SharedBudget<>{k}");
        number.check("array of budgets", layers, heads);
        limits.floor.check("array of floors", layers, heads);
        limits.cap.check("array of caps", layers, heads);
        limits.score_offset.check("array of score offsets", layers, heads);
    }
    void check_layer(std::int32_t layer, std::int32_t heads) const {
        std::int64_t slot_sum = 0, floor_sum = 0;
        for (std::int32_t head = 0; head < heads; ++head) {
            const std::int32_t k = number.at(layer, head), floor = limits.floor.at(layer, head),
                               cap = limits.cap.at(layer, head);
            const float offset = limits.score_offset.at(layer, head);
            const auto require = [&](bool condition, const char* argument, auto value, const char* allowed) {
                if (!condition) [[unlikely]] {
                    const std::string name = detail::text(argument, " of layer ", layer, ", head ", head);
                    detail::refuse(name.c_str(), value, allowed);
                }
            };
            require(k >= 0 && k < unlimited, "shared budget k", k,
                    "0 or more, and below kvpolicy::unlimited");
            require(floor >= 0, "floor", floor, "0 or more");
            require(cap >= floor, "cap", cap, "the head's floor or more");
            require(std::isfinite(offset), "score offset", offset, "finite");
            slot_sum += k;
            floor_sum += floor;
        }
        if (slot_sum >= unlimited) [[unlikely]] {
            detail::refuse(detail::text("shared budget of layer ", layer, ", the sum over heads").c_str(),
                           slot_sum, "below 2^31 - 1");
        }
        if (floor_sum > slot_sum) [[unlikely]] {
            detail::refuse(detail::text("sum of the floors of layer ", layer).c_str(), floor_sum,
                           detail::text("at most the slots of the layer, ", slot_sum));
        }
    }
};

static_assert(RulePart<SharedBudget<>> && RulePart<SharedBudget<8>>);

}  // namespace kvpolicy
