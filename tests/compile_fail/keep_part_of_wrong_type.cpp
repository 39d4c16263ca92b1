// A keep part that answers with a number would otherwise keep nothing, in silence.
// expect: kvpolicy: a keep part needs `bool keeps(position_t) const`
#include <kvpolicy/policies/compose.hpp>

struct Odd {
    static constexpr kvpolicy::part_kind kind = kvpolicy::part_kind::keep;
#ifndef KVPOLICY_CONTROL
    int keeps(kvpolicy::position_t t) const { return static_cast<int>(t % 2); }
#else
    bool keeps(kvpolicy::position_t t) const { return t % 2 == 1; }
#endif
};

kvpolicy::Policy<Odd> policy;
