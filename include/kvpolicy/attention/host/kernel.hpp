// Attention of the query heads of one KV head over segments of keys: the core that attend() and the caches
// share.
//
// A tile is a range of queries; its rows are (position, head of the group) pairs, position-major, so one key
// serves the whole group. A tile scans the lifetimes once (collect.hpp), and every block of up to 64 live
// keys goes through three passes: products with the queries, softmax, products with the values. The softmax
// is the online one: a running maximum and sum per row, fp32 with the sum in double; outputs are rescaled
// when the maximum moves.
//
//   - prefill (many rows): the block's keys and values are converted and packed once for the whole tile, then
//     strips of 24 rows run register-blocked products over them. Memory does not grow with the keys.
//   - decode (up to direct_rows rows): keys and values are read in place, once for all heads of the group.
//
// Cost is proportional to the live keys, plus the scan. Bodies are portable or AVX2, by the argument.
#pragma once

#include <kvpolicy/attention/host/avx2.hpp>
#include <kvpolicy/attention/host/portable.hpp>
#include <kvpolicy/attention/host/tile.hpp>
#include <kvpolicy/attention/host/types.hpp>
#include <kvpolicy/attention/softmax_state.hpp>
#include <kvpolicy/core/context.hpp>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <type_traits>

namespace kvpolicy::host_backend {

/// How many queries one task should take: enough rows to pay for packing, few enough that queries, outputs
/// and one block of keys stay in a second-level cache. Depends on the shape only.
template <Storage T>
std::int32_t attend_tile(const attention_shape& shape, std::int32_t group) {
    const std::int32_t widest = std::max(shape.head_dim_qk, shape.head_dim_vo);
    const std::int32_t rows = std::clamp(10 * 128 / std::max(widest, 1), 2, 10) * strip_rows;
    return std::max(rows / std::max(group, 1), 1);
}

/// As many tasks as keep any machine busy enough: none is split then.
inline constexpr std::int64_t enough_attend_tasks = 32;

/// Into how many parts a call that has `tasks` (KV head, tile) pairs should split each one's `keys`, so that
/// few long tasks can use several threads: 1 where there are enough tasks or few keys. Depends on sizes only,
/// never on threads.
inline std::int32_t attend_splits(std::int64_t tasks, std::int64_t keys) {
    constexpr std::int64_t least_keys = 2048;
    if (tasks <= 0 || tasks >= enough_attend_tasks) {
        return 1;
    }
    return static_cast<std::int32_t>(
        std::clamp<std::int64_t>(keys / least_keys, 1, enough_attend_tasks / tasks));
}

/// Bytes of scratch for attend_head and attend_head_split on ranges of up to `count` queries. Any alignment
/// will do. No body needs more for more keys.
template <Storage T>
std::size_t attend_scratch_bytes(const attention_shape& shape, std::int32_t group, std::int32_t count,
                                 std::int64_t /*keys*/ = 0) {
    const std::int64_t tile = std::min(count, attend_tile<T>(shape, group));
    // The last tile of a range may be a small one, which packs nothing, so the largest decides.
    return tile_scratch<T>(nullptr, shape, std::max<std::int64_t>(tile, 1) * group).bytes;
}

/// Calls run(kernels<T>{}) with the bodies for an instruction set.
template <Storage T, class Run>
void with_kernels(isa set, Run&& run) {
#if KVPOLICY_X86
    if constexpr (!std::is_same_v<T, double>) {
        if (set == isa::avx2) {
            run(avx2_kernels<T>{});
            return;
        }
    }
#endif
    static_cast<void>(set);
    run(portable_kernels<T>{});
}

/// Attention of queries [query_begin, query_end) of one KV head's group over all the segments' keys (see
/// key_segment for which keys a query sees). `segments(visit)` hands the segments to visit, once for every
/// tile of queries. Writes out, and lse (natural logarithm) where wanted; queries that see nothing get 0 and
/// -inf. One task; `scratch` has attend_scratch_bytes for that many queries.
template <Storage T, class Segments>
void attend_head(isa set, const attention_shape& shape, const Segments& segments, const query_block<T>& block,
                 std::int32_t query_begin, std::int32_t query_end, void* scratch) {
    const std::int32_t tile = attend_tile<T>(shape, block.group);
    with_kernels<T>(set, [&](auto kernels) {
        for (std::int32_t begin = query_begin; begin < query_end; begin += tile) {
            tile_pass<decltype(kernels), T> pass(shape, block, begin, std::min(query_end, begin + tile),
                                                 scratch);
            pass.run(segments, 0, std::numeric_limits<std::int64_t>::max());
            pass.store();
        }
    });
}

/// The same over rows [key_begin, key_end) of the segments put end to end, as a partial result: out [queries
/// * group][Dv] in the compute type and lse [queries * group], row = (query - query_begin) * group + head. At
/// most attend_tile queries. merge_splits makes results of them.
template <Storage T, class Segments>
void attend_head_split(isa set, const attention_shape& shape, const Segments& segments,
                       const query_block<T>& block, std::int32_t query_begin, std::int32_t query_end,
                       std::int64_t key_begin, std::int64_t key_end, compute_t<T>* out, float* lse,
                       void* scratch) {
    with_kernels<T>(set, [&](auto kernels) {
        tile_pass<decltype(kernels), T> pass(shape, block, query_begin, query_end, scratch);
        pass.run(segments, key_begin, key_end);
        pass.store_partial(out, lse);
    });
}

/// Segments that lie in an array, as attend_head takes them.
template <Storage T>
auto segments_in(const key_segment<T>* segments, int count) {
    return [segments, count](auto&& visit) {
        for (int s = 0; s < count; ++s) {
            visit(segments[s]);
        }
    };
}

/// attend_head and attend_head_split over an array of segments.
template <Storage T>
void attend_head(isa set, const attention_shape& shape, const key_segment<T>* segments, int segment_count,
                 const query_block<T>& block, std::int32_t query_begin, std::int32_t query_end,
                 void* scratch) {
    attend_head(set, shape, segments_in(segments, segment_count), block, query_begin, query_end, scratch);
}
template <Storage T>
void attend_head_split(isa set, const attention_shape& shape, const key_segment<T>* segments,
                       int segment_count, const query_block<T>& block, std::int32_t query_begin,
                       std::int32_t query_end, std::int64_t key_begin, std::int64_t key_end,
                       compute_t<T>* out, float* lse, void* scratch) {
    attend_head_split(set, shape, segments_in(segments, segment_count), block, query_begin, query_end,
                      key_begin, key_end, out, lse, scratch);
}

/// Merges `splits` partial results, out [splits][rows][Dv] and lse [splits][rows], into the block's out and
/// lse. The first split's memory is used up. In order, so the result does not depend on who computed what.
template <Storage T>
void merge_splits(const attention_shape& shape, const query_block<T>& block, std::int32_t query_begin,
                  std::int32_t query_end, std::int32_t splits, compute_t<T>* out, float* lse) {
    using real = compute_t<T>;
    const std::int64_t rows = std::int64_t{query_end - query_begin} * block.group;
    for (std::int64_t r = 0; r < rows; ++r) {
        real* merged = out + r * shape.head_dim_vo;
        real merged_lse = static_cast<real>(lse[r]);
        for (std::int32_t s = 1; s < splits; ++s) {
            merge_output(merged, merged_lse, out + (s * rows + r) * shape.head_dim_vo,
                         static_cast<real>(lse[s * rows + r]), shape.head_dim_vo);
        }
        const std::int64_t i = query_begin + r / block.group;
        const std::int64_t g = r % block.group;
        T* to = block.out + i * block.out_row_stride + g * block.out_head_stride;
        for (std::int32_t c = 0; c < shape.head_dim_vo; ++c) {
            to[c] = static_cast<T>(merged[c]);
        }
        if (block.lse != nullptr) {
            block.lse[i * block.lse_row_stride + g * block.lse_head_stride] = static_cast<float>(merged_lse);
        }
    }
}

}  // namespace kvpolicy::host_backend
