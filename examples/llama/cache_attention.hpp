// The engine's attention seam over a kvpolicy cache: the part of this example that an engine
// developer takes along.
//
// One cache object for the model, one ref a layer. The engine computes in fp32 and the cache may store bf16
// or fp16, so rows are converted on the way in and out; an engine that computes in the storage type passes
// its tensors as they are.
#pragma once

#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/caches/fixed_budget.hpp>

#include <fmt/format.h>
#include <llama/config.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>
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
    virtual void operator()(int layer, std::span<const std::int64_t> positions, std::span<const float> hidden,
                            std::span<const float> q, std::span<const float> k, std::span<const float> v,
                            std::span<float> out) = 0;
    /// Scores of the sequence's tokens for a policy that takes them from its caller,
    /// [layers][kv_heads][length].
    virtual void give_scores(std::span<const float> scores, std::int64_t length) = 0;
    virtual void clear() = 0;

    /// Tokens seen: the next token's position, whatever was evicted.
    virtual std::int64_t length() const = 0;
    /// Rows that a (layer, KV head) holds now, on average.
    virtual double rows_per_head() const = 0;
    /// Positions that a head of a layer holds now, in the order of its rows.
    virtual std::vector<kvpolicy::position_t> retained(int layer, int head) const = 0;
    /// Bytes of keys and values that the cache was given: by its budget, whatever the length of the text,
    /// or by its gates.
    virtual std::size_t bytes() const = 0;
};

/// One sequence of policy P whose rows are of type T, in a FixedBudgetCache, or in a DualCache that is
/// attached slabs as its gates admit keys. `longest` bounds the sequence in a DualCache; a FixedBudgetCache
/// takes any length.
template <class P, class T,
          template <kvpolicy::AnyPolicy, kvpolicy::Storage> class Cache = kvpolicy::FixedBudgetCache>
class CacheAttention final : public KvAttention {
  public:
    CacheAttention(const kvpolicy::host& ctx, const Config& config, const P& policy,
                   const typename P::scorer_type* scorers = nullptr, std::int64_t max_seq_len = 0)
        : ctx_(ctx),
          config_(config),
          cache_(make_cache(config, policy, scorers, max_seq_len)),
          memory_(ctx_, cache_.bytes()) {
        cache_.bind(ctx_, memory_);
    }

    void operator()(int layer, std::span<const std::int64_t> positions, std::span<const float> hidden,
                    std::span<const float> q, std::span<const float> k, std::span<const float> v,
                    std::span<float> out) override {
        check_positions(positions);
        const auto tokens = static_cast<std::int32_t>(positions.size());
        const auto ref = cache_.layer(layer);
        workspace_.grow(kvpolicy::workspace_bytes(ctx_, ref, {.batch = 1, .tokens = tokens}));
        if (out_.size() < out.size()) {
            out_.resize(out.size());
        }

        kvpolicy::plane_view<const float> scores{};
        if (!scores_.empty()) {
            const std::int64_t first = cache_.length(0);
            if (first + tokens > score_length_) {
                throw std::invalid_argument(fmt::format(
                    "positions: {} to {} are not allowed; they must be below {}, the tokens that have scores",
                    first, first + tokens - 1, score_length_));
            }
            const auto heads = static_cast<std::size_t>(config_.kv_heads);
            const auto length = static_cast<std::size_t>(score_length_);
            scores = kvpolicy::view_bhs(scores_.data() + static_cast<std::size_t>(layer) * heads * length, 1,
                                        config_.kv_heads, static_cast<std::int32_t>(score_length_));
            scores.data += first;
            scores.length -= static_cast<std::int32_t>(first);
        }
        const T* query = stored(q, q_);
        const T* key = stored(k, k_);
        const T* value = stored(v, v_);
        T* result = std::is_same_v<T, float> ? reinterpret_cast<T*>(out.data()) : out_.data();
        kvpolicy::StepIO<T> io = cache_.nhd(query, key, value, result, {.batch = 1, .tokens = tokens});
        io.scores = scores;
        if constexpr (P::scorer_type::when == kvpolicy::score_time::from_hidden) {
            io.hidden = kvpolicy::view_bhsd(hidden.data(), 1, 1, tokens, config_.hidden_size);
        }
        const auto call = [&](std::uint32_t* status) {
            if (tokens == 1) {
                kvpolicy::step(ctx_, ref, io, workspace_, {.status = status});
            } else {
                kvpolicy::prefill(ctx_, ref, io, workspace_, {.status = status});
            }
        };
        if constexpr (pooled) {
            // Without a page the call changes nothing and says so: then it gets a slab and is made again.
            std::uint32_t status = 0;
            for (call(&status); (status & kvpolicy::status_pool_exhausted) != 0; call(&status)) {
                cache_.add_slab(ctx_, slabs_.emplace_back(ctx_, cache_.slab_bytes()));
                status = 0;
            }
        } else {
            call(nullptr);
        }
        if constexpr (!std::is_same_v<T, float>) {
            std::transform(result, result + out.size(), out.begin(),
                           [](T x) { return static_cast<float>(x); });
        }
        if (layer == config_.layers - 1) {
            cache_.advance(ctx_);
        }
    }

    void give_scores(std::span<const float> scores, std::int64_t length) override {
        const auto heads =
            static_cast<std::size_t>(config_.layers) * static_cast<std::size_t>(config_.kv_heads);
        if (length < 0 || length > std::numeric_limits<std::int32_t>::max() ||
            scores.size() != heads * static_cast<std::size_t>(length)) {
            throw std::invalid_argument(
                fmt::format("scores: {} numbers for {} tokens are not allowed; they must be one for each of "
                            "{} layers x {} KV heads and each token",
                            scores.size(), length, config_.layers, config_.kv_heads));
        }
        scores_.assign(scores.begin(), scores.end());
        score_length_ = length;
    }

    void clear() override { cache_.clear(ctx_, 0); }
    std::int64_t length() const override { return cache_.length(0); }
    std::size_t bytes() const override {
        if constexpr (pooled) {
            return static_cast<std::size_t>(cache_.attached_pages() * page_size) *
                   static_cast<std::size_t>(2 * config_.head_dim) * sizeof(T);
        } else {
            return cache_.bytes().keys_and_values;
        }
    }
    std::vector<kvpolicy::position_t> retained(int layer, int head) const override {
        std::vector<kvpolicy::position_t> held(static_cast<std::size_t>(cache_.usage(layer, 0, head).size()));
        cache_.retained(layer, 0, head, held.data());
        return held;
    }
    double rows_per_head() const override {
        double rows = 0.0;
        for (int layer = 0; layer < config_.layers; ++layer) {
            for (int head = 0; head < config_.kv_heads; ++head) {
                rows += cache_.usage(layer, 0, head).size();
            }
        }
        return rows / (config_.layers * config_.kv_heads);
    }

  private:
    using cache_type = Cache<P, T>;
    static constexpr bool pooled = cache_type::ref_type::pooled;
    static constexpr std::int32_t page_size = pooled ? 16 : 1;

    static cache_type make_cache(const Config& config, const P& policy,
                                 const typename P::scorer_type* scorers, std::int64_t max_seq_len) {
        const kvpolicy::CacheShape shape{.layers = config.layers,
                                         .max_sequences = 1,
                                         .query_heads = config.heads,
                                         .kv_heads = config.kv_heads,
                                         .head_dim = config.head_dim,
                                         .page_size = page_size};
        if constexpr (pooled) {
            constexpr std::int32_t slab_pages = 128;
            const std::int64_t pages =
                (max_seq_len / page_size + 1) * config.layers * config.kv_heads;  // were every gate open
            return cache_type(shape,
                              {.slab_pages = slab_pages,
                               .max_slabs = static_cast<std::int32_t>(pages / slab_pages + 1),
                               .max_seq_len = max_seq_len},
                              policy, scorers);
        } else {
            return cache_type(shape, policy, scorers);
        }
    }

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

    const T* stored(std::span<const float> from, std::vector<T>& workspace) {
        if constexpr (std::is_same_v<T, float>) {
            return from.data();
        } else {
            workspace.resize(from.size());
            std::transform(from.begin(), from.end(), workspace.begin(), [](float x) { return T(x); });
            return workspace.data();
        }
    }

    const kvpolicy::host& ctx_;
    const Config& config_;
    cache_type cache_;
    kvpolicy::Buffer memory_, workspace_;
    std::vector<kvpolicy::Buffer> slabs_;
    std::vector<T> q_, k_, v_, out_;
    std::vector<float> scores_;
    std::int64_t score_length_ = 0;
};

}  // namespace llama
