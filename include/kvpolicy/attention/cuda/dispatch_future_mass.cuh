// Bodies of attention/cuda_future_mass.cuh: checks, and which kernel gets the call.
#pragma once

#include <kvpolicy/attention/check_future_mass.hpp>
#include <kvpolicy/attention/cuda/future_mass/agent_qk_reduce_portable.cuh>
#include <kvpolicy/attention/cuda/future_mass/kernel_lse_hopper.cuh>
#include <kvpolicy/attention/cuda/future_mass/kernel_qk_reduce_hopper.cuh>
#include <kvpolicy/attention/cuda/future_mass/kernel_qk_reduce_plain.cuh>
#include <kvpolicy/attention/cuda/future_mass/kernel_qk_reduce_portable.cuh>
#include <kvpolicy/attention/cuda/future_mass/qk_reduce_params.cuh>
#include <kvpolicy/attention/cuda/future_mass/qk_reduce_pipeline.cuh>
#include <kvpolicy/attention/cuda_future_mass.cuh>
#include <kvpolicy/attention/future_mass.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/head_tiles.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Which kernels a call takes. Tests name one; a call that cannot have it takes the next below.
enum class qk_reduce_path { plain, portable, hopper };

/// Numbers by head as a launch's parameters.
struct head_values {
    static constexpr std::int32_t capacity = 256;
    std::int32_t values[capacity];
    std::int32_t first = 0;
    std::int32_t count = 0;
};

/// table[batch.first + i] = batch.values[i] for i < batch.count: windows by head, which arrive as launch
/// parameters.
///
/// Grid: one block. Block: head_values::capacity threads. Shared memory: none. Overwrites table [heads],
/// int32.
template <class Number>
__global__ void write_head_values_kernel(const head_values batch, Number* const table) {
    if (static_cast<std::int32_t>(threadIdx.x) < batch.count) {
        table[batch.first + static_cast<std::int32_t>(threadIdx.x)] = batch.values[threadIdx.x];
    }
}

/// The workspace's parts: a flag for every item of the longer grid, causal_lse's (the fewest rows per item
/// are 128), the number of the next one, windows, and biases.
struct qk_reduce_workspace {
    std::int32_t* flags;
    std::int32_t* next;
    std::int32_t* windows;
    float* bias;

    /// Tiles of columns are at most this long, and a tile's biases are copied whole.
    static std::int64_t bias_stride(std::int64_t length) { return (length + 127) / 128 * 128; }

    template <class T>
    static qk_reduce_workspace take(workspace_parts& parts, const rows_view<const T>& q,
                                    const rows_view<const T>& k) {
        const std::int64_t tiles = (std::int64_t{q.length} + 127) / 128;
        return {parts.take<std::int32_t>(tiles * q.batch * q.heads), parts.take<std::int32_t>(1),
                parts.take<std::int32_t>(k.heads),
                parts.take<float>(bias_stride(q.length) * q.batch * q.heads)};
    }
};

template <class T>
void check_qk_rows(const char* name, const rows_view<const T>& rows, const Sequences& sequences) {
    detail::require(rows.data != nullptr || rows.batch == 0 || rows.heads == 0 || sequences.length == 0, name,
                    "null", "device memory");
}

/// The queries and keys of a pass over whole sequences.
template <class T>
void check_mass_rows(const AttentionParams& attention, rows_view<const T> q, rows_view<const T> k,
                     const Sequences& sequences) {
    checks::check_attention(attention);
    check_whole_sequences(sequences, q.batch, q.length);
    detail::require(sequences.length <= longest_sequence, "sequences.length", sequences.length,
                    "at most 2^31 - 2^24");
    detail::require(sequences.cu_seqlens == nullptr, "sequences.cu_seqlens", "given", "null");
    checks::check_mass_heads(q, k);
    detail::require(k.length >= sequences.length, "k.length", k.length,
                    [&] { return detail::text("at least sequences.length = ", sequences.length); });
    check_qk_rows("q", q, sequences);
    check_qk_rows("k", k, sequences);
}

template <class T>
void check_mass_call(const AttentionParams& attention, rows_view<const T> q, rows_view<const T> k,
                     plane_view<const float> lse, const Sequences& sequences) {
    check_mass_rows(attention, q, k, sequences);
    check_plane("lse", lse, q.batch, q.heads, sequences.length);
}

/// Whether 16-byte copies can read every row of a view.
template <class T>
bool copies_of_16(const rows_view<const T>& rows) {
    constexpr std::int64_t each = 16 / static_cast<std::int64_t>(sizeof(T));
    return reinterpret_cast<std::uintptr_t>(rows.data) % 16 == 0 && rows.row_stride % each == 0 &&
           rows.head_stride % each == 0 && rows.batch_stride % each == 0;
}

template <class C>
qk_reduce_exponents<C> exponents_of(const AttentionParams& attention, std::int32_t dim, double beta) {
    constexpr double log2_e = 1.4426950408889634;
    const double scale = attention.sm_scale != 0.0f ? static_cast<double>(attention.sm_scale)
                                                    : 1.0 / std::sqrt(static_cast<double>(dim));
    qk_reduce_exponents<C> e;
    e.cap = static_cast<C>(attention.logits_soft_cap);
    e.scale = static_cast<C>(attention.logits_soft_cap > 0.0f ? beta * log2_e : beta * log2_e * scale);
    e.inner = static_cast<C>(
        attention.logits_soft_cap > 0.0f ? scale / static_cast<double>(attention.logits_soft_cap) : 0.0);
    e.of_lse = static_cast<C>(-beta * log2_e);
    return e;
}

/// What to add to the exponents of the sum pass, so that what fp32 loses below 2^-125 is less than 2^-26 of
/// epsilon in every mass; negative where no such shift leaves range above. A mass loses at most (S 2^-(125 +
/// shift))^(1 / beta).
inline float shift_of(float epsilon, float beta, std::int32_t length) {
    constexpr double most = 90.0;  // masses up to 2^36 / S still fit; more is caught by the flags
    const double below = static_cast<double>(beta) * (26.0 - std::log2(static_cast<double>(epsilon)));
    const double shift = std::max(0.0, below + std::log2(std::max(1.0, static_cast<double>(length))) - 125.0);
    return shift <= most ? static_cast<float>(std::ceil(shift)) : -1.0f;  // epsilon = 0: infinite
}

template <class Pass, class T, class C>
void launch_plain(const cuda& ctx, const qk_reduce_params<T, C>& params) {
    constexpr int rows = qk_reduce_plain_sizes::rows;
    launch("qk_reduce_plain_kernel", qk_reduce_plain_kernel<T, Pass>,
           (std::int64_t{params.length} + rows - 1) / rows * params.batch * params.row_heads,
           qk_reduce_plain_sizes::threads, 0, ctx, params);
}

template <class Pass, int Dim, class T>
void launch_tiles(const cuda& ctx, const device_scope& device, qk_reduce_path path,
                  const qk_reduce_params<T>& params) {
    const std::int64_t heads = std::int64_t{params.batch} * params.row_heads;
    CUtensorMap rows, columns;
    if (path == qk_reduce_path::hopper && has_hopper_code(device, qk_reduce_hopper_kernel<T, Dim, Pass>) &&
        make_tensor_map(params.packed.whole(params.rows), 64, rows) &&
        make_tensor_map(params.packed.whole(params.columns), qk_reduce_hopper_sizes<Dim>::columns, columns)) {
        using sizes = qk_reduce_hopper_sizes<Dim>;
        const std::int64_t items = (std::int64_t{params.length} + sizes::rows - 1) / sizes::rows * heads;
        const bool again =
            Pass::reduce == row_reduce::running && params.flags != nullptr;  // after a quick pass
        if constexpr (std::is_same_v<Pass, lse_pass> && Dim > 64) {
            if (params.length >= 8192) {
                launch("normalizer_hopper_kernel", lse_hopper_kernel<T, Dim>, items, sizes::threads,
                       sizes::shared, ctx, params, rows, columns);
                return;
            }
        }
        if constexpr (Pass::mass) {
            if (!again) {  // also says that no item has been handed out
                launch("qk_reduce_bias_kernel", qk_reduce_bias_kernel<T>,
                       std::int64_t{params.batch} * params.columns.heads *
                           ((params.bias_stride + bias_columns - 1) / bias_columns),
                       256, 0, ctx, params);
            }
        } else if (!again) {
            check(cudaMemsetAsync(params.next, 0, sizeof(std::int32_t), ctx.stream), "cudaMemsetAsync");
        }
        launch("qk_reduce_hopper_kernel", qk_reduce_hopper_kernel<T, Dim, Pass>,
               std::min(items, std::int64_t{device.attribute(cudaDevAttrMultiProcessorCount)}),
               sizes::threads, sizes::shared, ctx, params, rows, columns, static_cast<std::int32_t>(items));
    } else {
        using sizes = qk_reduce_portable_sizes<Dim>;
        launch("qk_reduce_portable_kernel", qk_reduce_portable_kernel<T, Dim, Pass>,
               (std::int64_t{params.length} + sizes::rows - 1) / sizes::rows * heads, sizes::threads,
               sizes::shared, ctx, params);
    }
}

template <class Pass, class Dims, class T>
void launch_qk_reduce(const cuda& ctx, const device_scope& device, qk_reduce_path path,
                      const qk_reduce_params<T>& params) {
    with_tile(Dims{}, fitting_tile(Dims{}, params.rows.dim),
              [&](auto dim) { launch_tiles<Pass, decltype(dim)::value>(ctx, device, path, params); });
}

template <class T>
constexpr bool has_tiles = std::is_same_v<T, bf16> || std::is_same_v<T, fp16>;

template <class Dims, class T>
bool takes_tiles(qk_reduce_path path, const rows_view<const T>& q, const rows_view<const T>& k) {
    return path != qk_reduce_path::plain && fitting_tile(Dims{}, q.dim) != 0 && copies_of_16(q) &&
           copies_of_16(k);
}

/// A call whose rows and columns are these.
template <class C, class T>
qk_reduce_params<T, C> qk_reduce_params_of(rows_view<const T> rows, rows_view<const T> columns,
                                           plane_view<float> out, const Sequences& sequences) {
    qk_reduce_params<T, C> params;
    params.rows = rows;
    params.columns = columns;
    params.out = out;
    params.batch = rows.batch;
    params.row_heads = rows.heads;
    params.length = sequences.length;
    params.lengths = sequences.lengths;
    return params;
}

/// causal_lse by a path of one's choice.
template <class T, class Dims = all_head_dims>
void causal_lse_by(const cuda& ctx, qk_reduce_path path, const AttentionParams& attention,
                   rows_view<const T> q, rows_view<const T> k, const Sequences& sequences,
                   plane_view<float> lse, workspace_view workspace) {
    using C = compute_t<T>;
    const device_scope device(ctx);
    workspace_parts parts(workspace.data);
    auto params = qk_reduce_params_of<C>(q, k, lse, sequences);
    params.share = q.heads / k.heads;
    params.exponents = exponents_of<C>(attention, q.dim, 1.0);
    if constexpr (has_tiles<T>) {
        if (takes_tiles<Dims>(path, q, k)) {
            const qk_reduce_workspace memory = qk_reduce_workspace::take(parts, q, k);
            params.flags = memory.flags;
            params.next = memory.next;
            launch_qk_reduce<lse_pass, Dims>(ctx, device, path, params);
            launch_qk_reduce<careful_lse_pass, Dims>(ctx, device, path, params);
            return;
        }
    }
    launch_plain<careful_lse_pass>(ctx, params);
}

/// Windows of all heads: one number, or a table that is written here.
template <class T, class C>
void set_windows(const cuda& ctx, const FutureMassOptions& options, std::int32_t* table,
                 qk_reduce_params<T, C>& params) {
    const auto window = [&](std::int32_t h) { return options.window.at(options.layer, h); };
    params.window = window(0);
    bool same = true;
    for (std::int32_t h = 1; h < params.row_heads; ++h) {
        same = same && window(h) == params.window;
    }
    if (same) {
        return;
    }
    params.windows = table;
    for (std::int32_t first = 0; first < params.row_heads; first += head_values::capacity) {
        head_values batch;
        batch.first = first;
        batch.count = std::min(params.row_heads - first, head_values::capacity);
        for (std::int32_t i = 0; i < batch.count; ++i) {
            batch.values[i] = window(first + i);
        }
        launch("write_head_values_kernel", write_head_values_kernel<std::int32_t>, 1, head_values::capacity,
               0, ctx, batch, table);
    }
}

/// A mass of every key from the queries of its group.
template <class C, class T>
qk_reduce_params<T, C> mass_params_of(rows_view<const T> q, rows_view<const T> k, plane_view<const float> lse,
                                      plane_view<float> out, const Sequences& sequences,
                                      const qk_reduce_workspace& memory) {
    auto params = qk_reduce_params_of<C>(k, q, out, sequences);
    params.lse = lse;
    params.streams = q.heads / k.heads;
    params.bias = memory.bias;
    params.next = memory.next;
    params.bias_stride = qk_reduce_workspace::bias_stride(q.length);
    return params;
}

/// out[t] = log of the mean over the group of sum over d >= t of exp(logit - lse_d), by a path of one's
/// choice. No weight may exceed 1 (lse is that of at least these keys): then sums need no careful pass.
template <class T, class Dims>
void log_mass_by(const cuda& ctx, qk_reduce_path path, const AttentionParams& attention, rows_view<const T> q,
                 rows_view<const T> k, plane_view<const float> lse, const Sequences& sequences,
                 plane_view<float> out, workspace_view workspace, const packed_entries& packed = {}) {
    using C = compute_t<T>;
    const device_scope device(ctx);
    workspace_parts parts(workspace.data);
    const qk_reduce_workspace memory = qk_reduce_workspace::take(parts, q, k);
    auto params = mass_params_of<C>(q, k, lse, out, sequences, memory);
    params.packed = packed;
    params.look_ahead = unlimited;
    params.window = 0;
    params.exponents = exponents_of<C>(attention, q.dim, 1.0);
    params.mass.log_epsilon = -std::numeric_limits<C>::infinity();
    params.mass.normalize = false;
    params.mass.mean = true;
    if constexpr (has_tiles<T>) {
        if (takes_tiles<Dims>(path, q, k)) {
            params.exponents.shift = 64.0f;  // below 2^126 for 2^31 weights, and tiny weights count
            params.flags = memory.flags;
            launch_qk_reduce<mass_pass, Dims>(ctx, device, path, params);
            return;
        }
    }
    launch_plain<careful_mass_pass>(ctx, params);
}

/// future_mass by a path of one's choice.
template <class T, class Dims = all_head_dims>
void future_mass_by(const cuda& ctx, qk_reduce_path path, const AttentionParams& attention,
                    rows_view<const T> q, rows_view<const T> k, plane_view<const float> lse,
                    const Sequences& sequences, const FutureMassOptions& options, plane_view<float> target,
                    workspace_view workspace) {
    using C = compute_t<T>;
    const device_scope device(ctx);
    workspace_parts parts(workspace.data);
    const qk_reduce_workspace memory = qk_reduce_workspace::take(parts, q, k);
    const bool largest = std::isinf(options.beta);
    const float beta = largest ? 1.0f : options.beta;
    auto params = mass_params_of<C>(q, k, lse, target, sequences, memory);
    params.look_ahead = options.look_ahead;
    params.exponents = exponents_of<C>(attention, q.dim, static_cast<double>(beta));
    params.mass.over_beta = static_cast<C>(1.0 / static_cast<double>(beta));
    params.mass.log_epsilon = static_cast<C>(std::log(static_cast<double>(options.epsilon)));
    params.mass.normalize = options.normalize && !largest;
    params.mass.mean = options.aggregate == group_aggregate::mean;
    if (params.batch == 0 || params.length == 0) {
        return;
    }
    set_windows(ctx, options, memory.windows, params);
    if constexpr (has_tiles<T>) {
        if (takes_tiles<Dims>(path, q, k)) {
            if (largest) {
                launch_qk_reduce<largest_mass_pass, Dims>(ctx, device, path, params);
                return;
            }
            const float shift = shift_of(options.epsilon, beta, params.length);
            if (shift >= 0.0f) {
                params.exponents.shift = shift;
                params.flags = memory.flags;
                launch_qk_reduce<mass_pass, Dims>(ctx, device, path, params);
            }
            launch_qk_reduce<careful_mass_pass, Dims>(ctx, device, path, params);
            return;
        }
    }
    if (largest) {
        launch_plain<largest_mass_pass>(ctx, params);
    } else {
        launch_plain<careful_mass_pass>(ctx, params);
    }
}

}  // namespace cuda_backend

template <Storage T>
std::size_t future_mass_workspace_bytes(const cuda& ctx, rows_view<const T> q, input_rows<T> k) {
    static_cast<void>(ctx);
    checks::check_mass_heads(q, k);
    cuda_backend::workspace_parts parts(nullptr);
    static_cast<void>(cuda_backend::qk_reduce_workspace::take(parts, q, k));
    return parts.bytes();
}

template <Storage T, class Dims>
void causal_lse(const cuda& ctx, const AttentionParams& attention, rows_view<const T> q, input_rows<T> k,
                const Sequences& sequences, plane_view<float> lse, workspace_view workspace,
                const CausalLseOptions& options) {
    namespace cb = cuda_backend;
    cb::check_mass_call(attention, q, k, plane_view<const float>(lse), sequences);
    cb::check_workspace(workspace, future_mass_workspace_bytes<T>(ctx, q, k));
    cb::report_lengths(ctx, sequences, options.status);
    cb::causal_lse_by<T, Dims>(ctx, cb::qk_reduce_path::hopper, attention, q, k, sequences, lse, workspace);
}

template <Storage T, class Dims>
void future_mass(const cuda& ctx, const AttentionParams& attention, rows_view<const T> q, input_rows<T> k,
                 plane_view<const float> lse, const Sequences& sequences, plane_view<float> target,
                 workspace_view workspace, const FutureMassOptions& options) {
    namespace cb = cuda_backend;
    cb::check_mass_call(attention, q, k, lse, sequences);
    cb::check_plane("target", target, q.batch, k.heads, sequences.length);
    checks::check_mass_options(options, k.heads);
    cb::check_workspace(workspace, future_mass_workspace_bytes<T>(ctx, q, k));
    cb::report_lengths(ctx, sequences, options.status);
    cb::future_mass_by<T, Dims>(ctx, cb::qk_reduce_path::hopper, attention, q, k, lse, sequences, options,
                                target, workspace);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
