// Host side of a ConvScorer in a cache: workspace, and the launches before and after a call's top-k updates.
#pragma once

#include <kvpolicy/caches/cuda/scoring/kernel_cache_conv.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/cuda/conv/dispatch_conv.cuh>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Whether keys get their scores while they are in the window.
template <class P>
inline constexpr bool scored_late = P::ranked&& P::scorer_type::when == score_time::in_window;

/// The scores of a call of up to `most` tokens per entry; `longest`: the most rows of a head.
template <class View, class Gate>
class late_scores {
    using T = typename View::value_type;

  public:
    /// Takes its parts of the workspace.
    template <class S>
    late_scores(const device_scope& device, const S& scorer, const View& cache, const Gate& gate,
                std::int32_t count, std::int32_t most, std::int64_t longest, workspace_parts& parts)
        : conv_(scorer, rows_of(cache, cache.head_dim_qk), rows_of(cache, cache.head_dim_vo), Sequences{1, 1},
                0, {}, parts),
          call_{.cache = cache, .together = scorer.batch},
          gate_(gate),
          longest_(longest) {
        // Here, since calls of other scorers' caches name this type, too.
        static_assert(
            !std::is_same_v<T, double>,
            "kvpolicy: on CUDA a cache's ConvScorer takes rows of bf16, fp16 or float; double is the host's");
        call_.batch.count = count;
        call_.tokens.most = most;
        // A scorer that no kernel has space for is refused here, before anything is enqueued.
        if (conv_.hopper_inputs() == 0 || device.attribute(cudaDevAttrComputeCapabilityMajor) != 9) {
            static_cast<void>(fitting_conv_size<false>(
                conv_.params, device.shared_limit() - sizeof(late_head<View>), conv_columns<T>));
        }
    }

    /// Before a call's scores are asked for: `batch` says how many tokens count.
    void begin(const cuda& ctx, const device_scope& device, const Batch& batch,
               const prefill_tokens<T>& tokens, std::uint32_t* status) {
        call_.batch = batch;
        call_.tokens = tokens;
        call_.status = status;
        call_.params = conv_.params;
        call_.params.source = conv_.call.source;
        call_.params.source.k.data = conv_.packed;  // rows that are not there have an address, too
        hopper_ = 0;
        if constexpr (is_half<T>) {
            const std::int32_t inputs = conv_.hopper_inputs();
            if (inputs != 0 &&
                (inputs == 128 ? has_hopper_code(device, cache_conv_hopper_kernel<View, Gate, 128>)
                               : has_hopper_code(device, cache_conv_hopper_kernel<View, Gate, 256>))) {
                hopper_ = inputs;
            }
        }
        std::int64_t tile = conv_tile;
        if (hopper_ == 0) {
            constexpr auto kernel = cache_conv_kernel<View, Gate, conv_max_tiles>;
            size_ = fitting_conv_size<false>(
                conv_.params,
                shared_capacity(device, "cache_conv_kernel", reinterpret_cast<const void*>(kernel)),
                conv_columns<T>);
            call_.params.columns = size_.columns;
            with_conv_tiles<T>(size_.tiles, [&](auto tiles) { tile = conv_tiling<tiles>::tokens; });
        }
        const std::int64_t heads = this->heads(),
                           capacity = 4 * std::int64_t{device.attribute(cudaDevAttrMultiProcessorCount)};
        call_.blocks = static_cast<std::int32_t>(
            std::min((longest_ + call_.tokens.most + tile - 1) / tile,
                     std::max<std::int64_t>((capacity + heads - 1) / std::max<std::int64_t>(heads, 1), 1)));
        if (heads == 0) {
            return;
        }
        if (hopper_ == 128) {
            prepare<128>(ctx, device);
        } else if (hopper_ == 256) {
            prepare<256>(ctx, device);
        } else {
            prepare<0>(ctx, device);
        }
    }
    /// Scores that the top-k updates need, and those of the call's own tokens
    /// (caches/cuda/scoring/kernel_cache_conv.cuh).
    void decide(const cuda& ctx, const device_scope& device, float* leaving, float* late) {
        call_.in_rows = false;
        call_.leaving = leaving;
        call_.late = late;
        run(ctx, device);
    }
    /// Scores of keys that are in rows and stay there, for the tokens that `batch` says are taken.
    void in_rows(const cuda& ctx, const device_scope& device, const Batch& batch) {
        call_.batch = batch;
        call_.in_rows = true;
        run(ctx, device);
    }

  private:
    static rows_view<const T> rows_of(const View& cache, std::int32_t dim) {
        return {nullptr, 1, cache.kv_heads, 1, dim, dim, dim, dim};
    }
    [[nodiscard]] std::int64_t heads() const {
        return std::int64_t{call_.batch.count} * call_.cache.kv_heads;
    }
    // Each begins while the one before ends: mostly all that they do is to look at the lengths.
    template <int Inputs>
    void prepare(const cuda& ctx, const device_scope& device) {
        constexpr auto kernel = late_prepare_kernel<View, Inputs>;
        launch_early<kernel>("late_prepare_kernel", 256, 256, 0, device, ctx, 1, call_, conv_.to_pack(),
                             conv_.call.base, conv_.call.frequencies, conv_.packed);
    }
    void run(const cuda& ctx, const device_scope& device) {
        if constexpr (is_half<T>) {
            if (hopper_ == 128) {
                return run_hopper<128>(ctx, device);
            }
            if (hopper_ == 256) {
                return run_hopper<256>(ctx, device);
            }
        }
        with_conv_tiles<T>(size_.tiles, [&](auto tiles) {
            constexpr auto kernel = cache_conv_kernel<View, Gate, tiles>;
            launch_early<kernel>("cache_conv_kernel", heads() * call_.blocks, 128,
                                 conv_shared_bytes<false>(call_.params, size_), device, ctx, 1, call_, gate_);
        });
    }
    template <int Inputs>
    void run_hopper(const cuda& ctx, const device_scope& device) {
        constexpr auto kernel = cache_conv_hopper_kernel<View, Gate, Inputs>;
        launch_early<kernel>("cache_conv_hopper_kernel", heads() * call_.blocks, conv_consumers,
                             conv_forward_shape<Inputs>::shared_bytes, device, ctx, 1, call_, gate_,
                             static_cast<const T*>(conv_.packed));
    }

    conv_plan<T> conv_;
    late_score_params<View> call_;
    Gate gate_;
    std::int64_t longest_;
    std::int32_t hopper_ = 0;
    conv_size size_{};  // of the portable kernel
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
