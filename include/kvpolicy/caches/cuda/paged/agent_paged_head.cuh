// A decode step of one head of a paged cache, shared by several blocks: agent_paged_schedule.cuh
// says by which.
//
// Every block attends to its share of the entries as they were before the step. Every block also decides what
// the step does to the head: that takes a few loads, and says in place of which entry the new token is read.
// The cache is written after all blocks of a head have arrived; the last to arrive merges the softmax states
// and writes the entries. One block of a head finds the victim of the next step while its entries are being
// copied.
#pragma once

#include <kvpolicy/caches/cuda/decode/agent_decode_head.cuh>
#include <kvpolicy/caches/cuda/decode/agent_decode_output.cuh>
#include <kvpolicy/caches/cuda/decode/agent_decode_stream.cuh>
#include <kvpolicy/caches/cuda/decode/agent_merge_states.cuh>
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
};

/// The tiles of all rows, and of one more for a new token that takes a new row.
__device__ inline std::int64_t decode_tiles(std::int32_t used, bool writes) {
    return (std::int64_t{used} + (writes ? 1 : 0) + stream_tile - 1) / stream_tile;
}

/// The states of `count` blocks that share a part of a head; one every `stride` numbers.
template <class Compute>
struct part_states {
    Compute* states;
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
    using base = agent_decode_head<Launch>;
    using base::call_, base::regions_, base::part_, base::pair_, base::entry_, base::head_, base::seq_;

  public:
    struct Memory : decode_head_memory<Rows> {
        state_weights<Rows> weights;
    };

    __device__ agent_paged_head(const Launch& call, Memory& memory, unsigned char* regions, std::int32_t pair,
                                std::int32_t part, std::int32_t seq)
        : base(call, memory, regions, pair, part, seq),
          weights_(memory.weights),
          mixer_(memory.weights, call.width, call.cache.head_dim_vo) {}

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
        decided_step step;
        step.used = used;
        float score = 0.0f;
        stream_candidate<T> candidate{nullptr, nullptr, -1, used};
        auto sink = call_.logits_of(pair_, part_ * Rows::heads, this->queries().heads);
        if (call_.writes) {
            score = this->score_of_leaving(head, q);
            step = this->decide(head, q, num_long_range, victim, score, share.notes());
            if (share.notes()) {
                this->note_next_victim(head, q, step, call_.notes[pair_]);
                this->note_arriving(head, q, call_.notes[pair_]);
            }
            // The entry that attention must not read: the evicted key's, or none, where the new token or u
            // takes an entry that was not in use.
            const std::int32_t hole = step.promoted >= 0 ? step.promoted : step.newest;
            candidate = {call_.k.row(entry_, head_, 0), call_.v.row(entry_, head_, 0), hole,
                         hole == used ? used + 1 : used};
            if constexpr (scored_by_steps<Scorer>) {
                if (step.promoted >= 0) {  // the new token is read where u goes
                    sink.changes = step.promoted;
                    sink.with = step.newest;
                }
            }
        }
        const stream_queries<T> queries = this->queries();
        // 3. Attention over the warp's tiles.
        stream.ask(queries);
        stream.finish(queries, candidate, call_.logits, sink);
        stream.store();
        __syncthreads();  // all warps' states are in shared memory

        // 4 and 5. States are merged, results written.
        const std::int64_t region_size = region_bytes() / static_cast<int>(sizeof(Compute));
        const states_of_warps<Compute> warps{reinterpret_cast<const Compute*>(regions_), region_size};
        const agent_write_entries<Launch> moving(call_, entry_, head_, seq_);
        moved_rows moved;
        const std::int32_t blocks = share.blocks();
        if (blocks == 1) {
            moved = fetch(head, step, score, moving);
            write_results([&](std::int32_t /*part*/, std::int32_t /*heads*/) {
                return states_of_part<states_of_warps<Compute>>{warps, Rows::warps};
            });
        } else {
            mixer_.merge_warps(warps, queries.heads, state_in_memory<Compute>{share.state()});
            if (!this->arrives_last(head.index, static_cast<std::uint32_t>(blocks))) {
                return;
            }
            moved = fetch(head, step, score, moving);
            write_results([&](std::int32_t part, std::int32_t heads) {
                const auto of = share.states_of(part);
                return mixer_.few_of(of.states, of.count, of.stride, heads);
            });
        }
        if (call_.writes) {
            moving.write(head, q, moved);
        }
    }

  private:
    using base::region_bytes;

    /// Outputs of all query heads of the group.
    template <class StatesOf>
    __device__ void write_results(const StatesOf& states_of) const {
        agent_decode_output<Launch>(call_, mixer_, weights_, entry_, head_).write(states_of);
    }

    [[nodiscard]] __device__ moved_rows fetch(const Head& head, const detail::step_decision& step,
                                              float score, const agent_write_entries<Launch>& moving) const {
        if (!call_.writes) {
            return {};
        }
        moved_rows moved = moving.fetch(head, step.newest, step.promoted >= 0);
        moved.take(step, score);
        if (threadIdx.x == 0) {
            moved.note.victim = __ldcg(&call_.notes[pair_].victim);
            moved.note.arriving = __ldcg(&call_.notes[pair_].arriving);
        }
        return moved;
    }

    state_weights<Rows>& weights_;
    agent_merge_states<Rows> mixer_;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
