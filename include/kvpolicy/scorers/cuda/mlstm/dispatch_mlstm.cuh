// The stages of an mLSTM scorer's calls: projections, states between chunks, reads, and back.
#pragma once

#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/cuda/common/scorer_call.cuh>
#include <kvpolicy/scorers/cuda/mlstm/agent_chunk_outputs_hopper.cuh>
#include <kvpolicy/scorers/cuda/mlstm/kernel_chunk_outputs.cuh>
#include <kvpolicy/scorers/cuda/mlstm/kernel_chunk_outputs_backward.cuh>
#include <kvpolicy/scorers/cuda/mlstm/kernel_chunk_outputs_backward_hopper.cuh>
#include <kvpolicy/scorers/cuda/mlstm/kernel_chunk_stabilizers.cuh>
#include <kvpolicy/scorers/cuda/mlstm/kernel_chunk_states.cuh>
#include <kvpolicy/scorers/cuda/mlstm/kernel_fused_states_outputs.cuh>
#include <kvpolicy/scorers/cuda/mlstm/kernel_fused_states_outputs_hopper.cuh>
#include <kvpolicy/scorers/cuda/mlstm/kernel_project.cuh>
#include <kvpolicy/scorers/cuda/mlstm/kernel_segment_scan.cuh>
#include <kvpolicy/scorers/cuda/mlstm/kernel_segment_states_hopper.cuh>
#include <kvpolicy/scorers/cuda/mlstm/kernel_token_gradients.cuh>
#include <kvpolicy/scorers/cuda/mlstm/kernel_token_gradients_hopper.cuh>
#include <kvpolicy/scorers/cuda/mlstm/mlstm_params.cuh>
#include <kvpolicy/scorers/mlstm.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Calls body(std::integral_constant F, the same V) with the compiled widths that fit.
template <class Widths>
struct mlstm_width_choice {
    static void check(std::int32_t features, std::int32_t width) {
        require_at_most(features, 128, width, 128);
    }
    static void require_at_most(std::int32_t features, std::int32_t most_features, std::int32_t width,
                                std::int32_t most_values) {
        const auto allowed = [](std::int32_t most) {
            return [most] { return detail::text("at most ", most, " on CUDA, as the call is compiled"); };
        };
        detail::require(features <= most_features, "mLSTMScorer.d_qk", features, allowed(most_features));
        detail::require(width <= most_values, "mLSTMScorer.d_v", width, allowed(most_values));
    }
    template <class Body>
    static void with(std::int32_t features, std::int32_t width, Body body) {
        using narrow = std::integral_constant<int, 64>;
        using wide = std::integral_constant<int, 128>;
        if (features <= 64 && width <= 64) {
            body(narrow{}, narrow{});
        } else if (width <= 64) {
            body(wide{}, narrow{});
        } else {
            body(wide{}, wide{});
        }
    }
};
template <std::int32_t F, std::int32_t V>
struct mlstm_width_choice<mlstm_widths<F, V>> {
    static void check(std::int32_t features, std::int32_t width) {
        mlstm_width_choice<all_mlstm_widths>::require_at_most(features, F, width, V);
    }
    template <class Body>
    static void with(std::int32_t, std::int32_t, Body body) {
        body(std::integral_constant<int, F>{}, std::integral_constant<int, V>{});
    }
};

/// Sizes that the device has no kernels for.
template <class Widths, class T, class S>
void check_mlstm(const S& scorer, bool backward) {
    mlstm_width_choice<Widths>::check(scorer.features(), scorer.value_width());
    detail::require(!backward || !std::is_same_v<T, float> || scorer.value_width() <= 64, "mLSTMScorer.d_v",
                    scorer.value_width(), "at most 64 for gradients with fp32 rows on CUDA");
}

/// Whether gradients have kernels for cards that lend a block less: other widths need less anyway.
template <class E, int F, int V>
inline constexpr bool mlstm_can_be_small = !shared_tile<E>::plain && F == 128 && V == 128;

template <class Widths, class T, bool Hedgehog>
struct mlstm_call {
    using E = mlstm_element<T>;

    scorer_call<T> call;
    mlstm_problem<T> problem{};
    weight_stack of_queries, of_tokens;
    T *stack_q = nullptr, *stack_k = nullptr;
    float* partial = nullptr;
    score_gradients<T> d_scores;
    bool direct_values = false;

    using one = std::integral_constant<int, 1>;
    using two = std::integral_constant<int, 2>;

    /// `gradients` null: forward only.
    template <class S>
    mlstm_call(const S& scorer, rows_view<const T> k, rows_view<const T> v, const Sequences& sequences,
               std::int32_t delay, const mLSTMParameters<float>* gradients, workspace_parts& parts)
        : call(k, v, sequences, delay, parts) {
        const auto& weights = scorer.weights;
        mLSTMParameters<float> to;
        if (gradients != nullptr) {
            to = *gradients;
        }
        const std::int32_t projection = scorer.projection(), width = scorer.value_width();
        problem.features = scorer.features();
        problem.width = width;
        problem.projection = projection;
        problem.hedgehog = Hedgehog;
        direct_values = !S::value_path::projected;
        problem.softcap = scorer.gate_softcap;
        mlstm_width_choice<Widths>::with(problem.features, width, [&](auto features, auto values) {
            constexpr int F = features, V = values;
            of_queries.add(weights.w_q, to.w_q, projection);
            problem.at_skip = of_queries.add(weights.skip, weights.skip != nullptr ? to.skip : nullptr, 1);
            of_queries.hold(Hedgehog ? F / 2 : F);
            of_tokens.add(weights.w_k, to.w_k, projection);
            // Values as they are: unit vectors in place of Wv.
            problem.at_v = S::value_path::projected ? of_tokens.add(weights.w_v, to.w_v, width)
                                                    : of_tokens.add(nullptr, nullptr, width, k.dim);
            problem.at_i = of_tokens.add(weights.w_i, to.w_i, 1);
            problem.at_f = of_tokens.add(weights.w_f, to.w_f, 1);
            of_tokens.hold(Hedgehog ? F / 2 : F);
            of_tokens.hold(problem.at_v + V);
            take_rows<F, V>(parts, gradients != nullptr);
        });
        problem.rows_q = of_queries.rows;
        problem.rows_k = of_tokens.rows;
        problem.used_q = of_queries.used;
        problem.used_k = of_tokens.used;
        stack_q = take_stack<T>(parts, of_queries, k.heads, call.source.padded);
        stack_k = take_stack<T>(parts, of_tokens, k.heads, call.source.padded);
        problem.stack_q = stack_q;
        problem.stack_k = stack_k;
        if (gradients != nullptr) {
            problem.d_rows_q = parts.take<T>(call.rows() * of_queries.rows);
            problem.d_rows_k = parts.take<T>(call.rows() * of_tokens.rows);
            // One stack after the other has its partial sums there.
            const std::int64_t padded = call.source.padded;
            partial = parts.take<float>(std::max(gradient_splits(call, of_queries) * of_queries.rows,
                                                 gradient_splits(call, of_tokens) * of_tokens.rows) *
                                        k.heads * padded);
            d_scores.take(call, parts);
        }
        problem.w_i = weights.w_i;
        problem.b_i = weights.b_i;
        problem.w_f = weights.w_f;
        problem.b_f = weights.b_f;
        problem.skip = weights.skip;
        problem.norm_gain = weights.norm_gain;
        problem.readout = weights.readout;
        problem.readout_bias = weights.readout_bias;
    }

    /// Refuses what the device's blocks have too little shared memory for, before anything is enqueued: `reads` scores chunk by
    /// chunk, which a sweep may do without, `backward` makes gradients. Hopper's kernels fit into the 227 KB that its cards lend.
    void check_room(const device_scope& device, bool reads, bool backward) const {
        const std::size_t room = device.shared_limit();
        widths([&](auto features, auto values) {
            constexpr int F = features, V = values;
            require_shared("k.dim + v.dim", call.source.size, project_bytes<F, V, 1>(), room);
            if constexpr (!shared_tile<E>::plain) {
                if (has_hopper_code(device, mlstm_sweep_hopper_kernel<T, F, V>)) {
                    return;
                }
            }
            std::size_t wanted = mlstm_walk_memory<E, walk_part, walk_part, false>(nullptr).bytes;
            if (backward) {
                if constexpr (!shared_tile<E>::plain || V <= 64) {
                    wanted = std::max(wanted, backward_bytes<F, V, mlstm_can_be_small<E, F, V>>());
                }
            } else {
                std::size_t read = mlstm_read_memory<E, F, V, false>(nullptr).bytes;
                if constexpr (!shared_tile<E>::plain) {
                    read = reads ? read : std::min(read, mlstm_sweep_memory<E, F, V>(nullptr).bytes);
                }
                wanted = std::max(wanted, read);
            }
            require_shared("mLSTMScorer.d_qk + d_v", problem.features + problem.width, wanted, room);
        });
    }
    /// Goes on from what an earlier call with the same arguments left in the workspace.
    void resume(const cuda& on, std::uint32_t* status) {
        if (status != nullptr) {
            call.begin(on, status);  // what it reports of lengths; all else is there
        }
        problem.streams = call.streams;
        problem.source = call.source;
    }
    /// Weights, features, values and gates.
    void project(const cuda& on, std::uint32_t* status) {
        call.begin(on, status);
        problem.streams = call.streams;
        problem.source = call.source;
        fill_stack(on, of_queries, call, stack_q);
        fill_stack(on, of_tokens, call, stack_k);
        widths([&](auto features, auto values) {
            constexpr int F = features, V = values;
            const auto with = [&](auto slots_of_a_block, std::size_t shared) {
                constexpr int Slots = slots_of_a_block;
                const std::int64_t groups = (call.streams.slots + Slots - 1) / Slots;
                launch("mlstm_project_kernel", mlstm_project_kernel<T, F, V, Hedgehog, Slots>,
                       2 * planes() * groups, 128 * Slots, shared, on, problem, direct_values);
            };
            // Two chunks share what is loaded of the weights, where two such blocks fit on a large multiprocessor, and one on any.
            const std::size_t room = device_scope(on).shared_limit(), both = project_bytes<F, V, 2>();
            if (both <= std::min<std::size_t>(room, 112 * 1024)) {
                with(two{}, both);
            } else {
                with(one{}, project_bytes<F, V, 1>());
            }
        });
    }
    /// States before each chunk.
    void states(const cuda& on) {
        if (sweep_on_hopper(on, false, true)) {
            return;
        }
        frames(on);
        walk<false>(on);
    }
    /// Scores; keeps: and states before each chunk.
    void scores(const cuda& on, bool keeps = false) {
        if (sweep_on_hopper(on, true, keeps)) {
            return;
        }
        if constexpr (!shared_tile<E>::plain) {
            if (keeps) {
                states(on);
                read(on);
                return;
            }
            bool swept = false;
            widths([&](auto features, auto values) {
                constexpr int F = features, V = values;
                const std::size_t shared = mlstm_sweep_memory<E, F, V>(nullptr).bytes;
                const device_scope device(on);
                if (shared > device.shared_limit()) {
                    return;
                }
                swept = true;
                frames(on);
                cut(sweep_segments(F, V, false));
                begin_segments<F, V, false>(on);
                launch("mlstm_sweep_kernel", mlstm_sweep_kernel<T, F, V>, planes() * problem.segments,
                       mlstm_sweep_threads, shared, on, problem);
            });
            if (swept) {
                return;
            }
        }
        states(on);
        read(on);
    }
    void read(const cuda& on) {
        problem.ahead = device_scope(on).attribute(cudaDevAttrMultiProcessorCount);
        widths([&](auto features, auto values) {
            constexpr int F = features, V = values;
            launch("mlstm_read_kernel", mlstm_read_kernel<T, F, V>, call.chunks(), mlstm_threads,
                   mlstm_read_memory<E, F, V, false>(nullptr).bytes, on, problem);
        });
    }
    /// From gradients of scores to those of the stacks' products, of the readout and of the gates.
    void tokens_backward(const cuda& on) {
        problem.ahead = device_scope(on).attribute(cudaDevAttrMultiProcessorCount);
        widths([&](auto features, auto values) {
            constexpr int F = features, V = values;
            if constexpr (std::is_same_v<T, float> && V > 64) {
                return;  // refused by check_mlstm
            } else {
                if constexpr (!shared_tile<E>::plain) {
                    const device_scope device(on);
                    if (has_hopper_code(device, mlstm_reads_hopper_kernel<T, F, V, false>)) {
                        const std::int64_t at_once = std::int64_t{problem.ahead} * mlstm_reads_blocks<V>;
                        const auto reads = [&](auto kernel) {
                            launch("mlstm_reads_hopper_kernel", kernel, std::min(call.chunks(), at_once),
                                   mlstm_warpgroup_threads, mlstm_reads_memory<E, F, V>::bytes(), on,
                                   problem);
                        };
                        if (problem.norm_gain != nullptr) {
                            reads(mlstm_reads_hopper_kernel<T, F, V, true>);
                        } else {
                            reads(mlstm_reads_hopper_kernel<T, F, V, false>);
                        }
                        walk<true>(on);
                        launch("mlstm_tokens_hopper_kernel", mlstm_tokens_hopper_kernel<T, F, V>,
                               std::min(call.chunks(), std::int64_t{problem.ahead} * mlstm_tokens_blocks),
                               mlstm_warpgroup_threads, mlstm_tokens_hopper_memory<T, F, V>(nullptr).bytes,
                               on, problem);
                        return;
                    }
                }
                const auto with = [&](auto less) {
                    constexpr bool Small = less;
                    launch("mlstm_reads_backward_kernel", mlstm_reads_backward_kernel<T, F, V, Small>,
                           call.chunks(), mlstm_threads,
                           mlstm_read_memory<E, F, V, true, Small>(nullptr).bytes, on, problem);
                    walk<true>(on);
                    launch("mlstm_tokens_backward_kernel", mlstm_tokens_backward_kernel<T, F, V, Small>,
                           call.chunks(), mlstm_threads, mlstm_tokens_memory<E, F, V, Small>(nullptr).bytes,
                           on, problem);
                };
                if constexpr (mlstm_can_be_small<E, F, V>) {
                    if (backward_bytes<F, V, false>() > device_scope(on).shared_limit()) {
                        with(std::true_type{});
                        return;
                    }
                }
                with(std::false_type{});
            }
        });
    }
    void weights_backward(const cuda& on, const mLSTMParameters<float>& to) {
        add_weight_gradients(on, call, of_queries, static_cast<const T*>(problem.d_rows_q),
                             call.streams.delay, partial);
        add_weight_gradients(on, call, of_tokens, static_cast<const T*>(problem.d_rows_k), 0, partial);
        const std::int32_t width = problem.width, all = 2 * width + 1;
        chunk_sums sums;
        sums.add(problem.d_readout, all, 0, width, to.readout);
        if (problem.norm_gain != nullptr) {
            sums.add(problem.d_readout, all, width, width, to.norm_gain);
        }
        sums.add(problem.d_readout, all, 2 * width, 1, to.readout_bias);
        sums.add(problem.d_gates, 2, 0, 1, to.b_i);
        sums.add(problem.d_gates, 2, 1, 1, to.b_f);
        add_sums(on, call.streams, sums);
    }
    void inputs_backward(const cuda& on, const ScoreBackward<T>& to) {
        launch_input_gradients(
            on, call, gradient_rows<T>{problem.d_rows_k, stack_k, of_tokens.rows, of_tokens.used, 0},
            gradient_rows<T>{problem.d_rows_q, stack_q, of_queries.rows, of_queries.used, call.streams.delay},
            to);
    }

  private:
    template <int F, int V, int Slots>
    [[nodiscard]] std::size_t project_bytes() const {
        constexpr int P = Hedgehog ? F / 2 : F;
        return mlstm_project_memory<T, Slots>(nullptr, call.source.padded, P > V ? P : V).bytes;
    }
    template <int F, int V, bool Small>
    static std::size_t backward_bytes() {
        return std::max(mlstm_read_memory<E, F, V, true, Small>(nullptr).bytes,
                        mlstm_tokens_memory<E, F, V, Small>(nullptr).bytes);
    }
    template <class Body>
    void widths(Body body) const {
        mlstm_width_choice<Widths>::with(problem.features, problem.width, body);
    }
    [[nodiscard]] std::int64_t planes() const {
        return std::int64_t{call.streams.batch} * call.streams.heads;
    }
    // How planes are cut into segments depends on shapes alone, so that bits do not depend on the card. What it reckons with are the 132
    // multiprocessors of an H100.
    static constexpr std::int64_t processors = 132;
    /// Features and values that a block of a walk has.
    static constexpr int walk_part = shared_tile<E>::plain ? 32 : 64;
    static constexpr std::int64_t walk_parts(int F, int V) {
        return std::int64_t{F / walk_part} * (V / walk_part);
    }
    static constexpr std::int64_t walks_at_once = (shared_tile<E>::plain ? 1 : 2) * processors;

    /// Segments of a walk that stores states. Every chunk is walked over twice then, so it takes three to gain something.
    [[nodiscard]] std::int32_t walk_segments(int F, int V) const {
        const std::int64_t blocks = std::max<std::int64_t>(1, planes() * walk_parts(F, V));
        const std::int64_t most = std::min<std::int64_t>(walks_at_once / blocks, call.streams.slots / 2);
        return most < 3 ? 1 : static_cast<std::int32_t>(most);
    }
    /// Segments of a sweep, one block a multiprocessor: by what a chunk takes, and one that is added up before, in tenths of microseconds.
    [[nodiscard]] std::int32_t sweep_segments(int F, int V, bool hopper) const {
        const auto waves = [](std::int64_t blocks, std::int64_t at_once) {
            return (blocks + at_once - 1) / at_once;
        };
        std::int32_t best = 1;
        std::int64_t least = 0;
        for (std::int32_t n = 1; n <= std::min(64, std::max(1, call.streams.slots / 2)); ++n) {
            const std::int64_t chunks = waves(call.streams.slots, n);
            const std::int64_t blocks = waves(planes() * n, processors);
            std::int64_t time = 0;
            if (hopper) {
                time = blocks * (20 * chunks + 20) + (n > 1 ? planes() * (n - 1) * chunks / 10 + 80 : 0);
            } else {
                const std::int64_t walks = waves(planes() * (n - 1) * walk_parts(F, V), walks_at_once);
                time = blocks * (40 * chunks + 20) + walks * (10 * chunks + 40);
            }
            if (n == 1 || time < least) {
                best = n;
                least = time;
            }
        }
        return best;
    }
    /// Parts of a segment on Hopper, where each is added up by itself.
    [[nodiscard]] std::int32_t cuts_of(std::int32_t segments) const {
        const std::int64_t blocks = std::max<std::int64_t>(1, planes() * (segments - 1));
        const std::int64_t most =
            std::min<std::int64_t>(2 * processors / blocks, call.streams.slots / segments / 4);
        return segments == 1 ? 1 : static_cast<std::int32_t>(std::max<std::int64_t>(1, most));
    }
    /// What every chunk begins with and counts, by plane.
    void frames(const cuda& on) {
        launch("mlstm_frames_kernel", mlstm_frames_kernel<T>, planes(), mlstm_frames_threads, 0, on, problem);
    }
    void cut(std::int32_t segments, std::int32_t cuts = 1) {
        const std::int32_t slots = call.streams.slots;
        problem.cuts = cuts;
        problem.segment_chunks = (slots + segments * cuts - 1) / (segments * cuts) * cuts;
        problem.segments = slots == 0 ? 1 : (slots + problem.segment_chunks - 1) / problem.segment_chunks;
    }
    /// A sweep by code for Hopper, where there is such.
    bool sweep_on_hopper([[maybe_unused]] const cuda& on, [[maybe_unused]] bool reads,
                         [[maybe_unused]] bool keeps) {
        bool swept = false;
        if constexpr (!shared_tile<E>::plain) {
            widths([&](auto features, auto values) {
                constexpr int F = features, V = values;
                if (!has_hopper_code(device_scope(on), mlstm_sweep_hopper_kernel<T, F, V>)) {
                    return;
                }
                swept = true;
                frames(on);
                const std::int32_t segments = sweep_segments(F, V, true);
                cut(segments, cuts_of(segments));
                begin_segments<F, V, false>(on);
                problem.sweep_reads = reads;
                problem.sweep_keeps = keeps;
                launch("mlstm_sweep_hopper_kernel", mlstm_sweep_hopper_kernel<T, F, V>,
                       planes() * problem.segments, mlstm_sweep_hopper_threads<F>,
                       mlstm_sweep_hopper_memory<E, F, V>(nullptr).bytes, on, problem);
            });
        }
        return swept;
    }
    /// The states that segments begin with.
    template <int F, int V, bool Backward>
    void begin_segments(const cuda& on) {
        if (problem.segments == 1) {
            return;
        }
        const std::int64_t added = planes() * (problem.segments - 1);
        bool done = false;
        if constexpr (!shared_tile<E>::plain) {
            if (has_hopper_code(device_scope(on), mlstm_ends_hopper_kernel<T, F, V, Backward>)) {
                done = true;
                launch("mlstm_ends_hopper_kernel", mlstm_ends_hopper_kernel<T, F, V, Backward>,
                       added * problem.cuts, mlstm_ends_threads<F>, mlstm_ends_memory<E, F, V>(nullptr).bytes,
                       on, problem);
            }
        }
        if (!done) {
            launch_walk<F, V, Backward, true>(on, added * walk_parts(F, V));
        }
        launch("mlstm_carry_kernel", mlstm_carry_kernel<T, F, V>, (planes() * (F * (V + 1) / 4) + 255) / 256,
               256, 0, on, problem, Backward);
    }
    template <int F, int V, bool Backward, bool Ends>
    void launch_walk(const cuda& on, std::int64_t blocks) {
        launch("mlstm_walk_kernel", mlstm_walk_kernel<T, F, V, walk_part, walk_part, Backward, Ends>, blocks,
               mlstm_walk_threads<false>, mlstm_walk_memory<E, walk_part, walk_part, false>(nullptr).bytes,
               on, problem);
    }
    /// The walk over the chunks that stores their states.
    template <bool Backward>
    void walk(const cuda& on) {
        widths([&](auto features, auto values) {
            constexpr int F = features, V = values;
            problem.sum_parts = V / walk_part;
            const std::int32_t segments = walk_segments(F, V);
            if constexpr (Backward && !shared_tile<E>::plain) {
                if (has_hopper_code(device_scope(on), mlstm_walk_hopper_kernel<T, F, V>)) {
                    cut(segments, cuts_of(segments));
                    begin_segments<F, V, Backward>(on);
                    launch("mlstm_walk_hopper_kernel", mlstm_walk_hopper_kernel<T, F, V>,
                           planes() * problem.segments * walk_parts(F, V), mlstm_walk_threads<true>,
                           mlstm_walk_memory<E, 64, 64, true>(nullptr).bytes, on, problem);
                    return;
                }
            }
            cut(segments);
            begin_segments<F, V, Backward>(on);
            launch_walk<F, V, Backward, false>(on, planes() * problem.segments * walk_parts(F, V));
        });
    }
    template <int F, int V>
    void take_rows(workspace_parts& parts, bool backward) {
        const std::int64_t rows = call.rows(), chunks = call.chunks();
        problem.q = parts.take<E>(rows * F);
        problem.k = parts.take<E>(rows * F);
        problem.v = parts.take<E>(rows * V);
        problem.log_source = parts.take<double>(rows);
        problem.log_top = parts.take<double>(rows);
        problem.weight = parts.take<float>(rows);
        problem.skipped = parts.take<float>(rows);
        problem.memory = parts.take<E>(chunks * F * V);
        problem.sums = parts.take<float>(chunks * F);
        problem.frames = parts.take<mlstm_frame>(chunks);
        const std::int32_t walked = walk_segments(F, V), swept = sweep_segments(F, V, true);
        const std::int64_t segments = planes() * std::max({walked * cuts_of(walked), swept * cuts_of(swept),
                                                           sweep_segments(F, V, false)});
        problem.partial_states = parts.take<float>(segments * (F * (V + 1)));
        problem.partial_keeps = parts.take<float>(segments);
        if (!backward) {
            return;
        }
        problem.slope_i = parts.take<float>(rows);
        problem.slope_f = parts.take<float>(rows);
        problem.d_n = parts.take<E>(rows * V);
        problem.kept = parts.take<float>(rows);
        problem.d_g = parts.take<float>(rows);
        problem.carried = parts.take<float>(rows);
        problem.d_memory = parts.take<E>(chunks * F * V);
        problem.d_sums = parts.take<float>(chunks * F * (V / 32));
        problem.d_across = parts.take<float>(chunks * (F / 64) * (V / 64));
        problem.d_readout = parts.take<float>(chunks * (2 * std::int64_t{problem.width} + 1));
        problem.d_gates = parts.take<float>(chunks * 2);
    }
};

template <class S>
inline constexpr bool is_hedgehog = std::is_same_v<typename S::feature_map, Hedgehog>;

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
