// Scorers with weights at random, for caches on both backends.
#pragma once

#include <kvpolicy/scorers/conv.hpp>
#include <kvpolicy/scorers/linear.hpp>
#include <kvpolicy/scorers/mlp.hpp>
#include <kvpolicy/scorers/mlstm.hpp>

#include "../support/device.hpp"

#include <cstddef>
#include <deque>
#include <random>
#include <vector>

namespace test {

/// A scorer's weights at random, in host and in device memory.
template <class S>
struct TwoScorers {
    S of_host, of_device;
    std::deque<std::vector<float>> values;
    std::deque<Device<float>> copies;

    TwoScorers(const S& sizes, bool optional, std::mt19937& generator, float spread = 0.3f)
        : of_host(sizes), of_device(sizes) {
        typename S::template parameters<float> weights{}, on_device{};
        std::normal_distribution<float> normal(0.0f, spread);
        kvpolicy::for_each_parameter(sizes, weights,
                                     [&](const char*, float*& array, std::size_t count, bool may_miss) {
                                         if (count == 0 || (may_miss && !optional)) {
                                             return;
                                         }
                                         std::vector<float>& made = values.emplace_back(count);
                                         for (float& x : made) {
                                             x = normal(generator);
                                         }
                                         array = made.data();
                                     });
        std::size_t next = 0;
        kvpolicy::for_each_parameter(sizes, on_device,
                                     [&](const char*, float*& array, std::size_t count, bool may_miss) {
                                         if (count == 0 || (may_miss && !optional)) {
                                             return;
                                         }
                                         array = copies.emplace_back(values[next++]).data();
                                     });
        of_host.weights = read_only(weights);
        of_device.weights = read_only(on_device);
    }

    static auto read_only(const kvpolicy::LinearParameters<float>& w) {
        return kvpolicy::LinearParameters<const float>{w.weight, w.bias};
    }
    static auto read_only(const kvpolicy::ConvParameters<float>& w) {
        return kvpolicy::ConvParameters<const float>{w.w1, w.b1, w.w2,      w.b2,
                                                     w.w3, w.b3, w.readout, w.readout_bias};
    }
    static auto read_only(const kvpolicy::MlpParameters<float>& w) {
        return kvpolicy::MlpParameters<const float>{w.w1, w.b1, w.w2, w.b2};
    }
    static auto read_only(const kvpolicy::mLSTMParameters<float>& w) {
        return kvpolicy::mLSTMParameters<const float>{
            w.w_q, w.w_k, w.w_v, w.w_i, w.b_i, w.w_f, w.b_f, w.norm_gain, w.readout, w.readout_bias, w.skip};
    }
};

/// Scores are sums of a few dozen products and smooth functions of such; random ones are further apart than
/// this but for a few in a million pairs.
inline constexpr float score_tolerance = 2e-5f;

/// For 2 heads of 16 and 24 numbers.
template <class S>
S sized() {
    S scorer{};
    scorer.heads = 2;
    scorer.head_dim_qk = 16;
    scorer.head_dim_vo = 24;
    return scorer;
}

}  // namespace test
