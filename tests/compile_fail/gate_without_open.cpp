// A gate that cannot be asked.
// expect: kvpolicy: a gate needs `bool open(float score, const HeadRule&) const` and `void write(HeadRule&, int layer, int head) const`
#include <kvpolicy/policies/compose.hpp>

struct Gate {
    static constexpr kvpolicy::part_kind kind = kvpolicy::part_kind::gate;
    void write(kvpolicy::HeadRule&, int, int) const {}
#ifdef KVPOLICY_CONTROL
    bool open(float score, const kvpolicy::HeadRule&) const { return score > 0.0f; }
#endif
};

kvpolicy::Policy<Gate> policy;
