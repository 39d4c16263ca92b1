#include "qkv.hpp"

#include <kvpolicy/attention/head_dim.hpp>

#include "support/fingerprint.hpp"
#include "support/scorers.hpp"

#include <llama/error.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <exception>
#include <map>
#include <optional>
#include <utility>

namespace train {
namespace {

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
        check_numbers(count_ < most);
        const auto& k = need(name(0, 0, "k"), 3).shape;
        const auto& v = need(name(0, 0, "v"), 3).shape;
        const auto fits = [](std::int64_t dim) {
            return dim <= kvpolicy::checks::max_head_dim &&
                   kvpolicy::checks::head_dim_supported(static_cast<std::int32_t>(dim));
        };
        if (k[1] > max_heads || !fits(k[2]) || !fits(v[2])) {
            llama::fail(
                "{}: {} and its v have shapes {} and {}; at most {} heads are allowed, and head "
                "dimensions that are multiples of 8 up to {}",
                file_.path(), name(0, 0, "k"), llama::shape_text(k), llama::shape_text(v), max_heads,
                kvpolicy::checks::max_head_dim);
        }
        shape_.kv_heads = static_cast<std::int32_t>(k[1]);
        shape_.head_dim_qk = static_cast<std::int32_t>(k[2]);
        shape_.head_dim_vo = static_cast<std::int32_t>(v[2]);
        if (const llama::Tensor* q = file_.find(name(0, 0, "q"));
            q != nullptr && q->shape.size() == 3 && q->shape[1] <= max_heads) {
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
        example_.length = this->length(index);
        const std::int64_t length = example_.length;
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

    std::int32_t length(std::size_t index) override {
        const std::int64_t length = need(name(index, 0, "k"), 3).shape[0];
        if (length > 1 << 30) {
            llama::fail("{}: sequence {} is {} tokens long; at most 2^30 are allowed", file_.path(), index,
                        length);
        }
        return static_cast<std::int32_t>(length);
    }

    std::string verify() override {
        const std::int64_t layers = shape_.layers, tasks = static_cast<std::int64_t>(count_) * layers;
        std::vector<std::uint64_t> sums(static_cast<std::size_t>(tasks));
        std::vector<std::exception_ptr> errors(sums.size());
        ctx_.parallel_for(tasks, [&](std::int64_t task) {
            const auto at = static_cast<std::size_t>(task);
            try {
                sums[at] = verify_layer(static_cast<std::size_t>(task / layers),
                                        static_cast<std::int32_t>(task % layers));
            } catch (...) {
                errors[at] = std::current_exception();
            }
        });
        for (const std::exception_ptr& error : errors) {
            if (error) {
                std::rethrow_exception(error);
            }
        }
        examples::Fingerprint all;
        all.add(count_);
        for (const std::uint64_t sum : sums) {
            all.add(sum);
        }
        return all.text();
    }

  private:
    static constexpr std::int64_t max_heads = 1 << 16;

    static std::string name(std::size_t i, std::int32_t l, const char* what) {
        return fmt::format("sequences.{}.layers.{}.{}", i, l, what);
    }

    /// Refuses a gap in the numbers of sequences, unless there are more than are wanted, and of layers.
    void check_numbers(bool all_sequences) const {
        for (const llama::Tensor& tensor : file_.tensors()) {
            std::string_view rest = tensor.name;
            std::size_t sequence = 0, layer = 0;
            if (!rest.starts_with("sequences.")) {
                continue;
            }
            if (!skip(rest, "sequences.", sequence) || !skip(rest, ".layers.", layer) ||
                !rest.starts_with('.')) {
                llama::fail("{}: has a tensor {}; its name must be sequences.{{i}}.layers.{{l}}.NAME",
                            file_.path(), llama::printable(tensor.name));
            }
            if (sequence >= count_ && all_sequences) {
                llama::fail("{}: has {} but no {}; sequences must be numbered 0, 1, 2 without a gap",
                            file_.path(), llama::printable(tensor.name), name(count_, 0, "k"));
            }
            if (sequence < count_ && layer >= static_cast<std::size_t>(shape_.layers)) {
                llama::fail("{}: has {} but no {}; layers must be numbered 0, 1, 2 without a gap",
                            file_.path(), llama::printable(tensor.name), name(0, shape_.layers, "k"));
            }
        }
    }
    /// Takes a word and a number without leading zeros off a name.
    static bool skip(std::string_view& name, std::string_view word, std::size_t& number) {
        if (!name.starts_with(word)) {
            return false;
        }
        name.remove_prefix(word.size());
        const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), number);
        const auto digits = static_cast<std::size_t>(end - name.data());
        if (error != std::errc{} || (digits > 1 && name.front() == '0')) {
            return false;
        }
        name.remove_prefix(digits);
        return true;
    }

    /// Loads what get() would load of a layer; returns a fingerprint of it.
    std::uint64_t verify_layer(std::size_t index, std::int32_t l) {
        const std::int64_t length = this->length(index);
        examples::Fingerprint sum;
        sum.add(static_cast<std::uint64_t>(length));
        const auto add = [&](const std::string& of) {
            const llama::Tensor& tensor = *file_.find(of);
            sum.add(llama::name_of(tensor.dtype));
            sum.add(tensor.data, tensor.numel * llama::bytes_of(tensor.dtype));
        };
        const std::string k = name(index, l, "k"), v = name(index, l, "v"),
                          stored = name(index, l, "target.") + examples::beta_name(target_.beta);
        const std::vector<float> keys = load(k, {length, shape_.kv_heads, shape_.head_dim_qk}, 1, 0);
        load(v, {length, shape_.kv_heads, shape_.head_dim_vo}, 1, 0);
        add(k);
        add(v);
        const bool has_target = use_stored_ && file_.find(stored) != nullptr;
        if (has_target) {
            load(stored, {shape_.kv_heads, length}, 0, 1);
            add(stored);
        }
        if (!has_target || (target_.leave_out && !all_stored(index))) {
            // A target is made of their products, whose sum must not overflow.
            const double product = largest(keys) * largest(queries(index, l, stored)) * shape_.head_dim_qk;
            if (product > 1e37) {
                llama::fail("{}: products of {} and its k reach {:.1e}; they must be at most 1e37",
                            file_.path(), name(index, l, "q"), product);
            }
        }
        if (!has_target) {
            add(name(index, l, "q"));
        }
        return sum.value();
    }

    static double largest(const std::vector<float>& values) {
        float most = 0.0f;
        for (const float x : values) {
            most = std::max(most, std::fabs(x));
        }
        return static_cast<double>(most);
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
        const std::int64_t length = this->length(index);
        const std::string name_q = name(index, l, "q");
        if (file_.find(name_q) == nullptr) {
            llama::fail(
                "{}: has neither {} (for window {}, aggregate {}, look-ahead {}) nor {}; with q any target "
                "can be computed",
                file_.path(), stored, target_.window, aggregate_name(target_.aggregate),
                look_ahead_name(target_.look_ahead), name_q);
        }
        const std::int64_t heads = need(name_q, 3).shape[1];
        if (heads % shape_.kv_heads != 0) {
            llama::fail("{}: {} has {} heads; a multiple of the {} heads of k is needed", file_.path(),
                        name_q, heads, shape_.kv_heads);
        }
        if (shape_.query_heads != 0 && heads != shape_.query_heads) {
            llama::fail("{}: {} has {} heads; beside its neighbors it must have {}", file_.path(), name_q,
                        heads, shape_.query_heads);
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

void check_lengths(QkvSource& source, std::span<const std::int32_t> budgets, std::string_view option) {
    const std::int32_t largest = *std::ranges::max_element(budgets);
    for (std::size_t i = 0; i < source.count(); ++i) {
        if (source.length(i) <= largest) {
            llama::fail(
                "{}: sequence {} has {} tokens; it must have more than {}, the largest of --budgets, "
                "to have a decision to learn from",
                option, i, source.length(i), largest);
        }
    }
}

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

std::unique_ptr<QkvSource> file_source(const kvpolicy::host& ctx, const std::filesystem::path& file,
                                       const TargetOptions& target, std::size_t most) {
    return std::make_unique<FileSource>(ctx, file, target, most);
}

}  // namespace train
