// Scores of sequences on CUDA, and their gradients: whole calls, an mLSTM without its projections (states
// between chunks, reads, and back), which is what kernels for linear recurrences are compared by, and SP-KV's
// predictor. What is bound by products also has tf_per_s, to be read beside "measured matrix rate", a product
// of 8192^3 by cuBLASLt on the same GPU.
#include <kvpolicy/cuda_scorers.cuh>
#include <kvpolicy/scorers/cuda/mlstm/dispatch_mlstm.cuh>
#include <kvpolicy/scorers/cuda_predictor.cuh>

#include "cold.cuh"
#include "lt_handle.cuh"

#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace kvp = kvpolicy;
namespace cb = kvp::cuda_backend;

namespace {

using namespace bench;

template <class T>
__global__ void fill(T* to, std::int64_t count, float scale, std::uint32_t seed) {
    for (std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
         i += std::int64_t{gridDim.x} * blockDim.x) {
        to[i] = static_cast<T>(scale * hashed(static_cast<std::uint32_t>(i) + seed));
    }
}

template <class T>
std::unique_ptr<buffer<T>> filled(std::int64_t count, float scale, std::uint32_t seed) {
    auto memory = std::make_unique<buffer<T>>(count);
    fill<<<1024, 256>>>(memory->data(), count, scale, seed);
    ok(cudaGetLastError());
    ok(cudaDeviceSynchronize());
    return memory;
}

struct shape {
    std::int32_t batch, length, dim;
    static constexpr std::int32_t heads = 8;
    [[nodiscard]] std::int64_t rows() const { return std::int64_t{batch} * heads * length; }
};

constexpr std::int32_t delay = 256;

/// A scorer with drawn weights, keys and values, and room for everything that a call writes.
template <class S>
struct problem {
    shape of;
    S scorer;
    typename S::template parameters<float> gradients;
    std::unique_ptr<buffer<kvp::bf16>> k, v;
    std::unique_ptr<buffer<float>> scores, d_scores, d_k, d_v;
    std::vector<std::unique_ptr<buffer<float>>> arrays;
    kvp::Sequences sequences;

    problem(const shape& from, S blank) : of(from), scorer(blank), sequences{from.batch, from.length} {
        scorer.heads = shape::heads;
        scorer.head_dim_qk = of.dim;
        scorer.head_dim_vo = of.dim;
        auto weights = scorer.weights;
        // hashed() is uniform in [-4, 4): products of unit inputs and these are of order 1.
        const float scale = 0.4f / std::sqrt(2.0f * static_cast<float>(of.dim));
        kvp::for_each_parameter(
            scorer, weights, [&](const char*, const float*& pointer, std::size_t count, bool) {
                arrays.push_back(filled<float>(static_cast<std::int64_t>(count), scale,
                                               static_cast<std::uint32_t>(arrays.size())));
                pointer = count == 0 ? nullptr : arrays.back()->data();
            });
        scorer.weights = weights;
        kvp::for_each_parameter(
            scorer, gradients, [&](const char*, float*& pointer, std::size_t count, bool) {
                arrays.push_back(filled<float>(static_cast<std::int64_t>(count), 0.0f, 0));
                pointer = count == 0 ? nullptr : arrays.back()->data();
            });
        k = filled<kvp::bf16>(of.rows() * of.dim, 0.4f, 1u << 20);
        v = filled<kvp::bf16>(of.rows() * of.dim, 0.4f, 1u << 21);
        scores = filled<float>(of.rows(), 0.0f, 0);
        d_scores = filled<float>(of.rows(), 0.1f, 7);
    }
    void want_inputs() {
        d_k = filled<float>(of.rows() * of.dim, 0.0f, 0);
        d_v = filled<float>(of.rows() * of.dim, 0.0f, 0);
    }
    [[nodiscard]] kvp::rows_view<const kvp::bf16> rows(const buffer<kvp::bf16>& from) const {
        return kvp::view_bhsd<const kvp::bf16>(from.data(), of.batch, shape::heads, of.length, of.dim);
    }
    [[nodiscard]] kvp::ScoreBackward<kvp::bf16> backward() const {
        kvp::ScoreBackward<kvp::bf16> call{
            rows(*k), rows(*v), sequences, delay,
            kvp::view_bhs<const float>(d_scores->data(), of.batch, shape::heads, of.length)};
        if (d_k != nullptr) {
            call.d_k = kvp::view_bhsd(d_k->data(), of.batch, shape::heads, of.length, of.dim);
            call.d_v = kvp::view_bhsd(d_v->data(), of.batch, shape::heads, of.length, of.dim);
        }
        return call;
    }
    [[nodiscard]] kvp::plane_view<float> score_plane() const {
        return kvp::view_bhs(scores->data(), of.batch, shape::heads, of.length);
    }
};

/// TF/s of a call of `flop` whose time stands in the state.
void rate(benchmark::State& state, double flop) {
    const double ms = state.counters["median_ms"];
    state.counters["tf_per_s"] = ms > 0.0 ? flop / ms * 1e-9 : 0.0;
}

/// FLOP of a convolution's scores: three layers of three taps that halve the width, and the readout.
template <std::int32_t D>
double flop_of(const kvp::ConvScorer<D>& scorer, const shape& of) {
    double products = scorer.channels(3);
    for (int l = 1; l <= 3; ++l) {
        products += 3.0 * scorer.channels(l - 1) * scorer.channels(l);
    }
    return 2.0 * products * static_cast<double>(of.rows());
}
template <class S>
double flop_of(const S&, const shape&) {
    return 0.0;
}

template <class Widths, class S>
void forward(benchmark::State& state, const shape& of, const S& blank) {
    const stream_of_calls calls;
    const kvp::cuda ctx{calls.stream};
    const problem<S> all(of, blank);
    const std::size_t bytes = kvp::score_sequence_workspace_bytes<Widths>(ctx, all.scorer, all.rows(*all.k),
                                                                          all.rows(*all.v), all.sequences);
    const buffer<unsigned char> workspace(static_cast<std::int64_t>(bytes));
    measure(
        state, calls.stream,
        [&] {
            kvp::score_sequence<Widths>(ctx, all.scorer, all.rows(*all.k), all.rows(*all.v), all.sequences,
                                        delay, all.score_plane(), {workspace.data(), bytes});
        },
        bytes);
    if (const double flop = flop_of(all.scorer, of); flop > 0.0) {
        rate(state, flop);
    }
}

template <class Widths, class S>
void backward(benchmark::State& state, const shape& of, const S& blank, bool inputs) {
    const stream_of_calls calls;
    const kvp::cuda ctx{calls.stream};
    problem<S> all(of, blank);
    if (inputs) {
        all.want_inputs();
    }
    const auto call = all.backward();
    const std::size_t bytes = kvp::score_sequence_backward_workspace_bytes<Widths>(ctx, all.scorer, call);
    const buffer<unsigned char> workspace(static_cast<std::int64_t>(bytes));
    measure(
        state, calls.stream,
        [&] {
            kvp::score_sequence_backward<Widths>(ctx, all.scorer, call, all.gradients,
                                                 {workspace.data(), bytes});
        },
        bytes);
    // The layers again, their inputs' gradients but for the first layer's (unless they are wanted),
    // and their weights'.
    if (const double flop = flop_of(all.scorer, of); flop > 0.0) {
        const double first = 6.0 * of.dim * 2 * of.dim * static_cast<double>(of.rows());
        rate(state, 3.0 * flop - (inputs ? 0.0 : first));
    }
}

/// What of an mLSTM is timed.
enum class passes : std::uint8_t {
    scores,     ///< forward
    both,       ///< and backward, for which the states are computed again, as
                ///< score_sequence_backward does by itself
    both_kept,  ///< backward goes on from the states that the scores left, as it does with `kept`
};

/// Features, values and gates are there; timed is what follows: scores, and gradients of features,
/// values and gates.
template <passes Which>
void without_projections(benchmark::State& state, const shape& of) {
    using S = kvp::mLSTMScorer<kvp::dynamic, kvp::Softmax, kvp::DirectValues>;
    using Widths = kvp::mlstm_widths<128, 128>;
    const stream_of_calls calls;
    const kvp::cuda ctx{calls.stream};
    const problem<S> all(of, S{});
    const auto make = [&](cb::workspace_parts& parts) {
        return cb::mlstm_plan<Widths, kvp::bf16, false>(
            all.scorer, all.rows(*all.k), all.rows(*all.v), all.sequences, delay,
            Which == passes::scores ? nullptr : &all.gradients, parts);
    };
    cb::workspace_parts measured(nullptr);
    static_cast<void>(make(measured));
    const buffer<unsigned char> workspace(static_cast<std::int64_t>(measured.bytes()));
    cb::workspace_parts parts(workspace.data());
    auto call = make(parts);
    call.params.scores = all.score_plane();
    call.params.d_scores =
        kvp::view_bhs<const float>(all.d_scores->data(), of.batch, shape::heads, of.length);
    call.project(ctx, nullptr);
    measure(
        state, calls.stream,
        [&] {
            call.scores(ctx, Which == passes::both_kept);
            if (Which == passes::both) {
                call.states(ctx);
            }
            if (Which != passes::scores) {
                call.tokens_backward(ctx);
            }
        },
        measured.bytes());
}

/// What the GPU's matrix units do in practice: a bf16 product of three 8192 x 8192 matrices, fp32 sums.
void matrix_rate(benchmark::State& state) {
    constexpr std::int64_t n = 8192;
    const stream_of_calls calls;
    const lt_handle lt;
    const auto a = filled<kvp::bf16>(n * n, 0.25f, 1), b = filled<kvp::bf16>(n * n, 0.25f, 2),
               c = filled<kvp::bf16>(n * n, 0.0f, 3);
    const buffer<unsigned char> workspace(static_cast<std::int64_t>(cb::cublaslt_bytes));
    measure(
        state, calls.stream,
        [&] {
            cb::multiply(kvp::cuda{calls.stream}, lt.handle, cb::matrix_of(a->data(), n, n, n), false,
                         cb::matrix_of(b->data(), n, n, n), true, cb::matrix_of(c->data(), n, n, n), false,
                         workspace.data());
        },
        cb::cublaslt_bytes);
    rate(state, 2.0 * n * n * n);
}

/// SP-KV's predictor on 16k hidden states, as wide as Qwen3-8B's, with a hidden layer of 1024.
void predictor(benchmark::State& state, bool both) {
    constexpr std::int32_t length = 16384, width = 4096, hidden = 1024, heads = 8;
    const stream_of_calls calls;
    const lt_handle lt;
    const kvp::cuda ctx{calls.stream};
    const auto states = filled<kvp::bf16>(std::int64_t{length} * width, 0.4f, 1);
    const auto w1 = filled<float>(std::int64_t{hidden} * width, 0.01f, 2),
               w2 = filled<float>(heads * hidden, 0.02f, 3),
               d_w1 = filled<float>(std::int64_t{hidden} * width, 0.0f, 2),
               d_w2 = filled<float>(heads * hidden, 0.0f, 3), b1 = filled<float>(hidden, 0.1f, 4),
               d_b1 = filled<float>(hidden, 0.0f, 4), scores = filled<float>(heads * length, 0.1f, 5);
    kvp::UtilityPredictor scorer;
    scorer.heads = heads;
    scorer.hidden = hidden;
    scorer.input.width = width;
    scorer.weights = {w1->data(), b1->data(), w2->data(), nullptr};
    const kvp::Sequences sequences{1, length};
    const auto rows = kvp::view_bhsd<const kvp::bf16>(states->data(), 1, 1, length, width);
    const kvp::HiddenBackward<kvp::bf16> call{rows, sequences,
                                              kvp::view_bhs<const float>(scores->data(), 1, heads, length)};
    const std::size_t bytes = both ? kvp::score_hidden_backward_workspace_bytes(ctx, scorer, call)
                                   : kvp::score_hidden_workspace_bytes(ctx, scorer, rows, sequences);
    const buffer<unsigned char> workspace(static_cast<std::int64_t>(bytes));
    measure(
        state, calls.stream,
        [&] {
            if (both) {
                kvp::score_hidden_backward(ctx, scorer, call,
                                           {d_w1->data(), d_b1->data(), d_w2->data(), nullptr},
                                           {workspace.data(), bytes}, {.cublaslt = lt.handle});
            } else {
                kvp::score_hidden(ctx, scorer, rows, sequences,
                                  kvp::view_bhs(scores->data(), 1, heads, length), {workspace.data(), bytes},
                                  {.cublaslt = lt.handle});
            }
        },
        bytes);
    rate(state, (both ? 2.0 : 1.0) * 2.0 * length * width * hidden);
}

}  // namespace

int main(int argc, char** argv) {
    add("measured matrix rate", matrix_rate);
    for (const auto& [name, of] :
         {std::pair{"16k x 8", shape{1, 16384, 128}}, {"batch 8, 16k x 8", shape{8, 16384, 128}}}) {
        const shape s = of;
        const std::string prefix = std::string("mlstm without projections/") + name;
        add(prefix + "/forward",
            [=](benchmark::State& state) { without_projections<passes::scores>(state, s); });
        add(prefix + "/forward + backward",
            [=](benchmark::State& state) { without_projections<passes::both>(state, s); });
        add(prefix + "/forward + backward, states kept",
            [=](benchmark::State& state) { without_projections<passes::both_kept>(state, s); });
    }
    const shape s{1, 16384, 128};
    const std::string size = "16k x 8";
    using Narrow = kvp::mlstm_widths<128, 64>;
    const auto both = [&](const std::string& name, auto widths, const auto& scorer) {
        using Widths = decltype(widths);
        const auto blank = scorer;
        add(name + "/" + size + "/forward",
            [=](benchmark::State& state) { forward<Widths>(state, s, blank); });
        add(name + "/" + size + "/backward",
            [=](benchmark::State& state) { backward<Widths>(state, s, blank, false); });
        add(name + "/" + size + "/backward with inputs",
            [=](benchmark::State& state) { backward<Widths>(state, s, blank, true); });
    };
    both("mlstm", Narrow{}, kvp::mLSTMScorer<>{});
    both("linear", Narrow{}, kvp::LinearScorer<>{});
    kvp::MlpScorer<> mlp;
    mlp.hidden = 128;
    both("mlp", Narrow{}, mlp);
    kvp::WriteGateScorer<> gate;
    gate.hidden = 128;
    gate.input.rope.layout = kvp::rope_layout::half_split;
    both("write gate", Narrow{}, gate);
    kvp::ConvScorer<> conv;
    conv.rope.layout = kvp::rope_layout::half_split;
    both("convolution", Narrow{}, conv);
    const shape eight{8, 16384, 128};
    add("convolution/batch 8, 16k x 8/forward",
        [=](benchmark::State& state) { forward<Narrow>(state, eight, conv); });
    add("predictor/16k/forward", [](benchmark::State& state) { predictor(state, false); });
    add("predictor/16k/backward", [](benchmark::State& state) { predictor(state, true); });
    return run(argc, argv);
}
