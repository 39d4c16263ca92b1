// Which keys a tile of queries sees: one scan over the lifetimes, handing on the live keys in blocks.
//
// A key that no query of the tile sees costs an eighth of a vector comparison and nothing else. Those that
// every query sees as they are go into one kind of block (no masking needed later), the others into two more:
// keys that begin in the tile, or have a bias, in order; and older keys that expire in it, the last to expire
// first. So in a long sequence only a few blocks need a mask, and of those a strip of queries computes a
// prefix: the keys that have begun, or have not expired.
#pragma once

#include <kvpolicy/attention/host/types.hpp>

#include <algorithm>
#include <cstdint>
#include <limits>

namespace kvpolicy::host_backend {

/// Bit r: row r is seen by some query of the tile; by all of them.
struct seen_rows {
    std::uint64_t some = 0;
    std::uint64_t all = 0;
};

/// Rows r in [0, count), count <= 64, have position + r (position[r] where given) and expiry[r] (never where
/// null). The queries of the tile have the positions [first_query, last_query].
inline seen_rows scan_rows(const expiry_t* expiry, const std::int32_t* position, std::int64_t first,
                           std::int32_t count, std::int32_t first_query, std::int32_t last_query) {
    seen_rows seen;
    for (std::int32_t r = 0; r < count; ++r) {
        const std::int64_t begins = position != nullptr ? position[r] : first + r;
        const expiry_t expires = expiry != nullptr ? expiry[r] : never;
        const bool some = begins <= last_query && expires > first_query && begins < expires;
        const bool all = begins <= first_query && expires > last_query;
        seen.some |= static_cast<std::uint64_t>(some) << r;
        seen.all |= static_cast<std::uint64_t>(all) << r;
    }
    return seen;
}

constexpr std::uint64_t low_bits(std::int64_t count) {
    return count >= 64 ? ~std::uint64_t{0} : (std::uint64_t{1} << std::max<std::int64_t>(count, 0)) - 1;
}

/// Collects keys into blocks and hands full ones to `consume(const key_block<T>&)`.
template <class Kernels, Storage T, class Consume>
class key_collector {
  public:
    /// `one_behind`: a full block without masks waits for the next one, which it then names in `next`.
    key_collector(std::int32_t first_query, std::int32_t last_query, Consume& consume,
                  bool one_behind = false)
        : first_query_(first_query),
          last_query_(last_query),
          consume_(consume),
          one_behind_(one_behind),
          plain_(blocks_) {
        masked_.masked = true;
        expiring_.masked = true;
    }

    /// Takes rows [begin, end) of a segment.
    void take(const key_segment<T>& segment, std::int32_t begin, std::int32_t end) {
        if (segment.position == nullptr) {
            // Positions rise, so keys that begin after the tile are a tail.
            const std::int64_t not_begun = std::int64_t{last_query_} - segment.first + 1;
            end = static_cast<std::int32_t>(std::clamp<std::int64_t>(not_begun, begin, end));
        }
        for (std::int32_t row = begin; row < end; row += block_keys) {
            take_group(segment, row, std::min(end - row, block_keys));
        }
    }

    /// Hands on what is left.
    void finish() {
        flush_plain();
        if (waiting_ != nullptr) {
            flush(*waiting_);
        }
        flush_expiring();
        flush(masked_);
    }

  private:
    void take_group(const key_segment<T>& segment, std::int32_t row, std::int32_t count) {
        seen_rows seen;
        const std::int64_t first = std::int64_t{segment.first} + row;
        if (segment.position == nullptr && segment.expiry == nullptr) {
            seen.some = low_bits(count);
            seen.all = low_bits(std::min<std::int64_t>(count, std::int64_t{first_query_} - first + 1));
        } else {
            seen = Kernels::scan(segment.expiry != nullptr ? segment.expiry + row : nullptr,
                                 segment.position != nullptr ? segment.position + row : nullptr, first, count,
                                 first_query_, last_query_);
        }
        if (segment.log_bias != nullptr) {
            seen.all = 0;
        }
        if (seen.all == low_bits(count) && plain_->count + count <= block_keys) {
            // The common case of a long prefix or a page: no bit by bit.
            const T* k = segment.k + row * segment.k_stride;
            const T* v = segment.v + row * segment.v_stride;
            for (std::int32_t i = 0; i < count; ++i) {
                plain_->k[plain_->count + i] = k + i * segment.k_stride;
                plain_->v[plain_->count + i] = v + i * segment.v_stride;
            }
            plain_->count += count;
            if (plain_->count == block_keys) {
                const bool more = count == block_keys && row + 2 * block_keys <= segment.count;
                plain_->ahead = more ? k + block_keys * segment.k_stride : nullptr;
                plain_->ahead_stride = segment.k_stride;
                flush_plain();
            }
            return;
        }
        for (std::uint64_t bits = seen.all; bits != 0; bits &= bits - 1) {
            const std::int32_t r = row + __builtin_ctzll(bits);
            const std::int32_t i = plain_->count++;
            plain_->k[i] = segment.k + r * segment.k_stride;
            plain_->v[i] = segment.v + r * segment.v_stride;
            if (plain_->count == block_keys) {
                flush_plain();
            }
        }
        for (std::uint64_t bits = seen.some & ~seen.all; bits != 0; bits &= bits - 1) {
            take_masked(segment, row + __builtin_ctzll(bits));
        }
    }

    void take_masked(const key_segment<T>& segment, std::int32_t r) {
        constexpr std::int32_t no_query = std::numeric_limits<std::int32_t>::max();
        const std::int32_t begins = segment.position != nullptr ? segment.position[r] : segment.first + r;
        expiry_t expires = segment.expiry != nullptr ? segment.expiry[r] : never;
        float bias = 0.0f;
        std::int32_t bias_start = no_query;
        if (segment.log_bias != nullptr) {
            const auto start = static_cast<std::int32_t>(
                std::min<std::int64_t>(std::int64_t{begins} + std::max(segment.bias_from, 0), no_query));
            if (segment.log_bias[r] == -std::numeric_limits<float>::infinity()) {
                // Hidden from then on is what expiring means; no -inf is ever added.
                expires = std::min(expires, start);
                if (expires <= std::max(first_query_, begins)) {
                    return;
                }
            } else {
                bias = segment.log_bias[r];
                bias_start = start;
                masked_.biased = true;
            }
        }
        const bool expiring = begins <= first_query_ && bias_start == no_query;
        key_block<T>& block = expiring ? expiring_ : masked_;
        const std::int32_t i = block.count++;
        block.k[i] = segment.k + r * segment.k_stride;
        block.v[i] = segment.v + r * segment.v_stride;
        block.begins[i] = begins;
        block.expires[i] = expires;
        block.bias[i] = bias;
        block.bias_start[i] = bias_start;
        if (block.count == block_keys) {
            expiring ? flush_expiring() : flush(block);
        }
    }

    /// The last to expire first: by insertion, since keys of a window expire in order.
    void flush_expiring() {
        for (std::int32_t i = 1; i < expiring_.count; ++i) {
            const T *const k = expiring_.k[i], *const v = expiring_.v[i];
            const std::int32_t begins = expiring_.begins[i];
            const expiry_t expires = expiring_.expires[i];
            std::int32_t to = i;
            for (; to > 0 && expiring_.expires[to - 1] < expires; --to) {
                expiring_.k[to] = expiring_.k[to - 1];
                expiring_.v[to] = expiring_.v[to - 1];
                expiring_.begins[to] = expiring_.begins[to - 1];
                expiring_.expires[to] = expiring_.expires[to - 1];
            }
            expiring_.k[to] = k;
            expiring_.v[to] = v;
            expiring_.begins[to] = begins;
            expiring_.expires[to] = expires;
        }
        flush(expiring_);
    }

    void flush_plain() {
        if (!one_behind_) {
            flush(*plain_);
            return;
        }
        if (plain_->count == 0) {
            return;
        }
        if (waiting_ != nullptr) {
            waiting_->next = plain_;
            flush(*waiting_);
        }
        waiting_ = plain_;
        plain_ = plain_ == blocks_ ? blocks_ + 1 : blocks_;
    }

    void flush(key_block<T>& block) {
        if (block.count == 0) {
            return;
        }
        // Passes may read keys in whole panels.
        for (std::int32_t i = block.count; i % panel_lanes != 0; ++i) {
            block.k[i] = block.k[block.count - 1];
        }
        consume_(block);
        block.count = 0;
        block.biased = false;
        block.ahead = nullptr;
        block.next = nullptr;
    }

    std::int32_t first_query_;
    std::int32_t last_query_;
    Consume& consume_;
    bool one_behind_;
    key_block<T> blocks_[2];
    key_block<T>* plain_;  // collects
    key_block<T>* waiting_ = nullptr;
    key_block<T> masked_;
    key_block<T> expiring_;
};

/// The part of a masked block that some query in [first_query, last_query] sees lies below `count`; `all`:
/// every query of that range sees every one of these keys, without a bias.
struct strip_extent {
    std::int32_t count = 0;
    bool all = true;
};

template <Storage T>
strip_extent extent_of(const key_block<T>& block, std::int32_t first_query, std::int32_t last_query) {
    if (!block.masked) {
        return {block.count, true};
    }
    strip_extent extent;
    bool all = !block.biased;
    for (std::int32_t i = 0; i < block.count; ++i) {
        if (block.begins[i] <= last_query && block.expires[i] > first_query) {
            extent.count = i + 1;
        }
    }
    for (std::int32_t i = 0; i < extent.count; ++i) {
        all = all && block.begins[i] <= first_query && block.expires[i] > last_query;
    }
    extent.all = all;
    return extent;
}

}  // namespace kvpolicy::host_backend
