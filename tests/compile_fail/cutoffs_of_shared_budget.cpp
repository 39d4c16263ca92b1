// Ranks and cutoffs by head, of a budget that heads share.
// expect: kvpolicy: build_cutoffs needs a policy with a TopKBudget
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/shared_budget.hpp>
#include <kvpolicy/policies/topk_budget.hpp>

using namespace kvpolicy;

#ifndef KVPOLICY_CONTROL
using Budgeted = Policy<SharedBudget<8>>;
#else
using Budgeted = Policy<TopKBudget<8>>;
#endif

void build(const host& ctx) { build_cutoffs(ctx, Budgeted{}, {}, {}, {}, {}, {}); }
