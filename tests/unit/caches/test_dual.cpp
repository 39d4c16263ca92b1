// DualCache: what differs from a cache of fixed size. That it holds what the mask says is
// test_cache_equals_mask's business.
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/linear.hpp>
#include <kvpolicy/scorers/mlstm.hpp>

#include "support/bound_dual.hpp"
#include "support/loops.hpp"
#include "support/refusal.hpp"

#include <doctest/doctest.h>

#include <numeric>
#include <string>
#include <utility>

using namespace kvpolicy;

namespace {

using Gated = Policy<Sink<>, Window<>, ThresholdGate<at_least>>;
using Capped = Policy<Sink<>, Window<>, ThresholdGate<above>, TopKBudget<>, Decay<dynamic>>;

Gated gated(std::int32_t s, std::int32_t w) {
    return Gated{Sink<>{s}, Window<>{w}, ThresholdGate<at_least>{0.0f}};
}
Capped capped(std::int32_t s, std::int32_t w, std::int32_t k) {
    return Capped{Sink<>{s}, Window<>{w}, ThresholdGate<above>{-0.5f}, TopKBudget<>{k},
                  Decay<dynamic>{-0.05f, 1}};
}

/// Random tokens of a few sequences.
template <class T = float>
struct Tokens {
    test::Tensor<T> q, k, v, out;
    test::Plane<float> scores, lse;
    Tokens(std::int32_t count, std::int32_t heads, std::int32_t group, std::int32_t length, std::int32_t dim,
           std::uint32_t seed)
        : q(count, heads * group, length, dim),
          k(count, heads, length, dim),
          v(count, heads, length, dim),
          out(count, heads * group, length, dim),
          scores(count, heads, length),
          lse(count, heads * group, length, -55.0f) {
        std::mt19937 generator(seed);
        q.fill_normal(generator);
        k.fill_normal(generator);
        v.fill_normal(generator);
        out.fill(-55.0f);
        test::fill_scores(scores, test::Scores::random, generator);
    }
    template <class P, class Ref>
    void run(const host& ctx, const Ref& ref, const Batch& batch, std::int32_t from, std::int32_t count,
             bool steps, std::uint32_t* status = nullptr) {
        plane_view<float> sums = lse.view();
        sums.data += from;
        sums.length = count;
        test::call_ref<P, T>(ctx, ref, batch, std::as_const(q).tokens(from, count),
                             std::as_const(k).tokens(from, count), std::as_const(v).tokens(from, count),
                             out.tokens(from, count), {.scores = scores.tokens(from, count), .lse = sums},
                             steps, status);
    }
};

constexpr CacheShape small{.layers = 1,
                           .max_sequences = 3,
                           .query_heads = 4,
                           .kv_heads = 2,
                           .head_dim_qk = 8,
                           .head_dim_vo = 8,
                           .page_size = 4};

}  // namespace

TEST_CASE("exhaustion leaves the sequence alone: out 0, lse -inf, status set, not a byte of state changed") {
    const host ctx(2);
    for (const bool steps : {true, false}) {
        CAPTURE(steps);
        test::BoundDual<Gated, float> tight(
            ctx, small, {.slab_pages = 4, .max_slabs = 30, .max_seq_len = 100}, gated(1, 5));
        test::BoundDual<Gated, float> ample(
            ctx, small, {.slab_pages = 200, .max_slabs = 1, .max_seq_len = 100}, gated(1, 5));
        tight.add_slab(ctx);
        ample.add_slab(ctx);
        Tokens<> a(3, 2, 2, 60, 8, 1), b(3, 2, 2, 60, 8, 1);
        std::int32_t refused = 0, served_beside = 0;
        bool same = true, unchanged = true, cleared = true;
        for (std::int32_t t = 0, n = 1; t < 60; t += n) {
            n = steps ? 1 : std::min(60 - t, 1 + t % 7);
            b.run<Gated>(ctx, ample.cache.layer(0), {.count = 3, .length = n}, t, n, steps);
            std::int32_t left[3] = {n, n, n};
            for (bool again = true; again;) {
                const std::vector<unsigned char> before = tight.everything();
                std::uint32_t status[3] = {0, 8, 0};
                a.run<Gated>(ctx, tight.cache.layer(0), {.count = 3, .q_len = left, .length = n}, t, n, steps,
                             status);
                again = false;
                std::int32_t served = 0;
                for (std::int32_t i = 0; i < 3; ++i) {
                    const bool failed = (status[i] & status_pool_exhausted) != 0;
                    CHECK((status[i] & ~std::uint32_t{status_pool_exhausted}) == (i == 1 ? 8u : 0u));
                    if (left[i] != 0 && !failed) {
                        ++served;
                        left[i] = 0;
                    }
                    if (!failed) {
                        continue;
                    }
                    again = true;
                    ++refused;
                    for (std::int32_t h = 0; h < 4; ++h) {
                        for (std::int32_t j = t; j < t + n; ++j) {
                            cleared = cleared && a.lse.at(i, h, j) == -std::numeric_limits<float>::infinity();
                            for (std::int32_t c = 0; c < 8; ++c) {
                                cleared = cleared && a.out.view().row(i, h, j)[c] == 0.0f;
                            }
                        }
                    }
                }
                if (again && served == 0) {
                    unchanged = unchanged && before == tight.everything();
                }
                served_beside += again ? served : 0;
                if (again) {
                    tight.add_slab(ctx);
                }
            }
            tight.cache.advance(ctx, {.count = 3, .length = n});
            ample.cache.advance(ctx, {.count = 3, .length = n});
            for (std::int32_t seq = 0; seq < 3; ++seq) {
                same = same && test::content_of(tight.cache.layer(0), seq) ==
                                   test::content_of(ample.cache.layer(0), seq);
            }
        }
        CHECK(refused > 5);
        CHECK(served_beside > 0);
        CHECK(same);
        CHECK(unchanged);
        CHECK(cleared);
        CHECK(a.out.data == b.out.data);
        CHECK(a.lse.data == b.lse.data);
    }
}

TEST_CASE("without a status array exhaustion is refused, and nobody's state changes") {
    const host ctx(1);
    test::BoundDual<Gated, float> tight(ctx, small, {.slab_pages = 4, .max_slabs = 3, .max_seq_len = 100},
                                        gated(1, 5));
    Tokens<> a(3, 2, 2, 9, 8, 2);
    const std::vector<unsigned char> empty = tight.everything();
    CHECK_REFUSED((a.run<Gated>(ctx, tight.cache.layer(0), {.count = 3}, 0, 1, true)),
                  "free pages of the pool: 0 is not allowed; it must be at least the 6 that the call needs "
                  "(add_slab adds "
                  "more), or the call takes a status array");
    CHECK(tight.everything() == empty);
    tight.add_slab(ctx);  // enough for two of the three
    const std::vector<unsigned char> before = tight.everything();
    CHECK_REFUSED((a.run<Gated>(ctx, tight.cache.layer(0), {.count = 3, .length = 3}, 0, 3, false)),
                  "free pages of the pool: 4");
    CHECK(tight.everything() == before);
    CHECK(std::all_of(a.out.data.begin(), a.out.data.end(), [](float x) { return x == -55.0f; }));
    tight.add_slab(ctx);
    a.run<Gated>(ctx, tight.cache.layer(0), {.count = 3, .length = 3}, 0, 3, false);
    CHECK(tight.cache.free_pages() == 2);
}

TEST_CASE("after reserve(n) n tokens cannot fail, whatever the gates say") {
    const host ctx(1);
    CacheShape shape = small;
    shape.layers = 2;
    const std::int32_t budgets[] = {unlimited, 3, 0, unlimited};
    const Capped policy{Sink<>{2}, Window<>{3}, ThresholdGate<above>{-100.0f},
                        TopKBudget<>{per_head(budgets, 2, 2)}, Decay<dynamic>{0.0f, 1}};
    for (const std::int32_t page_size : {1, 3, 16}) {
        shape.page_size = page_size;
        test::BoundDual<Capped, float> cache(ctx, shape,
                                             {.slab_pages = 5, .max_slabs = 200, .max_seq_len = 64}, policy);
        Tokens<> a(3, 2, 2, 64, 8, 3);
        std::mt19937 generator(7);
        std::int32_t at = 0;
        while (at < 64) {
            const std::int32_t n = std::min(1 + static_cast<std::int32_t>(generator() % 20), 64 - at);
            const Batch ahead{.count = 3, .length = n};
            const std::vector<unsigned char> before = cache.everything();
            const std::int64_t slabs = cache.cache.reserve(ctx, ahead);
            if (slabs > 0) {
                CHECK(cache.everything() == before);
                // One slab less does not do.
                for (std::int64_t i = 0; i + 1 < slabs; ++i) {
                    cache.add_slab(ctx);
                }
                CHECK(cache.cache.reserve(ctx, ahead) == 1);
                cache.add_slab(ctx);
                CHECK(cache.cache.reserve(ctx, ahead) == 0);
            }
            const std::int64_t free = cache.cache.free_pages();
            for (std::int32_t done = 0; done < n;) {
                const std::int32_t chunk = std::min(n - done, 1 + static_cast<std::int32_t>(generator() % 4));
                for (std::int32_t layer = 0; layer < 2; ++layer) {
                    a.run<Capped>(ctx, cache.cache.layer(layer), {.count = 3, .length = chunk}, at + done,
                                  chunk, chunk == 1);
                }
                cache.cache.advance(ctx, {.count = 3, .length = chunk});
                done += chunk;
            }
            CHECK(cache.cache.free_pages() == free);
            at += n;
        }
        CHECK(cache.cache.usage(0, 0, 0).size() == 64);
        CHECK(cache.cache.usage(0, 0, 1).size() == 8);
        CHECK(cache.cache.usage(1, 0, 0).size() == 5);
        CHECK(cache.cache.usage(0, 0, 0).capacity == 64);
        CHECK(cache.cache.usage(0, 0, 1).capacity == 8);
        CHECK_REFUSED((a.run<Capped>(ctx, cache.cache.layer(0), {.count = 3}, 0, 1, true)),
                      "length of sequence 0 after the call: 65 is not allowed; it must be at most the "
                      "cache's max_seq_len, 64");
        CHECK_REFUSED(cache.cache.reserve(ctx, {.count = 1}), "length of sequence 0 after the call: 65");
    }
}

TEST_CASE("a capped cache goes on beyond the longest length that bounds unlimited heads") {
    const host ctx(1);
    test::BoundDual<Capped, float> cache(ctx, small, {.slab_pages = 24, .max_slabs = 1, .max_seq_len = 16},
                                         capped(1, 5, 6));
    cache.add_slab(ctx);
    Tokens<> a(3, 2, 2, 100, 8, 3);
    for (std::int32_t t = 0; t < 100; ++t) {
        a.run<Capped>(ctx, cache.cache.layer(0), {.count = 3}, t, 1, true);
        cache.cache.advance(ctx, {.count = 3});
    }
    CHECK(cache.cache.length(2) == 100);
    CHECK(cache.cache.usage(0, 2, 1).size() == 12);
}

TEST_CASE("pages go back when a sequence is cleared, and whoever gets them next sees nothing of it") {
    const host ctx(1);
    test::BoundDual<Gated, float> reused(ctx, small, {.slab_pages = 16, .max_slabs = 40, .max_seq_len = 100},
                                         gated(2, 3));
    std::mt19937 generator(5);
    for (std::uint32_t round = 0; round < 12; ++round) {
        test::BoundDual<Gated, float> fresh(
            ctx, small, {.slab_pages = 200, .max_slabs = 1, .max_seq_len = 100}, gated(2, 3));
        fresh.add_slab(ctx);
        const auto seq = static_cast<std::int32_t>(generator() % 3);
        reused.cache.clear(ctx, seq);
        CHECK(reused.cache.length(seq) == 0);
        Tokens<> a(1, 2, 2, 40, 8, round), b(1, 2, 2, 40, 8, round);
        bool equal = true;
        for (std::int32_t t = 0, n = 0; t < 40; t += n) {
            n = std::min(40 - t, 1 + static_cast<std::int32_t>(generator() % 5));
            const Batch batch{.count = 1, .seq_ids = &seq, .length = n};
            reused.reserve(ctx, batch);
            a.run<Gated>(ctx, reused.cache.layer(0), batch, t, n, n == 1);
            b.run<Gated>(ctx, fresh.cache.layer(0), batch, t, n, n == 1);
            reused.cache.advance(ctx, batch);
            fresh.cache.advance(ctx, batch);
            equal = equal && test::content_of(reused.cache.layer(0), seq) ==
                                 test::content_of(fresh.cache.layer(0), seq);
        }
        CHECK(equal);
        CHECK(a.out.data == b.out.data);
        CHECK(std::all_of(a.out.data.begin(), a.out.data.end(), [](float x) { return std::isfinite(x); }));
    }
    for (std::int32_t seq = 0; seq < 3; ++seq) {
        reused.cache.clear(ctx, seq);
    }
    CHECK(reused.cache.free_pages() == reused.cache.attached_pages());
    // Every page is free exactly once.
    const auto pool = reused.cache.layer(0).pool;
    std::vector<std::int32_t> ids(pool.free_ids, pool.free_ids + pool.free_pages());
    std::sort(ids.begin(), ids.end());
    std::vector<std::int32_t> all(ids.size());
    std::iota(all.begin(), all.end(), 0);
    CHECK(ids == all);
}

TEST_CASE("beside a cache of fixed size: the same rows and the same bits, in batches that join and leave") {
    const std::int32_t budgets[] = {6, 0, 40, 3}, windows[] = {4, 1, 7, 9}, sinks[] = {0, 2, 1, 5};
    const Capped policy{Sink<>{per_head(sinks, 2, 2)}, Window<>{per_head(windows, 2, 2)},
                        ThresholdGate<above>{-0.5f}, TopKBudget<>{per_head(budgets, 2, 2)},
                        Decay<dynamic>{-0.1f, 1}};
    CacheShape shape = small;
    shape.layers = 2;
    for (const std::int32_t page_size : {1, 4, 7, 64}) {
        const host ctx(1 + page_size % 2);
        shape.page_size = page_size;
        test::BoundDual<Capped, bf16> dual(
            ctx, shape, {.slab_pages = 7, .max_slabs = 500, .max_seq_len = 1000}, policy, nullptr, 11);
        test::BoundCache<Capped, bf16> fixed(ctx, shape, policy, nullptr, {}, 11);
        std::mt19937 generator(static_cast<std::uint32_t>(page_size));
        bool same_rows = true, same_bits = true;
        for (std::uint32_t round = 0; round < 60; ++round) {
            if (generator() % 8 == 0) {
                const auto seq = static_cast<std::int32_t>(generator() % 3);
                dual.cache.clear(ctx, seq);
                fixed.cache.clear(ctx, seq);
            }
            std::int32_t seq_ids[] = {0, 1, 2}, lengths[3];
            std::shuffle(seq_ids, seq_ids + 3, generator);
            for (std::int32_t& n : lengths) {
                n = static_cast<std::int32_t>(generator() % 6);
            }
            const bool steps = generator() % 2 == 0;
            for (std::int32_t& n : lengths) {
                n = steps ? std::min(n, 1) : n;
            }
            const Batch batch{.count = 3, .seq_ids = seq_ids, .q_len = lengths, .length = 6};
            dual.reserve(ctx, batch);
            for (std::int32_t layer = 0; layer < 2; ++layer) {
                Tokens<bf16> a(3, 2, 2, 6, 8, round), b(3, 2, 2, 6, 8, round);
                a.run<Capped>(ctx, dual.cache.layer(layer), batch, 0, 6, steps);
                b.run<Capped>(ctx, fixed.cache.layer(layer), batch, 0, 6, steps);
                same_bits = same_bits &&
                            std::memcmp(a.out.data.data(), b.out.data.data(), a.out.data.size() * 2) == 0 &&
                            a.lse.data == b.lse.data;
            }
            dual.cache.advance(ctx, batch);
            fixed.cache.advance(ctx, batch);
            for (std::int32_t layer = 0; layer < 2; ++layer) {
                for (std::int32_t seq = 0; seq < 3; ++seq) {
                    same_rows = same_rows && test::content_of(dual.cache.layer(layer), seq) ==
                                                 test::content_of(fixed.cache.layer(layer), seq);
                }
            }
        }
        CHECK(same_rows);
        CHECK(same_bits);
    }
}

namespace {

/// Scores on arrival: the key's first number.
struct FirstNumber {
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::on_arrival;
    std::size_t scratch_size() const { return 0; }
    float score(std::int32_t head, const float* key, const float*, float*) const { return key[head]; }
};
/// Scores on leaving: the sum of all first numbers so far, less the key's own.
struct RunningSum {
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::on_leaving;
    std::size_t state_size() const { return 1; }
    std::size_t scratch_size() const { return 0; }
    void reset(float* state) const { *state = 0.0f; }
    void absorb(std::int32_t, float* state, const float* key, const float*, float*) const {
        *state += key[0];
    }
    float read(std::int32_t, const float* state, const float* key, const float*, float*) const {
        return *state - key[1];
    }
};

template <class S>
void check_scorer() {
    using P = Policy<Sink<1>, Window<4>, ThresholdGate<above>, TopKBudget<6>, S>;
    using Open = Policy<Sink<1>, Window<4>, ThresholdGate<above>, TopKBudget<>, S>;
    const P policy{{}, {}, ThresholdGate<above>{-1.0f}, {}, {}};
    const Open open{{}, {}, ThresholdGate<above>{-1.0f}, TopKBudget<>{unlimited}, {}};
    const host ctx(2);
    const PoolShape pool{.slab_pages = 400, .max_slabs = 1, .max_seq_len = 80};
    test::BoundDual<P, float> dual(ctx, small, pool, policy);
    test::BoundCache<P, float> fixed(ctx, small, policy);
    test::BoundDual<Open, float> stepped(ctx, small, pool, open), chunked(ctx, small, pool, open);
    dual.add_slab(ctx);
    stepped.add_slab(ctx);
    chunked.add_slab(ctx);
    Tokens<> a(3, 2, 2, 60, 8, 9), b(3, 2, 2, 60, 8, 9), c(3, 2, 2, 60, 8, 9);
    for (std::int32_t t = 0, n = 0; t < 60; t += n) {
        n = std::min(60 - t, t % 3 == 0 ? 1 : 7);
        const Batch batch{.count = 3, .length = n};
        a.template run<P>(ctx, dual.cache.layer(0), batch, t, n, n == 1);
        b.template run<P>(ctx, fixed.cache.layer(0), batch, t, n, n == 1);
        dual.cache.advance(ctx, batch);
        fixed.cache.advance(ctx, batch);
        c.template run<Open>(ctx, chunked.cache.layer(0), batch, t, n, false);
        chunked.cache.advance(ctx, batch);
    }
    CHECK(a.out.data == b.out.data);
    for (std::int32_t t = 0; t < 60; ++t) {
        a.template run<Open>(ctx, stepped.cache.layer(0), {.count = 3}, t, 1, true);
        stepped.cache.advance(ctx, {.count = 3});
    }
    for (std::int32_t seq = 0; seq < 3; ++seq) {
        CHECK(test::content_of(dual.cache.layer(0), seq) == test::content_of(fixed.cache.layer(0), seq));
        CHECK(test::content_of(stepped.cache.layer(0), seq) == test::content_of(chunked.cache.layer(0), seq));
    }
    std::int32_t most = 0;
    for (std::int32_t seq = 0; seq < 3; ++seq) {
        most = std::max(most, stepped.cache.usage(0, seq, 0).long_range);
    }
    CHECK(most > 6);
    // A NaN score is refused with nothing changed, pages included, and a NaN key where the scores of other
    // keys depend on it.
    constexpr bool alone = S::when == score_time::on_arrival;
    const char* const fault = alone ? "score of entry 0, head 0" : "key of entry 0, head 0";
    const std::vector<unsigned char> before = stepped.everything();
    a.k.fill(std::numeric_limits<float>::quiet_NaN());
    CHECK_REFUSED((a.template run<Open>(ctx, stepped.cache.layer(0), {.count = 3}, 0, 1, true)), fault);
    CHECK_REFUSED((a.template run<Open>(ctx, stepped.cache.layer(0), {.count = 3, .length = 9}, 0, 9, false)),
                  fault);
    CHECK(stepped.everything() == before);
}

}  // namespace

TEST_CASE("scorers that run on arrival and on leaving") {
    check_scorer<FirstNumber>();
    check_scorer<RunningSum>();
}

TEST_CASE("one-hot values: exactly sinks, window and open keys have weight") {
    const host ctx(1);
    constexpr std::int32_t length = 40, dim = 40;
    const CacheShape shape{
        .query_heads = 1, .kv_heads = 1, .head_dim_qk = 8, .head_dim_vo = dim, .page_size = 3};
    for (const std::int32_t chunk : {1, 7, 40}) {
        test::BoundDual<Gated, float> cache(ctx, shape, {.slab_pages = 30, .max_slabs = 1, .max_seq_len = 40},
                                            gated(2, 4));
        cache.add_slab(ctx);
        test::Tensor<float> q(1, 1, length, 8), k(1, 1, length, 8), v(1, 1, length, dim),
            out(1, 1, length, dim);
        std::mt19937 generator(3);
        q.fill_normal(generator);
        k.fill_normal(generator);
        v.fill(0.0f);
        test::Plane<float> scores(1, 1, length);
        for (std::int32_t t = 0; t < length; ++t) {
            v.view().row(0, 0, t)[t] = 1.0f;
            scores.at(0, 0, t) = t % 5 == 0 ? 0.0f : -1.0f;
        }
        for (std::int32_t t = 0, n = 0; t < length; t += n) {
            n = std::min(chunk, length - t);
            const Batch batch{.count = 1, .length = n};
            test::call_ref<Gated, float>(ctx, cache.cache.layer(0), batch, std::as_const(q).tokens(t, n),
                                         std::as_const(k).tokens(t, n), std::as_const(v).tokens(t, n),
                                         out.tokens(t, n), {.scores = scores.tokens(t, n)}, n == 1);
            cache.cache.advance(ctx, batch);
        }
        bool exact = true;
        for (std::int32_t query = 0; query < length; ++query) {
            for (std::int32_t t = 0; t < length; ++t) {
                const bool seen = t <= query && (t < 2 || query - t < 4 || t % 5 == 0);
                exact = exact && (out.view().row(0, 0, query)[t] != 0.0f) == seen;
            }
        }
        CHECK(exact);
    }
}

TEST_CASE("heads filled to their cap and to one below it, in the same step") {
    const host ctx(1);
    test::BoundDual<Capped, float> cache(ctx, small, {.slab_pages = 60, .max_slabs = 1, .max_seq_len = 60},
                                         capped(1, 3, 5));
    test::BoundCache<Capped, float> fixed(ctx, small, capped(1, 3, 5));
    cache.add_slab(ctx);
    Tokens<> a(1, 2, 2, 20, 8, 4), b(1, 2, 2, 20, 8, 4);
    for (std::int32_t t = 0; t < 20; ++t) {  // head 0 admits every key, head 1 leaves one out
        for (Tokens<>* one : {&a, &b}) {
            one->scores.at(0, 0, t) = static_cast<float>(t % 7);
            one->scores.at(0, 1, t) = t == 2 ? -1.0f : static_cast<float>(t % 5);
        }
    }
    const std::int32_t seq = 1;
    const Batch one{.count = 1, .seq_ids = &seq};
    bool edge = false;
    for (std::int32_t t = 0; t < 20; ++t) {
        a.run<Capped>(ctx, cache.cache.layer(0), one, t, 1, true);
        b.run<Capped>(ctx, fixed.cache.layer(0), one, t, 1, true);
        cache.cache.advance(ctx, one);
        fixed.cache.advance(ctx, one);
        edge = edge ||
               (cache.cache.usage(0, 1, 0).long_range == 5 && cache.cache.usage(0, 1, 1).long_range == 4);
        CHECK(test::content_of(cache.cache.layer(0), 1) == test::content_of(fixed.cache.layer(0), 1));
    }
    CHECK(edge);
    CHECK(a.out.data == b.out.data);
}

TEST_CASE("many rows on few heads: decode is cut into parts across pages") {
    const host ctx(3);
    constexpr std::int32_t length = test::rounds(9000, 4200);  // two parts at least
    const CacheShape shape{
        .query_heads = 2, .kv_heads = 1, .head_dim_qk = 8, .head_dim_vo = 8, .page_size = 48};
    using Keep = Policy<Sink<2>, Window<5>, TopKBudget<>>;
    test::BoundDual<Keep, float> dual(ctx, shape, {.slab_pages = 200, .max_slabs = 1, .max_seq_len = length},
                                      Keep{{}, {}, TopKBudget<>{unlimited}});
    test::BoundCache<Keep, float> fixed(ctx, shape, Keep{{}, {}, TopKBudget<>{length}});
    dual.add_slab(ctx);
    Tokens<> a(1, 1, 2, length, 8, 6), b(1, 1, 2, length, 8, 6);
    for (std::int32_t t = 0, n = 0; t < length; t += n) {
        n = t + 10 < length ? std::min(700, length - 10 - t) : 1;
        a.run<Keep>(ctx, dual.cache.layer(0), {.count = 1, .length = n}, t, n, n == 1);
        b.run<Keep>(ctx, fixed.cache.layer(0), {.count = 1, .length = n}, t, n, n == 1);
        dual.cache.advance(ctx, {.count = 1, .length = n});
        fixed.cache.advance(ctx, {.count = 1, .length = n});
    }
    // Keys come in the same order, but masked and plain ones fall into other blocks: equal to rounding.
    double most = 0.0;
    for (std::size_t i = 0; i < a.out.data.size(); ++i) {
        most =
            std::max(most, std::abs(static_cast<double>(a.out.data[i]) - static_cast<double>(b.out.data[i])));
    }
    CHECK(most < 1e-5);
    CHECK(dual.cache.usage(0, 0, 0).size() == length);
}

TEST_CASE("an export is the page table; tails of pages stay poisoned and nobody reads them") {
    const host ctx(1);
    test::BoundDual<Gated, float> cache(ctx, small, {.slab_pages = 8, .max_slabs = 20, .max_seq_len = 100},
                                        gated(1, 4));
    Tokens<> a(2, 2, 2, 30, 8, 8);
    const std::int32_t seq_ids[] = {2, 0};
    const Batch batch{.count = 2, .seq_ids = seq_ids, .length = 30};
    cache.reserve(ctx, batch);
    a.run<Gated>(ctx, cache.cache.layer(0), batch, 0, 30, false);
    cache.cache.advance(ctx, batch);
    CHECK(std::all_of(a.out.data.begin(), a.out.data.end(), [](float x) { return std::isfinite(x); }));
    const auto ref = cache.cache.layer(0);
    std::vector<std::int32_t> indptr(5), indices(100), last(4);
    export_heads(ctx, ref, batch, {indptr.data(), indices.data(), last.data(), 100});
    bool exact = true, poisoned = true;
    for (std::int32_t sequence = 0; sequence < 4; ++sequence) {
        const std::int32_t seq = seq_ids[sequence / 2], head = sequence % 2;
        const auto at = static_cast<std::size_t>(sequence);
        std::vector<position_t> found;
        for (std::int32_t page = indptr[at]; page < indptr[at + 1]; ++page) {
            const std::int32_t id = indices[static_cast<std::size_t>(page)];
            const Slab<float>& slab = ref.pool.slabs[id / 8];
            for (std::int32_t r = 0; r < 4; ++r) {
                const std::int64_t row = id % 8 * 4 + r;
                if (page + 1 < indptr[at + 1] || r < last[at]) {
                    const position_t t = slab.position[row];
                    found.push_back(t);
                    exact = exact && std::equal(slab.k + row * 8, slab.k + (row + 1) * 8,
                                                a.k.view().row(sequence / 2, head, t));
                } else {
                    poisoned = poisoned && std::isnan(slab.k[row * 8]);
                }
            }
        }
        std::sort(found.begin(), found.end());
        exact = exact && found == cache.sorted(0, seq, head);
    }
    CHECK(exact);
    CHECK(poisoned);
    CHECK_REFUSED(export_heads(ctx, ref, batch, {indptr.data(), indices.data(), last.data(), 3}),
                  "pages.indices_capacity: 3");
}

TEST_CASE("a sequence whose token found no page does not move on before it has one") {
    const host ctx(1);
    CacheShape shape = small;
    shape.layers = 2;
    shape.max_sequences = 2;
    shape.query_heads = shape.kv_heads = 1;
    // A page for each layer of one sequence.
    test::BoundDual<Gated, float> cache(ctx, shape, {.slab_pages = 2, .max_slabs = 2, .max_seq_len = 100},
                                        gated(1, 5));
    cache.add_slab(ctx);
    test::Tensor<float> x(2, 1, 1, 8), out(2, 1, 1, 8);
    test::Plane<float> scores(2, 1, 1, 1.0f);
    x.fill(42.0f);
    std::fill_n(x.view().row(1, 0, 0), 8, -1.0f);
    const auto step = [&](std::int32_t layer, const Batch& batch, std::uint32_t* status) {
        test::call_ref<Gated, float>(ctx, cache.cache.layer(layer), batch, std::as_const(x).view(),
                                     std::as_const(x).view(), std::as_const(x).view(), out.view(),
                                     {.scores = std::as_const(scores).view()}, true, status);
    };
    std::uint32_t status[2] = {};
    step(0, {.count = 2}, status);
    step(1, {.count = 2}, status);
    const bool first_exhausted = (status[0] & status_pool_exhausted) != 0;
    CHECK((first_exhausted || (status[1] & status_pool_exhausted) != 0));
    const std::vector<unsigned char> before = cache.everything();
    CHECK_REFUSED(
        cache.cache.advance(ctx, {.count = 2}),
        "1 is not allowed; it must be 0 until layer 1 has taken them: it lacks 1 page (add_slab adds more");
    CHECK(cache.everything() == before);
    // With status words nothing is refused: each says why its sequence stays.
    std::uint32_t why[2] = {};
    cache.cache.advance(ctx, {}, {.status = why});
    CHECK((why[0] | why[1]) == status_pool_exhausted);
    CHECK(cache.cache.length(0) + cache.cache.length(1) == ((why[0] & why[1]) != 0 ? 0 : 1));
    cache.add_slab(ctx);
    std::uint32_t again[2] = {};
    for (std::int32_t layer = 0; layer < 2; ++layer) {
        for (std::int32_t seq = 0; seq < 2; ++seq) {
            if (cache.cache.layer(layer).held[seq] == 0) {
                const std::int32_t tokens[2] = {seq == 0 ? 1 : 0, seq};
                step(layer, {.count = 2, .q_len = tokens}, again);
            }
        }
    }
    CHECK((again[0] | again[1]) == 0u);
    cache.cache.advance(ctx, {.count = 2});
    CHECK(cache.cache.length(0) == 1);
    CHECK(cache.cache.length(1) == 1);
}

TEST_CASE("a pool and slabs that cannot be") {
    using Cache = DualCache<Gated, float>;
    const Gated p = gated(1, 4);
    CHECK_REFUSED(Cache(small, {.slab_pages = 0, .max_slabs = 1, .max_seq_len = 9}, p),
                  "slab_pages: 0 is not allowed; it must be 1 or more");
    CHECK_REFUSED(Cache(small, {.slab_pages = 4, .max_slabs = 0, .max_seq_len = 9}, p),
                  "max_slabs: 0 is not allowed; it must be 1 or more");
    CHECK_REFUSED(Cache(small, {.slab_pages = 4, .max_slabs = 1, .max_seq_len = 0}, p),
                  "max_seq_len: 0 is not allowed; it must be 1 to " +
                      std::to_string(std::numeric_limits<std::int32_t>::max() - small.page_size) +
                      ", 2^31 - 1 less a page");
    CHECK_REFUSED(Cache(small, {.slab_pages = 4, .max_slabs = 1, .max_seq_len = position_t{1} << 31}, p),
                  "max_seq_len: 2147483648");
    CHECK_REFUSED(Cache(small, {.slab_pages = 1 << 16, .max_slabs = 1 << 16, .max_seq_len = 9}, p),
                  "slab_pages * max_slabs: 4294967296");
    CHECK_REFUSED(
        Cache(small, {.slab_pages = 4, .max_slabs = 1, .max_seq_len = 9}, gated(2000000000, 2000000000)),
        "sinks + window of layer 0, head 0: 4000000000");
    constexpr std::int32_t most = std::numeric_limits<std::int32_t>::max();
    CacheShape odd = small;
    odd.page_size = most - 9;
    CHECK_REFUSED(Cache(odd, {.slab_pages = most, .max_slabs = 1, .max_seq_len = 9}, p),
                  "bytes of a slab: 2^62 or more is not allowed; it must be less");
    odd = small;
    odd.max_draft_tokens = most;
    odd.max_sequences = 1 << 24;
    CHECK_REFUSED(Cache(odd, {.slab_pages = 4, .max_slabs = 1, .max_seq_len = 9}, p),
                  "bytes of the cache: 2^62 or more is not allowed; it must be less");
    odd = small;
    odd.page_size = 0;
    CHECK_REFUSED(Cache(odd, {.slab_pages = 4, .max_slabs = 1, .max_seq_len = 9}, p), "page_size: 0");
    odd = small;
    odd.max_draft_tokens = -1;
    CHECK_REFUSED(Cache(odd, {.slab_pages = 4, .max_slabs = 1, .max_seq_len = 9}, p), "max_draft_tokens: -1");

    const host ctx(1);
    Cache cache(small, {.slab_pages = 4, .max_slabs = 1, .max_seq_len = 9}, p);
    std::vector<unsigned char> tables(cache.bytes().total(), 0xab), slab(cache.slab_bytes(), 0xab);
    CHECK_REFUSED(cache.add_slab(ctx, slab.data(), slab.size()), "cache: unbound");
    CHECK_REFUSED(cache.reserve(ctx, {.count = 1}), "cache: unbound");
    CHECK_REFUSED(cache.free_pages(), "cache: unbound");
    CHECK_REFUSED(cache.bind(ctx, tables.data(), tables.size() - 1), "buffer_bytes");
    cache.bind(ctx, tables.data(), tables.size());
    CHECK_REFUSED(cache.add_slab(ctx, nullptr, slab.size()),
                  "slab: null is not allowed; it must be memory of slab_bytes()");
    CHECK_REFUSED(cache.add_slab(ctx, slab.data(), slab.size() - 1), "bytes of the slab: ");
    cache.add_slab(ctx, slab.data(), slab.size());
    CHECK_REFUSED(cache.add_slab(ctx, slab.data(), slab.size()),
                  "slabs: 2 is not allowed; it must be at most max_slabs = 1");
    CHECK(std::count(slab.begin(), slab.end(), 0xab) == std::ssize(slab));
    Cache two(small, {.slab_pages = 4, .max_slabs = 2, .max_seq_len = 9}, p);
    std::vector<unsigned char> others(two.bytes().total());
    two.bind(ctx, others.data(), others.size());
    std::vector<unsigned char> both(2 * two.slab_bytes());
    two.add_slab(ctx, both.data(), two.slab_bytes());
    for (const std::size_t at :
         {std::size_t{0}, std::size_t{64}, std::size_t{128}, two.slab_bytes() - 2 * detail::alignment}) {
        CHECK_REFUSED(two.add_slab(ctx, both.data() + at, two.slab_bytes()),
                      "slab: memory of slab 0 is not allowed; it must be memory that no slab has yet");
    }
    two.add_slab(ctx, both.data() + two.slab_bytes(), two.slab_bytes());
    CHECK(cache.attached_pages() == 4);
    CHECK(cache.free_pages() == 4);
    CHECK_REFUSED(cache.clear(ctx, 3), "seq: 3");
    CHECK_REFUSED(cache.reserve(ctx, {.count = 4}), "batch.count: 4");
    cache.bind(ctx, tables.data(), tables.size());
    CHECK(cache.slabs() == 0);
    CHECK(cache.free_pages() == 0);
}

TEST_CASE("the workspace of a cache is that of the layer that needs most") {
    const host ctx(2);
    using P = Policy<Sink<>, Window<>, TopKBudget<>>;
    constexpr std::int32_t budgets[] = {10, 900, 40};
    const P policy{Sink<>{1}, Window<>{4}, TopKBudget<>{per_head(budgets, 3, 1)}};
    const CacheShape shape{.layers = 3,
                           .max_sequences = 2,
                           .query_heads = 2,
                           .kv_heads = 1,
                           .head_dim_qk = 8,
                           .head_dim_vo = 8,
                           .page_size = 4};
    const test::BoundCache<P, float> fixed(ctx, shape, policy);
    const test::BoundDual<P, float> dual(ctx, shape, {.slab_pages = 4, .max_slabs = 1, .max_seq_len = 2000},
                                         policy);
    const auto check = [&](const auto& cache) {
        std::size_t most = 0;
        for (std::int32_t layer = 0; layer < 3; ++layer) {
            most = std::max(most, workspace_bytes(ctx, cache.layer(layer), {.batch = 2, .tokens = 50}));
        }
        CHECK(cache.workspace_bytes(ctx, {.batch = 2, .tokens = 50}) == most);
        CHECK(most > workspace_bytes(ctx, cache.layer(0), {.batch = 2, .tokens = 50}));
    };
    check(fixed.cache);
    check(dual.cache);
}

TEST_CASE("a window longer than any sequence costs what one of that length does") {
    const host ctx(1);
    using P = Policy<Sink<2>, Window<>, TopKBudget<8>>;
    constexpr std::int32_t max_seq_len = 1024;
    const auto cache_of = [&](std::int32_t window) {
        const std::int32_t windows[] = {16, window};  // a head that never evicts beside one that does
        const P policy{{}, Window<>{per_head(windows, 1, 2)}, {}};
        auto bound = std::make_unique<test::BoundDual<P, float>>(
            ctx,
            CacheShape{.max_sequences = 1,
                       .query_heads = 2,
                       .kv_heads = 2,
                       .head_dim_qk = 8,
                       .head_dim_vo = 8,
                       .page_size = 16},
            PoolShape{.slab_pages = 70, .max_slabs = 2, .max_seq_len = max_seq_len}, policy);
        bound->add_slab(ctx);
        return bound;
    };
    const auto least = cache_of(max_seq_len), most = cache_of(1 << 30);
    CHECK(workspace_bytes(ctx, most->cache.layer(0), {.batch = 1, .tokens = 16}) ==
          workspace_bytes(ctx, least->cache.layer(0), {.batch = 1, .tokens = 16}));
    std::mt19937 generator(1);
    for (const std::int32_t n : {1, 16, 700, 1, 200, 16}) {
        test::Tensor<float> q(1, 2, n, 8), k(1, 2, n, 8), v(1, 2, n, 8), a(1, 2, n, 8), b(1, 2, n, 8);
        q.fill_normal(generator);
        k.fill_normal(generator);
        v.fill_normal(generator);
        test::Plane<float> scores(1, 2, n);
        test::fill_scores(scores, test::Scores::random, generator);
        const Batch batch{.count = 1, .length = n};
        for (const auto& [bound, out] : {std::pair{least.get(), &a}, std::pair{most.get(), &b}}) {
            test::call_ref<P, float>(ctx, bound->cache.layer(0), batch, q.view(), k.view(), v.view(),
                                     out->view(), {.scores = scores.view()}, n == 1);
            bound->cache.advance(ctx, batch);
        }
        CHECK(a.data == b.data);
        CHECK(test::content_of(least->cache.layer(0), 0) == test::content_of(most->cache.layer(0), 0));
    }
}
