// Dispatch of attend_backward: arguments are checked, the workspace is cut into parts, kernels are chosen and
// enqueued.
#pragma once

#include <kvpolicy/attention/check_attend_backward.hpp>
#include <kvpolicy/attention/cuda/backward/backward_params.cuh>
#include <kvpolicy/attention/cuda/backward/kernel_backward_hopper.cuh>
#include <kvpolicy/attention/cuda/backward/kernel_backward_hopper_wide.cuh>
#include <kvpolicy/attention/cuda/backward/kernel_backward_plain.cuh>
#include <kvpolicy/attention/cuda/backward/kernel_backward_portable.cuh>
#include <kvpolicy/attention/cuda/backward/kernel_backward_prepare.cuh>
#include <kvpolicy/attention/cuda/backward/kernel_backward_queries_hopper.cuh>
#include <kvpolicy/attention/cuda/dispatch_attend.cuh>
#include <kvpolicy/attention/cuda/kernel_plan.cuh>
#include <kvpolicy/attention/cuda/key_frame.cuh>
#include <kvpolicy/attention/cuda/make_attention_params.cuh>
#include <kvpolicy/attention/cuda_attend_backward.cuh>
#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A call's numbers and memory, all rounds of super-tiles considered.
template <class T>
struct backward_plan {
    backward_params<T> params{};
    key_frames frames{};
    attention_plan whole{};
    std::int32_t* edges = nullptr;
    std::int32_t tile;  // the compiled head_dim
    std::int64_t heads = 0;
    bool lists = true;
    bool with_bias = false;
    bool want_bias = false;

    backward_plan(const AttentionParams& attention, const rows_view<const T>& q, const kv_view<T>& all,
                  const Sequences& sequences, const BackwardOptions& options, std::int32_t dim,
                  bool wants_bias, void* memory, std::size_t& bytes)
        : tile(dim) {
        params.call = params_of(attention, q, all, static_cast<const kv_view<T>*>(nullptr), sequences);
        const attention_params<T>& call = params.call;
        constexpr double log2_e = 1.4426950408889634;
        params.slope = static_cast<float>(attention.logits_soft_cap > 0.0f
                                              ? double{call.scale} / double{attention.logits_soft_cap}
                                              : double{call.scale} * log2_e);
        params.height = static_cast<float>(double{attention.logits_soft_cap} * log2_e);
        heads = std::int64_t{q.batch} * all.k.heads;
        with_bias = static_cast<bool>(all.mask.log_bias);
        want_bias = wants_bias;
        lists = all.mask.expiry || all.position || sequences.cu_seqlens != nullptr;
        whole = shape_plan(all.k.length, sequences.length, packed_tile,
                           is_plain_frame(all, static_cast<const kv_view<T>*>(nullptr), sequences));
        params.starts = sequences.starts;
        params.first = all.first;
        params.mask = all.mask;
        params.key_lengths = all.lengths;
        params.super_rows = whole.super_q * call.group;
        params.padded_rows = (params.super_rows + 127) / 128 * 128;

        workspace_parts parts(memory);
        edges = parts.take<std::int32_t>(edges_needed(sequences));
        frames = frames_of(all, static_cast<const kv_view<T>*>(nullptr), sequences, edges);
        std::int32_t most = whole.supers;  // super-tiles of a round
        if (lists) {
            take_plan(parts, whole, heads, with_bias);
            most = 0;
            for (std::int32_t first = 0; first < whole.supers;) {
                const std::int32_t supers = plan_round(whole, heads, first).supers;
                most = std::max(most, supers);
                first += supers;
            }
        }
        const std::int64_t count = heads * most;
        if (lists) {
            // Rows that have positions of their own may all begin at one query; else no two are.
            params.max_young = all.position ? all.k.length : whole.super_q;
            params.young = parts.take<std::int32_t>(count * params.max_young);
            params.brief = parts.take<std::int32_t>(count);
        }
        params.items = parts.take<std::int32_t>(count + 1);
        params.taken = parts.take<std::int32_t>(most);
        params.not_finite = parts.take<std::uint32_t>(1);
        if constexpr (is_half<T>) {
            const std::int64_t lines = count * params.padded_rows;
            params.large = parts.take<std::uint32_t>(1);
            params.packed_q = parts.take<T>(lines * tile);
            params.packed_d_out = parts.take<T>(lines * tile);
            params.lse2 = parts.take<float>(lines);
            params.delta = parts.take<float>(lines);
            params.sum_q = options.deterministic ? nullptr : parts.take<float>(lines * tile);
            const std::int64_t rows = heads * all.k.length;
            params.sum_k = parts.take<float>(rows * tile);
            params.sum_v = parts.take<float>(rows * tile);
            params.sum_bias = with_bias ? parts.take<float>(rows) : nullptr;
        } else {
            params.totals = parts.take<row_total<T>>(count * params.super_rows);
        }
        bytes = parts.bytes();
    }

    void use(const SavedForward<T>& saved, const AttentionGrads<T>& grads) {
        params.out = saved.out;
        params.d_out = saved.d_out;
        params.lse = saved.lse;
        params.d_q = grads.d_q;
        params.d_k = grads.d_k;
        params.d_v = grads.d_v;
        params.d_log_bias = grads.d_log_bias;
        if (!want_bias) {
            params.sum_bias = nullptr;
        }
    }

    /// Calls body for every round of super-tiles, with its lists enqueued.
    template <class Body>
    void for_rounds(const cuda& ctx, const Sequences& sequences, const BackwardOptions& options, Body body) {
        launch_edges(ctx, sequences, edges, options.status);
        if (options.status != nullptr) {
            launch("forward_begin_kernel", forward_begin_kernel<key_frames>, 1, 256, 0, ctx, frames,
                   sequences.batch, options.status, static_cast<std::uint32_t*>(nullptr), 0);
        }
        for (std::int32_t first = 0; first < whole.supers;) {
            attention_plan round = whole;
            if (lists) {
                round = plan_round(whole, heads, first);
                launch_plan(ctx, frames, round, params.call.batch, params.call.kv_heads);
            }
            params.plan = round;
            if (lists) {
                launch("backward_young_kernel", backward_young_kernel<T>, heads * round.supers, pack_threads,
                       0, ctx, params);
            }
            first += round.supers;
            body();
        }
    }
};

inline void zero(const cuda& ctx, void* memory, std::int64_t bytes) {
    if (bytes == 0) {
        return;
    }
    check(cudaMemsetAsync(memory, 0, static_cast<std::size_t>(bytes), ctx.stream), "cudaMemsetAsync");
}

/// The Hopper kernel of keys for a tile of head_dims.
template <class T, int Dim, bool Bias, bool Softcap>
constexpr auto hopper_keys_kernel() {
    if constexpr (Dim <= 128) {
        return backward_hopper_kernel<T, Dim, Bias, Softcap>;
    } else {
        return backward_hopper_wide_kernel<T, Bias, Softcap>;
    }
}

/// The kernels of one tile of head_dims.
template <class T, int Dim, bool Bias, bool Softcap>
void run_backward(const cuda& ctx, const device_scope& device, backward_plan<T>& call,
                  const Sequences& sequences, const BackwardOptions& options) {
    using S = portable_sizes<Dim>;
    backward_params<T>& p = call.params;
    const int processors = device.attribute(cudaDevAttrMultiProcessorCount);
    const std::size_t shared = sizeof(portable_memory<Dim>) + 128;
    const std::int64_t rows = call.heads * p.call.rows.k.length;
    zero(ctx, p.sum_k, rows * Dim * 4);
    zero(ctx, p.sum_v, rows * Dim * 4);
    if (p.sum_bias != nullptr) {
        zero(ctx, p.sum_bias, rows * 4);
    }
    zero(ctx, p.large, 4);
    constexpr auto hopper_kernel = hopper_keys_kernel<T, Dim, Bias, Softcap>();
    const bool hopper = !options.portable && has_hopper_code(device, hopper_kernel);
    const auto keys_pass = [&](std::int32_t begin, std::int32_t end, std::int32_t counter) {
        if (hopper) {
            using H = hopper_backward<Dim>;
            launch("backward_hopper_kernel", hopper_kernel, processors, H::threads, H::shared_bytes, ctx, p,
                   begin, end, counter);
        } else {
            launch("backward_portable_kernel", backward_portable_kernel<T, Dim, Bias, Softcap>,
                   2 * processors, S::threads, shared, ctx, p, begin, end, counter);
        }
    };
    const auto queries_pass = [&](std::int64_t lines, const auto& items_pass) {
        if constexpr (Dim <= 128) {
            if (hopper) {
                using H = hopper_queries<Dim>;
                launch("backward_queries_hopper_kernel",
                       backward_queries_hopper_kernel<T, Dim, Bias, Softcap>, lines / H::rows, H::threads,
                       H::shared_bytes, ctx, p);
                return;
            }
        } else if (hopper) {
            items_pass(S::keys);  // that kernel's own blocks
        }
        launch("backward_queries_kernel", backward_queries_kernel<T, Dim, Bias, Softcap>, lines / S::queries,
               S::threads, shared, ctx, p);
    };
    call.for_rounds(ctx, sequences, options, [&] {
        const std::int32_t lists = p.lists(), heads = p.heads();
        const std::int64_t lines = std::int64_t{lists} * p.padded_rows;
        const auto items_pass = [&](std::int32_t block_keys) {
            launch("backward_items_kernel", backward_items_kernel<T>, 1, 1024, 0, ctx, p, block_keys);
        };
        launch("backward_pack_kernel", backward_pack_kernel<T, Dim>, lines / packed_tile, pack_threads, 0,
               ctx, p);
        items_pass(hopper ? hopper_backward<Dim>::keys : S::keys);
        if (!options.deterministic) {
            zero(ctx, p.sum_q, lines * Dim * 4);
            keys_pass(0, lists, 0);
            launch("backward_finish_q_kernel", backward_finish_q_kernel<T, Dim>,
                   lines / packed_tile * (Dim / 64), finish_threads, 0, ctx, p);
        } else {
            for (std::int32_t j = 0; j < p.plan.supers; ++j) {
                keys_pass(j * heads, (j + 1) * heads, j);
            }
            queries_pass(lines, items_pass);
        }
        constexpr std::int64_t fix_blocks = 1024;
        constexpr int warps = plain_threads / 32;
        launch("backward_fix_nonfinite_kernel", backward_fix_nonfinite_kernel<T>,
               std::min((std::int64_t{lists} * p.super_rows + warps - 1) / warps, fix_blocks), plain_threads,
               0, ctx, p);
        launch("backward_large_kernel", backward_large_kernel<T, Dim>,
               options.deterministic ? 1 : 2 * processors, plain_threads, 0, ctx, p);
    });
    launch("backward_finish_keys_kernel", backward_finish_keys_kernel<T, Dim>,
           (rows * (Dim / 8) + finish_threads - 1) / finish_threads, finish_threads, 0, ctx, p);
}

/// float and double: sums go straight into the outputs.
template <class T>
void run_backward_plain(const cuda& ctx, backward_plan<T>& call, const Sequences& sequences,
                        const BackwardOptions& options) {
    backward_params<T>& p = call.params;
    constexpr int warps = plain_threads / 32;
    const std::int64_t rows = call.heads * p.call.rows.k.length;
    launch("backward_plain_zero_kernel", backward_plain_zero_kernel<T>, (rows + warps - 1) / warps,
           plain_threads, 0, ctx, p);
    call.for_rounds(ctx, sequences, options, [&] {
        const std::int64_t lines = std::int64_t{p.lists()} * p.super_rows;
        launch("backward_plain_queries_kernel", backward_plain_queries_kernel<T>, (lines + warps - 1) / warps,
               plain_threads, 0, ctx, p);
        for (std::int32_t j = 0; j < p.plan.supers; ++j) {
            launch("backward_plain_keys_kernel", backward_plain_keys_kernel<T>, (rows + warps - 1) / warps,
                   plain_threads, 0, ctx, p, j);
        }
    });
}

template <class T, int Dim>
void choose_backward(const cuda& ctx, const device_scope& device, backward_plan<T>& call,
                     const Sequences& sequences, const BackwardOptions& options) {
    if (call.params.call.logits_soft_cap > 0.0f) {
        run_backward<T, Dim, true, true>(ctx, device, call, sequences, options);
    } else if (call.with_bias) {
        run_backward<T, Dim, true, false>(ctx, device, call, sequences, options);
    } else {
        run_backward<T, Dim, false, false>(ctx, device, call, sequences, options);
    }
}

/// Checks what can be checked on the host; the compiled head_dim that the call takes, 0 for plain kernels.
template <class T, class Dims>
std::int32_t check_backward(const AttentionParams& attention, const rows_view<const T>& q,
                            const kv_view<T>& all, const Sequences& sequences) {
    check_attend(attention, q, all, static_cast<const kv_view<T>*>(nullptr), sequences);
    check_aligned("q", q);
    check_aligned("keys.k", all.k);
    check_aligned("keys.v", all.v);
    const std::int32_t dim = std::max(q.dim, all.v.dim);
    if constexpr (is_half<T>) {
        const std::int32_t tile = fitting_tile(Dims{}, dim);
        detail::require(tile != 0, "head_dim", dim, "at most the largest of the call's head_dims, and 256");
        // A super-tile's packed numbers are counted by 31 bits.
        const std::int32_t group = q.heads / all.k.heads;
        detail::require(group <= 0x7fffffff / (plan_queries * 256), "q.heads", q.heads,
                        "at most 8191 for each KV head");
        return tile;
    } else {
        detail::require(dim <= 32 * plain_columns, "head_dim", dim, "at most 256");
        return 0;
    }
}

}  // namespace cuda_backend

template <Storage T, class Dims>
std::size_t attend_backward_workspace_bytes(const cuda&, const AttentionParams& attention, input_rows<T> q,
                                            const kv_view<T>& all, const Sequences& sequences,
                                            const BackwardOptions& options) {
    namespace backend = cuda_backend;
    const std::int32_t tile = backend::check_backward<T, Dims>(attention, q, all, sequences);
    std::size_t bytes = 0;
    backend::backward_plan<T>(attention, q, all, sequences, options, tile, false, nullptr, bytes);
    return bytes;
}

template <Storage T, class Dims>
void attend_backward(const cuda& ctx, const AttentionParams& attention, input_rows<T> q,
                     const kv_view<T>& all, const Sequences& sequences, const SavedForward<T>& saved,
                     const AttentionGrads<T>& grads, workspace_view workspace,
                     const BackwardOptions& options) {
    namespace backend = cuda_backend;
    const std::int32_t tile = backend::check_backward<T, Dims>(attention, q, all, sequences);
    checks::check_backward_shapes(q, all, saved, grads);
    backend::check_portable(options.portable);
    backend::check_aligned("out", saved.out);
    backend::check_aligned("d_out", saved.d_out);
    backend::check_aligned("d_q", grads.d_q);
    backend::check_aligned("d_k", grads.d_k);
    backend::check_aligned("d_v", grads.d_v);
    backend::check_workspace(
        workspace, attend_backward_workspace_bytes<T, Dims>(ctx, attention, q, all, sequences, options));
    const backend::device_scope device(ctx);
    std::size_t bytes = 0;
    backend::backward_plan<T> call(attention, q, all, sequences, options, tile,
                                   static_cast<bool>(grads.d_log_bias), workspace.data, bytes);
    call.use(saved, grads);
    if constexpr (backend::is_half<T>) {
        backend::with_tile(Dims{}, tile, [&](auto dim) {
            backend::choose_backward<T, decltype(dim)::value>(ctx, device, call, sequences, options);
        });
    } else {
        backend::run_backward_plain(ctx, call, sequences, options);
    }
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
