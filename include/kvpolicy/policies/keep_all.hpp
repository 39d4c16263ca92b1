// The policy that keeps everything: a full cache, for selection at the read and for comparison.
#pragma once

#include <kvpolicy/policies/concept.hpp>

namespace kvpolicy {

/// No key ever leaves: expiry = never.
struct KeepAll {
    static constexpr part_kind kind = part_kind::keep;
    KVPOLICY_HOST_DEVICE constexpr bool keeps(position_t) const { return true; }
};

static_assert(KeepPart<KeepAll>);

}  // namespace kvpolicy
