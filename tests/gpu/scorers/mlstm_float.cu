// mLSTMScorer of fp32 rows on the device, and the committed float64 vectors.
#define KVPOLICY_TEST_GPU
#include "../../support/vectors.hpp"
#include "../../unit/scorers/scorer_cases.hpp"
#include "../support/lesser_gpu.hpp"
#include "mlstm_case.hpp"

using namespace mlstm_test;

TEST_CASE("one chunk and less, delays") {
    for (const auto& [length, delay] :
         {std::pair{1, 0}, {1, 1}, {2, 1}, {63, 0}, {64, 63}, {64, 64}, {65, 1}, {65, 64}, {40, 100}}) {
        const Case c = sized(length, delay, 32);
        check<float>(c, "float", shaped<Plain>(c), drawing({}, true, true));
    }
}

TEST_CASE("chunks, both widths") {
    for (const auto& [length, delay] : {std::pair{150, 0}, {150, 10}, {320, 64}, {300, 130}}) {
        const Case c = sized(length, delay, 64);
        check<float>(c, "float", shaped<Plain>(c), drawing({}, false, false));
    }
}

TEST_CASE("LayerNorms") { check_layer_norms<float>("float"); }

TEST_CASE("peaked features") { check_peaked<float>("float"); }

TEST_CASE("GPUs with less shared memory") {
    for (const int gpu : {test::small_gpu, test::middle_gpu}) {
        const test::LesserGpu as(gpu);
        const std::string on = "float on " + std::to_string(gpu) + " bytes";
        for (const auto& [length, delay] : {std::pair{65, 1}, {300, 130}}) {
            const Case c = sized(length, delay, 64);
            const Weights<Plain> weights(shaped<Plain>(c), drawing({}, true, true), 3);
            check_scores<float>(c, weights, tolerance<float>());
            if (gpu == test::small_gpu) {
                const Inputs<float> in(c);
                const Rows<float> k(c, in.k, 64), v(c, in.v, 64);
                const Device<float> d_scores(std::vector<float>(static_cast<std::size_t>(c.plane()), 1.0f));
                const ScoreBackward<float> call{
                    k.view, v.view, c.on_host(), delay,
                    view_bhs<const float>(d_scores.data(), c.batch, c.heads, c.length)};
                const kvpolicy::cuda context{};
                const Device<unsigned char> workspace(
                    score_sequence_backward_workspace_bytes(context, weights.on_device(), call));
                CHECK_THROWS_WITH_AS(
                    score_sequence_backward(context, weights.on_device(), call, {}, workspace),
                    doctest::Contains("mLSTMScorer.d_qk + d_v: 96 is not allowed"), invalid_argument);
            } else {
                check_gradients<float>(c, weights, tolerance<float>());
            }
        }
    }
}

TEST_CASE("so many chunks that states are scanned in segments") {
    const Case c = sized(700, 70, 64);
    check<float>(c, "float", shaped<Plain>(c), drawing({}, true, true));
    Case packed = sized(700, 10, 32);
    packed.name = "packed";
    packed.edges = {0, 65, 300, 699, 700};
    check<float>(packed, "float", shaped<Plain>(packed), drawing({}, true, true));
}

TEST_CASE("odd widths") {
    Case c = sized(150, 10, 40);

    c.head_dim_qk = 13;
    c.head_dim_vo = 7;
    check<float>(c, "float", shaped<Plain>(c, 10, 5), drawing({}, false, true));
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
        check<float>(c, one.name, shaped<Plain>(c, 0, 0, one.gate_softcap), drawing(one.gates, true, false),
                     {1e-4, 1e-3, 1e-6});
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
        check<float>(c, "float", shaped<Plain>(c), drawing({}, true, true));
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
            check_scores<float>(c, weights, tolerance<float>(), &states, 1e-4);
        };
        if (hedgehog) {
            run(shaped<mLSTMScorer<>>(c));
        } else {
            run(shaped<mLSTMScorer<dynamic, Softmax, ProjectedValues>>(c));
        }
    }
}

TEST_CASE("states of more planes than run at once: the same bits twice") {
    // Two chunks a plane, so that a plane is one segment: of a plane's blocks each begins with the caller's
    // state, and one leaves the new one there, perhaps before another begins.
    Case c = sized(100, 10, 64);
    c.batch = 96;
    c.heads = 8;
    c.rows = 180;
    c.starts.assign(96, 80);
    const auto shape = shaped<Plain>(c, 64, 64);
    const Weights<Plain> weights(shape, drawing({}, false, true), 5);
    const Inputs<float> in(c);
    const Rows<float> k(c, in.k, c.head_dim_qk), v(c, in.v, c.head_dim_vo);
    const Device<std::int32_t> starts(c.starts);
    const Sequences sequences = c.sequences(nullptr, starts.data(), nullptr);
    std::mt19937 generator(9);
    std::vector<float> states(shape.state_size() * 96 * 8);
    for (float& x : states) {
        x = static_cast<float>(generator() % 1000) / 1000.0f;
    }
    const kvpolicy::cuda on{};
    const Plain scorer = weights.on_device();
    std::vector<float> first_scores, first_states;
    for (int run = 0; run < 4; ++run) {
        const Device<float> left(states);
        const Device<float> scores(
            std::vector<float>(static_cast<std::size_t>(c.plane()), static_cast<float>(untouched)));
        ScoreOptions options;
        options.states = left.data();
        const Device<unsigned char> workspace(
            score_sequence_workspace_bytes(on, scorer, k.view, v.view, sequences, options));
        score_sequence(on, scorer, k.view, v.view, sequences, c.delay,
                       view_bhs(scores.data(), c.batch, c.heads, c.all_rows()), workspace, options);
        if (run == 0) {
            first_scores = scores.read();
            first_states = left.read();
            continue;
        }
        CHECK_MESSAGE(same_bits(scores.read(), first_scores), "scores of run ", run);
        CHECK_MESSAGE(same_bits(left.read(), first_states), "states of run ", run);
    }
}

TEST_CASE("a backward pass goes on from what the scores left") {
    const Case c = sized(300, 20, 64);
    check_num_long_range<float>(c, shaped<Plain>(c), drawing({}, true, true));
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
        check_scores<float>(c, weights, tolerance<float>());
    }
}

TEST_CASE("the committed float64 vectors") {
    const auto vectors = kvpolicy_test::vectors::load("scorers.kvpv");
    const auto& cases = vectors.get<std::int32_t>("mlstm_cases");
    const auto& levels = vectors.get<float>("mlstm_levels");
    const auto& cu = vectors.get<std::int32_t>("mlstm_cu");
    const auto& cu_offsets = vectors.get<std::int32_t>("mlstm_cu_offsets");
    for (std::int64_t i = 0; i < cases.shape[0]; ++i) {
        const std::int32_t* n = cases.row(i);
        const float* x = levels.row(i);
        test::mlstm_case c{n[0] != 0,  n[1] != 0, n[2], n[3], n[4], n[5], n[6], n[7], n[8], n[9], n[10] != 0,
                           n[11] != 0, n[12],     x[0], x[1], x[2], x[3], x[4], x[5], x[6], {}};
        c.cu.assign(cu.data() + cu_offsets[i], cu.data() + cu_offsets[i + 1]);
        const double* const reference =
            vectors.get<double>("mlstm_scores").data() + vectors.get<std::int32_t>("mlstm_offsets")[i];
        std::vector<double> wanted(reference, reference + std::int64_t{c.heads} * c.length);
        for (double& score : wanted) {
            score = std::isnan(score) ? untouched : score;
        }
        const test::mlstm_weights weights(c);
        const Device<float> k(test::draw(c.seed, test::array::k, c.keys(), c.value_scale));
        const Device<float> v(test::draw(c.seed, test::array::v, c.values(), c.value_scale));
        const Device<std::int32_t> edges(c.cu);
        Sequences sequences = c.sequences();
        sequences.cu_seqlens = c.cu.empty() ? nullptr : edges.data();
        test::with_mlstm(weights, [&](auto scorer) {
            std::vector<std::unique_ptr<Device<float>>> memory;
            auto bound = scorer.weights;
            for_each_parameter(
                scorer, bound, [&](const char*, const float*& pointer, std::size_t count, bool) {
                    if (pointer != nullptr) {
                        memory.push_back(
                            std::make_unique<Device<float>>(std::vector<float>(pointer, pointer + count)));
                        pointer = memory.back()->data();
                    }
                });
            scorer.weights = bound;
            const auto keys = view_bhsd<const float>(k.data(), 1, c.heads, c.length, c.head_dim_qk);
            const auto values = view_bhsd<const float>(v.data(), 1, c.heads, c.length, c.head_dim_vo);
            const Device<float> scores(std::vector<float>(wanted.size(), static_cast<float>(untouched)));
            const kvpolicy::cuda on{};
            const Device<unsigned char> workspace(
                score_sequence_workspace_bytes(on, scorer, keys, values, sequences));
            score_sequence(on, scorer, keys, values, sequences, c.delay,
                           view_bhs(scores.data(), 1, c.heads, c.length), workspace);
            compare(c.name(), widened(scores.read()), wanted, 1e-4, 1e-5);
        });
    }
}
