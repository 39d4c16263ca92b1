// A frozen model on a CUDA card, for its queries, keys and values.
#pragma once

#include "qkv.hpp"

namespace train {

/// Dense passes in fp32 on the present device. `model` is copied to it. Throws where there is none.
Observer device_observer(const llama::Model& model);

}  // namespace train
