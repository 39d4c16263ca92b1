// A source of its own, since nvcc takes a minute for each kind of scorer.
#include <kvpolicy/caches/cuda/paged/dispatch_paged.cuh>
#include <kvpolicy/caches/dual.hpp>

#include "device_policies.hpp"
#include "device_weights.cuh"
#include "file_gate.hpp"

#include <llama/cuda/cache_attention.cuh>

#include <stdexcept>
#include <utility>

namespace examples {
namespace {

kvpolicy::Rope& rope_of(WriteGate& scorer) { return scorer.input.rope; }
kvpolicy::Rope& rope_of(Conv& scorer) { return scorer.rope; }

}  // namespace

DeviceCache make_device_gates(const DeviceSetting& setting, const TrainedScorers& trained,
                              std::int64_t max_seq_len) {
    check_fits(trained, setting.config, "scorers");
    const ScorerSpec& spec = trained.spec;
    if (spec.policy == "streaming") {
        return make_device_window(setting, {spec.sinks, spec.window, 0});
    }
    if (setting.rows != llama::DType::bf16) {
        throw std::invalid_argument("rows: F32 is not allowed for gates on a GPU; they must be BF16");
    }
    return with_gates(trained, [&]<class S>(const ScorerStack<S>& stack) -> DeviceCache {
        std::vector<llama::DeviceArray<float>> memory;
        std::vector<S> scorers = on_device(stack, memory);
        if constexpr (requires(S & scorer) { rope_of(scorer); }) {
            if (!trained.frequencies.empty()) {
                const float* const frequencies =
                    memory.emplace_back(std::span<const float>(trained.frequencies)).data();
                for (S& scorer : scorers) {
                    rope_of(scorer).frequencies = frequencies;
                }
            }
        }
        return std::make_unique<
            llama::DeviceCacheAttention<GatesPolicy<S>, kvpolicy::bf16, kvpolicy::DualCache>>(
            setting.stream, setting.config, setting.chunk, gates_policy(spec, scorers.front()),
            llama::ScoreSource{}, std::move(scorers), std::move(memory), max_seq_len);
    });
}

}  // namespace examples
