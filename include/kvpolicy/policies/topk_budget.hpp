// The long-range budget: of the keys that left the window, the k with the best effective scores
// stay (KVpop, 3).
#pragma once

#include <kvpolicy/policies/head_number.hpp>

namespace kvpolicy {

/// At query q the k best keys of E(q) = {t : s <= t <= q - w} are visible, ranked by effective score (eq.
/// 5), ties to the older key. expiry = the first q >= t + w at which t is not among them. Under a gate only
/// open keys count. TopKBudget<>{k} takes k at run time, by layer and head; `unlimited` keeps all
/// (full-attention heads).
template <std::int32_t Keys = dynamic>
struct TopKBudget : detail::head_number<part_kind::budget, &HeadParams::budget, Keys> {
    using TopKBudget::head_number::head_number;
};

}  // namespace kvpolicy
