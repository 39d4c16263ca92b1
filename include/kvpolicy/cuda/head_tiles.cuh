// From a call's head_dim to the kernel that was compiled for it.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/head_dims.hpp>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The smallest tile that holds a head_dim; 0 where none does.
template <int... Dims>
int fitting_tile(head_dims<Dims...>, std::int32_t dim) {
    int best = 0;
    ((best = Dims >= dim && (best == 0 || Dims < best) ? Dims : best), ...);
    return best;
}

/// Calls body(std::integral_constant<int, Dim>{}) for the Dim of the list that `tile` is.
template <int... Dims, class Body>
void with_tile(head_dims<Dims...>, int tile, const Body& body) {
    ((tile == Dims ? body(std::integral_constant<int, Dims>{}) : void()), ...);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
