// Checkpoints: weights, decay, the optimizer's moments and the step, in fp32, so that a run
// goes on bit for bit.
#include "support/safetensors_writer.hpp"
#include "trainer.hpp"

#include <llama/error.hpp>
#include <llama/safetensors.hpp>

#include <charconv>

namespace train {
namespace {

constexpr const char* suffixes[] = {"", ".first", ".second"};

std::vector<float>* moments(AdamW::Array& array, std::size_t which) {
    return which == 1 ? &array.first : &array.second;
}

}  // namespace

/// What must be the same for a run to go on. In text, as it stands in files.
template <class S>
std::map<std::string, std::string> Trainer<S>::run_settings() const {
    const Options& o = options_;
    std::map<std::string, std::string> run;
    const auto put = [&](const char* name, const auto& value) { run[name] = fmt::format("{}", value); };
    put("seed", o.seed);
    put("steps", o.steps);
    put("batch", o.batch);
    put("sequences", source_.count());
    put("length", length_);
    put("budgets", fmt::format("{}", fmt::join(o.budgets, ",")));
    put("beta", examples::beta_name(o.target.beta));
    put("aggregate", aggregate_name(o.target.aggregate));
    if (o.target.look_ahead != kvpolicy::unlimited) {  // files of before do not say it
        put("look_ahead", look_ahead_name(o.target.look_ahead));
    }
    put("decay", o.decay ? "learned" : "none");
    put("temperature", o.temperature);
    put("omega_min", o.omega_min);
    put("margin_temperature", o.margin_temperature);
    put("balance", o.balance);
    put("positions", o.positions);
    put("late", o.late);
    if (o.decay && o.decay_rate != 1.0) {  // files of before, whose factor was 1, do not say it
        put("decay_rate", o.decay_rate);
    }
    put("rate", o.rate);
    put("last_rate", o.last_rate);
    put("warm_up", o.warm_up);
    put("weight_decay", o.weight_decay);
    put("clip", o.clip);
    return run;
}

template <class S>
void Trainer<S>::save_checkpoint(const std::string& file) {
    pull();
    std::vector<examples::TensorPlan> plan;
    for (const AdamW::Array& array : optimizer_.arrays) {
        for (const char* suffix : suffixes) {
            plan.push_back(
                {array.name + suffix, llama::DType::f32, {static_cast<std::int64_t>(array.gradient.size())}});
        }
    }
    examples::ScorerSpec spec = options_.spec;
    spec.training = run_settings();
    auto metadata = examples::to_metadata(spec);
    metadata["checkpoint"] = std::to_string(step_);
    metadata["steps_taken"] = std::to_string(optimizer_.steps_taken);
    examples::SafetensorsWriter writer(file, std::move(plan), metadata);
    for (const AdamW::Array& array : optimizer_.arrays) {
        writer.write({array.parameters, array.gradient.size()});
        writer.write(array.first);
        writer.write(array.second);
    }
    writer.finish();
}

template <class S>
void Trainer<S>::resume(const std::string& file) {
    const llama::Safetensors saved(file);
    const examples::ScorerSpec spec = examples::spec_of(saved.metadata(), file);
    if (!spec.same_architecture(options_.spec)) {
        llama::fail("{}: is a checkpoint of another architecture ({}); this run has {}", file,
                    spec.architecture(), options_.spec.architecture());
    }
    const examples::ScorerSpec& mine = options_.spec;
    if (spec.sinks != mine.sinks || spec.window != mine.window || spec.gamma_min != mine.gamma_min ||
        spec.gamma_max != mine.gamma_max) {
        llama::fail(
            "{}: is a checkpoint of a run with {} sinks, a window of {}, gamma {} to {}; this run has {}, "
            "{}, {} "
            "to {}",
            file, spec.sinks, spec.window, spec.gamma_min, spec.gamma_max, mine.sinks, mine.window,
            mine.gamma_min, mine.gamma_max);
    }
    auto settings = run_settings();
    if (spec.training.contains("decay_rate")) {
        settings.try_emplace("decay_rate", "1");
    }
    for (const auto& [key, value] : settings) {
        const auto found = spec.training.find(key);
        if (found == spec.training.end() || found->second != value) {
            llama::fail("{}: is a checkpoint of a run with {} {}; this run has {}", file, key,
                        found == spec.training.end() ? "no" : found->second, value);
        }
    }
    const auto number = [&](const char* key) {
        const auto found = saved.metadata().find(key);
        std::int64_t value = -1;
        if (found != saved.metadata().end()) {
            std::from_chars(found->second.data(), found->second.data() + found->second.size(), value);
        }
        if (value < 0 || value > options_.steps) {
            llama::fail(
                "{}: is no checkpoint: \"{}\" is missing or not 0 to {}; train_scorer --checkpoint writes "
                "them",
                file, key, options_.steps);
        }
        return value;
    };
    const std::int64_t at = number("checkpoint"), taken = number("steps_taken");
    for (AdamW::Array& array : optimizer_.arrays) {
        for (std::size_t which = 0; which < std::size(suffixes); ++which) {
            const std::string name = array.name + suffixes[which];
            const llama::Tensor* tensor = saved.find(name);
            if (tensor == nullptr || tensor->numel != array.gradient.size()) {
                llama::fail("{}: tensor {} is missing or has another size than {}", file, name,
                            array.gradient.size());
            }
            llama::to_float(*tensor, which == 0 ? std::span(array.parameters, array.gradient.size())
                                                : std::span(*moments(array, which)));
        }
    }
    optimizer_.steps_taken = taken;
    step_ = at;
    push();
}

template class Trainer<examples::Mlp>;
template class Trainer<examples::Mlstm>;

}  // namespace train
