// Bodies of attention/cuda_received_mass.cuh: checks, workspace, and which kernels get the call.
#pragma once

#include <kvpolicy/attention/cuda/dispatch_future_mass.cuh>
#include <kvpolicy/attention/cuda/received_mass/kernel_dense_mass.cuh>
#include <kvpolicy/attention/cuda/received_mass/launch_received_mass.cuh>
#include <kvpolicy/attention/cuda_received_mass.cuh>
#include <kvpolicy/attention/received_mass.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The lse of a call's queries, behind the parts that the calls of dispatch_future_mass.cuh take for
/// themselves.
template <class T>
plane_view<float> take_lse(workspace_parts& parts, const rows_view<const T>& q, const rows_view<const T>& k) {
    static_cast<void>(qk_reduce_workspace::take(parts, q, k));
    return view_bhs(parts.take<float>(std::int64_t{q.batch} * q.heads * q.length), q.batch, q.heads,
                    q.length);
}

/// Queries and keys of whole sequences.
template <class T>
received_mass_params<T> received_mass_params_of(const AttentionParams& attention, rows_view<const T> q,
                                                rows_view<const T> k, const Sequences& sequences,
                                                plane_view<float> lse, plane_view<float> mass) {
    received_mass_params<T> params;
    params.q = q;
    params.rows.k = k;
    params.batch = q.batch;
    params.kv_heads = k.heads;
    params.group = q.heads / k.heads;
    params.queries = params.max_keys = sequences.length;
    params.lengths = sequences.lengths;
    params.counted = unlimited;
    params.logits = exponents_of<compute_t<T>>(attention, q.dim, 1.0);
    params.lse = lse;
    params.mass = mass;
    return params;
}

/// Masses of dense causal attention, the mean over the group, from all queries: qk_reduce has the kernels.
/// `lse`, where `known`, is that of attention over these keys and possibly others; else it is computed.
/// `workspace` begins with a qk_reduce_workspace. `packed`: how entries lie in q, k and lse, which is known.
template <class T, class Dims>
void dense_mass_by(const cuda& ctx, qk_reduce_path path, const AttentionParams& attention,
                   rows_view<const T> q, rows_view<const T> k, const Sequences& sequences,
                   plane_view<float> lse, bool known, plane_view<float> mass, workspace_view workspace,
                   const packed_entries& packed = {}) {
    if (sequences.batch == 0 || sequences.length == 0) {
        return;
    }
    if (!known) {
        causal_lse_by<T, Dims>(ctx, path, attention, q, k, sequences, lse, workspace);
    }
    log_mass_by<T, Dims>(ctx, path, attention, q, k, lse, sequences, mass, workspace, packed);
    const std::int64_t pieces = (std::int64_t{sequences.length} + dense_mass_keys - 1) / dense_mass_keys;
    launch("dense_mass_kernel", dense_mass_kernel<float>, std::int64_t{sequences.batch} * k.heads * pieces,
           dense_mass_threads, 0, ctx, mass, sequences.length, sequences.lengths);
}

/// received_mass by a path of one's choice. A call without a mask that counts all queries takes qk_reduce;
/// where the maximum over a group counts, for the lse alone.
template <class T, class Dims = all_head_dims>
void received_mass_by(const cuda& ctx, qk_reduce_path path, const AttentionParams& attention,
                      rows_view<const T> q, rows_view<const T> k, const mask_view& mask,
                      const Sequences& sequences, plane_view<float> mass, workspace_view workspace,
                      const ReceivedMassOptions& options) {
    const device_scope device(ctx);
    workspace_parts parts(workspace.data);
    const plane_view<float> lse = take_lse(parts, q, k);
    const bool mean = options.aggregate == group_aggregate::mean || q.heads == k.heads;
    const bool dense = !mask.expiry && !mask.log_bias && options.queries >= sequences.length;
    if (dense && mean) {
        dense_mass_by<T, Dims>(ctx, path, attention, q, k, sequences, lse, false, mass, workspace);
        return;
    }
    auto params = received_mass_params_of<T>(attention, q, k, sequences, lse, mass);
    params.mask = mask;
    params.counted = options.queries;
    const bool halves = takes_tiles<Dims>(path, q, k);
    if (dense) {
        causal_lse_by<T, Dims>(ctx, path, attention, q, k, sequences, lse, workspace);
    } else {
        launch_counted_lse<Dims>(ctx, params, halves, options.queries);
    }
    launch_received_mass<Dims>(ctx, params, halves, options.aggregate);
}

}  // namespace cuda_backend

template <Storage T>
std::size_t received_mass_workspace_bytes(const cuda& ctx, rows_view<const T> q, input_rows<T> k) {
    static_cast<void>(ctx);
    checks::check_mass_heads(q, k);
    cuda_backend::workspace_parts parts(nullptr);
    static_cast<void>(cuda_backend::take_lse<T>(parts, q, k));
    return parts.bytes();
}

template <Storage T, class Dims>
void received_mass(const cuda& ctx, const AttentionParams& attention, rows_view<const T> q, input_rows<T> k,
                   const mask_view& mask, const Sequences& sequences, plane_view<float> mass,
                   workspace_view workspace, const ReceivedMassOptions& options) {
    namespace cb = cuda_backend;
    cb::check_mass_rows(attention, q, k, sequences);
    const auto plane = [&](const char* name, const auto& of) {
        cb::check_plane(name, of, q.batch, k.heads, sequences.length);
    };
    plane("mass", mass);
    if (mask.expiry) {
        plane("mask.expiry", mask.expiry);
    }
    if (mask.log_bias) {
        plane("mask.log_bias", mask.log_bias);
    }
    detail::require(options.queries >= 0, "queries", options.queries, "0 or more, or kvpolicy::unlimited");
    cb::check_workspace(workspace, received_mass_workspace_bytes<T>(ctx, q, k));
    cb::report_lengths(ctx, sequences, options.status);
    cb::received_mass_by<T, Dims>(ctx, cb::qk_reduce_path::hopper, attention, q, k, mask, sequences, mass,
                                  workspace, options);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
