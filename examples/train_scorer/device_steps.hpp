// The GPU's side of train_scorer. Plain C++: who calls it needs no CUDA compiler;
// device_steps.cuh has the bodies.
//
// The scorers of all layers are one scorer of layers x heads heads, so that a step is a dozen of calls
// whatever the number of layers. Everything is enqueued on one stream: keys, values, targets, weights,
// gradients, moments, decays and sums stay on the GPU, and what a call says it returns is all that the
// host ever reads.
#pragma once

#include <kvpolicy/losses/boundary.hpp>

#include "numbers.hpp"
#include "qkv.hpp"
#include "support/scorers.hpp"
#include "train/adamw.hpp"

#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <vector>

namespace train {

/// What a whole run has in common.
struct DeviceJob {
    examples::ScorerSpec spec;
    TargetOptions target;
    kvpolicy::BoundaryLoss loss;  ///< a step's, without a seed; held-out numbers take all queries
    AdamWOptions optimizer;
    bool decay = true;
    double decay_rate = 1.0;  ///< alpha's factor of a step's rate
    bool fp32_rows = false;
};

/// Sequences of one kind, by number.
using ExampleGetter = std::function<const Example&(std::size_t)>;

/// One sequence of a step.
struct DeviceVisit {
    std::size_t index;
    std::uint64_t seed;
};

class DeviceSteps {
  public:
    virtual ~DeviceSteps() = default;

    /// Parameters, moments and the number of steps from an optimizer with one array for each layer's
    /// parameter, layer by layer, and alpha last where decay is learned; and back.
    virtual void push(const AdamW& from) = 0;
    virtual void pull(AdamW& to) = 0;

    /// Brings a training sequence to the GPU, unless it is there, and computes its target where the example
    /// has none. What does not fit displaces the others.
    virtual void hold(std::size_t index) = 0;
    /// Enqueues step `number`. `budget`: entries per head; each visit is brought to the GPU first.
    virtual void step(std::span<const DeviceVisit> visits, std::int32_t budget, double rate,
                      std::int64_t number) = 0;
    /// Sums over the steps since the last call; waits for them. `norm` is the last step's, `refused` the
    /// first step whose gradient was not finite (0: none), from which on nothing was learned.
    virtual LossSums take(double& norm, std::int64_t& refused) = 0;

    /// Held-out numbers over `count` sequences at each budget.
    virtual std::vector<HeldOutNumbers> evaluate(std::size_t count,
                                                 std::span<const std::int32_t> budgets) = 0;
    /// [layers][heads, length] of a training sequence.
    virtual std::vector<std::vector<float>> scores(std::size_t index) = 0;
};

/// Throws std::runtime_error where there is no device, or a CUDA call fails.
std::unique_ptr<DeviceSteps> device_mlp_steps(const DeviceJob& job, ExampleGetter training,
                                              ExampleGetter held_out);
std::unique_ptr<DeviceSteps> device_mlstm_steps(const DeviceJob& job, ExampleGetter training,
                                                ExampleGetter held_out);

}  // namespace train
