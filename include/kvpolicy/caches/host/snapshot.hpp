// A sequence as a blob of bytes, and back.
#pragma once

#include <kvpolicy/caches/cache.hpp>
#include <kvpolicy/caches/host/host_cache.hpp>
#include <kvpolicy/caches/host/sequences.hpp>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace kvpolicy {

namespace host_backend {

/// FNV-1a, 64 bits.
class hash {
  public:
    void bytes(const void* data, std::size_t count) {
        const auto* byte = static_cast<const unsigned char*>(data);
        for (std::size_t i = 0; i < count; ++i) {
            value_ = (value_ ^ byte[i]) * 0x100000001b3u;
        }
    }
    template <class Number>
    void number(Number value) {
        bytes(&value, sizeof value);
    }
    [[nodiscard]] std::uint64_t value() const { return value_; }

  private:
    std::uint64_t value_ = 0xcbf29ce484222325u;
};

inline constexpr std::uint32_t snapshot_version = 1;

/// The first bytes of a snapshot. Numbers are as this machine has them; another byte order fails at
/// `version`.
struct snapshot_header {
    char magic[8] = {'k', 'v', 'p', 'o', 'l', 'i', 'c', 'y'};
    std::uint32_t version = snapshot_version;
    std::uint32_t unused = 0;
    std::uint64_t fingerprint = 0;
    std::uint64_t bytes = 0;     // of the whole blob
    std::uint64_t checksum = 0;  // of the blob with 0 in this place
    position_t length = 0;
};

template <Storage T>
inline constexpr std::uint32_t storage_code = std::is_same_v<T, bf16>    ? 1
                                              : std::is_same_v<T, fp16>  ? 2
                                              : std::is_same_v<T, float> ? 3
                                                                         : 4;

/// Writes one part of a blob after another, or only counts their bytes where there is no memory.
class blob_writer {
  public:
    explicit blob_writer(std::byte* memory) : memory_(memory) {}
    template <class Element>
    void put(const Element* data, std::int64_t count) {
        const std::size_t size = static_cast<std::size_t>(count) * sizeof(Element);
        if (memory_ != nullptr && size != 0) {
            std::memcpy(memory_ + at_, data, size);
        }
        at_ += size;
    }
    [[nodiscard]] std::size_t at() const { return at_; }

  private:
    std::byte* memory_;
    std::size_t at_ = 0;
};

/// Reads them back; what is beyond the end fails and stays failed.
class blob_reader {
  public:
    blob_reader(const std::byte* memory, std::size_t bytes) : memory_(memory), bytes_(bytes) {}
    template <class Element>
    bool get(Element* data, std::int64_t count) {
        return skip<Element>(count) && copy(data, static_cast<std::size_t>(count) * sizeof(Element));
    }
    template <class Element>
    bool skip(std::int64_t count) {
        const std::size_t left = bytes_ - at_;
        last_ = at_;
        fine_ = fine_ && count >= 0 && static_cast<std::uint64_t>(count) <= left / sizeof(Element);
        at_ += fine_ ? static_cast<std::size_t>(count) * sizeof(Element) : 0;
        return fine_;
    }
    [[nodiscard]] bool at_end() const { return fine_ && at_ == bytes_; }

  private:
    bool copy(void* data, std::size_t size) {
        if (size != 0) {
            std::memcpy(data, memory_ + last_, size);
        }
        return true;
    }
    const std::byte* memory_;
    std::size_t bytes_, at_ = 0, last_ = 0;
    bool fine_ = true;
};

/// Calls visit(queries, count) for the queries that an eviction part has of each head after `length` tokens.
template <class Cache, class Visit>
void for_each_query_ring([[maybe_unused]] const Cache& cache, [[maybe_unused]] std::int32_t seq,
                         [[maybe_unused]] position_t length, [[maybe_unused]] Visit&& visit) {
    if constexpr (Cache::policy_type::has_eviction) {
        const std::int64_t count =
            std::min<position_t>(length, cache.eviction.observing) * cache.group * cache.head_dim_qk;
        for (std::int32_t head = 0; head < cache.kv_heads; ++head) {
            visit(cache.query_row(seq, head, 0), count);
        }
    }
}

/// One layer of a sequence: for each head the places in use, positions and scores, then keys and values; then
/// states.
template <class Cache>
void write_layer(const Cache& cache, std::int32_t seq, blob_writer& blob) {
    for (std::int32_t head = 0; head < cache.kv_heads; ++head) {
        const std::int32_t used = cache.used(seq, head);
        const auto rows = cache.head_rows(seq, head);
        blob.put(cache.num_long_range + cache.head_index(seq, head), 1);
        for (std::int32_t r = 0; r < used; ++r) {
            blob.put(&rows.position(r), 1);
            blob.put(&rows.score(r), 1);
        }
        for (std::int32_t r = 0; r < used; ++r) {
            blob.put(rows.k(r), cache.head_dim_qk);
            blob.put(rows.v(r), cache.head_dim_vo);
        }
    }
    blob.put(cache.state + seq * cache.kv_heads * cache.state_size, cache.kv_heads * cache.state_size);
    for_each_query_ring(cache, seq, cache.length[seq],
                        [&](auto* queries, std::int64_t count) { blob.put(queries, count); });
}

/// Whether row r of a head with `num_long_range` top-k slots may hold position t after `length` tokens.
inline bool row_may_hold(const HeadRows& layout, std::int32_t r, position_t t, position_t length) {
    const position_t window_begin = std::max<position_t>(layout.sinks, length - layout.window);
    if (r >= layout.slot(0)) {
        return t >= layout.sinks && t < window_begin;
    }
    return t >= 0 && t < length && (t < layout.sinks || t >= window_begin) && layout.recent(t) == r;
}

/// Reads past a layer, and says whether a cache of this policy can be in that state; adds up the pages that
/// it takes.
template <class Cache>
bool read_past_layer(const Cache& cache, position_t length, blob_reader& blob, std::int64_t& pages) {
    [[maybe_unused]] std::int64_t competitors = 0;  // of all heads
    for (std::int32_t head = 0; head < cache.kv_heads; ++head) {
        const HeadParams& head_params = cache.all_params[head];
        const HeadRows layout = cache.layout(head);
        std::int32_t num_long_range = 0, num_protected = 0;
        if (!blob.get(&num_long_range, 1) || num_long_range < 0) {
            return false;
        }
        const position_t left = std::max<position_t>(0, length - head_params.sinks - head_params.window);
        const position_t recent =
            std::min<position_t>(length, position_t{head_params.sinks} + head_params.window);
        if (num_long_range > left || recent + num_long_range > cache.capacity(head)) {
            return false;
        }
        const std::int32_t used = layout.used(length, num_long_range);
        for (std::int32_t r = 0; r < used; ++r) {
            position_t t = 0;
            float score = 0.0f;
            // A NaN is as good as another: that of a sink or of a kept position is never read, and a device
            // ranks others last.
            if (!blob.get(&t, 1) || !blob.get(&score, 1) || !row_may_hold(layout, r, t, length)) {
                return false;
            }
            num_protected += r >= layout.slot(0) && cache.keep.keeps(t) ? 1 : 0;
        }
        if (!detail::may_compete(cache, head, num_long_range - num_protected)) {
            return false;
        }
        competitors += num_long_range - num_protected;
        using T = typename Cache::value_type;
        if (!blob.template skip<T>(std::int64_t{used} *
                                   (std::int64_t{cache.head_dim_qk} + cache.head_dim_vo))) {
            return false;
        }
        pages += (used + cache.page_size - 1) / cache.page_size;
    }
    if constexpr (Cache::policy_type::shares_budget) {
        if (competitors > cache.shared_slots) {
            return false;
        }
    }
    bool there = blob.template skip<float>(cache.kv_heads * cache.state_size);
    for_each_query_ring(cache, 0, length, [&](auto* queries, std::int64_t count) {
        there = there && blob.template skip<std::remove_pointer_t<decltype(queries)>>(count);
    });
    return there;
}

/// Reads a layer into a sequence that names no pages.
template <class Cache>
void read_layer(const Cache& cache, std::int32_t seq, position_t length, blob_reader& blob) {
    for (std::int32_t head = 0; head < cache.kv_heads; ++head) {
        const std::int64_t index = cache.head_index(seq, head);
        const HeadRows layout = cache.layout(head);
        blob.get(cache.num_long_range + index, 1);
        cache.victim[index] = -1;
        const std::int32_t used = layout.used(length, cache.num_long_range[index]);
        if constexpr (Cache::pooled) {
            cache.take_pages(seq, head, used);
        }
        const auto rows = cache.head_rows(seq, head);
        std::int32_t num_protected = 0;
        for (std::int32_t r = 0; r < used; ++r) {
            blob.get(&rows.position(r), 1);
            blob.get(&rows.score(r), 1);
            num_protected += r >= layout.slot(0) && cache.keep.keeps(rows.position(r)) ? 1 : 0;
        }
        for (std::int32_t r = 0; r < used; ++r) {
            blob.get(rows.k(r), cache.head_dim_qk);
            blob.get(rows.v(r), cache.head_dim_vo);
        }
        refresh_bounds(cache, rows, 0, used, used);
        if constexpr (Cache::policy_type::has_keep) {
            cache.num_protected[index] = num_protected;
        }
    }
    blob.get(cache.state + seq * cache.kv_heads * cache.state_size, cache.kv_heads * cache.state_size);
    for_each_query_ring(cache, seq, length,
                        [&](auto* queries, std::int64_t count) { blob.get(queries, count); });
    cache.num_draft[seq] = 0;
    cache.appended[seq] = 0;
    if constexpr (Cache::pooled) {
        cache.reserved[seq] = 0;
    }
}

/// The checksum of a blob: of all its bytes, with 0 for the checksum itself.
inline std::uint64_t checksum_of(snapshot_header header, const std::byte* blob, std::size_t bytes) {
    header.checksum = 0;
    hash sum;
    sum.bytes(&header, sizeof header);
    sum.bytes(blob + sizeof header, bytes - sizeof header);
    return sum.value();
}

}  // namespace host_backend

template <class Derived, AnyPolicy P, Storage T>
std::uint64_t CacheOwner<Derived, P, T>::fingerprint() const {
    host_backend::hash sum;
    sum.number(host_backend::storage_code<T>);
    for (const std::int32_t number :
         {shape_.layers, shape_.kv_heads, shape_.head_dim_qk, shape_.head_dim_vo}) {
        sum.number(number);
    }
    sum.number(rebase_limit_);
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const auto gate = policy_.gate();
    for (const HeadParams& head_params : all_params_) {
        for (const std::int32_t number :
             {head_params.sinks, head_params.window, head_params.budget, head_params.decay_step}) {
            sum.number(number);
        }
        sum.number(head_params.log_gamma + 0.0f);  // -0 is 0
        sum.number(head_params.threshold + 0.0f);
        if constexpr (P::shares_budget) {
            sum.number(head_params.floor);
            sum.number(head_params.cap);
            sum.number(head_params.score_offset + 0.0f);
        }
        // Gates and keep parts have no names that two compilers agree on, but answers.
        for (const float score :
             {-infinity, std::nextafter(head_params.threshold, -infinity), head_params.threshold,
              std::nextafter(head_params.threshold, infinity), infinity}) {
            sum.number(gate.open(score, head_params) ? 1 : 0);
        }
    }
    if constexpr (P::has_eviction) {
        const auto head_params = policy_.eviction();
        sum.number(static_cast<std::int64_t>(head_params.average));
        sum.number(static_cast<float>(head_params.share));
        for (const std::int32_t number :
             {static_cast<std::int32_t>(head_params.observing), static_cast<std::int32_t>(head_params.pool),
              static_cast<std::int32_t>(head_params.aggregate), shape_.query_heads}) {
            sum.number(number);
        }
    }
    if constexpr (P::has_keep) {
        for (position_t t = 0; t < 4096; ++t) {
            sum.number(policy_.keeps(t) ? 1 : 0);
        }
    }
    sum.number(P::ranked ? static_cast<std::int32_t>(scorer_type::when) : -1);
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
        const scorer_type scorer = scorer_of(layer);
        sum.number(host_backend::state_floats<P>(scorer));
        if constexpr (P::observed) {
            const Observation seen = scorer.observation();
            for (const std::int32_t number :
                 {seen.queries, seen.accumulate ? 1 : 0, static_cast<int>(seen.aggregate),
                  seen.whole_layer ? 1 : 0, seen.pool, seen.pool_largest ? 1 : 0}) {
                sum.number(number);
            }
        }
        if constexpr (requires { scorer.fingerprint(); }) {
            sum.number(static_cast<std::uint64_t>(scorer.fingerprint()));
        }
    }
    return sum.value();
}

template <class Derived, AnyPolicy P, Storage T>
std::size_t CacheOwner<Derived, P, T>::snapshot_bytes(std::int32_t seq) const {
    require_seq(seq);
    require_between_tokens(seq, "seq");
    host_backend::blob_writer blob(nullptr);
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
        host_backend::write_layer(self().layer(layer), seq, blob);
    }
    return sizeof(host_backend::snapshot_header) + blob.at();
}

template <class Derived, AnyPolicy P, Storage T>
std::size_t CacheOwner<Derived, P, T>::snapshot(const host&, std::int32_t seq, void* buffer,
                                                std::size_t buffer_bytes) const {
    namespace hb = host_backend;
    const std::size_t bytes = snapshot_bytes(seq);
    detail::require(buffer != nullptr, "buffer", "null", "memory of snapshot_bytes(sequence)");
    detail::require(buffer_bytes >= bytes, "buffer_bytes", buffer_bytes,
                    [&] { return detail::text("at least snapshot_bytes(sequence) = ", bytes); });
    auto* const memory = static_cast<std::byte*>(buffer);
    hb::blob_writer blob(memory + sizeof(hb::snapshot_header));
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
        hb::write_layer(self().layer(layer), seq, blob);
    }
    hb::snapshot_header header;
    header.fingerprint = fingerprint();
    header.bytes = bytes;
    header.length = length(seq);
    header.checksum = hb::checksum_of(header, memory, bytes);
    std::memcpy(memory, &header, sizeof header);
    return bytes;
}

template <class Derived, AnyPolicy P, Storage T>
void CacheOwner<Derived, P, T>::restore(const host&, std::int32_t seq, const void* blob,
                                        std::size_t blob_bytes, const StepOptions& options) {
    namespace hb = host_backend;
    require_seq(seq);
    detail::require(blob != nullptr, "blob", "null", "a snapshot");
    const hb::snapshot_header ours;
    detail::require(blob_bytes >= sizeof ours, "blob_bytes", blob_bytes, "those of a snapshot");
    const auto* const bytes = static_cast<const std::byte*>(blob);
    hb::snapshot_header header;
    std::memcpy(&header, bytes, sizeof header);
    detail::require(std::memcmp(header.magic, ours.magic, sizeof ours.magic) == 0, "blob", "another format",
                    "a snapshot of a kvpolicy cache");
    detail::require(header.version == ours.version, "version of the snapshot", header.version,
                    [&] { return detail::text(ours.version); });
    detail::require(header.bytes == blob_bytes, "blob_bytes", blob_bytes,
                    [&] { return detail::text("what the snapshot says, ", header.bytes); });
    detail::require(header.checksum == hb::checksum_of(header, bytes, blob_bytes), "blob",
                    "damaged (its checksum differs)", "as it was written");
    detail::require(header.fingerprint == fingerprint(), "snapshot",
                    "of another policy, shape or storage type", "of a cache like this one");
    // A blob may be forged, and its checksum right: every number that decides where something is written is
    // looked at.
    bool sound = header.unused == 0 && header.length >= 0 && header.length <= (position_t{1} << 62);
    std::int64_t pages = 0;
    hb::blob_reader reader(bytes + sizeof header, blob_bytes - sizeof header);
    for (std::int32_t layer = 0; sound && layer < shape_.layers; ++layer) {
        const auto cache = self().layer(layer);
        if constexpr (Derived::ref_type::pooled) {
            detail::require(
                !cache.limited || header.length <= cache.max_seq_len, "length of the snapshot", header.length,
                [&] { return detail::text("at most the cache's max_seq_len, ", cache.max_seq_len); });
        }
        sound = hb::read_past_layer(cache, header.length, reader, pages);
    }
    detail::require(sound && reader.at_end(), "blob", "damaged", "as it was written");
    if (!drop(
            &seq, 1, [&] { return pages; }, options.status)) {
        return;
    }
    hb::blob_reader rows(bytes + sizeof header, blob_bytes - sizeof header);
    for (std::int32_t layer = 0; layer < shape_.layers; ++layer) {
        hb::read_layer(self().layer(layer), seq, header.length, rows);
    }
    at<position_t>(length_at_)[seq] = header.length;
}

}  // namespace kvpolicy
