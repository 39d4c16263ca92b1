// Ranks of long sequences: one sort over the whole device with (segment, priority) as its key, then what the sort leaves
// open: runs of equal keys whose priorities differ, the inverse permutation, and the cutoffs at the edges of chunks.
//
// Everything here counts tokens from their plane's begin ("absolute"); a plane's part of the sorted arrays is its own
// `length` entries, and in it a segment's part is its own tokens' range, since keys begin with the segment.
#pragma once

#include <kvpolicy/cuda/blocks/mask_problem.cuh>
#include <kvpolicy/cuda/blocks/warp.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/policies/cutoff.hpp>

#include <cooperative_groups.h>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The sort's arrays, [planes * length] each; `tokens` are absolute.
struct sorted_keys {
    std::uint64_t* keys = nullptr;  // segment of the call << bits | priority_prefix
    std::int32_t* tokens = nullptr;
    int bits = 32;

    __device__ std::uint64_t idle() const { return (std::uint64_t{1} << bits) - 1; }
    __device__ std::uint64_t nan() const { return idle() - 1; }
    __device__ std::uint64_t prefix_of(std::uint64_t key) const { return key & idle(); }
    __device__ std::int64_t task_of(std::uint64_t key) const {
        return static_cast<std::int64_t>(key >> bits);
    }
};

inline constexpr int device_threads = 256;

/// Segment `task` = plane * segments + index: where it begins in the sorted arrays, and its plane's rule.
struct sorted_segment {
    std::int64_t plane;
    std::int32_t begin;
    std::int32_t n;  // tokens that count
    HeadRule rule;
};

template <class Gate, class Keep>
__device__ inline sorted_segment segment_of_task(const mask_problem<Gate, Keep>& problem, std::int64_t task) {
    const std::int64_t plane = problem.plane_of(task);
    const auto index = problem.segment_of_task(task);
    const auto b = problem.sequence_of(plane);
    const segment_range range = problem.segment(b, index);
    const std::int32_t begin = problem.edges == nullptr ? 0 : problem.edges[index];
    return {plane, begin, range.length(), problem.rules.of(problem.head_of(plane))};
}

/// The 64-bit code of an absolute token; what does not compete is last.
template <class Gate, class Keep>
__device__ inline std::uint64_t code_of_token(const mask_problem<Gate, Keep>& problem,
                                              const sorted_segment& segment, std::int32_t token) {
    const std::int32_t t = token - segment.begin;
    if (!problem.leaves(segment.rule, t, segment.n)) {
        return idle_code;
    }
    const auto b = problem.sequence_of(segment.plane);
    const auto h = problem.head_of(segment.plane);
    const float score = problem.scores.head(b, h)[token];
    return problem.gate.open(score, segment.rule) ? priority_code(segment.rule, score, t) : idle_code;
}

/// Tokens that a block of make_keys_kernel takes.
inline constexpr int keys_of_block = 4 * device_threads;

template <class Gate, class Keep>
__global__ void __launch_bounds__(device_threads)
    make_keys_kernel(const mask_problem<Gate, Keep> problem, const sorted_keys out) {
    const auto parts = static_cast<unsigned>((problem.length + keys_of_block - 1) / keys_of_block);
    const std::int64_t plane = blockIdx.x / parts;
    const auto part = static_cast<std::int32_t>(blockIdx.x % parts);
    const auto b = problem.sequence_of(plane);
    const auto h = problem.head_of(plane);
    if (threadIdx.x == 0 && part == 0 && h == 0) {
        problem.check_length(b);
    }
    const float* const scores = problem.scores.head(b, h);
    bool nan = false;
#pragma unroll
    for (int i = 0; i < keys_of_block / device_threads; ++i) {
        const std::int32_t token =
            part * keys_of_block + i * device_threads + static_cast<std::int32_t>(threadIdx.x);
        if (token >= problem.length) {
            break;
        }
        const std::int64_t task = plane * problem.segments + problem.segment_of_token(token);
        const sorted_segment segment = segment_of_task(problem, task);
        const std::int32_t t = token - segment.begin;
        std::uint64_t key = out.idle();
        if (!problem.by_survivors(segment.rule) && problem.leaves(segment.rule, t, segment.n)) {
            const float score = scores[token];
            nan = nan || score != score;
            if (problem.gate.open(score, segment.rule)) {
                key = priority_prefix(segment.rule, score, t, out.bits);
            }
        }
        const std::int64_t at = plane * problem.length + token;
        out.keys[at] = static_cast<std::uint64_t>(task) << out.bits | key;
        out.tokens[at] = token;
    }
    if (nan) {
        problem.report(b, status_nan_score);
    }
}

/// Work lists of runs of equal keys that are too long for one thread. Runs above `tile` are cut into tiles for all
/// blocks; the others are one block's each.
struct run_list {
    static constexpr std::int32_t tile = 4096;

    std::int32_t* counts = nullptr;   // [3]: runs for one block, runs in tiles, tiles; cleared before
    std::uint64_t* varies = nullptr;  // [1]: code bits that differ within some tiled run; cleared before
    std::int32_t* first = nullptr;  // where a run begins in the sorted arrays; tiled runs from the list's end
    std::int32_t* length = nullptr;
    std::int32_t* first_tile = nullptr;   // [most_tiled], of tiled runs
    std::uint64_t* key = nullptr;         // [most_tiled]
    std::int32_t* run_of_tile = nullptr;  // [most_tiles]
    std::int32_t* digits = nullptr;       // [most_tiles, 256]: how often, then where to
    std::int32_t size = 0;

    /// What `count` keys can give at most.
    static std::int64_t most_runs(std::int64_t count) { return count / (short_run + 1) + 1; }
    static std::int64_t most_tiled(std::int64_t count) { return count / (tile + 1) + 1; }
    static std::int64_t most_tiles(std::int64_t count) { return 2 * most_tiled(count); }

    /// Where tiled run i is in `first` and `length`: they fill up from the end.
    __device__ std::int32_t tiled(std::int32_t i) const { return size - 1 - i; }
};

/// Keys that a thread of settle_runs_kernel looks at.
inline constexpr int settled_keys = 4;

/// The thread of a run's first key puts the run in the order of its codes, or on a list.
template <class Gate, class Keep>
__global__ void __launch_bounds__(device_threads)
    settle_runs_kernel(const mask_problem<Gate, Keep> problem, const sorted_keys sorted,
                       const run_list runs) {
    const std::int64_t count = problem.planes() * problem.length;
    const std::int64_t base =
        settled_keys * (std::int64_t{blockIdx.x} * device_threads + static_cast<std::int64_t>(threadIdx.x));
    if (base + 1 >= count) {
        return;
    }
    // The key before the first, and the one behind the last; idle keys stand in at the ends: no run of theirs counts.
    std::uint64_t around[settled_keys + 2];
#pragma unroll
    for (int i = 0; i < settled_keys + 2; ++i) {
        const std::int64_t at = base + i - 1;
        around[i] = at >= 0 && at < count ? sorted.keys[at] : ~std::uint64_t{0};
    }
    unsigned begins = 0;
#pragma unroll
    for (int i = 0; i < settled_keys; ++i) {
        const std::uint64_t key = around[i + 1];
        const bool run = around[i + 2] == key && around[i] != key && sorted.prefix_of(key) < sorted.nan();
        begins |= static_cast<unsigned>(run) << i;
    }
    for (; begins != 0; begins &= begins - 1) {
        const std::int64_t at = base + __ffs(static_cast<int>(begins)) - 1;
        const std::uint64_t key = sorted.keys[at];
        const sorted_segment segment = segment_of_task(problem, sorted.task_of(key));
        if (segment.rule.log_gamma == 0.0f) {
            continue;  // the key is exact
        }
        int length = 2;
        while (length <= short_run && at + length < count && sorted.keys[at + length] == key) {
            ++length;
        }
        if (length <= short_run) {
            insertion_sort(sorted.tokens + at, length,
                           [&](std::int32_t token) { return code_of_token(problem, segment, token); });
            continue;
        }
        std::int64_t low = at + length;  // the first key behind the run
        std::int64_t high = count;
        while (low < high) {
            const std::int64_t middle = low + (high - low) / 2;
            if (sorted.keys[middle] <= key) {
                low = middle + 1;
            } else {
                high = middle;
            }
        }
        const auto whole = static_cast<std::int32_t>(low - at);
        std::int32_t place;
        if (whole <= run_list::tile) {
            place = atomicAdd(runs.counts, 1);
        } else {
            const std::int32_t index = atomicAdd(runs.counts + 1, 1);
            const std::int32_t tiles = (whole + run_list::tile - 1) / run_list::tile;
            const std::int32_t first_tile = atomicAdd(runs.counts + 2, tiles);
            place = runs.tiled(index);
            runs.first_tile[index] = first_tile;
            runs.key[index] = key;
            for (std::int32_t tile = 0; tile < tiles; ++tile) {
                runs.run_of_tile[first_tile + tile] = index;
            }
        }
        runs.first[place] = static_cast<std::int32_t>(at);
        runs.length[place] = whole;
    }
}

/// One block's memory for radix passes of 8 bits.
struct radix_shared {
    static constexpr int warps = device_threads / 32;

    std::int32_t count[256];
    std::int32_t offset[256];
    std::uint16_t of_warp[warps][256];
    std::uint64_t varies;

    /// How often every digit is among keys[0, length).
    __device__ void count_digits(const std::uint64_t* keys, std::int32_t length, int shift) {
        const int thread = static_cast<int>(threadIdx.x);
        count[thread] = 0;
        __syncthreads();
        for (std::int32_t i = thread; i < length; i += device_threads) {
            atomicAdd(&count[keys[i] >> shift & 0xffu], 1);
        }
        __syncthreads();
    }

    /// offset[digit] = how many of `count` are smaller.
    __device__ void sum_digits() {
        if (warp_id() == 0) {
            std::int32_t before = 0;
            for (int digit = lane_id(); digit < 256; digit += 32) {
                const int through = warp_inclusive_sum(count[digit]);
                offset[digit] = before + through - count[digit];
                before += __shfl_sync(all_lanes, through, 31);
            }
        }
        __syncthreads();
    }

    /// Moves keys[0, length) and their tokens to where `offset` says, equal digits in their order. Thread d counts digit d.
    __device__ void scatter(const std::uint64_t* keys, const std::int32_t* tokens, std::uint64_t* to_keys,
                            std::int32_t* to_tokens, std::int32_t length, int shift) {
        static_assert(device_threads == 256, "one thread a digit");
        const int thread = static_cast<int>(threadIdx.x);
        const int lane = lane_id();
        const int warp = warp_id();
        for (std::int32_t base = 0; base < length; base += device_threads) {
            for (int w = 0; w < warps; ++w) {
                of_warp[w][thread] = 0;
            }
            __syncthreads();
            const std::int32_t i = base + thread;
            const bool inside = i < length;
            const std::uint64_t code = inside ? keys[i] : 0;
            // Lanes beyond the run match nobody's digit.
            const int digit = inside ? static_cast<int>(code >> shift & 0xffu) : 256;
            const unsigned same = __match_any_sync(all_lanes, digit);
            const int in_warp = __popc(same & lanes_before(lane));
            if (inside && in_warp == 0) {
                of_warp[warp][digit] = static_cast<std::uint16_t>(__popc(same));
            }
            __syncthreads();
            std::int32_t next = offset[thread];
            for (int w = 0; w < warps; ++w) {
                const std::int32_t here = of_warp[w][thread];
                of_warp[w][thread] = static_cast<std::uint16_t>(next - offset[thread]);
                next += here;
            }
            __syncthreads();
            if (inside) {
                const std::int32_t to = offset[digit] + of_warp[warp][digit] + in_warp;
                to_keys[to] = code;
                to_tokens[to] = tokens[i];
            }
            __syncthreads();
            offset[thread] = next;
            __syncthreads();
        }
    }
};

/// keys[0, length) = the tokens' codes. Returns the bits in which the threads' codes differ from `reference`.
template <class Gate, class Keep>
__device__ inline std::uint64_t write_codes(const mask_problem<Gate, Keep>& problem,
                                            const sorted_segment& segment, const std::int32_t* tokens,
                                            std::uint64_t* keys, std::int32_t length,
                                            std::uint64_t reference) {
    std::uint64_t varies = 0;
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < length; i += device_threads) {
        const std::uint64_t code = code_of_token(problem, segment, tokens[i]);
        keys[i] = code;
        varies |= code ^ reference;
    }
    return varies;
}

/// Runs of up to run_list::tile keys, one block each.
template <class Gate, class Keep>
__device__ inline void sort_runs_by_block(const mask_problem<Gate, Keep>& problem, const sorted_keys& sorted,
                                          const sorted_keys& spare, const run_list& runs,
                                          radix_shared& memory) {
    const int thread = static_cast<int>(threadIdx.x);
    const std::int32_t listed = runs.counts[0];
    for (auto run = static_cast<std::int32_t>(blockIdx.x); run < listed;
         run += static_cast<std::int32_t>(gridDim.x)) {
        const std::int64_t first = runs.first[run];
        const std::int32_t length = runs.length[run];
        const std::uint64_t key = sorted.keys[first];
        const sorted_segment segment = segment_of_task(problem, sorted.task_of(key));
        std::uint64_t* keys = sorted.keys + first;
        std::int32_t* tokens = sorted.tokens + first;
        std::uint64_t* other_keys = spare.keys + first;
        std::int32_t* other_tokens = spare.tokens + first;
        const std::uint64_t reference = code_of_token(problem, segment, tokens[0]);
        if (thread == 0) {
            memory.varies = 0;
        }
        __syncthreads();
        std::uint64_t varies = write_codes(problem, segment, tokens, keys, length, reference);
        if (varies != 0) {
            atomicOr(reinterpret_cast<unsigned long long*>(&memory.varies), varies);
        }
        __syncthreads();
        varies = memory.varies;
        for (int shift = 0; shift < 64; shift += 8) {
            if ((varies >> shift & 0xffu) == 0) {
                continue;
            }
            memory.count_digits(keys, length, shift);
            memory.sum_digits();
            memory.scatter(keys, tokens, other_keys, other_tokens, length, shift);
            std::uint64_t* const keys_now = other_keys;
            std::int32_t* const tokens_now = other_tokens;
            other_keys = keys;
            other_tokens = tokens;
            keys = keys_now;
            tokens = tokens_now;
        }
        for (std::int32_t i = thread; i < length; i += device_threads) {
            sorted.tokens[first + i] = tokens[i];
            sorted.keys[first + i] = key;
        }
        __syncthreads();
    }
}

/// Sorts the runs of the lists by their codes, a radix sort of 8 bits a pass. Rare: many priorities that agree to 28 bits
/// or more, but not to 53. Runs in tiles are sorted together by the whole grid, which is launched cooperatively; where
/// there is none, no block waits for another. `spare` is a second pair of arrays like `sorted`.
template <class Gate, class Keep>
__global__ void __launch_bounds__(device_threads)
    sort_long_runs_kernel(const mask_problem<Gate, Keep> problem, const sorted_keys sorted,
                          const sorted_keys spare, const run_list runs) {
    auto& memory = *reinterpret_cast<radix_shared*>(dynamic_shared());
    const int thread = static_cast<int>(threadIdx.x);
    const auto blocks = static_cast<std::int32_t>(gridDim.x);
    const auto block = static_cast<std::int32_t>(blockIdx.x);
    sort_runs_by_block(problem, sorted, spare, runs, memory);
    const std::int32_t tiled_runs = runs.counts[1];
    const std::int32_t tiles = runs.counts[2];
    if (tiled_runs == 0) {
        return;
    }
    const auto grid = cooperative_groups::this_grid();

    // Tile `tile`: its run, and its part [begin, begin + length) of the arrays.
    struct part {
        std::int32_t run;
        std::int64_t begin;
        std::int32_t length;
    };
    const auto part_of = [&](std::int32_t tile) {
        const std::int32_t run = runs.run_of_tile[tile];
        const std::int32_t at = (tile - runs.first_tile[run]) * run_list::tile;
        const std::int32_t rest = runs.length[runs.tiled(run)] - at;
        return part{run, std::int64_t{runs.first[runs.tiled(run)]} + at,
                    rest < run_list::tile ? rest : run_list::tile};
    };

    for (std::int32_t tile = block; tile < tiles; tile += blocks) {
        const part mine = part_of(tile);
        const sorted_segment segment = segment_of_task(problem, sorted.task_of(runs.key[mine.run]));
        const std::uint64_t reference =
            code_of_token(problem, segment, sorted.tokens[runs.first[runs.tiled(mine.run)]]);
        const std::uint64_t varies = write_codes(problem, segment, sorted.tokens + mine.begin,
                                                 sorted.keys + mine.begin, mine.length, reference);
        if (varies != 0) {
            atomicOr(reinterpret_cast<unsigned long long*>(runs.varies), varies);
        }
    }
    grid.sync();
    const std::uint64_t varies = *runs.varies;

    sorted_keys from = sorted;
    sorted_keys to = spare;
    for (int shift = 0; shift < 64; shift += 8) {
        if ((varies >> shift & 0xffu) == 0) {
            continue;
        }
        for (std::int32_t tile = block; tile < tiles; tile += blocks) {
            const part mine = part_of(tile);
            memory.count_digits(from.keys + mine.begin, mine.length, shift);
            runs.digits[std::int64_t{tile} * 256 + thread] = memory.count[thread];
            __syncthreads();
        }
        grid.sync();
        // Counts become places in the run: by digit, then by tile.
        for (std::int32_t run = block; run < tiled_runs; run += blocks) {
            const std::int32_t length = runs.length[runs.tiled(run)];
            const std::int32_t of_run = (length + run_list::tile - 1) / run_list::tile;
            std::int32_t* const digits = runs.digits + std::int64_t{runs.first_tile[run]} * 256 + thread;
            std::int32_t total = 0;
#pragma unroll 8
            for (std::int32_t i = 0; i < of_run; ++i) {
                total += digits[std::int64_t{i} * 256];
            }
            memory.count[thread] = total;
            __syncthreads();
            memory.sum_digits();
            std::int32_t before = memory.offset[thread];
#pragma unroll 8
            for (std::int32_t i = 0; i < of_run; ++i) {
                const std::int32_t here = digits[std::int64_t{i} * 256];
                digits[std::int64_t{i} * 256] = before;
                before += here;
            }
            __syncthreads();
        }
        grid.sync();
        for (std::int32_t tile = block; tile < tiles; tile += blocks) {
            const part mine = part_of(tile);
            const std::int64_t first = runs.first[runs.tiled(mine.run)];
            memory.offset[thread] = runs.digits[std::int64_t{tile} * 256 + thread];
            __syncthreads();
            memory.scatter(from.keys + mine.begin, from.tokens + mine.begin, to.keys + first,
                           to.tokens + first, mine.length, shift);
        }
        grid.sync();
        const sorted_keys swapped = from;
        from = to;
        to = swapped;
    }
    for (std::int32_t tile = block; tile < tiles; tile += blocks) {
        const part mine = part_of(tile);
        const std::uint64_t key = runs.key[mine.run];
        for (std::int32_t i = thread; i < mine.length; i += device_threads) {
            sorted.tokens[mine.begin + i] = from.tokens[mine.begin + i];
            sorted.keys[mine.begin + i] = key;
        }
    }
}

/// Counts of keys by bucket of ranks and chunk of arrival. A bucket is `bucket` neighbours of a plane's sorted part.
struct arrival_counts {
    std::int32_t* before =
        nullptr;  // [planes, buckets, slots]: keys of the bucket that arrive in slots before this one
    std::int32_t bucket = 0;
    std::int32_t buckets = 0;

    __device__ const std::int32_t* row(std::int64_t plane, std::int32_t index, std::int32_t slots) const {
        return before + (plane * buckets + index) * slots;
    }
};

/// Slots that one round of counting holds in shared memory.
inline constexpr int counted_slots = 8192;

/// From the sorted order: the rank of every token, the order without the segments' offsets (without packed segments
/// out.order is sorted.tokens itself), how many compete, and the counts. One block a bucket of a plane.
template <class Gate, class Keep>
__global__ void __launch_bounds__(device_threads)
    invert_and_count_kernel(const mask_problem<Gate, Keep> problem, const sorted_keys sorted,
                            const ranking<std::int32_t> out, const arrival_counts counts) {
    constexpr int warps = device_threads / 32;
    auto* const total = reinterpret_cast<int*>(dynamic_shared());  // [warps]
    auto* const count = total + 32;                                // [min(slots, counted_slots)]
    const std::int64_t plane = blockIdx.x / static_cast<unsigned>(counts.buckets);
    const auto index = static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(counts.buckets));
    const int thread = static_cast<int>(threadIdx.x);
    const std::int64_t row = plane * problem.length;
    const std::int32_t from = index * counts.bucket;
    const std::int32_t to = from + counts.bucket < problem.length ? from + counts.bucket : problem.length;
    std::int32_t* const counted = counts.before + (plane * counts.buckets + index) * problem.slots;
    int so_far = 0;  // keys of the rounds before
    for (std::int32_t round = 0; round < problem.slots; round += counted_slots) {
        const std::int32_t slots =
            problem.slots - round < counted_slots ? problem.slots - round : counted_slots;
        for (int i = thread; i < slots; i += device_threads) {
            count[i] = 0;
        }
        __syncthreads();
        const auto count_one = [&](std::int32_t x, std::uint64_t key, std::uint64_t next_key,
                                   std::int32_t token) {
            const auto segment =
                problem.segments == 1
                    ? 0
                    : static_cast<std::int32_t>(sorted.task_of(key) - plane * problem.segments);
            const std::int32_t begin = problem.edges == nullptr ? 0 : problem.edges[segment];
            const bool competes = sorted.prefix_of(key) != sorted.idle();
            if (round == 0) {
                out.rank[row + token] = competes ? x - begin : no_rank;
                if (out.order != sorted.tokens) {
                    out.order[row + x] = token - begin;
                }
                const std::int32_t end =
                    problem.edges == nullptr ? problem.length : problem.edges[segment + 1];
                // The border between those that compete and the others says how many do.
                const bool next_idle = x + 1 >= end || sorted.prefix_of(next_key) == sorted.idle();
                if (competes && next_idle) {
                    out.competitors[plane * problem.segments + segment] = x + 1 - begin;
                }
                if (!competes && x == begin) {
                    out.competitors[plane * problem.segments + segment] = 0;
                }
            }
            if (competes) {
                const std::int32_t slot = problem.first_slot(segment) + (token - begin) / mask_chunk - round;
                if (slot >= 0 && slot < slots) {
                    atomicAdd(&count[slot], 1);
                }
            }
        };
        // All loads of a step before its first store, which the compiler could not know to be elsewhere.
        constexpr int ahead = 4;
        for (std::int32_t x = from + thread; x < to; x += ahead * device_threads) {
            std::uint64_t key[ahead];
            std::uint64_t next_key[ahead];
            std::int32_t token[ahead];
#pragma unroll
            for (int i = 0; i < ahead; ++i) {
                const std::int32_t at = x + i * device_threads;
                if (at < to) {
                    key[i] = sorted.keys[row + at];
                    next_key[i] = at + 1 < problem.length ? sorted.keys[row + at + 1] : sorted.idle();
                    token[i] = sorted.tokens[row + at];
                }
            }
#pragma unroll
            for (int i = 0; i < ahead; ++i) {
                const std::int32_t at = x + i * device_threads;
                if (at < to) {
                    count_one(at, key[i], next_key[i], token[i]);
                }
            }
        }
        __syncthreads();
        // Exclusive sums over the slots: a thread takes neighbours.
        const std::int32_t each = (slots + device_threads - 1) / device_threads;
        const std::int32_t first = thread * each < slots ? thread * each : slots;
        const std::int32_t last = first + each < slots ? first + each : slots;
        int mine = 0;
        for (std::int32_t i = first; i < last; ++i) {
            mine += count[i];
        }
        const int through = warp_inclusive_sum(mine);
        if (lane_id() == 31) {
            total[warp_id()] = through;
        }
        __syncthreads();
        const block_sum sums = sum_of_warps<warps>(total);
        int before = so_far + sums.before + through - mine;
        for (std::int32_t i = first; i < last; ++i) {
            const int here = count[i];
            count[i] = before;
            before += here;
        }
        so_far += sums.total;
        __syncthreads();
        for (int i = thread; i < slots; i += device_threads) {
            counted[round + i] = count[i];
        }
        __syncthreads();
    }
}

/// The cutoff at the begin of every slot, one warp each: first the bucket, then the rank in it.
template <class Gate, class Keep>
__global__ void __launch_bounds__(device_threads)
    anchors_kernel(const mask_problem<Gate, Keep> problem, const ranking<std::int32_t> ranks,
                   const arrival_counts counts) {
    const std::int64_t task =
        (std::int64_t{blockIdx.x} * device_threads + static_cast<std::int64_t>(threadIdx.x)) / 32;
    if (task >= problem.planes() * problem.slots) {
        return;
    }
    const std::int64_t plane = task / problem.slots;
    const auto slot = static_cast<std::int32_t>(task % problem.slots);
    const auto b = problem.sequence_of(plane);
    const int lane = lane_id();
    const segment_range segment = problem.segment(b, problem.segment_of_slot(slot));
    const std::int32_t base = problem.first_slot(segment.index);
    const std::int32_t edge = (slot - base) * mask_chunk;  // arrivals before it count
    if (edge >= segment.length()) {
        return;
    }
    const HeadRule rule = problem.rules.of(problem.head_of(plane));
    const std::int32_t k = rule.budget;

    const std::int32_t first = segment.begin / counts.bucket;
    const std::int32_t last = (segment.end - 1) / counts.bucket;
    std::int32_t count = 0;
    std::int32_t found = -1;
    std::int32_t missing = 0;
    for (std::int32_t bucket = first; bucket <= last; bucket += 32) {
        std::int32_t mine = 0;
        if (bucket + lane <= last) {
            const std::int32_t* const row = counts.row(plane, bucket + lane, problem.slots);
            mine = row[slot] - row[base];
        }
        const int through = warp_inclusive_sum(mine);
        const unsigned reached = __ballot_sync(all_lanes, count + through >= k);
        if (found < 0 && reached != 0u) {
            const int lane_found = __ffs(static_cast<int>(reached)) - 1;
            found = bucket + lane_found;
            missing = k - count - __shfl_sync(all_lanes, through - mine, lane_found);
        }
        count += __shfl_sync(all_lanes, through, 31);
    }
    std::int32_t cutoff = open_cutoff;
    if (k > 0 && count >= k) {
        const std::int64_t row = plane * problem.length;
        const std::int32_t competitors = ranks.competitors[plane * problem.segments + segment.index];
        const std::int32_t from =
            found * counts.bucket > segment.begin ? found * counts.bucket : segment.begin;
        const std::int32_t behind = segment.begin + competitors;
        const std::int32_t to = (found + 1) * counts.bucket < behind ? (found + 1) * counts.bucket : behind;
        constexpr int ahead = 8;  // 256 ranks a step
        for (std::int32_t x = from; x < to && missing > 0; x += 32 * ahead) {
            unsigned came[ahead];
            int group = 0;
#pragma unroll
            for (int i = 0; i < ahead; ++i) {
                const std::int32_t at = x + i * 32 + lane;
                came[i] = __ballot_sync(all_lanes, at < to && ranks.order[row + at] < edge);
                group += __popc(came[i]);
            }
            if (group < missing) {
                missing -= group;
                continue;
            }
#pragma unroll
            for (int i = 0; i < ahead; ++i) {
                const int here = __popc(came[i]);
                if (missing > 0 && here >= missing) {
                    unsigned word = came[i];
                    while (--missing > 0) {
                        word &= word - 1u;
                    }
                    cutoff = x + i * 32 + __ffs(static_cast<int>(word)) - 1 - segment.begin;
                } else {
                    missing -= here;
                }
            }
        }
    }
    if (lane == 0) {
        ranks.anchors[plane * problem.slots + slot] = {cutoff, count};
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
