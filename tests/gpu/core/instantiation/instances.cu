// The one translation unit that pays for the kernels.
#include <kvpolicy/cuda.cuh>

#include "policy.hpp"

template std::size_t kvpolicy::build_mask_workspace_bytes(const kvpolicy::cuda&, const EnginePolicy&,
                                                          const kvpolicy::Sequences&, std::int32_t,
                                                          const kvpolicy::MaskOptions&);
template void kvpolicy::build_mask(const kvpolicy::cuda&, const EnginePolicy&,
                                   kvpolicy::plane_view<const float>, const kvpolicy::Sequences&,
                                   kvpolicy::plane_view<kvpolicy::expiry_t>, kvpolicy::workspace_view,
                                   const kvpolicy::MaskOptions&);
