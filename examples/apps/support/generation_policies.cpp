#include "generation_policies.hpp"

#include <kvpolicy/core/share.hpp>
#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/lte.hpp>
#include <kvpolicy/streaming_llm.hpp>
#include <kvpolicy/uniform.hpp>
#include <kvpolicy/wgkv.hpp>

#include "policies.hpp"
#include "retention.hpp"
#include "trained.hpp"

#include <fmt/format.h>
#include <llama/dense_attention.hpp>
#include <llama/engine.hpp>
#include <llama/error.hpp>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>

namespace examples {
namespace {

using kvpolicy::bf16;
using kvpolicy::dynamic;
using kvpolicy::Sink;
using kvpolicy::TopKBudget;
using kvpolicy::Window;

/// The cache whose rows are of the type that was asked for.
template <class Float, class Half, class P>
std::unique_ptr<llama::KvAttention> make(const PolicySetting& setting, const P& policy) {
    const llama::Config& config = setting.model.config;
    if (setting.options.rows == llama::DType::f32) {
        return std::make_unique<Float>(setting.ctx, config, policy, nullptr, setting.max_seq_len);
    }
    return std::make_unique<Half>(setting.ctx, config, policy, nullptr, setting.max_seq_len);
}
template <class P>
std::unique_ptr<llama::KvAttention> fixed(const PolicySetting& setting, const P& policy) {
    return make<llama::CacheAttention<P, float>, llama::CacheAttention<P, bf16>>(setting, policy);
}
template <class P>
std::unique_ptr<llama::KvAttention> growing(const PolicySetting& setting, const P& policy) {
    return make<llama::CacheAttention<P, float, kvpolicy::DualCache>,
                llama::CacheAttention<P, bf16, kvpolicy::DualCache>>(setting, policy);
}

KeyNormScorer key_norms(const PolicySetting& setting) { return KeyNormScorer{setting.model.config.head_dim}; }
float log_gamma(const PolicyOptions& options) { return static_cast<float>(std::log(options.gamma)); }
std::int32_t long_range(const PolicyOptions& options) {
    return kvpolicy::budget_for_total(options.budget, options.sinks, options.window);
}

/// Sets one threshold a head so that `density` of the keys in the (beginning of the) prompt pass: norms
/// differ by an order of magnitude between heads. With `strictly` the gate wants more than the threshold,
/// without it at least that.
void calibrate(PolicySetting& setting, bool strictly) {
    const llama::Config& config = setting.model.config;
    const auto heads = static_cast<std::size_t>(config.layers) * static_cast<std::size_t>(config.kv_heads);
    const auto dim = static_cast<std::size_t>(config.head_dim);
    const KeyNormScorer scorer = key_norms(setting);
    std::vector<std::vector<float>> scores(heads);
    const auto observe = [&](int layer, std::span<const std::int64_t> positions, std::span<const float>,
                             std::span<const float> k, std::span<const float>) {
        const std::size_t first = static_cast<std::size_t>(layer) * static_cast<std::size_t>(config.kv_heads);
        std::vector<float> key(dim);
        for (std::size_t row = 0; row < positions.size() * static_cast<std::size_t>(config.kv_heads); ++row) {
            // The cache will see the key as it stores it.
            std::transform(
                k.begin() + static_cast<std::ptrdiff_t>(row * dim),
                k.begin() + static_cast<std::ptrdiff_t>((row + 1) * dim), key.begin(), [&](float x) {
                    return setting.options.rows == llama::DType::f32 ? x : static_cast<float>(bf16(x));
                });
            scores[first + row % static_cast<std::size_t>(config.kv_heads)].push_back(
                scorer.score(0, key.data(), nullptr, nullptr));
        }
    };
    const std::size_t sample = std::min<std::size_t>(setting.prompt.size(), 1024);
    std::vector<std::int64_t> positions(sample);
    for (std::size_t i = 0; i < sample; ++i) {
        positions[i] = static_cast<std::int64_t>(i);
    }
    llama::DenseAttention dense(config);
    auto observed = llama::observed(dense, observe);
    llama::Engine(setting.model)
        .forward(setting.prompt.first(sample), positions, observed, llama::Logits::none);

    constexpr float infinity = std::numeric_limits<float>::infinity();
    const auto passing = static_cast<std::size_t>(
        kvpolicy::nearest_count_of_share(setting.options.density, static_cast<std::int64_t>(sample)));
    setting.thresholds.clear();
    for (std::vector<float>& of_head : scores) {
        std::ranges::sort(of_head, std::greater{});
        if (setting.options.density >= 1.0) {
            setting.thresholds.push_back(-infinity);
        } else if (strictly) {
            setting.thresholds.push_back(of_head[std::min(passing, sample - 1)]);
        } else {
            setting.thresholds.push_back(passing == 0 ? infinity : of_head[passing - 1]);
        }
    }
}

template <class Comparison>
kvpolicy::ThresholdGate<Comparison> gate(const PolicySetting& setting) {
    return kvpolicy::ThresholdGate<Comparison>{kvpolicy::per_head(
        setting.thresholds.data(), setting.model.config.layers, setting.model.config.kv_heads)};
}

std::unique_ptr<llama::KvAttention> dense(PolicySetting& setting) {
    using Dense = kvpolicy::Policy<Window<>>;
    return fixed(setting, Dense{Window<>{setting.max_seq_len}});
}

/// The window of StreamingLLM, which has the whole budget but for the sinks.
std::int32_t streaming_window(const PolicyOptions& options) {
    if (options.budget <= options.sinks) {
        llama::fail("budget: {} is not allowed; it must be more than the sinks, {}", options.budget,
                    options.sinks);
    }
    return options.budget - options.sinks;
}

std::unique_ptr<llama::KvAttention> streaming(PolicySetting& setting) {
    const PolicyOptions& options = setting.options;
    return fixed(setting,
                 kvpolicy::StreamingLLM<>{Sink<>{options.sinks}, Window<>{streaming_window(options)}});
}

std::unique_ptr<llama::KvAttention> keynorm(PolicySetting& setting) {
    const PolicyOptions& options = setting.options;
    using KeyNorm = kvpolicy::KVpop<dynamic, dynamic, dynamic, KeyNormScorer>;
    return fixed(setting,
                 KeyNorm{Sink<>{options.sinks}, Window<>{options.window}, TopKBudget<>{long_range(options)},
                         kvpolicy::Decay<1>{log_gamma(options)}, key_norms(setting)});
}

std::unique_ptr<llama::KvAttention> random(PolicySetting& setting) {
    const PolicyOptions& options = setting.options;
    const PolicyChoice choice{"", options.budget, options.sinks, options.window};
    return options.rows == llama::DType::f32
               ? make_random<float>(setting.ctx, setting.model.config, choice, options.seed)
               : make_random<bf16>(setting.ctx, setting.model.config, choice, options.seed);
}

std::unique_ptr<llama::KvAttention> stride(PolicySetting& setting) {
    const PolicyOptions& options = setting.options;
    // A density of 0 keeps position 0 alone.
    const double step = std::min(1.0 / options.density, static_cast<double>(setting.max_seq_len));
    const auto n = static_cast<std::int32_t>(std::max<std::int64_t>(std::llround(step), 1));
    return growing(setting, kvpolicy::UniformStride<>{Sink<>{options.sinks}, Window<>{options.window},
                                                      kvpolicy::Stride<>{n}});
}

std::unique_ptr<llama::KvAttention> gated(PolicySetting& setting) {
    const PolicyOptions& options = setting.options;
    calibrate(setting, false);
    using Gated = kvpolicy::WGKV<dynamic, KeyNormScorer, dynamic>;
    return growing(setting, Gated{Sink<>{options.sinks}, Window<>{options.window},
                                  gate<kvpolicy::at_least>(setting), key_norms(setting)});
}

std::unique_ptr<llama::KvAttention> capped(PolicySetting& setting) {
    const PolicyOptions& options = setting.options;
    const std::int32_t k = long_range(options);
    calibrate(setting, true);
    using Capped = kvpolicy::LTE<dynamic, dynamic, dynamic, KeyNormScorer>;
    return growing(setting, Capped{Sink<>{options.sinks}, Window<>{options.window},
                                   gate<kvpolicy::above>(setting), TopKBudget<>{k}, key_norms(setting)});
}

/// Reads the scorers that the options name into the setting.
const TrainedScorers& load(PolicySetting& setting) {
    const PolicyOptions& options = setting.options;
    const llama::Config& config = setting.model.config;
    if (options.scorers.empty()) {
        llama::fail(
            "--scorers: is missing; kvpop, kvpop-shared and gates need a file of trained scorers "
            "(docs/training/files.md)");
    }
    setting.scorers = load_scorers(options.scorers);
    check_fits(*setting.scorers, config, options.scorers);
    return *setting.scorers;
}

/// Refuses a file of another system than `kvpop` or `gates` says.
const TrainedScorers& load(PolicySetting& setting, bool own_numbers) {
    const TrainedScorers& trained = load(setting);
    if (trained.has_own_numbers() != own_numbers) {
        llama::fail("--scorers: {} is of policy {}; it must be run with --policy {}", setting.options.scorers,
                    trained.spec.policy, own_numbers ? "kvpop" : "gates");
    }
    return trained;
}

std::unique_ptr<llama::KvAttention> gates(PolicySetting& setting) {
    return make_gates(setting.ctx, setting.model.config, load(setting, true), setting.max_seq_len,
                      setting.options.rows);
}

std::unique_ptr<llama::KvAttention> kvpop(PolicySetting& setting) {
    const PolicyOptions& options = setting.options;
    return make_trained(setting.ctx, setting.model.config, load(setting, false),
                        {"", options.budget, options.sinks, options.window}, false, options.rows);
}

std::unique_ptr<llama::KvAttention> kvpop_shared(PolicySetting& setting) {
    const PolicyOptions& options = setting.options;
    return make_trained_shared(setting.ctx, setting.model.config, load(setting, false),
                               {"", options.budget, options.sinks, options.window}, setting.max_seq_len,
                               options.rows);
}

// ---- on a GPU ---------------------------------------------------------------------------------------------

#if KVPOLICY_EXAMPLES_CUDA
DeviceBudget device_budget(const PolicyOptions& options) {
    return {options.sinks, options.window, long_range(options)};
}
DeviceCache device_dense(PolicySetting& setting, const DeviceSetting& device) {
    return make_device_window(device, {0, setting.max_seq_len, 0});
}
DeviceCache device_streaming(PolicySetting& setting, const DeviceSetting& device) {
    return make_device_window(device, {setting.options.sinks, streaming_window(setting.options), 0});
}
DeviceCache device_keynorm(PolicySetting& setting, const DeviceSetting& device) {
    return make_device_keynorm(device, device_budget(setting.options), log_gamma(setting.options));
}
DeviceCache device_random(PolicySetting& setting, const DeviceSetting& device) {
    return make_device_random(device, device_budget(setting.options), setting.options.seed);
}
DeviceCache device_capped(PolicySetting& setting, const DeviceSetting& device) {
    const DeviceBudget budget = device_budget(setting.options);
    calibrate(setting, true);
    return make_device_capped(device, budget, setting.thresholds);
}
DeviceCache device_kvpop(PolicySetting& setting, const DeviceSetting& device) {
    const TrainedScorers& trained = load(setting, false);
    check_window(trained, setting.options.window);
    return make_device_trained(device, device_budget(setting.options), trained);
}
DeviceCache device_gates(PolicySetting& setting, const DeviceSetting& device) {
    return make_device_gates(device, load(setting, true), setting.max_seq_len);
}
#else
constexpr decltype(NamedPolicy::make_on_device) device_dense = nullptr, device_streaming = nullptr,
                                                device_keynorm = nullptr, device_random = nullptr,
                                                device_capped = nullptr, device_kvpop = nullptr,
                                                device_gates = nullptr;
#endif

constexpr NamedPolicy table[] = {
    {"dense", "every key", 0, dense, device_dense},
    {"streaming", "StreamingLLM: sinks and a window, together the budget", uses_budget | uses_sinks,
     streaming, device_streaming},
    {"keynorm", "KVpop's rule: of the keys out of the window, those with the smallest norms",
     uses_budget | uses_sinks | uses_window | uses_gamma, keynorm, device_keynorm},
    {"kvpop", "KVpop: of the keys out of the window, those that trained scorers rank highest",
     uses_budget | uses_sinks | uses_window | uses_scorers, kvpop, device_kvpop},
    {"kvpop-shared", "the same with a budget that the heads of a layer share",
     uses_budget | uses_sinks | uses_window | uses_scorers, kvpop_shared},
    {"gates", "SP-KV, WG-KV, LTE, DMS or StreamLLM+: what a file of trained gates says", uses_scorers, gates,
     device_gates},
    {"random", "the same budget, a uniform sample of the keys out of the window",
     uses_budget | uses_sinks | uses_window, random, device_random},
    {"stride", "of the keys out of the window, every (1 / density)-th",
     uses_sinks | uses_window | uses_density, stride},
    {"gated", "WG-KV's rule: a key whose norm is small enough when it leaves the window stays for good",
     uses_sinks | uses_window | uses_density, gated},
    {"capped", "LTE's rule: the same gate, and at most a budget",
     uses_budget | uses_sinks | uses_window | uses_density, capped, device_capped},
};

}  // namespace

std::span<const NamedPolicy> generation_policies() { return table; }

std::string_view policy_of_file(const std::string& scorers) {
    if (scorers.empty()) {
        return "streaming";
    }
    const llama::Safetensors file(scorers);
    return spec_of(file.metadata(), file.path()).policy == "kvpop" ? "kvpop" : "gates";
}

std::vector<std::string_view> device_policy_names() {
    std::vector<std::string_view> names;
    for (const NamedPolicy& policy : table) {
        if (policy.make_on_device != nullptr) {
            names.push_back(policy.name);
        }
    }
    return names;
}

const NamedPolicy& generation_policy(std::string_view name) {
    const auto* const found = std::ranges::find(table, name, &NamedPolicy::name);
    if (found == std::end(table)) {
        std::vector<std::string_view> names;
        for (const NamedPolicy& policy : table) {
            names.push_back(policy.name);
        }
        llama::fail("policy: {} is not allowed; it must be one of {}", llama::printable(name),
                    fmt::join(names, ", "));
    }
    return *found;
}

}  // namespace examples
