// Gradients of scorers against differences of scores that are written out in double here, pair by pair.
#include <kvpolicy/scorers/backward.hpp>

#include "../../support/cases.hpp"
#include "../../support/differences.hpp"
#include "../../support/loops.hpp"
#include "../../support/normal.hpp"
#include "../../support/refusal.hpp"
#include "scorer_cases.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <random>

using namespace kvpolicy;

namespace {

double silu(double y) { return y / (1.0 + std::exp(-y)); }
double gelu(double y) { return 0.5 * y * (1.0 + std::erf(y / std::sqrt(2.0))); }

/// The gradients of a scorer, in arrays of its parameters' shapes.
template <class S, class Real>
struct Gradients {
    typename S::template parameters<Real> views;
    std::vector<std::vector<Real>> arrays;
    std::vector<std::string> names;

    explicit Gradients(const S& scorer) {
        for_each_parameter(scorer, views, [&](const char* name, Real*&, std::size_t count, bool) {
            names.emplace_back(name);
            arrays.emplace_back(count, Real(0));
        });
        std::size_t i = 0;
        for_each_parameter(scorer, views, [&](const char*, Real*& pointer, std::size_t, bool) {
            pointer = arrays[i].empty() ? nullptr : arrays[i].data();
            ++i;
        });
    }
};

/// What one backward call gives.
template <class S, class T>
struct Result {
    Gradients<S, compute_t<T>> gradients;
    test::Tensor<compute_t<T>> d_k, d_v;
};

template <class T, class S>
Result<S, T> run_backward(const host& ctx, const S& scorer, const test::Tensor<T>& k,
                          const test::Tensor<T>& v, const Sequences& sequences, std::int32_t delay,
                          const test::Plane<compute_t<T>>& d_scores, bool inputs = true) {
    using Real = compute_t<T>;
    Result<S, T> out{Gradients<S, Real>(scorer), test::Tensor<Real>(k.batch, k.heads, k.length, k.dim),
                     test::Tensor<Real>(v.batch, v.heads, v.length, v.dim)};
    out.d_k.fill(-3.0f);
    out.d_v.fill(-3.0f);
    ScoreBackward<T> call{k.view(), v.view(), sequences, delay, d_scores.view()};
    if (inputs) {
        call.d_k = out.d_k.view();
        call.d_v = out.d_v.view();
    }
    test::Workspace workspace(score_sequence_backward_workspace_bytes(ctx, scorer, call));
    score_sequence_backward(ctx, scorer, call, out.gradients.views, workspace);
    return out;
}

template <class Real>
double largest(const std::vector<Real>& values) {
    double most = 0.0;
    for (const Real x : values) {
        most = std::max(most, std::abs(static_cast<double>(x)));
    }
    return most;
}

/// Weights that +- 2^-8 leaves exact in fp32.
void quantize(std::vector<float>& values) {
    for (float& x : values) {
        x = std::nearbyint(x * 4096.0f) / 4096.0f;
    }
}

/// Every array of the scorer and the inputs, a few entries each, against differences of `loss()`.
template <class S, class Loss>
void check_against_differences(const S& scorer, const Result<S, double>& got, test::Tensor<double>& k,
                               test::Tensor<double>& v, const Sequences& sequences, Loss&& loss) {
    std::size_t i = 0;
    auto weights = scorer.weights;
    for_each_parameter(
        scorer, weights, [&](const char* name, const float*& pointer, std::size_t count, bool) {
            const std::vector<double>& d = got.gradients.arrays[i++];
            if (pointer == nullptr || count == 0) {
                return;
            }
            CAPTURE(name);
            // Without a soft cap b_i cancels in every quotient: its gradient is 0, and rounding is what is
            // left.
            const double scale = std::max(largest(d), 1e-6);
            const std::size_t stride = count > 7 ? count / 7 + 1 : 1;
            for (std::size_t at = 0; at < count; at += stride) {
                float* x = const_cast<float*>(pointer) + at;
                const double slope = test::difference(
                    static_cast<double>(*x), 0x1p-8, [&](double to) { *x = static_cast<float>(to); }, loss);
                CAPTURE(at);
                CAPTURE(d[at]);
                CAPTURE(slope);
                CHECK(test::relative(d[at], slope, scale) < 1e-6);
            }
        });
    const auto check_rows = [&](test::Tensor<double>& x, const test::Tensor<double>& d) {
        double scale = 0.0;
        for (const double y : d.data) {
            scale = std::max(scale, y == -3.0 ? 0.0 : std::abs(y));
        }
        for (std::int32_t h = 0; h < x.heads; ++h) {
            const std::int32_t length = sequences.length_of(0);
            for (std::int32_t t = 0; t < length; t += length / 9 + 1) {
                double& one = x.view().row(0, h, t)[(t * 5 + h) % x.dim];
                const double slope = test::difference(
                    one, 0x1p-8, [&](double to) { one = to; }, loss);
                CAPTURE(t);
                CAPTURE(h);
                CHECK(test::relative(d.view().row(0, h, t)[(t * 5 + h) % x.dim], slope, scale) < 1e-6);
            }
            if (length < x.length) {
                CHECK(d.view().row(0, h, length)[0] == -3.0);
            }
        }
    };
    check_rows(k, got.d_k);
    check_rows(v, got.d_v);
}

// ---- mLSTM ------------------------------------------------------------------------------------------------

/// score[h][t] as the sums that the recurrence stands for (KVpop, E.3 and E.4), NaN where a key never leaves.
template <class S>
std::vector<double> mlstm_reference(const S& s, const test::mlstm_case& c, const test::Tensor<double>& k,
                                    const test::Tensor<double>& v, double* least = nullptr) {
    const std::int32_t inputs = c.head_dim_qk + c.head_dim_vo, features = c.d_qk, half = c.d_qk / 2;
    const std::int32_t rows = c.hedgehog ? half : features;
    std::vector<double> scores(static_cast<std::size_t>(c.heads * c.length), std::nan(""));
    for (std::int32_t h = 0; h < c.heads; ++h) {
        const auto x = [&](std::int32_t t, std::int32_t i) {
            return i < c.head_dim_qk ? k.view().row(0, h, t)[i] : v.view().row(0, h, t)[i - c.head_dim_qk];
        };
        const auto times = [&](const float* w, std::int32_t r, std::int32_t t) {
            double sum = 0.0;
            for (std::int32_t i = 0; i < inputs; ++i) {
                sum += static_cast<double>(w[r * inputs + i]) * x(t, i);
            }
            return sum;
        };
        const auto phi = [&](const float* w, std::int32_t t) {
            std::vector<double> y(static_cast<std::size_t>(features));
            for (std::int32_t part = 0; part < (c.hedgehog ? 2 : 1); ++part) {
                double sum = 0.0;
                for (std::int32_t r = 0; r < rows; ++r) {
                    double& one = y[static_cast<std::size_t>(std::int64_t{part} * rows + r)];
                    one =
                        std::exp((part == 0 ? 1.0 : -1.0) * times(w + std::int64_t{h} * rows * inputs, r, t));
                    sum += one;
                }
                for (std::int32_t r = 0; r < rows; ++r) {
                    y[static_cast<std::size_t>(std::int64_t{part} * rows + r)] /= sum;
                }
            }
            return y;
        };
        std::vector<std::vector<double>> q, key, value;
        std::vector<double> log_i, log_f;
        for (std::int32_t t = 0; t < c.length; ++t) {
            q.push_back(phi(s.weights.w_q, t));
            key.push_back(phi(s.weights.w_k, t));
            std::vector<double> one;
            for (std::int32_t e = 0; e < c.d_v; ++e) {
                one.push_back(c.projected ? times(s.weights.w_v + std::int64_t{h} * c.d_v * inputs, e, t)
                                          : v.view().row(0, h, t)[e]);
            }
            value.push_back(one);
            const double cap = static_cast<double>(c.gate_softcap);
            const auto gate = [&](const float* w, const float* b) {
                const double a = times(w + std::int64_t{h} * inputs, 0, t) +
                                 (b != nullptr ? static_cast<double>(b[h]) : 0.0);
                return cap > 0.0 ? cap * std::tanh(a / cap) : a;
            };
            log_i.push_back(gate(s.weights.w_i, s.weights.b_i));
            log_f.push_back(-std::log1p(std::exp(-gate(s.weights.w_f, s.weights.b_f))));
        }
        const std::vector<std::int32_t> edges = c.cu.empty() ? std::vector<std::int32_t>{0, c.length} : c.cu;
        for (std::size_t part = 0; part + 1 < edges.size(); ++part) {
            for (std::int32_t last = edges[part] + c.delay; last < edges[part + 1]; ++last) {
                const auto u = static_cast<std::size_t>(last - c.delay);
                std::vector<double> exponent(static_cast<std::size_t>(last - edges[part] + 1));
                double forgotten = 0.0, most = -1e300;
                for (std::int32_t j = last; j >= edges[part]; --j) {
                    const auto at = static_cast<std::size_t>(j);
                    exponent[at - static_cast<std::size_t>(edges[part])] = log_i[at] + forgotten;
                    most = std::max(most, log_i[at] + forgotten);
                    forgotten += log_f[at];
                }
                std::vector<double> read(static_cast<std::size_t>(c.d_v), 0.0);
                double divisor = 0.0;
                for (std::int32_t j = edges[part]; j <= last; ++j) {
                    const auto at = static_cast<std::size_t>(j);
                    double weight = 0.0;
                    for (std::size_t i = 0; i < q[u].size(); ++i) {
                        weight += q[u][i] * key[at][i];
                    }
                    weight *= std::exp(exponent[at - static_cast<std::size_t>(edges[part])] - most);
                    divisor += weight;
                    for (std::size_t e = 0; e < read.size(); ++e) {
                        read[e] += weight * value[at][e];
                    }
                }
                if (least != nullptr) {
                    *least = std::min(*least, divisor);
                }
                double mean = 0.0, mean_square = 0.0, score = 0.0;
                for (double& e : read) {
                    e /= std::max(divisor, 1e-30);
                    mean += c.norm == 2 ? e / c.d_v : 0.0;
                }
                for (double& e : read) {
                    e -= mean;
                    mean_square += e * e / c.d_v;
                }
                for (std::int32_t e = 0; e < c.d_v; ++e) {
                    double one = read[static_cast<std::size_t>(e)];
                    if (c.norm != 0) {
                        one *= static_cast<double>(s.weights.norm_gain[h * c.d_v + e]) /
                               std::sqrt(mean_square + 1e-6);
                    }
                    score += static_cast<double>(s.weights.readout[h * c.d_v + e]) * silu(one);
                }
                if (c.biases) {
                    score += static_cast<double>(s.weights.readout_bias[h]);
                }
                if (c.skip) {
                    score += times(s.weights.skip + h * inputs, 0, last - c.delay);
                }
                scores[static_cast<std::size_t>(h * c.length + last - c.delay)] = score;
            }
        }
    }
    return scores;
}

struct mlstm_inputs {
    test::Tensor<double> k, v;
    test::Plane<double> d;
    explicit mlstm_inputs(const test::mlstm_case& c, unsigned seed)
        : k(1, c.heads, c.length, c.head_dim_qk),
          v(1, c.heads, c.length, c.head_dim_vo),
          d(1, c.heads, c.length) {
        std::mt19937 generator(seed);
        k.fill_normal(generator, c.value_scale);
        v.fill_normal(generator, c.value_scale);
        test::Normal<double> normal;
        for (double& x : d.data) {
            x = normal(generator);
        }
        // Where no score is written, nobody looks.
        const std::vector<std::int32_t> edges = c.cu.empty() ? std::vector<std::int32_t>{0, c.length} : c.cu;
        for (std::int32_t h = 0; h < c.heads; ++h) {
            for (std::size_t i = 1; i < edges.size(); ++i) {
                for (std::int32_t t = std::max(edges[i - 1], edges[i] - c.delay); t < edges[i]; ++t) {
                    d.at(0, h, t) = std::nan("");
                }
            }
        }
    }
};

test::mlstm_weights mlstm_weights_of(const test::mlstm_case& c) {
    test::mlstm_weights weights(c);
    for (std::vector<float>* array :
         {&weights.w_q, &weights.w_k, &weights.w_v, &weights.w_i, &weights.b_i, &weights.w_f, &weights.b_f,
          &weights.norm_gain, &weights.readout, &weights.readout_bias, &weights.skip}) {
        quantize(*array);
    }
    return weights;
}

std::vector<test::mlstm_case> mlstm_cases() {
    test::mlstm_case base;
    base.weight_scale = 0.5f;
    base.value_scale = 0.5f;
    std::vector<test::mlstm_case> all(11, base);
    all[1].hedgehog = false, all[1].norm = true, all[1].skip = true;
    all[2].projected = false, all[2].d_v = 16, all[2].norm = true;
    all[3].hedgehog = false, all[3].projected = false, all[3].d_v = 16, all[3].gate_softcap = 2.0f;
    all[4].delay = 0, all[4].length = 70, all[4].skip = true, all[4].biases = false;
    all[5].delay = 100, all[5].gate_softcap = 1.5f;
    all[6].cu = {0, 40, 45, 150}, all[6].norm = true;
    all[7].head_dim_qk = 5, all[7].head_dim_vo = 7, all[7].d_qk = 6, all[7].d_v = 3, all[7].input_bias = 8.0f,
    all[7].forget_bias = 0.0f;
    all[8].length = 9, all[8].delay = 10;  // nothing leaves
    all[9].norm = 2, all[9].skip = true;
    all[10].hedgehog = false, all[10].projected = false, all[10].d_v = 16, all[10].norm = 2,
    all[10].length = 70;
    for (std::size_t i = 0; i < all.size(); ++i) {
        all[i].seed = static_cast<std::int32_t>(i) + 3;
    }
    return all;
}

// ---- MLP and linear ---------------------------------------------------------------------------------------

struct SharedInput : KeyValueInput {
    static constexpr bool per_head = false;
};

template <class S>
struct stateless_case {
    std::vector<float> w1, b1, w2, b2;
    S scorer;
};

template <class S>
stateless_case<S> mlp_case(std::int32_t heads, std::int32_t head_dim_qk, std::int32_t head_dim_vo,
                           std::int32_t hidden, std::int32_t layers) {
    stateless_case<S> c;
    const std::int32_t inputs = head_dim_qk + head_dim_vo;
    c.w1 = test::draw(1, test::array::w1, std::int64_t{layers} * hidden * inputs, 0.5f);
    c.b1 = test::draw(1, test::array::b1, std::int64_t{layers} * hidden, 1.0f);
    c.w2 = test::draw(1, test::array::w2, std::int64_t{heads} * hidden, 1.0f);
    c.b2 = test::draw(1, test::array::b2, heads, 1.0f);
    for (std::vector<float>* array : {&c.w1, &c.b1, &c.w2, &c.b2}) {
        quantize(*array);
    }
    c.scorer.heads = heads, c.scorer.head_dim_qk = head_dim_qk, c.scorer.head_dim_vo = head_dim_vo,
    c.scorer.hidden = hidden;
    c.scorer.weights = {c.w1.data(), c.b1.data(), c.w2.data(), c.b2.data()};
    return c;
}

template <class S, class Act>
void check_mlp(bool shared, bool normalized, Act&& act) {
    const host ctx{2};
    const std::int32_t heads = 2, head_dim_qk = 10, head_dim_vo = 6, hidden = 21, length = 80;
    auto c = mlp_case<S>(heads, head_dim_qk, head_dim_vo, hidden, shared ? 1 : heads);
    std::mt19937 generator(4);
    test::Tensor<double> k(2, heads, length, head_dim_qk), v(2, heads, length, head_dim_vo);
    k.fill_normal(generator);
    v.fill_normal(generator);
    test::Plane<double> d(2, heads, length);
    test::Normal<double> normal;
    for (double& x : d.data) {
        x = normal(generator);
    }
    const std::vector<std::int32_t> lengths{71, 80};
    const Sequences sequences{.batch = 2, .length = length, .lengths = lengths.data()};
    const auto loss = [&] {
        double sum = 0.0;
        for (std::int32_t b = 0; b < 2; ++b) {
            for (std::int32_t h = 0; h < heads; ++h) {
                for (std::int32_t t = 0; t < lengths[static_cast<std::size_t>(b)]; ++t) {
                    const double* halves[] = {k.view().row(b, h, t), v.view().row(b, h, t)};
                    std::vector<double> x;
                    for (int half = 0; half < 2; ++half) {
                        const std::int32_t dim = half == 0 ? head_dim_qk : head_dim_vo;
                        double squares = 0.0;
                        for (std::int32_t i = 0; i < dim; ++i) {
                            squares += halves[half][i] * halves[half][i] / dim;
                        }
                        for (std::int32_t i = 0; i < dim; ++i) {
                            x.push_back(halves[half][i] /
                                        (normalized ? std::sqrt(squares + static_cast<double>(1e-6f)) : 1.0));
                        }
                    }
                    double score = static_cast<double>(c.b2[static_cast<std::size_t>(h)]);
                    const std::int32_t layer = shared ? 0 : h;
                    for (std::int32_t r = 0; r < hidden; ++r) {
                        const auto row = static_cast<std::size_t>(std::int64_t{layer} * hidden + r);
                        double y = static_cast<double>(c.b1[row]);
                        for (std::size_t i = 0; i < x.size(); ++i) {
                            y += static_cast<double>(c.w1[row * x.size() + i]) * x[i];
                        }
                        score += static_cast<double>(
                                     c.w2[static_cast<std::size_t>(std::int64_t{h} * hidden + r)]) *
                                 act(y);
                    }
                    sum += score * d.view().head(b, h)[t];
                }
            }
        }
        return sum;
    };
    const auto got = run_backward<double>(ctx, c.scorer, k, v, sequences, 0, d);
    check_against_differences(c.scorer, got, k, v, sequences, loss);
}

}  // namespace

TEST_CASE("mLSTM: gradients of weights and inputs by differences of the written-out sums") {
    const host ctx{2};
    for (const test::mlstm_case& c : mlstm_cases()) {
        CAPTURE(c.name());
        const test::mlstm_weights weights = mlstm_weights_of(c);
        test::with_mlstm(weights, [&](const auto& scorer) {
            mlstm_inputs in(c, static_cast<unsigned>(c.seed));
            const auto loss = [&] {
                const std::vector<double> scores = mlstm_reference(scorer, c, in.k, in.v);
                double sum = 0.0;
                for (std::size_t i = 0; i < scores.size(); ++i) {
                    sum += std::isnan(scores[i]) ? 0.0 : scores[i] * in.d.data[i];
                }
                return sum;
            };
            const auto got = run_backward<double>(ctx, scorer, in.k, in.v, c.sequences(), c.delay, in.d);
            if (c.length <= c.delay) {
                for (const auto& array : got.gradients.arrays) {
                    CHECK(largest(array) == 0.0);
                }
                CHECK(largest(got.d_k.data) == 0.0);
                return;
            }
            // The reference is the library's function.
            const std::vector<double> ours = test::score_all<std::decay_t<decltype(scorer)>, double>(
                ctx, scorer, std::as_const(in.k).view(), std::as_const(in.v).view(), c.sequences(), c.delay,
                form::recurrent, 0.0);
            const std::vector<double> written = mlstm_reference(scorer, c, in.k, in.v);
            for (std::size_t i = 0; i < written.size(); ++i) {
                if (!std::isnan(written[i])) {
                    CHECK(std::abs(ours[i] - written[i]) < 1e-10);
                }
            }
            check_against_differences(scorer, got, in.k, in.v, c.sequences(), loss);
        });
    }
}

TEST_CASE("mLSTM: fp32 gradients are those of double to rounding, on any threads and instruction set") {
    constexpr std::int32_t length = test::rounds(300, 135);  // several chunks
    test::mlstm_case c;
    c.norm = true, c.skip = true, c.gate_softcap = 5.0f, c.length = length, c.heads = 3,
    c.weight_scale = 0.5f, c.seed = 40;
    const test::mlstm_weights weights = mlstm_weights_of(c);
    const auto scorer = weights.scorer<mLSTMScorer<dynamic, Hedgehog, ProjectedValues>>();
    const mlstm_inputs in(c, 9);
    test::Tensor<float> k(1, 3, length, 16), v(1, 3, length, 16);
    test::Plane<float> d(1, 3, length);
    for (std::size_t i = 0; i < k.data.size(); ++i) {
        k.data[i] = static_cast<float>(in.k.data[i]);
    }
    for (std::size_t i = 0; i < v.data.size(); ++i) {
        v.data[i] = static_cast<float>(in.v.data[i]);
    }
    test::mlstm_case same = c;
    mlstm_inputs exact(same, 9);
    for (std::size_t i = 0; i < d.data.size(); ++i) {
        d.data[i] = static_cast<float>(in.d.data[i]);
        exact.d.data[i] = static_cast<double>(d.data[i]);
    }
    const auto expected =
        run_backward<double>(host{1}, scorer, exact.k, exact.v, c.sequences(), c.delay, exact.d);
    const auto got = run_backward<float>(host{1}, scorer, k, v, c.sequences(), c.delay, d);
    // A gradient is a sum of at most 300 terms, each through about 10 roundings of sums of up to 300 numbers
    // that do not cancel to less than a hundredth: 2^-24 * 300 * 10 / 100 of the largest entry is 2e-6; 10 of
    // it for the gates' sums.
    for (std::size_t i = 0; i < got.gradients.arrays.size(); ++i) {
        CAPTURE(got.gradients.names[i]);
        const double scale = largest(expected.gradients.arrays[i]);
        for (std::size_t j = 0; j < got.gradients.arrays[i].size(); ++j) {
            CHECK(test::relative(static_cast<double>(got.gradients.arrays[i][j]),
                                 expected.gradients.arrays[i][j], scale) < 2e-5);
        }
    }
    for (std::size_t i = 0; i < got.d_k.data.size(); ++i) {
        CHECK(test::relative(static_cast<double>(got.d_k.data[i]), expected.d_k.data[i],
                             largest(expected.d_k.data)) < 2e-5);
        CHECK(test::relative(static_cast<double>(got.d_v.data[i]), expected.d_v.data[i],
                             largest(expected.d_v.data)) < 2e-5);
    }
    for (const int threads : {2, 3}) {
        const auto again = run_backward<float>(host{threads}, scorer, k, v, c.sequences(), c.delay, d);
        const auto plain =
            run_backward<float>(host{threads, isa::portable}, scorer, k, v, c.sequences(), c.delay, d);
        for (std::size_t i = 0; i < got.gradients.arrays.size(); ++i) {
            CHECK(test::same_bits(again.gradients.arrays[i], got.gradients.arrays[i]));
            CHECK(test::same_bits(plain.gradients.arrays[i], got.gradients.arrays[i]));
        }
        CHECK(test::same_bits(again.d_k.data, got.d_k.data));
    }
}

TEST_CASE("mLSTM: where the divisor's clamp acts, gradients stay finite and those of values exact") {
    test::mlstm_case c;
    c.weight_scale = 40.0f, c.length = 90, c.delay = 3, c.seed = 50, c.d_qk = 32;
    const test::mlstm_weights weights = mlstm_weights_of(c);
    const auto scorer = weights.scorer<mLSTMScorer<dynamic, Hedgehog, ProjectedValues>>();
    mlstm_inputs in(c, 2);
    const auto got = run_backward<double>(host{1}, scorer, in.k, in.v, c.sequences(), c.delay, in.d);
    for (const auto& array : got.gradients.arrays) {
        CHECK(std::all_of(array.begin(), array.end(), [](double x) { return std::isfinite(x); }));
    }
    double least = 1.0;
    mlstm_reference(scorer, c, in.k, in.v, &least);
    CHECK(least < 1e-30);
    const std::vector<double>& d = got.gradients.arrays[2];
    for (std::size_t at = 0; at < d.size(); at += test::rounds(37, 397)) {
        float* x = const_cast<float*>(scorer.weights.w_v) + at;
        const double slope = test::difference(
            static_cast<double>(*x), 0x1p-8, [&](double to) { *x = static_cast<float>(to); },
            [&] {
                const std::vector<double> scores = mlstm_reference(scorer, c, in.k, in.v);
                double sum = 0.0;
                for (std::size_t i = 0; i < scores.size(); ++i) {
                    sum += std::isnan(scores[i]) ? 0.0 : scores[i] * in.d.data[i];
                }
                return sum;
            });
        CHECK(test::relative(d[at], slope, largest(d)) < 1e-6);
    }
}

// Softmax features of unit-normal projections are so peaked that q~ . z is far below 1e-6 in the stabilized
// frame. All its terms are positive, so their sum is exact to rounding, and so are h and its gradients.
TEST_CASE("mLSTM: peaked features have eq. 41's scores and gradients, in double and in fp32") {
    test::mlstm_case c;
    c.hedgehog = false, c.head_dim_qk = 32, c.head_dim_vo = 32, c.d_qk = 32, c.d_v = 16, c.length = 90,
    c.delay = 4, c.heads = 1, c.forget_bias = -2.0f, c.seed = 60;
    test::mlstm_weights weights(c);
    std::mt19937 generator(12);
    std::normal_distribution<float> normal;
    for (std::vector<float>* array : {&weights.w_q, &weights.w_k}) {
        for (float& w : *array) {
            w = normal(generator);
        }
        quantize(*array);
    }
    const auto scorer = weights.scorer<mLSTMScorer<dynamic, Softmax, ProjectedValues>>();
    const mlstm_inputs in(c, 13);
    double least = 1.0;
    const std::vector<double> exact = mlstm_reference(scorer, c, in.k, in.v, &least);
    CHECK(least > 1e-30);
    CHECK(least < 1e-7);
    test::Tensor<float> k(1, 1, c.length, 32), v(1, 1, c.length, 32);
    test::Plane<float> d(1, 1, c.length);
    test::Plane<double> d_exact(1, 1, c.length);
    for (std::size_t i = 0; i < k.data.size(); ++i) {
        k.data[i] = static_cast<float>(in.k.data[i]);
        v.data[i] = static_cast<float>(in.v.data[i]);
    }
    for (std::size_t i = 0; i < d.data.size(); ++i) {
        d.data[i] = static_cast<float>(in.d.data[i]);
        d_exact.data[i] = static_cast<double>(d.data[i]);
    }
    // |y| < 40 is a sum of 64 products, off by at most 64 * 40 * 2^-24 / 4 = 4e-5 and mostly by a tenth: it
    // is the relative error of a feature. Of q~ and k~ together, against values that differ by up to 4.
    constexpr double fp32 = 1e-4;
    for (const form how : {form::recurrent, form::chunkwise}) {
        const auto of_double = test::score_all<decltype(scorer), double>(
            host{1}, scorer, in.k.view(), in.v.view(), c.sequences(), c.delay, how, 0.0);
        const auto of_float = test::score_all<decltype(scorer), float>(host{1}, scorer, k.view(), v.view(),
                                                                       c.sequences(), c.delay, how, 0.0f);
        for (std::size_t t = 0; t + 4 < exact.size(); ++t) {
            CHECK(std::abs(of_double[t] - exact[t]) < 1e-10 * (1.0 + std::abs(exact[t])));
            CHECK(std::abs(static_cast<double>(of_float[t]) - exact[t]) < fp32 * (1.0 + std::abs(exact[t])));
        }
    }
    const auto loss = [&] {
        const std::vector<double> scores = mlstm_reference(scorer, c, in.k, in.v);
        double sum = 0.0;
        for (std::size_t i = 0; i < scores.size(); ++i) {
            sum += std::isnan(scores[i]) ? 0.0 : scores[i] * d_exact.data[i];
        }
        return sum;
    };
    const auto got = run_backward<double>(host{1}, scorer, in.k, in.v, c.sequences(), c.delay, d_exact);
    const auto of_float = run_backward<float>(host{1}, scorer, k, v, c.sequences(), c.delay, d);
    for (const std::size_t array : {0u, 1u, 2u}) {  // w_q, w_k, w_v
        CAPTURE(got.gradients.names[array]);
        const std::vector<double>& d_w = got.gradients.arrays[array];
        float* const w = const_cast<float*>(array == 0   ? scorer.weights.w_q
                                            : array == 1 ? scorer.weights.w_k
                                                         : scorer.weights.w_v);
        for (std::size_t at = 3; at < d_w.size(); at += test::rounds(97, 397)) {
            const double slope = test::difference(
                static_cast<double>(w[at]), 0x1p-8, [&](double to) { w[at] = static_cast<float>(to); }, loss);
            CHECK(test::relative(d_w[at], slope, largest(d_w)) < 1e-6);
        }
        for (std::size_t at = 0; at < d_w.size(); ++at) {
            CHECK(test::relative(static_cast<double>(of_float.gradients.arrays[array][at]), d_w[at],
                                 largest(d_w)) < fp32);
        }
    }
}

TEST_CASE("mLSTM: the LayerNorm of a constant read is 0, its RMS norm the gain") {
    // One feature: h is the mean of the values, which are all (2, 2).
    mLSTMScorer<dynamic, Softmax, DirectValues> scorer;
    scorer.heads = 1, scorer.head_dim_qk = 1, scorer.head_dim_vo = 2, scorer.d_qk = 1;
    const float zeros[3] = {}, ones[2] = {1.0f, 1.0f}, gain[2] = {1.0f, 1.0f};
    scorer.weights.w_q = scorer.weights.w_k = scorer.weights.w_i = scorer.weights.w_f = zeros;
    scorer.weights.readout = ones;
    scorer.weights.norm_gain = gain;
    const double k[3] = {1.0, -2.0, 0.5}, v[6] = {2.0, 2.0, 2.0, 2.0, 2.0, 2.0};
    const Sequences sequences{1, 3};
    for (const form how : {form::recurrent, form::chunkwise}) {
        for (const mlstm_norm norm : {mlstm_norm::rms, mlstm_norm::layer}) {
            scorer.norm = norm;
            const auto scores = test::score_all<decltype(scorer), double>(
                host{1}, scorer, view_bhsd(k, 1, 1, 3, 1), view_bhsd(v, 1, 1, 3, 2), sequences, 0, how, 7.0);
            // 2 / sqrt(4 + 1e-6), twice SiLU of it
            const double normed = norm == mlstm_norm::rms ? 2.0 / std::sqrt(4.0 + 1e-6) : 0.0;
            for (const double score : scores) {
                CHECK(std::abs(score - 2.0 * silu(normed)) < 1e-12);
            }
        }
    }
}

TEST_CASE("linear and MLP scorers: gradients by differences") {
    check_mlp<BasicMlpScorer<KeyValueInput, Silu>>(false, false, silu);
    check_mlp<BasicMlpScorer<KeyValueInput, GeluErf>>(false, false, gelu);
    check_mlp<BasicMlpScorer<NormalizedInput, GeluErf>>(false, true, gelu);
    check_mlp<BasicMlpScorer<SharedInput, Silu>>(true, false, silu);

    const host ctx{2};
    std::mt19937 generator(6);
    test::Tensor<double> k(1, 2, 70, 5), v(1, 2, 70, 3);
    k.fill_normal(generator);
    v.fill_normal(generator);
    test::Plane<double> d(1, 2, 70);
    test::Normal<double> normal;
    for (double& x : d.data) {
        x = normal(generator);
    }
    std::vector<float> weight = test::draw(1, test::array::w2, 16, 1.0f),
                       bias = test::draw(1, test::array::b2, 2, 1.0f);
    LinearScorer<> scorer;
    scorer.heads = 2, scorer.head_dim_qk = 5, scorer.head_dim_vo = 3;
    scorer.weights = {weight.data(), bias.data()};
    const Sequences sequences{.batch = 1, .length = 66};
    const auto got = run_backward<double>(ctx, scorer, k, v, sequences, 0, d);
    for (std::int32_t h = 0; h < 2; ++h) {
        double sum = 0.0;
        std::vector<double> x(8, 0.0);
        for (std::int32_t t = 0; t < 66; ++t) {
            sum += d.at(0, h, t);
            for (std::int32_t i = 0; i < 8; ++i) {
                x[static_cast<std::size_t>(i)] +=
                    d.at(0, h, t) * (i < 5 ? k.view().row(0, h, t)[i] : v.view().row(0, h, t)[i - 5]);
            }
            CHECK(got.d_v.view().row(0, h, t)[1] ==
                  d.at(0, h, t) * static_cast<double>(weight[static_cast<std::size_t>(h * 8 + 6)]));
        }
        CHECK(got.gradients.arrays[1][static_cast<std::size_t>(h)] == doctest::Approx(sum).epsilon(1e-12));
        for (std::size_t i = 0; i < 8; ++i) {
            CHECK(std::abs(got.gradients.arrays[0][static_cast<std::size_t>(h) * 8 + i] - x[i]) < 1e-12);
        }
    }
}

TEST_CASE("backward adds to parameters, leaves out null arrays, and takes bf16 rows") {
    const host ctx{2};
    auto c = mlp_case<MlpScorer<>>(2, 8, 8, 16, 2);
    std::mt19937 generator(7);
    test::Tensor<bf16> k(1, 2, 100, 8), v(1, 2, 100, 8);
    k.fill_normal(generator);
    v.fill_normal(generator);
    test::Plane<float> d(1, 2, 100, 0.5f);
    const test::Tensor<bf16>&ck = k, &cv = v;
    const test::Plane<float>& cd = d;
    const ScoreBackward<bf16> call{ck.view(), cv.view(), {.batch = 1, .length = 100}, 0, cd.view()};
    test::Workspace workspace(score_sequence_backward_workspace_bytes(ctx, c.scorer, call));
    Gradients<MlpScorer<>, float> once(c.scorer), twice(c.scorer);
    score_sequence_backward(ctx, c.scorer, call, once.views, workspace);
    twice.views.b1 = nullptr;
    score_sequence_backward(ctx, c.scorer, call, twice.views, workspace);
    score_sequence_backward(ctx, c.scorer, call, twice.views, workspace);
    CHECK(largest(twice.arrays[1]) == 0.0);
    for (std::size_t i = 0; i < once.arrays[0].size(); ++i) {
        CHECK(twice.arrays[0][i] == doctest::Approx(2.0f * once.arrays[0][i]).epsilon(1e-4));
    }
    CHECK(once.arrays[3][0] == 50.0f);
}

TEST_CASE("score_sequence_backward refuses what it cannot mean") {
    const host ctx{1};
    test::mlstm_case c;
    c.length = 30;
    const test::mlstm_weights weights(c);
    auto scorer = weights.scorer<mLSTMScorer<>>();
    mlstm_inputs in(c, 1);
    const auto call = [&] {
        return run_backward<double>(ctx, scorer, in.k, in.v, c.sequences(), c.delay, in.d, false);
    };
    call();
    in.k.view().row(0, 1, 7)[3] = std::nan("");
    CHECK_REFUSED(call(), "k[0][1][7]: NaN or infinite");
    in.k.view().row(0, 1, 7)[3] = 0.0;
    in.v.view().row(0, 0, 29)[3] = HUGE_VAL;
    CHECK_REFUSED(call(), "v[0][0][29]: NaN or infinite");
    in.v.view().row(0, 0, 29)[3] = 0.0;
    in.d.at(0, 1, 19) = std::nan("");
    CHECK_REFUSED(call(), "d_scores[0][1][19]: nan");
    in.d.at(0, 1, 19) = 0.0;
    const std::int32_t starts[] = {3};
    const auto started = [&] {
        return run_backward<double>(ctx, scorer, in.k, in.v, {.batch = 1, .length = 20, .starts = starts},
                                    c.delay, in.d, false);
    };
    CHECK_REFUSED(started(), "sequences.starts[0]: 3");
    scorer.heads = 3;
    CHECK_REFUSED(call(), "heads: 3");
    scorer.heads = 2;
    Gradients<mLSTMScorer<>, double> gradients(scorer);
    const test::mlstm_case& same = c;
    const mlstm_inputs& given = in;
    const ScoreBackward<double> arguments{given.k.view(), given.v.view(), same.sequences(), c.delay,
                                          given.d.view()};
    CHECK_REFUSED(score_sequence_backward(ctx, scorer, arguments, gradients.views, {}), "workspace.bytes: 0");
    ScoreBackward<double> half = arguments;
    half.d_k = in.k.view();
    CHECK_REFUSED(score_sequence_backward(ctx, scorer, half, gradients.views, {}), "d_v.data: null");
}
