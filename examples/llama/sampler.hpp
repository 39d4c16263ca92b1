#pragma once
#include <cstdint>
#include <random>
#include <span>
#include <vector>

namespace llama {

struct SamplerOptions {
    double temperature = 0;  ///< 0 is greedy: the largest logit, the smaller id of equals
    int top_k = 0;           ///< only the k likeliest tokens; 0 is no limit
    double top_p = 1;        ///< only the likeliest tokens that make up p together; 1 is no limit
    std::uint64_t seed = 0;
};

/// Picks the next token. The same seed and logits give the same tokens everywhere: no distribution of the
/// standard library is used, whose results differ between implementations.
class Sampler {
  public:
    explicit Sampler(const SamplerOptions& options = {});
    std::int32_t operator()(std::span<const float> logits);

  private:
    SamplerOptions options_;
    std::mt19937_64 random_;
    std::vector<std::int32_t> order_;
    std::vector<double> weights_;
};

}  // namespace llama
