// Any operations on caches, beside caches in which nothing is clever (support/naive_cache.hpp): the same keys after each of them, and
// the same outputs, on a cache of fixed size and on one of pages that run out.
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "bytes.hpp"
#include "support/bound_dual.hpp"
#include "support/naive_slots.hpp"

#include <algorithm>
#include <memory>
#include <vector>

using namespace kvpolicy;
using fuzz::Bytes;

namespace {

using P = Policy<Sink<>, Window<>, ThresholdGate<above>, TopKBudget<>, Decay<dynamic>>;
constexpr std::int32_t dim = 8, heads = 2, group = 2, slots = 3, proposals = 4, most_tokens = 9,
                       longest = 200;

/// What stands beside a cache.
using Model = test::NaiveSlots<P>;

/// Tokens of a call, from the bytes.
struct Tokens {
    std::int32_t count, length;
    std::vector<float> q, k, v, out, score;
    Tokens(Bytes& in, std::int32_t entries, std::int32_t n) : count(entries), length(n) {
        const auto fill = [&](std::vector<float>& into, std::int32_t rows, std::int32_t width) {
            into.resize(static_cast<std::size_t>(entries * rows * n * width));
            // One byte a row, and what follows from it: the fuzzer's bytes are few.
            std::uint32_t x = in.byte();
            for (float& one : into) {
                x = x * 1664525u + 1013904223u;
                one = static_cast<float>(x >> 24) / 64.0f - 2.0f;
            }
        };
        fill(q, heads * group, dim);
        fill(k, heads, dim);
        fill(v, heads, dim);
        out.assign(q.size(), -55.0f);
        score.resize(static_cast<std::size_t>(entries * heads * n));
        for (float& one : score) {
            one = in.number();
            one = one == one ? one : 0.5f;
        }
    }
    [[nodiscard]] rows_view<const float> queries() const {
        return view_bhsd(q.data(), count, heads * group, length, dim);
    }
    [[nodiscard]] rows_view<const float> keys() const {
        return view_bhsd(k.data(), count, heads, length, dim);
    }
    [[nodiscard]] rows_view<const float> values() const {
        return view_bhsd(v.data(), count, heads, length, dim);
    }
    [[nodiscard]] rows_view<float> outputs() {
        return view_bhsd(out.data(), count, heads * group, length, dim);
    }
    [[nodiscard]] CacheExtras extras() const {
        return {.scores = view_bhs(score.data(), count, heads, length)};
    }
};

template <class Cache>
void same(const Cache& cache, const Model& model) {
    for (std::int32_t slot = 0; slot < slots; ++slot) {
        fuzz::check(cache.length(slot) == model.length(slot), "lengths differ");
        for (std::int32_t h = 0; h < heads; ++h) {
            std::vector<position_t> held(static_cast<std::size_t>(cache.occupancy(0, slot, h).rows()));
            cache.retained(0, slot, h, held.data());
            std::sort(held.begin(), held.end());
            fuzz::check(held == model.head[model.at(slot, h)].positions(), "the keys that are held differ");
        }
    }
}

/// Random operations on one kind of cache, from the bytes.
template <class Bound>
void run(Bytes& in, const host& on, Bound& bound, Model& model) {
    auto& cache = bound.cache;
    constexpr bool pooled = requires { cache.free_pages(); };
    const auto ref = cache.ref(0);
    struct Saved {
        std::vector<unsigned char> blob;
        std::vector<test::NaiveHead> head;
        std::vector<std::vector<float>> scores;
    } saved;
    std::vector<Tokens> proposed;  // the tokens of slot proposed_slot, if any
    std::int32_t proposed_slot = -1, proposed_count = 0;
    const auto forget = [&](std::int32_t slot) {
        if (slot == proposed_slot) {
            proposed_slot = -1;
        }
    };
    // Tells the model what an entry of a call brought, and compares the outputs of its last token.
    const auto follow = [&](Tokens& call, std::int32_t entry, std::int32_t slot, std::int32_t n,
                            bool outputs) {
        for (std::int32_t j = 0; j < n; ++j) {
            for (std::int32_t h = 0; h < heads; ++h) {
                model.append(slot, h, call.keys().row(entry, h, j), call.values().row(entry, h, j),
                             call.score[static_cast<std::size_t>((entry * heads + h) * call.length + j)]);
            }
        }
        for (std::int32_t hq = 0; outputs && n > 0 && hq < heads * group; ++hq) {
            const float* query = call.queries().row(entry, hq, n - 1);
            const auto wanted =
                model.head[model.at(slot, hq / group)].attend({query, query + dim}, 1.0f / std::sqrt(8.0f));
            for (std::int32_t c = 0; c < dim; ++c) {
                const double off = std::abs(static_cast<double>(call.outputs().row(entry, hq, n - 1)[c]) -
                                            wanted.out[static_cast<std::size_t>(c)]);
                fuzz::check(off < 1e-4, "outputs differ");
            }
        }
    };
    for (std::int32_t operations = 0; !in.empty() && operations < 60; ++operations) {
        const std::int32_t slot = in.below(slots), other = in.below(slots);
        std::uint32_t status = 0;
        switch (in.below(10)) {
            case 0:
            case 1:
            case 2:
            case 3: {  // steps or a chunk, of some slots
                const bool steps = in.flag();
                std::int32_t named[slots] = {0, 1, 2}, n[slots], left[slots];
                std::swap(named[0], named[slot]);
                const std::int32_t count = 1 + in.below(slots);
                std::int32_t longest_call = 0;
                for (std::int32_t i = 0; i < count; ++i) {
                    n[i] = in.below(steps ? 2 : most_tokens);
                    if (model.length(named[i]) + n[i] > longest) {
                        n[i] = 0;
                    }
                    left[i] = n[i];
                    longest_call = std::max(longest_call, n[i]);
                }
                Tokens call(in, count, std::max(1, longest_call));
                test::Workspace room(cache_workspace_bytes(on, ref, count, std::max(1, longest_call)));
                for (std::int32_t tries = 0; tries < 200; ++tries) {
                    const Batch batch{.count = count, .slots = named, .q_len = left, .length = call.length};
                    std::uint32_t found[slots] = {};
                    if (steps) {
                        step(on, ref, batch, call.queries(), call.keys(), call.values(), call.outputs(), room,
                             found, call.extras());
                    } else {
                        prefill(on, ref, batch, call.queries(), call.keys(), call.values(), call.outputs(),
                                room, found, call.extras());
                    }
                    bool again = false;
                    for (std::int32_t i = 0; i < count; ++i) {
                        if (left[i] == 0) {
                            continue;
                        }
                        if ((found[i] & status_pool_exhausted) != 0) {
                            again = true;
                            continue;
                        }
                        left[i] = 0;
                        forget(named[i]);
                        follow(call, i, named[i], n[i], true);
                    }
                    if (!again) {
                        break;
                    }
                    if constexpr (pooled) {
                        bound.add_slab(on);
                    } else {
                        fuzz::check(false, "a cache of fixed size ran out of rows");
                    }
                }
                cache.advance(on, {.count = count, .slots = named, .q_len = n, .length = call.length});
                break;
            }
            case 4: {  // propose
                const std::int32_t n = 1 + in.below(proposals);
                if (model.length(slot) + n > longest) {
                    break;
                }
                Tokens call(in, 1, n);
                test::Workspace room(cache_workspace_bytes(on, ref, 1, n));
                propose(on, ref, {.count = 1, .slots = &slot, .length = n}, call.queries(), call.keys(),
                        call.values(), call.outputs(), room, call.extras());
                Model copy = model;
                std::swap(copy, model);
                follow(call, 0, slot, n, true);
                std::swap(copy, model);
                if (proposed_slot >= 0 && proposed_slot != slot) {
                    // One at a time is enough for the model: that slot's proposals are committed as nothing.
                    commit(on, ref, {.count = 1, .slots = &proposed_slot, .length = 0}, room);
                }
                proposed.assign(1, call);
                proposed_slot = slot;
                proposed_count = n;
                break;
            }
            case 5: {  // commit, at times of more than was proposed
                const std::int32_t n = in.below(proposals + 1);
                const Batch batch{.count = 1, .slots = &slot, .length = n};
                test::Workspace room(cache_workspace_bytes(on, ref, 1, proposals));
                const bool valid = n == 0 || (slot == proposed_slot && n <= proposed_count);
                for (std::int32_t tries = 0; tries < 200; ++tries) {
                    status = 0;
                    const bool was_refused = fuzz::refused([&] { commit(on, ref, batch, room, &status); });
                    fuzz::check(was_refused != valid,
                                "a commit of what was not proposed, or a refusal of what was");
                    if (was_refused || status == 0) {
                        break;
                    }
                    if constexpr (pooled) {
                        bound.add_slab(on);
                    }
                }
                if (valid) {
                    if (n != 0) {
                        follow(proposed[0], 0, slot, n, false);
                    }
                    cache.advance(on, batch);
                    forget(slot);
                }
                break;
            }
            case 6: {  // fork
                cache.fork(on, slot, other, &status);
                if (status == 0 && slot != other) {
                    model.copy(model, slot, other);
                    forget(other);
                }
                break;
            }
            case 7: {  // reorder
                const std::int32_t count = in.below(slots + 1);
                std::int32_t sources[slots];
                for (std::int32_t& one : sources) {
                    one = in.below(slots);
                }
                cache.reorder(on, sources, count, &status);
                if (status == 0) {
                    const Model before = model;
                    for (std::int32_t i = 0; i < count; ++i) {
                        model.copy(before, sources[i], i);
                        forget(i);
                    }
                }
                break;
            }
            case 8: {  // snapshot, or restore
                if (saved.blob.empty() || in.flag()) {
                    saved.blob.resize(cache.snapshot_bytes(slot));
                    cache.snapshot(on, slot, saved.blob.data(), saved.blob.size());
                    saved.head.assign(model.head.begin() + slot * heads,
                                      model.head.begin() + (slot + 1) * heads);
                    saved.scores.assign(model.scores.begin() + slot * heads,
                                        model.scores.begin() + (slot + 1) * heads);
                } else {
                    cache.restore(on, slot, saved.blob.data(), saved.blob.size(), &status);
                    if (status == 0) {
                        std::copy(saved.head.begin(), saved.head.end(), model.head.begin() + slot * heads);
                        std::copy(saved.scores.begin(), saved.scores.end(),
                                  model.scores.begin() + slot * heads);
                        forget(slot);
                    }
                }
                break;
            }
            default: {
                if (in.flag()) {
                    cache.clear(on, slot);
                    model.clear(slot);
                    forget(slot);
                } else if constexpr (pooled) {
                    // A reserve changes nothing but who has the free pages.
                    if (model.length(slot) + 5 <= longest &&
                        cache.reserve(on, {.count = 1, .slots = &slot, .length = 5}) > 0 && in.flag()) {
                        bound.add_slab(on);
                    }
                }
                break;
            }
        }
        same(cache, model);
    }
    if constexpr (pooled) {
        for (std::int32_t slot = 0; slot < slots; ++slot) {
            cache.clear(on, slot);
        }
        fuzz::check(cache.free_pages() == cache.lent_pages(), "pages were lost");
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const host on(1);
    Bytes in(data, size);
    const bool pooled = in.flag();
    std::int32_t sinks[heads], windows[heads], budgets[heads];
    for (std::int32_t h = 0; h < heads; ++h) {
        sinks[h] = in.below(4);
        windows[h] = 1 + in.below(12);
        budgets[h] = pooled && in.below(4) == 0 ? unlimited : in.below(12);
    }
    const float gammas[] = {0.0f, -0.01f, -0.5f};
    const P policy{Sink<>{per_head(sinks, 1, heads)}, Window<>{per_head(windows, 1, heads)},
                   ThresholdGate<above>{static_cast<float>(in.below(5)) - 3.0f},
                   TopKBudget<>{per_head(budgets, 1, heads)},
                   Decay<dynamic>{gammas[in.below(3)], 1 + in.below(3)}};
    const CacheShape shape{.slots = slots,
                           .query_heads = heads * group,
                           .kv_heads = heads,
                           .dim_k = dim,
                           .dim_v = dim,
                           .page_rows = 1 + in.below(5),
                           .proposals = proposals};
    const position_t rebase = in.flag() ? 7 : rebase_limit;
    Model model(policy, slots, heads, dim, rebase);
    if (pooled) {
        test::BoundDual<P, float> bound(
            on, shape, {.slab_pages = 3 + in.below(20), .most_slabs = 2000, .longest = longest}, policy,
            nullptr, rebase);
        run(in, on, bound, model);
    } else {
        test::BoundCache<P, float> bound(on, shape, policy, nullptr, {}, rebase);
        run(in, on, bound, model);
    }
    return 0;
}
