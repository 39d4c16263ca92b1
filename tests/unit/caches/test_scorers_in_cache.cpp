// A scorer inside the cache. The scorers here compute small integers from all that they may read, so that a
// call out of order, with a wrong state, key, value or head, changes which keys are held.
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "support/bound_cache.hpp"
#include "support/refusal.hpp"
#include "support/shadow.hpp"

#include <doctest/doctest.h>

#include <utility>

using namespace kvpolicy;

namespace {

constexpr float quiet_nan = std::numeric_limits<float>::quiet_NaN();
constexpr std::int32_t dim = 8, kv_heads = 2, query_heads = 4;
/// A value with this in its second place makes a score of NaN.
constexpr float trap = 42.0f;
/// Where a scorer counts from after reset: not 0, so that memory that happens to be zero does not
/// pass for a reset.
constexpr float fresh = 1000.0f;

/// What happened, in order, for one head: positive q + 1: token q was absorbed; negative -(u + 1):
/// token u was read.
struct Journal {
    std::vector<position_t> events;
};

/// Small integers of everything that a stateful scorer sees. Positions come in the first place of a value.
float mixed(std::int32_t head, std::int32_t factor, float count, float sum, float key, float value) {
    const auto all = static_cast<std::int64_t>(count) * 13 + static_cast<std::int64_t>(sum) * 5 +
                     static_cast<std::int64_t>(key) * 3 + static_cast<std::int64_t>(value) * 11 +
                     std::int64_t{head} * 7;
    return static_cast<float>((all * factor % 23 + 23) % 23);
}

/// State: tokens absorbed, and the sum of their keys' first numbers.
struct CountingScorer {
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::on_leaving;
    std::int32_t factor = 1;
    Journal* journal = nullptr;  // of head 0

    [[nodiscard]] std::size_t state_size() const { return 2; }
    [[nodiscard]] std::size_t scratch_size() const { return 3; }
    void reset(float* state) const {
        state[0] = fresh;
        state[1] = 0.0f;
    }
    void absorb(std::int32_t head, float* state, const float* key, const float* value, float* scratch) const {
        std::fill_n(scratch, 3, -1.0f);
        state[0] += 1.0f;
        state[1] += key[0];
        if (journal != nullptr && head == 0) {
            journal->events.push_back(static_cast<position_t>(value[0]) + 1);
        }
    }
    float read(std::int32_t head, const float* state, const float* key, const float* value,
               float* scratch) const {
        std::fill_n(scratch, 3, -1.0f);
        if (journal != nullptr && head == 0) {
            journal->events.push_back(-(static_cast<position_t>(value[0]) + 1));
        }
        return value[1] == trap ? quiet_nan : mixed(head, factor, state[0], state[1], key[0], value[0]);
    }
};
static_assert(StatefulScorer<CountingScorer>);

/// A stateless scorer of one's own.
struct SumScorer {
    static constexpr part_kind kind = part_kind::scorer;
    static constexpr score_time when = score_time::on_arrival;
    std::int32_t factor = 1;

    [[nodiscard]] std::size_t scratch_size() const { return 5; }
    float score(std::int32_t head, const float* key, const float* value, float* scratch) const {
        for (int i = 0; i < 5; ++i) {
            scratch[i] = key[i];
        }
        return value[1] == trap ? quiet_nan
                                : mixed(head, factor, scratch[1], scratch[2], scratch[0], value[0]);
    }
};
static_assert(StatelessScorer<SumScorer>);

/// Tokens of one sequence. k holds small integers; v holds the position, a second number, and noise.
template <class T>
struct Tokens {
    test::Tensor<T> q, k, v, out;
    explicit Tokens(std::int32_t length, std::uint32_t seed, std::int32_t batch = 1)
        : q(batch, query_heads, length, dim),
          k(batch, kv_heads, length, dim),
          v(batch, kv_heads, length, dim),
          out(batch, query_heads, length, dim) {
        std::mt19937 generator(seed);
        q.fill_normal(generator);
        v.fill_normal(generator);
        for (T& x : k.data) {
            x = static_cast<T>(static_cast<float>(generator() % 5));
        }
        for (std::int32_t b = 0; b < batch; ++b) {
            for (std::int32_t h = 0; h < kv_heads; ++h) {
                for (std::int32_t t = 0; t < length; ++t) {
                    v.view().row(b, h, t)[0] = static_cast<T>(static_cast<float>(t));
                    v.view().row(b, h, t)[1] = static_cast<T>(0.0f);
                }
            }
        }
        out.fill(quiet_nan);
    }
    void set_trap(std::int32_t t, std::int32_t head) { v.view().row(0, head, t)[1] = static_cast<T>(trap); }

    /// The score of token u of a head for either scorer.
    float score(const CountingScorer& scorer, std::int32_t head, position_t u, std::int32_t window,
                std::int32_t b = 0) const {
        float sum = 0.0f;
        for (position_t t = 0; t <= u + window; ++t) {
            sum += static_cast<float>(k.view().row(b, head, t)[0]);
        }
        return mixed(head, scorer.factor, fresh + static_cast<float>(u + window + 1), sum,
                     static_cast<float>(k.view().row(b, head, u)[0]), static_cast<float>(u));
    }
    float score(const SumScorer& scorer, std::int32_t head, position_t u, std::int32_t,
                std::int32_t b = 0) const {
        const T* key = k.view().row(b, head, u);
        return mixed(head, scorer.factor, static_cast<float>(key[1]), static_cast<float>(key[2]),
                     static_cast<float>(key[0]), static_cast<float>(u));
    }
};

template <class S>
using Scored = Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>, S>;
template <class S>
Scored<S> scored(std::int32_t s, std::int32_t w, std::int32_t k, const S& scorer, float log_gamma = 0.0f,
                 std::int32_t n = 1) {
    return Scored<S>{Sink<>{s}, Window<>{w}, TopKBudget<>{k}, Decay<dynamic>{log_gamma, n}, scorer};
}

constexpr CacheShape shape{
    .query_heads = query_heads, .kv_heads = kv_heads, .head_dim_qk = dim, .head_dim_vo = dim};

template <class P, class T>
void feed(const host& ctx, test::BoundCache<P, T>& under_test, Tokens<T>& in, std::int32_t from,
          std::int32_t count, bool steps, std::int32_t layer = 0, bool advance = true) {
    const Batch batch{.count = 1, .length = count};
    test::call<P, T>(ctx, under_test, layer, batch, std::as_const(in.q).tokens(from, count),
                     std::as_const(in.k).tokens(from, count), std::as_const(in.v).tokens(from, count),
                     in.out.tokens(from, count), {}, steps);
    if (advance) {
        under_test.cache.advance(ctx, batch);
    }
}

/// Steps beside the naive cache, then the same in chunks: equal to the last byte of rows, scores and state.
template <class T, class P>
void check_scorer(const P& policy, std::int32_t length) {
    const host ctx(1);
    Tokens<T> in(length, 5);
    const auto scorer = policy.scorer();
    test::BoundCache<P, T> stepped(ctx, shape, policy);
    test::Shadow<P, T> shadow(policy, shape);
    bool sets = true;
    double worst = 0.0;
    for (std::int32_t t = 0; t < length; ++t) {
        feed(ctx, stepped, in, t, 1, true);
        for (std::int32_t h = 0; h < kv_heads; ++h) {
            shadow.head(0, h).append(
                test::real_row(in.k.view().row(0, h, t), dim), test::real_row(in.v.view().row(0, h, t), dim),
                [&](position_t u) { return in.score(scorer, h, u, policy.params(0, h).window); });
        }
        sets = sets && shadow.same_sets(stepped, 0, 0);
        worst = std::max(worst, shadow.off(0, 0, t, in.q.view(), in.out.view()));
    }
    CHECK(sets);
    CHECK(worst <= 8.0);  // keys up to 4 and values up to `length` here
    for (const std::vector<std::int32_t>& sizes :
         {std::vector<std::int32_t>{0}, {1}, {3, 1, 8, 2}, {20, 1, 5}}) {
        test::BoundCache<P, T> chunked(ctx, shape, policy);
        Tokens<T> again(length, 5);
        std::int32_t at = 0;
        for (const std::int32_t chunk : test::chunks_of(length, sizes)) {
            feed(ctx, chunked, again, at, chunk, false);
            at += chunk;
        }
        CHECK(chunked.content(0, 0) == stepped.content(0, 0));
    }
}

}  // namespace

TEST_CASE("a stateful scorer: absorb x_q, then read u from the state that includes x_q") {
    const CountingScorer scorer{3};
    constexpr std::int32_t shapes[][3] = {{0, 1, 1}, {2, 1, 3},  {2, 4, 6}, {0, 7, 5},
                                          {3, 5, 0}, {1, 30, 4}, {2, 3, 60}};
    for (const auto& numbers : shapes) {
        CAPTURE(numbers[0]);
        CAPTURE(numbers[1]);
        CAPTURE(numbers[2]);
        check_scorer<float>(scored(numbers[0], numbers[1], numbers[2], scorer), 50);
    }
    check_scorer<float>(scored(2, 4, 6, scorer, -0.5f), 50);
    check_scorer<bf16>(scored(2, 4, 6, scorer, -0.5f, 3), 50);
    const Policy<Sink<1>, Window<3>, ThresholdGate<above>, TopKBudget<4>, CountingScorer> gated{
        {}, {}, ThresholdGate<above>{6.0f}, {}, scorer};
    check_scorer<float>(gated, 60);
}

TEST_CASE("a stateless scorer of one's own scores the key and value of its token") {
    const SumScorer scorer{5};
    check_scorer<float>(scored(2, 4, 6, scorer), 50);
    check_scorer<float>(scored(0, 1, 3, scorer, -0.25f), 50);
    check_scorer<float>(scored(1, 6, 9, scorer, -0.25f, 3), 50);
}

TEST_CASE("the order of a step: every token is absorbed once, and read once, when it leaves the window") {
    constexpr std::int32_t s = 2, w = 3, length = 12;
    std::vector<position_t> wanted;
    for (position_t q = 0; q < length; ++q) {
        wanted.push_back(q + 1);
        if (q - w >= s) {
            wanted.push_back(-(q - w + 1));
        }
    }
    const host ctx(1);
    for (const std::vector<std::int32_t>& sizes : {std::vector<std::int32_t>{1}, {0}, {5, 1, 4}}) {
        for (const bool steps : {true, false}) {
            if (steps && sizes[0] != 1) {
                continue;
            }
            Journal journal;
            const CountingScorer scorer{1, &journal};
            using P = Scored<CountingScorer>;
            test::BoundCache<P, float> under_test(ctx, shape, scored(s, w, 4, scorer));
            Tokens<float> in(length, 1);
            std::int32_t at = 0;
            for (const std::int32_t chunk : test::chunks_of(length, sizes)) {
                feed(ctx, under_test, in, at, chunk, steps);
                at += chunk;
            }
            CHECK(journal.events == wanted);
        }
    }
}

TEST_CASE(
    "the state stands still between refs, belongs to sequence, layer and head, and starts anew after clear") {
    const host ctx(2);
    using P = Scored<CountingScorer>;
    const CountingScorer scorers[] = {{3}, {7}};  // one a layer
    const P policy = scored(1, 3, 4, CountingScorer{});
    CacheShape two = shape;
    two.layers = 2;
    two.max_sequences = 2;
    test::BoundCache<P, float> under_test(ctx, two, policy, scorers);
    CHECK(under_test.cache.bytes().scorer_state == std::size_t{2} * 2 * kv_heads * 2 * sizeof(float));
    for (std::int32_t seq = 0; seq < 2; ++seq) {
        for (std::int32_t layer = 0; layer < 2; ++layer) {
            for (std::int32_t i = 0; i < kv_heads * 2; i += 2) {
                CHECK(under_test.cache.layer(layer).state[seq * kv_heads * 2 + i] == fresh);
            }
        }
    }
    constexpr std::int32_t length = 30;
    Tokens<float> in(length, 8), other(length, 9);
    for (int life = 0; life < 2; ++life) {
        std::vector<test::Shadow<P, float>> shadows{{policy, two, 0}, {policy, two, 1}};
        bool sets = true;
        for (std::int32_t t = 0; t < length; ++t) {
            for (std::int32_t layer = 0; layer < 2; ++layer) {
                Tokens<float>& mine = layer == 0 ? in : other;
                feed(ctx, under_test, mine, t, 1, t % 2 == 0, layer, layer == 1);
                for (std::int32_t h = 0; h < kv_heads; ++h) {
                    shadows[static_cast<std::size_t>(layer)].head(0, h).append(
                        test::real_row(mine.k.view().row(0, h, t), dim),
                        test::real_row(mine.v.view().row(0, h, t), dim),
                        [&](position_t u) { return mine.score(scorers[layer], h, u, 3); });
                }
            }
            for (std::int32_t layer = 0; layer < 2; ++layer) {
                sets = sets && shadows[static_cast<std::size_t>(layer)].same_sets(under_test, layer, 0);
            }
        }
        CHECK(sets);
        // Sequence 1 has seen nothing.
        CHECK(under_test.cache.layer(1).state[std::int64_t{kv_heads} * 2] == fresh);
        CHECK(under_test.cache.length(1) == 0);
        CHECK(under_test.cache.layer(0).state[0] == fresh + static_cast<float>(length));
        under_test.cache.clear(ctx, 0);
        CHECK(under_test.cache.layer(0).state[0] == fresh);
        CHECK(under_test.cache.layer(1).state[2] == fresh);
    }
}

TEST_CASE("sequences of a batch have states of their own, whoever takes part in a call") {
    using Q = Scored<CountingScorer>;
    constexpr std::int32_t max_sequences = 3, length = 60;
    const host ctx(2);
    const Q head_params = scored(1, 3, 4, CountingScorer{3});
    CacheShape many = shape;
    many.max_sequences = max_sequences;
    test::BoundCache<Q, float> batched(ctx, many, head_params);
    Tokens<float> all(
        length, 12,
        max_sequences);  // sequence b belongs to sequence b, which takes from it at its own pace
    std::int32_t at[max_sequences] = {0, 0, 0};
    std::mt19937 generator(3);
    bool sets = true;
    test::Shadow<Q, float> shadow(head_params, many);
    while (*std::min_element(at, at + max_sequences) < length) {
        std::int32_t named[max_sequences] = {0, 1, 2}, q_len[max_sequences];
        std::shuffle(named, named + max_sequences, generator);
        const auto count = static_cast<std::int32_t>(1 + generator() % max_sequences);
        const bool steps = generator() % 2 == 0;
        for (std::int32_t i = 0; i < count; ++i) {
            const auto wish = static_cast<std::int32_t>(generator() % (steps ? 2 : 6));
            q_len[i] = std::min(wish, length - at[named[i]]);
        }
        Tokens<float> call(5, 1, count);
        for (std::int32_t i = 0; i < count; ++i) {
            const std::int32_t seq = named[i];
            for (std::int32_t j = 0; j < q_len[i]; ++j) {
                for (std::int32_t h = 0; h < kv_heads; ++h) {
                    std::copy_n(all.k.view().row(seq, h, at[seq] + j), dim, call.k.view().row(i, h, j));
                    std::copy_n(all.v.view().row(seq, h, at[seq] + j), dim, call.v.view().row(i, h, j));
                }
            }
        }
        const Batch batch{.count = count, .seq_ids = named, .q_len = q_len, .length = 5};
        test::call<Q, float>(ctx, batched, 0, batch, std::as_const(call.q).view(),
                             std::as_const(call.k).view(), std::as_const(call.v).view(), call.out.view(), {},
                             steps);
        batched.cache.advance(ctx, batch);
        for (std::int32_t i = 0; i < count; ++i) {
            const std::int32_t seq = named[i];
            for (std::int32_t j = 0; j < q_len[i]; ++j, ++at[seq]) {
                for (std::int32_t h = 0; h < kv_heads; ++h) {
                    shadow.head(seq, h).append(
                        test::real_row(all.k.view().row(seq, h, at[seq]), dim),
                        test::real_row(all.v.view().row(seq, h, at[seq]), dim),
                        [&](position_t u) { return all.score(head_params.scorer(), h, u, 3, seq); });
                }
            }
        }
        for (std::int32_t seq = 0; seq < max_sequences; ++seq) {
            sets = sets && shadow.same_sets(batched, 0, seq);
        }
    }
    CHECK(sets);
}

namespace {

/// A call that is refused writes nothing, and the cache goes on as if it had not been made.
template <class S>
void check_refused_calls(const S& scorer, std::int32_t trapped_head, const char* text) {
    const host ctx(1);
    using P = Scored<S>;
    constexpr std::int32_t s = 1, w = 3, length = 24;
    const P policy = scored(s, w, 4, scorer);
    // On arrival: when the token comes. On leaving: w steps later.
    const std::int32_t late = S::when == score_time::on_leaving ? w : 0;
    for (const std::int32_t trapped : {1, 6, 13}) {
        for (const bool steps : {true, false}) {
            CAPTURE(trapped);
            CAPTURE(steps);
            test::BoundCache<P, float> under_test(ctx, shape, policy), untroubled(ctx, shape, policy);
            Tokens<float> bad(length, 3), good(length, 3);
            bad.set_trap(trapped, trapped_head);
            // The token that brings the trouble, alone or amid a chunk of 5.
            const std::int32_t trouble = trapped + late;
            const std::int32_t from = steps ? trouble : std::max(0, trouble - 2);
            const std::int32_t count = steps ? 1 : 5;
            for (std::int32_t t = 0; t < from; ++t) {
                // What was fed before must be the same in both, so the trap is put in only later,
                // into the cached row.
                feed(ctx, under_test, good, t, 1, true);
                feed(ctx, untroubled, good, t, 1, true);
            }
            const auto ref = under_test.cache.layer(0);
            float* cached = nullptr;
            if (trapped < from) {
                for (std::int64_t r = ref.first_row(0, trapped_head); r < ref.row_offset[trapped_head + 1];
                     ++r) {
                    if (ref.position[r] == trapped) {
                        cached = ref.v + r * dim + 1;
                    }
                }
                REQUIRE(cached != nullptr);
                *cached = trap;
            }
            const std::vector<unsigned char> before = under_test.memory;
            const std::vector<float> out_before = bad.out.data;
            CHECK_REFUSED(feed(ctx, under_test, bad, from, count, steps), text);
            CHECK_REFUSED(feed(ctx, under_test, bad, from, count, steps),
                          "position " + std::to_string(trapped) + ": NaN");
            CHECK(under_test.memory == before);
            CHECK(std::memcmp(out_before.data(), bad.out.data.data(), out_before.size() * sizeof(float)) ==
                  0);
            if (cached != nullptr) {
                *cached = 0.0f;
            }
            for (std::int32_t t = from; t < length; ++t) {
                feed(ctx, under_test, good, t, 1, true);
                feed(ctx, untroubled, good, t, 1, true);
            }
            CHECK(under_test.content(0, 0) == untroubled.content(0, 0));
        }
    }
}

}  // namespace

TEST_CASE("a computed score that is NaN refuses the call and leaves the cache as it was") {
    check_refused_calls(CountingScorer{3}, 0, "score of entry 0, head 0, position");
    check_refused_calls(CountingScorer{3}, 1, "score of entry 0, head 1, position");
    check_refused_calls(SumScorer{3}, 1, "score of entry 0, head 1, position");
}

TEST_CASE("what is never scored may be anything: sinks, and keys that are still in the window") {
    const host ctx(1);
    using P = Scored<SumScorer>;
    test::BoundCache<P, float> immediate(ctx, shape, scored(2, 3, 4, SumScorer{3}));
    Tokens<float> in(4, 3);
    in.set_trap(0, 0);
    in.set_trap(1, 1);
    feed(ctx, immediate, in, 0, 1, true);
    feed(ctx, immediate, in, 1, 3, false);
    CHECK(immediate.cache.length(0) == 4);
    using Q = Scored<CountingScorer>;
    test::BoundCache<Q, float> leaving(ctx, shape, scored(2, 3, 4, CountingScorer{3}));
    Tokens<float> window(5, 3);
    for (std::int32_t t = 0; t < 5; ++t) {
        window.set_trap(t, 0);
    }
    feed(ctx, leaving, window, 0, 2, false);
    feed(ctx, leaving, window, 2, 1, true);
    feed(ctx, leaving, window, 3, 2, false);
    CHECK(leaving.cache.length(0) == 5);
}

namespace {

/// Scores that say which instruction set they were asked to use.
struct SetScorer : SumScorer {
    float score(std::int32_t, const float*, const float*, float*, isa set = detected_isa()) const {
        return set == isa::portable ? 1.0f : 2.0f;
    }
};
struct BlockSetScorer : SetScorer {
    [[nodiscard]] std::size_t block_scratch_size() const { return 0; }
    void score_block(std::int32_t, std::int32_t count, const float*, const float*, float* scores, float*,
                     isa set) const {
        std::fill_n(scores, count, set == isa::portable ? 1.0f : 2.0f);
    }
};
static_assert(BlockScorer<BlockSetScorer>);
struct StatefulSetScorer : CountingScorer {
    void absorb(std::int32_t, float* state, const float*, const float*, float*,
                isa set = detected_isa()) const {
        state[1] = set == isa::portable ? 1.0f : 2.0f;
    }
    float read(std::int32_t, const float* state, const float*, const float*, float*,
               isa set = detected_isa()) const {
        return 10.0f * state[1] + (set == isa::portable ? 1.0f : 2.0f);
    }
};

/// The score of the one long-range key that is held, after steps or a chunk.
template <class S>
void check_set(isa set, float wanted) {
    using P = Scored<S>;
    for (const bool steps : {true, false}) {
        const host ctx(1, set);
        test::BoundCache<P, float> under_test(ctx, shape, scored(0, 2, 1, S{}));
        Tokens<float> in(5, 3);
        for (std::int32_t t = 0; t < 5; t += steps ? 1 : 5) {
            feed(ctx, under_test, in, t, steps ? 1 : 5, steps);
        }
        const auto ref = under_test.cache.layer(0);
        CHECK(ref.used(0, 0) == 3);
        CHECK(ref.head_rows(0, 0).score(2) == wanted);
    }
}

}  // namespace

TEST_CASE("a scorer gets the context's instruction set, not the machine's") {
    for (const isa set : {isa::portable, detected_isa()}) {
        const float one = set == isa::portable ? 1.0f : 2.0f;
        check_set<SetScorer>(set, one);
        check_set<BlockSetScorer>(set, one);
        check_set<StatefulSetScorer>(set, 11.0f * one);
    }
}

TEST_CASE("a given score that is NaN refuses the call, names its place and leaves the cache as it was") {
    const host ctx(1);
    using P = Policy<Sink<1>, Window<3>, TopKBudget<4>>;
    CacheShape two = shape;
    two.max_sequences = 2;
    test::BoundCache<P, float> under_test(ctx, two);
    Tokens<float> in(6, 4, 2);
    test::Plane<float> scores(2, kv_heads, 6, 1.0f);
    const Batch chunk{.count = 2, .length = 6}, token{.count = 2, .length = 1};
    const auto run = [&](const Batch& batch, bool steps) {
        test::call<P, float>(ctx, under_test, 0, batch, std::as_const(in.q).view(),
                             std::as_const(in.k).view(), std::as_const(in.v).view(), in.out.view(),
                             {.scores = scores.view()}, steps);
    };
    run(chunk, false);
    under_test.cache.advance(ctx, chunk);
    in.out.fill(-55.0f);
    const std::vector<unsigned char> before = under_test.memory;
    scores.at(1, 1, 0) = quiet_nan;
    CHECK_REFUSED(run(token, true), "io.scores[1][1][0]: NaN is not allowed; it must be a number");
    CHECK_REFUSED(run(chunk, false), "io.scores[1][1][0]: NaN");
    scores.at(1, 1, 0) = 0.0f;
    scores.at(0, 1, 5) = quiet_nan;
    CHECK_REFUSED(run(chunk, false), "io.scores[0][1][5]: NaN");
    CHECK(under_test.memory == before);
    CHECK(std::all_of(in.out.data.begin(), in.out.data.end(), [](float x) { return x == -55.0f; }));
    // Beyond an entry's tokens it is not read.
    const std::int32_t q_len[] = {5, 0};
    scores.at(1, 0, 0) = quiet_nan;
    run({.count = 2, .q_len = q_len, .length = 6}, false);
    CHECK(std::isfinite(in.out.view().row(0, 0, 4)[0]));
}

#if KVPOLICY_EXCEPTIONS
namespace {

/// Fails on one token.
struct ThrowingScorer : CountingScorer {
    float read(std::int32_t head, const float* state, const float* key, const float* value,
               float* scratch) const {
        if (head == 1 && value[1] == trap) {
            throw float{trap};
        }
        return CountingScorer::read(head, state, key, value, scratch);
    }
};

}  // namespace

TEST_CASE("a scorer that throws leaves the cache as it was") {
    using Q = Scored<ThrowingScorer>;
    for (const int threads : {1, 3}) {
        const host ctx(threads);
        test::BoundCache<Q, float> under_test(ctx, shape, scored(1, 3, 4, ThrowingScorer{{3}}));
        Tokens<float> in(12, 3);
        in.set_trap(7, 1);
        feed(ctx, under_test, in, 0, 10, false);
        const std::vector<unsigned char> before = under_test.memory;
        CHECK_THROWS_AS(feed(ctx, under_test, in, 10, 1, true), float);
        CHECK_THROWS_AS(feed(ctx, under_test, in, 10, 2, false), float);
        CHECK(under_test.memory == before);
        CHECK(under_test.cache.length(0) == 10);
    }
}
#endif
