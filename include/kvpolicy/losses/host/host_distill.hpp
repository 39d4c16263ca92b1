// Bodies of losses/distill.hpp on the host. One task a token; values are added up in the order of the tokens.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/losses/check.hpp>
#include <kvpolicy/losses/distill.hpp>
#include <kvpolicy/policies/ranking.hpp>

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

/// Checks all tokens: good(b, h, t, refuse). A token that is not good sets status_not_finite; without a
/// status it is refused.
template <class Good>
void check_tokens(const host& ctx, const Sequences& sequences, std::int32_t heads, std::uint32_t* status,
                  Good&& good) {
    const std::int64_t length = sequences.length;
    checks::check_in_parallel(ctx, length * sequences.batch * heads, [&](std::int64_t task, bool refuse) {
        const std::int64_t b = task / length / heads, h = task / length % heads, t = task % length;
        return t >= sequences.length_of(b) || good(b, h, t, refuse) ||
               checks::reported(status, b, status_not_finite);
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

/// One token of TopDistillation. Overwrites d[0, vocabulary). Indices outside the row do not count.
template <class Real>
double distill_token(const TopDistillation& loss, const Real* values, const std::int32_t* indices,
                     std::int32_t count, const Real* student, std::int32_t vocabulary, double mean, Real* d) {
    constexpr double none = -std::numeric_limits<double>::infinity();
    const double inverse = 1.0 / static_cast<double>(loss.temperature);
    const auto counts = [&](std::int32_t i) { return indices[i] >= 0 && indices[i] < vocabulary; };
    const auto of_teacher = [&](std::int32_t i) {
        return counts(i) ? static_cast<double>(values[i]) * inverse : none;
    };
    const auto of_student = [&](std::int32_t i) {
        return counts(i) ? static_cast<double>(student[indices[i]]) * inverse : none;
    };
    const double teacher_lse = log_sum_exp(count, of_teacher);
    const bool all = loss.over == student_softmax::all;
    const auto of_row = [&](std::int32_t i) { return static_cast<double>(student[i]) * inverse; };
    const double student_lse = all ? log_sum_exp(vocabulary, of_row) : log_sum_exp(count, of_student);
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
    for (std::int32_t i = 0; i < vocabulary; ++i) {
        d[i] = all ? static_cast<Real>(mean * inverse * std::exp(of_row(i) - student_lse)) : Real(0);
    }
    for (std::int32_t i = 0; i < count; ++i) {
        if (!counts(i)) {
            continue;
        }
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

/// indices[0, count) of the largest logits, in order, NaN last. `all` has space for every index.
template <class Real>
void select_top(const Real* logits, std::int32_t vocabulary, std::int32_t count, std::int32_t* all) {
    for (std::int32_t i = 0; i < vocabulary; ++i) {
        all[i] = i;
    }
    const auto before = [&](std::int32_t a, std::int32_t b) {
        return ranks_before(static_cast<double>(logits[a]), a, static_cast<double>(logits[b]), b);
    };
    if (count < vocabulary) {
        std::nth_element(all, all + count, all + vocabulary, before);
    }
    std::sort(all, all + count, before);
}

inline std::size_t index_row_bytes(std::int32_t vocabulary) {
    return detail::aligned_size(static_cast<std::size_t>(vocabulary) * sizeof(std::int32_t));
}

/// What losses of rows share: their numbers, sequences, the shapes of student and d_student, which are the
/// same, and the memory for the value.
template <class Real>
void check_row_loss(float temperature, float scale, const Sequences& sequences,
                    const rows_view<const Real>& student, const rows_view<Real>& d_student,
                    const LossValue* value) {
    static_assert(row_type<Real>, "kvpolicy: losses on the host take rows of float or double");
    checks::check_value(value);
    checks::check_temperature(temperature, scale);
    checks::check_sequences(sequences, d_student.batch, d_student.length);
    checks::check_rows("d_student", d_student, d_student.batch, d_student.heads, sequences.length,
                       d_student.dim);
    checks::check_rows("student", student, d_student.batch, d_student.heads, sequences.length, d_student.dim);
}

/// The value of a loss that is a mean over `count` tokens: the sum of token(b, h, t, mean), where mean =
/// scale / (count * numbers).
template <class Token>
LossValue mean_over_tokens(const host& ctx, const Sequences& sequences, std::int32_t heads,
                           std::int64_t count, float scale, std::int32_t numbers, const Token& token) {
    LossValue result{0.0, count};
    const double over = static_cast<double>(count) * static_cast<double>(numbers);
    const double mean = count > 0 ? static_cast<double>(scale) / over : 0.0;
    result.value =
        sum_over_tokens(ctx, sequences, heads,
                        [&](std::int64_t b, std::int64_t h, std::int64_t t) { return token(b, h, t, mean); });
    return result;
}

}  // namespace host_backend

inline std::size_t top_logits_workspace_bytes(const host& ctx, std::int32_t vocabulary) {
    detail::require(vocabulary >= 0, "vocabulary", vocabulary, "0 or more");
    return static_cast<std::size_t>(ctx.threads()) * host_backend::index_row_bytes(vocabulary) +
           detail::alignment;
}

template <Storage Real>
void top_logits(const host& ctx, input_rows<Real> logits, const Sequences& sequences, rows_view<Real> values,
                rows_view<std::int32_t> indices, workspace_view workspace, const LossOptions& options) {
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
    hb::check_tokens(ctx, sequences, logits.heads, options.status,
                     [&](std::int64_t b, std::int64_t h, std::int64_t t, bool refuse) {
                         return hb::row_of_numbers(refuse, "logits", b, h, t, logits.row(b, h, t),
                                                   logits.dim);
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
std::size_t TopDistillation::workspace_bytes(const host&, rows_view<Rows> values,
                                             rows_view<const std::int32_t>, const Sequences&) const {
    checks::check_extents("values", values);
    return 0;
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

template <Storage Real>
void TopDistillation::operator()(const host& ctx, input_rows<Real> teacher, input_rows<Real> student,
                                 const Sequences& sequences, rows_view<Real> d_student, LossValue* value,
                                 workspace_view workspace, const LossOptions& options) const {
    namespace hb = host_backend;
    detail::require(top >= 1, "top", top, "1 or more");
    checks::check_student_softmax(static_cast<std::int32_t>(over), reverse);
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return (*this)(ctx, teacher, student, repaired.sequences, d_student, value, workspace, options);
    }
    hb::check_row_loss<Real>(temperature, scale, sequences, student, d_student, value);
    checks::check_rows("teacher", teacher, d_student.batch, d_student.heads, sequences.length, d_student.dim);
    checks::check_workspace(workspace, workspace_bytes(ctx, teacher, sequences));
    hb::check_tokens(ctx, sequences, teacher.heads, options.status,
                     [&](std::int64_t b, std::int64_t h, std::int64_t t, bool refuse) {
                         return hb::row_of_numbers(refuse, "teacher", b, h, t, teacher.row(b, h, t),
                                                   teacher.dim);
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
    top_logits<Real>(ctx, teacher, sequences, values_view, indices_view, {workspace.data, select}, options);
    (*this)(ctx, values_view, rows_view<const std::int32_t>(indices_view), student, sequences, d_student,
            value, {}, options);
}

template <Storage Real>
void TopDistillation::operator()(const host& ctx, input_rows<Real> values,
                                 rows_view<const std::int32_t> indices, input_rows<Real> student,
                                 const Sequences& sequences, rows_view<Real> d_student, LossValue* value,
                                 workspace_view workspace, const LossOptions& options) const {
    namespace hb = host_backend;
    checks::check_student_softmax(static_cast<std::int32_t>(over), reverse);
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return (*this)(ctx, values, indices, student, repaired.sequences, d_student, value, workspace,
                       options);
    }
    hb::check_row_loss<Real>(temperature, scale, sequences, student, d_student, value);
    const std::int32_t heads = d_student.heads, vocabulary = d_student.dim;
    checks::check_rows("values", values, d_student.batch, heads, sequences.length, values.dim);
    checks::check_rows("indices", indices, d_student.batch, heads, sequences.length, values.dim);
    hb::check_tokens(
        ctx, sequences, heads, options.status,
        [&](std::int64_t b, std::int64_t h, std::int64_t t, bool refuse) {
            const Real *of_teacher = values.row(b, h, t), *of_student = student.row(b, h, t);
            bool good = over == student_softmax::top ||
                        hb::row_of_numbers(false, "student", b, h, t, of_student, vocabulary);
            for (std::int32_t i = 0; i < values.dim; ++i) {
                const std::int32_t at = indices.row(b, h, t)[i];
                if (at >= 0 && at < vocabulary) {
                    good = good && !std::isnan(of_teacher[i]) && !std::isnan(of_student[at]);
                } else if (!checks::reported(options.status, b, status_bad_index)) {
                    if (!refuse) {
                        return false;
                    }
                    detail::refuse(detail::text("indices[", b, "][", h, "][", t, "][", i, "]").c_str(), at,
                                   detail::text("0 to ", vocabulary - 1));
                }
            }
            return good || (hb::row_of_numbers(refuse, "values", b, h, t, of_teacher, values.dim) &&
                            hb::row_of_numbers(refuse, "student", b, h, t, of_student, vocabulary));
        });
    *value = hb::mean_over_tokens(ctx, sequences, heads, hb::tokens_of(sequences) * heads, scale, 1,
                                  [&](std::int64_t b, std::int64_t h, std::int64_t t, double mean) {
                                      return hb::distill_token(
                                          *this, values.row(b, h, t), indices.row(b, h, t), values.dim,
                                          student.row(b, h, t), vocabulary, mean, d_student.row(b, h, t));
                                  });
}

template <class Rows>
std::size_t CrossEntropy::workspace_bytes(const host&, rows_view<Rows> student, const Sequences&) const {
    checks::check_extents("student", student);
    return 0;
}

template <Storage Real>
void CrossEntropy::operator()(const host& ctx, plane_view<const std::int32_t> labels,
                              input_rows<Real> student, const Sequences& sequences, rows_view<Real> d_student,
                              LossValue* value, workspace_view workspace, const LossOptions& options) const {
    namespace hb = host_backend;
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return (*this)(ctx, labels, student, repaired.sequences, d_student, value, workspace, options);
    }
    hb::check_row_loss<Real>(1.0f, scale, sequences, student, d_student, value);
    const std::int32_t heads = d_student.heads, vocabulary = d_student.dim;
    checks::check_plane("labels", labels, d_student.batch, heads, sequences.length);
    const auto counts = [&](std::int32_t label) { return label >= 0 && label < vocabulary; };
    std::int64_t count = 0;
    for (std::int32_t b = 0; b < labels.batch; ++b) {
        for (std::int32_t h = 0; h < heads; ++h) {
            for (std::int32_t t = 0; t < sequences.length_of(b); ++t) {
                const std::int32_t label = labels.head(b, h)[t];
                count += counts(label) ? 1 : 0;
                if (counts(label) || label == -1 || checks::reported(options.status, b, status_bad_index))
                    [[likely]] {
                    continue;
                }
                detail::refuse(detail::text("labels[", b, "][", h, "][", t, "]").c_str(), label,
                               detail::text("-1 (none) to ", vocabulary - 1));
            }
        }
    }
    hb::check_tokens(ctx, sequences, heads, options.status,
                     [&](std::int64_t b, std::int64_t h, std::int64_t t, bool refuse) {
                         return !counts(labels.head(b, h)[t]) ||
                                hb::row_of_numbers(refuse, "student", b, h, t, student.row(b, h, t),
                                                   vocabulary);
                     });
    *value = hb::mean_over_tokens(
        ctx, sequences, heads, count, scale, 1,
        [&](std::int64_t b, std::int64_t h, std::int64_t t, double mean) {
            const std::int32_t label = labels.head(b, h)[t];
            const Real* z = student.row(b, h, t);
            Real* d = d_student.row(b, h, t);
            if (!counts(label)) {
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
}

template <class Rows>
std::size_t L2Distillation::workspace_bytes(const host&, rows_view<Rows> teacher, const Sequences&) const {
    checks::check_extents("teacher", teacher);
    return 0;
}

template <Storage Real>
void L2Distillation::operator()(const host& ctx, input_rows<Real> teacher, input_rows<Real> student,
                                const Sequences& sequences, rows_view<Real> d_student, LossValue* value,
                                workspace_view workspace, const LossOptions& options) const {
    namespace hb = host_backend;
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return (*this)(ctx, teacher, student, repaired.sequences, d_student, value, workspace, options);
    }
    hb::check_row_loss<Real>(1.0f, scale, sequences, student, d_student, value);
    const std::int32_t heads = d_student.heads, dim = d_student.dim;
    checks::check_rows("teacher", teacher, d_student.batch, heads, sequences.length, dim);
    hb::check_tokens(ctx, sequences, heads, options.status,
                     [&](std::int64_t b, std::int64_t h, std::int64_t t, bool refuse) {
                         return hb::row_of_numbers(refuse, "teacher", b, h, t, teacher.row(b, h, t), dim) &&
                                hb::row_of_numbers(refuse, "student", b, h, t, student.row(b, h, t), dim);
                     });
    *value = hb::mean_over_tokens(
        ctx, sequences, heads, hb::tokens_of(sequences) * heads, scale, dim,
        [&](std::int64_t b, std::int64_t h, std::int64_t t, double mean) {
            double sum = 0.0;
            for (std::int32_t i = 0; i < dim; ++i) {
                const double off = static_cast<double>(student.row(b, h, t)[i]) -
                                   static_cast<double>(teacher.row(b, h, t)[i]);
                sum += off * off;
                d_student.row(b, h, t)[i] = static_cast<Real>(2.0 * mean * off);
            }
            if (std::isnan(sum)) {  // also a difference of infinities
                static_cast<void>(checks::reported(options.status, b, status_not_finite));
            }
            return mean * sum;
        });
}

}  // namespace kvpolicy
