// expect: kvpolicy: a scorer ranks keys for a TopKBudget or a gate, and this Policy has neither
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/linear.hpp>

int main() {
#ifdef KVPOLICY_CONTROL
    using Policy = kvpolicy::Policy<kvpolicy::Window<8>, kvpolicy::TopKBudget<8>, kvpolicy::LinearScorer<16>>;
#else
    using Policy = kvpolicy::Policy<kvpolicy::Window<8>, kvpolicy::LinearScorer<16>>;
#endif
    return Policy::has_decay ? 1 : 0;
}
