// mLSTM scores by a cluster of blocks, for compute capability 9.0: as agent_score.cuh does by one block.
//
// A token is a chain of small dependent products, so latency counts: how soon each product begins, and how
// few instructions there are, since a decode kernel starts with a cold instruction cache. The blocks of a
// cluster share the tiles of the weights, which they prefetch before any token is known, and the rows of the
// state, which stay in registers over the tokens of a chunk. They send each other projections, and their
// parts of q~^T C to the block that reads the score; mbarriers count what has arrived. A cluster takes
// several sequences of one head at once, since a tensor core multiplies by eight columns anyway.
//
// The last warp also finds where tokens are, and computes the gates. There are eight warps, two per quarter
// of an SM, so that a block of the decode kernel fits beside them.
#pragma once

#include <kvpolicy/caches/cuda/contiguous/contiguous_view.cuh>
#include <kvpolicy/caches/cuda/scoring/agent_mlstm_step.cuh>
#include <kvpolicy/caches/cuda/scoring/agent_score.cuh>
#include <kvpolicy/caches/cuda/scoring/mlstm_cluster_memory.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/cluster.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class Sizes, class View, std::int32_t D, class Feature, class Values>
class agent_mlstm_cluster {
    using Scorer = mLSTMScorer<D, Feature, Values>;
    using Launch = score_params<View, Scorer>;
    using T = typename View::value_type;
    static constexpr int Entries = Sizes::Entries, Folds = Sizes::Folds;

  public:
    using Memory = cluster_memory<Sizes, T>;

    __device__ agent_mlstm_cluster(const Launch& call, unsigned char* shared)
        : call_(call),
          rows_{call.projection, Values::projected ? call.width : 0, call.scorer.weights.skip != nullptr},
          inputs_(call.cache.head_dim_qk + call.cache.head_dim_vo),
          padded_(folds_of(call.features) * fold_rows),
          memory_(shared, inputs_, rows_.count(), call.features, call.width) {
        const auto number = static_cast<std::int32_t>(blockIdx.x);
        block_ = number % cluster_blocks;
        head_ = number / cluster_blocks % call.cache.kv_heads;
        first_fold_ = block_ * Sizes::folds_each(call.features);
        const std::int32_t left = folds_of(call.features) - first_fold_,
                           each = Sizes::folds_each(call.features);
        folds_ = left < 0 ? 0 : left < each ? left : each;
    }

    /// Asks the L2 cache for the block's weights, its rows of the states, and what says where tokens are.
    /// None of it need be what it will be after the kernels before.
    __device__ void ask_early() const {
        const auto& cache = call_.cache;
        const std::int32_t first =
            static_cast<std::int32_t>(blockIdx.x) / cluster_blocks / cache.kv_heads * call_.together;
        const bool in_order = call_.batch.seq_ids == nullptr;
        {
            const std::int32_t row = weight_row(0) + lane_id() % 4 / 2 * 8;
            const std::int32_t column = warp_ % 4 * 64 + lane_id() % 2 * 32;
            if (column < inputs_) {
                ask_for_line(rows_.weights(call_.scorer.weights, head_, row, inputs_) + column);
            }
            constexpr std::int32_t line = 32;  // numbers
            const std::int32_t lines = (folds_ * fold_rows * call_.width + line - 1) / line;
            const std::int32_t entry = first + thread() / (lines == 0 ? 1 : lines);
            const std::int64_t at = std::int64_t{first_fold_} * fold_rows * call_.width +
                                    thread() % (lines == 0 ? 1 : lines) * line;
            if (in_order && thread() < lines * call_.together && entry < call_.batch.count &&
                at < cache.state_size) {
                ask_for_line(cache.state + (entry * std::int64_t{cache.kv_heads} + head_) * cache.state_size +
                             at);
            }
        }
        if (minds()) {
            ask_for_entries(cache, call_.batch, head_, first, call_.together);
        }
    }

    __device__ void run() {
        if (thread() == 0) {
            barrier_init(projected(), 1);
            barrier_init(summed(), 1);
            barrier_init_fence();
            expect_projections();
        }
        cluster_arrive_relaxed();
        const auto number = static_cast<std::int32_t>(blockIdx.x);
        const std::int32_t first = number / cluster_blocks / call_.cache.kv_heads,
                           turns =
                               static_cast<std::int32_t>(gridDim.x) / cluster_blocks / call_.cache.kv_heads,
                           groups = (call_.batch.count + call_.together - 1) / call_.together;
        load_weights(0);
        begin();
        share_pieces();
        bool alone = true;  // others may not have begun
        for (std::int32_t group = first; group < groups; group += turns) {
            if (minds()) {
                find(group);
            }
            __syncthreads();
            const std::int32_t most = memory_.tokens->most;
            fetch();
            load_state();
            if (alone) {
                cluster_wait();  // all blocks are there: from here on they write to each other
                alone = false;
            }
            for (std::int32_t j = 0; j < most; ++j) {
                take(group, j, j + 1 < most, group + turns < groups);
            }
            __syncthreads();  // what tokens are is the next group's
        }
        if (alone) {
            cluster_wait();
        }
    }

  private:
    /// Whether this is the warp that finds tokens and has the gates.
    [[nodiscard]] __device__ bool minds() const { return warp_ == cluster_warps - 1; }
    [[nodiscard]] __device__ static std::int32_t thread() { return static_cast<std::int32_t>(threadIdx.x); }
    [[nodiscard]] __device__ std::int64_t state_numbers() const {
        return std::int64_t{call_.features} * call_.width;
    }

    [[nodiscard]] __device__ std::uint32_t projected() const {
        return shared_address(&memory_.tokens->projected);
    }
    [[nodiscard]] __device__ std::uint32_t summed() const { return shared_address(&memory_.tokens->summed); }
    /// By one thread.
    __device__ void expect_projections() const {
        barrier_expect(projected(), static_cast<std::uint32_t>(4 * call_.together * rows_.count()));
    }

    /// Token j of a group's entries. `more`: there are more of them, `others`: another group comes.
    __device__ void take(std::int32_t group, std::int32_t j, bool more, bool others) {
        store_tokens();
        if (minds()) {
            await_stabilizers();
        }
        __syncthreads();
        if (minds() && more) {
            point_again(group, j + 1);
        }
        const bool skips = rows_.has_skip;
        project();
        const bool reads = block_ < call_.together && j < memory_.tokens->count[block_];
        barrier_wait(projected(), projections_);
        projections_ ^= 1;
        if (thread() == 0) {
            expect_projections();  // the next token's
            if (reads) {
                barrier_expect(summed(),
                               static_cast<std::uint32_t>(4 * folds_of(call_.features) * (call_.width + 1)));
            }
        }
        if (more) {
            fetch();
        }
        if (minds()) {
            take_gates(j);
        }
        make_features<Feature>(memory_.y, rows_, call_.together, call_.features, padded_, memory_.k,
                               memory_.q, warp_);
        __syncthreads();
        update(j);
        if (!more) {
            store_state();
            if (minds()) {
                store_stabilizer();
            }
        }
        float skip = 0.0f;
        if (reads && skips) {
            skip = memory_.y[block_ * rows_.count() + rows_.skip()];
        }
        if (more || others) {
            cluster_barrier();  // projections of this token have been read everywhere
        }
        if (reads) {
            if (warp_ == 0) {
                barrier_wait(summed(), sums_);
                read(group, j, skip);
            }
            sums_ ^= 1;
        }
    }

    /// Once: what is the same for all tokens.
    __device__ void begin() {
        const auto& weights = call_.scorer.weights;
        for (std::int32_t e = thread(); e < call_.width; e += cluster_threads) {
            const std::int64_t at = std::int64_t{head_} * call_.width + e;
            memory_.readout[e] = weights.readout[at];
            memory_.gain[e] = weights.norm_gain != nullptr ? weights.norm_gain[at] : 1.0f;
        }
        const std::int32_t stride = token_stride(inputs_);
        for (std::int32_t i = thread(); i < 2 * Sizes::tokens * 16; i += cluster_threads) {
            const std::int32_t column = inputs_ + i % 16;
            if (column < stride) {
                memory_.x[i / 16 * stride + column] = 0.0f;
            }
        }
        for (std::int32_t i = thread(); i < Entries * fold_rows; i += cluster_threads) {
            const std::int32_t row = padded_ - fold_rows + i % fold_rows;
            if (row >= call_.features) {
                memory_.k[i / fold_rows * padded_ + row] = memory_.q[i / fold_rows * padded_ + row] = 0.0f;
            }
        }
    }

    // The last warp, four lanes per entry: what tokens there are, where they lie, the gates.

    [[nodiscard]] __device__ static int my_entry() { return lane_id() / 4; }
    [[nodiscard]] __device__ bool has_entry() const { return my_entry() < call_.together; }

    __device__ void find(std::int32_t group) {
        const std::int32_t entry = group * call_.together + my_entry();
        tokens_ = 0;
        seq_ = 0;
        base_ = 0;
        if (has_entry() && entry < call_.batch.count) {
            const token_entry<View> known(call_.cache, call_.batch, entry, call_.tokens.most, head_);
            tokens_ = known.active.tokens;
            if (tokens_ != 0) {
                seq_ = known.active.seq;
                base_ = known.base;
            }
            point(known.rows, entry, 0);
        } else if (has_entry()) {
            pointer() = nullptr;
        }
        const std::int32_t most = __reduce_max_sync(all_lanes, tokens_);
        auto& tokens = *memory_.tokens;
        if (has_entry() && lane_id() % 4 == 0) {
            const std::int64_t heads = call_.cache.kv_heads, size = call_.cache.state_size;
            tokens.count[my_entry()] = tokens_;
            tokens.state[my_entry()] = (seq_ * heads + head_) * size;
            tokens.new_state[my_entry()] =
                ((call_.state == nullptr ? std::int64_t{seq_} : std::int64_t{entry}) * heads + head_) * size;
        }
        if (lane_id() == 0) {
            tokens.most = most;
        }
        if (tokens_ != 0) {
            const float* const of_state =
                call_.cache.state +
                (seq_ * std::int64_t{call_.cache.kv_heads} + head_) * call_.cache.state_size +
                state_numbers() + call_.features;
            gates_.first = of_state[0];
            gates_.second = of_state[1];
        }
    }
    /// Does not go on before the stabilizers are read: the first block writes new ones in their place as soon
    /// as it has all blocks' projections, which are sent after this.
    __device__ void await_stabilizers() {
        gates_.first = __shfl_sync(all_lanes, gates_.first, lane_id());
        gates_.second = __shfl_sync(all_lanes, gates_.second, lane_id());
    }
    [[nodiscard]] __device__ bool of_leaving() const { return lane_id() % 4 >= 2; }
    [[nodiscard]] __device__ bool of_value() const { return lane_id() % 2 != 0; }
    /// What the lane has to say.
    [[nodiscard]] __device__ const T*& pointer() const {
        return memory_.tokens->from[my_entry()][of_leaving() ? 1 : 0][of_value() ? 1 : 0];
    }
    /// Where token j of the lane's entry lies.
    __device__ void point(const typename View::head_type& rows, std::int32_t entry, std::int32_t j) const {
        pointer() = j < tokens_
                        ? token_source(rows, call_.tokens, entry, head_, base_, j, of_leaving(), of_value())
                        : nullptr;
    }
    __device__ void point_again(std::int32_t group, std::int32_t j) const {
        if (has_entry()) {
            point(typename View::head_type(call_.cache, seq_, head_), group * call_.together + my_entry(), j);
        }
    }
    __device__ void take_gates(std::int32_t j) {
        const HeadParams& head_params = call_.cache.all_params[head_];
        const bool input = lane_id() % 2 == 0;
        const auto& weights = call_.scorer.weights;
        const float* const bias = input ? weights.b_i : weights.b_f;
        float gate =
            memory_.y[(has_entry() ? my_entry() : 0) * rows_.count() + rows_.gates() + (input ? 0 : 1)];
        gate += bias != nullptr ? bias[head_] : 0.0f;
        const float factor = gates_.take(gate, call_.scorer.gate_softcap, j < tokens_);
        if (has_entry() && lane_id() % 4 < 2) {
            memory_.gate[2 * my_entry() + lane_id() % 2] = factor;
            memory_.tokens->leaves[my_entry()] = base_ + j - head_params.window >= head_params.sinks ? 1 : 0;
        }
    }
    __device__ void store_stabilizer() const {
        if (block_ == 0 && has_entry() && tokens_ != 0 && lane_id() % 4 < 2) {
            new_states()[memory_.tokens->new_state[my_entry()] + state_numbers() + call_.features +
                         lane_id() % 2] = lane_id() % 2 == 0 ? gates_.first : gates_.second;
        }
    }
    [[nodiscard]] __device__ float* new_states() const {
        return call_.state == nullptr ? call_.cache.state : call_.state;
    }

    // All warps.

    /// The first of the two rows of all weights that the lane has.
    [[nodiscard]] __device__ std::int32_t weight_row(std::int32_t turn) const {
        return ((turn * cluster_blocks + block_) * 2 + warp_ / 4) * mlstm_rows::tile + lane_id() / 4;
    }
    __device__ void load_weights(std::int32_t turn) {
        const std::int32_t row = weight_row(turn);
        const auto& weights = call_.scorer.weights;
        weight_.load(rows_.weights(weights, head_, row, inputs_),
                     rows_.weights(weights, head_, row + 8, inputs_), warp_ % 4, inputs_);
    }

    /// Sets out to read a token of the warp's entry, and the key that leaves.
    __device__ void fetch() {
        if (warp_ < call_.together) {
            token_.load(memory_.tokens->from[warp_], call_.cache.head_dim_qk, inputs_);
        }
    }
    __device__ void store_tokens() const {
        if (warp_ < call_.together) {
            float* const to = memory_.x + warp_ * token_stride(inputs_);
            token_.store(to, to + Sizes::tokens * token_stride(inputs_), inputs_);
        }
    }

    /// This block's tiles of all projections, into the memory of all blocks. All threads.
    __device__ void project() {
        constexpr std::int32_t of_turn = 2 * cluster_blocks;
        const std::int32_t tiles = rows_.tiles(), turns = (tiles + of_turn - 1) / of_turn;
        for (std::int32_t turn = 0; turn < turns; ++turn) {
            const std::int32_t first = turn * of_turn + block_ * 2;
            if (turns > 1) {
                load_weights(turn);
            }
            {
                const std::int32_t tile = first + warp_ / 4;
                const bool leaving = tile * mlstm_rows::tile >= rows_.queries();
                float sum[4];
                weight_.template multiply<T>(
                    memory_.x + (leaving ? Sizes::tokens * token_stride(inputs_) : 0), warp_ % 4, inputs_,
                    sum);
                float* const to = memory_.sent + warp_ * Memory::tile_numbers +
                                  lane_id() % 4 * 2 * Memory::sent_stride + lane_id() / 4;
                to[0] = sum[0];
                to[Memory::sent_stride] = sum[1];
                to[8] = sum[2];
                to[Memory::sent_stride + 8] = sum[3];
            }
            __syncthreads();
            // A line of 32 rows at once, since the way between blocks is narrow.
            const int token = warp_, tile = lane_id() / mlstm_rows::tile;
            const std::int32_t row = first * mlstm_rows::tile + lane_id();
            if (token < call_.together && row < rows_.count()) {
                const float* const from = memory_.sent + tile * 4 * Memory::tile_numbers +
                                          token * Memory::sent_stride + lane_id() % mlstm_rows::tile;
                const float sum =
                    join_quarters(from[0], from[Memory::tile_numbers], from[2 * Memory::tile_numbers],
                                  from[3 * Memory::tile_numbers]);
                const std::uint32_t to = shared_address(memory_.y + token * rows_.count() + row);
#pragma unroll
                for (int b = 0; b < cluster_blocks; ++b) {
                    send_in_cluster(cluster_address(to, b), sum, cluster_address(projected(), b));
                }
            }
            if (turn + 1 < turns) {
                __syncthreads();  // what was sent has been read
            }
        }
    }

    /// A piece of a thread: which entry's, which of all folds, which two columns. Entry < 0: none.
    struct piece_coords {
        std::int32_t entry, fold, column;
    };
    __device__ void share_pieces() {
        const std::int32_t pairs = call_.width / 2;
#pragma unroll
        for (int i = 0; i < Folds; ++i) {
            const std::int32_t at = thread() + i * cluster_threads, line = at / pairs;
            slot_[i] = {-1, 0, (at - line * pairs) * 2};
            if (line < call_.together * folds_) {
                slot_[i].entry = line / folds_;
                slot_[i].fold = first_fold_ + line % folds_;
            }
        }
        const std::int32_t rows = folds_ * fold_rows;
        z_entry_ = -1;
        if (thread() < call_.together * rows) {
            z_entry_ = thread() / rows;
            z_row_ = first_fold_ * fold_rows + thread() % rows;
        }
    }

    /// visit(i, coordinates, first row) for the thread's pieces of sequences with tokens.
    template <class Visit>
    __device__ void for_each_piece(const Visit& visit) const {
#pragma unroll
        for (int i = 0; i < Folds; ++i) {
            const piece_coords& at = slot_[i];
            if (at.entry >= 0 && memory_.tokens->count[at.entry] != 0) {
                visit(i, at, at.fold * fold_rows);
            }
        }
    }
    /// The block's rows of the states: from memory, or to it.
    __device__ void load_state() {
        const auto& tokens = *memory_.tokens;
        for_each_piece([&](int i, const piece_coords& at, std::int32_t row) {
            c_[i].load(call_.cache.state + tokens.state[at.entry] + row * call_.width + at.column,
                       call_.width, call_.features - row);
        });
        if (z_entry_ >= 0 && tokens.count[z_entry_] != 0 && z_row_ < call_.features) {
            z_ = call_.cache.state[tokens.state[z_entry_] + state_numbers() + z_row_];
        }
    }
    __device__ void store_state() const {
        const auto& tokens = *memory_.tokens;
        for_each_piece([&](int i, const piece_coords& at, std::int32_t row) {
            c_[i].store(new_states() + tokens.new_state[at.entry] + row * call_.width + at.column,
                        call_.width, call_.features - row);
        });
        if (z_entry_ >= 0 && tokens.count[z_entry_] != 0 && z_row_ < call_.features) {
            new_states()[tokens.new_state[z_entry_] + state_numbers() + z_row_] = z_;
        }
    }

    /// The block's rows of the states take in token j; what they add to q~^T C goes to the block that reads
    /// the entry.
    __device__ void update(std::int32_t j) {
        const auto& tokens = *memory_.tokens;
#pragma unroll
        for (int i = 0; i < Folds; ++i) {
            const piece_coords& at = slot_[i];
            if (at.entry >= 0 && j < tokens.count[at.entry]) {
                const std::int32_t first = at.entry * padded_ + at.fold * fold_rows;
                const float* const value =
                    (Values::projected
                         ? memory_.y + at.entry * rows_.count() + rows_.values()
                         : memory_.x + at.entry * token_stride(inputs_) + call_.cache.head_dim_qk) +
                    at.column;
                const float2 sum =
                    c_[i].take(memory_.gate[2 * at.entry], memory_.gate[2 * at.entry + 1], memory_.k + first,
                               memory_.q + first, make_float2(value[0], value[1]));
                const float* const to = memory_.h + at.fold * call_.width + at.column;
                send_in_cluster(cluster_address(shared_address(to), at.entry), sum,
                                cluster_address(summed(), at.entry));
            }
        }
        const bool mine = z_entry_ >= 0 && j < tokens.count[z_entry_];
        float sum = 0.0f;
        if (mine && z_row_ < call_.features) {
            const float write = memory_.gate[2 * z_entry_], forget = memory_.gate[2 * z_entry_ + 1];
            z_ = fmaf(forget, z_, times_or_nothing(write, memory_.k[z_entry_ * padded_ + z_row_]));
            sum = __fmul_rn(memory_.q[z_entry_ * padded_ + z_row_], z_);
        }
        sum = fold_total(sum);
        if (mine && z_row_ % fold_rows == 0) {
            send_in_cluster(cluster_address(shared_address(memory_.divisor + z_row_ / fold_rows), z_entry_),
                            sum, cluster_address(summed(), z_entry_));
        }
    }

    /// The score of the entry that is this block's, by its first warp.
    __device__ void read(std::int32_t group, std::int32_t j, float skip) const {
        float score = 0.0f;
        if (memory_.tokens->leaves[block_]) {
            score = read_out(memory_.h, memory_.divisor, folds_of(call_.features), call_.width,
                             memory_.readout, memory_.gain, call_.scorer, head_) +
                    skip;
        }
        if (lane_id() == 0) {
            const std::int64_t pair =
                (std::int64_t{group} * call_.together + block_) * call_.cache.kv_heads + head_;
            call_.scores[pair * call_.tokens.most + j] = score;
        }
    }

    const Launch& call_;
    const int warp_ = whole_warp_id();
    mlstm_rows rows_;
    std::int32_t inputs_, padded_;
    Memory memory_;
    std::int32_t block_, head_, first_fold_, folds_;
    weight_quarter weight_;
    token_rows<T> token_;
    piece_coords slot_[Folds];
    state_piece c_[Folds];
    std::int32_t z_entry_ = -1, z_row_ = 0;
    float z_ = 0.0f;
    std::uint32_t projections_ = 0, sums_ = 0;  // phases of the barriers
    // Of the last warp.
    mlstm_gates gates_;
    std::int32_t seq_ = 0, tokens_ = 0;
    position_t base_ = 0;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
