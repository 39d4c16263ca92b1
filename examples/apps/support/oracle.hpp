// The oracle: how useful each key turned out to be to the dense model, known only after the fact. An upper
// bound for any scorer, not a policy that could run.
#pragma once

#include <kvpolicy/attention/future_mass.hpp>

#include <llama/config.hpp>

#include <cstdint>
#include <span>
#include <vector>

namespace examples {

/// Collects every layer's queries, keys and values of one dense pass over a whole sequence, and turns
/// them into scores.
class Oracle {
  public:
    explicit Oracle(const llama::Config& config)
        : config_(config),
          q_(static_cast<std::size_t>(config.layers)),
          k_(static_cast<std::size_t>(config.layers)),
          v_(static_cast<std::size_t>(config.layers)) {}

    /// For llama::observed: q [T, heads, head_dim], k and v [T, kv_heads, head_dim] of the
    /// tokens that come next.
    void operator()(int layer, std::span<const std::int64_t>, std::span<const float> q,
                    std::span<const float> k, std::span<const float> v) {
        auto& queries = q_[static_cast<std::size_t>(layer)];
        auto& keys = k_[static_cast<std::size_t>(layer)];
        auto& values = v_[static_cast<std::size_t>(layer)];
        queries.insert(queries.end(), q.begin(), q.end());
        keys.insert(keys.end(), k.begin(), k.end());
        values.insert(values.end(), v.begin(), v.end());
    }

    void clear() {
        for (auto* rows : {&q_, &k_, &v_}) {
            for (auto& layer : *rows) {
                layer.clear();
            }
        }
        lse_.clear();
    }

    std::int32_t length() const {
        return static_cast<std::int32_t>(k_[0].size() /
                                         static_cast<std::size_t>(config_.kv_heads * config_.head_dim));
    }
    /// [length, heads, head_dim] and [length, kv_heads, head_dim], keys and queries rotated.
    std::span<const float> queries(int layer) const { return q_.at(static_cast<std::size_t>(layer)); }
    std::span<const float> keys(int layer) const { return k_.at(static_cast<std::size_t>(layer)); }
    std::span<const float> values(int layer) const { return v_.at(static_cast<std::size_t>(layer)); }

    /// Scores [layers][kv_heads][length]: the future-attention target with the exact dense
    /// normalizer (KVpop, eq. 3).
    std::vector<float> scores(const kvpolicy::host& ctx, const kvpolicy::FutureMassOptions& options) {
        const std::int32_t length = this->length();
        const auto plane = static_cast<std::size_t>(length) * static_cast<std::size_t>(config_.heads);
        const auto kv_plane = static_cast<std::size_t>(length) * static_cast<std::size_t>(config_.kv_heads);
        const bool first = lse_.empty();  // the normalizers do not depend on the options
        lse_.resize(plane * static_cast<std::size_t>(config_.layers));
        std::vector<float> scores(kv_plane * static_cast<std::size_t>(config_.layers));
        std::vector<unsigned char> workspace;
        const kvpolicy::Sequences sequences{.batch = 1, .length = length};
        for (std::size_t layer = 0; layer < q_.size(); ++layer) {
            const auto q = kvpolicy::view_bshd<const float>(q_[layer].data(), 1, length, config_.heads,
                                                            config_.head_dim);
            const auto k = kvpolicy::view_bshd<const float>(k_[layer].data(), 1, length, config_.kv_heads,
                                                            config_.head_dim);
            workspace.resize(kvpolicy::future_mass_workspace_bytes<float>(ctx, q, k));
            const kvpolicy::workspace_view scratch{workspace.data(), workspace.size()};
            const auto lse = kvpolicy::view_bhs(lse_.data() + layer * plane, 1, config_.heads, length);
            if (first) {
                kvpolicy::causal_lse<float>(ctx, {}, q, k, sequences, lse, scratch);
            }
            kvpolicy::future_mass<float>(
                ctx, {}, q, k, lse, sequences,
                kvpolicy::view_bhs(scores.data() + layer * kv_plane, 1, config_.kv_heads, length), scratch,
                options);
        }
        return scores;
    }

  private:
    const llama::Config& config_;
    std::vector<std::vector<float>> q_, k_, v_;  // [layers]
    std::vector<float> lse_;                     // [layers, heads, length]
};

}  // namespace examples
