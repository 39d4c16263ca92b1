// Checkpoints of train_scorer of anyone: an error with a sentence, or a state that the run can go on from.
#include "train_scorer/checkpoint.hpp"

#include "files.hpp"

#include <cmath>
#include <string>
#include <vector>

namespace {

/// A run of two arrays.
struct Run {
    examples::ScorerSpec spec;
    std::vector<float> a = {1.0f, 2.0f, 3.0f}, b = {0.5f};
    train::AdamW optimizer;

    Run() {
        spec.layers = spec.heads = 1, spec.head_dim_qk = spec.head_dim_vo = 2, spec.hidden = 2;
        spec.training = {{"seed", "1"}, {"steps", "9"}, {"data", "0123456789abcdef"}};
        optimizer.add("layers.0.w1", a.data(), a.size(), true);
        optimizer.add("alpha", b.data(), b.size(), false);
        optimizer.steps_taken = 4;
    }
};

fuzz::Parts file_of(const Run& run) {
    return fuzz::Parts::written_by(
        [&](const std::string& path) { train::write_checkpoint(path, run.spec, 5, run.optimizer); });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const Run run;
    static const fuzz::Parts valid = file_of(run);
    static const fuzz::File file("checkpoint");
    fuzz::Bytes in(data, size);
    file.write(fuzz::spliced_tensors(valid, in));
    const bool good = fuzz::reads([&] {
        const train::Checkpoint read = train::read_checkpoint(file.path(), run.spec, 9, run.optimizer.arrays);
        fuzz::check(read.step >= 0 && read.step <= 9, "a step that the run does not have");
        fuzz::check(read.steps_taken >= 0 && read.steps_taken <= read.step, "more steps than there were");
        fuzz::check(read.values.size() == 2 && read.values[0][0].size() == 3, "another size");
        for (const auto& array : read.values) {
            for (const float x : array[2]) {
                fuzz::check(x >= 0.0f && std::isfinite(x), "a second moment below 0");
            }
        }
    });
    fuzz::check(good || size > 1, "the valid file is refused");
    return 0;
}
