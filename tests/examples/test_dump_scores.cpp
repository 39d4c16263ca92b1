// Scores of a text longer than a model reads at once: which tokens each segment scores, the numbers against
// double precision, the file, and what benchmarks read of it.
#include <kvpolicy/scorers/sequence.hpp>

#include "support.hpp"
#include "support/safetensors_writer.hpp"
#include "support/score_dump.hpp"

#include <benchmarks/score_file.hpp>
#include <doctest/doctest.h>
#include <llama/dense_attention.hpp>
#include <llama/engine.hpp>
#include <llama/safetensors.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <fstream>
#include <iterator>
#include <numeric>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <variant>
#include <vector>

using examples::DumpOptions;
using test::contains;
using test::message_of;

namespace {

constexpr std::int32_t length = 300;

const std::string& folder() {
    static const std::string name = TEST_BYTE_MODEL;
    return name;
}
const llama::Model& model() {
    static const llama::Model loaded = llama::load_model(folder());
    return loaded;
}
examples::TrainedScorers scorers(const std::string& name) {
    return examples::load_scorers(folder() + "/scorers/" + name + ".safetensors");
}
std::vector<std::int32_t> text() {
    std::ifstream file(folder() + "/eval.bin", std::ios::binary);
    std::vector<std::int32_t> tokens(length);
    for (std::int32_t& token : tokens) {
        token = file.get();
    }
    return tokens;
}
std::string bytes_of(const std::filesystem::path& file) {
    std::ifstream in(file, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}
DumpOptions small() { return {.tokens = 200, .segment = 150, .overlap = 40, .layers = {1, 4}}; }

/// [length, heads, head_dim] of a layer as a cache stores them, widened to double, for a segment that the
/// model reads in one call.
struct Rows {
    std::vector<double> keys, values;
};
Rows rows_of(std::span<const std::int32_t> tokens, std::int32_t layer) {
    llama::Engine engine(model());
    llama::DenseAttention attention(model().config);
    std::vector<std::int64_t> positions(tokens.size());
    std::iota(positions.begin(), positions.end(), 0);
    engine.forward(tokens, positions, attention, llama::Logits::none);
    Rows rows;
    for (const float x : attention.keys(layer)) {
        rows.keys.push_back(static_cast<double>(examples::rounded_to_bf16(x)));
    }
    for (const float x : attention.values(layer)) {
        rows.values.push_back(static_cast<double>(examples::rounded_to_bf16(x)));
    }
    return rows;
}

/// Equation 35 of the KVpop paper, in double: w2 . SiLU(W1 [k; v] + b1) + b2.
double mlp_score(const examples::Mlp& scorer, const Rows& rows, std::size_t token, std::size_t head) {
    const auto dim = static_cast<std::size_t>(scorer.head_dim_qk),
               heads = static_cast<std::size_t>(scorer.heads),
               hidden = static_cast<std::size_t>(scorer.hidden), inputs = 2 * dim;
    const auto& w = scorer.weights;
    double score = w.b2 == nullptr ? 0.0 : static_cast<double>(w.b2[head]);
    for (std::size_t j = 0; j < hidden; ++j) {
        const std::size_t row = head * hidden + j;
        double sum = w.b1 == nullptr ? 0.0 : static_cast<double>(w.b1[row]);
        for (std::size_t i = 0; i < inputs; ++i) {
            const std::size_t at = (token * heads + head) * dim + i % dim;
            sum += static_cast<double>(w.w1[row * inputs + i]) * (i < dim ? rows.keys[at] : rows.values[at]);
        }
        score += static_cast<double>(w.w2[row]) * sum / (1.0 + std::exp(-sum));
    }
    return score;
}

/// The same scores of the segment's tokens by the library in double, token by token.
std::vector<double> recurrent(const examples::Mlstm& scorer, const Rows& rows, std::int32_t delay) {
    const auto tokens = static_cast<std::int32_t>(
        rows.keys.size() / static_cast<std::size_t>(scorer.heads * scorer.head_dim_qk));
    const kvpolicy::host ctx{1};
    const auto k = kvpolicy::view_bshd(rows.keys.data(), 1, tokens, scorer.heads, scorer.head_dim_qk);
    const auto v = kvpolicy::view_bshd(rows.values.data(), 1, tokens, scorer.heads, scorer.head_dim_vo);
    const kvpolicy::Sequences sequences{.batch = 1, .length = tokens};
    const kvpolicy::BasicScoreOptions<double> options{.how = kvpolicy::form::recurrent};
    std::vector<double> scores(static_cast<std::size_t>(tokens * scorer.heads));
    std::vector<unsigned char> memory(
        kvpolicy::score_sequence_workspace_bytes(ctx, scorer, k, v, sequences, options));
    kvpolicy::score_sequence(ctx, scorer, k, v, sequences, delay,
                             kvpolicy::view_bhs(scores.data(), 1, scorer.heads, tokens),
                             {memory.data(), memory.size()}, options);
    return scores;
}

void compare(const std::string& name) {
    const examples::TrainedScorers trained = scorers(name);
    const std::int32_t delay = trained.spec.delay, heads = trained.spec.heads;
    const kvpolicy::host ctx{2};
    const std::vector<std::int32_t> tokens = text();
    const DumpOptions options = small();
    const examples::ScoreDump dump = examples::dump_scores(ctx, model(), trained, tokens, options);
    const auto segments = examples::dump_segments(options.tokens, options.segment, options.overlap, delay);
    CHECK(dump.segments == static_cast<std::int32_t>(segments.size()));
    CHECK(segments.size() > 1);
    REQUIRE(dump.scores.size() == 2u * 2u * 200u);
    double worst = 0.0, largest = 0.0;
    for (std::size_t i = 0; i < options.layers.size(); ++i) {
        const auto layer = static_cast<std::size_t>(options.layers[i]);
        for (const auto& [begin, end, from, to] : segments) {
            const Rows rows = rows_of(std::span(tokens).subspan(static_cast<std::size_t>(begin),
                                                                static_cast<std::size_t>(end - begin)),
                                      options.layers[i]);
            std::vector<double> stepped;
            if (const auto* mlstm = std::get_if<examples::ScorerStack<examples::Mlstm>>(&trained.stack)) {
                stepped = recurrent(mlstm->scorers[layer], rows, delay);
            }
            for (std::int32_t h = 0; h < heads; ++h) {
                for (std::int32_t t = from; t < to; ++t) {
                    const auto in_segment = static_cast<std::size_t>(t - begin),
                               head = static_cast<std::size_t>(h);
                    const double expected =
                        stepped.empty()
                            ? mlp_score(std::get<examples::ScorerStack<examples::Mlp>>(trained.stack)
                                            .scorers[layer],
                                        rows, in_segment, head)
                            : stepped[head * static_cast<std::size_t>(end - begin) + in_segment];
                    const auto got =
                        static_cast<double>(dump.scores[(i * static_cast<std::size_t>(heads) + head) * 200 +
                                                        static_cast<std::size_t>(t)]);
                    worst = std::max(worst, std::abs(got - expected));
                    largest = std::max(largest, std::abs(expected));
                }
            }
        }
    }
    CAPTURE(worst);
    CHECK(largest > 0.5);
    // Both passes make the same calls of BLAS, and so the same keys and values.
    CHECK(worst < 1e-5 * largest);
    for (std::size_t i = 0; i < 2; ++i) {
        for (std::size_t h = 0; h < 2; ++h) {
            const std::size_t all = static_cast<std::size_t>(options.layers[i]) * 2 + h;
            CHECK(dump.log_gamma[i * 2 + h] == trained.log_gamma[all]);
            CHECK(dump.thresholds[i * 2 + h] == trained.thresholds(0.25)[all]);
        }
    }
}

std::string sentence_of(const std::string& path, std::int32_t heads, std::int64_t tokens,
                        bool gated = false) {
    try {
        bench::read_scores(path, heads, tokens, gated);
    } catch (const std::runtime_error& error) {
        return error.what();
    }
    return "";
}

}  // namespace

TEST_CASE("segments give every token's score once, each with its overlap and delay") {
    for (const std::int32_t tokens : {1, 100, 199, 200, 1000}) {
        for (const std::int32_t segment : {30, 100, 128}) {
            for (const std::int32_t delay : {0, 7, 29}) {
                for (const std::int32_t overlap : {0, 1, segment - delay - 1}) {
                    CAPTURE(tokens);
                    CAPTURE(segment);
                    CAPTURE(delay);
                    CAPTURE(overlap);
                    if (overlap >= segment - delay) {
                        continue;
                    }
                    std::int32_t next = 0;
                    for (const auto& [begin, end, from, to] :
                         examples::dump_segments(tokens, segment, overlap, delay)) {
                        REQUIRE(from == next);
                        CHECK(begin == std::max(0, from - overlap));
                        CHECK(to + delay == end);
                        CHECK(end - begin <= segment);
                        CHECK(to > from);
                        next = to;
                    }
                    CHECK(next == tokens);
                }
            }
        }
    }
}

TEST_CASE("scores of an MLP are those of double precision") { compare("kvpop-mlp"); }
TEST_CASE("scores of an mLSTM, read after the window, are those of double precision") { compare("kvpop"); }

TEST_CASE("a file is the same for any number of threads, and is read as it was written") {
    const test::Folder place;
    const examples::TrainedScorers trained = scorers("kvpop");
    const auto write = [&](const std::string& name, std::int32_t threads) {
        const kvpolicy::host ctx{threads};
        auto file = place.path() / name;
        examples::save_dump(file, examples::dump_scores(ctx, model(), trained, text(), small()), trained.spec,
                            {{"model", "byte-llama"}});
        return file;
    };
    const auto file = write("one", 1);
    CHECK(bytes_of(file) == bytes_of(write("two", 2)));

    const llama::Safetensors opened(file);
    REQUIRE(opened.tensors().size() == 3);
    CHECK(opened.find("scores")->shape == std::vector<std::int64_t>{2, 2, 200});
    CHECK(opened.find("scores")->dtype == llama::DType::f32);
    CHECK(opened.find("log_gamma")->shape == std::vector<std::int64_t>{2, 2});
    CHECK(opened.find("thresholds")->shape == std::vector<std::int64_t>{2, 2});
    const auto& metadata = opened.metadata();
    for (const auto& entry : {std::pair{"format", "kvpolicy-scores-1"},
                              {"model", "byte-llama"},
                              {"layers", "1,4"},
                              {"segment", "150"},
                              {"overlap", "40"},
                              {"share", "0.25"},
                              {"scorer.kind", "mlstm"},
                              {"scorer.window", "64"}}) {
        CAPTURE(entry.first);
        REQUIRE(metadata.contains(entry.first));
        CHECK(metadata.at(entry.first) == entry.second);
    }

    std::vector<float> all(opened.find("scores")->numel);
    llama::to_float(*opened.find("scores"), all);
    const bench::Scores read = bench::read_scores(file.string(), 3, 150);
    REQUIRE(read.scores.size() == 450);
    for (std::size_t h = 0; h < 3; ++h) {
        CHECK(std::equal(read.scores.begin() + static_cast<std::ptrdiff_t>(h * 150),
                         read.scores.begin() + static_cast<std::ptrdiff_t>(h * 150 + 150),
                         all.begin() + static_cast<std::ptrdiff_t>(h * 200)));
        CHECK(read.log_gamma[h] == trained.log_gamma[h < 2 ? 2 + h : 8]);
        CHECK(read.thresholds[h] == trained.thresholds(0.25)[h < 2 ? 2 + h : 8]);
    }
}

TEST_CASE("the scores of this repository are what the rows of benchmarks need") {
    const std::string data = std::string(TEST_BENCHMARKS) + "/data/";
    const bench::Scores kvpop = bench::read_scores(data + "kvpop.safetensors", 8, 1 << 15);
    CHECK(kvpop.scores.size() == std::size_t{8} << 15);
    const bench::Scores mlp = bench::read_scores(data + "kvpop-mlp.safetensors", 8, 1 << 14, true);
    CHECK(mlp.thresholds.size() == 8);
    CHECK(contains(sentence_of(data + "kvpop.safetensors", 8, 1 << 17),
                   "kvpop.safetensors: scores [4, 2, 32768] are not allowed; they must be [layers, KV heads, "
                   "tokens], of 8 heads and 131072 tokens or more"));
}

TEST_CASE("files that benchmarks cannot read are refused with a sentence") {
    const test::Folder place;
    const auto says = [&](const std::string& header, const std::string& data) {
        return sentence_of(place.write("f", test::safetensors_bytes(header, data)).string(), 2, 1);
    };
    const std::string numbers(48, '\0');
    const std::string scores = R"("scores":{"data_offsets":[0,16],"dtype":"F32","shape":[1,2,2]})";
    const std::string gamma = R"("log_gamma":{"data_offsets":[16,24],"dtype":"F32","shape":[1,2]})";
    CHECK(says("{" + scores + "," + gamma + "}", numbers).empty());
    CHECK(contains(sentence_of((place.path() / "f").string(), 2, 1, true), "has no tensor thresholds"));
    CHECK(contains(sentence_of("missing/f", 2, 1), "missing/f: is not there; benchmarks/data/README.md"));
    CHECK(contains(sentence_of(place.write("g", "short").string(), 2, 1), "is no safetensors file"));
    CHECK(
        contains(sentence_of(place.write("g", std::string(8, '\xff')).string(), 2, 1), "is no safetensors"));
    CHECK(contains(says("{" + gamma + "}", numbers), "scores [] are not allowed"));
    CHECK(contains(says("{" + scores + "}", numbers), "has no tensor log_gamma"));
    CHECK(contains(says(R"({"__metadata__":{"a":"\"scores\":{"}})", numbers), "scores [] are not allowed"));
    CHECK(contains(says(R"({"scores":{"data_offsets":[0,16],"dtype":"F32","shape":[2,2]}})", numbers),
                   "scores [2, 2] are not allowed"));
    for (const char* entry : {R"("data_offsets":[0,16],"dtype":"BF16","shape":[1,2,2])",
                              R"("data_offsets":[0,12],"dtype":"F32","shape":[1,2,2])",
                              R"("data_offsets":[40,56],"dtype":"F32","shape":[1,2,2])",
                              R"("data_offsets":[-4,12],"dtype":"F32","shape":[1,2,2])",
                              R"("data_offsets":[0,16],"dtype":"F32","shape":[-1,2,-2])",
                              R"("data_offsets":[0,0],"dtype":"F32","shape":[1,2,0])",
                              R"("data_offsets":[0,16],"dtype":"F32","shape":[4611686018427387904,4,1])",
                              R"("dtype":"F32","shape":[1,2,2])"}) {
        CAPTURE(entry);
        CHECK(contains(says(std::string("{\"scores\":{") + entry + "}}", numbers),
                       "tensor scores is not allowed; it must be fp32 and inside the file"));
    }
    CHECK(contains(
        says("{" + scores + R"(,"log_gamma":{"data_offsets":[16,20],"dtype":"F32","shape":[1,1]}})", numbers),
        "log_gamma [1, 1] is not allowed; it must be [1, 2]"));
    CHECK(
        contains(says("{" + scores + "," + gamma + "}", std::string(48, '\xff')), "numbers must be finite"));
}

TEST_CASE("what a dump refuses") {
    const examples::TrainedScorers trained = scorers("kvpop");
    const kvpolicy::host ctx{1};
    const auto says = [&](auto change) {
        DumpOptions options = small();
        change(options);
        return message_of([&] { examples::dump_scores(ctx, model(), trained, text(), options); });
    };
    CHECK(
        says([](DumpOptions& o) { o.tokens = 237; }) ==
        "tokens: 237 is not allowed; the text has 300 tokens and a score needs 64 after its own, so it must "
        "be 1 to 236");
    CHECK(contains(says([](DumpOptions& o) { o.segment = 4097; }),
                   "segment: 4097 is not allowed; it must be 65"));
    CHECK(contains(says([](DumpOptions& o) { o.segment = 64; }), "segment: 64 is not allowed"));
    CHECK(contains(says([](DumpOptions& o) { o.overlap = 86; }),
                   "overlap: 86 is not allowed; it must be 0 to 85"));
    CHECK(contains(says([](DumpOptions& o) {
                       o.layers = {1, 1};
                   }),
                   "layers: 1 is not allowed; layers must ascend"));
    CHECK(contains(says([](DumpOptions& o) { o.layers = {6}; }), "layers: 6 is not allowed"));
    CHECK(contains(says([](DumpOptions& o) { o.share = 0.0; }), "share: 0 is not allowed"));
    const examples::TrainedScorers other =
        examples::load_scorers(folder() + "/../smollm2-135m/scorers/kvpop.safetensors");
    CHECK(contains(message_of([&] { examples::dump_scores(ctx, model(), other, text(), small()); }),
                   "scorers: has scorers for 30 layers"));
}
