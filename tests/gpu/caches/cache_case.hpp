// A cache on a device beside one on the host that is given the same tokens: every call compares outputs,
// rows and counters.
#pragma once

#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/cuda.cuh>

#include "../../support/bound_cache.hpp"
#include "../support/device.hpp"
#include "support/step_io.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <random>
#include <string>
#include <type_traits>
#include <vector>

namespace test {

/// Half the distance of neighbors near 1.
template <class T>
constexpr double unit_roundoff() {
    return std::is_same_v<T, kvpolicy::bf16>   ? 0x1p-9
           : std::is_same_v<T, kvpolicy::fp16> ? 0x1p-12
           : std::is_same_v<T, float>          ? 0x1p-24
                                               : 0x1p-53;
}

/// Outputs are means of values. A 16-bit path rounds every weight and the output, the host the output: three
/// roundings of at most `largest`; fast exponentials are off by 2^-20 more. Sums of n terms in fp32 or fp64
/// are off by sqrt(n) units, n being a few thousand at most.
template <class T>
double tolerance(double largest) {
    return sizeof(T) == 2 ? (3.0 * unit_roundoff<T>() + 0x1p-18) * largest
                          : 256.0 * unit_roundoff<T>() * largest;
}

/// One call's tensors on the host.
template <class T>
struct CallTensors {
    Tensor<T> q, k, v;
    Plane<float> scores;
    Tensor<kvpolicy::bf16> hidden;  // of no width unless a scorer reads it

    CallTensors(const kvpolicy::CacheShape& shape, std::int32_t count, std::int32_t length, Scores kind,
                std::mt19937& generator, std::int32_t hidden_width = 0)
        : q(count, shape.query_heads, length, shape.head_dim_qk),
          k(count, shape.kv_heads, length, shape.head_dim_qk),
          v(count, shape.kv_heads, length, shape.head_dim_vo),
          scores(count, shape.kv_heads, length),
          hidden(count, 1, length, hidden_width) {
        q.fill_normal(generator);
        k.fill_normal(generator);
        v.fill_normal(generator);
        fill_scores(scores, kind, generator);
        if (hidden_width != 0) {
            hidden.fill_normal(generator);
        }
    }
};

/// What policy P reads of a call beside queries, keys and values, in device memory.
template <class P>
class ArrivingInputs {
  public:
    template <class T>
    explicit ArrivingInputs(const CallTensors<T>& in) : scores_(in.scores.data), hidden_(in.hidden.data) {}
    template <class T>
    void add(const CallTensors<T>& in, Extras& of_host, Extras& of_device) const {
        if constexpr (P::ranked) {
            if constexpr (P::scorer_type::when == kvpolicy::score_time::given) {
                of_host.scores = in.scores.view();
                of_device.scores = kvpolicy::view_bhs<const float>(scores_.data(), in.scores.batch,
                                                                   in.scores.heads, in.scores.length);
            } else if constexpr (P::scorer_type::when == kvpolicy::score_time::from_hidden) {
                of_host.hidden = in.hidden.view();
                of_device.hidden = kvpolicy::view_bhsd<const kvpolicy::bf16>(
                    hidden_.data(), in.hidden.batch, 1, in.hidden.length, in.hidden.dim);
            }
        }
    }

  private:
    Device<float> scores_;
    Device<kvpolicy::bf16> hidden_;
};

/// Compares calls' outputs with the host's.
template <class T>
struct OutputCheck {
    double largest = 0.0;  // of all values so far: those of earlier calls are attended to as well

    static double number(const T& x) { return static_cast<double>(static_cast<kvpolicy::compute_t<T>>(x)); }

    /// Outputs of tokens that count are near, the others untouched.
    void compare(const std::vector<T>& out, const Tensor<T>& wanted, const std::vector<float>& lse,
                 const Plane<float>& wanted_lse, const std::vector<std::int32_t>& q_len, const Tensor<T>& v) {
        for (const T& x : v.data) {
            largest = std::max(largest, std::abs(number(x)));
        }
        const double limit = tolerance<T>(largest);
        double worst = 0.0, worst_lse = 0.0;
        std::size_t at = 0;
        for (std::int32_t i = 0; i < wanted.batch; ++i) {
            for (std::int32_t h = 0; h < wanted.heads; ++h) {
                for (std::int32_t t = 0; t < wanted.length; ++t) {
                    const bool counts = t < q_len[static_cast<std::size_t>(i)];
                    const std::size_t row = at / static_cast<std::size_t>(wanted.dim);
                    const double l = lse[row], m = wanted_lse.data[row];
                    // Of a large one, what either side rounds of it counts for nothing.
                    const double off = l == m ? 0.0 : std::max(0.0, std::abs(l - m) - 0x1p-21 * std::abs(m));
                    worst_lse = off <= worst_lse ? worst_lse : counts ? off : 1e30;  // NaN is the worst
                    for (std::int32_t d = 0; d < wanted.dim; ++d, ++at) {
                        const double a = number(out[at]);
                        const double b = number(wanted.data[at]);
                        const double gap = a == b ? 0.0 : std::abs(a - b);
                        worst = gap <= worst ? worst : counts ? gap : 1e30;
                    }
                }
            }
        }
        CHECK(worst <= limit);
        // A logit is a sum of dim products of fp32; products of 16-bit numbers are exact.
        CHECK(worst_lse <= (sizeof(T) == 2 ? 1e-3 : 1e-4));
    }
};

/// What lies in device memory now.
template <class Value>
auto fetch_from(const Value* from, std::int64_t count) {
    std::vector<std::remove_const_t<Value>> values(static_cast<std::size_t>(count));
    ok(cudaDeviceSynchronize());
    ok(cudaMemcpy(values.data(), from, values.size() * sizeof(Value), cudaMemcpyDeviceToHost));
    return values;
}

/// Tokens that return, in device memory: keys and values (the same numbers) and scores, for long runs
/// of calls by hand.
template <class T>
class ReturningTokens {
  public:
    ReturningTokens(std::size_t numbers, std::size_t heads, std::mt19937& generator)
        : numbers_(numbers),
          heads_(heads),
          rows_(made<T>(numbers, 100, 0.01f, generator)),
          scores_(made<float>(heads, 50, 1.0f, generator)) {}
    void give(std::int32_t t, T* k, T* v, float* scores, cudaStream_t stream) const {
        const auto token = static_cast<std::size_t>(t % count);
        const auto copy = [&](void* to, const void* from, std::size_t bytes) {
            ok(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream));
        };
        copy(k, rows_.data() + token * numbers_, numbers_ * sizeof(T));
        copy(v, rows_.data() + token * numbers_, numbers_ * sizeof(T));
        copy(scores, scores_.data() + static_cast<std::size_t>(t % scored) * heads_, heads_ * sizeof(float));
    }

  private:
    static constexpr std::int32_t count = 61, scored = 997;
    template <class Value>
    static std::vector<Value> made(std::size_t each, unsigned most, float unit, std::mt19937& generator) {
        std::vector<Value> values(each * static_cast<std::size_t>(sizeof(Value) == 4 ? scored : count));
        for (Value& x : values) {
            x = static_cast<Value>(static_cast<float>(generator() % most) * unit);
        }
        return values;
    }
    std::size_t numbers_, heads_;
    Device<T> rows_;
    Device<float> scores_;
};

/// Whether scores and scorer states of a device are near the host's.
struct NearHost {
    float tolerance;
    bool near = true;

    void score(std::int32_t /*sequence*/, std::int32_t /*head*/, kvpolicy::position_t /*position*/,
               float of_device, float of_host) {
        note(of_device, of_host);
    }
    /// One head's state.
    void states(std::int32_t /*sequence*/, std::int32_t /*head*/, const float* of_device,
                const float* of_host, std::int64_t count) {
        for (std::int64_t x = 0; x < count; ++x) {
            note(of_device[x], of_host[x]);
        }
    }
    void check() const { CHECK(near); }

  private:
    void note(float a, float b) {
        near = near && (a == b || std::abs(a - b) <= tolerance * (1.0f + std::abs(b)));
    }
};

enum class Mode { step, prefill, append_draft };

/// Without `Chunks` calls of one token only: the others take long to compile.
template <class P, class T, class Dims = kvpolicy::all_head_dims, bool Chunks = true>
class BothCaches {
  public:
    kvpolicy::CacheShape shape;
    kvpolicy::host ctx{1};
    kvpolicy::cuda device{};
    BoundCache<P, T> oracle;
    kvpolicy::FixedBudgetCache<P, T> cache;
    Device<unsigned char> memory;

    /// `scorers` and `device_scorers`: the same weights in host and in device memory.
    explicit BothCaches(const kvpolicy::CacheShape& of, const P& policy = P{},
                        const typename P::scorer_type* scorers = nullptr,
                        const typename P::scorer_type* device_scorers = nullptr,
                        const kvpolicy::AttentionParams& attention = {},
                        kvpolicy::position_t rebase_limit = kvpolicy::rebase_limit)
        : shape(of),
          oracle(ctx, of, policy, scorers, attention, rebase_limit),
          cache(of, policy, device_scorers, attention),
          memory(cache.bytes().total()) {
        ok(cudaMemset(memory.data(), 0xff, memory.bytes()));  // NaN in every row that nobody wrote
        cache.rebase_limit(rebase_limit);
        cache.bind(device, memory.data(), memory.size());
    }

    /// Gives the tokens to both, all layers alike, and advances; `accept` of draft tokens.
    void call(Mode mode, const std::vector<std::int32_t>& seq_ids, const std::vector<std::int32_t>& q_len,
              const CallTensors<T>& in, const std::vector<std::int32_t>& accepted = {}) {
        const auto count = static_cast<std::int32_t>(seq_ids.size());
        const std::int32_t length = in.q.length;
        const kvpolicy::Batch batch{count, seq_ids.data(), q_len.data(), length};
        const Device<std::int32_t> device_seq_ids(seq_ids), device_len(q_len);
        const kvpolicy::Batch device_batch{count, device_seq_ids.data(), device_len.data(), length};
        const Device<T> q(in.q.data), k(in.k.data), v(in.v.data);
        const ArrivingInputs<P> arriving(in);
        const std::int32_t heads = shape.kv_heads, query_heads = shape.query_heads;
        const auto q_view =
            kvpolicy::view_bhsd<const T>(q.data(), count, query_heads, length, shape.head_dim_qk);
        const auto k_view = kvpolicy::view_bhsd<const T>(k.data(), count, heads, length, shape.head_dim_qk);
        const auto v_view = kvpolicy::view_bhsd<const T>(v.data(), count, heads, length, shape.head_dim_vo);
        const std::vector<std::uint32_t> no_status(seq_ids.size(), 0);
        for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
            Tensor<T> wanted(count, query_heads, length, shape.head_dim_vo);
            wanted.fill(7.0f);
            Plane<float> wanted_lse(count, query_heads, length, 7.0f);
            const Device<T> out(wanted.data);
            const Device<float> lse(wanted_lse.data);
            const Device<std::uint32_t> status(no_status);
            test::Extras extras, device_extras;
            extras.lse = wanted_lse.view();
            device_extras.lse = kvpolicy::view_bhs(lse.data(), count, query_heads, length);
            arriving.add(in, extras, device_extras);
            const auto ref = cache.layer(layer);
            std::size_t needed = kvpolicy::step_workspace_bytes<Dims>(device, ref, count);
            if constexpr (Chunks) {
                if (mode != Mode::step) {
                    needed = kvpolicy::workspace_bytes<Dims>(device, ref, {.batch = count, .tokens = length});
                }
            }
            const Device<unsigned char> workspace(needed);
            const auto out_view =
                kvpolicy::view_bhsd(out.data(), count, query_heads, length, shape.head_dim_vo);
            Workspace host_workspace(kvpolicy::workspace_bytes(ctx, oracle.cache.layer(layer),
                                                               {.batch = count, .tokens = length}));
            if (mode == Mode::step) {
                kvpolicy::step<Dims>(
                    device, ref, test::step_io(device_batch, q_view, k_view, v_view, out_view, device_extras),
                    workspace, {.status = status.data()});
                kvpolicy::step(
                    ctx, oracle.cache.layer(layer),
                    test::step_io(batch, in.q.view(), in.k.view(), in.v.view(), wanted.view(), extras),
                    host_workspace);
            } else if constexpr (!Chunks) {
                FAIL("a chunk in a test of steps");
            } else if (mode == Mode::prefill) {
                kvpolicy::prefill<Dims>(
                    device, ref, test::step_io(device_batch, q_view, k_view, v_view, out_view, device_extras),
                    workspace, {.status = status.data()});
                kvpolicy::prefill(
                    ctx, oracle.cache.layer(layer),
                    test::step_io(batch, in.q.view(), in.k.view(), in.v.view(), wanted.view(), extras),
                    host_workspace);
            } else {
                kvpolicy::append_draft<Dims>(
                    device, ref, test::step_io(device_batch, q_view, k_view, v_view, out_view, device_extras),
                    workspace, {.status = status.data()});
                kvpolicy::append_draft(
                    ctx, oracle.cache.layer(layer),
                    test::step_io(batch, in.q.view(), in.k.view(), in.v.view(), wanted.view(), extras),
                    host_workspace);
                const kvpolicy::Batch some{count, seq_ids.data(), accepted.data(), shape.max_draft_tokens};
                const Device<std::int32_t> device_accepted(accepted);
                const kvpolicy::Batch device_some{count, device_seq_ids.data(), device_accepted.data(),
                                                  shape.max_draft_tokens};
                const Device<unsigned char> more(kvpolicy::workspace_bytes<Dims>(
                    device, ref, {.batch = count, .tokens = shape.max_draft_tokens}));
                kvpolicy::accept<Dims>(device, ref, device_some, more, {.status = status.data()});
                Workspace host_more(kvpolicy::workspace_bytes(
                    ctx, oracle.cache.layer(layer), {.batch = count, .tokens = shape.max_draft_tokens}));
                kvpolicy::accept(ctx, oracle.cache.layer(layer), some, host_more);
            }
            CHECK(status.read() == no_status);
            check_.compare(out.read(), wanted, lse.read(), wanted_lse, q_len, in.v);
        }
        const std::vector<std::int32_t>& moved = mode == Mode::append_draft ? accepted : q_len;
        const Device<std::int32_t> device_moved(moved);
        const Device<std::uint32_t> status(no_status);
        oracle.cache.advance(ctx, {count, seq_ids.data(), moved.data(), length});
        cache.advance(device, {count, device_seq_ids.data(), device_moved.data(), length},
                      {.status = status.data()});
        CHECK(status.read() == no_status);
    }

    void fork(std::int32_t from, std::int32_t to) {
        oracle.cache.fork(ctx, from, to);
        cache.fork(device, from, to);
    }
    /// Sequence i becomes what sources[i] was.
    void reorder(const std::vector<std::int32_t>& sources) {
        const auto count = static_cast<std::int32_t>(sources.size());
        oracle.cache.reorder(ctx, sources.data(), count);
        const Device<std::int32_t> of_device(sources);
        cache.reorder(device, of_device.data(), count);
    }
    /// Sequence `to` becomes what `from` was, through a blob of the device's.
    void snapshot(std::int32_t from, std::int32_t to) {
        std::vector<unsigned char> blob(cache.snapshot_bytes(device, from));
        CHECK(blob.size() == oracle.cache.snapshot_bytes(from));
        cache.snapshot(device, from, blob.data(), blob.size());
        cache.restore(device, to, blob.data(), blob.size());
        oracle.cache.restore(ctx, to, blob.data(), blob.size());
    }

    /// Whether both hold the same keys of layer 0 in the same rows, with scores and scorer states as `near`
    /// has it.
    template <class Near>
    void near_rows(Near& near) const {
        const auto ref = cache.layer(0), host_ref = oracle.cache.layer(0);
        const auto position = fetch(ref.position, ref.max_sequences * ref.rows);
        const auto score = fetch(ref.score, ref.max_sequences * ref.rows);
        const auto state = fetch(ref.state, ref.max_sequences * ref.kv_heads * ref.state_size);
        bool same = true;
        for (std::int32_t seq = 0; seq < shape.max_sequences; ++seq) {
            for (std::int32_t h = 0; h < shape.kv_heads; ++h) {
                const auto first = static_cast<std::size_t>(host_ref.first_row(seq, h));
                for (std::size_t r = first; r < first + static_cast<std::size_t>(host_ref.used(seq, h));
                     ++r) {
                    same = same && position[r] == host_ref.position[r];
                    near.score(seq, h, host_ref.position[r], score[r], host_ref.score[r]);
                }
                const std::int64_t of_head = host_ref.head_index(seq, h) * ref.state_size;
                near.states(seq, h, state.data() + of_head, host_ref.state + of_head, ref.state_size);
            }
        }
        CHECK(same);
    }

    /// Whether both hold the same keys, values, positions and scores in the same rows, and the same
    /// counters, byte for byte.
    void same_rows(const std::string& when) const {
        for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
            for (std::int32_t seq = 0; seq < shape.max_sequences; ++seq) {
                const bool same = content(layer, seq) == without_state(layer, seq);
                CAPTURE(when);
                CAPTURE(layer);
                CAPTURE(seq);
                CHECK(same);
            }
        }
    }

    /// What BoundCache::content is, read from the device, but for the scorer's state.
    [[nodiscard]] std::vector<unsigned char> content(std::int32_t layer, std::int32_t seq) const {
        const auto ref = cache.layer(layer);
        std::vector<unsigned char> bytes;
        const auto add = [&](const auto* data, std::int64_t first, std::int64_t count) {
            const auto values = fetch(data + first, count);
            const auto* from = reinterpret_cast<const unsigned char*>(values.data());
            bytes.insert(bytes.end(), from, from + values.size() * sizeof values[0]);
        };
        const auto host_ref = oracle.cache.layer(layer);
        const auto length = fetch(ref.length + seq, 1)[0];
        const auto kept = fetch(ref.num_long_range + std::int64_t{seq} * shape.kv_heads, shape.kv_heads);
        for (std::int32_t head = 0; head < shape.kv_heads; ++head) {
            const std::int64_t first = host_ref.first_row(seq, head);
            const std::int64_t used =
                host_ref.layout(head).used(length, kept[static_cast<std::size_t>(head)]);
            add(ref.k, first * ref.head_dim_qk, used * ref.head_dim_qk);
            add(ref.v, first * ref.head_dim_vo, used * ref.head_dim_vo);
            add(ref.position, first, used);
            add(ref.score, first, used);
        }
        add(ref.num_long_range, std::int64_t{seq} * shape.kv_heads, shape.kv_heads);
        add(ref.length, seq, 1);
        return bytes;
    }

    template <class Value>
    static auto fetch(const Value* from, std::int64_t count) {
        return fetch_from(from, count);
    }

  private:
    [[nodiscard]] std::vector<unsigned char> without_state(std::int32_t layer, std::int32_t seq) const {
        std::vector<unsigned char> bytes = oracle.content(layer, seq);
        const auto ref = oracle.cache.layer(layer);
        const auto end = bytes.end() - static_cast<std::ptrdiff_t>(sizeof(kvpolicy::position_t));
        bytes.erase(
            end - static_cast<std::ptrdiff_t>(ref.kv_heads * ref.state_size * std::int64_t{sizeof(float)}),
            end);
        return bytes;
    }

    OutputCheck<T> check_;
};

/// Moves all positions of a sequence but those of sinks, in both caches of one layer, by a multiple of all
/// windows: rows stay where they are.
template <class Both>
void move_positions(Both& both, std::int32_t seq, kvpolicy::position_t by) {
    const auto ref = both.oracle.cache.layer(0);
    ref.length[seq] += by;
    for (std::int32_t h = 0; h < ref.kv_heads; ++h) {
        const auto rows = ref.head_rows(seq, h);
        for (std::int32_t r = ref.layout(h).sinks; r < ref.used(seq, h); ++r) {
            rows.position(r) += by;
        }
    }
    std::vector<unsigned char> blob(both.oracle.cache.snapshot_bytes(seq));
    both.oracle.cache.snapshot(both.ctx, seq, blob.data(), blob.size());
    both.oracle.cache.restore(both.ctx, seq, blob.data(), blob.size());
    both.cache.restore(both.device, seq, blob.data(), blob.size());
}

/// Random calls on random sequences: steps, chunks, max_draft_tokens, forks, reorders, snapshots, clears.
template <class Dims = kvpolicy::all_head_dims, class P, class T>
void random_life(BothCaches<P, T, Dims>& both, Scores kind, std::int32_t calls, std::mt19937& generator) {
    CAPTURE(name(kind));
    const kvpolicy::CacheShape& shape = both.shape;
    const auto pick = [&](std::int32_t below) {
        return static_cast<std::int32_t>(generator() % static_cast<std::uint32_t>(below));
    };
    for (std::int32_t turn = 0; turn < calls; ++turn) {
        const std::int32_t what = pick(24);
        const std::int32_t a = pick(shape.max_sequences), b = pick(shape.max_sequences);
        std::string done;
        if (what == 0) {
            both.fork(a, b);
            done = "fork";
        } else if (what == 1) {
            std::vector<std::int32_t> sources(static_cast<std::size_t>(1 + pick(shape.max_sequences)));
            for (std::int32_t& source : sources) {
                source = pick(shape.max_sequences);
            }
            both.reorder(sources);
            done = "reorder";
        } else if (what == 2) {
            both.snapshot(a, b);
            done = "snapshot";
        } else if (what == 3) {
            both.oracle.cache.clear(both.ctx, a);
            both.cache.clear(both.device, a);
            done = "clear";
        } else {
            std::vector<std::int32_t> seq_ids(static_cast<std::size_t>(shape.max_sequences));
            for (std::size_t i = 0; i < seq_ids.size(); ++i) {
                seq_ids[i] = static_cast<std::int32_t>(i);
            }
            std::shuffle(seq_ids.begin(), seq_ids.end(), generator);
            seq_ids.resize(static_cast<std::size_t>(1 + pick(shape.max_sequences)));
            const Mode mode = what < 14                                  ? Mode::step
                              : what < 20 || shape.max_draft_tokens == 0 ? Mode::prefill
                                                                         : Mode::append_draft;
            const std::int32_t most = mode == Mode::step           ? 1
                                      : mode == Mode::append_draft ? shape.max_draft_tokens
                                                                   : 1 + pick(90);
            std::vector<std::int32_t> q_len, accepted;
            for (std::size_t i = 0; i < seq_ids.size(); ++i) {
                q_len.push_back(pick(most + 1));
                accepted.push_back(pick(q_len.back() + 1));
            }
            const CallTensors<T> in(shape, static_cast<std::int32_t>(seq_ids.size()), most, kind, generator);
            both.call(mode, seq_ids, q_len, in, accepted);
            done = mode == Mode::step      ? "step"
                   : mode == Mode::prefill ? "prefill"
                                           : "append_draft and accept";
        }
        both.same_rows(done + " at turn " + std::to_string(turn));
    }
}

}  // namespace test
