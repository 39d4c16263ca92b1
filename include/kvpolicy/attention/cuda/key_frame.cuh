// Where keys stand in time: positions, visible intervals and biases of a call's rows, as the plan and the
// scanning kernels read them.
//
// Numbers that a host would refuse arrive here from device memory: a length that no view holds counts as 0,
// and all sums of positions are taken in 64 bits.
#pragma once

#include <kvpolicy/attention/cuda/attention_params.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>

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
    const std::int32_t* head_rows = nullptr;    // [B, Hkv]: rows that count, in place of lengths
    std::int32_t heads = 0;                     // Hkv
    std::int32_t rows = 0;                      // rows per sequence, at most
    std::int32_t first = 0;
};

/// Both segments of a call, and its queries.
struct key_frames {
    segment_frame past;
    segment_frame self;                     // rows = 0: one segment
    const std::int32_t* lengths = nullptr;  // [B] queries; null: length
    const std::int32_t* starts = nullptr;   // [B] position of query 0; null: 0
    const std::int32_t* edges = nullptr;    // [segments + 1], checked packed edges; null: not packed
    std::int32_t segments = 0;
    std::int32_t length = 0;

    __device__ std::int32_t queries(std::int64_t b) const {
        const std::int32_t own = lengths != nullptr ? lengths[b] : length;
        return own >= 0 && own <= length ? own : 0;
    }
};

__device__ inline float minus_infinity() { return __int_as_float(static_cast<int>(0xff800000u)); }

/// When a row is seen by the queries of a frame.
struct row_time {
    std::int32_t begin;   // clamped to [0, span]: the first query that sees it
    std::int32_t expiry;  // clamped to [0, span]: the first that no longer does
};

/// One KV head of one sequence. Rows that count are numbered through: index x in [0, count()) is row
/// row_of(x).
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

    /// The visible interval of row x among `span` queries of which the first has position `base`. A bias
    /// of -inf ends it.
    [[nodiscard]] __device__ row_time time_of(std::int32_t x, std::int64_t base, std::int32_t span) const {
        const bool own = x >= past_;
        const segment_frame& segment = own ? frames_.self : frames_.past;
        const std::int32_t t = own ? x - past_ : x;
        const std::int64_t begin = position(segment, own, t) - base;
        row_time time{clamped(begin, span), span};
        if (segment.expiry) {
            const expiry_t expiry = segment.expiry.head(b_, h_)[t];
            time.expiry = expiry == never ? span : clamped(expiry - base, span);
        }
        if (segment.log_bias && segment.log_bias.head(b_, h_)[t] == minus_infinity()) {
            const std::int32_t hidden = clamped(begin + age(segment), span);
            time.expiry = hidden < time.expiry ? hidden : time.expiry;
        }
        if (frames_.edges != nullptr) {
            const std::int32_t end = clamped(segment_end(t) - base, span);
            time.expiry = end < time.expiry ? end : time.expiry;
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
        from = clamped(position(segment, own, t) + age(segment) - base, span);
        return segment.log_bias.head(b_, h_)[t];
    }

  private:
    [[nodiscard]] __device__ std::int32_t age(const segment_frame& segment) const {
        return segment.bias_from != nullptr ? segment.bias_from[h_] : 0;
    }
    [[nodiscard]] __device__ std::int32_t counted(const segment_frame& segment) const {
        if (segment.head_rows != nullptr) {
            return segment.head_rows[std::int64_t{b_} * segment.heads + h_];
        }
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

/// The same without positions, biases or packed edges, in 32 bits and with one load: what a plan has most
/// rows of.
class plain_frame {
  public:
    static __host__ bool fits(const key_frames& frames) {
        const auto plain = [](const segment_frame& segment) {
            return !segment.position && !segment.log_bias;
        };
        return plain(frames.past) && (frames.self.rows == 0 || plain(frames.self)) && frames.edges == nullptr;
    }
    __device__ plain_frame(const key_frames& frames, const head_frame& head, std::int32_t b, std::int32_t h,
                           std::int64_t base, std::int32_t span)
        : span_(span),
          first_(in_32_bits(base)),
          end_(in_32_bits(base + span)),
          past_(frames.self.rows == 0 ? never : head.past()),
          past_segment_(frames.past, b, h, base - frames.past.first),
          self_segment_(frames.self, b, h, base - head.start()) {}

    [[nodiscard]] __device__ row_time time_of(std::int32_t x) const {
        const bool own = x >= past_;
        const std::int32_t t = own ? x - past_ : x;
        const std::int32_t shift = own ? self_segment_.shift : past_segment_.shift;
        const expiry_t* const expiries = own ? self_segment_.expiry : past_segment_.expiry;
        row_time time{0, span_};
        if (t > shift) {
            const std::uint32_t later = static_cast<std::uint32_t>(t) - static_cast<std::uint32_t>(shift);
            time.begin = later < static_cast<std::uint32_t>(span_) ? static_cast<std::int32_t>(later) : span_;
        }
        if (expiries != nullptr) {
            const expiry_t expiry = expiries[t];
            if (expiry < end_) {  // so it is not `never`
                // Not (expiry > first_ ? expiry - first_ : 0): nvcc subtracts first, which wraps for expiries
                // near -2^31.
                time.expiry = (expiry > first_ ? expiry : first_) - first_;
            }
        }
        return time;
    }

  private:
    [[nodiscard]] __device__ static std::int32_t in_32_bits(std::int64_t x) {
        constexpr std::int32_t least = -never - 1;
        return x > never ? never : x < least ? least : static_cast<std::int32_t>(x);
    }

    struct plain_segment {
        const expiry_t* expiry;  // null: never
        std::int32_t shift;      // the row that has the position of the first query

        __device__ plain_segment(const segment_frame& segment, std::int32_t b, std::int32_t h,
                                 std::int64_t of_first_query)
            : expiry(segment.expiry ? segment.expiry.head(b, h) : nullptr),
              shift(in_32_bits(of_first_query)) {}
    };

    std::int32_t span_;
    std::int32_t first_, end_;  // positions of the first query and after the last
    std::int32_t past_;         // rows of the first segment; never: there is no other
    plain_segment past_segment_, self_segment_;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
