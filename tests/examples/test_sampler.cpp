#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "support.hpp"

#include <llama/sampler.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

using llama::Sampler;
using test::contains;

namespace {

/// How often each token of logits = log(probabilities) is drawn, as a fraction.
std::vector<double> frequencies(const llama::SamplerOptions& options,
                                const std::vector<double>& probabilities) {
    std::vector<float> logits(probabilities.size());
    std::ranges::transform(probabilities, logits.begin(),
                           [](double p) { return static_cast<float>(std::log(p)); });
    std::vector<double> counts(logits.size());
    Sampler sample(options);
    for (int i = 0; i < 20000; ++i) counts[static_cast<std::size_t>(sample(logits))] += 1 / 20000.0;
    return counts;
}

}  // namespace

TEST_CASE("greedy takes the largest, of equals the first") {
    Sampler sample;
    CHECK(sample(std::array{1.0f, 3.0f, 3.0f, 2.0f}) == 1);
    CHECK(sample(std::array{-std::numeric_limits<float>::infinity(), -5.0f}) == 1);
}

TEST_CASE("frequencies follow the probabilities") {
    // 20000 draws: a standard deviation of at most 0.0036, so 0.015 is more than four of them.
    const std::vector<double> p{0.1, 0.5, 0.15, 0.25};
    const auto all = frequencies({.temperature = 1, .seed = 7}, p);
    for (std::size_t i = 0; i < p.size(); ++i) CHECK(std::abs(all[i] - p[i]) < 0.015);

    const auto two = frequencies({.temperature = 1, .top_k = 2, .seed = 7}, p);
    CHECK(two[0] + two[2] == 0);
    CHECK(std::abs(two[1] - 2.0 / 3) < 0.015);

    const auto most = frequencies({.temperature = 1, .top_p = 0.7, .seed = 7}, p);  // 0.5 + 0.25
    CHECK(most[0] + most[2] == 0);
    CHECK(std::abs(most[1] - 2.0 / 3) < 0.015);

    const auto one = frequencies({.temperature = 1, .top_p = 0.01, .seed = 7}, p);
    CHECK(one[1] == doctest::Approx(1.0));

    const auto hot = frequencies({.temperature = 2, .seed = 7}, p);
    double total = 0;
    for (const double x : p) total += std::sqrt(x);
    for (std::size_t i = 0; i < p.size(); ++i) CHECK(std::abs(hot[i] - std::sqrt(p[i]) / total) < 0.015);
}

TEST_CASE("the seed decides") {
    const std::vector<float> flat(1000, 0.0f);
    const auto draw = [&](std::uint64_t seed) {
        Sampler sample({.temperature = 1, .seed = seed});
        std::vector<std::int32_t> ids(10);
        for (auto& id : ids) id = sample(flat);
        return ids;
    };
    CHECK(draw(1) == draw(1));
    CHECK(draw(1) != draw(2));
}

TEST_CASE("bad arguments get a sentence") {
    const auto error = [](llama::SamplerOptions options) {
        return test::message_of([&] { Sampler sample(options); });
    };
    CHECK(contains(error({.temperature = -1}), "temperature is -1, it must be finite and at least 0"));
    CHECK(contains(error({.temperature = std::nan("")}), "temperature is nan"));
    CHECK(contains(error({.top_k = -1}), "top_k is -1"));
    CHECK(contains(error({.top_p = 0}), "top_p is 0, it must be above 0 and at most 1"));
    CHECK(contains(error({.top_p = 1.5}), "top_p is 1.5"));
    Sampler sample;
    CHECK(contains(test::message_of([&] { sample({}); }), "no logits"));
    CHECK(contains(test::message_of([&] { sample(std::array{0.0f, std::nanf("")}); }), "logits[1] is NaN"));
}
