// The engine's attention seam over a kvpolicy cache on a GPU: what cache_attention.hpp is on the host, and as
// short. One cache object for the model, one ref a layer; queries, keys and values are slices of the fused
// rows that the projections wrote. A source with a DualCache includes its bodies,
// kvpolicy/caches/cuda/paged/dispatch_paged.cuh.
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

/// The positions of a head's rows in use, a thread a row: positions [count] is overwritten.
template <class Ref>
__global__ void positions_kernel(Ref cache, int head, int count, std::int64_t* positions) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < count) {
        positions[i] = cache.head_rows(0, head).position(i);
    }
}

}  // namespace detail

/// A sequence of policy P whose rows are of type T, in a FixedBudgetCache, or in a DualCache that has the
/// pages of `max_seq_len` tokens from the beginning, since a captured step cannot add a slab. Compiled for
/// head_dims up to 128; the library refuses others.
template <class P, class T,
          template <kvpolicy::AnyPolicy, kvpolicy::Storage> class Cache = kvpolicy::FixedBudgetCache>
class DeviceCacheAttention final : public DeviceAttention {
  public:
    using Dims = kvpolicy::head_dims<64, 128>;

    /// `chunk` is the most tokens of a call. `scorers`, one a layer or none, have their weights in device
    /// memory; `weights` is that memory, if it is to live here. `max_seq_len` is for a DualCache.
    DeviceCacheAttention(cudaStream_t stream, const Config& config, int chunk, const P& policy,
                         const ScoreSource& source = {}, std::vector<typename P::scorer_type> scorers = {},
                         std::vector<DeviceArray<float>> weights = {}, std::int64_t max_seq_len = 0)
        : ctx_{stream},
          config_(config),
          source_(source),
          weights_(std::move(weights)),
          scorers_(std::move(scorers)),
          cache_(make_cache(config, policy, scorers_.empty() ? nullptr : scorers_.data(), max_seq_len)),
          memory_(cache_.bytes().total()),
          status_(1),
          scores_(static_cast<std::size_t>(config.kv_heads) * static_cast<std::size_t>(chunk)) {
        cache_.bind(ctx_, memory_.data(), memory_.size());
        if constexpr (pooled) {
            slab_ = DeviceArray<unsigned char>(cache_.slab_bytes());
            cache_.add_slab(ctx_, slab_.data(), slab_.size());
        }
        workspace_ = DeviceArray<unsigned char>(
            cache_.template workspace_bytes<Dims>(ctx_, {.batch = 1, .tokens = chunk}));
        ok(cudaMemsetAsync(status_.data(), 0, sizeof(std::uint32_t), stream), "cudaMemsetAsync");
    }

    DType rows() const override { return std::is_same_v<T, float> ? DType::f32 : DType::bf16; }
    const std::int64_t* length_on_device() const override { return cache_.layer(0).length; }

    void operator()(int layer, int count, const DeviceHidden& hidden, const void* qkv, void* out) override {
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
        if constexpr (P::scorer_type::when == kvpolicy::score_time::from_hidden) {
            io.hidden = hidden.type == DType::f32 ? hidden_rows<float>(hidden.data, count)
                                                  : hidden_rows<kvpolicy::bf16>(hidden.data, count);
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
            for (int head = 0; head < config_.kv_heads; ++head) {
                sum += cache_.usage(ctx_, layer, 0, head).size();
            }
        }
        return sum / (config_.layers * config_.kv_heads);
    }
    std::vector<std::int64_t> retained(int layer, int head) const override {
        const std::int32_t count = cache_.usage(ctx_, layer, 0, head).size();
        if (count == 0) {
            return {};
        }
        const DeviceArray<std::int64_t> positions(static_cast<std::size_t>(count));
        detail::positions_kernel<<<static_cast<unsigned>((count + 127) / 128), 128, 0, ctx_.stream>>>(
            cache_.layer(layer), head, count, positions.data());
        ok(cudaGetLastError(), "positions_kernel");
        return fetch(positions.data(), count);
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
    std::size_t bytes() const override {
        if constexpr (pooled) {
            // The pages that sequences have, of those that the slab has for the longest.
            return static_cast<std::size_t>((cache_.attached_pages() - cache_.free_pages(ctx_)) * page_size) *
                   static_cast<std::size_t>(2 * config_.head_dim) * sizeof(T);
        } else {
            return cache_.bytes().keys_and_values;
        }
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
            const std::int64_t pages =
                ((max_seq_len + page_size - 1) / page_size) * config.layers * config.kv_heads;
            return cache_type(
                shape,
                {.slab_pages = static_cast<std::int32_t>(pages), .max_slabs = 1, .max_seq_len = max_seq_len},
                policy, scorers);
        } else {
            return cache_type(shape, policy, scorers);
        }
    }
    template <class H>
    kvpolicy::HiddenRows hidden_rows(const void* data, int count) const {
        return kvpolicy::view_bhsd(static_cast<const H*>(data), 1, 1, count, config_.hidden_size);
    }
    template <class V>
    std::vector<V> fetch(const V* from, std::int64_t count) const {
        std::vector<V> values(static_cast<std::size_t>(count));
        ok(cudaMemcpyAsync(values.data(), from, values.size() * sizeof(V), cudaMemcpyDeviceToHost,
                           ctx_.stream),
           "cudaMemcpyAsync");
        ok(cudaStreamSynchronize(ctx_.stream), "cudaStreamSynchronize");
        return values;
    }

    kvpolicy::cuda ctx_;
    const Config& config_;
    ScoreSource source_;
    std::vector<DeviceArray<float>> weights_;
    std::vector<typename P::scorer_type> scorers_;
    cache_type cache_;
    DeviceArray<unsigned char> memory_, slab_, workspace_;
    DeviceArray<std::uint32_t> status_;
    DeviceArray<float> scores_;  // [kv_heads, chunk]
};

}  // namespace llama
