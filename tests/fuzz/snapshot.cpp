// Snapshots that were damaged, or forged with a right checksum: refused, or a cache that goes on as if
// nothing had been.
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/policies/eviction.hpp>
#include <kvpolicy/policies/selection.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "bytes.hpp"
#include "support/bound_dual.hpp"

#include <algorithm>
#include <vector>

using namespace kvpolicy;
using fuzz::Bytes;

namespace {

using Whole =
    Policy<Sink<2>, Window<4>, ThresholdGate<at_least>, TopKBudget<>, SnapKVEviction, QuestPages<2>>;
constexpr std::int32_t dim = 8, heads = 2, max_seq_len = 60;
constexpr CacheShape shape{.layers = 2,
                           .max_sequences = 2,
                           .query_heads = 4,
                           .kv_heads = heads,
                           .head_dim_qk = dim,
                           .head_dim_vo = dim,
                           .page_size = 4};

void feed(const host& ctx, test::BoundDual<Whole, float>& bound, std::int32_t seq, std::int32_t tokens) {
    std::vector<float> x(static_cast<std::size_t>(4 * dim)), out(x.size());
    std::uint32_t status = 0;
    for (std::int32_t t = 0; t < tokens && bound.cache.length(seq) < max_seq_len; ++t) {
        for (std::size_t i = 0; i < x.size(); ++i) {
            x[i] = static_cast<float>((t * 7 + static_cast<std::int32_t>(i) * 5) % 9 - 4);
        }
        const Batch one{.count = 1, .seq_ids = &seq};
        const float scores[heads] = {static_cast<float>(t % 5 - 1), static_cast<float>(t % 3 - 1)};
        for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
            const auto ref = bound.cache.layer(layer);
            test::Workspace workspace(workspace_bytes(ctx, ref, {.batch = 1, .tokens = 1}));
            step(ctx, ref,
                 {.q = view_bhsd<const float>(x.data(), 1, 4, 1, dim),
                  .k = view_bhsd<const float>(x.data(), 1, heads, 1, dim),
                  .v = view_bhsd<const float>(x.data(), 1, heads, 1, dim),
                  .out = view_bhsd(out.data(), 1, 4, 1, dim),
                  .batch = one,
                  .scores = view_bhs(scores, 1, heads, 1)},
                 workspace, {.status = &status});
        }
        bound.cache.advance(ctx, one);
        test::Workspace workspace(bound.cache.evict_workspace_bytes(ctx));
        bound.cache.evict(ctx, one, workspace);
    }
    fuzz::check(status == 0, "the pool is large enough");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const host ctx(1);
    static const std::int32_t budgets[] = {6, unlimited};
    static const Whole policy{{},
                              {},
                              {},
                              TopKBudget<>{per_head(budgets, 1, heads)},
                              SnapKVEviction{.average = 11, .observing = 5},
                              QuestPages<2>{3}};
    static test::BoundDual<Whole, float>* const bound = [] {
        auto* made = new test::BoundDual<Whole, float>(
            ctx, shape, {.slab_pages = 200, .max_slabs = 1, .max_seq_len = max_seq_len}, policy);
        made->add_slab(ctx);
        return made;
    }();
    Bytes in(data, size);
    const std::int32_t source = 0, target = 1;
    bound->cache.clear(ctx, source);
    bound->cache.clear(ctx, target);
    feed(ctx, *bound, source, in.below(30));
    feed(ctx, *bound, target, in.below(10));
    std::vector<unsigned char> blob(bound->cache.snapshot_bytes(source));
    bound->cache.snapshot(ctx, source, blob.data(), blob.size());
    const std::vector<unsigned char> good = blob;
    const std::int32_t changes = in.below(5);
    const bool forged = in.flag();
    for (std::int32_t i = 0; i < changes; ++i) {
        const std::size_t at = in.raw<std::uint16_t>() % blob.size();
        switch (in.below(4)) {
            case 0:
                blob[at] = in.byte();
                break;
            case 1: {  // a whole number, where there may be one
                const auto number = in.raw<std::int64_t>();
                std::memcpy(blob.data() + at / 4 * 4, &number,
                            std::min<std::size_t>(in.flag() ? 8 : 4, blob.size() - at / 4 * 4));
                break;
            }
            case 2:
                blob.resize(std::max<std::size_t>(at, 1));
                break;
            default:
                blob.insert(blob.end(), static_cast<std::size_t>(in.below(64)), in.byte());
                break;
        }
    }
    host_backend::snapshot_header header;
    if (forged && blob.size() >= sizeof header) {
        std::memcpy(&header, blob.data(), sizeof header);
        header.bytes = blob.size();
        header.checksum =
            host_backend::checksum_of(header, reinterpret_cast<const std::byte*>(blob.data()), blob.size());
        std::memcpy(blob.data(), &header, sizeof header);
    }
    const auto before = test::content_of(bound->cache.layer(0), target),
               also = test::content_of(bound->cache.layer(1), target);
    std::uint32_t status = 0;
    if (fuzz::refused(
            [&] { bound->cache.restore(ctx, target, blob.data(), blob.size(), {.status = &status}); })) {
        fuzz::check(blob != good, "a good snapshot was refused");
        fuzz::check(test::content_of(bound->cache.layer(0), target) == before &&
                        test::content_of(bound->cache.layer(1), target) == also,
                    "a refused restore changed the sequence");
    } else {
        std::vector<unsigned char> again(bound->cache.snapshot_bytes(target));
        bound->cache.snapshot(ctx, target, again.data(), again.size());
        fuzz::check(again == blob, "a restored sequence is another");
    }
    feed(ctx, *bound, target, 12);
    bound->cache.clear(ctx, source);
    bound->cache.clear(ctx, target);
    fuzz::check(bound->cache.free_pages() == bound->cache.attached_pages(), "pages were lost");
    return 0;
}
