// A budget that heads share, with a scorer of received attention.
// expect: kvpolicy: a budget that the heads of a layer share compares scores of keys and bounds a layer already: no scorer of received attention and no eviction part
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/shared_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/observed.hpp>

#ifndef KVPOLICY_CONTROL
kvpolicy::Policy<kvpolicy::Window<1>, kvpolicy::SharedBudget<8>, kvpolicy::LastMass> policy;
#else
kvpolicy::Policy<kvpolicy::Window<1>, kvpolicy::SharedBudget<8>> policy;
#endif
