// The tensor cores' kernels through whole lives of sequences: bf16 and fp16, every kind of call.
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "cache_case.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

using Budget = Policy<Sink<>, Window<>, TopKBudget<>, Decay<1>>;

template <class T>
void check(std::int32_t dim, std::int32_t group, std::int32_t budget) {
    CAPTURE(dim);
    CAPTURE(group);
    std::mt19937 generator(static_cast<unsigned>(dim + group));
    const Budget policy{Sink<>{4}, Window<>{21}, TopKBudget<>{budget}, Decay<1>{-0.01f}};
    for (const Scores kind : {Scores::random, Scores::few_values, Scores::improving}) {
        BothCaches<Budget, T, head_dims<64>> both({.layers = 1,
                                                   .max_sequences = 3,
                                                   .query_heads = 2 * group,
                                                   .kv_heads = 2,
                                                   .head_dim_qk = dim,
                                                   .head_dim_vo = dim,
                                                   .page_size = 16,
                                                   .max_draft_tokens = 4},
                                                  policy);
        random_life(both, kind, 60, generator);
    }
}

}  // namespace

TEST_CASE("few calls") {
    const Budget policy{Sink<>{4}, Window<>{21}, TopKBudget<>{30}, Decay<1>{-0.01f}};
    std::mt19937 generator(2);
    BothCaches<Budget, bf16, head_dims<64>> both({.layers = 1,
                                                  .max_sequences = 3,
                                                  .query_heads = 6,
                                                  .kv_heads = 2,
                                                  .head_dim_qk = 40,
                                                  .head_dim_vo = 64,
                                                  .page_size = 16,
                                                  .max_draft_tokens = 4},
                                                 policy);
    random_life(both, Scores::random, 16, generator);
}

TEST_CASE("bf16") {
    check<bf16>(64, 4, 200);
    check<bf16>(40, 3, 17);
    check<bf16>(64, 12, 64);
}

TEST_CASE("fp16") { check<fp16>(64, 5, 200); }
