// A decode step of one head of a paged cache, shared by several blocks.
//
// Every block attends to its share of the entries as they were before the step. Every block also decides what
// the step does to the head: that takes a few loads, and says in place of which entry the new token is read.
// The cache is written after all blocks of a head have arrived; the last to arrive merges the softmax states
// and writes the entries. One block of a head finds the victim of the next step while its entries are being
// copied.
#pragma once

#include <kvpolicy/caches/cuda/decode/agent_decode_head.cuh>
#include <kvpolicy/caches/cuda/decode/agent_decode_output.cuh>
#include <kvpolicy/caches/cuda/decode/agent_write_entries.cuh>
#include <kvpolicy/caches/cuda/decode/decode_params.cuh>
#include <kvpolicy/caches/cuda/page_bounds.cuh>
#include <kvpolicy/caches/cuda/paged/paged_source.cuh>
#include <kvpolicy/caches/top_k_slots.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/scorers/cuda/common/device_scorer.cuh>
#include <kvpolicy/scorers/cuda/common/warp_scorer.cuh>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A launch. Work: how the cache's rows are cut among blocks.
template <class Rows, class Gate, class Scorer, class View, class Work>
struct paged_params : decode_params<Rows, Gate, Scorer, View> {
    const float* advanced =
        nullptr;  // [count, Hkv, state_size]: the scorer's states after the step, if not in the cache
    decode_note* notes = nullptr;  // [count, Hkv]: the worst slot after the step, and the new token's score
    Work work{};

    /// The head's places whose keys do not compete.
    [[nodiscard]] __device__ std::int32_t num_protected(std::int64_t index) const {
        if constexpr (detail::holds_keys<Gate>) {
            return this->cache.num_protected[index];
        } else {
            return 0;
        }
    }
    /// The score of key u, which leaves the window.
    template <class Head>
    __device__ float leaving_score(const Head& head, std::int32_t pair, position_t u) const {
        if constexpr (Scorer::when == score_time::on_leaving) {
            return detail::holds(this->gate, u) ? 0.0f : this->computed[pair];
        } else {
            return head.score_of(head.layout.recent(u));
        }
    }
};

/// The states of `count` warps or blocks, as one: four columns of one query head.
template <int Heads, class Compute>
struct merged_state {
    Compute max = static_cast<Compute>(minus_infinity());
    Compute sum = Compute(0);
    Compute o[4] = {};

    struct alignas(16) four {
        Compute x[4];
    };

    /// `Load` reads memory: a pointer to const Compute or to const four. Batch states are loaded at once.
    template <int Batch, class Load>
    __device__ void take(const Compute* states, std::int32_t count, std::int64_t stride, std::int32_t head,
                         std::int32_t width, std::int32_t column, const Load& load) {
        for (std::int32_t first = 0; first < count; first += Batch) {
            Compute m[Batch], l[Batch];
            four x[Batch];
#pragma unroll
            for (int i = 0; i < Batch; ++i) {
                m[i] = static_cast<Compute>(minus_infinity());
                l[i] = Compute(0);
                x[i] = {};
                if (first + i < count) {
                    const Compute* const state = states + (first + i) * stride;
                    m[i] = load(state + head);
                    l[i] = load(state + Heads + head);
                    x[i] = load(reinterpret_cast<const four*>(state + stream_state<Heads>::header +
                                                              head * width + column));
                }
            }
            Compute top = max;
#pragma unroll
            for (int i = 0; i < Batch; ++i) {
                top = fmax(top, m[i]);
            }
            const Compute finite = top == static_cast<Compute>(minus_infinity()) ? Compute(0) : top;
            add(exp2(max - finite), Compute(0), {});
#pragma unroll
            for (int i = 0; i < Batch; ++i) {
                const Compute weight = exp2(m[i] - finite);
                add(Compute(1), weight * l[i],
                    {weight * x[i].x[0], weight * x[i].x[1], weight * x[i].x[2], weight * x[i].x[3]});
            }
            max = top;
        }
    }

  private:
    __device__ void add(Compute decay, Compute of_sum, const four& of_o) {
        sum = sum * decay + of_sum;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            o[i] = o[i] * decay + of_o.x[i];
        }
    }
};

/// The tiles of all rows, and of one more for a new token that takes a new row.
__device__ inline std::int64_t decode_tiles(std::int32_t used, bool writes) {
    return (std::int64_t{used} + (writes ? 1 : 0) + stream_tile - 1) / stream_tile;
}

/// The states of `count` blocks that share a part of a head; one every `stride` numbers.
template <class Compute>
struct part_states {
    const Compute* states;
    std::int32_t count;
    std::int64_t stride;
};

/// What a block does with its share of a head. `Share` says which:
///     pair, part              the head of an entry, and the part of its group
///     notes()                 whether this block leaves the note
///     tiles_of(tiles, warp)   which of the head's tiles a warp takes
///     blocks()                that share the head, all parts
///     state()                 where the block's own state goes
///     states_of(part)         those of all blocks of a part
template <class Launch>
class agent_paged_head : agent_decode_head<Launch> {
    using Rows = typename Launch::Rows;
    using Scorer = typename Launch::Scorer;
    using Head = typename Launch::View::head_type;
    using T = typename Launch::T;
    using Compute = typename Launch::Compute;
    using Merged = merged_state<Rows::heads, Compute>;
    using states_of_part = part_states<Compute>;
    using base = agent_decode_head<Launch>;
    using base::call_, base::regions_, base::part_, base::pair_, base::entry_, base::head_, base::seq_;

  public:
    using Memory = decode_head_memory<Rows>;

    __device__ agent_paged_head(const Launch& call, Memory& memory, unsigned char* regions, std::int32_t pair,
                                std::int32_t part, std::int32_t seq)
        : base(call, memory, regions, pair, part, seq) {}

    template <class Share>
    __device__ void run(const Share& share) {
        const Head head(call_.cache, seq_, head_);
        position_t q = call_.cache.length[seq_];
        if (!call_.writes) {  // a step has none
            q += num_appended_of(call_.cache, head.index);
        }
        const std::int32_t num_long_range = call_.cache.num_long_range[head.index],
                           victim = call_.cache.victim[head.index];
        const std::int32_t used = call_.cache.rows_read(head, pair_, q, num_long_range);

        // 1. Copies.
        const tile_range mine = share.tiles_of(decode_tiles(used, call_.writes), warp_id());
        const stream_rows<typename Rows::Source> rows{call_.cache.source(head, pair_, used),
                                                      call_.cache.head_dim_qk, call_.cache.head_dim_vo, used,
                                                      mine};
        unsigned char* const region = regions_ + warp_id() * region_bytes();
        typename stream_of<Rows>::type stream(region, rows);
        stream.start();

        // 2. The decision.
        detail::step_decision step;
        step.used = used;
        float score = 0.0f;
        stream_candidate<T> candidate{nullptr, nullptr, -1, used};
        if (call_.writes) {
            step = decide(head, q, num_long_range, victim, score, share.notes());
            // The entry that attention must not read: the evicted key's, or none, where the new token or u
            // takes an entry that was not in use.
            const std::int32_t hole = step.promoted >= 0 ? step.promoted : step.newest;
            candidate = {call_.k.row(entry_, head_, 0), call_.v.row(entry_, head_, 0), hole,
                         hole == used ? used + 1 : used};
        }
        const stream_queries<T> queries = this->queries();
        // 3. Attention over the warp's tiles.
        stream.ask(queries);
        stream.finish(queries, candidate, call_.logits);
        stream.store();
        __syncthreads();  // all warps' states are in shared memory

        // 4 and 5. States are merged, results written.
        const std::int64_t region_size = region_bytes() / static_cast<int>(sizeof(Compute));
        const auto* const of_warps = reinterpret_cast<const Compute*>(regions_);
        const agent_write_entries<Launch> moving(call_, entry_, head_, seq_);
        moved_rows moved;
        const std::int32_t blocks = share.blocks();
        if (blocks == 1) {
            moved = fetch(head, step, score, moving);
            write_results<Rows::warps>(
                [&](std::int32_t) {
                    return states_of_part{of_warps, Rows::warps, region_size};
                },
                load_of_block{});
        } else {
            merge_warps(of_warps, region_size, queries.heads, share.state());
            if (!this->arrives_last(head.index, static_cast<std::uint32_t>(blocks))) {
                return;
            }
            moved = fetch(head, step, score, moving);
            constexpr int batch = sizeof(Compute) == 4 ? 16 : 2;
            write_results<batch>([&](std::int32_t part) { return share.states_of(part); },
                                 load_shared_between_blocks{});
        }
        if (call_.writes) {
            moving.write(head, q, moved);
        }
    }

    /// The writes of a step without attention, by one block per head: with a selection.
    __device__ void write() {
        const Head head(call_.cache, seq_, head_);
        const position_t q = call_.cache.length[seq_];
        const std::int32_t num_long_range = call_.cache.num_long_range[head.index],
                           victim = call_.cache.victim[head.index];
        float score = 0.0f;
        const detail::step_decision step = decide(head, q, num_long_range, victim, score, true);
        __syncthreads();  // the note is there, and all have read what changes now
        const agent_write_entries<Launch> moving(call_, entry_, head_, seq_);
        moving.write(head, q, fetch(head, step, score, moving));
        __syncthreads();  // the rows are there
        const auto thread = static_cast<std::int32_t>(threadIdx.x);
        const std::int32_t used = head.layout.used(q + 1, step.num_long_range), size = head.rows.bound_rows;
        refresh_page(head.rows, step.newest / size, used, thread, Rows::threads);
        if (step.promoted >= 0 && step.promoted / size != step.newest / size) {
            refresh_page(head.rows, step.promoted / size, used, thread, Rows::threads);
        }
    }

  private:
    using base::region_bytes;

    /// Decides what the step does to the entries, the same in every block and thread; `score` is u's. One
    /// block `notes`.
    __device__ detail::step_decision decide(const Head& head, position_t q, std::int32_t num_long_range,
                                            std::int32_t victim, float& score, bool notes) {
        const position_t limit = call_.cache.rebase_limit;
        const position_t u = q - head.head_params.window;
        if (u >= head.head_params.sinks) {
            score = call_.leaving_score(head, pair_, u);
        }
        detail::step_decision step =
            detail::begin_step(head.head_params, call_.gate, limit, q, num_long_range, victim, score,
                               call_.num_protected(head.index));
        const auto top_k_slots = detail::competing(head.top_k_slots(limit), call_.gate);
        const detail::ranked_slot ranked = top_k_slots.rank(score, u, -1, q);
        std::int32_t* const record = head.record;
        if (step.full) {
            detail::ranked_slot worst;
            if (step.known >= 0) {
                worst = top_k_slots.at(step.known, q);
            } else {
                worst = this->worst_of_block(top_k_slots, notes ? record : nullptr, num_long_range, q);
            }
            detail::resolve_eviction(step, head.head_params, ranked, worst);
        }
        if (notes && warp_id() == 0) {
            const std::int32_t next = detail::next_victim(warp_group{}, top_k_slots, record, step, ranked, q);
            if (lane_id() == 0) {
                call_.notes[pair_].victim = next;
            }
        }
        if (notes && warp_id() == Rows::warps - 1) {
            const float arriving = this->arriving_score(
                q >= head.head_params.sinks && (scores_come_along<Scorer> || !detail::holds(call_.gate, q)));
            if (lane_id() == 0) {
                call_.notes[pair_].arriving = arriving;
            }
        }
        return step;
    }

    /// The warps' states become the block's, in memory that the last block reads.
    __device__ void merge_warps(const Compute* of_warps, std::int64_t stride, std::int32_t heads,
                                Compute* to) const {
        const std::int32_t fours = call_.cache.head_dim_vo / 4;
        for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < heads * fours; i += Rows::threads) {
            const std::int32_t head = i / fours, column = i % fours * 4;
            Merged all;
            all.template take<Rows::warps>(of_warps, Rows::warps, stride, head, call_.width, column,
                                           load_of_block{});
            if (column == 0) {
                to[head] = all.max;
                to[Rows::heads + head] = all.sum;
            }
            *reinterpret_cast<typename Merged::four*>(to + stream_state<Rows::heads>::header +
                                                      head * call_.width +
                                                      column) = {{all.o[0], all.o[1], all.o[2], all.o[3]}};
        }
    }

    /// Outputs of all query heads of the group, from states_of(part).
    template <int Batch, class StatesOf, class Load>
    __device__ void write_results(const StatesOf& states_of, const Load& load) const {
        const std::int32_t fours = call_.cache.head_dim_vo / 4;
        for (std::int32_t i = static_cast<std::int32_t>(threadIdx.x); i < call_.cache.group * fours;
             i += Rows::threads) {
            const std::int32_t head = i / fours, column = i % fours * 4;
            Merged all;
            const states_of_part from = states_of(head / Rows::heads);
            all.template take<Batch>(from.states, from.count, from.stride, head % Rows::heads, call_.width,
                                     column, load);
            const output_columns<Compute> found{{{all.o[0], all.o[1], all.o[2], all.o[3]}}, all.max, all.sum};
            found.write(call_, entry_, std::int64_t{head_} * call_.cache.group + head, column);
        }
    }

    [[nodiscard]] __device__ moved_rows fetch(const Head& head, const detail::step_decision& step,
                                              float score, const agent_write_entries<Launch>& moving) const {
        if (!call_.writes) {
            return {};
        }
        moved_rows moved = moving.fetch(head, step.newest, step.promoted >= 0);
        moved.num_protected = step.num_protected;
        moved.note.promoted = step.promoted;
        moved.note.num_long_range = step.num_long_range;
        moved.note.leaving = score;
        if (threadIdx.x == 0) {
            moved.note.victim = __ldcg(&call_.notes[pair_].victim);
            moved.note.arriving = __ldcg(&call_.notes[pair_].arriving);
        }
        return moved;
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
