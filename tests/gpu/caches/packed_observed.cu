// Packed prompts of policies that rank keys by attention, in both caches: the bits of padded tensors, and the
// host's keys. In blocks of all lengths, with and without the caller's lse.
#define KVPOLICY_TEST_LISTS_BYTES 200000  // so that a DualCache attends to some entries after others

#include <kvpolicy/h2o.hpp>
#include <kvpolicy/snapkv.hpp>
#include <kvpolicy/tova.hpp>

#include "../../support/refusal.hpp"
#include "packed_case.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

/// Prompts and chunks behind them: entries around the sizes of tiles, some without a token.
template <class T, class Both>
void observed_prompts(Both& packed, Both& padded) {
    // Masses of fp32 sums, in the orders of different kernels.
    PackedPair<T, Both> pair(packed, padded, 0, 4e-4f);
    const Numbers ids{3, 0, 6, 1, 7, 2, 5};
    pair.call(Mode::prefill, {ids, {0, 1, 15, 16, 17, 127, 129}}, Told::lengths);
    pair.with_lse = false;
    pair.call(Mode::prefill, {ids, {129, 17, 0, 1, 127, 15, 16}}, Told::most);
    pair.call(Mode::prefill, {{4, 5, 0}, {17, 16, 1}}, Told::lengths);
    pair.with_lse = true;
    pair.call(Mode::prefill, {ids, {1, 1, 1, 0, 1, 1, 1}}, Told::lengths);
    pair.call(Mode::prefill, {ids, {16, 0, 129, 15, 1, 33, 64}}, Told::most);
}
template <class T, class P>
void fixed(const P& policy, std::int32_t dim) {
    const CacheShape shape = packed_shape(dim, dim);
    BothCaches<P, T, PackedDims> packed(shape, policy), padded(shape, policy);
    observed_prompts<T>(packed, padded);
}
/// `slabs` of 40 pages: few of them are not enough for all entries.
template <class T, class P>
void paged(const P& policy, std::int32_t dim, std::int32_t slabs) {
    const PoolShape pool{.slab_pages = 40, .max_slabs = slabs, .max_seq_len = 500};
    const CacheShape shape = packed_shape(dim, dim);
    BothDuals<P, T, PackedDims, true> packed(shape, pool, policy), padded(shape, pool, policy);
    while (packed.add_slab() && padded.add_slab()) {
    }
    observed_prompts<T>(packed, padded);
}

}  // namespace

TEST_CASE("H2O") {
    fixed<bf16>(h2o_for_total(50, 11), 64);
    fixed<bf16>(h2o_for_total(50, 11, {ObservedPrefill::in_chunks(32)}), 64);
    fixed<float>(h2o_for_total(50, 11, {ObservedPrefill::in_chunks(50), group_aggregate::max}), 16);
    paged<bf16>(h2o_for_total(50, 11, {ObservedPrefill{}, group_aggregate::max}), 64, 8);
}
TEST_CASE("TOVA") {
    fixed<bf16>(tova_for_total(37), 64);
    paged<float>(tova_for_total(37, {ObservedPrefill::in_chunks(64)}), 16, 8);
}
TEST_CASE("SnapKV, with and without pages enough") {
    paged<bf16>(snapkv_for_total(60, 8), 64, 8);
    paged<bf16>(snapkv_for_total(60, 8, {.pooling = MassPooling::max(7)}), 64, 2);
}

TEST_CASE("more rows than the entries can have need the caller's lse") {
    using P = H2O<>;
    BothCaches<P, bf16, PackedDims> both(packed_shape(64, 64), h2o_for_total(50, 11));
    std::mt19937 generator(5);
    const CallTensors<bf16> in(both.shape, 1, 20, Scores::random, generator);
    const Device<std::int32_t> edges(Numbers{0, 5, 9});
    CHECK_REFUSED(
        call_device(both, Mode::prefill, {.count = 2, .length = 9}, in, edges.data(), {2, 9}, false),
        "q.length: 20 is not allowed; it must be at most 18");
    call_device(both, Mode::prefill, {.count = 2, .length = 9}, in, edges.data(), {2, 9});
}
