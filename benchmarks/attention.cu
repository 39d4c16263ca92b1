// Attention on CUDA for prefill and training: the forward and backward pass through lifetimes, soft gates,
// and the future-attention target. Tensors and scores are those of benchmarks/baselines/attention.py, bit for
// bit; lifetimes come from build_mask of the scores. Beside every time stand exact live-pair FLOPs (4 D a
// pair forward, 10 D backward, 2 D without values), the rate that they make, and the bytes that a call needs
// beyond its tensors.
#include <kvpolicy/cuda.cuh>
#include <kvpolicy/h2o.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/snapkv.hpp>
#include <kvpolicy/tova.hpp>

#include "cold.cuh"

#include <algorithm>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

namespace kvp = kvpolicy;

namespace {

using namespace bench;
using kvp::bf16;
using Dims = kvp::head_dims<64, 128, 256>;

struct shape {
    std::int32_t batch, length, dim;
    static constexpr std::int32_t heads = 8, group = 4;
    [[nodiscard]] std::int32_t query_heads() const { return heads * group; }
    [[nodiscard]] std::int64_t keys() const { return std::int64_t{batch} * heads * length; }
    [[nodiscard]] std::int64_t queries() const { return keys() * group; }
};

__global__ void fill_normal(bf16* to, std::int64_t count, std::uint32_t seed) {
    const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < count) {
        to[i] = bf16(0.433f * hashed(static_cast<std::uint32_t>(i) + seed));  // variance 1
    }
}

__global__ void fill_scores(float* to, std::int64_t count) {
    const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < count) {
        to[i] = hashed(static_cast<std::uint32_t>(i));
    }
}

/// Log-biases of soft gates: the log-sigmoid of a score.
__global__ void fill_biases(float* to, std::int64_t count) {
    const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i < count) {
        to[i] = -log1pf(expf(-hashed(static_cast<std::uint32_t>(i))));
    }
}

unsigned blocks_of(std::int64_t count) { return static_cast<unsigned>((count + 255) / 256); }

/// Numbers that a baseline makes too: each tensor has a seed.
struct rows {
    buffer<bf16> memory;
    shape of;
    std::int32_t heads;

    rows(const shape& s, std::int32_t head_count, std::uint32_t seed)
        : memory(std::int64_t{s.batch} * head_count * s.length * s.dim), of(s), heads(head_count) {
        fill_normal<<<blocks_of(memory.count()), 256>>>(memory.data(), memory.count(), seed);
        ok(cudaGetLastError());
        ok(cudaDeviceSynchronize());
    }
    [[nodiscard]] kvp::rows_view<bf16> view() const {
        return kvp::view_bhsd(memory.data(), of.batch, heads, of.length, of.dim);
    }
    [[nodiscard]] kvp::rows_view<const bf16> read() const { return view(); }
};

/// `elements` of bf16: the tensors that the call reads and writes.
void report(benchmark::State& state, double pairs, double flops_a_pair, std::int64_t elements) {
    state.counters["tensor_bytes"] = 2.0 * static_cast<double>(elements);
    state.counters["live_pairs"] = pairs;
    const double flops = pairs * flops_a_pair;
    state.counters["flops"] = flops;
    state.counters["tflops"] = flops / state.counters["median_ms"] * 1e-9;
}

/// Runs `call(ctx, workspace)`, timed, with as much workspace as it needs.
template <class Call>
void measure_with_workspace(benchmark::State& state, std::size_t bytes, const Call& call) {
    const stream_of_calls calls;
    const kvp::cuda ctx{calls.stream};
    const buffer<unsigned char> memory(static_cast<std::int64_t>(bytes));
    const kvp::workspace_view workspace{memory.data(), bytes};
    measure(
        state, calls.stream, [&] { call(ctx, workspace); }, bytes);
}

// ---- the future-attention target --------------------------------------------------------------------------

constexpr std::int32_t window = 256;

void causal_lse(benchmark::State& state, const shape& s) {
    const rows q(s, s.query_heads(), 1), k(s, s.heads, 2);
    const buffer<float> lse(s.queries());
    const kvp::Sequences sequences{s.batch, s.length};
    measure_with_workspace(state, kvp::future_mass_workspace_bytes<bf16>(kvp::cuda{}, q.read(), k.read()),
                           [&](const kvp::cuda& ctx, kvp::workspace_view workspace) {
                               kvp::causal_lse<bf16, Dims>(
                                   ctx, {}, q.read(), k.read(), sequences,
                                   kvp::view_bhs(lse.data(), s.batch, s.query_heads(), s.length), workspace);
                           });
    const double n = s.length;
    report(state, n * (n + 1) / 2 * s.batch * s.query_heads(), 2.0 * s.dim, (s.queries() + s.keys()) * s.dim);
}

void future_mass(benchmark::State& state, const shape& s, const kvp::FutureMassOptions& options) {
    const rows q(s, s.query_heads(), 1), k(s, s.heads, 2);
    const buffer<float> lse(s.queries()), target(s.keys());
    const kvp::Sequences sequences{s.batch, s.length};
    const auto of_queries = kvp::view_bhs(lse.data(), s.batch, s.query_heads(), s.length);
    const std::size_t bytes = kvp::future_mass_workspace_bytes<bf16>(kvp::cuda{}, q.read(), k.read());
    {
        const buffer<unsigned char> memory(static_cast<std::int64_t>(bytes));
        kvp::causal_lse<bf16, Dims>(kvp::cuda{}, {}, q.read(), k.read(), sequences, of_queries,
                                    {memory.data(), bytes});
        ok(cudaDeviceSynchronize());
    }
    measure_with_workspace(state, bytes, [&](const kvp::cuda& ctx, kvp::workspace_view workspace) {
        kvp::future_mass<bf16, Dims>(ctx, {}, q.read(), k.read(), of_queries, sequences,
                                     kvp::view_bhs(target.data(), s.batch, s.heads, s.length), workspace,
                                     options);
    });
    const double n = s.length - window;
    report(state, n * (n + 1) / 2 * s.batch * s.query_heads(), 2.0 * s.dim, (s.queries() + s.keys()) * s.dim);
}

void add_future_mass() {
    constexpr float infinity = std::numeric_limits<float>::infinity();
    const struct {
        const char* name;
        shape of;
        float beta;
    } cases[] = {{"16k", {1, 1 << 14, 128}, 1.0f},
                 {"32k", {1, 1 << 15, 128}, 1.0f},
                 {"16k, beta 2", {1, 1 << 14, 128}, 2.0f},
                 {"16k, beta 7.5", {1, 1 << 14, 128}, 7.5f},
                 {"16k, beta infinite", {1, 1 << 14, 128}, infinity},
                 {"16k, d 64", {1, 1 << 14, 64}, 1.0f},
                 {"8 x 4k", {8, 1 << 12, 128}, 1.0f},
                 {"32 x 2k", {32, 1 << 11, 128}, 1.0f}};
    for (const auto& c : cases) {
        kvp::FutureMassOptions options;
        options.window = window;
        options.beta = c.beta;
        const shape s = c.of;
        add(
            std::string("future mass/") + c.name,
            [=](benchmark::State& state) { future_mass(state, s, options); }, 15);
        if (c.beta == 1.0f) {
            add(
                std::string("causal lse/") + c.name, [=](benchmark::State& state) { causal_lse(state, s); },
                15);
        }
    }
}

// ---- masks of observed policies ---------------------------------------------------------------------------

template <class P>
void observed_mask(benchmark::State& state, const shape& s, const P& policy) {
    const rows q(s, s.query_heads(), 1), k(s, s.heads, 2);
    const buffer<kvp::expiry_t> expiry(s.keys());
    const kvp::Sequences sequences{s.batch, s.length};
    measure_with_workspace(
        state, kvp::build_observed_mask_workspace_bytes<bf16>(kvp::cuda{}, policy, q.read(), k.read()),
        [&](const kvp::cuda& ctx, kvp::workspace_view workspace) {
            kvp::build_observed_mask<P, bf16, kvp::head_dims<128>>(
                ctx, policy, {}, q.read(), k.read(), sequences,
                kvp::view_bhs(expiry.data(), s.batch, s.heads, s.length), workspace);
        });
    // Operations of dense attention, so that rates compare times.
    const double n = s.length;
    report(state, n * (n + 1) / 2 * s.batch * s.query_heads(), 4.0 * s.dim, (s.queries() + s.keys()) * s.dim);
}

/// Attention of the same prompt, in which nothing is evicted.
void dense(benchmark::State& state, const shape& s) {
    const rows q(s, s.query_heads(), 1), k(s, s.heads, 2), v(s, s.heads, 3);
    const buffer<bf16> out(s.queries() * s.dim);
    const kvp::kv_view<bf16> keys{k.read(), v.read()};
    const kvp::Sequences sequences{s.batch, s.length};
    const auto to = kvp::view_bhsd(out.data(), s.batch, s.query_heads(), s.length, s.dim);
    measure_with_workspace(
        state, kvp::attend_workspace_bytes<bf16, Dims>(kvp::cuda{}, {}, q.read(), keys, sequences),
        [&](const kvp::cuda& ctx, kvp::workspace_view workspace) {
            kvp::attend<bf16, Dims>(ctx, {}, q.read(), keys, sequences, to, {}, workspace);
        });
    const double n = s.length;
    report(state, n * (n + 1) / 2 * s.batch * s.query_heads(), 4.0 * s.dim,
           2 * (s.queries() + s.keys()) * s.dim);
}

void add_observed_masks() {
    const shape s{1, 1 << 14, 128};
    add(
        "forward/16k, dense", [=](benchmark::State& state) { dense(state, s); }, 10);
    add(
        "observed mask/16k, H2O",
        [=](benchmark::State& state) { observed_mask(state, s, kvp::h2o_for_total(4096)); }, 10);
    add(
        "observed mask/16k, H2O in chunks of 2k",
        [=](benchmark::State& state) {
            observed_mask(state, s, kvp::h2o_for_total(4096, {kvp::ObservedPrefill::in_chunks(2048)}));
        },
        10);
    add(
        "observed mask/16k, H2O, maximum over the group",
        [=](benchmark::State& state) {
            observed_mask(state, s, kvp::h2o_for_total(4096, {{}, kvp::group_aggregate::max}));
        },
        10);
    add(
        "observed mask/16k, TOVA",
        [=](benchmark::State& state) { observed_mask(state, s, kvp::tova_for_total(4096)); }, 10);
    add(
        "observed mask/16k, SnapKV",
        [=](benchmark::State& state) { observed_mask(state, s, kvp::snapkv_for_total(4096)); }, 10);
}

// ---- through lifetimes ------------------------------------------------------------------------------------

/// Scores of gates that are open in runs of `least` to 4 `least` tokens, a quarter of all, and
/// shut between them.
std::vector<float> scores_in_runs(std::int64_t count, std::uint32_t least) {
    std::vector<float> scores(static_cast<std::size_t>(count), -3.0f);
    std::uint32_t state = 1;
    const auto draw = [&state](std::uint32_t below) {
        state = state * 1664525u + 1013904223u;
        return static_cast<std::size_t>((state >> 8) % below);
    };
    for (std::size_t t = draw(8 * least); t < scores.size();) {
        const std::size_t open = least + draw(3 * least + 1);
        std::fill(scores.begin() + static_cast<std::ptrdiff_t>(t),
                  scores.begin() + static_cast<std::ptrdiff_t>(std::min(t + open, scores.size())), 3.0f);
        t += open + 3 * least + draw(9 * least + 1);
    }
    return scores;
}

/// Lifetimes that a policy gives the scores, and how many pairs of a query and a key they leave,
/// counted exactly.
struct lifetimes {
    buffer<kvp::expiry_t> expiry;
    double pairs = 0.0;

    template <class P>
    lifetimes(const shape& s, const P& policy, std::uint32_t runs) : expiry(s.keys()) {
        const buffer<float> scores(s.keys());
        if (runs != 0) {
            const std::vector<float> values = scores_in_runs(s.keys(), runs);
            ok(cudaMemcpy(scores.data(), values.data(), values.size() * sizeof(float),
                          cudaMemcpyHostToDevice));
        } else {
            fill_scores<<<blocks_of(s.keys()), 256>>>(scores.data(), s.keys());
            ok(cudaGetLastError());
        }
        const kvp::cuda ctx{};
        const kvp::Sequences sequences{s.batch, s.length};
        const std::size_t bytes = kvp::build_mask_workspace_bytes(ctx, policy, sequences, s.heads);
        const buffer<unsigned char> memory(static_cast<std::int64_t>(bytes));
        kvp::build_mask(ctx, policy, kvp::view_bhs<const float>(scores.data(), s.batch, s.heads, s.length),
                        sequences, kvp::view_bhs(expiry.data(), s.batch, s.heads, s.length),
                        {memory.data(), bytes});
        const buffer<std::int32_t> live(s.keys());
        kvp::live_keys(ctx, kvp::view_bhs<const kvp::expiry_t>(expiry.data(), s.batch, s.heads, s.length),
                       sequences, kvp::view_bhs(live.data(), s.batch, s.heads, s.length));
        std::vector<std::int32_t> counts(static_cast<std::size_t>(s.keys()));
        ok(cudaMemcpy(counts.data(), live.data(), counts.size() * sizeof(counts[0]), cudaMemcpyDeviceToHost));
        for (const std::int32_t of_query : counts) {
            pairs += static_cast<double>(of_query) * shape::group;
        }
    }
};

/// Everything that a forward call, and a backward one where it is wanted, works on.
struct attention_tensors {
    shape s;
    rows q, k, v;
    lifetimes life;
    buffer<bf16> out;
    buffer<float> lse;
    buffer<float> bias;
    buffer<std::int32_t> bias_from;
    bool is_soft;
    kvp::AttendOptions options;

    template <class P>
    attention_tensors(const shape& of, const P& policy, bool soft, std::uint32_t runs = 0)
        : s(of),
          q(s, s.query_heads(), 1),
          k(s, s.heads, 2),
          v(s, s.heads, 3),
          life(s, policy, runs),
          out(s.queries() * s.dim),
          lse(s.queries()),
          bias(soft ? s.keys() : 0),
          bias_from(s.heads),
          is_soft(soft) {
        if (soft) {
            fill_biases<<<blocks_of(s.keys()), 256>>>(bias.data(), s.keys());
            ok(cudaGetLastError());
        }
        const std::vector<std::int32_t> from(shape::heads, window);
        ok(cudaMemcpy(bias_from.data(), from.data(), from.size() * sizeof(from[0]), cudaMemcpyHostToDevice));
    }

    [[nodiscard]] kvp::kv_view<bf16> keys() const {
        kvp::kv_view<bf16> all{k.read(), v.read()};
        all.mask.expiry = kvp::view_bhs<const kvp::expiry_t>(life.expiry.data(), s.batch, s.heads, s.length);
        if (is_soft) {
            all.mask.log_bias = kvp::view_bhs<const float>(bias.data(), s.batch, s.heads, s.length);
            all.mask.bias_from = bias_from.data();
        }
        return all;
    }
    [[nodiscard]] kvp::Sequences sequences() const { return {s.batch, s.length}; }
    [[nodiscard]] kvp::rows_view<bf16> out_view() const {
        return kvp::view_bhsd(out.data(), s.batch, s.query_heads(), s.length, s.dim);
    }
    [[nodiscard]] kvp::plane_view<float> lse_view() const {
        return kvp::view_bhs(lse.data(), s.batch, s.query_heads(), s.length);
    }
    void forward(const kvp::cuda& ctx, kvp::workspace_view workspace) const {
        kvp::attend<bf16, Dims>(ctx, {}, q.read(), keys(), sequences(), out_view(), lse_view(), workspace,
                                options);
    }
    [[nodiscard]] std::size_t forward_bytes() const {
        return kvp::attend_workspace_bytes<bf16, Dims>(kvp::cuda{}, {}, q.read(), keys(), sequences());
    }
};

/// Forward and backward in one call, as a training step makes them; with soft gates also the gradient
/// of their biases.
template <class P>
void forward_and_backward(benchmark::State& state, const shape& s, const P& policy, bool soft,
                          bool deterministic) {
    const attention_tensors tensors(s, policy, soft);
    const rows d_out(s, s.query_heads(), 4), d_q(s, s.query_heads(), 5), d_k(s, s.heads, 6),
        d_v(s, s.heads, 7);
    const buffer<float> d_bias(soft ? s.keys() : 0);
    const kvp::SavedForward<bf16> given{tensors.out_view(), tensors.lse_view(), d_out.read()};
    kvp::AttentionGrads<bf16> into{d_q.view(), d_k.view(), d_v.view()};
    if (soft) {
        into.d_log_bias = kvp::view_bhs(d_bias.data(), s.batch, s.heads, s.length);
    }
    const kvp::BackwardOptions options{.deterministic = deterministic};
    const std::size_t bytes =
        std::max(tensors.forward_bytes(),
                 kvp::attend_backward_workspace_bytes<bf16, Dims>(
                     kvp::cuda{}, {}, tensors.q.read(), tensors.keys(), tensors.sequences(), options));
    measure_with_workspace(state, bytes, [&](const kvp::cuda& ctx, kvp::workspace_view workspace) {
        tensors.forward(ctx, workspace);
        kvp::attend_backward<bf16, Dims>(ctx, {}, tensors.q.read(), tensors.keys(), tensors.sequences(),
                                         given, into, workspace, options);
    });
    report(state, tensors.life.pairs, 14.0 * s.dim, 6 * (s.queries() + s.keys()) * s.dim);
}

template <class P>
void forward(benchmark::State& state, const shape& s, const P& policy, std::uint32_t runs = 0,
             kvp::attend_copies copies = kvp::attend_copies::automatic) {
    attention_tensors tensors(s, policy, false, runs);
    tensors.options.copies = copies;
    measure_with_workspace(
        state, tensors.forward_bytes(),
        [&](const kvp::cuda& ctx, kvp::workspace_view workspace) { tensors.forward(ctx, workspace); });
    report(state, tensors.life.pairs, 4.0 * s.dim, 2 * (s.queries() + s.keys()) * s.dim);
}

using Budget = kvp::Policy<kvp::Sink<4>, kvp::Window<window>, kvp::TopKBudget<3836>>;
using Gates = kvp::Policy<kvp::Window<window>, kvp::ThresholdGate<kvp::at_least>>;

/// Scores are even in [-4, 4): a threshold of 4 - 8 p opens a share p of the gates.
Gates gates(double share) {
    return Gates(kvp::Window<window>{},
                 kvp::ThresholdGate<kvp::at_least>(static_cast<float>(4.0 - 8.0 * share)));
}

constexpr shape shape_of(std::int32_t batch, std::int32_t length, std::int32_t dim = 128) {
    return {batch, length, dim};
}

void add_forward() {
    const struct {
        const char* name;
        shape of;
    } budgets[] = {{"16k", shape_of(1, 1 << 14)},           {"32k", shape_of(1, 1 << 15)},
                   {"64k", shape_of(1, 1 << 16)},           {"128k", shape_of(1, 1 << 17)},
                   {"16k, d 64", shape_of(1, 1 << 14, 64)}, {"16k, d 256", shape_of(1, 1 << 14, 256)},
                   {"8 x 4k", shape_of(8, 1 << 12)},        {"32 x 2k", shape_of(32, 1 << 11)}};
    for (const auto& [name, of] : budgets) {
        const shape s = of;
        add(
            std::string("forward/") + name, [=](benchmark::State& state) { forward(state, s, Budget{}); },
            10);
    }
    for (const int percent : {0, 1, 5, 10, 25, 50, 75, 100}) {
        add(
            "forward/32k, gates " + std::to_string(percent) + "%",
            [=](benchmark::State& state) { forward(state, shape_of(1, 1 << 15), gates(percent / 100.0)); },
            10);
    }
    add(
        "forward/200k, gates 25%",
        [=](benchmark::State& state) { forward(state, shape_of(1, 200000), gates(0.25)); }, 5);
    // Copies of every kind, where rows that follow one another are many, few and all.
    const struct {
        const char* name;
        kvp::attend_copies copies;
    } kinds[] = {{", boxes", kvp::attend_copies::boxes},
                 {", every row alone", kvp::attend_copies::rows},
                 {", as counted", kvp::attend_copies::automatic}};
    for (const auto& kind : kinds) {
        const kvp::attend_copies copies = kind.copies;
        add(
            std::string("forward/200k, gates in runs of 64 to 256") + kind.name,
            [=](benchmark::State& state) { forward(state, shape_of(1, 200000), gates(0.25), 64, copies); },
            5);
        for (const std::uint32_t runs : {4u, 16u, 64u}) {
            add(
                "forward/64k, gates in runs of " + std::to_string(runs) + " to " + std::to_string(4 * runs) +
                    kind.name,
                [=](benchmark::State& state) {
                    forward(state, shape_of(1, 1 << 16), gates(0.25), runs, copies);
                },
                7);
        }
        add(
            std::string("forward/16k, budget") + kind.name,
            [=](benchmark::State& state) { forward(state, shape_of(1, 1 << 14), Budget{}, 0, copies); }, 10);
        add(
            std::string("forward/16k, open gates") + kind.name,
            [=](benchmark::State& state) { forward(state, shape_of(1, 1 << 14), gates(1.0), 0, copies); },
            10);
    }
}

void add_backward() {
    const struct {
        const char* name;
        shape of;
    } budgets[] = {{"16k", shape_of(1, 1 << 14)},           {"32k", shape_of(1, 1 << 15)},
                   {"16k, d 64", shape_of(1, 1 << 14, 64)}, {"16k, d 256", shape_of(1, 1 << 14, 256)},
                   {"8 x 4k", shape_of(8, 1 << 12)},        {"32 x 2k", shape_of(32, 1 << 11)}};
    for (const auto& [name, of] : budgets) {
        const shape s = of;
        add(
            std::string("forward + backward/") + name,
            [=](benchmark::State& state) { forward_and_backward(state, s, Budget{}, false, false); }, 7);
    }
    add(
        "forward + backward, deterministic/16k",
        [](benchmark::State& state) {
            forward_and_backward(state, shape_of(1, 1 << 14), Budget{}, false, true);
        },
        7);
    // Everything is visible; outside of the window keys have a bias.
    add(
        "soft gates/16k",
        [](benchmark::State& state) {
            forward_and_backward(state, shape_of(1, 1 << 14), gates(1.0), true, false);
        },
        7);
}

}  // namespace

int main(int argc, char** argv) {
    add_forward();
    add_backward();
    add_future_mass();
    add_observed_masks();
    return run(argc, argv);
}
