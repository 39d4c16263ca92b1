#include "dense_attention.hpp"

#include "error.hpp"

#include <cblas.h>

#include <algorithm>
#include <cmath>

namespace llama {

DenseAttention::DenseAttention(const Config& config)
    : heads_(config.heads), kv_heads_(config.kv_heads), head_dim_(config.head_dim),
      stores_(static_cast<std::size_t>(config.layers)) {}

std::int64_t DenseAttention::length() const noexcept {
    return static_cast<std::int64_t>(stores_.back().keys.size()) / (kv_heads_ * head_dim_);
}

void DenseAttention::clear() noexcept {
    for (Store& store : stores_) {
        store.keys.clear();
        store.values.clear();
    }
}

void DenseAttention::operator()(int layer, std::span<const std::int64_t> positions, std::span<const float> q,
                                std::span<const float> k, std::span<const float> v, std::span<float> out) {
    Store& store = stores_.at(static_cast<std::size_t>(layer));
    const int row = kv_heads_ * head_dim_;
    const int count = static_cast<int>(positions.size());
    const int before = static_cast<int>(store.keys.size()) / row;
    for (int i = 0; i < count; ++i)
        if (positions[static_cast<std::size_t>(i)] != before + i)
            fail("DenseAttention: positions[{}] is {}, layer {} continues at {}", i,
                 positions[static_cast<std::size_t>(i)], layer, before + i);
    store.keys.insert(store.keys.end(), k.begin(), k.end());
    store.values.insert(store.values.end(), v.begin(), v.end());

    const int length = before + count;
    const float scale = 1.0f / std::sqrt(static_cast<float>(head_dim_));
    weights_.resize(static_cast<std::size_t>(count) * static_cast<std::size_t>(length));
    for (int head = 0; head < heads_; ++head) {
        const int kv_head = head / (heads_ / kv_heads_);
        const float* keys = store.keys.data() + kv_head * head_dim_;
        const float* values = store.values.data() + kv_head * head_dim_;
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, count, length, head_dim_, scale,
                    q.data() + head * head_dim_, heads_ * head_dim_, keys, row, 0.0f, weights_.data(), length);
        for (int i = 0; i < count; ++i) {
            const std::span<float> all(weights_.data() + static_cast<std::ptrdiff_t>(i) * length,
                                       static_cast<std::size_t>(length));
            const auto seen = all.first(static_cast<std::size_t>(before + i + 1));
            std::ranges::fill(all.subspan(seen.size()), 0.0f); // later tokens of the chunk
            const float largest = std::ranges::max(seen);
            float sum = 0;
            for (float& w : seen) sum += w = std::exp(w - largest);
            for (float& w : seen) w /= sum;
        }
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, count, head_dim_, length, 1.0f, weights_.data(), length,
                    values, row, 0.0f, out.data() + head * head_dim_, heads_ * head_dim_);
    }
}

} // namespace llama
