// mLSTMScorer inside a FixedBudgetCache's calls.
#include <kvpolicy/caches/cuda/scoring/agent_mlstm_step.cuh>

#include "scorers_case.hpp"

#include <algorithm>
#include <cstddef>
#include <cstring>
#include <vector>

using namespace kvpolicy;
using namespace test;

namespace {

/// Gates of a token whose input gate is at -1500, while the memory's stabilizer is 0 and the forget gate
/// as low as it gets.
__global__ void low_gates(float* const result) {
    cuda_backend::mlstm_gates gates;
    const bool input = threadIdx.x % 2 == 0;
    const float factor = gates.take(input ? -1500.0f : -INFINITY, 0.0f, true);
    if (threadIdx.x < 2) {
        result[threadIdx.x] = factor;
        result[2 + threadIdx.x] = threadIdx.x == 0 ? gates.first : gates.second;
    }
}

}  // namespace

// As host and chunks have it: log f is at least -1000, so that what is weaker than e^-1000 of the memory
// does not replace it.
TEST_CASE("a forget gate has a least value") {
    const Device<float> result(4);
    low_gates<<<1, 32>>>(result.data());
    ok(cudaDeviceSynchronize());
    CHECK(result.read() == std::vector<float>{0.0f, 1.0f, -1000.0f, 0.0f});
}

TEST_CASE("few calls") {
    auto hedgehog = sized<mLSTMScorer<>>();
    hedgehog.d_qk = 20;
    check_scorer(hedgehog, true, 3, 6);
    check_scorer<bf16>(sized<mLSTMScorer<>>(), true, 40, 3);
    auto direct = sized<mLSTMScorer<dynamic, Softmax, DirectValues>>();
    check_scorer(direct, false, 9, 6);
    direct.d_qk = 17;  // which clusters do not take
    check_scorer(direct, false, 2, 3);
}

TEST_CASE("mLSTMScorer") {
    auto hedgehog = sized<mLSTMScorer<>>();
    hedgehog.d_qk = 20;
    check_scorer(hedgehog, true);
    auto direct = sized<mLSTMScorer<dynamic, Softmax, DirectValues>>();
    direct.gate_softcap = 5.0f;
    check_scorer(direct, false);
}

// By a cluster, a batch, a block, and in chunks.
TEST_CASE("mLSTMScorer with a LayerNorm") {
    auto hedgehog = sized<mLSTMScorer<>>();
    hedgehog.d_qk = 20;
    hedgehog.norm = mlstm_norm::layer;
    check_scorer(hedgehog, true, 3, 30);
    check_scorer(hedgehog, true, 150, 6);
    auto odd = sized<mLSTMScorer<dynamic, Softmax, DirectValues>>();
    odd.d_qk = 17;  // which clusters do not take
    odd.norm = mlstm_norm::layer;
    check_scorer(odd, true, 2, 12);
    auto half = sized<mLSTMScorer<>>();
    half.norm = mlstm_norm::layer;
    check_scorer<bf16>(half, true, 17, 12);
}

// Sequences that share a cluster of blocks, several groups of them one after the other, some without tokens.
TEST_CASE("mLSTMScorer, many sequences") {
    auto hedgehog = sized<mLSTMScorer<>>();
    hedgehog.d_qk = 20;
    check_scorer(hedgehog, true, 150, 12);
    check_scorer(hedgehog, true, 17, 12);  // the last block has none
    auto direct = sized<mLSTMScorer<dynamic, Softmax, DirectValues>>();
    check_scorer(direct, false, 37, 12);
}

TEST_CASE("mLSTMScorer, large heads") {
    auto usual = sized<mLSTMScorer<>>();
    usual.head_dim_qk = usual.head_dim_vo = 128;
    check_scorer(usual, true, 5, 30);
    check_scorer(usual, true, 33, 12);
    usual.d_v = 128;
    check_scorer(usual, false, 2, 15);
    auto wide = sized<mLSTMScorer<dynamic, Softmax, DirectValues>>();
    wide.head_dim_qk = wide.head_dim_vo = 128;
    check_scorer(wide, true, 2, 15);
    wide.d_qk = 256;
    check_scorer(wide, false, 2, 6);
    check_scorer(wide, false, 19, 3);
}

// Sizes that clusters do not take.
TEST_CASE("mLSTMScorer, odd sizes") {
    auto odd = sized<mLSTMScorer<dynamic, Softmax, DirectValues>>();
    odd.d_qk = 17;
    check_scorer(odd, true, 3, 20);
}

// As for other scorers (scorers.cu).
TEST_CASE("16-bit caches") {
    for (const std::int32_t count : {3, 17, 40, 150}) {
        CAPTURE(count);
        check_scorer<bf16>(sized<mLSTMScorer<>>(), true, count, 12);
    }
}

namespace {

/// Alone a sequence has a cluster of blocks for itself, in a batch it shares one, or a block that streams
/// states: its sums are the same.
void check_bits(std::int32_t count) {
    CAPTURE(count);
    using S = mLSTMScorer<>;
    std::mt19937 generator(5), again(5);
    BothScored<float, S> first(sized<S>(), true, count, 0, generator),
        second(sized<S>(), true, count, 0, again);
    auto &together = first.both, &alone = second.both;
    const CacheShape& shape = together.shape;
    const std::vector<std::int32_t> ones(static_cast<std::size_t>(count), 1);
    std::vector<std::int32_t> seq_ids;
    for (std::int32_t i = 0; i < count; ++i) {
        seq_ids.push_back(i);
    }
    for (int turn = 0; turn < 15; ++turn) {
        const CallTensors<float> in(shape, count, 1, Scores::random, generator);
        together.call(Mode::step, seq_ids, ones, in);
        for (std::int32_t i = 0; i < count; ++i) {
            CallTensors<float> one(shape, 1, 1, Scores::random, generator);
            const auto part = [i](const auto& from, auto& to) {
                const auto size = static_cast<std::ptrdiff_t>(to.size());
                std::copy_n(from.begin() + i * size, size, to.begin());
            };
            part(in.q.data, one.q.data);
            part(in.k.data, one.k.data);
            part(in.v.data, one.v.data);
            alone.call(Mode::step, {i}, {1}, one);
        }
        // As bits: rows that nobody wrote hold NaN.
        const auto same = [](const std::vector<float>& a, const std::vector<float>& b) {
            return std::memcmp(a.data(), b.data(), a.size() * sizeof(float)) == 0;
        };
        const auto x = together.cache.layer(0), y = alone.cache.layer(0);
        const std::int64_t states = std::int64_t{x.max_sequences} * x.kv_heads * x.state_size,
                           rows = x.max_sequences * x.rows;
        CAPTURE(turn);
        CHECK(same(together.fetch(x.state, states), alone.fetch(y.state, states)));
        CHECK(same(together.fetch(x.score, rows), alone.fetch(y.score, rows)));
    }
}

}  // namespace

TEST_CASE("mLSTMScorer, the batch changes no bit") {
    check_bits(9);
    check_bits(70);
}
