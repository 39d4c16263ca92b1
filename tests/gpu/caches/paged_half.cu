// The tensor cores' kernels through whole lives of sequences in a DualCache.
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/window.hpp>

#include "paged_case.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

void check(std::int32_t group, std::int32_t turns) {
    using P = Policy<Sink<>, Window<>, ThresholdGate<at_least>>;
    constexpr float thresholds[] = {-100.0f, 0.0f, 2.5f};
    const P policy{Sink<>{4}, Window<>{21}, ThresholdGate<at_least>{per_head(thresholds, 1, 3)}};
    std::mt19937 generator(3);
    BothDuals<P, bf16, head_dims<64>, true> both({.layers = 1,
                                                  .max_sequences = 3,
                                                  .query_heads = 3 * group,
                                                  .kv_heads = 3,
                                                  .head_dim_qk = 64,
                                                  .head_dim_vo = 40,
                                                  .page_size = 32,
                                                  .max_draft_tokens = 4},
                                                 {.slab_pages = 16, .max_slabs = 40, .max_seq_len = 5000},
                                                 policy);
    random_life(both, Scores::random, turns, generator);
}

}  // namespace

TEST_CASE("few calls") { check(4, 16); }

TEST_CASE("bf16, gates that keep all, a half, few") {
    check(4, 120);
    check(12, 120);
}
