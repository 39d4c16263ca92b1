// Caches on a CUDA GPU for the policies that the example programs offer by name. Plain C++: the kernels are
// in device_policies.cu.
#pragma once

#include "scorers.hpp"

#include <llama/config.hpp>
#include <llama/cuda/attention.hpp>
#include <llama/safetensors.hpp>

#include <cstdint>
#include <memory>
#include <span>
#include <vector>

struct CUstream_st;

namespace examples {

/// What a cache on a GPU is made for.
struct DeviceSetting {
    CUstream_st* stream = nullptr;
    const llama::Config& config;  ///< must outlive the cache
    llama::DType rows = llama::DType::bf16;
    int chunk = 512;  ///< the most tokens of a call
};

struct DeviceBudget {
    std::int32_t sinks = 0, window = 1, keys = 0;  ///< s, w and k
};

using DeviceCache = std::unique_ptr<llama::DeviceAttention>;

/// Sinks and a window; `keys` does not matter.
DeviceCache make_device_window(const DeviceSetting& setting, const DeviceBudget& budget);

/// KVpop's rule on the keys' norms (KeyNormScorer), or on RandomScorer's numbers.
DeviceCache make_device_keynorm(const DeviceSetting& setting, const DeviceBudget& budget, float log_gamma);
DeviceCache make_device_random(const DeviceSetting& setting, const DeviceBudget& budget, std::uint64_t seed);

/// KVpop's rule on scores [layers, kv_heads, longest] of the caller, which are copied to the GPU; what comes
/// after `longest` tokens has a score of 0.
DeviceCache make_device_given(const DeviceSetting& setting, const DeviceBudget& budget,
                              std::span<const float> scores, std::int64_t max_seq_len);

/// LTE's rule on the keys' norms, in a cache of the whole budget. `thresholds` [layers, kv_heads]
/// must outlive it.
DeviceCache make_device_capped(const DeviceSetting& setting, const DeviceBudget& budget,
                               const std::vector<float>& thresholds);

/// KVpop's rule on trained scorers, which must outlive the cache; their weights are copied to the GPU.
/// Refuses an mLSTM that is read on arrival.
DeviceCache make_device_trained(const DeviceSetting& setting, const DeviceBudget& budget,
                                const TrainedScorers& trained);

/// A file of gates (SP-KV, WG-KV, LTE, DMS) in a DualCache with the pages of `max_seq_len` tokens, or of
/// StreamLLM+, with the file's own numbers; `trained` must outlive the cache. bytes() are those of pages in
/// use. Refuses rows other than BF16 for gates.
DeviceCache make_device_gates(const DeviceSetting& setting, const TrainedScorers& trained,
                              std::int64_t max_seq_len);

}  // namespace examples
