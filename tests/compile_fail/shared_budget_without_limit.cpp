// A budget that heads share and that is not finite.
// expect: kvpolicy: SharedBudget<k> needs k >= 0, and below kvpolicy::unlimited
#include <kvpolicy/policies/shared_budget.hpp>

#ifndef KVPOLICY_CONTROL
kvpolicy::SharedBudget<kvpolicy::unlimited> budget;
#else
kvpolicy::SharedBudget<8> budget;
#endif
