// The kernels of attention for bf16 and head_dims up to 128, as an engine's own translation unit would instantiate them.
#include <kvpolicy/cuda.cuh>

namespace kvpolicy {
using Dims = head_dims<64, 128>;
template std::size_t attend_workspace_bytes<bf16, Dims>(const cuda&, const Attention&, rows_view<const bf16>,
                                                        const keys<bf16>&, const Sequences&,
                                                        const AttendOptions&);
template void attend<bf16, Dims>(const cuda&, const Attention&, rows_view<const bf16>, const keys<bf16>&,
                                 const Sequences&, rows_view<bf16>, plane_view<float>, workspace_view,
                                 const AttendOptions&);
template void attend<bf16, Dims>(const cuda&, const Attention&, rows_view<const bf16>, const keys<bf16>&,
                                 const keys<bf16>&, const Sequences&, rows_view<bf16>, plane_view<float>,
                                 workspace_view, const AttendOptions&);
template std::size_t attend_backward_workspace_bytes<bf16, Dims>(const cuda&, const Attention&,
                                                                 rows_view<const bf16>, const keys<bf16>&,
                                                                 const Sequences&, const BackwardOptions&);
template void attend_backward<bf16, Dims>(const cuda&, const Attention&, rows_view<const bf16>,
                                          const keys<bf16>&, const Sequences&, const AttendGradient<bf16>&,
                                          const AttendGradients<bf16>&, workspace_view,
                                          const BackwardOptions&);
template std::size_t future_mass_workspace_bytes<bf16>(const cuda&, rows_view<const bf16>,
                                                       rows_view<const bf16>);
template void causal_lse<bf16, Dims>(const cuda&, const Attention&, rows_view<const bf16>,
                                     rows_view<const bf16>, const Sequences&, plane_view<float>,
                                     workspace_view);
template void future_mass<bf16, Dims>(const cuda&, const Attention&, rows_view<const bf16>,
                                      rows_view<const bf16>, plane_view<const float>, const Sequences&,
                                      const FutureMassOptions&, plane_view<float>, workspace_view);
}  // namespace kvpolicy
