#include "trained.hpp"

#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/policies/shared_budget.hpp>
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

/// What a cache of trained scorers is made for.
struct TrainedCache {
    const kvpolicy::host& ctx;
    const llama::Config& config;
    const TrainedScorers& trained;
    const PolicyChoice& choice;
    llama::DType rows;
    bool match_state = false;
    std::int32_t max_seq_len = 0;  // where the heads share the budget

    [[nodiscard]] kvpolicy::Decay<1> decay() const {
        return kvpolicy::Decay<1>{
            kvpolicy::per_head(trained.log_gamma.data(), trained.spec.layers, trained.spec.heads)};
    }
    [[nodiscard]] std::int32_t long_range() const {
        return kvpolicy::budget_for_total(choice.budget, choice.sinks, choice.window);
    }
};

template <class Half, class Float, class Policy, class S>
std::unique_ptr<llama::KvAttention> keep(const TrainedCache& of, const Policy& policy,
                                         std::vector<S> scorers) {
    std::unique_ptr<llama::KvAttention> cache;
    if (of.rows == llama::DType::f32) {
        cache = std::make_unique<Float>(of.ctx, of.config, policy, scorers.data(), of.max_seq_len);
    } else {
        cache = std::make_unique<Half>(of.ctx, of.config, policy, scorers.data(), of.max_seq_len);
    }
    return std::make_unique<Keeping<std::vector<S>>>(std::move(scorers), std::move(cache));
}

/// KVpop's rule: k keys of each head.
struct make_by_head {
    template <class S>
    std::unique_ptr<llama::KvAttention> operator()(const TrainedCache& of, std::vector<S> scorers) const {
        using Policy = kvpolicy::KVpop<dynamic, dynamic, dynamic, S>;
        std::int32_t k = of.long_range();
        if constexpr (kvpolicy::StatefulScorer<S>) {
            if (of.match_state) {
                const auto row = static_cast<std::size_t>(of.config.head_dim) * 2 * sizeof(kvpolicy::bf16);
                k = kvpolicy::budget_matching_state(k, scorers.front(), row);
            }
        }
        const Policy policy{kvpolicy::Sink<>{of.choice.sinks}, kvpolicy::Window<>{of.choice.window},
                            kvpolicy::TopKBudget<>{k}, of.decay(), scorers.front()};
        return keep<llama::CacheAttention<Policy, kvpolicy::bf16>, llama::CacheAttention<Policy, float>>(
            of, policy, std::move(scorers));
    }
};

/// As many keys of all heads of a layer.
struct make_shared_by_heads {
    template <class S>
    std::unique_ptr<llama::KvAttention> operator()(const TrainedCache& of, std::vector<S> scorers) const {
        using Policy = kvpolicy::Policy<kvpolicy::Sink<>, kvpolicy::Window<>, kvpolicy::SharedBudget<>,
                                        kvpolicy::Decay<1>, S>;
        const Policy policy{kvpolicy::Sink<>{of.choice.sinks}, kvpolicy::Window<>{of.choice.window},
                            kvpolicy::SharedBudget<>{of.long_range()}, of.decay(), scorers.front()};
        return keep<llama::CacheAttention<Policy, kvpolicy::bf16, kvpolicy::DualCache>,
                    llama::CacheAttention<Policy, float, kvpolicy::DualCache>>(of, policy,
                                                                               std::move(scorers));
    }
};

/// make(of, scorers) with the file's scorers, one per layer.
template <class Make>
std::unique_ptr<llama::KvAttention> with_scorers(const TrainedCache& of, const Make& make) {
    const TrainedScorers& trained = of.trained;
    check_fits(trained, of.config, "scorers");
    check_window(trained, of.choice.window);
    if (trained.has_own_numbers()) {
        llama::fail("scorers: policy {} is not allowed; it must be kvpop", trained.spec.policy);
    }
    if (const auto* mlp = std::get_if<ScorerStack<Mlp>>(&trained.stack)) {
        return make(of, mlp->scorers);
    }
    const auto& mlstm = std::get<ScorerStack<Mlstm>>(trained.stack);
    if (trained.spec.delay != 0) {
        return make(of, mlstm.scorers);
    }
    std::vector<ImmediateScorer<Mlstm>> scorers;
    for (const Mlstm& scorer : mlstm.scorers) {
        scorers.push_back({scorer, of.choice.window});
    }
    return make(of, std::move(scorers));
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
    return with_scorers({ctx, config, trained, choice, rows, match_state}, make_by_head{});
}

std::unique_ptr<llama::KvAttention> make_trained_shared(const kvpolicy::host& ctx,
                                                        const llama::Config& config,
                                                        const TrainedScorers& trained,
                                                        const PolicyChoice& choice, std::int32_t max_seq_len,
                                                        llama::DType rows) {
    return with_scorers({ctx, config, trained, choice, rows, false, max_seq_len}, make_shared_by_heads{});
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
