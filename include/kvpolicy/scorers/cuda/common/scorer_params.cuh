// What the scorers' kernels know of a call: its streams of tokens cut into chunks, and the scorer's input of
// a token.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/cuda/primitives/segment_search.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_tile.cuh>
#include <kvpolicy/scorers/rope.hpp>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Tokens of a chunk: what a block has in shared memory.
inline constexpr int scorer_chunk = 64;

/// A chunk: `count` tokens of one stream (a sequence, or one packed segment of it) from `first` on. begin is
/// where the stream's state is empty and positions are 0, from <= first the call's first token of the stream,
/// end its last plus 1.
struct scorer_span {
    std::int32_t b, h, plane, chunk_index;
    std::int32_t begin, from, end, first, count;
    std::int32_t segment;

    /// Where rows of the chunk stand in arrays [planes, chunks * scorer_chunk].
    __device__ std::int64_t row(std::int32_t chunks) const {
        return (std::int64_t{plane} * chunks + chunk_index) * scorer_chunk;
    }
};

/// A power of two that brings a number to [1, 2), given the bits of its magnitude, as far as it and its
/// inverse are normal numbers; 1 for 0, infinities and NaN.
__device__ inline float gradient_scale(std::uint32_t bits) {
    const auto exponent = static_cast<int>(bits >> 23);
    return bits == 0 || exponent == 255
               ? 1.0f
               : __uint_as_float(static_cast<std::uint32_t>(min(max(254 - exponent, 1), 253)) << 23);
}

/// The streams of a call. Chunks begin at a stream's first token, so streams of a plane (a head of a
/// sequence) have `chunks` chunks at most, some of them empty; the rows of a stream's chunks follow each
/// other.
struct scorer_streams {
    std::int32_t batch = 0, heads = 0;
    std::int32_t length = 0;  // sequences.length
    std::int32_t rows = 0;    // of k, v and scores, at least
    const std::int32_t* lengths = nullptr;
    const std::int32_t* starts = nullptr;
    const std::int32_t* edges = nullptr;  // checked
    std::int32_t segments = 1;
    std::int32_t chunks = 0;
    std::int32_t delay = 0;
    std::uint32_t* status = nullptr;
    // Where gradients of scores are scaled: [heads], the bits of each head's largest
    // (scorers/cuda/common/kernel_scale_gradients.cuh).
    const std::uint32_t* largest = nullptr;

    /// What takes the scale out of sums of head h.
    __device__ float unscale(std::int64_t h) const {
        return largest == nullptr ? 1.0f : 1.0f / gradient_scale(largest[h]);
    }
    __device__ void report(std::int32_t b, std::uint32_t bits) const {
        if (status != nullptr) {
            atomicOr(status + b, bits);
        }
    }
    __device__ bool fits(std::int32_t b) const {
        const std::int32_t n = lengths != nullptr ? lengths[b] : length;
        const std::int32_t s = starts != nullptr ? starts[b] : 0;
        return n >= 0 && n <= length && s >= 0 && std::int64_t{s} + n <= rows;
    }
    /// Whether what the call says of sequence b can be: its length and start, and edges, which are all 0
    /// where they were refused.
    __device__ bool sound(std::int32_t b) const {
        return fits(b) && (edges == nullptr || edges[segments] == length);
    }
    __device__ std::int32_t length_of(std::int32_t b) const {
        return !fits(b) ? 0 : lengths != nullptr ? lengths[b] : length;
    }
    __device__ std::int32_t start_of(std::int32_t b) const {
        return starts != nullptr && fits(b) ? starts[b] : 0;
    }
    __device__ std::int32_t first_chunk(std::int32_t segment, std::int32_t chunk = scorer_chunk) const {
        return edges == nullptr ? 0 : edges[segment] / chunk + segment;
    }
    /// The chunk of a plane; `chunk` is its tokens at most where a kernel cuts streams into others than
    /// scorer_chunk.
    __device__ scorer_span span(std::int32_t plane, std::int32_t chunk_index,
                                std::int32_t chunk = scorer_chunk) const {
        return span_of(plane / heads, plane % heads, chunk_index, chunk);
    }
    __device__ scorer_span span_of(std::int32_t b, std::int32_t h, std::int32_t chunk_index,
                                   std::int32_t chunk = scorer_chunk) const {
        scorer_span s;
        s.plane = b * heads + h;
        s.chunk_index = chunk_index;
        s.b = b;
        s.h = h;
        const std::int32_t n = length_of(s.b);
        std::int32_t before = chunk_index;
        s.segment = 0;
        if (edges == nullptr) {
            s.begin = 0;
            s.from = start_of(s.b);
            s.end = s.from + n;
        } else {
            const std::int32_t low =
                last_begun(segments, [&](std::int32_t i) { return first_chunk(i, chunk) <= chunk_index; });
            s.segment = low;
            s.begin = edges[low] < n ? edges[low] : n;
            s.from = s.begin;
            s.end = edges[low + 1] < n ? edges[low + 1] : n;
            before -= first_chunk(low, chunk);
        }
        s.first = s.from + before * chunk;
        const std::int32_t left = s.end - s.first;
        s.count = left < 0 ? 0 : left < chunk ? left : chunk;
        return s;
    }
    /// The chunk of a block, where a grid has one block per chunk: blockIdx.x = plane * chunks + slot.
    __device__ scorer_span span_of_block(std::int32_t chunk = scorer_chunk) const {
        return span(static_cast<std::int32_t>(blockIdx.x) / chunks,
                    static_cast<std::int32_t>(blockIdx.x) % chunks, chunk);
    }
    /// The first row of a chunk that reads a score, `delay` tokens after the token; s.count or more: no row
    /// does.
    __device__ std::int32_t first_read(const scorer_span& s) const {
        return max(0, s.begin + delay - s.first);
    }
};

/// What a scorer sees of a token.
enum class scorer_input : std::uint8_t {
    key_value,   ///< [k; v]
    normalized,  ///< [RMSNorm(k); RMSNorm(v)]
    write_gate,  ///< [RMSNorm(k before RoPE); RMSNorm(k)]
    turned,      ///< [k before RoPE; v]
};

/// The angle of a pair of numbers of the key at position t (Rope), beyond max_fp32_position without whole
/// turns: angle - 2 pi k in double, 2 pi being a sum of two numbers.
__device__ inline float rope_angle(position_t t, float frequency) {
    if (t <= max_fp32_position) {
        return static_cast<float>(t) * frequency;
    }
    const double angle = static_cast<double>(t) * static_cast<double>(frequency);
    const double turns = rint(angle * 0.15915494309189535);
    return static_cast<float>(fma(turns, -2.4492935982947064e-16, fma(turns, -6.283185307179586, angle)));
}
/// Up to this angle rope_sine_quick is exact to 1e-6.
inline constexpr float max_quick_angle = 16777216.0f;
/// sin and cos by the special function unit, of an angle from which turns are taken first: angle - 2 pi k.
/// The first step is exact: both terms are multiples of 2^-21, and little is left of them.
__device__ inline void rope_sine_quick(float angle, float& sine, float& cosine) {
    constexpr float rounds = 12582912.0f;  // 1.5 2^23: adding it rounds to an integer
    const float turns = fmaf(angle, 0.15915494309189535f, rounds) - rounds;
    const float rest = fmaf(turns, 1.7484555314695172e-7f, fmaf(turns, -6.2831854820251465f, angle));
    sine = __sinf(rest);
    cosine = __cosf(rest);
}
/// sin and cos of a RoPE angle for rows of T; where those are rounded to 16 bits, quickly.
template <class T>
__device__ inline void rope_sine(float angle, float& sine, float& cosine) {
    if (std::is_same_v<T, float> || fabsf(angle) > max_quick_angle) {
        sincosf(angle, &sine, &cosine);
    } else {
        rope_sine_quick(angle, sine, cosine);
    }
}

/// The inputs of all tokens: gathered from the views, never stored as a whole.
template <class T>
struct scorer_source {
    rows_view<const T> k, v;
    scorer_input input = scorer_input::key_value;
    float epsilon = 0.0f;
    rope_layout layout = rope_layout::none;
    std::int32_t rotated = 0;
    const float* frequencies = nullptr;  // [rotated / 2]
    std::int32_t size = 0;               // numbers of an input
    std::int32_t padded = 0;             // rounded up to 64

    /// Pair of column c of a key, its partner, and the sign of sine's term when the pair is turned by +angle.
    __device__ void pair_of(std::int32_t c, std::int32_t& pair, std::int32_t& partner, float& sign) const {
        if (layout == rope_layout::interleaved) {
            pair = c / 2;
            partner = c ^ 1;
            sign = c % 2 == 0 ? -1.0f : 1.0f;
        } else {
            const std::int32_t pairs = rotated / 2;
            pair = c < pairs ? c : c - pairs;
            partner = c < pairs ? c + pairs : c - pairs;
            sign = c < pairs ? -1.0f : 1.0f;
        }
    }
    /// Number c of a key turned by direction * its angle at `position`; `get` gives the key's numbers.
    template <class Get>
    __device__ float turned(std::int32_t c, position_t position, float direction, const Get& get) const {
        if (c >= rotated) {
            return get(c);
        }
        std::int32_t pair, partner;
        float sign;
        pair_of(c, pair, partner, sign);
        float sine, cosine;
        rope_sine<T>(rope_angle(position, frequencies[pair]), sine, cosine);
        return get(c) * cosine + sign * direction * sine * get(partner);
    }

    /// Number c of the input of token t; scale_k and scale_v are the norms' factors.
    __device__ float number(const scorer_span& s, std::int32_t t, std::int32_t c, float scale_k,
                            float scale_v) const {
        const T* key = k.row(s.b, s.h, t);
        if (input == scorer_input::write_gate) {
            const auto get = [&](std::int32_t i) { return static_cast<float>(key[i]); };
            return scale_k * (c < k.dim ? turned(c, t - s.begin, -1.0f, get) : get(c - k.dim));
        }
        if (input == scorer_input::turned) {
            return turned_number(key, v.row(s.b, s.h, t), t - s.begin, c);
        }
        return c < k.dim ? static_cast<float>(key[c]) * scale_k
                         : static_cast<float>(v.row(s.b, s.h, t)[c - k.dim]) * scale_v;
    }

    /// The norms' factors of tokens first + r, r in [low, high), one warp a row. Other rows get 0. Ends with
    /// a barrier.
    __device__ void norms(const scorer_span& s, std::int32_t first, int low, int high, float* scale_k,
                          float* scale_v) const {
        const int warps = static_cast<int>(blockDim.x) / 32;
        for (int r = warp_id(); r < scorer_chunk; r += warps) {
            float of_k = 1.0f, of_v = 1.0f;
            if ((input == scorer_input::normalized || input == scorer_input::write_gate) && r >= low &&
                r < high) {
                of_k = inverse_norm(k.row(s.b, s.h, first + r), k.dim);
                if (input == scorer_input::normalized) {
                    of_v = inverse_norm(v.row(s.b, s.h, first + r), v.dim);
                }
            }
            if (lane_id() == 0) {
                scale_k[r] = of_k;
                scale_v[r] = of_v;
            }
        }
        __syncthreads();
    }

    /// Whether keys are turned in pairs of eight neighbors and the eight `rotated` / 2 columns further,
    /// which turn_eight does.
    __device__ bool turns_eight() const {
        return !shared_tile<T>::plain && input == scorer_input::turned &&
               (rotated == 0 || layout == rope_layout::half_split) && rotated % 16 == 0;
    }
    /// Columns c to c + 7 of a key before RoPE, and those rotated / 2 further.
    __device__ void turn_eight(const T* key, position_t position, std::int32_t c, float (&low)[8],
                               float (&high)[8]) const {
        key += c;
        float x[8], y[8];
        load_eight(key, x);
        load_eight(key + rotated / 2, y);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            float sine, cosine;
            rope_sine<T>(rope_angle(position, frequencies[c + e]), sine, cosine);
            low[e] = x[e] * cosine + y[e] * sine;
            high[e] = y[e] * cosine - x[e] * sine;
        }
    }
    /// Number c of [k before RoPE; v].
    __device__ float turned_number(const T* key, const T* value, position_t position, std::int32_t c) const {
        return c < k.dim
                   ? turned(c, position, -1.0f, [&](std::int32_t i) { return static_cast<float>(key[i]); })
                   : static_cast<float>(value[c - k.dim]);
    }
    __device__ static void load_eight(const T* from, float (&x)[8]) {
        struct alignas(16) eight {
            T of[8];
        };
        const eight all = *reinterpret_cast<const eight*>(from);
#pragma unroll
        for (int e = 0; e < 8; ++e) {
            x[e] = static_cast<float>(all.of[e]);
        }
    }

    /// Columns [from, from + columns) of the inputs of tokens first + r into rows r of a tile, for r in [low,
    /// high); other rows and columns beyond `size` become 0. By thread `thread` of `threads`. The caller
    /// synchronizes (and waits for copies).
    __device__ void load(const scorer_span& s, std::int32_t first, int low, int high, const float* scale_k,
                         const float* scale_v, const shared_tile<T>& to, int from, int columns, int thread,
                         int threads) const {
        const int across = columns / 8, step_r = threads / across, step_c = threads % across;
        if constexpr (!shared_tile<T>::plain) {
            if (input == scorer_input::key_value && step_c == 0) {
                copy_columns(s, first, low, high, to, from, thread % across * 8, thread / across, step_r);
                return;
            }
        }
        for (int r = thread / across, i = thread % across; r < scorer_chunk; r += step_r) {
            const int c = from + i * 8, line = r;
            i += step_c;
            if (i >= across) {
                i -= across;
                ++r;
            }
            const bool in = line >= low && line < high && c < size;
            if constexpr (!shared_tile<T>::plain) {
                if (input == scorer_input::key_value) {  // widths are multiples of 8
                    const bool of_key = c < k.dim;
                    const T* row = of_key ? k.row(s.b, s.h, in ? first + line : 0) + (in ? c : 0)
                                          : v.row(s.b, s.h, in ? first + line : 0) + (in ? c - k.dim : 0);
                    copy_16(shared_address(to.data) + to.offset(line, c - from), row, in ? 16 : 0);
                    continue;
                }
            }
            float x[8];
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                x[e] =
                    in && c + e < size ? number(s, first + line, c + e, scale_k[line], scale_v[line]) : 0.0f;
            }
            to.set_eight(line, c - from, x);
        }
        copy_commit();
    }

    /// The same by all threads of the block.
    __device__ void load(const scorer_span& s, std::int32_t first, int low, int high, const float* scale_k,
                         const float* scale_v, const shared_tile<T>& to, int from, int columns) const {
        load(s, first, low, high, scale_k, scale_v, to, from, columns, static_cast<int>(threadIdx.x),
             static_cast<int>(blockDim.x));
    }

  private:
    /// load() of eight columns from from + column on, in rows begin, begin + step and so on: keys and values
    /// as they are, whose widths are multiples of 8.
    __device__ void copy_columns(const scorer_span& s, std::int32_t first, int low, int high,
                                 const shared_tile<T>& to, int from, int column, int begin, int step) const {
        const int c = from + column;
        const bool of_key = c < k.dim, there = c < size;
        const rows_view<const T>& of = of_key ? k : v;
        const T* const head = of.row(s.b, s.h, 0) + (of_key ? c : there ? c - k.dim : 0);
        const std::int64_t stride = of.row_stride;
        const std::uint32_t tile = shared_address(to.data), own = tile + to.offset(begin, column);
        const T* row = head + (first + begin) * stride;
        const bool same = step % 8 == 0;  // rows whose 16 bytes stand in the same places
#pragma unroll 4
        for (int r = begin; r < scorer_chunk; r += step, row += step * stride) {
            const bool in = there && r >= low && r < high;
            copy_16(same ? own + static_cast<std::uint32_t>((r - begin) * 128) : tile + to.offset(r, column),
                    in ? row : head, in ? 16 : 0);
        }
        copy_commit();
    }
    __device__ float inverse_norm(const T* row, std::int32_t dim) const {
        float sum = 0.0f;
        for (int c = lane_id(); c < dim; c += 32) {
            const auto x = static_cast<float>(row[c]);
            sum += x * x;
        }
        return 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(dim) + epsilon);
    }
};

/// The rows of a stream: what a convolution reads tokens by. Others are those of a cache
/// (caches/cuda/scoring/kernel_cache_conv.cuh).
template <class T>
struct scorer_rows {
    rows_view<const T> k, v;
    scorer_span s;

    __device__ bool in(std::int32_t t) const { return t >= s.begin && t < s.end; }
    __device__ const T* key(std::int32_t t) const { return k.row(s.b, s.h, t); }
    __device__ const T* value(std::int32_t t) const { return v.row(s.b, s.h, t); }
    __device__ position_t position(std::int32_t t) const { return t - s.begin; }
    __device__ float position_in_fp32(std::int32_t t) const { return static_cast<float>(t - s.begin); }

    /// Keys or values of tokens t, t + step, ...: each call gives the next one's row, which exists where
    /// in(t).
    struct path {
        const T* at;
        std::int64_t step;

        __device__ const T* operator()(std::int32_t, bool) {
            const T* const row = at;
            at += step;
            return row;
        }
    };
    __device__ path path_from(bool of_key, std::int32_t t, std::int32_t step) const {
        return {of_key ? key(t) : value(t), step * (of_key ? k.row_stride : v.row_stride)};
    }
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
