// Files of scorers and gates of anyone: an error with a sentence, or scorers whose numbers are finite.
#include "support/scorers.hpp"

#include "files.hpp"
#include "support/safetensors_writer.hpp"

#include <cmath>
#include <string>
#include <vector>

namespace {

template <class S>
fuzz::Parts file_of(const char* policy, const char* kind) {
    examples::ScorerSpec spec;
    spec.policy = policy, spec.kind = kind, spec.layers = 2, spec.heads = 2;
    spec.head_dim_qk = spec.head_dim_vo = 4, spec.hidden = 2, spec.d_qk = 4, spec.d_v = 2, spec.width = 6;
    spec.window = 16, spec.delay = spec.kind == "conv" || spec.kind == "mlstm" ? 16 : 0;
    spec.norm = spec.skip = true;
    spec.rope_layout = spec.kind == "write_gate" || spec.kind == "conv" ? "half_split" : "none";
    const bool linear = spec.kind == "linear";
    std::vector<examples::TensorPlan> plan;
    for (int layer = 0; linear && layer < spec.layers; ++layer) {
        plan.push_back({fmt::format("layers.{}.weight", layer), llama::DType::f32, {2, 8}});
        plan.push_back({fmt::format("layers.{}.bias", layer), llama::DType::f32, {2}});
    }
    const examples::ScorerStack<S> stack(spec);
    for (const auto& array : stack.arrays) {
        if (!linear) {
            plan.push_back({array.name, llama::DType::bf16, array.shape});
        }
    }
    if (spec.policy == "kvpop") {
        plan.push_back({"alpha", llama::DType::f32, {2, 2}});
    }
    if (spec.rope_layout != "none") {
        plan.push_back({"rope_frequencies", llama::DType::f32, {2}});
    }
    return fuzz::Parts::written_by([&](const std::string& path) {
        examples::SafetensorsWriter writer(path, plan, examples::to_metadata(spec));
        for (const examples::TensorPlan& tensor : plan) {
            writer.write(std::vector<float>(tensor.numel(), 0.25f));
        }
        writer.finish();
    });
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const fuzz::Parts valid[] = {
        file_of<examples::Mlp>("kvpop", "mlp"),  file_of<examples::Mlstm>("kvpop", "mlstm"),
        file_of<examples::Mlp>("dms", "linear"), file_of<examples::WriteGate>("wgkv", "write_gate"),
        file_of<examples::Conv>("lte", "conv"),  file_of<examples::Predictor>("spkv", "utility"),
    };
    static const fuzz::File file("scorers");
    fuzz::Bytes in(data, size);
    file.write(fuzz::spliced_tensors(valid[in.below(6)], in));
    const bool good = fuzz::reads([&] {
        const examples::TrainedScorers read = examples::load_scorers(file.path());
        for (const float gamma : read.log_gamma) {
            fuzz::check(gamma <= 0.0f, "a decay that grows");
        }
        std::visit(
            [&](const auto& stack) {
                fuzz::check(stack.scorers.size() == static_cast<std::size_t>(read.spec.layers), "layers");
                for (const auto& array : stack.arrays) {
                    for (const float x : array.data) {
                        fuzz::check(std::isfinite(x), "a weight that is not finite");
                    }
                }
            },
            read.stack);
        static_cast<void>(read.system());
    });
    fuzz::check(good || size > 1, "the valid file is refused");
    return 0;
}
