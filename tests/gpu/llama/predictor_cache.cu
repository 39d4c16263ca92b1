#include <kvpolicy/caches/cuda/paged/dispatch_paged.cuh>
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/spkv.hpp>

#include "predictor_cache.hpp"

#include <llama/cuda/cache_attention.cuh>

#include <memory>
#include <span>
#include <utility>
#include <vector>

namespace test {

examples::DeviceCache make_device_predicted(const examples::DeviceSetting& setting,
                                            const Predictors& predictors, std::int64_t max_seq_len) {
    using Policy = kvpolicy::SPKV<predictor_window, kvpolicy::UtilityPredictor>;
    std::vector<llama::DeviceArray<float>> weights;
    std::vector<kvpolicy::UtilityPredictor> scorers = predictors.of_layer;
    auto from = predictors.weights.begin();
    const auto next = [&] {
        return static_cast<const float*>(weights.emplace_back(std::span<const float>(*from++)).data());
    };
    for (kvpolicy::UtilityPredictor& scorer : scorers) {
        scorer.weights = {next(), next(), next(), next()};
    }
    const Policy policy{{}, {}, {}, scorers.front()};
    return std::make_unique<llama::DeviceCacheAttention<Policy, float, kvpolicy::DualCache>>(
        setting.stream, setting.config, setting.chunk, policy, llama::ScoreSource{}, std::move(scorers),
        std::move(weights), max_seq_len);
}

}  // namespace test
