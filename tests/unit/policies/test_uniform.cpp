// Keys at a stride, and random keys: lifetimes against the reference, caches against
// lifetimes, repeatability.
#include <kvpolicy/scorers/sequence.hpp>
#include <kvpolicy/uniform.hpp>

#include "../../support/bound_cache.hpp"
#include "../../support/cases.hpp"
#include "../../support/refusal.hpp"
#include "../../support/vectors.hpp"

#include <doctest/doctest.h>

#include <cmath>

using namespace kvpolicy;

TEST_CASE("random keys are those of the reference, in masks and in caches") {
    const host ctx{1};
    const auto file = kvpolicy_test::vectors::load("baselines.kvpv");
    const auto& cases = file.get<std::int32_t>("random_cases");
    for (std::int64_t n = 0; n < cases.shape[0]; ++n) {
        CAPTURE(n);
        const std::int32_t* c = cases.row(n);
        const std::int32_t head = c[2], length = c[3], heads = head + 1;
        const RandomScorer scorer{static_cast<std::uint64_t>(c[0]), c[1]};
        const RandomKeys<> policy{Sink<>{0}, Window<>{c[4]}, TopKBudget<>{c[5]}, scorer};
        const std::int64_t at = file.get<std::int32_t>("random_offsets")[n];
        const std::vector<expiry_t> expected(file.get<std::int32_t>("random_expiry").data() + at,
                                             file.get<std::int32_t>("random_expiry").data() + at + length);

        test::Tensor<float> x(1, heads, length, 8), out(1, heads, length, 8);
        std::mt19937 generator(1);
        x.fill_normal(generator);
        const test::Tensor<float>& in = x;
        test::Plane<float> scores(1, heads, length);
        const Sequences sequences{.batch = 1, .length = length};
        test::Workspace scratch(score_sequence_workspace_bytes(ctx, scorer, in.view(), in.view(), sequences));
        score_sequence(ctx, scorer, in.view(), in.view(), sequences, c[4], scores.view(), scratch);
        test::Plane<expiry_t> expiry(1, heads, length);
        test::Workspace workspace(build_mask_workspace_bytes(ctx, policy, sequences, heads));
        build_mask(ctx, policy, scores.view(), sequences, expiry.view(), workspace);

        test::BoundCache<RandomKeys<>, float> steps(
            ctx, {.query_heads = heads, .kv_heads = heads, .head_dim_qk = 8, .head_dim_vo = 8}, policy);
        test::BoundCache<RandomKeys<>, float> chunk(
            ctx, {.query_heads = heads, .kv_heads = heads, .head_dim_qk = 8, .head_dim_vo = 8}, policy);
        for (std::int32_t q = 0; q < length; ++q) {
            CHECK(std::min(expiry.at(0, head, q), length) == expected[static_cast<std::size_t>(q)]);
            test::call<RandomKeys<>, float>(ctx, steps, 0, {.count = 1}, in.tokens(q, 1), in.tokens(q, 1),
                                            in.tokens(q, 1), out.tokens(q, 1), {}, true);
            steps.cache.advance(ctx, {.count = 1});
            std::vector<position_t> held;
            for (std::int32_t t = 0; t <= q; ++t) {
                if (q < expiry.at(0, head, t)) {
                    held.push_back(t);
                }
            }
            CHECK(steps.sorted(0, 0, head) == held);
        }
        const Batch all{.count = 1, .length = length};
        test::call<RandomKeys<>, float>(ctx, chunk, 0, all, in.view(), in.view(), in.view(), out.view(), {},
                                        false);
        chunk.cache.advance(ctx, all);
        CHECK(chunk.content(0, 0) == steps.content(0, 0));
    }
}

TEST_CASE("random keys are spread evenly, and differ by seed, layer and head") {
    const auto draw = [](std::uint64_t seed, std::int32_t layer, std::int32_t head, std::int32_t count) {
        const RandomScorer scorer{seed, layer};
        float state[2];
        scorer.reset(state);
        std::vector<float> drawn;
        for (std::int32_t i = 0; i < count; ++i) {
            scorer.absorb(head, state, state, state, state);
            drawn.push_back(scorer.read(head, state, state, state, state));
        }
        return drawn;
    };
    CHECK(draw(1, 0, 0, 50) == draw(1, 0, 0, 50));
    CHECK(draw(1, 0, 0, 50) != draw(2, 0, 0, 50));
    CHECK(draw(1, 0, 0, 50) != draw(1, 1, 0, 50));
    CHECK(draw(1, 0, 0, 50) != draw(1, 0, 1, 50));
    double sum = 0.0;
    for (const float x : draw(3, 0, 0, 10000)) {
        CHECK((x >= 0.0f && x <= 1.0f));
        sum += static_cast<double>(x);
    }
    CHECK(std::fabs(sum / 10000 - 0.5) < 5.0 / std::sqrt(12.0 * 10000));
    // Beyond what one float counts.
    const RandomScorer scorer{1, 0};
    float state[2] = {1048575.0f, 15.0f};
    scorer.absorb(0, state, state, state, state);
    CHECK(state[0] == 0.0f);
    CHECK(state[1] == 16.0f);
    const float at = scorer.read(0, state, state, state, state);
    CHECK(at == static_cast<float>(random_unit(1, 0, (std::uint64_t{16} << 20) - 1)));
}

TEST_CASE("a stride for a total is the smallest that fits") {
    struct Sizes {
        std::int32_t sinks, window;
    };
    for (const Sizes& sizes : {Sizes{0, 5}, Sizes{3, 5}, Sizes{5, 1}}) {
        const std::int32_t sinks = sizes.sinks, window = sizes.window;
        for (const std::int32_t length : {1, 5, 12, 20, 97}) {
            for (const std::int32_t total : {7, 9, 10, 30}) {
                if (total <= sinks + window) {
                    continue;
                }
                const std::int32_t n = stride_for_total(total, sinks, window, length);
                CAPTURE(sinks);
                CAPTURE(length);
                CAPTURE(total);
                const auto rows = [&](std::int32_t step) {
                    std::int32_t count = 0;
                    for (std::int32_t t = 0; t < length; ++t) {
                        count += t < sinks || t >= length - window || t % step == 0 ? 1 : 0;
                    }
                    return count;
                };
                CHECK((rows(n) <= total || length <= total));
                for (std::int32_t less = 1; less < n; ++less) {
                    CHECK(rows(less) > total);
                }
            }
        }
    }
    CHECK_REFUSED(stride_for_total(8, 3, 5, 100),
                  "total budget: 8 is not allowed; it must be above sinks + window = 8");
    CHECK_REFUSED(Stride<>{0}, "stride n: 0");
    const host ctx{1};
    test::Plane<expiry_t> expiry(1, 1, 40);
    build_mask(ctx, UniformStride<>{Sink<>{1}, Window<>{4}, Stride<>{7}}, {}, {.batch = 1, .length = 40},
               expiry.view(), {});
    for (std::int32_t t = 0; t < 40; ++t) {
        CHECK(std::min(expiry.at(0, 0, t), 40) == (t % 7 == 0 ? 40 : std::min(t + 4, 40)));
    }
}
