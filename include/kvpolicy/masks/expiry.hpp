// A key's lifetime: what a mask is, for every kernel that reads one.
#pragma once

#include <kvpolicy/core/config.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>

#include <cstdint>

namespace kvpolicy {

/// The rule of every policy: key t is visible to queries q with t <= q < expiry.
KVPOLICY_HOST_DEVICE constexpr bool visible(std::int32_t q, std::int32_t t, expiry_t expiry) {
    return t <= q && q < expiry;
}

/// A policy's whole effect on attention, and all that a kernel knows of it. Views only; [B, Hkv, S] each:
///
///  - expiry[b][h][t]: the first query position at which key t is no longer visible. Empty: keys never expire
///      (dense
///    causal attention). `never`, and anything beyond the last query, mean the same. An expiry <= t: never
///        visible.
///  - log_bias[b][h][t]: fp32, natural logarithm, added to the logit of key t once q - t >= bias_from[h] (a
///      soft gate;
///    bias_from is the window). Empty: none. -inf hides the key from then on.
///  - bias_from: [Hkv]; null: 0 for every head. Read only where log_bias is given.
struct mask_view {
    plane_view<const expiry_t> expiry{};
    plane_view<const float> log_bias{};
    const std::int32_t* bias_from = nullptr;  // [Hkv]

    /// From which age on the bias of head h's keys counts.
    KVPOLICY_HOST_DEVICE constexpr std::int32_t bias_from_of(std::int64_t h) const {
        return bias_from != nullptr ? bias_from[h] : 0;
    }
};

}  // namespace kvpolicy
