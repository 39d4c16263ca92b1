#include "dense_attention.hpp"

#include "error.hpp"

#include <cblas.h>

#include <algorithm>
#include <cmath>

namespace llama {

DenseAttention::DenseAttention(const Config& config)
    : heads_(config.heads),
      kv_heads_(config.kv_heads),
      head_dim_(config.head_dim),
      stores_(static_cast<std::size_t>(config.layers)) {}

std::int64_t DenseAttention::length() const noexcept {
    return static_cast<std::int64_t>(stores_.back().keys.size()) / (std::int64_t{kv_heads_} * head_dim_);
}

void DenseAttention::clear() noexcept {
    for (Store& store : stores_) {
        store.keys.clear();
        store.values.clear();
    }
}

void DenseAttention::operator()(int layer, std::span<const std::int64_t> positions,
                                std::span<const float> /*hidden*/, std::span<const float> q,
                                std::span<const float> k, std::span<const float> v, std::span<float> out) {
    Store& store = stores_.at(static_cast<std::size_t>(layer));
    const int row = kv_heads_ * head_dim_;
    const std::size_t count = positions.size();
    const std::size_t before = store.keys.size() / static_cast<std::size_t>(row);
    const std::size_t length = before + count;
    for (std::size_t i = 0; i < count; ++i)
        if (positions[i] != static_cast<std::int64_t>(before + i))
            fail("DenseAttention: positions[{}] is {}, layer {} continues at {}", i, positions[i], layer,
                 before + i);
    if (length > 1u << 30)
        fail("DenseAttention: the text is {} tokens long, at most {} fit", length, 1u << 30);
    store.keys.insert(store.keys.end(), k.begin(), k.end());
    store.values.insert(store.values.end(), v.begin(), v.end());

    const int queries = static_cast<int>(count), keys = static_cast<int>(length);  // as BLAS counts
    const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim_));
    weights_.resize(count * length);
    for (int head = 0; head < heads_; ++head) {
        const std::ptrdiff_t q_at = std::ptrdiff_t{head} * head_dim_;
        const std::ptrdiff_t kv_at = std::ptrdiff_t{head / (heads_ / kv_heads_)} * head_dim_;
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, queries, keys, head_dim_, scale, q.data() + q_at,
                    heads_ * head_dim_, store.keys.data() + kv_at, row, 0.0f, weights_.data(), keys);
        for (std::size_t i = 0; i < count; ++i) {
            const auto all = std::span(weights_).subspan(i * length, length);
            const auto seen = all.first(before + i + 1);
            std::ranges::fill(all.subspan(seen.size()), 0.0f);  // later tokens of the chunk
            const float largest = std::ranges::max(seen);
            float sum = 0;
            for (float& w : seen) sum += w = std::exp(w - largest);
            for (float& w : seen) w /= sum;
        }
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, queries, head_dim_, keys, 1.0f,
                    weights_.data(), keys, store.values.data() + kv_at, row, 0.0f, out.data() + q_at,
                    heads_ * head_dim_);
    }
}

}  // namespace llama
