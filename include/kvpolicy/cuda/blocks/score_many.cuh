// An mLSTM scorer's tokens of a step of many sequences: a block has some of one head, which share a look at the weights, and streams their
// states through a ring in its shared memory. What costs is that every state is read and written once; all else has to be done meanwhile.
// So a warp of its own brings states by bulk copies, as many as the ring holds, before anything is known of what happens to them.
//
// A working warp has a few rows of every state, and waits for no other between one state and the next. Other warps read the scores out,
// in turn, since one alone would not keep up; the first of them has the gates.
#pragma once

#include <kvpolicy/cuda/blocks/async.cuh>
#include <kvpolicy/cuda/blocks/cache_view.cuh>
#include <kvpolicy/cuda/blocks/mlstm_step.cuh>
#include <kvpolicy/cuda/blocks/score_block.cuh>
#include <kvpolicy/cuda/config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int many_warps = 16;  // that work
inline constexpr int many_workers = 32 * many_warps;
inline constexpr int many_readers = 3;
inline constexpr int many_threads = many_workers + 32 + 32 * many_readers;
inline constexpr int many_entries = 16;  // of a block
inline constexpr int many_slots = 8;     // of the ring, at most
inline constexpr int many_least_slots = 2;
inline constexpr int many_flight = 4;  // states under way to it at once
// States that the L2 cache is asked for before the kernel before has ended.
inline constexpr int many_early = 3;
inline constexpr int many_reads = 4;  // entries that wait to be read out
static_assert(many_entries <= many_warps && 4 * many_entries <= many_workers && 2 * many_entries <= 32);

/// Whether a scorer's sizes fit: a thread has two columns of a fold.
constexpr bool many_fit(std::int32_t inputs, std::int32_t features, std::int32_t width) {
    return inputs <= most_mlstm_inputs && inputs % 4 == 0 && width <= most_mlstm_width && width % 2 == 0 &&
           features <= most_mlstm_features && features % 2 == 0 &&
           folds_of(features) * (width / 2) <= many_workers;
}

/// Shared memory of a block.
template <class T>
struct many_memory {
    struct alignas(16) Tokens {
        const T* from[many_entries][2][2];  // see cluster_memory
        std::int64_t state[many_entries], new_state[many_entries];
        std::int32_t count[many_entries], leaves[many_entries];
        // Barriers: a state has come, has been looked at; an entry may be read out, has been.
        std::uint64_t full[many_slots], empty[many_slots], summed[many_reads], read[many_reads];
        std::uint64_t projected;  // tokens are no longer needed, where they share the ring's memory
    };
    Tokens* tokens;
    unsigned char* ring;    // [slots, slot_bytes]
    float* x;               // [2, many_entries, token_stride]
    float* y;               // [many_entries, rows]
    float *k, *q;           // [many_entries, padded]
    float* gate;            // [many_entries, 2]
    float* h;               // [many_reads, folds, width]
    float* divisor;         // [many_reads, folds]
    float *readout, *gain;  // [width]

    /// A state begins where the ring's slot does, or 8 bytes later: as its place in memory lies to 16 bytes.
    __host__ __device__ static constexpr std::int64_t slot_bytes(std::int64_t state_size) {
        return (state_size * 4 + 8 + 127) / 128 * 128;
    }
    __host__ __device__ static constexpr std::int64_t tokens_bytes(std::int32_t inputs) {
        return std::int64_t{8} * many_entries * token_stride(inputs);
    }
    /// `shared`: tokens lie in the ring's last slot, which gets no state before they have been projected.
    __host__ __device__ static constexpr std::int64_t bytes(std::int32_t inputs, std::int32_t rows,
                                                            std::int32_t features, std::int32_t width,
                                                            std::int64_t state_size, std::int32_t slots,
                                                            bool shared) {
        const std::int64_t folds = folds_of(features), slot = slot_bytes(state_size),
                           of_tokens = tokens_bytes(inputs),
                           last = shared && of_tokens > slot ? of_tokens : slot;
        return static_cast<std::int64_t>((sizeof(Tokens) + 127) / 128 * 128) + (slots - 1) * slot + last +
               (shared ? 0 : of_tokens) +
               4 * (many_entries * (rows + 2 * folds * fold_rows + 2) + many_reads * folds * (width + 1) +
                    2 * width);
    }
    __device__ many_memory(unsigned char* at, std::int32_t inputs, std::int32_t rows, std::int32_t features,
                           std::int32_t width, std::int64_t state_size, std::int32_t slots, bool shared)
        : tokens(reinterpret_cast<Tokens*>(at)), ring(at + (sizeof(Tokens) + 127) / 128 * 128) {
        const std::int32_t folds = folds_of(features);
        const std::int64_t slot = slot_bytes(state_size), of_tokens = tokens_bytes(inputs),
                           last = shared && of_tokens > slot ? of_tokens : slot;
        unsigned char* const end = ring + (slots - 1) * slot + last;
        x = reinterpret_cast<float*>(shared ? ring + (slots - 1) * slot : end);
        y = reinterpret_cast<float*>(shared ? end : end + of_tokens);
        k = y + many_entries * rows;
        q = k + many_entries * folds * fold_rows;
        h = q + many_entries * folds * fold_rows;
        gate = h + many_reads * folds * width;
        divisor = gate + many_entries * 2;
        readout = divisor + many_reads * folds;
        gain = readout + width;
    }
};

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
          memory_(shared, inputs_, rows_.count(), call.features, call.width, call.cache.state_size,
                  call.slots, Values::projected) {
        head_ = static_cast<std::int32_t>(blockIdx.x) % call.cache.kv_heads;
        fold_ = thread() / (call.width / 2);
        column_ = thread() % (call.width / 2) * 2;
    }

    /// Asks the L2 cache for the weights of the warp's first tile, 16 rows of 256 numbers, and the first states. They need not be what
    /// they will be after the kernels before.
    __device__ void ask_early() const {
        if (warp_ < many_warps) {
            const float* const row =
                rows_.weights(call_.scorer.weights, head_, warp_ * mlstm_rows::tile + lane_id() / 2, inputs_);
            for (std::int32_t column = lane_id() % 2 * 32; column < inputs_; column += 64) {
                ask_for_line(row + column);
            }
        } else if (warp_ == many_warps && call_.batch.slots == nullptr) {
            const std::int32_t entry =
                static_cast<std::int32_t>(blockIdx.x) / call_.cache.kv_heads * call_.together + lane_id();
            if (lane_id() < many_early && lane_id() < call_.together && entry < call_.batch.count) {
                const whole_part part =
                    whole_part_of(call_.cache.state + (std::int64_t{entry} * call_.cache.kv_heads + head_) *
                                                          call_.cache.state_size);
                prefetch_to_l2(part.from, part.bytes);
            }
        } else if (warp_ == many_warps + 1) {
            ask_for_entries(call_.cache, call_.batch, head_,
                            static_cast<std::int32_t>(blockIdx.x) / call_.cache.kv_heads * call_.together,
                            call_.together);
        }
    }

    /// Entries first to first + call.together of the block.
    __device__ void run() {
        const std::int32_t first =
                               static_cast<std::int32_t>(blockIdx.x) / call_.cache.kv_heads * call_.together,
                           left = call_.batch.count - first,
                           count = left < call_.together ? left : call_.together;
        begin();
        if (thread() < 4 * Entries) {
            find(first, count);
        }
        __syncthreads();
        if (warp_ < many_warps) {
            work(count);
        } else if (warp_ == many_warps) {
            bring(count);
        } else {
            read(first, count);
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
    [[nodiscard]] __device__ bool has(std::int32_t e, std::int32_t count) const {
        return e < count && memory_.tokens->count[e] != 0;
    }

    /// Once: what is the same for all tokens.
    __device__ void begin() const {
        auto& all = *memory_.tokens;
        if (thread() == 0) {
            for (int i = 0; i < call_.slots; ++i) {
                barrier_init(shared_address(&all.full[i]),
                             2);  // a bulk copy, and what does not lie to 16 bytes
                barrier_init(shared_address(&all.empty[i]), many_warps * arrivals_of_warp);
            }
            for (int i = 0; i < many_reads; ++i) {
                barrier_init(shared_address(&all.summed[i]), many_warps * arrivals_of_warp);
                barrier_init(shared_address(&all.read[i]), arrivals_of_warp);
            }
            barrier_init(shared_address(&all.projected), many_warps * arrivals_of_warp);
            barrier_init_fence();
        }
        const auto& weights = call_.scorer.weights;
        if (thread() < call_.width) {
            const std::int64_t at = std::int64_t{head_} * call_.width + thread();
            memory_.readout[thread()] = weights.readout[at];
            memory_.gain[thread()] = weights.norm_gain != nullptr ? weights.norm_gain[at] : 1.0f;
        }
        const std::int32_t padded = folds_ * fold_rows, row = padded - fold_rows + thread() % fold_rows;
        if (thread() < Entries * fold_rows && row >= call_.features) {
            memory_.k[thread() / fold_rows * padded + row] = memory_.q[thread() / fold_rows * padded + row] =
                0.0f;
        }
    }

    /// Where the tokens and states are, by four lanes an entry.
    __device__ void find(std::int32_t first, std::int32_t count) const {
        const std::int32_t mine = thread() / 4, entry = first + mine;
        std::int32_t tokens = 0, slot = 0;
        const T* from = nullptr;
        const bool leaving = thread() % 4 >= 2, of_value = thread() % 2 != 0;
        if (mine < count) {
            const token_entry<View> known(call_.cache, call_.batch, entry, 1, head_);
            tokens = known.active.tokens;
            if (tokens != 0) {
                slot = known.active.slot;
                from = token_source(known.rows, call_.tokens, entry, head_, known.base, 0, leaving, of_value);
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

    /// The warps that work, and the one that has the gates, by instructions of their own.
    __device__ static void meet() { named_barrier_of_any(1, many_workers + 32); }

    // The warp that brings states.

    /// Bytes that a state's place in memory is behind one of 16 bytes: 0 or 8.
    [[nodiscard]] __device__ std::uint32_t offset_of(const float* state) const {
        return static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(state) % 16);
    }
    [[nodiscard]] __device__ std::uint32_t slot_address(std::int32_t slot) const {
        return shared_address(memory_.ring) +
               static_cast<std::uint32_t>(slot * Memory::slot_bytes(call_.cache.state_size));
    }
    /// The part of a state that lies in whole pieces of 16 bytes: all but, perhaps, the first two numbers, or the stabiliser.
    struct whole_part {
        const unsigned char* from;
        std::uint32_t skipped, bytes;
    };
    [[nodiscard]] __device__ whole_part whole_part_of(const float* state) const {
        const std::uint32_t skipped = offset_of(state) == 0 ? 0 : 8,
                            all = static_cast<std::uint32_t>(call_.cache.state_size) * 4;
        return {reinterpret_cast<const unsigned char*>(state) + skipped, skipped, (all - skipped) / 16 * 16};
    }
    /// Sets out to bring the state of entry e, the block's n-th; one lane.
    __device__ void issue(std::int32_t e, std::int32_t n) const {
        const float* const state = call_.cache.state + memory_.tokens->state[e];
        const whole_part part = whole_part_of(state);
        const std::int32_t slot = n % call_.slots;
        const std::uint32_t to = slot_address(slot) + offset_of(state),
                            barrier = shared_address(&memory_.tokens->full[slot]);
        barrier_expect(barrier, part.bytes);
        fence_async_proxy();  // the eight bytes that one before may have had copied to where this one has others
        copy_bulk(to + part.skipped, part.from, part.bytes, barrier);
        if (part.skipped != 0) {
            copy_8(to, state);
        }
        barrier_arrive_after_copies(barrier);
    }
    __device__ void bring(std::int32_t count) {
        auto& all = *memory_.tokens;
        const std::int32_t flight = call_.slots < many_flight ? call_.slots : many_flight;
        std::int32_t n = 0;  // states so far
        for (std::int32_t e = 0; e < count; ++e) {
            if (!has(e, count)) {
                continue;
            }
            const std::int32_t slot = n % call_.slots, before = n - flight;
            if (Values::projected && n == call_.slots - 1) {
                barrier_wait(shared_address(&all.projected), 0);
            }
            // A few are under way at once: more would only keep others waiting for their tokens and weights. (No more than there are
            // slots: a barrier's phase may be the last or the one before.)
            if (before >= 0) {
                barrier_wait(shared_address(&all.full[before % call_.slots]),
                             static_cast<std::uint32_t>(before / call_.slots) % 2);
            }
            barrier_wait(shared_address(&all.empty[slot]),
                         static_cast<std::uint32_t>(n / call_.slots + 1) % 2);
            if (lane_id() == 0) {
                issue(e, n);
            }
            ++n;
        }
    }

    // The warps that work.

    __device__ void work(std::int32_t count) {
        weight_quarter weight;  // on its way while tokens are
        if (warp_ < rows_.tiles()) {
            const tile_rows rows = rows_of(warp_);
            weight.load(rows.first, rows.second, 0, inputs_);
        }
        if (warp_ < count) {
            token_rows<T> token;
            token.load(memory_.tokens->from[warp_], call_.cache.dim_k, inputs_);
            float* const to = memory_.x + warp_ * token_stride(inputs_);
            const std::int32_t column = inputs_ + lane_id() % 16, stride = token_stride(inputs_);
            if (column < stride) {
                to[lane_id() / 16 * Entries * stride + column] = 0.0f;
            }
            token.store(to, to + Entries * stride, inputs_);
        }
        meet();
        project(count, weight);
        if constexpr (Values::projected) {
            fence_async_proxy();  // a state comes where tokens were
            warp_arrive(shared_address(&memory_.tokens->projected), lane_id());
        }
        meet();
        make_features<Feature>(memory_.y, rows_, count, call_.features, folds_ * fold_rows, memory_.k,
                               memory_.q, warp_);
        meet();
        for (std::int32_t e = 0; e < count; ++e) {
            if (has(e, count)) {
                take(e);
            }
        }
    }

    /// The lane's two rows of a tile of the weights.
    struct tile_rows {
        const float *first, *second;
    };
    [[nodiscard]] __device__ tile_rows rows_of(std::int32_t tile) const {
        const std::int32_t row = tile * mlstm_rows::tile + lane_id() / 4;
        const auto& weights = call_.scorer.weights;
        return {rows_.weights(weights, head_, row, inputs_), rows_.weights(weights, head_, row + 8, inputs_)};
    }
    /// Projections, a tile of the weights a warp. `weight`: the first quarter of the warp's first tile.
    __device__ void project(std::int32_t count, weight_quarter& weight) const {
        const std::int32_t stride = token_stride(inputs_), tiles = rows_.tiles();
#pragma unroll 1
        for (std::int32_t tile = warp_; tile < tiles; tile += many_warps) {
            const float* const x =
                memory_.x + (tile * mlstm_rows::tile >= rows_.queries() ? Entries * stride : 0);
            const std::int32_t row = tile * mlstm_rows::tile + lane_id() / 4;
            const auto [first, second] = rows_of(tile);
            float all[2][4], before[2][4];  // see join_quarters()
            if (tile != warp_) {
                weight.load(first, second, 0, inputs_);
            }
#pragma unroll 1
            for (int quarter = 0; quarter < 4; ++quarter) {
                float sum[2][4] = {};
#pragma unroll
                for (int b = 0; b < weight_quarter::blocks; ++b) {
                    if (16 * (weight_quarter::blocks * quarter + b) < inputs_) {
                        weight.template multiply_block<T>(b, x, quarter, inputs_, sum[0]);
                        if (count > 8) {
                            weight.template multiply_block<T>(b, x + 8 * stride, quarter, inputs_, sum[1]);
                        }
                    }
                    if (quarter != 3) {  // on its way while the others are multiplied
                        weight.load_block(b, first, second, quarter + 1, inputs_);
                    }
                }
#pragma unroll
                for (int half = 0; half < 2; ++half) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        const float pair = before[half][i] + sum[half][i];
                        all[half][i] = quarter == 1   ? pair
                                       : quarter == 3 ? all[half][i] + pair
                                                      : all[half][i];
                        before[half][i] = sum[half][i];
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

    /// The thread's part of the next state, that of entry e, takes in its token.
    __device__ void take(std::int32_t e) {
        auto& all = *memory_.tokens;
        const std::int32_t slot = taken_ % call_.slots, at = taken_ % many_reads;
        barrier_wait(shared_address(&all.full[slot]), static_cast<std::uint32_t>(taken_ / call_.slots) % 2);
        const auto* const from =
            reinterpret_cast<const float*>(memory_.ring + slot * Memory::slot_bytes(call_.cache.state_size) +
                                           offset_of(call_.cache.state + all.state[e]));
        const std::int32_t row = fold_ * fold_rows, left = call_.features - row;
        piece of;
        if (fold_ < folds_) {
            of.c.load(from + row * call_.width + column_, call_.width, left);
        }
        if (thread() < call_.features) {
            of.z = from[state_numbers() + thread()];
        }
        warp_arrive(shared_address(&all.empty[slot]), lane_id());
        barrier_wait(shared_address(&all.read[at]), static_cast<std::uint32_t>(taken_ / many_reads + 1) % 2);
        ++taken_;
        const float write = memory_.gate[2 * e], forget = memory_.gate[2 * e + 1];
        float* const state = new_states() + all.new_state[e];
        const std::int32_t padded = folds_ * fold_rows;
        if (fold_ < folds_) {
            const std::int32_t first = e * padded + row;
            const float* const value =
                (Values::projected ? memory_.y + e * rows_.count() + rows_.values()
                                   : memory_.x + e * token_stride(inputs_) + call_.cache.dim_k) +
                column_;
            const float2 sum = of.c.take(write, forget, memory_.k + first, memory_.q + first,
                                         make_float2(value[0], value[1]));
            of.c.store(state + row * call_.width + column_, call_.width, left);
            *reinterpret_cast<float2*>(memory_.h + (at * folds_ + fold_) * call_.width + column_) = sum;
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
                memory_.divisor[at * folds_ + thread() / fold_rows] = sum;
            }
        }
        warp_arrive(shared_address(&all.summed[at]), lane_id());
    }

    // The warps that read scores out. The first has the gates, a pair of lanes an entry.

    __device__ void read(std::int32_t first, std::int32_t count) {
        const int reader = warp_ - many_warps - 1;
        if (reader == 0) {
            find_gates(count);
        }
        for (std::int32_t e = 0; e < count; ++e) {
            if (has(e, count)) {
                if (taken_ % many_readers == reader) {
                    read_one(first, e);
                }
                ++taken_;
            }
        }
    }
    __device__ void find_gates(std::int32_t count) const {
        const std::int32_t mine = lane_id() / 2;
        mlstm_gates gates;
        if (has(mine, count)) {
            const float* const stabiliser =
                call_.cache.state + memory_.tokens->state[mine] + state_numbers() + call_.features;
            gates.first = stabiliser[0];
            gates.second = stabiliser[1];
        }
        meet();
        meet();
        take_gates(gates, mine, has(mine, count));
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
    __device__ void read_one(std::int32_t first, std::int32_t e) const {
        auto& all = *memory_.tokens;
        const std::int32_t at = taken_ % many_reads;
        barrier_wait(shared_address(&all.summed[at]), static_cast<std::uint32_t>(taken_ / many_reads) % 2);
        const auto& weights = call_.scorer.weights;
        float score = 0.0f;
        if (all.leaves[e] != 0) {
            score = read_out(memory_.h + at * folds_ * call_.width, memory_.divisor + at * folds_, folds_,
                             call_.width, memory_.readout, memory_.gain, weights, head_,
                             static_cast<float>(Scorer::clamp), static_cast<float>(Scorer::norm_epsilon));
            score += rows_.has_skip ? memory_.y[e * rows_.count() + rows_.skip()] : 0.0f;
        }
        warp_arrive(shared_address(&all.read[at]), lane_id());
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
    std::int32_t taken_ = 0;  // states so far, as the warp's role counts them
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
