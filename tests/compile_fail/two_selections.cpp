// expect: kvpolicy: a Policy has at most one selection part
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/selection.hpp>

int main() {
#ifndef KVPOLICY_CONTROL
    const kvpolicy::Policy<kvpolicy::QuestPages<16>, kvpolicy::QuestPages<>> policy;
#else
    const kvpolicy::Policy<kvpolicy::QuestPages<16>> policy;
#endif
    return policy.has_selection ? 0 : 1;
}
