#include "checkpoint.hpp"

#include "support/safetensors_writer.hpp"

#include <llama/error.hpp>
#include <llama/safetensors.hpp>

#include <charconv>
#include <cmath>

namespace train {
namespace {

constexpr const char* suffixes[] = {"", ".first", ".second"};
constexpr std::size_t second_moments = 2;

/// Refuses the spec of another architecture or run.
void check_run(const std::string& file, const examples::ScorerSpec& spec, const examples::ScorerSpec& mine) {
    if (!spec.same_architecture(mine)) {
        llama::fail("{}: is a checkpoint of another architecture ({}); this run has {}", file,
                    spec.architecture(), mine.architecture());
    }
    if (spec.sinks != mine.sinks || spec.window != mine.window || spec.gamma_min != mine.gamma_min ||
        spec.gamma_max != mine.gamma_max) {
        llama::fail(
            "{}: is a checkpoint of a run with {} sinks, a window of {}, gamma {} to {}; this run has {}, "
            "{}, {} to {}",
            file, spec.sinks, spec.window, spec.gamma_min, spec.gamma_max, mine.sinks, mine.window,
            mine.gamma_min, mine.gamma_max);
    }
    RunSettings settings = mine.training;
    if (spec.training.contains("decay_rate")) {
        settings.try_emplace("decay_rate", "1");
    }
    for (const auto& [key, value] : settings) {
        const auto found = spec.training.find(key);
        if (found == spec.training.end() || found->second != value) {
            llama::fail("{}: is a checkpoint of a run with {} {}; this run has {}", file, key,
                        found == spec.training.end() ? "no" : llama::clipped(found->second), value);
        }
    }
}

std::int64_t number(const llama::Safetensors& saved, const char* key, std::int64_t most) {
    const auto found = saved.metadata().find(key);
    std::int64_t value = -1;
    if (found != saved.metadata().end()) {
        const std::string& text = found->second;
        const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
        value = error == std::errc{} && end == text.data() + text.size() ? value : -1;
    }
    if (value < 0 || value > most) {
        llama::fail(
            "{}: is no checkpoint: \"{}\" is missing or not 0 to {}; train_scorer --checkpoint writes them",
            saved.path(), key, most);
    }
    return value;
}

std::vector<float> read(const llama::Safetensors& saved, const std::string& name, std::size_t size,
                        bool may_be_negative) {
    const llama::Tensor* tensor = saved.find(name);
    if (tensor == nullptr || tensor->numel != size) {
        llama::fail("{}: tensor {} is missing or has another size than {}", saved.path(), name, size);
    }
    std::vector<float> values(size);
    llama::to_float(*tensor, values);
    for (std::size_t i = 0; i < size; ++i) {
        if (!std::isfinite(values[i]) || (values[i] < 0.0f && !may_be_negative)) {
            llama::fail("{}: tensor {} holds {} at {}; numbers must be finite{}", saved.path(), name,
                        values[i], i, may_be_negative ? "" : ", and 0 or more");
        }
    }
    return values;
}

}  // namespace

void write_checkpoint(const std::filesystem::path& file, const examples::ScorerSpec& spec, std::int64_t step,
                      const AdamW& optimizer) {
    std::vector<examples::TensorPlan> plan;
    for (const AdamW::Array& array : optimizer.arrays) {
        for (const char* suffix : suffixes) {
            plan.push_back(
                {array.name + suffix, llama::DType::f32, {static_cast<std::int64_t>(array.gradient.size())}});
        }
    }
    auto metadata = examples::to_metadata(spec);
    metadata["checkpoint"] = std::to_string(step);
    metadata["steps_taken"] = std::to_string(optimizer.steps_taken);
    examples::SafetensorsWriter writer(file, std::move(plan), metadata);
    for (const AdamW::Array& array : optimizer.arrays) {
        writer.write({array.parameters, array.gradient.size()});
        writer.write(array.first);
        writer.write(array.second);
    }
    writer.finish();
}

Checkpoint read_checkpoint(const std::filesystem::path& file, const examples::ScorerSpec& spec,
                           std::int64_t steps, std::span<const AdamW::Array> arrays) {
    const llama::Safetensors saved(file);
    check_run(saved.path(), examples::spec_of(saved.metadata(), saved.path()), spec);
    Checkpoint checkpoint;
    checkpoint.step = number(saved, "checkpoint", steps);
    checkpoint.steps_taken = number(saved, "steps_taken", checkpoint.step);
    for (const AdamW::Array& array : arrays) {
        auto& values = checkpoint.values.emplace_back();
        for (std::size_t i = 0; i < values.size(); ++i) {
            values[i] = read(saved, array.name + suffixes[i], array.gradient.size(), i != second_moments);
        }
    }
    return checkpoint;
}

}  // namespace train
