// Sequences of different lengths in one call, packed into one row or not, that join and leave: each is as
// if it were alone.
#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/h2o.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/mlp.hpp>
#include <kvpolicy/snapkv.hpp>
#include <kvpolicy/spkv.hpp>
#include <kvpolicy/tova.hpp>

#include "../scorers/scorer_cases.hpp"
#include "support/bound_dual.hpp"
#include "support/refusal.hpp"
#include "support/step_io.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>
#include <utility>

using namespace kvpolicy;

namespace {

using Budget = Policy<Sink<1>, Window<4>, TopKBudget<6>>;
using Gated = Policy<Sink<1>, Window<4>, ThresholdGate<at_least>>;
constexpr std::int32_t heads = 2, group = 2, dim = 8, width = 6;
constexpr CacheShape shape{.max_sequences = 4,
                           .query_heads = heads * group,
                           .kv_heads = heads,
                           .head_dim_qk = dim,
                           .head_dim_vo = dim,
                           .page_size = 4,
                           .max_draft_tokens = 6};

/// Tokens in one row, with scores and hidden states; `all` holds n of them.
struct Row {
    test::Tensor<float> q, k, v, out;
    test::Tensor<bf16> hidden;
    test::Plane<float> scores, lse;
    Row(std::int32_t n, std::uint32_t seed)
        : q(1, heads * group, n, dim),
          k(1, heads, n, dim),
          v(1, heads, n, dim),
          out(1, heads * group, n, dim),
          hidden(1, 1, n, width),
          scores(1, heads, n),
          lse(1, heads * group, n, -55.0f) {
        std::mt19937 generator(seed);
        q.fill_normal(generator);
        k.fill_normal(generator);
        v.fill_normal(generator);
        hidden.fill_normal(generator);
        out.fill(-55.0f);
        test::fill_scores(scores, test::Scores::random, generator);
    }
    [[nodiscard]] test::Extras extras(bool states, std::int32_t from, std::int32_t n) {
        test::Extras one;
        if (states) {
            one.hidden = std::as_const(hidden).tokens(from, n);
        } else {
            one.scores = std::as_const(scores).tokens(from, n);
        }
        one.lse = lse.view();
        one.lse.data += from;
        one.lse.length = n;
        return one;
    }
};

/// A call on tokens [from, from + n) of a row.
template <class P, class Ref>
void run(const host& ctx, const Ref& ref, const Batch& batch, Row& row, std::int32_t from, std::int32_t n,
         const test::Extras& extras, bool steps = false, std::uint32_t* status = nullptr) {
    test::call_ref<P, float>(ctx, ref, batch, std::as_const(row.q).tokens(from, n),
                             std::as_const(row.k).tokens(from, n), std::as_const(row.v).tokens(from, n),
                             row.out.tokens(from, n), extras, steps, status);
}

constexpr std::int32_t edges[] = {0, 17, 17, 40, 49}, lengths[] = {17, 0, 23, 9}, seq_ids[] = {2, 0, 3, 1},
                       total = 49;

/// A pack of four entries beside the same entries one by one, twice in a row.
template <class P, class Bound>
void check_prompts(Bound& packed, Bound& alone, bool states) {
    const host ctx{2};
    for (std::uint32_t round = 0; round < 2; ++round) {
        Row a(total, round), b(total, round);
        test::Extras extras = a.extras(states, 0, total);
        extras.cu_seqlens = edges;
        const Batch batch{.count = 4, .seq_ids = seq_ids, .q_len = lengths, .length = total};
        run<P>(ctx, packed.cache.layer(0), batch, a, 0, total, extras);
        packed.cache.advance(ctx, batch);
        for (std::int32_t i = 0; i < 4; ++i) {
            const Batch one{.count = 1, .seq_ids = seq_ids + i, .length = lengths[i]};
            run<P>(ctx, alone.cache.layer(0), one, b, edges[i], lengths[i],
                   b.extras(states, edges[i], lengths[i]));
            alone.cache.advance(ctx, one);
        }
        CHECK(a.out.data == b.out.data);
        CHECK(a.lse.data == b.lse.data);
        for (std::int32_t seq = 0; seq < 4; ++seq) {
            CHECK(test::content_of(packed.cache.layer(0), seq) ==
                  test::content_of(alone.cache.layer(0), seq));
        }
    }
}

/// The same, and then draft tokens.
template <class P, class Bound>
void check_pack(Bound& packed, Bound& alone, bool states) {
    const host ctx{2};
    check_prompts<P>(packed, alone, states);
    const std::int32_t few[] = {0, 6, 7, 7, 10}, guesses[] = {6, 1, 0, 3}, appended[] = {2, 1, 0, 3};
    Row a(10, 9), b(10, 9);
    test::Extras extras = a.extras(states, 0, 10);
    extras.cu_seqlens = few;
    const auto ref = packed.cache.layer(0), other = alone.cache.layer(0);
    test::Workspace workspace(workspace_bytes(ctx, ref, {.batch = 4, .tokens = 10}));
    append_draft(ctx, ref,
                 test::step_io({.count = 4, .seq_ids = seq_ids, .q_len = guesses, .length = 10},
                               std::as_const(a.q).view(), std::as_const(a.k).view(),
                               std::as_const(a.v).view(), a.out.view(), extras),
                 workspace);
    accept(ctx, ref, {.count = 4, .seq_ids = seq_ids, .q_len = appended, .length = 10}, workspace);
    for (std::int32_t i = 0; i < 4; ++i) {
        const Batch one{.count = 1, .seq_ids = seq_ids + i, .length = guesses[i]};
        append_draft(ctx, other,
                     test::step_io(one, std::as_const(b.q).tokens(few[i], guesses[i]),
                                   std::as_const(b.k).tokens(few[i], guesses[i]),
                                   std::as_const(b.v).tokens(few[i], guesses[i]),
                                   b.out.tokens(few[i], guesses[i]), b.extras(states, few[i], guesses[i])),
                     workspace);
        accept(ctx, other, {.count = 1, .seq_ids = seq_ids + i, .length = appended[i]}, workspace);
    }
    CHECK(a.out.data == b.out.data);
    const Batch batch{.count = 4, .seq_ids = seq_ids, .q_len = appended, .length = 10};
    packed.cache.advance(ctx, batch);
    alone.cache.advance(ctx, batch);
    for (std::int32_t seq = 0; seq < 4; ++seq) {
        CHECK(test::content_of(packed.cache.layer(0), seq) == test::content_of(alone.cache.layer(0), seq));
    }
}

}  // namespace

TEST_CASE("a packed batch is its entries one by one, on both kinds of caches, with scores or hidden states") {
    const host ctx{1};
    const PoolShape pool{.slab_pages = 200, .max_slabs = 1, .max_seq_len = 200};
    {
        test::BoundCache<Budget, float> packed(ctx, shape, {}), alone(ctx, shape, {});
        check_pack<Budget>(packed, alone, false);
    }
    {
        test::BoundDual<Gated, float> packed(ctx, shape, pool), alone(ctx, shape, pool);
        packed.add_slab(ctx);
        alone.add_slab(ctx);
        check_pack<Gated>(packed, alone, false);
    }
    const auto w1 = test::draw(1, test::array::w1, 5 * width, 1.0f),
               w2 = test::draw(1, test::array::w2, heads * 5, 1.0f);
    UtilityPredictor scorer;
    scorer.heads = heads, scorer.hidden = 5, scorer.input.width = width;
    scorer.weights.w1 = w1.data();
    scorer.weights.w2 = w2.data();
    using P = SPKV<4, UtilityPredictor, 1>;
    test::BoundDual<P, float> packed(ctx, shape, pool, P{{}, {}, {}, scorer}),
        alone(ctx, shape, pool, P{{}, {}, {}, scorer});
    packed.add_slab(ctx);
    alone.add_slab(ctx);
    check_pack<P>(packed, alone, true);
}

TEST_CASE(
    "samples of a pack that are sequences of their own are reset; a pack in one sequence keeps attention: as "
    "masks "
    "have it") {
    const host ctx{2};
    Row row(total, 4), one(total, 4);
    const std::int32_t cuts[] = {0, 17, 40, 49};
    const Budget policy;
    for (const bool reset : {true, false}) {
        Sequences sequences{.batch = 1, .length = total};
        if (reset) {
            sequences.cu_seqlens = cuts;
            sequences.segments = 3;
        }
        test::Plane<expiry_t> expiry(1, heads, total);
        test::Workspace workspace(build_mask_workspace_bytes(ctx, policy, sequences, heads));
        build_mask(ctx, policy, std::as_const(row.scores).view(), sequences, expiry.view(), workspace);
        test::Tensor<float> wanted(1, heads * group, total, dim);
        const kv_view<float> masked{
            std::as_const(row.k).view(), std::as_const(row.v).view(), {std::as_const(expiry).view()}};
        test::Workspace more(attend_workspace_bytes(ctx, {}, std::as_const(row.q).view(), masked, sequences));
        attend(ctx, {}, std::as_const(row.q).view(), masked, sequences, wanted.view(), {}, more);

        test::BoundCache<Budget, float> cache(ctx, shape, policy);
        const std::int32_t own[] = {17, 23, 9}, all[] = {0, total};
        test::Extras extras = row.extras(false, 0, total);
        extras.cu_seqlens = reset ? cuts : all;
        const Batch batch{.count = reset ? 3 : 1, .q_len = reset ? own : all + 1, .length = total};
        run<Budget>(ctx, cache.cache.layer(0), batch, row, 0, total, extras);
        cache.cache.advance(ctx, batch);
        double worst = 0.0;
        for (std::size_t i = 0; i < wanted.data.size(); ++i) {
            const double off = std::abs(static_cast<double>(wanted.data[i] - row.out.data[i]));
            worst = std::max(worst, off == off ? off : std::numeric_limits<double>::infinity());
        }
        CHECK(worst < 2e-6);  // values below 4, weights off by a few 2^-24
        for (std::int32_t i = 0; i < batch.count; ++i) {
            const std::int32_t begin = extras.cu_seqlens[i], end = extras.cu_seqlens[i + 1];
            for (std::int32_t h = 0; h < heads; ++h) {
                std::vector<position_t> seen;
                for (std::int32_t t = begin; t < end; ++t) {
                    if (end - 1 < expiry.at(0, h, t)) {
                        seen.push_back(t - begin);
                    }
                }
                CHECK(cache.sorted(0, i, h) == seen);
            }
        }
    }
}

TEST_CASE("packed prompts of policies that rank keys by attention, in blocks of any length") {
    const host ctx{2};
    const PoolShape pool{.slab_pages = 200, .max_slabs = 1, .max_seq_len = 200};
    const auto fixed = [&](const auto& policy) {
        using P = std::decay_t<decltype(policy)>;
        test::BoundCache<P, float> packed(ctx, shape, policy), alone(ctx, shape, policy);
        check_prompts<P>(packed, alone, false);
    };
    const auto paged = [&](const auto& policy) {
        using P = std::decay_t<decltype(policy)>;
        test::BoundDual<P, float> packed(ctx, shape, pool, policy), alone(ctx, shape, pool, policy);
        packed.add_slab(ctx);
        alone.add_slab(ctx);
        check_prompts<P>(packed, alone, false);
    };
    fixed(h2o_for_total(12));
    fixed(h2o_for_total(12, {ObservedPrefill::in_chunks(5)}));
    paged(tova_for_total(9, {ObservedPrefill::stepwise()}));
    paged(snapkv_for_total(14, 4));

    test::BoundCache<H2O<>, float> cache(ctx, shape, h2o_for_total(12));
    Row row(total, 3);
    row.k.view().row(0, 1, 45)[2] = std::numeric_limits<float>::quiet_NaN();
    test::Extras extras = row.extras(false, 0, total);
    extras.cu_seqlens = edges;
    CHECK_REFUSED(run<H2O<>>(ctx, cache.cache.layer(0),
                             {.count = 4, .seq_ids = seq_ids, .q_len = lengths, .length = total}, row, 0,
                             total, extras),
                  "k[0][1][45]: nan");
    CHECK(cache.cache.length(2) == 0);
}

TEST_CASE("a packed entry without pages is left alone, and the others are served") {
    const host ctx{1};
    test::BoundDual<Gated, float> cache(ctx, shape, {.slab_pages = 12, .max_slabs = 20, .max_seq_len = 100});
    cache.add_slab(ctx);
    Row row(total, 6), other(total, 6);
    row.scores.data.assign(row.scores.data.size(), 1.0f);  // all is kept: 10, 0, 12 and 6 pages
    other.scores = row.scores;
    test::Extras extras = row.extras(false, 0, total);
    extras.cu_seqlens = edges;
    const Batch batch{.count = 4, .seq_ids = seq_ids, .q_len = lengths, .length = total};
    std::uint32_t status[4] = {};
    run<Gated>(ctx, cache.cache.layer(0), batch, row, 0, total, extras, false, status);
    CHECK((status[0] == 0 && status[1] == 0));
    CHECK((status[2] == status_pool_exhausted && status[3] == status_pool_exhausted));
    for (std::int32_t t = 0; t < total; ++t) {
        const bool served = t < 17;
        CHECK((row.out.view().row(0, 1, t)[3] == 0.0f) == !served);
        CHECK(std::isinf(row.lse.at(0, 1, t)) == !served);
    }
    const std::int32_t left[] = {0, 0, 23, 9}, rest[] = {0, 0, 0, 23, 32};
    cache.reserve(ctx, {.count = 4, .seq_ids = seq_ids, .q_len = left, .length = total});
    test::Extras again = row.extras(false, 17, 32);
    again.cu_seqlens = rest;
    run<Gated>(ctx, cache.cache.layer(0), {.count = 4, .seq_ids = seq_ids, .q_len = left, .length = 32}, row,
               17, 32, again);
    cache.cache.advance(ctx, batch);
    test::BoundDual<Gated, float> ample(ctx, shape, {.slab_pages = 100, .max_slabs = 1, .max_seq_len = 100});
    ample.add_slab(ctx);
    test::Extras whole = other.extras(false, 0, total);
    whole.cu_seqlens = edges;
    run<Gated>(ctx, ample.cache.layer(0), batch, other, 0, total, whole);
    ample.cache.advance(ctx, batch);
    CHECK(row.out.data == other.out.data);
    for (std::int32_t seq = 0; seq < 4; ++seq) {
        CHECK(test::content_of(cache.cache.layer(0), seq) == test::content_of(ample.cache.layer(0), seq));
    }
}

TEST_CASE("edges that do not fit the batch are refused") {
    const host ctx{1};
    test::BoundCache<Budget, float> cache(ctx, shape, {});
    Row row(total, 1);
    const auto call = [&](const std::int32_t* cu, const std::int32_t* q_len, std::int32_t n = total) {
        test::Extras extras = row.extras(false, 0, n);
        extras.cu_seqlens = cu;
        run<Budget>(ctx, cache.cache.layer(0), {.count = 4, .seq_ids = seq_ids, .q_len = q_len, .length = n},
                    row, 0, n, extras);
    };
    const std::int32_t late[] = {1, 17, 17, 40, 49}, other[] = {0, 17, 17, 39, 49}, less[] = {17, 0, 22, 9};
    CHECK_REFUSED(call(late, lengths), "io.cu_seqlens[0]: 1 is not allowed; it must be 0");
    CHECK_REFUSED(call(other, lengths),
                  "io.cu_seqlens[3]: 39 is not allowed; it must be the edge before it, 17, and the "
                  "entry's 23 tokens");
    CHECK_REFUSED(call(edges, less), "io.cu_seqlens[3]: 40");
    CHECK_REFUSED(call(edges, lengths, 48),
                  "q: 1 x 4 x 48 x 8 is not allowed; it must be 1 x 4 x at least 49 x 8");
    test::Extras extras = row.extras(false, 0, 1);
    extras.cu_seqlens = edges;
    CHECK_REFUSED(run<Budget>(ctx, cache.cache.layer(0), {.count = 1}, row, 0, 1, extras, true),
                  "io.cu_seqlens: given is not allowed; it must be null in a step");
    CHECK(cache.cache.length(2) == 0);
}

TEST_CASE(
    "sequences that join and leave while others run are as if they were alone, and leave no page behind") {
    const host ctx{2};
    for (const std::int32_t page_size : {1, 5}) {
        CacheShape sizes = shape;
        sizes.page_size = page_size;
        test::BoundDual<Gated, float> shared(ctx, sizes,
                                             {.slab_pages = 9, .max_slabs = 100, .max_seq_len = 80});
        struct Running {
            std::int32_t id = -1, at = 0, length = 0;
        } running[4];
        std::mt19937 generator(static_cast<std::uint32_t>(page_size));
        std::int32_t next = 0, finished = 0;
        while (finished < 25) {
            std::int32_t named[4], tokens[4], count = 0;
            std::vector<Row> rows;
            const bool steps = generator() % 2 == 0;
            for (std::int32_t seq = 0; seq < 4; ++seq) {
                Running& mine = running[seq];
                if (mine.id < 0 && generator() % 2 == 0) {  // joins
                    mine = {next++, 0, 1 + static_cast<std::int32_t>(generator() % 60)};
                }
                if (mine.id < 0 || generator() % 4 == 0) {
                    continue;  // not there, or sits out this call
                }
                named[count] = seq;
                tokens[count++] =
                    std::min(mine.length - mine.at, steps ? 1 : static_cast<std::int32_t>(generator() % 9));
            }
            std::shuffle(named, named + count, generator);
            std::int32_t max_seq_len = 1;
            for (std::int32_t i = 0; i < count; ++i) {
                const Running& mine = running[named[i]];
                tokens[i] = std::min(mine.length - mine.at, steps ? 1 : tokens[i]);
                max_seq_len = std::max(max_seq_len, tokens[i]);
            }
            test::Tensor<float> q(count, heads * group, max_seq_len, dim), k(count, heads, max_seq_len, dim),
                v(count, heads, max_seq_len, dim), out(count, heads * group, max_seq_len, dim);
            test::Plane<float> scores(count, heads, max_seq_len);
            for (std::int32_t i = 0; i < count; ++i) {
                const Running& mine = running[named[i]];
                const Row whole(60, static_cast<std::uint32_t>(mine.id));
                for (std::int32_t j = 0; j < tokens[i]; ++j) {
                    for (std::int32_t h = 0; h < heads * group; ++h) {
                        std::copy_n(whole.q.view().row(0, h, mine.at + j), dim, q.view().row(i, h, j));
                    }
                    for (std::int32_t h = 0; h < heads; ++h) {
                        std::copy_n(whole.k.view().row(0, h, mine.at + j), dim, k.view().row(i, h, j));
                        std::copy_n(whole.v.view().row(0, h, mine.at + j), dim, v.view().row(i, h, j));
                        scores.at(i, h, j) = whole.scores.view().head(0, h)[mine.at + j];
                    }
                }
            }
            const Batch batch{.count = count, .seq_ids = named, .q_len = tokens, .length = max_seq_len};
            shared.reserve(ctx, batch);
            test::call_ref<Gated, float>(ctx, shared.cache.layer(0), batch, std::as_const(q).view(),
                                         std::as_const(k).view(), std::as_const(v).view(), out.view(),
                                         {.scores = std::as_const(scores).view()}, steps);
            shared.cache.advance(ctx, batch);
            for (std::int32_t i = 0; i < count; ++i) {
                Running& mine = running[named[i]];
                mine.at += tokens[i];
                if (mine.at < mine.length) {
                    continue;
                }
                // It leaves; alone it would have held the same.
                test::BoundDual<Gated, float> alone(ctx, sizes,
                                                    {.slab_pages = 400, .max_slabs = 1, .max_seq_len = 80});
                alone.add_slab(ctx);
                Row row(60, static_cast<std::uint32_t>(mine.id));
                run<Gated>(ctx, alone.cache.layer(0), {.count = 1, .length = mine.length}, row, 0,
                           mine.length, row.extras(false, 0, mine.length));
                alone.cache.advance(ctx, {.count = 1, .length = mine.length});
                CHECK(test::content_of(alone.cache.layer(0), 0) ==
                      test::content_of(shared.cache.layer(0), named[i]));
                if (tokens[i] > 0) {
                    const float got = out.view().row(i, 3, tokens[i] - 1)[5],
                                wanted = row.out.view().row(0, 3, mine.length - 1)[5];
                    CHECK(std::abs(got - wanted) < 2e-6f);
                }
                shared.cache.clear(ctx, named[i]);
                mine.id = -1;
                ++finished;
            }
        }
        for (std::int32_t seq = 0; seq < 4; ++seq) {
            shared.cache.clear(ctx, seq);
        }
        CHECK(shared.cache.free_pages() == shared.cache.attached_pages());
    }
}
