// Any operations on caches, beside caches in which nothing is clever (support/naive_cache.hpp): the same keys
// after each of them, and the same outputs, on a cache of fixed size and on one of pages that run out.
#include <kvpolicy/caches/dual.hpp>
#include <kvpolicy/caches/fixed_budget.hpp>
#include <kvpolicy/policies/decay.hpp>
#include <kvpolicy/policies/sink.hpp>
#include <kvpolicy/policies/threshold_gate.hpp>
#include <kvpolicy/policies/topk_budget.hpp>
#include <kvpolicy/policies/window.hpp>

#include "bytes.hpp"
#include "support/bound_dual.hpp"
#include "support/naive_sequences.hpp"
#include "support/step_io.hpp"

#include <algorithm>
#include <memory>
#include <vector>

using namespace kvpolicy;
using fuzz::Bytes;

namespace {

using P = Policy<Sink<>, Window<>, ThresholdGate<above>, TopKBudget<>, Decay<dynamic>>;
constexpr std::int32_t dim = 8, heads = 2, group = 2, max_sequences = 3, max_draft_tokens = 4, max_tokens = 9,
                       max_seq_len = 200;

/// What stands beside a cache.
using Model = test::NaiveSequences<P>;

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
    [[nodiscard]] test::Extras extras() const {
        return {.scores = view_bhs(score.data(), count, heads, length)};
    }
};

template <class Cache>
void same(const Cache& cache, const Model& model) {
    for (std::int32_t seq = 0; seq < max_sequences; ++seq) {
        fuzz::check(cache.length(seq) == model.length(seq), "lengths differ");
        for (std::int32_t h = 0; h < heads; ++h) {
            std::vector<position_t> held(static_cast<std::size_t>(cache.usage(0, seq, h).size()));
            cache.retained(0, seq, h, held.data());
            std::sort(held.begin(), held.end());
            fuzz::check(held == model.head[model.at(seq, h)].positions(), "the keys that are held differ");
        }
    }
}

/// Random operations on one kind of cache, from the bytes.
template <class Bound>
void run(Bytes& in, const host& ctx, Bound& bound, Model& model) {
    auto& cache = bound.cache;
    constexpr bool pooled = requires { cache.free_pages(); };
    const auto ref = cache.layer(0);
    struct Saved {
        std::vector<unsigned char> blob;
        std::vector<test::NaiveHead> head;
        std::vector<std::vector<float>> scores;
    } saved;
    std::vector<Tokens> num_draft;  // the tokens of sequence draft_seq, if any
    std::int32_t draft_seq = -1, num_draft_of = 0;
    const auto forget = [&](std::int32_t seq) {
        if (seq == draft_seq) {
            draft_seq = -1;
        }
    };
    // Tells the model what an entry of a call brought, and compares the outputs of its last token.
    const auto follow = [&](Tokens& call, std::int32_t entry, std::int32_t seq, std::int32_t n,
                            bool outputs) {
        for (std::int32_t j = 0; j < n; ++j) {
            for (std::int32_t h = 0; h < heads; ++h) {
                model.append(seq, h, call.keys().row(entry, h, j), call.values().row(entry, h, j),
                             call.score[static_cast<std::size_t>((entry * heads + h) * call.length + j)]);
            }
        }
        for (std::int32_t hq = 0; outputs && n > 0 && hq < heads * group; ++hq) {
            const float* query = call.queries().row(entry, hq, n - 1);
            const auto wanted =
                model.head[model.at(seq, hq / group)].attend({query, query + dim}, 1.0f / std::sqrt(8.0f));
            for (std::int32_t c = 0; c < dim; ++c) {
                const double off = std::abs(static_cast<double>(call.outputs().row(entry, hq, n - 1)[c]) -
                                            wanted.out[static_cast<std::size_t>(c)]);
                fuzz::check(off < 1e-4, "outputs differ");
            }
        }
    };
    for (std::int32_t operations = 0; !in.empty() && operations < 60; ++operations) {
        const std::int32_t seq = in.below(max_sequences), other = in.below(max_sequences);
        std::uint32_t status = 0;
        switch (in.below(10)) {
            case 0:
            case 1:
            case 2:
            case 3: {  // steps or a chunk, of some sequences
                const bool steps = in.flag();
                std::int32_t named[max_sequences] = {0, 1, 2}, n[max_sequences], left[max_sequences];
                std::swap(named[0], named[seq]);
                const std::int32_t count = 1 + in.below(max_sequences);
                std::int32_t longest_call = 0;
                for (std::int32_t i = 0; i < count; ++i) {
                    n[i] = in.below(steps ? 2 : max_tokens);
                    if (model.length(named[i]) + n[i] > max_seq_len) {
                        n[i] = 0;
                    }
                    left[i] = n[i];
                    longest_call = std::max(longest_call, n[i]);
                }
                Tokens call(in, count, std::max(1, longest_call));
                test::Workspace workspace(
                    workspace_bytes(ctx, ref, {.batch = count, .tokens = std::max(1, longest_call)}));
                for (std::int32_t tries = 0; tries < 200; ++tries) {
                    const Batch batch{.count = count, .seq_ids = named, .q_len = left, .length = call.length};
                    std::uint32_t found[max_sequences] = {};
                    if (steps) {
                        step(ctx, ref,
                             test::step_io(batch, call.queries(), call.keys(), call.values(), call.outputs(),
                                           call.extras()),
                             workspace, {.status = found});
                    } else {
                        prefill(ctx, ref,
                                test::step_io(batch, call.queries(), call.keys(), call.values(),
                                              call.outputs(), call.extras()),
                                workspace, {.status = found});
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
                        bound.add_slab(ctx);
                    } else {
                        fuzz::check(false, "a cache of fixed size ran out of rows");
                    }
                }
                cache.advance(ctx, {.count = count, .seq_ids = named, .q_len = n, .length = call.length});
                break;
            }
            case 4: {  // append_draft
                const std::int32_t n = 1 + in.below(max_draft_tokens);
                if (model.length(seq) + n > max_seq_len) {
                    break;
                }
                Tokens call(in, 1, n);
                test::Workspace workspace(workspace_bytes(ctx, ref, {.batch = 1, .tokens = n}));
                append_draft(ctx, ref,
                             test::step_io({.count = 1, .seq_ids = &seq, .length = n}, call.queries(),
                                           call.keys(), call.values(), call.outputs(), call.extras()),
                             workspace);
                Model copy = model;
                std::swap(copy, model);
                follow(call, 0, seq, n, true);
                std::swap(copy, model);
                if (draft_seq >= 0 && draft_seq != seq) {
                    // One at a time is enough for the model: that sequence's draft tokens are
                    // committed as nothing.
                    accept(ctx, ref, {.count = 1, .seq_ids = &draft_seq, .length = 0}, workspace);
                }
                num_draft.assign(1, call);
                draft_seq = seq;
                num_draft_of = n;
                break;
            }
            case 5: {  // accept, at times of more than was drafted
                const std::int32_t n = in.below(max_draft_tokens + 1);
                const Batch batch{.count = 1, .seq_ids = &seq, .length = n};
                test::Workspace workspace(
                    workspace_bytes(ctx, ref, {.batch = 1, .tokens = max_draft_tokens}));
                const bool valid = n == 0 || (seq == draft_seq && n <= num_draft_of);
                for (std::int32_t tries = 0; tries < 200; ++tries) {
                    status = 0;
                    const bool was_refused =
                        fuzz::refused([&] { accept(ctx, ref, batch, workspace, {.status = &status}); });
                    fuzz::check(
                        was_refused != valid,
                        "an accept of tokens that were not drafted, or a refusal of tokens that were");
                    if (was_refused || status == 0) {
                        break;
                    }
                    if constexpr (pooled) {
                        bound.add_slab(ctx);
                    }
                }
                if (valid) {
                    if (n != 0) {
                        follow(num_draft[0], 0, seq, n, false);
                    }
                    cache.advance(ctx, batch);
                    forget(seq);
                }
                break;
            }
            case 6: {  // fork
                cache.fork(ctx, seq, other, {.status = &status});
                if (status == 0 && seq != other) {
                    model.copy(model, seq, other);
                    forget(other);
                }
                break;
            }
            case 7: {  // reorder
                const std::int32_t count = in.below(max_sequences + 1);
                std::int32_t sources[max_sequences];
                for (std::int32_t& one : sources) {
                    one = in.below(max_sequences);
                }
                cache.reorder(ctx, sources, count, {.status = &status});
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
                    saved.blob.resize(cache.snapshot_bytes(seq));
                    cache.snapshot(ctx, seq, saved.blob.data(), saved.blob.size());
                    saved.head.assign(model.head.begin() + seq * heads,
                                      model.head.begin() + (seq + 1) * heads);
                    saved.scores.assign(model.scores.begin() + seq * heads,
                                        model.scores.begin() + (seq + 1) * heads);
                } else {
                    cache.restore(ctx, seq, saved.blob.data(), saved.blob.size(), {.status = &status});
                    if (status == 0) {
                        std::copy(saved.head.begin(), saved.head.end(), model.head.begin() + seq * heads);
                        std::copy(saved.scores.begin(), saved.scores.end(),
                                  model.scores.begin() + seq * heads);
                        forget(seq);
                    }
                }
                break;
            }
            default: {
                if (in.flag()) {
                    cache.clear(ctx, seq);
                    model.clear(seq);
                    forget(seq);
                } else if constexpr (pooled) {
                    // A reserve changes nothing but who has the free pages.
                    if (model.length(seq) + 5 <= max_seq_len &&
                        cache.reserve(ctx, {.count = 1, .seq_ids = &seq, .length = 5}) > 0 && in.flag()) {
                        bound.add_slab(ctx);
                    }
                }
                break;
            }
        }
        same(cache, model);
    }
    if constexpr (pooled) {
        for (std::int32_t seq = 0; seq < max_sequences; ++seq) {
            cache.clear(ctx, seq);
        }
        fuzz::check(cache.free_pages() == cache.attached_pages(), "pages were lost");
    }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
    static const host ctx(1);
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
    const CacheShape shape{.max_sequences = max_sequences,
                           .query_heads = heads * group,
                           .kv_heads = heads,
                           .head_dim_qk = dim,
                           .head_dim_vo = dim,
                           .page_size = 1 + in.below(5),
                           .max_draft_tokens = max_draft_tokens};
    const position_t rebase = in.flag() ? 7 : rebase_limit;
    Model model(policy, max_sequences, heads, dim, rebase);
    if (pooled) {
        test::BoundDual<P, float> bound(
            ctx, shape, {.slab_pages = 3 + in.below(20), .max_slabs = 2000, .max_seq_len = max_seq_len},
            policy, nullptr, rebase);
        run(in, ctx, bound, model);
    } else {
        test::BoundCache<P, float> bound(ctx, shape, policy, nullptr, {}, rebase);
        run(in, ctx, bound, model);
    }
    return 0;
}
