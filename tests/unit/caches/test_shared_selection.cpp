// Heads that share a budget, read by pages (Quest): after chunks and accepted drafts every page has the
// bounds that single steps leave.
#include <kvpolicy/policies/selection.hpp>
#include <kvpolicy/policies/shared_budget.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/window.hpp>

#include "support/bound_dual.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <utility>

using namespace kvpolicy;

namespace {

using Read = Policy<Sink<>, Window<>, SharedBudget<>, QuestPages<2>>;
constexpr std::int32_t heads = 3, dim = 8, length = 60;
constexpr CacheShape shape{.max_sequences = 1,
                           .query_heads = heads,
                           .kv_heads = heads,
                           .head_dim = dim,
                           .page_size = 2,
                           .max_draft_tokens = 4};

}  // namespace

TEST_CASE("bounds of pages after chunks and drafts are those after steps") {
    const host ctx{1};
    const Read policy{Sink<>{3}, Window<>{6}, SharedBudget<>{4}, QuestPages<2>{2}};
    for (const std::int32_t size : {2, 4, 7, length}) {
        for (const bool drafts : {false, true}) {
            CAPTURE(size);
            CAPTURE(drafts);
            if (drafts && size > shape.max_draft_tokens) {
                continue;
            }
            const PoolShape pool{.slab_pages = 99, .max_slabs = 1, .max_seq_len = length};
            test::BoundDual<Read, float> stepped(ctx, shape, pool, policy), chunked(ctx, shape, pool, policy);
            stepped.add_slab(ctx);
            chunked.add_slab(ctx);
            std::mt19937 generator(static_cast<unsigned>(size));
            test::Tensor<float> q(1, heads, length, dim), k(1, heads, length, dim),
                out(1, heads, length, dim);
            q.fill_normal(generator);
            k.fill_normal(generator);
            test::Plane<float> scores(1, heads, length);
            test::fill_scores(scores, test::Scores::random, generator);
            bool same = true;
            for (std::int32_t t = 0; t < length; t += size) {
                const std::int32_t n = std::min(size, length - t);
                const auto io = [&](std::int32_t from, std::int32_t count) {
                    return StepIO<float>{.q = std::as_const(q).tokens(from, count),
                                         .k = std::as_const(k).tokens(from, count),
                                         .v = std::as_const(k).tokens(from, count),
                                         .out = out.tokens(from, count),
                                         .batch = {.count = 1, .length = count},
                                         .scores = std::as_const(scores).tokens(from, count)};
                };
                const auto ref = chunked.cache.layer(0);
                test::Workspace workspace(workspace_bytes(ctx, ref, {.batch = 1, .tokens = n}));
                if (drafts) {
                    append_draft(ctx, ref, io(t, n), workspace);
                    accept(ctx, ref, {.count = 1, .length = n}, workspace);
                } else {
                    prefill(ctx, ref, io(t, n), workspace);
                }
                chunked.cache.advance(ctx, {.count = 1, .length = n});
                for (std::int32_t j = t; j < t + n; ++j) {
                    step(ctx, stepped.cache.layer(0), io(j, 1), workspace);
                    stepped.cache.advance(ctx, {.count = 1, .length = 1});
                }
                same = same &&
                       test::content_of(ref, 0, true) == test::content_of(stepped.cache.layer(0), 0, true);
            }
            CHECK(same);
        }
    }
}
