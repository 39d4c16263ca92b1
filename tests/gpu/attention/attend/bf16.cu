#include "device.cuh"

template test::AttendResult<kvpolicy::bf16> test::attend_on_device(const AttendCase&,
                                                                   const AttendTensors<kvpolicy::bf16>&,
                                                                   const AttendWay&, int);

// What calls.cu calls: it sees the declarations alone.
namespace kvpolicy {
template std::size_t attend_workspace_bytes<bf16>(const cuda&, const AttentionParams&, rows_view<const bf16>,
                                                  const kv_view<bf16>&, const Sequences&,
                                                  const AttendOptions&);
template std::size_t attend_workspace_bytes<bf16>(const cuda&, const AttentionParams&, rows_view<const bf16>,
                                                  const kv_view<bf16>&, const kv_view<bf16>&,
                                                  const Sequences&, const AttendOptions&);
template void attend<bf16>(const cuda&, const AttentionParams&, rows_view<const bf16>, const kv_view<bf16>&,
                           const Sequences&, rows_view<bf16>, plane_view<float>, workspace_view,
                           const AttendOptions&);
template void attend<bf16>(const cuda&, const AttentionParams&, rows_view<const bf16>, const kv_view<bf16>&,
                           const kv_view<bf16>&, const Sequences&, rows_view<bf16>, plane_view<float>,
                           workspace_view, const AttendOptions&);
}  // namespace kvpolicy
