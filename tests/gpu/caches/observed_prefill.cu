// Prompts into caches of H2O, TOVA and SnapKV on CUDA beside the same calls on the host: outputs, and row by
// row positions, keys, values and scores.
#include <kvpolicy/cuda.cuh>
#include <kvpolicy/h2o.hpp>
#include <kvpolicy/snapkv.hpp>
#include <kvpolicy/tova.hpp>

#include "cache_case.hpp"
#include "support/bound_cache.hpp"
#include "support/bound_dual.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

using namespace kvpolicy;
using namespace test;

namespace {

using Dims = head_dims<64>;

/// A cache of P on both sides; with `Paged` a DualCache.
template <class P, class T, bool Paged>
class BothObserved {
    using Bound = std::conditional_t<Paged, BoundDual<P, T>, BoundCache<P, T>>;
    using Cache = std::conditional_t<Paged, DualCache<P, T>, FixedBudgetCache<P, T>>;
    static constexpr PoolShape pool{.slab_pages = 600, .max_slabs = 1, .max_seq_len = 700};

  public:
    BothObserved(const P& policy, std::int32_t kv_heads, std::int32_t group, std::int32_t max_sequences = 1,
                 PoolShape pages = pool)
        : shape_{.max_sequences = max_sequences,
                 .query_heads = kv_heads * group,
                 .kv_heads = kv_heads,
                 .head_dim_qk = 16,
                 .head_dim_vo = 24,
                 .page_size = 16},
          oracle_(made<Bound>(policy, pages, ctx_)),
          mirror_(made<Bound>(policy, pages, ctx_)),
          cache_(made<Cache>(policy, pages)),
          memory_(cache_->bytes().total()) {
        ok(cudaMemset(memory_.data(), 0xff, memory_.size()));  // NaN in every row that nobody wrote
        cache_->bind(device_, memory_.data(), memory_.size());
        if constexpr (Paged) {
            oracle_->add_slab(ctx_);
            mirror_->add_slab(ctx_);
            slab_ = std::make_unique<Device<unsigned char>>(cache_->slab_bytes());
            ok(cudaMemset(slab_->data(), 0xff, slab_->size()));
            cache_->add_slab(device_, slab_->data(), slab_->size());
        }
    }

    /// q_len[i] new tokens for each sequence. Returns the status words.
    std::vector<std::uint32_t> prefill(const std::vector<std::int32_t>& q_len) {
        const auto count = static_cast<std::int32_t>(q_len.size());
        const std::int32_t length = *std::max_element(q_len.begin(), q_len.end());
        const CallTensors<T> in(shape_, count, length, Scores::random, generator_);
        const Device<std::int32_t> device_len(q_len);
        const Device<T> q(unused(in.q, q_len)), k(unused(in.k, q_len)), v(unused(in.v, q_len));
        Tensor<T> wanted(count, shape_.query_heads, length, shape_.head_dim_vo);
        wanted.fill(7.0f);
        Plane<float> wanted_lse(count, shape_.query_heads, length, 7.0f);
        const Device<T> out(wanted.data);
        const Device<float> lse(wanted_lse.data);
        std::vector<std::uint32_t> wanted_status(q_len.size(), 0);
        const Device<std::uint32_t> status(wanted_status);
        Extras extras{.lse = wanted_lse.view()}, device_extras{};
        if (with_lse_) {
            device_extras.lse = view_bhs(lse.data(), count, shape_.query_heads, length);
        }
        const auto rows = [&](const Device<T>& of, std::int32_t heads, std::int32_t dim) {
            return view_bhsd<const T>(of.data(), count, heads, length, dim);
        };
        const auto ref = cache_->layer(0);
        const Device<unsigned char> workspace(
            workspace_bytes<Dims>(device_, ref, {.batch = count, .tokens = length}));
        kvpolicy::prefill<Dims>(
            device_, ref,
            test::step_io<T>({.count = count, .q_len = device_len.data(), .length = length},
                             rows(q, shape_.query_heads, 16), rows(k, shape_.kv_heads, 16),
                             rows(v, shape_.kv_heads, 24),
                             view_bhsd(out.data(), count, shape_.query_heads, length, 24), device_extras),
            workspace, {.status = status.data()});
        const Batch batch{.count = count, .q_len = q_len.data(), .length = length};
        call_ref<P, T>(ctx_, oracle_->cache.layer(0), batch, in.q.view(), in.k.view(), in.v.view(),
                       wanted.view(), extras, false, wanted_status.data());
        CHECK(status.read() == wanted_status);
        if (with_lse_) {
            check_.compare(out.read(), wanted, lse.read(), wanted_lse, q_len, in.v);
        } else {
            check_.compare(out.read(), wanted, wanted_lse.data, wanted_lse, q_len, in.v);
        }
        std::vector<std::int32_t> moved = q_len;
        for (std::size_t i = 0; i < moved.size(); ++i) {
            moved[i] = wanted_status[i] == 0 ? moved[i] : 0;
        }
        const Device<std::int32_t> device_moved(moved);
        oracle_->cache.advance(ctx_, {.count = count, .q_len = moved.data(), .length = length});
        cache_->advance(device_, {.count = count, .q_len = device_moved.data(), .length = length});
        same_rows();
        return wanted_status;
    }

    /// Decoded tokens on the host alone; the device takes what they leave.
    void step(std::int32_t tokens) {
        const Batch batch{.count = 1, .length = 1};
        for (std::int32_t t = 0; t < tokens; ++t) {
            const CallTensors<T> in(shape_, 1, 1, Scores::random, generator_);
            Tensor<T> out(1, shape_.query_heads, 1, shape_.head_dim_vo);
            call_ref<P, T>(ctx_, oracle_->cache.layer(0), batch, in.q.view(), in.k.view(), in.v.view(),
                           out.view(), {}, true);
            oracle_->cache.advance(ctx_, batch);
            for (const T& x : in.v.data) {
                check_.largest = std::max(check_.largest, std::abs(OutputCheck<T>::number(x)));
            }
        }
        std::vector<unsigned char> blob(oracle_->cache.snapshot_bytes(0));
        oracle_->cache.snapshot(ctx_, 0, blob.data(), blob.size());
        cache_->restore(device_, 0, blob.data(), blob.size());
    }

    void without_lse() { with_lse_ = false; }

  private:
    template <class Made, class... Context>
    std::unique_ptr<Made> made(const P& policy, const PoolShape& pages, const Context&... ctx) const {
        if constexpr (Paged) {
            return std::make_unique<Made>(ctx..., shape_, pages, policy);
        } else {
            return std::make_unique<Made>(ctx..., shape_, policy);
        }
    }

    /// A tensor's numbers, with NaN beyond each entry's tokens.
    std::vector<T> unused(const Tensor<T>& of, const std::vector<std::int32_t>& q_len) const {
        std::vector<T> out = of.data;
        for (std::size_t i = 0; i < out.size(); ++i) {
            const auto row = i / static_cast<std::size_t>(of.dim);
            const auto t = static_cast<std::int32_t>(row) % of.length;
            const auto entry = row / static_cast<std::size_t>(of.length * of.heads);
            out[i] = t < q_len[entry] ? out[i] : T(std::numeric_limits<float>::quiet_NaN());
        }
        return out;
    }

    void same_rows() {
        std::int64_t wrong = 0;
        double worst = 0.0;
        for (std::int32_t seq = 0; seq < shape_.max_sequences; ++seq) {
            std::vector<unsigned char> blob(cache_->snapshot_bytes(device_, seq));
            cache_->snapshot(device_, seq, blob.data(), blob.size());
            mirror_->cache.restore(ctx_, seq, blob.data(), blob.size());
            const auto mine = mirror_->cache.layer(0), theirs = oracle_->cache.layer(0);
            CHECK(mine.length[seq] == theirs.length[seq]);
            for (std::int32_t h = 0; h < shape_.kv_heads; ++h) {
                CHECK(mine.num_long_range[seq * shape_.kv_heads + h] ==
                      theirs.num_long_range[seq * shape_.kv_heads + h]);
                const auto a = mine.head_rows(seq, h), b = theirs.head_rows(seq, h);
                for (std::int32_t r = 0; r < theirs.used(seq, h); ++r) {
                    wrong += a.position(r) == b.position(r) ? 0 : 1;
                    wrong += std::equal(a.k(r), a.k(r) + 16, b.k(r), same_number) ? 0 : 1;
                    wrong += std::equal(a.v(r), a.v(r) + 24, b.v(r), same_number) ? 0 : 1;
                    const double score = static_cast<double>(b.score(r));
                    // Relative: products' exponents, the lse's cubic, and sums (received_mass.cu).
                    const double off = std::abs(static_cast<double>(a.score(r)) - score) / (score + 1e-30);
                    worst = off <= worst ? worst : off;
                }
            }
        }
        CHECK(wrong == 0);
        CHECK(worst <= 4e-4);
    }
    static bool same_number(const T& a, const T& b) { return static_cast<float>(a) == static_cast<float>(b); }

    CacheShape shape_;
    kvpolicy::host ctx_{2};
    kvpolicy::cuda device_{};
    std::unique_ptr<Bound> oracle_, mirror_;
    std::unique_ptr<Cache> cache_;
    Device<unsigned char> memory_;
    std::unique_ptr<Device<unsigned char>> slab_;
    std::mt19937 generator_{7};
    OutputCheck<T> check_;
    bool with_lse_ = true;
};

constexpr std::int32_t chunks[] = {Observation::whole_call, 1, 7, 64};

/// Prompts of several calls, in blocks of every length.
template <class T, bool Paged, class Make>
void check_prompts(const Make& policy_of, std::int32_t kv_heads, std::int32_t group) {
    for (const std::int32_t chunk : chunks) {
        CAPTURE(chunk);
        const auto policy = policy_of(ObservedPrefill{chunk});
        BothObserved<std::decay_t<decltype(policy)>, T, Paged> both(policy, kv_heads, group);
        for (const std::int32_t tokens : {100, 1, 30, 65, 0, 128}) {
            CAPTURE(tokens);
            both.prefill({tokens});
        }
    }
}

const auto h2o = [](ObservedPrefill prefill) { return h2o_for_total(50, 11, {prefill}); };
const auto h2o_max = [](ObservedPrefill prefill) {
    return h2o_for_total(50, 11, {prefill, group_aggregate::max});
};
const auto tova = [](ObservedPrefill prefill) { return tova_for_total(37, {prefill}); };
const auto tova_by_head = [](ObservedPrefill prefill) { return tova_for_total(37, {prefill, false}); };
const auto snapkv = [](ObservedPrefill prefill) { return snapkv_for_total(60, 8, {prefill}); };
const auto snapkv_max = [](ObservedPrefill prefill) {
    return snapkv_for_total(60, 8, {prefill, MassPooling::max(7)});
};

}  // namespace

TEST_CASE("prompts of H2O") {
    check_prompts<float, false>(h2o, 2, 4);
    check_prompts<float, true>(h2o, 1, 7);
    check_prompts<float, false>(h2o_max, 2, 4);
}

TEST_CASE("prompts of TOVA") {
    check_prompts<float, false>(tova, 3, 2);
    check_prompts<float, true>(tova, 2, 1);
    check_prompts<float, false>(tova_by_head, 2, 2);
}

TEST_CASE("prompts of SnapKV") {
    check_prompts<float, true>(snapkv, 2, 2);
    check_prompts<float, true>(snapkv_max, 2, 1);
}

TEST_CASE("prompts of bf16") {
    check_prompts<bf16, false>(h2o, 2, 4);
    check_prompts<bf16, true>(snapkv, 2, 2);
}

TEST_CASE("prompts of several sequences of different lengths") {
    BothObserved<H2O<>, float, false> fixed(h2o_for_total(50, 11, {ObservedPrefill::in_chunks(32)}), 2, 2, 5);
    fixed.without_lse();
    fixed.prefill({130, 0, 1, 64, 33});
    fixed.prefill({5, 70, 64, 0, 1});
    BothObserved<SnapKV<>, float, true> paged(snapkv_for_total(60, 8), 2, 2, 5);
    paged.prefill({130, 0, 1, 64, 33});
    paged.prefill({5, 70, 64, 0, 1});
}

TEST_CASE("a prompt after decoded tokens") {
    BothObserved<SnapKV<>, float, true> snap(snapkv_for_total(60, 8, {.pooling = MassPooling::mean(5)}), 2,
                                             2);
    snap.prefill({90});
    snap.step(50);
    snap.prefill({40});
    snap.step(3);
    snap.prefill({1});
    BothObserved<H2O<>, float, false> heavy(h2o_for_total(40), 2, 2);
    heavy.prefill({60});
    heavy.step(30);
    heavy.prefill({50});
    BothObserved<TOVA<>, float, true> omitted(tova_for_total(20), 2, 2);
    omitted.step(30);
    omitted.prefill({50});
}

TEST_CASE("prompts of budgets of 0 and 1, windows of 1, sinks, and heads that differ") {
    using Own = Policy<Sink<>, Window<>, TopKBudget<>, AccumulatedMass>;
    static const std::array<std::int32_t, 3> windows{1, 9, 32}, budgets{20, 1, 0}, sinks{0, 4, 2};
    for (const std::int32_t chunk : {Observation::whole_call, 5}) {
        const Own policy{Sink<>{per_head(sinks.data(), 1, 3)}, Window<>{per_head(windows.data(), 1, 3)},
                         TopKBudget<>{per_head(budgets.data(), 1, 3)},
                         AccumulatedMass{ObservedPrefill{chunk}}};
        BothObserved<Own, float, false> both(policy, 3, 2);
        both.prefill({3});
        both.prefill({70});
        both.prefill({40});
    }
}

TEST_CASE("a pool without pages leaves a sequence as it was") {
    BothObserved<SnapKV<>, float, true> both(snapkv_for_total(60, 8), 2, 2, 3,
                                             {.slab_pages = 20, .max_slabs = 1, .max_seq_len = 700});
    CHECK(both.prefill({64, 64, 64}) == std::vector<std::uint32_t>{0, 0, status_pool_exhausted});
    both.prefill({30, 0, 0});
}
