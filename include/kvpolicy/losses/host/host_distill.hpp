// Bodies of losses/distill.hpp on the host. One task a token; values are added up in the order of the tokens.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/losses/check.hpp>
#include <kvpolicy/losses/distill.hpp>

#include <algorithm>
#include <cmath>
#include <limits>

namespace kvpolicy {

namespace host_backend {

/// What a loss's rows may hold on the host.
template <class T>
inline constexpr bool row_type = std::is_same_v<T, float> || std::is_same_v<T, double>;

/// Whether a row has no NaN; refuses it by name where `refuse` says so.
template <class Real>
bool row_of_numbers(bool refuse, const char* name, std::int64_t b, std::int64_t h, std::int64_t t,
                    const Real* row, std::int32_t count) {
    bool bad = false;
    for (std::int32_t i = 0; i < count; ++i) {
        bad |= std::isnan(row[i]);
    }
    if (!bad) [[likely]] {
        return true;
    }
    std::int32_t at = 0;
    while (!std::isnan(row[at])) {
        ++at;
    }
    if (refuse) {
        detail::refuse(detail::text(name, "[", b, "][", h, "][", t, "][", at, "]").c_str(), "NaN",
                       "a number");
    }
    return false;
}

/// Checks all tokens: good(b, h, t, refuse).
template <class Good>
void check_tokens(const host& ctx, const Sequences& sequences, std::int32_t heads, Good&& good) {
    const std::int64_t length = sequences.length;
    checks::check_in_parallel(ctx, length * sequences.batch * heads, [&](std::int64_t task, bool refuse) {
        const std::int64_t b = task / length / heads, h = task / length % heads, t = task % length;
        return t >= sequences.length_of(b) || good(b, h, t, refuse);
    });
}

/// Calls body(b, h, t) for every token of every row plane, blocks of tokens in parallel.
template <class Body>
void for_each_token(const host& ctx, const Sequences& sequences, std::int32_t heads, Body&& body) {
    constexpr std::int64_t block = 16;
    const std::int64_t blocks = (sequences.length + block - 1) / block;
    ctx.parallel_for(blocks * sequences.batch * heads, [&](std::int64_t task, int thread) {
        const std::int64_t b = task / blocks / heads;
        const std::int64_t h = task / blocks % heads;
        const std::int64_t end = std::min<std::int64_t>(sequences.length_of(b), (task % blocks + 1) * block);
        for (std::int64_t t = task % blocks * block; t < end; ++t) {
            body(b, h, t, thread);
        }
    });
}

/// The sum over tokens of body(b, h, t), each computed by whichever thread, added up in one order: every
/// block of tokens is one term.
template <class Body>
double sum_over_tokens(const host& ctx, const Sequences& sequences, std::int32_t heads, Body&& body) {
    constexpr std::int64_t block = 16;
    constexpr std::int64_t round = 256;  // blocks whose sums are held at once
    const std::int64_t blocks = (sequences.length + block - 1) / block;
    const std::int64_t all = blocks * sequences.batch * heads;
    double total = 0.0;
    for (std::int64_t first = 0; first < all; first += round) {
        double sums[round];
        const std::int64_t count = std::min(round, all - first);
        ctx.parallel_for(count, [&](std::int64_t i) {
            const std::int64_t task = first + i;
            const std::int64_t b = task / blocks / heads;
            const std::int64_t h = task / blocks % heads;
            const std::int64_t end =
                std::min<std::int64_t>(sequences.length_of(b), (task % blocks + 1) * block);
            double sum = 0.0;
            for (std::int64_t t = task % blocks * block; t < end; ++t) {
                sum += body(b, h, t);
            }
            sums[i] = sum;
        });
        for (std::int64_t i = 0; i < count; ++i) {
            total += sums[i];
        }
    }
    return total;
}

inline std::int64_t tokens_of(const Sequences& sequences) {
    std::int64_t count = 0;
    for (std::int32_t b = 0; b < sequences.batch; ++b) {
        count += sequences.length_of(b);
    }
    return count;
}

/// exp(z[i] - largest) sums in double: log sum exp of count numbers picked by `at`.
template <class Pick>
double log_sum_exp(std::int32_t count, Pick&& at) {
    double most = -std::numeric_limits<double>::infinity();
    for (std::int32_t i = 0; i < count; ++i) {
        most = std::max(most, at(i));
    }
    if (std::isinf(most)) {
        return most;
    }
    double sum = 0.0;
    for (std::int32_t i = 0; i < count; ++i) {
        sum += std::exp(at(i) - most);
    }
    return most + std::log(sum);
}

/// One token of TopDistillation. Overwrites d[0, vocabulary).
template <class Real>
double distill_token(const TopDistillation& loss, const Real* values, const std::int32_t* indices,
                     std::int32_t count, const Real* student, std::int32_t vocabulary, double mean, Real* d) {
    const double inverse = 1.0 / static_cast<double>(loss.temperature);
    const auto of_teacher = [&](std::int32_t i) { return static_cast<double>(values[i]) * inverse; };
    const auto of_student = [&](std::int32_t i) {
        return static_cast<double>(student[indices[i]]) * inverse;
    };
    const double teacher_lse = log_sum_exp(count, of_teacher);
    const double student_lse = log_sum_exp(count, of_student);
    double value = 0.0;
    for (std::int32_t i = 0; i < count; ++i) {
        const double log_p = of_teacher(i) - teacher_lse;
        const double log_s = of_student(i) - student_lse;
        const double weight = std::exp(loss.reverse ? log_s : log_p);
        // A logit of -infinity has weight 0, and 0 log 0 is 0.
        if (weight > 0.0) {
            value += weight * (loss.reverse ? log_s - log_p : log_p - log_s);
        }
    }
    std::fill_n(d, vocabulary, Real(0));
    for (std::int32_t i = 0; i < count; ++i) {
        const double log_p = of_teacher(i) - teacher_lse;
        const double log_s = of_student(i) - student_lse;
        const double s = std::exp(log_s);
        const double slope = !loss.reverse ? s - std::exp(log_p)
                             : s > 0.0     ? s * (log_s - log_p - value)
                                           : 0.0;
        d[indices[i]] = static_cast<Real>(mean * inverse * slope);
    }
    return mean * value;
}

/// indices[0, count) of the largest logits, in order. `all` has space for every index.
template <class Real>
void select_top(const Real* logits, std::int32_t vocabulary, std::int32_t count, std::int32_t* all) {
    for (std::int32_t i = 0; i < vocabulary; ++i) {
        all[i] = i;
    }
    const auto before = [&](std::int32_t a, std::int32_t b) {
        return logits[a] > logits[b] || (logits[a] == logits[b] && a < b);
    };
    if (count < vocabulary) {
        std::nth_element(all, all + count, all + vocabulary, before);
    }
    std::sort(all, all + count, before);
}

inline std::size_t index_row_bytes(std::int32_t vocabulary) {
    return detail::aligned_size(static_cast<std::size_t>(vocabulary) * sizeof(std::int32_t));
}

/// Sequences, and the shapes of student and d_student, which are the same.
template <class Real>
void check_student(const Sequences& sequences, const rows_view<const Real>& student,
                   const rows_view<Real>& d_student) {
    checks::check_sequences(sequences, d_student.batch, d_student.length);
    checks::check_rows("d_student", d_student, d_student.batch, d_student.heads, sequences.length,
                       d_student.dim);
    checks::check_rows("student", student, d_student.batch, d_student.heads, sequences.length, d_student.dim);
}

}  // namespace host_backend

inline std::size_t top_logits_workspace_bytes(const host& ctx, std::int32_t vocabulary) {
    detail::require(vocabulary >= 0, "vocabulary", vocabulary, "0 or more");
    return static_cast<std::size_t>(ctx.threads()) * host_backend::index_row_bytes(vocabulary) +
           detail::alignment;
}

template <Storage Real>
void top_logits(const host& ctx, std::type_identity_t<rows_view<const Real>> logits,
                const Sequences& sequences, rows_view<Real> values, rows_view<std::int32_t> indices,
                workspace_view workspace, const LossOptions& options) {
    namespace hb = host_backend;
    static_assert(hb::row_type<Real>, "kvpolicy: losses on the host take rows of float or double");
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return top_logits<Real>(ctx, logits, repaired.sequences, values, indices, workspace, options);
    }
    checks::check_sequences(sequences, logits.batch, logits.length);
    detail::require(values.dim >= 1 && values.dim <= logits.dim, "values.dim", values.dim,
                    [&] { return detail::text("1 to the logits of a token, ", logits.dim); });
    checks::check_rows("logits", logits, values.batch, values.heads, sequences.length, logits.dim);
    checks::check_rows("values", values, values.batch, values.heads, sequences.length, values.dim);
    checks::check_rows("indices", indices, values.batch, values.heads, sequences.length, values.dim);
    hb::check_tokens(
        ctx, sequences, logits.heads, [&](std::int64_t b, std::int64_t h, std::int64_t t, bool refuse) {
            return hb::row_of_numbers(refuse, "logits", b, h, t, logits.row(b, h, t), logits.dim);
        });
    checks::check_workspace(workspace, top_logits_workspace_bytes(ctx, logits.dim));
    std::byte* memory = detail::aligned(workspace.data);
    const std::size_t stride = hb::index_row_bytes(logits.dim);
    hb::for_each_token(
        ctx, sequences, logits.heads, [&](std::int64_t b, std::int64_t h, std::int64_t t, int thread) {
            auto* all = reinterpret_cast<std::int32_t*>(memory + static_cast<std::size_t>(thread) * stride);
            hb::select_top(logits.row(b, h, t), logits.dim, values.dim, all);
            std::copy_n(all, values.dim, indices.row(b, h, t));
            for (std::int32_t i = 0; i < values.dim; ++i) {
                values.row(b, h, t)[i] = logits.row(b, h, t)[all[i]];
            }
        });
}

template <class Rows>
std::size_t TopDistillation::workspace_bytes(const host& ctx, rows_view<Rows> teacher,
                                             const Sequences&) const {
    detail::require(top >= 1, "top", top, "1 or more");
    checks::check_extents("teacher", teacher);
    const auto count = static_cast<std::size_t>(std::clamp(top, 1, std::max(teacher.dim, 1)));
    const auto rows = static_cast<std::size_t>(teacher.batch) * static_cast<std::size_t>(teacher.heads) *
                      static_cast<std::size_t>(teacher.length);
    return top_logits_workspace_bytes(ctx, teacher.dim) + detail::alignment +
           rows * count * (sizeof(Rows) + sizeof(std::int32_t));
}

template <class Rows>
std::size_t TopDistillation::workspace_bytes(const host&, rows_view<Rows> values,
                                             rows_view<const std::int32_t>, const Sequences&) const {
    checks::check_extents("values", values);
    return 0;
}

template <Storage Real>
void TopDistillation::operator()(const host& ctx, std::type_identity_t<rows_view<const Real>> teacher,
                                 std::type_identity_t<rows_view<const Real>> student,
                                 const Sequences& sequences, rows_view<Real> d_student, LossValue* value,
                                 workspace_view workspace, const LossOptions& options) const {
    namespace hb = host_backend;
    static_assert(hb::row_type<Real>, "kvpolicy: losses on the host take rows of float or double");
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return (*this)(ctx, teacher, student, repaired.sequences, d_student, value, workspace, options);
    }
    checks::check_value(value);
    detail::require(top >= 1, "top", top, "1 or more");
    checks::check_temperature(temperature, scale);
    checks::check_sequences(sequences, d_student.batch, d_student.length);
    checks::check_rows("teacher", teacher, d_student.batch, d_student.heads, sequences.length, d_student.dim);
    checks::check_workspace(workspace, workspace_bytes(ctx, teacher, sequences));
    hb::check_tokens(
        ctx, sequences, teacher.heads, [&](std::int64_t b, std::int64_t h, std::int64_t t, bool refuse) {
            return hb::row_of_numbers(refuse, "teacher", b, h, t, teacher.row(b, h, t), teacher.dim);
        });
    const std::int32_t count = std::min(top, teacher.dim);
    if (count == 0) {
        *value = {};
        return;
    }
    const std::size_t select = top_logits_workspace_bytes(ctx, teacher.dim);
    const auto rows = static_cast<std::size_t>(teacher.batch) * static_cast<std::size_t>(teacher.heads) *
                      static_cast<std::size_t>(teacher.length) * static_cast<std::size_t>(count);
    auto* values = reinterpret_cast<Real*>(detail::aligned(static_cast<std::byte*>(workspace.data) + select));
    auto* indices = reinterpret_cast<std::int32_t*>(values + rows);
    const auto values_view = view_bhsd(values, teacher.batch, teacher.heads, teacher.length, count);
    const auto indices_view = view_bhsd(indices, teacher.batch, teacher.heads, teacher.length, count);
    top_logits<Real>(ctx, teacher, sequences, values_view, indices_view, {workspace.data, select});
    (*this)(ctx, values_view, rows_view<const std::int32_t>(indices_view), student, sequences, d_student,
            value, {});
}

template <Storage Real>
void TopDistillation::operator()(const host& ctx, std::type_identity_t<rows_view<const Real>> values,
                                 rows_view<const std::int32_t> indices,
                                 std::type_identity_t<rows_view<const Real>> student,
                                 const Sequences& sequences, rows_view<Real> d_student, LossValue* value,
                                 workspace_view workspace, const LossOptions& options) const {
    namespace hb = host_backend;
    static_assert(hb::row_type<Real>, "kvpolicy: losses on the host take rows of float or double");
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return (*this)(ctx, values, indices, student, repaired.sequences, d_student, value, workspace,
                       options);
    }
    checks::check_value(value);
    checks::check_temperature(temperature, scale);
    hb::check_student<Real>(sequences, student, d_student);
    const std::int32_t heads = d_student.heads, vocabulary = d_student.dim;
    checks::check_rows("values", values, d_student.batch, heads, sequences.length, values.dim);
    checks::check_rows("indices", indices, d_student.batch, heads, sequences.length, values.dim);
    hb::check_tokens(ctx, sequences, heads, [&](std::int64_t b, std::int64_t h, std::int64_t t, bool refuse) {
        bool good = hb::row_of_numbers(refuse, "values", b, h, t, values.row(b, h, t), values.dim);
        for (std::int32_t i = 0; good && i < values.dim; ++i) {
            const std::int32_t at = indices.row(b, h, t)[i];
            if (at < 0 || at >= vocabulary) {
                if (!refuse) {
                    return false;
                }
                detail::refuse(detail::text("indices[", b, "][", h, "][", t, "][", i, "]").c_str(), at,
                               detail::text("0 to ", vocabulary - 1));
            }
            const Real z = student.row(b, h, t)[at];
            good = !std::isnan(z) ||
                   hb::row_of_numbers(refuse, "student", b, h, t, student.row(b, h, t), vocabulary);
        }
        return good;
    });
    LossValue result;
    result.count = hb::tokens_of(sequences) * heads;
    if (result.count == 0) {
        *value = result;
        return;
    }
    const double mean = static_cast<double>(scale) / static_cast<double>(result.count);
    result.value =
        hb::sum_over_tokens(ctx, sequences, heads, [&](std::int64_t b, std::int64_t h, std::int64_t t) {
            return hb::distill_token(*this, values.row(b, h, t), indices.row(b, h, t), values.dim,
                                     student.row(b, h, t), vocabulary, mean, d_student.row(b, h, t));
        });
    *value = result;
}

template <class Rows>
std::size_t CrossEntropy::workspace_bytes(const host&, rows_view<Rows> student, const Sequences&) const {
    checks::check_extents("student", student);
    return 0;
}

template <Storage Real>
void CrossEntropy::operator()(const host& ctx, plane_view<const std::int32_t> labels,
                              std::type_identity_t<rows_view<const Real>> student, const Sequences& sequences,
                              rows_view<Real> d_student, LossValue* value, workspace_view workspace,
                              const LossOptions& options) const {
    namespace hb = host_backend;
    static_assert(hb::row_type<Real>, "kvpolicy: losses on the host take rows of float or double");
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return (*this)(ctx, labels, student, repaired.sequences, d_student, value, workspace, options);
    }
    checks::check_value(value);
    checks::check_temperature(1.0f, scale);
    hb::check_student<Real>(sequences, student, d_student);
    const std::int32_t heads = d_student.heads, vocabulary = d_student.dim;
    checks::check_plane("labels", labels, d_student.batch, heads, sequences.length);
    LossValue result;
    for (std::int32_t b = 0; b < labels.batch; ++b) {
        for (std::int32_t h = 0; h < heads; ++h) {
            for (std::int32_t t = 0; t < sequences.length_of(b); ++t) {
                const std::int32_t label = labels.head(b, h)[t];
                if (label < -1 || label >= vocabulary) [[unlikely]] {
                    detail::refuse(detail::text("labels[", b, "][", h, "][", t, "]").c_str(), label,
                                   detail::text("-1 (none) to ", vocabulary - 1));
                }
                result.count += label >= 0 ? 1 : 0;
            }
        }
    }
    hb::check_tokens(ctx, sequences, heads, [&](std::int64_t b, std::int64_t h, std::int64_t t, bool refuse) {
        return labels.head(b, h)[t] < 0 ||
               hb::row_of_numbers(refuse, "student", b, h, t, student.row(b, h, t), vocabulary);
    });
    const double mean =
        result.count > 0 ? static_cast<double>(scale) / static_cast<double>(result.count) : 0.0;
    result.value =
        hb::sum_over_tokens(ctx, sequences, heads, [&](std::int64_t b, std::int64_t h, std::int64_t t) {
            const std::int32_t label = labels.head(b, h)[t];
            const Real* z = student.row(b, h, t);
            Real* d = d_student.row(b, h, t);
            if (label < 0) {
                std::fill_n(d, vocabulary, Real(0));
                return 0.0;
            }
            const auto at = [&](std::int32_t i) { return static_cast<double>(z[i]); };
            const double lse = hb::log_sum_exp(vocabulary, at);
            for (std::int32_t i = 0; i < vocabulary; ++i) {
                d[i] = static_cast<Real>(mean * (std::exp(at(i) - lse) - (i == label ? 1.0 : 0.0)));
            }
            return mean * (lse - at(label));
        });
    *value = result;
}

template <class Rows>
std::size_t L2Distillation::workspace_bytes(const host&, rows_view<Rows> teacher, const Sequences&) const {
    checks::check_extents("teacher", teacher);
    return 0;
}

template <Storage Real>
void L2Distillation::operator()(const host& ctx, std::type_identity_t<rows_view<const Real>> teacher,
                                std::type_identity_t<rows_view<const Real>> student,
                                const Sequences& sequences, rows_view<Real> d_student, LossValue* value,
                                workspace_view workspace, const LossOptions& options) const {
    namespace hb = host_backend;
    static_assert(hb::row_type<Real>, "kvpolicy: losses on the host take rows of float or double");
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return (*this)(ctx, teacher, student, repaired.sequences, d_student, value, workspace, options);
    }
    checks::check_value(value);
    checks::check_temperature(1.0f, scale);
    hb::check_student<Real>(sequences, student, d_student);
    const std::int32_t heads = d_student.heads, dim = d_student.dim;
    checks::check_rows("teacher", teacher, d_student.batch, heads, sequences.length, dim);
    hb::check_tokens(ctx, sequences, heads, [&](std::int64_t b, std::int64_t h, std::int64_t t, bool refuse) {
        return hb::row_of_numbers(refuse, "teacher", b, h, t, teacher.row(b, h, t), dim) &&
               hb::row_of_numbers(refuse, "student", b, h, t, student.row(b, h, t), dim);
    });
    LossValue result;
    result.count = hb::tokens_of(sequences) * heads;
    if (result.count == 0) {
        *value = result;
        return;
    }
    const double mean =
        static_cast<double>(scale) / (static_cast<double>(result.count) * static_cast<double>(dim));
    result.value =
        hb::sum_over_tokens(ctx, sequences, heads, [&](std::int64_t b, std::int64_t h, std::int64_t t) {
            double sum = 0.0;
            for (std::int32_t i = 0; i < dim; ++i) {
                const double off = static_cast<double>(student.row(b, h, t)[i]) -
                                   static_cast<double>(teacher.row(b, h, t)[i]);
                sum += off * off;
                d_student.row(b, h, t)[i] = static_cast<Real>(2.0 * mean * off);
            }
            return mean * sum;
        });
    *value = result;
}

}  // namespace kvpolicy
