#include "trained.hpp"

#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/scorers/sequence.hpp>
#include <kvpolicy/wgkv.hpp>

#include "immediate.hpp"
#include "retention.hpp"

#include <llama/error.hpp>

#include <algorithm>
#include <utility>
#include <vector>

namespace examples {
namespace {

using kvpolicy::dynamic;

template <class S>
std::unique_ptr<llama::KvAttention> make(const kvpolicy::host& ctx, const llama::Config& config,
                                         const TrainedScorers& trained, const PolicyChoice& choice,
                                         bool match_state, llama::DType rows, std::vector<S> scorers) {
    using Policy = kvpolicy::KVpop<dynamic, dynamic, dynamic, S>;
    std::int32_t k = kvpolicy::budget_for_total(choice.budget, choice.sinks, choice.window);
    if constexpr (kvpolicy::StatefulScorer<S>) {
        if (match_state) {
            const auto row = static_cast<std::size_t>(config.head_dim) * 2 * sizeof(kvpolicy::bf16);
            k = kvpolicy::budget_matching_state(k, scorers.front(), row);
        }
    }
    const Policy policy{kvpolicy::Sink<>{choice.sinks}, kvpolicy::Window<>{choice.window},
                        kvpolicy::TopKBudget<>{k},
                        kvpolicy::Decay<1>{kvpolicy::per_head(trained.log_gamma.data(), trained.spec.layers,
                                                              trained.spec.heads)},
                        scorers.front()};
    std::unique_ptr<llama::KvAttention> cache;
    if (rows == llama::DType::f32) {
        cache = std::make_unique<llama::CacheAttention<Policy, float>>(ctx, config, policy, scorers.data());
    } else {
        cache = std::make_unique<llama::CacheAttention<Policy, kvpolicy::bf16>>(ctx, config, policy,
                                                                                scorers.data());
    }
    return std::make_unique<Keeping<std::vector<S>>>(std::move(scorers), std::move(cache));
}

}  // namespace

void check_window(const TrainedScorers& trained, std::int32_t window) {
    if (trained.spec.delay != 0 && window != trained.spec.window && !trained.has_own_numbers()) {
        llama::fail("window: {} is not allowed; these scorers read keys after {} tokens, so it must be {}",
                    window, trained.spec.window, trained.spec.window);
    }
}

std::unique_ptr<llama::KvAttention> make_trained(const kvpolicy::host& ctx, const llama::Config& config,
                                                 const TrainedScorers& trained, const PolicyChoice& choice,
                                                 bool match_state, llama::DType rows) {
    check_fits(trained, config, "scorers");
    check_window(trained, choice.window);
    if (trained.has_own_numbers()) {
        llama::fail("scorers: policy {} is not allowed; it must be kvpop", trained.spec.policy);
    }
    if (const auto* mlp = std::get_if<ScorerStack<Mlp>>(&trained.stack)) {
        return make<Mlp>(ctx, config, trained, choice, match_state, rows, mlp->scorers);
    }
    const auto& mlstm = std::get<ScorerStack<Mlstm>>(trained.stack);
    if (trained.spec.delay != 0) {
        return make<Mlstm>(ctx, config, trained, choice, match_state, rows, mlstm.scorers);
    }
    std::vector<ImmediateScorer<Mlstm>> scorers;
    for (const Mlstm& scorer : mlstm.scorers) {
        scorers.push_back({scorer, choice.window});
    }
    return make<ImmediateScorer<Mlstm>>(ctx, config, trained, choice, match_state, rows, std::move(scorers));
}

std::unique_ptr<llama::KvAttention> make_gated(const kvpolicy::host& ctx, const llama::Config& config,
                                               const TrainedScorers& trained, const PolicyChoice& choice,
                                               std::int32_t length, std::int32_t max_seq_len) {
    check_fits(trained, config, "scorers");
    const auto* mlp = std::get_if<ScorerStack<Mlp>>(&trained.stack);
    if (mlp == nullptr) {
        llama::fail("gated: {} is not allowed; scores must be there when a key arrives, as an mlp's are",
                    trained.spec.kind);
    }
    using Policy = kvpolicy::WGKV<dynamic, Mlp, dynamic>;
    const std::int32_t leaving = std::max(1, length - choice.sinks - choice.window);
    const std::int32_t k = kvpolicy::budget_for_total(choice.budget, choice.sinks, choice.window);
    std::vector<float> thresholds = trained.thresholds(static_cast<double>(k) / leaving);
    const Policy policy{kvpolicy::Sink<>{choice.sinks}, kvpolicy::Window<>{choice.window},
                        kvpolicy::ThresholdGate<kvpolicy::at_least>{
                            kvpolicy::per_head(thresholds.data(), config.layers, config.kv_heads)},
                        mlp->scorers.front()};
    auto cache = std::make_unique<llama::CacheAttention<Policy, kvpolicy::bf16, kvpolicy::DualCache>>(
        ctx, config, policy, mlp->scorers.data(), max_seq_len);
    return std::make_unique<Keeping<std::vector<float>>>(std::move(thresholds), std::move(cache));
}

}  // namespace examples
