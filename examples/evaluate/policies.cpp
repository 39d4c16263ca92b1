#include "policies.hpp"

#include <kvpolicy/scorers/concept.hpp>

#include <limits>

namespace evaluate {
namespace {

using Storage = kvpolicy::bf16;
using Made = std::unique_ptr<llama::KvAttention>;

Made by_name(const char* name, const Setting& setting) {
    examples::PolicyChoice choice = setting.choice;
    choice.name = name;
    return examples::make_attention<Storage>(setting.on, setting.config, choice, setting.longest);
}
Made dense(const Setting& setting) { return by_name("dense", setting); }
Made streaming(const Setting& setting) { return by_name("streaming", setting); }
Made key_norm(const Setting& setting) { return by_name("keynorm", setting); }

Made oracle(const Setting& setting) {
    Made made = by_name("given", setting);
    made->give_scores(setting.oracle, setting.longest);
    return made;
}

constexpr float infinity = std::numeric_limits<float>::infinity();

// One line each; others' baselines come here. `scorers` stays null, --scorers adds those below.
const EvaluatedPolicy table[] = {
    {"dense", "dense", false, 0.0f, nullptr, dense},
    {"streaming", "StreamingLLM", true, 0.0f, nullptr, streaming},
    {"keynorm", "small key norms", true, 0.0f, nullptr, key_norm},
    {"oracle-1", "oracle, beta 1", true, 1.0f, nullptr, oracle},
    {"oracle-2", "oracle, beta 2", true, 2.0f, nullptr, oracle},
    {"oracle-4", "oracle, beta 4", true, 4.0f, nullptr, oracle},
    {"oracle-inf", "oracle, beta inf", true, infinity, nullptr, oracle},
};

}  // namespace

std::vector<EvaluatedPolicy> all_policies(std::span<const examples::TrainedScorers> scorers,
                                          std::span<const std::string> names) {
    std::vector<EvaluatedPolicy> all(std::begin(table), std::end(table));
    for (std::size_t i = 0; i < scorers.size(); ++i) {
        const examples::TrainedScorers& trained = scorers[i];
        const auto beta = trained.spec.training.find("beta");
        const std::string label =
            trained.system() + (beta == trained.spec.training.end() ? "" : ", beta " + beta->second);
        const auto make = [&trained](bool match) {
            return [&trained, match](const Setting& setting) {
                return examples::make_trained(setting.on, setting.config, trained, setting.choice, match);
            };
        };
        all.push_back({names[i], label, true, 0.0f, &trained, make(false)});
        if (trained.spec.kind == "mlstm") {
            all.push_back({names[i] + "-matched", label + ", less its state", true, 0.0f, nullptr, make(true)});
        }
    }
    return all;
}

}  // namespace evaluate
