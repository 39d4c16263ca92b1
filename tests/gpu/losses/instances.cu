// The losses' own kernels; what ranks the boundary loss's target is compiled with the masks' tests.
#include <kvpolicy/losses/cuda/dispatch_distill.cuh>
#include <kvpolicy/losses/cuda/dispatch_gates.cuh>
#include <kvpolicy/losses/cuda/kernel_boundary.cuh>
#include <kvpolicy/policies/window.hpp>

namespace kvpolicy::cuda_backend {
using Gate = detail::no_gate;
using Keep = detail::keep_set<>;
template __global__ void boundary_shares_kernel<Gate, Keep>(const boundary_params<Gate, Keep>);
template __global__ void boundary_begin_kernel<Gate, Keep>(const boundary_params<Gate, Keep>);
template __global__ void boundary_draw_kernel<Gate, Keep>(const boundary_params<Gate, Keep>, std::int32_t);
template __global__ void boundary_examples_kernel<Gate, Keep>(const boundary_params<Gate, Keep>);
template __global__ void boundary_gradient_kernel<Gate, Keep>(const boundary_params<Gate, Keep>);
template __global__ void boundary_scan_kernel<boundary_tile>(boundary_plane*, boundary_tile*, std::int32_t);
template __global__ void boundary_finish_kernel<Gate, Keep>(const boundary_params<Gate, Keep>);
template __global__ void boundary_value_kernel<BoundaryValue>(const boundary_plane*, std::int64_t,
                                                              std::int32_t, double*, BoundaryValue*);
}  // namespace kvpolicy::cuda_backend

namespace kvpolicy {
using Rules = Policy<Window<256>>;
template void GateSparsity::operator()<Rules, float>(const cuda&, const Rules&, plane_view<const float>,
                                                     const Sequences&, plane_view<float>, LossValue*,
                                                     workspace_view, const LossOptions&) const;
template void CompressionLoss::operator()<Rules, float>(const cuda&, const Rules&, plane_view<const float>,
                                                        const Sequences&, plane_view<float>, LossValue*,
                                                        workspace_view, const CompressionOptions&) const;
template void retention_counts(const cuda&, const Rules&, plane_view<const float>, const Sequences&, double*,
                               workspace_view, const GateOptions&);
template void LambdaController::update<cuda_build>(const cuda&) const;
template void straight_through_values(const cuda&, const Rules&, plane_view<const float>,
                                      rows_view<const bf16>, rows_view<const bf16>, const Sequences&,
                                      plane_view<float>, workspace_view, const GateOptions&);
template void TopDistillation::operator()<bf16>(const cuda&, rows_view<const bf16>, rows_view<const bf16>,
                                                const Sequences&, rows_view<bf16>, LossValue*, workspace_view,
                                                const LossOptions&) const;
template void CrossEntropy::operator()<bf16>(const cuda&, plane_view<const std::int32_t>,
                                             rows_view<const bf16>, const Sequences&, rows_view<bf16>,
                                             LossValue*, workspace_view, const LossOptions&) const;
template void L2Distillation::operator()<bf16>(const cuda&, rows_view<const bf16>, rows_view<const bf16>,
                                               const Sequences&, rows_view<bf16>, LossValue*, workspace_view,
                                               const LossOptions&) const;
}  // namespace kvpolicy
