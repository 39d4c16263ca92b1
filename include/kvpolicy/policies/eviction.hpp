// Eviction after the write, over all heads of a sequence at once.
#pragma once

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/share.hpp>
#include <kvpolicy/policies/concept.hpp>

#include <cstdint>

namespace kvpolicy {

/// SnapKV's rule under a hard global budget (WG-KV, appendix K). When a sequence holds more than average *
/// layers * heads rows in all, every KV head drops the lowest `share` of its rows, by
///
///     S_j = max over the `pool` keys around j of  sum over the last `observing` queries i of  max_h A_ij,
///     A = softmax(q k^T scale) over the keys that the head holds up to query i
///
/// with h over the head's G query heads (or their mean), and neighbors in logical order among the keys that
/// are held. Sinks, the window and keys that a keep part holds are exempt. A head of N rows drops floor(share
/// N) (count_of_share: 7 of 10 for 0.7, although the float is less), at least one, and no more than are not
/// exempt; of equal scores the newer key goes. A round is repeated, with the scores of what is left, until
/// the budget holds or nothing can be dropped.
///
/// The cache keeps the last `observing` queries of every head; DualCache::evict looks and drops, once a step.
struct SnapKVEviction {
    static constexpr part_kind kind = part_kind::eviction;
    std::int64_t average = 4096;   ///< rows a KV head, on average over the layers and heads of a sequence
    float share = 0.1f;            ///< of a head's rows, dropped in a round
    std::int32_t observing = 256;  ///< queries
    std::int32_t pool = 5;         ///< keys, odd
    group_aggregate aggregate = group_aggregate::max;

    void check_values(std::int32_t, std::int32_t) const {
        detail::require(average >= 0, "average of SnapKVEviction", average, "0 or more");
        detail::require(share > 0.0f && share <= 1.0f, "share of SnapKVEviction", share, "above 0, to 1");
        detail::require(observing >= 1, "observing of SnapKVEviction", observing, "1 or more");
        detail::require(pool >= 1 && pool % 2 == 1, "pool of SnapKVEviction", pool, "odd and 1 or more");
    }
};

static_assert(EvictionPart<SnapKVEviction>);

}  // namespace kvpolicy
