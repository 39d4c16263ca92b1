// A part of one's own that forgets an argument would otherwise write nothing, in silence.
// expect: kvpolicy: a part of this kind needs `void write(HeadParams&, int layer, int head) const`
#include <kvpolicy/policies/compose.hpp>

struct Mine {
    static constexpr kvpolicy::part_kind kind = kvpolicy::part_kind::sink;
#ifndef KVPOLICY_CONTROL
    void write(kvpolicy::HeadParams& head_params, std::int32_t) const { head_params.sinks = 4; }
#else
    void write(kvpolicy::HeadParams& head_params, std::int32_t, std::int32_t) const { head_params.sinks = 4; }
#endif
};

kvpolicy::Policy<Mine> policy;
