// SP-KV's composition in a DualCache on a GPU, over the engine's attention interface.
#pragma once

#include "../../examples/predictors.hpp"
#include "support/device_policies.hpp"

#include <cstdint>

namespace test {

inline constexpr std::int32_t predictor_window = 16;

/// Rows of fp32. The weights of `predictors` are copied to the GPU.
examples::DeviceCache make_device_predicted(const examples::DeviceSetting& setting,
                                            const Predictors& predictors, std::int64_t max_seq_len);

}  // namespace test
