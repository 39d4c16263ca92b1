// What the dispatches of the scorers share: checks, and a call's streams, inputs and weights as kernels take
// them.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/cuda_context.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/check_score.hpp>
#include <kvpolicy/scorers/cuda/common/device_scorer.cuh>
#include <kvpolicy/scorers/cuda/common/kernel_scale_gradients.cuh>
#include <kvpolicy/scorers/cuda/common/kernel_scorer_weights.cuh>
#include <kvpolicy/scorers/cuda/common/kernel_streams.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_params.cuh>
#include <kvpolicy/scorers/sequence.hpp>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class S, class T>
constexpr void check_scorer_types() {
    static_assert(
        device_scorer<S>::scores_sequences,
        "kvpolicy: on CUDA, sequences are scored by scorers that specialize device_scorer "
        "(scorers/cuda/common/device_scorer.cuh): LinearScorer, MlpScorer, WriteGateScorer and other "
        "BasicMlpScorers of keys and values, mLSTMScorer and ConvScorer do");
    static_assert(!std::is_same_v<T, double>,
                  "kvpolicy: on CUDA, scorers take rows of bf16, fp16 or float; double is the host's");
}
template <class S>
constexpr void check_scorer_gradients() {
    static_assert(device_scorer<S>::has_gradients,
                  "kvpolicy: the device_scorer of this scorer has no backward(): it scores, and is not "
                  "trained on CUDA");
}

/// The call without what only the device may read.
inline Sequences without_device_memory(Sequences sequences) {
    sequences.lengths = nullptr;
    sequences.starts = nullptr;
    sequences.cu_seqlens = nullptr;
    sequences.segments = 0;
    return sequences;
}

template <class T>
void check_scorer_rows(const char* name, const rows_view<const T>& rows) {
    if constexpr (is_half<T>) {
        detail::require(
            rows.dim % 8 == 0, [&] { return detail::text(name, ".dim"); }, rows.dim,
            "a multiple of 8 for 16-bit rows");
        check_aligned(name, rows);
    }
}

/// Chunks a plane has at most.
inline std::int32_t scorer_chunks(const Sequences& sequences) {
    return sequences.cu_seqlens == nullptr ? (sequences.length + scorer_chunk - 1) / scorer_chunk
                                           : sequences.length / scorer_chunk + sequences.segments;
}

/// Shapes that a workspace can be asked for, before anything is computed from them.
inline void check_scorer_shape(const Sequences& sequences, std::int32_t heads) {
    check_shape(sequences, heads);
    const std::int64_t chunks = std::int64_t{sequences.batch} * heads * std::max(1, scorer_chunks(sequences));
    detail::require(
        chunks <= 0x7fffffff / 2, "batch x heads x chunks",
        [&] { return detail::text(sequences.batch, " x ", heads, " x ", scorer_chunks(sequences)); },
        "below 2^30 (a chunk: 64 tokens of a segment): split the batch");
}

/// A call's streams and inputs, with the small arrays that they need of the workspace.
template <class T>
struct scorer_plan {
    scorer_streams streams;
    scorer_source<T> source;
    Sequences sequences;
    std::int32_t* edges = nullptr;
    float* frequencies = nullptr;  // where a kernel fills them in
    float base = 0.0f;

    scorer_plan(rows_view<const T> k, rows_view<const T> v, const Sequences& from, std::int32_t delay,
                workspace_parts& parts)
        : sequences(from) {
        check_scorer_shape(sequences, k.heads);
        source.k = k;
        source.v = v;
        set_size(k.dim + v.dim);
        streams.batch = sequences.batch;
        streams.heads = k.heads;
        streams.length = sequences.length;
        streams.rows = std::min(k.length, v.length);
        streams.lengths = sequences.lengths;
        streams.starts = sequences.starts;
        streams.chunks = scorer_chunks(sequences);
        // Beyond every row nothing is scored, however late; sums with a position then fit 32 bits.
        streams.delay = std::min(delay, std::max(streams.rows, scorer_chunk));
        edges = parts.take<std::int32_t>(edges_needed(sequences));
        if (sequences.cu_seqlens != nullptr) {
            streams.edges = edges;
            streams.segments = sequences.segments;
        }
    }
    void set_size(std::int32_t size) {
        source.size = size;
        source.padded = (size + 63) / 64 * 64;
    }
    void set_rope(const Rope& rope, workspace_parts& parts) {
        source.layout = rope.layout;
        source.rotated = rope.rotated(source.k.dim);
        source.frequencies = rope.frequencies;
        base = rope.base;
        if (source.frequencies == nullptr && source.rotated > 0) {
            frequencies = parts.take<float>(source.rotated / 2);
            source.frequencies = frequencies;
        }
    }

    [[nodiscard]] std::int64_t chunks() const {
        return std::int64_t{streams.batch} * streams.heads * streams.chunks;
    }
    [[nodiscard]] std::int64_t rows() const { return chunks() * scorer_chunk; }

    /// Enqueues what the streams and inputs need before anything reads them.
    void begin(const cuda& ctx, std::uint32_t* status) {
        streams.status = status;
        launch_edges(ctx, sequences, edges, status);
        if (status != nullptr) {
            launch("check_streams_kernel", check_streams_kernel<scorer_streams>, 1, 256, 0, ctx, streams);
        }
        if (frequencies != nullptr) {
            launch("frequencies_kernel", frequencies_kernel<float>, 1, 256, 0, ctx, base, source.rotated,
                   frequencies);
        }
    }
};

/// Refuses inputs too wide for a block's shared memory, of which bytes(padded) says how much inputs of so
/// many numbers, a multiple of 64, need. `what` says what for.
template <class T, class Bytes>
void check_input_shared_memory(const cuda& ctx, const scorer_source<T>& source, const char* what,
                               const Bytes& bytes) {
    const auto capacity =
        static_cast<std::size_t>(device_scope(ctx).attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin));
    detail::require(bytes(source.padded) <= capacity,
                    source.input == scorer_input::write_gate ? "2 k.dim" : "k.dim + v.dim", source.size, [&] {
                        std::int32_t most = source.padded;
                        while (most > 0 && bytes(most) > capacity) {
                            most -= 64;
                        }
                        return detail::text("at most ", most, " for ", what, ", by the ", capacity,
                                            " bytes of shared memory that a block has on this device");
                    });
}

/// Gradients of scores as kernels read them. Gradients of hidden numbers are rounded to T, and fp16 ends near
/// 6e-8 where those of a mean loss begin. So for fp16 rows kernels read a copy, times a power of two by head
/// that brings the head's largest to [1, 2); scorer_streams::unscale takes it out of sums and of inputs'
/// gradients. Other types read what was given.
template <class T>
struct score_gradients {
    static constexpr bool scales = std::is_same_v<T, fp16>;
    float* scaled = nullptr;  // [batch, heads, rows]
    std::uint32_t* largest = nullptr;
    std::int32_t rows = 0;

    /// Its part of the workspace; the call's kernels take the scale out from then on.
    void take(scorer_plan<T>& call, workspace_parts& parts) {
        if constexpr (scales) {
            rows = call.streams.rows;
            scaled = parts.take<float>(std::int64_t{call.streams.batch} * call.streams.heads * rows);
            largest = parts.take<std::uint32_t>(call.streams.heads);
            call.streams.largest = largest;
        }
    }
    /// Enqueues the copy, after scorer_plan::begin.
    [[nodiscard]] plane_view<const float> of([[maybe_unused]] const cuda& ctx,
                                             [[maybe_unused]] const scorer_plan<T>& call,
                                             const plane_view<const float>& given) const {
        if constexpr (scales) {
            const scorer_streams& streams = call.streams;
            find_largest_gradients(ctx, streams, given, streams.heads, largest);
            launch("scale_gradients_kernel", scale_gradients_kernel<float>, scale_blocks(streams),
                   scale_threads, 0, ctx, streams, given,
                   view_bhs(scaled, streams.batch, streams.heads, rows));
            return view_bhs<const float>(scaled, streams.batch, streams.heads, rows);
        } else {
            return given;
        }
    }
};

/// Weight matrices of all heads as tiles take them.
template <class T>
T* take_stack(workspace_parts& parts, const weight_stack& stack, std::int32_t heads, std::int32_t padded) {
    return parts.take<T>(std::int64_t{heads} * stack.rows * padded);
}
template <class T>
void fill_stack(const cuda& ctx, const weight_stack& stack, const scorer_plan<T>& call, T* to) {
    const std::int64_t count = std::int64_t{call.streams.heads} * stack.rows * call.source.padded;
    launch("stack_weights_kernel", stack_weights_kernel<T>,
           std::min<std::int64_t>((count / 8 + 255) / 256, 1024), 256, 0, ctx, stack, call.streams.heads,
           call.source.size, call.source.padded, to);
}

/// Parts of a head's chunks whose weight gradients are summed apart, so that there is work for all
/// SMs, and all of it at once: an H100 has space for 396 blocks.
template <class T>
std::int32_t gradient_splits(const scorer_plan<T>& call, const weight_stack& stack) {
    const std::int64_t tiles =
        std::int64_t{call.streams.heads} * (stack.rows / 64) * ((call.source.padded + 127) / 128);
    const std::int64_t most = std::int64_t{call.streams.batch} * call.streams.chunks;
    return static_cast<std::int32_t>(
        std::clamp<std::int64_t>(384 / std::max<std::int64_t>(tiles, 1), 1, std::max<std::int64_t>(most, 1)));
}
template <class T>
float* take_gradient_parts(workspace_parts& parts, const scorer_plan<T>& call, const weight_stack& stack) {
    return parts.take<float>(std::int64_t{gradient_splits(call, stack)} * call.streams.heads * stack.rows *
                             call.source.padded);
}
/// Gradients of a stack's arrays from rows d y; inputs stand `shift` tokens before their rows.
template <class T>
void add_weight_gradients(const cuda& ctx, const scorer_plan<T>& call, const weight_stack& stack,
                          const T* d_rows, std::int32_t shift, float* partial) {
    const std::int32_t splits = gradient_splits(call, stack);
    shared_parts shared(nullptr);
    shared.tile<T>(scorer_chunk, weight_gradient_stages<T> * (64 + 128));
    shared.take<float>(2 * scorer_chunk);
    launch("weight_gradient_kernel", weight_gradient_kernel<T>,
           std::int64_t{splits} * call.streams.heads * (stack.rows / 64) * ((call.source.padded + 127) / 128),
           128, shared.bytes(), ctx, call.streams, call.source, stack, d_rows, shift, splits, partial);
    const std::int64_t count = std::int64_t{call.streams.heads} * stack.rows * call.source.size;
    launch("add_weight_gradients_kernel", add_weight_gradients_kernel<weight_stack>,
           std::min<std::int64_t>((count + 255) / 256, 4096), 256, 0, ctx, call.streams, stack,
           static_cast<const float*>(partial), splits, call.source.size, call.source.padded);
}

/// Adds up the chunks' sums, all of them in one launch.
inline void add_sums(const cuda& ctx, const scorer_streams& streams, const chunk_sums& sums) {
    if (sums.count() == 0) {
        return;  // none is wanted
    }
    launch("add_sums_kernel", add_sums_kernel<chunk_sums>, (streams.heads * sums.count() + 3) / 4, 128, 0,
           ctx, streams, sums);
}

template <class T>
void launch_input_gradients(const cuda& ctx, const scorer_plan<T>& call, const gradient_rows<T>& first,
                            const gradient_rows<T>& second, const ScoreBackward<T>& to) {
    launch("input_gradient_kernel", input_gradient_kernel<T>, call.chunks(), 128,
           input_gradient_shared<T>(call.source.input, call.source.padded), ctx, call.streams, call.source,
           first, second, to.d_k, to.d_v);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
