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

#include <kvpolicy/caches/cuda/contiguous/contiguous_view.cuh>
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
class agent_mlstm_batched {
    using Scorer = mLSTMScorer<D, Feature, Values>;
    using Launch = score_params<View, Scorer>;
    using T = typename View::value_type;

  public:
    using Memory = mlstm_batched_memory<T>;

    __device__ agent_mlstm_batched(const Launch& call, unsigned char* shared)
        : call_(call),
          rows_{call.projection, Values::projected ? call.width : 0, call.scorer.weights.skip != nullptr},
          inputs_(call.cache.head_dim_qk + call.cache.head_dim_vo),
          folds_(folds_of(call.features)),
          memory_(shared, rows_.count(), call.features, call.width, call.cache.state_size, call.stages) {
        const auto number = static_cast<std::int32_t>(blockIdx.x), cluster = number / batched_blocks;
        block_ = number % batched_blocks;
        head_ = cluster % call.cache.kv_heads;
        first_of_all_ = cluster / call.cache.kv_heads * batched_blocks * call.together;
        first_ = first_of_all_ + block_ * call.together;
        count_ = within(call.batch.count - first_, call.together);
        all_ = within(call.batch.count - first_of_all_, batched_blocks * call.together);
    }

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
    /// The lane's two rows of a tile of the weights.
    struct tile_rows {
        const float *first, *second;
    };
    [[nodiscard]] __device__ static std::int32_t thread() { return static_cast<std::int32_t>(threadIdx.x); }
    [[nodiscard]] __device__ static std::int32_t within(std::int32_t count, std::int32_t most) {
        return count < 0 ? 0 : count < most ? count : most;
    }
    [[nodiscard]] __device__ std::int64_t state_numbers() const {
        return std::int64_t{call_.features} * call_.width;
    }
    [[nodiscard]] __device__ float* new_states() const {
        return call_.state == nullptr ? call_.cache.state : call_.state;
    }
    /// The first number of the state of a slot, or of an entry where new ones go.
    [[nodiscard]] __device__ std::int64_t state_of(std::int64_t slot) const {
        return (slot * call_.cache.kv_heads + head_) * call_.cache.state_size;
    }
    /// Quarters of the columns that there are.
    [[nodiscard]] __device__ std::int32_t quarters() const {
        return (inputs_ + Memory::quarter - 1) / Memory::quarter;
    }
    [[nodiscard]] __device__ std::int32_t first_quarter() const { return block_ * Memory::quarters_each; }
    [[nodiscard]] __device__ std::int32_t first_column() const { return block_ * Memory::columns; }

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

    /// What there is of entry e of the block.
    [[nodiscard]] __device__ active_entry entry_of(std::int32_t e) const {
        return active_entry(call_.cache, call_.batch, first_ + e, 1).once(call_.cache);
    }
    /// The block's entries that have a token, as bits; lane e gets the slot of entry e. By a warp.
    __device__ unsigned find_own(std::int32_t& slot) const {
        bool there = false;
        slot = 0;
        if (lane_id() < count_) {
            const active_entry entry = entry_of(lane_id());
            there = entry.tokens != 0;
            slot = entry.seq;
        }
        return __ballot_sync(all_lanes, there);
    }
    [[nodiscard]] __device__ static bool has(unsigned entries, std::int32_t e) {
        return (entries >> static_cast<unsigned>(e) & 1u) != 0;
    }

    /// The warps that work, and the one that has the gates, by instructions of their own.
    __device__ static void meet() { named_barrier_of_any(1, batched_workers + 32); }

    // The warp that brings states.

    /// Bytes that a state's place in memory is behind the beginning of a line.
    [[nodiscard]] __device__ static std::uint32_t offset_of(const float* state) {
        return static_cast<std::uint32_t>(reinterpret_cast<std::uintptr_t>(state) % Memory::line);
    }
    /// Its first bytes that are no whole piece of 16: 0 or 8.
    [[nodiscard]] __device__ static std::uint32_t odd_bytes(const float* state) {
        return offset_of(state) % 16;
    }
    [[nodiscard]] __device__ std::uint32_t stage_address(std::int32_t stage) const {
        return shared_address(memory_.ring) +
               static_cast<std::uint32_t>(stage * Memory::stage_bytes(call_.cache.state_size));
    }
    /// The part of a state that lies in whole pieces of 16 bytes: all but, perhaps, the first two numbers, or
    /// the stabilizer.
    struct whole_part {
        const unsigned char* from;
        std::uint32_t skipped, bytes;
    };
    [[nodiscard]] __device__ whole_part whole_part_of(const float* state) const {
        const std::uint32_t skipped = odd_bytes(state),
                            all = static_cast<std::uint32_t>(call_.cache.state_size) * 4;
        return {reinterpret_cast<const unsigned char*>(state) + skipped, skipped, (all - skipped) / 16 * 16};
    }
    /// Sets out to bring a state, the block's n-th; one lane.
    __device__ void issue(const float* state, std::int32_t n) const {
        const whole_part part = whole_part_of(state);
        const std::int32_t stage = n % call_.stages;
        const std::uint32_t to = stage_address(stage) + offset_of(state),
                            barrier = shared_address(&memory_.tokens->full[stage]);
        barrier_expect(barrier, part.bytes);
        // An earlier tile may have had its bytes copied to where this one has others.
        fence_async_proxy();
        copy_bulk(to + part.skipped, part.from, part.bytes, barrier);
        if (part.skipped != 0) {
            copy_8(to, state);
        }
        barrier_arrive_after_copies(barrier);
    }
    /// Whether a state may go from its stage to where the new one goes by a bulk copy: both lie alike to 16
    /// bytes.
    [[nodiscard]] __device__ static bool alike(const float* state, const float* to) {
        return odd_bytes(state) == odd_bytes(to);
    }
    /// What it copies, behind the odd bytes: not the stabilizer, which is not the ring's.
    [[nodiscard]] __device__ std::uint32_t stored_bytes(std::uint32_t odd) const {
        return (static_cast<std::uint32_t>(state_numbers() + call_.features) * 4 - odd) / 16 * 16;
    }
    /// Sets out to store the block's n-th state, of entry e, once it has taken in its token.
    __device__ void store(std::int32_t n, std::int32_t e, std::int32_t slot_of_entry) const {
        const std::int32_t stage = n % call_.stages;
        barrier_wait(shared_address(&memory_.tokens->taken[stage]),
                     static_cast<std::uint32_t>(n / call_.stages) % 2);
        const float* const state = call_.cache.state + state_of(slot_of_entry);
        float* const to = new_states() + state_of(call_.state == nullptr ? slot_of_entry : first_ + e);
        if (lane_id() == 0 && alike(state, to)) {
            const std::uint32_t odd = odd_bytes(state);
            store_bulk(reinterpret_cast<unsigned char*>(to) + odd,
                       stage_address(stage) + offset_of(state) + odd, stored_bytes(odd));
            bulk_commit();
        }
    }
    __device__ void bring() {
        std::int32_t my_slot;
        const unsigned entries = find_own(my_slot);
        cluster_wait();
        const std::int32_t free = Memory::free_stages(rows_.count(), call_.cache.state_size, call_.stages);
        std::int32_t n = 0, stored = 0;  // states so far
        std::int32_t mine = 0;           // lane n: the entry of the n-th
        const auto store_next = [&] {
            const std::int32_t e = __shfl_sync(all_lanes, mine, stored);
            store(stored, e, __shfl_sync(all_lanes, my_slot, e));
            ++stored;
        };
        for (std::int32_t e = 0; e < count_; ++e) {
            const std::int32_t slot_of_entry = __shfl_sync(all_lanes, my_slot, e);
            if (!has(entries, e)) {
                continue;
            }
            if (n == free) {
                barrier_wait(shared_address(&memory_.tokens->joined), 0);
            }
            if (n >= call_.stages) {
                store_next();
                if (lane_id() == 0) {
                    bulk_wait_read<0>();
                }
            }
            mine = lane_id() == n ? e : mine;
            if (lane_id() == 0) {
                issue(call_.cache.state + state_of(slot_of_entry), n);
            }
            ++n;
        }
        while (stored < n) {
            store_next();
        }
        if (lane_id() == 0) {
            bulk_wait_read<0>();
        }
    }

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

    /// The block's columns of the cluster's tokens and of the keys that leave, one warp per two tokens, eight
    /// lanes per row.
    __device__ void fetch() const {
        constexpr int lanes = 8, turns = Memory::columns / (4 * lanes);
        const std::int32_t token = 2 * warp_ + lane_id() / (2 * lanes), entry = first_of_all_ + token;
        const bool leaving = lane_id() / lanes % 2 != 0;
        struct {
            typename Memory::four at[turns];
        } part;
        if (token < all_) {
            const token_entry<View> known(call_.cache, call_.batch, entry, 1, head_);
            const std::int32_t tokens = known.active.tokens;
            const T *key = nullptr, *value = nullptr;
            if (tokens != 0) {
                key = token_source(known.rows, call_.tokens, entry, head_, known.base, 0, leaving, false);
                value = token_source(known.rows, call_.tokens, entry, head_, known.base, 0, leaving, true);
            }
#pragma unroll
            for (int i = 0; i < turns; ++i) {
                const std::int32_t column = first_column() + (lanes * i + lane_id() % lanes) * 4;
                if (key != nullptr && column < inputs_) {
                    part.at[i].load(column < call_.cache.head_dim_qk
                                        ? key + column
                                        : value + (column - call_.cache.head_dim_qk));
                }
            }
            const std::int32_t mine = entry - first_;
            if (mine >= 0 && mine < count_ && lane_id() % lanes == 0) {
                auto& all = *memory_.tokens;
                if (leaving) {
                    all.leaves[mine] = key != nullptr ? 1 : 0;
                } else {
                    const std::int32_t slot = tokens != 0 ? known.active.seq : 0;
                    all.count[mine] = tokens;
                    all.state[mine] = state_of(slot);
                    all.new_state[mine] = state_of(call_.state == nullptr ? slot : entry);
                    all.value[mine] = value;
                }
            }
        }
        auto* const to =
            memory_.x + ((leaving ? batched_tokens : 0) + token) * Memory::stride + lane_id() % lanes;
#pragma unroll
        for (int i = 0; i < turns; ++i) {
            to[lanes * i] = part.at[i];
        }
    }
    /// The values of the block's new tokens, which are not projected. One warp per entry.
    __device__ void load_value() const {
        const T* const from = warp_ < count_ ? memory_.tokens->value[warp_] : nullptr;
        for (std::int32_t i = lane_id(); from != nullptr && i < call_.width; i += 32) {
            memory_.value[warp_ * call_.width + i] = static_cast<float>(from[i]);
        }
    }

    [[nodiscard]] __device__ tile_rows rows_of(std::int32_t tile) const {
        const std::int32_t row = tile * mlstm_rows::tile + lane_id() / 4;
        const auto& weights = call_.scorer.weights;
        return {rows_.weights(weights, head_, row, inputs_), rows_.weights(weights, head_, row + 8, inputs_)};
    }
    /// The block's quarters of all tokens' projections, a tile of the weights a warp. `weight` and `rows`:
    /// the first quarter of the warp's first tile. Loops are not unrolled where they need not be:
    /// instructions come from afar, too.
    __device__ void project(weight_quarter& weight, tile_rows rows) const {
        const std::int32_t tiles = rows_.tiles();
#pragma unroll 1
        for (std::int32_t tile = warp_; tile < tiles; tile += batched_warps) {
            if (tile != warp_) {
                rows = rows_of(tile);
            }
            const auto* x =
                memory_.x +
                (tile * mlstm_rows::tile >= rows_.queries() ? batched_tokens * Memory::stride : 0) +
                lane_id() / 4 * Memory::stride + lane_id() % 4;
#pragma unroll 1
            for (int i = 0; i < Memory::quarters_each && first_quarter() + i < quarters(); ++i) {
                const std::int32_t quarter = first_quarter() + i;
                if (i != 0 || tile != warp_) {
                    weight.load(rows.first, rows.second, quarter, inputs_);
                }
                const quarter_parts<T> parts(weight);
                constexpr int tokens = 8;  // that a product takes
#pragma unroll 1
                for (std::int32_t first = 0; first < all_; first += tokens) {
                    float sum[4];
                    parts.multiply(x + first * Memory::stride, sum);
                    send(sum, quarter, tile, first);
                }
                x += Memory::quarter / 4;
            }
        }
    }
    /// Sends what eight tokens, from `first` on, gave with a tile to the blocks that have them: four rows of
    /// one token per lane, since the way between blocks is narrow. They lie in the lane as a tensor core
    /// leaves them (see weight_quarter).
    __device__ void send(const float (&sum)[4], std::int32_t quarter, std::int32_t tile,
                         std::int32_t first) const {
        const bool odd = lane_id() / 4 % 2 != 0, later = lane_id() / 8 % 2 != 0;
        // Two rows of a token from two lanes' two tokens, above and below; then four from two lanes' pairs.
        const float above = __shfl_xor_sync(all_lanes, odd ? sum[0] : sum[1], 4),
                    below = __shfl_xor_sync(all_lanes, odd ? sum[2] : sum[3], 4);
        const float2 upper = odd ? make_float2(above, sum[1]) : make_float2(sum[0], above),
                     lower = odd ? make_float2(below, sum[3]) : make_float2(sum[2], below);
        const float2 given = later ? upper : lower;
        const float2 other =
            make_float2(__shfl_xor_sync(all_lanes, given.x, 8), __shfl_xor_sync(all_lanes, given.y, 8));
        const float4 rows = later ? make_float4(other.x, other.y, lower.x, lower.y)
                                  : make_float4(upper.x, upper.y, other.x, other.y);
        const std::int32_t token = first + lane_id() % 4 * 2 + (odd ? 1 : 0),
                           row = (later ? 8 : 0) + lane_id() / 16 * 4;
        if (token < all_) {
            const std::int32_t block = token < call_.together ? 0 : 1, e = token - block * call_.together;
            const float* const to =
                memory_.quarters +
                ((quarter * rows_.tiles() + tile) * batched_entries + e) * mlstm_rows::tile + row;
            send_in_cluster(cluster_address(shared_address(to), block), rows,
                            cluster_address(shared_address(&memory_.tokens->projected), block));
        }
    }
    /// Projections of the block's tokens from their quarters.
    __device__ void join() const {
        const std::int32_t fours = rows_.count() / 4 * batched_entries, all = quarters();
        const auto* const from = reinterpret_cast<const float4*>(memory_.quarters);
        for (std::int32_t i = thread(); i < fours; i += batched_workers) {
            constexpr std::int32_t each = mlstm_rows::tile / 4;  // of a token's
            const std::int32_t e = i / each % batched_entries, tile = i / (each * batched_entries);
            if (e < count_) {
                float4 part[4];
#pragma unroll
                for (int b = 0; b < 4; ++b) {
                    part[b] = b < all ? from[b * fours + i] : float4{};
                }
                const auto join = [](float a, float b, float c, float d) {
                    return join_quarters(a, b, c, d);
                };
                *reinterpret_cast<float4*>(memory_.y + e * rows_.count() + tile * mlstm_rows::tile +
                                           i % each * 4) =
                    make_float4(join(part[0].x, part[1].x, part[2].x, part[3].x),
                                join(part[0].y, part[1].y, part[2].y, part[3].y),
                                join(part[0].z, part[1].z, part[2].z, part[3].z),
                                join(part[0].w, part[1].w, part[2].w, part[3].w));
            }
        }
        const std::int32_t padded = folds_ * fold_rows, row = padded - fold_rows + thread() % fold_rows;
        if (thread() < batched_entries * fold_rows && row >= call_.features) {
            memory_.k[thread() / fold_rows * padded + row] = memory_.q[thread() / fold_rows * padded + row] =
                0.0f;
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
                const float z = fmaf(forget, of.z, __fmul_rn(write, memory_.k[e * padded + thread()]));
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
            call_.scores[std::int64_t{first_ + e} * call_.cache.kv_heads + head_] = score;
        }
    }

    const Launch& call_;
    const int warp_ = whole_warp_id();
    mlstm_rows rows_;
    std::int32_t inputs_, folds_;
    Memory memory_;
    std::int32_t block_, head_, fold_ = 0, column_ = 0;
    std::int32_t first_of_all_, first_;  // entries of the cluster, of the block
    std::int32_t all_, count_;           // how many
    std::int32_t taken_ = 0;             // states so far, as the warp's role counts them
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
