// A DualCache on a device beside one on the host that is given the same tokens: every call compares outputs,
// status words, free pages, rows (through the page tables) and counters.
#pragma once

#include <kvpolicy/caches/dual.hpp>

#include "../../support/bound_dual.hpp"
#include "cache_case.hpp"
#include "support/step_io.hpp"

#include <memory>

namespace test {

/// With `Chunks`, also calls of more tokens than one; they take long to compile.
template <class P, class T, class Dims = kvpolicy::all_head_dims, bool Chunks = false>
class BothDuals {
  public:
    kvpolicy::CacheShape shape;
    kvpolicy::host ctx{1};
    kvpolicy::cuda device{};
    BoundDual<P, T> oracle;
    kvpolicy::DualCache<P, T> cache;
    Device<unsigned char> memory;
    std::vector<std::unique_ptr<Device<unsigned char>>> slabs;
    std::size_t more_workspace = 0;  // than chunks ask for
    bool outputs_count = true;       // whether they are compared: not where they are no numbers

    BothDuals(const kvpolicy::CacheShape& of, const kvpolicy::PoolShape& pool, const P& policy = P{},
              const typename P::scorer_type* scorers = nullptr,
              const typename P::scorer_type* device_scorers = nullptr,
              const kvpolicy::AttentionParams& attention = {},
              kvpolicy::position_t rebase_limit = kvpolicy::rebase_limit)
        : shape(of),
          oracle(ctx, of, pool, policy, scorers, rebase_limit, attention),
          cache(of, pool, policy, device_scorers, attention),
          memory(cache.bytes().total()) {
        ok(cudaMemset(memory.data(), 0xff, memory.bytes()));
        cache.rebase_limit(rebase_limit);
        cache.bind(device, memory.data(), memory.size());
    }

    /// Attaches both a slab; false where there have been as many as may be.
    bool add_slab() {
        if (cache.slabs() == cache.pool().max_slabs) {
            return false;
        }
        oracle.add_slab(ctx);
        slabs.push_back(std::make_unique<Device<unsigned char>>(cache.slab_bytes()));
        ok(cudaMemset(slabs.back()->data(), 0xff,
                      slabs.back()->bytes()));  // NaN in every row that nobody wrote
        cache.add_slab(device, slabs.back()->data(), slabs.back()->size());
        return true;
    }

    /// Reserves for tokens of the sequences in both; false where the slabs do not suffice.
    bool reserve(const std::vector<std::int32_t>& seq_ids, const std::vector<std::int32_t>& tokens) {
        const auto count = static_cast<std::int32_t>(seq_ids.size());
        const Device<std::int32_t> device_seq_ids(seq_ids), device_tokens(tokens);
        while (true) {
            const std::int64_t wanted = oracle.cache.reserve(ctx, {count, seq_ids.data(), tokens.data()});
            CHECK(cache.reserve(device, {count, device_seq_ids.data(), device_tokens.data()}) == wanted);
            if (wanted == 0) {
                return true;
            }
            for (std::int64_t i = 0; i < wanted; ++i) {
                if (!add_slab()) {
                    return false;
                }
            }
        }
    }

    /// Gives the tokens to both, all layers alike, and advances. Entries that find no page are tried again
    /// after more slabs have come, or, where none may come, are given up in both by clearing a sequence.
    /// Returns whether any was refused. `accepted`: of draft tokens.
    bool call(Mode mode, const std::vector<std::int32_t>& seq_ids, const std::vector<std::int32_t>& q_len,
              const CallTensors<T>& in, const std::vector<std::int32_t>& accepted = {}) {
        const auto count = static_cast<std::int32_t>(seq_ids.size());
        const std::int32_t length = in.q.length, heads = shape.kv_heads, query_heads = shape.query_heads;
        const Device<std::int32_t> device_seq_ids(seq_ids);
        const Device<T> q(in.q.data), k(in.k.data), v(in.v.data);
        const ArrivingInputs<P> arriving(in);
        const auto q_view =
            kvpolicy::view_bhsd<const T>(q.data(), count, query_heads, length, shape.head_dim_qk);
        const auto k_view = kvpolicy::view_bhsd<const T>(k.data(), count, heads, length, shape.head_dim_qk);
        const auto v_view = kvpolicy::view_bhsd<const T>(v.data(), count, heads, length, shape.head_dim_vo);
        bool refused = false;
        std::vector<std::int32_t> brought = q_len, moved = mode == Mode::append_draft ? accepted : q_len;
        for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
            std::vector<std::int32_t> now = brought;
            bool committing = false;
            for (bool again = true; again;) {
                const kvpolicy::Batch batch{count, seq_ids.data(), now.data(),
                                            committing ? shape.max_draft_tokens : length};
                const Device<std::int32_t> device_len(now);
                const kvpolicy::Batch device_batch{count, device_seq_ids.data(), device_len.data(),
                                                   batch.length};
                Tensor<T> wanted(count, query_heads, length, shape.head_dim_vo);
                wanted.fill(7.0f);
                Plane<float> wanted_lse(count, query_heads, length, 7.0f);
                const Device<T> out(wanted.data);
                const Device<float> lse(wanted_lse.data);
                std::vector<std::uint32_t> wanted_status(seq_ids.size(), 0);
                const Device<std::uint32_t> status(wanted_status);
                test::Extras extras, device_extras;
                extras.lse = wanted_lse.view();
                device_extras.lse = kvpolicy::view_bhs(lse.data(), count, query_heads, length);
                arriving.add(in, extras, device_extras);
                const auto ref = cache.layer(layer);
                const auto host_ref = oracle.cache.layer(layer);
                const auto out_view =
                    kvpolicy::view_bhsd(out.data(), count, query_heads, length, shape.head_dim_vo);
                if (mode == Mode::step) {
                    const Device<unsigned char> workspace(
                        kvpolicy::step_workspace_bytes<Dims>(device, ref, count));
                    kvpolicy::step<Dims>(
                        device, ref,
                        test::step_io(device_batch, q_view, k_view, v_view, out_view, device_extras),
                        workspace, {.status = status.data()});
                    call_ref<P, T>(ctx, host_ref, batch, in.q.view(), in.k.view(), in.v.view(), wanted.view(),
                                   extras, true, wanted_status.data());
                } else if constexpr (Chunks) {
                    const Device<unsigned char> workspace(
                        kvpolicy::workspace_bytes<Dims>(device, ref,
                                                        {.batch = count, .tokens = batch.length}) +
                        more_workspace);
                    Workspace host_workspace(
                        kvpolicy::workspace_bytes(ctx, host_ref, {.batch = count, .tokens = batch.length}));
                    if (committing) {
                        kvpolicy::accept<Dims>(device, ref, device_batch, workspace,
                                               {.status = status.data()});
                        kvpolicy::accept(ctx, host_ref, batch, host_workspace,
                                         {.status = wanted_status.data()});
                    } else if (mode == Mode::prefill) {
                        kvpolicy::prefill<Dims>(
                            device, ref,
                            test::step_io(device_batch, q_view, k_view, v_view, out_view, device_extras),
                            workspace, {.status = status.data()});
                        kvpolicy::prefill(ctx, host_ref,
                                          test::step_io(batch, in.q.view(), in.k.view(), in.v.view(),
                                                        wanted.view(), extras),
                                          host_workspace, {.status = wanted_status.data()});
                    } else {
                        kvpolicy::append_draft<Dims>(
                            device, ref,
                            test::step_io(device_batch, q_view, k_view, v_view, out_view, device_extras),
                            workspace, {.status = status.data()});
                        kvpolicy::append_draft(ctx, host_ref,
                                               test::step_io(batch, in.q.view(), in.k.view(), in.v.view(),
                                                             wanted.view(), extras),
                                               host_workspace);
                    }
                }
                CHECK(status.read() == wanted_status);
                if (!committing && outputs_count) {
                    check_.compare(out.read(), wanted, lse.read(), wanted_lse, now, in.v);
                }
                CHECK(cache.free_pages(device) == oracle.cache.free_pages());
                if (mode == Mode::append_draft && !committing) {
                    committing = true;
                    now = moved;
                    continue;
                }
                again = false;
                for (std::size_t i = 0; i < seq_ids.size(); ++i) {
                    if (wanted_status[i] == 0) {
                        now[i] = 0;
                    } else {
                        again = true;
                    }
                }
                refused = refused || again;
                if (again && !add_slab()) {
                    // The first that was refused is dropped: what it had in other layers makes space for the
                    // rest.
                    for (std::size_t i = 0; i < seq_ids.size(); ++i) {
                        if (now[i] != 0) {
                            oracle.cache.clear(ctx, seq_ids[i]);
                            cache.clear(device, seq_ids[i]);
                            now[i] = moved[i] = brought[i] = 0;
                            break;
                        }
                    }
                }
            }
        }
        const Device<std::int32_t> device_moved(moved);
        oracle.cache.advance(ctx, {count, seq_ids.data(), moved.data(), length});
        const Device<std::uint32_t> status(std::vector<std::uint32_t>(seq_ids.size(), 0));
        cache.advance(device, {count, device_seq_ids.data(), device_moved.data(), length},
                      {.status = status.data()});
        CHECK(status.read() == std::vector<std::uint32_t>(seq_ids.size(), 0));
        if constexpr (P::has_eviction) {
            evict(seq_ids, moved);
        }
        return refused;
    }

    /// Looks at the sequences that took tokens, in both; rounds and rows agree.
    void evict(const std::vector<std::int32_t>& seq_ids, const std::vector<std::int32_t>& tokens) {
        const auto count = static_cast<std::int32_t>(seq_ids.size());
        const Device<std::int32_t> device_seq_ids(seq_ids), device_tokens(tokens);
        std::vector<kvpolicy::EvictionReport> wanted(seq_ids.size());
        const Device<kvpolicy::EvictionReport> reports(wanted);
        const Device<std::uint32_t> status(std::vector<std::uint32_t>(seq_ids.size(), 0));
        Workspace host_workspace(oracle.cache.evict_workspace_bytes(ctx));
        const Device<unsigned char> workspace(cache.evict_workspace_bytes(device));
        ok(cudaMemset(workspace.data(), 0xff, workspace.bytes()));
        oracle.cache.evict(ctx, {count, seq_ids.data(), tokens.data()}, host_workspace,
                           {.reports = wanted.data()});
        cache.evict(device, {count, device_seq_ids.data(), device_tokens.data()}, workspace,
                    {.reports = reports.data(), .status = status.data()});
        const auto found = reports.read();
        for (std::size_t i = 0; i < seq_ids.size(); ++i) {
            CHECK(found[i].rounds == wanted[i].rounds);
            CHECK(found[i].dropped == wanted[i].dropped);
            CHECK(found[i].rows == wanted[i].rows);
            rounds += wanted[i].rounds;
        }
        CHECK(status.read() == std::vector<std::uint32_t>(seq_ids.size(), 0));
        CHECK(cache.free_pages(device) == oracle.cache.free_pages());
    }
    std::int32_t rounds = 0;  // of evictions so far

    /// Sequence i becomes what sources[i] was; with two sequences, `to` what `from` was. Status words agree.
    void reorder(const std::vector<std::int32_t>& sources) {
        std::uint32_t wanted = 0;
        const Device<std::uint32_t> status(std::vector<std::uint32_t>(1, 0));
        const Device<std::int32_t> of_device(sources);
        const auto count = static_cast<std::int32_t>(sources.size());
        oracle.cache.reorder(ctx, sources.data(), count, {.status = &wanted});
        cache.reorder(device, of_device.data(), count, {.status = status.data()});
        CHECK(status.read()[0] == wanted);
    }
    void fork(std::int32_t from, std::int32_t to) {
        std::uint32_t wanted = 0;
        const Device<std::uint32_t> status(std::vector<std::uint32_t>(1, 0));
        oracle.cache.fork(ctx, from, to, {.status = &wanted});
        cache.fork(device, from, to, {.status = status.data()});
        CHECK(status.read()[0] == wanted);
    }

    /// Sequence `to` becomes what `from` was, through a blob of the device's.
    void snapshot(std::int32_t from, std::int32_t to) {
        std::vector<unsigned char> blob(cache.snapshot_bytes(device, from));
        std::vector<unsigned char> of_host(oracle.cache.snapshot_bytes(from));
        CHECK(blob.size() == of_host.size());
        cache.snapshot(device, from, blob.data(), blob.size());
        oracle.cache.snapshot(ctx, from, of_host.data(), of_host.size());
        if constexpr (std::is_same_v<typename P::scorer_type, kvpolicy::GivenScores>) {
            const bool same = blob == of_host;
            CHECK(same);
        }
        std::uint32_t wanted = 0, status = 0;
        oracle.cache.restore(ctx, to, blob.data(), blob.size(), {.status = &wanted});
        cache.restore(device, to, blob.data(), blob.size(), {.status = &status});
        CHECK(status == wanted);
    }

    /// Attention over the rows as they are, in all layers.
    void look(const std::vector<std::int32_t>& seq_ids, const CallTensors<T>& in) {
        const auto count = static_cast<std::int32_t>(seq_ids.size());
        const Device<std::int32_t> device_seq_ids(seq_ids);
        const Device<T> q(in.q.data);
        for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
            Tensor<T> wanted(count, shape.query_heads, 1, shape.head_dim_vo);
            Plane<float> wanted_lse(count, shape.query_heads, 1, 7.0f);
            const Device<T> out(wanted.data);
            const Device<float> lse(wanted_lse.data);
            const auto ref = cache.layer(layer);
            const Device<unsigned char> workspace(kvpolicy::step_workspace_bytes<Dims>(device, ref, count));
            kvpolicy::attend<Dims>(
                device, ref,
                {.q = kvpolicy::view_bhsd<const T>(q.data(), count, shape.query_heads, 1, shape.head_dim_qk),
                 .out = kvpolicy::view_bhsd(out.data(), count, shape.query_heads, 1, shape.head_dim_vo),
                 .batch = {count, device_seq_ids.data()},
                 .lse = kvpolicy::view_bhs(lse.data(), count, shape.query_heads, 1)},
                workspace);
            const auto host_ref = oracle.cache.layer(layer);
            Workspace host_workspace(kvpolicy::workspace_bytes(ctx, host_ref, {.batch = count, .tokens = 1}));
            kvpolicy::attend(ctx, host_ref,
                             {.q = in.q.view(),
                              .out = wanted.view(),
                              .batch = {count, seq_ids.data()},
                              .lse = wanted_lse.view()},
                             host_workspace);
            check_.compare(out.read(), wanted, lse.read(), wanted_lse,
                           std::vector<std::int32_t>(seq_ids.size(), 1), in.v);
        }
    }

    /// Whether both hold the same keys, values, positions, scores and counters, byte for byte,
    /// wherever the pages are.
    void same_rows(const std::string& when) const {
        std::vector<std::vector<unsigned char>> provided;
        for (const auto& slab : slabs) {
            provided.push_back(slab->read());
        }
        CAPTURE(when);
        for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
            for (std::int32_t seq = 0; seq < shape.max_sequences; ++seq) {
                CAPTURE(layer);
                CAPTURE(seq);
                const bool same = content(provided, layer, seq) == without_state(layer, seq);
                CHECK(same);
            }
        }
        CHECK(cache.free_pages(device) == oracle.cache.free_pages());
        every_page_once();
    }

    /// Whether both hold the same keys, with scores and scorer states alike to `tolerance`, or
    /// as `near` has it.
    void near_rows(float tolerance) const {
        NearHost near{tolerance};
        near_rows(near);
        near.check();
    }
    template <class Near>
    void near_rows(Near& near) const {
        bool same = true;
        for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
            const auto ref = cache.layer(layer), host_ref = oracle.cache.layer(layer);
            for (std::int32_t seq = 0; seq < shape.max_sequences; ++seq) {
                for (std::int32_t head = 0; head < shape.kv_heads; ++head) {
                    const std::int64_t index = host_ref.head_index(seq, head);
                    same = same && fetch(ref.num_long_range + index, 1)[0] == host_ref.num_long_range[index];
                    const auto table = table_of(layer, seq, head);
                    const auto arrays = fetch(ref.pool.slabs, cache.slabs());
                    const auto rows = host_ref.head_rows(seq, head);
                    const auto used = host_ref.used(seq, head);
                    for (std::size_t page = 0; page < table.size(); ++page) {
                        const auto& slab =
                            arrays[static_cast<std::size_t>(table[page] / ref.pool.slab_pages)];
                        const std::int64_t at =
                            std::int64_t{table[page] % ref.pool.slab_pages} * shape.page_size;
                        const auto position = fetch(slab.position + at, shape.page_size);
                        const auto score = fetch(slab.score + at, shape.page_size);
                        const auto first = static_cast<std::int32_t>(page) * shape.page_size;
                        for (std::int32_t r = 0; r < shape.page_size && first + r < used; ++r) {
                            same = same && position[static_cast<std::size_t>(r)] == rows.position(first + r);
                            near.score(seq, head, rows.position(first + r),
                                       score[static_cast<std::size_t>(r)], rows.score(first + r));
                        }
                    }
                }
            }
            const auto state =
                fetch(ref.state, std::int64_t{ref.max_sequences} * ref.kv_heads * ref.state_size);
            for (std::int32_t x = 0; x < ref.max_sequences * ref.kv_heads; ++x) {
                const std::int64_t first = x * ref.state_size;
                near.states(x / ref.kv_heads, x % ref.kv_heads, state.data() + first, host_ref.state + first,
                            ref.state_size);
            }
        }
        CHECK(same);
    }

    template <class Value>
    static auto fetch(const Value* from, std::int64_t count) {
        return fetch_from(from, count);
    }

  private:
    [[nodiscard]] std::vector<std::int32_t> table_of(std::int32_t layer, std::int32_t seq,
                                                     std::int32_t head) const {
        const auto ref = cache.layer(layer), host_ref = oracle.cache.layer(layer);
        return fetch(ref.table + seq * host_ref.table_offset[shape.kv_heads] + host_ref.table_offset[head],
                     fetch(ref.held + host_ref.head_index(seq, head), 1)[0]);
    }
    [[nodiscard]] std::vector<unsigned char> content(const std::vector<std::vector<unsigned char>>& provided,
                                                     std::int32_t layer, std::int32_t seq) const {
        const auto ref = cache.layer(layer);
        const auto host_ref = oracle.cache.layer(layer);
        std::vector<unsigned char> bytes;
        const auto add = [&](const auto* data, std::int64_t count) {
            const auto* from = reinterpret_cast<const unsigned char*>(data);
            bytes.insert(bytes.end(), from, from + static_cast<std::size_t>(count) * sizeof *data);
        };
        // What lies in a slab, from its copy.
        const auto add_rows = [&](const auto* data, std::int64_t count) {
            const auto* from = reinterpret_cast<const unsigned char*>(data);
            for (std::size_t s = 0; s < slabs.size(); ++s) {
                const unsigned char* const begin = slabs[s]->data();
                if (from >= begin && from < begin + slabs[s]->size()) {
                    add(provided[s].data() + (from - begin), count * static_cast<std::int64_t>(sizeof *data));
                    return;
                }
            }
            FAIL("a page outside of all slabs");
        };
        const auto length = fetch(ref.length + seq, 1);
        const auto kept = fetch(ref.num_long_range + std::int64_t{seq} * shape.kv_heads, shape.kv_heads);
        const auto held = fetch(ref.held + std::int64_t{seq} * shape.kv_heads, shape.kv_heads);
        const auto arrays = fetch(ref.pool.slabs, cache.slabs());
        for (std::int32_t head = 0; head < shape.kv_heads; ++head) {
            const auto h = static_cast<std::size_t>(head);
            const std::int32_t used = host_ref.layout(head).used(length[0], kept[h]);
            CHECK(std::int64_t{held[h]} * shape.page_size >= used);
            CHECK(held[h] == host_ref.held[host_ref.head_index(seq, head)]);
            const auto table = table_of(layer, seq, head);
            const kvpolicy::PagedRows<T> rows{
                table.data(),    arrays.data(),   ref.pool.slab_pages,       shape.page_size,
                ref.head_dim_qk, ref.head_dim_vo, ref.selection.page_size(), ref.pool.strides};
            for (std::int32_t r = 0; r < used && std::int64_t{held[h]} * shape.page_size >= used; ++r) {
                add_rows(rows.k(r), ref.head_dim_qk);
                add_rows(rows.v(r), ref.head_dim_vo);
                add_rows(&rows.position(r), 1);
                add_rows(&rows.score(r), 1);
            }
            if constexpr (P::has_selection) {
                const std::int32_t size = ref.selection.page_size();
                for (std::int32_t page = 0; page * size < used; ++page) {
                    add_rows(rows.bounds(page), 2 * std::int64_t{ref.head_dim_qk});
                }
            }
        }
        add(kept.data(), shape.kv_heads);
        add(length.data(), 1);
        return bytes;
    }
    /// No page is free and held at once, or free twice; and pages know how many tables name them.
    void every_page_once() const {
        const auto ref = cache.layer(0);
        const auto free = fetch(ref.pool.free_ids, cache.free_pages(device));
        std::vector<std::int32_t> names(static_cast<std::size_t>(cache.attached_pages()), 0);
        const auto counted = fetch(ref.pool.names, cache.attached_pages());
        for (std::int32_t layer = 0; layer < shape.layers; ++layer) {
            const auto of = cache.layer(layer);
            const auto host_ref = oracle.cache.layer(layer);
            const auto held = fetch(of.held, std::int64_t{shape.max_sequences} * shape.kv_heads);
            const std::int64_t each = host_ref.table_offset[shape.kv_heads];
            const auto table = fetch(of.table, shape.max_sequences * each);
            for (std::int32_t x = 0; x < shape.max_sequences * shape.kv_heads; ++x) {
                for (std::int32_t page = 0; page < held[static_cast<std::size_t>(x)]; ++page) {
                    const std::int64_t at =
                        x / shape.kv_heads * each + host_ref.table_offset[x % shape.kv_heads] + page;
                    names[static_cast<std::size_t>(table[static_cast<std::size_t>(at)])] += 1;
                }
            }
        }
        std::vector<char> is_free(names.size(), 0);
        for (const std::int32_t id : free) {
            REQUIRE(id >= 0);
            REQUIRE(id < cache.attached_pages());
            const auto page = static_cast<std::size_t>(id);
            CHECK(names[page] == 0);
            CHECK(is_free[page] == 0);
            is_free[page] = 1;
        }
        bool right = true;
        for (std::size_t page = 0; page < names.size(); ++page) {
            right = right &&
                    (is_free[page] != 0 ? names[page] == 0 : names[page] > 0 && counted[page] == names[page]);
        }
        CHECK(right);
    }
    [[nodiscard]] std::vector<unsigned char> without_state(std::int32_t layer, std::int32_t seq) const {
        const auto ref = oracle.cache.layer(layer);
        std::vector<unsigned char> bytes = content_of(ref, seq, P::has_selection);
        const auto end = bytes.end() - static_cast<std::ptrdiff_t>(sizeof(kvpolicy::position_t));
        bytes.erase(
            end - static_cast<std::ptrdiff_t>(ref.kv_heads * ref.state_size * std::int64_t{sizeof(float)}),
            end);
        return bytes;
    }

    OutputCheck<T> check_;
};

/// Random calls on random sequences: steps, looks, reservations, forks, reorders, snapshots, clears, and with
/// `Chunks` prefills and draft tokens. Returns how many calls found no page at first.
template <class P, class T, class Dims, bool Chunks>
std::int32_t random_life(BothDuals<P, T, Dims, Chunks>& both, Scores kind, std::int32_t calls,
                         std::mt19937& generator) {
    CAPTURE(name(kind));
    const kvpolicy::CacheShape& shape = both.shape;
    const auto pick = [&](std::int32_t below) {
        return static_cast<std::int32_t>(generator() % static_cast<std::uint32_t>(below));
    };
    std::int32_t refused = 0;
    for (std::int32_t turn = 0; turn < calls; ++turn) {
        const std::int32_t what = pick(24);
        std::vector<std::int32_t> seq_ids(static_cast<std::size_t>(shape.max_sequences)), q_len;
        for (std::size_t i = 0; i < seq_ids.size(); ++i) {
            seq_ids[i] = static_cast<std::int32_t>(i);
        }
        std::shuffle(seq_ids.begin(), seq_ids.end(), generator);
        seq_ids.resize(static_cast<std::size_t>(1 + pick(shape.max_sequences)));
        const Mode mode = what < 18 || !Chunks                       ? Mode::step
                          : what < 21 || shape.max_draft_tokens == 0 ? Mode::prefill
                                                                     : Mode::append_draft;
        const std::int32_t most = mode == Mode::step           ? 1
                                  : mode == Mode::append_draft ? shape.max_draft_tokens
                                                               : 1 + pick(90);
        std::vector<std::int32_t> accepted;
        for (std::size_t i = 0; i < seq_ids.size(); ++i) {
            q_len.push_back(mode != Mode::step ? pick(most + 1) : pick(8) != 0 ? 1 : 0);
            accepted.push_back(pick(q_len.back() + 1));
        }
        const auto count = static_cast<std::int32_t>(seq_ids.size());
        const CallTensors<T> in(shape, count, most, kind, generator);
        std::string done = mode == Mode::step      ? "step"
                           : mode == Mode::prefill ? "prefill"
                                                   : "append_draft and accept";
        if (what == 0 && pick(4) == 0) {
            both.oracle.cache.clear(both.ctx, seq_ids[0]);
            both.cache.clear(both.device, seq_ids[0]);
            done = "clear";
        } else if (what == 1) {
            for (std::int32_t& tokens : q_len) {
                tokens = pick(20);
            }
            both.reserve(seq_ids, q_len);
            done = "reserve";
        } else if (what == 2) {
            both.look(seq_ids, in);
            done = "attend";
        } else if (what == 3) {
            both.fork(pick(shape.max_sequences), pick(shape.max_sequences));
            done = "fork";
        } else if (what == 4) {
            std::vector<std::int32_t> sources(static_cast<std::size_t>(1 + pick(shape.max_sequences)));
            for (std::int32_t& source : sources) {
                source = pick(shape.max_sequences);
            }
            both.reorder(sources);
            done = "reorder";
        } else if (what == 5) {
            both.snapshot(pick(shape.max_sequences), pick(shape.max_sequences));
            done = "snapshot";
        } else {
            refused += both.call(mode, seq_ids, q_len, in, accepted) ? 1 : 0;
        }
        if (turn % 8 == 7 || done != "step") {
            both.same_rows(done + " at turn " + std::to_string(turn));
        }
    }
    return refused;
}

}  // namespace test
