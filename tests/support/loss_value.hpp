// The value of a loss as an expression.
#pragma once

#include <kvpolicy/losses/concept.hpp>

namespace test {

/// What the call of a loss writes: value_of([&](auto* into) { loss(ctx, ..., into, {}); }).
template <class Value = kvpolicy::LossValue, class Call>
Value value_of(const Call& call) {
    Value value;
    call(&value);
    return value;
}

}  // namespace test
