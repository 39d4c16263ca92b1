// Selection: which of the keys that a cache holds a decoded token reads. Not a lifetime: what is not read
// today may be read tomorrow.
#pragma once

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/policies/concept.hpp>

#include <cstdint>

namespace kvpolicy {

namespace detail {

/// How many pages a query reads, and how the bounds of a group's query heads are joined.
struct quest_budget {
    static constexpr part_kind kind = part_kind::selection;
    PerHead<std::int32_t> pages{unlimited};
    group_aggregate aggregate = group_aggregate::max;

    void check_pages(std::int32_t layers, std::int32_t heads) const {
        pages.check("array of pages", layers, heads);
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            for (std::int32_t head = 0; head < heads; ++head) {
                detail::require(
                    pages.at(layer, head) >= 1,
                    [&] { return detail::text("pages of layer ", layer, ", head ", head); },
                    pages.at(layer, head), "1 or more, since a query sees itself");
            }
        }
    }
};

}  // namespace detail

/// Quest (Tang et al., 2024): a head's rows are cut into pages of `rows` rows, each with the smallest and
/// largest number of every dimension of its keys. A query's logits on a page are at most
///
///     sum over d of max(q_d min_d, q_d max_d)          (times the attention's scale)
///
/// and the `pages` pages with the largest bounds are read, the newest token's page always among them; ties go
/// to the page that comes first. With G query heads per KV head they read the same pages: the largest of
/// their bounds counts (or the mean). Pages are of the row space [sinks | ring | long-range]
/// (docs/architecture.md); a head with no more pages in use reads all. `unlimited` pages, by layer and head
/// where the paper reads everything (its first two layers), read all too.
///
/// A page of rows must lie in a page of the cache: `rows` divides CacheShape::page_size; on a device it is a
/// multiple of 16. Only step and attend select; prefill and append_draft read everything, and so do masks.
template <std::int32_t Rows = dynamic>
struct QuestPages : detail::quest_budget {
    static_assert(Rows >= 1, "kvpolicy: QuestPages<r> needs r >= 1");

    constexpr QuestPages() = default;
    constexpr explicit QuestPages(PerHead<std::int32_t> read, group_aggregate of_heads = group_aggregate::max)
        : quest_budget{read, of_heads} {}

    KVPOLICY_HOST_DEVICE constexpr std::int32_t page_size() const { return Rows; }
    void check_values(std::int32_t layers, std::int32_t heads) const { check_pages(layers, heads); }
};

/// The same with a run-time page size: QuestPages<>{16, 64}.
template <>
struct QuestPages<dynamic> : detail::quest_budget {
    std::int32_t rows = 16;

    constexpr QuestPages() = default;
    constexpr QuestPages(std::int32_t page, PerHead<std::int32_t> read,
                         group_aggregate of_heads = group_aggregate::max)
        : quest_budget{read, of_heads}, rows(page) {}

    KVPOLICY_HOST_DEVICE constexpr std::int32_t page_size() const { return rows; }
    void check_values(std::int32_t layers, std::int32_t heads) const {
        detail::require(rows >= 1, "rows of a page", rows, "1 or more");
        check_pages(layers, heads);
    }
};

static_assert(SelectionPart<QuestPages<16>> && SelectionPart<QuestPages<>>);

}  // namespace kvpolicy
