// expect: kvpolicy: a scorer on leaving needs `float read(int head, const float* state, const float* key,
//     const float* value, float* scratch) const`
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/topk_budget.hpp>

struct Deaf {
    static constexpr kvpolicy::part_kind kind = kvpolicy::part_kind::scorer;
    static constexpr kvpolicy::score_time when = kvpolicy::score_time::on_leaving;
    std::size_t state_size() const { return 1; }
    std::size_t scratch_size() const { return 0; }
    void reset(float* state) const { *state = 0.0f; }
    void absorb(std::int32_t, float*, const float*, const float*, float*) const {}
#ifdef KVPOLICY_CONTROL
    float read(std::int32_t, const float* state, const float*, const float*, float*) const { return *state; }
#endif
};

int main() {
    kvpolicy::Policy<kvpolicy::TopKBudget<1>, Deaf> policy;
    return policy.has_budget ? 0 : 1;
}
