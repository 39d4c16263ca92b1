// The engine's attention seam over a kvpolicy cache on a GPU: what cache_attention.hpp is on the host, and as
// short. One cache object for the model, one ref a layer; queries, keys and values are slices of the fused
// rows that the projections wrote.
#pragma once

#include <kvpolicy/caches/cuda/contiguous/dispatch_contiguous.cuh>
#include <kvpolicy/caches/cuda/decode/dispatch_decode.cuh>
#include <kvpolicy/caches/cuda/prefill/dispatch_prefill.cuh>
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/core/random.hpp>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda_scorers.cuh>

#include "../config.hpp"
#include "attention.hpp"
#include "device.hpp"

#include <cmath>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace llama {

/// Where the scores of a policy that takes them from its caller come from: a kernel of ours, before the call.
struct ScoreSource {
    enum class Kind { none, key_norm, random, given };
    Kind kind = Kind::none;
    std::uint64_t seed = 0;         ///< random: kvpolicy::RandomScorer's numbers,
    std::int32_t window = 0;        ///< which are drawn when a key leaves a window of this size
    const float* scores = nullptr;  ///< given: [layers, kv_heads, longest], device memory
    std::int64_t max_seq_len = 0;
};

namespace detail {

/// scores [kv_heads, count] of the keys [count] of a layer, which lie `row_stride` apart; a thread a key. The
/// sum of squares is in the order and the roundings of the host, so that the same keys have the same scores.
template <class T>
__global__ void score_kernel(ScoreSource source, const T* keys, std::int64_t row_stride, int count,
                             int kv_heads, int head_dim, int layer, const std::int64_t* length,
                             float* scores) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i >= count * kv_heads) {
        return;
    }
    const int head = i / count, t = i % count;
    if (source.kind == ScoreSource::Kind::random) {
        const std::uint64_t stream =
            (static_cast<std::uint64_t>(layer) << 32) + static_cast<std::uint64_t>(head);
        scores[i] = static_cast<float>(kvpolicy::random_unit(
            source.seed, stream, static_cast<std::uint64_t>(*length + t + source.window)));
        return;
    }
    if (source.kind == ScoreSource::Kind::given) {
        const std::int64_t position = *length + t;
        scores[i] =
            position < source.max_seq_len
                ? source.scores[(std::int64_t{layer} * kv_heads + head) * source.max_seq_len + position]
                : 0.0f;
        return;
    }
    const T* const key = keys + t * row_stride + std::int64_t{head} * head_dim;
    float sum = 0.0f;
    for (int d = 0; d < head_dim; ++d) {
        const auto x = static_cast<float>(key[d]);
        sum = __fadd_rn(sum, __fmul_rn(x, x));
    }
    scores[i] = -sqrtf(sum);
}

}  // namespace detail

/// A sequence of policy P whose rows are of type T. Compiled for head_dims up to 128; the
/// library refuses others.
template <class P, class T>
class DeviceCacheAttention final : public DeviceAttention {
  public:
    using Dims = kvpolicy::head_dims<64, 128>;

    /// `chunk` is the most tokens of a call. `scorers`, one a layer or none, have their weights in device
    /// memory; `weights` is that memory, if it is to live here.
    DeviceCacheAttention(cudaStream_t stream, const Config& config, int chunk, const P& policy,
                         const ScoreSource& source = {}, std::vector<typename P::scorer_type> scorers = {},
                         std::vector<DeviceArray<float>> weights = {})
        : ctx_{stream},
          config_(config),
          source_(source),
          policy_(policy),
          weights_(std::move(weights)),
          scorers_(std::move(scorers)),
          cache_({.layers = config.layers,
                  .max_sequences = 1,
                  .query_heads = config.heads,
                  .kv_heads = config.kv_heads,
                  .head_dim = config.head_dim},
                 policy, scorers_.empty() ? nullptr : scorers_.data()),
          memory_(cache_.bytes().total()),
          status_(1),
          scores_(static_cast<std::size_t>(config.kv_heads) * static_cast<std::size_t>(chunk)) {
        cache_.bind(ctx_, memory_.data(), memory_.size());
        workspace_ = DeviceArray<unsigned char>(
            cache_.template workspace_bytes<Dims>(ctx_, {.batch = 1, .tokens = chunk}));
        ok(cudaMemsetAsync(status_.data(), 0, sizeof(std::uint32_t), stream), "cudaMemsetAsync");
    }

    DType rows() const override { return std::is_same_v<T, float> ? DType::f32 : DType::bf16; }
    const std::int64_t* length_on_device() const override { return cache_.layer(0).length; }

    void operator()(int layer, int count, const void* qkv, void* out) override {
        const auto ref = cache_.layer(layer);
        const auto* const rows = static_cast<const T*>(qkv);
        const std::int64_t row = std::int64_t{config_.heads + 2 * config_.kv_heads} * config_.head_dim;
        const auto heads_from = [&](int first, int heads) {
            return kvpolicy::rows_view<const T>{rows + std::int64_t{first} * config_.head_dim,
                                                1,
                                                heads,
                                                count,
                                                config_.head_dim,
                                                row * count,
                                                config_.head_dim,
                                                row};
        };
        const auto q = heads_from(0, config_.heads), k = heads_from(config_.heads, config_.kv_heads),
                   v = heads_from(config_.heads + config_.kv_heads, config_.kv_heads);
        const auto to = kvpolicy::view_bshd(static_cast<T*>(out), 1, count, config_.heads, config_.head_dim);
        kvpolicy::StepIO<T> io{.q = q, .k = k, .v = v, .out = to};
        if (source_.kind != ScoreSource::Kind::none) {
            const int keys = count * config_.kv_heads;
            detail::score_kernel<T><<<static_cast<unsigned>((keys + 127) / 128), 128, 0, ctx_.stream>>>(
                source_, k.data, row, count, config_.kv_heads, config_.head_dim, layer, ref.length,
                scores_.data());
            ok(cudaGetLastError(), "score_kernel");
            io.scores = kvpolicy::view_bhs<const float>(scores_.data(), 1, config_.kv_heads, count);
        }
        const kvpolicy::workspace_view workspace{workspace_.data(), workspace_.size()};
        if (count == 1) {
            kvpolicy::step<Dims>(ctx_, ref, io, workspace, {.status = status_.data()});
        } else {
            kvpolicy::prefill<Dims>(ctx_, ref, io, workspace, {.status = status_.data()});
        }
    }
    void advance(int count) override {
        cache_.advance(ctx_, {.count = 1, .length = count}, {.status = status_.data()});
    }
    void clear() override { cache_.clear(ctx_, 0); }

    std::int64_t length() const override { return fetch(cache_.layer(0).length, 1)[0]; }
    double rows_per_head() const override {
        double sum = 0.0;
        for (int layer = 0; layer < config_.layers; ++layer) {
            for (const std::int32_t rows : used(layer)) {
                sum += rows;
            }
        }
        return sum / (config_.layers * config_.kv_heads);
    }
    std::vector<std::int64_t> retained(int layer, int head) const override {
        const auto ref = cache_.layer(layer);
        std::int64_t first = 0;
        for (int h = 0; h < head; ++h) {
            first += capacity(layer, h);
        }
        return fetch(ref.position + first, used(layer)[static_cast<std::size_t>(head)]);
    }
    void check() const override {
        const std::uint32_t status = fetch(status_.data(), 1)[0];
        if ((status & kvpolicy::status_nan_score) != 0) {
            throw std::runtime_error("scores: NaN is not allowed; the cache ranked such keys last");
        }
        if (status != 0) {
            throw std::runtime_error("the cache's status word is " + std::to_string(status) +
                                     ", it must be 0 (kvpolicy/core/status.hpp)");
        }
    }
    std::size_t bytes() const override { return cache_.bytes().keys_and_values; }

  private:
    template <class V>
    std::vector<V> fetch(const V* from, std::int64_t count) const {
        std::vector<V> values(static_cast<std::size_t>(count));
        ok(cudaMemcpyAsync(values.data(), from, values.size() * sizeof(V), cudaMemcpyDeviceToHost,
                           ctx_.stream),
           "cudaMemcpyAsync");
        ok(cudaStreamSynchronize(ctx_.stream), "cudaStreamSynchronize");
        return values;
    }
    std::int64_t capacity(int layer, int head) const {
        const kvpolicy::HeadParams head_params = policy_.params(layer, head);
        return std::int64_t{head_params.sinks} + head_params.window +
               (P::has_budget ? head_params.budget : 0);
    }
    /// Rows in use of every KV head of a layer.
    std::vector<std::int32_t> used(int layer) const {
        const auto ref = cache_.layer(layer);
        const std::int64_t tokens = length();
        std::vector<std::int32_t> rows = fetch(ref.num_long_range, config_.kv_heads);
        for (int head = 0; head < config_.kv_heads; ++head) {
            const kvpolicy::HeadParams head_params = policy_.params(layer, head);
            std::int32_t& kept = rows[static_cast<std::size_t>(head)];
            kept = kvpolicy::HeadRows{head_params.sinks, head_params.window}.used(tokens, kept);
        }
        return rows;
    }

    kvpolicy::cuda ctx_;
    const Config& config_;
    ScoreSource source_;
    P policy_;
    std::vector<DeviceArray<float>> weights_;
    std::vector<typename P::scorer_type> scorers_;
    kvpolicy::FixedBudgetCache<P, T> cache_;
    DeviceArray<unsigned char> memory_, workspace_;
    DeviceArray<std::uint32_t> status_;
    DeviceArray<float> scores_;  // [kv_heads, chunk]
};

}  // namespace llama
