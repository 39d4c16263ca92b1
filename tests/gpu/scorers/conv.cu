// ConvScorer on the device against the host's in double.
#include <kvpolicy/cuda/score_backward.cuh>
#include <kvpolicy/cuda/score_sequence.cuh>

#include "scorer_case.hpp"

#include <limits>

using namespace kvpolicy;
using namespace scorer_test;

namespace {

/// Weights, inputs before RoPE and hidden layers are rounded to T: seven roundings of mean square u / sqrt(3), through three SiLUs
/// with slopes up to 1.1, are below 2 u of a score, of terms that may cancel. Backwards as many again, of sums over tokens that cancel more. float: sums of 768 products.
template <class T>
Tolerance tolerance() {
    if (std::is_same_v<T, float>) {
        return {2e-5, 5e-5, 1e-6};
    }
    const double u = std::is_same_v<T, bf16> ? 0x1p-9 : 0x1p-12;
    return {5 * u, 10 * u, u};
}

Draw drawn(const std::string& name) {
    if (name[0] == 'w') {
        return {0.15};
    }
    return name == "readout" ? Draw{0.5, 0.2} : Draw{0.2};
}
Draw without_biases(const std::string& name) {
    return name[0] == 'b' || name == "readout_bias" ? Draw{-1.0} : drawn(name);
}

ConvScorer<> shaped(const Case& c, rope_layout layout, std::int32_t rotated = 0) {
    ConvScorer<> scorer;
    scorer.heads = c.heads;
    scorer.dim_k = c.dim_k;
    scorer.dim_v = c.dim_v;
    scorer.rope = {layout, 10000.0f, rotated, nullptr};
    return scorer;
}

Case sized(std::int32_t length, std::int32_t delay, std::int32_t dim) {
    Case c;
    c.name = "length " + std::to_string(length) + ", delay " + std::to_string(delay);
    c.length = length;
    c.delay = delay;
    c.dim_k = dim;
    c.dim_v = dim;
    return c;
}

template <class T>
void check(Case c, const std::string& name, const ConvScorer<>& shape, const Drawing& how = drawn) {
    c.name = name + ", " + c.name;
    const Weights<ConvScorer<>> weights(shape, how, c.seed);
    check_scores<T>(c, weights, tolerance<T>());
    if (c.starts.empty()) {
        check_gradients<T>(c, weights, tolerance<T>());
        if (!std::is_same_v<T, float>) {  // on Hopper other kernels
            c.with_inputs = false;
            c.name += ", weights alone";
            check_gradients<T>(c, weights, tolerance<T>());
        }
    }
}

}  // namespace

TEST_CASE("lengths and windows") {
    for (const auto& [length, delay] :
         {std::pair{1, 13}, {13, 13}, {14, 13}, {77, 13}, {78, 13}, {150, 13}, {200, 70}}) {
        const Case c = sized(length, delay, 32);
        check<bf16>(c, "bf16", shaped(c, rope_layout::interleaved));
        check<float>(c, "float", shaped(c, rope_layout::half_split));
    }
}

TEST_CASE("widths") {
    Case c = sized(150, 20, 128);
    check<bf16>(c, "bf16, 128", shaped(c, rope_layout::half_split));
    c.dim_k = 40;
    c.dim_v = 24;
    check<bf16>(c, "bf16, 40 and 24", shaped(c, rope_layout::half_split, 16), without_biases);
    check<fp16>(c, "fp16, 40 and 24", shaped(c, rope_layout::none));
    c.dim_k = 14;
    c.dim_v = 7;
    check<float>(c, "float, 14 and 7", shaped(c, rope_layout::interleaved));
}

TEST_CASE("tiles of the Hopper kernel: edges, widths, both halves of RoPE") {
    for (const auto& [length, delay] : {std::pair{119, 13}, {133, 13}, {134, 14}, {400, 29}}) {
        const Case c = sized(length, delay, 128);
        check<bf16>(c, "bf16, 128", shaped(c, rope_layout::half_split));
        const Case narrow = sized(length, delay, 64);
        check<fp16>(narrow, "fp16, 64", shaped(narrow, rope_layout::half_split));
    }
    for (const Case& small : with_small_gradients(sized(300, 20, 64))) {
        check<fp16>(small, "fp16, 64", shaped(small, rope_layout::half_split));
        check<bf16>(small, "bf16, 64", shaped(small, rope_layout::half_split));
        Case dropped = small;  // by the portable kernels
        dropped.dropout = {0.3f, 77};
        check<fp16>(dropped, "fp16, dropout", shaped(small, rope_layout::half_split));
    }
    Case c = sized(300, 20, 128);
    c.dim_v = 64;
    check<bf16>(c, "bf16, 128 and 64", shaped(c, rope_layout::half_split, 96), without_biases);
    c = sized(270, 33, 96);
    c.heads = 3;
    check<fp16>(c, "fp16, 96", shaped(c, rope_layout::none));
    c = sized(260, 13, 128);
    c.interleaved = true;
    check<bf16>(c, "bf16, 128, interleaved", shaped(c, rope_layout::interleaved));
    c = sized(140, 13, 160);  // wider than the kernel takes
    check<bf16>(c, "bf16, 160", shaped(c, rope_layout::half_split));
}

TEST_CASE("angles beyond what is turned quickly") {
    const Case c = sized(300, 20, 64);
    ConvScorer<> scorer = shaped(c, rope_layout::half_split);
    scorer.rope.base = 0x1p-32f;  // frequencies 1, 2, 4, ... 2^31, so that fp32 angles are the host's
    check<bf16>(c, "bf16", scorer);
}

TEST_CASE("tiles of the Hopper kernel: ragged, packed, continued") {
    Case ragged = sized(380, 14, 64);
    ragged.name = "ragged";
    ragged.batch = 3;
    ragged.lengths = {380, 0, 134};
    ragged.interleaved = true;
    Case packed = sized(500, 13, 64);
    packed.name = "packed";
    packed.batch = 2;
    packed.edges = {0, 1, 121, 241, 241, 500};
    packed.lengths = {500, 250};
    Case later = sized(250, 130, 64);
    later.name = "continued";
    later.batch = 2;
    later.rows = 460;
    later.starts = {210, 3};
    for (const Case& c : {ragged, packed, later}) {
        check<bf16>(c, "bf16", shaped(c, rope_layout::half_split));
    }
}

TEST_CASE("a number that is not finite is reported") {
    Case c = sized(300, 20, 64);
    const ConvScorer<> shape = shaped(c, rope_layout::half_split);
    const Weights<ConvScorer<>> weights(shape, drawn, c.seed);
    Inputs<bf16> in(c);
    for (const bool key : {true, false}) {
        std::vector<double> k = in.k, v = in.v;
        (key ? k : v)[17 * 64 + 3] = std::numeric_limits<double>::infinity();
        const Rows<bf16> of_k(c, k, 64), of_v(c, v, 64);
        const Device<float> d_scores(std::vector<float>(static_cast<std::size_t>(c.plane()), 1.0f));
        const Device<std::uint32_t> status(std::vector<std::uint32_t>{0u});
        const kvpolicy::cuda on{};
        const ScoreBackward<bf16> call{of_k.view, of_v.view, Sequences{1, 300}, 20,
                                       view_bhs<const float>(d_scores.data(), 1, c.heads, 300)};
        const Device<unsigned char> workspace(backward_workspace_bytes(on, weights.on_device(), call));
        score_sequence_backward(on, weights.on_device(), call, ConvParameters<float>{}, workspace,
                                status.data());
        CHECK(status.read()[0] == status_not_finite);
    }
}

TEST_CASE("ragged, packed, continued") {
    Case ragged = sized(150, 14, 32);
    ragged.name = "ragged";
    ragged.batch = 3;
    ragged.lengths = {150, 0, 80};
    ragged.interleaved = true;
    Case packed = sized(200, 13, 32);
    packed.name = "packed";
    packed.batch = 2;
    packed.edges = {0, 1, 65, 65, 200};
    packed.lengths = {200, 100};
    Case later = sized(70, 20, 32);
    later.name = "continued";
    later.batch = 2;
    later.rows = 160;
    later.starts = {90, 3};
    for (const Case& c : {ragged, packed, later}) {
        check<bf16>(c, "bf16", shaped(c, rope_layout::interleaved));
        check<float>(c, "float", shaped(c, rope_layout::interleaved));
    }
}

TEST_CASE("a captured call serves later lengths and weights") {
    Case c = sized(500, 20, 64);
    c.batch = 2;
    c.lengths = {500, 90};
    check_captured<fp16>(c, shaped(c, rope_layout::half_split), drawn, {0, 499}, no_loss{});
}

TEST_CASE("dropout drops what the host drops") {
    Case c = sized(150, 13, 32);
    c.edges = {0, 60, 150};
    c.dropout = {0.3f, 77};
    check<bf16>(c, "bf16", shaped(c, rope_layout::interleaved));
    check<float>(c, "float", shaped(c, rope_layout::interleaved));
}

TEST_CASE("a delay beyond every sequence: nothing is scored") {
    for (const std::int32_t delay : {300, 1 << 20, std::numeric_limits<std::int32_t>::max()}) {
        Case c = sized(300, delay, 64);
        check<bf16>(c, "bf16", shaped(c, rope_layout::half_split));
        c.batch = 2;
        c.edges = {0, 100, 300};
        c.lengths = {300, 120};
        check<bf16>(c, "bf16, packed", shaped(c, rope_layout::half_split));
    }
}

TEST_CASE("the keys that a tenth of the rows keeps") {
    Case c = sized(1 << 14, 768, 128);
    c.kept = 0.97;
    c.name = "convolution, 16k";
    check_scores<bf16>(c, Weights<ConvScorer<>>(shaped(c, rope_layout::half_split), drawn, c.seed),
                       tolerance<bf16>());
}
