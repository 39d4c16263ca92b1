// Which keys a query of a bounded cache sees, shown by one-hot values; that what it must not see never leaks,
// NaN included; that any strides will do; every group size and head dimension.
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "support/bound_cache.hpp"
#include "support/shadow.hpp"

#include <doctest/doctest.h>

#include <set>

using namespace kvpolicy;

namespace {

constexpr float quiet_nan = std::numeric_limits<float>::quiet_NaN();

const std::vector<std::vector<std::int32_t>> chunkings = {{1},   {0}, {3, 1, 7, 2, 5}, {2}, {11, 4, 1, 1, 6},
                                                          {5, 3}};

/// Values are one-hot(position), so an output is the row of weights: which of them are not 0 after each
/// token, fed in chunks. The first chunking goes through step.
template <class T, class P>
void check_one_hot(const host& ctx, const P& policy, std::int32_t length) {
    constexpr std::int32_t dim = 64;
    REQUIRE(length <= dim);
    std::mt19937 generator(7);
    test::Tensor<T> q(1, 2, length, 8), k(1, 1, length, 8), v(1, 1, length, dim);
    q.fill_normal(generator, 0.5f);
    k.fill_normal(generator, 0.5f);
    v.fill(0.0f);
    for (std::int32_t t = 0; t < length; ++t) {
        v.view().row(0, 0, t)[t] = static_cast<T>(1.0f);
    }
    test::Plane<float> scores(1, 1, length);
    test::fill_scores(scores, test::Scores::random, generator);
    const CacheShape shape{.query_heads = 2, .kv_heads = 1, .head_dim_qk = 8, .head_dim_vo = dim};
    for (std::size_t way = 0; way < chunkings.size(); ++way) {
        CAPTURE(way);
        test::BoundCache<P, T> under_test(ctx, shape, policy);
        test::Shadow<P, T> shadow(policy, shape);
        test::Tensor<T> out(1, 2, length, dim), again(1, 2, 1, dim);
        std::int32_t at = 0;
        bool all_agree = true;
        const auto seen = [&](const T* row) {
            std::vector<position_t> keys;
            for (std::int32_t c = 0; c < dim; ++c) {
                if (static_cast<float>(row[c]) != 0.0f) {
                    keys.push_back(c);
                }
            }
            return keys;
        };
        for (const std::int32_t chunk : test::chunks_of(length, chunkings[way])) {
            const Batch batch{.count = 1, .length = chunk};
            test::call<P, T>(ctx, under_test, 0, batch, q.tokens(at, chunk), k.tokens(at, chunk),
                             v.tokens(at, chunk), out.tokens(at, chunk), {.scores = scores.tokens(at, chunk)},
                             way == 0);
            under_test.cache.advance(ctx, batch);
            for (std::int32_t j = 0; j < chunk; ++j, ++at) {
                shadow.append(0, 0, at, k.view(), v.view(), std::as_const(scores).view());
                const std::vector<position_t> wanted = shadow.head(0, 0).positions();
                for (std::int32_t hq = 0; hq < 2; ++hq) {
                    all_agree = all_agree && seen(out.view().row(0, hq, at)) == wanted;
                }
                if constexpr (!P::ranked) {
                    const HeadParams head_params = policy.params(0, 0);
                    all_agree = all_agree && static_cast<std::int32_t>(wanted.size()) ==
                                                 std::min(at + 1, head_params.sinks + head_params.window);
                }
            }
            // A query that brings no token sees what is held.
            test::Workspace workspace(
                workspace_bytes(ctx, under_test.cache.layer(0), {.batch = 1, .tokens = 1}));
            attend(ctx, under_test.cache.layer(0),
                   {.q = q.tokens(at - 1, 1), .out = again.view(), .batch = {.count = 1}}, workspace);
            all_agree = all_agree && seen(again.view().row(0, 0, 0)) == under_test.sorted(0, 0, 0);
        }
        CHECK(all_agree);
    }
}

}  // namespace

TEST_CASE("a window of w shows exactly w keys, by steps, in chunks and in one prefill") {
    const host ctx(1);
    using Streaming = Policy<Sink<>, Window<>>;
    check_one_hot<bf16>(ctx, Streaming{Sink<>{0}, Window<>{4}}, 40);
    check_one_hot<float>(ctx, Policy<Sink<3>>{}, 12);  // no Window: w = 1
    struct Numbers {
        std::int32_t s, w, length;
    };
    for (const Numbers n :
         {Numbers{0, 4, 40}, {0, 1, 12}, {4, 7, 60}, {2, 1024, 19}, {30, 4, 20}, {4, 3, 2}}) {
        CAPTURE(n.s);
        CAPTURE(n.w);
        check_one_hot<float>(ctx, Streaming{Sink<>{n.s}, Window<>{n.w}}, n.length);
    }
}

TEST_CASE("with a budget, a query sees sinks, window and the long-range keys, and nothing else") {
    const host ctx(1);
    using Budget = Policy<Sink<>, Window<>, TopKBudget<>>;
    struct Numbers {
        std::int32_t s, w, k, length;
    };
    for (const Numbers n :
         {Numbers{2, 4, 5, 60}, {0, 4, 5, 60}, {2, 4, 0, 40}, {1, 1, 1, 40}, {2, 3, 100, 60}}) {
        CAPTURE(n.s);
        CAPTURE(n.w);
        CAPTURE(n.k);
        check_one_hot<float>(ctx, Budget{Sink<>{n.s}, Window<>{n.w}, TopKBudget<>{n.k}}, n.length);
        check_one_hot<bf16>(ctx, Budget{Sink<>{n.s}, Window<>{n.w}, TopKBudget<>{n.k}}, n.length);
    }
}

namespace {

/// A token whose value (or key) is NaN reaches the queries that see it and no other.
template <class T>
void check_poisoned_token(bool in_value, const std::vector<std::int32_t>& sizes, bool steps,
                          std::int32_t group) {
    const host ctx(1);
    constexpr std::int32_t length = 40, poisoned = 13, window = 4;
    using P = Policy<Sink<>, Window<>>;
    std::mt19937 generator(3);
    test::Tensor<T> q(1, group, length, 16), k(1, 1, length, 16), v(1, 1, length, 16),
        out(1, group, length, 16);
    q.fill_normal(generator);
    k.fill_normal(generator);
    v.fill_normal(generator);
    (in_value ? v : k).view().row(0, 0, poisoned)[5] = static_cast<T>(quiet_nan);
    test::BoundCache<P, T> under_test(
        ctx, {.query_heads = group, .kv_heads = 1, .head_dim_qk = 16, .head_dim_vo = 16},
        P{Sink<>{2}, Window<>{window}});
    std::int32_t at = 0;
    for (const std::int32_t chunk : test::chunks_of(length, sizes)) {
        const Batch batch{.count = 1, .length = chunk};
        test::call<P, T>(ctx, under_test, 0, batch, q.tokens(at, chunk), k.tokens(at, chunk),
                         v.tokens(at, chunk), out.tokens(at, chunk), {}, steps);
        under_test.cache.advance(ctx, batch);
        at += chunk;
    }
    bool right = true;
    for (std::int32_t t = 0; t < length; ++t) {
        for (std::int32_t hq = 0; hq < group; ++hq) {
            bool any = false;
            for (std::int32_t c = 0; c < 16; ++c) {
                const float x = static_cast<float>(out.view().row(0, hq, t)[c]);
                any = any || x != x;
            }
            right = right && any == (t >= poisoned && t < poisoned + window);
        }
    }
    CAPTURE(in_value);
    CAPTURE(steps);
    CAPTURE(group);
    CHECK(right);
}

}  // namespace

TEST_CASE("a NaN reaches the queries that see its key, and no others") {
    for (const bool in_value : {true, false}) {
        for (const std::int32_t group : {1, 5, 20}) {
            check_poisoned_token<float>(in_value, {1}, true, group);
            check_poisoned_token<float>(in_value, {0}, false, group);
            check_poisoned_token<float>(in_value, {9, 2}, false, group);
            check_poisoned_token<bf16>(in_value, {1}, true, group);
            check_poisoned_token<bf16>(in_value, {9, 2}, false, group);
        }
    }
}

TEST_CASE("a sequence that held NaN is clean after clear, and so are rows that were never written") {
    const host ctx(1);
    using P = Policy<Sink<1>, Window<6>, TopKBudget<8>>;
    const CacheShape shape{.max_sequences = 2,
                           .query_heads = 2,
                           .kv_heads = 1,
                           .head_dim_qk = 8,
                           .head_dim_vo = 8,
                           .page_size = 5};
    test::BoundCache<P, float> under_test(ctx, shape);
    test::Tensor<float> q(2, 2, 1, 8), k(2, 1, 1, 8), v(2, 1, 1, 8), out(2, 2, 1, 8);
    test::Plane<float> scores(2, 1, 1, 1.0f);
    const Batch both{.count = 2};
    const auto step_once = [&] {
        test::call<P, float>(ctx, under_test, 0, both, q.view(), k.view(), v.view(), out.view(),
                             {.scores = scores.view()}, true);
        under_test.cache.advance(ctx, both);
    };
    std::mt19937 generator(1);
    k.fill(quiet_nan);
    v.fill(quiet_nan);
    // By steps only, and past the budget in both lives, so that what a step remembers (its next
    // victim) is in use.
    for (int t = 0; t < 40; ++t) {
        test::fill_scores(scores, test::Scores::random, generator);
        step_once();
    }
    under_test.cache.clear(ctx, 0);
    test::Shadow<P, float> shadow({}, shape);
    for (std::int32_t t = 0; t < 40; ++t) {
        test::fill_scores(scores, test::Scores::random, generator);
        q.fill_normal(generator);
        k.fill_normal(generator);
        v.fill_normal(generator);
        step_once();
        shadow.append(0, 0, 0, k.view(), v.view(), std::as_const(scores).view());
        CHECK(shadow.off(0, 0, 0, q.view(), out.view()) <= 1.0);
        CHECK(shadow.same_sets(under_test, 0, 0));
    }
    // The other sequence keeps its NaN in sink and long-range rows: nobody touched it.
    CHECK(std::isnan(out.view().row(1, 0, 0)[0]));
}

namespace {

/// One input in many layouts. Gaps and tails are NaN; the output's must keep what they held.
template <class T>
struct Layouts {
    static constexpr std::int32_t batch = 2, kv_heads = 2, group = 3, length = 21, dim = 16;
    static constexpr std::int32_t query_heads = kv_heads * group;
    test::Tensor<T> q{batch, query_heads, length, dim}, k{batch, kv_heads, length, dim},
        v{batch, kv_heads, length, dim};
    test::Plane<float> scores{batch, kv_heads, length};
    using P = Policy<Sink<1>, Window<6>, TopKBudget<8>>;

    Layouts() {
        std::mt19937 generator(11);
        q.fill_normal(generator);
        k.fill_normal(generator);
        v.fill_normal(generator);
        test::fill_scores(scores, test::Scores::random, generator);
    }

    static void copy(rows_view<const T> from, rows_view<T> to) {
        for (std::int32_t b = 0; b < from.batch; ++b) {
            for (std::int32_t h = 0; h < from.heads; ++h) {
                for (std::int32_t t = 0; t < from.length; ++t) {
                    std::copy_n(from.row(b, h, t), dim, to.row(b, h, t));
                }
            }
        }
    }
    static rows_view<const T> part(rows_view<const T> all, std::int32_t from, std::int32_t count) {
        all.data += from * all.row_stride;
        all.length = count;
        return all;
    }

    /// Outputs [batch, query_heads, length, dim] from inputs in any layout, into a view of any layout.
    void run(const host& ctx, rows_view<const T> qs, rows_view<const T> ks, rows_view<const T> vs,
             rows_view<T> out, const std::vector<std::int32_t>& sizes, bool steps) const {
        test::BoundCache<P, T> under_test(ctx, {.max_sequences = batch,
                                                .query_heads = query_heads,
                                                .kv_heads = kv_heads,
                                                .head_dim_qk = dim,
                                                .head_dim_vo = dim});
        std::int32_t at = 0;
        for (const std::int32_t chunk : test::chunks_of(length, sizes)) {
            const Batch entries{.count = batch, .length = chunk};
            rows_view<T> to = out;
            to.data += at * to.row_stride;
            to.length = chunk;
            test::call<P, T>(ctx, under_test, 0, entries, part(qs, at, chunk), part(ks, at, chunk),
                             part(vs, at, chunk), to, {.scores = scores.tokens(at, chunk)}, steps);
            under_test.cache.advance(ctx, entries);
            at += chunk;
        }
    }

    /// The same bits, whatever the strides.
    void check(rows_view<T> qs, rows_view<T> ks, rows_view<T> vs, rows_view<T> outs,
               std::vector<T>& out_memory) const {
        copy(q.view(), qs);
        copy(k.view(), ks);
        copy(v.view(), vs);
        const host ctx(1);
        for (const std::vector<std::int32_t>& sizes : {std::vector<std::int32_t>{1}, {0}, {4, 1, 9}}) {
            const bool steps = sizes[0] == 1;
            test::Tensor<T> wanted(batch, query_heads, length, dim);
            run(ctx, q.view(), k.view(), v.view(), wanted.view(), sizes, steps);
            std::fill(out_memory.begin(), out_memory.end(), static_cast<T>(-77.0f));
            run(ctx, qs, ks, vs, outs, sizes, steps);
            bool equal = true;
            std::size_t written = 0;
            for (std::int32_t b = 0; b < batch; ++b) {
                for (std::int32_t h = 0; h < query_heads; ++h) {
                    for (std::int32_t t = 0; t < length; ++t) {
                        for (std::int32_t c = 0; c < dim; ++c, ++written) {
                            equal = equal && test::real(outs.row(b, h, t)[c]) ==
                                                 test::real(wanted.view().row(b, h, t)[c]);
                        }
                    }
                }
            }
            CHECK(equal);
            const auto untouched = static_cast<std::size_t>(std::count_if(
                out_memory.begin(), out_memory.end(), [](T x) { return static_cast<float>(x) == -77.0f; }));
            CHECK(untouched == out_memory.size() - written);
        }
    }
};

template <class T>
std::vector<T> poisoned(std::int64_t count) {
    return std::vector<T>(static_cast<std::size_t>(count), static_cast<T>(quiet_nan));
}

}  // namespace

TEST_CASE_TEMPLATE("q, k and v as slices of one fused row, [B, S, (Hq + 2 Hkv) D]", T, float, bf16) {
    using L = Layouts<T>;
    const L layouts;
    constexpr std::int32_t width = (L::query_heads + 2 * L::kv_heads) * L::dim + 3;  // and a gap
    std::vector<T> fused = poisoned<T>(std::int64_t{L::batch} * L::length * width);
    const auto slice = [&](std::int32_t first_head, std::int32_t heads) {
        return rows_view<T>{fused.data() + first_head * L::dim, L::batch, heads, L::length, L::dim,
                            std::int64_t{L::length} * width,    L::dim,   width};
    };
    // The output as projections read it: NHD, rows apart.
    constexpr std::int32_t out_width = L::query_heads * L::dim + 5;
    std::vector<T> out(std::size_t{L::batch} * L::length * out_width);
    const rows_view<T> outs{out.data(), L::batch, L::query_heads,
                            L::length,  L::dim,   std::int64_t{L::length} * out_width,
                            L::dim,     out_width};
    layouts.check(slice(0, L::query_heads), slice(L::query_heads, L::kv_heads),
                  slice(L::query_heads + L::kv_heads, L::kv_heads), outs, out);
}

TEST_CASE_TEMPLATE("K and V as two views of one [N, 2, block, H, D] buffer", T, float, bf16) {
    using L = Layouts<T>;
    const L layouts;
    constexpr std::int32_t block = L::length + 4;  // with an unused tail
    constexpr std::int64_t plane = std::int64_t{block} * L::kv_heads * L::dim;
    std::vector<T> pool = poisoned<T>(L::batch * 2 * plane);
    const auto view = [&](std::int64_t which) {
        return rows_view<T>{
            pool.data() + which * plane, L::batch, L::kv_heads, L::length, L::dim, 2 * plane, L::dim,
            L::kv_heads * L::dim};
    };
    std::vector<T> q = poisoned<T>(std::int64_t{L::batch} * L::query_heads * (L::length + 2) * (L::dim + 1));
    const rows_view<T> qs{q.data(),
                          L::batch,
                          L::query_heads,
                          L::length,
                          L::dim,
                          std::int64_t{L::query_heads} * (L::length + 2) * (L::dim + 1),
                          std::int64_t{L::length + 2} * (L::dim + 1),
                          L::dim + 1};
    std::vector<T> out(std::size_t{L::batch} * L::query_heads * L::length * L::dim);
    layouts.check(qs, view(0), view(1), view_bhsd(out.data(), L::batch, L::query_heads, L::length, L::dim),
                  out);
}

TEST_CASE("any number of query heads a KV head") {
    using P = Policy<Sink<1>, Window<6>, TopKBudget<8>>;
    const host ctx(1);
    for (const std::int32_t group : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 64}) {
        CAPTURE(group);
        const CacheShape shape{.query_heads = 2 * group, .kv_heads = 2, .head_dim_qk = 16, .head_dim_vo = 16};
        CHECK(test::run_beside_shadow<float>(ctx, P{}, shape, 30, {1}, true, 1) <= 1.0);
        CHECK(test::run_beside_shadow<float>(ctx, P{}, shape, 30, {13, 1, 4}, false, 2) <= 1.0);
        CHECK(test::run_beside_shadow<bf16>(ctx, P{}, shape, 30, {5, 1, 9}, true, 3) <= 1.0);
    }
}

TEST_CASE("head dimensions that are multiples of 8, and D_k != D_v; other ones are refused by name") {
    using P = Policy<Sink<1>, Window<6>, TopKBudget<8>>;
    const host ctx(1);
    constexpr std::int32_t dims[][2] = {{64, 64},   {72, 72},   {80, 80}, {96, 96}, {128, 128},
                                        {256, 256}, {192, 128}, {64, 8},  {8, 64},  {24, 40}};
    for (const auto& dim : dims) {
        CAPTURE(dim[0]);
        CAPTURE(dim[1]);
        const CacheShape shape{.query_heads = 3, .kv_heads = 1, .head_dim_qk = dim[0], .head_dim_vo = dim[1]};
        CHECK(test::run_beside_shadow<float>(ctx, P{}, shape, 24, {1}, true, 1) <= 1.0);
        CHECK(test::run_beside_shadow<bf16>(ctx, P{}, shape, 24, {9, 1, 4}, false, 2) <= 1.0);
        CHECK(test::run_beside_shadow<float>(host(1, isa::portable), P{}, shape, 24, {9, 1, 4}, false, 2) <=
              1.0);
    }
}

TEST_CASE("scale and logits_soft_cap are the call's own") {
    using P = Policy<Sink<1>, Window<6>, TopKBudget<8>>;
    const host ctx(1);
    const CacheShape shape{.query_heads = 4, .kv_heads = 2, .head_dim_qk = 32, .head_dim_vo = 32};
    for (const AttentionParams attention :
         {AttentionParams{0.3f, 0.0f}, AttentionParams{0.0f, 2.0f}, AttentionParams{0.5f, 20.0f}}) {
        CHECK(test::run_beside_shadow<float>(ctx, P{}, shape, 30, {1}, true, 4, attention) <= 1.0);
        CHECK(test::run_beside_shadow<bf16>(ctx, P{}, shape, 30, {7, 2}, false, 5, attention) <= 1.0);
    }
}
