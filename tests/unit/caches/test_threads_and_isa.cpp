// The same bits on any number of threads; the same results to rounding on every instruction set.
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "support/bound_cache.hpp"
#include "support/shadow.hpp"

#include <doctest/doctest.h>

#include <utility>

using namespace kvpolicy;

namespace {

using P = Policy<Sink<4>, Window<>, TopKBudget<>, Decay<1>>;

template <class T>
struct Run {
    std::vector<unsigned char> content;
    std::vector<T> outputs;
    std::vector<float> sums;
};

/// A prefill of `length` tokens and some steps, on one context.
template <class T>
Run<T> run(const host& ctx, std::int32_t max_sequences, std::int32_t window, std::int32_t budget,
           std::int32_t length, CacheShape shape) {
    const P policy{{}, Window<>{window}, TopKBudget<>{budget}, Decay<1>{-0.01f}};
    shape.max_sequences = max_sequences;
    const std::int32_t heads = shape.kv_heads, query_heads = shape.query_heads, dim = shape.head_dim_qk;
    test::BoundCache<P, T> under_test(ctx, shape, policy);
    std::mt19937 generator(6);
    Run<T> result;
    for (const std::int32_t chunk : {length, 1, 1, 17, 1}) {
        test::Tensor<T> q(max_sequences, query_heads, chunk, dim), k(max_sequences, heads, chunk, dim),
            v(max_sequences, heads, chunk, dim), out(max_sequences, query_heads, chunk, dim);
        q.fill_normal(generator);
        k.fill_normal(generator);
        v.fill_normal(generator);
        test::Plane<float> scores(max_sequences, heads, chunk), lse(max_sequences, query_heads, chunk);
        test::fill_scores(scores, test::Scores::random, generator);
        const Batch batch{.count = max_sequences, .length = chunk};
        test::call<P, T>(ctx, under_test, 0, batch, std::as_const(q).view(), std::as_const(k).view(),
                         std::as_const(v).view(), out.view(), {.scores = scores.view(), .lse = lse.view()},
                         chunk == 1);
        under_test.cache.advance(ctx, batch);
        result.outputs.insert(result.outputs.end(), out.data.begin(), out.data.end());
        result.sums.insert(result.sums.end(), lse.data.begin(), lse.data.end());
    }
    // And right: attention over the rows, one by one.
    test::Tensor<T> query(max_sequences, query_heads, 1, dim), seen(max_sequences, query_heads, 1, dim);
    query.fill_normal(generator);
    const auto ref = under_test.cache.layer(0);
    test::Workspace workspace(workspace_bytes(ctx, ref, {.batch = max_sequences, .tokens = 1}));
    attend(ctx, ref,
           {.q = std::as_const(query).view(), .out = seen.view(), .batch = {.count = max_sequences}},
           workspace);
    double worst = 0.0;
    for (std::int32_t seq = 0; seq < max_sequences; ++seq) {
        for (std::int32_t h = 0; h < heads; ++h) {
            test::NaiveHead rows;
            for (std::int32_t r = 0; r < ref.used(seq, h); ++r) {
                const std::int64_t row = ref.first_row(seq, h) + r;
                rows.rows.push_back({ref.position[row], test::real_row(ref.k + row * dim, dim),
                                     test::real_row(ref.v + row * dim, dim), 0.0f, false});
            }
            for (std::int32_t g = 0; g < query_heads / heads; ++g) {
                const std::int32_t hq = h * (query_heads / heads) + g;
                const std::vector<double> wanted =
                    rows.attend(test::real_row(std::as_const(query).view().row(seq, hq, 0), dim),
                                1.0f / std::sqrt(static_cast<float>(dim)))
                        .out;
                for (std::int32_t c = 0; c < dim; ++c) {
                    const double want = wanted[static_cast<std::size_t>(c)];
                    const double got = test::real(seen.view().row(seq, hq, 0)[c]);
                    worst = std::max(worst, std::abs(got - want) / (test::compute_error<T> +
                                                                    test::storage_unit<T> * std::abs(want)));
                }
            }
        }
    }
    CHECK(worst <= 1.0);
    for (std::int32_t seq = 0; seq < max_sequences; ++seq) {
        const std::vector<unsigned char> mine = under_test.content(0, seq);
        result.content.insert(result.content.end(), mine.begin(), mine.end());
    }
    return result;
}

template <class T>
void check(std::int32_t max_sequences, std::int32_t window, std::int32_t budget, std::int32_t length,
           const CacheShape& shape = {
               .query_heads = 6, .kv_heads = 2, .head_dim_qk = 16, .head_dim_vo = 16}) {
    const Run<T> one = run<T>(host(1), max_sequences, window, budget, length, shape);
    for (const int threads : {2, 3, 4}) {
        CAPTURE(threads);
        const Run<T> many = run<T>(host(threads), max_sequences, window, budget, length, shape);
        CHECK(many.content == one.content);
        CHECK(many.sums == one.sums);
        const bool same_bits =
            std::memcmp(many.outputs.data(), one.outputs.data(), one.outputs.size() * sizeof(T)) == 0;
        CHECK(same_bits);
    }
    const Run<T> portable = run<T>(host(2, isa::portable), max_sequences, window, budget, length, shape);
    CHECK(portable.content == one.content);
    double worst = 0.0;
    for (std::size_t i = 0; i < one.outputs.size(); ++i) {
        const double a = test::real(one.outputs[i]), b = test::real(portable.outputs[i]);
        // Stored numbers may fall on either side of a midpoint: one unit in the last place,
        // twice the roundoff.
        worst = std::max(
            worst, std::abs(a - b) / (test::compute_error<T> + 2 * test::storage_unit<T> * std::abs(a)));
    }
    CHECK(worst <= 1.0);
}

}  // namespace

TEST_CASE("results are the same bits on 1, 2, 3 and 4 threads, and to rounding on portable bodies") {
    check<float>(3, 20, 30, 200);
    check<bf16>(3, 20, 30, 200);
    check<float>(1, 5, 3, 90);
}

TEST_CASE("the same where a decode step is split over its rows") {
    // One KV head: two parts of at least 2048 rows.
    const CacheShape narrow{.query_heads = 1, .kv_heads = 1, .head_dim_qk = 8, .head_dim_vo = 8};
    check<float>(1, 64, 4100, 4200, narrow);
    check<bf16>(1, 64, 4100, 4200, narrow);
}
