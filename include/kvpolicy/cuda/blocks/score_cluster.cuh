// An mLSTM scorer's tokens by a cluster of blocks, for compute capability 9.0: what score_block.cuh does by one.
//
// A token is a chain of small products that wait for each other, so what counts is how soon each begins, and how few instructions
// there are: a step's kernel comes with a cold instruction cache. The blocks of a cluster share the tiles of the weights, which they
// ask for before they know any token, and the rows of the state, which stays in registers while tokens of a chunk follow each
// other. They wait for each other twice a token: for all projections, and, who reads, for everybody's share of q~^T C. A cluster
// takes several sequences at once, always of one head: a tensor core multiplies by eight as soon as by one.
#pragma once

#include <kvpolicy/cuda/blocks/cache_view.cuh>
#include <kvpolicy/cuda/blocks/cluster.cuh>
#include <kvpolicy/cuda/blocks/mlstm_step.cuh>
#include <kvpolicy/cuda/blocks/score_block.cuh>
#include <kvpolicy/cuda/config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int cluster_blocks = 4;
inline constexpr int cluster_warps = 16;  // of a block
inline constexpr int cluster_threads = 32 * cluster_warps;
inline constexpr int cluster_tiles = cluster_warps / 4;  // of the weights, a block and turn

/// Sizes: the most sequences of a cluster at once, and folds of their states that a thread has.
template <int Entries_, int Folds_>
struct cluster_sizes {
    static constexpr int Entries = Entries_, Folds = Folds_;
    static constexpr int tokens = 8;  // that a product takes
    static constexpr int reads =
        (Entries + cluster_blocks - 1) / cluster_blocks;  // entries that a block reads
    static_assert(Entries <= tokens && 4 * Entries <= 32 && reads <= cluster_warps);

    __host__ __device__ static constexpr std::int32_t folds_each(std::int32_t features) {
        return (folds_of(features) + cluster_blocks - 1) / cluster_blocks;
    }
    /// Whether a scorer's sizes fit.
    __host__ __device__ static constexpr bool fit(std::int32_t inputs, std::int32_t features,
                                                  std::int32_t width) {
        return inputs <= most_mlstm_inputs && inputs % 4 == 0 && width <= most_mlstm_width &&
               features <= most_mlstm_features && width % 2 == 0 && features % 2 == 0 &&
               Entries * folds_each(features) * (width / 2) <= Folds * cluster_threads &&
               Entries * folds_each(features) * fold_rows <= cluster_threads;
    }
};

/// Shared memory of a block of a cluster.
template <class Sizes, class T>
struct cluster_memory {
    static constexpr int Entries = Sizes::Entries;
    static constexpr int sent_stride = mlstm_rows::tile + 4;  // of a token; so that banks differ
    static constexpr int tile_numbers = sent_stride * Sizes::tokens;

    struct alignas(16) Tokens {
        std::uint64_t all_y[2], all_h;  // barriers: what other blocks send has come
        const T* from[Entries][2][2];   // the newcomer's key and value, those of the key that leaves
        std::int64_t state[Entries], new_state[Entries];
        std::int32_t count[Entries], leaves[Entries];
        std::int32_t most;
    };

    Tokens* tokens;
    float* x;               // [2, Sizes::tokens, token_stride]: newcomers, leaving keys
    float* sent;            // [cluster_warps, tile_numbers]: this block's quarters of projections
    float* y;               // [2, Entries, rows]: every projection, from all blocks, of tokens in turn
    float *k, *q;           // [Entries, padded]
    float* gate;            // [Entries, 2]: write, forget
    float* h;               // [reads, folds, width] of the entries that this block reads, from all blocks
    float* divisor;         // [reads, folds]
    float *readout, *gain;  // [width]

    __host__ __device__ static constexpr std::int64_t bytes(std::int32_t inputs, std::int32_t rows,
                                                            std::int32_t features, std::int32_t width) {
        const std::int64_t folds = folds_of(features);
        return static_cast<std::int64_t>(sizeof(Tokens)) +
               4 * (2 * Sizes::tokens * std::int64_t{token_stride(inputs)} + cluster_warps * tile_numbers +
                    Entries * (2 * std::int64_t{rows} + 2 * folds * fold_rows + 2) +
                    Sizes::reads * folds * (width + 1) + 2 * width);
    }
    __device__ cluster_memory(unsigned char* at, std::int32_t inputs, std::int32_t rows,
                              std::int32_t features, std::int32_t width)
        : tokens(reinterpret_cast<Tokens*>(at)), x(reinterpret_cast<float*>(at + sizeof(Tokens))) {
        const std::int32_t folds = folds_of(features);
        sent = x + 2 * Sizes::tokens * token_stride(inputs);
        y = sent + cluster_warps * tile_numbers;
        k = y + 2 * Entries * rows;
        q = k + Entries * folds * fold_rows;
        gate = q + Entries * folds * fold_rows;
        h = gate + 2 * Entries;
        divisor = h + Sizes::reads * folds * width;
        readout = divisor + Sizes::reads * folds;
        gain = readout + width;
    }
};

template <class Sizes, class View, std::int32_t D, class Feature, class Values>
class score_cluster {
    using Scorer = mLSTMScorer<D, Feature, Values>;
    using Launch = score_launch<View, Scorer>;
    using T = typename View::value_type;
    static constexpr int Entries = Sizes::Entries, Folds = Sizes::Folds;

  public:
    using Memory = cluster_memory<Sizes, T>;

    __device__ score_cluster(const Launch& call, unsigned char* shared)
        : call_(call),
          rows_{call.projection, Values::projected ? call.width : 0, call.scorer.weights.skip != nullptr},
          inputs_(call.cache.dim_k + call.cache.dim_v),
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

    __device__ void run() {
        if (threadIdx.x == 0) {
            barrier_init(barrier_of(memory_.tokens->all_y), 1);
            barrier_init(barrier_of(memory_.tokens->all_y + 1), 1);
            barrier_init(barrier_of(&memory_.tokens->all_h), 1);
            barrier_init_fence();
        }
        cluster_arrive_relaxed();
        const auto number = static_cast<std::int32_t>(blockIdx.x);
        const std::int32_t first = number / cluster_blocks / call_.cache.kv_heads,
                           turns =
                               static_cast<std::int32_t>(gridDim.x) / cluster_blocks / call_.cache.kv_heads,
                           groups = (call_.batch.count + call_.together - 1) / call_.together;
        load_weights(0);
        bool alone = true;  // others may not have begun
        for (std::int32_t group = first; group < groups; group += turns) {
            if (scouts()) {
                find(group);
            }
            if (alone) {
                begin();
                share_pieces();
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
                take(group, j, j + 1 < most);
            }
            __syncthreads();  // what tokens are is the next group's
        }
        if (alone) {
            cluster_wait();
        }
    }

  private:
    /// The warp that finds out where tokens are, and has the gates.
    [[nodiscard]] __device__ bool scouts() const { return warp_ == cluster_warps - 1; }
    [[nodiscard]] __device__ static std::int32_t thread() { return static_cast<std::int32_t>(threadIdx.x); }
    [[nodiscard]] __device__ std::int64_t state_numbers() const {
        return std::int64_t{call_.features} * call_.width;
    }
    [[nodiscard]] __device__ static std::uint32_t barrier_of(const std::uint64_t* barrier) {
        return shared_address(barrier);
    }
    /// The projections of the present token.
    [[nodiscard]] __device__ float* y() const {
        return memory_.y + (taken_ % 2 != 0 ? Entries * rows_.count() : 0);
    }

    // Blocks send projections and shares of q~^T C, and do not wait for each other to have read them: projections of a token come only
    // after all blocks have sent those of the token before, which each does when it is done with the one before that, and with
    // what it reads. So there are two places for projections, and one for shares.

    __device__ void take(std::int32_t group, std::int32_t j, bool more) {
        const auto& tokens = *memory_.tokens;
        if (thread() == 0) {
            const std::int32_t of_entry = folds_of(call_.features) * (call_.width + 1);
            std::int32_t shares = 0;
            for (std::int32_t g = block_; g < call_.together; g += cluster_blocks) {
                shares += j < tokens.count[g] ? of_entry : 0;
            }
            barrier_expect(barrier_of(tokens.all_y + taken_ % 2),
                           static_cast<std::uint32_t>(call_.together * rows_.count() * 4));
            barrier_expect(barrier_of(&tokens.all_h), static_cast<std::uint32_t>(shares * 4));
        }
        store_tokens();
        __syncthreads();
        project();
        if (scouts() && more) {
            point(group, j + 1);
        }
        barrier_wait(barrier_of(tokens.all_y + taken_ % 2), taken_ / 2 % 2);
        if (scouts()) {
            take_gates(j);
        } else {
            make_features<Feature>(y(), rows_, call_.together, call_.features, padded_, memory_.k, memory_.q,
                                   warp_);
        }
        __syncthreads();
        if (more) {
            fetch();
        }
        update(j);
        if (!more) {
            store_state();
            store_stabiliser();
        }
        const std::int32_t mine = warp_ * cluster_blocks + block_;
        if (mine < call_.together && j < tokens.count[mine]) {
            read(group, j, mine);
        }
        ++taken_;
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

    // The scout, four lanes an entry: what tokens there are, where they lie, the gates.

    [[nodiscard]] __device__ static int my_entry() { return lane_id() / 4; }
    [[nodiscard]] __device__ bool has_entry() const { return my_entry() < call_.together; }

    __device__ void find(std::int32_t group) {
        const std::int32_t entry = group * call_.together + my_entry();
        tokens_ = 0;
        slot_ = 0;
        base_ = 0;
        if (has_entry() && entry < call_.batch.count) {
            const active_entry active =
                active_entry(call_.cache, call_.batch, entry, call_.tokens.most).once(call_.cache);
            tokens_ = active.tokens;
            if (tokens_ != 0) {
                slot_ = active.slot;
                base_ = call_.cache.length[slot_];
            }
        }
        const std::int32_t most = __reduce_max_sync(all_lanes, tokens_);
        auto& tokens = *memory_.tokens;
        if (has_entry() && lane_id() % 4 == 0) {
            const std::int64_t heads = call_.cache.kv_heads, size = call_.cache.state_size;
            tokens.count[my_entry()] = tokens_;
            tokens.state[my_entry()] = (slot_ * heads + head_) * size;
            tokens.new_state[my_entry()] =
                ((call_.state == nullptr ? std::int64_t{slot_} : std::int64_t{entry}) * heads + head_) * size;
        }
        if (lane_id() == 0) {
            tokens.most = most;
        }
        point(group, 0);
        if (tokens_ != 0) {
            const float* const of_state =
                call_.cache.state +
                (slot_ * std::int64_t{call_.cache.kv_heads} + head_) * call_.cache.state_size +
                state_numbers() + call_.features;
            gates_.first = of_state[0];
            gates_.second = of_state[1];
        }
    }
    /// Where token j of every entry lies.
    __device__ void point(std::int32_t group, std::int32_t j) const {
        if (has_entry()) {
            const bool leaving = lane_id() % 4 >= 2, of_value = lane_id() % 2 != 0;
            memory_.tokens->from[my_entry()][leaving ? 1 : 0][of_value ? 1 : 0] =
                j < tokens_ ? token_source(call_.cache, call_.tokens, group * call_.together + my_entry(),
                                           slot_, head_, base_, j, leaving, of_value)
                            : nullptr;
        }
    }
    __device__ void take_gates(std::int32_t j) {
        const HeadRule& rule = call_.cache.rules[head_];
        const bool input = lane_id() % 2 == 0;
        const auto& weights = call_.scorer.weights;
        const float* const bias = input ? weights.b_i : weights.b_f;
        float gate = y()[(has_entry() ? my_entry() : 0) * rows_.count() + rows_.gates() + (input ? 0 : 1)];
        gate += bias != nullptr ? bias[head_] : 0.0f;
        const float factor = gates_.take(gate, call_.scorer.gate_softcap, j < tokens_);
        if (has_entry() && lane_id() % 4 < 2) {
            memory_.gate[2 * my_entry() + lane_id() % 2] = factor;
            memory_.tokens->leaves[my_entry()] = base_ + j - rule.window >= rule.sinks ? 1 : 0;
        }
    }
    __device__ void store_stabiliser() const {
        if (scouts() && block_ == 0 && has_entry() && tokens_ != 0 && lane_id() % 4 < 2) {
            new_states()[memory_.tokens->new_state[my_entry()] + state_numbers() + call_.features +
                         lane_id() % 2] = lane_id() % 2 == 0 ? gates_.first : gates_.second;
        }
    }
    [[nodiscard]] __device__ float* new_states() const {
        return call_.state == nullptr ? call_.cache.state : call_.state;
    }

    __device__ void load_weights(std::int32_t turn) {
        const std::int32_t tile = (turn * cluster_blocks + block_) * cluster_tiles + warp_ / 4,
                           row = tile * mlstm_rows::tile + lane_id() / 4;
        const auto& weights = call_.scorer.weights;
        weight_.load(rows_.weights(weights, head_, row, inputs_),
                     rows_.weights(weights, head_, row + 8, inputs_), warp_ % 4, inputs_);
    }

    /// Sets out to read a token of the warp's entry, and the key that leaves.
    __device__ void fetch() {
        if (warp_ < call_.together) {
            token_.load(memory_.tokens->from[warp_], call_.cache.dim_k, inputs_);
        }
    }
    __device__ void store_tokens() const {
        if (warp_ < call_.together) {
            float* const to = memory_.x + warp_ * token_stride(inputs_);
            token_.store(to, to + Sizes::tokens * token_stride(inputs_), inputs_);
        }
    }

    /// This block's tiles of all projections, to all blocks.
    __device__ void project() {
        constexpr std::int32_t of_turn = cluster_tiles * cluster_blocks;
        const std::int32_t turns = (rows_.tiles() + of_turn - 1) / of_turn;
        for (std::int32_t turn = 0; turn < turns; ++turn) {
            const std::int32_t first = turn * of_turn + block_ * cluster_tiles, tile = first + warp_ / 4;
            if (turns > 1) {
                load_weights(turn);
            }
            const bool leaving = tile * mlstm_rows::tile >= rows_.queries();
            float sum[4];
            weight_.template multiply<sizeof(T) == 2>(
                memory_.x + (leaving ? Sizes::tokens * token_stride(inputs_) : 0), warp_ % 4, inputs_, sum);
            float* const to = memory_.sent + warp_ * Memory::tile_numbers +
                              lane_id() % 4 * 2 * Memory::sent_stride + lane_id() / 4;
            to[0] = sum[0];
            to[Memory::sent_stride] = sum[1];
            to[8] = sum[2];
            to[Memory::sent_stride + 8] = sum[3];
            __syncthreads();
            send(first);
            if (turn + 1 < turns) {
                __syncthreads();  // what was sent has been read
            }
        }
    }
    /// A thread sends four rows of a token.
    __device__ void send(std::int32_t first_tile) const {
        constexpr std::int32_t fours = cluster_tiles * mlstm_rows::tile / 4;
        const std::int32_t token = thread() / fours, row = thread() % fours * 4,
                           place = first_tile * mlstm_rows::tile + row;
        if (token >= call_.together || place >= rows_.count()) {
            return;
        }
        const float* const from = memory_.sent + row / mlstm_rows::tile * 4 * Memory::tile_numbers +
                                  token * Memory::sent_stride + row % mlstm_rows::tile;
        float4 quarter[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            quarter[i] = *reinterpret_cast<const float4*>(from + i * Memory::tile_numbers);
        }
        const float4 sum = make_float4(join_quarters(quarter[0].x, quarter[1].x, quarter[2].x, quarter[3].x),
                                       join_quarters(quarter[0].y, quarter[1].y, quarter[2].y, quarter[3].y),
                                       join_quarters(quarter[0].z, quarter[1].z, quarter[2].z, quarter[3].z),
                                       join_quarters(quarter[0].w, quarter[1].w, quarter[2].w, quarter[3].w));
        const std::uint32_t to = shared_address(y() + token * rows_.count() + place),
                            barrier = barrier_of(memory_.tokens->all_y + taken_ % 2);
#pragma unroll
        for (int b = 0; b < cluster_blocks; ++b) {
            send_in_cluster(cluster_address(to, b), sum, cluster_address(barrier, b));
        }
    }

    /// A piece of a thread: which entry's, which of all folds, which two columns. Entry < 0: none.
    struct piece_place {
        std::int32_t entry, fold, column;
    };
    __device__ void share_pieces() {
        const std::int32_t pairs = call_.width / 2;
#pragma unroll
        for (int i = 0; i < Folds; ++i) {
            const std::int32_t at = thread() + i * cluster_threads, line = at / pairs;
            place_[i] = {-1, 0, (at - line * pairs) * 2};
            if (line < call_.together * folds_) {
                place_[i].entry = line / folds_;
                place_[i].fold = first_fold_ + line % folds_;
            }
        }
        const std::int32_t rows = folds_ * fold_rows;
        z_entry_ = -1;
        if (thread() < call_.together * rows) {
            z_entry_ = thread() / rows;
            z_row_ = first_fold_ * fold_rows + thread() % rows;
        }
    }

    /// The block's rows of the states: from memory, or to it.
    __device__ void load_state() {
        const auto& tokens = *memory_.tokens;
#pragma unroll
        for (int i = 0; i < Folds; ++i) {
            const piece_place& at = place_[i];
            if (at.entry >= 0 && tokens.count[at.entry] != 0) {
                const std::int32_t row = at.fold * fold_rows;
                c_[i].load(call_.cache.state + tokens.state[at.entry] + row * call_.width + at.column,
                           call_.width, call_.features - row);
            }
        }
        if (z_entry_ >= 0 && tokens.count[z_entry_] != 0 && z_row_ < call_.features) {
            z_ = call_.cache.state[tokens.state[z_entry_] + state_numbers() + z_row_];
        }
    }
    __device__ void store_state() const {
        const auto& tokens = *memory_.tokens;
#pragma unroll
        for (int i = 0; i < Folds; ++i) {
            const piece_place& at = place_[i];
            if (at.entry >= 0 && tokens.count[at.entry] != 0) {
                const std::int32_t row = at.fold * fold_rows;
                c_[i].store(new_states() + tokens.new_state[at.entry] + row * call_.width + at.column,
                            call_.width, call_.features - row);
            }
        }
        if (z_entry_ >= 0 && tokens.count[z_entry_] != 0 && z_row_ < call_.features) {
            new_states()[tokens.new_state[z_entry_] + state_numbers() + z_row_] = z_;
        }
    }

    /// The block's rows of the states take in token j; what they add to q~^T C goes to the block that reads the entry.
    __device__ void update(std::int32_t j) {
        const auto& tokens = *memory_.tokens;
#pragma unroll
        for (int i = 0; i < Folds; ++i) {
            const piece_place& at = place_[i];
            if (at.entry >= 0 && j < tokens.count[at.entry]) {
                const std::int32_t first = at.entry * padded_ + at.fold * fold_rows;
                const float* const value =
                    (Values::projected ? y() + at.entry * rows_.count() + rows_.values()
                                       : memory_.x + at.entry * token_stride(inputs_) + call_.cache.dim_k) +
                    at.column;
                const float2 sum =
                    c_[i].take(memory_.gate[2 * at.entry], memory_.gate[2 * at.entry + 1], memory_.k + first,
                               memory_.q + first, make_float2(value[0], value[1]));
                send_share(
                    memory_.h +
                        (at.entry / cluster_blocks * folds_of(call_.features) + at.fold) * call_.width +
                        at.column,
                    at.entry, sum);
            }
        }
        const bool mine = z_entry_ >= 0 && j < tokens.count[z_entry_];
        float sum = 0.0f;
        if (mine && z_row_ < call_.features) {
            const float write = memory_.gate[2 * z_entry_], forget = memory_.gate[2 * z_entry_ + 1];
            z_ = fmaf(forget, z_, __fmul_rn(write, memory_.k[z_entry_ * padded_ + z_row_]));
            sum = __fmul_rn(memory_.q[z_entry_ * padded_ + z_row_], z_);
        }
        sum = fold_total(sum);
        if (mine && z_row_ % fold_rows == 0) {
            send_share(
                memory_.divisor + z_entry_ / cluster_blocks * folds_of(call_.features) + z_row_ / fold_rows,
                z_entry_, sum);
        }
    }
    /// To the block that reads the entry.
    template <class Numbers>
    __device__ void send_share(const float* to, std::int32_t entry, const Numbers& x) const {
        const int block = entry % cluster_blocks;
        send_in_cluster(cluster_address(shared_address(to), block), x,
                        cluster_address(barrier_of(&memory_.tokens->all_h), block));
    }

    /// The score of entry `mine`, by a warp.
    __device__ void read(std::int32_t group, std::int32_t j, std::int32_t mine) const {
        const auto& weights = call_.scorer.weights;
        const std::int32_t folds = folds_of(call_.features), place = mine / cluster_blocks;
        barrier_wait(barrier_of(&memory_.tokens->all_h), taken_ % 2);
        float score = 0.0f;
        if (memory_.tokens->leaves[mine] != 0) {
            score = read_out(memory_.h + place * folds * call_.width, memory_.divisor + place * folds, folds,
                             call_.width, memory_.readout, memory_.gain, weights, head_,
                             static_cast<float>(Scorer::clamp), static_cast<float>(Scorer::norm_epsilon)) +
                    (rows_.has_skip ? y()[mine * rows_.count() + rows_.skip()] : 0.0f);
        }
        if (lane_id() == 0) {
            const std::int64_t pair =
                (std::int64_t{group} * call_.together + mine) * call_.cache.kv_heads + head_;
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
    piece_place place_[Folds];
    state_piece c_[Folds];
    std::int32_t z_entry_ = -1, z_row_ = 0;
    float z_ = 0.0f;
    std::uint32_t taken_ = 0;  // tokens so far
    // Of the scout.
    mlstm_gates gates_;
    std::int32_t slot_ = 0, tokens_ = 0;
    position_t base_ = 0;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
