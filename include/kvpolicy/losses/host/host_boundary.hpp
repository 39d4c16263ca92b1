// Bodies of losses/boundary.hpp on the host: one pass over the teacher's top-k updates collects the examples,
// a second pass over them gives value and gradient.
#pragma once

#include <kvpolicy/core/check.hpp>
#include <kvpolicy/core/random.hpp>
#include <kvpolicy/core/share.hpp>
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
    std::byte* top_k;        // of a top_k_set
    static std::size_t bytes(std::int32_t length, std::size_t top_k_bytes) {
        const auto count = static_cast<std::size_t>(length);
        return 2 * detail::aligned_size(count * sizeof(std::int32_t)) +
               2 * detail::aligned_size(count * sizeof(double)) + top_k_bytes;
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
        top_k = at;
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
        const std::int64_t late = nearest_count_of_share(sampler.late, count);
        const auto choices = static_cast<std::uint32_t>(here);
        for (std::int64_t i = 0; i < count; ++i, index += 2) {
            std::uint32_t choice = random_below(choices, sampler.seed, stream, index);
            if (i < late) {
                choice = std::max(choice, random_below(choices, sampler.seed, stream, index + 1));
            }
            ++first[choice];
        }
        total += count;
    });
    return total;
}

/// One call of BoundaryLoss: check_inputs(), then collect_examples() of each (sequence, head), then
/// differentiate() of each. `mean` is the factor of every example, once their count is known.
template <class P, class Real>
struct boundary_pass {
    const BoundaryLoss& loss;
    const P& policy;
    const Sequences& sequences;
    plane_view<const Real> scores;
    plane_view<const float> target;
    plane_view<Real> d_scores;
    std::byte* memory;                 // [tasks] of boundary_rows
    std::size_t task_bytes;            // of one boundary_rows
    boundary_sums* sums;               // [tasks]
    std::int32_t layer = 0;            // of the call's layers: 0 is loss.layer
    std::int32_t first_head = 0;       // of the layer, among the heads of the call
    const float* log_gamma = nullptr;  // [heads of the call], in place of the policy's
    std::uint32_t* status = nullptr;   // [batch]
    double mean = 0.0;

    [[nodiscard]] HeadParams params_of(std::int32_t head) const {
        HeadParams params = policy.params(loss.layer, first_head + head);
        params.log_gamma = log_gamma != nullptr ? log_gamma[first_head + head] : params.log_gamma;
        return params;
    }
    [[nodiscard]] std::int32_t batch_of(std::int64_t task) const {
        return static_cast<std::int32_t>(task / d_scores.heads);
    }
    [[nodiscard]] std::int32_t head_of(std::int64_t task) const {
        return static_cast<std::int32_t>(task % d_scores.heads);
    }
    [[nodiscard]] boundary_rows rows_of(std::int64_t task) const {
        return {memory + static_cast<std::size_t>(task) * task_bytes, sequences.length};
    }

    /// Keys that leave the window need a target that is a number, and a finite score. With a status a NaN
    /// target is reported, and ranks last; scores are then left to add_example().
    void check_inputs() const {
        for (std::int64_t task = 0; task < std::int64_t{d_scores.batch} * d_scores.heads; ++task) {
            const std::int32_t b = batch_of(task), h = head_of(task);
            const float* of_teacher = target.head(b, h);
            const Real* of_student = scores.head(b, h);
            for_each_segment<P>(sequences, b, [&](std::int32_t begin, std::int32_t end) {
                for_each_leaver(policy, params_of(h), end - begin, [&](std::int32_t at, std::int32_t) {
                    const std::int32_t t = begin + at;
                    static_cast<void>(checks::is_number("target", b, h, t, of_teacher[t], status));
                    if (status != nullptr || std::isfinite(of_student[t])) [[likely]] {
                        return;
                    }
                    detail::refuse(detail::text("scores[", b, "][", h, "][", t, "]").c_str(), of_student[t],
                                   "a finite number");
                });
            });
        }
    }

    /// Draws the positions of a task and runs the teacher's top-k updates, which give each drawn position its
    /// example.
    void collect_examples(std::int64_t task) const {
        const std::int32_t b = batch_of(task), h = head_of(task);
        const HeadParams head_params = params_of(h);
        const boundary_rows rows = rows_of(task);
        const float* goal = target.head(b, h);
        const auto stream =
            (static_cast<std::uint64_t>(loss.layer + layer) << 40) + static_cast<std::uint64_t>(task);
        boundary_sums mine{};
        mine.sampled = draw_positions<P>(loss.sampler, head_params, sequences, b, stream, rows.drawn);
        std::fill_n(rows.boundary, sequences.length_of(b), -1);
        for_each_segment<P>(sequences, b, [&](std::int32_t begin, std::int32_t end) {
            if (end - begin <= first_saturated(head_params) || head_params.budget == 0) {
                return;
            }
            detail::top_k_set slots(rows.top_k, top_k_capacity(head_params, sequences), head_params,
                                    rebase_limit, 0, end - begin);
            for_each_leaver(policy, head_params, end - begin, [&](std::int32_t t, std::int32_t at) {
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
                const double margin =
                    effective_score(goal[begin + t], head_params.log_gamma, head_params.decay_step, t, at) -
                    effective_score(worst.score, head_params.log_gamma, head_params.decay_step, worst.key,
                                    at);
                rows.boundary[q] = begin + worst.key;
                // Two infinite targets of one sign are a tie. The sign bit carries the label, so -0 is a
                // drop.
                rows.margin[q] = std::copysign(margin == margin ? margin : 0.0, keeps ? 1.0 : -1.0);
                mine.count += rows.drawn[q];
                mine.kept += keeps ? rows.drawn[q] : 0;
            });
        });
        sums[task] = mine;
    }

    /// The weights of one head's examples by their label, over all sequences.
    struct label_weights {
        double drop = 1.0, keep = 1.0;
    };
    [[nodiscard]] label_weights balanced(std::int32_t h) const {
        const auto& balance = loss.balance;
        label_weights weights;
        std::int64_t count = 0, kept = 0;
        for (std::int32_t b = 0; b < d_scores.batch; ++b) {
            count += sums[std::int64_t{b} * d_scores.heads + h].count;
            kept += sums[std::int64_t{b} * d_scores.heads + h].kept;
        }
        if (balance.enabled && kept > 0 && kept < count) {
            const double rho = static_cast<double>(kept) / static_cast<double>(count);
            const auto clip = [&](double w) {
                return std::clamp(w, static_cast<double>(balance.least), static_cast<double>(balance.most));
            };
            weights = {clip(0.5 / (1.0 - rho)), clip(0.5 / rho)};
            const double over = (1.0 - rho) * weights.drop + rho * weights.keep;
            weights.drop /= over;
            weights.keep /= over;
        }
        return weights;
    }

    /// Value of a task's examples and the gradient of its scores.
    void differentiate(std::int64_t task) const {
        const std::int32_t b = batch_of(task), h = head_of(task);
        const HeadParams head_params = params_of(h);
        const boundary_rows rows = rows_of(task);
        const std::int32_t length = sequences.length_of(b);
        const label_weights weights = balanced(h);
        std::fill_n(rows.gradient, length, 0.0);
        boundary_sums mine{};
        for_each_segment<P>(sequences, b, [&](std::int32_t begin, std::int32_t end) {
            for (std::int32_t q = begin; q < end; ++q) {
                if (rows.boundary[q] >= 0) {
                    add_example(b, head_params, rows, scores.head(b, h), weights, q, mine);
                }
            }
        });
        // Other threads read the counts of this struct meanwhile, so only the three sums are written.
        sums[task].value = mine.value;
        sums[task].agreed = mine.agreed;
        sums[task].log_gamma = mine.log_gamma;
        Real* to = d_scores.head(b, h);
        for (std::int32_t t = 0; t < length; ++t) {
            to[t] = static_cast<Real>(rows.gradient[t]);
        }
    }

    /// Adds the example of query q: the key that leaves the window at q against the boundary key.
    void add_example(std::int32_t b, const HeadParams& head_params, const boundary_rows& rows,
                     const Real* score, const label_weights& weights, std::int32_t q,
                     boundary_sums& mine) const {
        const double tau = static_cast<double>(loss.temperature);
        const auto omega_min = static_cast<double>(loss.margin.omega_min);
        const std::int32_t old = rows.boundary[q];
        const std::int32_t fresh = q - head_params.window;
        if (!std::isfinite(score[fresh]) || !std::isfinite(score[old])) {
            static_cast<void>(checks::reported(status, b, status_not_finite));
        }
        const bool keeps = !std::signbit(rows.margin[q]);
        const double y = keeps ? 1.0 : -1.0;
        const std::int32_t age = (q - fresh) / head_params.decay_step - (q - old) / head_params.decay_step;
        const double delta = static_cast<double>(score[fresh]) - static_cast<double>(score[old]) +
                             static_cast<double>(age) * static_cast<double>(head_params.log_gamma);
        const double omega =
            omega_min + (1.0 - omega_min) * detail::sigmoid(y * rows.margin[q] /
                                                            static_cast<double>(loss.margin.temperature));
        const double weight = mean * omega * (keeps ? weights.keep : weights.drop) * rows.drawn[q];
        mine.value += weight * softplus(-y * delta / tau);
        const double d_delta = -weight * y / tau * detail::sigmoid(-y * delta / tau);
        rows.gradient[fresh] += d_delta;
        rows.gradient[old] -= d_delta;
        mine.log_gamma += d_delta * age;
        // The boundary key is the older one, so it wins a tie.
        mine.agreed += (delta > 0.0) == keeps ? rows.drawn[q] : 0;
    }
};

}  // namespace host_backend

template <AnyPolicy P>
std::size_t BoundaryLoss::workspace_bytes(const host&, const P& policy, const Sequences& sequences,
                                          std::int32_t heads) const {
    namespace hb = host_backend;
    checks::check_shape(sequences, heads);
    policy.check_layer(layer, heads);
    const std::size_t top_k = hb::top_k_bytes(policy, sequences, heads, layer);
    const auto tasks = static_cast<std::size_t>(sequences.batch) * static_cast<std::size_t>(heads);
    return tasks * hb::boundary_rows::bytes(sequences.length, top_k) +
           detail::aligned_size(tasks * sizeof(hb::boundary_sums)) + detail::alignment;
}

template <AnyPolicy P, class Real>
void BoundaryLoss::operator()(const host& ctx, const P& policy, input_plane<Real> scores,
                              plane_view<const float> target, const Sequences& sequences,
                              plane_view<Real> d_scores, double* d_log_gamma, BoundaryValue* value,
                              workspace_view workspace, const BoundaryOptions& options) const {
    if (const checks::repaired_sequences repaired(sequences, options.status); repaired) {
        return (*this)(ctx, policy, scores, target, repaired.sequences, d_scores, d_log_gamma, value,
                       workspace, options);
    }
    namespace hb = host_backend;
    static_assert(P::has_budget && !P::shares_budget && !P::has_gate,
                  "kvpolicy: BoundaryLoss needs a policy with a TopKBudget and without a gate");
    const std::int32_t heads = d_scores.heads;
    const std::int32_t batch = d_scores.batch;
    checks::check_boundary(*this);
    checks::check_value(value);
    policy.check_layer(layer, heads);
    checks::check_boundary_layers(options.layers, heads);
    detail::require(options.scores_ready == nullptr, "options.scores_ready", "given", "null on the host");
    checks::check_whole_sequences(sequences, batch, d_scores.length);
    checks::check_plane("d_scores", d_scores, batch, heads, sequences.length);
    checks::check_plane("scores", scores, batch, heads, sequences.length);
    checks::check_plane("target", target, batch, heads, sequences.length);

    const std::int32_t layer_heads = heads / options.layers;
    const auto pass_of = [&](std::int32_t of_call) {
        const std::int32_t first = of_call * layer_heads;
        const auto part = [&](auto plane) {
            plane.data = plane.data == nullptr ? nullptr : plane.head(0, first);
            plane.heads = layer_heads;
            return plane;
        };
        return hb::boundary_pass<P, Real>{.loss = *this,
                                          .policy = policy,
                                          .sequences = sequences,
                                          .scores = part(scores),
                                          .target = part(target),
                                          .d_scores = part(d_scores),
                                          .memory = nullptr,
                                          .task_bytes = 0,
                                          .sums = nullptr,
                                          .layer = of_call,
                                          .first_head = first,
                                          .log_gamma = options.log_gamma,
                                          .status = options.status};
    };
    for (std::int32_t of_call = 0; of_call < options.layers; ++of_call) {
        pass_of(of_call).check_inputs();
    }
    checks::check_workspace(workspace, workspace_bytes(ctx, policy, sequences, heads));

    const std::int64_t tasks = std::int64_t{batch} * layer_heads;
    BoundaryValue all;
    for (std::int32_t of_call = 0; of_call < options.layers; ++of_call) {
        hb::boundary_pass<P, Real> pass = pass_of(of_call);
        pass.memory = detail::aligned(workspace.data);
        pass.task_bytes =
            hb::boundary_rows::bytes(sequences.length, hb::top_k_bytes(policy, sequences, heads, layer));
        pass.sums = reinterpret_cast<hb::boundary_sums*>(pass.memory +
                                                         static_cast<std::size_t>(tasks) * pass.task_bytes);

        ctx.parallel_for(tasks, [&](std::int64_t task) { pass.collect_examples(task); });
        std::int64_t count = 0;
        for (std::int64_t task = 0; task < tasks; ++task) {
            all.sampled += pass.sums[task].sampled;
            count += pass.sums[task].count;
            all.kept += pass.sums[task].kept;
        }
        all.count += count;
        pass.mean = count > 0 ? static_cast<double>(scale) / static_cast<double>(count) : 0.0;
        ctx.parallel_for(tasks, [&](std::int64_t task) { pass.differentiate(task); });
        for (std::int64_t task = 0; task < tasks; ++task) {
            all.value += pass.sums[task].value;
            all.agreed += pass.sums[task].agreed;
            if (d_log_gamma != nullptr) {
                d_log_gamma[pass.first_head + task % layer_heads] += pass.sums[task].log_gamma;
            }
        }
    }
    *value = all;
}

}  // namespace kvpolicy
