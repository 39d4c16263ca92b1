// ConvScorer in caches: the keys that a mask of the same scores keeps, by steps, chunks, draft tokens and
// copies, however late the scores are computed.
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/conv.hpp>
#include <kvpolicy/scorers/sequence.hpp>

#include "../scorers/conv_cases.hpp"
#include "support/bound_dual.hpp"
#include "support/refusal.hpp"

#include <doctest/doctest.h>

#include <utility>

using namespace kvpolicy;

namespace {

constexpr std::int32_t dim = 8, heads = 2, group = 2;
using Capped = Policy<Sink<>, Window<>, ThresholdGate<above>, TopKBudget<>, ConvScorer<>>;
using Budget = Policy<Sink<>, Window<>, TopKBudget<>, ConvScorer<>>;
using Open = Policy<Sink<>, Window<>, ThresholdGate<above>, ConvScorer<>>;

template <class T>
struct Tokens {
    test::Tensor<T> q, k, v, out;
    Tokens(std::int32_t count, std::int32_t length, std::uint32_t seed)
        : q(count, heads * group, length, dim),
          k(count, heads, length, dim),
          v(count, heads, length, dim),
          out(count, heads * group, length, dim) {
        std::mt19937 generator(seed);
        q.fill_normal(generator);
        k.fill_normal(generator);
        v.fill_normal(generator);
        out.fill(-55.0f);
    }
    template <class P, class Ref>
    void run(const host& ctx, const Ref& ref, const Batch& batch, std::int32_t from, std::int32_t count,
             bool steps) {
        test::call_ref<P, T>(ctx, ref, batch, std::as_const(q).tokens(from, count),
                             std::as_const(k).tokens(from, count), std::as_const(v).tokens(from, count),
                             out.tokens(from, count), {}, steps);
    }
};

struct Weights {
    test::conv_weights values{test::conv_case{}};
    [[nodiscard]] ConvScorer<> scorer(std::int32_t batch) const {
        ConvScorer<> s = values.scorer();
        s.batch = batch;
        return s;
    }
};

constexpr CacheShape shape{.max_sequences = 3,
                           .query_heads = heads * group,
                           .kv_heads = heads,
                           .head_dim_qk = dim,
                           .head_dim_vo = dim,
                           .page_size = 4,
                           .max_draft_tokens = 6};
constexpr PoolShape pool{.slab_pages = 400, .max_slabs = 1, .max_seq_len = 200};

/// The positions that the mask of score_sequence and build_mask leaves visible to the last of
/// `length` queries.
template <class T, class P>
std::vector<std::vector<position_t>> masked(const host& ctx, const P& policy, const Tokens<T>& in,
                                            std::int32_t b, std::int32_t length) {
    std::vector<std::vector<position_t>> seen;
    test::Plane<float> scores(1, heads, in.k.length, std::numeric_limits<float>::quiet_NaN());
    test::Plane<expiry_t> expiry(1, heads, in.k.length);
    const Sequences sequences{.batch = 1, .length = length};
    rows_view<const T> k = in.k.view(), v = in.v.view();
    k.data = k.row(b, 0, 0), v.data = v.row(b, 0, 0), k.batch = v.batch = 1;
    for (std::int32_t h = 0; h < heads; ++h) {
        // A window a head: the mask of each is one call of its own.
        const std::int32_t window = policy.params(0, h).window;
        test::Workspace workspace(score_sequence_workspace_bytes(ctx, policy.scorer(), k, v, sequences));
        test::Plane<float> mine(1, heads, in.k.length, std::numeric_limits<float>::quiet_NaN());
        score_sequence(ctx, policy.scorer(), k, v, sequences, window, mine.view(), workspace);
        std::copy_n(mine.view().head(0, h), length, scores.view().head(0, h));
    }
    const test::Plane<float>& known = scores;
    test::Workspace workspace(build_mask_workspace_bytes(ctx, policy, sequences, heads));
    build_mask(ctx, policy, known.view(), sequences, expiry.view(), workspace);
    for (std::int32_t h = 0; h < heads; ++h) {
        seen.emplace_back();
        for (std::int32_t t = 0; t < length; ++t) {
            if (length - 1 < expiry.at(0, h, t)) {
                seen.back().push_back(t);
            }
        }
    }
    return seen;
}

template <class T, class P, class Cache>
bool holds(const host& ctx, const P& policy, const Cache& cache, const Tokens<T>& in, std::int32_t length) {
    const auto wanted = masked<T>(ctx, policy, in, 0, length);
    for (std::int32_t h = 0; h < heads; ++h) {
        std::vector<position_t> held(static_cast<std::size_t>(cache.usage(0, 0, h).size()));
        cache.retained(0, 0, h, held.data());
        std::sort(held.begin(), held.end());
        if (held != wanted[static_cast<std::size_t>(h)]) {
            return false;
        }
    }
    return true;
}

template <class T, class P>
void check_paths(const P& eager, const P& lazy, const P& some, std::int32_t length) {
    const host ctx{2};
    const Batch one{.count = 1};
    Tokens<T> in(1, length, 3);
    std::vector<std::vector<position_t>> last;
    std::vector<T> out;
    for (const P& policy : {eager, lazy, some}) {
        test::BoundDual<P, T> stepped(ctx, shape, pool, policy);
        stepped.add_slab(ctx);
        bool right = true;
        for (std::int32_t t = 0; t < length; ++t) {
            in.template run<P>(ctx, stepped.cache.layer(0), one, t, 1, true);
            stepped.cache.advance(ctx, one);
            right = right && holds(ctx, policy, stepped.cache, in, t + 1);
        }
        CHECK(right);
        if (!out.empty()) {
            const bool same = std::memcmp(in.out.data.data(), out.data(), out.size() * sizeof(T)) == 0;
            CHECK(same);
        }
        out = in.out.data;
        for (const std::vector<std::int32_t>& sizes :
             {std::vector<std::int32_t>{0}, {1}, {5, 1, 30, 2, 13}, {40, 7}}) {
            test::BoundDual<P, T> chunked(ctx, shape, pool, policy);
            chunked.add_slab(ctx);
            Tokens<T> again(1, length, 3);
            std::int32_t at = 0;
            for (const std::int32_t n : test::chunks_of(length, sizes)) {
                const Batch batch{.count = 1, .length = n};
                again.template run<P>(ctx, chunked.cache.layer(0), batch, at, n, false);
                chunked.cache.advance(ctx, batch);
                at += n;
                CHECK(holds(ctx, policy, chunked.cache, again, at));
            }
            CHECK(test::content_of(chunked.cache.layer(0), 0) == test::content_of(stepped.cache.layer(0), 0));
        }
        // By draft tokens of which some are taken.
        test::BoundDual<P, T> guessed(ctx, shape, pool, policy);
        guessed.add_slab(ctx);
        Tokens<T> third(1, length, 3);
        std::mt19937 generator(8);
        for (std::int32_t at = 0; at < length;) {
            const std::int32_t n =
                std::min<std::int32_t>(length - at, 1 + static_cast<std::int32_t>(generator() % 6));
            const std::int32_t appended =
                static_cast<std::int32_t>(generator() % static_cast<unsigned>(n + 1));
            const auto ref = guessed.cache.layer(0);
            test::Workspace workspace(workspace_bytes(ctx, ref, {.batch = 1, .tokens = n}));
            append_draft(ctx, ref,
                         {.q = std::as_const(third.q).tokens(at, n),
                          .k = std::as_const(third.k).tokens(at, n),
                          .v = std::as_const(third.v).tokens(at, n),
                          .out = third.out.tokens(at, n),
                          .batch = {.count = 1, .length = n}},
                         workspace);
            accept(ctx, ref, {.count = 1, .length = appended}, workspace);
            guessed.cache.advance(ctx, {.count = 1, .length = appended});
            at += appended;
        }
        CHECK(test::content_of(guessed.cache.layer(0), 0) == test::content_of(stepped.cache.layer(0), 0));
    }
}

}  // namespace

TEST_CASE("eager and lazy scores, steps, chunks and draft tokens keep what the mask keeps") {
    const Weights weights;
    // Windows of two heads: the least there is, and one that gives batches of several keys.
    const std::int32_t windows[] = {13, 21}, budgets[] = {5, 9}, sinks[] = {3, 0};
    const auto capped = [&](std::int32_t batch) {
        return Capped{Sink<>{per_head(sinks, 1, 2)}, Window<>{per_head(windows, 1, 2)},
                      ThresholdGate<above>{-0.5f}, TopKBudget<>{per_head(budgets, 1, 2)},
                      weights.scorer(batch)};
    };
    check_paths<float>(capped(1), capped(0), capped(4), 90);
    check_paths<bf16>(capped(1), capped(0), capped(3), 90);
    const std::int32_t wide[] = {40, 17}, none[] = {0, unlimited};
    const auto budget = [&](std::int32_t batch) {
        return Budget{Sink<>{20}, Window<>{per_head(wide, 1, 2)}, TopKBudget<>{per_head(none, 1, 2)},
                      weights.scorer(batch)};
    };
    check_paths<float>(budget(1), budget(0), budget(7), 110);
    const auto open = [&](std::int32_t batch) {
        return Open{Sink<>{2}, Window<>{18}, ThresholdGate<above>{0.0f}, weights.scorer(batch)};
    };
    check_paths<fp16>(open(1), open(0), open(2), 100);
}

TEST_CASE(
    "a cache of fixed size holds the same, in batches that join and leave, and through snapshots and forks") {
    const Weights weights;
    const Capped policy{Sink<>{2}, Window<>{19}, ThresholdGate<above>{-0.5f}, TopKBudget<>{8},
                        weights.scorer(0)};
    const host ctx{2};
    test::BoundCache<Capped, float> fixed(ctx, shape, policy);
    test::BoundDual<Capped, float> dual(ctx, shape, pool, policy);
    dual.add_slab(ctx);
    std::mt19937 generator(2);
    bool same = true;
    for (std::uint32_t round = 0; round < 80; ++round) {
        const auto seq = static_cast<std::int32_t>(generator() % 3);
        switch (generator() % 8) {
            case 0:
                fixed.cache.clear(ctx, seq);
                dual.cache.clear(ctx, seq);
                break;
            case 1:
                fixed.cache.fork(ctx, seq, (seq + 1) % 3);
                dual.cache.fork(ctx, seq, (seq + 1) % 3);
                break;
            case 2: {
                std::vector<unsigned char> blob(fixed.cache.snapshot_bytes(seq));
                fixed.cache.snapshot(ctx, seq, blob.data(), blob.size());
                dual.cache.restore(ctx, (seq + 2) % 3, blob.data(), blob.size());
                fixed.cache.restore(ctx, (seq + 2) % 3, blob.data(), blob.size());
                break;
            }
            default:
                break;
        }
        std::int32_t seq_ids[] = {0, 1, 2}, lengths[3];
        std::shuffle(seq_ids, seq_ids + 3, generator);
        const bool steps = generator() % 2 == 0;
        for (std::int32_t& n : lengths) {
            n = static_cast<std::int32_t>(generator() % (steps ? 2 : 12));
        }
        Tokens<float> a(3, 12, round), b(3, 12, round);
        const Batch batch{.count = 3, .seq_ids = seq_ids, .q_len = lengths, .length = 12};
        a.run<Capped>(ctx, fixed.cache.layer(0), batch, 0, 12, steps);
        b.run<Capped>(ctx, dual.cache.layer(0), batch, 0, 12, steps);
        fixed.cache.advance(ctx, batch);
        dual.cache.advance(ctx, batch);
        for (std::int32_t i = 0; i < 3; ++i) {
            if (fixed.cache.length(i) > 150) {
                fixed.cache.clear(ctx, i);
                dual.cache.clear(ctx, i);
            }
            same =
                same && test::content_of(fixed.cache.layer(0), i) == test::content_of(dual.cache.layer(0), i);
        }
        same = same && a.out.data == b.out.data;
    }
    CHECK(same);
}

TEST_CASE("windows below 13, and NaN in a token, are refused with nothing changed") {
    const Weights weights;
    const std::int32_t windows[] = {13, 12};
    const Budget narrow{Sink<>{0}, Window<>{per_head(windows, 1, 2)}, TopKBudget<>{3}, weights.scorer(0)};
    using Cache = FixedBudgetCache<Budget, float>;
    CHECK_REFUSED(Cache(shape, narrow),
                  "window of layer 0, head 1: 12 is not allowed; it must be 13 or more, since the scorer "
                  "reads 6 keys on "
                  "either side of a key while the window holds them");
    const Budget policy{Sink<>{1}, Window<>{15}, TopKBudget<>{3}, weights.scorer(1)};
    for (const bool steps : {true, false}) {
        const host ctx{1};
        test::BoundCache<Budget, float> cache(ctx, shape, policy);
        Tokens<float> in(1, 30, 4);
        in.v.view().row(0, 1, 20)[3] = std::numeric_limits<float>::quiet_NaN();
        if (steps) {
            for (std::int32_t t = 0; t < 20; ++t) {
                in.run<Budget>(ctx, cache.cache.layer(0), {.count = 1}, t, 1, true);
                cache.cache.advance(ctx, {.count = 1});
            }
            const auto before = test::content_of(cache.cache.layer(0), 0);
            CHECK_REFUSED(in.run<Budget>(ctx, cache.cache.layer(0), {.count = 1}, 20, 1, true),
                          "value of entry 0, head 1, position 20: NaN");
            CHECK(test::content_of(cache.cache.layer(0), 0) == before);
        } else {
            CHECK_REFUSED(in.run<Budget>(ctx, cache.cache.layer(0), {.count = 1, .length = 30}, 0, 30, false),
                          "value of entry 0, head 1, position 20: NaN");
            CHECK(cache.cache.length(0) == 0);
            CHECK(cache.cache.usage(0, 0, 1).long_range == 0);
        }
    }
}

TEST_CASE("a snapshot of another batch of scores is of another policy") {
    const Weights weights;
    const auto with = [&](std::int32_t batch) {
        return Budget{Sink<>{1}, Window<>{20}, TopKBudget<>{3}, weights.scorer(batch)};
    };
    const host ctx{1};
    test::BoundCache<Budget, float> lazy(ctx, shape, with(0)), eager(ctx, shape, with(1));
    std::vector<unsigned char> blob(lazy.cache.snapshot_bytes(0));
    lazy.cache.snapshot(ctx, 0, blob.data(), blob.size());
    CHECK_REFUSED(eager.cache.restore(ctx, 0, blob.data(), blob.size()), "of another policy");
}

TEST_CASE("a pool that runs out leaves scores unwritten; grown, the call gives what an ample pool gives") {
    const Weights weights;
    const host ctx{1};
    const Open policy{Sink<>{2}, Window<>{15}, ThresholdGate<above>{-0.5f}, weights.scorer(0)};
    for (const bool steps : {true, false}) {
        test::BoundDual<Open, float> tight(ctx, shape,
                                           {.slab_pages = 3, .max_slabs = 200, .max_seq_len = 200}, policy),
            ample(ctx, shape, pool, policy);
        ample.add_slab(ctx);
        Tokens<float> a(3, 70, 5), b(3, 70, 5);
        std::int32_t refused = 0;
        for (std::int32_t t = 0, n = 0; t < 70; t += n) {
            n = steps ? 1 : std::min(70 - t, 1 + t % 20);  // chunks longer than the window among them
            b.run<Open>(ctx, ample.cache.layer(0), {.count = 3, .length = n}, t, n, steps);
            std::int32_t left[] = {n, n, n};
            for (bool again = true; again;) {
                std::uint32_t status[3] = {};
                const std::vector<unsigned char> before = test::content_of(tight.cache.layer(0), 2);
                test::call_ref<Open, float>(
                    ctx, tight.cache.layer(0), {.count = 3, .q_len = left, .length = n},
                    std::as_const(a.q).tokens(t, n), std::as_const(a.k).tokens(t, n),
                    std::as_const(a.v).tokens(t, n), a.out.tokens(t, n), {}, steps, status);
                again = false;
                for (std::int32_t i = 0; i < 3; ++i) {
                    if (left[i] != 0 && status[i] != 0) {
                        again = true;
                        ++refused;
                        CHECK((i != 2 || test::content_of(tight.cache.layer(0), 2) == before));
                    } else {
                        left[i] = 0;
                    }
                }
                if (again) {
                    tight.add_slab(ctx);
                }
            }
            tight.cache.advance(ctx, {.count = 3, .length = n});
            ample.cache.advance(ctx, {.count = 3, .length = n});
            for (std::int32_t seq = 0; seq < 3; ++seq) {
                CHECK(test::content_of(tight.cache.layer(0), seq) ==
                      test::content_of(ample.cache.layer(0), seq));
            }
        }
        CHECK(refused > 5);
        CHECK(a.out.data == b.out.data);
    }
}

TEST_CASE("one token, a prompt twice the budget, a budget of 0: LTE holds what its mask shows") {
    const Weights weights;
    const host ctx{1};
    const std::int32_t budgets[] = {0, 6};
    const Capped policy{Sink<>{2}, Window<>{13}, ThresholdGate<above>{-10.0f},
                        TopKBudget<>{per_head(budgets, 1, 2)}, weights.scorer(0)};
    for (const std::int32_t length : {1, 2, 13, 14, 15, 16, 20, 21, 22, 42}) {  // 21 rows of the second head
        test::BoundCache<Capped, float> cache(ctx, shape, policy);
        Tokens<float> in(1, length, 6);
        in.run<Capped>(ctx, cache.cache.layer(0), {.count = 1, .length = length}, 0, length, length == 1);
        cache.cache.advance(ctx, {.count = 1, .length = length});
        CHECK(holds(ctx, policy, cache.cache, in, length));
        CHECK(cache.cache.usage(0, 0, 0).long_range == 0);
        CHECK(cache.cache.usage(0, 0, 1).long_range == std::clamp(length - 15, 0, 6));
    }
}
