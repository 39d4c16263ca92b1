// The life of a sequence in a cache of an observed policy: blocks and calls, rows, sequences, forks,
// snapshots, refusals, exhaustion, threads.
#include "../../support/observed_harness.hpp"
#include "../../support/refusal.hpp"

#include <doctest/doctest.h>

#include <limits>

using namespace kvpolicy;
using test::BaselineCase;
using test::content;
using test::feed;
using test::pool;
using test::random_case;
using test::shape_of;
using test::Tensor;
using test::tensor;

TEST_CASE("a prompt in blocks of one is steps, and blocks of c are calls of c") {
    const host ctx{1};
    const BaselineCase one = random_case(3, 2, 3, 50);
    const auto same = [&](const auto& whole_policy, const auto& cut_policy, std::int32_t chunk, bool steps) {
        using P = std::remove_cvref_t<decltype(whole_policy)>;
        test::BoundDual<P, float> whole(ctx, shape_of(one), pool, whole_policy);
        test::BoundDual<P, float> cut(ctx, shape_of(one), pool, cut_policy);
        const Tensor<float> out = feed<P>(ctx, one, whole, 0, 0, 50, false);
        for (std::int32_t at = 0; at < 50; at += chunk) {
            const Tensor<float> part = feed<P>(ctx, one, cut, 0, at, std::min(at + chunk, 50), steps);
            for (std::int32_t h = 0; h < one.heads(); ++h) {
                for (std::int32_t t = at; t < std::min(at + chunk, 50); ++t) {
                    for (std::int32_t d = 0; d < one.dim; ++d) {
                        CHECK(out.view().row(0, h, t)[d] ==
                              doctest::Approx(part.view().row(0, h, t)[d]).epsilon(1e-5));
                    }
                }
            }
        }
        for (std::int32_t h = 0; h < one.kv_heads; ++h) {
            CHECK(whole.sorted(0, 0, h) == cut.sorted(0, 0, h));
        }
    };
    using Prefill = ObservedPrefill;
    same(h2o_for_total(12, 4, {Prefill::stepwise()}), h2o_for_total(12, 4), 1, true);
    same(tova_for_total(12, {Prefill::stepwise()}), tova_for_total(12), 1, true);
    same(h2o_for_total(12, 4, {Prefill::in_chunks(7)}), h2o_for_total(12, 4), 7, false);
    same(tova_for_total(12, {Prefill::in_chunks(7)}), tova_for_total(12), 7, false);
    same(snapkv_for_total(16, 4, {Prefill::in_chunks(7)}), snapkv_for_total(16, 4), 7, false);
}

TEST_CASE("rows: the budget and one, the budget, and what is decoded") {
    const host ctx{1};
    const BaselineCase one = random_case(4, 2, 1, 60);
    test::BoundCache<H2O<>, float> heavy(ctx, shape_of(one), h2o_for_total(10));
    CHECK(heavy.cache.bytes().keys_and_values == std::size_t{2} * 12 * 2 * 16 * 4);  // 11 rows in pages of 4
    feed<H2O<>>(ctx, one, heavy, 0, 0, 30, false);
    CHECK(heavy.cache.usage(0, 0, 0).size() == 11);
    CHECK(heavy.cache.length(0) == 30);
    test::BoundDual<SnapKV<>, float> snap(ctx, shape_of(one), pool, snapkv_for_total(12, 4));
    feed<SnapKV<>>(ctx, one, snap, 0, 0, 30, false);
    CHECK(snap.cache.usage(0, 0, 1).size() == 12);
    feed<SnapKV<>>(ctx, one, snap, 0, 30, 45, true);
    CHECK(snap.cache.usage(0, 0, 1).size() == 27);
    // A second prompt prunes what was decoded, too.
    feed<SnapKV<>>(ctx, one, snap, 0, 45, 60, false);
    CHECK(snap.cache.usage(0, 0, 1).size() == 12);
    CHECK(snap.sorted(0, 0, 1)[8] == 56);
}

TEST_CASE("SnapKV decodes by steps: a prompt of one token prunes") {
    const host ctx{1};
    const BaselineCase one = random_case(5, 2, 1, 60);
    test::BoundDual<SnapKV<>, float> steps(ctx, shape_of(one), pool, snapkv_for_total(24, 4)),
        prompts(ctx, shape_of(one), pool, snapkv_for_total(24, 4));
    for (auto* const bound : {&steps, &prompts}) {
        feed<SnapKV<>>(ctx, one, *bound, 0, 0, 30, false);
        REQUIRE(bound->cache.usage(0, 0, 0).size() == 24);
        for (std::int32_t t = 30; t < 60; ++t) {
            feed<SnapKV<>>(ctx, one, *bound, 0, t, t + 1, bound == &steps);
        }
    }
    CHECK(steps.cache.usage(0, 0, 0).size() == 54);
    CHECK(prompts.cache.usage(0, 0, 0).size() == 24);
}

TEST_CASE("max_sequences of one call are as if alone, and others are untouched") {
    const host ctx{2};
    const std::int32_t seq_ids[] = {2, 0}, q_len[] = {9, 23};
    const auto check = [&](const auto& policy) {
        using P = std::remove_cvref_t<decltype(policy)>;
        const BaselineCase a = random_case(7, 2, 3, 40), b = random_case(8, 2, 3, 40);
        test::BoundDual<P, float> both(ctx, shape_of(a, 3), pool, policy),
            alone(ctx, shape_of(a, 3), pool, policy);
        feed<P>(ctx, a, both, 1, 0, 20, false);
        const auto bystander = content(both, 1);
        Tensor<float> q(2, a.heads(), 23, 16), k(2, 2, 23, 16), v(2, 2, 23, 16), out(2, a.heads(), 23, 16);
        for (std::int32_t i = 0; i < 2; ++i) {
            const auto fill = [&](Tensor<float>& to, std::uint64_t array) {
                const Tensor<float> from = tensor<float>(i == 0 ? a : b, array);
                for (std::int32_t h = 0; h < from.heads; ++h) {
                    std::copy_n(from.view().row(0, h, 0), 23 * 16, to.view().row(i, h, 0));
                }
            };
            fill(q, 0), fill(k, 1), fill(v, 2);
        }
        const Batch batch{.count = 2, .seq_ids = seq_ids, .q_len = q_len, .length = 23};
        both.reserve(ctx, batch);
        test::call_ref<P, float>(ctx, both.cache.layer(0), batch, q.view(), k.view(), v.view(), out.view(),
                                 {}, false);
        both.cache.advance(ctx, batch);
        feed<P>(ctx, a, alone, 2, 0, 9, false);
        feed<P>(ctx, b, alone, 0, 0, 23, false);
        CHECK(content(both, 2) == content(alone, 2));
        CHECK(content(both, 0) == content(alone, 0));
        CHECK(content(both, 1) == bystander);
        // Steps, one of them of an entry that sits out.
        const std::int32_t ones[] = {1, 0};
        const Batch step{.count = 2, .seq_ids = seq_ids, .q_len = ones};
        both.reserve(ctx, step);
        test::call_ref<P, float>(ctx, both.cache.layer(0), step, q.tokens(10, 1), k.tokens(10, 1),
                                 v.tokens(10, 1), out.tokens(0, 1), {}, true);
        both.cache.advance(ctx, step);
        CHECK(content(both, 0) == content(alone, 0));
        CHECK(both.cache.length(2) == 10);
    };
    check(h2o_for_total(8, 4, {ObservedPrefill::in_chunks(5)}));
    check(tova_for_total(8));
    check(snapkv_for_total(8, 4));
}

TEST_CASE("a fork of heads whose entries grow shares none that a later prompt writes again") {
    const host ctx{1};
    const BaselineCase one = random_case(11, 2, 2, 40);
    CacheShape shape = shape_of(one, 2);
    shape.page_size = 2;
    const std::int32_t budgets[] = {0, 6};
    test::BoundDual<SnapKV<>, float> bound(
        ctx, shape, pool, SnapKV<>{Window<>{4}, TopKBudget<>{per_head(budgets, 1, 2)}, WindowMass{}});
    feed<SnapKV<>>(ctx, one, bound, 0, 0, 8, false);
    feed<SnapKV<>>(ctx, one, bound, 0, 8, 16, true);
    for (std::int32_t slab = 0; slab < 10; ++slab) {
        bound.add_slab(ctx);
    }
    bound.cache.fork(ctx, 0, 1);
    const auto before = content(bound, 0);
    REQUIRE(content(bound, 1) == before);
    feed<SnapKV<>>(ctx, one, bound, 1, 16, 24, false);
    feed<SnapKV<>>(ctx, one, bound, 1, 24, 32, true);
    CHECK(content(bound, 0) == before);
}

TEST_CASE("fork, snapshot and restore go on alike") {
    const host ctx{1};
    const BaselineCase one = random_case(9, 2, 2, 60);
    const auto check = [&](const auto& policy, const auto& other) {
        using P = std::remove_cvref_t<decltype(policy)>;
        test::BoundDual<P, float> bound(ctx, shape_of(one, 3), pool, policy),
            second(ctx, shape_of(one, 1), pool, policy);
        feed<P>(ctx, one, bound, 0, 0, 30, false);
        feed<P>(ctx, one, bound, 0, 30, 40, true);
        for (int i = 0; i < 20; ++i) {
            bound.add_slab(ctx);
            second.add_slab(ctx);
        }
        bound.cache.fork(ctx, 0, 2);
        std::vector<unsigned char> blob(bound.cache.snapshot_bytes(0));
        bound.cache.snapshot(ctx, 0, blob.data(), blob.size());
        second.cache.restore(ctx, 0, blob.data(), blob.size());
        feed<P>(ctx, one, bound, 0, 40, 60, true);
        feed<P>(ctx, one, bound, 2, 40, 60, true);
        feed<P>(ctx, one, second, 0, 40, 60, true);
        CHECK(content(bound, 0) == content(bound, 2));
        CHECK(content(bound, 0) == content(second, 0));
        test::BoundDual<P, float> stranger(ctx, shape_of(one, 1), pool, other);
        CHECK_REFUSED(stranger.cache.restore(ctx, 0, blob.data(), blob.size()), "of another policy");
    };
    check(h2o_for_total(12), h2o_for_total(12, {.aggregate = group_aggregate::max}));
    check(tova_for_total(12), tova_for_total(12, {.whole_layer = false}));
    check(snapkv_for_total(12, 4), snapkv_for_total(12, 4, {.pooling = MassPooling::max(5)}));
}

TEST_CASE("a refused call and an exhausted pool change nothing") {
    const host ctx{1};
    const BaselineCase one = random_case(10, 2, 2, 40);
    const float bad[] = {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()};
    test::BoundDual<TOVA<>, float> bound(ctx, shape_of(one), pool,
                                         tova_for_total(8, {ObservedPrefill::in_chunks(3)}));
    feed<TOVA<>>(ctx, one, bound, 0, 0, 20, false);
    const auto before = bound.everything();
    Tensor<float> q = tensor<float>(one, 0), k = tensor<float>(one, 1), v = tensor<float>(one, 2);
    Tensor<float> out(1, 4, 40, 16);
    for (const float x : bad) {
        k.view().row(0, 1, 29)[3] = x;
        const Batch batch{.count = 1, .length = 15};
        CHECK_REFUSED((test::call_ref<TOVA<>, float>(ctx, bound.cache.layer(0), batch, q.tokens(20, 15),
                                                     k.tokens(20, 15), v.tokens(20, 15), out.tokens(20, 15),
                                                     {}, false)),
                      "k[0][1][9]");
        CHECK(bound.everything() == before);
    }
    const std::int32_t budgets[] = {3, 4};
    test::BoundCache<TOVA<>, float> uneven(
        ctx, shape_of(one), TOVA<>{Window<1>{}, TopKBudget<>{per_head(budgets, 1, 2)}, LastMass{}});
    CHECK_REFUSED((test::call_ref<TOVA<>, float>(ctx, uneven.cache.layer(0), {.count = 1}, q.tokens(0, 1),
                                                 k.tokens(0, 1), v.tokens(0, 1), out.tokens(0, 1), {}, true)),
                  "head 1: 0, 1, 4 is not allowed");

    test::BoundDual<SnapKV<>, float> small(
        ctx, shape_of(one), {.slab_pages = 4, .max_slabs = 8, .max_seq_len = 40}, snapkv_for_total(8, 4));
    small.add_slab(ctx);
    const Tensor<float> good = tensor<float>(one, 1);
    std::uint32_t status = 0;
    std::int32_t appended = 0;
    for (; appended < 40 && status == 0; ++appended) {
        test::call_ref<SnapKV<>, float>(ctx, small.cache.layer(0), {.count = 1}, q.tokens(appended, 1),
                                        good.tokens(appended, 1), v.tokens(appended, 1),
                                        out.tokens(appended, 1), {}, true, &status);
        if (status == 0) {
            small.cache.advance(ctx, {.count = 1});
        }
    }
    CHECK(status == status_pool_exhausted);
    CHECK(appended == 9);  // two heads, two pages of 4 rows each
    CHECK(out.view().row(0, 0, 8)[0] == 0.0f);
    const auto held = small.sorted(0, 0, 0);
    status = 0;
    small.add_slab(ctx);
    test::call_ref<SnapKV<>, float>(ctx, small.cache.layer(0), {.count = 1}, q.tokens(8, 1),
                                    good.tokens(8, 1), v.tokens(8, 1), out.tokens(8, 1), {}, true, &status);
    small.cache.advance(ctx, {.count = 1});
    CHECK(status == 0);
    CHECK(small.sorted(0, 0, 0).size() == held.size() + 1);
    CHECK_REFUSED((feed<SnapKV<>>(ctx, one, small, 0, 9, 41, false)), "max_seq_len");
}

TEST_CASE("threads and instruction sets") {
    const BaselineCase one = random_case(12, 3, 2, 60);
    const auto check = [&](const auto& policy) {
        using P = std::remove_cvref_t<decltype(policy)>;
        std::vector<std::vector<unsigned char>> found;
        for (const int threads : {1, 2, 5}) {
            const host ctx(threads);
            test::BoundDual<P, float> bound(ctx, shape_of(one), pool, policy);
            feed<P>(ctx, one, bound, 0, 0, 40, false);
            feed<P>(ctx, one, bound, 0, 40, 60, true);
            found.push_back(content(bound, 0));
        }
        CHECK(found[0] == found[1]);
        CHECK(found[0] == found[2]);
    };
    check(h2o_for_total(12, {ObservedPrefill::in_chunks(9)}));
    check(tova_for_total(12));
    check(snapkv_for_total(12, 4));
}
