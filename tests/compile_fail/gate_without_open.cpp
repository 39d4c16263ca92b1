// A gate that cannot be asked.
// expect: kvpolicy: a gate needs `bool open(float score, const HeadParams&) const` and `void
//     write(HeadParams&, int layer, int head) const`
#include <kvpolicy/policies/compose.hpp>

struct Gate {
    static constexpr kvpolicy::part_kind kind = kvpolicy::part_kind::gate;
    void write(kvpolicy::HeadParams&, int, int) const {}
#ifdef KVPOLICY_CONTROL
    bool open(float score, const kvpolicy::HeadParams&) const { return score > 0.0f; }
#endif
};

kvpolicy::Policy<Gate> policy;
