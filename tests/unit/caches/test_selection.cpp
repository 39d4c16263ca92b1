// Quest's pages and SnapKV's rule under a global budget, alone and with admission by a gate: against the
// reference, and the same after whatever a sequence may go through.
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/stride.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/quest.hpp>

#include "../scorers/scorer_cases.hpp"
#include "support/bound_dual.hpp"
#include "support/refusal.hpp"
#include "support/vectors.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <utility>

using namespace kvpolicy;

namespace {

using All = Policy<Sink<>, Window<>, ThresholdGate<at_least>, SnapKVEviction, QuestPages<>>;
constexpr float infinity = std::numeric_limits<float>::infinity();

/// |a - b|, infinite where either is NaN.
double distance(double a, double b) {
    const double off = std::abs(a - b);
    return off == off ? off : std::numeric_limits<double>::infinity();
}

struct Case {
    std::int32_t sinks, window, gated, page, pages, mean, average, observing, pool, layers, heads, group, dim,
        length, seed;
    float share;

    Case(const std::int32_t* n, float dropped)
        : sinks(n[0]),
          window(n[1]),
          gated(n[2]),
          page(n[3]),
          pages(n[4]),
          mean(n[5]),
          average(n[6]),
          observing(n[7]),
          pool(n[8]),
          layers(n[9]),
          heads(n[10]),
          group(n[11]),
          dim(n[12]),
          length(n[13]),
          seed(n[14]),
          share(dropped) {}

    [[nodiscard]] SnapKVEviction eviction() const {
        return {average == 0 ? std::int64_t{1} << 40 : average, share, observing, pool, aggregate()};
    }
    [[nodiscard]] group_aggregate aggregate() const {
        return mean != 0 ? group_aggregate::mean : group_aggregate::max;
    }
    [[nodiscard]] QuestPages<> selection() const {
        return {page, pages == 0 ? unlimited : pages, aggregate()};
    }
    [[nodiscard]] All policy() const {
        return All{Sink<>{sinks}, Window<>{window}, ThresholdGate<at_least>{gated != 0 ? 0.0f : -infinity},
                   eviction(), selection()};
    }
    /// Pages of the cache of one or several of the selection's.
    [[nodiscard]] CacheShape shape(std::int32_t factor) const {
        return {.layers = layers,
                .max_sequences = 3,
                .query_heads = heads * group,
                .kv_heads = heads,
                .head_dim_qk = dim,
                .head_dim_vo = dim,
                .page_size = page * factor,
                .max_draft_tokens = 6};
    }
};

template <class T>
struct Tokens {
    std::vector<test::Tensor<T>> q, k, v, out;
    std::vector<test::Plane<float>> scores, lse;
    explicit Tokens(const Case& c) {
        const auto stream = [&](std::uint64_t slot, std::int64_t count, float scale) {
            return test::draw(static_cast<std::uint64_t>(c.seed) * 32 + slot, static_cast<std::size_t>(count),
                              scale);
        };
        const std::int64_t rows = std::int64_t{c.layers} * c.heads * c.length;
        const auto all_q = stream(0, rows * c.group * c.dim, 2.0f), all_k = stream(1, rows * c.dim, 2.0f),
                   all_v = stream(2, rows * c.dim, 2.0f), all_scores = stream(3, rows, 1.0f);
        for (std::int32_t l = 0; l < c.layers; ++l) {
            const auto take = [&](std::vector<test::Tensor<T>>& into, const std::vector<float>& from,
                                  std::int32_t heads) {
                into.emplace_back(1, heads, c.length, c.dim);
                for (std::size_t i = 0; i < into.back().data.size(); ++i) {
                    into.back().data[i] =
                        static_cast<T>(from[static_cast<std::size_t>(l) * into.back().data.size() + i]);
                }
            };
            take(q, all_q, c.heads * c.group);
            take(k, all_k, c.heads);
            take(v, all_v, c.heads);
            out.emplace_back(1, c.heads * c.group, c.length, c.dim);
            scores.emplace_back(1, c.heads, c.length);
            lse.emplace_back(1, c.heads * c.group, c.length, -55.0f);
            std::copy_n(all_scores.data() + l * c.heads * c.length, c.heads * c.length,
                        scores.back().data.data());
        }
    }
    template <class P, class Cache>
    void run(const host& ctx, Cache& cache, std::int32_t seq, std::int32_t from, std::int32_t n, bool steps) {
        const Batch batch{.count = 1, .seq_ids = &seq, .length = n};
        for (std::size_t l = 0; l < q.size(); ++l) {
            plane_view<float> sums = lse[l].view();
            sums.data += from;
            sums.length = n;
            test::call_ref<P, T>(ctx, cache.layer(static_cast<std::int32_t>(l)), batch,
                                 std::as_const(q[l]).tokens(from, n), std::as_const(k[l]).tokens(from, n),
                                 std::as_const(v[l]).tokens(from, n), out[l].tokens(from, n),
                                 {.scores = std::as_const(scores[l]).tokens(from, n), .lse = sums}, steps);
        }
        cache.advance(ctx, batch);
    }
};

template <class Cache>
EvictionReport evict(const host& ctx, Cache& cache, std::int32_t seq) {
    test::Workspace workspace(cache.evict_workspace_bytes(ctx));
    EvictionReport report;
    cache.evict(ctx, {.count = 1, .seq_ids = &seq}, workspace, {.reports = &report});
    return report;
}

std::vector<Case> all_cases(const kvpolicy_test::vectors& file) {
    std::vector<Case> found;
    for (std::int64_t i = 0; i < file.get<std::int32_t>("cases").shape[0]; ++i) {
        found.emplace_back(file.get<std::int32_t>("cases").row(i), file.get<float>("shares")[i]);
    }
    return found;
}

template <class T>
void compare(double tolerance) {
    const auto file = kvpolicy_test::vectors::load("selection.kvpv");
    const std::int32_t* held = file.get<std::int32_t>("held").data();
    const double* lse = file.get<double>("lse").data();
    const double* out = file.get<double>("out").data();
    const std::int32_t* rounds = file.get<std::int32_t>("rounds").data();
    std::int32_t i = 0;
    for (const Case& c : all_cases(file)) {
        CAPTURE(i);
        const host ctx{1 + i % 3};
        const std::int32_t factor = 1 + i++ % 3;
        const CacheShape shape = c.shape(factor);
        test::BoundDual<All, T> cache(
            ctx, shape, {.slab_pages = 40, .max_slabs = 40, .max_seq_len = c.length}, c.policy());
        Tokens<T> in(c);
        const std::int32_t words = (c.length + 31) / 32;
        bool same_sets = true, same_rounds = true;
        double worst = 0.0;
        for (std::int32_t t = 0; t < c.length; ++t) {
            const std::int32_t seq = 1;
            cache.reserve(ctx, {.count = 1, .seq_ids = &seq});
            in.template run<All>(ctx, cache.cache, seq, t, 1, true);
            for (std::int32_t l = 0; l < c.layers; ++l) {
                for (std::int32_t h = 0; h < c.heads * c.group; ++h) {
                    const float got = in.lse[static_cast<std::size_t>(l)].view().head(0, h)[t];
                    worst = std::max(worst, distance(static_cast<double>(got), *lse++));
                    if (t % 5 == 0) {
                        const T* row = in.out[static_cast<std::size_t>(l)].view().row(0, h, t);
                        for (std::int32_t d = 0; d < c.dim; ++d) {
                            worst = std::max(worst, distance(static_cast<double>(row[d]), *out++));
                        }
                    }
                }
            }
            const EvictionReport report = evict(ctx, cache.cache, 1);
            same_rounds = same_rounds && report.rounds == *rounds++;
            std::int64_t rows = 0;
            for (std::int32_t l = 0; l < c.layers; ++l) {
                for (std::int32_t h = 0; h < c.heads; ++h, held += words) {
                    const auto mine = cache.sorted(l, 1, h);
                    rows += std::ssize(mine);
                    std::vector<position_t> wanted;
                    for (std::int32_t at = 0; at < c.length; ++at) {
                        if ((static_cast<std::uint32_t>(held[at / 32]) >> (at % 32) & 1u) != 0) {
                            wanted.push_back(at);
                        }
                    }
                    same_sets = same_sets && mine == wanted;
                }
            }
            CHECK(report.rows == rows);
        }
        CHECK(same_sets);
        CHECK(same_rounds);
        CHECK(worst <= tolerance);
        const std::int64_t free = cache.cache.free_pages();
        cache.cache.clear(ctx, 1);
        CHECK(cache.cache.free_pages() == cache.cache.attached_pages());
        CHECK(free < cache.cache.attached_pages());
    }
}

/// What one head holds, bounds of pages included.
template <class Ref>
std::vector<unsigned char> with_bounds(const Ref& ref, std::int32_t seq) {
    std::vector<unsigned char> bytes = test::content_of(ref, seq);
    for (std::int32_t h = 0; h < ref.kv_heads; ++h) {
        const std::int32_t pages = host_backend::pages_of_rows(ref, ref.used(seq, h));
        for (std::int32_t page = 0; page < pages; ++page) {
            const auto* data = reinterpret_cast<const unsigned char*>(ref.head_rows(seq, h).bounds(page));
            bytes.insert(
                bytes.end(), data,
                data + 2 * static_cast<std::size_t>(ref.head_dim_qk) * sizeof(*ref.head_rows(0, 0).k(0)));
        }
    }
    return bytes;
}

}  // namespace

// Outputs go through fp32 log-sum-exps only in the comparison of those: 2^-24 of up to 20.
TEST_CASE("the reference's rows, rounds and outputs, in double") { compare<double>(2e-6); }

// Logits of up to 8 * 4 / 8^(1/2) with errors of 8 of their 2^-24; outputs likewise, of values below 2.
TEST_CASE("the reference's rows, rounds and outputs, in fp32") { compare<float>(2e-5); }

TEST_CASE("chunks, draft tokens, copies and snapshots leave the same bounds, queries and keys as steps") {
    const auto file = kvpolicy_test::vectors::load("selection.kvpv");
    const Case c = all_cases(file).back();
    const CacheShape shape = c.shape(2);
    const PoolShape pool{.slab_pages = 400, .max_slabs = 1, .max_seq_len = c.length};
    const host ctx{2};
    test::BoundDual<All, float> stepped(ctx, shape, pool, c.policy()), other(ctx, shape, pool, c.policy());
    stepped.add_slab(ctx);
    other.add_slab(ctx);
    Tokens<float> a(c), b(c);
    std::mt19937 generator(5);
    std::int32_t seq = 0;
    std::int64_t dropped = 0;
    for (std::int32_t t = 0; t < c.length;) {
        const std::int32_t n = std::min(c.length - t, 1 + static_cast<std::int32_t>(generator() % 6));
        for (std::int32_t j = 0; j < n; ++j) {
            a.run<All>(ctx, stepped.cache, 0, t + j, 1, true);
        }
        switch (generator() % 3) {
            case 0:
                b.run<All>(ctx, other.cache, seq, t, n, false);
                break;
            case 1:
                for (std::int32_t j = 0; j < n; ++j) {
                    b.run<All>(ctx, other.cache, seq, t + j, 1, true);
                }
                break;
            default: {
                const std::int32_t guess = std::min(6, c.length - t);
                const Batch batch{.count = 1, .seq_ids = &seq, .length = guess},
                    appended{.count = 1, .seq_ids = &seq, .length = n};
                for (std::size_t l = 0; l < b.q.size(); ++l) {
                    const auto ref = other.cache.layer(static_cast<std::int32_t>(l));
                    test::Workspace workspace(workspace_bytes(ctx, ref, {.batch = 1, .tokens = guess}));
                    append_draft(ctx, ref,
                                 {.q = std::as_const(b.q[l]).tokens(t, guess),
                                  .k = std::as_const(b.k[l]).tokens(t, guess),
                                  .v = std::as_const(b.v[l]).tokens(t, guess),
                                  .out = b.out[l].tokens(t, guess),
                                  .batch = batch,
                                  .scores = std::as_const(b.scores[l]).tokens(t, guess)},
                                 workspace);
                    accept(ctx, ref, appended, workspace);
                }
                other.cache.advance(ctx, appended);
                break;
            }
        }
        t += n;
        const EvictionReport one = evict(ctx, stepped.cache, 0), two = evict(ctx, other.cache, seq);
        dropped += one.dropped;
        CHECK(one.rounds == two.rounds);
        for (std::int32_t l = 0; l < c.layers; ++l) {
            CHECK(with_bounds(stepped.cache.layer(l), 0) == with_bounds(other.cache.layer(l), seq));
        }
        // On to another sequence, by one way or another; what was there is somebody else's.
        const std::int32_t next = (seq + 1) % 3;
        if (generator() % 2 == 0) {
            other.cache.fork(ctx, seq, next);
            other.cache.clear(ctx, seq);
        } else if (generator() % 2 == 0) {
            std::int32_t sources[] = {0, 1, 2};
            std::swap(sources[seq], sources[next]);
            other.cache.reorder(ctx, sources, 3);
        } else {
            std::vector<unsigned char> blob(other.cache.snapshot_bytes(seq));
            other.cache.snapshot(ctx, seq, blob.data(), blob.size());
            other.cache.clear(ctx, seq);
            other.cache.restore(ctx, next, blob.data(), blob.size());
        }
        seq = next;
    }
    CHECK(dropped > 50);
}

TEST_CASE(
    "on a cache of fixed size: every page read is everything read; bounds hold after replacement in place") {
    using Fixed = Policy<Sink<>, Window<>, TopKBudget<>, QuestPages<>>;
    const auto policy = [](std::int32_t pages) {
        return Fixed{Sink<>{2}, Window<>{5}, TopKBudget<>{13}, QuestPages<>{4, pages}};
    };
    const CacheShape shape{
        .query_heads = 4, .kv_heads = 2, .head_dim_qk = 8, .head_dim_vo = 8, .page_size = 4};
    const host ctx{2};
    std::mt19937 generator(3);
    test::Tensor<float> q(1, 4, 80, 8), k(1, 2, 80, 8), v(1, 2, 80, 8), out(1, 4, 80, 8), all(1, 4, 80, 8);
    q.fill_normal(generator);
    k.fill_normal(generator);
    v.fill_normal(generator);
    test::Plane<float> scores(1, 2, 80);
    test::fill_scores(scores, test::Scores::random, generator);
    const auto run = [&](const Fixed& with, test::Tensor<float>& into) {
        test::BoundCache<Fixed, float> cache(ctx, shape, with);
        bool bounds = true;
        for (std::int32_t t = 0, n = 0; t < 80; t += n) {
            n = t % 10 == 0 ? 7 : 1;
            const Batch batch{.count = 1, .length = n};
            test::call<Fixed, float>(ctx, cache, 0, batch, std::as_const(q).tokens(t, n),
                                     std::as_const(k).tokens(t, n), std::as_const(v).tokens(t, n),
                                     into.tokens(t, n), {.scores = std::as_const(scores).tokens(t, n)},
                                     n == 1);
            cache.cache.advance(ctx, batch);
            const auto ref = cache.cache.layer(0);
            for (std::int32_t h = 0; h < 2; ++h) {
                const auto rows = ref.head_rows(0, h);
                for (std::int32_t r = 0; r < ref.used(0, h); ++r) {
                    for (std::int32_t d = 0; d < 8; ++d) {
                        const float least = rows.bounds(r / 4)[d], most = rows.bounds(r / 4)[8 + d];
                        bounds = bounds && least <= rows.k(r)[d] && rows.k(r)[d] <= most;
                    }
                }
            }
        }
        CHECK(bounds);
    };
    run(policy(unlimited), all);
    run(policy(5), out);  // 20 rows are 5 pages
    CHECK(out.data == all.data);
    run(policy(2), out);
    CHECK(out.data != all.data);
    CHECK(std::equal(out.view().row(0, 0, 0), out.view().row(0, 0, 8),
                     all.view().row(0, 0, 0)));  // the first pages
    // Looking only: the same pages as the step read.
    test::BoundCache<Fixed, float> cache(ctx, shape, policy(2));
    test::Tensor<float> looked(1, 4, 1, 8);
    test::call<Fixed, float>(ctx, cache, 0, {.count = 1, .length = 70}, std::as_const(q).tokens(0, 70),
                             std::as_const(k).tokens(0, 70), std::as_const(v).tokens(0, 70),
                             out.tokens(0, 70), {.scores = std::as_const(scores).tokens(0, 70)}, false);
    cache.cache.advance(ctx, {.count = 1, .length = 70});
    test::call<Fixed, float>(ctx, cache, 0, {.count = 1}, std::as_const(q).tokens(70, 1),
                             std::as_const(k).tokens(70, 1), std::as_const(v).tokens(70, 1),
                             out.tokens(70, 1), {.scores = std::as_const(scores).tokens(70, 1)}, true);
    cache.cache.advance(ctx, {.count = 1});
    test::Workspace workspace(workspace_bytes(ctx, cache.cache.layer(0), {.batch = 1, .tokens = 1}));
    attend(ctx, cache.cache.layer(0),
           {.q = std::as_const(q).tokens(70, 1), .out = looked.view(), .batch = {.count = 1}}, workspace);
    for (std::int32_t h = 0; h < 4; ++h) {
        CHECK(
            std::equal(looked.view().row(0, h, 0), looked.view().row(0, h, 0) + 8, out.view().row(0, h, 70)));
    }
}

TEST_CASE("Quest as a system: a full cache, of which a needle's page is read") {
    const Quest<16> policy{{}, {}, QuestPages<16>{3}};
    const CacheShape shape{
        .query_heads = 1, .kv_heads = 1, .head_dim_qk = 8, .head_dim_vo = 8, .page_size = 16};
    const host ctx{1};
    test::BoundDual<Quest<16>, float> cache(ctx, shape,
                                            {.slab_pages = 40, .max_slabs = 1, .max_seq_len = 600}, policy);
    cache.add_slab(ctx);
    std::mt19937 generator(1);
    test::Tensor<float> q(1, 1, 500, 8), k(1, 1, 500, 8), v(1, 1, 500, 8), out(1, 1, 500, 8);
    q.fill_normal(generator, 0.1f);
    k.fill_normal(generator, 0.1f);
    v.fill(0.0f);
    k.view().row(0, 0, 123)[0] = 10.0f;  // the needle
    v.view().row(0, 0, 123)[0] = 1.0f;
    q.view().row(0, 0, 499)[0] = 20.0f;
    for (std::int32_t t = 0, n = 499; t < 500; t += n, n = 1) {
        test::call_ref<Quest<16>, float>(ctx, cache.cache.layer(0), {.count = 1, .length = n},
                                         std::as_const(q).tokens(t, n), std::as_const(k).tokens(t, n),
                                         std::as_const(v).tokens(t, n), out.tokens(t, n), {}, n == 1);
        cache.cache.advance(ctx, {.count = 1, .length = n});
    }
    CHECK(cache.cache.usage(0, 0, 0).size() == 500);
    CHECK(out.view().row(0, 0, 499)[0] > 0.99f);
}

TEST_CASE("what a keep part keeps is not evicted") {
    using Kept = Policy<Sink<>, Window<>, Stride<>, ThresholdGate<at_least>, SnapKVEviction>;
    const auto file = kvpolicy_test::vectors::load("selection.kvpv");
    Case c = all_cases(file).back();
    c.average = 4;  // less than what stays
    const Kept policy{Sink<>{2}, Window<>{5}, Stride<>{9}, ThresholdGate<at_least>{-infinity}, c.eviction()};
    const host ctx{1};
    test::BoundDual<Kept, float> cache(ctx, c.shape(1),
                                       {.slab_pages = 400, .max_slabs = 1, .max_seq_len = c.length}, policy);
    cache.add_slab(ctx);
    Tokens<float> in(c);
    std::int64_t rounds = 0;
    for (std::int32_t t = 0; t < c.length; ++t) {
        in.run<Kept>(ctx, cache.cache, 0, t, 1, true);
        rounds += evict(ctx, cache.cache, 0).rounds;
        std::vector<position_t> wanted;
        for (std::int32_t at = 0; at <= t; ++at) {
            if (at < 2 || at > t - 5 || at % 9 == 0) {
                wanted.push_back(at);
            }
        }
        for (std::int32_t l = 0; l < c.layers; ++l) {
            for (std::int32_t h = 0; h < c.heads; ++h) {
                CHECK(cache.sorted(l, 0, h) == wanted);
            }
        }
    }
    CHECK(rounds > 0);
}

TEST_CASE("what cannot be is refused") {
    const CacheShape shape{
        .query_heads = 1, .kv_heads = 1, .head_dim_qk = 8, .head_dim_vo = 8, .page_size = 24};
    const PoolShape pool{.slab_pages = 4, .max_slabs = 1, .max_seq_len = 100};
    using Cache = DualCache<All, float>;
    const auto with = [](SnapKVEviction eviction, QuestPages<> selection) {
        return All{Sink<>{0}, Window<>{4}, ThresholdGate<at_least>{0.0f}, eviction, selection};
    };
    CHECK_REFUSED(Cache(shape, pool, with({}, {16, 4})),
                  "page_size: 24 is not allowed; it must be a multiple of the 16 rows of a page that the "
                  "policy's selection");
    CHECK_REFUSED(Cache(shape, pool, with({}, {0, 4})), "rows of a page: 0");
    CHECK_REFUSED(
        Cache(shape, pool, with({}, {8, 0})),
        "pages of layer 0, head 0: 0 is not allowed; it must be 1 or more, since a query sees itself");
    CHECK_REFUSED(Cache(shape, pool, with({.average = -1}, {8, 4})), "average of SnapKVEviction: -1");
    CHECK_REFUSED(Cache(shape, pool, with({.share = 0.0f}, {8, 4})), "share of SnapKVEviction: 0");
    CHECK_REFUSED(Cache(shape, pool, with({.observing = 0}, {8, 4})), "observing of SnapKVEviction: 0");
    CHECK_REFUSED(Cache(shape, pool, with({.pool = 4}, {8, 4})), "pool of SnapKVEviction: 4");
    const host ctx{1};
    test::BoundDual<All, float> cache(ctx, shape, pool, with({}, {8, 4}));
    cache.add_slab(ctx);
    CHECK_REFUSED(cache.cache.evict(ctx, {.count = 1}, {}), "workspace.bytes: 0");
    CHECK_REFUSED(cache.cache.evict(ctx, {.count = 2}, {}), "batch.count: 2");
    using Full = FixedBudgetCache<Policy<Window<4>, TopKBudget<8>, QuestPages<8>>, float>;
    CacheShape one = shape;
    one.page_size = 1;
    CHECK_REFUSED(Full(one), "page_size: 1 is not allowed; it must be a multiple of the 8 rows");
}

TEST_CASE("dropping rows gives their pages back, and leaves what was reserved") {
    const CacheShape shape{
        .query_heads = 1, .kv_heads = 1, .head_dim_qk = 8, .head_dim_vo = 8, .page_size = 2};
    const All policy{Sink<>{0}, Window<>{4}, ThresholdGate<at_least>{-infinity},
                     SnapKVEviction{.average = 20, .share = 0.5f}, QuestPages<>{2, unlimited}};
    const host ctx{1};
    test::BoundDual<All, float> cache(ctx, shape, {.slab_pages = 40, .max_slabs = 1, .max_seq_len = 100},
                                      policy);
    cache.add_slab(ctx);
    const Case sizes(std::vector<std::int32_t>{0, 4, 0, 2, 0, 0, 0, 4, 1, 1, 1, 1, 8, 30, 1}.data(), 0.5f);
    Tokens<float> in(sizes);
    in.run<All>(ctx, cache.cache, 0, 0, 24, false);
    CHECK(cache.cache.free_pages() == 28);
    CHECK(cache.cache.reserve(ctx, {.count = 1, .length = 6}) == 0);
    CHECK(cache.cache.free_pages() == 25);
    const EvictionReport report = evict(ctx, cache.cache, 0);
    CHECK(report.rounds == 1);
    CHECK(report.dropped == 12);
    CHECK(report.rows == 12);
    CHECK(cache.cache.free_pages() == 31);
    in.run<All>(ctx, cache.cache, 0, 24, 6, false);
    CHECK(cache.cache.free_pages() == 31);
    CHECK(evict(ctx, cache.cache, 0).rounds == 0);
}

TEST_CASE("a share of a head's rows is the decimal number that was written") {
    struct {
        float share;
        std::int32_t rows, dropped;
    } constexpr cases[] = {{0.7f, 10, 7}, {0.9f, 10, 9}, {0.29f, 100, 29}, {0.57f, 100, 57}, {0.7f, 9, 6}};
    const host ctx{1};
    for (const auto& one : cases) {
        CAPTURE(one.share);
        const CacheShape shape{
            .query_heads = 1, .kv_heads = 1, .head_dim_qk = 8, .head_dim_vo = 8, .page_size = 2};
        const All policy{Sink<>{0}, Window<>{1}, ThresholdGate<at_least>{-infinity},
                         SnapKVEviction{.average = one.rows - 1, .share = one.share},
                         QuestPages<>{2, unlimited}};
        test::BoundDual<All, float> cache(
            ctx, shape, {.slab_pages = 60, .max_slabs = 1, .max_seq_len = one.rows}, policy);
        cache.add_slab(ctx);
        const Case sizes(std::vector<std::int32_t>{0, 1, 0, 2, 0, 0, 0, 4, 1, 1, 1, 1, 8, one.rows, 1}.data(),
                         one.share);
        Tokens<float> in(sizes);
        in.run<All>(ctx, cache.cache, 0, 0, one.rows, false);
        const EvictionReport report = evict(ctx, cache.cache, 0);
        CHECK(report.rounds == 1);
        CHECK(report.dropped == one.dropped);
    }
}
