// The stages of an mLSTM scorer's calls: projections, states between chunks, outputs, and back.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/scorers/backward.hpp>
#include <kvpolicy/scorers/cuda/common/scorer_plan.cuh>
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
    static constexpr std::int32_t most = 128;
    static bool fits(std::int32_t features, std::int32_t width) { return features <= most && width <= most; }
    static void check(std::int32_t features, std::int32_t width) {
        require_at_most(features, most, width, most);
    }
    static void require_at_most(std::int32_t features, std::int32_t max_features, std::int32_t width,
                                std::int32_t max_values) {
        const auto allowed = [](std::int32_t limit) {
            return [limit] { return detail::text("at most ", limit, " on CUDA, as the call is compiled"); };
        };
        detail::require(features <= max_features, "mLSTMScorer.d_qk", features, allowed(max_features));
        detail::require(width <= max_values, "mLSTMScorer.d_v", width, allowed(max_values));
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

/// Whether gradients have kernels for GPUs that give a block less shared memory: other widths need less.
template <class E, int F, int V>
inline constexpr bool mlstm_can_be_small = !shared_tile<E>::plain && F == 128 && V == 128;

template <class Widths, class T, bool Hedgehog>
struct mlstm_plan {
    using E = mlstm_element<T>;

    scorer_plan<T> call;
    mlstm_params<T> params{};
    weight_stack of_queries, of_tokens;
    T *stack_q = nullptr, *stack_k = nullptr;
    float* partial = nullptr;
    score_gradients<T> d_scores;
    bool direct_values = false;

    using one = std::integral_constant<int, 1>;
    using two = std::integral_constant<int, 2>;

    /// `gradients` null: forward only. `states` in memory are what all but fused kernels need. With
    /// `for_smaller` the parts are large enough for every call of fewer or shorter sequences, too.
    template <class S>
    mlstm_plan(const S& scorer, rows_view<const T> k, rows_view<const T> v, const Sequences& sequences,
               std::int32_t delay, const mLSTMParameters<float>* gradients, workspace_parts& parts,
               bool states = true, bool for_smaller = false)
        : call(k, v, sequences, delay, parts) {
        const auto& weights = scorer.weights;
        mLSTMParameters<float> to;
        if (gradients != nullptr) {
            to = *gradients;
        }
        const std::int32_t projection = scorer.projection(), width = scorer.value_width();
        params.features = scorer.features();
        params.width = width;
        params.projection = projection;
        params.hedgehog = Hedgehog;
        direct_values = !S::value_path::projected;
        params.gate_softcap = scorer.gate_softcap;
        mlstm_width_choice<Widths>::with(params.features, width, [&](auto features, auto values) {
            constexpr int F = features, V = values;
            of_queries.add(weights.w_q, to.w_q, projection);
            params.at_skip = of_queries.add(weights.skip, weights.skip != nullptr ? to.skip : nullptr, 1);
            of_queries.hold(Hedgehog ? F / 2 : F);
            of_tokens.add(weights.w_k, to.w_k, projection);
            // Values as they are: unit vectors in place of Wv.
            params.at_v = S::value_path::projected ? of_tokens.add(weights.w_v, to.w_v, width)
                                                   : of_tokens.add(nullptr, nullptr, width, k.dim);
            params.at_i = of_tokens.add(weights.w_i, to.w_i, 1);
            params.at_f = of_tokens.add(weights.w_f, to.w_f, 1);
            of_tokens.hold(Hedgehog ? F / 2 : F);
            of_tokens.hold(params.at_v + V);
            take_rows<F, V>(parts, gradients != nullptr, states, for_smaller);
        });
        params.rows_q = of_queries.rows;
        params.rows_k = of_tokens.rows;
        params.used_q = of_queries.used;
        params.used_k = of_tokens.used;
        stack_q = take_stack<T>(parts, of_queries, k.heads, call.source.padded);
        stack_k = take_stack<T>(parts, of_tokens, k.heads, call.source.padded);
        params.stack_q = stack_q;
        params.stack_k = stack_k;
        if (gradients != nullptr) {
            params.d_rows_q = parts.take<T>(call.rows() * of_queries.rows);
            params.d_rows_k = parts.take<T>(call.rows() * of_tokens.rows);
            // One stack after the other has its partial sums there.
            const std::int64_t padded = call.source.padded;
            partial = parts.take<float>(std::max(gradient_splits(call, of_queries) * of_queries.rows,
                                                 gradient_splits(call, of_tokens) * of_tokens.rows) *
                                        k.heads * padded);
            d_scores.take(call, parts);
        }
        params.w_i = weights.w_i;
        params.b_i = weights.b_i;
        params.w_f = weights.w_f;
        params.b_f = weights.b_f;
        params.skip = weights.skip;
        params.norm_gain = weights.norm_gain;
        params.centered = scorer.centered();
        params.readout = weights.readout;
        params.readout_bias = weights.readout_bias;
    }

    /// Refuses what the device's blocks have too little shared memory for, before anything is enqueued:
    /// `reads` scores chunk by chunk, which the fused kernel may do without, `backward` makes gradients.
    /// Hopper's kernels fit into the 227 KB that its GPUs give a block.
    void check_shared_memory(const device_scope& device, bool outputs, bool backward) const {
        const std::size_t capacity = device.shared_limit();
        for_each_block(device, outputs, backward,
                       [&](const char* name, std::int32_t size, std::size_t bytes) {
                           require_shared(name, size, bytes, capacity);
                       });
    }
    /// Whether the device's blocks have enough for scores.
    [[nodiscard]] bool fits_shared_memory(const device_scope& device) const {
        bool fits = true;
        for_each_block(device, false, false, [&](const char*, std::int32_t, std::size_t bytes) {
            fits = fits && bytes <= device.shared_limit();
        });
        return fits;
    }
    /// Whether scores are made without states in memory.
    static bool fuses(const device_scope& device, std::int32_t features, std::int32_t width) {
        bool fused = false;
        if constexpr (!shared_tile<E>::plain) {
            mlstm_width_choice<Widths>::with(features, width, [&](auto of_features, auto of_values) {
                constexpr int F = of_features, V = of_values;
                fused = has_hopper_code(device, mlstm_fused_states_outputs_hopper_kernel<T, F, V>) ||
                        mlstm_fused_memory<E, F, V>(nullptr).bytes <= device.shared_limit();
            });
        }
        return fused;
    }
    /// Calls need(argument, its value, bytes of shared memory) for blocks that a call takes.
    template <class Need>
    void for_each_block(const device_scope& device, bool outputs, bool backward, const Need& need) const {
        widths([&](auto features, auto values) {
            constexpr int F = features, V = values;
            need("k.dim + v.dim", call.source.size, project_bytes<F, V, 1>());
            if constexpr (!shared_tile<E>::plain) {
                if (has_hopper_code(device, mlstm_fused_states_outputs_hopper_kernel<T, F, V>)) {
                    return;
                }
            }
            std::size_t wanted = mlstm_chunk_states_memory<E, state_part, state_part, false>(nullptr).bytes;
            if (backward) {
                if constexpr (!shared_tile<E>::plain || V <= 64) {
                    wanted = std::max(wanted, backward_bytes<F, V, mlstm_can_be_small<E, F, V>>());
                }
            } else {
                std::size_t outputs_bytes = mlstm_chunk_outputs_memory<E, F, V, false>(nullptr).bytes;
                if constexpr (!shared_tile<E>::plain) {
                    outputs_bytes = outputs
                                        ? outputs_bytes
                                        : std::min(outputs_bytes, mlstm_fused_memory<E, F, V>(nullptr).bytes);
                }
                wanted = std::max(wanted, outputs_bytes);
            }
            need("mLSTMScorer.d_qk + d_v", params.features + params.width, wanted);
        });
    }
    /// Goes on from what an earlier call with the same arguments left in the workspace.
    void resume(const cuda& ctx, std::uint32_t* status) {
        if (status != nullptr) {
            call.begin(ctx, status);  // what it reports of lengths; all else is there
        }
        params.streams = call.streams;
        params.source = call.source;
    }
    /// Weights, features, values and gates.
    void project(const cuda& ctx, std::uint32_t* status) {
        call.begin(ctx, status);
        params.streams = call.streams;
        params.source = call.source;
        fill_stack(ctx, of_queries, call, stack_q);
        fill_stack(ctx, of_tokens, call, stack_k);
        widths([&](auto features, auto values) {
            constexpr int F = features, V = values;
            const auto with = [&](auto chunks_per_block, std::size_t shared) {
                constexpr int Chunks = chunks_per_block;
                const std::int64_t groups = (call.streams.chunks + Chunks - 1) / Chunks;
                launch("mlstm_project_kernel", mlstm_project_kernel<T, F, V, Hedgehog, Chunks>,
                       2 * planes() * groups, 128 * Chunks, shared, ctx, params, direct_values);
            };
            // Two chunks share what is loaded of the weights, where two such blocks fit on a large
            // SM, and one on any.
            const std::size_t capacity = device_scope(ctx).shared_limit(), both = project_bytes<F, V, 2>();
            if (both <= std::min<std::size_t>(capacity, 112 * 1024)) {
                with(two{}, both);
            } else {
                with(one{}, project_bytes<F, V, 1>());
            }
        });
    }
    /// States before each chunk.
    void states(const cuda& ctx) {
        if (fused_on_hopper(ctx, false, true)) {
            return;
        }
        chunk_stats(ctx);
        chunk_states<false>(ctx);
    }
    /// Scores; keeps: and states before each chunk.
    void scores(const cuda& ctx, bool keeps = false) {
        if (fused_on_hopper(ctx, true, keeps)) {
            return;
        }
        if constexpr (!shared_tile<E>::plain) {
            if (keeps) {
                states(ctx);
                chunk_outputs(ctx);
                return;
            }
            bool fused = false;
            widths([&](auto features, auto values) {
                constexpr int F = features, V = values;
                const std::size_t shared = mlstm_fused_memory<E, F, V>(nullptr).bytes;
                const device_scope device(ctx);
                if (shared > device.shared_limit()) {
                    return;
                }
                fused = true;
                chunk_stats(ctx);
                cut(fused_segments(F, V, false));
                begin_segments<F, V, false>(ctx);
                launch("mlstm_fused_states_outputs_kernel", mlstm_fused_states_outputs_kernel<T, F, V>,
                       planes() * params.segments, mlstm_fused_threads, shared, ctx, params);
            });
            if (fused) {
                return;
            }
        }
        states(ctx);
        chunk_outputs(ctx);
    }
    void chunk_outputs(const cuda& ctx) {
        params.ahead = device_scope(ctx).attribute(cudaDevAttrMultiProcessorCount);
        widths([&](auto features, auto values) {
            constexpr int F = features, V = values;
            launch("mlstm_chunk_outputs_kernel", mlstm_chunk_outputs_kernel<T, F, V>, call.chunks(),
                   mlstm_threads, mlstm_chunk_outputs_memory<E, F, V, false>(nullptr).bytes, ctx, params);
        });
    }
    /// From gradients of scores to those of the stacks' products, of the readout and of the gates.
    void tokens_backward(const cuda& ctx) {
        params.ahead = device_scope(ctx).attribute(cudaDevAttrMultiProcessorCount);
        widths([&](auto features, auto values) {
            constexpr int F = features, V = values;
            if constexpr (std::is_same_v<T, float> && V > 64) {
                return;  // refused by check_mlstm
            } else {
                if constexpr (!shared_tile<E>::plain) {
                    const device_scope device(ctx);
                    if (has_hopper_code(device, mlstm_chunk_outputs_backward_hopper_kernel<T, F, V, false>)) {
                        const std::int64_t at_once =
                            std::int64_t{params.ahead} * mlstm_chunk_outputs_blocks<V>;
                        const auto outputs = [&](auto kernel) {
                            launch("mlstm_chunk_outputs_backward_hopper_kernel", kernel,
                                   std::min(call.chunks(), at_once), mlstm_warpgroup_threads,
                                   mlstm_chunk_outputs_backward_memory<E, F, V>::bytes(), ctx, params);
                        };
                        if (params.norm_gain != nullptr) {
                            outputs(mlstm_chunk_outputs_backward_hopper_kernel<T, F, V, true>);
                        } else {
                            outputs(mlstm_chunk_outputs_backward_hopper_kernel<T, F, V, false>);
                        }
                        chunk_states<true>(ctx);
                        launch("mlstm_token_gradients_hopper_kernel",
                               mlstm_token_gradients_hopper_kernel<T, F, V>,
                               std::min(call.chunks(),
                                        std::int64_t{params.ahead} * mlstm_token_gradients_blocks),
                               mlstm_warpgroup_threads,
                               mlstm_token_gradients_hopper_memory<T, F, V>(nullptr).bytes, ctx, params);
                        return;
                    }
                }
                const auto with = [&](auto less) {
                    constexpr bool Small = less;
                    launch("mlstm_chunk_outputs_backward_kernel",
                           mlstm_chunk_outputs_backward_kernel<T, F, V, Small>, call.chunks(), mlstm_threads,
                           mlstm_chunk_outputs_memory<E, F, V, true, Small>(nullptr).bytes, ctx, params);
                    chunk_states<true>(ctx);
                    launch("mlstm_token_gradients_kernel", mlstm_token_gradients_kernel<T, F, V, Small>,
                           call.chunks(), mlstm_threads,
                           mlstm_token_gradients_memory<E, F, V, Small>(nullptr).bytes, ctx, params);
                };
                if constexpr (mlstm_can_be_small<E, F, V>) {
                    if (backward_bytes<F, V, false>() > device_scope(ctx).shared_limit()) {
                        with(std::true_type{});
                        return;
                    }
                }
                with(std::false_type{});
            }
        });
    }
    void weights_backward(const cuda& ctx, const mLSTMParameters<float>& to) {
        add_weight_gradients(ctx, call, of_queries, static_cast<const T*>(params.d_rows_q),
                             call.streams.delay, partial);
        add_weight_gradients(ctx, call, of_tokens, static_cast<const T*>(params.d_rows_k), 0, partial);
        const std::int32_t width = params.width, all = 2 * width + 1;
        chunk_sums sums;
        sums.add(params.d_readout, all, 0, width, to.readout);
        if (params.norm_gain != nullptr) {
            sums.add(params.d_readout, all, width, width, to.norm_gain);
        }
        sums.add(params.d_readout, all, 2 * width, 1, to.readout_bias);
        sums.add(params.d_gates, 2, 0, 1, to.b_i);
        sums.add(params.d_gates, 2, 1, 1, to.b_f);
        add_sums(ctx, call.streams, sums);
    }
    void inputs_backward(const cuda& ctx, const ScoreBackward<T>& to) {
        launch_input_gradients(
            ctx, call, gradient_rows<T>{params.d_rows_k, stack_k, of_tokens.rows, of_tokens.used, 0},
            gradient_rows<T>{params.d_rows_q, stack_q, of_queries.rows, of_queries.used, call.streams.delay},
            to);
    }

  private:
    template <int F, int V, int Chunks>
    [[nodiscard]] std::size_t project_bytes() const {
        constexpr int P = Hedgehog ? F / 2 : F;
        return mlstm_project_memory<T, Chunks>(nullptr, call.source.padded, P > V ? P : V).bytes;
    }
    template <int F, int V, bool Small>
    static std::size_t backward_bytes() {
        return std::max(mlstm_chunk_outputs_memory<E, F, V, true, Small>(nullptr).bytes,
                        mlstm_token_gradients_memory<E, F, V, Small>(nullptr).bytes);
    }
    template <class Body>
    void widths(Body body) const {
        mlstm_width_choice<Widths>::with(params.features, params.width, body);
    }
    [[nodiscard]] std::int64_t planes() const {
        return std::int64_t{call.streams.batch} * call.streams.heads;
    }
    // How planes are cut into segments depends on shapes alone, so that bits do not depend on the GPU. What
    // it reckons with are the 132 SMs of an H100.
    static constexpr std::int64_t processors = 132;
    static constexpr std::int32_t max_fused_segments = 64;  // of a plane
    /// Features and values of a block of chunk_states.
    static constexpr int state_part = shared_tile<E>::plain ? 32 : 64;
    static constexpr std::int64_t state_parts(int F, int V) {
        return std::int64_t{F / state_part} * (V / state_part);
    }
    static constexpr std::int64_t state_blocks_at_once = (shared_tile<E>::plain ? 1 : 2) * processors;

    /// Segments of chunk_states. Every chunk is added twice then, so it takes three to
    /// gain something.
    [[nodiscard]] std::int32_t state_segments(int F, int V) const {
        const std::int64_t blocks = std::max<std::int64_t>(1, planes() * state_parts(F, V));
        const std::int64_t most =
            std::min<std::int64_t>(state_blocks_at_once / blocks, call.streams.chunks / 2);
        return most < 3 ? 1 : static_cast<std::int32_t>(most);
    }
    /// Segments of fused_states_outputs, one block per SM: by what a chunk takes, and one that is
    /// added up before, in tenths of microseconds.
    [[nodiscard]] std::int32_t fused_segments(int F, int V, bool hopper) const {
        const auto waves = [](std::int64_t blocks, std::int64_t at_once) {
            return (blocks + at_once - 1) / at_once;
        };
        std::int32_t best = 1;
        std::int64_t least = 0;
        for (std::int32_t n = 1; n <= std::min(max_fused_segments, std::max(1, call.streams.chunks / 2));
             ++n) {
            const std::int64_t chunks = waves(call.streams.chunks, n);
            const std::int64_t blocks = waves(planes() * n, processors);
            std::int64_t time = 0;
            if (hopper) {
                time = blocks * (20 * chunks + 20) + (n > 1 ? planes() * (n - 1) * chunks / 10 + 80 : 0);
            } else {
                const std::int64_t state_waves =
                    waves(planes() * (n - 1) * state_parts(F, V), state_blocks_at_once);
                time = blocks * (40 * chunks + 20) + state_waves * (10 * chunks + 40);
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
            std::min<std::int64_t>(2 * processors / blocks, call.streams.chunks / segments / 4);
        return segments == 1 ? 1 : static_cast<std::int32_t>(std::max<std::int64_t>(1, most));
    }
    /// What every chunk begins with and counts, by plane.
    void chunk_stats(const cuda& ctx) {
        launch("mlstm_chunk_stabilizers_kernel", mlstm_chunk_stabilizers_kernel<T>, planes(),
               mlstm_chunk_stabilizers_threads, 0, ctx, params);
    }
    void cut(std::int32_t segments, std::int32_t cuts = 1) {
        const std::int32_t chunks = call.streams.chunks;
        params.cuts = cuts;
        params.segment_chunks = (chunks + segments * cuts - 1) / (segments * cuts) * cuts;
        params.segments = chunks == 0 ? 1 : (chunks + params.segment_chunks - 1) / params.segment_chunks;
    }
    /// fused_states_outputs on Hopper; false where there is no code for it.
    bool fused_on_hopper([[maybe_unused]] const cuda& ctx, [[maybe_unused]] bool outputs,
                         [[maybe_unused]] bool keeps) {
        bool fused = false;
        if constexpr (!shared_tile<E>::plain) {
            widths([&](auto features, auto values) {
                constexpr int F = features, V = values;
                if (!has_hopper_code(device_scope(ctx), mlstm_fused_states_outputs_hopper_kernel<T, F, V>)) {
                    return;
                }
                fused = true;
                chunk_stats(ctx);
                const std::int32_t segments = fused_segments(F, V, true);
                cut(segments, cuts_of(segments));
                begin_segments<F, V, false>(ctx);
                params.fused_writes_scores = outputs;
                params.fused_writes_states = keeps;
                launch("mlstm_fused_states_outputs_hopper_kernel",
                       mlstm_fused_states_outputs_hopper_kernel<T, F, V>, planes() * params.segments,
                       mlstm_fused_hopper_threads<F>, mlstm_fused_hopper_memory<E, F, V>(nullptr).bytes, ctx,
                       params);
            });
        }
        return fused;
    }
    /// The states that segments begin with.
    template <int F, int V, bool Backward>
    void begin_segments(const cuda& ctx) {
        if (params.segments == 1) {
            return;
        }
        const std::int64_t added = planes() * (params.segments - 1);
        bool done = false;
        if constexpr (!shared_tile<E>::plain) {
            if (has_hopper_code(device_scope(ctx), mlstm_segment_states_hopper_kernel<T, F, V, Backward>)) {
                done = true;
                launch("mlstm_segment_states_hopper_kernel",
                       mlstm_segment_states_hopper_kernel<T, F, V, Backward>, added * params.cuts,
                       mlstm_segment_states_threads<F>, mlstm_segment_states_memory<E, F, V>(nullptr).bytes,
                       ctx, params);
            }
        }
        if (!done) {
            launch_chunk_states<F, V, Backward, true>(ctx, added * state_parts(F, V));
        }
        launch("mlstm_segment_scan_kernel", mlstm_segment_scan_kernel<T, F, V>,
               (planes() * (F * (V + 1) / 4) + 255) / 256, 256, 0, ctx, params, Backward);
    }
    template <int F, int V, bool Backward, bool SegmentStates>
    void launch_chunk_states(const cuda& ctx, std::int64_t blocks) {
        launch("mlstm_chunk_states_kernel",
               mlstm_chunk_states_kernel<T, F, V, state_part, state_part, Backward, SegmentStates>, blocks,
               mlstm_chunk_states_threads<false>,
               mlstm_chunk_states_memory<E, state_part, state_part, false>(nullptr).bytes, ctx, params);
    }
    /// chunk_states: the states of all chunks.
    template <bool Backward>
    void chunk_states(const cuda& ctx) {
        widths([&](auto features, auto values) {
            constexpr int F = features, V = values;
            params.sum_parts = V / state_part;
            const std::int32_t segments = state_segments(F, V);
            if constexpr (Backward && !shared_tile<E>::plain) {
                if (has_hopper_code(device_scope(ctx), mlstm_chunk_states_hopper_kernel<T, F, V>)) {
                    cut(segments, cuts_of(segments));
                    begin_segments<F, V, Backward>(ctx);
                    launch("mlstm_chunk_states_hopper_kernel", mlstm_chunk_states_hopper_kernel<T, F, V>,
                           planes() * params.segments * state_parts(F, V), mlstm_chunk_states_threads<true>,
                           mlstm_chunk_states_memory<E, 64, 64, true>(nullptr).bytes, ctx, params);
                    return;
                }
            }
            cut(segments);
            begin_segments<F, V, Backward>(ctx);
            launch_chunk_states<F, V, Backward, false>(ctx, planes() * params.segments * state_parts(F, V));
        });
    }
    template <int F, int V>
    void take_rows(workspace_parts& parts, bool backward, bool states, bool for_smaller) {
        const std::int64_t rows = call.rows(), chunks = call.chunks();
        params.q = parts.take<E>(rows * F);
        params.k = parts.take<E>(rows * F);
        params.v = parts.take<E>(rows * V);
        params.log_source = parts.take<double>(rows);
        params.log_top = parts.take<double>(rows);
        params.weight = parts.take<float>(rows);
        params.skipped = parts.take<float>(rows);
        params.memory = parts.take<E>(states ? chunks * F * V : 0);
        params.sums = parts.take<float>(states ? chunks * F : 0);
        params.chunk_stats = parts.take<mlstm_chunk_stats>(chunks);
        const std::int32_t of_states = state_segments(F, V), fused = fused_segments(F, V, true);
        // Smaller calls may be cut into more segments: fused_segments() into `most` a plane, cuts_of() and
        // state_segments() into no more in all than 4 * processors.
        const std::int64_t most = std::min(max_fused_segments, std::max(1, call.streams.chunks / 2));
        const std::int64_t segments =
            for_smaller ? std::max(planes() * most, 4 * processors)
                        : planes() * std::max({of_states * cuts_of(of_states), fused * cuts_of(fused),
                                               fused_segments(F, V, false)});
        params.partial_states = parts.take<float>(segments * (F * (V + 1)));
        params.partial_keeps = parts.take<float>(segments);
        if (!backward) {
            return;
        }
        params.slope_i = parts.take<float>(rows);
        params.slope_f = parts.take<float>(rows);
        params.d_n = parts.take<E>(rows * V);
        params.state_decay = parts.take<float>(rows);
        params.d_g = parts.take<float>(rows);
        params.cross_chunk = parts.take<float>(rows);
        params.d_memory = parts.take<E>(chunks * F * V);
        params.d_sums = parts.take<float>(chunks * F * (V / 32));
        params.d_across = parts.take<float>(chunks * (F / 64) * (V / 64));
        params.d_readout = parts.take<float>(chunks * (2 * std::int64_t{params.width} + 1));
        params.d_gates = parts.take<float>(chunks * 2);
    }
};

template <class S>
inline constexpr bool is_hedgehog = std::is_same_v<typename S::feature_map, Hedgehog>;

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
