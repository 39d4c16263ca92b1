// The boundary loss against its definition, query by query, and its gradients against differences.
#include <kvpolicy/losses/boundary.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../../support/cases.hpp"
#include "../../support/differences.hpp"
#include "../../support/loss_value.hpp"
#include "../../support/normal.hpp"
#include "../../support/refusal.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <utility>
#include <vector>

using namespace kvpolicy;

namespace {

using Any = Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>>;

struct Case {
    std::int32_t batch = 2, heads = 2, length = 60;
    std::vector<std::int32_t> sinks{2, 0}, windows{5, 3}, budgets{7, 4}, steps{1, 1};
    std::vector<float> log_gamma{-0.0078125f, -0.03125f};
    std::vector<std::int32_t> lengths, edges;
    BoundaryLoss loss{};

    [[nodiscard]] Any policy() const {
        return Any{Sink<>{per_head(sinks.data(), 1, heads)}, Window<>{per_head(windows.data(), 1, heads)},
                   TopKBudget<>{per_head(budgets.data(), 1, heads)},
                   Decay<dynamic>{per_head(log_gamma.data(), 1, heads), per_head(steps.data(), 1, heads)}};
    }
    [[nodiscard]] Sequences sequences() const {
        Sequences all{.batch = batch, .length = length};
        if (!lengths.empty()) {
            all.lengths = lengths.data();
        }
        if (!edges.empty()) {
            all.cu_seqlens = edges.data();
            all.segments = static_cast<std::int32_t>(edges.size()) - 1;
        }
        return all;
    }
};

template <class Real>
struct Run {
    BoundaryValue value;
    test::Plane<Real> d_scores;
    std::vector<double> d_log_gamma;
};

template <class Real>
Run<Real> run(const host& on, const Case& c, const test::Plane<Real>& scores,
              const test::Plane<float>& target, const BoundaryOptions& options = {}) {
    Run<Real> out{{},
                  test::Plane<Real>(c.batch, c.heads, c.length, Real(-77)),
                  std::vector<double>(static_cast<std::size_t>(c.heads), 0.0)};
    const Any policy = c.policy();
    test::Workspace workspace(c.loss.workspace_bytes(on, policy, c.sequences(), c.heads));
    out.value = test::value_of<BoundaryValue>([&](auto* into) {
        c.loss(on, policy, scores.view(), target.view(), c.sequences(), out.d_scores.view(),
               out.d_log_gamma.data(), into, workspace, options);
    });
    return out;
}

/// Everything by the definition, for all valid positions.
Run<double> reference(const Case& c, const test::Plane<double>& scores, const test::Plane<float>& target) {
    struct example {
        std::int32_t b, h, fresh, old;
        double y, margin, delta, age;
    };
    std::vector<example> examples;
    const Any policy = c.policy();
    for (std::int32_t b = 0; b < c.batch; ++b) {
        for (std::int32_t h = 0; h < c.heads; ++h) {
            const HeadParams head_params = policy.params(0, h);
            const double gamma = static_cast<double>(head_params.log_gamma);
            const std::int32_t length = c.sequences().length_of(b);
            std::vector<std::int32_t> edges =
                c.edges.empty() ? std::vector<std::int32_t>{0, length} : c.edges;
            for (std::size_t part = 0; part + 1 < edges.size(); ++part) {
                const std::int32_t begin = edges[part], end = std::min(edges[part + 1], length);
                std::vector<std::int32_t> held;
                for (std::int32_t q = begin + head_params.sinks + head_params.window; q < end; ++q) {
                    const std::int32_t fresh = q - head_params.window;
                    const auto effective = [&](const auto& plane, std::int32_t t) {
                        const std::int32_t periods = (q - t) / head_params.decay_step;
                        return static_cast<double>(plane.view().head(b, h)[t]) +
                               static_cast<double>(periods) * gamma;
                    };
                    if (head_params.decay_step == 1) {  // from scratch
                        held.clear();
                        for (std::int32_t t = begin + head_params.sinks; t <= fresh; ++t) {
                            held.push_back(t);
                        }
                    } else {
                        held.push_back(fresh);
                    }
                    std::stable_sort(held.begin(), held.end(), [&](std::int32_t x, std::int32_t y) {
                        const double ex = effective(target, x), ey = effective(target, y);
                        return ex > ey || (ex == ey && x < y);
                    });
                    if (static_cast<std::int32_t>(held.size()) > head_params.budget) {
                        held.resize(static_cast<std::size_t>(head_params.budget));
                    }
                    if (q - begin < head_params.sinks + head_params.window + head_params.budget ||
                        held.empty()) {
                        continue;
                    }
                    const std::int32_t old = held.back();
                    if (old == fresh) {
                        continue;
                    }
                    const double y = std::find(held.begin(), held.end(), fresh) != held.end() ? 1.0 : -1.0;
                    const std::int32_t age =
                        (q - fresh) / head_params.decay_step - (q - old) / head_params.decay_step;
                    examples.push_back(
                        {b, h, fresh, old, y, y * (effective(target, fresh) - effective(target, old)),
                         effective(scores, fresh) - effective(scores, old), static_cast<double>(age)});
                }
            }
        }
    }
    Run<double> out{{},
                    test::Plane<double>(c.batch, c.heads, c.length),
                    std::vector<double>(static_cast<std::size_t>(c.heads), 0.0)};
    out.value.count = static_cast<std::int64_t>(examples.size());
    for (std::int32_t h = 0; h < c.heads; ++h) {
        double keeps = 0.0, all = 0.0;
        for (const example& e : examples) {
            if (e.h != h) {
                continue;
            }
            all += 1.0;
            keeps += e.y > 0.0 ? 1.0 : 0.0;
        }
        const double rho = keeps / all;
        const auto balance = [&](double y) {
            if (!c.loss.balance.enabled || keeps == 0.0 || keeps == all) {
                return 1.0;
            }
            return std::clamp(1.0 / (2.0 * (y > 0.0 ? rho : 1.0 - rho)),
                              static_cast<double>(c.loss.balance.least),
                              static_cast<double>(c.loss.balance.most));
        };
        double mean = 0.0;
        for (const example& e : examples) {
            mean += e.h == h ? balance(e.y) / all : 0.0;
        }
        for (const example& e : examples) {
            if (e.h != h) {
                continue;
            }
            CHECK(e.margin >= 0.0);
            const double omega_min = static_cast<double>(c.loss.margin.omega_min);
            const double omega =
                (omega_min +
                 (1.0 - omega_min) /
                     (1.0 + std::exp(-e.margin / static_cast<double>(c.loss.margin.temperature)))) *
                balance(e.y) / mean * static_cast<double>(c.loss.scale) /
                static_cast<double>(examples.size());
            const double tau = static_cast<double>(c.loss.temperature);
            out.value.value += omega * std::log(1.0 + std::exp(-e.y * e.delta / tau));
            const double d = -omega * e.y / tau / (1.0 + std::exp(e.y * e.delta / tau));
            out.d_scores.at(e.b, e.h, e.fresh) += d;
            out.d_scores.at(e.b, e.h, e.old) -= d;
            out.d_log_gamma[static_cast<std::size_t>(h)] += d * e.age;
        }
    }
    return out;
}

struct Inputs {
    test::Plane<double> scores;
    test::Plane<float> target, scores32;
    explicit Inputs(const Case& c, unsigned seed)
        : scores(c.batch, c.heads, c.length),
          target(c.batch, c.heads, c.length),
          scores32(c.batch, c.heads, c.length) {
        std::mt19937 generator(seed);
        test::Normal<float> normal;
        for (float& x : target.data) {
            x = normal(generator);
        }
        for (std::size_t i = 0; i < scores.data.size(); ++i) {
            scores32.data[i] = normal(generator);
            scores.data[i] = static_cast<double>(scores32.data[i]);
        }
    }
};

std::vector<Case> cases() {
    std::vector<Case> all(7);
    all[1].loss.temperature = 0.25f;
    all[1].loss.margin = {0.5f, 2.0f};
    all[1].loss.scale = 0.125f;
    all[2].steps = {4, 3};
    all[3].lengths = {60, 31};
    all[3].budgets = {40, 1};
    all[4].edges = {0, 25, 30, 60};
    all[5].loss.balance.enabled = false;
    all[5].loss.margin.omega_min = 1.0f;
    all[6].loss.balance = {true, 0.9f, 1.1f};
    return all;
}

double largest(const std::vector<double>& values) {
    double most = 0.0;
    for (const double x : values) {
        most = std::max(most, std::abs(x));
    }
    return most;
}

}  // namespace

TEST_CASE("boundary loss by its definition, value and gradients") {
    const host on{2};
    unsigned seed = 1;
    for (const Case& c : cases()) {
        CAPTURE(seed);
        const Inputs in(c, seed++);
        const Run<double> expected = reference(c, in.scores, in.target);
        const Run<double> got = run<double>(on, c, in.scores, in.target);
        REQUIRE(got.value.count == expected.value.count);
        CHECK(got.value.count > 0);
        CHECK(test::relative(got.value.value, expected.value.value, expected.value.value) < 1e-12);
        const double scale = largest(expected.d_scores.data);
        for (std::int32_t b = 0; b < c.batch; ++b) {
            for (std::int32_t h = 0; h < c.heads; ++h) {
                for (std::int32_t t = 0; t < c.sequences().length_of(b); ++t) {
                    const double x = got.d_scores.view().head(b, h)[t],
                                 y = expected.d_scores.view().head(b, h)[t];
                    CHECK(test::relative(x, y, scale) < 1e-12);
                }
                for (std::int32_t t = c.sequences().length_of(b); t < c.length; ++t) {
                    CHECK(got.d_scores.view().head(b, h)[t] == -77.0);  // beyond the sequence
                }
            }
        }
        for (std::size_t h = 0; h < got.d_log_gamma.size(); ++h) {
            CHECK(test::relative(got.d_log_gamma[h], expected.d_log_gamma[h], largest(expected.d_log_gamma)) <
                  1e-12);
        }
        // fp32 scores: sums run in double, so only the result is rounded.
        const Run<float> single = run<float>(on, c, in.scores32, in.target);
        CHECK(test::relative(single.value.value, expected.value.value, expected.value.value) < 1e-12);
        CHECK(test::relative(static_cast<double>(single.d_scores.data[10]), got.d_scores.data[10], scale) <
              1e-7);
    }
}

TEST_CASE("boundary loss: gradients by differences") {
    const host on{1};
    unsigned seed = 30;
    for (Case c : cases()) {
        CAPTURE(seed);
        Inputs in(c, seed++);
        const Run<double> got = run<double>(on, c, in.scores, in.target);
        const double scale = largest(got.d_scores.data);
        for (std::size_t i = 0; i < in.scores.data.size(); i += 7) {
            if (got.d_scores.data[i] == -77.0) {
                continue;
            }
            const double d = test::difference(
                in.scores.data[i], 1e-3, [&](double x) { in.scores.data[i] = x; },
                [&] { return run<double>(on, c, in.scores, in.target).value.value; });
            CHECK(test::relative(got.d_scores.data[i], d, scale) < 1e-6);
        }
        // The teacher is detached, so its weights must not move with gamma: margin weights off.
        c.loss.margin.omega_min = 1.0f;
        const Run<double> still = run<double>(on, c, in.scores, in.target);
        for (std::size_t h = 0; h < c.log_gamma.size(); ++h) {
            // Steps that floats hold exactly, small enough to leave every label alone.
            const double d = test::difference(
                static_cast<double>(c.log_gamma[h]), 0x1p-18,
                [&](double x) { c.log_gamma[h] = static_cast<float>(x); },
                [&] { return run<double>(on, c, in.scores, in.target).value.value; });
            CHECK(test::relative(still.d_log_gamma[h], d, largest(still.d_log_gamma)) < 1e-6);
        }
    }
    for (const double alpha : {-3.0, 0.0, 0.7, 40.0}) {
        const double low = std::log(0.999), high = std::log(0.999999);
        const double s = 1.0 / (1.0 + std::exp(-alpha));
        CHECK(log_gamma_slope(alpha, 0.999, 0.999999) ==
              doctest::Approx(s * (1.0 - s) * (high - low)).epsilon(1e-12));
    }
}

TEST_CASE("boundary loss samples positions by seed") {
    const host on{2};
    Case c;
    c.length = 600;
    Inputs in(c, 5);
    c.loss.sampler = {200, 0.5f, 9};
    const Run<double> a = run<double>(on, c, in.scores, in.target),
                      b = run<double>(host{1}, c, in.scores, in.target);
    CHECK(a.value.sampled == 4 * 200);
    CHECK(a.value.count > 0);
    CHECK(a.value.count <= a.value.sampled);
    CHECK(a.value.value == b.value.value);
    CHECK(a.d_scores.data == b.d_scores.data);
    c.loss.sampler.seed = 10;
    CHECK(run<double>(on, c, in.scores, in.target).value.value != a.value.value);
    // All late: the mean of the later of two uniform places is 2/3 of the way.
    std::vector<std::int32_t> drawn(60000);
    HeadParams head_params;
    head_params.sinks = 4, head_params.window = 8, head_params.budget = 88;
    const Sequences one{.batch = 1, .length = 60000};
    for (const float late : {0.0f, 1.0f}) {
        CHECK(host_backend::draw_positions<Any>({4000, late, 1}, head_params, one, 0, 0, drawn.data()) ==
              4000);
        double mean = 0.0;
        for (std::size_t q = 0; q < drawn.size(); ++q) {
            mean += static_cast<double>(drawn[q]) * static_cast<double>(q);
        }
        mean = (mean / 4000.0 - 100.0) / 59900.0;
        CHECK(std::abs(mean - (late > 0.0f ? 2.0 / 3.0 : 0.5)) < 0.02);  // standard error below 0.005
        CHECK(std::count_if(drawn.begin(), drawn.begin() + 100, [](std::int32_t n) { return n != 0; }) == 0);
    }
}

TEST_CASE("boundary loss without examples, with equal labels, without budget") {
    const host on{1};
    for (const std::int32_t length : {0, 1, 8, 14}) {  // s + w + k = 14
        Case c;
        c.heads = 1;
        c.length = length;
        Inputs in(c, 1);
        const Run<double> got = run<double>(on, c, in.scores, in.target);
        CHECK(got.value.value == 0.0);
        CHECK(got.value.count == 0);
        CHECK(got.value.sampled == 0);
        CHECK(std::all_of(got.d_scores.data.begin(), got.d_scores.data.end(),
                          [](double x) { return x == 0.0; }));
    }
    Case c;
    c.log_gamma = {0.0f, 0.0f};
    for (const bool falling : {true, false}) {
        Inputs in(c, 2);
        for (std::int32_t t = 0; t < c.length; ++t) {
            for (std::int32_t i = 0; i < 4; ++i) {
                in.target.at(i / 2, i % 2, t) = falling ? -1.0f * static_cast<float>(t) : 2.0f;
            }
        }
        const Run<double> got = run<double>(on, c, in.scores, in.target),
                          expected = reference(c, in.scores, in.target);
        CHECK(got.value.kept == 0);
        CHECK(got.value.count == got.value.sampled);  // nobody new is kept: every label is a drop
        CHECK(std::abs(got.value.value - expected.value.value) < 1e-12);
        CHECK(std::isfinite(got.value.value));
    }
    {  // Rising targets: the candidate always enters, above the boundary by far.
        Inputs in(c, 3);
        for (std::int32_t t = 0; t < c.length; ++t) {
            for (std::int32_t i = 0; i < 4; ++i) {
                in.target.at(i / 2, i % 2, t) = static_cast<float>(t);
            }
        }
        const Run<double> got = run<double>(on, c, in.scores, in.target),
                          expected = reference(c, in.scores, in.target);
        CHECK(got.value.kept == got.value.count);
        CHECK(std::abs(got.value.value - expected.value.value) < 1e-12);
    }
    for (const std::int32_t budget : {0, unlimited}) {
        Case other;
        other.budgets = {budget, budget};
        Inputs in(other, 4);
        CHECK(run<double>(on, other, in.scores, in.target).value.count == 0);
    }
}

TEST_CASE("boundary loss refuses what it cannot mean") {
    const host on{1};
    Case c;
    Inputs in(c, 1);
    const auto call = [&](const Case& with) { return run<double>(on, with, in.scores, in.target); };
    in.target.at(1, 0, 20) = std::numeric_limits<float>::quiet_NaN();
    CHECK_REFUSED(call(c), "target[1][0][20]: NaN");
    in.target.at(1, 0, 20) = 0.0f;
    in.target.at(1, 0, 59) = std::numeric_limits<float>::quiet_NaN();  // never leaves the window: not read
    call(c);
    in.scores.at(0, 1, 9) = std::numeric_limits<double>::infinity();
    CHECK_REFUSED(call(c), "scores[0][1][9]: inf");
    in.scores.at(0, 1, 9) = 0.0;
    const auto with = [&](auto change) {
        Case other;
        change(other.loss);
        return other;
    };
    CHECK_REFUSED(call(with([](BoundaryLoss& l) { l.temperature = 0.0f; })), "temperature: 0");
    CHECK_REFUSED(call(with([](BoundaryLoss& l) { l.margin.omega_min = 1.5f; })), "margin.omega_min: 1.5");
    CHECK_REFUSED(call(with([](BoundaryLoss& l) { l.balance.most = 0.1f; })), "balance.most: 0.1");
    CHECK_REFUSED(call(with([](BoundaryLoss& l) { l.sampler.late = -1.0f; })), "sampler.late: -1");
    CHECK_REFUSED(call(with([](BoundaryLoss& l) {
                      l.balance.least = l.balance.most = std::numeric_limits<float>::infinity();
                  })),
                  "balance.least: inf");
    test::Plane<float> shorter(2, 2, 30);
    test::Plane<double> d(2, 2, 60);
    const Any policy = c.policy();
    CHECK_REFUSED(BoundaryLoss{}.workspace_bytes(on, policy, {.batch = 1}, 2), "sequences.length: -1");
    CHECK_REFUSED(BoundaryLoss{}.workspace_bytes(on, policy, {.batch = 1, .length = 9}, -1), "heads: -1");
    CHECK_REFUSED(BoundaryLoss{.layer = -1}.workspace_bytes(on, policy, {.batch = 1, .length = 9}, 2),
                  "layer: -1");
    test::Workspace workspace(c.loss.workspace_bytes(on, policy, c.sequences(), 2));
    const test::Plane<float>& other = shorter;
    const test::Plane<double>& scores = in.scores;
    CHECK_REFUSED(test::value_of<BoundaryValue>([&](auto* into) {
                      c.loss(on, policy, scores.view(), other.view(), c.sequences(), d.view(), nullptr, into,
                             workspace);
                  }),
                  "target: 2 x 2 x 30 is not allowed; it must be 2 x 2 x at least 60");
    CHECK_REFUSED(test::value_of<BoundaryValue>([&](auto* into) {
                      c.loss(on, policy, scores.view(), std::as_const(in.target).view(), c.sequences(),
                             d.view(), nullptr, into, {});
                  }),
                  "workspace.bytes: 0");
}

TEST_CASE("with a status, a NaN target ranks last and scores of examples are reported, as on a device") {
    const host on{2};
    Case c;
    c.loss.margin.omega_min = 1.0f;  // no margin, which an infinite target would change
    Inputs in(c, 5);
    std::uint32_t status[2] = {0, 0};
    const BoundaryOptions options{.status = status};
    in.target.at(1, 0, 20) = -std::numeric_limits<float>::infinity();
    const Run<double> expected = run<double>(on, c, in.scores, in.target, options);
    CHECK(status[1] == status_ok);
    in.target.at(1, 0, 20) = std::numeric_limits<float>::quiet_NaN();
    const Run<double> got = run<double>(on, c, in.scores, in.target, options);
    CHECK(status[0] == status_ok);
    CHECK(status[1] == status_nan_score);
    CHECK(got.value.value == expected.value.value);
    CHECK(got.value.count == expected.value.count);
    CHECK(got.d_scores.data == expected.d_scores.data);
    in.scores.at(0, 1, 59) = std::numeric_limits<double>::quiet_NaN();  // never leaves the window: not read
    CHECK(run<double>(on, c, in.scores, in.target, options).value.value == expected.value.value);
    CHECK(status[0] == status_ok);
    in.scores.at(0, 1, 30) = std::numeric_limits<double>::infinity();
    const Run<double> spoiled = run<double>(on, c, in.scores, in.target, options);
    CHECK(status[0] == status_not_finite);
    CHECK(spoiled.d_scores.view().head(1, 1)[30] == expected.d_scores.view().head(1, 1)[30]);
}

TEST_CASE("layers of one call are losses of their own, with the decay of the options") {
    const host ctx{2};
    constexpr std::int32_t length = 60, heads = 2, layers = 3, all = heads * layers;
    std::mt19937 generator(7);
    test::Normal<float> normal;
    test::Plane<float> scores(2, all, length), target(2, all, length), d(2, all, length),
        wanted(2, all, length);
    for (auto* plane : {&scores, &target}) {
        for (float& x : plane->data) {
            x = normal(generator);
        }
    }
    const float log_gamma[all] = {-0.01f, -0.02f, -0.03f, -0.04f, -0.05f, -0.06f};
    const Sequences sequences{.batch = 2, .length = length};
    const BoundaryLoss loss{.sampler = {.count = 20, .seed = 5}, .layer = 0};
    const Policy<Sink<2>, Window<5>, TopKBudget<8>, Decay<1>> policy{{}, {}, {}, Decay<1>{0.0f}};
    std::vector<double> gamma(all), wanted_gamma(all);
    test::Workspace workspace(loss.workspace_bytes(ctx, policy, sequences, all));
    BoundaryValue value, sum;
    loss(ctx, policy, std::as_const(scores).view(), std::as_const(target).view(), sequences, d.view(),
         gamma.data(), &value, workspace, {.layers = layers, .log_gamma = log_gamma});
    for (std::int32_t l = 0; l < layers; ++l) {
        const auto part = [&](auto view) {
            view.data = view.head(0, l * heads);
            view.heads = heads;
            return view;
        };
        BoundaryLoss one = loss;
        one.layer = l;
        const BoundaryValue got = test::value_of<BoundaryValue>([&](auto* into) {
            one(ctx, policy, part(std::as_const(scores).view()), part(std::as_const(target).view()),
                sequences, part(wanted.view()), wanted_gamma.data() + l * heads, into, workspace,
                {.log_gamma = log_gamma + l * heads});
        });
        sum.value += got.value;
        sum.count += got.count;
        sum.agreed += got.agreed;
    }
    CHECK(value.value == doctest::Approx(sum.value).epsilon(1e-14));
    CHECK(value.count == sum.count);
    CHECK(value.agreed == sum.agreed);
    CHECK(sum.count > 0);
    CHECK(d.data == wanted.data);
    CHECK(gamma == wanted_gamma);
    CHECK_REFUSED(loss(ctx, policy, std::as_const(scores).view(), std::as_const(target).view(), sequences,
                       d.view(), nullptr, &value, workspace, {.layers = 4}),
                  "options.layers: 4");
}
