// Bodies of scorers/initialize.hpp on the host.
#pragma once

#include <kvpolicy/scorers/check.hpp>
#include <kvpolicy/scorers/initialize.hpp>

#include <algorithm>
#include <cmath>
#include <cstddef>

namespace kvpolicy {

namespace host_backend {

/// Normal numbers by their place in a stream: the same whatever else is drawn.
struct normal_stream {
    std::uint64_t seed;
    std::uint64_t drawn = 0;

    static std::uint64_t mix(std::uint64_t x) {  // splitmix64
        x += 0x9e3779b97f4a7c15u;
        x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
        x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
        return x ^ (x >> 31);
    }
    double uniform() {
        return static_cast<double>((mix(mix(seed) + drawn++) >> 11) + 1) * 0x1p-53;
    }  // (0, 1]
    float operator()(double deviation) {
        const double radius = std::sqrt(-2.0 * std::log(uniform()));
        return static_cast<float>(deviation * radius * std::cos(6.283185307179586 * uniform()));
    }
};

/// w[head][r][from + r % width] = 1 plus noise, for every head's `rows` rows.
inline void fill_identity(float* w, std::int32_t heads, std::int32_t rows, std::int32_t inputs,
                          std::int32_t from, std::int32_t width, normal_stream random, double noise) {
    if (w == nullptr) {
        return;
    }
    for (std::int64_t r = 0; r < std::int64_t{heads} * rows; ++r) {
        for (std::int32_t i = 0; i < inputs; ++i) {
            w[r * inputs + i] = random(noise);
        }
        w[r * inputs + from + r % rows % width] += 1.0f;
    }
}

inline void fill_normal(float* w, std::int64_t count, normal_stream random, double deviation) {
    for (std::int64_t i = 0; w != nullptr && i < count; ++i) {
        w[i] = random(deviation);
    }
}

inline void fill_value(float* w, std::int64_t count, float value) {
    if (w != nullptr) {
        std::fill_n(w, count, value);
    }
}

}  // namespace host_backend

template <std::int32_t D, class Feature, class Values>
void initialize(const mLSTMScorer<D, Feature, Values>& scorer, mLSTMParameters<float> into,
                std::uint64_t seed, const mLSTMStart& start) {
    using namespace host_backend;
    checks::check_parameters("mLSTMScorer", scorer, into);
    const std::int32_t heads = scorer.heads;
    const std::int32_t inputs = scorer.input_size();
    const std::int64_t all = std::int64_t{heads} * inputs;
    const double noise = start.noise;
    fill_identity(into.w_q, heads, scorer.projection(), inputs, 0, scorer.head_dim_qk, {seed * 8}, noise);
    fill_identity(into.w_k, heads, scorer.projection(), inputs, 0, scorer.head_dim_qk, {seed * 8 + 1}, noise);
    if constexpr (Values::projected) {
        fill_identity(into.w_v, heads, scorer.value_width(), inputs, scorer.head_dim_qk, scorer.head_dim_vo,
                      {seed * 8 + 2}, noise);
    }
    fill_normal(into.w_i, all, {seed * 8 + 3}, noise);
    fill_normal(into.w_f, all, {seed * 8 + 4}, noise);
    fill_value(into.b_i, heads, start.input_bias);
    for (std::int32_t h = 0; into.b_f != nullptr && h < heads; ++h) {
        const float place = heads > 1 ? static_cast<float>(h) / static_cast<float>(heads - 1) : 0.5f;
        into.b_f[h] = start.forget_bias_first + place * (start.forget_bias_last - start.forget_bias_first);
    }
    fill_value(into.norm_gain, std::int64_t{heads} * scorer.value_width(), 1.0f);
    fill_value(into.readout, std::int64_t{heads} * scorer.value_width(), 0.0f);
    fill_value(into.readout_bias, heads, 0.0f);
    fill_value(into.skip, all, 0.0f);
}

template <class Input, class Act, std::int32_t D>
void initialize(const BasicMlpScorer<Input, Act, D>& scorer, MlpParameters<float> into, std::uint64_t seed) {
    using namespace host_backend;
    checks::check_parameters(scorer.name, scorer, into);
    const std::int64_t rows = std::int64_t{Input::per_head ? scorer.heads : 1} * scorer.hidden;
    fill_normal(into.w1, rows * scorer.input_size(), {seed},
                1.0 / std::sqrt(static_cast<double>(scorer.input_size())));
    fill_value(into.b1, rows, 0.0f);
    fill_value(into.w2, std::int64_t{scorer.heads} * scorer.hidden, 0.0f);
    float bias = 0.0f;
    if constexpr (requires { Input::start_bias; }) {
        bias = Input::start_bias;
    }
    fill_value(into.b2, scorer.heads, bias);
}

template <std::int32_t D>
void initialize(const ConvScorer<D>& scorer, ConvParameters<float> into, std::uint64_t seed) {
    using namespace host_backend;
    checks::check_parameters("ConvScorer", scorer, into);
    for (std::int32_t layer = 1; layer <= 3; ++layer) {
        const std::int64_t in = scorer.channels(layer - 1),
                           out = std::int64_t{scorer.heads} * scorer.channels(layer);
        const auto arrays = conv_layer_of(scorer, into, layer, 0);
        fill_normal(arrays.w, out * 3 * in, {seed * 8 + static_cast<std::uint64_t>(layer)},
                    std::sqrt(2.0 / (3.0 * static_cast<double>(in))));
        fill_value(arrays.b, out, 0.0f);
    }
    fill_value(into.readout, std::int64_t{scorer.heads} * scorer.channels(3), 0.0f);
    fill_value(into.readout_bias, scorer.heads, scorer.start_bias);
}

template <std::int32_t D>
void initialize(const LinearScorer<D>& scorer, LinearParameters<float> into, std::uint64_t /*seed*/) {
    using namespace host_backend;
    checks::check_parameters("LinearScorer", scorer, into);
    fill_value(into.weight, std::int64_t{scorer.heads} * (scorer.head_dim_qk + scorer.head_dim_vo), 0.0f);
    fill_value(into.bias, scorer.heads, 0.0f);
}

}  // namespace kvpolicy
