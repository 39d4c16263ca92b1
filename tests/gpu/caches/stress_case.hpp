// Random operations on caches on a device, beside caches in which nothing is clever
// (support/naive_sequences.hpp): the same keys after each of them, and the same outputs. A watchdog ends the
// program where a kernel hangs, and says in which operation.
#pragma once

#include <kvpolicy/core/status.hpp>
#include <kvpolicy/cuda.cuh>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/eviction.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "../../support/bound_dual.hpp"
#include "../../support/naive_sequences.hpp"
#include "../support/device.hpp"
#include "support/step_io.hpp"

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <random>
#include <thread>

namespace stress {

using namespace kvpolicy;
using namespace test;

constexpr std::int32_t dim = 8, heads = 2, group = 2, max_sequences = 3, max_draft_tokens = 4,
                       max_seq_len = 300;
constexpr AttentionParams attention{.sm_scale =
                                        0.375f};  // exact, so that masses do not depend on who rounds it

/// Ends the program when an operation takes more than a minute.
class Watchdog {
  public:
    Watchdog() : thread_([this] { watch(); }) {}
    Watchdog(const Watchdog&) = delete;
    Watchdog& operator=(const Watchdog&) = delete;
    ~Watchdog() {
        done_ = true;
        thread_.join();
    }
    void begins(const char* operation, std::int32_t number) {
        operation_ = operation;
        number_ = number;
    }

  private:
    void watch() {
        std::int32_t last = -1, still = 0;
        while (!done_) {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            still = number_ == last ? still + 1 : 0;
            last = number_;
            if (still > 600) {
                std::fprintf(stderr, "operation %d, %s, has not ended in a minute\n", last,
                             operation_.load());
                std::_Exit(1);
            }
        }
    }
    std::atomic<const char*> operation_{"none"};
    std::atomic<std::int32_t> number_{0};
    std::atomic<bool> done_{false};
    std::thread thread_;
};

/// Tokens of a call, in host and in device memory.
template <class T>
struct Tokens {
    std::int32_t count, length;
    std::vector<T> q, k, v;
    std::vector<float> score;
    std::unique_ptr<Device<T>> of_q, of_k, of_v, out;
    std::unique_ptr<Device<float>> of_score;

    Tokens(std::mt19937& generator, std::int32_t entries, std::int32_t n) : count(entries), length(n) {
        std::normal_distribution<float> normal;
        const auto fill = [&](auto& into, auto& copy, std::int32_t rows, std::int32_t width) {
            into.resize(static_cast<std::size_t>(entries * rows * n * width));
            for (auto& one : into) {
                one = normal(generator);
            }
            copy = std::make_unique<typename std::decay_t<decltype(copy)>::element_type>(into);
        };
        fill(q, of_q, heads * group, dim);
        fill(k, of_k, heads, dim);
        fill(v, of_v, heads, dim);
        fill(score, of_score, heads, 1);
        for (float& one : score) {
            one = std::round(2.0f * one) * 0.5f;  // ties
        }
        of_score = std::make_unique<Device<float>>(score);
        out = std::make_unique<Device<T>>(std::vector<T>(q.size(), T(0.5)));
    }
    [[nodiscard]] rows_view<const T> queries() const { return rows(of_q->data(), heads * group); }
    [[nodiscard]] rows_view<const T> keys() const { return rows(of_k->data(), heads); }
    [[nodiscard]] rows_view<const T> values() const { return rows(of_v->data(), heads); }
    [[nodiscard]] rows_view<T> outputs() const {
        return view_bhsd(out->data(), count, heads * group, length, dim);
    }
    [[nodiscard]] test::Extras extras() const {
        return {.scores = view_bhs<const float>(of_score->data(), count, heads, length)};
    }
    [[nodiscard]] rows_view<const T> rows(const T* data, std::int32_t of) const {
        return view_bhsd(data, count, of, length, dim);
    }
};

CacheShape shape_of(std::int32_t of_slots) {
    return {.max_sequences = of_slots,
            .query_heads = heads * group,
            .kv_heads = heads,
            .head_dim_qk = dim,
            .head_dim_vo = dim,
            .page_size = 16,
            .max_draft_tokens = max_draft_tokens};
}
constexpr PoolShape pool{.slab_pages = 5, .max_slabs = 14, .max_seq_len = max_seq_len};

/// A cache of either kind on the device, with what it was attached.
template <class P, class Cache>
struct Bound {
    static constexpr bool pooled = Cache::ref_type::pooled;
    kvpolicy::cuda ctx{};
    Cache cache;
    Device<unsigned char> memory;
    std::vector<std::unique_ptr<Device<unsigned char>>> slabs;

    static Cache make(const P& policy) {
        if constexpr (pooled) {
            return Cache(shape_of(max_sequences), pool, policy, nullptr, attention);
        } else {
            return Cache(shape_of(max_sequences), policy, nullptr, attention);
        }
    }
    Bound(const P& policy, position_t rebase) : cache(make(policy)), memory(cache.bytes().total()) {
        ok(cudaMemset(memory.data(), 0xff, memory.bytes()));
        cache.rebase_limit(rebase);
        cache.bind(ctx, memory.data(), memory.size());
    }
    bool add_slab() {
        if constexpr (pooled) {
            if (cache.slabs() < pool.max_slabs) {
                slabs.push_back(std::make_unique<Device<unsigned char>>(cache.slab_bytes()));
                ok(cudaMemset(slabs.back()->data(), 0xff, slabs.back()->bytes()));
                cache.add_slab(ctx, slabs.back()->data(), slabs.back()->size());
                return true;
            }
        }
        return false;
    }
    void fork(std::int32_t from, std::int32_t to, std::uint32_t* status) {
        if constexpr (pooled) {
            cache.fork(ctx, from, to, {.status = status});
        } else {
            cache.fork(ctx, from, to);
        }
    }
    void restore(std::int32_t seq, const std::vector<unsigned char>& blob, std::uint32_t* status) {
        if constexpr (pooled) {
            cache.restore(ctx, seq, blob.data(), blob.size(), {.status = status});
        } else {
            cache.restore(ctx, seq, blob.data(), blob.size());
        }
    }
    std::vector<unsigned char> snapshot(std::int32_t seq) const {
        std::vector<unsigned char> blob(cache.snapshot_bytes(ctx, seq));
        cache.snapshot(ctx, seq, blob.data(), blob.size());
        return blob;
    }
};

/// Whether a sequence holds the keys that it must, with their keys and values: through a snapshot that a
/// host cache takes.
template <class P, class Cache, class T>
bool same(const Bound<P, Cache>& bound, const NaiveSequences<P>& model, std::int32_t seq,
          BoundDual<P, T>& reader) {
    const host ctx{1};
    const std::vector<unsigned char> blob = bound.snapshot(seq);
    reader.cache.restore(ctx, 0, blob.data(), blob.size());
    if (reader.cache.length(0) != model.length(seq)) {
        return false;
    }
    const auto ref = reader.cache.layer(0);
    for (std::int32_t h = 0; h < heads; ++h) {
        const NaiveHead& wanted = model.head[model.at(seq, h)];
        if (reader.sorted(0, 0, h) != wanted.positions()) {
            return false;
        }
        const auto rows = ref.head_rows(0, h);
        for (std::int32_t r = 0; r < ref.used(0, h); ++r) {
            for (const NaiveHead::Row& row : wanted.rows) {
                if (row.position == rows.position(r) &&
                    (real_row(rows.k(r), dim) != row.k || real_row(rows.v(r), dim) != row.v)) {
                    return false;
                }
            }
        }
    }
    return true;
}

/// So many operations on a cache of the policy.
template <class P, class Cache>
void run(const P& policy, std::uint32_t seed, std::int32_t operations) {
    using T = typename Cache::ref_type::value_type;
    using Model = NaiveSequences<P>;
    std::mt19937 generator(seed);
    const auto pick = [&](std::int32_t below) {
        return static_cast<std::int32_t>(generator() % static_cast<std::uint32_t>(below));
    };
    constexpr bool pooled = Bound<P, Cache>::pooled;
    constexpr position_t rebase = 23;
    Watchdog watchdog;
    Bound<P, Cache> bound(policy, rebase);
    auto& cache = bound.cache;
    const kvpolicy::cuda& ctx = bound.ctx;
    const auto ref = cache.layer(0);
    Model model(policy, max_sequences, heads, dim, rebase);
    BoundDual<P, T> reader(host{1}, shape_of(1),
                           {.slab_pages = 100, .max_slabs = 1, .max_seq_len = max_seq_len}, policy, nullptr,
                           rebase, attention);
    reader.add_slab(host{1});
    Model saved = model;
    std::vector<unsigned char> blob;
    std::unique_ptr<Tokens<T>> num_draft;  // of draft_seq, if any
    std::int32_t draft_seq = -1;
    const auto forget = [&](std::int32_t seq) { draft_seq = seq == draft_seq ? -1 : draft_seq; };
    double worst = 0.0;
    // Tells the model what an entry of a call brought, and compares the outputs of every token.
    const auto follow = [&](Model& of, const Tokens<T>& call, std::int32_t entry, std::int32_t seq,
                            std::int32_t n, const std::vector<T>& out) {
        const auto at = [&](std::int32_t row, std::int32_t j) {
            return static_cast<std::ptrdiff_t>((row * call.length + j) * dim);
        };
        for (std::int32_t j = 0; j < n; ++j) {
            for (std::int32_t h = 0; h < heads; ++h) {
                const std::int32_t row = entry * heads + h;
                of.append(seq, h, call.k.data() + at(row, j), call.v.data() + at(row, j),
                          call.score[static_cast<std::size_t>(row * call.length + j)]);
                for (std::int32_t g = 0; P::has_eviction && g < group; ++g) {
                    const T* const query = call.q.data() + at(row * group + g, j);
                    of.head[of.at(seq, h)].asked(g, {query, query + dim});
                }
            }
            for (std::int32_t hq = 0; !out.empty() && hq < heads * group; ++hq) {
                const T* const query = call.q.data() + at(entry * heads * group + hq, j);
                const auto wanted =
                    of.head[of.at(seq, hq / group)].attend({query, query + dim}, attention.sm_scale);
                for (std::int32_t c = 0; c < dim; ++c) {
                    const double got = static_cast<double>(
                        out[static_cast<std::size_t>(at(entry * heads * group + hq, j) + c)]);
                    const double off = std::abs(got - wanted.out[static_cast<std::size_t>(c)]);
                    worst = off <= worst ? worst : off == off ? off : 1e30;
                }
            }
        }
    };
    std::int64_t dropped = 0;
    // Both look at what the named sequences hold; sequences without tokens are left alone.
    const auto evict = [&](const std::vector<std::int32_t>& named, const std::vector<std::int32_t>& n,
                           std::int32_t number) {
        if constexpr (P::has_eviction) {
            watchdog.begins("evict", number);
            std::vector<EvictionReport> wanted(named.size());
            const Device<EvictionReport> reports(wanted);
            const Device<std::int32_t> of_named(named), of_n(n);
            const Device<std::uint32_t> status(std::vector<std::uint32_t>(max_sequences, 0));
            const Device<unsigned char> workspace(cache.evict_workspace_bytes(ctx));
            cache.evict(ctx, {static_cast<std::int32_t>(named.size()), of_named.data(), of_n.data(), 1},
                        workspace, {.reports = reports.data(), .status = status.data()});
            const auto found = reports.read();
            CHECK(status.read() == std::vector<std::uint32_t>(max_sequences, 0));
            for (std::size_t i = 0; i < named.size(); ++i) {
                if (n[i] != 0) {
                    wanted[i] = model.evict(named[i], policy.eviction(), attention.sm_scale);
                }
                REQUIRE(found[i].rounds == wanted[i].rounds);
                REQUIRE(found[i].dropped == wanted[i].dropped);
                REQUIRE(found[i].rows == wanted[i].rows);
                dropped += wanted[i].dropped;
                if (wanted[i].dropped != 0) {
                    REQUIRE(same(bound, model, named[i], reader));
                }
            }
        }
    };
    for (std::int32_t number = 0; number < operations; ++number) {
        const std::int32_t seq = pick(max_sequences), other = pick(max_sequences), what = pick(12);
        const char* name = "a call";
        Device<std::uint32_t> status(std::vector<std::uint32_t>(max_sequences, 0));
        std::uint32_t word = 0;
        if (what < 5) {
            const bool steps = pick(2) == 0;
            name = steps ? "steps" : "a chunk";
            watchdog.begins(name, number);
            std::vector<std::int32_t> named{0, 1, 2}, n;
            std::swap(named[0], named[static_cast<std::size_t>(seq)]);
            named.resize(static_cast<std::size_t>(1 + pick(max_sequences)));
            std::int32_t most = 1;
            for (const std::int32_t s : named) {
                const std::int32_t tokens = pick(steps ? 2 : 24);
                if (model.length(s) + tokens > max_seq_len) {  // it leaves, and another joins
                    cache.clear(ctx, s);
                    model.clear(s);
                    forget(s);
                }
                n.push_back(tokens);
                most = std::max(most, tokens);
            }
            const auto count = static_cast<std::int32_t>(named.size());
            const Tokens<T> call(generator, count, most);
            const Device<std::int32_t> of_slots(named);
            const Device<unsigned char> workspace(
                workspace_bytes<head_dims<64>>(ctx, ref, {.batch = count, .tokens = most}));
            std::vector<std::int32_t> left = n;
            for (bool again = true; again;) {
                again = false;
                const Device<std::int32_t> of_left(left);
                const Batch batch{count, of_slots.data(), of_left.data(), most};
                ok(cudaMemset(status.data(), 0, status.bytes()));
                if (steps) {
                    step<head_dims<64>>(ctx, ref,
                                        test::step_io(batch, call.queries(), call.keys(), call.values(),
                                                      call.outputs(), call.extras()),
                                        workspace, {.status = status.data()});
                } else {
                    prefill<head_dims<64>>(ctx, ref,
                                           test::step_io(batch, call.queries(), call.keys(), call.values(),
                                                         call.outputs(), call.extras()),
                                           workspace, {.status = status.data()});
                }
                const auto found = status.read();
                const auto out = call.out->read();
                bool refused = false;
                for (std::int32_t i = 0; i < count; ++i) {
                    const auto x = static_cast<std::size_t>(i);
                    if (left[x] == 0) {
                        continue;
                    }
                    if (found[x] == status_pool_exhausted && pooled) {
                        refused = true;
                        continue;
                    }
                    REQUIRE(found[x] == 0);
                    left[x] = 0;
                    forget(named[x]);
                    follow(model, call, i, named[x], n[x], out);
                }
                again = refused && bound.add_slab();
                if (refused && !again) {  // the first that found no page leaves
                    for (std::size_t x = 0; x < left.size(); ++x) {
                        if (left[x] != 0) {
                            cache.clear(ctx, named[x]);
                            model.clear(named[x]);
                            forget(named[x]);
                            left[x] = n[x] = 0;
                            break;
                        }
                    }
                    again = true;
                }
            }
            const Device<std::int32_t> of_n(n);
            ok(cudaMemset(status.data(), 0, status.bytes()));
            cache.advance(ctx, {count, of_slots.data(), of_n.data(), most}, {.status = status.data()});
            REQUIRE(status.read() == std::vector<std::uint32_t>(max_sequences, 0));
            if (pick(4) != 0) {
                evict(named, n, number);
            }
        } else if (what == 5 || what == 6) {
            const std::int32_t n = 1 + pick(max_draft_tokens);
            if (model.length(seq) + n <= max_seq_len) {
                watchdog.begins(name = "append_draft", number);
                const Device<std::int32_t> of_seq(std::vector<std::int32_t>{seq});
                const Batch batch{.count = 1, .seq_ids = of_seq.data(), .length = n};
                num_draft = std::make_unique<Tokens<T>>(generator, 1, n);
                const Device<unsigned char> workspace(
                    workspace_bytes<head_dims<64>>(ctx, ref, {.batch = 1, .tokens = max_draft_tokens}));
                append_draft<head_dims<64>>(
                    ctx, ref,
                    test::step_io(batch, num_draft->queries(), num_draft->keys(), num_draft->values(),
                                  num_draft->outputs(), num_draft->extras()),
                    workspace, {.status = status.data()});
                REQUIRE(status.read()[0] == 0);
                Model ahead = model;
                follow(ahead, *num_draft, 0, seq, n, num_draft->out->read());
                draft_seq = seq;
                const std::int32_t some = pick(n + 1);
                watchdog.begins(name = "accept", number);
                for (bool again = pick(4) != 0; again;) {
                    again = false;
                    const Batch first{.count = 1, .seq_ids = of_seq.data(), .length = some};
                    ok(cudaMemset(status.data(), 0, status.bytes()));
                    accept<head_dims<64>>(ctx, ref, first, workspace, {.status = status.data()});
                    const std::uint32_t found = status.read()[0];
                    if (found == status_pool_exhausted && pooled) {
                        again = bound.add_slab();
                        if (!again) {
                            cache.clear(ctx, seq);
                            model.clear(seq);
                        }
                    } else {
                        REQUIRE(found == 0);
                        follow(model, *num_draft, 0, seq, some, {});
                        cache.advance(ctx, first, {.status = status.data()});
                        REQUIRE(status.read()[0] == 0);
                        evict({seq}, {some}, number);
                    }
                    forget(seq);
                }
            }
        } else if (what == 7) {  // of more than was drafted
            watchdog.begins(name = "a accept too many", number);
            std::int32_t waiting = 0;
            ok(cudaMemcpy(&waiting, ref.num_draft + seq, sizeof waiting, cudaMemcpyDeviceToHost));
            if (waiting < max_draft_tokens) {
                const std::vector<unsigned char> before = bound.snapshot(seq);
                const Device<std::int32_t> of_seq(std::vector<std::int32_t>{seq});
                const Batch batch{.count = 1, .seq_ids = of_seq.data(), .length = waiting + 1};
                const Device<unsigned char> workspace(
                    workspace_bytes<head_dims<64>>(ctx, ref, {.batch = 1, .tokens = max_draft_tokens}));
                accept<head_dims<64>>(ctx, ref, batch, workspace, {.status = status.data()});
                CHECK(status.read()[0] == status_bad_length);
                CHECK(bound.snapshot(seq) == before);
                forget(seq);  // a commit that is refused forgets them
            }
        } else if (what == 8) {
            watchdog.begins(name = "fork", number);
            bound.fork(seq, other, status.data());
            if (status.read()[0] == 0 && seq != other) {
                model.copy(model, seq, other);
                forget(other);
            }
        } else if (what == 9) {
            watchdog.begins(name = "reorder", number);
            std::vector<std::int32_t> sources(static_cast<std::size_t>(1 + pick(max_sequences)));
            for (std::int32_t& one : sources) {
                one = pick(max_sequences);
            }
            const Device<std::int32_t> of_sources(sources);
            cache.reorder(ctx, of_sources.data(), static_cast<std::int32_t>(sources.size()),
                          {.status = status.data()});
            if (status.read()[0] == 0) {
                const Model before = model;
                for (std::size_t i = 0; i < sources.size(); ++i) {
                    model.copy(before, sources[i], static_cast<std::int32_t>(i));
                    forget(static_cast<std::int32_t>(i));
                }
            }
        } else if (what == 10) {
            if (blob.empty() || pick(2) == 0) {
                watchdog.begins(name = "snapshot", number);
                blob = bound.snapshot(seq);
                saved.copy(model, seq, 0);
            } else {
                watchdog.begins(name = "restore", number);
                bound.restore(seq, blob, &word);
                if (word == 0) {
                    model.copy(saved, 0, seq);
                    forget(seq);
                }
            }
        } else {
            watchdog.begins(name = "leave", number);
            if (pick(3) == 0) {
                cache.clear(ctx, seq);
                model.clear(seq);
                forget(seq);
            } else if constexpr (pooled) {
                const Device<std::int32_t> of_seq(std::vector<std::int32_t>{seq});
                if (model.length(seq) + 5 <= max_seq_len &&
                    cache.reserve(ctx, {.count = 1, .seq_ids = of_seq.data(), .length = 5}) > 0) {
                    bound.add_slab();
                }
            }
        }
        CAPTURE(number);
        CAPTURE(name);
        for (std::int32_t s = 0; s < max_sequences; ++s) {
            CAPTURE(s);
            REQUIRE((s != seq && what < 8 && number % 4 != 3 ? true : same(bound, model, s, reader)));
        }
        REQUIRE(worst < 5e-5);  // fp32 sums of 8 products and of a few hundred weights
    }
    CHECK((!P::has_eviction || dropped > operations / 10));
    if constexpr (pooled) {
        for (std::int32_t seq = 0; seq < max_sequences; ++seq) {
            cache.clear(ctx, seq);
        }
        CHECK(cache.free_pages(ctx) == cache.attached_pages());
    }
}

}  // namespace stress
