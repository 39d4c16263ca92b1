// One backward call on the device beside the host's in double: what is drawn, what is run, what may differ.
#pragma once

#include <kvpolicy/attention/attend.hpp>
#include <kvpolicy/attention/cuda/dispatch_attend_backward.cuh>

#include "../support/device.hpp"

#include <doctest/doctest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <string>
#include <vector>

namespace backward_test {

using namespace kvpolicy;
using test::Device;

inline constexpr float infinity = std::numeric_limits<float>::infinity();

template <class T>
T stored(double x) {
    if constexpr (std::is_same_v<T, double>) {
        return x;
    } else {
        return static_cast<T>(static_cast<float>(x));
    }
}
template <class T>
double widened(T x) {
    if constexpr (std::is_same_v<T, double>) {
        return x;
    } else {
        return static_cast<double>(static_cast<float>(x));
    }
}

/// A call. Empty vectors: not given. Planes are [B][Hkv][rows].
struct Case {
    std::string name;
    std::int32_t batch = 1, kv_heads = 1, group = 1, queries = 64, rows = 64, head_dim_qk = 128,
                 head_dim_vo = 128;
    std::vector<expiry_t> expiry;
    std::vector<float> log_bias;
    std::vector<std::int32_t> bias_from, position, starts, lengths, key_lengths, edges;
    std::int32_t first = 0;
    AttentionParams attention;
    bool interleaved = false;  // [batch, length, heads, dim], with a gap after every row
    double spread = 1.0;
    unsigned seed = 1;
    std::int32_t carrier = -1;  // a column of d_q that is not compared
    /// Keys [B][Hkv][rows] that hold NaN on the device, in k or (2) in v. What they give is not compared: d_q
    /// of the queries that see them, and their own gradients. Without positions, frames and packed segments.
    std::vector<std::uint8_t> spoilt;
    /// Changes q, k, v (rows [B][H][S][D], contiguous) before they are rounded.
    std::function<void(std::vector<double>&, std::vector<double>&, std::vector<double>&)> edit;

    [[nodiscard]] std::int32_t heads() const { return kv_heads * group; }
    [[nodiscard]] std::size_t planes() const {
        return static_cast<std::size_t>(batch) * static_cast<std::size_t>(kv_heads) *
               static_cast<std::size_t>(rows);
    }
    [[nodiscard]] std::int32_t length_of(std::int32_t b) const {
        return lengths.empty() ? queries : lengths[static_cast<std::size_t>(b)];
    }
    [[nodiscard]] std::int32_t keys_of(std::int32_t b) const {
        return key_lengths.empty() ? rows : key_lengths[static_cast<std::size_t>(b)];
    }
    [[nodiscard]] Sequences sequences(const std::int32_t* l, const std::int32_t* s,
                                      const std::int32_t* e) const {
        Sequences all;
        all.batch = batch;
        all.length = queries;
        all.lengths = lengths.empty() ? nullptr : l;
        all.starts = starts.empty() ? nullptr : s;
        all.cu_seqlens = edges.empty() ? nullptr : e;
        all.segments = edges.empty() ? 0 : static_cast<std::int32_t>(edges.size()) - 1;
        return all;
    }
    /// Lifetimes: some never end, some end soon, some after long, some before they began.
    void draw_expiry(std::int32_t soon, std::int32_t late) {
        std::mt19937 generator(seed + 77);
        expiry.resize(planes());
        for (std::size_t i = 0; i < expiry.size(); ++i) {
            const auto t = static_cast<std::int32_t>(i % static_cast<std::size_t>(rows)) + first;
            const unsigned kind = generator() % 8;
            expiry[i] = kind < 2   ? never
                        : kind < 5 ? t + soon
                        : kind < 7 ? t + static_cast<std::int32_t>(generator() % static_cast<unsigned>(late))
                                   : t;
        }
    }
    /// Positions in any order, below `span`, each of many rows, and lifetimes from there.
    void draw_positions(std::int32_t span) {
        std::mt19937 generator(seed + 79);
        position.resize(planes());
        expiry.resize(planes());
        for (std::size_t i = 0; i < expiry.size(); ++i) {
            position[i] = static_cast<std::int32_t>(generator() % static_cast<unsigned>(span));
            const unsigned kind = generator() % 4;
            expiry[i] = kind == 0 ? never : position[i] + static_cast<std::int32_t>(kind * 60);
        }
    }
    void draw_bias(std::int32_t from) {
        std::mt19937 generator(seed + 78);
        log_bias.resize(planes());
        for (float& x : log_bias) {
            const unsigned kind = generator() % 8;
            x = kind == 0 ? -infinity : kind == 1 ? -100.0f : -0.01f * static_cast<float>(generator() % 400);
        }
        bias_from.assign(static_cast<std::size_t>(kv_heads), from);
    }
};

/// Rows on the device, in the case's layout.
template <class T>
struct Rows {
    Device<T> memory;
    rows_view<T> view;

    static std::size_t elements(const Case& c, std::int32_t heads, std::int32_t length, std::int32_t dim) {
        const std::int64_t row = c.interleaved ? dim + 8 : dim;
        return static_cast<std::size_t>(std::int64_t{c.batch} * heads * length * row);
    }
    static rows_view<T> view_of(const Case& c, T* data, std::int32_t heads, std::int32_t length,
                                std::int32_t dim) {
        if (!c.interleaved) {
            return view_bhsd(data, c.batch, heads, length, dim);
        }
        const std::int64_t row = dim + 8;
        return {data, c.batch, heads, length, dim, row * heads * length, row, row * heads};
    }
    Rows(const Case& c, const std::vector<double>& values, std::int32_t heads, std::int32_t length,
         std::int32_t dim)
        : memory(spread(c, values, heads, length, dim)),
          view(view_of(c, memory.data(), heads, length, dim)) {}

    static std::vector<T> spread(const Case& c, const std::vector<double>& values, std::int32_t heads,
                                 std::int32_t length, std::int32_t dim) {
        std::vector<T> data(elements(c, heads, length, dim),
                            stored<T>(std::numeric_limits<double>::quiet_NaN()));
        const rows_view<T> to = view_of(c, data.data(), heads, length, dim);
        std::size_t i = 0;
        for (std::int32_t b = 0; b < c.batch; ++b) {
            for (std::int32_t h = 0; h < heads; ++h) {
                for (std::int32_t t = 0; t < length; ++t) {
                    for (std::int32_t d = 0; d < dim; ++d) {
                        to.row(b, h, t)[d] = stored<T>(values[i++]);
                    }
                }
            }
        }
        return data;
    }
    /// As [B][H][S][D], in double.
    [[nodiscard]] std::vector<double> read(const Case& c) const {
        std::vector<T> data = memory.read();
        rows_view<T> from = view;
        from.data = data.data();
        std::vector<double> values;
        for (std::int32_t b = 0; b < c.batch; ++b) {
            for (std::int32_t h = 0; h < view.heads; ++h) {
                for (std::int32_t t = 0; t < view.length; ++t) {
                    for (std::int32_t d = 0; d < view.dim; ++d) {
                        values.push_back(widened(from.row(b, h, t)[d]));
                    }
                }
            }
        }
        return values;
    }
};

/// Gradients, [B][H][S][D] each, in double.
struct Gradients {
    std::vector<double> q, k, v, bias;
};

inline constexpr double untouched = -77.0;

/// The inputs of a case, rounded to T and widened again.
template <class T>
struct Inputs {
    std::vector<double> q, k, v, d_out, out;
    std::vector<float> lse;
    std::vector<std::uint8_t> seen;  // of every key, whether a query sees it

    explicit Inputs(const Case& c) {
        std::mt19937 generator(c.seed);
        std::normal_distribution<double> normal(0.0, c.spread);
        const auto fill = [&](std::vector<double>& to, std::int64_t count) {
            to.resize(static_cast<std::size_t>(count));
            for (double& x : to) {
                x = normal(generator);
            }
        };
        const std::int64_t query_rows = std::int64_t{c.batch} * c.heads() * c.queries;
        fill(q, query_rows * c.head_dim_qk);
        fill(k, static_cast<std::int64_t>(c.planes()) * c.head_dim_qk);
        fill(v, static_cast<std::int64_t>(c.planes()) * c.head_dim_vo);
        fill(d_out, query_rows * c.head_dim_vo);
        if (c.edit) {
            c.edit(q, k, v);
        }
        for (auto* all : {&q, &k, &v, &d_out}) {
            for (double& x : *all) {
                x = widened(stored<T>(x));
            }
        }
    }
};

inline const host& oracle() {
    static const host ctx(0);
    return ctx;
}

inline kv_view<double> host_keys(const Case& c, const std::vector<double>& k, const std::vector<double>& v) {
    kv_view<double> all{view_bhsd<const double>(k.data(), c.batch, c.kv_heads, c.rows, c.head_dim_qk),
                        view_bhsd<const double>(v.data(), c.batch, c.kv_heads, c.rows, c.head_dim_vo)};
    const auto plane = [&](const auto& values) {
        return view_bhs(values.data(), c.batch, c.kv_heads, c.rows);
    };
    if (!c.expiry.empty()) {
        all.mask.expiry = plane(c.expiry);
    }
    if (!c.log_bias.empty()) {
        all.mask.log_bias = plane(c.log_bias);
    }
    if (!c.bias_from.empty()) {
        all.mask.bias_from = c.bias_from.data();
    }
    if (!c.position.empty()) {
        all.position = plane(c.position);
    }
    all.first = c.first;
    all.lengths = c.key_lengths.empty() ? nullptr : c.key_lengths.data();
    return all;
}

/// The host's gradients in double; fills in out (rounded to T) and lse.
template <class T>
Gradients expected(const Case& c, Inputs<T>& in) {
    const kv_view<double> all = host_keys(c, in.k, in.v);
    const Sequences sequences = c.sequences(c.lengths.data(), c.starts.data(), c.edges.data());
    const auto q = view_bhsd<const double>(in.q.data(), c.batch, c.heads(), c.queries, c.head_dim_qk);
    in.out.assign(in.d_out.size(), 0.0);
    in.lse.assign(static_cast<std::size_t>(std::int64_t{c.batch} * c.heads() * c.queries), 0.0f);
    const auto out = view_bhsd(in.out.data(), c.batch, c.heads(), c.queries, c.head_dim_vo);
    const auto lse = view_bhs(in.lse.data(), c.batch, c.heads(), c.queries);
    std::vector<unsigned char> memory(attend_workspace_bytes(oracle(), c.attention, q, all, sequences));
    attend(oracle(), c.attention, q, all, sequences, out, lse, {memory.data(), memory.size()});
    for (double& x : in.out) {
        x = widened(stored<T>(x));
    }
    Gradients g;
    g.q.assign(in.q.size(), untouched);
    g.k.assign(in.k.size(), untouched);
    g.v.assign(in.v.size(), untouched);
    g.bias.assign(c.log_bias.empty() ? 0 : c.planes(), untouched);
    AttentionGrads<double> grads{view_bhsd(g.q.data(), c.batch, c.heads(), c.queries, c.head_dim_qk),
                                 view_bhsd(g.k.data(), c.batch, c.kv_heads, c.rows, c.head_dim_qk),
                                 view_bhsd(g.v.data(), c.batch, c.kv_heads, c.rows, c.head_dim_vo)};
    if (!c.log_bias.empty()) {
        grads.d_log_bias = view_bhs(g.bias.data(), c.batch, c.kv_heads, c.rows);
    }
    const SavedForward<double> saved{
        out, lse, view_bhsd<const double>(in.d_out.data(), c.batch, c.heads(), c.queries, c.head_dim_vo)};
    memory.assign(attend_backward_workspace_bytes(oracle(), c.attention, q, all, sequences), 0);
    attend_backward(oracle(), c.attention, q, all, sequences, saved, grads, {memory.data(), memory.size()});
    return g;
}

/// Everything of a call in device memory.
template <class T, class Dims>
struct OnDevice {
    const Case& c;
    Rows<T> q, k, v, out, d_out, d_q, d_k, d_v;
    Device<float> lse, log_bias;
    Device<compute_t<T>> d_bias;
    Device<expiry_t> expiry;
    Device<std::int32_t> bias_from, position, starts, lengths, key_lengths, edges;
    kv_view<T> all;
    Sequences sequences;
    SavedForward<T> saved;
    AttentionGrads<T> grads;

    OnDevice(const Case& problem, const Inputs<T>& in)
        : c(problem),
          q(c, in.q, c.heads(), c.queries, c.head_dim_qk),
          k(c, in.k, c.kv_heads, c.rows, c.head_dim_qk),
          v(c, in.v, c.kv_heads, c.rows, c.head_dim_vo),
          out(c, in.out, c.heads(), c.queries, c.head_dim_vo),
          d_out(c, in.d_out, c.heads(), c.queries, c.head_dim_vo),
          d_q(c, std::vector<double>(in.q.size(), untouched), c.heads(), c.queries, c.head_dim_qk),
          d_k(c, std::vector<double>(in.k.size(), untouched), c.kv_heads, c.rows, c.head_dim_qk),
          d_v(c, std::vector<double>(in.v.size(), untouched), c.kv_heads, c.rows, c.head_dim_vo),
          lse(in.lse),
          log_bias(c.log_bias),
          d_bias(std::vector<compute_t<T>>(c.log_bias.size(), static_cast<compute_t<T>>(untouched))),
          expiry(c.expiry),
          bias_from(c.bias_from),
          position(c.position),
          starts(c.starts),
          lengths(c.lengths),
          key_lengths(c.key_lengths),
          edges(c.edges),
          all{q.view, q.view},
          sequences(c.sequences(lengths.data(), starts.data(), edges.data())) {
        all = kv_view<T>{k.view, v.view};
        const auto plane = [&](auto* data) { return view_bhs(data, c.batch, c.kv_heads, c.rows); };
        if (!c.expiry.empty()) {
            all.mask.expiry = plane(static_cast<const expiry_t*>(expiry.data()));
        }
        if (!c.log_bias.empty()) {
            all.mask.log_bias = plane(static_cast<const float*>(log_bias.data()));
            grads.d_log_bias = plane(d_bias.data());
        }
        if (!c.bias_from.empty()) {
            all.mask.bias_from = bias_from.data();
        }
        if (!c.position.empty()) {
            all.position = plane(static_cast<const std::int32_t*>(position.data()));
        }
        all.first = c.first;
        all.lengths = c.key_lengths.empty() ? nullptr : key_lengths.data();
        saved = {out.view, view_bhs<const float>(lse.data(), c.batch, c.heads(), c.queries), d_out.view};
        grads.d_q = d_q.view;
        grads.d_k = d_k.view;
        grads.d_v = d_v.view;
    }

    [[nodiscard]] std::size_t bytes(const BackwardOptions& options) const {
        return attend_backward_workspace_bytes<T, Dims>(kvpolicy::cuda{}, c.attention, q.view, all, sequences,
                                                        options);
    }
    void run(const kvpolicy::cuda& ctx, const BackwardOptions& options, workspace_view workspace) const {
        attend_backward<T, Dims>(ctx, c.attention, q.view, all, sequences, saved, grads, workspace, options);
    }
    [[nodiscard]] Gradients read() const {
        Gradients g{d_q.read(c), d_k.read(c), d_v.read(c), {}};
        for (const auto x : d_bias.read()) {
            g.bias.push_back(static_cast<double>(x));
        }
        return g;
    }
};

/// Relative error in the norm of a whole tensor, over the rows that count; rows beyond must be untouched.
/// `dim` numbers a row.
inline void compare(const std::string& what, const std::vector<double>& got,
                    const std::vector<double>& wanted, double tolerance, double absolute) {
    double error = 0.0, size = 0.0;
    std::size_t bad = 0, first_bad = 0, worst = 0;
    double worst_error = -1.0;
    for (std::size_t i = 0; i < got.size(); ++i) {
        const bool spared = wanted[i] == untouched;
        const bool wrong = spared ? got[i] != untouched : !(std::fabs(got[i]) < 1e30);
        if (wrong) {
            first_bad = bad == 0 ? i : first_bad;
            ++bad;
        } else if (!spared) {
            const double e = std::fabs(got[i] - wanted[i]);
            error += e * e;
            size += wanted[i] * wanted[i];
            if (e > worst_error) {
                worst_error = e;
                worst = i;
            }
        }
    }
    const double limit = tolerance * std::sqrt(size) + absolute * std::sqrt(static_cast<double>(got.size()));
    const double relative = size > 0.0 ? std::sqrt(error / size) : std::sqrt(error);
    CHECK_MESSAGE(bad == 0, what, ": ", bad, " of ", got.size(), " bad, the first at ", first_bad, ": ",
                  bad == 0 ? 0.0 : got[first_bad], " for ", bad == 0 ? 0.0 : wanted[first_bad]);
    CHECK_MESSAGE(std::sqrt(error) <= limit, what, ": relative error ", relative, "; the worst at ", worst,
                  ": ", got.empty() ? 0.0 : got[worst], " for ", got.empty() ? 0.0 : wanted[worst]);
}

/// What a result may differ by, relative to its norm. Weights and gradients of logits are rounded to T before
/// they are multiplied, and so is the result: three roundings of at most u = 2^-9 (bf16) or 2^-12 (fp16) of
/// each number, of mean square u / sqrt(3), independent over keys and queries: sqrt(3) u / sqrt(3) = u in the
/// norm. P (dP - delta) also has delta's error, from out as stored, but the oracle is given the same out.
/// Twice that, 2^-8 < 8e-3, leaves space for exp2 and sums in fp32.
template <class T>
constexpr double tolerance() {
    return std::is_same_v<T, bf16>
               ? 0x1p-8
               : (std::is_same_v<T, fp16> ? 0x1p-10 : (std::is_same_v<T, float> ? 2e-5 : 1e-6));
}

/// `absolute`, in the root of the mean square, is for gradients that cancel: <d_out, v> - delta is off by
/// about 1e-6 in fp32, and up to some thousand of these are added up.
struct Tolerance {
    double relative, absolute = 1e-4, bias = 1e-2;
};

/// NaN into the spoilt keys.
template <class T>
void spoil(const Case& c, Inputs<T>& in) {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    for (std::size_t t = 0; t < c.spoilt.size(); ++t) {
        std::vector<double>& rows = c.spoilt[t] == 2 ? in.v : in.k;
        const auto dim = static_cast<std::size_t>(c.spoilt[t] == 2 ? c.head_dim_vo : c.head_dim_qk);
        std::fill_n(rows.begin() + static_cast<std::ptrdiff_t>(t * dim), c.spoilt[t] == 0 ? 0 : dim, nan);
    }
}

/// Replaces what spoilt keys give by what is wanted.
inline void forgive(const Case& c, Gradients& got, const Gradients& wanted) {
    const auto replace = [](std::vector<double>& to, const std::vector<double>& from, std::size_t row,
                            std::int32_t dim) {
        const auto first = static_cast<std::ptrdiff_t>(row) * dim;
        std::copy_n(from.begin() + first, dim, to.begin() + first);
    };
    for (std::size_t t = 0; t < c.spoilt.size(); ++t) {
        if (c.spoilt[t] == 0) {
            continue;
        }
        replace(got.k, wanted.k, t, c.head_dim_qk);
        replace(got.v, wanted.v, t, c.head_dim_vo);
        if (!got.bias.empty()) {
            got.bias[t] = wanted.bias[t];
        }
        const auto rows = static_cast<std::size_t>(c.rows);
        const auto key = static_cast<std::int32_t>(t % rows);
        for (std::int32_t q = key; q < c.queries && (c.expiry.empty() || q < c.expiry[t]); ++q) {
            for (std::int32_t g = 0; g < c.group; ++g) {
                const std::size_t head =
                    t / rows * static_cast<std::size_t>(c.group) + static_cast<std::size_t>(g);
                replace(got.q, wanted.q,
                        head * static_cast<std::size_t>(c.queries) + static_cast<std::size_t>(q),
                        c.head_dim_qk);
            }
        }
    }
}

/// Device against host, on both paths and in both orders.
template <class T, class Dims = head_dims<128>>
void check_case(const Case& c, Tolerance allowed = {tolerance<T>()}) {
    Inputs<T> in(c);
    const Gradients wanted = expected(c, in);
    spoil(c, in);
    for (const BackwardOptions options : {BackwardOptions{false, true}, BackwardOptions{true, true},
                                          BackwardOptions{false, false}, BackwardOptions{true, false}}) {
        if (sizeof(T) > 2 && (options.deterministic || options.portable)) {
            continue;
        }
        const OnDevice<T, Dims> call(c, in);
        const Device<unsigned char> workspace(call.bytes(options));
        call.run({}, options, workspace);
        Gradients got = call.read();
        for (std::size_t i = 0; c.carrier >= 0 && i < got.q.size(); ++i) {
            if (static_cast<std::int32_t>(i % static_cast<std::size_t>(c.head_dim_qk)) == c.carrier) {
                got.q[i] = wanted.q[i];
            }
        }
        forgive(c, got, wanted);
        const std::string name = c.name + (options.portable ? ", portable" : "") +
                                 (options.deterministic ? ", deterministic" : "");
        compare(name + ", d_q", got.q, wanted.q, allowed.relative, allowed.absolute);
        compare(name + ", d_k", got.k, wanted.k, allowed.relative, allowed.absolute);
        compare(name + ", d_v", got.v, wanted.v, allowed.relative, allowed.absolute);
        compare(name + ", d_log_bias", got.bias, wanted.bias, allowed.bias, allowed.absolute);
    }
}

}  // namespace backward_test
