// One warp's share of decode attention over paged entries: tiles of 16 entries, which lie in pages, against
// the query heads of a group. As agent_decode_stream.cuh, with three differences: where entries lie; warps
// take tiles in turn; and the new token is read in place of the entry that the step frees (`hole`), or behind
// the last entry, since every block knows what the step does.
#pragma once

#include <kvpolicy/attention/cuda/key_frame.cuh>
#include <kvpolicy/caches/cuda/decode/agent_decode_stream.cuh>
#include <kvpolicy/caches/page_pool.hpp>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {
namespace paged {

/// Rows of a head in pages of whole tiles. The lanes of a warp hold where 32 pages lie, from `first` on, so
/// that a page table is read once for all of them.
template <class T>
struct paged_source {
    struct tile_rows {
        const T* k;  // of the tile's first row; the others follow at k_row() and v_row()
        const T* v;
    };
    PagedRows<T> rows;
    std::int32_t pages;        // that the table names
    std::int32_t first = -32;  // none yet
    const T* k_page = nullptr;
    const T* v_page = nullptr;

    __device__ tile_rows tile(std::int32_t number) {
        const std::int32_t row = number * stream_tile, page = row / rows.page_size;
        if (page - first >= 32) {  // tiles come in rising order
            first = page;
            const std::int32_t mine = page + lane_id();
            if (mine < pages) {
                const std::int32_t id = rows.table[mine];
                const Slab<T>& slab = rows.slabs[id / rows.slab_pages];
                const std::int64_t in_slab = id % rows.slab_pages;
                k_page = slab.k + in_slab * rows.strides.k_page;
                v_page = slab.v + in_slab * rows.strides.v_page;
            }
        }
        const std::int64_t in_page = row - page * rows.page_size;
        return {of_lane(k_page, page - first) + in_page * rows.strides.k_row,
                of_lane(v_page, page - first) + in_page * rows.strides.v_row};
    }
    [[nodiscard]] __device__ std::int32_t k_row() const { return rows.strides.k_row; }
    [[nodiscard]] __device__ std::int32_t v_row() const { return rows.strides.v_row; }
    __device__ const T* key(std::int32_t row) const { return rows.k(row); }
    __device__ const T* value(std::int32_t row) const { return rows.v(row); }

  private:
    __device__ static const T* of_lane(const T* pointer, std::int32_t lane) {
        return reinterpret_cast<const T*>(static_cast<std::uintptr_t>(__shfl_sync(
            all_lanes, static_cast<unsigned long long>(reinterpret_cast<std::uintptr_t>(pointer)), lane)));
    }
};

/// Tiles begin, begin + stride, ... below end.
struct tile_range {
    std::int32_t begin, end, stride;
};

/// The share of a warp in a block's tiles. Where warps take tiles in turn, a block reads one stretch of
/// memory. With a stretch a warp, caches of 8 GB were read at half the rate: presumably more pages of memory
/// than the GPU's TLBs hold.
template <class Rows>
__device__ tile_range tiles_of_warp(std::int64_t begin, std::int64_t end, int warp) {
    if constexpr (Rows::in_turn) {
        return {static_cast<std::int32_t>(begin + warp), static_cast<std::int32_t>(end), Rows::warps};
    } else {
        const std::int64_t count = end - begin;
        return {static_cast<std::int32_t>(begin + count * warp / Rows::warps),
                static_cast<std::int32_t>(begin + count * (warp + 1) / Rows::warps), 1};
    }
}

/// The rows of a head, and the part of them that a warp takes.
template <class Source>
struct stream_rows {
    Source source;
    std::int32_t head_dim_qk;
    std::int32_t head_dim_vo;
    std::int32_t used;
    tile_range tiles;
};

/// What is in place of row `hole` (-1: nothing). Rows below `limit` are seen.
template <class T>
struct stream_candidate {
    const T* k;
    const T* v;
    std::int32_t hole;
    std::int32_t limit;
};

/// Sizes for the tensor cores: T is bf16 or fp16, head_dims up to Dim, 8 query heads at once.
template <class T_, int Dim_>
struct tensor_rows {
    using T = T_;
    using Compute = float;
    static constexpr int Dim = Dim_;
    static constexpr int heads = 8;
    static constexpr bool in_turn = true;
    static constexpr int warps = Dim > 128 ? 2 : 4;
    static constexpr int threads = 32 * warps;
    static constexpr int half_bytes = stream_tile * Dim * 2;  // the keys of a tile, or the values
    static constexpr int tile_bytes = 2 * half_bytes;
    // 96 KB a block: two blocks per SM, where it has the memory.
    static constexpr int stages = 96 * 1024 / warps / tile_bytes;
    static constexpr int region_bytes = stages * tile_bytes;
    static_assert(stages >= 3 && stream_state<heads>::size(Dim + 4) * 4 <= region_bytes);
    __host__ __device__ static constexpr std::int32_t width(std::int32_t /*head_dim_vo*/) {
        return stream_state<heads>::width(Dim);
    }
    /// Shared memory of one warp.
    __host__ __device__ static constexpr int shared_bytes(std::int32_t /*head_dim_vo*/) {
        return region_bytes;
    }
};

/// Sizes for everything else: one query head at a time, in the precision of T.
template <class T_>
struct plain_rows {
    using T = T_;
    using Compute = T_;
    static constexpr int heads = 1;
    static constexpr bool in_turn = false;  // one lane per row: two tiles at once
    static constexpr int warps = 4;
    static constexpr int threads = 32 * warps;
    __host__ __device__ static constexpr std::int32_t width(std::int32_t head_dim_vo) {
        return stream_state<heads>::width(head_dim_vo);
    }
    __host__ __device__ static constexpr int shared_bytes(std::int32_t head_dim_vo) {
        return static_cast<int>(stream_state<heads>::size(width(head_dim_vo)) * sizeof(Compute));
    }
};

/// Keys stand on the rows of the products (mma's M), query heads on the columns: S^T = K Q^T, O^T = V^T P^T.
/// So one tile of 16 rows serves 8 heads. In an accumulator lane 4 group + pair has rows group, group + 8 and
/// heads 2 pair, 2 pair + 1.
template <class S, class Source>
class tensor_stream {
    using T = typename S::T;
    static constexpr int steps = S::Dim / 16;

  public:
    __device__ tensor_stream(unsigned char* region, const stream_rows<Source>& rows)
        : rows_(rows), region_(region), shared_(shared_address(region)) {}

    /// Sets the first copies on their way.
    __device__ void start() {
#pragma unroll 1
        for (int stage = 0; stage < S::stages; ++stage) {
            load(rows_.tiles.begin + stage * rows_.tiles.stride, stage);
        }
    }

    /// Reads the queries and all tiles.
    __device__ void finish(const stream_queries<T>& queries, const stream_candidate<T>& candidate,
                           const stream_logits<typename S::Compute>& logits) {
        const int lane = lane_id();
        std::uint32_t q[steps][2];
        load_tensor_queries(queries, rows_.head_dim_qk, q);
#pragma unroll
        for (int m = 0; m < steps; ++m) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                o_[m][i] = 0.0f;
            }
        }
        const auto slope = static_cast<float>(logits.slope), cap = static_cast<float>(logits.cap);
        // ldmatrix: lane i names row i % 8 of matrix i / 8. Keys: matrices 0, 1 are rows 0..7 and 8..15 of
        // the first 8 dims, 2, 3 of the next. Values, transposed: 0, 1 are the first and next 8 dims of rows
        // 0..7, 2, 3 of rows 8..15.
        const int k_row = lane % 16, v_row = lane % 8 + 8 * (lane / 16);
        const std::uint32_t k_at = shared_ + k_row * S::Dim * 2;
        const std::uint32_t v_at = shared_ + S::half_bytes + v_row * S::Dim * 2;
        const std::uint32_t k_flip = ((lane / 16) ^ (k_row % 8)) << 4;
        const std::uint32_t v_flip = ((lane / 8 % 2) ^ (v_row % 8)) << 4;
        int stage = 0;
        for (std::int32_t tile = rows_.tiles.begin; tile < rows_.tiles.end; tile += rows_.tiles.stride) {
            copy_wait<S::stages - 1>();
            __syncwarp();
            if (candidate.hole >= 0 && candidate.hole / stream_tile == tile) {
                put(candidate, stage);
                __syncwarp();
            }
            const std::uint32_t at = stage * S::tile_bytes;
            float s[2][4] = {};
#pragma unroll
            for (int k = 0; k < steps; ++k) {
                if (16 * k < rows_.head_dim_qk) {
                    std::uint32_t a[4];
                    load_matrices(a, k_at + at + (k_flip ^ (k << 5)));
                    mma_16x8x16<T>(s[k % 2], a, q[k][0], q[k][1]);
                }
            }
            float weight[4];
            const std::int32_t seen = candidate.limit - tile * stream_tile - lane / 4;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const float x = s[0][i] + s[1][i];
                const float logit =
                    cap != 0.0f ? cap - __fdividef(2.0f * cap, 1.0f + fast_exp2(x * slope)) : x * slope;
                weight[i] = i / 2 * 8 < seen ? logit : minus_infinity();
            }
            float decay[2];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float largest = fmaxf(weight[i], weight[i + 2]);
                largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 4));
                largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 8));
                largest = fmaxf(largest, __shfl_xor_sync(all_lanes, largest, 16));
                largest = fmaxf(largest, max_[i]);
                // Where nothing has been seen yet -inf must not be subtracted from -inf.
                const float finite = largest == minus_infinity() ? 0.0f : largest;
                decay[i] = fast_exp2(max_[i] - finite);
                max_[i] = largest;
                weight[i] = fast_exp2(weight[i] - finite);
                weight[i + 2] = fast_exp2(weight[i + 2] - finite);
                sum_[i] = sum_[i] * decay[i] + weight[i] + weight[i + 2];  // this lane's share
            }
            const std::uint32_t p0 = transpose_8x8(pack<T>(weight[0], weight[1]));
            const std::uint32_t p1 = transpose_8x8(pack<T>(weight[2], weight[3]));
#pragma unroll
            for (int m = 0; m < steps; ++m) {
                if (16 * m < rows_.head_dim_vo) {
                    std::uint32_t a[4];
                    load_matrices_transposed(a, v_at + at + (v_flip ^ (m << 5)));
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        o_[m][i] *= decay[i % 2];
                    }
                    mma_16x8x16<T>(o_[m], a, p0, p1);
                }
            }
            __syncwarp();  // the tile is read
            load(tile + S::stages * rows_.tiles.stride, stage);
            stage = stage + 1 == S::stages ? 0 : stage + 1;
        }
        copy_wait<0>();
    }

    /// Writes the warp's state over its own tiles, which it has read.
    __device__ void store() { store_tensor_state<S>(region_, max_, sum_, o_); }

  private:
    /// Copies a tile, if it is one of this warp's, and closes a group of copies in any case. Each lane has
    /// its chunk of every row that it copies; of rows that are not in use nothing is read, and zeros come.
    __device__ void load(std::int32_t tile, int stage) {
        if (tile < rows_.tiles.end) {
            constexpr int chunks = S::Dim / 8, rows = 32 / chunks;  // at once
            const int chunk = lane_id() % chunks, first = lane_id() / chunks;
            const std::int32_t row = tile * stream_tile + first;
            const auto from = rows_.source.tile(tile);
            const std::int32_t k_row = rows_.source.k_row(), v_row = rows_.source.v_row();
            const T* k = from.k + first * k_row + 8 * chunk;
            const T* v = from.v + first * v_row + 8 * chunk;
            const std::uint32_t of_k = 8 * chunk < rows_.head_dim_qk ? 16 : 0,
                                of_v = 8 * chunk < rows_.head_dim_vo ? 16 : 0;
            const std::uint32_t to = shared_ + stage * S::tile_bytes + first * S::Dim * 2;
#pragma unroll
            for (int i = 0; i < stream_tile; i += rows) {
                const bool in_use = row + i < rows_.used;
                const std::uint32_t at = to + i * S::Dim * 2 + ((chunk ^ ((first + i) % 8)) << 4);
                copy_16(at, k, in_use ? of_k : 0);
                copy_16(at + S::half_bytes, v, in_use ? of_v : 0);
                k += rows * k_row;
                v += rows * v_row;
            }
        }
        copy_commit();
    }

    /// Writes the new token over its place in a tile that has come.
    __device__ void put(const stream_candidate<T>& candidate, int stage) const {
        const int chunk = lane_id(), r = candidate.hole % stream_tile;
        unsigned char* const to = region_ + stage * S::tile_bytes + r * S::Dim * 2 + ((chunk ^ (r % 8)) << 4);
        if (8 * chunk < rows_.head_dim_qk) {
            *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(candidate.k + 8 * chunk);
        }
        if (8 * chunk < rows_.head_dim_vo) {
            *reinterpret_cast<uint4*>(to + S::half_bytes) =
                *reinterpret_cast<const uint4*>(candidate.v + 8 * chunk);
        }
    }
    static_assert(S::Dim / 8 <= 32, "a lane a chunk of a row");

    stream_rows<Source> rows_;
    unsigned char* region_;
    std::uint32_t shared_;
    float max_[2] = {minus_infinity(), minus_infinity()};
    float sum_[2] = {0.0f, 0.0f};
    float o_[steps][4];
};

/// What tensor_stream is, by plain loops.
template <class S, class Source>
class plain_stream {
    using T = typename S::T;

  public:
    __device__ plain_stream(unsigned char* region, const stream_rows<Source>& rows)
        : rows_(rows), region_(region), softmax_(rows.head_dim_qk, rows.head_dim_vo) {}

    __device__ void start() {}

    __device__ void finish(const stream_queries<T>& queries, const stream_candidate<T>& candidate,
                           const stream_logits<typename S::Compute>& logits) {
        const std::int32_t last = rows_.tiles.end * stream_tile;
        softmax_.take(
            rows_.tiles.begin * stream_tile, last < candidate.limit ? last : candidate.limit, queries, logits,
            [](std::int32_t) { return false; },
            [&](std::int32_t row) { return row == candidate.hole ? candidate.k : rows_.source.key(row); },
            [&](std::int32_t row) { return row == candidate.hole ? candidate.v : rows_.source.value(row); });
    }

    __device__ void store() { softmax_.store(region_); }

  private:
    stream_rows<Source> rows_;
    unsigned char* region_;
    plain_softmax<S> softmax_;
};

template <class S, class Source>
struct stream_of;
template <class T, int Dim, class Source>
struct stream_of<tensor_rows<T, Dim>, Source> {
    using type = tensor_stream<tensor_rows<T, Dim>, Source>;
};
template <class T, class Source>
struct stream_of<plain_rows<T>, Source> {
    using type = plain_stream<plain_rows<T>, Source>;
};

}  // namespace paged
}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
