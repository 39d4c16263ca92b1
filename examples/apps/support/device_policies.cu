#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/lte.hpp>
#include <kvpolicy/streaming_llm.hpp>

#include "device_policies.hpp"
#include "device_weights.cuh"

#include <llama/cuda/cache_attention.cuh>

#include <span>
#include <stdexcept>
#include <string>
#include <utility>

namespace examples {
namespace {

using kvpolicy::bf16;
using kvpolicy::Decay;
using kvpolicy::dynamic;
using kvpolicy::Sink;
using kvpolicy::TopKBudget;
using kvpolicy::Window;
using llama::ScoreSource;

template <class P>
DeviceCache make(const DeviceSetting& setting, const P& policy, const ScoreSource& source = {},
                 std::vector<typename P::scorer_type> scorers = {},
                 std::vector<llama::DeviceArray<float>> weights = {}) {
    if (setting.rows == llama::DType::f32) {
        return std::make_unique<llama::DeviceCacheAttention<P, float>>(
            setting.stream, setting.config, setting.chunk, policy, source, std::move(scorers),
            std::move(weights));
    }
    if (setting.rows != llama::DType::bf16) {
        throw std::invalid_argument("rows: F16 is not allowed; they must be F32 or BF16");
    }
    return std::make_unique<llama::DeviceCacheAttention<P, bf16>>(setting.stream, setting.config,
                                                                  setting.chunk, policy, source,
                                                                  std::move(scorers), std::move(weights));
}

DeviceCache make_ranked(const DeviceSetting& setting, const DeviceBudget& budget, float log_gamma,
                        const ScoreSource& source, std::vector<llama::DeviceArray<float>> weights = {}) {
    return make(setting,
                kvpolicy::KVpop<>{Sink<>{budget.sinks}, Window<>{budget.window}, TopKBudget<>{budget.keys},
                                  Decay<1>{log_gamma}, kvpolicy::GivenScores{}},
                source, {}, std::move(weights));
}

template <class S>
DeviceCache make_scored(const DeviceSetting& setting, const DeviceBudget& budget,
                        const TrainedScorers& trained, const ScorerStack<S>& stack) {
    std::vector<llama::DeviceArray<float>> weights;
    std::vector<S> scorers = on_device(stack, weights);
    using Policy = kvpolicy::KVpop<dynamic, dynamic, dynamic, S>;
    const Policy policy{
        Sink<>{budget.sinks}, Window<>{budget.window}, TopKBudget<>{budget.keys},
        Decay<1>{kvpolicy::per_head(trained.log_gamma.data(), trained.spec.layers, trained.spec.heads)},
        scorers.front()};
    return make(setting, policy, {}, std::move(scorers), std::move(weights));
}

}  // namespace

DeviceCache make_device_window(const DeviceSetting& setting, const DeviceBudget& budget) {
    return make(setting, kvpolicy::StreamingLLM<>{Sink<>{budget.sinks}, Window<>{budget.window}});
}

DeviceCache make_device_keynorm(const DeviceSetting& setting, const DeviceBudget& budget, float log_gamma) {
    return make_ranked(setting, budget, log_gamma, {.kind = ScoreSource::Kind::key_norm});
}

DeviceCache make_device_random(const DeviceSetting& setting, const DeviceBudget& budget, std::uint64_t seed) {
    return make_ranked(setting, budget, 0.0f,
                       {.kind = ScoreSource::Kind::random, .seed = seed, .window = budget.window});
}

DeviceCache make_device_given(const DeviceSetting& setting, const DeviceBudget& budget,
                              std::span<const float> scores, std::int64_t max_seq_len) {
    const std::int64_t heads = std::int64_t{setting.config.layers} * setting.config.kv_heads;
    if (max_seq_len < 0 || static_cast<std::int64_t>(scores.size()) != heads * max_seq_len) {
        throw std::invalid_argument("scores: " + std::to_string(scores.size()) +
                                    " numbers are not allowed; they must be one for each of " +
                                    std::to_string(heads) + " KV heads of all layers and each of " +
                                    std::to_string(max_seq_len) + " tokens");
    }
    std::vector<llama::DeviceArray<float>> kept;
    const float* const on_device = kept.emplace_back(scores).data();
    return make_ranked(setting, budget, 0.0f,
                       {.kind = ScoreSource::Kind::given, .scores = on_device, .max_seq_len = max_seq_len},
                       std::move(kept));
}

DeviceCache make_device_capped(const DeviceSetting& setting, const DeviceBudget& budget,
                               const std::vector<float>& thresholds) {
    using Capped = kvpolicy::LTE<dynamic, dynamic, dynamic, kvpolicy::GivenScores>;
    const auto by_head =
        kvpolicy::per_head(thresholds.data(), setting.config.layers, setting.config.kv_heads);
    return make(setting,
                Capped{Sink<>{budget.sinks}, Window<>{budget.window},
                       kvpolicy::ThresholdGate<kvpolicy::above>{by_head}, TopKBudget<>{budget.keys},
                       kvpolicy::GivenScores{}},
                {.kind = ScoreSource::Kind::key_norm});
}

DeviceCache make_device_trained(const DeviceSetting& setting, const DeviceBudget& budget,
                                const TrainedScorers& trained) {
    if (const auto* mlp = std::get_if<ScorerStack<Mlp>>(&trained.stack)) {
        return make_scored(setting, budget, trained, *mlp);
    }
    if (trained.spec.delay == 0) {
        throw std::invalid_argument(
            "scorers: an mLSTM that is read on arrival is not allowed on a GPU; it must be an MLP, or an "
            "mLSTM "
            "with a delayed read");
    }
    return make_scored(setting, budget, trained, std::get<ScorerStack<Mlstm>>(trained.stack));
}

}  // namespace examples
