// Which block does what in a decode step of a paged cache. One block takes the pages (agent_admit) and lays
// the tiles of all heads end to end. Then every block takes the same number of tiles, wherever heads begin
// and end, so ragged heads cost no more than even ones. What a block does with its tiles of a head is
// agent_paged_head.cuh.
#pragma once

#include <kvpolicy/caches/cuda/batch_entry.cuh>
#include <kvpolicy/caches/cuda/paged/agent_admit.cuh>
#include <kvpolicy/caches/cuda/paged/agent_paged_head.cuh>
#include <kvpolicy/caches/cuda/paged/paged_view.cuh>
#include <kvpolicy/caches/top_k_slots.hpp>
#include <kvpolicy/core/cuda_config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// What the first launch says to the second. The tiles of a head come once for each part of its group.
struct paged_decode_work {
    static constexpr std::int32_t least = 8;  // tiles that a block takes at least

    std::int32_t* appended = nullptr;    // [count]: see admission
    std::int32_t* missing = nullptr;     // [count, Hkv]
    std::int32_t* first_tile = nullptr;  // [count * Hkv + 1]: tiles of all heads before, of one part
    std::int32_t* first_pair = nullptr;  // [blocks]: the head that a block begins in
    std::int32_t* share = nullptr;       // [1]: tiles a block
    std::int32_t blocks = 0;
};
// States are [blocks + count * Hkv * parts]: that of block b's share of part p of a head is b + head * parts
// + p. From one share to the next the block or the part moves on, so all are different, and those of one part
// lie together.

template <class Rows, class Gate, class Scorer, class View>
using paged_decode_params = paged_params<Rows, Gate, Scorer, View, paged_decode_work>;

/// Which entries take part, with pages for what a step writes; those that find none get empty outputs. One
/// block.
template <class Launch>
__device__ void admit_paged_decode(const Launch& call, admit_memory& memory) {
    using T = typename Launch::T;
    const paged_decode_work& work = call.work;
    const std::int32_t kv_heads = call.cache.kv_heads;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    bool refuses = false;
    if (call.writes) {
        const admission wanted{1, work.appended, work.missing, call.status};
        refuses = agent_admit(
            call.cache, call.batch, wanted, memory, [&](std::int32_t pair, std::int32_t seq, std::int32_t h) {
                const paged_head<T> head(call.cache, seq, h);
                const position_t q = call.cache.length[seq], u = q - head.head_params.window;
                const std::int32_t num_long_range = call.cache.num_long_range[head.index];
                float score = 0.0f;
                if (u >= head.head_params.sinks) {
                    score = call.leaving_score(head, pair, u);
                }
                const detail::step_decision step =
                    detail::begin_step(head.head_params, call.gate, call.cache.rebase_limit, q,
                                       num_long_range, -1, score, call.num_protected(head.index));
                return head.layout.used(q + 1, step.num_long_range);
            });
    } else {
        for (std::int32_t entry = thread; entry < call.batch.count; entry += admit_threads) {
            const active_entry active(call.cache, call.batch, entry, 1, false);
            work.appended[entry] = active.tokens;
            active.report(call.status, entry);
        }
    }
    if (!refuses) {
        return;
    }
    for (std::int32_t entry = 0; entry < call.batch.count; ++entry) {
        if (work.appended[entry] >= 0) {
            continue;
        }
        for (std::int32_t h = 0; h < kv_heads * call.cache.group; ++h) {
            for (std::int32_t d = thread; d < call.cache.head_dim_vo; d += admit_threads) {
                call.out.row(entry, h, 0)[d] = T(0.0f);
            }
            if (thread == 0 && call.lse) {
                call.lse.head(entry, h)[0] = minus_infinity();
            }
        }
    }
}

/// The shares of all blocks. One block.
template <class Launch>
__device__ void share_paged_decode(const Launch& call, admit_memory& memory) {
    const paged_decode_work& work = call.work;
    const std::int32_t kv_heads = call.cache.kv_heads, pairs = call.batch.count * kv_heads;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    __syncthreads();  // `appended` is there
    // A sequence without rows has a tile as well: somebody must write its output.
    const std::int32_t total = running_sums(
        memory, pairs,
        [&](std::int32_t pair) {
            const std::int32_t entry = pair / kv_heads;
            if (work.appended[entry] <= 0) {
                return 0;
            }
            const std::int32_t seq = call.batch.seq(entry), h = pair % kv_heads;
            const paged_head<typename Launch::T> head(call.cache, seq, h);
            position_t queries = call.cache.length[seq];
            if (!call.writes) {
                queries += num_appended_of(call.cache, head.index);
            }
            const std::int32_t used =
                call.cache.rows_read(head, pair, queries, call.cache.num_long_range[head.index]);
            const auto tiles = static_cast<std::int32_t>(decode_tiles(used, call.writes));
            return tiles == 0 ? 1 : tiles;
        },
        [&](std::int32_t pair, std::int32_t before) { work.first_tile[pair] = before; });
    const std::int64_t all = std::int64_t{total} * call.parts;
    const std::int64_t even = (all + work.blocks - 1) / work.blocks;
    const std::int64_t share = even < paged_decode_work::least ? paged_decode_work::least : even;
    if (thread == 0) {
        work.first_tile[pairs] = total;
        *work.share = static_cast<std::int32_t>(share);
    }
    __syncthreads();
    for (std::int32_t pair = thread; pair < pairs; pair += admit_threads) {
        const std::int64_t begin = std::int64_t{work.first_tile[pair]} * call.parts,
                           end = std::int64_t{work.first_tile[pair + 1]} * call.parts;
        for (std::int64_t block = (begin + share - 1) / share; block * share < end; ++block) {
            work.first_pair[block] = pair;
        }
    }
}

/// The tiles [begin, end) of a part of a head.
template <class Launch>
struct paged_tile_range {
    using Compute = typename Launch::Compute;
    const Launch& call;
    std::int64_t each;   // tiles a block
    std::int64_t first;  // the head's first tile, of all parts and heads
    std::int32_t tiles;  // of one part
    std::int32_t pair, part;
    std::int32_t begin, end;

    [[nodiscard]] __device__ bool notes() const { return part == 0 && begin == 0; }
    [[nodiscard]] __device__ tile_range tiles_of(std::int64_t /*tiles*/, int warp) const {
        return tiles_of_warp<typename Launch::Rows>(begin, end, warp);
    }
    [[nodiscard]] __device__ std::int32_t blocks() const {
        std::int32_t sum = 0;
        for (std::int32_t p = 0; p < call.parts; ++p) {
            sum += last_block(p) - first_block(p) + 1;
        }
        return sum;
    }
    [[nodiscard]] __device__ Compute* state() const {
        return state_at(static_cast<std::int32_t>(blockIdx.x), part);
    }
    [[nodiscard]] __device__ part_states<Compute> states_of(std::int32_t of_part) const {
        const std::int32_t block = first_block(of_part);
        return {state_at(block, of_part), last_block(of_part) - block + 1, state_size()};
    }

  private:
    [[nodiscard]] __device__ std::int32_t first_block(std::int32_t p) const {
        return static_cast<std::int32_t>((first + std::int64_t{p} * tiles) / each);
    }
    [[nodiscard]] __device__ std::int32_t last_block(std::int32_t p) const {
        return static_cast<std::int32_t>((first + std::int64_t{p + 1} * tiles - 1) / each);
    }
    [[nodiscard]] __device__ std::int64_t state_size() const {
        return stream_state<Launch::Rows::heads>::size(call.width);
    }
    [[nodiscard]] __device__ Compute* state_at(std::int32_t block, std::int32_t of_part) const {
        return call.states + (std::int64_t{block} + std::int64_t{pair} * call.parts + of_part) * state_size();
    }
};

/// One block's shares, head after head.
template <class Launch>
__device__ void run_paged_decode(const Launch& call, typename agent_paged_head<Launch>::Memory& memory,
                                 unsigned char* regions) {
    const paged_decode_work& work = call.work;
    const std::int32_t pairs = call.batch.count * call.cache.kv_heads;
    const std::int64_t each = *work.share, all = std::int64_t{work.first_tile[pairs]} * call.parts;
    std::int64_t at = blockIdx.x * each;
    const std::int64_t end = at + each < all ? at + each : all;
    if (at >= end) {
        return;
    }
    for (std::int32_t pair = work.first_pair[blockIdx.x]; at < end; ++pair) {
        const std::int64_t first = std::int64_t{work.first_tile[pair]} * call.parts;
        const std::int32_t tiles = work.first_tile[pair + 1] - work.first_tile[pair];
        const std::int64_t after = first + std::int64_t{tiles} * call.parts;
        while (at < end && at < after) {
            const auto part = static_cast<std::int32_t>((at - first) / tiles);
            const std::int64_t begin = first + std::int64_t{part} * tiles;
            const std::int64_t stop = begin + tiles < end ? begin + tiles : end;
            agent_paged_head<Launch>(call, memory, regions, pair, part,
                                     call.batch.seq(pair / call.cache.kv_heads))
                .run(paged_tile_range<Launch>{call, each, first, tiles, pair, part,
                                              static_cast<std::int32_t>(at - begin),
                                              static_cast<std::int32_t>(stop - begin)});
            __syncthreads();  // the shared memory is free again
            at = stop;
        }
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
