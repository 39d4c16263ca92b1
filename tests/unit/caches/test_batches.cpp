// Sequences of different lengths that join and leave, several layers, heads of different budgets: every call
// is compared with the naive cache, with a cache of one sequence, and with what it must not touch.
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "support/bound_cache.hpp"
#include "support/refusal.hpp"
#include "support/shadow.hpp"

#include <doctest/doctest.h>

#include <memory>
#include <numeric>

using namespace kvpolicy;

namespace {

constexpr std::int32_t layers = 2, seq_ids = 5, kv_heads = 3, group = 2, dim = 8;
constexpr std::int32_t query_heads = kv_heads * group;
constexpr float quiet_nan = std::numeric_limits<float>::quiet_NaN();

// By layer and head: a head without long-range part, one that fills at once, one that never fills.
constexpr std::int32_t sinks[] = {0, 2, 1, 3, 0, 1}, windows[] = {1, 4, 6, 2, 5, 3},
                       budgets[] = {2, 0, 400, 5, 9, 1};
constexpr std::int32_t steps[] = {1, 1, 1, 3, 1, 1};
constexpr float slopes[] = {0.0f, 0.0f, -0.1f, -0.4f, -0.02f, 0.0f};

using Budget = Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>>;
Budget budget_policy() {
    return Budget{Sink<>{per_head(sinks, layers, kv_heads)}, Window<>{per_head(windows, layers, kv_heads)},
                  TopKBudget<>{per_head(budgets, layers, kv_heads)},
                  Decay<dynamic>{per_head(slopes, layers, kv_heads), per_head(steps, layers, kv_heads)}};
}

/// One call's tensors, NaN wherever no token is.
template <class T>
struct Call {
    test::Tensor<T> q, k, v, out;
    test::Plane<float> scores, lse;
    Call(std::int32_t count, std::int32_t length, const std::int32_t* q_len, std::mt19937& generator)
        : q(count, query_heads, length, dim),
          k(count, kv_heads, length, dim),
          v(count, kv_heads, length, dim),
          out(count, query_heads, length, dim),
          scores(count, kv_heads, length),
          lse(count, query_heads, length, -55.0f) {
        q.fill_normal(generator);
        k.fill_normal(generator);
        v.fill_normal(generator);
        out.fill(-55.0f);
        test::fill_scores(scores, generator() % 2 == 0 ? test::Scores::few_values : test::Scores::random,
                          generator);
        for (std::int32_t i = 0; i < count; ++i) {
            for (std::int32_t t = q_len[i]; t < length; ++t) {
                for (std::int32_t h = 0; h < query_heads; ++h) {
                    poison_row(q.view().row(i, h, t));
                }
                for (std::int32_t h = 0; h < kv_heads; ++h) {
                    poison_row(k.view().row(i, h, t));
                    poison_row(v.view().row(i, h, t));
                    scores.at(i, h, t) = quiet_nan;
                }
            }
        }
    }
    static void poison_row(T* row) { std::fill_n(row, dim, static_cast<T>(quiet_nan)); }
};

template <class T, class P>
void check_joins_and_leaves(const host& ctx, const P& policy, std::uint32_t seed, position_t rebase_limit) {
    std::mt19937 generator(seed);
    const CacheShape shape{.layers = layers,
                           .max_sequences = seq_ids,
                           .query_heads = query_heads,
                           .kv_heads = kv_heads,
                           .head_dim_qk = dim,
                           .head_dim_vo = dim,
                           .page_size = 3};
    CacheShape one = shape;
    one.max_sequences = 1;
    test::BoundCache<P, T> batched(ctx, shape, policy, nullptr, {}, rebase_limit);
    std::vector<test::Shadow<P, T>> shadows;
    for (std::int32_t layer = 0; layer < layers; ++layer) {
        shadows.emplace_back(policy, shape, layer, AttentionParams{}, rebase_limit);
    }
    std::vector<std::unique_ptr<test::BoundCache<P, T>>> alone;
    for (std::int32_t seq = 0; seq < seq_ids; ++seq) {
        alone.push_back(std::make_unique<test::BoundCache<P, T>>(ctx, one, policy, nullptr, AttentionParams{},
                                                                 rebase_limit));
    }
    std::vector<position_t> lengths(seq_ids, 0);

    double worst = 0.0;
    bool untouched = true, same_as_alone = true, same_sets = true, same_lengths = true;
    for (int round = 0; round < 80; ++round) {
        if (generator() % 6 == 0) {  // somebody leaves, and another sequence takes the sequence
            const auto seq = static_cast<std::int32_t>(generator() % seq_ids);
            std::vector<std::vector<unsigned char>> before;
            for (std::int32_t other = 0; other < seq_ids; ++other) {
                before.push_back(batched.slot_bytes(0, other));
            }
            batched.cache.clear(ctx, seq);
            alone[static_cast<std::size_t>(seq)]->cache.clear(ctx, 0);
            for (auto& shadow : shadows) {
                shadow.clear(seq);
            }
            lengths[static_cast<std::size_t>(seq)] = 0;
            for (std::int32_t other = 0; other < seq_ids; ++other) {
                untouched = untouched && (other == seq || before[static_cast<std::size_t>(other)] ==
                                                              batched.slot_bytes(0, other));
            }
        }
        std::vector<std::int32_t> named(seq_ids);
        std::iota(named.begin(), named.end(), 0);
        std::shuffle(named.begin(), named.end(), generator);
        const auto count = static_cast<std::int32_t>(generator() % (seq_ids + 1));
        const bool as_steps = generator() % 2 == 0;
        const auto length = static_cast<std::int32_t>(as_steps ? 1 : 1 + generator() % 7);
        std::vector<std::int32_t> q_len(seq_ids, 0);
        for (std::int32_t i = 0; i < count; ++i) {
            q_len[static_cast<std::size_t>(i)] =
                static_cast<std::int32_t>(generator() % static_cast<std::uint32_t>(length + 1));
        }
        const Batch batch{.count = count, .seq_ids = named.data(), .q_len = q_len.data(), .length = length};
        const auto tokens_of = [&](std::int32_t seq) {
            for (std::int32_t i = 0; i < count; ++i) {
                if (named[static_cast<std::size_t>(i)] == seq) {
                    return q_len[static_cast<std::size_t>(i)];
                }
            }
            return 0;
        };

        // Layers in either order: they share lengths, which move only once, at the end.
        const bool backwards = generator() % 2 == 0;
        for (std::int32_t n = 0; n < layers; ++n) {
            const std::int32_t layer = backwards ? layers - 1 - n : n;
            Call<T> in(count, length, q_len.data(), generator);
            std::vector<std::vector<unsigned char>> before;
            for (std::int32_t l = 0; l < layers; ++l) {
                for (std::int32_t seq = 0; seq < seq_ids; ++seq) {
                    before.push_back(batched.slot_bytes(l, seq));
                }
            }
            test::call<P, T>(ctx, batched, layer, batch, in.q.view(), in.k.view(), in.v.view(), in.out.view(),
                             {.scores = in.scores.view(), .lse = in.lse.view()}, as_steps);
            for (std::int32_t l = 0; l < layers; ++l) {
                for (std::int32_t seq = 0; seq < seq_ids; ++seq) {
                    const bool same =
                        before[static_cast<std::size_t>(l) * seq_ids + static_cast<std::size_t>(seq)] ==
                        batched.slot_bytes(l, seq);
                    untouched = untouched && same == (l != layer || tokens_of(seq) == 0);
                    same_lengths =
                        same_lengths && batched.cache.length(seq) == lengths[static_cast<std::size_t>(seq)];
                }
            }
            for (std::int32_t i = 0; i < count; ++i) {
                const std::int32_t seq = named[static_cast<std::size_t>(i)],
                                   mine = q_len[static_cast<std::size_t>(i)];
                // The same sequence alone.
                auto& single = *alone[static_cast<std::size_t>(seq)];
                const auto entry = [&](auto view) {
                    view.data += i * view.batch_stride;
                    view.batch = 1;
                    return view;
                };
                test::Tensor<T> out(1, query_heads, length, dim);
                out.fill(-55.0f);
                const Batch own{.count = 1, .length = mine};
                test::call<P, T>(ctx, single, layer, own, entry(std::as_const(in.q).view()),
                                 entry(std::as_const(in.k).view()), entry(std::as_const(in.v).view()),
                                 out.view(), {.scores = entry(std::as_const(in.scores).view())}, as_steps);
                const T* batch_out = in.out.view().row(i, 0, 0);
                same_as_alone = same_as_alone &&
                                std::memcmp(batch_out, out.data.data(), out.data.size() * sizeof(T)) == 0;
                for (std::int32_t j = 0; j < length; ++j) {
                    if (j < mine) {
                        shadows[static_cast<std::size_t>(layer)].append(seq, i, j, in.k.view(), in.v.view(),
                                                                        in.scores.view());
                        worst = std::max(worst, shadows[static_cast<std::size_t>(layer)].off(
                                                    seq, i, j, in.q.view(), in.out.view(), in.lse.view()));
                    } else {
                        for (std::int32_t h = 0; h < query_heads; ++h) {
                            untouched = untouched && in.lse.at(i, h, j) == -55.0f;
                            for (std::int32_t c = 0; c < dim; ++c) {
                                untouched =
                                    untouched && static_cast<float>(in.out.view().row(i, h, j)[c]) == -55.0f;
                            }
                        }
                    }
                }
            }
        }
        batched.cache.advance(ctx, batch);
        for (std::int32_t i = 0; i < count; ++i) {
            const std::int32_t seq = named[static_cast<std::size_t>(i)],
                               mine = q_len[static_cast<std::size_t>(i)];
            lengths[static_cast<std::size_t>(seq)] += mine;
            alone[static_cast<std::size_t>(seq)]->cache.advance(ctx, {.count = 1, .length = mine});
        }
        for (std::int32_t seq = 0; seq < seq_ids; ++seq) {
            same_lengths =
                same_lengths && batched.cache.length(seq) == lengths[static_cast<std::size_t>(seq)];
            for (std::int32_t layer = 0; layer < layers; ++layer) {
                same_sets =
                    same_sets && shadows[static_cast<std::size_t>(layer)].same_sets(batched, layer, seq);
                same_as_alone = same_as_alone && batched.content(layer, seq) ==
                                                     alone[static_cast<std::size_t>(seq)]->content(layer, 0);
            }
        }
    }
    CHECK(worst <= 1.0);
    CHECK(untouched);
    CHECK(same_as_alone);
    CHECK(same_sets);
    CHECK(same_lengths);
}

}  // namespace

TEST_CASE("sequences join and leave, in any order, with any number of tokens") {
    const host ctx(2);
    for (const std::uint32_t seed : {1u, 2u, 3u, 4u}) {
        CAPTURE(seed);
        check_joins_and_leaves<float>(ctx, budget_policy(), seed, seed % 2 == 0 ? 7 : rebase_limit);
    }
    check_joins_and_leaves<bf16>(host(1), budget_policy(), 5, rebase_limit);
    const Policy<Sink<2>, Window<3>, ThresholdGate<above>, TopKBudget<4>, Decay<1>> gated{
        {}, {}, ThresholdGate<above>{0.25f}, {}, Decay<1>{-0.05f}};
    check_joins_and_leaves<float>(host(3), gated, 6, 11);
    check_joins_and_leaves<float>(ctx, Policy<Sink<1>, Window<4>>{}, 7, rebase_limit);
}

TEST_CASE("usage: rows in use, and a length that no count of rows can tell") {
    const host ctx(1);
    using P = Policy<Sink<3>, Window<4>, TopKBudget<8>>;
    test::BoundCache<P, float> under_test(
        ctx, {.query_heads = 1, .kv_heads = 1, .head_dim_qk = 8, .head_dim_vo = 8, .page_size = 4});
    std::mt19937 generator(2);
    test::Tensor<float> x(1, 1, 1, 8), out(1, 1, 1, 8);
    test::Plane<float> scores(1, 1, 1);
    for (std::int32_t t = 0; t < 40; ++t) {
        const HeadUsage now = under_test.cache.usage(0, 0, 0);
        CHECK(now.length == t);
        CHECK(under_test.cache.length(0) == t);
        CHECK(now.sinks == std::min(t, 3));
        CHECK(now.window == std::clamp(t - 3, 0, 4));
        CHECK(now.long_range == std::clamp(t - 7, 0, 8));
        CHECK(now.size() == std::min(t, 15));
        CHECK(now.capacity == 15);
        x.fill_normal(generator);
        scores.data[0] = static_cast<float>(generator() % 5);
        test::call<P, float>(ctx, under_test, 0, {.count = 1}, x.view(), x.view(), x.view(), out.view(),
                             {.scores = scores.view()}, true);
        // Its own position, not the count of rows.
        const std::vector<position_t> held = under_test.positions(0, 0, 0);
        CHECK(std::count(held.begin(), held.end(), t) <= 1);
        under_test.cache.advance(ctx, {.count = 1});
        const std::vector<position_t> after = under_test.sorted(0, 0, 0);
        CHECK(after.back() == t);
        CHECK(std::adjacent_find(after.begin(), after.end()) == after.end());
    }
}

TEST_CASE("the rows in use come first: [sinks | ring | long-range]") {
    const host ctx(1);
    using P = Policy<Sink<2>, Window<3>, TopKBudget<2>>;
    test::BoundCache<P, float> under_test(
        ctx, {.query_heads = 1, .kv_heads = 1, .head_dim_qk = 8, .head_dim_vo = 8});
    test::Tensor<float> x(1, 1, 1, 8), out(1, 1, 1, 8);
    test::Plane<float> scores(1, 1, 1);
    // Scores by position: 0 and 1 are sinks, 4 and 6 are the best of the rest.
    const float by_position[] = {9, 9, 1, 2, 5, 3, 8, 0, 4, 1, 1, 1};
    const std::vector<std::vector<position_t>> rows = {{0},
                                                       {0, 1},
                                                       {0, 1, 2},
                                                       {0, 1, 2, 3},
                                                       {0, 1, 2, 3, 4},
                                                       {0, 1, 5, 3, 4, 2},
                                                       {0, 1, 5, 6, 4, 2, 3},
                                                       {0, 1, 5, 6, 7, 4, 3},
                                                       {0, 1, 8, 6, 7, 4, 5},
                                                       {0, 1, 8, 9, 7, 4, 6},
                                                       {0, 1, 8, 9, 10, 4, 6},
                                                       {0, 1, 11, 9, 10, 4, 6}};
    for (std::size_t t = 0; t < rows.size(); ++t) {
        CAPTURE(t);
        x.fill(static_cast<float>(t));
        scores.data[0] = by_position[t];
        test::call<P, float>(ctx, under_test, 0, {.count = 1}, x.view(), x.view(), x.view(), out.view(),
                             {.scores = scores.view()}, true);
        under_test.cache.advance(ctx, {.count = 1});
        CHECK(under_test.positions(0, 0, 0) == rows[t]);
        const auto ref = under_test.cache.layer(0);
        for (std::size_t r = 0; r < rows[t].size(); ++r) {
            CHECK(ref.k[r * 8 + 3] == static_cast<float>(rows[t][r]));
            CHECK(ref.v[r * 8 + 7] == static_cast<float>(rows[t][r]));
            CHECK(ref.score[r] == by_position[rows[t][r]]);
        }
    }
}

TEST_CASE("bytes() is the formula, bind keeps inside the buffer wherever that starts") {
    const CacheShape shape{.layers = layers,
                           .max_sequences = seq_ids,
                           .query_heads = query_heads,
                           .kv_heads = kv_heads,
                           .head_dim_qk = 16,
                           .head_dim_vo = 8,
                           .page_size = 4};
    const host ctx(1);
    FixedBudgetCache<Budget, bf16> cache(shape, budget_policy());
    std::size_t values = 0;
    for (std::int32_t layer = 0; layer < layers; ++layer) {
        std::int64_t rows = 0;
        for (std::int32_t h = 0; h < kv_heads; ++h) {
            const std::int32_t at = layer * kv_heads + h;
            rows += (sinks[at] + windows[at] + budgets[at] + 3) / 4 * 4;
        }
        CHECK(cache.rows(layer) == rows);
        values += static_cast<std::size_t>(rows) * seq_ids * (16 + 8) * 2;
    }
    CHECK(cache.bytes().keys_and_values == values);
    CHECK(cache.bytes().scorer_state == 0);
    CHECK(cache.bytes().total() == values + cache.bytes().bookkeeping);
    // Positions and scores are 12 bytes a row of 48; the rest is small change and alignment.
    CHECK(cache.bytes().bookkeeping < values / 48 * 12 + detail::alignment * 40);

    for (const std::size_t shift :
         {std::size_t{0}, std::size_t{1}, std::size_t{16}, std::size_t{63}, std::size_t{255}}) {
        std::vector<unsigned char> memory(cache.bytes().total() + shift + 256, 0xab);
        cache.bind(ctx, memory.data() + shift, cache.bytes().total());
        std::mt19937 generator(1);
        test::Tensor<bf16> q(seq_ids, query_heads, 9, 16), k(seq_ids, kv_heads, 9, 16),
            v(seq_ids, kv_heads, 9, 8), out(seq_ids, query_heads, 9, 8);
        q.fill_normal(generator);
        k.fill_normal(generator);
        v.fill_normal(generator);
        test::Plane<float> scores(seq_ids, kv_heads, 9);
        test::fill_scores(scores, test::Scores::random, generator);
        const Batch batch{.count = seq_ids, .length = 9};
        for (int round = 0; round < 12; ++round) {
            for (std::int32_t layer = 0; layer < layers; ++layer) {
                const auto ref = cache.layer(layer);
                const std::size_t needed = workspace_bytes(ctx, ref, {.batch = seq_ids, .tokens = 9});
                // The workspace may start anywhere too.
                std::vector<unsigned char> workspace(needed + shift + 64, 0xab);
                prefill(ctx, ref,
                        {.q = q.view(),
                         .k = k.view(),
                         .v = v.view(),
                         .out = out.view(),
                         .batch = batch,
                         .scores = scores.view()},
                        {workspace.data() + shift, needed});
                CHECK(std::count(workspace.begin(), workspace.begin() + static_cast<std::ptrdiff_t>(shift),
                                 0xab) == static_cast<std::ptrdiff_t>(shift));
                CHECK(std::count(workspace.end() - 64, workspace.end(), 0xab) == 64);
            }
            cache.advance(ctx, batch);
        }
        CHECK(std::count(memory.begin(), memory.begin() + static_cast<std::ptrdiff_t>(shift), 0xab) ==
              static_cast<std::ptrdiff_t>(shift));
        CHECK(std::count(memory.end() - 64, memory.end(), 0xab) == 64);
        CHECK(cache.length(4) == 108);
    }
    // A bind empties every sequence.
    std::vector<unsigned char> memory(cache.bytes().total(), 0xff);
    cache.bind(ctx, memory.data(), memory.size());
    CHECK(cache.length(4) == 0);
    CHECK(cache.usage(1, 4, 2).size() == 0);
}

namespace {

/// Attention by somebody who knows pages and nothing else.
template <class T>
std::vector<double> paged_attention(const T* k, const T* v, std::int32_t page_size, std::int32_t head_dim_qk,
                                    std::int32_t head_dim_vo, const std::int32_t* indptr,
                                    const std::int32_t* indices, const std::int32_t* last,
                                    std::int64_t sequence, const T* query) {
    test::NaiveHead rows;
    for (std::int32_t at = indptr[sequence]; at < indptr[sequence + 1]; ++at) {
        const std::int32_t used = at + 1 < indptr[sequence + 1] ? page_size : last[sequence];
        for (std::int32_t r = 0; r < used; ++r) {
            const std::int64_t row = std::int64_t{indices[at]} * page_size + r;
            rows.rows.push_back({0, test::real_row(k + row * head_dim_qk, head_dim_qk),
                                 test::real_row(v + row * head_dim_vo, head_dim_vo), 0, false});
        }
    }
    return rows.attend(test::real_row(query, head_dim_qk), 1.0f / std::sqrt(static_cast<float>(head_dim_qk)))
        .out;
}

}  // namespace

TEST_CASE("exported pages cover exactly the rows in use, and paged attention over them is attend()") {
    const host ctx(2);
    for (const std::int32_t page_size : {1, 4, 16}) {
        CAPTURE(page_size);
        const CacheShape shape{.layers = layers,
                               .max_sequences = seq_ids,
                               .query_heads = query_heads,
                               .kv_heads = kv_heads,
                               .head_dim_qk = 16,
                               .head_dim_vo = 8,
                               .page_size = page_size};
        test::BoundCache<Budget, bf16> under_test(ctx, shape, budget_policy());
        std::mt19937 generator(9);
        constexpr std::int32_t max_seq_len = 23;
        const std::int32_t q_len[] = {23, 0, 1, 9, 4};
        test::Tensor<bf16> q(seq_ids, query_heads, max_seq_len, 16), k(seq_ids, kv_heads, max_seq_len, 16),
            v(seq_ids, kv_heads, max_seq_len, 8), out(seq_ids, query_heads, max_seq_len, 8);
        q.fill_normal(generator);
        k.fill_normal(generator);
        v.fill_normal(generator);
        test::Plane<float> scores(seq_ids, kv_heads, max_seq_len);
        test::fill_scores(scores, test::Scores::random, generator);
        const Batch batch{.count = seq_ids, .q_len = q_len, .length = max_seq_len};
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            test::call<Budget, bf16>(ctx, under_test, layer, batch, q.view(), k.view(), v.view(), out.view(),
                                     {.scores = scores.view()}, false);
        }
        under_test.cache.advance(ctx, batch);

        const std::int32_t order[] = {3, 1, 0, 4};  // some sequences, in another order; sequence 1 is empty
        const Batch named{.count = 4, .seq_ids = order};
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            const auto ref = under_test.cache.layer(layer);
            std::int64_t pages = 0;
            for (const std::int32_t seq : order) {
                for (std::int32_t h = 0; h < kv_heads; ++h) {
                    pages += (under_test.cache.usage(layer, seq, h).size() + page_size - 1) / page_size;
                }
            }
            std::vector<std::int32_t> indptr(4 * kv_heads + 1, -9),
                indices(static_cast<std::size_t>(pages), -9), last(4 * kv_heads, -9);
            CHECK_REFUSED(
                export_heads(ctx, ref, named, {indptr.data(), indices.data(), last.data(), pages - 1}),
                "at least the pages in use, " + std::to_string(pages));
            CHECK(indptr[0] == -9);
            export_heads(ctx, ref, named, {indptr.data(), indices.data(), last.data(), pages});
            CHECK(indptr[0] == 0);
            CHECK(indptr.back() == pages);
            test::Tensor<bf16> seen(4, query_heads, 1, 8);
            seen.fill(-55.0f);
            test::Workspace workspace(workspace_bytes(ctx, ref, {.batch = 4, .tokens = 1}));
            test::Tensor<bf16> queries(4, query_heads, 1, 16);
            queries.fill_normal(generator);
            test::Plane<float> lse(4, query_heads, 1, -55.0f);
            attend(ctx, ref, {.q = queries.view(), .out = seen.view(), .batch = named, .lse = lse.view()},
                   workspace);
            bool covered = true, equal = true;
            for (std::int32_t i = 0; i < 4; ++i) {
                for (std::int32_t h = 0; h < kv_heads; ++h) {
                    const std::int32_t sequence = i * kv_heads + h;
                    const auto at = static_cast<std::size_t>(sequence);
                    std::vector<std::int64_t> rows;
                    for (std::int32_t page = indptr[at]; page < indptr[at + 1]; ++page) {
                        const std::int32_t used = page + 1 < indptr[at + 1] ? page_size : last[at];
                        covered = covered && used >= 1 && used <= page_size;
                        for (std::int32_t r = 0; r < used; ++r) {
                            rows.push_back(std::int64_t{indices[static_cast<std::size_t>(page)]} * page_size +
                                           r);
                        }
                    }
                    std::vector<std::int64_t> wanted(
                        static_cast<std::size_t>(under_test.cache.usage(layer, order[i], h).size()));
                    std::iota(wanted.begin(), wanted.end(), ref.first_row(order[i], h));
                    covered = covered && rows == wanted && (!rows.empty() || last[at] == 0);
                    for (std::int32_t g = 0; g < group; ++g) {
                        const std::int32_t hq = h * group + g;
                        std::vector<double> by_pages = paged_attention(
                            ref.k, ref.v, page_size, 16, 8, indptr.data(), indices.data(), last.data(),
                            sequence, std::as_const(queries).view().row(i, hq, 0));
                        by_pages.resize(8, 0.0);  // an empty head: 0 and -inf
                        for (std::int32_t c = 0; c < 8; ++c) {
                            const double got = test::real(seen.view().row(i, hq, 0)[c]);
                            const double want = by_pages[static_cast<std::size_t>(c)];
                            equal = equal &&
                                    std::abs(got - want) <= 2e-5 + test::storage_unit<bf16> * std::abs(want);
                        }
                        equal = equal && std::isinf(lse.at(i, hq, 0)) == rows.empty();
                    }
                }
            }
            CHECK(covered);
            CHECK(equal);
        }
    }
}

TEST_CASE("attend changes nothing, and leaves entries without a query alone") {
    const host ctx(1);
    const CacheShape shape{.layers = 1,
                           .max_sequences = 3,
                           .query_heads = query_heads,
                           .kv_heads = kv_heads,
                           .head_dim_qk = dim,
                           .head_dim_vo = dim,
                           .page_size = 1};
    using P = Policy<Sink<1>, Window<3>, TopKBudget<4>>;
    test::BoundCache<P, float> under_test(ctx, shape);
    std::mt19937 generator(4);
    const std::int32_t lens[] = {11, 0, 5};
    Call<float> in(3, 11, lens, generator);
    test::call<P, float>(ctx, under_test, 0, {.count = 3, .q_len = lens, .length = 11}, in.q.view(),
                         in.k.view(), in.v.view(), in.out.view(), {.scores = in.scores.view()}, false);
    under_test.cache.advance(ctx, {.count = 3, .q_len = lens, .length = 11});
    const std::vector<unsigned char> before = under_test.memory;
    test::Tensor<float> q(3, query_heads, 1, dim), out(3, query_heads, 1, dim);
    q.fill_normal(generator);
    out.fill(-55.0f);
    test::Plane<float> lse(3, query_heads, 1, -55.0f);
    const std::int32_t ask[] = {1, 1, 0};
    test::Workspace workspace(workspace_bytes(ctx, under_test.cache.layer(0), {.batch = 3, .tokens = 1}));
    attend(ctx, under_test.cache.layer(0),
           {.q = q.view(), .out = out.view(), .batch = {.count = 3, .q_len = ask}, .lse = lse.view()},
           workspace);
    CHECK(under_test.memory == before);
    for (std::int32_t h = 0; h < query_heads; ++h) {
        CHECK(std::isfinite(lse.at(0, h, 0)));
        CHECK(lse.at(1, h, 0) == -std::numeric_limits<float>::infinity());  // a sequence without rows
        CHECK(lse.at(2, h, 0) == -55.0f);
        for (std::int32_t c = 0; c < dim; ++c) {
            CHECK(out.view().row(1, h, 0)[c] == 0.0f);
            CHECK(out.view().row(2, h, 0)[c] == -55.0f);
        }
    }
}
