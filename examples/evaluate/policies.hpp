// The policies that evaluate compares: a table, one line each.
#pragma once

#include <kvpolicy/core/context.hpp>

#include "support/device_policies.hpp"
#include "support/trained.hpp"

#include <llama/cache_attention.hpp>

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace evaluate {

/// What a cache is made for.
struct Setting {
    const kvpolicy::host& ctx;
    const llama::Config& config;
    examples::PolicyChoice choice;  ///< budget, sinks, window
    std::int32_t max_seq_len = 0;   ///< tokens that will come
    /// For a policy with a beta: the oracle's scores [layers][kv_heads][longest] of this sequence
    /// (0 after its end).
    std::span<const float> oracle{};
    std::int32_t length = 0;  ///< of the sequence; longest less what is decoded after it
};

struct EvaluatedPolicy {
    std::string name;     ///< for --policies, CSV and JSON
    std::string label;    ///< for people
    bool bounded = true;  ///< takes a budget; dense does not
    /// Three quarters of a sequence come as a prompt in one call, the rest (where the retrieval queries are)
    /// token by token; otherwise all of it comes in chunks.
    bool prompted = false;
    float beta = 0.0f;  ///< scores are the oracle's with this beta; 0: no oracle
    const examples::TrainedScorers* scorers = nullptr;
    std::function<std::unique_ptr<llama::KvAttention>(const Setting&)> make;
    /// On a CUDA GPU; empty where there is none, or where this program was built without CUDA.
    std::function<examples::DeviceCache(const Setting&, const examples::DeviceSetting&)> make_on_device;
    const examples::TrainedScorers* gates = nullptr;  ///< of a file with numbers of its own
};

/// All of them, the trained ones by their files' names.
std::vector<EvaluatedPolicy> all_policies(std::span<const examples::TrainedScorers> scorers,
                                          std::span<const std::string> names);

}  // namespace evaluate
