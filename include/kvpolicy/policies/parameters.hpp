// The numbers of a policy, and how they may differ by layer and head.
#pragma once

#include <kvpolicy/core/config.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/types.hpp>

#include <cstdint>
#include <string>

namespace kvpolicy {

/// A parameter's value: one number for all, or an array [layers, heads] that the caller keeps alive. Made
/// implicitly from a number: Window<>{256}; from an array: Window<>{per_head(array, layers, heads)}.
template <class T>
struct PerHead {
    T value{};
    const T* array = nullptr;
    std::int32_t layers = 0;
    std::int32_t heads = 0;

    constexpr PerHead() = default;
    KVPOLICY_HOST_DEVICE constexpr PerHead(T one) : value(one) {}  // implicit: a number is the common case
    KVPOLICY_HOST_DEVICE constexpr PerHead(const T* values, std::int32_t layer_count, std::int32_t head_count)
        : array(values), layers(layer_count), heads(head_count) {}

    /// The value for one head. Arrays with one layer (or one head) serve every layer (or head).
    KVPOLICY_HOST_DEVICE constexpr T at(std::int32_t layer, std::int32_t head) const {
        if (array == nullptr) {
            return value;
        }
        const std::int64_t l = layers == 1 ? 0 : layer;
        const std::int64_t h = heads == 1 ? 0 : head;
        return array[l * heads + h];
    }

    /// Refuses a value that nobody has set: `dynamic`, the default of run-time parts.
    void check_set(const char* name, const char* allowed) const {
        if (array == nullptr && value == static_cast<T>(dynamic)) [[unlikely]] {
            detail::refuse(name, "not set", allowed);
        }
    }

    /// Refuses an array that at() would leave for some of `layer_count` layers and `head_count` heads.
    void check(const char* name, std::int32_t layer_count, std::int32_t head_count) const {
        if (array == nullptr) {
            if (layers != 0 || heads != 0) [[unlikely]] {
                detail::refuse(name, "null",
                               detail::text("an array of ", layers, " layers x ", heads, " heads"));
            }
            return;
        }
        const bool fits = (layers == 1 || layers >= layer_count) && (heads == 1 || heads >= head_count);
        if (!fits || layers < 1 || heads < 1) [[unlikely]] {
            detail::refuse(name, detail::text(layers, " layers x ", heads, " heads"),
                           detail::text("1 or at least ", layer_count, " layers x 1 or at least ", head_count,
                                        " heads"));
        }
    }
};

/// Values by layer and head: array[layer * heads + head].
template <class T>
constexpr PerHead<T> per_head(const T* array, std::int32_t layers, std::int32_t heads) {
    return {array, layers, heads};
}

/// How the numbers of a KV head's G query heads become one.
enum class group_aggregate : std::uint8_t { max, mean };

/// All numbers that decide a key's lifetime, for one KV head. What a policy's type leaves out has its neutral
/// value: no sinks, a window of 1, no long-range budget, gamma = 1, decay step 1.
struct HeadParams {
    std::int32_t sinks = 0;       ///< s >= 0
    std::int32_t window = 1;      ///< w >= 1; a query sees its w most recent keys, itself included
    std::int32_t budget = 0;      ///< k >= 0 long-range keys, or `unlimited`
    std::int32_t decay_step = 1;  ///< n >= 1
    float log_gamma = 0.0f;       ///< log of the per-head decay factor, <= 0
    float threshold = 0.0f;       ///< the gate's tau as a logit
    // Of a budget that the heads of a layer share, which has the sum of their `budget` slots.
    std::int32_t floor = 0;        ///< so many of the head's best keys stay
    std::int32_t cap = unlimited;  ///< so many of the head's keys may hold slots
    float score_offset = 0.0f;     ///< added to the head's scores where heads are compared
};

}  // namespace kvpolicy
