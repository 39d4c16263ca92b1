// The future-attention target against its definition, in double, pair by pair (KVpop, eq. 2, 3, 13-17).
#include <kvpolicy/attention/future_mass.hpp>

#include "../../support/cases.hpp"
#include "../../support/loops.hpp"
#include "../../support/refusal.hpp"

#include <doctest/doctest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>

using namespace kvpolicy;

namespace {

struct Case {
    std::int32_t length, kv_heads, group, dim, window, look_ahead;
    float beta;
    bool normalize;
    group_aggregate aggregate;
    float logits_soft_cap = 0.0f;
};

double logit(const test::Tensor<double>& q, const test::Tensor<double>& k, std::int32_t hq, std::int32_t hk,
             std::int32_t d, std::int32_t t, const AttentionParams& attention) {
    double sum = 0.0;
    for (std::int32_t i = 0; i < q.dim; ++i) {
        sum += q.view().row(0, hq, d)[i] * k.view().row(0, hk, t)[i];
    }
    const double scale =
        attention.sm_scale != 0.0f ? static_cast<double>(attention.sm_scale) : 1.0 / std::sqrt(q.dim);
    const double cap = static_cast<double>(attention.logits_soft_cap);
    return cap > 0.0 ? cap * std::tanh(scale * sum / cap) : scale * sum;
}

/// By the definition; `lse` [Hq, S] as given to the call under test.
double reference(const Case& c, const test::Tensor<double>& q, const test::Tensor<double>& k,
                 const test::Plane<float>& lse, std::int32_t h, std::int32_t t,
                 const AttentionParams& attention, double epsilon) {
    double best = 0.0, sum = 0.0;
    for (std::int32_t g = 0; g < c.group; ++g) {
        const std::int32_t hq = h * c.group + g;
        double mass = 0.0;
        std::int64_t count = std::max(1, c.length - (t + c.window));
        if (c.look_ahead != unlimited) {
            count = std::min<std::int64_t>(count, std::int64_t{c.look_ahead} + 1);
        }
        for (std::int32_t d = t + c.window;
             d < c.length && (c.look_ahead == unlimited || d <= t + c.window + c.look_ahead); ++d) {
            const double of_query = static_cast<double>(lse.view().head(0, hq)[d]);
            if (std::isinf(of_query)) {
                continue;
            }
            const double p = std::exp(logit(q, k, hq, h, d, t, attention) - of_query);
            mass = std::isinf(c.beta) ? std::max(mass, p) : mass + std::pow(p, static_cast<double>(c.beta));
        }
        if (!std::isinf(c.beta)) {
            if (c.normalize) {
                mass /= static_cast<double>(count);
            }
            mass = std::pow(mass, 1.0 / static_cast<double>(c.beta));
        }
        best = std::max(best, mass);
        sum += mass;
    }
    return std::log(epsilon + (c.aggregate == group_aggregate::max ? best : sum / c.group));
}

template <class T>
void check(const host& ctx, const Case& c, double tolerance, std::mt19937& generator) {
    CAPTURE(c.length);
    CAPTURE(c.window);
    CAPTURE(c.look_ahead);
    CAPTURE(c.beta);
    test::Tensor<T> q(1, c.kv_heads * c.group, c.length, c.dim), k(1, c.kv_heads, c.length, c.dim);
    q.fill_normal(generator, 1.5f);
    k.fill_normal(generator, 1.5f);
    test::Tensor<double> q64(1, q.heads, c.length, c.dim), k64(1, k.heads, c.length, c.dim);
    for (std::size_t i = 0; i < q.data.size(); ++i) {
        q64.data[i] = static_cast<double>(static_cast<compute_t<T>>(q.data[i]));
    }
    for (std::size_t i = 0; i < k.data.size(); ++i) {
        k64.data[i] = static_cast<double>(static_cast<compute_t<T>>(k.data[i]));
    }

    const AttentionParams attention{.logits_soft_cap = c.logits_soft_cap};
    const Sequences sequences{.batch = 1, .length = c.length};
    test::Workspace workspace(future_mass_workspace_bytes<T>(ctx, q.view(), k.view()));
    test::Plane<float> lse(1, q.heads, c.length, -7.0f), target(1, k.heads, c.length, -7.0f);
    const test::Tensor<T>& cq = q;
    const test::Tensor<T>& ck = k;
    causal_lse<T>(ctx, attention, cq.view(), ck.view(), sequences, lse.view(), workspace);
    for (std::int32_t hq = 0; hq < q.heads; ++hq) {
        for (std::int32_t d = 0; d < c.length; ++d) {
            double sum = 0.0;
            for (std::int32_t t = 0; t <= d; ++t) {
                sum += std::exp(logit(q64, k64, hq, hq / c.group, d, t, attention));
            }
            CHECK(std::abs(static_cast<double>(lse.at(0, hq, d)) - std::log(sum)) <= tolerance);
        }
    }
    if (c.length > 3) {
        lse.at(0, 0, c.length - 2) = -std::numeric_limits<float>::infinity();
    }  // sees nothing
    if (c.length > 5) {
        lse.at(0, 0, c.length - 4) -= 3.0f;
    }  // a sparse normalizer: masses above 1

    FutureMassOptions options;
    options.window = c.window;
    options.look_ahead = c.look_ahead;
    options.beta = c.beta;
    options.normalize = c.normalize;
    options.aggregate = c.aggregate;
    const test::Plane<float>& clse = lse;
    future_mass<T>(ctx, attention, cq.view(), ck.view(), clse.view(), sequences, target.view(), workspace,
                   options);
    for (std::int32_t h = 0; h < k.heads; ++h) {
        for (std::int32_t t = 0; t < c.length; t += c.length < 60 ? 1 : test::rounds(1, 3)) {
            const double expected =
                reference(c, q64, k64, lse, h, t, attention, static_cast<double>(options.epsilon));
            // log eps is -18: the target's own fp32 rounding is 2^-20 there.
            CHECK(std::abs(static_cast<double>(target.at(0, h, t)) - expected) <= tolerance + 2e-6);
        }
    }
}

}  // namespace

TEST_CASE("future mass by its definition") {
    const host ctx{2};
    std::mt19937 generator(1);
    const float infinity = std::numeric_limits<float>::infinity();
    // fp32: logits have |x| up to about 20 and 64 terms, so their error is a few times 2^-24 * 20; times
    // beta in exponents.
    for (const std::int32_t length : {0, 1, 2, 5, 23, 24, 25, 63, 64, 65, 200}) {
        for (const float beta : {1.0f, 2.0f, 4.0f, infinity}) {
            check<float>(ctx, {length, 2, 3, 16, 4, unlimited, beta, true, group_aggregate::max}, 5e-5,
                         generator);
        }
        check<float>(ctx, {length, 1, 2, 64, 1, unlimited, 1.0f, false, group_aggregate::mean}, 5e-5,
                     generator);
        check<float>(ctx, {length, 1, 1, 8, 7, 10, 2.0f, true, group_aggregate::mean}, 5e-5, generator);
        check<float>(ctx, {length, 1, 1, 8, 300, 0, 1.0f, true, group_aggregate::max}, 5e-5, generator);
        check<float>(ctx, {length, 1, 5, 8, 3, 0, 1.0f, true, group_aggregate::max, 5.0f}, 5e-5, generator);
        check<bf16>(ctx, {length, 2, 2, 16, 4, unlimited, 2.0f, true, group_aggregate::max}, 5e-5, generator);
        check<double>(ctx, {length, 2, 2, 16, 4, 30, 3.0f, true, group_aggregate::max, 8.0f}, 3e-6,
                      generator);
    }
}

TEST_CASE("future mass refuses what it cannot mean") {
    const host ctx{1};
    test::Tensor<float> q(1, 4, 8, 16), k(1, 2, 8, 16);
    test::Plane<float> lse(1, 4, 8), target(1, 2, 8);
    Sequences sequences{.batch = 1, .length = 8};
    test::Workspace workspace(future_mass_workspace_bytes<float>(ctx, q.view(), k.view()));
    const auto call = [&](const FutureMassOptions& options, workspace_view provided) {
        future_mass<float>(ctx, {}, q.view(), k.view(), lse.view(), sequences, target.view(), provided,
                           options);
    };
    FutureMassOptions options;
    options.beta = 0.5f;
    CHECK_REFUSED(call(options, workspace), "beta: 0.5");
    options = {};
    options.window = 0;
    CHECK_REFUSED(call(options, workspace), "window: 0");
    options = {};
    options.look_ahead = -1;
    CHECK_REFUSED(call(options, workspace), "look_ahead: -1");
    options = {};
    options.epsilon = -1.0f;
    CHECK_REFUSED(call(options, workspace), "epsilon: -1");
    options = {};
    options.layer = std::numeric_limits<std::int32_t>::max();
    CHECK_REFUSED(call(options, workspace), "layer: 2147483647");
    options = {};
    options.epsilon = std::numeric_limits<float>::infinity();
    CHECK_REFUSED(call(options, workspace), "epsilon: inf");
    CHECK_REFUSED(call({}, workspace_view{}), "workspace.bytes: 0");

    // What a call cannot read or write, by name.
    const auto mass = [&](auto&& spoil) {
        rows_view<const float> of_q = std::as_const(q).view(), of_k = std::as_const(k).view();
        plane_view<const float> of_lse = std::as_const(lse).view();
        plane_view<float> of_target = target.view();
        spoil(of_q, of_k, of_lse, of_target);
        future_mass<float>(ctx, {}, of_q, of_k, of_lse, sequences, of_target, workspace);
    };
    const auto sums = [&](auto&& spoil) {
        rows_view<const float> of_q = std::as_const(q).view(), of_k = std::as_const(k).view();
        plane_view<float> of_lse = lse.view();
        spoil(of_q, of_k, of_lse);
        causal_lse<float>(ctx, {}, of_q, of_k, sequences, of_lse, workspace);
    };
    CHECK_REFUSED(mass([](auto& of_q, auto&...) { of_q.data = nullptr; }), "q: null is not allowed");
    CHECK_REFUSED(mass([](auto&, auto& of_k, auto&...) { of_k.data = nullptr; }), "k: null is not allowed");
    CHECK_REFUSED(mass([](auto&, auto&, auto& of_lse, auto&) { of_lse.data = nullptr; }), "lse: null");
    CHECK_REFUSED(mass([](auto&, auto&, auto&, auto& of_target) { of_target.data = nullptr; }),
                  "target: null is not allowed; it must be a pointer to its numbers");
    CHECK_REFUSED(mass([](auto&, auto&, auto& of_lse, auto&) { of_lse.heads = 3; }),
                  "lse: 1 x 3 x 8 is not allowed; it must be 1 x 4 x at least 8");
    CHECK_REFUSED(mass([](auto&, auto&, auto&, auto& of_target) { of_target.batch = 2; }),
                  "target: 2 x 2 x 8 is not allowed; it must be 1 x 2 x at least 8");
    CHECK_REFUSED(sums([](auto& of_q, auto&...) { of_q.data = nullptr; }), "q: null");
    CHECK_REFUSED(sums([](auto&, auto& of_k, auto&) { of_k.data = nullptr; }), "k: null");
    CHECK_REFUSED(sums([](auto&, auto&, auto& of_lse) { of_lse.data = nullptr; }), "lse: null");

    // A target without query heads is the mean of nothing.
    CHECK_REFUSED(mass([](auto& of_q, auto&, auto& of_lse, auto&) { of_q.heads = of_lse.heads = 0; }),
                  "q.heads: 0 is not allowed; it must be 1 or more");
    // A chunk's start would give its queries other positions.
    const std::int32_t start[] = {3};
    sequences.starts = start;
    CHECK_REFUSED(mass([](auto&...) {}), "sequences.starts: given");
    CHECK_REFUSED(sums([](auto&...) {}), "sequences.starts: given");

    // And no workspace is asked for shapes that cannot be.
    const auto bytes = [&](std::int32_t heads, std::int32_t length, std::int32_t dim) {
        const rows_view<const float> of_q{nullptr, 1, heads, length, dim, 0, 0, 0},
            of_k{nullptr, 1, 2, length, dim, 0, 0, 0};
        static_cast<void>(future_mass_workspace_bytes<float>(ctx, of_q, of_k));
    };
    CHECK_REFUSED(bytes(4, -1, 8), "q: 1 x 4 x -1");
    CHECK_REFUSED(bytes(3, 8, 8), "q.heads: 3");
    CHECK_REFUSED(bytes(4, 8, 0), "head_dim: 0");
}

TEST_CASE("a window beyond the sequence leaves no future, however large it is") {
    const host ctx{2};
    std::mt19937 generator(5);
    const std::int32_t lengths[] = {8, 0, 3};
    test::Tensor<float> q(3, 2, 8, 16), k(3, 1, 8, 16);
    q.fill_normal(generator);
    k.fill_normal(generator);
    const Sequences sequences{.batch = 3, .length = 8, .lengths = lengths};
    test::Plane<float> lse(3, 2, 8);
    test::Workspace workspace(future_mass_workspace_bytes<float>(ctx, q.view(), k.view()));
    causal_lse<float>(ctx, {}, std::as_const(q).view(), std::as_const(k).view(), sequences, lse.view(),
                      workspace);
    for (const std::int32_t window : {8, 9, 1 << 30, 2147483640, 2147483647}) {
        for (const std::int32_t look_ahead : {0, 5, 2147483646, unlimited}) {
            test::Plane<float> target(3, 1, 8, -9.0f);
            FutureMassOptions options;
            options.window = window;
            options.look_ahead = look_ahead;
            future_mass<float>(ctx, {}, std::as_const(q).view(), std::as_const(k).view(),
                               std::as_const(lse).view(), sequences, target.view(), workspace, options);
            bool none = true;
            for (std::int32_t b = 0; b < 3; ++b) {
                for (std::int32_t t = 0; t < 8; ++t) {
                    const float wanted = t < lengths[b] ? std::log(options.epsilon) : -9.0f;
                    none = none && std::abs(target.at(b, 0, t) - wanted) < 1e-4f;
                }
            }
            CAPTURE(window);
            CAPTURE(look_ahead);
            CHECK(none);
        }
    }
}
