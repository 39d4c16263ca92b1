#include "engine.hpp"

#include "error.hpp"

#include <cblas.h>

#include <algorithm>
#include <atomic>
#include <cmath>

// OpenBLAS's own; null with another BLAS, whose cblas.h does not declare them.
// NOLINTBEGIN(readability-redundant-declaration)
extern "C" {
[[gnu::weak]] void openblas_set_num_threads(int threads);
[[gnu::weak]] int openblas_get_num_threads();
}
// NOLINTEND(readability-redundant-declaration)

namespace llama {
namespace {

std::size_t size(int count, int width) {
    return static_cast<std::size_t>(count) * static_cast<std::size_t>(width);
}

/// y[count, w.rows] = x[count, w.cols] w^T, or y += that. One token is a matrix times a vector, which only
/// streams the weights; BLAS libraries have no fast path for that inside gemm.
void multiply(const float* x, int count, const Matrix& w, float* y, bool add = false) {
    const float beta = add ? 1.0f : 0.0f;
    if (count == 1) {
        cblas_sgemv(CblasRowMajor, CblasNoTrans, w.rows, w.cols, 1.0f, w.values.data(), w.cols, x, 1, beta, y,
                    1);
    } else {
        cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, count, w.rows, w.cols, 1.0f, x, w.cols,
                    w.values.data(), w.cols, beta, y, w.rows);
    }
}

/// A small model's matrix-vector products take microseconds: less than it takes to wake a second thread, and
/// far less than to wait for one that the system has put aside. Chunks and large models keep all threads.
void choose_blas_threads(bool one) {
    if (openblas_set_num_threads == nullptr || openblas_get_num_threads == nullptr) {
        return;
    }
    static const int all = openblas_get_num_threads();
    static std::atomic<bool> is_one = false;  // the setting is the process's, engines may be several
    if (is_one.exchange(one) != one) {
        openblas_set_num_threads(one ? 1 : all);
    }
}

/// y = x / rms(x) * weight, row by row
void rms_norm(const float* x, int count, const std::vector<float>& weight, double eps, float* y) {
    const std::size_t width = weight.size();
    for (int row = 0; row < count; ++row, x += width, y += width) {
        float sum = 0;
        for (std::size_t i = 0; i < width; ++i) sum += x[i] * x[i];
        const auto scale =
            static_cast<float>(1.0 / std::sqrt(double{sum} / static_cast<double>(width) + eps));
        for (std::size_t i = 0; i < width; ++i) y[i] = x[i] * scale * weight[i];
    }
}

/// RoPE as Hugging Face lays it out: element i turns with element i + head_dim / 2.
void rotate(float* x, int count, int heads, int head_dim, const float* cos, const float* sin) {
    const int half = head_dim / 2;
    for (int row = 0; row < count; ++row, cos += half, sin += half) {
        for (int head = 0; head < heads; ++head, x += head_dim) {
            for (int i = 0; i < half; ++i) {
                const float a = x[i], b = x[i + half];
                x[i] = a * cos[i] - b * sin[i];
                x[i + half] = b * cos[i] + a * sin[i];
            }
        }
    }
}

}  // namespace

void Engine::begin(std::span<const std::int32_t> tokens, std::span<const std::int64_t> positions) {
    const Config& c = model_->config;
    if (tokens.size() != positions.size())
        fail("forward: there are {} tokens and {} positions, there must be as many of both", tokens.size(),
             positions.size());
    if (tokens.size() > 1 << 20)
        fail("forward: there are {} tokens, at most {} a call", tokens.size(), 1 << 20);
    for (std::size_t i = 0; i < tokens.size(); ++i) {
        if (tokens[i] < 0 || tokens[i] >= c.vocab_size)
            fail("forward: tokens[{}] is {}, it must be from 0 to {}", i, tokens[i], c.vocab_size - 1);
        if (positions[i] < 0) fail("forward: positions[{}] is {}, it must not be negative", i, positions[i]);
    }
    count_ = static_cast<int>(tokens.size());
    choose_blas_threads(count_ == 1 && model_->bytes() < std::size_t{1} << 26);

    hidden_.resize(size(count_, c.hidden_size));
    normed_.resize(hidden_.size());
    q_.resize(size(count_, c.heads * c.head_dim));
    attended_.resize(q_.size());
    k_.resize(size(count_, c.kv_heads * c.head_dim));
    v_.resize(k_.size());
    gate_.resize(size(count_, c.intermediate_size));
    up_.resize(gate_.size());

    const auto width = static_cast<std::size_t>(c.hidden_size);
    for (std::size_t row = 0; row < tokens.size(); ++row)
        std::copy_n(&model_->embedding.values[static_cast<std::size_t>(tokens[row]) * width], width,
                    &hidden_[row * width]);

    // Angles in double: in fp32, position times frequency is off by 2e-4 at position 4096.
    const int half = c.head_dim / 2;
    cos_.resize(size(count_, half));
    sin_.resize(cos_.size());
    for (int i = 0; i < half; ++i) {
        const double frequency = std::pow(c.rope_theta, -2.0 * i / c.head_dim);
        for (std::size_t row = 0; row < tokens.size(); ++row) {
            const double angle = static_cast<double>(positions[row]) * frequency;
            const std::size_t at = row * static_cast<std::size_t>(half) + static_cast<std::size_t>(i);
            cos_[at] = static_cast<float>(std::cos(angle));
            sin_[at] = static_cast<float>(std::sin(angle));
        }
    }
}

void Engine::project_qkv(int index) {
    const Config& c = model_->config;
    const Layer& layer = model_->layers[static_cast<std::size_t>(index)];
    rms_norm(hidden_.data(), count_, layer.attention_norm, c.rms_norm_eps, normed_.data());
    multiply(normed_.data(), count_, layer.q, q_.data());
    multiply(normed_.data(), count_, layer.k, k_.data());
    multiply(normed_.data(), count_, layer.v, v_.data());
    rotate(q_.data(), count_, c.heads, c.head_dim, cos_.data(), sin_.data());
    rotate(k_.data(), count_, c.kv_heads, c.head_dim, cos_.data(), sin_.data());
}

void Engine::finish_layer(int index) {
    const Config& c = model_->config;
    const Layer& layer = model_->layers[static_cast<std::size_t>(index)];
    multiply(attended_.data(), count_, layer.o, hidden_.data(), /*add=*/true);

    rms_norm(hidden_.data(), count_, layer.mlp_norm, c.rms_norm_eps, normed_.data());
    multiply(normed_.data(), count_, layer.gate, gate_.data());
    multiply(normed_.data(), count_, layer.up, up_.data());
    for (std::size_t i = 0; i < gate_.size(); ++i)
        gate_[i] *= up_[i] / (1.0f + std::exp(-gate_[i]));  // SwiGLU
    multiply(gate_.data(), count_, layer.down, hidden_.data(), /*add=*/true);
}

std::span<const float> Engine::logits(Logits which) {
    if (count_ == 0 || which == Logits::none) return {};
    const Config& c = model_->config;
    const int rows = which == Logits::all ? count_ : 1;
    rms_norm(hidden_.data() + size(count_ - rows, c.hidden_size), rows, model_->final_norm, c.rms_norm_eps,
             normed_.data());
    logits_.resize(size(rows, c.vocab_size));
    multiply(normed_.data(), rows, model_->output(), logits_.data());
    return logits_;
}

}  // namespace llama
