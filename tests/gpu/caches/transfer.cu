// Layers of a sequence from a device into pinned host memory and back, between caches of both contexts:
// snapshots of what comes are those of what went, byte for byte.
#include <kvpolicy/caches/transfer.hpp>
#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda.cuh>
#include <kvpolicy/policies/selection.hpp>

#include "../../support/refusal.hpp"
#include "paged_case.hpp"
#include "two_scorers.hpp"

using namespace kvpolicy;
using namespace test;

namespace {

using Dims = head_dims<64>;
using Budget = Policy<Sink<>, Window<>, TopKBudget<>>;

/// Pinned host memory.
class Pinned {
  public:
    explicit Pinned(std::size_t bytes) : bytes_(bytes) { ok(cudaMallocHost(&data_, bytes)); }
    Pinned(const Pinned&) = delete;
    Pinned& operator=(const Pinned&) = delete;
    ~Pinned() { static_cast<void>(cudaFreeHost(data_)); }
    [[nodiscard]] void* data() const { return data_; }
    [[nodiscard]] std::size_t size() const { return bytes_; }

  private:
    void* data_ = nullptr;
    std::size_t bytes_;
};

template <class Cache>
std::vector<unsigned char> snapshot_of(const Cache& cache, std::int32_t seq) {
    const kvpolicy::cuda ctx{};
    std::vector<unsigned char> blob(cache.snapshot_bytes(ctx, seq));
    cache.snapshot(ctx, seq, blob.data(), blob.size());
    return blob;
}

/// Saves all layers of `from` to pinned memory and loads them into sequences of `to` and `of_host`,
/// on a stream, through memory of the device for every other layer.
template <class From, class To, class Host>
void move(const From& from, std::int32_t seq, std::int64_t entries, To& to, std::int32_t other,
          Host& of_host) {
    cudaStream_t stream = nullptr;
    ok(cudaStreamCreate(&stream));
    const kvpolicy::cuda ctx{stream};
    const Device<std::uint32_t> status(std::vector<std::uint32_t>{0});
    std::vector<std::unique_ptr<Pinned>> saved;
    for (std::int32_t layer = 0; layer < from.shape().layers; ++layer) {
        saved.push_back(std::make_unique<Pinned>(layer_bytes(from.layer(layer), entries)));
        const Pinned& bytes = *saved.back();
        if (layer % 2 == 0) {
            save_layer(ctx, from.layer(layer), seq, bytes.data(), bytes.size(), {.status = status.data()});
            load_layer(ctx, to.layer(layer), other, bytes.data(), bytes.size(), {.status = status.data()});
        } else {
            const Device<unsigned char> staged(bytes.size());
            save_layer(ctx, from.layer(layer), seq, staged.data(), bytes.size(), {.status = status.data()});
            ok(cudaMemcpyAsync(bytes.data(), staged.data(), bytes.size(), cudaMemcpyDefault, stream));
            load_layer(ctx, to.layer(layer), other, staged.data(), bytes.size(), {.status = status.data()});
            ok(cudaStreamSynchronize(stream));
        }
    }
    ok(cudaStreamSynchronize(stream));
    CHECK(status.read() == std::vector<std::uint32_t>{0});
    for (std::int32_t layer = 0; layer < from.shape().layers; ++layer) {
        const Pinned& bytes = *saved[static_cast<std::size_t>(layer)];
        load_layer(host{1}, of_host.layer(layer), 0, bytes.data(), bytes.size());
    }
    ok(cudaStreamDestroy(stream));
    const auto wanted = snapshot_of(from, seq);
    CHECK(snapshot_of(to, other) == wanted);
    std::vector<unsigned char> on_host(of_host.snapshot_bytes(0));
    of_host.snapshot(host{1}, 0, on_host.data(), on_host.size());
    CHECK(on_host == wanted);
}

CacheShape shape_of_layers() {
    return {.layers = 3,
            .max_sequences = 3,
            .query_heads = 4,
            .kv_heads = 2,
            .head_dim_qk = 64,
            .head_dim_vo = 40,
            .page_size = 16,
            .max_draft_tokens = 2};
}
constexpr PoolShape pool{.slab_pages = 40, .max_slabs = 8, .max_seq_len = 400};

template <class T, class P>
void check_contiguous(const P& policy) {
    std::mt19937 generator(4);
    BothCaches<P, T, Dims, false> both(shape_of_layers(), policy);
    for (std::int32_t t = 0; t < 130; ++t) {
        if (t < 3 || t % 40 == 9) {
            move(both.cache, 1, 2 * 120, both.cache, 2, both.oracle.cache);
            both.oracle.cache.clear(both.ctx, 0);
        }
        const CallTensors<T> in(both.shape, 1, 1, Scores::random, generator);
        both.call(Mode::step, {1}, {1}, in);
    }
}

template <class T, class P>
void check_paged(const P& policy) {
    std::mt19937 generator(5);
    BothDuals<P, T, Dims> both(shape_of_layers(), pool, policy);
    while (both.add_slab()) {
    }
    for (std::int32_t t = 0; t < 130; ++t) {
        if (t < 3 || t % 40 == 9) {
            move(both.cache, 1, 2 * 300, both.cache, 2, both.oracle.cache);
            both.oracle.cache.clear(both.ctx, 0);
            both.cache.clear(both.device, 2);
        }
        const CallTensors<T> in(both.shape, 1, 1, Scores::random, generator);
        CHECK_FALSE(both.call(Mode::step, {1}, {1}, in));
    }
}

}  // namespace

TEST_CASE("layers of a FixedBudgetCache") {
    check_contiguous<bf16>(Budget{Sink<>{2}, Window<>{9}, TopKBudget<>{50}});
    check_contiguous<float>(Budget{Sink<>{0}, Window<>{5}, TopKBudget<>{0}});
}

TEST_CASE("layers of a DualCache") {
    check_paged<bf16>(Budget{Sink<>{2}, Window<>{9}, TopKBudget<>{unlimited}});
    using Quest = Policy<Sink<>, Window<>, TopKBudget<>, QuestPages<16>>;
    check_paged<fp16>(Quest{Sink<>{2}, Window<>{9}, TopKBudget<>{unlimited}, QuestPages<16>{2}});
}

TEST_CASE("what is refused, or reported, leaves the layer as it was") {
    const kvpolicy::cuda ctx{};
    const Budget policy{Sink<>{2}, Window<>{9}, TopKBudget<>{unlimited}};
    std::mt19937 generator(6);
    BothDuals<Budget, bf16, Dims> both(shape_of_layers(),
                                       {.slab_pages = 12, .max_slabs = 1, .max_seq_len = 400}, policy);
    both.add_slab();
    for (std::int32_t t = 0; t < 17; ++t) {  // two pages a head
        const CallTensors<bf16> in(both.shape, 1, 1, Scores::random, generator);
        CHECK_FALSE(both.call(Mode::step, {1}, {1}, in));
    }
    const auto ref = both.cache.layer(0);
    const Pinned bytes(layer_bytes(ref, 34));
    std::vector<unsigned char> pageable(bytes.size() + 16);
    auto* const start = pageable.data() + (16 - reinterpret_cast<std::uintptr_t>(pageable.data()) % 16);
    CHECK_REFUSED(save_layer(ctx, ref, 1, start, bytes.size()), "buffer: pageable host memory");
    const Device<std::uint32_t> status(std::vector<std::uint32_t>{0});
    const auto said = [&] {
        const std::uint32_t word = status.read()[0];
        ok(cudaMemset(status.data(), 0, 4));
        return word;
    };
    save_layer(ctx, ref, 1, bytes.data(), bytes.size() - 16, {.status = status.data()});
    CHECK(said() == status_bad_length);
    load_layer(ctx, ref, 0, bytes.data(), bytes.size(), {.status = status.data()});
    CHECK(said() == status_bad_length);
    save_layer(ctx, ref, 1, bytes.data(), bytes.size(), {.status = status.data()});
    CHECK(said() == 0);
    const auto before = snapshot_of(both.cache, 0);
    load_layer(ctx, both.cache.layer(1), 0, bytes.data(), bytes.size(), {.status = status.data()});
    CHECK(said() == status_bad_length);  // of another layer
    load_layer(ctx, ref, 0, bytes.data(), bytes.size(), {.status = status.data()});
    CHECK(said() == status_pool_exhausted);  // all 12 pages are sequence 1's
    CHECK(snapshot_of(both.cache, 0) == before);
    load_layer(ctx, ref, 1, bytes.data(), bytes.size(), {.status = status.data()});
    CHECK(said() == 0);
    both.same_rows("after a layer was loaded into its own sequence");
}
