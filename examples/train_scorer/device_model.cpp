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
    void operator()(int layer, int count, const void* qkv, void* out) override {
        (*inner_)(layer, count, qkv, out);
        const llama::Config& c = engine_.config();
        const auto tokens = static_cast<std::size_t>(count);
        const auto q = static_cast<std::size_t>(c.heads) * static_cast<std::size_t>(c.head_dim),
                   kv = static_cast<std::size_t>(c.kv_heads) * static_cast<std::size_t>(c.head_dim);
        rows_.resize(tokens * (q + 2 * kv));
        q_.resize(tokens * q), k_.resize(tokens * kv), v_.resize(tokens * kv);
        llama::ok(cudaMemcpyAsync(rows_.data(), qkv, rows_.size() * sizeof(float), cudaMemcpyDeviceToHost,
                                  engine_.stream()),
                  "cudaMemcpyAsync");
        llama::ok(cudaStreamSynchronize(engine_.stream()), "cudaStreamSynchronize");
        for (std::size_t t = 0; t < tokens; ++t) {
            const float* const row = rows_.data() + t * (q + 2 * kv);
            std::copy_n(row, q, q_.data() + t * q);
            std::copy_n(row + q, kv, k_.data() + t * kv);
            std::copy_n(row + q + kv, kv, v_.data() + t * kv);
        }
        (*oracle_)(layer, {}, q_, k_, v_);
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
    const llama::DeviceEngine& engine_;
    examples::DeviceCache inner_;
    examples::Oracle* oracle_ = nullptr;
    std::vector<float> rows_, q_, k_, v_;
};

class DeviceModel {
  public:
    explicit DeviceModel(const llama::Model& model) : engine_(model, llama::DType::f32) {}

    void operator()(const std::vector<std::int32_t>& tokens, examples::Oracle& oracle) {
        const auto length = static_cast<std::int32_t>(tokens.size());
        if (length > longest_) {
            attention_.reset();  // its memory first
            attention_.emplace(
                engine_, examples::make_device_window({engine_.stream(), engine_.config(), llama::DType::f32,
                                                       llama::DeviceEngine::chunk},
                                                      {0, length, 0}));
            longest_ = length;
        }
        attention_->clear();
        attention_->watch(oracle);
        engine_.read(tokens, *attention_);
    }

  private:
    llama::DeviceEngine engine_;
    std::optional<ObservedAttention> attention_;  // a window of longest_: it keeps everything
    std::int32_t longest_ = 0;
};

}  // namespace

Observer device_observer(const llama::Model& model) {
    return [on_card = std::make_shared<DeviceModel>(model)](const std::vector<std::int32_t>& tokens,
                                                            examples::Oracle& oracle) {
        (*on_card)(tokens, oracle);
    };
}

}  // namespace train
