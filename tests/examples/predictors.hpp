// SP-KV's predictors for the layers of a model, with weights at random, and their scores in double.
#pragma once

#include <kvpolicy/scorers/mlp.hpp>

#include <llama/config.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace test {

/// One a layer. Weights are in the order w1, b1, w2, b2 of layer 0, of layer 1 and so on.
struct Predictors {
    static constexpr std::int32_t hidden = 12;
    std::vector<std::vector<float>> weights;
    std::vector<kvpolicy::UtilityPredictor> of_layer;

    explicit Predictors(const llama::Config& config) {
        std::mt19937 generator(7);
        for (int layer = 0; layer < config.layers; ++layer) {
            kvpolicy::UtilityPredictor& made = of_layer.emplace_back();
            made.heads = config.kv_heads;
            made.hidden = hidden;
            made.input.width = config.hidden_size;
            const auto array = [&](int count, float spread) {
                std::normal_distribution<float> normal(0.0f, spread);
                std::vector<float>& numbers = weights.emplace_back(static_cast<std::size_t>(count));
                std::ranges::generate(numbers, [&] { return normal(generator); });
                return static_cast<const float*>(numbers.data());
            };
            made.weights = {array(hidden * config.hidden_size, 0.2f), array(hidden, 0.2f),
                            array(config.kv_heads * hidden, 1.0f), array(config.kv_heads, 0.2f)};
        }
    }
};

/// SP-KV, listing 1, without the sigmoid, in double.
inline double exact_utility(const kvpolicy::UtilityPredictor& predictor, int head, const float* x) {
    double score = double{predictor.weights.b2[head]};
    for (std::int32_t j = 0; j < predictor.hidden; ++j) {
        double y = double{predictor.weights.b1[j]};
        for (std::int32_t i = 0; i < predictor.input.width; ++i) {
            y += double{predictor.weights.w1[j * predictor.input.width + i]} * double{x[i]};
        }
        score += double{predictor.weights.w2[head * predictor.hidden + j]} * y / (1.0 + std::exp(-y));
    }
    return score;
}

}  // namespace test
