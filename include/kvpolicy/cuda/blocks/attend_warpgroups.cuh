// The forward pass on Hopper (compute capability 9.0a). A block stays and takes one tile after another: a producer warpgroup
// gathers keys and values into a ring of shared memory, two or three consumer warpgroups of 64 rows each multiply them by
// wgmma. The producer is ahead by the length of the ring, over the ends of tiles too.
//
// cp.async writes through the generic proxy and wgmma reads through the async proxy, so the producer waits for a group of
// copies, fences, and only then says that a tile is full; it does so one group late, when the next one is under way.
#pragma once

#include <kvpolicy/core/types.hpp>
#include <kvpolicy/cuda/blocks/async.cuh>
#include <kvpolicy/cuda/blocks/attend_problem.cuh>
#include <kvpolicy/cuda/blocks/online_softmax.cuh>
#include <kvpolicy/cuda/blocks/row_stream.cuh>
#include <kvpolicy/cuda/blocks/wgmma.cuh>
#include <kvpolicy/cuda/config.cuh>
#include <kvpolicy/cuda/tuning.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// Sizes for head_dims up to Dim. `General` kernels know softcap, biases and slopes below 0.
template <class Storage, int Dim_, bool General_>
struct attend_hopper_sizes {
    using T = Storage;
    static constexpr int Dim = Dim_;
    static constexpr bool General = General_;
    static constexpr attend_hopper_tuning tuning = select_attend_hopper_tuning(Dim, General);
    static constexpr int consumers = tuning.consumers;  // warpgroups
    static constexpr int keys = tuning.keys;
    static constexpr int slots = tuning.slots;
    static constexpr int rows = 64 * consumers;
    static constexpr int threads = 128 * (consumers + 1);
    static constexpr int row_bytes = Dim * 2;
    static constexpr int tile_bytes = keys * row_bytes;
    static_assert(consumers * tuning.consumer_registers + tuning.producer_registers <= 512);
};

/// What stands in shared memory behind the queries and the ring.
template <class S>
struct attend_hopper_memory {
    key_notes<S::keys, S::General> notes[S::slots];  // of the slots that hold keys
    std::uint64_t full[S::slots];
    std::uint64_t empty[S::slots];
    std::uint64_t queries_full, queries_empty;
    key_offsets<S::keys> offsets[2];
    head_rows k, v;  // of the tile that the producer is at
    union {
        stream_memory<S::keys, S::General, listed_rows> listed;
        stream_memory<S::keys, S::General, scanned_rows> scanned;
    };
    std::uint32_t ticket;  // among the producer's threads
    std::int32_t tile;     // the consumers' tile; -1: no more
};

template <class S>
constexpr std::size_t attend_hopper_shared_bytes() {
    return 1024 + static_cast<std::size_t>(S::rows * S::row_bytes + S::slots * S::tile_bytes) +
           sizeof(attend_hopper_memory<S>);
}

/// A place in the ring, and how often it came round.
template <int Slots>
struct ring_place {
    int slot = 0;
    std::uint32_t parity = 0;

    __device__ void advance() {
        if (++slot == Slots) {
            slot = 0;
            parity ^= 1;
        }
    }
};

template <class S>
class attend_warpgroups {
  public:
    using T = typename S::T;

    __device__ attend_warpgroups(const attend_launch<T>& call, unsigned char* shared, std::uint32_t* next)
        : call_(call), next_(next) {
        unsigned char* const aligned = shared + ((1024 - (shared_address(shared) & 1023)) & 1023);
        queries_ = shared_address(aligned);
        ring_ = queries_ + S::rows * S::row_bytes;
        memory_ = reinterpret_cast<attend_hopper_memory<S>*>(aligned + S::rows * S::row_bytes +
                                                             S::slots * S::tile_bytes);
        full_ = shared_address(memory_->full);
        empty_ = shared_address(memory_->empty);
        queries_full_ = shared_address(&memory_->queries_full);
        queries_empty_ = shared_address(&memory_->queries_empty);
    }

    __device__ void run() {
        // The same for all lanes of a warp, and the compiler should know it.
        const int group = __shfl_sync(all_lanes, static_cast<int>(threadIdx.x) / 128, 0);
        if (threadIdx.x == 0) {
            for (int i = 0; i < S::slots; ++i) {
                barrier_init(full_ + 8 * i, 4);
                barrier_init(empty_ + 8 * i, 4 * S::consumers);
            }
            barrier_init(queries_full_, 4);
            barrier_init(queries_empty_, 4 * S::consumers);
            barrier_init_fence();
        }
        __syncthreads();
        if (group == S::consumers) {
            give_registers<S::tuning.producer_registers>();
            produce();
        } else {
            take_registers<S::tuning.consumer_registers>();
            consume(group);
        }
    }

  private:
    static constexpr int scores = S::keys / 2;
    static constexpr int parts = S::Dim / 128 > 0 ? S::Dim / 128 : 1;  // of the output's columns
    static constexpr int columns = S::Dim / 2 / parts;                 // of a part, a thread

    // ---- producer

    struct producer_state {
        ring_place<S::slots> ring;
        std::uint32_t pending = 0;  // the barrier to tell of the copies before the latest; 0: none
        int thread = 0;
    };

    /// Closes a group of copies, and tells of the one before it.
    __device__ static void tell(producer_state& state, std::uint32_t barrier) {
        copy_commit();
        if (state.pending != 0) {
            copy_wait<1>();
            arrive(state.pending);
        }
        state.pending = barrier;
    }
    __device__ static void tell_last(producer_state& state) {
        if (state.pending != 0) {
            copy_wait<0>();
            arrive(state.pending);
            state.pending = 0;
        }
    }
    __device__ static void arrive(std::uint32_t barrier) {
        fence_async_proxy();
        __syncwarp();
        if (lane_id() == 0) {
            barrier_arrive(barrier);
        }
    }

    __device__ void produce() {
        producer_state state;
        state.thread = static_cast<int>(threadIdx.x) % 128;
        const auto count = static_cast<std::uint32_t>(call_.count());
        std::uint32_t ticket = 0;  // thread 0's
        if (state.thread == 0) {
            ticket = atomicAdd(next_, 1u);
        }
        std::uint32_t parity = 1;
        for (;;) {
            if (state.thread == 0) {
                memory_->ticket = ticket;
            }
            named_barrier(1, 128);
            const std::uint32_t number = memory_->ticket;
            named_barrier(1, 128);
            if (number >= count) {
                break;
            }
            if (state.thread == 0) {
                ticket = atomicAdd(next_, 1u);
            }
            const tile_place place = place_of(call_, static_cast<std::uint32_t>(number));
            if (place.queries <= 0) {
                continue;
            }
            if (call_.listed) {
                produce_tile(state, place, number, parity, memory_->listed);
            } else {
                produce_tile(state, place, number, parity, memory_->scanned);
            }
            parity ^= 1;
        }
        tell_last(state);
        barrier_wait(queries_empty_, parity);
        if (state.thread == 0) {
            memory_->tile = -1;
        }
        arrive(queries_full_);
    }

    template <class Source>
    __device__ void produce_tile(producer_state& state, const tile_place& place, std::uint32_t number,
                                 std::uint32_t parity,
                                 stream_memory<S::keys, S::General, Source>& stream_memory_) const {
        if (state.thread == 0) {  // the stream's first barrier shows it to the others
            const key_rows<T>& all = call_.problem.rows;
            memory_->k = head_rows::of(all.k, all.self_k, place.b, place.h);
            memory_->v = head_rows::of(all.v, all.self_v, place.b, place.h);
        }
        row_stream<T, S::keys, S::General, Source> stream(call_, place, stream_memory_, state.thread, 1);
        tell_last(state);  // of the tile before: its last values were under way in the meantime
        bool first = true;
        std::int32_t done = 0;
        if (!S::General && call_.problem.rows.self_k.length == 0) {
            done = produce_full(state, number, parity, first, stream_memory_.source);
        }
        stream.start(done);
        bool more = true;
        for (int buffer = 0; more; buffer ^= 1) {
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {  // keys, values
                barrier_wait(empty_ + 8 * state.ring.slot, state.ring.parity ^ 1);
                if (half == 0) {
                    more = stream.next(memory_->offsets[buffer], memory_->notes[state.ring.slot]);
                } else if (first) {
                    first = false;
                    produce_queries(state, number, parity);
                }
                const key_offsets<S::keys>& offsets = memory_->offsets[buffer];
                const std::uint32_t* const rows = half == 0 ? offsets.k : offsets.v;
                const head_rows& from = half == 0 ? memory_->k : memory_->v;
                const std::int32_t dim = half == 0 ? call_.problem.rows.k.dim : call_.problem.rows.v.dim;
                if (call_.problem.rows.self_k.length != 0) {
                    gather<true>(rows, from, dim, state);
                } else {
                    gather<false>(rows, from, dim, state);
                }
            }
        }
    }

    /// The tile's queries, once the consumers no longer need those before.
    __device__ void produce_queries(producer_state& state, std::uint32_t number, std::uint32_t parity) const {
        barrier_wait(queries_empty_, parity);
        if (state.thread == 0) {
            memory_->tile = static_cast<std::int32_t>(number);
        }
        load_queries(place_of(call_, number), state.thread);
        tell(state, queries_full_);
    }

    /// Most of a tile: blocks of rows that all its queries see, without the stream's bookkeeping. Lane i of the eight that
    /// share rows knows the number of row i of theirs. Leaves at least one full block, if there is any, so that the stream
    /// decides which is the last. Returns how many rows it took.
    template <class Source>
    __device__ std::int32_t produce_full(producer_state& state, std::uint32_t number, std::uint32_t parity,
                                         bool& first, const Source& source) const {
        constexpr int each = S::keys / 16;
        const int lane = state.thread % 8;
        const std::int32_t full = source.full;
        const std::int32_t mine = state.thread / 8 * each + lane % each;
        std::int32_t done = 0;
        std::int32_t later = 2 * S::keys <= full ? source.row(call_, mine) : 0;
        for (; done + 2 * S::keys <= full; done += S::keys) {
            const std::int32_t row = later;
            if (done + 3 * S::keys <= full) {
                later = source.row(call_, done + S::keys + mine);
            }
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
                barrier_wait(empty_ + 8 * state.ring.slot, state.ring.parity ^ 1);
                if (half == 0 && state.thread == 0) {
                    memory_->notes[state.ring.slot].masked = 0;
                    memory_->notes[state.ring.slot].last = 0;
                }
                if (half == 1 && first) {
                    first = false;
                    produce_queries(state, number, parity);
                }
                const rows_view<const T>& view = half == 0 ? call_.problem.rows.k : call_.problem.rows.v;
                const std::uint64_t from = (half == 0 ? memory_->k.past : memory_->v.past) + 16 * lane;
                const auto stride = static_cast<std::uint32_t>(view.row_stride) * 2;
                const std::uint32_t to = ring_ + state.ring.slot * S::tile_bytes +
                                         state.thread / 8 * each * 128 +
                                         ((lane ^ (state.thread / 8 * each % 8)) << 4);
#pragma unroll
                for (int i = 0; i < each; ++i) {
                    const auto of = static_cast<std::uint32_t>(__shfl_sync(all_lanes, row, i, 8));
                    const std::uint64_t at = from + std::uint64_t{of} * stride;
#pragma unroll
                    for (int part = 0; part < S::Dim / 64; ++part) {
                        copy_16((to ^ (i << 4)) + i * 128 + part * S::keys * 128,
                                reinterpret_cast<const void*>(at + 128 * part),
                                8 * lane + 64 * part < view.dim ? 16 : 0);
                    }
                }
                tell(state, full_ + 8 * state.ring.slot);
                state.ring.advance();
            }
        }
        return done;
    }

    /// One tile of keys or values into the ring. Eight threads share a row.
    template <bool Two>
    __device__ void gather(const std::uint32_t* offsets, const head_rows& rows, std::int32_t dim,
                           producer_state& state) const {
        constexpr int each = S::keys / 16;
        const int first = state.thread / 8 * each;
        const int chunk = state.thread % 8;
        // swizzled(S::keys, first + i, chunk + 8 part), with what depends on i in the instructions: `first` is a multiple of
        // `each`, so that i only sets bits of the row, and flips bits of the chunk.
        static_assert(each == 4 || each == 8);
        const std::uint32_t to =
            ring_ + state.ring.slot * S::tile_bytes + first * 128 + ((chunk ^ (first % 8)) << 4);
        const head_rows from{rows.past + 16 * chunk, rows.self + 16 * chunk};
        uint4 some[each / 4];
#pragma unroll
        for (int four = 0; four < each / 4; ++four) {
            some[four] = reinterpret_cast<const uint4*>(offsets + first)[four];
        }
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const uint4& of = some[i / 4];
            const std::uint32_t offset = i % 4 == 0 ? of.x : i % 4 == 1 ? of.y : i % 4 == 2 ? of.z : of.w;
            const std::uint64_t row = from.at<Two>(offset);
#pragma unroll
            for (int part = 0; part < S::Dim / 64; ++part) {
                const bool there = offset != key_offsets<S::keys>::none && 8 * chunk + 64 * part < dim;
                copy_16((to ^ (i << 4)) + i * 128 + part * S::keys * 128,
                        reinterpret_cast<const void*>(row + 128 * part), there ? 16 : 0);
            }
        }
        tell(state, full_ + 8 * state.ring.slot);
        state.ring.advance();
    }

    /// The tile's queries into shared memory; zeros where a row has none. Eight threads share a row, 16 rows go at once, and
    /// (query, head) of a row follow from those 16 rows before without a division.
    __device__ void load_queries(const tile_place& place, int thread) const {
        const rows_view<const T>& q = call_.problem.q;
        const int chunk = thread % 8;
        const int later = 16 / call_.heads;
        const int further = 16 % call_.heads;
        int query = thread / 8 / call_.heads;
        int head = thread / 8 % call_.heads;
        const T* const base =
            q.row(place.b, std::int64_t{place.h} * call_.problem.group + place.first_head, place.first_query);
        std::uint32_t to = queries_ + swizzled(64, thread / 8, chunk);
#pragma unroll 1
        for (int i = 0; i < S::rows / 16; ++i) {
            const bool there = query < place.queries && head < place.heads;
            const T* const from = there ? base + head * q.head_stride + query * q.row_stride : base;
#pragma unroll
            for (int part = 0; part < S::Dim / 64; ++part) {
                const int column = 8 * chunk + 64 * part;
                const bool whole = there && column < q.dim;
                copy_16(to + part * 64 * 128, from + (whole ? column : 0), whole ? 16 : 0);
            }
            query += later;
            head += further;
            if (head >= call_.heads) {
                head -= call_.heads;
                ++query;
            }
            to += i % 4 == 3 ? 64 * S::row_bytes - 48 * 128 : 16 * 128;
        }
    }

    // ---- consumers

    /// This warp no longer needs a slot (or the queries).
    __device__ static void release(std::uint32_t barrier) {
        __syncwarp();
        if (lane_id() == 0) {
            barrier_arrive(barrier);
        }
    }

    __device__ void consume(int group) const {
        const std::uint64_t queries = describe_k_major(queries_ + group * 64 * S::row_bytes);
        const int first_row = static_cast<int>(threadIdx.x) / 32 * 16 + lane_id() / 4;
        ring_place<S::slots> ring;
        for (std::uint32_t parity = 0;; parity ^= 1) {
            barrier_wait(queries_full_, parity);
            const std::int32_t number = memory_->tile;
            if (number < 0) {
                return;
            }
            // The frame of the notes: that of the super-tile where rows are listed, else that of the tile.
            std::uint32_t query[2];
            {
                const tile_place place = place_of(call_, static_cast<std::uint32_t>(number));
                const int begin = call_.listed ? place.first_query % call_.plan.super_q : 0;
                query[0] = static_cast<std::uint32_t>(begin + first_row / call_.heads);
                query[1] = static_cast<std::uint32_t>(begin + (first_row + 8) / call_.heads);
            }
            float o[parts][columns];
#pragma unroll
            for (int x = 0; x < parts; ++x) {
#pragma unroll
                for (int i = 0; i < columns; ++i) {
                    o[x][i] = 0.0f;
                }
            }
            online_softmax softmax;
            if constexpr (S::tuning.overlap) {
                attend_overlapped(ring, queries, query, softmax, o);
            } else {
                attend_in_turn(ring, queries, query, softmax, o);
            }

            float inverse[2], lse[2];
            softmax.finish(S::General ? 1.0f : call_.slope, inverse, lse);
            const tile_place place = place_of(call_, static_cast<std::uint32_t>(number));
            T* rows[2];
#pragma unroll
            for (int r = 0; r < 2; ++r) {
                rows[r] = row_to_store(call_, place, first_row + 8 * r, lse[r]);
            }
#pragma unroll
            for (int x = 0; x < parts; ++x) {
                store_rows(o[x], inverse, rows, 128 * x, call_.out.dim);
            }
        }
    }

    using Output = float[parts][columns];
    using Weights = std::uint32_t[S::keys / 16][4];

    /// Enqueues s = Q K^T with the keys of a slot.
    __device__ void multiply_keys(float (&s)[scores], std::uint64_t queries, int slot) const {
        const std::uint64_t k = describe_k_major(ring_ + slot * S::tile_bytes);
#pragma unroll
        for (int step = 0; step < S::Dim / 16; ++step) {
            wgmma<T, 0, 0>(s, queries + ((step % 4) * 32 + (step / 4) * 64 * 128) / 16,
                           k + ((step % 4) * 32 + (step / 4) * S::keys * 128) / 16, step != 0);
        }
        wgmma_commit();
    }
    /// Enqueues o += P V with the values of a slot.
    __device__ void multiply_values(Output& o, const Weights& p, int slot) const {
        const std::uint64_t v = describe_mn_major(ring_ + slot * S::tile_bytes, S::keys * 128);
#pragma unroll
        for (int step = 0; step < S::keys / 16; ++step) {
#pragma unroll
            for (int x = 0; x < parts; ++x) {
                wgmma<T, 1>(o[x], p[step], v + (x * 2 * S::keys * 128 + step * 2048) / 16, 1);
            }
        }
        wgmma_commit();
    }
    __device__ static void pin_output(Output& o) {
#pragma unroll
        for (int x = 0; x < parts; ++x) {
            pin(o[x]);
        }
    }
    __device__ static void rescale(Output& o, const float (&decay)[2]) {
#pragma unroll
        for (int x = 0; x < parts; ++x) {
#pragma unroll
            for (int i = 0; i < columns; ++i) {
                o[x][i] *= decay[(i / 2) % 2];
            }
        }
    }

    /// From the scores of a slot to weights, in place; the slot is released. True where it was the tile's last.
    __device__ bool weigh(float (&s)[scores], int slot, const std::uint32_t (&query)[2],
                          online_softmax& softmax, float (&decay)[2]) const {
        const key_notes<S::keys, S::General>& notes = memory_->notes[slot];
        const bool masked = notes.masked != 0;
        const bool last = notes.last != 0;
        float slope = call_.slope;
        if constexpr (S::General) {
            to_logits(s, call_.slope, call_.cap, notes, query);
            slope = 1.0f;
        }
        if (masked) {
            hide(s, notes, query);
        }
        release(empty_ + 8 * slot);
        if (last) {
            release(queries_empty_);
        }
        softmax.take(s, slope, decay);
        return last;
    }

    /// One product after the other. The warpgroups are out of step, so the tensor cores still have work.
    __device__ void attend_in_turn(ring_place<S::slots>& ring, std::uint64_t queries,
                                   const std::uint32_t (&query)[2], online_softmax& softmax,
                                   Output& o) const {
        bool last;
        do {
            float s[scores];
            Weights p;
            barrier_wait(full_ + 8 * ring.slot, ring.parity);
            wgmma_fence();
            multiply_keys(s, queries, ring.slot);
            wgmma_wait<0>();
            pin(s);
            float decay[2];
            last = weigh(s, ring.slot, query, softmax, decay);
            ring.advance();
            to_fragments<T>(p, s);
            rescale(o, decay);
            barrier_wait(full_ + 8 * ring.slot, ring.parity);
            pin(p);
            pin_output(o);
            wgmma_fence();
            multiply_values(o, p, ring.slot);
            wgmma_wait<0>();
            pin_output(o);
            release(empty_ + 8 * ring.slot);
            ring.advance();
        } while (!last);
    }

    /// Q K^T of the next block is multiplied beside the softmax of this one; takes the registers for scores and weights both.
    __device__ void attend_overlapped(ring_place<S::slots>& ring, std::uint64_t queries,
                                      const std::uint32_t (&query)[2], online_softmax& softmax,
                                      Output& o) const {
        float s[scores];
        Weights p;
        float decay[2];
        barrier_wait(full_ + 8 * ring.slot, ring.parity);
        wgmma_fence();
        multiply_keys(s, queries, ring.slot);
        wgmma_wait<0>();
        pin(s);
        bool last = weigh(s, ring.slot, query, softmax, decay);
        to_fragments<T>(p, s);
        while (!last) {
            ring.advance();
            const ring_place<S::slots> values = ring;
            ring.advance();
            barrier_wait(full_ + 8 * ring.slot, ring.parity);
            barrier_wait(full_ + 8 * values.slot, values.parity);
            pin(p);
            pin_output(o);
            wgmma_fence();
            multiply_keys(s, queries, ring.slot);
            multiply_values(o, p, values.slot);
            wgmma_wait<1>();
            pin(s);
            last = weigh(s, ring.slot, query, softmax, decay);
            wgmma_wait<0>();
            pin_output(o);
            pin(p);
            release(empty_ + 8 * values.slot);
            rescale(o, decay);
            to_fragments<T>(p, s);
        }
        ring.advance();
        barrier_wait(full_ + 8 * ring.slot, ring.parity);
        pin(p);
        pin_output(o);
        wgmma_fence();
        multiply_values(o, p, ring.slot);
        wgmma_wait<0>();
        pin_output(o);
        release(empty_ + 8 * ring.slot);
        ring.advance();
    }

    const attend_launch<T>& call_;
    std::uint32_t* next_;
    attend_hopper_memory<S>* memory_;
    std::uint32_t queries_, ring_, full_, empty_, queries_full_, queries_empty_;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
