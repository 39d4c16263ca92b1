// Steps and prompts of caches whose policy ranks keys by the attention they receive (scorers/observed.hpp):
// the rows become a list (observed_list.hpp), the list decides, and the remaining keys go back to their rows.
#pragma once

#include <kvpolicy/attention/host/observed_list.hpp>
#include <kvpolicy/caches/host/admit.hpp>
#include <kvpolicy/caches/host/attend_entries.hpp>
#include <kvpolicy/caches/host/entries.hpp>
#include <kvpolicy/caches/layer_ref.hpp>
#include <kvpolicy/core/finite_rows.hpp>
#include <kvpolicy/core/workspace.hpp>

#include <algorithm>

namespace kvpolicy::host_backend {

/// A call's tensors; `at(j)` are those of its tokens from j on.
template <Storage T>
struct observed_call {
    rows_view<const T> q, k, v;
    rows_view<T> out;
    plane_view<float> lse;
    const std::int32_t* edges = nullptr;  // of packed entries

    /// Those of one packed entry, a batch of one.
    [[nodiscard]] observed_call of_entry(std::int32_t i) const {
        return {entry_rows(q, edges, i), entry_rows(k, edges, i), entry_rows(v, edges, i),
                entry_rows(out, edges, i), entry_plane(lse, edges, i)};
    }
    [[nodiscard]] observed_call at(std::int32_t j) const {
        observed_call rest = *this;
        rest.q.data += j * q.row_stride;
        rest.k.data += j * k.row_stride;
        rest.v.data += j * v.row_stride;
        rest.out.data += j * out.row_stride;
        if (lse) {
            rest.lse.data += j;
        }
        return rest;
    }
};

/// A step (`prompt` is false) or a prompt, on its way through a cache.
template <class Cache>
class observed_pass {
    using P = typename Cache::policy_type;
    using T = typename Cache::value_type;
    static constexpr bool evicts_at_steps = P::scorer_type::evicts_at_steps;

  public:
    /// `memory`, if not null, has bytes() of memory for `count` entries of at most `tokens` tokens.
    observed_pass(const host& ctx, const Cache& cache, std::int32_t count, std::int32_t tokens,
                  std::byte* memory)
        : ctx_(ctx), cache_(cache), seen_(cache.scorer.observation()), shape_(shape_of(cache)) {
        shape_.head_dim_vo = 0;  // masses need no values
        block_ = seen_.chunk == Observation::whole_call ? tokens : std::min(tokens, seen_.chunk);
        for (std::int32_t h = 0; h < cache.kv_heads; ++h) {
            keys_ = std::max(keys_, cache.capacity(h) + block_);
        }
        head_bytes_ = observed_head<T>::bytes(keys_);
        scratch_bytes_ = mass_scratch<T>(nullptr, cache.head_dim_qk, keys_).bytes;
        // Lists wait for each other where a layer is averaged, and for attention where it is to leave out a
        // row. Others are made, used and forgotten head by head: those of policies that grow may be long.
        lists_wait_ = evicts_at_steps || seen_.whole_layer;
        const auto threads = static_cast<std::size_t>(ctx.threads());
        const std::size_t lists =
            lists_wait_ ? static_cast<std::size_t>(count) * static_cast<std::size_t>(cache.kv_heads)
                        : threads;
        detail::arena parts(memory);
        tokens_ = parts.template take<std::int32_t>(static_cast<std::size_t>(count));
        heads_ = parts.template take<std::byte>(lists * head_bytes_);
        scratch_ = parts.template take<std::byte>(threads * scratch_bytes_);
        const std::size_t attention =
            std::max(decode_bytes(ctx, cache, count), chunk_attention_bytes(ctx, cache));
        attention_ = parts.template take<std::byte>(attention);
        bytes_ = parts.bytes();
    }
    [[nodiscard]] std::size_t bytes() const { return bytes_; }

    /// What can be wrong beside shapes, before anything is written. A call without attention has no queries.
    void check(const Batch& batch, const observed_call<T>& call, bool attends = true) const {
        detail::check_same_params(seen_, cache_.kv_heads,
                                  [&](std::int32_t h) { return cache_.all_params[h]; });
        const auto tokens = [&](std::int64_t i) {
            return call.edges != nullptr ? call.edges[batch.count] : batch.tokens(i);
        };
        if (attends) {
            checks::check_finite_rows(ctx_, "q", call.q, tokens);
        }
        checks::check_finite_rows(ctx_, "k", call.k, tokens);
    }

    /// Rows of a head after the call, which depend on counts only.
    [[nodiscard]] std::int32_t rows_after(const Batch& batch, bool prompt, std::int32_t i,
                                          std::int32_t h) const {
        const std::int32_t seq = batch.seq(i);
        const HeadParams& head_params = cache_.all_params[h];
        const position_t before = cache_.length[seq], after = before + batch.tokens(i);
        const auto left = [&](position_t length) {
            return std::max<position_t>(0, length - head_params.sinks - head_params.window);
        };
        position_t num_long_range =
            cache_.num_long_range[cache_.head_index(seq, h)] + left(after) - left(before);
        if (evicts_at_steps || prompt) {
            num_long_range = std::min<position_t>(num_long_range, head_params.budget);
        }
        return cache_.layout(h).used(after, static_cast<std::int32_t>(num_long_range));
    }

    /// Packed entries are taken one after another.
    void run(const Batch& batch, bool prompt, const observed_call<T>& call) {
        if (call.edges == nullptr) {
            run_entries(batch, prompt, call);
            return;
        }
        for (std::int32_t i = 0; i < batch.count; ++i) {
            const std::int32_t seq = batch.seq(i), tokens = batch.tokens(i);
            run_entries({.count = 1, .seq_ids = &seq, .q_len = &tokens, .length = tokens}, prompt,
                        call.of_entry(i));
        }
    }

    /// A step without attention: the key that loses its place goes, the token comes without a mass.
    void append(const Batch& batch, const observed_call<T>& call) const {
        for_each_head(batch, [&](std::int32_t i, std::int32_t h, int thread) {
            observed_list<T>& list = make_list(batch, 0, call, i, h, head_at(i, h, thread));
            if constexpr (!evicts_at_steps) {  // masses are those of one block's queries
                std::fill_n(list.score, list.count, 0.0f);
            }
            const std::int32_t seq = batch.seq(i);
            write(seq, call, i, h, list, cache_.length[seq]);
            if (h == 0) {
                cache_.num_draft[seq] = 0;
            }
        });
    }

  private:
    void run_entries(const Batch& batch, bool prompt, const observed_call<T>& call) {
        std::int32_t longest = 0;
        for (std::int32_t i = 0; i < batch.count; ++i) {
            longest = std::max(longest, batch.tokens(i));
        }
        for (std::int32_t done = 0; done < longest; done += block_) {
            std::int32_t most = 0;
            for (std::int32_t i = 0; i < batch.count; ++i) {
                tokens_[i] = std::clamp(batch.tokens(i) - done, 0, block_);
                most = std::max(most, tokens_[i]);
            }
            const Batch now{.count = batch.count, .seq_ids = batch.seq_ids, .q_len = tokens_, .length = most};
            run_block(now, prompt, done, most, call.at(done));
        }
    }

    observed_head<T>& head_at(std::int32_t i, std::int32_t h, int thread = 0) const {
        const std::size_t slot =
            lists_wait_ ? static_cast<std::size_t>(i) * static_cast<std::size_t>(cache_.kv_heads) +
                              static_cast<std::size_t>(h)
                        : static_cast<std::size_t>(thread);
        return observed_head<T>::at(heads_ + slot * head_bytes_);
    }
    template <class Visit>
    void for_each_head(const Batch& batch, Visit&& visit) const {
        host_backend::for_each_head(ctx_, cache_.kv_heads, batch, visit);
    }

    void run_block(const Batch& batch, bool prompt, std::int32_t done, std::int32_t longest,
                   const observed_call<T>& call) const {
        const auto look_at = [&](std::int32_t i, std::int32_t h, int thread) {
            look(batch, prompt, done, call, i, h, thread);
        };
        if (lists_wait_) {
            for_each_head(batch, look_at);
        }
        for (std::int32_t i = 0; seen_.whole_layer && i < batch.count; ++i) {
            if (batch.tokens(i) != 0 && (evicts_at_steps || prompt)) {
                average_masses(
                    cache_.kv_heads, [&](std::int32_t h) -> auto& { return head_at(i, h).list; });
            }
        }
        // Steps, and blocks whose evicted keys have gone already, attend to what is left; a block that prunes
        // at its end, before that.
        const bool before = longest > 1 || (prompt && !evicts_at_steps);
        if (before) {
            attend_chunk(ctx_, cache_, batch, call.q, call.out, call.lse, longest, attention_,
                         [&](std::int32_t i, std::int32_t h, auto&& visit) {
                             block_segments(batch, done, call, i, h, visit);
                         });
        }
        for_each_head(batch, [&](std::int32_t i, std::int32_t h, int thread) {
            if (!lists_wait_) {
                look_at(i, h, thread);
            }
            decide(batch, prompt, done, call, i, h, head_at(i, h, thread).list);
        });
        if (!before) {
            attend_rows(ctx_, cache_, batch, call.q, call.out, call.lse, done + 1, attention_);
        }
    }

    /// Makes the list: without what loses its place when the block begins, and with the block's keys.
    observed_list<T>& make_list(const Batch& batch, std::int32_t done, const observed_call<T>& call,
                                std::int32_t i, std::int32_t h, observed_head<T>& head) const {
        observed_head<T>::make(&head, keys_);
        observed_list<T>& list = head.list;
        const std::int32_t seq = batch.seq(i);
        const HeadParams& head_params = cache_.all_params[h];
        const position_t base = cache_.length[seq] + done;
        const auto rows = cache_.head_rows(seq, h);
        const std::int32_t used =
            cache_.layout(h).used(base, cache_.num_long_range[cache_.head_index(seq, h)]);
        for (std::int32_t r = 0; r < used; ++r) {
            list.add(rows.k(r), rows.position(r), rows.score(r), r);
        }
        if (evicts_at_steps) {
            list.choose(head_params, seen_, base, [&](std::int32_t lost) { head.excluded = list.row[lost]; });
        }
        list.own = list.count;
        for (std::int32_t j = 0; j < batch.tokens(i); ++j) {
            list.add(call.k.row(i, h, j), base + j, 0.0f, -1 - j);
        }
        return list;
    }

    /// Makes the list and collects the block's masses.
    void look(const Batch& batch, bool prompt, std::int32_t done, const observed_call<T>& call,
              std::int32_t i, std::int32_t h, int thread) const {
        observed_list<T>& list = make_list(batch, done, call, i, h, head_at(i, h, thread));
        if (!evicts_at_steps && !prompt) {
            std::fill_n(list.mass, list.count, 0.0);
            return;
        }
        mass_queries<T> queries;
        queries.q = call.q.row(i, std::int64_t{h} * cache_.group, 0);
        queries.row_stride = call.q.row_stride;
        queries.head_stride = call.q.head_stride;
        queries.end = batch.tokens(i);
        queries.group = cache_.group;
        observe(ctx_.instructions(), shape_, seen_, cache_.all_params[h], queries, list,
                scratch_ + static_cast<std::size_t>(thread) * scratch_bytes_, keys_);
    }

    /// What a block's queries see: the rows of the cache but one, and the block itself.
    template <class Visit>
    void block_segments(const Batch& batch, std::int32_t done, const observed_call<T>& call, std::int32_t i,
                        std::int32_t h, Visit&& visit) const {
        const std::int32_t seq = batch.seq(i), excluded = evicts_at_steps ? head_at(i, h).excluded : -1;
        const auto rows = cache_.head_rows(seq, h);
        const std::int32_t used = cache_.layout(h).used(cache_.length[seq] + done,
                                                        cache_.num_long_range[cache_.head_index(seq, h)]);
        const std::int32_t end = excluded < 0 ? used : excluded;
        const auto hand = [&](const key_segment<T>& segment, std::int32_t) { visit(segment); };
        visit_rows(rows, 0, end, cache_.head_dim_qk, cache_.head_dim_vo, hand);
        visit_rows(rows, end == used ? used : end + 1, used, cache_.head_dim_qk, cache_.head_dim_vo, hand);
        key_segment<T> self;
        self.k = call.k.row(i, h, 0);
        self.k_stride = call.k.row_stride;
        self.v = call.v.row(i, h, 0);
        self.v_stride = call.v.row_stride;
        self.count = batch.tokens(i);
        visit(self);
    }

    /// Takes the masses, ends a prompt's block, and writes the remaining keys back.
    void decide(const Batch& batch, bool prompt, std::int32_t done, const observed_call<T>& call,
                std::int32_t i, std::int32_t h, observed_list<T>& list) const {
        const std::int32_t seq = batch.seq(i);
        const position_t last = cache_.length[seq] + done + batch.tokens(i) - 1;
        list.take_masses(seen_);
        if (prompt) {
            list.choose(cache_.all_params[h], seen_, last, [](std::int32_t) {});
        }
        write(seq, call, i, h, list, last);
        if (h == 0) {
            cache_.num_draft[seq] = 0;
        }
    }

    void write(std::int32_t seq, const observed_call<T>& call, std::int32_t i, std::int32_t h,
               const observed_list<T>& list, position_t last) const {
        const head_state<Cache> rows(cache_, seq, h);
        const HeadParams& head_params = rows.head_params;
        const std::int32_t first = rows.layout.slot(0);
        const auto old = [&](std::int32_t n) {
            return list.position[n] >= head_params.sinks && list.position[n] <= last - head_params.window;
        };
        // Keys in top-k slots stay where they are, if that place is one of the first; the others take free
        // places.
        std::int32_t num_long_range = 0;
        for (std::int32_t n = 0; n < list.count; ++n) {
            num_long_range += old(n) ? 1 : 0;
        }
        const auto placed = [&](std::int32_t n) {
            return list.row[n] >= first && list.row[n] < first + num_long_range;
        };
        std::int32_t* const taken = list.scratch();
        std::fill_n(taken, num_long_range, 0);
        for (std::int32_t n = 0; n < list.count; ++n) {
            if (placed(n)) {
                taken[list.row[n] - first] = 1;
            }
        }
        const auto put = [&](std::int32_t row, std::int32_t n) {
            const std::int32_t from = list.row[n];
            if (from >= 0) {
                rows.put(row, rows.k(from), rows.v(from), list.position[n], list.score[n]);
            } else {
                rows.put(row, call.k.row(i, h, -1 - from), call.v.row(i, h, -1 - from), list.position[n],
                         list.score[n]);
            }
        };
        std::int32_t slot = 0;
        for (std::int32_t n = 0; n < list.count; ++n) {
            if (!old(n)) {
                continue;
            }
            if (placed(n)) {
                rows.score(list.row[n]) = list.score[n];
                continue;
            }
            while (taken[slot] != 0) {
                ++slot;
            }
            put(first + slot++, n);
        }
        // Only now may the ring's rows be overwritten.
        for (std::int32_t n = 0; n < list.count; ++n) {
            if (old(n)) {
                continue;
            }
            if (list.row[n] >= 0) {
                rows.score(list.row[n]) = list.score[n];
            } else {
                put(rows.layout.recent(list.position[n]), n);
            }
        }
        cache_.num_long_range[rows.index] = num_long_range;
        cache_.victim[rows.index] = -1;
    }

    const host& ctx_;
    const Cache& cache_;
    Observation seen_;
    attention_shape shape_;
    std::int32_t block_ = 0;
    std::int64_t keys_ = 0;
    std::size_t head_bytes_ = 0, scratch_bytes_ = 0, bytes_ = 0;
    bool lists_wait_ = true;
    std::int32_t* tokens_ = nullptr;
    std::byte* heads_ = nullptr;    // [count, kv_heads] where lists wait, else [threads]
    std::byte* scratch_ = nullptr;  // [threads]
    std::byte* attention_ = nullptr;
};

/// Workspace of step and prefill.
template <class Cache>
std::size_t observed_workspace_bytes(const host& ctx, const Cache& cache, std::int32_t count,
                                     std::int32_t tokens) {
    return admission_bytes(cache, count) +
           observed_pass<Cache>(ctx, cache, count, std::max(tokens, 1), nullptr).bytes() + detail::alignment;
}

/// The body of step and prefill.
template <class Cache, class T = typename Cache::value_type>
void observed_tokens(const host& ctx, const Cache& cache, const Batch& all, std::int32_t longest, bool prompt,
                     const observed_call<T>& call, std::byte* memory, std::uint32_t* status) {
    observed_pass<Cache> pass(ctx, cache, all.count, std::max(longest, 1),
                              memory + admission_bytes(cache, all.count));
    pass.check(all, call);
    const Batch batch = admit(cache, all, status, memory, [&](std::int32_t i, std::int32_t h) {
        return pass.rows_after(all, prompt, i, h);
    });
    pass.run(batch, prompt, call);
    mark_appended(cache, batch);
    clear_refused(cache, all, batch, call.out, call.lse, call.edges);
}

}  // namespace kvpolicy::host_backend
