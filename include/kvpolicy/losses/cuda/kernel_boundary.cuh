// The boundary loss: draws and the boundary key of each query, sums over a head, then value and gradient. A
// block has a tile of a plane (a head of a sequence); sums over tiles are made in one order, or of integers.
//
// As q grows the cutoff's rank only falls, so a key is the boundary of one run of queries, and its gradient a
// difference of two prefix sums over them, in double: inside a tile, and over the tiles before it.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/random.hpp>
#include <kvpolicy/core/share.hpp>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/block_reduce.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/losses/boundary.hpp>
#include <kvpolicy/masks/cuda/mask_params.cuh>
#include <kvpolicy/policies/cutoff.hpp>
#include <kvpolicy/policies/ranking.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int boundary_threads = 512;  // a tile's tokens, too

/// What a plane has of the examples.
struct boundary_plane {
    std::int64_t sampled, count, kept, agreed;
    double value, log_gamma;
    double slope;  // sum of d delta
};

/// A tile's part of that.
struct boundary_tile {
    double slope;   // sum of d delta
    double before;  // of the tiles before it
    double value, log_gamma;
    std::int64_t agreed;
};

/// The numbers of the loss that kernels need, ready for them.
struct boundary_numbers {
    double temperature, omega_min, margin_temperature, least, most, scale;
    bool balance;
    std::int32_t count;  // of the sampler
    std::int64_t late;   // draws that are the later of two, of `count`
    float late_share;    // of draws of a packed segment
    std::uint64_t seed;
    std::int32_t layer;  // the first
    std::int32_t heads;  // of a layer
};

template <class Gate, class Keep>
struct boundary_params {
    mask_params<Gate, Keep> mask;  // its scores are the target
    plane_view<const float> scores;
    plane_view<float> d_scores;
    boundary_numbers numbers;
    // Workspace, rows of [planes, length].
    const std::int32_t* rank = nullptr;
    const std::int32_t* cutoff = nullptr;
    std::int32_t* order = nullptr;  // token of a rank
    std::int32_t* drawn = nullptr;
    std::int32_t* first = nullptr;  // of the queries whose boundary a key is; -1
    std::int32_t* last = nullptr;   // one behind them
    double* prefix = nullptr;       // sum of d delta before a query, of its tile's
    double* slope = nullptr;        // d delta
    boundary_plane* planes = nullptr;
    // Of packed segments: [planes, segments + 1] draws before each, the last of all; null: one segment
    std::int32_t* first_draw = nullptr;
    std::int64_t* valid = nullptr;  // [planes]: queries that may be drawn
    std::int32_t tiles = 1;         // of a plane
    boundary_tile* sums = nullptr;  // [planes, tiles]
};

/// One query of a plane.
struct boundary_example {
    std::int32_t old = -1;   // the boundary key; -1 where the budget is not full
    std::int32_t fresh = 0;  // the key that leaves the window
    bool counts = false;     // drawn, and fresh competes and is not the boundary
    bool keeps = false;
};

/// A plane, and one of its tiles, as a block sees them.
template <class Gate, class Keep>
struct boundary_row {
    const boundary_params<Gate, Keep>& p;
    std::int64_t plane;
    std::int32_t tile;
    std::int64_t row;
    std::int32_t b, h, length;
    HeadParams head_params;

    /// Of `blocks` blocks per plane.
    __device__ explicit boundary_row(const boundary_params<Gate, Keep>& params, std::int32_t blocks)
        : p(params),
          plane(blockIdx.x / static_cast<std::uint32_t>(blocks)),
          tile(static_cast<std::int32_t>(blockIdx.x % static_cast<std::uint32_t>(blocks))),
          row(plane * params.mask.length),
          b(params.mask.sequence_of(plane)),
          h(params.mask.head_of(plane)),
          length(length_of_plane(params, b)),
          head_params(params.mask.all_params.of(h)) {}

    /// Tokens of sequence b: 0 where the edges of packed segments, which are all 0 then, were refused.
    __device__ static std::int32_t length_of_plane(const boundary_params<Gate, Keep>& params,
                                                   std::int32_t b) {
        const std::int32_t given = params.mask.length_of(b);
        return params.mask.edges == nullptr ? given : min(given, params.mask.edges[params.mask.segments]);
    }

    /// This thread's token of the tile; it may be beyond the length.
    __device__ std::int32_t token() const {
        return tile * boundary_threads + static_cast<std::int32_t>(threadIdx.x);
    }
    __device__ std::int64_t saturated() const {
        return std::int64_t{head_params.sinks} + head_params.window + head_params.budget;
    }
    /// The segment of token t < length.
    __device__ segment_range segment_of(std::int32_t t) const {
        return p.mask.segment(b, p.mask.segment_of_token(t));
    }
    /// Queries of a segment that may be drawn: its last ones.
    __device__ std::int64_t valid_of(const segment_range& segment) const {
        return segment.length() > saturated() ? segment.length() - saturated() : 0;
    }
    /// Queries that may be drawn.
    __device__ std::int64_t valid() const {
        return p.valid != nullptr ? p.valid[plane] : valid_of({0, length, 0});
    }
    /// Draws of a segment where not all are taken: its share, rounded up, so that none goes without.
    __device__ std::int64_t draws_of(const segment_range& segment, std::int64_t of_all) const {
        const std::int64_t here = valid_of(segment);
        return here == 0 ? 0 : (p.numbers.count * here + of_all - 1) / of_all;
    }
    __device__ bool draws_all() const { return p.numbers.count >= valid(); }
    /// Sum of d delta over the queries before q.
    __device__ double prefix(std::int32_t q) const {
        return q >= length ? p.planes[plane].slope
                           : p.sums[plane * p.tiles + q / boundary_threads].before + p.prefix[row + q];
    }
    /// The boundary key at q: the worst of the k that are held, once they were k before q's top-k update.
    __device__ std::int32_t boundary(const segment_range& segment, std::int32_t q) const {
        const std::int32_t at = q - segment.begin;
        if (at < saturated() || q >= segment.end || at < 1 || head_params.budget == 0) {
            return -1;
        }
        const std::int32_t now = p.cutoff[row + q];
        return now == open_cutoff || p.cutoff[row + q - 1] == open_cutoff
                   ? -1
                   : p.order[row + segment.begin + now];
    }
    __device__ boundary_example example(const segment_range& segment, std::int32_t q) const {
        boundary_example e;
        e.old = boundary(segment, q);
        if (e.old < 0) {
            return e;
        }
        e.fresh = q - head_params.window;
        e.counts = p.drawn[row + q] > 0 && e.fresh != e.old &&
                   p.mask.leaves(head_params, e.fresh - segment.begin, segment.length());
        e.keeps = e.counts && p.rank[row + e.fresh] <= p.cutoff[row + q];
        return e;
    }
    /// Where the run of queries whose boundary is e.old begins or ends at q.
    __device__ __forceinline__ void note_run(const segment_range& segment, const boundary_example& e,
                                             std::int32_t q) const {
        if (e.old >= 0) {
            if (boundary(segment, q - 1) != e.old) {
                p.first[row + e.old] = q;
            }
            if (boundary(segment, q + 1) != e.old) {
                p.last[row + e.old] = q + 1;
            }
        }
    }
};

/// What each packed segment has of a plane's draws.
///
/// Grid: planes. Block: boundary_threads. Shared memory: one number per warp (static). Reads edges
/// [segments + 1]. Overwrites valid [planes] and first_draw [planes, segments + 1].
/// 1. Queries that may be drawn, of all segments.
/// 2. Draws before each segment.
template <class Gate, class Keep>
__global__ void __launch_bounds__(boundary_threads)
    boundary_shares_kernel(const boundary_params<Gate, Keep> params) {
    __shared__ long long shared[boundary_threads / 32];
    const boundary_row<Gate, Keep> of(params, 1);
    const std::int32_t segments = params.mask.segments;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    // 1. Queries.
    long long all = 0;
    for (std::int32_t i = thread; i < segments; i += boundary_threads) {
        all += of.valid_of(params.mask.segment(of.b, i));
    }
    all = sum_over_block<boundary_threads>(all, shared);
    if (thread == 0) {
        params.valid[of.plane] = all;
    }
    // 2. Draws, by the first warp.
    if (thread >= 32) {
        return;
    }
    std::int32_t* const first = params.first_draw + of.plane * (segments + 1);
    std::int32_t before = 0;
    for (std::int32_t i = thread; i - thread < segments; i += 32) {
        const std::int64_t draws = i < segments ? of.draws_of(params.mask.segment(of.b, i), all) : 0;
        const std::int32_t through = warp_inclusive_sum(static_cast<std::int32_t>(draws));
        if (i < segments) {
            first[i] = before + through - static_cast<std::int32_t>(draws);
        }
        before += __shfl_sync(all_lanes, through, 31);
    }
    if (thread == 0) {
        first[segments] = before;
    }
}

/// Clears a call's arrays and inverts ranks: order[rank] = token, of each packed segment.
///
/// Grid: planes * tiles. Block: boundary_threads, a token each. Shared memory: none. Reads rank [planes, S],
/// and of packed segments valid and first_draw.
/// Overwrites order, drawn, first and last [planes, S] and planes [planes]. Where all queries are drawn,
/// drawn = 1.
template <class Gate, class Keep>
__global__ void __launch_bounds__(boundary_threads)
    boundary_begin_kernel(const boundary_params<Gate, Keep> params) {
    const boundary_row<Gate, Keep> of(params, params.tiles);
    const std::int32_t t = of.token();
    if (t == 0) {
        const std::int32_t segments = params.mask.segments;
        const std::int64_t drawn = params.first_draw != nullptr
                                       ? params.first_draw[of.plane * (segments + 1) + segments]
                                       : params.numbers.count;
        params.planes[of.plane] = {of.draws_all() ? of.valid() : drawn, 0, 0, 0, 0.0, 0.0, 0.0};
    }
    if (t < of.length) {
        const segment_range segment = of.segment_of(t);
        params.drawn[of.row + t] = of.draws_all() && t - segment.begin >= of.saturated() ? 1 : 0;
        params.first[of.row + t] = -1;
        params.last[of.row + t] = -1;
        if (params.mask.leaves(of.head_params, t - segment.begin, segment.length())) {
            params.order[of.row + segment.begin + params.rank[of.row + t]] = t;
        }
    }
}

/// Draws queries, where not all are taken: numbers.count draws per plane, a share of them late-biased. Packed
/// segments draw for themselves, one after another.
///
/// Grid: planes * blocks. Block: boundary_threads, a draw each. Shared memory: none. Reads first_draw
/// [planes, segments + 1] of packed segments. Adds to drawn [planes, S].
template <class Gate, class Keep>
__global__ void __launch_bounds__(boundary_threads)
    boundary_draw_kernel(const boundary_params<Gate, Keep> params, const std::int32_t blocks) {
    const boundary_row<Gate, Keep> of(params, blocks);
    const boundary_numbers& numbers = params.numbers;
    const std::int32_t i = of.token();
    segment_range segment{0, of.length, 0};
    std::int32_t first = 0, draws = numbers.count;
    std::int64_t late = numbers.late;
    if (params.first_draw != nullptr) {
        const std::int32_t* const firsts = params.first_draw + of.plane * (params.mask.segments + 1);
        segment = params.mask.segment(
            of.b, last_begun(params.mask.segments, [&](std::int32_t s) { return firsts[s] <= i; }));
        first = firsts[segment.index];
        draws = firsts[segment.index + 1] - first;
        late = nearest_count_of_share(numbers.late_share, draws);
    }
    if (of.draws_all() || i - first >= draws) {
        return;
    }
    // As the host numbers them: the layer, then the plane in it.
    const std::uint64_t stream =
        (static_cast<std::uint64_t>(numbers.layer + of.h / numbers.heads) << 40) +
        static_cast<std::uint64_t>(std::int64_t{of.b} * numbers.heads + of.h % numbers.heads);
    const auto places = static_cast<std::uint32_t>(of.valid_of(segment));
    const std::uint64_t index = 2 * static_cast<std::uint64_t>(i);
    std::uint32_t place = random_below(places, numbers.seed, stream, index);
    if (i - first < late) {
        const std::uint32_t other = random_below(places, numbers.seed, stream, index + 1);
        place = other > place ? other : place;
    }
    atomicAdd(params.drawn + of.row + segment.begin + of.saturated() + place, 1);
}

/// How many examples a plane has, and how many of them keep the new key.
///
/// Grid: planes * tiles. Block: boundary_threads, a query each. Shared memory: one number per warp (static).
/// Reads drawn, order, rank and cutoff [planes, S]. Adds to planes[].count and kept.
template <class Gate, class Keep>
__global__ void __launch_bounds__(boundary_threads)
    boundary_examples_kernel(const boundary_params<Gate, Keep> params) {
    __shared__ long long shared[boundary_threads / 32];
    const boundary_row<Gate, Keep> of(params, params.tiles);
    const std::int32_t q = of.token();
    long long count = 0, kept = 0;
    if (q < of.length) {
        const boundary_example e = of.example(of.segment_of(q), q);
        count = e.counts ? params.drawn[of.row + q] : 0;
        kept = e.keeps ? params.drawn[of.row + q] : 0;
    }
    count = sum_over_block<boundary_threads>(count, shared);
    kept = sum_over_block<boundary_threads>(kept, shared);
    if (threadIdx.x == 0 && count > 0) {
        boundary_plane& mine = params.planes[of.plane];
        atomicAdd(reinterpret_cast<unsigned long long*>(&mine.count), static_cast<unsigned long long>(count));
        atomicAdd(reinterpret_cast<unsigned long long*>(&mine.kept), static_cast<unsigned long long>(kept));
    }
}

__device__ inline double boundary_sigmoid(double x) {
    const double e = exp(-fabs(x));
    return (x < 0.0 ? e : 1.0) / (1.0 + e);
}

/// Inclusive sum over the lanes of a warp.
__device__ __forceinline__ double warp_inclusive_sum_of(double sum) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const double other = __shfl_up_sync(all_lanes, sum, static_cast<unsigned>(step));
        sum += lane_id() >= step ? other : 0.0;
    }
    return sum;
}

/// The examples of a call that a head weighs its own by: of its layer, of the head, and of those the kept
/// ones.
struct example_counts {
    long long all = 0, count = 0, kept = 0;
};

/// By all threads of a block; `shared` has a number for each warp.
template <class Gate, class Keep>
__device__ __forceinline__ example_counts counts_of_head(const boundary_params<Gate, Keep>& params,
                                                         std::int32_t own_head, long long* shared) {
    const std::int32_t heads = params.mask.heads;
    const std::int32_t heads_of_layer = params.numbers.heads;
    example_counts counts;
    for (std::int64_t plane = threadIdx.x; plane < params.mask.planes(); plane += boundary_threads) {
        const boundary_plane& one = params.planes[plane];
        const auto h = static_cast<std::int32_t>(plane % heads);
        counts.all += h / heads_of_layer == own_head / heads_of_layer ? one.count : 0;
        counts.count += h == own_head ? one.count : 0;
        counts.kept += h == own_head ? one.kept : 0;
    }
    counts.all = sum_over_block<boundary_threads>(counts.all, shared);
    counts.count = sum_over_block<boundary_threads>(counts.count, shared);
    counts.kept = sum_over_block<boundary_threads>(counts.kept, shared);
    return counts;
}

/// Value and d delta of a tile's queries, prefix sums of d delta in the tile, and the tile's sums.
///
/// Grid: planes * tiles. Block: boundary_threads, a query each. Shared memory: two numbers per warp (static).
/// Reads target and scores [B, Hkv, S], fp32, and what boundary_examples_kernel left. Overwrites slope and
/// prefix [planes, S] (double), sums [planes, tiles], and first and last of the keys that are a boundary
/// here.
/// 1. Counts of the layer and of the head.
/// 2. One example per thread.
/// 3. Prefix sums.
/// 4. The tile's sums.
template <class Gate, class Keep>
__global__ void __launch_bounds__(boundary_threads)
    boundary_gradient_kernel(const boundary_params<Gate, Keep> params) {
    constexpr int warps = boundary_threads / 32;
    __shared__ double shared[warps];
    __shared__ long long shared_counts[warps];
    const boundary_row<Gate, Keep> of(params, params.tiles);
    const boundary_numbers& numbers = params.numbers;
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    // 1. Counts of the layer and of the head.
    const auto [all, count, kept] = counts_of_head(params, of.h, shared_counts);
    const double mean = all > 0 ? numbers.scale / static_cast<double>(all) : 0.0;
    double of_drops = 1.0, of_keeps = 1.0;
    if (numbers.balance && kept > 0 && kept < count) {
        const double kept_share = static_cast<double>(kept) / static_cast<double>(count);
        of_drops = fmin(fmax(0.5 / (1.0 - kept_share), numbers.least), numbers.most);
        of_keeps = fmin(fmax(0.5 / kept_share, numbers.least), numbers.most);
        const double over = (1.0 - kept_share) * of_drops + kept_share * of_keeps;
        of_drops /= over;
        of_keeps /= over;
    }
    const float* const goal = params.mask.scores.head(of.b, of.h);
    const float* const score = params.scores.head(of.b, of.h);
    double value = 0.0, of_gamma = 0.0;
    long long agreed = 0;
    // 2. One example per thread.
    const std::int32_t q = of.token();
    double d_delta = 0.0;
    if (q < of.length) {
        const segment_range segment = of.segment_of(q);
        const boundary_example e = of.example(segment, q);
        of.note_run(segment, e, q);
        if (e.counts) {
            const double gamma = static_cast<double>(of.head_params.log_gamma);
            const double y = e.keeps ? 1.0 : -1.0;
            const std::int32_t age = e.old - e.fresh;
            double margin = effective_score(goal[e.fresh], of.head_params.log_gamma, 1, e.fresh, q) -
                            effective_score(goal[e.old], of.head_params.log_gamma, 1, e.old, q);
            margin = margin == margin ? margin : 0.0;  // two infinite targets of one sign are a tie
            const float fresh = score[e.fresh], old = score[e.old];
            if (!(fabsf(fresh) <= 3.402823466e38f && fabsf(old) <= 3.402823466e38f)) {
                params.mask.report(of.b, status_not_finite);
            }
            const double delta =
                static_cast<double>(fresh) - static_cast<double>(old) + static_cast<double>(age) * gamma;
            const double omega =
                numbers.omega_min +
                (1.0 - numbers.omega_min) * boundary_sigmoid(fabs(margin) / numbers.margin_temperature);
            const std::int32_t times = params.drawn[of.row + q];
            const double weight = mean * omega * (e.keeps ? of_keeps : of_drops) * times;
            const double x = -y * delta / numbers.temperature;
            value += weight * (fmax(x, 0.0) + log1p(exp(-fabs(x))));
            d_delta = -weight * y / numbers.temperature * boundary_sigmoid(x);
            of_gamma += d_delta * age;
            agreed += (delta > 0.0) == e.keeps ? times : 0;
        }
    }
    // 3. Prefix sums.
    const double sum = warp_inclusive_sum_of(d_delta);
    if (lane_id() == 31) {
        shared[warp_id()] = sum;
    }
    __syncthreads();
    double before = 0.0, tile = 0.0;
    for (int w = 0; w < warps; ++w) {
        before += w < warp_id() ? shared[w] : 0.0;
        tile += shared[w];
    }
    if (q < of.length) {
        params.slope[of.row + q] = d_delta;
        params.prefix[of.row + q] = before + (sum - d_delta);
    }
    // 4. The tile's sums.
    value = sum_over_block<boundary_threads>(value, shared);
    of_gamma = sum_over_block<boundary_threads>(of_gamma, shared);
    agreed = sum_over_block<boundary_threads>(agreed, shared_counts);
    if (thread == 0) {
        params.sums[of.plane * params.tiles + of.tile] = {tile, 0.0, value, of_gamma, agreed};
    }
}

/// Sums before each tile, and of the plane.
///
/// Grid: planes. Block: 32, a tile per lane at a time. Shared memory: none. Reads and overwrites all [planes,
/// tiles]. Overwrites planes[].slope, value, log_gamma and agreed.
template <class Tile>
__global__ void __launch_bounds__(32)
    boundary_scan_kernel(boundary_plane* const planes, Tile* const all, const std::int32_t tiles) {
    Tile* const sums = all + std::int64_t{blockIdx.x} * tiles;
    double before = 0.0, value = 0.0, of_gamma = 0.0;
    long long agreed = 0;
    for (std::int32_t first = 0; first < tiles; first += 32) {
        const std::int32_t i = first + lane_id();
        Tile one{};
        if (i < tiles) {
            one = sums[i];
        }
        const double sum = warp_inclusive_sum_of(one.slope);
        if (i < tiles) {
            sums[i].before = before + (sum - one.slope);
        }
        before += __shfl_sync(all_lanes, sum, 31);
        value += one.value;
        of_gamma += one.log_gamma;
        agreed += one.agreed;
    }
#pragma unroll
    for (int step = 16; step > 0; step /= 2) {
        value += __shfl_xor_sync(all_lanes, value, step);
        of_gamma += __shfl_xor_sync(all_lanes, of_gamma, step);
        agreed += __shfl_xor_sync(all_lanes, agreed, step);
    }
    if (lane_id() == 0) {
        boundary_plane& mine = planes[blockIdx.x];
        mine.slope = before;
        mine.value = value;
        mine.log_gamma = of_gamma;
        mine.agreed = agreed;
    }
}

/// d_scores: what a key gets as the new key of one query, less its prefix-sum difference as the boundary of a
/// run.
///
/// Grid: planes * tiles. Block: boundary_threads, a key each. Shared memory: none. Reads slope, prefix, first
/// and last [planes, S]. Overwrites d_scores [B, Hkv, S], fp32.
template <class Gate, class Keep>
__global__ void __launch_bounds__(boundary_threads)
    boundary_finish_kernel(const boundary_params<Gate, Keep> params) {
    const boundary_row<Gate, Keep> of(params, params.tiles);
    const std::int32_t t = of.token();
    if (t < of.length) {
        const std::int64_t leaves = std::int64_t{t} + of.head_params.window;
        double gradient = leaves < of.segment_of(t).end ? params.slope[of.row + leaves] : 0.0;
        const std::int32_t first = params.first[of.row + t], last = params.last[of.row + t];
        if (first >= 0) {
            gradient -= of.prefix(last) - of.prefix(first);
        }
        params.d_scores.head(of.b, of.h)[t] = static_cast<float>(gradient);
    }
}

/// The call's value and counts from its planes.
///
/// Grid: one block. Block: boundary_threads. Shared memory: two numbers per warp (static). Reads planes
/// [count]. Overwrites *out. Accumulates in d_log_gamma [heads], double. Either may be null.
template <class Value>
__global__ void __launch_bounds__(boundary_threads)
    boundary_value_kernel(const boundary_plane* const planes, const std::int64_t count,
                          const std::int32_t heads, double* const d_log_gamma, Value* const out) {
    __shared__ double shared[boundary_threads / 32];
    __shared__ long long shared_counts[boundary_threads / 32];
    const auto thread = static_cast<std::int32_t>(threadIdx.x);
    double value = 0.0;
    long long sampled = 0, examples = 0, kept = 0, agreed = 0;
    for (std::int64_t plane = thread; plane < count; plane += boundary_threads) {
        value += planes[plane].value;
        sampled += planes[plane].sampled;
        examples += planes[plane].count;
        kept += planes[plane].kept;
        agreed += planes[plane].agreed;
    }
    value = sum_over_block<boundary_threads>(value, shared);
    sampled = sum_over_block<boundary_threads>(sampled, shared_counts);
    examples = sum_over_block<boundary_threads>(examples, shared_counts);
    kept = sum_over_block<boundary_threads>(kept, shared_counts);
    agreed = sum_over_block<boundary_threads>(agreed, shared_counts);
    if (thread == 0 && out != nullptr) {
        out->value = value;
        out->count = examples;
        out->sampled = sampled;
        out->kept = kept;
        out->agreed = agreed;
    }
    for (std::int32_t h = thread; d_log_gamma != nullptr && h < heads; h += boundary_threads) {
        double sum = 0.0;
        for (std::int64_t plane = h; plane < count; plane += heads) {
            sum += planes[plane].log_gamma;
        }
        d_log_gamma[h] += sum;
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
