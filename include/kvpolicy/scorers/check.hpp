// The common parts of the scorers' check() functions.
#pragma once

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/types.hpp>

#include <cstddef>
#include <cstdint>
#include <string>

namespace kvpolicy::checks {

/// Refuses heads and widths that are not those of the layer.
template <class Scorer>
void check_scorer_shape(const char* name, std::int32_t fixed, const Scorer& scorer, std::int32_t kv_heads,
                        std::int32_t key_dim, std::int32_t value_dim) {
    const std::string of = name;
    detail::require(scorer.heads == kv_heads, (of + ".heads").c_str(), scorer.heads,
                    detail::text("the layer's KV heads, ", kv_heads));
    if (fixed != dynamic) {
        const std::string width = detail::text(fixed, ", as ", of, "<", fixed, "> says");
        detail::require(scorer.head_dim_qk == fixed, (of + ".head_dim_qk").c_str(), scorer.head_dim_qk,
                        width);
        detail::require(scorer.head_dim_vo == fixed, (of + ".head_dim_vo").c_str(), scorer.head_dim_vo,
                        width);
    }
    detail::require(key_dim >= 1 && scorer.head_dim_qk == key_dim, (of + ".head_dim_qk").c_str(),
                    scorer.head_dim_qk, detail::text("the width of the keys, ", key_dim));
    detail::require(value_dim >= 1 && scorer.head_dim_vo == value_dim, (of + ".head_dim_vo").c_str(),
                    scorer.head_dim_vo, detail::text("the width of the values, ", value_dim));
}

/// Refuses weights that are null where the scorer needs them.
template <class Scorer, class Parameters>
void check_parameters(const char* name, const Scorer& scorer, Parameters parameters) {
    for_each_parameter(scorer, parameters,
                       [&](const char* array, const float* pointer, std::size_t count, bool optional) {
                           detail::require(optional || count == 0 || pointer != nullptr,
                                           (detail::text(name, ".weights.", array)).c_str(), "null",
                                           detail::text("an array of ", count, " floats"));
                       });
}

}  // namespace kvpolicy::checks
