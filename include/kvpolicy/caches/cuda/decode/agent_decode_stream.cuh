// One warp's share of decode attention: tiles of 16 entries of a head against the query heads of its group. A
// source (contiguous/contiguous_source.cuh, paged/paged_source.cuh) says where entries lie.
//
// A warp copies and reads its own tiles only. It keeps one softmax state per query head; states are merged at
// the end. Entries beyond those in use are not read. What a step changes is in no entry yet, so an edit says
// what attention sees instead:
//     stream_hidden     entries whose key may be evicted are passed over; one warp adds those that stay and
//                       the new token (`stream_extra`). Where the leader block alone knows what the step does
//     stream_candidate  the new token is read in place of the entry that the step frees, or behind the last
//                       entry. Where every block knows
#pragma once

#include <kvpolicy/caches/cuda/decode/warp_softmax.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Tiles of a warp: begin, begin + warps of the block, ... below end where warps take tiles in turn, else all
/// between.
struct tile_range {
    std::int32_t begin, end;
};

/// The share of a warp in a block's tiles. Where warps take tiles in turn, a block reads one stretch of
/// memory. With a stretch a warp, caches of 8 GB were read at half the rate: presumably more pages of memory
/// than the GPU's TLBs hold.
template <class Rows>
__device__ tile_range tiles_of_warp(std::int64_t begin, std::int64_t end, int warp) {
    if constexpr (Rows::in_turn) {
        return {static_cast<std::int32_t>(begin + warp), static_cast<std::int32_t>(end)};
    } else {
        const std::int64_t count = end - begin;
        return {static_cast<std::int32_t>(begin + count * warp / Rows::warps),
                static_cast<std::int32_t>(begin + count * (warp + 1) / Rows::warps)};
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

/// Rows in use that are passed over; -1: none.
struct stream_hidden {
    std::int32_t a = -1;
    std::int32_t b = -1;

    [[nodiscard]] __device__ bool has(std::int32_t row) const { return row == a || row == b; }
    /// Rows below it are seen.
    [[nodiscard]] __device__ std::int32_t limit(std::int32_t used) const { return used; }
    template <class Source>
    [[nodiscard]] __device__ auto key(const Source& source, std::int32_t row) const {
        return source.key(row);
    }
    template <class Source>
    [[nodiscard]] __device__ auto value(const Source& source, std::int32_t row) const {
        return source.value(row);
    }
};

/// What is in place of row `hole` (-1: nothing). Rows below `end` are seen.
template <class T>
struct stream_candidate {
    const T* k;
    const T* v;
    std::int32_t hole;
    std::int32_t end;

    [[nodiscard]] __device__ bool has(std::int32_t /*row*/) const { return false; }
    [[nodiscard]] __device__ std::int32_t limit(std::int32_t /*used*/) const { return end; }
    template <class Source>
    [[nodiscard]] __device__ const T* key(const Source& source, std::int32_t row) const {
        return row == hole ? k : source.key(row);
    }
    template <class Source>
    [[nodiscard]] __device__ const T* value(const Source& source, std::int32_t row) const {
        return row == hole ? v : source.value(row);
    }
};

/// Keys that may be attended to beside the rows: the new token, and the hidden rows. All are asked for before
/// it is known which count.
template <class T>
struct stream_extra {
    static constexpr int most = 3;
    const T* k[most] = {};
    const T* v[most] = {};
    bool counts[most] = {};
    std::int32_t row[most] = {};  // where each is after the step
};

/// Copies tiles to shared memory and attends to them with the tensor cores.
template <class S>
class tensor_stream {
    using T = typename S::T;
    using Source = typename S::Source;
    using Logits = stream_logits<typename S::Compute>;
    static constexpr std::int32_t step = S::in_turn ? S::warps : 1;

  public:
    __device__ tensor_stream(unsigned char* region, const stream_rows<Source>& rows)
        : rows_(rows), region_(region), shared_(shared_address(region)) {
        exact_ = rows.head_dim_qk == S::Dim && rows.head_dim_vo == S::Dim;
    }

    /// Sets the first copies on their way.
    __device__ void start() {
#pragma unroll 1
        for (int stage = 0; stage < S::stages; ++stage) {
            load(rows_.tiles.begin + stage * step, stage);
        }
    }

    /// Sets out to read the queries.
    __device__ void ask(const stream_queries<T>& queries) { softmax_.ask(queries, rows_.head_dim_qk); }

    /// Reads all tiles. `sink` takes the logits: no_logits, or logit_rows (observed/step_logits.cuh).
    template <class Edit, class Sink>
    __device__ void finish(const stream_queries<T>& /*queries*/, const Edit& edit, const Logits& logits,
                           const Sink& sink) {
        softmax_.begin(logits);
        int stage = 0;
#pragma unroll 1
        for (std::int32_t tile = rows_.tiles.begin; tile < rows_.tiles.end; tile += step) {
            copy_wait<S::stages - 1>();
            __syncwarp();
            const seen_rows seen = apply(edit, tile, stage);
            softmax_.take(shared_ + stage * S::tile_bytes, seen.limit, seen.a, seen.b,
                          [&](std::int32_t row, std::int32_t head, float x, float y) {
                              sink.put(tile * stream_tile + row, head, x, y);
                          });
            __syncwarp();  // the tile is read
            load(tile + S::stages * step, stage);
            stage = stage + 1 == S::stages ? 0 : stage + 1;
        }
        copy_wait<0>();
    }

    /// Sets out to read what add() takes, into the first tile's memory: before finish() for a warp without
    /// rows, else after it.
    __device__ void bring(const stream_extra<T>& extra) const {
        constexpr int most = stream_extra<T>::most, chunks = S::Dim / 8;
        const int chunk = lane_id();
        __syncwarp();
        if (chunk < chunks) {
#pragma unroll
            for (int r = 0; r < most; ++r) {
                const bool there = extra.k[r] != nullptr;
                const std::uint32_t at = shared_ + r * S::Dim * 2 + ((chunk ^ (r % 8)) << 4);
                copy_16(at, (there ? extra.k[r] : extra.k[0]) + 8 * chunk,
                        there && 8 * chunk < rows_.head_dim_qk ? 16 : 0);
                copy_16(at + S::half_bytes, (there ? extra.v[r] : extra.v[0]) + 8 * chunk,
                        there && 8 * chunk < rows_.head_dim_vo ? 16 : 0);
            }
        }
        copy_commit();
        // Weights of the tile's other rows are 0, and 0 times a value that is not finite is not.
        auto* const values = reinterpret_cast<uint4*>(region_ + S::half_bytes);
#pragma unroll
        for (int i = most * chunks; i < stream_tile * chunks; i += 32) {
            if (i + lane_id() < stream_tile * chunks) {
                values[i + lane_id()] = uint4{};
            }
        }
    }

    /// Attends to what bring() asked for, after finish().
    template <class Sink>
    __device__ void add(const stream_extra<T>& extra, const stream_queries<T>& /*queries*/,
                        const Logits& /*logits*/, const Sink& sink) {
        copy_wait<0>();
        __syncwarp();
#pragma unroll
        for (int r = 1; r < stream_extra<T>::most; ++r) {
            if (!extra.counts[r]) {
                put_value(r, nullptr, 0);
            }
        }
        __syncwarp();
        softmax_.take(shared_, stream_extra<T>::most, extra.counts[1] ? -1 : 1, extra.counts[2] ? -1 : 2,
                      [&](std::int32_t r, std::int32_t head, float x, float y) {
                          sink.put(row_of(extra, r), head, x, y);
                      });
    }

    /// Writes the warp's state over its own tiles, which it has read.
    __device__ void store() { softmax_.store(region_); }

  private:
    __device__ static std::int32_t row_of(const stream_extra<T>& extra, std::int32_t r) {
        static_assert(stream_extra<T>::most == 3);
        return r == 0 ? extra.row[0] : r == 1 ? extra.row[1] : extra.row[2];
    }
    /// Rows of a tile that count: those below `limit` but a and b.
    struct seen_rows {
        std::int32_t limit, a, b;
    };
    __device__ seen_rows apply(const stream_hidden& hidden, std::int32_t tile, int stage) const {
        const std::int32_t first = tile * stream_tile;
        const bool a = hidden.a / stream_tile == tile && hidden.a >= 0;
        const bool b = hidden.b / stream_tile == tile && hidden.b >= 0;
        if (a || b) {
            // Their weights are 0, and 0 times a value that is not finite is not.
            if (a) {
                put_value(hidden.a - first, nullptr, stage);
            }
            if (b) {
                put_value(hidden.b - first, nullptr, stage);
            }
            __syncwarp();
        }
        return {rows_.used - first, a ? hidden.a - first : -1, b ? hidden.b - first : -1};
    }
    __device__ seen_rows apply(const stream_candidate<T>& candidate, std::int32_t tile, int stage) const {
        const std::int32_t first = tile * stream_tile;
        if (candidate.hole >= 0 && candidate.hole / stream_tile == tile) {
            put(candidate.hole - first, candidate.k, rows_.head_dim_qk, stage * S::tile_bytes);
            put_value(candidate.hole - first, candidate.v, stage);
            __syncwarp();
        }
        return {candidate.end - first, -1, -1};
    }

    /// Copies a tile, if it is one of this warp's, and closes a group of copies in any case. Each lane has
    /// its chunk of every row that it copies; of rows that are not in use nothing is read, and zeros come.
    __device__ void load(std::int32_t tile, int stage) {
        constexpr int chunks = S::Dim / 8, rows = 32 / chunks;  // at once
        const int chunk = lane_id() % chunks, first = lane_id() / chunks;
        const std::int32_t row = tile * stream_tile + first;
        typename Source::row_pointers from{};
        if (Source::dense || tile < rows_.tiles.end) {  // addresses alone need not wait for the test
            from = rows_.source.rows_of(tile, first);
        }
        const T *k = from.k + 8 * chunk, *v = from.v + 8 * chunk;
        const std::uint32_t to = shared_ + stage * S::tile_bytes + first * S::Dim * 2;
        if (tile < rows_.tiles.end) {
            if (Source::dense && exact_ && (tile + 1) * stream_tile <= rows_.used) {
#pragma unroll
                for (int i = 0; i < stream_tile; i += rows) {
                    const std::uint32_t at = to + i * S::Dim * 2 + ((chunk ^ ((first + i) % 8)) << 4);
                    copy_16_once(at, k + i * S::Dim);
                    copy_16_once(at + S::half_bytes, v + i * S::Dim);
                }
            } else {
                constexpr int unrolled = Source::dense ? 1 : stream_tile / rows;
                const std::int32_t k_row = rows_.source.k_row(), v_row = rows_.source.v_row();
                const std::uint32_t of_k = 8 * chunk < rows_.head_dim_qk ? 16 : 0,
                                    of_v = 8 * chunk < rows_.head_dim_vo ? 16 : 0;
#pragma unroll unrolled
                for (int i = 0; i < stream_tile; i += rows) {
                    const bool in_use = row + i < rows_.used;
                    const std::uint32_t at = to + i * S::Dim * 2 + ((chunk ^ ((first + i) % 8)) << 4);
                    copy_16_once(at, k, in_use ? of_k : 0);
                    copy_16_once(at + S::half_bytes, v, in_use ? of_v : 0);
                    k += rows * k_row;
                    v += rows * v_row;
                }
            }
        }
        copy_commit();
    }

    /// Writes a row of `dim` elements over row r of a half tile, zeros where there is none.
    __device__ void put(int r, const T* from, std::int32_t dim, int offset) const {
        const int chunk = lane_id();
        if (chunk < S::Dim / 8) {
            *reinterpret_cast<uint4*>(region_ + offset + r * S::Dim * 2 + ((chunk ^ (r % 8)) << 4)) =
                from != nullptr && 8 * chunk < dim ? *reinterpret_cast<const uint4*>(from + 8 * chunk)
                                                   : uint4{};
        }
    }
    __device__ void put_value(int r, const T* from, int stage) const {
        put(r, from, rows_.head_dim_vo, stage * S::tile_bytes + S::half_bytes);
    }
    static_assert(S::Dim / 8 <= 32, "a lane a chunk of a row");

    stream_rows<Source> rows_;
    unsigned char* region_;
    std::uint32_t shared_;
    bool exact_;  // both head_dims are Dim
    tensor_softmax<S> softmax_;
};

/// What tensor_stream is, by plain loops.
template <class S>
class plain_stream {
    using T = typename S::T;
    using Source = typename S::Source;
    using Logits = stream_logits<typename S::Compute>;

  public:
    __device__ plain_stream(unsigned char* region, const stream_rows<Source>& rows)
        : rows_(rows), region_(region), softmax_(rows.head_dim_qk, rows.head_dim_vo) {}

    __device__ void start() {}
    __device__ void ask(const stream_queries<T>& /*queries*/) {}

    template <class Edit, class Sink>
    __device__ void finish(const stream_queries<T>& queries, const Edit& edit, const Logits& logits,
                           const Sink& sink) {
        const std::int32_t last = rows_.tiles.end * stream_tile, limit = edit.limit(rows_.used);
        softmax_.take(
            rows_.tiles.begin * stream_tile, last < limit ? last : limit, queries, logits,
            [&](std::int32_t row) { return edit.has(row); },
            [&](std::int32_t row) { return edit.key(rows_.source, row); },
            [&](std::int32_t row) { return edit.value(rows_.source, row); },
            [&](std::int32_t row, T logit) { sink.put(row, logit); });
    }

    __device__ void bring(const stream_extra<T>& /*extra*/) const {}

    template <class Sink>
    __device__ void add(const stream_extra<T>& extra, const stream_queries<T>& queries, const Logits& logits,
                        const Sink& sink) {
        static_assert(stream_extra<T>::most == 3);
        softmax_.take(
            0, stream_extra<T>::most, queries, logits,
            [&](std::int32_t row) {
                return !(row == 0 ? extra.counts[0] : row == 1 ? extra.counts[1] : extra.counts[2]);
            },
            [&](std::int32_t row) { return row == 0   ? extra.k[0]
                                           : row == 1 ? extra.k[1]
                                                      : extra.k[2]; },
            [&](std::int32_t row) { return row == 0   ? extra.v[0]
                                           : row == 1 ? extra.v[1]
                                                      : extra.v[2]; },
            [&](std::int32_t row, T logit) {
                sink.put(row == 0 ? extra.row[0] : row == 1 ? extra.row[1] : extra.row[2], logit);
            });
    }

    __device__ void store() { softmax_.store(region_); }

  private:
    stream_rows<Source> rows_;
    unsigned char* region_;
    plain_softmax<S> softmax_;
};

template <class S>
struct stream_of;
template <class T, int Dim, class Layout>
struct stream_of<tensor_rows<T, Dim, Layout>> {
    using type = tensor_stream<tensor_rows<T, Dim, Layout>>;
};
template <class T, class Layout>
struct stream_of<plain_rows<T, Layout>> {
    using type = plain_stream<plain_rows<T, Layout>>;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
