// AdamW on the device against the host's.
#include "../../../examples/train/adamw.cuh"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <vector>

namespace {

struct Pair {
    std::vector<std::vector<float>> parameters;  // the host's
    train::AdamW host;
    train::DeviceAdamW device;

    static double rate_of(std::size_t i) { return i % 3 == 1 ? 30.0 : 1.0; }
    static std::vector<train::DeviceAdamW::Array> arrays_of(const std::vector<std::size_t>& sizes) {
        std::vector<train::DeviceAdamW::Array> arrays;
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            arrays.push_back({sizes[i], i % 2 == 0, rate_of(i)});
        }
        return arrays;
    }
    Pair(const train::AdamWOptions& options, const std::vector<std::size_t>& sizes)
        : host(options), device(options, arrays_of(sizes)) {
        std::mt19937 generator(1);
        std::normal_distribution<float> normal;
        for (const std::size_t size : sizes) {
            auto& array = parameters.emplace_back(size);
            for (float& p : array) {
                p = normal(generator);
            }
        }
        for (std::size_t i = 0; i < sizes.size(); ++i) {
            host.add("", parameters[i].data(), sizes[i], i % 2 == 0, rate_of(i));
            device.parameters.put(parameters[i].data(), device.begin(i), sizes[i], nullptr);
        }
    }
    void draw(unsigned seed, float scale) {
        std::mt19937 generator(seed);
        std::normal_distribution<float> normal;
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            for (float& g : host.arrays[i].gradient) {
                g = scale * normal(generator);
            }
            device.gradients.put(host.arrays[i].gradient.data(), device.begin(i), parameters[i].size(),
                                 nullptr);
        }
    }
    [[nodiscard]] train::AdamWState state() const {
        train::AdamWState state;
        device.state.get(&state, 0, 1, nullptr);
        return state;
    }
    void same(const train::DeviceArray<float>& memory, std::size_t i, const float* wanted) const {
        std::vector<float> got(parameters[i].size());
        memory.get(got.data(), device.begin(i), got.size(), nullptr);
        // Doubles until they are stored: an ulp of fp32 a step, where a rounding falls the other way. A
        // number that canceled keeps the ulps of what it was.
        float largest = 0.0f;
        for (std::size_t j = 0; j < got.size(); ++j) {
            largest = std::max(largest, std::fabs(wanted[j]));
        }
        for (std::size_t j = 0; j < got.size(); ++j) {
            CAPTURE(j);
            REQUIRE(std::fabs(got[j] - wanted[j]) <= 1e-5f * std::fabs(wanted[j]) + 5e-7f * largest);
        }
    }
    void check() const {
        for (std::size_t i = 0; i < parameters.size(); ++i) {
            CAPTURE(i);
            same(device.first, i, host.arrays[i].first.data());
            same(device.second, i, host.arrays[i].second.data());
            same(device.parameters, i, parameters[i].data());
        }
        CHECK(state().steps_taken == host.steps_taken);
    }
};

}  // namespace

TEST_CASE("steps are the host's with and without clipping and decay") {
    for (const double clip : {0.0, 1.0, 1e6}) {
        CAPTURE(clip);
        Pair both({.weight_decay = 0.1, .clip = clip}, {1000, 1, 70000, 3});
        for (unsigned step = 0; step < 12; ++step) {
            both.draw(step, step % 3 == 0 ? 10.0f : 0.01f);
            const double rate = 1e-2 / (1 + step);
            const double norm = both.host.step(rate);
            both.device.step(rate, step + 1, nullptr, nullptr);
            CHECK(both.state().norm == doctest::Approx(norm).epsilon(1e-12));
        }
        both.check();
    }
}

TEST_CASE("a gradient that is not finite changes nothing and is told; no examples change nothing") {
    Pair both({.weight_decay = 0.1}, {300, 20});
    both.draw(1, 1.0f);
    both.host.step(1e-2);
    both.device.step(1e-2, 1, nullptr, nullptr);
    const float bad = std::numeric_limits<float>::infinity();
    both.device.gradients.put(&bad, 310, 1, nullptr);
    both.device.step(1e-2, 2, nullptr, nullptr);
    both.device.step(1e-2, 3, nullptr, nullptr);
    CHECK(both.state().refused == 2);
    CHECK(both.state().first_refused == 2);
    both.check();

    both.draw(2, 1.0f);
    const train::DeviceArray<std::int64_t> examples(1);
    examples.clear(nullptr);
    both.device.step(1e-2, 4, examples.data(), nullptr);
    both.check();
    CHECK(both.state().norm == 0.0);
    const std::int64_t some = 5;
    examples.put(&some, 0, 1, nullptr);
    both.host.step(1e-2);
    both.device.step(1e-2, 5, examples.data(), nullptr);
    both.check();
}

TEST_CASE("too many arrays are refused") {
    CHECK_THROWS_AS(train::DeviceAdamW({}, std::vector<train::DeviceAdamW::Array>(25, {1, true})),
                    std::invalid_argument);
}
