// The same under nvcc, where kvpop.hpp also declares the calls on a cuda context. Runs without a GPU.
#include "host.cpp"

#include <type_traits>
#include <utility>

__global__ void widen(const kvp::bf16* from, float* to) {
    to[threadIdx.x] = static_cast<float>(from[threadIdx.x]);
}

static_assert(
    std::is_same_v<decltype(kvp::build_mask_workspace_bytes(std::declval<kvp::cuda>(), std::declval<Policy>(),
                                                            std::declval<kvp::Sequences>(), 1)),
                   std::size_t>,
    "the calls on CUDA are declared");
