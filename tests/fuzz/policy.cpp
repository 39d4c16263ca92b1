// Policies, masks and caches from any numbers: refused with a sentence, or right. Nothing else may happen.
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/masks/build.hpp>
#include <kvpolicy/policies/eviction.hpp>
#include <kvpolicy/policies/selection.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>

#include "bytes.hpp"

#include <algorithm>
#include <vector>

using namespace kvpolicy;
using fuzz::Bytes;

namespace {

using Capped = Policy<Sink<>, Window<>, ThresholdGate<above>, TopKBudget<>, Decay<dynamic>>;
using Whole = Policy<Sink<>, Window<>, ThresholdGate<at_least>, SnapKVEviction, QuestPages<>>;

constexpr std::int32_t most =
    24;  // layers and heads at most: arrays of this size stand behind every parameter

struct Values {
    std::vector<std::int32_t> integers;
    std::vector<float> reals;
};

PerHead<std::int32_t> integers(Bytes& in, std::vector<std::int32_t>& memory) {
    if (in.below(4) != 0) {
        return in.parameter(40);
    }
    memory.resize(most * most);
    for (std::int32_t i = 0; i < 8; ++i) {
        memory[static_cast<std::size_t>(in.below(64))] = in.parameter(40);
    }
    return {in.below(8) == 0 ? nullptr : memory.data(), in.below(most) - 1, in.below(most) - 1};
}
PerHead<float> reals(Bytes& in, std::vector<float>& memory) {
    if (in.below(4) != 0) {
        return in.number();
    }
    memory.resize(most * most);
    for (std::int32_t i = 0; i < 8; ++i) {
        memory[static_cast<std::size_t>(in.below(64))] = in.number();
    }
    return {in.below(8) == 0 ? nullptr : memory.data(), in.below(most) - 1, in.below(most) - 1};
}

CacheShape shape(Bytes& in) {
    CacheShape one{};
    one.layers = in.below(6) - 1;
    one.max_sequences = std::min(in.below(3) != 0 ? in.below(4) : in.parameter(4),
                                 1 << 16);  // an owner's memory grows with them
    one.kv_heads = in.below(6) - 1;
    one.query_heads = in.below(3) != 0 ? one.kv_heads * (1 + in.below(3)) : in.parameter(8);
    one.head_dim_qk = in.below(3) != 0 ? 8 : in.parameter(255);
    one.head_dim_vo = in.below(3) != 0 ? 8 : in.parameter(255);
    one.page_size = in.below(2) != 0 ? 1 + in.below(8) : in.parameter(64);
    one.max_draft_tokens = in.below(2) != 0 ? in.below(4) : in.parameter(16);
    return one;
}

/// What a cache that was made promises about itself, and a bind where it is small.
template <class Cache>
void use(const host& ctx, Cache& cache) {
    const CacheShape& made = cache.shape();
    // Sizes that 64 bits hold, or a refusal: never a small number that stands for a large one.
    unsigned __int128 rows = 0;
    for (std::int32_t layer = 0; layer < made.layers; ++layer) {
        if constexpr (requires { cache.rows(layer); }) {
            rows +=
                static_cast<unsigned __int128>(cache.rows(layer)) * static_cast<unsigned>(made.max_sequences);
        }
    }
    if (rows != 0) {
        const unsigned __int128 bytes =
            rows * static_cast<unsigned>(made.head_dim_qk + made.head_dim_vo) * sizeof(float);
        fuzz::check(bytes == cache.bytes().keys_and_values,
                    "bytes().keys_and_values are not those of the rows");
    }
    if (cache.bytes().total() > (std::size_t{1} << 20)) {
        return;
    }
    std::vector<unsigned char> memory(cache.bytes().total(), 0xa5);
    cache.bind(ctx, memory.data(), memory.size());
    fuzz::check(cache.length(0) == 0 && cache.usage(0, 0, 0).size() == 0, "a bound cache is not empty");
    static_cast<void>(cache.fingerprint());
}

void masks(Bytes& in, const host& ctx, const Capped& policy) {
    const std::int32_t heads = 1 + in.below(3), length = in.below(40);
    std::vector<float> scores(static_cast<std::size_t>(heads * length));
    for (float& x : scores) {
        x = in.number();
    }
    std::vector<expiry_t> expiry(scores.size() + 1, -7);
    const std::int32_t edges[] = {0, in.below(40), length};
    Sequences sequences{.batch = 1, .length = length};
    if (in.below(4) == 0) {
        sequences.cu_seqlens = edges;
        sequences.segments = 2;
    }
    MaskOptions options;
    options.layer = in.below(4) - 1;
    options.rebase_limit = in.flag() ? 16 : in.raw<position_t>();
    options.nan_ranks_last = in.flag();
    fuzz::refused([&] {
        std::vector<unsigned char> workspace(
            build_mask_workspace_bytes(ctx, policy, sequences, heads, options));
        build_mask(ctx, policy, view_bhs<const float>(scores.data(), 1, heads, length), sequences,
                   view_bhs(expiry.data(), 1, heads, length), {workspace.data(), workspace.size()}, options);
        for (std::int32_t h = 0; h < heads; ++h) {
            const HeadParams head_params = policy.params(options.layer, h);
            for (std::int32_t t = 0; t < length; ++t) {
                const std::int32_t end = sequences.cu_seqlens == nullptr || t >= edges[1] ? length : edges[1];
                const std::int64_t least = std::min<std::int64_t>(end, std::int64_t{t} + head_params.window);
                fuzz::check(expiry[static_cast<std::size_t>(h * length + t)] >= least,
                            "a key left within its window");
            }
        }
    });
    fuzz::check(expiry.back() == -7, "build_mask wrote beyond its output");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const host ctx(1);
    Bytes in(data, size);
    std::vector<std::int32_t> a, b, c, d;
    std::vector<float> e, f;
    const CacheShape sizes = shape(in);
    const PoolShape pool{in.parameter(8), in.parameter(4), in.flag() ? in.below(100) : in.raw<position_t>()};
    switch (in.below(3)) {
        case 0: {
            const Capped policy{Sink<>{integers(in, a)}, Window<>{integers(in, b)},
                                ThresholdGate<above>{reals(in, e)}, TopKBudget<>{integers(in, c)},
                                Decay<dynamic>{reals(in, f), integers(in, d)}};
            fuzz::refused([&] {
                FixedBudgetCache<Capped, float> cache(sizes, policy);
                use(ctx, cache);
            });
            fuzz::refused([&] {
                DualCache<Capped, float> cache(sizes, pool, policy);
                use(ctx, cache);
            });
            masks(in, ctx, policy);
            break;
        }
        case 1: {
            const SnapKVEviction eviction{in.flag() ? in.below(40) : in.raw<std::int64_t>(), in.number(),
                                          in.parameter(40), in.parameter(10)};
            const Whole policy{Sink<>{integers(in, a)}, Window<>{integers(in, b)},
                               ThresholdGate<at_least>{reals(in, e)}, eviction,
                               QuestPages<>{in.parameter(20), integers(in, c)}};
            fuzz::refused([&] {
                DualCache<Whole, float> cache(sizes, pool, policy);
                use(ctx, cache);
            });
            break;
        }
        default: {
            fuzz::refused(
                [&] { budget_for_total(in.raw<std::int64_t>(), in.parameter(40), in.parameter(40)); });
            fuzz::refused([&] { logit_of(static_cast<double>(in.number())); });
            break;
        }
    }
    return 0;
}
