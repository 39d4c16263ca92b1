// A prompt into a cache on CUDA: which keys stay, attention, and the entries. Beside every prefill stand
// build_mask and attend of the same tokens and scores, which do the same work without a cache, and the bytes
// of the entries that are left. Dense attention of the same shapes is benchmarks/baselines/prefill.py.
//
// Rows `trained` have scores of trained scorers, from files in benchmarks/data or in the folder that
// KVPOLICY_BENCH_SCORES names.
//
// The cache is emptied (or filled by an earlier prompt) before every call, outside of the timing. Rates count
// visible pairs of a query and a key: 4 D operations per pair.
#include <kvpolicy/cuda.cuh>
#include <kvpolicy/h2o.hpp>
#include <kvpolicy/policies/compose.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>
#include <kvpolicy/scorers/mlstm.hpp>
#include <kvpolicy/snapkv.hpp>

#include "cache_inputs.cuh"
#include "cold.cuh"
#include "score_file.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#ifndef KVPOLICY_BENCH_SCORES_FOLDER
#define KVPOLICY_BENCH_SCORES_FOLDER "benchmarks/data"
#endif

namespace kvp = kvpolicy;

namespace {

using namespace bench;
using kvp::bf16;
using Dims = kvp::head_dims<128>;

constexpr std::int32_t heads = 8, group = 4, dim = 128, sinks = 4, window = 256, entries = 4096;

/// Scores of tokens: even in [-4, 4), each better or worse than the one before, or equal with and without
/// decay.
enum class Order { random, rising, falling, equal, level };

__global__ void fill_scores(float* to, std::int64_t count, std::int32_t length, Order order,
                            float log_gamma) {
    const std::int64_t i = std::int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
    if (i >= count) {
        return;
    }
    const auto t = static_cast<float>(i % length);
    switch (order) {
        case Order::random:
            to[i] = hashed(static_cast<std::uint32_t>(i));
            break;
        case Order::rising:
            to[i] = 0.25f * t;
            break;
        case Order::falling:
            to[i] = -0.25f * t;
            break;
        case Order::equal:
            to[i] = 1.5f;
            break;
        case Order::level:  // priorities that fp32 cannot tell apart
            to[i] = 1000.0f + t * log_gamma;
            break;
    }
}

using Given = kvp::Policy<kvp::Sink<>, kvp::Window<>, kvp::TopKBudget<>>;
template <std::int32_t Step>
using Decayed = kvp::Policy<kvp::Sink<>, kvp::Window<>, kvp::TopKBudget<>, kvp::Decay<Step>>;
using Gated = kvp::Policy<kvp::Sink<>, kvp::Window<>, kvp::ThresholdGate<kvp::at_least>>;
using Memory = kvp::Policy<kvp::Sink<>, kvp::Window<>, kvp::TopKBudget<>, kvp::mLSTMScorer<>>;

template <class P>
struct decay_part;
template <std::int32_t Step>
struct decay_part<Decayed<Step>> {
    using type = kvp::Decay<Step>;
};

using Budgets = std::array<std::int32_t, heads>;

constexpr Budgets same_budgets(std::int32_t budget) {
    return {budget, budget, budget, budget, budget, budget, budget, budget};
}
/// One head that keeps 90% of a prompt beside heads of 2%.
constexpr Budgets uneven_budgets(std::int32_t length) {
    Budgets budgets = same_budgets(length / 50);
    budgets[3] = length / 10 * 9;
    return budgets;
}

/// What a row times.
struct Setup {
    std::int32_t batch = 1, length = 0;
    Order order = Order::random;
    Budgets budgets = same_budgets(entries - sinks - window);
    std::vector<std::int32_t> lengths{};  // of the batch's prompts; empty: all `length`
    std::int32_t chunk = 0;               // tokens per call; 0: all at once
    std::int32_t history = 0;             // tokens that the cache has taken before
    float log_gamma = 0.0f;
    float threshold = 0.0f;
    std::shared_ptr<const Scores> trained{};  // scores, decays and thresholds instead of those above

    template <class P>
    [[nodiscard]] P policy() const {
        const kvp::Sink<> sink{sinks};
        const kvp::Window<> recent{window};
        if constexpr (std::is_same_v<P, kvp::H2O<>>) {
            return kvp::h2o_for_total(entries);
        } else if constexpr (std::is_same_v<P, kvp::SnapKV<>>) {
            return kvp::snapkv_for_total(entries);
        } else if constexpr (P::has_gate) {
            using Gate = kvp::ThresholdGate<kvp::at_least>;
            return P{sink, recent,
                     trained ? Gate{kvp::per_head(trained->thresholds.data(), 1, heads)} : Gate{threshold}};
        } else {
            const kvp::TopKBudget<> budget{kvp::per_head(budgets.data(), 1, heads)};
            if constexpr (P::has_decay) {
                using Part = typename decay_part<P>::type;
                return P{
                    sink, recent, budget,
                    trained ? Part{kvp::per_head(trained->log_gamma.data(), 1, heads)} : Part{log_gamma}};
            } else if constexpr (std::is_same_v<P, Memory>) {
                return P{sink, recent, budget, scorer_of<kvp::mLSTMScorer<>>(heads, dim)};
            } else {
                return P{sink, recent, budget};
            }
        }
    }
    [[nodiscard]] std::int32_t tokens_of(std::int32_t entry) const {
        return lengths.empty() ? length : lengths[static_cast<std::size_t>(entry)];
    }
};

/// A call's tensors, [batch, heads, length, dim].
struct Tensors {
    Setup of;
    std::int64_t rows = std::int64_t{of.batch} * heads * of.length;
    Numbers q, k, v;
    buffer<bf16> out;
    buffer<float> scores;
    buffer<std::int32_t> q_len;

    explicit Tensors(const Setup& setup)
        : of(setup),
          q(rows * group * dim, 1),
          k(rows * dim, 2),
          v(rows * dim, 3),
          out(rows * group * dim),
          scores(rows),
          q_len(of.batch) {
        if (of.trained) {
            ok(cudaMemcpy(scores.data(), of.trained->scores.data(),
                          static_cast<std::size_t>(rows) * sizeof(float), cudaMemcpyHostToDevice));
        } else {
            fill_scores<<<blocks_of(rows), 256>>>(scores.data(), rows, of.length, of.order, of.log_gamma);
            ok(cudaGetLastError());
        }
        std::vector<std::int32_t> tokens;
        for (std::int32_t i = 0; i < of.batch; ++i) {
            tokens.push_back(of.tokens_of(i));
        }
        ok(cudaMemcpy(q_len.data(), tokens.data(), tokens.size() * sizeof tokens[0], cudaMemcpyHostToDevice));
        ok(cudaDeviceSynchronize());
    }

    /// Tokens [from, from + count).
    [[nodiscard]] kvp::StepIO<bf16> io(std::int32_t from, std::int32_t count, bool scored) const {
        const auto part = [&](auto view) {
            view.data += from * view.row_stride;
            view.length = count;
            return view;
        };
        kvp::StepIO<bf16> io{
            .q = part(queries()), .k = part(keys()), .v = part(values()), .out = part(outputs())};
        io.batch = of.lengths.empty() ? kvp::Batch{.count = of.batch, .length = count}
                                      : kvp::Batch{of.batch, nullptr, q_len.data(), count};
        if (scored) {
            io.scores = all_scores();
            io.scores.data += from;
            io.scores.length = count;
        }
        return io;
    }
    [[nodiscard]] kvp::rows_view<const bf16> queries() const {
        return kvp::view_bhsd<const bf16>(q.memory.data(), of.batch, heads * group, of.length, dim);
    }
    [[nodiscard]] kvp::rows_view<const bf16> keys() const {
        return kvp::view_bhsd<const bf16>(k.memory.data(), of.batch, heads, of.length, dim);
    }
    [[nodiscard]] kvp::rows_view<const bf16> values() const {
        return kvp::view_bhsd<const bf16>(v.memory.data(), of.batch, heads, of.length, dim);
    }
    [[nodiscard]] kvp::rows_view<bf16> outputs() const {
        return kvp::view_bhsd(out.data(), of.batch, heads * group, of.length, dim);
    }
    [[nodiscard]] kvp::plane_view<const float> all_scores() const {
        return kvp::view_bhs<const float>(scores.data(), of.batch, heads, of.length);
    }
    [[nodiscard]] kvp::Sequences sequences() const {
        kvp::Sequences all{of.batch, of.length};
        all.lengths = of.lengths.empty() ? nullptr : q_len.data();
        return all;
    }
};

/// The mask that a policy makes of the scores.
template <class P>
class Mask {
  public:
    explicit Mask(const Tensors& in)
        : in_(in),
          policy_(in.of.template policy<P>()),
          expiry_(in.rows),
          bytes_(kvp::build_mask_workspace_bytes(kvp::cuda{}, policy_, in.sequences(), heads)),
          workspace_(static_cast<std::int64_t>(bytes_)) {}

    void build(const kvp::cuda& ctx) const {
        kvp::build_mask(ctx, policy_, in_.all_scores(), in_.sequences(), plane(expiry_.data()),
                        {workspace_.data(), bytes_});
    }
    [[nodiscard]] kvp::kv_view<bf16> keys() const {
        kvp::kv_view<bf16> all{in_.keys(), in_.values()};
        all.mask.expiry = plane<const kvp::expiry_t>(expiry_.data());
        return all;
    }
    [[nodiscard]] std::size_t bytes() const { return bytes_; }

    /// Visible pairs of the timed queries and keys, of all KV heads, and entries that the last queries see.
    void count(double& pairs, double& left) const {
        build(kvp::cuda{});
        const buffer<std::int32_t> live(in_.rows);
        kvp::live_keys(kvp::cuda{}, plane<const kvp::expiry_t>(expiry_.data()), in_.sequences(),
                       plane(live.data()));
        std::vector<std::int32_t> counts(static_cast<std::size_t>(in_.rows));
        ok(cudaMemcpy(counts.data(), live.data(), counts.size() * sizeof counts[0], cudaMemcpyDeviceToHost));
        pairs = left = 0.0;
        for (std::int32_t x = 0; x < in_.of.batch * heads; ++x) {
            const std::int32_t tokens = in_.of.tokens_of(x / heads);
            const std::int32_t* const of_head = counts.data() + std::int64_t{x} * in_.of.length;
            for (std::int32_t t = in_.of.history; t < tokens; ++t) {
                pairs += of_head[t];
            }
            left += of_head[tokens - 1];
        }
    }

  private:
    template <class Value>
    [[nodiscard]] kvp::plane_view<Value> plane(Value* data) const {
        return kvp::view_bhs<Value>(data, in_.of.batch, heads, in_.of.length);
    }
    const Tensors& in_;
    P policy_;
    buffer<kvp::expiry_t> expiry_;
    std::size_t bytes_;
    buffer<unsigned char> workspace_;
};

void report(benchmark::State& state, double pairs) {
    state.counters["live_pairs"] = pairs * group;
    const double flops = pairs * group * 4.0 * dim;
    state.counters["flops"] = flops;
    state.counters["tflops"] = flops / state.counters["median_ms"] * 1e-9;
}

/// The policy whose mask has as many visible pairs.
template <class P>
using counted = std::conditional_t<std::is_same_v<P, Memory>, Given, P>;

/// Times prefill of all tokens behind the history, by chunks, into the cache.
template <class P, class Cache>
void time_prefill(benchmark::State& state, Cache& cache, const Setup& of, std::size_t cache_bytes) {
    constexpr bool scored = P::scorer_type::when == kvp::score_time::given;
    const Tensors in(of);
    double pairs = 0.0, left = 0.0;
    if constexpr (P::observed) {  // a prompt in one block: nothing is evicted before its end
        pairs = 0.5 * of.length * (of.length + 1.0) * heads;
        left = static_cast<double>(entries) * heads;
    } else {
        Mask<counted<P>>(in).count(pairs, left);
    }
    const stream_of_calls calls;
    const kvp::cuda ctx{calls.stream};
    const std::int32_t chunk = of.chunk != 0 ? of.chunk : of.length - of.history;
    const auto ref = cache.layer(0);
    const std::size_t needed = kvp::workspace_bytes<Dims>(ctx, ref, {.batch = of.batch, .tokens = chunk});
    const std::size_t earlier =
        of.history == 0 ? 0 : kvp::workspace_bytes<Dims>(ctx, ref, {.batch = of.batch, .tokens = of.history});
    const buffer<unsigned char> workspace(static_cast<std::int64_t>(std::max(needed, earlier)));
    const buffer<std::uint32_t> status(of.batch);
    ok(cudaMemset(status.data(), 0, static_cast<std::size_t>(of.batch) * sizeof(std::uint32_t)));
    const auto tokens = [&](std::int32_t from, std::int32_t count, std::size_t bytes) {
        const kvp::StepIO<bf16> io = in.io(from, count, scored);
        kvp::prefill<Dims>(ctx, ref, io, {workspace.data(), bytes}, {.status = status.data()});
        if (from + count < of.length) {
            cache.advance(ctx, io.batch, {.status = status.data()});
        }
    };
    measure(
        state, calls.stream,
        [&] {
            for (std::int32_t from = of.history; from < of.length; from += chunk) {
                tokens(from, std::min(chunk, of.length - from), needed);
            }
        },
        needed,
        [&] {
            for (std::int32_t seq = 0; seq < of.batch; ++seq) {
                cache.clear(ctx, seq);
            }
            if (of.history != 0) {
                tokens(0, of.history, earlier);
            }
        });
    std::vector<std::uint32_t> words(static_cast<std::size_t>(of.batch));
    ok(cudaMemcpy(words.data(), status.data(), words.size() * sizeof words[0], cudaMemcpyDeviceToHost));
    if (std::any_of(words.begin(), words.end(), [](std::uint32_t word) { return word != 0; })) {
        state.SkipWithError("a prefill did not run: its status is set");
    }
    report(state, pairs);
    state.counters["entry_bytes"] = left * 2.0 * dim * sizeof(bf16);
    state.counters["cache_bytes"] = static_cast<double>(cache_bytes);
}

kvp::CacheShape shape_of(const Setup& of) {
    return {.layers = 1,
            .max_sequences = of.batch,
            .query_heads = heads * group,
            .kv_heads = heads,
            .head_dim = dim,
            .page_size = 64};
}

template <class P>
void prefill_fixed(benchmark::State& state, const Setup& of) {
    kvp::FixedBudgetCache<P, bf16> cache(shape_of(of), of.policy<P>());
    const std::size_t bytes = cache.bytes().total();
    const buffer<unsigned char> memory(static_cast<std::int64_t>(bytes));
    cache.bind(kvp::cuda{}, memory.data(), bytes);
    time_prefill<P>(state, cache, of, bytes);
}

template <class P>
void prefill_dual(benchmark::State& state, const Setup& of) {
    const kvp::CacheShape shape = shape_of(of);
    std::int64_t pages = 0;
    for (const std::int32_t budget : of.budgets) {
        const std::int64_t most = P::has_gate ? of.length : std::min(of.length, sinks + window + budget);
        pages += of.batch * (most / shape.page_size + 2);
    }
    kvp::DualCache<P, bf16> cache(
        shape, {.slab_pages = static_cast<std::int32_t>(pages), .max_slabs = 1, .max_seq_len = of.length + 1},
        of.policy<P>());
    const std::size_t bytes = cache.bytes().total(), slab_bytes = cache.slab_bytes();
    const buffer<unsigned char> memory(static_cast<std::int64_t>(bytes)),
        slab(static_cast<std::int64_t>(slab_bytes));
    cache.bind(kvp::cuda{}, memory.data(), bytes);
    cache.add_slab(kvp::cuda{}, slab.data(), slab_bytes);
    time_prefill<P>(state, cache, of, bytes + slab_bytes);
}

/// build_mask, attend or both, of the same tokens and scores.
template <class P>
void without_cache(benchmark::State& state, const Setup& of, bool masks, bool attends) {
    const Tensors in(of);
    const Mask<P> mask(in);
    double pairs = 0.0, left = 0.0;
    mask.count(pairs, left);
    const stream_of_calls calls;
    const kvp::cuda ctx{calls.stream};
    const kvp::AttentionParams attention{};
    const std::size_t needed =
        kvp::attend_workspace_bytes<bf16, Dims>(ctx, attention, in.queries(), mask.keys(), in.sequences());
    const buffer<unsigned char> workspace(static_cast<std::int64_t>(needed));
    measure(
        state, calls.stream,
        [&] {
            if (masks) {
                mask.build(ctx);
            }
            if (attends) {
                kvp::attend<bf16, Dims>(ctx, attention, in.queries(), mask.keys(), in.sequences(),
                                        in.outputs(), {}, {workspace.data(), needed});
            }
        },
        (masks ? mask.bytes() : 0) + (attends ? needed : 0));
    if (attends) {
        report(state, pairs);
    }
}

/// attend of a chunk's queries over the entries of a cache and the chunk, without a mask: what a chunk that
/// evicts no key has to compute.
void attend_chunk(benchmark::State& state, std::int32_t past_length, std::int32_t length) {
    const Tensors past_tensors({.length = past_length}), in({.length = length});
    kvp::kv_view<bf16> past{past_tensors.keys(), past_tensors.values()};
    past.first = -past_length;
    const kvp::kv_view<bf16> self{in.keys(), in.values()};
    const stream_of_calls calls;
    const kvp::cuda ctx{calls.stream};
    const kvp::AttentionParams attention{};
    const std::size_t needed =
        kvp::attend_workspace_bytes<bf16, Dims>(ctx, attention, in.queries(), past, self, in.sequences());
    const buffer<unsigned char> workspace(static_cast<std::int64_t>(needed));
    measure(
        state, calls.stream,
        [&] {
            kvp::attend<bf16, Dims>(ctx, attention, in.queries(), past, self, in.sequences(), in.outputs(),
                                    {}, {workspace.data(), needed});
        },
        needed);
    const double n = length;
    report(state, heads * (n * past_length + n * (n + 1) / 2));
}

/// Prefills into both caches, and what they are compared with.
template <class P>
void add_pair(const std::string& name, const Setup& of, int samples, bool dual = true) {
    add(
        "prefill/" + name, [=](benchmark::State& state) { prefill_fixed<P>(state, of); }, samples);
    if (dual) {
        add(
            "prefill, DualCache/" + name, [=](benchmark::State& state) { prefill_dual<P>(state, of); },
            samples);
    }
    add(
        "mask + attend/" + name, [=](benchmark::State& state) { without_cache<P>(state, of, true, true); },
        samples);
}
template <class P>
void add_parts(const std::string& name, const Setup& of, int samples) {
    add(
        "mask/" + name, [=](benchmark::State& state) { without_cache<P>(state, of, true, false); }, samples);
    add(
        "attend/" + name, [=](benchmark::State& state) { without_cache<P>(state, of, false, true); },
        samples);
}

void add_prompts() {
    const struct {
        const char* name;
        Order order;
    } orders[] = {{"random", Order::random},
                  {"rising", Order::rising},
                  {"falling", Order::falling},
                  {"equal", Order::equal}};
    for (const std::int32_t length : {1 << 13, 1 << 14, 1 << 15, 1 << 17}) {
        const std::string size = std::to_string(length >> 10) + "k/";
        const int samples = length > 1 << 15 ? 7 : 15;
        for (const auto& [name, order] : orders) {
            const Setup of{.length = length, .order = order};
            add_pair<Given>(size + name, of, samples);
            if (order == Order::random || length == 1 << 14) {
                add_parts<Given>(size + name, of, samples);
            }
        }
        const Setup uneven{.length = length, .budgets = uneven_budgets(length)};
        add_pair<Given>(size + "uneven", uneven, samples);
        if (length == 1 << 14) {
            add_parts<Given>(size + "uneven", uneven, samples);
        }
    }
}

void add_batches() {
    add_pair<Given>("8 x 4k/random", {.batch = 8, .length = 1 << 12}, 15);
    add_pair<Given>("8 x 100 to 8000/random",
                    {.batch = 8, .length = 8000, .lengths = {100, 400, 900, 1500, 2500, 4000, 6000, 8000}},
                    15);
}

void add_chunks() {
    // A cache of 4096 entries after 12k tokens: of random scores some 30% are admitted.
    for (const auto& [name, order] :
         {std::pair{"random", Order::random}, {"rising", Order::rising}, {"falling", Order::falling}}) {
        const Setup of{.length = 14336, .order = order, .history = 12288};
        const std::string row = std::string("2k over 4096/") + name;
        add(
            "prefill/" + row, [=](benchmark::State& state) { prefill_fixed<Given>(state, of); }, 15);
        add(
            "prefill, DualCache/" + row, [=](benchmark::State& state) { prefill_dual<Given>(state, of); },
            15);
    }
    add(
        "attend/2k over 4096", [](benchmark::State& state) { attend_chunk(state, 4096, 2048); }, 15);
    for (const std::int32_t length : {1 << 14, 1 << 15, 1 << 17}) {
        const Setup of{.length = length, .chunk = 4096};
        const std::string row = std::to_string(length >> 10) + "k in chunks of 4k/random";
        const int samples = length > 1 << 15 ? 7 : 15;
        add(
            "prefill/" + row, [=](benchmark::State& state) { prefill_fixed<Given>(state, of); }, samples);
        add(
            "prefill, DualCache/" + row, [=](benchmark::State& state) { prefill_dual<Given>(state, of); },
            samples);
    }
}

/// A row of policy P on the scores of a trained scorer. The row reads its file: one that is missing or too
/// short is the row's error.
template <class P, class Body>
void add_trained(const std::string& name, const std::string& file, const Setup& of, const Body& body) {
    const auto read_and_time = [=](benchmark::State& state) {
        const char* const given = std::getenv("KVPOLICY_BENCH_SCORES");
        const std::string folder = given != nullptr ? given : KVPOLICY_BENCH_SCORES_FOLDER;
        Setup trained = of;
        try {
            trained.trained = std::make_shared<const Scores>(
                read_scores(folder + "/" + file, heads, of.length, P::has_gate));
        } catch (const std::exception& error) {
            state.SkipWithError(error.what());
            return;
        }
        body(state, trained);
    };
    add(name, read_and_time, of.length > 1 << 15 ? 7 : 15);
}

/// As add_pair; a gate's keys fit into a DualCache only.
template <class P>
void add_trained_pair(const std::string& row, const std::string& file, const Setup& of) {
    if constexpr (!P::has_gate) {
        add_trained<P>("prefill/" + row, file, of,
                       [](benchmark::State& state, const Setup& made) { prefill_fixed<P>(state, made); });
    }
    add_trained<P>("prefill, DualCache/" + row, file, of,
                   [](benchmark::State& state, const Setup& made) { prefill_dual<P>(state, made); });
    if (of.history == 0) {
        add_trained<P>("mask + attend/" + row, file, of, [](benchmark::State& state, const Setup& made) {
            without_cache<P>(state, made, true, true);
        });
    }
}

/// KVpop's policy on the scores of a trained mLSTM, and WG-KV's on those of a trained MLP.
void add_trained_rows() {
    const std::string mlstm = "kvpop.safetensors", mlp = "kvpop-mlp.safetensors";
    for (const std::int32_t length : {1 << 14, 1 << 15, 1 << 17}) {
        const std::string row = std::to_string(length >> 10) + "k/trained";
        const Setup of{.length = length};
        add_trained_pair<Decayed<1>>(row, mlstm, of);
        add_trained<Decayed<1>>("attend/" + row, mlstm, of, [](benchmark::State& state, const Setup& made) {
            without_cache<Decayed<1>>(state, made, false, true);
        });
    }
    add_trained_pair<Decayed<1>>("2k over 4096/trained", mlstm, {.length = 14336, .history = 12288});
    add_trained_pair<Gated>("16k, gates/trained", mlp, {.length = 1 << 14});
}

void add_policies() {
    const Setup decayed{.length = 1 << 14, .log_gamma = -1e-3f},
        level{.length = 1 << 14, .order = Order::level, .log_gamma = -1e-3f};
    add_pair<Decayed<1>>("16k, decay/random", decayed, 15, false);
    add_pair<Decayed<1>>("16k, decay/level", level, 15, false);
    Setup rising = decayed;
    rising.order = Order::rising;
    add_pair<Decayed<3>>("16k, decay step 3/random", decayed, 15, false);
    add_pair<Decayed<3>>("16k, decay step 3/rising", rising, 15, false);
    add_pair<Decayed<64>>("16k, decay step 64/random", decayed, 15, false);
    add_parts<Decayed<3>>("16k, decay step 3/random", decayed, 15);
    add_parts<Decayed<3>>("16k, decay step 3/rising", rising, 15);
    // Scores are even in [-4, 4): a quarter of all gates is open.
    const Setup gated{.length = 1 << 14, .threshold = 2.0f};
    add(
        "prefill, DualCache/16k, gates 25%/random",
        [=](benchmark::State& state) { prefill_dual<Gated>(state, gated); }, 15);
    add(
        "mask + attend/16k, gates 25%/random",
        [=](benchmark::State& state) { without_cache<Gated>(state, gated, true, true); }, 15);
    for (const std::int32_t length : {1 << 14, 1 << 15}) {
        add(
            "prefill/" + std::to_string(length >> 10) + "k, mLSTM",
            [=](benchmark::State& state) { prefill_fixed<Memory>(state, {.length = length}); }, 15);
    }
    const Setup observed{.length = 1 << 14};
    add(
        "prefill/16k, H2O", [=](benchmark::State& state) { prefill_fixed<kvp::H2O<>>(state, observed); }, 15);
    add(
        "prefill, DualCache/16k, SnapKV",
        [=](benchmark::State& state) { prefill_dual<kvp::SnapKV<>>(state, observed); }, 15);
}

}  // namespace

int main(int argc, char** argv) {
    add_prompts();
    add_batches();
    add_chunks();
    add_policies();
    add_trained_rows();
    return run(argc, argv);
}
