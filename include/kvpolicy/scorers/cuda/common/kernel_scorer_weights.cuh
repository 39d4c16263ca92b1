// What the backward passes of all scorers share: weights as tiles take them, and the sums over tokens that
// become gradients of weights and inputs. A scorer hands over rows d y [planes, chunks * 64][width], what
// each token's loss says about the rows of a weight matrix, of which columns beyond weight_stack::used may
// hold anything. Sums are made in one fixed order: blocks write partial sums, and one thread adds those up.
#pragma once

#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/hopper.cuh>
#include <kvpolicy/cuda/launch.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_params.cuh>
#include <kvpolicy/scorers/cuda/common/scorer_tile.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Rows of a stacked matrix that come from one array [heads, count, X], and that array's gradient. Without
/// weights the rows are unit vectors: row i picks number unit + i of the input; or 0, where unit is below 0.
struct weight_rows {
    const float* weights = nullptr;
    float* gradient = nullptr;
    std::int32_t at = 0;
    std::int32_t count = 0;
    std::int32_t unit = -1;
};

/// A stacked matrix of `rows` rows, a multiple of 64; rows of no part are 0.
struct weight_stack {
    static constexpr int most = 4;
    weight_rows part[most];
    std::int32_t parts = 0;
    std::int32_t rows = 0;
    std::int32_t used = 0;  // gradients of rows from here on are not used; a multiple of 16

    /// Adds a part; returns where its rows begin, a multiple of 8.
    std::int32_t add(const float* weights, float* gradient, std::int32_t count, std::int32_t unit = -1) {
        const std::int32_t at = parts == 0 ? 0 : (part[parts - 1].at + part[parts - 1].count + 7) / 8 * 8;
        part[parts++] = {weights, gradient, at, count, unit};
        hold(at + count);
        used = (at + count + 15) / 16 * 16;
        return at;
    }
    /// Whether somebody wants a gradient of rows [from, to).
    [[nodiscard]] KVPOLICY_HOST_DEVICE bool wanted(std::int32_t from, std::int32_t to) const {
        for (int p = 0; p < parts; ++p) {
            if (part[p].gradient != nullptr && part[p].at < to && from < part[p].at + part[p].count) {
                return true;
            }
        }
        return false;
    }
    /// Makes space for so many rows, since products are computed for whole tiles of them.
    void hold(std::int32_t count) { rows = rows > count ? rows : (count + 63) / 64 * 64; }
};

/// The matrices of a scorer as one, rounded to T.
/// Grid: strided. Block: 256 threads, eight neighbors of a row each. Shared memory: none.
/// In: stack, the fp32 arrays [heads, count, size] of its parts.
/// Out: to [heads, stack.rows, padded] T, overwritten; 0 where no weight is and in columns from `size` on.
template <class T>
__global__ void __launch_bounds__(256)
    stack_weights_kernel(const weight_stack stack, const std::int32_t heads, const std::int32_t size,
                         const std::int32_t padded, T* const to) {
    const std::int32_t across = padded / 8, lines = heads * stack.rows;  // eight neighbors per thread
    for (std::int64_t i = std::int64_t{blockIdx.x} * 256 + threadIdx.x; i < std::int64_t{lines} * across;
         i += std::int64_t{gridDim.x} * 256) {
        const auto line = static_cast<std::int32_t>(i / across);
        const std::int32_t c = static_cast<std::int32_t>(i % across) * 8, n = line % stack.rows,
                           h = line / stack.rows;
        float weights[8] = {};
        for (int p = 0; p < stack.parts; ++p) {
            const weight_rows& part = stack.part[p];
            const std::int32_t r = n - part.at;
            if (r < 0 || r >= part.count) {
                continue;
            }
            const float* const from = part.weights == nullptr
                                          ? nullptr
                                          : part.weights + (std::int64_t{h} * part.count + r) * size + c;
#pragma unroll
            for (int e = 0; e < 8; ++e) {
                if (c + e < size) {
                    weights[e] = from != nullptr                            ? from[e]
                                 : part.unit >= 0 && c + e == part.unit + r ? 1.0f
                                                                            : 0.0f;
                }
            }
        }
        T* const row = to + std::int64_t{line} * padded + c;
#pragma unroll
        for (int e = 0; e < 8; e += 2) {
            if constexpr (shared_tile<T>::plain) {
                row[e] = weights[e];
                row[e + 1] = weights[e + 1];
            } else {
                reinterpret_cast<std::uint32_t*>(row)[e / 2] = pack<T>(weights[e], weights[e + 1]);
            }
        }
    }
}

/// y = W x of 64 inputs by four warps: acc += x W^T over all columns of x, for rows [0, 8 NI) of `weights`
/// (`padded` numbers each). `slabs`: memory of two tiles of 8 NI rows and 64 columns. Waits for the copies of
/// x too; ends with a barrier.
template <int NI, class T>
__device__ inline void project(float (&acc)[1][NI][4], const shared_tile<T>& x, const T* weights,
                               std::int32_t padded, unsigned char* slabs) {
    constexpr int rows = 8 * NI, threads = 128;
    const std::size_t slab = shared_tile<T>::bytes(rows, 64);
    const int count = padded / 64;
    for_each_slab(
        count,
        [&](int i) {
            copy_rows(shared_tile<T>{slabs + slab * (i % 2), rows}, weights + i * 64, padded, 64, rows,
                      threads);
            copy_commit();
        },
        [&](int i) {
            add_product<1, NI, 64, false, false>(acc, x.from(64 * i), 16 * warp_id(),
                                                 shared_tile<T>{slabs + slab * (i % 2), rows}, 0);
        });
}

/// Chunks that a block of weight_gradient_kernel has in shared memory.
template <class T>
inline constexpr int weight_gradient_stages = shared_tile<T>::plain ? 1 : 3;

/// Partial sums over chunks of d W = d y^T x.
/// Grid: splits x heads x (stack.rows / 64) x (padded / 128), the columns first. Block: 128 threads (on
/// Hopper one warpgroup). Shared memory: tiles of 64 rows and 192 columns (16-bit rows: 3 stages) and the
/// norms' factors.
/// In: d_rows [planes, chunks * 64, stack.rows] T; the input of row r of a chunk is token first + r -
/// shift of `source`.
/// Out: partial [splits, heads, stack.rows, padded] fp32, overwritten where the stack has gradients.
/// 1. Place of the block; a block without gradients ends. 2.
/// Per chunk of its part: d y and x to shared memory (16-bit rows: two chunks ahead), then the product,
/// accumulated in fp32.
/// 3. The accumulators go to `partial`.
template <class T>
__global__ void __launch_bounds__(128)
    weight_gradient_kernel(const scorer_streams streams, const scorer_source<T> source,
                           const weight_stack stack, const T* const d_rows, const std::int32_t shift,
                           const std::int32_t splits, float* const partial) {
    const std::int32_t width = stack.rows;
    shared_parts parts(aligned_dynamic_shared());
    constexpr int stages = weight_gradient_stages<T>;
    unsigned char* const tiles = parts.tile<T>(scorer_chunk, stages * (64 + 128)).data;
    const auto d_y = [&](int stage) {
        return shared_tile<T>{tiles + shared_tile<T>::bytes(scorer_chunk, 192) * stage, scorer_chunk};
    };
    const auto x = [&](int stage) { return d_y(stage).from(64); };
    auto* const scale_k = parts.take<float>(scorer_chunk);
    auto* const scale_v = parts.take<float>(scorer_chunk);
    // 1. Place of the block.
    const std::int32_t across = (source.padded + 127) / 128, down = width / 64;
    auto item = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t column = item % across * 128;
    item /= across;
    const std::int32_t row = item % down * 64;
    if (!stack.wanted(row, row + 64)) {
        return;
    }
    item /= down;
    const std::int32_t h = item % streams.heads, split = item / streams.heads;
    const std::int32_t chunks = streams.batch * streams.chunks;
    const std::int32_t each = (chunks + splits - 1) / splits;
    const std::int32_t last = min(chunks, (split + 1) * each);
    const int m0 = warp_id() / 2 * 32, n0 = warp_id() % 2 * 64;
    float acc[2][8][4];
    clear(acc);
    // 2. The chunks of its part.
    std::int32_t chunk = split * each, b = chunk / streams.chunks, chunk_index = chunk % streams.chunks;
    scorer_span s{};
    // The next chunk that has rows, into s; false where there is none.
    const auto advance = [&] {
        while (chunk < last) {
            s = streams.span_of(b, h, chunk_index);
            ++chunk;
            ++chunk_index;
            if (chunk_index == streams.chunks) {
                chunk_index = 0;
                ++b;
            }
            if (max(0, s.begin + shift - s.first) < s.count) {
                return true;
            }
        }
        return false;
    };
    const auto load = [&](int stage) {
        const T* const rows = d_rows + s.row(streams.chunks) * width + row;
        if constexpr (shared_tile<T>::plain) {
            copy_rows(d_y(stage), rows, width, 64, s.count, 128, stack.used - row);
        } else {
            const int r = static_cast<int>(threadIdx.x) / 8, c = static_cast<int>(threadIdx.x) % 8 * 8;
            const std::uint32_t to = shared_address(d_y(stage).data) + d_y(stage).offset(r, c);
            const T* const own = rows + r * width + c;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                copy_16(to + static_cast<std::uint32_t>(i * 16 * 128), own + i * 16 * width,
                        r + 16 * i < s.count && row + c < stack.used ? 16 : 0);
            }
        }
        source.load(s, s.first - shift, max(0, s.begin + shift - s.first), s.count, scale_k, scale_v,
                    x(stage), column, 128);
    };
    // On Hopper the four warps are a warpgroup, and acc has its layout.
    constexpr bool hopper = !shared_tile<T>::plain && KVPOLICY_HOPPER_CODE == 1;
    const auto wait_for_others = [] {
        if constexpr (hopper) {
            fence_async_proxy();
        }
        __syncthreads();
    };
    const auto multiply = [&](int stage) {
        if constexpr (hopper) {
            auto& flat = reinterpret_cast<float(&)[64]>(acc);
            const std::uint64_t a = describe_mn_major(shared_address(d_y(stage).data), scorer_chunk * 128);
            const std::uint64_t b = describe_mn_major(shared_address(x(stage).data), scorer_chunk * 128);
            pin(flat);
            wgmma_fence();
#pragma unroll
            for (int k = 0; k < scorer_chunk / 16; ++k) {
                wgmma<T, 1, 1>(flat, a + static_cast<std::uint64_t>(k) * (2048 / 16),
                               b + static_cast<std::uint64_t>(k) * (2048 / 16), 1);
            }
            wgmma_commit();
            wgmma_wait<0>();
            pin(flat);
        } else {
            add_product<2, 8, 64, true, true>(acc, d_y(stage), m0, x(stage), n0);
        }
    };
    // Plain copies run ahead; what is computed on the way is not.
    if (!shared_tile<T>::plain && source.input == scorer_input::key_value) {
        std::int32_t fetched = 0;
        const auto fetch = [&](int stage) {
            if (advance()) {
                load(stage);
                ++fetched;
            } else {
                copy_commit();
            }
        };
        for (int i = 0; i < stages - 1; ++i) {
            fetch(i);
        }
        int stage = 0;
        for (std::int32_t done = 0; done < fetched; ++done) {
            copy_wait<(stages > 1 ? stages - 2 : 0)>();
            wait_for_others();  // this chunk is there, and the one before has been multiplied
            fetch(stage == 0 ? stages - 1 : stage - 1);
            multiply(stage);
            stage = stage + 1 == stages ? 0 : stage + 1;
        }
    } else {
        while (advance()) {
            source.norms(s, s.first - shift, max(0, s.begin + shift - s.first), s.count, scale_k, scale_v);
            load(0);
            copy_wait<0>();
            wait_for_others();
            multiply(0);
            __syncthreads();  // the tiles are free
        }
    }
    // 3. To `partial`.
    float* const to = partial + (std::int64_t{split} * streams.heads + h) * width * source.padded;
    const int lane = lane_id();
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int n = row + (hopper ? 16 * warp_id() : m0 + 16 * i) + lane / 4 + 8 * (e / 2);
                const int c = column + (hopper ? 64 * i : n0) + 8 * j + lane % 4 * 2 + e % 2;
                if (c < source.padded) {
                    to[std::int64_t{n} * source.padded + c] = acc[i][j][e];
                }
            }
        }
    }
}

/// Adds the partial sums of weight_gradient_kernel to the arrays of the stack, in one order: the same bits in
/// every run.
/// Grid: strided. Block: 256 threads, a number each. Shared memory: none.
/// In: partial [splits, heads, stack.rows, padded] fp32.
/// Out: each part's gradient [heads, count, size] fp32, accumulated (+=), times the inverse of the head's
/// scale.
template <class Stack>
__global__ void __launch_bounds__(256)
    add_weight_gradients_kernel(const scorer_streams streams, const Stack stack, const float* const partial,
                                const std::int32_t splits, const std::int32_t size,
                                const std::int32_t padded) {
    const std::int32_t heads = streams.heads;
    const std::int64_t count = std::int64_t{heads} * stack.rows * size;
    for (std::int64_t i = std::int64_t{blockIdx.x} * 256 + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * 256) {
        const auto c = static_cast<std::int32_t>(i % size);
        const auto n = static_cast<std::int32_t>(i / size % stack.rows);
        const std::int64_t h = i / size / stack.rows;
        for (int p = 0; p < stack.parts; ++p) {
            const weight_rows& part = stack.part[p];
            const std::int32_t r = n - part.at;
            if (part.gradient == nullptr || r < 0 || r >= part.count) {
                continue;
            }
            float sum = 0.0f;
            for (std::int32_t s = 0; s < splits; ++s) {
                sum += partial[((std::int64_t{s} * heads + h) * stack.rows + n) * padded + c];
            }
            part.gradient[(h * part.count + r) * size + c] += sum * streams.unscale(h);
        }
    }
}

/// Numbers of chunks [batch, heads, chunks][width], of which into[h][i] gets those at `at` + i, i < count,
/// added up over the chunks of head h.
struct chunk_sum {
    const float* partial = nullptr;
    float* into = nullptr;
    std::int32_t width = 0, at = 0, count = 0;
};
struct chunk_sums {
    static constexpr int most = 5;
    chunk_sum part[most];
    std::int32_t parts = 0;

    /// Nothing where `into` is null.
    void add(const float* partial, std::int32_t width, std::int32_t at, std::int32_t count, float* into) {
        if (into != nullptr) {
            part[parts++] = {partial, into, width, at, count};
        }
    }
    [[nodiscard]] std::int64_t count() const {
        std::int64_t all = 0;
        for (int p = 0; p < parts; ++p) {
            all += part[p].count;
        }
        return all;
    }
};

/// Adds up numbers of chunks by head, in one order: the same bits in every run.
/// Grid: a warp per number. Block: 128 threads. Shared memory: none.
/// In: of each part partial [B, heads, chunks, width] fp32.
/// Out: of each part into [heads, count] fp32, accumulated (+=), times the inverse of the head's scale.
template <class Sums>
__global__ void __launch_bounds__(128) add_sums_kernel(const scorer_streams streams, const Sums sums) {
    const std::int32_t batch = streams.batch, heads = streams.heads, chunks = streams.chunks;
    std::int64_t item = std::int64_t{blockIdx.x} * 4 + warp_id();
    for (int p = 0; p < sums.parts; ++p) {
        const chunk_sum& all = sums.part[p];
        if (item >= std::int64_t{heads} * all.count) {
            item -= std::int64_t{heads} * all.count;
            continue;
        }
        const std::int64_t h = item / all.count, i = item % all.count;
        float sum = 0.0f;
        for (std::int32_t c = lane_id(); c < batch * chunks; c += 32) {
            const std::int64_t chunk = (std::int64_t{c / chunks} * heads + h) * chunks + c % chunks;
            sum += all.partial[chunk * all.width + all.at + i];
        }
        sum = warp_sum(sum);
        if (lane_id() == 0) {
            all.into[h * all.count + i] += sum * streams.unscale(h);
        }
        return;
    }
}

/// Rows d y whose weights lead back to the inputs: token t's row stands `shift` rows later, where its stream
/// has that.
template <class T>
struct gradient_rows {
    const T* rows = nullptr;     // [planes, chunks * 64, width]
    const T* weights = nullptr;  // [heads, width, padded]
    std::int32_t width = 0;
    std::int32_t used = 0;  // columns of d y, a multiple of 16; others count nothing
    std::int32_t shift = 0;
};

/// Columns of d x that a block holds at once: of keys and values as they are, 128; a norm needs whole rows,
/// and so does RoPE.
KVPOLICY_HOST_DEVICE inline std::int32_t input_gradient_columns(scorer_input input, std::int32_t padded) {
    return input == scorer_input::key_value ? 128 : padded;
}
template <class T>
KVPOLICY_HOST_DEVICE std::size_t input_gradient_shared(scorer_input input, std::int32_t padded) {
    shared_parts parts(nullptr);
    parts.tile<T>(scorer_chunk, 64);
    parts.tile<T>(64, 128);
    parts.take<float>(scorer_chunk * (input_gradient_columns(input, padded) + 4));
    parts.take<float>(2 * scorer_chunk);
    return parts.bytes();
}

/// acc += d y W over the columns of one group of rows, 128 columns of W from `column` on.
template <class T>
__device__ __forceinline__ void add_input_gradients(float (&acc)[1][16][4], const scorer_streams& streams,
                                                    const scorer_span& s, const scorer_source<T>& source,
                                                    const gradient_rows<T>& group, std::int32_t column,
                                                    const shared_tile<T>& d_y, const shared_tile<T>& w) {
    const std::int32_t there = min(s.count, s.end - group.shift - s.first);
    for (std::int32_t n = 0; n < group.used && there > 0; n += 64) {
        copy_rows(d_y, group.rows + (s.row(streams.chunks) + group.shift) * group.width + n, group.width, 64,
                  there, 128, group.used - n);
        copy_rows(w, group.weights + (std::int64_t{s.h} * group.width + n) * source.padded + column,
                  source.padded, min(128, source.padded - column), 64, 128);
        copy_commit();
        copy_wait<0>();
        __syncthreads();
        add_product<1, 16, 64, false, true>(acc, d_y, 16 * warp_id(), w, 0);
        __syncthreads();
    }
}

/// Rows of d_x back through the norms and RoPE to d_k and d_v, a warp per token. scale_k, scale_v: the norms'
/// factors.
template <class T>
__device__ __forceinline__ void through_input_norms(const scorer_source<T>& source, const scorer_span& s,
                                                    const float* d_x, int pitch, const float* scale_k,
                                                    const float* scale_v, const rows_view<float>& d_k,
                                                    const rows_view<float>& d_v) {
    const int lane = lane_id();
    for (int r = warp_id(); r < s.count; r += 4) {
        const std::int32_t t = s.first + r;
        const float* const of_row = d_x + r * pitch;
        float* const to_k = d_k.row(s.b, s.h, t);
        float* const to_v = d_v.row(s.b, s.h, t);
        const T* const key = source.k.row(s.b, s.h, t);
        const T* const value = source.v.row(s.b, s.h, t);
        const std::int32_t head_dim_qk = source.k.dim, head_dim_vo = source.v.dim;
        const auto plain = [&](std::int32_t c) { return of_row[c]; };
        // d y = scale (d x - x mean(d x . x)) with x = scale y, y the row before its norm
        const auto through_norm = [&](const T* y, float scale, std::int32_t dim, float* to, const auto& d) {
            float along = 0.0f;
            for (std::int32_t c = lane; c < dim; c += 32) {
                along += d(c) * static_cast<float>(y[c]) * scale;
            }
            along = warp_sum(along) / static_cast<float>(dim);
            for (std::int32_t c = lane; c < dim; c += 32) {
                to[c] = scale * (d(c) - static_cast<float>(y[c]) * scale * along);
            }
        };
        if (source.input == scorer_input::write_gate) {
            // Rotations keep lengths, so RMSNorm(k before RoPE) is RMSNorm(k) turned back.
            through_norm(key, scale_k[r], head_dim_qk, to_k, [&](std::int32_t c) {
                return source.turned(c, t - s.begin, 1.0f, plain) + of_row[head_dim_qk + c];
            });
            for (std::int32_t c = lane; c < head_dim_vo; c += 32) {
                to_v[c] = 0.0f;
            }
        } else {
            through_norm(key, scale_k[r], head_dim_qk, to_k, plain);
            through_norm(value, scale_v[r], head_dim_vo, to_v,
                         [&](std::int32_t c) { return of_row[head_dim_qk + c]; });
        }
    }
}

/// d x = W^T d y of a chunk's tokens, over one or two groups of rows, and back through the norms and RoPE.
/// Grid: a block per chunk. Block: 128 threads. Shared memory: input_gradient_shared().
/// In: first, second: rows d y [planes, chunks * 64, width] T and weights [heads, width, padded] T.
/// Out: d_k [B, S, heads, head_dim_qk] and d_v fp32, overwritten.
/// 1. Per 128 columns: the products of both groups.
/// 2. The sums go to d_x in shared memory; without norms or RoPE they go to d_k and d_v from there.
/// 3. Else, with whole rows, back through the norms and RoPE.
template <class T>
__global__ void __launch_bounds__(128)
    input_gradient_kernel(const scorer_streams streams, const scorer_source<T> source,
                          const gradient_rows<T> first, const gradient_rows<T> second,
                          const rows_view<float> d_k, const rows_view<float> d_v) {
    const scorer_span s = streams.span_of_block();
    if (s.count == 0) {
        return;
    }
    shared_parts parts(aligned_dynamic_shared());
    const auto d_y = parts.tile<T>(scorer_chunk, 64);
    const auto w = parts.tile<T>(64, 128);
    const int pitch = input_gradient_columns(source.input, source.padded) + 4;
    const bool whole = source.input != scorer_input::key_value;
    const float unscale = streams.unscale(s.h);
    auto* const d_x = parts.take<float>(scorer_chunk * pitch);
    auto* const scale_k = parts.take<float>(2 * scorer_chunk);
    float* const scale_v = scale_k + scorer_chunk;
    const int lane = lane_id();
    for (std::int32_t column = 0; column < source.padded; column += 128) {
        // 1. The products of both groups.
        float acc[1][16][4];
        clear(acc);
        for (int g = 0; g < 2; ++g) {
            add_input_gradients(acc, streams, s, source, g == 0 ? first : second, column, d_y, w);
        }
#pragma unroll
        for (int j = 0; j < 16; ++j) {
#pragma unroll
            for (int e = 0; e < 4; ++e) {
                const int r = 16 * warp_id() + lane / 4 + 8 * (e / 2);
                const int c = 8 * j + lane % 4 * 2 + e % 2;
                if (column + c < source.padded) {
                    // 2. To d_x.
                    d_x[r * pitch + (whole ? column : 0) + c] = acc[0][j][e] * unscale;
                }
            }
        }
        if (whole) {
            continue;
        }
        __syncthreads();
        for (int r = warp_id(); r < s.count; r += 4) {
            float* const to_k = d_k.row(s.b, s.h, s.first + r);
            float* const to_v = d_v.row(s.b, s.h, s.first + r);
            for (std::int32_t i = lane; i < min(128, source.size - column); i += 32) {
                const std::int32_t c = column + i;
                (c < source.k.dim ? to_k[c] : to_v[c - source.k.dim]) = d_x[r * pitch + i];
            }
        }
        __syncthreads();  // d_x is free
    }
    if (!whole) {
        return;
    }
    // 3. Back through norms and RoPE.
    source.norms(s, s.first, 0, s.count, scale_k, scale_v);  // its barrier is also d_x's
    through_input_norms(source, s, d_x, pitch, scale_k, scale_v, d_k, d_v);
}

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
