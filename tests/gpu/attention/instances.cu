// The kernels of attention for bf16 and head_dims up to 128, as an engine's own translation unit would
// instantiate them. Chunks into a cache are here too, since they call the same kernels.
#include <kvpolicy/cuda.cuh>
#include <kvpolicy/kvpop.hpp>

namespace kvpolicy {
using Dims = head_dims<64, 128>;
using Cache = FixedBudgetRef<Policy<Sink<>, Window<>, TopKBudget<>>, bf16>;
template std::size_t workspace_bytes<Dims>(const cuda&, const Cache&, const CallSize&);
template void prefill<Dims>(const cuda&, const Cache&, const StepIO<bf16>&, workspace_view,
                            const StepOptions&);
template void append_draft<Dims>(const cuda&, const Cache&, const StepIO<bf16>&, workspace_view,
                                 const StepOptions&);
template void accept<Dims>(const cuda&, const Cache&, const Batch&, workspace_view, const StepOptions&);
template std::size_t attend_workspace_bytes<bf16, Dims>(const cuda&, const AttentionParams&,
                                                        rows_view<const bf16>, const kv_view<bf16>&,
                                                        const Sequences&, const AttendOptions&);
template void attend<bf16, Dims>(const cuda&, const AttentionParams&, rows_view<const bf16>,
                                 const kv_view<bf16>&, const Sequences&, rows_view<bf16>, plane_view<float>,
                                 workspace_view, const AttendOptions&);
template void attend<bf16, Dims>(const cuda&, const AttentionParams&, rows_view<const bf16>,
                                 const kv_view<bf16>&, const kv_view<bf16>&, const Sequences&,
                                 rows_view<bf16>, plane_view<float>, workspace_view, const AttendOptions&);
template std::size_t attend_backward_workspace_bytes<bf16, Dims>(const cuda&, const AttentionParams&,
                                                                 rows_view<const bf16>, const kv_view<bf16>&,
                                                                 const Sequences&, const BackwardOptions&);
template void attend_backward<bf16, Dims>(const cuda&, const AttentionParams&, rows_view<const bf16>,
                                          const kv_view<bf16>&, const Sequences&, const SavedForward<bf16>&,
                                          const AttentionGrads<bf16>&, workspace_view,
                                          const BackwardOptions&);
template std::size_t future_mass_workspace_bytes<bf16>(const cuda&, rows_view<const bf16>,
                                                       rows_view<const bf16>);
template void causal_lse<bf16, Dims>(const cuda&, const AttentionParams&, rows_view<const bf16>,
                                     rows_view<const bf16>, const Sequences&, plane_view<float>,
                                     workspace_view, const CausalLseOptions&);
template void future_mass<bf16, Dims>(const cuda&, const AttentionParams&, rows_view<const bf16>,
                                      rows_view<const bf16>, plane_view<const float>, const Sequences&,
                                      plane_view<float>, workspace_view, const FutureMassOptions&);
}  // namespace kvpolicy

// Kernels that these do not call: of other types than bf16 and fp16, of head_dim 256.
namespace kvpolicy::cuda_backend {
template __global__ void backward_plain_queries_kernel<float>(const backward_params<float>);
template __global__ void backward_plain_keys_kernel<float>(const backward_params<float>, std::int32_t);
template __global__ void backward_plain_zero_kernel<float>(const backward_params<float>);
template __global__ void backward_hopper_wide_kernel<bf16, false, false>(
    const __grid_constant__ backward_params<bf16>, std::int32_t, std::int32_t, std::int32_t);
using Halves = half_mass_tile<bf16, 64>;
template __global__ void counted_lse_kernel<Halves>(const __grid_constant__ received_mass_params<bf16>,
                                                    std::int32_t);
template __global__ void received_mass_kernel<Halves, true>(
    const __grid_constant__ received_mass_params<bf16>, std::int32_t);
template __global__ void received_mass_kernel<plain_mass_tile<float>, false>(
    const __grid_constant__ received_mass_params<float>, std::int32_t);
template __global__ void dense_mass_kernel<float>(const plane_view<float>, std::int32_t, const std::int32_t*);
template __global__ void observed_begin_kernel<observed_list_params>(
    const __grid_constant__ observed_list_params);
template __global__ void observed_end_kernel<observed_list_params>(
    const __grid_constant__ observed_list_params);
template __global__ void layer_mass_kernel<float>(float*, std::int64_t, std::int32_t, std::int32_t,
                                                  const std::int32_t*, const std::int32_t*);
}  // namespace kvpolicy::cuda_backend
