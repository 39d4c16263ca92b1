// The long-range budget: of the keys that left the window, the k with the best effective scores stay (KVpop, 3).
#pragma once

#include <kvpolicy/policies/concept.hpp>

namespace kvpolicy {

/// At query q the k best keys of E(q) = {t : s <= t <= q - w} are visible, ranked by effective score (eq. 5), ties to
/// the older key. expiry = the first q >= t + w at which t is not among them. Under a gate only open keys count.
/// TopKBudget<>{k} takes k at run time, by layer and head; `unlimited` keeps all (full-attention heads).
template <std::int32_t Keys = dynamic>
struct TopKBudget {
    static_assert(Keys >= 0, "kvpolicy: TopKBudget<k> needs k >= 0");
    static constexpr part_kind kind = part_kind::budget;

    KVPOLICY_HOST_DEVICE constexpr void write(HeadParams& head_params, std::int32_t, std::int32_t) const {
        head_params.budget = Keys;
    }
};

template <>
struct TopKBudget<dynamic> {
    static constexpr part_kind kind = part_kind::budget;
    PerHead<std::int32_t> keys{dynamic};

    constexpr TopKBudget() = default;
    constexpr explicit TopKBudget(PerHead<std::int32_t> k) : keys(k) {}

    KVPOLICY_HOST_DEVICE constexpr void write(HeadParams& head_params, std::int32_t layer,
                                              std::int32_t head) const {
        head_params.budget = keys.at(layer, head);
    }
    void check_values(std::int32_t layers, std::int32_t heads) const {
        keys.check_set("budget k", "a number or an array by layer and head: TopKBudget<>{k}");
        keys.check("array of budgets", layers, heads);
    }
};

static_assert(RulePart<TopKBudget<3836>> && RulePart<TopKBudget<>>);

}  // namespace kvpolicy
