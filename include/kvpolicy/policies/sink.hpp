// Attention sinks: the first tokens of a sequence never leave the cache (Xiao et al., 2023).
#pragma once

#include <kvpolicy/policies/head_number.hpp>

namespace kvpolicy {

/// The first `Count` keys never expire: expiry = never for t < s. Sink<>{s} takes s at run time,
/// by layer and head.
template <std::int32_t Count = dynamic>
struct Sink : detail::head_number<part_kind::sink, &HeadParams::sinks, Count> {
    using Sink::head_number::head_number;
};

}  // namespace kvpolicy
