// Packed batches with given scores, in a FixedBudgetCache: what they keep and write, and what packed calls
// report and refuse.
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "packed_case.hpp"
#include "support/refusal.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

using Given = Policy<Sink<2>, Window<7>, TopKBudget<40>>;
using Both = BothCaches<Given, bf16, PackedDims>;

/// A packed call whose edges cannot all be, on a cache of two: the entries that count are those of a padded
/// call in which the others have no token.
void check_edges(const Numbers& edges, std::int32_t total, std::int32_t most, const Numbers& q_len,
                 const Numbers& counted) {
    const CacheShape shape = packed_shape(64, 64);
    const auto count = static_cast<std::int32_t>(counted.size());
    Both packed(shape), padded(shape);
    Numbers ids;
    Pack good({}, {});
    for (std::int32_t i = 0; i < count; ++i) {
        ids.push_back(i);
    }
    std::mt19937 generator(3);
    const std::int32_t longest = std::max(1, *std::max_element(counted.begin(), counted.end()));
    const CallTensors<bf16> in(shape, count, longest, Scores::random, generator);
    CallTensors<bf16> one_row(shape, 1, total, Scores::random, generator);
    for (Tensor<bf16>* tensor : {&one_row.q, &one_row.k, &one_row.v}) {
        tensor->fill(std::numeric_limits<float>::quiet_NaN());
    }
    for (std::int32_t i = 0; i < count; ++i) {
        const auto entry = static_cast<std::size_t>(i);
        for (std::int32_t t = 0; t < counted[entry]; ++t) {
            for (std::int32_t h = 0; h < 4; ++h) {
                std::copy_n(in.q.view().row(i, h, t), 64, one_row.q.view().row(0, h, edges[entry] + t));
            }
            for (std::int32_t h = 0; h < 2; ++h) {
                std::copy_n(in.k.view().row(i, h, t), 64, one_row.k.view().row(0, h, edges[entry] + t));
                std::copy_n(in.v.view().row(i, h, t), 64, one_row.v.view().row(0, h, edges[entry] + t));
                one_row.scores.at(0, h, edges[entry] + t) = in.scores.view().head(i, h)[t];
            }
        }
    }
    const Device<std::int32_t> of_device(edges), lengths(q_len), tokens(counted);
    const Written<bf16> found =
        call_device(packed, Mode::prefill,
                    {.count = count, .q_len = q_len.empty() ? nullptr : lengths.data(), .length = most},
                    one_row, of_device.data(), {count, std::min(most, total)});
    const Written<bf16> wanted =
        call_device(padded, Mode::prefill, {.count = count, .q_len = tokens.data(), .length = longest}, in,
                    nullptr, {count, longest});
    CHECK(wanted.status == std::vector<std::uint32_t>(counted.size(), 0));
    packed.cache.advance(packed.device, {.count = count, .q_len = tokens.data(), .length = longest});
    padded.cache.advance(padded.device, {.count = count, .q_len = tokens.data(), .length = longest});
    std::vector<char> of_entry(static_cast<std::size_t>(total), 0);
    for (std::int32_t i = 0; i < count; ++i) {
        CAPTURE(i);
        const auto entry = static_cast<std::size_t>(i);
        const bool empty = i + 1 < static_cast<std::int32_t>(edges.size()) &&
                           edges[entry] == edges[entry + 1] && edges[0] == 0;
        CHECK(found.status[entry] == (counted[entry] != 0 || empty ? 0u : status_bad_length));
        const bool same = packed.content(0, i) == padded.content(0, i);
        CHECK(same);
        std::fill_n(of_entry.begin() + (counted[entry] != 0 ? edges[entry] : 0), counted[entry], char{1});
    }
    bool untouched_outside = true, near_inside = true;
    for (std::int32_t h = 0; h < 4; ++h) {
        for (std::int32_t t = 0; t < total; ++t) {
            const bf16 x = found.out[static_cast<std::size_t>((h * total + t) * 64)];
            if (of_entry[static_cast<std::size_t>(t)] == 0) {
                untouched_outside = untouched_outside && static_cast<float>(x) == untouched;
            } else {
                near_inside = near_inside && std::abs(static_cast<float>(x)) < untouched;
            }
        }
    }
    CHECK(untouched_outside);
    CHECK(near_inside);
}

}  // namespace

TEST_CASE("scores that are given, in a FixedBudgetCache") {
    Both packed(packed_shape(64, 64)), padded(packed_shape(64, 64));
    packed_life<bf16>(packed, padded, 0, 0.0f);
}

TEST_CASE("edges that cannot be leave their entries without a token") {
    check_edges({0, 8, 17, 20}, 29, 8, {}, {8, 0, 3});            // more than the most
    check_edges({0, 17, 12, 30, 47}, 47, 47, {}, {17, 0, 0, 0});  // falls
    check_edges({0, 5, 9, 30}, 29, 29, {}, {5, 4, 0});            // beyond the tensors
    check_edges({0, 8, 16, 19}, 29, 29, {8, 7, 3}, {8, 0, 3});    // other lengths
    check_edges({1, 5, 9}, 29, 29, {}, {0, 0});                   // does not begin at 0
    check_edges({0, 0, 6, 6, 9}, 29, 100, {}, {0, 6, 0, 3});      // a most beyond the tensors
    Numbers edges{0}, counted;
    for (std::int32_t i = 0; i < packed_sequences; ++i) {
        counted.push_back(i % 3);
        edges.push_back(edges.back() + counted.back());
    }
    check_edges(edges, 4000, 2, {}, counted);  // many rows that no entry has
}

TEST_CASE("packed calls that are refused") {
    const CacheShape shape = packed_shape(64, 64);
    Both both(shape);
    std::mt19937 generator(5);
    const CallTensors<bf16> in(shape, 1, 20, Scores::random, generator);
    const Device<std::int32_t> edges(Numbers{0, 5, 20});
    const auto call = [&](Mode mode, const Batch& batch) {
        call_device(both, mode, batch, in, edges.data(), {2, 20});
    };
    CHECK_REFUSED(call(Mode::prefill, {}), "io.batch.count: not set");
    CHECK_REFUSED(call(Mode::prefill, {.count = 2, .length = -1}), "batch.length: -1");
    CHECK_REFUSED(call(Mode::append_draft, {.count = 2, .length = 7}), "batch.length: 7");
    StepIO<bf16> io;
    io.batch = {.count = 2};
    io.cu_seqlens = edges.data();
    const kvpolicy::cuda ctx{};
    CHECK_REFUSED(step<PackedDims>(ctx, both.cache.layer(0), io, {}),
                  "io.cu_seqlens: given is not allowed; it must be null in a step");
    CHECK_REFUSED(attend<PackedDims>(ctx, both.cache.layer(0), io, {}),
                  "io.cu_seqlens: given is not allowed; it must be null in attend");
    CHECK_REFUSED(prefill<PackedDims>(ctx, both.cache.layer(0), io, {}), "q: 0 x 0 x 0 x 0");
    const Device<bf16> tensor(std::vector<bf16>(static_cast<std::size_t>(20 * shape.query_heads) * 64));
    const auto rows = [&](std::int32_t heads) {
        return view_bhsd<const bf16>(tensor.data(), 1, heads, 20, 64);
    };
    io.q = rows(shape.query_heads);
    io.k = io.v = rows(shape.kv_heads);
    io.out = view_bhsd(tensor.data(), 1, shape.query_heads, 20, 64);
    io.scores = view_bhs<const float>(reinterpret_cast<const float*>(tensor.data()), 1, shape.kv_heads, 20);
    CHECK_REFUSED(prefill<PackedDims>(ctx, both.cache.layer(0), io, {}), "workspace.bytes: 0");
}
