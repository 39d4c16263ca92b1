// The engine's attention seam over a cache, and the policies that the programs offer by name.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <kvpolicy/h2o.hpp>
#include <kvpolicy/snapkv.hpp>
#include <kvpolicy/spkv.hpp>
#include <kvpolicy/tova.hpp>
#include <kvpolicy/wgkv.hpp>

#include "../../examples/apps/support/policies.hpp"
#include "predictors.hpp"

#include <doctest/doctest.h>
#include <llama/engine.hpp>
#include <llama/model.hpp>
#include <llama/sampler.hpp>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

llama::Config small() {
    llama::Config config;
    config.layers = 2;
    config.heads = 2;
    config.kv_heads = 1;
    config.head_dim = 8;
    return config;
}

/// What a call is refused with; empty where it is not.
template <class Call>
std::string refusal_of(Call&& call) {
    try {
        call();
    } catch (const std::exception& error) {
        return error.what();
    }
    return {};
}

/// One pass of tokens at `positions` through all layers.
void feed(llama::KvAttention& attention, const llama::Config& config,
          const std::vector<std::int64_t>& positions) {
    const auto kv = static_cast<std::size_t>(config.kv_heads * config.head_dim) * positions.size();
    const auto all = static_cast<std::size_t>(config.heads * config.head_dim) * positions.size();
    const std::vector<float> q(all, 0.5f), k(kv, 0.5f), v(kv, 0.5f);
    std::vector<float> out(all);
    for (int layer = 0; layer < config.layers; ++layer) {
        attention(layer, positions, {}, q, k, v, out);
    }
}

std::unique_ptr<llama::KvAttention> made(const kvpolicy::host& ctx, const llama::Config& config,
                                         const examples::PolicyChoice& choice) {
    return examples::make_attention<float>(ctx, config, choice, 32);
}

/// A text of the byte model from a prompt that comes in chunks, and what its caches held at the end.
struct Text {
    std::vector<std::int32_t> tokens;
    std::vector<std::vector<kvpolicy::position_t>> retained;  // [layers * kv_heads], in order
    std::vector<std::vector<float>> hidden;                   // [layers]: [tokens, hidden_size]
};

Text write(const llama::Model& model, llama::KvAttention& cache, const std::vector<std::int32_t>& prompt,
           std::size_t chunk, std::size_t count) {
    llama::Engine engine(model);
    Text text;
    text.hidden.resize(static_cast<std::size_t>(model.config.layers));
    const auto attention = [&](int layer, std::span<const std::int64_t> positions,
                               std::span<const float> hidden, std::span<const float> q,
                               std::span<const float> k, std::span<const float> v, std::span<float> out) {
        std::vector<float>& all = text.hidden[static_cast<std::size_t>(layer)];
        all.insert(all.end(), hidden.begin(), hidden.end());
        cache(layer, positions, hidden, q, k, v, out);
    };
    std::span<const float> logits;
    const auto feed = [&](std::span<const std::int32_t> tokens) {
        std::vector<std::int64_t> positions(tokens.size());
        std::iota(positions.begin(), positions.end(), cache.length());
        logits = engine.forward(tokens, positions, attention);
    };
    for (std::size_t at = 0; at < prompt.size(); at += chunk) {
        feed(std::span(prompt).subspan(at, std::min(chunk, prompt.size() - at)));
    }
    llama::Sampler sample;
    while (text.tokens.size() < count) {
        const std::int32_t token = text.tokens.emplace_back(sample(logits));
        feed({&token, 1});
    }
    for (int layer = 0; layer < model.config.layers; ++layer) {
        for (int head = 0; head < model.config.kv_heads; ++head) {
            text.retained.push_back(cache.retained(layer, head));
            std::ranges::sort(text.retained.back());
        }
    }
    return text;
}

/// Scores [layers, kv_heads, length] by score_hidden.
std::vector<float> hidden_scores(const kvpolicy::host& ctx, const llama::Config& config,
                                 const test::Predictors& predictors, const Text& text, std::int32_t length) {
    std::vector<float> scores(static_cast<std::size_t>(config.layers * config.kv_heads * length));
    const kvpolicy::Sequences sequences{.batch = 1, .length = length};
    for (int layer = 0; layer < config.layers; ++layer) {
        const auto& predictor = predictors.of_layer[static_cast<std::size_t>(layer)];
        const auto hidden = kvpolicy::view_bhsd(text.hidden[static_cast<std::size_t>(layer)].data(), 1, 1,
                                                length, config.hidden_size);
        kvpolicy::Buffer workspace(ctx,
                                   kvpolicy::score_hidden_workspace_bytes(ctx, predictor, hidden, sequences));
        kvpolicy::score_hidden(
            ctx, predictor, hidden, sequences,
            kvpolicy::view_bhs(scores.data() + static_cast<std::ptrdiff_t>(layer) * config.kv_heads * length,
                               1, config.kv_heads, length),
            workspace);
    }
    return scores;
}

}  // namespace

TEST_CASE("positions must go on where the cache stands") {
    const kvpolicy::host ctx(1);
    const llama::Config config = small();
    const auto attention = made(ctx, config, {.name = "streaming", .budget = 8});
    const auto refused = [&](const std::vector<std::int64_t>& positions, const std::string& text) {
        const std::string refusal = refusal_of([&] { feed(*attention, config, positions); });
        CAPTURE(refusal);
        CHECK(refusal.find(text) == 0);
        CHECK(attention->length() == 3);
    };
    feed(*attention, config, {0, 1, 2});
    refused({0}, "positions[0]: 0 is not allowed; it must be 3, since the cache holds 3 tokens so far");
    refused({4}, "positions[0]: 4 is not allowed; it must be 3");
    refused({3, 4, 6}, "positions[2]: 6 is not allowed; it must be 5");
    refused({3, 3}, "positions[1]: 3 is not allowed; it must be 4");
    CHECK_THROWS_AS(feed(*attention, config, {7}), std::invalid_argument);
    feed(*attention, config, {3});
    feed(*attention, config, {4, 5});
    CHECK(attention->length() == 6);
    attention->clear();
    feed(*attention, config, {0});
}

TEST_CASE("scores must be as many as the tokens that come") {
    const kvpolicy::host ctx(1);
    const llama::Config config = small();
    const auto attention = made(ctx, config, {.name = "given", .budget = 8, .sinks = 1, .window = 2});
    CHECK(refusal_of([&] { attention->give_scores(std::vector<float>(9, 1.0f), 5); }) ==
          "scores: 9 numbers for 5 tokens are not allowed; they must be one for each of 2 layers x 1 KV "
          "heads and "
          "each token");
    CHECK(refusal_of([&] { attention->give_scores({}, -1); }).find("scores: 0 numbers for -1 tokens") == 0);
    attention->give_scores(std::vector<float>(10, 1.0f), 5);
    feed(*attention, config, {0, 1, 2, 3});
    CHECK(refusal_of([&] {
              feed(*attention, config, {4, 5});
          }) == "positions: 4 to 5 are not allowed; they must be below 5, the tokens that have scores");
    CHECK(refusal_of([&] { feed(*attention, config, {}); }).empty());
    feed(*attention, config, {4});
    CHECK(refusal_of([&] { feed(*attention, config, {5}); }).find("positions: 5 to 5") == 0);
    CHECK(attention->length() == 5);
}

TEST_CASE("a streaming cache takes any budget above its sinks") {
    const kvpolicy::host ctx(1);
    const llama::Config config = small();
    for (const std::int32_t budget : {5, 8, 67, 68}) {
        const auto attention = made(ctx, config, {.name = "streaming", .budget = budget});
        for (std::int64_t t = 0; t < 80; ++t) {
            feed(*attention, config, {t});
        }
        CHECK(attention->rows_per_head() == budget);
    }
    CHECK(refusal_of([&] { made(ctx, config, {.name = "streaming", .budget = 4}); }) ==
          "budget: 4 is not allowed; it must be more than the sinks, 4");
    CHECK(refusal_of([&] { made(ctx, config, {.name = "keynorm", .budget = 67}); }) ==
          "total budget: 67 is not allowed; it must be at least sinks + window = 68");
    CHECK(refusal_of([&] { made(ctx, config, {.name = "best", .budget = 8}); }) ==
          "policy: best is not allowed; it must be one of dense, streaming, keynorm, given");
}

TEST_CASE("a cache that grows gets slabs as it needs them, and answers as a fixed one does") {
    using kvpolicy::Window;
    using Recent = kvpolicy::Policy<Window<>>;
    const kvpolicy::host ctx(1);
    const llama::Config config = small();
    const Recent policy{Window<>{3000}};
    llama::CacheAttention<Recent, float> fixed(ctx, config, policy);
    llama::CacheAttention<Recent, float, kvpolicy::DualCache> growing(ctx, config, policy, nullptr, 3000);
    CHECK(growing.bytes() == 0);

    // Chunks and single tokens; a slab has 2048 rows, and two layers share them.
    const auto numbers = [](std::size_t count, std::int64_t at) {
        std::vector<float> x(count);
        for (std::size_t i = 0; i < count; ++i) {
            x[i] = static_cast<float>((static_cast<std::int64_t>(i) * 37 + at * 11) % 23) / 11.0f - 1.0f;
        }
        return x;
    };
    std::size_t before = 0;
    for (const std::size_t tokens : {std::size_t{1}, std::size_t{900}, std::size_t{1}, std::size_t{1300}}) {
        std::vector<std::int64_t> positions(tokens);
        std::iota(positions.begin(), positions.end(), fixed.length());
        const auto q = numbers(tokens * 16, fixed.length());
        const auto k = numbers(tokens * 8, fixed.length() + 1);
        const auto v = numbers(tokens * 8, fixed.length() + 2);
        std::vector<float> out(tokens * 16), expected(tokens * 16);
        for (int layer = 0; layer < config.layers; ++layer) {
            fixed(layer, positions, {}, q, k, v, expected);
            growing(layer, positions, {}, q, k, v, out);
            double worst = 0.0;
            for (std::size_t i = 0; i < out.size(); ++i) {
                worst = std::max(worst, std::abs(double{out[i]} - double{expected[i]}));
            }
            // fp32 sums of up to 2202 weighted values of magnitude 1, in another order.
            CHECK(worst <= 2202 * 0x1p-24);
        }
        CHECK(growing.bytes() >= before);
        before = growing.bytes();
    }
    CHECK(growing.length() == 2202);
    CHECK(growing.rows_per_head() == 2202.0);
    CHECK(growing.bytes() == std::size_t{3} * 2048 * 16 * sizeof(float));

    // What another text needs is there already.
    growing.clear();
    CHECK(growing.length() == 0);
    feed(growing, config, {0, 1, 2});
    CHECK(growing.rows_per_head() == 3.0);
    CHECK(growing.bytes() == before);
}

TEST_CASE("a cache that grows says how long a text may be") {
    using Gated = kvpolicy::WGKV<2>;
    const kvpolicy::host ctx(1);
    const llama::Config config = small();
    llama::CacheAttention<Gated, float, kvpolicy::DualCache> attention(ctx, config, Gated{}, nullptr, 4);
    attention.give_scores(std::vector<float>(10, 1.0f), 5);
    feed(attention, config, {0, 1, 2, 3});
    CHECK(attention.rows_per_head() == 4.0);
    const std::string refusal = refusal_of([&] { feed(attention, config, {4}); });
    CAPTURE(refusal);
    CHECK(refusal.find("max_seq_len") != std::string::npos);
    CHECK(attention.length() == 4);
}

TEST_CASE("policies that observe attention: a prompt, then tokens") {
    using kvpolicy::ObservedPrefill;
    const kvpolicy::host ctx(1);
    const llama::Config config = small();
    std::vector<std::int64_t> prompt(20);
    std::iota(prompt.begin(), prompt.end(), 0);
    const auto rows_after = [&](llama::KvAttention& attention) {
        feed(attention, config, prompt);
        for (std::int64_t t = 20; t < 30; ++t) {
            feed(attention, config, {t});
        }
        CHECK(attention.length() == 30);
        return attention.rows_per_head();
    };
    using H2O = kvpolicy::H2O<>;
    using TOVA = kvpolicy::TOVA<>;
    for (const ObservedPrefill prefill :
         {ObservedPrefill::dense_then_prune(), ObservedPrefill::in_chunks(6), ObservedPrefill::stepwise()}) {
        llama::CacheAttention<H2O, float> h2o(ctx, config, kvpolicy::h2o_for_total(8, {prefill}));
        CHECK(rows_after(h2o) == 9.0);
        llama::CacheAttention<TOVA, kvpolicy::bf16> tova(ctx, config, kvpolicy::tova_for_total(8, {prefill}));
        CHECK(rows_after(tova) == 9.0);
        llama::CacheAttention<kvpolicy::SnapKV<>, float, kvpolicy::DualCache> snapkv(
            ctx, config, kvpolicy::snapkv_for_total(8, 2, {prefill}), nullptr, 64);
        CHECK(rows_after(snapkv) == 18.0);  // what is decoded stays
    }
}

TEST_CASE("SP-KV's predictor reads the engine's hidden states: prefill, chunks and steps") {
    constexpr std::int32_t window = 16, length = 150;
    using Predicted = kvpolicy::SPKV<window, kvpolicy::UtilityPredictor>;
    using Given = kvpolicy::SPKV<window>;
    using kvpolicy::DualCache;
    const kvpolicy::host ctx(1);
    const llama::Model model = llama::load_model(TEST_BYTE_MODEL);
    const llama::Config& config = model.config;
    const test::Predictors predictors(config);
    const std::string question = "NAME\n    strcpy, stpcpy, strcat - copy or catenate a string\n\nSYNOPSIS\n";
    const std::vector<std::int32_t> prompt(question.begin(), question.end());
    const std::size_t count = length - prompt.size();

    Text first;
    for (const std::size_t chunk : {prompt.size(), std::size_t{11}, std::size_t{1}}) {
        CAPTURE(chunk);
        const Predicted policy{{}, {}, {}, predictors.of_layer.front()};
        llama::CacheAttention<Predicted, float, DualCache> scored(ctx, config, policy,
                                                                  predictors.of_layer.data(), length);
        const Text text = write(model, scored, prompt, chunk, count);
        REQUIRE(text.hidden.front().size() == std::size_t{length} * 256);

        // The same scores, given: the same bits all along.
        llama::CacheAttention<Given, float, DualCache> given(ctx, config, {}, nullptr, length);
        const std::vector<float> scores = hidden_scores(ctx, config, predictors, text, length);
        given.give_scores(scores, length);
        const Text again = write(model, given, prompt, chunk, count);
        CHECK(again.tokens == text.tokens);
        CHECK(again.retained == text.retained);
        CHECK(again.hidden == text.hidden);

        // The keys that the paper's formula keeps in double; no score is so near to 0 that rounding decides.
        std::size_t kept = 0;
        for (int x = 0; x < config.layers * config.kv_heads; ++x) {
            const int layer = x / config.kv_heads, head = x % config.kv_heads;
            std::vector<kvpolicy::position_t> expected;
            for (std::int32_t t = 0; t < length; ++t) {
                const double utility =
                    test::exact_utility(predictors.of_layer[static_cast<std::size_t>(layer)], head,
                                        text.hidden[static_cast<std::size_t>(layer)].data() +
                                            std::ptrdiff_t{t} * config.hidden_size);
                CHECK(std::abs(utility - double{scores[static_cast<std::size_t>(x * length + t)]}) < 1e-4);
                CHECK(std::abs(utility) > 1e-4);
                if (t >= length - window || utility >= 0.0) {
                    expected.push_back(t);
                }
            }
            CHECK(text.retained[static_cast<std::size_t>(x)] == expected);
            kept += expected.size() - window;
        }
        const std::size_t all = text.retained.size() * (length - window);
        CHECK(kept > all / 10);
        CHECK(kept < all * 9 / 10);

        if (chunk == prompt.size()) {
            first = text;
        }
        CHECK(text.tokens == first.tokens);
        CHECK(text.retained == first.retained);
    }
}

TEST_CASE("a predictor without hidden states is refused") {
    using Predicted = kvpolicy::SPKV<2, kvpolicy::UtilityPredictor>;
    const kvpolicy::host ctx(1);
    llama::Config config = small();
    config.hidden_size = 20;
    const test::Predictors predictors(config);
    llama::CacheAttention<Predicted, float, kvpolicy::DualCache> attention(
        ctx, config, Predicted{{}, {}, {}, predictors.of_layer.front()}, predictors.of_layer.data(), 32);
    CHECK(refusal_of([&] { feed(attention, config, {0, 1}); }).find("io.hidden: null is not allowed") == 0);
    CHECK(attention.length() == 0);
}
