// Steps of a DualCache whose policy ranks keys by attention, against the host's: pages that are there and
// that are not, heads without a bound, H2O, and SnapKV, whose steps evict no key.
#include <kvpolicy/h2o.hpp>
#include <kvpolicy/snapkv.hpp>

#include "observed_case.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

using Dims = head_dims<64>;

constexpr std::int32_t small[] = {0, 20, 40};

template <class T, class P>
void live(const CacheShape& shape, const P& policy, Keys kind, std::int32_t turns,
          std::int32_t max_slabs = 200) {
    std::mt19937 generator(static_cast<unsigned>(shape.query_heads + 100 * static_cast<int>(kind)));
    CAPTURE(shape.query_heads);
    BothDuals<P, T, Dims> both(shape, {.slab_pages = 7, .max_slabs = max_slabs, .max_seq_len = 400}, policy);
    observed_life<T>(both, kind, turns, generator);
}

}  // namespace

TEST_CASE("sums of masses, of groups of any size") {
    live<bf16>(shape_of(3, 1), ragged(accumulated, partly_unbounded), Keys::random, 180);
    live<bf16>(shape_of(3, 4), ragged({.aggregate = group_aggregate::max}, partly_unbounded), Keys::equal,
               180);
    live<bf16>(shape_of(3, 9), ragged(accumulated, partly_unbounded), Keys::far, 180);
}

TEST_CASE("last masses, of a head and of a layer") {
    live<bf16>(shape_of(3, 7), ragged(last_of_head, partly_unbounded), Keys::equal, 180);
    live<bf16>(shape_of(3, 4), even(last_of_layer), Keys::equal, 130);
}

TEST_CASE("a pool that runs out") {
    live<bf16>(shape_of(3, 4), ragged(accumulated, small), Keys::random, 120, 3);
    live<bf16>(shape_of(3, 2), SnapKV<>{Window<>{4}, TopKBudget<>{9}, WindowMass{}}, Keys::random, 120, 4);
}

TEST_CASE("H2O, float") { live<float>(shape_of(3, 3, 24), h2o_for_total(40), Keys::random, 100); }

TEST_CASE("decoded tokens stay under SnapKV") {
    live<bf16>(shape_of(3, 4), SnapKV<>{Window<>{4}, TopKBudget<>{0}, WindowMass{}}, Keys::random, 60);
    live<bf16>(shape_of(3, 1), SnapKV<>{Window<>{4}, TopKBudget<>{9}, WindowMass{}}, Keys::random, 60);
}
