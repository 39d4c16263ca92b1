// A frozen model on a CUDA GPU, for its queries, keys and values.
#pragma once

#include "qkv.hpp"

namespace train {

/// Dense passes on the present device: in fp32, but for attention, which reads and writes `rows`, f32 or
/// bf16, the faster. `model` is copied to it. Throws where there is none.
Observer device_observer(const llama::Model& model, llama::DType rows = llama::DType::f32);

}  // namespace train
