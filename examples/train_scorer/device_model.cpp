#include "device_model.hpp"

#include "support/device_policies.hpp"
#include "support/oracle.hpp"

#include <llama/cuda/engine.hpp>

#include <algorithm>
#include <memory>
#include <optional>
#include <utility>

namespace train {
namespace {

/// Hands every call on, and what it was given, in host memory, to an oracle.
class ObservedAttention final : public llama::DeviceAttention {
  public:
    ObservedAttention(const llama::DeviceEngine& engine, examples::DeviceCache inner)
        : engine_(engine), inner_(std::move(inner)) {}

    void watch(examples::Oracle& oracle) { oracle_ = &oracle; }

    llama::DType rows() const override { return inner_->rows(); }
    const std::int64_t* length_on_device() const override { return inner_->length_on_device(); }
    void operator()(int layer, int count, const llama::DeviceHidden& hidden, const void* qkv,
                    void* out) override {
        (*inner_)(layer, count, hidden, qkv, out);
        if (rows() == llama::DType::bf16) {
            watch_rows(layer, count, qkv, in_bf16_);
        } else {
            watch_rows(layer, count, qkv, in_fp32_);
        }
    }
    void advance(int count) override { inner_->advance(count); }
    void clear() override { inner_->clear(); }
    std::int64_t length() const override { return inner_->length(); }
    double rows_per_head() const override { return inner_->rows_per_head(); }
    std::vector<std::int64_t> retained(int layer, int head) const override {
        return inner_->retained(layer, head);
    }
    void check() const override { inner_->check(); }
    std::size_t bytes() const override { return inner_->bytes(); }

  private:
    template <class T>
    void watch_rows(int layer, int count, const void* qkv, std::vector<T>& rows) {
        const llama::Config& c = engine_.config();
        const auto tokens = static_cast<std::size_t>(count);
        const auto q = static_cast<std::size_t>(c.heads) * static_cast<std::size_t>(c.head_dim),
                   kv = static_cast<std::size_t>(c.kv_heads) * static_cast<std::size_t>(c.head_dim);
        rows.resize(tokens * (q + 2 * kv));
        q_.resize(tokens * q), k_.resize(tokens * kv), v_.resize(tokens * kv);
        llama::ok(cudaMemcpyAsync(rows.data(), qkv, rows.size() * sizeof(T), cudaMemcpyDeviceToHost,
                                  engine_.stream()),
                  "cudaMemcpyAsync");
        llama::ok(cudaStreamSynchronize(engine_.stream()), "cudaStreamSynchronize");
        for (std::size_t t = 0; t < tokens; ++t) {
            const T* const row = rows.data() + t * (q + 2 * kv);
            const auto copy = [](const T* from, std::size_t n, float* to) {
                std::transform(from, from + n, to, [](T x) { return static_cast<float>(x); });
            };
            copy(row, q, q_.data() + t * q);
            copy(row + q, kv, k_.data() + t * kv);
            copy(row + q + kv, kv, v_.data() + t * kv);
        }
        (*oracle_)(layer, {}, q_, k_, v_);
    }

    const llama::DeviceEngine& engine_;
    examples::DeviceCache inner_;
    examples::Oracle* oracle_ = nullptr;
    std::vector<float> in_fp32_, q_, k_, v_;
    std::vector<kvpolicy::bf16> in_bf16_;
};

class DeviceModel {
  public:
    DeviceModel(const llama::Model& model, llama::DType rows)
        : engine_(model, llama::DType::f32), rows_(rows) {}

    void operator()(const std::vector<std::int32_t>& tokens, examples::Oracle& oracle) {
        const auto length = static_cast<std::int32_t>(tokens.size());
        if (length > max_seq_len_) {
            attention_.reset();  // its memory first
            attention_.emplace(engine_, examples::make_device_window({engine_.stream(), engine_.config(),
                                                                      rows_, llama::DeviceEngine::chunk},
                                                                     {0, length, 0}));
            max_seq_len_ = length;
        }
        attention_->clear();
        attention_->watch(oracle);
        engine_.read(tokens, *attention_);
    }

  private:
    llama::DeviceEngine engine_;
    llama::DType rows_;
    std::optional<ObservedAttention> attention_;  // a window of longest_: it keeps everything
    std::int32_t max_seq_len_ = 0;
};

}  // namespace

Observer device_observer(const llama::Model& model, llama::DType rows) {
    return
        [on_gpu = std::make_shared<DeviceModel>(model, rows)](
            const std::vector<std::int32_t>& tokens, examples::Oracle& oracle) { (*on_gpu)(tokens, oracle); };
}

}  // namespace train
