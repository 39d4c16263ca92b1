// Decode steps of a FixedBudgetCache on CUDA, everything a step does: the append, the contest, attention, the
// rows. A call steps all layers of a model once and advances, as one graph; its layers are caches of their
// own, together several times the L2 cache, so that every step finds cold rows without a flush whose
// write-back it would pay for. median_us is the time of one layer. ragged.cuh has the steps of a DualCache,
// appending.cuh steps without attention. "among products": a product of bf16 matrices precedes each layer's
// step, as in a model; "products alone" is what they take without the steps.
//
// Beside it stand the bytes that a step cannot avoid, those of keys and values in use, and the
// rate that they make.
#include <kvpolicy/cuda.cuh>
#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/scorers/linear.hpp>
#include <kvpolicy/scorers/mlp.hpp>
#include <kvpolicy/scorers/mlstm.hpp>
#include <kvpolicy/scorers/observed.hpp>

#include "appending.cuh"
#include "cache_inputs.cuh"
#include "cold.cuh"
#include "products.cuh"
#include "ragged.cuh"

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <optional>
#include <string>
#include <vector>

namespace kvp = kvpolicy;
namespace cb = kvp::cuda_backend;

/// A scorer by block without work: what a step pays for the launch of a scorer, whatever that computes.
struct NoWork {
    static constexpr kvp::part_kind kind = kvp::part_kind::scorer;
    static constexpr kvp::score_time when = kvp::score_time::on_arrival;
    std::int32_t shares = 1;  // blocks of a head

    [[nodiscard]] std::size_t scratch_size() const { return 0; }
    float score(std::int32_t /*head*/, const float* /*key*/, const float* /*value*/,
                float* /*scratch*/) const {
        return 0.0f;
    }
};
template <>
struct kvp::device_scorer<NoWork> : kvp::device_scorer_defaults {
    static constexpr bool by_block = true;
    static std::int32_t block_shares(const NoWork& scorer) { return scorer.shares; }
    static std::size_t block_floats(const NoWork& /*scorer*/, std::int32_t /*tokens*/,
                                    std::int32_t /*head_dim_qk*/, std::int32_t /*head_dim_vo*/) {
        return 0;
    }
    template <class T>
    __device__ static void score_by_block(const NoWork& /*scorer*/, std::int32_t /*head*/,
                                          const kvp::block_token<T>* tokens, std::int32_t count,
                                          kvp::block_share /*share*/, std::int32_t /*head_dim_qk*/,
                                          std::int32_t /*head_dim_vo*/, float* /*shared*/) {
        const auto t = static_cast<std::int32_t>(threadIdx.x);
        if (t < count && tokens[t].key != nullptr) {
            *tokens[t].score = 0.0f;
        }
    }
};

namespace {

using namespace bench;
using kvp::bf16;

constexpr std::int32_t heads = 8, group = 4, sinks = 4, window = 256;

/// Which scores come with the tokens.
enum class Order { random, improving };

/// A full layer, as a long sequence leaves it: rows at random, and the positions that the layout wants.
/// `length` is its tokens.
__global__ void fill_layer(bf16* k, bf16* v, kvp::position_t* position, float* score, std::int32_t rows,
                           std::int32_t dim, kvp::position_t length) {
    const std::int64_t row = blockIdx.x;  // of all sequences and heads
    const auto r = static_cast<std::int32_t>(row % rows);
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < dim;
         i += static_cast<std::int32_t>(blockDim.x)) {
        const auto x = static_cast<std::uint32_t>(row * dim + i);
        k[row * dim + i] = bf16(0.433f * hashed(x));
        v[row * dim + i] = bf16(0.433f * hashed(x + 7u));
    }
    if (threadIdx.x == 0) {
        const kvp::position_t oldest = length - window;  // of the window
        const kvp::position_t turned = (r - sinks - (oldest - sinks) % window + window) % window;
        position[row] = r < sinks ? r : r < sinks + window ? oldest + turned : r - window;
        score[row] = hashed(static_cast<std::uint32_t>(r));  // alike in all heads, which TOVA's are
    }
}
__global__ void fill_counters(std::int32_t* kept, kvp::position_t* length_of, std::int32_t batch,
                              std::int32_t budget, kvp::position_t length) {
    for (auto i = static_cast<std::int32_t>(threadIdx.x); i < batch * heads;
         i += static_cast<std::int32_t>(blockDim.x)) {
        kept[i] = budget;
        if (i < batch) {
            length_of[i] = length;
        }
    }
}

/// Layers of `bytes` each that are several times the L2 cache.
std::int32_t layers_of(double bytes) {
    return static_cast<std::int32_t>(std::clamp(400e6 / bytes, 4.0, 36.0));
}

double kv_bytes(std::int32_t batch, std::int32_t rows, std::int32_t dim) {
    return 2.0 * batch * heads * rows * dim * sizeof(bf16);
}

template <class P>
void decode(benchmark::State& state, const P& policy, std::int32_t batch, std::int32_t rows, std::int32_t dim,
            Order order, bool among_products = false) {
    using Dims = kvp::head_dims<64, 128>;
    const double bytes = kv_bytes(batch, rows, dim);
    const std::int32_t layers = layers_of(bytes);
    kvp::FixedBudgetCache<P, bf16> cache({.layers = layers,
                                          .max_sequences = batch,
                                          .query_heads = heads * group,
                                          .kv_heads = heads,
                                          .head_dim = dim},
                                         policy);
    const stream_of_calls calls;
    const kvp::cuda ctx{calls.stream};
    const buffer<unsigned char> memory(static_cast<std::int64_t>(cache.bytes().total()));
    cache.bind(ctx, memory.data(), static_cast<std::size_t>(memory.count()));
    const std::int64_t row = std::int64_t{batch} * heads * dim;
    const Numbers q(row * group, 1), k(row, 2), v(row, 3);
    const buffer<bf16> out(row * group);
    const buffer<float> scores(std::int64_t{batch} * heads);
    const std::size_t needed = cache.template step_workspace_bytes<Dims>(ctx, batch);
    const buffer<unsigned char> workspace(static_cast<std::int64_t>(needed));
    kvp::StepIO<bf16> io = cache.hnd(q.memory.data(), k.memory.data(), v.memory.data(), out.data(),
                                     {.batch = batch, .tokens = 1});
    if constexpr (P::scorer_type::when == kvp::score_time::given) {
        io.scores = kvp::view_bhs<const float>(scores.data(), batch, heads, 1);
    }
    std::int32_t width = 0;
    if constexpr (P::scorer_type::when == kvp::score_time::from_hidden) {
        width = policy.scorer().hidden_width();
    }
    const Numbers states(std::int64_t{batch} * std::max(width, 1), 4);
    if (width != 0) {
        io.hidden = kvp::view_bhsd<const bf16>(states.memory.data(), batch, 1, 1, width);
    }
    std::optional<Products> products;
    if (among_products) {
        products.emplace(layers, batch);
    }
    const auto token = [&] {
        next_scores<<<blocks_of(scores.count()), 256, 0, calls.stream>>>(
            scores.data(), static_cast<std::int32_t>(scores.count()), cache.layer(0).length,
            order == Order::improving);
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            if (products) {
                (*products)(ctx, layer);
            }
            kvp::step<Dims>(ctx, cache.layer(layer), io, {workspace.data(), needed});
        }
        cache.advance(ctx, {batch});
    };
    for (std::int32_t layer = 0; layer < layers; ++layer) {
        const auto ref = cache.layer(layer);
        fill_layer<<<static_cast<unsigned>(batch * heads * rows), 128, 0, calls.stream>>>(
            ref.k, ref.v, ref.position, ref.score, rows, dim, 3 * rows);
        fill_counters<<<1, 256, 0, calls.stream>>>(ref.num_long_range, ref.length, batch,
                                                   rows - sinks - window, 3 * rows);
        ok(cudaGetLastError());
    }
    measure_layers(state, calls.stream, layers, bytes, token);
    state.counters["workspace_bytes"] = static_cast<double>(needed);
    // Of one layer of one sequence: rows of s + w + k keys and values, and all else.
    const double sequences = static_cast<double>(batch) * layers;
    const double held = static_cast<double>(cache.bytes().keys_and_values) / sequences;
    state.counters["kv_bytes_per_sequence"] = held;
    state.counters["bytes_per_sequence"] = static_cast<double>(cache.bytes().total()) / sequences;
    if (held != bytes / batch) {
        state.SkipWithError("a cache takes other bytes than heads * (s + w + k) * 2 * head_dim * 2");
    }
}

using Given = kvp::Policy<kvp::Sink<>, kvp::Window<>, kvp::TopKBudget<>>;
using Linear = kvp::Policy<kvp::Sink<>, kvp::Window<>, kvp::TopKBudget<>, kvp::LinearScorer<>>;
using Mlp = kvp::Policy<kvp::Sink<>, kvp::Window<>, kvp::TopKBudget<>, kvp::MlpScorer<>>;
using Gate = kvp::Policy<kvp::Sink<>, kvp::Window<>, kvp::TopKBudget<>, kvp::WriteGateScorer<>>;
using Predictor = kvp::Policy<kvp::Sink<>, kvp::Window<>, kvp::TopKBudget<>, kvp::UtilityPredictor>;
using Launch = kvp::Policy<kvp::Sink<>, kvp::Window<>, kvp::TopKBudget<>, NoWork>;
using Memory = kvp::Policy<kvp::Sink<>, kvp::Window<>, kvp::TopKBudget<>, kvp::mLSTMScorer<>>;
using Sums = kvp::Policy<kvp::Sink<>, kvp::Window<>, kvp::TopKBudget<>, kvp::AccumulatedMass>;
using Last = kvp::Policy<kvp::Sink<>, kvp::Window<>, kvp::TopKBudget<>, kvp::LastMass>;

template <class P, class... Scorer>
P policy_of(std::int32_t rows, const Scorer&... scorer) {
    return P{kvp::Sink<>{sinks}, kvp::Window<>{window}, kvp::TopKBudget<>{rows - sinks - window}, scorer...};
}

/// Bytes a second that the GPU's memory moves at most, from its clock and width.
double peak_bandwidth() {
    int gpu = 0, khz = 0, bits = 0;
    ok(cudaGetDevice(&gpu));
    ok(cudaDeviceGetAttribute(&khz, cudaDevAttrMemoryClockRate, gpu));
    ok(cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, gpu));
    return 2e3 * khz * bits / 8.0;
}

/// An mLSTM's launch of a step alone: the states of `batch` sequences are read and written once. As in
/// decode(), layers follow each other, so that states are cold.
void score_alone(benchmark::State& state, std::int32_t batch) {
    constexpr std::int32_t dim = 128, budget = 8, rows = sinks + window + budget;
    const auto scorer = scorer_of<kvp::mLSTMScorer<>>(heads, dim);
    const double bytes =
        2.0 * batch * heads * static_cast<double>(scorer.state_size()) * sizeof(float);  // read, written
    const auto layers = static_cast<std::int32_t>(std::clamp(400e6 / bytes, 3.0, 48.0));
    kvp::FixedBudgetCache<Memory, bf16> cache({.layers = layers,
                                               .max_sequences = batch,
                                               .query_heads = heads * group,
                                               .kv_heads = heads,
                                               .head_dim = dim},
                                              policy_of<Memory>(rows, scorer));
    const stream_of_calls calls;
    const kvp::cuda ctx{calls.stream};
    const buffer<unsigned char> memory(static_cast<std::int64_t>(cache.bytes().total()));
    cache.bind(ctx, memory.data(), static_cast<std::size_t>(memory.count()));
    const std::int64_t row = std::int64_t{batch} * heads * dim;
    const Numbers k(row, 2), v(row, 3);
    const buffer<float> scores(std::int64_t{batch} * heads);
    for (std::int32_t layer = 0; layer < layers; ++layer) {
        const auto ref = cache.layer(layer);
        fill_layer<<<static_cast<unsigned>(batch * heads * rows), 128, 0, calls.stream>>>(
            ref.k, ref.v, ref.position, ref.score, rows, dim, 3 * rows);
        fill_counters<<<1, 256, 0, calls.stream>>>(ref.num_long_range, ref.length, batch, budget, 3 * rows);
        ok(cudaGetLastError());
    }
    measure_layers(state, calls.stream, layers, bytes, [&] {
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            const auto ref = cache.layer(layer);
            cb::launch_scores(
                ctx, cb::score_params<cb::contiguous_view<bf16>, kvp::mLSTMScorer<>>{
                         .cache = cb::contiguous_view<bf16>(ref),
                         .batch = {batch},
                         .tokens = {.k = kvp::view_bhsd<const bf16>(k.memory.data(), batch, heads, 1, dim),
                                    .v = kvp::view_bhsd<const bf16>(v.memory.data(), batch, heads, 1, dim)},
                         .scores = scores.data(),
                         .scorer = ref.scorer});
        }
    });
    state.counters["share_of_bandwidth"] = state.counters["gb_per_s"] * 1e9 / peak_bandwidth();
}

/// The products of as many layers as decode() has.
void products_alone(benchmark::State& state, std::int32_t batch, std::int32_t rows) {
    const std::int32_t layers = layers_of(kv_bytes(batch, rows, 128));
    const stream_of_calls calls;
    const Products products(layers, batch);
    measure_layers(state, calls.stream, layers, 2.0 * Products::width * Products::width, [&] {
        for (std::int32_t layer = 0; layer < layers; ++layer) {
            products(kvp::cuda{calls.stream}, layer);
        }
    });
}

void add_products() {
    for (const std::int32_t batch : {1, 8, 32, 64, 128}) {
        const std::string size = "4096 x " + std::to_string(batch);
        add("step among products/" + size, [=](benchmark::State& state) {
            decode(state, policy_of<Given>(4096), batch, 4096, 128, Order::random, true);
        });
        add("products alone/" + size, [=](benchmark::State& state) { products_alone(state, batch, 4096); });
    }
}

void add_steps() {
    for (const std::int32_t rows : {4096, 2048}) {
        for (const std::int32_t batch : {1, 8, 32}) {
            const std::string size = std::to_string(rows) + " x " + std::to_string(batch);
            add("step/" + size, [=](benchmark::State& state) {
                decode(state, policy_of<Given>(rows), batch, rows, 128, Order::random);
            });
            add("step, always replaced/" + size, [=](benchmark::State& state) {
                decode(state, policy_of<Given>(rows), batch, rows, 128, Order::improving);
            });
            add("step, H2O's masses/" + size, [=](benchmark::State& state) {
                decode(state, policy_of<Sums>(rows, kvp::AccumulatedMass{}), batch, rows, 128, Order::random);
            });
            add("step, TOVA's masses/" + size, [=](benchmark::State& state) {
                decode(state, policy_of<Last>(rows, kvp::LastMass{}), batch, rows, 128, Order::random);
            });
            add("step, linear/" + size, [=](benchmark::State& state) {
                decode(state, policy_of<Linear>(rows, scorer_of<kvp::LinearScorer<>>(heads, 128)), batch,
                       rows, 128, Order::random);
            });
            for (const std::int32_t shares : {1, 8}) {  // an MLP of 128 hidden numbers has 8
                add("step, scorer without work, " + std::to_string(shares) + " blocks a head/" + size,
                    [=](benchmark::State& state) {
                        decode(state, policy_of<Launch>(rows, NoWork{shares}), batch, rows, 128,
                               Order::random);
                    });
            }
            add("step, MLP/" + size, [=](benchmark::State& state) {
                decode(state, policy_of<Mlp>(rows, scorer_of<kvp::MlpScorer<>>(heads, 128)), batch, rows, 128,
                       Order::random);
            });
            add("step, write gate/" + size, [=](benchmark::State& state) {
                decode(state, policy_of<Gate>(rows, scorer_of<kvp::WriteGateScorer<>>(heads, 128)), batch,
                       rows, 128, Order::random);
            });
            add("step, predictor/" + size, [=](benchmark::State& state) {
                decode(state, policy_of<Predictor>(rows, scorer_of<kvp::UtilityPredictor>(heads, 128)), batch,
                       rows, 128, Order::random);
            });
            add("step, mLSTM/" + size, [=](benchmark::State& state) {
                decode(state, policy_of<Memory>(rows, scorer_of<kvp::mLSTMScorer<>>(heads, 128)), batch, rows,
                       128, Order::random);
            });
        }
    }
    for (const std::int32_t batch : {64, 128}) {
        add("step/4096 x " + std::to_string(batch), [=](benchmark::State& state) {
            decode(state, policy_of<Given>(4096), batch, 4096, 128, Order::random);
        });
    }
    for (const std::int32_t batch : {1, 32, 256}) {
        add("mLSTM alone/" + std::to_string(batch) + " x 8",
            [=](benchmark::State& state) { score_alone(state, batch); });
    }
    add("step, d 64/4096 x 8",
        [](benchmark::State& state) { decode(state, policy_of<Given>(4096), 8, 4096, 64, Order::random); });
}

}  // namespace

int main(int argc, char** argv) {
    add_steps();
    add_products();
    appending::add_rows();
    ragged::add_rows();
    return run(argc, argv, "cold: steps go through layers of several times the L2 cache");
}
