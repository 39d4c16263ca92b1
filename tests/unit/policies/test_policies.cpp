// Policies as types: composition, numbers at compile time and run time, ranking, and the conversions
// that happen once.
#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/ranking.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/streaming_llm.hpp>

#include "support/refusal.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>

using namespace kvpolicy;

namespace {

constexpr float infinity = std::numeric_limits<float>::infinity();

/// A part of one's own: the window grows with the head.
struct GrowingWindow {
    static constexpr part_kind kind = part_kind::window;
    constexpr void write(HeadParams& head_params, std::int32_t layer, std::int32_t head) const {
        head_params.window = 1 + layer * 10 + head;
    }
};
struct EveryThird {
    static constexpr part_kind kind = part_kind::keep;
    constexpr bool keeps(position_t t) const { return t % 3 == 0; }
};
struct EveryFifth {
    static constexpr part_kind kind = part_kind::keep;
    constexpr bool keeps(position_t t) const { return t % 5 == 0; }
};
struct SlowDecay {
    static constexpr part_kind kind = part_kind::decay;
    constexpr void write(HeadParams& head_params, std::int32_t, std::int32_t) const {
        head_params.decay_step = 100;
    }
};

}  // namespace

TEST_CASE("a policy without a part has the part's neutral number") {
    constexpr HeadParams nothing = Policy<>{}.params(3, 4);
    static_assert(nothing.sinks == 0 && nothing.window == 1 && nothing.budget == 0 &&
                  nothing.decay_step == 1);
    static_assert(nothing.log_gamma == 0.0f && !Policy<>::ranked && !Policy<>::has_keep);
    static_assert(std::is_same_v<Policy<>::scorer_type, GivenScores>);
    constexpr HeadParams open = Policy<Window<4>, ThresholdGate<above>>{}.params(0, 0);
    static_assert(open.budget == unlimited && open.window == 4);
    static_assert(Policy<Window<4>, ThresholdGate<above>, TopKBudget<7>>{}.params(0, 0).budget == 7);
    CHECK(Policy<>{}.gate().open(-infinity, nothing));
    CHECK_FALSE(Policy<>{}.keeps(0));
}

TEST_CASE("parts in any order, at compile time or at run time, by layer and head") {
    static_assert(Policy<TopKBudget<5>, Sink<2>, Decay<3>, Window<9>>{}.params(0, 0).sinks == 2);
    const std::int32_t sinks[] = {1, 2, 3, 4, 5, 6};  // [2 layers, 3 heads]
    const std::int32_t by_head[] = {7, 8, 9};         // one layer for all
    const std::int32_t by_layer[] = {10, 20};         // one head for all
    const Policy<Window<>, TopKBudget<>, Sink<>> policy{Window<>{per_head(by_layer, 2, 1)},
                                                        TopKBudget<>{per_head(by_head, 1, 3)},
                                                        Sink<>{per_head(sinks, 2, 3)}};
    for (std::int32_t layer = 0; layer < 2; ++layer) {
        for (std::int32_t head = 0; head < 3; ++head) {
            const HeadParams head_params = policy.params(layer, head);
            CHECK(head_params.sinks == sinks[layer * 3 + head]);
            CHECK(head_params.window == by_layer[layer]);
            CHECK(head_params.budget == by_head[head]);
        }
    }
    policy.check(2, 3);
    CHECK_REFUSED(policy.check(3, 3), "array of windows: 2 layers x 1 heads is not allowed");
    CHECK_REFUSED(policy.check(2, 4), "layers x 3 heads is not allowed");
    CHECK(Policy<GrowingWindow>{}.params(2, 3).window == 24);
    const Policy<EveryThird, Sink<1>, EveryFifth> keep;
    static_assert(Policy<EveryThird, Sink<1>, EveryFifth>::has_keep);
    for (position_t t = 0; t < 40; ++t) {
        CHECK(keep.keeps(t) == (t % 3 == 0 || t % 5 == 0));
    }
}

TEST_CASE("the query orders keys where a decay's step may be above 1") {
    static_assert(!Policy<TopKBudget<5>>::ranks_by_query);
    static_assert(!Policy<TopKBudget<5>, Decay<1>>::ranks_by_query && !KVpop<>::ranks_by_query);
    static_assert(Policy<TopKBudget<5>, Decay<2>>::ranks_by_query);
    static_assert(Policy<Decay<dynamic>, TopKBudget<5>>::ranks_by_query);
    static_assert(Policy<TopKBudget<5>, SlowDecay>::ranks_by_query);
}

TEST_CASE("the systems are the compositions that they name") {
    static_assert(std::is_same_v<KVpop<4, 256, 3836>,
                                 Policy<Sink<4>, Window<256>, TopKBudget<3836>, Decay<1>, GivenScores>>);
    static_assert(std::is_same_v<StreamingLLM<4, 1020>, Policy<Sink<4>, Window<1020>>>);
    const KVpop<> run_time{Sink<>{4}, Window<>{256}, TopKBudget<>{3836}, Decay<1>{-0.5f}, {}};
    CHECK(run_time.params(5, 6).budget == 3836);
    CHECK(run_time.params(5, 6).log_gamma == -0.5f);
    CHECK(StreamingLLM<>{Sink<>{3}, Window<>{5}}.params(0, 0).window == 5);
}

TEST_CASE("a total budget is sinks + window + k") {
    CHECK(budget_for_total(4096, 4, 256) == 3836);
    CHECK(budget_for_total(260, 4, 256) == 0);
    CHECK(budget_for_total(std::int64_t{unlimited} - 1 + 260, 4, 256) == unlimited - 1);
    CHECK_REFUSED(budget_for_total(259, 4, 256),
                  "total budget: 259 is not allowed; it must be at least sinks + window = 260");
    CHECK_REFUSED(budget_for_total(4, 4, 256), "total budget: 4");
    CHECK_REFUSED(budget_for_total(3, 4, 256), "total budget: 3");
    CHECK_REFUSED(budget_for_total(0, 4, 256), "total budget: 0");
    CHECK_REFUSED(budget_for_total(-1, 0, 1), "total budget: -1");
    CHECK_REFUSED(budget_for_total(std::int64_t{unlimited} + 260, 4, 256),
                  "total budget: 2147483907 is not allowed; it must be below sinks + window + 2^31 - 1 = "
                  "2147483907");
    CHECK_REFUSED(budget_for_total(10, -5, 3), "sinks: -5 is not allowed; it must be 0 or more");
    CHECK_REFUSED(budget_for_total(10, 5, 0), "window: 0 is not allowed; it must be 1 or more");
}

TEST_CASE("a threshold becomes a logit once") {
    CHECK(logit_of(0.5) == 0.0f);
    CHECK(logit_of(0.0) == -infinity);
    CHECK(logit_of(1.0) == infinity);
    for (const double tau : {0.001, 0.1, 0.3, 0.75, 0.999, 1e-30}) {
        CHECK(logit_of(tau) == static_cast<float>(std::log(tau / (1.0 - tau))));
        CHECK(logit_of(tau) == ThresholdGate<above>::probability(tau).threshold.at(3, 4));
    }
    CHECK_REFUSED(logit_of(1.5), "tau: 1.5 is not allowed; it must be a probability in [0, 1]");
    CHECK_REFUSED(logit_of(-0.25), "tau: -0.25");
    CHECK_REFUSED(logit_of(std::nan("")), "tau: ");
    CHECK_REFUSED(ThresholdGate<at_least>::probability(2.0), "tau: 2");
}

TEST_CASE("gates at the edge, by their comparison") {
    HeadParams head_params;
    for (const float tau : {0.0f, -0.0f, 0.5f, -3.0f, infinity, -infinity}) {
        head_params.threshold = tau;
        const ThresholdGate<at_least> at{tau};
        const ThresholdGate<above> over{tau};
        CHECK(at.open(tau, head_params));
        CHECK_FALSE(over.open(tau, head_params));
        CHECK(at.open(infinity, head_params));
        CHECK(over.open(infinity, head_params) == (tau != infinity));
        CHECK(at.open(-infinity, head_params) == (tau == -infinity));
        CHECK_FALSE(over.open(-infinity, head_params));
        CHECK_FALSE(at.open(std::nanf(""), head_params));
        CHECK_FALSE(over.open(std::nanf(""), head_params));
    }
    head_params.threshold = 0.0f;
    CHECK(ThresholdGate<at_least>{}.open(-0.0f, head_params));
    CHECK_FALSE(ThresholdGate<above>{}.open(-0.0f, head_params));
}

TEST_CASE("log gamma from its unconstrained parameter (eq. 21)") {
    CHECK(log_gamma_of(0.0, 0.25, 1.0) == static_cast<float>(std::log(0.25) / 2.0));
    CHECK(log_gamma_of(1e9, 0.25, 1.0) == 0.0f);
    CHECK(log_gamma_of(-1e9, 0.25, 0.5) == static_cast<float>(std::log(0.25)));
    CHECK(log_gamma_of(std::log(3.0), 0.5, 1.0) == doctest::Approx(std::log(0.5) * 0.25));
    CHECK_REFUSED(log_gamma_of(0.0, 0.0, 1.0), "gamma_min: 0 is not allowed; it must be");
    CHECK_REFUSED(log_gamma_of(0.0, 0.5, 1.5), "gamma_max: 1.5 is not allowed; it must be");
    CHECK_REFUSED(log_gamma_of(0.0, 0.9, 0.5), "gamma_max: 0.5");
    CHECK_REFUSED(log_gamma_of(std::nan(""), 0.5, 1.0), "alpha: ");
}

TEST_CASE("ranking: larger first, then older; zeros are equal; NaN is last") {
    const double nan = std::nan("");
    CHECK(ranks_before(2.0, 9, 1.0, 3));
    CHECK_FALSE(ranks_before(1.0, 3, 2.0, 9));
    CHECK(ranks_before(1.0, 3, 1.0, 9));
    CHECK_FALSE(ranks_before(1.0, 9, 1.0, 3));
    CHECK_FALSE(ranks_before(1.0, 3, 1.0, 3));
    CHECK(ranks_before(-0.0, 3, 0.0, 9));
    CHECK(ranks_before(0.0, 3, -0.0, 9));
    CHECK_FALSE(ranks_before(0.0, 9, -0.0, 3));
    CHECK(ranks_before(-std::numeric_limits<double>::infinity(), 9, nan, 3));
    CHECK_FALSE(ranks_before(nan, 3, -std::numeric_limits<double>::infinity(), 9));
    CHECK(ranks_before(nan, 3, nan, 9));
    CHECK_FALSE(ranks_before(nan, 9, nan, 3));
}

TEST_CASE("ranks_before is a strict weak order, NaN included") {
    const double values[] = {-1.0, -0.0, 0.0, 1.0, std::nan(""), std::numeric_limits<double>::infinity()};
    for (const double a : values) {
        for (const double b : values) {
            for (position_t p = 0; p < 3; ++p) {
                for (position_t q = 0; q < 3; ++q) {
                    CHECK_FALSE((ranks_before(a, p, b, q) && ranks_before(b, q, a, p)));
                    if (p != q) {
                        CHECK((ranks_before(a, p, b, q) || ranks_before(b, q, a, p)));
                    }
                    for (const double c : values) {
                        if (ranks_before(a, p, b, q) && ranks_before(b, q, c, 1)) {
                            CHECK(ranks_before(a, p, c, 1));
                        }
                    }
                }
            }
        }
    }
}

TEST_CASE("priorities: exact below 2^29, rebased at its multiples, one rounding beyond") {
    CHECK(priority_base(0) == 0);
    CHECK(priority_base(rebase_limit - 1) == 0);
    CHECK(priority_base(rebase_limit) == rebase_limit);
    CHECK(priority_base(3 * rebase_limit + 5) == 3 * rebase_limit);
    CHECK(priority_base(29, 10) == 20);
    const float slope = -0.1f;
    for (const position_t t : {position_t{0}, position_t{1}, position_t{12345678}, rebase_limit - 1}) {
        // The product has 29 + 24 bits: a long double holds it and the sum.
        const long double exact = 0.75L - static_cast<long double>(t) * static_cast<long double>(slope);
        CHECK(static_priority(0.75f, slope, t) == static_cast<double>(exact));
        CHECK(static_priority(0.75f, slope, t + 7 * rebase_limit, 7 * rebase_limit) ==
              static_priority(0.75f, slope, t));
    }
    const position_t far = (position_t{1} << 40) + 12345;
    CHECK(static_priority(0.75f, slope, far) ==
          std::fma(-static_cast<double>(far), static_cast<double>(slope), 0.75));
    CHECK(static_priority(0.75f, slope, 0, far) ==
          std::fma(static_cast<double>(far), static_cast<double>(slope), 0.75));

    CHECK(effective_score(1.0f, -0.5f, 4, 10, 10) == 1.0);
    CHECK(effective_score(1.0f, -0.5f, 4, 10, 13) == 1.0);
    CHECK(effective_score(1.0f, -0.5f, 4, 10, 14) == 0.5);
    CHECK(effective_score(1.0f, -0.5f, 1, 10, 14) == -1.0);
    HeadParams head_params;
    head_params.log_gamma = -0.5f;
    CHECK(rank_value(head_params, 1.0f, 10, 14) == 6.0);
    CHECK(rank_value(head_params, 1.0f, 10, 14, 8) == 2.0);
    head_params.decay_step = 4;
    CHECK(rank_value(head_params, 1.0f, 10, 14, 8) == 0.5);
}

TEST_CASE("static priorities and effective scores order keys alike") {
    std::uint64_t x = 1;
    const auto next = [&] { return x = x * 6364136223846793005u + 1442695040888963407u, x >> 33; };
    int wrong = 0;
    for (int i = 0; i < 20000; ++i) {
        // Exact in either form: small multiples of powers of two.
        const float slope = -static_cast<float>(next() % 9) / 64.0f;
        const float a = static_cast<float>(next() % 64) / 16.0f, b = static_cast<float>(next() % 64) / 16.0f;
        const auto t = static_cast<position_t>(next() % 100), u = static_cast<position_t>(next() % 100),
                   q = position_t{150};
        const bool by_priority =
            ranks_before(static_priority(a, slope, t), t, static_priority(b, slope, u), u);
        const bool by_score =
            ranks_before(effective_score(a, slope, 1, t, q), t, effective_score(b, slope, 1, u, q), u);
        wrong += by_priority == by_score ? 0 : 1;
    }
    CHECK(wrong == 0);
}
