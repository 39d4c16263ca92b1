// The engine on a CUDA GPU: matrix products by cuBLASLt, attention and cache by whoever stands behind
// DeviceAttention, a few kernels for the rest. A decode step is enqueued once, captured, and launched
// for every token.
#pragma once

#include "../model.hpp"
#include "../sampler.hpp"
#include "attention.hpp"
#include "device.hpp"
#include "kernels.hpp"
#include "products.hpp"

#include <cstdint>
#include <functional>
#include <span>
#include <vector>

namespace llama {

/// How the decode steps of a text reach the GPU.
enum class Replay { graph, eager };

class DeviceEngine {
  public:
    static constexpr int chunk = 512;  ///< the most tokens of a prompt that go through the layers at once

    /// `weights`: F32 or BF16, the type of matrices and of what is multiplied with them;
    /// everything else is fp32.
    DeviceEngine(const Model& model, DType weights);

    const Config& config() const noexcept { return config_; }
    cudaStream_t stream() const noexcept { return stream_.get(); }

    /// Reads a prompt of one token or more, then writes up to `count` tokens. Each is given to take(token) in
    /// its order, as soon as it is there. Where take says false the text ends; the GPU is up to 16 steps
    /// ahead by then, which the sequence keeps. Returns how many tokens were taken. The greedy token is the
    /// largest logit, the smaller id of equals; samples are Sampler's: the same generator, and the same
    /// arithmetic in double (exp may differ in its last bit). Refuses a top_k above max_candidates, tokens
    /// that there are not, and NaN among the logits.
    ///
    /// The prompt's last token is a decode step: it loads the kernels, so that the step can be captured
    /// before the first token of the text. With Replay::graph all tokens of the text but the first come from
    /// launches of that one graph.
    int write(std::span<const std::int32_t> prompt, DeviceAttention& attention, const SamplerOptions& sampler,
              int count, const std::function<bool(std::int32_t)>& take, Replay how = Replay::graph);

    /// Tokens through all layers, for what `attention` sees of them: no logits. Waits.
    void read(std::span<const std::int32_t> tokens, DeviceAttention& attention);

    /// Tokens through all layers; overwrites logits [tokens, vocab], host memory. Waits.
    void forward(std::span<const std::int32_t> tokens, DeviceAttention& attention, std::span<float> logits);

    /// Of the last write: seconds until the first token was there and the graph was ready, and how fast the
    /// tokens after the first came (0 where there was one).
    double prompt_seconds() const noexcept { return prompt_seconds_; }
    double tokens_per_second() const noexcept { return tokens_per_second_; }

  private:
    struct Layer {
        DeviceArray<float> attention_norm, mlp_norm;
        DeviceMatrix qkv, o, gate_up, down;
    };

    void check_tokens(std::span<const std::int32_t> tokens, const char* name) const;
    void allocate_buffers();
    /// Prompt tokens through all layers, a chunk at a time; done(first, count) after each.
    template <class Done>
    void chunks(std::span<const std::int32_t> tokens, DeviceAttention& attention, const Done& done);
    void layers(const std::int32_t* tokens, int count, DeviceAttention& attention);
    void logits(int first, int count);

    Config config_;
    DType type_;
    Stream stream_;
    Products products_;
    DeviceMatrix embedding_, lm_head_;
    std::vector<Layer> layers_;
    DeviceArray<float> final_norm_;
    DeviceArray<double> frequency_;  // [head_dim / 2]

    int capacity_ = 0;                  // tokens that the activations have space for
    DeviceArray<std::int32_t> tokens_;  // [capacity]
    DeviceArray<float> hidden_;         // [capacity, hidden]
    DeviceArray<float> wide_;  // [capacity, q + k + v heads x head_dim, or gate + up]: what products write
    DeviceArray<float> cos_, sin_;  // [capacity, head_dim / 2]
    DeviceArray<std::byte> normed_,
        inner_;  // [capacity, hidden], [capacity, intermediate], of the weights' type
    DeviceArray<std::byte> rows_,
        attended_;  // [capacity, all heads x head_dim], [capacity, heads x head_dim], of the cache's type
    DeviceArray<std::byte> converted_;  // attended, where the weights are of another type
    DeviceArray<float> logits_;         // [rows asked for, vocab]
    double prompt_seconds_ = 0.0, tokens_per_second_ = 0.0;
};

}  // namespace llama
