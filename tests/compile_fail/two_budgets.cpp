// A budget of each head and one that the heads share.
// expect: kvpolicy: a Policy has at most one budget
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/shared_budget.hpp>
#include <kvpolicy/policies/topk_budget.hpp>

#ifndef KVPOLICY_CONTROL
kvpolicy::Policy<kvpolicy::TopKBudget<4>, kvpolicy::SharedBudget<8>> policy;
#else
kvpolicy::Policy<kvpolicy::SharedBudget<8>> policy;
#endif
