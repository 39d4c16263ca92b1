// How a run goes on from a checkpoint.
#include "checkpoint.hpp"
#include "trainer.hpp"

#include <algorithm>

namespace train {

/// What must be the same for a run to go on. In text, as it stands in files.
template <class S>
RunSettings Trainer<S>::run_settings() const {
    const Options& o = options_;
    RunSettings run;
    const auto put = [&](const char* name, const auto& value) { run[name] = fmt::format("{}", value); };
    if (!o.data.empty()) {
        put("data", o.data);
    }
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
    examples::ScorerSpec spec = options_.spec;
    spec.training = run_settings();
    write_checkpoint(file, spec, step_, optimizer_);
}

template <class S>
void Trainer<S>::resume(const std::string& file) {
    examples::ScorerSpec spec = options_.spec;
    spec.training = run_settings();
    const Checkpoint saved = read_checkpoint(file, spec, options_.steps, optimizer_.arrays);
    for (std::size_t i = 0; i < saved.values.size(); ++i) {
        AdamW::Array& array = optimizer_.arrays[i];
        const auto& [parameters, first, second] = saved.values[i];
        std::ranges::copy(parameters, array.parameters);
        array.first = first;
        array.second = second;
    }
    optimizer_.steps_taken = saved.steps_taken;
    step_ = saved.step;
    push();
}

template RunSettings Trainer<examples::Mlp>::run_settings() const;
template RunSettings Trainer<examples::Mlstm>::run_settings() const;
template void Trainer<examples::Mlp>::save_checkpoint(const std::string&);
template void Trainer<examples::Mlstm>::save_checkpoint(const std::string&);
template void Trainer<examples::Mlp>::resume(const std::string&);
template void Trainer<examples::Mlstm>::resume(const std::string&);

}  // namespace train
