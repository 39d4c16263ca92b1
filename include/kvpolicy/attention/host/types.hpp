// What the attention of one KV head is given on the host, and the small fixed-size pieces that its passes
// hand to one another. attention/host/kernel.hpp says how they play together.
#pragma once

#include <kvpolicy/attention/head_dim.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>

#include <cstddef>
#include <cstdint>
#include <limits>

namespace kvpolicy::host_backend {

/// Keys and values of one KV head that lie together: a slice of a tensor, or the rows of a cache. Row r is
/// visible to the query at position p iff position(r) <= p && p < expiry(r). What an invisible row holds does
/// not matter, NaN included. Order means nothing, except that outputs are reproducible for a given order.
template <Storage T>
struct key_segment {
    const T* k = nullptr;  // row r at k + r * k_stride: [Dk]
    std::int64_t k_stride = 0;
    const T* v = nullptr;  // row r at v + r * v_stride: [Dv]
    std::int64_t v_stride = 0;
    std::int32_t count = 0;
    const std::int32_t* position = nullptr;  // [count], in the frame of the queries; null: first + r
    std::int32_t first = 0;
    const expiry_t* expiry = nullptr;  // [count]; null: never
    const float* log_bias =
        nullptr;  // [count], added to the logit once p - position >= bias_from; null: none
    std::int32_t bias_from = 0;
};

/// The `group` query heads of one KV head at `count` consecutive positions, and where their results go.
template <Storage T>
struct query_block {
    const T* q = nullptr;  // q + i * row_stride + g * head_stride: [Dk]
    std::int64_t row_stride = 0;
    std::int64_t head_stride = 0;
    T* out = nullptr;  // out + i * out_row_stride + g * out_head_stride: [Dv]
    std::int64_t out_row_stride = 0;
    std::int64_t out_head_stride = 0;
    float* lse = nullptr;  // lse[i * lse_row_stride + g * lse_head_stride]; null: not wanted
    std::int64_t lse_row_stride = 0;
    std::int64_t lse_head_stride = 0;
    std::int32_t count = 0;
    std::int32_t group = 1;
    std::int32_t first = 0;  // query i has position first + i
};

/// The numbers of an attention call, resolved: scale is the factor itself, logits_soft_cap 0 means none.
struct attention_shape {
    std::int32_t head_dim_qk = 0;
    std::int32_t head_dim_vo = 0;
    float scale = 1.0f;
    float logits_soft_cap = 0.0f;
};

// Sizes of the passes. A panel is what one register block of the matrix products reads.
inline constexpr std::int32_t block_keys = 64;   ///< keys that go through the passes together
inline constexpr std::int32_t panel_rows = 6;    ///< rows (a query head at a position) of a register block
inline constexpr std::int32_t panel_lanes = 16;  ///< columns of a register block
inline constexpr std::int64_t value_panel =
    std::int64_t{block_keys} * panel_lanes;      ///< numbers between packed columns
inline constexpr std::int32_t strip_rows = 24;   ///< rows that share one pass of softmax
inline constexpr std::int32_t direct_rows = 16;  ///< up to so many rows keys are read in place, not packed

/// Up to block_keys keys that some query of a tile sees, wherever they lie.
template <Storage T>
struct key_block {
    const T* k[block_keys];  // repeats the last one up to a multiple of panel_lanes
    const T* v[block_keys];
    // Read only where the block is `masked`: not every row of the tile sees every key as it is.
    std::int32_t begins[block_keys];
    expiry_t expires[block_keys];
    float bias[block_keys];
    std::int32_t bias_start[block_keys];  // the first query position that the bias applies to
    std::int32_t count = 0;
    bool masked = false;
    bool biased = false;
    // Where the next block's keys probably lie, to be fetched meanwhile; null: unknown.
    const T* ahead = nullptr;
    std::int64_t ahead_stride = 0;
    const key_block* next = nullptr;  // the block that comes next, to be fetched meanwhile; null: unknown
};

/// What the softmax pass knows of a strip of rows.
template <class Real>
struct strip_state {
    const std::int32_t* position;  // [rows], of each row's query
    Real* max;                     // [rows], running
    double* sum;                   // [rows], running; in double since it may see millions of small terms
    Real* decay;                   // [rows], out: what the output so far is to be multiplied by
};

}  // namespace kvpolicy::host_backend
