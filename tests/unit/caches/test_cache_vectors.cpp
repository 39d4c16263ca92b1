// The bounded cache against an independent reference (tests/reference/cache.py, float64): what it holds
// after every step, outputs and log-sum-exps; by steps and by chunks, in every storage type, on every
// instruction set.
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "support/bound_cache.hpp"
#include "support/lifetime_cases.hpp"
#include "support/naive_cache.hpp"

#include <doctest/doctest.h>

#include <bit>

using namespace kvpolicy;
using kvpolicy_test::gate_kind;
using kvpolicy_test::LifetimeCase;
using kvpolicy_test::vectors;

namespace {

constexpr std::int32_t heads = 2, group = 3, dim = 64;

const vectors& file() {
    static const vectors loaded = vectors::load("cache.kvpv");
    return loaded;
}

std::int32_t length() { return static_cast<std::int32_t>(file().get<float>("q").shape[1]); }
std::int32_t case_count() { return static_cast<std::int32_t>(file().get<std::int32_t>("rules").shape[0]); }

LifetimeCase head_params_of(std::int32_t index, std::int32_t head) {
    return LifetimeCase::from(file().get<std::int32_t>("rules").row(index) + head * LifetimeCase::columns,
                              file().get<float>("levels").row(index) + std::int64_t{head} * 2);
}

/// Calls body(policy) with the policy of a case; its arrays live during the call. Keep parts have no bounded
/// cache. What a storage type changes has nothing to do with gates: `All` = false leaves those policies out,
/// and saves compile time.
template <bool All, class Body>
bool with_case(std::int32_t index, Body&& body) {
    std::int32_t sinks[heads], windows[heads], budgets[heads], steps[heads];
    float slopes[heads], thresholds[heads];
    for (std::int32_t h = 0; h < heads; ++h) {
        const LifetimeCase head_params = head_params_of(index, h);
        if (head_params.keep_every != 0) {
            return false;
        }
        sinks[h] = head_params.sinks;
        windows[h] = head_params.window;
        budgets[h] = head_params.budget;
        steps[h] = head_params.decay_step;
        slopes[h] = head_params.log_gamma;
        thresholds[h] = head_params.threshold;
    }
    const LifetimeCase first = head_params_of(index, 0);
    REQUIRE(first.gate == head_params_of(index, 1).gate);
    REQUIRE(first.rebase_limit == head_params_of(index, 1).rebase_limit);
    const Sink<> sink{per_head(sinks, 1, heads)};
    const Window<> window{per_head(windows, 1, heads)};
    const TopKBudget<> budget{per_head(budgets, 1, heads)};
    const Decay<dynamic> decay{per_head(slopes, 1, heads), per_head(steps, 1, heads)};
    const PerHead<float> tau = per_head(thresholds, 1, heads);
    if (first.has_budget && first.gate == gate_kind::none) {
        body(Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>>(sink, window, budget, decay));
        return true;
    }
    if constexpr (All) {
        if (!first.has_budget) {
            body(Policy<Sink<>, Window<>>(sink, window));
        } else if (first.gate == gate_kind::at_least) {
            body(Policy<Sink<>, Window<>, ThresholdGate<at_least>, TopKBudget<>, Decay<dynamic>>(
                sink, window, ThresholdGate<at_least>(tau), budget, decay));
        } else {
            body(Policy<Sink<>, Window<>, ThresholdGate<above>, TopKBudget<>, Decay<dynamic>>(
                sink, window, ThresholdGate<above>(tau), budget, decay));
        }
        return true;
    }
    return false;
}

template <class T>
test::Tensor<T> tensor(const char* name) {
    const auto& from = file().get<float>(name);
    test::Tensor<T> to(1, static_cast<std::int32_t>(from.shape[0]), length(), dim);
    for (std::size_t i = 0; i < to.data.size(); ++i) {
        to.data[i] = static_cast<T>(from.values[i]);
    }
    return to;
}

bool held(std::int32_t index, std::int32_t head, std::int32_t step, std::int32_t t) {
    const std::int32_t words = (length() + 31) / 32;
    const std::int32_t* bits =
        file().get<std::int32_t>("retained").row(index) + (std::int64_t{head} * length() + step) * words;
    return (static_cast<std::uint32_t>(bits[t / 32]) >> (t % 32) & 1u) != 0;
}

double live_keys(std::int32_t index, std::int32_t head, std::int32_t step) {
    const std::int32_t words = (length() + 31) / 32;
    const std::int32_t* bits =
        file().get<std::int32_t>("retained").row(index) + (std::int64_t{head} * length() + step) * words;
    double count = 0.0;
    for (std::int32_t word = 0; word < words; ++word) {
        count += std::popcount(static_cast<std::uint32_t>(bits[word]));
    }
    return count;
}

/// The unit roundoff of what a call computes in, and of what it stores.
template <class T>
constexpr double compute_unit = std::is_same_v<T, double> ? 0x1p-53 : 0x1p-24;
template <class T>
constexpr double storage_unit = std::is_same_v<T, double>  ? 0x1p-53
                                : std::is_same_v<T, float> ? 0x1p-24
                                : std::is_same_v<T, fp16>  ? 0x1p-11
                                                           : 0x1p-8;

/// Every q, k, v is a multiple of 1/32 below 3.03, the scale a power of two: dot products (below 2^20 in
/// units of 2^-10) and logits are exact in fp32. What remains for a weight: one exp (a few units), and with a
/// soft cap the error of tanh times the cap. An output is a mean of n values below 3.03: n additions and the
/// weights' errors. Then it is stored.
template <class T>
double output_tolerance(double keys, double logits_soft_cap, double value) {
    const double weight_error = 2.0 * (8.0 + 4.0 * logits_soft_cap) * compute_unit<T>;
    const double subnormal = std::is_same_v<T, fp16> ? 0x1p-25 : 0.0;
    return 3.03 * (weight_error + (keys + 8.0) * compute_unit<T>)+storage_unit<T> * std::abs(value) +
           subnormal;
}
template <class T>
double lse_tolerance(double keys, double logits_soft_cap, double value) {
    return (8.0 + 4.0 * logits_soft_cap + keys) * compute_unit<T> + 0x1p-24 * (std::abs(value) + 1.0);
}

template <class T>
void check_case(const host& ctx, std::int32_t index, const std::vector<std::int32_t>& sizes, bool steps) {
    CAPTURE(index);
    CAPTURE(steps);
    const test::Tensor<T> q = tensor<T>("q"), k = tensor<T>("k"), v = tensor<T>("v");
    test::Plane<float> scores(1, heads, length());
    const float* given = file().get<float>("scores").row(index);
    std::copy_n(given, scores.data.size(), scores.data.begin());
    const float* numbers = file().get<float>("attention").row(index);
    const AttentionParams attention{numbers[0], numbers[1]};
    const bool bounded = with_case<std::is_same_v<T, float>>(index, [&](const auto& policy) {
        using P = std::decay_t<decltype(policy)>;
        test::BoundCache<P, T> under_test(
            ctx, {.query_heads = heads * group, .kv_heads = heads, .head_dim_qk = dim, .head_dim_vo = dim},
            policy, nullptr, attention, head_params_of(index, 0).rebase_limit);
        test::Tensor<T> out(1, heads * group, length(), dim);
        out.fill(std::numeric_limits<float>::quiet_NaN());
        test::Plane<float> lse(1, heads * group, length(), std::numeric_limits<float>::quiet_NaN());
        bool sets_agree = true;
        std::int32_t at = 0;
        for (const std::int32_t chunk : test::chunks_of(length(), sizes)) {
            const Batch batch{.count = 1, .length = chunk};
            plane_view<float> sums = lse.view();
            sums.data += at;
            sums.length = chunk;
            test::call<P, T>(ctx, under_test, 0, batch, q.tokens(at, chunk), k.tokens(at, chunk),
                             v.tokens(at, chunk), out.tokens(at, chunk),
                             {.scores = scores.tokens(at, chunk), .lse = sums}, steps);
            under_test.cache.advance(ctx, batch);
            at += chunk;
            for (std::int32_t h = 0; h < heads; ++h) {
                std::vector<position_t> wanted;
                for (std::int32_t t = 0; t < at; ++t) {
                    if (held(index, h, at - 1, t)) {
                        wanted.push_back(t);
                    }
                }
                if (under_test.sorted(0, 0, h) != wanted && sets_agree) {
                    CAPTURE(at);
                    CAPTURE(h);
                    CHECK(under_test.sorted(0, 0, h) == wanted);
                    sets_agree = false;
                }
            }
        }
        CHECK(sets_agree);

        const auto& queries = file().get<std::int32_t>("out_queries");
        const double* wanted_out = file().get<double>("out").row(index);
        const double* wanted_lse = file().get<double>("lse").row(index);
        double worst_out = 0.0, worst_lse = 0.0;  // in units of the tolerance
        for (std::int32_t hq = 0; hq < heads * group; ++hq) {
            const auto live = [&](std::int32_t step) { return live_keys(index, hq / group, step); };
            for (std::int64_t i = 0; i < queries.size(); ++i) {
                const double keys = live(queries[i]);
                for (std::int32_t c = 0; c < dim; ++c) {
                    const double wanted = wanted_out[(hq * queries.size() + i) * dim + c];
                    const double got = test::real(out.view().row(0, hq, queries[i])[c]);
                    const double off =
                        std::abs(got - wanted) / output_tolerance<T>(keys, attention.logits_soft_cap, wanted);
                    worst_out = off <= worst_out ? worst_out : off;  // a NaN counts
                    if (off != off) {
                        worst_out = std::numeric_limits<double>::infinity();
                    }
                }
            }
            for (std::int32_t step = 0; step < length(); ++step) {
                const double wanted = wanted_lse[hq * length() + step];
                const double off = std::abs(static_cast<double>(lse.at(0, hq, step)) - wanted) /
                                   lse_tolerance<T>(live(step), attention.logits_soft_cap, wanted);
                worst_lse = std::max(worst_lse, off == off ? off : std::numeric_limits<double>::infinity());
            }
        }
        CHECK(worst_out <= 1.0);
        CHECK(worst_lse <= 1.0);
    });
    if (std::is_same_v<T, float>) {
        CHECK(bounded == (head_params_of(index, 0).keep_every == 0));
    }
}

template <class T>
void check_all(const host& ctx) {
    for (std::int32_t index = 0; index < case_count(); ++index) {
        check_case<T>(ctx, index, {1}, true);
        check_case<T>(ctx, index, {1}, false);
        check_case<T>(ctx, index, {0}, false);
        check_case<T>(ctx, index, {3, 1, 7, 20, 2}, false);
        check_case<T>(ctx, index, {30, 1, 13, 5}, false);
    }
}

}  // namespace

TEST_CASE("float: sets, outputs and sums are the reference's") { check_all<float>(host(1)); }
TEST_CASE("bf16: sets, outputs and sums are the reference's") { check_all<bf16>(host(1)); }
TEST_CASE("fp16: sets, outputs and sums are the reference's") { check_all<fp16>(host(1)); }
TEST_CASE("double: sets, outputs and sums are the reference's") { check_all<double>(host(1)); }
TEST_CASE("the portable bodies on two threads") {
    const host ctx(2, isa::portable);
    check_all<float>(ctx);
    check_all<bf16>(ctx);
    check_all<fp16>(ctx);
}
