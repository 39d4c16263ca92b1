// Caches' steps for bf16 and head_dims up to 128, as an engine's own translation unit would instantiate them.
#include <kvpolicy/caches/cuda/contiguous/dispatch_contiguous.cuh>
#include <kvpolicy/caches/cuda/decode/dispatch_append.cuh>
#include <kvpolicy/caches/cuda/decode/dispatch_decode.cuh>
#include <kvpolicy/caches/cuda/dispatch_export_heads.cuh>
#include <kvpolicy/caches/cuda/dispatch_transfer.cuh>
#include <kvpolicy/caches/cuda/observed/dispatch_observe.cuh>
#include <kvpolicy/caches/cuda/paged/dispatch_paged.cuh>
#include <kvpolicy/caches/cuda/prefill/dispatch_prefill.cuh>
#include <kvpolicy/h2o.hpp>
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
template void append<Dims>(const cuda&, const Ref&, const StepIO<bf16>&, workspace_view, const StepOptions&);
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

template void save_layer(const cuda&, const Ref&, std::int32_t, void*, std::size_t, const StepOptions&);
template void load_layer(const cuda&, const Ref&, std::int32_t, const void*, std::size_t, const StepOptions&);
using Chosen = DualRef<Policy<Sink<>, Window<>, TopKBudget<>, QuestPages<16>>, bf16>;
template void load_layer(const cuda&, const Chosen&, std::int32_t, const void*, std::size_t,
                         const StepOptions&);

using Gated = WGKV<256>;
using Dual = DualRef<Gated, bf16>;
template std::size_t step_workspace_bytes<Dims>(const cuda&, const Dual&, std::int32_t);
template void step<Dims>(const cuda&, const Dual&, const StepIO<bf16>&, workspace_view, const StepOptions&);
template void append<Dims>(const cuda&, const Dual&, const StepIO<bf16>&, workspace_view, const StepOptions&);
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

using Observed = FixedBudgetRef<H2O<>, bf16>;
template void step<head_dims<64>>(const cuda&, const Observed&, const StepIO<bf16>&, workspace_view,
                                  const StepOptions&);
template void append<Dims>(const cuda&, const Observed&, const StepIO<bf16>&, workspace_view,
                           const StepOptions&);
template void observe<Dims>(const cuda&, const Observed&, const Batch&, input_plane<float>, workspace_view,
                            const StepOptions&);

using Parts = Policy<Sink<>, Window<>, TopKBudget<>, Stride<>, QuestPages<16>, SnapKVEviction>;
template void step<head_dims<64>>(const cuda&, const DualRef<Parts, bf16>&, const StepIO<bf16>&,
                                  workspace_view, const StepOptions&);
template void DualCache<Parts, bf16>::evict<cuda_build>(const cuda&, const Batch&, workspace_view,
                                                        const EvictOptions&);
}  // namespace kvpolicy

// Kernels that these do not call: of scorers, of selections and evictions, of a prefill.
namespace kvpolicy::cuda_backend {
using Contiguous = contiguous_view<bf16>;
using Pages = paged_view<bf16>;
template __global__ void lay_out_pages_kernel<Given, bf16>(const FixedBudgetRef<Given, bf16>*);
template __global__ void paged_queries_kernel<Parts, bf16>(const DualRef<Parts, bf16>*, const sequence_moves,
                                                           std::int32_t, const std::int64_t*);
template __global__ void paged_sequence_bounds_kernel<Parts, bf16>(const DualRef<Parts, bf16>*, std::int32_t,
                                                                   const std::int64_t*, std::int32_t);
template __global__ void paged_prefill_pages_kernel<bf16>(const __grid_constant__ prefill_params<Pages>,
                                                          std::int32_t*);
template __global__ void paged_prefill_refuse_kernel<bf16>(const __grid_constant__ prefill_params<Pages>,
                                                           const std::int32_t*, const rows_view<bf16>,
                                                           const plane_view<float>);
template __global__ void decayed_update_kernel<top_k_update_params>(
    const __grid_constant__ top_k_update_params);
template __global__ void chunk_expiry_kernel<Pages>(const __grid_constant__ prefill_params<Pages>,
                                                    const ChunkExpiry);
template __global__ void prefill_bounds_kernel<Pages>(const __grid_constant__ prefill_params<Pages>);
template __global__ void prefill_queries_kernel<Pages>(const __grid_constant__ prefill_params<Pages>,
                                                       const rows_view<const bf16>, bool);

using Observed = observed_prefill_params<Pages>;
template __global__ void observed_tokens_kernel<std::int32_t>(const std::int32_t*, std::int32_t*,
                                                              std::int32_t, std::int32_t, std::int32_t);
template __global__ void observed_slots_after_kernel<Pages>(const __grid_constant__ prefill_params<Pages>);
template __global__ void observed_past_kernel<Pages>(const __grid_constant__ Observed);
template __global__ void observed_order_kernel<Pages>(const __grid_constant__ Observed);
template __global__ void observed_end_block_kernel<Pages>(const __grid_constant__ Observed);
template __global__ void observed_slots_kernel<Pages>(const __grid_constant__ Observed);
template __global__ void observed_recent_kernel<Pages>(const __grid_constant__ Observed);

template __global__ void decode_scorer_kernel<Contiguous, MlpScorer<128>>(
    const __grid_constant__ score_params<Contiguous, MlpScorer<128>>);
using Mlstm = mLSTMScorer<128, Hedgehog, ProjectedValues>;
template __global__ void mlstm_decode_cluster_kernel<cluster_sizes<2, 2>, Contiguous>(
    const __grid_constant__ score_params<Contiguous, Mlstm>);
template __global__ void mlstm_decode_batched_kernel<Contiguous>(
    const __grid_constant__ score_params<Contiguous, Mlstm>);
template __global__ void leaving_keys_kernel<Contiguous, Mlstm>(
    const __grid_constant__ leaving_keys_params<Contiguous, Mlstm>);
using CacheGate = gate_of<Given>;
template __global__ void late_prepare_kernel<Contiguous, 128>(
    const __grid_constant__ late_score_params<Contiguous>, const conv_weights, float, float*, bf16*);
template __global__ void cache_conv_kernel<Contiguous, CacheGate, conv_few_tiles<bf16>>(
    const __grid_constant__ late_score_params<Contiguous>, const CacheGate);
template __global__ void cache_conv_hopper_kernel<Contiguous, CacheGate, 128>(
    const __grid_constant__ late_score_params<Contiguous>, const CacheGate, const bf16*);
}  // namespace kvpolicy::cuda_backend
