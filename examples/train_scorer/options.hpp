// What train_scorer is asked to do.
#pragma once

#include "qkv.hpp"
#include "support/scorers.hpp"
#include "support/whole_file.hpp"

#include <cstdint>
#include <string>
#include <vector>

namespace train {

struct Options {
    // where q, k, v come from
    std::string model;           ///< a model's folder, with --text
    std::string text;            ///< a text file,
    std::string tokens;          ///< or a file of token ids
    std::string qkv;             ///< or a file of q, k, v
    std::string held_out;        ///< a second file of q, k, v, or for a model another text
    std::int32_t length = 4096;  ///< tokens a sequence, of text
    std::int32_t pairs =
        -1;  ///< retrieval queries per sequence of text; -1: 32 for models that read bytes, else 0
    std::int32_t sequences = 48;          ///< at most; of a file of q, k, v all unless it is given
    std::int32_t held_out_sequences = 2;  ///< likewise; 0: none

    // what is trained
    examples::ScorerSpec spec;
    bool immediate = false;
    bool decay = true;
    TargetOptions target;
    std::vector<std::int32_t> budgets{1024, 512, 256};  ///< totals B = s + w + k, in turn

    // the loss
    float temperature = 1.0f;
    float omega_min = 0.0f;
    float margin_temperature = 1.0f;
    bool balance = true;
    std::int32_t positions = 1024;  ///< sampled a head; 0: all
    float late = 0.5f;

    // the optimizer
    std::int64_t steps = 300;
    std::int64_t stop_after = 0;  ///< leave off after this step, with a checkpoint; 0: at the end
    std::int32_t batch = 1;
    double rate = 1e-3, last_rate = 8e-5;
    double decay_rate = 30.0;  ///< factor of the rate for alpha, which has some units to go
    std::int64_t warm_up = 100;
    double weight_decay = 1e-4;
    double clip = 1.0;
    std::uint64_t seed = 1;

    // what comes out
    std::string out = "scorers.safetensors";
    std::string checkpoint;
    std::string rescue() const { return checkpoint.empty() ? out + ".checkpoint" : checkpoint; }
    std::int64_t checkpoint_every = 0;
    std::string resume;
    std::string metrics;
    std::int64_t evaluate_every = 100;
    bool fp32 = false;
    std::string dump;
    bool dump_eval = false;  ///< the sequences of the model's eval.bin instead of the text's
    std::vector<float> dump_targets;
    std::string dump_tokens;
    std::int32_t threads = 0;
    std::string data;  ///< a fingerprint of what the run is trained on, for its checkpoints

    // where
    bool on_device = false;    ///< --backend cuda
    bool fp32_rows = false;    ///< on a device: keys and values in fp32, not bf16
    bool bf16_model = false;   ///< on a device: the model's own attention in bf16, not fp32
    std::int64_t compare = 0;  ///< steps of both backends, side by side; 0: train
};

extern const char* const usage;

/// Throws llama::Error for what is not understood or not allowed, and for an option that what was asked for
/// would not look at. Prints the usage and ends the process for --help.
Options parse(int argc, const char* const* argv);

/// Locks of all files that this run will write, to be held until it ends. Throws llama::Error for a file that
/// could not be written when the time comes, that another process is writing, or that would be written over
/// another of this run. A lock that is given up leaves nothing behind.
std::vector<examples::OutputLock> lock_files(const Options& options);

}  // namespace train
