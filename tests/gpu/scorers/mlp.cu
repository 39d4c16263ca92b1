// LinearScorer and BasicMlpScorer on the device against the host's in double.
#include <kvpolicy/cuda_scorers.cuh>
#include <kvpolicy/losses/cuda/dispatch_boundary.cuh>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "scorer_case.hpp"

using namespace kvpolicy;
using namespace scorer_test;

namespace {

/// Weights (and, backwards, gradients of hidden numbers) are rounded to T: off by at most u = 2^-9 (bf16) or
/// 2^-12 (fp16) of each, independently, of mean square u / sqrt(3). A sum of products is then off by u /
/// sqrt(3) in the norm, an activation's slope of up to 1.13 and a second rounding backwards make it 2 u /
/// sqrt(3); twice that and more, for few numbers in a norm, is 4 u. float: sums of n <= 512 products, in any
/// order below sqrt(n) 2^-24 = 1.4e-6 in the norm, three of them in a row.
template <class T>
Tolerance tolerance() {
    if (std::is_same_v<T, float>) {
        return {1e-5, 1e-5};
    }
    const double u = std::is_same_v<T, bf16> ? 0x1p-9 : 0x1p-12;
    return {3 * u, 4 * u};
}

Draw drawn(const std::string& name) {
    return name == "w2" || name == "b1" || name == "bias" || name == "b2" ? Draw{0.5, 0.1} : Draw{0.1, 0.0};
}
Draw without_biases(const std::string& name) { return name[0] == 'b' ? Draw{-1.0} : drawn(name); }

std::vector<Case> cases(std::int32_t head_dim_qk, std::int32_t head_dim_vo) {
    std::vector<Case> all;
    Case plain;
    plain.head_dim_qk = head_dim_qk;
    plain.head_dim_vo = head_dim_vo;
    for (const std::int32_t length : {1, 64, 150}) {
        Case c = plain;
        c.length = length;
        c.name = "length " + std::to_string(length);
        all.push_back(c);
    }
    Case ragged = plain;
    ragged.name = "ragged";
    ragged.batch = 3;
    ragged.length = 130;
    ragged.lengths = {65, 0, 130};
    ragged.interleaved = true;
    all.push_back(ragged);
    Case packed = plain;
    packed.name = "packed";
    packed.batch = 2;
    packed.length = 200;
    packed.edges = {0, 1, 65, 65, 200};
    packed.lengths = {200, 100};
    all.push_back(packed);
    Case later = plain;
    later.name = "continued";
    later.batch = 2;
    later.length = 70;
    later.rows = 160;
    later.starts = {90, 3};
    all.push_back(later);
    return all;
}

template <class T, class S>
void check(const S& shape, const std::string& what, const Drawing& drawing = drawn,
           const std::vector<Case>& all = {}) {
    for (Case c : all.empty() ? cases(shape.head_dim_qk, shape.head_dim_vo) : all) {
        c.name = what + ", " + c.name;
        const Weights<S> weights(shape, drawing, c.seed);
        check_scores<T>(c, weights, tolerance<T>());
        check_gradients<T>(c, weights, tolerance<T>());
    }
}

template <class S>
S shaped(std::int32_t heads, std::int32_t head_dim_qk, std::int32_t head_dim_vo) {
    S scorer;
    scorer.heads = heads;
    scorer.head_dim_qk = head_dim_qk;
    scorer.head_dim_vo = head_dim_vo;
    return scorer;
}
template <class S>
S shaped(std::int32_t heads, std::int32_t head_dim_qk, std::int32_t head_dim_vo, std::int32_t hidden) {
    S scorer = shaped<S>(heads, head_dim_qk, head_dim_vo);
    scorer.hidden = hidden;
    return scorer;
}

}  // namespace

TEST_CASE("linear scorers") {
    check<bf16>(shaped<LinearScorer<>>(2, 64, 64), "bf16");
    check<fp16>(shaped<LinearScorer<>>(2, 80, 64), "fp16", without_biases);
    check<float>(shaped<LinearScorer<>>(2, 20, 13), "float");
}

TEST_CASE("MLPs of keys and values") {
    check<bf16>(shaped<MlpScorer<>>(2, 64, 64, 128), "bf16");
    check<bf16>(shaped<MlpScorer<>>(2, 80, 40, 33), "bf16, odd widths", without_biases);
    check<float>(shaped<MlpScorer<>>(2, 20, 13, 70), "float");
    check<fp16>(shaped<MlpScorer<>>(2, 64, 64, 128), "fp16");
    check<fp16>(shaped<MlpScorer<>>(2, 80, 40, 33), "fp16, odd widths", without_biases);
}

TEST_CASE("wide MLPs") {
    Case c;
    c.name = "length 150";
    c.head_dim_qk = c.head_dim_vo = 128;
    check<bf16>(shaped<MlpScorer<>>(2, 128, 128, 512), "bf16, 128, hidden 512", drawn, {c});
    c.head_dim_qk = c.head_dim_vo = 512;  // d x of whole rows would not fit a block's shared memory
    check<bf16>(shaped<MlpScorer<>>(2, 512, 512, 64), "bf16, 512", drawn, {c});
}

TEST_CASE("gradients of scores of any size") {
    Case c;
    c.length = 4096;
    c.name = "length 4096";
    for (const Case& small : with_small_gradients(c)) {
        check<fp16>(shaped<MlpScorer<>>(2, 64, 64, 128), "fp16", drawn, {small});
        check<bf16>(shaped<MlpScorer<>>(2, 64, 64, 128), "bf16", drawn, {small});
    }
    c.length = 200;
    for (const double spread : {0.0, 1e-30, 1e30}) {  // fp32 holds all sums of these
        c.gradient_spread = spread;
        c.name = "d_scores of about " + std::to_string(spread);
        check<fp16>(shaped<MlpScorer<>>(2, 64, 64, 128), "fp16", drawn, {c});
    }
    // Packed segments, of which lengths leave out some: what is scaled by is what takes part.
    for (Case packed : cases(64, 64)) {
        packed.gradient_spread = 1e-6;
        check<fp16>(shaped<MlpScorer<>>(2, 64, 64, 128), "fp16, d_scores of about 1e-6", drawn, {packed});
    }
}

TEST_CASE("a captured step of training serves later lengths and weights") {
    Case c;
    c.batch = 2;
    c.length = 300;
    c.lengths = {300, 77};
    c.name = "MLP and boundary loss";
    const Policy<Sink<>, Window<>, TopKBudget<>> policy{Sink<>{2}, Window<>{5}, TopKBudget<>{9}};
    std::mt19937 generator(4);
    std::normal_distribution<float> normal;
    std::vector<float> drawn_target(static_cast<std::size_t>(c.plane()));
    for (float& x : drawn_target) {
        x = normal(generator);
    }
    const Device<float> target(drawn_target);
    const Device<BoundaryValue> value(1);
    const BoundaryLoss loss{};
    const Device<std::int32_t> shape_alone(c.lengths);
    const Device<unsigned char> workspace(loss.workspace_bytes(
        kvpolicy::cuda{}, policy, c.sequences(shape_alone.data(), nullptr, nullptr), c.heads));
    check_captured<fp16>(c, shaped<MlpScorer<>>(2, 64, 64, 128), drawn, {9, 256},
                         [&](const kvpolicy::cuda& ctx, const Sequences& sequences,
                             plane_view<const float> scores, plane_view<float> d_scores) {
                             loss(ctx, policy, scores,
                                  view_bhs<const float>(target.data(), c.batch, c.heads, c.length), sequences,
                                  d_scores, nullptr, value.data(), workspace);
                         });
}

TEST_CASE("normalized inputs") {
    using Normalized = BasicMlpScorer<NormalizedInput, GeluErf>;
    check<bf16>(shaped<Normalized>(2, 64, 32, 64), "bf16");
    check<float>(shaped<Normalized>(2, 20, 13, 30), "float");
}

TEST_CASE("write gates") {
    for (const rope_layout layout : {rope_layout::interleaved, rope_layout::half_split}) {
        auto gate = shaped<WriteGateScorer<>>(2, 64, 64, 64);
        gate.input.rope = {layout, 10000.0f, layout == rope_layout::interleaved ? 0 : 32, nullptr};
        check<bf16>(gate, "bf16");
    }
    auto gate = shaped<WriteGateScorer<>>(2, 20, 13, 30);
    gate.input.rope.layout = rope_layout::half_split;
    check<float>(gate, "float");
}

TEST_CASE("what is wrong is told: NaN, lengths, edges") {
    Case c;
    c.batch = 3;
    c.length = 100;
    const Weights<MlpScorer<>> weights(shaped<MlpScorer<>>(2, 64, 64, 64), drawn, 1);
    Inputs<bf16> in(c);
    in.k[64 * 105 + 3] = std::numeric_limits<double>::quiet_NaN();  // b = 0, h = 1, t = 5
    const Rows<bf16> k(c, in.k, 64), v(c, in.v, 64);
    const Device<std::int32_t> lengths(std::vector<std::int32_t>{100, -1, 101});
    const Sequences sequences{3, 100, lengths.data(), nullptr, nullptr, 0};
    const Device<float> scores(std::vector<float>(600, static_cast<float>(untouched)));
    const Device<std::uint32_t> status(std::vector<std::uint32_t>(3, 0u));
    const kvpolicy::cuda ctx{};
    const auto scorer = weights.on_device();
    const Device<unsigned char> workspace(
        score_sequence_workspace_bytes(ctx, scorer, k.view, v.view, sequences));
    score_sequence(ctx, scorer, k.view, v.view, sequences, 0, view_bhs(scores.data(), 3, 2, 100), workspace,
                   {.status = status.data()});
    const std::vector<float> got = scores.read();
    for (std::size_t i = 0; i < got.size(); ++i) {
        CHECK(std::isnan(got[i]) == (i == 105));
        CHECK((got[i] == static_cast<float>(untouched)) == (i >= 200));
    }
    CHECK(status.read() == std::vector<std::uint32_t>{0, status_bad_length, status_bad_length});

    const Device<float> d_scores(std::vector<float>(600, 1.0f));
    const ScoreBackward<bf16> call{k.view, v.view, sequences, 0,
                                   view_bhs<const float>(d_scores.data(), 3, 2, 100)};
    const Device<unsigned char> more(score_sequence_backward_workspace_bytes(ctx, scorer, call));
    score_sequence_backward(ctx, scorer, call, {}, more, {.status = status.data()});
    CHECK(status.read() ==
          std::vector<std::uint32_t>{status_not_finite, status_bad_length, status_bad_length});
    CHECK_THROWS_WITH_AS(
        score_sequence(ctx, scorer, k.view, v.view, sequences, 0, view_bhs(scores.data(), 3, 2, 100),
                       workspace_view{workspace.data(), 8}),
        doctest::Contains("workspace.bytes: 8 is not allowed"), invalid_argument);

    // Edges that do not rise: nothing is scored, and gradients stay as they are.
    const Device<std::int32_t> edges(std::vector<std::int32_t>{0, 60, 40, 100});
    const Sequences packed{3, 100, nullptr, nullptr, edges.data(), 3};
    const Device<float> bias(std::vector<float>(128, 7.0f));
    ScoreBackward<bf16> of_packed = call;
    of_packed.sequences = packed;
    MlpParameters<float> gradients{};
    gradients.b1 = bias.data();
    const Device<std::uint32_t> words(std::vector<std::uint32_t>(3, 0u));
    const Device<unsigned char> for_packed(score_sequence_backward_workspace_bytes(ctx, scorer, of_packed));
    score_sequence_backward(ctx, scorer, of_packed, gradients, for_packed, {.status = words.data()});
    CHECK(words.read() == std::vector<std::uint32_t>(3, status_bad_length));
    CHECK(bias.read() == std::vector<float>(128, 7.0f));
    // Sequences of no tokens at all, lengths of which cannot be.
    const Sequences none{3, 0, lengths.data(), nullptr, nullptr, 0};
    of_packed.sequences = none;
    for (const bool backward : {false, true}) {
        const Device<std::uint32_t> of_none(std::vector<std::uint32_t>(3, 0u));
        if (backward) {
            score_sequence_backward(ctx, scorer, of_packed, gradients, for_packed,
                                    {.status = of_none.data()});
        } else {
            score_sequence(ctx, scorer, k.view, v.view, none, 0, view_bhs(scores.data(), 3, 2, 100),
                           workspace, {.status = of_none.data()});
        }
        CHECK(of_none.read() == std::vector<std::uint32_t>(3, status_bad_length));
    }
}

TEST_CASE("what is too wide for a block is refused before gradients are added to") {
    Case c;
    c.batch = 1;
    c.length = 64;
    c.head_dim_qk = 2048;
    auto shape = shaped<WriteGateScorer<>>(2, 2048, 64, 64);
    shape.input.rope.layout = rope_layout::half_split;
    const Weights<WriteGateScorer<>> weights(shape, drawn, 1);
    const Inputs<bf16> in(c);
    const Rows<bf16> k(c, in.k, 2048), v(c, in.v, 64);
    const Device<float> d_scores(std::vector<float>(128, 1.0f)), to_k(std::vector<float>(128 * 2048, 7.0f)),
        to_v(std::vector<float>(128 * 64, 7.0f)), bias(std::vector<float>(128, 7.0f));
    const Device<unsigned char> workspace(std::size_t{64} << 20);
    const kvpolicy::cuda ctx{};
    ScoreBackward<bf16> call{k.view,
                             v.view,
                             Sequences{1, 64},
                             0,
                             view_bhs<const float>(d_scores.data(), 1, 2, 64),
                             view_bhsd(to_k.data(), 1, 2, 64, 2048),
                             view_bhsd(to_v.data(), 1, 2, 64, 64)};
    MlpParameters<float> gradients{};
    gradients.b1 = bias.data();
    CHECK_THROWS_WITH_AS(score_sequence_backward(ctx, weights.on_device(), call, gradients, workspace),
                         doctest::Contains("2 k.dim: 4096 is not allowed; it must be at most"),
                         invalid_argument);
    // Where scores fit (on most GPUs), gradients of keys still do not.
    auto half = shaped<WriteGateScorer<>>(2, 448, 64, 64);
    half.input.rope.layout = rope_layout::half_split;
    const Weights<WriteGateScorer<>> fitting(half, drawn, 1);
    call.k = view_bhsd<const bf16>(k.view.data, 1, 2, 64, 448);
    call.d_k = view_bhsd(to_k.data(), 1, 2, 64, 448);
    CHECK_THROWS_WITH_AS(score_sequence_backward(ctx, fitting.on_device(), call, gradients, workspace),
                         doctest::Contains("2 k.dim: 896 is not allowed; it must be at most"),
                         invalid_argument);
    CHECK(bias.read() == std::vector<float>(128, 7.0f));
    CHECK(to_k.read() == std::vector<float>(128 * 2048, 7.0f));
}

TEST_CASE("the keys that a tenth of the rows keeps") {
    Case c;
    c.length = 1 << 14;
    c.head_dim_qk = c.head_dim_vo = 128;
    c.kept = 0.97;
    c.name = "MLP, 16k";
    check_scores<bf16>(c, Weights<MlpScorer<>>(shaped<MlpScorer<>>(2, 128, 128, 128), drawn, c.seed),
                       tolerance<bf16>());
}
