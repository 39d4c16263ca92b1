// Cutoffs are the ranks of a budget's last key.
// expect: kvpolicy: build_cutoffs needs a policy with a TopKBudget
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#ifndef KVPOLICY_CONTROL
using P = kvpolicy::Policy<kvpolicy::Window<4>>;
#else
using P = kvpolicy::Policy<kvpolicy::Window<4>, kvpolicy::TopKBudget<2>>;
#endif

void build(const kvpolicy::host& ctx) { kvpolicy::build_cutoffs(ctx, P{}, {}, {}, {}, {}, {}); }
