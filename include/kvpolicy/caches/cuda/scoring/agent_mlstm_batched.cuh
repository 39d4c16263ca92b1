// mLSTM scores of a decode step with many sequences, for compute capability 9.0. Every state is read and
// written once; that is the floor, so everything else must overlap with it. A block has some sequences of one
// head and streams their states through a ring in shared memory. One warp brings states by bulk copies, as
// many as the ring holds, before the tokens are known.
//
// Two blocks of one head are a cluster and share its weights: each has half of the columns, multiplies them
// with the tokens of both, and sends the results to the block that needs them. So a cluster reads each weight
// once. (Clusters of four blocks would leave 12 of an H200's 132 SMs idle.)
//
// A worker warp has a few rows of every state and waits for no other warp between two states. Other warps
// read the scores out in turn; the first of them computes the gates.
#pragma once

#include <kvpolicy/caches/cuda/scoring/agent_mlstm_batched_projections.cuh>
#include <kvpolicy/caches/cuda/scoring/agent_mlstm_batched_states.cuh>
#include <kvpolicy/caches/cuda/scoring/agent_mlstm_step.cuh>
#include <kvpolicy/caches/cuda/scoring/agent_score.cuh>
#include <kvpolicy/caches/cuda/scoring/mlstm_batched_memory.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/cluster.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class View, std::int32_t D, class Feature, class Values>
class agent_mlstm_batched : private mlstm_batched_projections<View, D, Feature, Values> {
    using projections = mlstm_batched_projections<View, D, Feature, Values>;
    using projections::call_, projections::warp_, projections::rows_, projections::inputs_,
        projections::folds_, projections::memory_, projections::head_, projections::first_,
        projections::count_, projections::fold_, projections::column_, projections::taken_;
    using projections::thread, projections::state_numbers, projections::new_states, projections::state_of,
        projections::find_own, projections::has, projections::offset_of, projections::odd_bytes,
        projections::whole_part_of, projections::alike, projections::stored_bytes, projections::bring,
        projections::quarters, projections::first_quarter, projections::first_column, projections::fetch,
        projections::load_value, projections::rows_of, projections::project, projections::join;
    using typename projections::Scorer, typename projections::Launch, typename projections::Memory;
    using typename projections::tile_rows, typename projections::whole_part;

  public:
    __device__ agent_mlstm_batched(const Launch& call, unsigned char* shared) : projections(call, shared) {}

    /// Asks the L2 cache for the block's weights, its first states, and its tokens. None of it need be what
    /// it will be after the kernels before.
    __device__ void ask_early() const {
        if (warp_ < batched_warps) {
            const float* const row =
                rows_.weights(call_.scorer.weights, head_, warp_ * mlstm_rows::tile + lane_id() / 2, inputs_);
            for (std::int32_t i = lane_id() % 2 * 32; i < Memory::columns; i += 64) {
                if (first_column() + i < inputs_) {
                    ask_for_line(row + first_column() + i);
                }
            }
        } else if (warp_ == batched_warps && call_.batch.seq_ids == nullptr) {
            if (lane_id() < batched_early && lane_id() < count_) {
                const whole_part part = whole_part_of(
                    call_.cache.state + (std::int64_t{first_ + lane_id()} * call_.cache.kv_heads + head_) *
                                            call_.cache.state_size);
                prefetch_to_l2(part.from, part.bytes);
            }
        } else if (warp_ == batched_warps + 1 && count_ != 0) {
            ask_for_entries(call_.cache, call_.batch, head_, first_, call_.together);
        } else if (warp_ == batched_warps + 2) {
            ask_for_rows(call_.cache, call_.batch, call_.tokens, head_, first_, count_);
        }
    }

    /// The block's entries. A block that has none still has its half of the columns of the others'
    /// projections.
    __device__ void run() {
        begin();
        cluster_arrive_relaxed();
        weight_quarter weight;  // on its way while tokens are
        tile_rows rows{};
        if (warp_ < batched_warps && warp_ < rows_.tiles()) {
            rows = rows_of(warp_);
            weight.load(rows.first, rows.second, first_quarter(), inputs_);
        }
        __syncthreads();
        if (warp_ < batched_warps) {
            work(weight, rows);
        } else if (warp_ == batched_warps) {
            bring();
        } else {
            read();
        }
        // A block may end before the other: what it sent needs it no more, and what was sent to it was
        // counted before it went on.
    }

  private:
    /// What a thread holds of a state.
    struct piece {
        state_piece c;
        float z;
    };

    /// Once: what is the same for all tokens.
    __device__ void begin() const {
        auto& all = *memory_.tokens;
        if (thread() == 0) {
            for (int i = 0; i < call_.stages; ++i) {
                barrier_init(shared_address(&all.full[i]),
                             2);  // a bulk copy, and what does not lie to 16 bytes
                barrier_init(shared_address(&all.taken[i]), batched_warps * arrivals_of_warp);
            }
            for (int i = 0; i < batched_reads; ++i) {
                barrier_init(shared_address(&all.summed[i]), batched_warps * arrivals_of_warp);
                barrier_init(shared_address(&all.read[i]), arrivals_of_warp);
            }
            barrier_init(shared_address(&all.projected), 1);
            barrier_init(shared_address(&all.joined), batched_warps * arrivals_of_warp);
            barrier_init_fence();
            barrier_expect(shared_address(&all.projected),
                           static_cast<std::uint32_t>(4 * quarters() * count_ * rows_.count()));
        }
    }

    /// The warps that work, and the one that has the gates, by instructions of their own.
    __device__ static void meet() { named_barrier_of_any(1, batched_workers + 32); }

    // The warps that work.

    __device__ void work(weight_quarter& weight, const tile_rows& rows) {
        fetch();
        meet();
        cluster_wait();  // all blocks are there: from here on they write to each other
        project(weight, rows);
        if (count_ == 0) {
            return;
        }
        if constexpr (!Values::projected) {
            load_value();
        }
        meet();  // all have read the tokens
        barrier_wait(shared_address(&memory_.tokens->projected), 0);
        join();
        fence_async_proxy();  // a state comes where quarters were
        warp_arrive(shared_address(&memory_.tokens->joined), lane_id());
        meet();
        make_features<Feature>(memory_.y, rows_, count_, call_.features, folds_ * fold_rows, memory_.k,
                               memory_.q, warp_);
        meet();
        fold_ = thread() / (call_.width / 2);
        column_ = thread() % (call_.width / 2) * 2;
        for (std::int32_t e = 0; e < count_; ++e) {
            if (memory_.tokens->count[e] != 0) {
                take(e);
            }
        }
    }

    /// The thread's part of the next state, that of entry e, takes in its token.
    __device__ void take(std::int32_t e) {
        auto& all = *memory_.tokens;
        const std::int32_t stage = taken_ % call_.stages, at = taken_ % batched_reads;
        barrier_wait(shared_address(&all.full[stage]), static_cast<std::uint32_t>(taken_ / call_.stages) % 2);
        auto* const from =
            reinterpret_cast<float*>(memory_.ring + stage * Memory::stage_bytes(call_.cache.state_size) +
                                     offset_of(call_.cache.state + all.state[e]));
        const std::int32_t row = fold_ * fold_rows, left = call_.features - row;
        piece of;
        if (fold_ < folds_) {
            of.c.load(from + row * call_.width + column_, call_.width, left);
        }
        if (thread() < call_.features) {
            of.z = from[state_numbers() + thread()];
        }
        barrier_wait(shared_address(&all.read[at]),
                     static_cast<std::uint32_t>(taken_ / batched_reads + 1) % 2);
        ++taken_;
        const float write = memory_.gate[2 * e], forget = memory_.gate[2 * e + 1];
        float* const state = new_states() + all.new_state[e];
        const bool bulk = alike(call_.cache.state + all.state[e], state);
        const std::uint32_t odd = odd_bytes(state);
        const std::int32_t padded = folds_ * fold_rows;
        if (fold_ < folds_) {
            const std::int32_t first = e * padded + row;
            const float* const value = (Values::projected ? memory_.y + e * rows_.count() + rows_.values()
                                                          : memory_.value + e * call_.width) +
                                       column_;
            const float2 sum = of.c.take(write, forget, memory_.k + first, memory_.q + first,
                                         make_float2(value[0], value[1]));
            if (bulk) {
                of.c.store(from + row * call_.width + column_, call_.width, left);
            } else {
                of.c.store(state + row * call_.width + column_, call_.width, left);
            }
            if (odd != 0 && row + column_ == 0) {
                *reinterpret_cast<float2*>(state) = of.c.c[0];
            }
            *reinterpret_cast<float2*>(memory_.h + (at * folds_ + fold_) * call_.width + column_) = sum;
        }
        if (32 * warp_ < padded) {
            float sum = 0.0f;
            if (thread() < call_.features) {
                const float z = fmaf(forget, of.z, times_or_nothing(write, memory_.k[e * padded + thread()]));
                const std::int64_t place = state_numbers() + thread();
                if (bulk && place * 4 < odd + stored_bytes(odd)) {
                    from[place] = z;
                } else {
                    state[place] = z;
                }
                sum = __fmul_rn(memory_.q[e * padded + thread()], z);
            }
            sum = fold_total(sum);
            if (thread() % fold_rows == 0 && thread() < padded) {
                memory_.divisor[at * folds_ + thread() / fold_rows] = sum;
            }
        }
        fence_async_proxy();  // a bulk copy takes the stage to memory
        warp_arrive(shared_address(&all.taken[stage]), lane_id());
        warp_arrive(shared_address(&all.summed[at]), lane_id());
    }

    // The warps that read scores out. The first has the gates, a pair of lanes per entry.

    __device__ void read() {
        const int reader = warp_ - batched_warps - 1;
        if (reader == 0) {
            meet();
        }
        std::int32_t slot;
        const unsigned entries = find_own(slot);
        const auto& weights = call_.scorer.weights;
        for (std::int32_t i = thread() - batched_workers - 32; i < call_.width; i += 32 * batched_readers) {
            const std::int64_t at = std::int64_t{head_} * call_.width + i;
            memory_.readout[i] = weights.readout[at];
            memory_.gain[i] = weights.norm_gain != nullptr ? weights.norm_gain[at] : 1.0f;
        }
        named_barrier(3, 32 * batched_readers);
        cluster_wait();
        if (reader == 0 && count_ != 0) {
            find_gates(entries, slot);
        }
        for (std::int32_t e = 0; e < count_; ++e) {
            if (has(entries, e)) {
                if (taken_ % batched_readers == reader) {
                    read_one(e);
                }
                ++taken_;
            }
        }
    }
    __device__ void find_gates(unsigned entries, std::int32_t slot) const {
        const std::int32_t mine = lane_id() / 2, my_slot = __shfl_sync(all_lanes, slot, mine);
        const bool there = mine < count_ && has(entries, mine);
        mlstm_gates gates;
        if (there) {
            const float* const stabilizer =
                call_.cache.state + state_of(my_slot) + state_numbers() + call_.features;
            gates.first = stabilizer[0];
            gates.second = stabilizer[1];
        }
        meet();
        meet();
        take_gates(gates, mine, there);
        meet();
    }
    __device__ void take_gates(mlstm_gates& gates, std::int32_t mine, bool there) const {
        const bool input = lane_id() % 2 == 0;
        const auto& weights = call_.scorer.weights;
        const float* const bias = input ? weights.b_i : weights.b_f;
        float gate = there ? memory_.y[mine * rows_.count() + rows_.gates() + (input ? 0 : 1)] : 0.0f;
        gate += bias != nullptr ? bias[head_] : 0.0f;
        const float factor = gates.take(gate, call_.scorer.gate_softcap, there);
        if (there) {
            memory_.gate[lane_id()] = factor;
            new_states()[memory_.tokens->new_state[mine] + state_numbers() + call_.features + lane_id() % 2] =
                input ? gates.first : gates.second;
        }
    }
    /// The score of entry e.
    __device__ void read_one(std::int32_t e) const {
        auto& all = *memory_.tokens;
        const std::int32_t at = taken_ % batched_reads;
        barrier_wait(shared_address(&all.summed[at]), static_cast<std::uint32_t>(taken_ / batched_reads) % 2);
        float score = 0.0f;
        if (all.leaves[e] != 0) {
            score = read_out(memory_.h + at * folds_ * call_.width, memory_.divisor + at * folds_, folds_,
                             call_.width, memory_.readout, memory_.gain, call_.scorer, head_);
            score += rows_.has_skip ? memory_.y[e * rows_.count() + rows_.skip()] : 0.0f;
        }
        warp_arrive(shared_address(&all.read[at]), lane_id());
        if (lane_id() == 0) {
            call_.scores[std::int64_t{first_ + e} * call_.cache.kv_heads + head_] = score;
        }
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
