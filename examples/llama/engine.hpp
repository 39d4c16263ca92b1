#pragma once
#include "model.hpp"

#include <cstdint>
#include <span>
#include <utility>
#include <vector>

namespace llama {

/// The seam between the engine and whatever keeps keys and values. For T tokens of one layer,
///
///     attention(layer, positions, hidden, q, k, v, out)
///
/// gets positions[T], hidden[T, hidden_size], q[T, heads, head_dim], k and v[T, kv_heads, head_dim], all
/// contiguous, q and k already rotated, and fills out[T, heads, head_dim]. `hidden` is what q, k and v are
/// projections of: the layer's input after its RMSNorm. Scorers of hidden states (SP-KV) read it. Which
/// sequence a row belongs to, and which earlier keys it sees, is the attention's business: the engine keeps
/// nothing from one call to the next.
template <class A>
concept AttentionFunction = requires(A& attention, int layer, std::span<const std::int64_t> positions,
                                     std::span<const float> in, std::span<float> out) {
    attention(layer, positions, in, in, in, in, out);
};

/// For which tokens forward() computes logits. They cost a product with [vocab, hidden], so a prefill asks
/// for the last one's only, and for none in the chunks before.
enum class Logits { none, last, all };

/// Runs a model. Holds the activations of one call, so it is for one thread at a time; the
/// model may be shared.
class Engine {
  public:
    explicit Engine(const Model& model) : model_(&model) {}

    const Model& model() const noexcept { return *model_; }

    /// T tokens at their positions through all layers. Returns logits [1 or T, vocab], valid
    /// until the next call.
    template <AttentionFunction AttentionParams>
    std::span<const float> forward(std::span<const std::int32_t> tokens,
                                   std::span<const std::int64_t> positions, AttentionParams&& attention,
                                   Logits which = Logits::last) {
        begin(tokens, positions);
        for (int layer = 0; layer < model_->config.layers && !tokens.empty(); ++layer) {
            project_qkv(layer);
            attention(layer, positions, std::span<const float>(normed_), std::span<const float>(q_),
                      std::span<const float>(k_), std::span<const float>(v_), std::span<float>(attended_));
            finish_layer(layer);
        }
        return logits(which);
    }

  private:
    void begin(std::span<const std::int32_t> tokens, std::span<const std::int64_t> positions);
    void project_qkv(int index);
    void finish_layer(int index);
    std::span<const float> logits(Logits which);

    const Model* model_;
    int count_ = 0;                            // T, the tokens of this call
    std::vector<float> cos_, sin_;             // [T, head_dim / 2]
    std::vector<float> hidden_, normed_;       // [T, hidden]
    std::vector<float> q_, k_, v_, attended_;  // [T, heads or kv_heads, head_dim]
    std::vector<float> gate_, up_;             // [T, intermediate]
    std::vector<float> logits_;                // [1 or T, vocab]
};

/// An attention that first shows each layer's q, k and v to observer(layer, positions, q, k, v): for training
/// data, oracles and debugging. Refers to both, so they must outlive it.
template <AttentionFunction AttentionParams, class Observer>
auto observed(AttentionParams& attention, Observer& observer) {
    return [&](int layer, std::span<const std::int64_t> positions, std::span<const float> hidden,
               std::span<const float> q, std::span<const float> k, std::span<const float> v,
               std::span<float> out) {
        observer(layer, positions, q, k, v);
        attention(layer, positions, hidden, q, k, v, out);
    };
}

}  // namespace llama
