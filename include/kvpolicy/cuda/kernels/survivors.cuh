// Contests whose order depends on the query: decay steps n > 1, and priorities whose base moves (rebase_limit). One block
// a segment holds the places, each thread the same few of them from the first contest to the last, and settles one
// newcomer after another. Exact and slow: O(S k / threads) a head, where static ranks take a sort.
#pragma once

#include <kvpolicy/cuda/blocks/mask_problem.cuh>
#include <kvpolicy/cuda/blocks/warp.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/launch.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

inline constexpr int survivor_threads = 512;

/// A key that holds a place.
struct survivor {
    float score;
    std::int32_t token;
};

/// How bad a key is: the larger code loses, then the younger key.
struct badness {
    std::uint64_t code;
    std::int32_t token;
    std::int32_t place;

    __device__ bool worse_than(const badness& other) const {
        return code != other.code ? code > other.code : token > other.token;
    }
};

/// The worst of a warp's, in every lane.
__device__ inline badness worst_of_warp(badness mine) {
    for (int step = 16; step > 0; step /= 2) {
        const badness other{__shfl_xor_sync(all_lanes, mine.code, step),
                            __shfl_xor_sync(all_lanes, mine.token, step),
                            __shfl_xor_sync(all_lanes, mine.place, step)};
        if (other.worse_than(mine)) {
            mine = other;
        }
    }
    return mine;
}

struct survivors_shared {
    badness worst[2][survivor_threads / 32];  // in turns, so that one barrier a contest is enough
    survivor arriving[survivor_threads];
    int total[survivor_threads / 32];
};

/// `places` has `capacity` entries for every segment of every plane.
template <class Gate, class Keep>
__global__ void __launch_bounds__(survivor_threads)
    survivors_kernel(const mask_problem<Gate, Keep> problem, const plane_view<expiry_t> out,
                     survivor* const places, const std::int64_t capacity) {
    constexpr int warps = survivor_threads / 32;
    const std::int64_t plane = blockIdx.x / static_cast<unsigned>(problem.segments);
    const auto index = static_cast<std::int32_t>(blockIdx.x % static_cast<unsigned>(problem.segments));
    const auto b = static_cast<std::int32_t>(plane / problem.heads);
    const auto h = static_cast<std::int32_t>(plane % problem.heads);
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0 && index == 0 && h == 0) {
        problem.check_length(b);
    }
    const segment_range segment = problem.segment(b, index);
    const HeadRule rule = problem.rules.of(h);
    const std::int32_t n = segment.length();
    if (n == 0 || !problem.by_survivors(rule)) {
        return;
    }

    auto& memory = *reinterpret_cast<survivors_shared*>(dynamic_shared());
    const bool packed = problem.edges != nullptr;
    const float* const scores = problem.scores.head(b, h) + segment.begin;
    expiry_t* const expiry = out.head(b, h) + segment.begin;
    survivor* const held = places + static_cast<std::int64_t>(blockIdx.x) * capacity;
    const int lane = lane_id();
    const int warp = warp_id();

    bool nan = false;
    std::int32_t taken = 0;
    int turn = 0;
    for (std::int32_t first = 0; first < n; first += survivor_threads) {
        const std::int32_t t = first + thread;
        bool competes = false;
        float score = 0.0f;
        if (t < n) {
            if (problem.leaves(rule, t, n)) {
                score = scores[t];
                nan = nan || score != score;
                competes = problem.gate.open(score, rule);
            }
            if (!competes) {
                expiry[t] = in_sequence(problem.forever(rule, t) ? never : window_expiry(t, rule.window),
                                        segment, packed);
            }
        }
        const unsigned coming = __ballot_sync(all_lanes, competes);
        if (lane == 0) {
            memory.total[warp] = __popc(coming);
        }
        __syncthreads();
        const block_sum arrivals = sum_of_warps<warps>(memory.total);
        if (competes) {
            memory.arriving[arrivals.before + __popc(coming & lanes_before(lane))] = {score, t};
        }
        __syncthreads();
        // Free places first; place p belongs to thread p % survivor_threads for good.
        int settled = 0;
        while (settled < arrivals.total && taken < rule.budget) {
            if (taken % survivor_threads == thread) {
                held[taken] = memory.arriving[settled];
                expiry[memory.arriving[settled].token] = in_sequence(never, segment, packed);
            }
            ++taken;
            ++settled;
        }
        for (; settled < arrivals.total; ++settled) {
            const survivor newcomer = memory.arriving[settled];
            const position_t q = std::int64_t{newcomer.token} + rule.window;
            badness mine{0, -1, -1};  // better than any key
            for (std::int32_t place = thread; place < taken; place += survivor_threads) {
                const survivor key = held[place];
                const badness its{descending_code(rank_value(rule, key.score, key.token, q, problem.limit)),
                                  key.token, place};
                if (its.worse_than(mine)) {
                    mine = its;
                }
            }
            mine = worst_of_warp(mine);
            if (lane == 0) {
                memory.worst[turn][warp] = mine;
            }
            __syncthreads();
            const badness worst = worst_of_warp(memory.worst[turn][lane < warps ? lane : 0]);
            turn ^= 1;
            const std::uint64_t code =
                descending_code(rank_value(rule, newcomer.score, newcomer.token, q, problem.limit));
            const bool wins = worst.worse_than({code, newcomer.token, -1});
            if (worst.place % survivor_threads == thread) {
                expiry[wins ? worst.token : newcomer.token] =
                    in_sequence(static_cast<expiry_t>(q), segment, packed);
                if (wins) {
                    held[worst.place] = newcomer;
                    expiry[newcomer.token] = in_sequence(never, segment, packed);
                }
            }
        }
        __syncthreads();  // arriving is written again
    }
    if (nan) {
        problem.report(b, status_nan_score);
    }
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
