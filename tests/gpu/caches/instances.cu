// Caches' steps for bf16 and head_dims up to 128, as an engine's own translation unit would instantiate them.
#include <kvpolicy/caches/cuda/contiguous/dispatch_contiguous.cuh>
#include <kvpolicy/caches/cuda/decode/dispatch_decode.cuh>
#include <kvpolicy/caches/cuda/dispatch_export_heads.cuh>
#include <kvpolicy/caches/cuda/paged/dispatch_paged.cuh>
#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/policies/eviction.hpp>
#include <kvpolicy/policies/selection.hpp>
#include <kvpolicy/policies/stride.hpp>
#include <kvpolicy/wgkv.hpp>

namespace kvpolicy {
using Dims = head_dims<64, 128>;
using Given = Policy<Sink<>, Window<>, TopKBudget<>>;
using Ref = FixedBudgetRef<Given, bf16>;
template std::size_t step_workspace_bytes<Dims>(const cuda&, const Ref&, std::int32_t);
template void step<Dims>(const cuda&, const Ref&, const StepIO<bf16>&, workspace_view, const StepOptions&);
template void attend<Dims>(const cuda&, const Ref&, const StepIO<bf16>&, workspace_view, const StepOptions&);
template void export_heads<Dims>(const cuda&, const Ref&, const Batch&, const HeadPages&, workspace_view,
                                 const StepOptions&);

using Fixed = CacheOwner<FixedBudgetCache<Given, bf16>, Given, bf16>;
template void Fixed::bind<cuda_build>(const cuda&, void*, std::size_t);
template void Fixed::clear<cuda_build>(const cuda&, std::int32_t);
template void Fixed::advance<cuda_build>(const cuda&, const Batch&, const StepOptions&);
template void Fixed::fork<cuda_build>(const cuda&, std::int32_t, std::int32_t, const StepOptions&);
template void Fixed::reorder<cuda_build>(const cuda&, const std::int32_t*, std::int32_t, const StepOptions&);
template std::size_t Fixed::snapshot<cuda_build>(const cuda&, std::int32_t, void*, std::size_t) const;
template void Fixed::restore<cuda_build>(const cuda&, std::int32_t, const void*, std::size_t,
                                         const StepOptions&);

using Gated = WGKV<256>;
using Dual = DualRef<Gated, bf16>;
template std::size_t step_workspace_bytes<Dims>(const cuda&, const Dual&, std::int32_t);
template void step<Dims>(const cuda&, const Dual&, const StepIO<bf16>&, workspace_view, const StepOptions&);
template void attend<Dims>(const cuda&, const Dual&, const StepIO<bf16>&, workspace_view, const StepOptions&);
template void export_heads<Dims>(const cuda&, const Dual&, const Batch&, const HeadPages&, workspace_view,
                                 const StepOptions&);

using Paged = CacheOwner<DualCache<Gated, bf16>, Gated, bf16>;
template void Paged::bind<cuda_build>(const cuda&, void*, std::size_t);
template void DualCache<Gated, bf16>::add_slab<cuda_build>(const cuda&, void*, std::size_t);
template std::int64_t DualCache<Gated, bf16>::free_pages<cuda_build>(const cuda&) const;
template std::int64_t DualCache<Gated, bf16>::reserve<cuda_build>(const cuda&, const Batch&);
template void Paged::clear<cuda_build>(const cuda&, std::int32_t);
template void Paged::advance<cuda_build>(const cuda&, const Batch&, const StepOptions&);
template void Paged::fork<cuda_build>(const cuda&, std::int32_t, std::int32_t, const StepOptions&);
template void Paged::reorder<cuda_build>(const cuda&, const std::int32_t*, std::int32_t, const StepOptions&);
template std::size_t Paged::snapshot_bytes<cuda_build>(const cuda&, std::int32_t) const;
template std::size_t Paged::snapshot<cuda_build>(const cuda&, std::int32_t, void*, std::size_t) const;
template void Paged::restore<cuda_build>(const cuda&, std::int32_t, const void*, std::size_t,
                                         const StepOptions&);

using Parts = Policy<Sink<>, Window<>, TopKBudget<>, Stride<>, QuestPages<16>, SnapKVEviction>;
template void step<head_dims<64>>(const cuda&, const DualRef<Parts, bf16>&, const StepIO<bf16>&,
                                  workspace_view, const StepOptions&);
template void DualCache<Parts, bf16>::evict<cuda_build>(const cuda&, const Batch&, workspace_view,
                                                        const EvictOptions&);
}  // namespace kvpolicy
