// The producer warpgroup of a Hopper forward block: gathers the rows of one tile after another.
//
// cp.async writes through the generic proxy and wgmma reads through the async proxy, so the producer waits
// for a group of copies, fences, and only then says that a tile is full; it does so one group late, when the
// next one is under way.
#pragma once

#include <kvpolicy/attention/cuda/forward/forward_params.cuh>
#include <kvpolicy/attention/cuda/forward/forward_pipeline.cuh>
#include <kvpolicy/attention/cuda/forward/row_stream.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>
#include <kvpolicy/cuda/primitives/wgmma.cuh>
#include <kvpolicy/cuda/tensor_map.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

template <class S>
class agent_forward_producer : forward_pipeline<S> {
  public:
    using T = typename S::T;

    __device__ agent_forward_producer(const forward_pipeline<S>& ring, const forward_boxes& boxes,
                                      std::uint32_t* next)
        : forward_pipeline<S>(ring), boxes_(boxes), next_(next) {}

    /// Takes tiles until there are none.
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
            const tile_coords coords = tile_coords_of(call_, static_cast<std::uint32_t>(number));
            if (coords.queries <= 0) {
                continue;
            }
            if (call_.listed) {
                produce_tile(state, coords, number, parity, memory_->listed);
            } else {
                produce_tile(state, coords, number, parity, memory_->scanned);
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

  private:
    using shares = forward_pipeline<S>;
    using shares::call_, shares::memory_, shares::queries_, shares::ring_, shares::full_, shares::empty_,
        shares::queries_full_, shares::queries_empty_;

    struct producer_state {
        pipeline_state<S::stages> ring;
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
        warp_arrive(barrier, lane_id());
    }

    template <class Source>
    __device__ void produce_tile(producer_state& state, const tile_coords& coords, std::uint32_t number,
                                 std::uint32_t parity,
                                 stream_memory<S::keys, S::General, Source>& stream_memory_) const {
        if (state.thread == 0) {  // the stream's first barrier shows it to the others
            const packed_rows packed = call_.params.rows.packed;
            memory_->box_b = packed.edges != nullptr ? 0 : coords.b;
            memory_->box_h = coords.h;
            memory_->box_row = boxes_.first_row - packed.begin(coords.b);
        }
        row_stream<T, S::keys, S::General, Source> stream(call_, coords, stream_memory_, state.thread, 1);
        tell_last(state);  // of the tile before: its last values were under way in the meantime
        bool first = true;
        std::int32_t done = 0;
        if constexpr (!S::General) {
            done = call_.params.rows.self_k.length == 0
                       ? produce_full<false>(state, number, parity, first, stream_memory_)
                       : produce_full<true>(state, number, parity, first, stream_memory_);
        }
        stream.start(done);
        bool more = true;
        for (int buffer = 0; more; buffer ^= 1) {
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {  // keys, values
                barrier_wait(empty_ + 8 * state.ring.stage, state.ring.parity ^ 1);
                if (half == 0) {
                    more = stream.next(memory_->addresses[buffer], memory_->notes[state.ring.stage]);
                } else if (first) {
                    first = false;
                    produce_queries(state, number, parity);
                }
                const key_addresses<S::keys>& addresses = memory_->addresses[buffer];
                gather(half == 0 ? addresses.k : addresses.v,
                       half == 0 ? call_.params.rows.k.dim : call_.params.rows.v.dim, state);
            }
        }
    }

    /// The tile's queries, once the consumers no longer need those before.
    __device__ void produce_queries(producer_state& state, std::uint32_t number, std::uint32_t parity) const {
        barrier_wait(queries_empty_, parity);
        if (state.thread == 0) {
            memory_->tile = static_cast<std::int32_t>(number);
        }
        load_queries(tile_coords_of(call_, number), state.thread);
        tell(state, queries_full_);
    }

    /// Most of a tile: blocks of rows that all its queries see, without the stream's bookkeeping. Lane i of
    /// the eight that share rows knows the number of row i of theirs; where they follow one another, they
    /// come as boxes. Leaves at least one full block, if there is any, so that the stream decides which is
    /// the last. Returns how many rows it took. `Two`: of two segments.
    template <bool Two, class Memory>
    __device__ std::int32_t produce_full(producer_state& state, std::uint32_t number, std::uint32_t parity,
                                         bool& first, const Memory& of_tile) const {
        constexpr int each = S::keys / 16;
        const auto& source = of_tile.source;
        const int lane = state.thread % 8;
        const std::int32_t full = source.full;
        const std::int32_t mine = state.thread / 8 * each + lane % each;
        std::int32_t done = 0;
        std::int32_t later = 2 * S::keys <= full ? source.row(call_, mine) : 0;
        const bool boxed = boxes_.there && (boxes_.always || source.runs != 0);
        for (; done + 2 * S::keys <= full; done += S::keys) {
            const std::int32_t row = later;
            if (done + 3 * S::keys <= full) {
                later = source.row(call_, done + S::keys + mine);
            }
            bool together = false;  // this lane's eight rows
            bool gathered = true;   // some of the warp's
            if constexpr (has_boxes) {
                const std::int32_t leads = __shfl_sync(all_lanes, row, 0, 8);
                const bool mapped = boxed && (!Two || leads >= boxes_.first_row);
                const unsigned apart = ~__ballot_sync(all_lanes, row == leads + lane && mapped);
                together = (apart >> (lane_id() & 24) & 0xffu) == 0;
                gathered = apart != 0;
            }
#pragma unroll 1
            for (int half = 0; half < 2; ++half) {
                std::uint64_t address = 0;  // of this lane's row
                if constexpr (Two) {
                    address = half == 0 ? of_tile.k.key(call_.params.rows, row)
                                        : of_tile.v.value(call_.params.rows, row);
                }
                barrier_wait(empty_ + 8 * state.ring.stage, state.ring.parity ^ 1);
                if (half == 0 && state.thread == 0) {
                    memory_->notes[state.ring.stage].masked = 0;
                    memory_->notes[state.ring.stage].last = 0;
                }
                if (half == 1 && first) {
                    first = false;
                    produce_queries(state, number, parity);
                }
                const std::uint32_t to =
                    ring_ + state.ring.stage * S::tile_bytes + state.thread / 8 * each * 128;
                if (has_boxes && together && lane < S::Dim / 64) {
                    barrier_expect_more(full_ + 8 * state.ring.stage, forward_boxes::box_rows * 128);
                    copy_box(to + lane * S::keys * 128, half == 0 ? boxes_.k : boxes_.v, 64 * lane,
                             row - lane - (Two ? memory_->box_row : 0), memory_->box_h, memory_->box_b,
                             full_ + 8 * state.ring.stage);
                }
                if (gathered) {
                    const rows_view<const T>& view = half == 0 ? call_.params.rows.k : call_.params.rows.v;
                    const std::uint64_t from = (half == 0 ? of_tile.k.past : of_tile.v.past) + 16 * lane;
                    const auto stride = static_cast<std::uint32_t>(view.row_stride) * 2;
                    const std::uint32_t chunk = to + ((lane ^ (state.thread / 8 * each % 8)) << 4);
#pragma unroll
                    for (int i = 0; i < each; ++i) {
                        std::uint64_t at = 0;
                        if constexpr (Two) {
                            at = __shfl_sync(all_lanes, address, i, 8) + 16 * lane;
                        } else {
                            const auto of = static_cast<std::uint32_t>(__shfl_sync(all_lanes, row, i, 8));
                            at = from + std::uint64_t{of} * stride;
                        }
                        if (has_boxes && together) {
                            continue;
                        }
#pragma unroll
                        for (int part = 0; part < S::Dim / 64; ++part) {
                            copy_16((chunk ^ (i << 4)) + i * 128 + part * S::keys * 128,
                                    reinterpret_cast<const void*>(at + 128 * part),
                                    8 * lane + 64 * part < view.dim ? 16 : 0);
                        }
                    }
                }
                tell(state, full_ + 8 * state.ring.stage);
                state.ring.advance();
            }
        }
        return done;
    }

    /// One tile of keys or values into the ring. Eight threads share a row.
    __device__ void gather(const std::uint64_t* addresses, std::int32_t dim, producer_state& state) const {
        constexpr int each = S::keys / 16;
        const int first = state.thread / 8 * each;
        const int chunk = state.thread % 8;
        // swizzled(S::keys, first + i, chunk + 8 part), with what depends on i in the instructions: `first`
        // is a multiple of `each`, so that i only sets bits of the row, and flips bits of the chunk.
        static_assert(each == 4 || each == 8);
        const std::uint32_t to =
            ring_ + state.ring.stage * S::tile_bytes + first * 128 + ((chunk ^ (first % 8)) << 4);
#pragma unroll
        for (int i = 0; i < each; ++i) {
            const std::uint64_t row = addresses[first + i];
#pragma unroll
            for (int part = 0; part < S::Dim / 64; ++part) {
                const bool there = row != 0 && 8 * chunk + 64 * part < dim;
                copy_16((to ^ (i << 4)) + i * 128 + part * S::keys * 128,
                        reinterpret_cast<const void*>(row + 16 * chunk + 128 * part), there ? 16 : 0);
            }
        }
        tell(state, full_ + 8 * state.ring.stage);
        state.ring.advance();
    }

    /// The tile's queries into shared memory; zeros where a row has none. Eight threads share a row, 16 rows
    /// go at once, and (query, head) of a row follow from those 16 rows before without a division.
    __device__ void load_queries(const tile_coords& coords, int thread) const {
        const rows_view<const T>& q = call_.params.q;
        const int chunk = thread % 8;
        const int later = 16 / call_.heads;
        const int further = 16 % call_.heads;
        int query = thread / 8 / call_.heads;
        int head = thread / 8 % call_.heads;
        const T* const base = q.row(coords.b, std::int64_t{coords.h} * call_.params.group + coords.first_head,
                                    call_.params.query_row(coords.b, coords.first_query));
        std::uint32_t to = queries_ + swizzled(64, thread / 8, chunk);
#pragma unroll 1
        for (int i = 0; i < S::rows / 16; ++i) {
            const bool there = query < coords.queries && head < coords.heads;
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

    /// Eight threads share as many rows as a box has, and they begin where the swizzle does.
    static constexpr bool has_boxes = !S::General && S::keys == 128;

    const forward_boxes& boxes_;
    std::uint32_t* next_;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
