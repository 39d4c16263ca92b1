// Attention together with what its policy refers to.
#pragma once

#include <kvpolicy/uniform.hpp>

#include "policies.hpp"

#include <llama/cache_attention.hpp>

#include <memory>
#include <utility>
#include <vector>

namespace examples {

/// An attention, and what its policy refers to: a scorer a layer, numbers by head. Moving a vector leaves its
/// elements where they are, so the policy may refer to them before they are handed over.
template <class Kept>
class Keeping final : public llama::KvAttention {
  public:
    Keeping(Kept kept, std::unique_ptr<llama::KvAttention> attention)
        : kept_(std::move(kept)), attention_(std::move(attention)) {}

    void operator()(int layer, std::span<const std::int64_t> positions, std::span<const float> hidden,
                    std::span<const float> q, std::span<const float> k, std::span<const float> v,
                    std::span<float> out) override {
        (*attention_)(layer, positions, hidden, q, k, v, out);
    }
    void give_scores(std::span<const float> scores, std::int64_t length) override {
        attention_->give_scores(scores, length);
    }
    void clear() override { attention_->clear(); }
    std::int64_t length() const override { return attention_->length(); }
    double rows_per_head() const override { return attention_->rows_per_head(); }
    std::vector<kvpolicy::position_t> retained(int layer, int head) const override {
        return attention_->retained(layer, head);
    }
    std::size_t bytes() const override { return attention_->bytes(); }

  private:
    Kept kept_;
    std::unique_ptr<llama::KvAttention> attention_;
};

/// Sinks, a window, and a random choice of the other keys up to the budget, drawn anew per layer and head.
template <class T = kvpolicy::bf16>
std::unique_ptr<llama::KvAttention> make_random(const kvpolicy::host& ctx, const llama::Config& config,
                                                const PolicyChoice& choice, std::uint64_t seed) {
    using Policy = kvpolicy::RandomKeys<>;
    std::vector<kvpolicy::RandomScorer> layers;
    layers.reserve(static_cast<std::size_t>(config.layers));
    for (std::int32_t layer = 0; layer < config.layers; ++layer) {
        layers.push_back({.seed = seed, .layer = layer});
    }
    auto cache = std::make_unique<llama::CacheAttention<Policy, T>>(
        ctx, config,
        Policy{kvpolicy::Sink<>{choice.sinks}, kvpolicy::Window<>{choice.window},
               kvpolicy::TopKBudget<>{kvpolicy::budget_for_total(choice.budget, choice.sinks, choice.window)},
               kvpolicy::RandomScorer{}},
        layers.data());
    return std::make_unique<Keeping<decltype(layers)>>(std::move(layers), std::move(cache));
}

}  // namespace examples
