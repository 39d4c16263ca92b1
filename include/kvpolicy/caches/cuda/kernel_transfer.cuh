// One layer of a sequence, between a cache and the bytes of caches/transfer.hpp.
#pragma once

#include <kvpolicy/caches/cuda/kernel_sequences.cuh>
#include <kvpolicy/caches/cuda/page_bounds.cuh>
#include <kvpolicy/caches/cuda/paged/kernel_paged_snapshot.cuh>
#include <kvpolicy/caches/transfer.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int transfer_threads = 256;

/// A call: of the cache, the sequence and the bytes.
template <class Ref>
struct transfer_params {
    Ref cache;
    std::int32_t seq = 0;
    unsigned char* bytes = nullptr;
    std::int64_t size = 0;
    std::int32_t pieces = 1;  // blocks that share a head
    std::uint32_t* status = nullptr;
};

/// The head of a block, and its part of it.
struct transfer_block {
    std::int32_t head, piece;
    __device__ explicit transfer_block(std::int32_t pieces)
        : head(static_cast<std::int32_t>(blockIdx.x) / pieces),
          piece(static_cast<std::int32_t>(blockIdx.x) % pieces) {}
};

inline __device__ void report_transfer(std::uint32_t* status, std::uint32_t bit) {
    if (status != nullptr) {
        atomicOr(status, bit);
    }
}

/// Rows [0, used) of a head and rows of a saved layer from `first` on, by the warps of `pieces` blocks. Four
/// rows of a warp are on their way at once: over a bus each takes a microsecond or two.
template <bool Load, class Ref, class Rows>
__device__ void transfer_rows(const transfer_params<Ref>& call, const Rows& rows,
                              const detail::layer_layout& at, std::int64_t first, std::int32_t used,
                              std::int32_t piece) {
    using T = typename Ref::value_type;
    using Piece = std::conditional_t<sizeof(T) == 2, uint4, T>;
    constexpr int each = sizeof(Piece) / sizeof(T), together = 4;
    constexpr std::int32_t warps = transfer_threads / 32;
    auto* const position = reinterpret_cast<position_t*>(call.bytes + at.position) + first;
    auto* const score = reinterpret_cast<float*>(call.bytes + at.score) + first;
    const bool of_key = lane_id() < 16;
    const std::int32_t dim = of_key ? call.cache.head_dim_qk : call.cache.head_dim_vo;
    auto* const saved = reinterpret_cast<T*>(call.bytes + (of_key ? at.k : at.v)) + first * dim;
    for (std::int32_t r = (piece * warps + warp_id()) * together; r < used;
         r += call.pieces * warps * together) {
        Piece* mine[together];
        Piece* theirs[together];
#pragma unroll
        for (int i = 0; i < together; ++i) {
            const std::int32_t row = r + i < used ? r + i : r;
            mine[i] = reinterpret_cast<Piece*>(of_key ? rows.k(row) : rows.v(row));
            theirs[i] = reinterpret_cast<Piece*>(saved + std::int64_t{row} * dim);
        }
        for (std::int32_t c = lane_id() % 16; c < dim / each; c += 16) {
            Piece x[together];
#pragma unroll
            for (int i = 0; i < together; ++i) {
                x[i] = Load ? theirs[i][c] : mine[i][c];
            }
#pragma unroll
            for (int i = 0; i < together; ++i) {
                (Load ? mine[i] : theirs[i])[c] = x[i];
            }
        }
        if (lane_id() < together && r + lane_id() < used) {
            const std::int32_t row = r + lane_id();
            if constexpr (Load) {
                rows.position(row) = position[row];
                rows.score(row) = score[row];
            } else {
                position[row] = rows.position(row);
                score[row] = rows.score(row);
            }
        }
    }
}

/// The scorer state and the ring of queries of a head, by the threads of `pieces` blocks.
template <bool Load, class Ref>
__device__ void transfer_state(const transfer_params<Ref>& call, const detail::layer_layout& at,
                               std::int32_t head, std::int32_t piece) {
    const Ref& cache = call.cache;
    const auto move = [&](auto* mine, std::int64_t begin, std::int64_t count) {
        auto* const theirs =
            reinterpret_cast<std::remove_pointer_t<decltype(mine)>*>(call.bytes + begin) + head * count;
        for (std::int64_t i = piece * transfer_threads + static_cast<std::int32_t>(threadIdx.x); i < count;
             i += call.pieces * transfer_threads) {
            (Load ? mine : theirs)[i] = (Load ? theirs : mine)[i];
        }
    };
    move(cache.state + cache.head_index(call.seq, head) * cache.state_size, at.state, cache.state_size);
    if constexpr (Ref::policy_type::has_eviction) {
        move(cache.query_row(call.seq, head, 0), at.queries, detail::layer_layout::query_numbers(cache));
    }
}

/// save_layer: one layer of a sequence into the bytes.
///
/// Grid: Hkv * pieces blocks. Block: transfer_threads. Shared memory: three sums (static).
/// In: the layer's entries, counters and states. Overwrites: the bytes, which may be pinned host memory; the
/// header alone, with no name, where the sequence is in the middle of a token or `size` does not suffice.
///
/// Phases: 1. Entries of the heads before, and of all. 2. Header, numbers of the head. 3. State. 4. Rows,
/// four of a warp at once.
template <class Ref>
__global__ void __launch_bounds__(transfer_threads)
    save_layer_kernel(const __grid_constant__ transfer_params<Ref> call) {
    const Ref& cache = call.cache;
    const transfer_block block(call.pieces);
    const std::int32_t head = block.head, piece = block.piece;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    // 1. Entries.
    __shared__ unsigned long long before, all;
    __shared__ int pending;
    if (thread == 0) {
        before = all = 0;
        pending = 0;
    }
    __syncthreads();
    for (std::int32_t h = thread; h < cache.kv_heads; h += transfer_threads) {
        const auto used = static_cast<unsigned long long>(cache.used(call.seq, h));
        atomicAdd(&all, used);
        if (h < head) {
            atomicAdd(&before, used);
        }
        if (cache.num_appended(call.seq, h) != 0) {
            pending = 1;
        }
    }
    __syncthreads();
    const auto entries = static_cast<std::int64_t>(all), first = static_cast<std::int64_t>(before);
    const detail::layer_layout at(cache, entries);
    const bool fits = at.bytes <= call.size;
    auto* const header = reinterpret_cast<detail::layer_header*>(call.bytes);
    if (!fits || pending != 0) {
        if (blockIdx.x == 0 && thread == 0) {
            header->magic = 0;
            report_transfer(call.status, fits ? status_layer_skipped : status_bad_length);
        }
        return;
    }
    // 2. Header, numbers of the head.
    const std::int64_t index = cache.head_index(call.seq, head);
    if (piece == 0 && thread == 0) {
        if (head == 0) {
            *header = detail::header_of(cache, cache.length[call.seq], entries);
        }
        const HeadRows layout = cache.layout(head);
        detail::layer_head saved{layout.sinks, layout.window, cache.num_long_range[index], 0};
        if constexpr (Ref::policy_type::has_keep) {
            saved.num_protected = cache.num_protected[index];
        }
        reinterpret_cast<detail::layer_head*>(call.bytes + at.heads)[head] = saved;
    }
    // 3. State.
    transfer_state<false>(call, at, head, piece);
    // 4. Rows.
    transfer_rows<false>(call, cache.head_rows(call.seq, head), at, first, cache.used(call.seq, head), piece);
}

/// load_layer, before the rows: whether the bytes are of such a layer, and the pages for it. num_draft of the
/// sequence is 0 then, or -1 where the layer stays as it is.
///
/// Grid: 1 block. Block: admit_threads. Shared memory: admit_memory; first [Hkv + 1] int64 (dynamic).
/// In: the header and the heads' numbers. Overwrites: num_draft, and of a DualCache page tables, held,
/// refcounts and the stack of free pages. status [1] is OR-ed.
template <class Ref>
__global__ void __launch_bounds__(admit_threads)
    begin_load_layer_kernel(const __grid_constant__ transfer_params<Ref> call) {
    auto* const first = reinterpret_cast<std::int64_t*>(dynamic_shared());
    __shared__ detail::layer_header header;
    __shared__ int fits;
    const Ref& cache = call.cache;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    if (thread == 0) {
        header = *reinterpret_cast<const detail::layer_header*>(call.bytes);
        fits = detail::header_fits(cache, header, call.size) ? 1 : 0;
    }
    __syncthreads();
    const auto* const heads =
        reinterpret_cast<const detail::layer_head*>(call.bytes + sizeof(detail::layer_header));
    for (std::int32_t h = thread; fits != 0 && h < cache.kv_heads; h += admit_threads) {
        first[h + 1] = detail::entries_of(cache, h, header.length, heads[h]);
    }
    __syncthreads();
    if (thread == 0 && fits != 0) {
        first[0] = 0;
        for (std::int32_t h = 0; h < cache.kv_heads; ++h) {
            fits = fits != 0 && first[h + 1] >= 0 ? 1 : 0;
            first[h + 1] += first[h];
        }
        fits = fits != 0 && first[cache.kv_heads] == header.entries ? 1 : 0;
    }
    __syncthreads();
    std::int64_t lacking = 0;
    if constexpr (Ref::pooled) {
        __shared__ admit_memory memory;
        if (fits != 0) {
            lacking = refill_pages(memory, &call.cache, 1, call.seq, first);
        }
    }
    if (thread == 0) {
        if (fits == 0 || lacking != 0) {
            report_transfer(call.status, fits == 0 ? status_bad_length : status_pool_exhausted);
        }
        cache.num_draft[call.seq] = fits == 0 || lacking != 0 ? -1 : 0;
    }
}

/// load_layer: the bytes into the layer, where begin_load_layer_kernel has not refused them.
///
/// Grid: Hkv * pieces blocks. Block: transfer_threads. Shared memory: one sum (static).
/// Overwrites: entries, counters and states of the layer, and the sequence's length.
///
/// Phases: 1. Entries of the heads before. 2. Counters. 3. State. 4. Rows.
template <class Ref>
__global__ void __launch_bounds__(transfer_threads)
    load_layer_kernel(const __grid_constant__ transfer_params<Ref> call) {
    const Ref& cache = call.cache;
    if (cache.num_draft[call.seq] < 0) {
        return;
    }
    const transfer_block block(call.pieces);
    const std::int32_t head = block.head, piece = block.piece;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    __shared__ unsigned long long before;
    __shared__ detail::layer_header header;
    // 1. Entries.
    if (thread == 0) {
        before = 0;
        header = *reinterpret_cast<const detail::layer_header*>(call.bytes);
    }
    __syncthreads();
    const auto* const heads =
        reinterpret_cast<const detail::layer_head*>(call.bytes + sizeof(detail::layer_header));
    const auto used_by = [&](std::int32_t h) {
        return static_cast<std::int32_t>(cache.layout(h).used(header.length, heads[h].num_long_range));
    };
    for (std::int32_t h = thread; h < head; h += transfer_threads) {
        atomicAdd(&before, static_cast<unsigned long long>(used_by(h)));
    }
    __syncthreads();
    const detail::layer_layout at(cache, header.entries);
    // 2. Counters.
    if (piece == 0 && thread == 0) {
        const std::int64_t index = cache.head_index(call.seq, head);
        cache.num_long_range[index] = heads[head].num_long_range;
        cache.victim[index] = -1;
        cache.appended[index] = 0;
        if constexpr (Ref::policy_type::has_keep) {
            cache.num_protected[index] = heads[head].num_protected;
        }
        if (head == 0) {
            cache.length[call.seq] = header.length;
            if constexpr (Ref::pooled) {
                cache.reserved[call.seq] = 0;
            }
        }
    }
    // 3. State.
    transfer_state<true>(call, at, head, piece);
    // 4. Rows.
    transfer_rows<true>(call, cache.head_rows(call.seq, head), at, static_cast<std::int64_t>(before),
                        used_by(head), piece);
}

/// load_layer with a selection, after the rows: bounds of the layer's pages.
///
/// Grid: Hkv * pieces blocks. Block: transfer_threads; a warp per page. Overwrites: bounds [2, Dk] of T per
/// page.
template <class Ref>
__global__ void __launch_bounds__(transfer_threads)
    load_layer_bounds_kernel(const __grid_constant__ transfer_params<Ref> call) {
    const transfer_block block(call.pieces);
    constexpr std::int32_t warps = transfer_threads / 32;
    const std::int32_t used = call.cache.used(call.seq, block.head);
    if (call.cache.num_draft[call.seq] >= 0) {
        refresh_pages(call.cache.head_rows(call.seq, block.head), 0, used, used,
                      block.piece * warps + warp_id(), call.pieces * warps);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
