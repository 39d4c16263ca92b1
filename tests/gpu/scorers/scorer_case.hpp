// One call of a scorer on the device beside the host's in double: what is drawn, what is run,
// what may differ.
#pragma once

#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/sequence.hpp>

#include "../support/device.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

namespace scorer_test {

using namespace kvpolicy;
using test::Device;

inline constexpr double untouched = -77.0;

template <class T>
T stored(double x) {
    if constexpr (std::is_same_v<T, double>) {
        return x;
    } else {
        return static_cast<T>(static_cast<float>(x));
    }
}

/// A call. Empty vectors: not given.
struct Case {
    std::string name;
    std::int32_t batch = 1, heads = 2, length = 150, head_dim_qk = 64, head_dim_vo = 64, delay = 0;
    std::int32_t rows = 0;  // of the views; 0: the length
    std::vector<std::int32_t> lengths, starts, edges;
    bool interleaved = false;  // [batch, length, heads, dim], with a gap after every row
    double spread = 1.0;
    double gradient_spread = 1.0;  // of the gradients of scores
    unsigned seed = 1;
    Dropout dropout;
    bool with_inputs = true;  // gradients of keys and values are wanted
    // Above 0: gradients of forget gates may be off by as much of what so many parts of the reads have in the
    // root of the sum of squares, where that is more than what they add up to.
    std::int32_t parts = 0;
    double kept = 0.0;  // above 0: how many of the best tenth of keys must be the host's; the share is told
    std::function<void(std::vector<double>& k, std::vector<double>& v)> edit;  // [B][H][S][D]

    [[nodiscard]] std::int32_t all_rows() const { return rows == 0 ? length : rows; }
    [[nodiscard]] std::int64_t plane() const { return std::int64_t{batch} * heads * all_rows(); }
    [[nodiscard]] Sequences sequences(const std::int32_t* l, const std::int32_t* s,
                                      const std::int32_t* e) const {
        Sequences all{batch, length, nullptr, nullptr, nullptr, 0};
        all.lengths = lengths.empty() ? nullptr : l;
        all.starts = starts.empty() ? nullptr : s;
        all.cu_seqlens = edges.empty() ? nullptr : e;
        all.segments = edges.empty() ? 0 : static_cast<std::int32_t>(edges.size()) - 1;
        return all;
    }
    [[nodiscard]] Sequences on_host() const { return sequences(lengths.data(), starts.data(), edges.data()); }
};

/// Rows on the device, in the case's layout; what lies between rows is NaN.
template <class T>
struct Rows {
    Device<T> memory;
    rows_view<T> view;

    static rows_view<T> view_of(const Case& c, T* data, std::int32_t dim) {
        if (!c.interleaved) {
            return view_bhsd(data, c.batch, c.heads, c.all_rows(), dim);
        }
        const std::int64_t row = dim + 8;
        return {data, c.batch, c.heads, c.all_rows(), dim, row * c.heads * c.all_rows(), row, row * c.heads};
    }
    static std::vector<T> spread(const Case& c, const std::vector<double>& values, std::int32_t dim) {
        std::vector<T> data(static_cast<std::size_t>(c.plane() * (c.interleaved ? dim + 8 : dim)),
                            stored<T>(std::numeric_limits<double>::quiet_NaN()));
        const rows_view<T> to = view_of(c, data.data(), dim);
        std::size_t i = 0;
        for (std::int32_t b = 0; b < c.batch; ++b) {
            for (std::int32_t h = 0; h < c.heads; ++h) {
                for (std::int32_t t = 0; t < c.all_rows(); ++t) {
                    for (std::int32_t d = 0; d < dim; ++d) {
                        to.row(b, h, t)[d] = stored<T>(values[i++]);
                    }
                }
            }
        }
        return data;
    }
    Rows(const Case& c, const std::vector<double>& values, std::int32_t dim)
        : memory(spread(c, values, dim)), view(view_of(c, memory.data(), dim)) {}

    /// As [B][H][S][D], in double.
    [[nodiscard]] std::vector<double> read(const Case& c) const {
        std::vector<T> data = memory.read();
        rows_view<T> from = view;
        from.data = data.data();
        std::vector<double> values;
        for (std::int32_t b = 0; b < c.batch; ++b) {
            for (std::int32_t h = 0; h < c.heads; ++h) {
                for (std::int32_t t = 0; t < c.all_rows(); ++t) {
                    for (std::int32_t d = 0; d < view.dim; ++d) {
                        values.push_back(static_cast<double>(from.row(b, h, t)[d]));
                    }
                }
            }
        }
        return values;
    }
};

/// One array of a scorer's parameters.
struct Array {
    std::string name;
    std::vector<float> values;  // empty: left out
};

/// How arrays are drawn: the spread of each, around a mean. A negative spread leaves an optional array out.
struct Draw {
    double spread = 0.1, mean = 0.0;
};
using Drawing = std::function<Draw(const std::string& name)>;

/// Parameters with drawn weights, on both sides.
template <class S>
struct Weights {
    S scorer;  // without weights
    std::vector<Array> arrays;
    std::vector<std::unique_ptr<Device<float>>> memory;

    Weights(const S& shape, const Drawing& drawing, unsigned seed) : scorer(shape) {
        std::mt19937 generator(seed + 1000);
        auto none = shape.weights;
        for_each_parameter(
            shape, none, [&](const char* name, const float*, std::size_t count, bool optional) {
                const Draw how = drawing(name);
                std::normal_distribution<double> normal(how.mean, how.spread < 0.0 ? 1.0 : how.spread);
                arrays.push_back({name, {}});
                if (how.spread < 0.0 && optional) {
                    return;
                }
                for (std::size_t i = 0; i < count; ++i) {
                    arrays.back().values.push_back(static_cast<float>(normal(generator)));
                }
            });
        for (const Array& array : arrays) {
            memory.push_back(std::make_unique<Device<float>>(array.values));
        }
    }
    [[nodiscard]] S on_host() const {
        S bound = scorer;
        std::size_t i = 0;
        for_each_parameter(scorer, bound.weights, [&](const char*, const float*& pointer, std::size_t, bool) {
            pointer = arrays[i].values.empty() ? nullptr : arrays[i].values.data();
            ++i;
        });
        return bound;
    }
    [[nodiscard]] S on_device() const {
        S bound = scorer;
        std::size_t i = 0;
        for_each_parameter(scorer, bound.weights, [&](const char*, const float*& pointer, std::size_t, bool) {
            pointer = arrays[i].values.empty() ? nullptr : memory[i]->data();
            ++i;
        });
        return bound;
    }
};

/// Keys and values as drawn, rounded to T, in double; gradients of scores.
template <class T>
struct Inputs {
    std::vector<double> k, v, d_scores;

    explicit Inputs(const Case& c) {
        std::mt19937 generator(c.seed);
        std::normal_distribution<double> normal(0.0, 1.0);
        const auto fill = [&](std::vector<double>& to, std::int64_t count, double spread) {
            to.resize(static_cast<std::size_t>(count));
            for (double& x : to) {
                x = spread * normal(generator);
            }
        };
        fill(k, c.plane() * c.head_dim_qk, c.spread);
        fill(v, c.plane() * c.head_dim_vo, c.spread);
        fill(d_scores, c.plane(), c.gradient_spread);
        if (c.edit) {
            c.edit(k, v);
        }
        for (auto* all : {&k, &v}) {
            for (double& x : *all) {
                x = static_cast<double>(static_cast<compute_t<T>>(stored<T>(x)));
            }
        }
        for (double& x : d_scores) {
            x = static_cast<double>(static_cast<float>(x));
        }
    }
    [[nodiscard]] rows_view<const double> keys(const Case& c) const {
        return view_bhsd(k.data(), c.batch, c.heads, c.all_rows(), c.head_dim_qk);
    }
    [[nodiscard]] rows_view<const double> values(const Case& c) const {
        return view_bhsd(v.data(), c.batch, c.heads, c.all_rows(), c.head_dim_vo);
    }
};

inline const host& oracle() {
    static const host ctx(0);
    return ctx;
}

/// What a tensor may differ by, relative to its norm. Untouched and infinite entries must be so in both, NaN
/// must be NaN in both.
inline void compare(const std::string& what, const std::vector<double>& got,
                    const std::vector<double>& wanted, double tolerance, double absolute = 0.0) {
    REQUIRE(got.size() == wanted.size());
    double error = 0.0, size = 0.0, worst_error = -1.0;
    std::size_t bad = 0, first_bad = 0, worst = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        if (wanted[i] == untouched || !std::isfinite(wanted[i])) {
            const bool right = std::isnan(wanted[i]) ? std::isnan(got[i]) : got[i] == wanted[i];
            first_bad = right || bad > 0 ? first_bad : i;
            bad += right ? 0 : 1;
            continue;
        }
        const double e = std::fabs(got[i] - wanted[i]);
        error += e * e;
        size += wanted[i] * wanted[i];
        if (!(e <= worst_error)) {
            worst_error = e;
            worst = i;
        }
    }
    CHECK_MESSAGE(bad == 0, what, ": ", bad, " of ", got.size(), " bad, the first at ", first_bad, ": ",
                  bad == 0 ? 0.0 : got[first_bad], " for ", bad == 0 ? 0.0 : wanted[first_bad]);
    const double limit = tolerance * std::sqrt(size) + absolute * std::sqrt(static_cast<double>(got.size()));
    const double relative = size > 0.0 ? std::sqrt(error / size) : std::sqrt(error);
    if (std::getenv("KVPOLICY_TEST_SHOW") != nullptr) {
        MESSAGE(what, ": relative error ", relative, " of ", tolerance);
    }
    CHECK_MESSAGE(std::sqrt(error) <= limit, what, ": relative error ", relative, "; the worst at ", worst,
                  ": ", got.empty() ? 0.0 : got[worst], " for ", got.empty() ? 0.0 : wanted[worst]);
}

/// Of the tenth of every head's keys that have the largest scores, equal ones in their order: how
/// many are the same.
inline double kept_share(const std::vector<double>& got, const std::vector<double>& wanted,
                         std::int32_t length) {
    const auto n = static_cast<std::size_t>(length), best = n / 10;
    std::size_t same = 0;
    for (std::size_t plane = 0; plane < got.size(); plane += n) {
        const auto chosen = [&](const std::vector<double>& scores) {
            std::vector<std::size_t> order(n);
            std::iota(order.begin(), order.end(), plane);
            std::stable_sort(order.begin(), order.end(),
                             [&](std::size_t a, std::size_t b) { return scores[a] > scores[b]; });
            order.resize(best);
            std::sort(order.begin(), order.end());
            return order;
        };
        const std::vector<std::size_t> a = chosen(got), b = chosen(wanted);
        std::vector<std::size_t> both;
        std::set_intersection(a.begin(), a.end(), b.begin(), b.end(), std::back_inserter(both));
        same += both.size();
    }
    return static_cast<double>(same) / static_cast<double>(got.size() / n * best);
}

template <class From>
std::vector<double> widened(const std::vector<From>& from) {
    return {from.begin(), from.end()};
}

/// Relative tolerances of scores and of gradients; `floor` is what a score may be off by where its terms
/// cancel, in the root of the mean square.
struct Tolerance {
    double scores, gradients, floor = 0.0;
};

/// score_sequence on the device against the host's in double. `states`, where given, are continued
/// from and compared.
template <class T, class S>
void check_scores(const Case& c, const Weights<S>& weights, Tolerance allowed,
                  const std::vector<double>* states = nullptr, double state_tolerance = 0.0) {
    const Inputs<T> in(c);
    const auto size = static_cast<std::size_t>(c.plane());
    std::vector<double> wanted(size, untouched), wanted_states;
    BasicScoreOptions<double> options;
    options.dropout = c.dropout;
    if (states != nullptr) {
        wanted_states = *states;
        options.states = wanted_states.data();
    }
    std::vector<std::byte> memory(score_sequence_workspace_bytes(oracle(), weights.on_host(), in.keys(c),
                                                                 in.values(c), c.on_host(), options));
    score_sequence(oracle(), weights.on_host(), in.keys(c), in.values(c), c.on_host(), c.delay,
                   view_bhs(wanted.data(), c.batch, c.heads, c.all_rows()), {memory.data(), memory.size()},
                   options);

    const Rows<T> k(c, in.k, c.head_dim_qk), v(c, in.v, c.head_dim_vo);
    const Device<std::int32_t> lengths(c.lengths), starts(c.starts), edges(c.edges);
    const Sequences sequences = c.sequences(lengths.data(), starts.data(), edges.data());
    const Device<float> scores(std::vector<float>(size, static_cast<float>(untouched)));
    const Device<std::uint32_t> status(std::vector<std::uint32_t>(static_cast<std::size_t>(c.batch), 0u));
    ScoreOptions device_options;
    device_options.dropout = c.dropout;
    device_options.status = status.data();
    const Device<float> device_states(states != nullptr ? std::vector<float>(states->begin(), states->end())
                                                        : std::vector<float>());
    if (states != nullptr) {
        device_options.states = device_states.data();
    }
    const kvpolicy::cuda ctx{};
    const S scorer = weights.on_device();
    const Device<unsigned char> workspace(
        score_sequence_workspace_bytes(ctx, scorer, k.view, v.view, sequences, device_options));
    score_sequence(ctx, scorer, k.view, v.view, sequences, c.delay,
                   view_bhs(scores.data(), c.batch, c.heads, c.all_rows()), workspace, device_options);
    const std::vector<double> got = widened(scores.read());
    compare(c.name + ", scores", got, wanted, allowed.scores, allowed.floor);
    if (c.kept > 0.0) {
        const double share = kept_share(got, wanted, c.all_rows());
        MESSAGE(c.name, ": of the best tenth of keys ", share, " are the host's");
        CHECK(share >= c.kept);
    }
    for (const std::uint32_t word : status.read()) {
        CHECK_MESSAGE(word == 0u, c.name, ": status ", word);
    }
    if (states != nullptr) {
        compare(c.name + ", states", widened(device_states.read()), wanted_states, state_tolerance);
    }
}

/// score_sequence_backward on the device against the host's in double, and once more for the same bits.
template <class T, class S>
void check_gradients(const Case& c, const Weights<S>& weights, Tolerance allowed) {
    const Inputs<T> in(c);
    // Gradients are added to this. It is off by 2^-26, which would hide gradients much smaller than 1.
    const double before = c.gradient_spread == 1.0 ? 0.25 : 0.0;
    using HostParameters = typename S::template parameters<double>;
    using DeviceParameters = typename S::template parameters<float>;
    std::vector<std::vector<double>> wanted;
    std::vector<std::unique_ptr<Device<float>>> got;
    wanted.reserve(weights.arrays.size());
    HostParameters host_gradients;
    DeviceParameters device_gradients;
    for_each_parameter(weights.scorer, host_gradients, [&](const char*, double*& pointer, std::size_t, bool) {
        const Array& array = weights.arrays[wanted.size()];
        wanted.emplace_back(array.values.size(), before);
        pointer = array.values.empty() ? nullptr : wanted.back().data();
    });
    for_each_parameter(weights.scorer, device_gradients,
                       [&](const char*, float*& pointer, std::size_t, bool) {
                           const Array& array = weights.arrays[got.size()];
                           got.push_back(std::make_unique<Device<float>>(
                               std::vector<float>(array.values.size(), static_cast<float>(before))));
                           pointer = array.values.empty() ? nullptr : got.back()->data();
                       });
    std::vector<double> d_k(in.k.size(), untouched), d_v(in.v.size(), untouched);
    ScoreBackward<double> call{in.keys(c), in.values(c), c.on_host(), c.delay,
                               view_bhs(in.d_scores.data(), c.batch, c.heads, c.all_rows())};
    if (c.with_inputs) {
        call.d_k = view_bhsd(d_k.data(), c.batch, c.heads, c.all_rows(), c.head_dim_qk);
        call.d_v = view_bhsd(d_v.data(), c.batch, c.heads, c.all_rows(), c.head_dim_vo);
    }
    call.dropout = c.dropout;
    const S host_scorer = weights.on_host();
    std::vector<std::byte> memory(score_sequence_backward_workspace_bytes(oracle(), host_scorer, call));
    score_sequence_backward(oracle(), host_scorer, call, host_gradients, {memory.data(), memory.size()});

    // Of each array, in the root mean square of its numbers.
    std::vector<double> of_parts(wanted.size(), 0.0);
    for (std::int32_t part = 0; part < c.parts; ++part) {
        std::vector<double> own(in.d_scores.size(), 0.0);
        for (std::size_t i = 0; i < own.size(); ++i) {
            const auto t = static_cast<std::int64_t>(i) % c.all_rows();
            own[i] = t * c.parts / c.all_rows() == part ? in.d_scores[i] : 0.0;
        }
        call.d_scores = view_bhs(static_cast<const double*>(own.data()), c.batch, c.heads, c.all_rows());
        std::vector<std::vector<double>> gradients;
        gradients.reserve(wanted.size());
        HostParameters into;
        for_each_parameter(weights.scorer, into, [&](const char*, double*& pointer, std::size_t, bool) {
            gradients.emplace_back(wanted[gradients.size()].size(), 0.0);
            pointer = gradients.back().empty() ? nullptr : gradients.back().data();
        });
        std::vector<double> unread_k(d_k.size()), unread_v(d_v.size());
        if (c.with_inputs) {
            call.d_k = view_bhsd(unread_k.data(), c.batch, c.heads, c.all_rows(), c.head_dim_qk);
            call.d_v = view_bhsd(unread_v.data(), c.batch, c.heads, c.all_rows(), c.head_dim_vo);
        }
        score_sequence_backward(oracle(), host_scorer, call, into, {memory.data(), memory.size()});
        for (std::size_t i = 0; i < gradients.size(); ++i) {
            for (const double x : gradients[i]) {
                of_parts[i] += x * x / static_cast<double>(gradients[i].size());
            }
        }
    }
    for (double& x : of_parts) {
        x = std::sqrt(x);
    }

    const Rows<T> k(c, in.k, c.head_dim_qk), v(c, in.v, c.head_dim_vo);
    const Rows<float> to_k(c, std::vector<double>(in.k.size(), untouched), c.head_dim_qk);
    const Rows<float> to_v(c, std::vector<double>(in.v.size(), untouched), c.head_dim_vo);
    const Device<std::int32_t> lengths(c.lengths), starts(c.starts), edges(c.edges);
    const Device<float> d_scores(std::vector<float>(in.d_scores.begin(), in.d_scores.end()));
    const Device<std::uint32_t> status(std::vector<std::uint32_t>(static_cast<std::size_t>(c.batch), 0u));
    ScoreBackward<T> device_call{k.view, v.view, c.sequences(lengths.data(), starts.data(), edges.data()),
                                 c.delay,
                                 view_bhs<const float>(d_scores.data(), c.batch, c.heads, c.all_rows())};
    device_call.dropout = c.dropout;
    if (c.with_inputs) {
        device_call.d_k = to_k.view;
        device_call.d_v = to_v.view;
    }
    const kvpolicy::cuda ctx{};
    const S scorer = weights.on_device();
    const Device<unsigned char> workspace(score_sequence_backward_workspace_bytes(ctx, scorer, device_call));
    score_sequence_backward(ctx, scorer, device_call, device_gradients, workspace, {.status = status.data()});
    // The gradient of a gate's bias is a sum over tokens that may cancel (an input gate's does, but for soft
    // caps: h does not depend on a factor that all tokens share). Its weight's is the same sum with factors
    // of mean square spread^2, and says how large the terms are.
    double terms = 0.0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        const std::string& name = weights.arrays[i].name;
        std::vector<double> added = wanted[i];
        double square = 0.0;
        for (double& x : added) {
            x -= before;
            square += x * x;
        }
        std::vector<double> on_device = widened(got[i]->read());
        for (double& x : on_device) {
            x -= before;
        }
        compare(
            c.name + ", d " + name, on_device, added, allowed.gradients,
            (name == "b_i" || name == "b_f" ? allowed.gradients * terms / c.spread + 2e-5 * c.gradient_spread
                                            : 1e-6 * c.gradient_spread) +
                (name == "b_f" || name == "w_f" ? allowed.gradients * of_parts[i] : 0.0));
        terms = std::sqrt(square / static_cast<double>(std::max<std::size_t>(added.size(), 1)));
    }
    const std::vector<double> first_k = to_k.read(c), first_v = to_v.read(c);
    if (c.with_inputs) {
        compare(c.name + ", d_k", first_k, d_k, allowed.gradients);
        compare(c.name + ", d_v", first_v, d_v, allowed.gradients);
    }
    for (const std::uint32_t word : status.read()) {
        CHECK_MESSAGE(word == 0u, c.name, ": status ", word);
    }
    score_sequence_backward(ctx, scorer, device_call, DeviceParameters{}, workspace);
    CHECK_MESSAGE(to_k.read(c) == first_k, c.name, ": other bits in d_k the second time");
    CHECK_MESSAGE(to_v.read(c) == first_v, c.name, ": other bits in d_v the second time");
}

/// The case and the same with gradients of scores as small as those of a mean loss, and smaller
/// than fp16 can say.
inline std::vector<Case> with_small_gradients(const Case& c) {
    std::vector<Case> all{c};
    for (const double spread : {1e-6, 1e-12}) {
        all.push_back(c);
        all.back().gradient_spread = spread;
        all.back().name += ", d_scores of about 1e" + std::to_string(std::lround(std::log10(spread)));
    }
    return all;
}

/// Scores, what `loss` makes of them and gradients as one graph, replayed with other lengths and weights: the
/// same bits as direct calls. loss(ctx, sequences, scores, d_scores) enqueues.
template <class T, class S, class Loss>
void check_captured(const Case& c, const S& shape, const Drawing& drawing,
                    const std::vector<std::int32_t>& other_lengths, const Loss& loss) {
    const Weights<S> first(shape, drawing, 1), second(shape, drawing, 2);
    const Inputs<T> in(c);
    const Rows<T> k(c, in.k, c.head_dim_qk), v(c, in.v, c.head_dim_vo);
    const Device<std::int32_t> lengths(c.lengths);
    const Sequences sequences = c.sequences(lengths.data(), nullptr, nullptr);
    const auto size = static_cast<std::size_t>(c.plane());
    const Rows<float> to_k(c, std::vector<double>(in.k.size(), untouched), c.head_dim_qk);
    const Rows<float> to_v(c, std::vector<double>(in.v.size(), untouched), c.head_dim_vo);
    const Device<float> scores(size), d_scores(size);
    const Device<std::uint32_t> status(static_cast<std::size_t>(c.batch));
    std::vector<std::unique_ptr<Device<float>>> arrays;
    typename S::template parameters<float> gradients;
    for_each_parameter(shape, gradients, [&](const char*, float*& pointer, std::size_t, bool) {
        const std::size_t count = first.arrays[arrays.size()].values.size();
        arrays.push_back(std::make_unique<Device<float>>(count));
        pointer = count == 0 ? nullptr : arrays.back()->data();
    });
    const auto plane = [&](auto* data) { return view_bhs(data, c.batch, c.heads, c.all_rows()); };
    const auto of_scores = plane(static_cast<const float*>(d_scores.data()));
    const ScoreBackward<T> call{k.view, v.view, sequences, c.delay, of_scores, to_k.view, to_v.view};
    cudaStream_t stream = nullptr;
    test::ok(cudaStreamCreate(&stream));
    const kvpolicy::cuda ctx{stream};
    const S scorer = first.on_device();
    const Device<unsigned char> workspace(
        std::max(score_sequence_workspace_bytes(ctx, scorer, k.view, v.view, sequences),
                 score_sequence_backward_workspace_bytes(ctx, scorer, call)));
    const auto enqueue = [&] {
        score_sequence(ctx, scorer, k.view, v.view, sequences, c.delay, plane(scores.data()), workspace,
                       {.status = status.data()});
        loss(ctx, sequences, plane(static_cast<const float*>(scores.data())), plane(d_scores.data()));
        score_sequence_backward(ctx, scorer, call, gradients, workspace, {.status = status.data()});
    };
    const auto set = [](const auto& to, const auto& values) {
        test::ok(cudaMemcpy(to.data(), values.data(), to.bytes(), cudaMemcpyHostToDevice));
    };
    const auto results = [&](const Weights<S>& weights, const std::vector<std::int32_t>& of,
                             const auto& run) {
        set(lengths, of);
        for (std::size_t i = 0; i < arrays.size(); ++i) {
            set(*first.memory[i], weights.arrays[i].values);
            set(*arrays[i], std::vector<float>(arrays[i]->size(), 0.25f));
        }
        set(scores, std::vector<float>(size, 0.25f));
        set(d_scores, std::vector<float>(in.d_scores.begin(), in.d_scores.end()));
        set(to_k.memory, std::vector<float>(to_k.memory.size(), 0.25f));
        set(to_v.memory, std::vector<float>(to_v.memory.size(), 0.25f));
        set(status, std::vector<std::uint32_t>(status.size(), 0u));
        run();
        test::ok(cudaStreamSynchronize(stream));
        std::vector<std::vector<float>> all{scores.read(), d_scores.read(), to_k.memory.read(),
                                            to_v.memory.read()};
        for (const auto& array : arrays) {
            all.push_back(array->read());
        }
        CHECK(status.read() == std::vector<std::uint32_t>(status.size(), 0u));
        return all;
    };
    const auto one = results(first, c.lengths, enqueue), two = results(second, other_lengths, enqueue);
    CHECK(one != two);
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    test::ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    enqueue();
    test::ok(cudaStreamEndCapture(stream, &graph));
    test::ok(cudaGraphInstantiate(&ready, graph, 0));
    test::ok(cudaMemset(workspace.data(), 0xff, workspace.bytes()));
    const auto replay = [&] { test::ok(cudaGraphLaunch(ready, stream)); };
    CHECK_MESSAGE(results(second, other_lengths, replay) == two, c.name, ": captured, other lengths");
    CHECK_MESSAGE(results(first, c.lengths, replay) == one, c.name, ": captured");
    test::ok(cudaGraphExecDestroy(ready));
    test::ok(cudaGraphDestroy(graph));
    test::ok(cudaStreamDestroy(stream));
}
/// Without a loss: d_scores are as drawn.
struct no_loss {
    template <class Context, class Scores, class Gradients>
    void operator()(const Context&, const Sequences&, const Scores&, const Gradients&) const {}
};

}  // namespace scorer_test
