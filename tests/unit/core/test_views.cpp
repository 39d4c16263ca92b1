// Views: where a row lies, and that public structs may go to kernels by value with one layout
// under every compiler.
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/core/view.hpp>
#include <kvpolicy/masks/expiry.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include <doctest/doctest.h>

#include <cstddef>
#include <type_traits>

using namespace kvpolicy;

namespace {
template <class T>
constexpr bool plain = std::is_trivially_copyable_v<T>&& std::is_standard_layout_v<T>;

static_assert(plain<rows_view<bf16>> && plain<plane_view<const float>> && plain<workspace_view> &&
              plain<Sequences>);
static_assert(plain<Batch> && plain<AttentionParams> && plain<mask_view> && plain<CacheShape> &&
              plain<HeadParams>);
static_assert(plain<HeadPages> && plain<StepIO<float>> && plain<PerHead<float>>);
using P = Policy<Sink<>, Window<>, TopKBudget<>, Decay<dynamic>>;
static_assert(std::is_trivially_copyable_v<FixedBudgetRef<P, bf16>>);

// The layout that nvcc must agree with: pointers, then 32-bit numbers, then 64-bit strides.
static_assert(sizeof(rows_view<float>) == 48 && offsetof(rows_view<float>, batch_stride) == 24);
static_assert(sizeof(plane_view<float>) == 40 && offsetof(plane_view<float>, batch_stride) == 24);
static_assert(sizeof(Batch) == 32 && sizeof(Sequences) == 40 && sizeof(HeadParams) == 36 &&
              sizeof(CacheShape) == 36);
}  // namespace

TEST_CASE("rows of HND and NHD tensors") {
    float data[2 * 3 * 4 * 5];
    const auto hnd = view_bhsd(data, 2, 3, 4, 5);
    const auto nhd = view_bshd(data, 2, 4, 3, 5);
    for (std::int64_t b = 0; b < 2; ++b) {
        for (std::int64_t h = 0; h < 3; ++h) {
            for (std::int64_t t = 0; t < 4; ++t) {
                CHECK(hnd.row(b, h, t) == data + ((b * 3 + h) * 4 + t) * 5);
                CHECK(nhd.row(b, h, t) == data + ((b * 4 + t) * 3 + h) * 5);
            }
        }
    }
    const rows_view<const float> constant = nhd;
    CHECK(constant.row(1, 2, 3) == nhd.row(1, 2, 3));
    CHECK(constant.heads == 3);
    CHECK(constant.length == 4);
}

TEST_CASE("strides are 64 bits wide") {
    // Only addresses are computed: nothing of this size exists.
    rows_view<float> huge{nullptr, 2, 2, 1 << 30, 256, std::int64_t{1} << 40, std::int64_t{1} << 39, 256};
    CHECK(huge.batch_stride + huge.head_stride + huge.row_stride * ((1 << 30) - 1) ==
          (std::int64_t{3} << 39) + (std::int64_t{1} << 38) - 256);
    const auto made = view_bhsd<float>(nullptr, 4, 64, 1 << 20, 128);
    CHECK(made.batch_stride == std::int64_t{64} * (1 << 20) * 128);
    const auto plane = view_bhs<float>(nullptr, 4, 4096, 1 << 20);
    CHECK(plane.batch_stride == std::int64_t{4096} * (1 << 20));
}

TEST_CASE("planes, batches and sequences by default and by array") {
    float data[2 * 3 * 4];
    const auto plane = view_bhs(data, 2, 3, 4);
    CHECK(plane.head(1, 2) == data + std::int64_t{1 * 3 + 2} * 4);
    CHECK(static_cast<bool>(plane));
    CHECK_FALSE(static_cast<bool>(plane_view<float>{}));

    const std::int32_t seq_ids[] = {3, 0}, lens[] = {0, 5};
    const Batch plain_batch{.count = 2}, named{.count = 2, .seq_ids = seq_ids, .q_len = lens, .length = 9};
    CHECK(plain_batch.seq(1) == 1);
    CHECK(plain_batch.tokens(1) == 1);
    CHECK(named.seq(0) == 3);
    CHECK(named.tokens(0) == 0);
    CHECK(named.tokens(1) == 5);

    const std::int32_t starts[] = {7, 8};
    const Sequences all{.batch = 2, .length = 6},
        some{.batch = 2, .length = 6, .lengths = lens, .starts = starts};
    CHECK(all.length_of(1) == 6);
    CHECK(all.start_of(1) == 0);
    CHECK(some.length_of(1) == 5);
    CHECK(some.start_of(0) == 7);
}
