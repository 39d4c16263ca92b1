// A decode step of one head, shared by several blocks.
//
// At most two entries of a head may lose their key in a step: that of u, the key that leaves the window, and
// that of the worst top-k slot. All blocks attend to the entries as they were before the step, without these
// two. The leader block decides which of the two keys stays; it attends to that key and to the new token. So
// only the leader waits for a score. Where the GPU has space for one more block per head, the leader has no
// entries of its own. The new token's own score is only stored, so where a launch before computes it, one
// warp of the leader waits for it, after attention.
//
// The cache is written after all blocks of a head have arrived. The last to arrive (in a cluster the leader)
// merges the softmax states and writes the entries that the leader's note names. The leader also finds the
// victim of the next step.
#pragma once

#include <kvpolicy/caches/cuda/contiguous/contiguous_params.cuh>
#include <kvpolicy/caches/cuda/contiguous/contiguous_view.cuh>
#include <kvpolicy/caches/cuda/decode/agent_decode_head.cuh>
#include <kvpolicy/caches/cuda/decode/agent_decode_output.cuh>
#include <kvpolicy/caches/cuda/decode/agent_decode_stream.cuh>
#include <kvpolicy/caches/cuda/decode/agent_merge_states.cuh>
#include <kvpolicy/caches/cuda/decode/agent_write_entries.cuh>
#include <kvpolicy/caches/cuda/observed/agent_step_mass.cuh>
#include <kvpolicy/caches/top_k_slots.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/cluster.cuh>
#include <kvpolicy/scorers/cuda/common/device_scorer.cuh>
#include <kvpolicy/scorers/cuda/common/warp_scorer.cuh>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class Rows, class Gate, class Scorer>
class agent_contiguous_decode : agent_decode_head<contiguous_params<Rows, Gate, Scorer>> {
    using Launch = contiguous_params<Rows, Gate, Scorer>;
    using T = typename Rows::T;
    using Compute = typename Rows::Compute;
    using base = agent_decode_head<Launch>;
    using base::call_, base::regions_, base::part_, base::pair_, base::entry_, base::head_, base::seq_;
    static constexpr bool late_score = arrives_late<Scorer>, late_decision = decides_late<Scorer>;
    static constexpr bool on_leaving = Scorer::when == score_time::on_leaving;

  public:
    struct Memory : decode_head_memory<Rows> {
        state_weights<Rows> weights;
        // Of a cluster:
        std::uint64_t all_states;  // a barrier
        decode_note note;
    };

    __device__ agent_contiguous_decode(const Launch& call, Memory& memory, unsigned char* regions)
        : base(call, memory, regions, static_cast<std::int32_t>(blockIdx.x) / call.blocks() / call.parts,
               static_cast<std::int32_t>(blockIdx.x) / call.blocks() % call.parts, 0),
          memory_(memory),
          mixer_(memory.weights, call.width, call.cache.head_dim_vo),
          split_(static_cast<std::int32_t>(blockIdx.x) % call.blocks()) {}

    __device__ void run() {
        // The launch of a scorer lets this one begin when all before it have ended, so only its scores are
        // waited for, and late.
        if (!(late_score || late_decision) || !call_.writes) {
            wait_for_kernel_before();
        }
        const active_entry active(call_.cache, call_.batch, entry_, 1);
        if (active.tokens == 0) {
            leave(active);
            return;
        }
        seq_ = active.seq;
        const contiguous_head<T> head(call_.cache, seq_, head_);
        position_t q = call_.cache.length[seq_];
        if (!call_.writes) {  // a step has none, and does not wait to learn it
            q += num_appended_of(call_.cache, head.index);
        }
        const std::int32_t num_long_range = call_.cache.num_long_range[head.index],
                           victim = call_.cache.victim[head.index];
        if (call_.writes) {
            this->ask_records(head);
        }
        // Counted per head, so that a block of another head cannot mark the token as appended too early.
        const bool again = call_.writes && call_.cache.appended[head.index] > 0;
        const std::int32_t used = head.layout.used(q, num_long_range);

        // 1. Copies and queries.
        const stream_rows<typename Rows::Source> rows{head.source(), call_.cache.head_dim_qk,
                                                      call_.cache.head_dim_vo, used, share_of(used)};
        unsigned char* const region = regions_ + warp_id() * region_bytes();
        typename stream_of<Rows>::type stream(region, rows);
        stream.start();
        warm_scores(head);
        const stream_queries<T> queries = this->queries();
        stream.ask(queries);
        if (again) {  // only here, since the count has a long way, too
            copy_wait<0>();
            active_entry twice = active;
            twice.refuse(status_layer_repeated);
            leave(twice);
            return;
        }
        expect_states();
        candidates found;
        if (call_.writes) {
            found = attend_and_decide(stream, queries, head, q, num_long_range, victim);
        } else {
            stream.finish(queries, stream_hidden{}, call_.logits, no_logits{});
        }
        stream.store();
        __syncthreads();  // all warps' states are in shared memory

        // 5 and 6. States are merged, results written.
        const std::int64_t region_size = region_bytes() / static_cast<int>(sizeof(Compute));
        const auto* const of_warps = reinterpret_cast<const Compute*>(regions_);
        const states_of_warps<Compute> warps{of_warps, region_size};
        const agent_write_entries<Launch> moving(call_, entry_, head_, seq_);
        if constexpr (compiled_for_clusters && Rows::clusters) {
            if (call_.clustered) {
                if constexpr (late_decision) {
                    if (is_leader() && both_ways()) {
                        end_either_way(head, q, num_long_range, victim, found, moving, warps);
                        return;
                    }
                }
                end_in_cluster(head, q, queries.heads, moving, warps);
                return;
            }
        }
        end_in_memory(head, q, queries.heads, moving, warps);
    }

  private:
    /// The end for an entry of the batch without a token.
    __device__ void leave(const active_entry& active) const {
        if (part_ + split_ == 0 && threadIdx.x == 0) {
            if (head_ == 0) {
                active.report(call_.status, entry_);
            }
            call_.leave_logits(pair_);
        }
        wait_for_kernel_before();  // so that what comes after this kernel comes after the one before it, too
    }
    /// The tiles of the warp, of `used` rows.
    [[nodiscard]] __device__ tile_range share_of(std::int32_t used) const {
        const std::int32_t tiles = used / stream_tile + (used % stream_tile != 0 ? 1 : 0);
        const std::int32_t each = tiles / call_.splits, more = tiles % call_.splits;
        const std::int32_t begin = each * split_ + (split_ < more ? split_ : more);
        const std::int32_t end = begin + each + (split_ < more ? 1 : 0);
        return tiles_of_warp<Rows>(begin, split_ == call_.splits ? begin : end, warp_id());
    }

    [[nodiscard]] __device__ bool is_leader() const {
        return split_ == (call_.leader_blocks != 0 ? call_.splits : 0);
    }
    /// Whether the leader block attends to both outcomes while it waits for scores: its first warp as if u
    /// stays, its last as if the worst slot's key stays. See end_either_way().
    [[nodiscard]] __device__ bool both_ways() const {
        return late_decision && call_.writes && call_.clustered;
    }
    using base::region_bytes;
    /// The states of a cluster's blocks in the leader's shared memory, behind the regions.
    [[nodiscard]] __device__ Compute* inbox() const {
        return reinterpret_cast<Compute*>(regions_ + Rows::warps * region_bytes());
    }
    [[nodiscard]] __device__ std::int64_t state_size() const {
        return stream_state<Rows::heads>::size(call_.width);
    }
    [[nodiscard]] __device__ Compute* state(std::int32_t part, std::int32_t split) const {
        return call_.states +
               ((std::int64_t{pair_} * call_.parts + part) * call_.blocks() + split) * state_size();
    }

    /// The entries whose key the step may evict, the same in every block and thread.
    struct candidates {
        stream_hidden hidden;          // a: the row of u, b: the row of the worst slot
        detail::ranked_slot worst{};   // where it had to be searched
        detail::ranked_slot ranked{};  // the worst in any case, if there is one: see rank_victim()
    };

    /// The barrier of a cluster's leader block, at which the states of all blocks arrive.
    __device__ void expect_states() {
        if constexpr (compiled_for_clusters && Rows::clusters) {
            if (call_.clustered) {
                if (is_leader() && threadIdx.x == 0) {
                    const std::uint32_t barrier = shared_address(&memory_.all_states);
                    const std::int32_t senders = both_ways() ? call_.splits : call_.blocks();
                    barrier_init(barrier, 1);
                    barrier_init_fence();
                    barrier_expect(barrier, static_cast<std::uint32_t>(senders) *
                                                mixer_.merged_bytes(call_.cache.group));
                }
                cluster_arrive_relaxed();
            }
        }
    }

    /// A step's share of attention; the leader block decides meanwhile which of the two hidden entries stays.
    template <class Stream>
    __device__ candidates attend_and_decide(Stream& stream, const stream_queries<T>& queries,
                                            const contiguous_head<T>& head, position_t q,
                                            std::int32_t num_long_range, std::int32_t victim) {
        stream_extra<T> extra;
        // 2. The two entries that may lose their key.
        candidates found = find_candidates(head, q, num_long_range, victim);
        const bool alone = is_leader() && call_.leader_blocks != 0;  // a block without rows
        if (is_leader()) {
            extra = extra_of(head, found);
            if (alone && (warp_id() == 0 || (both_ways() && warp_id() == Rows::warps - 1))) {
                stream.bring(extra);
            }
            rank_victim(head, q, found);
            if (!base::observed && part_ == 0 && warp_id() == 1 && found.hidden.b >= 0) {
                if constexpr (late_decision) {  // there is time until the scores come
                    next_victims_ =
                        detail::find_next_victims(warp_group{}, head.top_k_slots(call_.cache.rebase_limit),
                                                  call_.cache.tile_victims + head.tile, num_long_range, q,
                                                  found.hidden.b - head.layout.slot(0));
                } else if (alone) {
                    warm_next_victim(head, num_long_range, found);
                }
            }
            if (!late_decision) {
                // 3. Which of the two stays; with computed scores only after phase 4.
                decide(head, q, num_long_range, victim, found,
                       extra);  // while the first rows are on their way
            }
        }
        // 4. Attention over the warp's tiles, then over what the leader adds.
        const auto sink = call_.logits_of(pair_, part_ * Rows::heads, queries.heads);
        stream.finish(queries, found.hidden, call_.logits, sink);
        if (is_leader() && both_ways()) {
            const bool first = warp_id() == 0;
            if (first || warp_id() == Rows::warps - 1) {  // u stays, the worst stays
                extra.counts[1] = first && found.hidden.a >= 0;
                extra.counts[2] = !first && found.hidden.b >= 0;
                stream.add(extra, queries, call_.logits, sink);
            }
        } else if (is_leader()) {
            if constexpr (late_decision) {
                wait_for_kernel_before();  // no other block needs the scores
                decide(head, q, num_long_range, victim, found, extra);
            }
            if (late_score && !call_.clustered) {
                note_score(head, q);
            }
            if (warp_id() == 0) {
                if (!alone) {
                    stream.bring(extra);
                }
                stream.add(extra, queries, call_.logits, sink);
            }
        }
        return found;
    }

    /// Prefetches into L2 the scores of the tiles that the warp will score after attention.
    __device__ void warm_scores([[maybe_unused]] const contiguous_head<T>& head) const {
        if constexpr (scored_by_steps<Scorer>) {
            if (!call_.writes || !call_.observed.in_step) {
                return;
            }
            constexpr std::int32_t line = 32;  // scores
            const std::int32_t capacity = head.capacity(), stride = call_.blocks() * Rows::warps;
            for (std::int32_t tile = split_ * Rows::warps + warp_id();; tile += stride) {
                const std::int32_t begin = mass_tile(head.layout.slot(0), tile).begin,
                                   row = begin + line * lane_id();
                if (begin >= capacity) {
                    return;
                }
                if (lane_id() < mass_tile::rows / line && row >= 0 && row < capacity) {
                    ask_for_line(head.score + row);
                }
            }
        }
    }

    /// Blocks of a cluster send their states to the leader block, which merges them and writes.
    __device__ void end_in_cluster(const contiguous_head<T>& head, position_t q, std::int32_t heads,
                                   const agent_write_entries<Launch>& moving,
                                   const states_of_warps<Compute>& warps) {
        moved_rows moved = is_leader() ? fetch(head, q, moving, memory_.note) : moved_rows{};
        cluster_wait();  // all have begun, and the leader block's barrier is ready
        const std::uint32_t barrier = shared_address(&memory_.all_states);
        const Compute* const mine = inbox() + split_ * state_size();
        mixer_.merge_warps(warps, heads,
                           state_in_cluster{cluster_address(shared_address(mine), call_.splits),
                                            cluster_address(barrier, call_.splits)});
        if (is_leader()) {
            if (late_score && call_.writes) {
                note_score(head, q);  // by a warp that other blocks do not wait for
            }
            barrier_wait(barrier, 0);  // all have read the cache, and left their states
            __syncthreads();           // the weights of this block's warps have been read
            if (late_score && call_.writes) {
                moved.note.arriving = memory_.note.arriving;
            }
            write_results([&](std::int32_t /*part*/, std::int32_t /*heads*/) {
                return states_of_part<states_of_warps<Compute>>{{inbox(), state_size()}, call_.blocks()};
            });
            if (call_.writes) {
                moving.write(head, q, moved);
            }
        }
        if constexpr (scored_by_steps<Scorer>) {
            if (call_.writes && call_.observed.in_step) {
                cluster_barrier();  // logits, their sums and the entries are there
                const agent_step_mass<contiguous_view<T>, Compute> masses(call_.cache, call_.observed, entry_,
                                                                          head_);
                masses.run(split_ * Rows::warps + warp_id(), call_.blocks() * Rows::warps, call_.status);
            }
        }
    }

    /// Blocks leave their states in the workspace; the last to arrive merges them and writes.
    __device__ void end_in_memory(const contiguous_head<T>& head, position_t q, std::int32_t heads,
                                  const agent_write_entries<Launch>& moving,
                                  const states_of_warps<Compute>& warps) {
        moved_rows moved;
        if (call_.blocks() * call_.parts == 1) {
            moved = fetch(head, q, moving, memory_.note);
            write_results([&](std::int32_t /*part*/, std::int32_t /*heads*/) {
                return states_of_part<states_of_warps<Compute>>{warps, Rows::warps};
            });
        } else {
            mixer_.merge_warps(warps, heads, state_in_memory<Compute>{state(part_, split_)});
            if (!this->arrives_last(head.index, static_cast<std::uint32_t>(call_.blocks() * call_.parts))) {
                return;
            }
            moved = fetch(head, q, moving, memory_.note);
            write_results([&](std::int32_t part, std::int32_t /*heads*/) {
                return states_of_part<states_of_blocks<Compute>>{{state(part, 0), state_size()},
                                                                 call_.blocks()};
            });
        }
        if (call_.writes) {
            moving.write(head, q, moved);
        }
    }

    /// What the step writes, where it does: all that may move, before it is known what does.
    [[nodiscard]] __device__ moved_rows fetch(const contiguous_head<T>& head, position_t q,
                                              const agent_write_entries<Launch>& moving,
                                              const decode_note& of_cluster) const {
        if (!call_.writes) {
            return {};
        }
        moved_rows moved = moving.fetch(head, head.layout.recent(q), true);
        if (call_.clustered) {
            moved.note = of_cluster;
            return moved;
        }
        const decode_note* const note = call_.notes + pair_;
        moved.note.promoted = __ldcg(&note->promoted);
        if (threadIdx.x == 0) {
            moved.note.num_long_range = __ldcg(&note->num_long_range);
            moved.note.victim = __ldcg(&note->victim);
            moved.note.arriving = __ldcg(&note->arriving);
            moved.note.leaving = __ldcg(&note->leaving);
        }
        return moved;
    }

    __device__ candidates find_candidates(const contiguous_head<T>& head, position_t q,
                                          std::int32_t num_long_range, std::int32_t victim) {
        candidates found;
        if (q - head.head_params.window < head.head_params.sinks) {
            return found;
        }
        found.hidden.a = head.layout.recent(q);
        if (head.head_params.budget == 0 || num_long_range < head.head_params.budget) {
            return found;
        }
        const position_t limit = call_.cache.rebase_limit;
        std::int32_t slot = detail::known_worst(head.head_params, limit, q, victim);
        if (slot < 0) {
            found.worst = this->worst_of_block(head, head.top_k_slots(limit), slot, part_ == 0 && is_leader(),
                                               num_long_range, q);
            slot = found.worst.slot;
        }
        found.hidden.b = head.layout.slot(slot);
        return found;
    }

    /// Starts the loads that decide() needs of the worst slot.
    __device__ void rank_victim(const contiguous_head<T>& head, position_t q, candidates& found) const {
        found.ranked = found.worst;
        if (found.worst.slot < 0 && found.hidden.b >= 0) {
            found.ranked =
                head.top_k_slots(call_.cache.rebase_limit).at(found.hidden.b - head.layout.slot(0), q);
        }
    }

    /// The new token, u and the worst slot's key.
    [[nodiscard]] __device__ stream_extra<T> extra_of(const contiguous_head<T>& head,
                                                      const candidates& found) const {
        stream_extra<T> extra;
        extra.k[0] = call_.k.row(entry_, head_, 0);
        extra.v[0] = call_.v.row(entry_, head_, 0);
        extra.counts[0] = true;
        const std::int32_t a = found.hidden.a, b = found.hidden.b;
        if (a >= 0) {
            extra.k[1] = head.key(a);
            extra.v[1] = head.value(a);
        }
        if (b >= 0) {
            extra.k[2] = head.key(b);
            extra.v[2] = head.value(b);
        }
        return extra;
    }

    /// Prefetches into L2 what next_victim() reads if u replaces the worst slot's key. By one warp.
    __device__ void warm_next_victim(const contiguous_head<T>& head, std::int32_t num_long_range,
                                     const candidates& found) const {
        const std::int32_t first = head.layout.slot(0), b = found.hidden.b;
        const auto warm = [&](std::int32_t row) {
            ask_for_line(head.score + row);
            ask_for_line(head.position + row);
        };
        const std::int32_t tile = (b - first) / detail::slot_tile,
                           tiles = detail::tiles_of_slots(num_long_range);
        for (std::int32_t p = lane_id(); p < detail::slot_tile; p += 32) {
            if (tile * detail::slot_tile + p < num_long_range) {
                warm(first + tile * detail::slot_tile + p);
            }
        }
        const std::int32_t* const record = call_.cache.tile_victims + head.tile;
        for (std::int32_t t = lane_id(); t < tiles; t += 32) {
            const std::int32_t slot = record[t];
            if (slot >= 0 && slot < num_long_range) {
                warm(first + slot);
            }
        }
    }

    /// Decides what the step does to the entries: into the note, and into `extra` what the leader block
    /// attends to beside the entries. By all threads of the leader block.
    __device__ void decide(const contiguous_head<T>& head, position_t q, std::int32_t num_long_range,
                           std::int32_t victim, const candidates& found, stream_extra<T>& extra) {
        const position_t limit = call_.cache.rebase_limit;
        const position_t u = q - head.head_params.window;
        float score = 0.0f;
        if (u >= head.head_params.sinks) {
            score = on_leaving ? call_.computed[pair_] : head.score[found.hidden.a];
        }
        const detail::head_slots top_k_slots = head.top_k_slots(limit);
        detail::step_decision step =
            detail::begin_step(head.head_params, call_.gate, limit, q, num_long_range, victim, score);
        const detail::ranked_slot ranked = top_k_slots.rank(score, u, -1, q);
        if (found.worst.slot >= 0) {
            step.known = found.worst.slot;  // the search is for the next step, too, where the gate is closed
        }
        if (step.full) {
            detail::resolve_eviction(step, head.head_params, ranked, found.ranked);
        }
        if (part_ == 0 && warp_id() == 1) {  // the first warp goes on to attention
            std::int32_t* const record = call_.cache.tile_victims + head.tile;
            std::int32_t next;
            if constexpr (base::observed) {
                next = victim_in_records;  // as soon as this step's weights are scores
            } else if constexpr (late_decision) {
                next =
                    detail::next_victim(warp_group{}, head.head_params, next_victims_, record, step, ranked);
            } else {
                next = detail::next_victim(warp_group{}, top_k_slots, record, step, ranked, q);
            }
            if (lane_id() == 0) {
                decode_note& note = note_to_write();
                note.promoted = step.promoted;
                note.num_long_range = step.num_long_range;
                note.victim = next;
                note.leaving = score;
            }
        }
        if (!late_score) {
            note_score(head, q);
        }
        // Of the hidden two at most one stays: u, where it is promoted, or else the worst.
        extra.counts[1] = step.promoted >= 0;
        extra.counts[2] = step.promoted < 0 && found.hidden.b >= 0;
        extra.row[0] = step.newest;
        extra.row[1] = step.promoted;
        extra.row[2] = found.hidden.b;
    }

    /// Leaves the new token's score in the note, by the last warp of the leader block; where a launch before
    /// computes it, once that has.
    __device__ void note_score(const contiguous_head<T>& head, position_t q) const {
        if (part_ == 0 && warp_id() == Rows::warps - 1) {
            if (late_score) {
                wait_for_kernel_before();
            }
            const float arriving = this->arriving_score(q >= head.head_params.sinks);
            if (lane_id() == 0) {
                note_to_write().arriving = arriving;
            }
        }
    }

    /// The end of both_ways(): merges both outcomes, waits for the scores, chooses one and writes.
    __device__ void end_either_way(const contiguous_head<T>& head, position_t q, std::int32_t num_long_range,
                                   std::int32_t victim, const candidates& found,
                                   const agent_write_entries<Launch>& moving,
                                   const states_of_warps<Compute>& warps) {
        moved_rows moved = fetch(head, q, moving, {});
        cluster_wait();
        barrier_wait(shared_address(&memory_.all_states),
                     0);  // all have read the cache, and left their states
        const states_of_warps<Compute> blocks{inbox(), state_size()};
        const std::int32_t heads = call_.cache.group, fours = call_.cache.head_dim_vo / 4;
        mixer_.weigh(blocks, call_.splits, heads);
        constexpr int max_blocks = 8, turns = Rows::heads * Rows::Dim / 4 / Rows::threads;
        output_columns<Compute> ways[2][turns];
#pragma unroll
        for (int t = 0; t < turns; ++t) {
            const std::int32_t i = static_cast<std::int32_t>(threadIdx.x) + t * Rows::threads;
            if (i < heads * fours) {
                const std::int32_t of = i / fours, column = i % fours * 4;
                const output_columns<Compute> all{
                    mixer_.template mix<max_blocks>(blocks, call_.splits, of, column),
                    memory_.weights.top[of], memory_.weights.sum[of]};
                ways[0][t] = all.template with<Rows::heads>(warps.at(0), call_.width, of, column);
                ways[1][t] =
                    all.template with<Rows::heads>(warps.at(Rows::warps - 1), call_.width, of, column);
            }
        }
        wait_for_kernel_before();
        stream_extra<T> extra;
        decide(head, q, num_long_range, victim, found, extra);
#pragma unroll
        for (int t = 0; t < turns; ++t) {
            const std::int32_t i = static_cast<std::int32_t>(threadIdx.x) + t * Rows::threads;
            if (i < heads * fours) {
                const auto& way = extra.counts[1] ? ways[0][t] : ways[1][t];
                way.write(call_, entry_, std::int64_t{head_} * call_.cache.group + i / fours, i % fours * 4);
            }
        }
        __syncthreads();  // the note is written
        moved.note = memory_.note;
        moving.write(head, q, moved);
    }

    [[nodiscard]] __device__ decode_note& note_to_write() const {
        return call_.clustered ? memory_.note : call_.notes[pair_];
    }

    /// Outputs of all query heads of the group.
    template <class StatesOf>
    __device__ void write_results(const StatesOf& states_of) const {
        agent_decode_output<Launch>(call_, mixer_, memory_.weights, entry_, head_).write(states_of);
    }

    Memory& memory_;
    agent_merge_states<Rows> mixer_;
    std::int32_t split_;
    struct nothing {};
    // Of the worst slot, where they are found before the scores come.
    std::conditional_t<late_decision, detail::next_victims, nothing> next_victims_;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
