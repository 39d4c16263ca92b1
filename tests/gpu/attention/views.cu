// Attention of views that are not packed tensors: rows, heads or sequences that share memory, and rows that
// lie gigabytes apart. The numbers are those of packed copies.
#include <kvpolicy/cuda.cuh>

#include "../../support/refusal.hpp"
#include "../support/device.hpp"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

using namespace kvpolicy;
using namespace test;

namespace {

using Dims = head_dims<128>;
constexpr std::int32_t batch = 2, kv_heads = 2, group = 3, heads = kv_heads * group, dim = 128;

template <class T>
__global__ void copy_rows(rows_view<T> to, rows_view<const T> from) {
    const auto i = static_cast<std::int32_t>(blockIdx.x);
    const std::int32_t t = i % to.length, h = i / to.length % to.heads, b = i / to.length / to.heads;
    to.row(b, h, t)[threadIdx.x] = from.row(b, h, t)[threadIdx.x];
}

/// Packed copies of rows, and back.
template <class T>
struct Packed {
    Device<T> memory;
    rows_view<T> view;
    explicit Packed(const rows_view<const T>& from) : Packed(from.heads, from.length) { take(from); }
    Packed(std::int32_t of_heads, std::int32_t length)
        : memory(std::size_t{batch} * static_cast<std::size_t>(of_heads * length * dim)),
          view(view_bhsd(memory.data(), batch, of_heads, length, dim)) {}
    void take(const rows_view<const T>& from) const {
        copy_rows<T><<<static_cast<unsigned>(batch * view.heads * view.length), dim>>>(view, from);
        ok(cudaGetLastError());
    }
};

/// Rows that the call reads or writes, in a layout.
struct Tensors {
    rows_view<bf16> q, k, v, d_out, out, d_q, d_k, d_v;
};

/// The largest difference, relative to the largest number.
template <class T>
double difference(const std::vector<T>& a, const std::vector<T>& b) {
    double most = 0.0, off = 0.0;
    for (std::size_t i = 0; i < a.size(); ++i) {
        const double x = static_cast<double>(static_cast<float>(a[i])),
                     y = static_cast<double>(static_cast<float>(b[i]));
        const double d = x == y ? 0.0 : std::abs(x - y);
        off = d <= off ? off : d == d ? d : 1e30;
        most = std::max(most, std::abs(y));
    }
    return off / std::max(most, 1e-30);
}

struct Lifetimes {
    Device<expiry_t> expiry;
    static std::vector<expiry_t> drawn(std::int32_t length) {
        std::mt19937 generator(4);
        std::vector<expiry_t> all;
        for (std::int32_t i = 0; i < batch * kv_heads * length; ++i) {
            const std::int32_t t = i % length;
            all.push_back(
                t < 3 ? never
                      : t + 40 + (generator() % 3 == 0 ? static_cast<std::int32_t>(generator() % 300) : 0));
        }
        return all;
    }
    explicit Lifetimes(std::int32_t length) : expiry(drawn(length)) {}
};

struct Results {
    std::vector<bf16> out, d_q, d_k, d_v;
    std::vector<float> lse, dense, target;
};

/// Everything that attention computes, of tensors in some layout; `masked`: with lifetimes, else dense.
Results everything(const Tensors& in, const Device<expiry_t>& expiry, bool masked, bool portable) {
    const std::int32_t length = in.q.length;
    const kvpolicy::cuda ctx{};
    const Sequences sequences{batch, length};
    kv_view<bf16> all{in.k, in.v, {}};
    if (masked) {
        all.mask.expiry = view_bhs<const expiry_t>(expiry.data(), batch, kv_heads, length);
    }
    const std::size_t numbers = std::size_t{batch} * heads * static_cast<std::size_t>(length);
    const Device<float> lse(numbers), dense(numbers),
        target(std::size_t{batch} * kv_heads * static_cast<std::size_t>(length));
    const auto lse_view = view_bhs(lse.data(), batch, heads, length),
               dense_view = view_bhs(dense.data(), batch, heads, length);
    AttendOptions options;
    options.portable = portable;
    {
        const Device<unsigned char> workspace(
            attend_workspace_bytes<bf16, Dims>(ctx, {}, in.q, all, sequences, options));
        attend<bf16, Dims>(ctx, {}, in.q, all, sequences, in.out, lse_view, workspace, options);
    }
    BackwardOptions backward;
    backward.deterministic = true;
    backward.portable = portable;
    {
        const Device<unsigned char> workspace(
            attend_backward_workspace_bytes<bf16, Dims>(ctx, {}, in.q, all, sequences, backward));
        attend_backward<bf16, Dims>(ctx, {}, in.q, all, sequences, {in.out, lse_view, in.d_out},
                                    {in.d_q, in.d_k, in.d_v}, workspace, backward);
    }
    const Device<unsigned char> workspace(future_mass_workspace_bytes<bf16>(ctx, in.q, in.k));
    causal_lse<bf16, Dims>(ctx, {}, in.q, in.k, sequences, dense_view, workspace);
    FutureMassOptions of;
    of.window = 40;
    future_mass<bf16, Dims>(ctx, {}, in.q, in.k, dense_view, sequences,
                            view_bhs(target.data(), batch, kv_heads, length), workspace, of);
    ok(cudaDeviceSynchronize());
    return {Packed<bf16>(in.out).memory.read(),
            Packed<bf16>(in.d_q).memory.read(),
            Packed<bf16>(in.d_k).memory.read(),
            Packed<bf16>(in.d_v).memory.read(),
            lse.read(),
            dense.read(),
            target.read()};
}

void same(const Results& got, const Results& wanted, const std::string& what) {
    CAPTURE(what);
    // Views that TMA cannot read take other kernels: two roundings to 16 bits.
    CHECK(difference(got.out, wanted.out) < 0x1p-7);
    CHECK(difference(got.d_q, wanted.d_q) < 0x1p-6);
    CHECK(difference(got.d_k, wanted.d_k) < 0x1p-6);
    CHECK(difference(got.d_v, wanted.d_v) < 0x1p-6);
    CHECK(difference(got.lse, wanted.lse) < 1e-4);
    CHECK(difference(got.dense, wanted.dense) < 1e-4);
    CHECK(difference(got.target, wanted.target) < 1e-3);
}

void fill(const rows_view<bf16>& rows, unsigned seed) {
    std::mt19937 generator(seed);
    std::normal_distribution<float> normal;
    std::vector<bf16> numbers(std::size_t{batch} * static_cast<std::size_t>(rows.heads * rows.length * dim));
    for (bf16& x : numbers) {
        x = bf16(normal(generator));
    }
    const Device<bf16> packed(numbers);
    copy_rows<bf16><<<static_cast<unsigned>(batch * rows.heads * rows.length), dim>>>(
        rows, view_bhsd<const bf16>(packed.data(), batch, rows.heads, rows.length, dim));
    ok(cudaDeviceSynchronize());
}

/// The call in the layout and of packed copies, every way.
void check(const Tensors& in, const std::string& what) {
    const std::int32_t length = in.q.length;
    const Lifetimes lives(length);
    const Packed<bf16> q(in.q), k(in.k), v(in.v), d_out(in.d_out), out(heads, length), d_q(heads, length),
        d_k(kv_heads, length), d_v(kv_heads, length);
    const Tensors packed{q.view, k.view, v.view, d_out.view, out.view, d_q.view, d_k.view, d_v.view};
    for (const bool masked : {true, false}) {
        for (const bool portable : {false, true}) {
            same(everything(in, lives.expiry, masked, portable),
                 everything(packed, lives.expiry, masked, portable),
                 what + (masked ? ", masked" : ", dense") + (portable ? ", portable" : ""));
        }
    }
}

/// Packed tensors of their own.
struct Memory {
    Packed<bf16> q, k, v, d_out, out, d_q, d_k, d_v;
    explicit Memory(std::int32_t length)
        : q(heads, length),
          k(kv_heads, length),
          v(kv_heads, length),
          d_out(heads, length),
          out(heads, length),
          d_q(heads, length),
          d_k(kv_heads, length),
          d_v(kv_heads, length) {
        fill(q.view, 1);
        fill(k.view, 2);
        fill(v.view, 3);
        fill(d_out.view, 4);
    }
    [[nodiscard]] Tensors tensors() const {
        return {q.view, k.view, v.view, d_out.view, out.view, d_q.view, d_k.view, d_v.view};
    }
};

/// check() of tensors that next(heads) gives views of, one after the other.
template <class Next>
void check_views(const Next& next, const std::string& what) {
    const Tensors in{next(heads), next(kv_heads), next(kv_heads), next(heads),
                     next(heads), next(heads),    next(kv_heads), next(kv_heads)};
    fill(in.q, 1);
    fill(in.k, 2);
    fill(in.v, 3);
    fill(in.d_out, 4);
    check(in, what);
}

}  // namespace

TEST_CASE("inputs that heads and sequences share, with strides of 0") {
    const Memory memory(300);
    Tensors in = memory.tensors();
    in.k.head_stride = in.v.head_stride = 0;
    check(in, "keys of one head");
    in.k.batch_stride = in.v.batch_stride = 0;
    check(in, "keys of one head of one sequence");
    in = memory.tensors();
    in.q.batch_stride = in.d_out.batch_stride = 0;
    check(in, "queries of one sequence");
    in.q.head_stride = in.d_out.head_stride = 0;
    check(in, "queries of one head");
    in.q.row_stride = in.d_out.row_stride = in.v.row_stride = 0;
    check(in, "one query, one value");
    in = memory.tensors();
    in.k.row_stride = 0;
    CHECK_REFUSED(everything(in, Lifetimes(300).expiry, true, false), "keys.k.row_stride");
    using Member = rows_view<bf16> Tensors::*;
    for (const Member output : {&Tensors::out, &Tensors::d_q, &Tensors::d_k, &Tensors::d_v}) {
        Tensors shared = memory.tensors();
        (shared.*output).head_stride = 0;
        CHECK_REFUSED(everything(shared, Lifetimes(300).expiry, true, false), "a head stride of 0");
    }
}

TEST_CASE("rows that lie 16 MB apart, the last beyond 2^32 numbers") {
    constexpr std::int64_t row = std::int64_t{1} << 23;
    constexpr std::int32_t length = 600;
    const Device<bf16> pool(static_cast<std::size_t>(row) * length);
    std::int64_t at = 0;
    const auto next = [&](std::int32_t of_heads) {  // [S, B, H, D]
        const rows_view<bf16> view{
            pool.data() + at, batch, of_heads, length, dim, std::int64_t{of_heads} * dim, dim, row};
        at += std::int64_t{batch} * of_heads * dim;
        return view;
    };
    check_views(next, "rows far apart");
}

TEST_CASE("sequences that lie 8 GB apart, and heads") {
    constexpr std::int64_t far = (std::int64_t{1} << 32) + 8;
    constexpr std::int32_t length = 200;
    const Device<bf16> pool(static_cast<std::size_t>(far) + (std::size_t{1} << 23));
    for (const bool of_heads : {false, true}) {
        std::int64_t at = 0;
        const auto next = [&](std::int32_t n) {
            const std::int64_t each = std::int64_t{length} * dim;
            // Heads far apart where there are two of them; the queries' lie together.
            const bool apart = of_heads && n == kv_heads;
            const rows_view<bf16> view{pool.data() + at,   batch, n, length, dim, apart ? each : far,
                                       apart ? far : each, dim};
            at += each * batch * n;
            return view;
        };
        check_views(next, of_heads ? "heads far apart" : "sequences far apart");
    }
}

TEST_CASE("no work, with no workspace") {
    const kvpolicy::cuda ctx{};
    for (const auto& [b, s] : {std::pair<std::int32_t, std::int32_t>{0, 5}, {1, 0}, {0, 0}}) {
        CAPTURE(b);
        CAPTURE(s);
        const auto rows = [&, b = b, s = s](std::int32_t n) {
            return view_bhsd(static_cast<bf16*>(nullptr), b, n, s, dim);
        };
        const Sequences sequences{b, s};
        const kv_view<bf16> all{rows(kv_heads), rows(kv_heads), {}};
        const auto lse = view_bhs(static_cast<float*>(nullptr), b, heads, s);
        const Device<unsigned char> workspace(std::size_t{1} << 20);
        attend<bf16, Dims>(ctx, {}, rows(heads), all, sequences, rows(heads), lse, workspace);
        attend_backward<bf16, Dims>(ctx, {}, rows(heads), all, sequences, {rows(heads), lse, rows(heads)},
                                    {rows(heads), rows(kv_heads), rows(kv_heads)}, workspace);
        causal_lse<bf16, Dims>(ctx, {}, rows(heads), rows(kv_heads), sequences, lse, workspace);
        FutureMassOptions of;
        of.window = 3;
        future_mass<bf16, Dims>(ctx, {}, rows(heads), rows(kv_heads), lse, sequences,
                                view_bhs(static_cast<float*>(nullptr), b, kv_heads, s), workspace, of);
        ok(cudaDeviceSynchronize());
    }
}
