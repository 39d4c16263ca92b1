// Buffer: what it owns, how it moves and grows, and that caches and calls take it.
#include <kvpolicy/core/buffer.hpp>
#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/wgkv.hpp>

#include "support/refusal.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <type_traits>
#include <utility>
#include <vector>

using namespace kvpolicy;

namespace {

static_assert(!std::is_copy_constructible_v<Buffer> && !std::is_copy_assignable_v<Buffer>);
static_assert(std::is_nothrow_move_constructible_v<Buffer> && std::is_nothrow_move_assignable_v<Buffer>);
// A view of a temporary would be kept by somebody.
static_assert(std::is_convertible_v<Buffer&, workspace_view> &&
              !std::is_convertible_v<Buffer, workspace_view>);
// A number of bytes is no buffer by accident.
static_assert(!std::is_convertible_v<std::size_t, Buffer>);

using Small = KVpop<1, 2, 3>;
const host ctx{1};

static_assert(std::is_nothrow_move_constructible_v<FixedBudgetCache<Small, bf16>> &&
              std::is_nothrow_move_assignable_v<DualCache<Small, bf16>>);

}  // namespace

TEST_CASE("a buffer has the bytes that were asked for, aligned") {
    for (const std::size_t bytes : {1u, 63u, 64u, 1000u, 1u << 20}) {
        Buffer buffer{ctx, bytes};
        REQUIRE(buffer.size() == bytes);
        CHECK(reinterpret_cast<std::uintptr_t>(buffer.data()) % Buffer::alignment == 0);
        auto* first = static_cast<unsigned char*>(buffer.data());
        first[0] = 1;
        first[bytes - 1] = 2;
        const workspace_view view = buffer;
        CHECK(view.data == buffer.data());
        CHECK(view.bytes == bytes);
    }
    Buffer none;
    CHECK(none.data() == nullptr);
    CHECK(none.size() == 0);
    Buffer zero{ctx, 0};
    CHECK(zero.size() == 0);
}

TEST_CASE("moving takes the memory along and leaves an empty buffer") {
    Buffer from{ctx, 100};
    void* const where = from.data();
    Buffer to = std::move(from);
    CHECK(to.data() == where);
    CHECK(to.size() == 100);
    // NOLINTBEGIN(bugprone-use-after-move): what is left behind is said.
    CHECK(from.data() == nullptr);
    CHECK(from.size() == 0);
    // NOLINTEND(bugprone-use-after-move)
    Buffer other{ctx, 7};
    other = std::move(to);
    CHECK(other.data() == where);
    CHECK(other.size() == 100);
}

TEST_CASE("growing keeps what is large enough") {
    Buffer buffer{ctx, 100};
    void* const where = buffer.data();
    buffer.grow(0);
    buffer.grow(100);
    CHECK(buffer.data() == where);
    CHECK(buffer.size() == 100);
    buffer.grow(101);
    CHECK(buffer.size() == 101);
    static_cast<unsigned char*>(buffer.data())[100] = 1;
}

TEST_CASE("more than the system gives is refused with a sentence, and nothing has changed") {
    Buffer buffer{ctx, 64};
    void* const where = buffer.data();
    CHECK_REFUSED(Buffer(ctx, std::numeric_limits<std::size_t>::max()),
                  "bytes of a Buffer: 18446744073709551615 is not allowed; it must be what the system has "
                  "free");
    CHECK_REFUSED(buffer.grow(std::numeric_limits<std::size_t>::max() / 2 + 1), "bytes of a Buffer");
    CHECK(buffer.data() == where);
    CHECK(buffer.size() == 64);
}

TEST_CASE("both caches and their calls take buffers") {
    const CacheShape shape{.layers = 2, .query_heads = 2, .kv_heads = 1, .head_dim_qk = 8, .head_dim_vo = 8};
    std::vector<float> q(16, 0.5f), k(8, 0.5f), v(8, 3.0f), out(16);
    const float score = 1.0f;
    const auto run = [&](auto& cache, Buffer& workspace) {
        for (int token = 0; token < 9; ++token) {
            for (int layer = 0; layer < 2; ++layer) {
                std::fill(out.begin(), out.end(), 0.0f);
                step(ctx, cache.layer(layer),
                     {.q = view_bshd(q.data(), 1, 1, 2, 8),
                      .k = view_bshd(k.data(), 1, 1, 1, 8),
                      .v = view_bshd(v.data(), 1, 1, 1, 8),
                      .out = view_bshd(out.data(), 1, 1, 2, 8),
                      .batch = Batch{.count = 1},
                      .scores = view_bhs(&score, 1, 1, 1)},
                     workspace);
                // Weights that are rounded to fp32 and sum to 1.
                CHECK(std::ranges::all_of(out, [](float x) { return std::abs(x - 3.0f) <= 1e-6f; }));
            }
            cache.advance(ctx, Batch{.count = 1});
        }
        return cache.usage(1, 0, 0).size();
    };

    FixedBudgetCache<Small, float> fixed{shape};
    Buffer memory{ctx, fixed.bytes().total()};
    fixed.bind(ctx, memory);
    Buffer workspace{ctx, workspace_bytes(ctx, fixed.layer(0), {.batch = 1, .tokens = 1})};
    CHECK(run(fixed, workspace) == 6);

    DualCache<WGKV<2>, float> dual{shape, {.slab_pages = 64, .max_seq_len = 16}};
    Buffer tables{ctx, dual.bytes().total()}, slab{ctx, dual.slab_bytes()};
    dual.bind(ctx, tables);
    dual.add_slab(ctx, slab);
    workspace.grow(workspace_bytes(ctx, dual.layer(0), {.batch = 1, .tokens = 1}));
    CHECK(run(dual, workspace) == 9);

    Buffer small{ctx, fixed.bytes().total() - 1};
    CHECK_REFUSED(fixed.bind(ctx, small), "buffer_bytes");
}
