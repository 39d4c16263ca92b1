// Bodies of masks/build.cuh: from arguments to launches. Which kernels run depends on the policy's parts, the shapes, the
// rules' numbers and the card, never on what is in device memory.
#pragma once

#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/dispatch.cuh>
#include <kvpolicy/cuda/kernels/cutoffs.cuh>
#include <kvpolicy/cuda/kernels/expire.cuh>
#include <kvpolicy/cuda/kernels/rank_block.cuh>
#include <kvpolicy/cuda/kernels/rank_device.cuh>
#include <kvpolicy/cuda/kernels/survivors.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/tuning.cuh>
#include <kvpolicy/masks/build.cuh>

#include <cub/device/device_radix_sort.cuh>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <string>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Which of the ways a call's budgets take. Decided on the host from rules and shapes.
struct mask_plan {
    bool ranked = false;           // some head's contest is static: ranks and the expiry kernel
    bool decayed = false;          // some of those have gamma < 1: 32-bit keys may need repair
    bool survivors = false;        // some head's is not
    bool by_block = false;         // ranks by one block a segment, not by a sort over the device
    std::int64_t most_places = 0;  // of a head that contests survivors
};

template <class P>
mask_plan plan_mask(const P& policy, const Sequences& sequences, std::int32_t heads, std::int32_t layer,
                    position_t limit, const mask_tuning& tuning) {
    using problem = mask_problem<typename P::gate_type, decltype(policy.keep())>;
    mask_plan plan;
    for (std::int32_t h = 0; h < heads; ++h) {
        const HeadRule rule = policy.rule(layer, h);
        if (problem::contest_needs_survivors(rule, sequences.length, limit)) {
            plan.survivors = true;
            const std::int64_t leaving =
                std::max<std::int64_t>(0, std::int64_t{sequences.length} - rule.sinks - rule.window);
            plan.most_places = std::max(plan.most_places, std::min<std::int64_t>(rule.budget, leaving));
        } else {
            plan.ranked = true;
            plan.decayed = plan.decayed || rule.log_gamma != 0.0f;
        }
    }
    plan.by_block = sequences.length <= tuning.longest_block_sort;
    return plan;
}

/// Device memory of the ranking, in the order in which it is taken from the workspace.
struct ranking_memory {
    // Both ways.
    void* rank = nullptr;
    void* order = nullptr;
    cutoff_anchor* anchors = nullptr;
    std::int32_t* competitors = nullptr;
    // Over the device.
    sorted_keys sort[2];
    run_list runs;
    std::uint64_t* cleared = nullptr;  // numbers of `runs` that begin as 0
    static constexpr std::int64_t cleared_numbers = 4;
    arrival_counts counts;
    void* cub = nullptr;
    std::size_t cub_bytes = 0;

    /// `slots` and `segments` as in the problem.
    static ranking_memory take(workspace_parts& parts, const mask_plan& plan, const Sequences& sequences,
                               std::int32_t heads, const cuda& on) {
        ranking_memory memory;
        const bool packed = sequences.cu_seqlens != nullptr;
        const std::int64_t segments = packed ? sequences.segments : 1;
        const std::int64_t slots = packed ? sequences.length / mask_chunk + segments
                                          : (std::int64_t{sequences.length} + mask_chunk - 1) / mask_chunk;
        const std::int64_t planes = std::int64_t{sequences.batch} * heads;
        const std::int64_t count = planes * sequences.length;
        memory.anchors = parts.take<cutoff_anchor>(planes * slots);
        memory.competitors = parts.take<std::int32_t>(planes * segments);
        if (plan.by_block) {
            memory.rank = parts.take<std::uint16_t>(count);
            memory.order = parts.take<std::uint16_t>(count);
            return memory;
        }
        detail::require(count < 0x7fffffff, "batch * heads * length", count,
                        "below 2^31 for sequences of this length: split the batch");
        detail::require(planes * segments < 0x7fffffff, "batch * heads * segments", planes * segments,
                        "below 2^31: split the batch");
        for (sorted_keys& one : memory.sort) {
            one.keys = parts.take<std::uint64_t>(count);
            one.tokens = parts.take<std::int32_t>(count);
        }
        run_list& runs = memory.runs;
        memory.cleared = parts.take<std::uint64_t>(cleared_numbers);
        runs.varies = memory.cleared;
        runs.counts = reinterpret_cast<std::int32_t*>(memory.cleared + 1);
        runs.size = static_cast<std::int32_t>(run_list::most_runs(count));
        runs.first = parts.take<std::int32_t>(runs.size);
        runs.length = parts.take<std::int32_t>(runs.size);
        runs.first_tile = parts.take<std::int32_t>(run_list::most_tiled(count));
        runs.key = parts.take<std::uint64_t>(run_list::most_tiled(count));
        runs.run_of_tile = parts.take<std::int32_t>(run_list::most_tiles(count));
        runs.digits = parts.take<std::int32_t>(256 * run_list::most_tiles(count));
        // At most 256 buckets a plane, so that the counts are S / 2 numbers at most.
        constexpr std::int32_t least = 4096;
        memory.counts.bucket = std::max(least, (sequences.length / 256 + 256) / 256 * 256);
        memory.counts.buckets = (sequences.length + memory.counts.bucket - 1) / memory.counts.bucket;
        memory.counts.before = parts.take<std::int32_t>(planes * memory.counts.buckets * slots);
        cub::DoubleBuffer<std::uint64_t> keys(nullptr, nullptr);
        cub::DoubleBuffer<std::int32_t> tokens(nullptr, nullptr);
        // Enough for either, so that a workspace does not depend on which layer's rules decay.
        for (const bool decayed : {false, true}) {
            std::size_t bytes = 0;
            check(cub::DeviceRadixSort::SortPairs(
                      nullptr, bytes, keys, tokens, static_cast<std::int32_t>(count), 0,
                      prefix_bits(planes * segments, decayed) + task_bits(planes * segments), on.stream),
                  "cub::DeviceRadixSort::SortPairs");
            memory.cub_bytes = std::max(memory.cub_bytes, bytes);
        }
        memory.cub = parts.take<unsigned char>(static_cast<std::int64_t>(memory.cub_bytes));
        return memory;
    }

    static int task_bits(std::int64_t tasks) {
        return static_cast<int>(std::bit_width(static_cast<std::uint64_t>(tasks - 1)));
    }
    /// 32 bits are all of a score. A priority has more, and what the sort's last pass of 8 bits has room for is free.
    static int prefix_bits(std::int64_t tasks, bool decayed) {
        return decayed ? (32 + task_bits(tasks) + 7) / 8 * 8 - task_bits(tasks) : 32;
    }
};

template <int Threads, int Items, int Bits = 4, class Gate, class Keep>
void launch_rank_block(const cuda& on, const mask_problem<Gate, Keep>& problem,
                       const ranking<std::uint16_t>& out, bool wants_ranks) {
    const std::int64_t blocks = std::int64_t{problem.batch} * problem.heads * problem.segments;
    launch("rank_block_kernel", rank_block_kernel<Threads, Items, Bits, Gate, Keep>, blocks, Threads,
           sizeof(typename rank_block<Threads, Items, Bits>::shared), on, problem, out, wants_ranks);
}

template <class Index, class Gate, class Keep>
void launch_expire(const cuda& on, const mask_problem<Gate, Keep>& problem, const ranking<Index>& ranks,
                   const mask_output& out) {
    const std::int64_t blocks = std::int64_t{problem.batch} * problem.heads * problem.slots;
    launch("expire_kernel", expire_kernel<Index, Gate, Keep>, blocks, mask_chunk,
           sizeof(typename expire_block<Index>::shared), on, problem, ranks, out);
}

/// The kernel that holds the places of the largest budget.
template <class Gate, class Keep>
void launch_survivors(const cuda& on, const mask_problem<Gate, Keep>& problem, plane_view<expiry_t> expiry,
                      survivor* memory, std::int64_t most_places) {
    const std::int64_t tasks = std::int64_t{problem.batch} * problem.heads * problem.segments;
    const auto with = [&]<int Threads, class Places>(std::integral_constant<int, Threads>,
                                                     std::type_identity<Places>) {
        launch("survivors_kernel", survivors_kernel<Threads, Places, Gate, Keep>, tasks, Threads,
               sizeof(survivors_shared<Threads>), on, problem, expiry, memory, most_places);
    };
    if (most_places <= register_places<128>::capacity) {
        with(std::integral_constant<int, 128>{}, std::type_identity<register_places<128>>{});
    } else if (most_places <= register_places<512>::capacity) {
        with(std::integral_constant<int, 512>{}, std::type_identity<register_places<512>>{});
    } else {
        with(std::integral_constant<int, 512>{}, std::type_identity<memory_places<512>>{});
    }
}

/// Ranks and what follows from them, for the heads whose ranks are static.
template <class Gate, class Keep>
void rank_and_expire(const cuda& on, const device_scope& device, const mask_plan& plan,
                     const mask_problem<Gate, Keep>& problem, const ranking_memory& memory,
                     const mask_output& out, bool wants_ranks, const mask_tuning& tuning) {
    if (plan.by_block) {
        const ranking<std::uint16_t> ranks{static_cast<std::uint16_t*>(memory.rank),
                                           static_cast<std::uint16_t*>(memory.order), memory.anchors,
                                           memory.competitors};
        if (problem.length <= 2048) {
            launch_rank_block<256, 8>(on, problem, ranks, wants_ranks);
        } else if (problem.length <= 4096) {
            launch_rank_block<512, 8>(on, problem, ranks, wants_ranks);
        } else {
            launch_rank_block<1024, 16, 5>(on, problem, ranks, wants_ranks);
        }
        launch_expire(on, problem, ranks, out);
        return;
    }
    const std::int64_t planes = std::int64_t{problem.batch} * problem.heads;
    const std::int64_t count = planes * problem.length;
    const std::int64_t parts = (problem.length + keys_of_block - 1) / keys_of_block;
    const std::int64_t tasks = planes * problem.segments;
    const int bits = ranking_memory::prefix_bits(tasks, plan.decayed);
    const sorted_keys unsorted{memory.sort[0].keys, memory.sort[0].tokens, bits};
    launch("make_keys_kernel", make_keys_kernel<Gate, Keep>, planes * parts, device_threads, 0, on, problem,
           unsorted);
    cub::DoubleBuffer<std::uint64_t> keys(memory.sort[0].keys, memory.sort[1].keys);
    cub::DoubleBuffer<std::int32_t> tokens(memory.sort[0].tokens, memory.sort[1].tokens);
    std::size_t cub_bytes = memory.cub_bytes;
    check(
        cub::DeviceRadixSort::SortPairs(memory.cub, cub_bytes, keys, tokens, static_cast<std::int32_t>(count),
                                        0, bits + ranking_memory::task_bits(tasks), on.stream),
        "cub::DeviceRadixSort::SortPairs");
    const sorted_keys sorted{keys.Current(), tokens.Current(), bits};
    const sorted_keys spare{keys.Alternate(), tokens.Alternate(), bits};
    if (plan.decayed) {
        check(cudaMemsetAsync(memory.cleared, 0, ranking_memory::cleared_numbers * sizeof(std::uint64_t),
                              on.stream),
              "cudaMemsetAsync");
        constexpr std::int64_t settled = settled_keys * device_threads;
        launch("settle_runs_kernel", settle_runs_kernel<Gate, Keep>, (count + settled - 1) / settled,
               device_threads, 0, on, problem, sorted, memory.runs);
        launch_cooperative("sort_long_runs_kernel", sort_long_runs_kernel<Gate, Keep>, tuning.list_blocks,
                           device, device_threads, sizeof(radix_shared), on, problem, sorted, spare,
                           memory.runs);
    }
    // From here on the sort's other half is free.
    const ranking<std::int32_t> ranks{reinterpret_cast<std::int32_t*>(spare.keys),
                                      problem.edges == nullptr ? sorted.tokens : spare.tokens, memory.anchors,
                                      memory.competitors};
    launch("invert_and_count_kernel", invert_and_count_kernel<Gate, Keep>, planes * memory.counts.buckets,
           device_threads,
           (32 + static_cast<std::size_t>(std::min(problem.slots, counted_slots))) * sizeof(std::int32_t), on,
           problem, sorted, ranks, memory.counts);
    launch("anchors_kernel", anchors_kernel<Gate, Keep>,
           (planes * problem.slots + device_threads / 32 - 1) / (device_threads / 32), device_threads, 0, on,
           problem, ranks, memory.counts);
    launch_expire(on, problem, ranks, out);
}

template <class P>
void check_mask_call(const P& policy, plane_view<const float> scores, const Sequences& sequences,
                     std::int32_t batch, std::int32_t heads, std::int32_t length, std::int32_t layer) {
    policy.check_layer(layer, heads);
    check_sequences(sequences, batch, length);
    if constexpr (P::ranked) {
        check_plane("scores", scores, batch, heads, sequences.length);
    }
}

/// The tuning for a context's card.
inline mask_tuning mask_tuning_of(const cuda& on) {
    const device_scope device(on);
    return select_mask_tuning(device.capability());
}

// build_mask with a given tuning, so that tests can take every way on one card.

template <class P>
std::size_t mask_workspace_bytes(const cuda& on, const P& policy, const Sequences& sequences,
                                 std::int32_t heads, const MaskOptions& options, const mask_tuning& tuning) {
    workspace_parts parts(nullptr);
    static_cast<void>(small_numbers::take(parts, sequences, heads));
    if constexpr (P::has_budget) {
        const device_scope device(on);
        const mask_plan plan =
            plan_mask(policy, sequences, heads, options.layer, options.rebase_limit, tuning);
        if (plan.ranked) {
            static_cast<void>(ranking_memory::take(parts, plan, sequences, heads, on));
        }
        if (plan.survivors) {
            const std::int64_t segments = sequences.cu_seqlens == nullptr ? 1 : sequences.segments;
            static_cast<void>(
                parts.take<survivor>(std::int64_t{sequences.batch} * heads * segments * plan.most_places));
        }
    }
    return parts.bytes();
}

template <class P>
void build_mask_tuned(const cuda& on, const P& policy, plane_view<const float> scores,
                      const Sequences& sequences, plane_view<expiry_t> expiry, workspace_view workspace,
                      const MaskOptions& options, std::uint32_t* status, const mask_tuning& tuning) {
    const std::int32_t heads = expiry.heads;
    check_mask_call(policy, scores, sequences, expiry.batch, heads, expiry.length, options.layer);
    check_plane("expiry", expiry, sequences.batch, heads, sequences.length);
    detail::require(options.rebase_limit >= 1 && options.rebase_limit <= rebase_limit, "rebase_limit",
                    options.rebase_limit, "1 to 2^29");
    check_workspace(workspace, mask_workspace_bytes(on, policy, sequences, heads, options, tuning));
    if (sequences.batch == 0 || heads == 0 || sequences.length == 0) {
        return;
    }

    const device_scope device(on);
    workspace_parts parts(workspace.data);
    const small_numbers small = small_numbers::take(parts, sequences, heads);
    auto problem = make_problem(on, policy, scores, sequences, heads, options.layer, small, status);
    problem.limit = options.rebase_limit;
    using Gate = decltype(problem.gate);
    using Keep = decltype(problem.keep);
    const std::int64_t planes = std::int64_t{problem.batch} * heads;
    if constexpr (!P::has_budget) {
        launch("expire_alone_kernel", expire_alone_kernel<P::ranked, Gate, Keep>, planes * problem.slots,
               mask_chunk, 0, on, problem, expiry);
    } else {
        const mask_plan plan =
            plan_mask(policy, sequences, heads, options.layer, options.rebase_limit, tuning);
        if (plan.ranked) {
            const ranking_memory memory = ranking_memory::take(parts, plan, sequences, heads, on);
            rank_and_expire(on, device, plan, problem, memory, {expiry, {}, {}}, false, tuning);
        }
        if (plan.survivors) {
            const std::int64_t tasks = planes * problem.segments;
            launch_survivors(on, problem, expiry, parts.take<survivor>(tasks * plan.most_places),
                             plan.most_places);
        }
    }
}

}  // namespace cuda_backend

template <AnyPolicy P>
std::size_t build_mask_workspace_bytes(const cuda& on, const P& policy, const Sequences& sequences,
                                       std::int32_t heads, const MaskOptions& options) {
    return cuda_backend::mask_workspace_bytes(on, policy, sequences, heads, options,
                                              cuda_backend::mask_tuning_of(on));
}

template <AnyPolicy P>
void build_mask(const cuda& on, const P& policy, plane_view<const float> scores, const Sequences& sequences,
                plane_view<expiry_t> expiry, workspace_view workspace, const MaskOptions& options,
                std::uint32_t* status) {
    cuda_backend::build_mask_tuned(on, policy, scores, sequences, expiry, workspace, options, status,
                                   cuda_backend::mask_tuning_of(on));
}

template <Cutoff C, AnyPolicy P>
std::size_t build_cutoffs_workspace_bytes(const cuda& on, const P& policy, const Sequences& sequences,
                                          std::int32_t heads) {
    using namespace cuda_backend;
    static_assert(P::has_budget, "kvpolicy: build_cutoffs needs a policy with a TopKBudget");
    const device_scope device(on);
    workspace_parts parts(nullptr);
    static_cast<void>(small_numbers::take(parts, sequences, heads));
    const mask_plan plan =
        plan_mask(policy, sequences, heads, 0, rebase_limit, select_mask_tuning(device.capability()));
    static_cast<void>(ranking_memory::take(parts, plan, sequences, heads, on));
    if constexpr (!std::is_same_v<C, ParallelCutoff>) {
        constexpr std::size_t unit = workspace_parts::alignment;
        const std::size_t each = (C::scratch_bytes(sequences.length) + unit - 1) / unit * unit;
        static_cast<void>(parts.take<unsigned char>(std::int64_t{sequences.batch} * heads *
                                                    static_cast<std::int64_t>(each)));
    }
    return parts.bytes();
}

template <Cutoff C, AnyPolicy P>
void build_cutoffs(const cuda& on, const P& policy, plane_view<const float> scores,
                   const Sequences& sequences, plane_view<std::int32_t> rank, plane_view<std::int32_t> cutoff,
                   workspace_view workspace, std::int32_t layer, std::uint32_t* status) {
    using namespace cuda_backend;
    static_assert(P::has_budget, "kvpolicy: build_cutoffs needs a policy with a TopKBudget");
    const std::int32_t heads = rank.heads;
    cuda_backend::check_mask_call(policy, scores, sequences, rank.batch, heads, rank.length, layer);
    check_plane("rank", rank, sequences.batch, heads, sequences.length);
    check_plane("cutoff", cutoff, sequences.batch, heads, sequences.length);
    detail::require(sequences.cu_seqlens == nullptr, "sequences.cu_seqlens", "given",
                    "null (build_mask takes packed segments)");
    detail::require(sequences.length < rebase_limit, "sequences.length", sequences.length, "below 2^29");
    for (std::int32_t h = 0; h < heads; ++h) {
        const std::int32_t step = policy.rule(layer, h).decay_step;
        detail::require(step == 1, "decay step n", step, "1, since ranks are static only then");
    }
    cuda_backend::check_workspace(workspace, build_cutoffs_workspace_bytes<C>(on, policy, sequences, heads));
    if (sequences.batch == 0 || heads == 0 || sequences.length == 0) {
        return;
    }

    const device_scope device(on);
    const mask_tuning tuning = select_mask_tuning(device.capability());
    workspace_parts parts(workspace.data);
    const small_numbers small = small_numbers::take(parts, sequences, heads);
    const auto problem = make_problem(on, policy, scores, sequences, heads, layer, small, status);
    const mask_plan plan = plan_mask(policy, sequences, heads, layer, rebase_limit, tuning);
    const ranking_memory memory = ranking_memory::take(parts, plan, sequences, heads, on);
    constexpr bool parallel = std::is_same_v<C, ParallelCutoff>;
    rank_and_expire(on, device, plan, problem, memory,
                    {{}, rank, parallel ? cutoff : plane_view<std::int32_t>{}}, true, tuning);
    if constexpr (!parallel) {
        using Gate = std::remove_cvref_t<decltype(problem.gate)>;
        using Keep = std::remove_cvref_t<decltype(problem.keep)>;
        constexpr std::size_t unit = workspace_parts::alignment;
        const std::size_t each = (C::scratch_bytes(sequences.length) + unit - 1) / unit * unit;
        const std::int64_t planes = std::int64_t{sequences.batch} * heads;
        auto* const scratch = parts.take<unsigned char>(planes * static_cast<std::int64_t>(each));
        launch("sequential_cutoffs_kernel", sequential_cutoffs_kernel<C, Gate, Keep>,
               (planes + plane_threads - 1) / plane_threads, plane_threads, 0, on, problem,
               plane_view<const std::int32_t>(rank), cutoff, scratch, each);
    }
}

template <AnyPolicy P>
std::size_t expiry_from_cutoffs_workspace_bytes(const cuda&, const P&, const Sequences& sequences,
                                                std::int32_t heads) {
    using namespace cuda_backend;
    workspace_parts parts(nullptr);
    static_cast<void>(small_numbers::take(parts, sequences, heads));
    return parts.bytes();
}

template <AnyPolicy P>
void expiry_from_cutoffs(const cuda& on, const P& policy, plane_view<const std::int32_t> rank,
                         plane_view<const std::int32_t> cutoff, const Sequences& sequences,
                         plane_view<expiry_t> expiry, workspace_view workspace, std::int32_t layer) {
    using namespace cuda_backend;
    const std::int32_t heads = expiry.heads;
    policy.check_layer(layer, heads);
    cuda_backend::check_sequences(sequences, expiry.batch, expiry.length);
    check_plane("rank", rank, sequences.batch, heads, sequences.length);
    check_plane("cutoff", cutoff, sequences.batch, heads, sequences.length);
    check_plane("expiry", expiry, sequences.batch, heads, sequences.length);
    detail::require(sequences.cu_seqlens == nullptr, "sequences.cu_seqlens", "given",
                    "null (build_mask takes packed segments)");
    cuda_backend::check_workspace(workspace,
                                  expiry_from_cutoffs_workspace_bytes(on, policy, sequences, heads));
    if (sequences.batch == 0 || heads == 0 || sequences.length == 0) {
        return;
    }

    const device_scope device(on);
    workspace_parts parts(workspace.data);
    const small_numbers small = small_numbers::take(parts, sequences, heads);
    const auto problem = make_problem(on, policy, {}, sequences, heads, layer, small, nullptr);
    using Gate = std::remove_cvref_t<decltype(problem.gate)>;
    using Keep = std::remove_cvref_t<decltype(problem.keep)>;
    launch("expiry_from_cutoffs_kernel", expiry_from_cutoffs_kernel<Gate, Keep>,
           std::int64_t{problem.batch} * heads * problem.slots, mask_chunk, 0, on, problem, rank, cutoff,
           expiry);
}

}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
