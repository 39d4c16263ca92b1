// The forward pass on any GPU from compute capability 8.0: one block of four warps per tile, mma.sync, keys
// and values gathered by cp.async into two stages.
#pragma once

#include <kvpolicy/attention/cuda/forward/forward_params.cuh>
#include <kvpolicy/attention/cuda/forward/online_softmax.cuh>
#include <kvpolicy/attention/cuda/forward/row_stream.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/core/types.hpp>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/mma.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Sizes for head_dims up to Dim. `General` kernels know soft cap, biases and slopes below 0.
template <class Storage, int Dim_, bool General_>
struct forward_portable_sizes {
    using T = Storage;
    static constexpr int Dim = Dim_;
    static constexpr bool General = General_;
    static constexpr int threads = 128;
    static constexpr int rows_16 = Dim <= 128 ? 2 : 1;  // rows per warp, in units of 16
    static constexpr int rows = 64 * rows_16;
    // What fits beside the queries in the 99 KB that every GPU since 8.0 gives a block.
    static constexpr int keys = Dim <= 64 ? 64 : (Dim <= 128 ? 64 : 32) / (General ? 2 : 1);
    static constexpr int stages = 2;
    static constexpr int row_bytes = Dim * 2;
};

template <class S>
struct forward_portable_memory {
    alignas(128) unsigned char q[S::rows * S::row_bytes];
    unsigned char k[S::stages][S::keys * S::row_bytes];
    unsigned char v[S::stages][S::keys * S::row_bytes];
    key_notes<S::keys, S::General> notes[S::stages];
    key_numbers<S::keys> numbers;
    union {
        stream_memory<S::keys, S::General, listed_rows> listed;
        stream_memory<S::keys, S::General, scanned_rows> scanned;
    };
};

/// What a launch asks for: dynamic shared memory is aligned to 16 bytes only.
template <class S>
constexpr std::size_t forward_portable_shared_bytes() {
    constexpr std::size_t bytes = sizeof(forward_portable_memory<S>) + 112;
    static_assert(bytes <= 99 * 1024);
    return bytes;
}

template <class S>
class agent_forward_portable {
  public:
    using T = typename S::T;
    using Memory = forward_portable_memory<S>;

    __device__ agent_forward_portable(const forward_params<T>& call, unsigned char* shared)
        : call_(call),
          memory_(*reinterpret_cast<Memory*>(shared + ((128 - (shared_address(shared) & 127)) & 127))),
          thread_(static_cast<int>(threadIdx.x)) {}

    __device__ void run(std::uint32_t number) {
        const tile_coords coords = tile_coords_of(call_, number);
        if (coords.queries <= 0) {
            return;
        }
        load_queries(coords);
        if (call_.listed) {
            attend(coords, memory_.listed);
        } else {
            attend(coords, memory_.scanned);
        }
    }

  private:
    static constexpr int chunks = S::Dim / 8;  // 16 bytes each
    static constexpr int scores = S::keys / 2;
    static constexpr int columns = S::Dim / 2;

    __device__ void load_queries(const tile_coords& coords) const {
        const std::uint32_t to = shared_address(memory_.q);
        const rows_view<const T>& q = call_.params.q;
        const std::int32_t first = call_.params.query_row(coords.b, coords.first_query);
        for (int i = thread_; i < S::rows * chunks; i += S::threads) {
            const int row = i / chunks;
            const int chunk = i % chunks;
            const int query = row / call_.heads;
            const int head = row % call_.heads;
            const bool there = query < coords.queries && head < coords.heads && 8 * chunk < q.dim;
            const std::int64_t from_head =
                std::int64_t{coords.h} * call_.params.group + coords.first_head + (there ? head : 0);
            const T* from = q.row(coords.b, from_head, first + (there ? query : 0));
            copy_16(to + swizzled(S::rows, row, chunk), from + (there ? 8 * chunk : 0), there ? 16 : 0);
        }
    }

    /// Enqueues the copies of a block's keys and values. A pass of all threads takes some whole rows; what
    /// depends on the pass is a constant, as everywhere below: swizzling is an exclusive or of bits 4 to 6 of
    /// an address, and the rest of it adds.
    __device__ void load_block(int stage, const head_rows& keys, const head_rows& values) const {
        constexpr int rows = S::threads / chunks;
        const key_numbers<S::keys>& numbers = memory_.numbers;
        const key_rows<T>& all = call_.params.rows;
        const int row = thread_ / chunks;
        const int chunk = thread_ % chunks;
        const std::uint32_t at = swizzled(S::keys, row, chunk);
        const std::uint32_t k = shared_address(memory_.k[stage]) + at;
        const std::uint32_t v = shared_address(memory_.v[stage]) + at;
        const std::uint32_t k_bytes = 8 * chunk < all.k.dim ? 16 : 0;
        const std::uint32_t v_bytes = 8 * chunk < all.v.dim ? 16 : 0;
#pragma unroll
        for (int pass = 0; pass < S::keys / rows; ++pass) {
            const int flip = (pass * rows % 8) << 4;
            const std::int32_t number = numbers.row[row + pass * rows];
            const std::uint64_t of_k = number < 0 ? 0 : keys.key(all, number);
            const std::uint64_t of_v = number < 0 ? 0 : values.value(all, number);
            copy_16((k ^ flip) + pass * rows * 128, reinterpret_cast<const void*>(of_k + 16 * chunk),
                    number < 0 ? 0 : k_bytes);
            copy_16((v ^ flip) + pass * rows * 128, reinterpret_cast<const void*>(of_v + 16 * chunk),
                    number < 0 ? 0 : v_bytes);
        }
        copy_commit();
    }

    template <class Source>
    __device__ void attend(const tile_coords& coords,
                           stream_memory<S::keys, S::General, Source>& stream_memory_) const {
        row_stream<T, S::keys, S::General, Source> stream(call_, coords, stream_memory_, thread_, 1);
        stream.start();
        std::uint32_t query[S::rows_16][2];
#pragma unroll
        for (int m = 0; m < S::rows_16; ++m) {
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                query[m][r] =
                    static_cast<std::uint32_t>(stream_memory_.source.begin + row_of(m, r) / call_.heads);
            }
        }
        float o[S::rows_16][columns];
        online_softmax softmax[S::rows_16];
#pragma unroll
        for (int m = 0; m < S::rows_16; ++m) {
#pragma unroll
            for (int i = 0; i < columns; ++i) {
                o[m][i] = 0.0f;
            }
        }
        bool more = stream.next(memory_.numbers, memory_.notes[0]);
        load_block(0, stream_memory_.k, stream_memory_.v);
        __syncthreads();  // the numbers are read
        for (int stage = 0;; stage ^= 1) {
            const bool last = !more;
            if (more) {
                more = stream.next(memory_.numbers, memory_.notes[stage ^ 1]);
                load_block(stage ^ 1, stream_memory_.k, stream_memory_.v);
                copy_wait<1>();
            } else {
                copy_wait<0>();
            }
            __syncthreads();
            take(stage, query, softmax, o);
            __syncthreads();
            if (last) {
                break;
            }
        }
        store(coords, softmax, o);
    }

    [[nodiscard]] __device__ int row_of(int m, int r) const {
        return (thread_ / 32) * 16 * S::rows_16 + 16 * m + 8 * r + lane_id() / 4;
    }

    __device__ void take(int stage, const std::uint32_t (&query)[S::rows_16][2],
                         online_softmax (&softmax)[S::rows_16], float (&o)[S::rows_16][columns]) const {
        const int lane = lane_id();
        float s[S::rows_16][scores];
#pragma unroll
        for (int m = 0; m < S::rows_16; ++m) {
#pragma unroll
            for (int i = 0; i < scores; ++i) {
                s[m][i] = 0.0f;
            }
        }
        const int first_row = (thread_ / 32) * 16 * S::rows_16;
        const std::uint32_t q =
            shared_address(memory_.q) + (first_row + lane % 16) * 128 + ((lane / 16) ^ (lane % 8)) * 16;
        const std::uint32_t k = shared_address(memory_.k[stage]) + (lane % 8 + 8 * (lane / 16)) * 128 +
                                ((lane / 8 % 2) ^ (lane % 8)) * 16;
#pragma unroll
        for (int step = 0; step < S::Dim / 16; ++step) {
            std::uint32_t a[S::rows_16][4];
#pragma unroll
            for (int m = 0; m < S::rows_16; ++m) {
                load_matrices(a[m], (q ^ (step % 4 * 32)) + m * 2048 + step / 4 * S::rows * 128);
            }
#pragma unroll
            for (int n = 0; n < S::keys / 16; ++n) {
                std::uint32_t b[4];
                load_matrices(b, (k ^ (step % 4 * 32)) + n * 2048 + step / 4 * S::keys * 128);
#pragma unroll
                for (int m = 0; m < S::rows_16; ++m) {
                    mma(s[m], 2 * n, a[m], b[0], b[1]);
                    mma(s[m], 2 * n + 1, a[m], b[2], b[3]);
                }
            }
        }
        const key_notes<S::keys, S::General>& notes = memory_.notes[stage];
        const bool masked = notes.masked != 0;
        std::uint32_t p[S::rows_16][S::keys / 16][4];
#pragma unroll
        for (int m = 0; m < S::rows_16; ++m) {
            float slope = call_.slope;
            if constexpr (S::General) {
                to_logits(s[m], call_.slope, call_.cap, notes, query[m]);
                slope = 1.0f;
            }
            if (masked) {
                hide(s[m], notes, query[m]);
            }
            float decay[2];
            const bool moves = softmax[m].template take<false>(s[m], slope, decay);
            to_fragments<T>(p[m], s[m]);
            if (moves) {
#pragma unroll
                for (int i = 0; i < columns; ++i) {
                    o[m][i] *= decay[(i / 2) % 2];
                }
            }
        }
        const std::uint32_t v =
            shared_address(memory_.v[stage]) + (lane % 16) * 128 + ((lane / 16) ^ (lane % 8)) * 16;
#pragma unroll
        for (int step = 0; step < S::keys / 16; ++step) {
#pragma unroll
            for (int n = 0; n < S::Dim / 16; ++n) {
                std::uint32_t b[4];
                load_matrices_transposed(b, (v ^ (n % 4 * 32)) + step * 2048 + n / 4 * S::keys * 128);
#pragma unroll
                for (int m = 0; m < S::rows_16; ++m) {
                    mma(o[m], 2 * n, p[m][step], b[0], b[1]);
                    mma(o[m], 2 * n + 1, p[m][step], b[2], b[3]);
                }
            }
        }
    }

    /// Columns [8 n, 8 n + 8) of an accumulator.
    template <int N>
    __device__ static void mma(float (&sum)[N], int n, const std::uint32_t (&a)[4], std::uint32_t b0,
                               std::uint32_t b1) {
        float part[4] = {sum[4 * n], sum[4 * n + 1], sum[4 * n + 2], sum[4 * n + 3]};
        mma_16x8x16<T>(part, a, b0, b1);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            sum[4 * n + i] = part[i];
        }
    }

    __device__ void store(const tile_coords& coords, online_softmax (&softmax)[S::rows_16],
                          const float (&o)[S::rows_16][columns]) const {
#pragma unroll
        for (int m = 0; m < S::rows_16; ++m) {
            float inverse[2], lse[2];
            softmax[m].finish(S::General ? 1.0f : call_.slope, inverse, lse);
            T* rows[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                rows[r] = row_to_store(call_, coords, row_of(m, r), lse[r]);
            }
            if (zero_if_finite(o[m]) != 0.0f) {
                *call_.not_finite = 1;
            }
            store_rows(o[m], inverse, rows, 0, call_.out.dim);
        }
    }

    const forward_params<T>& call_;
    Memory& memory_;
    int thread_;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
