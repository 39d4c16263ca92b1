// Selection at the read of a FixedBudgetCache on a device: the host's pages and outputs, whatever
// calls came before.
#include <kvpolicy/policies/selection.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../../support/refusal.hpp"
#include "cache_case.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

using Budget = Policy<Sink<>, Window<>, TopKBudget<>, QuestPages<>>;

constexpr std::int32_t sinks[] = {0, 2, 1, 3, 0, 1}, windows[] = {1, 40, 17, 2, 90, 3},
                       budgets[] = {100, 0, 400, 130, 1, 70}, pages[] = {1, 2, unlimited, 3, 5, 4};

Budget policy_of(std::int32_t rows, group_aggregate of_heads = group_aggregate::max) {
    return Budget{Sink<>{per_head(sinks, 2, 3)}, Window<>{per_head(windows, 2, 3)},
                  TopKBudget<>{per_head(budgets, 2, 3)}, QuestPages<>{rows, per_head(pages, 2, 3), of_heads}};
}
CacheShape shape_of(std::int32_t group, std::int32_t page_size, std::int32_t dim) {
    return {.layers = 2,
            .max_sequences = 4,
            .query_heads = 3 * group,
            .kv_heads = 3,
            .head_dim_qk = dim,
            .head_dim_vo = dim,
            .page_size = page_size,
            .max_draft_tokens = 5};
}

}  // namespace

TEST_CASE("few calls") {
    std::mt19937 generator(5);
    BothCaches<Budget, float> both(shape_of(2, 32, 8), policy_of(16));
    random_life(both, Scores::random, 14, generator);
}

TEST_CASE("budgets by layer and head, pages of a page and of a third of one") {
    for (const Scores kind : {Scores::random, Scores::few_values}) {
        std::mt19937 generator(7);
        BothCaches<Budget, float> one(shape_of(3, 16, 8), policy_of(16));
        random_life(one, kind, 110, generator);
        BothCaches<Budget, float> third(shape_of(1, 48, 8), policy_of(16, group_aggregate::mean));
        random_life(third, kind, 110, generator);
    }
}

TEST_CASE("16-bit rows") {
    std::mt19937 generator(9);
    BothCaches<Budget, bf16, head_dims<64>> both(shape_of(4, 32, 64), policy_of(32));
    for (std::int32_t t = 0; t < 200; ++t) {
        const CallTensors<bf16> in(both.shape, 3, 1, Scores::random, generator);
        both.call(Mode::step, {2, 0, 1}, {1, t % 5 == 0 ? 1 : 0, t % 2}, in);
    }
    both.same_rows("after 200 steps");
}

TEST_CASE("groups whose queries leave shared memory for fewer warps, or for none") {
    // On a GPU whose blocks have 227 KB 4, 2 and 1 warps; on others with less, fewer or a refusal.
    for (const std::int32_t group : {30, 90, 100}) {
        CAPTURE(group);
        std::mt19937 generator(3);
        BothCaches<Budget, bf16, head_dims<256>> both(shape_of(group, 32, 256), policy_of(16));
        for (std::int32_t t = 0; t < 150; ++t) {
            const CallTensors<bf16> in(both.shape, 2, 1, Scores::random, generator);
            both.call(Mode::step, {2, 0}, {1, t % 3 == 0 ? 1 : 0}, in);
        }
        both.same_rows("after 150 steps");
    }
    FixedBudgetCache<Budget, bf16> cache(shape_of(1000, 32, 256), policy_of(16));
    const kvpolicy::cuda ctx{};
    const Device<unsigned char> memory(cache.bytes().total());
    cache.bind(ctx, memory.data(), memory.size());
    CHECK_REFUSED(static_cast<void>(step_workspace_bytes<head_dims<256>>(ctx, cache.layer(0), 1)),
                  "bound_pages_kernel");
}

TEST_CASE("pages of a selection that kernels cannot read are refused") {
    FixedBudgetCache<Budget, float> cache(shape_of(1, 16, 8), policy_of(8));
    const Device<unsigned char> memory(cache.bytes().total());
    CHECK_REFUSED(cache.bind(kvpolicy::cuda{}, memory.data(), memory.size()), "rows of a selection's page");
}
