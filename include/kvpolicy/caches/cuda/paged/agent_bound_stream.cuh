// Upper bounds of q . k per page, 32 pages at a time, one lane per page, for 16-bit keys.
//
// A bound is a sum over the dims in their order, as in the CPU backend. A lane's bounds lie far from its
// neighbor's, so a warp copies them into shared memory in lines of 128 bytes, one stage ahead.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/rounded.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>
#include <cstring>
#include <type_traits>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// The larger of two rounded products, of a query's number with the low and the high bound: that with the
/// high one where it is above 0, else that with the low one. `above` is the number or 0, `below` 0 or the
/// number, so one product is 0 and the sum is the other's. It is a NaN wherever a number is not finite and
/// the other comparison might have found something else.
__device__ inline float larger_product(float above, float below, float low, float high) {
    return fmaf(above, high, rounded_product(below, low));
}

/// The bound of a page for one query head, whose scaled query has the numbers x(d), one dimension after the
/// other: what the host does.
template <class Real, class T, class Query>
__device__ Real bound_of_page(const Query& x, const T* least, std::int32_t dim) {
    Real bound = Real(0);
    for (std::int32_t d = 0; d < dim; ++d) {
        const Real a = rounded_product(x(d), static_cast<Real>(least[d])),
                   b = rounded_product(x(d), static_cast<Real>(least[dim + d]));
        bound += a < b ? b : a;
    }
    return bound;
}

/// Sizes of a warp's stages.
struct bound_stages {
    static constexpr int together = 4;                    // query heads that share a look at a page
    static constexpr int width = 64;                      // dimensions of a stage
    static constexpr int row_bytes = 2 * 2 * width + 16;  // both bounds of a page; odd, so that banks differ
    static constexpr int bytes = 32 * row_bytes, count = 2;  // of a stage; stages
    static constexpr int warp_bytes = count * bytes;
    static_assert(row_bytes % 128 == 16);
};

/// Bounds of a head's pages, a warp of several. T is a 16-bit type.
template <class T>
class bound_stream {
    using S = bound_stages;
    static constexpr int each = 8;  // numbers in 16 bytes
    struct alignas(16) eight {
        std::uint32_t pairs[each / 2];

        /// One instruction each for bf16, whose numbers are the upper halves of floats.
        [[nodiscard]] __device__ float number(int i) const {
            const std::uint32_t pair = pairs[i / 2];
            if constexpr (std::is_same_v<T, bf16>) {
                return __uint_as_float(i % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
            } else {
                const auto half = static_cast<std::uint16_t>(i % 2 == 0 ? pair : pair >> 16);
                T x;
                std::memcpy(&x, &half, sizeof(x));
                return static_cast<float>(x);
            }
        }
    };

  public:
    /// Numbers of queries in shared memory.
    __host__ __device__ static constexpr std::int32_t query_numbers(std::int32_t group, std::int32_t dim) {
        return (group + S::together - 1) / S::together * dim * 2 * S::together;
    }
    /// What number i of them is, where scaled(head, dimension) is a query's.
    template <class Scaled>
    __device__ static float query_number(std::int32_t i, std::int32_t group, std::int32_t dim,
                                         const Scaled& scaled) {
        const std::int32_t g = i / (dim * 2 * S::together) * S::together + i % S::together,
                           d = i / (2 * S::together) % dim;
        const float x = g < group ? scaled(g, d) : 0.0f;
        const bool below = i / S::together % 2 != 0;
        return (x < 0.0f) == below || x != x ? x : 0.0f;
    }

    /// `query`: [batches of S::together heads, dim, 2, S::together], numbers above 0 and below, 0 for the
    /// heads that are not there: see place(). `stages`: S::warp_bytes.
    __device__ bound_stream(const float* query, unsigned char* stages, std::int32_t dim, std::int32_t group)
        : query_(query),
          stages_(stages),
          dim_(dim),
          group_(group),
          chunks_((dim + S::width - 1) / S::width),
          batches_((group + S::together - 1) / S::together) {}

    /// visit(page, bound of the group) for pages begin, begin + step, ... of 32 each, up to `pages`;
    /// rows.bounds(page) is where a page's bounds are. By all lanes of a warp.
    template <class Rows, class Visit>
    __device__ void run(const Rows& rows, std::int32_t pages, std::int32_t begin, std::int32_t step,
                        bool mean, const Visit& visit) {
        const std::int32_t of_batch = chunks_ * batches_;  // stages of 32 pages
        const std::int32_t turns = pages > 32 * begin ? ((pages + 31) / 32 - begin + step - 1) / step : 0;
        const std::int32_t all = turns * of_batch;
        const T *ahead = nullptr, *now = nullptr;
        float bound[S::together] = {}, joined = 0.0f;
        std::int32_t asked = 0;
        const auto ask = [&] {
            if (asked < all) {
                if (asked % of_batch == 0) {
                    const std::int32_t page = 32 * (begin + asked / of_batch * step) + lane_id();
                    ahead = page < pages ? rows.bounds(page) : nullptr;
                }
                copy(ahead, asked % chunks_, asked % S::count);
            }
            copy_commit();  // empty ones too, so that the wait below counts right
            ++asked;
        };
        ask();
        for (std::int32_t stage = 0; stage < all; ++stage) {
            if (stage % of_batch == 0) {
                now = ahead;
                joined = 0.0f;
            }
            ask();
            copy_wait<S::count - 1>();
            __syncwarp();
            const std::int32_t chunk = stage % chunks_, batch = stage / chunks_ % batches_;
            add(bound, query_ + batch * dim_ * 2 * S::together, chunk, stage % S::count);
            if (chunk == chunks_ - 1) {
                join(bound, joined, batch, now, mean);
                const std::int32_t page = 32 * (begin + stage / of_batch * step) + lane_id();
                if (batch == batches_ - 1 && page < pages) {
                    visit(page, joined);
                }
            }
            __syncwarp();  // the next turn's copies may overwrite it
        }
        copy_wait<0>();
    }

  private:
    /// Sets out to copy `chunk` of the lanes' pages into a stage.
    __device__ void copy(const T* page, std::int32_t chunk, std::int32_t stage) const {
        const std::uint32_t to = shared_address(stages_ + stage * S::bytes);
        const int piece = lane_id() % 8, high = lane_id() / 8 % 2;
        const std::int32_t column = chunk * S::width + piece * each;
#pragma unroll 4
        for (int i = 0; i < 16; ++i) {
            const int row = 2 * i + lane_id() / 16;
            const T* const from = reinterpret_cast<const T*>(
                __shfl_sync(all_lanes, reinterpret_cast<unsigned long long>(page), row));
            if (from != nullptr && column < dim_) {
                copy_16(
                    to + static_cast<std::uint32_t>(row * S::row_bytes + high * 2 * S::width + piece * 16),
                    from + high * dim_ + column);
            }
        }
    }
    /// The dimensions of a stage, of the lane's page. Pages that are not there add what they find.
    __device__ void add(float (&bound)[S::together], const float* query, std::int32_t chunk,
                        std::int32_t stage) const {
        const unsigned char* const row = stages_ + stage * S::bytes + lane_id() * S::row_bytes;
        const std::int32_t first = chunk * S::width, left = dim_ - first;
#pragma unroll 1
        for (std::int32_t d = 0; d < S::width && d < left; d += each) {
            const eight low = *reinterpret_cast<const eight*>(row + 2 * d),
                        high = *reinterpret_cast<const eight*>(row + 2 * (S::width + d));
            const auto* const x = reinterpret_cast<const float4*>(query + (first + d) * 2 * S::together);
#pragma unroll
            for (int i = 0; i < each; ++i) {
                const float4 above = x[2 * i], below = x[2 * i + 1];
                const float a = low.number(i), b = high.number(i);
                bound[0] += larger_product(above.x, below.x, a, b);
                bound[1] += larger_product(above.y, below.y, a, b);
                bound[2] += larger_product(above.z, below.z, a, b);
                bound[3] += larger_product(above.w, below.w, a, b);
            }
        }
    }
    /// Takes the bounds of a batch's heads into the group's, and begins those of the next.
    __device__ void join(float (&bound)[S::together], float& joined, std::int32_t batch, const T* page,
                         bool mean) const {
#pragma unroll
        for (int g = 0; g < S::together; ++g) {
            if (batch * S::together + g < group_) {
                if (bound[g] != bound[g] && page != nullptr) {
                    // Not finite: which of two products counts is as on the host.
                    const float* const x = query_ + batch * dim_ * 2 * S::together + g;
                    bound[g] = bound_of_page<float>(
                        [&](std::int32_t d) {
                            const float above = x[2 * d * S::together], below = x[(2 * d + 1) * S::together];
                            return below == 0.0f ? above : below;
                        },
                        page, dim_);
                }
                joined = mean                                          ? joined + bound[g]
                         : (batch == 0 && g == 0) || joined < bound[g] ? bound[g]
                                                                       : joined;
            }
            bound[g] = 0.0f;
        }
    }

    const float* query_;
    unsigned char* stages_;
    std::int32_t dim_, group_, chunks_, batches_;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
