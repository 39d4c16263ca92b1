// The policies that the example programs offer by name.
#pragma once

#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/streaming_llm.hpp>

#include <llama/cache_attention.hpp>
#include <llama/error.hpp>

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <string_view>

namespace examples {

/// A scorer of one's own, whole: keys with a small norm tend to draw attention, so they are worth keeping
/// (the heuristic of Devoto et al., 2024). No training.
struct KeyNormScorer {
    static constexpr kvpolicy::part_kind kind = kvpolicy::part_kind::scorer;
    static constexpr kvpolicy::score_time when = kvpolicy::score_time::on_arrival;
    std::int32_t head_dim = 0;

    std::size_t scratch_size() const { return 0; }
    float score(std::int32_t, const float* key, const float*, float*) const {
        float sum = 0.0f;
        for (std::int32_t d = 0; d < head_dim; ++d) {
            sum += key[d] * key[d];
        }
        return -std::sqrt(sum);
    }
};

/// What a policy is built from. `budget` is the total B = s + w + k of entries per head.
struct PolicyChoice {
    std::string name = "streaming";
    std::int32_t budget = 0;
    std::int32_t sinks = 4;
    std::int32_t window = 64;
};

inline constexpr std::string_view policy_names = "dense, streaming, keynorm, given";

/// Makes the cache for a choice: "dense" (every key of up to `longest` tokens), "streaming" (StreamingLLM
/// with the whole budget, so `window` does not matter), "keynorm" (KVpop's rule on KeyNormScorer), "given"
/// (KVpop's rule on scores from the caller). Refuses an unknown name, and a budget under sinks + window
/// (streaming: under sinks + 1).
template <class T>
std::unique_ptr<llama::KvAttention> make_attention(const kvpolicy::host& ctx, const llama::Config& config,
                                                   const PolicyChoice& choice, std::int32_t max_seq_len) {
    using kvpolicy::Sink;
    using kvpolicy::TopKBudget;
    using kvpolicy::Window;
    if (choice.name == "dense") {
        using Dense = kvpolicy::Policy<Window<>>;
        return std::make_unique<llama::CacheAttention<Dense, T>>(ctx, config, Dense{Window<>{max_seq_len}});
    }
    if (choice.name == "streaming") {
        if (choice.budget <= choice.sinks) {
            llama::fail("budget: {} is not allowed; it must be more than the sinks, {}", choice.budget,
                        choice.sinks);
        }
        using Streaming = kvpolicy::StreamingLLM<>;
        return std::make_unique<llama::CacheAttention<Streaming, T>>(
            ctx, config, Streaming{Sink<>{choice.sinks}, Window<>{choice.budget - choice.sinks}});
    }
    if (choice.name != "keynorm" && choice.name != "given") {
        llama::fail("policy: {} is not allowed; it must be one of {}", choice.name, policy_names);
    }
    const std::int32_t k = kvpolicy::budget_for_total(choice.budget, choice.sinks, choice.window);
    if (choice.name == "keynorm") {
        using KeyNorm = kvpolicy::Policy<Sink<>, Window<>, TopKBudget<>, KeyNormScorer>;
        return std::make_unique<llama::CacheAttention<KeyNorm, T>>(
            ctx, config,
            KeyNorm{Sink<>{choice.sinks}, Window<>{choice.window}, TopKBudget<>{k},
                    KeyNormScorer{config.head_dim}});
    }
    using Given = kvpolicy::KVpop<>;
    return std::make_unique<llama::CacheAttention<Given, T>>(
        ctx, config,
        Given{Sink<>{choice.sinks}, Window<>{choice.window}, TopKBudget<>{k}, kvpolicy::Decay<1>{0.0f},
              kvpolicy::GivenScores{}});
}

/// Compiled once, by policies.cpp, for the programs that link example_apps.
extern template std::unique_ptr<llama::KvAttention> make_attention<kvpolicy::bf16>(const kvpolicy::host&,
                                                                                   const llama::Config&,
                                                                                   const PolicyChoice&,
                                                                                   std::int32_t);

}  // namespace examples
