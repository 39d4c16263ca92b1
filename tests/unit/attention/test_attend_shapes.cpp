// attend against its definition over shapes: groups, head dimensions, storage types, lengths around the edges
// of tiles and blocks, strided and fused views, batches whose sequences differ.
#include "attention_reference.hpp"

#include <algorithm>

using namespace attention_test;

namespace {

template <class T>
void shapes_of_type() {
    unsigned seed = 1;
    // Around: rows of a register block (6), a strip (24), what decode takes (16), keys of a block (64) and
    // of a panel (16).
    for (const std::int32_t group : {1, 3, 5, 6, 7, 12, 16, 64}) {
        for (const std::int32_t queries : {1, 2, 17}) {
            for (const std::int32_t before : {0, 15, 64, 130}) {
                Problem<T> p({1, 2, group, queries, before + queries, 64, 64}, ++seed);
                p.starts = {before};
                if (seed % 2 == 0) {
                    p.random_expiry(seed);
                }
                check_all(p);
            }
        }
    }
}

}  // namespace

TEST_CASE("every group size, bf16") { shapes_of_type<bf16>(); }
TEST_CASE("every group size, fp16") { shapes_of_type<fp16>(); }
TEST_CASE("every group size, fp32") { shapes_of_type<float>(); }
TEST_CASE("every group size, double") { shapes_of_type<double>(); }

TEST_CASE("a workspace for the longest call serves every shorter one") {
    const std::int32_t max_queries = 1200, max_keys = 30000;
    const auto bytes = [](const host& ctx, std::int32_t heads, std::int32_t queries, std::int32_t rows,
                          bool two_segments) {
        // Sizes alone count: nothing is read.
        static const float number = 0.0f;
        const auto view = [&](std::int32_t h, std::int32_t length) {
            return view_bhsd<const float>(&number, 1, h, length, 64);
        };
        const kv_view<float> past{.k = view(heads, rows), .v = view(heads, rows)};
        const kv_view<float> self{.k = view(heads, queries), .v = view(heads, queries)};
        const Sequences sequences{.batch = 1, .length = queries};
        const rows_view<const float> q = view(2 * heads, queries);
        return two_segments ? attend_workspace_bytes(ctx, {}, q, past, self, sequences)
                            : attend_workspace_bytes(ctx, {}, q, past, sequences);
    };
    for (const int threads : {1, 3}) {
        const host ctx(threads);
        for (const std::int32_t heads : {1, 3, 8, 31, 32}) {
            for (const bool two_segments : {false, true}) {
                const std::size_t most = bytes(ctx, heads, max_queries, max_keys, two_segments);
                std::size_t before = 0;
                bool enough = true, rises = true;
                for (std::int32_t queries = 0; queries <= max_queries; queries += queries < 260 ? 1 : 47) {
                    const std::size_t now = bytes(ctx, heads, queries, max_keys, two_segments);
                    rises = rises && now >= before;
                    before = now;
                    for (const std::int32_t rows : {0, 1, 2047, 4096, 9000, 20480}) {
                        enough = enough && bytes(ctx, heads, queries, rows, two_segments) <= most;
                    }
                }
                CAPTURE(heads);
                CHECK(enough);
                CHECK(rises);
                CHECK(before <= most);
            }
        }
    }
}

TEST_CASE("head dimensions, and values narrower or wider than keys") {
    unsigned seed = 100;
    for (const auto& [head_dim_qk, head_dim_vo] :
         std::vector<std::pair<std::int32_t, std::int32_t>>{{64, 64},
                                                            {80, 80},
                                                            {96, 96},
                                                            {128, 128},
                                                            {256, 256},
                                                            {72, 72},
                                                            {8, 8},
                                                            {192, 128},
                                                            {64, 40},
                                                            {16, 264}}) {
        for (const std::int32_t queries : {1, 40}) {
            Problem<float> p({1, 1, 3, queries, 100, head_dim_qk, head_dim_vo}, ++seed);
            p.starts = {100 - queries};
            p.random_expiry(seed);
            check_all(p);
            Problem<bf16> half({1, 1, 1, queries, 70, head_dim_qk, head_dim_vo}, ++seed);
            half.starts = {70 - queries};
            check_all(half);
        }
    }
}

TEST_CASE("lengths around the edges of tiles") {
    unsigned seed = 200;
    const std::int32_t tile = host_backend::attend_tile<float>({64, 64, 1.0f, 0.0f}, 3);
    for (const std::int32_t length : {1, 2, 15, 16, 63, 64, 65, tile - 1, tile, tile + 1, 2 * tile + 5}) {
        Problem<float> dense({1, 1, 3, length, length, 64, 64}, ++seed);
        check_all(dense);
        Problem<float> sparse({1, 1, 3, length, length, 64, 64}, ++seed);
        sparse.random_expiry(seed);
        check_all(sparse);
    }
}

TEST_CASE("more queries than keys: rows without a key give 0 and -inf") {
    for (const auto& [queries, rows] :
         std::vector<std::pair<std::int32_t, std::int32_t>>{{5, 2}, {1, 0}, {40, 3}, {300, 7}}) {
        Problem<float> p({1, 1, 2, queries, rows, 64, 64}, 7);
        p.starts = {rows - queries};
        check_all(p);
    }
}

TEST_CASE("a batch whose sequences have their own lengths and starts") {
    Problem<bf16> p({8, 2, 2, 20, 150, 64, 64}, 11);
    p.lengths = {20, 1, 19, 7, 20, 0, 0, 0};
    p.starts = {0, 149, 60, -3, 130, 0, 5, 149};
    p.random_expiry(12);
    check_all(p);
}

TEST_CASE("strides: fused QKV rows, and K and V in one pool") {
    const std::int32_t batch = 2, kv_heads = 2, group = 3, length = 70, dim = 64;
    const std::int32_t heads = kv_heads * group;
    Problem<float> p({batch, kv_heads, group, length, length, dim, dim}, 21);
    p.random_expiry(22);
    // [B, S, (Hq + 2 Hkv) D], as a fused projection writes it.
    const std::int64_t row = (heads + std::int64_t{2} * kv_heads) * dim;
    std::vector<float> fused(static_cast<std::size_t>(batch * length * row));
    for (std::int32_t b = 0; b < batch; ++b) {
        for (std::int32_t t = 0; t < length; ++t) {
            float* to = fused.data() + (std::int64_t{b} * length + t) * row;
            for (std::int32_t h = 0; h < heads; ++h, to += dim) {
                std::memcpy(to, p.q_view().row(b, h, t), sizeof(float) * dim);
            }
            for (std::int32_t h = 0; h < kv_heads; ++h, to += dim) {
                std::memcpy(to, p.key_views().k.row(b, h, t), sizeof(float) * dim);
            }
            for (std::int32_t h = 0; h < kv_heads; ++h, to += dim) {
                std::memcpy(to, p.key_views().v.row(b, h, t), sizeof(float) * dim);
            }
        }
    }
    const auto slice = [&](std::int32_t first, std::int32_t count) {
        return rows_view<const float>{
            fused.data() + std::int64_t{first} * dim, batch, count, length, dim, length * row, dim, row};
    };
    auto all = p.key_views();
    all.k = slice(heads, kv_heads);
    all.v = slice(heads + kv_heads, kv_heads);
    ExpectedRows<float> expected(p);
    for (const isa set : instruction_sets()) {
        const host ctx(1, set);
        Result<float> result(p.shape);
        std::vector<unsigned char> memory(
            attend_workspace_bytes(ctx, p.attention, slice(0, heads), all, p.sequences()));
        attend(ctx, p.attention, slice(0, heads), all, p.sequences(), result.out_view(), result.lse_view(),
               {memory.data(), memory.size()});
        check(p, expected, result);
        // Outputs go through strides too, and lse may be left out: [B, S, Hq, D].
        std::vector<float> transposed(result.out.size());
        attend(ctx, p.attention, slice(0, heads), all, p.sequences(),
               view_bshd(transposed.data(), batch, length, heads, dim), {}, {memory.data(), memory.size()});
        bool same = true;
        for (std::int32_t b = 0; b < batch; ++b) {
            for (std::int32_t h = 0; h < heads; ++h) {
                for (std::int32_t t = 0; t < length; ++t) {
                    same = same &&
                           std::equal(result.row(b, h, t), result.row(b, h, t) + dim,
                                      transposed.data() + ((std::int64_t{b} * length + t) * heads + h) * dim);
                }
            }
        }
        CHECK(same);
    }
}

TEST_CASE("a stride beyond 32 bits of elements between heads is a 64-bit product") {
    // The heads alias (stride 0) or lie far apart; both are just strides.
    Problem<float> p({1, 1, 2, 9, 9, 64, 64}, 31);
    auto all = p.key_views();
    all.k.batch_stride = std::int64_t{1} << 40;  // never multiplied by more than 0
    all.v.batch_stride = std::int64_t{1} << 40;
    const host ctx(1);
    Result<float> result(p.shape);
    std::vector<unsigned char> memory(
        attend_workspace_bytes(ctx, p.attention, p.q_view(), all, p.sequences()));
    attend(ctx, p.attention, p.q_view(), all, p.sequences(), result.out_view(), result.lse_view(),
           {memory.data(), memory.size()});
    check(p, result);
}
