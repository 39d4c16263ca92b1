// A cache's steps for bf16 and head_dims up to 128, as an engine's own translation unit would instantiate them.
#include <kvpolicy/cuda/cache_owner.cuh>
#include <kvpolicy/cuda/cache_step.cuh>
#include <kvpolicy/kvpop.hpp>

namespace kvpolicy {
using Dims = head_dims<64, 128>;
using Given = Policy<Sink<>, Window<>, TopKBudget<>>;
using Ref = FixedBudgetRef<Given, bf16>;
template std::size_t step_workspace_bytes<Dims>(const cuda&, const Ref&, std::int32_t);
template void step<Dims>(const cuda&, const Ref&, const Batch&, rows_view<const bf16>, rows_view<const bf16>,
                         rows_view<const bf16>, rows_view<bf16>, workspace_view, std::uint32_t*,
                         const CacheExtras&);
template void attend<Dims>(const cuda&, const Ref&, const Batch&, rows_view<const bf16>, rows_view<bf16>,
                           plane_view<float>, workspace_view, std::uint32_t*);
template void export_heads(const cuda&, const Ref&, const Batch&, const HeadPages&);

template void FixedBudgetCache<Given, bf16>::bind<cuda_build>(const cuda&, void*, std::size_t);
template void FixedBudgetCache<Given, bf16>::clear<cuda_build>(const cuda&, std::int32_t);
template void FixedBudgetCache<Given, bf16>::advance<cuda_build>(const cuda&, const Batch&, std::uint32_t*);
template void FixedBudgetCache<Given, bf16>::fork<cuda_build>(const cuda&, std::int32_t, std::int32_t);
template void FixedBudgetCache<Given, bf16>::reorder<cuda_build>(const cuda&, const std::int32_t*,
                                                                 std::int32_t, std::uint32_t*);
template std::size_t FixedBudgetCache<Given, bf16>::snapshot<cuda_build>(const cuda&, std::int32_t, void*,
                                                                         std::size_t) const;
template void FixedBudgetCache<Given, bf16>::restore<cuda_build>(const cuda&, std::int32_t, const void*,
                                                                 std::size_t);
}  // namespace kvpolicy
