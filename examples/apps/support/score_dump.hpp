// Scores that a trained scorer gives the tokens of a long text, for benchmarks of real lifetimes.
//
// A model reads no more tokens at once than it was trained for. A longer text is read in segments, each at
// positions from 0 with dense attention and an empty scorer state, as train_scorer reads its sequences. A
// segment begins `overlap` tokens before the first token whose score counts, so that only the text's first
// tokens are scored without a past.
#pragma once

#include <kvpolicy/core/context.hpp>

#include "scorers.hpp"

#include <llama/model.hpp>

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

namespace examples {

struct DumpOptions {
    std::int32_t tokens = 16384;  ///< scores per KV head
    std::int32_t segment = 0;     ///< tokens that the model reads at once; 0: all that it was trained for
    std::int32_t overlap = -1;    ///< of two segments; -1: half a segment
    std::vector<std::int32_t> layers;  ///< in ascending order; empty: all
    double share = 0.25;  ///< of the training text's scores that lie above the thresholds, if there are any
};

/// A segment reads tokens [begin, end) and gives the scores of [from, to).
struct DumpSegment {
    std::int32_t begin, end, from, to;
};

/// Segments that together give the scores of tokens [0, tokens), in order. A score needs the `delay` tokens
/// after it, which the text has.
std::vector<DumpSegment> dump_segments(std::int32_t tokens, std::int32_t segment, std::int32_t overlap,
                                       std::int32_t delay);

struct ScoreDump {
    DumpOptions options;        ///< with the defaults filled in
    std::int32_t heads = 0;     ///< KV heads per layer
    std::int32_t segments = 0;  ///< that were read
    std::vector<float> scores;  ///< [layers, heads, tokens], of keys and values in bf16, as caches store them
    std::vector<float> log_gamma;   ///< [layers, heads], of the policy's decay; zeros without one
    std::vector<float> thresholds;  ///< [layers, heads]; empty where the scorers' file has no quantiles
};

/// Reads the text and scores it. Throws llama::Error, before anything is read, for scorers that do not fit
/// the model, tokens that the text does not have, segments longer than the model's context or not longer than
/// overlap and delay, and layers out of range or order. Scores depend on the machine's BLAS to rounding, and
/// on nothing else: the same call gives the same bits.
ScoreDump dump_scores(const kvpolicy::host& ctx, const llama::Model& model, const TrainedScorers& trained,
                      std::span<const std::int32_t> text, const DumpOptions& options);

/// A safetensors file with the tensors `scores`, `log_gamma` and, if there are any, `thresholds`. Metadata:
/// format, layers, segment, overlap, share, the scorers' own as scorer.*, and `sources`: names of model, text
/// and scorers.
void save_dump(const std::filesystem::path& file, const ScoreDump& dump, const ScorerSpec& spec,
               const std::map<std::string, std::string>& sources);

}  // namespace examples
