// Inputs that broke others. Which test covers which (paths below tests/unit; CUDA and backward
// have their own):
//
//   1  merging partial results that saw nothing       attention/test_softmax_state
//   2  more queries than keys                         attention/test_attend_shapes
//   3  a page of 4 rows, 13 tokens, NaN in the tail   here; caches/test_visibility (unused rows and tails of
//       views)
//   4  lengths 0 amid a batch, output poisoned        caches/test_batches; attention/test_attend_shapes
//   5  counts of -1, 0, 1, k                          caches/test_bad_input, caches/test_batches;
//       masks/test_bad_masks
//   6  1000 equal scores, k = 7                       here
//   7  k > n, and n = 0                               here; caches/test_cache_equals_mask
//   8  K and V of one buffer, fused QKV               caches/test_visibility; attention/test_attend_shapes
//   9  page ids permuted                              here
//  10  groups of 1, 3, 5, 6, 7, 12, 16, 64            caches/test_visibility; attention/test_attend_shapes
//  11  head_dim 72, 80, 96, 65                        caches/test_visibility, caches/test_bad_input;
//      attention/test_attend_*
//  12  window 4, one-hot values                       caches/test_visibility
//  13  window 1024 with 19 tokens; sinks with 2       here; caches/test_visibility
//  14  positions never come from rows kept            here; caches/test_batches, caches/test_long_decode
//  15  captured graphs                                CUDA; no allocation in a step:
//      caches/test_no_hidden_work
//  16  one token and a budget of 0                    here
//  17  a row that sees nothing, gate at 0             attention/test_attend_masks (forward)
//  18  a prompt twice the budget; odd totals          here; policies/test_policies
//  19  one window in training, prefill and decode     here; caches/test_cache_equals_mask
//  20  one head full, one not                         here; caches/test_batches
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/metrics/density.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "support/bound_cache.hpp"
#include "support/loops.hpp"
#include "support/refusal.hpp"
#include "support/shadow.hpp"

#include <doctest/doctest.h>

#include <numeric>
#include <utility>

using namespace kvpolicy;

namespace {

using P = Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>>;
P policy(std::int32_t s, std::int32_t w, std::int32_t k, float log_gamma = 0.0f, std::int32_t n = 1) {
    return P{Sink<>{s}, Window<>{w}, TopKBudget<>{k}, Decay<dynamic>{log_gamma, n}};
}

constexpr CacheShape one_head{.query_heads = 1, .kv_heads = 1, .head_dim_qk = 8, .head_dim_vo = 8};

/// Held positions after `length` tokens with the scores that score_of(t) gives, fed in chunks.
template <class ScoreOf>
std::vector<position_t> held(const host& ctx, const P& head_params, std::int32_t length,
                             const std::vector<std::int32_t>& sizes, bool steps, ScoreOf&& score_of) {
    test::BoundCache<P, float> under_test(ctx, one_head, head_params);
    test::Tensor<float> x(1, 1, length, 8), out(1, 1, length, 8);
    x.fill(0.5f);
    test::Plane<float> scores(1, 1, length);
    for (std::int32_t t = 0; t < length; ++t) {
        scores.at(0, 0, t) = score_of(t);
    }
    std::int32_t at = 0;
    for (const std::int32_t chunk : test::chunks_of(length, sizes)) {
        const Batch batch{.count = 1, .length = chunk};
        test::call<P, float>(ctx, under_test, 0, batch, std::as_const(x).tokens(at, chunk),
                             std::as_const(x).tokens(at, chunk), std::as_const(x).tokens(at, chunk),
                             out.tokens(at, chunk), {.scores = scores.tokens(at, chunk)}, steps);
        under_test.cache.advance(ctx, batch);
        at += chunk;
    }
    CHECK(under_test.cache.length(0) == length);
    return under_test.sorted(0, 0, 0);
}

std::vector<position_t> range(position_t from, position_t to) {
    std::vector<position_t> positions(static_cast<std::size_t>(to - from));
    std::iota(positions.begin(), positions.end(), from);
    return positions;
}
std::vector<position_t> joined(std::vector<position_t> a, const std::vector<position_t>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

struct Way {
    std::vector<std::int32_t> sizes;
    bool steps;
};
const Way ways[] = {{{1}, true}, {{0}, false}, {{7, 1, 3}, false}};

}  // namespace

TEST_CASE("6: of 1000 equal scores the 7 oldest stay, every time") {
    const auto equal = [](position_t) { return 1.5f; };
    const std::vector<position_t> wanted = joined(range(0, 9), range(990, 1000));
    for (int run = 0; run < test::rounds(100, 6); ++run) {
        const host ctx(1 + run % 3);
        const Way& way = ways[run % 3];
        const std::vector<position_t> kept = held(ctx, policy(2, 10, 7), 1000, way.sizes, way.steps, equal);
        if (kept != wanted) {
            CHECK(kept == wanted);
        }
    }
    const host ctx(1);
    // With a decay the newest win, and the steps n change nothing among equal scores but when a
    // boundary is crossed.
    for (const Way& way : ways) {
        CHECK(held(ctx, policy(2, 10, 7, -0.5f), 1000, way.sizes, way.steps, equal) ==
              joined(range(0, 2), range(983, 1000)));
        CHECK(held(ctx, policy(2, 10, 7), 1000, way.sizes, way.steps, equal) == wanted);
    }
}

TEST_CASE("7: budgets above the number of tokens keep everything") {
    const host ctx(1);
    const auto some = [](position_t t) { return static_cast<float>(t * 7 % 5); };
    for (const Way& way : ways) {
        CHECK(held(ctx, policy(0, 1, 2048), 64, way.sizes, way.steps, some) == range(0, 64));
        CHECK(held(ctx, policy(0, 1, 5), 3, way.sizes, way.steps, some) == range(0, 3));
        CHECK(held(ctx, policy(0, 1, 5), 0, way.sizes, way.steps, some).empty());
    }
}

TEST_CASE("3, 9: a page of 4 rows, 13 tokens, NaN in the tail, pages in any order") {
    // Whoever reads exported pages may move them: a pool with permuted ids gives the same rows.
    const host ctx(1);
    test::BoundCache<P, float> under_test(
        ctx, {.query_heads = 1, .kv_heads = 1, .head_dim_qk = 8, .head_dim_vo = 8, .page_size = 4},
        policy(2, 5, 9));
    std::mt19937 generator(1);
    test::Tensor<float> q(1, 1, 13, 8), k(1, 1, 13, 8), v(1, 1, 13, 8), out(1, 1, 13, 8);
    q.fill_normal(generator);
    k.fill_normal(generator);
    v.fill_normal(generator);
    test::Plane<float> scores(1, 1, 13, 1.0f);
    const Batch batch{.count = 1, .length = 13};
    test::call<P, float>(ctx, under_test, 0, batch, std::as_const(q).view(), std::as_const(k).view(),
                         std::as_const(v).view(), out.view(), {.scores = scores.view()}, false);
    under_test.cache.advance(ctx, batch);
    CHECK(std::all_of(out.data.begin(), out.data.end(), [](float x) { return std::isfinite(x); }));
    const auto ref = under_test.cache.layer(0);
    CHECK(std::isnan(ref.k[std::int64_t{13} * 8]));  // the tail of the last page is still poisoned
    std::int32_t indptr[2], indices[4], last[1];
    export_heads(ctx, ref, {.count = 1}, {indptr, indices, last, 4});
    CHECK(indptr[1] == 4);
    CHECK(last[0] == 1);
    std::vector<float> pool(static_cast<std::size_t>(ref.rows * 8), std::numeric_limits<float>::quiet_NaN());
    const std::int32_t moved_to[] = {2, 0, 3, 1};
    constexpr std::int64_t page_size = std::int64_t{4} * 8;
    for (std::int32_t page = 0; page < 4; ++page) {
        std::copy_n(ref.k + indices[page] * page_size, page_size, pool.begin() + moved_to[page] * page_size);
        indices[page] = moved_to[page];
    }
    std::vector<position_t> found;
    for (std::int32_t at = 0; at < indptr[1]; ++at) {
        for (std::int32_t r = 0; r < (at + 1 < indptr[1] ? 4 : last[0]); ++r) {
            const float* row = pool.data() + indices[at] * page_size + std::int64_t{r} * 8;
            for (std::int32_t t = 0; t < 13; ++t) {
                if (std::equal(row, row + 8, k.view().row(0, 0, t))) {
                    found.push_back(t);
                }
            }
        }
    }
    std::sort(found.begin(), found.end());
    CHECK(found == under_test.sorted(0, 0, 0));
    CHECK(found == range(0, 13));
}

TEST_CASE("13: a window of 1024 with 19 tokens; 4 sinks with 2 tokens, growing past the window") {
    const host ctx(1);
    const auto falling = [](position_t t) { return -static_cast<float>(t); };
    for (const Way& way : ways) {
        CHECK(held(ctx, policy(0, 1024, 3), 19, way.sizes, way.steps, falling) == range(0, 19));
        CHECK(held(ctx, policy(4, 3, 0), 2, way.sizes, way.steps, falling) == range(0, 2));
        CHECK(held(ctx, policy(4, 3, 0), 5, way.sizes, way.steps, falling) == range(0, 5));
        CHECK(held(ctx, policy(4, 3, 0), 7, way.sizes, way.steps, falling) == range(0, 7));
        CHECK(held(ctx, policy(4, 3, 0), 8, way.sizes, way.steps, falling) ==
              joined(range(0, 4), range(5, 8)));
        CHECK(held(ctx, policy(4, 3, 2), 30, way.sizes, way.steps, falling) ==
              joined(range(0, 6), range(27, 30)));
    }
}

TEST_CASE("14: a budget of 8 rows and 20 tokens: the next position is 20") {
    const host ctx(1);
    for (const Way& way : ways) {
        const std::vector<position_t> kept = held(ctx, policy(1, 3, 4), 21, way.sizes, way.steps,
                                                  [](position_t t) { return t % 4 == 0 ? 5.0f : 0.0f; });
        CHECK(kept == std::vector<position_t>{0, 4, 8, 12, 16, 18, 19, 20});
    }
}

TEST_CASE("16: one token and a budget of 0; chunks longer than everything that is kept") {
    const host ctx(1);
    const auto zero = [](position_t) { return 0.0f; };
    for (const Way& way : ways) {
        CHECK(held(ctx, policy(0, 1, 0), 1, way.sizes, way.steps, zero) == range(0, 1));
        CHECK(held(ctx, policy(0, 1, 0), 9, way.sizes, way.steps, zero) == range(8, 9));
        CHECK(held(ctx, policy(1, 1, 0), 9, way.sizes, way.steps, zero) == std::vector<position_t>{0, 8});
        CHECK(held(ctx, policy(0, 1, 1), 2, way.sizes, way.steps, zero) == range(0, 2));
    }
}

TEST_CASE("18: a prompt twice the budget, and totals at every edge") {
    const host ctx(1);
    const auto rising = [](position_t t) { return static_cast<float>(t); };
    constexpr std::int32_t s = 2, w = 5;
    for (const std::int64_t total : {s + w, s + w + 1, 16}) {
        const std::int32_t k = budget_for_total(total, s, w);
        for (const Way& way : ways) {
            const auto length = static_cast<std::int32_t>(2 * total);
            const std::vector<position_t> kept =
                held(ctx, policy(s, w, k), length, way.sizes, way.steps, rising);
            CHECK(static_cast<std::int64_t>(kept.size()) == total);
            CHECK(kept == joined(range(0, s), range(length - w - k, length)));
        }
    }
    for (const std::int64_t total : {0, s - 1, s, s + w - 1}) {
        CHECK_REFUSED(budget_for_total(total, s, w),
                      "total budget: " + std::to_string(total) + " is not allowed");
    }
}

TEST_CASE("19: the window has as many keys in a mask as in prefill and in decode") {
    const host ctx(1);
    constexpr std::int32_t length = 40;
    for (const std::int32_t w : {1, 2, 4, 16, 39, 40, 41, 100}) {
        CAPTURE(w);
        const P head_params = policy(0, w, 0);
        const Sequences sequences{.batch = 1, .length = length};
        test::Plane<expiry_t> expiry(1, 1, length);
        test::Plane<float> scores(1, 1, length);
        test::Plane<std::int32_t> live(1, 1, length);
        test::Workspace workspace(build_mask_workspace_bytes(ctx, head_params, sequences, 1));
        build_mask(ctx, head_params, std::as_const(scores).view(), sequences, expiry.view(), workspace);
        live_keys(ctx, std::as_const(expiry).view(), sequences, live.view());
        for (const Way& way : ways) {
            for (std::int32_t n = 1; n <= length; n += 3) {
                const std::vector<position_t> kept =
                    held(ctx, head_params, n, way.sizes, way.steps, [](position_t) { return 0.0f; });
                const std::vector<position_t> wanted = range(std::max(0, n - w), n);
                if (kept != wanted) {
                    CHECK(kept == wanted);
                }
                if (live.at(0, 0, n - 1) != std::ssize(kept)) {
                    CHECK(live.at(0, 0, n - 1) == std::ssize(kept));
                }
            }
        }
    }
}

TEST_CASE("20: two heads of one layer, one with its long-range part full and one not, in the same step") {
    const host ctx(2);
    const std::int32_t budgets[] = {3, 500};
    const P head_params{Sink<>{1}, Window<>{4}, TopKBudget<>{per_head(budgets, 1, 2)},
                        Decay<dynamic>{-0.01f, 1}};
    const CacheShape shape{.query_heads = 4, .kv_heads = 2, .head_dim_qk = 16, .head_dim_vo = 16};
    CHECK(test::run_beside_shadow<float>(ctx, head_params, shape, 100, {1}, true, 1) <= 1.0);
    CHECK(test::run_beside_shadow<float>(ctx, head_params, shape, 100, {50, 1, 1, 7}, true, 2) <= 1.0);
    CHECK(test::run_beside_shadow<bf16>(ctx, head_params, shape, 100, {3, 1, 20}, false, 3) <= 1.0);
}
