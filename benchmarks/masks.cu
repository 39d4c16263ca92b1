// build_mask on CUDA: ranks, running cutoffs and expiries of a policy's whole mask, everything included.
// Scores are those of benchmarks/baselines/masks.py, bit for bit.
#include <kvpolicy/cuda.cuh>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/shared_budget.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "cold.cuh"

#include <cstdint>
#include <string>

namespace kvp = kvpolicy;

namespace {

using namespace bench;

enum class order { random, equal, improving, worsening, jump, level };

__global__ void fill(float* scores, std::int64_t count, std::int32_t length, int kind, float log_gamma) {
    const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= count) {
        return;
    }
    const auto t = static_cast<std::int32_t>(i % length);
    const auto step = static_cast<float>(t);
    float x = hashed(static_cast<std::uint32_t>(i));
    switch (static_cast<order>(kind)) {
        case order::random:
            break;
        case order::equal:
            x = 1.5f;
            break;
        case order::improving:
            x = 0.25f * step;
            break;
        case order::worsening:
            x = -0.25f * step;
            break;
        case order::jump:
            x = t < length / 2 ? x : step;
            break;
        case order::level:
            x = 1000.0f + step * log_gamma;
            break;  // priorities that fp32 cannot tell apart
    }
    scores[i] = x;
}

struct shape {
    std::int32_t batch, heads, length;
    [[nodiscard]] std::int64_t count() const { return std::int64_t{batch} * heads * length; }
};

/// Scores and masks of one shape at a time.
struct tensors {
    float* scores = nullptr;
    kvp::expiry_t* expiry = nullptr;
    void* workspace = nullptr;
    std::size_t workspace_bytes = 0;

    tensors(const shape& of, order kind, float log_gamma, std::size_t bytes) : workspace_bytes(bytes) {
        scores = device<float>(of.count());
        expiry = device<kvp::expiry_t>(of.count());
        ok(cudaMalloc(&workspace, bytes == 0 ? 1 : bytes));
        fill<<<static_cast<unsigned>((of.count() + 255) / 256), 256>>>(scores, of.count(), of.length,
                                                                       static_cast<int>(kind), log_gamma);
        ok(cudaGetLastError());
        ok(cudaDeviceSynchronize());
    }
    tensors(const tensors&) = delete;
    tensors& operator=(const tensors&) = delete;
    ~tensors() {
        ok(cudaFree(scores));
        ok(cudaFree(expiry));
        ok(cudaFree(workspace));
    }
};

template <class P>
void mask(benchmark::State& state, const P& policy, const shape& of, order kind, float log_gamma) {
    const stream_of_calls calls;
    const kvp::cuda ctx{calls.stream};
    const kvp::Sequences sequences{of.batch, of.length};
    const tensors data(of, kind, log_gamma,
                       kvp::build_mask_workspace_bytes(ctx, policy, sequences, of.heads));
    measure(
        state, calls.stream,
        [&] {
            kvp::build_mask(ctx, policy,
                            kvp::view_bhs<const float>(data.scores, of.batch, of.heads, of.length), sequences,
                            kvp::view_bhs(data.expiry, of.batch, of.heads, of.length),
                            {data.workspace, data.workspace_bytes});
        },
        data.workspace_bytes);
}

/// The block sort alone, in sizes that tuning may choose from.
template <int Threads, int Items, int Bits>
void sort_variant(benchmark::State& state, const shape& of, float log_gamma) {
    using namespace kvp::cuda_backend;
    const stream_of_calls calls;
    const kvp::cuda ctx{calls.stream};
    const tensors data(of, order::random, log_gamma, 0);
    mask_params<kvp::detail::no_gate, kvp::detail::keep_set<>> params{};
    params.scores = kvp::view_bhs<const float>(data.scores, of.batch, of.heads, of.length);
    params.batch = of.batch;
    params.heads = of.heads;
    params.length = of.length;
    params.chunks = (of.length + mask_chunk - 1) / mask_chunk;
    params.all_params.common = {4, 256, 3836, 1, log_gamma, 0.0f};
    const std::int64_t planes = std::int64_t{of.batch} * of.heads;
    const ranking<std::uint16_t> ranks{device<std::uint16_t>(of.count()), device<std::uint16_t>(of.count()),
                                       device<cutoff_checkpoint>(planes * params.chunks),
                                       device<std::int32_t>(planes)};
    measure(
        state, calls.stream, [&] { launch_rank<Threads, Items, Bits>(ctx, params, ranks, false); }, 0);
    ok(cudaFree(ranks.rank));
    ok(cudaFree(ranks.order));
    ok(cudaFree(ranks.checkpoints));
    ok(cudaFree(ranks.competitors));
}

}  // namespace

int main(int argc, char** argv) {
    using Budget = kvp::Policy<kvp::Sink<4>, kvp::Window<256>, kvp::TopKBudget<>, kvp::Decay<1>>;
    using Capped =
        kvp::Policy<kvp::Sink<4>, kvp::Window<256>, kvp::ThresholdGate<kvp::above>, kvp::TopKBudget<>>;
    using Gated = kvp::Policy<kvp::Window<256>, kvp::ThresholdGate<kvp::at_least>>;
    const auto budget = [](std::int32_t k, float log_gamma) {
        return Budget(kvp::Sink<4>{}, kvp::Window<256>{}, kvp::TopKBudget<>{k}, kvp::Decay<1>(log_gamma));
    };
    const struct {
        const char* name;
        shape of;
    } shapes[] = {{"16k x 8", {1, 8, 16384}}, {"16k x 1024", {128, 8, 16384}}, {"1M x 8", {1, 8, 1 << 20}}};
    for (const auto& [name, of] : shapes) {
        const shape s = of;
        const std::string prefix = std::string("mask/") + name + "/";
        add(prefix + "random",
            [=](benchmark::State& state) { mask(state, budget(3836, 0.0f), s, order::random, 0.0f); });
        add(prefix + "random, decay",
            [=](benchmark::State& state) { mask(state, budget(3836, -1e-3f), s, order::random, -1e-3f); });
        // The heads of a layer share 8 * 3836 slots: one sort of all their keys.
        for (const float log_gamma : {0.0f, -1e-3f}) {
            const kvp::Policy<kvp::Sink<4>, kvp::Window<256>, kvp::SharedBudget<>, kvp::Decay<1>> shared(
                kvp::Sink<4>{}, kvp::Window<256>{}, kvp::SharedBudget<>{3836}, kvp::Decay<1>(log_gamma));
            add(prefix + (log_gamma == 0.0f ? "shared, random" : "shared, random, decay"),
                [=](benchmark::State& state) { mask(state, shared, s, order::random, log_gamma); });
        }
        const struct {
            const char* text;
            order kind;
            std::int32_t k;
            float log_gamma;
        } hard[] = {{"equal", order::equal, 3836, 0.0f},
                    {"improving", order::improving, 3836, 0.0f},
                    {"worsening", order::worsening, 3836, 0.0f},
                    {"jump", order::jump, 3836, 0.0f},
                    {"improving, k 100", order::improving, 100, 0.0f},
                    {"jump, k 100", order::jump, 100, 0.0f},
                    {"equal, decay", order::equal, 3836, -1e-3f},
                    {"priorities level beyond fp32, decay", order::level, 3836, -1e-3f}};
        for (const auto& [text, kind, k, log_gamma] : hard) {
            const auto policy = budget(k, log_gamma);
            const order which = kind;
            const float decay = log_gamma;
            add(prefix + text, [=](benchmark::State& state) { mask(state, policy, s, which, decay); });
        }
        add(prefix + "capped gate", [=](benchmark::State& state) {
            mask(state,
                 Capped(kvp::Sink<4>{}, kvp::Window<256>{}, kvp::ThresholdGate<kvp::above>(2.0f),
                        kvp::TopKBudget<>{512}),
                 s, order::random, 0.0f);
        });
        add(prefix + "gate", [=](benchmark::State& state) {
            mask(state, Gated(kvp::Window<256>{}, kvp::ThresholdGate<kvp::at_least>(2.0f)), s, order::random,
                 0.0f);
        });
    }
    // How time grows with tokens and with heads.
    const struct {
        const char* name;
        shape of;
    } sizes[] = {{"16k x 64", {8, 8, 1 << 14}},     {"16k x 256", {32, 8, 1 << 14}},
                 {"16k x 4096", {512, 8, 1 << 14}}, {"64k x 8", {1, 8, 1 << 16}},
                 {"256k x 8", {1, 8, 1 << 18}},     {"4M x 8", {1, 8, 1 << 22}},
                 {"1M x 1", {1, 1, 1 << 20}},       {"1M x 32", {4, 8, 1 << 20}}};
    for (const auto& [name, of] : sizes) {
        const shape s = of;
        add(std::string("growth/") + name,
            [=](benchmark::State& state) { mask(state, budget(3836, 0.0f), s, order::random, 0.0f); });
    }
    add("mask/16k x 1/decay step 64", [=](benchmark::State& state) {
        mask(state,
             kvp::Policy<kvp::Window<256>, kvp::TopKBudget<>, kvp::Decay<64>>(
                 kvp::Window<256>{}, kvp::TopKBudget<>{3836}, kvp::Decay<64>(-1e-2f)),
             shape{1, 1, 16384}, order::random, 0.0f);
    });
    for (const std::int32_t batch : {1, 128}) {
        const shape s{batch, 8, 16384};
        const std::string prefix = "block sort/16k x " + std::to_string(8 * batch) + "/";
        for (const float g : {0.0f, -1e-3f}) {
            const std::string end = g == 0.0f ? "" : ", decay";
            add(prefix + "1024 x 16, 4 bits" + end,
                [=](benchmark::State& state) { sort_variant<1024, 16, 4>(state, s, g); });
            add(prefix + "1024 x 16, 5 bits" + end,
                [=](benchmark::State& state) { sort_variant<1024, 16, 5>(state, s, g); });
            add(prefix + "1024 x 16, 6 bits" + end,
                [=](benchmark::State& state) { sort_variant<1024, 16, 6>(state, s, g); });
            add(prefix + "512 x 32, 4 bits" + end,
                [=](benchmark::State& state) { sort_variant<512, 32, 4>(state, s, g); });
            add(prefix + "512 x 32, 6 bits" + end,
                [=](benchmark::State& state) { sort_variant<512, 32, 6>(state, s, g); });
        }
    }
    return run(argc, argv);
}
