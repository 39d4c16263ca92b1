// q, k and v of a model that runs here, and files of them.
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/window.hpp>

#include "qkv.hpp"
#include "support/fingerprint.hpp"
#include "support/oracle.hpp"
#include "support/safetensors_writer.hpp"
#include "support/scorers.hpp"

#include <llama/cache_attention.hpp>
#include <llama/error.hpp>
#include <llama/model.hpp>

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

namespace train {
namespace {

QkvShape shape_of(const llama::Config& config) {
    return {config.layers, config.heads, config.kv_heads, config.head_dim, config.head_dim};
}

class ModelSource final : public QkvSource {
  public:
    ModelSource(const kvpolicy::host& ctx, const llama::Config& config, Observer observe, std::size_t count,
                std::function<std::vector<std::int32_t>(std::size_t)> tokens, const TargetOptions& target)
        : ctx_(ctx),
          config_(config),
          observe_(std::move(observe)),
          shape_(shape_of(config)),
          tokens_(std::move(tokens)),
          target_(target),
          kept_(count) {}

    const QkvShape& shape() const override { return shape_; }
    std::size_t count() const override { return kept_.size(); }
    std::int32_t length(std::size_t index) override {
        return static_cast<std::int32_t>(kept_.at(index) ? kept_[index]->length : std::ssize(tokens_(index)));
    }
    std::string verify() override {
        examples::Fingerprint all;
        for (std::size_t i = 0; i < count(); ++i) {
            const std::vector<std::int32_t> tokens = tokens_(i);
            all.add(tokens.data(), tokens.size() * sizeof(tokens[0]));
        }
        return all.text();
    }
    const Example& get(std::size_t index) override {
        std::optional<Example>& example = kept_.at(index);
        if (!example) {
            if (target_.leave_out) {
                kept_[last_].reset();
                last_ = index;
            }
            Example made;
            examples::Oracle oracle(config_);
            const std::vector<std::int32_t> tokens = tokens_(index);
            observe_(tokens, oracle);
            made.length = static_cast<std::int32_t>(tokens.size());
            const std::vector<float> target =
                target_.leave_out ? std::vector<float>() : oracle.scores(ctx_, mass_options(target_));
            const std::size_t plane = target.size() / static_cast<std::size_t>(shape_.layers);
            for (std::int32_t l = 0; l < shape_.layers; ++l) {
                const auto round = [&](std::span<const float> from, const char* what) {
                    check_finite(from, index, l, what);
                    std::vector<float> to(from.size());
                    std::transform(from.begin(), from.end(), to.begin(), examples::rounded_to_bf16);
                    return to;
                };
                made.k.push_back(round(oracle.keys(l), "key"));
                made.v.push_back(round(oracle.values(l), "value"));
                check_finite(oracle.queries(l), index, l, "query");
                if (target_.leave_out) {
                    const std::span<const float> q = oracle.queries(l);
                    made.q.emplace_back(q.begin(), q.end());
                    continue;
                }
                const auto at = target.begin() + l * static_cast<std::ptrdiff_t>(plane);
                made.target.emplace_back(at, at + static_cast<std::ptrdiff_t>(plane));
            }
            example = std::move(made);
        }
        return *example;
    }

  private:
    static void check_finite(std::span<const float> rows, std::size_t index, std::int32_t layer,
                             const char* what) {
        const auto bad = std::ranges::find_if(rows, [](float x) { return !std::isfinite(x); });
        if (bad != rows.end()) {
            llama::fail("sequence {}: the model has {} in a {} of layer {}; numbers must be finite", index,
                        *bad, what, layer);
        }
    }

    const kvpolicy::host& ctx_;
    const llama::Config& config_;
    Observer observe_;
    QkvShape shape_;
    std::function<std::vector<std::int32_t>(std::size_t)> tokens_;
    TargetOptions target_;
    std::vector<std::optional<Example>> kept_;
    std::size_t last_ = 0;
};

}  // namespace

Observer host_observer(const kvpolicy::host& ctx, const llama::Model& model) {
    return [&ctx, &model](const std::vector<std::int32_t>& tokens, examples::Oracle& oracle) {
        using Dense = kvpolicy::Policy<kvpolicy::Window<>>;
        constexpr std::size_t chunk = 512;
        llama::Engine engine(model);
        const auto max_seq_len = static_cast<std::int32_t>(tokens.size());
        const auto attention = std::make_unique<llama::CacheAttention<Dense, float>>(
            ctx, model.config, Dense{kvpolicy::Window<>{max_seq_len}});
        auto watched = llama::observed(*attention, oracle);
        std::vector<std::int64_t> positions(tokens.size());
        std::iota(positions.begin(), positions.end(), 0);
        for (std::size_t at = 0; at < tokens.size(); at += chunk) {
            const std::size_t n = std::min(chunk, tokens.size() - at);
            engine.forward(std::span(tokens).subspan(at, n), std::span(positions).subspan(at, n), watched,
                           llama::Logits::none);
        }
    };
}

std::unique_ptr<QkvSource> model_source(const kvpolicy::host& ctx, const llama::Config& config,
                                        Observer observe, std::size_t count,
                                        std::function<std::vector<std::int32_t>(std::size_t)> tokens,
                                        const TargetOptions& target) {
    return std::make_unique<ModelSource>(ctx, config, std::move(observe), count, std::move(tokens), target);
}

void write_dump(const kvpolicy::host& ctx, const llama::Config& c, const Observer& observe, std::size_t count,
                const std::function<std::vector<std::int32_t>(std::size_t)>& tokens, std::int32_t length,
                const TargetOptions& target, std::span<const float> betas, const std::filesystem::path& file,
                const std::function<void(std::size_t)>& progress) {
    std::vector<examples::TensorPlan> plan;
    for (std::size_t i = 0; i < count; ++i) {
        for (int l = 0; l < c.layers; ++l) {
            const std::string name = fmt::format("sequences.{}.layers.{}.", i, l);
            const auto add = [&](const std::string& what, int heads) {
                plan.push_back({name + what, llama::DType::bf16, {length, heads, c.head_dim}});
            };
            if (betas.empty()) {
                add("q", c.heads);
            }
            add("k", c.kv_heads);
            add("v", c.kv_heads);
            for (const float beta : betas) {
                plan.push_back(
                    {name + "target." + examples::beta_name(beta), llama::DType::f32, {c.kv_heads, length}});
            }
        }
    }
    std::map<std::string, std::string> metadata{{"format", "kvpolicy-qkv"}};
    if (!betas.empty()) {
        metadata["window"] = std::to_string(target.window);
        metadata["aggregate"] = aggregate_name(target.aggregate);
        metadata["look_ahead"] = look_ahead_name(target.look_ahead);
    }
    examples::SafetensorsWriter writer(file, std::move(plan), metadata);
    for (std::size_t i = 0; i < count; ++i) {
        progress(i);
        examples::Oracle oracle(c);
        observe(tokens(i), oracle);
        std::vector<std::vector<float>> targets;
        for (const float beta : betas) {
            TargetOptions with = target;
            with.beta = beta;
            targets.push_back(oracle.scores(ctx, mass_options(with)));
        }
        for (int l = 0; l < c.layers; ++l) {
            if (betas.empty()) {
                writer.write(oracle.queries(l));
            }
            writer.write(oracle.keys(l));
            writer.write(oracle.values(l));
            for (const std::vector<float>& all : targets) {
                const std::size_t plane = all.size() / static_cast<std::size_t>(c.layers);
                writer.write(std::span(all).subspan(static_cast<std::size_t>(l) * plane, plane));
            }
        }
    }
    writer.finish();
}

}  // namespace train
