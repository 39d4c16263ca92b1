// Attention through the mask of an observed policy (H2O, TOVA, SnapKV): a whole sequence in one call, layer by layer, each on
// the hidden states that the layers below left it. What a cache of the policy would hold and give, in one pass.
#pragma once

#include <kvpolicy/attention/sparse.hpp>
#include <kvpolicy/core/host_buffer.hpp>
#include <kvpolicy/masks/observed.hpp>

#include <llama/cache_attention.hpp>
#include <llama/config.hpp>
#include <llama/error.hpp>

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace examples {

template <kvpolicy::AnyPolicy P>
class MaskedAttention final : public llama::KvAttention {
  public:
    /// The first `prompt` tokens are a prompt, taken as the policy's scorer says; the rest is decoded. `rows` is what a head
    /// of a cache takes.
    MaskedAttention(const kvpolicy::host& on, const llama::Config& config, const P& policy,
                    std::int32_t prompt, std::int64_t rows)
        : on_(on),
          config_(config),
          policy_(policy),
          prompt_(prompt),
          rows_(rows),
          expiry_(static_cast<std::size_t>(config.layers)) {}

    void operator()(int layer, std::span<const std::int64_t> positions, std::span<const float> q,
                    std::span<const float> k, std::span<const float> v, std::span<float> out) override {
        if (length_ != 0 && layer == 0) {
            llama::fail("MaskedAttention: takes one whole sequence in one call; {} tokens were there before",
                        length_);
        }
        const auto n = static_cast<std::int32_t>(positions.size());
        const auto stored = [](std::span<const float> from) {
            std::vector<kvpolicy::bf16> to(from.size());
            std::ranges::transform(from, to.begin(), [](float x) { return kvpolicy::bf16(x); });
            return to;
        };
        const auto sq = stored(q), sk = stored(k), sv = stored(v);
        std::vector<kvpolicy::bf16> result(out.size());
        const auto rows = [&](const std::vector<kvpolicy::bf16>& data, int heads) {
            return kvpolicy::view_bshd<const kvpolicy::bf16>(data.data(), 1, n, heads, config_.head_dim);
        };
        const auto query = rows(sq, config_.heads);
        const auto key = rows(sk, config_.kv_heads), value = rows(sv, config_.kv_heads);
        std::vector<kvpolicy::expiry_t>& expiry = expiry_[static_cast<std::size_t>(layer)];
        expiry.resize(static_cast<std::size_t>(n) * static_cast<std::size_t>(config_.kv_heads));
        const auto mask = kvpolicy::view_bhs(expiry.data(), 1, config_.kv_heads, n);
        const kvpolicy::Sequences sequences{.batch = 1, .length = n};

        room_.grow(kvpolicy::build_observed_mask_workspace_bytes<kvpolicy::bf16>(on_, policy_, query, key));
        kvpolicy::build_observed_mask<P, kvpolicy::bf16>(on_, policy_, {}, query, key, sequences, mask, room_,
                                                         {.layer = layer, .prompt = prompt_});
        const kvpolicy::keys<kvpolicy::bf16> all{key, value, {.expiry = mask}};
        room_.grow(kvpolicy::attend_workspace_bytes<kvpolicy::bf16>(on_, {}, query, all, sequences));
        kvpolicy::attend<kvpolicy::bf16>(
            on_, {}, query, all, sequences,
            kvpolicy::view_bshd(result.data(), 1, n, config_.heads, config_.head_dim), {}, room_);
        std::ranges::transform(result, out.begin(), [](kvpolicy::bf16 x) { return static_cast<float>(x); });
        if (layer == config_.layers - 1) {
            length_ = n;
        }
    }

    void give_scores(std::span<const float>, std::int64_t) override {}
    void clear() override { length_ = 0; }
    std::int64_t length() const override { return length_; }
    std::vector<kvpolicy::position_t> retained(int layer, int head) const override {
        std::vector<kvpolicy::position_t> held;
        const kvpolicy::expiry_t* expiry = expiry_[static_cast<std::size_t>(layer)].data() + head * length_;
        for (std::int64_t t = 0; t < length_; ++t) {
            if (expiry[t] >= length_) {
                held.push_back(t);
            }
        }
        return held;
    }
    double rows_per_head() const override {
        double sum = 0.0;
        for (int i = 0; i < config_.layers * config_.kv_heads; ++i) {
            sum += static_cast<double>(retained(i / config_.kv_heads, i % config_.kv_heads).size());
        }
        return sum / (config_.layers * config_.kv_heads);
    }
    std::size_t bytes() const override {
        return static_cast<std::size_t>(rows_ * config_.layers * config_.kv_heads * config_.head_dim) * 2 *
               sizeof(kvpolicy::bf16);
    }

  private:
    const kvpolicy::host& on_;
    const llama::Config& config_;
    P policy_;
    std::int32_t prompt_;
    std::int64_t rows_, length_ = 0;
    std::vector<std::vector<kvpolicy::expiry_t>> expiry_;  // [layers][kv_heads, length]
    kvpolicy::HostBuffer room_;
};

}  // namespace examples
