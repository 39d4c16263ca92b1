// ConvScorer on the device against the host's in double.
#define KVPOLICY_TEST_GPU
#include <kvpolicy/cuda_scorers.cuh>

#include "../support/lesser_gpu.hpp"
#include "scorer_case.hpp"

#include <algorithm>
#include <array>
#include <limits>

using namespace kvpolicy;
using namespace scorer_test;
using test::LesserGpu;

namespace {

/// Weights, inputs before RoPE and hidden layers are rounded to T: seven roundings of mean square u /
/// sqrt(3), through three SiLUs with slopes up to 1.1, are below 2 u of a score, of terms that may cancel.
/// Backwards as many again, of sums over tokens that cancel more. float: sums of 768 products.
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
    scorer.head_dim_qk = c.head_dim_qk;
    scorer.head_dim_vo = c.head_dim_vo;
    scorer.rope = {layout, 10000.0f, rotated, nullptr};
    return scorer;
}

Case sized(std::int32_t length, std::int32_t delay, std::int32_t dim) {
    Case c;
    c.name = "length " + std::to_string(length) + ", delay " + std::to_string(delay);
    c.length = length;
    c.delay = delay;
    c.head_dim_qk = dim;
    c.head_dim_vo = dim;
    return c;
}

/// Three sequences: all tokens, none, and `last`; a fused tensor's rows.
Case ragged(Case c, std::int32_t last) {
    c.name = "ragged";
    c.batch = 3;
    c.lengths = {c.length, 0, last};
    c.interleaved = true;
    return c;
}
/// Two sequences of segments with these edges between them, the second half as long.
Case packed(Case c, const std::vector<std::int32_t>& inner) {
    c.name = "packed";
    c.batch = 2;
    c.edges = inner;
    c.edges.insert(c.edges.begin(), 0);
    c.edges.push_back(c.length);
    c.lengths = {c.length, c.length / 2};
    return c;
}
/// Two sequences that begin later.
Case continued(Case c, std::int32_t start) {
    c.name = "continued";
    c.batch = 2;
    c.rows = start + c.length;
    c.starts = {start, 3};
    return c;
}

/// Weights of wide scorers are smaller, so that sums over many inputs do not grow: ideal bf16 of layers,
/// slopes and gradients, with all else in double, is off by 1 to 2.3% of a bias's gradient at head_dim 128
/// (eight emulations), by 2 to 5% at 256 with the same weights, and by 0.7 to 1.2% with half of them, since
/// slopes of SiLU are lost where sums are large.
Drawing drawn_for(std::int32_t dim) {
    return [dim](const std::string& name) {
        Draw draw = drawn(name);
        if (name[0] == 'w' && dim > 128) {
            draw.spread *= 128.0 / dim;
        }
        return draw;
    };
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
    for (const auto& [length, delay] : {std::pair{1, 13},
                                        {13, 13},
                                        {14, 13},
                                        {77, 13},
                                        {78, 13},
                                        {150, 13},
                                        {200, 70},
                                        {6, 6},
                                        {7, 6},
                                        {70, 6},
                                        {150, 7},
                                        {150, 11}}) {
        const Case c = sized(length, delay, 32);
        check<bf16>(c, "bf16", shaped(c, rope_layout::interleaved));
        check<float>(c, "float", shaped(c, rope_layout::half_split));
    }
}

TEST_CASE("widths") {
    Case c = sized(150, 20, 128);
    check<bf16>(c, "bf16, 128", shaped(c, rope_layout::half_split));
    c.head_dim_qk = 40;
    c.head_dim_vo = 24;
    check<bf16>(c, "bf16, 40 and 24", shaped(c, rope_layout::half_split, 16), without_biases);
    check<fp16>(c, "fp16, 40 and 24", shaped(c, rope_layout::none));
    c.head_dim_qk = 14;
    c.head_dim_vo = 7;
    check<float>(c, "float, 14 and 7", shaped(c, rope_layout::interleaved));
}

TEST_CASE("tiles of the Hopper kernel: edges, widths, both halves of RoPE") {
    for (const auto& [length, delay] :
         {std::pair{119, 13}, {133, 13}, {134, 14}, {400, 29}, {7, 6}, {110, 6}, {134, 6}, {400, 9}}) {
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
    c.head_dim_vo = 64;
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
    for (const Case& c :
         {ragged(sized(380, 14, 64), 134), packed(sized(500, 13, 64), {1, 121, 241, 241}),
          continued(sized(250, 130, 64), 210), ragged(sized(380, 6, 64), 134),
          packed(sized(500, 6, 64), {1, 8, 121, 241, 241}), continued(sized(250, 6, 64), 210)}) {
        check<bf16>(c, "bf16", shaped(c, rope_layout::half_split));
    }
}

TEST_CASE("a number that is not finite is reported, whether a score reads it or not") {
    Case c = sized(1000, 0, 64);
    const ConvScorer<> shape = shaped(c, rope_layout::half_split);
    const Weights<ConvScorer<>> weights(shape, drawn, c.seed);
    const Inputs<bf16> in(c);
    const Device<float> d_scores(std::vector<float>(static_cast<std::size_t>(c.plane()), 1.0f));
    const kvpolicy::cuda ctx{};
    for (const int gpu : {0, test::small_gpu}) {  // 0: the present one's own kernels
        const LesserGpu as(gpu);
        for (const std::int32_t delay : {20, 256, 1000}) {
            for (const std::int32_t place : {-1, 0, 17, 700, 749, 750, 900, 999}) {
                for (const bool key : {true, false}) {
                    CAPTURE(gpu);
                    CAPTURE(delay);
                    CAPTURE(place);
                    CAPTURE(key);
                    std::vector<double> k = in.k, v = in.v;
                    if (place >= 0) {
                        (key ? k : v)[static_cast<std::size_t>(place) * 64 + 3] =
                            std::numeric_limits<double>::infinity();
                    }
                    const Rows<bf16> of_k(c, k, 64), of_v(c, v, 64);
                    const Device<std::uint32_t> status(std::vector<std::uint32_t>{0u});
                    const ScoreBackward<bf16> call{of_k.view, of_v.view, Sequences{1, 1000}, delay,
                                                   view_bhs<const float>(d_scores.data(), 1, c.heads, 1000)};
                    const Device<unsigned char> workspace(
                        score_sequence_backward_workspace_bytes(ctx, weights.on_device(), call));
                    score_sequence_backward(ctx, weights.on_device(), call, ConvParameters<float>{},
                                            workspace, {.status = status.data()});
                    CHECK(status.read()[0] == (place < 0 ? 0u : status_not_finite));
                }
            }
        }
    }
}

namespace {

/// What a block of the portable kernels has on a GPU that gives it `bytes`: tiles of 16 rows and columns of a
/// slab, forward and backward.
template <class T>
std::array<std::int32_t, 3> sizes_on(std::int32_t dim, std::size_t bytes) {
    namespace cb = cuda_backend;
    const Case c = sized(64, 0, dim);
    const rows_view<const T> rows = view_bhsd<const T>(nullptr, 1, c.heads, 64, dim);
    cb::workspace_parts parts(nullptr);
    const cb::conv_plan<T> call(shaped(c, rope_layout::none), rows, rows, Sequences{1, 64}, 0, Dropout{},
                                parts);
    const cb::conv_size forward = cb::fitting_conv_size<false>(call.params, bytes, cb::conv_columns<T>);
    return {forward.tiles, forward.columns, cb::fitting_conv_size<true>(call.params, bytes, 64).tiles};
}

template <class T>
std::vector<float> scores_on(int gpu, const Case& c, const Weights<ConvScorer<>>& weights) {
    const LesserGpu as(gpu);
    const Inputs<T> in(c);
    const Rows<T> k(c, in.k, c.head_dim_qk), v(c, in.v, c.head_dim_vo);
    const Device<std::int32_t> lengths(c.lengths), starts(c.starts), edges(c.edges);
    const Sequences sequences = c.sequences(lengths.data(), starts.data(), edges.data());
    const Device<float> scores(std::vector<float>(static_cast<std::size_t>(c.plane()), -77.0f));
    ScoreOptions options;
    options.dropout = c.dropout;
    const kvpolicy::cuda ctx{};
    const Device<unsigned char> workspace(
        score_sequence_workspace_bytes(ctx, weights.on_device(), k.view, v.view, sequences, options));
    score_sequence(ctx, weights.on_device(), k.view, v.view, sequences, c.delay,
                   view_bhs(scores.data(), c.batch, c.heads, c.all_rows()), workspace, options);
    return scores.read();
}

/// On GPUs with less: the same bits of scores as with the largest blocks, and gradients.
template <class T>
void check_on(int gpu, Case c, const std::string& name, const ConvScorer<>& shape) {
    const Drawing how = drawn_for(c.head_dim_qk);
    const Weights<ConvScorer<>> weights(shape, how, c.seed);
    CHECK_MESSAGE(scores_on<T>(gpu, c, weights) == scores_on<T>(test::large_gpu, c, weights), name, ", ",
                  c.name);
    const LesserGpu as(gpu);
    check<T>(c, name + " on " + std::to_string(gpu) + " bytes", shape, how);
}

}  // namespace

TEST_CASE("what a block has on GPUs with less shared memory") {
    using sizes = std::array<std::int32_t, 3>;
    constexpr std::int32_t conv_few = cuda_backend::conv_few_tiles<bf16>;
    for (const std::int32_t dim : {64, 72, 96, 120, 128}) {
        CHECK(sizes_on<bf16>(dim, test::small_gpu) ==
              (dim < 120 ? sizes{5, 128, 5} : sizes{5, 64, conv_few}));
        CHECK(sizes_on<float>(dim, test::small_gpu) == sizes{2, 64, 2});
        CHECK(sizes_on<bf16>(dim, test::middle_gpu) == sizes{5, 128, 5});
    }
    for (const std::int32_t dim : {160, 192, 256}) {
        CHECK(sizes_on<bf16>(dim, test::small_gpu) == sizes{conv_few, 64, conv_few});
    }
    CHECK(sizes_on<bf16>(192, test::middle_gpu) == sizes{5, 128, 5});
    CHECK(sizes_on<bf16>(256, test::middle_gpu) == sizes{conv_few, 64, conv_few});
    CHECK(sizes_on<bf16>(256, test::large_gpu) == sizes{5, 128, 5});
    CHECK(sizes_on<float>(64, test::middle_gpu) == sizes{5, 64, 5});
    CHECK(sizes_on<float>(128, test::middle_gpu) == sizes{2, 64, 2});
    CHECK(sizes_on<float>(256, test::middle_gpu) == sizes{2, 64, 2});
    CHECK(sizes_on<float>(128, test::large_gpu) == sizes{5, 64, 5});
    CHECK(sizes_on<float>(256, test::large_gpu) == sizes{2, 64, 2});
}

TEST_CASE("GPUs with less shared memory") {
    for (const int gpu : {test::small_gpu, test::middle_gpu}) {
        for (const auto& [length, delay] :
             {std::pair{1, 13}, {14, 13}, {45, 13}, {46, 13}, {78, 13}, {200, 70}, {300, 14}}) {
            const Case c = sized(length, delay, 128);
            check_on<bf16>(gpu, c, "bf16, 128", shaped(c, rope_layout::half_split));
            check_on<float>(gpu, c, "float, 128", shaped(c, rope_layout::interleaved));
        }
        for (const auto& [length, delay] : {std::pair{14, 13}, {45, 13}, {46, 13}, {150, 20}, {140, 15}}) {
            const Case c = sized(length, delay, 256);
            check_on<bf16>(gpu, c, "bf16, 256", shaped(c, rope_layout::half_split));
            if (gpu != test::small_gpu) {
                check_on<float>(gpu, c, "float, 256", shaped(c, rope_layout::half_split));
            }
        }
        Case c = sized(150, 20, 96);
        check_on<fp16>(gpu, c, "fp16, 96", shaped(c, rope_layout::none));
        c = sized(100, 13, 160);
        check_on<fp16>(gpu, c, "fp16, 160", shaped(c, rope_layout::half_split));
        c = sized(150, 13, 256);
        c.edges = {0, 60, 61, 61, 150};
        c.dropout = {0.3f, 77};
        check_on<bf16>(gpu, c, "bf16, 256, dropout", shaped(c, rope_layout::interleaved));
        for (Case one : {ragged(sized(150, 14, 256), 80), packed(sized(200, 13, 256), {1, 33, 65, 65}),
                         continued(sized(70, 20, 256), 90)}) {
            check_on<bf16>(gpu, one, "bf16, 256", shaped(one, rope_layout::half_split));
            one.head_dim_qk = one.head_dim_vo = 72;
            check_on<float>(gpu, one, "float, 72", shaped(one, rope_layout::half_split));
        }
    }
}

TEST_CASE("a small GPU, in few words") {  // for compute-sanitizer
    Case c = sized(100, 13, 256);
    c.edges = {0, 1, 33, 100};
    check_on<bf16>(test::small_gpu, c, "bf16, 256", shaped(c, rope_layout::half_split));
    c.head_dim_qk = c.head_dim_vo = 72;
    check_on<float>(test::small_gpu, c, "float, 72", shaped(c, rope_layout::interleaved));
}

TEST_CASE("a scorer too wide for a GPU's blocks is refused before anything is enqueued") {
    const LesserGpu as(test::small_gpu);
    const Case c = sized(100, 13, 256);
    const Weights<ConvScorer<>> weights(shaped(c, rope_layout::half_split), drawn, c.seed);
    const Inputs<float> in(c);
    const Rows<float> k(c, in.k, c.head_dim_qk), v(c, in.v, c.head_dim_vo);
    const Device<float> scores(std::vector<float>(static_cast<std::size_t>(c.plane()), -77.0f));
    const kvpolicy::cuda ctx{};
    const Device<std::uint32_t> status(std::vector<std::uint32_t>{0u});
    const Device<unsigned char> workspace(
        score_sequence_workspace_bytes(ctx, weights.on_device(), k.view, v.view, c.on_host()));
    const auto text = doctest::Contains(
        "ConvScorer.head_dim_qk + head_dim_vo: 512 is not allowed; it must be less on this device for rows "
        "of this type: "
        "a "
        "block needs 141312 bytes of shared memory for it, and has at most 101376");
    CHECK_THROWS_WITH_AS(
        score_sequence(ctx, weights.on_device(), k.view, v.view, c.on_host(), c.delay,
                       view_bhs(scores.data(), 1, c.heads, 100), workspace, {.status = status.data()}),
        text, invalid_argument);
    const std::vector<float> after = scores.read();
    CHECK(std::count(after.begin(), after.end(), -77.0f) == c.plane());
    const ScoreBackward<float> call{k.view, v.view, c.on_host(), c.delay,
                                    view_bhs<const float>(scores.data(), 1, c.heads, 100)};
    CHECK_THROWS_WITH_AS(score_sequence_backward_workspace_bytes(ctx, weights.on_device(), call), text,
                         invalid_argument);
}

TEST_CASE("ragged, packed, continued") {
    for (const Case& c : {ragged(sized(150, 14, 32), 80), packed(sized(200, 13, 32), {1, 65, 65}),
                          continued(sized(70, 20, 32), 90), ragged(sized(150, 6, 32), 80),
                          packed(sized(200, 6, 32), {1, 8, 65, 65}), continued(sized(70, 6, 32), 90)}) {
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
