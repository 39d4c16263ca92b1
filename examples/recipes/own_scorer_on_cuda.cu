// A scorer of your own on both contexts: a struct with a host score, and a specialization of device_scorer
// with a device score.
//
// Keys of small norm tend to receive much attention, so this one keeps them: score(k) = -|k|. One warp
// computes it, so warp_device_scorer brings score_sequence, and both caches call it inside their decode step.
// A scorer with kernels of its own inherits device_scorer_defaults and adds forward() and backward()
// (include/kvpolicy/scorers/cuda/common/device_scorer.cuh).
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/cuda.cuh>  // the bodies, for the one file that instantiates them
#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/scorers/sequence.hpp>

#include <thrust/device_vector.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <vector>

namespace kvp = kvpolicy;

struct SmallNorm {
    static constexpr kvp::part_kind kind = kvp::part_kind::scorer;
    static constexpr kvp::score_time when = kvp::score_time::on_arrival;
    std::int32_t head_dim = 0;

    // On the host: one key, one thread.
    std::size_t scratch_size() const { return 0; }
    float score(std::int32_t /*head*/, const float* key, const float* /*value*/, float* /*scratch*/) const {
        float squares = 0.0f;
        for (std::int32_t d = 0; d < head_dim; ++d) {
            squares += key[d] * key[d];
        }
        return -std::sqrt(squares);
    }
};

// On CUDA: one key, one warp.
template <>
struct kvp::device_scorer<SmallNorm> : kvp::warp_device_scorer<SmallNorm> {
    template <class T>
    __device__ static float score(const SmallNorm& scorer, std::int32_t /*head*/, const T* key,
                                  const T* /*value*/, std::int32_t /*head_dim_qk*/,
                                  std::int32_t /*head_dim_vo*/) {
        float squares = 0.0f;
        for (int d = static_cast<int>(threadIdx.x) % 32; d < scorer.head_dim; d += 32) {
            const auto x = static_cast<float>(key[d]);
            squares += x * x;
        }
        return -sqrtf(kvp::cuda_backend::warp_total(squares));
    }
};

using Policy = kvp::Policy<kvp::Window<4>, kvp::TopKBudget<3>, SmallNorm>;
constexpr int tokens = 60, dim = 8;

template <class T>
T* raw(thrust::device_vector<T>& memory) {
    return thrust::raw_pointer_cast(memory.data());
}

// Sixty keys of norm 2 sqrt(2), and four shorter ones among them.
std::vector<float> make_keys() {
    std::vector<float> keys(static_cast<std::size_t>(tokens) * dim, 1.0f);
    const auto shorten = [&](int t, float to) { std::fill_n(keys.begin() + t * dim, dim, to); };
    shorten(11, 0.5f);
    shorten(25, 0.25f);
    shorten(40, 0.75f);
    shorten(41, 0.9f);
    return keys;
}

// Feeds the keys to a bound cache on CUDA, and prints what a snapshot of it holds beside the window.
template <class Cache>
void run(const char* name, Cache& cache) {
    const kvp::cuda ctx{};
    kvp::Buffer workspace{ctx, cache.step_workspace_bytes(ctx, 1)};
    const std::vector<float> all = make_keys();
    thrust::device_vector<float> key(dim), out(dim);
    for (int t = 0; t < tokens; ++t) {
        key.assign(all.begin() + t * dim, all.begin() + (t + 1) * dim);
        kvp::step(ctx, cache.layer(0), cache.nhd(raw(key), raw(key), raw(key), raw(out)), workspace);
        cache.advance(ctx);
    }
    std::vector<unsigned char> blob(cache.snapshot_bytes(ctx, 0));
    cache.snapshot(ctx, 0, blob.data(), blob.size());
    const kvp::host host_ctx{1};
    kvp::FixedBudgetCache<Policy, float> seen{cache.shape(),
                                              Policy{kvp::Window<4>{}, kvp::TopKBudget<3>{}, SmallNorm{dim}}};
    kvp::Buffer host_memory{host_ctx, seen.bytes()};
    seen.bind(host_ctx, host_memory);
    seen.restore(host_ctx, 0, blob.data(), blob.size());
    kvp::position_t held[7];
    const int rows = seen.retained(0, 0, 0, held);
    std::sort(held + 4, held + rows);
    std::printf("%s, beside the window:", name);
    for (int row = 4; row < rows; ++row) {
        std::printf(" %d", static_cast<int>(held[row]));
    }
    std::printf("\n");
}

int main() {
    if (int devices = 0; cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
        std::printf("there is no device\n");
        return 0;
    }
    const Policy policy{kvp::Window<4>{}, kvp::TopKBudget<3>{}, SmallNorm{dim}};
    const kvp::CacheShape shape{.query_heads = 1, .kv_heads = 1, .head_dim = dim, .page_size = 16};
    const kvp::cuda ctx{};
    kvp::FixedBudgetCache<Policy, float> contiguous{shape, policy};
    kvp::Buffer memory{ctx, contiguous.bytes()};
    contiguous.bind(ctx, memory);
    run("FixedBudgetCache", contiguous);

    kvp::DualCache<Policy, float> paged{shape, {.slab_pages = 8, .max_seq_len = tokens}, policy};
    kvp::Buffer tables{ctx, paged.bytes()}, slab{ctx, paged.slab_bytes()};
    paged.bind(ctx, tables);
    paged.add_slab(ctx, slab);
    run("DualCache", paged);

    // Whole sequences, for masks and training.
    const std::vector<float> keys = make_keys();
    thrust::device_vector<float> k(keys.begin(), keys.end()), scores(tokens);
    const auto rows = kvp::view_bhsd<const float>(raw(k), 1, 1, tokens, dim);
    const kvp::Sequences sequences{1, tokens};
    thrust::device_vector<unsigned char> workspace(
        kvp::score_sequence_workspace_bytes(ctx, SmallNorm{dim}, rows, rows, sequences) + 1);
    kvp::score_sequence(ctx, SmallNorm{dim}, rows, rows, sequences, 0,
                        kvp::view_bhs(raw(scores), 1, 1, tokens), {raw(workspace), workspace.size()});
    const float shortest = scores[25], max_seq_len = scores[0];
    std::printf("score_sequence: %.2f for key 25, %.2f for key 0\n", shortest, max_seq_len);
}

// Prints:
// FixedBudgetCache, beside the window: 11 25 40
// DualCache, beside the window: 11 25 40
// score_sequence: -0.71 for key 25, -2.83 for key 0
