// SP-KV's predictor on hidden states, on the device, against the host's in double.
#include <kvpolicy/scorers/cuda_predictor.cuh>

#include "scorer_case.hpp"

#include <cublasLt.h>

using namespace kvpolicy;
using namespace scorer_test;

namespace {

cublasLtHandle_t handle() {
    static cublasLtHandle_t const made = [] {
        cublasLtHandle_t of = nullptr;
        REQUIRE(cublasLtCreate(&of) == CUBLAS_STATUS_SUCCESS);
        return of;
    }();
    return made;
}

/// Hidden states and weights are rounded to T, backwards d y too: each is off by u / sqrt(3) of a
/// term in the mean.
template <class T>
Tolerance tolerance() {
    if (std::is_same_v<T, float>) {
        return {1e-5, 2e-5, 1e-6};
    }
    const double u = std::is_same_v<T, bf16> ? 0x1p-9 : 0x1p-12;
    return {3 * u, 4 * u, u};
}

struct Shape {
    std::string name;
    std::int32_t batch = 1, heads = 2, length = 70, width = 64, hidden = 24;
    std::int32_t rows = 0;  // of the views; 0: the length
    std::vector<std::int32_t> lengths{}, starts{};
    bool gaps = false;  // between rows and sequences
    bool biases = true, with_states = true;
    double gradient_spread = 1.0;  // of the gradients of scores

    [[nodiscard]] std::int32_t all_rows() const { return rows == 0 ? length : rows; }
    [[nodiscard]] Sequences sequences(const std::int32_t* l, const std::int32_t* s) const {
        Sequences all{batch, length};
        all.lengths = lengths.empty() ? nullptr : l;
        all.starts = starts.empty() ? nullptr : s;
        return all;
    }
    template <class V>
    [[nodiscard]] rows_view<V> view(V* data) const {
        const std::int64_t row = width + (gaps ? 8 : 0);
        return {data, batch, 1, all_rows(), width, row * all_rows() + (gaps ? 16 : 0), 0, row};
    }
    [[nodiscard]] std::size_t numbers() const {
        return static_cast<std::size_t>(batch) *
               static_cast<std::size_t>((width + (gaps ? 8 : 0)) * all_rows() + (gaps ? 16 : 0));
    }
    [[nodiscard]] std::size_t planes() const {
        return static_cast<std::size_t>(batch) * static_cast<std::size_t>(heads * all_rows());
    }
    /// Whether a row is one of a sequence's tokens.
    [[nodiscard]] bool token(std::int32_t b, std::int32_t t) const {
        const auto at = static_cast<std::size_t>(b);
        const std::int32_t start = starts.empty() ? 0 : starts[at];
        return t >= start && t - start < (lengths.empty() ? length : lengths[at]);
    }
};

/// Both passes on both sides. What is no token's row is NaN.
template <class Act, class T>
void check(const Shape& c) {
    using S = BasicMlpScorer<HiddenInput, Act>;
    S shape;
    shape.heads = c.heads;
    shape.hidden = c.hidden;
    shape.input.width = c.width;
    const Weights<S> weights(
        shape,
        [&](const std::string& name) -> Draw {
            if (name[0] == 'b') {
                return {c.biases ? 0.3 : -1.0};
            }
            return {name == "w1" ? 1.0 / std::sqrt(static_cast<double>(c.width)) : 0.4};
        },
        5);
    std::mt19937 generator(3);
    std::normal_distribution<double> normal(0.0, 1.0);
    std::vector<T> states(c.numbers(), stored<T>(std::numeric_limits<double>::quiet_NaN()));
    const auto fill = c.view(states.data());
    for (std::int32_t b = 0; b < c.batch; ++b) {
        for (std::int32_t t = 0; t < c.all_rows(); ++t) {
            for (std::int32_t i = 0; i < c.width; ++i) {
                const double x = normal(generator);
                if (c.token(b, t)) {
                    fill.row(b, 0, t)[i] = stored<T>(x);
                }
            }
        }
    }
    std::vector<float> d_scores(c.planes(), std::numeric_limits<float>::quiet_NaN());
    const auto d_view = view_bhs(d_scores.data(), c.batch, c.heads, c.all_rows());
    for (std::int32_t b = 0; b < c.batch; ++b) {
        for (std::int32_t h = 0; h < c.heads; ++h) {
            for (std::int32_t t = 0; t < c.all_rows(); ++t) {
                const auto x = static_cast<float>(c.gradient_spread * normal(generator));
                if (c.token(b, t)) {
                    d_view.head(b, h)[t] = x;
                }
            }
        }
    }

    // The host.
    const Sequences sequences = c.sequences(c.lengths.data(), c.starts.data());
    std::vector<double> scores(c.planes(), untouched);
    const auto hidden = c.view<const T>(states.data());
    const S host_ctx = weights.on_host();
    std::vector<std::byte> memory(
        score_hidden_workspace_bytes<S, double>(oracle(), host_ctx, hidden, sequences));
    score_hidden(oracle(), host_ctx, hidden, sequences,
                 view_bhs(scores.data(), c.batch, c.heads, c.all_rows()), {memory.data(), memory.size()});
    std::vector<double> d_double(d_scores.begin(), d_scores.end()), d_states(c.numbers(), untouched);
    HiddenBackward<T, double> call{hidden, sequences,
                                   view_bhs<const double>(d_double.data(), c.batch, c.heads, c.all_rows())};
    if (c.with_states) {
        call.d_hidden = c.view(d_states.data());
    }
    std::vector<std::vector<double>> wanted;
    wanted.reserve(weights.arrays.size());
    const double before = c.gradient_spread == 1.0 ? 0.25 : 0.0;  // its rounding would hide small ones
    MlpParameters<double> into;
    for_each_parameter(shape, into, [&](const char*, double*& pointer, std::size_t, bool) {
        wanted.emplace_back(weights.arrays[wanted.size()].values.size(), before);
        pointer = wanted.back().empty() ? nullptr : wanted.back().data();
    });
    memory.resize(score_hidden_backward_workspace_bytes(oracle(), host_ctx, call));
    score_hidden_backward(oracle(), host_ctx, call, into, {memory.data(), memory.size()});

    // The device.
    const Device<T> device_states(states);
    const Device<float> device_d(d_scores),
        device_scores(std::vector<float>(c.planes(), static_cast<float>(untouched)));
    const Device<float> device_d_states(std::vector<float>(c.numbers(), static_cast<float>(untouched)));
    const Device<std::int32_t> lengths(c.lengths), starts(c.starts);
    const Device<std::uint32_t> status(std::vector<std::uint32_t>(static_cast<std::size_t>(c.batch), 0u));
    const Sequences there = c.sequences(lengths.data(), starts.data());
    const kvpolicy::cuda ctx{};
    const S scorer = weights.on_device();
    const auto rows = c.view<const T>(device_states.data());
    {
        const Device<unsigned char> workspace(score_hidden_workspace_bytes(ctx, scorer, rows, there));
        score_hidden(ctx, scorer, rows, there, view_bhs(device_scores.data(), c.batch, c.heads, c.all_rows()),
                     workspace, {.cublaslt = handle(), .status = status.data()});
    }
    const Tolerance allowed = tolerance<T>();
    compare(c.name + ", scores", widened(device_scores.read()), scores, allowed.scores, allowed.floor);
    HiddenBackward<T> device_call{rows, there,
                                  view_bhs<const float>(device_d.data(), c.batch, c.heads, c.all_rows())};
    if (c.with_states) {
        device_call.d_hidden = c.view(device_d_states.data());
    }
    std::vector<std::unique_ptr<Device<float>>> got;
    MlpParameters<float> device_into;
    for_each_parameter(shape, device_into, [&](const char*, float*& pointer, std::size_t, bool) {
        const std::size_t count = wanted[got.size()].size();
        got.push_back(std::make_unique<Device<float>>(std::vector<float>(count, static_cast<float>(before))));
        pointer = count == 0 ? nullptr : got.back()->data();
    });
    const Device<unsigned char> workspace(score_hidden_backward_workspace_bytes(ctx, scorer, device_call));
    score_hidden_backward(ctx, scorer, device_call, device_into, workspace,
                          {.cublaslt = handle(), .status = status.data()});
    for (std::size_t i = 0; i < got.size(); ++i) {
        std::vector<double> added = wanted[i], on_device = widened(got[i]->read());
        for (std::size_t j = 0; j < added.size(); ++j) {
            added[j] -= before;
            on_device[j] -= before;
        }
        compare(c.name + ", d " + weights.arrays[i].name, on_device, added, allowed.gradients,
                1e-6 * c.gradient_spread);
    }
    compare(c.name + ", d_hidden", widened(device_d_states.read()), d_states, allowed.gradients);
    for (const std::uint32_t word : status.read()) {
        CHECK_MESSAGE(word == 0u, c.name, ": status ", word);
    }
}

/// The sentence of a call that must refuse.
template <class Call>
std::string sentence(const Call& call) {
    try {
        call();
    } catch (const invalid_argument& error) {
        return error.what();
    }
    return "nothing was refused";
}
void says(const std::string& text, const std::string& part) {
    CHECK_MESSAGE(text.find(part) != std::string::npos, text, " lacks ", part);
}

}  // namespace

TEST_CASE("widths, heads, types") {
    check<Silu, bf16>({"bf16"});
    check<Silu, fp16>({"fp16", 1, 3, 33, 40, 8});
    check<Silu, float>({"float, odd", 2, 9, 50, 13, 7});
    check<GeluErf, bf16>({"gelu, a hidden layer that is no multiple of 8", 2, 17, 41, 128, 29});
    check<Silu, bf16>({"wide", 1, 8, 300, 512, 320});
    for (const double spread : {1e-6, 1e-12, 0.0, 1e30}) {
        Shape small{"d_scores of another size", 2, 3, 300, 64, 40};
        small.gradient_spread = spread;
        check<Silu, fp16>(small);
        check<Silu, bf16>(small);
        small.lengths = {300, 17};
        check<Silu, fp16>(small);
    }
    Shape one{"one token, no biases", 1, 1, 1, 8, 1};
    one.biases = false;
    check<Silu, bf16>(one);
    Shape alone{"no gradients of states"};
    alone.with_states = false;
    check<Silu, bf16>(alone);
}

TEST_CASE("ragged, continued, with gaps") {
    Shape ragged{"ragged", 3, 2, 60};
    ragged.lengths = {60, 0, 17};
    check<Silu, bf16>(ragged);
    Shape later{"continued", 2, 2, 30};
    later.rows = 80;
    later.starts = {50, 3};
    check<Silu, bf16>(later);
    later.lengths = {30, 9};
    later.gaps = true;
    check<Silu, float>(later);
    Shape gaps{"gaps", 3, 2, 45};
    gaps.gaps = true;
    check<Silu, bf16>(gaps);
    Shape shorter{"views longer than the sequences", 2, 2, 45};
    shorter.rows = 51;
    shorter.lengths = {45, 45};
    check<Silu, bf16>(shorter);
}

TEST_CASE("more rows than one product") {
    Shape many{"9000 rows", 1, 2, 9000, 16, 8};
    check<Silu, bf16>(many);
    many = {"3 x 3000 rows", 3, 2, 3000, 16, 8};
    check<Silu, bf16>(many);
}

TEST_CASE("a captured call serves later lengths and states") {
    Shape c{"captured", 2, 2, 40, 32, 16};
    using S = UtilityPredictor;
    S shape;
    shape.heads = c.heads;
    shape.hidden = c.hidden;
    shape.input.width = c.width;
    const Weights<S> weights(
        shape, [](const std::string&) { return Draw{0.3}; }, 5);
    const Device<bf16> states(std::vector<bf16>(c.numbers(), static_cast<bf16>(0.5f)));
    const Device<float> scores(std::vector<float>(c.planes(), static_cast<float>(untouched)));
    const Device<std::int32_t> lengths(std::vector<std::int32_t>{40, 2});
    Sequences sequences{c.batch, c.length};
    sequences.lengths = lengths.data();
    cudaStream_t stream = nullptr;
    test::ok(cudaStreamCreate(&stream));
    const kvpolicy::cuda ctx{stream};
    const S scorer = weights.on_device();
    const auto rows = c.view<const bf16>(states.data());
    const auto to = view_bhs(scores.data(), c.batch, c.heads, c.length);
    const Device<unsigned char> workspace(score_hidden_workspace_bytes(ctx, scorer, rows, sequences));
    score_hidden(ctx, scorer, rows, sequences, to, workspace, {.cublaslt = handle()});
    test::ok(cudaStreamSynchronize(stream));
    const std::vector<float> first = scores.read();
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t ready = nullptr;
    test::ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal));
    score_hidden(ctx, scorer, rows, sequences, to, workspace, {.cublaslt = handle()});
    test::ok(cudaStreamEndCapture(stream, &graph));
    test::ok(cudaGraphInstantiate(&ready, graph, 0));
    const std::vector<std::int32_t> others{5, 40};
    test::ok(cudaMemcpy(lengths.data(), others.data(), 8, cudaMemcpyHostToDevice));
    const std::vector<float> blank(c.planes(), static_cast<float>(untouched));
    test::ok(cudaMemcpy(scores.data(), blank.data(), scores.bytes(), cudaMemcpyHostToDevice));
    test::ok(cudaMemset(workspace.data(), 0xff, workspace.bytes()));
    test::ok(cudaGraphLaunch(ready, stream));
    test::ok(cudaStreamSynchronize(stream));
    const std::vector<float> second = scores.read();
    for (std::size_t i = 0; i < second.size(); ++i) {
        const std::size_t b = i / 80, t = i % 40;
        CHECK(second[i] ==
              (t < (b == 0 ? 5u : 40u) ? first[i / 40 % 2 * 40] : static_cast<float>(untouched)));
    }
    test::ok(cudaGraphExecDestroy(ready));
    test::ok(cudaGraphDestroy(graph));
    test::ok(cudaStreamDestroy(stream));
}

TEST_CASE("what is not finite is reported; lengths that cannot be count as empty") {
    const Shape c{"", 2, 1, 4, 8, 8};
    UtilityPredictor shape;
    shape.heads = 1;
    shape.hidden = 8;
    shape.input.width = 8;
    const Weights<UtilityPredictor> weights(
        shape, [](const std::string&) { return Draw{0.3}; }, 5);
    std::vector<bf16> states(c.numbers(), static_cast<bf16>(1.0f));
    states[5] = static_cast<bf16>(std::numeric_limits<float>::infinity());
    const Device<bf16> there(states);
    const Device<float> d_scores(std::vector<float>(c.planes(), 1.0f)),
        scores(std::vector<float>(c.planes(), 3.0f));
    const Device<std::int32_t> lengths(std::vector<std::int32_t>{4, 9});
    const Device<std::uint32_t> status(std::vector<std::uint32_t>{0u, 0u});
    Sequences sequences{2, 4};
    sequences.lengths = lengths.data();
    const kvpolicy::cuda ctx{};
    const HiddenBackward<bf16> call{c.view<const bf16>(there.data()), sequences,
                                    view_bhs<const float>(d_scores.data(), 2, 1, 4)};
    const UtilityPredictor scorer = weights.on_device();
    const Device<unsigned char> workspace(score_hidden_backward_workspace_bytes(ctx, scorer, call));
    score_hidden_backward(ctx, scorer, call, {}, workspace, {.cublaslt = handle(), .status = status.data()});
    CHECK(status.read() == std::vector<std::uint32_t>{status_not_finite, status_bad_length});
    score_hidden(ctx, scorer, call.hidden, sequences, view_bhs(scores.data(), 2, 1, 4), workspace,
                 {.cublaslt = handle()});
    const std::vector<float> got = scores.read();
    CHECK(std::isnan(got[0]));
    CHECK(!std::isnan(got[1]));
    CHECK(got[4] == 3.0f);
}

TEST_CASE("refusals are sentences, and come before anything is written") {
    const Shape c{"", 1, 2, 10, 16, 8};
    UtilityPredictor scorer;
    scorer.heads = 2;
    scorer.hidden = 8;
    scorer.input.width = 16;
    const Device<float> numbers(std::vector<float>(4096, 7.0f));
    const Device<bf16> states(std::vector<bf16>(4096, static_cast<bf16>(1.0f)));
    scorer.weights = {numbers.data(), nullptr, numbers.data(), nullptr};
    const Device<unsigned char> workspace(std::size_t{40} << 20);
    const kvpolicy::cuda ctx{};
    const auto rows = c.view<const bf16>(states.data());
    const auto scores = view_bhs(numbers.data(), 1, 2, 10);
    const Sequences sequences{1, 10};
    says(sentence([&] { score_hidden(ctx, scorer, rows, sequences, scores, workspace); }),
         "options.cublaslt: null is not allowed; it must be what cublasLtCreate gave");
    says(sentence([&] {
             score_hidden(ctx, scorer, rows, sequences, scores, {workspace.data(), 100},
                          {.cublaslt = handle()});
         }),
         "workspace.bytes: 100 is not allowed");
    UtilityPredictor other = scorer;
    other.heads = 3;
    says(sentence(
             [&] { score_hidden(ctx, other, rows, sequences, scores, workspace, {.cublaslt = handle()}); }),
         "UtilityPredictor.heads: 3 is not allowed");
    other = scorer;
    other.weights.w1 = nullptr;
    says(sentence(
             [&] { score_hidden(ctx, other, rows, sequences, scores, workspace, {.cublaslt = handle()}); }),
         "w1");
    other = scorer;
    other.input.width = 24;
    says(sentence(
             [&] { score_hidden(ctx, other, rows, sequences, scores, workspace, {.cublaslt = handle()}); }),
         "hidden: 1 x 1 x 10 x 16 is not allowed");
    auto view = rows;
    ++view.data;
    says(sentence(
             [&] { score_hidden(ctx, scorer, view, sequences, scores, workspace, {.cublaslt = handle()}); }),
         "aligned to 16 bytes");
    view = rows;
    view.dim = other.input.width = 12;
    says(sentence(
             [&] { score_hidden(ctx, other, view, sequences, scores, workspace, {.cublaslt = handle()}); }),
         "a multiple of 8 for 16-bit rows");
    view = rows;
    view.row_stride = 8;
    says(sentence(
             [&] { score_hidden(ctx, scorer, view, sequences, scores, workspace, {.cublaslt = handle()}); }),
         "hidden.row_stride: 8 is not allowed");
    says(sentence([&] {
             score_hidden(ctx, scorer, rows, {1, 11}, scores, workspace, {.cublaslt = handle()});
         }),
         "sequences.length");
    const HiddenBackward<bf16> call{rows, sequences, view_bhs<const float>(numbers.data(), 1, 2, 10),
                                    view_bhsd(numbers.data(), 1, 1, 9, 16)};
    says(sentence([&] { score_hidden_backward(ctx, scorer, call, {}, workspace, {.cublaslt = handle()}); }),
         "d_hidden: 1 x 1 x 9 x 16 is not allowed");
    CHECK(numbers.read() == std::vector<float>(4096, 7.0f));
}
