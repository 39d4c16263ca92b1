// The file of a run that goes on later: weights, decay, the optimizer's moments and the step, in fp32, so
// that a run goes on bit for bit; and what the run was, so that no other run goes on from it.
#pragma once

#include "support/scorers.hpp"
#include "train/adamw.hpp"

#include <array>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace train {

/// What must be the same for a run to go on, as text, by name.
using RunSettings = std::map<std::string, std::string>;

/// The state of a run. values[i] are parameters, first and second moments of the i-th array.
struct Checkpoint {
    std::int64_t step = 0, steps_taken = 0;
    std::vector<std::array<std::vector<float>, 3>> values;
};

/// A WholeFile; spec.training are the run's settings.
void write_checkpoint(const std::filesystem::path& file, const examples::ScorerSpec& spec, std::int64_t step,
                      const AdamW& optimizer);

/// Reads the state of a run of `steps` steps with this spec, these settings in spec.training, and these
/// arrays. Throws llama::Error for a file that is no checkpoint, is of another architecture or run (the
/// setting that differs is named), lacks a tensor, or holds numbers that no run has.
Checkpoint read_checkpoint(const std::filesystem::path& file, const examples::ScorerSpec& spec,
                           std::int64_t steps, std::span<const AdamW::Array> arrays);

}  // namespace train
