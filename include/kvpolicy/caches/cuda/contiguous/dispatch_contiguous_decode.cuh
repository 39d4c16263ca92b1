// The dispatch of a cache's step and of attention over it: sizes, workspace, launches.
#pragma once

#include <kvpolicy/caches/cuda/check_cache_call.cuh>
#include <kvpolicy/caches/cuda/contiguous/kernel_contiguous_decode.cuh>
#include <kvpolicy/caches/cuda/paged/dispatch_paged_decode.cuh>
#include <kvpolicy/caches/cuda/scoring/kernel_cache_score.cuh>
#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Into how many blocks the `rows` rows of each of `heads` heads are cut: no more than keep the SMs busy,
/// since what blocks find has to be merged, and none of few rows. (Measured on an H100 at batch 1, 8 and 32:
/// docs/performance.md.)
inline std::int32_t decode_splits(std::int64_t heads, std::int64_t rows, std::int64_t num_sms) {
    constexpr std::int64_t least_rows = 512;
    const std::int64_t wanted = (num_sms * 7 / 5 + heads - 1) / heads;
    const std::int64_t useful = std::clamp<std::int64_t>(rows / least_rows, 1, max_splits);
    return static_cast<std::int32_t>(std::clamp<std::int64_t>(wanted, 1, useful));
}

/// A step, or attention alone, with kernels of these sizes.
template <class Rows, class P>
class contiguous_decode_plan {
    using T = typename Rows::T;
    using Gate = typename P::gate_type;
    using Scorer = asked_scorer<P>;
    using Launch = contiguous_params<Rows, Gate, Scorer>;
    static constexpr auto kernel = contiguous_decode_kernel<Rows, Gate, Scorer>;

  public:
    contiguous_decode_plan(const cuda& ctx, const device_scope& device, const FixedBudgetRef<P, T>& cache,
                           std::int32_t count)
        : ctx_(ctx),
          device_(device),
          ref_(cache),
          call_{{.cache = contiguous_view<T>(cache),
                 .gate = cache.gate,
                 .scorer = scorer_of<P>(cache.scorer)}} {
        call_.batch.count = count;
        call_.width = Rows::width(cache.head_dim_vo);
        call_.logits = logits_of<typename Rows::Compute>(cache.attention, cache.head_dim_qk);
        call_.parts = (cache.group + Rows::heads - 1) / Rows::heads;
        shared_ = static_cast<std::size_t>(Rows::warps) * Rows::shared_bytes(cache.head_dim_vo);
        const std::int64_t num_sms = device.attribute(cudaDevAttrMultiProcessorCount);
        const std::int64_t alone = std::max<std::int64_t>(heads() * call_.parts, 1);
        call_.splits = decode_splits(alone, cache.max_capacity, num_sms);
        call_.leader_blocks = alone * (call_.splits + 1) <= 2 * num_sms ? 1 : 0;
        cluster_if_few(alone, cache.max_capacity, num_sms);
        // Refused here, before the scorer's launch has moved its states.
        allow_shared("contiguous_decode_kernel", reinterpret_cast<const void*>(kernel), shared_);
    }

    /// Takes the parts of the workspace; with null only measures.
    std::size_t lay_out(void* memory) {
        workspace_parts parts(memory);
        call_.notes = parts.take<decode_note>(heads());
        computed_ = parts.take<float>(scored_before<Scorer> ? heads() : 0);
        const std::int64_t states =
            call_.clustered || call_.blocks() * call_.parts == 1 ? 0 : heads() * call_.parts * call_.blocks();
        call_.states =
            parts.take<typename Rows::Compute>(states * stream_state<Rows::heads>::size(call_.width));
        arriving_.lay_out(ctx_, ref_.scorer, call_.batch.count, call_.cache.kv_heads, 1, parts);
        if constexpr (scored_late<P>) {
            late_.emplace(device_, ref_.scorer, call_.cache, call_.gate, call_.batch.count, 1,
                          ref_.max_capacity, parts);
        }
        return parts.bytes();
    }

    void step(const Batch& batch, const rows_view<const T>& q, const rows_view<const T>& k,
              const rows_view<const T>& v, const rows_view<T>& out, workspace_view workspace,
              std::uint32_t* status, const detail::step_extras& extras) {
        begin(batch, q, out, extras.lse, workspace, status);
        call_.k = k;
        call_.v = v;
        call_.scores = arriving_.of(ctx_, ref_.scorer, batch, extras);
        if constexpr (scored_before<Scorer>) {
            call_.computed = computed_;
            launch_scores(ctx_, score_params<contiguous_view<T>, Scorer>{.cache = call_.cache,
                                                                         .batch = batch,
                                                                         .tokens = {.k = k, .v = v},
                                                                         .scores = computed_,
                                                                         .scorer = call_.scorer,
                                                                         .beside = true});
        }
        if constexpr (scored_late<P>) {
            late_->begin(ctx_, device_, batch, {.k = k, .v = v}, status);
            late_->in_rows(ctx_, device_, batch);
        }
        run();
    }

    void attend(const Batch& batch, const rows_view<const T>& q, const rows_view<T>& out,
                const plane_view<float>& lse, workspace_view workspace, std::uint32_t* status) {
        begin(batch, q, out, lse, workspace, status);
        call_.writes = false;
        run();
    }

  private:
    [[nodiscard]] std::int64_t heads() const {
        return std::int64_t{call_.batch.count} * call_.cache.kv_heads;
    }
    void begin(const Batch& batch, const rows_view<const T>& q, const rows_view<T>& out,
               const plane_view<float>& lse, workspace_view workspace, std::uint32_t* status) {
        check_workspace(workspace, lay_out(nullptr));
        lay_out(workspace.data);
        call_.batch = batch;
        call_.q = q;
        call_.out = out;
        call_.lse = lse;
        call_.status = status;
    }
    void run() const {
        const std::int64_t blocks = heads() * call_.parts * call_.blocks();
        const unsigned cluster = call_.clustered ? static_cast<unsigned>(call_.blocks()) : 1;
        if (call_.computed != nullptr) {
            share_sms<kernel>(device_);  // rows are streamed while they are scored
        }
        launch_early<kernel>("contiguous_decode_kernel", blocks, Rows::threads, shared_, device_, ctx_,
                             cluster, call_);
    }

    /// Few heads are shared by the blocks of a cluster each, which merge what they found without a way
    /// through memory. With more heads clusters wait for SMs, and cost more than that.
    void cluster_if_few(std::int64_t alone, std::int64_t rows, std::int64_t num_sms) {
        if constexpr (Rows::clusters) {
            constexpr std::int64_t most = 8, least_rows = 256, heads_of_few = 4;
            const std::int64_t splits = std::clamp<std::int64_t>(rows / least_rows, 1, most);
            if (call_.parts != 1 || alone * heads_of_few > num_sms) {
                return;
            }
            // The leader block has the states of all.
            const std::size_t shared =
                shared_ +
                static_cast<std::size_t>((most + 1) * stream_state<Rows::heads>::size(call_.width)) *
                    sizeof(typename Rows::Compute);
            const std::int64_t cluster =
                largest_cluster<kernel>(device_, static_cast<int>(most) + 1, Rows::threads, shared);
            if (cluster > 1) {
                shared_ = shared;
                call_.splits = static_cast<std::int32_t>(std::min(splits, cluster - 1));
                call_.leader_blocks = 1;
                call_.clustered = true;
            }
        }
    }

    const cuda& ctx_;
    const device_scope& device_;
    const FixedBudgetRef<P, T>& ref_;
    Launch call_;
    std::optional<late_scores<contiguous_view<T>, Gate>> late_;
    arriving_scores<P> arriving_;
    float* computed_ = nullptr;
    std::size_t shared_ = 0;
};

/// Calls body(call) with the contiguous_decode_plan that serves the cache.
template <class Dims, class P, class T, class Body>
void with_decode_plan(const cuda& ctx, const FixedBudgetRef<P, T>& cache, std::int32_t count,
                      const Body& body) {
    require_device_policy<P>();
    const device_scope device(ctx, cache.device);
    if constexpr (P::has_selection) {
        with_paged_decode_plan<Dims>(ctx, cache, count, body);  // chosen pages are read as a DualCache's
    } else if constexpr (is_half<T>) {
        const std::int32_t dim = std::max(cache.head_dim_qk, cache.head_dim_vo);
        const int tile = fitting_tile(Dims{}, dim);
        detail::require(tile != 0, "head_dim", dim, "at most the largest of the call's head_dims, and 256");
        with_tile(Dims{}, tile, [&](auto of) {
            contiguous_decode_plan<tensor_rows<T, decltype(of)::value>, P> call(ctx, device, cache, count);
            body(call);
        });
    } else {
        contiguous_decode_plan<plain_rows<T>, P> call(ctx, device, cache, count);
        body(call);
    }
}

}  // namespace cuda_backend

template <class Dims, class P, Storage T>
std::size_t step_workspace_bytes(const cuda& ctx, const FixedBudgetRef<P, T>& cache, std::int32_t count) {
    checks::check_count("batch", count, cache.max_sequences);
    std::size_t bytes = 0;
    const auto measure = [&](auto& call) { bytes = std::max(bytes, call.lay_out(nullptr)); };
    cuda_backend::with_decode_plan<Dims>(ctx, cache, count, measure);
    if constexpr (!P::has_selection) {
        // A batch of fewer entries may need more: its heads are cut among more blocks, each with a state.
        for (std::int32_t fewer = 1; fewer < count; ++fewer) {
            cuda_backend::with_decode_plan<Dims>(ctx, cache, fewer, measure);
        }
    }
    return bytes;
}

template <class Dims, class P, Storage T>
void step(const cuda& ctx, const FixedBudgetRef<P, T>& cache, const step_io<T>& io, workspace_view workspace,
          const StepOptions& options) {
    const Batch batch = checks::batch_of(io);
    const detail::step_extras extras = detail::extras_of(io);
    cuda_backend::check_cache_call(cache, batch, 1, io.q, io.k, io.v, io.out, extras);
    cuda_backend::with_decode_plan<Dims>(ctx, cache, batch.count, [&](auto& call) {
        call.step(batch, io.q, io.k, io.v, io.out, workspace, options.status, extras);
    });
}

template <class Dims, class P, Storage T>
void attend(const cuda& ctx, const FixedBudgetRef<P, T>& cache, const step_io<T>& io,
            workspace_view workspace, const StepOptions& options) {
    const Batch batch = checks::batch_of(io);
    detail::require(io.cu_seqlens == nullptr, "io.cu_seqlens", "given",
                    "null in attend, whose entries have one query");
    cuda_backend::check_cache_call(cache, batch, 1, io.q, io.out, io.lse);
    cuda_backend::with_decode_plan<Dims>(ctx, cache, batch.count, [&](auto& call) {
        call.attend(batch, io.q, io.out, io.lse, workspace, options.status);
    });
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
