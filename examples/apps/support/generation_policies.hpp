// The policies that `generate` offers by name: a table, so that another one is one more line.
#pragma once

#include <kvpolicy/core/context.hpp>

#include "device_policies.hpp"
#include "scorers.hpp"

#include <llama/cache_attention.hpp>
#include <llama/model.hpp>

#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

namespace examples {

/// The numbers of a policy; each policy uses some of them.
struct PolicyOptions {
    std::int32_t budget = 512;  ///< B, the most entries that a head may hold: sinks + window + k
    std::int32_t sinks = 4;
    std::int32_t window = 64;
    double density = 0.25;  ///< of the keys out of the window, the fraction that is kept
    double gamma = 1.0;     ///< by which scores decay with every token, in (0, 1]
    std::uint64_t seed = 1;
    std::string scorers;                     ///< file of trained scorers (docs/training/files.md)
    llama::DType rows = llama::DType::bf16;  ///< BF16 or F32: what the cache stores
};

/// Flags of PolicyOptions, to say which a policy uses.
enum policy_flag : unsigned {
    uses_budget = 1u << 0,
    uses_sinks = 1u << 1,
    uses_window = 1u << 2,
    uses_density = 1u << 3,
    uses_gamma = 1u << 4,
    uses_scorers = 1u << 5,
};

/// What a policy is made from, and what it refers to once it is made: it must outlive the attention.
struct PolicySetting {
    const kvpolicy::host& ctx;
    const llama::Model& model;
    std::span<const std::int32_t> prompt;  ///< thresholds are set so that `density` of its keys pass
    std::int32_t max_seq_len = 0;          ///< tokens of prompt and text together
    PolicyOptions options;
    std::vector<float> thresholds{};          ///< [layers, kv_heads], of a gate
    std::optional<TrainedScorers> scorers{};  ///< what options.scorers names
};

struct NamedPolicy {
    std::string_view name;
    std::string_view summary;
    unsigned uses;  ///< policy_flag
    std::unique_ptr<llama::KvAttention> (*make)(PolicySetting& setting);
    /// The same in a cache on a CUDA GPU; null where there is none, or where this program was
    /// built without CUDA.
    DeviceCache (*make_on_device)(PolicySetting& setting, const DeviceSetting& device) = nullptr;
};

std::span<const NamedPolicy> generation_policies();

/// The policy for a file of trained scorers: kvpop or gates; streaming without a file.
std::string_view policy_of_file(const std::string& scorers);

/// Names of those that run on a GPU, for messages.
std::vector<std::string_view> device_policy_names();

/// Refuses a name that is not in the table.
const NamedPolicy& generation_policy(std::string_view name);

}  // namespace examples
