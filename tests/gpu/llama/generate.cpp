// The byte model on a GPU: the text that the host writes, with every policy that a GPU has; and one captured
// graph against eager calls, for ten thousand tokens.
#include <kvpolicy/spkv.hpp>

#include "predictor_cache.hpp"
#include "support/device_policies.hpp"
#include "support/policies.hpp"
#include "support/retention.hpp"
#include "support/trained.hpp"

#include <doctest/doctest.h>
#include <llama/cuda/engine.hpp>
#include <llama/engine.hpp>
#include <llama/model.hpp>
#include <llama/tokenizer.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <iterator>
#include <limits>
#include <memory>
#include <numeric>
#include <span>
#include <string>
#include <utility>
#include <vector>

namespace {

using namespace examples;

constexpr std::string_view prompt_text =
    "NAME\n    strcpy, stpcpy, strcat - copy or catenate a string\n\nSYNOPSIS\n    #include <string.h>\n\n"
    "    char *strcpy(char *restrict dst, const char *restrict src);\n\nDESCRIPTION\n    The functions copy "
    "the "
    "string pointed to by src, into a string at the buffer pointed to by dst. The programmer is responsible "
    "for allocating a destination buffer large enough.\n\n";

struct ByteModel {
    llama::Model model = llama::load_model(KVPOLICY_BYTE_MODEL);
    std::vector<std::int32_t> prompt = llama::Tokenizer::bytes().encode(prompt_text);
    kvpolicy::host ctx{0};
    TrainedScorers mlp = load_scorers(KVPOLICY_BYTE_MODEL "/scorers/kvpop-mlp.safetensors");
    TrainedScorers mlstm = load_scorers(KVPOLICY_BYTE_MODEL "/scorers/kvpop.safetensors");
};
ByteModel& byte_model() {
    static ByteModel made;
    return made;
}

using HostCache = std::unique_ptr<llama::KvAttention>;

struct Written {
    std::vector<std::int32_t> tokens;
    std::vector<std::vector<float>> logits;  // that each was picked from
};

Written host_ctx(llama::KvAttention& attention, std::int32_t count) {
    ByteModel& m = byte_model();
    llama::Engine engine(m.model);
    Written written;
    std::vector<std::int64_t> positions(m.prompt.size());
    for (std::size_t i = 0; i < positions.size(); ++i) {
        positions[i] = static_cast<std::int64_t>(i);
    }
    llama::Sampler sample;
    auto logits = engine.forward(m.prompt, positions, attention);
    while (static_cast<std::int32_t>(written.tokens.size()) < count) {
        written.logits.emplace_back(logits.begin(), logits.end());
        const std::int32_t token = sample(logits);
        written.tokens.push_back(token);
        const std::int64_t position = attention.length();
        logits = engine.forward({&token, 1}, {&position, 1}, attention);
    }
    return written;
}

std::vector<std::int32_t> on_gpu(llama::DeviceEngine& engine, llama::DeviceAttention& attention,
                                 std::int32_t count, llama::Replay how = llama::Replay::graph,
                                 const llama::SamplerOptions& sampler = {}) {
    std::vector<std::int32_t> tokens;
    const auto take = [&](std::int32_t token) {
        tokens.push_back(token);
        return true;
    };
    CHECK(engine.write(byte_model().prompt, attention, sampler, count, take, how) == count);
    return tokens;
}

/// A text of 200 bytes on both. Logits are sums of a few thousand products of which both round every one to
/// fp32: they agree to about 1e-4. So texts may part only where the best two logits lie closer than that.
void check_same_text(const std::string& name, const HostCache& host_cache, const DeviceCache& device_cache,
                     llama::DeviceEngine& engine, float bound = 1e-3f) {
    CAPTURE(name);
    constexpr std::int32_t count = 200;
    const Written expected = host_ctx(*host_cache, count);
    const std::vector<std::int32_t> got = on_gpu(engine, *device_cache, count);
    std::size_t at = 0;
    while (at < got.size() && got[at] == expected.tokens[at]) {
        ++at;
    }
    if (at < got.size()) {
        const std::vector<float>& logits = expected.logits[at];
        const float margin =
            logits[static_cast<std::size_t>(expected.tokens[at])] - logits[static_cast<std::size_t>(got[at])];
        MESSAGE(name, ": texts part at byte ", at, ", where the host's logits are ", margin, " apart");
        CHECK(margin <= bound);
    } else {
        CHECK(device_cache->rows_per_head() == doctest::Approx(host_cache->rows_per_head()).epsilon(0.02));
    }
}

/// Hands every call on, and keeps the hidden states of all layers in host memory.
class HiddenWatch final : public llama::DeviceAttention {
  public:
    HiddenWatch(const llama::DeviceEngine& engine, DeviceCache inner)
        : engine_(engine),
          inner_(std::move(inner)),
          hidden_(static_cast<std::size_t>(engine.config().layers)) {}

    const std::vector<float>& hidden(int layer) const { return hidden_[static_cast<std::size_t>(layer)]; }

    llama::DType rows() const override { return inner_->rows(); }
    const std::int64_t* length_on_device() const override { return inner_->length_on_device(); }
    void operator()(int layer, int count, const llama::DeviceHidden& hidden, const void* qkv,
                    void* out) override {
        if (hidden.type == llama::DType::bf16) {
            keep<kvpolicy::bf16>(layer, count, hidden.data);
        } else {
            keep<float>(layer, count, hidden.data);
        }
        (*inner_)(layer, count, hidden, qkv, out);
    }
    void advance(int count) override { inner_->advance(count); }
    void clear() override { inner_->clear(); }
    std::int64_t length() const override { return inner_->length(); }
    double rows_per_head() const override { return inner_->rows_per_head(); }
    std::vector<std::int64_t> retained(int layer, int head) const override {
        return inner_->retained(layer, head);
    }
    void check() const override { inner_->check(); }
    std::size_t bytes() const override { return inner_->bytes(); }

  private:
    template <class T>
    void keep(int layer, int count, const void* from) {
        const auto numbers =
            static_cast<std::size_t>(count) * static_cast<std::size_t>(engine_.config().hidden_size);
        std::vector<T> rows(numbers);
        llama::ok(
            cudaMemcpyAsync(rows.data(), from, numbers * sizeof(T), cudaMemcpyDeviceToHost, engine_.stream()),
            "cudaMemcpyAsync");
        llama::ok(cudaStreamSynchronize(engine_.stream()), "cudaStreamSynchronize");
        std::vector<float>& to = hidden_[static_cast<std::size_t>(layer)];
        std::transform(rows.begin(), rows.end(), std::back_inserter(to),
                       [](T x) { return static_cast<float>(x); });
    }

    const llama::DeviceEngine& engine_;
    DeviceCache inner_;
    std::vector<std::vector<float>> hidden_;  // [layers]: [tokens, hidden_size]
};

DeviceSetting device_setting(llama::DeviceEngine& engine, llama::DType rows) {
    return {engine.stream(), engine.config(), rows, llama::DeviceEngine::chunk};
}

}  // namespace

TEST_CASE("the host's text, rows and weights in fp32") {
    ByteModel& m = byte_model();
    const llama::Config& config = m.model.config;
    llama::DeviceEngine engine(m.model, llama::DType::f32);
    const DeviceSetting device = device_setting(engine, llama::DType::f32);
    const PolicyChoice choice{"", 128, 4, 64};
    const DeviceBudget budget{4, 64, 60};
    const auto max_seq_len = static_cast<std::int32_t>(m.prompt.size()) + 200;
    const auto host_cache = [&](const char* name) {
        PolicyChoice named = choice;
        named.name = name;
        return make_attention<float>(m.ctx, config, named, max_seq_len);
    };
    check_same_text("dense", host_cache("dense"), make_device_window(device, {0, max_seq_len, 0}), engine);
    check_same_text("streaming", host_cache("streaming"), make_device_window(device, {4, 124, 0}), engine);
    check_same_text("keynorm", host_cache("keynorm"), make_device_keynorm(device, budget, 0.0f), engine);
    check_same_text("random", make_random<float>(m.ctx, config, choice, 3),
                    make_device_random(device, budget, 3), engine);
    check_same_text("kvpop, MLP", make_trained(m.ctx, config, m.mlp, choice, false, llama::DType::f32),
                    make_device_trained(device, budget, m.mlp), engine);
    check_same_text("kvpop, mLSTM", make_trained(m.ctx, config, m.mlstm, choice, false, llama::DType::f32),
                    make_device_trained(device, budget, m.mlstm), engine);
}

TEST_CASE("SP-KV's predictor: the host's text, and the keys that the paper's formula keeps") {
    using Policy = kvpolicy::SPKV<test::predictor_window, kvpolicy::UtilityPredictor>;
    ByteModel& m = byte_model();
    const llama::Config& config = m.model.config;
    const test::Predictors predictors(config);
    const auto tokens = static_cast<std::int32_t>(m.prompt.size());
    {
        llama::DeviceEngine engine(m.model, llama::DType::f32);
        check_same_text(
            "SP-KV",
            std::make_unique<llama::CacheAttention<Policy, float, kvpolicy::DualCache>>(
                m.ctx, config, Policy{{}, {}, {}, predictors.of_layer.front()}, predictors.of_layer.data(),
                tokens + 200),
            test::make_device_predicted(device_setting(engine, llama::DType::f32), predictors, tokens + 200),
            engine);
    }
    // A prompt, and tokens one by one, with hidden states of both types.
    for (const llama::DType weights : {llama::DType::f32, llama::DType::bf16}) {
        CAPTURE(llama::name_of(weights));
        llama::DeviceEngine engine(m.model, weights);
        HiddenWatch watch(engine, test::make_device_predicted(device_setting(engine, llama::DType::f32),
                                                              predictors, tokens));
        constexpr std::size_t steps = 20;
        engine.read(std::span(m.prompt).first(m.prompt.size() - steps), watch);
        for (std::size_t i = steps; i > 0; --i) {
            engine.read(std::span(m.prompt).subspan(m.prompt.size() - i, 1), watch);
        }
        REQUIRE(watch.length() == tokens);
        std::size_t kept = 0, wrong = 0;
        for (int layer = 0; layer < config.layers; ++layer) {
            const std::vector<float>& hidden = watch.hidden(layer);
            REQUIRE(hidden.size() == m.prompt.size() * static_cast<std::size_t>(config.hidden_size));
            for (int head = 0; head < config.kv_heads; ++head) {
                const auto retained = watch.retained(layer, head);
                kept += retained.size() - test::predictor_window;
                for (std::int32_t t = 0; t < tokens; ++t) {
                    const double utility =
                        test::exact_utility(predictors.of_layer[static_cast<std::size_t>(layer)], head,
                                            hidden.data() + std::int64_t{t} * config.hidden_size);
                    const bool expected = t >= tokens - test::predictor_window || utility >= 0.0;
                    const bool held = std::ranges::find(retained, t) != retained.end();
                    wrong += held != expected && std::abs(utility) > 1e-4 ? 1 : 0;
                }
            }
        }
        CHECK(wrong == 0);
        const std::size_t all = static_cast<std::size_t>(config.layers * config.kv_heads) *
                                (m.prompt.size() - test::predictor_window);
        CHECK(kept > all / 10);
        CHECK(kept < all * 9 / 10);
    }
}

TEST_CASE("files of gates: the host's logits and entries") {
    // A tiny model with a file for each system; rows in bf16 on both. Keys differ by the rounding of what led
    // to them, and gates so near to their threshold that it decides are few.
    const std::string folder = KVPOLICY_TEST_VECTORS "/gates/";
    const llama::Model model = llama::load_model(folder);
    const kvpolicy::host ctx{0};
    llama::DeviceEngine engine(model, llama::DType::f32);
    const DeviceSetting device = device_setting(engine, llama::DType::bf16);
    std::vector<std::int32_t> tokens(200);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        tokens[i] = 1 + static_cast<std::int32_t>(i * i * 7 + i * 3) % 47;
    }
    std::vector<std::int64_t> positions(tokens.size());
    std::iota(positions.begin(), positions.end(), 0);
    const auto vocab = static_cast<std::size_t>(model.config.vocab_size);
    for (const char* name : {"spkv", "wgkv", "wgkv-capped", "lte", "lte-mlp", "dms-linear", "dms-mlp",
                             "dms-hidden", "streaming"}) {
        CAPTURE(name);
        const TrainedScorers trained = load_scorers(folder + name + ".safetensors");
        const HostCache host_cache = make_gates(ctx, model.config, trained, 256);
        const DeviceCache device_cache = make_device_gates(device, trained, 256);
        llama::Engine host_engine(model);
        const auto expected = host_engine.forward(tokens, positions, *host_cache, llama::Logits::all);
        std::vector<float> got(tokens.size() * vocab);
        engine.forward(tokens, *device_cache, got);
        double sum = 0.0, size = 0.0;
        for (std::size_t i = 0; i < got.size(); ++i) {
            sum += std::abs(static_cast<double>(got[i]) - static_cast<double>(expected[i]));
            size += std::abs(static_cast<double>(expected[i]));
        }
        MESSAGE(name, ": logits differ by ", sum / size, " of their size; ", device_cache->rows_per_head(),
                " entries per head, the host has ", host_cache->rows_per_head());
        CHECK(sum < 0.02 * size);
        CHECK(std::abs(device_cache->rows_per_head() - host_cache->rows_per_head()) <= 3.0);
        // Steps as a graph, and the memory of the pages in use.
        std::vector<std::int32_t> written;
        const auto take = [&](std::int32_t token) {
            written.push_back(token);
            return true;
        };
        const DeviceCache steps = make_device_gates(device, trained, 256);
        CHECK(engine.write(tokens, *steps, {}, 20, take) == 20);
        CHECK(steps->length() == static_cast<std::int64_t>(tokens.size()) + 19);
        if (trained.spec.policy != "streaming") {
            const double pages = std::ceil((steps->rows_per_head() + 16.0) / 16.0) + 1.0;
            CHECK(static_cast<double>(steps->bytes()) <= pages * 4.0 * 16.0 * 16.0 * 2.0);
        }
    }
}

TEST_CASE("one graph writes what eager calls write, for 10,000 tokens") {
    ByteModel& m = byte_model();
    llama::DeviceEngine engine(m.model, llama::DType::f32);
    for (const llama::DType rows : {llama::DType::bf16, llama::DType::f32}) {
        const std::int32_t count = rows == llama::DType::bf16 ? 10'000 : 2'000;  // the plain kernels are slow
        const DeviceSetting device = device_setting(engine, rows);
        const DeviceBudget budget{2, 16, 14};
        // Sampled, so that the text does not repeat itself.
        const llama::SamplerOptions sampler{.temperature = 0.9, .top_k = 40, .top_p = 0.95, .seed = 7};
        const DeviceCache eager = make_device_keynorm(device, budget, -0.01f),
                          replayed = make_device_keynorm(device, budget, -0.01f);
        const auto expected = on_gpu(engine, *eager, count, llama::Replay::eager, sampler);
        CHECK(on_gpu(engine, *replayed, count, llama::Replay::graph, sampler) == expected);
        CHECK(replayed->length() == static_cast<std::int64_t>(m.prompt.size()) + count - 1);
        CHECK(replayed->rows_per_head() == 32.0);
        CHECK(replayed->retained(3, 1) == eager->retained(3, 1));
    }
}

TEST_CASE("samples are the host's") {
    ByteModel& m = byte_model();
    llama::DeviceEngine engine(m.model, llama::DType::f32);
    const llama::SamplerOptions sampler{.temperature = 0.7, .top_k = 20, .top_p = 0.95, .seed = 11};
    const DeviceCache cache = make_device_window(device_setting(engine, llama::DType::f32), {0, 1 << 12, 0});
    // More than the generator has words.
    const auto got = on_gpu(engine, *cache, 400, llama::Replay::graph, sampler);

    // Logits of the GPU's own text, so that a near-tie parts nothing.
    llama::Engine host_engine(m.model);
    const auto attention = make_attention<float>(m.ctx, m.model.config, {"dense", 0, 4, 64}, 1 << 12);
    std::vector<std::int32_t> text = m.prompt;
    text.insert(text.end(), got.begin(), got.end());
    std::vector<std::int64_t> positions(text.size());
    for (std::size_t i = 0; i < positions.size(); ++i) {
        positions[i] = static_cast<std::int64_t>(i);
    }
    const auto logits = host_engine.forward(text, positions, *attention, llama::Logits::all);
    const auto vocab = static_cast<std::size_t>(m.model.config.vocab_size);
    llama::Sampler sample(sampler);
    std::size_t different = 0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        different += sample(logits.subspan((m.prompt.size() - 1 + i) * vocab, vocab)) != got[i] ? 1 : 0;
    }
    CHECK(different <= 2);  // a draw within 1e-4 of an edge
}

TEST_CASE("logits in bf16 weights, and refusals") {
    ByteModel& m = byte_model();
    llama::DeviceEngine engine(m.model, llama::DType::bf16);
    const DeviceSetting device = device_setting(engine, llama::DType::bf16);
    const DeviceCache cache = make_device_window(device, {0, 1024, 0});
    const auto vocab = static_cast<std::size_t>(m.model.config.vocab_size);
    std::vector<float> got(m.prompt.size() * vocab);
    engine.forward(m.prompt, *cache, got);
    llama::Engine host_engine(m.model);
    const auto attention = make_attention<kvpolicy::bf16>(m.ctx, m.model.config, {"dense", 0, 4, 64}, 1024);
    std::vector<std::int64_t> positions(m.prompt.size());
    for (std::size_t i = 0; i < positions.size(); ++i) {
        positions[i] = static_cast<std::int64_t>(i);
    }
    const auto expected = host_engine.forward(m.prompt, positions, *attention, llama::Logits::all);
    double worst = 0.0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        worst = std::max(worst, std::abs(static_cast<double>(got[i]) - static_cast<double>(expected[i])));
    }
    MESSAGE("bf16 products: logits are off by ", worst, " at most");
    CHECK(worst < 0.5);

    const auto refused = [&](std::vector<std::int32_t> prompt, const llama::SamplerOptions& sampler) {
        try {
            engine.write(prompt, *cache, sampler, 1, [](std::int32_t) { return true; });
        } catch (const std::exception& error) {
            return std::string(error.what());
        }
        return std::string();
    };
    CHECK(refused({}, {}) == "prompt: 0 tokens are not allowed; there must be 1 or more");
    CHECK(refused({1, 256}, {}) == "prompt[1] is 256, it must be from 0 to 255");
    CHECK(refused({1}, {.temperature = 1.0}) == "top_k is 0, on a GPU it must be from 1 to 64");
    CHECK(refused({1}, {.temperature = -1.0}) == "temperature is -1, it must be finite and at least 0");
}
