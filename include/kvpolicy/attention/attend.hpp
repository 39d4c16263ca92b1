// Attention through a mask: every query sees the keys that are alive when it asks, at a cost
// proportional to them.
#pragma once

#include <kvpolicy/attention/gradients.hpp>
#include <kvpolicy/attention/kv_view.hpp>
#include <kvpolicy/core/context.hpp>
#include <kvpolicy/core/head_dims.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>

#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {

/// How a call on CUDA finds the rows that a tile of queries sees.
enum class attend_path : std::uint8_t {
    automatic,  ///< gather where keys expire, have positions of their own or are packed; else scan
    gather,     ///< lists of live rows, made once for about 1024 queries at a time
    scan,       ///< every tile looks at all rows that are not in the future: needs no lists
};

/// How a call on Hopper (head_dim up to 128, no soft cap, no biases) copies rows that all queries of a tile
/// see.
enum class attend_copies : std::uint8_t {
    automatic,  ///< boxes for the super-tiles whose rows follow one another in runs of 32 or more on
                ///< average; else rows
    boxes,      ///< eight rows that follow one another come as one box by TMA, others singly: for gates
                ///< open in long runs
    rows,       ///< every row by itself
};

/// How many queries a tile has on Hopper (head_dim up to 128, no soft cap, no biases). Narrow tiles have two
/// thirds of the rows of wide ones, where that is a number of queries and the call has one round of lists.
enum class attend_tiles : std::uint8_t {
    automatic,  ///< of few tiles so many heads' are narrow that the GPU is done soonest; else wide
    wide,
    narrow,
    mixed,  ///< narrow for half of the heads, of an odd number for one more
};

/// Options of attend. Results agree to rounding whatever it says. The host has one path: it looks at the
/// status alone.
struct AttendOptions {
    attend_path path = attend_path::automatic;
    bool portable = false;  ///< the kernels of compute capability 8.0 on any GPU
    attend_copies copies = attend_copies::automatic;
    attend_tiles tiles = attend_tiles::automatic;
    std::uint32_t* status = nullptr;  ///< [B], OR-ed into: status_bad_length
};

/// Options of attend_backward. The host is deterministic, and looks at the status alone.
struct BackwardOptions {
    /// The same bits in every run. d_q then comes from a pass of its own, and super-tiles of about
    /// 1024 queries go one after another for d_k and d_v: about twice the time, more where batch *
    /// KV heads is small.
    bool deterministic = false;
    bool portable = false;  ///< the kernels of compute capability 8.0 on any GPU
    /// [B], OR-ed into: status_bad_length. The host also sets status_not_finite, for a number that it refuses
    /// without a status; the gradients of that sequence are then invalid.
    std::uint32_t* status = nullptr;
};

/// Bytes of workspace for the attend call with the same arguments, and for every call that differs from it
/// only by fewer queries or keys: one workspace for the longest call serves them all.
template <Storage T, class Dims = all_head_dims>
std::size_t attend_workspace_bytes(const host& ctx, const AttentionParams& attention, input_rows<T> q,
                                   const kv_view<T>& all, const Sequences& sequences,
                                   const AttendOptions& options = {});
template <Storage T, class Dims = all_head_dims>
std::size_t attend_workspace_bytes(const host& ctx, const AttentionParams& attention, input_rows<T> q,
                                   const kv_view<T>& past, const kv_view<T>& self, const Sequences& sequences,
                                   const AttendOptions& options = {});

/// Attention through an expiry mask, for query i of head h * G + g at position p = start_b + i (start_b =
/// sequences.starts[b], 0 where null, negative allowed) and the keys t of KV head h at positions pos(t):
///
///     seen(t)   =  pos(t) <= p  and  p < expiry[b][h][t]
///     logit(t)  =  cap(scale <q, k_t>) + (log_bias[b][h][t] where p - pos(t) >= bias_from[h], else 0)
///     out       =  sum over seen t of softmax(logit)(t) v_t,      lse = log sum over seen t of exp(logit(t))
///
/// with scale = sm_scale (0: 1 / sqrt(Dk)), and cap(x) = c tanh(x / c) where c = logits_soft_cap > 0, else x.
/// A query that sees no key gets out = 0 and lse = -inf. Values of invisible rows have no effect, NaN and
/// infinities included; a bias of -inf hides a key.
///
/// Shapes: q [B, Hq, S, Dk], k [B, Hkv, Skv, Dk], v [B, Hkv, Skv, Dv], out [B, Hq, S, Dv], lse [B, Hq, S]
/// (natural logarithm; lse_to_log2 converts; may be empty). Hq = G Hkv with any integer G >= 1; query head h
/// G + g belongs to KV head h. Dk and Dv may differ; each is a multiple of 8 from 8 to 1024 (so 72 works and
/// 65 is refused). Any strides between rows. T is bf16, fp16 or float, computed in fp32; or double, computed
/// in double by the portable bodies.
///
/// Only the first sequences.lengths[b] queries of sequence b count: out and lse are overwritten for them
/// and untouched beyond. Key rows count as far as all.lengths says. With sequences.cu_seqlens, queries
/// see keys of their own packed segment only; that takes the plain frame (no starts, no explicit
/// positions, first = 0).
///
/// Synchronous, no allocation. Time is O(live pairs) plus a scan of the expiries per tile of queries. The
/// result does not depend on the number of threads; portable and AVX2 bodies agree to rounding.
///
/// Refuses, before anything is written: head counts that do not divide, shapes that disagree, an unsupported
/// head_dim, null data, lengths below 0, beyond the view or beyond 2^30, positions that 31 bits do not hold,
/// a negative bias_from or logits_soft_cap, a scale that is not finite, too little workspace.
template <Storage T, class Dims = all_head_dims>
void attend(const host& ctx, const AttentionParams& attention, input_rows<T> q, const kv_view<T>& all,
            const Sequences& sequences, output_rows<T> out, plane_view<float> lse, workspace_view workspace,
            const AttendOptions& options = {});

/// A chunk attends to the rows of a cache and to itself, as if both were one list of keys. `past` is as
/// above, with positions in the frame of the queries. `self` holds the chunk's own keys, [B, Hkv, S, ...]:
/// its row t sits at start_b + t unless it brings positions, only the first sequences.lengths[b] rows count,
/// and its `first` and `lengths` stay unset. Packed segments are refused.
template <Storage T, class Dims = all_head_dims>
void attend(const host& ctx, const AttentionParams& attention, input_rows<T> q, const kv_view<T>& past,
            const kv_view<T>& self, const Sequences& sequences, output_rows<T> out, plane_view<float> lse,
            workspace_view workspace, const AttendOptions& options = {});

/// Bytes of workspace for the attend_backward call with the same arguments. O(Skv (Dk + Dv)), at most 16
/// copies per head of the keys' and values' gradients.
template <Storage T, class Dims = all_head_dims>
std::size_t attend_backward_workspace_bytes(const host& ctx, const AttentionParams& attention,
                                            input_rows<T> q, const kv_view<T>& all,
                                            const Sequences& sequences, const BackwardOptions& options = {});

/// Gradients of attend() through the mask, at a cost proportional to the live pairs. With P = exp(logit -
/// lse) and delta_d = <out_d, d_out_d>, over the pairs (query d of head h G + g, key t) that see each other:
///
///     d v_t           = sum_{g, d} P d_out_d,            d logit = P (<d_out_d, v_t> - delta_d)
///     d x             = d logit (1 - (cap(x) / c)^2)          (x = scale <q, k>; no soft cap: d x = d logit)
///     d q_d           = scale sum_t d x k_t,             d k_t = scale sum_{g, d} d x q_d
///     d log_bias[t]   = sum over g and d with d - pos(t) >= bias_from of d logit
///
/// A query whose lse is -inf has zero gradient. Expiries have none: a policy's decisions are constants here.
/// lse must be that of this call's keys. Synchronous; the bits do not depend on the number of threads;
/// portable and AVX2 bodies agree to rounding. Packed segments as in attend.
///
/// Refuses, before anything is written: inputs that attend refuses, shapes that disagree, and without a
/// status a number that is not finite in q, out, d_out, or a k, v or log_bias that some query sees (named
/// with batch, head and position), a NaN lse.
template <Storage T, class Dims = all_head_dims>
void attend_backward(const host& ctx, const AttentionParams& attention, input_rows<T> q,
                     const kv_view<T>& all, const Sequences& sequences, const SavedForward<T>& saved,
                     const AttentionGrads<T>& grads, workspace_view workspace,
                     const BackwardOptions& options = {});

}  // namespace kvpolicy

#include <kvpolicy/attention/host/host_attend.hpp>
#if defined(__CUDACC__)
#include <kvpolicy/attention/cuda_attend.cuh>
#include <kvpolicy/attention/cuda_attend_backward.cuh>
#endif
