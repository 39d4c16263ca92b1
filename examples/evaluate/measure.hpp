// What a policy at a budget does to a model: over held-out sequences, one at a time.
#pragma once

#include <kvpolicy/metrics/recall.hpp>

#include "policies.hpp"
#include "support/evaluation.hpp"
#include "support/oracle.hpp"

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace llama {
class DeviceEngine;
}

namespace evaluate {

inline constexpr std::size_t position_bins = 64;

/// One line of the table.
struct Result {
    const EvaluatedPolicy* policy = nullptr;
    std::int32_t budget = 0;  ///< entries per head; 0: no bound
    examples::Score score;
    double tokens_per_second = 0.0;
    double mib = 0.0;
    /// [layers, kv_heads]: rows held after the last token, summed over sequences.
    std::vector<double> rows;
    /// [layers, position_bins]: of a layer's keys in a part of the sequence, the share held after its last
    /// token; summed over sequences.
    std::vector<double> kept;
    /// Trained scorers, by the oracle's beta: [layers, kv_heads], summed over sequences. On the dense model's
    /// keys and values.
    std::map<float, std::vector<kvpolicy::Recall>> recall;
};

/// Runs policies on sequences and adds to their results; `targets` are the oracle's scores of a sequence, by
/// beta. `decoded` tokens after the first sequence measure the speed; 0 of them leave it out. With a `GPU`
/// the policies run there, and the oracle on the host.
class Bench {
  public:
    Bench(const kvpolicy::host& ctx, llama::Engine& engine, const examples::HeldOut& data, std::int32_t chunk,
          std::int32_t sinks, std::int32_t window, std::int32_t decoded, llama::DeviceEngine* gpu = nullptr)
        : ctx_(ctx),
          engine_(engine),
          data_(data),
          chunk_(chunk),
          sinks_(sinks),
          window_(window),
          decoded_(decoded),
          gpu_(gpu) {}

    /// A dense pass; returns what it saw.
    examples::Oracle observe(std::size_t sequence);
    /// Scores of the oracle [layers][kv_heads][length].
    std::vector<float> targets(examples::Oracle& oracle, float beta) const;
    void run(std::size_t sequence, const std::map<float, std::vector<float>>& targets, Result& result);
    /// Of a trained scorer, against the oracle with each beta.
    void oracle_recall(const examples::Oracle& oracle, const std::map<float, std::vector<float>>& targets,
                       Result& result) const;

  private:
    template <class AttentionParams>
    void add(const AttentionParams& attention, Result& result) const;
    void run_on_gpu(std::size_t sequence, const Setting& setting, Result& result);

    const kvpolicy::host& ctx_;
    llama::Engine& engine_;
    const examples::HeldOut& data_;
    std::int32_t chunk_, sinks_, window_, decoded_;
    llama::DeviceEngine* gpu_;  // runs the policies, if it is there
};

}  // namespace evaluate
