// Packed batches in caches on a device: beside the same calls of the host, and beside the same entries in
// padded tensors, whose outputs, entries and scorer states have the same bits.
#pragma once

#include <kvpolicy/core/status.hpp>

#include "cache_case.hpp"
#include "paged_case.hpp"
#include "support/step_io.hpp"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <utility>
#include <vector>

namespace test {

using PackedDims = kvpolicy::head_dims<64>;
using Numbers = std::vector<std::int32_t>;

/// Entries of a call, with their tokens one after another.
struct Pack {
    Numbers seq_ids, q_len, edges{0};
    std::int32_t most = 0;  // tokens of an entry

    Pack(Numbers ids, Numbers lengths) : seq_ids(std::move(ids)), q_len(std::move(lengths)) {
        for (const std::int32_t n : q_len) {
            edges.push_back(edges.back() + n);
            most = std::max(most, n);
        }
    }
    [[nodiscard]] std::int32_t count() const { return static_cast<std::int32_t>(q_len.size()); }
    [[nodiscard]] std::int32_t total() const { return edges.back(); }
};

/// Which numbers of a batch a packed call on the device gives beside the edges.
enum class Told { lengths, most, nothing };

inline constexpr std::int32_t rows_behind = 9;  // the last entry, of NaN

/// [count, heads, most] rows one after another: [1, heads, total + rows_behind], of NaN behind. `row` gives
/// row t of head h of entry b of a tensor.
template <class T, class RowOf>
void pack_rows(const Pack& pack, std::int32_t heads, std::int32_t dim, const RowOf& from, T* to) {
    const std::int64_t rows = pack.total() + rows_behind;
    std::fill_n(to, heads * rows * dim, T(std::numeric_limits<float>::quiet_NaN()));
    for (std::int32_t i = 0; i < pack.count(); ++i) {
        const auto entry = static_cast<std::size_t>(i);
        for (std::int32_t h = 0; h < heads; ++h) {
            for (std::int32_t t = 0; t < pack.q_len[entry]; ++t) {
                std::copy_n(from(i, h, t), dim, to + (h * rows + pack.edges[entry] + t) * dim);
            }
        }
    }
}
template <class T>
CallTensors<T> packed_tensors(const kvpolicy::CacheShape& shape, const Pack& pack, const CallTensors<T>& in) {
    std::mt19937 generator(0);
    CallTensors<T> packed(shape, 1, pack.total() + rows_behind, Scores::random, generator, in.hidden.dim);
    const auto put = [&pack](const auto& from, auto& to) {
        const auto view = from.view();
        pack_rows(
            pack, from.heads, from.dim,
            [&view](std::int32_t b, std::int32_t h, std::int32_t t) { return view.row(b, h, t); },
            to.data.data());
    };
    put(in.q, packed.q);
    put(in.k, packed.k);
    put(in.v, packed.v);
    put(in.hidden, packed.hidden);
    const auto scores = in.scores.view();
    pack_rows(
        pack, in.scores.heads, 1,
        [&scores](std::int32_t b, std::int32_t h, std::int32_t t) { return scores.head(b, h) + t; },
        packed.scores.data.data());
    return packed;
}

/// What a call of a device wrote, and its status words.
template <class T>
struct Written {
    std::vector<T> out;
    std::vector<float> lse;
    std::vector<std::uint32_t> status;
};

inline constexpr float untouched = 7.0f;

/// One call on layer 0 of a device's cache: of padded tensors, or with `edges` of packed ones. `size`: that
/// of its workspace.
template <class T, class Both>
Written<T> call_device(Both& both, Mode mode, const kvpolicy::Batch& batch, const CallTensors<T>& in,
                       const std::int32_t* edges, const kvpolicy::CallSize& size, bool with_lse = true) {
    using P = typename std::remove_cvref_t<decltype(both.cache.layer(0))>::policy_type;
    const kvpolicy::CacheShape& shape = both.shape;
    const std::int32_t rows = in.q.length, entries = in.q.batch;
    const Device<T> q(in.q.data), k(in.k.data), v(in.v.data);
    const Device<T> out(std::vector<T>(
        static_cast<std::size_t>(entries * shape.query_heads * rows * shape.head_dim_vo), T(untouched)));
    const Device<float> lse(
        std::vector<float>(static_cast<std::size_t>(entries * shape.query_heads * rows), untouched));
    const Device<std::uint32_t> status(
        std::vector<std::uint32_t>(static_cast<std::size_t>(std::max(batch.count, 0)), 0));
    const ArrivingInputs<P> arriving(in);
    Extras extras, of_device;
    arriving.add(in, extras, of_device);
    if (with_lse) {
        of_device.lse = kvpolicy::view_bhs(lse.data(), entries, shape.query_heads, rows);
    }
    of_device.cu_seqlens = edges;
    const auto ref = both.cache.layer(0);
    const Device<unsigned char> workspace(kvpolicy::workspace_bytes<PackedDims>(both.device, ref, size));
    const auto io = step_io<T>(
        batch, kvpolicy::view_bhsd<const T>(q.data(), entries, shape.query_heads, rows, shape.head_dim_qk),
        kvpolicy::view_bhsd<const T>(k.data(), entries, shape.kv_heads, rows, shape.head_dim_qk),
        kvpolicy::view_bhsd<const T>(v.data(), entries, shape.kv_heads, rows, shape.head_dim_vo),
        kvpolicy::view_bhsd(out.data(), entries, shape.query_heads, rows, shape.head_dim_vo), of_device);
    if (mode == Mode::prefill) {
        kvpolicy::prefill<PackedDims>(both.device, ref, io, workspace, {.status = status.data()});
    } else if constexpr (!P::observed) {
        kvpolicy::append_draft<PackedDims>(both.device, ref, io, workspace, {.status = status.data()});
    }
    return {out.read(), lse.read(), status.read()};
}

/// A device's cache and the host's that are given packed calls, and another of the device that is given the
/// same entries in padded tensors.
template <class T, class Both>
class PackedPair {
    using P = typename std::remove_cvref_t<decltype(std::declval<Both&>().cache.layer(0))>::policy_type;

  public:
    /// `share`: how far scores and states of a device may be from the host's, relative to 1 + theirs.
    PackedPair(Both& of_packed, Both& of_padded, std::int32_t hidden_width, float share)
        : packed_(of_packed), padded_(of_padded), hidden_width_(hidden_width), share_(share) {}

    bool with_lse = true;  // whether calls of a device write it

    /// A prefill, or draft tokens of which `accepted` are taken.
    void call(Mode mode, const Pack& pack, Told told, const Numbers& accepted = {}) {
        CAPTURE(pack.most);
        const kvpolicy::CacheShape& shape = packed_.shape;
        const CallTensors<T> in(shape, pack.count(), pack.most, Scores::random, generator_, hidden_width_);
        const CallTensors<T> one_row = packed_tensors(shape, pack, in);
        const Device<std::int32_t> seq_ids(pack.seq_ids), q_len(pack.q_len), edges(pack.edges);
        kvpolicy::Batch batch{.count = pack.count(), .seq_ids = seq_ids.data()};
        const auto padded = [&] {
            kvpolicy::Batch all = batch;
            all.q_len = q_len.data();
            all.length = pack.most;
            return call_device(padded_, mode, all, in, nullptr, {pack.count(), pack.most}, with_lse);
        }();
        batch.q_len = told == Told::lengths ? q_len.data() : nullptr;
        batch.length = told == Told::nothing ? kvpolicy::Batch::not_set : pack.most;
        // Draft tokens have a most of their own.
        const std::int32_t most = told != Told::nothing        ? pack.most
                                  : mode == Mode::append_draft ? shape.max_draft_tokens
                                                               : one_row.q.length;
        const auto packed =
            call_device(packed_, mode, batch, one_row, edges.data(), {pack.count(), most}, with_lse);
        CHECK(packed.status == padded.status);
        // The size of a call chooses tiles and kernels, so bits are those of calls of one size.
        same_outputs(pack, padded, packed, told != Told::nothing);
        call_host(mode, pack, one_row, packed);
        Numbers moved = mode == Mode::append_draft ? accepted : pack.q_len;
        std::vector<std::uint32_t> status = packed.status;
        if constexpr (!P::observed) {
            if (mode == Mode::append_draft) {
                status = accept(pack, accepted);
            }
        }
        for (std::size_t i = 0; i < moved.size(); ++i) {
            moved[i] = status[i] == 0 ? moved[i] : 0;
        }
        advance(pack, moved);
        same_caches(told != Told::nothing || mode == Mode::append_draft);
    }

    /// Bits of both devices' sequences; positions, and scores near, of the host's.
    void same_caches(bool same_bits) {
        for (std::int32_t seq = 0; seq < packed_.shape.max_sequences; ++seq) {
            CAPTURE(seq);
            const bool same = blob(packed_, seq) == blob(padded_, seq);
            CHECK((same || !same_bits));
        }
        NearHost near{share_};
        packed_.near_rows(near);
        near.check();
    }

  private:
    static std::vector<unsigned char> blob(Both& both, std::int32_t seq) {
        std::vector<unsigned char> bytes(both.cache.snapshot_bytes(both.device, seq));
        both.cache.snapshot(both.device, seq, bytes.data(), bytes.size());
        return bytes;
    }
    void same_outputs(const Pack& pack, const Written<T>& padded, const Written<T>& packed, bool same_bits) {
        const kvpolicy::CacheShape& shape = packed_.shape;
        const auto dim = static_cast<std::size_t>(shape.head_dim_vo);
        const std::int32_t rows = pack.total() + rows_behind;
        std::vector<char> written(packed.lse.size(), 0);
        double worst = 0.0;
        bool same = true;
        for (std::int32_t i = 0; i < pack.count(); ++i) {
            const auto entry = static_cast<std::size_t>(i);
            for (std::int32_t h = 0; h < shape.query_heads; ++h) {
                for (std::int32_t t = 0; t < pack.q_len[entry]; ++t) {
                    const auto a = static_cast<std::size_t>((i * shape.query_heads + h) * pack.most + t),
                               b = static_cast<std::size_t>(h * rows + pack.edges[entry] + t);
                    written[b] = 1;
                    same = same && std::memcmp(&padded.lse[a], &packed.lse[b], sizeof(float)) == 0 &&
                           std::memcmp(&padded.out[a * dim], &packed.out[b * dim], dim * sizeof(T)) == 0;
                    for (std::size_t d = 0; d < dim; ++d) {
                        const double off = std::abs(OutputCheck<T>::number(padded.out[a * dim + d]) -
                                                    OutputCheck<T>::number(packed.out[b * dim + d]));
                        worst = off <= worst ? worst : std::isnan(off) ? 1e30 : off;
                    }
                }
            }
        }
        CHECK((same || !same_bits));
        CHECK(worst <= tolerance<T>(8.0));  // normal values are below 8
        bool as_before = true;
        for (std::size_t row = 0; row < written.size(); ++row) {
            as_before = as_before &&
                        (written[row] != 0 || (packed.lse[row] == untouched &&
                                               OutputCheck<T>::number(packed.out[row * dim]) == untouched));
        }
        CHECK(as_before);
    }
    void call_host(Mode mode, const Pack& pack, const CallTensors<T>& in, const Written<T>& packed) {
        const kvpolicy::CacheShape& shape = packed_.shape;
        const kvpolicy::host& ctx = packed_.ctx;
        const auto ref = packed_.oracle.cache.layer(0);
        const kvpolicy::Batch batch{pack.count(), pack.seq_ids.data(), pack.q_len.data(), pack.most};
        Tensor<T> out(1, shape.query_heads, in.q.length, shape.head_dim_vo);
        out.fill(untouched);
        Plane<float> lse(1, shape.query_heads, in.q.length, untouched);
        const ArrivingInputs<P> arriving(in);
        Extras extras, of_device;
        arriving.add(in, extras, of_device);
        extras.lse = lse.view();
        extras.cu_seqlens = pack.edges.data();
        std::vector<std::uint32_t> status(packed.status.size(), 0);
        Workspace workspace(
            kvpolicy::workspace_bytes(ctx, ref, {.batch = pack.count(), .tokens = pack.most}));
        const auto io = step_io<T>(batch, in.q.view(), in.k.view(), in.v.view(), out.view(), extras);
        if (mode == Mode::prefill) {
            kvpolicy::prefill(ctx, ref, io, workspace, {.status = status.data()});
        } else if constexpr (!P::observed) {
            kvpolicy::append_draft(ctx, ref, io, workspace, {.status = status.data()});
        }
        CHECK(status == packed.status);
        check_.compare(packed.out, out, with_lse ? packed.lse : lse.data, lse, {pack.total()}, in.v);
    }
    /// Status words, which all agree on.
    std::vector<std::uint32_t> accept(const Pack& pack, const Numbers& accepted) {
        const std::int32_t most = packed_.shape.max_draft_tokens;
        const kvpolicy::CallSize size{.batch = pack.count(), .tokens = most};
        const kvpolicy::Batch batch{pack.count(), pack.seq_ids.data(), accepted.data(), most};
        const Device<std::int32_t> seq_ids(pack.seq_ids), taken(accepted);
        const kvpolicy::Batch of_device{pack.count(), seq_ids.data(), taken.data(), most};
        std::vector<std::uint32_t> wanted(accepted.size(), 0);
        const std::vector<std::uint32_t> no_status = wanted;
        const auto host_ref = packed_.oracle.cache.layer(0);
        Workspace host_workspace(kvpolicy::workspace_bytes(packed_.ctx, host_ref, size));
        kvpolicy::accept(packed_.ctx, host_ref, batch, host_workspace, {.status = wanted.data()});
        for (Both* both : {&packed_, &padded_}) {
            const auto ref = both->cache.layer(0);
            const Device<std::uint32_t> status(no_status);
            const Device<unsigned char> workspace(
                kvpolicy::workspace_bytes<PackedDims>(both->device, ref, size));
            kvpolicy::accept<PackedDims>(both->device, ref, of_device, workspace, {.status = status.data()});
            CHECK(status.read() == wanted);
        }
        return wanted;
    }
    void advance(const Pack& pack, const Numbers& moved) {
        const std::int32_t most = std::max(pack.most, 1);
        const Device<std::int32_t> seq_ids(pack.seq_ids), tokens(moved);
        const std::vector<std::uint32_t> no_status(moved.size(), 0);
        packed_.oracle.cache.advance(packed_.ctx, {pack.count(), pack.seq_ids.data(), moved.data(), most});
        for (Both* both : {&packed_, &padded_}) {
            const Device<std::uint32_t> status(no_status);
            both->cache.advance(both->device, {pack.count(), seq_ids.data(), tokens.data(), most},
                                {.status = status.data()});
            CHECK(status.read() == no_status);
        }
    }

    Both &packed_, &padded_;
    std::int32_t hidden_width_;
    float share_;
    std::mt19937 generator_{17};
    OutputCheck<T> check_;
};

/// Sequences of the tests below, in no order.
inline constexpr std::int32_t packed_sequences = 8;

inline kvpolicy::CacheShape packed_shape(std::int32_t head_dim_qk, std::int32_t head_dim_vo) {
    return {.layers = 1,
            .max_sequences = packed_sequences,
            .query_heads = 4,
            .kv_heads = 2,
            .head_dim_qk = head_dim_qk,
            .head_dim_vo = head_dim_vo,
            .page_size = 16,
            .max_draft_tokens = 6};
}

/// Prompts, chunks behind them and draft tokens: entries around the sizes of tiles, some without a token.
template <class T, class Both>
void packed_life(Both& packed, Both& padded, std::int32_t hidden_width, float share) {
    PackedPair<T, Both> pair(packed, padded, hidden_width, share);
    const Numbers ids{3, 0, 6, 1, 7, 2, 5};
    pair.call(Mode::prefill, {ids, {0, 1, 15, 16, 17, 127, 129}}, Told::lengths);
    pair.call(Mode::prefill, {ids, {129, 17, 0, 1, 127, 15, 16}}, Told::most);
    pair.call(Mode::append_draft, {ids, {6, 1, 0, 3, 2, 5, 4}}, Told::most, {2, 1, 0, 3, 0, 5, 1});
    pair.call(Mode::prefill, {{4, 5, 0}, {17, 16, 1}}, Told::lengths);  // short: a scorer's steps
    pair.call(Mode::append_draft, {ids, {0, 6, 1, 0, 6, 0, 2}}, Told::nothing, {0, 6, 0, 0, 3, 0, 2});
    pair.call(Mode::prefill, {ids, {1, 1, 1, 0, 1, 1, 1}}, Told::lengths);
    pair.call(Mode::prefill, {ids, {16, 0, 129, 15, 1, 33, 64}}, Told::nothing);
}

}  // namespace test
