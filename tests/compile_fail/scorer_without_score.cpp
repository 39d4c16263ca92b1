// expect: kvpolicy: a scorer needs `kind = part_kind::scorer`, `when`, and either `score(head, key, value)`,
//     or state_size, reset, absorb and read, or score_span for one that reads neighbors, or observation and
//     evicts_at_steps
// expect: kvpolicy: a scorer on arrival needs `float score(int head, const float* key, const float* value,
//     float* scratch) const`
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/topk_budget.hpp>

struct Silent {
    static constexpr kvpolicy::part_kind kind = kvpolicy::part_kind::scorer;
    static constexpr kvpolicy::score_time when = kvpolicy::score_time::on_arrival;
    std::size_t scratch_size() const { return 0; }
#ifdef KVPOLICY_CONTROL
    float score(std::int32_t, const float*, const float*, float*) const { return 0.0f; }
#endif
};

int main() {
    kvpolicy::Policy<kvpolicy::TopKBudget<1>, Silent> policy;
    return policy.has_budget ? 0 : 1;
}
