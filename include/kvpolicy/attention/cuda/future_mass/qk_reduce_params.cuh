// causal_lse and future_mass are one computation: rows stand still, columns stream past them, and every row
// reduces the exponentials of its logits over an interval of columns. For the lse rows are queries and
// columns keys, t <= d; for the future mass rows are keys and columns queries, t + w <= d <= t + w + L, once
// for each query head of the group. Neither has a product with values.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/packed_rows.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// What a row reduces. `sum` takes exponents as they are: right as long as no term overflows, and none that
/// counts underflows. `relative` takes them relative to the largest of the row's first tile, which is a term
/// of the sum itself: right as long as no later one is so much larger that the sum overflows. `running` keeps
/// the largest exponent so far beside the sum: always right, and slower. `largest` keeps the largest exponent
/// alone (beta = infinity).
enum class row_reduce { sum, relative, running, largest };

/// Which of the two a kernel is for, and how.
template <bool Mass, row_reduce Reduce>
struct qk_reduce_pass {
    static constexpr bool mass = Mass;
    static constexpr row_reduce reduce = Reduce;
    /// Sums may overflow, and flags say where.
    static constexpr bool quick = Reduce == row_reduce::sum || Reduce == row_reduce::relative;
};
using lse_pass = qk_reduce_pass<false, row_reduce::relative>;
using careful_lse_pass = qk_reduce_pass<false, row_reduce::running>;
using mass_pass = qk_reduce_pass<true, row_reduce::sum>;
using careful_mass_pass = qk_reduce_pass<true, row_reduce::running>;
using largest_mass_pass = qk_reduce_pass<true, row_reduce::largest>;

/// Exponents in base 2: x = scale * s for logits without a soft cap, else scale * cap tanh(s inner), and for
/// a mass + shift + of_lse * lse of the column. C is float, or double for double.
template <class C>
struct qk_reduce_exponents {
    C scale = 0;   // beta log2(e), times the logit's scale where there is no soft cap
    C cap = 0;     // 0: no soft cap
    C inner = 0;   // logit scale / soft cap
    C of_lse = 0;  // -beta log2(e)
    C shift = 0;   // added to every exponent of a mass, taken off its result
};

/// What becomes of the sums of a mass.
template <class C>
struct mass_params {
    C over_beta = 1;        // 1 / beta; 1 for beta = infinity
    C log_epsilon = 0;      // -inf for epsilon = 0
    bool normalize = true;  // divide by N_t; false for beta = infinity
    bool mean = false;      // over the group; else its largest
};

/// A call as its kernels see it.
template <class T, class C = float>
struct qk_reduce_params {
    rows_view<const T> rows;      // [B, row_heads, S, D]
    rows_view<const T> columns;   // [B, Hc, S, D]
    plane_view<const float> lse;  // [B, Hc, S]; a mass's
    plane_view<float> out;        // [B, row_heads, S]
    std::int32_t batch = 0;
    std::int32_t row_heads = 0;
    std::int32_t streams = 1;  // column heads that pass a row head one after the other: G for a mass
    std::int32_t share = 1;    // row heads that share a column head: G for the lse
    std::int32_t length = 0;   // S
    const std::int32_t* lengths = nullptr;  // [B] or null
    const std::int32_t* windows = nullptr;  // [row_heads], or null where all are `window`
    std::int32_t window = 1;
    std::int32_t look_ahead = 0;
    qk_reduce_exponents<C> exponents;
    mass_params<C> mass;
    /// Of a mass's columns: shift + of_lse * lse, -inf where lse is or where there is no column; rows of
    /// bias_stride. Only the Hopper kernel needs it made beforehand.
    float* bias = nullptr;
    std::int64_t bias_stride = 0;
    /// One word per item. A quick pass says which overflowed; a careful pass, where `flags` is given, does
    /// those alone.
    std::int32_t* flags = nullptr;
    std::int32_t* next = nullptr;  // of items that a Hopper kernel hands out, 0 when it begins
    packed_entries packed;         // of rows, columns and lse; results are by sequence

    __device__ std::int32_t length_of(std::int64_t b) const {
        // A length that no view holds counts as an empty sequence, as everywhere on a device.
        const std::int32_t own = lengths != nullptr ? lengths[b] : length;
        return own >= 0 && own <= length ? own : 0;
    }
    __device__ std::int32_t window_of(std::int32_t head) const {
        return windows != nullptr ? windows[head] : window;
    }
    /// The lse of a head's columns.
    __device__ const float* lse_of(std::int64_t b, std::int64_t head) const {
        return lse.head(b, head) + packed.rows.begin(b);
    }
    __device__ std::int64_t bias_row(std::int64_t b, std::int64_t of_columns) const {
        return (b * columns.heads + of_columns) * bias_stride;
    }
    __device__ std::int32_t column_head(std::int32_t head, std::int32_t stream) const {
        return head / share * streams + stream;
    }
};

/// Rows [first, first + Rows) of one row head of one sequence, and the tiles of columns that they meet. Row r
/// sees column c iff low <= c - r <= low + span, where c < length.
struct qk_reduce_item {
    std::int32_t b;
    std::int32_t head;
    std::int32_t first;
    std::int32_t length;  // of the sequence
    std::int32_t low;
    std::uint32_t span;
    std::int32_t first_tile;
    std::int32_t tiles;  // of Columns columns each; 0: the rows see nothing

    /// Whether every row of [row, row + rows) sees every column of [column, column + columns).
    __device__ bool full(std::int32_t row, std::int32_t rows, std::int32_t column,
                         std::int32_t columns) const {
        const std::int32_t least = column - (row + rows - 1);
        const std::int32_t most = column + columns - 1 - row;
        return least >= low && static_cast<std::uint32_t>(most - low) <= span && column + columns <= length;
    }
    /// Whether some row of them sees some column.
    __device__ bool any(std::int32_t row, std::int32_t rows, std::int32_t column,
                        std::int32_t columns) const {
        const std::int32_t least = column - (row + rows - 1);
        const std::int32_t most = column + columns - 1 - row;
        return most >= low && (least < low || static_cast<std::uint32_t>(least - low) <= span);
    }
};

/// Heads whose items are in flight together. Those with the longest way to go come first, across these heads,
/// so that the GPU runs empty all at once; more heads together would stream more columns than the L2 cache
/// holds.
__host__ __device__ inline std::int32_t heads_together(std::int32_t length) {
    constexpr std::int32_t columns = 8 * 16384;
    return length >= columns / 8 ? 8 : length <= columns / 64 ? 64 : columns / length;
}

/// The item of a block: groups of heads one after the other, within a group the longest items first. Lengths
/// may be anything up to 2^31 - 1, so what could pass it is computed in 64 bits.
template <class Pass, int Rows, int Columns, class T, class C>
__device__ qk_reduce_item qk_reduce_item_of(const qk_reduce_params<T, C>& params, std::int32_t block) {
    const std::int32_t row_tiles = (params.length + Rows - 1) / Rows;
    const std::int32_t heads = params.batch * params.row_heads;
    const std::int32_t most = heads_together(params.length);
    const std::int32_t group = block / (row_tiles * most);
    const std::int32_t before = group * most;
    const std::int32_t together = heads - before < most ? heads - before : most;
    const std::int32_t inside = block - before * row_tiles;
    const std::int32_t head = before + inside % together;
    const std::int32_t tile = inside / together;
    qk_reduce_item item;
    item.b = head / params.row_heads;
    item.head = head % params.row_heads;
    item.length = params.length_of(item.b);
    // Early keys have the most queries, late queries the most keys.
    item.first = (Pass::mass ? tile : row_tiles - 1 - tile) * Rows;
    std::int64_t low = -std::int64_t{params.length};
    std::int64_t high = 0;
    if constexpr (Pass::mass) {
        low = params.window_of(item.head);
        high = low + params.look_ahead;
        if (high > params.length) {
            high = low > params.length ? low : params.length;
        }
    }
    item.low = static_cast<std::int32_t>(low);
    item.span = static_cast<std::uint32_t>(high - low);
    std::int64_t begin = item.first + low;
    std::int64_t end = item.first + Rows + high;  // one past the last column
    begin = begin < 0 ? 0 : begin;
    end = end > item.length ? item.length : end;
    const bool some = item.first < item.length && begin < end;
    item.first_tile = some ? static_cast<std::int32_t>(begin / Columns) : 0;
    item.tiles = some ? static_cast<std::int32_t>((end - 1) / Columns) - item.first_tile + 1 : 0;
    return item;
}

/// The first column of tile `turn` (0 to tiles - 1) in the order of the pass: from the far end of the
/// sequence for a mass, from its beginning for the lse. So blocks that start together read the same
/// columns, and the masked tiles come last.
template <class Pass, int Columns>
__device__ std::int32_t qk_reduce_column(const qk_reduce_item& item, std::int32_t turn) {
    return (Pass::mass ? item.first_tile + item.tiles - 1 - turn : item.first_tile + turn) * Columns;
}

/// The bias of a column, from its lse: -inf where it must not count.
template <class T>
__device__ inline float qk_reduce_bias(const qk_reduce_params<T>& params, const float* lse,
                                       std::int32_t column, std::int32_t length) {
    if (column >= length) {
        return -INFINITY;
    }
    const float of = lse[column];
    return of == -INFINITY ? of : fmaf(of, params.exponents.of_lse, params.exponents.shift);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
