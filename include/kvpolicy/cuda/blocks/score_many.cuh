// An mLSTM scorer's tokens of a step of many sequences: a block has some of one head, which share a look at the weights, and streams their
// states through its registers. What costs is that every state is read and written once; all else has to be done meanwhile, so the
// first states are asked for (into the L2 cache) before anything is known of what happens to them.
//
// A warp has a few rows of every state, and waits for no other warp between one state and the next.
#pragma once

#include <kvpolicy/cuda/blocks/cache_view.cuh>
#include <kvpolicy/cuda/blocks/mlstm_step.cuh>
#include <kvpolicy/cuda/blocks/score_block.cuh>
#include <kvpolicy/cuda/config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int many_warps = 16;
inline constexpr int many_threads = 32 * many_warps;
inline constexpr int many_entries = 16;  // of a round
inline constexpr int many_ahead = 2;     // states on their way into the L2 cache: more delay the rest
static_assert(many_entries <= many_warps && 4 * many_entries <= many_threads);

/// Whether a scorer's sizes fit: a thread has two columns of a fold.
constexpr bool many_fit(std::int32_t inputs, std::int32_t features, std::int32_t width) {
    return inputs <= most_mlstm_inputs && inputs % 4 == 0 && width <= most_mlstm_width && width % 2 == 0 &&
           features <= most_mlstm_features && features % 2 == 0 &&
           folds_of(features) * (width / 2) <= many_threads;
}

/// Shared memory of a block.
template <class T>
struct many_memory {
    struct alignas(16) Tokens {
        const T* from[many_entries][2][2];  // see cluster_memory
        std::int64_t state[many_entries], new_state[many_entries];
        std::int32_t count[many_entries], leaves[many_entries];
    };
    Tokens* tokens;
    float* x;               // [2, many_entries, token_stride]
    float* y;               // [many_entries, rows]
    float *k, *q;           // [many_entries, padded]
    float* gate;            // [many_entries, 2]
    float* h;               // [many_entries, folds, width]
    float* divisor;         // [many_entries, folds]
    float *readout, *gain;  // [width]

    __host__ __device__ static constexpr std::int64_t bytes(std::int32_t inputs, std::int32_t rows,
                                                            std::int32_t features, std::int32_t width) {
        const std::int64_t folds = folds_of(features);
        return static_cast<std::int64_t>(sizeof(Tokens)) +
               4 * (many_entries * (2 * std::int64_t{token_stride(inputs)} + rows + 2 * folds * fold_rows +
                                    2 + folds * (width + 1)) +
                    2 * width);
    }
    __device__ many_memory(unsigned char* at, std::int32_t inputs, std::int32_t rows, std::int32_t features,
                           std::int32_t width)
        : tokens(reinterpret_cast<Tokens*>(at)), x(reinterpret_cast<float*>(at + sizeof(Tokens))) {
        const std::int32_t folds = folds_of(features);
        y = x + 2 * many_entries * token_stride(inputs);
        k = y + many_entries * rows;
        q = k + many_entries * folds * fold_rows;
        gate = q + many_entries * folds * fold_rows;
        h = gate + many_entries * 2;
        divisor = h + many_entries * folds * width;
        readout = divisor + many_entries * folds;
        gain = readout + width;
    }
};

__device__ inline void ask_for_line(const float* line) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

template <class View, std::int32_t D, class Feature, class Values>
class score_many {
    using Scorer = mLSTMScorer<D, Feature, Values>;
    using Launch = score_launch<View, Scorer>;
    using T = typename View::value_type;
    static constexpr int Entries = many_entries;

  public:
    using Memory = many_memory<T>;

    __device__ score_many(const Launch& call, unsigned char* shared)
        : call_(call),
          rows_{call.projection, Values::projected ? call.width : 0, call.scorer.weights.skip != nullptr},
          inputs_(call.cache.dim_k + call.cache.dim_v),
          folds_(folds_of(call.features)),
          memory_(shared, inputs_, rows_.count(), call.features, call.width) {
        head_ = static_cast<std::int32_t>(blockIdx.x) % call.cache.kv_heads;
        fold_ = thread() / (call.width / 2);
        column_ = thread() % (call.width / 2) * 2;
    }

    /// Entries first to first + call.together of the block.
    __device__ void run() {
        const std::int32_t first =
                               static_cast<std::int32_t>(blockIdx.x) / call_.cache.kv_heads * call_.together,
                           end = first + call_.together < call_.batch.count ? first + call_.together
                                                                            : call_.batch.count;
        ask_for_weights();
        begin();
        for (std::int32_t entry = first; entry < end; entry += Entries) {
            const std::int32_t count = end - entry < Entries ? end - entry : Entries;
            if (thread() < 4 * Entries) {
                find(entry, count);
            }
            __syncthreads();
            token_rows<T> token;
            if (warp_ < count) {
                token.load(memory_.tokens->from[warp_], call_.cache.dim_k, inputs_);
            }
            ask(many_ahead < count ? many_ahead : count);
            if (warp_ < count) {
                float* const to = memory_.x + warp_ * token_stride(inputs_);
                token.store(to, to + Entries * token_stride(inputs_), inputs_);
            }
            __syncthreads();
            project(count);
            __syncthreads();
            load(first_, 0, count);
            if (warp_ == many_warps - 1) {
                take_gates(count);
            }
            make_features<Feature>(memory_.y, rows_, count, call_.features, folds_ * fold_rows, memory_.k,
                                   memory_.q, warp_);
            __syncthreads();
            for (std::int32_t e = 0; e < count; e += 2) {
                load(second_, e + 1, count);
                take(first_, e, count);
                load(first_, e + 2, count);
                take(second_, e + 1, count);
            }
            __syncthreads();
            if (warp_ < count && memory_.tokens->count[warp_] != 0) {
                read(entry);
            }
            if (entry + Entries < end) {
                __syncthreads();  // the memory is the next round's
            }
        }
    }

  private:
    /// What a thread holds of a state.
    struct piece {
        state_piece c;
        float z;
    };
    [[nodiscard]] __device__ static std::int32_t thread() { return static_cast<std::int32_t>(threadIdx.x); }
    [[nodiscard]] __device__ std::int64_t state_numbers() const {
        return std::int64_t{call_.features} * call_.width;
    }
    [[nodiscard]] __device__ float* new_states() const {
        return call_.state == nullptr ? call_.cache.state : call_.state;
    }

    /// Once: what is the same for all tokens.
    __device__ void begin() {
        const auto& weights = call_.scorer.weights;
        if (thread() < call_.width) {
            const std::int64_t at = std::int64_t{head_} * call_.width + thread();
            memory_.readout[thread()] = weights.readout[at];
            memory_.gain[thread()] = weights.norm_gain != nullptr ? weights.norm_gain[at] : 1.0f;
        }
        const std::int32_t stride = token_stride(inputs_);
        static_assert(2 * Entries * 16 == many_threads);
        const std::int32_t column = inputs_ + thread() % 16;
        if (column < stride) {
            memory_.x[thread() / 16 * stride + column] = 0.0f;
        }
        const std::int32_t padded = folds_ * fold_rows, row = padded - fold_rows + thread() % fold_rows;
        if (thread() < Entries * fold_rows && row >= call_.features) {
            memory_.k[thread() / fold_rows * padded + row] = memory_.q[thread() / fold_rows * padded + row] =
                0.0f;
        }
    }

    /// Where the tokens and states of the round are, by four lanes an entry.
    __device__ void find(std::int32_t first, std::int32_t count) const {
        const std::int32_t mine = thread() / 4, entry = first + mine;
        std::int32_t tokens = 0, slot = 0;
        const T* from = nullptr;
        const bool leaving = thread() % 4 >= 2, of_value = thread() % 2 != 0;
        if (mine < count) {
            const active_entry active = active_entry(call_.cache, call_.batch, entry, 1).once(call_.cache);
            tokens = active.tokens;
            if (tokens != 0) {
                slot = active.slot;
                from = token_source(call_.cache, call_.tokens, entry, slot, head_, call_.cache.length[slot],
                                    0, leaving, of_value);
            }
        }
        auto& all = *memory_.tokens;
        all.from[mine][leaving ? 1 : 0][of_value ? 1 : 0] = from;
        if (leaving && !of_value) {
            all.leaves[mine] = from != nullptr ? 1 : 0;
        }
        if (thread() % 4 == 0) {
            const std::int64_t heads = call_.cache.kv_heads, size = call_.cache.state_size;
            all.count[mine] = tokens;
            all.state[mine] = (slot * heads + head_) * size;
            all.new_state[mine] =
                ((call_.state == nullptr ? std::int64_t{slot} : std::int64_t{entry}) * heads + head_) * size;
        }
    }

    /// Asks for the weights of the warp's first tile: 16 rows of 256 numbers.
    __device__ void ask_for_weights() const {
        const float* const row =
            rows_.weights(call_.scorer.weights, head_, warp_ * mlstm_rows::tile + lane_id() / 2, inputs_);
        for (std::int32_t column = lane_id() % 2 * 32; column < inputs_; column += 64) {
            ask_for_line(row + column);
        }
    }
    /// Asks for the first `count` states, a line a thread.
    __device__ void ask(std::int32_t count) const {
        constexpr std::int64_t line = 32;  // numbers
        for (std::int32_t e = 0; e < count; ++e) {
            if (thread() * line < call_.cache.state_size && memory_.tokens->count[e] != 0) {
                ask_for_line(call_.cache.state + memory_.tokens->state[e] + thread() * line);
            }
        }
    }

    [[nodiscard]] __device__ bool has(std::int32_t e, std::int32_t count) const {
        return e < count && memory_.tokens->count[e] != 0;
    }
    __device__ void load(piece& to, std::int32_t e, std::int32_t count) const {
        if (!has(e, count)) {
            return;
        }
        const float* const state = call_.cache.state + memory_.tokens->state[e];
        if (fold_ < folds_) {
            const std::int32_t row = fold_ * fold_rows;
            to.c.load(state + row * call_.width + column_, call_.width, call_.features - row);
        }
        if (thread() < call_.features) {
            to.z = state[state_numbers() + thread()];
        }
    }

    /// Projections of the round, a tile of the weights a warp.
    __device__ void project(std::int32_t count) const {
        const std::int32_t stride = token_stride(inputs_), tiles = rows_.tiles();
        const auto& weights = call_.scorer.weights;
#pragma unroll 1
        for (std::int32_t tile = warp_; tile < tiles; tile += many_warps) {
            const float* const x =
                memory_.x + (tile * mlstm_rows::tile >= rows_.queries() ? Entries * stride : 0);
            const std::int32_t row = tile * mlstm_rows::tile + lane_id() / 4;
            const float* const first = rows_.weights(weights, head_, row, inputs_);
            const float* const second = rows_.weights(weights, head_, row + 8, inputs_);
            float all[2][4], before[2][4];  // see join_quarters()
#pragma unroll 1
            for (int quarter = 0; quarter < 4; ++quarter) {
                weight_quarter weight;
                weight.load(first, second, quarter, inputs_);
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    float sum[4];
                    weight.template multiply<sizeof(T) == 2>(x + 8 * half * stride, quarter, inputs_, sum);
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float pair = before[half][i] + sum[i];
                        all[half][i] = quarter == 1   ? pair
                                       : quarter == 3 ? all[half][i] + pair
                                                      : all[half][i];
                        before[half][i] = sum[i];
                    }
                }
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    const std::int32_t token = 8 * half + lane_id() % 4 * 2 + i % 2;
                    if (token < count) {
                        memory_.y[token * rows_.count() + row + i / 2 * 8] = all[half][i];
                    }
                }
            }
        }
    }

    /// A pair of lanes an entry.
    __device__ void take_gates(std::int32_t count) const {
        const std::int32_t mine = lane_id() / 2;
        const bool there = has(mine, count), input = lane_id() % 2 == 0;
        const auto& weights = call_.scorer.weights;
        const float* const bias = input ? weights.b_i : weights.b_f;
        mlstm_gates gates;
        float gate = 0.0f;
        if (there) {
            const float* const stabiliser =
                call_.cache.state + memory_.tokens->state[mine] + state_numbers() + call_.features;
            gates.first = stabiliser[0];
            gates.second = stabiliser[1];
            gate = memory_.y[mine * rows_.count() + rows_.gates() + (input ? 0 : 1)];
        }
        gate += bias != nullptr ? bias[head_] : 0.0f;
        const float factor = gates.take(gate, call_.scorer.gate_softcap, there);
        if (there) {
            memory_.gate[lane_id()] = factor;
            new_states()[memory_.tokens->new_state[mine] + state_numbers() + call_.features + lane_id() % 2] =
                input ? gates.first : gates.second;
        }
    }

    /// The thread's part of a state takes in its token.
    __device__ void take(piece& of, std::int32_t e, std::int32_t count) const {
        if (has(e + many_ahead, count)) {
            ask_mine(e + many_ahead);
        }
        if (!has(e, count)) {
            return;
        }
        const float write = memory_.gate[2 * e], forget = memory_.gate[2 * e + 1];
        float* const state = new_states() + memory_.tokens->new_state[e];
        const std::int32_t padded = folds_ * fold_rows;
        if (fold_ < folds_) {
            const std::int32_t row = fold_ * fold_rows;
            const std::int32_t first = e * padded + row;
            const float* const value =
                (Values::projected ? memory_.y + e * rows_.count() + rows_.values()
                                   : memory_.x + e * token_stride(inputs_) + call_.cache.dim_k) +
                column_;
            const float2 sum = of.c.take(write, forget, memory_.k + first, memory_.q + first,
                                         make_float2(value[0], value[1]));
            of.c.store(state + row * call_.width + column_, call_.width, call_.features - row);
            *reinterpret_cast<float2*>(memory_.h + (e * folds_ + fold_) * call_.width + column_) = sum;
        }
        if (32 * warp_ < padded) {
            float sum = 0.0f;
            if (thread() < call_.features) {
                const float z = fmaf(forget, of.z, __fmul_rn(write, memory_.k[e * padded + thread()]));
                state[state_numbers() + thread()] = z;
                sum = __fmul_rn(memory_.q[e * padded + thread()], z);
            }
            sum = fold_total(sum);
            if (thread() % fold_rows == 0 && thread() < padded) {
                memory_.divisor[e * folds_ + thread() / fold_rows] = sum;
            }
        }
    }
    /// Asks for this warp's part of a state.
    __device__ void ask_mine(std::int32_t e) const {
        const std::int64_t lines = (call_.cache.state_size + 31) / 32,
                           each = (lines + many_warps - 1) / many_warps, line = warp_ * each + lane_id();
        if (lane_id() < each && line < lines) {
            ask_for_line(call_.cache.state + memory_.tokens->state[e] + line * 32);
        }
    }

    /// The score of the warp's entry.
    __device__ void read(std::int32_t first) const {
        const std::int32_t e = warp_;
        const auto& weights = call_.scorer.weights;
        float score = 0.0f;
        if (memory_.tokens->leaves[e] != 0) {
            score = read_out(memory_.h + e * folds_ * call_.width, memory_.divisor + e * folds_, folds_,
                             call_.width, memory_.readout, memory_.gain, weights, head_,
                             static_cast<float>(Scorer::clamp), static_cast<float>(Scorer::norm_epsilon));
            score += rows_.has_skip ? memory_.y[e * rows_.count() + rows_.skip()] : 0.0f;
        }
        if (lane_id() == 0) {
            call_.scores[std::int64_t{first + e} * call_.cache.kv_heads + head_] = score;
        }
    }

    const Launch& call_;
    const int warp_ = whole_warp_id();
    mlstm_rows rows_;
    std::int32_t inputs_, folds_;
    Memory memory_;
    std::int32_t head_, fold_, column_;
    piece first_, second_;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
