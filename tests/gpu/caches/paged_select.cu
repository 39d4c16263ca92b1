// Selection at the read of a DualCache on a device: the host's pages, bounds and outputs, whatever
// calls came before.
#include "../../support/refusal.hpp"
#include "paged_parts.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

using Gated = Policy<Sink<>, Window<>, ThresholdGate<at_least>, QuestPages<>>;

Gated gated(std::int32_t rows, group_aggregate of_heads) {
    return Gated{Sink<>{of_parts(part_sinks)}, Window<>{of_parts(part_windows)},
                 ThresholdGate<at_least>{of_parts(part_gates)},
                 QuestPages<>{rows, of_parts(part_pages), of_heads}};
}

/// Steps of 16-bit rows: heads that keep all, a half, hardly any.
template <class T, int Tile>
void check_half(std::int32_t dim, std::int32_t group, std::int32_t page_size, std::int32_t rows) {
    CAPTURE(dim);
    CAPTURE(group);
    constexpr float thresholds[] = {-100.0f, 0.0f, 2.5f};
    constexpr std::int32_t windows[] = {20, 5, 64}, pages[] = {2, 3, 4};
    const Gated policy{Sink<>{4}, Window<>{per_head(windows, 1, 3)},
                       ThresholdGate<at_least>{per_head(thresholds, 1, 3)},
                       QuestPages<>{rows, per_head(pages, 1, 3)}};
    BothDuals<Gated, T, head_dims<Tile>> both({.layers = 1,
                                               .max_sequences = 3,
                                               .query_heads = 3 * group,
                                               .kv_heads = 3,
                                               .head_dim_qk = dim,
                                               .head_dim_vo = dim,
                                               .page_size = page_size},
                                              {.slab_pages = 64, .max_slabs = 20, .max_seq_len = 3000},
                                              policy);
    std::mt19937 generator(static_cast<unsigned>(dim + group));
    for (std::int32_t t = 0; t < 150; ++t) {
        const CallTensors<T> in(both.shape, 3, 1, Scores::random, generator);
        both.call(Mode::step, {2, 0, 1}, {1, t % 5 == 0 ? 1 : 0, t % 2}, in);
        if (t % 40 == 9) {
            both.look({1, 2}, CallTensors<T>(both.shape, 2, 1, Scores::random, generator));
        }
    }
    both.same_rows("after 150 steps");
}

}  // namespace

TEST_CASE("few calls") { check_parts<float>(gated(16, group_aggregate::max), 32, 14); }

TEST_CASE("gates by layer and head, pages of a page and of a third of one") {
    check_parts<float>(gated(16, group_aggregate::max));
    check_parts<float>(gated(16, group_aggregate::mean), 48);
}

TEST_CASE("a selection beside budgets and a stride") {
    check_parts<float>(
        Policy<Sink<>, Window<>, TopKBudget<>, Stride<7>, QuestPages<32>>{
            Sink<>{of_parts(part_sinks)}, Window<>{of_parts(part_windows)},
            TopKBudget<>{of_parts(part_budgets)}, Stride<7>{}, QuestPages<32>{of_parts(part_pages)}},
        64);
}

TEST_CASE("16-bit rows") {
    check_half<bf16, 64>(64, 4, 32, 16);
    check_half<fp16, 128>(128, 12, 48, 48);
    check_half<bf16, 128>(72, 1, 64, 32);
}

TEST_CASE("pages of a selection that kernels cannot read are refused") {
    DualCache<Gated, float> cache({.layers = 2,
                                   .max_sequences = 1,
                                   .query_heads = 3,
                                   .kv_heads = 3,
                                   .head_dim_qk = 8,
                                   .head_dim_vo = 8,
                                   .page_size = 16},
                                  {.slab_pages = 1, .max_slabs = 1, .max_seq_len = 10},
                                  gated(8, group_aggregate::max));
    const Device<unsigned char> memory(cache.bytes().total());
    CHECK_REFUSED(cache.bind(kvpolicy::cuda{}, memory.data(), memory.size()), "rows of a selection's page");
}
