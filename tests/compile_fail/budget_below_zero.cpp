// A negative budget.
// expect: kvpolicy: TopKBudget<k> needs k >= 0
#include <kvpolicy/policies/topk_budget.hpp>

#ifndef KVPOLICY_CONTROL
kvpolicy::TopKBudget<-5> budget;
#else
kvpolicy::TopKBudget<0> budget;
#endif
