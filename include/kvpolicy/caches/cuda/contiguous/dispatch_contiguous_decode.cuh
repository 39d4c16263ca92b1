// The plan of a step over contiguous entries: sizes, workspace, launches.
#pragma once

#include <kvpolicy/caches/cuda/check_cache_call.cuh>
#include <kvpolicy/caches/cuda/contiguous/kernel_contiguous_decode.cuh>
#include <kvpolicy/caches/cuda/decode/decode_plan.cuh>
#include <kvpolicy/caches/cuda/scoring/kernel_cache_score.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Into how many blocks the `rows` rows of each of `heads` heads are cut, on a GPU that holds
/// `num_sms * resident` blocks at once. Few heads: as many as keep the SMs busy, since softmax states have to
/// be merged, and none of few rows. More heads than the GPU holds blocks: five times as many blocks as it
/// holds, so that the last blocks do not leave most SMs idle.
inline std::int32_t decode_splits(std::int64_t heads, std::int64_t rows, std::int64_t num_sms,
                                  std::int64_t resident) {
    constexpr std::int64_t least_rows = 512;
    const std::int64_t places = num_sms * resident;
    const std::int64_t blocks = heads > places ? 5 * places : num_sms * 7 / 5;
    const std::int64_t wanted = (blocks + heads - 1) / heads;
    const std::int64_t useful = std::clamp<std::int64_t>(rows / least_rows, 1, max_splits);
    return static_cast<std::int32_t>(std::clamp<std::int64_t>(wanted, 1, useful));
}

/// The scorer that a step's kernel asks: one of hidden states, too, where the kernel finishes its scores.
template <class P>
using contiguous_scorer =
    std::conditional_t<scored_from_hidden<P> && reads_hidden_layer<typename P::scorer_type>,
                       typename P::scorer_type, asked_scorer<P>>;

template <class Rows, class P>
class contiguous_decode_plan
    : public decode_plan<contiguous_decode_plan<Rows, P>, FixedBudgetRef<P, typename Rows::T>,
                         contiguous_params<Rows, typename P::gate_type, contiguous_scorer<P>>> {
    using T = typename Rows::T;
    using Gate = typename P::gate_type;
    using Scorer = contiguous_scorer<P>;
    using base =
        decode_plan<contiguous_decode_plan, FixedBudgetRef<P, T>, contiguous_params<Rows, Gate, Scorer>>;
    friend base;
    static constexpr auto kernel = contiguous_decode_kernel<Rows, Gate, Scorer>;

  public:
    contiguous_decode_plan(const cuda& ctx, const device_scope& device, const FixedBudgetRef<P, T>& cache,
                           std::int32_t count)
        : base(ctx, device, cache, count) {
        const std::int64_t num_sms = device.attribute(cudaDevAttrMultiProcessorCount);
        const std::int64_t alone = std::max<std::int64_t>(heads() * call_.parts, 1);
        call_.splits = decode_splits(alone, cache.max_capacity, num_sms, Rows::blocks);
        call_.leader_blocks = alone * (call_.splits + 1) <= 2 * num_sms ? 1 : 0;
        cluster_if_few(alone, cache.max_capacity, num_sms);
        // Refused here, before the scorer's launch has moved its states.
        allow_shared("contiguous_decode_kernel", reinterpret_cast<const void*>(kernel), shared_);
    }

    /// Takes the parts of the workspace; with null only measures.
    std::size_t lay_out(void* memory) {
        workspace_parts parts(memory);
        call_.notes = parts.take<decode_note>(heads());
        const std::int64_t states =
            call_.clustered || call_.blocks() * call_.parts == 1 ? 0 : heads() * call_.parts * call_.blocks();
        call_.states =
            parts.take<typename Rows::Compute>(states * stream_state<Rows::heads>::size(call_.width));
        this->lay_out_logits(parts);
        this->lay_out_scores(parts);
        return parts.bytes();
    }

  private:
    using base::call_, base::ctx_, base::device_, base::heads, base::shared_;

    void run() {
        this->score_late(nullptr);
        const std::int64_t blocks = heads() * call_.parts * call_.blocks();
        const unsigned cluster = call_.clustered ? static_cast<unsigned>(call_.blocks()) : 1;
        if (call_.computed != nullptr || scored_by_steps<Scorer>) {
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
                if constexpr (scored_by_steps<Scorer>) {
                    call_.observed.in_step = !call_.observed.whole_layer;
                }
            }
        }
    }
};

/// Calls body(plan) with the contiguous_decode_plan that serves the cache.
template <class Dims, class P, class T, class Body>
void with_contiguous_decode_plan(const cuda& ctx, const device_scope& device,
                                 const FixedBudgetRef<P, T>& cache, std::int32_t count, const Body& body) {
    with_decode_rows<Dims, contiguous_layout>(cache, [&](auto rows) {
        contiguous_decode_plan<decltype(rows), P> plan(ctx, device, cache, count);
        body(plan);
    });
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
