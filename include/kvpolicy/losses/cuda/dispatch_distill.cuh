// The losses of losses/distill.hpp, and bodies of losses/cuda_distill.cuh: from arguments to launches.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/losses/check.hpp>
#include <kvpolicy/losses/cuda/kernel_distill.cuh>
#include <kvpolicy/losses/cuda_distill.cuh>
#include <kvpolicy/losses/distill.hpp>

#include <algorithm>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline std::int64_t row_tokens(const Sequences& sequences, std::int32_t heads) {
    return std::int64_t{sequences.batch} * heads * sequences.length;
}

/// Checks sequences and `row`, the rows that a call writes.
template <class T>
void check_row_call(const char* name, const rows_view<T>& rows, const Sequences& sequences) {
    static_assert(!std::is_same_v<T, double>, "kvpolicy: losses on CUDA take rows of fp32, bf16 or fp16");
    check_sequences(sequences, rows.batch, rows.length);
    checks::check_rows(name, rows, sequences.batch, rows.heads, sequences.length, rows.dim);
    detail::require(row_tokens(sequences, rows.heads) <= 0x7fffffff, "tokens",
                    row_tokens(sequences, rows.heads), "below 2^31: split the batch");
}

inline row_loss_params row_loss_params_of(const Sequences& sequences, std::int32_t heads, float scale,
                                          std::uint32_t* status) {
    row_loss_params params{};
    params.batch = sequences.batch;
    params.heads = heads;
    params.length = sequences.length;
    params.lengths = sequences.lengths;
    params.status = status;
    params.scale = static_cast<double>(scale);
    return params;
}

inline void take_row_memory(row_loss_params& params, workspace_parts& parts) {
    params.values = parts.take<double>(std::int64_t{params.batch} * params.heads * params.length);
    params.count = parts.take<long long>(1);
}

/// Device memory for the values and the count of a loss of rows.
inline std::size_t row_loss_workspace_bytes(const Sequences& sequences, std::int32_t heads) {
    check_shape(sequences, heads);
    workspace_parts parts(nullptr);
    row_loss_params params = row_loss_params_of(sequences, heads, 1.0f, nullptr);
    take_row_memory(params, parts);
    return parts.bytes();
}

/// Counts tokens, enqueue(problem) where there are any, and adds values up.
template <class L, class Enqueue>
void run_row_loss(const cuda& ctx, const L& loss, const Sequences& sequences, std::int32_t heads,
                  plane_view<const std::int32_t> labels, std::int32_t dim, LossValue* value,
                  workspace_view workspace, std::uint32_t* status, const Enqueue& enqueue) {
    checks::check_value(value);
    check_workspace(workspace, row_loss_workspace_bytes(sequences, heads));
    const device_scope device(ctx);
    workspace_parts parts(workspace.data);
    row_loss_params params = row_loss_params_of(sequences, heads, loss.scale, status);
    take_row_memory(params, parts);
    launch("row_count_kernel", row_count_kernel<std::int32_t>, 1, row_threads, 0, ctx, params, labels, dim);
    if (row_tokens(sequences, heads) > 0) {
        enqueue(params, row_tokens(sequences, heads));
    }
    launch("row_value_kernel", row_value_kernel<LossValue>, 1, row_threads, 0, ctx, params, value);
}

template <class T>
void check_student(float temperature, float scale, rows_view<const T> student, const Sequences& sequences,
                   rows_view<T> d_student) {
    checks::check_temperature(temperature, scale);
    check_row_call("d_student", d_student, sequences);
    checks::check_rows("student", student, sequences.batch, d_student.heads, sequences.length, d_student.dim);
}

inline std::int32_t top_count(const TopDistillation& loss, std::int32_t vocabulary) {
    return std::min(loss.top, vocabulary);
}

}  // namespace cuda_backend

inline std::size_t top_logits_workspace_bytes(const cuda& ctx, std::int32_t vocabulary) {
    static_cast<void>(ctx);
    detail::require(vocabulary >= 0, "vocabulary", vocabulary, "0 or more");
    return 0;
}

template <Storage T>
void top_logits(const cuda& ctx, input_rows<T> logits, const Sequences& sequences, rows_view<T> values,
                rows_view<std::int32_t> indices, workspace_view, const LossOptions& options) {
    namespace cb = cuda_backend;
    cb::check_row_call("values", values, sequences);
    detail::require(
        values.dim >= 1 && values.dim <= std::min(logits.dim, max_top_logits), "values.dim", values.dim, [&] {
            return detail::text("1 to the logits of a token, ", logits.dim, ", and at most ", max_top_logits);
        });
    checks::check_rows("logits", logits, sequences.batch, values.heads, sequences.length, logits.dim);
    checks::check_rows("indices", indices, sequences.batch, values.heads, sequences.length, values.dim);
    if (cb::row_tokens(sequences, values.heads) == 0) {
        return;
    }
    const cb::device_scope device(ctx);
    int capacity = 1;
    while (capacity < values.dim) {
        capacity *= 2;
    }
    cb::launch("top_logits_kernel", cb::top_logits_kernel<T>, cb::row_tokens(sequences, values.heads),
               cb::row_threads, static_cast<std::size_t>(capacity) * sizeof(std::uint64_t), ctx,
               cb::row_loss_params_of(sequences, values.heads, 1.0f, options.status), logits, values, indices,
               capacity);
}

}  // namespace KVPOLICY_HIDDEN

template <class Rows, class Build>
std::size_t TopDistillation::workspace_bytes(const cuda&, rows_view<Rows> values,
                                             rows_view<const std::int32_t>,
                                             const Sequences& sequences) const {
    return cuda_backend::row_loss_workspace_bytes(sequences, values.heads);
}

template <class Rows, class Build>
std::size_t TopDistillation::workspace_bytes(const cuda&, rows_view<Rows> teacher,
                                             const Sequences& sequences) const {
    const std::int64_t count = cuda_backend::row_tokens(sequences, teacher.heads) *
                               std::max(cuda_backend::top_count(*this, teacher.dim), 0);
    cuda_backend::workspace_parts parts(nullptr);
    static_cast<void>(parts.take<std::remove_const_t<Rows>>(count));
    static_cast<void>(parts.take<std::int32_t>(count));
    return parts.bytes() + cuda_backend::row_loss_workspace_bytes(sequences, teacher.heads);
}

template <Storage T, class Build>
void TopDistillation::operator()(const cuda& ctx, input_rows<T> teacher, input_rows<T> student,
                                 const Sequences& sequences, rows_view<T> d_student, LossValue* value,
                                 workspace_view workspace, const LossOptions& options) const {
    namespace cb = cuda_backend;
    detail::require(top >= 1, "top", top, "1 or more");
    detail::require(cb::top_count(*this, d_student.dim) <= max_top_logits, "top", top,
                    [] { return detail::text("at most ", max_top_logits, " on a device"); });
    checks::check_temperature(temperature, scale);
    checks::check_student_softmax(static_cast<std::int32_t>(over), reverse);
    cb::check_row_call("d_student", d_student, sequences);
    const std::int32_t batch = sequences.batch, heads = d_student.heads;
    checks::check_rows("teacher", teacher, batch, heads, sequences.length, d_student.dim);
    checks::check_rows("student", student, batch, heads, sequences.length, d_student.dim);
    cb::check_workspace(workspace, workspace_bytes<const T, Build>(ctx, teacher, sequences));
    checks::check_value(value);
    const std::int32_t count = cb::top_count(*this, d_student.dim);
    cb::workspace_parts parts(workspace.data);
    const std::int64_t all = cb::row_tokens(sequences, heads) * count;
    const auto values = view_bhsd(parts.take<T>(all), batch, heads, sequences.length, count);
    const auto indices = view_bhsd(parts.take<std::int32_t>(all), batch, heads, sequences.length, count);
    const std::size_t bytes = cb::row_loss_workspace_bytes(sequences, heads);
    unsigned char* const rest = parts.take<unsigned char>(static_cast<std::int64_t>(bytes));
    if (count > 0) {
        top_logits<T>(ctx, teacher, sequences, values, indices, {}, options);
    }
    (*this)(ctx, values, rows_view<const std::int32_t>(indices), student, sequences, d_student, value,
            workspace_view{rest, bytes}, options);
}

template <Storage T, class Build>
void TopDistillation::operator()(const cuda& ctx, input_rows<T> values, rows_view<const std::int32_t> indices,
                                 input_rows<T> student, const Sequences& sequences, rows_view<T> d_student,
                                 LossValue* value, workspace_view workspace,
                                 const LossOptions& options) const {
    namespace cb = cuda_backend;
    checks::check_student_softmax(static_cast<std::int32_t>(over), reverse);
    cb::check_student(temperature, scale, student, sequences, d_student);
    const std::int32_t batch = sequences.batch, heads = d_student.heads;
    checks::check_rows("values", values, batch, heads, sequences.length, values.dim);
    checks::check_rows("indices", indices, batch, heads, sequences.length, values.dim);
    cb::run_row_loss(ctx, *this, sequences, heads, {}, 0, value, workspace, options.status,
                     [&](const cb::row_loss_params& params, std::int64_t tokens) {
                         cb::launch("top_distillation_kernel", cb::top_distillation_kernel<T>, tokens,
                                    cb::row_threads, 0, ctx, params, 1.0 / static_cast<double>(temperature),
                                    reverse, over == student_softmax::all, values, indices, student,
                                    d_student);
                     });
}

template <class Rows, class Build>
std::size_t CrossEntropy::workspace_bytes(const cuda&, rows_view<Rows> student,
                                          const Sequences& sequences) const {
    return cuda_backend::row_loss_workspace_bytes(sequences, student.heads);
}

template <Storage T, class Build>
void CrossEntropy::operator()(const cuda& ctx, plane_view<const std::int32_t> labels, input_rows<T> student,
                              const Sequences& sequences, rows_view<T> d_student, LossValue* value,
                              workspace_view workspace, const LossOptions& options) const {
    namespace cb = cuda_backend;
    cb::check_student(1.0f, scale, student, sequences, d_student);
    cb::check_plane("labels", labels, sequences.batch, d_student.heads, sequences.length);
    cb::run_row_loss(ctx, *this, sequences, d_student.heads, labels, d_student.dim, value, workspace,
                     options.status, [&](const cb::row_loss_params& params, std::int64_t tokens) {
                         cb::launch("cross_entropy_kernel", cb::cross_entropy_kernel<T>, tokens,
                                    cb::row_threads, 0, ctx, params, labels, student, d_student);
                     });
}

template <class Rows, class Build>
std::size_t L2Distillation::workspace_bytes(const cuda&, rows_view<Rows> teacher,
                                            const Sequences& sequences) const {
    return cuda_backend::row_loss_workspace_bytes(sequences, teacher.heads);
}

template <Storage T, class Build>
void L2Distillation::operator()(const cuda& ctx, input_rows<T> teacher, input_rows<T> student,
                                const Sequences& sequences, rows_view<T> d_student, LossValue* value,
                                workspace_view workspace, const LossOptions& options) const {
    namespace cb = cuda_backend;
    cb::check_student(1.0f, scale, student, sequences, d_student);
    checks::check_rows("teacher", teacher, sequences.batch, d_student.heads, sequences.length, d_student.dim);
    cb::run_row_loss(ctx, *this, sequences, d_student.heads, {}, 0, value, workspace, options.status,
                     [&](const cb::row_loss_params& params, std::int64_t tokens) {
                         cb::launch("l2_kernel", cb::l2_kernel<T>, tokens, cb::row_threads, 0, ctx, params,
                                    teacher, student, d_student);
                     });
}

}  // namespace kvpolicy
