#include "policies.hpp"

#include <kvpolicy/h2o.hpp>
#include <kvpolicy/policies/scorer_concept.hpp>
#include <kvpolicy/policies/shared_budget.hpp>
#include <kvpolicy/snapkv.hpp>
#include <kvpolicy/tova.hpp>
#include <kvpolicy/uniform.hpp>
#include <kvpolicy/wgkv.hpp>

#include "support/retention.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstddef>
#include <limits>
#include <utility>

namespace evaluate {
namespace {

using Storage = kvpolicy::bf16;
using Made = std::unique_ptr<llama::KvAttention>;

Made by_name(const char* name, const Setting& setting) {
    examples::PolicyChoice choice = setting.choice;
    choice.name = name;
    return examples::make_attention<Storage>(setting.ctx, setting.config, choice, setting.max_seq_len);
}
Made dense(const Setting& setting) { return by_name("dense", setting); }
Made streaming(const Setting& setting) { return by_name("streaming", setting); }
Made key_norm(const Setting& setting) { return by_name("keynorm", setting); }

Made oracle(const Setting& setting) {
    Made made = by_name("given", setting);
    made->give_scores(setting.oracle, setting.max_seq_len);
    return made;
}

template <class P>
Made in_budget(const Setting& setting, const P& policy) {
    return std::make_unique<llama::CacheAttention<P, Storage>>(setting.ctx, setting.config, policy);
}
/// For policies that grow: a cache of pages.
template <class P>
Made in_pages(const Setting& setting, const P& policy) {
    return std::make_unique<llama::CacheAttention<P, Storage, kvpolicy::DualCache>>(
        setting.ctx, setting.config, policy, nullptr, setting.max_seq_len);
}

Made random(const Setting& setting) {
    return examples::make_random(setting.ctx, setting.config, setting.choice, 1);
}
/// As many rows as the budget at the end of the sequence, fewer before.
Made stride(const Setting& setting) {
    const examples::PolicyChoice& choice = setting.choice;
    return in_pages(
        setting, kvpolicy::UniformStride<>{kvpolicy::Sink<>{choice.sinks}, kvpolicy::Window<>{choice.window},
                                           kvpolicy::Stride<>{kvpolicy::stride_for_total(
                                               choice.budget, choice.sinks, choice.window, setting.length)}});
}

/// Every token as if it were decoded; a budget of B rows holds B - 1 keys and the new token.
Made h2o(const Setting& setting) {
    return in_budget(
        setting, kvpolicy::h2o_for_total(setting.choice.budget - 1, {kvpolicy::ObservedPrefill::stepwise()}));
}
Made tova(const Setting& setting) {
    return in_budget(setting, kvpolicy::tova_for_total(setting.choice.budget - 1,
                                                       {kvpolicy::ObservedPrefill::stepwise()}));
}
/// The rows that chunks of 64 take are those of the budget and of a chunk.
Made snapkv_chunks(const Setting& setting) {
    return in_pages(setting, kvpolicy::snapkv_for_total(setting.choice.budget, 32,
                                                        {kvpolicy::ObservedPrefill::in_chunks(64)}));
}
/// As it was meant: the prompt is taken densely and pruned once, and what follows stays, so the cache
/// outgrows its budget.
Made snapkv_prompt(const Setting& setting) {
    return in_pages(setting, kvpolicy::snapkv_for_total(setting.choice.budget));
}

/// As many entries as the oracle's, of which the heads of a layer share those out of the window.
Made shared_oracle(const Setting& setting) {
    const examples::PolicyChoice& choice = setting.choice;
    using Policy = kvpolicy::Policy<kvpolicy::Sink<>, kvpolicy::Window<>, kvpolicy::SharedBudget<>>;
    Made made = in_pages(setting, Policy{kvpolicy::Sink<>{choice.sinks}, kvpolicy::Window<>{choice.window},
                                         kvpolicy::SharedBudget<>{kvpolicy::budget_for_total(
                                             choice.budget, choice.sinks, choice.window)}});
    made->give_scores(setting.oracle, setting.max_seq_len);
    return made;
}

/// WG-KV's rule on the oracle's scores: one threshold for all heads and layers, such that the rows are those
/// of the budget on average at the end of the sequence. Heads whose keys are in demand keep more.
Made gated_oracle(const Setting& setting) {
    const auto length = static_cast<std::size_t>(setting.length),
               row = static_cast<std::size_t>(setting.max_seq_len);
    const auto first = static_cast<std::size_t>(setting.choice.sinks);
    const std::size_t last = length - static_cast<std::size_t>(setting.choice.window);
    std::vector<float> scores;
    for (std::size_t at = 0; at < setting.oracle.size(); at += row) {
        const auto head = setting.oracle.subspan(at, row);
        scores.insert(scores.end(), head.begin() + static_cast<std::ptrdiff_t>(first),
                      head.begin() + static_cast<std::ptrdiff_t>(last));
    }
    const std::size_t heads = setting.oracle.size() / row;
    const auto open = heads * static_cast<std::size_t>(kvpolicy::budget_for_total(
                                  setting.choice.budget, setting.choice.sinks, setting.choice.window));
    const std::size_t place = scores.size() - std::clamp<std::size_t>(open, 1, scores.size());
    std::ranges::nth_element(scores, scores.begin() + static_cast<std::ptrdiff_t>(place));
    std::vector<float> thresholds(heads, scores[place]);
    using Policy = kvpolicy::WGKV<kvpolicy::dynamic, kvpolicy::GivenScores, kvpolicy::dynamic>;
    Made cache = in_pages(
        setting, Policy{kvpolicy::Sink<>{setting.choice.sinks}, kvpolicy::Window<>{setting.choice.window},
                        kvpolicy::ThresholdGate<kvpolicy::at_least>{kvpolicy::per_head(
                            thresholds.data(), setting.config.layers, setting.config.kv_heads)},
                        kvpolicy::GivenScores{}});
    cache->give_scores(setting.oracle, setting.max_seq_len);
    return std::make_unique<examples::Keeping<std::vector<float>>>(std::move(thresholds), std::move(cache));
}

// ---- on a GPU ---------------------------------------------------------------------------------------------

#if KVPOLICY_EXAMPLES_CUDA
examples::DeviceBudget device_budget(const examples::PolicyChoice& choice) {
    return {choice.sinks, choice.window,
            kvpolicy::budget_for_total(choice.budget, choice.sinks, choice.window)};
}
examples::DeviceCache device_dense(const Setting& setting, const examples::DeviceSetting& device) {
    return examples::make_device_window(device, {0, setting.max_seq_len, 0});
}
examples::DeviceCache device_streaming(const Setting& setting, const examples::DeviceSetting& device) {
    const examples::PolicyChoice& choice = setting.choice;
    return examples::make_device_window(device, {choice.sinks, choice.budget - choice.sinks, 0});
}
examples::DeviceCache device_key_norm(const Setting& setting, const examples::DeviceSetting& device) {
    return examples::make_device_keynorm(device, device_budget(setting.choice), 0.0f);
}
examples::DeviceCache device_random(const Setting& setting, const examples::DeviceSetting& device) {
    return examples::make_device_random(device, device_budget(setting.choice), 1);
}
examples::DeviceCache device_oracle(const Setting& setting, const examples::DeviceSetting& device) {
    return examples::make_device_given(device, device_budget(setting.choice), setting.oracle,
                                       setting.max_seq_len);
}
#else
constexpr std::nullptr_t device_dense = nullptr, device_streaming = nullptr, device_key_norm = nullptr,
                         device_random = nullptr, device_oracle = nullptr;
#endif

constexpr float infinity = std::numeric_limits<float>::infinity();

// One line each; others' baselines come here. `scorers` stays null, --scorers adds those below.
const EvaluatedPolicy table[] = {
    {"dense", "dense", false, false, 0.0f, nullptr, dense, device_dense},
    {"streaming", "StreamingLLM", true, false, 0.0f, nullptr, streaming, device_streaming},
    {"keynorm", "small key norms", true, false, 0.0f, nullptr, key_norm, device_key_norm},
    {"random", "random keys", true, false, 0.0f, nullptr, random, device_random},
    {"stride", "keys at a stride", true, false, 0.0f, nullptr, stride, {}},
    {"h2o", "H2O", true, false, 0.0f, nullptr, h2o, {}},
    {"tova", "TOVA", true, false, 0.0f, nullptr, tova, {}},
    {"snapkv", "SnapKV, chunks of 64", true, false, 0.0f, nullptr, snapkv_chunks, {}},
    {"snapkv-prompt", "SnapKV, prompt then decode", true, true, 0.0f, nullptr, snapkv_prompt, {}},
    {"oracle-1", "oracle, beta 1", true, false, 1.0f, nullptr, oracle, device_oracle},
    {"oracle-2", "oracle, beta 2", true, false, 2.0f, nullptr, oracle, device_oracle},
    {"oracle-4", "oracle, beta 4", true, false, 4.0f, nullptr, oracle, device_oracle},
    {"oracle-inf", "oracle, beta inf", true, false, infinity, nullptr, oracle, device_oracle},
    {"shared-1", "shared, oracle, beta 1", true, false, 1.0f, nullptr, shared_oracle, {}},
    {"shared-2", "shared, oracle, beta 2", true, false, 2.0f, nullptr, shared_oracle, {}},
    {"gated-2", "gated, oracle, beta 2", true, false, 2.0f, nullptr, gated_oracle, {}},
};

}  // namespace

namespace {

/// A file of gates or of StreamLLM+, which has numbers of its own: what it keeps is measured.
EvaluatedPolicy gates(const examples::TrainedScorers& trained, const std::string& name) {
    const examples::ScorerSpec& spec = trained.spec;
    std::string label = trained.system();
    if (spec.policy == "spkv" || spec.policy == "wgkv") {
        label += fmt::format(", tau {:g}", spec.threshold);
    }
    if (spec.budget >= 0) {
        label += fmt::format(", cap {}", spec.budget);
    }
    EvaluatedPolicy made{name, label, false, false, 0.0f, nullptr, {}, {}};
    made.gates = &trained;
    made.make = [&trained](const Setting& setting) {
        return examples::make_gates(setting.ctx, setting.config, trained, setting.max_seq_len);
    };
#if KVPOLICY_EXAMPLES_CUDA
    made.make_on_device = [&trained](const Setting& setting, const examples::DeviceSetting& device) {
        return examples::make_device_gates(device, trained, setting.max_seq_len);
    };
#endif
    return made;
}

}  // namespace

std::vector<EvaluatedPolicy> all_policies(std::span<const examples::TrainedScorers> scorers,
                                          std::span<const std::string> names) {
    std::vector<EvaluatedPolicy> all(std::begin(table), std::end(table));
    for (std::size_t i = 0; i < scorers.size(); ++i) {
        const examples::TrainedScorers& trained = scorers[i];
        if (trained.has_own_numbers()) {
            all.push_back(gates(trained, names[i]));
            continue;
        }
        const auto beta = trained.spec.training.find("beta");
        std::string label =
            trained.system() + (beta == trained.spec.training.end() ? "" : ", beta " + beta->second);
        if (!trained.alpha.empty() && trained.spec.gamma_min == trained.spec.gamma_max) {
            label += fmt::format(", gamma {}", trained.spec.gamma_min);  // a decay that was chosen
        }
        const auto make = [&trained](bool match) {
            return [&trained, match](const Setting& setting) {
                return examples::make_trained(setting.ctx, setting.config, trained, setting.choice, match);
            };
        };
        decltype(EvaluatedPolicy::make_on_device) on_device;
#if KVPOLICY_EXAMPLES_CUDA
        if (trained.spec.kind == "mlp" ||
            trained.spec.delay != 0) {  // an mLSTM that is read on arrival has no kernel
            on_device = [&trained](const Setting& setting, const examples::DeviceSetting& device) {
                examples::check_window(trained, setting.choice.window);
                return examples::make_device_trained(device, device_budget(setting.choice), trained);
            };
        }
#endif
        all.push_back({names[i], label, true, false, 0.0f, &trained, make(false), on_device});
        all.push_back({names[i] + "-shared",
                       label + ", shared",
                       true,
                       false,
                       0.0f,
                       nullptr,
                       [&trained](const Setting& setting) {
                           return examples::make_trained_shared(setting.ctx, setting.config, trained,
                                                                setting.choice, setting.max_seq_len);
                       },
                       {}});
        if (trained.spec.kind == "mlp" && !trained.quantiles.empty()) {
            all.push_back({names[i] + "-gated",
                           label + ", gated",
                           true,
                           false,
                           0.0f,
                           nullptr,
                           [&trained](const Setting& setting) {
                               return examples::make_gated(setting.ctx, setting.config, trained,
                                                           setting.choice, setting.length,
                                                           setting.max_seq_len);
                           },
                           {}});
        }
        if (trained.spec.kind == "mlstm") {
            all.push_back({names[i] + "-matched",
                           label + ", less its state",
                           true,
                           false,
                           0.0f,
                           nullptr,
                           make(true),
                           {}});
        }
    }
    return all;
}

}  // namespace evaluate
