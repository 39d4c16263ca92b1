// The launches behind build_mask and build_cutoffs: which ways a call's budgets take, the memory of each, and
// the kernels in their order. Which kernels run depends on the policy's parts, the shapes, the rules' numbers
// and the GPU, never on what is in device memory.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/check.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/tuning.cuh>
#include <kvpolicy/masks/cuda/kernel_cutoff_prefix.cuh>
#include <kvpolicy/masks/cuda/kernel_decayed_rounds.cuh>
#include <kvpolicy/masks/cuda/kernel_decayed_top_k.cuh>
#include <kvpolicy/masks/cuda/kernel_expire.cuh>
#include <kvpolicy/masks/cuda/kernel_fix_ties.cuh>
#include <kvpolicy/masks/cuda/kernel_make_sort_keys.cuh>
#include <kvpolicy/masks/cuda/kernel_rank.cuh>
#include <kvpolicy/masks/cuda/kernel_sort_long_ties.cuh>
#include <kvpolicy/masks/cuda/make_mask_params.cuh>

#include <cub/device/device_radix_sort.cuh>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Which of the ways a call's budgets take. Decided on the host from rules and shapes.
struct mask_plan {
    bool ranked = false;           // some head's order is static: ranks and the expiry kernel
    bool decayed = false;          // some of those have gamma < 1: 32-bit keys may need repair
    bool decayed_rounds = false;   // some head's is not, and its keys are ranked by class
    bool decayed_top_k = false;    // some head's is not, and they are not
    bool by_block = false;         // ranks by one block per segment, not by a sort over the device
    std::int64_t max_entries = 0;  // of a head of decayed_top_k
};

template <class P>
mask_plan plan_mask(const P& policy, const Sequences& sequences, std::int32_t heads, std::int32_t layer,
                    position_t limit, const mask_tuning& tuning) {
    using params = mask_params<typename P::gate_type, decltype(policy.keep())>;
    mask_plan plan;
    for (std::int32_t h = 0; h < heads; ++h) {
        const HeadParams head_params = policy.params(layer, h);
        if (params::needs_decayed_rounds(head_params, sequences.length, limit)) {
            plan.decayed_rounds = true;
        } else if (params::needs_decayed_top_k(head_params, sequences.length, limit)) {
            plan.decayed_top_k = true;
            const std::int64_t leaving = std::max<std::int64_t>(
                0, std::int64_t{sequences.length} - head_params.sinks - head_params.window);
            plan.max_entries =
                std::max(plan.max_entries, std::min<std::int64_t>(head_params.budget, leaving));
        } else {
            plan.ranked = true;
            plan.decayed = plan.decayed || head_params.log_gamma != 0.0f;
        }
    }
    plan.by_block = sequences.length <= tuning.longest_block_sort;
    return plan;
}

/// What is ranked: planes of `length` keys each, in segments and chunks of mask_chunk keys.
struct ranking_shape {
    std::int64_t planes, length, segments, chunks;

    /// The planes of a call's heads.
    ranking_shape(const Sequences& sequences, std::int32_t heads)
        : planes(std::int64_t{sequences.batch} * heads),
          length(sequences.length),
          segments(sequences.cu_seqlens == nullptr ? 1 : sequences.segments),
          chunks(chunks_of(sequences)) {}
    /// The keys of all heads of a sequence in one plane.
    static ranking_shape of_layers(const Sequences& sequences, std::int32_t heads) {
        ranking_shape shape(sequences, 1);
        shape.length *= heads;
        shape.chunks = sequences.cu_seqlens == nullptr ? (shape.length + mask_chunk - 1) / mask_chunk
                                                       : shape.length / mask_chunk + shape.segments;
        return shape;
    }
    [[nodiscard]] std::int64_t count() const { return planes * length; }
    [[nodiscard]] std::int64_t tasks() const { return planes * segments; }
};

/// Device memory of the ranking, in the order in which it is taken from the workspace.
struct ranking_memory {
    // Both ways.
    void* rank = nullptr;
    void* order = nullptr;
    cutoff_checkpoint* checkpoints = nullptr;
    std::int32_t* competitors = nullptr;
    // Over the device.
    sorted_keys sort[2];
    tie_list runs;
    std::uint64_t* cleared = nullptr;  // numbers of `runs` that begin as 0
    static constexpr std::int64_t cleared_numbers = 4;
    cutoff_prefix_counts counts;
    void* cub = nullptr;
    std::size_t cub_bytes = 0;

    static ranking_memory take(workspace_parts& parts, bool by_block, const ranking_shape& shape,
                               const cuda& ctx) {
        ranking_memory memory;
        const std::int64_t count = shape.count();
        memory.checkpoints = parts.take<cutoff_checkpoint>(shape.planes * shape.chunks);
        memory.competitors = parts.take<std::int32_t>(shape.tasks());
        if (by_block) {
            memory.rank = parts.take<std::uint16_t>(count);
            memory.order = parts.take<std::uint16_t>(count);
            return memory;
        }
        detail::require(count <= longest_sequence, "batch * heads * length", count,
                        "at most 2^31 - 2^24 for sequences of this length: split the batch");
        detail::require(shape.tasks() < 0x7fffffff, "batch * heads * segments", shape.tasks(),
                        "below 2^31: split the batch");
        for (sorted_keys& one : memory.sort) {
            one.keys = parts.take<std::uint64_t>(count);
            one.tokens = parts.take<std::int32_t>(count);
        }
        tie_list& runs = memory.runs;
        memory.cleared = parts.take<std::uint64_t>(cleared_numbers);
        runs.varies = memory.cleared;
        runs.counts = reinterpret_cast<std::int32_t*>(memory.cleared + 1);
        runs.size = static_cast<std::int32_t>(tie_list::max_runs(count));
        runs.first = parts.take<std::int32_t>(runs.size);
        runs.length = parts.take<std::int32_t>(runs.size);
        runs.first_tile = parts.take<std::int32_t>(tie_list::max_tiled(count));
        runs.key = parts.take<std::uint64_t>(tie_list::max_tiled(count));
        runs.run_of_tile = parts.take<std::int32_t>(tie_list::max_tiles(count));
        runs.digits = parts.take<std::int32_t>(256 * tie_list::max_tiles(count));
        // At most 256 buckets a plane, so that the counts are S / 2 numbers at most. Smaller ones where few
        // keys would give few blocks.
        const std::int64_t least = count <= 1 << 19 ? 1024 : 4096;
        const std::int64_t bucket = std::max(least, (shape.length / 256 + 256) / 256 * 256);
        memory.counts.bucket = static_cast<std::int32_t>(bucket);
        memory.counts.buckets = static_cast<std::int32_t>((shape.length + bucket - 1) / bucket);
        memory.counts.before = parts.take<std::int32_t>(shape.planes * memory.counts.buckets * shape.chunks);
        cub::DoubleBuffer<std::uint64_t> keys(nullptr, nullptr);
        cub::DoubleBuffer<std::int32_t> tokens(nullptr, nullptr);
        // Enough for either, so that a workspace does not depend on which layer's rules decay.
        for (const bool decayed : {false, true}) {
            std::size_t bytes = 0;
            check(cub::DeviceRadixSort::SortPairs(
                      nullptr, bytes, keys, tokens, static_cast<std::int32_t>(count), 0,
                      prefix_bits(shape.tasks(), decayed) + task_bits(shape.tasks()), ctx.stream),
                  "cub::DeviceRadixSort::SortPairs");
            memory.cub_bytes = std::max(memory.cub_bytes, bytes);
        }
        memory.cub = parts.take<unsigned char>(static_cast<std::int64_t>(memory.cub_bytes));
        return memory;
    }

    static int task_bits(std::int64_t tasks) {
        return tasks <= 1 ? 0 : static_cast<int>(std::bit_width(static_cast<std::uint64_t>(tasks - 1)));
    }
    /// 32 bits are all of a score. A priority has more; bits that the sort's last pass of 8 bits includes
    /// anyway are free.
    static int prefix_bits(std::int64_t tasks, bool decayed) {
        return decayed ? (32 + task_bits(tasks) + 7) / 8 * 8 - task_bits(tasks) : 32;
    }
};

template <int Threads, int Items, int Bits = 4, class Gate, class Keep>
void launch_rank(const cuda& ctx, const mask_params<Gate, Keep>& params, const ranking<std::uint16_t>& out,
                 bool wants_ranks) {
    const std::int64_t blocks = std::int64_t{params.batch} * params.heads * params.segments;
    launch("rank_kernel", rank_kernel<Threads, Items, Bits, Gate, Keep>, blocks, Threads,
           sizeof(typename agent_rank<Threads, Items, Bits, Gate, Keep>::shared), ctx, params, out,
           wants_ranks);
}

template <class Index, class Params>
void launch_expire(const cuda& ctx, const Params& params, const ranking<Index>& ranks,
                   const mask_output& out) {
    launch("expire_kernel", expire_kernel<Index, Params>, params.planes() * params.chunks, mask_chunk,
           sizeof(typename agent_expire<Index, Params>::shared), ctx, params, ranks, out);
}

/// The lists of decayed_rounds_kernel.
inline decayed_round_lists take_decayed_lists(workspace_parts& parts, const Sequences& sequences,
                                              std::int32_t heads) {
    const std::int64_t length =
        decayed_round_lists::length_of(sequences.length, sequences.cu_seqlens != nullptr);
    return {parts.take<std::int32_t>(std::int64_t{sequences.batch} * heads * 2 * length), length};
}

/// The kernel that holds the places of the largest budget.
template <class Gate, class Keep>
void launch_decayed_top_k(const cuda& ctx, const mask_params<Gate, Keep>& params, plane_view<expiry_t> expiry,
                          top_k_entry* memory, std::int64_t max_entries) {
    const std::int64_t tasks = std::int64_t{params.batch} * params.heads * params.segments;
    const auto with = [&]<int Threads, class Entries>(std::integral_constant<int, Threads>,
                                                      std::type_identity<Entries>) {
        launch("decayed_top_k_kernel", decayed_top_k_kernel<Threads, Entries, Gate, Keep>, tasks, Threads,
               sizeof(decayed_top_k_shared<Threads>), ctx, params, expiry, memory, max_entries);
    };
    if (max_entries <= register_entries<128>::capacity) {
        with(std::integral_constant<int, 128>{}, std::type_identity<register_entries<128>>{});
    } else if (max_entries <= register_entries<512>::capacity) {
        with(std::integral_constant<int, 512>{}, std::type_identity<register_entries<512>>{});
    } else {
        with(std::integral_constant<int, 512>{}, std::type_identity<memory_entries<512>>{});
    }
}

/// Ranks by a sort over the device, and what follows from them. launch_keys(unsorted) enqueues the kernel
/// that writes sort keys. `decayed`: some keys are prefixes of their priorities only.
template <class Params, class LaunchKeys>
void sort_and_expire(const cuda& ctx, const device_scope& device, bool decayed, const Params& params,
                     const ranking_memory& memory, const mask_output& out, const mask_tuning& tuning,
                     const LaunchKeys& launch_keys) {
    const std::int64_t planes = params.planes();
    const std::int64_t count = planes * params.length;
    const std::int64_t tasks = planes * params.segments;
    const int bits = ranking_memory::prefix_bits(tasks, decayed);
    launch_keys(sorted_keys{memory.sort[0].keys, memory.sort[0].tokens, bits});
    cub::DoubleBuffer<std::uint64_t> keys(memory.sort[0].keys, memory.sort[1].keys);
    cub::DoubleBuffer<std::int32_t> tokens(memory.sort[0].tokens, memory.sort[1].tokens);
    std::size_t cub_bytes = memory.cub_bytes;
    check(
        cub::DeviceRadixSort::SortPairs(memory.cub, cub_bytes, keys, tokens, static_cast<std::int32_t>(count),
                                        0, bits + ranking_memory::task_bits(tasks), ctx.stream),
        "cub::DeviceRadixSort::SortPairs");
    const sorted_keys sorted{keys.Current(), tokens.Current(), bits};
    const sorted_keys spare{keys.Alternate(), tokens.Alternate(), bits};
    if (decayed) {
        check(cudaMemsetAsync(memory.cleared, 0, ranking_memory::cleared_numbers * sizeof(std::uint64_t),
                              ctx.stream),
              "cudaMemsetAsync");
        constexpr std::int64_t decided = fix_ties_keys * device_threads;
        launch("fix_ties_kernel", fix_ties_kernel<Params>, (count + decided - 1) / decided, device_threads, 0,
               ctx, params, sorted, memory.runs);
        launch_cooperative("sort_long_ties_kernel", sort_long_ties_kernel<Params>, tuning.list_blocks, device,
                           device_threads, sizeof(radix_shared), ctx, params, sorted, spare, memory.runs);
    }
    // From here on the sort's other half is free.
    const ranking<std::int32_t> ranks{reinterpret_cast<std::int32_t*>(spare.keys),
                                      params.edges == nullptr ? sorted.tokens : spare.tokens,
                                      memory.checkpoints, memory.competitors};
    launch("invert_and_count_kernel", invert_and_count_kernel<Params>, planes * memory.counts.buckets,
           device_threads,
           (32 + static_cast<std::size_t>(std::min(params.chunks, counted_chunks))) * sizeof(std::int32_t),
           ctx, params, sorted, ranks, memory.counts);
    launch("cutoff_checkpoints_kernel", cutoff_checkpoints_kernel<Params>,
           (planes * params.chunks + device_threads / 32 - 1) / (device_threads / 32), device_threads, 0, ctx,
           params, ranks, memory.counts);
    launch_expire(ctx, params, ranks, out);
}

/// Ranks and what follows from them, for the heads whose ranks are static.
template <class Gate, class Keep>
void rank_and_expire(const cuda& ctx, const device_scope& device, const mask_plan& plan,
                     const mask_params<Gate, Keep>& params, const ranking_memory& memory,
                     const mask_output& out, bool wants_ranks, const mask_tuning& tuning) {
    if (plan.by_block) {
        const ranking<std::uint16_t> ranks{static_cast<std::uint16_t*>(memory.rank),
                                           static_cast<std::uint16_t*>(memory.order), memory.checkpoints,
                                           memory.competitors};
        if (params.length <= 2048) {
            launch_rank<256, 8>(ctx, params, ranks, wants_ranks);
        } else if (params.length <= 4096) {
            launch_rank<512, 8>(ctx, params, ranks, wants_ranks);
        } else {
            launch_rank<1024, 16, 5>(ctx, params, ranks, wants_ranks);
        }
        launch_expire(ctx, params, ranks, out);
        return;
    }
    sort_and_expire(ctx, device, plan.decayed, params, memory, out, tuning, [&](const sorted_keys& unsorted) {
        const std::int64_t parts = (params.length + keys_of_block - 1) / keys_of_block;
        launch("make_sort_keys_kernel", make_sort_keys_kernel<Gate, Keep>, params.planes() * parts,
               device_threads, 0, ctx, params, unsorted);
    });
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
