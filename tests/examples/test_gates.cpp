// Files of gates that Python wrote (tests/reference/make_gates.py): the engine's logits, text and entries are
// those of Python's cache. Files that ship fit their model. What a file may not say is refused.
#include "support.hpp"
#include "support/score_dump.hpp"
#include "support/trained.hpp"

#include <doctest/doctest.h>
#include <llama/engine.hpp>
#include <llama/model.hpp>
#include <nlohmann/json.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <memory>
#include <numeric>
#include <set>
#include <span>
#include <string>
#include <vector>

using test::contains;
using test::message_of;

namespace {

const std::string folder = std::string(TEST_VECTORS) + "/gates/";

const llama::Model& model() {
    static const llama::Model loaded = llama::load_model(folder);
    return loaded;
}
const nlohmann::json& expected() {
    static const nlohmann::json read = nlohmann::json::parse(std::ifstream(folder + "expected.json"));
    return read;
}
std::vector<std::int32_t> prompt() { return expected()["prompt"].get<std::vector<std::int32_t>>(); }

std::unique_ptr<llama::KvAttention> cache_of(const kvpolicy::host& ctx,
                                             const examples::TrainedScorers& trained, llama::DType rows) {
    if (trained.has_own_numbers()) {
        return examples::make_gates(ctx, model().config, trained, 128, rows);
    }
    const examples::ScorerSpec& spec = trained.spec;
    return examples::make_trained(ctx, model().config, trained,
                                  {"", spec.sinks + spec.window + spec.budget, spec.sinks, spec.window},
                                  false, rows);
}

/// Feeds the prompt in chunks of `chunk` tokens and the expected text; returns the logits of the prompt's
/// last token and of those after it.
std::vector<std::vector<float>> logits_of(llama::KvAttention& cache, const std::vector<std::int32_t>& text,
                                          std::size_t chunk) {
    llama::Engine engine(model());
    std::vector<std::vector<float>> all;
    std::span<const float> logits;
    const auto feed = [&](std::span<const std::int32_t> tokens) {
        std::vector<std::int64_t> positions(tokens.size());
        std::iota(positions.begin(), positions.end(), cache.length());
        logits = engine.forward(tokens, positions, cache);
    };
    const std::vector<std::int32_t> start = prompt();
    for (std::size_t at = 0; at < start.size(); at += chunk) {
        feed(std::span(start).subspan(at, std::min(chunk, start.size() - at)));
    }
    all.emplace_back(logits.begin(), logits.end());
    for (const std::int32_t token : text) {
        feed({&token, 1});
        all.emplace_back(logits.begin(), logits.end());
    }
    return all;
}

/// The refusal of a file's metadata with `changes`.
std::string refusal_of(const std::map<std::string, std::string>& changes) {
    std::map<std::string, std::string, std::less<>> metadata;
    for (const auto& [key, value] :
         examples::to_metadata(examples::load_scorers(folder + "wgkv.safetensors").spec)) {
        metadata[key] = value;
    }
    for (const auto& [key, value] : changes) {
        metadata[key] = value;
    }
    return message_of([&] { examples::spec_of(metadata, "f"); });
}

/// What load_scorers says of a file of the folder whose header `damage` has changed; without its path.
template <class Damage>
std::string refusal_of_file(const std::string& name, Damage damage) {
    std::ifstream in(folder + name + ".safetensors", std::ios::binary);
    std::string bytes{std::istreambuf_iterator<char>(in), {}};
    std::uint64_t size = 0;
    std::memcpy(&size, bytes.data(), 8);
    nlohmann::json header = nlohmann::json::parse(bytes.substr(8, size));
    damage(header);
    const std::string text = header.dump();
    const test::Folder there;
    const std::filesystem::path path = there.path() / "damaged";
    const std::uint64_t length = text.size();
    std::ofstream out(path, std::ios::binary);
    out.write(reinterpret_cast<const char*>(&length), 8);
    out << text << bytes.substr(8 + size);
    out.close();
    const std::string found = message_of([&] { examples::load_scorers(path); });
    return found.starts_with(path.string()) ? found.substr(path.string().size()) : found;
}

/// A damage: the metadata's `key` is `value`.
auto claims(const std::string& key, const std::string& value) {
    return [=](nlohmann::json& header) { header["__metadata__"][key] = value; };
}
auto lacks(const std::string& key) {
    return [=](nlohmann::json& header) { header["__metadata__"].erase(key); };
}

}  // namespace

TEST_CASE("files of every system: Python's logits, text and entries") {
    const kvpolicy::host ctx(2);
    for (const auto& [file, want] : expected()["files"].items()) {
        const std::string name = file;  // clang++ captures no structured binding
        const examples::TrainedScorers trained = examples::load_scorers(folder + name + ".safetensors");
        CHECK(trained.spec.training.at("recipe") == "random weights");
        const auto text = want["text"].get<std::vector<std::int32_t>>();
        for (const std::size_t chunk : {prompt().size(), std::size_t{13}, std::size_t{1}}) {
            CAPTURE(name);
            CAPTURE(chunk);
            const auto cache = cache_of(ctx, trained, llama::DType::f32);
            const auto logits = logits_of(*cache, text, chunk);
            const auto numbers = want["logits"].get<std::vector<std::vector<float>>>();
            REQUIRE(logits.size() == numbers.size());
            double worst = 0.0;
            for (std::size_t i = 0; i < logits.size(); ++i) {
                for (std::size_t j = 0; j < logits[i].size(); ++j) {
                    worst = std::max(worst, std::abs(double{logits[i][j]} - double{numbers[i][j]}));
                }
                if (i < text.size()) {
                    CHECK(std::ranges::max_element(logits[i]) - logits[i].begin() == text[i]);
                }
            }
            CHECK(worst < 2e-3);
            for (int layer = 0; layer < 2; ++layer) {
                for (int head = 0; head < 2; ++head) {
                    auto held = cache->retained(layer, head);
                    std::ranges::sort(held);
                    CHECK(held == want["held"][static_cast<std::size_t>(2 * layer + head)]
                                      .get<std::vector<kvpolicy::position_t>>());
                }
            }
        }
    }
}

TEST_CASE("bytes are those of the keys that gates admit; rows in bf16") {
    const kvpolicy::host ctx(1);
    examples::TrainedScorers trained = examples::load_scorers(folder + "wgkv.safetensors");
    std::map<double, std::size_t> bytes;
    for (const double threshold : {0.0, 1.0}) {
        trained.spec.threshold = threshold;
        const auto cache = examples::make_gates(ctx, model().config, trained, 2048, llama::DType::bf16);
        llama::Engine engine(model());
        std::vector<std::int64_t> positions(64);
        std::vector<std::int32_t> tokens(64, 7);
        for (int chunk = 0; chunk < 32; ++chunk) {
            std::iota(positions.begin(), positions.end(), cache->length());
            engine.forward(tokens, positions, *cache, llama::Logits::none);
        }
        CHECK(cache->rows_per_head() == (threshold == 0.0 ? 2048.0 : 16.0));
        bytes[threshold] = cache->bytes();
    }
    // 4 heads of 2048 keys and values of 8 numbers; a slab has 2048 entries.
    CHECK(bytes[0.0] >= std::size_t{4} * 2048 * 16 * 2);
    CHECK(bytes[1.0] == std::size_t{2048} * 16 * 2);
}

TEST_CASE("scores of a text: of hidden states, of positions and of neighbors") {
    const kvpolicy::host ctx(1);
    std::vector<std::int32_t> text = prompt();
    for (const std::string name : {"spkv", "wgkv", "lte", "dms-linear"}) {
        const examples::TrainedScorers trained = examples::load_scorers(folder + name + ".safetensors");
        const auto dump =
            examples::dump_scores(ctx, model(), trained, text, {.tokens = 50, .segment = 72, .layers = {}});
        CHECK(dump.scores.size() == std::size_t{2} * 2 * 50);
        CHECK(std::ranges::any_of(dump.scores, [](float x) { return std::abs(x) > 0.01f; }));
    }
    const examples::TrainedScorers none = examples::load_scorers(folder + "streaming.safetensors");
    CHECK(contains(
        message_of([&] { examples::dump_scores(ctx, model(), none, text, {.tokens = 50, .layers = {}}); }),
        "a file without scorers, of StreamLLM+, is not allowed"));
}

TEST_CASE("files that ship fit their model") {
    struct Shape {
        std::string model;
        int layers, heads, width;
        float theta;
    };
    const std::string models = TEST_EXAMPLE_MODELS "/";
    for (const Shape& shape :
         {Shape{"byte-llama", 6, 2, 256, 1e4f}, Shape{"smollm2-135m", 30, 3, 576, 1e5f}}) {
        llama::Config config;
        config.layers = shape.layers;
        config.kv_heads = shape.heads;
        config.hidden_size = shape.width;
        config.head_dim = 64;
        config.rope_theta = shape.theta;
        std::set<std::string> policies;
        for (const auto& file : std::filesystem::directory_iterator(models + shape.model + "/scorers")) {
            if (file.path().extension() != ".safetensors") {
                continue;
            }
            const std::string name = file.path().string();
            CAPTURE(name);
            const examples::TrainedScorers trained = examples::load_scorers(name);
            examples::check_fits(trained, config, name);
            CHECK(trained.spec.training.at("seed") == "1");
            policies.insert(trained.spec.policy);
            if (trained.spec.kind == "write_gate" || trained.spec.kind == "conv") {
                CHECK(trained.spec.rope_layout == "half_split");
                CHECK(trained.spec.rope_base == shape.theta);
            }
        }
        CHECK(policies.size() >= 4);  // KVpop, SP-KV, WG-KV and DMS
    }
}

TEST_CASE("what a file of gates may not say") {
    CHECK(refusal_of({}).empty());
    CHECK(refusal_of({{"policy", "h2o"}}) ==
          "f: has policy \"h2o\"; kvpop, spkv, wgkv, lte, dms and streaming are known");
    CHECK(refusal_of({{"policy", "spkv"}}) ==
          "f: has scorers of kind \"write_gate\" for policy spkv; it must be one of utility");
    CHECK(refusal_of({{"threshold", "1.5"}}) == "f: \"threshold\" is 1.5; it must be a probability, 0 to 1");
    CHECK(refusal_of({{"threshold", "half"}}) == "f: \"threshold\" is \"half\"; a number is needed");
    CHECK(contains(refusal_of({{"gamma_min", "nan"}}), "\"gamma_max\" are nan and 1; they must be above 0"));
    CHECK(
        contains(refusal_of({{"gate_softcap", "-1"}}), "\"gate_softcap\" is -1; it must be a finite number"));
    CHECK(contains(refusal_of({{"rope_base", "inf"}}), "\"rope_base\" is inf; it must be a finite number"));
    CHECK(contains(refusal_of({{"rope_dims", "3"}}), "\"rope_dims\" is 3; it must be even, and at most"));
    CHECK(refusal_of({{"budget", "-1"}}) == "f: \"budget\" is -1; it must be 0 to 65536");
    CHECK(refusal_of({{"rope_layout", "sideways"}}) ==
          "f: \"rope_layout\" is \"sideways\"; it must be one of none, interleaved, half_split");
    CHECK(refusal_of({{"policy", "lte"}, {"kind", "conv"}, {"delay", "13"}}) ==
          "f: \"delay\" is 13; it must be the window, 14, which must be 13 or more");
    CHECK(
        refusal_of({{"policy", "lte"}, {"kind", "conv"}, {"delay", "14"}, {"dim_k", "4"}, {"dim_v", "3"}}) ==
        "f: \"dim_k\" + \"dim_v\" is 7; a conv halves it three times, so it must be 8 or more");
    CHECK(refusal_of({{"policy", "dms"}, {"kind", "mlp"}}) ==
          "f: \"threshold\" is 0.45; of policy dms it must be 0.5");
    CHECK(refusal_of({{"policy", "dms"}, {"kind", "mlp"}, {"threshold", "0.5"}, {"budget", "7"}}) ==
          "f: \"budget\" is 7; policy dms has none");
    CHECK(refusal_of({{"threshold", "nan"}}) == "f: \"threshold\" is nan; it must be a probability, 0 to 1");
    CHECK(refusal_of({{"rope_layout", "none"}}) ==
          "f: has no \"rope_layout\"; a write_gate needs interleaved or half_split");
    for (const char* base : {"0", "-1", "inf", "nan"}) {
        CHECK(contains(refusal_of({{"rope_base", base}}), "it must be a finite number above 0"));
    }
    for (const char* dims : {"3", "10"}) {
        CHECK(contains(refusal_of({{"rope_dims", dims}}), "it must be even, and at most \"dim_k\", 8"));
    }
    CHECK(refusal_of({{"gate_softcap", "nan"}}) ==
          "f: \"gate_softcap\" is nan; it must be a finite number, 0 or more");
    CHECK(refusal_of({{"skip", "yes"}}) == "f: \"skip\" is \"yes\"; it must be 0 or 1");
    CHECK(contains(refusal_of({{"gamma_min", "0.9"}, {"gamma_max", "0.8"}}), "they must be above 0"));
    const examples::TrainedScorers spkv = examples::load_scorers(folder + "spkv.safetensors");
    llama::Config other = model().config;
    other.hidden_size = 64;
    CHECK(message_of([&] { examples::check_fits(spkv, other, "f"); }) ==
          "f: has scorers of hidden states of 32; the model's have 64");
    const kvpolicy::host ctx(1);
    CHECK(message_of([&] {
              examples::make_trained(ctx, model().config, spkv, {"", 32, 2, 14});
          }) == "scorers: policy spkv is not allowed; it must be kvpop");
}

TEST_CASE("damaged files of gates") {
    const auto same = [](nlohmann::json&) {};
    for (const auto& [name, _] : expected()["files"].items()) {
        CHECK(refusal_of_file(name, same).empty());
    }
    for (const char* name : {"spkv", "wgkv"}) {
        CHECK(refusal_of_file(name, lacks("threshold")) ==
              ": has no \"threshold\"; gates of " + std::string(name) + " need a probability, 0 to 1");
    }
    // Sizes that no tensor has, before memory is taken for them.
    CHECK(refusal_of_file("wgkv", claims("layers", "100000000000")) ==
          ": \"layers\" is \"100000000000\"; a number is needed");
    for (const std::string name : {"spkv", "wgkv", "lte", "dms-linear", "dms-mlp", "kvpop-linear"}) {
        CAPTURE(name);
        CHECK(contains(refusal_of_file(name, claims("layers", "65536")), ": has no tensor layers.2."));
        CHECK(contains(refusal_of_file(name, claims("layers", "1")), "is not allowed; scorers of kind"));
        CHECK(contains(refusal_of_file(name, claims("heads", "65536")), "this architecture needs [65536"));
    }
    for (const std::string name : {"spkv", "wgkv", "dms-mlp"}) {
        CHECK(contains(refusal_of_file(name, claims("hidden", "65536")), "this architecture needs ["));
    }
    CHECK(contains(refusal_of_file("spkv", claims("width", "65536")), "this architecture needs [6, 65536]"));
    CHECK(contains(refusal_of_file("dms-linear", claims("dim_v", "65536")), "needs [2, 65544]"));
    for (const std::string name : {"spkv", "wgkv", "lte", "dms-mlp", "dms-linear"}) {
        const std::string first = name == "dms-linear" ? "layers.1.weight" : "layers.1.w1";
        CHECK(refusal_of_file(name, [&](nlohmann::json& header) {
                  header["layers.1.other"] = header[first];
                  header.erase(first);
              }) == ": has no tensor " + first);
        CHECK(contains(refusal_of_file(name,
                                       [&](nlohmann::json& header) {
                                           auto& shape = header[first]["shape"];
                                           std::int64_t all = 1;
                                           for (const auto& size : shape) {
                                               all *= size.get<std::int64_t>();
                                           }
                                           shape = {all};
                                       }),
                       ": tensor " + first + " has shape ["));
    }
    // A rotation that the gate would not undo.
    CHECK(contains(refusal_of_file("wgkv-capped",
                                   [](nlohmann::json& header) { header["__metadata__"]["rope_dims"] = "4"; }),
                   "tensor rope_frequencies has shape [4]; this architecture needs [2]"));
    CHECK(contains(refusal_of_file("wgkv", lacks("rope_layout")), ": has no \"rope_layout\""));
    CHECK(contains(refusal_of_file("lte",
                                   [](nlohmann::json& header) {
                                       header["alpha"] = header["layers.0.readout"];
                                       header.erase("layers.0.readout");
                                   }),
                   ": has no tensor layers.0.readout"));
    CHECK(contains(refusal_of_file("dms-linear",
                                   [](nlohmann::json& header) {
                                       header["alpha"] = header["layers.0.bias"];
                                       header.erase("layers.0.bias");
                                   }),
                   "tensor \"alpha\" is not allowed; scorers of kind linear for policy dms"));
}

TEST_CASE("gates that undo another rotation than the model's") {
    llama::Config other = model().config;
    for (const std::string name : {"wgkv", "wgkv-capped", "lte"}) {
        CAPTURE(name);
        const examples::TrainedScorers gates = examples::load_scorers(folder + name + ".safetensors");
        other.rope_theta = 100.0;
        CHECK(message_of([&] { examples::check_fits(gates, other, "f"); }).empty());
        other.rope_theta = 10000.0;
        const std::string theirs = name == "wgkv-capped" ? "with frequencies" : "theta 100";
        CHECK(message_of([&] { examples::check_fits(gates, other, "f"); }) ==
              "f: has scorers for keys that RoPE rotates as half_split, " + theirs +
                  ", 8 numbers; the model's are half_split, theta 10000, 8 numbers");
    }
    examples::TrainedScorers turned = examples::load_scorers(folder + "wgkv.safetensors");
    turned.spec.rope_layout = "interleaved";
    CHECK(contains(message_of([&] { examples::check_fits(turned, model().config, "f"); }), "as interleaved"));
    turned.spec.rope_layout = "half_split", turned.spec.rope_dims = 4;
    CHECK(contains(message_of([&] { examples::check_fits(turned, model().config, "f"); }), "4 numbers; the"));
    turned.spec.rope_dims = 8;
    CHECK(message_of([&] { examples::check_fits(turned, model().config, "f"); }).empty());
}
