// Losses on CUDA, and whole steps of scorer training: target, scores, loss, gradients, AdamW.
#include <kvpolicy/attention/cuda/dispatch_future_mass.cuh>
#include <kvpolicy/cuda_scorers.cuh>
#include <kvpolicy/kvpop.hpp>
#include <kvpolicy/losses/cuda/dispatch_boundary.cuh>
#include <kvpolicy/losses/cuda/dispatch_distill.cuh>
#include <kvpolicy/losses/cuda/dispatch_gates.cuh>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>

#include "../examples/train/adamw.cuh"
#include "cold.cuh"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

namespace kvp = kvpolicy;

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
struct filled : buffer<T> {
    filled(std::int64_t count, float scale, std::uint32_t seed) : buffer<T>(count) {
        fill<<<1024, 256>>>(this->data(), count, scale, seed);
        ok(cudaGetLastError());
        ok(cudaDeviceSynchronize());
    }
};

using Rules = kvp::Policy<kvp::Sink<>, kvp::Window<>, kvp::TopKBudget<>, kvp::Decay<1>>;
Rules all_params(std::int32_t budget) {
    return Rules{kvp::Sink<>{4}, kvp::Window<>{256}, kvp::TopKBudget<>{budget}, kvp::Decay<1>{-1e-4f}};
}

kvp::workspace_view view(const buffer<unsigned char>& memory) {
    return {memory.data(), static_cast<std::size_t>(memory.count())};
}

void boundary(benchmark::State& state, std::int32_t heads, std::int32_t layers, std::int32_t length,
              std::int32_t budget, std::int32_t drawn) {
    const stream_of_calls calls;
    const kvp::cuda ctx{calls.stream};
    const std::int64_t count = std::int64_t{heads} * layers * length;
    const filled<float> scores(count, 1.0f, 1), target(count, 1.0f, 2), d(count, 0.0f, 3);
    const filled<double> d_gamma(std::int64_t{heads} * layers, 0.0f, 0);
    const buffer<kvp::BoundaryValue> value(1);
    kvp::BoundaryLoss loss;
    if (drawn > 0) {
        loss.sampler.count = drawn;
    }
    kvp::BoundaryOptions options;
    options.layers = layers;
    const kvp::Sequences sequences{1, length};
    const std::size_t bytes = loss.workspace_bytes(ctx, all_params(budget), sequences, heads * layers);
    const buffer<unsigned char> workspace(static_cast<std::int64_t>(bytes));
    const auto plane = [&](const float* data) { return kvp::view_bhs(data, 1, heads * layers, length); };
    measure(
        state, calls.stream,
        [&] {
            loss(ctx, all_params(budget), plane(scores.data()), plane(target.data()), sequences,
                 kvp::view_bhs(d.data(), 1, heads * layers, length), d_gamma.data(), value.data(),
                 view(workspace), options);
        },
        bytes);
}

void sparsity(benchmark::State& state) {
    constexpr std::int32_t heads = 8, length = 16384;
    using Gated = kvp::Policy<kvp::Sink<4>, kvp::Window<256>, kvp::ThresholdGate<kvp::at_least>>;
    const stream_of_calls calls;
    const kvp::cuda ctx{calls.stream};
    const filled<float> scores(std::int64_t{heads} * length, 1.0f, 1),
        d(std::int64_t{heads} * length, 0.0f, 2);
    const buffer<kvp::LossValue> value(1);
    const kvp::Sequences sequences{1, length};
    const Gated policy{};
    const std::size_t bytes = kvp::GateSparsity{}.workspace_bytes(ctx, policy, sequences, heads);
    const buffer<unsigned char> workspace(static_cast<std::int64_t>(bytes));
    measure(
        state, calls.stream,
        [&] {
            kvp::GateSparsity{}(ctx, policy, kvp::view_bhs<const float>(scores.data(), 1, heads, length),
                                sequences, kvp::view_bhs(d.data(), 1, heads, length), value.data(),
                                view(workspace));
        },
        bytes);
}

/// Losses of 4096 tokens' logits.
struct logits {
    static constexpr std::int32_t length = 4096, vocabulary = 49152, top = 256;
    using T = kvp::bf16;
    filled<T> teacher{std::int64_t{length} * vocabulary, 2.0f, 1},
        student{std::int64_t{length} * vocabulary, 2.0f, 77}, d{std::int64_t{length} * vocabulary, 0.0f, 0},
        values{std::int64_t{length} * top, 0.0f, 0};
    filled<std::int32_t> indices{std::int64_t{length} * top, 0.0f, 0}, labels{length, 0.0f, 5};
    buffer<kvp::LossValue> value{1};
    kvp::Sequences sequences{1, length};

    template <class X>
    static kvp::rows_view<X> rows(X* data, std::int32_t dim = vocabulary) {
        return kvp::view_bhsd(data, 1, 1, length, dim);
    }
};

enum class row_call { cross_entropy, top, stored, whole };

void row_losses(benchmark::State& state, row_call which) {
    using T = logits::T;
    const stream_of_calls calls;
    const kvp::cuda ctx{calls.stream};
    const logits all;
    const auto of = [](const filled<T>& from) { return logits::rows(static_cast<const T*>(from.data())); };
    const kvp::TopDistillation kl{logits::top};
    const std::size_t bytes = kl.workspace_bytes(ctx, of(all.teacher), all.sequences);
    const buffer<unsigned char> workspace(static_cast<std::int64_t>(bytes));
    const auto values = logits::rows(all.values.data(), logits::top);
    const auto indices = logits::rows(all.indices.data(), logits::top);
    kvp::top_logits<T>(ctx, of(all.teacher), all.sequences, values, indices, {});
    measure(
        state, calls.stream,
        [&] {
            if (which == row_call::top) {
                kvp::top_logits<T>(ctx, of(all.teacher), all.sequences, values, indices, {});
            } else if (which == row_call::stored) {
                kl(ctx, values, indices, of(all.student), all.sequences, logits::rows(all.d.data()),
                   all.value.data(), view(workspace));
            } else if (which == row_call::whole) {
                kl(ctx, of(all.teacher), of(all.student), all.sequences, logits::rows(all.d.data()),
                   all.value.data(), view(workspace));
            } else {
                kvp::CrossEntropy{}(
                    ctx, kvp::view_bhs<const std::int32_t>(all.labels.data(), 1, 1, logits::length),
                    of(all.student), all.sequences, logits::rows(all.d.data()), all.value.data(),
                    view(workspace));
            }
        },
        bytes);
}

/// A stream of low priority beside another, and the events that lead there and back.
struct side_stream {
    cudaStream_t stream = nullptr;
    cudaEvent_t begun = nullptr, done = nullptr;

    side_stream() {
        int least = 0, most = 0;
        ok(cudaDeviceGetStreamPriorityRange(&least, &most));
        ok(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, least));
        ok(cudaEventCreateWithFlags(&begun, cudaEventDisableTiming));
        ok(cudaEventCreateWithFlags(&done, cudaEventDisableTiming));
    }
    side_stream(const side_stream&) = delete;
    side_stream& operator=(const side_stream&) = delete;
    ~side_stream() {
        ok(cudaEventDestroy(begun));
        ok(cudaEventDestroy(done));
        ok(cudaStreamDestroy(stream));
    }
    void fork(cudaStream_t from) const {
        ok(cudaEventRecord(begun, from));
        ok(cudaStreamWaitEvent(stream, begun, 0));
    }
    void join() const { ok(cudaEventRecord(done, stream)); }
};

/// One layer: 32 query heads, 8 KV heads, 16k tokens, head_dim 128. `part`: 0 the whole step, 1 its target, 2
/// the rest; 3 the whole step with the scores made on a stream of their own while the target is ranked.
template <class Widths, class S>
void step(benchmark::State& state, S scorer, std::int32_t delay, int part) {
    using T = kvp::bf16;
    constexpr std::int32_t query_heads = 32, heads = 8, length = 16384, dim = 128;
    const stream_of_calls calls;
    const kvp::cuda ctx{calls.stream};
    scorer.heads = heads;
    scorer.head_dim_qk = dim;
    scorer.head_dim_vo = dim;
    std::vector<train::DeviceAdamW::Array> arrays;
    typename S::template parameters<float> gradients{};
    auto weights = scorer.weights;
    kvp::for_each_parameter(scorer, gradients, [&](const char*, float*&, std::size_t count, bool decays) {
        arrays.push_back({count, decays});
    });
    const train::DeviceAdamW optimizer({}, arrays);
    fill<<<64, 256>>>(optimizer.parameters.data(), static_cast<std::int64_t>(optimizer.count()),
                      0.4f / std::sqrt(2.0f * dim), 3u);
    std::size_t next = 0;
    kvp::for_each_parameter(scorer, gradients, [&](const char*, float*& array, std::size_t count, bool) {
        array = count == 0 ? nullptr : optimizer.gradients.data() + optimizer.begin(next);
        ++next;
    });
    next = 0;
    kvp::for_each_parameter(scorer, weights, [&](const char*, const float*& array, std::size_t count, bool) {
        array = count == 0 ? nullptr : optimizer.parameters.data() + optimizer.begin(next);
        ++next;
    });
    scorer.weights = weights;
    const std::int64_t tokens = std::int64_t{heads} * length;
    const filled<T> q(std::int64_t{query_heads} * length * dim, 0.3f, 1u << 22),
        k(tokens * dim, 0.3f, 1u << 20), v(tokens * dim, 0.3f, 1u << 21);
    const filled<float> lse(std::int64_t{query_heads} * length, 0.0f, 0), target(tokens, 0.0f, 0),
        scores(tokens, 0.0f, 0), d(tokens, 0.0f, 0);
    const buffer<kvp::BoundaryValue> value(1);
    const auto Q = kvp::view_bhsd<const T>(q.data(), 1, query_heads, length, dim);
    const auto K = kvp::view_bhsd<const T>(k.data(), 1, heads, length, dim),
               V = kvp::view_bhsd<const T>(v.data(), 1, heads, length, dim);
    const auto LSE = kvp::view_bhs(lse.data(), 1, query_heads, length);
    const auto plane = [&](float* data) { return kvp::view_bhs(data, 1, heads, length); };
    const auto read = [&](float* data) { return kvp::view_bhs<const float>(data, 1, heads, length); };
    const kvp::Sequences sequences{1, length};
    kvp::BoundaryLoss loss;
    loss.sampler.count = 1024;
    const Rules policy = all_params(3836);
    kvp::ScoreBackward<T> call{K, V, sequences, delay, read(d.data())};
    call.kept = true;
    kvp::ScoreOptions options;
    options.for_backward = true;
    // The scorer's is its own, since the backward pass goes on from what the scores leave there.
    const std::size_t scorer_bytes =
        std::max(kvp::score_sequence_workspace_bytes<Widths>(ctx, scorer, K, V, sequences, options),
                 kvp::score_sequence_backward_workspace_bytes<Widths>(ctx, scorer, call));
    const std::size_t bytes = std::max(kvp::future_mass_workspace_bytes<T>(ctx, Q, K),
                                       loss.workspace_bytes(ctx, policy, sequences, heads));
    const buffer<unsigned char> workspace(static_cast<std::int64_t>(bytes)),
        of_scorer(static_cast<std::int64_t>(scorer_bytes));
    const auto make_target = [&] {
        kvp::causal_lse<T, kvp::head_dims<128>>(ctx, {}, Q, K, sequences, LSE, view(workspace));
        kvp::FutureMassOptions options;
        options.window = 256;
        options.beta = 2.0f;
        kvp::future_mass<T, kvp::head_dims<128>>(ctx, {}, Q, K, kvp::plane_view<const float>(LSE), sequences,
                                                 plane(target.data()), view(workspace), options);
    };
    const side_stream side;
    const auto make_scores = [&](cudaStream_t stream) {
        kvp::score_sequence<Widths>(kvp::cuda{stream}, scorer, K, V, sequences, delay, plane(scores.data()),
                                    view(of_scorer), options);
    };
    kvp::BoundaryOptions beside;
    if (part == 3) {
        beside.scores_ready = side.done;
    }
    const auto learn = [&] {
        ok(cudaMemsetAsync(optimizer.gradients.data(), 0, optimizer.count() * sizeof(float), calls.stream));
        if (part == 3) {
            side.fork(calls.stream);
            make_scores(side.stream);
            side.join();
        } else {
            make_scores(calls.stream);
        }
        loss(ctx, policy, read(scores.data()), read(target.data()), sequences, plane(d.data()), nullptr,
             value.data(), view(workspace), beside);
        kvp::score_sequence_backward<Widths>(ctx, scorer, call, gradients, view(of_scorer));
        optimizer.step(1e-3, 1, nullptr, calls.stream);
    };
    make_target();
    measure(
        state, calls.stream,
        [&] {
            if (part != 2) {
                make_target();
            }
            if (part != 1) {
                learn();
            }
        },
        bytes + scorer_bytes);
}

}  // namespace

int main(int argc, char** argv) {
    add("boundary/16k x 8, all queries", [](benchmark::State& s) { boundary(s, 8, 1, 16384, 3836, 0); });
    add("boundary/16k x 8, 1024 queries", [](benchmark::State& s) { boundary(s, 8, 1, 16384, 3836, 1024); });
    add("boundary/4k x 2, 6 layers, 1024 queries",
        [](benchmark::State& s) { boundary(s, 2, 6, 4096, 188, 1024); });
    add("gate sparsity/16k x 8", sparsity);
    const std::string rows = "/4k x 49152";
    add("cross-entropy" + rows, [](benchmark::State& s) { row_losses(s, row_call::cross_entropy); });
    add("top 256 logits" + rows, [](benchmark::State& s) { row_losses(s, row_call::top); });
    add("KL of 256 stored logits" + rows, [](benchmark::State& s) { row_losses(s, row_call::stored); });
    add("KL of the top 256 logits" + rows, [](benchmark::State& s) { row_losses(s, row_call::whole); });
    using Widths = kvp::mlstm_widths<128, 64>;
    const char* const parts[] = {"", ", target alone", ", without the target", ", scores beside ranks"};
    for (int part = 0; part < 4; ++part) {
        add(std::string("step/16k x 8, mlp") + parts[part], [part](benchmark::State& s) {
            kvp::MlpScorer<> mlp;
            mlp.hidden = 128;
            step<Widths>(s, mlp, 0, part);
        });
        if (part != 1) {
            add(std::string("step/16k x 8, mlstm") + parts[part],
                [part](benchmark::State& s) { step<Widths>(s, kvp::mLSTMScorer<>{}, 256, part); });
        }
    }
    return run(argc, argv);
}
