// A block's part of the projections of agent_mlstm_batched.cuh: the tokens of the cluster, products with the
// block's columns of the weights, and their way to the block that needs them.
#pragma once

#include <kvpolicy/caches/cuda/scoring/agent_mlstm_batched_states.cuh>
#include <kvpolicy/caches/cuda/scoring/agent_mlstm_projections.cuh>
#include <kvpolicy/caches/cuda/scoring/agent_mlstm_step.cuh>
#include <kvpolicy/caches/cuda/scoring/agent_score.cuh>
#include <kvpolicy/caches/cuda/scoring/mlstm_batched_memory.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/cluster.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The warps that work, before the first state.
template <class View, std::int32_t D, class Feature, class Values>
struct mlstm_batched_projections : mlstm_batched_states<View, D, Feature, Values> {
    using states = mlstm_batched_states<View, D, Feature, Values>;
    using states::call_, states::warp_, states::rows_, states::inputs_, states::folds_, states::memory_,
        states::block_, states::head_, states::first_of_all_, states::first_, states::all_, states::count_;
    using states::thread, states::state_of;
    using typename states::T, typename states::Memory;

    __device__ mlstm_batched_projections(const typename states::Launch& call, unsigned char* shared)
        : states(call, shared) {}

    /// The lane's two rows of a tile of the weights.
    struct tile_rows {
        const float *first, *second;
    };
    /// Quarters of the columns that there are.
    [[nodiscard]] __device__ std::int32_t quarters() const {
        return (inputs_ + Memory::quarter - 1) / Memory::quarter;
    }
    [[nodiscard]] __device__ std::int32_t first_quarter() const { return block_ * Memory::quarters_each; }
    [[nodiscard]] __device__ std::int32_t first_column() const { return block_ * Memory::columns; }

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
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
