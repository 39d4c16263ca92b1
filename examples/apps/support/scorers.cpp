#include "scorers.hpp"

#include <kvpolicy/policies/decay.hpp>

#include "safetensors_writer.hpp"

#include <llama/error.hpp>
#include <llama/safetensors.hpp>

#include <charconv>
#include <cmath>
#include <utility>

namespace examples {
namespace {

Mlp sized(const ScorerSpec& spec, Mlp scorer) {
    scorer.heads = spec.heads, scorer.head_dim_qk = spec.head_dim_qk, scorer.head_dim_vo = spec.head_dim_vo;
    scorer.hidden = spec.hidden;
    return scorer;
}
Mlstm sized(const ScorerSpec& spec, Mlstm scorer) {
    scorer.heads = spec.heads, scorer.head_dim_qk = spec.head_dim_qk, scorer.head_dim_vo = spec.head_dim_vo;
    scorer.d_qk = spec.d_qk, scorer.d_v = spec.d_v, scorer.gate_softcap = spec.gate_softcap;
    scorer.norm = spec.layer_norm ? kvpolicy::mlstm_norm::layer : kvpolicy::mlstm_norm::rms;
    return scorer;
}

/// Optional parts of an architecture that this one leaves out.
bool left_out(const ScorerSpec& spec, std::string_view name) {
    return (name == "norm_gain" && !spec.norm && !spec.layer_norm) || (name == "skip" && !spec.skip);
}

bool is_matrix(std::string_view name) {
    return name == "w1" || name == "w_q" || name == "w_k" || name == "w_v";
}

/// What "norm" of a file says; 1 is an RMS norm.
const std::string layer_norm_name = "layer";

const char* number_names[] = {"layers", "heads", "dim_k", "dim_v", "hidden",
                              "d_qk",   "d_v",   "delay", "sinks", "window"};

std::int32_t* number(ScorerSpec& spec, std::size_t i) {
    std::int32_t* fields[] = {&spec.layers, &spec.heads, &spec.head_dim_qk, &spec.head_dim_vo, &spec.hidden,
                              &spec.d_qk,   &spec.d_v,   &spec.delay,       &spec.sinks,       &spec.window};
    return fields[i];
}

}  // namespace

bool reads_inputs(std::string_view name) {
    return is_matrix(name) || name == "w_i" || name == "w_f" || name == "skip";
}

std::string ScorerSpec::architecture() const {
    const std::string sizes = fmt::format("{} layers, {} KV heads, keys of {}, values of {}", layers, heads,
                                          head_dim_qk, head_dim_vo);
    if (kind == "mlp") {
        return fmt::format("mlp: {}, {} hidden", sizes, hidden);
    }
    return fmt::format("mlstm: {}, d_qk {}, d_v {}, softcap {}, delay {}{}{}", sizes, d_qk, d_v, gate_softcap,
                       delay,
                       layer_norm ? ", layer norm"
                       : norm     ? ", norm"
                                  : "",
                       skip ? ", skip" : "");
}

bool ScorerSpec::same_architecture(const ScorerSpec& other) const {
    return architecture() == other.architecture();
}

template <class S>
ScorerStack<S>::ScorerStack(const ScorerSpec& spec) {
    for (std::int32_t l = 0; l < spec.layers; ++l) {
        S scorer = sized(spec, S{});
        auto& into = parameters.emplace_back();
        for_each_parameter(scorer, into, [&](const char* name, float*& array, std::size_t count, bool) {
            if (count == 0 || left_out(spec, name)) {
                return;
            }
            const auto per_head = static_cast<std::int64_t>(count) / spec.heads;
            const std::int64_t inputs = scorer.input_size();
            Array& added = arrays.emplace_back();
            added.name = fmt::format("layers.{}.{}", l, name);
            added.shape = {spec.heads};
            if (is_matrix(name)) {
                added.shape.insert(added.shape.end(), {per_head / inputs, inputs});
            } else if (per_head > 1) {
                added.shape.push_back(per_head);
            }
            added.data.assign(count, 0.0f);
            added.decays =
                per_head > 1 && std::string_view(name) != "b1" && std::string_view(name) != "norm_gain";
            array = added.data.data();  // stays where it is when the vector of arrays moves
        });
        std::vector<const float*> pointers;
        for_each_parameter(scorer, into,
                           [&](const char*, float*& array, std::size_t, bool) { pointers.push_back(array); });
        std::size_t i = 0;
        for_each_parameter(scorer, scorer.weights, [&](const char*, const float*& array, std::size_t, bool) {
            array = pointers[i++];
        });
        scorers.push_back(scorer);
    }
}

template <class S>
void ScorerStack<S>::initialize(std::uint64_t seed) {
    for (std::size_t l = 0; l < scorers.size(); ++l) {
        kvpolicy::initialize(scorers[l], parameters[l], seed * 1000 + l);
    }
}

template class ScorerStack<Mlp>;
template class ScorerStack<Mlstm>;

std::map<std::string, std::string> to_metadata(const ScorerSpec& spec) {
    std::map<std::string, std::string> out;
    for (const auto& [key, value] : spec.training) {
        out["training." + key] = value;
    }
    out["format"] = "kvpolicy-scorers-1";
    out["kind"] = spec.kind;
    ScorerSpec copy = spec;
    for (std::size_t i = 0; i < std::size(number_names); ++i) {
        out[number_names[i]] = std::to_string(*number(copy, i));
    }
    out["gate_softcap"] = fmt::format("{}", spec.gate_softcap);
    out["norm"] = spec.layer_norm ? layer_norm_name : std::to_string(spec.norm ? 1 : 0);
    out["skip"] = std::to_string(spec.skip ? 1 : 0);
    out["gamma_min"] = fmt::format("{}", spec.gamma_min);
    out["gamma_max"] = fmt::format("{}", spec.gamma_max);
    return out;
}

ScorerSpec spec_of(const std::map<std::string, std::string, std::less<>>& metadata, const std::string& file) {
    const auto text = [&](std::string_view key) -> const std::string& {
        const auto found = metadata.find(key);
        if (found == metadata.end()) {
            llama::fail("{}: is no scorer file: its metadata has no \"{}\"; train_scorer writes such files",
                        file, key);
        }
        return found->second;
    };
    const auto parse = [&](std::string_view key, auto& value) {
        const std::string& from = text(key);
        const auto [end, error] = std::from_chars(from.data(), from.data() + from.size(), value);
        if (error != std::errc{} || end != from.data() + from.size()) {
            llama::fail("{}: \"{}\" is {}; a number is needed", file, key, llama::printable(from));
        }
    };
    if (text("format") != "kvpolicy-scorers-1") {
        llama::fail("{}: has format {}; kvpolicy-scorers-1 is needed", file,
                    llama::printable(text("format")));
    }
    ScorerSpec spec;
    spec.kind = text("kind");
    if (spec.kind != "mlp" && spec.kind != "mlstm") {
        llama::fail("{}: has scorers of kind {}; mlp and mlstm are known", file, llama::printable(spec.kind));
    }
    for (std::size_t i = 0; i < std::size(number_names); ++i) {
        std::int32_t& value = *number(spec, i);
        parse(number_names[i], value);
        const std::int32_t least =
            std::string_view(number_names[i]) == "delay" || std::string_view(number_names[i]) == "sinks" ? 0
                                                                                                         : 1;
        if (value < least || value > 1 << 16) {
            llama::fail("{}: \"{}\" is {}; it must be {} to {}", file, number_names[i], value, least,
                        1 << 16);
        }
    }
    parse("gate_softcap", spec.gate_softcap);
    parse("gamma_min", spec.gamma_min);
    parse("gamma_max", spec.gamma_max);
    spec.norm = text("norm") == "1";
    spec.layer_norm = text("norm") == layer_norm_name;
    if (!spec.norm && !spec.layer_norm && text("norm") != "0") {
        llama::fail("{}: \"norm\" is {}; it must be 0, 1 (an RMS norm) or {}", file,
                    llama::printable(text("norm")), layer_norm_name);
    }
    spec.skip = text("skip") == "1";
    if (spec.kind == "mlstm" && spec.delay != 0 && spec.delay != spec.window) {
        llama::fail("{}: \"delay\" is {}; it must be the window, {}, or 0", file, spec.delay, spec.window);
    }
    constexpr std::string_view prefix = "training.";
    for (const auto& [key, value] : metadata) {
        if (key.starts_with(prefix)) {
            spec.training[key.substr(prefix.size())] = value;
        }
    }
    return spec;
}

std::vector<float> log_gammas(const ScorerSpec& spec, const std::vector<float>& alpha) {
    std::vector<float> out(static_cast<std::size_t>(spec.layers) * static_cast<std::size_t>(spec.heads),
                           0.0f);
    for (std::size_t i = 0; i < alpha.size(); ++i) {
        out[i] = kvpolicy::log_gamma_of(static_cast<double>(alpha[i]), spec.gamma_min, spec.gamma_max);
    }
    return out;
}

std::string beta_name(float beta) { return std::isinf(beta) ? "inf" : fmt::format("{:g}", beta); }

std::string TrainedScorers::system() const {
    if (spec.kind == "mlp") {
        return "KVpop-mlp";
    }
    return spec.delay == 0 ? "KVpop immediate" : "KVpop";
}

std::vector<float> TrainedScorers::thresholds(double share) const {
    if (quantiles.empty()) {
        llama::fail("scorers: the file has no score_quantiles, so no threshold can be set");
    }
    const double place = std::min(1.0, std::max(0.0, 1.0 - share)) * (quantile_count - 1);
    const auto below = static_cast<std::size_t>(place);
    const std::size_t above = std::min<std::size_t>(below + 1, quantile_count - 1);
    const auto part = static_cast<float>(place - static_cast<double>(below));
    std::vector<float> out;
    for (std::size_t at = 0; at < quantiles.size(); at += quantile_count) {
        out.push_back(quantiles[at + below] + part * (quantiles[at + above] - quantiles[at + below]));
    }
    return out;
}

namespace {

std::vector<float> read(const llama::Safetensors& file, const std::string& name,
                        const std::vector<std::int64_t>& shape) {
    const llama::Tensor* tensor = file.find(name);
    if (tensor == nullptr) {
        llama::fail("{}: has no tensor {}", file.path(), name);
    }
    if (tensor->shape != shape) {
        llama::fail("{}: tensor {} has shape {}; this architecture needs {}", file.path(), name,
                    llama::shape_text(tensor->shape), llama::shape_text(shape));
    }
    std::vector<float> values(tensor->numel);
    llama::to_float(*tensor, values);
    for (std::size_t i = 0; i < values.size(); ++i) {
        if (!std::isfinite(values[i])) {
            llama::fail("{}: tensor {} holds {} at {}; numbers must be finite", file.path(), name, values[i],
                        i);
        }
    }
    return values;
}

template <class S>
std::variant<ScorerStack<Mlp>, ScorerStack<Mlstm>> read_stack(const ScorerSpec& spec,
                                                              const llama::Safetensors& file) {
    ScorerStack<S> stack(spec);
    for (auto& array : stack.arrays) {
        const std::vector<float> values = read(file, array.name, array.shape);
        std::copy(values.begin(), values.end(), array.data.begin());
    }
    return stack;
}

}  // namespace

TrainedScorers load_scorers(const std::filesystem::path& path) {
    const llama::Safetensors file(path);
    ScorerSpec spec = spec_of(file.metadata(), file.path());
    auto stack = spec.kind == "mlp" ? read_stack<Mlp>(spec, file) : read_stack<Mlstm>(spec, file);
    TrainedScorers scorers{std::move(spec), std::move(stack), {}, {}, {}};
    const std::int64_t layers = scorers.spec.layers, heads = scorers.spec.heads;
    if (file.find("alpha") != nullptr) {
        scorers.alpha = read(file, "alpha", {layers, heads});
    }
    if (file.find("score_quantiles") != nullptr) {
        scorers.quantiles = read(file, "score_quantiles", {layers, heads, TrainedScorers::quantile_count});
    }
    scorers.log_gamma = log_gammas(scorers.spec, scorers.alpha);
    return scorers;
}

void check_fits(const TrainedScorers& scorers, std::int32_t layers, std::int32_t heads, std::int32_t head_dim,
                const std::string& file) {
    const ScorerSpec& s = scorers.spec;
    if (s.layers != layers || s.heads != heads || s.head_dim_qk != head_dim || s.head_dim_vo != head_dim) {
        llama::fail(
            "{}: has scorers for {} layers, {} KV heads, keys of {} and values of {}; the model has {} "
            "layers, "
            "{} KV heads and a head_dim of {}",
            file, s.layers, s.heads, s.head_dim_qk, s.head_dim_vo, layers, heads, head_dim);
    }
}

template <class S>
void save_scorers(const std::filesystem::path& file, const ScorerSpec& spec, const ScorerStack<S>& stack,
                  const std::vector<float>& alpha, const std::vector<float>& quantiles, bool small) {
    const std::int64_t layers = spec.layers, heads = spec.heads;
    std::vector<TensorPlan> plan;
    for (const auto& array : stack.arrays) {
        plan.push_back({array.name, small && array.shape.size() == 3 ? llama::DType::bf16 : llama::DType::f32,
                        array.shape});
    }
    if (!alpha.empty()) {
        plan.push_back({"alpha", llama::DType::f32, {layers, heads}});
    }
    if (!quantiles.empty()) {
        plan.push_back(
            {"score_quantiles", llama::DType::f32, {layers, heads, TrainedScorers::quantile_count}});
    }
    SafetensorsWriter writer(file, std::move(plan), to_metadata(spec));
    for (const auto& array : stack.arrays) {
        writer.write(array.data);
    }
    if (!alpha.empty()) {
        writer.write(alpha);
    }
    if (!quantiles.empty()) {
        writer.write(quantiles);
    }
    writer.finish();
}

template void save_scorers(const std::filesystem::path&, const ScorerSpec&, const ScorerStack<Mlp>&,
                           const std::vector<float>&, const std::vector<float>&, bool);
template void save_scorers(const std::filesystem::path&, const ScorerSpec&, const ScorerStack<Mlstm>&,
                           const std::vector<float>&, const std::vector<float>&, bool);

}  // namespace examples
