// A sequence of a FixedBudgetCache goes through a blob with the rows that it uses, and no others.
#include <kvpolicy/policies/selection.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../../support/bound_dual.hpp"
#include "cache_case.hpp"

#include <cstring>

using namespace kvpolicy;
using namespace test;

namespace {

template <class P>
void check(const P& policy) {
    const CacheShape shape{.layers = 2,
                           .max_sequences = 3,
                           .query_heads = 3,
                           .kv_heads = 3,
                           .head_dim_qk = 8,
                           .head_dim_vo = 16,
                           .page_size = 16,
                           .max_draft_tokens = 3};
    const host ctx(1);
    const kvpolicy::cuda device{};
    BoundCache<P, float> oracle(ctx, shape, policy);
    FixedBudgetCache<P, float> cache(shape, policy);
    const Device<unsigned char> memory(cache.bytes().total());
    cache.bind(device, memory.data(), memory.size());
    std::mt19937 generator(3);
    std::int32_t length = 0;
    for (const std::int32_t more :
         {0, 1, 5, 14, 60}) {  // empty; in the sinks; the ring; some budgets; all of them
        const std::int32_t seq = 1;
        for (std::int32_t t = 0; t < more; ++t) {
            const CallTensors<float> in(shape, 1, 1, Scores::random, generator);
            for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
                Tensor<float> out(1, shape.query_heads, 1, shape.head_dim_vo);
                Workspace workspace(
                    workspace_bytes(ctx, oracle.cache.layer(layer), {.batch = 1, .tokens = 1}));
                step(ctx, oracle.cache.layer(layer),
                     {.q = in.q.view(),
                      .k = in.k.view(),
                      .v = in.v.view(),
                      .out = out.view(),
                      .batch = {1, &seq},
                      .scores = in.scores.view()},
                     workspace);
            }
            oracle.cache.advance(ctx, {1, &seq});
        }
        length += more;
        CAPTURE(length);
        std::vector<unsigned char> blob(oracle.cache.snapshot_bytes(1));
        oracle.cache.snapshot(ctx, 1, blob.data(), blob.size());
        ok(cudaDeviceSynchronize());
        for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
            const auto ref = cache.layer(layer);
            const std::int64_t rows = ref.max_sequences * ref.rows;
            ok(cudaMemset(ref.k, 0x5a, static_cast<std::size_t>(rows * ref.head_dim_qk) * sizeof(float)));
            ok(cudaMemset(ref.v, 0x5a, static_cast<std::size_t>(rows * ref.head_dim_vo) * sizeof(float)));
            ok(cudaMemset(ref.position, 0x5a, static_cast<std::size_t>(rows) * sizeof(position_t)));
        }
        cache.restore(device, 2, blob.data(), blob.size());
        CHECK(cache.snapshot_bytes(device, 2) == blob.size());
        std::vector<unsigned char> again(blob.size(), 0);
        cache.snapshot(device, 2, again.data(), again.size());
        CHECK(again == blob);
        // What it does not use, and other sequences, are as they were.
        float untouched = 0.0f;
        std::memset(&untouched, 0x5a, sizeof untouched);
        for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
            const auto ref = cache.layer(layer), host_ref = oracle.cache.layer(layer);
            const auto k = fetch_from(ref.k, ref.max_sequences * ref.rows * ref.head_dim_qk);
            const auto v = fetch_from(ref.v, ref.max_sequences * ref.rows * ref.head_dim_vo);
            std::vector<char> mine(static_cast<std::size_t>(ref.max_sequences * ref.rows), 0);
            for (std::int32_t head = 0; head < shape.kv_heads; ++head) {
                const std::int64_t from = host_ref.first_row(1, head), to = host_ref.first_row(2, head);
                const std::int32_t used = host_ref.used(1, head);
                std::fill_n(mine.begin() + to, used, char{1});
                CHECK(std::memcmp(k.data() + to * ref.head_dim_qk, host_ref.k + from * ref.head_dim_qk,
                                  static_cast<std::size_t>(used * ref.head_dim_qk) * sizeof(float)) == 0);
                CHECK(std::memcmp(v.data() + to * ref.head_dim_vo, host_ref.v + from * ref.head_dim_vo,
                                  static_cast<std::size_t>(used * ref.head_dim_vo) * sizeof(float)) == 0);
            }
            std::int64_t written = 0;
            for (std::int64_t r = 0; r < ref.max_sequences * ref.rows; ++r) {
                written += mine[static_cast<std::size_t>(r)] == 0 &&
                                   (std::memcmp(&k[static_cast<std::size_t>(r * ref.head_dim_qk)], &untouched,
                                                4) != 0 ||
                                    std::memcmp(&v[static_cast<std::size_t>(r * ref.head_dim_vo)], &untouched,
                                                4) != 0)
                               ? 1
                               : 0;
            }
            CHECK(written == 0);
        }
    }
}

}  // namespace

TEST_CASE("rows in use") {
    constexpr std::int32_t budgets[] = {10, 25, 0, 40, 9, 25};
    check(Policy<Sink<2>, Window<7>, TopKBudget<>>{{}, {}, TopKBudget<>{per_head(budgets, 2, 3)}});
}

TEST_CASE("with a selection's bounds") {
    constexpr std::int32_t budgets[] = {10, 25, 0, 40, 7, 23};  // the last layer's heads are full to the page
    check(Policy<Sink<2>, Window<7>, TopKBudget<>, QuestPages<16>>{
        {}, {}, TopKBudget<>{per_head(budgets, 2, 3)}, QuestPages<16>{2}});
}
