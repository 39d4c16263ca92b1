// The dispatch of append: a step without attention.
#pragma once

#include <kvpolicy/caches/cuda/check_cache_call.cuh>
#include <kvpolicy/caches/cuda/contiguous/contiguous_params.cuh>
#include <kvpolicy/caches/cuda/decode/decode_plan.cuh>
#include <kvpolicy/caches/cuda/decode/kernel_append.cuh>
#include <kvpolicy/caches/cuda/paged/dispatch_paged_decode.cuh>
#include <kvpolicy/caches/cuda_calls.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// What a step of a cache is given, with the sizes of a block that appends.
template <class Cache>
struct append_params_of {
    using P = typename Cache::policy_type;
    using Rows = append_rows<typename Cache::value_type>;
    static constexpr bool paged = Cache::pooled || P::has_selection;
    using type = typename std::conditional_t<
        paged, std::type_identity<paged_params_of<Rows, P>>,
        std::type_identity<contiguous_params<Rows, gate_of<P>, asked_scorer<P>>>>::type;
};

/// One launch for a FixedBudgetCache, two for pages, after those of scores. No kernel of attention is
/// compiled for it. A policy that ranks keys by attention evicts by the masses that its keys have.
template <class Cache>
class append_plan : public decode_plan<append_plan<Cache>, Cache, typename append_params_of<Cache>::type> {
    using Params = typename append_params_of<Cache>::type;
    using base = decode_plan<append_plan, Cache, Params>;
    friend base;

  public:
    append_plan(const cuda& ctx, const device_scope& device, const Cache& cache, std::int32_t count)
        : base(ctx, device, cache, count) {}

    /// Takes the parts of the workspace; with null only measures.
    std::size_t lay_out(void* memory) {
        workspace_parts parts(memory);
        if constexpr (Params::View::paged) {
            call_.work.appended = parts.take<std::int32_t>(call_.batch.count);
            call_.work.missing = parts.take<std::int32_t>(heads());
        }
        this->lay_out_scores(parts);
        return parts.bytes();
    }

  private:
    using base::call_, base::ctx_, base::device_, base::heads;
    using Rows = typename Params::Rows;

    void run() {
        const std::int32_t* appended = nullptr;
        if constexpr (Params::View::paged) {
            appended = call_.work.appended;
            launch_early<paged_admit_kernel<Rows, typename Params::Gate, typename Params::Scorer,
                                            typename Params::View>>(
                "paged_admit_kernel", call_.batch.count == 0 ? 0 : 1, admit_threads, 0, device_, ctx_, 1,
                call_);
        }
        this->score_late(appended);
        if constexpr (Params::View::paged && scored_late<typename base::P>) {
            launch("append_kernel", append_kernel<Params>, heads(), Rows::threads, 0, ctx_, call_);
        } else {
            launch_early<append_kernel<Params>>("append_kernel", heads(), Rows::threads, 0, device_, ctx_, 1,
                                                call_);
        }
    }
};

/// Refuses what a call that appends without attention cannot take: io.q counts only for an eviction part,
/// io.out and io.lse not at all. `rows` as for check_cache_batch.
template <class Cache, class T>
void check_append_call(const Cache& cache, const Batch& batch, const CallSize& rows, const StepIO<T>& io) {
    check_cache_batch(cache, batch, rows);
    check_chunk(cache, batch, rows, io.k, io.v, detail::extras_of(io));
    if constexpr (Cache::policy_type::has_eviction) {
        checks::check_rows("q", io.q, rows.batch, cache.kv_heads * cache.group, rows.tokens,
                           cache.head_dim_qk);
        check_aligned("q", io.q);
    }
}

}  // namespace cuda_backend

template <class Dims, class P, Storage T, template <class, class> class Ref>
requires CacheRef<Ref<P, T>>
void append(const cuda& ctx, const Ref<P, T>& cache, const step_io<T>& io, workspace_view workspace,
            const StepOptions& options) {
    namespace cb = cuda_backend;
    detail::require(io.cu_seqlens == nullptr, "io.cu_seqlens", "given",
                    "null in append, whose entries have one token");
    const Batch batch = checks::batch_of(io, io.k, "k.batch");
    cb::check_append_call(cache, batch, {batch.count, 1}, io);
    const cb::device_scope device(ctx, cache.device);
    cb::append_plan<Ref<P, T>>(ctx, device, cache, batch.count).step(batch, io, workspace, options.status);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
