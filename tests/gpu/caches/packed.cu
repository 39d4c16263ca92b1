// Packed batches with given scores: what they keep and write, with attention, without and with a selection;
// what packed calls report and refuse.
#include <kvpolicy/policies/selection.hpp>
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

/// What an engine's calls on layer 0 of a device's cache wrote.
struct Brought {
    std::vector<expiry_t> cached, tokens;
    std::vector<std::uint32_t> status;
};

/// A chunk without attention, of padded or of packed tensors: chunk_expiry and append_chunk, or with
/// `accepted` append_draft, chunk_expiry of the same tokens and accept.
template <class T, class BothOf>
Brought bring(BothOf& both, const Pack& pack, const CallTensors<T>& in, bool packed,
              const Numbers* accepted = nullptr) {
    const CacheShape& shape = both.shape;
    const std::int32_t rows = in.k.length, entries = in.k.batch, heads = shape.kv_heads;
    const auto ref = both.cache.layer(0);
    const auto host_ref = both.oracle.cache.layer(0);
    const std::int64_t max_rows = std::max(host_ref.capacity(0), host_ref.capacity(1));
    const Device<T> k(in.k.data), v(in.v.data);
    const Device<float> scores(in.scores.data);
    const Device<std::int32_t> seq_ids(pack.seq_ids), q_len(pack.q_len), edges(pack.edges);
    const Device<expiry_t> cached(
        std::vector<expiry_t>(static_cast<std::size_t>(pack.count() * heads * max_rows), -7)),
        tokens(std::vector<expiry_t>(static_cast<std::size_t>(entries * heads * rows), -7));
    const Device<std::uint32_t> status(std::vector<std::uint32_t>(pack.q_len.size(), 0));
    const CallSize size{.batch = pack.count(), .tokens = std::max(pack.most, shape.max_draft_tokens)};
    const Device<unsigned char> workspace(append_workspace_bytes(both.device, ref, size)),
        of_draft(workspace_bytes<PackedDims>(both.device, ref, size));
    StepIO<T> io{.k = view_bhsd<const T>(k.data(), entries, heads, rows, shape.head_dim_qk),
                 .v = view_bhsd<const T>(v.data(), entries, heads, rows, shape.head_dim_vo),
                 .batch = {pack.count(), seq_ids.data(), packed ? nullptr : q_len.data(), pack.most},
                 .scores = view_bhs<const float>(scores.data(), entries, heads, rows)};
    io.cu_seqlens = packed ? edges.data() : nullptr;
    const StepOptions reported{.status = status.data()};
    if (accepted != nullptr) {
        append_draft<PackedDims>(both.device, ref, io, of_draft, reported);
    }
    const ChunkExpiry expiry{
        view_bhs(cached.data(), pack.count(), heads, static_cast<std::int32_t>(max_rows)),
        view_bhs(tokens.data(), entries, heads, rows)};
    chunk_expiry(both.device, ref, io, expiry, workspace, reported);
    if (accepted != nullptr) {
        const Device<std::int32_t> taken(*accepted);
        accept<PackedDims>(both.device, ref,
                           {pack.count(), seq_ids.data(), taken.data(), shape.max_draft_tokens}, of_draft,
                           reported);
    } else {
        append_chunk(both.device, ref, io, workspace, reported);
    }
    const Device<std::int32_t> moved(accepted != nullptr ? *accepted : pack.q_len);
    both.cache.advance(both.device, {pack.count(), seq_ids.data(), moved.data(), std::max(pack.most, 1)},
                       reported);
    return {cached.read(), tokens.read(), status.read()};
}

/// Packed chunks without attention leave and show what padded ones do.
template <class T, class BothOf>
void check_without_attention(BothOf& packed, BothOf& padded) {
    std::mt19937 generator(23);
    const auto call = [&](const Pack& pack, const Numbers* accepted = nullptr) {
        CAPTURE(pack.most);
        const CacheShape& shape = packed.shape;
        const CallTensors<T> in(shape, pack.count(), pack.most, Scores::random, generator);
        const CallTensors<T> one_row = packed_tensors(shape, pack, in);
        const Brought a = bring(packed, pack, one_row, true, accepted),
                      b = bring(padded, pack, in, false, accepted);
        CHECK(a.status == std::vector<std::uint32_t>(pack.q_len.size(), 0));
        CHECK(a.status == b.status);
        CHECK(a.cached == b.cached);
        std::vector<expiry_t> wanted(a.tokens.size(), -7);
        for (std::int32_t i = 0; i < pack.count(); ++i) {
            const auto entry = static_cast<std::size_t>(i);
            for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
                const auto from = static_cast<std::size_t>((i * shape.kv_heads + h) * pack.most),
                           to = static_cast<std::size_t>(h * one_row.k.length + pack.edges[entry]);
                std::copy_n(b.tokens.begin() + static_cast<std::ptrdiff_t>(from), pack.q_len[entry],
                            wanted.begin() + static_cast<std::ptrdiff_t>(to));
            }
        }
        CHECK(a.tokens == wanted);
        for (std::int32_t seq = 0; seq < packed_sequences; ++seq) {
            std::vector<unsigned char> blobs[2];
            for (BothOf* both : {&packed, &padded}) {
                auto& blob = blobs[both == &packed ? 0 : 1];
                blob.resize(both->cache.snapshot_bytes(both->device, seq));
                both->cache.snapshot(both->device, seq, blob.data(), blob.size());
            }
            const bool same = blobs[0] == blobs[1];
            CHECK(same);
        }
    };
    const Numbers ids{3, 0, 6, 1, 7, 2, 5}, accepted{2, 1, 0, 3, 0, 5, 1};
    call({ids, {0, 1, 15, 16, 17, 127, 129}});
    call({ids, {6, 1, 0, 3, 2, 5, 4}}, &accepted);
    call({ids, {129, 17, 0, 1, 127, 15, 16}});
}

/// A selection reads all pages in a chunk; steps choose by the bounds that chunks have left.
template <class BothOf>
void check_selection(BothOf& packed, BothOf& padded) {
    packed_life<bf16>(packed, padded, 0, 0.0f);
    std::mt19937 generator(29);
    for (std::int32_t t = 0; t < 20; ++t) {
        packed.call(Mode::step, {3, 0, 6, 1}, {1, 1, t % 2, 1},
                    CallTensors<bf16>(packed.shape, 4, 1, Scores::random, generator));
    }
    packed.same_rows("after steps");
}

}  // namespace

TEST_CASE("without attention") {
    Both packed(packed_shape(64, 64)), padded(packed_shape(64, 64));
    check_without_attention<bf16>(packed, padded);
    using P = Policy<Sink<>, Window<>, TopKBudget<>>;
    constexpr std::int32_t budgets[] = {40, unlimited};
    const P policy{Sink<>{2}, Window<>{7}, TopKBudget<>{per_head(budgets, 1, 2)}};
    const PoolShape pool{.slab_pages = 40, .max_slabs = 20, .max_seq_len = 600};
    BothDuals<P, float, PackedDims, true> in_pages(packed_shape(16, 24), pool, policy),
        beside(packed_shape(16, 24), pool, policy);
    while (in_pages.add_slab() && beside.add_slab()) {
    }
    check_without_attention<float>(in_pages, beside);
}

TEST_CASE("with a selection, in both caches") {
    using P = Policy<Sink<2>, Window<7>, TopKBudget<>, QuestPages<16>>;
    const P policy{Sink<2>{}, Window<7>{}, TopKBudget<>{90}, QuestPages<16>{3}};
    BothCaches<P, bf16, PackedDims> packed(packed_shape(64, 64), policy),
        padded(packed_shape(64, 64), policy);
    check_selection(packed, padded);
    const PoolShape pool{.slab_pages = 40, .max_slabs = 20, .max_seq_len = 600};
    BothDuals<P, bf16, PackedDims, true> in_pages(packed_shape(64, 64), pool, policy),
        beside(packed_shape(64, 64), pool, policy);
    while (in_pages.add_slab() && beside.add_slab()) {
    }
    check_selection(in_pages, beside);
}

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
