// mLSTM scores against the direct sums of tests/reference/scorers.py: in double to rounding, in fp32 within a
// bound that the inputs give, in both forms.
#include "../../support/vectors.hpp"
#include "scorer_cases.hpp"

#include <doctest/doctest.h>

#include <algorithm>

using namespace kvpolicy;

namespace {

const kvpolicy_test::vectors& file() {
    static const kvpolicy_test::vectors loaded = kvpolicy_test::vectors::load("scorers.kvpv");
    return loaded;
}

struct expected_case {
    test::mlstm_case c;
    const double* scores;
};

std::vector<expected_case> all_cases() {
    const auto& cases = file().get<std::int32_t>("mlstm_cases");
    const auto& levels = file().get<float>("mlstm_levels");
    const auto& cu = file().get<std::int32_t>("mlstm_cu");
    const auto& cu_offsets = file().get<std::int32_t>("mlstm_cu_offsets");
    std::vector<expected_case> out;
    for (std::int64_t i = 0; i < cases.shape[0]; ++i) {
        const std::int32_t* n = cases.row(i);
        const float* x = levels.row(i);
        test::mlstm_case c{n[0] != 0,  n[1] != 0, n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10] != 0,
                           n[11] != 0, n[12],     x[0], x[1], x[2], x[3], x[4], x[5], x[6], {}};
        c.cu.assign(cu.data() + cu_offsets[i], cu.data() + cu_offsets[i + 1]);
        out.push_back(
            {c, file().get<double>("mlstm_scores").data() + file().get<std::int32_t>("mlstm_offsets")[i]});
    }
    return out;
}

template <class T>
std::vector<compute_t<T>> scores_of(const test::mlstm_weights& weights, const std::vector<float>& k,
                                    const std::vector<float>& v, form how, compute_t<T> mark) {
    const test::mlstm_case& c = weights.c;
    const host ctx(2);
    const auto keys = test::converted<T>(k);
    const auto values = test::converted<T>(v);
    std::vector<compute_t<T>> scores;
    test::with_mlstm(weights, [&](const auto& scorer) {
        scores = test::score_all<std::decay_t<decltype(scorer)>, T>(
            ctx, scorer, view_bhsd(keys.data(), 1, c.heads, c.length, c.head_dim_qk),
            view_bhsd(values.data(), 1, c.heads, c.length, c.head_dim_vo), c.sequences(), c.delay, how, mark);
    });
    return scores;
}

/// How far the fp32 scores of each head may lie from exact ones. Rounding in every product and sum moves a
/// score as far as relative changes of a few u = 2^-24 in every input and weight do; what 8 u do is measured
/// in double (the largest of several draws), times 4 for the sums' lengths, plus 32 u of the scores' size for
/// the last operations.
std::vector<double> fp32_bounds(const test::mlstm_case& c, const std::vector<float>& k,
                                const std::vector<float>& v) {
    constexpr double u = 0x1p-24;
    const auto exact = scores_of<double>(test::mlstm_weights(c), k, v, form::recurrent, 0.0);
    std::vector<double> moved(static_cast<std::size_t>(c.heads), 0.0);
    std::vector<double> largest = moved;
    for (std::uint64_t trial = 0; trial < 6; ++trial) {
        std::uint64_t stream = 1000000 * (trial + 1);
        const auto shaken = [&](std::vector<float> numbers) {
            const auto signs = test::draw(stream++, numbers.size(), 1.0f);
            for (std::size_t i = 0; i < numbers.size(); ++i) {
                numbers[i] *= 1.0f + std::copysign(8.0f * 0x1p-24f, signs[i]);
            }
            return numbers;
        };
        test::mlstm_weights weights(c);
        for (auto* array :
             {&weights.w_q, &weights.w_k, &weights.w_v, &weights.w_i, &weights.b_i, &weights.w_f,
              &weights.b_f, &weights.norm_gain, &weights.readout, &weights.readout_bias, &weights.skip}) {
            *array = shaken(*array);
        }
        const auto other = scores_of<double>(weights, shaken(k), shaken(v), form::recurrent, 0.0);
        for (std::size_t i = 0; i < exact.size(); ++i) {
            const std::size_t head = i / static_cast<std::size_t>(c.length);
            moved[head] = std::max(moved[head], std::abs(other[i] - exact[i]));
            largest[head] = std::max(largest[head], std::abs(exact[i]));
        }
    }
    for (std::size_t h = 0; h < moved.size(); ++h) {
        moved[h] = 4.0 * moved[h] + 32.0 * u * (1.0 + largest[h]);
    }
    return moved;
}

template <class T>
void compare(const expected_case& expected, form how) {
    using Real = compute_t<T>;
    const test::mlstm_case& c = expected.c;
    INFO(c.name());
    INFO("form ", static_cast<int>(how));
    const auto k = test::draw(c.seed, test::array::k, c.keys(), c.value_scale);
    const auto v = test::draw(c.seed, test::array::v, c.values(), c.value_scale);
    constexpr Real mark = Real(-77);
    const auto scores = scores_of<T>(test::mlstm_weights(c), k, v, how, mark);
    std::vector<double> bounds(static_cast<std::size_t>(c.heads), 1e-10);
    if (std::is_same_v<T, float>) {
        bounds = fp32_bounds(c, k, v);
    }
    for (std::int32_t h = 0; h < c.heads; ++h) {
        for (std::int32_t t = 0; t < c.length; ++t) {
            const double want = expected.scores[h * c.length + t];
            const auto got = static_cast<double>(scores[test::at(h, c.length, t)]);
            CAPTURE(h);
            CAPTURE(t);
            if (std::isnan(want)) {
                REQUIRE(got == static_cast<double>(mark));
            } else {
                REQUIRE(std::abs(got - want) <= bounds[static_cast<std::size_t>(h)] * (1.0 + std::abs(want)));
            }
        }
    }
}

}  // namespace

TEST_CASE("mLSTM scores in double are the reference's, recurrent and chunkwise") {
    for (const expected_case& expected : all_cases()) {
        compare<double>(expected, form::recurrent);
        compare<double>(expected, form::chunkwise);
    }
}

TEST_CASE("mLSTM scores in fp32 lie within rounding of the reference's") {
    for (const expected_case& expected : all_cases()) {
        compare<float>(expected, form::recurrent);
        compare<float>(expected, form::chunkwise);
    }
}
