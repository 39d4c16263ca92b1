#include "scorers.hpp"

#include <kvpolicy/policies/decay.hpp>

#include "safetensors_writer.hpp"

#include <llama/error.hpp>
#include <llama/safetensors.hpp>

#include <algorithm>
#include <charconv>
#include <cmath>
#include <utility>

namespace examples {
namespace {

constexpr std::string_view rope_layouts[] = {"none", "interleaved", "half_split"};  // as the library's

kvpolicy::Rope rope_of(const ScorerSpec& spec) {
    const auto layout = std::ranges::find(rope_layouts, spec.rope_layout) - std::begin(rope_layouts);
    return {static_cast<kvpolicy::rope_layout>(layout), spec.rope_base, spec.rope_dims};
}

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

WriteGate sized(const ScorerSpec& spec, WriteGate scorer) {
    scorer.heads = spec.heads, scorer.head_dim_qk = spec.head_dim_qk, scorer.head_dim_vo = spec.head_dim_vo;
    scorer.hidden = spec.hidden;
    scorer.input.rope = rope_of(spec);
    return scorer;
}
Conv sized(const ScorerSpec& spec, Conv scorer) {
    scorer.heads = spec.heads, scorer.head_dim_qk = spec.head_dim_qk, scorer.head_dim_vo = spec.head_dim_vo;
    scorer.rope = rope_of(spec);
    return scorer;
}
Predictor sized(const ScorerSpec& spec, Predictor scorer) {
    scorer.heads = spec.heads, scorer.hidden = spec.hidden, scorer.input.width = spec.width;
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

/// The shape of a parameter of `count` numbers in a file.
template <class S>
std::vector<std::int64_t> shape_of(const S& scorer, std::string_view name, std::int64_t count) {
    const std::int64_t per_head = count / scorer.heads, inputs = scorer.input_size();
    if (is_matrix(name)) {
        return {scorer.heads, per_head / inputs, inputs};
    }
    return per_head > 1 ? std::vector<std::int64_t>{scorer.heads, per_head}
                        : std::vector<std::int64_t>{scorer.heads};
}
std::vector<std::int64_t> shape_of(const Conv& scorer, std::string_view name, std::int64_t count) {
    const std::int64_t per_head = count / scorer.heads;
    if (name == "readout_bias") {
        return {scorer.heads};
    }
    if (name.front() != 'w') {
        return {scorer.heads, per_head};
    }
    const std::int64_t inputs = scorer.channels(name.back() - '1');
    return {scorer.heads, per_head / inputs / 3, 3, inputs};
}
std::vector<std::int64_t> shape_of(const Predictor& scorer, std::string_view name, std::int64_t count) {
    const std::int64_t rows = name == "w2" || name == "b2" ? scorer.heads : scorer.hidden;
    return name.front() == 'w' ? std::vector<std::int64_t>{rows, count / rows}
                               : std::vector<std::int64_t>{rows};
}

const char* number_names[] = {"layers", "heads", "dim_k", "dim_v", "hidden",
                              "d_qk",   "d_v",   "delay", "sinks", "window"};

/// What a policy may score keys with, and its name for people.
struct System {
    std::string_view policy, name;
    std::vector<std::string_view> kinds;
};
const System systems[] = {{"kvpop", "KVpop", {"mlp", "mlstm", "linear"}},
                          {"spkv", "SP-KV", {"utility"}},
                          {"wgkv", "WG-KV", {"write_gate"}},
                          {"lte", "LTE", {"conv", "mlp"}},
                          {"dms", "DMS", {"linear", "mlp", "utility"}},
                          {"streaming", "StreamLLM+", {"none"}}};

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

namespace {

/// Calls visit(name, array, count) for the parameters that scorers of this spec have. `into`: their arrays.
template <class S, class Visit>
void for_each_array(const ScorerSpec& spec, const S& scorer, typename S::template parameters<float>& into,
                    Visit&& visit) {
    for_each_parameter(scorer, into, [&](const char* name, float*& array, std::size_t count, bool) {
        if (count != 0 && !left_out(spec, name)) {
            visit(name, array, count);
        }
    });
}

}  // namespace

template <class S>
ScorerStack<S>::ScorerStack(const ScorerSpec& spec) {
    for (std::int32_t l = 0; l < spec.layers; ++l) {
        S scorer = sized(spec, S{});
        auto& into = parameters.emplace_back();
        for_each_array(spec, scorer, into, [&](const char* name, float*& array, std::size_t count) {
            Array& added = arrays.emplace_back();
            added.name = fmt::format("layers.{}.{}", l, name);
            added.shape = shape_of(scorer, name, static_cast<std::int64_t>(count));
            added.data.assign(count, 0.0f);
            added.decays = added.shape.size() > 1 && std::string_view(name) != "b1" &&
                           std::string_view(name) != "norm_gain";
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
template class ScorerStack<WriteGate>;
template class ScorerStack<Conv>;
template class ScorerStack<Predictor>;

std::map<std::string, std::string> to_metadata(const ScorerSpec& spec) {
    std::map<std::string, std::string> out;
    for (const auto& [key, value] : spec.training) {
        out["training." + key] = value;
    }
    out["format"] = "kvpolicy-scorers-1";
    out["policy"] = spec.policy;
    out["kind"] = spec.kind;
    if (spec.policy != "kvpop" && spec.policy != "streaming") {
        out["threshold"] = fmt::format("{}", spec.threshold);
    }
    if (spec.budget >= 0) {
        out["budget"] = std::to_string(spec.budget);
    }
    if (spec.kind == "utility") {
        out["width"] = std::to_string(spec.width);
    }
    if (spec.rope_layout != "none") {
        out["rope_layout"] = spec.rope_layout;
        out["rope_base"] = fmt::format("{}", spec.rope_base);
        out["rope_dims"] = std::to_string(spec.rope_dims);
    }
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

namespace {

/// Refuses a policy that is unknown, and kinds of scorers that it does not have.
void check_system(const ScorerSpec& spec, const std::string& file) {
    const auto* const found = std::ranges::find(systems, spec.policy, &System::policy);
    if (found == std::end(systems)) {
        llama::fail("{}: has policy {}; kvpop, spkv, wgkv, lte, dms and streaming are known", file,
                    llama::printable(spec.policy));
    }
    if (std::ranges::find(found->kinds, spec.kind) == found->kinds.end()) {
        llama::fail("{}: has scorers of kind {} for policy {}; it must be one of {}", file,
                    llama::printable(spec.kind), spec.policy, fmt::join(found->kinds, ", "));
    }
}

/// Refuses numbers that contradict the policy, and a gate without a threshold.
void check_policy(const ScorerSpec& spec, bool has_threshold, const std::string& file) {
    const bool thresholded = spec.policy == "spkv" || spec.policy == "wgkv";
    if (thresholded && !has_threshold) {
        llama::fail("{}: has no \"threshold\"; gates of {} need a probability, 0 to 1", file, spec.policy);
    }
    if (!(spec.threshold >= 0.0 && spec.threshold <= 1.0)) {
        llama::fail("{}: \"threshold\" is {}; it must be a probability, 0 to 1", file, spec.threshold);
    }
    if (!thresholded && spec.threshold != 0.5) {
        llama::fail("{}: \"threshold\" is {}; of policy {} it must be 0.5", file, spec.threshold,
                    spec.policy);
    }
    if (spec.budget >= 0 && (spec.policy == "dms" || spec.policy == "streaming")) {
        llama::fail("{}: \"budget\" is {}; policy {} has none", file, spec.budget, spec.policy);
    }
    if (!(spec.gamma_min > 0.0 && spec.gamma_min <= spec.gamma_max && spec.gamma_max <= 1.0)) {
        llama::fail("{}: \"gamma_min\" is {} and \"gamma_max\" {}; they must be above 0, at most 1, and rise",
                    file, spec.gamma_min, spec.gamma_max);
    }
}

/// Refuses a rotation that no keys have.
void check_rope(const ScorerSpec& spec, const std::string& file) {
    if (std::ranges::find(rope_layouts, spec.rope_layout) == std::end(rope_layouts)) {
        llama::fail("{}: \"rope_layout\" is {}; it must be one of {}", file,
                    llama::printable(spec.rope_layout), fmt::join(rope_layouts, ", "));
    }
    if (spec.kind == "write_gate" && spec.rope_layout == "none") {
        llama::fail("{}: has no \"rope_layout\"; a write_gate needs interleaved or half_split", file);
    }
    if (!(spec.rope_base > 0.0f && std::isfinite(spec.rope_base))) {
        llama::fail("{}: \"rope_base\" is {}; it must be a finite number above 0", file, spec.rope_base);
    }
    if (spec.rope_layout != "none" && (spec.rope_dims > spec.head_dim_qk || spec.rope_dims % 2 != 0)) {
        llama::fail("{}: \"rope_dims\" is {}; it must be even, and at most \"dim_k\", {}", file,
                    spec.rope_dims, spec.head_dim_qk);
    }
}

/// Whether a file with scorers of this kind has a number of this name.
bool has_number(std::string_view kind, std::string_view name) {
    const bool of_policy = name == "sinks" || name == "window";
    const bool of_predictor = of_policy || name == "layers" || name == "heads" || name == "hidden";
    return kind == "none" ? of_policy : kind == "utility" ? of_predictor : true;
}

}  // namespace

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
    const auto given = [&](std::string_view key) { return metadata.find(key) != metadata.end(); };
    const auto parse_from = [&](std::string_view key, std::int32_t& value, std::int32_t least) {
        parse(key, value);
        if (value < least || value > 1 << 16) {
            llama::fail("{}: \"{}\" is {}; it must be {} to {}", file, key, value, least, 1 << 16);
        }
    };
    ScorerSpec spec;
    spec.policy = given("policy") ? text("policy") : spec.policy;
    spec.kind = text("kind");
    check_system(spec, file);
    for (std::size_t i = 0; i < std::size(number_names); ++i) {
        const std::string_view name = number_names[i];
        if (has_number(spec.kind, name)) {
            parse_from(name, *number(spec, i), name == "delay" || name == "sinks" ? 0 : 1);
        }
    }
    if (spec.kind != "utility" && spec.kind != "none") {
        parse("gate_softcap", spec.gate_softcap);
        if (!(spec.gate_softcap >= 0.0f) || std::isinf(spec.gate_softcap)) {
            llama::fail("{}: \"gate_softcap\" is {}; it must be a finite number, 0 or more", file,
                        spec.gate_softcap);
        }
        spec.norm = text("norm") == "1";
        spec.layer_norm = text("norm") == layer_norm_name;
        if (!spec.norm && !spec.layer_norm && text("norm") != "0") {
            llama::fail("{}: \"norm\" is {}; it must be 0, 1 (an RMS norm) or {}", file,
                        llama::printable(text("norm")), layer_norm_name);
        }
        spec.skip = text("skip") == "1";
        if (!spec.skip && text("skip") != "0") {
            llama::fail("{}: \"skip\" is {}; it must be 0 or 1", file, llama::printable(text("skip")));
        }
        if (!(spec.gate_softcap >= 0.0f && std::isfinite(spec.gate_softcap))) {
            llama::fail("{}: \"gate_softcap\" is {}; it must be a finite number, 0 or more", file,
                        spec.gate_softcap);
        }
    }
    parse("gamma_min", spec.gamma_min);
    parse("gamma_max", spec.gamma_max);
    if (!(spec.gamma_min > 0.0 && spec.gamma_min <= spec.gamma_max && spec.gamma_max <= 1.0)) {
        llama::fail(
            "{}: \"gamma_min\" and \"gamma_max\" are {} and {}; they must be above 0, in order, and at "
            "most 1",
            file, spec.gamma_min, spec.gamma_max);
    }
    if (spec.kind == "mlstm" && spec.delay != 0 && spec.delay != spec.window) {
        llama::fail("{}: \"delay\" is {}; it must be the window, {}, or 0", file, spec.delay, spec.window);
    }
    if (spec.kind == "conv" && (spec.delay != spec.window || spec.window < 13)) {
        llama::fail("{}: \"delay\" is {}; it must be the window, {}, which must be 13 or more", file,
                    spec.delay, spec.window);
    }
    if (spec.kind == "conv" && spec.head_dim_qk + spec.head_dim_vo < 8) {
        llama::fail("{}: \"dim_k\" + \"dim_v\" is {}; a conv halves it three times, so it must be 8 or more",
                    file, spec.head_dim_qk + spec.head_dim_vo);
    }
    if (spec.kind == "utility") {
        parse_from("width", spec.width, 1);
    }
    if (spec.kind == "linear") {
        spec.hidden = 2;
    }
    if (given("threshold")) {
        parse("threshold", spec.threshold);
    }
    if (given("budget")) {
        parse_from("budget", spec.budget, 0);
    }
    check_policy(spec, given("threshold"), file);
    if (given("rope_layout")) {
        spec.rope_layout = text("rope_layout");
        parse("rope_base", spec.rope_base);
        parse_from("rope_dims", spec.rope_dims, 0);
    }
    check_rope(spec, file);
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
    const std::string name(std::ranges::find(systems, spec.policy, &System::policy)->name);
    if (spec.kind != "mlstm") {
        return name + (spec.kind == "mlp" && spec.policy == "kvpop" ? "-mlp" : "");
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

const llama::Tensor& tensor_of(const llama::Safetensors& file, const std::string& name,
                               const std::vector<std::int64_t>& shape) {
    const llama::Tensor* tensor = file.find(name);
    if (tensor == nullptr) {
        llama::fail("{}: has no tensor {}", file.path(), name);
    }
    if (tensor->shape != shape) {
        llama::fail("{}: tensor {} has shape {}; this architecture needs {}", file.path(), name,
                    llama::shape_text(tensor->shape), llama::shape_text(shape));
    }
    return *tensor;
}

std::vector<float> read(const llama::Safetensors& file, const std::string& name,
                        const std::vector<std::int64_t>& shape) {
    const llama::Tensor& tensor = tensor_of(file, name, shape);
    std::vector<float> values(tensor.numel);
    llama::to_float(tensor, values);
    for (std::size_t i = 0; i < values.size(); ++i) {
        if (!std::isfinite(values[i])) {
            llama::fail("{}: tensor {} holds {} at {}; numbers must be finite", file.path(), name, values[i],
                        i);
        }
    }
    return values;
}

/// The names of the tensors of all scorers. Refuses a file that does not have them in their shapes, before
/// memory of the claimed sizes is taken.
template <class S>
std::vector<std::string> checked_names(const ScorerSpec& spec, const llama::Safetensors& file) {
    const S scorer = sized(spec, S{});
    typename S::template parameters<float> none{};
    std::vector<std::string> names;
    for (std::int32_t l = 0; l < spec.layers; ++l) {
        for_each_array(spec, scorer, none, [&](const char* name, float*&, std::size_t count) {
            names.push_back(fmt::format("layers.{}.{}", l, name));
            tensor_of(file, names.back(), shape_of(scorer, name, static_cast<std::int64_t>(count)));
        });
    }
    return names;
}

/// The same of linear scorers, whose bias may be absent.
std::vector<std::string> checked_linear_names(const ScorerSpec& spec, const llama::Safetensors& file) {
    std::vector<std::string> names;
    for (std::int32_t l = 0; l < spec.layers; ++l) {
        const std::string layer = fmt::format("layers.{}.", l);
        tensor_of(file, layer + "weight", {spec.heads, std::int64_t{spec.head_dim_qk} + spec.head_dim_vo});
        names.push_back(layer + "weight");
        if (file.find(layer + "bias") != nullptr) {
            tensor_of(file, layer + "bias", {spec.heads});
            names.push_back(layer + "bias");
        }
    }
    return names;
}

/// Refuses a file whose tensors are not those of its metadata.
void check_tensors(const ScorerSpec& spec, const llama::Safetensors& file) {
    std::vector<std::string> names = spec.kind == "linear"       ? checked_linear_names(spec, file)
                                     : spec.kind == "mlstm"      ? checked_names<Mlstm>(spec, file)
                                     : spec.kind == "write_gate" ? checked_names<WriteGate>(spec, file)
                                     : spec.kind == "conv"       ? checked_names<Conv>(spec, file)
                                     : spec.kind == "utility"    ? checked_names<Predictor>(spec, file)
                                                                 : checked_names<Mlp>(spec, file);
    if (spec.policy == "kvpop") {
        names.insert(names.end(), {"alpha", "score_quantiles"});
    }
    if (spec.rope_layout != "none") {
        names.emplace_back("rope_frequencies");
    }
    std::ranges::sort(names);
    for (const llama::Tensor& tensor : file.tensors()) {
        if (!std::ranges::binary_search(names, tensor.name)) {
            llama::fail(
                "{}: tensor {} is not allowed; scorers of kind {} for policy {} have none of this name",
                file.path(), llama::printable(tensor.name), spec.kind, spec.policy);
        }
    }
}

template <class S>
AnyStack read_stack(const ScorerSpec& spec, const llama::Safetensors& file) {
    ScorerStack<S> stack(spec);
    for (auto& array : stack.arrays) {
        const std::vector<float> values = read(file, array.name, array.shape);
        std::copy(values.begin(), values.end(), array.data.begin());
    }
    return stack;
}

/// z = a . x + b as SiLU(z) - SiLU(-z).
AnyStack read_linear(const ScorerSpec& spec, const llama::Safetensors& file) {
    ScorerStack<Mlp> stack(spec);
    const std::int64_t heads = spec.heads, inputs = std::int64_t{spec.head_dim_qk} + spec.head_dim_vo;
    for (std::int32_t layer = 0; layer < spec.layers; ++layer) {
        const std::string name = fmt::format("layers.{}.", layer);
        const auto weight = read(file, name + "weight", {heads, inputs});
        const auto bias = file.find(name + "bias") == nullptr
                              ? std::vector<float>(static_cast<std::size_t>(heads), 0.0f)
                              : read(file, name + "bias", {heads});
        const kvpolicy::MlpParameters<float>& to = stack.parameters[static_cast<std::size_t>(layer)];
        for (std::int64_t head = 0; head < heads; ++head) {
            for (const int unit : {0, 1}) {
                const float sign = unit == 0 ? 1.0f : -1.0f;
                const std::int64_t row = head * 2 + unit;
                std::transform(weight.begin() + head * inputs, weight.begin() + (head + 1) * inputs,
                               to.w1 + row * inputs, [&](float x) { return sign * x; });
                to.b1[row] = sign * bias[static_cast<std::size_t>(head)];
                to.w2[row] = sign;
            }
        }
    }
    return stack;
}

AnyStack read_any(const ScorerSpec& spec, const llama::Safetensors& file) {
    return spec.kind == "linear"       ? read_linear(spec, file)
           : spec.kind == "mlstm"      ? read_stack<Mlstm>(spec, file)
           : spec.kind == "write_gate" ? read_stack<WriteGate>(spec, file)
           : spec.kind == "conv"       ? read_stack<Conv>(spec, file)
           : spec.kind == "utility"    ? read_stack<Predictor>(spec, file)
                                       : read_stack<Mlp>(spec, file);  // none: of no layers
}

/// Frequencies of RoPE that are no powers of a base.
void read_frequencies(TrainedScorers& scorers, const llama::Safetensors& file) {
    if (file.find("rope_frequencies") == nullptr) {
        return;
    }
    const ScorerSpec& spec = scorers.spec;
    scorers.frequencies =
        read(file, "rope_frequencies", {(spec.rope_dims == 0 ? spec.head_dim_qk : spec.rope_dims) / 2});
    const float* const frequencies = scorers.frequencies.data();
    if (auto* gates = std::get_if<ScorerStack<WriteGate>>(&scorers.stack)) {
        for (WriteGate& scorer : gates->scorers) {
            scorer.input.rope.frequencies = frequencies;
        }
    } else if (auto* convolutions = std::get_if<ScorerStack<Conv>>(&scorers.stack)) {
        for (Conv& scorer : convolutions->scorers) {
            scorer.rope.frequencies = frequencies;
        }
    }
}

}  // namespace

TrainedScorers load_scorers(const std::filesystem::path& path) {
    const llama::Safetensors file(path);
    ScorerSpec spec = spec_of(file.metadata(), file.path());
    check_tensors(spec, file);
    auto stack = read_any(spec, file);
    TrainedScorers scorers{std::move(spec), std::move(stack), {}, {}, {}, {}};
    read_frequencies(scorers, file);
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

namespace {

/// Refuses gates that would undo another rotation than the model's: theta, all numbers of a key, in halves.
void check_rotation(const TrainedScorers& scorers, const llama::Config& config, const std::string& file) {
    const ScorerSpec& s = scorers.spec;
    if (s.rope_layout == "none") {
        return;
    }
    const bool whole = s.rope_dims == 0 || s.rope_dims == config.head_dim;
    bool same = s.rope_layout == "half_split" && whole;
    if (scorers.frequencies.empty()) {
        same = same && s.rope_base == static_cast<float>(config.rope_theta);
    }
    // Rounded to fp32 by whoever wrote them, and before it their exponents, of at most log(theta).
    const double error = (2.0 + std::abs(std::log(config.rope_theta))) * 0x1p-23;
    for (std::size_t i = 0; same && i < scorers.frequencies.size(); ++i) {
        const double right =
            std::pow(config.rope_theta, -2.0 * static_cast<double>(i) / static_cast<double>(config.head_dim));
        same = std::abs(static_cast<double>(scorers.frequencies[i]) - right) <= error * right;
    }
    if (!same) {
        llama::fail(
            "{}: has scorers for keys that RoPE rotates as {}, {}, {} numbers; the model's are "
            "half_split, theta {}, {} numbers",
            file, s.rope_layout,
            scorers.frequencies.empty() ? fmt::format("theta {}", s.rope_base) : "with frequencies",
            s.rope_dims == 0 ? s.head_dim_qk : s.rope_dims, config.rope_theta, config.head_dim);
    }
}

}  // namespace

void check_fits(const TrainedScorers& scorers, const llama::Config& config, const std::string& file) {
    const ScorerSpec& s = scorers.spec;
    if (s.kind == "none") {
        return;
    }
    if (s.kind == "utility" && s.width != config.hidden_size && s.layers == config.layers &&
        s.heads == config.kv_heads) {
        llama::fail("{}: has scorers of hidden states of {}; the model's have {}", file, s.width,
                    config.hidden_size);
    }
    const bool dims =
        s.kind == "utility" || (s.head_dim_qk == config.head_dim && s.head_dim_vo == config.head_dim);
    if (s.layers != config.layers || s.heads != config.kv_heads || !dims) {
        llama::fail(
            "{}: has scorers for {} layers, {} KV heads, keys of {} and values of {}; the model has {} "
            "layers, "
            "{} KV heads and a head_dim of {}",
            file, s.layers, s.heads, s.head_dim_qk, s.head_dim_vo, config.layers, config.kv_heads,
            config.head_dim);
    }
    check_rotation(scorers, config, file);
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
