// The engine's attention seam over a kvpolicy cache: the part of this example that an engine developer takes along.
//
// One cache object for the model, one ref a layer. The engine computes in fp32 and the cache may store bf16 or fp16, so
// rows are converted on the way in and out; an engine that computes in the storage type passes its tensors as they are.
#pragma once

#include <kvpolicy/caches/fixed_budget.hpp>

#include <fmt/format.h>
#include <llama/config.hpp>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <stdexcept>
#include <type_traits>
#include <vector>

namespace llama {

/// An attention whose policy was chosen at run time.
class KvAttention {
  public:
    virtual ~KvAttention() = default;

    /// `positions` go on from length(); others are refused with std::invalid_argument.
    virtual void operator()(int layer, std::span<const std::int64_t> positions, std::span<const float> q,
                            std::span<const float> k, std::span<const float> v, std::span<float> out) = 0;
    /// Scores of the sequence's tokens for a policy that takes them from its caller, [layers][kv_heads][length].
    virtual void give_scores(std::span<const float> scores, std::int64_t length) = 0;
    virtual void clear() = 0;

    /// Tokens seen: the next token's position, whatever was evicted.
    virtual std::int64_t length() const = 0;
    /// Rows that a (layer, KV head) holds now, on average.
    virtual double rows_per_head() const = 0;
    /// Positions that a head of a layer holds now, in the order of its rows.
    virtual std::vector<kvpolicy::position_t> retained(int layer, int head) const = 0;
    /// Bytes of keys and values that the cache was given, whatever the length of the text.
    virtual std::size_t bytes() const = 0;
};

/// One sequence in a FixedBudgetCache of policy P whose rows are of type T.
template <class P, class T>
class CacheAttention final : public KvAttention {
  public:
    CacheAttention(const kvpolicy::host& on, const Config& config, const P& policy,
                   const typename P::scorer_type* scorers = nullptr)
        : on_(on),
          config_(config),
          cache_({.layers = config.layers,
                  .slots = 1,
                  .query_heads = config.heads,
                  .kv_heads = config.kv_heads,
                  .dim_k = config.head_dim,
                  .dim_v = config.head_dim},
                 policy, scorers),
          memory_(cache_.bytes().total()) {
        cache_.bind(on_, memory_.data(), memory_.size());
    }

    void operator()(int layer, std::span<const std::int64_t> positions, std::span<const float> q,
                    std::span<const float> k, std::span<const float> v, std::span<float> out) override {
        check_positions(positions);
        const auto tokens = static_cast<std::int32_t>(positions.size());
        const auto ref = cache_.ref(layer);
        const kvpolicy::Batch batch{.count = 1, .length = tokens};
        const std::size_t workspace_bytes = kvpolicy::cache_workspace_bytes(on_, ref, 1, tokens);
        if (workspace_.size() < workspace_bytes) {
            workspace_.resize(workspace_bytes);
        }
        if (out_.size() < out.size()) {
            out_.resize(out.size());
        }

        const auto rows = [&]<class U>(U* data, int heads) {
            return kvpolicy::view_bshd(data, 1, tokens, heads, config_.head_dim);
        };
        kvpolicy::CacheExtras extras;
        if (!scores_.empty()) {
            const auto heads = static_cast<std::size_t>(config_.kv_heads);
            const auto length = static_cast<std::size_t>(score_length_);
            extras.scores =
                kvpolicy::view_bhs(scores_.data() + static_cast<std::size_t>(layer) * heads * length, 1,
                                   config_.kv_heads, static_cast<std::int32_t>(score_length_));
            extras.scores.data += positions[0];
            extras.scores.length -= static_cast<std::int32_t>(positions[0]);
        }
        const T* query = stored(q, q_);
        const T* key = stored(k, k_);
        const T* value = stored(v, v_);
        T* result = std::is_same_v<T, float> ? reinterpret_cast<T*>(out.data()) : out_.data();
        const kvpolicy::workspace_view workspace{workspace_.data(), workspace_.size()};
        if (tokens == 1) {
            kvpolicy::step(on_, ref, batch, rows(query, config_.heads), rows(key, config_.kv_heads),
                           rows(value, config_.kv_heads), rows(result, config_.heads), workspace, nullptr,
                           extras);
        } else {
            kvpolicy::prefill(on_, ref, batch, rows(query, config_.heads), rows(key, config_.kv_heads),
                              rows(value, config_.kv_heads), rows(result, config_.heads), workspace, nullptr,
                              extras);
        }
        if constexpr (!std::is_same_v<T, float>) {
            std::transform(result, result + out.size(), out.begin(),
                           [](T x) { return static_cast<float>(x); });
        }
        if (layer == config_.layers - 1) {
            cache_.advance(on_, batch);
        }
    }

    void give_scores(std::span<const float> scores, std::int64_t length) override {
        scores_.assign(scores.begin(), scores.end());
        score_length_ = length;
    }

    void clear() override { cache_.clear(on_, 0); }
    std::int64_t length() const override { return cache_.length(0); }
    std::size_t bytes() const override { return cache_.bytes().keys_and_values; }
    std::vector<kvpolicy::position_t> retained(int layer, int head) const override {
        std::vector<kvpolicy::position_t> held(static_cast<std::size_t>(cache_.occupancy(layer, 0, head).rows()));
        cache_.retained(layer, 0, head, held.data());
        return held;
    }
    double rows_per_head() const override {
        double rows = 0.0;
        for (int layer = 0; layer < config_.layers; ++layer) {
            for (int head = 0; head < config_.kv_heads; ++head) {
                rows += cache_.occupancy(layer, 0, head).rows();
            }
        }
        return rows / (config_.layers * config_.kv_heads);
    }

  private:
    /// The cache counts positions itself: what comes must go on where it stands.
    void check_positions(std::span<const std::int64_t> positions) const {
        std::int64_t next = cache_.length(0);
        for (std::size_t i = 0; i < positions.size(); ++i, ++next) {
            if (positions[i] != next) {
                throw std::invalid_argument(
                    fmt::format("positions[{}]: {} is not allowed; it must be {}, since the cache holds {} "
                                "tokens so far",
                                i, positions[i], next, cache_.length(0)));
            }
        }
    }

    const T* stored(std::span<const float> from, std::vector<T>& room) {
        if constexpr (std::is_same_v<T, float>) {
            return from.data();
        } else {
            room.resize(from.size());
            std::transform(from.begin(), from.end(), room.begin(), [](float x) { return T(x); });
            return room.data();
        }
    }

    const kvpolicy::host& on_;
    const Config& config_;
    kvpolicy::FixedBudgetCache<P, T> cache_;
    std::vector<unsigned char> memory_, workspace_;
    std::vector<T> q_, k_, v_, out_;
    std::vector<float> scores_;
    std::int64_t score_length_ = 0;
};

}  // namespace llama
