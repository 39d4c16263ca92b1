// The boundary loss's own kernels; what ranks its target is compiled with the masks' tests.
#include <kvpolicy/cuda/kernels/boundary.cuh>

namespace kvpolicy::cuda_backend {
using Gate = detail::no_gate;
using Keep = detail::keep_set<>;
template __global__ void boundary_examples_kernel<Gate, Keep>(const boundary_problem<Gate, Keep>);
template __global__ void boundary_gradient_kernel<Gate, Keep>(const boundary_problem<Gate, Keep>);
template __global__ void boundary_value_kernel<BoundaryValue>(const boundary_plane*, std::int64_t,
                                                              std::int32_t, double*, BoundaryValue*);
}  // namespace kvpolicy::cuda_backend
