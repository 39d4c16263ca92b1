// What every kernel of build_mask knows of a call: scores, sequences, rules, and which keys compete.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/primitives/segment_search.cuh>
#include <kvpolicy/cuda/tuning.cuh>
#include <kvpolicy/masks/cuda/decay_classes.cuh>
#include <kvpolicy/policies/parameters.hpp>
#include <kvpolicy/policies/ranking.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The rules of a layer's heads: one for all, or a table in device memory.
struct head_params_table {
    HeadParams common;
    const HeadParams* table = nullptr;  // [heads]
    const float* log_gamma = nullptr;   // [heads]: in place of the rules', where it is given

    __device__ HeadParams of(std::int32_t head) const {
        HeadParams head_params = table == nullptr ? common : table[head];
        if (log_gamma != nullptr) {
            head_params.log_gamma = log_gamma[head];
        }
        return head_params;
    }
};

/// One sequence, or one packed segment of it, of one head: tokens [begin, end) of plane b * heads + h.
struct segment_range {
    std::int32_t begin;
    std::int32_t end;
    std::int32_t index;  // which segment of its sequence

    __device__ std::int32_t length() const { return end - begin; }
};

/// t + w, or never where that does not fit.
__device__ inline expiry_t window_expiry(std::int32_t t, std::int32_t window) {
    const std::int64_t end = std::int64_t{t} + window;
    return end < never ? static_cast<expiry_t>(end) : never;
}

/// An expiry in a segment's frame, in the sequence's: a key of a packed segment ends with it.
__device__ inline expiry_t in_sequence(expiry_t expiry, const segment_range& segment, bool packed) {
    if (!packed) {
        return expiry;
    }
    const std::int64_t moved = std::int64_t{expiry} + segment.begin;
    return moved < segment.end ? static_cast<expiry_t>(moved) : segment.end;
}

/// Gate and Keep are the policy's gate and keep parts alone: policies that differ only in numbers, or in
/// parts that write numbers, share their kernels.
template <class Gate, class Keep>
struct mask_params {
    plane_view<const float> scores;
    std::int32_t batch = 0;
    std::int32_t heads = 0;
    std::int32_t length = 0;                // of the views: S
    const std::int32_t* lengths = nullptr;  // [batch] or null
    const std::int32_t* edges = nullptr;    // [segments + 1], checked, or null
    std::int32_t segments = 1;
    std::int32_t chunks = 0;  // chunks a plane; see first_chunk
    head_params_table all_params;
    Gate gate;
    Keep keep;
    position_t limit = rebase_limit;
    std::uint32_t* status = nullptr;  // [batch] or null

    KVPOLICY_HOST_DEVICE std::int64_t planes() const { return std::int64_t{batch} * heads; }

    // Plane b * heads + h and task plane * segments + index, taken apart. There are fewer than 2^31 of
    // either, and a division of 64 bits costs as much as a small kernel.
    __device__ std::int32_t sequence_of(std::int64_t plane) const {
        return static_cast<std::int32_t>(static_cast<std::uint32_t>(plane) /
                                         static_cast<std::uint32_t>(heads));
    }
    __device__ std::int32_t head_of(std::int64_t plane) const {
        return static_cast<std::int32_t>(static_cast<std::uint32_t>(plane) %
                                         static_cast<std::uint32_t>(heads));
    }
    __device__ std::int64_t plane_of(std::int64_t task) const {
        return static_cast<std::uint32_t>(task) / static_cast<std::uint32_t>(segments);
    }
    __device__ std::int32_t segment_of_task(std::int64_t task) const {
        return static_cast<std::int32_t>(static_cast<std::uint32_t>(task) %
                                         static_cast<std::uint32_t>(segments));
    }

    __device__ void report(std::int32_t b, std::uint32_t bits) const {
        if (status != nullptr) {
            atomicOr(status + b, bits);
        }
    }

    /// A length from device memory: what cannot be counts as 0 and is reported by whoever calls check_length.
    __device__ std::int32_t length_of(std::int32_t b) const {
        if (lengths == nullptr) {
            return length;
        }
        const std::int32_t given = lengths[b];
        return given < 0 || given > length ? 0 : given;
    }
    __device__ void check_length(std::int32_t b) const {
        if (lengths != nullptr && (lengths[b] < 0 || lengths[b] > length)) {
            report(b, status_bad_length);
        }
    }

    __device__ segment_range segment(std::int32_t b, std::int32_t index) const {
        const std::int32_t whole = length_of(b);
        if (edges == nullptr) {
            return {0, whole, 0};
        }
        const std::int32_t begin = edges[index] < whole ? edges[index] : whole;
        const std::int32_t end = edges[index + 1] < whole ? edges[index + 1] : whole;
        return {begin, end, index};
    }

    /// Chunks of mask_chunk tokens start at every segment's first token, so a plane has at most S / chunk +
    /// segments of them; segment i's begin at chunk edges[i] / chunk + i.
    __device__ std::int32_t first_chunk(std::int32_t index) const {
        return edges == nullptr ? 0 : edges[index] / mask_chunk + index;
    }
    /// The segment that a chunk may belong to: the last whose first chunk is not behind it.
    __device__ std::int32_t segment_of_chunk(std::int32_t chunk_index) const {
        return last_begun(segments, [&](std::int32_t i) { return first_chunk(i) <= chunk_index; });
    }
    /// The segment of token t of a plane.
    __device__ std::int32_t segment_of_token(std::int32_t t) const {
        return edges == nullptr ? 0 : last_begun(segments, [&](std::int32_t i) { return edges[i] <= t; });
    }

    __device__ std::int32_t edge(std::int32_t index) const { return edges[index]; }
    /// The rules under which the keys of a plane compete.
    __device__ HeadParams head_params_of(std::int64_t plane) const { return all_params.of(head_of(plane)); }
    /// Whether priority_prefix() is all of a priority under these rules.
    __device__ bool has_exact_keys(const HeadParams& head_params) const {
        return head_params.log_gamma == 0.0f;
    }

    /// Whether key t (from its segment's first token) never leaves because of where it stands.
    __device__ bool forever(const HeadParams& head_params, std::int32_t t) const {
        return t < head_params.sinks || keep.keeps(t);
    }

    /// Whether the score of key t is read: it leaves the window before its segment of n tokens ends, and may
    /// be evicted.
    __device__ bool leaves(const HeadParams& head_params, std::int32_t t, std::int32_t n) const {
        return t < n - head_params.window && !forever(head_params, t);
    }

    /// Writes the expiry of key t, in the segment's frame; of a key that competes.
    __device__ void expire(const plane_view<expiry_t>& out, std::int32_t b, std::int32_t h,
                           const segment_range& range, std::int32_t t, expiry_t value) const {
        out.head(b, h)[range.begin + t] = in_sequence(value, range, edges != nullptr);
    }
    /// Writes the expiry of a key that does not compete.
    __device__ void expire_alone(const plane_view<expiry_t>& out, std::int32_t b, std::int32_t h,
                                 const segment_range& range, const HeadParams& head_params,
                                 std::int32_t t) const {
        expire(out, b, h, range, t, forever(head_params, t) ? never : window_expiry(t, head_params.window));
    }

    /// Whether this head's order of keys depends on the query, so that ranks are not static: decay steps
    /// above 1, and priorities whose base moves inside the sequence. Without decay ranks are static whatever
    /// the step.
    __device__ bool by_decayed_top_k(const HeadParams& head_params) const {
        return needs_decayed_top_k(head_params, length, limit);
    }

    /// The same on the host, which decides what is launched.
    KVPOLICY_HOST_DEVICE static bool needs_decayed_top_k(const HeadParams& head_params, std::int32_t length,
                                                         position_t limit) {
        if (head_params.budget == 0 || head_params.budget == unlimited || head_params.log_gamma == 0.0f) {
            return false;
        }
        return head_params.decay_step != 1 || length > limit;
    }

    /// Whether such a head's keys are ranked by class, in rounds.
    __device__ bool by_decayed_rounds(const HeadParams& head_params) const {
        return needs_decayed_rounds(head_params, length, limit);
    }
    KVPOLICY_HOST_DEVICE static bool needs_decayed_rounds(const HeadParams& head_params, std::int32_t length,
                                                          position_t limit) {
        return needs_decayed_top_k(head_params, length, limit) && ranks_by_class(head_params, length);
    }
};

/// The cutoff when a chunk begins: the rank of the k-th best key that has left the window (open_cutoff while
/// there are fewer than k), and how many have.
struct cutoff_checkpoint {
    std::int32_t cutoff;
    std::int32_t count;
};

/// What ranking hands to the expiry kernel. Ranks and tokens count from the segment's begin; a plane's row of
/// rank and order has `length` entries, of which segment [begin, end) owns its own.
template <class Index>
struct ranking {
    Index* rank = nullptr;                     // [planes, length]: rank of a token, or idle
    Index* order = nullptr;                    // [planes, length]: token of a rank, for the ranks there are
    cutoff_checkpoint* checkpoints = nullptr;  // [planes, chunks]
    std::int32_t* competitors = nullptr;       // [planes, segments]: keys that compete

    static constexpr Index idle = static_cast<Index>(-1);
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
