// A decode step of one head of a paged cache, shared by several blocks.
//
// Every block attends to its share of the entries as they were before the step. Every block also decides what
// the step does to the head: that takes a few loads, and says in place of which entry the new token is read.
// The cache is written after all blocks of a head have arrived; the last to arrive merges the softmax states
// and writes the entries. One block of a head finds the victim of the next step while its entries are being
// copied.
#pragma once

#include <kvpolicy/caches/cuda/contiguous/agent_contiguous_decode.cuh>
#include <kvpolicy/caches/cuda/contiguous/contiguous_view.cuh>
#include <kvpolicy/caches/cuda/decode/agent_decode_output.cuh>
#include <kvpolicy/caches/cuda/decode/decode_params.cuh>
#include <kvpolicy/caches/cuda/page_bounds.cuh>
#include <kvpolicy/caches/cuda/paged/agent_paged_stream.cuh>
#include <kvpolicy/caches/cuda/warp_group.cuh>
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
namespace paged {

/// The note of a head's first block to the last block.
struct decode_note {
    std::int32_t victim;  // the worst slot after the step
    float arriving;       // the new token's score
};

/// A launch. Work: how the cache's rows are cut among blocks.
template <class Rows, class Gate, class Scorer, class View, class Work>
struct paged_params : decode_params<Rows, Gate, Scorer, View> {
    const float* advanced =
        nullptr;  // [count, Hkv, state_size]: the scorer's states after the step, if not in the cache
    decode_note* notes = nullptr;  // [count, Hkv]
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
class agent_paged_head {
    using Rows = typename Launch::Rows;
    using Scorer = typename Launch::Scorer;
    using Head = typename Launch::View::head_type;
    using T = typename Launch::T;
    using Compute = typename Launch::Compute;
    using Merged = merged_state<Rows::heads, Compute>;
    using states_of_part = part_states<Compute>;
    static constexpr bool on_leaving = Scorer::when == score_time::on_leaving;

  public:
    struct Memory {
        detail::ranked_slot worst[Rows::warps];
        std::uint32_t last;
    };

    __device__ agent_paged_head(const Launch& call, Memory& memory, unsigned char* regions, std::int32_t pair,
                                std::int32_t part, std::int32_t seq)
        : call_(call),
          memory_(memory),
          regions_(regions),
          part_(part),
          pair_(pair),
          entry_(pair / call.cache.kv_heads),
          head_(pair % call.cache.kv_heads),
          seq_(seq) {}

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
        using Source = decltype(head.source(used));
        const tile_range mine = share.tiles_of(decode_tiles(used, call_.writes), warp_id());
        const stream_rows<Source> rows{call_.cache.source(head, pair_, used), call_.cache.head_dim_qk,
                                       call_.cache.head_dim_vo, used, mine};
        unsigned char* const region = regions_ + warp_id() * region_bytes();
        typename stream_of<Rows, Source>::type stream(region, rows);
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
        const std::int32_t first_head = part_ * Rows::heads;
        const std::int32_t heads_left = call_.cache.group - first_head;
        const stream_queries<T> queries{call_.q.row(entry_, head_ * call_.cache.group + first_head, 0),
                                        call_.q.head_stride,
                                        heads_left < Rows::heads ? heads_left : Rows::heads};
        // 3. Attention over the warp's tiles.
        stream.finish(queries, candidate, call_.logits);
        stream.store();
        __syncthreads();  // all warps' states are in shared memory

        // 4 and 5. States are merged, results written.
        const std::int64_t region_size = region_bytes() / static_cast<int>(sizeof(Compute));
        const auto* const of_warps = reinterpret_cast<const Compute*>(regions_);
        moved_rows moved;
        const std::int32_t blocks = share.blocks();
        if (blocks == 1) {
            moved = fetch_rows(head, step);
            write_results<Rows::warps>(
                [&](std::int32_t) {
                    return states_of_part{of_warps, Rows::warps, region_size};
                },
                load_of_block{});
        } else {
            merge_warps(of_warps, region_size, queries.heads, share.state());
            if (!arrives_last(head.index, static_cast<std::uint32_t>(blocks))) {
                return;
            }
            moved = fetch_rows(head, step);
            constexpr int batch = sizeof(Compute) == 4 ? 16 : 2;
            write_results<batch>([&](std::int32_t part) { return share.states_of(part); },
                                 load_shared_between_blocks{});
        }
        if (call_.writes) {
            write_rows(head, q, step, score, moved);
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
        write_rows(head, q, step, score, fetch_rows(head, step));
        __syncthreads();  // the rows are there
        const auto thread = static_cast<std::int32_t>(threadIdx.x);
        const std::int32_t used = head.layout.used(q + 1, step.num_long_range), size = head.rows.bound_rows;
        refresh_page(head.rows, step.newest / size, used, thread, Rows::threads);
        if (step.promoted >= 0 && step.promoted / size != step.newest / size) {
            refresh_page(head.rows, step.promoted / size, used, thread, Rows::threads);
        }
    }

  private:
    [[nodiscard]] __device__ int region_bytes() const { return Rows::shared_bytes(call_.cache.head_dim_vo); }
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
                // All warps of the block come here or none, since the numbers are the head's.
                worst = detail::worst_of_tiles(warp_group{}, top_k_slots, notes ? record : nullptr, warp_id(),
                                               Rows::warps, num_long_range, q);
                if (lane_id() == 0) {
                    memory_.worst[warp_id()] = worst;
                }
                __syncthreads();
                worst = memory_.worst[0];
                for (int i = 1; i < Rows::warps; ++i) {
                    if (detail::gives_way(memory_.worst[i], worst)) {
                        worst = memory_.worst[i];
                    }
                }
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
            const float arriving = arriving_score(
                q >= head.head_params.sinks && (scores_come_along<Scorer> || !detail::holds(call_.gate, q)));
            if (lane_id() == 0) {
                call_.notes[pair_].arriving = arriving;
            }
        }
        return step;
    }

    /// The new token's score as its row keeps it; a sink's is never read, nor is a key's that is held for its
    /// position.
    __device__ float arriving_score(bool counts) const {
        return arriving_score_of(call_, entry_, head_, pair_, counts);
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

    /// Whether all other blocks of the head have arrived. What they wrote before is then visible to this one,
    /// and they no longer read the cache. The counter is back at 0 for the next launch.
    __device__ bool arrives_last(std::int64_t index, std::uint32_t blocks) const {
        __syncthreads();  // the block's own work comes before its arrival
        if (threadIdx.x == 0) {
            __threadfence();
            memory_.last = atomicInc(call_.cache.arrivals + index, blocks - 1) == blocks - 1 ? 1 : 0;
            __threadfence();
        }
        __syncthreads();
        return memory_.last != 0;
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

    /// What a thread moves, loaded while outputs are computed: 16 bytes of an entry where T has 16 bits, and
    /// in thread 0 the note.
    struct moved_rows {
        uint4 leaving, arriving;
        decode_note note;
    };
    static constexpr int piece = sizeof(T) == 2 ? 8 : 1;  // elements

    /// Piece i of a row, those of the key before those of the value: in a row of the cache, and of the new
    /// token.
    [[nodiscard]] __device__ T* piece_of(const Head& head, std::int32_t row, std::int32_t i) const {
        const std::int32_t of_k = call_.cache.head_dim_qk / piece;
        return i < of_k ? head.key(row) + i * piece : head.value(row) + (i - of_k) * piece;
    }
    [[nodiscard]] __device__ const T* piece_of_candidate(std::int32_t i) const {
        const std::int32_t of_k = call_.cache.head_dim_qk / piece;
        return i < of_k ? call_.k.row(entry_, head_, 0) + i * piece
                        : call_.v.row(entry_, head_, 0) + (i - of_k) * piece;
    }
    [[nodiscard]] __device__ std::int32_t pieces() const {
        return (call_.cache.head_dim_qk + call_.cache.head_dim_vo) / piece;
    }

    [[nodiscard]] __device__ moved_rows fetch_rows(const Head& head,
                                                   const detail::step_decision& step) const {
        moved_rows moved{};
        if (!call_.writes) {
            return moved;
        }
        const auto thread = static_cast<std::int32_t>(threadIdx.x);
        if constexpr (sizeof(T) == 2) {
            static_assert(Rows::threads >= 2 * Rows::Dim / piece, "a piece a thread");
            if (thread < pieces()) {
                moved.arriving = *reinterpret_cast<const uint4*>(piece_of_candidate(thread));
                if (step.promoted >= 0) {
                    moved.leaving = *reinterpret_cast<const uint4*>(piece_of(head, step.newest, thread));
                }
            }
        }
        if (thread == 0) {
            moved.note = {__ldcg(&call_.notes[pair_].victim), __ldcg(&call_.notes[pair_].arriving)};
        }
        return moved;
    }

    /// The key that leaves moves to its place, then the new token takes its row. Each thread moves pieces of
    /// its own, so that no piece is overwritten before it is read.
    __device__ void write_rows(const Head& head, position_t q, const detail::step_decision& step, float score,
                               const moved_rows& moved) const {
        const auto thread = static_cast<std::int32_t>(threadIdx.x);
        for (std::int32_t i = thread; i < pieces(); i += Rows::threads) {
            T* const newest = piece_of(head, step.newest, i);
            if (step.promoted >= 0) {
                T* const promoted = piece_of(head, step.promoted, i);
                if constexpr (sizeof(T) == 2) {
                    *reinterpret_cast<uint4*>(promoted) = moved.leaving;
                } else {
                    *promoted = *newest;
                }
            }
            if constexpr (sizeof(T) == 2) {
                *reinterpret_cast<uint4*>(newest) = moved.arriving;
            } else {
                *newest = *piece_of_candidate(i);
            }
        }
        if (call_.cache.queries != nullptr) {
            const std::int32_t dim = call_.cache.head_dim_qk;
            T* const to = call_.cache.query_row(head.index, q);
            for (std::int32_t i = thread; i < call_.cache.group * dim; i += Rows::threads) {
                to[i] = call_.q.row(entry_, head_ * call_.cache.group + i / dim, 0)[i % dim];
            }
        }
        if constexpr (on_leaving) {
            if (call_.advanced != nullptr) {
                const std::int64_t size = call_.cache.state_size;
                for (std::int64_t i = thread; i < size; i += Rows::threads) {
                    call_.cache.state[head.index * size + i] = call_.advanced[pair_ * size + i];
                }
            }
        }
        if (thread != 0) {
            return;
        }
        if (step.promoted >= 0) {
            head.position_of(step.promoted) = step.leaving;
            head.score_of(step.promoted) = score;
        }
        head.position_of(step.newest) = q;
        head.score_of(step.newest) = moved.note.arriving;
        call_.cache.num_long_range[head.index] = step.num_long_range;
        if constexpr (detail::holds_keys<typename Launch::Gate>) {
            call_.cache.num_protected[head.index] += step.num_protected ? 1 : 0;
        }
        call_.cache.victim[head.index] = moved.note.victim;
        call_.cache.appended[head.index] = 1;
        if (head_ == 0) {
            call_.cache.num_draft[seq_] = 0;
        }
        const float arriving = moved.note.arriving;
        const bool bad = arriving != arriving || (on_leaving && score != score);
        if (bad && call_.status != nullptr) {
            atomicOr(call_.status + entry_, static_cast<std::uint32_t>(status_nan_score));
        }
    }

    const Launch& call_;
    Memory& memory_;
    unsigned char* regions_;
    std::int32_t part_, pair_, entry_, head_, seq_;
};

}  // namespace paged
}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
