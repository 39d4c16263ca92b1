// A tile's rows as blocks of keys: dead candidates are left out, so every block but the last is full.
#pragma once

#include <kvpolicy/attention/cuda/forward/row_source.cuh>
#include <kvpolicy/attention/cuda/key_frame.cuh>
#include <kvpolicy/core/cuda_config.cuh>
#include <kvpolicy/cuda/primitives/async.cuh>
#include <kvpolicy/cuda/primitives/warp.cuh>

#include <cstdint>

namespace kvpolicy {
inline namespace KVPOLICY_CUDA_NAMESPACE KVPOLICY_HIDDEN {
namespace cuda_backend {

/// What softmax needs to know of a block's keys.
template <int Keys, bool Biased>
struct key_notes {
    // Where masked is masked_by_begins, query i sees key n iff i >= interval[n]; else iff i - (interval[n] &
    // 0xffff), as an unsigned number, is below interval[n] >> 16.
    std::uint32_t interval[Keys];
    float bias[Biased ? Keys : 1];               // in units of log 2
    std::uint32_t bias_from[Biased ? Keys : 1];  // the bias counts for queries i >= this
    std::uint32_t masked;  // some query of the tile does not see some key: read `interval`; else 0
    std::uint32_t last;    // no block follows
};

/// What `masked` may be: keys that are there outlast the tile, or not all do.
inline constexpr std::uint32_t masked_by_begins = 1, masked_by_intervals = 2;

inline constexpr int stream_threads = 128;

/// Where a block's rows of keys and of values lie. 0: no row, zeros.
template <int Keys>
struct alignas(16) key_addresses {
    std::uint64_t k[Keys];
    std::uint64_t v[Keys];
};

/// The same as row numbers, a quarter of the memory. -1: no row, zeros.
template <int Keys>
struct key_numbers {
    std::int32_t row[Keys];
};

/// Row 0 of keys, or of values, of a head in both segments.
struct head_rows {
    std::uint64_t past, self;
    const std::int32_t* page_ids;  // of the first segment, where it lies in pages

    template <class T>
    __device__ static head_rows keys_of(const key_rows<T>& all, std::int32_t b, std::int32_t h) {
        return {all.pages.table != nullptr ? 0 : reinterpret_cast<std::uint64_t>(all.past(all.k, b, h)),
                reinterpret_cast<std::uint64_t>(all.self_k.row(b, h, all.packed.begin(b))),
                ids_of(all, b, h)};
    }
    template <class T>
    __device__ static head_rows values_of(const key_rows<T>& all, std::int32_t b, std::int32_t h) {
        return {all.pages.table != nullptr ? 0 : reinterpret_cast<std::uint64_t>(all.past(all.v, b, h)),
                reinterpret_cast<std::uint64_t>(all.self_v.row(b, h, all.packed.begin(b))),
                ids_of(all, b, h)};
    }

    /// The address of a row.
    template <class T>
    [[nodiscard]] __device__ std::uint64_t key(const key_rows<T>& all, std::int32_t row) const {
        if (row < all.k.length && page_ids != nullptr) {
            return reinterpret_cast<std::uint64_t>(all.pages.key(page_ids, row));
        }
        return at(row, all.k, all.self_k);
    }
    template <class T>
    [[nodiscard]] __device__ std::uint64_t value(const key_rows<T>& all, std::int32_t row) const {
        if (row < all.v.length && page_ids != nullptr) {
            return reinterpret_cast<std::uint64_t>(all.pages.value(page_ids, row));
        }
        return at(row, all.v, all.self_v);
    }

  private:
    template <class T>
    __device__ static const std::int32_t* ids_of(const key_rows<T>& all, std::int32_t b, std::int32_t h) {
        return all.pages.table != nullptr ? all.pages.of_head(b, h, all.k.heads) : nullptr;
    }
    template <class T>
    [[nodiscard]] __device__ std::uint64_t at(std::int32_t row, const rows_view<const T>& first,
                                              const rows_view<const T>& second) const {
        const bool own = row >= first.length;
        const auto stride = static_cast<std::uint32_t>((own ? second : first).row_stride * sizeof(T));
        return (own ? self : past) +
               std::uint64_t{static_cast<std::uint32_t>(own ? row - first.length : row)} * stride;
    }
};

/// What a stream keeps in shared memory: registers are few where it runs.
template <int Keys, bool Biased, class Source>
struct stream_memory {
    static constexpr int ring =
        Keys + stream_threads;  // fewer than Keys wait when stream_threads more are looked at
    Source source;
    head_rows k, v;
    std::int32_t sums[2][4];
    // Waiting rows.
    std::int32_t row[ring];
    std::uint32_t interval[ring];
    float bias[Biased ? ring : 1];
    std::int32_t bias_from[Biased ? ring : 1];
};

/// Runs on stream_threads threads, numbered `thread`, that share the named barrier `barrier`.
template <class T, int Keys, bool Biased, class Source>
class row_stream {
    static_assert(Keys <= stream_threads);

  public:
    using Memory = stream_memory<Keys, Biased, Source>;

    __device__ row_stream(const forward_params<T>& call, const tile_coords& coords, Memory& memory,
                          int thread, int barrier)
        : call_(call), memory_(memory), thread_(thread), barrier_(barrier) {
        if (thread == 0) {
            memory.source = Source(call, coords);
            memory.k = head_rows::keys_of(call.params.rows, coords.b, coords.h);
            memory.v = head_rows::values_of(call.params.rows, coords.b, coords.h);
        }
        named_barrier(barrier, stream_threads);
    }

    /// Before the first next(): leaves out rows before `first`, which are full ones.
    __device__ void start(std::int32_t first = 0) {
        next_ = first;
        fetch();
    }

    /// The next block's places (key_addresses or key_numbers) and notes. False where it was the last. At
    /// least one block comes, of which no row need be there. Threads may read both after it, and must have
    /// read the places before any calls it again with the same ones.
    template <class Places>
    __device__ bool next(Places& places, key_notes<Keys, Biased>& notes) {
        const Source& source = memory_.source;
        std::uint32_t masked = 0;
        if (next_ + Keys <= source.full) {
            if (thread_ < Keys) {
                put(places, fetched_.row);
                note_bias(notes, bias_, bias_from_);
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
            std::uint32_t interval = 0;
            std::uint32_t why = 0;
            bool present = false;
            if (thread_ < Keys) {
                const int at = (head_ + thread_) % Memory::ring;
                present = thread_ < waiting_;
                interval = present ? memory_.interval[at] : 0;
                put(places, present ? memory_.row[at] : -1);
                note_bias(notes, present ? memory_.bias[at] : 0.0f, present ? memory_.bias_from[at] : 0);
                const auto begin = static_cast<std::int32_t>(interval & 0xffffu);
                const auto lasts = static_cast<std::int32_t>(interval >> 16);
                why = (!present || begin > source.begin ? masked_by_begins : 0) |
                      (present && begin + lasts < source.end ? masked_by_intervals : 0);
            }
            why = any(why);
            masked = (why & masked_by_intervals) != 0 ? masked_by_intervals : why;
            if (thread_ < Keys) {
                notes.interval[thread_] = masked == masked_by_intervals ? interval
                                          : present                     ? interval & 0xffffu
                                                                        : 0xffffffffu;
            }
            const int taken = waiting_ < Keys ? waiting_ : Keys;
            head_ = (head_ + taken) % Memory::ring;
            waiting_ -= taken;
            wait_for_rows();
        }
        const bool more = waiting_ != 0 || next_ < all();
        if (thread_ == 0) {
            notes.masked = masked;
            notes.last = more ? 0 : 1;
        }
        named_barrier(barrier_, stream_threads);
        return more;
    }

  private:
    [[nodiscard]] __device__ std::int32_t all() const {
        return memory_.source.full + memory_.source.candidates;
    }

    /// Leaves rows waiting, if any come.
    __device__ void wait_for_rows() {
        while (waiting_ == 0 && next_ < all()) {
            take();
        }
    }

    /// Loads what the next step needs of rows next_ + thread, so that it need not wait for memory.
    __device__ void fetch() {
        const Source& source = memory_.source;
        const std::int32_t x = next_ + thread_;
        bool there = thread_ < Keys;
        if (next_ + Keys <= source.full) {
            if (there) {
                fetched_.row = source.row(call_, x);
            }
        } else {
            there = x < all();
            fetched_ = {-1, 0};
            if (x < source.full) {
                fetched_ = {source.row(call_, x), interval_of(source.begin, source.end)};
            } else if (there) {
                fetched_ = source.candidate(call_, x);
            }
        }
        if (Biased && there) {
            bias_ = source.bias(call_, x, bias_from_);
            if (bias_ == minus_infinity() && bias_from_ <= source.begin) {
                fetched_.row = -1;  // hidden from all queries of the tile, so not read: it may hold anything
            }
        }
    }

    __device__ void put(key_addresses<Keys>& addresses, std::int32_t row) const {
        const key_rows<T>& all = call_.params.rows;
        addresses.k[thread_] = row < 0 ? 0 : memory_.k.key(all, row);
        addresses.v[thread_] = row < 0 ? 0 : memory_.v.value(all, row);
    }

    __device__ void put(key_numbers<Keys>& numbers, std::int32_t row) const { numbers.row[thread_] = row; }

    __device__ void note_bias(key_notes<Keys, Biased>& notes, float bias, std::int32_t from) const {
        if constexpr (Biased) {
            notes.bias[thread_] = bias * 1.44269504088896340736f;
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
    /// The bits that are set in any thread.
    __device__ std::uint32_t any(std::uint32_t mine) {
        const std::int32_t* const sums = share(static_cast<std::int32_t>(__reduce_or_sync(all_lanes, mine)));
        return static_cast<std::uint32_t>(sums[0] | sums[1] | sums[2] | sums[3]);
    }

    /// The next stream_threads rows; those that some query of the tile sees are put behind the waiting ones.
    __device__ void take() {
        const Source& source = memory_.source;
        const candidate_row found = fetched_;
        const auto begin = static_cast<std::int32_t>(found.interval & 0xffffu);
        const auto expiry = static_cast<std::int32_t>(found.interval >> 16);
        const bool seen = begin < expiry && expiry > source.begin && begin < source.end;
        const float bias = bias_;
        const std::int32_t bias_from = bias_from_;
        next_ += stream_threads;
        fetch();
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
            const int at =
                (head_ + waiting_ + before + __popc(votes & lanes_before(thread_ % 32))) % Memory::ring;
            memory_.row[at] = found.row;
            memory_.interval[at] = interval_of(begin, expiry - begin);
            if constexpr (Biased) {
                memory_.bias[at] = bias;
                memory_.bias_from[at] = bias_from;
            }
        }
        waiting_ += total;
        named_barrier(barrier_, stream_threads);
    }

    const forward_params<T>& call_;
    Memory& memory_;
    int thread_;
    int barrier_;
    int turn_ = 0;
    int head_ = 0;
    int waiting_ = 0;
    std::int32_t next_ = 0;
    candidate_row fetched_{-1, 0};
    float bias_ = 0.0f;
    std::int32_t bias_from_ = 0;
};

}  // namespace cuda_backend
}  // namespace KVPOLICY_HIDDEN
}  // namespace kvpolicy
