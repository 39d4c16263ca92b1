// Trainer on a CUDA device: the same steps, sequences, draws, files and numbers, to rounding.
#pragma once

#include "device_steps.hpp"
#include "trainer.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace train {

template <class S>
class DeviceTrainer final : public Trainer<S> {
  public:
    /// As Trainer; `source` and `held_out` may leave out targets.
    DeviceTrainer(const kvpolicy::host& ctx, const Options& options, QkvSource& source, QkvSource* held_out);

    void step() override;
    bool done() const override { return false; }
    LossSums take() override;
    std::vector<HeldOutNumbers> evaluate() override;
    /// Brings all training sequences to the GPU.
    void hold_all();

  protected:
    void pull() override;
    void push() override;
    std::vector<std::vector<float>> scores_of(std::size_t index) override;

  private:
    std::unique_ptr<DeviceSteps> steps_;
};

}  // namespace train
