#pragma once
#include "config.hpp"

#include <cstdint>
#include <span>
#include <vector>

namespace llama {

/// Causal attention over a cache that keeps everything: what a bounded cache is compared with. One sequence,
/// fp32. Clear rather than fast; memory and time grow with the text.
class DenseAttention {
  public:
    explicit DenseAttention(const Config& config);

    /// The positions must continue where this layer's store ends.
    void operator()(int layer, std::span<const std::int64_t> positions, std::span<const float> hidden,
                    std::span<const float> q, std::span<const float> k, std::span<const float> v,
                    std::span<float> out);

    /// Tokens stored (in the last layer: the one that a forward call fills last).
    std::int64_t length() const noexcept;
    void clear() noexcept;

    /// [length, kv_heads, head_dim], keys rotated.
    std::span<const float> keys(int layer) const { return stores_.at(static_cast<std::size_t>(layer)).keys; }
    std::span<const float> values(int layer) const {
        return stores_.at(static_cast<std::size_t>(layer)).values;
    }

  private:
    struct Store {
        std::vector<float> keys, values;
    };

    int heads_, kv_heads_, head_dim_;
    std::vector<Store> stores_;   // one a layer
    std::vector<float> weights_;  // [T, length] of one head: logits, then probabilities
};

}  // namespace llama
