// Where keys stand in time: positions, lifetimes and biases of a call's rows, as the plan and the scanning kernels read them.
//
// Numbers that a host would refuse arrive here from device memory: a length that no view holds counts as 0, and all sums of
// positions are taken in 64 bits.
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/blocks/attention_problem.cuh>
#include <kvpolicy/cuda/config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The rows of one key segment.
struct segment_frame {
    plane_view<const std::int32_t> position{};  // empty: first + row
    plane_view<const expiry_t> expiry{};        // empty: never
    plane_view<const float> log_bias{};         // empty: none
    const std::int32_t* bias_from = nullptr;    // [Hkv]
    const std::int32_t* lengths = nullptr;      // [B]; null: all rows count
    std::int32_t rows = 0;                      // rows a sequence, at most
    std::int32_t first = 0;
};

/// Both segments of a call, and its queries.
struct key_frames {
    segment_frame past;
    segment_frame self;                      // rows = 0: one segment
    const std::int32_t* lengths = nullptr;   // [B] queries; null: length
    const std::int32_t* starts = nullptr;    // [B] position of query 0; null: 0
    const std::int32_t* edges = nullptr;     // [segments + 1], checked packed edges; null: not packed
    std::int32_t segments = 0;
    std::int32_t length = 0;

    __device__ std::int32_t queries(std::int64_t b) const {
        const std::int32_t own = lengths != nullptr ? lengths[b] : length;
        return own >= 0 && own <= length ? own : 0;
    }
};

/// When row number `row` of a head is seen by queries of a frame, and its bias.
struct row_time {
    std::int32_t born;  // clamped to [0, span]: the first query that sees it
    std::int32_t dies;  // clamped to [0, span]: the first that no longer does
};

/// One KV head of one sequence. Rows that count are numbered through: index x in [0, count()) is row row_of(x).
class head_frame {
  public:
    __device__ head_frame(const key_frames& frames, std::int32_t b, std::int32_t h)
        : frames_(frames), b_(b), h_(h) {
        start_ = frames.starts != nullptr ? frames.starts[b] : 0;
        past_ = counted(frames.past);
        self_ = frames.self.rows != 0 ? frames.queries(b) : 0;
    }

    [[nodiscard]] __device__ std::int32_t count() const { return past_ + self_; }
    [[nodiscard]] __device__ std::int32_t past() const { return past_; }
    [[nodiscard]] __device__ std::int64_t start() const { return start_; }
    [[nodiscard]] __device__ std::int32_t row_of(std::int32_t x) const {
        return x < past_ ? x : frames_.past.rows + (x - past_);
    }

    /// The life of row x among `span` queries of which the first has position `base`.
    [[nodiscard]] __device__ row_time time_of(std::int32_t x, std::int64_t base, std::int32_t span) const {
        const bool own = x >= past_;
        const segment_frame& segment = own ? frames_.self : frames_.past;
        const std::int32_t t = own ? x - past_ : x;
        const std::int64_t born = position(segment, own, t) - base;
        row_time time{clamped(born, span), span};
        if (segment.expiry) {
            const expiry_t expiry = segment.expiry.head(b_, h_)[t];
            time.dies = expiry == never ? span : clamped(expiry - base, span);
            // A key whose expiry is not after its own position is never seen, even where both lie before the frame.
            if (expiry != never && expiry - base <= born) {
                time.dies = 0;
            }
        }
        if (frames_.edges != nullptr) {
            const std::int32_t end = clamped(segment_end(t) - base, span);
            time.dies = end < time.dies ? end : time.dies;
        }
        return time;
    }

    /// Row x's bias, natural logarithm, and from which query of the frame on it counts.
    [[nodiscard]] __device__ float bias_of(std::int32_t x, std::int64_t base, std::int32_t span,
                                           std::int32_t& from) const {
        const bool own = x >= past_;
        const segment_frame& segment = own ? frames_.self : frames_.past;
        const std::int32_t t = own ? x - past_ : x;
        if (!segment.log_bias) {
            from = span;
            return 0.0f;
        }
        const std::int32_t age = segment.bias_from != nullptr ? segment.bias_from[h_] : 0;
        from = clamped(position(segment, own, t) + age - base, span);
        return segment.log_bias.head(b_, h_)[t];
    }

  private:
    [[nodiscard]] __device__ std::int32_t counted(const segment_frame& segment) const {
        if (segment.lengths == nullptr) {
            return segment.rows;
        }
        const std::int32_t own = segment.lengths[b_];
        return own >= 0 && own <= segment.rows ? own : 0;
    }
    [[nodiscard]] __device__ std::int64_t position(const segment_frame& segment, bool own,
                                                   std::int32_t t) const {
        return segment.position ? std::int64_t{segment.position.head(b_, h_)[t]}
                                : (own ? start_ : std::int64_t{segment.first}) + t;
    }
    [[nodiscard]] __device__ static std::int32_t clamped(std::int64_t x, std::int32_t span) {
        return x <= 0 ? 0 : x >= span ? span : static_cast<std::int32_t>(x);
    }
    /// Where the packed segment of token t ends; 0 where no segment has it.
    [[nodiscard]] __device__ std::int64_t segment_end(std::int32_t t) const {
        std::int32_t low = 0;  // edges[low] <= t < edges[high], as far as there is such an edge
        std::int32_t high = frames_.segments + 1;
        while (high - low > 1) {
            const std::int32_t middle = low + (high - low) / 2;
            (frames_.edges[middle] <= t ? low : high) = middle;
        }
        return high <= frames_.segments ? frames_.edges[high] : 0;
    }

    const key_frames& frames_;
    std::int32_t b_;
    std::int32_t h_;
    std::int64_t start_;
    std::int32_t past_;
    std::int32_t self_;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
