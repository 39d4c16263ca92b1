// Attention gives a key its rank, but no gate a meaning.
// expect: kvpolicy: a policy that ranks keys by the attention they receive takes a TopKBudget, and no gate,
//     decay or keep part
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/observed.hpp>

#ifndef KVPOLICY_CONTROL
kvpolicy::Policy<kvpolicy::Window<4>, kvpolicy::ThresholdGate<>, kvpolicy::TopKBudget<4>,
                 kvpolicy::AccumulatedMass>
    policy;
#else
kvpolicy::Policy<kvpolicy::Window<4>, kvpolicy::TopKBudget<4>, kvpolicy::AccumulatedMass> policy;
#endif
