// One launch of a forward kernel: what is read, what is written, and how it is cut into tiles.
#pragma once

#include <kvpolicy/attention/cuda/attention_params.cuh>
#include <kvpolicy/attention/cuda/key_frame.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/view.hpp>

#include <cuda.h>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// A tile is tile_q consecutive queries of the query heads of one KV head: row r of it is query r / heads of
/// head r % heads. Groups larger than a tile's rows are cut into `parts` of `heads` query heads each.
///
/// The last heads of a launch may be cut into narrow tiles of narrow_q queries instead. Where there are few
/// tiles, processors finish at about the same time then.
template <class T>
struct forward_params {
    attention_params<T> params;
    rows_view<T> out;          // [B, Hq, S, Dv]
    plane_view<float> lse;     // [B, Hq, S]; may be empty
    key_frames frames;         // read where rows are scanned
    attention_plan plan;       // read where rows are listed
    bool listed = false;       // rows come from the plan's lists; else every row is looked at
    bool causal_rows = false;  // scanning: no expiry, positions or packed segments, so row numbers say all
    std::int32_t tile_q = 1;
    std::int32_t first_tile = 0;  // of the launch
    std::int32_t tiles = 0;       // of the launch, for each head and part
    std::int32_t narrow_q = 0;
    std::int32_t narrow_tiles = 0;  // for each of the last narrow_heads of batch * kv_heads * parts
    std::int32_t narrow_heads = 0;
    std::int32_t heads = 1;  // query heads per tile
    std::int32_t parts = 1;
    // Logits in units of log 2. Without a soft cap: slope * <q, k>; with it: cap * tanh(...), written as
    // cap (1 - 2 / (1 + 2^(slope <q, k>))).
    float slope = 1.0f;
    float cap = 0.0f;                     // 0: none
    std::uint32_t* not_finite = nullptr;  // set where some output is not finite

    __host__ __device__ std::int64_t wide_heads() const {
        return std::int64_t{params.batch} * params.kv_heads * parts - narrow_heads;
    }
    __host__ __device__ std::int64_t count() const {
        return wide_heads() * tiles + std::int64_t{narrow_heads} * narrow_tiles;
    }
    /// Narrow tiles per super-tile, or per sequence where rows are scanned. The last one may end sooner.
    __host__ __device__ std::int32_t narrow_per_super() const {
        return listed ? (plan.super_q + narrow_q - 1) / narrow_q : narrow_tiles;
    }
};

/// Rows that lie together come by TMA: maps of keys and values whose boxes are box_rows rows. Without them,
/// every row is gathered. Of two segments, the second has maps.
struct forward_boxes {
    static constexpr std::uint32_t box_rows = 8;
    CUtensorMap k, v;
    std::int32_t first_row = 0;  // the number of the maps' first row
    bool there = false;
    bool always = false;  // whatever the plan has counted
};

/// Where one tile lies.
struct tile_coords {
    std::int32_t b, h;        // sequence and KV head
    std::int32_t first_head;  // of the query heads of the group
    std::int32_t heads;       // that count
    std::int32_t first_query;
    std::int32_t tile_q;   // queries of the tile, and
    std::int32_t queries;  // how many count; <= 0: nothing to do
};

/// Tiles of one head follow one another, so that what they gather stays in the L2 cache; those with most keys
/// come first. Narrow tiles come last.
template <class T>
__device__ inline tile_coords tile_coords_of(const forward_params<T>& call, std::uint32_t number) {
    const auto tiles = static_cast<std::uint32_t>(call.tiles);
    auto tile = static_cast<std::int32_t>(number % tiles);
    auto rest = static_cast<std::int32_t>(number / tiles);
    tile_coords coords;
    coords.tile_q = call.tile_q;
    coords.first_query = (call.first_tile + call.tiles - 1 - tile) * call.tile_q;
    if (call.narrow_heads > 0 && rest >= static_cast<std::int32_t>(call.wide_heads())) {
        const auto wide = static_cast<std::uint32_t>(call.wide_heads());
        const auto narrow_tiles = static_cast<std::uint32_t>(call.narrow_tiles);
        const std::uint32_t behind = number - wide * tiles;
        rest = static_cast<std::int32_t>(wide + behind / narrow_tiles);
        tile = call.narrow_tiles - 1 - static_cast<std::int32_t>(behind % narrow_tiles);
        const std::int32_t per_super = call.narrow_per_super();
        const std::int32_t offset = tile % per_super * call.narrow_q;
        const std::int32_t left = call.plan.super_q - offset;
        coords.first_query = tile / per_super * call.plan.super_q + offset;
        coords.tile_q = call.listed && left < call.narrow_q ? left : call.narrow_q;
    }
    const std::int32_t part = rest % call.parts;
    const std::int32_t head = rest / call.parts;
    coords.b = head / call.params.kv_heads;
    coords.h = head % call.params.kv_heads;
    coords.first_head = part * call.heads;
    const std::int32_t left = call.params.group - coords.first_head;
    coords.heads = left < call.heads ? left : call.heads;
    const std::int32_t queries = call.params.length_of(coords.b) - coords.first_query;
    coords.queries = queries < coords.tile_q ? queries : coords.tile_q;
    return coords;
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
