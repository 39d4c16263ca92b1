// An mLSTM scorer's tokens by a cluster of blocks, for compute capability 9.0: what score_block.cuh does by one.
//
// A token is a chain of small products that wait for each other, so what counts is how soon each begins and how many warps
// share it. The blocks of a cluster share the rows of the weights, which they ask for before they know any token, and the rows of
// the state, which stays in registers while tokens of a chunk follow each other. They meet twice a token: when all
// projections are in every block's memory, and when the first block has everybody's share of q~^T C. A cluster takes several sequences
// at once, always of one head, so that its weights are read once.
//
// Sums are taken in one order, whatever the batch and however many sequences share a cluster.
#pragma once

#include <kvpolicy/cuda/blocks/async.cuh>
#include <kvpolicy/cuda/blocks/cache_view.cuh>
#include <kvpolicy/cuda/blocks/cluster.cuh>
#include <kvpolicy/cuda/blocks/score_block.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cmath>
#include <cstdint>
#include <cstring>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int cluster_blocks = 8;
inline constexpr int cluster_warps = 8;  // of a block
inline constexpr int cluster_threads = 32 * cluster_warps;
inline constexpr int cluster_rows_each = 32;  // of the weights, a block and turn: four a warp

/// Shared memory of a block of a cluster.
template <int Entries>
struct cluster_memory {
    float* x;               // [2, Entries, inputs]: the newcomer's, the leaving key's
    float* sent;            // [Entries, cluster_rows_each]: the projections of this block
    float* y;               // [Entries, rows]: every projection, from all blocks
    float *k, *q;           // [Entries, features]
    float* gate;            // [Entries, 2]: forget, write
    float* partial;         // [cluster_warps, Entries, width]
    float* h;               // [cluster_blocks, Entries, width], from all blocks
    float* divisor;         // [cluster_blocks, Entries], from all blocks
    float *readout, *gain;  // [width]

    __host__ __device__ static constexpr std::int64_t floats(std::int32_t inputs, std::int32_t rows,
                                                             std::int32_t features, std::int32_t width) {
        return Entries * (2 * std::int64_t{inputs} + cluster_rows_each + rows + 2 * features + 2 +
                          (cluster_warps + cluster_blocks) * std::int64_t{width} + cluster_blocks) +
               2 * std::int64_t{width};
    }
    __device__ cluster_memory(float* at, std::int32_t inputs, std::int32_t rows, std::int32_t features,
                              std::int32_t width)
        : x(at),
          sent(x + 2 * Entries * inputs),
          y(sent + Entries * cluster_rows_each),
          k(y + Entries * rows),
          q(k + Entries * features),
          gate(q + Entries * features),
          partial(gate + 2 * Entries),
          h(partial + cluster_warps * Entries * width),
          divisor(h + cluster_blocks * Entries * width),
          readout(divisor + cluster_blocks * Entries),
          gain(readout + width) {}
};

/// Sizes: sequences at once, and pieces of 64 numbers of a state that a warp holds of each.
template <int Entries_, int Pieces_>
struct cluster_sizes {
    static constexpr int Entries = Entries_, Pieces = Pieces_;
    static constexpr int most_inputs = 256, most_width = 128, most_features = 32 * cluster_blocks;
    static constexpr int threads_each = cluster_threads / Entries;  // that read one sequence's token
    static constexpr int fours = most_inputs / 4 > threads_each ? most_inputs / 4 / threads_each : 1;

    /// Whether a scorer's sizes fit.
    __host__ __device__ static constexpr bool fit(std::int32_t inputs, std::int32_t features,
                                                  std::int32_t width) {
        return inputs <= most_inputs && inputs % 4 == 0 && width <= most_width && features <= most_features &&
               pieces(features, width) <= Pieces;
    }
    __host__ __device__ static constexpr std::int32_t rows(std::int32_t features) {
        return (features + cluster_blocks - 1) / cluster_blocks;
    }
    __host__ __device__ static constexpr std::int32_t pieces(std::int32_t features, std::int32_t width) {
        return (rows(features) + cluster_warps - 1) / cluster_warps * ((width + 63) / 64);
    }
    /// Shared memory of sizes that fit, at most; projections are no wider than features.
    __host__ __device__ static constexpr std::int64_t most_floats() {
        return cluster_memory<Entries>::floats(most_inputs, 2 * most_features + most_width + 3, most_features,
                                               most_width);
    }
};

/// Sequences that a cluster takes together.
template <int Entries>
struct cluster_group {
    position_t base[Entries];
    std::int32_t slot[Entries], tokens[Entries];  // 0 tokens where there is nothing to do

    [[nodiscard]] __device__ std::int32_t most() const {
        std::int32_t most = 0;
#pragma unroll
        for (int g = 0; g < Entries; ++g) {
            most = tokens[g] > most ? tokens[g] : most;
        }
        return most;
    }
};

/// Rows of all weights of a head, one after the other: w_k, w_q, w_v, w_i, w_f, skip.
struct cluster_rows {
    std::int32_t projection, width;  // width 0: values are not projected
    bool skip;

    [[nodiscard]] __host__ __device__ std::int32_t input_gate() const { return 2 * projection + width; }
    [[nodiscard]] __host__ __device__ std::int32_t of_skip() const { return input_gate() + 2; }
    [[nodiscard]] __host__ __device__ std::int32_t count() const { return of_skip() + (skip ? 1 : 0); }
    [[nodiscard]] __device__ bool of_leaving(std::int32_t row) const {
        return (row >= projection && row < 2 * projection) || row == of_skip();
    }
    template <class Weights>
    __device__ const float* weights(const Weights& of, std::int64_t head, std::int32_t row,
                                    std::int32_t inputs) const {
        if (row < projection) {
            return of.w_k + (head * projection + row) * inputs;
        }
        if (row < 2 * projection) {
            return of.w_q + (head * projection + row - projection) * inputs;
        }
        if (row < input_gate()) {
            return of.w_v + (head * width + row - 2 * projection) * inputs;
        }
        return (row == input_gate() ? of.w_i : row == input_gate() + 1 ? of.w_f : of.skip) + head * inputs;
    }
};

/// softmax(sign y), `parts` warps of it at most: part 0 and, for Hedgehog, part 1.
__device__ inline int feature_parts(Softmax) { return 1; }
__device__ inline int feature_parts(Hedgehog) { return 2; }
__device__ inline void part_of_features(Softmax, int, const float* y, std::int32_t d_qk, float* out) {
    warp_softmax(y, d_qk, 1.0f, out);
}
__device__ inline void part_of_features(Hedgehog, int part, const float* y, std::int32_t d_qk, float* out) {
    warp_softmax(y, d_qk / 2, part == 0 ? 1.0f : -1.0f, out + (part == 0 ? 0 : d_qk / 2));
}

/// Four elements of a row, whose first is a multiple of 4. Those of 16 bits stay as they are until they are needed, so that nobody waits
/// for them where they are asked for.
template <class T>
struct four_elements {
    float4 x{};

    __device__ void load(const T* from) {
        x = make_float4(static_cast<float>(from[0]), static_cast<float>(from[1]), static_cast<float>(from[2]),
                        static_cast<float>(from[3]));
    }
    [[nodiscard]] __device__ float4 numbers() const { return x; }
};
template <class T>
requires(sizeof(T) == 2) struct four_elements<T> {
    uint2 bits{};

    __device__ void load(const T* from) { bits = *reinterpret_cast<const uint2*>(from); }
    [[nodiscard]] __device__ float4 numbers() const {
        T x[4];
        static_assert(sizeof(x) == sizeof(bits));
        std::memcpy(x, &bits, sizeof(bits));
        return make_float4(static_cast<float>(x[0]), static_cast<float>(x[1]), static_cast<float>(x[2]),
                           static_cast<float>(x[3]));
    }
};

template <class Sizes, class View, std::int32_t D, class Feature, class Values>
class score_cluster {
    using Scorer = mLSTMScorer<D, Feature, Values>;
    using Launch = score_launch<View, Scorer>;
    using T = typename View::value_type;
    static constexpr int Entries = Sizes::Entries, Pieces = Sizes::Pieces;
    // Rows of weights a warp, whose sums are folded together.
    static constexpr int row_batch = cluster_rows_each / cluster_warps;
    static_assert(row_batch == 4 && cluster_blocks == cluster_warps, "a warp sends to a block");
    static constexpr int most_chunks = Sizes::most_width / 64;
    static_assert(most_chunks == 2);
    static constexpr std::int32_t row_turn = row_batch * cluster_warps * cluster_blocks;

  public:
    using Group = cluster_group<Entries>;

    /// `groups`: two of them, in shared memory.
    __device__ score_cluster(const Launch& call, float* shared, Group* groups)
        : call_(call),
          groups_(groups),
          rows_{call.projection, Values::projected ? call.width : 0, call.scorer.weights.skip != nullptr},
          inputs_(call.cache.dim_k + call.cache.dim_v),
          memory_(shared, inputs_, rows_.count(), call.features, call.width) {
        const auto number = static_cast<std::int32_t>(blockIdx.x);
        block_ = number % cluster_blocks;
        head_ = number / cluster_blocks % call.cache.kv_heads;
        first_ = number / cluster_blocks / call.cache.kv_heads;
        turns_ = static_cast<std::int32_t>(gridDim.x) / cluster_blocks / call.cache.kv_heads;
        aligned_ = ((reinterpret_cast<std::uintptr_t>(call.scorer.weights.w_k) |
                     reinterpret_cast<std::uintptr_t>(call.scorer.weights.w_q) |
                     reinterpret_cast<std::uintptr_t>(call.scorer.weights.w_v) |
                     reinterpret_cast<std::uintptr_t>(call.scorer.weights.w_i) |
                     reinterpret_cast<std::uintptr_t>(call.scorer.weights.w_f) |
                     reinterpret_cast<std::uintptr_t>(call.scorer.weights.skip)) %
                    sizeof(float4)) == 0;
        pairs_aligned_ = call.width % 2 == 0 && call.cache.state_size % 2 == 0 &&
                         (reinterpret_cast<std::uintptr_t>(call.cache.state) |
                          reinterpret_cast<std::uintptr_t>(call.state)) %
                                 sizeof(float2) ==
                             0;
    }

    __device__ void run() {
        cluster_arrive();
        float4 weight[row_batch][2];
        const std::int32_t first_row = (block_ * cluster_warps + warp_id()) * row_batch;
        load_weights(weight, first_row);
        const HeadRule& rule = call_.cache.rules[head_];
        window_ = rule.window;
        sinks_ = rule.sinks;
        const Group* now = groups_;
        ask(first_);
        answer(groups_);
        load_readout();
        __syncthreads();
        load_state(*now);
        fetch(*now, first_, 0);
        cluster_wait();  // all blocks are there: from here on they write to each other
        const std::int32_t groups = (call_.batch.count + Entries - 1) / Entries;
        for (std::int32_t index = first_; index < groups; index += turns_) {
            Group* const next = groups_ + (now == groups_ ? 1 : 0);
            const std::int32_t tokens = now->most();
            if (tokens == 0) {  // so it is in all blocks of the cluster
                ask(index + turns_);
                answer(next);
                __syncthreads();
                load_state(*next);
                fetch(*next, index + turns_, 0);
            }
            for (std::int32_t j = 0; j < tokens; ++j) {
                const bool last = j + 1 == tokens;
                if (last) {
                    ask(index + turns_);
                }
                store_token();
                __syncthreads();
                project(weight, first_row);
                if (last) {
                    answer(next);
                }
                cluster_barrier();
                if (last) {
                    fetch(*next, index + turns_, 0);
                } else {
                    fetch(*now, index, j + 1);
                }
                make_features(*now, j);
                __syncthreads();
                update(*now, j);
                if (last) {
                    store_state(*now, index);
                    load_state(*next);
                }
                if (!last || index + turns_ < groups) {
                    load_weights(weight, first_row);  // from the L1 cache: registers were short in between
                }
                __syncthreads();
                gather();
                cluster_barrier();
                read(*now, index, j);
            }
            __syncthreads();  // its memory is the next but one's
            now = next;
        }
    }

  private:
    /// Sets out to read what a group is, a thread a sequence; answer() puts it down.
    __device__ void ask(std::int32_t index) {
        const std::int32_t entry = index * Entries + static_cast<std::int32_t>(threadIdx.x);
        slot_ = tokens_ = 0;
        base_ = 0;
        if (threadIdx.x < Entries && entry < call_.batch.count) {
            const active_entry active =
                active_entry(call_.cache, call_.batch, entry, call_.tokens.most).once(call_.cache);
            tokens_ = active.tokens;
            slot_ = tokens_ != 0 ? active.slot : 0;
            base_ = call_.cache.length[slot_];
        }
    }
    __device__ void answer(Group* to) const {
        if (threadIdx.x < Entries) {
            to->slot[threadIdx.x] = slot_;
            to->tokens[threadIdx.x] = tokens_;
            to->base[threadIdx.x] = base_;
        }
    }

    /// Whether a key leaves the window of entry g when token j comes.
    [[nodiscard]] __device__ bool leaves(const Group& of, int g, std::int32_t j) const {
        return of.base[g] + j - window_ >= sinks_;
    }
    [[nodiscard]] __device__ const float* state_of(const Group& of, int g) const {
        const std::int64_t index = std::int64_t{of.slot[g]} * call_.cache.kv_heads + head_;
        return call_.cache.state + index * call_.cache.state_size;
    }
    [[nodiscard]] __device__ float* new_state_of(const Group& of, std::int32_t number, int g) const {
        const std::int64_t index =
            (call_.state == nullptr ? std::int64_t{of.slot[g]} : std::int64_t{number} * Entries + g) *
                call_.cache.kv_heads +
            head_;
        return (call_.state == nullptr ? call_.cache.state : call_.state) + index * call_.cache.state_size;
    }

    /// Columns 128 t + 4 lane and the next 3 of a row of the weights.
    __device__ void load_row(float4 (&weight)[2], std::int32_t row) const {
        const bool there = row < rows_.count();
        const float* const w = rows_.weights(call_.scorer.weights, head_, there ? row : 0, inputs_);
#pragma unroll
        for (int t = 0; t < 2; ++t) {
            const std::int32_t i = 128 * t + 4 * lane_id();
            weight[t] = there && i < inputs_ ? four_weights(w + i, aligned_) : float4{};
        }
    }
    __device__ void load_weights(float4 (&weight)[row_batch][2], std::int32_t first) const {
#pragma unroll
        for (int r = 0; r < row_batch; ++r) {
            load_row(weight[r], first + r);
        }
    }
    __device__ void load_readout() const {
        const auto& weights = call_.scorer.weights;
        for (auto e = static_cast<std::int32_t>(threadIdx.x); e < call_.width; e += cluster_threads) {
            const std::int64_t at = std::int64_t{head_} * call_.width + e;
            memory_.readout[e] = weights.readout[at];
            memory_.gain[e] = weights.norm_gain != nullptr ? weights.norm_gain[at] : 1.0f;
        }
    }

    /// Sets out to read token j of the group, and the keys that leave.
    __device__ void fetch(const Group& of, std::int32_t number, std::int32_t j) {
        const auto thread = static_cast<std::int32_t>(threadIdx.x);
        const std::int32_t g = thread / Sizes::threads_each, mine = thread % Sizes::threads_each;
        if (j >= of.tokens[g]) {
            return;
        }
        const std::int32_t entry = number * Entries + g, slot = of.slot[g];
        const position_t base = of.base[g];
        const typename View::head_type rows(call_.cache, slot, head_);
        const position_t u = base + j - window_;
        const bool leaver = u >= sinks_, stored = u < base;
        const std::int32_t row = leaver && stored ? rows.layout.recent(u) : 0;
        const auto of_chunk = static_cast<std::int32_t>(leaver && !stored ? u - base : 0);
        const std::int32_t dim_k = call_.cache.dim_k;
#pragma unroll
        for (int i = 0; i < Sizes::fours; ++i) {
            const std::int32_t at = 4 * (mine + i * Sizes::threads_each);
            if (at < inputs_) {
                const bool key = at < dim_k;
                const std::int32_t column = key ? at : at - dim_k;
                newcomer_[i].load((key ? call_.tokens.key(rows, entry, head_, j)
                                       : call_.tokens.value(rows, entry, head_, j)) +
                                  column);
                if (leaver) {
                    const T* const from = stored ? (key ? rows.key(row) : rows.value(row))
                                                 : (key ? call_.tokens.key(rows, entry, head_, of_chunk)
                                                        : call_.tokens.value(rows, entry, head_, of_chunk));
                    leaving_[i].load(from + column);
                }
            }
        }
    }
    __device__ void store_token() const {
        const auto thread = static_cast<std::int32_t>(threadIdx.x);
        const std::int32_t g = thread / Sizes::threads_each, mine = thread % Sizes::threads_each;
#pragma unroll
        for (int i = 0; i < Sizes::fours; ++i) {
            const std::int32_t at = 4 * (mine + i * Sizes::threads_each);
            if (at < inputs_) {
                *reinterpret_cast<float4*>(memory_.x + g * inputs_ + at) = newcomer_[i].numbers();
                *reinterpret_cast<float4*>(memory_.x + (Entries + g) * inputs_ + at) = leaving_[i].numbers();
            }
        }
    }

    /// The lane's four numbers of a token or leaving key of the group.
    [[nodiscard]] __device__ float4 token_four(int g, int t, bool leaving) const {
        const std::int32_t i = 128 * t + 4 * lane_id();
        return i < inputs_
                   ? *reinterpret_cast<const float4*>(memory_.x + ((leaving ? Entries : 0) + g) * inputs_ + i)
                   : float4{};
    }
    __device__ static float product(const float4& w, const float4& x) {
        return w.x * x.x + w.y * x.y + w.z * x.z + w.w * x.w;
    }

    /// This block's rows of all projections, into the memory of all blocks. The first `row_batch` of a warp are in `weight`.
    __device__ void project(const float4 (&weight)[row_batch][2], std::int32_t first_row) const {
        for (std::int32_t turn = 0; turn + block_ * cluster_rows_each < rows_.count(); turn += row_turn) {
            const std::int32_t first = turn + first_row;
            float4 w[row_batch][2];
            bool of_leaving[row_batch], any_leaving = false, any_newcomer = false;
#pragma unroll
            for (int r = 0; r < row_batch; ++r) {
                w[r][0] = weight[r][0];
                w[r][1] = weight[r][1];
                if (turn != 0) {
                    load_row(w[r], first + r);
                }
                of_leaving[r] = rows_.of_leaving(first + r);
                any_leaving = any_leaving || of_leaving[r];
                any_newcomer = any_newcomer || !of_leaving[r];
            }
            if (turn != 0) {
                __syncthreads();  // what was sent has been read
            }
#pragma unroll
            for (int g = 0; g < Entries; ++g) {
                float sum[row_batch] = {};
#pragma unroll
                for (int t = 0; t < 2; ++t) {
                    const float4 a = any_newcomer ? token_four(g, t, false) : float4{};
                    const float4 b = any_leaving ? token_four(g, t, true) : float4{};
#pragma unroll
                    for (int r = 0; r < row_batch; ++r) {
                        sum[r] += product(w[r][t], of_leaving[r] ? b : a);
                    }
                }
                // Lanes of 16 apart share rows 0, 1 and 2, 3 between them, those of 8 apart two rows: a fold for all.
                const bool upper = (lane_id() & 16) != 0, odd = (lane_id() & 8) != 0;
                float c = upper ? sum[2] : sum[0], d = upper ? sum[3] : sum[1];
                c += __shfl_xor_sync(all_lanes, upper ? sum[0] : sum[2], 16);
                d += __shfl_xor_sync(all_lanes, upper ? sum[1] : sum[3], 16);
                float total = odd ? d : c;
                total += __shfl_xor_sync(all_lanes, odd ? c : d, 8);
                total += __shfl_xor_sync(all_lanes, total, 4);
                total += __shfl_xor_sync(all_lanes, total, 2);
                total += __shfl_xor_sync(all_lanes, total, 1);
                if (lane_id() % 8 == 0) {
                    memory_.sent[g * cluster_rows_each + row_batch * warp_id() + (upper ? 2 : 0) +
                                 (odd ? 1 : 0)] = total;
                }
            }
            __syncthreads();
            // Warp b sends to block b: a line at once, since the way between blocks is narrow.
            const std::int32_t row = turn + block_ * cluster_rows_each + lane_id();
            if (row < rows_.count()) {
#pragma unroll
                for (int g = 0; g < Entries; ++g) {
                    store_in_cluster(memory_.y + g * rows_.count() + row, warp_id(),
                                     memory_.sent[g * cluster_rows_each + lane_id()]);
                }
            }
        }
    }

    /// q~, k~ and the gates, in every block.
    __device__ void make_features(const Group& of, std::int32_t j) {
        const std::int32_t parts = feature_parts(Feature{});
        constexpr int of_gates = Entries, others = cluster_warps - of_gates;  // warps
        for (std::int32_t i = warp_id(); warp_id() < others && i < Entries * 2 * parts; i += others) {
            const std::int32_t g = i / (2 * parts);
            const bool query = i / parts % 2 != 0;
            part_of_features(Feature{}, i % parts,
                             memory_.y + g * rows_.count() + (query ? rows_.projection : 0), call_.features,
                             (query ? memory_.q : memory_.k) + g * call_.features);
        }
        // The last warps have the gates: lane 0 the input gate, the others the forget gate.
        const int g = cluster_warps - 1 - warp_id();
        if (g >= Entries) {
            return;
        }
        const bool input = lane_id() == 0;
        const auto& weights = call_.scorer.weights;
        const float* const bias = input ? weights.b_i : weights.b_f;
        // Gates as logarithms in double: log f near 0 must survive being added to a large stabiliser.
        double gate = memory_.y[g * rows_.count() + rows_.input_gate() + (input ? 0 : 1)];
        gate += bias != nullptr ? bias[head_] : 0.0f;
        const double cap = call_.scorer.gate_softcap;
        if (cap > 0.0) {
            gate = cap * tanh(gate / cap);
        }
        if (!input) {
            gate = gate < 0.0 ? gate - log1p(exp(gate)) : -log1p(exp(-gate));
            gate += static_cast<double>(stabiliser_[0]) + static_cast<double>(stabiliser_[1]);
        }
        const double of_input = __shfl_sync(all_lanes, gate, 0), of_forget = __shfl_sync(all_lanes, gate, 1);
        const double m = of_forget > of_input ? of_forget : of_input;
        if (lane_id() < 2) {
            memory_.gate[2 * g + (input ? 1 : 0)] = expf(static_cast<float>(gate - m));
        }
        if (j < of.tokens[g]) {
            stabiliser_[0] = static_cast<float>(m);
            stabiliser_[1] =
                isfinite(m) ? static_cast<float>(m - static_cast<double>(static_cast<float>(m))) : 0.0f;
        }
    }

    /// Calls body(g, piece, row of the block, first of two columns) for the pieces that the warp holds, body's numbers being constants.
    template <class Body>
    __device__ void for_pieces(const Body& body) const {
        const bool two = call_.width > 64;
        const std::int32_t rows = block_rows();
#pragma unroll
        for (int i = 0; i < Pieces; ++i) {
            const std::int32_t row = warp_id() + (two ? i / 2 : i) * cluster_warps;
            const std::int32_t column = (two ? i % 2 * 64 : 0) + 2 * lane_id();
            if (row < rows && column < call_.width) {
                body(i, row, column);
            }
        }
    }
    [[nodiscard]] __device__ std::int32_t first_feature() const {
        return block_ * Sizes::rows(call_.features);
    }
    [[nodiscard]] __device__ std::int32_t block_rows() const {
        const std::int32_t left = call_.features - first_feature(), rows = Sizes::rows(call_.features);
        return left < rows ? left : rows;
    }

    __device__ void load_state(const Group& of) {
        const std::int64_t numbers = std::int64_t{call_.features} * call_.width;
#pragma unroll
        for (int g = 0; g < Entries; ++g) {
            if (of.tokens[g] == 0) {
                continue;
            }
            const float* const state = state_of(of, g);
            for_pieces([&](int i, std::int32_t row, std::int32_t column) {
                const float* const from = state + std::int64_t{first_feature() + row} * call_.width + column;
                if (pairs_aligned_) {
                    c_[g][i] = *reinterpret_cast<const float2*>(from);
                } else {
                    c_[g][i] = make_float2(from[0], column + 1 < call_.width ? from[1] : 0.0f);
                }
            });
            if (warp_id() == g && lane_id() < block_rows()) {
                z_ = state[numbers + first_feature() + lane_id()];
            }
            if (warp_id() == cluster_warps - 1 - g) {
                stabiliser_[0] = state[numbers + call_.features];
                stabiliser_[1] = state[numbers + call_.features + 1];
            }
        }
    }
    __device__ void store_state(const Group& of, std::int32_t number) const {
        const std::int64_t numbers = std::int64_t{call_.features} * call_.width;
#pragma unroll
        for (int g = 0; g < Entries; ++g) {
            if (of.tokens[g] == 0) {
                continue;
            }
            float* const state = new_state_of(of, number, g);
            for_pieces([&](int i, std::int32_t row, std::int32_t column) {
                float* const to = state + std::int64_t{first_feature() + row} * call_.width + column;
                if (pairs_aligned_) {
                    *reinterpret_cast<float2*>(to) = c_[g][i];
                } else {
                    to[0] = c_[g][i].x;
                    if (column + 1 < call_.width) {
                        to[1] = c_[g][i].y;
                    }
                }
            });
            if (warp_id() == g && lane_id() < block_rows()) {
                state[numbers + first_feature() + lane_id()] = z_;
            }
            if (block_ == 0 && warp_id() == cluster_warps - 1 - g && lane_id() < 2) {
                state[numbers + call_.features + lane_id()] =
                    lane_id() == 0 ? stabiliser_[0] : stabiliser_[1];
            }
        }
    }

    /// The block's rows of the states take in token j; the warp's share of q~^T C goes to shared memory.
    __device__ void update(const Group& of, std::int32_t j) {
#pragma unroll
        for (int g = 0; g < Entries; ++g) {
            if (j >= of.tokens[g]) {
                continue;
            }
            const float forget = memory_.gate[2 * g], write = memory_.gate[2 * g + 1];
            const float* const k = memory_.k + g * call_.features + first_feature();
            const float* const q = memory_.q + g * call_.features + first_feature();
            const bool leaver = leaves(of, g, j);
            const float* const v = Values::projected ? memory_.y + g * rows_.count() + 2 * rows_.projection
                                                     : memory_.x + g * inputs_ + call_.cache.dim_k;
            float2 sum[most_chunks] = {};
            for_pieces([&](int i, std::int32_t row, std::int32_t column) {
                const float scale = write * k[row], of_q = leaver ? q[row] : 0.0f;
                const bool two = column + 1 < call_.width;
                c_[g][i].x = fmaf(forget, c_[g][i].x, scale * v[column]);
                c_[g][i].y = fmaf(forget, c_[g][i].y, two ? scale * v[column + 1] : 0.0f);
#pragma unroll
                for (int c = 0; c < most_chunks; ++c) {
                    if (c == (call_.width > 64 ? i % 2 : 0)) {
                        sum[c].x += leaver ? of_q * c_[g][i].x : 0.0f;
                        sum[c].y += leaver ? of_q * c_[g][i].y : 0.0f;
                    }
                }
            });
#pragma unroll
            for (int c = 0; c < most_chunks; ++c) {
                const std::int32_t column = 64 * c + 2 * lane_id();
                float* const to = memory_.partial + (warp_id() * Entries + g) * call_.width + column;
                if (column < call_.width) {
                    to[0] = sum[c].x;
                }
                if (column + 1 < call_.width) {
                    to[1] = sum[c].y;
                }
            }
            if (warp_id() == g) {
                float of_z = 0.0f;
                if (lane_id() < block_rows()) {
                    z_ = fmaf(forget, z_, write * k[lane_id()]);
                    of_z = leaver ? q[lane_id()] * z_ : 0.0f;
                }
                of_z = warp_total(of_z);
                if (lane_id() == 0) {
                    store_in_cluster(memory_.divisor + block_ * Entries + g, 0, of_z);
                }
            }
        }
    }

    /// The block's share of q~^T C goes to the first block.
    __device__ void gather() const {
        const std::int32_t numbers = Entries * call_.width;
        for (auto i = static_cast<std::int32_t>(threadIdx.x); i < numbers; i += cluster_threads) {
            float sum = 0.0f;
#pragma unroll
            for (int w = 0; w < cluster_warps; ++w) {
                sum += memory_.partial[w * numbers + i];
            }
            store_in_cluster(memory_.h + block_ * numbers + i, 0, sum);
        }
        if (rows_.skip && block_ == 0 && warp_id() < Entries) {
            skip_ = memory_.y[warp_id() * rows_.count() + rows_.of_skip()];
        }
    }

    /// The scores, by warps of the first block, while the others go on.
    __device__ void read(const Group& of, std::int32_t number, std::int32_t j) const {
        const int g = warp_id();
        if (block_ != 0 || g >= Entries || j >= of.tokens[g]) {
            return;
        }
        const auto& weights = call_.scorer.weights;
        float score = 0.0f;
        if (leaves(of, g, j)) {
            float divisor = 0.0f;
#pragma unroll
            for (int b = 0; b < cluster_blocks; ++b) {
                divisor += memory_.divisor[b * Entries + g];
            }
            constexpr auto least = static_cast<float>(Scorer::clamp);
            const float scale = 1.0f / (divisor < least ? least : divisor);
            float h[Sizes::most_width / 32];
            float squares = 0.0f;
#pragma unroll
            for (int i = 0; i < Sizes::most_width / 32; ++i) {
                const std::int32_t e = 32 * i + lane_id();
                h[i] = 0.0f;
                if (e < call_.width) {
#pragma unroll
                    for (int b = 0; b < cluster_blocks; ++b) {
                        h[i] += memory_.h[(b * Entries + g) * call_.width + e];
                    }
                    h[i] *= scale;
                }
                squares += h[i] * h[i];
            }
            squares = warp_total(squares) / static_cast<float>(call_.width);
            constexpr auto epsilon = static_cast<float>(Scorer::norm_epsilon);
            const float norm = weights.norm_gain != nullptr ? 1.0f / sqrtf(squares + epsilon) : 1.0f;
#pragma unroll
            for (int i = 0; i < Sizes::most_width / 32; ++i) {
                const std::int32_t e = 32 * i + lane_id();
                score += e < call_.width ? memory_.readout[e] * silu(h[i] * norm * memory_.gain[e]) : 0.0f;
            }
            score = warp_total(score);
            score += weights.readout_bias != nullptr ? weights.readout_bias[head_] : 0.0f;
            score += rows_.skip ? skip_ : 0.0f;
        }
        if (lane_id() == 0) {
            const std::int64_t pair = (std::int64_t{number} * Entries + g) * call_.cache.kv_heads + head_;
            call_.scores[pair * call_.tokens.most + j] = score;
        }
    }

    const Launch& call_;
    Group* groups_;
    cluster_rows rows_;
    std::int32_t inputs_;
    cluster_memory<Entries> memory_;
    std::int32_t block_, head_, first_, turns_;
    bool aligned_, pairs_aligned_;
    std::int32_t slot_ = 0, tokens_ = 0;  // see ask()
    position_t base_ = 0;
    std::int32_t window_ = 0, sinks_ = 0;
    four_elements<T> newcomer_[Sizes::fours], leaving_[Sizes::fours];
    float2 c_[Entries][Pieces] = {};
    float z_ = 0.0f;
    float stabiliser_[2] = {0.0f, 0.0f};
    mutable float skip_ = 0.0f;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
