// A part that does not say what it is.
// expect: kvpolicy: every part of a Policy needs `static constexpr kvpolicy::part_kind kind`
#include <kvpolicy/policies/compose.hpp>

struct Part {
#ifdef KVPOLICY_CONTROL
    static constexpr kvpolicy::part_kind kind = kvpolicy::part_kind::sink;
#endif
    void write(kvpolicy::HeadParams& head_params, int, int) const { head_params.sinks = 1; }
};

kvpolicy::Policy<Part> policy;
