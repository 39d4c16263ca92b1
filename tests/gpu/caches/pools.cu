// A DualCache on pages that an engine owns: FlashInfer's, NHD and HND, beside one on slabs of its own, with
// the same outputs to the bit; SGLang's first page, which is left alone; and entries that are only padding,
// as in vLLM's slot_mapping.
#include <kvpolicy/cuda.cuh>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../../support/refusal.hpp"
#include "cache_case.hpp"

#include <cstring>
#include <memory>

using namespace kvpolicy;
using namespace test;

namespace {

using P = Policy<Sink<2>, Window<5>, ThresholdGate<at_least>>;
constexpr std::int32_t pages = 60, heads = 2, group = 2, rows = 16, dim = 64, max_sequences = 3;
constexpr CacheShape shape{.max_sequences = max_sequences,
                           .query_heads = heads * group,
                           .kv_heads = heads,
                           .head_dim_qk = dim,
                           .head_dim_vo = dim,
                           .page_size = rows};

/// [pages, 2, rows, heads, dim] or [pages, 2, heads, rows, dim].
template <class T>
struct EnginePages {
    bool nhd;
    Device<T> numbers{std::size_t{pages} * 2 * rows * heads * dim};

    [[nodiscard]] PageStrides strides() const {
        constexpr std::int64_t page = 2 * rows * heads * dim;
        const std::int32_t row = nhd ? heads * dim : dim;
        return {page, page, row, row};
    }
    [[nodiscard]] T* keys(std::int32_t h) const { return numbers.data() + h * (nhd ? dim : rows * dim); }
    [[nodiscard]] T* values(std::int32_t h) const { return keys(h) + rows * heads * dim; }
};

template <class T, bool Chunks>
void check(bool nhd) {
    CAPTURE(nhd);
    const kvpolicy::cuda ctx{};
    const P policy{{}, {}, ThresholdGate<at_least>{0.0f}};
    const EnginePages<T> engine{nhd};
    ok(cudaMemset(engine.numbers.data(), 0x5a, engine.numbers.bytes()));
    const PoolShape pool{.slab_pages = pages, .max_slabs = heads, .max_seq_len = 400, .spared_pages = 1};
    PoolShape strided = pool;
    strided.strides = engine.strides();
    DualCache<P, T> own(shape, pool, policy), theirs(shape, strided, policy);
    const Device<unsigned char> memory(own.bytes().total()), other(theirs.bytes().total());
    own.bind(ctx, memory.data(), memory.size());
    theirs.bind(ctx, other.data(), other.size());
    std::vector<std::unique_ptr<Device<unsigned char>>> provided;
    for (std::int32_t h = 0; h < heads; ++h) {
        provided.push_back(std::make_unique<Device<unsigned char>>(own.slab_bytes()));
        own.add_slab(ctx, provided.back()->data(), provided.back()->size());
        provided.push_back(std::make_unique<Device<unsigned char>>(theirs.notes_bytes()));
        theirs.add_pages(ctx, engine.keys(h), engine.values(h), provided.back()->data(),
                         provided.back()->size());
    }
    CHECK(theirs.attached_pages() == heads * (pages - 1));
    CHECK(theirs.free_pages(ctx) == theirs.attached_pages());
    std::mt19937 generator(5);
    constexpr std::int32_t most = 9;
    std::size_t needed = theirs.template step_workspace_bytes<head_dims<64>>(ctx, max_sequences);
    if constexpr (Chunks) {
        needed =
            theirs.template workspace_bytes<head_dims<64>>(ctx, {.batch = max_sequences, .tokens = most});
    }
    const Device<unsigned char> workspace(needed);
    for (std::int32_t turn = 0; turn < 60; ++turn) {
        const std::int32_t n = Chunks && turn % 3 == 0 ? most : 1;
        const CallTensors<T> in(shape, max_sequences, n, Scores::random, generator);
        const Device<T> q(in.q.data), k(in.k.data), v(in.v.data), out(in.q.data.size());
        const Device<float> scores(in.scores.data);
        // The second entry is padding now and then; sequences move around.
        const Device<std::int32_t> named(std::vector<std::int32_t>{2, turn % 2 == 0 ? Batch::no_seq : 0, 1});
        const Device<std::uint32_t> status(std::vector<std::uint32_t>(max_sequences, 0));
        const Batch batch{.count = max_sequences, .seq_ids = named.data(), .length = n};
        std::vector<std::vector<T>> outputs;
        for (DualCache<P, T>* const cache : {&own, &theirs}) {
            ok(cudaMemset(out.data(), 0x11, out.bytes()));
            StepIO<T> io =
                cache->hnd(q.data(), k.data(), v.data(), out.data(), {.batch = max_sequences, .tokens = n});
            io.batch = batch;
            io.scores = view_bhs<const float>(scores.data(), max_sequences, heads, n);
            if (n == 1) {
                step<head_dims<64>>(ctx, cache->layer(0), io, workspace, {.status = status.data()});
            } else if constexpr (Chunks) {
                prefill<head_dims<64>>(ctx, cache->layer(0), io, workspace, {.status = status.data()});
            }
            cache->advance(ctx, batch, {.status = status.data()});
            outputs.push_back(out.read());
        }
        CHECK(status.read() == std::vector<std::uint32_t>(max_sequences, 0));
        CHECK(std::memcmp(outputs[0].data(), outputs[1].data(), out.bytes()) == 0);
        if (turn % 2 == 0) {  // nothing was written for padding
            const std::size_t each = out.size() / max_sequences;
            T untouched;
            std::memset(&untouched, 0x11, sizeof untouched);
            CHECK(std::memcmp(&outputs[0][each], &untouched, sizeof untouched) == 0);
        }
        if (turn % 20 == 19) {
            own.fork(ctx, 2, 0);
            theirs.fork(ctx, 2, 0);
        }
    }
    for (std::int32_t seq = 0; seq < max_sequences; ++seq) {
        std::vector<unsigned char> a(own.snapshot_bytes(ctx, seq)), b(theirs.snapshot_bytes(ctx, seq));
        own.snapshot(ctx, seq, a.data(), a.size());
        theirs.snapshot(ctx, seq, b.data(), b.size());
        CHECK(a == b);
    }
    // The engine's first page is as it was.
    const auto numbers = engine.numbers.read();
    T untouched;
    std::memset(&untouched, 0x5a, sizeof untouched);
    bool spared = true;
    for (std::size_t i = 0; i < std::size_t{2} * rows * heads * dim; ++i) {
        spared = spared && std::memcmp(&numbers[i], &untouched, sizeof untouched) == 0;
    }
    CHECK(spared);
    theirs.clear(ctx, 0);
    theirs.clear(ctx, 1);
    theirs.clear(ctx, 2);
    CHECK(theirs.free_pages(ctx) == theirs.attached_pages());
}

}  // namespace

TEST_CASE("steps of 16-bit rows") {
    check<bf16, false>(true);
    check<bf16, false>(false);
}

TEST_CASE("steps and chunks of floats") {
    check<float, true>(true);
    check<float, true>(false);
}

TEST_CASE("rows that kernels cannot read are refused") {
    const kvpolicy::cuda ctx{};
    DualCache<P, bf16> cache(
        shape, {.slab_pages = pages, .max_slabs = 1, .max_seq_len = 400, .strides = {2048, 2048, 68, 64}},
        P{{}, {}, ThresholdGate<at_least>{0.0f}});
    const Device<unsigned char> memory(cache.bytes().total()), notes(cache.notes_bytes());
    const Device<bf16> numbers(std::size_t{64});
    cache.bind(ctx, memory.data(), memory.size());
    CHECK_REFUSED(cache.add_pages(ctx, numbers.data(), numbers.data(), notes.data(), notes.size()),
                  "strides of the pool's pages: 68 is not allowed; it must be multiples of 8 on CUDA");
}
