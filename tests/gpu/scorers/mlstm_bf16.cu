// mLSTMScorer of bf16 rows on the device.
#define KVPOLICY_TEST_GPU
#include "../support/lesser_gpu.hpp"
#include "mlstm_case.hpp"

using namespace mlstm_test;

TEST_CASE("one chunk and less, delays") {
    for (const auto& [length, delay] :
         {std::pair{1, 0}, {1, 1}, {2, 1}, {63, 0}, {64, 63}, {64, 64}, {65, 1}, {65, 64}, {40, 100}}) {
        const Case c = sized(length, delay, 32);
        check<bf16>(c, "bf16", shaped<Plain>(c), drawing({}, false, true));
    }
}

TEST_CASE("chunks, both widths") {
    for (const auto& [length, delay] : {std::pair{150, 0}, {150, 10}, {320, 64}, {300, 130}}) {
        const Case c = sized(length, delay, 64);
        check<bf16>(c, "bf16", shaped<Plain>(c), drawing({}, false, false));
        check<bf16>(c, "bf16, direct", shaped<SoftmaxDirect>(c), drawing({}, true, true));
    }
}

TEST_CASE("128 features and values") {
    const Case c = sized(200, 20, 128);
    for (const Case& small : with_small_gradients(c)) {
        check<bf16>(small, "bf16, 128 and 64", shaped<Plain>(c), drawing({}, true, false));
    }
    check<bf16>(c, "bf16, 128 and 128", shaped<SoftmaxDirect>(c), drawing({}, false, true));
}

TEST_CASE("odd widths") {
    Case c = sized(150, 10, 40);
    c.head_dim_vo = 24;
    check<bf16>(c, "bf16", shaped<Plain>(c, 20, 12), drawing({}, true, true));
    check<bf16>(c, "bf16, softmax", shaped<SoftmaxDirect>(c, 70), drawing({}, true, true));
}

TEST_CASE("gates near 0 and 1, input gates of +-30, softcaps") {
    const Case c = sized(300, 16, 64);
    const struct {
        const char* name;
        Gates gates;
        float gate_softcap;
    } all[] = {
        {"forgets at once", {0.0, 0.1, -12.0, 0.1}, 0.0f},
        {"forgets nothing", {0.0, 0.1, 14.0, 0.05}, 0.0f},
        {"inputs of +-30", {0.0, 1.3, 3.0, 0.05}, 0.0f},
        {"gate soft cap", {0.0, 1.3, 3.0, 0.3}, 5.0f},
        {"without biases", {0.0, 0.1, 0.0, 0.1, false}, 0.0f},
    };
    for (const auto& one : all) {
        check<bf16>(c, one.name, shaped<Plain>(c, 0, 0, one.gate_softcap), drawing(one.gates, true, false));
    }
}

TEST_CASE("ragged and packed") {
    Case ragged = sized(200, 10, 64);
    ragged.name = "ragged";
    ragged.batch = 3;
    ragged.lengths = {200, 0, 65};
    ragged.interleaved = true;
    Case packed = sized(300, 10, 64);
    packed.name = "packed";
    packed.batch = 2;
    packed.edges = {0, 1, 65, 65, 200, 300};
    packed.lengths = {300, 130};
    for (const Case& c : {ragged, packed}) {
        check<bf16>(c, "bf16", shaped<Plain>(c), drawing({}, true, true));
    }
}

TEST_CASE("states are taken up and left") {
    for (const bool hedgehog : {true, false}) {
        Case c = sized(100, 10, 32);
        c.batch = 3;
        c.rows = 180;
        c.starts = {80, 0, 70};
        c.lengths = {100, 64, 0};
        const auto run = [&](const auto& shape) {
            using S = std::decay_t<decltype(shape)>;
            const Weights<S> weights(shape, drawing({}, false, true), 5);
            std::mt19937 generator(9);
            std::vector<double> states(shape.state_size() * 6);
            for (double& x : states) {
                x = static_cast<double>(static_cast<float>(generator() % 1000) / 1000.0f);
            }
            c.name = hedgehog ? "hedgehog" : "softmax";
            check_scores<bf16>(c, weights, tolerance<bf16>(), &states, 1e-2);
        };
        if (hedgehog) {
            run(shaped<mLSTMScorer<>>(c));
        } else {
            run(shaped<mLSTMScorer<dynamic, Softmax, ProjectedValues>>(c));
        }
    }
}

TEST_CASE("a sequence whose length or edges cannot be keeps its state") {
    for (const std::int32_t length : {20, 700}) {  // in one segment, and in several
        Case c = sized(length, 10, 32);
        c.batch = 3;
        c.rows = length + 80;
        const auto shape = shaped<Plain>(c);
        const Weights<Plain> weights(shape, drawing({}, false, true), 5);
        const Inputs<bf16> in(c);
        const Rows<bf16> k(c, in.k, 32), v(c, in.v, 32);
        const Device<float> scores(std::vector<float>(static_cast<std::size_t>(c.plane()), 0.0f));
        const std::vector<float> before(shape.state_size() * 6, 0.5f);
        // Whose states are changed, where lengths, starts and edges are these.
        const auto changed = [&](const std::vector<std::int32_t>& of_lengths,
                                 const std::vector<std::int32_t>& of_starts,
                                 const std::vector<std::int32_t>& of_edges) {
            c.lengths = of_lengths;
            c.starts = of_starts;
            c.edges = of_edges;
            const Device<std::int32_t> lengths(c.lengths), starts(c.starts), edges(c.edges);
            const Sequences sequences = c.sequences(lengths.data(), starts.data(), edges.data());
            const Device<float> states(before);
            const Device<std::uint32_t> status(std::vector<std::uint32_t>(3, 0u));
            ScoreOptions options;
            options.states = states.data();
            options.status = status.data();
            const kvpolicy::cuda ctx{};
            const Plain scorer = weights.on_device();
            const Device<unsigned char> workspace(
                score_sequence_workspace_bytes(ctx, scorer, k.view, v.view, sequences, options));
            score_sequence(ctx, scorer, k.view, v.view, sequences, c.delay,
                           view_bhs(scores.data(), c.batch, c.heads, c.all_rows()), workspace, options);
            const std::vector<float> after = states.read();
            const std::vector<std::uint32_t> words = status.read();
            std::vector<bool> all;
            for (std::size_t b = 0; b < 3; ++b) {
                const auto size = static_cast<std::ptrdiff_t>(2 * shape.state_size());
                const auto at = static_cast<std::ptrdiff_t>(b) * size;
                all.push_back(
                    !std::equal(after.begin() + at, after.begin() + at + size, before.begin() + at));
                CHECK(words[b] == (all.back() ? 0u : std::uint32_t{status_bad_length}));
            }
            return all;
        };
        CHECK(changed({length, length, -1}, {81, 80, 0}, {}) == std::vector<bool>{false, true, false});
        CHECK(changed({length, 0, length + 1}, {0, 0, 0}, {}) == std::vector<bool>{true, true, false});
        CHECK(changed({}, {}, {0, 9, 8, length}) == std::vector<bool>{false, false, false});
        CHECK(changed({}, {}, {0, 9, length}) == std::vector<bool>{true, true, true});
    }
}

TEST_CASE("a NaN reaches its own score and those of later reads") {
    for (const std::int32_t bad : {0, 70, 149}) {
        Case c = sized(150, 5, 64);
        c.name = "NaN at " + std::to_string(bad);
        c.edges = {0, 100, 150};
        c.edit = [bad](std::vector<double>& k, std::vector<double>&) {
            k[static_cast<std::size_t>(bad) * 64 + 3] = std::numeric_limits<double>::quiet_NaN();
        };
        const Weights<Plain> weights(shaped<Plain>(c), drawing({}, true, true), 3);
        check_scores<bf16>(c, weights, tolerance<bf16>());
    }
}

TEST_CASE("so many chunks that states are scanned in segments") {
    for (const auto& [length, delay] : {std::pair{1000, 0}, {1100, 256}}) {
        const Case c = sized(length, delay, 64);
        check<bf16>(c, "bf16", shaped<Plain>(c), drawing({}, true, true));
    }
    Case wide = sized(900, 100, 128);
    check<bf16>(wide, "bf16, 128 and 128", shaped<SoftmaxDirect>(wide),
                drawing({0.0, 0.3, 4.0, 0.1}, true, false));
    Case packed = sized(1200, 70, 64);
    packed.name = "packed";
    packed.batch = 2;
    packed.edges = {0, 1, 65, 65, 500, 1199, 1200};
    packed.lengths = {1200, 530};
    check<bf16>(packed, "bf16", shaped<Plain>(packed), drawing({}, true, true));
    Case ragged = sized(1000, 10, 64);
    ragged.name = "ragged";
    ragged.batch = 3;
    ragged.lengths = {1000, 0, 333};
    check<bf16>(ragged, "bf16", shaped<Plain>(ragged), drawing({}, true, true));
    for (const std::int32_t bad : {0, 600}) {  // streams begin at 500 and 1199
        Case c = packed;
        c.batch = 1;
        c.lengths = {1200};
        c.name = "packed, NaN at " + std::to_string(bad);
        c.edit = [bad](std::vector<double>& k, std::vector<double>&) {
            k[static_cast<std::size_t>(bad) * 64 + 3] = std::numeric_limits<double>::quiet_NaN();
        };
        check_scores<bf16>(c, Weights<Plain>(shaped<Plain>(c), drawing({}, true, true), 3),
                           tolerance<bf16>());
    }
    Case taken = sized(700, 10, 64);
    taken.name = "states taken up and left";
    taken.batch = 3;
    taken.rows = 780;
    taken.starts = {80, 0, 70};
    taken.lengths = {700, 640, 0};
    const auto shape = shaped<Plain>(taken);
    std::mt19937 generator(9);
    std::vector<double> states(shape.state_size() * 6);
    for (double& x : states) {
        x = static_cast<double>(static_cast<float>(generator() % 1000) / 1000.0f);
    }
    check_scores<bf16>(taken, Weights<Plain>(shape, drawing({}, false, true), 5), tolerance<bf16>(), &states,
                       1e-2);
}

TEST_CASE("many planes, which have no segments") {
    Case c = sized(150, 10, 64);
    c.batch = 70;
    c.with_inputs = false;
    check<bf16>(c, "bf16", shaped<Plain>(c), drawing({}, true, true));
    Case wide = sized(140, 70, 128);
    wide.batch = 18;
    wide.with_inputs = false;
    check<bf16>(wide, "bf16, 128 and 128", shaped<SoftmaxDirect>(wide),
                drawing({0.0, 0.3, 4.0, 0.1}, false, true));
}

TEST_CASE("a backward pass goes on from what the scores left") {
    Case c = sized(1100, 100, 64);
    check_num_long_range<bf16>(c, shaped<Plain>(c), drawing({}, true, true));
    c.batch = 2;
    c.name = "packed";
    c.edges = {0, 1, 65, 65, 500, 1099, 1100};
    c.lengths = {1100, 530};
    check_num_long_range<bf16>(c, shaped<Plain>(c), drawing({}, true, true));
    c.name = "lengths that cannot be";
    c.edges = {};
    c.lengths = {1101, -1};
    check_num_long_range<bf16>(c, shaped<Plain>(c), drawing({}, true, true));
    const Case wide = sized(300, 20, 128);
    check_num_long_range<bf16>(wide, shaped<SoftmaxDirect>(wide), drawing({}, false, false));
}

TEST_CASE("forget gates that are shut, or wide open") {
    const Case c = sized(200, 20, 64);
    check<bf16>(c, "bf16, open", shaped<Plain>(c), drawing({0.0, 0.1, INFINITY, 0.05}, true, true));
    // A read sees one token, so that gradients of gates are 0, or what rounding leaves.
    check_scores<bf16>(c,
                       Weights<Plain>(shaped<Plain>(c), drawing({0.0, 0.1, -INFINITY, 0.05}, true, true), 3),
                       tolerance<bf16>());
}

TEST_CASE("a delay beyond every sequence: nothing is scored") {
    for (const std::int32_t delay : {300, 1 << 20, std::numeric_limits<std::int32_t>::max()}) {
        Case c = sized(300, delay, 64);
        check<bf16>(c, "bf16", shaped<Plain>(c), drawing({}, true, true));
        c.batch = 2;
        c.edges = {0, 100, 300};
        c.lengths = {300, 120};
        check<bf16>(c, "bf16, packed", shaped<Plain>(c), drawing({}, true, true));
    }
}

TEST_CASE("LayerNorms") { check_layer_norms<bf16>("bf16"); }

TEST_CASE("peaked features") { check_peaked<bf16>("bf16"); }

TEST_CASE("GPUs with less shared memory") {
    for (const int gpu : {test::small_gpu, test::middle_gpu}) {
        const test::LesserGpu as(gpu);
        const std::string ctx = "bf16 on " + std::to_string(gpu) + " bytes";
        for (const auto& [length, delay] : {std::pair{65, 1}, {300, 130}}) {
            const Case narrow = sized(length, delay, 64), wide = sized(length, delay, 128);
            check<bf16>(narrow, ctx + ", 64 and 64", shaped<Plain>(narrow), drawing({}, true, true));
            check<bf16>(wide, ctx + ", 128 and 64", shaped<Plain>(wide), drawing({}, true, false));
            check<bf16>(wide, ctx + ", 128 and 128", shaped<SoftmaxDirect>(wide), drawing({}, true, true));
        }
        check_layer_norms<bf16>(ctx);
        Case packed = sized(500, 70, 128);
        packed.name = "packed";
        packed.edges = {0, 1, 65, 65, 499, 500};
        check<bf16>(packed, ctx, shaped<SoftmaxDirect>(packed), drawing({}, true, true));
        const Case kept = sized(300, 20, 128);
        check_num_long_range<bf16>(kept, shaped<SoftmaxDirect>(kept), drawing({}, false, false));
    }
}

TEST_CASE("refusals") {
    Case c = sized(64, 4, 64);
    const Weights<Plain> weights(shaped<Plain>(c, 256, 64), drawing({}, false, false), 1);
    const Inputs<bf16> in(c);
    const Rows<bf16> k(c, in.k, 64), v(c, in.v, 64);
    const kvpolicy::cuda ctx{};
    CHECK_THROWS_WITH_AS(
        score_sequence_workspace_bytes(ctx, weights.on_device(), k.view, v.view, c.on_host()),
        doctest::Contains("mLSTMScorer.d_qk: 256 is not allowed; it must be at most 128 on CUDA"),
        invalid_argument);
    const Weights<Plain> fitting(shaped<Plain>(c), drawing({}, false, false), 1);
    const Device<float> scores(std::vector<float>(128, 0.0f));
    ScoreOptions options;
    options.how = form::recurrent;
    CHECK_THROWS_WITH_AS(score_sequence(ctx, fitting.on_device(), k.view, v.view, c.on_host(), 4,
                                        view_bhs(scores.data(), 1, 2, 64), workspace_view{}, options),
                         doctest::Contains("options.how: form::recurrent"), invalid_argument);
    const test::LesserGpu as(48 * 1024);
    const Device<unsigned char> workspace(
        score_sequence_workspace_bytes(ctx, fitting.on_device(), k.view, v.view, c.on_host()));
    CHECK_THROWS_WITH_AS(score_sequence(ctx, fitting.on_device(), k.view, v.view, c.on_host(), 4,
                                        view_bhs(scores.data(), 1, 2, 64), workspace),
                         doctest::Contains("mLSTMScorer.d_qk + d_v: 96 is not allowed; it must be less on "
                                           "this device for rows of this type: a block needs"),
                         invalid_argument);
}
