// mLSTMScorer on the device against the host's in double: what the translation units of each
// storage type run.
#pragma once

#include <kvpolicy/cuda_scorers.cuh>

#include "scorer_case.hpp"

namespace mlstm_test {

using namespace kvpolicy;
using namespace scorer_test;

/// bf16: weights of the projections, features, values, what chunks add, states and w_lj (q~ . k~) are
/// rounded, each off by at most u = 2^-9 of a number, independently, of mean square u / sqrt(3). Features are
/// positive and a read is a mean of values, so h is off by each of these relative to itself where values
/// agree, and by more where they cancel: six roundings give sqrt(6 / 3) u = 1.4 u, and 1e-2 = 5 u leaves
/// space for the latter, for norm and SiLU. A score is a sum of up to 128 terms of about 0.1, which may
/// cancel: 5e-3 is 5 u of one. Backwards as many roundings again. float: gates are sums of up to 128 products
/// around 30, off by 30 * 2^-24 * sqrt(128) = 2e-5, and so are exponentials of them.
template <class T>
Tolerance tolerance() {
    return std::is_same_v<T, float> ? Tolerance{1e-4, 3e-4, 1e-6} : Tolerance{1e-2, 2e-2, 5e-3};
}

struct Gates {
    double input = 0.0, input_spread = 0.1, forget = 3.0, forget_spread = 0.05;
    bool biases = true;
};

inline Drawing drawing(const Gates& gates, bool norm, bool skip) {
    return [=](const std::string& name) {
        if (name == "w_i") {
            return Draw{gates.input_spread};
        }
        if (name == "w_f") {
            return Draw{gates.forget_spread};
        }
        if (name == "b_i") {
            return Draw{gates.biases ? 0.1 : -1.0, gates.input};
        }
        if (name == "b_f") {
            return Draw{gates.biases ? 0.1 : -1.0, gates.forget};
        }
        if (name == "norm_gain") {
            return Draw{norm ? 0.3 : -1.0, 1.0};
        }
        if (name == "skip") {
            return Draw{skip ? 0.05 : -1.0};
        }
        if (name == "readout") {
            return Draw{0.5, 0.2};
        }
        return Draw{0.15};
    };
}

template <class S>
S shaped(const Case& c, std::int32_t d_qk = 0, std::int32_t d_v = 0, float gate_softcap = 0.0f) {
    S scorer;
    scorer.heads = c.heads;
    scorer.head_dim_qk = c.head_dim_qk;
    scorer.head_dim_vo = c.head_dim_vo;
    scorer.d_qk = d_qk;
    scorer.d_v = d_v;
    scorer.gate_softcap = gate_softcap;
    return scorer;
}

using Plain = mLSTMScorer<>;  // Hedgehog, projected
using SoftmaxDirect = mLSTMScorer<dynamic, Softmax, DirectValues>;

template <class T, class S>
void check(Case c, const std::string& name, const S& shape, const Drawing& how,
           Tolerance allowed = tolerance<T>()) {
    c.name = name + ", " + c.name;
    const Weights<S> weights(shape, how, c.seed);
    check_scores<T>(c, weights, allowed);
    check_gradients<T>(c, weights, allowed);
}

inline bool same_bits(const std::vector<float>& a, const std::vector<float>& b) {
    return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
}

inline Case sized(std::int32_t length, std::int32_t delay, std::int32_t dim) {
    Case c;
    c.name = "length " + std::to_string(length) + ", delay " + std::to_string(delay);
    c.length = length;
    c.delay = delay;
    c.head_dim_qk = dim;
    c.head_dim_vo = dim;
    return c;
}

/// LayerNorms of every kernel: both widths, odd ones, chunks in segments, packed.
template <class T>
void check_layer_norms(const std::string& name) {
    const auto with_layer = [](auto shape) {
        shape.norm = mlstm_norm::layer;
        return shape;
    };
    for (const auto& [length, delay] : {std::pair{65, 1}, {300, 130}}) {
        const Case c = sized(length, delay, 64);
        check<T>(c, name, with_layer(shaped<Plain>(c)), drawing({}, true, true));
        check<T>(c, name + ", direct", with_layer(shaped<SoftmaxDirect>(c)), drawing({}, true, false));
    }
    Case odd = sized(150, 10, 40);
    odd.head_dim_vo = 24;
    odd.edges = {0, 40, 150};
    check<T>(odd, name + ", odd", with_layer(shaped<Plain>(odd, 20, 11)), drawing({}, true, true));
    if constexpr (!std::is_same_v<T, float>) {
        const Case wide = sized(200, 20, 128);
        check<T>(wide, name + ", 128 and 64", with_layer(shaped<Plain>(wide)), drawing({}, true, false));
        check<T>(wide, name + ", 128 and 128", with_layer(shaped<SoftmaxDirect>(wide)),
                 drawing({}, true, true));
    }
}

/// Softmax features of unit-normal projections and a memory that forgets: q~ . z is far below 1e-6 in the
/// stabilized frame for many reads. Weights are rounded to T first, so that projections of 16-bit rows are
/// those of the reference to fp32, and the roundings that follow are those that tolerance() counts.
template <class T>
void check_peaked(const std::string& name) {
    using S = mLSTMScorer<dynamic, Softmax, ProjectedValues>;
    for (const auto& [length, delay] : {std::pair{60, 4}, {300, 10}}) {
        Case c = sized(length, delay, 32);
        c.name = name + ", peaked, " + c.name;
        const Drawing usual = drawing({0.0, 0.1, -2.0, 0.05}, false, false);
        Weights<S> weights(
            shaped<S>(c, 32, 16),
            [&](const std::string& array) {
                return array == "w_q" || array == "w_k" ? Draw{1.0} : usual(array);
            },
            c.seed);
        for (std::size_t i = 0; i < weights.arrays.size(); ++i) {
            for (float& w : weights.arrays[i].values) {
                w = static_cast<float>(stored<T>(static_cast<double>(w)));
            }
            weights.memory[i] = std::make_unique<Device<float>>(weights.arrays[i].values);
        }
        check_scores<T>(c, weights, tolerance<T>());
        check_gradients<T>(c, weights, tolerance<T>());
    }
}

/// Scores and then gradients from what the scores left in the workspace: the same numbers as two calls that
/// know nothing of each other.
template <class T, class S>
void check_num_long_range(const Case& c, const S& shape, const Drawing& how) {
    const Weights<S> weights(shape, how, c.seed);
    const Inputs<T> in(c);
    const Rows<T> k(c, in.k, c.head_dim_qk), v(c, in.v, c.head_dim_vo);
    const Device<std::int32_t> lengths(c.lengths), starts(c.starts), edges(c.edges);
    const std::vector<std::uint32_t> none(static_cast<std::size_t>(c.batch), 0u);
    std::vector<std::uint32_t> bad = none;  // what the backward pass says of lengths
    for (std::size_t b = 0; b < c.lengths.size(); ++b) {
        bad[b] = c.lengths[b] < 0 || c.lengths[b] > c.length ? status_bad_length : 0u;
    }
    const Device<float> d_scores(std::vector<float>(in.d_scores.begin(), in.d_scores.end()));
    const Sequences sequences = c.sequences(lengths.data(), starts.data(), edges.data());
    const kvpolicy::cuda ctx{};
    const S scorer = weights.on_device();
    std::vector<std::vector<float>> results[2];
    for (const bool kept : {false, true}) {
        const Device<float> scores(
            std::vector<float>(static_cast<std::size_t>(c.plane()), static_cast<float>(untouched)));
        const Rows<float> to_k(c, std::vector<double>(in.k.size(), untouched), c.head_dim_qk);
        const Rows<float> to_v(c, std::vector<double>(in.v.size(), untouched), c.head_dim_vo);
        ScoreBackward<T> call{k.view,
                              v.view,
                              sequences,
                              c.delay,
                              view_bhs<const float>(d_scores.data(), c.batch, c.heads, c.all_rows()),
                              to_k.view,
                              to_v.view};
        call.kept = kept;
        ScoreOptions options;
        options.for_backward = kept;
        const std::size_t of_scores =
            score_sequence_workspace_bytes(ctx, scorer, k.view, v.view, sequences, options);
        const std::size_t bytes = score_sequence_backward_workspace_bytes(ctx, scorer, call);
        CHECK((!kept || of_scores == bytes));
        const Device<unsigned char> workspace(std::max(of_scores, bytes));
        score_sequence(ctx, scorer, k.view, v.view, sequences, c.delay,
                       view_bhs(scores.data(), c.batch, c.heads, c.all_rows()), workspace, options);
        std::vector<std::unique_ptr<Device<float>>> arrays;
        typename S::template parameters<float> gradients;
        for_each_parameter(scorer, gradients, [&](const char*, float*& pointer, std::size_t, bool) {
            const Array& array = weights.arrays[arrays.size()];
            arrays.push_back(std::make_unique<Device<float>>(std::vector<float>(array.values.size(), 0.25f)));
            pointer = array.values.empty() ? nullptr : arrays.back()->data();
        });
        const Device<std::uint32_t> status(none);
        score_sequence_backward(ctx, scorer, call, gradients, workspace, {.status = status.data()});
        CHECK(status.read() == bad);
        results[kept ? 1 : 0].push_back(to_k.memory.read());
        results[kept ? 1 : 0].push_back(to_v.memory.read());
        for (const auto& array : arrays) {
            results[kept ? 1 : 0].push_back(array->read());
        }
        results[kept ? 1 : 0].push_back(scores.read());
    }
    for (std::size_t i = 0; i < results[0].size(); ++i) {
        const std::string what = c.name + ", array " + std::to_string(i) + " after kept scores";
        if (i + 1 == results[0].size()) {
            compare(what, widened(results[1][i]), widened(results[0][i]), tolerance<T>().scores,
                    tolerance<T>().floor);
        } else {
            CHECK_MESSAGE(same_bits(results[0][i], results[1][i]), what);
        }
    }
}

}  // namespace mlstm_test
