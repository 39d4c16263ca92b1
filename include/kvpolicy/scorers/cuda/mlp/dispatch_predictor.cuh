// Bodies of scorers/cuda_predictor.cuh.
#pragma once

#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/cublaslt.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/check_hidden.hpp>
#include <kvpolicy/scorers/cuda/common/kernel_scale_gradients.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_plan.cuh>
#include <kvpolicy/scorers/cuda/mlp/kernel_predictor.cuh>
#include <kvpolicy/scorers/cuda_predictor.cuh>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class S>
inline constexpr bool is_predictor = false;
template <class Act, std::int32_t D>
inline constexpr bool is_predictor<BasicMlpScorer<HiddenInput, Act, D>> =
    std::is_same_v<Act, Silu> || std::is_same_v<Act, GeluErf>;
template <class S>
inline constexpr scorer_activation activation_of = scorer_activation::silu;
template <class Act, std::int32_t D>
inline constexpr scorer_activation activation_of<BasicMlpScorer<HiddenInput, Act, D>> =
    std::is_same_v<Act, Silu> ? scorer_activation::silu : scorer_activation::gelu_erf;

template <class S, class T>
constexpr void check_predictor_types() {
    static_assert(is_predictor<S>,
                  "kvpolicy: on CUDA, hidden states are scored by UtilityPredictor and other "
                  "BasicMlpScorers of HiddenInput with Silu or GeluErf");
    static_assert(is_half<T> || std::is_same_v<T, float>,
                  "kvpolicy: on CUDA, hidden states are bf16, fp16 or float; double is the host's");
}

template <class S, class T>
void check_predictor_call(cublasLtHandle_t handle, const S& scorer, rows_view<const T> hidden,
                          const Sequences& sequences, const char* name, plane_view<const float> scores) {
    detail::require(handle != nullptr, "options.cublaslt", "null", "what cublasLtCreate gave");
    checks::check_hidden_call<S, float>(scorer, hidden, without_device_memory(sequences), scores, name);
    check_shape(sequences, scores.heads);
    detail::require(hidden.heads == 1 && hidden.row_stride >= hidden.dim, "hidden.row_stride",
                    hidden.row_stride, [&] { return detail::text("at least the width, ", hidden.dim); });
    check_scorer_rows("hidden", hidden);
}

/// A call's parts: rows that are one product.
template <class T>
struct predictor_plan {
    static constexpr std::int64_t most = 8192;  // rows of a part

    predictor_params params;
    rows_view<const T> hidden;
    const float* weights = nullptr;
    bool ragged = false;                // some rows may be no token's
    std::int64_t rows = 0;              // of all sequences
    bool together = false;              // rows of all sequences are equally far apart
    std::int64_t part = 0;              // rows of the largest part
    T* w1 = nullptr;                    // [padded, width]
    float* y = nullptr;                 // [part, padded]
    unsigned char* capacity = nullptr;  // cuBLASLt's

    template <class S>
    predictor_plan(const S& scorer, rows_view<const T> from, const Sequences& sequences, std::int32_t heads,
                   const rows_view<float>& d_hidden, workspace_parts& parts)
        : hidden(from), weights(scorer.weights.w1) {
        params.streams.batch = sequences.batch;
        params.streams.heads = heads;
        params.streams.length = sequences.length;
        params.streams.lengths = sequences.lengths;
        params.streams.starts = sequences.starts;
        params.per = sequences.starts != nullptr ? from.length : sequences.length;
        params.streams.rows = from.length;
        params.hidden = scorer.hidden;
        params.padded = (scorer.hidden + 7) / 8 * 8;
        params.activation = activation_of<S>;
        params.b1 = scorer.weights.b1;
        params.w2 = scorer.weights.w2;
        params.b2 = scorer.weights.b2;
        ragged = sequences.lengths != nullptr || sequences.starts != nullptr;
        rows = std::int64_t{sequences.batch} * params.per;
        const auto evenly = [&](std::int64_t batch_stride, std::int64_t row_stride) {
            return batch_stride == params.per * row_stride;
        };
        together =
            sequences.batch == 1 ||
            (evenly(from.batch_stride, from.row_stride) &&
             (d_hidden.data == nullptr || ragged || evenly(d_hidden.batch_stride, d_hidden.row_stride)));
        part = std::min(most, together ? rows : params.per);
        w1 = parts.take<T>(std::int64_t{params.padded} * from.dim);
        y = parts.take<float>(part * params.padded);
        capacity = parts.take<unsigned char>(static_cast<std::int64_t>(cublaslt_bytes));
    }

    /// Reports lengths that cannot be.
    void check_streams(const cuda& ctx, std::uint32_t* status) {
        params.streams.status = status;
        if (status != nullptr) {
            launch("check_streams_kernel", check_streams_kernel<scorer_streams>, 1, 256, 0, ctx,
                   params.streams);
        }
    }
    void begin(const cuda& ctx, std::uint32_t* status) {
        check_streams(ctx, status);
        const std::int64_t all = std::int64_t{params.padded} * hidden.dim;
        launch("cast_weights_kernel", cast_weights_kernel<T>, std::min<std::int64_t>((all + 255) / 256, 1024),
               256, 0, ctx, weights, std::int64_t{params.hidden} * hidden.dim, all, w1);
    }
    /// visit(first row, rows) for every part.
    template <class Visit>
    void for_each_part(Visit visit) const {
        for (std::int64_t first = 0; first < rows;) {
            const std::int64_t end = together ? rows : (first / params.per + 1) * params.per;
            const std::int64_t count = std::min(most, end - first);
            visit(first, static_cast<std::int32_t>(count));
            first += count;
        }
    }
    /// A part's rows of a view of one head, as they lie.
    template <class V>
    [[nodiscard]] product_matrix rows_of(const rows_view<V>& view, std::int64_t first,
                                         std::int32_t count) const {
        return matrix_of(view.row(first / params.per, 0, first % params.per), count, view.dim,
                         view.row_stride);
    }
    void project(const cuda& ctx, cublasLtHandle_t handle, const product_matrix& x) const {
        multiply(ctx, handle, x, false, matrix_of(w1, params.padded, hidden.dim, hidden.dim), true,
                 matrix_of(y, x.rows, params.padded, params.padded), false, capacity);
    }
};

template <class T>
struct predictor_backward_plan {
    predictor_plan<T> call;
    std::int64_t sums = 0, groups = 0;
    // As score_gradients of scorer_plan.cuh, but all heads have one hidden layer: one scale, where d_rows are
    // rounded, out of products again.
    static constexpr bool scales = std::is_same_v<T, fp16>;
    std::uint32_t* largest = nullptr;
    predictor_factors* factors = nullptr;
    T* d_rows = nullptr;       // [part, padded]
    float* partial = nullptr;  // [groups, sums]
    T* x = nullptr;            // [part, width] where some rows are no token's
    float* d_x = nullptr;      // the same

    template <class S>
    predictor_backward_plan(const S& scorer, const HiddenBackward<T>& from, workspace_parts& parts)
        : call(scorer, from.hidden, from.sequences, from.d_scores.heads, from.d_hidden, parts) {
        sums = predictor_sums(from.d_scores.heads, scorer.hidden);
        groups = (call.part + predictor_block - 1) / predictor_block;
        d_rows = parts.take<T>(call.part * call.params.padded);
        partial = parts.take<float>(groups * sums);
        if (scales) {
            largest = parts.take<std::uint32_t>(1);
            factors = parts.take<predictor_factors>(1);
        }
        if (call.ragged) {
            x = parts.take<T>(call.part * from.hidden.dim);
            if (from.d_hidden.data != nullptr) {
                d_x = parts.take<float>(call.part * from.hidden.dim);
            }
        }
    }
    void run(const cuda& ctx, cublasLtHandle_t handle, const HiddenBackward<T>& from,
             const MlpParameters<float>& into, std::uint32_t* status) {
        call.begin(ctx, status);
        if constexpr (scales) {
            scorer_streams streams = call.params.streams;
            streams.chunks = (streams.length + scorer_chunk - 1) / scorer_chunk;
            find_largest_gradients(ctx, streams, from.d_scores, 1, largest);
            launch("predictor_factors_kernel", predictor_factors_kernel<predictor_factors>, 1, 1, 0, ctx,
                   static_cast<const std::uint32_t*>(largest), factors);
        }
        const float* const of_products = scales ? &factors->product : nullptr;
        const std::int32_t width = from.hidden.dim, padded = call.params.padded, hidden = call.params.hidden,
                           heads = call.params.streams.heads;
        call.for_each_part([&](std::int64_t first, std::int32_t count) {
            if (call.ragged || status != nullptr) {
                launch("read_hidden_kernel", read_hidden_kernel<T>, std::min(count, 4096), 256, 0, ctx,
                       call.params, from.hidden, first, count, x);
            }
            const product_matrix rows =
                call.ragged ? matrix_of(x, count, width, width) : call.rows_of(from.hidden, first, count);
            call.project(ctx, handle, rows);
            const std::int32_t these = (count + predictor_block - 1) / predictor_block;
            launch("predictor_backward_kernel", predictor_backward_kernel<T>,
                   std::int64_t{these} * ((padded + predictor_block - 1) / predictor_block), predictor_block,
                   0, ctx, call.params, static_cast<const float*>(call.y), first, count, from.d_scores,
                   static_cast<const predictor_factors*>(factors), d_rows, partial);
            const auto add = [&](std::int64_t at, std::int64_t numbers, float* to) {
                if (to != nullptr) {
                    launch("predictor_sums_kernel", predictor_sums_kernel<float>, (numbers + 255) / 256, 256,
                           0, ctx, static_cast<const float*>(partial), these, sums, at, numbers, to);
                }
            };
            add(0, hidden, into.b1);
            add(hidden, std::int64_t{heads} * hidden, into.w2);
            add((std::int64_t{heads} + 1) * hidden, heads, into.b2);
            const product_matrix d_y = matrix_of(d_rows, count, padded, padded);
            if (into.w1 != nullptr) {
                multiply(ctx, handle, matrix_of(d_rows, count, hidden, padded), true, rows, false,
                         matrix_of(into.w1, hidden, width, width), true, call.capacity, of_products);
            }
            if (from.d_hidden.data != nullptr) {
                multiply(ctx, handle, d_y, false, matrix_of(call.w1, padded, width, width), false,
                         call.ragged ? matrix_of(d_x, count, width, width)
                                     : call.rows_of(from.d_hidden, first, count),
                         false, call.capacity, of_products);
                if (call.ragged) {
                    launch("write_hidden_kernel", write_hidden_kernel<float>, std::min(count, 4096), 256, 0,
                           ctx, call.params, static_cast<const float*>(d_x), first, count, from.d_hidden);
                }
            }
        });
    }
};

}  // namespace cuda_backend

template <HiddenScorer S, class Real, class T>
std::size_t score_hidden_workspace_bytes(const cuda&, const S& scorer, rows_view<T> hidden,
                                         const Sequences& sequences) {
    namespace cb = cuda_backend;
    cb::check_predictor_types<S, std::remove_const_t<T>>();
    cb::check_shape(sequences, scorer.heads);
    cb::workspace_parts parts(nullptr);
    const cb::predictor_plan<std::remove_const_t<T>> call(scorer, hidden, sequences, scorer.heads, {}, parts);
    return call.rows == 0 ? 0 : parts.bytes();
}

template <HiddenScorer S, class T, class Real>
void score_hidden(const cuda& ctx, const S& scorer, rows_view<T> hidden, const Sequences& sequences,
                  plane_view<Real> scores, workspace_view workspace, const ScoreHiddenOptions& options) {
    namespace cb = cuda_backend;
    static_assert(std::is_same_v<Real, float>, "kvpolicy: scores on CUDA are fp32");
    const cublasLtHandle_t handle = options.cublaslt;
    std::uint32_t* const status = options.status;
    using Element = std::remove_const_t<T>;
    cb::check_predictor_types<S, Element>();
    cb::check_predictor_call<S, Element>(handle, scorer, hidden, sequences, "scores", scores);
    cb::check_workspace(workspace, score_hidden_workspace_bytes(ctx, scorer, hidden, sequences));
    const cb::device_scope device(ctx);
    cb::workspace_parts parts(workspace.data);
    cb::predictor_plan<Element> call(scorer, hidden, sequences, scores.heads, {}, parts);
    call.params.streams.rows = std::min(call.params.streams.rows, scores.length);
    if (call.rows == 0) {
        call.check_streams(ctx, status);
        return;
    }
    call.begin(ctx, status);
    call.for_each_part([&](std::int64_t first, std::int32_t count) {
        call.project(ctx, handle, call.rows_of(call.hidden, first, count));
        cb::launch("predictor_scores_kernel", cb::predictor_scores_kernel<float>,
                   (count + 8 * cb::predictor_rows - 1) / (8 * cb::predictor_rows), 256, 0, ctx, call.params,
                   static_cast<const float*>(call.y), first, count, scores);
    });
}

template <class Input, class Act, std::int32_t D, class T, class Real>
requires takes_hidden_state<Input> std::size_t score_hidden_backward_workspace_bytes(
    const cuda&, const BasicMlpScorer<Input, Act, D>& scorer, const HiddenBackward<T, Real>& call) {
    namespace cb = cuda_backend;
    static_assert(std::is_same_v<Real, float>, "kvpolicy: scores on CUDA are fp32");
    cb::check_predictor_types<BasicMlpScorer<Input, Act, D>, T>();
    cb::check_shape(call.sequences, call.d_scores.heads);
    cb::workspace_parts parts(nullptr);
    const cb::predictor_backward_plan<T> backward(scorer, call, parts);
    return backward.call.rows == 0 ? 0 : parts.bytes();
}

template <class Input, class Act, std::int32_t D, class T, class Real>
requires takes_hidden_state<Input>
void score_hidden_backward(const cuda& ctx, const BasicMlpScorer<Input, Act, D>& scorer,
                           const HiddenBackward<T, Real>& call, MlpParameters<Real> gradients,
                           workspace_view workspace, const ScoreHiddenOptions& options) {
    namespace cb = cuda_backend;
    using S = BasicMlpScorer<Input, Act, D>;
    static_assert(std::is_same_v<Real, float>, "kvpolicy: scores on CUDA are fp32");
    const cublasLtHandle_t handle = options.cublaslt;
    std::uint32_t* const status = options.status;
    cb::check_predictor_types<S, T>();
    cb::check_predictor_call<S, T>(handle, scorer, call.hidden, call.sequences, "d_scores", call.d_scores);
    if (call.d_hidden.data != nullptr) {
        checks::check_rows("d_hidden", call.d_hidden, call.hidden.batch, 1, call.hidden.length,
                           call.hidden.dim);
        detail::require(call.d_hidden.row_stride >= call.d_hidden.dim, "d_hidden.row_stride",
                        call.d_hidden.row_stride,
                        [&] { return detail::text("at least the width, ", call.d_hidden.dim); });
    }
    cb::check_workspace(workspace, score_hidden_backward_workspace_bytes(ctx, scorer, call));
    const cb::device_scope device(ctx);
    cb::workspace_parts parts(workspace.data);
    cb::predictor_backward_plan<T> backward(scorer, call, parts);
    std::int32_t& length = backward.call.params.streams.rows;
    length = std::min(length, call.d_scores.length);
    if (backward.call.rows == 0) {
        backward.call.check_streams(ctx, status);
        return;
    }
    backward.run(ctx, handle, call, gradients, status);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
