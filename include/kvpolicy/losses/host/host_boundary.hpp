// Bodies of losses/boundary.hpp on the host: one sweep of the teacher's top-k update collects the examples, a second pass over
// them gives value and gradient.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/random.hpp>
#include <kvpolicy/core/workspace.hpp>
#include <kvpolicy/losses/boundary.hpp>
#include <kvpolicy/losses/check.hpp>
#include <kvpolicy/masks/host/host_build.hpp>
#include <kvpolicy/masks/host/host_log_bias.hpp>
#include <kvpolicy/masks/top_k_set.hpp>

#include <algorithm>
#include <cmath>

namespace kvpolicy {

namespace host_backend {

/// What a (sequence, head) has of the examples, beside its rows.
struct boundary_sums {
    std::int64_t sampled, count, kept, agreed;
    double value, log_gamma;
};

/// The memory of one (sequence, head), rows of S.
struct boundary_rows {
    std::int32_t* drawn;     // how often position q was drawn
    std::int32_t* boundary;  // t_bnd at q; -1: no example
    double* margin;          // Delta at q, with the sign of y
    double* gradient;        // d r_t
    detail::top_k_entry* top_k_entries;
    static std::size_t bytes(std::int32_t length, std::int64_t capacity) {
        const auto count = static_cast<std::size_t>(length);
        return 2 * detail::aligned_size(count * sizeof(std::int32_t)) +
               2 * detail::aligned_size(count * sizeof(double)) +
               detail::aligned_size(static_cast<std::size_t>(capacity) * sizeof(detail::top_k_entry));
    }
    boundary_rows(std::byte* at, std::int32_t length) {
        const auto count = static_cast<std::size_t>(length);
        drawn = reinterpret_cast<std::int32_t*>(at);
        at += detail::aligned_size(count * sizeof(std::int32_t));
        boundary = reinterpret_cast<std::int32_t*>(at);
        at += detail::aligned_size(count * sizeof(std::int32_t));
        margin = reinterpret_cast<double*>(at);
        at += detail::aligned_size(count * sizeof(double));
        gradient = reinterpret_cast<double*>(at);
        at += detail::aligned_size(count * sizeof(double));
        top_k_entries = reinterpret_cast<detail::top_k_entry*>(at);
    }
};

/// log(1 + exp(x)) without overflow.
inline double softplus(double x) { return std::max(x, 0.0) + std::log1p(std::exp(-std::abs(x))); }

/// The first query of a segment with a saturated budget, relative to it.
inline std::int64_t first_saturated(const HeadParams& head_params) {
    return std::int64_t{head_params.sinks} + head_params.window + head_params.budget;
}

/// Draws the query positions of one (sequence, head).
template <class P>
std::int64_t draw_positions(const BoundarySampler& sampler, const HeadParams& head_params,
                            const Sequences& sequences, std::int32_t b, std::uint64_t stream,
                            std::int32_t* drawn) {
    std::int64_t valid = 0;
    const std::int64_t from = first_saturated(head_params);
    for_each_segment<P>(sequences, b, [&](std::int32_t begin, std::int32_t end) {
        valid += std::max<std::int64_t>(0, end - begin - from);
    });
    std::fill_n(drawn, sequences.length_of(b), 0);
    std::int64_t total = 0;
    std::uint64_t index = 0;
    for_each_segment<P>(sequences, b, [&](std::int32_t begin, std::int32_t end) {
        const std::int64_t here = end - begin - from;
        if (here <= 0) {
            return;
        }
        std::int32_t* first = drawn + begin + from;
        if (sampler.count >= valid) {
            std::fill_n(first, here, 1);
            total += here;
            return;
        }
        // Shares are rounded up, so that no segment goes without.
        const std::int64_t count = (std::int64_t{sampler.count} * here + valid - 1) / valid;
        const auto late = std::llround(static_cast<double>(sampler.late) * static_cast<double>(count));
        const auto slots = static_cast<std::uint32_t>(here);
        for (std::int64_t i = 0; i < count; ++i, index += 2) {
            std::uint32_t slot = random_below(slots, sampler.seed, stream, index);
            if (i < late) {
                slot = std::max(slot, random_below(slots, sampler.seed, stream, index + 1));
            }
            ++first[slot];
        }
        total += count;
    });
    return total;
}

}  // namespace host_backend

template <AnyPolicy P>
std::size_t BoundaryLoss::workspace_bytes(const host&, const P& policy, const Sequences& sequences,
                                          std::int32_t heads) const {
    namespace hb = host_backend;
    checks::check_shape(sequences, heads);
    policy.check_layer(layer, heads);
    const std::int64_t capacity = hb::top_k_capacity(policy, sequences, heads, layer);
    const auto tasks = static_cast<std::size_t>(sequences.batch) * static_cast<std::size_t>(heads);
    return tasks * hb::boundary_rows::bytes(sequences.length, capacity) +
           detail::aligned_size(tasks * sizeof(hb::boundary_sums)) + detail::alignment;
}

template <AnyPolicy P, class Real>
void BoundaryLoss::operator()(const host& on, const P& policy,
                              std::type_identity_t<plane_view<const Real>> scores,
                              plane_view<const float> target, const Sequences& sequences,
                              plane_view<Real> d_scores, double* d_log_gamma, BoundaryValue* value,
                              workspace_view workspace, const BoundaryOptions& options) const {
    namespace hb = host_backend;
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return (*this)(on, policy, scores, target, repaired.sequences, d_scores, d_log_gamma, value,
                       workspace, options);
    }
    static_assert(P::has_budget && !P::has_gate,
                  "kvpolicy: BoundaryLoss needs a policy with a TopKBudget and without a gate");
    const std::int32_t all_heads = d_scores.heads;
    const std::int32_t batch = d_scores.batch;
    checks::check_boundary(*this);
    checks::check_value(value);
    policy.check_layer(layer, all_heads);
    checks::check_boundary_layers(options.layers, all_heads);
    detail::require(options.scores_ready == nullptr, "options.scores_ready", "given", "null on the host");
    checks::check_whole_sequences(sequences, batch, d_scores.length);
    checks::check_plane("d_scores", d_scores, batch, all_heads, sequences.length);
    checks::check_plane("scores", scores, batch, all_heads, sequences.length);
    checks::check_plane("target", target, batch, all_heads, sequences.length);
    const auto params_of = [&](std::int32_t head) {
        HeadParams params = policy.params(layer, head);
        params.log_gamma = options.log_gamma != nullptr ? options.log_gamma[head] : params.log_gamma;
        return params;
    };
    for (std::int32_t b = 0; b < batch; ++b) {
        for (std::int32_t h = 0; h < all_heads; ++h) {
            const float* of_teacher = target.head(b, h);
            const Real* of_student = scores.head(b, h);
            hb::for_each_segment<P>(sequences, b, [&](std::int32_t begin, std::int32_t end) {
                hb::for_each_leaver(policy, params_of(h), end - begin, [&](std::int32_t at, std::int32_t) {
                    const std::int32_t t = begin + at;
                    hb::refuse_nan("target", b, h, t, of_teacher[t]);
                    if (std::isfinite(of_student[t])) [[likely]] {
                        return;
                    }
                    detail::refuse(detail::text("scores[", b, "][", h, "][", t, "]").c_str(), of_student[t],
                                   "a finite number");
                });
            });
        }
    }
    checks::check_workspace(workspace, workspace_bytes(on, policy, sequences, all_heads));

    // Each layer of the call is a loss of its own: its first head is first.
    BoundaryValue sum_over_layers;
    const std::int32_t heads = all_heads / options.layers;
    const std::int64_t tasks = std::int64_t{batch} * heads;
    const std::size_t row =
        hb::boundary_rows::bytes(sequences.length, hb::top_k_capacity(policy, sequences, all_heads, layer));
    std::byte* memory = detail::aligned(workspace.data);
    auto* sums = reinterpret_cast<hb::boundary_sums*>(memory + static_cast<std::size_t>(tasks) * row);
    const auto rows_of = [&](std::int64_t task) {
        return hb::boundary_rows(memory + static_cast<std::size_t>(task) * row, sequences.length);
    };

    for (std::int32_t of_call = 0; of_call < options.layers; ++of_call) {
        const std::int32_t first = of_call * heads;
        // The examples.
        on.parallel_for(tasks, [&](std::int64_t task) {
            const auto b = static_cast<std::int32_t>(task / heads);
            const auto h = static_cast<std::int32_t>(task % heads);
            const HeadParams head_params = params_of(first + h);
            const hb::boundary_rows rows = rows_of(task);
            const float* goal = target.head(b, first + h);
            const auto stream =
                (static_cast<std::uint64_t>(layer + of_call) << 40) + static_cast<std::uint64_t>(task);
            hb::boundary_sums mine{};
            mine.sampled = hb::draw_positions<P>(sampler, head_params, sequences, b, stream, rows.drawn);
            std::fill_n(rows.boundary, sequences.length_of(b), -1);
            hb::for_each_segment<P>(sequences, b, [&](std::int32_t begin, std::int32_t end) {
                if (end - begin <= hb::first_saturated(head_params) || head_params.budget == 0) {
                    return;
                }
                detail::top_k_set slots(rows.top_k_entries, head_params, rebase_limit);
                hb::for_each_leaver(policy, head_params, end - begin, [&](std::int32_t t, std::int32_t at) {
                    const auto outcome = slots.update(t, goal[begin + t], t, at);
                    const std::int32_t q = begin + at;
                    if (rows.drawn[q] == 0 || outcome.kind == detail::top_k_outcome::took_free_slot) {
                        return;
                    }
                    const detail::top_k_entry& worst = slots.worst();
                    if (worst.key == t) {
                        return;
                    }
                    const bool keeps = outcome.kind == detail::top_k_outcome::replaced;
                    const double margin = effective_score(goal[begin + t], head_params.log_gamma,
                                                          head_params.decay_step, t, at) -
                                          effective_score(worst.score, head_params.log_gamma,
                                                          head_params.decay_step, worst.key, at);
                    rows.boundary[q] = begin + worst.key;
                    // Two infinite targets of one sign are a tie. The sign bit carries the label, so -0 is a drop.
                    rows.margin[q] = std::copysign(margin == margin ? margin : 0.0, keeps ? 1.0 : -1.0);
                    mine.count += rows.drawn[q];
                    mine.kept += keeps ? rows.drawn[q] : 0;
                });
            });
            sums[task] = mine;
        });
        BoundaryValue result;
        for (std::int64_t task = 0; task < tasks; ++task) {
            result.sampled += sums[task].sampled;
            result.count += sums[task].count;
            result.kept += sums[task].kept;
        }

        // Value and gradient.
        const double mean =
            result.count > 0 ? static_cast<double>(scale) / static_cast<double>(result.count) : 0.0;
        const double tau = static_cast<double>(temperature);
        on.parallel_for(tasks, [&](std::int64_t task) {
            const auto b = static_cast<std::int32_t>(task / heads);
            const auto h = static_cast<std::int32_t>(task % heads);
            const HeadParams head_params = params_of(first + h);
            const hb::boundary_rows rows = rows_of(task);
            const Real* score = scores.head(b, first + h);
            const std::int32_t length = sequences.length_of(b);
            double weights[2] = {1.0, 1.0};  // of drops, of keeps
            std::int64_t count = 0, kept = 0;
            for (std::int32_t other = 0; other < batch; ++other) {
                count += sums[std::int64_t{other} * heads + h].count;
                kept += sums[std::int64_t{other} * heads + h].kept;
            }
            if (balance.on && kept > 0 && kept < count) {
                const double rho = static_cast<double>(kept) / static_cast<double>(count);
                const auto clip = [&](double w) {
                    return std::clamp(w, static_cast<double>(balance.least),
                                      static_cast<double>(balance.most));
                };
                weights[0] = clip(0.5 / (1.0 - rho));
                weights[1] = clip(0.5 / rho);
                const double over = (1.0 - rho) * weights[0] + rho * weights[1];
                weights[0] /= over;
                weights[1] /= over;
            }
            std::fill_n(rows.gradient, length, 0.0);
            hb::boundary_sums mine{};
            hb::for_each_segment<P>(sequences, b, [&](std::int32_t begin, std::int32_t end) {
                for (std::int32_t q = begin; q < end; ++q) {
                    const std::int32_t old = rows.boundary[q];
                    if (old < 0) {
                        continue;
                    }
                    const std::int32_t fresh = q - head_params.window;
                    const bool keeps = !std::signbit(rows.margin[q]);
                    const double y = keeps ? 1.0 : -1.0;
                    const std::int32_t age =
                        (q - fresh) / head_params.decay_step - (q - old) / head_params.decay_step;
                    const double delta =
                        static_cast<double>(score[fresh]) - static_cast<double>(score[old]) +
                        static_cast<double>(age) * static_cast<double>(head_params.log_gamma);
                    const double omega =
                        static_cast<double>(margin.omega_min) +
                        (1.0 - static_cast<double>(margin.omega_min)) *
                            detail::sigmoid(y * rows.margin[q] / static_cast<double>(margin.temperature));
                    const double weight = mean * omega * weights[keeps ? 1 : 0] * rows.drawn[q];
                    mine.value += weight * hb::softplus(-y * delta / tau);
                    const double d_delta = -weight * y / tau * detail::sigmoid(-y * delta / tau);
                    rows.gradient[fresh] += d_delta;
                    rows.gradient[old] -= d_delta;
                    mine.log_gamma += d_delta * age;
                    // The boundary key is the older one, so it wins a tie.
                    mine.agreed += (delta > 0.0) == keeps ? rows.drawn[q] : 0;
                }
            });
            // Not the whole struct: the other sequences of this head read its counts meanwhile.
            sums[task].value = mine.value;
            sums[task].agreed = mine.agreed;
            sums[task].log_gamma = mine.log_gamma;
            Real* to = d_scores.head(b, first + h);
            for (std::int32_t t = 0; t < length; ++t) {
                to[t] = static_cast<Real>(rows.gradient[t]);
            }
        });
        for (std::int64_t task = 0; task < tasks; ++task) {
            result.value += sums[task].value;
            result.agreed += sums[task].agreed;
            if (d_log_gamma != nullptr) {
                d_log_gamma[first + task % heads] += sums[task].log_gamma;
            }
        }
        sum_over_layers.value += result.value;
        sum_over_layers.count += result.count;
        sum_over_layers.sampled += result.sampled;
        sum_over_layers.kept += result.kept;
        sum_over_layers.agreed += result.agreed;
    }
    *value = sum_over_layers;
}

}  // namespace kvpolicy
