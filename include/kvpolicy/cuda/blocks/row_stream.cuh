// A tile's rows as blocks of keys: dead candidates are left out, so every block but the last is full.
#pragma once

#include <kvpolicy/cuda/blocks/async.cuh>
#include <kvpolicy/cuda/blocks/row_source.cuh>
#include <kvpolicy/cuda/blocks/warp.cuh>
#include <kvpolicy/cuda/config.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// What softmax needs to know of a block's keys.
template <int Keys, bool Biased>
struct key_notes {
    // Query i sees key n iff i - (life[n] & 0xffff), as an unsigned number, is below life[n] >> 16.
    std::uint32_t life[Keys];
    float bias[Biased ? Keys : 1];                // in units of log 2
    std::uint32_t bias_from[Biased ? Keys : 1];  // the bias counts for queries i >= this
    std::uint32_t masked;                         // some query of the tile does not see some key: read `life`
    std::uint32_t last;                           // no block follows
};

inline constexpr int stream_threads = 128;

/// Addresses of a block's rows of keys and of values; the lowest bit is set where there is no row.
template <int Keys>
struct key_addresses {
    std::uint64_t k[Keys];
    std::uint64_t v[Keys];
};

/// Part `part` (16 bytes) of a row into shared memory; zeros where there is no row, or it ends before.
__device__ inline void copy_part(std::uint32_t to, std::uint64_t row, int part, std::int32_t dim) {
    const bool there = (row & 1) == 0 && 8 * part < dim;
    copy_16(to, reinterpret_cast<const void*>((row & ~std::uint64_t{1}) + (there ? 16 * part : 0)), there ? 16 : 0);
}

/// What a stream keeps in shared memory: registers are few where it runs.
template <class Source>
struct stream_memory {
    Source source;
    std::uint64_t k, v, self_k, self_v;  // row 0 of this head
    std::int32_t row[256];               // of waiting rows, a ring
    std::uint32_t life[256];
    std::int32_t x[256];
    std::int32_t sums[2][4];
};

/// Runs on stream_threads threads, numbered `thread`, that share the named barrier `barrier`.
template <class T, int Keys, bool Biased, class Source>
class row_stream {
    static_assert(Keys <= stream_threads);

  public:
    __device__ row_stream(const attend_launch<T>& call, const tile_place& place, stream_memory<Source>& memory,
                          int thread, int barrier)
        : call_(call), memory_(memory), thread_(thread), barrier_(barrier) {
        if (thread == 0) {
            const key_rows<T>& all = call.problem.rows;
            const auto address = [&place](const rows_view<const T>& view) {
                return reinterpret_cast<std::uint64_t>(view.row(place.b, place.h, 0));
            };
            memory.source = Source(call, place);
            memory.k = address(all.k);
            memory.v = address(all.v);
            memory.self_k = address(all.self_k);
            memory.self_v = address(all.self_v);
        }
        named_barrier(barrier, stream_threads);
        fetch();
    }

    /// The next block's addresses and notes. False where it was the last. At least one block comes, of which no row need be
    /// there. Threads may read both after it; addresses[2] are to be used in turn.
    __device__ bool next(key_addresses<Keys>& addresses, key_notes<Keys, Biased>& notes) {
        const Source& source = memory_.source;
        bool masked = false;
        if (next_ + Keys <= source.full) {
            if (thread_ < Keys) {
                put(addresses, fetched_);
                note_bias(notes, next_ + thread_);
            }
            next_ += Keys;
            fetch();
            if (next_ + Keys > source.full) {
                wait_for_rows();
            }
        } else {
            while (waiting_ < Keys && next_ < all()) {
                take();
            }
            bool partial = false;
            if (thread_ < Keys) {
                const int at = (head_ + thread_) % 256;
                const bool present = thread_ < waiting_;
                const std::uint32_t life = present ? memory_.life[at] : 0;
                put(addresses, present ? memory_.row[at] : -1);
                notes.life[thread_] = life;
                note_bias(notes, present ? memory_.x[at] : -1);
                const auto born = static_cast<std::int32_t>(life & 0xffffu);
                const auto lasts = static_cast<std::int32_t>(life >> 16);
                partial = born > source.begin || born + lasts < source.end;
            }
            masked = any(partial);
            const int taken = waiting_ < Keys ? waiting_ : Keys;
            head_ = (head_ + taken) % 256;
            waiting_ -= taken;
            wait_for_rows();
        }
        const bool more = waiting_ != 0 || next_ < all();
        if (thread_ == 0) {
            notes.masked = masked ? 1 : 0;
            notes.last = more ? 0 : 1;
        }
        named_barrier(barrier_, stream_threads);
        return more;
    }

  private:
    [[nodiscard]] __device__ std::int32_t all() const { return memory_.source.full + memory_.source.candidates; }

    /// Leaves rows waiting, if any come.
    __device__ void wait_for_rows() {
        while (waiting_ == 0 && next_ < all()) {
            take();
        }
    }

    __device__ void fetch() {
        if (thread_ < Keys && next_ + Keys <= memory_.source.full) {
            fetched_ = memory_.source.row(call_, next_ + thread_);
        }
    }

    __device__ void put(key_addresses<Keys>& addresses, std::int32_t row) const {
        const key_rows<T>& all = call_.problem.rows;
        std::uint64_t k = reinterpret_cast<std::uint64_t>(all.none()) | 1;
        std::uint64_t v = k;
        if (row >= all.k.length) {
            const std::int64_t own = row - all.k.length;
            k = memory_.self_k + static_cast<std::uint64_t>(own * all.self_k.row_stride) * sizeof(T);
            v = memory_.self_v + static_cast<std::uint64_t>(own * all.self_v.row_stride) * sizeof(T);
        } else if (row >= 0) {
            k = memory_.k + static_cast<std::uint64_t>(row * all.k.row_stride) * sizeof(T);
            v = memory_.v + static_cast<std::uint64_t>(row * all.v.row_stride) * sizeof(T);
        }
        addresses.k[thread_] = k;
        addresses.v[thread_] = v;
    }

    __device__ void note_bias(key_notes<Keys, Biased>& notes, std::int32_t x) const {
        if constexpr (Biased) {
            std::int32_t from = 0;
            notes.bias[thread_] =
                x >= 0 ? memory_.source.bias(call_, x, from) * 1.44269504088896340736f : 0.0f;
            notes.bias_from[thread_] = static_cast<std::uint32_t>(from);
        }
    }

    /// This warp's share for all threads to read.
    __device__ const std::int32_t* share(std::int32_t mine) {
        std::int32_t* const sums = memory_.sums[turn_];
        turn_ ^= 1;
        if (thread_ % 32 == 0) {
            sums[thread_ / 32] = mine;
        }
        named_barrier(barrier_, stream_threads);
        return sums;
    }
    /// Whether `mine` holds in any thread.
    __device__ bool any(bool mine) {
        const std::int32_t* const sums = share(__any_sync(all_lanes, mine));
        return (sums[0] | sums[1] | sums[2] | sums[3]) != 0;
    }

    /// The next stream_threads rows; those that some query of the tile sees are put behind the waiting ones.
    __device__ void take() {
        const Source& source = memory_.source;
        const std::int32_t x = next_ + thread_;
        timed_row found{-1, {0, 0}};
        if (x < source.full) {
            found = {source.row(call_, x), {source.begin, source.end}};
        } else if (x < all()) {
            found = source.candidate(call_, x);
        }
        const bool seen = found.time.born < found.time.dies && found.time.dies > source.begin &&
                          found.time.born < source.end;
        const unsigned votes = __ballot_sync(all_lanes, seen);
        const std::int32_t* const sums = share(__popc(votes));
        int before = 0;
        int total = 0;
#pragma unroll
        for (int w = 0; w < 4; ++w) {
            before += w < thread_ / 32 ? sums[w] : 0;
            total += sums[w];
        }
        if (seen) {
            const int at = (head_ + waiting_ + before + __popc(votes & lanes_before(thread_ % 32))) % 256;
            memory_.row[at] = found.row;
            memory_.life[at] = static_cast<std::uint32_t>(found.time.born) |
                               (static_cast<std::uint32_t>(found.time.dies - found.time.born) << 16);
            if constexpr (Biased) {
                memory_.x[at] = x;
            }
        }
        waiting_ += total;
        next_ += stream_threads;
        named_barrier(barrier_, stream_threads);
    }

    const attend_launch<T>& call_;
    stream_memory<Source>& memory_;
    int thread_;
    int barrier_;
    int turn_ = 0;
    int head_ = 0;
    int waiting_ = 0;  // at most 255
    std::int32_t next_ = 0;
    std::int32_t fetched_ = -1;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
