// The engine's attention seam over a cache, and the policies that the programs offer by name.
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include "../../examples/apps/support/policies.hpp"

#include <doctest/doctest.h>

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
        attention(layer, positions, q, k, v, out);
    }
}

std::unique_ptr<llama::KvAttention> made(const kvpolicy::host& on, const llama::Config& config,
                                         const examples::PolicyChoice& choice) {
    return examples::make_attention<float>(on, config, choice, 32);
}

}  // namespace

TEST_CASE("positions must go on where the cache stands") {
    const kvpolicy::host on(1);
    const llama::Config config = small();
    const auto attention = made(on, config, {.name = "streaming", .budget = 8});
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

TEST_CASE("a streaming cache takes any budget above its sinks") {
    const kvpolicy::host on(1);
    const llama::Config config = small();
    for (const std::int32_t budget : {5, 8, 67, 68}) {
        const auto attention = made(on, config, {.name = "streaming", .budget = budget});
        for (std::int64_t t = 0; t < 80; ++t) {
            feed(*attention, config, {t});
        }
        CHECK(attention->rows_per_head() == budget);
    }
    CHECK(refusal_of([&] { made(on, config, {.name = "streaming", .budget = 4}); }) ==
          "budget: 4 is not allowed; it must be more than the sinks, 4");
    CHECK(refusal_of([&] { made(on, config, {.name = "keynorm", .budget = 67}); }) ==
          "total budget: 67 is not allowed; it must be at least sinks + window = 68");
    CHECK(refusal_of([&] { made(on, config, {.name = "best", .budget = 8}); }) ==
          "policy: best is not allowed; it must be one of dense, streaming, keynorm, given");
}
