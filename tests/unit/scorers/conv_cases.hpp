// ConvScorers with drawn weights, and the cases of tests/vectors/conv.kvpv (see tests/reference/conv.py).
#pragma once

#include <kvpolicy/scorers/conv.hpp>

#include "scorer_cases.hpp"

#include <string>
#include <vector>

namespace test {

struct conv_case {
    std::int32_t head_dim_qk = 8, head_dim_vo = 8, heads = 2, length = 60, delay = 13;
    kvpolicy::rope_layout layout = kvpolicy::rope_layout::half_split;
    std::int32_t dims = 0;
    bool biases = true;
    std::int32_t seed = 1;
    float base = 10000.0f;
    std::vector<std::int32_t> cu;

    conv_case() = default;
    conv_case(const std::int32_t* n, float theta, std::vector<std::int32_t> edges)
        : head_dim_qk(n[0]),
          head_dim_vo(n[1]),
          heads(n[2]),
          length(n[3]),
          delay(n[4]),
          layout(static_cast<kvpolicy::rope_layout>(n[5])),
          dims(n[6]),
          biases(n[7] != 0),
          seed(n[8]),
          base(theta),
          cu(std::move(edges)) {}

    [[nodiscard]] kvpolicy::Sequences sequences() const {
        kvpolicy::Sequences all{1, length, nullptr, nullptr, nullptr, 0};
        if (!cu.empty()) {
            all.cu_seqlens = cu.data();
            all.segments = static_cast<std::int32_t>(cu.size()) - 1;
        }
        return all;
    }
    [[nodiscard]] std::vector<float> keys() const {
        return draw(seed, array::k, std::int64_t{heads} * length * head_dim_qk, 2.0f);
    }
    [[nodiscard]] std::vector<float> values() const {
        return draw(seed, array::v, std::int64_t{heads} * length * head_dim_vo, 2.0f);
    }
};

/// The weights of a case, and a scorer that views them.
struct conv_weights {
    std::vector<float> w[3], b[3], readout, readout_bias;
    conv_case c;

    explicit conv_weights(const conv_case& one, float scale = 0.5f) : c(one) {
        const array names[3][2] = {{array::w1, array::b1}, {array::w2, array::b2}, {array::w3, array::b3}};
        std::int64_t in = c.head_dim_qk + c.head_dim_vo;
        for (int l = 0; l < 3; ++l) {
            const std::int64_t out = in / 2;
            w[l] = draw(c.seed, names[l][0], c.heads * out * 3 * in, scale);
            b[l] = draw(c.seed, names[l][1], c.heads * out, 1.0f);
            in = out;
        }
        readout = draw(c.seed, array::readout, c.heads * in, 1.0f);
        readout_bias = draw(c.seed, array::readout_bias, c.heads, 1.0f);
    }
    conv_weights(const conv_weights&) = delete;

    [[nodiscard]] kvpolicy::ConvScorer<> scorer() const {
        kvpolicy::ConvScorer<> s;
        s.heads = c.heads;
        s.head_dim_qk = c.head_dim_qk;
        s.head_dim_vo = c.head_dim_vo;
        s.rope = {c.layout, c.base, c.dims};
        s.weights = {w[0].data(), b[0].data(), w[1].data(),    b[1].data(),
                     w[2].data(), b[2].data(), readout.data(), readout_bias.data()};
        if (!c.biases) {
            s.weights.b1 = s.weights.b2 = s.weights.b3 = s.weights.readout_bias = nullptr;
        }
        return s;
    }
};

}  // namespace test
