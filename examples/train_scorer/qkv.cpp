#include "qkv.hpp"

#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/window.hpp>

#include "support/oracle.hpp"
#include "support/safetensors_writer.hpp"
#include "support/scorers.hpp"

#include <llama/cache_attention.hpp>
#include <llama/error.hpp>
#include <llama/model.hpp>

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
    const Example& get(std::size_t index) override {
        std::optional<Example>& example = kept_.at(index);
        if (!example) {
            if (target_.leave_out) {
                kept_[last_].reset();
                last_ = index;
            }
            examples::Oracle oracle(config_);
            const std::vector<std::int32_t> tokens = tokens_(index);
            observe_(tokens, oracle);
            example.emplace();
            example->length = static_cast<std::int32_t>(tokens.size());
            const std::vector<float> target =
                target_.leave_out ? std::vector<float>() : oracle.scores(ctx_, mass_options(target_));
            const std::size_t plane = target.size() / static_cast<std::size_t>(shape_.layers);
            for (std::int32_t l = 0; l < shape_.layers; ++l) {
                const auto round = [](std::span<const float> from) {
                    std::vector<float> to(from.size());
                    std::transform(from.begin(), from.end(), to.begin(), examples::rounded_to_bf16);
                    return to;
                };
                example->k.push_back(round(oracle.keys(l)));
                example->v.push_back(round(oracle.values(l)));
                if (target_.leave_out) {
                    const std::span<const float> q = oracle.queries(l);
                    example->q.emplace_back(q.begin(), q.end());
                    continue;
                }
                const auto at = target.begin() + l * static_cast<std::ptrdiff_t>(plane);
                example->target.emplace_back(at, at + static_cast<std::ptrdiff_t>(plane));
            }
        }
        return *example;
    }

  private:
    const kvpolicy::host& ctx_;
    const llama::Config& config_;
    Observer observe_;
    QkvShape shape_;
    std::function<std::vector<std::int32_t>(std::size_t)> tokens_;
    TargetOptions target_;
    std::vector<std::optional<Example>> kept_;
    std::size_t last_ = 0;
};

class FileSource final : public QkvSource {
  public:
    FileSource(const kvpolicy::host& ctx, const std::filesystem::path& path, const TargetOptions& target,
               std::size_t most)
        : ctx_(ctx), file_(path), target_(target) {
        while (count_ < most && file_.find(name(count_, 0, "k")) != nullptr) {
            ++count_;
        }
        if (count_ == 0) {
            llama::fail("{}: holds no {}; tensors sequences.{{i}}.layers.{{l}}.q, .k and .v are needed",
                        file_.path(), name(0, 0, "k"));
        }
        while (file_.find(name(0, shape_.layers, "k")) != nullptr) {
            ++shape_.layers;
        }
        const auto& k = need(name(0, 0, "k"), 3).shape;
        const auto& v = need(name(0, 0, "v"), 3).shape;
        shape_.kv_heads = static_cast<std::int32_t>(k[1]);
        shape_.head_dim_qk = static_cast<std::int32_t>(k[2]);
        shape_.head_dim_vo = static_cast<std::int32_t>(v[2]);
        if (const llama::Tensor* q = file_.find(name(0, 0, "q")); q != nullptr && q->shape.size() == 3) {
            shape_.query_heads = static_cast<std::int32_t>(q->shape[1]);
        }
        const auto said = [&](const char* key, const std::string& wanted) {
            const auto found = file_.metadata().find(key);
            return found == file_.metadata().end() || found->second == wanted;
        };
        use_stored_ =
            said("window", std::to_string(target.window)) &&
            said("aggregate", aggregate_name(target.aggregate)) &&
            (file_.metadata().contains("look_ahead") ? said("look_ahead", look_ahead_name(target.look_ahead))
                                                     : target.look_ahead == kvpolicy::unlimited) &&
            file_.metadata().contains("window");
    }

    const QkvShape& shape() const override { return shape_; }
    std::size_t count() const override { return count_; }

    const Example& get(std::size_t index) override {
        if (loaded_ == index) {
            return example_;
        }
        loaded_.reset();
        example_ = {};
        const std::int64_t length = need(name(index, 0, "k"), 3).shape[0];
        if (length > 1 << 30) {
            llama::fail("{}: sequence {} is {} tokens long; at most 2^30 are allowed", file_.path(), index,
                        length);
        }
        example_.length = static_cast<std::int32_t>(length);
        const auto before = targets_.find(index);
        std::vector<std::vector<float>> targets;
        for (std::int32_t l = 0; l < shape_.layers; ++l) {
            example_.k.push_back(
                load(name(index, l, "k"), {length, shape_.kv_heads, shape_.head_dim_qk}, 1, 0));
            example_.v.push_back(
                load(name(index, l, "v"), {length, shape_.kv_heads, shape_.head_dim_vo}, 1, 0));
            if (before != targets_.end()) {
                continue;
            }
            const std::string stored = name(index, l, "target.") + examples::beta_name(target_.beta);
            if (target_.leave_out && !all_stored(index)) {
                example_.q.push_back(queries(index, l, stored));
            } else if (use_stored_ && file_.find(stored) != nullptr) {
                targets.push_back(load(stored, {shape_.kv_heads, length}, 0, 1));
            } else {
                targets.push_back(compute(index, l, stored));
            }
        }
        if (example_.q.empty()) {
            if (before == targets_.end()) {
                targets_[index] = std::move(targets);
            }
            example_.target = targets_[index];
        }
        loaded_ = index;
        return example_;
    }

  private:
    static std::string name(std::size_t i, std::int32_t l, const char* what) {
        return fmt::format("sequences.{}.layers.{}.{}", i, l, what);
    }

    bool all_stored(std::size_t index) const {
        bool all = use_stored_;
        for (std::int32_t l = 0; l < shape_.layers && all; ++l) {
            all = file_.find(name(index, l, "target.") + examples::beta_name(target_.beta)) != nullptr;
        }
        return all;
    }

    const llama::Tensor& need(const std::string& name, std::size_t rank) const {
        const llama::Tensor* tensor = file_.find(name);
        if (tensor == nullptr) {
            llama::fail("{}: has no tensor {}", file_.path(), name);
        }
        if (tensor->shape.size() != rank || tensor->numel == 0) {
            llama::fail("{}: tensor {} has shape {}; {} dimensions above 0 are needed", file_.path(), name,
                        llama::shape_text(tensor->shape), rank);
        }
        return *tensor;
    }

    /// In fp32; refuses another shape than `wanted`, and what is not finite, by head and position.
    std::vector<float> load(const std::string& name, const std::vector<std::int64_t>& wanted,
                            std::size_t head_axis, std::size_t position_axis) const {
        const llama::Tensor& tensor = need(name, wanted.size());
        if (tensor.shape != wanted) {
            llama::fail("{}: tensor {} has shape {}; beside its neighbors it must be {}", file_.path(), name,
                        llama::shape_text(tensor.shape), llama::shape_text(wanted));
        }
        std::vector<float> values(tensor.numel);
        llama::to_float(tensor, values);
        for (std::size_t i = 0; i < values.size(); ++i) {
            if (!std::isfinite(values[i])) {
                std::vector<std::size_t> place(wanted.size());
                std::size_t rest = i;
                for (std::size_t d = wanted.size(); d-- > 0;) {
                    place[d] = rest % static_cast<std::size_t>(wanted[d]);
                    rest /= static_cast<std::size_t>(wanted[d]);
                }
                llama::fail("{}: tensor {} holds {} at head {}, position {}; numbers must be finite",
                            file_.path(), name, values[i], place[head_axis], place[position_axis]);
            }
        }
        return values;
    }

    /// q of a layer, [length, heads, head_dim_qk].
    std::vector<float> queries(std::size_t index, std::int32_t l, const std::string& stored) {
        const std::string name_q = name(index, l, "q");
        if (file_.find(name_q) == nullptr) {
            llama::fail(
                "{}: has neither {} (for window {}, aggregate {}, look-ahead {}) nor {}; with q any target "
                "can be "
                "computed",
                file_.path(), stored, target_.window, aggregate_name(target_.aggregate),
                look_ahead_name(target_.look_ahead), name_q);
        }
        const std::int64_t heads = need(name_q, 3).shape[1], length = example_.length;
        if (heads % shape_.kv_heads != 0) {
            llama::fail("{}: {} has {} heads; a multiple of the {} heads of k is needed", file_.path(),
                        name_q, heads, shape_.kv_heads);
        }
        return load(name_q, {length, heads, shape_.head_dim_qk}, 1, 0);
    }

    std::vector<float> compute(std::size_t index, std::int32_t l, const std::string& stored) {
        const std::vector<float> rows = queries(index, l, stored);
        const std::int64_t length = example_.length;
        const auto heads = static_cast<std::int64_t>(rows.size()) / (length * shape_.head_dim_qk);
        const auto n = example_.length;
        const auto q = kvpolicy::view_bshd<const float>(rows.data(), 1, n, static_cast<std::int32_t>(heads),
                                                        shape_.head_dim_qk);
        const auto k = example_.keys(shape_, l);
        const kvpolicy::Sequences sequences{.batch = 1, .length = n};
        std::vector<float> lse(static_cast<std::size_t>(heads * length));
        std::vector<float> target(static_cast<std::size_t>(shape_.kv_heads * length));
        std::vector<unsigned char> memory(kvpolicy::future_mass_workspace_bytes<float>(ctx_, q, k));
        const kvpolicy::workspace_view workspace{memory.data(), memory.size()};
        const auto plane = kvpolicy::view_bhs(lse.data(), 1, static_cast<std::int32_t>(heads), n);
        kvpolicy::causal_lse<float>(ctx_, {}, q, k, sequences, plane, workspace);
        kvpolicy::future_mass<float>(ctx_, {}, q, k, plane, sequences,
                                     kvpolicy::view_bhs(target.data(), 1, shape_.kv_heads, n), workspace,
                                     mass_options(target_));
        return target;
    }

    const kvpolicy::host& ctx_;
    llama::Safetensors file_;
    TargetOptions target_;
    QkvShape shape_;
    std::size_t count_ = 0;
    bool use_stored_ = false;
    Example example_;
    std::optional<std::size_t> loaded_;
    std::map<std::size_t, std::vector<std::vector<float>>> targets_;
};

}  // namespace

std::string QkvShape::text() const {
    return fmt::format("{} layers, {} query heads, {} KV heads, keys of {}, values of {}", layers,
                       query_heads, kv_heads, head_dim_qk, head_dim_vo);
}

kvpolicy::FutureMassOptions mass_options(const TargetOptions& target) {
    kvpolicy::FutureMassOptions mass;
    mass.window = target.window;
    mass.look_ahead = target.look_ahead;
    mass.beta = target.beta;
    mass.aggregate = target.aggregate;
    return mass;
}

std::string look_ahead_name(std::int32_t look_ahead) {
    return look_ahead == kvpolicy::unlimited ? "all" : std::to_string(look_ahead);
}

const char* aggregate_name(kvpolicy::group_aggregate aggregate) {
    return aggregate == kvpolicy::group_aggregate::max ? "max" : "mean";
}

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

std::unique_ptr<QkvSource> file_source(const kvpolicy::host& ctx, const std::filesystem::path& file,
                                       const TargetOptions& target, std::size_t most) {
    return std::make_unique<FileSource>(ctx, file, target, most);
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
