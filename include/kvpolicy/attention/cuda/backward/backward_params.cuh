// The backward pass of attention as its kernels see it: what is cut into which pieces, and the small
// arithmetic that all paths share.
//
// Queries are packed: row m of a super-tile is query m / G and head m % G of its group, so one gathered key
// serves all of them, and a key's visible interval [begin, expiry) in queries is [begin G, expiry G) in
// packed rows. Queries, gradients of outputs and their sums lie in the workspace in this order, in tiles of
// 64 rows that one bulk copy brings.
//
// A work item is a block of up to `block_keys` entries of one super-tile's list times the packed rows that
// any of them can see. Entries of a block are alike: old ones by falling expiry, later ones by rising begin,
// those with a short interval apart.
#pragma once

#include <kvpolicy/attention/cuda/attention_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/masks/expiry.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// What makes weights of a row's logits: exp(logit - reference) factor. Of a row whose lse is large it is
/// computed again (detail::is_large_lse).
template <class T>
struct row_total {
    T reference, factor;
};

/// Packed rows of a tile in the workspace.
inline constexpr int packed_tile = 64;

/// Entries of one super-tile's list.
struct backward_list {
    std::int64_t offset;  // of its entries in the plan; unused without lists
    std::int32_t old;     // entries that begin at or before the super-tile's first query
    std::int32_t brief;   // young entries that live briefly; they come before the others
    std::int32_t total;
    std::int32_t shift;  // without lists: row t begins at query t + shift of the super-tile
};

/// A key of a list, in packed rows of the super-tile. Nobody sees it where expiry <= begin; then its row
/// is not to be read.
struct backward_entry {
    std::int32_t row;
    std::int32_t begin;
    std::int32_t expiry;
    std::int32_t from;  // the bias counts from here on
    float bias;         // times log2 e
    float natural_bias;
};

template <class T>
struct backward_params {
    attention_params<T> call;
    rows_view<const T> out;
    rows_view<const T> d_out;
    plane_view<const float> lse;
    rows_view<T> d_q;
    rows_view<T> d_k;
    rows_view<T> d_v;
    plane_view<compute_t<T>> d_log_bias;  // empty: not wanted

    attention_plan plan;  // its row null: keys by identity, for which the next three stand
    const std::int32_t* starts = nullptr;
    std::int32_t first = 0;
    mask_view mask{};                           // log-biases of keys by identity
    const std::int32_t* key_lengths = nullptr;  // [B]; null: all rows

    std::int32_t super_rows = 0;   // packed rows of a super-tile
    std::int32_t padded_rows = 0;  // the same, up to whole tiles of the kernels
    float slope = 0.0f;            // logit(2) = slope <q, k>; with a soft cap: <q, k> scale / soft cap
    float height = 0.0f;           // soft cap log2 e

    // Workspace.
    T* packed_q = nullptr;      // [lists][padded_rows / 64][D / 64][64][64], swizzled
    T* packed_d_out = nullptr;  // the same
    float* lse2 =
        nullptr;  // [lists][padded_rows]: log2 of the sum; +inf for rows that see nothing or do not exist
    float* delta = nullptr;  // [lists][padded_rows]
    float* sum_q =
        nullptr;  // [lists][padded_rows / 64][D / 64][packed_sum_index]; null: another kernel's task
    float* sum_k = nullptr;         // [B][Hkv][rows][D]
    float* sum_v = nullptr;         // [B][Hkv][rows][D]
    float* sum_bias = nullptr;      // [B][Hkv][rows]; null: not wanted
    std::int32_t* young = nullptr;  // [lists][max_young], the young entries in order; unused without lists
    std::int32_t* brief = nullptr;  // [lists]
    std::int32_t* items = nullptr;  // [lists + 1], items before each list in the order of position_of
    std::int32_t* taken = nullptr;  // [supers], counters of items that were handed out
    std::uint32_t* not_finite = nullptr;        // set where some number of d_q is not finite
    std::uint32_t* large = nullptr;             // set where some lse is large; 16-bit rows
    row_total<compute_t<T>>* totals = nullptr;  // [lists][super_rows], of such rows; other rows
    std::int32_t max_young = 0;                 // young entries that a list may have

    __host__ __device__ std::int32_t heads() const { return call.batch * call.kv_heads; }
    __host__ __device__ std::int32_t lists() const { return heads() * plan.supers; }
    /// Lists are worked off super-tile by super-tile, the last (and longest) first, since those that run
    /// together then share their queries in L2.
    __device__ std::int32_t list_at(std::int32_t position) const {
        const std::int32_t back = position / heads();
        return (position - back * heads()) * plan.supers + (plan.supers - 1 - back);
    }
    __device__ std::int32_t keys_of(std::int32_t b) const {
        const std::int32_t rows = call.rows.k.length;
        const std::int32_t own = key_lengths != nullptr ? key_lengths[b] : rows;
        return own >= 0 && own <= rows ? own : 0;
    }
    /// Packed rows of super-tile j that exist.
    __device__ std::int32_t valid_rows(std::int32_t b, std::int32_t j) const {
        const std::int32_t left = call.length_of(b) - (plan.first + j) * plan.super_q;
        return left <= 0 ? 0 : (left < plan.super_q ? left : plan.super_q) * call.group;
    }

    __device__ backward_list list_of(std::int32_t list) const {
        const std::int32_t head = list / plan.supers, j = list - head * plan.supers;
        if (plan.row != nullptr) {
            return {plan.offset(head, j), plan.old[list], brief[list], plan.total[list], 0};
        }
        const std::int32_t b = head / call.kv_heads;
        const std::int32_t keys = keys_of(b);
        // Saturated: starts come from device memory, and first and starts may be 2^30 on either side of 0.
        std::int32_t shift = first;
        asm("sub.sat.s32 %0, %0, %1;" : "+r"(shift) : "r"(starts != nullptr ? starts[b] : 0));
        asm("sub.sat.s32 %0, %0, %1;" : "+r"(shift) : "r"((plan.first + j) * plan.super_q));
        shift = max(shift, -0x7f000000);  // all rows are old
        const auto clamp = [keys](std::int32_t x) { return x < 0 ? 0 : (x > keys ? keys : x); };
        return {0, clamp(1 - shift), 0, clamp(plan.super_q - shift), shift};
    }

    __device__ backward_entry entry_of(std::int32_t list, const backward_list& all, std::int32_t i) const {
        constexpr float log2_e = 1.4426950408889634f;
        backward_entry e{};
        const auto hide = [&e] {  // a bias of -inf hides the key, whatever it holds
            if (e.bias == -__int_as_float(0x7f800000) && e.from < e.expiry) {
                e.expiry = e.from;
            }
        };
        if (plan.row != nullptr) {
            const std::int32_t place =
                i < all.old ? i : young[static_cast<std::int64_t>(list) * max_young + i - all.old];
            const std::int64_t at = all.offset + place;
            const row_interval interval = plan.interval[at];
            e.row = plan.row[at];
            e.begin = interval.begin * call.group;
            e.expiry = interval.expiry * call.group;
            if (plan.bias != nullptr) {
                e.natural_bias = plan.bias[at];
                e.bias = e.natural_bias * log2_e;
                e.from = plan.bias_from[at] * call.group;
                hide();
            }
            return e;
        }
        const std::int32_t begin = i + all.shift;
        e.row = i;
        e.begin = (begin < 0 ? 0 : begin) * call.group;
        e.expiry = super_rows;
        if (mask.log_bias) {
            const std::int32_t head = list / plan.supers;
            const std::int32_t b = head / call.kv_heads, h = head - b * call.kv_heads;
            std::int32_t from = mask.bias_from_of(h);
            asm("add.sat.s32 %0, %0, %1;" : "+r"(from) : "r"(begin));  // from 2^31 - 1 on it never counts
            e.natural_bias = mask.log_bias.head(b, h)[i];
            e.bias = e.natural_bias * log2_e;
            e.from = (from < 0 ? 0 : (from > plan.super_q ? plan.super_q : from)) * call.group;
            hide();
        }
        return e;
    }
};

/// A block of entries of one list.
struct backward_item {
    std::int32_t list;
    std::int32_t first;
    std::int32_t count;
};

/// How many blocks a list is cut into. Old, briefly living and other young entries are not mixed.
struct list_blocks {
    std::int32_t old, brief, all;
    __device__ list_blocks(const backward_list& list, std::int32_t block_keys)
        : old((list.old + block_keys - 1) / block_keys),
          brief((list.brief + block_keys - 1) / block_keys),
          all(old + brief + (list.total - list.old - list.brief + block_keys - 1) / block_keys) {}
};

/// Block number `block` of a list.
__device__ inline backward_item block_at(std::int32_t list, const backward_list& all, std::int32_t block,
                                         std::int32_t block_keys) {
    const list_blocks blocks(all, block_keys);
    std::int32_t first = block * block_keys, end = all.old;
    if (block >= blocks.old + blocks.brief) {
        first = all.old + all.brief + (block - blocks.old - blocks.brief) * block_keys;
        end = all.total;
    } else if (block >= blocks.old) {
        first = all.old + (block - blocks.old) * block_keys;
        end = all.old + all.brief;
    }
    return {list, first, end - first < block_keys ? end - first : block_keys};
}

/// Item number i of all, in blocks of `block_keys` entries; i < items[lists].
template <class T>
__device__ backward_item item_at(const backward_params<T>& p, std::int32_t i, std::int32_t block_keys) {
    std::int32_t low = 0;  // items[low] <= i < items[high]
    std::int32_t high = p.lists();
    while (high - low > 1) {
        const std::int32_t middle = low + (high - low) / 2;
        (p.items[middle] <= i ? low : high) = middle;
    }
    const std::int32_t list = p.list_at(low);
    return block_at(list, p.list_of(list), i - p.items[low], block_keys);
}

/// What the visible intervals of a block's entries have in common, in packed rows.
struct block_interval {
    std::int32_t first_begin, last_begin, first_expiry, last_expiry;

    /// One entry a lane; lanes without one say so. All lanes of the warp get the result.
    __device__ static block_interval of_warp(const backward_entry& e, bool has) {
        constexpr unsigned all = 0xffffffffu;
        constexpr std::int32_t most = 0x7fffffff;
        const bool seen = has && e.begin < e.expiry;
        return {__reduce_min_sync(all, seen ? e.begin : most), __reduce_max_sync(all, seen ? e.begin : most),
                __reduce_min_sync(all, seen ? e.expiry : 0), __reduce_max_sync(all, seen ? e.expiry : 0)};
    }
    __device__ void join(const block_interval& other) {
        first_begin = min(first_begin, other.first_begin);
        last_begin = max(last_begin, other.last_begin);
        first_expiry = min(first_expiry, other.first_expiry);
        last_expiry = max(last_expiry, other.last_expiry);
    }
    /// Whether all entries of the block see all packed rows of [begin, end).
    __device__ bool whole(std::int32_t begin, std::int32_t end) const {
        return last_begin <= begin && end <= first_expiry;
    }
};

/// Where four numbers of a 64 x 64 tile of sums lie: (row, column), (row, column + 1), (row + 8, column),
/// (row + 8, column + 1) with row % 16 < 8 and an even column. That is what a thread has of a product; the 16
/// rows of a warp are contiguous.
__host__ __device__ constexpr int packed_sum_index(int row, int column) {
    return ((row / 16) * 256 + (column / 8) * 32 + (row % 8) * 4 + (column % 8) / 2) * 4;
}

/// Four sums at once; one instruction from compute capability 9.0 on.
__device__ inline void add_four(float* to, float a, float b, float c, float d) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(a), "f"(b),
                 "f"(c), "f"(d)
                 : "memory");
#else
    atomicAdd(to, a);
    atomicAdd(to + 1, b);
    atomicAdd(to + 2, c);
    atomicAdd(to + 3, d);
#endif
}
__device__ inline void add_two(float* to, float a, float b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    asm volatile("red.relaxed.gpu.global.add.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(a), "f"(b) : "memory");
#else
    atomicAdd(to, a);
    atomicAdd(to + 1, b);
#endif
}

/// tanh to about 2^-22, absolutely.
__device__ inline float fast_tanh(float x) {
    return 1.0f - __fdividef(2.0f, 1.0f + fast_exp2(2.885390081777927f * fminf(fmaxf(x, -40.0f), 40.0f)));
}

/// From a product <q, k> to the weight P and what the gradient of a logit is multiplied with to become that
/// of <q, k> scale.
template <bool Softcap>
__device__ inline float weight_of(float product, float slope, float height, float bias_less_lse,
                                  float& derivative) {
    if constexpr (Softcap) {
        const float t = fast_tanh(product * slope);
        derivative = 1.0f - t * t;
        return fast_exp2(fmaf(t, height, bias_less_lse));
    } else {
        return fast_exp2(fmaf(product, slope, bias_less_lse));
    }
}

/// Two numbers of a row's visible interval, to test a packed row with one comparison.
struct packed_interval {
    std::int32_t begin;
    std::uint32_t span;
    __device__ bool sees(std::int32_t m) const { return static_cast<std::uint32_t>(m - begin) < span; }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
